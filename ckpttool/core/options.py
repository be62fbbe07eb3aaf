"""Options, said once: an attribute of a record carries how a command and a configuration give its value."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

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
        flags: Its names on the command line, such as ``--jobs`` and ``-j``.
        help: A sentence on what one gets.
        metavar: What stands for the value in the help.
        panel: Its heading in the help.
        parse: Makes the value of a text; None where number, word or text is the value.
        is_path: Whether the value is the path of a file.
        is_text: Whether the command line takes a text, which the command reads itself.
        minimum, maximum: Which numbers are taken.
        negation: Its name on the command line to say no, such as ``--no-recursive``.
        example: A value as a configuration has it, for an option without a default.
        complete: The kind of values that a shell completes, of ``cli.completion``.
    """

    flags: tuple[str, ...]
    help: str
    metavar: str | None = None
    panel: str | None = None
    parse: Callable[[str], Any] | None = None
    is_path: bool = False
    is_text: bool = False
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


@cache
def options_of(record: type) -> Mapping[str, Option]:
    """Return the options of a record's attributes, by their names."""
    return {one.name: one.metadata["option"] for one in fields(record) if "option" in one.metadata}


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
