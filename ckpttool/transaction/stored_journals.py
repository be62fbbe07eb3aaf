"""Reads journals from the disk, those of earlier versions too."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ckpttool.core.errors import from_os_error
from ckpttool.transaction.files import opened, status_at
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
from ckpttool.transaction.state_dir import open_own, read_own, state_dir_of_stage

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
    """Convert a journal of version 0.1; removals that had left the directory are committed."""
    groups: list[Removal] = []
    for one in document["removals"]:
        members = names_of(one["members"])
        survivors = tuple(name_of(name) for name in one["survivors"])
        groups.append(Removal(text_of(one["path"]), members, contents_of(one, members), survivors))
    shared = next((number for number, one in enumerate(groups) if one.is_single), 0)
    operations: list[Relocation] = []
    done: set[int] = set()
    try:
        with opened(directory) as here, open_own(directory, *os.path.split(stage)) as inner:
            assert inner.descriptor is not None  # as that of the directory is not
            for number, group in enumerate(groups):
                # Single files shared the place of the first of them; 0.1.0 gave each its own.
                has_own = not group.is_single or inner.has(str(number))
                place = str(number if has_own else shared)
                operations += [Relocation(number, name, os.path.join(place, name)) for name in group.members]
                if _is_committed(group, here, inner.descriptor, place):
                    done.add(number)
    except OSError as error:
        raise from_os_error(error, stage) from error
    return OperationList(tuple(groups), tuple(operations), frozenset(done))


def _is_committed(group: Removal, directory: int, stage: int, place: str) -> bool:
    """Tell whether a removal is past its point of no return: in the stage alone, or in part nowhere."""

    def staged(path: str) -> os.stat_result | None:
        return status_at(os.path.join(place, path), stage)

    here = {file: status_at(file.path, directory) for file in group.contents.files}
    is_there = [status is not None or staged(file.path) is not None for file, status in here.items()]
    is_here = any(status is not None and file.is_of(status) for file, status in here.items())
    has_begun = any(staged(name) is not None for name in group.members)
    return (has_begun and not (is_here and all(is_there))) or not any(is_there)
