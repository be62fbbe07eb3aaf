"""The table of a checkpoint's tensors, by module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from ckpttool.ops.inspect import Inspection, ValueStatistics
from ckpttool.render.aligned import shortened
from ckpttool.render.escape import printable
from ckpttool.render.text_numbers import file_size
from ckpttool.tensor import Tensor

if TYPE_CHECKING:
    from rich.table import Table

_STATISTICS = ("min", "max", "mean", "std", "zeros", "NaN", "Inf")
_LEFT = ("  tensor", "type", "shape")
_NOTHING = {"", "0"}
_DISPENSABLE = ("size", "type", "zeros", "shape", "std", "mean")
"""What a narrow table of statistics does without, in this order; counts that are 0 throughout go first."""
_GAP = 2
_NARROWEST_NAME = 20


def tensor_table(inspection: Inspection, limit: int | None, width: int) -> tuple[Table, list[str]]:
    """Return the table, and the headings of columns for which it is too narrow."""
    from rich.table import Table
    from rich.text import Text

    has_statistics = inspection.statistics is not None
    headings = [*_LEFT, "size", *(_STATISTICS if has_statistics else ())]
    rows = list(_rows(inspection, limit))
    left_out = _left_out(headings, rows, width) if has_statistics else []
    shown = [at for at, heading in enumerate(headings) if heading not in left_out]
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="dim")
    for at in shown:
        is_left = headings[at] in _LEFT
        table.add_column(
            headings[at],
            justify="left" if is_left else "right",
            overflow="fold",
            no_wrap=has_statistics,
        )
    room = max(_NARROWEST_NAME, width - sum(_widths(headings, rows)[at] + _GAP for at in shown[1:]) - _GAP)
    for row in rows:
        if len(row) == 1:
            table.add_row(Text(row[0] if not has_statistics else shortened(row[0], room), style="cyan"))
        else:
            name = shortened(row[0], room) if has_statistics else row[0]
            table.add_row(*map(Text, (name, *(row[at] for at in shown[1:]))))
    return table, [one for one in left_out if not _says_nothing(headings.index(one), rows)]


def _rows(inspection: Inspection, limit: int | None) -> Iterator[tuple[str, ...]]:
    """Yield a cell for a module, and below it the cells of each of its tensors."""
    module: tuple[str, ...] | None = None
    for tensor in inspection.tensors[:limit]:
        *above, leaf = _words(tensor)
        if tuple(above) != module and above:
            yield (f"  {printable('.'.join(above))}",)
        module = tuple(above)
        indent = "    " if above else "  "
        tied = f"  = {printable(tensor.shares_with)}" if tensor.shares_with else ""
        name = f"{indent}{printable(leaf)}{tied}"
        row = (name, tensor.dtype.name, _shape(tensor), file_size(tensor.nbytes))
        yield (*row, *_statistics_cells(inspection.statistics, tensor))


def _left_out(headings: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """Return the headings of columns without which a table becomes narrow enough."""
    widths = dict(zip(headings, _widths(headings, rows), strict=True))
    del widths[headings[0]]
    name = min(max((len(row[0]) for row in rows), default=0), _NARROWEST_NAME)
    empty = [one for one in _STATISTICS[-3:] if _says_nothing(headings.index(one), rows)]
    left_out: list[str] = []
    for heading in dict.fromkeys((*empty, *_DISPENSABLE)):
        if name + sum(_GAP + one for one in widths.values()) + _GAP <= width:
            break
        del widths[heading]
        left_out.append(heading)
    return left_out


def _widths(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[int]:
    cells = [row for row in rows if len(row) == len(headings)]
    return [max(map(len, (heading, *(row[at] for row in cells)))) for at, heading in enumerate(headings)]


def _says_nothing(column: int, rows: Sequence[Sequence[str]]) -> bool:
    return all(row[column] in _NOTHING for row in rows if len(row) > column)


def _statistics_cells(statistics: Mapping[str, ValueStatistics] | None, tensor: Tensor) -> tuple[str, ...]:
    if statistics is None:
        return ()
    found = statistics.get(tensor.name)
    if found is None:
        return ("",) * len(_STATISTICS)
    numbers = (found.minimum, found.maximum, found.mean, found.std, found.zeros, found.nan, found.infinite)
    return tuple(
        "" if value is None else f"{value:.4g}" if isinstance(value, float) else f"{value:,}"
        for value in numbers
    )


def _words(tensor: Tensor) -> list[str]:
    """Return the modules that a tensor lies in, and its own name."""
    *above, last = map(str, tensor.path)
    module, dot, leaf = last.rpartition(".")
    return [*above, module, leaf] if dot else [*above, last]


def _shape(tensor: Tensor) -> str:
    own = _lengths(tensor.shape)
    if tensor.shard is None:
        return own
    placements = "".join(f", {placement}" for placement in tensor.shard.placements)
    whole = "" if tensor.shard.is_whole else f" of {_lengths(tensor.shard.shape)}"
    return f"{own}{whole}{placements}"


def _lengths(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape)) or "scalar"
