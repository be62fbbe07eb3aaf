"""The table of commands, the click group that imports a command by its name, and parameters from options.

Help is plain text, since importing Rich would take longer than the rest of the start.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import MISSING
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from ckpttool.cli.output import COLOURS, choose_colour, paged
from ckpttool.core.errors import UsageError
from ckpttool.core.options import OUTPUT_PANEL, RULE_PANEL, Option, by_field, rows
from ckpttool.core.text import did_you_mean
from ckpttool.core.urls import is_url
from ckpttool.storage.held import holding


class CommandEntry(NamedTuple):
    """Module and function of a command, and its line in the help of ``ckpttool``."""

    module: str
    function: str
    summary: str


COMMANDS = {
    "inspect": CommandEntry("inspect", "inspect", "Show what a checkpoint contains."),
    "card": CommandEntry("card", "card", "Write a card of a checkpoint, and add notes to it."),
    "verify": CommandEntry("verify", "verify", "Check that checkpoints are intact, sane and safe."),
    "explain": CommandEntry("explain", "explain", "Explain what a finding means and what to do about it."),
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
    "salvage": CommandEntry("salvage", "salvage", "Save the intact tensors of a damaged checkpoint."),
    "average": CommandEntry("average", "average", "Average the weights of several checkpoints."),
    "copy": CommandEntry("copy", "copy", "Copy checkpoints to another disk or an object store."),
    "prune": CommandEntry("prune", "prune", "Remove old checkpoints by a retention policy."),
    "log": CommandEntry("log", "log", "Record checkpoints in MLflow, Weights & Biases or TensorBoard."),
    "watch": CommandEntry("watch", "watch", "Verify checkpoints as they land, then rename, copy and prune."),
    "rename": CommandEntry("rename", "rename", "Rename checkpoints by a template."),
    "undo": CommandEntry("undo", "undo", "Undo the last prune --trash or rename."),
    "pin": CommandEntry("pin", "pin", "Protect checkpoints from pruning."),
    "unpin": CommandEntry("pin", "unpin", "Remove pins."),
    "init": CommandEntry("config_commands", "init", "Write a ckpttool.toml with every key commented out."),
    "config": CommandEntry("config_commands", "config", "Show the configuration in force."),
}

_ELSEWHERE = {
    **dict.fromkeys(("info", "show", "cat"), "inspect"),
    **dict.fromkeys(("check", "validate", "scan"), "verify"),
    **dict.fromkeys(("rm", "delete", "clean"), "prune"),
    "ls": "list",
    "compare": "diff",
    "cp": "copy",
    "mv": "rename",
}
"""Command for each name that other tools have for the same."""

_PAGED = frozenset({"inspect", "verify", "explain", "list", "diff", "config"})
"""Commands whose output is for reading: they change nothing, ask nothing, and print several lines."""

_CHANGING = frozenset(COMMANDS) - _PAGED - {"latest", "watch"}
"""Commands that write into the directories they are given; ``watch`` opens them at each look instead."""
_CHANGES = ("write_manifest", "sample")
"""Options with which ``verify`` writes into them, too."""


class Commands(click.Group):
    """The group of all commands, which lists them without importing any."""

    # Importing all commands would slow down the start of each, and completion while the user types. click
    # gets an empty command for each name, which is enough to list and complete names; ``resolve_command``
    # imports the one whose name is on the command line.
    def __init__(self) -> None:
        listed = {name: click.Command(name, short_help=text) for name, text in self.summaries.items()}
        super().__init__(
            "ckpttool",
            commands=listed,
            params=[
                _version_option(),
                colour_option(),
                _shell_option(
                    "--install-completion", "Install completion for the current shell.", installs=True
                ),
                _shell_option(
                    "--show-completion", "Show the completion script of the current shell.", installs=False
                ),
                help_option(),
            ],
            help="Inspect, verify, compare, convert and prune machine-learning checkpoints.\n\n"
            "ckpttool PATH is short for ckpttool inspect PATH.",
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
        if _is_path(name):
            return "inspect", command_named("inspect"), args
        hint = f"did you mean {_ELSEWHERE[name]}?" if name in _ELSEWHERE else did_you_mean(name, COMMANDS)
        see = hint or "see 'ckpttool --help'"
        raise UsageError(f"no command {name!r} ({see})")

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([*self.summaries.items()])

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from ckpttool.cli.help import write_closing

        write_closing(None, formatter)


def _is_path(word: str) -> bool:
    """Return whether a word in place of a command is a path; no command has a dot or a slash in its name."""
    return is_url(word) or bool({".", os.sep} & {*word}) or os.path.lexists(word)


@cache
def command_named(name: str) -> Command:
    """Import a command."""
    entry = COMMANDS[name]
    run = getattr(import_module(f".{entry.module}", __package__), entry.function)
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


def _shell_option(flag: str, help: str, *, installs: bool) -> click.Option:
    def carry_out(context: click.Context, parameter: click.Parameter, wanted: bool) -> None:
        if wanted and not context.resilient_parsing:
            from ckpttool.cli.completion import completion_script, install_completion

            answer = install_completion if installs else completion_script
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
    above = context.parent
    assert above is not None and isinstance(above.command, Commands)
    group = above.command
    if man is not None and command is not None:
        raise UsageError("--man takes no COMMAND")
    if man is not None:
        from ckpttool.cli.help import write_pages

        print("\n".join(write_pages(group, above, man)))
        return
    if command is not None:
        _, found, _ = group.resolve_command(above, [command])
        assert found is not None  # an unknown one is an error
        above = found.make_context(command, [], parent=above, resilient_parsing=True)
    with paged():
        print(above.get_help())


# Command --------------------------------------------------------------------------------------------


class PathType(click.Path):
    """A path, or the URL of an object in a store."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        # ``prune "$RUNS"`` with an unset variable must not prune the working directory, which is the path
        # that an empty text stands for.
        if value == "":
            raise UsageError("an argument is empty (an unset variable?)")
        return value if is_url(value) else str(Path(value))


class Command(click.Command):
    """A command whose parameters are the fields of a record.

    Attributes:
        rows: Options and arguments by the names of their fields.
    """

    def __init__(
        self, name: str, run: Callable[[Any], int], *, is_paged: bool, changes: bool | tuple[str, ...]
    ) -> None:
        """Make a command.

        Args:
            name: Name on the command line.
            run: Takes a record, the type of its first parameter, and returns the exit status. Its docstring
                is the help.
            is_paged: Whether long output is shown in a pager.
            changes: Whether it writes to its arguments, or the options with which it does.
        """
        (self._record, *_) = get_type_hints(run).values()
        self._run, self._is_paged, self._changes = run, is_paged, changes
        self.rows = rows(self._record)
        super().__init__(
            name,
            params=[*map(_parameter, self.rows.values()), colour_option(), help_option()],
            callback=self._call,
            help=inspect.getdoc(run),
            add_help_option=False,
        )

    @property
    def arguments(self) -> list[click.Argument]:
        """Return the positional parameters."""
        return [one for one in self.params if isinstance(one, click.Argument)]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        given = [*args]
        try:
            return super().parse_args(ctx, args)
        except click.MissingParameter as error:
            last = self.arguments[-1]
            found = self.make_parser(ctx).parse_args(given)[0].get(last.name or "")
            if error.param is not last and isinstance(found, str):
                # ``merge a.pt``: click fills SRC... DST from the end, so that it would report SRC... as
                # missing. The user has given the source and forgotten the target.
                error.param = last
            raise

    def _call(self, **values: Any) -> int:
        # A JSON document is for a program, and never paged. Directories of the paths that the command changes
        # are opened before anything is looked up in them, so that another user who exchanges one of them, or
        # replaces it by a symlink, can't redirect a removal or a write.
        record = self.record_of(click.get_current_context())
        is_paged = self._is_paged and not values.get("json")
        with paged() if is_paged else nullcontext(), holding(*self._held_paths(record)):
            return self._run(record)

    def record_of(self, context: click.Context) -> Any:
        """Return the record of a parsed command line."""
        # Only values that were given: the record has the defaults, and a configuration may replace those.
        # They are in the order of the command line, so that the first wrong one is reported.
        given = {
            name: _value_of(value, self.rows[name])
            for name, value in context.params.items()
            if name in self.rows and context.get_parameter_source(name) is ParameterSource.COMMANDLINE
        }
        return self._record(**by_field(self._record, given))

    def _held_paths(self, record: Any) -> Iterator[str]:
        """Yield paths to write or modify; their directories are kept open during the command."""

        # An option of a group is in its record or in its mapping, not in the command's record.
        def value_of(name: str) -> Any:
            group = self.rows[name].group
            holder = record if group is None else getattr(record, group)
            return holder.get(name) if isinstance(holder, Mapping) else getattr(holder, name)

        changes = self._changes if isinstance(self._changes, bool) else any(map(value_of, self._changes))
        for name, row in self.rows.items():
            is_held = row.is_output or (changes and not row.flags)
            if is_held and (value := value_of(name)) is not None:
                yield from value if isinstance(value, tuple) else (value,)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from ckpttool.cli.help import write_options

        write_options(self, ctx, formatter)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from ckpttool.cli.help import write_closing

        write_closing(self.name, formatter)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        from ckpttool.cli.completion import brief

        items = super().shell_complete(ctx, incomplete)
        for item in items:
            item.help = brief(item.help or "")
        return items


# Parameters -----------------------------------------------------------------------------------------


def colour_option() -> click.Option:
    """Return the option ``--color``, which is valid before and after the name of a command."""
    option = click.Option(
        ["--color"],
        type=click.Choice(COLOURS),
        metavar="WHEN",
        help="Use colour: auto (on a terminal), always or never.",
        expose_value=False,
        callback=lambda context, parameter, value: choose_colour(value),
    )
    return _under(OUTPUT_PANEL, option)


def help_option() -> click.Option:
    """Return the option that shows the help, through a pager if it is long."""

    def show(context: click.Context, parameter: click.Parameter, wanted: bool) -> None:
        if wanted and not context.resilient_parsing:
            with paged():
                print(context.get_help())
            context.exit()

    option = click.Option(
        ["-h", "--help"],
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=show,
        help="Show this message and exit.",
    )
    return _under(OUTPUT_PANEL, option)


def _under(panel: str | None, option: click.Option) -> click.Option:
    option.panel = panel  # type: ignore[attr-defined]  # for our help
    return option


def _parameter(row: Option) -> click.Parameter:
    name, type_, default, is_list = row.name, row.type_, row.default, row.is_list
    completes = None if row.complete is None else _completion(row.complete)
    if not row.flags:
        argument = click.Argument(
            [name],
            nargs=-1 if is_list else 1,
            required=default is MISSING,
            type=str if row.complete else PathType(),
            metavar=row.metavar,
            shell_complete=completes,
        )
        argument.described = row.help  # type: ignore[attr-defined]  # for our help
        return argument
    flags, help = (
        [*row.flags],
        row.help + (" May be repeated." if is_list else "") + _default_text(row, default),
    )
    if row.negation is not None:
        flags[0] += f"/{row.negation}"
    if type_ is bool:
        # Without a negation, the flag sets the opposite of the default: --no-rename of `rename`.
        value = {} if row.negation is not None else {"flag_value": not default}
        option = click.Option([name, *flags], is_flag=True, default=default, help=help, **value)
    else:
        # click converts numbers and words; texts with a parser are converted by the row, as those of a
        # configuration are, so that both have the same errors. Rules are collected as a list, to report one
        # that is given twice, of which click would take the last: ``--keep 10 --keep 1``.
        is_text = row.parse is not None or is_list
        option = click.Option(
            [name, *flags],
            type=click.STRING if is_text else _click_type(type_, row),
            multiple=is_list or row.panel == RULE_PANEL,
            metavar=row.metavar or "|".join(get_args(type_)),
            help=help,
            shell_complete=completes,
        )
    return _under(row.panel, option)


def _click_type(type_: Any, row: Option) -> click.ParamType[Any]:
    if get_origin(type_) is Literal:
        return click.Choice(get_args(type_))
    if type_ is int:
        return click.IntRange(row.minimum, row.maximum)
    if type_ is float:
        return click.FloatRange(row.minimum, row.maximum)
    return click.STRING


def _default_text(row: Option, default: Any) -> str:
    if "[default:" in row.help or default in (None, False, (), MISSING) or row.parse is not None:
        return ""
    if default is not True:
        return f" [default: {default}]"
    return "" if row.negation is None else f" [default: {row.flags[0].removeprefix('--')}]"


def _value_of(value: Any, row: Option) -> Any:
    if not row.flags:
        return value
    flag = row.flags[0]
    if row.is_list:
        return tuple(row.value_of(one, flag) for one in value)
    if isinstance(value, tuple):  # a rule
        if len(value) > 1:
            raise UsageError(f"{flag} was given twice")
        (value,) = value
    return row.value_of(value, flag)


def _completion(
    kind: str,
) -> Callable[[click.Context, click.Parameter, str], list[CompletionItem]]:
    def complete(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from ckpttool.cli.completion import complete

        return [CompletionItem(value, help=help) for value, help in complete(kind, context, incomplete)]

    return complete
