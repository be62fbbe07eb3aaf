"""``ckpttool latest``: the newest checkpoint that is intact, for a job to resume from."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ckpttool.cli.options import Exclude, Jobs, Json, MaxDepth, Quiet
from ckpttool.cli.output import print_json, say_error, say_warning
from ckpttool.cli.series import Directory, Null, Recursive, print_paths, say_journals

if TYPE_CHECKING:
    from ckpttool.series.resuming import Latest


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
    quiet: Quiet = False,
    recursive: Recursive = False,
    exclude: Exclude = [],  # noqa: B006 - Typer copies it
    max_depth: MaxDepth = None,
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
    from ckpttool.series.resuming import latest as find_latest

    found = find_latest(
        directory,
        recursive=recursive,
        exclude=exclude,
        max_depth=max_depth,
        depth=verify.value,
        best=best,
        mode=None if mode is None else mode.value,
        jobs=jobs,
    )
    if not quiet:
        say_journals(found.journals)
        for problem in found.passed_over:
            say_warning(f"{problem.path}: passed over: {problem.message}")
        for warning in found.warnings:
            say_warning(warning)
    _print(found, json=json, null=null, quiet=quiet)
    if found.entry is None:
        say_error(found.reason or "")
    return int(found.entry is None)


def _print(found: Latest, *, json: bool, null: bool, quiet: bool) -> None:
    if json:
        from ckpttool.render.json_list import latest_document

        print_json(latest_document(found))
    elif found.entry is not None and not quiet:
        print_paths([found.entry.path], null=null)
