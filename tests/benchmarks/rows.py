"""Rows of the table: a claim and what was measured, with the verdict."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.benchmarks import data
from tests.benchmarks.claims import PYTHON, Claim
from tests.benchmarks.measure import Measurement, Ratio, ratio_of

_NOT_IMPORTED = {
    "inspect": ("torch", "tensorflow", "numpy"),
    "diff": ("torch", "tensorflow", "keras", "paddle", "matplotlib", "numpy"),
    "verify": ("torch", "tensorflow", "keras", "paddle", "ckpttool.predict.jobs", "ckpttool.predict.run"),
}
_MEGABYTE = 1_000_000


TOLERANCE = 1.15
"""A bar is missed only beyond it: so much of a ratio is the machine's."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table; times in milliseconds, memory in MB, None where there is nothing to tell.

    Attributes:
        ours, theirs: Processor time.
        ratio: Of both, round by round.
        wall: How long our command took.
        bars: What the row has to stay below, in words.
        is_met: Whether it does; None where there is no bar, or it was not measured.
        note: Why something was not measured.
    """

    job: str
    ours: float | None = None
    peer: str | None = None
    theirs: float | None = None
    ratio: Ratio | None = None
    wall: float | None = None
    resident: float | None = None
    bars: tuple[str, ...] = ()
    is_met: bool | None = None
    note: str | None = None

    @property
    def is_unmeasured(self) -> bool:
        """Tell whether there is a bar, and nobody knows whether it is met."""
        return bool(self.bars) and self.is_met is None


def row(claim: Claim, measured: Mapping[str, Measurement], skipped: str | None = None) -> Row:
    """Return the verdict on a claim. What failed is not met; what was skipped is neither."""
    limits = ((claim.ratio, "{:g} ×"), (claim.resident, "{:g} MB"))
    bars = tuple("≤ " + text.format(limit) for limit, text in limits if limit is not None)
    if skipped is not None:
        return Row(claim.job, peer=f"({skipped})", bars=bars, note=f"skipped: {skipped}")
    ours, peer = measured[claim.ours], measured[claim.peer] if claim.peer else None
    if ours.failure is not None:
        return Row(claim.job, peer=claim.peer, bars=bars, is_met=False, note=ours.failure)
    theirs, ratio, note = None, None, None
    if peer is not None and peer.failure is None:
        theirs, ratio = peer.processor, ratio_of(ours, peer)
    elif peer is not None:
        note = f"{claim.peer}: {peer.failure}"
    resident = ours.resident / _MEGABYTE
    pairs = ((ratio and ratio.median, claim.ratio), (resident, claim.resident))
    kept = [value <= limit * TOLERANCE for value, limit in pairs if value is not None and limit is not None]
    is_untold = claim.ratio is not None and ratio is None
    is_met = None if all(kept) and (is_untold or not kept) else all(kept)
    return Row(claim.job, ours.processor, claim.peer, theirs, ratio, ours.wall, resident, bars, is_met, note)


def imports_rows(folder: Path) -> Iterator[Row]:
    """Yield the verdicts on what commands import for a checkpoint, without what is asked for only."""
    path = folder / "model.pth"
    data.write_many_tensors(path, 4)
    for name, unwanted in _NOT_IMPORTED.items():
        yield _imports_row(name, path, unwanted)


def _imports_row(name: str, path: Path, unwanted: Sequence[str]) -> Row:
    paths = [str(path)] * (2 if name == "diff" else 1)
    command = [PYTHON, "-X", "importtime", "-m", "ckpttool", name, *paths]
    ended = subprocess.run(command, capture_output=True, text=True)
    imported = re.findall(r"^import time:.*\| +(\S+)$", ended.stderr, re.MULTILINE)
    found = [one for one in unwanted if any(f"{each}.".startswith(f"{one}.") for each in imported)]
    job = f"{name} imports none of {', '.join(unwanted)}"
    if ended.returncode != 0 or "ckpttool" not in imported:
        return Row(job, is_met=False, note=f"exit {ended.returncode}")
    return Row(job, is_met=not found, note=f"{', '.join(found)} imported" if found else None)
