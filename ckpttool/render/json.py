"""The documents that scripts read; docs/contract.md lists their keys."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ckpttool.ops.verdict import safety_of
from ckpttool.render.escape import is_printable

if TYPE_CHECKING:
    from ckpttool.checkpoint import FileEntry, TrainingState
    from ckpttool.ops.inspect import Inspection, ValueStatistics
    from ckpttool.ops.manifest_writing import SealResult
    from ckpttool.ops.verdict import Verification
    from ckpttool.report import Finding
    from ckpttool.tensor import Shard, Tensor


def dumps(document: Any) -> str:
    """Return a document as JSON text; NaN and infinities become strings.

    What a terminal would obey, and what UTF-8 can't hold, is spelled as JSON's own escapes.
    """
    try:
        text = json.dumps(document, ensure_ascii=False, allow_nan=False)
    except ValueError:
        text = json.dumps(finite(document), ensure_ascii=False, allow_nan=False)
    for character in set(text):
        if not is_printable(character):
            units = character.encode("utf-16-be", "surrogatepass").hex()
            escapes = "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))
            text = text.replace(character, escapes)
    return text


def finite(value: Any) -> Any:
    """Return plain data with the floats that JSON lacks spelled as strings."""
    root = [value]
    pending: list[Any] = [root]
    while pending:
        holder = pending.pop()
        for key, item in list(holder.items() if isinstance(holder, dict) else enumerate(holder)):
            if isinstance(item, float) and not math.isfinite(item):
                holder[key] = "NaN" if item != item else "Infinity" if item > 0 else "-Infinity"
            elif isinstance(item, Mapping | list | tuple):
                holder[key] = dict(item) if isinstance(item, Mapping) else list(item)
                pending.append(holder[key])
    return root[0]


def inspect_document(inspections: list[Inspection]) -> dict[str, Any]:
    """Return the document of ``inspect``."""
    return {
        "schema": "ckpttool.inspect/1",
        "checkpoints": [_inspected(inspection) for inspection in inspections],
    }


def _inspected(inspection: Inspection) -> dict[str, Any]:
    found = inspection.checkpoint
    return {
        "path": found.path,
        "format": found.format,
        "variant": found.variant,
        "complete": found.complete,
        "granularity": found.granularity.value,
        "bytes": found.nbytes,
        "files": [_file(entry) for entry in found.files],
        "producer": {"framework": found.producer.framework, "version": found.producer.version},
        "training": training(found.training),
        "parameters": found.parameters,
        "tensors": [_tensor(tensor, inspection.statistics) for tensor in inspection.tensors],
        "values": found.metadata,
        "findings": [finding(one) for one in inspection.findings],
        "safety": safety_of(found.safety).value,
    }


def _file(entry: FileEntry) -> dict[str, Any]:
    return {"path": entry.path, "bytes": entry.nbytes}


def training(state: TrainingState) -> dict[str, Any]:
    """Return a training state as the documents have it."""
    return {
        "epoch": state.epoch,
        "step": state.step,
        "loss": state.loss,
        "learning_rate": state.learning_rate,
        "metrics": dict(state.metrics),
        "best": state.best,
        "saved_at": state.saved_at,
        "seed": state.seed,
        "hyper_parameters": dict(state.hyper_parameters),
        "origin": dict(state.origin),
    }


def _shard(shard: Shard) -> dict[str, Any]:
    return {
        "shape": list(shard.shape),
        "ranges": None if shard.ranges is None else [list(map(list, runs)) for runs in shard.ranges],
        "placements": list(shard.placements),
        "mesh": list(shard.mesh),
        "rank": shard.rank,
    }


def _tensor(tensor: Tensor, statistics: Mapping[str, ValueStatistics] | None) -> dict[str, Any]:
    extent = tensor.extent
    told: dict[str, Any] = {
        "name": tensor.name,
        "path": list(tensor.path),
        "role": tensor.role.value,
        "dtype": tensor.dtype.name,
        "shape": list(tensor.shape),
        "bytes": tensor.nbytes,
        "file": extent.file if extent else None,
        "offset": extent.offset if extent else None,
        "shares_with": tensor.shares_with,
    }
    if tensor.key is not None:
        told["key"] = tensor.key
    if tensor.shard is not None:
        told["shard"] = _shard(tensor.shard)
    if statistics is not None and tensor.name in statistics:
        told["stats"] = _statistics(statistics[tensor.name])
    return told


def _statistics(found: ValueStatistics) -> dict[str, Any]:
    return {
        "min": found.minimum,
        "max": found.maximum,
        "mean": found.mean,
        "std": found.std,
        "zeros": found.zeros,
        "nan": found.nan,
        "inf": found.infinite,
    }


def finding(one: Finding) -> dict[str, Any]:
    """Return a finding as the documents have it."""
    told = {"code": one.code, "severity": one.severity.value, "message": one.message, "where": one.where}
    return told if one.ignored is None else {**told, "ignored": one.ignored}


def verify_document(
    verifications: list[Verification], sealed: Mapping[str, SealResult] = MappingProxyType({})
) -> dict[str, Any]:
    """Return the document of ``verify``; ``sealed`` has what became of manifests, by path."""
    is_valid = all(verification.is_valid for verification in verifications)
    return {
        "schema": "ckpttool.verify/1",
        "verdict": "valid" if is_valid else "invalid",
        "checkpoints": [_verified(one) | _sealed(sealed.get(one.path)) for one in verifications],
    }


def _sealed(one: SealResult | None) -> dict[str, Any]:
    if one is None:
        return {}
    is_written = bool(one.files) and not one.was_there
    return {"manifest": {"written": is_written, "files": list(one.files), "refused": one.refused}}


def _verified(verification: Verification) -> dict[str, Any]:
    return {
        "path": verification.path,
        "format": verification.format,
        "variant": verification.variant,
        "verdict": "valid" if verification.is_valid else "invalid",
        "safety": verification.safety.value,
        "bytes": verification.nbytes,
        "checks": [
            {"name": check.name, "status": check.status.value, "detail": check.detail}
            for check in verification.checks
        ],
        "findings": [finding(one) for one in verification.findings],
    }
