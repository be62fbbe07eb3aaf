"""The document of ``pin`` and ``unpin``; docs/contract.md lists its keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ckpttool.series.paths import shown
from ckpttool.series.pointers.pin_lists import Pin


def pin_document(
    pins: Sequence[Pin], changed: Sequence[str] = (), void: Sequence[tuple[Pin, str]] = ()
) -> dict[str, Any]:
    """Return the document: what is pinned, what of it isn't there, what was changed, what pins nothing."""
    return {
        "schema": "ckpttool.pin/1",
        "pinned": [pinned.path for pinned in pins],
        "missing": [pinned.path for pinned in pins if not pinned.is_there],
        "changed": [*changed],
    } | (
        {"void": [{"file": shown(one.file), "name": one.name, "why": why} for one, why in void]}
        if void
        else {}
    )
