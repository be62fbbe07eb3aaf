"""Chooses the engine that changes a directory."""

from __future__ import annotations

from ckpttool.storage import fs
from ckpttool.transaction.disk_engine import DiskEngine
from ckpttool.transaction.engine import Engine


def engine_of(directory: str) -> Engine:
    """Return the engine of a directory; that of stores is imported only for URLs."""
    if fs.place_of(directory).can_rename:
        return DiskEngine(directory)
    from ckpttool.transaction.store_engine import StoreEngine

    return StoreEngine(directory)
