"""Other types of elements: floating tensors rounded as PyTorch rounds them, block by block."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ckpttool.comparing.element_values import widening_of
from ckpttool.dtypes import BY_NAME, DType, numpy_dtype
from ckpttool.errors import UsageError
from ckpttool.formats.content.tree import replace_tensors
from ckpttool.pairing.rearrangement import regroup
from ckpttool.report import counted, first_names
from ckpttool.tensor import Role, Tensor
from ckpttool.writing.interface import Content

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

TARGETS = ("float32", "float16", "bfloat16")
_STATE = (Role.OPTIMIZER, Role.TRAINING)
_GROUP = 1 << 18
"""Elements that are rounded at once; of packed ones, whole bytes."""


def cast(content: Content, dtype_name: str) -> tuple[Content, list[str]]:
    """Return a content whose floating tensors have another type, and what there is to say of it.

    The state of an optimizer, and of a training, gets the type only where that rounds nothing. A finite value
    that the type has no room for is an error when it is read.
    """
    if dtype_name not in TARGETS:
        raise UsageError(f"no type to convert to: {dtype_name!r} (one of {', '.join(TARGETS)})")
    dtype = BY_NAME[dtype_name]
    made: dict[str, Tensor] = {}
    kept: list[Tensor] = []
    for tensor in content.tensors:
        is_wanted = tensor.dtype.kind == "float" and tensor.dtype is not dtype
        if is_wanted and tensor.role in _STATE and not _holds_all_values(dtype, tensor.dtype):
            kept.append(tensor)
        elif is_wanted:
            made[tensor.name] = _cast_tensor(tensor, dtype, made)
    tensors = tuple(made.get(tensor.name, tensor) for tensor in content.tensors)
    new = {id(old): made[old.name] for old in content.tensors if old.name in made}
    tree = None if content.tree is None else replace_tensors(content.tree, new)
    notes = _notes([one for one in content.tensors if one.name in made], dtype, kept)
    return replace(content, tensors=tensors, tree=tree), notes


def _cast_tensor(tensor: Tensor, dtype: DType, made: dict[str, Tensor]) -> Tensor:
    owner = made.get(tensor.shares_with or "")
    values = CastValues(tensor, dtype) if owner is None else owner.values
    return Tensor(
        tensor.path, dtype, tensor.shape, tensor.role, values, key=tensor.key, shares_with=tensor.shares_with
    )


def _holds_all_values(dtype: DType, other: DType) -> bool:
    """Tell whether a type has every value of another."""
    if other.bits <= 8 or other is dtype:
        return dtype.name in ("float32", "bfloat16") or other.name != "float8_e8m0fnu"
    return dtype.name == "float32" and other.bits == 16


def _notes(cast_ones: Iterable[Tensor], dtype: DType, kept: list[Tensor]) -> list[str]:
    notes, scaled = [], []
    counts: dict[DType, int] = {}
    for tensor in cast_ones:
        counts[tensor.dtype] = counts.get(tensor.dtype, 0) + 1
        if tensor.dtype.bits <= 8:
            scaled.append(tensor)
    for source, count in counts.items():
        done = "widened" if _holds_all_values(dtype, source) else "rounded"
        notes.append(f"{counted(count, 'tensor')} of {source.name} {done} to {dtype.name}")
    if scaled:
        names = first_names([tensor.name for tensor in scaled])
        notes.append(f"{names}: as they are; scales that lie beside them are not multiplied in")
    if kept:
        names = first_names([tensor.name for tensor in kept])
        notes.append(f"{names}: state of the training, and not rounded")
    return notes


@dataclass(frozen=True, slots=True)
class CastValues:
    """The elements of a floating tensor in another floating type, rounded to the nearest, ties to even.

    float64 becomes float32 first, as PyTorch does it.
    """

    tensor: Tensor
    dtype: DType

    def blocks(self, limit: int) -> Iterator[memoryview]:
        """Yield the elements; finite ones that became infinite are a ``UsageError`` after the last block."""
        size, lost = self.tensor.size, 0
        count = max(16, min(_GROUP, limit // self.dtype.itemsize // 16 * 16))
        groups = [min(count, size - start) for start in range(0, size, count)]
        sizes = [self.tensor.dtype.nbytes(one) for one in groups]
        for one, data in zip(groups, regroup(self.tensor, sizes), strict=True):
            rounded, more = self._rounded(data, one)
            lost += more
            yield rounded
        if lost:
            raise UsageError(self._told(lost))

    def once(self) -> CastValues:
        return self

    def _rounded(self, data: bytearray, count: int) -> tuple[memoryview, int]:
        """Return elements in the new type, and how many finite ones became infinite."""
        import numpy as np

        source = self.tensor.dtype
        raw = np.frombuffer(data, np.uint8)
        with np.errstate(all="ignore"):
            if source.name == "float64":
                wide: Array = raw.view("<f8").astype("<f4")
            else:
                wide = np.empty(count, "<f4")
                widening_of(source).fill_float32(raw, wide)
            made = wide if self.dtype.name == "float32" else _narrow(wide, self.dtype, source)
            infinite = np.isinf(wide if made is wide else _widen(made, self.dtype))
            lost = 0
            if infinite.any():
                whole = raw.view("<f8") if source.name == "float64" else wide
                lost = int(np.count_nonzero(np.isfinite(whole[infinite])))
        return memoryview(made.view(np.uint8).data), lost

    def _told(self, lost: int) -> str:
        values = f"{counted(lost, 'finite value')} would become infinite"
        way = {"float16": "bfloat16 or float32 may hold them", "bfloat16": "float32 holds them"}
        instead = way.get(self.dtype.name, "convert without --dtype")
        return f"{self.tensor.name}: {values} in {self.dtype.name} ({instead})"


def _narrow(wide: Array, dtype: DType, source: DType) -> Array:
    """Return float32 elements in a type of 16 bits, little-endian; NaNs get the bits that PyTorch gives them.

    Source: PyTorch, aten/src/ATen/cpu/vec (float32 and float64 to bfloat16) and c10/util/BFloat16.h (others);
    NaNs of float16 keep their sign and the head of their payload, and are quiet.
    """
    import numpy as np

    numpy_type = "<f2" if dtype.name == "float16" else numpy_dtype(dtype)
    made: Array = wide.astype(numpy_type).view("u2").astype("<u2", copy=False)
    is_nan = np.isnan(wide)
    if is_nan.any():
        if dtype.name == "float16":
            bits = wide.view("<u4")[is_nan]
            made[is_nan] = (bits >> 16 & 0x8000) | 0x7E00 | (bits >> 13 & 0x3FF)
        else:
            made[is_nan] = 0xFFFF if source.bits >= 32 else 0x7FC0
    return made


def _widen(narrow: Array, dtype: DType) -> Array:
    import numpy as np

    wide = np.empty(len(narrow), "<f4")
    widening_of(dtype).fill_float32(narrow.view(np.uint8), wide)
    return wide
