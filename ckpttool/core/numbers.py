"""Numbers, sizes, shapes, times, and how a value changed, as people write them."""

from __future__ import annotations

import math

from ckpttool.core.printable import printable, printable_cut

_UNITS = ("kB", "MB", "GB", "TB", "PB")
_SMALL, _LARGE = 0.01, 10_000.0
LONGEST_VALUE = 60
_FEWEST_DIGITS, _MOST_DIGITS = 4, 17  # 17 tell every two float64 apart


def number(value: object) -> str:
    """Return a number without digits that nobody reads."""
    if isinstance(value, float):
        return f"{value:.6g}"
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    return f"{value:,}" if is_whole else printable(str(value))


def file_size(nbytes: int) -> str:
    """Return bytes as people say them: 1.2 GB, by powers of 1,000."""
    if nbytes < 1000:
        return f"{nbytes} B"
    power = 1
    while power < len(_UNITS) and nbytes >= 999.5 * 1000**power:
        power += 1
    size = nbytes / 1000**power
    return f"{size:.1f} {_UNITS[power - 1]}" if size < 9.95 else f"{size:.0f} {_UNITS[power - 1]}"


def amount(value: float) -> str:
    """Return how large something is, in two or three digits: 0.125, 1.0e-3, 3."""
    if not math.isfinite(value):
        return "NaN" if value != value else "inf" if value > 0 else "-inf"
    if value == 0 or _SMALL <= abs(value) < 999.5:  # from there on three digits round to 1e+03
        return f"{value:.3g}"
    if 999.5 <= abs(value) < _LARGE:
        return f"{value:,.0f}"
    mantissa, _, exponent = f"{value:.1e}".partition("e")
    return f"{mantissa}e{int(exponent)}"


def share(part: int, whole: int) -> str:
    """Return a part of a whole in percent; what is not all of it is never 100 %."""
    if not whole or part in (0, whole):
        return "100%" if part else "0%"
    percent = 100 * part / whole
    return "<0.1%" if percent < 0.1 else f"{min(percent, 99.9):.1f}%"


def shape_text(shape: tuple[int, ...]) -> str:
    """Return a shape, its sizes joined by crosses."""
    return "×".join(map(str, shape)) or "scalar"


def index_text(index: tuple[int, ...]) -> str:
    """Return where an element is: [3, 5], and nothing for a scalar."""
    return f"[{', '.join(map(str, index))}]" if index else ""


def utc_time(nanoseconds: int) -> str | None:
    """Return a time as ISO 8601 in UTC, to the second; None for one beyond what calendars hold."""
    from datetime import datetime, timezone

    try:
        when = datetime.fromtimestamp(nanoseconds // 10**9, timezone.utc)
    except (ValueError, OverflowError, OSError):
        return None
    return f"{when:%Y-%m-%dT%H:%M:%SZ}"


def two_values(a: object, b: object) -> str:
    """Return two values with as many digits as it takes to tell them apart."""
    if isinstance(a, str) or isinstance(b, str):
        return " → ".join(printable_cut(repr(value), LONGEST_VALUE) for value in (a, b))
    shown = [str(a), str(b)]
    for digits in range(_FEWEST_DIGITS, _MOST_DIGITS + 1):
        shown = [_digits(value, digits) for value in (a, b)]
        if shown[0] != shown[1]:
            break
    return " → ".join(shown)


def _digits(value: object, digits: int) -> str:
    if isinstance(value, bool) or not isinstance(value, float | complex):
        return number(value)
    if isinstance(value, float) and not math.isfinite(value):
        return amount(value)
    return f"{value:.{digits}g}"
