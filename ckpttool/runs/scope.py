"""Scope of a survey: the checkpoints of a directory to look at, and their grouping into series."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypedDict

from ckpttool.core.options import SELECTION_PANEL, Reach, option

GroupBy = Literal["run", "parent", "prefix", "format", "none"]

_scope = partial(option, panel=SELECTION_PANEL, reach=Reach.HARMLESS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """Checkpoints of a directory to look at, and their grouping into series: each attribute is an option.

    ``metrics`` are logs and trackers with metrics of checkpoints, by step or epoch.
    """

    recursive: bool = _scope(
        *("--recursive", "-r"), negation="--no-recursive", help="Also search subdirectories.", default=True
    )
    exclude: Sequence[str] = _scope(
        "--exclude", metavar="GLOB", help="Skip matching paths.", example=["*.tmp"], default=()
    )
    max_depth: int | None = _scope(
        "--max-depth", metavar="N", help="Descend at most N levels.", minimum=0, example=2
    )
    series: Sequence[str] = _scope(
        "--series",
        metavar="GLOB",
        help="Treat matching checkpoints as one series.",
        example=["model_*.pt"],
        default=(),
    )
    group_by: GroupBy | None = _scope(
        "--group-by",
        help="Group into series by run, directory, name prefix or format; none: one series of all. "
        "[default: directory, name and format]",
    )
    metrics: Sequence[str] = _scope(
        "--metrics",
        metavar="LOG",
        help="Also read metrics from this log: CSV, JSON lines, TensorBoard, mlflow:EXPERIMENT or wandb:DIR.",
        example=["metrics.csv"],
        reach=Reach.BELOW,
        default=(),
    )

    @property
    def joins_slim(self) -> bool:
        """Return whether checkpoints with and without training state are one series."""
        return False


class ScopeKeywords(TypedDict, total=False):
    """The attributes of ``Scope``, for type checkers."""

    recursive: bool
    exclude: Sequence[str]
    max_depth: int | None
    series: Sequence[str]
    group_by: GroupBy | None
    metrics: Sequence[str]


WHOLE_TREE = Scope()
"""Everything in a directory and below."""
