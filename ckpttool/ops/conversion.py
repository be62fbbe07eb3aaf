"""What a conversion was asked to do, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ckpttool.report import Finding


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertWishes:
    """How a checkpoint is to be converted.

    Attributes:
        to: Name of the target's format; None where the target's name tells it.
        only: Whether all is taken, or the model's weights alone, under the names that a model expects.
        dtype: Name of the type that floating tensors get; None leaves them.
        layout: Whether weights stay as they are stored, or get the layout and names of a framework.
        mapping: Path of a map file.
        model: Path of a checkpoint whose names, layouts and architecture the target gets.
        by_order: Whether layers that are alike are paired with those of the model by their order.
        shard_size: The most bytes of one file of the target.
        strict: Whether what can't be carried is refused.
        force: Whether a checkpoint that stands in the target's place may be replaced.
        dry_run: Whether nothing is written.
        jobs: Number of threads; by default the processors that this process may use.
    """

    to: str | None = None
    only: Literal["weights", "all"] = "all"
    dtype: str | None = None
    layout: Literal["as-is", "torch", "keras"] = "as-is"
    mapping: str | None = None
    model: str | None = None
    by_order: bool = False
    shard_size: int | None = None
    strict: bool = False
    force: bool = False
    dry_run: bool = False
    jobs: int | None = None


@dataclass(frozen=True, slots=True)
class Dropped:
    """Something that the target doesn't hold: where it lay in the source, and why."""

    path: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """What a conversion made.

    Attributes:
        sources: Paths of what it was made of.
        target: Where it stands.
        format: Name of its format.
        tensors: How many tensors it holds, tied ones counted each.
        nbytes: Bytes of all its files; of a dry run, those of the elements.
        verified: Whether it was opened again and every tensor compared with the source.
        dry_run: Whether nothing was written.
        dropped: What of the source it doesn't hold.
        notes: What was done that the command line didn't say word by word.
        mismatches: In what it differed from the source, a sentence each; it was removed then.
        safety: What loading it with its framework could run.
        warnings: What kills left beside it, and could not be cleared, a sentence each.
    """

    sources: tuple[str, ...]
    target: str
    format: str
    tensors: int
    nbytes: int
    verified: bool
    dry_run: bool
    dropped: tuple[Dropped, ...] = ()
    notes: tuple[str, ...] = ()
    mismatches: tuple[str, ...] = ()
    safety: tuple[Finding, ...] = ()
    warnings: tuple[str, ...] = ()
