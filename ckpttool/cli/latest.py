"""``ckpttool latest``: the newest checkpoint that is intact, for a job to resume from."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer

from ckpttool.cli.options import Jobs, Json
from ckpttool.cli.output import print_json, say_error, say_warning
from ckpttool.cli.series import Directory, Null, Recursive, print_paths, say_journals


class Depth(str, enum.Enum):
    """How a checkpoint is verified."""

    QUICK = "quick"
    FULL = "full"


class Mode(str, enum.Enum):
    """Which values of a metric are good."""

    MIN = "min"
    MAX = "max"


Verify = Annotated[
    Depth, typer.Option("--verify", help="Check the structure alone, or every byte.", show_default=False)
]


def latest(
    directory: Directory = Path(),
    json: Json = False,
    null: Null = False,
    recursive: Recursive = False,
    verify: Verify = Depth.QUICK,
    best: Annotated[
        str | None, typer.Option("--best", metavar="METRIC", help="That of the best METRIC instead.")
    ] = None,
    mode: Annotated[
        Mode | None, typer.Option("--mode", help="Whether the least or the greatest is best.")
    ] = None,
    jobs: Jobs = None,
) -> int:
    """Print the path of the newest intact checkpoint; status 1 where there is none."""
    from ckpttool.series.listing import latest as find_latest

    found = find_latest(
        directory,
        recursive=recursive,
        depth=verify.value,
        best=best,
        mode=None if mode is None else mode.value,
        jobs=jobs,
    )
    say_journals(found.journals)
    for problem in found.passed_over:
        say_warning(f"{problem.path}: passed over: {problem.message}")
    if json:
        from ckpttool.render.json_series import latest_document

        print_json(latest_document(found))
    elif found.entry is not None:
        print_paths([found.entry.path], null=null)
    if found.entry is None:
        say_error(found.reason or "")
    return int(found.entry is None)
