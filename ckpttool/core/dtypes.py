"""The one table of element types: bits, the NumPy or ml_dtypes name, and each format's own name.

Source: PyTorch ``c10/core/ScalarType.h``, safetensors ``tensor.rs``, NumPy and ml_dtypes documentation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    import numpy as np

Kind = Literal["float", "integer", "boolean", "complex", "quantized", "bits", "string"]


class FloatCode(NamedTuple):
    """Bit patterns of a float type for NaN and infinity.

    A word is a NaN if ``first_nan <= word & mask <= last_nan``, and infinite if
    ``word & mask == infinity``.
    """

    word_bytes: int
    mask: int
    first_nan: int
    last_nan: int
    infinity: int | None


class DType(NamedTuple):
    """An element type.

    Attributes:
        name: The name for users: that of NumPy or ml_dtypes if there is one.
        bits: Size of one stored element.
        kind: The family of values.
        numpy: The NumPy or ml_dtypes type of ``Tensor.array()``, or None.
        float_code: Bit patterns of NaN and infinity, if it has any.
        safetensors: The name in a safetensors header.
        storage: The PyTorch storage class without ``Storage``, as pickles and TorchScript name it.
    """

    name: str
    bits: int
    kind: Kind
    numpy: str | None = None
    float_code: FloatCode | None = None
    safetensors: str | None = None
    storage: str | None = None

    @property
    def itemsize(self) -> int:
        """Bytes of one element; 1 for types below 8 bits."""
        return max(1, self.bits // 8)

    @property
    def word_bytes(self) -> int:
        """Bytes that swap together when the byte order changes (half of a complex element)."""
        return self.itemsize // 2 if self.kind == "complex" else self.itemsize

    @property
    def is_opaque(self) -> bool:
        """Whether elements are bytes of an unknown meaning, so that no check of values applies."""
        return self.kind == "bits" and self.name.startswith("bits")

    def nbytes(self, count: int) -> int:
        """Return the bytes that ``count`` elements take, the last one padded to a whole byte."""
        return (count * self.bits + 7) // 8

    def __str__(self) -> str:
        return self.name

    def document(self) -> str:
        """Return its name."""
        return self.name


# NaN and infinity are found by comparing integers, without converting a value, so that types which NumPy
# lacks need no special case. The mask removes the sign. In an IEEE type, an exponent of ones with a mantissa
# of 0 is infinity, and all patterns above it are NaN. Types named ``fn`` (finite) have no infinity, and one
# NaN: all ones. ``fnuz`` (no negative zero) uses the pattern of -0, 0x80, for NaN, so its sign isn't masked.
# ``e8m0fnu`` is an exponent without sign or mantissa; 0xFF is NaN. Types of 6 and 4 bits have neither.
def _ieee(word_bytes: int, exponent: int, mantissa: int) -> FloatCode:
    mask = (1 << (exponent + mantissa)) - 1
    infinity = ((1 << exponent) - 1) << mantissa
    return FloatCode(word_bytes, mask, infinity + 1, mask, infinity)


def _one_nan(nan: int, mask: int = 0xFF) -> FloatCode:
    """Describe a byte-wide type without infinities that has one NaN pattern (and its negative, by mask)."""
    return FloatCode(1, mask, nan, nan, None)


_F16, _BF16 = _ieee(2, 5, 10), _ieee(2, 8, 7)
_F32, _F64 = _ieee(4, 8, 23), _ieee(8, 11, 52)
_E5M2 = _ieee(1, 5, 2)
_FNUZ = _one_nan(0x80)  # the pattern that IEEE types use for a negative zero

_TABLE = (
    DType("bool", 8, "boolean", "bool", None, "BOOL", "Bool"),
    DType("uint8", 8, "integer", "uint8", None, "U8", "Byte"),
    DType("int8", 8, "integer", "int8", None, "I8", "Char"),
    DType("uint16", 16, "integer", "uint16", None, "U16", "UInt16"),
    DType("int16", 16, "integer", "int16", None, "I16", "Short"),
    DType("uint32", 32, "integer", "uint32", None, "U32", "UInt32"),
    DType("int32", 32, "integer", "int32", None, "I32", "Int"),
    DType("uint64", 64, "integer", "uint64", None, "U64", "UInt64"),
    DType("int64", 64, "integer", "int64", None, "I64", "Long"),
    DType("float16", 16, "float", "float16", _F16, "F16", "Half"),
    DType("bfloat16", 16, "float", "bfloat16", _BF16, "BF16", "BFloat16"),
    DType("float32", 32, "float", "float32", _F32, "F32", "Float"),
    DType("float64", 64, "float", "float64", _F64, "F64", "Double"),
    DType("complex32", 32, "complex", None, _F16, None, "ComplexHalf"),
    DType("complex64", 64, "complex", "complex64", _F32, "C64", "ComplexFloat"),
    DType("complex128", 128, "complex", "complex128", _F64, None, "ComplexDouble"),
    DType("float8_e4m3fn", 8, "float", "float8_e4m3fn", _one_nan(0x7F, 0x7F), "F8_E4M3", "Float8_e4m3fn"),
    DType("float8_e5m2", 8, "float", "float8_e5m2", _E5M2, "F8_E5M2", "Float8_e5m2"),
    DType("float8_e4m3fnuz", 8, "float", "float8_e4m3fnuz", _FNUZ, "F8_E4M3FNUZ", "Float8_e4m3fnuz"),
    DType("float8_e5m2fnuz", 8, "float", "float8_e5m2fnuz", _FNUZ, "F8_E5M2FNUZ", "Float8_e5m2fnuz"),
    DType("float8_e4m3b11fnuz", 8, "float", "float8_e4m3b11fnuz", _FNUZ),
    DType("float8_e8m0fnu", 8, "float", "float8_e8m0fnu", _one_nan(0xFF), "F8_E8M0", "Float8_e8m0fnu"),
    DType("float6_e2m3fn", 6, "float", None, None, "F6_E2M3"),
    DType("float6_e3m2fn", 6, "float", None, None, "F6_E3M2"),
    DType("float4_e2m1fn", 4, "float", "float4_e2m1fn", None, "F4"),
    DType("float4_e2m1fn_x2", 8, "bits", "uint8", storage="Float4_e2m1fn_x2"),
    DType("qint8", 8, "quantized", "int8", storage="QInt8"),
    DType("quint8", 8, "quantized", "uint8", storage="QUInt8"),
    DType("qint32", 32, "quantized", "int32", storage="QInt32"),
    DType("quint4x2", 4, "quantized", None, storage="QUInt4x2"),
    DType("quint2x4", 2, "quantized", None, storage="QUInt2x4"),
    DType("string", 0, "string"),
    DType("variant", 0, "string"),
    DType("bits8", 8, "bits", "uint8", storage="Bits8"),
    DType("bits1x8", 8, "bits", "uint8", storage="Bits1x8"),
    DType("bits2x4", 8, "bits", "uint8", storage="Bits2x4"),
    DType("bits4x2", 8, "bits", "uint8", storage="Bits4x2"),
    DType("bits16", 16, "bits", "uint16", storage="Bits16"),
)

BY_NAME: dict[str, DType] = {dtype.name: dtype for dtype in _TABLE}
BY_SAFETENSORS: dict[str, DType] = {dtype.safetensors: dtype for dtype in _TABLE if dtype.safetensors}
BY_STORAGE: dict[str, DType] = {dtype.storage: dtype for dtype in _TABLE if dtype.storage}

# The other names under which `torch.<name>` is pickled.
BY_TORCH: dict[str, DType] = BY_NAME | {
    alias: BY_NAME[name]
    for alias, name in (
        ("half", "float16"),
        ("float", "float32"),
        ("double", "float64"),
        ("chalf", "complex32"),
        ("cfloat", "complex64"),
        ("cdouble", "complex128"),
        ("short", "int16"),
        ("int", "int32"),
        ("long", "int64"),
    )
}

UINT8 = BY_NAME["uint8"]


def numpy_dtype(dtype: DType) -> np.dtype[Any]:
    """Return the NumPy or ml_dtypes type of a dtype, in the byte order of this machine.

    Raises:
        TypeError: NumPy and ml_dtypes have no such type.
    """
    import numpy as np

    if dtype.numpy is None:
        raise TypeError(f"NumPy has no type for {dtype.name}")
    try:
        return np.dtype(dtype.numpy)
    except TypeError:
        import ml_dtypes

        extension: np.dtype[Any] = np.dtype(getattr(ml_dtypes, dtype.numpy))
        return extension
