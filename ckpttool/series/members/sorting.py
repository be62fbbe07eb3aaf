"""What checkpoints can be sorted by: what they count, what they are, and what they were measured at."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ckpttool.errors import UsageError
from ckpttool.series.members.entry import Entry

SortKey = Callable[[Entry], Any]
"""Tells what comes first, the least; None where nobody knows."""

_DIGITS = re.compile(r"([0-9]+)")
_ORDERS: Mapping[str, SortKey] = {
    "epoch": lambda entry: entry.epoch,
    "step": lambda entry: entry.step,
    "age": lambda entry: -entry.modified_ns,
    "size": lambda entry: entry.nbytes,
    "name": lambda entry: _natural(entry.path),
}
"""What there is besides any metric."""


def sort_key(sort: str | None, entries: Sequence[Entry]) -> SortKey | None:
    """Return what checkpoints are sorted by, or None for the order in which they come.

    Raises:
        UsageError: It is a metric, and none of them has it.
    """
    if sort is None or sort in _ORDERS:
        return None if sort is None else _ORDERS[sort]
    require_metric(sort, entries, f"there is nothing {sort!r} to sort by", f"{', '.join(_ORDERS)}; ")
    return lambda entry: entry.metric(sort)


def require_metric(name: str | None, entries: Sequence[Entry], what: str = "", others: str = "") -> None:
    """Require that a metric is known of some checkpoint, where there are any.

    Raises:
        UsageError: It isn't; it tells which are.
    """
    if name is None or not entries or any(entry.metric(name) is not None for entry in entries):
        return
    known = known_metrics(entries)
    told = f"metrics: {', '.join(known)}" if known else "no checkpoint has any metric"
    raise UsageError(f"{what or f'no checkpoint has a metric {name!r}'} ({others}{told})")


def known_metrics(entries: Iterable[Entry]) -> list[str]:
    """Return the names of all metrics that some checkpoint has, as they come; the loss is the first."""
    names: dict[str, None] = {}
    has_loss = False
    for entry in entries:
        has_loss = has_loss or entry.loss is not None
        names |= dict.fromkeys(entry.metrics)
    return [*dict.fromkeys([*(["loss"] if has_loss else []), *names])]


def _natural(path: str) -> list[Any]:
    """Return a path as people sort it: numbers in it are compared as numbers."""
    parts: list[Any] = _DIGITS.split(path)
    parts[1::2] = map(int, parts[1::2])
    return parts
