"""Kernels that measure the difference of two tensors in float64, block by block.

The fast path is ``Workspace``: real, finite numbers whose squares are in range, in preallocated memory that
stays in a core's cache. If float32 holds all values of both dtypes, it is used to rule elements out before
float64 decides. ``tally_block`` is the general path for the rest: complex numbers, integers beyond 2^53, and
blocks with NaN, infinity, or squares out of range, which it scales by a power of two (exact).
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
"""Vector length that NumPy's BLAS multiplies in the calling thread; from 10,000 on it may start threads."""

_SAFE_SQUARES = 2.0**-900, 2.0**900
"""Range of sums of squares that lost nothing to underflow and are far from overflow."""
_OVERFLOW_SHIFT = 2  # exponent: |b - a| and a complex modulus are below 2^2 times the largest float64

_PART_ELEMENTS = 2 * BLAS_LENGTH
"""Elements measured at once as float64: a, b and d take 384 KiB, which fits in a core's own cache."""
BLOCK_ELEMENTS = 4 * _PART_ELEMENTS
"""Elements of a block: enough that Python's overhead per block is small."""

_MAX_ITEM_BYTES = 16
_MANY_VIEWS = 64

_FLOAT32_ERROR = 2.0**-22
"""Upper bound on the relative error of a float32 quotient."""
_LARGE = 1e30  # well inside the range of float32
_CANDIDATE_SHARE = 64
"""If fewer than one element in 64 is a candidate for the largest ratio, only candidates are divided."""
_SUMS_PER_ROW = 4
"""Sums of a row: a·a, b·b, d·d and |d|. The largest |d| is stored in the row after them."""
_MAX_NORM_RATIO = 2.0**8
"""Largest ratio of a·a and b·b at which a·b is computed from the sums of squares."""


class _Part(NamedTuple):
    """Views of the working memory for one part of a block, and of its sums.

    Attributes:
        start: Index of the first element in the block.
        narrow: Both sides as float32.
        wide: Both sides as float64. ``a``, ``b`` and ``d`` (b - a, later |b - a|) are rows of one array.
        rows: ``a``, ``b`` and ``d`` as row vectors of up to BLAS_LENGTH; ``columns``: as column vectors.
        d_rows: ``d``, shape (rows, length).
        padding: Memory after the last element, up to the end of the last row.
        squares, moduli, largest: Per row: a·a, b·b and d·d; the sum of |d|; the largest |d|.
        mask: One boolean per element.
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
    """Views of the working memory for blocks of one length.

    Attributes:
        parts: Its parts, measured one after another.
        length: Elements of a row.
        sums: Sums of each row, shape (4, rows).
        largest: The largest |d| of each row.
        narrow: Both sides as float32.
        quotients: One float32 per element.
        mask: One boolean per element.
    """

    parts: tuple[_Part, ...]
    length: int
    sums: Array
    largest: Array
    narrow: Array
    quotients: Array
    mask: Array


def _aligned_zeros(rows: int, columns: int, dtype: str) -> Array:
    """Return zeros aligned to a cache line: NumPy computes on these up to twice as fast."""
    import numpy as np

    memory = aligned_buffer(rows * columns * np.dtype(dtype).itemsize)
    return np.frombuffer(memory, dtype).reshape(rows, columns)


class Workspace:
    """Working memory of one thread, with the fast path for the blocks that are read into it.

    Attributes:
        buffers: Destination of the bytes of up to ``BLOCK_ELEMENTS`` elements of any dtype.
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

    def set_dtypes(self, dtypes: tuple[DType, DType]) -> None:
        """Set the dtypes of the blocks that follow."""
        a, b = self._widenings = widening_of(dtypes[0]), widening_of(dtypes[1])
        self._is_narrow = a.fits_float32 and b.fits_float32
        self._is_complex = a.is_complex or b.is_complex
        self._in_place = a is b and a.dtype.name == "float32"
        self._bitwise = self._tolerance.bitwise and a is b
        self._marks_parts = not self._bitwise and not (self._tolerance.is_exact and self._is_narrow)

    def tally(self, tally: Tally, count: int, base: int) -> None:
        """Add the first ``count`` elements in the buffers to ``tally``; ``base`` is the index of the first.

        Requires ``np.errstate(all="ignore")``.
        """
        a, b = self._widenings
        is_same = a is b and self.buffers.same(a.dtype.nbytes(count))
        is_real = not self._is_complex and all(
            one.fits_float64(raw, count) for one, raw in zip(self._widenings, self._raw, strict=True)
        )
        if not is_real or not (self._same if is_same else self._differing)(tally, count, base):
            tally_block(tally, self._block(count, base), self._widenings, self._tolerance)

    def _block(self, count: int, base: int) -> Block:
        return Block((self._raw[0], self._raw[1]), count, base)

    def _same(self, tally: Tally, count: int, base: int) -> bool:
        """Add a block of equal bytes, which only counts for the norms; False if squares are out of range."""
        views = self._views_of(count)
        self._load(views, 1)
        squares = 0.0
        for part in views.parts:
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

    def _load(self, views: _Views, sides: int = 2) -> None:
        """Fill ``narrow`` if float32 holds all values; float32 tensors are viewed in the buffers instead."""
        if self._is_narrow and not self._in_place:
            for widening, raw, narrow in zip(self._widenings[:sides], self._raw, views.narrow, strict=False):
                widening.fill_float32(raw, narrow)

    def _widen(self, part: _Part, sides: int = 2) -> None:
        import numpy as np

        if self._is_narrow:
            np.copyto(part.wide[:sides], part.narrow[:sides])
            return
        for widening, raw, wide in zip(self._widenings[:sides], self._raw, part.wide, strict=False):
            widening.fill_float64(raw[widening.dtype.nbytes(part.start) :], wide)

    def _differing(self, tally: Tally, count: int, base: int) -> bool:
        """Add a block of real numbers; False if one isn't finite or squares are out of range."""
        import numpy as np

        views = self._views_of(count)
        self._load(views)
        max_rel = max(map(self._measure, views.parts))
        aa, bb, dd, moduli = np.add.reduce(views.sums, axis=1).tolist()
        a, b = self._bytes_of(0, count), self._bytes_of(1, count)
        if not (is_safe(aa, a) and is_safe(bb, b) and is_safe(dd, views.largest)):
            return False
        largest = float(np.maximum.reduce(views.largest))
        # d·d = a·a + b·b - 2·a·b gives a·b without another pass over the values. Its error is relative to
        # a·a + b·b, the cosine's to |a|·|b|: fine if both norms are of about one size. If they are not, the
        # rounding of the larger one would drown a·b, and the product is computed from the values.
        ab = (
            (aa + bb - dd) / 2
            if aa / _MAX_NORM_RATIO <= bb <= aa * _MAX_NORM_RATIO
            else dot(*self._float64(0, count))
        )
        tally.finite += count
        for total, of_block in zip(tally.sums(), (moduli, aa, bb, ab, dd), strict=True):
            total.add(of_block)
        if largest > tally.max_abs:
            tally.max_abs, tally.largest = (
                largest,
                self._place(count, base, self._index_of_largest(views, count)),
            )
        if largest or self._bitwise:
            self._count(tally, views, count, base)
        if largest and tally.max_rel < math.inf:
            ratio = _largest_ratio(tally.max_rel, largest, views) if self._is_narrow else max_rel
            tally.max_rel = max(tally.max_rel, ratio)
        return True

    def _measure(self, part: _Part) -> float:
        """Compute the sums and the mask of a part; return its largest |b - a| / |a|, or 0 if narrow."""
        import numpy as np

        self._widen(part)
        np.subtract(part.b, part.a, out=part.d)
        # The last row may be incomplete; zeros after its end change neither sums nor maxima. One matmul of
        # (rows, 1, length) with (rows, length, 1) gives all dot products, each short enough for BLAS to stay
        # in this thread. ``d`` becomes |d| in place once d·d is known, and ``a`` becomes the quotients last.
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

    def _index_of_largest(self, views: _Views, count: int) -> int:
        import numpy as np

        start = int(views.largest.argmax()) * views.length
        length = min(views.length, count - start)
        a, b = self._float64(start, length)
        return start + int(np.abs(b - a).argmax())

    def _float64(self, start: int, length: int) -> list[Array]:
        """Return elements of both sides from ``start``."""
        return [
            one.to_float64(raw[one.dtype.nbytes(start) :], length)
            for one, raw in zip(self._widenings, self._raw, strict=True)
        ]

    def _mark(self, part: _Part) -> None:
        """Set the part's mask to the elements that differ by more than the tolerance."""
        import numpy as np

        if self._tolerance.is_exact:
            np.not_equal(part.d, 0, out=part.mask)
        else:
            allowed = self._tolerance.atol + self._tolerance.rtol * np.absolute(part.a)
            np.greater(part.d, allowed, out=part.mask)

    def _count(self, tally: Tally, views: _Views, count: int, base: int) -> None:
        import numpy as np

        if self._bitwise:
            codes = [self._widenings[0].codes(raw, count) for raw in self._raw]
            np.not_equal(codes[0], codes[1]).any(axis=1, out=views.mask)
        elif not self._marks_parts:
            np.not_equal(views.narrow[0], views.narrow[1], out=views.mask)
        counted = int(np.count_nonzero(views.mask))
        tally.count += counted
        if counted and tally.first is None:
            tally.first = self._place(count, base, int(views.mask.argmax()))

    def _place(self, count: int, base: int, index: int) -> ElementPlace:
        return self._block(count, base).place(self._widenings, index)

    def _views_of(self, count: int) -> _Views:
        key = count, self._in_place
        found = self._views.get(key)
        if found is None:
            # Views are kept by length: the blocks of a model's tensors have only a few lengths.
            if len(self._views) >= _MANY_VIEWS:
                self._views.clear()
            found = self._views[key] = self._made_views(count)
        return found

    def _made_views(self, count: int) -> _Views:
        import numpy as np

        length = min(count, BLAS_LENGTH)
        sums = np.empty((_SUMS_PER_ROW + 1, -(-count // length)))
        narrow = (self._raw.view("<f4") if self._in_place else self._narrow)[:, :count]
        mask = self._mask[:count]
        parts = tuple(
            self._made_part(start, min(_PART_ELEMENTS, count - start), length, narrow, mask, sums)
            for start in range(0, count, _PART_ELEMENTS)
        )
        return _Views(
            parts, length, sums[:_SUMS_PER_ROW], sums[_SUMS_PER_ROW], narrow, self._quotients[:count], mask
        )

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
            largest=own_sums[_SUMS_PER_ROW],
            mask=mask[start : start + count],
        )


def _largest_ratio(known: float, largest: float, views: _Views) -> float:
    """Return the largest |b - a| / |a| of a block, or any smaller value if it doesn't exceed ``known``."""
    import numpy as np

    # Dividing every element in float64 would dominate the kernel. First, a ratio can exceed the known
    # maximum only if |a| < largest / known; mostly few or no elements are that small. Otherwise, float32
    # quotients b/a (the ratio is |b/a - 1|) bound the maximum, and only elements near the bound are divided
    # in float64.
    below = largest / known * (1 + _FLOAT32_ERROR) if known else math.inf
    if below < _LARGE:
        np.absolute(views.narrow[0], out=views.quotients)
        if np.minimum.reduce(views.quotients) > below:
            return 0.0
        np.less_equal(views.quotients, below, out=views.mask)
        if np.count_nonzero(views.mask) * _CANDIDATE_SHARE < len(views.mask):
            return _ratio_at(np.flatnonzero(views.mask), views)
    np.divide(views.narrow[1], views.narrow[0], out=views.quotients)
    high, low = float(np.fmax.reduce(views.quotients)), float(np.fmin.reduce(views.quotients))
    estimate, slack = max(high - 1, 1 - low), _FLOAT32_ERROR * (1 + max(high, -low))
    if estimate + slack <= known:
        return 0.0
    least = estimate - 2 * slack if math.isfinite(estimate) else 0.0
    return _ratio_at(np.flatnonzero((views.quotients >= 1 + least) | (views.quotients <= 1 - least)), views)


def _ratio_at(at: Array, views: _Views) -> float:
    """Return the largest |b - a| / |a| at the indexes ``at``; 0 / 0 (NaN) counts as 0."""
    import numpy as np

    a, b = (side[at].astype(np.float64) for side in views.narrow)
    return float(np.fmax.reduce(np.abs(b - a) / np.abs(a), initial=0.0))


class Block(NamedTuple):
    """The same range of elements of both sides.

    Attributes:
        raw: Bytes of each side.
        length: Number of elements.
        base: Index of the first element in the tensor.
    """

    raw: tuple[Array, Array]
    length: int
    base: int

    def place(self, widenings: tuple[Widening, Widening], index: int) -> ElementPlace:
        """Return one of its elements with its index in the tensor."""
        a, b = (w.element(raw, self.length, index) for w, raw in zip(widenings, self.raw, strict=True))
        return ElementPlace(self.base + index, a, b)


def tally_block(
    tally: Tally, block: Block, widenings: tuple[Widening, Widening], tolerance: Tolerance
) -> None:
    """Add a block of any dtype and values to ``tally``. Requires ``np.errstate(all="ignore")``."""
    import numpy as np

    a, b, d = _loaded(block, widenings)
    changed, finite = _changed(a, b, d)
    if not finite.all():
        kept = finite if a.ndim == 1 else finite[:, None]
        a, b, d = (np.where(kept, one, 0.0) for one in (a, b, d))
    d, modulus, ratio, shift = _scaled_differences(a, b, d)
    if tolerance.bitwise and widenings[0] is widenings[1]:
        a_codes, b_codes = (widenings[0].codes(raw, block.length) for raw in block.raw)
        counted = np.any(a_codes != b_codes, axis=1)
    elif tolerance.is_exact:
        counted = changed
    else:
        allowed = tolerance.atol + tolerance.rtol * _modulus(a)
        exceeds = modulus > np.ldexp(allowed, -shift)
        counted = changed & (~finite | exceeds)
    tally.finite += int(np.count_nonzero(finite))
    tally.count += int(np.count_nonzero(counted))
    tally.non_finite += int(np.count_nonzero(counted & ~finite))
    tally.equal_non_finite += int(np.count_nonzero(~(counted | finite)))
    if tally.first is None and counted.any():
        tally.first = block.place(widenings, int(counted.argmax()))
    largest = scaled(float(modulus.max()), shift)
    if largest > tally.max_abs:
        tally.max_abs, tally.largest = largest, block.place(widenings, int(modulus.argmax()))
    tally.max_rel = max(tally.max_rel, ratio)
    _add_sums(tally, a, b, d, modulus, shift)


def _loaded(block: Block, widenings: tuple[Widening, Widening]) -> tuple[Array, Array, Array]:
    """Return both sides and b - a as float64, shape (count,), or (count, 2) if a side is complex.

    b - a is zero only if both are equal, also for 64-bit integers.
    """
    import numpy as np

    a, b = (w.to_float64(raw, block.length) for w, raw in zip(widenings, block.raw, strict=True))
    # A 64-bit integer doesn't fit in float64. Two integers are subtracted in halves of 32 bits, whose
    # differences are exact. An integer against a float is rounded like the sum of its halves; what that
    # rounding lost is added back to the difference (as in Dekker's two-sum).
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
    """Return the masks of elements that differ in value, and of those that are finite on both sides."""
    import numpy as np

    changed = d != 0
    finite = np.isfinite(a) & np.isfinite(b)
    if not finite.all():
        same = (a == b) | (np.isnan(a) & np.isnan(b))
        changed = np.where(finite, changed, ~same)
    if a.ndim == 1:
        return changed, finite
    return np.any(changed, axis=1), np.all(finite, axis=1)


def _scaled_differences(a: Array, b: Array, d: Array) -> tuple[Array, Array, float, int]:
    """Return b - a and |b - a|, both divided by 2^shift, the largest |b - a| / |a|, and the shift."""
    import numpy as np

    # |b - a| and |a| may overflow although all values are finite. Then the differences are computed again
    # from values scaled down by 2^2, and the ratios that overflowed are replaced.
    modulus, length = _modulus(d), _modulus(a)
    ratios = modulus / length
    is_known = np.isfinite(modulus) & np.isfinite(length)
    shift = 0
    if not is_known.all():
        shift = _OVERFLOW_SHIFT
        d = np.ldexp(b, -shift) - np.ldexp(a, -shift)
        modulus = _modulus(d)
        ratios = np.where(is_known, ratios, modulus / _modulus(np.ldexp(a, -shift)))
    # 0 / 0 is NaN, which fmax ignores: nothing changed there.
    return d, modulus, float(np.fmax.reduce(ratios, initial=0.0)), shift


def _modulus(parts: Array) -> Array:
    import numpy as np

    found: Array = np.abs(parts) if parts.ndim == 1 else np.hypot(parts[:, 0], parts[:, 1])
    return found


def _add_sums(tally: Tally, a: Array, b: Array, d: Array, modulus: Array, shift: int) -> None:
    import numpy as np

    top = float(modulus.max())
    down = math.frexp(top)[1] if top > _SAFE_SQUARES[1] else 0
    tally.moduli.add(float(np.add.reduce(np.ldexp(modulus, -down))), down + shift)
    a, a_exponent = _add_squares(tally.aa, a.reshape(-1), 0)
    b, b_exponent = _add_squares(tally.bb, b.reshape(-1), 0)
    tally.ab.add(dot(a, b), a_exponent + b_exponent)
    _add_squares(tally.dd, d.reshape(-1), shift)


def _add_squares(total: ExactSum, values: Array, exponent: int) -> tuple[Array, int]:
    """Add the squares of values · 2^``exponent``; return values and exponent, rescaled if needed."""
    import numpy as np

    squares = dot(values, values)
    if not is_safe(squares, values):
        down = math.frexp(float(np.abs(values).max(initial=0.0)))[1]
        values, exponent = np.ldexp(values, -down), exponent + down
        squares = dot(values, values)
    total.add(squares, 2 * exponent)
    return values, exponent


def is_safe(squares: float, values: Array) -> bool:
    """Return whether a sum of squares is reliable: no underflow or overflow, all values finite."""
    return _SAFE_SQUARES[0] < squares < _SAFE_SQUARES[1] or (squares == 0 and not values.any())


def dot(a: Array, b: Array) -> float:
    """Return the dot product of two vectors, in pieces that BLAS computes in this thread."""
    import numpy as np

    if len(a) <= BLAS_LENGTH:
        return float(np.dot(a, b))
    starts = range(0, len(a), BLAS_LENGTH)
    return math.fsum(float(np.dot(a[s : s + BLAS_LENGTH], b[s : s + BLAS_LENGTH])) for s in starts)
