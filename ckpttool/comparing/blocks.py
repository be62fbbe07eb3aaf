"""Blocks of two tensors, compared and measured in float64, whatever their types and values are.

Where values are close to the ends of float64, the block is scaled by a power of two, which rounds nothing.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpttool.comparing.statistics import ElementPlace, ExactSum, Tally, Tolerance, scaled
from ckpttool.comparing.widening import Widening

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

BLAS_LENGTH = 8192
"""What NumPy's BLAS multiplies in the calling thread; from 10,000 elements on it may start its own."""

_SAFE = 2.0**-900, 2.0**900
"""Sums of squares between these lost nothing to underflow, and are far from overflow."""
_QUARTER = 2  # a difference and the length of a complex number are less than four times the largest float64


class Block(NamedTuple):
    """Elements of both sides at the same place.

    Attributes:
        raw: Their bytes, one array a side.
        length: How many elements there are.
        base: Index of the first.
    """

    raw: tuple[Array, Array]
    length: int
    base: int

    def place(self, widenings: tuple[Widening, Widening], index: int) -> ElementPlace:
        """Return one of its elements."""
        a, b = (w.element(raw, self.length, index) for w, raw in zip(widenings, self.raw, strict=True))
        return ElementPlace(self.base + index, a, b)


class _Measured(NamedTuple):
    """What is known of a block, of its finite pairs; all other elements are 0 here.

    Attributes:
        a, b, d: Both sides and b - a, one number or two parts an element; ``d`` times 2^``shift``.
        modulus: |b - a|, times 2^``shift``.
        ratio: The largest |b - a| / |a|.
        shift: The power of two that keeps lengths in range.
    """

    a: Array
    b: Array
    d: Array
    modulus: Array
    ratio: float
    shift: int


def tally_block(
    tally: Tally, block: Block, widenings: tuple[Widening, Widening], tolerance: Tolerance
) -> None:
    """Add what a block holds. NumPy's warnings of overflow and division have to be off."""
    import numpy as np

    a, b, d = _loaded(block, widenings)
    changed, finite = _changed(a, b, d)
    if not finite.all():
        kept = finite if a.ndim == 1 else finite[:, None]
        a, b, d = (np.where(kept, one, 0.0) for one in (a, b, d))
    measured = _measured(a, b, d)
    if tolerance.bitwise and widenings[0] is widenings[1]:
        a_codes, b_codes = (widenings[0].codes(raw, block.length) for raw in block.raw)
        counted = np.any(a_codes != b_codes, axis=1)
    elif tolerance.is_exact:
        counted = changed
    else:
        counted = changed & (~finite | _exceeds(measured, tolerance))
    tally.finite += int(np.count_nonzero(finite))
    tally.count += int(np.count_nonzero(counted))
    tally.non_finite += int(np.count_nonzero(counted & ~finite))
    tally.alike += int(np.count_nonzero(~(counted | finite)))
    if tally.first is None and counted.any():
        tally.first = block.place(widenings, int(counted.argmax()))
    largest = scaled(float(measured.modulus.max()), measured.shift)
    if largest > tally.max_abs:
        tally.max_abs, tally.largest = largest, block.place(widenings, int(measured.modulus.argmax()))
    tally.max_rel = max(tally.max_rel, measured.ratio)
    _add_sums(tally, measured)


def _loaded(block: Block, widenings: tuple[Widening, Widening]) -> tuple[Array, Array, Array]:
    """Return both sides and b - a as float64; one row of two parts an element where a side is complex.

    A difference is zero only where both are equal, however many bits an integer needs.
    """
    import numpy as np

    a, b = (w.to_float64(raw, block.length) for w, raw in zip(widenings, block.raw, strict=True))
    long = any(one.is_long for one in widenings)
    if long and not any(one.dtype.kind in ("float", "complex") for one in widenings):
        words = [w.to_words(raw, block.length) for w, raw in zip(widenings, block.raw, strict=True)]
        (a_high, a_low), (b_high, b_low) = words
        return a, b, (b_high - a_high) + (b_low - a_low)
    if a.ndim != b.ndim:
        a, b = (one if one.ndim == 2 else np.stack([one, np.zeros_like(one)], 1) for one in (a, b))
    d = b - a
    for sign, widening, raw in zip((-1, 1), widenings, block.raw, strict=True):
        if widening.is_long:
            high, low = widening.to_words(raw, block.length)
            lost = low - ((high + low) - high)
            if d.ndim == 1:
                d += sign * lost
            else:
                d[:, 0] += sign * lost
    return a, b, d


def _changed(a: Array, b: Array, d: Array) -> tuple[Array, Array]:
    """Return which elements differ in value, and of which both sides are finite."""
    import numpy as np

    changed = d != 0
    finite = np.isfinite(a) & np.isfinite(b)
    if not finite.all():
        same = (a == b) | (np.isnan(a) & np.isnan(b))
        changed = np.where(finite, changed, ~same)
    if a.ndim == 1:
        return changed, finite
    return np.any(changed, axis=1), np.all(finite, axis=1)


def _measured(a: Array, b: Array, d: Array) -> _Measured:
    import numpy as np

    modulus, length = _modulus(d), _modulus(a)
    ratios = modulus / length
    is_known = np.isfinite(modulus) & np.isfinite(length)
    shift = 0
    if not is_known.all():
        shift = _QUARTER
        d = np.ldexp(b, -shift) - np.ldexp(a, -shift)
        modulus = _modulus(d)
        ratios = np.where(is_known, ratios, modulus / _modulus(np.ldexp(a, -shift)))
    # Of 0 / 0 nothing is known, and nothing has changed.
    return _Measured(a, b, d, modulus, float(np.fmax.reduce(ratios, initial=0.0)), shift)


def _modulus(parts: Array) -> Array:
    import numpy as np

    found: Array = np.abs(parts) if parts.ndim == 1 else np.hypot(parts[:, 0], parts[:, 1])
    return found


def _exceeds(measured: _Measured, tolerance: Tolerance) -> Array:
    """Return which elements are further apart than a tolerance allows."""
    import numpy as np

    allowed = tolerance.atol + tolerance.rtol * _modulus(measured.a)
    found: Array = measured.modulus > np.ldexp(allowed, -measured.shift)
    return found


def _add_sums(tally: Tally, measured: _Measured) -> None:
    import numpy as np

    modulus, shift = measured.modulus, measured.shift
    top = float(modulus.max())
    down = math.frexp(top)[1] if top > _SAFE[1] else 0
    tally.moduli.add(float(np.add.reduce(np.ldexp(modulus, -down))), down + shift)
    a, a_exponent = _add_squares(tally.aa, measured.a.reshape(-1), 0)
    b, b_exponent = _add_squares(tally.bb, measured.b.reshape(-1), 0)
    tally.ab.add(dot(a, b), a_exponent + b_exponent)
    _add_squares(tally.dd, measured.d.reshape(-1), shift)


def _add_squares(total: ExactSum, values: Array, exponent: int) -> tuple[Array, int]:
    """Add the squares of values · 2^``exponent``; return values and exponent with which none was lost."""
    import numpy as np

    squares = dot(values, values)
    if not is_safe(squares, values):
        down = math.frexp(float(np.abs(values).max(initial=0.0)))[1]
        values, exponent = np.ldexp(values, -down), exponent + down
        squares = dot(values, values)
    total.add(squares, 2 * exponent)
    return values, exponent


def is_safe(squares: float, values: Array) -> bool:
    """Tell whether a sum of squares is that of the values: nothing was lost, all are finite."""
    return _SAFE[0] < squares < _SAFE[1] or (squares == 0 and not values.any())


def dot(a: Array, b: Array) -> float:
    """Return the sum of products of two vectors, computed in this thread alone."""
    import numpy as np

    if len(a) <= BLAS_LENGTH:
        return float(np.dot(a, b))
    starts = range(0, len(a), BLAS_LENGTH)
    return math.fsum(float(np.dot(a[s : s + BLAS_LENGTH], b[s : s + BLAS_LENGTH])) for s in starts)
