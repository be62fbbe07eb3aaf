"""The document of ``latest``; docs/contract.md lists its keys."""

from __future__ import annotations

from typing import Any

from ckpttool.series.resuming.latest import Latest


def latest_document(found: Latest) -> dict[str, Any]:
    """Return the document of ``latest``."""
    measured = {"best": found.best, "value": found.value}
    waited = {"waited": round(found.waited, 3), "waited_for": [*found.waited_for]}
    return {
        "schema": "ckpttool.latest/1",
        "path": found.entry.path if found.entry else None,
        "epoch": found.entry.epoch if found.entry else None,
        "step": found.entry.step if found.entry else None,
        "safety": found.entry.safety.value if found.entry else None,
        "passed_over": [{"path": one.path, "why": one.message} for one in found.passed_over],
        **(measured if found.best is not None else {}),
        **(waited if found.waited_for else {}),
    }
