"""The entry ``ckpttool.content`` of an HDF5 file: a dataset of one text, which is read without libhdf5."""

from __future__ import annotations

from collections.abc import Callable

from ckpttool.formats.carried import MAX_DOCUMENT
from ckpttool.wire.hdf5 import Dataset
from ckpttool.wire.readable import Readable


def is_text(dataset: Dataset) -> bool:
    """Tell whether a dataset is one text that lies in one piece."""
    is_one = dataset.kind.family == "string" and not dataset.kind.is_variable and dataset.shape == ()
    in_place = dataset.layout == "contiguous" and dataset.offset is not None
    return is_one and in_place and dataset.stored == dataset.nbytes <= MAX_DOCUMENT


def reader_of(source: Readable, base: int, dataset: Dataset) -> Callable[[], bytes]:
    """Return what reads the text; the file begins at ``base`` of its source."""
    at, nbytes, name = base + (dataset.offset or 0), dataset.nbytes, dataset.name

    def read() -> bytes:
        source.check(at, nbytes, name)
        return source.read(at, nbytes, name).rstrip(b"\0")

    return read
