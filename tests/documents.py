"""Compares what commands say of every fixture with what they said at an earlier commit, byte by byte.

Usage: ``python -m tests.documents REV``. A change of the structure changes no document: ``inspect``,
``verify``, ``list``, ``prune --dry-run`` and ``diff`` run in both trees, on the same copy of the fixtures.
"""

from __future__ import annotations

import contextlib
import difflib
import io
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.benchmarks.earlier import earlier_tree

ROOT = Path(__file__).parents[1]
SHOWN = 20
"""How many documents that differ are shown, and how many lines of each."""


def commands(files: Path) -> Iterator[list[str]]:
    """Yield the commands for each fixture and each directory of them, with relative paths."""
    for directory in sorted(path for path in (files, *files.rglob("*")) if path.is_dir()):
        name = os.path.relpath(directory, files)
        yield ["list", "--json", name]
        yield ["prune", "--dry-run", "--json", "--keep", "1", "--min-age", "0", name]
    targets = sorted(path for kind in files.iterdir() if kind.is_dir() for path in kind.iterdir())
    names = [os.path.relpath(path, files) for path in targets if not path.name.endswith(".expected.json")]
    for name in names:
        yield ["inspect", "--json", name]
        yield ["verify", "--json", name]
    for a, b in itertools.pairwise(names):
        yield ["diff", "--json", a, b]


def answer(files: str, result: str) -> None:
    """Run the commands in this process, in the copy of the fixtures, and write what each answered."""
    from ckpttool.cli import run

    os.chdir(files)
    answers = {}
    for command in commands(Path()):
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = run(command)
        answers[" ".join(command)] = f"{out.getvalue()}{err.getvalue()}exit {status}\n"
    Path(result).write_text(json.dumps(answers), encoding="utf-8")


def main() -> int:
    """Ask both trees, and show what differs."""
    if len(sys.argv) == 4:
        answer(*sys.argv[2:])
        return 0
    with tempfile.TemporaryDirectory() as folder, earlier_tree(sys.argv[1]) as earlier:
        files = Path(folder) / "files"
        shutil.copytree(ROOT / "fixtures" / "files", files)
        started = []
        for name, tree in (("before", earlier), ("after", ROOT)):
            environment = {
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(tree), str(ROOT)]),
                "XDG_STATE_HOME": str(Path(folder) / name),
                "COLUMNS": "100",
            }
            command = [sys.executable, "-m", "tests.documents", "answer", str(files), f"{folder}/{name}.json"]
            started.append(subprocess.Popen(command, env=environment, cwd=folder))
        if any([one.wait() for one in started]):
            return 1
        before, after = (
            json.loads((Path(folder) / f"{name}.json").read_text("utf-8")) for name in ("before", "after")
        )
    changed = [name for name in after if before.get(name) != after[name]]
    for name in changed[:SHOWN]:
        lines = difflib.unified_diff(
            before.get(name, "").splitlines(), after[name].splitlines(), "before", "after", lineterm="", n=1
        )
        print(f"$ ckpttool {name}", *itertools.islice(lines, 2, SHOWN), sep="\n")
    print(f"{len(after):,} documents, {len(changed):,} differ")
    return int(bool(changed))


if __name__ == "__main__":
    sys.exit(main())
