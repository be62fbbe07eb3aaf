"""The document of ``rename``; docs/contract.md lists its keys."""

from __future__ import annotations

from typing import Any

from ckpttool.series.renaming.rename import Renamed


def rename_document(renamed: Renamed) -> dict[str, Any]:
    """Return the document of ``rename``."""
    return {
        "schema": "ckpttool.rename/1",
        "dry_run": renamed.dry_run,
        "declined": renamed.declined,
        "renames": [{"from": old, "to": new} for old, new in renamed.renames],
        "errors": [{"path": one.path, "message": one.message} for one in renamed.problems],
        "warnings": list(renamed.planned.warnings),
    }
