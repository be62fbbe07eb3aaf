"""Reads a checkpoint in full: whether every byte of it is intact, and whether its values are finite."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from ckpttool.core.errors import CheckpointError, from_os_error
from ckpttool.core.report import Finding, Severity
from ckpttool.core.tensor import Role
from ckpttool.formats.interface import SIDECARS
from ckpttool.formats.opening import open_unit
from ckpttool.ops.verdict import OPTIONAL
from ckpttool.runs.members.entry import Entry
from ckpttool.runs.members.saves import fault_beside
from ckpttool.runs.reasons import Code, Reason, fault
from ckpttool.storage import fs
from ckpttool.storage.executors import answer_of, not_the_same, path_everywhere
from ckpttool.storage.work import Progress as Progress
from ckpttool.storage.work import no_progress as no_progress
from ckpttool.storage.work import submitted
from ckpttool.transaction.files import Contents, contents

if TYPE_CHECKING:
    from concurrent.futures import Executor

FULL_CHECKS = ("structure", "checksum", "values")
"""What intact means; what loading a checkpoint could run has no say in it."""

SPECIAL = ("nan", "infinity")
"""Findings that say that a value is no finite number."""


class FullRead(NamedTuple):
    """What reading all of a checkpoint came to.

    Attributes:
        fault: What is wrong with it; None where it is intact, and holds no NaN.
        is_finite: Whether its weights hold neither NaN nor infinities.
        damage: The fault, unless it is NaN beside the weights alone: an optimizer's state, a single value.
    """

    fault: Reason | None
    is_finite: bool
    damage: Reason | None = None


class FullReader:
    """Reads checkpoints in full, each once as long as it stays what it was."""

    def __init__(self, jobs: int | None = None, progress: Progress = no_progress) -> None:
        self._jobs = jobs
        self._progress = progress
        self._reads: dict[str, tuple[Contents, FullRead]] = {}

    def read(self, entry: Entry) -> FullRead:
        """Return what reading every byte of a checkpoint comes to."""
        if entry.parts:
            parts = [part for part in entry.parts if part.fault is None]  # others it doesn't need
            return _read_of_save(entry, [(part, self.read(part)) for part in parts])
        read = self.recall(entry)
        if read is None:
            read = read_all(entry, self._jobs, self._progress)
            if read.fault is None or read.fault.code is not Code.UNREADABLE:  # else it may be another time
                self.remember(entry, read)
        return read

    def recall(self, entry: Entry) -> FullRead | None:
        """Return what it came to, if it was read as it is now."""
        if entry.parts:
            known = [(part, self.recall(part)) for part in entry.parts if part.fault is None]
            reads = [(part, read) for part, read in known if read is not None]
            return _read_of_save(entry, reads) if len(reads) == len(known) else None
        contents, read = self._reads.get(entry.path, (None, None))
        return read if contents == entry.contents else None

    def remember(self, entry: Entry, read: FullRead) -> None:
        """Take note of what somebody else read."""
        self._reads[entry.path] = entry.contents, read


def read_in_full(entry: Entry, jobs: int | None = None, progress: Progress = no_progress) -> Reason | None:
    """Return what is wrong with a checkpoint, every byte of which is read; None where it is intact."""
    return read_all(entry, jobs, progress).fault


def read_each_in_full(
    entries: Sequence[Entry],
    jobs: int | None = None,
    progress: Progress = no_progress,
    executor: Executor | None = None,
) -> Iterator[Reason | None]:
    """Yield what is wrong with each of some checkpoints, of which an executor may read every byte."""
    if executor is None:
        yield from (read_in_full(entry, jobs, progress) for entry in entries)
        return
    absolute = (replace(one, unit=one.unit._replace(path=path_everywhere(one.unit.path))) for one in entries)
    with closing(submitted(partial(_read_as_worker, jobs=jobs or 1), absolute, executor)) as futures:
        for entry, future in zip(entries, futures, strict=True):
            with progress(entry.name, entry.nbytes):
                answer = answer_of(future, entry.path)
            if isinstance(answer, CheckpointError):
                answer = fault(Code.UNREADABLE, answer.reason)
            yield answer


def _read_of_save(entry: Entry, reads: Sequence[tuple[Entry, FullRead]]) -> FullRead:
    """Return what reading the parts of a save comes to."""
    damages = (
        read.damage if part.path == entry.path else fault_beside(part, read.damage, entry)
        for part, read in reads
        if read.damage is not None
    )
    return FullRead(
        next((read.fault for _, read in reads if read.fault is not None), None),
        all(read.is_finite for _, read in reads),
        next(damages, None),
    )


def _read_as_worker(entry: Entry, jobs: int) -> Reason | None:
    try:
        seen = contents(entry.directory, entry.unit.members)
    except OSError as failure:
        return fault(Code.UNREADABLE, from_os_error(failure, entry.unit.path).reason)
    if fs.place_of(entry.path).reads_are_free and not seen.has_sizes_of(entry.contents):
        return fault(Code.UNREADABLE, not_the_same(entry.path).reason)
    return read_in_full(entry, jobs)


def read_all(entry: Entry, jobs: int | None = None, progress: Progress = no_progress) -> FullRead:
    """Return what reading every byte of a checkpoint comes to."""
    from ckpttool.ops.verify import verify

    # A manifest counts, too, unless the checkpoint was written again since it was made.
    manifests = [file for file in entry.contents.files if file.path.endswith(SIDECARS)]
    is_current = any(file.mtime_ns >= entry.modified_ns for file in manifests)
    checks = (*FULL_CHECKS, OPTIONAL) if is_current else FULL_CHECKS
    try:
        with progress(entry.name, entry.nbytes) as advance:
            verdict = verify(entry.unit, only=checks, jobs=jobs, advance=advance)
        special = [finding for finding in verdict.findings if finding.code in SPECIAL]
        grave = findings_of_weights(entry, special)
    except CheckpointError as failure:
        unreadable = fault(Code.UNREADABLE, failure.reason)
        return FullRead(unreadable, is_finite=False, damage=unreadable)
    if verdict.is_valid:
        return FullRead(None, is_finite=not grave)
    errors = [finding for finding in verdict.findings if finding.severity is Severity.ERROR]
    heavy = [finding for finding in errors if finding.code != "nan" or finding in grave]
    damage = _damage(heavy) if heavy or not errors else None
    return FullRead(_damage(errors), is_finite=not grave, damage=damage)


def _damage(errors: Sequence[Finding]) -> Reason:
    where = f"{errors[0].where}: " if errors and errors[0].where else ""
    return fault(Code.DAMAGED, f"{where}{errors[0].message}" if errors else "")


def findings_of_weights(entry: Entry, findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings that are about weights; a single value, such as a best metric in a buffer, is none.

    An optimizer's state, or what else lies beside the weights, may hold NaN while the weights are fine.
    """
    findings = list(findings)
    if not findings or entry.unit.format is None:
        return []
    role = Role.WEIGHTS if entry.has_weights else Role.OTHER  # an average alone is weights, too
    with open_unit(entry.unit.format, entry.unit) as checkpoint:
        weights = [tensor for tensor in checkpoint.tensors if tensor.role is role and tensor.size > 1]
        names = {tensor.shares_with or tensor.name for tensor in weights}  # of ties the first
    return [finding for finding in findings if finding.where in names]
