"""Splits many checkpoints into parts for processes, and samples those that are read in full.

Tasks of a job array don't communicate: each finds all checkpoints, and computes the same parts. Samples take
turns, so that each checkpoint is read in full within some days.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from math import ceil
from typing import NamedTuple

from ckpttool.core.errors import UsageError
from ckpttool.core.options import SELECTION_PANEL, option

_PART = re.compile(r"(\d{1,6})/(\d{1,6})", re.ASCII)
_PERCENT = re.compile(r"(\d{1,3}(?:\.\d{1,6})?)%", re.ASCII)
_OPENING = 1 << 20
"""Bytes that can be read in the time that it takes to open a checkpoint, approximately."""


class Part(NamedTuple):
    """One of several parts of the work, numbered from 1."""

    number: int
    of: int

    @classmethod
    def parse(cls, text: str) -> Part:
        """Return the part of a text such as ``3/8``."""
        match = _PART.fullmatch(text)
        if match is None or not 1 <= int(match[1]) <= int(match[2]):
            raise UsageError(f"invalid part: {text!r} (such as 1/8 to 8/8)")
        return cls(int(match[1]), int(match[2]))

    def __str__(self) -> str:
        return f"{self.number:,} of {self.of:,}"


def split(sizes: Mapping[str, int], parts: int) -> dict[str, int]:
    """Return the number of each checkpoint's part, so that parts have about equal work.

    Args:
        sizes: Bytes of each checkpoint by path, in any order.
        parts: Number of parts.
    """
    # Greedy: the largest checkpoint first, each to the part with the least work so far.
    loads = [(0, number) for number in range(1, parts + 1)]
    heapify(loads)
    numbers: dict[str, int] = {}
    for path, nbytes in sorted(sizes.items(), key=lambda item: (-item[1], item[0])):
        load, number = loads[0]
        numbers[path] = number
        heapreplace(loads, (load + nbytes + _OPENING, number))
    return numbers


def digest_of_work(sizes: Mapping[str, int], asked: Iterable[str]) -> str:
    """Return a hash of checkpoints and checks, which all parts of one job share."""
    # Parts that saw different checkpoints, or ran different checks, were split differently: together they
    # may miss some.
    from hashlib import sha256

    running = sha256()
    for word in (*asked, *(f"{path}\0{nbytes}" for path, nbytes in sorted(sizes.items()))):
        running.update(word.encode("utf-8", "surrogateescape") + b"\n")
    return running.hexdigest()[:32]


# Samples --------------------------------------------------------------------------------------------


class Sample(NamedTuple):
    """Size of a sample: a fraction of all bytes, or a number of bytes."""

    fraction: float | None = None
    nbytes: int = 0

    @classmethod
    def parse(cls, text: str) -> Sample:
        """Return the sample of a text such as ``5%`` or ``10G``."""
        from ckpttool.core.text import nbytes

        if (match := _PERCENT.fullmatch(text)) is None:
            sample = cls(nbytes=nbytes(text))
            is_possible = sample.nbytes > 0
        else:
            sample = cls(float(match[1]) / 100)
            is_possible = 0 < float(match[1]) <= 100
        if not is_possible:
            raise UsageError(f"invalid sample: {text!r} (such as 5% or 10G)")
        return sample

    def fraction_of(self, nbytes: int) -> float:
        """Return the fraction of a number of bytes that is read in full."""
        if self.fraction is not None:
            return self.fraction
        return min(1.0, self.nbytes / nbytes) if nbytes else 1.0


def choose(candidates: Sequence[tuple[str, int, str | None]], sample: Sample, day: int) -> set[str]:
    """Return the paths of the checkpoints that are read in full on a day.

    Of those with a record, the least recently read ones are chosen, up to their share of the bytes. Each of
    the others is chosen once in 1 / fraction days.

    Args:
        candidates: Path and bytes of each checkpoint, and the time of its last full read as sortable text;
            empty for never, None if it has no digests, which record it.
        sample: Size of the sample.
        day: Number of the day.
    """
    # At least one checkpoint with a record is read each day, however large it is. Those without a record
    # can't be ordered by their last read: a hash of the path spreads them over the days.
    fraction = sample.fraction_of(sum(nbytes for _, nbytes, _ in candidates))
    recorded = [(read_at, path, nbytes) for path, nbytes, read_at in candidates if read_at is not None]
    chosen: set[str] = set()
    room = fraction * sum(nbytes for _, _, nbytes in recorded)
    for _, path, nbytes in sorted(recorded):
        if chosen and room < 1:
            break
        chosen.add(path)
        room -= nbytes
    days = ceil(1 / fraction)
    unrecorded = (path for path, _, read_at in candidates if read_at is None)
    return chosen | {path for path in unrecorded if _turn(path, days) == day % days}


def _turn(path: str, days: int) -> int:
    """Return the number of the day, below ``days``, on which a checkpoint is read."""
    from hashlib import sha256

    digest = sha256(path.encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:8], "big") % days


# Options --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Options for the share of the work on many checkpoints that one process does."""

    part: Part | None = option(
        "--part",
        metavar="I/N",
        help="Process only part I of N of the checkpoints, for a job array.",
        parse=Part.parse,
        panel=SELECTION_PANEL,
    )
    sample: Sample | None = option(
        "--sample",
        metavar="5%|10G",
        help="Read only this much in full, a different part each day; check only the structure of the rest.",
        parse=Sample.parse,
        panel=SELECTION_PANEL,
    )
