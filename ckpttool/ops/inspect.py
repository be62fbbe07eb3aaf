"""Describes a checkpoint without reading its values."""

from __future__ import annotations

import fnmatch
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpttool.containers.zip_reader import by_directory
from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.dtypes import numpy_dtype
from ckpttool.core.report import Finding
from ckpttool.core.result import Table, document_of, plain
from ckpttool.core.tensor import BLOCK_BYTES, Tensor
from ckpttool.core.text import counted
from ckpttool.core.values import stored_once
from ckpttool.formats import open_checkpoint
from ckpttool.formats.architecture import Architecture, architecture_of
from ckpttool.ops.resume import ResumeVerdict, resume_verdict
from ckpttool.ops.verdict import safety_of
from ckpttool.storage.work import Advance, no_advance

if TYPE_CHECKING:
    import numpy as np

SCHEMA = "ckpttool.inspect/1"
_REAL = ("float", "integer", "boolean")
"""Kinds of element types that statistics are computed of."""

Progress = Callable[[int], "AbstractContextManager[Advance]"]
"""Called with the number of bytes to read; returns the callback for bytes read."""


@dataclass(frozen=True, slots=True)
class ValueStatistics:
    """Statistics of a tensor's values; NaN and infinities are counted, and excluded from the others.

    ``minimum`` and the others are None without finite values.
    """

    count: int
    nan: int
    infinite: int
    zeros: int
    minimum: float | None
    maximum: float | None
    mean: float | None
    std: float | None

    def document(self) -> dict[str, Any]:
        names = {"min": "minimum", "max": "maximum", "inf": "infinite"}
        return document_of(self, "min", "max", "mean", "std", "zeros", "nan", "inf", names=names)


@dataclass(frozen=True, slots=True, repr=False)
class Inspection(Table):
    """The answer to ``inspect``.

    Attributes:
        checkpoint: The checkpoint, closed: values can't be read any more.
        tensors: The requested tensors.
        statistics: Statistics by tensor name; empty if not requested.
    """

    checkpoint: Checkpoint
    tensors: tuple[Tensor, ...]
    statistics: Mapping[str, ValueStatistics] | None = None

    _ROWS = ("checkpoints", 0, "tensors")

    @property
    def summary(self) -> str:
        """Return path, format and number of tensors in a few words."""
        return f"{self.checkpoint.path}: {self.checkpoint.format}, {counted(len(self.tensors), 'tensor')}"

    @property
    def architecture(self) -> Architecture:
        """Return the model's architecture, computed at the first access."""
        return architecture_of(self.checkpoint)

    @property
    def resume(self) -> ResumeVerdict:
        """Return how a training resumes from it."""
        return resume_verdict(self.checkpoint)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Return the findings of structure and safety."""
        return self.checkpoint.findings + self.checkpoint.safety

    def document(self) -> dict[str, Any]:
        return {"schema": SCHEMA, "checkpoints": [self.row()]}

    def row(self) -> dict[str, Any]:
        """Return the row of a document for this checkpoint."""
        return {
            **document_of(self.checkpoint, *("path", "format", "variant", "complete", "granularity")),
            **document_of(self.checkpoint, "bytes", "files", "producer", "training"),
            "resume": plain(self.resume),
            **document_of(self.checkpoint, *("parameters", "buffers", "packed")),
            "model": self.architecture.document(),
            "tensors": [self._tensor_row(tensor) for tensor in self.tensors],
            "values": self.checkpoint.metadata,
            "findings": plain(self.findings),
            "safety": safety_of(self.checkpoint.safety).value,
        }

    def _tensor_row(self, tensor: Tensor) -> dict[str, Any]:
        document = tensor.document()
        if self.statistics is not None and tensor.name in self.statistics:
            document["stats"] = self.statistics[tensor.name].document()
        return document


def open_to_inspect(path: str | os.PathLike[str], *, stats: bool = False) -> Checkpoint:
    """Open a checkpoint for its description, with as few requests to a store as possible."""
    with nullcontext() if stats else by_directory():
        return open_checkpoint(path)


def inspection(
    checkpoint: Checkpoint,
    *,
    filter: str | None = None,
    stats: bool = False,
    progress: Progress = lambda _: nullcontext(lambda _: None),
) -> Inspection:
    """Return the description of an open checkpoint; see ``ckpttool.inspect``."""
    tensors = tuple(t for t in checkpoint.tensors if filter is None or fnmatch.fnmatchcase(t.name, filter))
    # Lazy parts can't be read after closing, so those that the result needs are computed now.
    _ = checkpoint.training, checkpoint.derives_metadata or checkpoint.metadata
    if not stats:
        return Inspection(checkpoint, tensors)
    numeric = [
        tensor
        for tensor in tensors
        if tensor.dtype.kind in _REAL and tensor.dtype.numpy is not None and tensor.values is not None
    ]
    with progress(sum(tensor.nbytes for tensor in numeric)) as advance:
        statistics = {tensor.name: statistics_of(tensor, advance) for tensor in numeric}
    return Inspection(checkpoint, tensors, statistics)


def statistics_of(tensor: Tensor, advance: Advance = no_advance) -> ValueStatistics:
    """Return a real tensor's statistics, in one pass, in float64 and bounded memory."""
    # Means and squared deviations of blocks are merged by Chan's method. The difference of a sum of squares
    # and a squared sum would cancel if the mean is large against the deviation.
    import numpy as np

    dtype = numpy_dtype(tensor.dtype)
    stored = nan = infinite = zeros = kept = 0
    low, high, mean, squares = math.inf, -math.inf, 0.0, 0.0
    for values in _stored_values(tensor, dtype):
        finite = values[np.isfinite(values)]
        stored += values.size
        advance(values.size * tensor.dtype.bits // 8)
        nan += int(np.count_nonzero(np.isnan(values)))
        infinite += int(np.count_nonzero(np.isinf(values)))
        zeros += int(np.count_nonzero(values == 0))
        if finite.size:
            low, high = min(low, float(finite.min())), max(high, float(finite.max()))
            block_mean = float(finite.mean())
            delta, total = block_mean - mean, kept + finite.size
            squares += float(((finite - block_mean) ** 2).sum()) + delta**2 * kept * finite.size / total
            mean += delta * finite.size / total
            kept = total
    times = tensor.size // stored if stored else 1
    counts = (tensor.size, nan * times, infinite * times, zeros * times)
    if not kept:
        return ValueStatistics(*counts, None, None, None, None)
    return ValueStatistics(*counts, low, high, mean, math.sqrt(squares / kept))


def _stored_values(tensor: Tensor, dtype: np.dtype[Any]) -> Iterator[np.ndarray[Any, Any]]:
    """Yield the values in float64; an expanded tensor's (stride 0) stored elements once."""
    import numpy as np

    assert tensor.values is not None  # the caller asked
    if tensor.dtype.bits < 8:
        yield tensor.array().reshape(-1).astype(np.float64)
        return
    for block in stored_once(tensor.values).blocks(BLOCK_BYTES):
        with np.errstate(invalid="ignore"):
            yield np.frombuffer(block, dtype).astype(np.float64)
