"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

from ckpttool.cli.grouped import CARRIED_OUT, LOOKED_AT, SHOWN

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.", rich_help_panel=SHOWN)]
Jobs = Annotated[
    int | None,
    typer.Option(
        "--jobs",
        "-j",
        min=1,
        help="Number of threads. [default: CPUs]",
        show_default=False,
        rich_help_panel=CARRIED_OUT,
    ),
]
Exclude = Annotated[
    list[str],
    typer.Option(
        "--exclude",
        metavar="GLOB",
        help="Pass over what matches. May be repeated.",
        rich_help_panel=LOOKED_AT,
    ),
]
MaxDepth = Annotated[
    int | None,
    typer.Option(
        "--max-depth",
        min=0,
        metavar="N",
        help="Descend N levels at most.",
        show_default=False,
        rich_help_panel=LOOKED_AT,
    ),
]
Quiet = Annotated[
    bool,
    typer.Option(
        "--quiet",
        "-q",
        help="Print nothing but errors; the exit status tells.",
        rich_help_panel=SHOWN,
    ),
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Say more.", rich_help_panel=SHOWN)]
