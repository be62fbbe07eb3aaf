"""Numbers as people say them."""

from __future__ import annotations

from ckpttool.render.escape import printable

_UNITS = ("kB", "MB", "GB", "TB", "PB")


def file_size(nbytes: int) -> str:
    """Return bytes as people say them: 1.2 GB, by powers of 1,000."""
    if nbytes < 1000:
        return f"{nbytes} B"
    power = 1
    while power < len(_UNITS) and nbytes >= 999.5 * 1000**power:
        power += 1
    size = nbytes / 1000**power
    return f"{size:.1f} {_UNITS[power - 1]}" if size < 9.95 else f"{size:.0f} {_UNITS[power - 1]}"


def number(value: object) -> str:
    """Return a number without digits that nobody reads."""
    if isinstance(value, float):
        return f"{value:.6g}"
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    return f"{value:,}" if is_whole else printable(str(value))
