"""Inspect, verify, compare, convert and prune machine-learning checkpoints.

``open_checkpoint(path)`` gives a mapping of lazy tensors; ``inspect(path)``, ``verify(path)``,
``verify_all(paths)``, ``diff(a, b)``, ``list_checkpoints(directory)``, ``latest(directory)`` and
``prune(request)`` return frozen results, the same that the command line shows.

Names are imported at their first use, so that `import ckpttool` is fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckpttool.core.checkpoint import Checkpoint, Granularity, TrainingState
    from ckpttool.core.errors import (
        AccessDenied,
        AmbiguousFormat,
        CheckpointError,
        DamagedCheckpoint,
        LimitExceeded,
        MissingPackage,
        NotACheckpoint,
        NotDownloaded,
        NotFound,
        OutOfMemory,
        Truncated,
        Unsupported,
        UsageError,
    )
    from ckpttool.core.layers import LayerKind
    from ckpttool.core.report import Finding, Severity
    from ckpttool.core.tensor import Role, Tensor
    from ckpttool.formats import open_checkpoint
    from ckpttool.ops.average import average
    from ckpttool.ops.conversion import Converted, ConvertOptions
    from ckpttool.ops.convert import convert
    from ckpttool.ops.diff import diff
    from ckpttool.ops.difference import Difference, DiffOptions
    from ckpttool.ops.inspect import Inspection
    from ckpttool.ops.merge import merge
    from ckpttool.ops.salvage import Salvaged, salvage
    from ckpttool.ops.verdict import Check, Safety, Status, Verification
    from ckpttool.ops.verify import verify
    from ckpttool.ops.verify_all import Verifications, verify_all
    from ckpttool.predict.request import PredictionRequest
    from ckpttool.runs.card import Card, card
    from ckpttool.runs.copying import Copied, copy
    from ckpttool.runs.inspecting import inspect
    from ckpttool.runs.latest import latest
    from ckpttool.runs.listing import list_checkpoints
    from ckpttool.runs.pointers.pins import pin, unpin
    from ckpttool.runs.pruning.prune import prune
    from ckpttool.runs.renaming.rename import RenameRequest, rename
    from ckpttool.runs.retention.request import PruneRequest
    from ckpttool.runs.retention.rules import Policy
    from ckpttool.runs.tracking import Logged, log
    from ckpttool.runs.undo import undo

__all__ = [
    "AccessDenied",
    "AmbiguousFormat",
    "Card",
    "Check",
    "Checkpoint",
    "CheckpointError",
    "ConvertOptions",
    "Converted",
    "Copied",
    "DamagedCheckpoint",
    "DiffOptions",
    "Difference",
    "Finding",
    "Granularity",
    "Inspection",
    "LayerKind",
    "LimitExceeded",
    "Logged",
    "MissingPackage",
    "NotACheckpoint",
    "NotDownloaded",
    "NotFound",
    "OutOfMemory",
    "Policy",
    "PredictionRequest",
    "PruneRequest",
    "RenameRequest",
    "Role",
    "Safety",
    "Salvaged",
    "Severity",
    "Status",
    "Tensor",
    "TrainingState",
    "Truncated",
    "Unsupported",
    "UsageError",
    "Verification",
    "Verifications",
    "average",
    "card",
    "convert",
    "copy",
    "diff",
    "inspect",
    "latest",
    "list_checkpoints",
    "log",
    "merge",
    "open_checkpoint",
    "pin",
    "prune",
    "rename",
    "salvage",
    "undo",
    "unpin",
    "verify",
    "verify_all",
]

_HOMES = {
    "core.checkpoint": ("Checkpoint", "Granularity", "TrainingState"),
    "core.layers": ("LayerKind",),
    "formats": ("open_checkpoint",),
    "ops.average": ("average",),
    "ops.conversion": ("ConvertOptions", "Converted"),
    "ops.convert": ("convert",),
    "ops.diff": ("diff",),
    "ops.difference": ("DiffOptions", "Difference"),
    "ops.inspect": ("Inspection",),
    "ops.merge": ("merge",),
    "ops.salvage": ("Salvaged", "salvage"),
    "ops.verdict": ("Check", "Safety", "Status", "Verification"),
    "ops.verify": ("verify",),
    "ops.verify_all": ("Verifications", "verify_all"),
    "core.report": ("Finding", "Severity"),
    "predict.request": ("PredictionRequest",),
    "runs.card": ("Card", "card"),
    "runs.copying": ("Copied", "copy"),
    "runs.inspecting": ("inspect",),
    "runs.listing": ("list_checkpoints",),
    "runs.pointers.pins": ("pin", "unpin"),
    "runs.retention.request": ("PruneRequest",),
    "runs.retention.rules": ("Policy",),
    "runs.pruning.prune": ("prune",),
    "runs.renaming.rename": ("RenameRequest", "rename"),
    "runs.latest": ("latest",),
    "runs.tracking": ("Logged", "log"),
    "runs.undo": ("undo",),
    "core.tensor": ("Role", "Tensor"),
}
_INTEGRATIONS = {
    "ckpttool.trackers": {
        "mlflow": "ckpttool.integrations.mlflow:MLflow",
        "wandb": "ckpttool.integrations.wandb:WandB",
        "tensorboard": "ckpttool.integrations.tensorboard:TensorBoard",
    },
}
"""Plug-ins of this package by entry-point group and name, which ``core.plugins`` loads."""
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


if not TYPE_CHECKING:  # a type checker would take any name for one of the package

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module 'ckpttool' has no attribute {name!r}")
        from importlib import import_module

        return getattr(import_module(f"ckpttool.{_HOME_OF.get(name, 'core.errors')}"), name)


def __dir__() -> list[str]:
    return __all__
