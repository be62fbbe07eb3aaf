"""What has to follow when checkpoints get other names: pointers, indexes, manifests, pins, symlinks.

Whatever form a path has where it stands, relative or absolute, it keeps; only the name in it is another.
"""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

from ckpttool.core.errors import CheckpointError
from ckpttool.core.name_patterns import PIN_LISTS
from ckpttool.formats import shard_index
from ckpttool.formats.interface import SIDECARS
from ckpttool.formats.keras import sharded as keras_sharded
from ckpttool.formats.tensorflow import state as tf_state
from ckpttool.formats.tensorflow.prefix import INDEX
from ckpttool.io import fs
from ckpttool.ops.manifest import SHARED
from ckpttool.runs.members.entry import Entry
from ckpttool.runs.pointers.notes import SUMS, is_note, read_note
from ckpttool.runs.pointers.pins import rename_pins
from ckpttool.runs.pointers.readers import Names, is_one_name, names_in, pass_over
from ckpttool.runs.pointers.targets import exists
from ckpttool.runs.renaming import text_rewrites
from ckpttool.runs.renaming.note_rewrites import NoteRewriter
from ckpttool.runs.renaming.scene import Note, PathRenames, Scene, Updates
from ckpttool.runs.renaming.text_rewrites import FileChange
from ckpttool.transaction.files import StalePlan
from ckpttool.transaction.journal import Relink, Rewrite
from ckpttool.transaction.pointer_files import text_at

STATE = "trainer_state.json"

MAX_SUMS = 1 << 24
"""Bytes; a longer list of digests isn't of checkpoints."""


def updates_for(scene: Scene, moved: PathRenames) -> Updates:
    """Return all that has to follow some new names, as it stands on the disk now.

    What lies in a checkpoint's directory that gets a new name is told with that.
    """
    collector = _Collector(scene, moved, NoteRewriter(scene, moved))
    root = fs.realpath(scene.root)
    above = os.path.dirname(root)
    collector.collect(above if above != root else None)
    return collector.updates


class _Collector:
    """Collects what has to follow some new names, reading it from the disk."""

    def __init__(self, scene: Scene, moved: PathRenames, notes: NoteRewriter) -> None:
        self.updates = Updates()
        self._scene = scene
        self._moved = moved
        self._notes = notes

    def collect(self, above: str | None) -> None:
        """Add the updates of all pointers in the scene, and in the directory ``above`` its root."""
        scene = self._scene
        members = {(entry.directory, name) for entry in scene.entries for name in entry.unit.members}
        edits: dict[str, dict[str, FileChange]] = defaultdict(dict)
        for entry in scene.entries:
            if entry.contents.directories:
                edits[entry.directory] |= self._add_inside(entry)
        for directory in scene.directories:
            files = names_in(directory)
            others = {name: file for name, file in files.items() if (directory, name) not in members}
            self._add_beside(directory, others, edits[directory])
        if above is not None:
            self._add_beside(above, names_in(above, pass_over), {})
        for directory in scene.other_note_directories:
            for file in names_in(directory).values():
                self._add_note(directory, file)
        for entry in scene.entries:
            if entry.name in self._moved.in_directory(entry.directory) or edits[entry.directory]:
                for name in entry.unit.members:
                    self._add_member(entry, name, edits[entry.directory])
        for link, target in scene.links.items():
            self._add_link(link, target)

    def _add_inside(self, entry: Entry) -> dict[str, FileChange]:
        """Add a trainer's state in a checkpoint's directory; return what of it says something else then.

        The lists of digests in the directory follow it.
        """
        directory = entry.directory
        name = os.path.join(entry.name, STATE)
        if not fs.isfile(os.path.join(directory, name)):
            return {}
        new_name = self._moved.in_directory(directory).get(entry.name, entry.name)
        new = self._moved.renamer(os.path.join(directory, entry.name), os.curdir, directory, near=[directory])
        faults = self.updates.faults
        state = _rewrite(faults, directory, name, lambda text: text_rewrites.best_text(text, new))
        if state is None:
            return {}
        change = _file_change(state)
        rewrites = self.updates.rewrites[directory]
        rewrites.append(Rewrite(os.path.join(new_name, STATE), state.before, state.after))
        for shared in SHARED:
            path = os.path.join(entry.name, shared)
            if not fs.isfile(os.path.join(directory, path)):
                continue
            sums = _rewrite(
                faults,
                directory,
                path,
                lambda text: text_rewrites.sums_text(text, lambda _: None, {STATE: change}),
            )
            if sums is not None:
                rewrites.append(Rewrite(os.path.join(new_name, shared), sums.before, sums.after))
        return {name: change}

    def _add_beside(self, directory: str, files: Names, edits: Mapping[str, FileChange]) -> None:
        """Add what lies beside checkpoints, and names them."""
        moved = self._moved
        from_anywhere = moved.renamer(directory, os.curdir, near=[directory])
        changed = dict(edits)

        def sums(text: str) -> str:
            return text_rewrites.sums_text(text, moved.renamer(directory), changed)

        readers: dict[str, Callable[[str], str]] = {
            tf_state.NAME: lambda text: self._state_text(text, directory),
            STATE: lambda text: text_rewrites.best_text(text, from_anywhere),
            **dict.fromkeys(PIN_LISTS, lambda text: rename_pins(text, self._pin_renames(text, directory))),
            **dict.fromkeys(SHARED, sums),
        }
        # Lists of digests come last: they say what the others say from now on.
        for name, file in sorted(files.items(), key=lambda item: bool(SUMS.fullmatch(item[0]))):
            reader = readers.get(name)
            try:
                if not file.is_file(follow_symlinks=False):
                    continue
                if reader is None and SUMS.fullmatch(name) and file.stat().st_size <= MAX_SUMS:
                    reader = sums
            except OSError:  # it has just gone
                continue
            if name == tf_state.NAME and not _is_state(file.path):
                continue
            rewrite = None if reader is None else _rewrite(self.updates.faults, directory, name, reader)
            if rewrite is not None:
                self.updates.rewrites[directory].append(rewrite)
            elif name not in readers:
                rewrite = self._add_note(directory, file)
            if rewrite is not None:
                changed[name] = _file_change(rewrite)

    def _state_text(self, text: str, directory: str) -> str:
        """Return TensorFlow's state file; the stale path of a run that was moved becomes a name."""

        def new(path: str) -> str | None:
            new_path = self._moved.new_path(path, directory)
            if new_path is None and not exists(os.path.join(directory, path)):
                name = os.path.basename(path.replace("\\", "/").rstrip("/"))
                return self._moved.in_directory(directory).get(name)
            return new_path

        return text_rewrites.state_file_text(text, new)

    def _pin_renames(self, text: str, directory: str) -> Mapping[str, str]:
        """Return new paths by old ones, as a list of pins in a directory may name them."""
        from ckpttool.io.toml import parse_toml
        from ckpttool.runs.pointers.remarks import remarks_in

        pinned = parse_toml(text).get("pinned", [])
        names = [name for name in pinned if isinstance(name, str)] if isinstance(pinned, list) else []
        names += remarks_in(text)
        paths = {os.path.normpath(name) for name in names}
        paths |= {path.removesuffix(INDEX) for path in paths}
        return {path: new for path in paths if (new := self._moved.new_path(path, directory)) is not None}

    def _add_note(self, directory: str, file: os.DirEntry[str]) -> Rewrite | None:
        """Add what somebody noted, and which checkpoints it will not name any more."""
        text = read_note(file, pass_over)
        if text is None:
            return None
        is_path = is_one_name(file.path) and "://" not in text
        new = self._moved.renamer(directory, near=[directory]) if is_path else None

        def reword(text: str) -> str:
            line = text if new is None else text_rewrites.line_text(text, new)
            if line == text and is_note(file.name):
                return self._notes.rewrite(text, directory, file.name)
            return line

        journal_directory = self._scene.journal_directory(directory) or directory
        can_change = os.access(directory, os.W_OK) and os.access(journal_directory, os.W_OK)
        # A note that can't be changed is no fault: that it has old names then is told from what it means.
        rewrite = _rewrite({}, directory, file.name, reword) if can_change else None
        if rewrite is not None:
            path = os.path.join(fs.realpath(directory), file.name)
            name = os.path.relpath(path, fs.realpath(journal_directory))
            self.updates.rewrites[journal_directory].append(Rewrite(name, rewrite.before, rewrite.after))
        if is_note(file.name):
            after = text if rewrite is None or rewrite.after is None else rewrite.after
            self.updates.notes.append(Note(directory, file.name, text, after))
        return rewrite

    def _add_member(self, entry: Entry, name: str, edits: Mapping[str, FileChange]) -> None:
        """Add a manifest or an index, whose text has names in it: it is written anew under its new name."""
        names, new = self._moved.in_directory(entry.directory), self._moved.renamer(entry.directory)
        is_index = any(index.fullmatch(name) for index in (shard_index.INDEX, keras_sharded.INDEX))
        reword: Callable[[str], str]
        if name.endswith(SIDECARS[0]):
            reword = partial(text_rewrites.sums_text, new=new, changed=edits)
        elif name.endswith(SIDECARS[1]):
            reword = partial(text_rewrites.digests_text, new=new, changed=edits)
        elif name == entry.name and is_index:
            reword = partial(text_rewrites.index_text, names=names)
        else:
            return
        rewrite = _rewrite(self.updates.faults, entry.directory, name, reword)
        if rewrite is None:
            return
        if name in names:
            self.updates.rewrites[entry.directory] += [
                Rewrite(names[name], None, rewrite.after, like=name),
                Rewrite(name, rewrite.before, None, like=names[name]),
            ]
        else:
            self.updates.rewrites[entry.directory].append(rewrite)

    def _add_link(self, link: str, target: str) -> None:
        """Add a symlink that leads to what gets another name, or into it."""
        directory = os.path.dirname(link) or os.curdir
        new = self._moved.new_path(target, directory)
        if new is None:
            return
        journal_directory = self._scene.journal_directory(directory)
        if journal_directory is None:
            self.updates.relinks[directory].append(Relink(os.path.basename(link), target, new))
            return
        path = os.path.join(fs.realpath(directory), os.path.basename(link))
        path = os.path.relpath(path, fs.realpath(journal_directory))
        self.updates.relinks[journal_directory].append(Relink(path, target, new))


def link_holders(
    scene: Scene, names: Iterable[tuple[str, str]], moved: PathRenames
) -> Iterator[tuple[str, str]]:
    """Yield the checkpoints among some, by directory and name, inside which a symlink leads to what moves."""
    wanted = {os.path.join(fs.realpath(directory), name): (directory, name) for directory, name in names}
    for link, target in scene.links.items():
        directory = os.path.dirname(link) or os.curdir
        if moved.new_path(target, directory) is None:
            continue
        above = fs.realpath(directory)
        while above != os.path.dirname(above):
            if above in wanted:
                yield wanted[above]
                break
            above = os.path.dirname(above)


def _rewrite(
    faults: dict[str, str], directory: str, name: str, reword: Callable[[str], str]
) -> Rewrite | None:
    """Return what a text is to say if that is something else; note why one can't be changed."""
    path = os.path.join(directory, name)
    try:
        before = text_at(path)
        after = None if before is None else reword(before)
    except (OSError, ValueError, StalePlan, CheckpointError) as failure:
        faults[path] = getattr(failure, "strerror", None) or str(failure)
        return None
    return None if before is None or after == before else Rewrite(name, before, after)


def _file_change(rewrite: Rewrite) -> FileChange:
    before, after = (
        (text or "").encode("utf-8", "surrogateescape") for text in (rewrite.before, rewrite.after)
    )
    return FileChange(hashlib.sha256(before).hexdigest(), hashlib.sha256(after).hexdigest(), len(after))


def _is_state(path: str) -> bool:
    try:
        return tf_state.read_state(path) is not None
    except (OSError, ValueError):
        return True
