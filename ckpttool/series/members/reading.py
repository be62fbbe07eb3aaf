"""Reads a checkpoint in full: whether every byte of it is intact, and whether its values are finite."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from ckpttool.errors import CheckpointError
from ckpttool.report import Severity
from ckpttool.series.members.entry import Entry

FULL_CHECKS = ("structure", "checksum", "values")
"""What intact means; what loading a checkpoint could run has no say in it."""

Advance = Callable[[int], None]
Progress = Callable[[str, int], AbstractContextManager[Advance]]
"""Told what is read now and how many bytes that takes; gives back what is told of each part."""


@dataclass(frozen=True, slots=True)
class Read:
    """What reading all of a checkpoint came to.

    Attributes:
        fault: What is wrong with it; None where it is intact.
        is_finite: Whether it holds neither NaN nor infinities.
    """

    fault: str | None
    is_finite: bool


def unseen(what: str, total: int) -> AbstractContextManager[Advance]:
    """Return a progress that nobody sees."""
    return nullcontext(lambda nbytes: None)


def read_in_full(entry: Entry, jobs: int | None = None, progress: Progress = unseen) -> str | None:
    """Return what is wrong with a checkpoint, every byte of which is read; None where it is intact."""
    return read_whole(entry, jobs, progress).fault


def read_whole(entry: Entry, jobs: int | None = None, progress: Progress = unseen) -> Read:
    """Return what reading every byte of a checkpoint comes to."""
    from ckpttool.ops.verify import verify

    try:
        with progress(entry.name, entry.nbytes) as advance:
            verdict = verify(entry.unit, only=FULL_CHECKS, jobs=jobs, advance=advance)
    except CheckpointError as failure:
        return Read(f"unreadable: {failure.reason}", is_finite=False)
    is_finite = not {one.code for one in verdict.findings} & {"nan", "infinity"}
    if verdict.is_valid:
        return Read(None, is_finite)
    errors = [one for one in verdict.findings if one.severity is Severity.ERROR]
    where = f"{errors[0].where}: " if errors and errors[0].where else ""
    return Read(f"damaged: {where}{errors[0].message}" if errors else "damaged", is_finite)
