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
        help="Where the checkpoints lie. [default: what ckpttool.toml names, or .]",
        show_default=False,
    ),
]

KeepLast = Annotated[int | None, _rule("--keep", "Keep the newest N intact ones.", "N", "--keep-last")]
KeepBest = Annotated[int | None, _rule("--keep-best", "Keep the N best by --metric.")]
Metric = Annotated[str | None, _rule("--metric", "What --keep-best goes by: val_loss.", "NAME")]
BestMode = Annotated[
    Mode | None, _rule("--mode", "Whether its least or its greatest value is best.", metavar=None)
]
KeepEverySteps = Annotated[
    int | None, _rule("--keep-every-steps", "Keep one of each N steps, the first from a multiple of N on.")
]
KeepEveryEpochs = Annotated[int | None, _rule("--keep-every-epochs", "Keep one of each N epochs likewise.")]
KeepHourly = Annotated[int | None, _rule("--keep-hourly", "Keep the newest of each of the last N hours.")]
KeepDaily = Annotated[int | None, _rule("--keep-daily", "… of the last N days that have any.")]
KeepWeekly = Annotated[int | None, _rule("--keep-weekly", "… of the last N weeks, which begin on Mondays.")]
KeepMonthly = Annotated[int | None, _rule("--keep-monthly", "… of the last N months.")]
KeepYearly = Annotated[int | None, _rule("--keep-yearly", "… of the last N years.")]
KeepWithin = Annotated[
    str | None, _rule("--keep-within", "Keep what is at most TIME (7d12h) older than the newest.", "TIME")
]
OlderThan = Annotated[
    str | None,
    _rule(
        "--older-than",
        "Remove only what was saved more than TIME (30d) ago; of the trash, what went so long ago.",
        "TIME",
    ),
]
KeepName = Annotated[list[str], _rule("--keep-name", "Keep what is named so. May be repeated.", "GLOB")]
MaxSize = Annotated[
    str | None,
    _rule("--max-size", "Keep the newest of each series that fit into SIZE (200GB).", "SIZE"),
]
MaxTotalSize = Annotated[
    str | None,
    _rule("--max-total-size", "Keep the newest of all series that fit into SIZE together.", "SIZE"),
]
Incomplete = Annotated[
    Fate | None,
    _rule("--incomplete", "What becomes of incomplete older ones. [default: keep]", metavar=None),
]
Failed = Annotated[
    FailedFate | None,
    _rule(
        "--failed",
        "Look for runs that came to nothing: list them, or trash all but what is good.",
        metavar=None,
    ),
]

Config = Annotated[
    str | None, _option(LOOKED_AT, "--config", metavar="FILE", text="Take paths and rules of this file.")
]
Series = Annotated[
    list[str],
    _option(
        LOOKED_AT,
        "--series",
        metavar="GLOB",
        text="What matches is one series, though its names don't say so. May be repeated.",
    ),
]
By = Annotated[
    GroupBy | None,
    _option(
        LOOKED_AT,
        "--group-by",
        text="Tell series by directory alone, or by name or format in it; none: make one of all. "
        "[default: by all three]",
    ),
]
Metrics = Annotated[
    list[str],
    _option(
        LOOKED_AT,
        "--metrics",
        metavar="FILE",
        text="Take metrics from this log, too: CSV, JSON lines or TensorBoard. May be repeated.",
    ),
]

MinAge = Annotated[
    str | None,
    _option(CARRIED_OUT, "--min-age", metavar="TIME", text="Keep what changed less than TIME (2h) ago."),
]
MaxDelete = Annotated[
    str | None,
    _option(
        CARRIED_OUT,
        "--max-delete",
        metavar="N|PCT",
        text="Change nothing if more than N, or 20%, would go.",
    ),
]
Verify = Annotated[
    Depth | None,
    _option(
        CARRIED_OUT,
        "--verify",
        text="How survivors are verified first: every byte, or the structure. [default: full]",
    ),
]
Trash = Annotated[
    bool,
    _option(CARRIED_OUT, "--trash", text="Keep what goes until the trash is emptied: undo takes it back."),
]
EmptyTrash = Annotated[
    bool, _option(CARRIED_OUT, "--empty-trash", text="Remove what --trash has kept, and nothing else.")
]
Yes = Annotated[bool, _option(CARRIED_OUT, "--yes", "-y", text="Don't ask.")]

DryRun = Annotated[bool, _option(SHOWN, "--dry-run", "-n", text="Say what would go; remove nothing.")]
Check = Annotated[bool, _option(SHOWN, "--check", text="Remove nothing; status 1 if something would go.")]
Explain = Annotated[
    str | None,
    _option(SHOWN, "--explain", metavar="PATH", text="Say why this one stays or goes; remove nothing."),
]
