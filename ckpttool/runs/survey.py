"""Survey of a directory: its series, pending journals and errors; and the checkpoint that a path means."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import islice
from operator import itemgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from ckpttool.core.errors import AccessDenied, CheckpointError, NotACheckpoint, NotFound
from ckpttool.core.text import counted
from ckpttool.core.urls import has_odd_name
from ckpttool.formats import set_formats, suffix_format
from ckpttool.formats.discovery import (
    Globs,
    Walk,
    candidates,
    discover,
    is_excluded,
    report,
    unit_at,
    unit_of_candidate,
)
from ckpttool.formats.interface import Unit, natural_path, scan
from ckpttool.formats.step_directory import StepDirectory
from ckpttool.formats.tensorflow import state as tf_state
from ckpttool.formats.tensorflow.prefix import INDEX
from ckpttool.formats.traits import traits_of
from ckpttool.runs.entry import Entry
from ckpttool.runs.look_workers import Discovered, LookResult, look_at_all
from ckpttool.runs.metrics import add_log_metrics, disagreements
from ckpttool.runs.reasons import Code, Reason
from ckpttool.runs.run_directories import apply_series_globs
from ckpttool.runs.saves import mark_saves
from ckpttool.runs.scope import WHOLE_TREE, Scope
from ckpttool.runs.series import Group, group
from ckpttool.storage import fs
from ckpttool.storage.fs import Snapshot
from ckpttool.storage.work import Advance, no_advance
from ckpttool.transaction.paths import shown, without_trailing_slashes
from ckpttool.transaction.recovery import unaffected_units

if TYPE_CHECKING:
    from concurrent.futures import Executor


NOTHING = "no checkpoint"
_REQUESTS_AT_ONCE = 16

_MAX_HINT_COUNT, _MAX_HINT_LEVELS = 100, 3
"""Limits on checkpoints and levels that are searched for the hint that subdirectories have some."""


class Survey(NamedTuple):
    """The checkpoints of a directory, in series.

    Attributes:
        root: The directory.
        groups: All series, ordered by key.
        snapshot: Snapshot of the files around the checkpoints, from which plans are made.
        journals: Pending journals of interrupted commands; commands that change the directory recover them.
        errors: Errors of paths that could not be read.
        remarks: Doubts about metrics, and globs without a match.
        vanished: Paths that were listed, but missing when they were opened.
        unread: Files and directories that look like models, with the reason why they aren't read.
    """

    root: str
    groups: tuple[Group, ...]
    snapshot: Snapshot
    journals: tuple[str, ...] = ()
    errors: tuple[CheckpointError, ...] = ()
    remarks: tuple[str, ...] = ()
    vanished: tuple[str, ...] = ()
    unread: Mapping[str, str] = MappingProxyType({})

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Return all checkpoints, series by series, each from the oldest on."""
        return tuple(entry for series in self.groups for entry in series.entries)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Return the warnings about order and metrics."""
        return (*self.remarks, *(warning for series in self.groups for warning in series.warnings))


def survey_directory(
    root: str | os.PathLike[str],
    scope: Scope = WHOLE_TREE,
    *,
    enters_root: bool = False,
    advance: Advance = no_advance,
    executor: Executor | None = None,
) -> Survey:
    """Return the survey of a directory; nothing on disk is changed.

    Args:
        root: The directory.
        scope: Checkpoints to look at.
        enters_root: Whether the directory is searched even if it is a checkpoint itself.
        advance: Called with the number of files and directories examined, from any thread.
        executor: Looks at checkpoints instead of this process; its workers see the same files.
    """
    path = without_trailing_slashes(os.fspath(root))
    excluded, one_series = Globs(scope.exclude, path), Globs(scope.series, path)
    walk = _SurveyWalk(
        path,
        Walk(recursive=scope.recursive, exclude=excluded, max_depth=scope.max_depth, enters_root=enters_root),
    )
    # A pending journal may have moved files of a checkpoint half way. Such checkpoints are left out until it
    # is recovered.
    looked = walk.look(advance, executor)
    unaffected = unaffected_units([unit for unit, _ in looked], [path])
    whole = set(unaffected.whole)
    entries = [entry for unit, entry in looked if entry is not None and unit in whole]
    doubts = list(disagreements(entries))
    remarks: list[str] = []
    if scope.metrics:
        entries, remarks = add_log_metrics(entries, scope.metrics, path)
    for place in (place for entry in entries for place in entry.places):
        excluded.matching(place)  # a part of a save that is kept whole is matched, too
    groups = mark_saves(
        group(apply_series_globs(entries, one_series), scope.group_by, path, joins_slim=scope.joins_slim)
    )
    unread = {one: walk.unread[one] for one in sorted(walk.unread, key=natural_path)}
    unmatched = [*excluded.unmatched("--exclude"), *one_series.unmatched("--series")]
    remarks += [*doubts, *walk.remarks, *(Reason(Code.MATCHED_NOTHING, warning) for warning in unmatched)]
    return Survey(
        path,
        groups,
        Snapshot(),
        unaffected.journals,
        walk.errors,
        tuple(remarks),
        tuple(walk.vanished),
        unread,
    )


def upload_warnings(root: str) -> Iterator[str]:
    """Yield a warning of uploads to a directory that were never completed, as far as the store lists them."""
    if (found := fs.place_of(root).unfinished_uploads(root)) is not None:
        count, nbytes = found
        what = counted(count, "unfinished upload") + ("" if nbytes is None else f" ({nbytes:,} bytes)")
        yield f"{shown(root)}: {what}, hidden from listings; ckpttool leaves them alone"


def nothing_in(root: str, *, recursive: bool) -> str:
    """Return the message for a directory without a checkpoint, with a hint if subdirectories have some."""
    if recursive or not fs.isdir(root):
        return NOTHING
    walk = Walk(recursive=True, max_depth=_MAX_HINT_LEVELS, on_error=lambda error: None)
    count = sum(1 for _ in islice(discover(root, walk), _MAX_HINT_COUNT))
    if not count:
        return NOTHING
    below = "subdirectory" if count == 1 else "subdirectories"
    number = f"{count}{' or more' if count == _MAX_HINT_COUNT else ''}"
    return f"{NOTHING} directly in it, but {number} in {below} (omit --no-recursive)"


class _SurveyWalk:
    """Walk through a tree that opens all candidates, also in other processes.

    Directories may change during the walk. If a candidate has vanished when it is opened, that is recorded;
    no error is raised.
    """

    def __init__(self, root: str, walk: Walk) -> None:
        self._root = root
        self.vanished: list[str] = []
        self.remarks: list[str] = []
        self.unread: dict[str, str] = {}
        self._walk = replace(
            walk,
            on_error=self._record_error,
            on_vanished=self.vanished.append,
            on_unread=self.unread.__setitem__,
        )
        self._errors: list[tuple[int, CheckpointError]] = []
        self._position = 0
        self._discovered: list[Discovered] = []

    @property
    def errors(self) -> tuple[CheckpointError, ...]:
        """Return the errors, in the order of the walk."""
        return tuple(error for _, error in sorted(self._errors, key=itemgetter(0)))

    def look(self, advance: Advance, executor: Executor | None) -> list[tuple[Unit, Entry | None]]:
        """Return the checkpoints with their entries, in the order of the walk."""
        # Candidates are opened while the walk goes on, in any order. Errors have the position of their
        # candidate, so that their order doesn't depend on timing.
        with nullcontext(executor) if executor is not None else _threads_for(self._root) as workers:
            looked = look_at_all(self._discover(), workers, advance=advance)
        result: list[tuple[Unit, Entry | None]] = []
        for position, (candidate, look) in enumerate(zip(self._discovered, looked, strict=True)):
            self._position = position
            result += self._resolve(candidate, look)
        return result

    def _discover(self) -> Iterator[Discovered]:
        for candidate in _flatten(_find(self._root, self._walk)):
            self._discovered.append(candidate)
            self._position += 1
            yield candidate

    def _record_error(self, error: CheckpointError) -> None:
        if has_odd_name(error.path) and suffix_format(error.path) is None:  # such as a log: no failure
            self.remarks.append(f"{shown(error.path)}: skipped: {error.reason}")
        else:
            self._errors.append((self._position, error))

    def _resolve(
        self, candidate: Discovered, look: LookResult | CheckpointError | None
    ) -> Iterator[tuple[Unit, Entry | None]]:
        """Yield the result for a candidate; for an unresolved path, the results for all found there."""
        if isinstance(look, CheckpointError):
            self._record_error(look)
            return
        if look is not None:
            if look.unit is not None:
                if look.entry is None:
                    self.vanished.append(look.unit.path)
                yield look.unit, look.entry
            elif isinstance(candidate, str) and look.unread is not None:
                self.unread[candidate] = look.unread
            return
        unit = unit_of_candidate(candidate, self._walk) if isinstance(candidate, str) else None
        if unit is not None:
            for inner in _flatten(_find_inside(unit, self._root, self._walk)):
                (look,) = look_at_all((inner,))
                yield from self._resolve(inner, look)


@contextmanager
def _threads_for(root: str) -> Iterator[Executor | None]:
    """Yield threads for concurrent requests to a store; None for a directory of this machine."""
    if fs.place_of(root).reads_are_free:
        yield None
        return
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(_REQUESTS_AT_ONCE) as threads:
        yield threads


_Findings: TypeAlias = "Iterator[Discovered | _Findings]"
"""Units and possible files; an iterator among them has the findings in a directory, which isn't read yet."""


def _flatten(found: _Findings) -> Iterator[Discovered]:
    """Yield findings depth first: those inside a directory follow it."""
    # A stack of iterators instead of recursion: a tree may be deeper than Python's stack.
    opened = [found]
    while opened:
        candidate = next(opened[-1], None)
        if candidate is None:
            opened.pop()
        elif isinstance(candidate, Iterator):
            opened.append(candidate)
        else:
            yield candidate


def _find(root: str, walk: Walk) -> _Findings:
    """Yield findings at a path: units, and files that may be some."""
    for candidate in candidates(root, walk):
        if isinstance(candidate, str):
            yield candidate
        else:
            yield from _find_inside(candidate, root, walk)


def _find_inside(unit: Unit, root: str, walk: Walk) -> _Findings:
    """Yield a unit, and the checkpoints inside it: the directory of a run may be a checkpoint, too."""
    nested = _nested_checkpoints(unit, walk)
    yield unit, bool(nested)
    if walk.recursive or unit.path == root:
        yield from (_find(path, walk) for path in nested if not is_excluded(path, walk))


def _nested_checkpoints(unit: Unit, walk: Walk) -> list[str]:
    """Return the directories directly inside a unit that are checkpoints of their own."""
    if unit.format is not None and unit.format.takes_in:
        return []
    try:
        if not stat.S_ISDIR(fs.lstat(unit.path).st_mode):
            return []
        entries = scan(unit.path).values()
    except (OSError, NotFound):  # an index that is missing, or a directory that was removed meanwhile
        return []
    nested: list[str] = []
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            try:
                if unit_at(entry.path) is not None:
                    nested.append(entry.path)
            except CheckpointError as error:
                report(error, walk)
    return nested


_MAX_LEVELS = 4
"""Depth of a part in a checkpoint's directory: ``checkpoint-4/global_step4/…``."""

_MAX_COUNTED = 100
"""Checkpoints in a directory that are counted."""


class CheckpointPlace(NamedTuple):
    """Place of a checkpoint: its directory, its name, and the names of all its members."""

    directory: str
    name: str
    names: frozenset[str] = frozenset()

    @property
    def path(self) -> str:
        """Return its path as people write it."""
        return shown(os.path.join(self.directory, self.name))


def place_of(path: str) -> CheckpointPlace:
    """Return directory and name of a path, which needn't be a checkpoint."""
    directory, name = os.path.split(path)
    return CheckpointPlace(directory or os.curdir, name, frozenset({name}))


def resolve_checkpoint(path: str) -> CheckpointPlace:
    """Return the place of the checkpoint at a path; a symlink means its target, a part its whole."""
    path = without_trailing_slashes(path)
    if fs.islink(path):
        path = _resolved_path(path)
    elif not fs.lexists(path) and fs.islink(path + INDEX):
        path = _resolved_path(path + INDEX)
    elif os.path.basename(path) in (os.curdir, os.pardir):
        path = fs.realpath(path)
    unit = _set_containing(path) or unit_at(path)
    if unit is not None:
        unit = _enclosing_checkpoint(unit)
    else:
        unit = _enclosing_checkpoint(Unit(path, (os.path.basename(path),), None))
        if unit.path == path or not fs.lexists(path):
            raise _no_checkpoint_error(path)
    directory = os.path.dirname(unit.path) or os.curdir
    return CheckpointPlace(directory, os.path.basename(unit.path), frozenset(unit.members))


def _resolved_path(path: str) -> str:
    real = fs.realpath(path)
    return real if os.path.isabs(path) else os.path.relpath(real)


def _set_containing(path: str) -> Unit | None:
    """Return the set of files in a directory that one of them belongs to."""
    directory, name = os.path.split(path)
    # Any file of a set, such as those of a TensorFlow prefix, means the whole set.
    try:
        entries = scan(directory or os.curdir)
    except CheckpointError:
        return None
    if name not in entries:
        return None
    for format in set_formats():
        for unit in format.units(directory or os.curdir, entries):
            if name in unit.members:
                return unit
    return None


def _enclosing_checkpoint(unit: Unit) -> Unit:
    """Return the checkpoint that another is a part of, as a Trainer's directory is around its weights."""
    directory = fs.abspath(unit.path)
    for level in range(_MAX_LEVELS):
        directory = fs.dirname(directory)
        try:
            enclosing = unit_at(directory) if fs.dirname(directory) != directory else None
        except AccessDenied:
            if level == 0:
                raise
            break  # a directory that can't be listed is no checkpoint of this user
        if enclosing is None or enclosing.format is None:
            continue
        # A file directly in a checkpoint's directory is a part of it. A directory inside is one only if the
        # format has directories, or takes in other checkpoints.
        is_direct_file = level == 0 and not fs.isdir(unit.path)
        is_whole = (
            isinstance(enclosing.format, StepDirectory) or traits_of(enclosing.format.name).has_directories
        )
        if unit.format is None and not (is_direct_file or is_whole):
            continue  # a directory in a run's own is none of its parts
        if is_direct_file or enclosing.format.takes_in or is_whole:
            path = directory if fs.isabs(unit.path) else os.path.relpath(directory)
            unit = enclosing._replace(path=path)
    return unit


def _no_checkpoint_error(path: str) -> CheckpointError:
    count = sum(1 for _ in islice(discover(path, Walk(recursive=False)), _MAX_COUNTED))
    if count:
        checkpoints = (
            f"{count} or more checkpoints" if count == _MAX_COUNTED else counted(count, "checkpoint")
        )
        return NotACheckpoint(
            path, f"contains {checkpoints}, but isn't one itself", expected="name one of them"
        )
    if os.path.basename(path) == tf_state.NAME and fs.isfile(path):
        return NotACheckpoint(path, "only lists checkpoints", expected="name one of them")
    return NotACheckpoint(path, "not a checkpoint or part of one")
