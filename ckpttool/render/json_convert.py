"""The document of ``convert`` and ``merge``; docs/contract.md lists its keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpttool.render.json import finding

if TYPE_CHECKING:
    from ckpttool.ops.conversion import Converted


def convert_document(converted: Converted) -> dict[str, Any]:
    """Return the document."""
    sources = converted.sources
    return {
        "schema": "ckpttool.convert/1",
        "source": sources[0] if len(sources) == 1 else [*sources],
        "target": converted.target,
        "format": converted.format,
        "tensors": converted.tensors,
        "bytes": converted.nbytes,
        "verified": converted.verified,
        "dry_run": converted.dry_run,
        "dropped": [{"path": one.path, "why": one.why} for one in converted.dropped],
        "notes": [*converted.notes],
        "mismatches": [*converted.mismatches],
        "safety": [finding(one) for one in converted.safety],
    }
