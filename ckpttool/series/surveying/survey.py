"""What lies in a directory: its checkpoints, the symlinks below it, and journals that wait."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from ckpttool.errors import CheckpointError, NotFound
from ckpttool.formats.discovery import Walk, discover, unit_at
from ckpttool.formats.interface import Unit, scan
from ckpttool.series.changing.journal import half_removed, waiting
from ckpttool.series.members.entry import Entry
from ckpttool.series.members.order import Group, group
from ckpttool.series.members.runs import as_told
from ckpttool.series.paths import bare
from ckpttool.series.surveying.looking import look_at_all
from ckpttool.series.surveying.scope import WHOLE_TREE, Scope

_ENOUGH, _MAX_LOOK = 100, 3
"""How many checkpoints, and levels, a hint that some lie deeper is worth."""


@dataclass(frozen=True, slots=True)
class Survey:
    """The checkpoints of a directory, in series.

    Attributes:
        root: The directory that was looked at.
        groups: All series, by their keys.
        journals: What an interrupted prune left; only the next prune takes care of it.
        errors: What could not be looked at.
        remarks: What is doubtful about the logs of metrics.
    """

    root: str
    groups: tuple[Group, ...]
    journals: tuple[str, ...] = ()
    errors: tuple[CheckpointError, ...] = ()
    remarks: tuple[str, ...] = ()

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Return all checkpoints, series by series, each from the oldest on."""
        return tuple(entry for one in self.groups for entry in one.entries)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Return what is doubtful about the order, and about metrics."""
        return (*self.remarks, *(warning for one in self.groups for warning in one.warnings))


def survey(root: str | os.PathLike[str], scope: Scope = WHOLE_TREE) -> Survey:
    """Return what lies in a directory; nothing on disk is changed.

    Args:
        root: The directory.
        scope: What of it is looked at, and what makes a series.

    Raises:
        UsageError: A log can't be understood.
        CheckpointError: The directory itself, or a log, can't be looked at.
    """
    path = bare(os.fspath(root))
    errors: list[CheckpointError] = []
    walk = Walk(
        recursive=scope.recursive,
        exclude=scope.exclude,
        max_depth=scope.max_depth,
        on_error=errors.append,
    )
    units = list(_units(path, walk))
    directories = sorted({path, *(os.path.dirname(unit.path) or os.curdir for unit, _ in units)})
    journals = tuple(place for directory in directories for place in waiting(directory))
    gone = {directory: half_removed(directory) for directory in directories} if journals else {}
    entries = look_at_all(
        [
            (unit, holds_others)
            for unit, holds_others in units
            if gone.get(os.path.dirname(unit.path) or os.curdir, frozenset()).isdisjoint(unit.members)
        ]
    )
    remarks: list[str] = []
    if scope.metrics:
        from ckpttool.series.metrics.matched import with_metrics

        entries, remarks = with_metrics(entries, scope.metrics, path)
    groups = group(as_told(entries, scope.series), scope.group_by)
    return Survey(path, groups, journals, tuple(errors), tuple(remarks))


def nothing_in(root: str, *, recursive: bool) -> str:
    """Return what to say of a directory without a checkpoint: that some lie deeper, where they do."""
    if recursive or not os.path.isdir(root):
        return "no checkpoint"
    walk = Walk(recursive=True, max_depth=_MAX_LOOK, on_error=lambda error: None)
    count = sum(1 for _ in islice(discover(root, walk), _ENOUGH))
    if not count:
        return "no checkpoint"
    return f"no checkpoint in it; {count}{' or more' if count == _ENOUGH else ''} below (-r descends)"


def _units(root: str, walk: Walk) -> Iterator[tuple[Unit, bool]]:
    """Yield the units at a path, and whether others lie inside each: a run's own directory may be one too."""
    for unit in discover(root, walk):
        nested = [path for path in _subdirectories(unit) if _is_checkpoint(path, walk)]
        yield unit, bool(nested)
        if walk.recursive or unit.path == root:
            for path in nested:
                yield from _units(path, walk)


def _is_checkpoint(path: str, walk: Walk) -> bool:
    try:
        return unit_at(path) is not None
    except CheckpointError as error:
        if not isinstance(error, NotFound) or os.path.lexists(path):  # else it has just gone
            walk.on_error(error)
        return False


def _subdirectories(unit: Unit) -> list[str]:
    """Return the directories inside a unit, where what lies in them may be a checkpoint of its own."""
    takes_in = unit.format is not None and unit.format.takes_in
    if takes_in or not stat.S_ISDIR(_mode(unit.path)):
        return []
    try:
        entries = scan(unit.path).values()
    except NotFound:  # it has just gone
        return []
    return [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]


def _mode(path: str) -> int:
    try:
        return os.lstat(path).st_mode
    except OSError:  # an index that is missing has no mode
        return 0
