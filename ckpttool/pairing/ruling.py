"""What the rules of a map mean: which names a glob takes, and what becomes of tensors."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from ckpttool.pairing.arranged import Pattern, Unfit, arranged, cut, joined, pattern, transposed
from ckpttool.pairing.layouts import CONVOLUTIONS, FLATTEN
from ckpttool.pairing.mapping import TensorRule
from ckpttool.tensor import Path, Tensor


class Names:
    """The names of one side's tensors, in their order.

    Attributes:
        twice: Names that several tensors have.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._count = Counter(names)
        self.twice = {name for name, times in self._count.items() if times > 1}

    def __contains__(self, name: str) -> bool:
        return name in self._count

    def called(self, glob: str) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Yield the names that a glob means, each with what its stars took."""
        if "*" not in glob:
            yield from [(glob, ())] if glob in self._count else []
            return
        stars = re.compile("(.*)".join(map(re.escape, glob.split("*"))), re.DOTALL)
        for own in self._count:
            if match := stars.fullmatch(own):
                yield own, match.groups()

    def meant(
        self, rule: TensorRule, is_taken: Callable[[str], bool]
    ) -> Iterator[tuple[list[str], list[str]]]:
        """Yield the names that a rule takes together and those that it gives; what is taken is left alone."""
        for own, captured in self.called(rule.sources[0]):
            if not is_taken(own):
                names = [own, *(filled(name, captured) for name in rule.sources[1:])]
                yield names, [filled(name, captured) for name in rule.targets]


def filled(name: str, captured: Sequence[str]) -> str:
    """Return a name with what stars took in the place of its own."""
    rest = iter(captured)
    return "".join(next(rest) if part == "*" else part for part in re.split(r"(\*)", name))


def ruled(
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
    turned = [_turned(tensor, rule, flip) for tensor in tensors]
    if rule.split is None:
        whole = turned[0] if len(turned) == 1 else joined(turned, paths[0])
        return [whole]
    (whole,) = turned
    length = whole.shape[0] if whole.shape else 0
    if not rows and not rule.sizes and length % len(paths):
        raise Unfit(f"{length:,} rows for {len(paths)} equal parts")
    parts = rule.sizes or rows or (length // len(paths),) * len(paths)
    if not whole.shape or sum(parts) != length or (rows and tuple(rows) != tuple(parts)):
        raise Unfit(f"shape {list(whole.shape)} for {' + '.join(map(str, rows or parts))} rows")
    return [cut(whole, sum(parts[:at]), parts[at], path) for at, path in enumerate(paths)]


def _turned(tensor: Tensor, rule: TensorRule, flip: bool) -> Tensor:
    way = _way(rule, len(tensor.shape))
    if way is None:
        return tensor
    is_backwards = flip and rule.rule in ("conv", "flatten") if rule.inverse is None else rule.inverse
    sizes = dict(zip("chw", rule.shape, strict=True)) if rule.rule == "flatten" else {}
    return arranged(tensor, way.inverse() if is_backwards else way, tensor.path, sizes=sizes)


def _way(rule: TensorRule, axes: int) -> Pattern | None:
    if rule.rule == "as-is":
        return None
    if rule.rule == "dense":
        return pattern("i o -> o i")
    if rule.rule == "transpose":
        return transposed(range(axes)[::-1])
    if rule.rule == "permute":
        return transposed(rule.axes)
    if rule.rule == "flatten":
        return FLATTEN
    if axes not in CONVOLUTIONS:
        raise Unfit(f"{axes} axes, not {', '.join(map(str, CONVOLUTIONS))}")
    return CONVOLUTIONS[axes]
