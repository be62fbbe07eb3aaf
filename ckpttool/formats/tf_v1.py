"""TensorFlow checkpoints of the first version: one table that holds index and elements, named as its prefix.

Source: tensorflow/tensorflow ``core/util/saved_tensor_slice.proto``, ``core/framework/tensor.proto``.
"""

from __future__ import annotations

import math
import os
import re
from array import array
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

from ckpttool.checkpoint import Checkpoint, Extent, FileEntry, Producer, Span, Tensor
from ckpttool.dtypes import DType
from ckpttool.errors import DamagedCheckpoint, LimitExceeded
from ckpttool.formats.tf_bundle import (
    BundleEntry,
    Part,
    Slice,
    read_dtype,
    read_shape,
    read_slice,
    require_few,
    slice_key,
    tile,
)
from ckpttool.formats.tf_objects import role_of_key
from ckpttool.formats.tf_training import training_of
from ckpttool.formats.tf_values import Sliced
from ckpttool.report import Finding, warning
from ckpttool.wire.protobuf import BYTES, VARINT, fields, varint
from ckpttool.wire.readable import reader_from
from ckpttool.wire.source import Buffer, Source
from ckpttool.wire.sstable import Table

_SHARD = re.compile(r".+-\d{5}-of-(?P<total>\d{5})", re.DOTALL)
MAX_VARINTS = 1 << 26
"""Bytes of integers of one tensor, which are decoded one by one."""

_META, _DATA = 1, 2  # fields of SavedTensorSlices

# The field of TensorProto that holds the elements of a type, and the bytes of a number in it; 0 for a varint.
_FLOATS = {"float32": (5, 4), "float64": (6, 8), "complex64": (9, 4), "complex128": (12, 8)}
_VARINTS = {"int64": 10, "bool": 11, "float16": 13, "uint32": 16, "uint64": 17}
_SMALL = 7


class _Told(NamedTuple):
    """What the first entry says of a tensor."""

    name: str
    key: bytes
    dtype: DType
    shape: tuple[int, ...]
    slices: tuple[Slice, ...]


class Stored(NamedTuple):
    """The elements of a tensor in a table; decoded when they are read."""

    table: Table
    told: _Told
    parts: tuple[Part, ...]

    def blocks(self, limit: int) -> Iterator[memoryview]:
        sources = tuple(
            Buffer(self.table.path, self._decoded(part, one))
            for part, one in zip(self.parts, self.told.slices, strict=True)
        )
        return Sliced(self.told.shape, self.told.dtype.itemsize, self.parts, sources).blocks(limit)  # type: ignore[arg-type]

    def once(self) -> Stored:
        return self

    def _decoded(self, part: Part, one: Slice) -> bytes:
        name, dtype = self.told.name, self.told.dtype
        found = self.table.find(slice_key(self.told.key, one))
        if found is None:
            raise _damaged(self.table.path, name, "a slice that isn't there")
        for field in fields(found[1], self.table.path, name):
            if field.number == _DATA:
                for inner in fields(field.data, self.table.path, name):
                    if inner.number == 3:
                        data = _elements(self.table.path, name, dtype, inner.data)
                        if len(data) != part.entry.nbytes:
                            raise _damaged(self.table.path, name, f"{len(data):,} bytes of elements")
                        return data
        raise _damaged(self.table.path, name, "a slice without elements")


def _damaged(path: str, where: str, found: str) -> DamagedCheckpoint:
    return DamagedCheckpoint(path, found, where=where, code="bundle-entry")


def _elements(path: str, name: str, dtype: DType, message: memoryview) -> bytes:
    """Return the elements of a TensorProto as little-endian bytes.

    Raises:
        DamagedCheckpoint: It is no such message.
    """
    wanted = _FLOATS[dtype.name][0] if dtype.name in _FLOATS else _VARINTS.get(dtype.name, _SMALL)
    found = (field for field in fields(message, path, name) if field.number == wanted)
    if dtype.name in _FLOATS:
        width, data = _FLOATS[dtype.name][1], bytearray()
        for field in found:
            data += field.data if field.kind == BYTES else field.integer.to_bytes(width, "little")
        return bytes(data)
    numbers = array("Q")
    if len(message) > MAX_VARINTS:
        raise LimitExceeded(path, "too many integers", expected=f"at most {MAX_VARINTS:,} bytes", where=name)
    try:
        for field in found:
            numbers.extend([field.integer] if field.kind == VARINT else _packed(field.data))
    except ValueError as failure:
        raise _damaged(path, name, str(failure)) from failure
    return _as_bytes(numbers, dtype.itemsize)


def _packed(data: memoryview) -> Iterator[int]:
    raw, at = bytes(data), 0
    while at < len(raw):
        number, at = varint(raw, at)
        yield number


def _as_bytes(numbers: array[int], itemsize: int) -> bytes:
    """Return numbers, of which negative ones are in two's complement of 64 bits, in fewer bytes each."""
    import numpy as np

    words: np.ndarray[Any, Any] = np.array(numbers, "u8").astype(f"<u{itemsize}")
    return words.tobytes()


def _told_tensors(path: str, table: Table) -> Iterator[_Told]:
    """Yield what the first entry says of all tensors.

    Raises:
        DamagedCheckpoint: It is wrong.
    """
    first = next(table.block(0), None) if table.blocks else None
    if first is None or first.key:
        raise DamagedCheckpoint(path, "a table without a header", where="header", code="bundle-header")
    for field in fields(first.value, path, "header"):
        if field.number == _META and field.kind != BYTES:
            found, expected = "the index of a checkpoint under another name", "a name ending in .index"
            raise DamagedCheckpoint(path, found, expected=expected, code="bundle-header")
        if len(first.value) > MAX_VARINTS:
            found = f"a list of tensors of {len(first.value):,} bytes"
            raise LimitExceeded(path, found, expected=f"at most {MAX_VARINTS:,}", where="header")
        if field.number == _META:
            for inner in fields(field.data, path, "header"):
                if inner.number == 1:
                    yield _told_tensor(path, inner.data)


def _told_tensor(path: str, message: memoryview) -> _Told:
    key, number, slices = b"", 0, []
    shape: tuple[int, ...] = ()
    for field in fields(message, path, "header"):
        key = bytes(field.data) if field.number == 1 else key
    name = key.decode("utf-8", "backslashreplace")
    for field in fields(message, path, "header"):
        if field.number == 2:
            shape = read_shape(path, name, field.data)
        elif field.number == 3:
            number = field.integer
        elif field.number == 4:
            slices.append(read_slice(path, name, field.data))
            require_few(path, name, len(slices))
    return _Told(name, key, read_dtype(path, name, number), shape, tuple(slices))


def _parts(path: str, told: _Told) -> tuple[Part, ...]:
    """Return the slices of a tensor; they cover it.

    Raises:
        DamagedCheckpoint: They don't.
    """
    whole = BundleEntry(told.key, told.dtype, told.shape, 0, 0, 0, 0)
    parts = []
    for one in told.slices:
        axes = list(zip(one, told.shape, strict=False))
        lengths = tuple(axis if length is None else length for (_, length), axis in axes)
        nbytes = told.dtype.nbytes(math.prod(lengths)) if min(lengths, default=0) >= 0 else 0
        entry = BundleEntry(told.key, told.dtype, lengths, 0, 0, nbytes, 0)
        parts.append(Part(tuple(start for (start, _), _ in axes), lengths, entry))
    if not parts:
        raise _damaged(path, told.name, "a tensor without slices")
    tile(path, whole, parts)
    return tuple(parts)


def open_old(path: str) -> Checkpoint:
    """Return the checkpoint that one table is.

    Raises:
        CheckpointError: It can't be read, or its structure is wrong.
    """
    source = Source(path)
    try:
        table = Table(source)
        told = list(_told_tensors(path, table))
        tensors = tuple(_tensor(path, table, one) for one in told)
        return Checkpoint(
            path=path,
            format="tensorflow",
            variant="v1",
            tensors=tensors,
            files=(FileEntry(path, source.size),),
            spans=lambda: _spans(source, table, told),
            training=lambda: training_of(tensors, os.path.basename(path)),
            producer=Producer("tensorflow"),
            findings=tuple(_alone(path)),
            close=source.close,
        )
    except BaseException:
        source.close()
        raise


def _tensor(path: str, table: Table, told: _Told) -> Tensor:
    parts = _parts(path, told)
    for one in told.slices:
        if table.block_of(slice_key(told.key, one)) is None:
            raise _damaged(path, told.name, "a slice that isn't there")
    role = role_of_key(told.name, told.dtype, told.shape, {})
    values = Stored(table, told, parts) if told.dtype.kind != "string" else None
    return Tensor((told.name,), told.dtype, told.shape, role, values)


def _spans(source: Source, table: Table, told: list[_Told]) -> Iterator[Span]:
    """Yield the blocks, each with the byte that its checksum stands for, too."""
    names: dict[int, list[str]] = defaultdict(list)
    for one in told:
        for part in one.slices:
            number = table.block_of(slice_key(one.key, part))
            if number is not None and one.name not in names[number]:
                names[number].append(one.name)
    for number, (_, handle) in enumerate(table.blocks):
        held = names[number]
        where = f"block {number}"
        if held:
            where = held[0] if len(held) == 1 else f"{where}: {held[0]} and {len(held) - 1} more"
        extent = Extent(source.path, handle.offset, handle.nbytes + 1)
        yield Span(
            extent,
            where,
            reader_from(source, handle.offset),
            table.stored_checksum(handle),
            algorithm="crc32c",
        )


def _alone(path: str) -> Iterator[Finding]:
    match = _SHARD.fullmatch(os.path.basename(path))
    if match is not None and int(match["total"]) > 1:
        message = f"one of {int(match['total']):,} shards; the others were not looked at"
        yield warning("shard-alone", message, os.path.basename(path))
