"""How two checkpoints differ in one sentence, which modules changed, and how one value did."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from ckpttool.core.report import counted
from ckpttool.core.tensor import Role
from ckpttool.ops.difference import ABSENT, Change, Difference, ValueChange
from ckpttool.render.numbers import amount, file_size, number
from ckpttool.render.terminal import printable
from ckpttool.weights.comparing.statistics import Tolerance

_MOST_VALUES = 3
_LONGEST_VALUE = 60
_FEWEST_DIGITS, _MOST_DIGITS = 4, 17  # 17 tell every two float64 apart
_MOST_MODULES = 4
_MOST_THINGS = 3


def summary_line(difference: Difference) -> str:
    """Return the answer in one line: what changed and by how much, or that nothing did."""
    if difference.equal:
        return _equal_line(difference)
    if replace(difference, not_compared=(), undecided=()).equal:
        unsure = []
        if things := difference.not_compared:
            verb = "was" if len(things) == 1 else "were"
            unsure.append(f"{counted(len(things), 'thing')} {verb} not compared: {_first_names(things)}")
        if names := [one.name for one in difference.undecided]:
            unsure.append(f"{counted(len(names), 'tensor')} may lie in another order: {_first_names(names)}")
        certain = "certain " if difference.undecided else ""
        return f"no {certain}difference found, but {' and '.join(unsure)}"
    return "; ".join(filter(None, (tensors_line(difference), _value_words(difference.values))))


def tensors_line(difference: Difference) -> str:
    """Return what is to be said of the tensors of two checkpoints that differ."""
    is_foreign = bool(not difference.compared and difference.removed and difference.added)
    counts = ["no tensor in common"] if is_foreign else [*_change_words(difference)]
    for facts, verb in ((difference.removed, "removed"), (difference.added, "added")):
        if facts:
            counts.append(f"{len(facts):,} {verb}{_common_name([one.name for one in facts])}")
    if difference.renamed and difference.rename_counts:
        a, b = (_common_name(names) for names in zip(*difference.renamed, strict=True))
        modules = f"{a.rstrip(')')} → {b.removeprefix(' (')}" if a and b else ""
        counts.append(f"{len(difference.renamed):,} renamed{modules}")
    if difference.broken:
        counts.append(f"{counted(len(difference.broken), 'tensor')} could not be compared")
    if difference.not_compared:
        counts.append(f"{counted(len(difference.not_compared), 'thing')} not compared")
    if difference.undecided:
        counts.append(f"{counted(len(difference.undecided), 'tensor')} undecided")
    if not difference.changed and difference.compared:
        counts.append(
            f"{counted(difference.unchanged, 'tensor')} equal{tolerance_words(difference.tolerance)}"
        )
    return ", ".join(counts)


def _equal_line(difference: Difference) -> str:
    if not difference.compared:
        return "equal: neither holds a tensor"
    is_alike = difference.a.format == difference.b.format and not difference.rules and not difference.renamed
    word = "equal" if is_alike else "equal in value"
    size = file_size(difference.compared_nbytes)
    count = counted(difference.compared, "tensor")
    return f"{word}{tolerance_words(difference.tolerance)}: {count}, {size} compared"


def tolerance_words(tolerance: Tolerance) -> str:
    """Return the tolerance in words that follow "equal"; nothing if only equal values are equal."""
    limits = (("rtol", tolerance.rtol), ("atol", tolerance.atol))
    words = " and ".join(f"{name} {amount(limit).replace('.0e', 'e')}" for name, limit in limits if limit)
    return f" within {words}" if words else ""


def _first_names(things: Sequence[str]) -> str:
    more = f" and {len(things) - _MOST_THINGS:,} more" if len(things) > _MOST_THINGS else ""
    return ", ".join(map(printable, things[:_MOST_THINGS])) + more


def _change_words(difference: Difference) -> Iterator[str]:
    changed = difference.changed
    if not changed:
        return
    of = f"{len(changed):,} of {counted(difference.compared, 'tensor')} changed"
    kinds = Counter("in shape" for one in changed if one.kind == "shape")
    for one in changed:
        if one.kind == "dtype":
            same = ", same values" if one.statistics is None else ""
            kinds[f"from {one.a.dtype} to {one.b.dtype}{same}"] += 1
    if [*kinds.values()] == [len(changed)]:
        yield f"{of} {next(iter(kinds))}"
    else:
        words = ", ".join(f"{count:,} {kind}" for kind, count in kinds.items())
        yield f"{of} ({words})" if words else of
    largest = largest_change(changed)
    if largest is not None and largest.statistics is not None:
        yield f"max |Δ| {amount(largest.statistics.max_abs)} in {printable(largest.name)}"
    if strange := sum(one.statistics.non_finite for one in changed if one.statistics is not None):
        yield f"{counted(strange, 'value')} NaN or infinite"


def largest_change(changed: Iterable[Change]) -> Change | None:
    """Return the change of the largest finite |Δ|, of a weight where one changed, or None."""
    finite = [(one, one.statistics.max_abs) for one in changed if one.statistics is not None]
    moved = [(one, most) for one, most in finite if most > 0]
    weights = [(one, most) for one, most in moved if one.a.role is Role.WEIGHTS]
    return max(weights or moved, key=lambda pair: pair[1], default=(None, 0.0))[0]


def _common_name(names: Sequence[str]) -> str:
    """Return the one name, or the module that all lie in, in brackets; nothing where there is none."""
    if len(names) == 1:
        return f" ({printable(names[0])})"
    common = common_module(names)
    return f" ({printable(common)}.*)" if common else ""


def _value_words(changes: Sequence[ValueChange]) -> str:
    both = [one for one in changes if ABSENT not in (one.a, one.b)]
    texts = (f"{printable(one.path)} {change_text(one)}" for one in both)
    words = [text for text in texts if len(text) <= _LONGEST_VALUE][:_MOST_VALUES]
    counts = (
        (len(both) - len(words), "more value" if words else "value", "changed"),
        (sum(one.b is ABSENT for one in changes), "value", "removed"),
        (sum(one.a is ABSENT for one in changes), "value", "added"),
    )
    words += [f"{counted(count, noun)} {verb}" for count, noun, verb in counts if count]
    return ", ".join(words)


# What moved -----------------------------------------------------------------------------------------


def moved_line(difference: Difference) -> str | None:
    """Return which modules changed, if others did not; None if a glance at the rest says as much."""
    if not difference.unchanged or len(difference.changed) < 2:
        return None
    weights = [one.name for one in difference.changed if one.a.role is Role.WEIGHTS]
    names = weights or [one.name for one in difference.changed]
    modules = changed_modules(names)
    if modules is None:
        common = common_module(names)
        below = f", all in {printable(common)}" if common else ""
        count = len({name.rpartition(".")[0] for name in names})
        return f"changed in {counted(count, 'module')}{below}"
    words = [*map(printable, modules)]
    if weights:
        states = Counter(one.a.role for one in difference.changed if one.a.role is not Role.WEIGHTS)
        words += [f"{counted(count, 'tensor')} of the {role.value} state" for role, count in states.items()]
    *most, last = words
    return f"only {', '.join(most)} and {last} changed" if most else f"only {last} changed"


def changed_modules(names: Sequence[str]) -> list[str] | None:
    """Return the few modules that hold all names, as globs; None where there are more than a few."""
    paths = [name.split(".") for name in names]
    deepest = max(map(len, paths)) - 1
    shared = len(_shared_modules(paths))
    for depth in range(deepest, min(shared, deepest - 1), -1):
        globs = [".".join([*path[:depth], "*"]) if len(path) > depth else ".".join(path) for path in paths]
        if len(different := [*dict.fromkeys(globs)]) <= _MOST_MODULES:
            return different
    return None


def common_module(names: Sequence[str]) -> str:
    """Return the innermost module in which all names lie, or an empty text."""
    return ".".join(_shared_modules([name.split(".") for name in names]))


def _shared_modules(paths: Sequence[Sequence[str]]) -> list[str]:
    """Return the modules with which all paths begin; a path's last component is no module."""
    shared = []
    for components in zip(*(path[:-1] for path in paths), strict=False):
        if len({*components}) > 1:
            break
        shared.append(components[0])
    return shared


# Values ---------------------------------------------------------------------------------------------


def value_text(value: object) -> str:
    """Return a value that is not a tensor, in one short line."""
    if value is ABSENT:
        return "absent"
    if isinstance(value, Mapping | list):
        from ckpttool.render.json import dumps

        return _cut(dumps(value))
    return _cut(number(value)) or "''"


def change_text(change: ValueChange) -> str:
    """Return how a value changed: ``3 → 4``, with as many digits as it takes to tell them apart."""
    if isinstance(change.a, float | int) and isinstance(change.b, float | int):
        return two_values(change.a, change.b)
    return f"{value_text(change.a)} → {value_text(change.b)}"


def two_values(a: object, b: object) -> str:
    """Return two values with as many digits as it takes to tell them apart."""
    if isinstance(a, str) or isinstance(b, str):
        return f"{_cut(repr(a))} → {_cut(repr(b))}"
    shown = [str(a), str(b)]
    for digits in range(_FEWEST_DIGITS, _MOST_DIGITS + 1):
        shown = [_digits(value, digits) for value in (a, b)]
        if shown[0] != shown[1]:
            break
    return " → ".join(shown)


def _digits(value: object, digits: int) -> str:
    if isinstance(value, bool) or not isinstance(value, float | complex):
        return number(value)
    if isinstance(value, float) and not math.isfinite(value):
        return amount(value)
    return f"{value:.{digits}g}"


def _cut(text: str) -> str:
    text = printable(text)
    return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 1]}…"
