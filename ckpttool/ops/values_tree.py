"""How two trees of plain data differ: mappings key by key, lists item by item, the rest by value."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from ckpttool.formats.content.telling import KeyText
from ckpttool.ops.difference import ABSENT, ValueChange
from ckpttool.report import counted

_SHOWN_ITEMS = 16
"""Containers of more are told by their size: a random generator's state has 625 numbers."""
_MANGLED = "___torch_mangle_"
_MANGLE = re.compile(rf"{_MANGLED}\d+\.")
"""What TorchScript adds to the name of a class that it met before; the number depends on the process."""
_NOTHING = ("none", "null")
"""How a text spells a value that is None."""
_LONGEST_NUMBER = 400
"""Characters; float64 needs no more to be written out."""
_UNREAD = re.compile(
    r"[<: ][\d,]+ bytes of "
    r"(data|text|a record without a checksum|a file that was not read|constants that were not read)>"
)
_CUT = re.compile(r"[\w.]+\(…\)|<[A-Z]\w*[a-z]\w*>")
"""How formats tell of content without its checksum: of too many bytes, of objects too large for a line."""
_DIGEST = re.compile(r"CRC-32 [0-9a-f]{8}")
"""What makes such a description one of the whole content."""


def walked(a: object, b: object, path: str = "", *, spelled: bool = False) -> Iterator[ValueChange]:
    """Yield where two trees of plain data differ, by dotted path, in their order; without recursion.

    Args:
        a: The first tree.
        b: The second tree.
        path: Where both lie.
        spelled: Whether a text equals the number, the truth value or the JSON that it spells, for one side
            has texts alone.
    """
    pending = [(path, a, b)]
    while pending:
        here, x, y = pending.pop()
        if spelled:
            x, y = _as_tree(x, y), _as_tree(y, x)
        if isinstance(x, Mapping) and isinstance(y, Mapping):
            if not spelled:
                yield from _other_keys(here, x, y)
            keys = [*x, *(key for key in y if key not in x)]
            below = [(joined(here, key), x.get(key, ABSENT), y.get(key, ABSENT)) for key in keys]
            pending += reversed(below)
        elif isinstance(x, list) and isinstance(y, list):
            if _is_flat(x) and _is_flat(y):
                yield from _lists(here, x, y, spelled=spelled)
                continue
            if len(x) != len(y):
                yield ValueChange(here, _count(x), _count(y))
            pending += reversed(
                [(joined(here, at), *pair) for at, pair in enumerate(zip(x, y, strict=False))]
            )
        elif not same(x, y, spelled=spelled):
            yield ValueChange(here, told(x), told(y))


def _other_keys(path: str, x: Mapping[Any, Any], y: Mapping[Any, Any]) -> Iterator[ValueChange]:
    """Yield the keys that are a text on one side, and on the other a number that looks like it."""
    sides = [{key for key in side if isinstance(key, KeyText)} for side in (x, y)]
    others = sides[0] ^ sides[1]
    for key in x if others else ():
        if key in others and key in y:
            told_as = [f"key {key}, no text" if key in side else f"key '{key}'" for side in sides]
            yield ValueChange(joined(path, key), *told_as)


def _lists(path: str, x: list[Any], y: list[Any], *, spelled: bool) -> Iterator[ValueChange]:
    """Yield how two lists of plain values differ: as they are, or counted where they are long."""
    apart = [at for at, pair in enumerate(zip(x, y, strict=False)) if not same(*pair, spelled=spelled)]
    if not apart and len(x) == len(y):
        return
    if max(len(x), len(y)) <= _SHOWN_ITEMS:
        yield ValueChange(path, x, y)
        return
    first = f"{len(apart):,} differ, the first at {apart[0]}" if apart else "the first are the same"
    yield ValueChange(path, _count(x), f"{_count(y)}, {first}")


def same(x: object, y: object, *, spelled: bool = False) -> bool:
    """Tell whether two plain values are one: NaN is NaN, 1 is 1.0, and True is not 1."""
    if spelled and isinstance(x, str) is not isinstance(y, str):
        return _spells(x, y) if isinstance(x, str) else _spells(str(y), x)
    if isinstance(x, bool) or isinstance(y, bool):
        return x is y
    if isinstance(x, float) and isinstance(y, float) and x != x and y != y:
        return True
    if isinstance(x, str) and isinstance(y, str) and _MANGLED in x + y:
        return _MANGLE.sub("", x) == _MANGLE.sub("", y)
    return x == y


def _spells(text: str, value: object) -> bool:
    """Tell whether a text is how a value is written."""
    text = text.strip()
    if value is None or isinstance(value, bool):
        return text.lower() in (_NOTHING if value is None else (str(value).lower(),))
    if not isinstance(value, int | float) or len(text) > _LONGEST_NUMBER:
        return False
    try:
        number = int(text) if isinstance(value, int) and text.lstrip("+-").isdecimal() else float(text)
    except ValueError:
        return False
    return same(number, value)


def _as_tree(value: object, other: object) -> object:
    """Return what a text of JSON holds, where the other side is a container; anything else as it is."""
    if not isinstance(value, str) or not isinstance(other, Mapping | list):
        return value
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        return value
    return found if isinstance(found, Mapping | list) else value


def _is_flat(values: list[Any]) -> bool:
    return not any(isinstance(value, Mapping | list) for value in values)


def told(value: object) -> object:
    """Return a value as it is, or what it is where it is large."""
    if isinstance(value, Mapping):
        is_small = len(value) <= _SHOWN_ITEMS and _is_flat([*value.values()])
        return dict(value) if is_small else counted(len(value), "key")
    if isinstance(value, list):
        return value if len(value) <= _SHOWN_ITEMS and _is_flat(value) else _count(value)
    return value


def _count(values: list[Any]) -> str:
    return counted(len(values), "item")


def joined(path: str, key: object) -> str:
    """Return the dotted path of what lies under a key."""
    return f"{path}.{key}" if path else str(key)


def told_in_part(a: object, b: object, path: str = "") -> Iterator[str]:
    """Yield the paths of what is told alike on both sides, and told only in part."""
    pending = [(path, a, b)]
    while pending:
        here, x, y = pending.pop()
        if isinstance(x, Mapping) and isinstance(y, Mapping):
            if _is_array(x) and x == y:
                yield here
            pending += reversed([(joined(here, key), x[key], y[key]) for key in x if key in y])
        elif isinstance(x, list) and isinstance(y, list):
            pending += reversed(
                [(joined(here, at), *pair) for at, pair in enumerate(zip(x, y, strict=False))]
            )
        elif isinstance(x, str) and x == y and (_UNREAD.search(x) or _CUT.fullmatch(x)):
            yield here


def _is_array(told: Mapping[Any, Any]) -> bool:
    """Tell whether a mapping describes an array that holds something, without a checksum of it."""
    is_array = told.get("<class>") == "numpy.ndarray" or "<dataset>" in told
    shape = told.get("shape")
    return is_array and "CRC-32" not in told and isinstance(shape, list) and 0 not in shape


def has_digest(tree: object) -> bool:
    """Tell whether something in a tree is described by a checksum of its whole content."""
    pending = [tree]
    while pending:
        value = pending.pop()
        if isinstance(value, Mapping):
            pending += value.values()
        elif isinstance(value, list):
            pending += value
        elif isinstance(value, str) and _DIGEST.search(value):
            return True
    return False
