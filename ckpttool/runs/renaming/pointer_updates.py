"""What has to follow when checkpoints get other names: pointers, indexes, manifests, pins, symlinks.

A path keeps its form, relative or absolute; only the name in it changes (but see ``StalePaths.NAME``).
"""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

from ckpttool.core.errors import CheckpointError
from ckpttool.formats.interface import SIDECARS
from ckpttool.formats.pointer_kind import (
    MAX_POINTER,
    NO_CHANGES,
    Changes,
    FileChange,
    FilePlace,
    Renamer,
    StalePaths,
    TextKind,
)
from ckpttool.runs.members.entry import Entry
from ckpttool.runs.pointers.files import LINE
from ckpttool.runs.pointers.kinds import is_note, kind_of, text_kinds
from ckpttool.runs.pointers.notes import read_note
from ckpttool.runs.pointers.readers import names_in, pass_over, read_small
from ckpttool.runs.pointers.symlinks import SYMLINK
from ckpttool.runs.pointers.targets import exists
from ckpttool.runs.renaming.note_rewrites import NoteRewriter
from ckpttool.runs.renaming.scene import Note, PathRenames, Scene, Updates
from ckpttool.storage import fs
from ckpttool.storage.snapshot import Names, Snapshot
from ckpttool.transaction.files import StalePlan
from ckpttool.transaction.journal import Relink, Rewrite
from ckpttool.transaction.pointer_files import text_at


def updates_for(scene: Scene, moved: PathRenames) -> Updates:
    """Return all that has to follow some new names, as it stands on the disk now.

    What lies in a checkpoint's directory that gets a new name is told with that.
    """
    collector = _Collector(scene, moved, NoteRewriter(scene, moved))
    root = scene.snapshot.realpath(scene.root)
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
            files = names_in(directory, scene.snapshot)
            others = {name: file for name, file in files.items() if (directory, name) not in members}
            self._add_beside(directory, others, edits[directory])
        if above is not None:
            self._add_beside(above, names_in(above, scene.snapshot, pass_over), {})
        for directory in scene.other_note_directories:
            for file in names_in(directory, scene.snapshot).values():
                self._add_note(directory, file)
        for entry in scene.entries:
            if entry.name in self._moved.in_directory(entry.directory) or edits[entry.directory]:
                for name in entry.unit.members:
                    self._add_member(entry, name, edits[entry.directory])
        for link, target in scene.links.items():
            self._add_link(link, target)

    def _add_inside(self, entry: Entry) -> dict[str, FileChange]:
        """Add the files inside a checkpoint's directory; return how those without digests change."""
        directory = entry.directory
        new = self._moved.renamer(os.path.join(directory, entry.name), os.curdir, directory, near=[directory])
        changed: dict[str, FileChange] = {}
        for kind in text_kinds(FilePlace.INSIDE):
            if not kind.has_digests:
                changed |= self._add_all_inside(entry, kind, new, NO_CHANGES)
            elif changed:
                self._add_all_inside(entry, kind, lambda path: None, changed)
        return {os.path.join(entry.name, name): change for name, change in changed.items()}

    def _add_all_inside(
        self, entry: Entry, kind: TextKind, new: Renamer, changes: Changes
    ) -> dict[str, FileChange]:
        """Add the files of a kind in a checkpoint's directory; return how they change, by name."""
        new_name = self._moved.in_directory(entry.directory).get(entry.name, entry.name)
        changed: dict[str, FileChange] = {}
        for name in kind.files:
            path = os.path.join(entry.name, name)
            if fs.isfile(os.path.join(entry.directory, path)):
                rewrite = self._rewritten(kind, entry.directory, path, new, changes)
                if rewrite is not None:
                    renamed = rewrite._replace(name=os.path.join(new_name, name))
                    self.updates.rewrites[entry.directory].append(renamed)
                    changed[name] = _file_change(rewrite)
        return changed

    def _add_beside(self, directory: str, files: Names, edits: Mapping[str, FileChange]) -> None:
        """Add what lies beside checkpoints, and names them."""
        changed = dict(edits)
        kinds = {name: kind_of(name) for name in files}
        # Those with digests come last: they have the new digests of the others.
        order = sorted(files, key=lambda name: (kind := kinds[name]) is not None and kind.has_digests)
        for name in order:
            file, kind = files[name], kinds[name]
            try:
                if not file.is_file(follow_symlinks=False):
                    continue
                if kind is not None and _is_another(kind, file):
                    continue
            except OSError:  # it has just gone
                continue
            if kind is None or not kind.is_certain:
                rewrite = self._add_note(directory, file)
            else:
                rewrite = self._rewritten(kind, directory, name, self._renamer(kind, directory), changed)
                if rewrite is not None:
                    self.updates.rewrites[directory].append(rewrite)
            if rewrite is not None:
                changed[name] = _file_change(rewrite)

    def _renamer(self, kind: TextKind, directory: str) -> Renamer:
        """Return the function from a path in a file of a kind to its new form."""
        if kind.stale_paths is StalePaths.PATH:
            return self._moved.renamer(directory, os.curdir, near=[directory])
        new = self._moved.renamer(directory)
        return new if kind.stale_paths is StalePaths.KEPT else partial(self._renamed_name, directory)

    def _renamed_name(self, directory: str, path: str) -> str | None:
        """Return the new form of a path; the stale path of a run that was moved becomes a name."""
        new_path = self._moved.new_path(path, directory)
        if new_path is None and not exists(os.path.join(directory, path), self._scene.snapshot):
            name = os.path.basename(path.replace("\\", "/").rstrip("/"))
            return self._moved.in_directory(directory).get(name)
        return new_path

    def _rewritten(
        self, kind: TextKind, directory: str, name: str, new: Renamer, changes: Changes
    ) -> Rewrite | None:
        """Return what a file says with the new names, if that is something else; add why it can't."""
        return _rewrite(self.updates.faults, directory, name, lambda text: kind.reworded(text, new, changes))

    def _add_note(self, directory: str, file: os.DirEntry[str]) -> Rewrite | None:
        """Add what somebody noted, and which checkpoints it will not name any more."""
        text, kind = read_note(file, self._scene.snapshot, pass_over), kind_of(file.name)
        if text is None:
            return None
        if kind is None or kind.is_certain or not kind.protects:
            kind = LINE
        is_path = _is_one_name(file.path, self._scene.snapshot) and "://" not in text
        new = self._moved.renamer(directory, near=[directory]) if is_path else None

        def reword(text: str) -> str:
            line = text if new is None else kind.reworded(text, new)
            if line == text and is_note(file.name):
                return self._notes.rewrite(text, directory, file.name)
            return line

        journal_directory = self._scene.journal_directory(directory) or directory
        can_change = os.access(directory, os.W_OK) and os.access(journal_directory, os.W_OK)
        # A note that can't be changed is no fault: that it has old names then is told from what it means.
        rewrite = _rewrite({}, directory, file.name, reword) if can_change else None
        if rewrite is not None:
            path = os.path.join(self._scene.snapshot.realpath(directory), file.name)
            name = os.path.relpath(path, self._scene.snapshot.realpath(journal_directory))
            self.updates.rewrites[journal_directory].append(Rewrite(name, rewrite.before, rewrite.after))
        if is_note(file.name):
            after = text if rewrite is None or rewrite.after is None else rewrite.after
            self.updates.notes.append(Note(directory, file.name, text, after))
        return rewrite

    def _add_member(self, entry: Entry, name: str, edits: Mapping[str, FileChange]) -> None:
        """Add a manifest or an index, whose text has names in it: it is written anew under its new name."""
        names = self._moved.in_directory(entry.directory)
        kind = kind_of(name, FilePlace.MEMBER)
        if kind is None or (name != entry.name and not name.endswith(SIDECARS)):
            return
        new = names.get if name == entry.name else self._moved.renamer(entry.directory)
        rewrite = self._rewritten(kind, entry.directory, name, new, edits)
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
        new = SYMLINK.reworded(target, lambda path: self._moved.new_path(path, directory))
        if new == target:
            return
        journal_directory = self._scene.journal_directory(directory)
        if journal_directory is None:
            self.updates.relinks[directory].append(Relink(os.path.basename(link), target, new))
            return
        path = os.path.join(self._scene.snapshot.realpath(directory), os.path.basename(link))
        path = os.path.relpath(path, self._scene.snapshot.realpath(journal_directory))
        self.updates.relinks[journal_directory].append(Relink(path, target, new))


def link_holders(
    scene: Scene, names: Iterable[tuple[str, str]], moved: PathRenames
) -> Iterator[tuple[str, str]]:
    """Yield the checkpoints among some, by directory and name, inside which a symlink leads to what moves."""
    real = scene.snapshot.realpath
    wanted = {os.path.join(real(directory), name): (directory, name) for directory, name in names}
    for link, target in scene.links.items():
        directory = os.path.dirname(link) or os.curdir
        if moved.new_path(target, directory) is None:
            continue
        above = real(directory)
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


def _is_one_name(path: str, snapshot: Snapshot) -> bool:
    """Return whether a small text file consists of one line, as one that names a checkpoint does."""
    data = read_small(path, MAX_POINTER, snapshot)
    return data is not None and bool(LINE.names(data.decode("utf-8", "surrogateescape")))


def _is_another(kind: TextKind, file: os.DirEntry[str]) -> bool:
    """Tell from its size whether a file only has a name like those of a kind."""
    is_sure = file.name in kind.files and kind.formats is None
    return not is_sure and file.stat().st_size > kind.limit


def _file_change(rewrite: Rewrite) -> FileChange:
    before, after = (
        (text or "").encode("utf-8", "surrogateescape") for text in (rewrite.before, rewrite.after)
    )
    return FileChange(hashlib.sha256(before).hexdigest(), hashlib.sha256(after).hexdigest(), len(after))
