"""How people write durations and sizes: ``7d12h``, ``90min``, ``200GB``, ``1.5TiB``."""

from __future__ import annotations

import re
from decimal import Decimal

from ckpttool.core.errors import UsageError

_UNITS = {"y": 366 * 86400, "mo": 31 * 86400, "w": 7 * 86400, "d": 86400, "h": 3600, "m": 60, "s": 1}
_DURATION = re.compile(
    r"(?:(?P<y>\d{1,3})y)?(?:(?P<mo>\d{1,4})mo)?(?:(?P<w>\d{1,5})w)?(?:(?P<d>\d{1,6})d)?(?:(?P<h>\d{1,6})h)?"
    r"(?:(?P<m>\d{1,6})m(?:in)?)?(?:(?P<s>\d{1,9})s)?",
    re.ASCII,
)
_BARE = re.compile(r"(?:.*[a-z])?0*(\d{1,18})", re.ASCII)
_SECONDS = re.compile(r"\d{1,9}", re.ASCII)
_BARE_MINUTES = re.compile(r"[0-9]m(?!o|in)")
_SIZE = re.compile(r"(\d{1,18}(?:\.\d{1,9})?) ?(?:([kKMGTP])(i?)B?|B)", re.ASCII)
_LENIENT_SIZE = re.compile(r"(\d{1,18}(?:\.\d{1,18})?)\s*([kmgt]?)(i?)b?", re.ASCII | re.IGNORECASE)
_NO_UNIT = re.compile(r"\d{1,18}(?:\.\d{1,9})?", re.ASCII)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}


def seconds(duration: str, *, is_lenient: bool = False) -> int:
    """Return the seconds of a duration such as ``7d12h``, ``90min``, ``2w``, ``6mo``, ``1y``, or of ``0``.

    ``m`` are minutes. A month counts as 31 days and a year as 366: rather too long than too short. With
    ``is_lenient`` a number alone is of seconds.

    Raises:
        UsageError: It is none, or a number has no unit.
    """
    text = duration.strip()
    if text == "0":
        return 0
    if is_lenient and _SECONDS.fullmatch(text):
        return int(text)
    match = _DURATION.fullmatch(text)
    if match is not None and any(match.groups()):
        return sum(int(match[unit] or 0) * nominal for unit, nominal in _UNITS.items())
    if (bare := _BARE.fullmatch(text)) is not None and _DURATION.fullmatch(f"{text}s"):
        number, where = bare[1], "" if bare[1] == text else f"{text}: "
        units = f"{number}s, {number}min, {number}h or {number}d"
        raise UsageError(f"{where}{number} of what? (such as {units})")
    raise UsageError(f"no duration: {duration!r} (such as 7d12h, 90min or 2w)")


def within(duration: str) -> int:
    """Return the seconds of a duration for ``--keep-within``; ``m`` is refused: elsewhere it is months."""
    if _BARE_MINUTES.search(duration):
        raise UsageError(f"{duration!r} could be minutes or months (say min or mo)")
    return seconds(duration)


def nbytes(size: str, *, is_lenient: bool = False) -> int:
    """Return the bytes of a size such as ``200GB``, ``1.5TiB`` or ``4096B``, or of ``0``.

    ``GB`` is 10⁹ bytes, ``GiB`` 2³⁰; behind such a letter the ``B`` may be left out. With ``is_lenient`` a
    number alone is of bytes, and capitals are as good as small letters.

    Raises:
        UsageError: It is none, or has no unit.
    """
    text = size.strip()
    if text == "0":
        return 0
    if not is_lenient and _NO_UNIT.fullmatch(text):
        raise UsageError(f"{text} of what? (such as {text}B, {text}MB or {text}GB)")
    match = (_LENIENT_SIZE if is_lenient else _SIZE).fullmatch(text)
    if match is None:
        raise UsageError(f"no size: {size!r} (such as 200GB, 1.5TiB or 4096B)")
    number, unit, binary = match.groups()
    return int(Decimal(number) * (1024 if binary else 1000) ** _POWERS[(unit or "").lower()])


def duration(seconds: int) -> str:
    """Return a duration as people write it: ``7d12h``."""
    parts = []
    for unit, nominal in _UNITS.items():
        if unit not in ("y", "mo", "w") and seconds >= nominal:
            parts.append(f"{seconds // nominal}{'min' if unit == 'm' else unit}")
            seconds %= nominal
    return "".join(parts) or "0s"


def size(nbytes: int) -> str:
    """Return a size as people write it, where one decimal says it exactly: ``200 GB``, ``1.5 TiB``."""
    for base, units in ((1000, ("PB", "TB", "GB", "MB", "kB")), (1024, ("PiB", "TiB", "GiB", "MiB", "KiB"))):
        for power, unit in zip(range(5, 0, -1), units, strict=True):
            tenths, remainder = divmod(nbytes * 10, base**power)
            if not remainder and tenths >= 10:
                count, tenth = divmod(tenths, 10)
                return f"{count:,}.{tenth} {unit}" if tenth else f"{count:,} {unit}"
    return f"{nbytes:,} byte{'' if nbytes == 1 else 's'}"
