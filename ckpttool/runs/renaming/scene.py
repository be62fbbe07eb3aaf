"""Where checkpoints and what names them lie, their new names, and what has to follow these."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from ckpttool.formats.pointer_kind import Renamer
from ckpttool.runs.members.entry import Entry
from ckpttool.runs.pointers.notes import Mentions
from ckpttool.runs.pointers.targets import CheckpointIndex, exists
from ckpttool.storage.snapshot import Snapshot
from ckpttool.transaction.journal import Relink, Rewrite


class PathRenames:
    """New names by old ones, of all that gets another name, directory by directory."""

    def __init__(self, names: Mapping[str, Mapping[str, str]], snapshot: Snapshot) -> None:
        """Take new names by old ones, by the directory that they lie in."""
        self._seen = snapshot
        self._names = {snapshot.realpath(directory): dict(new) for directory, new in names.items()}

    def in_directory(self, directory: str) -> Mapping[str, str]:
        """Return new names by old ones in one directory."""
        return self._names.get(self._seen.realpath(directory), {})

    def new_path(self, text: str, base: str) -> str | None:
        """Return a path in which a name is another; None where it leads past all that moves."""
        directory = "/" if text.startswith("/") else base
        parts = text.split("/")
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
        """Return the function from a path that stands in a text to its new one.

        The path is taken from ``base`` and ``others``; one that leads nowhere from there, as that of a run
        that was moved, goes by its name in a directory ``near``.
        """

        def new(text: str) -> str | None:
            for directory in (base, *others):
                if (path := self.new_path(text, directory)) is not None:
                    return path
            if any(exists(os.path.join(directory, text), self._seen) for directory in (base, *others)):
                return None
            above, name = os.path.split(text.rstrip("/"))
            renames = map(self.in_directory, near)
            renamed = next((names[name] for names in renames if name in names), None)
            return None if renamed is None else os.path.join(above, renamed)

        return new


@dataclass(frozen=True, slots=True)
class Note:
    """A note: where it lies, what it says, and what it is to say."""

    directory: str
    name: str
    before: str
    after: str


@dataclass(slots=True)
class Updates:
    """What follows, by directory of the journal that it goes into, and what can't be read or changed.

    Attributes:
        rewrites: Texts that are to say something else.
        relinks: Symlinks that are to lead elsewhere.
        faults: Why something can't be changed, by its path.
        notes: All notes around them, those that say the same afterwards included.
    """

    rewrites: dict[str, list[Rewrite]] = field(default_factory=lambda: defaultdict(list))
    relinks: dict[str, list[Relink]] = field(default_factory=lambda: defaultdict(list))
    faults: dict[str, str] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)

    @property
    def count(self) -> int:
        """Return how many texts and links these are; an index or a manifest belongs to what it names."""
        rewrites = (rewrite for together in self.rewrites.values() for rewrite in together)
        in_place = sum(1 for rewrite in rewrites if None not in (rewrite.before, rewrite.after))
        return in_place + sum(map(len, self.relinks.values()))

    @property
    def directories(self) -> list[str]:
        """Return the directories in which something has to follow."""
        return list(dict.fromkeys((*self.rewrites, *self.relinks)))


@dataclass(frozen=True)  # without slots, for what it keeps once it was asked for
class Scene:
    """Where checkpoints and what names them lie.

    Attributes:
        root: The directory that was asked for.
        entries: All checkpoints in it, those that keep their names included.
        links: The symlinks in the tree and beside it, with what they lead to.
        note_directories: The directories below the root in which notes name checkpoints.
        snapshot: Snapshot that everything is looked up in.
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
        """Return what finds the checkpoints that a text names."""
        return Mentions(CheckpointIndex(self.entries, self.snapshot))

    @property
    def other_note_directories(self) -> list[str]:
        """Directories without checkpoints whose notes name checkpoints."""
        known = set(self.directories)
        return [directory for directory in self.note_directories if directory not in known]

    def journal_directory(self, directory: str) -> str | None:
        """Return the directory of checkpoints that another is or lies below, the nearest one."""
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
