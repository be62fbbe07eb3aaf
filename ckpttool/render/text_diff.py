"""The text of ``diff``: the answer in a sentence, the changed tensors as a table, and everything else."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ckpttool.core.report import counted
from ckpttool.core.tensor import Role
from ckpttool.ops.difference import ABSENT, Change, Difference, Facts, ValueChange, distances
from ckpttool.render.diff_summary import change_text, moved_line, summary_line, two_values, value_text
from ckpttool.render.numbers import amount, index_text, shape_text, share
from ckpttool.render.tables import TextTable, text_table
from ckpttool.render.terminal import display_width, pad, printable
from ckpttool.weights.comparing.statistics import relative_change, relative_norm

MAX_ROWS = 40
_MOST_REMARKS = 4
_IDENTITY = "fingerprint"
"""What TensorFlow gives to each save of a model: long numbers that nobody reads."""
_RED, _GREEN, _YELLOW, _CYAN = 31, 32, 33, 36
_BOLD, _DIM = 1, 2
_KINDS = ("shape", "dtype", "values")
_HEADINGS = ("tensor", "change", "differ", "max |Δ|", "at", "values", "mean |Δ|", "relative", "L2", "cosine")
_LEFT = ("change", "at", "values")
_DISPENSABLE = ("mean |Δ|", "cosine", "L2", "at", "values", "differ", "change")
_MODULE_HEADINGS = ("module", "changed", "differ", "max |Δ|", "relative")
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
"""A component of a name that is a number: one layer of many."""


def diff_text(
    difference: Difference,
    *,
    all: bool = False,
    stat: bool = False,
    colour: bool = False,
    width: int = 100,
) -> str:
    """Return how two checkpoints differ: the answer first, what matters most next.

    Args:
        difference: As ``diff`` returns it.
        all: Whether to show every row, not just the first 40 of each kind.
        stat: Whether to count by module, rather than show each tensor.
        colour: Whether to write colour: what is gone in red, what is new in green.
        width: Columns of the terminal.
    """
    paint = _Paint(colour)
    limit = None if all else MAX_ROWS
    head = [paint(summary_line(difference), _BOLD)]
    if moved := moved_line(difference):
        head.append(moved)
    sections = [
        [*_changed_lines(difference, paint, stat, limit, width)],
        [*_unpaired_lines(difference, paint, limit)],
        [*_value_lines(difference.values, paint, limit)],
        [*_remark_lines(difference, paint, limit)],
    ]
    return "\n\n".join("\n".join(lines) for lines in (head, *sections) if lines)


def name_only_text(difference: Difference) -> str:
    """Return the names of what changed, a line each with a letter, as ``git diff --name-status`` does."""
    lines = [f"M\t{printable(both_names(one.a.name, one.b.name))}" for one in difference.changed]
    if difference.rename_counts:
        lines += [f"R\t{printable(a)}\t{printable(b)}" for a, b in difference.renamed]
    lines += [f"D\t{printable(one.name)}" for one in difference.removed]
    lines += [f"A\t{printable(one.name)}" for one in difference.added]
    return "\n".join(lines)


class _Paint:
    """Writes text in a colour or a weight, where that is wanted."""

    def __init__(self, colour: bool) -> None:
        self._colour = colour

    def __call__(self, text: str, code: int) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self._colour and text else text


def _cut(lines: Sequence[str], limit: int | None, paint: _Paint) -> Iterator[str]:
    yield from lines[:limit]
    if limit is not None and len(lines) > limit:
        yield paint(f"  … and {len(lines) - limit:,} more (--all shows them)", _DIM)


# Sections -------------------------------------------------------------------------------------------


def _changed_lines(
    difference: Difference, paint: _Paint, stat: bool, limit: int | None, width: int
) -> Iterator[str]:
    if not difference.changed:
        return
    if stat:
        table, more = module_table(difference.changed, width - 2, limit)
    else:
        changes = sorted_changes(difference.changed)
        table = change_table(changes[:limit], width - 2)
        more = len(changes) - (len(table.lines) - 1)
    heading, *rows = table.lines
    yield f"  {paint(heading, _DIM)}"
    yield from (f"  {row}" for row in rows)
    if table.left_out:
        yield paint(f"  too narrow for: {', '.join(table.left_out)}", _DIM)
    if more > 0:
        yield paint(f"  … and {more:,} more (--all shows them)", _DIM)


def _unpaired_lines(difference: Difference, paint: _Paint, limit: int | None) -> Iterator[str]:
    """Yield the tensors of one side alone, and those with another name on the other."""
    yield from _cut([paint(f"- {_tensor_line(one)}", _RED) for one in difference.removed], limit, paint)
    yield from _cut([paint(f"+ {_tensor_line(one)}", _GREEN) for one in difference.added], limit, paint)
    if difference.rename_counts:
        changed = {one.a.name for one in difference.changed}
        lines = [
            paint(f"  {printable(a)} → {printable(b)}{'' if a in changed else ': same content'}", _CYAN)
            for a, b in difference.renamed
        ]
        yield from _cut(lines, limit, paint)


def _tensor_line(facts: Facts) -> str:
    return f"{printable(facts.name)}  {facts.dtype} {shape_text(facts.shape)}"


def _value_lines(values: Sequence[ValueChange], paint: _Paint, limit: int | None) -> Iterator[str]:
    room = max(
        (display_width(printable(one.path)) for one in values if ABSENT not in (one.a, one.b)), default=0
    )
    lines = []
    for one in values:
        path = printable(one.path)
        if one.b is ABSENT:
            lines.append(paint(f"- {path}  {value_text(one.a)}", _RED))
        elif one.a is ABSENT:
            lines.append(paint(f"+ {path}  {value_text(one.b)}", _GREEN))
        else:
            lines.append(f"  {pad(path, room)}  {change_text(one)}")
    yield from _cut(lines, limit, paint)


def _remark_lines(difference: Difference, paint: _Paint, limit: int | None) -> Iterator[str]:
    """Yield what couldn't be compared, what was done to compare the rest, and what is no difference."""
    broken = (
        f"! {printable(one.name)} of {one.side.value.upper()}: {printable(one.why)}"
        for one in difference.broken
    )
    yield from _cut([paint(line, _RED) for line in broken], limit, paint)
    things = [paint(f"? not compared: {printable(one)}", _YELLOW) for one in difference.not_compared]
    things += [paint(f"? undecided: {printable(one.text)}", _YELLOW) for one in difference.undecided]
    yield from _cut(things, limit, paint)
    yield from (f"  {printable(rule)}: {counted(n, 'tensor')}" for rule, n in difference.rules.items())
    yield from (f"  {printable(note)}" for note in difference.notes)
    yield from (paint(f"  {line}", _DIM) for line in _not_counted_lines(difference, limit))


def _not_counted_lines(difference: Difference, limit: int | None) -> Iterator[str]:
    """Yield what differs and is no difference: other names, other words, and what only one side has."""
    reported = difference.reported
    other_names = () if difference.rename_counts else difference.renamed
    sentences = {
        "called otherwise in B": [f"{printable(a)} = {printable(b)}" for a, b in other_names],
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
    """Return a value after its path; the path alone, cut short, where nobody reads the value."""
    if change.path.partition(".")[0] == _IDENTITY:
        return _IDENTITY
    return f"{printable(change.path)} {value}"


# Changed tensors ------------------------------------------------------------------------------------


def sorted_changes(changed: Iterable[Change]) -> list[Change]:
    """Return changes with other shapes first, then other types; weights first, and what moved farthest."""

    def rank(change: Change) -> tuple[int, bool, float]:
        distance = 0.0
        if (statistics := distances(change)) is not None:
            relative = relative_change(statistics)
            distance = math.inf if statistics.non_finite or relative != relative else relative
        return _KINDS.index(change.kind), change.a.role is not Role.WEIGHTS, -distance

    return sorted(changed, key=rank)


def change_table(changes: Sequence[Change], width: int) -> TextTable:
    """Return a row for each change, in the order given."""
    rows = [_change_row(one) for one in changes]
    return text_table(_HEADINGS, rows, width=width, left=_LEFT, dispensable=_DISPENSABLE)


def change_cells(changed: Iterable[Change]) -> tuple[Sequence[str], list[tuple[str, ...]]]:
    """Return the headings, and the cells of every change: what matters most comes first."""
    return _HEADINGS, [_change_row(one) for one in sorted_changes(changed)]


def _change_row(change: Change) -> tuple[str, ...]:
    name = printable(both_names(change.a.name, change.b.name))
    statistics = change.statistics
    if statistics is None:
        return (name, kind_words(change), *("",) * (len(_HEADINGS) - 2))
    is_far = distances(change) is not None
    return (
        name,
        kind_words(change),
        f"{statistics.count:,} of {statistics.size:,} ({share(statistics.count, statistics.size)})",
        amount(statistics.max_abs) if is_far else "",
        index_text(statistics.where),
        two_values(statistics.at_a, statistics.at_b),
        amount(statistics.mean_abs) if is_far else "",
        amount(relative_change(statistics)) if is_far else "",
        amount(statistics.l2) if is_far else "",
        "" if statistics.cosine != statistics.cosine else f"{statistics.cosine:.6f}",  # of what has no length
    )


def both_names(a: str, b: str) -> str:
    """Return a tensor's name, or its names on both sides where they differ."""
    return a if a == b else f"{a} → {b}"


def kind_words(change: Change) -> str:
    """Return what changed besides values, in words; nothing where nothing else did."""
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
    """What the changes in one module come to."""

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
        if (statistics := distances(change)) is not None:
            self.measured += 1
            self.max_abs = max(self.max_abs, statistics.max_abs)  # in this order NaN loses
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


def module_table(changed: Iterable[Change], width: int, limit: int | None) -> tuple[TextTable, int]:
    """Return a row for each module with changes, and how many more than ``limit`` there are.

    Where there are more, modules that differ in numbers alone are one: ``layers.*.attn``.
    """
    changes = [*changed]
    modules = _changes_by_module(changes, folded=False)
    if limit is not None and len(modules) > limit:
        modules = _changes_by_module(changes, folded=True)
    rows = [(printable(name), *module.cells()) for name, module in [*modules.items()][:limit]]
    table = text_table(_MODULE_HEADINGS, rows, width=width, dispensable=("differ",))
    return table, len(modules) - len(rows)


def _changes_by_module(changes: Iterable[Change], *, folded: bool) -> dict[str, _ModuleChanges]:
    modules: dict[str, _ModuleChanges] = {}
    for one in changes:
        name = one.name.rpartition(".")[0] or one.name
        modules.setdefault(_NUMBER.sub("*", name) if folded else name, _ModuleChanges()).add(one)
    return modules
