"""Choice of the checkpoint to resume from, by one look at a directory: the newest intact, or the best."""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

from ckpttool.core.checkpoint import Granularity
from ckpttool.core.errors import (
    CheckpointError,
    NotACheckpoint,
    NotFound,
    UsageError,
    from_os_error,
)
from ckpttool.core.options import (
    EXECUTION_PANEL,
    SELECTION_PANEL,
    Depth,
    Mode,
    jobs_option,
    mode_option,
    option,
)
from ckpttool.core.report import Problem
from ckpttool.core.result import Result, document_of
from ckpttool.core.text import counted, seconds
from ckpttool.formats.opening import open_unit
from ckpttool.ops.resume import ResumeLevel, ResumeVerdict, resume_verdict
from ckpttool.runs.entry import Entry
from ckpttool.runs.look import FullReader
from ckpttool.runs.modes import check_mode, resolve_mode
from ckpttool.runs.pointers.kinds import BEING_WRITTEN
from ckpttool.runs.pointers.search import temporary_for
from ckpttool.runs.reasons import Code, Reason, code_of, fault
from ckpttool.runs.retention.rules import is_carried_on
from ckpttool.runs.saves import parts_of, series_of_saves
from ckpttool.runs.scope import Scope
from ckpttool.runs.series import is_flat, newest_first, tiers
from ckpttool.runs.survey import Survey, nothing_in, survey_directory
from ckpttool.runs.writers import (
    DEAD_WRITER_SECONDS,
    SETTLE_SECONDS,
    UnfinishedSave,
    temporary_saves,
    written_inside,
)
from ckpttool.storage import fs
from ckpttool.transaction.paths import shown, without_trailing_slashes

NO_STEP = "its step is unknown"
WORTH_WAITING = frozenset({Code.INCOMPLETE, Code.DAMAGED, Code.BEING_WRITTEN})
"""Codes of faults that a writer may still repair."""

_UNFINISHED = frozenset({Code.INCOMPLETE, Code.BEING_WRITTEN})
"""Codes of faults of a save that was never finished."""


_MAX_RIVALS = 3
"""Limit on names in one line."""


_OF_ENTRY = ("epoch", "step", "safety")


@dataclass(frozen=True, slots=True, repr=False)
class Latest(Result):
    """The newest intact checkpoint, or why there is none.

    Attributes:
        entry: The checkpoint; None if there is none.
        reason: Why there is none.
        passed_over: Checkpoints that are newer, or better, with the reasons against them.
        warnings: Doubts about the choice.
        journals: Pending journals of interrupted commands.
        waited: Seconds spent waiting for writers.
        waited_for: Paths of the saves that were waited for.
        best: Metric of the query.
        none_yet: Whether the directory has nothing but at most one unfinished save, as in a run's first job.
        resume: How a training resumes from it; None in a store, unless the query asks for it.
    """

    entry: Entry | None
    reason: str | None = None
    passed_over: tuple[Problem, ...] = ()
    warnings: tuple[str, ...] = ()
    journals: tuple[str, ...] = ()
    waited: float = 0.0
    waited_for: tuple[str, ...] = ()
    best: str | None = None
    none_yet: bool = False
    resume: ResumeVerdict | None = None

    @property
    def summary(self) -> str:
        """Return the path, or why there is none."""
        return self.path or f"none: {self.reason or 'no checkpoint'}"

    @property
    def path(self) -> str | None:
        """Return the path of the checkpoint, or None."""
        return None if self.entry is None else self.entry.path

    @property
    def value(self) -> float | None:
        """Return the checkpoint's value of the metric ``best``, or None without one."""
        return None if self.entry is None or self.best is None else comparable_value(self.entry, self.best)

    def document(self) -> dict[str, Any]:
        document = {
            "schema": "ckpttool.latest/1",
            "path": self.path,
            **document_of(self, *_OF_ENTRY, "resume", names={name: f"entry.{name}" for name in _OF_ENTRY}),
            "passed_over": [{"path": one.path, "why": one.message} for one in self.passed_over],
        }
        if self.best is not None:
            document |= document_of(self, "best", "value")
        if self.waited_for:
            document |= {"waited": round(self.waited, 3), "waited_for": [*self.waited_for]}
        return document


def _step(text: str) -> int:
    """Return a step; a round one may be written as ``1e5``."""
    with suppress(ValueError):
        step = float(text)
        if step.is_integer() and step >= 0:
            return int(text) if text.isdecimal() else int(step)
    raise UsageError(f"--before {text}: invalid step (a whole number, 0 or more)")


_selection = partial(option, panel=SELECTION_PANEL)
_execution = partial(option, panel=EXECUTION_PANEL)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatestQuery(Scope):
    """Criteria for the checkpoint.

    Attributes:
        best: Metric by which the best is chosen; None for the newest.
        mode: Whether low or high values of it are good; None decides by its name.
        before: Step before which it was saved; None for any.
        allow_unsafe: Whether it may run code when loaded.
        resume_exact: Whether a training must resume exactly from it.
        depth: Whether every byte of the answer is read, or only its structure.
        wait: Seconds to wait for checkpoints that are being written and would be chosen.
        missing_ok: Whether the directory may be missing, as before a run's first job.
        jobs: Number of threads.
    """

    best: str | None = _selection(
        "--best",
        metavar="METRIC",
        complete="metric",
        help="Print the checkpoint with the best METRIC instead.",
    )
    mode: Mode | None = mode_option(SELECTION_PANEL)
    before: int | None = _selection(
        "--before", metavar="STEP", help="Print the newest saved before this step.", parse=_step
    )
    allow_unsafe: bool = _selection(
        "--allow-unsafe", help="Also accept a checkpoint that runs code when loaded.", default=False
    )
    resume_exact: bool = _selection(
        "--resume-exact",
        help="Accept only checkpoints from which a training resumes exactly.",
        default=False,
    )
    depth: Depth = _execution(
        "--verify",
        help="Check only the structure of the result, or every byte. [default: full]",
        default="full",
    )
    wait: float = _execution(
        "--wait",
        metavar="TIME",
        help="Wait up to TIME (60 seconds, or 2m) until the newest is written.",
        parse=partial(seconds, is_lenient=True),
        default=0,
    )
    missing_ok: bool = _execution(
        "--missing-ok",
        help="If there is no checkpoint yet, print nothing and exit with 0.",
        default=False,
    )
    jobs: int | None = jobs_option()

    def __post_init__(self) -> None:
        if self.mode is not None and self.best is None:
            raise UsageError("--mode needs --best METRIC")
        check_mode(self.mode)


@dataclass(frozen=True, slots=True)
class SearchAnswer:
    """Result of one look at a directory.

    Attributes:
        latest: The answer.
        unsettled: Recent unfinished saves that may become a better choice.
        quiet: Unfinished saves with old times; they may be recent if a server's clock is wrong.
        unreadable: Paths that couldn't be read, with reasons.
        unsafe: Checkpoints that were rejected only as unsafe.
        rejected: Faulty candidates that come before the choice.
    """

    latest: Latest
    unsettled: Sequence[UnfinishedSave] = ()
    quiet: Sequence[UnfinishedSave] = ()
    unreadable: Sequence[tuple[str, str]] = ()
    unsafe: Sequence[Entry] = ()
    rejected: Sequence[Entry] = ()


@dataclass(frozen=True, slots=True)
class LatestSearch:
    """Search of a directory by a query.

    Attributes:
        directory: The directory.
        query: The query.
        now: Time in seconds since 1970.
        refused: Paths that changed while they were read, and are taken for unfinished.
        writing: Paths of saves that were seen to change.
        reader: Reads candidates in full; None for ``depth="quick"``.
    """

    directory: str | os.PathLike[str]
    query: LatestQuery
    now: float
    refused: frozenset[str]
    writing: frozenset[str] = frozenset()
    reader: FullReader | None = None

    def survey(self) -> Survey | NotFound:
        """Return the survey of the directory, or the error that it doesn't exist."""
        fs.refresh(os.fspath(self.directory))
        try:
            return survey_directory(self.directory, self.query)
        except NotFound as error:
            if fs.lexists(os.fspath(self.directory)):  # a log is missing, not the directory
                raise
            # A directory that doesn't exist yet is no error, but a dangling symlink in its path is one.
            path = without_trailing_slashes(os.fspath(self.directory))
            while path and not fs.lexists(path):
                path = os.path.dirname(path)
            if path and not fs.exists(path):
                raise from_os_error(FileNotFoundError(), path) from error
            return error

    def look(self, surveyed: Survey | NotFound, *, reads: bool) -> SearchAnswer:
        """Return the choice, and the unfinished saves that may become a better one."""
        if isinstance(surveyed, NotFound):
            return SearchAnswer(Latest(None, f"{surveyed.path}: {surveyed.reason}", none_yet=True))
        query = self.query
        surveyed = surveyed._replace(groups=series_of_saves(surveyed.groups))
        chosen, rejected = self._choice(surveyed, reads=reads)
        if chosen is not None and query.best is None:
            _require_newer(surveyed, chosen)
        known = {entry.path for entry, _ in rejected}
        unsound = [
            (entry, entry.fault)
            for group in surveyed.groups
            if not any(entry.is_sound for entry in group.entries)  # else an older one is the choice
            for entry in reversed(group.entries)
            if entry.path not in known and entry.fault
        ]
        unsettled = list(self._unsettled_better(surveyed, chosen, rejected, unsound))
        if chosen is not None:
            rejected += unsound
            lacking = _newer_but_lacking(surveyed, chosen, query.before) if query.best is None else ()
            rejected += [(entry, why) for entry, why in lacking if entry.path not in known]
        saves = surveyed.entries
        # A run's first job finds nothing, or its own first save unfinished. Then it may begin anew.
        is_begun = [one.fault is not None and code_of(one.fault) in _UNFINISHED for one in saves] in (
            [],
            [True],
        )
        none_yet = is_begun and not surveyed.journals
        return SearchAnswer(
            replace(self._answer(surveyed, chosen, rejected), none_yet=none_yet),
            [save for save in unsettled if self._is_recent(save)],
            [save for save in unsettled if not self._is_recent(save)],
            _unreadable_paths(surveyed, rejected),
            [entry for entry, why in rejected if code_of(why) is Code.UNSAFE],
            [entry for entry, _ in rejected],
        )

    def _choice(self, surveyed: Survey, *, reads: bool) -> tuple[Entry | None, list[tuple[Entry, str]]]:
        """Return the first candidate without a fault, and the candidates before it, each with its fault."""
        # Candidates are read in the order of preference, so that only one is read in full if it is intact.
        rejected = [(entry, NO_STEP) for entry in reversed(surveyed.entries) if self._lacks_step(entry)]
        for entry in self._candidates(surveyed):
            fault = self._fault(entry)
            if fault is None and self.reader is not None:
                # ``damage`` leaves out NaN in an optimizer's state or a single value: weights are fine then.
                read = self.reader.read(entry) if reads else self.reader.recall(entry)
                fault = None if read is None else read.damage
            if fault is None and self.query.resume_exact:
                fault = _inexact(entry)
            if fault is None:
                return entry, rejected
            rejected.append((entry, fault))
        return None, rejected

    def _candidates(self, surveyed: Survey) -> Iterator[Entry]:
        """Yield candidates in order of preference; a run's own directory comes after checkpoints in it."""
        best = self.query.best
        if best is None:
            yield from newest_first(surveyed.groups, self._may_be_chosen)
            return
        if all(entry.recorded_metric(best) is None for entry in surveyed.entries):
            return
        mode = resolve_mode(best, self.query.mode, "--best")
        sign = 1 if mode == "min" else -1
        by_value: dict[float, dict[str, list[Entry]]] = defaultdict(lambda: defaultdict(list))
        for entry in filter(self._may_be_chosen, surveyed.entries):
            if (value := comparable_value(entry, best)) is not None:
                by_value[sign * value if math.isfinite(value) else math.inf][entry.group].append(entry)
        carried_on: set[str] = set()
        for group in surveyed.groups:
            values = (comparable_value(entry, best) for entry in filter(self._may_be_chosen, group.entries))
            if is_carried_on(best, [value for value in values if value is not None], mode):
                carried_on.add(group.key)
        for _, series in sorted(by_value.items()):
            yield from _newest_of(surveyed, series, carried_on)

    def _may_be_chosen(self, entry: Entry) -> bool:
        return self._is_before(entry.step) and not entry.holds_others and not self._lacks_step(entry)

    def _is_before(self, step: int | None) -> bool:
        """Return whether a step is before ``query.before``, or unknown."""
        return self.query.before is None or step is None or step < self.query.before

    def _lacks_step(self, entry: Entry) -> bool:
        """Return whether ``query.before`` can't be decided, as the step is unknown."""
        return self.query.before is not None and entry.step is None and entry.is_sound

    def _fault(self, entry: Entry) -> Reason | None:
        if entry.fault is not None:
            return entry.fault
        parts = parts_of(entry)
        if any(temporary_for(part.name) is not None for part in parts):
            return BEING_WRITTEN
        if any(part.path in self.refused for part in parts):
            return Reason(Code.BEING_WRITTEN, "being written: it changed while waiting for it")
        fault = next(filter(None, (written_inside(part, self.now) for part in parts)), None)
        if fault is None and not self.query.allow_unsafe:
            return _unsafe(entry)
        return fault

    def _unsettled_better(
        self,
        surveyed: Survey,
        chosen: Entry | None,
        rejected: Sequence[tuple[Entry, str]],
        unsound: Sequence[tuple[Entry, str]],
    ) -> Iterator[UnfinishedSave]:
        """Yield unfinished saves that would be preferred to the choice."""
        # Three kinds: faulty candidates before the choice; the choice itself, if it was changed a moment ago;
        # and saves under temporary names, which aren't candidates yet.
        paths = set()
        no_value = [(entry, entry.fault) for entry in surveyed.entries if self.query.best and entry.fault]
        for entry, why in (*rejected, *unsound, *no_value):
            is_waited_for = code_of(why) in WORTH_WAITING
            if is_waited_for and entry.path not in paths and self._is_before(entry.step):
                paths.add(entry.path)
                yield from (_unsettled_entry(part, why) for part in parts_of(entry))
        for part in () if chosen is None else parts_of(chosen):
            if self._age(part.modified_ns) < DEAD_WRITER_SECONDS or part.path in self.writing:
                yield _unsettled_entry(part, "it changed a moment ago", is_whole=True)
        for step, save in temporary_saves(surveyed, self.query.exclude):
            if save.path not in paths and self._is_before(step):
                yield save

    def _is_recent(self, save: UnfinishedSave) -> bool:
        return self._age(save.modified_ns) < (2 * SETTLE_SECONDS if save.is_whole else DEAD_WRITER_SECONDS)

    def _age(self, modified_ns: int) -> float:
        return self.now - modified_ns / 1e9

    def _answer(
        self, surveyed: Survey, chosen: Entry | None, rejected: Sequence[tuple[Entry, str]]
    ) -> Latest:
        query = self.query
        errors = [Problem(shown(error.path), error.reason) for error in surveyed.errors]
        problems = (*errors, *(Problem(entry.path, fault) for entry, fault in rejected))
        if chosen is None:
            why = _reason_for_none(surveyed, query)
            return Latest(None, why, problems, surveyed.remarks, surveyed.journals)
        danger = [f"{chosen.path}: {_unsafe(chosen)}"] if chosen.danger else []
        doubts = _choice_warnings(surveyed, chosen, query.best, {entry.path for entry, _ in rejected})
        warnings = (*danger, *surveyed.remarks, *doubts)
        # How training resumes is shown if it is cheap to find out: opening a checkpoint in a store isn't.
        resume = None
        if query.resume_exact or fs.place_of(chosen.path).reads_are_free:
            with suppress(CheckpointError):  # if it has vanished, loading it fails
                resume = _resume_of(chosen)
        return Latest(chosen, None, problems, warnings, surveyed.journals, resume=resume)


def _unsafe(entry: Entry) -> Reason | None:
    """Return the fault of an unsafe checkpoint; the user's own classes don't make one unsafe."""
    return fault(Code.UNSAFE, entry.danger) if entry.danger else None


def _inexact(entry: Entry) -> Reason | None:
    """Return why a training doesn't resume exactly from a checkpoint, or None if it does."""
    try:
        verdict = _resume_of(entry)
    except CheckpointError as failure:
        return fault(Code.UNREADABLE, failure.reason)
    if verdict.level is ResumeLevel.EXACT:
        return None
    return Reason(Code.INEXACT, f"it doesn't resume exactly: {verdict.shortcoming}")


def _resume_of(entry: Entry) -> ResumeVerdict:
    assert entry.unit.format is not None  # only a sound checkpoint is chosen
    with open_unit(entry.unit.format, entry.unit) as checkpoint:
        return resume_verdict(checkpoint)


def _newest_of(
    surveyed: Survey, series: Mapping[str, Sequence[Entry]], carried_on: Collection[str]
) -> Iterator[Entry]:
    """Yield equally good checkpoints, the newest first; of series that repeat the best value, the oldest."""
    turns = {
        key: iter(entries if key in carried_on else reversed(entries)) for key, entries in series.items()
    }
    if len(turns) == 1:
        yield from chain.from_iterable(turns.values())
        return
    paths = {entry.path for entries in series.values() for entry in entries}
    for entry in newest_first(surveyed.groups, lambda entry: entry.path in paths):
        yield next(turns[entry.group])


def _require_newer(surveyed: Survey, chosen: Entry) -> None:
    """Raise UsageError if nothing shows whether the choice or another run's checkpoint is newer."""
    # Between runs, times decide (``newest_first``). After a copy without times, all files have the time of
    # the copy: if no checkpoint records its own time, the choice would be arbitrary, and is refused.
    tier = next(tier for tier in tiers(surveyed.groups) if any(one.key == chosen.group for one in tier))
    own = next(group.entries for group in tier if group.key == chosen.group)
    for group in tier:
        newest = next((entry for entry in reversed(group.entries) if entry.is_sound), chosen)
        is_dated = newest.saved_at is not None and chosen.saved_at is not None
        if newest.run != chosen.run and not is_dated and is_flat([*own, *group.entries]):
            why = "different runs, all written within a minute, as if copied"
            raise UsageError(
                f"can't tell whether {chosen.path} or {newest.path} is newer: {why} (name one of them)"
            )


def _unsettled_entry(entry: Entry, why: str, *, is_whole: bool = False) -> UnfinishedSave:
    return UnfinishedSave(
        entry.path,
        why,
        entry.directory,
        entry.unit.members,
        entry.contents.files,
        is_whole,
        entry.modified_ns,
    )


def _newer_but_lacking(surveyed: Survey, chosen: Entry, before: int | None) -> Iterator[tuple[Entry, str]]:
    """Yield intact checkpoints newer than the choice that can't be resumed from, with the reason."""
    # The choice prefers checkpoints with weights and optimizer state. A user may expect the newest file
    # instead, so the reason is given for each that counts more steps, or epochs where steps are unknown.
    lacking: list[tuple[Entry, str]] = []
    for entry in surveyed.entries:
        is_wanted = before is None or entry.step is None or entry.step < before
        if entry.step is not None and chosen.step is not None:
            is_newer = entry.step > chosen.step
        else:
            is_newer = entry.epoch is not None and chosen.epoch is not None and entry.epoch > chosen.epoch
        if not is_wanted or not is_newer or not entry.is_sound or entry.holds_others:
            continue
        if not entry.has_weights:
            if chosen.has_weights:
                lacking.append((entry, "it is newer, but has no weights"))
        elif chosen.granularity is Granularity.FULL and entry.granularity is not Granularity.FULL:
            lacking.append((entry, "it is newer, but has only weights, no optimizer state"))

    def age(one: tuple[Entry, str]) -> tuple[float, float, int]:
        entry, _ = one
        return entry.epoch or 0, entry.step or 0, entry.modified_ns

    yield from sorted(lacking, key=age, reverse=True)


def _unreadable_paths(surveyed: Survey, rejected: Sequence[tuple[Entry, str]]) -> tuple[tuple[str, str], ...]:
    """Return the paths that couldn't be read, with reasons; one of them may be the newest."""
    errors = [error for error in surveyed.errors if not isinstance(error, NotFound | NotACheckpoint)]
    faults: dict[str, str] = {entry.path: entry.fault for entry in surveyed.entries if entry.fault}
    faults |= {entry.path: why for entry, why in rejected}
    unread = [(path, why) for path, why in faults.items() if code_of(why) is Code.UNREADABLE]
    return (*((shown(error.path), error.reason) for error in errors), *unread)


def _reason_for_none(surveyed: Survey, query: LatestQuery) -> str:
    root, count = surveyed.root, len(surveyed.entries)
    best, before = query.best, query.before
    if not count:
        return f"{root}: {nothing_in(root, recursive=query.recursive)}"
    sound = [entry for entry in surveyed.entries if entry.is_sound]
    if best is not None and sound and all(comparable_value(entry, best) is None for entry in sound):
        names = sorted({name for entry in sound for name in entry.metrics})
        if "loss" not in names and any(entry.loss is not None for entry in sound):
            names.append("loss")
        there = f" (metrics: {', '.join(names)})" if names else ""
        return f"{root}: no checkpoint with a metric {best!r}{there}"
    if query.resume_exact and sound:
        return f"{root}: no intact checkpoint from which a training resumes exactly"
    if before is not None and sound:
        return f"{root}: no intact checkpoint before step {before}"
    if count == 1:
        return f"{root}: its only checkpoint is not intact"
    return f"{root}: none of {count:,} checkpoints is intact"


def _choice_warnings(
    surveyed: Survey, chosen: Entry, best: str | None, rejected: Collection[str]
) -> tuple[str, ...]:
    """Return warnings about the choice: the order of its series, rival series, and missing metrics."""
    warnings = [
        warning for group in surveyed.groups if group.key == chosen.group for warning in group.warnings
    ]
    for tier in tiers(surveyed.groups):
        rivals = sorted(
            group.key
            for group in tier
            if any(
                entry.is_sound and not entry.holds_others and entry.path not in rejected
                for entry in group.entries
            )
        )
        if best is None and len(rivals) > 1 and chosen.group in rivals:
            others = [key for key in rivals if key != chosen.group]
            names = ", ".join(others[:_MAX_RIVALS]) + (", …" if len(others) > _MAX_RIVALS else "")
            warnings.append(f"found {len(rivals)} series; using {chosen.group} (also: {names})")
    sound = [entry for entry in surveyed.entries if entry.is_sound and not entry.holds_others]
    count = sum(best is not None and comparable_value(entry, best) is None for entry in sound)
    if count:
        total = counted(len(sound), "checkpoint")
        warnings.append(f"{surveyed.root}: {count:,} of {total} without a metric {best!r}")
    return tuple(warnings)


def comparable_value(entry: Entry, metric: str) -> float | None:
    """Return a metric's value, which may be infinite; None if it is unknown or NaN."""
    value = entry.recorded_metric(metric)
    return None if value is None or math.isnan(value) else value
