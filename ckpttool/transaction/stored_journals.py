"""Reader of journals on a disk, including those of earlier versions."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ckpttool.core.errors import AccessDenied, from_os_error
from ckpttool.storage import fs
from ckpttool.storage.directories import OpenDirectory, write_in
from ckpttool.transaction.history import inode_of, read_record
from ckpttool.transaction.journal import OperationList
from ckpttool.transaction.journal_documents import SCHEMA, count_of, operations_of
from ckpttool.transaction.old_journals import (
    MOVING,
    REMOVALS,
    list_of,
    output_of,
    removals_of,
    with_recorded,
)
from ckpttool.transaction.stages import DONE, JOURNAL, stages
from ckpttool.transaction.state_dir import open_own, read_own, state_dir_of_stage, state_dirs


def read_journal(stage: str, directory: str) -> OperationList | None:
    """Return the journal of a stage for a directory, or None if it has none."""

    def parse(document: Mapping[str, Any]) -> OperationList:
        if document["schema"] == SCHEMA:
            recorded = document.get("stage")
            is_copy = None if recorded is None else count_of(recorded) != inode
            return replace(operations_of(document, done), is_copy=is_copy)
        if document["schema"] == REMOVALS:
            return removals_of(document, directory, stage)
        # Journals of 0.1 list no committed groups: those in the record are.
        listed = list_of(document)
        if "before" in document:
            return listed
        assert listed.identity is not None  # of all but removals
        record = read_record(directory, state_dir_of_stage(stage), listed.identity)
        return with_recorded(listed, os.path.basename(stage), () if record is None else record.steps)

    try:
        inode = fs.lstat(stage).st_ino
    except FileNotFoundError:  # its command has just ended
        return None
    except OSError as error:
        raise from_os_error(error, stage) from error
    # A command that ends removes ``journal.json`` before ``done.json``. They are read in the opposite order,
    # so that its journal isn't taken for uncommitted.
    location = os.path.split(stage)
    done = read_own(directory, *location, DONE, kind="a list of groups", parse=lambda document: document)
    listed = read_own(directory, *location, JOURNAL, kind="a journal", parse=parse)
    # The leader's commit counts for its followers, which may not have their own ``done.json`` yet. The
    # leader's journal is removed last: once it is missing, either all followers have a commit of their own,
    # or none.
    if listed is not None and listed.leader is not None and listed.done is None:
        leader = os.path.join(directory, listed.leader)
        journals = () if inode_of(leader) is None else _journals_of(leader, listed.identity)
        if any(journal.is_committed for _, journal in journals):
            return replace(listed, done=frozenset(range(len(listed.groups))))
    return listed


def _journals_of(directory: str, identity: str | None) -> Iterator[tuple[str, OperationList]]:
    """Yield the stages of one command in a directory, with their journals."""
    for stage in (stage for state_dir in state_dirs(directory) for stage in stages(state_dir)):
        listed = read_journal(stage, directory)
        if listed is not None and listed.identity == identity:
            yield stage, listed


def commit_followers(directory: str, leader: OperationList) -> None:
    """Commit the followers of a committed list, before its own journal is removed."""
    for path in (os.path.join(directory, relative) for relative in leader.followers):
        if inode_of(path) is None:  # the directory was removed, with its journal
            continue
        for stage, listed in _journals_of(path, leader.identity):
            with suppress(FileNotFoundError), open_own(path, *os.path.split(stage)) as inner:
                if not inner.has(DONE):  # else another command is completing it
                    write_in(inner, DONE, json.dumps([*range(len(listed.groups))]).encode())


def read_output(directory: OpenDirectory, area: OpenDirectory) -> OperationList:
    """Return the journal in the area of an output."""

    def parse(document: Mapping[str, Any]) -> OperationList:
        return output_of(document, directory, area)

    path = directory.path or os.curdir
    if area.has(MOVING):
        listed = read_own(path, *os.path.split(area.path), MOVING, kind="a plan", parse=parse)
    else:
        listed = read_journal(area.path, path)
    if listed is None:
        raise AccessDenied(area.path, "it changed while it was being read")
    return listed
