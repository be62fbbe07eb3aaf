"""Writes safetensors, byte for byte as the library does: one file, or shards as Hugging Face cuts them.

Source: huggingface/safetensors ``safetensors/src/tensor.rs``, ``prepare``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, TypeGuard

from ckpttool.core.checkpoint import TrainingState
from ckpttool.core.dtypes import BY_SAFETENSORS
from ckpttool.core.tensor import Tensor
from ckpttool.core.training import depends_only_on
from ckpttool.formats.safetensors.reader import MAX_HEADER
from ckpttool.formats.sharded import ShardFiles, shard_index, shard_names, shard_refusals, split_into_shards
from ckpttool.formats.sidecar import ENTRY, sidecar_of
from ckpttool.formats.writer import Content, Target, WriteOptions, Writer
from ckpttool.storage.sink import Sink

_METADATA = "__metadata__"
_INDEX = "model.safetensors.index.json"
_SURROGATE = re.compile("[\ud800-\udfff]")
_ORDER = (
    "U64",
    "I64",
    "F64",
    "C64",
    "F32",
    "U32",
    "I32",
    "BF16",
    "F16",
    "U16",
    "I16",
    "F8_E5M2FNUZ",
    "F8_E4M3FNUZ",
    "F8_E8M0",
    "F8_E4M3",
    "F8_E5M2",
    "I8",
    "U8",
    "F6_E3M2",
    "F6_E2M3",
    "F4",
    "BOOL",
)
"""Order of tensors by type: the widest first, so that each tensor is aligned to its element size."""
_RANK = {name: rank for rank, name in enumerate(_ORDER)}
_LIBRARIES = frozenset({"pt", "tf", "flax", "mlx", "np"})
"""Values of ``format`` in the metadata that readers know: the library that names and lays out the tensors."""
_OF_A_SET = frozenset({"total_size", "total_parameters"})
"""Metadata of an index of shards, which a new index states anew."""
_ENTRY_BYTES = 160
"""Bound on the bytes of an entry in the header, without its name and shape."""
_AXIS_BYTES = 21  # digits of a uint64, and a comma
_LENGTH_BYTES, _PADDING = 8, 7
"""Bytes of the length before a header, and the most spaces after it."""


class SafetensorsWriter(Writer):
    """One safetensors file, or a directory of shards."""

    name: ClassVar[str] = "safetensors"
    suffixes: ClassVar[tuple[str, ...]] = (".safetensors",)
    dtypes: ClassVar[frozenset[str]] = frozenset(dtype.name for dtype in BY_SAFETENSORS.values())
    takes_shards: ClassVar[bool] = True

    def refusals(self, content: Content, options: WriteOptions) -> Iterator[str]:
        for tensor in content.tensors:
            name = tensor.name
            if name == _METADATA:
                yield f"{name}: safetensors stores its metadata under this name (use --map)"
            if not _is_text(name):
                yield f"{name}: its name is not valid text (use --map)"
            bits = tensor.size * tensor.dtype.bits
            if bits % 8:
                what = f"{tensor.dtype} {list(tensor.shape)}"
                yield f"{name}: {what} has {bits:,} bits; safetensors holds whole bytes"
        metadata, sidecar = _metadata_and_sidecar(content)
        if options.shard_size is None:
            yield from _header_refusal(content.owned, metadata | sidecar)
            return
        shards = _shards(content, options.shard_size, metadata)
        yield from shard_refusals(shards, sidecar)
        for shard in shards.values():
            yield from _header_refusal(shard, metadata)

    def write(self, content: Content, target: Target, options: WriteOptions) -> None:
        # Each shard has the metadata; the sidecar, which may be large, is in the index alone.
        metadata, sidecar = _metadata_and_sidecar(content)
        if options.shard_size is None:
            _write_file(target.create(), content.owned, metadata | sidecar)
            return
        shards = _shards(content, options.shard_size, metadata)
        files = ShardFiles(target)
        for name, tensors in shards.items():
            _write_file(files.create(name), tensors, metadata)
        files.create(_INDEX).write(shard_index(shards, sidecar))


def _shards(content: Content, limit: int, metadata: Mapping[str, str]) -> dict[str, list[Tensor]]:
    """Return the tensors of each shard by the shard's file name."""
    # The limit is on whole files: ``base`` is their fixed part, ``overhead`` a tensor's entry in the header.
    base = len(_layout((), metadata)[1]) + _LENGTH_BYTES + _PADDING

    def overhead(tensor: Tensor) -> int:
        return len(_json({tensor.name: _entry(tensor, (limit, limit))}))  # its comma for the outer braces

    shards = split_into_shards(content.owned, limit, base=base, overhead=overhead) if content.tensors else []
    return dict(zip(shard_names("model", ".safetensors", len(shards)), shards, strict=True))


def _metadata_and_sidecar(content: Content) -> tuple[dict[str, str], dict[str, str]]:
    """Return the header's metadata, and the sidecar by its key, empty if the metadata is all there is."""

    def make() -> tuple[dict[str, str], dict[str, str]]:
        # ``__metadata__`` maps text to text. If all metadata is, it needs no sidecar; a ``format`` of another
        # source is native only if readers know its value. If anything is left for the sidecar, it has it all.
        metadata = {
            key: value
            for key, value in content.metadata.items()
            if key not in _OF_A_SET or isinstance(value, str)
        }
        was_safetensors = content.source_format == SafetensorsWriter.name
        native = {
            key: value
            for key, value in metadata.items()
            if _is_text(key)
            and _is_text(value)
            and key != ENTRY
            and (was_safetensors or key != "format" or value in _LIBRARIES)
        }
        rest = content
        if native == metadata and (metadata or was_safetensors):
            names = {tensor.name for tensor in content.tensors}
            is_native = was_safetensors and depends_only_on(content.training, names)
            training = TrainingState() if is_native else content.training
            rest = replace(content, metadata={}, training=training)
        sidecar = sidecar_of(rest)
        if sidecar is not None and rest is not content:
            sidecar = sidecar_of(content)
        return {"format": "pt", **native}, {} if sidecar is None else {ENTRY: sidecar.decode()}

    return content.memoized(SafetensorsWriter.name, make)


def _is_text(value: object) -> TypeGuard[str]:
    return isinstance(value, str) and _SURROGATE.search(value) is None


def _header_refusal(tensors: Sequence[Tensor], metadata: Mapping[str, str]) -> Iterator[str]:
    """Yield a sentence if the header would be longer than readers allow."""
    # JSON takes at most 6 bytes for a character (``\u0000``). Only if this bound is above the limit is the
    # header made to be measured.
    most = sum(_ENTRY_BYTES + 6 * len(tensor.name) + _AXIS_BYTES * len(tensor.shape) for tensor in tensors)
    most += sum(6 * (len(key) + len(value) + 2) for key, value in metadata.items())
    if most <= MAX_HEADER:
        return
    _, header = _layout(tensors, metadata)
    if len(header) > MAX_HEADER:
        yield f"the header would have {len(header):,} bytes; safetensors allows {MAX_HEADER:,}"


def _layout(tensors: Iterable[Tensor], metadata: Mapping[str, str]) -> tuple[list[Tensor], bytes]:
    """Return tensors in the order of the file, and the header, padded to a multiple of 8 bytes."""
    # Types with larger elements come first, and the header is padded to a multiple of 8. So each tensor
    # begins at a multiple of its element's size, and can be mapped into memory.
    ordered = sorted(tensors, key=lambda tensor: (_RANK[tensor.dtype.safetensors or ""], tensor.name))
    header: dict[str, object] = {_METADATA: dict(metadata)}
    begin = 0
    for tensor in ordered:
        end = begin + tensor.nbytes
        header[tensor.name] = _entry(tensor, (begin, end))
        begin = end
    text = _json(header)
    return ordered, text + b" " * (-len(text) % 8)


def _entry(tensor: Tensor, offsets: tuple[int, int]) -> dict[str, object]:
    return {"dtype": tensor.dtype.safetensors, "shape": tensor.shape, "data_offsets": offsets}


def _json(header: Mapping[str, object]) -> bytes:
    return json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")


def _write_file(sink: Sink, tensors: Iterable[Tensor], metadata: Mapping[str, str]) -> None:
    ordered, header = _layout(tensors, metadata)
    sink.write(len(header).to_bytes(_LENGTH_BYTES, "little"))
    sink.write(header)
    for tensor in ordered:
        sink.put(tensor)
