"""The document of ``undo``; docs/contract.md lists its keys."""

from __future__ import annotations

from typing import Any

from ckpttool.series.undoing.undo import Undone


def undo_document(done: Undone) -> dict[str, Any]:
    """Return the document of ``undo``."""
    return {
        "schema": "ckpttool.undo/1",
        "dry_run": done.dry_run,
        "id": done.identity,
        "command": None if done.kind is None else {"trash": "prune"}.get(done.kind, done.kind),
        "restored": [{"path": one.path, "was": one.was} for one in done.restored],
        "pointers": list(done.pointers),
        "errors": [{"path": one.path, "message": one.message} for one in done.problems],
    }
