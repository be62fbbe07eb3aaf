"""One file copied to a disk or into a store, and proven to be there.

A store that makes its versions of the bytes themselves, as S3 does by MD5, has proven by the version that
they arrived. All others are read back, and so is a disk.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

from ckpttool.core.errors import AccessDenied, CheckpointError, DamagedCheckpoint, from_os_error
from ckpttool.formats.copy_notes import dumps_note, read_note
from ckpttool.storage import fs
from ckpttool.storage.source import Source
from ckpttool.storage.work import Advance, no_advance

_COMPARED_BLOCK = 1 << 25
"""Bytes; the same for both files that are compared."""
_TRIES = 10
"""How often a note is changed anew that others change at the same time."""
_ETAG = re.compile(r'"?([0-9a-f]{32})(?:-([1-9][0-9]{0,4}))?"?')
_PARTS_OF_OTHERS = tuple(mebibytes << 20 for mebibytes in (8, 5, 16, 32, 64, 128))
"""How large the parts are in which other programs upload: boto3 and the AWS tools first."""


class ContentTag:
    """The version that S3 gives to bytes: their MD5, or that of the MD5s of parts."""

    def __init__(self, size: int, part: int) -> None:
        self._parts: list[Any] = []
        self._part, self._room, self._has_parts = part, 0, size > part

    def update(self, block: bytes) -> None:
        view = memoryview(block)
        while view:
            if not self._room:
                self._parts.append(hashlib.md5(usedforsecurity=False))
                self._room = self._part
            self._parts[-1].update(view[: self._room])
            taken = min(len(view), self._room)
            view, self._room = view[taken:], self._room - taken

    @property
    def value(self) -> str:
        digests = [one.digest() for one in self._parts]
        if not self._has_parts:
            return (digests[0] if digests else hashlib.md5(usedforsecurity=False).digest()).hex()
        return f"{hashlib.md5(b''.join(digests), usedforsecurity=False).hexdigest()}-{len(digests)}"


def _tag_like(version: str, size: int) -> ContentTag | None:
    """Return what may come to a version that a store gave; None if it isn't made of bytes."""
    from ckpttool.storage.stores import part_size

    if (match := _ETAG.fullmatch(version)) is None:
        return None
    if match[2] is None:
        return ContentTag(size, max(size, 1))
    sizes = (part_size(size), *_PARTS_OF_OTHERS)
    part = next((one for one in sizes if -(-size // one) == int(match[2])), None)
    return None if part is None else ContentTag(size, part)


def same_content(path: str, other: str, advance: Advance = no_advance) -> bool:
    """Tell whether a file has the bytes of another, which is proven; either may lie in a store.

    Raises:
        CheckpointError: One of them can't be read.
    """
    with fs.open_source(path) as source, fs.open_source(other) as target:
        if source.size != target.size:
            return False
        if _tag_proves(source, target, advance):
            return True
        return all(one == two for one, two in zip(_blocks(source, advance), _blocks(target), strict=True))


def _tag_proves(source: Source, target: Source, advance: Advance) -> bool:
    version, own = target.version, source.version
    if version and version == own and _ETAG.fullmatch(version):
        return True
    tag = None if own else _tag_like(version, target.size)
    if tag is None:
        return False
    for block in _blocks(source, no_advance):
        tag.update(block)
    if tag.value != version.strip('"'):
        return False
    advance(source.size)
    return True


def _blocks(source: Source, advance: Advance = no_advance) -> Iterator[bytes]:
    for block in source.in_blocks(_COMPARED_BLOCK):
        yield block
        advance(len(block))


# Copying --------------------------------------------------------------------------------------------


class BadDestination(AccessDenied):
    """A disk or a store can't be written to: it is full, closed, or out of order."""


def status_of(path: str) -> os.stat_result | None:
    """Return what is at a path now, or None; a store is asked if it wasn't a moment ago.

    Raises:
        CheckpointError: Nobody can tell.
    """
    try:
        return fs.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise from_os_error(error, path) from error


def is_unchanged(path: str, was: os.stat_result | None) -> bool:
    """Tell whether a path leads to what it led to before."""
    return fs.is_same_file(status_of(path), was)


def copy_file(
    path: str,
    seen: os.stat_result,
    target: str,
    replaces: os.stat_result | None = None,
    advance: Advance = no_advance,
    check: Callable[[str], object] | None = None,
) -> tuple[str, ...]:
    """Copy a file, and prove that it arrived: all of it stands there after, or nothing of it does.

    Args:
        path: Where it lies.
        seen: What it was when it was verified.
        target: Where it is to lie; the directory is made.
        replaces: What it takes the place of; None if nothing may be there.
        advance: Told the bytes that were sent.
        check: Called with the path of what arrived on a disk, before it has its name; may raise.

    Returns:
        What could not be cleared away there, each in a sentence.

    Raises:
        CheckpointError: It can't be read, isn't what was seen, or can't be written.
    """
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
    """Return the error of a target that can't be written; what others did there says nothing of the rest."""
    failure = from_os_error(error, target)
    if isinstance(error, FileExistsError) or error.errno == errno.ESTALE:
        return AccessDenied(target, "somebody else wrote it meanwhile", expected="run the command again")
    return BadDestination(target, failure.reason)


def target_status(target: str) -> os.stat_result | None:
    """Return what is where a file is to lie, or None; it ends a copy if nobody can tell."""
    try:
        return status_of(target)
    except CheckpointError as error:
        raise BadDestination(target, error.reason) from error


def change_note(path: str, change: Callable[[dict[str, list[str]]], object]) -> None:
    """Change a note of copies; an empty one is removed. What others write meanwhile is kept."""
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
    """Yield a file's bytes, and require in the end that it still is what was seen."""
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
        # The answer to the first try may have been lost: then what is there came from here.
        remote.forget_at(target)
        if not same_content(source.path, target):
            raise
        return
    remote.forget_at(target)
    if found.version.strip('"') != tag.value and not same_content(source.path, target):
        raise AccessDenied(target, "the store has other bytes than were sent", expected="run it again")


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
            raise AccessDenied(target, "the disk has other bytes than were written", expected="run it again")
        if check is not None:
            check(staged.path)
        # Retention goes by the times of files, and a manifest counts if it isn't older than its checkpoint.
        fs.set_modified(staged.path, seen.st_mtime_ns)
        if replaces is not None and not is_unchanged(target, replaces):
            raise AccessDenied(target, "it was changed meanwhile")
        staged.commit()
    return staged.warnings
