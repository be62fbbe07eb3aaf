"""Help in which the options of a long command stand in groups, in plain text: Rich would take its time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from typer.core import TyperCommand

from ckpttool.errors import UsageError

if TYPE_CHECKING:
    from typing import Any

RULES = "Rules (what any of them keeps stays)"
LOOKED_AT = "What is looked at"
CARRIED_OUT = "How it is carried out"
SHOWN = "What is shown"
_OTHERS = "Options"


class Plain(TyperCommand):
    """A command that takes no empty text for a path: it would mean the working directory."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the command line.

        Raises:
            UsageError: An argument is empty.
        """
        given, _, _ = self.make_parser(ctx).parse_args(args=[*args])
        for parameter in self.get_params(ctx):
            value = given.get(parameter.name or "") if parameter.param_type_name == "argument" else None
            if value == "" or (isinstance(value, list | tuple) and "" in value):
                raise UsageError("an argument is empty, and names nothing (a variable that isn't set?)")
        return super().parse_args(ctx, args)


class Grouped(Plain):
    """A command whose options stand below the names of their panels."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the command line.

        Raises:
            UsageError: A rule that has one value was given two.
        """
        _, _, given = self.make_parser(ctx).parse_args(args=[*args])
        rules = [one for one in given if _panel_of(one) == RULES and not one.multiple]
        for at, one in enumerate(rules):
            if one in rules[:at]:
                raise UsageError(f"{one.opts[0]} was given twice (give it once)")
        return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments and options, panel by panel in the order in which they come."""
        panels: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                panels.setdefault(_panel_of(parameter), []).append(record)
        for name, records in panels.items():
            with formatter.section(name):
                formatter.write_dl(records)


def _panel_of(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return "Arguments"
    if parameter.name == "help":
        return SHOWN
    return getattr(parameter, "rich_help_panel", None) or _OTHERS
