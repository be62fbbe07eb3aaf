"""Which commands there are. Only the one that is asked for is imported: the others would take their time."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

import typer
import typer.main
from typer.core import TyperGroup

from ckpttool.cli.grouped import Grouped, Plain

if TYPE_CHECKING:
    from typing import Any


class _Place(NamedTuple):
    """Where a command lies: a module of this room, and a function in it; and what it does, in a line."""

    module: str
    function: str
    summary: str
    is_grouped: bool = False


COMMANDS = {
    "inspect": _Place("inspect", "inspect", "Tell what a checkpoint is."),
    "verify": _Place("verify", "verify", "Check that it is intact, sane and safe, and still predicts."),
    "list": _Place(
        "list", "list_", "List the checkpoints of a directory, series by series.", is_grouped=True
    ),
    "latest": _Place("latest", "latest", "Print the path of the newest intact checkpoint."),
    "diff": _Place("diff", "diff", "Tell how checkpoints differ, whatever their formats."),
    "convert": _Place("convert", "convert", "Write a checkpoint in another format, and compare it."),
    "merge": _Place("merge", "merge", "Put the parts that a distributed job wrote together."),
    "prune": _Place("prune", "prune", "Remove old checkpoints by a retention policy.", is_grouped=True),
    "rename": _Place("rename", "rename", "Bring the names of checkpoints to a convention.", is_grouped=True),
    "undo": _Place("undo", "undo", "Take back the last prune --trash or rename."),
    "pin": _Place("pin", "pin", "Keep checkpoints from being pruned."),
    "unpin": _Place("pin", "unpin", "Take pins back."),
}


class Commands(TyperGroup):
    """The group of all commands."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return their names, in the order of the help."""
        return list(COMMANDS)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write what each does, which needs none of them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, place.summary) for name, place in COMMANDS.items()])

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command, or None where there is none of that name."""
        return _made(cmd_name) if cmd_name in COMMANDS else None


@cache
def _made(name: str) -> Any:
    place = COMMANDS[name]
    alone = typer.Typer(
        add_completion=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    function = getattr(import_module(f"ckpttool.cli.{place.module}"), place.function)
    alone.command(name, cls=Grouped if place.is_grouped else Plain)(function)
    return typer.main.get_command(alone)
