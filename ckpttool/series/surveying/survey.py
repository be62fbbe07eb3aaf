"""Surveys a directory: its checkpoints in series, journals that wait, and what can't be looked at."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from operator import itemgetter
from typing import NamedTuple

from ckpttool.errors import CheckpointError, NotFound
from ckpttool.formats.discovery import Walk, candidates, discover, is_excluded, looked_at, unit_at
from ckpttool.formats.globs import Globs
from ckpttool.formats.interface import Unit, scan
from ckpttool.series.changing.journal import incomplete_names, pending_journals
from ckpttool.series.members.entry import Entry
from ckpttool.series.members.order import Group, GroupBy, group
from ckpttool.series.members.runs import apply_series_globs
from ckpttool.series.metrics.agreement import disagreements
from ckpttool.series.paths import bare
from ckpttool.series.reasons import Code, Reason
from ckpttool.series.surveying.look_workers import Discovered, LookResult, look_at_all

NOTHING = "no checkpoint"


_ENOUGH, _MAX_LOOK = 100, 3
"""How many checkpoints, and levels, a hint that some lie deeper is worth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """What of a directory is looked at, and what makes a series of it.

    Attributes:
        recursive: Whether to descend; otherwise what lies in the directory itself is meant.
        exclude: Globs of what to pass over.
        max_depth: How many levels to descend at most.
        series: Globs of names that are one series each, whatever the names say.
        group_by: What makes one series of checkpoints; None for directory, format and name together.
        metrics: Logs that say what a checkpoint's metrics are, by its step or epoch.
    """

    recursive: bool = False
    exclude: Sequence[str] = ()
    max_depth: int | None = None
    series: Sequence[str] = ()
    group_by: GroupBy | None = None
    metrics: Sequence[str] = ()


WHOLE_TREE = Scope(recursive=True)
"""All that lies in a directory and below."""


@dataclass(frozen=True, slots=True)
class Survey:
    """The checkpoints of a directory, in series.

    Attributes:
        root: The directory that was looked at.
        groups: All series, by their keys.
        journals: What an interrupted prune left; only the next prune takes care of it.
        errors: What could not be looked at.
        remarks: What is doubtful about metrics, and globs that matched nothing.
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


def survey_directory(
    root: str | os.PathLike[str], scope: Scope = WHOLE_TREE, *, enters_root: bool = False
) -> Survey:
    """Return what lies in a directory; nothing on disk is changed."""
    path = bare(os.fspath(root))
    excluded, one_series = Globs(scope.exclude, path), Globs(scope.series, path)
    walk = Walk(
        recursive=scope.recursive, exclude=excluded, max_depth=scope.max_depth, enters_root=enters_root
    )
    walked = _SurveyWalk(path, walk)
    looked = walked.look()
    places = {unit.path: os.path.dirname(unit.path) or os.curdir for unit, _ in looked}
    directories = sorted({path, *places.values()})
    journals = tuple(place for directory in directories for place in pending_journals(directory))
    gone = {directory: incomplete_names(directory) for directory in directories} if journals else {}
    entries = [
        entry
        for unit, entry in looked
        if entry is not None and gone.get(places[unit.path], frozenset()).isdisjoint(unit.members)
    ]
    doubts = list(disagreements(entries))
    remarks: list[str] = []
    if scope.metrics:
        from ckpttool.series.metrics.log_metrics import add_log_metrics

        entries, remarks = add_log_metrics(entries, scope.metrics, path)
    for place in (place for entry in entries for place in entry.places):
        excluded.of(place)  # a part of one that stays whole is matched, too
    groups = group(apply_series_globs(entries, one_series), scope.group_by)
    unmatched = [*excluded.unmatched("--exclude"), *one_series.unmatched("--series")]
    remarks += [*doubts, *(Reason(Code.MATCHED_NOTHING, warning) for warning in unmatched)]
    return Survey(path, groups, journals, walked.errors, tuple(remarks))


def nothing_in(root: str, *, recursive: bool) -> str:
    """Return what to say of a directory without a checkpoint: that some lie deeper, where they do."""
    if recursive or not os.path.isdir(root):
        return NOTHING
    walk = Walk(recursive=True, max_depth=_MAX_LOOK, on_error=lambda error: None)
    count = sum(1 for _ in islice(discover(root, walk), _ENOUGH))
    if not count:
        return NOTHING
    return f"{NOTHING} in it; {count}{' or more' if count == _ENOUGH else ''} below (-r descends)"


class _SurveyWalk:
    """A walk through a tree, on which what is found is looked at, be it by other processes."""

    def __init__(self, root: str, walk: Walk) -> None:
        self._root = root
        self._walk = replace(walk, on_error=self._record_error)
        self._errors: list[tuple[int, CheckpointError]] = []
        self._place = 0
        self._found: list[Discovered] = []

    @property
    def errors(self) -> tuple[CheckpointError, ...]:
        """Return what could not be looked at, in the order of the walk."""
        return tuple(error for _, error in sorted(self._errors, key=itemgetter(0)))

    def look(self) -> list[tuple[Unit, Entry | None]]:
        """Return the checkpoints with their entries, in the order of the walk."""
        result: list[tuple[Unit, Entry | None]] = []
        looked = look_at_all(self._record(_discover(self._root, self._walk)))
        for place, (found, one) in enumerate(zip(self._found, looked, strict=True)):
            self._place = place
            result += self._resolve(found, one)
        return result

    def _record(self, units: Iterator[Discovered]) -> Iterator[Discovered]:
        for found in units:
            self._found.append(found)
            self._place += 1
            yield found

    def _record_error(self, error: CheckpointError) -> None:
        self._errors.append((self._place, error))

    def _resolve(self, found: Discovered, looked: LookResult | None) -> Iterator[tuple[Unit, Entry | None]]:
        """Yield a checkpoint, and of a path that told too little all that there comes to be of it."""
        if looked is not None:
            if looked.unit is not None:
                yield looked.unit, looked.entry
            return
        unit = looked_at(found, self._walk) if isinstance(found, str) else None
        more = () if unit is None else _unit_with_nested(unit, self._root, self._walk)
        for inner in more:
            (one,) = look_at_all((inner,))
            yield from self._resolve(inner, one)


class _Nested(NamedTuple):
    """A directory inside a unit that may be a checkpoint of its own."""

    path: str


def _discover(root: str, walk: Walk) -> Iterator[Discovered]:
    """Yield what is found at a path: units, and files that may be some."""
    return _flatten(_found_at(root, walk), walk)


def _unit_with_nested(unit: Unit, root: str, walk: Walk) -> Iterator[Discovered]:
    """Yield a unit, and what lies inside it: a run's own directory may be one too."""
    return _flatten(_unit_and_nested(unit, root, walk), walk)


def _flatten(found: Iterator[Discovered | _Nested], walk: Walk) -> Iterator[Discovered]:
    """Yield what is found, and in the place of a directory all that is found in it; without recursion."""
    opened = [found]
    while opened:
        one = next(opened[-1], None)
        if one is None:
            opened.pop()
        elif isinstance(one, _Nested):
            opened.append(_found_at(one.path, walk))
        else:
            yield one


def _found_at(root: str, walk: Walk) -> Iterator[Discovered | _Nested]:
    for found in candidates(root, walk):
        if isinstance(found, str):
            yield found
        else:
            yield from _unit_and_nested(found, root, walk)


def _unit_and_nested(unit: Unit, root: str, walk: Walk) -> Iterator[Discovered | _Nested]:
    nested = [path for path in _subdirectories(unit) if _is_checkpoint(path, walk)]
    yield unit, bool(nested)
    if walk.recursive or unit.path == root:
        for path in nested:
            if not is_excluded(path, walk):
                yield _Nested(path)


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
