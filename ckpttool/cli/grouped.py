"""Help in which the options of a long command stand in groups, in plain text: Rich would take its time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from typer.core import TyperCommand

if TYPE_CHECKING:
    from typing import Any

LOOKED_AT = "What is looked at"
CARRIED_OUT = "How it is carried out"
SHOWN = "What is shown"
_OTHERS = "Options"


class Grouped(TyperCommand):
    """A command whose options stand below the names of their panels."""

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
