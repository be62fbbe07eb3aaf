"""What pointers are to say once something is taken back: what they said, or that with what came since."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from difflib import SequenceMatcher

from ckpttool.formats.tensorflow.state import NAME, CheckpointState, parse_state, state_text
from ckpttool.series.changing.moves import Move, Moves, Relink, Rewrite
from ckpttool.series.changing.pointing import text_at
from ckpttool.series.changing.stage import Changed
from ckpttool.series.paths import shown
from ckpttool.series.reasons import Problem


def merged(directory: str, wanted: Moves, fit: Sequence[Move]) -> tuple[Moves, list[Problem]]:
    """Return moves with what pointers are to say now, and which of them are left as they are, and why.

    Args:
        directory: The directory that they lie in.
        wanted: What takes a journal back.
        fit: Those of its moves that can be made.
    """
    left: list[Problem] = []
    rewrites: list[Rewrite] = []
    for one in wanted.rewrites:
        try:
            found = _merged(directory, wanted, one, fit)
        except (OSError, ValueError, Changed) as failure:
            found = None
            left.append(Problem(_shown(directory, one), f"left as it is: {failure}"))
        if found is not None and found.before != found.after:
            rewrites.append(found)
        elif found is not None and found.after != one.after:
            text = "somebody else has written it since; it is left as it is"
            left.append(Problem(_shown(directory, one), text))
    relinks: list[Relink] = []
    for link in wanted.relinks:
        now = _leads_to(os.path.join(directory, link.name))
        if now == link.before:
            relinks.append(link)
        elif now != link.after:
            left.append(Problem(_shown(directory, link), "it leads elsewhere; it is left as it is"))
    return replace(wanted, moves=tuple(fit), rewrites=tuple(rewrites), relinks=tuple(relinks)), left


def _shown(directory: str, one: Rewrite | Relink) -> str:
    return shown(os.path.join(directory, one.name))


def _merged(directory: str, wanted: Moves, one: Rewrite, fit: Sequence[Move]) -> Rewrite | None:
    """Return how a pointer is taken back; one whose text stays is left."""
    if one.before is None or one.after is None:  # an index that comes, or goes: as recorded, or not at all
        return one
    now = text_at(_place(directory, wanted, one.name))
    if now is None or now == one.after:
        return Rewrite(one.name, one.after, one.after)
    if now == one.before and len(fit) == len(wanted.moves):
        return one
    if one.name == NAME:
        return Rewrite(one.name, now, merged_state(now, one, {_base(move.path) for move in fit}))
    return Rewrite(one.name, now, _lines_back(now, one.before, one.after))


def _place(directory: str, wanted: Moves, name: str) -> str:
    """Return where a pointer lies before it is taken back: in a directory that is still to move, perhaps."""
    first, mark, rest = name.partition(os.sep)
    now = {new: old for move in wanted.moves for old, new in move.members}
    if mark and wanted.source == wanted.target and first in now:
        return os.path.join(directory, now[first], rest)
    return os.path.join(directory, name)


def _leads_to(path: str) -> str | None:
    try:
        return os.readlink(path)
    except OSError:  # it has gone, or is no symlink any more
        return None


def _lines_back(now: str, ours: str, before: str) -> str:
    """Return a text in which the lines that we wrote are again those that they replaced."""
    wrote, was = ours.splitlines(keepends=True), before.splitlines(keepends=True)
    back: dict[str, str] = {}
    for kind, at, end, other, other_end in SequenceMatcher(None, wrote, was, autojunk=False).get_opcodes():
        if kind == "replace" and end - at == other_end - other:
            back |= dict(zip(wrote[at:end], was[other:other_end], strict=True))
    return "".join(back.get(line, line) for line in now.splitlines(keepends=True))


def merged_state(now: str, ours: Rewrite, restored: Collection[str]) -> str:
    """Return TensorFlow's state file with the paths that we took out, or changed, back in their places.

    Args:
        now: What it says.
        ours: How what we made it say was to be taken back.
        restored: Names of the checkpoints that are back.

    Raises:
        ValueError: One of the texts is no state file.
    """
    state, wrote, was = (_state(text) for text in (now, ours.before, ours.after))
    changed: dict[str, str] = {}
    if len(wrote.paths) == len(was.paths):
        changed = {
            new: old for new, old in zip(wrote.paths, was.paths, strict=True) if _base(old) in restored
        }
        changed[wrote.latest] = was.latest if _base(was.latest) in restored else wrote.latest
    paths = [changed.get(path, path) for path in state.paths]
    times = list(state.timestamps)
    for number, path in enumerate(was.paths):
        is_ours = path not in wrote.paths and path not in changed.values()  # else somebody else took it out
        if is_ours and path not in paths and _base(path) in restored:
            at = _position(paths, was.paths, number)
            if times:
                times.insert(at, was.timestamps[number] if was.timestamps else times[max(at - 1, 0)])
            paths.insert(at, path)
    latest = was.latest if _is_back(state, wrote, was, restored) else changed.get(state.latest, state.latest)
    return state_text(replace(state, latest=latest, paths=tuple(paths), timestamps=tuple(times)))


def _is_back(
    state: CheckpointState, wrote: CheckpointState, was: CheckpointState, restored: Collection[str]
) -> bool:
    return state.latest == wrote.latest and _base(was.latest) in restored


def _state(text: str | None) -> CheckpointState:
    found = None if text is None else parse_state(text)
    if found is None:
        raise ValueError("it names no checkpoint any more")
    return found


def _position(paths: Sequence[str], order: Sequence[str], number: int) -> int:
    """Return where a path belongs: behind the nearest of those that came before it."""
    places: Mapping[str, int] = {path: at for at, path in enumerate(paths)}
    for path in reversed(order[:number]):
        if path in places:
            return places[path] + 1
    for path in order[number + 1 :]:
        if path in places:
            return places[path]
    return 0


def _base(path: str) -> str:
    return os.path.basename(path.replace("\\", "/").rstrip("/"))
