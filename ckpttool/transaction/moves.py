"""What a renaming, the trash and an undo are made of, and the text of the journal that is written first."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from ckpttool.transaction.files import Contents
from ckpttool.transaction.journal_schema import (
    contents_document,
    contents_of,
    name_of,
    path_of,
    text_of,
    text_or_none,
)
from ckpttool.transaction.state_dir import StateDir

TRASH = ".ckpttool-trash"
"""Where what was put aside lies, below the identity of the command that did it, with a record of it."""

SCHEMA = "ckpttool.moves/1"
CHAINED = "ckpttool.moves-in-a-row/1"
SCHEMAS = frozenset({SCHEMA, CHAINED})
"""Of journals: of moves by themselves, and of such as others go before, or follow."""

IDENTITY = re.compile(r"\d{8}T\d{6}\.\d{6}Z-[0-9a-f]{8}")

Kind = Literal["trash", "restore", "rename"]


@dataclass(frozen=True, slots=True)
class Move:
    """One checkpoint that goes to other names on the same file system.

    Attributes:
        path: How the user knows it.
        members: Its old and new names, relative to ``Moves.source`` and ``Moves.target``, in the order in
            which they leave: an index first, data after it. They come the other way round.
        contents: Its files as they were when the plan was made, relative to the source.
    """

    path: str
    members: tuple[tuple[str, str], ...]
    contents: Contents = field(repr=False)


@dataclass(frozen=True, slots=True)
class Rewrite:
    """A small text file that is to say something else: a pointer, a state file, an index.

    Attributes:
        name: Its path relative to the directory, as it is once the checkpoints have moved.
        before: What it says; None where it is new. Bytes that are no UTF-8 are surrogates.
        after: What it is to say; None where it goes.
    """

    name: str
    before: str | None
    after: str | None


@dataclass(frozen=True, slots=True)
class Relink:
    """A symlink: its path relative to the directory, what it led to, and what it is to lead to."""

    name: str
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class Chain:
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
        """Tell whether all moves are made or none: something points at what they are to be."""
        return bool(self.rewrites or self.relinks)


def new_identity() -> str:
    """Return an identity for a command: the time, in UTC, and something random."""
    seconds, rest = divmod(time.time_ns(), 10**9)
    moment = time.strftime("%Y%m%dT%H%M%S", time.gmtime(seconds))
    return f"{moment}.{rest // 1000:06d}Z-{os.urandom(4).hex()}"


def trash_path(state_dir: StateDir, identity: str) -> str:
    """Return where a command puts things aside, in the trash that lies in a state directory."""
    return os.path.join(state_dir.path, TRASH + state_dir.suffix, identity)


def reversed_move(move: Move, contents: Contents | None = None) -> Move:
    """Return a move the other way round, of what came to the target."""
    there = contents_at_target(move) if contents is None else contents
    return Move(move.path, tuple((new, old) for old, new in move.members), there)


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


# The text of a journal -----------------------------------------------------------------------------


def dumps(moves: Moves, directory: str) -> bytes:
    """Return moves as a journal has them."""
    return json.dumps(document(moves, directory)).encode()


def document(moves: Moves, directory: str) -> dict[str, Any]:
    """Return moves as plain data; see ``moves_of``."""
    result: dict[str, Any] = {
        "schema": SCHEMA if moves.chain is None else CHAINED,
        "kind": moves.kind,
        "identity": moves.identity,
        "source": "directory" if moves.source == directory else "trash",
        "target": "directory" if moves.target == directory else "trash",
        "moves": [
            {"path": move.path, "members": move.members, **contents_document(move.contents)}
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
        result["before"] = [document(earlier, directory) for earlier in moves.chain.before]
        result["has_more"] = moves.chain.has_more
    return result


def moves_of(document: Mapping[str, Any], directory: str, state_dir: StateDir) -> Moves:
    """Return moves from what ``document`` returned; every name was checked to stay inside.

    Args:
        document: The plain data.
        directory: The directory that it is for.
        state_dir: Where its trash lies.
    """
    schema, kind = document["schema"], document["kind"]
    if schema not in SCHEMAS:
        raise ValueError(f"schema {schema!r}")
    identity = identity_of(document["identity"])
    places = {"directory": directory, "trash": trash_path(state_dir, identity)}
    source, target = document["source"], document["target"]
    if kind not in get_args(Kind):
        raise ValueError(f"kind {kind!r}")
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
    return Move(text_of(document["path"]), members, contents_of(document, [old for old, _ in members]))


def _member(value: object, place: str) -> str:
    """Return the name of a member in the directory; in the trash it lies in a numbered directory."""
    if place == "directory":
        return name_of(value)
    number, _, name = text_of(value).partition(os.sep)
    if not number.isdecimal():
        raise ValueError(f"{value!r} is no place in the trash")
    return os.path.join(number, name_of(name))


def identity_of(value: object) -> str:
    """Return an identity."""
    identity = text_of(value)
    if not IDENTITY.fullmatch(identity):
        raise ValueError(f"{identity!r} is no identity")
    return identity
