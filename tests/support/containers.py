"""Containers of bytes, as their readers and writers meet them: pickles, tables, staged targets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ckpttool.containers.pickle.pickle_safety import PickleSequence, read_pickles
from ckpttool.containers.table import Table
from ckpttool.core.readable import Buffer
from ckpttool.storage.source import Source
from ckpttool.transaction.staged_output import OutputShape, StagedOutput


def pickles_in(data: bytes) -> PickleSequence:
    """Return what some bytes hold as pickles, and what loading them could run."""
    return read_pickles(Buffer("some.pkl", data), 0, len(data))


def entries_of_table(path: Path) -> dict[bytes, bytes]:
    """Return what a table in a file holds."""
    with Source(path) as source:
        return {key: bytes(value) for key, value in Table(source).entries()}


def stage(target: Path, fill: Callable[[StagedOutput], object], shape: OutputShape = "file") -> Path:
    """Have a target filled beside its place, and put it there."""
    with StagedOutput(target, shape) as staged:
        fill(staged)
        staged.settle()
        staged.commit()
    return target
