"""Reads journals from the disk, those of earlier versions too."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from ckpttool.core.errors import AccessDenied, DamagedCheckpoint, from_os_error
from ckpttool.storage import fs
from ckpttool.storage.directories import OpenDirectory
from ckpttool.transaction.files import Contents, contents, opened, status_at
from ckpttool.transaction.history import read_record
from ckpttool.transaction.journal import (
    CONTENT,
    REPLACED,
    Group,
    Location,
    Move,
    OperationList,
    output_operations,
)
from ckpttool.transaction.journal_documents import SCHEMA, count_of, operations_of
from ckpttool.transaction.old_journals import MOVING, REMOVALS, OldOutput, list_of, old_output_of, removals_of
from ckpttool.transaction.stages import DONE, JOURNAL, stages
from ckpttool.transaction.state_dir import (
    open_own,
    read_own,
    state_dir_of_stage,
    state_dirs,
)

T = TypeVar("T")


def read_journal(stage: str, directory: str) -> OperationList | None:
    """Return the journal of a stage, or None if it has none.

    Args:
        stage: Path of the stage.
        directory: The directory that it is for.
    """

    def read(name: str, what: str, parse: Callable[[Any], T]) -> T | None:
        return read_own(directory, *os.path.split(stage), name, what=what, parse=parse)

    def parse(document: Mapping[str, Any]) -> OperationList:
        if document["schema"] == SCHEMA:
            noted = document.get("stage")
            is_copy = None if noted is None else count_of(noted) != inode
            return replace(operations_of(document, done), is_copy=is_copy)
        if document["schema"] == REMOVALS:
            return _old_removals(removals_of(document), directory, stage)
        listed = list_of(document)
        return listed if "before" in document else _with_old_done(listed, directory, stage)

    try:
        inode = fs.lstat(stage).st_ino
    except FileNotFoundError:  # the command that it was of has just ended
        return None
    except OSError as error:
        raise from_os_error(error, stage) from error
    done = read(DONE, "a list of groups", lambda document: document)
    listed = read(JOURNAL, "a journal", parse)
    if listed is not None and listed.leader is not None and listed.done is None:
        leader = os.path.join(directory, listed.leader)
        if fs.isdir(leader) and _has_committed(leader, listed.identity):
            return replace(listed, done=frozenset(range(len(listed.groups))))
    return listed


def _has_committed(directory: str, identity: str | None) -> bool:
    """Tell whether a command is committed in a directory, or completed there."""
    assert identity is not None  # of all that have a leader
    is_recorded = False
    for state_dir in state_dirs(directory):
        for stage in stages(state_dir):
            listed = read_journal(stage, directory)
            if listed is not None and listed.identity == identity:
                return listed.is_committed
        is_recorded |= read_record(directory, state_dir, identity) is not None
    return is_recorded


def read_output(directory: OpenDirectory, area: OpenDirectory) -> OperationList:
    """Return the journal of an output.

    Args:
        directory: The directory that the output comes to.
        area: The directory beside it in which it was written.
    """
    path = directory.path or os.curdir
    if not area.has(MOVING):
        listed = read_journal(area.path, path)
    else:
        plan = read_own(path, *os.path.split(area.path), MOVING, what="a plan", parse=old_output_of)
        listed = None if plan is None else _old_output(plan, directory, area)
    if listed is None:
        raise AccessDenied(area.path, "it has changed while it was read")
    return listed


def _old_output(plan: OldOutput, directory: OpenDirectory, area: OpenDirectory) -> OperationList:
    """Return an output of version 0.1; it is committed if all of it is at the target."""
    with area.open(REPLACED) as aside, area.open(CONTENT) as content:
        for name in aside.names():
            status = aside.status(name)
            if status is None or status.st_ino != plan.old.get(name):
                raise DamagedCheckpoint(aside.join(name), "it is not what was set aside")
        old = {name: _contents_in(aside if aside.has(name) else directory, name) for name in plan.old}
        new: dict[str, Contents] = {}
        has_come = bool(plan.new)
        for name, mark in plan.new.items():
            status = directory.status(name)
            is_here = status is not None and (status.st_ino, status.st_mtime_ns) == mark
            has_come &= is_here
            if not (is_here or content.has(name)):
                problem = f"it has come to stand there, or was changed; the old is in {aside.path}"
                raise DamagedCheckpoint(directory.join(name), problem)
            new[name] = _contents_in(directory if is_here else content, name)
    listed = output_operations(area.path, new, old)
    return replace(listed, done=frozenset(range(len(listed.groups))) if has_come else None)


def _contents_in(directory: OpenDirectory, name: str) -> Contents:
    assert directory.descriptor is not None  # else nothing was begun
    return contents(directory.descriptor, [name])


def _with_old_done(listed: OperationList, directory: str, stage: str) -> OperationList:
    """Return moves of version 0.1; those in the record, which was written last, are committed."""
    assert listed.identity is not None  # of all but removals
    record = read_record(directory, state_dir_of_stage(stage), listed.identity)
    steps = () if record is None else record.steps
    numbers = range(len(listed.groups))
    if listed.kind == "restore":
        left = {step.undoing.names(at) for step in steps for at in range(len(step.undoing.groups))}
        done = frozenset(number for number in numbers if listed.names(number) not in left)
        is_dropped = not any(step.undoing.pointers == listed.pointers for step in steps)
        return replace(listed, done=done) if done or (is_dropped and not listed.groups) else listed
    journal = os.path.basename(stage)
    for step in steps:
        if step.journal == journal:
            recorded = {_pairs(step.undoing, at, new_first=True) for at in range(len(step.undoing.groups))}
            done = frozenset(one for one in numbers if _pairs(listed, one, new_first=False) in recorded)
            return replace(listed, done=done)
    return listed


def _pairs(listed: OperationList, number: int, *, new_first: bool) -> frozenset[tuple[str, str]]:
    return frozenset(pair[::-1] if new_first else pair for pair in listed.names(number))


def _old_removals(groups: Sequence[Group], directory: str, stage: str) -> OperationList:
    """Return removals of version 0.1; those that had left the directory are committed."""
    shared = next((number for number, one in enumerate(groups) if one.is_single), 0)
    operations: list[Move] = []
    done: set[int] = set()
    try:
        with opened(directory) as here, open_own(directory, *os.path.split(stage)) as inner:
            assert inner.descriptor is not None  # as that of the directory is not
            for number, group in enumerate(groups):
                # Single files shared the place of the first of them; 0.1.0 gave each its own.
                has_own = not group.is_single or inner.has(str(number))
                place = str(number if has_own else shared)
                operations += (
                    Move(number, Location("directory", name), Location("stage", os.path.join(place, name)))
                    for name in group.members
                )
                if _is_committed(group, here, inner.descriptor, place):
                    done.add(number)
    except OSError as error:
        raise from_os_error(error, stage) from error
    return OperationList("remove", tuple(groups), tuple(operations), done=frozenset(done))


def _is_committed(group: Group, directory: int, stage: int, place: str) -> bool:
    """Tell whether a 0.1 removal is committed: only in the stage, or partly unlinked."""

    def staged(path: str) -> os.stat_result | None:
        return status_at(os.path.join(place, path), stage)

    here = {file: status_at(file.path, directory) for file in group.contents.files}
    is_there = [status is not None or staged(file.path) is not None for file, status in here.items()]
    is_here = any(status is not None and file.is_of(status) for file, status in here.items())
    has_begun = any(staged(name) is not None for name in group.members)
    return (has_begun and not (is_here and all(is_there))) or not any(is_there)
