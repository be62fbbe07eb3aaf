"""Reader of TensorFlow checkpoints of version 1: tables that hold index and elements.

A checkpoint is one table, or one for each device, ``<name>-00000-of-00002``. The entry under the empty key
lists the tensors with type, shape and slices; each slice has an entry under its ``slice_key``, a TensorProto
with the elements. A table lists what it has itself; a partitioned variable may have slices in several
tables.

Elements are stored as repeated numbers, not as bytes: they are decoded when they are read, and the only
checksums are those of the table's blocks.

Source: tensorflow/tensorflow ``core/util/saved_tensor_slice.proto``, ``core/framework/tensor.proto``.
"""

from __future__ import annotations

import math
import os
from array import array
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

from ckpttool.containers.protobuf import BYTES, VARINT, fields, varint
from ckpttool.containers.table import Table
from ckpttool.core.checkpoint import Checkpoint, FileEntry, Producer
from ckpttool.core.dtypes import DType
from ckpttool.core.errors import DamagedCheckpoint, LimitExceeded, require_at_most
from ckpttool.core.readable import Buffer, reader_from
from ckpttool.core.report import Finding, error
from ckpttool.core.tensor import Extent, Span, Tensor
from ckpttool.core.values import Computed
from ckpttool.formats.opening import file_entry
from ckpttool.formats.tensorflow.bundle import (
    BundleEntry,
    Slice,
    bundle_damage,
    read_dtype,
    read_shape,
    read_slice,
    require_slice_limit,
    slice_key,
)
from ckpttool.formats.tensorflow.native import native_of
from ckpttool.formats.tensorflow.object_graph import role_of_key
from ckpttool.formats.tensorflow.prefix import MAX_NAMED, META, V1_SHARD
from ckpttool.formats.tensorflow.reader import training_of
from ckpttool.formats.tensorflow.values import TensorSlice, require_tiling, slice_box, sliced_values
from ckpttool.storage import fs
from ckpttool.storage.source import Source

MAX_VARINTS = 1 << 26
"""Limit on bytes that are decoded number by number: elements of a tensor, or a table's list of tensors."""

_META, _DATA = 1, 2  # fields of SavedTensorSlices

# Fields of TensorProto that hold the elements, by type: floats as fixed-size numbers of that many bytes,
# integers as varints. Small integers share ``int_val``; half_val has the 16 bits of a float16.
_FLOATS = {"float32": (5, 4), "float64": (6, 8), "complex64": (9, 4), "complex128": (12, 8)}
_VARINTS = {"int64": 10, "bool": 11, "float16": 13, "uint32": 16, "uint64": 17}
_SMALL = 7


class _ListedTensor(NamedTuple):
    """Tensor in the lists of all tables, with its slices and the table of each slice."""

    name: str
    key: bytes
    dtype: DType
    shape: tuple[int, ...]
    slices: tuple[Slice, ...]
    tables: tuple[Table, ...]


def _decoded_blocks(
    listed: _ListedTensor, whole: BundleEntry, parts: Sequence[TensorSlice], limit: int
) -> Iterator[memoryview]:
    """Yield the elements of a tensor; all slices are decoded when the first block is read."""
    # Elements of version 1 are fields of a TensorProto, integers even varints, in a block that may be
    # compressed. They can't be read in place, so decoding waits until the values are needed.
    sources = [
        Buffer(table.path, _decode(listed, part, key, table))
        for part, key, table in zip(parts, listed.slices, listed.tables, strict=True)
    ]
    return sliced_values(whole, parts, sources).blocks(limit)


def _decode(listed: _ListedTensor, part: TensorSlice, key: Slice, table: Table) -> bytes:
    name, dtype = listed.name, listed.dtype
    stored = table.find(slice_key(listed.key, key))
    if stored is None:
        raise bundle_damage(table.path, name, "a slice without data")
    for field in fields(stored[1], table.path, name):
        if field.number == _DATA:
            for inner in fields(field.data, table.path, name):
                if inner.number == 3:
                    data = _elements(table.path, name, dtype, inner.data)
                    if len(data) != part.entry.nbytes:
                        raise bundle_damage(table.path, name, f"{len(data):,} bytes of elements")
                    return data
    raise bundle_damage(table.path, name, "a slice without elements")


def _elements(path: str, name: str, dtype: DType, message: memoryview) -> bytes:
    """Decode a TensorProto; return its elements as little-endian bytes."""
    number = _FLOATS[dtype.name][0] if dtype.name in _FLOATS else _VARINTS.get(dtype.name, _SMALL)
    values = (field for field in fields(message, path, name) if field.number == number)
    if dtype.name in _FLOATS:
        width, data = _FLOATS[dtype.name][1], bytearray()
        for field in values:
            data += field.data if field.kind == BYTES else field.integer.to_bytes(width, "little")
        return bytes(data)
    numbers = array("Q")
    if len(message) > MAX_VARINTS:
        raise LimitExceeded(path, "too many integers", expected=f"at most {MAX_VARINTS:,} bytes", where=name)
    try:
        for field in values:
            if field.kind == VARINT:
                numbers.append(field.integer)
                continue
            packed, at = bytes(field.data), 0
            while at < len(packed):
                integer, at = varint(packed, at)
                numbers.append(integer)
    except ValueError as failure:
        raise bundle_damage(path, name, str(failure)) from failure
    import numpy as np

    # A negative number is a varint of 64 bits in two's complement; its low bits are the element.
    words: np.ndarray[Any, Any] = np.array(numbers, "u8").astype(f"<u{dtype.itemsize}")
    return words.tobytes()


def _listed_tensors(table: Table) -> Iterator[_ListedTensor]:
    """Yield the tensors in a table's first entry."""
    path = table.path
    key, value = next(table.block(0), (None, b"")) if table.blocks else (None, b"")
    if key != b"":
        raise DamagedCheckpoint(path, "a table without a header", where="header", code="bundle-header")
    for field in fields(value, path, "header"):
        # Field 1 is a message here; in a bundle's header it is the number of shards.
        if field.number == _META and field.kind != BYTES:
            found, expected = "the index of a checkpoint under another name", "a name ending in .index"
            raise DamagedCheckpoint(path, found, expected=expected, code="bundle-header")
        require_at_most(path, MAX_VARINTS, len(value), "a list of tensors of {:,} bytes", "header")
        if field.number == _META:
            for inner in fields(field.data, path, "header"):
                if inner.number == 1:
                    yield _read_listed(table, inner.data)


def _read_listed(table: Table, message: memoryview) -> _ListedTensor:
    path, key, number, slices = table.path, b"", 0, []
    shape: tuple[int, ...] = ()
    # Fields may come in any order. The name is read first, since errors about the others state it.
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
            require_slice_limit(path, name, len(slices))
    dtype = read_dtype(path, name, number)
    return _ListedTensor(name, key, dtype, shape, tuple(slices), (table,) * len(slices))


def _join_tables(tables: Sequence[Table]) -> list[_ListedTensor]:
    """Return the tensors of all tables, each with the slices of all tables, sorted by key."""
    by_key: dict[bytes, _ListedTensor] = {}
    for listed in (listed for table in tables for listed in _listed_tensors(table)):
        known = by_key.setdefault(listed.key, listed)
        if known is listed:
            continue
        if (known.dtype, known.shape) != (listed.dtype, listed.shape):
            path = (*listed.tables, *tables)[0].path
            other = f"{known.dtype} {list(known.shape)} in another shard"
            raise bundle_damage(path, listed.name, f"{listed.dtype} {list(listed.shape)}, but {other}")
        slices, holders = (*known.slices, *listed.slices), (*known.tables, *listed.tables)
        require_slice_limit(tables[0].path, listed.name, len(slices))
        by_key[listed.key] = known._replace(slices=slices, tables=holders)
    return [by_key[key] for key in sorted(by_key)] if len(tables) > 1 else list(by_key.values())


def _whole(listed: _ListedTensor) -> BundleEntry:
    return BundleEntry(listed.key, listed.dtype, listed.shape, 0, 0, 0, 0)


def _slices_of(path: str, listed: _ListedTensor, *, is_complete: bool) -> tuple[TensorSlice, ...]:
    """Return the slices of a tensor, checked to cover it; none if the missing shards have some of them."""
    parts = []
    for part in listed.slices:
        box = slice_box(part, listed.shape)
        nbytes = listed.dtype.nbytes(box.size) if min(box.lengths, default=0) >= 0 else 0
        entry = BundleEntry(listed.key, listed.dtype, box.lengths, 0, 0, nbytes, 0)
        parts.append(TensorSlice(box, entry))
    if not parts:
        raise bundle_damage(path, listed.name, "a tensor without slices")
    if not is_complete and sum(part.box.size for part in parts) != math.prod(listed.shape):
        return ()
    require_tiling(path, _whole(listed), parts)
    return tuple(parts)


def open_v1(path: str, files: Sequence[str]) -> Checkpoint:
    """Return the checkpoint in version 1 tables.

    Args:
        path: TensorFlow's path of the checkpoint; ``<name>-?????-of-00002`` if it has shards.
        files: The existing tables: one, or shards.
    """
    with ExitStack() as opened:
        sources = [opened.enter_context(fs.open_source(file)) for file in files]
        findings = tuple(_missing_shards(path, files))
        tables = {Table(source): source for source in sources}
        listed = _join_tables(list(tables))
        tensors = []
        for entry in listed:
            parts = _slices_of(path, entry, is_complete=not findings)
            for part, table in zip(entry.slices, entry.tables, strict=True):
                if table.block_of(slice_key(entry.key, part)) is None:
                    raise bundle_damage(table.path, entry.name, "a slice without data")
            role = role_of_key(entry.name, entry.dtype, entry.shape, {})
            values = None
            if entry.dtype.kind != "string" and parts:
                values = Computed(partial(_decoded_blocks, entry, _whole(entry), parts))
            tensors.append(Tensor((entry.name,), entry.dtype, entry.shape, role, values))
        name = os.path.basename(path)
        sharded = V1_SHARD.fullmatch(name)
        # The ``.meta`` file belongs to the checkpoint: it is removed and moved with it.
        whole = V1_SHARD.fullmatch(path)
        meta = (whole["prefix"] if whole else path) + META
        metas = [file_entry(meta)] if fs.isfile(meta) else []
        return Checkpoint(
            path=path,
            format="tensorflow",
            variant="v1",
            tensors=tuple(tensors),
            files=(*(FileEntry(source.path, source.size) for source in sources), *metas),
            spans=lambda: (
                span for table, source in tables.items() for span in _spans(source, table, listed)
            ),
            training=lambda: training_of(tensors, sharded["prefix"] if sharded else name),
            native=lambda: native_of({entry.name: entry.key for entry in listed}, None),
            producer=Producer("tensorflow"),
            findings=findings,
            complete=not findings,
            close=opened.pop_all().close,
        )
    raise AssertionError  # what was opened swallows no error


def _spans(source: Source, table: Table, listed: list[_ListedTensor]) -> Iterator[Span]:
    """Yield the blocks of a table; a block's checksum also covers the byte after it, its compression."""
    names: dict[int, list[str]] = defaultdict(list)
    for entry in listed:
        for part, holder in zip(entry.slices, entry.tables, strict=True):
            number = table.block_of(slice_key(entry.key, part)) if holder is table else None
            if number is not None and entry.name not in names[number]:
                names[number].append(entry.name)
    for number, (_, handle) in enumerate(table.blocks):
        held = names[number]
        where = f"block {number}"
        if held:
            where = held[0] if len(held) == 1 else f"{where}: {held[0]} and {len(held) - 1} more"
        extent = Extent(source.path, handle.offset, handle.nbytes + 1)
        read, checksum = reader_from(source, handle.offset), table.stored_checksum(handle)
        yield Span(extent, where, read, checksum, algorithm="crc32c")


def _missing_shards(path: str, files: Sequence[str]) -> Iterator[Finding]:
    """Yield errors about missing and extra shards; beyond ``MAX_NAMED``, missing ones are counted."""
    match = V1_SHARD.fullmatch(os.path.basename(path))
    if match is None:
        return
    there, shards = set(map(os.path.basename, files)), int(match["shards"])
    names = (f"{match['prefix']}-{at:05d}-of-{shards:05d}" for at in range(shards))
    missing = [name for name in names if name not in there]
    for name in missing[:MAX_NAMED]:
        yield error("shard-missing", "no such file", name)
    if len(missing) > MAX_NAMED:
        yield error("shard-missing", f"{len(missing):,} of {shards:,} shards")
    for name in sorted(there - {f"{match['prefix']}-{at:05d}-of-{shards:05d}" for at in range(shards)}):
        yield error("shard-extra", f"a shard beyond the {shards:,} of the set", name)
