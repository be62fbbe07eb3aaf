"""The text of ``diff``: a summary line, a table of the changed tensors, and all other differences.

For three checkpoints and more: a row for each, with the changes since the one before.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ckpttool.cli.render.terminal import Style, TextTable, aligned_pairs, more_line, styled, text_table
from ckpttool.core.tensor import Role
from ckpttool.core.text import (
    LONGEST_VALUE,
    amount,
    counted,
    file_size,
    index_text,
    number,
    printable,
    printable_cut,
    shape_text,
    share,
    two_values,
)
from ckpttool.ops.difference import ABSENT, Change, Difference, TensorFacts, ValueChange
from ckpttool.ops.resume import part_of
from ckpttool.weights.comparing.statistics import Tolerance, relative_norm

if TYPE_CHECKING:
    from ckpttool.ops.drift import Drift, DriftStep

MAX_ROWS = 40
_MOST_VALUES, _MOST_MODULES, _MOST_THINGS, _MOST_REMARKS = 3, 4, 3, 4
_IDENTITY = "fingerprint"
"""Prefix of TensorFlow's identifiers of each save, long numbers without meaning."""
_PART_WORDS = {"optimizer": "optimizer state"}
_KINDS = ("shape", "dtype", "values")
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
"""A component of a name that is a number, such as that of a layer."""


def diff_text(
    difference: Difference,
    *,
    all: bool = False,
    stat: bool = False,
    colour: bool = False,
    width: int = 100,
) -> str:
    """Return the differences of two checkpoints: a summary, then the most important ones.

    Args:
        difference: As ``diff`` returns it.
        all: Whether to show every row, not just the first 40 of each kind.
        stat: Whether to count by module, rather than show each tensor.
        colour: Whether to write colour: removals in red, additions in green.
        width: Columns of the terminal.
    """
    limit = None if all else MAX_ROWS
    head = [styled(summary_line(difference), Style.BOLD, colour)]
    if moved := _moved_line(difference):
        head.append(moved)
    sections = [
        [*_changed_lines(difference, colour, stat, limit, width)],
        [*_unpaired_lines(difference, colour, limit)],
        [*_value_lines(difference.values, colour, limit)],
        [*_remark_lines(difference, colour, limit)],
    ]
    return "\n\n".join("\n".join(lines) for lines in (head, *sections) if lines)


def name_only_text(difference: Difference) -> str:
    """Return the names of changed tensors, a line each with a letter, as ``git diff --name-status`` does."""
    lines = [f"M\t{printable(_both_names(one.a.name, one.b.name))}" for one in difference.changed]
    if difference.rename_counts:
        lines += [f"R\t{printable(a)}\t{printable(b)}" for a, b in difference.renamed]
    lines += [f"D\t{printable(one.name)}" for one in difference.removed]
    lines += [f"A\t{printable(one.name)}" for one in difference.added]
    return "\n".join(lines)


# The summary --------------------------------------------------------------------------------------


def summary_line(difference: Difference) -> str:
    """Return the summary in one line: number and size of the changes, or that nothing changed."""
    if difference.equal:
        return _equal_line(difference)
    if replace(difference, not_compared=(), undecided=()).equal:
        unsure = []
        if things := difference.not_compared:
            verb = "was" if len(things) == 1 else "were"
            unsure.append(f"{counted(len(things), 'thing')} {verb} not compared: {_first_names(things)}")
        if names := [one.name for one in difference.undecided]:
            unsure.append(f"{counted(len(names), 'tensor')} may be in another order: {_first_names(names)}")
        certain = "certain " if difference.undecided else ""
        return f"no {certain}difference found, but {' and '.join(unsure)}"
    if difference.has_same_weights and (lacks := [*_lacking_words(difference)]):
        both = [one for one in difference.values if ABSENT not in (one.a, one.b)]
        count, words = difference.weights, tolerance_words(difference.tolerance)
        same = f"same weights{words} ({count:,} of {count:,})"
        return "; ".join(filter(None, (same, *lacks, _value_words(both))))
    return "; ".join(filter(None, (tensors_line(difference), _value_words(difference.values))))


def _lacking_words(difference: Difference) -> Iterator[str]:
    """Yield for each side the parts that only the other has, besides the weights."""
    values = difference.values
    sides = (
        ("A", difference.a, difference.b, difference.added, [one for one in values if one.a is ABSENT]),
        ("B", difference.b, difference.a, difference.removed, [one for one in values if one.b is ABSENT]),
    )
    for name, side, other, tensors, alone in sides:
        parts = [part for part in other.state if part not in side.state]
        words = [_PART_WORDS.get(part, part) for part in parts]
        rest = [one for one in tensors if _part_of_tensor(one) not in parts]
        others = [one.name for one in rest if _part_of_tensor(one) != "optimizer"]
        if states := len(rest) - len(others):
            words.append(counted(states, "optimizer tensor"))
        if others:
            common = _common_name(others) or f" ({_first_names(others)})"
            words.append(counted(len(others), "other tensor" if words else "tensor") + common)
        if values_alone := sum(part_of(one.path) not in parts for one in alone):
            words.append(counted(values_alone, "value"))
        if words:
            *most, last = words
            yield f"{name} lacks {', '.join(most)} and {last}" if most else f"{name} lacks {last}"


def _part_of_tensor(facts: TensorFacts) -> str | None:
    """Return the part of a training's state that a tensor belongs to; None if it may be a module's."""
    # A name such as "scheduler" may also be a module's. Training state is known by its role, and unless it is
    # of an optimizer, by a shape or type that weights don't have: one element, or integers.
    part = part_of(facts.name, facts.role)
    is_state = part == "optimizer" or facts.dtype.kind == "integer" or math.prod(facts.shape) == 1
    return part if facts.role in (Role.OPTIMIZER, Role.TRAINING) and is_state else None


def tensors_line(difference: Difference) -> str:
    """Return the differences of the tensors in one line."""
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
        return "equal: neither has a tensor"
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
    largest = _largest_change(changed)
    if largest is not None and largest.statistics is not None:
        yield f"max |Δ| {amount(largest.statistics.max_abs)} in {printable(largest.name)}"
    if strange := sum(one.statistics.non_finite for one in changed if one.statistics is not None):
        yield f"{counted(strange, 'value')} NaN or infinite"


def _largest_change(changed: Iterable[Change]) -> Change | None:
    """Return the change with the largest finite |Δ|, of a weight if one changed; or None."""
    finite = [(one, measured.max_abs) for one in changed if (measured := one.distance) is not None]
    moved = [(one, most) for one, most in finite if most > 0]
    weights = [(one, most) for one, most in moved if one.a.role is Role.WEIGHTS]
    return max(weights or moved, key=lambda pair: pair[1], default=(None, 0.0))[0]


def _common_name(names: Sequence[str]) -> str:
    """Return the only name, or the common module, in brackets; an empty text if there is none."""
    if len(names) == 1:
        return f" ({printable(names[0])})"
    common = common_module(names)
    return f" ({printable(common)}.*)" if common else ""


def _value_words(changes: Sequence[ValueChange]) -> str:
    both = [one for one in changes if ABSENT not in (one.a, one.b)]
    texts = (f"{printable(one.path)} {change_text(one)}" for one in both)
    words = [text for text in texts if len(text) <= LONGEST_VALUE][:_MOST_VALUES]
    counts = (
        (len(both) - len(words), "more value" if words else "value", "changed"),
        (sum(one.b is ABSENT for one in changes), "value", "removed"),
        (sum(one.a is ABSENT for one in changes), "value", "added"),
    )
    words += [f"{counted(count, noun)} {verb}" for count, noun, verb in counts if count]
    return ", ".join(words)


# Changed values --------------------------------------------------------------------------------------


def _moved_line(difference: Difference) -> str | None:
    """Return the line of changed modules; None if no tensor is unchanged, or only one changed."""
    if not difference.unchanged or len(difference.changed) < 2:
        return None
    weights = [one.name for one in difference.changed if one.a.role is Role.WEIGHTS]
    names = weights or [one.name for one in difference.changed]
    modules = _changed_modules(names)
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


def _changed_modules(names: Sequence[str]) -> list[str] | None:
    """Return a few modules that hold all names, as globs; None if there would be more."""
    # From the deepest modules up, as long as the globs are more specific than the module that all share.
    paths = [name.split(".") for name in names]
    deepest = max(map(len, paths)) - 1
    shared = len(_shared_modules(paths))
    for depth in range(deepest, min(shared, deepest - 1), -1):
        globs = [".".join([*path[:depth], "*"]) if len(path) > depth else ".".join(path) for path in paths]
        if len(different := [*dict.fromkeys(globs)]) <= _MOST_MODULES:
            return different
    return None


def common_module(names: Sequence[str]) -> str:
    """Return the innermost module of all names, or an empty text."""
    return ".".join(_shared_modules([name.split(".") for name in names]))


def _shared_modules(paths: Sequence[Sequence[str]]) -> list[str]:
    """Return the modules with which all paths begin; a path's last component is no module."""
    shared = []
    for components in zip(*(path[:-1] for path in paths), strict=False):
        if len({*components}) > 1:
            break
        shared.append(components[0])
    return shared


# Sections -------------------------------------------------------------------------------------------


def _changed_lines(
    difference: Difference, colour: bool, stat: bool, limit: int | None, width: int
) -> Iterator[str]:
    if not difference.changed:
        return
    if stat:
        table, more = _module_table(difference.changed, width - 2, limit)
    else:
        changes = _sorted_changes(difference.changed)
        table = _change_table(changes[:limit], width - 2)
        more = len(changes) - (len(table.lines) - 1)
    yield from table.indented(colour)
    if more > 0:
        yield more_line(more, colour)


def _unpaired_lines(difference: Difference, colour: bool, limit: int | None) -> Iterator[str]:
    """Yield the tensors of one side alone, and those with another name on the other."""
    removed = [f"- {_tensor_line(one)}" for one in difference.removed]
    added = [f"+ {_tensor_line(one)}" for one in difference.added]
    changed = {one.a.name for one in difference.changed}
    renamed = [
        f"  {printable(a)} → {printable(b)}{'' if a in changed else ': same content'}"
        for a, b in (difference.renamed if difference.rename_counts else ())
    ]
    yield from _first_lines(removed, limit, colour, Style.RED)
    yield from _first_lines(added, limit, colour, Style.GREEN)
    yield from _first_lines(renamed, limit, colour, Style.CYAN)


def _tensor_line(facts: TensorFacts) -> str:
    return f"{printable(facts.name)}  {facts.dtype} {shape_text(facts.shape)}"


def _value_lines(values: Sequence[ValueChange], colour: bool, limit: int | None) -> Iterator[str]:
    both = [one for one in values if ABSENT not in (one.a, one.b)]
    aligned = iter(aligned_pairs([(printable(one.path), change_text(one)) for one in both]))
    lines = []
    for one in values:
        if one.b is ABSENT:
            lines.append(styled(f"- {printable(one.path)}  {value_text(one.a)}", Style.RED, colour))
        elif one.a is ABSENT:
            lines.append(styled(f"+ {printable(one.path)}  {value_text(one.b)}", Style.GREEN, colour))
        else:
            lines.append(next(aligned))
    yield from _first_lines(lines, limit, colour)


def _remark_lines(difference: Difference, colour: bool, limit: int | None) -> Iterator[str]:
    """Yield limits of the comparison, its preparations, and ignored differences."""
    broken = [
        f"! {printable(one.name)} of {one.side.value.upper()}: {printable(one.why)}"
        for one in difference.broken
    ]
    unsure = [f"? not compared: {printable(one)}" for one in difference.not_compared]
    unsure += [f"? undecided: {printable(one.text)}" for one in difference.undecided]
    yield from _first_lines(broken, limit, colour, Style.RED)
    yield from _first_lines(unsure, limit, colour, Style.YELLOW)
    yield from (f"  {printable(rule)}: {counted(n, 'tensor')}" for rule, n in difference.rules.items())
    yield from (f"  {printable(note)}" for note in difference.notes)
    yield from (styled(f"  {line}", Style.DIM, colour) for line in _not_counted_lines(difference, limit))


def _not_counted_lines(difference: Difference, limit: int | None) -> Iterator[str]:
    """Yield irrelevant differences: other names, other words, and parts of one side only."""
    reported = difference.reported
    other_names = () if difference.rename_counts else difference.renamed
    sentences = {
        "matched under different names": [f"{printable(a)} = {printable(b)}" for a, b in other_names],
        "not counted": [
            _reported_value(one, change_text(one)) for one in reported if ABSENT not in (one.a, one.b)
        ],
        "not counted, only in A": [
            _reported_value(one, value_text(one.a)) for one in reported if one.b is ABSENT
        ],
        "not counted, only in B": [
            _reported_value(one, value_text(one.b)) for one in reported if one.a is ABSENT
        ],
    }
    for words, values in sentences.items():
        parts = [*dict.fromkeys(values)]
        shown = parts if limit is None else parts[:_MOST_REMARKS]
        more = [f"and {len(parts) - len(shown):,} more"] if len(parts) > len(shown) else []
        if parts:
            yield f"{words}: {', '.join([*shown, *more])}"


def _reported_value(change: ValueChange, value: str) -> str:
    """Return a value after its path; only the path if the value is long."""
    if change.path.partition(".")[0] == _IDENTITY:
        return _IDENTITY
    return f"{printable(change.path)} {value}"


def _first_lines(
    lines: Sequence[str], limit: int | None, colour: bool, style: Style | None = None
) -> Iterator[str]:
    yield from (line if style is None else styled(line, style, colour) for line in lines[:limit])
    if limit is not None and len(lines) > limit:
        yield more_line(len(lines) - limit, colour)


# Values ---------------------------------------------------------------------------------------------


def value_text(value: object) -> str:
    """Return a value that is not a tensor, in one short line."""
    if value is ABSENT:
        return "absent"
    if isinstance(value, Mapping | list):
        from ckpttool.core.result import dumps

        return printable_cut(dumps(value), LONGEST_VALUE)
    return printable_cut(number(value), LONGEST_VALUE) or "''"


def change_text(change: ValueChange) -> str:
    """Return a changed value: ``3 → 4``, with as many digits as it takes to distinguish them."""
    if isinstance(change.a, float | int) and isinstance(change.b, float | int):
        return two_values(change.a, change.b)
    return f"{value_text(change.a)} → {value_text(change.b)}"


# Changed tensors ----------------------------------------------------------------------------------


_HEADINGS = ("tensor", "change", "differ", "max |Δ|", "at", "values", "mean |Δ|", "relative", "L2", "cosine")


def _sorted_changes(changed: Iterable[Change]) -> list[Change]:
    """Return changes with other shapes first, then other types; weights first, and the largest changes."""

    # NaN and infinities rank before any finite change. A NaN as a sort key would leave the order undefined.
    def rank(change: Change) -> tuple[int, bool, float]:
        distance = 0.0
        if (statistics := change.distance) is not None:
            relative = statistics.relative
            distance = math.inf if statistics.non_finite or relative != relative else relative
        return _KINDS.index(change.kind), change.a.role is not Role.WEIGHTS, -distance

    return sorted(changed, key=rank)


def _change_table(changes: Sequence[Change], width: int) -> TextTable:
    """Return a row for each change, in the order given."""
    rows = [_change_row(one) for one in changes]
    return text_table(
        _HEADINGS,
        rows,
        width=width,
        left=("change", "at", "values"),
        dispensable=("mean |Δ|", "cosine", "L2", "at", "values", "differ", "change"),
    )


def change_cells(changed: Iterable[Change]) -> tuple[Sequence[str], list[tuple[str, ...]]]:
    """Return the headings, and the cells of every change, the most important first."""
    return _HEADINGS, [_change_row(one) for one in _sorted_changes(changed)]


def _change_row(change: Change) -> tuple[str, ...]:
    name = printable(_both_names(change.a.name, change.b.name))
    statistics = change.statistics
    if statistics is None:
        return (name, _kind_words(change), *("",) * (len(_HEADINGS) - 2))
    is_far = change.distance is not None
    return (
        name,
        _kind_words(change),
        f"{statistics.count:,} of {statistics.size:,} ({share(statistics.count, statistics.size)})",
        amount(statistics.max_abs) if is_far else "",
        index_text(statistics.where),
        two_values(statistics.at_a, statistics.at_b),
        amount(statistics.mean_abs) if is_far else "",
        amount(statistics.relative) if is_far else "",
        amount(statistics.l2) if is_far else "",
        f"{statistics.cosine:.6f}" if is_far and not math.isnan(statistics.cosine) else "",
    )


def _both_names(a: str, b: str) -> str:
    """Return a tensor's name, or its names on both sides if they differ."""
    return a if a == b else f"{a} → {b}"


def _kind_words(change: Change) -> str:
    """Return the changes besides values, in words, or an empty text."""
    words = []
    if change.a.shape != change.b.shape:
        words.append(f"shape {shape_text(change.b.shape)}, was {shape_text(change.a.shape)}")
    if change.a.dtype != change.b.dtype:
        same = ": same values" if change.kind == "dtype" and change.statistics is None else ""
        words.append(f"{change.b.dtype}, was {change.a.dtype}{same}")
    if change.statistics is not None and change.statistics.non_finite:
        words.append(f"{change.statistics.non_finite:,} NaN or infinite")
    return "; ".join(words)


# By module ------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _ModuleChanges:
    """The total of the changes in one module."""

    # Norms are added as squares, so that ``relative`` is the norm of the module's change over that of its
    # weights, as if its tensors were one vector. A mean of the tensors' values would overstate small ones.
    tensors: int = 0
    measured: int = 0
    count: int = 0
    size: int = 0
    max_abs: float = 0.0
    squares: float = 0.0
    squares_a: float = 0.0

    def add(self, change: Change) -> None:
        self.tensors += 1
        if change.statistics is not None:
            self.count += change.statistics.count
            self.size += change.statistics.size
        if (statistics := change.distance) is not None:
            self.measured += 1
            self.max_abs = max(self.max_abs, statistics.max_abs)  # in this order, NaN is ignored
            self.squares += statistics.l2**2
            self.squares_a += statistics.norm_a**2

    def cells(self) -> tuple[str, ...]:
        if not self.size:
            return (f"{self.tensors:,}", "", "", "")
        differ = f"{self.count:,} of {self.size:,} ({share(self.count, self.size)})"
        if not self.measured:
            return (f"{self.tensors:,}", differ, "", "")
        relative = relative_norm(math.sqrt(self.squares), math.sqrt(self.squares_a))
        return f"{self.tensors:,}", differ, amount(self.max_abs), amount(relative)


def _module_table(changed: Iterable[Change], width: int, limit: int | None) -> tuple[TextTable, int]:
    """Return a row for each changed module, and the number of modules beyond ``limit``."""
    # If there are more, those of repeated layers are combined, which differ only in numbers:
    # ``layers.*.attn``.
    changes = [*changed]
    modules = _changes_by_module(changes, folded=False)
    if limit is not None and len(modules) > limit:
        modules = _changes_by_module(changes, folded=True)
    rows = [(printable(name), *module.cells()) for name, module in [*modules.items()][:limit]]
    table = text_table(
        ("module", "changed", "differ", "max |Δ|", "relative"), rows, width=width, dispensable=("differ",)
    )
    return table, len(modules) - len(rows)


def _changes_by_module(changes: Iterable[Change], *, folded: bool) -> dict[str, _ModuleChanges]:
    modules: dict[str, _ModuleChanges] = {}
    for one in changes:
        name = module_of(one.name)
        modules.setdefault(fold_numbers(name) if folded else name, _ModuleChanges()).add(one)
    return modules


def module_of(name: str) -> str:
    """Return the module of a tensor; its own name without one."""
    return name.rpartition(".")[0] or name


def fold_numbers(name: str) -> str:
    """Return a name with ``*`` for numbers, which similar layers share: ``layers.*.attn``."""
    return _NUMBER.sub("*", name)


# A series of checkpoints --------------------------------------------------------------------------


DRIFT_HEADINGS = (
    "checkpoint",
    "epoch",
    "step",
    "loss",
    "norm",
    "changed",
    "L2",
    "relative",
    "max |Δ|",
    "tensor",
    "cosine",
)


def drift_text(drift: Drift, *, colour: bool = False, width: int = 100) -> str:
    """Return a summary line, and a row for each checkpoint, with the changes since the one above."""
    table = text_table(
        DRIFT_HEADINGS,
        drift_cells(drift),
        width=width - 2,
        left=("tensor",),
        dispensable=("tensor", "cosine", "L2", "norm", "max |Δ|"),
    )
    lines = [styled(_drift_summary(drift), Style.BOLD, colour), "", *table.indented(colour)]
    with_more = [step.difference for step in drift.steps if _has_more(step.difference)]
    if with_more:
        lines.append("")
        names = dict(zip((point.path for point in drift.points), short_names(drift), strict=True))
        lines += [f"  {printable(names[one.b.path])}: {tensors_line(one)}" for one in with_more]
    return "\n".join(lines)


def _drift_summary(drift: Drift) -> str:
    count = counted(len(drift.points), "checkpoint")
    if not drift.steps:
        return count
    if drift.equal:
        return f"all equal{tolerance_words(drift.steps[0].difference.tolerance)}: {count}"
    moved = sum(not step.difference.equal for step in drift.steps)
    largest = max(drift.steps, key=lambda step: step.relative or 0.0)
    steps = "every step" if moved == len(drift.steps) else f"{moved:,} of {len(drift.steps):,} steps"
    summary = f"{count}: changes at {steps}"
    if not largest.relative:
        return summary
    path = printable(short_names(drift)[drift.steps.index(largest) + 1])
    return f"{summary}, most at {path} (relative {amount(largest.relative)})"


def _has_more(step: Difference) -> bool:
    """Return whether a step has more details than its row."""
    unpaired = step.added or step.removed or step.renamed
    unsure = step.broken or step.not_compared or step.undecided
    return bool(unpaired or unsure or any(one.kind != "values" for one in step.changed))


def drift_cells(drift: Drift) -> list[tuple[str, ...]]:
    """Return the cells of each checkpoint's row."""
    steps: Sequence[DriftStep | None] = [None, *drift.steps]
    rows = []
    for name, point, step in zip(short_names(drift), drift.points, steps, strict=True):
        counts = ["" if value is None else number(value) for value in (point.epoch, point.step, point.loss)]
        norm = "" if point.norm is None else f"{point.norm:.6g}"
        rows.append((printable(name), *counts, norm, *(("",) * 6 if step is None else _step_cells(step))))
    return rows


def short_names(drift: Drift) -> list[str]:
    """Return the paths, without their directory if that is the same for all."""
    paths = [point.path for point in drift.points]
    if len({os.path.dirname(path) for path in paths}) > 1:
        return paths
    return [os.path.basename(path) or path for path in paths]


def _step_cells(step: DriftStep) -> tuple[str, ...]:
    changed = step.difference.changed
    count = f"{len(changed):,} of {step.difference.compared:,}"
    if step.l2 is None or step.max_abs is None or all(one.distance is None for one in changed):
        return (count, "", "", "", "", "")
    return (
        count,
        amount(step.l2),
        "" if step.relative is None else amount(step.relative),
        amount(step.max_abs),
        printable(step.largest or ""),
        "" if step.cosine is None else f"{step.cosine:.6f}",
    )
