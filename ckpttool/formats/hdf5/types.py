"""What the elements of an HDF5 dataset are, in the words of the one table of types."""

from __future__ import annotations

from ckpttool.dtypes import BY_NAME, DType
from ckpttool.wire.hdf5 import Attributes, Kind

_FLOATS: dict[tuple[int, ...], str] = {
    (15, 10, 5, 0, 10, 15): "float16",
    (15, 7, 8, 0, 7, 127): "bfloat16",
    (31, 23, 8, 0, 23, 127): "float32",
    (63, 52, 11, 0, 52, 1023): "float64",
    (7, 2, 5, 0, 2, 15): "float8_e5m2",
}
_COMPLEX = {"float16": "complex32", "float32": "complex64", "float64": "complex128"}


def dtype_of(kind: Kind, attributes: Attributes) -> DType | None:
    """Return the type of a dataset's elements, or None where they are no numbers."""
    if kind.family == "bool":
        return BY_NAME["bool"]
    if kind.family == "int":
        return BY_NAME.get(f"{'' if kind.signed else 'u'}int{8 * kind.size}")
    if kind.family in ("float", "complex"):
        name = _FLOATS.get(kind.fields, "")
        if kind.family == "complex":
            name = _COMPLEX.get(name, "")
        found = BY_NAME.get(name)
        return found if found and found.itemsize == kind.size else None
    if kind.family == "opaque":
        told = attributes.get("dtype")
        found = BY_NAME.get(told) if isinstance(told, str) else None
        return found if found and found.bits == 8 * kind.size else BY_NAME.get(f"bits{8 * kind.size}")
    return None
