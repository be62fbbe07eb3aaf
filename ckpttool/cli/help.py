"""The help of a command: its options under headings, examples, exit statuses and environment variables."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ckpttool.cli.examples import CLOSINGS, ROOT
from ckpttool.core.options import OUTPUT_PANEL

if TYPE_CHECKING:
    from typing import Any

ARGUMENTS = "Arguments"
_OTHERS = "Options"
_WIDEST = 26
"""Columns of an option whose help begins beside it."""
_NOTE = re.compile(r"\s*\[(?:required|[^\[\]]*[<>]=?[^\[\]]*)\]$")
"""Typer's notes that an argument is required, which the usage says, and of the range of a number."""


def panels_of(command: Any, context: Any) -> dict[str, list[tuple[str, str]]]:
    """Return the arguments and options of a command by their headings: each as it is given, and its help."""
    panels: dict[str, list[tuple[str, str]]] = {}
    for parameter in command.get_params(context):
        if parameter.metavar is None and (choices := getattr(parameter.type, "choices", ())):
            parameter.metavar = "|".join(choices)
        record = parameter.get_help_record(context)
        if record is not None:
            given, help = record
            help = _NOTE.sub("", help).replace("  [", " [")
            panels.setdefault(_panel_of(parameter), []).append((given, help))
    return panels


def write_closing(name: str | None, formatter: Any) -> None:
    """Write the examples, exit statuses, variables and page of a command, or by default of all."""
    closing = ROOT if name is None else CLOSINGS.get(name)
    if closing is None:
        return
    formatter.write("\nExamples:\n")
    for example in closing.examples:
        formatter.write(f"  # {example.purpose}\n  $ {example.line}\n")
    with formatter.section("Exit status"):
        formatter.write_dl([(str(status), meaning) for status, meaning in closing.statuses.items()])
    if closing.environment:
        with formatter.section("Environment"):
            formatter.write_dl([*closing.environment.items()])
    formatter.write(f"\nDocumentation: {closing.page}\n")


def _panel_of(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return ARGUMENTS
    if parameter.name == "help":
        return OUTPUT_PANEL
    return getattr(parameter, "rich_help_panel", None) or _OTHERS


def write_options(command: Any, context: Any, formatter: Any) -> None:
    """Write the arguments and options of a command to the formatter of its help."""
    for name, records in panels_of(command, context).items():
        with formatter.section(name):
            formatter.write_dl(records, col_max=_WIDEST)
