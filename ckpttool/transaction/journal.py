"""Journals: the operations of one command in one directory, grouped by checkpoint.

See ``operations`` for what is done with them, and ``journal_documents`` for their text.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, NamedTuple, get_args

from ckpttool.transaction.files import Contents, Fingerprint, joined

FILES = "0"
"""Directory in a stage, or in a command's place in the trash, for the files of one directory."""

CONTENT, REPLACED = "content", "replaced"
"""Directories in the stage of an output: for what is written, and for what it replaces."""

IDENTITY = re.compile(r"\d{8}T\d{6}\.\d{6}Z-[0-9a-f]{8}")

Kind = Literal["remove", "trash", "slim", "rename", "restore", "output"]
Root = Literal["directory", "stage", "trash"]
ROOTS: tuple[Root, ...] = get_args(Root)


# Operations -----------------------------------------------------------------------------------------


class Location(NamedTuple):
    """A path in the directory, in the stage of the journal, or in the command's place in the trash."""

    root: Root
    path: str

    @property
    def is_private(self) -> bool:
        """Whether it is in the stage or the trash, where only ckpttool writes."""
        return self.root != "directory"


class Move(NamedTuple):
    """Operation that renames a file or a directory of a checkpoint.

    A file that gets a name in the directory keeps the old one, too, until the commit.

    Attributes:
        group: Number of the checkpoint in ``OperationList.groups``.
        source, target: Old and new path.
    """

    group: int
    source: Location
    target: Location

    @property
    def is_within(self) -> bool:
        """Whether both paths are in the directory."""
        return not (self.source.is_private or self.target.is_private)


class StoredFile(NamedTuple):
    """Location of a file that waits or is set aside, and its fingerprint under its final path."""

    location: Location
    file: Fingerprint


class Exchange(NamedTuple):
    """Operation that replaces a file of a checkpoint in one step.

    Attributes:
        group: Number of the checkpoint.
        path: Of the file, relative to the directory.
        old: Where the old file goes; None if there is none.
        new: Where the new file comes from; None if there is none.
    """

    group: int
    path: str
    old: StoredFile | None
    new: StoredFile | None


class Rewrite(NamedTuple):
    """Operation that changes a small text file: a pointer, a state file, an index.

    Attributes:
        name: Its path relative to the directory, after all moves.
        before: Its text now; None if it is new. Bytes that are no UTF-8 are surrogates.
        after: Its new text; None if it is removed.
        like: Path whose mode and timestamps a new file copies; its own path keeps its timestamps.
    """

    name: str
    before: str | None
    after: str | None
    like: str | None = None

    @property
    def inverse(self) -> Rewrite:
        """Return the operation that reverts this one."""
        return self._replace(before=self.after, after=self.before)


class Relink(NamedTuple):
    """Operation that changes a symlink: its path, its old and its new target."""

    name: str
    before: str
    after: str

    @property
    def inverse(self) -> Relink:
        """Return the operation that reverts this one."""
        return self._replace(before=self.after, after=self.before)


Operation = Move | Exchange | Rewrite | Relink


class Group(NamedTuple):
    """One checkpoint of a journal: all of its operations are done or none.

    Attributes:
        path: How the user knows it.
        members: Its paths before the first operation, in the order in which they leave: an index first,
            data last. In the directory, but those of what is restored in the trash.
        contents: Its files as they were when the plan was made, relative to the same place.
        survivors: Names in the directory, without which a removal isn't wanted any more.
        new_name: What a renaming calls it.
    """

    path: str
    members: tuple[str, ...]
    contents: Contents
    survivors: tuple[str, ...] = ()
    new_name: str | None = None

    @property
    def is_single(self) -> bool:
        """Whether it is a single file, so that it can't be removed in part."""
        return len(self.members) == len(self.contents.files) == 1 and not self.contents.directories


@dataclass(frozen=True)
class OperationList:
    """Operations of one journal, in the order in which they are done.

    Attributes:
        kind: What for.
        groups: The checkpoints.
        operations: What is done; see ``operations``.
        identity: Of the command; all directories in which it works have it in common, and its trash is named
            after it. None of what isn't recorded.
        done: Numbers of the committed groups; None before the commit.
        leader: Relative path of the directory whose commit counts for this one, too; None without one.
        is_copy: Whether the stage was copied since, with the directory; None if the journal doesn't tell.
    """

    kind: Kind
    groups: tuple[Group, ...]
    operations: tuple[Operation, ...]
    identity: str | None = None
    done: frozenset[int] | None = None
    leader: str | None = None
    is_copy: bool | None = None

    @property
    def is_committed(self) -> bool:
        """Whether some groups are committed, or the pointers of a list without groups."""
        return self.commits(self.done)

    def commits(self, done: frozenset[int] | None) -> bool:
        """Tell whether these groups make a commit; an empty set of groups withdraws one."""
        return bool(done) or (done is not None and not self.groups)

    @property
    def is_revertible(self) -> bool:
        """Whether it can be reverted even after the commit, since no file loses its last name."""
        asides = (one.old for one in self.operations if isinstance(one, Exchange))
        return self.kind != "remove" and all(old is None or old.location.root == "trash" for old in asides)

    @cached_property
    def pointers(self) -> tuple[Rewrite | Relink, ...]:
        """The operations that change pointers."""
        return tuple(one for one in self.operations if isinstance(one, Rewrite | Relink))

    @property
    def is_indivisible(self) -> bool:
        """Whether all groups are committed or none."""
        return self.kind in ("rename", "output") or bool(self.pointers)

    def home(self, number: int) -> Root:
        """Return the root of a group's members before the first operation."""
        for one in self.of_groups[number]:
            if isinstance(one, Move):
                return one.source.root
            if one.new is not None and one.new.location.root == "trash":
                return "trash"
        return "directory"

    @property
    def is_from_trash(self) -> bool:
        """Whether some checkpoints are restored from the trash."""
        return any(self.home(number) == "trash" for number in range(len(self.groups)))

    @cached_property
    def of_groups(self) -> tuple[tuple[Move | Exchange, ...], ...]:
        """The moves and exchanges of each group."""
        found: list[list[Move | Exchange]] = [[] for _ in self.groups]
        for one in self.operations:
            if isinstance(one, Move | Exchange):
                found[one.group].append(one)
        return tuple(map(tuple, found))

    def ends(self, number: int) -> Mapping[str, Location]:
        """Return the location of each member of a group after the last operation."""
        if number not in self._ends:
            self._ends[number] = self._find_ends(number)
        return self._ends[number]

    @cached_property
    def _ends(self) -> dict[int, Mapping[str, Location]]:
        return {}

    def _find_ends(self, number: int) -> dict[str, Location]:
        steps = self.of_groups[number]
        if len(steps) == 1 and isinstance(steps[0], Move):
            return {steps[0].source.path: steps[0].target}
        home = self.home(number)
        ends: dict[str, Location] = {}
        members: dict[Location, str] = {}
        for one in self.of_groups[number]:
            if isinstance(one, Move):
                member = members.setdefault(one.target, members.get(one.source, one.source.path))
                ends[member] = one.target
            elif home == "trash" and one.new is not None:
                ends[one.new.location.path] = Location("directory", one.path)
            elif home != "trash" and one.old is not None:
                ends[one.path] = one.old.location
        return ends

    def names(self, number: int) -> tuple[tuple[str, str], ...]:
        """Return the paths of the members of a group before and after all operations."""
        return tuple((member, location.path) for member, location in self.ends(number).items())

    def final_contents(self, number: int) -> Contents:
        """Return the contents of a group with the paths after the last operation."""
        group, ends = self.groups[number], self.ends(number)
        if group.is_single:
            (file,), (location,) = group.contents.files, ends.values()
            return Contents((replace(file, path=location.path),))

        files = tuple(replace(file, path=self._final_path(file.path, ends)) for file in group.contents.files)
        return Contents(files, tuple(self._final_path(path, ends) for path in group.contents.directories))

    @cached_property
    def inodes(self) -> frozenset[int]:
        """The inodes of the files of all groups."""
        return frozenset(file.inode for group in self.groups for file in group.contents.files)

    def files_at(self, number: int, member: str) -> list[Fingerprint]:
        """Return the files of a group at or below one of its members."""
        return self._files[number].get(member, [])

    @cached_property
    def _files(self) -> list[dict[str, list[Fingerprint]]]:
        found: list[dict[str, list[Fingerprint]]] = []
        for group in self.groups:
            files: dict[str, list[Fingerprint]] = {}
            members = frozenset(group.members)
            for file in group.contents.files:
                files.setdefault(_member_at(file.path, members), []).append(file)
            found.append(files)
        return found

    def rewritten(self, number: int) -> frozenset[str]:
        """Return the paths of a group's files that the list rewrites, so that their fingerprints change."""
        if not self._rewritten:
            return frozenset()
        ends = self.ends(number)
        files = (file.path for file in self.groups[number].contents.files)
        return frozenset(path for path in files if self._final_path(path, ends) in self._rewritten)

    @cached_property
    def _rewritten(self) -> frozenset[str]:
        return frozenset(one.name for one in self.pointers if os.sep in one.name)

    def _final_path(self, path: str, ends: Mapping[str, Location]) -> str:
        member = _member_at(path, ends)
        return ends[member].path + path[len(member) :]

    def old_path(self, path: str) -> str:
        """Return the path of a file before the first operation, from the one after the last."""
        first, mark, rest = path.partition(os.sep)
        return self._old_names.get(first, first) + mark + rest if mark else path

    @cached_property
    def _old_names(self) -> dict[str, str]:
        return {
            now: member
            for number in range(len(self.groups))
            for member, (root, now) in self.ends(number).items()
            if self.home(number) == root == "directory"
        }

    @cached_property
    def parents(self) -> frozenset[tuple[Root, str]]:
        """The directories that operations change."""
        return frozenset(
            (root, path.rpartition(os.sep)[0]) for one in self.operations for root, path in _locations(one)
        )

    def numbered(self, root: Root) -> frozenset[str]:
        """Return the numbered directories that operations use in the stage or the trash."""
        return frozenset(above for one, above in self.parents if one == root)

    def only(self, numbers: Collection[int]) -> OperationList:
        """Return the list with only some of its groups, and with all pointers."""
        now = {number: at for at, number in enumerate(sorted(numbers))}
        operations = tuple(
            one._replace(group=now[one.group]) if isinstance(one, Move | Exchange) else one
            for one in self.operations
            if not isinstance(one, Move | Exchange) or one.group in now
        )
        return replace(self, groups=tuple(self.groups[number] for number in now), operations=operations)

    def with_pointers(self, pointers: Sequence[Rewrite | Relink]) -> OperationList:
        """Return the list with its pointers replaced; they are written last."""
        rest = tuple(one for one in self.operations if isinstance(one, Move | Exchange))
        return replace(self, operations=(*rest, *pointers))

    def inverse(self) -> OperationList:
        """Return the operations that revert all of these."""
        spare = SpareLocations()
        operations: list[Operation] = []
        for one in reversed(self.operations):
            if isinstance(one, Move):
                operations.append(one._replace(source=one.target, target=one.source))
            elif isinstance(one, Exchange):
                old = one.new and StoredFile(spare.location(one.path), one.new.file)
                operations.append(one._replace(old=old, new=one.old))
            elif isinstance(one, Rewrite):
                like = one.like and self.old_path(one.like)
                operations.append(one.inverse._replace(name=self.old_path(one.name), like=like))
            else:
                operations.append(one.inverse._replace(name=self.old_path(one.name)))
        # An index is the last to come, again: what got another name here gets it in the same order.
        steps = [one for one in operations if isinstance(one, Move | Exchange)]
        within = [one for one in steps if isinstance(one, Move) and one.is_within]
        rest = [one for one in steps if not (isinstance(one, Move) and one.is_within)]
        first = [*reversed(within), *rest]
        pointers = [one for one in operations if not isinstance(one, Move | Exchange)]
        groups = tuple(
            Group(
                group.path,
                tuple(now for _, now in self.names(number)),
                self.final_contents(number),
                new_name=group.new_name,
            )
            for number, group in enumerate(self.groups)
        )
        return OperationList("restore", groups, (*first, *pointers), self.identity)


class SpareLocations:
    """Allocates paths in the stage, each in its own directory, since files may share a name."""

    def __init__(self) -> None:
        self._count = 0

    def location(self, path: str) -> Location:
        """Return the next location, for a file with the base name of a path."""
        self._count += 1
        return Location("stage", os.path.join(str(self._count), os.path.basename(path)))


def output_operations(target: str, new: Mapping[str, Contents], old: Mapping[str, Contents]) -> OperationList:
    """Return the operations that set the old files aside and move the output to its target.

    Args:
        target: How the user knows it.
        new: Its names, in the order in which they come, each with what lies there.
        old: The names of what gives way, in the order in which it leaves, likewise.
    """
    paths = {name: os.path.join(CONTENT, name) for name in new}
    kept = Group(target, tuple(old), joined(old.values()))
    come = Group(target, tuple(paths.values()), joined(new.values()).renamed(paths))
    leave = [
        Move(0, Location("directory", name), Location("stage", os.path.join(REPLACED, name))) for name in old
    ]
    number = 1 if old else 0
    moves = [
        Move(number, Location("stage", path), Location("directory", name)) for name, path in paths.items()
    ]
    groups = [group for group in (kept, come) if group.members]
    return OperationList("output", tuple(groups), (*leave, *moves))


def _locations(one: Operation) -> Iterable[Location]:
    if isinstance(one, Move):
        return (one.source, one.target)
    if isinstance(one, Exchange):
        aside = (stored.location for stored in (one.old, one.new) if stored is not None)
        return (Location("directory", one.path), *aside)
    return ()


def _member_at(path: str, members: Container[str]) -> str:
    """Return the member that equals or contains a path."""
    parts = path.split(os.sep)
    for count in range(1, len(parts) + 1):
        above = os.sep.join(parts[:count])
        if above in members:
            return above
    raise ValueError(f"{path!r} is no part of what moves")


def new_identity() -> str:
    """Return an identity for a command: the time, in UTC, and something random."""
    seconds, rest = divmod(time.time_ns(), 10**9)
    moment = time.strftime("%Y%m%dT%H%M%S", time.gmtime(seconds))
    return f"{moment}.{rest // 1000:06d}Z-{os.urandom(4).hex()}"


@dataclass(slots=True)
class Recovery:
    """Result of a recovery, by path.

    Attributes:
        finished: What was removed.
        put_back: What was to be removed, and is back.
        moved: What became of what was on its way elsewhere, each in a sentence.
        failed: What could neither be finished nor put back, with the reason.
    """

    finished: list[str] = field(default_factory=list)
    put_back: list[str] = field(default_factory=list)
    moved: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)

    def add(self, other: Recovery) -> None:
        """Add the result of another recovery."""
        self.finished += other.finished
        self.put_back += other.put_back
        self.moved += other.moved
        self.failed |= other.failed
