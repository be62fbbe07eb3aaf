"""Elements of every type as float32 or float64, exactly, from the bytes that ``Tensor.blocks`` gives."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from ckpttool.core.dtypes import DType, numpy_dtype
from ckpttool.weights.comparing.statistics import Element

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

_EXACT_IN_FLOAT32 = 16
"""Integers of so many bits have their place in the 24 of a float32."""

_EXACT_IN_FLOAT64 = 1 << 53

_COMPLEX_PARTS = {"complex32": "<f2", "complex64": "<f4", "complex128": "<f8"}
_LOW_WORD = 32
_EIGHT = 8


class Widening:
    """How elements of one type are taken from their bytes.

    Attributes:
        dtype: The type.
        fits_float32: Whether every value is one of float32.
        is_complex: Whether an element has two parts.
        is_long: Whether a value may need more bits than float64 has.
    """

    def __init__(self, dtype: DType) -> None:
        self.dtype = dtype
        self.is_complex = dtype.kind == "complex"
        self.is_long = dtype.kind == "integer" and dtype.bits == 64
        narrow = dtype.bits <= (32 if dtype.kind == "float" else _EXACT_IN_FLOAT32)
        self.fits_float32 = narrow and not self.is_complex
        # The values of a type of few bits are looked up by them.
        is_coded = dtype.bits < _EIGHT or (dtype.kind == "float" and dtype.bits == _EIGHT)
        self._table = _table(dtype) if is_coded else None
        self._numpy = None if is_coded else _numpy_type(dtype)

    def fill_float32(self, raw: Array, out: Array) -> None:
        """Set the float32 elements of ``out``, of a type whose values fit."""
        import numpy as np

        count = len(out)
        if self._table is not None:
            self._table.take(self.codes(raw, count)[:, 0], out=out, mode="clip")
        elif self.dtype.name == "bfloat16":
            halves = out.view("<u2")
            halves[0::2] = 0
            halves[1::2] = raw.view("<u2")[:count]
        elif self.dtype.kind == "boolean":
            np.copyto(out, raw[:count] != 0)
        else:
            np.copyto(out, raw.view(self._numpy)[:count])

    def to_float64(self, raw: Array, count: int) -> Array:
        """Return the elements as float64, shape (count,) or (count, 2); long integers are rounded."""
        import numpy as np

        if self.is_complex:
            return raw.view(self._numpy)[: 2 * count].astype(np.float64).reshape(count, 2)
        wide = np.empty(count)
        self.fill_float64(raw, wide)
        return wide

    def fill_float64(self, raw: Array, out: Array) -> None:
        """Set the float64 elements of ``out``, of a type that is not complex."""
        import numpy as np

        if self.fits_float32:
            narrow = np.empty(len(out), "<f4")
            self.fill_float32(raw, narrow)
            np.copyto(out, narrow)
        else:
            np.copyto(out, raw.view(self._numpy)[: len(out)])

    def to_words(self, raw: Array, count: int) -> tuple[Array, Array]:
        """Return integers as the exact sum of two float64: multiples of 2^32, and what is below."""
        import numpy as np

        if not self.is_long:
            return np.zeros(count), self.to_float64(raw, count)
        whole = raw.view(self._numpy)[:count]
        high = np.ldexp((whole >> _LOW_WORD).astype(np.float64), _LOW_WORD)
        return high, (whole & ((1 << _LOW_WORD) - 1)).astype(np.float64)

    def fits_float64(self, raw: Array, count: int) -> bool:
        """Return whether float64 holds each of these elements."""
        import numpy as np

        if not self.is_long:
            return True
        whole = raw.view(self._numpy)[:count]
        return bool(
            np.minimum.reduce(whole) >= -_EXACT_IN_FLOAT64 and np.maximum.reduce(whole) <= _EXACT_IN_FLOAT64
        )

    def codes(self, raw: Array, count: int) -> Array:
        """Return the bits of each element as unsigned words, shape (count, words)."""
        import numpy as np

        bits = self.dtype.bits
        if bits >= _EIGHT:
            width = min(bits // _EIGHT, 8)
            words = bits // (_EIGHT * width)
            return raw.view(f"<u{width}")[: count * words].reshape(count, words)
        columns = np.unpackbits(raw, bitorder="little", count=count * bits).reshape(count, bits)
        return np.packbits(columns, axis=1, bitorder="little")

    def element(self, raw: Array, count: int, index: int) -> Element:
        """Return one of the first ``count`` elements as Python has it."""
        if self.dtype.kind == "boolean":
            return bool(raw[index] != 0)
        if self._table is not None:
            value = float(self._table[self.codes(raw, count)[index, 0]])
            return value if self.dtype.kind == "float" else int(value)
        if self.is_complex:
            real, imaginary = raw.view(self._numpy)[2 * index : 2 * index + 2].tolist()
            return complex(real, imaginary)
        if self.dtype.name == "bfloat16":
            return float(self.to_float64(raw[2 * index : 2 * index + 2], 1)[0])
        found: Element = raw.view(self._numpy)[index].item()
        return found


@cache
def widening_of(dtype: DType) -> Widening:
    """Return how elements of a type are widened."""
    return Widening(dtype)


def _table(dtype: DType) -> Array:
    """Return the value of each pattern of bits, as float32."""
    import numpy as np

    codes = np.arange(1 << dtype.bits, dtype=np.uint8)
    if dtype.kind != "float":
        return codes.astype(np.float32)
    import ml_dtypes

    values: Array = codes.view(getattr(ml_dtypes, dtype.name)).astype(np.float32)
    return values


def _numpy_type(dtype: DType) -> Any:
    """Return the little-endian NumPy type of an element, or of a part of one."""
    if dtype.kind == "complex":
        return _COMPLEX_PARTS[dtype.name]
    return None if dtype.name == "bfloat16" else numpy_dtype(dtype).newbyteorder("<")
