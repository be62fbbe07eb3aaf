"""Checkpoints as members of a series, without files: entries, and what is wrong with them."""

from __future__ import annotations

import os
from typing import Any

from ckpttool.formats.interface import Unit
from ckpttool.naming import parse_name
from ckpttool.series.files import Contents, Fingerprint
from ckpttool.series.members.entry import Entry
from ckpttool.series.reasons import Code, Reason, fault


def damaged(detail: str) -> Reason:
    return fault(Code.DAMAGED, detail)


def incomplete(detail: str) -> Reason:
    return fault(Code.INCOMPLETE, detail)


def unreadable(detail: str) -> Reason:
    return fault(Code.UNREADABLE, detail)


def make_entry(name: str, *, modified: int = 0, inode: int | None = None, **told: Any) -> Entry:
    """Return an entry of a sound checkpoint of one file in ``run/``, with the epoch and step of its name."""
    fields = parse_name(name)
    file = Fingerprint(name, 1, hash(name) & 0xFFFF if inode is None else inode, 100, modified)
    unit = Unit(os.path.join("run", name), (name,), None)
    given: dict[str, Any] = {"signature": "s", "inside": (fields.epoch, fields.step)}
    given |= {"epoch": fields.epoch, "step": fields.step}
    given |= {"path": unit.path, "unit": unit, "format": "pytorch", "fields": fields}
    return Entry(**(given | {"contents": Contents((file,))} | told))
