"""What people read on a terminal."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping

from ckpttool.checkpoint import TrainingState
from ckpttool.ops.inspect import Inspection
from ckpttool.ops.verdict import PREDICTION, Safety, Status, Verification
from ckpttool.render.escape import printable
from ckpttool.render.text_findings import finding_lines, styled
from ckpttool.render.text_numbers import file_size, number
from ckpttool.render.text_tensors import tensor_table
from ckpttool.report import counted
from ckpttool.tensor import Role

MAX_ROWS = 40
_MAX_VALUE = 60
_FRAMEWORKS = {
    "pytorch": "PyTorch",
    "transformers": "Transformers",
    "lightning": "Lightning",
    "tensorflow": "TensorFlow",
    "paddle": "Paddle",
}


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
        table, left_out = tensor_table(inspection, None if all_tensors else MAX_ROWS, width)
        console.print(table)
        if left_out:
            console.print(f"  too narrow for: {', '.join(left_out)}", style="dim")
    hidden = 0 if all_tensors else len(inspection.tensors) - MAX_ROWS
    if hidden > 0:
        console.print(f"  … and {hidden:,} more (--all shows them)", style="dim")
    if inspection.findings:
        console.print()
        for line in finding_lines(inspection.findings, colour):
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


# verify ---------------------------------------------------------------------------------------------


def verify_text(verifications: list[Verification], *, verbose: bool = False, colour: bool = False) -> str:
    """Return a line a checkpoint, its findings below it, and a last line that counts."""
    lines: list[str] = []
    for verification in verifications:
        lines.append(_verdict_line(verification, colour))
        told = {finding.message for finding in verification.findings}  # said once, with its place
        lines += [
            f"    {check.name:<10} {check.status.value:<8} "
            f"{'' if check.detail in told else printable(check.detail)}".rstrip()
            for check in verification.checks
            if verbose or not verification.is_fine or check.name in PREDICTION
        ]
        lines += [f"    {line}" for line in finding_lines(verification.findings, colour, MAX_ROWS)]
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
        return ("NOT RUN" if verification.is_owed else "INVALID"), "red"
    if verification.safety is Safety.UNSAFE:
        return "UNSAFE", "red"
    return ("valid", "green") if verification.safety is Safety.SAFE else ("valid?", "yellow")


def _counts(verifications: list[Verification]) -> str:
    words = [_verdict(verification)[0] for verification in verifications]
    counted = ", ".join(
        f"{words.count(word):,} {word.rstrip('?').lower()}"
        for word in ("valid", "INVALID", "NOT RUN", "UNSAFE")
        if word in words
    )
    unknown = words.count("valid?")
    doubt = f"{', ' if counted else ''}{unknown:,} valid, safety unknown" if unknown else ""
    return f"{len(verifications):,} checkpoints: {counted}{doubt}"
