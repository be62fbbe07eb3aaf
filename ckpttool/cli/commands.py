"""The table of commands, and the group that finds one.

Only the command that is asked for is imported: the others would slow down the start. Help is plain text for
the same reason: importing Rich takes longer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import NamedTuple

import click

from ckpttool.cli.output import paged
from ckpttool.cli.parser import Command, colour_option, help_option
from ckpttool.cli.shells import completion_script, install_completion
from ckpttool.core.errors import UsageError
from ckpttool.core.text import did_you_mean


class CommandEntry(NamedTuple):
    """The module and the function of a command, and its line in the help."""

    module: str
    function: str
    summary: str


COMMANDS = {
    "inspect": CommandEntry("inspect", "inspect", "Show what a checkpoint contains."),
    "card": CommandEntry("card", "card", "Write a card of a checkpoint, and note what people say of it."),
    "verify": CommandEntry("verify", "verify", "Check that checkpoints are intact, sane and safe."),
    "explain": CommandEntry("explain", "explain", "Explain a finding: what it means, and what to do."),
    "list": CommandEntry("list", "list_", "List the checkpoints in a directory, series by series."),
    "report": CommandEntry("report", "report", "Write one HTML page about a directory of checkpoints."),
    "latest": CommandEntry("latest", "latest", "Print the path of the newest intact checkpoint."),
    "diff": CommandEntry("diff", "diff", "Show how checkpoints differ, whatever their formats."),
    "convert": CommandEntry(
        "convert", "convert", "Convert a checkpoint to another format and compare the result."
    ),
    "merge": CommandEntry(
        "convert", "merge", "Merge the parts that a distributed job wrote into one checkpoint."
    ),
    "salvage": CommandEntry("salvage", "salvage", "Save what is whole of a damaged checkpoint."),
    "average": CommandEntry("average", "average", "Average the weights of several checkpoints."),
    "copy": CommandEntry("copy", "copy", "Copy checkpoints to another disk or an object store."),
    "prune": CommandEntry("prune", "prune", "Remove old checkpoints by a retention policy."),
    "log": CommandEntry("log", "log", "Record checkpoints in MLflow, Weights & Biases or TensorBoard."),
    "watch": CommandEntry("watch", "watch", "Verify checkpoints as they land, then rename, copy and prune."),
    "rename": CommandEntry("rename", "rename", "Rename checkpoints by a template."),
    "undo": CommandEntry("undo", "undo", "Undo the last prune --trash or rename."),
    "pin": CommandEntry("pin", "pin", "Protect checkpoints from pruning."),
    "unpin": CommandEntry("pin", "unpin", "Remove pins."),
    "init": CommandEntry("init", "init", "Write a ckpttool.toml in which everything is commented out."),
    "config": CommandEntry("show_config", "config", "Show the configuration that is in force."),
}

_PAGED = frozenset({"inspect", "verify", "explain", "list", "diff", "config"})
"""Commands whose output is to be read at leisure: not what changes something, asks, or answers in a line."""

_CHANGING = frozenset(COMMANDS) - _PAGED - {"latest", "watch"}
"""Commands that write into the directories they are given; ``watch`` opens its own at each look."""
_CHANGES = ("write_manifest", "sample")
"""Options that make ``verify`` write there as well."""


class Commands(click.Group):
    """The group of all commands, which lists them without importing any."""

    def __init__(self) -> None:
        listed = {name: click.Command(name, short_help=text) for name, text in self.summaries.items()}
        super().__init__(
            "ckpttool",
            commands=listed,
            params=[
                _version_option(),
                colour_option(),
                _shell_option(
                    "--install-completion", "Install completion for the current shell.", install_completion
                ),
                _shell_option(
                    "--show-completion",
                    "Show the completion script of the current shell.",
                    completion_script,
                ),
                help_option(),
            ],
            help="Inspect, verify, compare, convert and prune machine-learning checkpoints.",
            no_args_is_help=True,
            add_help_option=False,
        )

    @property
    def summaries(self) -> dict[str, str]:
        """Return the line of each command in the help."""
        return {name: one.summary for name, one in COMMANDS.items()}

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*COMMANDS]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name, *rest = args
        if name == "help":
            return name, _help, rest
        if name in COMMANDS:
            return name, command_named(name), rest
        hint = did_you_mean(name, COMMANDS) or "see 'ckpttool --help'"
        raise UsageError(f"no command {name!r} ({hint})")

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([*self.summaries.items()])

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from ckpttool.cli.help import write_closing

        write_closing(None, formatter)


@cache
def command_named(name: str) -> Command:
    """Return a command."""
    entry = COMMANDS[name]
    run = getattr(import_module(f"ckpttool.cli.{entry.module}"), entry.function)
    changes = _CHANGES if name == "verify" else name in _CHANGING
    return Command(name, run, is_paged=name in _PAGED, changes=changes)


def _version_option() -> click.Option:
    def show(context: click.Context, parameter: click.Parameter, wanted: bool) -> None:
        if wanted and not context.resilient_parsing:
            from importlib.metadata import version

            print(f"ckpttool {version('ckpttool')}")
            context.exit()

    return click.Option(
        ["--version", "-V"],
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=show,
        help="Print the version.",
    )


def _shell_option(flag: str, help: str, answer: Callable[[click.Command], str]) -> click.Option:
    def carry_out(context: click.Context, parameter: click.Parameter, wanted: bool) -> None:
        if wanted and not context.resilient_parsing:
            print(answer(context.command))
            context.exit()

    return click.Option(
        [flag], is_flag=True, is_eager=True, expose_value=False, callback=carry_out, help=help
    )


@click.command("help", add_help_option=False)
@click.argument("command", required=False)
@click.option("--man", metavar="DIR", help="Write the manual pages into this directory.")
@click.pass_context
def _help(context: click.Context, command: str | None, man: str | None) -> None:
    """Show the help of a command, or write the manual pages."""
    group, above = _group_of(context)
    if man is not None and command is not None:
        raise UsageError("--man goes without a COMMAND")
    if man is not None:
        from ckpttool.cli.manual import write_pages

        print("\n".join(write_pages(group, above, man)))
        return
    if command is not None:
        _, found, _ = group.resolve_command(above, [command])
        assert found is not None  # else that is an error
        above = found.make_context(command, [], parent=above, resilient_parsing=True)
    with paged():
        print(above.get_help())


def _group_of(context: click.Context) -> tuple[Commands, click.Context]:
    above = context.parent
    assert above is not None and isinstance(above.command, Commands)
    return above.command, above
