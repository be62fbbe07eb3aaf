"""Checkpoints as members of a series: entries without files, and what is wrong with them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any
from zlib import crc32

from ckpttool.core.naming import parse_name
from ckpttool.formats.interface import Unit
from ckpttool.runs.entry import Entry
from ckpttool.runs.reasons import Code, Reason, fault
from ckpttool.runs.scope import Scope
from ckpttool.runs.survey import Survey, survey_directory
from ckpttool.transaction.files import Contents, Fingerprint


def damaged(detail: str) -> Reason:
    return fault(Code.DAMAGED, detail)


def incomplete(detail: str) -> Reason:
    return fault(Code.INCOMPLETE, detail)


def unreadable(detail: str) -> Reason:
    return fault(Code.UNREADABLE, detail)


def file_of(
    name: str, inode: int | None = None, size: int = 100, *, modified: int = 0, links: int = 1
) -> Fingerprint:
    """Return what is known of a file; those of one inode are one file."""
    number = crc32(os.fsencode(name)) if inode is None else inode
    return Fingerprint(name, 1, number, size, modified, links)


def make_entry(
    name: str,
    *members: str,
    directory: str = "run",
    files: Sequence[Fingerprint] = (),
    modified: int = 0,
    **known: Any,
) -> Entry:
    """Return an entry of a sound checkpoint in a directory, with the epoch and step of its name.

    It is one file of its name, or those of ``members``, each of 100 bytes, unless ``files`` says what it is.
    """
    fields = parse_name(name)
    members = members or (name,)
    files = files or [file_of(member, modified=modified) for member in members]
    unit = Unit(os.path.join(directory, name), members, None)
    usual: dict[str, Any] = {"signature": "s", "counts_inside": (fields.epoch, fields.step)}
    usual |= {"epoch": fields.epoch, "step": fields.step}
    usual |= {"path": unit.path, "unit": unit, "format": "pytorch", "fields": fields}
    return Entry(**(usual | {"contents": Contents(tuple(files))} | known))


def faulty_entry(name: str, fault: Reason, **known: Any) -> Entry:
    """Return an entry of a checkpoint that can't be opened whole."""
    return make_entry(name, **{"fault": fault, "is_complete": False, "signature": None, **known})


def survey(directory: str | os.PathLike[str], *, recursive: bool = True, **scope: Any) -> Survey:
    """Return the checkpoints of a directory in their series, and what could not be looked at."""
    return survey_directory(directory, Scope(recursive=recursive, **scope))
