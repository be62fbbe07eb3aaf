"""Checkpoints inside others: they would go with what is around them, or hide it from the plan."""

from __future__ import annotations

import os
from collections.abc import Iterator

from ckpttool.errors import CheckpointError
from ckpttool.formats.discovery import OWN_PREFIX, Walk, discover, is_excluded
from ckpttool.formats.globs import Globs
from ckpttool.formats.interface import Unit
from ckpttool.formats.step_directory import StepDirectory
from ckpttool.naming import parse_name
from ckpttool.report import counted
from ckpttool.series.members.entry import Entry
from ckpttool.series.paths import shown
from ckpttool.series.surveying.survey import Scope, Survey

_PARTS = {"safetensors", "pytorch", "torch-dcp", "deepspeed", "pickle"}
"""The formats of what a directory that takes in others is made of: adapters, parts of a pipeline, shards."""


def told_inside(entry: Entry) -> str | None:
    """Return what to say of the checkpoints inside one that would go with it and are none of its parts."""
    found = [] if entry.holds_others else list(_others_in(entry))
    if not found:
        return None
    first = os.path.relpath(found[0].path, entry.unit.path)
    return f"holds {counted(len(found), 'other checkpoint')}: {first}{', …' if len(found) > 1 else ''}"


def _others_in(entry: Entry) -> Iterator[Unit]:
    around = entry.unit.format
    if around is None or not around.takes_in or isinstance(around, StepDirectory):  # all in it is of the save
        return
    for path in entry.contents.directories:
        if path.count(os.sep) == 1:  # directly below
            try:
                below = list(discover(os.path.join(entry.directory, path)))
            except CheckpointError:  # it goes only if it is as it was when it could be looked at
                continue
            for unit in below:
                if unit.format is not None and (unit.format.takes_in or unit.format.name not in _PARTS):
                    yield unit


def passed_over(found: Survey, scope: Scope) -> Iterator[str]:
    """Yield a warning of each directory called as those of a series, that is none as others lie in it."""
    blanks = {entry.fields.blank for entry in found.entries if os.path.isdir(entry.unit.path)}
    known = {os.path.normpath(entry.unit.path) for entry in found.entries}
    walk = Walk(recursive=False, exclude=Globs(scope.exclude, found.root))
    for name in sorted(os.listdir(found.root)) if blanks else ():
        path = os.path.join(found.root, name)
        if name.startswith(OWN_PREFIX) or os.path.normpath(path) in known:
            continue
        if parse_name(name).blank not in blanks or is_excluded(path, walk) or not _is_directory(path):
            continue
        count = sum(os.path.isdir(unit.path) for unit in _discovered(path, walk))
        if count:
            inside = f"it holds {counted(count, 'other checkpoint')}"
            yield f"{shown(path)}: not one of its series: {inside}, so it is taken for a run of its own"


def _is_directory(path: str) -> bool:
    return os.path.isdir(path) and not os.path.islink(path)


def _discovered(path: str, walk: Walk) -> list[Unit]:
    try:
        return list(discover(path, walk))
    except CheckpointError:  # told by the survey
        return []
