"""Follows the rules of a map file: which names they mean, what becomes of tensors, which pairs they make."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from ckpttool.core.tensor import Path, Tensor
from ckpttool.weights.pairing.layouts import CONVOLUTIONS, FLATTEN, LayoutItem, stored_item
from ckpttool.weights.pairing.map_file import TensorMap, TensorRule
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

Becomes = Callable[[LayoutItem], list[LayoutItem]]


class SideNames:
    """The names of one side's tensors, in their order.

    Attributes:
        twice: Names that several tensors have.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._count = Counter(names)
        self.twice = {name for name, times in self._count.items() if times > 1}

    def __contains__(self, name: str) -> bool:
        return name in self._count

    def find(self, glob: str) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Yield the names that a glob means, each with what its stars took."""
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
        """Yield the names that a rule takes together and those that it gives; what is taken is left alone."""
        for first, captured in self.find(rule.sources[0]):
            if not is_taken(first):
                names = [first, *(fill_stars(name, captured) for name in rule.sources[1:])]
                yield names, [fill_stars(name, captured) for name in rule.targets]


def fill_stars(name: str, captured: Sequence[str]) -> str:
    """Return a name with what stars took in the place of its own."""
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
    """Return what a rule makes of tensors, under the paths that it gives.

    Args:
        tensors: What it takes together.
        rule: What is done.
        paths: What the results are called.
        flip: Whether rules that lead to PyTorch's layout go backwards where the map doesn't say it.
        rows: How long the parts are that one is cut into; as the map says, or equally long, if empty.

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
    """Pair what a map names; return the tensors that it gives a name which the other side hasn't got.

    Args:
        unpaired: Both sides as stored.
        tensor_map: What the map says.
        layouts: Of either side, what each stored tensor is in PyTorch's layout.
        flip: Whether rules that lead to PyTorch's layout are followed backwards.
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
    """The pairs of a map as they come up; each tensor is in one, as a whole."""

    def __init__(self, unpaired: Unpaired, tensor_map: TensorMap) -> None:
        self._map = tensor_map
        # Of several tensors of one name, the first.
        self._a, self._b = (
            {item.tensor.name: item for item in reversed(side)} for side in (unpaired.a, unpaired.b)
        )
        self._names = [SideNames(item.tensor.name for item in side) for side in (unpaired.a, unpaired.b)]
        self._given: dict[str, str] = {}
        self.pairs: list[Pair] = []
        self.aside: list[LayoutItem] = []
        self.used: tuple[set[int], set[int]] = (set(), set())

    def follow(self, rule: TensorRule, flip: bool) -> None:
        """Follow one ``[[tensor]]``."""

        def is_taken(name: str) -> bool:
            return id(self._a[name].tensor) in self.used[0]

        matched = 0
        for names, targets in self._names[0].find_groups(rule, is_taken):  # the first table decides
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
        """Follow one line of ``[names]``."""
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
        """Follow one name of ``drop``."""
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
        """Require that each name is one tensor's alone."""
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
    return converted[0] if len(converted) == 1 else item  # what becomes several is compared as stored


def _mapped_items(
    sources: list[LayoutItem], others: list[LayoutItem], rule: TensorRule, flip: bool
) -> list[LayoutItem]:
    """Return what the tensors of the first side become."""
    rows = [other.tensor.shape[0] if other.tensor.shape else 0 for other in others] if rule.split == 0 else []
    paths = [other.tensor.path for other in others]
    origin = tuple(item.tensor for item in sources)
    results = apply_rule(origin, rule, paths, flip=flip, rows=rows)
    operation = rule.rule if rule.rule != "as-is" else "join" if rule.join is not None else "split"
    text = None if rule.is_plain else f"map: {operation}"
    return [
        LayoutItem(other.tensor.name, one, origin, text) for one, other in zip(results, others, strict=True)
    ]
