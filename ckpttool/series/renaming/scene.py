"""Where checkpoints and what names them lie, their new names, and what has to follow these."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from ckpttool.formats.tensorflow.prefix import INDEX
from ckpttool.series.changing.moves import Relink, Rewrite
from ckpttool.series.members.entry import Entry
from ckpttool.series.pointers.notes import Mentions
from ckpttool.series.pointers.protection import links_below
from ckpttool.series.pointers.readers import names_in
from ckpttool.series.pointers.targets import CheckpointIndex
from ckpttool.series.renaming.text_rewrites import Renamer


class PathRenames:
    """New names by old ones, of all that gets another name, directory by directory."""

    def __init__(self, names: Mapping[str, Mapping[str, str]]) -> None:
        """Take new names by old ones, by the directory that they lie in."""
        self._real: dict[str, str] = {}
        self._names = {self._real_path(directory): dict(new) for directory, new in names.items()}

    def _real_path(self, directory: str) -> str:
        if directory not in self._real:
            self._real[directory] = os.path.realpath(directory)
        return self._real[directory]

    def in_directory(self, directory: str) -> Mapping[str, str]:
        """Return new names by old ones in one directory."""
        return self._names.get(self._real_path(directory), {})

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
            if any(exists(os.path.join(directory, text)) for directory in (base, *others)):
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
        rewrites = (one for found in self.rewrites.values() for one in found)
        kept = sum(1 for one in rewrites if None not in (one.before, one.after))
        return kept + sum(map(len, self.relinks.values()))

    @property
    def homes(self) -> list[str]:
        """Return the directories in which something has to follow."""
        return list(dict.fromkeys((*self.rewrites, *self.relinks)))


@dataclass(frozen=True, slots=True)
class ScenePart:
    """Directories of checkpoints, with what in them and below them may have to follow new names.

    Attributes:
        directories: Where pointers are looked for.
        entries: The checkpoints in them.
        noted: The other directories in which notes name checkpoints.
        links: The symlinks, with what they lead to.
    """

    directories: Sequence[str]
    entries: Sequence[Entry]
    noted: Sequence[str]
    links: Mapping[str, str]


@dataclass(frozen=True)  # without slots, for what it keeps once it was asked for
class Scene:
    """Where checkpoints and what names them lie.

    Attributes:
        root: The directory that was asked for.
        entries: All checkpoints in it, those that keep their names included.
        links: The symlinks in the tree and beside it, with what they lead to.
        noted: The directories below the root in which notes name checkpoints.
    """

    root: str
    entries: tuple[Entry, ...]
    links: Mapping[str, str]
    noted: tuple[str, ...] = ()

    @cached_property
    def directories(self) -> list[str]:
        """Return the directories in which pointers are looked for."""
        return sorted({self.root, *(entry.directory for entry in self.entries)})

    @cached_property
    def mentions(self) -> Mentions:
        """Return what finds the checkpoints that a text names."""
        return Mentions(CheckpointIndex(self.entries))

    @property
    def whole(self) -> ScenePart:
        """Return all of it."""
        known = set(self.directories)
        noted = [directory for directory in self.noted if directory not in known]
        return ScenePart(self.directories, self.entries, noted, self.links)

    def part(self, home: str) -> ScenePart:
        """Return what goes into the journal of one of its directories."""
        return ScenePart([home], self._entries[home], self._noted[home], self._links[home])

    def home(self, directory: str) -> str | None:
        """Return the directory of checkpoints that another is or lies below, the nearest one."""
        real = os.path.realpath(directory)
        while real not in self._homes:
            above = os.path.dirname(real)
            if above == real:
                return None
            real = above
        return self._homes[real]

    @cached_property
    def _homes(self) -> dict[str, str]:
        return {os.path.realpath(directory): directory for directory in self.directories}

    @cached_property
    def _entries(self) -> dict[str, list[Entry]]:
        found: dict[str, list[Entry]] = defaultdict(list)
        for entry in self.entries:
            found[entry.directory].append(entry)
        return found

    @cached_property
    def _noted(self) -> dict[str | None, list[str]]:
        found: dict[str | None, list[str]] = defaultdict(list)
        for directory in self.whole.noted:
            found[self.home(directory)].append(directory)
        return found

    @cached_property
    def _links(self) -> dict[str | None, dict[str, str]]:
        found: dict[str | None, dict[str, str]] = defaultdict(dict)
        for link, target in self.links.items():
            found[self.home(os.path.dirname(link) or os.curdir)][link] = target
        return found


def links_near(root: str) -> dict[str, str]:
    """Return the symlinks in a tree, and those beside it, with what they lead to; none is followed."""
    above = os.path.dirname(os.path.realpath(root))
    beside = (entry.path for entry in names_in(above).values() if entry.is_symlink())
    found = {}
    for path in (*beside, *links_below(root)):
        try:
            found[path] = os.readlink(path)
        except OSError:  # it has just gone
            continue
    return found


def exists(path: str) -> bool:
    """Tell whether something is at a path, or a checkpoint of TensorFlow's behind it."""
    try:
        return os.path.exists(path) or os.path.exists(path + INDEX)
    except ValueError:  # a NUL in it
        return False
