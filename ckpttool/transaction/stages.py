"""Stages: the directories in which commands keep their journals while they work.

A command that removes checkpoints, or moves them, owns a directory ``.ckpttool-<id>`` beside them, or where
``state_dir_of`` says. Its ``journal.json`` appears whole, once all that will be done is known; a stage
without one is an attempt that touched nothing.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from ckpttool.core.errors import AccessDenied, from_os_error
from ckpttool.storage import fs
from ckpttool.storage.atomic import write_in
from ckpttool.storage.directories import OpenDirectory, remove_directory, retry_while_busy
from ckpttool.storage.held import IS_SUPPORTED
from ckpttool.transaction.lock import FULL
from ckpttool.transaction.state_dir import MAX_BYTES, StateDir

STAGE_PREFIX = ".ckpttool-"
JOURNAL = "journal.json"
DONE = "done.json"
"""File beside a journal: the numbers of the committed groups."""
TEMPORARY = ".tmp"

_STAGE = re.compile(rf"{re.escape(STAGE_PREFIX)}[0-9a-f]{{8}}")


class NoRoom(AccessDenied):
    """The disk, or a quota, is full."""


def require_system(directory: str, done: str) -> None:
    """Require a system that can work below open directories."""
    if not IS_SUPPORTED:
        raise AccessDenied(directory, f"this system can't work below open directories; nothing was {done}")


@contextmanager
def new_stage(
    directory: str, state_dir: StateDir, document: Mapping[str, Any], done: str, places: Collection[str] = ()
) -> Iterator[OpenDirectory]:
    """Create a stage with its journal, synced; yields it open, and keeps it on exit.

    Args:
        directory: Whose journal it is.
        state_dir: Where it is to lie.
        document: What it is to say.
        done: What was done to nothing if it can't be written: "removed".
        places: Names of directories for files to make in the stage.
    """
    name = f"{STAGE_PREFIX}{os.urandom(4).hex()}{state_dir.suffix}"
    with ExitStack() as stack:
        try:
            place = stack.enter_context(OpenDirectory(state_dir.path))
            stage = stack.enter_context(place.make(name, 0o700))
            try:
                for number in sorted(places):
                    stage.make(number, 0o700).close()
                text = {**document, "stage": stage.own_status().st_ino}  # which no copy of it has
                write_in(stage, JOURNAL, journal_text(directory, text, f"; nothing was {done}"))
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


def journal_text(directory: str, document: Mapping[str, Any], result: str = "") -> bytes:
    """Return the text of a journal, and require that recovery reads so much."""
    text = json.dumps(document).encode()
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
    ours = [name for name in (JOURNAL, DONE) if name in names] + list(filter(is_temporary, names))
    if len(ours) < len(names):
        return False
    for name in ours:
        stage.unlink(name)
        if name == JOURNAL and DONE in names:
            stage.sync()  # a journal without the file beside it would be reverted
    place.remove_held(stage, os.path.basename(stage.path))
    return True


def is_temporary(name: str) -> bool:
    """Tell whether a name is that of a file of ours that was still being written."""
    return name.startswith(STAGE_PREFIX) and name.endswith(TEMPORARY)


def stages(state_dir: StateDir) -> list[str]:
    """Return the paths of the stages in a state directory."""
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
