"""In which order checkpoints get their names if one is to have the name that another still has."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count

from ckpttool.runs.members.entry import Entry
from ckpttool.runs.renaming.names import MAX_NAME, Renaming, fold_name, unit_stem
from ckpttool.transaction.files import Contents, contents
from ckpttool.transaction.journal import Move

MOST_WAVES = 3
"""Each wave is a journal; what would take more goes by names of ours."""


@dataclass(frozen=True, slots=True)
class RenameStep:
    """A checkpoint on its way to its name.

    Attributes:
        entry: The checkpoint, as it is called now.
        names: New names by the ones that it has now: its own, and those of its members.
        renaming: Which checkpoint it is, and what it is to be called in the end.
        is_last: Whether it has its name then.
    """

    entry: Entry
    names: Mapping[str, str]
    renaming: Renaming
    is_last: bool = True

    @property
    def move(self) -> Move:
        """Return it as a journal has it: its index last to come and first to leave."""
        parts = self.entry.unit.parts
        rank = {
            name: (name not in parts, name != self.entry.name, "index" not in name, name)
            for name in self.entry.unit.members
        }
        members = tuple((name, self.names[name]) for name in sorted(rank, key=rank.__getitem__))
        return Move(self.renaming.entry.path, members, self.entry.contents)

    def without(self, names: Collection[str]) -> Move:
        """Return the move of what isn't written anew under its new name."""
        move = self.move
        files = tuple(file for file in move.contents.files if file.path not in names)
        members = tuple((old, new) for old, new in move.members if old not in names)
        return Move(move.path, members, Contents(files, move.contents.directories))


def steps(renamings: Sequence[Renaming]) -> list[RenameStep]:
    """Return the steps that lead to some names, each the whole way."""
    return [RenameStep(renaming.entry, renaming.names, renaming) for renaming in renamings]


def next_wave(waiting: Sequence[RenameStep], standing: Collection[str]) -> list[RenameStep]:
    """Return the steps in one directory that can be made at once: nothing still has the names that they need.

    Where the others wait for each other, or in a long row, they go aside first, all at once, by names that
    say as much as their old ones.
    """
    ready = _ready(waiting)
    blocked = _without(waiting, ready)
    rest = blocked
    for _ in range(MOST_WAVES - 1):
        rest = _without(rest, _ready(rest))
    return [*ready, *_aside(blocked, standing)] if rest else ready


def _ready(waiting: Sequence[RenameStep]) -> list[RenameStep]:
    owners = {fold_name(old): step for step in waiting for old in step.names}
    return [
        step
        for step in waiting
        if all(owners.get(fold_name(new), step) is step for new in step.names.values())
    ]


def _without(waiting: Sequence[RenameStep], ready: Sequence[RenameStep]) -> list[RenameStep]:
    made = set(map(id, ready))
    return [step for step in waiting if id(step) not in made]


def _aside(waiting: Sequence[RenameStep], standing: Collection[str]) -> list[RenameStep]:
    """Return steps to names that nothing has, from which the same fields can be read."""
    taken = set(map(fold_name, standing))
    aside = []
    for step in waiting:
        stem = unit_stem(step.entry)
        longest = max(len(os.fsencode(name)) for name in step.names)
        for number in count(1):
            mark = f"~{number}"
            new = (stem if longest + len(mark) <= MAX_NAME else "renaming") + mark
            names = {name: new + name.removeprefix(stem) for name in step.names}
            if taken.isdisjoint(map(fold_name, names.values())):
                break
        taken.update(map(fold_name, names.values()))
        aside.append(replace(step, names=names, is_last=False))
    return aside


def entry_after(step: RenameStep) -> Entry:
    """Return a checkpoint as it is once a step was made."""
    entry = step.entry
    name = step.names[entry.name]
    members = tuple(step.names[member] for member in entry.unit.members)
    unit = entry.unit._replace(path=os.path.join(os.path.dirname(entry.unit.path), name), members=members)
    path = os.path.join(os.path.dirname(entry.path), name)
    return refresh(replace(entry, path=path, unit=unit))


def refresh(entry: Entry) -> Entry:
    """Return a checkpoint with its files as they are now, after what we changed in it ourselves."""
    return replace(entry, contents=contents(entry.directory, entry.unit.members))


def remaining_step(step: RenameStep, entry: Entry) -> RenameStep:
    """Return the step from where a checkpoint is now to its name."""
    first = step.renaming.entry  # its members come in the same order whatever they are called
    current = dict(zip((*first.unit.members, first.name), (*entry.unit.members, entry.name), strict=True))
    names = {current[name]: new for name, new in step.renaming.names.items()}
    return RenameStep(entry, names, step.renaming)
