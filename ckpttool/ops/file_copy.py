"""Copies one file to a disk or into a store, and proves that it arrived.

In a store whose ETag is the MD5 of the bytes, as in S3, the ETag is the proof. In others, the copy is
compared as any other (``copy_check``); on a disk, it is read back.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable, Iterator

from ckpttool.core.errors import AccessDenied, CheckpointError, DamagedCheckpoint, from_os_error
from ckpttool.formats.opening import dumps_note, read_note
from ckpttool.ops.copy_check import is_same
from ckpttool.storage import fs
from ckpttool.storage.checksums import ContentTag
from ckpttool.storage.source import Source
from ckpttool.storage.work import Advance, no_advance

_TRIES = 10
"""Attempts to update a note that other programs update at the same time."""


class BadDestination(AccessDenied):
    """A disk or a store can't be written to: it is full, closed, or out of order."""


def status_of(path: str) -> os.stat_result | None:
    """Return the status of a path, or None; cached answers of a store count for a moment.

    Raises:
        CheckpointError: The status can't be read.
    """
    try:
        return fs.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise from_os_error(error, path) from error


def is_unchanged(path: str, was: os.stat_result | None) -> bool:
    """Return whether a path still has the file with a status."""
    return fs.is_same_file(status_of(path), was)


def copy_file(
    path: str,
    seen: os.stat_result,
    target: str,
    replaces: os.stat_result | None = None,
    advance: Advance = no_advance,
    check: Callable[[str], object] | None = None,
) -> tuple[str, ...]:
    """Copy a file, and prove that it arrived; the target appears whole or not at all.

    Args:
        path: Path of the file.
        seen: Its status when it was verified.
        target: Path of the copy; its directory is created.
        replaces: Status of the file that it replaces; None if the target must not exist.
        advance: Called with the bytes sent.
        check: Called with the path of the staged copy on a disk, before it is renamed; may raise.

    Returns:
        A sentence for each leftover that could not be removed.

    Raises:
        CheckpointError: The file can't be read, has changed since ``seen``, or the copy can't be written.
    """
    # The open file must be the verified one, and its status is compared again after the last block: nothing
    # that was written in between can be in the copy.
    with fs.open_source(path) as source:
        if source.identity != (seen.st_dev, seen.st_ino):
            raise _changed(path)
        blocks = _unchanged_blocks(source, seen, advance)
        try:
            if fs.place_of(target).can_rename:
                return _onto_disk(blocks, target, seen, replaces, check)
            _into_store(source, blocks, target, replaces)
            return ()
        except OSError as error:
            raise _write_error(error, target) from error


def _write_error(error: OSError, target: str) -> CheckpointError:
    """Return the error of a target that can't be written; a change by another process ends only this file."""
    failure = from_os_error(error, target)
    if isinstance(error, FileExistsError) or error.errno == errno.ESTALE:
        return AccessDenied(target, "another process wrote it meanwhile", expected="run the command again")
    return BadDestination(target, failure.reason)


def target_status(target: str) -> os.stat_result | None:
    """Return the status of a copy's target, or None; a copy ends if that is unknown."""
    try:
        return status_of(target)
    except CheckpointError as error:
        raise BadDestination(target, error.reason) from error


def change_note(path: str, change: Callable[[dict[str, list[str]]], object]) -> None:
    """Update a note of copies, and remove it if it becomes empty.

    In a store, the update is repeated if another program wrote the note meanwhile.
    """
    # The write succeeds only if the note is still the one that was read (a conditional request in a store).
    # If another program changed it, its version is read, and changed in turn.
    for tries_left in reversed(range(_TRIES)):
        was = target_status(path)
        note = {} if was is None else read_note(path)
        before = dict(note)
        change(note)
        if note == before:
            return
        try:
            if note:
                fs.place_of(path).write(path, dumps_note(note), was)
            elif was is not None:
                fs.place_of(path).remove(path, was)
            return
        except OSError as error:
            if not (tries_left and fs.is_change(error)):
                raise _write_error(error, path) from error


def remove_file(target: str, seen: os.stat_result | None) -> None:
    """Remove a file, unless it has changed since it was seen; None if it didn't exist."""
    if seen is None:
        return
    try:
        fs.place_of(target).remove(target, seen)
    except OSError as error:
        raise _write_error(error, target) from error


def _unchanged_blocks(source: Source, seen: os.stat_result, advance: Advance) -> Iterator[bytes]:
    """Yield a file's bytes, and require at the end that it is unchanged."""
    for block in source.in_blocks(fs.place_of(source.path).block_bytes):
        yield block
        advance(len(block))
    if not is_unchanged(source.path, seen):
        raise _changed(source.path)


def _changed(path: str) -> DamagedCheckpoint:
    return DamagedCheckpoint(path, "it changed while it was copied", expected="run the command again")


def _into_store(
    source: Source, blocks: Iterator[bytes], target: str, replaces: os.stat_result | None
) -> None:
    from ckpttool.storage import remote
    from ckpttool.storage.object_stores import object_seen
    from ckpttool.storage.stores import part_size

    store, name = remote.store_at(target)
    tag = ContentTag(source.size, part_size(source.size))

    def summed() -> Iterator[bytes]:
        for block in blocks:
            tag.update(block)
            yield block

    try:
        found = store.write(name, summed(), source.size, object_seen(target, replaces))
    except FileExistsError:
        # The response to a first attempt may have been lost: then the existing object is the one sent here.
        remote.forget_at(target)
        if not is_same(source.path, target):
            raise
        return
    # The ETag proves the copy if the store computes it as S3 does; else the bytes are compared.
    remote.forget_at(target)
    if found.version.strip('"') != tag.value and not is_same(source.path, target):
        raise AccessDenied(
            target, "the stored bytes differ from those sent", expected="run the command again"
        )


def _onto_disk(
    blocks: Iterator[bytes],
    target: str,
    seen: os.stat_result,
    replaces: os.stat_result | None,
    check: Callable[[str], object] | None,
) -> tuple[str, ...]:
    from ckpttool.transaction.staged_output import StagedOutput

    directory, name = os.path.split(target)
    fs.makedirs(directory or os.curdir)
    sent = hashlib.sha256()
    try:
        output = StagedOutput(target, replaces=None if replaces is None else [name], jobs=1)
    except AccessDenied as error:
        raise BadDestination(error.path, error.reason) from error
    with output as staged:
        sink = staged.create()
        for block in blocks:
            sent.update(block)
            sink.write(block)
        staged.settle()
        arrived = hashlib.sha256()
        with fs.open_source(staged.path) as written:
            for block in written.in_blocks(fs.place_of(staged.path).block_bytes):
                arrived.update(block)
        if arrived.digest() != sent.digest():
            found = "the bytes on the disk differ from those written"
            raise AccessDenied(target, found, expected="run the command again")
        if check is not None:
            check(staged.path)
        # Retention rules use the times of files, and a manifest older than its checkpoint is ignored.
        fs.set_modified(staged.path, seen.st_mtime_ns)
        if replaces is not None and not is_unchanged(target, replaces):
            raise AccessDenied(target, "it was changed meanwhile")
        staged.commit()
    return staged.warnings
