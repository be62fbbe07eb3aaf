"""Is what was written what was to be written? It is opened again, and compared to the last bit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ckpttool.checkpoint import Checkpoint, Extent, Span, Tensor
from ckpttool.comparing.comparing import (
    Comparison,
    Failure,
    NotCompared,
    Outcome,
    Side,
    Tolerance,
    compare_all,
)
from ckpttool.formats.carried import encoded
from ckpttool.formats.objects import carried
from ckpttool.report import Severity
from ckpttool.wire.readable import Contiguous, reader_from
from ckpttool.wire.scan import scan
from ckpttool.wire.sink import Written
from ckpttool.work import Advance
from ckpttool.writing.content import Content
from ckpttool.writing.interface import Writer

_BITWISE = Tolerance(bitwise=True)


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
            stood, wanted = (f"{one.dtype} {list(one.shape)}" for one in (other, tensor))
            yield f"{name} is {stood} instead of {wanted}"
        elif tensor.shares_with is None:
            pairs.append((tensor, other))
        elif other.shares_with is None and tensor.nbytes:
            yield f"{name} isn't tied to {tensor.shares_with} any more"
    wanted_names = {writer.named(tensor) for tensor in content.tensors}
    yield from (f"{name} is one too many" for name in found if name not in wanted_names)
    yield from _differing(pairs, written, jobs, advance)
    if content.tree is not None and encoded(carried(content.tree)) != encoded(carried(opened.tree)):
        yield "what is not a tensor came back as something else"


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
            extent = found.extent or Extent(values.source.path, values.offset, values.nbytes)
            read = reader_from(values.source, values.offset)
            spans.append(Span(extent, tensor.name, read, own.own, algorithm=own.algorithm))
    for one in scan(spans, jobs=jobs, values=False, advance=advance):
        if one.failure is not None:
            yield f"{one.span.where}: {one.failure.reason}"
        elif not one.matches:
            yield f"{one.span.where}: its values are others"
    outcomes = compare_all(others, _BITWISE, jobs=jobs, advance=advance)
    for (tensor, _), outcome in zip(others, outcomes, strict=True):
        yield from (f"{tensor.name}: {text}" for text in _values(outcome))


def _structural(opened: Checkpoint) -> Iterator[str]:
    for finding in opened.findings:
        if finding.severity is Severity.ERROR:
            yield f"{finding.where or 'structure'}: {finding.message}"
    if not opened.complete:
        yield "it is not complete"


def _values(outcome: Outcome) -> Iterator[str]:
    if isinstance(outcome, Failure):
        if outcome.side is Side.A:
            raise outcome.error
        yield outcome.error.reason
    elif isinstance(outcome, NotCompared):
        yield f"not compared: {outcome.why}"
    elif isinstance(outcome, Comparison) and not outcome.equal:
        yield "its values are others"
