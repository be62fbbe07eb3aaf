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
import importlib, json, os, pkgutil, resource, sys
import ckpttool, h5py
from ckpttool.cli import run
for module in pkgutil.walk_packages(ckpttool.__path__, "ckpttool."):
    if ".predict" not in module.name and "__main__" not in module.name:
        importlib.import_module(module.name)  # once, and not in each child
ends = {{}}
for arguments in json.loads(sys.argv[1]):
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
SLOW = {
    "huge_pickle.pth", "lists.pkl", "tuples.pkl", "model.pdparams", "dcp/.metadata", "few.index",
    "shapes.npz", "graph.index", "linked_long.h5", "linked_long.weights.h5", "escaped.index", "deep.pkl",
    "zeros.keras", "wide.keras", "records.pth", "code.pt", "declared.weights.h5", "many_attributes.h5",
    "graphs/saved_model.pb", "declared.h5",
}  # fmt: skip
"""Bombs that take long to be written or looked at; of each kind, others don't."""
assert BOMBS.keys() >= SLOW


@pytest.mark.skipif(sys.platform != "linux", reason="memory can be limited on Linux only")
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(BOMBS.keys() - SLOW, id="short"),
        pytest.param(SLOW, id="long", marks=pytest.mark.thorough),
    ],
)
def test_no_bomb_goes_off(names: set[str], tmp_path: Path) -> None:
    pytest.importorskip("h5py")
    root = tmp_path / "bombs"
    paths = write_all(root, sorted(names))
    sizes = {path: sum(one.stat().st_size for one in path.parent.iterdir()) for path in paths}
    assert {path.name: size for path, size in sizes.items() if size > MOST_BYTES} == {}
    commands = [["verify", str(one)] for one in sorted(root.iterdir())]
    commands += [["inspect", str(path)] for path in paths[::5]]
    done = python("-c", RUN, json.dumps(commands), tmp_path / "said", timeout=600)
    assert done.returncode == 0, done.stderr
    ends = json.loads(done.stdout)
    assert len(ends) == len(commands)
    wrong = {command: end for command, end in ends.items() if end[0] not in (0, 1, 2) or any(end[1:])}
    assert wrong == {}
