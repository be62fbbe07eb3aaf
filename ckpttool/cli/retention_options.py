"""The options of ``prune``: what stays, what is looked at, and how it is carried out."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated, Any

import typer

from ckpttool.cli.options import CARRIED_OUT, LOOKED_AT, RULES, SHOWN, Depth, Mode


class Fate(str, enum.Enum):
    """What becomes of incomplete checkpoints."""

    KEEP = "keep"
    REMOVE = "remove"


class FailedFate(str, enum.Enum):
    """What becomes of series that came to nothing."""

    LIST = "list"
    REMOVE = "remove"


class GroupBy(str, enum.Enum):
    """What a series is told by."""

    PARENT = "parent"
    PREFIX = "prefix"
    FORMAT = "format"
    NONE = "none"


def _option(panel: str, *names: str, text: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, show_default=False, **more)


def _rule(name: str, text: str, metavar: str | None = "N", *others: str, **more: Any) -> Any:
    return _option(RULES, name, *others, text=text, metavar=metavar, **more)


Directory = Annotated[
    Path | None,
    typer.Argument(
        metavar="[DIR]",
        readable=False,
        help="Directory of checkpoints. [default: paths in ckpttool.toml, or .]",
        show_default=False,
    ),
]

KeepLast = Annotated[int | None, _rule("--keep", "Keep the newest N intact checkpoints.", "N", "--keep-last")]
KeepBest = Annotated[int | None, _rule("--keep-best", "Keep the N best by --metric.")]
Metric = Annotated[str | None, _rule("--metric", "Metric for --keep-best, such as val_loss.", "NAME")]
BestMode = Annotated[
    Mode | None, _rule("--mode", "Whether the lowest or the highest value is best.", metavar=None)
]
KeepEverySteps = Annotated[
    int | None, _rule("--keep-every-steps", "Keep the first checkpoint at or after each multiple of N steps.")
]
KeepEveryEpochs = Annotated[
    int | None,
    _rule("--keep-every-epochs", "Keep the first checkpoint at or after each multiple of N epochs."),
]
KeepHourly = Annotated[
    int | None, _rule("--keep-hourly", "Keep the newest of each of the last N hours with checkpoints.")
]
KeepDaily = Annotated[
    int | None, _rule("--keep-daily", "Keep the newest of each of the last N days with checkpoints.")
]
KeepWeekly = Annotated[
    int | None, _rule("--keep-weekly", "Keep the newest of each of the last N weeks, which start on Monday.")
]
KeepMonthly = Annotated[int | None, _rule("--keep-monthly", "Keep the newest of each of the last N months.")]
KeepYearly = Annotated[int | None, _rule("--keep-yearly", "Keep the newest of each of the last N years.")]
KeepWithin = Annotated[
    str | None, _rule("--keep-within", "Keep checkpoints at most TIME (7d12h) older than the newest.", "TIME")
]
OlderThan = Annotated[
    str | None,
    _rule(
        "--older-than",
        "Remove only checkpoints saved more than TIME (30d) ago; from the trash, those removed before that.",
        "TIME",
    ),
]
KeepName = Annotated[
    list[str], _rule("--keep-name", "Keep checkpoints with matching names. May be repeated.", "GLOB")
]
MaxSize = Annotated[
    str | None,
    _rule("--max-size", "Keep the newest of each series, up to SIZE (200GB).", "SIZE"),
]
MaxTotalSize = Annotated[
    str | None,
    _rule("--max-total-size", "Keep the newest of all series together, up to SIZE.", "SIZE"),
]
Incomplete = Annotated[
    Fate | None,
    _rule("--incomplete", "What to do with incomplete older checkpoints. [default: keep]", metavar=None),
]
Failed = Annotated[
    FailedFate | None,
    _rule(
        "--failed",
        "Find failed runs: list them, or move all but their good checkpoints to the trash.",
        metavar=None,
    ),
]

Config = Annotated[
    str | None, _option(LOOKED_AT, "--config", metavar="FILE", text="Read paths and rules from this file.")
]
Series = Annotated[
    list[str],
    _option(
        LOOKED_AT,
        "--series",
        metavar="GLOB",
        text="Treat matching checkpoints as one series. May be repeated.",
    ),
]
By = Annotated[
    GroupBy | None,
    _option(
        LOOKED_AT,
        "--group-by",
        text="Separate series by directory alone, or also by name or format; none: all are one series. "
        "[default: by all three]",
    ),
]
Metrics = Annotated[
    list[str],
    _option(
        LOOKED_AT,
        "--metrics",
        metavar="FILE",
        text="Also read metrics from this log: CSV, JSON lines or TensorBoard. May be repeated.",
    ),
]

MinAge = Annotated[
    str | None,
    _option(
        CARRIED_OUT, "--min-age", metavar="TIME", text="Keep checkpoints changed less than TIME (2h) ago."
    ),
]
MaxDelete = Annotated[
    str | None,
    _option(
        CARRIED_OUT,
        "--max-delete",
        metavar="N|PCT",
        text="Change nothing if more than N checkpoints, or 20%, would be removed.",
    ),
]
Verify = Annotated[
    Depth | None,
    _option(
        CARRIED_OUT,
        "--verify",
        text="First verify what is kept: every byte, or only the structure. [default: full]",
    ),
]
Trash = Annotated[
    bool,
    _option(CARRIED_OUT, "--trash", text="Move checkpoints to the trash, from which undo restores them."),
]
EmptyTrash = Annotated[
    bool, _option(CARRIED_OUT, "--empty-trash", text="Delete what is in the trash, and nothing else.")
]
Yes = Annotated[bool, _option(CARRIED_OUT, "--yes", "-y", text="Don't ask for confirmation.")]

DryRun = Annotated[
    bool, _option(SHOWN, "--dry-run", "-n", text="Show what would be removed; remove nothing.")
]
Check = Annotated[
    bool, _option(SHOWN, "--check", text="Remove nothing; exit with 1 if something would be removed.")
]
Explain = Annotated[
    str | None,
    _option(SHOWN, "--explain", metavar="PATH", text="Explain why PATH is kept or removed; remove nothing."),
]
