"""The table of commands, and how Typer parses them and draws their help.

Only the command that is asked for is imported: the others would slow down the start. Help is plain text for
the same reason: importing Rich takes longer.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

import typer
import typer.main
from typer.core import TyperCommand, TyperGroup

from ckpttool.cli.options import expand_options
from ckpttool.core.errors import UsageError
from ckpttool.core.options import OUTPUT_PANEL, RULE_PANEL

if TYPE_CHECKING:
    from typing import Any


class CommandEntry(NamedTuple):
    """The module and the function of a command, and its line in the help."""

    module: str
    function: str
    summary: str
    is_grouped: bool = False


COMMANDS = {
    "inspect": CommandEntry("inspect", "inspect", "Show what a checkpoint contains."),
    "verify": CommandEntry("verify", "verify", "Check that checkpoints are intact, sane and safe."),
    "list": CommandEntry(
        "list", "list_", "List the checkpoints in a directory, series by series.", is_grouped=True
    ),
    "latest": CommandEntry("latest", "latest", "Print the path of the newest intact checkpoint."),
    "diff": CommandEntry("diff", "diff", "Show how checkpoints differ, whatever their formats."),
    "convert": CommandEntry(
        "convert", "convert", "Convert a checkpoint to another format and compare the result."
    ),
    "merge": CommandEntry(
        "convert", "merge", "Merge the parts that a distributed job wrote into one checkpoint."
    ),
    "prune": CommandEntry("prune", "prune", "Remove old checkpoints by a retention policy.", is_grouped=True),
    "rename": CommandEntry("rename", "rename", "Rename checkpoints by a template.", is_grouped=True),
    "undo": CommandEntry("undo", "undo", "Undo the last prune --trash or rename."),
    "pin": CommandEntry("pin", "pin", "Protect checkpoints from pruning."),
    "unpin": CommandEntry("pin", "unpin", "Remove pins."),
}


class Commands(TyperGroup):
    """The group of all commands, which lists them without importing any."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.summary) for name, entry in COMMANDS.items()])

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return _load_command(cmd_name) if cmd_name in COMMANDS else None


@cache
def _load_command(name: str) -> Any:
    entry = COMMANDS[name]
    alone = typer.Typer(
        add_completion=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    function = getattr(import_module(f"ckpttool.cli.{entry.module}"), entry.function)
    alone.command(name, cls=Grouped if entry.is_grouped else Plain)(expand_options(function))
    return typer.main.get_command(alone)


_OTHERS = "Options"


class Plain(TyperCommand):
    """A command that refuses an empty argument: as a path it would mean the working directory."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given, _, _ = self.make_parser(ctx).parse_args(args=[*args])
        for parameter in self.get_params(ctx):
            value = given.get(parameter.name or "") if parameter.param_type_name == "argument" else None
            if value == "" or (isinstance(value, list | tuple) and "" in value):
                raise UsageError("an argument is empty, and names nothing (a variable that isn't set?)")
        return super().parse_args(ctx, args)


class Grouped(Plain):
    """A command whose help groups the options by panel; a rule with one value can't be given twice."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        _, _, given = self.make_parser(ctx).parse_args(args=[*args])
        rules = [option for option in given if _panel_of(option) == RULE_PANEL and not option.multiple]
        for at, option in enumerate(rules):
            if option in rules[:at]:
                raise UsageError(f"{option.opts[0]} was given twice (give it once)")
        return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
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
        return OUTPUT_PANEL
    return getattr(parameter, "rich_help_panel", None) or _OTHERS
