"""The checkpoint that parts make together, and what is required of a part."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType

from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.errors import DamagedCheckpoint
from ckpttool.core.report import Finding, Severity
from ckpttool.core.tensor import Tensor
from ckpttool.ops.conversion import Dropped
from ckpttool.ops.conversion_plan import MIXED_SAVES

_FATAL_WARNINGS = MIXED_SAVES | {"cut-not-said", "trainer-missing"}
"""Warnings of a part that may be of another save, or missing: a reader can live with it, a whole can't."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedCheckpoint(AbstractContextManager["MergedCheckpoint"]):
    """What parts make together; as a context manager it closes them.

    Attributes:
        checkpoint: It, opened.
        sources: The paths that were given.
        dropped: What of the parts it does not hold.
        notes: What was done with them.
    """

    checkpoint: Checkpoint
    sources: tuple[str, ...]
    dropped: tuple[Dropped, ...] = ()
    notes: tuple[str, ...] = ()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.checkpoint.close()


def with_contents(
    checkpoint: Checkpoint,
    *,
    tensors: tuple[Tensor, ...],
    metadata: Mapping[str, object],
    tree: object = None,
    native: Mapping[str, bytes],
) -> Checkpoint:
    """Return a checkpoint that holds something else of the same files; it closes them."""
    return checkpoint.but(
        tensors=tensors, metadata=lambda: metadata, tree=lambda: tree, native=lambda: native
    )


def is_intact(checkpoint: Checkpoint) -> bool:
    """Tell whether nothing of a checkpoint is missing or wrong."""
    return checkpoint.complete and not any(map(_is_wrong, checkpoint.findings))


def _is_wrong(finding: Finding) -> bool:
    return finding.severity is Severity.ERROR or finding.code in _FATAL_WARNINGS


def require_intact(checkpoint: Checkpoint) -> None:
    """Require that nothing of a checkpoint is missing or wrong."""
    for finding in sorted(checkpoint.findings, key=lambda one: one.severity is not Severity.ERROR):
        if _is_wrong(finding):
            raise DamagedCheckpoint(checkpoint.path, finding.message, where=finding.where, code=finding.code)
    if not checkpoint.complete:
        raise DamagedCheckpoint(checkpoint.path, "it is not complete", code="incomplete")
