"""Rewrites TensorFlow's state file (``checkpoint``) as checkpoints that it lists are removed or restored."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import replace
from itertools import chain

from ckpttool.formats.tensorflow.prefix import INDEX
from ckpttool.formats.tensorflow.state import (
    NAME,
    CheckpointState,
    expand_shards,
    parse_state,
    read_state,
    state_text,
)
from ckpttool.transaction.journal import PointerText
from ckpttool.transaction.moves import Rewrite


def state_without(directory: str, removed: Collection[str]) -> PointerText | None:
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
    if not any(_goes(directory, path, removed) for path in state.paths):
        return None
    paths = [_remaining_path(directory, path, removed) for path in state.paths]
    last = next((path for path in reversed(paths) if path), None)
    latest = _remaining_path(directory, state.latest, removed) or last
    kept = [(path, at) for at, path in enumerate(paths) if path is not None]
    # Paths and timestamps stay parallel.
    times = tuple(state.timestamps[at] for _, at in kept) if state.timestamps else ()
    state = replace(
        state, latest=latest or state.latest, paths=tuple(path for path, _ in kept), timestamps=times
    )
    return PointerText(NAME, state_text(state))


def _remaining_path(directory: str, path: str, removed: Collection[str]) -> str | None:
    """Return how a listed checkpoint is to be named from now on; None where it goes, or isn't there.

    The path of a run that was moved is stale, and its base name is taken.
    """
    name = base_name(path)
    if _goes(directory, path, removed):
        return None
    if _is_there(os.path.join(directory, path)):
        return path
    return name if name not in removed and _is_there(os.path.join(directory, name)) else None


def _goes(directory: str, path: str, removed: Collection[str]) -> bool:
    """Tell whether a listed path is that of a checkpoint that goes."""
    if not any(base_name(name) in removed for name in (path, *expand_shards(path))):
        return False
    full = os.path.join(directory, path)
    parent = os.path.realpath(os.path.dirname(full) or os.curdir)
    return parent == os.path.realpath(directory) or not _is_there(full)


def _is_there(path: str) -> bool:
    try:
        return any(map(os.path.exists, (f"{path}{INDEX}", expand_shards(path)[0])))
    except ValueError:  # a NUL in it
        return False


def merged_state(now: str, ours: Rewrite, restored: Collection[str]) -> str:
    """Return TensorFlow's state file with the paths that we took out, or changed, back in their places.

    Args:
        now: What it says.
        ours: How what we made it say was to be taken back.
        restored: Names of the checkpoints that are back.
    """
    state, wrote, was = (_parse(text) for text in (now, ours.before, ours.after))
    changed: dict[str, str] = {}
    if len(wrote.paths) == len(was.paths):
        changed = {
            new: old for new, old in zip(wrote.paths, was.paths, strict=True) if base_name(old) in restored
        }
        changed[wrote.latest] = was.latest if base_name(was.latest) in restored else wrote.latest
    paths = [changed.get(path, path) for path in state.paths]
    times = list(state.timestamps)
    for number, path in enumerate(was.paths):
        was_ours = path not in wrote.paths and path not in changed.values()  # else somebody else took it out
        if was_ours and path not in paths and base_name(path) in restored:
            # Behind the nearest of those that came before it, or before the nearest that came after.
            places = {other: at for at, other in enumerate(paths)}
            before = (places[other] + 1 for other in reversed(was.paths[:number]) if other in places)
            after = (places[other] for other in was.paths[number + 1 :] if other in places)
            at = next(chain(before, after), 0)
            if times:
                times.insert(at, was.timestamps[number] if was.timestamps else times[max(at - 1, 0)])
            paths.insert(at, path)
    is_ours = state.latest == wrote.latest and base_name(was.latest) in restored
    latest = was.latest if is_ours else changed.get(state.latest, state.latest)
    return state_text(replace(state, latest=latest, paths=tuple(paths), timestamps=tuple(times)))


def _parse(text: str | None) -> CheckpointState:
    state = None if text is None else parse_state(text)
    if state is None:
        raise ValueError("it names no checkpoint any more")
    return state


def base_name(path: str) -> str:
    """Return the last name of a path that a state file lists, on whatever system it was written."""
    return os.path.basename(path.replace("\\", "/").rstrip("/"))
