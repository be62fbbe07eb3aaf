"""Watches directories: new checkpoints are verified, once while unchanged, and steps follow.

A look reads the status of each file. If files have changed, and are then the same at two looks in a row, the
directory is surveyed as by ``list`` and ``prune``. Polling also notices files that other machines write to
NFS or Lustre, which file system events don't.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from glob import escape
from hashlib import blake2b
from importlib.metadata import version
from itertools import chain, repeat
from typing import Any

from ckpttool.core.errors import AccessDenied, CheckpointError, UsageError, from_os_error
from ckpttool.core.options import attribute_names
from ckpttool.core.report import Problem
from ckpttool.core.result import document_of
from ckpttool.core.text import file_size
from ckpttool.formats.discovery import OWN_PREFIX
from ckpttool.ops.verdict import Safety, Verification
from ckpttool.runs.entry import Entry
from ckpttool.runs.look import NOT_FINITE, FullRead, FullReader, Progress, no_progress
from ckpttool.runs.pointers.kinds import Pointers
from ckpttool.runs.pointers.search import temporary_for
from ckpttool.runs.reasons import Code, code_of
from ckpttool.runs.scope import Scope
from ckpttool.runs.survey import Survey, survey_directory
from ckpttool.runs.writers import (
    DEAD_WRITER_SECONDS,
    DIRECTORY_SETTLE_SECONDS,
    SYSTEM,
    WaitClock,
    written_inside,
)
from ckpttool.storage import fs
from ckpttool.storage.directories import write_atomically
from ckpttool.storage.held import holding
from ckpttool.storage.work import Advance
from ckpttool.transaction.files import Contents
from ckpttool.transaction.lock import BUSY, WATCH_LOCK, lock_directory
from ckpttool.transaction.paths import require_directory, shown, without_trailing_slashes
from ckpttool.transaction.state_dir import read_own, state_dir_of

RETRY_SECONDS = 60
"""Seconds until a failure is retried without a change: a disk may have room by then."""
RECORD = ".ckpttool-watch.json"
"""Record of valid checkpoints, so that the next watch doesn't read them again."""
_MAX_RECORD = 1 << 26
VERIFY, LOOK = "verify", "look"
VALID, FAILED, WARNING = "valid", "failed", "warning"
_CHANGED = "it changed while it was verified"


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchEvent:
    """Something that a watch did, or that failed.

    Attributes:
        directory: The directory that is watched.
        path: Path of a checkpoint, or a directory.
        step: ``look``, ``verify``, or the name of another step.
        status: One word: ``valid``, ``failed``, ``warning``, or one of the step's own.
        words: Description for a log; empty for failures and warnings.
        to: Its new path, that of its copy, or the tracker that has it.
        nbytes: Bytes that were verified, sent or freed.
        safety: Safety of loading the checkpoint, if it was verified.
        reason: Failure or warning.
    """

    directory: str
    path: str
    step: str
    status: str
    words: str = ""
    to: str | None = None
    nbytes: int | None = None
    safety: str | None = None
    reason: str | None = None

    def document(self) -> dict[str, Any]:
        return document_of(self, "directory", "path", "step", "status", "to", "bytes", "safety", "reason")


Emit = Callable[[WatchEvent], object]


class StopRequested(Exception):
    """Raised between two actions to end the watch."""


Judgement = tuple[Verification, str | None]
"""A checkpoint's verdict, and its problem by the options of the watch, or None."""
Verify = Callable[[Entry, Progress], Judgement]


@dataclass(frozen=True, slots=True)
class StepInput:
    """Input of a step: valid checkpoints, and the means to report and to read.

    Attributes:
        root: The directory.
        entries: Its valid checkpoints, as they were verified.
        bad: Paths of checkpoints that failed, such as damaged ones.
        waiting: Paths of checkpoints that weren't verified yet.
        protected: Paths of checkpoints that no step may remove: an earlier step couldn't copy them.
        reader: Cache of checkpoints that were already read in full.
        emit: Reports an event; the directory is added.
        progress: Progress of reading; raises ``StopRequested`` before an action begins.
    """

    root: str
    entries: tuple[Entry, ...]
    bad: tuple[str, ...]
    waiting: tuple[str, ...]
    protected: tuple[str, ...]
    reader: FullReader
    emit: Callable[..., object]
    progress: Progress

    @property
    def excluded(self) -> tuple[str, ...]:
        """Return globs of checkpoints that aren't valid."""
        return tuple(map(escape, (*self.bad, *self.waiting)))


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of a step.

    Attributes:
        is_done: Whether the next step may follow.
        renames: New paths by old ones.
        protected: Paths of checkpoints that later steps may not remove.
        is_pending: Whether it is tried again later, though the next step may follow.
    """

    is_done: bool = True
    problems: tuple[Problem, ...] = ()
    warnings: tuple[str, ...] = ()
    renames: Mapping[str, str] = field(default_factory=dict)
    protected: tuple[str, ...] = ()
    is_pending: bool = False


Step = Callable[[StepInput], StepResult]
Statuses = Mapping[str, tuple[int, int, int, int]]
"""Device, inode, size and time of files, by their paths."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchRequest(Scope):
    """Request of ``watch``: a directory, its verification, and its steps.

    Attributes:
        directory: Directory into which checkpoints are saved.
        verify: Verifies a checkpoint.
        verify_options: Options of ``verify`` as text; with other options, checkpoints are verified again.
        steps: Steps on valid checkpoints by name, in order.
        jobs: Number of threads; None for the processors available.
    """

    directory: str
    verify: Verify
    verify_options: str = ""
    steps: Mapping[str, Step] = field(default_factory=dict)
    jobs: int | None = None


@dataclass(frozen=True, slots=True)
class _Verdict:
    """Verdict on a checkpoint, with the files that were verified.

    Attributes:
        contents: Statuses of the files: if they change, the verdict is void.
        problem: Why it fails; None if it is valid.
        is_recordable: Whether the next watch needn't verify it: it is valid without NaN and infinities.
    """

    contents: Contents
    problem: str | None
    is_recordable: bool


class DirectoryWatch:
    """Watch of one directory, which holds its lock; a context.

    Args:
        emit: Called with events; a lasting problem is reported once.
        is_ending: Returns whether the user has asked to end.

    Raises:
        CheckpointError: The directory doesn't exist, or is watched already.
    """

    def __init__(
        self,
        request: WatchRequest,
        emit: Emit,
        *,
        is_ending: Callable[[], bool] = lambda: False,
        progress: Progress = no_progress,
        clock: WaitClock = SYSTEM,
    ) -> None:
        self.has_seen_damage = False
        self._request, self._emit, self._is_ending = request, emit, is_ending
        self._progress, self._clock = progress, clock
        self._lock = ExitStack()
        self._held: tuple[int, int] | None = None
        self._seen: Statuses = {}
        self._surveyed: dict[str, tuple[int, int, int, int]] = {}
        self._due = float("inf")
        self._verdicts: dict[str, _Verdict] = {}
        self._reader = FullReader(request.jobs, self._interruptible)
        self._is_pending = True
        self._problems: dict[str, Mapping[str, str]] = {}
        self._warned: set[str] = set()
        with holding(request.directory):
            self.root = without_trailing_slashes(require_directory(request.directory))
            self._place = fs.realpath(self.root)
            self._hold()
            self._record = self._read_record()

    def __enter__(self) -> DirectoryWatch:
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.close()

    @property
    def has_problems(self) -> bool:
        """Return whether damage was seen, or the last try of something failed."""
        return self.has_seen_damage or any(self._problems.values())

    def look(self, *, is_last: bool = False) -> None:
        """Look at the directory, and run due steps; the last look reports unfinished checkpoints as failed.

        Raises:
            StopRequested: The user has asked for it.
        """
        with holding(self.root):
            self._look(is_last=is_last)

    def _look(self, *, is_last: bool) -> None:
        previous = self._seen
        try:
            self._hold()
            self._seen = _statuses(self.root)
        except CheckpointError as failure:
            self._seen, self._surveyed = {}, {}
            self._report_problems(LOOK, {shown(self.root): failure.reason})
            return
        # A file is settled if its status is that of the look before. Settled changes and vanished files cause
        # a survey; a file that is being written changes from look to look and costs only its status. Later it
        # settles, and causes a survey then, as ``_surveyed`` has the statuses of settled files alone.
        seen, known = self._seen, self._surveyed
        settled = {path for path, status in seen.items() if previous.get(path) == status}
        is_changed = known.keys() - seen.keys() or any(known.get(path) != seen[path] for path in settled)
        if not (is_changed or is_last or self._clock.monotonic() >= self._due):
            return
        self._due = float("inf")
        self._surveyed = {path: seen[path] for path in settled}
        try:
            self._work(previous, is_last=is_last)
        except (CheckpointError, UsageError) as failure:
            self._report_problems(LOOK, {shown(self.root): _reason(failure)})
            self._retry_in(RETRY_SECONDS)
        finally:
            self._write_record()

    def _hold(self) -> None:
        """Hold the lock of the directory; lock again if the path leads to another directory by now."""
        try:
            status = fs.stat(self.root)
        except OSError as error:
            raise from_os_error(error, self.root) from error
        require_same_place(self.root, self._place)
        identity = status.st_dev, status.st_ino
        if identity == self._held:
            return
        self._lock.close()
        self._held = None
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(self._clock.time()))
        holder = f"pid {os.getpid()} on {socket.gethostname()} since {moment}"
        try:
            self._lock.enter_context(lock_directory(self.root, WATCH_LOCK, holder))
        except AccessDenied as refusal:
            if refusal.code == BUSY or self._request.steps:  # a watch without steps may read without a lock
                raise
        self._held = identity

    # A survey, and the verdicts ---------------------------------------------------------------------

    def _work(self, previous: Statuses, *, is_last: bool) -> None:
        # A checkpoint is verified when no temporary file shows a writer, none of its files changed since the
        # previous look, and none of its parts is missing; an incomplete one is waited for until nothing has
        # changed for DEAD_WRITER_SECONDS. Failures are retried after RETRY_SECONDS, as their causes may end
        # without any change of a file.
        surveyed = self._survey()
        now = self._clock.time()
        unfinished = _being_written(surveyed, now)
        waiting: dict[str, str] = {}
        faulty: dict[str, str] = {}
        new: list[Entry] = []
        for entry in surveyed.entries:
            if entry.path in unfinished or not _has_settled(entry, previous):
                waiting[entry.path] = "it is still being written"
            elif entry.is_incomplete and not is_last and now - entry.modified_ns / 1e9 < DEAD_WRITER_SECONDS:
                waiting[entry.path] = str(entry.fault)
            elif entry.fault is not None:
                faulty[entry.path] = str(entry.fault)
                self.has_seen_damage |= entry.fault.code is Code.DAMAGED
            elif not self._has_verdict(entry):
                new.append(entry)
        if is_last:
            faulty |= {path: f"not verified: {why}" for path, why in waiting.items()}
        elif waiting or faulty or surveyed.errors:
            self._retry_in(RETRY_SECONDS)
        by_path = {entry.path: entry for entry in surveyed.entries}
        self._verdicts = {path: one for path, one in self._verdicts.items() if path in by_path}
        bad = {path: one.problem for path, one in self._verdicts.items() if one.problem is not None}
        self._report_problems(LOOK, {shown(error.path): error.reason for error in surveyed.errors})
        self._report_problems(VERIFY, {**bad, **faulty})
        for entry in new:
            problem = self._verify(entry)
            if problem == _CHANGED and not is_last:
                waiting[entry.path] = problem
            elif problem is not None:
                bad[entry.path] = problem
                self._report_problems(VERIFY, {**bad, **faulty})
        bad |= faulty
        valid = tuple(one for path, one in by_path.items() if path not in {*waiting, *bad})
        if valid and (self._is_pending or not {one.path for one in new} <= {*waiting, *bad}):
            self._run_steps(valid, tuple(bad), tuple(path for path in waiting if path not in bad))

    def _survey(self) -> Survey:
        scope = {name: getattr(self._request, name) for name in attribute_names(Scope)}
        surveyed = survey_directory(self.root, Scope(**scope), enters_root=True)
        groups = tuple(one for one in surveyed.groups if one.entries[0].unit.path != surveyed.root)
        if surveyed.groups and not groups:
            raise UsageError(f"{shown(self.root)} is a checkpoint itself (name the directory that it is in)")
        return surveyed._replace(groups=groups)

    def _has_verdict(self, entry: Entry) -> bool:
        """Return whether a checkpoint was verified by this watch or an earlier one, and is unchanged."""
        judged = self._verdicts.get(entry.path)
        if judged is not None and judged.contents.is_same_as(entry.contents):
            return True
        if self._digest(entry.path, entry.contents) not in self._record:
            return False
        self._verdicts[entry.path] = _Verdict(entry.contents, None, is_recordable=True)
        self._reader.remember(entry, FullRead(None, is_finite=True))
        return True

    def _verify(self, entry: Entry) -> str | None:
        """Verify a checkpoint, and return its problem."""
        self._raise_if_ending()
        try:
            verification, problem = self._request.verify(entry, self._interruptible)
        except CheckpointError as failure:  # no verdict: it is verified again
            if not entry.is_unchanged:
                return _CHANGED
            self._verdicts[entry.path] = _Verdict(Contents(), failure.reason, is_recordable=False)
            self._retry_in(RETRY_SECONDS)
            return failure.reason
        if not entry.is_unchanged:
            return _CHANGED
        if problem is not None:
            # Ctrl-C also ends the process of a prediction, whose failure doesn't mean damage then.
            self._raise_if_ending()
            self.has_seen_damage = True
        is_sound = verification.is_valid and not any(one.code in NOT_FINITE for one in verification.findings)
        if is_sound:
            self._reader.remember(entry, FullRead(None, is_finite=True))
        self._verdicts[entry.path] = _Verdict(entry.contents, problem, is_sound and problem is None)
        if problem is None:
            safety = verification.safety.value
            judged = "safety unknown" if verification.safety is Safety.UNKNOWN else safety
            words = f"valid, {judged}, {file_size(entry.nbytes)}"
            self._event(VERIFY, VALID, entry.path, words, safety=safety, nbytes=entry.nbytes)
        return problem

    # The steps --------------------------------------------------------------------------------------

    def _run_steps(self, entries: tuple[Entry, ...], bad: tuple[str, ...], waiting: tuple[str, ...]) -> None:
        """Run the steps on valid checkpoints, one after the other, until one fails."""
        # ``_is_pending`` is set until all steps are done: if one fails or raises, all run again next time,
        # also without new checkpoints. Steps skip what is done already.
        self._is_pending, is_pending = True, False
        known = {*bad, *waiting}
        protected: tuple[str, ...] = ()
        for name, step in self._request.steps.items():
            self._raise_if_ending()
            event = partial(self._event, name)
            try:
                step_input = StepInput(
                    self.root, entries, bad, waiting, protected, self._reader, event, self._uninterruptible
                )
                result = step(step_input)
            except (CheckpointError, UsageError) as failure:
                path = failure.path if isinstance(failure, CheckpointError) else self.root
                result = StepResult(False, (Problem(shown(path), _reason(failure)),))
            self._report_problems(
                name, {one.path: str(one.message) for one in result.problems if one.path not in known}
            )
            for warning in result.warnings:
                if warning not in self._warned:
                    self._warned.add(warning)
                    event(WARNING, shown(self.root), reason=warning)
            if not result.is_done:
                self._retry_in(RETRY_SECONDS)
                return
            if result.renames:
                entries = self._follow_renames(entries, result.renames)
            protected += result.protected
            is_pending |= result.is_pending
        self._is_pending = is_pending
        if is_pending:
            self._retry_in(RETRY_SECONDS)

    def _follow_renames(self, entries: tuple[Entry, ...], renames: Mapping[str, str]) -> tuple[Entry, ...]:
        """Return checkpoints under their new names; those with changed files are verified again."""
        # A rename by this watch must not cause another full read: files with the same device, inode, size and
        # time are those that were verified. An index or a trainer's state may be rewritten by the rename, and
        # is another file since: its checkpoint is verified anew.
        there = {entry.path: entry for entry in self._survey().entries}
        pairs = [(old, there.get(renames.get(old.path, old.path))) for old in entries]
        same = [(old, new) for old, new in pairs if new and _inodes(new.contents) == _inodes(old.contents)]
        judged = {new.path: replace(self._verdicts[old.path], contents=new.contents) for old, new in same}
        reads = [(new, self._reader.recall(old)) for old, new in same]
        self._verdicts = {path: one for path, one in self._verdicts.items() if path not in renames} | judged
        for new, read in reads:
            if read is not None:
                self._reader.remember(new, read)
        found = (new for _, new in pairs if new is not None)
        return tuple(new for new in found if new.path in judged or self._verify(new) is None)

    # Events and records ---------------------------------------------------------------------------

    def _event(self, step: str, status: str, path: str, words: str = "", **more: Any) -> None:
        directory = shown(self.root)
        self._emit(WatchEvent(directory=directory, step=step, status=status, path=path, words=words, **more))

    def _report_problems(self, step: str, problems: Mapping[str, str]) -> None:
        """Record the problems of a step, and report the new ones."""
        known = self._problems.get(step, {})
        self._problems[step] = dict(problems)
        for path, problem in problems.items():
            if known.get(path) != problem:
                self._event(step, FAILED, path, reason=problem)

    def _retry_in(self, seconds: float) -> None:
        self._due = min(self._due, self._clock.monotonic() + seconds)

    def _raise_if_ending(self) -> None:
        if self._is_ending():
            raise StopRequested

    @contextmanager
    def _uninterruptible(self, what: str, total: int | None) -> Iterator[Advance]:
        """Show the progress of an action that can't be interrupted; raise ``StopRequested`` before it."""
        self._raise_if_ending()
        with self._progress(what, total) as advance:
            yield advance

    @contextmanager
    def _interruptible(self, what: str, total: int | None) -> Iterator[Advance]:
        """Show the progress of reading, which ``StopRequested`` may interrupt anywhere."""

        def advance(done: int) -> None:
            self._raise_if_ending()
            show(done)

        with self._uninterruptible(what, total) as show:
            yield advance

    def _digest(self, path: str, contents: Contents) -> str:
        """Return a digest of a checkpoint's path and its files' inodes, sizes and times."""
        # Device numbers are left out: they may change with a mount. The record has digests instead of names,
        # as ``prune`` keeps checkpoints that a file in the directory names.
        files = sorted((one.path, one.inode, one.size, one.mtime_ns) for one in contents.files)
        text = repr((os.path.relpath(path, shown(self.root)), files))
        return blake2b(text.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()

    def _read_record(self) -> frozenset[str]:
        """Return the digests of checkpoints that an earlier watch verified with the same options."""

        def parse(document: dict[str, Any]) -> frozenset[str]:
            return frozenset(map(str, document["verified"] if document["asked"] == self._verify_key else ()))

        with suppress(CheckpointError):  # of another user, or damaged: all is verified again
            around, suffix = state_dir_of(self.root)
            record = read_own(
                self.root, around, RECORD + suffix, kind="a record", parse=parse, most=_MAX_RECORD
            )
            return record or frozenset()
        return frozenset()

    def _write_record(self) -> None:
        judged = self._verdicts.items()
        record = frozenset(self._digest(path, one.contents) for path, one in judged if one.is_recordable)
        if record != self._record:
            self._record = record
            around, suffix = state_dir_of(self.root)
            document = {"asked": self._verify_key, "verified": sorted(record)}
            with suppress(OSError):  # the next watch verifies all again
                write_atomically(os.path.join(around, RECORD + suffix), json.dumps(document).encode())

    @property
    def _verify_key(self) -> str:
        return f"{version('ckpttool')} {self._request.verify_options}"


def watch(
    watches: Iterable[DirectoryWatch], wait: Callable[[float], bool], *, interval: float, once: bool = False
) -> None:
    """Look at directories periodically; with ``once``, look twice and end.

    Args:
        watches: The directories.
        wait: Waits for seconds; returns whether to go on.
        interval: Seconds between two looks.
        once: Whether to end as soon as all checkpoints were verified.
    """
    # The second look follows soon: files that are there at the start settle at once.
    with suppress(StopRequested):
        for seconds in chain((min(interval, DIRECTORY_SETTLE_SECONDS),), repeat(interval)):
            for one in watches:
                one.look()
            if not wait(seconds):
                return
            if once:
                for one in watches:
                    one.look(is_last=True)
                return


def require_same_place(path: str, place: str) -> None:
    """Raise AccessDenied if a path's links lead to another directory than when the watch began."""
    if (now := fs.realpath(path)) != place:
        raise AccessDenied(path, f"it points to {now} now", expected=f"was {place}")


def _statuses(root: str) -> Statuses:
    """Return the statuses of files in a tree, except ckpttool's own."""
    found: dict[str, tuple[int, int, int, int]] = {}

    def fail(error: OSError) -> None:
        if error.filename == root:  # errors below are reported by the survey
            raise from_os_error(error, root) from error

    for directory, subdirectories, names in fs.walk(root, fail):
        subdirectories[:] = [name for name in subdirectories if not name.startswith(OWN_PREFIX)]
        for path in (os.path.join(directory, name) for name in names if not name.startswith(OWN_PREFIX)):
            with suppress(OSError):  # removed since it was listed
                status = fs.lstat(path)
                found[os.path.normpath(path)] = (
                    status.st_dev,
                    status.st_ino,
                    status.st_size,
                    status.st_mtime_ns,
                )
    return found


def _being_written(surveyed: Survey, now: float) -> frozenset[str]:
    """Return the paths of checkpoints that temporary files in or next to them show to be being written."""
    pointed = Pointers(surveyed.root, surveyed.groups).protections().reasons
    return frozenset(
        entry.path
        for entry in surveyed.entries
        if temporary_for(entry.name) is not None
        or written_inside(entry, now) is not None
        or any(code_of(reason) is Code.BEING_WRITTEN for reason in pointed.get(entry.path, ()))
    )


def _has_settled(entry: Entry, previous: Statuses) -> bool:
    """Return whether all files of a checkpoint are unchanged since the previous look."""
    return all(
        previous.get(os.path.normpath(os.path.join(entry.directory, file.path)))
        == (file.device, file.inode, file.size, file.mtime_ns)
        for file in entry.contents.files
        if not os.path.basename(file.path).startswith(OWN_PREFIX)
    )


def _inodes(contents: Contents) -> list[tuple[int, int, int, int]]:
    """Return device, inode, size and time of files, without their names."""
    return sorted((one.device, one.inode, one.size, one.mtime_ns) for one in contents.files)


def _reason(failure: CheckpointError | UsageError) -> str:
    return failure.reason if isinstance(failure, CheckpointError) else str(failure)
