"""The text of ``inspect``: a summary of a checkpoint, a table of its tensors, and the findings."""

from __future__ import annotations

import io
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from ckpttool.cli.render.terminal import (
    GAP,
    Style,
    columns_that_fit,
    display_width,
    hanging_lines,
    pad,
    shorten,
    styled,
)
from ckpttool.core.checkpoint import TrainingState
from ckpttool.core.tensor import FLAT_OPTIMIZER, Role, Tensor
from ckpttool.core.text import counted, file_size, number, printable, printable_cut, shape_text
from ckpttool.formats.architecture import Architecture
from ckpttool.ops.inspect import Inspection, ValueStatistics
from ckpttool.ops.resume import ResumeLevel

if TYPE_CHECKING:
    from ckpttool.runs.pointers.pin_lists import Remark

MAX_ROWS = 40
MAX_TRAINERS = MAX_SIGNATURES = 8
"""Limit on lines, for readability; ``--json`` has all."""
_MAX_VALUE = 60
_FRAMEWORKS = {
    "pytorch": "PyTorch",
    "transformers": "Transformers",
    "lightning": "Lightning",
    "tensorflow": "TensorFlow",
    "paddle": "Paddle",
}
_TRAINER_WORDS = {"epoch_id": "epoch", "step_id": "step"}


def inspect_text(
    inspection: Inspection,
    *,
    all_tensors: bool = False,
    colour: bool = False,
    width: int = 100,
    remark: Remark | None = None,
) -> str:
    """Return a summary of a checkpoint, then its tensors by module, then the findings."""
    checkpoint = inspection.checkpoint
    variant = f" ({checkpoint.variant})" if checkpoint.variant else ""
    incomplete = "" if checkpoint.complete else ", INCOMPLETE"
    title = f"{printable(checkpoint.path)}: {checkpoint.format}{variant}{incomplete}"
    lines = [styled(title, Style.BOLD, colour)]
    facts = [*_summary(inspection)]
    if remark is not None:
        facts += [("note", printable(remark.note))] if remark.note is not None else []
        facts += [(printable(key), printable(text)) for key, text in remark.facts.items()]
    for label, value in facts:
        lines += hanging_lines(f"  {label:<14} ", value, width, 4)
    shown, hidden = _shown_tensors(inspection, all_tensors)
    if shown:
        table, left_out = _tensor_table(inspection, shown, width, colour)
        lines += ["", *table]
        if left_out:
            text = f"  hidden for lack of width: {', '.join(left_out)}"
            lines += (styled(line, Style.DIM, colour) for line in textwrap.wrap(text, width))
    if hidden:
        text = f"… and {_counted_by_role(hidden)}; --all shows them"
        lines += (styled(line, Style.DIM, colour) for line in hanging_lines("  ", text, width, 2))
    if inspection.findings:
        from ckpttool.cli.render.verdicts import finding_lines

        lines += ["", *(f"  {line}" for line in finding_lines(inspection.findings, colour))]
    return "\n".join(line.rstrip() for line in lines)


def _summary(inspection: Inspection) -> Iterator[tuple[str, str]]:
    checkpoint = inspection.checkpoint
    files = "" if len(checkpoint.files) == 1 else f" in {len(checkpoint.files):,} files"
    yield "size", f"{file_size(checkpoint.nbytes)}{files}"
    producer = checkpoint.producer
    if producer.framework and (producer.version or producer.framework != checkpoint.format):
        name = _FRAMEWORKS.get(producer.framework, producer.framework)
        yield "written by", printable(f"{name} {producer.version or ''}".strip())
    roles = ", ".join(f"{len(tensors):,} {role.value}" for role, tensors in by_role(checkpoint.tensors))
    tensors = f"{counted(len(checkpoint.tensors), 'tensor')} ({roles})" if roles else "no tensors"
    yield "holds", f"{checkpoint.granularity.value}: {tensors}"
    yield from _training_lines(checkpoint.training)
    if inspection.resume.level is not ResumeLevel.NONE:
        yield "resumes", str(inspection.resume)
    if checkpoint.format == "fluid":
        yield from fluid_lines(checkpoint.metadata)
    yield from _architecture_lines(inspection.architecture)
    if checkpoint.parameters:
        yield "parameters", f"{checkpoint.parameters:,} ({_types(checkpoint.elements.parameters)})"
    if checkpoint.buffers:
        yield "buffers", f"{checkpoint.buffers:,} ({_types(checkpoint.elements.buffers)})"
    if checkpoint.packed:
        types = _types(checkpoint.elements.packed)
        yield "packed words", f"{checkpoint.packed:,} ({types}), with an unknown number of further parameters"


def _architecture_lines(architecture: Architecture) -> Iterator[tuple[str, str]]:
    family = f" ({architecture.family})" if architecture.family else ""
    # Of layers that consist of layers, only the inner ones are counted.
    inner = {name.rpartition(".")[0] for name in architecture.layers}
    kinds = Counter(kind for name, kind in architecture.layers.items() if name not in inner)
    layers = ", ".join(f"{count} {kind}" if count > 1 else kind for kind, count in kinds.items())
    if text := ": ".join(part for part in (architecture.model + family, layers) if part):
        yield "model", printable(text)
    for signature in architecture.signatures[:MAX_SIGNATURES]:
        sides = (
            ", ".join(f"{name} {kind}" for name, kind in side.items())
            for side in (signature.inputs, signature.outputs)
        )
        yield "signature", printable(f"{signature.name}: {' → '.join(side or 'nothing' for side in sides)}")
    if (more := len(architecture.signatures) - MAX_SIGNATURES) > 0:
        yield "signatures", f"… and {more:,} more (--json has them all)"


def _types(counts: Counter[str]) -> str:
    """Return element counts per type, or the type alone if there is one."""
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{count:,} {name}" for name, count in counts.most_common())


def _training_lines(state: TrainingState) -> Iterator[tuple[str, str]]:
    fields = (
        ("epoch", "epoch", state.epoch),
        ("step", "step", state.step),
        ("loss", "loss", state.loss),
        ("learning rate", "learning_rate", state.learning_rate),
        ("best", "best", state.best),
        ("seed", "seed", state.seed),
        ("saved at", "saved_at", state.saved_at),
    )
    for label, name, value in fields:
        if value is not None:
            yield label, f"{number(value):<12} {_origin(state, name)}".rstrip()
    for metric, measured in state.metrics.items():
        yield printable(metric)[:14], f"{number(measured):<12} {_origin(state, f'metrics.{metric}')}".rstrip()
    if state.hyper_parameters:
        settings = (
            f"{key}={'…' if isinstance(value, Mapping | list) else number(value)}"
            for key, value in state.hyper_parameters.items()
        )
        yield "settings", printable_cut(", ".join(settings), _MAX_VALUE)


def _origin(state: TrainingState, name: str) -> str:
    origin = state.origin.get(name)
    is_obvious = origin in (None, f"key {name}", f"key {name.removeprefix('metrics.')}")
    return "" if is_obvious else f"({printable(str(origin))})"


def fluid_lines(metadata: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the state of each trainer of a Paddle Fluid checkpoint, and the size of each lookup table."""
    trainers = metadata.get("trainers", {})
    for trainer in sorted(trainers, key=int)[:MAX_TRAINERS]:
        state = (f"{_TRAINER_WORDS.get(name, name)} {value}" for name, value in trainers[trainer].items())
        yield f"trainer {trainer}", printable(", ".join(state)) or "nothing"
    if len(trainers) > MAX_TRAINERS:
        yield "trainers", f"… and {len(trainers) - MAX_TRAINERS:,} more (--json has them all)"
    for name, table in metadata.get("lookup_tables", {}).items():
        row = "×".join(map(str, table["row_shape"])) or "1"
        size = f"{counted(table['rows'], 'row')} of {row} in {counted(table['shards'], 'shard')}"
        yield "lookup table", f"{printable(name)}: {size}" if name else size


# The table of tensors -------------------------------------------------------------------------------


_COUNTS = ("zeros", "NaN", "Inf")
_STATISTICS = ("min", "max", "mean", "std", *_COUNTS)
_LEFT = ("  tensor", "type", "shape")
_DISPENSABLE = ("size", "type", "zeros", "shape", "std", "mean")
"""Columns that a narrow table of statistics hides, in this order, after the counts that are all 0."""
_NARROWEST_NAME = 20


def _shown_tensors(inspection: Inspection, every: bool) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Return the tensors in the table, and the others: training state, and all after the first ones."""
    # The state of an optimizer, often two tensors for each weight, would hide the model, so only weights are
    # shown. With a filter or --stats, the user asks for certain tensors, whatever their roles.
    tensors = inspection.tensors
    if every:
        return tensors, ()
    is_selection = len(tensors) < len(inspection.checkpoint.tensors) or inspection.statistics is not None
    weights = [one for one in tensors if one.role is Role.WEIGHTS]
    shown = (tensors if is_selection or not weights else weights)[:MAX_ROWS]
    names = {one.name for one in shown}
    return shown, [one for one in tensors if one.name not in names]


def _counted_by_role(tensors: Sequence[Tensor]) -> str:
    words = {role: "weight" if role is Role.WEIGHTS else role.value for role in Role}
    return ", ".join(
        f"{counted(len(members), f'{words[role]} tensor')} ({file_size(sum(one.nbytes for one in members))})"
        for role, members in by_role(tensors)
    )


def by_role(tensors: Sequence[Tensor]) -> Iterator[tuple[Role, Sequence[Tensor]]]:
    """Yield the tensors of each role that occurs."""
    for role in Role:
        if members := [one for one in tensors if one.role is role]:
            yield role, members


def _tensor_table(
    inspection: Inspection, tensors: Sequence[Tensor], width: int, colour: bool
) -> tuple[list[str], list[str]]:
    """Return the lines of the table, and the headings of hidden columns that aren't empty."""
    # A row with one cell is the heading of a module; it spans the table, so that its width doesn't count for
    # the columns. Without statistics no column is hidden: too wide a table is folded by Rich instead.
    has_statistics = inspection.statistics is not None
    headings = [*_LEFT, "size", *(_STATISTICS if has_statistics else ())]
    rows = list(_tensor_rows(inspection, tensors))
    full = [row for row in rows if len(row) > 1]
    widths = [max(map(len, (heading, *(row[at] for row in full)))) for at, heading in enumerate(headings)]
    blank = {heading for at, heading in enumerate(headings) if all(row[at] in ("", "0") for row in full)}
    name = min(max((len(row[0]) for row in rows), default=0), _NARROWEST_NAME)
    dispensable = (*(one for one in _COUNTS if one in blank), *_DISPENSABLE) if has_statistics else ()
    shown, left_out = columns_that_fit(
        width - name - GAP, range(1, len(headings)), headings, widths, dispensable
    )
    room = max(_NARROWEST_NAME, width - sum(widths[at] + GAP for at in shown) - GAP)
    drawn = [headings, *rows]
    cells = [
        (shorten(row[0], room) if has_statistics else row[0], *(row[at] for at in shown if len(row) > 1))
        for row in drawn
    ]
    columns = [max(display_width(row[at]) for row in cells if len(row) > at) for at in range(1 + len(shown))]
    if sum(columns) + GAP * len(shown) > width:
        lines = _folded_lines(cells, width, colour, no_wrap=has_statistics)
    else:
        lines = list(_lines(cells, columns, colour))
    return lines, [heading for heading in left_out if heading not in blank]


def _lines(cells: Sequence[Sequence[str]], columns: Sequence[int], colour: bool) -> Iterator[str]:
    is_left = [heading in _LEFT for heading in cells[0]]
    for at_row, row in enumerate(cells):
        padded = (
            pad(cell, columns[at]) if is_left[at] else " " * (columns[at] - display_width(cell)) + cell
            for at, cell in enumerate(row)
        )
        line = (" " * GAP).join(padded).rstrip()
        style = Style.DIM if at_row == 0 else Style.CYAN if len(row) == 1 else None
        yield line if style is None else styled(line, style, colour)


def _folded_lines(cells: Sequence[Sequence[str]], width: int, colour: bool, *, no_wrap: bool) -> list[str]:
    """Return the lines of a table that is too wide, whose cells continue on the next line."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="dim")
    for heading in cells[0]:
        justify: Literal["left", "right"] = "left" if heading in _LEFT else "right"
        table.add_column(heading, justify=justify, overflow="fold", no_wrap=no_wrap)
    for row in cells[1:]:
        table.add_row(*(Text(cell, style="cyan" if len(row) == 1 else "") for cell in row))
    out = io.StringIO()
    Console(file=out, width=width, force_terminal=colour, no_color=not colour).print(table)
    return out.getvalue().splitlines()


def _tensor_rows(inspection: Inspection, tensors: Sequence[Tensor]) -> Iterator[tuple[str, ...]]:
    """Yield a cell for a module, and below it the cells of each of its tensors."""
    module: tuple[str, ...] | None = None
    layers, leaves = inspection.architecture.layers, inspection.architecture.weights
    shapes = {one.name: one.shape for one in inspection.checkpoint.tensors if one.role is Role.WEIGHTS}
    for tensor in tensors:
        *above, last = map(str, tensor.path)
        prefix, dot, leaf = last.rpartition(".")
        if dot:
            above.append(prefix)
        if tuple(above) != module and above:
            name = ".".join(above)
            kind = f" ({layers[name]})" if name in layers else ""
            yield (printable(f"  {name}{kind}"),)
        module = tuple(above)
        indent = "    " if above else "  "
        tied = f"  = {printable(tensor.shares_with)}" if tensor.shares_with else ""
        word = f" ({leaves[tensor.name]})" if tensor.name in leaves else ""
        name = f"{indent}{printable(leaf)}{word}{tied}"
        shape = f"{_shape_cell(tensor)}{', flattened' if is_flattened_state(tensor, shapes) else ''}"
        row = (name, tensor.dtype.name, shape, file_size(tensor.nbytes))
        yield (*row, *_statistics_cells(inspection.statistics, tensor))


def is_flattened_state(tensor: Tensor, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Return whether a tensor is optimizer state that Megatron flattened to [1, 1, N]."""
    if tensor.role is not Role.OPTIMIZER or len(tensor.shape) != 3 or tensor.shape[:2] != (1, 1):
        return False
    found = FLAT_OPTIMIZER.match(tensor.name)
    weight = None if found is None else found["weight"]
    return weight is not None and shapes.get(weight) != tensor.shape


def _shape_cell(tensor: Tensor) -> str:
    shape, shard = shape_text(tensor.shape), tensor.shard
    if shard is None:
        return shape
    whole = "" if shard.is_whole else f" of {shape_text(shard.shape)}"
    return ", ".join([f"{shape}{whole}", *map(str, shard.placements)])


def _statistics_cells(statistics: Mapping[str, ValueStatistics] | None, tensor: Tensor) -> tuple[str, ...]:
    if statistics is None:
        return ()
    one = statistics.get(tensor.name)
    if one is None:
        return ("",) * len(_STATISTICS)
    numbers = (one.minimum, one.maximum, one.mean, one.std, one.zeros, one.nan, one.infinite)
    return tuple(
        "" if value is None else f"{value:.4g}" if isinstance(value, float) else f"{value:,}"
        for value in numbers
    )
