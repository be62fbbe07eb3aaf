"""Findings of the pass over the bytes of a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.errors import CheckpointError, error_of
from ckpttool.core.report import Finding, error, has_errors, warning
from ckpttool.core.tensor import Span, Tensor
from ckpttool.core.text import counted, first_names
from ckpttool.core.values import storages_of
from ckpttool.formats.traits import traits_of
from ckpttool.ops.verdict import VALUES_NOT_READ
from ckpttool.storage.scan import ScannedSpan

_UNREAD = frozenset(
    {
        "bytes-unused",
        "layout-not-read",
        "object-array",
        "part-not-checked",
        "part-unrecognised",
        "unused-storage",
        "weights-not-read",
    }
)
"""Findings of formats for values that no check reads."""


def special_findings(nan: int, infinite: int, tensor: Tensor) -> list[Finding]:
    """Return an error for NaN, and a warning for infinities, which attention masks have on purpose."""
    findings = []
    if nan:
        findings.append(error("nan", f"{nan:,} of {tensor.size:,} values are NaN", tensor.name))
    # Lightning's k-th best score is infinite until k checkpoints were saved.
    # Source: Lightning-AI/pytorch-lightning ``callbacks/model_checkpoint.py`` (``kth_value``).
    is_kth_score = tensor.size == 1 and tensor.path[0] == "callbacks" and tensor.path[-1] == "kth_value"
    if infinite and not is_kth_score:
        message = f"{infinite:,} of {tensor.size:,} values are infinite"
        findings.append(warning("infinity", message, tensor.name))
    return findings


def loss_findings(checkpoint: Checkpoint) -> list[Finding]:
    """Return a warning if the recorded loss is NaN or infinite."""
    try:
        training = checkpoint.training
        loss = training.loss
    except CheckpointError:  # an unreadable scalar, which the pass over the file reports
        return []
    if loss is None or loss - loss == 0:
        return []
    return [warning("loss-not-finite", f"the recorded loss is {loss}", training.origin.get("loss"))]


def checksum_findings(scanned: Sequence[ScannedSpan], checkpoint: Checkpoint | None = None) -> list[Finding]:
    """Return an error for each range that can't be read, then for each with a wrong checksum.

    If the checkpoint is given, findings have the names of the tensors in the ranges.
    """
    has_mismatch = any(not one.matches for one in scanned)
    tensors_in = _tensors_by_place(checkpoint) if checkpoint is not None and has_mismatch else {}
    failures = [(one.span, one.failure) for one in scanned if one.failure is not None]
    findings = [error_of(failure, span.where) for span, failure in failures]
    for one in scanned:
        if one.failure is None and not one.matches:
            stated, found = one.span.crc32 or 0, one.crc32 or 0
            name = "CRC-32C" if one.span.algorithm == "crc32c" else "CRC-32"
            message = f"{name} is {found:08x} instead of {stated:08x}"
            names = tensors_in.get(range_of(one.span), ())
            tensors = tuple(name for name in names if name != one.span.where)
            findings.append(error("checksum-mismatch", message, one.span.where)._replace(tensors=tensors))
    return findings


def range_of(span: Span) -> tuple[str, int, int]:
    """Return file, offset and length of a span."""
    return span.extent.file, span.extent.offset, span.extent.nbytes


def _tensors_by_place(checkpoint: Checkpoint) -> dict[tuple[str, int, int], list[str]]:
    names: dict[tuple[str, int, int], list[str]] = {}
    for tensor in checkpoint.tensors:
        for extent in storages_of(tensor):
            names.setdefault((extent.file, extent.offset, extent.nbytes), []).append(tensor.name)
    return names


def covered_by_checksums(scanned: Sequence[ScannedSpan]) -> str:
    """Return the number of records with a checksum, and the files without, as text."""
    covered = counted(sum(one.span.crc32 is not None for one in scanned), "record")
    bare = sorted({os.path.basename(one.span.extent.file) for one in scanned if one.span.crc32 is None})
    if not bare:
        return covered
    return f"{covered}; {bare[0]} has none" if len(bare) == 1 else f"{covered}; {len(bare)} files have none"


def why_no_checksums(checkpoint: Checkpoint) -> str:
    """Return why no checksum was compared."""
    if checkpoint.format == "pytorch" and checkpoint.variant == "zip":
        return "the file was saved without checksums"
    traits = traits_of(checkpoint.format)
    if traits.has_some_checksums and not checkpoint.complete:
        return "the files with checksums are missing or can't be read"
    kind = " ".join(filter(None, (checkpoint.format, checkpoint.variant)))
    if checkpoint.format == "savedmodel" and not checkpoint.tensors:
        return "it has no variables, and nothing else has checksums"
    return f"{kind} files carry no checksums"


def unread_values(checkpoint: Checkpoint) -> str | None:
    """Return a note on content that the check of values could not read; None if it read all."""
    bare = len(_valueless(checkpoint))
    parts = sum(finding.code in _UNREAD for finding in checkpoint.findings)
    opaque = sum(tensor.dtype.is_opaque for tensor in checkpoint.tensors)
    if not (bare or parts or opaque):
        return None
    total = len(checkpoint.tensors)
    amounts = [f"{total - bare:,} of {counted(total, 'tensor')}" if bare else counted(total, "tensor")]
    amounts += [f"{bare:,} not read"] if bare else []
    amounts += [f"{opaque:,} of a type whose values can't be checked"] if opaque else []
    amounts += [f"{counted(parts, 'part')} not checked (see the findings)"] if parts else []
    return "; ".join(amounts)


def unread_findings(checkpoint: Checkpoint) -> list[Finding]:
    """Return a warning if tensors have no readable values, and no error explains that."""
    bare = _valueless(checkpoint)
    if not bare or has_errors((*checkpoint.findings, *checkpoint.safety)):
        return []
    count = f"{len(bare):,} of {counted(len(checkpoint.tensors), 'tensor')}"
    message = f"the values of {count} are not in the file, or stored in an unsupported form"
    return [warning(VALUES_NOT_READ, message, first_names(bare))]


def _valueless(checkpoint: Checkpoint) -> list[str]:
    return [one.name for one in checkpoint.tensors if one.values is None and one.dtype.kind != "string"]


def why_no_values(checkpoint: Checkpoint) -> str:
    """Return why no value was checked."""
    if not checkpoint.tensors:
        return "it has no tensors" if checkpoint.complete else "no tensor could be read"
    return f"the files with the values of {counted(len(checkpoint.tensors), 'tensor')} are missing"
