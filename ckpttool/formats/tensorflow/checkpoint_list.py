"""Updates of the state file ``checkpoint`` when checkpoints are renamed, removed or restored."""

from __future__ import annotations

import itertools
import os
from collections.abc import Collection, Container

from ckpttool.formats.pointer_kind import NO_CHANGES, Changes, CheckpointList, Renamer, StalePaths
from ckpttool.formats.tensorflow.prefix import INDEX
from ckpttool.formats.tensorflow.state import (
    MAX_BYTES,
    NAME,
    CheckpointState,
    expand_shards,
    parse_state,
    state_in,
    state_text,
)
from ckpttool.storage import fs


class TensorFlowState(CheckpointList):
    """State file that names the latest checkpoint and lists all.

    A state file that names none was truncated or overwritten.
    """

    what = "TensorFlow's `checkpoint`"
    files = (NAME,)
    limit = MAX_BYTES
    protects = blocks_renames = True
    formats = frozenset({"tensorflow"})
    stale_paths = StalePaths.NAME

    def reason(self, name: str) -> str:
        return "latest"

    def names(self, text: str) -> tuple[str, ...]:
        state = _state_of(state_in(text))
        return (state.latest, *state.paths)

    def targets(self, text: str, siblings: Container[str]) -> tuple[str, ...]:
        return expand_shards(_state_of(state_in(text)).latest)

    def reworded(self, text: str, new: Renamer, changes: Changes = NO_CHANGES) -> str:
        state = state_in(text)
        if state is None:  # another file of this name
            return text
        paths = tuple(new(path) or path for path in state.paths)
        latest = new(state.latest) or state.latest
        if (latest, paths) == (state.latest, state.paths):
            return text
        return state_text(state._replace(latest=latest, paths=paths))

    def without(self, text: str, directory: str, removed: Collection[str]) -> str:
        # Dangling paths are dropped with those of removed checkpoints; the last one left becomes the latest.
        try:
            state = state_in(text)
        except ValueError:
            return text
        if state is None or not any(_is_removed(directory, path, removed) for path in state.paths):
            return text
        paths = [_remaining_path(directory, path, removed) for path in state.paths]
        last = next((path for path in reversed(paths) if path), None)
        latest = _remaining_path(directory, state.latest, removed) or last
        kept = [(path, at) for at, path in enumerate(paths) if path is not None]
        # TensorFlow requires a timestamp for each path, or none at all.
        times = tuple(state.timestamps[at] for _, at in kept) if state.timestamps else ()
        state = state._replace(
            latest=latest or state.latest, paths=tuple(path for path, _ in kept), timestamps=times
        )
        return state_text(state)

    def merged(self, now: str, wrote: str, was: str, restored: Collection[str]) -> str:
        # Three versions of the text are merged, because a training run may save while checkpoints are
        # removed: ``was`` before the removal, ``wrote`` by the removal, ``now`` on disk. Removed paths that
        # are restored go back into ``now``, unless ``wrote`` shows that another process removed them. The
        # list is in the order of saving: a restored path follows its nearest predecessor that is still
        # listed, or precedes its nearest successor.
        state, ours, old = (_state_of(parse_state(text), "any longer") for text in (now, wrote, was))
        back = set(map(base_name, restored))
        changed: dict[str, str] = {}
        if len(ours.paths) == len(old.paths):
            pairs = zip(ours.paths, old.paths, strict=True)
            changed = {new: path for new, path in pairs if base_name(path) in back}
            changed[ours.latest] = old.latest if base_name(old.latest) in back else ours.latest
        paths = [changed.get(path, path) for path in state.paths]
        times = list(state.timestamps)
        for number, path in enumerate(old.paths):
            was_ours = path not in ours.paths and path not in changed.values()  # else others removed it
            if was_ours and path not in paths and base_name(path) in back:
                places = {other: at for at, other in enumerate(paths)}
                before = (places[other] + 1 for other in reversed(old.paths[:number]) if other in places)
                after = (places[other] for other in old.paths[number + 1 :] if other in places)
                at = next(itertools.chain(before, after), 0)
                if times:
                    times.insert(at, old.timestamps[number] if old.timestamps else times[max(at - 1, 0)])
                paths.insert(at, path)
        is_ours = state.latest == ours.latest and base_name(old.latest) in back
        latest = old.latest if is_ours else changed.get(state.latest, state.latest)
        return state_text(state._replace(latest=latest, paths=tuple(paths), timestamps=tuple(times)))


def _state_of(state: CheckpointState | None, *when: str) -> CheckpointState:
    if state is None:
        raise ValueError(" ".join(("it names no checkpoint", *when)))
    return state


def _remaining_path(directory: str, path: str, removed: Collection[str]) -> str | None:
    """Return the new form of a listed path; None if the checkpoint is removed or doesn't exist."""
    # Absolute paths become stale when a run's directory is moved; the base name is tried then.
    name = base_name(path)
    if _is_removed(directory, path, removed):
        return None
    if _exists(directory, path):
        return path
    return name if name not in removed and _exists(directory, name) else None


def _is_removed(directory: str, path: str, removed: Collection[str]) -> bool:
    """Return whether a listed path is that of a removed checkpoint."""
    # A path in another directory may have the same base name. It counts as removed only if it doesn't exist:
    # then it is stale, and meant the checkpoint here.
    if not any(base_name(name) in removed for name in (path, *expand_shards(path))):
        return False
    full = os.path.join(directory, path)
    parent = fs.realpath(os.path.dirname(full) or os.curdir)
    return parent == fs.realpath(directory) or not _exists(directory, path)


def _exists(directory: str, path: str) -> bool:
    """Return whether a listed checkpoint exists; local paths listed in a store don't."""
    path = os.path.join(directory, path)
    if fs.root_of(directory) and not fs.root_of(path):
        return False
    try:
        return any(map(fs.exists, (expand_shards(path)[0], f"{path}{INDEX}")))
    except ValueError:  # a NUL in it
        return False


def base_name(path: str) -> str:
    """Return the base name of a listed path, of Windows or POSIX."""
    return os.path.basename(path.replace("\\", "/").rstrip("/"))
