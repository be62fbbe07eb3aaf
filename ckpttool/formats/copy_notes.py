"""Notes of copies that are on their way: a part of a checkpoint may look like one, and says so here.

``copy`` writes the note before the first file, and takes it back after the last one. It lies in the directory
that is copied, or beside the files of a set, and names them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping

from ckpttool.containers.jsontext import parse_json
from ckpttool.core.errors import CheckpointError, Truncated
from ckpttool.storage.fs import open_source

COPYING = ".ckpttool-copying"
EVERYTHING = "*"
_MAX_BYTES = 1 << 24

CopyNote = Mapping[str, Collection[str]]
"""The names in a directory that belong to each checkpoint that is copied there, by its name."""


def read_note(path: str) -> dict[str, list[str]]:
    """Return what a note says; of one that can't be read, that nothing beside it is whole."""
    try:
        with open_source(path) as source:
            document = parse_json(path, source.read(0, min(source.size, _MAX_BYTES)), "note")
    except CheckpointError:
        document = None
    match document:
        case dict() if all(isinstance(names, list) for names in document.values()):
            return {str(name): [str(one) for one in names] for name, names in document.items()}
    return {os.path.basename(os.path.dirname(path)): [EVERYTHING]}


def dumps_note(note: CopyNote) -> bytes:
    """Return the text of a note."""
    return json.dumps({name: [*names] for name, names in note.items()}).encode() + b"\n"


def interrupted_copy(path: str) -> Truncated:
    """Return the error of a checkpoint that isn't copied whole."""
    return Truncated(
        path, "its copy was interrupted, or isn't done yet", expected="ckpttool copy goes on with it"
    )
