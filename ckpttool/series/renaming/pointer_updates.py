"""What has to follow when checkpoints get other names: pointers, indexes, manifests, pins, symlinks.

Whatever form a path has where it stands, relative or absolute, it keeps; only the name in it is another.
"""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping

from ckpttool.errors import CheckpointError
from ckpttool.formats import shard_index
from ckpttool.formats.interface import SIDECARS
from ckpttool.formats.keras import sharded as keras_sharded
from ckpttool.formats.tensorflow import state as tf_state
from ckpttool.formats.tensorflow.prefix import INDEX
from ckpttool.ops.manifest import SHARED
from ckpttool.series.changing.moves import Relink, Rewrite
from ckpttool.series.changing.pointer_files import text_at
from ckpttool.series.changing.stage import StalePlan
from ckpttool.series.members.entry import Entry
from ckpttool.series.pointers.notes import SUMS, is_note, read_note
from ckpttool.series.pointers.pins import rename_pins
from ckpttool.series.pointers.readers import PINS, Names, names_in, noted_name
from ckpttool.series.renaming import text_rewrites
from ckpttool.series.renaming.note_rewrites import NoteRewriter
from ckpttool.series.renaming.scene import Note, PathRenames, Scene, Updates, exists

STATE = "trainer_state.json"

MAX_SUMS = 1 << 24
"""Bytes; a longer list of digests isn't of checkpoints."""


def updates_for(
    scene: Scene, moved: PathRenames, *, home: str | None = None, before: Scene | None = None
) -> Updates:
    """Return all that has to follow some new names, as it stands on the disk now.

    What lies in a checkpoint's directory that gets a new name is told with that. With ``home``, only what
    goes into the journal of that directory of checkpoints follows; ``before`` is where everything lay under
    the names that notes have, if it has new ones already.
    """
    found = Updates()
    part = scene.whole if home is None else scene.part(home)
    notes = NoteRewriter(scene if before is None else before, moved)
    members = {(entry.directory, name) for entry in part.entries for name in entry.unit.members}
    edits: dict[str, dict[str, text_rewrites.FileChange]] = defaultdict(dict)
    for entry in part.entries:
        if entry.contents.directories:
            edits[entry.directory] |= _update_inside(found, entry, moved)
    for directory in part.directories:
        names = {name: one for name, one in names_in(directory).items() if (directory, name) not in members}
        _update_beside(found, scene, directory, names, moved, edits[directory], notes)
    if home is None:
        _update_above(found, scene, moved, notes)
    for directory in part.noted:
        for file in names_in(directory).values():
            _update_note(found, scene, directory, file, moved, notes)
    for entry in part.entries:
        if entry.name in moved.in_directory(entry.directory) or edits[entry.directory]:
            for name in entry.unit.members:
                _update_member(found, entry, name, moved, edits[entry.directory])
    for link, target in part.links.items():
        _update_link(found, scene, link, target, moved)
    return found


def _update_above(found: Updates, scene: Scene, moved: PathRenames, notes: NoteRewriter) -> None:
    """Add what lies beside the root, and names what lies in it."""
    real = os.path.realpath(scene.root)
    above = os.path.dirname(real)
    if above != real:
        _update_beside(found, scene, above, names_in(above), moved, {}, notes)


def _update_beside(
    found: Updates,
    scene: Scene,
    directory: str,
    names: Names,
    moved: PathRenames,
    edits: Mapping[str, text_rewrites.FileChange],
    notes: NoteRewriter,
) -> None:
    """Add what lies beside checkpoints, and names them."""
    from_anywhere = moved.renamer(directory, os.curdir, near=[directory])
    readers: dict[str, Callable[[str], str]] = {
        tf_state.NAME: lambda text: _state_text(text, moved, directory),
        STATE: lambda text: text_rewrites.best_text(text, from_anywhere),
        PINS: lambda text: rename_pins(text, _relative(moved, directory, text)),
    }

    changed = dict(edits)

    def sums(text: str) -> str:
        return text_rewrites.sums_text(text, moved.renamer(directory), changed)

    readers |= dict.fromkeys(SHARED, sums)
    for name, file in sorted(names.items(), key=lambda one: bool(SUMS.fullmatch(one[0]))):
        try:
            is_file = file.is_file(follow_symlinks=False)
        except OSError:  # it has just gone
            continue
        told = None
        if is_file and name in readers:
            if name != tf_state.NAME or _is_state(file.path):
                told = _rewrite_text(found, directory, name, readers[name])
        elif is_file:
            if SUMS.fullmatch(name) and _is_small(file):
                told = _rewrite_text(found, directory, name, sums)
            told = told or _update_note(found, scene, directory, file, moved, notes)
        if told is not None:
            changed[name] = _file_change(told)


def _update_note(
    found: Updates,
    scene: Scene,
    directory: str,
    file: os.DirEntry[str],
    moved: PathRenames,
    notes: NoteRewriter,
) -> Rewrite | None:
    """Add what somebody noted, and which checkpoints it will not name any more."""
    text = read_note(file)
    if text is None:
        return None
    is_path = noted_name(file) is not None and "://" not in text
    new = moved.renamer(directory, near=[directory]) if is_path else None

    def reword(text: str) -> str:
        told = text if new is None else text_rewrites.line_text(text, new)
        return notes.rewrite(text, directory, file.name) if told == text and is_note(file.name) else told

    real = os.path.realpath(directory)
    home = scene.home(directory) or directory
    inner = Updates()
    can_change = os.access(directory, os.W_OK) and os.access(home, os.W_OK)
    told = _rewrite_text(inner, directory, file.name, reword) if can_change else None
    if told is not None:
        name = os.path.relpath(os.path.join(real, file.name), os.path.realpath(home))
        found.rewrites[home].append(Rewrite(name, told.before, told.after))
    if is_note(file.name):
        after = text if told is None or told.after is None else told.after
        found.notes.append(Note(directory, file.name, text, after))
    return told


def _is_small(file: os.DirEntry[str]) -> bool:
    try:
        return file.stat().st_size <= MAX_SUMS
    except OSError:  # it has just gone
        return False


def _state_text(text: str, moved: PathRenames, directory: str) -> str:
    """Return TensorFlow's state file; the stale path of a run that was moved becomes a name."""

    def new(path: str) -> str | None:
        told = moved.new_path(path, directory)
        if told is None and not exists(os.path.join(directory, path)):
            return moved.in_directory(directory).get(os.path.basename(path.replace("\\", "/").rstrip("/")))
        return told

    return text_rewrites.state_file_text(text, new)


def _is_state(path: str) -> bool:
    try:
        return tf_state.read_state(path) is not None
    except (OSError, ValueError):
        return True


def _relative(moved: PathRenames, directory: str, text: str) -> Mapping[str, str]:
    """Return new paths by old ones, as seen from a directory: in it, and in those that a text may name."""
    from ckpttool.wire.tomltext import parse_toml

    told = parse_toml(text).get("pinned", [])
    names = [name for name in told if isinstance(name, str)] if isinstance(told, list) else []
    plain = {os.path.normpath(name) for name in names}
    plain |= {name.removesuffix(INDEX) for name in plain}
    return {name: new for name in plain if (new := moved.new_path(name, directory)) is not None}


def _rewrite_text(found: Updates, directory: str, name: str, reword: Callable[[str], str]) -> Rewrite | None:
    """Add a text that is to say something else; note why one can't be changed."""
    path = os.path.join(directory, name)
    try:
        before = text_at(path)
        after = None if before is None else reword(before)
    except (OSError, ValueError, StalePlan, CheckpointError) as failure:
        found.faults[path] = getattr(failure, "strerror", None) or str(failure)
        return None
    if before is None or after == before:
        return None
    rewrite = Rewrite(name, before, after)
    found.rewrites[directory].append(rewrite)
    return rewrite


def _update_inside(found: Updates, entry: Entry, moved: PathRenames) -> dict[str, text_rewrites.FileChange]:
    """Add a trainer's state in a checkpoint's directory; return what of it says something else then."""
    directory = entry.directory
    name = os.path.join(entry.name, STATE)
    if not os.path.isfile(os.path.join(directory, name)):
        return {}
    own = moved.in_directory(directory).get(entry.name, entry.name)
    new = moved.renamer(os.path.join(directory, entry.name), os.curdir, directory, near=[directory])
    inner = Updates()
    told = _rewrite_text(inner, directory, name, lambda text: text_rewrites.best_text(text, new))
    found.faults |= inner.faults
    if told is None:
        return {}
    edits = {name: _file_change(told)}
    found.rewrites[directory].append(Rewrite(os.path.join(own, STATE), told.before, told.after))
    _sums_inside(found, entry, own, edits)
    return edits


def _file_change(rewrite: Rewrite) -> text_rewrites.FileChange:
    before, after = (_encode(text) for text in (rewrite.before, rewrite.after))
    return text_rewrites.FileChange(
        hashlib.sha256(before).hexdigest(), hashlib.sha256(after).hexdigest(), len(after)
    )


def _encode(text: str | None) -> bytes:
    return (text or "").encode("utf-8", "surrogateescape")


def _sums_inside(
    found: Updates, entry: Entry, own: str, edits: Mapping[str, text_rewrites.FileChange]
) -> None:
    """Add the lists of digests in a checkpoint's directory, of which one file is another now."""
    within = {os.path.relpath(name, entry.name): edit for name, edit in edits.items()}
    inner = Updates()
    for shared in SHARED:
        name = os.path.join(entry.name, shared)
        if os.path.isfile(os.path.join(entry.directory, name)):
            told = _rewrite_text(
                inner,
                entry.directory,
                name,
                lambda text: text_rewrites.sums_text(text, lambda _: None, within),
            )
            if told is not None:
                found.rewrites[entry.directory].append(
                    Rewrite(os.path.join(own, shared), told.before, told.after)
                )
    found.faults |= inner.faults


def _update_member(
    found: Updates, entry: Entry, name: str, moved: PathRenames, edits: Mapping[str, text_rewrites.FileChange]
) -> None:
    """Add a manifest or an index, whose text has names in it: it is written anew under its new name."""
    names, new = moved.in_directory(entry.directory), moved.renamer(entry.directory)
    readers: dict[str, Callable[[str], str]] = {
        SIDECARS[0]: lambda text: text_rewrites.sums_text(text, new, edits),
        SIDECARS[1]: lambda text: text_rewrites.digests_text(text, new, edits),
        "": lambda text: text_rewrites.index_text(text, names),
    }
    kind = next((ending for ending in SIDECARS if name.endswith(ending)), None)
    if kind is None and not (name == entry.name and is_index(entry)):
        return
    inner = Updates()
    told = _rewrite_text(inner, entry.directory, name, readers[kind or ""])
    found.faults |= inner.faults
    if told is None:
        return
    if name in names:
        found.rewrites[entry.directory] += [
            Rewrite(names[name], None, told.after),
            Rewrite(name, told.before, None),
        ]
    else:
        found.rewrites[entry.directory].append(told)


def is_index(entry: Entry) -> bool:
    """Tell whether a checkpoint is a set of shards behind an index, which names them."""
    patterns = (shard_index.INDEX, keras_sharded.INDEX)
    return entry.name in entry.unit.members and any(one.fullmatch(entry.name) for one in patterns)


def _update_link(found: Updates, scene: Scene, link: str, target: str, moved: PathRenames) -> None:
    """Add a symlink that leads to what gets another name, or into it."""
    around = os.path.dirname(link)
    new = moved.new_path(target, around or os.curdir)
    if new is None:
        return
    home = scene.home(around or os.curdir)
    if home is None:
        found.relinks[around or os.curdir].append(Relink(os.path.basename(link), target, new))
        return
    real = os.path.realpath(around or os.curdir)
    path = os.path.relpath(os.path.join(real, os.path.basename(link)), os.path.realpath(home))
    found.relinks[home].append(Relink(path, target, new))


def link_holders(
    scene: Scene, names: Iterable[tuple[str, str]], moved: PathRenames
) -> Iterator[tuple[str, str]]:
    """Yield the checkpoints among some, by directory and name, inside which a symlink leads to what moves."""
    wanted = {os.path.join(os.path.realpath(directory), name): (directory, name) for directory, name in names}
    for link, target in scene.links.items():
        around = os.path.dirname(link) or os.curdir
        if moved.new_path(target, around) is None:
            continue
        place = os.path.realpath(around)
        while place != os.path.dirname(place):
            if place in wanted:
                yield wanted[place]
                break
            place = os.path.dirname(place)
