"""What a removal is about to do, written down first: a kill at any point loses nothing.

A removal owns a directory ``.ckpttool-<id>`` beside the checkpoints, or where ``state_dir_of`` says. Its
``journal.json`` appears whole, once all that will be removed is known; a directory without one is an attempt
that touched nothing. What goes is renamed into it, and unlinked only there, so that no half of a checkpoint
ever lies where one is looked for.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass

from ckpttool.errors import AccessDenied, DamagedCheckpoint, from_os_error
from ckpttool.transaction.files import Contents
from ckpttool.transaction.journal_schema import contents_document, contents_of, name_of, names_of, text_of
from ckpttool.transaction.lock import FULL
from ckpttool.transaction.moves import SCHEMAS as MOVES_SCHEMAS
from ckpttool.transaction.moves import Moves, moves_of
from ckpttool.transaction.ownership import MAX_BYTES, foreign_text, open_own, read_own
from ckpttool.transaction.state_dir import StateDir, state_dir_beside, state_dir_of_stage
from ckpttool.wire.atomic import write_in
from ckpttool.wire.directories import IS_SUPPORTED, OpenDirectory

STAGE_PREFIX = ".ckpttool-"
JOURNAL = "journal.json"
SCHEMA = "ckpttool.journal/1"
TEMPORARY = ".tmp"

_STAGE = re.compile(rf"{re.escape(STAGE_PREFIX)}[0-9a-f]{{8}}")


@dataclass(frozen=True, slots=True)
class Removal:
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


@dataclass(frozen=True, slots=True)
class PointerText:
    """A pointer file in the directory that is to say something else: its name and its new text."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Journal:
    """All that one removal does in one directory."""

    removals: tuple[Removal, ...]
    rewrites: tuple[PointerText, ...] = ()


class NoRoom(AccessDenied):
    """The disk, or a quota, is full."""


def require_system(directory: str, done: str) -> None:
    """Require a system that can work below open directories."""
    if not IS_SUPPORTED:
        raise AccessDenied(directory, f"this system can't work below open directories; nothing was {done}")


def begin_journal(directory: str, state_dir: StateDir, journal: bytes, done: str) -> str:
    """Write a journal, synced to disk, and return the directory of ours that it lies in.

    Args:
        directory: Whose journal it is.
        state_dir: Where it is to lie.
        journal: Its text.
        done: What was done to nothing if it can't be written: "removed".
    """
    # Nobody reads more than that back: what can't be settled later isn't begun.
    if len(journal) > MAX_BYTES:
        reason = f"its journal would have {len(journal):,} bytes, and {MAX_BYTES:,} are the most"
        raise AccessDenied(directory, f"{reason}; nothing was {done}: try fewer at once")
    around, suffix = state_dir
    name = f"{STAGE_PREFIX}{os.urandom(4).hex()}{suffix}"
    try:
        with OpenDirectory(around) as place, place.make(name, 0o700) as stage:
            try:
                write_in(stage, JOURNAL, journal)
                place.sync()
            except BaseException:
                _remove_stage(place, stage)
                raise
    except OSError as error:
        reason = from_os_error(error, directory).reason
        if error.errno in FULL:
            message = f"{reason} for the journal; nothing was {done}: free a few kB and try again"
            raise NoRoom(directory, message) from error
        raise AccessDenied(directory, f"{reason}; nothing was {done}") from error
    return os.path.join(around, name)


def remove_stage(path: str) -> bool:
    """Remove an owned directory with its journal; tell whether nothing else was left in it."""
    around, name = os.path.split(path)
    with OpenDirectory(around) as place, place.open(name) as stage:
        return _remove_stage(place, stage)


def _remove_stage(place: OpenDirectory, stage: OpenDirectory) -> bool:
    names = stage.names()
    ours = [name for name in names if name == JOURNAL or is_temporary(name)]
    if len(ours) < len(names):
        return False
    for name in ours:
        stage.unlink(name)
    place.remove_held(stage, os.path.basename(stage.path))
    return True


def is_temporary(name: str) -> bool:
    """Tell whether a name is that of a file of ours that was still being written."""
    return name.startswith(STAGE_PREFIX) and name.endswith(TEMPORARY)


def journal_bytes(journal: Journal) -> bytes:
    """Return a journal as it is written."""
    document = {
        "schema": SCHEMA,
        "rewrites": [{"name": rewrite.name, "text": rewrite.text} for rewrite in journal.rewrites],
        "removals": [
            {
                "path": removal.path,
                "members": removal.members,
                **contents_document(removal.contents),
                "survivors": removal.survivors,
            }
            for removal in journal.removals
        ],
    }
    return json.dumps(document).encode()


def read_journal(path: str, directory: str) -> Journal | Moves:
    """Return a journal; every name in it was checked to stay inside its directory.

    Args:
        path: Where it lies.
        directory: The directory that it is for, as it is to be called in what is returned.
    """
    stage = os.path.dirname(path)
    try:
        with open_own(directory, *os.path.split(stage)) as place:
            text = read_own(place, JOURNAL, directory, "a journal")
    except OSError as error:
        raise from_os_error(error, path) from error
    try:
        document = json.loads(text)
        if document["schema"] in MOVES_SCHEMAS:
            return moves_of(document, directory, state_dir_of_stage(stage))
        if document["schema"] != SCHEMA:
            raise ValueError(f"schema {document['schema']!r}")
        removals: list[Removal] = []
        for removal in document["removals"]:
            members = names_of(removal["members"])
            survivors = tuple(name_of(name) for name in removal["survivors"])
            contents = contents_of(removal, members)
            removals.append(Removal(text_of(removal["path"]), members, contents, survivors))
        rewrites = [
            PointerText(name_of(rewrite["name"]), text_of(rewrite["text"]))
            for rewrite in document["rewrites"]
        ]
        return Journal(tuple(removals), tuple(rewrites))
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise DamagedCheckpoint(
            path, foreign_text(error, "a journal"), expected="move it away to go on"
        ) from error


def stages(directory: str) -> list[str]:
    """Return the names of what removals left in a directory, finished or not."""
    return _stages(directory, "")


def stages_beside(directory: str) -> list[str]:
    """Return the paths of what removals in a directory left in the one around it."""
    around, suffix = state_dir_beside(directory)
    return [os.path.join(around, name) for name in _stages(around, suffix)]


def _stages(place: str, suffix: str) -> list[str]:
    try:
        with os.scandir(place) as entries:
            return sorted(
                entry.name
                for entry in entries
                if entry.name.endswith(suffix)
                and _STAGE.fullmatch(entry.name.removesuffix(suffix))
                and entry.is_dir(follow_symlinks=False)
            )
    except OSError as error:
        raise from_os_error(error, place) from error
