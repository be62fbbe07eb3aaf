"""``ckpttool inspect``: what is it?"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ckpttool.cli.options import Json, Quiet
from ckpttool.cli.output import has_colour, say_warning, width

if TYPE_CHECKING:
    from ckpttool.ops.inspect import Inspection


def inspect(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="PATH...", readable=False, show_default=False, help="Files, directories or indexes."
        ),
    ],
    json: Json = False,
    all: Annotated[bool, typer.Option("--all", help="Show all tensors, not just the first 40.")] = False,
    filter: Annotated[
        str | None,
        typer.Option(
            "--filter", metavar="GLOB", help="Show only tensors with matching names.", show_default=False
        ),
    ] = None,
    stats: Annotated[
        bool, typer.Option("--stats", help="Read the values; show min, max, mean, std, zeros, NaN, Inf.")
    ] = False,
    field: Annotated[
        str | None,
        typer.Option(
            "--field", metavar="KEY", help="Print one value, such as training.epoch.", show_default=False
        ),
    ] = None,
    quiet: Quiet = False,
) -> int:
    """Show what a checkpoint contains.

    Format, size, epoch, step, loss, parameters, and tensors by module. No framework is imported, and no code
    in the file is run. If a directory holds several checkpoints, the newest is shown.
    """
    from ckpttool.core.report import has_errors
    from ckpttool.ops.inspect import inspect as inspect_one

    inspections = [inspect_one(_newest_in(str(path)), filter=filter, stats=stats) for path in paths]
    if not quiet:
        _print(inspections, field, json, all)
    return int(any(has_errors(inspection.findings) for inspection in inspections))


def _print(inspections: list[Inspection], field: str | None, json: bool, all_tensors: bool) -> None:
    if field is not None:
        print("\n".join(_field(inspection, field) for inspection in inspections))
    elif json:
        from ckpttool.cli.output import print_json
        from ckpttool.cli.render.json import inspect_document

        print_json(inspect_document(inspections))
    else:
        from ckpttool.cli.render.text_inspect import inspect_text

        shown = (
            inspect_text(one, all_tensors=all_tensors, colour=has_colour(sys.stdout), width=width(sys.stdout))
            for one in inspections
        )
        print("\n\n".join(shown))


def _newest_in(path: str) -> str:
    """Return the path to inspect: of a directory of several checkpoints the newest, and say so."""
    if not os.path.isdir(path):
        return path
    from ckpttool.cli.paths import say_journals
    from ckpttool.runs.surveying.newest import newest_in

    chosen = newest_in(path)
    say_journals(chosen.journals)
    if chosen.others:
        say_warning(f"{path}: {chosen.others + 1} checkpoints; this is the newest, {chosen.path}")
    return chosen.path


def _field(inspection: Inspection, key: str) -> str:
    """Return one value of the JSON document by its dotted key.

    Raises:
        UsageError: There is no such key.
    """
    from ckpttool.cli.render.json import dumps, inspect_document
    from ckpttool.cli.render.terminal import printable
    from ckpttool.core.errors import UsageError

    (value,) = inspect_document([inspection])["checkpoints"]
    for part in key.split("."):
        if isinstance(value, list) and part.isdigit() and int(part) < len(value):
            value = value[int(part)]
        elif isinstance(value, dict) and part in value:
            value = value[part]
        else:
            raise UsageError(f"no field {key}: {part} is not there")
    return printable(value) if isinstance(value, str) else dumps(value)
