"""The options that several commands share, and the panels of the help that options stand in."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer

RULES = "Rules (a checkpoint stays if any rule keeps it)"
LOOKED_AT = "Selection"
CARRIED_OUT = "Execution"
SHOWN = "Output"


class Depth(str, enum.Enum):
    """How a checkpoint is verified."""

    QUICK = "quick"
    FULL = "full"


class TensorSelection(str, enum.Enum):
    """Which tensors of a checkpoint a command takes."""

    WEIGHTS = "weights"
    ALL = "all"


class Mode(str, enum.Enum):
    """Which values of a metric are good."""

    MIN = "min"
    MAX = "max"


Json = Annotated[bool, typer.Option("--json", help="Print a JSON document.", rich_help_panel=SHOWN)]
Jobs = Annotated[
    int | None,
    typer.Option(
        "--jobs",
        "-j",
        min=1,
        help="Number of threads. [default: number of CPUs]",
        show_default=False,
        rich_help_panel=CARRIED_OUT,
    ),
]
Exclude = Annotated[
    list[str],
    typer.Option(
        "--exclude",
        metavar="GLOB",
        help="Skip matching paths. May be repeated.",
        rich_help_panel=LOOKED_AT,
    ),
]
MaxDepth = Annotated[
    int | None,
    typer.Option(
        "--max-depth",
        min=0,
        metavar="N",
        help="Descend at most N levels.",
        show_default=False,
        rich_help_panel=LOOKED_AT,
    ),
]
Quiet = Annotated[
    bool,
    typer.Option(
        "--quiet",
        "-q",
        help="Print only errors; see the exit status.",
        rich_help_panel=SHOWN,
    ),
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Print more details.", rich_help_panel=SHOWN)]
Directory = Annotated[
    Path,
    typer.Argument(
        metavar="[DIR]", readable=False, help="Directory of checkpoints. [default: .]", show_default=False
    ),
]
Null = Annotated[
    bool,
    typer.Option("--null", "-0", help="End each path with NUL, for xargs -0.", rich_help_panel=SHOWN),
]
Recursive = Annotated[
    bool, typer.Option("--recursive", "-r", help="Search subdirectories, too.", rich_help_panel=LOOKED_AT)
]


def is_given(value: object) -> bool:
    """Tell whether an option was given: a number that is 0 was, though it equals False."""
    return value is not None and value is not False and value not in ([], ())
