"""The document of ``pin`` and ``unpin``; docs/contract.md lists its keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ckpttool.series.pin_files import Pin


def pin_document(pins: Sequence[Pin], changed: Sequence[str] = ()) -> dict[str, Any]:
    """Return the document: what is pinned now, what of it isn't there, and whose pin came or went."""
    return {
        "schema": "ckpttool.pin/1",
        "pinned": [pinned.path for pinned in pins],
        "missing": [pinned.path for pinned in pins if not pinned.is_there],
        "changed": [*changed],
    }
