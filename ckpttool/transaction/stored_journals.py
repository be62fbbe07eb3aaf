"""Reads journals from the disk, those of earlier versions too."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ckpttool.io import fs
from ckpttool.transaction.files import Fingerprint
from ckpttool.transaction.journal import (
    DONE,
    JOURNAL,
    MOVES_SCHEMAS,
    SCHEMA,
    Moves,
    OperationList,
    Relocation,
    Removal,
    contents_of,
    moves_of,
    name_of,
    names_of,
    operations_of,
    text_of,
)
from ckpttool.transaction.state_dir import read_own, state_dir_of_stage

_REMOVALS_SCHEMA = "ckpttool.journal/1"
"""Of removals until 0.2: nothing marked the point of no return."""

T = TypeVar("T")


def read_journal(stage: str, directory: str) -> OperationList | Moves | None:
    """Return the journal of a stage, or None if it has none.

    Args:
        stage: Path of the stage.
        directory: The directory that it is for, as it is to be called in what is returned.
    """

    def read(name: str, what: str, parse: Callable[[Any], T]) -> T | None:
        return read_own(directory, *os.path.split(stage), name, what=what, parse=parse)

    def parse(document: Mapping[str, Any]) -> OperationList | Moves:
        if document["schema"] in MOVES_SCHEMAS:
            return moves_of(document, directory, state_dir_of_stage(stage))
        if document["schema"] == _REMOVALS_SCHEMA:
            return _old_removals_of(document, directory, stage)
        if document["schema"] != SCHEMA:
            raise ValueError(f"schema {document['schema']!r}")
        return operations_of(document, done)

    done = read(DONE, "a list of groups", lambda document: document)
    return read(JOURNAL, "a journal", parse)


def _old_removals_of(document: Mapping[str, Any], directory: str, stage: str) -> OperationList:
    """Return the removals of an old journal; those of which nothing lies in the directory any more stand."""
    groups: list[Removal] = []
    for one in document["removals"]:
        members = names_of(one["members"])
        survivors = tuple(name_of(name) for name in one["survivors"])
        groups.append(Removal(text_of(one["path"]), members, contents_of(one, members), survivors))
    shared = next((number for number, one in enumerate(groups) if one.is_single), 0)
    operations: list[Relocation] = []
    done: set[int] = set()
    for number, group in enumerate(groups):
        # Single files shared the place of the first of them; 0.1.0 gave each its own.
        has_own = not group.is_single or fs.lexists(os.path.join(stage, str(number)))
        place = str(number if has_own else shared)
        operations += [Relocation(number, name, os.path.join(place, name)) for name in group.members]
        if _stands(group, directory, os.path.join(stage, place)):
            done.add(number)
    return OperationList(tuple(groups), tuple(operations), frozenset(done))


def _stands(group: Removal, directory: str, aside: str) -> bool:
    has_begun = any(fs.lexists(os.path.join(aside, name)) for name in group.members)
    places = [
        [os.path.join(place, file.path) for place in (directory, aside)] for file in group.contents.files
    ]
    is_there = [any(map(fs.lexists, paths)) for paths in places]
    is_here = any(_is_at(file, here) for file, (here, _) in zip(group.contents.files, places, strict=True))
    return (has_begun and not (is_here and all(is_there))) or not any(is_there)


def _is_at(file: Fingerprint, path: str) -> bool:
    try:
        return file.is_of(fs.lstat(path))
    except OSError:  # nothing there, or nobody can tell
        return False
