"""Records checkpoints with a tracker: what verify says of each, its digest, its epoch and its metrics."""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from ckpttool.core.documents import document_of, messages
from ckpttool.core.errors import CheckpointError, NotFound, UsageError, from_os_error
from ckpttool.core.report import counted
from ckpttool.core.result import Table
from ckpttool.ops.digests import digest_of_list, sha256_of_files
from ckpttool.ops.verdict import Safety
from ckpttool.runs.members.entry import Entry
from ckpttool.runs.members.look import look_for
from ckpttool.runs.members.run_directories import run_directory
from ckpttool.runs.metrics import events, mlflow, wandb
from ckpttool.runs.metrics.log_metrics import add_log_metrics
from ckpttool.runs.metrics.tracked import TrackedRun, asking, client_module
from ckpttool.runs.metrics.trackers import owner_of, places_around
from ckpttool.runs.scope import Scope
from ckpttool.runs.surveying.survey import survey_directory
from ckpttool.storage import fs
from ckpttool.storage.atomic import write_atomically
from ckpttool.storage.work import Advance, default_jobs, no_advance

TENSORBOARD = "tensorboard:"
TARGETS = "mlflow:EXPERIMENT, wandb:DIR or tensorboard:DIR"
CHANGED = "it changed while it was read"
_KEY = "ckpttool"
_SHA256 = "sha256"
_NOT_IN_KEYS = re.compile(r"[^\w\-. /:]", re.ASCII)
_LONGEST_KEY = 240


@dataclass(frozen=True, slots=True)
class LoggedCheckpoint:
    """What a tracker has of a checkpoint now.

    Attributes:
        path: Its path.
        name: The path within its run, under which it is recorded.
        facts: What is recorded of it.
        run: The run's directory.
        passes: Whether it is valid, and safe to load as far as that can be told.
        is_new: Whether it was recorded now; the tracker had just that before otherwise.
    """

    path: str
    name: str
    facts: Mapping[str, Any]
    run: str
    passes: bool
    is_new: bool = True

    def document(self) -> dict[str, Any]:
        return {**document_of(self, "path", "name", "recorded", names={"recorded": "is_new"}), **self.facts}


@dataclass(frozen=True, slots=True, repr=False)
class Logged(Table):
    """What was recorded, and where; ``errors`` tells what can't be looked at, by its path."""

    target: str
    checkpoints: tuple[LoggedCheckpoint, ...]
    errors: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    _ROWS = ("checkpoints",)

    @property
    def summary(self) -> str:
        """Return it in a few words."""
        new = sum(one.is_new for one in self.checkpoints)
        there = len(self.checkpoints) - new
        parts = [f"{counted(new, 'checkpoint')} recorded in {self.target}"] if new or not there else []
        return ", ".join([*parts, *([f"{there:,} already in {self.target}"] if there else [])])

    def document(self) -> dict[str, Any]:
        document = document_of(self, "target", "checkpoints")
        return {"schema": "ckpttool.log/1", **document, "errors": messages(self.errors)}


Record = Callable[[LoggedCheckpoint], bool]
"""Records a checkpoint, and tells whether that was new."""


def log(
    paths: Sequence[str | os.PathLike[str]],
    to: str,
    *,
    metrics: Sequence[str] = (),
    exclude: Sequence[str] = (),
    jobs: int | None = None,
    advance: Advance | None = None,
) -> Logged:
    """Verify checkpoints, and record them with a tracker; what it has already is not recorded again.

    Args:
        paths: Checkpoints, and directories of them.
        to: ``mlflow:EXPERIMENT``, ``wandb:DIR`` or ``tensorboard:DIR``.
        metrics: Logs that say what the checkpoints' metrics are.
        exclude: Globs of what to skip in directories.
        jobs: Number of threads.
        advance: Called with the bytes read, from any thread.

    Raises:
        UsageError: There is no such tracker, nobody can tell which run is meant, or a path is in a store.
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
        raise NotFound(", ".join(texts), "no checkpoint is in it")
    return Logged(to, tuple(logged.values()), errors, tuple(warnings))


def _entries_of(
    path: str, scope: Scope, errors: dict[str, str]
) -> tuple[str, Sequence[Entry], Sequence[str]]:
    """Return the directory that was searched, the checkpoints in it, and what is doubtful of them."""
    _, entry, _ = look_for(path)
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
    """Return what is recorded of a checkpoint whose verdict is known; its files are read once more."""
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
        "metrics": {name: _plain(value) for name, value in entry.metrics.items()},
    }
    known = {name: value for name, value in facts.items() if value not in (None, {})}
    name = os.path.relpath(os.path.abspath(entry.path), run)
    passes = is_valid and safety is not Safety.UNSAFE
    return LoggedCheckpoint(entry.path, name, known, run, passes)


def _plain(value: float) -> float | str:
    return value if value - value == 0 else str(value)  # JSON has no NaN


def open_target(to: str, root: str) -> AbstractContextManager[Record]:
    """Return what records checkpoints of a directory with a tracker.

    Raises:
        UsageError: There is no such tracker.
        MissingPackage: The tracker's package is not installed.
    """
    for prefix, make in _TARGETS.items():
        if to.startswith(prefix) and len(to) > len(prefix):
            return make(to.removeprefix(prefix), root)
    raise UsageError(f"--to {to}: no tracker ({TARGETS})")


def _dumps(facts: Mapping[str, Any]) -> str:
    return json.dumps(facts, ensure_ascii=False, sort_keys=True)


def _owner(runs: Sequence[TrackedRun], one: LoggedCheckpoint, root: str, to: str) -> TrackedRun | None:
    """Return the run to which a checkpoint belongs; None where one is to be made.

    Raises:
        UsageError: Several runs are called as its directory is.
    """
    owner = owner_of(runs, os.path.dirname(os.path.abspath(one.path)), os.path.abspath(root))
    name = _run_name(one.run)
    if owner is None and sum(run.name == name for run in runs) > 1:
        raise UsageError(f"{to}: several runs are called {name}, so nobody can tell which wrote {one.path}")
    return owner


def _run_name(run: str) -> str:
    return os.path.basename(fs.realpath(run)) or "run"


# MLflow ---------------------------------------------------------------------------------------------


@contextmanager
def _mlflow(wanted: str, root: str) -> Iterator[Record]:
    """Yield what sets a tag of a run for each checkpoint, and writes all about it as an artifact."""
    to = f"{mlflow.PREFIX}{wanted}"
    stores = mlflow.stores_around(places_around(root))
    found = mlflow.experiment_runs(stores, wanted)
    store, runs, is_of_one = found or (next(iter(stores), None), [], False)
    client = mlflow.mlflow_client(None if store is None else store.uri)
    named = runs[0] if is_of_one else None
    ids: dict[str, str] = {}

    def run_id(one: LoggedCheckpoint) -> str:
        if one.run not in ids:
            owner = named or _owner(runs, one, root, to)
            ids[one.run] = _new_run(client, wanted, one.run) if owner is None else owner.id
        return ids[one.run]

    def record(one: LoggedCheckpoint) -> bool:
        with asking(to):
            identity, key, text = run_id(one), f"{_KEY}/{_tag_name(one.name)}", _dumps(one.facts)
            if client.get_run(identity).data.tags.get(key) == text:
                return False
            client.log_text(identity, text, f"{key}.json")
            client.set_tag(identity, key, text)
        return True

    yield record


def _new_run(client: Any, experiment: str, run: str) -> str:
    known = client.get_experiment_by_name(experiment)
    place = client.create_experiment(experiment) if known is None else known.experiment_id
    identity: str = client.create_run(place, run_name=_run_name(run)).info.run_id
    client.set_terminated(identity)
    return identity


def _tag_name(name: str) -> str:
    """Return a name in the characters that MLflow allows; one that loses some gets a digest of itself."""
    plain = _NOT_IN_KEYS.sub("_", name)
    if plain == name and len(name) <= _LONGEST_KEY:
        return name
    digest = hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest()[:8]
    return f"{plain[-_LONGEST_KEY + 9 :]}-{digest}"


# Weights & Biases -----------------------------------------------------------------------------------


@contextmanager
def _wandb(directory: str, root: str) -> Iterator[Record]:
    """Yield what notes checkpoints in the configuration of their run: an offline run for each, at the end."""
    to = f"{wandb.PREFIX}{directory}"
    try:
        runs = wandb.find_runs(directory)
    except NotFound:
        runs = []
    by_id: dict[str, TrackedRun] = {run.id: run for run in reversed(runs)}  # the first knows most
    notes: dict[str, dict[str, str]] = {}
    for run in runs:
        notes.setdefault(run.id, {}).update(_notes(run))
    new: dict[str, tuple[LoggedCheckpoint, dict[str, str]]] = {}

    def record(one: LoggedCheckpoint) -> bool:
        own = f"{_KEY}-{hashlib.sha256(os.fsencode(fs.realpath(one.run))).hexdigest()[:8]}"
        owner = by_id.get(own) or _owner(list(by_id.values()), one, root, to)
        identity = own if owner is None else owner.id
        text = _dumps(one.facts)
        if notes.get(identity, {}).get(one.name) == text:
            return False
        new.setdefault(identity, (one, {}))[1][one.name] = text
        return True

    yield record
    for identity, (one, noted) in new.items():
        known = by_id.get(identity)
        _write_wandb_run(wandb.above(directory), identity, known, _run_name(one.run), noted)


def _notes(run: TrackedRun) -> dict[str, str]:
    """Return what a run's configuration says of checkpoints."""
    start = f"{_KEY}."
    return {
        name.removeprefix(start): str(text) for name, text in run.parameters.items() if name.startswith(start)
    }


def _write_wandb_run(
    directory: str, identity: str, known: TrackedRun | None, name: str, notes: Mapping[str, str]
) -> None:
    what = f"{wandb.PREFIX}{directory}"
    client = client_module("wandb", what)
    mode = os.environ.get("WANDB_MODE", "offline")
    fs.makedirs(directory)
    with asking(what):
        run = client.init(
            mode=mode,
            dir=directory,
            id=identity,
            name=name if known is None else known.name,
            project=(known.project if known is not None else "") or _KEY,
            resume=None if mode == "offline" else "allow",
            settings=client.Settings(
                silent=True, disable_git=True, disable_code=True, console="off", x_disable_stats=True
            ),
        )
        run.config.update({_KEY: dict(notes)}, allow_val_change=True)
        run.finish()
        client.teardown()  # only now is all of it on the disk


# TensorBoard ----------------------------------------------------------------------------------------


@contextmanager
def _tensorboard(directory: str, root: str) -> Iterator[Record]:
    """Yield what writes a text for each checkpoint, at its step; they are one event file in the end."""
    names = events.own_files(directory)
    known = {summary for path in names for summary in events.summaries_in(path)}
    new: list[tuple[int, bytes]] = []

    def record(one: LoggedCheckpoint) -> bool:
        step = int(one.facts.get("step") or one.facts.get("epoch") or 0)
        summary = events.text_summary(f"{_KEY}/{_run_name(one.run)}/{one.name}", _markdown(one))
        if (step, summary) in known:
            return False
        known.add((step, summary))
        new.append((step, summary))
        return True

    yield record
    if new:
        now = time.time()
        try:
            fs.makedirs(directory)
            write_atomically(os.path.join(directory, events.new_name(now)), events.event_file(now, new))
        except OSError as error:
            raise from_os_error(error, directory) from error


def _markdown(one: LoggedCheckpoint) -> str:
    """Return what is recorded as a table, which TensorBoard's text view draws."""
    facts = {**one.facts, **one.facts.get("metrics", {})}
    facts.pop("metrics", None)
    rows = [f"| {name} | {value} |" for name, value in facts.items()]
    return "\n".join(["| | |", "| --- | --- |", *rows])


_TARGETS: Mapping[str, Callable[[str, str], AbstractContextManager[Record]]] = {
    mlflow.PREFIX: _mlflow,
    wandb.PREFIX: _wandb,
    TENSORBOARD: _tensorboard,
}
