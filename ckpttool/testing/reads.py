"""Bytes of files, read with nothing of ckpttool, and what ckpttool reads and leaves open."""

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
    """Return elements as they lie in a file as little-endian ones."""
    word = tensor.dtype.word_bytes
    if tensor.byteorder == "little" or word == 1:
        return raw
    return b"".join(raw[start : start + word][::-1] for start in range(0, len(raw), word))


@contextmanager
def recorded_reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Extent]]:
    """Record every read of a file or an object, as ``Source`` is asked for it."""
    reads: list[Extent] = []

    def record_reads_by(source: type[Source]) -> None:
        read_into = source.read_into

        def recording(self: Source, offset: int, buffer: memoryview, where: str | None = None) -> None:
            reads.append(Extent(self.path, offset, len(buffer)))
            read_into(self, offset, buffer, where)

        patch.setattr(source, "read_into", recording)

    with monkeypatch.context() as patch:
        record_reads_by(Source)
        record_reads_by(RemoteSource)
        yield reads


def lies_inside(read: Extent, extent: Extent) -> bool:
    """Tell whether a read touched nothing but an extent: no structure around it explains it."""
    is_below = extent.offset <= read.offset and read.end <= extent.end
    return read.nbytes > 0 and read.file == extent.file and is_below


def is_inside(offset: int, extents: list[Extent]) -> bool:
    """Tell whether an offset lies in one of the extents, which are sorted and apart."""
    index = bisect_right([extent.offset for extent in extents], offset) - 1
    return index >= 0 and offset < extents[index].end


def is_same(file: str, other: Path) -> bool:
    """Tell whether two paths are one file."""
    return Path(file).resolve() == other.resolve()


@contextmanager
def no_file_left_open() -> Iterator[None]:
    """Require that no file is open afterwards that was not before, where the system tells."""
    before = open_files()
    yield
    assert not open_files() - before


def open_files() -> frozenset[tuple[int, int, int]]:
    """Return the regular files that this process has open: descriptor, device, inode, where the system tells.

    Pipes don't count: the process that reads HDF5 stays for the next file.
    """
    files = set()
    for name in os.listdir(_DESCRIPTORS) if _DESCRIPTORS.exists() else ():
        try:
            status = os.fstat(int(name))
        except OSError:  # that of the listing itself, closed again
            continue
        if stat.S_ISREG(status.st_mode):
            files.add((int(name), status.st_dev, status.st_ino))
    return frozenset(files)
