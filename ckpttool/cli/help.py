"""The help of a command: its options under headings, examples, exit statuses and environment variables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpttool.cli.examples import CLOSINGS, ROOT

if TYPE_CHECKING:
    from typing import Any

ARGUMENTS = "Arguments"
_OTHERS = "Options"
_WIDEST = 26
"""Columns of an option whose help begins beside it."""


def panels_of(command: Any, context: Any) -> dict[str, list[tuple[str, str]]]:
    """Return the arguments and options of a command by their headings: each as it is given, and its help."""
    panels: dict[str, list[tuple[str, str]]] = {}
    parameters = sorted(command.params, key=lambda one: one.param_type_name != "argument")
    for one in parameters:
        if one.param_type_name == "argument":
            panels.setdefault(ARGUMENTS, []).append((one.make_metavar(context), one.described))
        else:
            given, _ = one.get_help_record(context)
            panels.setdefault(getattr(one, "panel", None) or _OTHERS, []).append((given, one.help))
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


def write_options(command: Any, context: Any, formatter: Any) -> None:
    """Write the arguments and options of a command to the formatter of its help."""
    for name, records in panels_of(command, context).items():
        with formatter.section(name):
            formatter.write_dl(records, col_max=_WIDEST)
