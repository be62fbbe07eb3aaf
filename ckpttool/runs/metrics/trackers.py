"""Which run of a tracker is that of which checkpoints, and where trackers lie around a directory."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from ckpttool.core.errors import UsageError
from ckpttool.runs.members.entry import Entry
from ckpttool.runs.members.run_directories import run_directory
from ckpttool.runs.metrics import mlflow, wandb
from ckpttool.runs.metrics.tracked import TrackedModel, TrackedRun
from ckpttool.storage import fs

_MOST_NAMES = 5


def is_tracker(name: str) -> bool:
    """Tell whether a log's name is that of a tracker: ``mlflow:EXPERIMENT``, ``wandb:DIR``."""
    return name.startswith((mlflow.PREFIX, wandb.PREFIX)) and not fs.lexists(name)


def tracked_runs(
    name: str, entries: Sequence[Entry], root: str, warnings: list[str]
) -> Iterator[tuple[TrackedRun, list[int]]]:
    """Yield the runs that a name stands for, each with the checkpoints that are its own; none by a guess.

    Raises:
        UsageError: Nobody can tell whose run is whose.
        CheckpointError: The tracker has no such runs, or can't be read.
    """
    runs = runs_named(name, root)
    if not runs:
        warnings.append(f"{name}: no run is in it")
        return
    directories = dict.fromkeys(entry.directory for entry in entries)
    found = {one: run for one in directories if (run := owner_of(runs, one, root)) is not None}
    if not found and len(runs) == 1:
        found = dict.fromkeys(directories, runs[0])
    missing = [one for one in directories if one not in found]
    if missing:
        doubt = _missing_text(name, runs, missing)
        if not found:
            raise UsageError(doubt)
        warnings.append(doubt)
    owners: dict[str, list[int]] = defaultdict(list)
    for index, entry in enumerate(entries):
        if entry.directory in found:
            owners[found[entry.directory].id].append(index)
    yield from ((run, owners[run.id]) for run in runs if run.id in owners)


def _missing_text(name: str, runs: Sequence[TrackedRun], missing: Sequence[str]) -> str:
    names = ", ".join(run.name for run in runs[:_MOST_NAMES]) + (", …" if len(runs) > _MOST_NAMES else "")
    others = f" and {len(missing) - 1:,} more" if len(missing) > 1 else ""
    what = "its run" if len(runs) == 1 else f"its {len(runs):,} runs"
    is_mlflow = name.startswith(mlflow.PREFIX)
    how = "mlflow:EXPERIMENT/RUN names one" if is_mlflow else "wandb:DIR may be the directory of one"
    return f"{name}: nothing tells that {what} ({names}) wrote {missing[0]}{others}; {how}"


def runs_named(name: str, root: str) -> list[TrackedRun]:
    """Return the runs that a name stands for."""
    if name.startswith(wandb.PREFIX):
        return wandb.find_runs(name.removeprefix(wandb.PREFIX) or os.curdir)
    return mlflow.find_runs(mlflow.stores_around(places_around(root)), name.removeprefix(mlflow.PREFIX))


def owner_of(runs: Sequence[TrackedRun], directory: str, root: str) -> TrackedRun | None:
    """Return the run that wrote into a directory, by its place, parameters or name; None if unclear."""
    real, own = fs.realpath(directory), fs.realpath(run_directory(directory, root))
    name = os.path.basename(own)
    inside = [one for one in runs if one.id in real.split(os.sep) or _lies_in(real, one.directory)]
    told = inside or [one for one in runs if _names_directory(one.parameters, own)]
    named = told or [one for one in runs if one.name == name]
    return named[0] if len(named) == 1 else None


def _lies_in(real: str, directory: str) -> bool:
    return bool(directory) and os.path.join(real, "").startswith(os.path.join(directory, ""))


def _names_directory(parameters: Mapping[str, object], directory: str) -> bool:
    """Tell whether a parameter is the path of a directory, as ``output_dir`` is."""
    texts = (value.rstrip(os.sep) for value in parameters.values() if isinstance(value, str))
    name = os.path.basename(directory)
    return any(os.path.basename(text) == name and fs.realpath(text) == directory for text in texts)


def places_around(root: str) -> list[str]:
    """Return the directories in which a tracker of a directory may lie: here, in it, and above it."""
    places = [os.getcwd()]
    above = fs.realpath(root) if fs.place_of(root).opens_by_path else ""
    while above:
        places.append(above)
        above = "" if os.path.dirname(above) == above else os.path.dirname(above)
    return list(dict.fromkeys(places))


def tracked_models(root: str) -> Iterator[TrackedModel]:
    """Yield the models that trackers around a directory have under a name.

    Raises:
        CheckpointError: A tracker can't be read: nobody knows what it names, then.
    """
    places = places_around(root)
    for store in mlflow.stores_around(places):
        yield from store.models()
    for place in places:
        folder = os.path.join(place, wandb.DIRECTORY)
        if fs.exists(folder) and fs.isdir(folder):
            yield from wandb.models_in(folder)
