"""The operations that rename the checkpoints of one directory."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ckpttool.runs.members.entry import Entry
from ckpttool.runs.renaming.names import Renaming, fold_name
from ckpttool.transaction.files import Contents
from ckpttool.transaction.journal import FILES, Group, Location, Move, OperationList, Relink, Rewrite


def rename_operations(
    renamings: Sequence[Renaming], rewrites: Sequence[Rewrite], relinks: Sequence[Relink], identity: str
) -> OperationList:
    """Return the operations that rename the checkpoints of one directory and update their pointers.

    A checkpoint has both names until the commit. Where one gets the name of another, or one that a file
    system may take for its own (``Model.pt``, ``model.pt``), both go through the stage.

    Args:
        renamings: The checkpoints with their names.
        rewrites: Texts that say other names then; an index is new under its new name.
        relinks: Symlinks that lead to other names then.
        identity: Of the command.
    """
    staged = _staged(renamings)
    written = {one.name for one in rewrites if one.after is None}
    groups: list[Group] = []
    names: list[dict[str, str]] = []
    for one in renamings:
        members = [name for name in _members(one.entry) if name not in written and one.names[name] != name]
        files = tuple(file for file in one.entry.contents.files if file.path not in written)
        contents = Contents(files, one.entry.contents.directories)
        groups.append(Group(one.entry.path, tuple(members), contents, new_name=one.name))
        names.append({name: one.names[name] for name in members})
    operations: list[Move] = []
    for number, group in enumerate(groups):  # an index is the last to come: without it there is no checkpoint
        if number not in staged:
            operations += (
                Move(number, _here(old), _here(names[number][old])) for old in reversed(group.members)
            )
    for number in sorted(staged):
        operations += (Move(number, _here(old), _aside(old)) for old in groups[number].members)
    for number in sorted(staged):
        operations += (
            Move(number, _aside(old), _here(names[number][old])) for old in reversed(groups[number].members)
        )
    return OperationList("rename", tuple(groups), (*operations, *_joined(rewrites), *relinks), identity)


def _members(entry: Entry) -> list[str]:
    """Return the names of a checkpoint's members in the order of removal: indexes first."""
    parts = entry.unit.parts
    return sorted(
        entry.unit.members,
        key=lambda name: (name not in parts, name != entry.name, "index" not in name, name),
    )


def _staged(renamings: Sequence[Renaming]) -> set[int]:
    """Return the numbers of the checkpoints that are renamed through the stage: old and new names overlap."""
    owners = {fold_name(old): number for number, one in enumerate(renamings) for old in one.names}
    staged: set[int] = set()
    for number, one in enumerate(renamings):
        for old, new in one.names.items():
            owner = owners.get(fold_name(new))
            if owner is not None and new != old:
                staged |= {number, owner}
    return staged


def _joined(rewrites: Sequence[Rewrite]) -> list[Rewrite]:
    """Merge rewrites of the same file: a new index may replace the old one of another checkpoint.

    New texts are written first, and old ones go last: an index is never nowhere.
    """
    joined: dict[str, Rewrite] = {}
    for one in rewrites:
        other = joined.get(one.name)
        if other is None:
            joined[one.name] = one
        else:
            new, old = (one, other) if one.before is None else (other, one)
            joined[one.name] = Rewrite(one.name, old.before, new.after, like=one.name)
    return sorted(joined.values(), key=lambda one: (one.after is None, one.before is not None))


def _here(name: str) -> Location:
    return Location("directory", name)


def _aside(name: str) -> Location:
    return Location("stage", os.path.join(FILES, name))
