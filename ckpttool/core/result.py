"""Results of the library, and the JSON documents of records, which ``--json`` prints.

A record whose document isn't just its fields has a method ``document``; the keys are in
docs/reference/json.md.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from datetime import date
from enum import Enum, EnumMeta
from functools import cache
from importlib import import_module
from types import MappingProxyType, UnionType
from typing import Any, ClassVar, TypeVar, get_args, get_origin, get_type_hints, overload

from ckpttool.core.errors import MissingPackage
from ckpttool.core.text import is_printable

# Results --------------------------------------------------------------------------------------------

T = TypeVar("T")


class Result(ABC):
    """Base of the results of library functions: a short repr and a JSON document."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.summary}>"

    @property
    @abstractmethod
    def summary(self) -> str:
        """Return the repr without the name of the class."""

    @abstractmethod
    def document(self) -> dict[str, Any]:
        """Return its JSON document, with NaN and infinities as floats."""

    def to_dict(self) -> dict[str, Any]:
        """Return the document that the command line prints with ``--json``, as plain data.

        NaN and infinities are strings, as in JSON.
        """
        document: dict[str, Any] = json.loads(dumps(self.document()))
        return document


class Table(Result):
    """A result with rows."""

    __slots__ = ()
    _ROWS: ClassVar[tuple[str | int, ...]]
    """Keys that lead to the rows in the document."""

    def to_frame(self) -> Any:
        """Return the rows as a pandas DataFrame; nested values have dotted columns, such as ``metrics.loss``.

        Raises:
            MissingPackage: pandas isn't installed.
        """
        try:
            pandas = import_module("pandas")
        except ImportError as error:
            raise MissingPackage("to_frame", "it needs pandas", expected="pip install pandas") from error
        rows: Any = self.to_dict()
        for key in self._ROWS:
            rows = rows[key]
        return pandas.json_normalize(rows)


class CheckpointTable(Table, Sequence[T]):
    """A result that is a sequence of its ``checkpoints``: its length, items and slices are theirs."""

    __slots__ = ()
    _ROWS = ("checkpoints",)
    checkpoints: tuple[T, ...]

    def __len__(self) -> int:
        return len(self.checkpoints)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[T, ...]: ...
    def __getitem__(self, index: int | slice) -> T | tuple[T, ...]:
        return self.checkpoints[index]


# Documents ------------------------------------------------------------------------------------------


R = TypeVar("R")
_ATTRIBUTES = {"bytes": "nbytes", "errors": "problems"}
"""Keys that differ from their attributes in all documents."""
_PLAIN = frozenset({str, int, float, bool, type(None)})
_KEYS = {attribute: key for key, attribute in _ATTRIBUTES.items()}


def document_of(
    record: object,
    *keys: str,
    names: Mapping[str, str] = MappingProxyType({}),
    optional: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the document of a record.

    Args:
        record: A dataclass, a named tuple or another object.
        keys: Names of attributes, in the order of the document; by default all fields.
        names: Names of attributes that differ from their key, by key. Any part of a dotted name, such as
            ``entry.path``, may be None.
        optional: Further keys, omitted if their value is None or empty.
    """
    if not keys:
        own: Any = record
        attributes = [one.name for one in fields(own)] if is_dataclass(own) else own._fields
        key_of = {**_KEYS, **{attribute: key for key, attribute in names.items()}}
        keys = tuple(key_of.get(attribute, attribute) for attribute in attributes)
    document = {key: _plain_at(record, key, names) for key in keys}
    for key in optional:
        value = _plain_at(record, key, names)
        if value not in (None, [], {}):
            document[key] = value
    return document


def plain(value: Any) -> Any:
    """Return a value as plain data; a mapping must hold plain data already."""
    if type(value) in _PLAIN:
        return value
    if type(value) in (tuple, list):
        return [plain(one) for one in value]
    if isinstance(value, Enum):
        return value.value
    if hasattr(value, "document"):
        return value.document()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, complex):
        return [value.real, value.imag]
    if isinstance(value, date):
        return value.isoformat()
    return document_of(value) if _is_record(value) else value


def _plain_at(record: Any, key: str, names: Mapping[str, str]) -> Any:
    attribute = names.get(key) or _ATTRIBUTES.get(key, key)
    for name in attribute.split("."):
        record = None if record is None else getattr(record, name)
    return plain(record)


def messages(reasons: Mapping[str, str], **more: str) -> list[dict[str, str]]:
    """Return a list of messages with their paths."""
    return [{"path": path, "message": reason, **more} for path, reason in reasons.items()]


def record_of(kind: Callable[..., R], document: Mapping[str, Any]) -> R:
    """Return the record of a document; fields missing there have their defaults.

    Args:
        kind: A dataclass or a named tuple of plain data, members of enums, such records and tuples of them.
        document: Result of ``document_of``; unknown keys are ignored.

    Raises:
        TypeError: A value has another type, or is missing.
        ValueError: An enum has no such member.
    """
    values = {}
    for name, type_ in _types_of(kind).items():
        key = _KEYS.get(name, name)
        if key in document:
            values[name] = _parsed(type_, document[key])
    return kind(**values)


@cache
def _types_of(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _parsed(type_: Any, value: Any) -> Any:
    origin = get_origin(type_)
    if origin is UnionType:
        return None if value is None else _parsed(get_args(type_)[0], value)
    if origin is tuple and isinstance(value, list):
        return tuple(_parsed(get_args(type_)[0], one) for one in value)
    if _is_record(type_) and isinstance(value, dict):
        return record_of(type_, value)
    if isinstance(type_, EnumMeta):
        return type_(value)
    if type(value) is not type_:
        raise TypeError(f"{value!r:.40} is not a {type_}")
    return value


def _is_record(value: Any) -> bool:
    return is_dataclass(value) or hasattr(value, "_fields")


def dumps(document: Any) -> str:
    """Return a document as JSON text; NaN and infinities become strings.

    Unprintable characters and those that UTF-8 can't encode are JSON escapes.
    """
    # Names stay readable (``ensure_ascii``), but control characters could move a cursor, and lone surrogates,
    # as in names of files that aren't UTF-8, can't be encoded. JSON escapes characters as units of UTF-16.
    try:
        text = json.dumps(document, ensure_ascii=False, allow_nan=False)
    except ValueError:
        text = json.dumps(finite(document), ensure_ascii=False, allow_nan=False)
    for character in set(text):
        if not is_printable(character):
            units = character.encode("utf-16-be", "surrogatepass").hex()
            escapes = "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))
            text = text.replace(character, escapes)
    return text


def finite(value: Any) -> Any:
    """Return plain data with strings for NaN and infinities, which JSON lacks."""
    root = [value]
    pending: list[Any] = [root]
    while pending:
        holder = pending.pop()
        for key, item in list(holder.items() if isinstance(holder, dict) else enumerate(holder)):
            if isinstance(item, float) and not math.isfinite(item):
                holder[key] = "NaN" if item != item else "Infinity" if item > 0 else "-Infinity"
            elif isinstance(item, Mapping | list | tuple):
                holder[key] = dict(item) if isinstance(item, Mapping) else list(item)
                pending.append(holder[key])
    return root[0]
