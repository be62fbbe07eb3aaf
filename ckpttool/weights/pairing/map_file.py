"""The user's map file: reads and validates it, and applies its rules to pair or convert tensors."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, cast, get_args

from ckpttool.containers.toml import parse_toml
from ckpttool.core.errors import UsageError, from_os_error
from ckpttool.core.tensor import Path, Tensor
from ckpttool.core.text import counted
from ckpttool.storage import fs
from ckpttool.weights.pairing.layouts import CONVOLUTIONS, FLATTEN, LayoutItem, stored_item
from ckpttool.weights.pairing.pairs import Pair, Unpaired
from ckpttool.weights.pairing.rearrangement import (
    LayoutMismatch,
    Pattern,
    concatenate,
    cut,
    parse_pattern,
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

    def error_at(self, place: str, problem: str) -> UsageError:
        return UsageError(f"{self.path}[{place}]: {problem}")


def read_map(path: str) -> TensorMap:
    """Return the content of a map file."""
    try:
        with fs.open_regular(path) as file:
            if os.fstat(file.fileno()).st_size > MAX_BYTES:
                raise UsageError(f"{path}: not a map (at most {MAX_BYTES:,} bytes)")
            data = file.read(MAX_BYTES)
    except OSError as failure:
        raise from_os_error(failure, path) from failure
    try:
        tables = parse_toml(data.decode())
    except UsageError:
        raise
    except ValueError as failure:  # includes UnicodeDecodeError
        raise UsageError(f"{path} is not valid TOML: {failure}") from failure
    return parse_map(path, tables)


def parse_map(path: str, tables: Mapping[str, Any]) -> TensorMap:
    """Return the content of a map file from its tables; see ``read_map``."""
    if unknown := sorted(tables.keys() - set(_TABLES)):
        raise UsageError(f"{path}: unknown {unknown[0]} (expected {_KNOWN_TABLES})")
    error_at = TensorMap(path).error_at
    names = _names(tables.get("names", {}), error_at)
    rows = tables.get("tensor", [])
    if not isinstance(rows, list) or not all(isinstance(row, Mapping) for row in rows):
        raise error_at("tensor", "not a list of tables (write [[tensor]])")
    numbered = ((f"tensor {number}", table) for number, table in enumerate(rows, 1))
    rules = tuple(_rule(place, table, partial(error_at, place)) for place, table in numbered)
    drop = _name_list(tables, "drop", partial(error_at, "drop")) if "drop" in tables else ()
    if not names and not rules and not drop:
        raise UsageError(f"{path}: it maps nothing (expected {_KNOWN_TABLES})")
    return TensorMap(path, names, rules, drop)


_Problem = Callable[[str], UsageError]
"""Makes the error for a problem in one table."""


def _names(table: object, error_at: Callable[[str, str], UsageError]) -> dict[str, str]:
    if not isinstance(table, Mapping):
        raise error_at("names", f"{table!r:.40} (a table)")
    names: dict[str, str] = {}
    for name, to in table.items():
        if isinstance(to, Mapping):
            raise error_at(f"names.{name}", 'a table (a name with dots is written in quotes: "fc.weight")')
        problem = partial(error_at, f'names."{name}"')
        if not isinstance(to, str) or not to or not name:
            raise problem(f"{to!r:.40} (a name)")
        _require_stars(name, to, problem)
        names[name] = to
    return names


def _require_stars(glob: str, name: str, problem: _Problem) -> None:
    needed, stars = glob.count("*"), name.count("*")
    if stars != needed:
        raise problem(f"{name!r} has {counted(stars, 'star')} ({needed}, as {glob!r} has)")


def _rule(place: str, table: Mapping[str, Any], problem: _Problem) -> TensorRule:
    if unknown := sorted(table.keys() - set(_KEYS)):
        raise problem(f"unknown key {unknown[0]} (expected one of {', '.join(_KEYS)})")
    sources, targets = (_name_list(table, key, problem) for key in ("from", "to"))
    for name in (*sources[1:], *targets):
        _require_stars(sources[0], name, problem)
    rule = table.get("rule", "as-is")
    if rule not in get_args(Rule):
        raise problem(f"rule is {rule!r:.40} (one of {', '.join(get_args(Rule))})")
    shape, axes = (_numbers(table, key, problem) for key in ("shape", "axes"))
    _require_lists(rule, shape, axes, problem)
    join, split = (table.get(key) for key in ("join", "split"))
    for key, axis in (("join", join), ("split", split)):
        if axis is not None and (type(axis) is not int or axis != 0):
            raise problem(f"{key} is {axis!r:.40} (0: the first axis, after the rule)")
    counts = f"{len(sources)} to {len(targets)}"
    if (len(sources) > 1) != (join is not None) or (len(targets) > 1) != (split is not None):
        raise problem(f"{counts} (several become one with join = 0, one several by split = 0)")
    if len(sources) > 1 and len(targets) > 1:
        raise problem(f"{counts} (several to one, or one to several)")
    sizes = _numbers(table, "sizes", problem)
    if "sizes" in table and (split is None or len(sizes) != len(targets)):
        raise problem(f"sizes is {list(sizes)} (with split = 0, one for each of {len(targets)})")
    inverse = table.get("inverse")
    if inverse is not None and (type(inverse) is not bool or rule not in _DIRECTED):
        raise problem(f"inverse is {inverse!r:.40} (true or false, with rule = {_DIRECTED_TEXT})")
    return TensorRule(
        place=place,
        sources=sources,
        targets=targets,
        rule=cast(Rule, rule),
        shape=shape,
        axes=axes,
        inverse=inverse,
        join=join,
        split=split,
        sizes=sizes,
    )


def _require_lists(rule: str, shape: tuple[int, ...], axes: tuple[int, ...], problem: _Problem) -> None:
    """Require ``shape`` with the rule flatten only, and ``axes`` with the rule permute only."""
    for owner, key, value, is_wrong, expected in (
        ("flatten", "shape", shape, len(shape) != 3, "[C, H, W] before the Flatten"),
        ("permute", "axes", axes, not axes, "one axis each, as in [1, 0]"),
    ):
        if rule == owner and is_wrong:
            raise problem(f"{key} is {list(value)} ({expected})")
        if rule != owner and value:
            raise problem(f'{key} needs rule = "{owner}"')
    if rule == "permute" and sorted(axes) != list(range(len(axes))):
        raise problem(f"axes is {list(axes)} (each of 0 to {len(axes) - 1} once)")


def _name_list(table: Mapping[str, Any], key: str, problem: _Problem) -> tuple[str, ...]:
    if key not in table:
        raise problem(f"{key} is missing (a name, or a list of names)")
    value = table[key]
    names = [value] if isinstance(value, str) else value
    if not (isinstance(names, list) and names and all(isinstance(name, str) and name for name in names)):
        raise problem(f"{key} is {value!r:.40} (a name, or a list of names)")
    if len(set(names)) != len(names):
        raise problem(f"{key} names one tensor twice")
    return tuple(names)


def _numbers(table: Mapping[str, Any], key: str, problem: _Problem) -> tuple[int, ...]:
    value = table.get(key, [])
    if not isinstance(value, list) or not all(type(one) is int and one >= 0 for one in value):
        raise problem(f"{key} is {value!r:.40} (a list of whole numbers)")
    return tuple(value)


# Rules ------------------------------------------------------------------------------------------------


LayoutConversion = Callable[[LayoutItem], list[LayoutItem]]


class SideNames:
    """Names of one side's tensors, in their order.

    Attributes:
        duplicates: Names that several tensors have.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._count = Counter(names)
        self.duplicates = {name for name, times in self._count.items() if times > 1}

    def __contains__(self, name: str) -> bool:
        return name in self._count

    def find(self, glob: str) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Yield the names that match a glob, each with the texts matched by the stars."""
        if "*" not in glob:
            yield from [(glob, ())] if glob in self._count else []
            return
        # Each star matches as much as it can: of several stars, the first ones get the long texts. Names may
        # have line breaks, which a dot matches only with DOTALL.
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
    from_torch: bool,
    rows: Sequence[int] = (),
) -> list[Tensor]:
    """Return the tensors that a rule makes of its sources, lazily.

    Args:
        tensors: Sources of one match of the rule.
        rule: Rule of the map.
        paths: Paths of the results.
        from_torch: Whether rules for PyTorch's layout are applied backwards unless ``inverse`` is set.
        rows: Lengths of the parts of a split on the other side; if empty, the map's sizes or equal lengths.

    Raises:
        LayoutMismatch: The rule doesn't fit the tensors.
    """
    # ``conv`` and ``flatten`` are written as from another framework to PyTorch. If only the first side is
    # PyTorch's, they are inverted; ``dense`` is its own inverse, and ``permute`` is taken literally.
    is_backwards = from_torch and rule.rule in ("conv", "flatten") if rule.inverse is None else rule.inverse
    axis_lengths = dict(zip("chw", rule.shape, strict=True)) if rule.rule == "flatten" else {}
    turned = []
    for tensor in tensors:
        pattern = _pattern_of(rule, len(tensor.shape))
        if pattern is not None:
            pattern = pattern.inverse() if is_backwards else pattern
            tensor = rearrange(tensor, pattern, tensor.path, sizes=axis_lengths)
        turned.append(tensor)
    # Tensors are joined and split after the rule, along the first axis of its result. The lengths of the
    # parts come from the map, else from the tensors on the other side, else they are equal. If both the map
    # and the other side have lengths, they must agree.
    if rule.split is None:
        return [turned[0] if len(turned) == 1 else concatenate(turned, paths[0])]
    (whole,) = turned
    length = whole.shape[0] if whole.shape else 0
    if not rows and not rule.sizes and length % len(paths):
        raise LayoutMismatch(f"{length:,} rows for {len(paths)} equal parts")
    parts = rule.sizes or rows or (length // len(paths),) * len(paths)
    if not whole.shape or sum(parts) != length or (rows and tuple(rows) != tuple(parts)):
        raise LayoutMismatch(f"shape {list(whole.shape)} for {' + '.join(map(str, rows or parts))} rows")
    return [cut(whole, sum(parts[:at]), parts[at], path) for at, path in enumerate(paths)]


def _pattern_of(rule: TensorRule, axes: int) -> Pattern | None:
    if rule.rule == "as-is":
        return None
    if rule.rule == "dense":
        return parse_pattern("i o -> o i")
    if rule.rule == "transpose":
        return transpose_pattern(range(axes)[::-1])
    if rule.rule == "permute":
        return transpose_pattern(rule.axes)
    if rule.rule == "flatten":
        return FLATTEN
    if axes not in CONVOLUTIONS:
        raise LayoutMismatch(f"{axes} axes, not {', '.join(map(str, CONVOLUTIONS))}")
    return CONVOLUTIONS[axes]


# Pairs ------------------------------------------------------------------------------------------------


def apply_map(
    unpaired: Unpaired,
    tensor_map: TensorMap,
    layouts: tuple[LayoutConversion, LayoutConversion],
    *,
    from_torch: bool,
) -> list[LayoutItem]:
    """Pair the tensors that a map names; return those whose new name doesn't exist on the other side.

    Args:
        unpaired: Tensors of both sides as stored.
        tensor_map: The map.
        layouts: For each side, the conversion of a stored tensor to PyTorch's layout.
        from_torch: Whether rules for PyTorch's layout are applied backwards unless ``inverse`` is set.
    """
    # A tensor is used once, by the first line that names it: a table before a line of ``[names]``, and both
    # before ``drop``. So a glob in ``[names]`` or ``drop`` may include tensors that a table names.
    mapped = _MapPairs(unpaired, tensor_map)
    for rule in tensor_map.tensors:
        mapped.apply_table(rule, from_torch)
    for glob, name in tensor_map.names.items():
        mapped.rename(glob, name, layouts)
    for glob in tensor_map.drop:
        mapped.drop(glob)
    unpaired.add_pairs(mapped.pairs)
    ids = mapped.taken[0] | mapped.taken[1]
    unpaired.drop(
        [item for item in unpaired.a if id(item.tensor) in ids],
        [item for item in unpaired.b if id(item.tensor) in ids],
    )
    unpaired.drop(mapped.without_counterpart, [])
    return mapped.without_counterpart


class _MapPairs:
    """Pairs made by the rules of a map so far; a tensor is used at most once.

    Attributes:
        pairs: The pairs.
        without_counterpart: Tensors of the first side that are dropped or have no counterpart.
        taken: ``id`` of the tensors of each side that a rule has taken.
    """

    def __init__(self, unpaired: Unpaired, tensor_map: TensorMap) -> None:
        self._map = tensor_map
        # If several tensors have one name, the first; rules that name it are refused.
        self._a, self._b = (
            {item.tensor.name: item for item in reversed(side)} for side in (unpaired.a, unpaired.b)
        )
        self._names = [SideNames(item.tensor.name for item in side) for side in (unpaired.a, unpaired.b)]
        self._claimed: dict[str, str] = {}
        self.pairs: list[Pair] = []
        self.without_counterpart: list[LayoutItem] = []
        self.taken: tuple[set[int], set[int]] = (set(), set())

    def apply_table(self, rule: TensorRule, from_torch: bool) -> None:
        """Apply one ``[[tensor]]`` table."""

        def is_taken(name: str) -> bool:
            return id(self._a[name].tensor) in self.taken[0]

        matched = 0
        for names, targets in self._names[0].find_groups(rule, is_taken):  # the first table that matches wins
            first = names[0]
            self._require_single(rule.place, names, targets)
            sources = [self._get(rule.place, self._a, name, "first") for name in names]
            taken = next((item for item in sources if id(item.tensor) in self.taken[0]), None)
            if taken is not None:
                raise self._map.error_at(rule.place, f"an earlier table uses {taken.tensor.name!r}")
            others = [self._get(rule.place, self._b, name, "second") for name in targets]
            for target in targets:
                self._claim(rule.place, target, first)
            try:
                items = _mapped_items(sources, others, rule, from_torch)
            except LayoutMismatch as failure:
                raise self._map.error_at(rule.place, f"{first}: {failure} (rule {rule.rule})") from failure
            for item, other in zip(items, others, strict=True):
                self._pair(item, stored_item(other.tensor))
            matched += 1
        if not matched:
            raise self._map.error_at(rule.place, self._no_match(rule.sources[0]))

    def rename(self, glob: str, name: str, layouts: tuple[LayoutConversion, LayoutConversion]) -> None:
        """Apply one line of ``[names]``."""
        place = f'names."{glob}"'
        matched = 0
        for source, captured in self._names[0].find(glob):
            item = self._a[source]
            if id(item.tensor) in self.taken[0]:
                continue
            target = fill_stars(name, captured)
            self._require_single(place, [source], [target])
            self._claim(place, target, source)
            other = self._b.get(target)
            if other is None:
                self.without_counterpart.append(item)
                self.taken[0].add(id(item.tensor))
                continue
            matched += 1
            self._pair(_torch_item(item, layouts[0]), _torch_item(other, layouts[1]))
        if not matched and any(self._names[0].find(glob)):
            problem = f"the second side has no {name!r}, or an earlier line uses it"
            raise self._map.error_at(place, problem)
        if not matched:
            raise self._map.error_at(place, self._no_match(glob))

    def drop(self, glob: str) -> None:
        """Apply one glob of ``drop``."""
        items = [self._a[name] for name, _ in self._names[0].find(glob)]
        items = [item for item in items if id(item.tensor) not in self.taken[0]]
        if not items:
            raise self._map.error_at("drop", self._no_match(glob))
        self.without_counterpart += items
        self.taken[0].update(id(item.tensor) for item in items)

    def _no_match(self, glob: str) -> str:
        is_taken = any(self._names[0].find(glob))
        return f"nothing {'more ' if is_taken else ''}on the first side matches {glob!r}"

    def _get(self, place: str, side: dict[str, LayoutItem], name: str, which: str) -> LayoutItem:
        if name not in side:
            raise self._map.error_at(place, f"no {name!r} on the {which} side")
        return side[name]

    def _require_single(self, place: str, sources: Sequence[str], targets: Sequence[str]) -> None:
        """Require that each name belongs to one tensor."""
        for names, side, which in (
            (sources, self._names[0], "first"),
            (targets, self._names[1], "second"),
        ):
            for name in names:
                if name in side.duplicates:
                    raise self._map.error_at(place, f"several tensors {name!r} on the {which} side")

    def _claim(self, place: str, target: str, source: str) -> None:
        if target in self._claimed:
            raise self._map.error_at(
                place, f"{source!r} and {self._claimed[target]!r} both become {target!r}"
            )
        self._claimed[target] = source

    def _pair(self, item: LayoutItem, other: LayoutItem) -> None:
        self.taken[0].update(id(source) for source in item.sources)
        self.taken[1].update(id(source) for source in other.sources)
        self.pairs.append(Pair(item, other, "map"))


def _torch_item(item: LayoutItem, layouts: LayoutConversion) -> LayoutItem:
    converted = layouts(item)
    return converted[0] if len(converted) == 1 else item  # one that becomes several is compared as stored


def _mapped_items(
    sources: list[LayoutItem], others: list[LayoutItem], rule: TensorRule, from_torch: bool
) -> list[LayoutItem]:
    """Return the tensors of the first side, converted by a rule."""
    rows = [other.tensor.shape[0] if other.tensor.shape else 0 for other in others] if rule.split == 0 else []
    paths = [other.tensor.path for other in others]
    origin = tuple(item.tensor for item in sources)
    results = apply_rule(origin, rule, paths, from_torch=from_torch, rows=rows)
    operation = rule.rule if rule.rule != "as-is" else "join" if rule.join is not None else "split"
    text = None if rule.is_plain else f"map: {operation}"
    return [
        LayoutItem(other.tensor.name, one, origin, text) for one, other in zip(results, others, strict=True)
    ]
