"""Is it intact, sane and safe? The verdict on one checkpoint, also on one that can't be opened.

The modules of the checks are imported after a prediction's child process was started.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.errors import (
    AmbiguousFormat,
    CheckpointError,
    DamagedCheckpoint,
    Truncated,
    Unsupported,
    error_of,
    memory_checked,
)
from ckpttool.core.report import has_errors
from ckpttool.core.text import counted
from ckpttool.formats import recognise, suffix_format
from ckpttool.formats.interface import MANIFEST_SUFFIXES, Format, Probe, Unit
from ckpttool.formats.opening import open_unit
from ckpttool.ops.verdict import (
    CHECKS,
    COPY,
    NOT_REQUESTED,
    OPTIONAL,
    PREDICTION,
    Check,
    Safety,
    Status,
    Verification,
    asks_for_manifest,
)
from ckpttool.storage import fs
from ckpttool.storage.work import Advance, default_jobs, no_advance

if TYPE_CHECKING:
    from ckpttool.ops.ignored_findings import Ignore
    from ckpttool.ops.prediction import Prediction
    from ckpttool.predict.request import PredictionRequest

_MANIFEST, _ = MANIFEST_SUFFIXES


def verify(
    path: str | os.PathLike[str] | Unit,
    *,
    only: Collection[str] = CHECKS,
    strict: bool = False,
    jobs: int | None = None,
    advance: Advance | None = None,
    prediction: PredictionRequest | None = None,
    ignores: Sequence[Ignore] = (),
    against: str | os.PathLike[str] | None = None,
) -> Verification:
    """Return the verdict on one checkpoint. A damaged one is invalid, not an error.

    Args:
        path: A file, directory or index; or a unit that discovery found.
        only: The checks to run.
        strict: Whether warnings fail their check.
        jobs: Number of threads; by default the processors that this process may use.
        advance: Called with the bytes read, from any thread.
        prediction: How to load it with its framework and run it, in a separate process.
        against: A copy of it, whose files are compared with its own; on this machine or in a store.
        ignores: Findings that don't prevent a prediction. The verdict still has them: callers mark them by
            ``ignored_findings.apply_ignores``.

    Raises:
        NotACheckpoint: Nothing is recognised there.
        MissingPackage: A prediction needs a framework that is not installed.
        CheckpointError: It can't be read at all.
    """
    unit, name = (path, path.path) if isinstance(path, Unit) else (None, os.fspath(path))
    copy = None if against is None else os.fspath(against)
    format = unit.format if unit else None
    with fs.raising_failed_requests(os.path.dirname(name)), memory_checked(name):
        try:
            if format is None:
                with Probe(name) as probe:
                    format = recognise(probe)
            with (
                open_unit(format, unit or Unit(name, (), format)) as checkpoint,
                _start_prediction(checkpoint, prediction) as child,
            ):
                from ckpttool.ops.checks import Verifier

                verifier = Verifier(
                    checkpoint, only, strict, jobs or default_jobs(), advance or no_advance, copy
                )
                return verifier.run(child, ignores)
        except (AmbiguousFormat, DamagedCheckpoint, Unsupported) as failure:
            is_ambiguous = isinstance(failure, AmbiguousFormat)
            hint = None if is_ambiguous else format or suffix_format(os.path.basename(name))
            unit = unit or Unit(name, (os.path.basename(name.rstrip(os.sep)),), hint)
            nbytes = unit._replace(members=unit.parts).nbytes
            others = ((COPY,) if copy is not None else ()) + (PREDICTION if prediction is not None else ())
            found = _unopened_verification(name, hint, failure, only, others)
            return replace(found, nbytes=nbytes)


def _start_prediction(
    checkpoint: Checkpoint, request: PredictionRequest | None
) -> AbstractContextManager[Prediction | None]:
    """Return the requested prediction, whose child process is starting."""
    if request is None:
        return nullcontext()
    from ckpttool.ops.prediction import Prediction

    return Prediction(checkpoint, request)


_UNOPENED = (
    (Truncated, "it is truncated"),
    (AmbiguousFormat, "its format is ambiguous"),
    (Unsupported, "its format isn't supported"),
    (DamagedCheckpoint, "the structure is damaged"),
)
"""Reasons why checks of a checkpoint that can't be opened are skipped."""


def _unopened_verification(
    path: str, format: Format | None, failure: CheckpointError, only: Collection[str], others: Sequence[str]
) -> Verification:
    """Return the verdict on a checkpoint that can't be opened, with the findings before the damage."""
    # A pickle is searched up to its damage: code that was found before counts, as a loader runs it, too.
    seen = getattr(failure, "safety", ())
    where = failure.where
    if failure.path != path:
        where = ": ".join(filter(None, (os.path.basename(failure.path), failure.where)))
    broken = error_of(failure, where)._replace(check="structure")
    findings = (broken, *(finding._replace(check="safety") for finding in seen))
    reason = next(text for kind, text in _UNOPENED if isinstance(failure, kind))
    checks = [
        Check(name, Status.SKIPPED, reason if name in only else NOT_REQUESTED)
        for name in CHECKS
        if name != OPTIONAL or asks_for_manifest(only) or fs.isfile(path + _MANIFEST)
    ]
    checks[0] = Check("structure", Status.FAILED, failure.reason)
    checks += [Check(name, Status.SKIPPED, reason) for name in others]
    safety = Safety.UNSAFE if has_errors(seen) else Safety.UNKNOWN
    if safety is Safety.UNSAFE and "safety" in only:
        checks[CHECKS.index("safety")] = Check("safety", Status.FAILED, counted(len(seen), "finding"))
    return Verification(
        path, format.name if format else None, None, safety, tuple(checks), findings, was_opened=False
    )


def unreadable(failure: CheckpointError) -> Verification:
    """Return the verdict on an entry of a directory that can't be read: invalid."""
    checks = [Check(name, Status.SKIPPED, "it can't be read") for name in CHECKS if name != OPTIONAL]
    checks[0] = Check("structure", Status.FAILED, failure.reason)
    finding = error_of(failure)._replace(check="structure")
    return Verification(failure.path, None, None, Safety.UNKNOWN, tuple(checks), (finding,), was_opened=False)
