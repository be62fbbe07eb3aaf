"""What a command is about to do, written down first: a kill at any point loses nothing.

A command that removes checkpoints, or moves them, owns a directory ``.ckpttool-<id>`` beside them, or where
``state_dir_of`` says: its stage. The stage's ``journal.json`` appears whole, once all that will be done is
known; a stage without one is an attempt that touched nothing. What is read back has each value of its type,
and each name stays inside: whatever stands in it, nothing elsewhere is touched.
"""

from __future__ import annotations

import json
import os
import re
import reprlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

from ckpttool.core.errors import AccessDenied, from_os_error
from ckpttool.io import fs
from ckpttool.io.atomic import write_in
from ckpttool.io.directories import OpenDirectory, remove_directory, retry_while_busy
from ckpttool.io.held import IS_SUPPORTED
from ckpttool.transaction.files import Contents, Fingerprint
from ckpttool.transaction.lock import FULL
from ckpttool.transaction.state_dir import MAX_BYTES, StateDir, open_own

STAGE_PREFIX = ".ckpttool-"
JOURNAL = "journal.json"
DONE = "done.json"
"""File beside a journal of operations: the numbers of the committed groups."""
PLACE = "0"
"""Directory in a stage, or in a command's place in the trash, for the files of one directory."""
TEMPORARY = ".tmp"

SCHEMA = "ckpttool.operations/1"
"""Of a journal of operations."""
MOVES_SCHEMA = "ckpttool.moves/1"
CHAINED = "ckpttool.moves-in-a-row/1"
SWAPS_SCHEMA = "ckpttool.swaps/2"
"""Of moves by themselves, of such as others go before, or follow, and of such as have successors."""
_SWAPS_OF_FILES = "ckpttool.swaps/1"
"""Of moves of files that have one successor each, as they were written earlier."""
MOVES_SCHEMAS = frozenset({MOVES_SCHEMA, CHAINED, SWAPS_SCHEMA, _SWAPS_OF_FILES})

IDENTITY = re.compile(r"\d{8}T\d{6}\.\d{6}Z-[0-9a-f]{8}")
_STAGE = re.compile(rf"{re.escape(STAGE_PREFIX)}[0-9a-f]{{8}}")

Kind = Literal["trash", "restore", "rename"]


# What is done ---------------------------------------------------------------------------------------


class Removal(NamedTuple):
    """One checkpoint that goes.

    Attributes:
        path: How the user knows it.
        members: Names in its directory, in the order in which they go: an index first, data last.
        contents: Its files as they were when the plan was made.
        survivors: Names in the directory, without which the removal isn't wanted any more.
    """

    path: str
    members: tuple[str, ...]
    contents: Contents
    survivors: tuple[str, ...] = ()

    @property
    def is_single(self) -> bool:
        """Tell whether it is one file: no half of it can ever be left."""
        return len(self.members) == len(self.contents.files) == 1 and not self.contents.directories


class Relocation(NamedTuple):
    """Operation that moves a member of a checkpoint into the stage.

    Attributes:
        group: Number of the checkpoint in ``OperationList.groups``.
        name: Name of the member in the directory.
        target: Path in the stage.
    """

    group: int
    name: str
    target: str


class OperationList(NamedTuple):
    """Operations of one journal, in the order in which they are done; see ``operations``.

    Attributes:
        groups: Checkpoints; all operations of one are done or none.
        operations: Pointers to be written, then members to be moved.
        done: Numbers of the committed groups; None before the commit.
    """

    groups: tuple[Removal, ...]
    operations: tuple[Rewrite | Relocation, ...]
    done: frozenset[int] | None = None

    @property
    def rewrites(self) -> tuple[Rewrite, ...]:
        """Return the pointers to be written."""
        return tuple(one for one in self.operations if isinstance(one, Rewrite))

    def places(self) -> list[str]:
        """Return the directory in the stage for each group; journals of version 0.1 have several."""
        moves = (one for one in self.operations if isinstance(one, Relocation))
        places = {one.group: os.path.dirname(one.target) for one in moves}
        return [places[number] for number in range(len(self.groups))]


class Successor(NamedTuple):
    """A file that comes when a checkpoint goes to the trash, and goes when that comes back.

    It takes the name of a member, or one that nothing has.

    Attributes:
        waits: Its path relative to the directory until it takes the name.
        file: What it is, under the name.
    """

    waits: str
    file: Fingerprint


@dataclass(frozen=True, slots=True)
class Move:
    """One checkpoint that goes to other names on the same file system.

    Attributes:
        path: How the user knows it.
        members: Its old and new names, relative to ``Moves.source`` and ``Moves.target``, in the order in
            which they leave: an index first, data after it. They come the other way round.
        contents: Its files as they were when the plan was made, relative to the source.
        successors: What comes in its place. First those with names of their own, then those that take the
            name of a member, which is never free.
    """

    path: str
    members: tuple[tuple[str, str], ...]
    contents: Contents = field(repr=False)
    successors: tuple[Successor, ...] = ()

    @property
    def added(self) -> tuple[Successor, ...]:
        """Return the successors that have names of their own."""
        return tuple(one for one in self.successors if one.file.path not in self._names)

    @property
    def replacing(self) -> tuple[Successor, ...]:
        """Return the successors that take the name of a member."""
        return tuple(one for one in self.successors if one.file.path in self._names)

    @property
    def _names(self) -> frozenset[str]:
        return frozenset(name for pair in self.members for name in pair)


class Rewrite(NamedTuple):
    """A small text file that is to say something else: a pointer, a state file, an index.

    Attributes:
        name: Its path relative to the directory, as it is once the checkpoints have moved.
        before: What it says; None where it is new. Bytes that are no UTF-8 are surrogates.
        after: What it is to say; None where it goes.
    """

    name: str
    before: str | None
    after: str | None


class Relink(NamedTuple):
    """A symlink: its path relative to the directory, what it led to, and what it is to lead to."""

    name: str
    before: str
    after: str


class Chain(NamedTuple):
    """Where moves stand among others of one journal, which makes one after the other: all of them, or none.

    Attributes:
        before: Those that were made before, the last first.
        has_more: Whether others are to follow that nobody knows but the command at work: without it all is
            taken back.
    """

    before: tuple[Moves, ...] = ()
    has_more: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Moves:
    """All that one journal does.

    Attributes:
        kind: What for.
        identity: Of the command; all directories in which it works have it in common. See ``new_identity``.
        moves: Which checkpoints go where.
        rewrites, relinks: What points at them, and is to go with them: then all moves are made, or none.
        source, target: The directory that they leave, and the one that they come to: the directory of the
            journal, or the place of the identity in its trash.
        chain: What goes before, or follows, if these are not all that the journal makes.
    """

    kind: Kind
    identity: str
    moves: tuple[Move, ...]
    rewrites: tuple[Rewrite, ...] = ()
    relinks: tuple[Relink, ...] = ()
    source: str
    target: str
    chain: Chain | None = None

    @property
    def is_bound(self) -> bool:
        """Tell whether something points at what they are to be."""
        return bool(self.rewrites or self.relinks)

    @property
    def is_indivisible(self) -> bool:
        """Tell whether all moves are made or none."""
        return self.kind == "rename" or self.is_bound

    @property
    def is_empty(self) -> bool:
        """Tell whether nothing is to be done."""
        return not (self.moves or self.is_bound)

    @property
    def earlier(self) -> tuple[Moves, ...]:
        """Return those of the same journal that were made before, the last first."""
        return () if self.chain is None else self.chain.before

    def with_each(self, change: Callable[[Move], Move]) -> Moves:
        """Return them with each move changed, and so those that were made before."""
        chain = self.chain and self.chain._replace(
            before=tuple(one.with_each(change) for one in self.earlier)
        )
        return replace(self, moves=tuple(map(change, self.moves)), chain=chain)


def new_identity() -> str:
    """Return an identity for a command: the time, in UTC, and something random."""
    seconds, rest = divmod(time.time_ns(), 10**9)
    moment = time.strftime("%Y%m%dT%H%M%S", time.gmtime(seconds))
    return f"{moment}.{rest // 1000:06d}Z-{os.urandom(4).hex()}"


def contents_at_target(move: Move) -> Contents:
    """Return the contents of a move as they are at its target."""
    new = dict(move.members)
    return Contents(
        tuple(replace(file, path=_map_path(file.path, new)) for file in move.contents.files),
        tuple(_map_path(path, new) for path in move.contents.directories),
    )


def old_name(moves: Moves, name: str) -> str:
    """Return the path that something has before a move, from the one that it has afterwards."""
    first, mark, rest = name.partition(os.sep)
    old = next((old for move in moves.moves for old, new in move.members if new == first), first)
    return old + mark + rest if mark else name


def _map_path(path: str, new: Mapping[str, str]) -> str:
    parts = path.split(os.sep)
    for count in range(1, len(parts) + 1):
        above = os.sep.join(parts[:count])
        if above in new:
            return os.sep.join([new[above], *parts[count:]])
    raise ValueError(f"{path!r} is no part of what moves")


# The text of a journal, and what is read back -----------------------------------------------------


def operations_document(listed: OperationList) -> dict[str, Any]:
    """Return operations as plain data; see ``operations_of``."""
    return {
        "schema": SCHEMA,
        "groups": [
            {"path": one.path, **contents_document(one.contents), "survivors": one.survivors}
            for one in listed.groups
        ],
        "operations": [
            ("move", *one) if isinstance(one, Relocation) else ("write", *one) for one in listed.operations
        ],
    }


def operations_of(document: Mapping[str, Any], done: object = None) -> OperationList:
    """Return operations from what ``operations_document`` returned; every name was checked to stay inside.

    Args:
        document: The plain data.
        done: Numbers of the committed groups, from the file beside the journal; None without one.
    """
    count = len(document["groups"])
    operations = tuple(_operation_of(one, count) for one in document["operations"])
    members: list[list[str]] = [[] for _ in range(count)]
    places: dict[int, str] = {}
    targets: set[str] = set()
    for one in operations:
        if isinstance(one, Relocation):
            members[one.group].append(one.name)
            targets.add(one.target)
            place, name = os.path.split(one.target)
            if name != one.name or places.setdefault(one.group, place) != place:
                raise ValueError("a checkpoint with another name, or in two places, in the stage")
    if len(targets) < sum(map(len, members)):
        raise ValueError("two members at one place")
    groups = (
        Removal(
            text_of(group["path"]),
            names_of(names),
            contents_of(group, names),
            tuple(name_of(name) for name in group["survivors"]),
        )
        for group, names in zip(document["groups"], members, strict=True)
    )
    return OperationList(tuple(groups), operations, None if done is None else _group_numbers(done, count))


def _operation_of(value: Sequence[Any], count: int) -> Rewrite | Relocation:
    kind, *rest = value
    if kind == "write":
        name, before, after = rest
        return Rewrite(path_of(name), text_or_none(before), text_or_none(after))
    if kind != "move":
        raise ValueError(f"operation {_shortened(kind)}")
    group, name, target = rest
    return Relocation(_group_number(group, count), name_of(name), _member(target, "stage"))


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


def moves_document(moves: Moves, directory: str) -> dict[str, Any]:
    """Return moves as plain data; see ``moves_of``."""
    has_swaps = any(move.successors for move in moves.moves)
    schema = SWAPS_SCHEMA if has_swaps else MOVES_SCHEMA
    result: dict[str, Any] = {
        "schema": schema if moves.chain is None else CHAINED,
        "kind": moves.kind,
        "identity": moves.identity,
        "source": "directory" if moves.source == directory else "trash",
        "target": "directory" if moves.target == directory else "trash",
        "moves": [
            {
                "path": move.path,
                "members": move.members,
                **contents_document(move.contents),
                **successors_document(move.successors),
            }
            for move in moves.moves
        ],
        "rewrites": [
            {"name": rewrite.name, "before": rewrite.before, "after": rewrite.after}
            for rewrite in moves.rewrites
        ],
        "relinks": [
            {"name": link.name, "before": link.before, "after": link.after} for link in moves.relinks
        ],
    }
    if moves.chain is not None:
        result["before"] = [moves_document(earlier, directory) for earlier in moves.chain.before]
        result["has_more"] = moves.chain.has_more
    return result


def moves_of(document: Mapping[str, Any], directory: str, state_dir: StateDir) -> Moves:
    """Return moves from what ``moves_document`` returned; every name was checked to stay inside.

    Args:
        document: The plain data.
        directory: The directory that it is for.
        state_dir: Where its trash lies.
    """
    schema, kind = document["schema"], document["kind"]
    if schema not in MOVES_SCHEMAS:
        raise ValueError(f"schema {_shortened(schema)}")
    identity = identity_of(document["identity"])
    places = {"directory": directory, "trash": state_dir.trash_place(identity)}
    source, target = document["source"], document["target"]
    if kind not in get_args(Kind):
        raise ValueError(f"kind {_shortened(kind)}")
    moves = Moves(
        kind=kind,
        identity=identity,
        moves=tuple(_move_of(move, source, target) for move in document["moves"]),
        rewrites=tuple(
            Rewrite(path_of(rewrite["name"]), text_or_none(rewrite["before"]), text_or_none(rewrite["after"]))
            for rewrite in document["rewrites"]
        ),
        relinks=tuple(
            Relink(path_of(link["name"]), text_of(link["before"]), text_of(link["after"]))
            for link in document["relinks"]
        ),
        source=places[source],
        target=places[target],
    )
    if schema != CHAINED:
        return moves
    before = tuple(moves_of(earlier, directory, state_dir) for earlier in document["before"])
    if any(earlier.chain is not None or earlier.identity != identity for earlier in before):
        raise ValueError("moves of another journal go before")
    if not isinstance(document["has_more"], bool):
        raise TypeError("has_more")
    return replace(moves, chain=Chain(before, document["has_more"]))


def _move_of(document: Mapping[str, Any], source: str, target: str) -> Move:
    members = tuple((_member(old, source), _member(new, target)) for old, new in document["members"])
    if not 0 < len(members) == len({old for old, _ in members}) == len({new for _, new in members}):
        raise ValueError("no member, or two of one name")
    contents = contents_of(document, [old for old, _ in members])
    return Move(text_of(document["path"]), members, contents, _successors_of(document, members, source))


def _successors_of(
    document: Mapping[str, Any], members: Sequence[tuple[str, str]], source: str
) -> tuple[Successor, ...]:
    old = document.get("successor")
    if old is not None:  # the one of a file
        name = members[0][0 if source == "directory" else 1]
        return (Successor(path_of(old["waits"]), Fingerprint(name, *map(count_of, old["file"]))),)
    return tuple(
        Successor(path_of(one["waits"]), Fingerprint(path_of(one["name"]), *map(count_of, one["file"])))
        for one in document.get("successors", ())
    )


def successors_document(successors: Sequence[Successor]) -> dict[str, Any]:
    """Return successors as an entry of the plain data of a move; nothing if there are none."""
    if not successors:
        return {}
    return {
        "successors": [
            {
                "name": one.file.path,
                "waits": one.waits,
                "file": (one.file.device, one.file.inode, one.file.size, one.file.mtime_ns),
            }
            for one in successors
        ]
    }


def _member(value: object, place: str) -> str:
    """Return the path of a member in the directory; in a trash or a stage it lies in a numbered directory."""
    if place == "directory":
        return path_of(value)
    number, _, name = text_of(value).partition(os.sep)
    if not number.isdecimal():
        raise ValueError(f"{_shortened(value)} is no place in the {place}")
    return os.path.join(number, name_of(name))


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


def contents_document(contents: Contents) -> dict[str, Any]:
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


# On the disk ----------------------------------------------------------------------------------------


class NoRoom(AccessDenied):
    """The disk, or a quota, is full."""


def require_system(directory: str, done: str) -> None:
    """Require a system that can work below open directories."""
    if not IS_SUPPORTED:
        raise AccessDenied(directory, f"this system can't work below open directories; nothing was {done}")


def begin_journal(directory: str, state_dir: StateDir, document: Mapping[str, Any], done: str) -> str:
    """Write a journal, synced to disk, and return the stage that it lies in; see ``new_stage``."""
    with new_stage(directory, state_dir, document, done) as stage:
        return stage.path


@contextmanager
def new_stage(
    directory: str, state_dir: StateDir, document: Mapping[str, Any], done: str, *, has_place: bool = False
) -> Iterator[OpenDirectory]:
    """Make a stage with its journal, synced to disk; it is held open, and stays.

    Args:
        directory: Whose journal it is.
        state_dir: Where it is to lie.
        document: What it is to say.
        done: What was done to nothing if it can't be written: "removed".
        has_place: Whether to make a directory for files in the stage.
    """
    text = _journal_text(directory, document, f"; nothing was {done}")
    name = f"{STAGE_PREFIX}{os.urandom(4).hex()}{state_dir.suffix}"
    with ExitStack() as stack:
        try:
            place = stack.enter_context(OpenDirectory(state_dir.path))
            stage = stack.enter_context(place.make(name, 0o700))
            try:
                if has_place:
                    stage.make(PLACE, 0o700).close()
                write_in(stage, JOURNAL, text)
                place.sync()
            except BaseException:
                remove_places(stage)
                _remove_stage(place, stage)
                raise
        except OSError as error:
            reason = from_os_error(error, directory).reason
            if error.errno in FULL:
                message = f"{reason} for the journal; nothing was {done}: free a few kB and try again"
                raise NoRoom(directory, message) from error
            raise AccessDenied(directory, f"{reason}; nothing was {done}") from error
        yield stage


def rewrite_journal(directory: str, stage: str, document: Mapping[str, Any]) -> None:
    """Have the journal in a stage say something else: what is left to do."""
    text = _journal_text(directory, document)
    with open_own(directory, *os.path.split(stage)) as place:
        write_in(place, JOURNAL, text)


def _journal_text(directory: str, document: Mapping[str, Any], result: str = "") -> bytes:
    text = json.dumps(document).encode()
    # Nobody reads more than that back: what can't be recovered later isn't begun.
    if len(text) > MAX_BYTES:
        reason = f"its journal would have {len(text):,} bytes, and {MAX_BYTES:,} are the most"
        raise AccessDenied(directory, f"{reason}{result}: try fewer at once")
    return text


def remove_places(stage: OpenDirectory) -> None:
    """Remove the directories for files in a stage.

    Raises:
        OSError: One is not empty.
    """
    for name in filter(str.isdecimal, stage.names()):
        retry_while_busy(partial(remove_directory, stage.at(name), stage.descriptor))


def remove_stage(path: str) -> bool:
    """Remove a stage with its journal; tell whether nothing else was left in it."""
    around, name = os.path.split(path)
    with OpenDirectory(around) as place, place.open(name) as stage:
        return _remove_stage(place, stage)


def _remove_stage(place: OpenDirectory, stage: OpenDirectory) -> bool:
    names = stage.names()
    # A journal without the file beside it would be taken back.
    ours = [name for name in (JOURNAL, DONE) if name in names] + list(filter(is_temporary, names))
    if len(ours) < len(names):
        return False
    for name in ours:
        stage.unlink(name)
    place.remove_held(stage, os.path.basename(stage.path))
    return True


def is_temporary(name: str) -> bool:
    """Tell whether a name is that of a file of ours that was still being written."""
    return name.startswith(STAGE_PREFIX) and name.endswith(TEMPORARY)


def stages(state_dir: StateDir) -> list[str]:
    """Return the paths of what commands left in a state directory, finished or not."""
    around, suffix = state_dir
    try:
        return sorted(
            entry.path
            for entry in fs.entries(around)
            if entry.name.endswith(suffix)
            and _STAGE.fullmatch(entry.name.removesuffix(suffix))
            and entry.is_dir(follow_symlinks=False)
        )
    except OSError as error:
        raise from_os_error(error, around) from error
