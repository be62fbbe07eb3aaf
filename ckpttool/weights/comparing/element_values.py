"""Exact conversion of elements of every dtype from little-endian bytes to float32 or float64."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from ckpttool.core.dtypes import DType, numpy_dtype
from ckpttool.weights.comparing.statistics import Element

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

_EXACT_IN_FLOAT32 = 16
"""Integers of up to 16 bits fit in the 24-bit significand of float32."""

_EXACT_IN_FLOAT64 = 1 << 53

_COMPLEX_PARTS = {"complex32": "<f2", "complex64": "<f4", "complex128": "<f8"}
_LOW_WORD = 32
_BYTE_BITS = 8


class Widening:
    """Conversion of the elements of one dtype.

    Attributes:
        dtype: The dtype.
        fits_float32: Whether float32 holds every value.
        is_complex: Whether an element has a real and an imaginary part.
        is_long: Whether float64 doesn't hold every value (64-bit integers).
    """

    def __init__(self, dtype: DType) -> None:
        self.dtype = dtype
        self.is_complex = dtype.kind == "complex"
        self.is_long = dtype.kind == "integer" and dtype.bits == 64
        narrow = dtype.bits <= (32 if dtype.kind == "float" else _EXACT_IN_FLOAT32)
        self.fits_float32 = narrow and not self.is_complex
        # Types of less than 8 bits, and floats of 8, are looked up in a table of all their values.
        is_coded = dtype.bits < _BYTE_BITS or (dtype.kind == "float" and dtype.bits == _BYTE_BITS)
        self._table = _table(dtype) if is_coded else None
        self._numpy: Any = None  # little-endian NumPy dtype of an element, or of one part of a complex one
        if dtype.kind == "complex":
            self._numpy = _COMPLEX_PARTS[dtype.name]
        elif not is_coded and dtype.name != "bfloat16":
            self._numpy = numpy_dtype(dtype).newbyteorder("<")

    def fill_float32(self, raw: Array, out: Array) -> None:
        """Fill ``out`` with float32 elements; requires ``fits_float32``."""
        import numpy as np

        count = len(out)
        if self._table is not None:
            self._table.take(self.codes(raw, count)[:, 0], out=out, mode="clip")
        elif self.dtype.name == "bfloat16":
            # A bfloat16 is the upper half of the float32 of the same value.
            halves = out.view("<u2")
            halves[0::2] = 0
            halves[1::2] = raw.view("<u2")[:count]
        elif self.dtype.kind == "boolean":
            np.copyto(out, raw[:count] != 0)
        else:
            np.copyto(out, raw.view(self._numpy)[:count])

    def to_float64(self, raw: Array, count: int) -> Array:
        """Return the elements as float64, shape (count,) or, if complex, (count, 2); int64 is rounded."""
        import numpy as np

        if self.is_complex:
            parts: Array = raw.view(self._numpy)[: 2 * count].astype(np.float64).reshape(count, 2)
            return parts
        wide = np.empty(count)
        self.fill_float64(raw, wide)
        return wide

    def fill_float64(self, raw: Array, out: Array) -> None:
        """Fill ``out`` with float64 elements; not for complex dtypes."""
        import numpy as np

        if self.fits_float32:
            narrow = np.empty(len(out), "<f4")
            self.fill_float32(raw, narrow)
            np.copyto(out, narrow)
        else:
            np.copyto(out, raw.view(self._numpy)[: len(out)])

    def to_words(self, raw: Array, count: int) -> tuple[Array, Array]:
        """Return integers as two float64 with their exact sum: a multiple of 2^32, and the lower 32 bits."""
        import numpy as np

        if not self.is_long:
            return np.zeros(count), self.to_float64(raw, count)
        # The shift keeps the sign in the upper half, and the lower half is never negative. float64 holds both
        # exactly, as each has at most 32 significant bits.
        whole = raw.view(self._numpy)[:count]
        high = np.ldexp((whole >> _LOW_WORD).astype(np.float64), _LOW_WORD)
        return high, (whole & ((1 << _LOW_WORD) - 1)).astype(np.float64)

    def fits_float64(self, raw: Array, count: int) -> bool:
        """Return whether float64 holds each of these elements exactly."""
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
        if bits >= _BYTE_BITS:
            width = min(bits // _BYTE_BITS, 8)
            words = bits // (_BYTE_BITS * width)
            return raw.view(f"<u{width}")[: count * words].reshape(count, words)
        # Elements of less than 8 bits are packed, the first one in the lowest bits of a byte. Each element's
        # bits become a row of a table, and each row a byte.
        columns = np.unpackbits(raw, bitorder="little", count=count * bits).reshape(count, bits)
        return np.packbits(columns, axis=1, bitorder="little")

    def element(self, raw: Array, count: int, index: int) -> Element:
        """Return element ``index`` of the first ``count`` as a Python object."""
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
    return Widening(dtype)


def _table(dtype: DType) -> Array:
    """Return the float32 value of each bit pattern of a dtype."""
    import numpy as np

    codes = np.arange(1 << dtype.bits, dtype=np.uint8)
    if dtype.kind != "float":
        return codes.astype(np.float32)
    import ml_dtypes

    values: Array = codes.view(getattr(ml_dtypes, dtype.name)).astype(np.float32)
    return values
