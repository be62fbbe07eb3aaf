"""Casts floating-point tensors lazily, with PyTorch's rounding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckpttool.core.dtypes import BY_NAME, DType, numpy_dtype
from ckpttool.core.errors import UsageError
from ckpttool.core.tensor import Role, Tensor
from ckpttool.core.text import counted, first_names
from ckpttool.core.values import Computed, regroup
from ckpttool.formats.content.tree import replace_tensors
from ckpttool.formats.writer import Content
from ckpttool.weights.comparing.element_values import widening_of
from ckpttool.weights.pairing.notes import training_tensors

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

TARGETS = ("float32", "float16", "bfloat16")
_STATE_ROLES = (Role.OPTIMIZER, Role.TRAINING)
_GROUP = 1 << 18
"""Elements per block; a multiple of 16, so that blocks of packed elements are whole bytes."""


def cast(content: Content, dtype_name: str) -> tuple[Content, list[str]]:
    """Return a content with floating-point tensors of another dtype, and notes.

    Optimizer and training state is cast only if the dtype holds all its values. A finite value that would
    become infinite raises ``UsageError`` when the tensor is read.
    """
    if dtype_name not in TARGETS:
        raise UsageError(f"no type to convert to: {dtype_name!r} (one of {', '.join(TARGETS)})")
    dtype = BY_NAME[dtype_name]
    changed: dict[str, Tensor] = {}
    kept: list[Tensor] = []
    for tensor in content.tensors:
        is_wanted = tensor.dtype.kind == "float" and tensor.dtype is not dtype
        if is_wanted and tensor.role in _STATE_ROLES and not _holds_all_values(dtype, tensor.dtype):
            kept.append(tensor)
        elif is_wanted:
            owner = changed.get(tensor.shares_with or "")
            values = cast_values(tensor, dtype) if owner is None else owner.values
            changed[tensor.name] = Tensor(
                tensor.path,
                dtype,
                tensor.shape,
                tensor.role,
                values,
                key=tensor.key,
                shares_with=tensor.shares_with,
            )
    tensors = tuple(changed.get(tensor.name, tensor) for tensor in content.tensors)
    replacements = {id(old): changed[old.name] for old in content.tensors if old.name in changed}
    tree = None if content.tree is None else replace_tensors(content.tree, replacements)
    notes = _notes([one for one in content.tensors if one.name in changed], dtype, kept)
    return replace(content, tensors=tensors, tree=tree), notes


def _holds_all_values(dtype: DType, other: DType) -> bool:
    """Return whether ``dtype`` holds every value of ``other``."""
    # Both 16-bit types hold all floats of up to 8 bits, with one exception: float8_e8m0fnu, a scale, has the
    # powers of two from 2^-127 to 2^127, beyond the exponents of float16.
    if other.bits <= 8 or other is dtype:
        return dtype.name in ("float32", "bfloat16") or other.name != "float8_e8m0fnu"
    return dtype.name == "float32" and other.bits == 16


def _notes(changed: Sequence[Tensor], dtype: DType, kept: Sequence[Tensor]) -> list[str]:
    notes = []
    for source, count in Counter(tensor.dtype for tensor in changed).items():
        done = "widened" if _holds_all_values(dtype, source) else "rounded"
        notes.append(f"{counted(count, 'tensor')} of {source.name} {done} to {dtype.name}")
    quantized = [tensor.name for tensor in changed if tensor.dtype.bits <= 8]
    if quantized:
        names = first_names(quantized)
        notes.append(f"{names}: converted without their scales")
    if kept:
        notes.append(f"kept {training_tensors(kept)} as stored")
    return notes


def cast_values(tensor: Tensor, dtype: DType) -> Computed:
    """Return the lazy elements of a floating-point tensor in another dtype, rounded to nearest, ties to even.

    float64 is rounded to float32 first, as in PyTorch. If finite values became infinite, reading raises
    ``UsageError`` after the last block.
    """

    def make(limit: int) -> Iterator[memoryview]:
        lost = 0
        count = max(16, min(_GROUP, limit // dtype.itemsize // 16 * 16))
        groups = [min(count, tensor.size - start) for start in range(0, tensor.size, count)]
        sizes = [tensor.dtype.nbytes(length) for length in groups]
        for length, data in zip(groups, regroup(tensor, sizes), strict=True):
            block, more = _round(data, length, tensor.dtype, dtype)
            lost += more
            yield block
        if lost:
            values = f"{counted(lost, 'finite value')} would become infinite"
            remedies = {"float16": "bfloat16 or float32 may hold them", "bfloat16": "float32 holds them"}
            remedy = remedies.get(dtype.name, "convert without --dtype")
            raise UsageError(f"{tensor.name}: {values} in {dtype.name} ({remedy})")

    return Computed(make)


def _round(data: bytearray, count: int, source: DType, dtype: DType) -> tuple[memoryview, int]:
    """Return elements in the new dtype, and the number of finite ones that became infinite."""
    import numpy as np

    raw = np.frombuffer(data, np.uint8)
    with np.errstate(all="ignore"):
        if source.name == "float64":
            wide: Array = raw.view("<f8").astype("<f4")
        else:
            wide = np.empty(count, "<f4")
            widening_of(source).fill_float32(raw, wide)
        if dtype.name == "float32":
            result = back = wide
        else:
            result, back = _narrow(wide, dtype, source), np.empty(count, "<f4")
            widening_of(dtype).fill_float32(result.view(np.uint8), back)
        # A cast overflows silently. So the result is widened again, and elements that are infinite only after
        # the cast are counted.
        infinite = np.isinf(back)
        lost = 0
        if infinite.any():
            whole = raw.view("<f8") if source.name == "float64" else wide
            lost = int(np.count_nonzero(np.isfinite(whole[infinite])))
    return memoryview(result.view(np.uint8).data), lost


def _narrow(wide: Array, dtype: DType, source: DType) -> Array:
    """Return float32 elements as little-endian float16 or bfloat16, with the bits that PyTorch gives NaNs.

    Source: PyTorch, aten/src/ATen/cpu/vec (float32 and float64 to bfloat16) and c10/util/BFloat16.h (others);
    NaNs of float16 keep their sign and the upper bits of their payload, and are quiet.
    """
    import numpy as np

    numpy_type = "<f2" if dtype.name == "float16" else numpy_dtype(dtype)
    narrow: Array = wide.astype(numpy_type).view("u2").astype("<u2", copy=False)
    is_nan = np.isnan(wide)
    if is_nan.any():
        if dtype.name == "float16":
            bits = wide.view("<u4")[is_nan]
            narrow[is_nan] = (bits >> 16 & 0x8000) | 0x7E00 | (bits >> 13 & 0x3FF)
        else:
            narrow[is_nan] = 0xFFFF if source.bits >= 32 else 0x7FC0
    return narrow
