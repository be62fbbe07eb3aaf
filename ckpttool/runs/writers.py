"""Writers: detects saves that are being written, and waits until they are finished."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from ckpttool.core.errors import CheckpointError
from ckpttool.core.naming import parse_name
from ckpttool.formats import suffix_format
from ckpttool.formats.discovery import OWN_PREFIX, Globs, unit_at
from ckpttool.formats.tensorflow.prefix import DATA, INDEX
from ckpttool.runs.entry import Entry
from ckpttool.runs.look import look_at
from ckpttool.runs.pointers.search import names_in, temporary_for
from ckpttool.runs.reasons import Code, Reason
from ckpttool.runs.survey import Survey
from ckpttool.storage import fs
from ckpttool.transaction.files import Fingerprint, contents
from ckpttool.transaction.paths import shown

POLL_SECONDS = 0.25
"""Seconds between looks at files that are being written."""

SETTLE_SECONDS = 1.0
"""Seconds without a change after which a readable file counts as finished."""

DIRECTORY_SETTLE_SECONDS = 2.0
"""Seconds without a change after which a directory counts as finished: writers pause between files."""

DEAD_WRITER_SECONDS = 600
"""Seconds without a change after which a writer counts as dead, and isn't waited for."""

State = tuple[Fingerprint, ...] | None
"""Statuses of a save's files; None if it doesn't exist."""


def written_inside(entry: Entry, now: float) -> Reason | None:
    """Return the reason if a writer's temporary file is in a readable checkpoint directory, or None."""
    # A killed writer leaves its temporary file for good, so an old one is no sign of a writer.
    for file in entry.contents.files:
        name = os.path.basename(file.path)
        is_inside = os.sep in file.path and temporary_for(name) is not None
        if is_inside and now - file.mtime_ns / 1e9 < DEAD_WRITER_SECONDS:
            return Reason(Code.BEING_WRITTEN, f"being written: it contains {name}")
    return None


def temporary_saves(surveyed: Survey, exclude: Sequence[str]) -> Iterator[tuple[int | None, UnfinishedSave]]:
    """Yield the saves under writers' temporary names in the directories of a survey, with their steps."""
    root = surveyed.root
    if any(entry.unit.path == root and not entry.holds_others for entry in surveyed.entries):
        return
    blanks = {entry.fields.blank for entry in surveyed.entries}
    globs = Globs(exclude, root)
    for directory in sorted({root, *(entry.directory for entry in surveyed.entries)}):
        for name, file in names_in(directory, surveyed.snapshot).items():
            final = temporary_for(name)
            if final is None or any(globs.matching(os.path.join(directory, one)) for one in (name, final)):
                continue
            fields = parse_name(final)
            is_directory = file.is_dir(follow_symlinks=False)
            is_of_series = fields.blank in blanks or suffix_format(final) is not None
            # Any ``x.tmp`` may be another program's. A directory, a name like those of the series or with a
            # format's suffix, and a part of a TensorFlow bundle are probably checkpoints.
            is_part = final.endswith(INDEX) or DATA.fullmatch(final) is not None
            if not is_directory and not is_of_series and not is_part:
                continue
            path = os.path.join(directory, name)
            try:
                inside, modified_ns = contents(directory, [name]), fs.lstat(path).st_mtime_ns
            except OSError:  # finished or removed meanwhile
                continue
            above, name = os.path.split(shown(path))
            newest = max(modified_ns, inside.modified_ns)
            save = UnfinishedSave(
                shown(path), "being written", above or os.curdir, (name,), inside.files, modified_ns=newest
            )
            yield fields.step, save


class WaitClock(Protocol):
    """Clock and sleep."""

    def time(self) -> float:
        """Return the seconds since 1970, comparable with files' times."""

    def monotonic(self) -> float:
        """Return seconds that never decrease."""

    def sleep(self, seconds: float, /) -> None:
        """Wait."""


class _SystemClock:
    """Clock of the computer."""

    def time(self) -> float:
        """Return the seconds since 1970."""
        return time.time()

    def monotonic(self) -> float:
        """Return seconds that never decrease."""
        return time.monotonic()

    def sleep(self, seconds: float, /) -> None:
        """Wait."""
        time.sleep(seconds)


SYSTEM = _SystemClock()


@dataclass(frozen=True, slots=True)
class UnfinishedSave:
    """Save that may be unfinished.

    Attributes:
        path: Its path.
        why: Sign of the writer, or its fault.
        directory: Its directory.
        members: Names of its files and directories there.
        seen: Statuses of its files at the survey.
        is_whole: Whether it is readable, and only was changed a moment ago.
        modified_ns: Time of its newest file in nanoseconds since 1970, by its server's clock.
    """

    path: str
    why: str
    directory: str
    members: tuple[str, ...]
    seen: State
    is_whole: bool = False
    modified_ns: int = 0

    @property
    def settle_seconds(self) -> float:
        """Return the seconds without a change after which it counts as finished."""
        return DIRECTORY_SETTLE_SECONDS if fs.isdir(self.path) else SETTLE_SECONDS


Tell = Callable[[str], None]


class WriterWait:
    """Waits for writers, and records the changes that it sees.

    Args:
        seconds: Limit on the time that it waits in all.
        tell: Called with a message for each save, once.
        clock: Clock.
    """

    def __init__(self, seconds: float, tell: Tell, clock: WaitClock) -> None:
        self.clock = clock
        self._seconds = seconds
        self._tell = tell
        self._begun = clock.monotonic()
        self._announced: set[str] = set()
        self._since: dict[str, tuple[State, float]] = {}
        self._changed: set[str] = set()
        self.writing: set[str] = set()
        self._has_checked_growth = False
        self.waited_for: list[UnfinishedSave] = []
        self.waited = 0.0

    @property
    def remaining(self) -> float:
        """Return the seconds until the limit."""
        return self._seconds - (self.clock.monotonic() - self._begun)

    def wait(self, unsettled: Sequence[UnfinishedSave]) -> bool:
        """Wait until a save is finished, or the names around change; return whether to survey again.

        Returns:
            False if no save is unsettled, or no time is left.
        """
        pending = [save for save in unsettled if not self._is_quiet(save)]
        if not pending or self.remaining <= 0:
            return False
        seconds = max(self.remaining, 0) if self._announced else self._seconds
        for save in pending:
            if save.path not in self._announced:
                self._announced.add(save.path)
                self.waited_for.append(save)
                self._tell(f"waiting up to {seconds:.0f} s for {save.path}: {save.why}")
        # An unfinished save is finished if it has changed and is sound; a readable one, if it doesn't change
        # for some seconds. A new or renamed entry next to them may be the end of a save under a temporary
        # name.
        started = self.clock.monotonic()
        seen = {save.path: save.seen for save in pending}
        names = _names_around(pending)
        # A list, not a generator: each save is checked in each round, even if another one has finished.
        while self.remaining > 0 and not any([self._has_finished(save, seen) for save in pending]):
            self.clock.sleep(min(POLL_SECONDS, self.remaining))
            if _names_around(pending) != names:
                break
        self.waited += self.clock.monotonic() - started
        return True

    def growing(self, quiet: Sequence[UnfinishedSave]) -> list[UnfinishedSave]:
        """Return saves that change although their times are old; the first call waits a second."""
        # The clock of a file server may be behind ours, so that files just written look old.
        is_first, self._has_checked_growth = not self._has_checked_growth, True
        if quiet and is_first and self.remaining > 0:
            before = {save.path: save.seen for save in quiet}
            self.clock.sleep(min(SETTLE_SECONDS, self.remaining))
            self.writing.update(save.path for save in quiet if _state(save) != before[save.path])
        return [
            replace(save, why=f"{save.why}, and is changing") for save in quiet if save.path in self.writing
        ]

    def changed_meanwhile(self, unsettled: Iterable[UnfinishedSave]) -> list[UnfinishedSave]:
        """Return readable saves that changed during the wait: they may not be complete."""
        return [
            save
            for save in unsettled
            if save.is_whole and save.path in self._changed and not self._is_quiet(save)
        ]

    def _has_finished(self, save: UnfinishedSave, seen: dict[str, State]) -> bool:
        """Return whether a save has changed and is sound now; or was readable, and is quiet."""
        if save.is_whole:
            return self._is_quiet(save)
        before, seen[save.path] = seen[save.path], _state(save)
        now = seen[save.path]
        return now != before and (now is None or _is_sound(save.path))

    def _is_quiet(self, save: UnfinishedSave) -> bool:
        """Return whether a readable save has not changed for a moment."""
        if not save.is_whole:
            return False
        # Measured by this computer's clock from look to look: times of files are by a server's clock.
        now = self.clock.monotonic()
        state = _state(save)
        before, since = self._since.get(save.path, (save.seen, self.clock.monotonic()))
        if state != before:
            self._changed.add(save.path)
            since = self.clock.monotonic()
        self._since[save.path] = state, since
        return now - since >= save.settle_seconds


def _state(save: UnfinishedSave) -> State:
    try:
        return contents(save.directory, save.members).files
    except OSError:  # a part of it was removed
        return None


def _names_around(unsettled: Iterable[UnfinishedSave]) -> frozenset[str]:
    """Return the paths in the directories of saves."""
    paths: set[str] = set()
    for directory in {save.directory for save in unsettled}:
        try:
            paths.update(os.path.join(directory, name) for name in fs.listdir(directory))
        except OSError:  # removed meanwhile
            continue
    return frozenset(path for path in paths if not os.path.basename(path).startswith(OWN_PREFIX))


def _is_sound(path: str) -> bool:
    try:
        unit = unit_at(path)
        entry = None if unit is None else look_at(unit)
    except CheckpointError:  # it is being replaced
        return False
    return entry is not None and entry.is_sound
