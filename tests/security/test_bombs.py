"""No file of less than 1 MB takes more than 1 GB of memory or 10 seconds of a processor."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.security.bombs import BOMBS, MOST_BYTES, write_all
from tests.support.commands import python

MEMORY = 1 << 30
SECONDS = 10
RUN = f"""
import json, os, resource, sys
from ckpttool.cli import run
ends = {{}}
for number, arguments in enumerate(json.loads(sys.argv[1])):
    child = os.fork()
    if not child:
        out = os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1), os.dup2(out, 2)
        resource.setrlimit(resource.RLIMIT_AS, ({MEMORY},) * 2)
        resource.setrlimit(resource.RLIMIT_CPU, ({SECONDS},) * 2)
        status = run(arguments)
        sys.stdout.flush()
        os._exit(status)
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    said = open(sys.argv[2], errors="replace").read()
    lacks_memory = "out-of-memory" in said or "enough memory" in said
    ends[" ".join(arguments)] = ended, "internal error" in said, lacks_memory
print(json.dumps(ends))
"""
"""Runs commands, each in a child with limits of its own; prints how each ended."""


@pytest.fixture(scope="module")
def bombs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    pytest.importorskip("h5py")
    return write_all(tmp_path_factory.mktemp("bombs"))


def test_every_bomb_is_small(bombs: list[Path]) -> None:
    assert len(bombs) == len(BOMBS)
    large = [
        path.name for path in bombs if sum(one.stat().st_size for one in path.parent.iterdir()) > MOST_BYTES
    ]
    assert large == []


@pytest.mark.skipif(sys.platform != "linux", reason="memory can be limited on Linux only")
def test_no_bomb_goes_off(bombs: list[Path], tmp_path: Path) -> None:
    root = bombs[0].parents[1] if "/" not in next(iter(BOMBS)) else bombs[0].parents[2]
    commands = [["verify", str(one)] for one in sorted(root.iterdir())]
    commands += [["inspect", str(path)] for path in bombs[::5]]
    done = python("-c", RUN, json.dumps(commands), tmp_path / "said", timeout=600)
    assert done.returncode == 0, done.stderr
    ends = json.loads(done.stdout)
    assert len(ends) == len(commands)
    wrong = {command: end for command, end in ends.items() if end[0] not in (0, 1, 2) or any(end[1:])}
    assert wrong == {}
