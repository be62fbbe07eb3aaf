"""Records of the reads of ckpttool and of its open files, and independent reads to compare with."""

from __future__ import annotations

import os
import stat
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ckpttool.core.tensor import Extent, Tensor
from ckpttool.storage.object_stores import RemoteSource
from ckpttool.storage.source import Source

_DESCRIPTORS = Path("/proc/self/fd")


def in_little_endian(raw: bytes, tensor: Tensor) -> bytes:
    """Return the stored bytes of a tensor in little-endian order."""
    word = tensor.dtype.word_bytes
    if tensor.byteorder == "little" or word == 1:
        return raw
    return b"".join(raw[start : start + word][::-1] for start in range(0, len(raw), word))


@contextmanager
def recorded_reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Extent]]:
    """Record every read of a file or an object by ``Source``."""
    reads: list[Extent] = []

    def record_reads_by(source: type[Source]) -> None:
        read_into = source.read_into

        def recording(self: Source, offset: int, buffer: memoryview, where: str | None = None) -> None:
            reads.append(Extent(self.path, offset, len(buffer)))
            read_into(self, offset, buffer, where)

        patch.setattr(source, "read_into", recording)

    # ``RemoteSource`` has a method of its own.
    with monkeypatch.context() as patch:
        record_reads_by(Source)
        record_reads_by(RemoteSource)
        yield reads


def is_within(read: Extent, extent: Extent) -> bool:
    """Return whether a read covers only bytes of an extent, so that no structure around it explains it."""
    is_below = extent.offset <= read.offset and read.end <= extent.end
    return read.nbytes > 0 and read.file == extent.file and is_below


def is_inside(offset: int, extents: list[Extent]) -> bool:
    """Return whether an offset is in one of the extents, which are sorted and disjoint."""
    index = bisect_right([extent.offset for extent in extents], offset) - 1
    return index >= 0 and offset < extents[index].end


def is_same(file: str, other: Path) -> bool:
    """Return whether two paths are the same file."""
    return Path(file).resolve() == other.resolve()


@contextmanager
def no_file_left_open() -> Iterator[None]:
    """Require that no more files are open afterwards than before, if the system lists them."""
    before = open_files()
    yield
    assert not open_files() - before


def open_files() -> frozenset[tuple[int, int, int]]:
    """Return descriptor, device and inode of each regular file that this process has open.

    Pipes don't count, since the process that reads HDF5 is kept for the next file. If the system doesn't list
    open files, it is empty.
    """
    files = set()
    for name in os.listdir(_DESCRIPTORS) if _DESCRIPTORS.exists() else ():
        try:
            status = os.fstat(int(name))
        except OSError:  # the descriptor of the listing itself, closed by now
            continue
        if stat.S_ISREG(status.st_mode):
            files.add((int(name), status.st_dev, status.st_ino))
    return frozenset(files)
