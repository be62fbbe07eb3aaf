"""Which side of a comparison is damaged, and where."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ckpttool.checkpoint import Checkpoint
from ckpttool.comparing.comparing import Comparison, Outcome, Side
from ckpttool.formats.torch.chunks import storages_of
from ckpttool.ops.difference import Broken
from ckpttool.ops.scanned import checksum_findings
from ckpttool.pairing.layouts import Item
from ckpttool.pairing.pairing import Pair
from ckpttool.report import Severity
from ckpttool.tensor import Span
from ckpttool.wire.scan import scan

_FEW = 0.1
"""The share of a tensor's elements below which a change looks like damage."""


def structural(checkpoint: Checkpoint, side: Side) -> Iterator[Broken]:
    """Yield what is wrong with the structure of one side."""
    for finding in checkpoint.findings:
        if finding.severity is Severity.ERROR:
            yield Broken(finding.where or checkpoint.path, side, finding.message)


def corrupted(
    compared: Sequence[tuple[Pair, Outcome]], a: Checkpoint, b: Checkpoint, jobs: int
) -> Iterator[Broken]:
    """Yield the tensors of which a few elements differ because the bytes are not those that were written.

    Training changes most elements of a tensor, a flipped bit changes one: where few differ, the checksums
    that the formats carry are compared.
    """
    doubtful = [
        pair for pair, outcome in compared if isinstance(outcome, Comparison) and _is_doubtful(outcome)
    ]
    yield from _mismatches(a, Side.A, [pair.a for pair in doubtful], jobs)
    yield from _mismatches(b, Side.B, [pair.b for pair in doubtful], jobs)


def _is_doubtful(comparison: Comparison) -> bool:
    found = comparison.statistics
    return found is not None and 0 < found.count <= max(1, found.size * _FEW)


def _mismatches(checkpoint: Checkpoint, side: Side, items: Iterable[Item], jobs: int) -> Iterator[Broken]:
    names = {
        (storage.file, storage.offset): source.name
        for item in items
        for source in item.sources
        for storage in storages_of(source)
    }
    if not names:
        return
    spans = [span for span in checkpoint.spans() if span.crc32 is not None and _place(span) in names]
    for scanned in scan(spans, jobs=jobs, values=False):
        for finding in checksum_findings([scanned]):
            yield Broken(names[_place(scanned.span)], side, finding.message)


def _place(span: Span) -> tuple[str, int]:
    return span.extent.file, span.extent.offset
