"""Blocks of two tensors, measured in float64, whatever their types and values are.

A ``Workspace`` measures real numbers in memory that is used again and stays in a processor's cache; what
float32 can rule out, it does, where it holds all values, as of most weights. Complex numbers and integers
beyond 2^53 are left to ``tally_block``, and so is a block that holds NaN or infinity, or squares out of
range: where values are close to the ends of float64, it scales the block by a power of two, which rounds
nothing.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpttool.core.dtypes import DType
from ckpttool.core.readable import aligned_buffer
from ckpttool.weights.comparing.element_values import Widening, widening_of
from ckpttool.weights.comparing.elements import Buffers
from ckpttool.weights.comparing.statistics import ElementPlace, ExactSum, Tally, Tolerance, scaled

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

BLAS_LENGTH = 8192
"""What NumPy's BLAS multiplies in the calling thread; from 10,000 elements on it may start its own."""

_SAFE = 2.0**-900, 2.0**900
"""Sums of squares between these lost nothing to underflow, and are far from overflow."""
_QUARTER = 2  # a difference and the length of a complex number are less than four times the largest float64

_PART_ELEMENTS = 2 * BLAS_LENGTH
"""Elements that are measured at once as float64: few enough for a processor's own cache."""
BLOCK_ELEMENTS = 4 * _PART_ELEMENTS
"""Elements of a block: so many that what Python does for each takes little of the time."""

_MAX_ITEM_BYTES = 16
_MANY_VIEWS = 64

_SLACK = 2.0**-22
"""More than a quotient in float32 is off, as a part of it."""
_LARGE = 1e30  # float32 holds it, and its neighbours
_FEW = 64
"""One element in so many is looked at by itself."""
_SUMS = 4
"""Sums of a row: a·a, b·b, d·d and |d|; behind them comes the largest |d|."""
_FAR = 2.0**8
"""How many times one side's sum of squares may be the other's if a·b is to be told from them."""


class _Part(NamedTuple):
    """The working memory of a part of a block, and where its sums go.

    Attributes:
        start: Index of the first element in the block.
        narrow: Both sides as float32.
        wide: Both sides as float64; ``a``, ``b`` and their difference ``d``, of which in the end
            only the moduli are wanted, are rows of one array.
        rows: All three, cut into lengths that BLAS multiplies in this thread; ``columns`` is their transpose.
        d_rows: ``d``, cut likewise.
        padding: What lies behind the last element in the rows.
        squares, moduli, largest: Of each row a·a, b·b and d·d; the sum of |d|; the largest.
        mask: One boolean an element.
    """

    start: int
    narrow: Array
    wide: Array
    a: Array
    b: Array
    d: Array
    rows: Array
    columns: Array
    d_rows: Array
    padding: Array
    squares: Array
    moduli: Array
    largest: Array
    mask: Array


class _Views(NamedTuple):
    """The working memory of blocks of one length.

    Attributes:
        parts: What of it is measured at once.
        length: Elements of a row.
        sums: Of each row the sums, shape (4, rows).
        largest: Of each row the largest |d|.
        narrow: Both sides as float32.
        quotients: One float32 an element.
        mask: One boolean an element.
    """

    parts: tuple[_Part, ...]
    length: int
    sums: Array
    largest: Array
    narrow: Array
    quotients: Array
    mask: Array


def _aligned_zeros(rows: int, columns: int, dtype: str) -> Array:
    """Return zeros that begin with a cache line: NumPy calculates on these up to twice as fast."""
    import numpy as np

    memory = aligned_buffer(rows * columns * np.dtype(dtype).itemsize)
    return np.frombuffer(memory, dtype).reshape(rows, columns)


class Workspace:
    """The memory of one thread, and what tallies the blocks that are read into it.

    Attributes:
        buffers: What the bytes of up to ``BLOCK_ELEMENTS`` elements of any type are read into.
    """

    def __init__(self, tolerance: Tolerance) -> None:
        import numpy as np

        self.buffers = Buffers(BLOCK_ELEMENTS * _MAX_ITEM_BYTES)
        self._raw = np.frombuffer(self.buffers.data, np.uint8).reshape(2, -1)
        self._tolerance = tolerance
        self._narrow = _aligned_zeros(2, BLOCK_ELEMENTS, "<f4")
        self._wide = _aligned_zeros(3, _PART_ELEMENTS, "<f8")
        self._quotients = _aligned_zeros(1, BLOCK_ELEMENTS, "<f4")[0]
        self._mask = _aligned_zeros(1, BLOCK_ELEMENTS, "?")[0]
        self._views: dict[tuple[int, bool], _Views] = {}

    def take(self, dtypes: tuple[DType, DType]) -> None:
        """Make ready for tensors of these types."""
        a, b = self._widenings = widening_of(dtypes[0]), widening_of(dtypes[1])
        self._is_narrow = a.fits_float32 and b.fits_float32
        self._is_complex = a.is_complex or b.is_complex
        self._is_long = a.is_long or b.is_long
        self._in_place = a is b and a.dtype.name == "float32"
        self._bitwise = self._tolerance.bitwise and a is b
        self._marks_parts = not self._bitwise and not (self._tolerance.is_exact and self._is_narrow)

    def tally(self, tally: Tally, count: int, base: int) -> None:
        """Add the first ``count`` elements in the buffers, of which the first has the index ``base``.

        NumPy's warnings of overflow and division have to be off.
        """
        a, b = self._widenings
        is_same = a is b and self.buffers.same(a.dtype.nbytes(count))
        is_real = not (self._is_complex or (self._is_long and self._exceeds_float64(count)))
        if not is_real or not (self._same if is_same else self._differing)(tally, count, base):
            tally_block(tally, self._block(count, base), self._widenings, self._tolerance)

    def _exceeds_float64(self, count: int) -> bool:
        return not all(
            one.fits_float64(raw, count) for one, raw in zip(self._widenings, self._raw, strict=True)
        )

    def _block(self, count: int, base: int) -> Block:
        return Block((self._raw[0], self._raw[1]), count, base)

    def _same(self, tally: Tally, count: int, base: int) -> bool:
        """Add a block of equal bytes, of which only the norm is wanted; False where they are out of range."""
        v = self._views_of(count)
        self._load(v, 1)
        squares = 0.0
        for part in v.parts:
            self._widen(part, 1)
            squares += dot(part.a, part.a)
        if not is_safe(squares, self._bytes_of(0, count)):
            return False
        tally.finite += count
        for total in (tally.aa, tally.bb, tally.ab):
            total.add(squares)
        return True

    def _bytes_of(self, side: int, count: int) -> Array:
        return self._raw[side, : self._widenings[side].dtype.nbytes(count)]

    def _load(self, v: _Views, sides: int = 2) -> None:
        """Set ``narrow`` where it holds all values."""
        if self._is_narrow and not self._in_place:
            for widening, raw, narrow in zip(self._widenings[:sides], self._raw, v.narrow, strict=False):
                widening.fill_float32(raw, narrow)

    def _widen(self, part: _Part, sides: int = 2) -> None:
        """Set ``wide``."""
        import numpy as np

        if self._is_narrow:
            np.copyto(part.wide[:sides], part.narrow[:sides])
            return
        for widening, raw, wide in zip(self._widenings[:sides], self._raw, part.wide, strict=False):
            widening.fill_float64(raw[widening.dtype.nbytes(part.start) :], wide)

    def _differing(self, tally: Tally, count: int, base: int) -> bool:
        """Add a block of real numbers; False where one is not finite, or a square is out of range."""
        import numpy as np

        v = self._views_of(count)
        self._load(v)
        max_rel = max(map(self._measure, v.parts))
        aa, bb, dd, moduli = np.add.reduce(v.sums, axis=1).tolist()
        a, b = self._bytes_of(0, count), self._bytes_of(1, count)
        if not (is_safe(aa, a) and is_safe(bb, b) and is_safe(dd, v.largest)):
            return False
        largest = float(np.maximum.reduce(v.largest))
        # Half of a·a + b·b - d·d is as exact as these are, if a·a and b·b are of about one size.
        ab = (aa + bb - dd) / 2 if aa / _FAR <= bb <= aa * _FAR else dot(*self._float64(0, count))
        tally.finite += count
        for total, of_block in zip(tally.sums(), (moduli, aa, bb, ab, dd), strict=True):
            total.add(of_block)
        if largest > tally.max_abs:
            tally.max_abs, tally.largest = largest, self._place(count, base, self._index_of_largest(v, count))
        if largest or self._bitwise:
            self._count(tally, v, count, base)
        if largest and tally.max_rel < math.inf:
            ratio = _largest_ratio(tally.max_rel, largest, v) if self._is_narrow else max_rel
            tally.max_rel = max(tally.max_rel, ratio)
        return True

    def _measure(self, part: _Part) -> float:
        """Set the sums of a part, and its mask; return the largest |b - a| / |a| unless float32 tells it."""
        import numpy as np

        self._widen(part)
        np.subtract(part.b, part.a, out=part.d)
        if part.padding.size:
            part.padding.fill(0)
        np.matmul(part.rows, part.columns, out=part.squares)
        np.absolute(part.d, out=part.d)
        np.add.reduce(part.d_rows, axis=1, out=part.moduli)
        np.maximum.reduce(part.d_rows, axis=1, out=part.largest)
        if self._marks_parts:
            self._mark(part)
        if self._is_narrow:
            return 0.0
        np.absolute(part.a, out=part.a)
        np.divide(part.d, part.a, out=part.a)
        return float(np.fmax.reduce(part.a, initial=0.0))

    def _index_of_largest(self, v: _Views, count: int) -> int:
        import numpy as np

        start = int(v.largest.argmax()) * v.length
        length = min(v.length, count - start)
        a, b = self._float64(start, length)
        return start + int(np.abs(b - a).argmax())

    def _float64(self, start: int, length: int) -> list[Array]:
        """Return elements of both sides."""
        return [
            one.to_float64(raw[one.dtype.nbytes(start) :], length)
            for one, raw in zip(self._widenings, self._raw, strict=True)
        ]

    def _mark(self, part: _Part) -> None:
        """Set the part's mask: which elements are further apart than the tolerance allows."""
        import numpy as np

        if self._tolerance.is_exact:
            np.not_equal(part.d, 0, out=part.mask)
        else:
            allowed = self._tolerance.atol + self._tolerance.rtol * np.absolute(part.a)
            np.greater(part.d, allowed, out=part.mask)

    def _count(self, tally: Tally, v: _Views, count: int, base: int) -> None:
        import numpy as np

        if self._bitwise:
            codes = [self._widenings[0].codes(raw, count) for raw in self._raw]
            np.not_equal(codes[0], codes[1]).any(axis=1, out=v.mask)
        elif not self._marks_parts:
            np.not_equal(v.narrow[0], v.narrow[1], out=v.mask)
        counted = int(np.count_nonzero(v.mask))
        tally.count += counted
        if counted and tally.first is None:
            tally.first = self._place(count, base, int(v.mask.argmax()))

    def _place(self, count: int, base: int, index: int) -> ElementPlace:
        return self._block(count, base).place(self._widenings, index)

    def _views_of(self, count: int) -> _Views:
        key = count, self._in_place
        found = self._views.get(key)
        if found is None:
            if len(self._views) >= _MANY_VIEWS:
                self._views.clear()
            found = self._views[key] = self._made_views(count)
        return found

    def _made_views(self, count: int) -> _Views:
        import numpy as np

        length = min(count, BLAS_LENGTH)
        sums = np.empty((_SUMS + 1, -(-count // length)))
        narrow = (self._raw.view("<f4") if self._in_place else self._narrow)[:, :count]
        mask = self._mask[:count]
        parts = tuple(
            self._made_part(start, min(_PART_ELEMENTS, count - start), length, narrow, mask, sums)
            for start in range(0, count, _PART_ELEMENTS)
        )
        return _Views(parts, length, sums[:_SUMS], sums[_SUMS], narrow, self._quotients[:count], mask)

    def _made_part(
        self, start: int, count: int, length: int, narrow: Array, mask: Array, sums: Array
    ) -> _Part:
        rows = -(-count // length)
        padded, own_sums = self._wide[:, : rows * length], sums[:, start // length :][:, :rows]
        a, b, d = self._wide[:, :count]
        return _Part(
            start=start,
            narrow=narrow[:, start : start + count],
            wide=self._wide[:2, :count],
            a=a,
            b=b,
            d=d,
            rows=padded.reshape(3, rows, 1, length),
            columns=padded.reshape(3, rows, length, 1),
            d_rows=padded[2].reshape(rows, length),
            padding=padded[:, count:],
            squares=own_sums[:3].reshape(3, rows, 1, 1),
            moduli=own_sums[3],
            largest=own_sums[_SUMS],
            mask=mask[start : start + count],
        )


def _largest_ratio(known: float, largest: float, v: _Views) -> float:
    """Return the largest |b - a| / |a| of a block, or a smaller one where it is below what is known."""
    import numpy as np

    # Only where |a| is below this, a change of at most the largest can be more than is known.
    below = largest / known * (1 + _SLACK) if known else math.inf
    if below < _LARGE:
        np.absolute(v.narrow[0], out=v.quotients)
        if np.minimum.reduce(v.quotients) > below:
            return 0.0
        np.less_equal(v.quotients, below, out=v.mask)
        if np.count_nonzero(v.mask) * _FEW < len(v.mask):
            return _ratio_at(np.flatnonzero(v.mask), v)
    np.divide(v.narrow[1], v.narrow[0], out=v.quotients)
    high, low = float(np.fmax.reduce(v.quotients)), float(np.fmin.reduce(v.quotients))
    estimate, slack = max(high - 1, 1 - low), _SLACK * (1 + max(high, -low))
    if estimate + slack <= known:
        return 0.0
    least = estimate - 2 * slack if math.isfinite(estimate) else 0.0
    return _ratio_at(np.flatnonzero((v.quotients >= 1 + least) | (v.quotients <= 1 - least)), v)


def _ratio_at(at: Array, v: _Views) -> float:
    """Return the largest |b - a| / |a| at some indexes; 0 / 0 is no change."""
    import numpy as np

    a, b = (side[at].astype(np.float64) for side in v.narrow)
    return float(np.fmax.reduce(np.abs(b - a) / np.abs(a), initial=0.0))


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
    """Return whether a sum of squares is that of the values: nothing was lost, all are finite."""
    return _SAFE[0] < squares < _SAFE[1] or (squares == 0 and not values.any())


def dot(a: Array, b: Array) -> float:
    """Return the sum of products of two vectors, computed in this thread alone."""
    import numpy as np

    if len(a) <= BLAS_LENGTH:
        return float(np.dot(a, b))
    starts = range(0, len(a), BLAS_LENGTH)
    return math.fsum(float(np.dot(a[s : s + BLAS_LENGTH], b[s : s + BLAS_LENGTH])) for s in starts)
