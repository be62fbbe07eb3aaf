"""What people read of ``diff``: a sentence, what moved, a table, and what else there is to say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ckpttool.ops.difference import ABSENT, Broken, Difference, Facts, ValueChange
from ckpttool.render.aligned import Aligned, columns, padded
from ckpttool.render.amounts import change_text, shape_text, value_text
from ckpttool.render.diff_summary import moved_line, summary_line
from ckpttool.render.diff_tables import both_names, change_table, module_table, sorted_changes
from ckpttool.render.escape import printable
from ckpttool.report import counted

MAX_ROWS = 40
_MOST_REMARKS = 4
_IDENTITY = "fingerprint"
"""What TensorFlow gives to each save of a model: long numbers that nobody reads."""
_RED, _GREEN, _YELLOW, _CYAN = 31, 32, 33, 36
_BOLD, _DIM = 1, 2


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
        difference: What to tell.
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
        [*_changed(difference, paint, stat, limit, width)],
        [*_others(difference, paint, limit)],
        [*_values(difference.values, paint, limit)],
        [*_remarks(difference, paint, limit)],
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


def _changed(
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
    yield from _table_lines(table, paint)
    if more > 0:
        yield paint(f"  … and {more:,} more (--all shows them)", _DIM)


def _table_lines(table: Aligned, paint: _Paint) -> Iterator[str]:
    heading, *rows = table.lines
    yield f"  {paint(heading, _DIM)}"
    yield from (f"  {row}" for row in rows)
    if table.left_out:
        yield paint(f"  too narrow for: {', '.join(table.left_out)}", _DIM)


def _others(difference: Difference, paint: _Paint, limit: int | None) -> Iterator[str]:
    yield from _cut([paint(f"- {_facts(one)}", _RED) for one in difference.removed], limit, paint)
    yield from _cut([paint(f"+ {_facts(one)}", _GREEN) for one in difference.added], limit, paint)
    if difference.rename_counts:
        yield from _cut([paint(f"  {line}", _CYAN) for line in _renames(difference)], limit, paint)


def _facts(facts: Facts) -> str:
    return f"{printable(facts.name)}  {facts.dtype} {shape_text(facts.shape)}"


def _renames(difference: Difference) -> Iterator[str]:
    changed = {one.a.name for one in difference.changed}
    for a, b in difference.renamed:
        told = "" if a in changed else ": same content"
        yield f"{printable(a)} → {printable(b)}{told}"


def _values(values: Sequence[ValueChange], paint: _Paint, limit: int | None) -> Iterator[str]:
    room = max((columns(printable(one.path)) for one in values if ABSENT not in (one.a, one.b)), default=0)
    lines = []
    for one in values:
        path = printable(one.path)
        if one.b is ABSENT:
            lines.append(paint(f"- {path}  {value_text(one.a)}", _RED))
        elif one.a is ABSENT:
            lines.append(paint(f"+ {path}  {value_text(one.b)}", _GREEN))
        else:
            lines.append(f"  {padded(path, room)}  {change_text(one)}")
    yield from _cut(lines, limit, paint)


def _remarks(difference: Difference, paint: _Paint, limit: int | None) -> Iterator[str]:
    """Yield what couldn't be compared, what was done to compare the rest, and what is no difference."""
    yield from _cut([paint(f"! {_broken(one)}", _RED) for one in difference.broken], limit, paint)
    things = [paint(f"? not compared: {printable(one)}", _YELLOW) for one in difference.not_compared]
    things += [paint(f"? undecided: {printable(one.text)}", _YELLOW) for one in difference.undecided]
    yield from _cut(things, limit, paint)
    yield from (f"  {line}" for line in _rules(difference.rules))
    yield from (f"  {printable(note)}" for note in difference.notes)
    yield from (paint(f"  {line}", _DIM) for line in _not_counted(difference, limit))


def _not_counted(difference: Difference, limit: int | None) -> Iterator[str]:
    """Yield what differs and is no difference: other names, other words, and what only one side has."""
    reported = difference.reported
    other_names = () if difference.rename_counts else difference.renamed
    sentences = {
        "called otherwise in B": [f"{printable(a)} = {printable(b)}" for a, b in other_names],
        "not counted": [_told(one, change_text(one)) for one in reported if ABSENT not in (one.a, one.b)],
        "not counted, only in A": [_told(one, value_text(one.a)) for one in reported if one.b is ABSENT],
        "not counted, only in B": [_told(one, value_text(one.b)) for one in reported if one.a is ABSENT],
    }
    for words, said in sentences.items():
        parts = [*dict.fromkeys(said)]
        shown = parts if limit is None else parts[:_MOST_REMARKS]
        more = [f"and {len(parts) - len(shown):,} more"] if len(parts) > len(shown) else []
        if parts:
            yield f"{words}: {', '.join([*shown, *more])}"


def _told(change: ValueChange, value: str) -> str:
    """Return a value after its path; the path alone, cut short, where nobody reads the value."""
    if change.path.partition(".")[0] == _IDENTITY:
        return _IDENTITY
    return f"{printable(change.path)} {value}"


def _rules(rules: Mapping[str, int]) -> Iterator[str]:
    for rule, count in rules.items():
        yield f"{printable(rule)}: {counted(count, 'tensor')}"


def _broken(broken: Broken) -> str:
    return f"{printable(broken.name)} of {broken.side.value.upper()}: {printable(broken.why)}"
