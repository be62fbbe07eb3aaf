"""Journals: the operations of one command in one directory, grouped by checkpoint.

``operations`` executes them, and ``journal_documents`` writes and parses them as JSON.
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
"""Directories in the stage of an output: for the new files, and for the files that they replace."""

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


class StoredFile(NamedTuple):
    """File that another one replaces: where it is set aside, and its fingerprint."""

    location: Location
    file: Fingerprint


class Move(NamedTuple):
    """Operation that renames a file or a directory of a checkpoint.

    A new name in the directory is a hard link, and the old name is unlinked after the commit. A file that
    replaces another one is renamed over it; one from the trash keeps a link there until the commit.

    Attributes:
        group: Number of the checkpoint in ``OperationList.groups``.
        source, target: Old and new location.
        file: Fingerprint of a file that isn't in the group's contents: a replacement that enters the
            checkpoint, or leaves it by an undo. None for all others.
        replaces: The file that has the new name now, and where it is set aside; None if the name is free.
    """

    group: int
    source: Location
    target: Location
    file: Fingerprint | None = None
    replaces: StoredFile | None = None

    @property
    def is_new(self) -> bool:
        """Whether it brings a file into the checkpoint from elsewhere in the directory."""
        return self.file is not None and not self.target.is_private

    @property
    def is_rename(self) -> bool:
        """Whether it renames a part of the checkpoint within the directory."""
        return self.file is None and not (self.source.is_private or self.target.is_private)

    @property
    def locations(self) -> tuple[Location, ...]:
        """All locations that it changes."""
        aside = () if self.replaces is None else (self.replaces.location,)
        return (self.source, self.target, *aside)


class Rewrite(NamedTuple):
    """Operation that changes a pointer: a small text file such as a state file or an index, or a symlink.

    Attributes:
        name: Its path relative to the directory, after all moves.
        before: Its text when the plan was made; None if it is new. Bytes that aren't UTF-8 are surrogates.
        after: Its new text; None if it is removed.
        like: Path whose mode and timestamps a new file copies; its own path keeps its timestamps.
        is_link: Whether it is a symlink; its text is the target then.
    """

    name: str
    before: str | None
    after: str | None
    like: str | None = None
    is_link: bool = False

    @property
    def inverse(self) -> Rewrite:
        """Return the operation that reverts this one."""
        return self._replace(before=self.after, after=self.before)


Operation = Move | Rewrite


class Group(NamedTuple):
    """One checkpoint of a journal: all of its operations are done or none.

    Attributes:
        path: Its path, for messages.
        members: Its top-level paths before the first operation, in the order in which they leave: the index
            first, data last. Relative to the directory, or to the place in the trash.
        contents: Its files when the plan was made, relative to the same place.
        survivors: Names that must still exist in the directory for recovery to complete a removal.
        new_name: The name that a rename gives it; None for other commands.
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
        kind: Kind of the command.
        groups: The checkpoints.
        operations: The operations; see ``operations``.
        identity: Identity of the command, the same in all directories that it changes; its place in the trash
            has this name. None if the command isn't recorded.
        done: Numbers of the committed groups; None before the commit.
        leader: Relative path of the directory whose commit counts for this one, too; None without a leader.
        followers: Relative paths of the directories that this one is the leader of.
        is_copy: Whether the stage was copied since, with the directory; None if the journal lacks its inode.
    """

    kind: Kind
    groups: tuple[Group, ...]
    operations: tuple[Operation, ...]
    identity: str | None = None
    done: frozenset[int] | None = None
    leader: str | None = None
    followers: tuple[str, ...] = ()
    is_copy: bool | None = None

    @property
    def is_committed(self) -> bool:
        """Whether some groups are committed, or the pointers of a list without groups."""
        return self.commits(self.done)

    def commits(self, done: frozenset[int] | None) -> bool:
        """Return whether these done groups are a commit; None is before it."""
        # A commit is withdrawn by writing an empty set. A list without groups, which only rewrites pointers,
        # has nothing else to write: there an empty set is the commit.
        return bool(done) or (done is not None and not self.groups)

    @property
    def is_revertible(self) -> bool:
        """Whether it can be reverted even after the commit, since no file loses its last name."""
        return not any(self.unlinked_locations(number) for number in range(len(self.groups)))

    def unlinked_locations(self, number: int) -> list[Location]:
        """Return the locations in the stage at which files of a group are unlinked after the commit."""
        if self.kind == "output":  # its area is removed as a whole
            return []
        steps = self.moves_by_group[number]
        sources = {one.source for one in steps}
        ends = (one.target if one.replaces is None else one.replaces.location for one in steps)
        return [location for location in ends if location.root == "stage" and location not in sources]

    @cached_property
    def pointers(self) -> tuple[Rewrite, ...]:
        """The operations that change pointers."""
        return tuple(one for one in self.operations if isinstance(one, Rewrite))

    @property
    def is_removal(self) -> bool:
        """Whether checkpoints are removed, for good or to the trash."""
        return self.kind in ("remove", "trash")

    @property
    def is_indivisible(self) -> bool:
        """Whether all groups are committed or none."""
        return self.kind in ("rename", "output") or bool(self.pointers)

    def original_root(self, number: int) -> Root:
        """Return the root of a group's members before the first operation."""
        for one in self.moves_by_group[number]:
            if one.file is None:
                return one.source.root
        return "directory"

    @property
    def is_from_trash(self) -> bool:
        """Whether some checkpoints are restored from the trash."""
        return any(self.original_root(number) == "trash" for number in range(len(self.groups)))

    @cached_property
    def moves_by_group(self) -> tuple[tuple[Move, ...], ...]:
        """The moves of each group."""
        found: list[list[Move]] = [[] for _ in self.groups]
        for one in self.operations:
            if isinstance(one, Move):
                found[one.group].append(one)
        return tuple(map(tuple, found))

    def final_locations(self, number: int) -> Mapping[str, Location]:
        """Return the location of each member of a group after the last operation."""
        return self._final_locations[number]

    @cached_property
    def _final_locations(self) -> list[Mapping[str, Location]]:
        return list(map(_final_locations_of, self.moves_by_group))

    def old_and_new_paths(self, number: int) -> tuple[tuple[str, str], ...]:
        """Return the paths of the members of a group before and after all operations."""
        return tuple((member, location.path) for member, location in self.final_locations(number).items())

    def final_contents(self, number: int) -> Contents:
        """Return the contents of a group with the paths after the last operation."""
        group, ends = self.groups[number], self.final_locations(number)
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

    def rewritten_paths(self, number: int) -> frozenset[str]:
        """Return the paths of a group's files that are rewritten, so that their fingerprints change."""
        if not self._rewritten_names:
            return frozenset()
        ends = self.final_locations(number)
        files = (file.path for file in self.groups[number].contents.files)
        return frozenset(path for path in files if self._final_path(path, ends) in self._rewritten_names)

    @cached_property
    def _rewritten_names(self) -> frozenset[str]:
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
            for member, (root, now) in self.final_locations(number).items()
            if self.original_root(number) == root == "directory"
        }

    @cached_property
    def parents(self) -> frozenset[tuple[Root, str]]:
        """The directories that operations change."""
        return frozenset(
            (root, path.rpartition(os.sep)[0])
            for steps in self.moves_by_group
            for one in steps
            for root, path in one.locations
        )

    def numbered_directories(self, root: Root) -> frozenset[str]:
        """Return the numbered directories that operations use in the stage or the trash."""
        return frozenset(above for one, above in self.parents if one == root)

    def subset(self, numbers: Collection[int]) -> OperationList:
        """Return the list with only some of its groups, and with all pointers."""
        now = {number: at for at, number in enumerate(sorted(numbers))}
        operations = tuple(
            one._replace(group=now[one.group]) if isinstance(one, Move) else one
            for one in self.operations
            if isinstance(one, Rewrite) or one.group in now
        )
        return replace(self, groups=tuple(self.groups[number] for number in now), operations=operations)

    def with_pointers(self, pointers: Sequence[Rewrite]) -> OperationList:
        """Return the list with its pointers replaced; they are written last."""
        moves = tuple(one for one in self.operations if isinstance(one, Move))
        return replace(self, operations=(*moves, *pointers))

    def inverse(self) -> OperationList:
        """Return the operations that revert all of these."""
        spare = SpareLocations()
        moves: list[Move] = []
        pointers: list[Rewrite] = []
        # A file that the group doesn't list (``file``) came into the checkpoint: its inverse moves it into
        # the stage, to be unlinked. If it replaced another file, that one comes back from where it was set
        # aside, and replaces the new one in turn.
        for one in reversed(self.operations):
            if isinstance(one, Rewrite):
                like = one.like and self.old_path(one.like)
                pointers.append(one.inverse._replace(name=self.old_path(one.name), like=like))
            elif one.file is None:
                moves.append(one._replace(source=one.target, target=one.source))
            elif one.replaces is None:
                moves.append(one._replace(source=one.target, target=spare.location(one.target.path)))
            else:
                new = StoredFile(spare.location(one.target.path), one.file)
                moves.append(Move(one.group, one.replaces.location, one.target, replaces=new))
        # Renames within the directory keep their order, in which the index comes last.
        # The others go in reverse order, so that a file leaves the place that an earlier one returns to.
        within = [one for one in moves if one.is_rename]
        first = [*reversed(within), *(one for one in moves if not one.is_rename)]
        groups = tuple(
            Group(
                group.path,
                tuple(now for _, now in self.old_and_new_paths(number)),
                self.final_contents(number),
                new_name=group.new_name,
            )
            for number, group in enumerate(self.groups)
        )
        return OperationList("restore", groups, (*first, *pointers), self.identity)


class SpareLocations:
    """Allocator of paths in the stage, each in its own directory, since files may share a name."""

    def __init__(self) -> None:
        self._count = 0

    def location(self, path: str) -> Location:
        """Return the next location, for a file with the base name of a path."""
        self._count += 1
        return Location("stage", os.path.join(str(self._count), os.path.basename(path)))


def output_operations(target: str, new: Mapping[str, Contents], old: Mapping[str, Contents]) -> OperationList:
    """Return the operations that set the old files aside and move the output to its target.

    Args:
        target: Path of the output, for messages.
        new: Contents of the output by name, in the order in which they are moved in.
        old: Contents that it replaces by name, in the order in which they are moved out.
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


def _final_locations_of(steps: Iterable[Move]) -> Mapping[str, Location]:
    """Return the location of each member of a checkpoint after some moves."""
    # A member may be moved twice, into the stage and to its new name. ``members`` has the member at each
    # target, by which a later move from there continues its path.
    ends: dict[str, Location] = {}
    members: dict[Location, str] = {}
    for one in steps:
        if one.file is None:
            member = members.setdefault(one.target, members.get(one.source, one.source.path))
            ends[member] = one.target
        elif one.replaces is not None:
            ends[one.target.path] = one.replaces.location
    return ends


def _member_at(path: str, members: Container[str]) -> str:
    """Return the member that equals or contains a path."""
    parts = path.split(os.sep)
    for count in range(1, len(parts) + 1):
        above = os.sep.join(parts[:count])
        if above in members:
            return above
    raise ValueError(f"{path!r} isn't in the checkpoint")


def new_identity() -> str:
    """Return a new identity for a command: the time in UTC, and random digits."""
    seconds, rest = divmod(time.time_ns(), 10**9)
    moment = time.strftime("%Y%m%dT%H%M%S", time.gmtime(seconds))
    return f"{moment}.{rest // 1000:06d}Z-{os.urandom(4).hex()}"


@dataclass(slots=True)
class Recovery:
    """Result of a recovery, by path.

    Attributes:
        finished: Checkpoints whose removal was completed.
        put_back: Checkpoints whose removal was reverted.
        moved: Sentences on the results of other interrupted commands.
        failed: Reasons why checkpoints could be neither completed nor reverted.
    """

    finished: list[str] = field(default_factory=list)
    put_back: list[str] = field(default_factory=list)
    moved: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def results(self) -> list[str]:
        """Sentences on all that was completed or reverted."""
        doing = "interrupted prune"
        return [
            *(f"{path}: {doing}: removal completed" for path in self.finished),
            *(f"{path}: {doing}: removal reverted" for path in self.put_back),
            *self.moved,
        ]

    def add(self, other: Recovery) -> None:
        """Add the result of another recovery."""
        self.finished += other.finished
        self.put_back += other.put_back
        self.moved += other.moved
        self.failed |= other.failed
