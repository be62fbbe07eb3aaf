"""Trackers: their interface, the runs that wrote checkpoints, and registered models.

MLflow, Weights & Biases and TensorBoard are in ``ckpttool/integrations/``. Another package offers a subclass
of ``Tracker`` as an entry point of the group ``ckpttool.trackers``, by the prefix of the tracker's names: as
``mlflow``, for names such as ``mlflow:digits``.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from ckpttool.core.errors import UsageError
from ckpttool.core.plugins import entry_points_of, instance_of
from ckpttool.core.result import document_of
from ckpttool.runs.entry import Entry
from ckpttool.runs.logs import Log
from ckpttool.runs.run_directories import run_directory
from ckpttool.storage import fs

ENTRY_POINTS = "ckpttool.trackers"
_MOST_NAMES = 5


class TrackedRun(NamedTuple):
    """A run of a tracker.

    Attributes:
        label: Name in messages: ``mlflow:digits/slow``.
        id: Identifier in the tracker.
        name: Name that a user gave it, or the tracker.
        directory: Real path of the tracker's own directory for it; empty if there is none on this machine.
        parameters: Hyper-parameters; nested names have dots.
        read: Reads its metrics into a log.
        project: Project of the run; empty if the tracker has none.
    """

    label: str
    id: str
    name: str
    directory: str
    parameters: Mapping[str, object]
    read: Callable[[Log], None]
    project: str = ""


class TrackedModel(NamedTuple):
    """Model with a name in a tracker: prune never removes it.

    Attributes:
        reason: Reason in plans: ``registered as net version 3 (champion)``.
        holder: File or server with the name.
        place: Path of its file or directory; empty if only its content is known.
        identity: Identifier of the model or its run, a part of ``place`` that is the same in a moved store.
        file: Name, size in bytes and base64 MD5 of one of its files; None if ``place`` is known.
    """

    reason: str
    holder: str
    place: str = ""
    identity: str = ""
    file: tuple[str, int, str] | None = None


@dataclass(frozen=True, slots=True)
class LoggedCheckpoint:
    """A checkpoint as a tracker records it.

    Attributes:
        path: Its path.
        name: Path within its run, under which it is recorded.
        facts: Verdict, safety, format, size, SHA-256, epoch, step and metrics, as JSON has them.
        run: Directory of its run.
        passes: Whether it is valid, and not known to be unsafe.
        is_new: Whether it was recorded now; otherwise the tracker had exactly this already.
    """

    path: str
    name: str
    facts: Mapping[str, Any]
    run: str
    passes: bool
    is_new: bool = True

    @property
    def run_name(self) -> str:
        """Return the name for a new run: that of the run's directory."""
        return os.path.basename(fs.realpath(self.run)) or "run"

    @property
    def text(self) -> str:
        """Return the facts as JSON; equal facts give the same text."""
        return json.dumps(self.facts, ensure_ascii=False, sort_keys=True)

    def document(self) -> dict[str, Any]:
        return {**document_of(self, "path", "name", "recorded", names={"recorded": "is_new"}), **self.facts}


Record = Callable[[LoggedCheckpoint], bool]
"""Records a checkpoint, and returns False if the tracker has exactly this already."""


class Tracker:
    """A service that records runs, or the files that its client writes.

    A tracker overrides the methods that it supports. ``name`` is the rest of a name, after the prefix.
    ``places`` are the directories in which local files may be: the current one, that of the checkpoints, and
    all above it.

    Attributes:
        one_run: Advice on naming a single run in ``--metrics``; empty if no metrics can be read.
        target: Form of names in ``--to``, such as ``mlflow:EXPERIMENT``; empty if nothing can be recorded.
        is_directory: Whether ``name`` is a directory, in a configuration relative to that file.
    """

    one_run: ClassVar[str] = ""
    target: ClassVar[str] = ""
    is_directory: ClassVar[bool] = False

    def runs(self, name: str, places: Sequence[str]) -> list[TrackedRun]:
        """Return the runs that a name in ``--metrics`` means.

        Raises:
            CheckpointError: There are none, or they can't be read.
        """
        raise NotImplementedError

    def models(self, places: Sequence[str]) -> Iterator[TrackedModel]:
        """Yield the models with a name.

        Raises:
            CheckpointError: They can't be read; no checkpoint is removed or renamed then.
        """
        return iter(())

    def recorder(self, name: str, places: Sequence[str]) -> AbstractContextManager[Record]:
        """Return a context of recording; everything is written when it ends.

        Raises:
            CheckpointError: The tracker can't be reached.
        """
        raise NotImplementedError


def trackers() -> Iterator[Tracker]:
    """Yield all trackers."""
    yield from map(instance_of, entry_points_of(ENTRY_POINTS))


def tracker_of(name: str) -> Tracker | None:
    """Return the tracker of a name such as ``mlflow:digits``; None if no tracker has that prefix."""
    prefix, colon, _ = name.partition(":")
    known = entry_points_of(ENTRY_POINTS) if colon and prefix.isidentifier() else ()
    return next((instance_of(entry) for entry in known if entry.name == prefix), None)


def metrics_tracker(name: str) -> Tracker | None:
    """Return the tracker to read metrics from; None if the name is that of a log file."""
    # Prefixes come first: ``mlflow:x`` in a configuration must not cause a request to a store of that name.
    tracker = tracker_of(name)
    return tracker if tracker is not None and tracker.one_run and not fs.lexists(name) else None


def places_around(root: str) -> list[str]:
    """Return the directories for a tracker's files: the current one, the root, and all above it."""
    places = [os.getcwd()]
    above = fs.realpath(root) if fs.place_of(root).opens_by_path else ""
    while above:
        places.append(above)
        above = "" if os.path.dirname(above) == above else os.path.dirname(above)
    return list(dict.fromkeys(places))


def tracked_models(root: str) -> Iterator[TrackedModel]:
    """Yield the models with a name in the trackers around a directory.

    Raises:
        CheckpointError: A tracker can't be read.
    """
    places = places_around(root)
    for tracker in trackers():
        yield from tracker.models(places)


# Runs and checkpoints -------------------------------------------------------------------------------


def tracked_runs(
    tracker: Tracker, name: str, entries: Sequence[Entry], root: str, warnings: list[str]
) -> Iterator[tuple[TrackedRun, list[int]]]:
    """Yield the runs of a name, each with the indexes of the checkpoints that it wrote.

    Args:
        tracker: Tracker of the name.
        name: Full name, such as ``mlflow:digits``.
        entries: Checkpoints.
        root: Directory that was searched for them.
        warnings: Receives doubts.

    Raises:
        UsageError: No checkpoint can be assigned to a run.
        CheckpointError: The tracker has no such runs, or can't be read.
    """
    runs = tracker.runs(name.partition(":")[2], places_around(root))
    if not runs:
        warnings.append(f"{name}: it has no runs")
        return
    directories = dict.fromkeys(entry.directory for entry in entries)
    owners = {one: owner_of(runs, one, run_directory(one, root)) for one in directories}
    found = {one: run for one, run in owners.items() if run is not None}
    # A user who names a single run means it, even without evidence.
    if not found and len(runs) == 1:
        found = dict.fromkeys(directories, runs[0])
    missing = [one for one in directories if one not in found]
    if missing:
        doubt = f"{name}: it is unclear whether {_wrote(runs, missing)}; {tracker.one_run}"
        if not found:
            raise UsageError(doubt)
        warnings.append(doubt)
    written: dict[str, list[int]] = defaultdict(list)
    for index, entry in enumerate(entries):
        if entry.directory in found:
            written[found[entry.directory].id].append(index)
    yield from ((run, written[run.id]) for run in runs if run.id in written)


def _wrote(runs: Sequence[TrackedRun], directories: Sequence[str]) -> str:
    names = ", ".join(run.name for run in runs[:_MOST_NAMES]) + (", …" if len(runs) > _MOST_NAMES else "")
    others = f" and {len(directories) - 1:,} more" if len(directories) > 1 else ""
    subject = "its run" if len(runs) == 1 else f"its {len(runs):,} runs"
    return f"{subject} ({names}) wrote {directories[0]}{others}"


def owner_of(runs: Sequence[TrackedRun], directory: str, run: str) -> TrackedRun | None:
    """Return the run that wrote into a directory, by its place, parameters or name; None if unclear.

    Args:
        runs: Runs of a tracker.
        directory: Directory of checkpoints.
        run: Directory of their run, as ``run_directory`` finds it.
    """
    # The evidence, the strongest first: the tracker's directory or identifier is in the path; a parameter of
    # the run, such as ``output_dir``, is the directory; the names are equal. Weaker evidence isn't asked if a
    # stronger one exists, and evidence for two runs proves nothing.
    real, own = fs.realpath(directory), fs.realpath(run)
    name = os.path.basename(own)
    inside = [one for one in runs if one.id in real.split(os.sep) or _is_below(real, one.directory)]
    configured = inside or [one for one in runs if _has_parameter(one.parameters, own)]
    named = configured or [one for one in runs if one.name == name]
    return named[0] if len(named) == 1 else None


def run_to_record_in(runs: Sequence[TrackedRun], one: LoggedCheckpoint, to: str) -> TrackedRun | None:
    """Return the run that wrote a checkpoint; None if the tracker has none, and a new one is needed.

    Raises:
        UsageError: Several runs have the name of its directory.
    """
    owner = owner_of(runs, os.path.dirname(os.path.abspath(one.path)), one.run)
    name = one.run_name
    if owner is None and sum(run.name == name for run in runs) > 1:
        raise UsageError(f"{to}: several runs are named {name}; any may have written {one.path}")
    return owner


def _is_below(real: str, directory: str) -> bool:
    return bool(directory) and os.path.join(real, "").startswith(os.path.join(directory, ""))


def _has_parameter(parameters: Mapping[str, object], directory: str) -> bool:
    """Return whether a parameter is the path of a directory, as ``output_dir`` is."""
    # The last component is compared first: resolving every text of a configuration would access the disk, or
    # a server that is mounted.
    texts = (value.rstrip(os.sep) for value in parameters.values() if isinstance(value, str))
    name = os.path.basename(directory)
    return any(os.path.basename(text) == name and fs.realpath(text) == directory for text in texts)
