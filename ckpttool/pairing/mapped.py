"""The pairs that a map file asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ckpttool.pairing.arranged import Unfit
from ckpttool.pairing.layouts import Item, stored
from ckpttool.pairing.mapping import TensorMap, TensorRule
from ckpttool.pairing.matching import Pair, Unpaired
from ckpttool.pairing.ruling import Names, filled, ruled

Becomes = Callable[[Item], list[Item]]


def apply_map(
    unpaired: Unpaired, told: TensorMap, layouts: tuple[Becomes, Becomes], *, flip: bool
) -> list[Item]:
    """Pair what a map names; return the tensors that it gives a name which the other side hasn't got.

    Args:
        unpaired: Both sides as stored.
        told: What the map says.
        layouts: Of either side, what each stored tensor is in PyTorch's layout.
        flip: Whether rules that lead to PyTorch's layout are followed backwards.

    Raises:
        UsageError: A rule matches nothing, a name is several tensors', two get one, or a rule doesn't fit.
    """
    pairs = _Pairs(unpaired, told)
    for rule in told.tensors:
        pairs.follow(rule, flip)
    for glob, name in told.names.items():
        pairs.rename(glob, name, layouts)
    for glob in told.drop:
        pairs.leave(glob)
    unpaired.take(pairs.found)
    used_a, used_b = pairs.used
    ids = used_a | used_b
    unpaired.drop(
        [item for item in unpaired.a if id(item.tensor) in ids],
        [item for item in unpaired.b if id(item.tensor) in ids],
    )
    unpaired.drop(pairs.aside, [])
    return pairs.aside


class _Pairs:
    """The pairs of a map as they come up; each tensor is in one, as a whole."""

    def __init__(self, unpaired: Unpaired, told: TensorMap) -> None:
        self._map = told
        self._a, self._b = (_by_name(side) for side in (unpaired.a, unpaired.b))
        self._names = [Names(item.tensor.name for item in side) for side in (unpaired.a, unpaired.b)]
        self._given: dict[str, str] = {}
        self.found: list[Pair] = []
        self.aside: list[Item] = []
        self.used: tuple[set[int], set[int]] = (set(), set())

    def rename(self, glob: str, name: str, layouts: tuple[Becomes, Becomes]) -> None:
        """Follow one line of ``[names]``."""
        place = f'names."{glob}"'
        matched = 0
        for own, captured in self._names[0].called(glob):
            item = self._a[own]
            if id(item.tensor) in self.used[0]:
                continue
            target = filled(name, captured)
            self._require_single(place, [own], [target])
            self._give(place, target, own)
            other = self._b.get(target)
            if other is None:
                self.aside.append(item)
                self.used[0].add(id(item.tensor))
                continue
            matched += 1
            self._pair(place, _in_layout(item, layouts[0]), _in_layout(other, layouts[1]))
        if not matched:
            raise self._map.wrong(place, self._unmatched(glob, name))

    def leave(self, glob: str) -> None:
        """Follow one name of ``drop``."""
        left = [self._a[own] for own, _ in self._names[0].called(glob)]
        left = [item for item in left if id(item.tensor) not in self.used[0]]
        if not left:
            raise self._map.wrong("drop", self._none(glob))
        self.aside += left
        self.used[0].update(id(item.tensor) for item in left)

    def _unmatched(self, glob: str, name: str) -> str:
        if any(self._names[0].called(glob)):
            return f"the second side has no {name!r} (or a line before took what is to be called so)"
        return self._none(glob)

    def _none(self, glob: str) -> str:
        is_taken = any(self._names[0].called(glob))
        return f"nothing {'more ' if is_taken else ''}on the first side is called {glob!r}"

    def follow(self, rule: TensorRule, flip: bool) -> None:
        """Follow one ``[[tensor]]``."""
        matched = 0
        # The first table that means a tensor decides.
        for names, targets in self._names[0].meant(rule, self._is_taken):
            own = names[0]
            self._require_single(rule.place, names, targets)
            sources = [self._get(rule.place, self._a, name, "first") for name in names]
            taken = next((item for item in sources if id(item.tensor) in self.used[0]), None)
            if taken is not None:
                raise self._map.wrong(rule.place, f"a table before took {taken.tensor.name!r}")
            others = [self._get(rule.place, self._b, name, "second") for name in targets]
            for target in targets:
                self._give(rule.place, target, own)
            try:
                made = _made(sources, others, rule, flip)
            except Unfit as failure:
                raise self._map.wrong(rule.place, f"{own}: {failure} (rule {rule.rule})") from failure
            for item, other in zip(made, others, strict=True):
                self._pair(rule.place, item, stored(other.tensor))
            matched += 1
        if not matched:
            raise self._map.wrong(rule.place, self._none(rule.sources[0]))

    def _is_taken(self, name: str) -> bool:
        return id(self._a[name].tensor) in self.used[0]

    def _get(self, place: str, side: dict[str, Item], name: str, which: str) -> Item:
        if name not in side:
            raise self._map.wrong(place, f"nothing on the {which} side is called {name!r}")
        return side[name]

    def _require_single(self, place: str, names: Sequence[str], targets: Sequence[str]) -> None:
        """Require that each name is one tensor's alone."""
        for called, twice, which in (
            (names, self._names[0].twice, "first"),
            (targets, self._names[1].twice, "second"),
        ):
            for name in called:
                if name in twice:
                    raise self._map.wrong(place, f"several tensors of the {which} side are called {name!r}")

    def _give(self, place: str, target: str, own: str) -> None:
        if target in self._given:
            raise self._map.wrong(place, f"{own!r} becomes {target!r}, and so does {self._given[target]!r}")
        self._given[target] = own

    def _pair(self, place: str, item: Item, other: Item) -> None:
        self.used[0].update(id(source) for source in item.sources)
        self.used[1].update(id(source) for source in other.sources)
        self.found.append(Pair(item, other, "map"))


def _by_name(items: Iterable[Item]) -> dict[str, Item]:
    found: dict[str, Item] = {}
    for item in items:
        found.setdefault(item.tensor.name, item)
    return found


def _in_layout(item: Item, layouts: Becomes) -> Item:
    made = layouts(item)
    return made[0] if len(made) == 1 else item  # what becomes several tensors is compared as stored


def _made(sources: list[Item], others: list[Item], rule: TensorRule, flip: bool) -> list[Item]:
    """Return what the tensors of the first side become.

    Raises:
        Unfit: The rule doesn't fit them.
    """
    rows = [other.tensor.shape[0] if other.tensor.shape else 0 for other in others] if rule.split == 0 else []
    paths = [other.tensor.path for other in others]
    tensors = [item.tensor for item in sources]
    made = ruled(tensors, rule, paths, flip=flip, rows=rows)
    told = rule.rule if rule.rule != "as-is" else "join" if rule.join is not None else "split"
    text = None if rule.is_plain else f"map: {told}"
    origin = tuple(tensors)
    return [Item(other.tensor.name, one, origin, text) for one, other in zip(made, others, strict=True)]
