"""Tell what a machine-learning checkpoint is and whether it is intact, and keep directories tidy.

``open_checkpoint(path)`` gives a mapping of lazy tensors; ``inspect(path)`` and ``verify(path)`` return
frozen results, the same that the command line shows.
"""

from __future__ import annotations

from ckpttool.checkpoint import Checkpoint, Tensor, TrainingState
from ckpttool.errors import (
    AccessDenied,
    AmbiguousFormat,
    CheckpointError,
    DamagedCheckpoint,
    LimitExceeded,
    MissingPackage,
    NotACheckpoint,
    NotDownloaded,
    NotFound,
    Truncated,
    Unsupported,
    UsageError,
)
from ckpttool.formats import open_checkpoint
from ckpttool.ops.inspect import Inspection, inspect
from ckpttool.ops.verify import Verification, verify
from ckpttool.report import Finding, Severity

__all__ = [
    "AccessDenied",
    "AmbiguousFormat",
    "Checkpoint",
    "CheckpointError",
    "DamagedCheckpoint",
    "Finding",
    "Inspection",
    "LimitExceeded",
    "MissingPackage",
    "NotACheckpoint",
    "NotDownloaded",
    "NotFound",
    "Severity",
    "Tensor",
    "TrainingState",
    "Truncated",
    "Unsupported",
    "UsageError",
    "Verification",
    "inspect",
    "open_checkpoint",
    "verify",
]
