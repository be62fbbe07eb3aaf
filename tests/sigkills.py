"""SIGKILL at random moments of prune, rename and undo, by hand, over the multi-file formats.

Usage: ``python -m tests.sigkills [KILLS [SEED]]``, in the project's directory. After each kill the next
command runs, a prune that keeps everything; it ends with status 1 as soon as a checkpoint is then not whole
in exactly one place, or something points at what is not there.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tests.support.outcomes import Change, change, stages, wrong
from tests.support.renamings import content
from tests.support.runs import KINDS

NUMBERS = range(1, 9)
KEPT = 3
AT_ANY_TIME = 0.2
"""How many of the kills don't wait until the command has begun to change something."""

PRUNE = ("prune", "--min-age", "0", "--yes", "--series", "*", "--keep")
COMMANDS = {
    "prune": (*PRUNE, str(KEPT)),
    "prune --trash": (*PRUNE, str(KEPT), "--trash"),
    "rename": ("rename", "--yes", "--template"),
    "undo": ("undo",),
}
UNDONE = ("prune --trash", "rename")
NEXT = (*PRUNE, "1000")


def ckpttool(run: Path, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, in the directory above."""
    return subprocess.run(
        _command(run, arguments), cwd=run.parent, capture_output=True, text=True, check=False
    )


def _command(run: Path, arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "ckpttool", arguments[0], run.name, *arguments[1:]]


# What comes of it -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """A command on a kind of directory, with how many seconds it takes, and changes something meanwhile."""

    change: Change
    seconds: float
    changing: float


def ways(directory: Path) -> Iterator[Way]:
    """Yield all commands on all kinds, with how long each takes."""
    for number, (kind, (make, field)) in enumerate(KINDS.items()):
        made = directory / str(number) / "made" / "run"
        made.mkdir(parents=True)
        make(made, NUMBERS)
        commands = {**COMMANDS, "rename": (*COMMANDS["rename"], f"kept-{{{field}}}")}
        for command in commands:
            for prepared in UNDONE if command == "undo" else (None,):
                if field is None and "rename" in (command, prepared):
                    continue
                told = f"{command} {prepared}" if prepared else command
                before = _copied(made, directory / str(number) / told)
                if prepared is not None:
                    _require_success(ckpttool(before, commands[prepared]))
                yield _way(f"{kind}: {told}", commands[command], before, made)


def _require_success(done: subprocess.CompletedProcess[str]) -> None:
    if done.returncode:
        sys.exit(f"{' '.join(done.args)}: status {done.returncode}: {done.stderr}")


def _way(name: str, arguments: Sequence[str], before: Path, made: Path) -> Way:
    after = _copied(before, before.parent.parent / "after")
    begun = time.monotonic()
    process = _started(after, arguments)
    start = _until(process, lambda: bool(stages(after)))
    changing = _until(process, lambda: not stages(after)) - start
    if process.wait():
        _require_success(ckpttool(_copied(before, after.parent), arguments))
    seconds = time.monotonic() - begun
    if content(after) == content(before):
        sys.exit(f"{name}: it changes nothing, so that no kill can do harm")
    return Way(change(name, arguments, made, before, after), seconds, changing)


def _started(run: Path, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
    null = subprocess.DEVNULL
    return subprocess.Popen(_command(run, arguments), cwd=run.parent, stdout=null, stderr=null)


def _copied(run: Path, place: Path) -> Path:
    """Return a copy of a run with all that is beside it, in a directory of its own."""
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(run.parent, place, symlinks=True)
    return place / "run"


def _until(process: subprocess.Popen[bytes], has_come: Callable[[], bool]) -> float:
    """Return when something has come, or a command has ended."""
    while process.poll() is None and not has_come():
        time.sleep(0.0005)
    return time.monotonic()


def killed(way: Way, place: Path, random: Random, seen: Counter[str]) -> str | None:
    """Kill a command at a random moment; return what is wrong after the next one, or None."""
    run = _copied(way.change.before, place)
    process = _started(run, way.change.arguments)
    if random.random() < AT_ANY_TIME:
        time.sleep(random.uniform(0, way.seconds))
    else:
        _until(process, lambda: bool(stages(run)))
        time.sleep(random.uniform(0, way.changing))
    process.kill()
    process.wait()
    done = ckpttool(run, NEXT)
    seen[way.change.name] += 1
    seen["in the midst of it"] += "interrupted" in done.stderr
    if done.returncode:
        return f"the next command ends with {done.returncode}: {done.stderr}"
    return next(wrong(way.change, run), None)


def main(kills: int, seed: int) -> int:
    """Kill so many commands; print what was seen."""
    random = Random(seed)
    seen: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        all_ways = list(ways(directory))
        for number in range(kills):
            way = all_ways[number % len(all_ways)]
            told = killed(way, directory / "killed", random, seen)
            if told is not None:
                print(f"kill {number} ({way.change.name}): {told}")
                return 1
    print(f"{kills} kills, seed {seed}; nothing was lost:")
    for name, count in sorted(seen.items()):
        print(f"{count:5}  {name}")
    return 0


if __name__ == "__main__":
    given = [int(argument) for argument in sys.argv[1:]]
    sys.exit(main(*(given + [500, 0][len(given) :])))
