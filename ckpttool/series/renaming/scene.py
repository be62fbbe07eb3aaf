"""Where checkpoints and what names them lie, and what of that has to follow new names."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ckpttool.series.changing.moves import Relink, Rewrite
from ckpttool.series.members.entry import Entry
from ckpttool.series.pointers.protection import links_below
from ckpttool.series.pointers.readers import names_in


@dataclass(slots=True)
class Following:
    """What follows, by directory of the journal that it goes into, and what can't be read or changed.

    Attributes:
        rewrites: Texts that are to say something else.
        relinks: Symlinks that are to lead elsewhere.
        faults: Why something can't be changed, by its path.
        stale: Which checkpoints a note names by names that they will not have any more, by its path.
    """

    rewrites: dict[str, list[Rewrite]] = field(default_factory=lambda: defaultdict(list))
    relinks: dict[str, list[Relink]] = field(default_factory=lambda: defaultdict(list))
    faults: dict[str, str] = field(default_factory=dict)
    stale: dict[str, list[str]] = field(default_factory=dict)

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

    @property
    def directories(self) -> list[str]:
        """Return the directories in which pointers are looked for."""
        return sorted({self.root, *(entry.directory for entry in self.entries)})


def links_around(root: str) -> dict[str, str]:
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


def outwards(scene: Scene, real: str) -> Iterator[str | None]:
    """Yield the directory of checkpoints that a real path lies in or below, the nearest first."""
    known = {os.path.realpath(directory): directory for directory in scene.directories}
    while True:
        yield known.get(real)
        above = os.path.dirname(real)
        if above == real:
            return
        real = above
