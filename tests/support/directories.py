"""Checkpoints as members of a series: entries without files, what is wrong with them, and what lies where."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from zlib import crc32

import pytest

from ckpttool.core.naming import parse_name
from ckpttool.formats import discovery
from ckpttool.formats.interface import Unit
from ckpttool.runs.members.entry import Entry
from ckpttool.runs.members.look import look_at
from ckpttool.runs.pointers.protection import Pointers
from ckpttool.runs.pointers.targets import PointerProtections
from ckpttool.runs.reasons import Code, Reason, fault
from ckpttool.runs.scope import Scope
from ckpttool.runs.surveying import survey as surveying
from ckpttool.runs.surveying.survey import Survey, survey_directory
from ckpttool.transaction.files import Contents, Fingerprint
from tests.support.opening import checkpoint_at


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
    usual: dict[str, Any] = {"signature": "s", "inside": (fields.epoch, fields.step)}
    usual |= {"epoch": fields.epoch, "step": fields.step}
    usual |= {"path": unit.path, "unit": unit, "format": "pytorch", "fields": fields}
    return Entry(**(usual | {"contents": Contents(tuple(files))} | known))


def directory_entry(name: str, *files: str, **known: Any) -> Entry:
    """Return an entry of a checkpoint that is a directory, in which some files lie."""
    inside = tuple(file_of(f"{name}/{file}") for file in files)
    return make_entry(name, contents=Contents(inside, (name,)), **known)


def faulty_entry(name: str, fault: Reason, **known: Any) -> Entry:
    """Return an entry of a checkpoint that can't be opened whole."""
    return make_entry(name, **{"fault": fault, "is_complete": False, "signature": None, **known})


def entry_at(path: Path) -> Entry:
    """Return what is known of the checkpoint at a path, without reading its values."""
    unit = checkpoint_at(path)
    assert unit is not None
    entry = look_at(unit)
    assert entry is not None
    return entry


def survey(directory: str | os.PathLike[str], *, recursive: bool = True, **scope: Any) -> Survey:
    """Return the checkpoints of a directory in their series, and what could not be looked at."""
    return survey_directory(directory, Scope(recursive=recursive, **scope))


def before_it_is_looked_at(patch: pytest.MonkeyPatch, path: Path, action: Callable[[], object]) -> None:
    """Let something happen once a path was listed, and before it is known what lies there."""
    _before(patch, discovery, "Probe", path, action)


def before_it_is_looked_into(patch: pytest.MonkeyPatch, path: Path, action: Callable[[], object]) -> None:
    """Let something happen before it is looked what lies in a checkpoint that is a directory."""
    _before(patch, surveying, "scan", path, action)


def _before(
    patch: pytest.MonkeyPatch, room: ModuleType, name: str, path: Path, action: Callable[[], object]
) -> None:
    real = getattr(room, name)

    def call(called_with: str) -> object:
        if called_with == str(path):
            action()
        return real(called_with)

    patch.setattr(room, name, call)


def pointers_in(found: Survey, *, recursive: bool = False) -> PointerProtections:
    """Return what is found to name the checkpoints of a directory that was surveyed."""
    return Pointers(found.root, found.groups, recursive=recursive).protections()
