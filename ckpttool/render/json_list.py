"""The document of ``list``; docs/contract.md lists their keys."""

from __future__ import annotations

from typing import Any

from ckpttool.render.list_cells import moment_utc
from ckpttool.series.listing import Listed, ListedSeries, Listing


def list_document(listing: Listing) -> dict[str, Any]:
    """Return the document of ``list``."""
    return {
        "schema": "ckpttool.list/1",
        "checkpoints": [_listed(one) for one in listing.checkpoints],
        "series": [_series(one) for one in listing.series],
    }


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
        "modified": moment_utc(entry.modified_ns),
        "protected": list(listed.protected),
        "fault": entry.fault,
        "state": listed.state,
        "safety": entry.safety.value,
        "danger": entry.danger,
        "newest": listed.is_newest,
        "best": listed.is_best,
        "granularity": entry.granularity.value if entry.granularity else None,
        "files": entry.files,
        "kept": None if listed.kept is None else list(listed.kept),
    }


def _series(series: ListedSeries) -> dict[str, Any]:
    newest, best = series.newest, series.best
    return {
        "key": series.key,
        "format": series.format,
        "count": len(series.checkpoints),
        "bytes": series.nbytes,
        "epochs": None if series.epochs is None else list(series.epochs),
        "steps": None if series.steps is None else list(series.steps),
        "newest": newest.entry.path if newest else None,
        "best": best.entry.path if best else None,
    }
