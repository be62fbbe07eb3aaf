"""Compare pairs of tensors in two passes: stored bytes first, then values where bytes or dtypes differ.

Large tensors are cut into ranges and small ones are batched, so that all threads have work. Memory is bounded
by the buffers of the workers, whatever the sizes of the tensors.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ckpttool.core.tensor import Tensor
from ckpttool.core.values import Strided
from ckpttool.storage.work import Advance, batches, default_jobs, no_advance
from ckpttool.weights.comparing.elements import Side, Unreadable
from ckpttool.weights.comparing.remote_worker import MAX_CHILDREN, WORTH_BYTES, RemoteWorker
from ckpttool.weights.comparing.statistics import Statistics, Tally, Tolerance
from ckpttool.weights.comparing.workers import (
    BytesWorker,
    PairWorker,
    RangePool,
    TensorPair,
    ValuesWorker,
    WorkRange,
    byte_ranges,
    element_ranges,
)

__all__ = [
    "Comparison",
    "NotCompared",
    "Outcome",
    "Side",
    "Statistics",
    "Tolerance",
    "Unreadable",
    "compare_all",
]
EXACT = Tolerance()
"""Zero tolerance: only equal values are equal."""
MAX_STREAMS = 2
"""Maximum number of streamed (compressed or computed) tensors read at once: each needs tens of MiB a side."""
WorkerFactory = Callable[[RangePool, Advance], PairWorker]
"""Constructor of one thread's worker."""
MAX_REPEATED_BYTES = 1 << 36
"""Limit in bytes on an expanded tensor (stride 0) whose storage is far smaller than its elements: 64 GiB."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Result of the comparison of two tensors.

    Attributes:
        equal: Whether shapes and values are equal, within the tolerance.
        statistics: Measured differences; None if the tensors are equal, if their shapes differ, or if values
            weren't measured.
    """

    equal: bool
    statistics: Statistics | None = None


@dataclass(frozen=True, slots=True)
class NotCompared:
    """Result for a pair whose ``side`` has no comparable values; the tensors count as not equal."""

    side: Side
    why: str


Outcome = Comparison | Unreadable | NotCompared


def compare_all(
    pairs: Sequence[tuple[Tensor, Tensor]],
    tolerance: Tolerance = EXACT,
    *,
    measures: bool = True,
    jobs: int | None = None,
    advance: Advance = no_advance,
) -> list[Outcome]:
    """Return the outcome of each pair, in order.

    Tensors of different dtypes are compared by value, quantized ones by their stored integers. A tensor that
    can't be read gives an ``Unreadable`` outcome; the other pairs are still compared.

    Args:
        pairs: The tensors of both sides.
        tolerance: Limits within which values count as equal.
        measures: Whether differing values are measured. If not, a pair is unequal if its dtypes or any byte
            differs, and reading stops at the first such byte.
        jobs: Number of threads; by default the processors available to this process.
        advance: Called with the number of bytes done, from any thread. The total is the bytes of both sides
            of all pairs; axes that both sides repeat (stride 0) count once.
    """
    # Work that both sides share is done once: axes that both expand (stride 0) are reduced to length 1, and
    # pairs of tied tensors (the same bytes on both sides) get the outcome of the first such pair.
    reduced = [drop_repeated_axes(a, b) for a, b in pairs]
    wanted = [TensorPair(a, b, unread=a.nbytes + b.nbytes) for a, b, _ in reduced]
    by_identity: dict[object, TensorPair] = {}  # tied tensors are compared once
    firsts = [by_identity.setdefault(pair.identity, pair) for pair in wanted]
    by_pair = _run_passes(
        list(by_identity.values()), tolerance, jobs or default_jobs(), advance, measures=measures
    )
    advance(sum(pair.unread for pair, first in zip(wanted, firsts, strict=True) if pair is not first))
    outcomes = []
    for first, (a, _), (_, _, times) in zip(firsts, pairs, reduced, strict=True):
        outcome = by_pair[id(first)]
        if times > 1 and isinstance(outcome, Comparison) and outcome.statistics is not None:
            statistics = scale_statistics(outcome.statistics, a.shape, times)
            outcome = Comparison(outcome.equal, statistics)
        outcomes.append(outcome)
    return outcomes


def _known_outcome(pair: TensorPair) -> Outcome | None:
    """Return the outcome of a pair that needs no reading: shapes differ, no elements, or no values."""
    a, b = pair.a, pair.b
    if a.shape != b.shape or a.size == 0:
        return Comparison(a.shape == b.shape)
    for side, tensor, other in ((Side.A, a, b), (Side.B, b, a)):
        if tensor.values is None:
            return NotCompared(side, f"its values can't be read: {tensor.dtype.name} {list(tensor.shape)}")
        if tensor.dtype.kind == "string" and other.dtype is not tensor.dtype:
            return NotCompared(
                side, f"{tensor.dtype.name} elements, but {other.dtype.name} on the other side"
            )
        if is_expanded_too_far(tensor):
            return NotCompared(side, f"{tensor.size:,} elements, which repeat few stored ones")
        if tensor.nbytes == 0:
            return NotCompared(side, f"its {tensor.dtype.name} elements are unknown")
    return None


def _run_passes(
    pairs: list[TensorPair], tolerance: Tolerance, jobs: int, advance: Advance, *, measures: bool
) -> dict[int, Outcome]:
    """Return the outcome of each pair by its ``id``."""
    outcomes: dict[int, Outcome] = {}
    for pair in pairs:
        pair.differs = pair.a.dtype is not pair.b.dtype
        if (known := _known_outcome(pair)) is not None:
            outcomes[id(pair)] = known
    remaining = [pair for pair in pairs if id(pair) not in outcomes]

    # The first pass leaves pairs open whose bytes are all equal.
    _process_ranges([pair for pair in remaining if pair.is_open], [BytesWorker] * jobs, byte_ranges, advance)
    outcomes |= {id(pair): Comparison(True) for pair in remaining if pair.is_open}
    differing = [pair for pair in remaining if pair.differs and pair.failure is None]
    if measures:
        # The second pass. Strings are compared one by one in ``_outcome_of``.
        measurable = [pair for pair in differing if pair.a.dtype.kind != "string"]
        workers = _value_workers(measurable, tolerance, jobs)
        _process_ranges(measurable, workers, element_ranges, advance)
    else:
        outcomes |= {id(pair): Comparison(False) for pair in differing}
    outcomes |= {id(pair): _outcome_of(pair) for pair in remaining if id(pair) not in outcomes}
    advance(sum(pair.unread for pair in pairs))
    return outcomes


def _process_ranges(
    pairs: list[TensorPair],
    workers: Sequence[WorkerFactory],
    cut: Callable[..., Iterator[WorkRange]],
    advance: Advance,
) -> None:
    """Process the ranges into which ``cut`` divides pairs, with one thread per worker."""
    if not pairs:
        return
    # Streamed tensors with one key (parts of one compressed record, say) are a single task, which one thread
    # reads from start to end. Tasks of the others are ranges of large tensors and batches of small ones.
    streams: dict[int, list[WorkRange]] = defaultdict(list)
    seekable: list[TensorPair] = []
    for pair in pairs:
        stream_key = pair.stream_key
        if stream_key is None:
            seekable.append(pair)
        else:
            streams[stream_key] += cut(pair, whole=True)
    with RangePool(MAX_STREAMS) as pool:
        own, *others = [partial(worker, pool, advance) for worker in workers]
        pool.recruit(others)
        for stream in streams.values():
            pool.add(stream, is_scarce=True)
        for batch in batches((one for pair in seekable for one in cut(pair)), lambda one: one.nbytes):
            pool.add(batch)
        pool.work(own)


def _value_workers(pairs: Sequence[TensorPair], tolerance: Tolerance, jobs: int) -> list[WorkerFactory]:
    """Return the workers that measure values: this thread's, and children if there is enough data.

    Streamed tensors can't be sent to a child, so each gets a thread instead.
    """
    own = partial(ValuesWorker, tolerance=tolerance)
    streams = len({pair.stream_key for pair in pairs} - {None})
    nbytes = sum(pair.a.nbytes + pair.b.nbytes for pair in pairs if pair.stream_key is None)
    children = min(jobs - 1, MAX_CHILDREN, nbytes // WORTH_BYTES)
    if children > 0:
        return [own, *[partial(RemoteWorker, tolerance=tolerance)] * children]
    return [own] * min(jobs, 1 + streams)


def _outcome_of(pair: TensorPair) -> Outcome:
    """Return the outcome of a pair whose bytes differ or couldn't be read."""
    if pair.failure is not None:
        return pair.failure
    if pair.a.dtype.kind == "string":
        from ckpttool.weights.comparing.strings import NotDecoded, string_statistics

        try:
            statistics = string_statistics(pair.a, pair.b)
        except Unreadable as failure:
            return failure
        except NotDecoded as refusal:
            return NotCompared(refusal.side, refusal.why)
    else:
        whole = Tally()
        for tally in pair.tallies:
            whole.merge(tally)
        statistics = whole.statistics(pair.a.shape)
    return Comparison(statistics is None, statistics)


def drop_repeated_axes(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, int]:
    """Return both tensors with the axes that both repeat (stride 0) cut to length 1, and the repeat count."""
    # An expanded tensor may be small in the file and huge in memory. If both sides repeat the same axes, one
    # copy has all differences, and ``scale_statistics`` multiplies the counts and norms afterwards.
    if not isinstance(a.values, Strided) or not isinstance(b.values, Strided):
        return a, b, 1
    if not a.shape == b.shape == a.values.shape == b.values.shape:  # a rearranged tensor's view has more axes
        return a, b, 1
    axes = [
        axis
        for axis, length in enumerate(a.shape)
        if length > 1 and a.values.strides[axis] == b.values.strides[axis] == 0
    ]
    shape = tuple(1 if axis in axes else length for axis, length in enumerate(a.shape))
    times = math.prod(a.shape[axis] for axis in axes)
    a = replace(a, shape=shape, values=a.values._replace(shape=shape))
    b = replace(b, shape=shape, values=b.values._replace(shape=shape))
    return a, b, times


def is_expanded_too_far(tensor: Tensor) -> bool:
    """Return whether a tensor expands (stride 0) to far more bytes than are stored, too many to read."""
    stored = tensor.storage.nbytes if tensor.storage is not None else tensor.nbytes
    return tensor.nbytes > MAX_REPEATED_BYTES and tensor.nbytes > 64 * stored


def scale_statistics(found: Statistics, shape: tuple[int, ...], times: int) -> Statistics:
    """Return the statistics of tensors of ``shape`` that repeat the measured part ``times`` times."""
    # Maxima and means of repeated values are unchanged; counts grow by the factor, norms by its root.
    root = math.sqrt(times)
    return replace(
        found,
        size=math.prod(shape),
        count=found.count * times,
        non_finite=found.non_finite * times,
        l2=found.l2 * root,
        norm_a=found.norm_a * root,
        norm_b=found.norm_b * root,
    )
