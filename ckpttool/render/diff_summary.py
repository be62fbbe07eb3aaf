"""How two checkpoints differ in one sentence, and which modules changed in another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from ckpttool.comparing.statistics import Tolerance
from ckpttool.ops.difference import ABSENT, Change, Difference, Facts, ValueChange
from ckpttool.render.numbers import amount, change_text, file_size
from ckpttool.render.terminal import printable
from ckpttool.report import counted
from ckpttool.tensor import Role

_MOST_VALUES = 3
_LONGEST_VALUE = 60
_MOST_MODULES = 4
_MOST_THINGS = 3


def summary_line(difference: Difference) -> str:
    """Return the answer in one line: what changed and by how much, or that nothing did."""
    if difference.equal:
        return _equal_line(difference)
    if replace(difference, not_compared=(), undecided=()).equal:
        unsure = " and ".join(filter(None, (_not_compared_words(difference), _undecided_words(difference))))
        return f"no {'certain ' * bool(difference.undecided)}difference found, but {unsure}"
    return "; ".join(filter(None, (tensors_line(difference), _value_words(difference.values))))


def tensors_line(difference: Difference) -> str:
    """Return what is to be said of the tensors of two checkpoints that differ."""
    is_foreign = bool(not difference.compared and difference.removed and difference.added)
    counts = ["no tensor in common"] if is_foreign else [*_change_words(difference)]
    counts += _one_sided_words(difference.removed, "removed")
    counts += _one_sided_words(difference.added, "added")
    counts += _rename_words(difference)
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
    """Return what is let pass, in words that follow "equal"; nothing where nothing is."""
    limits = (("rtol", tolerance.rtol), ("atol", tolerance.atol))
    told = " and ".join(f"{name} {amount(limit).replace('.0e', 'e')}" for name, limit in limits if limit)
    return f" within {told}" if told else ""


def _not_compared_words(difference: Difference) -> str:
    things = difference.not_compared
    verb = "was" if len(things) == 1 else "were"
    return f"{counted(len(things), 'thing')} {verb} not compared: {_first_names(things)}" if things else ""


def _undecided_words(difference: Difference) -> str:
    names = [one.name for one in difference.undecided]
    return f"{counted(len(names), 'tensor')} may lie in another order: {_first_names(names)}" if names else ""


def _first_names(things: Sequence[str]) -> str:
    more = f" and {len(things) - _MOST_THINGS:,} more" if len(things) > _MOST_THINGS else ""
    return ", ".join(map(printable, things[:_MOST_THINGS])) + more


def _change_words(difference: Difference) -> Iterator[str]:
    changed = difference.changed
    if not changed:
        return
    of = f"{len(changed):,} of {counted(difference.compared, 'tensor')} changed"
    kinds = [*_kinds_of_change(changed)]
    if len(kinds) == 1 and kinds[0][1] == len(changed):
        yield f"{of} {kinds[0][0]}".rstrip()
    else:
        told = ", ".join(f"{count:,} {words}" for words, count in kinds if words)
        yield f"{of} ({told})" if told else of
    largest = largest_change(changed)
    if largest is not None and largest.statistics is not None:
        yield f"max |Δ| {amount(largest.statistics.max_abs)} in {printable(largest.name)}"
    if strange := sum(one.statistics.non_finite for one in changed if one.statistics is not None):
        yield f"{counted(strange, 'value')} NaN or infinite"


def _kinds_of_change(changed: Sequence[Change]) -> Iterator[tuple[str, int]]:
    """Yield what else than values changed, and in how many tensors."""
    shapes = sum(one.kind == "shape" for one in changed)
    if shapes:
        yield "in shape", shapes
    types: dict[str, int] = {}
    for one in changed:
        if one.kind == "dtype":
            same = ", same values" if one.statistics is None else ""
            words = f"from {one.a.dtype} to {one.b.dtype}{same}"
            types[words] = types.get(words, 0) + 1
    yield from types.items()


def largest_change(changed: Iterable[Change]) -> Change | None:
    """Return the change of the largest finite |Δ|, of a weight where one changed, or None."""
    finite = [one for one in changed if one.statistics is not None and one.statistics.max_abs > 0]
    weights = [one for one in finite if one.a.role is Role.WEIGHTS]
    return max(weights or finite, key=_max_abs, default=None)


def _max_abs(change: Change) -> float:
    return change.statistics.max_abs if change.statistics is not None else 0.0


def _one_sided_words(facts: Sequence[Facts], verb: str) -> Iterator[str]:
    if facts:
        yield f"{len(facts):,} {verb}{_common_name([one.name for one in facts])}"


def _rename_words(difference: Difference) -> Iterator[str]:
    renamed = difference.renamed
    if not renamed or not difference.rename_counts:
        return
    ours, theirs = _common_name([a for a, _ in renamed]), _common_name([b for _, b in renamed])
    told = f"{ours.rstrip(')')} → {theirs.removeprefix(' (')}" if ours and theirs else ""
    yield f"{len(renamed):,} renamed{told}"


def _common_name(names: Sequence[str]) -> str:
    """Return the one name, or the module that all lie in, in brackets; nothing where there is none."""
    if len(names) == 1:
        return f" ({printable(names[0])})"
    common = common_module(names)
    return f" ({printable(common)}.*)" if common else ""


def _value_words(changes: Sequence[ValueChange]) -> str:
    both = [one for one in changes if ABSENT not in (one.a, one.b)]
    texts = (f"{printable(one.path)} {change_text(one)}" for one in both)
    told = [text for text in texts if len(text) <= _LONGEST_VALUE][:_MOST_VALUES]
    left = len(both) - len(told)
    counts = (
        (left, "more value" if told else "value", "changed"),
        (sum(one.b is ABSENT for one in changes), "value", "removed"),
        (sum(one.a is ABSENT for one in changes), "value", "added"),
    )
    told += [f"{counted(count, noun)} {verb}" for count, noun, verb in counts if count]
    return ", ".join(told)


# What moved -----------------------------------------------------------------------------------------


def moved_line(difference: Difference) -> str | None:
    """Return which modules changed, where others did not; None where a glance at the rest says as much."""
    if not difference.unchanged or len(difference.changed) < 2:
        return None
    roles = [one.a.role for one in difference.changed]
    names = [one.name for one in difference.changed if one.a.role is Role.WEIGHTS]
    rest = [role for role in roles if role is not Role.WEIGHTS] if names else []
    if not names:
        names = [one.name for one in difference.changed]
    modules = changed_modules(names)
    if modules is None:
        common = common_module(names)
        below = f", all in {printable(common)}" if common else ""
        return f"changed in {counted(len({*map(_module_of, names)}), 'module')}{below}"
    told = [printable(one) for one in modules]
    told += [
        f"{counted(rest.count(role), 'tensor')} of the {role.value} state" for role in dict.fromkeys(rest)
    ]
    return f"only {_joined_words(told)} changed"


def changed_modules(names: Sequence[str]) -> list[str] | None:
    """Return the few modules that hold all names, as globs; None where there are more than a few."""
    paths = [name.split(".") for name in names]
    deepest = max(map(len, paths)) - 1
    shared = len(_shared_modules(paths))
    for depth in range(deepest, min(shared, deepest - 1), -1):
        globs = [".".join([*path[:depth], "*"]) if len(path) > depth else ".".join(path) for path in paths]
        if len(found := [*dict.fromkeys(globs)]) <= _MOST_MODULES:
            return found
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


def _module_of(name: str) -> str:
    return name.rpartition(".")[0]


def _joined_words(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
