"""What people's notes say once checkpoints have other names, and which notes can't be made to say it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property

from ckpttool.formats.pointer_kind import Renamer
from ckpttool.runs.members.entry import Entry
from ckpttool.runs.pointers.kinds import note_kind
from ckpttool.runs.pointers.notes import Mentions, decode_note, directories_below, read_note
from ckpttool.runs.pointers.readers import pass_over
from ckpttool.runs.pointers.targets import CheckpointIndex
from ckpttool.runs.renaming.scene import Note, PathRenames, Scene
from ckpttool.storage.snapshot import Names, Snapshot


def note_directories(root: str, entries: Sequence[Entry], snapshot: Snapshot) -> tuple[str, ...]:
    """Return the directories below one in which a note means one of its checkpoints."""
    index = CheckpointIndex(entries, snapshot)
    mentions = Mentions(index)

    def has_notes(directory: str, names: Names) -> bool:
        for name, file in names.items():
            text = read_note(file, snapshot, pass_over) if note_kind(name) is not None else None
            if text is not None and next(mentions.of(text, directory, name), None) is not None:
                return True
        return False

    return tuple(
        directory
        for directory, names in directories_below(root, index, pass_over)
        if has_notes(directory, names)
    )


class NoteRewriter:
    """The notes around checkpoints that get other names: what each means before, and afterwards."""

    def __init__(self, scene: Scene, moved: PathRenames) -> None:
        """Take the checkpoints under the names that notes have, and the new names."""
        self._scene = scene
        self._moved = moved

    @cached_property
    def _renamed_mentions(self) -> Mentions:
        """Return what finds the checkpoints that a text names by their new names."""
        entries: list[Entry] = []
        for entry in self._scene.entries:
            new = self._moved.in_directory(entry.directory)
            path = os.path.join(os.path.dirname(entry.unit.path), new.get(entry.name, entry.name))
            members = tuple(new.get(name, name) for name in entry.unit.members)
            entries.append(replace(entry, unit=entry.unit._replace(path=path, members=members)))
        return Mentions(CheckpointIndex(entries, self._scene.snapshot))

    def rewrite(self, text: str, directory: str, note: str) -> str:
        """Return a note with the new names in it, as far as values in it are names."""
        kind = note_kind(note)
        return text if kind is None else kind.reworded(text, self._renamer(directory, note))

    def _renamer(self, directory: str, note: str) -> Renamer:
        """Return the function from a word that means a checkpoint, wherever that lies, to its new form."""

        def new(word: str) -> str | None:
            if "://" in word:  # what lies elsewhere has kept its name
                return None
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
        new = self._moved.in_directory(entry.directory)
        if known in new or known in (entry.name, *entry.unit.members):
            return new.get(known, known)
        suffix = entry.name.removeprefix(known)
        name = new.get(entry.name, entry.name)
        return name.removesuffix(suffix) if name.endswith(suffix) else known

    def lost(self, note: Note) -> Iterator[str]:
        """Yield the names of the checkpoints that a note means, and won't mean once they have new names."""
        meant = {entry.path: entry for entry in self._entries_in(self._scene.mentions, note.before, note)}
        if not meant:
            return
        still = {entry.path for entry in self._entries_in(self._renamed_mentions, note.after, note)}
        yield from (entry.name for path, entry in meant.items() if path not in still)

    @staticmethod
    def _entries_in(mentions: Mentions, text: str, note: Note) -> Iterator[Entry]:
        plain = decode_note(text.encode("utf-8", "surrogateescape"))
        return iter(()) if plain is None else mentions.of(plain, note.directory, note.name)


def _leads_to(front: str, directory: str, target: str, snapshot: Snapshot) -> bool:
    """Tell whether what stands before a name in a text leads to its directory: others may have it, too."""
    real, base = snapshot.realpath(target), snapshot.realpath(directory)
    if real == base or os.path.basename(front.rstrip("/")) == os.path.basename(real):
        return True
    while snapshot.realpath(os.path.join(base, front)) != real:
        base, below = os.path.dirname(base), base
        if base == below:
            return False
    return True
