"""Directories of many runs: how long it takes to find their checkpoints, and to plan what becomes of them."""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import partial
from pathlib import Path

from tests.benchmarks import data, peers
from tests.benchmarks.claims import PYTHON, Claim, Group, MakeGroup, Scale, peer_command
from tests.benchmarks.measure import Command

_FIND = """
import pickle, sys
from ckpttool.runs.survey import survey_directory
found = survey_directory(sys.argv[1])
if len(sys.argv) > 2:
    with open(sys.argv[2], "wb") as file:
        pickle.dump(found, file)
"""
_PLAN = """
import gc, pickle, sys
gc.disable()
from ckpttool.runs.pruning import planning
from ckpttool.runs.retention.rules import Policy
with open(sys.argv[1] + ".found", "rb") as file:
    found = pickle.load(file)
policy = Policy(keep_last=3, keep_best=2, metric="loss", mode="min", keep_every_epochs=25, keep_weekly=4)
request = planning.PruneRequest(directory=sys.argv[1], policy=policy, recursive=True, depth="quick")
planned = planning.make_plan(request, known=found)
assert len(planned.plan.groups) == int(sys.argv[2]), planned
"""

_HOUR = 3600


def retention(folder: Path, scale: Scale) -> Group:
    """Measure finding and planning apart; a plan reads none of the checkpoints, and follows all pointers."""
    runs, epochs = (100, 100) if scale.times is not None else (10, 10)
    half, whole = folder / "half", folder / "whole"
    for tree, count in ((half, runs // 2), (whole, runs)):
        _write_runs(tree, count, epochs)
        subprocess.run([PYTHON, "-c", _FIND, tree, f"{tree}.found"], check=True)
    commands = (
        Command("find", (PYTHON, "-c", _FIND, str(whole))),
        peer_command("torch.load of each", peers.LIST_DIRECTORY, whole),
        Command("plan half", (PYTHON, "-c", _PLAN, str(half), str(runs // 2))),
        Command("plan", (PYTHON, "-c", _PLAN, str(whole), str(runs))),
    )
    total = runs * epochs
    job = f"{total:,} checkpoints in {runs} runs"
    claims = (
        Claim(f"find {job}", "find", "torch.load of each", ratio=1.65),
        Claim(f"plan {job}", "plan", "find", ratio=0.055),
        Claim(f"plan {job} instead of {total // 2:,}", "plan", "plan half", ratio=2.2),
    )
    return Group(commands, claims)


def growth(folder: Path, scale: Scale) -> Group:
    """Measure commands over many runs beside ``list``, which looks at each once, or over half of them."""
    runs, epochs = (200, 20) if scale.times is not None else (10, 10)
    tree, trashed, emptied = folder / "runs", folder / "trashed", folder / "emptied"
    half, renamed, half_renamed = folder / "half-runs", folder / "renamed", folder / "half-renamed"
    _write_runs(tree, runs, epochs)
    _write_runs(half, runs // 2, epochs)
    ckpttool = (PYTHON, "-m", "ckpttool")
    rename = (*ckpttool, "rename", "-r", "--template", "{run}-e{epoch:04d}", "--yes", "-q")
    commands = (
        Command("list", (*ckpttool, "list", str(tree))),
        Command("latest -r", (*ckpttool, "latest", "-r", str(tree))),
        Command("undo -r", (*ckpttool, "undo", "-r", str(trashed)), partial(_trash, tree, trashed)),
        Command(
            "--empty-trash",
            (*ckpttool, "prune", str(emptied), "-r", "--empty-trash", "--yes"),
            partial(_trash, tree, emptied),
        ),
        Command("rename half", (*rename, str(half_renamed)), partial(data.copy_series, half, half_renamed)),
        Command("rename -r", (*rename, str(renamed)), partial(data.copy_series, tree, renamed)),
    )
    job = f"{runs * epochs:,} checkpoints in {runs} runs"
    bars = {"latest -r": 1.1, "undo -r": 0.35, "--empty-trash": 0.16}
    claims = [
        Claim(f"{name} of {job} instead of list", name, "list", ratio=bar) for name, bar in bars.items()
    ]
    claims.append(Claim(f"rename -r of {job} instead of {runs // 2}", "rename -r", "rename half", ratio=2.2))
    return Group(commands, tuple(claims))


def _trash(source: Path, tree: Path) -> None:
    """Write runs of which all but the newest lie in the trash."""
    shutil.rmtree(tree, ignore_errors=True)
    shutil.copytree(source, tree, copy_function=shutil.copy2)
    prune = (PYTHON, "-m", "ckpttool", "prune", tree, "-r", "--keep", "1", "--trash", "--yes", "-q")
    subprocess.run([*prune, "--verify", "quick"], check=True)


def _write_runs(tree: Path, runs: int, epochs: int) -> None:
    """Write runs an hour apart: of checkpoints of different runs the time says which is newer."""
    tree.mkdir()
    data.write_series(tree / "run-000", epochs)
    for number in range(1, runs):
        run = tree / f"run-{number:03}"
        shutil.copytree(tree / "run-000", run)
        for path in run.iterdir():
            saved = path.stat().st_mtime - _HOUR * (runs - number)
            os.utime(path, (saved, saved))


GROUPS: list[MakeGroup] = [retention, growth]
