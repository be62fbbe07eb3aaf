"""The same tensors in another format: planned without reading a value, written, compared, put in place."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.errors import CheckpointError, DamagedCheckpoint, UsageError, from_os_error
from ckpttool.core.options import shows_keywords, with_keywords
from ckpttool.core.report import Finding, Severity
from ckpttool.formats import open_checkpoint
from ckpttool.ops.conversion import Converted, ConvertKeywords, ConvertOptions
from ckpttool.ops.conversion_plan import ConversionPlan, SummedTensor, model_of, more, plan_conversion
from ckpttool.ops.readback import mismatches
from ckpttool.ops.scan_findings import checksum_findings
from ckpttool.ops.target_path import target_error
from ckpttool.storage import fs
from ckpttool.storage.held import holds
from ckpttool.storage.scan import Scanned, scan
from ckpttool.storage.work import Advance, default_jobs, no_advance
from ckpttool.transaction.staged_output import StagedOutput

if TYPE_CHECKING:
    from typing_extensions import Unpack

_AT_ONCE = 1 << 12
"""How many byte ranges are read at once: what is noted of each takes memory."""


@shows_keywords(ConvertOptions)
@holds("source", "target")
def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    options: ConvertOptions | None = None,
    *,
    advance: Advance | None = None,
    **keywords: Unpack[ConvertKeywords],
) -> Converted:
    """Write the content of a checkpoint in another format, in constant memory, and compare it.

    The target appears whole or not at all.

    Args:
        source: A file, directory or index.
        target: Path to write to; its suffix says the format, unless ``to`` does.
        options: What is written, and how.
        advance: Called with the bytes done, from any thread.
        keywords: Attributes of ``ConvertOptions``, such as ``to="safetensors"``.

    Raises:
        CheckpointError: The source can't be opened or is damaged, or the target can't be written.
        UsageError: The options can't be followed, or the target can't hold what the source has.
    """
    options = with_keywords(options or ConvertOptions(), keywords)
    with open_checkpoint(source) as checkpoint, model_of(options) as model:
        return carry_out(
            plan_conversion(checkpoint, os.fspath(target), options, model), advance=advance or no_advance
        )


def carry_out(
    plan: ConversionPlan,
    *,
    advance: Advance = no_advance,
    place: Callable[[StagedOutput], None] = StagedOutput.commit,
) -> Converted:
    """Write what was planned, compare it with the source, and put it in place."""
    if plan.options.dry_run:
        return plan.converted(nbytes=plan.content.nbytes, verified=False)
    jobs = plan.options.jobs or default_jobs()
    marks = _marks(plan.source)
    shape = "directory" if plan.write_options.shard_size is not None else plan.writer.shape
    try:
        with StagedOutput(plan.target, shape, replaces=plan.replaces, jobs=jobs, advance=advance) as staged:
            plan.writer.write(plan.content, staged, plan.write_options)
            staged.settle()
            converted = _read_back(plan, staged, jobs, advance)
            staged.require_in_place()  # else something else was read back
            read = [SummedTensor(one.tensor, one.algorithm, one.elements_checksum) for one in staged.written]
            _require_sums(plan.source, [*read, *plan.summed], jobs, advance)
            for path, mark in _marks(plan.source).items():  # else its parts may be of two states
                if mark != marks[path]:
                    raise DamagedCheckpoint(path, "it was written to while it was read")
            if converted.verified:
                place(staged)
    except OSError as error:
        raise target_error(error, plan.target) from error
    return replace(converted, warnings=staged.warnings)


def _read_back(plan: ConversionPlan, staged: StagedOutput, jobs: int, advance: Advance) -> Converted:
    """Return what stands at the staged path, compared with what was planned."""
    try:
        opened = open_checkpoint(staged.path)
    except CheckpointError as error:
        failure = f"{error.where}: {error.reason}" if error.where else error.reason
        return plan.converted(nbytes=0, verified=False, failures=(f"it can't be opened: {failure}",))
    with opened:
        found = mismatches(
            plan.content,
            opened,
            plan.writer,
            staged.written,
            jobs=jobs,
            advance=advance,
        )
        failures = tuple(found)
        safety = tuple(one for one in opened.safety if one.severity is not Severity.NOTE)
        if safety and plan.options.strict:
            first = safety[0]
            raise UsageError(
                f"{first.where or plan.target}: {first.message}{more(len(safety), 1)} (--strict)"
            )
        return plan.converted(nbytes=opened.nbytes, verified=not failures, failures=failures, safety=safety)


def _marks(checkpoint: Checkpoint) -> dict[str, tuple[int, int, int]]:
    """Return for each file of a source what changes when it is written to: its number, size and time."""
    marks = {}
    for entry in checkpoint.files:
        try:
            status = fs.stat(entry.path)
        except OSError as error:
            raise from_os_error(error, entry.path) from error
        marks[entry.path] = status.st_ino, status.st_size, status.st_mtime_ns
    return marks


def _require_sums(checkpoint: Checkpoint, read: Sequence[SummedTensor], jobs: int, advance: Advance) -> None:
    """Require that all bytes have the checksums that the source states for them.

    What was summed while it was read isn't read again.
    """
    known = {}
    for one in read:
        # A tensor that is all of the bytes that it lies in, in their own order.
        tensor = one.tensor
        is_little = tensor.byteorder == "little" or tensor.dtype.word_bytes == 1
        if tensor.extent is not None and tensor.extent == tensor.storage and is_little:
            known[tensor.extent, one.algorithm] = one.elements_checksum
    summed = (span for span in checkpoint.spans() if span.crc32 is not None)
    found: list[Finding] = []
    while batch := list(islice(summed, _AT_ONCE)):
        owns = [known.get((span.extent, span.algorithm)) for span in batch]
        scanned = [Scanned(span, own) for span, own in zip(batch, owns, strict=True) if own is not None]
        spans = [span for span, own in zip(batch, owns, strict=True) if own is None]
        found += checksum_findings([*scanned, *scan(spans, jobs=jobs, values=False, advance=advance)])
    if found:
        first = found[0]
        raise DamagedCheckpoint(
            checkpoint.path, f"{first.message}{more(len(found), 1)}", where=first.where, code=first.code
        )
