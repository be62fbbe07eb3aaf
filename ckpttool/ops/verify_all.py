"""Verifies many checkpoints, one after the other or by an executor: each is one task.

A task is sent to another machine with absolute paths, and its result has the paths given by the user. If a
worker doesn't see the files, or is lost, that is an error for the checkpoint, not a verdict on it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpttool.core.errors import CheckpointError
from ckpttool.core.result import CheckpointTable
from ckpttool.core.text import counted
from ckpttool.formats import recognition_error
from ckpttool.formats.discovery import Globs, Walk, discover
from ckpttool.formats.interface import MANIFEST_SUFFIXES, Probe, Unit, natural_path
from ckpttool.ops.verdict import (
    CHECKS,
    NOT_REQUESTED,
    QUICK_CHECKS,
    SAMPLED_OUT,
    Verification,
    verify_document,
)
from ckpttool.storage import fs
from ckpttool.storage.work import (
    Advance,
    Progress,
    answer_of,
    no_progress,
    not_the_same,
    not_visible,
    path_everywhere,
    submitted,
)
from ckpttool.transaction.paths import shown
from ckpttool.transaction.recovery import current_unit, unaffected_units

if TYPE_CHECKING:
    from concurrent.futures import Executor, Future

    from ckpttool.ops.ignored_findings import Ignore
    from ckpttool.ops.manifest_seal import SealResult
    from ckpttool.predict.request import PredictionRequest

_TRIES = 3
"""Attempts to verify a checkpoint whose parts change meanwhile, as by a renaming, file by file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyTask:
    """A checkpoint, and the checks to be made.

    Attributes:
        unit: The checkpoint.
        only: Checks to run.
        strict: Whether warnings fail their check.
        jobs: Number of threads; None for the processors available.
        prediction: Prediction to run; None for none.
        ignores: Findings that the user accepts.
        is_named: Whether the user gave this path: that it vanishes is an error then.
        is_sampled_out: Whether only structure and safety are checked, as a sample left it out.
        seal: Whether a manifest is written.
        force: Whether it replaces a manifest with other content.
        against: Path of a copy whose files are compared with the checkpoint's.
    """

    unit: Unit
    only: tuple[str, ...] = CHECKS
    strict: bool = False
    jobs: int | None = None
    prediction: PredictionRequest | None = None
    ignores: tuple[Ignore, ...] = ()
    is_named: bool = False
    is_sampled_out: bool = False
    seal: bool = False
    force: bool = False
    against: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskResult:
    """The result of a task; neither a verdict nor an error if its checkpoint was removed or renamed.

    Attributes:
        verification: The verdict.
        sealed: Result of writing the manifest; None if none was requested.
        error: Why there is no verdict.
        is_lost: Whether the error is the worker's, not the checkpoint's.
        seconds: Duration.
    """

    verification: Verification | None = None
    sealed: SealResult | None = None
    error: CheckpointError | None = None
    is_lost: bool = False
    seconds: float = 0.0


def size_of(unit: Unit) -> int:
    """Return the bytes of a checkpoint without manifests, which another process may be writing."""
    return sum(
        fs.getsize(path) for path in unit.files() if not path.endswith(MANIFEST_SUFFIXES) and fs.exists(path)
    )


def verify_tasks(
    tasks: Sequence[VerifyTask], executor: Executor | None = None, progress: Progress = no_progress
) -> Generator[TaskResult, None, None]:
    """Yield the results of tasks, in order.

    Args:
        tasks: The tasks; without an executor, this process runs them one after the other.
        executor: Runs the tasks, perhaps on other machines that see the same files.
        progress: Progress of reading.
    """
    if executor is None:
        here = partial(_run_here, progress)
        for task in tasks:
            yield _rerun_while_changing(task, here(task), here)
        return
    elsewhere = partial(_run_remotely, executor)
    remote = (_RemoteTask.of(task) for task in tasks)
    with closing(submitted(_RemoteTask.run, remote, executor)) as futures:
        for task, future in zip(tasks, futures, strict=True):
            with progress(task.unit.path, task.unit.nbytes):
                answer = _answer_of(task, future)
            yield _rerun_while_changing(task, answer, elsewhere)


def _rerun_while_changing(
    task: VerifyTask, result: TaskResult, run: Callable[[VerifyTask], TaskResult]
) -> TaskResult:
    """Return the result of a task, which is run again until its checkpoint stops changing or vanishes."""
    # A training may rename, extend or remove a checkpoint while it is verified, which looks like damage. So a
    # bad verdict on a checkpoint that was found in a directory counts only if the checkpoint still has the
    # same members; one that the user named is reported as it is.
    for _ in range(_TRIES - 1):
        verdict = result.verification
        if task.is_named or task.seal or verdict is None or verdict.passes():
            break
        try:
            now = current_unit(task.unit)
        except CheckpointError as error:
            return TaskResult(error=error)
        if now is None:
            return TaskResult()
        if now.members == task.unit.members:
            break
        task = replace(task, unit=now)
        result = run(task)
    return result


def _run_here(progress: Progress, task: VerifyTask) -> TaskResult:
    from ckpttool.ops.verify import verify

    started = time.perf_counter()
    sealed: SealResult | None = None
    try:
        with progress(task.unit.path, task.unit.nbytes) as advance:
            if task.seal:
                from ckpttool.ops.manifest_seal import verify_and_seal

                verdict, sealed = verify_and_seal(
                    task.unit, force=task.force, strict=task.strict, jobs=task.jobs, advance=advance
                )
            else:
                verdict = verify(
                    task.unit,
                    only=QUICK_CHECKS if task.is_sampled_out else task.only,
                    strict=task.strict,
                    jobs=task.jobs,
                    advance=advance,
                    prediction=task.prediction,
                    ignores=task.ignores,
                    against=task.against,
                )
            verdict = _with_survival(task, verdict, advance)
    except CheckpointError as error:
        return TaskResult(error=error)
    if task.is_sampled_out:
        checks = (
            replace(check, detail=SAMPLED_OUT) if check.detail == NOT_REQUESTED else check
            for check in verdict.checks
        )
        verdict = replace(verdict, checks=tuple(checks))
    return TaskResult(verification=verdict, sealed=sealed, seconds=time.perf_counter() - started)


def _with_survival(task: VerifyTask, verdict: Verification, advance: Advance) -> Verification:
    """Return the verdict with the survival of a damaged checkpoint, whose rest is read again."""
    is_full = set(CHECKS) <= set(task.only) and not task.is_sampled_out
    if not is_full or not verdict.is_damaged or not fs.place_of(verdict.path).reads_are_free:
        return verdict
    from ckpttool.ops.salvage import salvageable

    return replace(verdict, survival=salvageable(verdict.path, jobs=task.jobs, advance=advance))


# Elsewhere ------------------------------------------------------------------------------------------


class _RemoteTask(NamedTuple):
    """A task for another machine, with absolute paths.

    Attributes:
        nbytes: Size of its files on this machine; a worker must see the same.
    """

    task: VerifyTask
    nbytes: int

    @classmethod
    def of(cls, task: VerifyTask) -> _RemoteTask:
        unit = task.unit._replace(path=path_everywhere(task.unit.path))
        copy = None if task.against is None else path_everywhere(task.against)
        return cls(replace(task, unit=unit, jobs=task.jobs or 1, against=copy), size_of(unit))

    def run(self) -> TaskResult:
        """Run the task in a worker, if it sees the same files."""
        unit = self.task.unit
        directory = os.path.dirname(unit.path)
        for name in unit.members:
            if not fs.lexists(os.path.join(directory, name)):
                return TaskResult(error=not_visible(unit.path, name), is_lost=True)
        if size_of(unit) != self.nbytes:
            return TaskResult(error=not_the_same(unit.path), is_lost=True)
        return _run_here(no_progress, self.task)


def _run_remotely(executor: Executor, task: VerifyTask) -> TaskResult:
    (future,) = submitted(_RemoteTask.run, [_RemoteTask.of(task)], executor)
    return _answer_of(task, future)


def _answer_of(task: VerifyTask, future: Future[TaskResult]) -> TaskResult:
    """Return a worker's result with the user's paths; a lost worker gives an error."""
    # A worker that sees no such files may see another file system, or the checkpoint was removed meanwhile.
    # If it was found in a directory and no longer exists here, the latter is assumed, and it is left out.
    path = task.unit.path
    try:
        answer = answer_of(future, path)
    except CheckpointError as failure:
        return TaskResult(error=failure)
    if isinstance(answer, CheckpointError):
        return TaskResult(error=answer, is_lost=True)
    if answer.is_lost and not task.is_named and current_unit(task.unit) is None:
        return TaskResult()
    absolute = path_everywhere(path)
    verdict, error, sealed = answer.verification, answer.error, answer.sealed
    if verdict is not None:
        verdict = replace(verdict, path=path)
    if error is not None and error.path == absolute:
        error.path = path
    if sealed is not None:
        files = tuple(_named_as(path, file) for file in sealed.files)
        refused = sealed.refused and sealed.refused.replace(absolute, path)
        sealed = replace(sealed, files=files, refused=refused)
    return replace(answer, verification=verdict, error=error, sealed=sealed)


def _named_as(path: str, file: str) -> str:
    """Return the path of a file in or next to a checkpoint, relative to the path given for that."""
    bare = path.rstrip(os.sep)
    return os.path.join(os.path.dirname(bare), os.path.relpath(file, os.path.dirname(fs.abspath(bare))))


# All below some paths -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, repr=False)
class Verifications(CheckpointTable[Verification]):
    """The verdicts on many checkpoints: a sequence of them. It is true if all are ok.

    Attributes:
        checkpoints: The verdicts, in the order of the paths.
        errors: Why checkpoints could not be verified: a worker is lost, or doesn't see the files.
    """

    checkpoints: tuple[Verification, ...]
    errors: tuple[CheckpointError, ...] = ()

    @property
    def summary(self) -> str:
        """Return the number of checkpoints, and of those that aren't ok."""
        bad = sum(not one.ok for one in self.checkpoints) + len(self.errors)
        return f"{counted(len(self.checkpoints) + len(self.errors), 'checkpoint')}, {bad:,} not ok"

    @property
    def ok(self) -> bool:
        """Return whether all were verified, are valid, and loading them runs nothing."""
        return bool(self.checkpoints) and not self.errors and all(one.ok for one in self.checkpoints)

    def __bool__(self) -> bool:
        return self.ok

    def passes(self, *, strict: bool) -> bool:
        """Return whether all were verified and are fine, and if warnings fail, their safety is known, too."""
        return not self.errors and all(one.passes(strict=strict) for one in self.checkpoints)

    def document(self) -> dict[str, Any]:
        return verify_document(self.checkpoints, self.errors, passed=self.passes(strict=False))


def verify_all(
    paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    *,
    only: Collection[str] = CHECKS,
    strict: bool = False,
    jobs: int | None = None,
    exclude: Sequence[str] = (),
    max_depth: int | None = None,
    executor: Executor | None = None,
    progress: Progress | None = None,
) -> Verifications:
    """Return the verdicts on all checkpoints at some paths; unreadable entries of directories are invalid.

    Args:
        paths: Files, or directories of checkpoints; one, or several.
        only: The checks to run.
        strict: Whether warnings fail their check.
        jobs: Number of threads for each checkpoint; by default the processors available to this process, or
            one with an executor.
        exclude: Globs of paths to skip in directories.
        max_depth: Limit on the levels of directories to descend.
        executor: Verifies the checkpoints, each as one task: that of Dask, of mpi4py, or one of
            ``concurrent.futures``. Its workers need ckpttool, and the files under the same absolute paths.
        progress: Progress of reading.

    Raises:
        CheckpointError: A path can't be read, or there is no checkpoint.
    """
    from ckpttool.ops.verify import unreadable

    found: list[Unit | CheckpointError] = []
    own = [os.fspath(one) for one in ([paths] if isinstance(paths, str | os.PathLike) else paths)]
    for path in own:
        found += _find(path, exclude, max_depth)
    tasks = [
        VerifyTask(unit=one, only=tuple(only), strict=strict, jobs=jobs, is_named=one.path in own)
        for one in found
        if isinstance(one, Unit)
    ]
    verdicts: list[Verification] = []
    errors: list[CheckpointError] = []
    with closing(verify_tasks(tasks, executor, progress or no_progress)) as results:
        for one in found:
            result = TaskResult(error=one) if isinstance(one, CheckpointError) else next(results)
            if result.verification is not None:
                verdicts.append(result.verification)
            elif result.error is not None:
                is_verdict = fs.place_of(one.path).errors_concern_files and one.path not in own
                if is_verdict and not result.is_lost:
                    verdicts.append(unreadable(result.error))
                else:
                    errors.append(result.error)
    return Verifications(tuple(verdicts), tuple(errors))


def _find(path: str, exclude: Sequence[str], max_depth: int | None) -> list[Unit | CheckpointError]:
    """Return the checkpoints at a path, and the errors of unreadable entries."""
    errors: list[CheckpointError] = []
    walk = Walk(exclude=Globs(exclude, path), max_depth=max_depth, on_error=errors.append)
    units = sorted(discover(path, walk), key=lambda unit: natural_path(unit.path))
    require_any(path, units, errors)
    if [unit.path for unit in units] == [path]:
        return [*units, *errors]
    whole = unaffected_units(units, [path]).whole
    return [*(unit._replace(path=shown(unit.path)) for unit in whole), *errors]


def require_any(path: str, units: Sequence[Unit], errors: Sequence[CheckpointError]) -> None:
    """Raise CheckpointError if neither a checkpoint nor an unreadable entry was found at a path."""
    if units:
        return
    for error in errors:
        if fs.normpath(error.path) == fs.normpath(path):
            raise error
    if not errors:
        with Probe(path) as probe:
            raise recognition_error(probe)
