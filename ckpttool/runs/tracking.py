"""Records of checkpoints in a tracker: verdict, digest, size, epoch, step and metrics of each."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from ckpttool.core.errors import CheckpointError, NotFound, Unsupported, UsageError
from ckpttool.core.plugins import entry_points_of, instance_of
from ckpttool.core.result import Table, document_of, messages
from ckpttool.core.text import counted
from ckpttool.ops.digests import digest_of_list, sha256_of_files
from ckpttool.ops.verdict import Safety
from ckpttool.runs.entry import Entry
from ckpttool.runs.look import look_at_path
from ckpttool.runs.metrics import add_log_metrics
from ckpttool.runs.run_directories import run_directory
from ckpttool.runs.scope import Scope
from ckpttool.runs.survey import survey_directory
from ckpttool.runs.trackers import ENTRY_POINTS, LoggedCheckpoint, Record, places_around, tracker_of
from ckpttool.storage import fs
from ckpttool.storage.work import Advance, default_jobs, no_advance

CHANGED = "it changed while it was read"
_SHA256 = "sha256"


@dataclass(frozen=True, slots=True, repr=False)
class Logged(Table):
    """Result of ``log``.

    Attributes:
        target: Name of the tracker.
        checkpoints: Checkpoints that the tracker has now.
        errors: Why other checkpoints aren't recorded, by path.
        warnings: Doubts about series and metrics.
    """

    target: str
    checkpoints: tuple[LoggedCheckpoint, ...]
    errors: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    _ROWS = ("checkpoints",)

    @property
    def summary(self) -> str:
        """Return the number of recorded checkpoints in a few words."""
        new = sum(one.is_new for one in self.checkpoints)
        there = len(self.checkpoints) - new
        parts = [f"{counted(new, 'checkpoint')} recorded in {self.target}"] if new or not there else []
        return ", ".join([*parts, *([f"{there:,} already in {self.target}"] if there else [])])

    def document(self) -> dict[str, Any]:
        document = document_of(self, "target", "checkpoints")
        return {"schema": "ckpttool.log/1", **document, "errors": messages(self.errors)}


def log(
    paths: Sequence[str | os.PathLike[str]],
    to: str,
    *,
    metrics: Sequence[str] = (),
    exclude: Sequence[str] = (),
    jobs: int | None = None,
    advance: Advance | None = None,
) -> Logged:
    """Verify checkpoints, and record them in a tracker, except for those that it has already.

    Args:
        paths: Checkpoints, or directories of checkpoints.
        to: ``mlflow:EXPERIMENT``, ``wandb:DIR`` or ``tensorboard:DIR``.
        metrics: Logs with metrics of the checkpoints.
        exclude: Globs of paths to skip in directories.
        jobs: Number of threads.
        advance: Called with the bytes read, from any thread.

    Raises:
        UsageError: There is no such tracker, the run is ambiguous, or a path is in a store.
        CheckpointError: There is no checkpoint, or the tracker can't be reached.
    """
    from ckpttool.ops.verify import verify

    scope = Scope(metrics=metrics, exclude=exclude)
    advance = advance or no_advance
    texts = [os.fspath(path) for path in paths]
    for text in texts:
        if not fs.place_of(text).opens_by_path:
            raise UsageError(f"{text}: only checkpoints on this machine can be recorded")
    logged: dict[str, LoggedCheckpoint] = {}
    errors: dict[str, str] = {}
    warnings: list[str] = []
    for path in texts:
        root, entries, doubts = _entries_of(path, scope, errors)
        warnings += doubts
        with open_target(to, root) as record:
            for entry in entries:
                # The verdict and the digest read the files one after the other, and both are of the same
                # files only if none was changed in between.
                verdict = verify(entry.unit, jobs=jobs, advance=advance)
                try:
                    one = facts_of(entry, root, is_valid=verdict.is_valid, safety=verdict.safety, jobs=jobs)
                except CheckpointError as failure:
                    errors[entry.path] = failure.reason
                    continue
                if not entry.is_unchanged:
                    errors[entry.path] = CHANGED
                    continue
                logged[entry.path] = replace(one, is_new=record(one))
    if not logged and not errors:
        raise NotFound(", ".join(texts), "no checkpoint found")
    return Logged(to, tuple(logged.values()), errors, tuple(warnings))


def _entries_of(
    path: str, scope: Scope, errors: dict[str, str]
) -> tuple[str, Sequence[Entry], Sequence[str]]:
    """Return the directory that was searched, the checkpoints in it, and doubts about them."""
    _, entry, _ = look_at_path(path)
    if entry is not None:
        root = run_directory(os.path.dirname(os.path.abspath(path)), os.sep)
        measured, doubts = add_log_metrics([entry], scope.metrics, root) if scope.metrics else ([entry], [])
        return root, measured, doubts
    survey = survey_directory(path, scope)
    errors.update({error.path: error.reason for error in survey.errors})
    return survey.root, survey.entries, survey.warnings


def facts_of(
    entry: Entry, root: str, *, is_valid: bool, safety: Safety, jobs: int | None = None
) -> LoggedCheckpoint:
    """Return the record of a checkpoint whose verdict is known; its files are read once more."""
    run = run_directory(os.path.abspath(entry.directory), os.path.abspath(root))
    names = [one.path for one in entry.contents.files]
    paths = {os.path.join(entry.directory, name): name for name in names}
    sums = sha256_of_files(paths, jobs or default_jobs())
    files = {paths[path]: one.digests[_SHA256] for path, one in sums.items()}
    facts: dict[str, Any] = {
        "verdict": "valid" if is_valid else "invalid",
        "safety": safety.value,
        "format": entry.format,
        "bytes": entry.nbytes,
        _SHA256: digest_of_list(files),
        "files": len(files),
        "epoch": entry.epoch,
        "step": entry.step,
        # JSON has no NaN and no infinities: they are texts.
        "metrics": {name: one if math.isfinite(one) else str(one) for name, one in entry.metrics.items()},
    }
    known = {name: value for name, value in facts.items() if value not in (None, {})}
    name = os.path.relpath(os.path.abspath(entry.path), run)
    passes = is_valid and safety is not Safety.UNSAFE
    return LoggedCheckpoint(entry.path, name, known, run, passes)


def open_target(to: str, root: str) -> AbstractContextManager[Record]:
    """Return a context of recording checkpoints of a directory in a tracker.

    Raises:
        UsageError: There is no such tracker.
        MissingPackage: The tracker's package is not installed.
    """
    tracker, name = tracker_of(to), to.partition(":")[2]
    if tracker is None or not tracker.target or not name:
        raise UsageError(f"--to {to}: unknown tracker (expected {targets()})")
    return tracker.recorder(name, places_around(root))


def targets() -> str:
    """Return the forms of names in ``--to``, as a part of a sentence."""
    forms: list[str] = []
    for entry in entry_points_of(ENTRY_POINTS):
        with suppress(Unsupported):  # a broken plugin is an error only if it is used
            forms.append(instance_of(entry).target)
    *others, last = filter(None, forms)
    return f"{', '.join(others)} or {last}"
