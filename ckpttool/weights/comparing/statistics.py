"""Statistics of the difference of two tensors, and the sums that they are computed from.

All values are converted to float64 exactly; 64-bit integers are subtracted exactly, and the difference is
rounded once. Sums within a block are NumPy's; sums over blocks use ``math.fsum``. If squares would leave the
range of float64, the block is scaled by a power of two, as in BLAS's ``nrm2``. The relative error of a
result is below 1e-12, the absolute error of the cosine below 1e-12.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

Element = float | int | complex | str
"""Value of one element as a Python object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """Values are equal if |b - a| ≤ atol + rtol·|a|. NaN equals NaN; an infinity equals only itself.

    Attributes:
        rtol: Relative to the first side's value.
        atol: Absolute.
        bitwise: Whether bit patterns are compared instead, if both sides have one dtype.
    """

    rtol: float = 0.0
    atol: float = 0.0
    bitwise: bool = False

    @property
    def is_exact(self) -> bool:
        return self.rtol == 0 and self.atol == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """Difference of two tensors, over the element pairs that are finite on both sides.

    A complex element counts once: |b - a| is the modulus; the cosine treats both parts as coordinates.

    Attributes:
        size: Number of elements.
        count: Number of elements that differ by more than the tolerance, non-finite ones included.
        non_finite: Number of differing elements of which one side or both are NaN or infinite.
        max_abs: The largest |b - a|; NaN if no pair is finite.
        mean_abs: The mean of |b - a|, with 0 for equal non-finite pairs; NaN if no pair is finite.
        max_rel: The largest |b - a| / |a|, infinite if a is 0 and b isn't; NaN if no pair is finite.
        l2: The norm of b - a.
        cosine: Cosine of the angle between a and b; NaN if one of them is zero.
        norm_a: The norm of a.
        norm_b: The norm of b.
        where: Index of the largest change, or of the first differing element if no finite pair differs.
        at_a: Value of a at ``where``.
        at_b: Value of b at ``where``.
    """

    size: int
    count: int
    max_abs: float
    mean_abs: float
    max_rel: float
    l2: float
    cosine: float
    norm_a: float
    norm_b: float
    where: tuple[int, ...]
    at_a: Element
    at_b: Element
    non_finite: int = 0

    @property
    def relative(self) -> float:
        """Return ``l2`` relative to ``norm_a``."""
        return relative_norm(self.l2, self.norm_a)

    @property
    def norms(self) -> tuple[float, float]:
        """Return the norms of both sides."""
        return self.norm_a, self.norm_b

    @property
    def at(self) -> tuple[Element, Element]:
        """Return the values at the largest change."""
        return self.at_a, self.at_b


class ExactSum:
    """Sum of floats times powers of two without intermediate rounding."""

    __slots__ = ("_scaled", "_terms")

    def __init__(self) -> None:
        self._terms: list[float] = []
        self._scaled: list[tuple[float, int]] = []

    def add(self, term: float, exponent: int = 0) -> None:
        """Add ``term`` · 2^``exponent``."""
        if exponent == 0:
            self._terms.append(term)
        elif term:
            self._scaled.append((term, exponent))

    def merge(self, other: ExactSum) -> None:
        """Add another sum."""
        self._terms += other._terms
        self._scaled += other._scaled

    def condense(self) -> None:
        """Replace the terms by their sum, which may change the last bit."""
        self._terms = [math.fsum(self._terms)]

    def parts(self) -> tuple[float, int]:
        """Return the sum as (number, exponent) with an even exponent, whose half ``root`` needs."""
        if not self._scaled:
            return math.fsum(self._terms), 0
        # Terms with exponents are brought to the exponent of the largest one, so that none overflows; a
        # term that underflows is too small to change the sum.
        terms = [*self._scaled, *((term, 0) for term in self._terms if term)]
        top = max(math.frexp(term)[1] + exponent for term, exponent in terms)
        top += top % 2
        return math.fsum(math.ldexp(term, exponent - top) for term, exponent in terms), top

    def root(self) -> float:
        """Return the square root."""
        number, exponent = self.parts()
        return scaled(math.sqrt(number), exponent // 2)


def scaled(number: float, exponent: int) -> float:
    """Return ``number`` · 2^``exponent``, or infinity on overflow."""
    try:
        return math.ldexp(number, exponent)
    except OverflowError:
        return math.copysign(math.inf, number)


@dataclass(slots=True)
class ElementPlace:
    """Index of an element in C order, and its values."""

    index: int
    a: Element
    b: Element


@dataclass(slots=True)
class Tally:
    """Measurements of some blocks of two tensors; merged over all blocks, they give the ``Statistics``.

    ``finite`` counts element pairs that are finite on both sides, ``equal_non_finite`` equal pairs that
    aren't. The sums are of |b - a| (``moduli``) and of the products a·a, b·b, a·b and d·d with d = b - a.
    """

    count: int = 0
    non_finite: int = 0
    finite: int = 0
    equal_non_finite: int = 0
    max_abs: float = 0.0
    max_rel: float = 0.0
    largest: ElementPlace | None = None
    first: ElementPlace | None = None
    moduli: ExactSum = field(default_factory=ExactSum)
    aa: ExactSum = field(default_factory=ExactSum)
    bb: ExactSum = field(default_factory=ExactSum)
    ab: ExactSum = field(default_factory=ExactSum)
    dd: ExactSum = field(default_factory=ExactSum)

    def sums(self) -> tuple[ExactSum, ...]:
        return self.moduli, self.aa, self.bb, self.ab, self.dd

    def condense(self) -> None:
        """Reduce each sum to one term, to keep a tally small in memory and between processes."""
        for total in self.sums():
            total.condense()

    def merge(self, other: Tally) -> None:
        """Merge the tally of other blocks."""
        self.count += other.count
        self.non_finite += other.non_finite
        self.finite += other.finite
        self.equal_non_finite += other.equal_non_finite
        # Threads finish their blocks in any order. Of equal changes the one with the lowest index counts, so
        # the result is the same in every run.
        self.max_rel = max(self.max_rel, other.max_rel)
        if other.largest is not None and (
            self.largest is None
            or (other.max_abs, -other.largest.index) > (self.max_abs, -self.largest.index)
        ):
            self.max_abs, self.largest = other.max_abs, other.largest
        if other.first is not None and (self.first is None or other.first.index < self.first.index):
            self.first = other.first
        for mine, theirs in zip(self.sums(), other.sums(), strict=True):
            mine.merge(theirs)

    def statistics(self, shape: tuple[int, ...]) -> Statistics | None:
        """Return the statistics of tensors of ``shape``; None if nothing differs."""
        place = self.largest or self.first
        if self.count == 0 or place is None:
            return None
        total, exponent = self.moduli.parts()
        is_known = self.finite > 0
        return Statistics(
            size=math.prod(shape),
            count=self.count,
            non_finite=self.non_finite,
            max_abs=self.max_abs if is_known else math.nan,
            mean_abs=scaled(total / (self.finite + self.equal_non_finite), exponent)
            if is_known
            else math.nan,
            max_rel=self.max_rel if is_known else math.nan,
            l2=self.dd.root(),
            cosine=self._cosine(),
            norm_a=self.aa.root(),
            norm_b=self.bb.root(),
            where=unraveled(place.index, shape),
            at_a=place.a,
            at_b=place.b,
        )

    def _cosine(self) -> float:
        (aa, a_exponent), (bb, b_exponent) = self.aa.parts(), self.bb.parts()
        if aa == 0 or bb == 0:
            return math.nan
        # a·a times b·b may overflow although each is in range, so the roots divide one after the other. By
        # rounding, the cosine of equal vectors may be slightly above 1.
        ab, exponent = self.ab.parts()
        cosine = scaled(ab / math.sqrt(aa) / math.sqrt(bb), exponent - (a_exponent + b_exponent) // 2)
        return max(-1.0, min(1.0, cosine))


def unraveled(index: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the index on each axis of element ``index`` in C order."""
    found = []
    for length in reversed(shape):
        index, at = divmod(index, length)
        found.append(at)
    return tuple(reversed(found))


def relative_norm(change: float, norm: float) -> float:
    """Return ``change / norm``; infinite if ``norm`` is 0 and ``change`` isn't."""
    if norm == 0:
        return math.inf if change else 0.0
    return change / norm
