"""The documents of ``list`` and ``latest``; docs/contract.md lists their keys."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

from ckpttool.series.listing import Listed, Listing
from ckpttool.series.resuming import Latest


def list_document(listing: Listing) -> dict[str, Any]:
    """Return the document of ``list``."""
    return {"schema": "ckpttool.list/1", "checkpoints": [_listed(one) for one in listing.checkpoints]}


def _listed(listed: Listed) -> dict[str, Any]:
    entry = listed.entry
    return {
        "path": entry.path,
        "format": entry.format,
        "group": entry.group,
        "complete": entry.is_complete,
        "epoch": entry.epoch,
        "step": entry.step,
        "loss": entry.loss,
        "metrics": dict(entry.metrics),
        "bytes": entry.nbytes,
        "modified": _moment(entry.modified_ns),
        "protected": list(listed.protected),
        "fault": entry.fault,
    }


def _moment(nanoseconds: int) -> str | None:
    """Return a time as ISO 8601 in UTC, to the second; None for one beyond what calendars hold."""
    try:
        when = datetime.fromtimestamp(nanoseconds // 10**9, timezone.utc)
    except (ValueError, OverflowError, OSError):
        return None
    return f"{when:%Y-%m-%dT%H:%M:%SZ}"


def latest_document(found: Latest) -> dict[str, Any]:
    """Return the document of ``latest``."""
    return {
        "schema": "ckpttool.latest/1",
        "path": found.entry.path if found.entry else None,
        "epoch": found.entry.epoch if found.entry else None,
        "step": found.entry.step if found.entry else None,
        "passed_over": [{"path": one.path, "why": one.message} for one in found.passed_over],
    }
