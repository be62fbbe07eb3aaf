"""The keys of a configuration's tables, which are the options of records.

A table is a record; a list of records in it has its rules. The parsing of a key, its JSON schema, and whether
it needs a trusted file follow from its option.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, dataclass
from functools import cache
from typing import Any, Literal, get_args, get_origin

from ckpttool.cli.config import ConfigDocument, reach_of
from ckpttool.core.errors import UsageError
from ckpttool.core.options import (
    AMOUNT,
    Option,
    Reach,
    WrongValue,
    by_field,
    groups_of,
    option,
    options_of,
    rows,
)
from ckpttool.core.text import closest

_TEXT = {"type": "string", "minLength": 1}
_SCHEMAS: Mapping[Any, Mapping[str, Any]] = {
    bool: {"type": "boolean"},
    int: AMOUNT,
    str: _TEXT,
    list[str]: {"type": "array", "items": _TEXT, "minItems": 1},
}


def path_from_config(path: str, directory: str) -> str:
    """Return a path of a configuration in ``directory`` relative to the current directory."""
    return os.path.normpath(os.path.join(directory, path))


def paths_key(help: str) -> Any:
    """Return a field for the paths of a table."""
    return option("paths", help=help, reach=Reach.BELOW, resolve=path_from_config, default=(os.curdir,))


@cache
def keys(record: type) -> Mapping[str, Option]:
    """Return the options of a table by their keys."""
    return {row.key: row for row in rows(record).values() if row.flags}


def read(record: type, document: ConfigDocument, name: str, *, given: Collection[str] = ()) -> dict[str, Any]:
    """Return the values of a table by attribute, with paths relative to the current directory.

    Args:
        given: Attributes that the command line gives, whose keys therefore need no trust.

    Raises:
        UsageError: It has an unknown key, a wrong value, or one that needs trust.
    """
    reader = _Reader(document, given)
    return by_field(record, reader.values(record, document.table(name), document.origin(name), name))


class _Reader:
    """Reads a table with its rules."""

    def __init__(self, document: ConfigDocument, given: Collection[str]) -> None:
        self._document, self._given = document, given
        self._directory = os.path.dirname(document.path)

    def values(self, record: type, table: Mapping[str, Any], origin: str, name: str = "") -> dict[str, Any]:
        """Return values by attribute: those that are set, and the defaults of paths.

        Args:
            origin: Path and heading of the table, for errors.
            name: Its name; empty for a rule.
        """
        known, found = keys(record), {}
        for key, value in table.items():
            if key not in known:
                raise UsageError(f"{origin}: {self._unknown(key, record, name)}")
            row = known[key]
            if row.item is not None:
                found[row.name] = tuple(self._items(row, row.item, value, origin, name))
            else:
                with _placed(origin):
                    found[row.name] = read_value(row, value, self._directory)
        for key, row in known.items():
            if row.name not in found and row.default is MISSING:
                raise UsageError(f"{origin}: missing key {key} ({row.expected})")
            # A record's default such as "." is relative to the current directory, a table's to its file.
            if row.name not in found and row.default and row.resolve is not None:
                found[row.name] = tuple(row.resolve(one, self._directory) for one in row.default)
        # After all keys were read: a wrong value is reported before the trust that it would need.
        for key, value in table.items():
            why = reach_of(known[key], value, self._document.path)
            if why is not None and known[key].name not in self._given:
                self._document.require_trust(origin, f"{key} {why}")
        return found

    def _unknown(self, key: str, record: type, name: str) -> str:
        for group in groups_of(record).values():
            for attribute, why in group.refused.items():
                if key == options_of(group.record)[attribute].key:
                    return why
        names = {
            one: self._heading(one, name) if row.item and name else one for one, row in keys(record).items()
        }
        if close := closest(key, names):
            return f"unknown key {key} (did you mean {names[close]}?)"
        return f"unknown key {key} (expected one of {', '.join(names.values())})"

    def _heading(self, key: str, name: str) -> str:
        return f"[[{self._document.prefix}{name}.{key}]]"

    def _items(self, row: Option, item: type, value: object, origin: str, name: str) -> Iterator[Any]:
        """Yield the records of an array: of tables in a table, of inline tables in a rule."""
        if not isinstance(value, list) or not all(isinstance(one, Mapping) for one in value):
            if name:
                heading = self._heading(row.key, name)
                raise self._document.wrong(f"{name}.{row.key}", f"not a list of tables (write {heading})")
            raise UsageError(f"{origin}: {WrongValue(str(row.expected)).of(row.key, value)}")
        for number, table in enumerate(value, 1):
            place = f"{origin}: {row.key} {number}"
            if name:
                place = self._document.origin(f"{name}.{row.key} {number}")
            values = self.values(item, table, place)
            with _placed(place):
                made = item(origin=place, **by_field(item, values))
            yield made


def read_value(row: Option, value: Any, directory: str = "") -> Any:
    """Return the value of a key that isn't a list of records; paths in it are relative to a directory.

    Raises:
        UsageError: The value is invalid. The error has the key, but not the file and table.
    """
    schema = _accepted(row)
    if not _fits(value, schema):
        raise WrongValue(row.expected or _in_words(schema)).of(row.key, value)
    if isinstance(value, list):
        return tuple(_resolved(row, row.value_of(one, row.key), directory) for one in value)
    if isinstance(value, str):
        return _resolved(row, row.value_of(value, row.key), directory)
    if isinstance(value, int) and row.parse is not None:
        return row.value_of(f"{value}{row.unit}", row.key, given=value)
    return float(value) if row.type_ is float else value


def _resolved(row: Option, value: Any, directory: str) -> Any:
    return value if row.resolve is None else row.resolve(value, directory)


@contextmanager
def _placed(origin: str) -> Iterator[None]:
    """Put the file and table in front of errors."""
    try:
        yield
    except UsageError as failure:
        raise UsageError(f"{origin}: {failure}") from failure


# Schemas --------------------------------------------------------------------------------------------


def object_schema(record: type) -> dict[str, Any]:
    """Return the JSON schema of a table."""
    known = keys(record)
    required = [key for key, row in known.items() if row.default is MISSING]
    return {
        "type": "object",
        "properties": {key: schema_of(row) for key, row in known.items()},
        "additionalProperties": False,
        **({"required": required} if required else {}),
    }


def schema_of(row: Option) -> dict[str, Any]:
    """Return the JSON schema of a key."""
    # Editors check files by it, and ``_fits`` values before they are parsed. It may accept texts that the
    # parser refuses, such as "7x" for a time, but must never refuse what the parser accepts.
    schema = {"description": row.help, **_accepted(row)}
    if row.default not in (None, (), MISSING):
        schema["default"] = [*row.default] if isinstance(row.default, tuple) else row.default
    elif row.example is not None:
        schema["examples"] = [row.example]
    return schema


def _accepted(row: Option) -> Mapping[str, Any]:
    type_ = row.type_
    if row.schema is not None:
        return row.schema
    if row.item is not None:
        return {"type": "array", "items": object_schema(row.item)}
    if get_origin(type_) is Literal:
        return {"enum": sorted(get_args(type_), key=lambda word: word != row.default)}  # the default first
    if type_ in (int, float) and row.parse is None:
        minimum = 1 if type_ is int and row.minimum is None else row.minimum  # they are counts
        limits = {"minimum": minimum, "maximum": row.maximum}
        name = "integer" if type_ is int else "number"
        return {"type": name} | {one: limit for one, limit in limits.items() if limit is not None}
    return _SCHEMAS.get(type_, {"type": "object"})


def _fits(value: object, schema: Mapping[str, Any]) -> bool:
    # Only the few keywords of JSON schema that these schemas use. In Python, booleans are integers, and in
    # TOML they aren't, so they are checked first.
    if "enum" in schema:
        return value in schema["enum"]
    type_ = schema["type"]
    if isinstance(value, bool):
        return bool(type_ == "boolean")
    if isinstance(value, str):
        is_long = len(value) >= schema.get("minLength", 0) and "\0" not in value
        return "string" in type_ and is_long and re.search(schema.get("pattern", ""), value) is not None
    if isinstance(value, int | float):
        if isinstance(value, int) and type_ == AMOUNT["type"]:
            return True  # its parser checks the limits
        least, above = schema.get("minimum", -math.inf), schema.get("exclusiveMinimum", -math.inf)
        is_within = least <= value <= schema.get("maximum", sys.float_info.max) and above < value
        return is_within and (type_ == "number" or (type_ == "integer" and isinstance(value, int)))
    if isinstance(value, list):
        return type_ == "array" and bool(value) and all(_fits(one, schema["items"]) for one in value)
    return type_ == "object" and isinstance(value, Mapping) and _is_plain(value)


def _is_plain(value: object) -> bool:
    if isinstance(value, Mapping):
        return all(map(_is_plain, value.values()))
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return isinstance(value, str | int | float)


def _in_words(schema: Mapping[str, Any]) -> str:
    """Return a description of the values that a JSON schema allows, for errors."""
    if "enum" in schema:
        *first, last = schema["enum"]
        return f"{', '.join(first)} or {last}"
    least, most = schema.get("minimum"), schema.get("maximum")
    words = {
        "boolean": "true or false",
        "integer": f"an integer of {least} or more",
        "number": f"a number of {least} or more" if most is None else f"a number from {least} to {most}",
        "array": "a non-empty list of strings",
        "object": "a table of strings, numbers, booleans, lists and tables",
    }
    return words.get(str(schema["type"]), "a string")


# Names ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Naming:
    """The table ``[naming]``. A template that names a directory is an error."""

    template: str | None = option(
        "template", help="Template of names.", example="{run}-e{epoch:04d}", reach=Reach.HARMLESS
    )


def naming_template(document: ConfigDocument) -> str | None:
    """Return the template of a configuration; None if it has none."""
    return Naming(**read(Naming, document, "naming")).template
