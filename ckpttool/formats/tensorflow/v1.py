"""TensorFlow checkpoints of the first version: tables that hold index and elements.

There is one, named as the prefix, or one for each device, ``<prefix>-00000-of-00002``. Each lists what it
holds itself; a partitioned variable may lie in several.

Source: tensorflow/tensorflow ``core/util/saved_tensor_slice.proto``, ``core/framework/tensor.proto``.
"""

from __future__ import annotations

import math
import os
from array import array
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

from ckpttool.checkpoint import Checkpoint, FileEntry, Producer
from ckpttool.dtypes import DType
from ckpttool.errors import DamagedCheckpoint, LimitExceeded
from ckpttool.formats.parts import file_entry
from ckpttool.formats.tensorflow.bundle import (
    BundleEntry,
    Slice,
    read_dtype,
    read_shape,
    read_slice,
    require_few,
    slice_key,
)
from ckpttool.formats.tensorflow.native import native_of
from ckpttool.formats.tensorflow.object_graph import role_of_key
from ckpttool.formats.tensorflow.prefix import META, MOST_NAMED, OLD_SHARD
from ckpttool.formats.tensorflow.reader import training_of
from ckpttool.formats.tensorflow.values import SlicedValues, TensorSlice, require_tiling
from ckpttool.report import Finding, error
from ckpttool.tensor import Extent, Span, Tensor
from ckpttool.wire.protobuf import BYTES, VARINT, fields, varint
from ckpttool.wire.readable import reader_from
from ckpttool.wire.source import Buffer, Source
from ckpttool.wire.sstable import Table

MAX_VARINTS = 1 << 26
"""Bytes of integers of one tensor, which are decoded one by one."""

_META, _DATA = 1, 2  # fields of SavedTensorSlices

# The field of TensorProto that holds the elements of a type, and the bytes of a number in it; 0 for a varint.
_FLOATS = {"float32": (5, 4), "float64": (6, 8), "complex64": (9, 4), "complex128": (12, 8)}
_VARINTS = {"int64": 10, "bool": 11, "float16": 13, "uint32": 16, "uint64": 17}
_SMALL = 7


class _Told(NamedTuple):
    """What the first entries of all tables say of a tensor; ``tables`` has the one of each slice."""

    name: str
    key: bytes
    dtype: DType
    shape: tuple[int, ...]
    slices: tuple[Slice, ...]
    tables: tuple[Table, ...]


class Stored(NamedTuple):
    """The elements of a tensor in its tables; decoded when they are read."""

    told: _Told
    parts: tuple[TensorSlice, ...]

    def blocks(self, limit: int) -> Iterator[memoryview]:
        sources = tuple(
            Buffer(table.path, self._decoded(part, one, table))
            for part, one, table in zip(self.parts, self.told.slices, self.told.tables, strict=True)
        )
        return SlicedValues(self.told.shape, self.told.dtype.itemsize, self.parts, sources).blocks(limit)

    def once(self) -> Stored:
        return self

    def _decoded(self, part: TensorSlice, one: Slice, table: Table) -> bytes:
        name, dtype = self.told.name, self.told.dtype
        found = table.find(slice_key(self.told.key, one))
        if found is None:
            raise _damaged(table.path, name, "a slice that isn't there")
        for field in fields(found[1], table.path, name):
            if field.number == _DATA:
                for inner in fields(field.data, table.path, name):
                    if inner.number == 3:
                        data = _elements(table.path, name, dtype, inner.data)
                        if len(data) != part.entry.nbytes:
                            raise _damaged(table.path, name, f"{len(data):,} bytes of elements")
                        return data
        raise _damaged(table.path, name, "a slice without elements")


def _damaged(path: str, where: str, found: str) -> DamagedCheckpoint:
    return DamagedCheckpoint(path, found, where=where, code="bundle-entry")


def _elements(path: str, name: str, dtype: DType, message: memoryview) -> bytes:
    """Return the elements of a TensorProto as little-endian bytes."""
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


def _told_tensors(table: Table) -> Iterator[_Told]:
    """Yield what the first entry of a table says of all tensors in it."""
    path = table.path
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
                    yield _told_tensor(table, inner.data)


def _told_tensor(table: Table, message: memoryview) -> _Told:
    path, key, number, slices = table.path, b"", 0, []
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
    dtype = read_dtype(path, name, number)
    return _Told(name, key, dtype, shape, tuple(slices), (table,) * len(slices))


def _joined(tables: Sequence[Table]) -> list[_Told]:
    """Return what all tables say, with the slices of each tensor together; in the order of the names."""
    found: dict[bytes, _Told] = {}
    for told in (told for table in tables for told in _told_tensors(table)):
        known = found.setdefault(told.key, told)
        if known is told:
            continue
        if (known.dtype, known.shape) != (told.dtype, told.shape):
            other = f"{told.dtype} {list(told.shape)}, and {known.dtype} {list(known.shape)} in another shard"
            raise _damaged(told.tables[0].path if told.tables else tables[0].path, told.name, other)
        slices, places = (*known.slices, *told.slices), (*known.tables, *told.tables)
        require_few(tables[0].path, told.name, len(slices))
        found[told.key] = known._replace(slices=slices, tables=places)
    return [found[key] for key in sorted(found)] if len(tables) > 1 else list(found.values())


def _parts(path: str, told: _Told, is_whole: bool) -> tuple[TensorSlice, ...]:
    """Return the slices of a tensor, which cover it; none where some lie in a shard that is missing."""
    whole = BundleEntry(told.key, told.dtype, told.shape, 0, 0, 0, 0)
    parts = []
    for one in told.slices:
        axes = list(zip(one, told.shape, strict=False))
        lengths = tuple(axis if length is None else length for (_, length), axis in axes)
        nbytes = told.dtype.nbytes(math.prod(lengths)) if min(lengths, default=0) >= 0 else 0
        entry = BundleEntry(told.key, told.dtype, lengths, 0, 0, nbytes, 0)
        parts.append(TensorSlice(tuple(start for (start, _), _ in axes), lengths, entry))
    if not parts:
        raise _damaged(path, told.name, "a tensor without slices")
    if not is_whole and sum(math.prod(part.lengths) for part in parts) != math.prod(told.shape):
        return ()
    require_tiling(path, whole, parts)
    return tuple(parts)


def open_old(path: str, files: Sequence[str]) -> Checkpoint:
    """Return the checkpoint that tables make.

    Args:
        path: What TensorFlow calls it.
        files: The tables: one, or the shards that there are."""
    with ExitStack() as opened:
        sources = [opened.enter_context(Source(file)) for file in files]
        findings = tuple(_missing(path, files))
        tables = {Table(source): source for source in sources}
        told = _joined(list(tables))
        tensors = tuple(_tensor(path, one, not findings) for one in told)
        name = os.path.basename(path)
        sharded = OLD_SHARD.fullmatch(name)
        return Checkpoint(
            path=path,
            format="tensorflow",
            variant="v1",
            tensors=tensors,
            files=(*(FileEntry(source.path, source.size) for source in sources), *_graph(path)),
            spans=lambda: (span for table, source in tables.items() for span in _spans(source, table, told)),
            training=lambda: training_of(tensors, sharded["prefix"] if sharded else name),
            native=lambda: native_of({one.name: one.key for one in told}, None),
            producer=Producer("tensorflow"),
            findings=findings,
            complete=not findings,
            close=opened.pop_all().close,
        )
    raise AssertionError  # what was opened swallows no error


def _graph(path: str) -> Iterator[FileEntry]:
    """Yield the file of the graph, which lies beside and is removed with the checkpoint."""
    sharded = OLD_SHARD.fullmatch(path)
    place = (sharded["prefix"] if sharded else path) + META
    if os.path.isfile(place):
        yield file_entry(place)


def _tensor(path: str, told: _Told, is_whole: bool) -> Tensor:
    parts = _parts(path, told, is_whole)
    for one, table in zip(told.slices, told.tables, strict=True):
        if table.block_of(slice_key(told.key, one)) is None:
            raise _damaged(table.path, told.name, "a slice that isn't there")
    role = role_of_key(told.name, told.dtype, told.shape, {})
    values = Stored(told, parts) if told.dtype.kind != "string" and parts else None
    return Tensor((told.name,), told.dtype, told.shape, role, values)


def _spans(source: Source, table: Table, told: list[_Told]) -> Iterator[Span]:
    """Yield the blocks, each with the byte that its checksum stands for, too."""
    names: dict[int, list[str]] = defaultdict(list)
    for one in told:
        for part, place in zip(one.slices, one.tables, strict=True):
            number = table.block_of(slice_key(one.key, part)) if place is table else None
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


def _missing(path: str, files: Sequence[str]) -> Iterator[Finding]:
    """Yield an error for each shard that isn't there; of very many only how many they are."""
    match = OLD_SHARD.fullmatch(os.path.basename(path))
    if match is None:
        return
    there, shards = set(map(os.path.basename, files)), int(match["shards"])
    names = (f"{match['prefix']}-{at:05d}-of-{shards:05d}" for at in range(shards))
    missing = [name for name in names if name not in there]
    for name in missing[:MOST_NAMED]:
        yield error("shard-missing", "there is no such file", name)
    if len(missing) > MOST_NAMED:
        yield error("shard-missing", f"{len(missing):,} of {shards:,} shards")
    for name in sorted(there - {f"{match['prefix']}-{at:05d}-of-{shards:05d}" for at in range(shards)}):
        yield error("shard-extra", f"a shard that {shards:,} shards don't have", name)
