"""Is what was written what was to be written? It is opened again, and compared to the last bit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ckpttool.checkpoint import Checkpoint
from ckpttool.ops.returned import unreturned
from ckpttool.report import Severity
from ckpttool.tensor import Extent, Span, Tensor
from ckpttool.wire.readable import Contiguous, reader_from
from ckpttool.wire.scan import scan
from ckpttool.wire.sink import Written
from ckpttool.work import Advance
from ckpttool.writing.content import Content
from ckpttool.writing.interface import Writer

_AT_ONCE = 1 << 12
"""How many tensors are read back at once: what is noted of each takes memory."""


def mismatches(
    content: Content,
    opened: Checkpoint,
    writer: Writer,
    written: Iterable[Written],
    *,
    jobs: int,
    advance: Advance,
) -> Iterator[str]:
    """Yield in what a target differs from the content that it was made of, a sentence each.

    Args:
        content: What was to be written.
        opened: What stands there.
        writer: What wrote it.
        written: Checksums of what was read while it was written; the other tensors are read once more.
        jobs: Number of threads.
        advance: Told the bytes that were read.

    Raises:
        CheckpointError: The source can't be read any more.
    """
    yield from _structural(opened)
    found = {tensor.name: tensor for tensor in opened.tensors}
    pairs: list[tuple[Tensor, Tensor]] = []
    for tensor in content.tensors:
        name = writer.named(tensor)
        other = found.get(name)
        if other is None:
            yield f"{name} is missing"
        elif (other.dtype, other.shape) != (tensor.dtype, tensor.shape):
            stands, was = (f"{one.dtype} {list(one.shape)}" for one in (other, tensor))
            yield f"{name} is {stands} instead of {was}"
        elif tensor.shares_with is None:
            pairs.append((tensor, other))
    wanted = {writer.named(tensor) for tensor in content.tensors}
    yield from (f"{name} is one too many" for name in found if name not in wanted)
    if len(found) < len(opened.tensors):
        yield f"{len(opened.tensors) - len(found):,} names are two tensors'"
    yield from unreturned(content, opened, writer)
    yield from _differing(pairs, written, jobs, advance)


def _differing(
    pairs: Iterable[tuple[Tensor, Tensor]], written: Iterable[Written], jobs: int, advance: Advance
) -> Iterator[str]:
    """Yield which tensors hold other bytes than those that were to be written."""
    sums = {id(one.tensor): one for one in written}
    spans, others = [], []
    for tensor, found in pairs:
        own = sums.get(id(tensor))
        values = found.values
        if own is None or not isinstance(values, Contiguous) or values.swap != 1:
            others.append((tensor, found))
        else:
            spans.append((own, found, values))
    for at in range(0, len(spans), _AT_ONCE):
        batch = (_span(*one) for one in spans[at : at + _AT_ONCE])
        for one in scan(batch, jobs=jobs, values=False, advance=advance):
            if one.failure is not None:
                yield f"{one.span.where}: {one.failure.reason}"
            elif not one.matches:
                yield f"{one.span.where}: its values are others"
    if others:
        yield from _compared(others, jobs, advance)


def _compared(pairs: Sequence[tuple[Tensor, Tensor]], jobs: int, advance: Advance) -> Iterator[str]:
    """Yield which tensors hold other elements, by reading both sides.

    Raises:
        CheckpointError: The source can't be read any more.
    """
    from ckpttool.comparing.comparing import Comparison, Failure, NotCompared, Side, Tolerance, compare_all

    outcomes = compare_all(pairs, Tolerance(bitwise=True), jobs=jobs, advance=advance)
    for (tensor, _), outcome in zip(pairs, outcomes, strict=True):
        if isinstance(outcome, Failure):
            if outcome.side is Side.A:
                raise outcome.error
            yield f"{tensor.name}: {outcome.error.reason}"
        elif isinstance(outcome, NotCompared):
            yield f"{tensor.name}: not compared: {outcome.why}"
        elif isinstance(outcome, Comparison) and not outcome.equal:
            yield f"{tensor.name}: its values are others"


def _span(own: Written, found: Tensor, values: Contiguous) -> Span:
    """Return the bytes of a tensor that was written, with the checksum that they should have."""
    extent = found.extent or Extent(values.source.path, values.offset, values.nbytes)
    read = reader_from(values.source, values.offset)
    return Span(extent, own.tensor.name, read, own.own, algorithm=own.algorithm)


def _structural(opened: Checkpoint) -> Iterator[str]:
    for finding in opened.findings:
        if finding.severity is Severity.ERROR:
            yield f"{finding.where or 'structure'}: {finding.message}"
    if not opened.complete:
        yield "it is not complete"
