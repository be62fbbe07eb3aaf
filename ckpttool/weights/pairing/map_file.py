"""The user's map file: reads and validates it, and applies its rules to pair or convert tensors."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast, get_args

from ckpttool.containers.toml import parse_toml
from ckpttool.core.errors import UsageError, from_os_error
from ckpttool.core.tensor import Path, Tensor
from ckpttool.core.text import counted
from ckpttool.storage import fs
from ckpttool.weights.pairing.layouts import CONVOLUTIONS, FLATTEN, LayoutItem, stored_item
from ckpttool.weights.pairing.pairs import Pair, Unpaired
from ckpttool.weights.pairing.rearrangement import (
    Pattern,
    Unfit,
    concatenate,
    cut,
    pattern,
    rearrange,
    transpose_pattern,
)

MAX_BYTES = 1 << 24
"""Size limit of a map file; programs may generate one line per tensor."""

Rule = Literal["as-is", "dense", "conv", "flatten", "transpose", "permute"]

_TABLES = ("names", "tensor", "drop")
_KNOWN_TABLES = "[names], [[tensor]] and drop"
_KEYS = ("from", "to", "rule", "shape", "axes", "inverse", "join", "split", "sizes")
_DIRECTED = ("conv", "flatten", "permute")
_DIRECTED_TEXT = ", ".join(f'"{rule}"' for rule in _DIRECTED)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRule:
    """Table ``[[tensor]]``: conversion of tensors of the first side to tensors of the second one.

    Attributes:
        place: Its place in the map file, for errors.
        sources: Globs of names of the first side; the texts that the first one's stars match fill the others.
        targets: Names of the second side, with the same number of stars.
        rule: Conversion of each source.
        shape: For ``flatten``: shape (C, H, W) of the flattened image.
        axes: For ``permute``: axes as in ``numpy.transpose``.
        inverse: Whether the rule is applied backwards; None: if only the first side is PyTorch's.
        join: Axis along which sources are concatenated, or None.
        split: Axis along which the source is split, or None.
        sizes: Lengths of the parts; (): equal lengths, or the lengths on the second side.
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
        """Whether the rule only renames."""
        return (self.rule, self.join, self.split) == ("as-is", None, None)


@dataclass(frozen=True, slots=True)
class TensorMap:
    """Content of a map file, with names as in the checkpoints' files.

    Attributes:
        path: Path of the map file.
        names: Name on the second side by name or glob on the first side, with equally many stars.
        tensors: Rules for tensors whose layouts differ.
        drop: Globs of names on the first side that have no counterpart.
    """

    path: str
    names: Mapping[str, str] = field(default_factory=dict)
    tensors: tuple[TensorRule, ...] = ()
    drop: tuple[str, ...] = ()

    def wrong(self, place: str, problem: str) -> UsageError:
        return UsageError(f"{self.path}[{place}]: {problem}")


def read_map(path: str) -> TensorMap:
    """Return the content of a map file."""
    try:
        tables = parse_toml(_read_bytes(path).decode())
    except ValueError as failure:  # includes UnicodeDecodeError
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
    """Return the content of a map file from its tables; see ``read_map``."""
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


# Rules ------------------------------------------------------------------------------------------------


Becomes = Callable[[LayoutItem], list[LayoutItem]]


class SideNames:
    """Names of one side's tensors, in their order.

    Attributes:
        twice: Names that several tensors have.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._count = Counter(names)
        self.twice = {name for name, times in self._count.items() if times > 1}

    def __contains__(self, name: str) -> bool:
        return name in self._count

    def find(self, glob: str) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Yield the names that match a glob, each with the texts matched by the stars."""
        if "*" not in glob:
            yield from [(glob, ())] if glob in self._count else []
            return
        stars = re.compile("(.*)".join(map(re.escape, glob.split("*"))), re.DOTALL)
        for name in self._count:
            if match := stars.fullmatch(name):
                yield name, match.groups()

    def find_groups(
        self, rule: TensorRule, is_taken: Callable[[str], bool]
    ) -> Iterator[tuple[list[str], list[str]]]:
        """Yield (source names, target names) for each match of a rule whose first source isn't taken."""
        for first, captured in self.find(rule.sources[0]):
            if not is_taken(first):
                names = [first, *(fill_stars(name, captured) for name in rule.sources[1:])]
                yield names, [fill_stars(name, captured) for name in rule.targets]


def fill_stars(name: str, captured: Sequence[str]) -> str:
    """Return a name with its stars replaced by the captured texts."""
    rest = iter(captured)
    return "".join(next(rest) if part == "*" else part for part in re.split(r"(\*)", name))


def apply_rule(
    tensors: Sequence[Tensor],
    rule: TensorRule,
    paths: Sequence[Path],
    *,
    flip: bool,
    rows: Sequence[int] = (),
) -> list[Tensor]:
    """Return the tensors that a rule makes of its sources, lazily.

    Args:
        tensors: Sources of one match of the rule.
        rule: Rule of the map.
        paths: Paths of the results.
        flip: Whether rules for PyTorch's layout are applied backwards unless ``inverse`` is set.
        rows: Lengths of the parts of a split on the other side; if empty, the map's sizes or equal lengths.

    Raises:
        Unfit: The rule doesn't fit the tensors.
    """
    is_backwards = flip and rule.rule in ("conv", "flatten") if rule.inverse is None else rule.inverse
    axis_lengths = dict(zip("chw", rule.shape, strict=True)) if rule.rule == "flatten" else {}
    turned = []
    for tensor in tensors:
        way = _pattern_of(rule, len(tensor.shape))
        if way is not None:
            way = way.inverse() if is_backwards else way
            tensor = rearrange(tensor, way, tensor.path, sizes=axis_lengths)
        turned.append(tensor)
    if rule.split is None:
        return [turned[0] if len(turned) == 1 else concatenate(turned, paths[0])]
    (whole,) = turned
    length = whole.shape[0] if whole.shape else 0
    if not rows and not rule.sizes and length % len(paths):
        raise Unfit(f"{length:,} rows for {len(paths)} equal parts")
    parts = rule.sizes or rows or (length // len(paths),) * len(paths)
    if not whole.shape or sum(parts) != length or (rows and tuple(rows) != tuple(parts)):
        raise Unfit(f"shape {list(whole.shape)} for {' + '.join(map(str, rows or parts))} rows")
    return [cut(whole, sum(parts[:at]), parts[at], path) for at, path in enumerate(paths)]


def _pattern_of(rule: TensorRule, axes: int) -> Pattern | None:
    if rule.rule == "as-is":
        return None
    if rule.rule == "dense":
        return pattern("i o -> o i")
    if rule.rule == "transpose":
        return transpose_pattern(range(axes)[::-1])
    if rule.rule == "permute":
        return transpose_pattern(rule.axes)
    if rule.rule == "flatten":
        return FLATTEN
    if axes not in CONVOLUTIONS:
        raise Unfit(f"{axes} axes, not {', '.join(map(str, CONVOLUTIONS))}")
    return CONVOLUTIONS[axes]


# Pairs ------------------------------------------------------------------------------------------------


def apply_map(
    unpaired: Unpaired, tensor_map: TensorMap, layouts: tuple[Becomes, Becomes], *, flip: bool
) -> list[LayoutItem]:
    """Pair the tensors that a map names; return those whose new name doesn't exist on the other side.

    Args:
        unpaired: Tensors of both sides as stored.
        tensor_map: The map.
        layouts: For each side, the conversion of a stored tensor to PyTorch's layout.
        flip: Whether rules for PyTorch's layout are applied backwards unless ``inverse`` is set.
    """
    mapped = _MapPairs(unpaired, tensor_map)
    for rule in tensor_map.tensors:
        mapped.follow(rule, flip)
    for glob, name in tensor_map.names.items():
        mapped.rename(glob, name, layouts)
    for glob in tensor_map.drop:
        mapped.drop(glob)
    unpaired.take(mapped.pairs)
    ids = mapped.used[0] | mapped.used[1]
    unpaired.drop(
        [item for item in unpaired.a if id(item.tensor) in ids],
        [item for item in unpaired.b if id(item.tensor) in ids],
    )
    unpaired.drop(mapped.aside, [])
    return mapped.aside


class _MapPairs:
    """Pairs made by the rules of a map so far; a tensor is used at most once.

    Attributes:
        pairs: The pairs.
        aside: Tensors of the first side that are dropped or have no counterpart.
        used: ``id`` of the tensors of each side that a rule has taken.
    """

    def __init__(self, unpaired: Unpaired, tensor_map: TensorMap) -> None:
        self._map = tensor_map
        # If several tensors have one name, the first; rules that name it are refused.
        self._a, self._b = (
            {item.tensor.name: item for item in reversed(side)} for side in (unpaired.a, unpaired.b)
        )
        self._names = [SideNames(item.tensor.name for item in side) for side in (unpaired.a, unpaired.b)]
        self._given: dict[str, str] = {}
        self.pairs: list[Pair] = []
        self.aside: list[LayoutItem] = []
        self.used: tuple[set[int], set[int]] = (set(), set())

    def follow(self, rule: TensorRule, flip: bool) -> None:
        """Apply one ``[[tensor]]`` table."""

        def is_taken(name: str) -> bool:
            return id(self._a[name].tensor) in self.used[0]

        matched = 0
        for names, targets in self._names[0].find_groups(rule, is_taken):  # the first table that matches wins
            first = names[0]
            self._require_single(rule.place, names, targets)
            sources = [self._get(rule.place, self._a, name, "first") for name in names]
            taken = next((item for item in sources if id(item.tensor) in self.used[0]), None)
            if taken is not None:
                raise self._map.wrong(rule.place, f"a table before took {taken.tensor.name!r}")
            others = [self._get(rule.place, self._b, name, "second") for name in targets]
            for target in targets:
                self._give(rule.place, target, first)
            try:
                items = _mapped_items(sources, others, rule, flip)
            except Unfit as failure:
                raise self._map.wrong(rule.place, f"{first}: {failure} (rule {rule.rule})") from failure
            for item, other in zip(items, others, strict=True):
                self._pair(item, stored_item(other.tensor))
            matched += 1
        if not matched:
            raise self._map.wrong(rule.place, self._none(rule.sources[0]))

    def rename(self, glob: str, name: str, layouts: tuple[Becomes, Becomes]) -> None:
        """Apply one line of ``[names]``."""
        place = f'names."{glob}"'
        matched = 0
        for source, captured in self._names[0].find(glob):
            item = self._a[source]
            if id(item.tensor) in self.used[0]:
                continue
            target = fill_stars(name, captured)
            self._require_single(place, [source], [target])
            self._give(place, target, source)
            other = self._b.get(target)
            if other is None:
                self.aside.append(item)
                self.used[0].add(id(item.tensor))
                continue
            matched += 1
            self._pair(_torch_item(item, layouts[0]), _torch_item(other, layouts[1]))
        if not matched and any(self._names[0].find(glob)):
            problem = f"the second side has no {name!r} (or a line before took what is to be called so)"
            raise self._map.wrong(place, problem)
        if not matched:
            raise self._map.wrong(place, self._none(glob))

    def drop(self, glob: str) -> None:
        """Apply one glob of ``drop``."""
        items = [self._a[name] for name, _ in self._names[0].find(glob)]
        items = [item for item in items if id(item.tensor) not in self.used[0]]
        if not items:
            raise self._map.wrong("drop", self._none(glob))
        self.aside += items
        self.used[0].update(id(item.tensor) for item in items)

    def _none(self, glob: str) -> str:
        is_taken = any(self._names[0].find(glob))
        return f"nothing {'more ' if is_taken else ''}on the first side is called {glob!r}"

    def _get(self, place: str, side: dict[str, LayoutItem], name: str, which: str) -> LayoutItem:
        if name not in side:
            raise self._map.wrong(place, f"nothing on the {which} side is called {name!r}")
        return side[name]

    def _require_single(self, place: str, sources: Sequence[str], targets: Sequence[str]) -> None:
        """Require that each name belongs to one tensor."""
        for names, side, which in (
            (sources, self._names[0], "first"),
            (targets, self._names[1], "second"),
        ):
            for name in names:
                if name in side.twice:
                    raise self._map.wrong(place, f"several tensors of the {which} side are called {name!r}")

    def _give(self, place: str, target: str, source: str) -> None:
        if target in self._given:
            raise self._map.wrong(
                place, f"{source!r} becomes {target!r}, and so does {self._given[target]!r}"
            )
        self._given[target] = source

    def _pair(self, item: LayoutItem, other: LayoutItem) -> None:
        self.used[0].update(id(source) for source in item.sources)
        self.used[1].update(id(source) for source in other.sources)
        self.pairs.append(Pair(item, other, "map"))


def _torch_item(item: LayoutItem, layouts: Becomes) -> LayoutItem:
    converted = layouts(item)
    return converted[0] if len(converted) == 1 else item  # one that becomes several is compared as stored


def _mapped_items(
    sources: list[LayoutItem], others: list[LayoutItem], rule: TensorRule, flip: bool
) -> list[LayoutItem]:
    """Return the tensors of the first side, converted by a rule."""
    rows = [other.tensor.shape[0] if other.tensor.shape else 0 for other in others] if rule.split == 0 else []
    paths = [other.tensor.path for other in others]
    origin = tuple(item.tensor for item in sources)
    results = apply_rule(origin, rule, paths, flip=flip, rows=rows)
    operation = rule.rule if rule.rule != "as-is" else "join" if rule.join is not None else "split"
    text = None if rule.is_plain else f"map: {operation}"
    return [
        LayoutItem(other.tensor.name, one, origin, text) for one, other in zip(results, others, strict=True)
    ]
