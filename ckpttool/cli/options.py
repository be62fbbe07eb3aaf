"""The options that several commands share, and how Typer reads those of records from a signature."""

from __future__ import annotations

import enum
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

import typer

from ckpttool.cli.output import Colour, choose_colour
from ckpttool.core.errors import UsageError
from ckpttool.core.options import (
    EXECUTION_PANEL,
    OUTPUT_PANEL,
    Option,
    options_of,
    value_types,
)
from ckpttool.core.urls import is_remote

ColourChoice = Annotated[
    Colour | None,
    typer.Option(
        "--color",
        callback=choose_colour,
        metavar="WHEN",
        help="Use colour: auto (on a terminal), always or never.",
        show_default=False,
        rich_help_panel=OUTPUT_PANEL,
    ),
]
"""It may stand before the name of a command, and after."""


class Depth(str, enum.Enum):
    """How a checkpoint is verified."""

    QUICK = "quick"
    FULL = "full"


class TensorSelection(str, enum.Enum):
    """Which tensors of a checkpoint a command takes."""

    WEIGHTS = "weights"
    ALL = "all"


class Mode(str, enum.Enum):
    """Which values of a metric are good."""

    MIN = "min"
    MAX = "max"


class PathText(str):
    """A path on the command line, or the URL of something in a store."""

    def __new__(cls, path: str) -> PathText:
        return str.__new__(cls, path if is_remote(path) else Path(path))


HERE = PathText(os.curdir)


def path_argument(metavar: str, help: str) -> Any:
    """Return an argument of paths as Typer has it, which shells complete."""
    return typer.Argument(metavar=metavar, help=help, readable=False, show_default=False, path_type=PathText)


def typer_option(
    *flags: str, help: str, panel: str | None = None, complete: str | None = None, **more: Any
) -> Any:
    """Return an option as Typer has it; its default stands in the help only if it says so itself."""
    more = {"show_default": False, "autocompletion": completes(complete), **more}
    return typer.Option(*flags, help=help, rich_help_panel=panel, **more)


def completes(kind: str | None) -> Any:
    """Return what completes values of a kind, by the method of ``Command``."""

    def values(ctx: typer.Context, incomplete: str) -> Any:
        command: Any = ctx.command
        return command.complete_values(kind, ctx, incomplete)

    return None if kind is None else values


Json = Annotated[bool, typer_option("--json", help="Print a JSON document.", panel=OUTPUT_PANEL)]
Jobs = Annotated[
    int | None,
    typer_option(
        *("--jobs", "-j"),
        metavar="N",
        min=1,
        max=1024,
        help="Use N threads. [default: number of CPUs]",
        panel=EXECUTION_PANEL,
    ),
]
Quiet = Annotated[
    bool, typer_option("--quiet", "-q", help="Print only errors; see the exit status.", panel=OUTPUT_PANEL)
]
Verbose = Annotated[bool, typer_option("--verbose", "-v", help="Print more details.", panel=OUTPUT_PANEL)]
Directory = Annotated[PathText, path_argument("[DIR]", "Directory of checkpoints. [default: .]")]
Yes = Annotated[bool, typer_option("--yes", "-y", help="Don't ask for confirmation.", panel=EXECUTION_PANEL)]
Null = Annotated[
    bool, typer_option("--null", "-0", help="End each path with NUL, for xargs -0.", panel=OUTPUT_PANEL)
]


# The options of records -----------------------------------------------------------------------------

Given = Mapping[str, Any]
"""The values of a record's attributes that were given on the command line, by their names."""


class OptionsOf(NamedTuple):
    """Stands in a command's signature, as ``Annotated[Given, OptionsOf(Record)]``, for options of a record.

    Attributes:
        record: A dataclass whose attributes have options.
        names: The attributes, in the order of the help; by default all that have an option and for which the
            command has no parameter of its own.
        help: What the help says of some of them instead.
    """

    record: type
    names: Sequence[str] = ()
    help: Mapping[str, str] = {}


def expand_options(command: Callable[..., int]) -> Callable[..., int]:
    """Return a command with a parameter for each option of its records, as Typer reads them."""
    signature = inspect.signature(command, eval_str=True)
    context = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    parameters = {"context": context}
    options: dict[str, Option] = {}
    groups: dict[str, Sequence[str]] = {}
    for own in signature.parameters.values():
        source = next((one for one in get_args(own.annotation)[1:] if isinstance(one, OptionsOf)), None)
        if source is None:
            parameters[own.name] = own.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            continue
        known = options_of(source.record)
        names = source.names or [name for name in known if name not in {*signature.parameters, *parameters}]
        groups[own.name] = names
        options.update((name, known[name]) for name in names)
        parameters.update((name, _parameter(source, name)) for name in names)

    def run(context: typer.Context, **values: Any) -> int:
        given = given_values(context, options)
        own = {name: value for name, value in values.items() if name not in options and name != "color"}
        records = {
            group: {name: value for name, value in given.items() if name in names}
            for group, names in groups.items()
        }
        return command(**own, **records)

    run.__doc__ = command.__doc__
    parameters["color"] = context.replace(name="color", annotation=ColourChoice, default=None)
    run.__signature__ = inspect.Signature([*parameters.values()])  # type: ignore[attr-defined]  # what inspect reads
    run.__annotations__ = {name: one.annotation for name, one in parameters.items()}
    return run


def given_values(context: typer.Context, options: Mapping[str, Option]) -> Given:
    """Return what was given of some options, in the order of the command line: its first mistake counts."""
    given = {}
    for name, value in context.params.items():
        source = context.get_parameter_source(name)
        if name in options and source is not None and source.name == "COMMANDLINE":
            given[name] = _value_of(value, options[name])
    return given


def _value_of(value: Any, option: Option) -> Any:
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, list):
        return tuple(value)
    if option.parse is None:
        return value
    try:
        return option.parse(value)
    except UsageError as failure:
        flag = option.flags[0]
        raise UsageError(f"{failure}" if flag in str(failure) else f"{flag}: {failure}") from failure


def _parameter(source: OptionsOf, name: str) -> inspect.Parameter:
    """Return an attribute as Typer takes it: texts that are parsed, lists, and words as an enumeration."""
    option = options_of(source.record)[name]
    help = source.help.get(name, option.help)
    if value_types(source.record)[name] == list[str] and not option.is_text:
        help += " May be repeated."
    default = next(one.default for one in fields(source.record) if one.name == name)
    is_text = option.is_text or option.parse is not None
    type_: Any = str if is_text else value_types(source.record)[name]
    if get_origin(type_) is Literal:
        type_ = _enumeration(name, get_args(type_))
    if is_text or default is MISSING:
        default = None
    elif get_origin(type_) is list:
        default = [*default]
    flags = [*option.flags]
    if option.negation is not None:
        flags[0] += f"/{option.negation}"
    declared = typer_option(
        *flags,
        help=help,
        panel=option.panel,
        metavar=option.metavar,
        min=option.minimum,
        max=option.maximum,
        complete=option.complete,
        show_default="[default:" not in help,
    )
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[type_ | None if default is None else type_, declared],
    )


def _enumeration(name: str, words: Sequence[str]) -> Any:
    return enum.Enum(name, {word: word for word in words}, type=str)
