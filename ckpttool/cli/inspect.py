"""``ckpttool inspect``: show the content of a checkpoint."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ckpttool.cli.options import json_option, output_option, quiet_option
from ckpttool.cli.output import has_colour, print_json, say, width
from ckpttool.cli.progress import progress
from ckpttool.core.name_patterns import PIN_LISTS
from ckpttool.core.options import argument
from ckpttool.core.text import did_you_mean, printable
from ckpttool.storage import fs

if TYPE_CHECKING:
    from ckpttool.ops.inspect import Inspection
    from ckpttool.runs.pointers.pin_lists import Remark


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectCommand:
    """The options of ``inspect``."""

    paths: Sequence[str] = argument("PATH...", "Files, directories or indexes.")
    all: bool = output_option("--all", help="Show all tensors, not just the first 40.", default=False)
    filter: str | None = output_option(
        "--filter", metavar="GLOB", help="Show only tensors with matching names."
    )
    stats: bool = output_option(
        "--stats", help="Read the values; show min, max, mean, std, zeros, NaN, Inf.", default=False
    )
    field: str | None = output_option(
        "--field", metavar="KEY", help="Print one value, such as training.epoch.", complete="field"
    )
    json: bool = json_option()
    quiet: bool = quiet_option()


def inspect(command: InspectCommand) -> int:
    """Show what a checkpoint contains.

    Format, size, epoch, step, loss, parameters, and tensors by module. No framework is imported, and no code
    in the file is run. If a directory holds several checkpoints, the newest is shown.
    """
    from ckpttool.core.report import has_errors

    filter, quiet = command.filter, command.quiet
    inspections = [_inspect(path, filter, command.stats) for path in command.paths]
    if not quiet:
        _print(inspections, command)
    unmatched = [one for one in inspections if filter is not None and not one.tensors]
    if not quiet:
        for one in unmatched:
            say(f"ckpttool: {printable(one.checkpoint.path)}: {_no_match(one, filter or '')}")
    return int(bool(unmatched) or any(has_errors(one.findings) for one in inspections))


def _inspect(path: str, filter: str | None, stats: bool) -> Inspection:
    from ckpttool.ops.inspect import inspection, open_to_inspect

    with open_to_inspect(_newest_in(path), stats=stats) as checkpoint:
        return inspection(
            checkpoint, filter=filter, stats=stats, progress=partial(progress, "reading values")
        )


def _remark_on(path: str) -> Remark | None:
    """Return the user's note on a checkpoint, which lists of pins in the directories above it have."""
    # Importing pins would take longer than inspecting a small file, so it needs a list that exists. In a
    # store, each look would be a request.
    directory = os.path.dirname(os.path.abspath(path))
    while fs.place_of(path).reads_are_free:
        if any(os.path.lexists(os.path.join(directory, name)) for name in PIN_LISTS):
            from ckpttool.runs.pointers.pins import remark_on

            return remark_on(path)
        if directory == os.path.dirname(directory):
            return None
        directory = os.path.dirname(directory)
    return None


def _no_match(inspection: Inspection, filter: str) -> str:
    """Return the message that a filter matches no tensor, with one that would."""
    from fnmatch import filter as matching

    names = [tensor.name for tensor in inspection.checkpoint.tensors]
    wider = f"*{filter.strip('*')}*"
    hint = f"try {wider!r}" if matching(names, wider) else did_you_mean(filter, names)
    return printable(f"no tensor matches {filter!r}" + (f" ({hint})" if hint else ""))


def _print(inspections: list[Inspection], command: InspectCommand) -> None:
    field = command.field
    if field is not None:
        print("\n".join(_field(inspection, field) for inspection in inspections))
    elif command.json:
        from ckpttool.ops.inspect import SCHEMA

        print_json({"schema": SCHEMA, "checkpoints": [*map(_row, inspections)]})
    else:
        from ckpttool.cli.render.text_inspect import inspect_text

        shown = (
            inspect_text(
                one,
                all_tensors=command.all,
                colour=has_colour(sys.stdout),
                width=width(sys.stdout),
                remark=_remark_on(one.checkpoint.path),
            )
            for one in inspections
        )
        print("\n\n".join(shown))


def _row(inspection: Inspection) -> dict[str, Any]:
    """Return the document of a checkpoint, with its note."""
    remark = _remark_on(inspection.checkpoint.path)
    about = {} if remark is None or remark.is_empty else {"about": remark.document()}
    return {**inspection.row(), **about}


def _newest_in(path: str) -> str:
    """Return the path to inspect; in a directory of several checkpoints, print which is the newest."""
    if not fs.isdir(path):
        return path
    from ckpttool.cli.paths import say_journals
    from ckpttool.runs.inspecting import newest_in

    chosen = newest_in(path)
    say_journals(chosen.journals)
    if chosen.others:
        below = " in subdirectories" if chosen.in_subdirectories else ""
        count = chosen.others + 1
        say(printable(f"ckpttool: {path}: showing the newest of {count:,} checkpoints{below}: {chosen.path}"))
    return chosen.path


def _field(inspection: Inspection, key: str) -> str:
    """Return one value of the JSON document by its dotted key.

    Raises:
        UsageError: There is no such key.
    """
    from ckpttool.core.errors import UsageError
    from ckpttool.core.result import dumps

    value = document = _row(inspection)
    for part in key.split("."):
        if isinstance(value, list) and part.isdigit() and int(part) < len(value):
            value = value[int(part)]
        elif isinstance(value, dict) and part in value:
            value = value[part]
        else:
            hint = did_you_mean(key, _keys_in(document)) if key else ""
            raise UsageError(f"no field {key!r}; {hint or '--json shows all fields'}")
    return printable(value) if isinstance(value, str) else dumps(value)


def fields_of(path: str) -> list[str]:
    """Return the dotted keys of the values that ``--field`` prints of a checkpoint."""
    return [*_keys_in(_inspect(path, None, False).row())]


def _keys_in(document: Mapping[str, Any], above: str = "") -> Iterator[str]:
    """Yield the dotted keys of a document; not those in its lists, which have numbers."""
    for key, value in document.items():
        yield f"{above}{key}"
        if isinstance(value, dict):
            yield from _keys_in(value, f"{above}{key}.")
