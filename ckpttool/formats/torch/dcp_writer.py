"""Writes distributed checkpoints: a whole one, as a single rank does, or an existing one with fewer entries.

A whole one has all items in ``__0_0.distcp``. To remove entries, items are copied byte by byte: each data
file that loses an item is written again under an unused name, and the rest stays as it is. Until the new
``.metadata`` replaces the old one, the directory is the old checkpoint; from then on it is the new one.

Source: PyTorch ``torch/distributed/checkpoint/filesystem.py``, ``default_planner.py``, ``_traverse.py``,
``metadata.py``; CPython ``Lib/pickle.py``.
"""

from __future__ import annotations

import os
import re
import struct
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, ClassVar

from isal import isal_zlib

from ckpttool.containers.pickle.pickle_nodes import NDARRAY, REQUIRES_GRAD, Call, Global
from ckpttool.containers.zip_writer import TorchZip
from ckpttool.core.errors import Unsupported
from ckpttool.core.readable import reader_from
from ckpttool.core.tensor import Extent, Path, Span, Tensor
from ckpttool.formats.content.plain_data import describe
from ckpttool.formats.sidecar import ENTRY, sidecar_of
from ckpttool.formats.torch.dcp import METADATA
from ckpttool.formats.torch.dcp_metadata import Metadata
from ckpttool.formats.torch.writer import ANONYMOUS, WHOLE, name_refusals, write_archive
from ckpttool.formats.writer import Content, Rewritten, Target, Trim, WriteOptions, Writer
from ckpttool.storage import fs
from ckpttool.storage.sink import Sink
from ckpttool.storage.work import Advance

_MODULE = "torch.distributed.checkpoint.metadata"
_METADATA, _INDEX = Global(_MODULE, "Metadata"), Global(_MODULE, "MetadataIndex")
_TENSOR, _BYTES = Global(_MODULE, "TensorStorageMetadata"), Global(_MODULE, "BytesStorageMetadata")
_PROPERTIES, _CHUNK = Global(_MODULE, "TensorProperties"), Global(_MODULE, "ChunkStorageMetadata")
_PLACE = Global("torch.distributed.checkpoint.filesystem", "_StorageInfo")
_SIZE = Global("torch", "Size")
_STRIDED = Call(Global("torch.serialization", "_get_layout"), ("torch.strided",))
_CONTIGUOUS = Call(Global(_MODULE, "_MEM_FORMAT_ENCODING"), (0,))
_VERSION = "1.0.0"
_MEMOIZED = frozenset(
    {_STRIDED, _CONTIGUOUS, "properties", "size", "chunks", "offsets", "sizes", "fqn", "index", "offset"}
    | {"relative_path", "length"}
)
"""Values, besides classes, that are written once and then taken from the pickle's memo."""
_BATCH = 1000
"""Number of dictionary entries per SETITEMS; a reader keeps that many on its stack."""
_SINGLETONS = {None: b"N", True: b"\x88", False: b"\x89"}


@dataclass(frozen=True, slots=True)
class StoredItem:
    """An entry of the state dict, and its place in a data file.

    Attributes:
        fqn: The keys of the path, joined by dots.
        path: Keys in the state dict; integers are indexes of lists.
        tensor: None for another object.
        requires_grad: Whether it is a trained parameter.
        file: Name of the data file.
        offset: Offset in the file, in bytes.
        nbytes: Length in the file, in bytes.
    """

    fqn: str
    path: Path
    tensor: Tensor | None
    requires_grad: bool
    file: str
    offset: int
    nbytes: int


def write_metadata(write: Callable[[bytes], object], stored: Sequence[StoredItem]) -> None:
    """Write the ``.metadata`` of a checkpoint in which each tensor is one chunk."""

    def size(lengths: tuple[int, ...]) -> Call:
        return Call(_SIZE, (lengths,))

    def state_dict_metadata() -> Iterator[tuple[str, object]]:
        for item in stored:
            if item.tensor is None:
                yield item.fqn, _new(_BYTES, {})
                continue
            shape, dtype = item.tensor.shape, Global("torch", item.tensor.dtype.name)
            properties = _new(_PROPERTIES, (dtype, _STRIDED, item.requires_grad, _CONTIGUOUS, False))
            chunk = _new(_CHUNK, {"offsets": size((0,) * len(shape)), "sizes": size(shape)})
            yield item.fqn, _new(_TENSOR, {"properties": properties, "size": size(shape), "chunks": [chunk]})

    def storage_data() -> Iterator[tuple[object, object]]:
        for item in stored:
            index: dict[str, object] = {"fqn": item.fqn, "index": None}
            if item.tensor is not None:
                index |= {"offset": size((0,) * len(item.tensor.shape)), "index": 0}
            place = {"relative_path": item.file, "offset": item.offset, "length": item.nbytes}
            yield _new(_INDEX, index), _new(_PLACE, place)

    fields = {
        "state_dict_metadata": state_dict_metadata(),
        "planner_data": ((item.fqn, item.path) for item in stored),
        "storage_data": storage_data(),
        "storage_meta": None,
        "version": _VERSION,
    }
    write_fields(write, fields)


def write_fields(write: Callable[[bytes], object], fields: Mapping[str, object]) -> None:
    """Write the pickle of a ``Metadata`` with these fields; an iterator yields the entries of a dictionary.

    Raises:
        TypeError: A field holds an object that PyTorch's metadata never holds.
    """
    # Written opcode by opcode, as PyTorch isn't imported. In protocol 2: PROTO, the class, an empty tuple and
    # NEWOBJ make the object; then a dictionary gets each field by a SETITEM, and BUILD sets it as the state.
    pickle = _MetadataPickler(write)
    write(b"\x80\x02")
    pickle.put(_METADATA)
    write(b")\x81}")
    for field, value in fields.items():
        pickle.put(field)
        if isinstance(value, Iterator):
            pickle.put_mapping(value)
        else:
            pickle.put(value)
        write(b"s")
    write(b"b.")


def _new(kind: Global, state: object) -> Call:
    """Return the node of an object made without arguments (NEWOBJ) and then given its state (BUILD)."""
    return Call(kind, (), state=state, is_new=True)


class _MetadataPickler:
    """Writes values as opcodes of pickle protocol 2; shared values are memoized (BINPUT, BINGET)."""

    def __init__(self, write: Callable[[bytes], object]) -> None:
        self._write = write
        self._memo: dict[object, int] = {}

    def put(self, value: object) -> None:
        """Write the opcodes that push a value on the reader's stack."""
        is_shared = isinstance(value, Global) or (isinstance(value, str | Call) and value in _MEMOIZED)
        known = self._memo.get(value) if is_shared else None
        if known is not None:
            self._write(b"h" + bytes([known]))
            return
        self._write_opcodes(value)
        if is_shared:
            self._memo[value] = len(self._memo)
            self._write(b"q" + bytes([self._memo[value]]))

    def _write_opcodes(self, value: object) -> None:
        if value is None or isinstance(value, bool):
            self._write(_SINGLETONS[value])
        elif isinstance(value, int):
            self._write_integer(value)
        elif isinstance(value, float):
            self._write(b"G" + struct.pack(">d", value))
        elif isinstance(value, str):
            text = value.encode("utf-8", "surrogatepass")
            self._write(b"X" + struct.pack("<I", len(text)) + text)
        elif isinstance(value, Global):
            self._write(f"c{value.module}\n{value.name}\n".encode())
        elif isinstance(value, dict):
            self.put_mapping(value.items())
        elif isinstance(value, tuple | list):
            self._write(b"(" if isinstance(value, tuple) else b"](")
            for item in value:
                self.put(item)
            self._write(b"t" if isinstance(value, tuple) else b"e")
        elif isinstance(value, Call) and not (value.kwargs or value.items or value.pairs):
            self.put(value.function)
            self.put(value.args)
            self._write(b"\x81" if value.is_new else b"R")
            if value.state:
                self.put(value.state)
                self._write(b"b")
        else:
            raise TypeError(f"metadata can't hold a {type(value).__name__}")

    def _write_integer(self, value: int) -> None:
        """Write an integer in its shortest opcode."""
        if 0 <= value < 1 << 8:
            self._write(b"K" + bytes([value]))
        elif 0 <= value < 1 << 16:
            self._write(b"M" + struct.pack("<H", value))
        elif -(1 << 31) <= value < 1 << 31:
            self._write(b"J" + struct.pack("<i", value))
        else:
            # LONG1 holds a number in two's complement: it needs one bit more than the number's own, for the
            # sign.
            length = value.bit_length() // 8 + 1
            self._write(b"\x8a" + bytes([length]) + value.to_bytes(length, "little", signed=True))

    def put_mapping(self, pairs: Iterable[tuple[object, object]]) -> None:
        self._write(b"}")
        count = 0
        for key, value in pairs:
            if count % _BATCH == 0:
                self._write(b"u(" if count else b"(")
            self.put(key)
            self.put(value)
            count += 1
        if count:
            self._write(b"u")


# Removing entries ------------------------------------------------------------------------------------

_BY_NAME = ("state_dict_metadata", "planner_data", "mcore_data")
"""Fields of the metadata that are dictionaries by name; the last one is Megatron's."""
_STORED = "storage_data"
_FIELDS = frozenset({*_BY_NAME, _STORED, "storage_meta", "version"})
"""Known fields; a checkpoint with others isn't rewritten, as those may hold anything."""
_NUMBERED = re.compile(r"(__\d{1,9}_)(\d{1,9})\.distcp")
_BLOCK = 1 << 20
_GROWTH = 8
"""Limit on the size of new metadata, as a multiple of the old."""


def _write_trimmed(
    path: str,
    metadata: Metadata,
    fields: Mapping[str, Any],
    lost: Collection[str],
    target: Target,
    advance: Advance,
) -> Rewritten:
    # Only data files that lose an item are written again, and those without any item left aren't. Their old
    # names must stay intact until the new metadata is in place, so the copies get new names, which the caller
    # puts in place before it.
    kept: dict[str, set[Extent]] = defaultdict(set)
    changed: set[str] = set()
    for (name, _), places in metadata.places.items():
        for place in places:
            if name in lost:
                changed.add(place.file)
            else:
                kept[place.file].add(place)
    files: dict[str, str] = {}
    moved: dict[Extent, Extent] = {}
    spans: list[Span] = []
    taken = set(os.listdir(path))
    for file in sorted(changed & kept.keys()):
        files[file] = _free_name(file, taken)
        sink = target.create(files[file])
        with fs.open_source(os.path.join(path, file)) as source:
            for place in sorted(kept[file]):
                moved[place] = Extent(files[file], sink.offset, place.nbytes)
                crc = _copy(source.read, place, sink, advance)
                extent = Extent(sink.path, moved[place].offset, place.nbytes)
                spans.append(Span(extent, files[file], _read_staged(extent), crc))
    remaining = {
        field: {key: value for key, value in fields[field].items() if key not in lost}
        for field in _BY_NAME
        if isinstance(fields.get(field), dict)
    }
    stored = _stored_entries(fields[_STORED], lost, moved)
    limit = _GROWTH * (fs.getsize(os.path.join(path, METADATA)) + _BLOCK)
    try:
        write_fields(_bounded_write(target.create(METADATA), limit), {**fields, **remaining, _STORED: stored})
    except (TypeError, ValueError) as failure:
        raise Unsupported(path, str(failure), where=METADATA) from failure
    return Rewritten({**files, METADATA: METADATA}, frozenset({*changed, METADATA}), tuple(spans))


def _bounded_write(sink: Sink, limit: int) -> Callable[[bytes], object]:
    """Return a function that writes to a file, and raises ``ValueError`` beyond ``limit`` bytes."""
    # A list that many lists of a hostile pickle share is written once for each, so the new metadata could be
    # larger than the old by any factor.

    def write(data: bytes) -> None:
        if sink.offset + len(data) > limit:
            raise ValueError(f"it would have more than {limit:,} bytes, since its objects are shared")
        sink.write(data)

    return write


def _free_name(file: str, taken: set[str]) -> str:
    """Return an unused name for a data file of the same rank, and add it to ``taken``."""
    numbered = _NUMBERED.fullmatch(file)
    stem, number = (numbered[1], int(numbered[2])) if numbered else ("__0_", 0)
    while (name := f"{stem}{number}.distcp") in taken:
        number += 1
    taken.add(name)
    return name


def _copy(read: Callable[[int, int], Any], place: Extent, sink: Sink, advance: Advance) -> int:
    """Append an item to a file, and return its CRC-32."""
    crc = 0
    for offset in range(0, place.nbytes, _BLOCK):
        block = read(place.offset + offset, min(_BLOCK, place.nbytes - offset))
        crc = isal_zlib.crc32(block, crc)
        sink.write(block)
        advance(len(block))
    return crc


def _read_staged(extent: Extent) -> Callable[[int, memoryview], None]:
    """Return a reader of an extent that opens the file when it is called, after it has been written."""

    def read(offset: int, buffer: memoryview) -> None:
        with fs.open_source(extent.file) as source:
            reader_from(source, extent.offset)(offset, buffer)

    return read


def _stored_entries(
    stored: Mapping[Call, Call], lost: Collection[str], moved: Mapping[Extent, Extent]
) -> Iterator[tuple[Call, Call]]:
    """Yield the remaining entries of ``storage_data`` with the new places of their items."""
    for index, info in stored.items():
        if index.state["fqn"] in lost:
            continue
        fields = info.state
        place = Extent(fields["relative_path"], fields["offset"], fields["length"])
        now = moved.get(place, place)
        state = {**fields, "relative_path": now.file, "offset": now.offset}
        yield index, Call(info.function, info.args, state=state, is_new=info.is_new)


# Writing a whole checkpoint ---------------------------------------------------------------------------

_DATA_FILE = "__0_0.distcp"
_MAX_ENTRIES = 100_000
"""Limit on entries; the metadata of more would exceed the limit of our own reader."""


class TorchDcpWriter(Writer):
    """A directory that ``torch.distributed.checkpoint.load`` reads."""

    name: ClassVar[str] = "torch-dcp"
    dtypes: ClassVar[frozenset[str]] = WHOLE
    shape = "directory"

    def refusals(self, content: Content, options: WriteOptions) -> Iterator[str]:
        items = list(islice(flat_state_dict(content), _MAX_ENTRIES + 1))
        if len(items) > _MAX_ENTRIES:
            yield f"more entries than one checkpoint can list (at most {_MAX_ENTRIES:,})"
            return
        for item in items:
            if isinstance(item.node, Tensor) and item.node.values is None:
                yield f"{item.fqn}: it has no values (it was saved from the meta device)"
        names = Counter(item.fqn for item in items)
        for name, count in names.items():
            if count > 1:
                yield f"{name}: several entries of the state dict would have this name (use --map)"
        yield from name_refusals(names)

    def trim(self, path: str, gone: Collection[Path]) -> Trim:
        place = os.path.join(path, METADATA)
        if not fs.exists(place):
            raise Unsupported(path, "each rank wrote its own metadata")
        metadata = Metadata()
        fields = metadata.add(place, METADATA)
        if metadata.transformed or metadata.safety:
            found = "transformed items" if metadata.transformed else "more than plain data"
            raise Unsupported(path, found, where=METADATA)
        if unknown := fields.keys() - _FIELDS:
            raise Unsupported(
                path, f"a field that PyTorch doesn't write ({min(unknown):.60})", where=METADATA
            )
        files = {place.file for places in metadata.places.values() for place in places}
        if others := sorted(file for file in files if not file.endswith(".distcp")):
            raise Unsupported(path, f"items in {others[0]}, which is not a .distcp file", where=METADATA)
        lost = frozenset(
            name
            for name, entry in metadata.entries.items()
            if any(entry.path[:count] in gone for count in range(1, len(entry.path) + 1))
        )
        return Trim(lost, partial(_write_trimmed, path, metadata, fields, lost))

    def write(self, content: Content, target: Target, options: WriteOptions) -> None:
        items = list(flat_state_dict(content))
        stored = _write_items(items, target)
        sidecar = sidecar_of(content)
        if sidecar is not None:
            target.create(ENTRY).write(sidecar)
        write_metadata(target.create(METADATA).write, stored)


def _write_items(items: list[StateDictEntry], target: Target) -> list[StoredItem]:
    """Write all items into one file, tied tensors once, and return their places."""
    sink = target.create(_DATA_FILE)
    unsealed: list[TorchZip] = []
    places: dict[object, tuple[int, int]] = {}
    stored = []
    for item in items:
        tensor = item.node if isinstance(item.node, Tensor) else None
        owner = _owner_of(item.node)
        place = places.get(owner) if owner is not None else None
        if place is None:
            start = sink.offset
            archive = write_archive(sink, ANONYMOUS, item.node)
            if not archive.is_sealed:
                unsealed.append(archive)
            place = start, sink.offset - start
            if owner is not None:
                places[owner] = place
        stored.append(StoredItem(item.fqn, item.path, tensor, item.requires_grad, _DATA_FILE, *place))
    # The checksum of values is known once they are copied, which may be after the directory of their archive
    # was written. Such checksums are filled in at the end, so that no item waits for the one before it.
    for archive in unsealed:
        archive.seal()
    return stored


def _owner_of(node: object) -> object:
    """Return a key that tied tensors share; None for an entry with an item of its own."""
    if isinstance(node, Tensor):
        return node.shares_with or node.name
    if isinstance(node, Call) and node.function == NDARRAY:
        return NDARRAY, _owner_of(node.args[0])
    return None


# The state dict, flattened as PyTorch does it -------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StateDictEntry:
    """An entry of a flattened state dict: a tensor, or any other object."""

    path: Path
    node: object
    requires_grad: bool = False

    @property
    def fqn(self) -> str:
        """Return the name in the metadata."""
        return ".".join(map(str, self.path))


def flat_state_dict(content: Content) -> Iterator[StateDictEntry]:
    """Yield the entries of a flattened state dict.

    Dictionaries are flattened, and so are lists with tensors or dictionaries at any depth; any other list is
    an entry. A tree that isn't a dictionary isn't a state dict: its tensors are entries by their names.
    """
    if not isinstance(content.tree, dict):
        yield from (StateDictEntry((tensor.name,), tensor) for tensor in content.tensors)
        return
    pending: list[tuple[Path, object]] = [((), content.tree)]
    known: dict[int, bool] = {}
    while pending:
        path, node = pending.pop()
        parts: list[tuple[str | int, object]] = []
        if isinstance(node, dict):
            parts += [
                (key if isinstance(key, str) else str(describe(key)), part) for key, part in node.items()
            ]
        elif isinstance(node, list) and _has_entries(node, known):
            parts += enumerate(node)
        if parts or not path:
            pending += [((*path, key), part) for key, part in reversed(parts)]
            continue
        tensor = _tensor_in(node)
        yield StateDictEntry(path, node) if tensor is None else StateDictEntry(path, *tensor)


def _has_entries(items: list[object], known: dict[int, bool]) -> bool:
    """Return whether a list holds tensors or dictionaries, at any depth of lists.

    Args:
        items: A list that doesn't contain itself.
        known: Answers by ``id``; new ones are added.
    """
    stack = [items]
    while stack:
        below = stack[-1]
        inner = [item for item in below if isinstance(item, list)]
        unknown = [item for item in inner if id(item) not in known]
        if unknown:
            stack += unknown
            continue
        stack.pop()
        known[id(below)] = any(known[id(item)] for item in inner) or any(
            isinstance(item, dict) or _tensor_in(item) for item in below
        )
    return known[id(items)]


def _tensor_in(node: object) -> tuple[Tensor, bool] | None:
    """Return a tensor or parameter as a tensor and ``requires_grad``; None for another node."""
    if isinstance(node, Tensor):
        return node, False
    if not isinstance(node, Call) or not node.args or not isinstance(node.args[0], Tensor):
        return None
    if node.function == REQUIRES_GRAD:
        return node.args[0], True
    if node.is_of("torch._utils", "_rebuild_parameter") and len(node.args) > 1:
        return node.args[0], bool(node.args[1])
    return None
