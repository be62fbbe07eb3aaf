"""What TensorFlow's state file has to say once some of the checkpoints that it lists are gone."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import replace

from ckpttool.formats.tensorflow.prefix import INDEX
from ckpttool.formats.tensorflow.state import NAME, CheckpointState, expanded, read_state, state_text
from ckpttool.series.changing.journal import Rewrite


def rewritten(directory: str, removed: Collection[str]) -> Rewrite | None:
    """Return the new text of the state file in a directory; None where it has nothing to do with what goes.

    Args:
        directory: Where the state file lies, if there is one.
        removed: Names in the directory of the checkpoints that go.
    """
    try:
        state = read_state(os.path.join(directory, NAME))
    except (OSError, ValueError):  # none, or one that can't be read: then it was left alone with its series
        return None
    if state is None:
        return None
    places = [_remaining(directory, path, removed) for path in state.paths]
    if not any(_names(directory, path, removed) for path in state.paths):
        return None
    latest = _remaining(directory, state.latest, removed) or next(
        (path for path in reversed(places) if path), None
    )
    return Rewrite(NAME, state_text(_without(state, latest or state.latest, places)))


def _without(state: CheckpointState, latest: str, places: list[str | None]) -> CheckpointState:
    """Return a state without the paths that are None; paths and timestamps stay parallel."""
    kept = [(path, at) for at, path in enumerate(places) if path is not None]
    times = tuple(state.timestamps[at] for _, at in kept) if state.timestamps else ()
    return replace(state, latest=latest, paths=tuple(path for path, _ in kept), timestamps=times)


def _remaining(directory: str, path: str, removed: Collection[str]) -> str | None:
    """Return how a listed checkpoint is to be named from now on; None where it goes, or isn't there.

    The path of a run that was moved is stale, and its base name is taken.
    """
    name = _base(path)
    if _names(directory, path, removed):
        return None
    if _is_there(os.path.join(directory, path)):
        return path
    return name if name not in removed and _is_there(os.path.join(directory, name)) else None


def _names(directory: str, path: str, removed: Collection[str]) -> bool:
    """Tell whether a listed path is that of a checkpoint that goes."""
    if not any(_base(name) in removed for name in (path, *expanded(path))):
        return False
    place = os.path.join(directory, path)
    around = os.path.realpath(os.path.dirname(place) or os.curdir)
    return around == os.path.realpath(directory) or not _is_there(place)


def _base(path: str) -> str:
    return os.path.basename(path.replace("\\", "/").rstrip("/"))


def _is_there(path: str) -> bool:
    try:
        return any(map(os.path.exists, (f"{path}{INDEX}", expanded(path)[0])))
    except ValueError:  # a NUL in it
        return False
