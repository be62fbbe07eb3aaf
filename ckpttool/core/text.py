"""Text for people: printable names, numbers, sizes, durations, and suggestions for misspelled words."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence

from ckpttool.core.errors import UsageError
from ckpttool.core.report import Sentence

# Printable ------------------------------------------------------------------------------------------


ELLIPSIS = "…"
LONGEST = 4096
"""Limit on the characters of a name or a sentence: Linux's for paths. Names in files may be longer."""
_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
# Control, format (bidirectional marks, zero-width), surrogate, private use, unassigned, line separators.
_UNFIT = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})


def printable(text: str | Sentence) -> str:
    """Return the text with escapes for all characters that could move a cursor or hide text."""
    text = str(text)
    if text.isascii() and text.isprintable():
        return text
    return "".join(one if is_printable(one) else _escape(one) for one in text)


def _escape(character: str) -> str:
    if character in _SHORT:
        return _SHORT[character]
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def is_printable(character: str) -> bool:
    """Return whether a character shows as itself and doesn't move a cursor."""
    return unicodedata.category(character) not in _UNFIT


def cut(text: str, room: int) -> str:
    """Return a text without its end if it has more characters than ``room``."""
    return text if len(text) <= room else f"{text[: room - 1]}{ELLIPSIS}"


def without_middle(text: str, room: int, width: Callable[[str], int] = len, start: int | None = None) -> str:
    """Return a text without its middle if it is wider than ``room``.

    Args:
        text: The text.
        room: Maximum width.
        width: Measures a text, in characters by default.
        start: Width of its beginning that is kept; by default a third.
    """
    if width(text) <= room:
        return text
    end = (room - 1) * 2 // 3 if start is None else room - 1 - start
    first, last = fitting_prefix(text, room - 1 - end, width), fitting_prefix(text[::-1], end, width)
    return f"{first}{ELLIPSIS}{last[::-1]}"


def fitting_prefix(text: str, room: int, width: Callable[[str], int]) -> str:
    """Return the longest prefix of a text that fits into a width."""
    fits = text[:room]
    while width(fits) > room:
        fits = fits[:-1]
    return fits


def printable_cut(text: str | Sentence, longest: int = LONGEST) -> str:
    """Return a text from a file, with escapes for unprintable characters and cut to a length."""
    return cut(printable(str(text)[: longest + 1]), longest)


# Numbers --------------------------------------------------------------------------------------------


_BYTES = ("kB", "MB", "GB", "TB", "PB")
_SMALL, _LARGE = 0.01, 10_000.0
LONGEST_VALUE = 60
_FEWEST_DIGITS, _MOST_DIGITS = 4, 17  # 17 distinguish all float64


def number(value: object) -> str:
    """Return a number with thousands separators, or with six significant digits."""
    if isinstance(value, float):
        return f"{value:.6g}"
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    return f"{value:,}" if is_whole else printable(str(value))


def file_size(nbytes: int) -> str:
    """Return a size in bytes rounded to a unit: 1.2 GB, by powers of 1,000."""
    if nbytes < 1000:
        return f"{nbytes} B"
    # From 999.5 on, three digits would round to 1000, and from 9.95 on, one decimal to 10.0.
    power = 1
    while power < len(_BYTES) and nbytes >= 999.5 * 1000**power:
        power += 1
    size = nbytes / 1000**power
    return f"{size:.1f} {_BYTES[power - 1]}" if size < 9.95 else f"{size:.0f} {_BYTES[power - 1]}"


def amount(value: float) -> str:
    """Return a magnitude in two or three digits: 0.125, 1.0e-3, 3."""
    if not math.isfinite(value):
        return "NaN" if value != value else "inf" if value > 0 else "-inf"
    if value == 0 or _SMALL <= abs(value) < 999.5:  # from there on three digits round to 1e+03
        return f"{value:.3g}"
    if 999.5 <= abs(value) < _LARGE:
        return f"{value:,.0f}"
    mantissa, _, exponent = f"{value:.1e}".partition("e")
    return f"{mantissa}e{int(exponent)}"


def share(part: int, whole: int) -> str:
    """Return a part of a whole in percent; less than all of it is never 100 %."""
    if not whole or part in (0, whole):
        return "100%" if part else "0%"
    percent = 100 * part / whole
    return "<0.1%" if percent < 0.1 else f"{min(percent, 99.9):.1f}%"


def shape_text(shape: tuple[int, ...]) -> str:
    """Return a shape, its sizes joined by crosses."""
    return "×".join(map(str, shape)) or "scalar"


def index_text(index: tuple[int, ...]) -> str:
    """Return the index of an element: [3, 5], or nothing for a scalar."""
    return f"[{', '.join(map(str, index))}]" if index else ""


def utc_time(nanoseconds: int) -> str | None:
    """Return a time as ISO 8601 in UTC, to the second; None if out of range for a datetime."""
    from datetime import datetime, timezone

    try:
        when = datetime.fromtimestamp(nanoseconds // 10**9, timezone.utc)
    except (ValueError, OverflowError, OSError):
        return None
    return f"{when:%Y-%m-%dT%H:%M:%SZ}"


def two_values(a: object, b: object) -> str:
    """Return two values with as many digits as it takes to distinguish them."""
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


# Durations and sizes in options ----------------------------------------------------------------------


_UNITS = {"y": 366 * 86400, "mo": 31 * 86400, "w": 7 * 86400, "d": 86400, "h": 3600, "m": 60, "s": 1}
# The units are in order, each at most once; ``m`` and ``min`` are minutes, ``mo`` months.
_DURATION = (
    r"(?a)(?:(?P<y>\d{1,3})y)?(?:(?P<mo>\d{1,4})mo)?(?:(?P<w>\d{1,5})w)?(?:(?P<d>\d{1,6})d)?(?:(?P<h>\d{1,6})h)?"
    r"(?:(?P<m>\d{1,6})m(?:in)?)?(?:(?P<s>\d{1,9})s)?"
)
"""Patterns are compiled at their first use, as few commands need them."""
_BARE = r"(?a)(?:.*[a-z])?0*(\d{1,18})"
_SECONDS = r"(?a)\d{1,9}"
_BARE_MINUTES = r"[0-9]m(?!o|in)"
_SIZE = r"(?a)(\d{1,18}(?:\.\d{1,9})?) ?(?:([kKMGTP])(i?)B?|B)"
_LENIENT_SIZE = r"(?ai)(\d{1,18}(?:\.\d{1,18})?)\s*([kmgt]?)(i?)b?"
_NO_UNIT = r"(?a)\d{1,18}(?:\.\d{1,9})?"
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}


def seconds(duration: str, *, is_lenient: bool = False) -> int:
    """Return the seconds of a duration such as ``7d12h``, ``90min``, ``2w``, ``6mo``, ``1y``, or of ``0``.

    ``m`` are minutes. A month counts as 31 days and a year as 366, since too long is safer than too short.
    With ``is_lenient`` a number without a unit is in seconds.

    Raises:
        UsageError: It isn't a duration, or a number has no unit.
    """
    text = duration.strip()
    if text == "0":
        return 0
    if is_lenient and re.fullmatch(_SECONDS, text):
        return int(text)
    match = re.fullmatch(_DURATION, text)
    if match is not None and any(match.groups()):
        return sum(int(match[unit] or 0) * nominal for unit, nominal in _UNITS.items())
    if (bare := re.fullmatch(_BARE, text)) is not None and re.fullmatch(_DURATION, f"{text}s"):
        number, where = bare[1], "" if bare[1] == text else f"{text}: "
        units = f"{number}s, {number}min, {number}h or {number}d"
        raise UsageError(f"{where}{number} has no unit (such as {units})")
    raise UsageError(f"invalid duration: {duration!r} (such as 7d12h, 90min or 2w)")


def within(duration: str) -> int:
    """Return the seconds of a duration for ``--keep-within``, where ``m`` is refused: it may mean months."""
    if re.search(_BARE_MINUTES, duration):
        raise UsageError(f"{duration!r} could be minutes or months (use min or mo)")
    return seconds(duration)


def nbytes(size: str, *, is_lenient: bool = False) -> int:
    """Return the bytes of a size such as ``200GB``, ``1.5TiB`` or ``4096B``, or of ``0``.

    ``GB`` is 10⁹ bytes, ``GiB`` 2³⁰; the ``B`` after such a letter is optional. With ``is_lenient`` a number
    without a unit is in bytes, and case doesn't matter.

    Raises:
        UsageError: It isn't a size, or has no unit.
    """
    text = size.strip()
    if text == "0":
        return 0
    if not is_lenient and re.fullmatch(_NO_UNIT, text):
        raise UsageError(f"{text} has no unit (such as {text}B, {text}MB or {text}GB)")
    match = re.fullmatch(_LENIENT_SIZE if is_lenient else _SIZE, text)
    if match is None:
        raise UsageError(f"invalid size: {size!r} (such as 200GB, 1.5TiB or 4096B)")
    from decimal import Decimal

    number, unit, binary = match.groups()
    return int(Decimal(number) * (1024 if binary else 1000) ** _POWERS[(unit or "").lower()])


def duration(seconds: int) -> str:
    """Return a duration in days, hours, minutes and seconds: ``7d12h``."""
    parts = []
    for unit, nominal in _UNITS.items():
        if unit not in ("y", "mo", "w") and seconds >= nominal:
            parts.append(f"{seconds // nominal}{'min' if unit == 'm' else unit}")
            seconds %= nominal
    return "".join(parts) or "0s"


def size(nbytes: int) -> str:
    """Return an exact size, in the largest unit with at most one decimal: ``200 GB``, ``1.5 TiB``."""
    for base, units in ((1000, ("PB", "TB", "GB", "MB", "kB")), (1024, ("PiB", "TiB", "GiB", "MiB", "KiB"))):
        for power, unit in zip(range(5, 0, -1), units, strict=True):
            tenths, remainder = divmod(nbytes * 10, base**power)
            if not remainder and tenths >= 10:
                count, tenth = divmod(tenths, 10)
                return f"{count:,}.{tenth} {unit}" if tenth else f"{count:,} {unit}"
    return f"{nbytes:,} byte{'' if nbytes == 1 else 's'}"


# Names and words -------------------------------------------------------------------------------------


SHOWN_NAMES = 3
"""Names in a sentence; the others are counted."""
_LONGEST_NAME = 79
"""Limit on the characters of a name in a sentence; Lightning writes a callback's arguments into its key."""


def counted(count: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless it is 1."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def first_names(names: Sequence[str]) -> str:
    """Return the first names in a list, and the number of the others: ``a, b, c and 4 more``."""
    more = f" and {len(names) - SHOWN_NAMES:,} more" if len(names) > SHOWN_NAMES else ""
    shown = (without_middle(name, _LONGEST_NAME, start=_LONGEST_NAME // 2) for name in names[:SHOWN_NAMES])
    return ", ".join(shown) + more


_LEAST_LIKENESS = 0.7
"""Least ratio of difflib; that of ``Simple`` and ``SimpleModel`` is just above."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return "did you mean" with the closest known word, or an empty text if none is close."""
    close = closest(word, known)
    return f"did you mean {close}?" if close else ""


def closest(word: str, known: Iterable[str]) -> str | None:
    """Return the closest known word: one that ends in ``.word``, or has a similar spelling."""
    from difflib import get_close_matches

    names = list(known)
    if ends := [name for name in names if name.endswith(f".{word}")]:
        return min(ends, key=lambda name: name.count("."))
    folded = {_fold(name): name for name in reversed(names)}
    close = get_close_matches(_fold(word), folded, 1, _LEAST_LIKENESS)
    return folded[close[0]] if close else None


def _fold(word: str) -> str:
    return word.lower().replace("_", "-")
