"""Options, said once: an attribute of a record carries how a command and a configuration give its value."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cache
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

RULE_PANEL = "Rules (a checkpoint stays if any rule keeps it)"
CHECK_PANEL = "Checks"
PREDICTION_PANEL = "Prediction"
EXPECTATION_PANEL = "Expected results of the prediction"
REPORT_PANEL = "Reports"
COMPARISON_PANEL = "Comparison"
CONVERSION_PANEL = "Conversion"
NAMING_PANEL = "Naming"
SELECTION_PANEL = "Selection"
EXECUTION_PANEL = "Execution"
OUTPUT_PANEL = "Output"
"""The headings of options in the help."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """How the value of an attribute is given.

    Attributes:
        flags: Its names on the command line, such as ``--jobs`` and ``-j``; empty for an argument.
        help: A sentence on its effect.
        metavar: Placeholder for the value in the help.
        panel: Its heading in the help.
        parse: Makes the value of a text; None where number, word or text is the value.
        is_path: Whether the value is the path of a file.
        is_text: Whether the command line takes a text, which the command reads itself.
        is_output: Whether the value is the path of a file that the command writes.
        minimum, maximum: Limits of a number, inclusive.
        negation: Its name on the command line to say no, such as ``--no-recursive``.
        example: A value as a configuration has it, for an option without a default.
        complete: The kind of values that a shell completes, of ``cli.completion``.
    """

    flags: tuple[str, ...] = ()
    help: str
    metavar: str | None = None
    panel: str | None = None
    parse: Callable[[str], Any] | None = None
    is_path: bool = False
    is_text: bool = False
    is_output: bool = False
    minimum: int | None = None
    maximum: int | None = None
    negation: str | None = None
    example: Any = None
    complete: str | None = None

    @property
    def key(self) -> str:
        """Return its name in a configuration."""
        return [flag for flag in self.flags if flag.startswith("--")][-1].removeprefix("--")


def option(*flags: str, help: str, default: Any = None, default_factory: Any = MISSING, **more: Any) -> Any:
    """Return a field of a dataclass that has an option."""
    if default_factory is not MISSING:
        default = MISSING
    row = Option(flags=flags, help=help, **more)
    return field(default=default, default_factory=default_factory, metadata={"option": row})


def argument(metavar: str, help: str, *, default: Any = MISSING, complete: str | None = None) -> Any:
    """Return a field of a dataclass that is given by its place on the command line; a list takes several."""
    return field(default=default, metadata={"option": Option(help=help, metavar=metavar, complete=complete)})


def jobs_option() -> Any:
    """Return a field for a number of threads."""
    return option(
        *("--jobs", "-j"),
        metavar="N",
        minimum=1,
        maximum=1024,
        help="Use N threads. [default: number of CPUs]",
        panel=EXECUTION_PANEL,
    )


class Group(NamedTuple):
    """Options of another record.

    Attributes:
        record: A dataclass whose attributes have options.
        names: Its attributes, in the order of the help; empty for all that have an option.
        help: Other texts of the help, by attribute.
    """

    record: type
    names: Sequence[str] = ()
    help: Mapping[str, str] = {}

    def row(self, name: str) -> Option:
        """Return the option of an attribute."""
        known = options_of(self.record)[name]
        return replace(known, help=self.help[name]) if name in self.help else known


def group(record: type, names: Sequence[str] = (), help: Mapping[str, str] | None = None) -> Any:
    """Return a field of a dataclass that holds the given options of another record, by attribute."""
    return field(default_factory=dict, metadata={"group": Group(record, names, help or {})})


@cache
def options_of(record: type) -> Mapping[str, Option]:
    """Return the options of a record's attributes, by their names; arguments are none."""
    rows = {one.name: one.metadata["option"] for one in fields(record) if "option" in one.metadata}
    return {name: row for name, row in rows.items() if row.flags}


def attributes_by_key(record: type) -> dict[str, str]:
    """Return the names of a record's attributes by what a configuration calls them."""
    return {option.key: name for name, option in options_of(record).items()}


@cache
def value_types(record: type) -> Mapping[str, Any]:
    """Return the types of a record's attributes, where they aren't None; ``list[str]`` for any texts."""
    return {name: _value_type(hint) for name, hint in get_type_hints(record).items()}


def _value_type(hint: Any) -> Any:
    if type(None) in get_args(hint):
        (hint,) = (one for one in get_args(hint) if one is not type(None))
    return list[str] if get_origin(hint) in (tuple, Sequence) else hint
