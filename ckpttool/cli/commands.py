"""The table of commands, and how Typer parses them and draws their help.

Only the command that is asked for is imported: the others would slow down the start. Help is plain text for
the same reason: importing Rich takes longer.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

import typer
import typer.main
from typer.core import TyperCommand, TyperGroup

from ckpttool.cli.options import PathText, expand_options
from ckpttool.cli.output import paged
from ckpttool.core.errors import UsageError
from ckpttool.core.options import RULE_PANEL
from ckpttool.core.suggest import did_you_mean
from ckpttool.io.held import holding

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Any


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
_OUTPUTS = frozenset({"output", "plot", "junit", "sarif", "summary", "record"})
"""Options that name an output file."""


class Commands(TyperGroup):
    """The group of all commands, which lists them without importing any."""

    @property
    def summaries(self) -> Mapping[str, str]:
        """Return the line of each command in the help."""
        return {name: entry.summary for name, entry in COMMANDS.items()}

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args[:2] == ["help", "--man"] and not ctx.resilient_parsing:
            self._write_manual(ctx, args[2:])
        elif args[:1] == ["help"]:
            args = [*args[1:2], "--help"]
        return super().parse_args(ctx, args)

    def _write_manual(self, ctx: Any, directories: list[str]) -> None:
        from ckpttool.cli.manual import write_pages

        if len(directories) != 1:
            raise UsageError("help --man takes one DIR, for the manual pages")
        print("\n".join(write_pages(self, ctx, directories[0])))
        ctx.exit(0)

    def make_context(self, *arguments: Any, **options: Any) -> Any:
        with paged():  # of the help
            return super().make_context(*arguments, **options)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in COMMANDS and not args[0].startswith("-"):
            hint = did_you_mean(args[0], COMMANDS) or "see 'ckpttool --help'"
            raise UsageError(f"no command {args[0]!r} ({hint})")
        return super().resolve_command(ctx, args)

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([*self.summaries.items()])

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        from ckpttool.cli.help import write_closing

        write_closing(None, formatter)

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        items = super().shell_complete(ctx, incomplete)
        for item in items:
            item.help = self.summaries.get(item.value, item.help)
        return items

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
    alone.command(name, cls=Command)(expand_options(function))
    return typer.main.get_command(alone)


class Command(TyperCommand):
    """A command that refuses an empty argument, which as a path would mean the working directory, and a
    rule with one value that is given twice.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not ctx.resilient_parsing:  # a shell that completes a line has no use for errors
            self._require_sense(ctx, args)
        return super().parse_args(ctx, args)

    def _require_sense(self, ctx: Any, args: list[str]) -> None:
        given, _, order = self.make_parser(ctx).parse_args(args=[*args])
        for parameter in self.get_params(ctx):
            value = given.get(parameter.name or "") if parameter.param_type_name == "argument" else None
            if value == "" or (isinstance(value, list | tuple) and "" in value):
                raise UsageError("an argument is empty, and names nothing (a variable that isn't set?)")
        self._require_last_argument(ctx, given)
        panels = [(option, getattr(option, "rich_help_panel", None)) for option in order]
        rules = [option for option, panel in panels if panel == RULE_PANEL and not option.multiple]
        for at, option in enumerate(rules):
            if option in rules[:at]:
                raise UsageError(f"{option.opts[0]} was given twice (give it once)")

    def _require_last_argument(self, ctx: Any, given: Mapping[str, Any]) -> None:
        """Raise an error that names DST if only one path is given, which click assigns to DST."""
        arguments = [one for one in self.get_params(ctx) if one.param_type_name == "argument"]
        if len(arguments) < 2 or arguments[0].nargs != -1 or not arguments[0].required or given.get("help"):
            return
        first, last = arguments[0], arguments[-1]
        if not given.get(first.name or "") and given.get(last.name or ""):
            name = last.make_metavar(ctx)
            raise UsageError(f"Missing argument '{name}' (see '{ctx.command_path} --help')")

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        from ckpttool.cli.completion import brief

        items = super().shell_complete(ctx, incomplete)
        for item in items:
            item.help = brief(item.help or "")
        return items

    def complete_values(self, kind: str, ctx: Any, incomplete: str) -> list[tuple[str, str]]:
        """Return what a shell completes for a value of a kind, and its meanings."""
        from ckpttool.cli.completion import complete

        return complete(kind, ctx, incomplete)

    def make_context(self, *arguments: Any, **options: Any) -> Any:
        with paged():  # of the help
            return super().make_context(*arguments, **options)

    def invoke(self, ctx: Any) -> Any:
        is_paged = self.name in _PAGED and not ctx.params.get("json")
        with paged() if is_paged else nullcontext(), holding(*self._held_paths(ctx.params)):
            return super().invoke(ctx)

    def _held_paths(self, given: Mapping[str, Any]) -> Iterator[str]:
        """Yield the paths whose directories the command keeps open: what it changes, and its outputs."""
        changes = self.name in _CHANGING or any(map(given.get, _CHANGES))
        for name, value in given.items():
            for one in value if isinstance(value, list | tuple) else (value,):
                if (name in _OUTPUTS and isinstance(one, str)) or (changes and isinstance(one, PathText)):
                    yield one

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        arguments = [one for one in self.params if one.param_type_name == "argument"]
        return ["[OPTIONS]", *(one.make_metavar(ctx) for one in arguments)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        from ckpttool.cli.help import write_options

        write_options(self, ctx, formatter)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        from ckpttool.cli.help import write_closing

        write_closing(self.name, formatter)
