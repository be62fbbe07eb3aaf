"""Stages: directories with the journals of running commands.

A command that removes or moves checkpoints makes a directory ``.ckpttool-<id>`` in the state directory
(``state_dir_of``). Its ``journal.json`` appears whole, before the first operation. A command that left a
stage without one has changed nothing.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from ckpttool.core.errors import AccessDenied, from_os_error
from ckpttool.storage import fs
from ckpttool.storage.directories import OpenDirectory, remove_directory, retry_while_busy
from ckpttool.storage.held import IS_SUPPORTED
from ckpttool.transaction.state_dir import MAX_BYTES, StateDir

STAGE_PREFIX = ".ckpttool-"
JOURNAL = "journal.json"
DONE = "done.json"
"""File next to a journal, with the numbers of the committed groups."""
TEMPORARY = ".tmp"

_STAGE = re.compile(rf"{re.escape(STAGE_PREFIX)}[0-9a-f]{{8}}")


class NoRoom(AccessDenied):
    """The disk, or a quota, is full."""


def require_system(directory: str, done: str) -> None:
    """Require a system that can work below open directories."""
    if not IS_SUPPORTED:
        reason = f"this system lacks calls relative to open directories; nothing was {done}"
        raise AccessDenied(directory, reason)


def new_stage_name(state_dir: StateDir) -> str:
    """Return a new random name for a stage."""
    return f"{STAGE_PREFIX}{os.urandom(4).hex()}{state_dir.suffix}"


def journal_text(directory: str, document: Mapping[str, Any], result: str = "") -> bytes:
    """Return the text of a journal; raise AccessDenied if it is longer than recovery would read."""
    text = json.dumps(document).encode()
    if len(text) > MAX_BYTES:
        reason = f"its journal would have {len(text):,} bytes (limit {MAX_BYTES:,})"
        raise AccessDenied(directory, f"{reason}{result}: try fewer at once")
    return text


def remove_places(stage: OpenDirectory) -> None:
    """Remove the numbered directories in a stage.

    Raises:
        OSError: One isn't empty.
    """
    for name in filter(str.isdecimal, stage.names()):
        retry_while_busy(partial(remove_directory, stage.at(name), stage.descriptor))


def remove_stage(path: str) -> bool:
    """Remove a stage with its journal; return False, and keep it, if it has other entries."""
    parent, name = os.path.split(path)
    with OpenDirectory(parent) as place, place.open(name) as stage:
        return remove_open_stage(place, stage)


def remove_open_stage(place: OpenDirectory, stage: OpenDirectory) -> bool:
    """Remove a stage in an open directory; see ``remove_stage``."""
    names = stage.names()
    ours = [name for name in (JOURNAL, DONE) if name in names] + list(filter(is_temporary, names))
    if len(ours) < len(names):
        return False
    for name in ours:
        stage.unlink(name)
        if name == JOURNAL and DONE in names:
            # After a crash, a journal without ``done.json`` would be taken for uncommitted, and reverted. So
            # the journal is removed durably before ``done.json`` is.
            stage.sync()
    place.remove_held(stage, os.path.basename(stage.path))
    return True


def is_temporary(name: str) -> bool:
    """Return whether a name is that of a half-written file of ours."""
    return name.startswith(STAGE_PREFIX) and name.endswith(TEMPORARY)


def stages(state_dir: StateDir) -> list[str]:
    """Return the paths of the stages in a state directory."""
    # In a parent directory there may be stages of several directories: the suffix tells them apart.
    path, suffix = state_dir
    try:
        return sorted(
            entry.path
            for entry in fs.entries(path)
            if entry.name.endswith(suffix)
            and _STAGE.fullmatch(entry.name.removesuffix(suffix))
            and entry.is_dir(follow_symlinks=False)
        )
    except OSError as error:
        raise from_os_error(error, path) from error
