"""The map file: which tensor of the first side is which of the second, where no convention says it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast, get_args

from ckpttool.containers.toml import parse_toml
from ckpttool.core.errors import UsageError, from_os_error
from ckpttool.core.text import counted
from ckpttool.storage import fs

MAX_BYTES = 1 << 24
"""Of a map: a program may write it, one line a tensor."""

Rule = Literal["as-is", "dense", "conv", "flatten", "transpose", "permute"]

_TABLES = ("names", "tensor", "drop")
_KNOWN_TABLES = "[names], [[tensor]] and drop"
_KEYS = ("from", "to", "rule", "shape", "axes", "inverse", "join", "split", "sizes")
_DIRECTED = ("conv", "flatten", "permute")
_DIRECTED_TEXT = ", ".join(f'"{rule}"' for rule in _DIRECTED)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRule:
    """How tensors of the first side become tensors of the second one.

    Attributes:
        place: Where it stands in the map file.
        sources: Globs of names of the first side; what the stars of the first take is put into the others.
        targets: Names of the second side, with a star for each of those.
        rule: What is done to each of the first side's.
        shape: Of ``flatten``: (C, H, W) of what was flattened.
        axes: Of ``permute``: as NumPy's ``transpose`` has them.
        inverse: Whether the rule is followed backwards; None: where only the first side is PyTorch's.
        join: The axis along which several become one, or None.
        split: The axis along which one is cut into several, or None.
        sizes: How long each of these is; (): equally long, or as the second side has them.
    """

    place: str
    sources: tuple[str, ...]
    targets: tuple[str, ...]
    rule: Rule = "as-is"
    shape: tuple[int, ...] = ()
    axes: tuple[int, ...] = ()
    inverse: bool | None = None
    join: int | None = None
    split: int | None = None
    sizes: tuple[int, ...] = ()

    @property
    def is_plain(self) -> bool:
        """Tell whether a tensor stays as it is."""
        return (self.rule, self.join, self.split) == ("as-is", None, None)


@dataclass(frozen=True, slots=True)
class TensorMap:
    """What a map file says; its names are those that the files have.

    Attributes:
        path: The map file.
        names: From name or glob of the first side to name of the second, with the same stars.
        tensors: Rules for tensors that are held in different ways.
        drop: Globs of names of the first side that have no counterpart.
    """

    path: str
    names: Mapping[str, str] = field(default_factory=dict)
    tensors: tuple[TensorRule, ...] = ()
    drop: tuple[str, ...] = ()

    def wrong(self, place: str, problem: str) -> UsageError:
        """Return the error that says what is wrong at a place."""
        return UsageError(f"{self.path}[{place}]: {problem}")


def read_map(path: str) -> TensorMap:
    """Return what a map file says."""
    try:
        tables = parse_toml(_read_bytes(path).decode())
    except ValueError as failure:  # no UTF-8 is one too
        if isinstance(failure, UsageError):
            raise
        raise UsageError(f"{path} is not valid TOML: {failure}") from failure
    return parse_map(path, tables)


def _read_bytes(path: str) -> bytes:
    try:
        with fs.open_regular(path) as file:
            if os.fstat(file.fileno()).st_size > MAX_BYTES:
                raise UsageError(f"{path}: no map (a file of at most {MAX_BYTES:,} bytes)")
            return file.read(MAX_BYTES)
    except OSError as failure:
        raise from_os_error(failure, path) from failure


def parse_map(path: str, tables: Mapping[str, Any]) -> TensorMap:
    """Return what the tables of a map file say; see ``read_map``."""
    unknown = sorted(tables.keys() - set(_TABLES))
    if unknown:
        raise UsageError(f"{path}: unknown {unknown[0]} (there are {_KNOWN_TABLES})")
    empty = TensorMap(path)
    names = _names(empty, tables.get("names", {}))
    rows = tables.get("tensor", [])
    if not isinstance(rows, list) or not all(isinstance(row, Mapping) for row in rows):
        raise empty.wrong("tensor", "it is no list of tables (write [[tensor]])")
    rules = tuple(_rule(empty, f"tensor {number}", table) for number, table in enumerate(rows, 1))
    drop = _name_list(empty, "drop", tables, "drop") if "drop" in tables else ()
    if not names and not rules and not drop:
        raise UsageError(f"{path}: it maps nothing (there are {_KNOWN_TABLES})")
    return TensorMap(path, names, rules, drop)


def _names(of: TensorMap, table: object) -> dict[str, str]:
    if not isinstance(table, Mapping):
        raise of.wrong("names", f"{table!r:.40} (a table)")
    names: dict[str, str] = {}
    for name, to in table.items():
        place = f'names."{name}"'
        if isinstance(to, Mapping):
            raise of.wrong(f"names.{name}", 'a table (a name with dots is written in quotes: "fc.weight")')
        if not isinstance(to, str) or not to or not name:
            raise of.wrong(place, f"{to!r:.40} (a name)")
        _require_stars(of, place, name, to)
        names[name] = to
    return names


def _require_stars(of: TensorMap, place: str, glob: str, name: str) -> None:
    needed, stars = glob.count("*"), name.count("*")
    if stars != needed:
        raise of.wrong(place, f"{name!r} has {counted(stars, 'star')} ({needed}, as {glob!r} has)")


def _rule(of: TensorMap, place: str, table: Mapping[str, Any]) -> TensorRule:
    unknown = sorted(table.keys() - set(_KEYS))
    if unknown:
        raise of.wrong(place, f"unknown key {unknown[0]} (there are {', '.join(_KEYS)})")
    sources, targets = (_name_list(of, place, table, key) for key in ("from", "to"))
    for name in (*sources[1:], *targets):
        _require_stars(of, place, sources[0], name)
    rule = table.get("rule", "as-is")
    if rule not in get_args(Rule):
        raise of.wrong(place, f"rule is {rule!r:.40} (one of {', '.join(get_args(Rule))})")
    shape, axes = (_numbers(of, place, table, key) for key in ("shape", "axes"))
    _require(of, place, rule == "flatten", "shape", shape, 3, "[C, H, W] of what was flattened")
    _require(of, place, rule == "permute", "axes", axes, None, "an axis for each, as [1, 0]")
    if rule == "permute" and sorted(axes) != list(range(len(axes))):
        raise of.wrong(place, f"axes is {list(axes)} (each of 0 to {len(axes) - 1} once)")
    join, split = (_axis(of, place, table, key) for key in ("join", "split"))
    if (len(sources) > 1) != (join is not None) or (len(targets) > 1) != (split is not None):
        raise of.wrong(
            place,
            f"{len(sources)} to {len(targets)} (several become one with join = 0, one several by split = 0)",
        )
    if len(sources) > 1 and len(targets) > 1:
        raise of.wrong(place, f"{len(sources)} to {len(targets)} (several to one, or one to several)")
    sizes = _numbers(of, place, table, "sizes")
    if "sizes" in table and (split is None or len(sizes) != len(targets)):
        raise of.wrong(place, f"sizes is {list(sizes)} (with split = 0, one for each of {len(targets)})")
    return TensorRule(
        place=place,
        sources=sources,
        targets=targets,
        rule=cast(Rule, rule),
        shape=shape,
        axes=axes,
        inverse=_inverse(of, place, table, rule),
        join=join,
        split=split,
        sizes=sizes,
    )


def _inverse(of: TensorMap, place: str, table: Mapping[str, Any], rule: str) -> bool | None:
    value = table.get("inverse")
    if value is not None and (type(value) is not bool or rule not in _DIRECTED):
        raise of.wrong(place, f"inverse is {value!r:.40} (true or false, with rule = {_DIRECTED_TEXT})")
    return value


def _name_list(of: TensorMap, place: str, table: Mapping[str, Any], key: str) -> tuple[str, ...]:
    if key not in table:
        raise of.wrong(place, f"{key} is missing (a name, or a list of names)")
    value = table[key]
    names = [value] if isinstance(value, str) else value
    is_right = isinstance(names, list) and names and all(isinstance(name, str) and name for name in names)
    if not is_right:
        raise of.wrong(place, f"{key} is {value!r:.40} (a name, or a list of names)")
    if len(set(names)) != len(names):
        raise of.wrong(place, f"{key} names one tensor twice")
    return tuple(names)


def _numbers(of: TensorMap, place: str, table: Mapping[str, Any], key: str) -> tuple[int, ...]:
    value = table.get(key, [])
    if not isinstance(value, list) or not all(type(one) is int and one >= 0 for one in value):
        raise of.wrong(place, f"{key} is {value!r:.40} (a list of whole numbers)")
    return tuple(value)


def _require(
    of: TensorMap, place: str, is_needed: bool, key: str, value: tuple[int, ...], count: int | None, what: str
) -> None:
    if is_needed and (not value or (count is not None and len(value) != count)):
        raise of.wrong(place, f"{key} is {list(value)} ({what})")
    if value and not is_needed:
        raise of.wrong(place, f'{key} goes with rule = "{"flatten" if key == "shape" else "permute"}" alone')


def _axis(of: TensorMap, place: str, table: Mapping[str, Any], key: str) -> int | None:
    value = table.get(key)
    if value is not None and (type(value) is not int or value != 0):
        raise of.wrong(place, f"{key} is {value!r:.40} (0: the first axis, after the rule)")
    return value
