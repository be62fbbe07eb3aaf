"""What a log says of some steps and epochs, and which others it has."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from ckpttool.core.errors import LimitExceeded

Number = int | float

MAX_NAMES = 10_000
"""The most names of metrics that a log may have."""

MAX_VALUES = 5_000_000
"""The most values that are kept of a log: so many metrics times so many checkpoints."""

STEPS = (
    "global_step",
    "step",
    "train/global_step",
    "trainer/global_step",
    "iteration",
    "iter",
    "num_updates",
    "_step",
)
"""What people and loggers call a column of steps; the first that there is counts."""

EPOCHS = ("epoch", "train/epoch", "trainer/epoch", "current_epoch")
"""Likewise of epochs."""


@dataclass(slots=True)
class Range:
    """Which numbers a log has: the least and the greatest; both None where it has none."""

    least: Number | None = None
    most: Number | None = None

    @classmethod
    def of(cls, numbers: Iterable[Number | None]) -> Range:
        """Return the range of those numbers that are known."""
        known = [number for number in numbers if number is not None]
        return cls(min(known, default=None), max(known, default=None))

    def add(self, number: Number) -> None:
        """Take a number in."""
        self.least = number if self.least is None else min(self.least, number)
        self.most = number if self.most is None else max(self.most, number)

    def __str__(self) -> str:
        return f"{self.least:g}" if self.least == self.most else f"{self.least:.10g} to {self.most:.10g}"


@dataclass(slots=True)
class Log:
    """What was read of a log; of several values at one place the last counts, since a restarted run appends.

    Attributes:
        path: The file or directory.
        numbers: The steps and epochs of which values are kept.
        by_step: What was measured at steps.
        by_epoch: What was measured at epochs of which no step is told.
        in_epoch: The last of what was measured at the steps of an epoch.
        by_checkpoint: What was measured at a checkpoint, by the name of its directory.
        steps: Which steps it has.
        epochs: Which epochs it has.
        counts_both: Whether it has epochs beside steps.
        warnings: What is doubtful about it.
        has_bare: Whether it has one of those steps and epochs without any number.
    """

    path: str
    numbers: Collection[Number]
    by_step: dict[Number, dict[str, float]] = field(default_factory=dict)
    by_epoch: dict[Number, dict[str, float]] = field(default_factory=dict)
    in_epoch: dict[Number, dict[str, float]] = field(default_factory=dict)
    by_checkpoint: dict[str, dict[str, float]] = field(default_factory=dict)
    steps: Range = field(default_factory=Range)
    epochs: Range = field(default_factory=Range)
    counts_both: bool = False
    warnings: list[str] = field(default_factory=list)
    has_bare: bool = False
    _names: dict[str, str] = field(default_factory=dict)
    _kept: int = 0

    def add(self, step: Number | None, epoch: Number | None, values: Mapping[str, float]) -> None:
        """Take what was measured at a step, at an epoch, or at both."""
        self.counts_both = self.counts_both or (step is not None and epoch is not None)
        by_epoch = self.by_epoch if step is None else self.in_epoch
        for number, known, kept in ((step, self.steps, self.by_step), (epoch, self.epochs, by_epoch)):
            if number is None or not math.isfinite(number):
                continue
            known.add(number)
            if number in self.numbers and values:
                self._keep(kept.setdefault(number, {}), values)
            elif number in self.numbers:
                self.has_bare = True

    def add_of_checkpoint(self, name: str, values: Mapping[str, float]) -> None:
        """Take what was measured at a checkpoint in a directory of this name."""
        self._keep(self.by_checkpoint.setdefault(name, {}), values)

    def _keep(self, kept: dict[str, float], values: Mapping[str, float]) -> None:
        for name, value in values.items():
            shared = self._names.setdefault(name, name)  # of equal names one is kept
            self._kept += shared not in kept
            kept[shared] = value
        if len(self._names) > MAX_NAMES:
            found = f"it has more than {MAX_NAMES:,} names of metrics"
            raise LimitExceeded(self.path, found, expected="fewer")
        if self._kept > MAX_VALUES:
            raise LimitExceeded(
                self.path, f"it has more than {MAX_VALUES:,} values of them", expected="fewer"
            )
