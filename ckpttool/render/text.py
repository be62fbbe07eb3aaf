"""What people read on a terminal."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from ckpttool.checkpoint import Role, Tensor, TrainingState
from ckpttool.ops.inspect import Inspection, Statistics
from ckpttool.ops.verify import Safety, Status, Verification
from ckpttool.render.escape import printable
from ckpttool.report import Finding, Severity, counted

if TYPE_CHECKING:
    from rich.table import Table

MAX_ROWS = 40
_MAX_VALUE = 60
_UNITS = ("kB", "MB", "GB", "TB", "PB")
_FRAMEWORKS = {
    "pytorch": "PyTorch",
    "transformers": "Transformers",
    "lightning": "Lightning",
    "tensorflow": "TensorFlow",
    "paddle": "Paddle",
}
_MARKS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.NOTE: "note"}
_COLOURS = {"error": "red", "warning": "yellow", "note": "cyan"}


def file_size(nbytes: int) -> str:
    """Return bytes as people say them: 1.2 GB, by powers of 1,000."""
    if nbytes < 1000:
        return f"{nbytes} B"
    power = 1
    while power < len(_UNITS) and nbytes >= 999.5 * 1000**power:
        power += 1
    size = nbytes / 1000**power
    return f"{size:.1f} {_UNITS[power - 1]}" if size < 9.95 else f"{size:.0f} {_UNITS[power - 1]}"


def number(value: object) -> str:
    """Return a number without digits that nobody reads."""
    if isinstance(value, float):
        return f"{value:.6g}"
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    return f"{value:,}" if is_whole else printable(str(value))


# inspect --------------------------------------------------------------------------------------------


def inspect_text(
    inspection: Inspection, *, all_tensors: bool = False, colour: bool = False, width: int = 100
) -> str:
    """Return what a checkpoint is: a summary, then its tensors by module, then what was found."""
    from rich.console import Console

    out = io.StringIO()
    console = Console(
        file=out,
        width=width,
        force_terminal=colour,
        no_color=not colour,
        highlight=False,
        emoji=False,
        markup=False,
    )
    console.print(_title(inspection), style="bold", soft_wrap=True)
    for label, value in _summary(inspection):
        console.print(f"  {label:<14} {value}", soft_wrap=True)
    if inspection.tensors:
        console.print()
        console.print(_tensor_table(inspection, None if all_tensors else MAX_ROWS))
    hidden = 0 if all_tensors else len(inspection.tensors) - MAX_ROWS
    if hidden > 0:
        console.print(f"  … and {hidden:,} more (--all shows them)", style="dim")
    if inspection.findings:
        console.print()
        for line in _finding_lines(inspection.findings, colour):
            out.write(f"  {line}\n")
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def _title(inspection: Inspection) -> str:
    found = inspection.checkpoint
    variant = f" ({found.variant})" if found.variant else ""
    incomplete = "" if found.complete else ", INCOMPLETE"
    return f"{printable(found.path)}: {found.format}{variant}{incomplete}"


def _summary(inspection: Inspection) -> Iterator[tuple[str, str]]:
    found = inspection.checkpoint
    files = "" if len(found.files) == 1 else f" in {len(found.files):,} files"
    yield "size", f"{file_size(found.nbytes)}{files}"
    producer = found.producer
    if producer.framework and (producer.version or producer.framework != found.format):
        name = _FRAMEWORKS.get(producer.framework, producer.framework)
        yield "written by", printable(f"{name} {producer.version or ''}".strip())
    yield "holds", _holds(inspection)
    yield from _training_lines(found.training)
    if found.format == "fluid":
        from ckpttool.render.text_fluid import fluid_lines

        yield from fluid_lines(found.metadata)
    if found.parameters:
        yield "parameters", f"{found.parameters:,}"


def _holds(inspection: Inspection) -> str:
    found = inspection.checkpoint
    counts = {role: sum(tensor.role is role for tensor in found.tensors) for role in Role}
    told = ", ".join(f"{count:,} {role.value}" for role, count in counts.items() if count)
    if not told:
        return f"{found.granularity.value}: no tensors"
    return f"{found.granularity.value}: {counted(len(found.tensors), 'tensor')} ({told})"


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
        yield (
            "settings",
            _shortened(", ".join(f"{key}={_plain(value)}" for key, value in state.hyper_parameters.items())),
        )


def _origin(state: TrainingState, name: str) -> str:
    origin = state.origin.get(name)
    return (
        ""
        if origin in (None, f"key {name}", f"key {name.removeprefix('metrics.')}")
        else f"({printable(str(origin))})"
    )


def _plain(value: object) -> str:
    return number(value) if not isinstance(value, Mapping | list) else "…"


def _shortened(text: str) -> str:
    text = printable(text)
    return text if len(text) <= _MAX_VALUE else f"{text[: _MAX_VALUE - 1]}…"


def _tensor_table(inspection: Inspection, limit: int | None) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("  tensor", overflow="fold")
    for heading in ("type", "shape"):
        table.add_column(heading)
    for heading in ("size", *(_STATISTICS if inspection.statistics is not None else ())):
        table.add_column(heading, justify="right")
    module: tuple[str, ...] | None = None
    for tensor in inspection.tensors[:limit]:
        *above, leaf = _words(tensor)
        if tuple(above) != module and above:
            table.add_row(Text(f"  {printable('.'.join(above))}", style="cyan"))
        module = tuple(above)
        indent = "    " if above else "  "
        tied = f"  = {printable(tensor.shares_with)}" if tensor.shares_with else ""
        row = (
            f"{indent}{printable(leaf)}{tied}",
            tensor.dtype.name,
            _shape(tensor),
            file_size(tensor.nbytes),
        )
        table.add_row(*map(Text, (*row, *_statistics_cells(inspection.statistics, tensor))))
    return table


_STATISTICS = ("min", "max", "mean", "std", "zeros", "NaN", "Inf")


def _statistics_cells(statistics: Mapping[str, Statistics] | None, tensor: Tensor) -> tuple[str, ...]:
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
    return "×".join(map(str, tensor.shape)) or "scalar"


# verify ---------------------------------------------------------------------------------------------


def verify_text(verifications: list[Verification], *, verbose: bool = False, colour: bool = False) -> str:
    """Return a line a checkpoint, its findings below it, and a last line that counts."""
    lines: list[str] = []
    for verification in verifications:
        lines.append(_verdict_line(verification, colour))
        if verbose or not verification.is_fine:
            lines += [
                f"    {check.name:<10} {check.status.value:<8} {printable(check.detail)}"
                for check in verification.checks
            ]
        lines += [f"    {line}" for line in _finding_lines(verification.findings, colour, MAX_ROWS)]
    if len(verifications) > 1:
        lines.append(_counts(verifications))
    return "\n".join(lines)


def _verdict_line(verification: Verification, colour: bool) -> str:
    word, style = _verdict(verification)
    kind = " ".join(filter(None, (verification.format, verification.variant))) or "unrecognised"
    done = ", ".join(
        f"{check.name} {check.detail}" for check in verification.checks if _tells(check.name, check.status)
    )
    skipped = [check.name for check in verification.checks if check.status is Status.SKIPPED]
    passed_over = f"; not checked: {', '.join(skipped)}" if skipped else ""
    mark = styled(f"{word:<8}", style, colour)
    size = file_size(verification.nbytes)
    told = f": {done}" if done else ""
    return f"{mark} {printable(verification.path)}  {kind}, {size}{told}{passed_over}"


def _tells(name: str, status: Status) -> bool:
    return status is Status.PASSED and name in ("checksum", "values", "manifest")


def _verdict(verification: Verification) -> tuple[str, str]:
    if not verification.is_valid:
        return "INVALID", "red"
    if verification.safety is Safety.UNSAFE:
        return "UNSAFE", "red"
    return ("valid", "green") if verification.safety is Safety.SAFE else ("valid?", "yellow")


def _counts(verifications: list[Verification]) -> str:
    words = [_verdict(verification)[0] for verification in verifications]
    counted = ", ".join(
        f"{words.count(word):,} {word.rstrip('?').lower()}"
        for word in ("valid", "INVALID", "UNSAFE")
        if word in words
    )
    unknown = words.count("valid?")
    doubt = f"{', ' if counted else ''}{unknown:,} valid with unknown classes" if unknown else ""
    return f"{len(verifications):,} checkpoints: {counted}{doubt}"


# Findings -------------------------------------------------------------------------------------------


def _finding_lines(findings: Iterable[Finding], colour: bool, limit: int | None = None) -> list[str]:
    found = list(findings)
    lines = []
    for one in found[:limit]:
        mark = _MARKS[one.severity]
        place = f" [{printable(one.where)}]" if one.where else ""
        lines.append(f"{styled(mark, _COLOURS[mark], colour)} {one.code}{place}: {printable(one.message)}")
    if limit is not None and len(found) > limit:
        lines.append(f"… and {len(found) - limit:,} more findings (--json has them all)")
    return lines


def styled(text: str, colour_name: str, colour: bool) -> str:
    """Return the text in a colour, where colour is wanted."""
    import typer

    return typer.style(text, fg=colour_name) if colour else text
