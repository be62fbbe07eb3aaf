"""The ``.metadata`` of a distributed checkpoint: tensors, their chunks, and the chunks' places in files.

It is the pickle of a ``Metadata`` dataclass, which is read as inert nodes. Names (``fqn``) are the keys of
the nested state dict joined by dots:

- ``state_dict_metadata``: by name, the type, shape and chunks (offsets and sizes) of a tensor, or a mark that
  it is another object.
- ``planner_data``: by name, the path in the state dict as a tuple of keys.
- ``storage_data``: by name and offsets, the file, offset and length of each item.

Source: PyTorch ``torch/distributed/checkpoint/metadata.py``, ``filesystem.py``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ckpttool.containers.pickle.pickle_nodes import Call, Global
from ckpttool.containers.pickle.pickle_safety import attach_safety, read_pickles
from ckpttool.core.dtypes import DType
from ckpttool.core.errors import DamagedCheckpoint, LimitExceeded
from ckpttool.core.report import Finding, error
from ckpttool.core.tensor import Extent, Path
from ckpttool.formats.content.boxes import Box
from ckpttool.formats.content.plain_data import describe
from ckpttool.formats.torch.objects import MAX_AXES
from ckpttool.formats.torch.types import COMPONENTS, sizes, torch_dtype
from ckpttool.storage import fs

MAX_ITEMS = 1_000_000
"""Limit on the items of a checkpoint."""

_MODULE = "torch.distributed.checkpoint.metadata"
_OLD_MODULE = "torch.distributed._shard.sharded_tensor.metadata"  # of properties, until PyTorch 2.2
_PROPERTIES = ((_MODULE, "TensorProperties"), (_OLD_MODULE, "TensorProperties"))
_ENCODINGS = ((_MODULE, "_MEM_FORMAT_ENCODING"), (_OLD_MODULE, "MEM_FORMAT_ENCODING"))
_MAX_NAMED = 10
"""Number of names with a finding of one kind; the rest is left out."""
_PLACE = ("torch.distributed.checkpoint.filesystem", "_StorageInfo")
_LAYOUTS = frozenset(
    {"torch.strided", "torch.jagged", "torch._mkldnn", *(f"torch.{name}" for name in COMPONENTS)}
)
_MEMORY_FORMATS = ("TORCH_CONTIGUOUS_FORMAT", "TORCH_CHANNELS_LAST", "TORCH_PRESERVE_FORMAT")  # 0, 1, 2
_MEGATRON_FIELD = "mcore_data"
_MAX_INT64 = (1 << 63) - 1
_MAX_KEYS = 100  # of a path that planner_data gives


Key = tuple[str, tuple[int, ...] | None]


@dataclass(slots=True)
class MetadataEntry:
    """Entry of ``state_dict_metadata``: a tensor in chunks, or another object if ``dtype`` is None."""

    path: Path
    dtype: DType | None = None
    shape: tuple[int, ...] = ()
    chunks: list[Box] = field(default_factory=list)


@dataclass(slots=True)
class Metadata:
    """The content of one or several ``.metadata`` files.

    Attributes:
        entries: By name.
        places: Places of each item, by name and offsets of its chunk (None for other objects). There are
            several if each rank wrote metadata of its own, and a copy of a tensor that isn't sharded.
        transformed: Transforms of items' bytes, such as ``stream.zstd``, by name and offsets.
        is_megatron: Whether the field ``mcore_data`` shows that Megatron wrote them.
    """

    entries: dict[str, MetadataEntry] = field(default_factory=dict)
    places: dict[Key, list[Extent]] = field(default_factory=dict)
    transformed: dict[Key, str] = field(default_factory=dict)
    is_megatron: bool = False
    findings: list[Finding] = field(default_factory=list)
    safety: list[Finding] = field(default_factory=list)

    def add(self, path: str, name: str) -> Mapping[str, Any]:
        """Read one file, and return its fields as inert nodes."""
        with fs.open_source(path) as source:
            judged = read_pickles(source, 0, source.size)
            with attach_safety(judged.safety):
                fields = _MetadataReader(self, path, name).run(judged.pickles[0].root)
        self.safety += (finding._replace(where=name) for finding in judged.safety)
        if judged.trailing or len(judged.pickles) > 1:
            self.findings.append(error("pickle-trailing", "data after the pickle's STOP", name))
        return fields


class _MetadataReader:
    """Reads one ``.metadata`` into the metadata of all files."""

    def __init__(self, metadata: Metadata, path: str, name: str) -> None:
        self._metadata, self._path, self._name = metadata, path, name
        self._paths: Mapping[Any, Any] = {}
        self._place_of: dict[Key, Extent] = {}

    def run(self, root: object) -> Mapping[str, Any]:
        if not isinstance(root, Call) or not root.is_of(_MODULE, "Metadata"):
            raise self._damage(
                f"it holds {describe(root)!s:.100}", "metadata-malformed", f"a {_MODULE}.Metadata"
            )
        try:
            fields = _fields(root, (_MODULE, "Metadata"))
            self._add_fields(fields)
        except (TypeError, KeyError, ValueError, AttributeError) as failure:
            raise self._damage(f"it can't be read: {failure}", "metadata-malformed") from failure
        return fields

    def _add_fields(self, fields: Mapping[str, Any]) -> None:
        entries, places = _mapping(fields["state_dict_metadata"]), _mapping(fields["storage_data"])
        if len(entries) > MAX_ITEMS or len(places) > MAX_ITEMS:
            found = f"{max(len(entries), len(places)):,} items"
            raise LimitExceeded(self._path, found, expected=f"at most {MAX_ITEMS:,}")
        self._metadata.is_megatron |= _MEGATRON_FIELD in fields
        paths, storage_meta = fields["planner_data"], fields.get("storage_meta")
        if storage_meta is not None:
            _fields(storage_meta, (_MODULE, "StorageMeta"))
        self._paths = paths if isinstance(paths, dict) else {}  # a user's planner may store anything
        for fqn, node in entries.items():
            self._add_entry(_text(fqn), node)
        for index, info in places.items():
            self._add_place(_fields(index, (_MODULE, "MetadataIndex")), _fields(info, _PLACE))
        self._metadata.findings += self._compare_names(entries)
        self._metadata.findings += self._compare_places()

    def _add_entry(self, fqn: str, node: object) -> None:
        entries = self._metadata.entries
        if isinstance(node, Call) and node.is_of(_MODULE, "BytesStorageMetadata"):
            entries.setdefault(fqn, MetadataEntry(self._path_of(fqn)))
            return
        fields = _fields(node, (_MODULE, "TensorStorageMetadata"))
        dtype, shape = _element_type(fields["properties"]), self._numbers(fields["size"])
        entry = entries.setdefault(fqn, MetadataEntry(self._path_of(fqn), dtype, shape))
        # Ranks that save without collectives write metadata of their own (``__<rank>.metadata``). Each
        # describes the whole tensor with the chunks of that rank, so chunks are collected over all files, and
        # replicas count once.
        if (entry.dtype, entry.shape) != (dtype, shape):
            raise self._damage("its type or shape differs from another rank's", "metadata-disagrees", fqn=fqn)
        if math.prod(shape) * dtype.bits > _MAX_INT64:
            raise self._damage(f"a tensor of shape {list(shape)}", "shape-overflow", fqn=fqn)
        known = set(entry.chunks)
        for chunk_node in fields["chunks"]:
            sides = _fields(chunk_node, (_MODULE, "ChunkStorageMetadata"))
            chunk = Box(self._numbers(sides["offsets"]), self._numbers(sides["sizes"]))
            if len(chunk.offsets) != len(shape) or len(chunk.lengths) != len(shape):
                raise self._damage("a chunk with another number of axes", "chunks-wrong", fqn=fqn)
            if chunk not in known:
                known.add(chunk)
                entry.chunks.append(chunk)

    def _add_place(self, index: Mapping[str, Any], info: Mapping[str, Any]) -> None:
        fqn, offset = _text(index["fqn"]), index.get("offset")
        key = (fqn, None if offset is None else self._numbers(offset))
        file, start, nbytes = _text(info["relative_path"]), info["offset"], info["length"]
        transforms = info.get("transform_descriptors")
        if transforms:
            names = transforms if isinstance(transforms, list | tuple) else [transforms]
            self._metadata.transformed[key] = ", ".join(f"{describe(name)!s:.60}" for name in names[:4])
        # PyTorch removes duplicates before it writes: a replicated chunk is in the file of one rank only. Two
        # different places for one chunk contradict each other.
        place = Extent(file, *self._numbers((start, nbytes)))
        self._metadata.places.setdefault(key, []).append(place)
        if self._place_of.setdefault(key, place) != place:
            message = "a chunk has two places"
            self._metadata.findings.append(error("chunk-twice", message, fqn))

    def _compare_names(self, entries: Mapping[str, Any]) -> Iterator[Finding]:
        """Yield an error for each name that isn't its path in ``planner_data``, joined by dots.

        A planner that doesn't flatten has no paths.
        """
        for fqn in entries:
            keys = self._paths.get(fqn, (fqn,))
            if not isinstance(keys, list | tuple) or ".".join(map(str, keys)) != fqn:
                message = f"{self._name}: planner_data gives it the path {describe(keys)!s:.100}"
                yield error("metadata-disagrees", message, fqn)
        nameless = [fqn for fqn in entries if fqn not in self._paths]
        others = [name for name in self._paths if name not in entries]
        if not (nameless and others):  # a user's planner may keep fewer paths, or more
            return
        for fqn in nameless[:_MAX_NAMED]:
            yield error("metadata-disagrees", f"{self._name}: no entry in planner_data", fqn)
        for name in others[:_MAX_NAMED]:
            message = f"planner_data names {describe(name)!s:.100}, which is not in state_dict_metadata"
            yield error("metadata-disagrees", f"{self._name}: {message}")

    def _compare_places(self) -> Iterator[Finding]:
        """Yield an error for each item in ``storage_data`` that ``state_dict_metadata`` doesn't describe."""
        entries = self._metadata.entries
        described: set[Key] = {(fqn, None) for fqn, entry in entries.items() if entry.dtype is None}
        described |= {(fqn, chunk.offsets) for fqn, entry in entries.items() for chunk in entry.chunks}
        for fqn, offsets in self._place_of:
            if (fqn, offsets) not in described:
                what = "an item" if offsets is None else f"a chunk at {list(offsets)}"
                message = f"{self._name}: {what} in storage_data, but not in state_dict_metadata"
                yield error("metadata-disagrees", message, fqn)

    def _path_of(self, fqn: str) -> Path:
        keys = self._paths.get(fqn)
        if not isinstance(keys, list | tuple) or not 0 < len(keys) <= _MAX_KEYS:
            return (fqn,)
        return tuple(key if type(key) in (int, str) else str(describe(key)) for key in keys)

    def _numbers(self, node: object) -> tuple[int, ...]:
        numbers = sizes(node)
        if len(numbers) > MAX_AXES or not all(type(n) is int and 0 <= n <= _MAX_INT64 for n in numbers):
            raise self._damage(f"numbers like {[describe(n) for n in numbers[:4]]}", "metadata-malformed")
        return numbers

    def _damage(
        self, found: str, code: str, expected: str | None = None, fqn: str | None = None
    ) -> DamagedCheckpoint:
        where = self._name if fqn is None else f"{self._name}: {fqn}"
        return DamagedCheckpoint(self._path, found, expected=expected, where=where, code=code)


def _fields(node: object, *kinds: tuple[str, str]) -> Mapping[str, Any]:
    """Return the fields of a dataclass of one of these kinds."""
    state = _state(node, *kinds)
    if not isinstance(state, dict) or not all(type(key) is str for key in state):
        raise TypeError(f"{describe(node)!s:.60} without fields, or with an unnamed one")
    return state


def _state(node: object, *kinds: tuple[str, str]) -> Any:
    if not isinstance(node, Call) or not any(node.is_of(*kind) for kind in kinds):
        raise TypeError(f"{describe(node)!s:.60} where a {kinds[0][1]} should be")
    return node.state


def _element_type(node: object) -> DType:
    """Return the element type in a ``TensorProperties``; the other properties are checked."""
    state = _state(node, *_PROPERTIES)
    if not isinstance(state, tuple) or len(state) != 5:
        raise TypeError(f"{describe(state)!s:.60} where five properties of a tensor should be")
    # Unlike those of the other classes, this state is a tuple, and the place of each property in it is fixed.
    # All are checked: a shifted or replaced property would otherwise give a wrong type in silence.
    dtype, layout, requires_grad, encoding, pinned = state
    is_layout = isinstance(layout, Call) and layout.is_of("torch.serialization", "_get_layout")
    if not is_layout or len(layout.args) != 1 or layout.args[0] not in _LAYOUTS:
        raise ValueError(f"{describe(layout)!s:.60} is not a layout")
    if not _is_memory_format(encoding):
        raise ValueError(f"{describe(encoding)!s:.60} is not a memory format")
    if type(requires_grad) is not bool or type(pinned) is not bool:
        raise ValueError("requires_grad or pin_memory is not a boolean")
    return torch_dtype(dtype)


def _is_memory_format(node: object) -> bool:
    match node:
        case Call(function=Global(module="builtins", name="getattr"), args=(Global() as enum, name)):
            return (
                enum.module,
                enum.name,
            ) in _ENCODINGS and name in _MEMORY_FORMATS  # Python 3.11.0 to 3.11.3
        case Call(function=Global() as enum, args=(int(value),)):
            return (enum.module, enum.name) in _ENCODINGS and value in range(len(_MEMORY_FORMATS))
    return False


def _mapping(node: object) -> Mapping[Any, Any]:
    if not isinstance(node, dict):
        raise TypeError(f"{describe(node)!s:.60} where a dictionary should be")
    return node


def _text(node: object) -> str:
    if not isinstance(node, str):
        raise TypeError(f"{describe(node)!s:.60} where a name should be")
    return node


def tree_of(values: list[tuple[Path, object]]) -> dict[str, object]:
    """Return values in nested dictionaries by their paths; those with keys 0 to n become lists."""
    root: dict[Any, Any] = {}
    for path, value in values:
        level = root
        for key in path[:-1]:
            inner = level.setdefault(key, {})
            level = inner if isinstance(inner, dict) else level
        level.setdefault(path[-1], value)
    return {str(key): _with_lists(value) for key, value in root.items()}


def _with_lists(tree: object) -> object:
    if not isinstance(tree, dict):
        return tree
    values = {key: _with_lists(value) for key, value in tree.items()}
    if values and list(values) == list(range(len(values))):
        return list(values.values())
    return {str(key): value for key, value in values.items()}
