"""The pickle ``.metadata`` of ``torch.distributed.checkpoint``, written opcode by opcode.

Source: PyTorch ``torch/distributed/checkpoint/metadata.py``; CPython ``Lib/pickle.py``.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ckpttool.containers.pickle.pickle_nodes import Call, Global
from ckpttool.core.tensor import Path, Tensor

_MODULE = "torch.distributed.checkpoint.metadata"
_METADATA, _INDEX = Global(_MODULE, "Metadata"), Global(_MODULE, "MetadataIndex")
_TENSOR, _BYTES = Global(_MODULE, "TensorStorageMetadata"), Global(_MODULE, "BytesStorageMetadata")
_PROPERTIES, _CHUNK = Global(_MODULE, "TensorProperties"), Global(_MODULE, "ChunkStorageMetadata")
_PLACE = Global("torch.distributed.checkpoint.filesystem", "_StorageInfo")
_SIZE = Global("torch", "Size")
_STRIDED = Call(Global("torch.serialization", "_get_layout"), ("torch.strided",))
_CONTIGUOUS = Call(Global(_MODULE, "_MEM_FORMAT_ENCODING"), (0,))
_VERSION = "1.0.0"
_SHARED = frozenset(
    {_STRIDED, _CONTIGUOUS, "properties", "size", "chunks", "offsets", "sizes", "fqn", "index", "offset"}
    | {"relative_path", "length"}
)
"""What is written once, beside the names of classes, and referred to where it is used again."""
_BATCH = 1000
"""How many pairs are set at once: a reader keeps them on its stack."""
_WORDS = {None: b"N", True: b"\x88", False: b"\x89"}


@dataclass(frozen=True, slots=True)
class StoredItem:
    """What is saved under one name, and where.

    Attributes:
        fqn: The name: the keys of the path, joined by dots.
        path: Where it lies in the state dict; integers are indexes of lists.
        tensor: What it is; None for anything but a tensor.
        requires_grad: Whether it is a parameter that is trained.
        file: The name of the file.
        offset: Where it begins in the file, in bytes.
        nbytes: How many bytes it takes there.
    """

    fqn: str
    path: Path
    tensor: Tensor | None
    requires_grad: bool
    file: str
    offset: int
    nbytes: int


def write_metadata(write: Callable[[bytes], object], stored: Sequence[StoredItem]) -> None:
    """Write the metadata of a checkpoint in which each tensor is one chunk."""

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
    """Write a ``Metadata`` with these fields; an iterator gives the entries of a dictionary.

    Raises:
        TypeError: One holds what no metadata of PyTorch's holds.
    """
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
    """Return an object that is made without arguments, and then given its state."""
    return Call(kind, (), state=state, is_new=True)


class _MetadataPickler:
    """Writes values opcode by opcode."""

    def __init__(self, write: Callable[[bytes], object]) -> None:
        self._write = write
        self._memo: dict[object, int] = {}

    def put(self, value: object) -> None:
        """Write the opcodes that put a value on a reader's stack."""
        is_shared = isinstance(value, Global) or (isinstance(value, str | Call) and value in _SHARED)
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
            self._write(_WORDS[value])
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
            raise TypeError(f"no metadata holds a {type(value).__name__}")

    def _write_integer(self, value: int) -> None:
        """Write a number, as short as it can be."""
        if 0 <= value < 1 << 8:
            self._write(b"K" + bytes([value]))
        elif 0 <= value < 1 << 16:
            self._write(b"M" + struct.pack("<H", value))
        elif -(1 << 31) <= value < 1 << 31:
            self._write(b"J" + struct.pack("<i", value))
        else:
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
