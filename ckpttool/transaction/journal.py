"""What a journal says: all operations of one command in one directory, and the checkpoints they are of.

See ``operations`` for what is done with it. What is read back has each value of its type, and each name stays
inside: whatever stands in it, nothing elsewhere is touched.
"""

from __future__ import annotations

import os
import re
import reprlib
import time
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, get_args

from ckpttool.transaction.files import Contents, Fingerprint, joined

PLACE = "0"
"""Directory in a stage, or in a command's place in the trash, for the files of one directory."""

CONTENT, REPLACED = "content", "replaced"
"""Directories in the stage of an output: for what is written, and for what it replaces."""

SCHEMA = "ckpttool.operations/1"

IDENTITY = re.compile(r"\d{8}T\d{6}\.\d{6}Z-[0-9a-f]{8}")

Kind = Literal["remove", "trash", "slim", "rename", "restore", "output"]
Place = Literal["directory", "stage", "trash"]
PLACES: tuple[Place, ...] = get_args(Place)


# Operations -----------------------------------------------------------------------------------------


class Spot(NamedTuple):
    """A path in the directory, in the stage of the journal, or in the command's place in the trash."""

    place: Place
    path: str

    @property
    def is_private(self) -> bool:
        """Tell whether it lies in the stage or the trash, where no other program puts anything."""
        return self.place != "directory"


class Move(NamedTuple):
    """Operation that gives a file or a directory of a checkpoint another name.

    Attributes:
        group: Number of the checkpoint in ``OperationList.groups``.
        source, target: Old and new path.
        is_link: Whether a file keeps the old name, too, until the commit.
    """

    group: int
    source: Spot
    target: Spot
    is_link: bool = False


class StoredFile(NamedTuple):
    """Where a file waits that is to be put in the directory, or was; its fingerprint has the path there."""

    spot: Spot
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
        name: Its path relative to the directory, once all checkpoints have moved.
        before: What it says; None where it is new. Bytes that are no UTF-8 are surrogates.
        after: What it is to say; None where it goes.
        like: Path of the file that it gets mode and time of, if it is new; its own if it is to keep its time.
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
    """Operation that changes a symlink: its path, what it leads to, and what it is to lead to."""

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
        """Tell whether it is one file: no half of it can ever be left."""
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
    """

    kind: Kind
    groups: tuple[Group, ...]
    operations: tuple[Operation, ...]
    identity: str | None = None
    done: frozenset[int] | None = None

    @cached_property
    def pointers(self) -> tuple[Rewrite | Relink, ...]:
        """Return the operations that change pointers."""
        return tuple(one for one in self.operations if isinstance(one, Rewrite | Relink))

    @property
    def is_indivisible(self) -> bool:
        """Tell whether all groups are committed or none."""
        return self.kind in ("rename", "output") or bool(self.pointers)

    def home(self, number: int) -> Place:
        """Return where the members of a group lie before the first operation."""
        for one in self.of_groups[number]:
            if isinstance(one, Move):
                return one.source.place
            if one.new is not None and one.new.spot.place == "trash":
                return "trash"
        return "directory"

    @property
    def is_from_trash(self) -> bool:
        """Tell whether checkpoints come out of the trash."""
        return any(self.home(number) == "trash" for number in range(len(self.groups)))

    @cached_property
    def of_groups(self) -> tuple[tuple[Move | Exchange, ...], ...]:
        """Return the operations of each group."""
        found: list[list[Move | Exchange]] = [[] for _ in self.groups]
        for one in self.operations:
            if isinstance(one, Move | Exchange):
                found[one.group].append(one)
        return tuple(map(tuple, found))

    def ends(self, number: int) -> Mapping[str, Spot]:
        """Return where each member of a group lies after the last operation."""
        if number not in self._ends:
            self._ends[number] = self._find_ends(number)
        return self._ends[number]

    @cached_property
    def _ends(self) -> dict[int, Mapping[str, Spot]]:
        return {}

    def _find_ends(self, number: int) -> dict[str, Spot]:
        steps = self.of_groups[number]
        if len(steps) == 1 and isinstance(steps[0], Move):
            return {steps[0].source.path: steps[0].target}
        home = self.home(number)
        ends: dict[str, Spot] = {}
        members: dict[Spot, str] = {}
        for one in self.of_groups[number]:
            if isinstance(one, Move):
                member = members.setdefault(one.target, members.get(one.source, one.source.path))
                ends[member] = one.target
            elif home == "trash" and one.new is not None:
                ends[one.new.spot.path] = Spot("directory", one.path)
            elif home != "trash" and one.old is not None:
                ends[one.path] = one.old.spot
        return ends

    def names(self, number: int) -> tuple[tuple[str, str], ...]:
        """Return the paths of the members of a group before and after all operations."""
        return tuple((member, spot.path) for member, spot in self.ends(number).items())

    def final_contents(self, number: int) -> Contents:
        """Return the contents of a group with the paths after the last operation."""
        group, ends = self.groups[number], self.ends(number)
        if group.is_single:
            (file,), (spot,) = group.contents.files, ends.values()
            return Contents((replace(file, path=spot.path),))

        def final(path: str) -> str:
            member = _member_at(path, ends)
            return ends[member].path + path[len(member) :]

        files = tuple(replace(file, path=final(file.path)) for file in group.contents.files)
        return Contents(files, tuple(map(final, group.contents.directories)))

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

    def old_path(self, path: str) -> str:
        """Return the path of a file before the first operation, from the one after the last."""
        first, mark, rest = path.partition(os.sep)
        return self._old_names.get(first, first) + mark + rest if mark else path

    @cached_property
    def _old_names(self) -> dict[str, str]:
        return {
            now: member
            for number in range(len(self.groups))
            for member, (place, now) in self.ends(number).items()
            if self.home(number) == place == "directory"
        }

    @cached_property
    def parents(self) -> frozenset[tuple[Place, str]]:
        """Return the directories in which operations give or take names."""
        return frozenset(
            (place, path.rpartition(os.sep)[0]) for one in self.operations for place, path in _spots(one)
        )

    def places(self, place: Place) -> frozenset[str]:
        """Return the numbered directories in the stage, or the trash, that operations use."""
        return frozenset(above for one, above in self.parents if one == place)

    def only(self, numbers: Collection[int]) -> OperationList:
        """Return the list with some of its groups alone, and with all pointers."""
        now = {number: at for at, number in enumerate(sorted(numbers))}
        operations = tuple(
            one._replace(group=now[one.group]) if isinstance(one, Move | Exchange) else one
            for one in self.operations
            if not isinstance(one, Move | Exchange) or one.group in now
        )
        return replace(self, groups=tuple(self.groups[number] for number in now), operations=operations)

    def with_pointers(self, pointers: Sequence[Rewrite | Relink]) -> OperationList:
        """Return the list with other pointers, which are written after all else."""
        rest = tuple(one for one in self.operations if isinstance(one, Move | Exchange))
        return replace(self, operations=(*rest, *pointers))

    def inverse(self, contents: Sequence[Contents]) -> OperationList:
        """Return the operations that revert all of these.

        Args:
            contents: What is at the ends of each group.
        """
        spare = SpareSpots()
        operations: list[Operation] = []
        for one in reversed(self.operations):
            if isinstance(one, Move):
                operations.append(one._replace(source=one.target, target=one.source))
            elif isinstance(one, Exchange):
                old = one.new and StoredFile(spare.spot(one.path), one.new.file)
                operations.append(one._replace(old=old, new=one.old))
            elif isinstance(one, Rewrite):
                like = one.like and self.old_path(one.like)
                operations.append(one.inverse._replace(name=self.old_path(one.name), like=like))
            else:
                operations.append(one.inverse._replace(name=self.old_path(one.name)))
        # An index is the last to come, again: what was linked is linked in the same order.
        links = [one for one in operations if isinstance(one, Move) and one.is_link]
        rest = [
            one
            for one in operations
            if isinstance(one, Exchange) or (isinstance(one, Move) and not one.is_link)
        ]
        first = [*reversed(links), *rest]
        pointers = [one for one in operations if not isinstance(one, Move | Exchange)]
        groups = tuple(
            Group(group.path, tuple(now for _, now in self.names(number)), files, new_name=group.new_name)
            for number, (group, files) in enumerate(zip(self.groups, contents, strict=True))
        )
        return OperationList("restore", groups, (*first, *pointers), self.identity)


class SpareSpots:
    """Makes paths in the stage, each in a directory of its own: several files may have one name."""

    def __init__(self) -> None:
        self._count = 0

    def spot(self, path: str) -> Spot:
        """Return the next one, for a file with the name of a path."""
        self._count += 1
        return Spot("stage", os.path.join(str(self._count), os.path.basename(path)))


def output_operations(target: str, new: Mapping[str, Contents], old: Mapping[str, Contents]) -> OperationList:
    """Return the operations that set aside what gives way to an output, and bring that to its place.

    Args:
        target: How the user knows it.
        new: Its names, in the order in which they come, each with what lies there.
        old: The names of what gives way, in the order in which it leaves, likewise.
    """
    paths = {name: os.path.join(CONTENT, name) for name in new}
    kept = Group(target, tuple(old), joined(old.values()))
    come = Group(target, tuple(paths.values()), joined(new.values()).renamed(paths))
    leave = [Move(0, Spot("directory", name), Spot("stage", os.path.join(REPLACED, name))) for name in old]
    number = 1 if old else 0
    moves = [Move(number, Spot("stage", path), Spot("directory", name)) for name, path in paths.items()]
    groups = [group for group in (kept, come) if group.members]
    return OperationList("output", tuple(groups), (*leave, *moves))


def _spots(one: Operation) -> Iterable[Spot]:
    if isinstance(one, Move):
        return (one.source, one.target)
    if isinstance(one, Exchange):
        aside = (stored.spot for stored in (one.old, one.new) if stored is not None)
        return (Spot("directory", one.path), *aside)
    return ()


def _member_at(path: str, members: Container[str]) -> str:
    """Return the member that a path is, or lies below."""
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


# The text of a journal, and what is read back -----------------------------------------------------


def operations_document(listed: OperationList) -> dict[str, Any]:
    """Return operations as plain data; see ``operations_of``."""
    return {
        "schema": SCHEMA,
        "kind": listed.kind,
        "identity": listed.identity,
        "groups": [
            {
                "path": one.path,
                **_contents_document(one.contents),
                "survivors": one.survivors,
                "new_name": one.new_name,
            }
            for one in listed.groups
        ],
        "operations": [_operation_document(one) for one in listed.operations],
    }


def _operation_document(one: Operation) -> tuple[Any, ...]:
    if isinstance(one, Move):
        return (
            "link" if one.is_link else "move",
            one.group,
            _text_of_spot(one.source),
            _text_of_spot(one.target),
        )
    if isinstance(one, Exchange):
        return ("put", one.group, one.path, _stored_document(one.old), _stored_document(one.new))
    return ("write" if isinstance(one, Rewrite) else "relink", *one)


def _text_of_spot(spot: Spot) -> str:
    return os.sep.join(spot)


def _stored_document(stored: StoredFile | None) -> tuple[Any, ...] | None:
    if stored is None:
        return None
    file = stored.file
    return (_text_of_spot(stored.spot), file.device, file.inode, file.size, file.mtime_ns)


def operations_of(document: Mapping[str, Any], done: object = None) -> OperationList:
    """Return operations from what ``operations_document`` returned; every name was checked to stay inside.

    Args:
        document: The plain data.
        done: Numbers of the committed groups, from the file beside the journal; None without one.
    """
    kind, identity = document["kind"], document["identity"]
    if kind not in get_args(Kind):
        raise ValueError(f"kind {_shortened(kind)}")
    if identity is None and kind not in ("remove", "slim", "output"):
        raise ValueError("a journal without the identity of its command")
    count = len(document["groups"])
    operations = tuple(_operation_of(one, count) for one in document["operations"])
    targets = [spot for one in operations if isinstance(one, Move) for spot in (one.target,)]
    targets += [one.old.spot for one in operations if isinstance(one, Exchange) and one.old is not None]
    if len(set(targets)) < len(targets):
        raise ValueError("two files at one place")
    listed = OperationList(
        kind, (Group("", (), Contents()),) * count, operations, identity and identity_of(identity)
    )
    groups = []
    for number, group in enumerate(document["groups"]):
        members = tuple(listed.ends(number))
        if not members and kind != "rename":  # of which all can be texts that are written
            raise ValueError("a checkpoint without members")
        survivors = tuple(name_of(name) for name in group["survivors"])
        path, contents, new_name = text_of(group["path"]), contents_of(group, members), group["new_name"]
        groups.append(Group(path, members, contents, survivors, new_name and name_of(new_name)))
    numbers = None if done is None else _group_numbers(done, count)
    return replace(listed, groups=tuple(groups), done=numbers)


def _operation_of(value: Sequence[Any], count: int) -> Operation:
    kind, *rest = value
    if kind == "write":
        name, before, after, like = rest
        return Rewrite(path_of(name), text_or_none(before), text_or_none(after), like and path_of(like))
    if kind == "relink":
        name, before, after = rest
        return Relink(path_of(name), text_of(before), text_of(after))
    if kind in ("move", "link"):
        group, source, target = rest
        return Move(_group_number(group, count), _spot_of(source), _spot_of(target), kind == "link")
    if kind == "put":
        group, path, old, new = rest
        path = path_of(path)
        return Exchange(_group_number(group, count), path, _stored_of(old, path), _stored_of(new, path))
    raise ValueError(f"operation {_shortened(kind)}")


def _stored_of(value: Sequence[Any] | None, path: str) -> StoredFile | None:
    if value is None:
        return None
    spot, *numbers = value
    return StoredFile(_spot_of(spot), Fingerprint(path, *map(count_of, numbers)))


def _spot_of(value: object) -> Spot:
    name, _, path = text_of(value).partition(os.sep)
    place = next((one for one in PLACES if one == name), None)
    if place is None:
        raise ValueError(f"{_shortened(value)} is no place")
    return spot_in(place, path)


def spot_in(place: Place, path: object) -> Spot:
    """Return a path in a place; in a trash or a stage it lies in a numbered directory."""
    if place == "directory":
        return Spot(place, path_of(path))
    above, _, name = text_of(path).partition(os.sep)
    if not (above.isdecimal() or (place == "stage" and above in (CONTENT, REPLACED))):
        raise ValueError(f"{_shortened(path)} is no place in the {place}")
    return Spot(place, os.path.join(above, name_of(name)))


def _group_number(value: object, count: int) -> int:
    """Return the number of one of some groups."""
    number = count_of(value)
    if not 0 <= number < count:
        raise ValueError(f"no group {number}")
    return number


def _group_numbers(value: object, count: int) -> frozenset[int]:
    if not isinstance(value, list):
        raise TypeError(f"{_shortened(value)} is no list")
    return frozenset(_group_number(one, count) for one in value)


def identity_of(value: object) -> str:
    """Return an identity."""
    identity = text_of(value)
    if not IDENTITY.fullmatch(identity):
        raise ValueError(f"{_shortened(identity)} is no identity")
    return identity


def is_name(name: str) -> bool:
    """Tell whether a text names an entry of a directory, and nothing elsewhere."""
    return name not in ("", os.curdir, os.pardir) and os.sep not in name and "\0" not in name


def text_of(value: object) -> str:
    """Return a text."""
    if not isinstance(value, str):
        raise TypeError(f"{_shortened(value)} is no text")
    value.encode("utf-8", "surrogateescape")
    return value


def text_or_none(value: object) -> str | None:
    """Return a text, or None."""
    return None if value is None else text_of(value)


def count_of(value: object) -> int:
    """Return a number."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{_shortened(value)} is no number")
    return value


def names_of(values: object) -> tuple[str, ...]:
    """Return one or more names, each of which stands once."""
    if not isinstance(values, list):
        raise TypeError(f"{values!r} is no list")
    names = tuple(map(name_of, values))
    if not names or len(set(names)) < len(names):
        raise ValueError("no member, or two of one name")
    return names


def name_of(value: object) -> str:
    """Return a name."""
    name = text_of(value)
    if not is_name(name):
        raise ValueError(f"{_shortened(name)} leads out of the directory")
    return name


def path_of(value: object) -> str:
    """Return a path of one or more names, relative to a directory."""
    path = text_of(value)
    if not all(map(is_name, path.split(os.sep))):
        raise ValueError(f"{_shortened(path)} leads out of the directory")
    return path


def _shortened(text: object) -> str:
    """Return what stands in a journal, shortened for a message."""
    return reprlib.repr(text)


def contents_of(document: Mapping[str, Any], members: Iterable[str]) -> Contents:
    """Return the files and directories that lie at some members."""
    known = frozenset(members)
    depths = {member.count(os.sep) + 1 for member in known}

    def below(value: object) -> str:
        path = path_of(value)
        parts = path.split(os.sep)
        if not any(os.sep.join(parts[:depth]) in known for depth in depths):
            raise ValueError(f"{_shortened(path)} leads out of the directory")
        return path

    files = tuple(
        Fingerprint(below(path), *(count_of(number) for number in numbers))
        for path, *numbers in document["files"]
    )
    return Contents(files, tuple(map(below, document["directories"])))


def _contents_document(contents: Contents) -> dict[str, Any]:
    """Return what ``contents_of`` reads."""
    return {
        "directories": contents.directories,
        "files": [(file.path, file.device, file.inode, file.size, file.mtime_ns) for file in contents.files],
    }


@dataclass(slots=True)
class Recovery:
    """What became of what was interrupted, by path.

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
