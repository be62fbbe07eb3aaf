"""Comparison of string tensors, element by element."""

from __future__ import annotations

import math

from ckpttool.core.errors import DamagedCheckpoint
from ckpttool.core.tensor import Tensor
from ckpttool.formats.tensorflow.values import decoded_strings
from ckpttool.weights.comparing.elements import ElementReader, Side, Unreadable
from ckpttool.weights.comparing.statistics import Statistics, unraveled

MAX_BYTES = 1 << 24
MAX_STRINGS = 1 << 18
"""Limits on tensors that are decoded: all strings of both sides are in memory at once."""

_SHOWN = 80


class NotDecoded(Exception):
    """Raised if the strings of ``side`` aren't decoded; ``why`` is a sentence."""

    def __init__(self, side: Side, why: str) -> None:
        super().__init__(side, why)
        self.side = side
        self.why = why


def string_statistics(a: Tensor, b: Tensor) -> Statistics | None:
    """Return the number and first index of differing strings, with NaN for all distances; None if equal."""
    of_a, of_b = _strings(a, Side.A), _strings(b, Side.B)
    differing = [index for index, (one, other) in enumerate(zip(of_a, of_b, strict=True)) if one != other]
    if not differing:
        return None
    first = differing[0]
    return Statistics(
        size=a.size,
        count=len(differing),
        max_abs=math.nan,
        mean_abs=math.nan,
        max_rel=math.nan,
        l2=math.nan,
        cosine=math.nan,
        norm_a=math.nan,
        norm_b=math.nan,
        where=unraveled(first, a.shape),
        at_a=_excerpt(of_a[first]),
        at_b=_excerpt(of_b[first]),
    )


def _strings(tensor: Tensor, side: Side) -> list[bytes]:
    if tensor.dtype.name != "string":
        raise NotDecoded(side, f"the stored bytes differ; {tensor.dtype.name} elements can't be decoded")
    if tensor.nbytes > MAX_BYTES or tensor.size > MAX_STRINGS:
        found = f"{tensor.size:,} strings of {tensor.nbytes:,} bytes"
        limit = f"at most {MAX_STRINGS:,} of {MAX_BYTES:,} bytes"
        raise NotDecoded(side, f"the stored bytes differ; {found} were not decoded ({limit})")
    data = bytearray(tensor.nbytes)
    ElementReader(tensor, side).read_into(0, memoryview(data))
    try:
        return decoded_strings(bytes(data), tensor.size)
    except ValueError as failure:
        file = tensor.extent.file if tensor.extent else ""
        raise Unreadable(side, DamagedCheckpoint(file, str(failure), where=tensor.name)) from failure


def _excerpt(string: bytes) -> str:
    text = string.decode("utf-8", "backslashreplace")
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
