"""Updates of files that name renamed checkpoints: pointers, indexes, manifests, pins, notes, symlinks.

A path keeps its form, relative or absolute; only the name in it changes (but see ``StalePaths.NAME``).
"""

from __future__ import annotations

import hashlib
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from ckpttool.core.errors import CheckpointError
from ckpttool.formats.interface import MANIFEST_SUFFIXES
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
from ckpttool.runs.entry import Entry
from ckpttool.runs.pointers.kinds import is_note, kind_of, note_kind, text_kinds
from ckpttool.runs.pointers.notes import Mentions, decode_note, directories_below, read_note
from ckpttool.runs.pointers.programs import LINE, SYMLINK
from ckpttool.runs.pointers.search import CheckpointIndex, exists, ignore_error, names_in, read_small
from ckpttool.storage import fs
from ckpttool.storage.fs import Names, Snapshot
from ckpttool.transaction.files import StalePlan
from ckpttool.transaction.journal import Rewrite
from ckpttool.transaction.pointer_files import text_at


class PathRenames:
    """New names of renamed files and directories, by directory and old name."""

    def __init__(self, names: Mapping[str, Mapping[str, str]], snapshot: Snapshot) -> None:
        """Resolve the directories of ``names``, which has new names by directory and old name."""
        self._snapshot = snapshot
        self._names = {snapshot.realpath(directory): dict(new) for directory, new in names.items()}

    def in_directory(self, directory: str) -> Mapping[str, str]:
        """Return new names by old ones in one directory."""
        return self._names.get(self._snapshot.realpath(directory), {})

    def new_path(self, text: str, base: str) -> str | None:
        """Return a path with its first renamed component replaced; None if none is renamed."""
        directory = "/" if text.startswith("/") else base
        parts = text.split("/")
        # Names are compared component by component, and each directory is resolved: a path may lead through
        # symlinks, or ``..``. All that follows the renamed component is inside the checkpoint, and unchanged.
        try:
            for number, part in enumerate(parts):
                new = self.in_directory(directory).get(part) if part else None
                if new is not None:
                    return "/".join([*parts[:number], new, *parts[number + 1 :]])
                directory = os.path.join(directory, part)
        except ValueError:  # a NUL in it
            return None
        return None

    def renamer(self, base: str, *others: str, near: Sequence[str] = ()) -> Renamer:
        """Return the function from a path in a text to its new form; None for a path that isn't renamed.

        The path is relative to ``base`` or one of ``others``. If it doesn't exist there, as after a move of
        the run, its last name is looked up in the directories ``near``.
        """

        def new(text: str) -> str | None:
            for directory in (base, *others):
                if (path := self.new_path(text, directory)) is not None:
                    return path
            if any(exists(os.path.join(directory, text), self._snapshot) for directory in (base, *others)):
                return None
            above, name = os.path.split(text.rstrip("/"))
            renames = map(self.in_directory, near)
            renamed = next((names[name] for names in renames if name in names), None)
            return None if renamed is None else os.path.join(above, renamed)

        return new


@dataclass(frozen=True, slots=True)
class NoteUpdate:
    """Note of a user: its directory, name, and text before and after the rename."""

    directory: str
    name: str
    before: str
    after: str


@dataclass(slots=True)
class PointerUpdates:
    """Updates of texts and links, by directory of their journal, and files that can't be changed.

    Attributes:
        rewrites: Texts with new content.
        relinks: Symlinks with new targets.
        faults: Why a file can't be changed, by its path.
        notes: All notes around the checkpoints, unchanged ones included.
    """

    rewrites: dict[str, list[Rewrite]] = field(default_factory=lambda: defaultdict(list))
    relinks: dict[str, list[Rewrite]] = field(default_factory=lambda: defaultdict(list))
    faults: dict[str, str] = field(default_factory=dict)
    notes: list[NoteUpdate] = field(default_factory=list)

    @property
    def count(self) -> int:
        """Return the number of updated texts and links, without indexes and manifests of checkpoints."""
        rewrites = (rewrite for together in self.rewrites.values() for rewrite in together)
        in_place = sum(1 for rewrite in rewrites if None not in (rewrite.before, rewrite.after))
        return in_place + sum(map(len, self.relinks.values()))

    @property
    def directories(self) -> list[str]:
        """Return the directories with updates."""
        return list(dict.fromkeys((*self.rewrites, *self.relinks)))


@dataclass(frozen=True)  # without slots, for cached properties
class Scene:
    """Checkpoints to rename, and the places that may name them.

    Attributes:
        root: The directory given by the user.
        entries: All checkpoints in it, those that keep their names included.
        links: Symlinks in the tree and in the directory above, with their targets.
        note_directories: The directories below the root in which notes name checkpoints.
        snapshot: Snapshot of the directories.
    """

    root: str
    entries: tuple[Entry, ...]
    links: Mapping[str, str]
    note_directories: tuple[str, ...] = ()
    snapshot: Snapshot = field(default_factory=Snapshot)

    @cached_property
    def directories(self) -> list[str]:
        """Return the directories in which pointers are looked for."""
        return sorted({self.root, *(entry.directory for entry in self.entries)})

    @cached_property
    def mentions(self) -> Mentions:
        """Return the finder of checkpoints that a text names."""
        return Mentions(CheckpointIndex(self.entries, self.snapshot))

    @property
    def other_note_directories(self) -> list[str]:
        """Directories without checkpoints whose notes name checkpoints."""
        known = set(self.directories)
        return [directory for directory in self.note_directories if directory not in known]

    def journal_directory(self, directory: str) -> str | None:
        """Return the nearest directory with checkpoints that a directory is in."""
        # Journals are in directories of checkpoints. A note elsewhere in the tree is changed by the journal
        # of the nearest one above it, under a path with directories.
        real = self.snapshot.realpath(directory)
        while real not in self._real_directories:
            above = os.path.dirname(real)
            if above == real:
                return None
            real = above
        return self._real_directories[real]

    @cached_property
    def _real_directories(self) -> dict[str, str]:
        return {self.snapshot.realpath(directory): directory for directory in self.directories}


def note_directories(root: str, entries: Sequence[Entry], snapshot: Snapshot) -> tuple[str, ...]:
    """Return the directories below one in which a note means one of its checkpoints."""
    index = CheckpointIndex(entries, snapshot)
    mentions = Mentions(index)

    def has_notes(directory: str, names: Names) -> bool:
        for name, file in names.items():
            text = read_note(file, snapshot, ignore_error) if note_kind(name) is not None else None
            if text is not None and next(mentions.of(text, directory, name), None) is not None:
                return True
        return False

    return tuple(
        directory
        for directory, names in directories_below(root, index, ignore_error)
        if has_notes(directory, names)
    )


class NoteRewriter:
    """Rewrites notes around renamed checkpoints, and compares their meaning before and after."""

    def __init__(self, scene: Scene, path_renames: PathRenames) -> None:
        """Set the checkpoints under their old names, and the new names."""
        self._scene = scene
        self._path_renames = path_renames

    @cached_property
    def _renamed_mentions(self) -> Mentions:
        """Return the finder of checkpoints by their new names."""
        entries: list[Entry] = []
        for entry in self._scene.entries:
            new = self._path_renames.in_directory(entry.directory)
            path = os.path.join(os.path.dirname(entry.unit.path), new.get(entry.name, entry.name))
            members = tuple(new.get(name, name) for name in entry.unit.members)
            entries.append(replace(entry, unit=entry.unit._replace(path=path, members=members)))
        return Mentions(CheckpointIndex(entries, self._scene.snapshot))

    def rewrite(self, text: str, directory: str, note: str) -> str:
        """Return a note with new names for the words in it that mean renamed checkpoints."""
        kind = note_kind(note)
        return text if kind is None else kind.reworded(text, self._renamer(directory, note))

    def _renamer(self, directory: str, note: str) -> Renamer:
        """Return the function from a word that means a checkpoint to its new form."""

        def new(word: str) -> str | None:
            if "://" in word:  # an object in a store keeps its name
                return None
            # Only the name in the word is replaced, and only if all checkpoints that it may mean get the same
            # new name: a wrong guess would change a user's text.
            known, meant = self._scene.mentions.look_up(word, directory, note)
            new_names = {self._new_name(known, entry) for entry in meant}
            if len(new_names) != 1 or (name := new_names.pop()) == known:
                return None
            *_, last = re.finditer(rf"(?<![^/\\]){re.escape(known)}(?![^/\\])", word)
            front = word[: last.start()].replace("\\", "/")
            if not all(_leads_to(front, directory, entry.directory, self._scene.snapshot) for entry in meant):
                return None
            return word[: last.start()] + name + word[last.end() :]

        return new

    def _new_name(self, known: str, entry: Entry) -> str:
        """Return the new form of a checkpoint's name, of a member's, or of its name without its suffix."""
        new = self._path_renames.in_directory(entry.directory)
        if known in new or known in (entry.name, *entry.unit.members):
            return new.get(known, known)
        suffix = entry.name.removeprefix(known)
        name = new.get(entry.name, entry.name)
        return name.removesuffix(suffix) if name.endswith(suffix) else known

    def lost(self, note: NoteUpdate) -> Iterator[str]:
        """Yield the names of checkpoints that a note means now, and won't mean after the rename."""
        meant = {entry.path: entry for entry in self._entries_in(self._scene.mentions, note.before, note)}
        if not meant:
            return
        still = {entry.path for entry in self._entries_in(self._renamed_mentions, note.after, note)}
        yield from (entry.name for path, entry in meant.items() if path not in still)

    @staticmethod
    def _entries_in(mentions: Mentions, text: str, note: NoteUpdate) -> Iterator[Entry]:
        plain = decode_note(text.encode("utf-8", "surrogateescape"))
        return iter(()) if plain is None else mentions.of(plain, note.directory, note.name)


def _leads_to(front: str, directory: str, target: str, snapshot: Snapshot) -> bool:
    """Return whether the path in front of a name leads to ``target``: others may have the name, too."""
    # A path in a note may be relative to the note's directory or to any one above it, such as that in which
    # the training was started. A parent with the right name is enough, as the tree may have been moved.
    real, base = snapshot.realpath(target), snapshot.realpath(directory)
    if real == base or os.path.basename(front.rstrip("/")) == os.path.basename(real):
        return True
    while snapshot.realpath(os.path.join(base, front)) != real:
        base, below = os.path.dirname(base), base
        if base == below:
            return False
    return True


def updates_for(scene: Scene, path_renames: PathRenames) -> PointerUpdates:
    """Return the updates that new names require, by the files on disk now.

    Files in the directory of a renamed checkpoint belong to its journal.
    """
    collector = _Collector(scene, path_renames, NoteRewriter(scene, path_renames))
    root = scene.snapshot.realpath(scene.root)
    above = os.path.dirname(root)
    collector.collect(above if above != root else None)
    return collector.updates


class _Collector:
    """Collects the updates that new names require, reading files from the disk."""

    def __init__(self, scene: Scene, path_renames: PathRenames, notes: NoteRewriter) -> None:
        self.updates = PointerUpdates()
        self._scene = scene
        self._path_renames = path_renames
        self._notes = notes

    def collect(self, above: str | None) -> None:
        """Add the updates of all pointers in the scene, and in the directory ``above`` its root."""
        scene = self._scene
        # The order matters where a file has digests of others: files inside checkpoints first, then those
        # next to them, then indexes and manifests, which get the new digests and sizes of both.
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
            self._add_beside(above, names_in(above, scene.snapshot, ignore_error), {})
        for directory in scene.other_note_directories:
            for file in names_in(directory, scene.snapshot).values():
                self._add_note(directory, file)
        for entry in scene.entries:
            if entry.name in self._path_renames.in_directory(entry.directory) or edits[entry.directory]:
                for name in entry.unit.members:
                    self._add_member(entry, name, edits[entry.directory])
        for link, target in scene.links.items():
            self._add_link(link, target)

    def _add_inside(self, entry: Entry) -> dict[str, FileChange]:
        """Add the files inside a checkpoint's directory; return how those without digests change."""
        directory = entry.directory
        new = self._path_renames.renamer(
            os.path.join(directory, entry.name), os.curdir, directory, near=[directory]
        )
        changed: dict[str, FileChange] = {}
        # Files inside keep their names, so lists of digests there change only by new contents of other files.
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
        new_name = self._path_renames.in_directory(entry.directory).get(entry.name, entry.name)
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
        """Add the files in a directory of checkpoints that name them."""
        changed = dict(edits)
        kinds = {name: kind_of(name) for name in files}
        # Files with digests come last, as they get the new digests of the others.
        order = sorted(files, key=lambda name: (kind := kinds[name]) is not None and kind.has_digests)
        for name in order:
            file, kind = files[name], kinds[name]
            try:
                if not file.is_file(follow_symlinks=False):
                    continue
                # Only the name of a large file resembles a kind, unless the kind has exactly this name.
                is_sure = kind is not None and name in kind.files and kind.formats is None
                if kind is not None and not is_sure and file.stat().st_size > kind.limit:
                    continue
            except OSError:  # removed since it was listed
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
            return self._path_renames.renamer(directory, os.curdir, near=[directory])
        new = self._path_renames.renamer(directory)
        return new if kind.stale_paths is StalePaths.KEPT else partial(self._renamed_name, directory)

    def _renamed_name(self, directory: str, path: str) -> str | None:
        """Return the new form of a path; the stale path of a run that was moved becomes a name."""
        new_path = self._path_renames.new_path(path, directory)
        if new_path is None and not exists(os.path.join(directory, path), self._scene.snapshot):
            name = os.path.basename(path.replace("\\", "/").rstrip("/"))
            return self._path_renames.in_directory(directory).get(name)
        return new_path

    def _rewritten(
        self, kind: TextKind, directory: str, name: str, new: Renamer, changes: Changes
    ) -> Rewrite | None:
        """Return the rewrite of a file of a kind, if its text changes; add the fault if it can't be."""
        return _rewrite(self.updates.faults, directory, name, lambda text: kind.reworded(text, new, changes))

    def _add_note(self, directory: str, file: os.DirEntry[str]) -> Rewrite | None:
        """Add a note of a user, and its rewrite."""
        text, kind = read_note(file, self._scene.snapshot, ignore_error), kind_of(file.name)
        if text is None:
            return None
        # A file such as ``latest`` may be a pointer, or a user's prose of that name. One line that is a path
        # is replaced as a pointer's; else its words are looked up like those of any note.
        if kind is None or kind.is_certain or not kind.protects:
            kind = LINE
        data = read_small(file.path, MAX_POINTER, self._scene.snapshot)
        is_one_line = data is not None and bool(LINE.names(data.decode("utf-8", "surrogateescape")))
        is_path = is_one_line and "://" not in text
        new = self._path_renames.renamer(directory, near=[directory]) if is_path else None

        def reword(text: str) -> str:
            line = text if new is None else kind.reworded(text, new)
            if line == text and is_note(file.name):
                return self._notes.rewrite(text, directory, file.name)
            return line

        journal_directory = self._scene.journal_directory(directory) or directory
        can_change = os.access(directory, os.W_OK) and os.access(journal_directory, os.W_OK)
        # A note that can't be changed is no fault: ``lost`` reports its old names.
        rewrite = _rewrite({}, directory, file.name, reword) if can_change else None
        if rewrite is not None:
            path = os.path.join(self._scene.snapshot.realpath(directory), file.name)
            name = os.path.relpath(path, self._scene.snapshot.realpath(journal_directory))
            self.updates.rewrites[journal_directory].append(Rewrite(name, rewrite.before, rewrite.after))
        if is_note(file.name):
            after = text if rewrite is None or rewrite.after is None else rewrite.after
            self.updates.notes.append(NoteUpdate(directory, file.name, text, after))
        return rewrite

    def _add_member(self, entry: Entry, name: str, edits: Mapping[str, FileChange]) -> None:
        """Add a manifest or an index of a checkpoint, which has names of files in its text."""
        # It may be renamed itself: then it is created under its new name and removed under the old one.
        names = self._path_renames.in_directory(entry.directory)
        kind = kind_of(name, FilePlace.MEMBER)
        if kind is None or (name != entry.name and not name.endswith(MANIFEST_SUFFIXES)):
            return
        new = names.get if name == entry.name else self._path_renames.renamer(entry.directory)
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
        """Add a symlink that leads to a renamed checkpoint, or into it."""
        directory = os.path.dirname(link) or os.curdir
        new = SYMLINK.reworded(target, lambda path: self._path_renames.new_path(path, directory))
        if new == target:
            return
        journal_directory = self._scene.journal_directory(directory)
        if journal_directory is None:
            self.updates.relinks[directory].append(Rewrite(os.path.basename(link), target, new, is_link=True))
            return
        path = os.path.join(self._scene.snapshot.realpath(directory), os.path.basename(link))
        path = os.path.relpath(path, self._scene.snapshot.realpath(journal_directory))
        self.updates.relinks[journal_directory].append(Rewrite(path, target, new, is_link=True))


def link_holders(
    scene: Scene, names: Iterable[tuple[str, str]], path_renames: PathRenames
) -> Iterator[tuple[str, str]]:
    """Yield the checkpoints, by directory and name, in which a symlink leads to a renamed one."""
    real = scene.snapshot.realpath

    wanted = {os.path.join(real(directory), name): (directory, name) for directory, name in names}
    for link, target in scene.links.items():
        directory = os.path.dirname(link) or os.curdir
        if path_renames.new_path(target, directory) is None:
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
    """Return the rewrite of a text, if it changes; record the fault if it can't be changed."""
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
