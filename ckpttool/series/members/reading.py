"""Reads a checkpoint in full: whether every byte of it is intact, and whether its values are finite."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from ckpttool.errors import CheckpointError
from ckpttool.formats.interface import SIDECARS
from ckpttool.ops.verdict import OPTIONAL
from ckpttool.report import Finding, Severity
from ckpttool.series.members.entry import Entry
from ckpttool.tensor import Role

FULL_CHECKS = ("structure", "checksum", "values")
"""What intact means; what loading a checkpoint could run has no say in it."""

_SPECIAL = ("nan", "infinity")

Advance = Callable[[int], None]
Progress = Callable[[str, int], AbstractContextManager[Advance]]
"""Told what is read now and how many bytes that takes; gives back what is told of each part."""


@dataclass(frozen=True, slots=True)
class Read:
    """What reading all of a checkpoint came to.

    Attributes:
        fault: What is wrong with it; None where it is intact, and holds no NaN.
        is_finite: Whether its weights hold neither NaN nor infinities.
        damage: The fault, unless it is NaN beside the weights alone: an optimizer's state, a single value.
    """

    fault: str | None
    is_finite: bool
    damage: str | None = None


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
            verdict = verify(entry.unit, only=_checks(entry), jobs=jobs, advance=advance)
        special = [one for one in verdict.findings if one.code in _SPECIAL]
        grave = of_weights(entry, special)
    except CheckpointError as failure:
        fault = f"unreadable: {failure.reason}"
        return Read(fault, is_finite=False, damage=fault)
    if verdict.is_valid:
        return Read(None, is_finite=not grave)
    errors = [one for one in verdict.findings if one.severity is Severity.ERROR]
    heavy = [one for one in errors if one.code != "nan" or one in grave]
    damage = _damaged(heavy) if heavy or not errors else None
    return Read(_damaged(errors), is_finite=not grave, damage=damage)


def _checks(entry: Entry) -> Collection[str]:
    """Return what is checked: a manifest, too, unless the checkpoint was written again since it was made."""
    manifests = [file for file in entry.contents.files if file.path.endswith(SIDECARS)]
    is_told = any(file.mtime_ns >= entry.modified_ns for file in manifests)
    return (*FULL_CHECKS, OPTIONAL) if is_told else FULL_CHECKS


def _damaged(errors: Sequence[Finding]) -> str:
    where = f"{errors[0].where}: " if errors and errors[0].where else ""
    return f"damaged: {where}{errors[0].message}" if errors else "damaged"


def of_weights(entry: Entry, findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings that are about weights; a single value, such as a best metric in a buffer, is none.

    An optimizer's state, or what else lies beside the weights, may hold NaN while the weights are fine.

    Raises:
        CheckpointError: It can't be opened any more.
    """
    found = list(findings)
    names = _weights(entry) if found else ()
    return [one for one in found if one.where in names]


def _weights(entry: Entry) -> Collection[str]:
    """Return the names of the weights, of ties the first; an average alone is weights, too."""
    if entry.unit.format is None:
        return ()
    role = Role.WEIGHTS if entry.has_weights else Role.OTHER
    with entry.unit.format.open_unit(entry.unit) as checkpoint:
        weights = [one for one in checkpoint.tensors if one.role is role and one.size > 1]
        return {one.shares_with or one.name for one in weights}
