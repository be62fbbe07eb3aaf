"""Options and result of a conversion."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypedDict

from ckpttool.core.errors import UsageError
from ckpttool.core.options import CONVERSION_PANEL, EXECUTION_PANEL, jobs_option, option
from ckpttool.core.report import Finding, Problem
from ckpttool.core.result import Result, document_of
from ckpttool.core.text import counted, nbytes
from ckpttool.formats.traits import TRAITS

_FORMATS = ", ".join(name for name, row in TRAITS.items() if row.writer)
_conversion = partial(option, panel=CONVERSION_PANEL)
_execution = partial(option, panel=EXECUTION_PANEL)


def _shard_size(text: str) -> int:
    try:
        size = nbytes(text, is_lenient=True)
    except UsageError as failure:
        raise UsageError(f"--shard-size {text}: invalid size (such as 5GB, 500MiB or 100000)") from failure
    if not size:
        raise UsageError(f"--shard-size {text}: the size must be positive")
    return size


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertOptions:
    """Options of a conversion: each attribute is an option of ``convert``, except for the number of threads.

    ``mapping`` and ``model`` are paths. By default, there is a thread for each processor available to this
    process.
    """

    to: str | None = _conversion(
        "--to",
        metavar="FORMAT",
        complete="format",
        help=f"Write this format: {_FORMATS}. [default: by DST's name]",
    )
    only: Literal["weights", "all"] = _conversion(
        "--only",
        help="Convert only the weights, under the names that a model expects, or all.",
        default="all",
    )
    dtype: Literal["float32", "float16", "bfloat16"] | None = _conversion(
        "--dtype", help="Convert floating-point tensors to this type."
    )
    layout: Literal["as-is", "torch", "keras"] = _conversion(
        "--layout", help="Convert weights to a framework's layout and names.", default="as-is"
    )
    mapping: str | None = _conversion(
        "--map",
        metavar="FILE",
        help="Read names, transposes, splits and joins of tensors from a TOML file.",
    )
    model: str | None = _conversion(
        "--model",
        metavar="FILE",
        help="Take names, layouts and architecture from another checkpoint of the same network.",
    )
    by_order: bool = _conversion("--by-order", help="Pair similar layers by their order.", default=False)
    shard_size: int | None = _conversion(
        "--shard-size",
        metavar="SIZE",
        help="Write a directory of files of at most SIZE each: 5GB, 500MiB.",
        parse=_shard_size,
    )
    dry_run: bool = _execution(
        *("--dry-run", "-n"), help="Show what would be written; write nothing.", default=False
    )
    force: bool = _execution(*("--force", "-f"), help="Replace an existing checkpoint at DST.", default=False)
    strict: bool = _execution(
        "--strict",
        help="Fail if anything can't be preserved, or PyTorch needs weights_only=False.",
        default=False,
    )
    jobs: int | None = jobs_option()


class ConvertKeywords(TypedDict, total=False):
    """The attributes of ``ConvertOptions``, for type checkers."""

    to: str | None
    only: Literal["weights", "all"]
    dtype: Literal["float32", "float16", "bfloat16"] | None
    layout: Literal["as-is", "torch", "keras"]
    mapping: str | None
    model: str | None
    by_order: bool
    shard_size: int | None
    dry_run: bool
    force: bool
    strict: bool
    jobs: int | None


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Converted(Result):
    """The result of a conversion.

    Attributes:
        sources: Paths of the sources.
        target: Path of the result.
        format: Name of its format.
        tensors: Number of its tensors; tied ones count each.
        nbytes: Bytes of all its files; of a dry run, those of the elements.
        verified: Whether it was opened again and every tensor compared with the source.
        dry_run: Whether nothing was written.
        dropped: Content of the source that it doesn't have.
        notes: Sentences on steps that the options don't request explicitly.
        mismatches: Differences from the source, a sentence each; the result was removed then.
        safety: Code that loading it with its framework could run.
        shares: Weight of each source, with a sum of 1; empty unless it is an average.
        warnings: Leftovers of killed conversions that could not be removed, a sentence each.
    """

    sources: tuple[str, ...]
    target: str
    format: str
    tensors: int
    nbytes: int
    verified: bool
    dry_run: bool
    dropped: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()
    mismatches: tuple[str, ...] = ()
    safety: tuple[Finding, ...] = ()
    shares: tuple[float, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def summary(self) -> str:
        """Return the target and the result in a few words."""
        state = ", dry run" if self.dry_run else ", verified" if self.verified else ", not verified"
        return f"{self.target}: {self.format}, {counted(self.tensors, 'tensor')}{state}"

    def document(self) -> dict[str, Any]:
        keys = ("target", "format", "tensors", "bytes", "verified", "dry_run")
        source, *others = self.sources
        return {
            "schema": "ckpttool.convert/1",
            "source": [source, *others] if others else source,
            **document_of(self, *keys),
            "dropped": [document_of(one, "path", "why") for one in self.dropped],
            **document_of(self, "notes", "mismatches", "safety", optional=("shares",)),
        }
