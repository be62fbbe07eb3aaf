"""The average of several checkpoints' weights, tensor by tensor, in constant memory.

Sums are made in float64 and rounded once. Integers and booleans (counters, flags) are copied from the last
source. The result is written by a conversion, and compared with the average computed a second time.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.dtypes import numpy_dtype
from ckpttool.core.errors import DamagedCheckpoint, UsageError
from ckpttool.core.options import shows_keywords, with_keywords
from ckpttool.core.tensor import Role, Tensor
from ckpttool.core.text import counted, first_names
from ckpttool.core.values import Computed, Contiguous, regroup
from ckpttool.formats import open_checkpoint
from ckpttool.ops.conversion import Converted, ConvertKeywords, ConvertOptions
from ckpttool.ops.conversion_plan import ConversionPlan, SummedTensor, content_of, model_of, plan_conversion
from ckpttool.ops.convert import carry_out
from ckpttool.storage import fs
from ckpttool.storage.held import holds
from ckpttool.storage.sink import SUMS, Algorithm
from ckpttool.storage.work import Advance, no_advance
from ckpttool.weights.comparing.element_values import Widening, widening_of
from ckpttool.weights.converting.weight_selection import only_weights

if TYPE_CHECKING:
    import numpy as np
    from typing_extensions import Unpack

    Array = np.ndarray[Any, Any]

_AT_ONCE = 1 << 16
"""Elements that are averaged at once: their sums, 512 KiB, fit in a processor's cache."""
_AVERAGED = ("float", "complex")
_COMPONENT_TYPES = {"float64": "<f8", "complex32": "<f2", "complex64": "<f4", "complex128": "<f8"}


@dataclass(frozen=True, slots=True)
class Average:
    """A checkpoint that holds the average of others, open.

    Attributes:
        checkpoint: The last source, its weights replaced by the averages.
        sources: Paths of the sources.
        notes: Sentences about tensors that aren't averaged.
        shares: Weight of each source; the sum is 1.
        summed: Tensors of the sources with the checksums of their bytes; filled as they are read.
        close: Closes the sources.
    """

    checkpoint: Checkpoint
    sources: tuple[str, ...]
    notes: tuple[str, ...]
    shares: tuple[float, ...]
    summed: list[SummedTensor]
    close: Callable[[], None]

    def __enter__(self) -> Average:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@shows_keywords(ConvertOptions)
@holds("sources", "target")
def average(
    sources: Sequence[str | os.PathLike[str]],
    target: str | os.PathLike[str],
    *,
    weights: Sequence[float] | None = None,
    ema: float | None = None,
    options: ConvertOptions | None = None,
    advance: Advance | None = None,
    **keywords: Unpack[ConvertKeywords],
) -> Converted:
    """Write one checkpoint whose weights are the average of several, and check the result.

    The target appears whole or not at all. It holds weights alone: the average of an optimizer's states means
    nothing.

    Args:
        sources: Checkpoints of one model, the oldest first.
        target: Path to write to; its suffix selects the format, unless ``to`` does.
        weights: Weight of each source; by default all are equal.
        ema: Decay of an exponential moving average over the sources, such as 0.999.
        options: Options of the conversion.
        advance: Called with the bytes done, from any thread.
        keywords: Attributes of ``ConvertOptions``, such as ``to="safetensors"``.

    Raises:
        CheckpointError: A source is damaged, or holds NaN or an infinity; the target can't be written.
        UsageError: The sources differ in names, shapes, kinds of types or ties, or the options are invalid.
    """
    options = with_keywords(options or ConvertOptions(), keywords)
    shares = shares_of(len(sources), weights, ema)
    with open_average(sources, shares) as averaged, model_of(options) as model:
        planned = plan_average(averaged, os.fspath(target), options, model)
        return carry_out(planned, advance=advance or no_advance)


def shares_of(count: int, weights: Sequence[float] | None = None, ema: float | None = None) -> list[float]:
    """Return the weight of each source; only the ratios matter.

    Source of the moving average: PyTorch ``torch/optim/swa_utils.py`` (``get_ema_avg_fn``).
    """
    if count < 2:
        raise UsageError("average needs at least two checkpoints")
    if weights is not None and ema is not None:
        raise UsageError("--weights and --ema are mutually exclusive")
    # The moving average begins with the first source, and each next one counts 1 - decay: expanded, the first
    # has decay^(n-1), and source k has (1 - decay) * decay^(n-1-k).
    if ema is not None:
        if not 0 < ema < 1:
            raise UsageError(f"--ema {ema:g}: the decay must be between 0 and 1")
        return [ema ** (count - 1), *((1 - ema) * ema ** (count - 1 - at) for at in range(1, count))]
    if weights is None:
        return [1.0] * count
    if len(weights) != count:
        raise UsageError(f"--weights: {counted(len(weights), 'weight')} for {counted(count, 'checkpoint')}")
    if not all(math.isfinite(one) and one > 0 for one in weights):
        raise UsageError("--weights: each weight must be a positive number")
    # Scaled by a power of two, so that neither their sum nor a product leaves the range of float64.
    exponent = math.frexp(max(weights))[1]
    return [math.ldexp(one, -exponent) for one in weights]


def plan_average(
    averaged: Average, target: str, options: ConvertOptions, model: Checkpoint | None = None
) -> ConversionPlan:
    """Return how an average would be written; nothing is written."""
    options = replace(options, only="weights")
    planned = plan_conversion(averaged.checkpoint, target, options, model, sources=averaged.sources)
    notes = (*averaged.notes, *planned.notes)
    return replace(planned, notes=notes, shares=averaged.shares, summed=averaged.summed)


def open_average(paths: Sequence[str | os.PathLike[str]], shares: Sequence[float]) -> Average:
    """Return the average of checkpoints, open; no value is read yet."""
    sources = tuple(os.fspath(path) for path in paths)
    places = [fs.realpath(path) for path in sources]
    for at, path in enumerate(sources):
        if places[at] in places[:at]:
            raise UsageError(f"{path} is given twice (--weights gives it more weight)")
    with ExitStack() as opened:
        checkpoints = [opened.enter_context(open_checkpoint(path)) for path in sources]
        selected = [_Weights.of(checkpoint) for checkpoint in checkpoints]
        last = selected[-1]
        for other in selected[:-1]:
            _require_alike(other, last)
        averages: dict[str, Tensor] = {}
        summed: list[SummedTensor] = []
        for name, tensor in last.tensors.items():
            if tensor.dtype.kind in _AVERAGED:
                if tensor.dtype.bits < 8:
                    raise UsageError(
                        f"{name}: {tensor.dtype.name} can't be averaged (convert it with --dtype first)"
                    )
                owner = averages.get(tensor.shares_with or "")
                values = _average_values(selected, name, shares, summed) if owner is None else owner.values
                averages[tensor.name] = Tensor(
                    tensor.path,
                    tensor.dtype,
                    tensor.shape,
                    tensor.role,
                    values,
                    key=tensor.key,
                    shares_with=tensor.shares_with,
                )
        # The result takes names, metadata and unaveraged tensors from the last source, but no tree, which
        # would hold that source's tensors. Its files and spans are those of all sources, so that all of them
        # are checked for changes and damage when it is written.
        base = checkpoints[-1]
        checkpoint = base.replace(
            tensors=tuple(averages.get(tensor.name, tensor) for tensor in base.tensors),
            tree=lambda: None,
            files=tuple(dict.fromkeys(chain.from_iterable(one.files for one in checkpoints))),
            spans=lambda: chain.from_iterable(one.spans() for one in checkpoints),
        )
        notes = _notes(last, averages)
        total = math.fsum(shares)
        parts = tuple(share / total for share in shares)
        return Average(checkpoint, sources, tuple(notes), parts, summed, opened.pop_all().close)


@dataclass(frozen=True, slots=True)
class _Weights:
    """Weights of a source, by the names that a model expects, and the algorithm of its file's checksums."""

    checkpoint: Checkpoint
    tensors: dict[str, Tensor]
    algorithm: Algorithm | None

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> _Weights:
        for finding in checkpoint.findings:
            if finding.severity.value == "error":
                raise DamagedCheckpoint(
                    checkpoint.path, finding.message, where=finding.where, code=finding.code
                )
        if not checkpoint.complete:
            raise DamagedCheckpoint(checkpoint.path, "it is incomplete", code="incomplete")
        # Names are compared as a model has them, so that a bare state dict and one under a key fit together.
        # Values are read from the file's own tensors.
        weights = [tensor for tensor in checkpoint.tensors if tensor.role is Role.WEIGHTS]
        selected, _ = only_weights(content_of(checkpoint), checkpoint)
        named = zip(selected.tensors, weights, strict=True)
        algorithm = next((span.algorithm for span in checkpoint.spans() if span.crc32 is not None), None)
        return cls(checkpoint, {one.name: tensor for one, tensor in named}, algorithm)

    def ties(self) -> dict[str, str]:
        """Return the owner of each tied weight, by name."""
        names = {tensor.name: name for name, tensor in self.tensors.items()}
        return {
            name: names[tensor.shares_with]
            for name, tensor in self.tensors.items()
            if tensor.shares_with in names
        }


def _require_alike(other: _Weights, last: _Weights) -> None:
    """Raise UsageError if two sources differ in names, shapes, kinds or ties of weights."""
    path, last_path = other.checkpoint.path, last.checkpoint.path
    for holder, lacking in ((last, other), (other, last)):
        if missing := [name for name in holder.tensors if name not in lacking.tensors]:
            found = f"missing {first_names(missing)} (in {holder.checkpoint.path})"
            raise UsageError(f"{lacking.checkpoint.path}: {found}; the checkpoints are from different models")
    for name, tensor in last.tensors.items():
        one = other.tensors[name]
        if one.shape != tensor.shape:
            shapes = f"shape {list(one.shape)}, but {list(tensor.shape)} in {last_path}"
            raise UsageError(f"{path}[{name}]: {shapes}")
        if one.dtype.kind != tensor.dtype.kind:
            raise UsageError(f"{path}[{name}]: {one.dtype.name}, but {tensor.dtype.name} in {last_path}")
    if other.ties() != last.ties():
        raise UsageError(f"{path}: its tied weights differ from those in {last_path}")


def _notes(last: _Weights, averages: dict[str, Tensor]) -> Iterator[str]:
    others = [name for name, tensor in last.tensors.items() if tensor.name not in averages]
    if others:
        kinds = {last.tensors[name].dtype.kind for name in others}
        kind = kinds.pop() if len(kinds) == 1 else "other"
        count = counted(len(others), f"{kind} tensor")
        reason = "only floats are averaged"
        yield f"copied {count} from {last.checkpoint.path}, as {reason}: {first_names(others)}"


# Values ---------------------------------------------------------------------------------------------


def _average_values(
    sources: Sequence[_Weights], name: str, shares: Sequence[float], summed: list[SummedTensor]
) -> Computed:
    """Return the average of a weight in the last source's type; reading it adds checksums to ``summed``."""
    # Sums are made in float64 and divided once; equal shares aren't multiplied, which saves a pass and a
    # rounding. If a sum isn't finite, its group of elements is computed again, slowly: an infinity that all
    # sources share is kept (masks have it), any other and NaN are errors, and a sum that only overflowed is
    # averaged in halves. Checksums are computed of the same bytes, so that damage of a source is noticed
    # without a second read.
    tensors = [source.tensors[name] for source in sources]
    last = tensors[-1]
    components = 2 if last.dtype.kind == "complex" else 1
    widenings = [widening_of(tensor.dtype) for tensor in tensors]
    is_uniform = len(set(shares)) == 1
    divisor = len(shares) if is_uniform else math.fsum(shares)

    def make(limit: int) -> Iterator[memoryview]:
        import numpy as np

        count = max(16, min(_AT_ONCE, limit // last.dtype.itemsize // 16 * 16))
        lengths = [min(count, last.size - start) for start in range(0, last.size, count)]
        groups = [_groups(tensor, lengths) for tensor in tensors]
        sums, scaled = np.empty(count * components), np.empty(count * components)
        checksums = [0] * len(sources)
        for length, *data in zip(lengths, *groups, strict=True):
            sum_, product = sums[: length * components], scaled[: length * components]
            sum_.fill(0)
            for at, (raw, source, widening) in enumerate(zip(data, sources, widenings, strict=True)):
                if source.algorithm is not None:
                    checksums[at] = SUMS[source.algorithm](raw, checksums[at])
                elements = _elements(widening, raw, len(sum_))
                with np.errstate(all="ignore"):
                    if not is_uniform:
                        elements = np.multiply(elements, shares[at], out=product, dtype=np.float64)
                    np.add(sum_, elements, out=sum_)
            sum_ /= divisor
            if not np.isfinite(sum_).all():
                wide = np.empty((len(sources), len(sum_)))
                for row, widening, raw in zip(wide, widenings, data, strict=True):
                    row[:] = _elements(widening, raw, len(sum_))
                _settle_infinities(sources, name, wide, sum_)
                _settle_overflows(wide, [share / math.fsum(shares) for share in shares], sum_)
            yield _rounded(sum_, last, sources[-1].checkpoint.path)
        for source, tensor, checksum in zip(sources, tensors, checksums, strict=True):
            if source.algorithm is not None:
                summed.append((tensor, source.algorithm, checksum))

    return Computed(make)


def _groups(tensor: Tensor, lengths: Sequence[int]) -> Iterator[bytearray | memoryview]:
    """Yield a tensor's bytes in groups of given numbers of elements, without copies if it is contiguous."""
    sizes = [tensor.dtype.nbytes(length) for length in lengths]
    if isinstance(tensor.values, Contiguous) and sizes and sizes[0] % 16 == 0:
        return tensor.blocks(sizes[0])
    return regroup(tensor, sizes)


def _elements(widening: Widening, raw: bytearray | memoryview, count: int) -> Array:
    """Return elements, complex ones as pairs, in a NumPy float type that holds them exactly."""
    import numpy as np

    data = np.frombuffer(raw, np.uint8)
    if widening.is_complex or widening.dtype.name == "float64":
        return data.view(_COMPONENT_TYPES[widening.dtype.name])
    if widening.dtype.name == "float32":
        return data.view("<f4")
    narrow = np.empty(count, "<f4")
    widening.fill_float32(data, narrow)
    return narrow


def _settle_infinities(sources: Sequence[_Weights], name: str, wide: Array, sums: Array) -> None:
    """Keep infinities that all sources share, as in masks; raise DamagedCheckpoint for others, and for NaN.

    ``wide`` has a row for each source.
    """
    import numpy as np

    is_shared = np.isinf(wide).all(axis=0) & (wide == wide[0]).all(axis=0)
    for source, row in zip(sources, wide, strict=True):
        strange = ~np.isfinite(row) & ~is_shared
        if strange.any():
            what, code = ("NaN", "nan") if np.isnan(row[strange]).any() else ("an infinity", "infinity")
            raise DamagedCheckpoint(
                source.checkpoint.path,
                f"{what} would spoil the average",
                where=source.tensors[name].name,
                code=code,
            )
    sums[is_shared] = wide[0][is_shared]


def _settle_overflows(wide: Array, parts: Sequence[float], sums: Array) -> None:
    """Average elements again that are finite in all sources, but whose sum overflowed."""
    import numpy as np

    # Sums of halves can't overflow, as the shares sum to 1. Doubling may, by rounding; the average can't be
    # outside of its elements, so it is clipped to the least and the largest one.

    at = np.flatnonzero(~np.isfinite(sums) & np.isfinite(wide).all(axis=0))
    rows = wide[:, at]
    halves = sum(row / 2 * part for row, part in zip(rows, parts, strict=True))
    with np.errstate(over="ignore"):
        sums[at] = np.clip(np.multiply(halves, 2), rows.min(axis=0), rows.max(axis=0))


def _rounded(sums: Array, last: Tensor, path: str) -> memoryview:
    """Return averages in the type of a tensor, each rounded once; raise DamagedCheckpoint on overflow."""
    import numpy as np

    dtype = last.dtype
    with np.errstate(over="ignore"):
        if numpy_type := _COMPONENT_TYPES.get(dtype.name) or {"float32": "<f4", "float16": "<f2"}.get(
            dtype.name
        ):
            result = sums.astype(numpy_type)
        else:
            result = _to_odd(sums).astype(numpy_dtype(dtype))
    if (np.isfinite(sums) & ~np.isfinite(result)).any():
        raise DamagedCheckpoint(path, f"the average is too large for {dtype.name}", where=last.name)
    return memoryview(result.view(np.uint8).data)


def _to_odd(sums: Array) -> Array:
    """Return float64 values as float32, rounded to odd, so that rounding again equals rounding once."""
    import numpy as np

    # bfloat16 and float8 are rounded from float32. Rounding twice to nearest may differ from rounding once: a
    # value just above the middle of two bfloat16 becomes the middle in float32, and is then rounded to even.
    # Rounding to odd truncates, and sets the last bit of inexact values: the value is no longer a middle, and
    # stays on its side of it. Source: S. Boldo, G. Melquiond, "When double rounding is odd" (2005).
    # Subtracting 1 from the bits of a value that was rounded away from zero truncates it.

    narrow = sums.astype(np.float32)
    back = narrow.astype(np.float64)
    bits = narrow.view(np.uint32)
    bits -= np.abs(back) > np.abs(sums)
    bits |= back != sums
    return narrow
