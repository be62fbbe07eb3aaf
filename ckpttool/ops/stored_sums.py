"""Compares what is known of files with the checksums that stores keep of them; nothing is read for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from ckpttool.core.errors import from_os_error
from ckpttool.storage import fs
from ckpttool.storage.checksums import TITLES, FileSums, StoredChecksums
from ckpttool.storage.work import in_order

REQUESTS_AT_ONCE = 16
_SHOWN_DIGITS = 16


def stored_checksums(paths: Iterable[str]) -> dict[str, StoredChecksums]:
    """Return the checksums that stores keep of objects, by their URLs; files of a disk are left out.

    Raises:
        CheckpointError: A store doesn't say what is there.
    """
    wanted = [path for path in paths if fs.place_of(path).keeps_checksums]
    return dict(zip(wanted, in_order(_ask, wanted, min(REQUESTS_AT_ONCE, len(wanted) or 1)), strict=True))


def _ask(url: str, check: Callable[[], None]) -> StoredChecksums:
    from ckpttool.storage.remote import checksums_of

    check()
    try:
        return checksums_of(url)
    except OSError as error:
        raise from_os_error(error, url) from error


def compare_sums(
    known: FileSums, stored: StoredChecksums, whose: str = "the store's"
) -> tuple[str | None, str | None]:
    """Return the algorithm of a checksum that both files have, or None, and how one differs, if it does."""
    common = None
    for checksum in stored.checksums:
        value = known.value_like(checksum)
        if value is None:
            continue
        if value != checksum.digits:
            kept = f"{whose} {TITLES[checksum.algorithm]} is {shown_digits(checksum.digits)}"
            return checksum.algorithm, f"{kept} instead of {shown_digits(value)}"
        common = common or checksum.algorithm
    return common, None


def shown_digits(digits: str) -> str:
    """Return digits as they stand in a sentence."""
    return digits if len(digits) <= _SHOWN_DIGITS else f"{digits[:_SHOWN_DIGITS]}…"


def why_unproven(reasons: Mapping[str, str]) -> str:
    """Return why files could not be compared, in words, from the reason of each by its name."""
    name, reason = next(iter(reasons.items()))
    more = f" (and {len(reasons) - 1:,} more)" if len(reasons) > 1 else ""
    return f"{name}{more} could not be compared: {reason}"
