"""What is measured of removal: the deletion phase of ``prune``, beside ``rm -r`` on the same files."""

from __future__ import annotations

import os
import shutil
from functools import partial
from pathlib import Path

from tests.benchmarks.claims import PYTHON, Claim, Group, MakeGroup, Scale
from tests.benchmarks.measure import Command

DELETE = """
import os, sys
from ckpttool.transaction.files import Contents, contents
from ckpttool.transaction.journal import (Group,)
from ckpttool.transaction.removal import remove
directory = sys.argv[1]
found = contents(directory, sorted(os.listdir(directory))).files
removals = [Group(file.path, (file.path,), Contents((file,))) for file in found]
done = remove(directory, removals)
sys.exit(bool(done.failed) or len(done.done) < len(removals))
"""
"""What ``prune`` does once the plan is made: journal, renaming, comparing, unlinking."""

_BYTES = 4096


def deletion(folder: Path, scale: Scale) -> Group:
    """Measure the removal of many small checkpoints."""
    count, copy = scale.small_tensors, folder / "going"
    prepare = partial(_write, copy, count)
    commands = (
        Command("delete", (PYTHON, "-c", DELETE, str(copy)), prepare=prepare),
        Command("rm -r", ("rm", "-r", str(copy)), prepare=prepare),
    )
    job = f"delete {count:,} checkpoints of {_BYTES // 1024} KiB, with journal and comparison"
    return Group(commands, (Claim(job, "delete", "rm -r", ratio=3.6),))


def _write(directory: Path, count: int) -> None:
    """Write files that are on the disk, as checkpoints are by the time that they are old."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    for number in range(count):
        (directory / f"model_epoch_{number}.pth").write_bytes(b"x" * _BYTES)
    os.sync()


GROUPS: tuple[MakeGroup, ...] = (deletion,)
