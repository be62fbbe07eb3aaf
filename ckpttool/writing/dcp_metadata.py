"""The ``.metadata`` of a distributed checkpoint as it is written: a pickle of a few dataclasses.

Source: PyTorch ``torch/distributed/checkpoint/metadata.py``, ``filesystem.py``; CPython ``Lib/pickle.py``.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ckpttool.tensor import Path, Tensor
from ckpttool.wire.pickled import Call, Global

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
class Stored:
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


def write_metadata(write: Callable[[bytes], object], stored: Sequence[Stored]) -> None:
    """Write the metadata of a checkpoint in which each tensor is one chunk."""
    pickle = _Pickle(write)
    write(b"\x80\x02")
    pickle.value(_METADATA)
    write(b")\x81}")
    for field, pairs in (
        ("state_dict_metadata", ((one.fqn, _described(one)) for one in stored)),
        ("planner_data", ((one.fqn, one.path) for one in stored)),
        ("storage_data", (_located(one) for one in stored)),
    ):
        pickle.value(field)
        pickle.mapping(pairs)
        write(b"s")
    for field, value in (("storage_meta", None), ("version", _VERSION)):
        pickle.value(field)
        pickle.value(value)
        write(b"s")
    write(b"b.")


def _described(one: Stored) -> object:
    if one.tensor is None:
        return _Instance(_BYTES, {})
    shape = one.tensor.shape
    dtype = Global("torch", one.tensor.dtype.name)
    properties = _Instance(_PROPERTIES, (dtype, _STRIDED, one.requires_grad, _CONTIGUOUS, False))
    chunk = _Instance(_CHUNK, {"offsets": _size((0,) * len(shape)), "sizes": _size(shape)})
    return _Instance(_TENSOR, {"properties": properties, "size": _size(shape), "chunks": [chunk]})


def _located(one: Stored) -> tuple[object, object]:
    index: dict[str, object] = {"fqn": one.fqn, "index": None}
    if one.tensor is not None:
        index |= {"offset": _size((0,) * len(one.tensor.shape)), "index": 0}
    place = {"relative_path": one.file, "offset": one.offset, "length": one.nbytes}
    return _Instance(_INDEX, index), _Instance(_PLACE, place)


def _size(lengths: tuple[int, ...]) -> Call:
    return Call(_SIZE, (lengths,))


@dataclass(frozen=True, slots=True)
class _Instance:
    """An object that is made without arguments, and then given its state."""

    kind: Global
    state: object


class _Pickle:
    """Writes values opcode by opcode."""

    def __init__(self, write: Callable[[bytes], object]) -> None:
        self._write = write
        self._known: dict[object, int] = {}

    def value(self, value: object) -> None:
        """Write what puts a value on a reader's stack."""
        is_shared = isinstance(value, Global) or (isinstance(value, str | Call) and value in _SHARED)
        known = self._known.get(value) if is_shared else None
        if known is not None:
            self._write(b"h" + bytes([known]))
            return
        self._spell(value)
        if is_shared:
            self._known[value] = len(self._known)
            self._write(b"q" + bytes([self._known[value]]))

    def _spell(self, value: object) -> None:
        if value is None or isinstance(value, bool):
            self._write(_WORDS[value])
        elif isinstance(value, int):
            self._write(_integer(value))
        elif isinstance(value, str):
            text = value.encode("utf-8", "surrogatepass")
            self._write(b"X" + struct.pack("<I", len(text)) + text)
        elif isinstance(value, Global):
            self._write(f"c{value.module}\n{value.name}\n".encode())
        elif isinstance(value, dict):
            self.mapping(value.items())
        elif isinstance(value, tuple | list):
            self._sequence(value)
        elif isinstance(value, Call):
            self.value(value.function)
            self.value(value.args)
            self._write(b"R")
        elif isinstance(value, _Instance):
            self._instance(value)
        else:
            raise TypeError(f"no metadata holds a {type(value).__name__}")

    def mapping(self, pairs: Iterable[tuple[object, object]]) -> None:
        """Write a dictionary."""
        self._write(b"}")
        count = 0
        for key, value in pairs:
            if count % _BATCH == 0:
                self._write(b"u(" if count else b"(")
            self.value(key)
            self.value(value)
            count += 1
        if count:
            self._write(b"u")

    def _instance(self, made: _Instance) -> None:
        self.value(made.kind)
        self._write(b")\x81")
        if made.state:
            self.value(made.state)
            self._write(b"b")

    def _sequence(self, items: tuple[object, ...] | list[object]) -> None:
        self._write(b"(" if isinstance(items, tuple) else b"](")
        for item in items:
            self.value(item)
        self._write(b"t" if isinstance(items, tuple) else b"e")


def _integer(value: int) -> bytes:
    """Return the opcode of a number, as short as it can be."""
    if 0 <= value < 1 << 8:
        return b"K" + bytes([value])
    if 0 <= value < 1 << 16:
        return b"M" + struct.pack("<H", value)
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    length = value.bit_length() // 8 + 1
    return b"\x8a" + bytes([length]) + value.to_bytes(length, "little", signed=True)
