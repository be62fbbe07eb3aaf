"""Options of commands, configurations and library functions, declared once as fields of records."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from enum import Enum
from functools import cache
from typing import Any, Literal, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from ckpttool.core.errors import UsageError
from ckpttool.core.text import did_you_mean

Depth = Literal["quick", "full"]
"""Whether only the structure of a checkpoint is read, or every byte."""
Mode = Literal["min", "max"]
"""Whether the lowest or the highest value of a metric is the best."""
RULE_PANEL = "Rules (a checkpoint is kept if any rule selects it)"
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
AMOUNT: Mapping[str, Any] = {"type": ["string", "integer"], "minLength": 1, "minimum": 0}
"""JSON schema of a number, or of a text such as ``7d12h`` or ``20%``."""


class Reach(Enum):
    """Effect of a key; all but HARMLESS need a trusted configuration. The value completes error messages."""

    HARMLESS = None
    """Selects checkpoints below the file, or sets an option for them."""
    BELOW = "points outside the directory of this file"
    """Names files: harmless below the configuration's directory; other paths, trackers and URLs are not."""
    YES = "answers for you"
    TARGET = "names a place to write to"
    CODE = "runs code"


class WrongValue(UsageError):
    """A value that its option can't have; the text describes the allowed ones."""

    def of(self, name: str, value: object) -> UsageError:
        """Return the error of an option or a key that has the value."""
        text = str(value).lower() if isinstance(value, bool) else repr(value)
        return UsageError(f"{name} is {text if len(text) <= 60 else f'{text[:59]}…'} ({self})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """The option of a field: its names, its help, and the parsing of its value.

    Attributes:
        flags: Its names on the command line, such as ``--jobs`` and ``-j``; empty for an argument. Names
            without dashes are for configurations only.
        help: A sentence on its effect.
        metavar: Placeholder for the value in the help.
        panel: Its heading in the help.
        parse: Converts a text, or each text of a list, to the value; None if the value is a number or a text.
        expected: Description of valid texts or values; None if the errors of ``parse`` have it.
        is_output: Whether the value is the path of a file that the command writes.
        minimum, maximum: Limits of a number, inclusive.
        negation: Its negative name on the command line, such as ``--no-recursive``.
        example: An example of a value in configurations, for an option without a default.
        reach: Effect of the key in a configuration. Without one, it needs a trusted configuration.
        resolve: Resolves a path, or each of a list, relative to a directory, its second argument.
        schema: JSON schema of the key, if it doesn't follow from type and limits.
        unit: Unit of a number in a configuration; on the command line it is part of the text.
        complete: The kind of values that a shell completes, of ``cli.completion``.
        name, type_, default: The attribute, its type without None (``list[str]`` for any list of texts), and
            its default (``MISSING`` without one); set by ``rows``.
        group: The field of a record that holds the group with the option; None for its own options.
    """

    flags: tuple[str, ...] = ()
    help: str
    metavar: str | None = None
    panel: str | None = None
    parse: Callable[[str], Any] | None = None
    expected: str | None = None
    is_output: bool = False
    minimum: int | None = None
    maximum: int | None = None
    negation: str | None = None
    example: Any = None
    reach: Reach | None = None
    resolve: Callable[[str, str], str] | None = None
    schema: Mapping[str, Any] | None = None
    unit: str = ""
    complete: str | None = None
    name: str = ""
    type_: Any = None
    default: Any = None
    group: str | None = None

    @property
    def key(self) -> str:
        """Return its name in a configuration."""
        names = [flag.removeprefix("--") for flag in self.flags]
        return [name for name in names if not name.startswith("-")][-1]

    @property
    def is_list(self) -> bool:
        """Return whether the value is a list of texts."""
        return bool(self.type_ == list[str])

    @property
    def item(self) -> type | None:
        """Return the record of each item if the value is a list of records."""
        (item, *_) = get_args(self.type_) or (None,)
        return item if isinstance(item, type) and is_dataclass(item) else None

    def value_of(self, text: str, name: str, *, given: object = None) -> Any:
        """Return the parsed value of a text.

        Args:
            name: The flag or the key, for errors.
            given: The value for errors, if it isn't the text.
        """
        shown = text if given is None else given
        try:
            return text if self.parse is None else self.parse(text)
        except WrongValue as failure:
            raise failure.of(name, shown) from failure
        except UsageError as failure:
            if self.expected is not None:
                raise WrongValue(self.expected).of(name, shown) from failure
            raise UsageError(f"{failure}" if name in str(failure) else f"{name}: {failure}") from failure


def option(*flags: str, help: str, default: Any = None, default_factory: Any = MISSING, **more: Any) -> Any:
    """Return a dataclass field with an option."""
    if default_factory is not MISSING:
        default = MISSING
    row = Option(flags=flags, help=help, **more)
    return field(default=default, default_factory=default_factory, metadata={"option": row})


def argument(metavar: str, help: str, *, default: Any = MISSING, complete: str | None = None) -> Any:
    """Return a dataclass field for a positional argument; a list takes several."""
    return field(default=default, metadata={"option": Option(help=help, metavar=metavar, complete=complete)})


def jobs_option(maximum: int | None = 1024) -> Any:
    """Return a field for the number of threads."""
    return option(
        *("--jobs", "-j"),
        metavar="N",
        minimum=1,
        maximum=maximum,
        help="Use N threads. [default: number of CPUs]",
        panel=EXECUTION_PANEL,
        example=4,
        reach=Reach.HARMLESS,
    )


def mode_option(panel: str) -> Any:
    """Return a field for the direction of a metric: whether the lowest or the highest value is the best."""
    help = "Take the lowest or the highest value as the best. [default: by the name]"
    return option("--mode", help=help, panel=panel)


def same_option(record: type, name: str, **other: Any) -> Any:
    """Return a field with the option and the default of another record's field, and the given changes."""
    (known,) = (one for one in fields(record) if one.name == name)
    return field(default=known.default, metadata={"option": replace(known.metadata["option"], **other)})


class Group(NamedTuple):
    """Options of another record.

    Attributes:
        record: A dataclass whose attributes have options.
        names: Its attributes, in the order of the help; empty for all options and arguments.
        help: Texts of the help that differ from the record's, by attribute.
        refused: Excluded attributes, with the reasons.
        is_record: Whether the field is an instance of the record; else it is a mapping.
    """

    record: type
    names: Sequence[str] = ()
    help: Mapping[str, str] = {}
    refused: Mapping[str, str] = {}
    is_record: bool = False

    @property
    def rows(self) -> Iterator[Option]:
        """Yield its options."""
        for name in self.names or rows(self.record):
            if name not in self.refused:
                row = rows(self.record)[name]
                yield replace(row, help=self.help.get(name, row.help))


def group(
    record: type,
    names: Sequence[str] = (),
    help: Mapping[str, str] | None = None,
    refused: Mapping[str, str] | None = None,
    *,
    is_record: bool = False,
    default: Any = MISSING,
) -> Any:
    """Return a dataclass field for options of another record: those that are given, by attribute.

    ``default`` is the value if ``is_record`` and none of the options is given.
    """
    metadata = {"group": Group(record, names, help or {}, refused or {}, is_record)}
    if is_record:
        return field(default=default, metadata=metadata)
    return field(default_factory=dict, metadata=metadata)


@cache
def rows(record: type) -> Mapping[str, Option]:
    """Return the options and arguments of a record and of its groups by attribute, in their order."""
    # An option of the record itself replaces one of the same attribute in a group, in the record's order.
    found: dict[str, Option] = {}
    hints, groups = get_type_hints(record), groups_of(record)
    own = {one.name: one.metadata["option"] for one in fields(record) if "option" in one.metadata}
    for one in fields(record):
        if one.name in own:
            default = one.default if one.default_factory is MISSING else None
            type_ = _value_type(hints[one.name])
            found[one.name] = replace(own[one.name], name=one.name, type_=type_, default=default)
        elif one.name in groups:
            for row in groups[one.name].rows:
                if row.name not in own:
                    found[row.name] = replace(row, group=one.name)
    return found


@cache
def groups_of(record: type) -> Mapping[str, Group]:
    """Return the groups of a record by the fields that hold them."""
    return {one.name: one.metadata["group"] for one in fields(record) if "group" in one.metadata}


def by_field(record: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by the fields of a record, with those of each group in a mapping or in its record."""
    groups = groups_of(record)
    found: dict[str, Any] = {name: {} for name in groups}
    for name, row in rows(record).items():
        if name in values:
            (found if row.group is None else found[row.group])[name] = values[name]
    defaults = {one.name: one.default for one in fields(record)}
    for name, known in groups.items():
        if known.is_record and not found[name] and defaults[name] is not MISSING:
            found[name] = defaults[name]
        elif known.is_record:
            found[name] = known.record(**by_field(known.record, found[name]))
    return found


@cache
def options_of(record: type) -> Mapping[str, Option]:
    """Return the options of a record and of its groups by attribute, without arguments."""
    return {name: row for name, row in rows(record).items() if row.flags}


def _value_type(hint: Any) -> Any:
    if type(None) in get_args(hint):
        (hint,) = (one for one in get_args(hint) if one is not type(None))
    if get_origin(hint) not in (tuple, Sequence):
        return hint
    item = get_args(hint)[0]
    return list[item] if is_dataclass(item) else list[str]  # type: ignore[valid-type]  # known at run time


# Keywords of functions ------------------------------------------------------------------------------


Function = TypeVar("Function", bound=Callable[..., Any])
Record = TypeVar("Record")


def with_keywords(record: Record, keywords: Mapping[str, Any]) -> Record:
    """Return a record with other values of some attributes.

    Raises:
        TypeError: It has no attribute of that name.
    """
    require_known(keywords, type(record))
    return replace(record, **keywords)  # type: ignore[type-var]  # a dataclass


def require_known(keywords: Mapping[str, Any], *records: type) -> None:
    """Raise TypeError unless each keyword is an attribute of one of the records."""
    known = [name for record in records for name in attribute_names(record)]
    for name in keywords.keys() - set(known):
        hint = did_you_mean(name, known)
        raise TypeError(f"unexpected keyword argument {name!r}" + (f" ({hint})" if hint else ""))


def attribute_names(record: type) -> list[str]:
    """Return the names of a record's attributes."""
    return [one.name for one in fields(record)]


def shows_keywords(*records: type) -> Callable[[Function], Function]:
    """Return a decorator by which help and notebooks show records' attributes instead of ``**keywords``."""
    # Type checkers read the keywords from a ``TypedDict`` by ``Unpack``, which is imported for them alone. So
    # its annotation can't be evaluated at run time, and is replaced.

    def show(function: Function) -> Function:
        signature = inspect.signature(function)
        *own, keywords = signature.parameters.values()
        names = {one.name for one in own}
        more = [
            inspect.Parameter(
                one.name, inspect.Parameter.KEYWORD_ONLY, default=default_of(one), annotation=one.type
            )
            for record in records
            for one in fields(record)
            if one.name not in names
        ]
        function.__signature__ = signature.replace(parameters=[*own, *more])  # type: ignore[attr-defined]  # what inspect reads
        function.__annotations__ |= {keywords.name: Any}
        return function

    return show


def default_of(field: Any) -> Any:
    """Return the default of a dataclass field for a signature."""
    if field.default is not MISSING:
        return field.default
    return inspect.Parameter.empty if field.default_factory is MISSING else field.default_factory()
