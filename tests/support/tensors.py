"""Tensors made of NumPy arrays, and what two of them differ by, in exact arithmetic."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from ckpttool import Tensor
from ckpttool.core.dtypes import BY_NAME
from ckpttool.core.readable import Buffer
from ckpttool.core.values import Contiguous, in_memory
from ckpttool.weights.comparing.compare import Comparison, Statistics, Tolerance, compare_all

Array = np.ndarray[Any, Any]
Parts = tuple[float, ...]
"""An element: a number, or the two parts of a complex one; integers are Python's."""

_ROOT_BITS = 256


def tensor_of(array: Array, dtype: str | None = None, *, streamed: bool = False, big: bool = False) -> Tensor:
    """Return an array as a tensor; ``dtype`` is for what the array holds as codes, one byte an element."""
    kind = BY_NAME[dtype or array.dtype.name]
    data = packed(array, kind.bits) if kind.bits < 8 else array.tobytes()
    swap = 1
    if big:
        swap = kind.word_bytes
        data = array.view(f"u{swap}").byteswap().tobytes() if swap > 1 else data
    values = in_memory(data, swap) if streamed else Contiguous(Buffer("memory", data), 0, len(data), swap)
    order = "big" if big else "little"
    return Tensor(("t",), kind, array.shape, values=values, byteorder=order)


def packed(codes: Array, bits: int) -> bytes:
    """Return codes behind one another, from the lowest bit up."""
    whole = sum(int(code) << (index * bits) for index, code in enumerate(codes.reshape(-1)))
    return whole.to_bytes((codes.size * bits + 7) // 8, "little")


def compared(a: Tensor, b: Tensor, **options: Any) -> Comparison:
    """Return the outcome for one pair, which has to be a comparison."""
    (outcome,) = compare_all([(a, b)], Tolerance(**options), jobs=1)
    assert isinstance(outcome, Comparison)
    return outcome


def measured(a: Tensor, b: Tensor, **options: Any) -> Statistics:
    """Return the statistics of one pair, which has to differ."""
    found = compared(a, b, **options)
    assert not found.equal and found.statistics is not None
    return found.statistics


def elements(array: Array) -> list[Parts]:
    """Return the elements of an array exactly."""
    if array.dtype.kind == "c":
        return [(float(one.real), float(one.imag)) for one in array.reshape(-1)]
    if array.dtype.kind in "biu":
        return [(int(one),) for one in array.reshape(-1)]
    return [(float(one),) for one in array.reshape(-1).astype(np.float64)]


@dataclass(frozen=True)
class Expected:
    """What the statistics have to be; ``lengths`` are |b - a| of each element, None where not finite."""

    count: int
    non_finite: int
    max_abs: float
    mean_abs: float
    max_rel: float
    l2: float
    cosine: float
    norm_a: float
    norm_b: float
    lengths: list[float | None]
    first: int


def expected(a: Sequence[Parts], b: Sequence[Parts]) -> Expected:
    """Return what two lists of elements differ by, in exact arithmetic that is rounded at the end."""
    unequal = [not _same(one, other) for one, other in zip(a, b, strict=True)]
    finite = [all(map(math.isfinite, (*one, *other))) for one, other in zip(a, b, strict=True)]
    exact_a = [_exact(one) if is_finite else [] for one, is_finite in zip(a, finite, strict=True)]
    exact_b = [_exact(one) if is_finite else [] for one, is_finite in zip(b, finite, strict=True)]
    differences = [
        [y - x for x, y in _zipped(one, other)] for one, other in zip(exact_a, exact_b, strict=True)
    ]
    lengths = [_root(_squares(d)) if f else None for d, f in zip(differences, finite, strict=True)]
    known = [length for length in lengths if length is not None]
    alike = sum(not u and not f for u, f in zip(unequal, finite, strict=True))
    aa, bb, dd = (sum(map(_squares, side), Fraction()) for side in (exact_a, exact_b, differences))
    ab = sum((x * y for pair in zip(exact_a, exact_b, strict=True) for x, y in _zipped(*pair)), Fraction())
    return Expected(
        count=sum(unequal),
        non_finite=sum(u and not f for u, f in zip(unequal, finite, strict=True)),
        max_abs=rounded(max(known)) if known else math.nan,
        mean_abs=rounded(sum(known, Fraction()) / (len(known) + alike)) if known else math.nan,
        max_rel=_ratio(exact_a, lengths),
        l2=rounded(_root(dd)),
        cosine=rounded(ab / (_root(aa) * _root(bb))) if aa and bb else math.nan,
        norm_a=rounded(_root(aa)),
        norm_b=rounded(_root(bb)),
        lengths=[None if length is None else rounded(length) for length in lengths],
        first=unequal.index(True) if any(unequal) else -1,
    )


def _same(one: Parts, other: Parts) -> bool:
    width = max(len(one), len(other))
    pairs = zip((*one, 0)[:width], (*other, 0)[:width], strict=True)
    return all(x == y or (x != x and y != y) for x, y in pairs)


def _exact(one: Parts) -> list[Fraction]:
    return [Fraction(part) for part in one]


def _zipped(one: list[Fraction], other: list[Fraction]) -> Iterator[tuple[Fraction, Fraction]]:
    width = max(len(one), len(other))
    zero = [Fraction()]
    return zip((one + zero)[:width], (other + zero)[:width], strict=True)


def _squares(parts: list[Fraction]) -> Fraction:
    return sum((part * part for part in parts), Fraction())


def _root(square: Fraction) -> Fraction:
    """Return a square root to 256 bits."""
    if not square:
        return Fraction()
    shift = _ROOT_BITS + max(0, square.denominator.bit_length() - square.numerator.bit_length())
    scaled = (square.numerator << 2 * shift) // square.denominator
    return Fraction(math.isqrt(scaled), 1 << shift)


def _ratio(exact: list[list[Fraction]], lengths: list[Fraction | None]) -> float:
    ratios = []
    for one, length in zip(exact, lengths, strict=True):
        if length is not None:
            base = _root(_squares(one))
            ratios.append(rounded(_as_float64(length) / _as_float64(base)) if base else _without_base(length))
    return max(ratios, default=math.nan)


def _without_base(length: Fraction) -> float:
    return math.inf if length else 0.0


def _as_float64(length: Fraction) -> Fraction:
    """Return a length as float64 holds it, if it can: below its range, few bits are left."""
    held = rounded(length)
    return length if math.isinf(held) else Fraction(held)


def rounded(number: Fraction) -> float:
    """Return the nearest float64, infinite where they end."""
    try:
        return float(number)
    except OverflowError:
        return math.inf


_NEARLY_NOTHING = 1e-321
"""Below the range of float64, the last bits are all that there is."""


def require(found: Statistics, wanted: Expected) -> None:
    """Assert that the statistics are as expected, to 1e-12 of themselves."""
    assert (found.count, found.non_finite) == (wanted.count, wanted.non_finite)
    for name in ("max_abs", "mean_abs", "max_rel", "l2", "norm_a", "norm_b"):
        _require_close(name, getattr(found, name), getattr(wanted, name), 1e-12, _NEARLY_NOTHING)
    _require_close("cosine", found.cosine, wanted.cosine, 1e-12, 1e-12)


def _require_close(name: str, found: float, wanted: float, relative: float, absolute: float) -> None:
    is_close = math.isclose(found, wanted, rel_tol=relative, abs_tol=absolute)
    assert is_close or (math.isnan(found) and math.isnan(wanted)), f"{name}: {found!r}, not {wanted!r}"
