"""NumPy's arrays and scalars in a pickle, read without calling NumPy's constructors.

Source: NumPy ``numpy/_core/src/multiarray/methods.c`` (``__reduce__``), ``descriptor.c``.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from ckpttool.checkpoint import Extent, Values
from ckpttool.dtypes import BY_NAME, DType
from ckpttool.errors import DamagedCheckpoint
from ckpttool.formats.trees import Leaf
from ckpttool.wire.pickled import Call, Global, Payload
from ckpttool.wire.source import Contiguous, InMemory, swap_width
from ckpttool.wire.strided import Strided

_MULTIARRAY = frozenset({"numpy.core.multiarray", "numpy._core.multiarray"})
_NUMERIC = frozenset({"numpy.core.numeric", "numpy._core.numeric"})
_KINDS = {"f": "float", "i": "int", "u": "uint", "c": "complex", "b": "bool"}
_SCALARS = {
    "float16": "e",
    "float32": "f",
    "float64": "d",
    "int8": "b",
    "int16": "h",
    "int32": "i",
    "int64": "q",
    "uint8": "B",
    "uint16": "H",
    "uint32": "I",
    "uint64": "Q",
    "bool": "?",
}

ByteOrder = Literal["little", "big"]


@dataclass(frozen=True, slots=True)
class Decoded:
    """Array bytes that lie in the pickle as text, decoded when they are read."""

    payload: Payload
    swap: int = 1

    def blocks(self, limit: int) -> Iterator[memoryview]:
        return InMemory(self.payload.read(), self.swap).blocks(limit)

    def once(self) -> Decoded:
        return self


def numpy_leaf(call: Call, path: str, make: Callable[..., Any]) -> Leaf[Any] | None:
    """Return the array or scalar that a call stands for, or None where it is neither.

    Args:
        call: What the interpreter recorded.
        path: The file, for errors.
        make: Builds the tensor from ``dtype, shape, values, extent, storage, byteorder``.

    Raises:
        DamagedCheckpoint: Its description and its bytes disagree.
    """
    function = call.function
    if not isinstance(function, Global):
        return None
    try:
        if function.name == "scalar" and function.module in _MULTIARRAY:
            return Leaf(plain=_scalar(call))
        if function.name == "_reconstruct" and function.module in _MULTIARRAY and call.state is not None:
            _, shape, dtype, fortran, data = call.state
        elif function.name == "_frombuffer" and function.module in _NUMERIC:
            data, dtype, shape, order = call.args
            fortran = order == "F"
        else:
            return None
        return _array(path, dtype, shape, bool(fortran), data, make)
    except (TypeError, ValueError, struct.error) as error:
        message = f"arguments that make no array: {error}"
        raise DamagedCheckpoint(path, message, where=str(function), code="tensor-damaged") from error


def _array(
    path: str, dtype: object, shape: Any, fortran: bool, data: object, make: Callable[..., Any]
) -> Leaf[Any] | None:
    described = _described(dtype)
    if described is None or not isinstance(shape, tuple):
        return Leaf(plain=f"<a NumPy array of {_spelled(dtype)}, shape {shape}>")
    element, byteorder = described
    if any(type(length) is not int or length < 0 for length in shape):
        raise ValueError(f"shape {shape}")
    nbytes = element.nbytes(math.prod(shape))
    swap = swap_width(element.word_bytes, byteorder)
    stored = data.nbytes if isinstance(data, Payload) else len(_bytes(data))
    if isinstance(data, Payload) and data.kind == "latin1":
        stored = nbytes if nbytes <= stored <= 2 * nbytes else stored
    if stored != nbytes:
        raise ValueError(f"{stored:,} bytes for shape {shape} of {element.name}, which takes {nbytes:,}")
    extent = None
    values: Values
    if isinstance(data, Payload) and data.kind != "latin1":
        extent = Extent(path, data.offset, nbytes)
        if fortran and len(shape) > 1:
            values = Strided(data.source, data.offset, element.itemsize, shape, _fortran_strides(shape), swap)
            return Leaf((((), make(element, shape, values, None, extent, byteorder)),))
        values = Contiguous(data.source, data.offset, nbytes, swap)
    elif isinstance(data, Payload):
        values = Decoded(data, swap)
    else:
        values = InMemory(_transposed(_bytes(data), element, shape, fortran), swap)
    return Leaf((((), make(element, shape, values, extent, extent, byteorder)),))


def _bytes(data: object) -> bytes:
    """Return array bytes, which Python 2 wrote as 8-bit text and protocol 5 as a call of bytearray."""
    if isinstance(data, Call) and data.is_of("builtins", "bytearray") and data.args:
        data = data.args[0]
    if isinstance(data, str):
        return data.encode("latin-1")
    if not isinstance(data, bytes):
        raise TypeError("no bytes")
    return data


def _fortran_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[:axis]) for axis in range(len(shape)))


def _transposed(data: bytes, element: DType, shape: tuple[int, ...], fortran: bool) -> bytes:
    """Return the elements in C order."""
    if not fortran or len(shape) < 2:
        return data
    import numpy as np

    return np.frombuffer(data, f"V{element.itemsize}").reshape(shape, order="F").tobytes("C")


def _scalar(call: Call) -> object:
    """Return a NumPy scalar as a number, or described where Python has none like it."""
    described = _described(call.args[0])
    if described is None:
        return f"<a NumPy scalar of {_spelled(call.args[0])}>"
    element, byteorder = described
    code = _SCALARS.get(element.name)
    if code is None:
        return f"<a NumPy scalar of {element.name}>"
    (number,) = struct.unpack(("<" if byteorder == "little" else ">") + code, _bytes(call.args[1]))
    return shortest(number) if element.name in ("float16", "float32") else number


def shortest(number: float) -> float:
    """Return the shortest decimal that is the same float32: 0.02 where the bits say 0.0199999996."""
    if not math.isfinite(number):
        return number
    same = struct.pack("<f", number)
    candidates = (float(f"{number:.{digits}g}") for digits in range(6, 10))
    return next(short for short in candidates if struct.pack("<f", short) == same)


def _described(dtype: object) -> tuple[DType, ByteOrder] | None:
    """Return the element type and byte order of a pickled ``numpy.dtype``; None for what holds no numbers."""
    if not isinstance(dtype, Call) or not dtype.is_of("numpy", "dtype") or not dtype.args:
        return _extension(dtype)
    text = dtype.args[0]
    order = dtype.state[1] if isinstance(dtype.state, tuple) and len(dtype.state) > 1 else "<"
    if isinstance(text, Global):
        return _extension(text)
    if not isinstance(text, str) or text[:1] not in _KINDS or not text[1:].isdigit():
        return None
    bits = 8 * int(text[1:])
    name = "bool" if text[0] == "b" else f"{_KINDS[text[0]]}{bits}"
    element = BY_NAME.get(name)
    return None if element is None else (element, "big" if order == ">" else "little")


def _extension(dtype: object) -> tuple[DType, ByteOrder] | None:
    """Return a type of ml_dtypes, which is pickled by name."""
    if isinstance(dtype, Global) and dtype.module == "ml_dtypes" and dtype.name in BY_NAME:
        return BY_NAME[dtype.name], "little"
    return None


def _spelled(dtype: object) -> str:
    if isinstance(dtype, Call) and dtype.args and isinstance(dtype.args[0], str):
        return dtype.args[0]
    return "objects"
