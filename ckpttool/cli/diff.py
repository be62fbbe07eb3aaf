"""``ckpttool diff``: how do they differ?"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from ckpttool.cli.diffing import Shown, chosen, compare_series, compare_two
from ckpttool.cli.options import Jobs, Json, Quiet
from ckpttool.cli.pictures import check_plot


class Layout(str, enum.Enum):
    """In which layout tensors are compared."""

    AUTO = "auto"
    AS_IS = "as-is"


class Only(str, enum.Enum):
    """Which tensors are compared."""

    WEIGHTS = "weights"
    ALL = "all"


def diff(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="A B [C]...", readable=False, show_default=False, help="Two checkpoints, or a series."
        ),
    ],
    rtol: Annotated[
        float | None,
        typer.Option(
            "--rtol", metavar="X", min=0, help="Let values differ by X times A's.", show_default=False
        ),
    ] = None,
    atol: Annotated[
        float | None,
        typer.Option("--atol", metavar="X", min=0, help="Let values differ by X.", show_default=False),
    ] = None,
    bitwise: Annotated[
        bool, typer.Option("--bitwise", help="Compare bits: +0 is not -0, and one NaN not another.")
    ] = False,
    layout: Annotated[
        Layout,
        typer.Option("--layout", help="Bring both to one layout where rules say how, or compare as stored."),
    ] = Layout.AUTO,
    map: Annotated[
        str | None,
        typer.Option("--map", metavar="FILE", help="Say in TOML which tensor is which.", show_default=False),
    ] = None,
    no_rename: Annotated[bool, typer.Option("--no-rename", help="Look for no renamed tensors.")] = False,
    only: Annotated[
        Only, typer.Option("--only", help="Compare the model's weights alone, or all.")
    ] = Only.ALL,
    ignore: Annotated[
        list[str], typer.Option("--ignore", metavar="GLOB", help="Leave out what matches. May be repeated.")
    ] = [],  # noqa: B006 - Typer copies it
    json: Json = False,
    all: Annotated[bool, typer.Option("--all", help="Show every row, not just the first 40.")] = False,
    stat: Annotated[bool, typer.Option("--stat", help="Count by module; show no single tensor.")] = False,
    name_only: Annotated[
        bool, typer.Option("--name-only", help="Print names alone: M changed, R renamed, D removed, A added.")
    ] = False,
    plot: Annotated[
        str | None,
        typer.Option(
            "--plot",
            metavar="FILE",
            help="Draw how far each layer moved: .svg, .png or .html.",
            show_default=False,
        ),
    ] = None,
    keep_going: Annotated[
        bool, typer.Option("--keep-going", help="Compare what can be read where something can't.")
    ] = False,
    jobs: Jobs = None,
    quiet: Quiet = False,
) -> int:
    """Tell how checkpoints differ, whatever their formats.

    Tensors are paired by name, convention or content; epoch, step, loss and settings are compared as well. Of
    three or more, each is compared with the one before. Exit status: 0 equal, 1 different, 2 not compared.
    """
    from ckpttool.ops.diff import DiffWishes

    given = [str(path) for path in paths]
    shown = Shown(json, all, stat, name_only, quiet, plot)
    _check(given, shown)
    _check_tolerance(rtol, atol, bitwise=bitwise)
    if plot is not None:
        check_plot(plot, [*given, *([map] if map is not None else [])])
    wishes = DiffWishes(
        rtol=rtol or 0.0,
        atol=atol or 0.0,
        bitwise=bitwise,
        layout="as-is" if layout is Layout.AS_IS else "auto",
        mapping=map,
        rename=not no_rename,
        only="weights" if only is Only.WEIGHTS else "all",
        ignore=tuple(ignore),
        keep_going=keep_going,
        jobs=jobs,
    )
    compare = compare_two if len(given) == 2 else compare_series
    return compare([chosen(path) for path in given], wishes, shown)


def _check(paths: Sequence[str], shown: Shown) -> None:
    """Require that the options go together.

    Raises:
        UsageError: They don't.
    """
    from ckpttool.errors import UsageError

    if len(paths) < 2:
        raise UsageError("diff compares two checkpoints, or more")
    views = [flag for flag in ("json", "stat", "name_only") if getattr(shown, flag)]
    flags = [f"--{view.replace('_', '-')}" for view in views]
    if len(flags) > 1:
        raise UsageError(f"{flags[0]} and {flags[1]} exclude each other")
    if len(paths) > 2 and views and not shown.json:
        raise UsageError(f"{flags[0]} goes with two checkpoints")


def _check_tolerance(rtol: float | None, atol: float | None, *, bitwise: bool) -> None:
    """Require a tolerance that leaves something to compare, and none where bits are compared.

    Raises:
        UsageError: It is another.
    """
    from ckpttool.errors import UsageError

    for flag, value in (("--rtol", rtol), ("--atol", atol)):
        if value is not None and bitwise:
            raise UsageError(f"--bitwise leaves no tolerance: leave {flag} out")
        if value is not None and not math.isfinite(value):
            raise UsageError(f"{flag} {value}: with it everything would be equal")
