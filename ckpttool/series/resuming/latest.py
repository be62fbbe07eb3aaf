"""Chooses the checkpoint to resume from: the newest that is intact, or the best by a metric."""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ckpttool.checkpoint import Granularity
from ckpttool.errors import AccessDenied, NotACheckpoint, NotFound, UsageError, from_os_error
from ckpttool.report import counted
from ckpttool.series.files import Contents
from ckpttool.series.members.entry import Entry
from ckpttool.series.members.full_read import Progress, read_all
from ckpttool.series.members.full_read import no_progress as unwatched
from ckpttool.series.members.order import Group, newest_first, tiers
from ckpttool.series.paths import bare, shown
from ckpttool.series.pointers.protection import BEING_WRITTEN
from ckpttool.series.pointers.readers import temporary_for
from ckpttool.series.pruning.planning import Depth
from ckpttool.series.reasons import Code, Problem, Reason, code_of, fault
from ckpttool.series.resuming.writers import (
    GONE_SECONDS,
    MOMENTS,
    SYSTEM,
    Tell,
    Unsettled,
    WaitClock,
    Watch,
    temporary_files,
    written_inside,
)
from ckpttool.series.retention.policy import Mode
from ckpttool.series.retention.rules import is_carried_on
from ckpttool.series.surveying.survey import Scope, Survey, nothing_in, survey_directory

NO_STEP = "no step is known of it"
WORTH_WAITING = frozenset({Code.INCOMPLETE, Code.DAMAGED, Code.BEING_WRITTEN})
"""What is wrong with a checkpoint that its writer may still mend."""


_MAX_RIVALS = 3
"""More names than that nobody reads in one line."""


def comparable_value(entry: Entry, metric: str) -> float | None:
    """Return a metric's value where it is known and a number, infinite ones included."""
    value = entry.metrics.get(metric, entry.loss if metric == "loss" else None)
    return None if value is None or math.isnan(value) else value


def without_sound(found: Survey) -> Iterator[Entry]:
    """Yield series of which nothing is sound, from the newest on: nobody can tell that they are older."""
    for one in found.groups:
        if not any(entry.is_sound for entry in one.entries):
            yield from reversed(one.entries)


def newer_but_lacking(found: Survey, chosen: Entry, before: int | None) -> Iterator[tuple[Entry, str]]:
    """Yield what is intact and newer than a choice, and what it lacks: a training can't go on from it."""
    lacking = []
    for entry in found.entries:
        is_wanted = before is None or entry.step is None or entry.step < before
        is_newer = entry.is_sound and not entry.holds_others and _is_newer(entry, chosen)
        lack = _lack(entry, chosen) if is_wanted and is_newer else None
        if lack is not None:
            lacking.append((entry, f"it is newer, {lack}"))
    yield from sorted(lacking, key=lambda one: _age_key(one[0]), reverse=True)


def _age_key(entry: Entry) -> tuple[float, float, int]:
    return entry.epoch or 0, entry.step or 0, entry.modified_ns


def _is_newer(one: Entry, other: Entry) -> bool:
    if one.step is not None and other.step is not None:
        return one.step > other.step
    return one.epoch is not None and other.epoch is not None and one.epoch > other.epoch


def _lack(entry: Entry, chosen: Entry) -> str | None:
    if not entry.has_weights:
        return "but without weights" if chosen.has_weights else None
    if chosen.granularity is Granularity.FULL and entry.granularity is not Granularity.FULL:
        return "but weights alone, without an optimizer's state"
    return None


def choice_warnings(
    found: Survey, chosen: Entry, best: str | None, passed: Collection[str]
) -> tuple[str, ...]:
    """Return what is doubtful about a choice: the order of its series, and other series as good."""
    told = [warning for one in found.groups if one.key == chosen.group for warning in one.warnings]
    for tier in tiers(found.groups):
        rivals = sorted(one.key for one in tier if any(_counts(entry, passed) for entry in one.entries))
        if best is None and len(rivals) > 1 and chosen.group in rivals:
            others = [key for key in rivals if key != chosen.group]
            names = ", ".join(others[:_MAX_RIVALS]) + (", …" if len(others) > _MAX_RIVALS else "")
            told.append(f"{len(rivals)} series compete; {chosen.group} was chosen over {names}")
    return tuple(told)


def _counts(entry: Entry, passed: Collection[str]) -> bool:
    return entry.is_sound and not entry.holds_others and entry.path not in passed


def unmeasured_warnings(found: Survey, best: str | None) -> Iterator[str]:
    """Yield how many lack the metric."""
    sound = [entry for entry in found.entries if entry.is_sound and not entry.holds_others]
    count = sum(best is not None and comparable_value(entry, best) is None for entry in sound)
    if count:
        yield f"{found.root}: {count:,} of {counted(len(sound), 'checkpoint')} without a metric {best!r}"


def unreadable_places(found: Survey, passed: Sequence[tuple[Entry, str]]) -> tuple[tuple[str, str], ...]:
    """Return what nobody could look at, and why: that there is none can't be said then."""
    errors = [one for one in found.errors if not isinstance(one, NotFound | NotACheckpoint)]
    faults = {one.path: one.fault for one in found.entries if one.fault} | {
        one.path: why for one, why in passed
    }
    unread = [(path, why) for path, why in faults.items() if code_of(why) is Code.UNREADABLE]
    return (*((shown(one.path), one.reason) for one in errors), *unread)


def blind_error(root: str, places: Sequence[tuple[str, str]]) -> AccessDenied:
    """Return the error that says that nobody can tell whether there is one."""
    path, why = places[0]
    others = f" (and {len(places) - 1:,} more)" if len(places) > 1 else ""
    told = "no checkpoint to resume from was found, and not all could be looked at"
    return AccessDenied(shown(root), f"{told}: {path}: {why}{others}")


def none_safe_error(root: str, unsafe: Sequence[Entry]) -> AccessDenied:
    """Return the error that says that only unsafe ones are there: nobody is to begin anew for that."""
    others = f"; so are {len(unsafe) - 1:,} more" if len(unsafe) > 1 else ""
    told = f"no checkpoint is safe to resume from: {unsafe[0].path}: unsafe: {unsafe[0].danger}{others}"
    return AccessDenied(shown(root), told, expected="--allow-unsafe takes it all the same")


def require_never_made(directory: str) -> None:
    """Require that a directory that isn't there was never made: no link on the way leads nowhere."""
    path = bare(directory)
    while path and not os.path.lexists(path):
        path = os.path.dirname(path)
    if path and not os.path.exists(path):
        raise from_os_error(FileNotFoundError(), path)


def no_answer(found: Survey, *, recursive: bool, best: str | None, before: int | None) -> str:
    """Return why there is no answer."""
    count = len(found.entries)
    if not count:
        return f"{found.root}: {nothing_in(found.root, recursive=recursive)}"
    sound = [entry for entry in found.entries if entry.is_sound]
    if best is not None and sound and all(comparable_value(one, best) is None for one in sound):
        return f"{found.root}: no checkpoint with a metric {best!r}{_known_metrics(sound)}"
    if before is not None and sound:
        return f"{found.root}: no intact checkpoint before step {before}"
    if count == 1:
        return f"{found.root}: its only checkpoint is not intact"
    return f"{found.root}: none of {count:,} checkpoints is intact"


def _known_metrics(entries: Sequence[Entry]) -> str:
    names = sorted({name for entry in entries for name in entry.metrics})
    names += ["loss"] if "loss" not in names and any(one.loss is not None for one in entries) else []
    return f" (there is {', '.join(names)})" if names else ""


@dataclass(frozen=True, slots=True)
class Latest:
    """The newest intact checkpoint, or why there is none; ``passed_over`` were newer, or better.

    ``waited`` seconds went by while somebody wrote ``waited_for``; ``best`` is the metric that was asked for.
    """

    entry: Entry | None
    reason: str | None = None
    passed_over: tuple[Problem, ...] = ()
    warnings: tuple[str, ...] = ()
    journals: tuple[str, ...] = ()
    waited: float = 0.0
    waited_for: tuple[str, ...] = ()
    best: str | None = None

    @property
    def path(self) -> str | None:
        """Return the path of the checkpoint, or None where there is none."""
        return None if self.entry is None else self.entry.path

    @property
    def value(self) -> float | None:
        """Return what the checkpoint was measured at, or None where nobody asked for it."""
        return None if self.entry is None or self.best is None else comparable_value(self.entry, self.best)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatestQuery(Scope):
    """Which checkpoint is wanted; ``latest`` says what each means."""

    best: str | None
    mode: Mode | None
    before: int | None
    allow_unsafe: bool = False


def latest(
    directory: str | os.PathLike[str],
    *,
    recursive: bool = False,
    exclude: Sequence[str] = (),
    max_depth: int | None = None,
    depth: Depth = "full",
    best: str | None = None,
    mode: Mode | None = None,
    metrics: Sequence[str] = (),
    before: int | None = None,
    allow_unsafe: bool = False,
    wait: float = 0,
    tell: Tell = lambda text: None,
    clock: WaitClock = SYSTEM,
    jobs: int | None = None,
    progress: Progress = unwatched,
) -> Latest:
    """Return the newest intact checkpoint of a directory; with ``best`` that of the best metric.

    Args:
        directory: Where they lie; it may be missing, as before a run's first job.
        recursive: Whether to descend.
        exclude: Globs of what to pass over.
        max_depth: How many levels to descend at most.
        depth: Whether intact means every byte, of which the answer is read in full and no other, or the
            structure.
        best: Name of a metric.
        mode: Which of its values are good.
        metrics: Logs that know more metrics.
        before: The step before which it has to be saved.
        allow_unsafe: Whether one may be chosen that runs code when it is loaded, or calls what could.
        wait: For how many seconds to wait for a writer that is at one that would come first.
        tell: Told what is waited for.
        clock: What the time is.
        jobs: Number of threads.
        progress: Is told what is read.

    Raises:
        UsageError: A metric without a mode, or a mode without a metric.
        CheckpointError: The directory can't be looked at; or none was found, and something in it can't be, or
            is intact and unsafe.
    """
    if (best is None) != (mode is None):
        raise UsageError("--best METRIC and --mode min|max belong together")
    wanted = LatestQuery(
        recursive=recursive,
        exclude=exclude,
        max_depth=max_depth,
        best=best,
        mode=mode,
        metrics=metrics,
        before=before,
        allow_unsafe=allow_unsafe,
    )
    watch = Watch(wait, tell, clock)
    reader = _FullReader(jobs, progress) if depth == "full" else None
    refused: frozenset[str] = frozenset()
    while True:
        search = _Search(directory, wanted, clock.time(), refused, frozenset(watch.writing), reader)
        surveyed = search.survey()
        # Reading takes long: as long as somebody writes what would come first, it would be in vain.
        look = search.look(surveyed, reads=not wait)
        if wait and watch.wait([*look.unsettled, *watch.growing(look.quiet)]):
            continue
        if wait and reader is not None:
            look = search.look(surveyed, reads=True)
            if watch.wait(look.unsettled):
                continue
        found, unsettled = look.found, [*look.unsettled, *look.quiet]
        changing = {one.path for one in watch.changed_meanwhile(unsettled)} - refused
        if changing:
            refused |= changing
            continue
        if found.entry is None and look.unreadable_places:
            raise blind_error(os.fspath(directory), look.unreadable_places)
        if found.entry is None and look.unsafe:
            raise none_safe_error(os.fspath(directory), look.unsafe)
        return replace(
            found, waited=watch.waited, waited_for=tuple(one.path for one in watch.waited_for), best=best
        )


class _FullReader:
    """Reads checkpoints in full, each once as long as it stays what it was."""

    def __init__(self, jobs: int | None, progress: Progress) -> None:
        self._jobs = jobs
        self._progress = progress
        self._faults: dict[tuple[str, Contents], Reason | None] = {}

    def fault(self, entry: Entry, *, reads: bool) -> Reason | None:
        """Return what is wrong with a checkpoint; without ``reads``, as far as it was read already.

        NaN beside its weights, in an optimizer's state or a single value, spoils none, as in ``prune``.
        """
        key = entry.path, entry.contents
        if key not in self._faults and reads:
            self._faults[key] = read_all(entry, self._jobs, self._progress).damage
        return self._faults.get(key)


@dataclass(frozen=True, slots=True)
class _LookAnswer:
    """What one look at a directory came to.

    Attributes:
        found: The answer.
        unsettled: What may become a better one.
        quiet: The same, where its time says that nobody is at it; a server's clock may be wrong.
        unseen: What nobody could look at, and why.
        unsafe: What would have been chosen, were it not unsafe.
    """

    found: Latest
    unsettled: Sequence[Unsettled] = ()
    quiet: Sequence[Unsettled] = ()
    unreadable_places: Sequence[tuple[str, str]] = ()
    unsafe: Sequence[Entry] = ()


@dataclass(frozen=True, slots=True)
class _Search:
    """One look at a directory: what is there at a time, and which of it is wanted."""

    directory: str | os.PathLike[str]
    wanted: LatestQuery
    now: float
    refused: frozenset[str]
    writing: frozenset[str] = frozenset()
    reader: _FullReader | None = None

    def survey(self) -> Survey | NotFound:
        """Return what is there, or that the directory isn't."""
        try:
            return survey_directory(self.directory, self.wanted)
        except NotFound as error:
            if os.path.lexists(self.directory):  # a log isn't there, which tells nothing of checkpoints
                raise
            require_never_made(os.fspath(self.directory))
            return error

    def look(self, found: Survey | NotFound, *, reads: bool) -> _LookAnswer:
        """Return the answer, and what may become a better one."""
        if isinstance(found, NotFound):
            return _LookAnswer(Latest(None, f"{found.path}: {found.reason}"))
        wanted = self.wanted
        chosen, passed = self._choice(found, reads=reads)
        told = {entry.path for entry, _ in passed}
        without_hope = [
            (one, one.fault) for one in without_sound(found) if one.path not in told and one.fault
        ]
        unsettled = list(self._unsettled_better(found, chosen, passed, without_hope))
        if chosen is not None:
            passed += without_hope
            lacking = newer_but_lacking(found, chosen, wanted.before) if wanted.best is None else ()
            passed += [(entry, why) for entry, why in lacking if entry.path not in told]
        return _LookAnswer(
            self._answer(found, chosen, passed),
            [one for one in unsettled if self._is_recent(one)],
            [one for one in unsettled if not self._is_recent(one)],
            unreadable_places(found, passed),
            [entry for entry, why in passed if code_of(why) is Code.UNSAFE],
        )

    def _choice(self, found: Survey, *, reads: bool) -> tuple[Entry | None, list[tuple[Entry, str]]]:
        """Return the first that nothing is wrong with, and what came before it, with its fault."""
        passed = [(entry, NO_STEP) for entry in reversed(found.entries) if self._lacks_step(entry)]
        for entry in self._candidates(found):
            fault = self._fault(entry)
            if fault is None and self.reader is not None:
                fault = self.reader.fault(entry, reads=reads)
            if fault is None:
                return entry, passed
            passed.append((entry, fault))
        return None, passed

    def _answer(self, found: Survey, chosen: Entry | None, passed: Sequence[tuple[Entry, str]]) -> Latest:
        wanted = self.wanted
        errors = [Problem(shown(error.path), error.reason) for error in found.errors]
        problems = (*errors, *(Problem(entry.path, fault) for entry, fault in passed))
        if chosen is None:
            why = no_answer(found, recursive=wanted.recursive, best=wanted.best, before=wanted.before)
            return Latest(None, why, problems, found.remarks, found.journals)
        doubts = choice_warnings(found, chosen, wanted.best, {entry.path for entry, _ in passed})
        danger = [f"{chosen.path}: {_unsafe(chosen)}"] if chosen.danger else []
        told = (*danger, *found.remarks, *doubts, *unmeasured_warnings(found, wanted.best))
        return Latest(chosen, None, problems, told, found.journals)

    def _candidates(self, found: Survey) -> Iterator[Entry]:
        """Yield checkpoints, the most wanted first; a run's own directory stands back behind those in it."""
        best = self.wanted.best
        if best is None:
            yield from newest_first(found.groups, self._may_be_chosen)
            return
        sign = 1 if self.wanted.mode == "min" else -1
        alike: dict[float, dict[str, list[Entry]]] = defaultdict(lambda: defaultdict(list))
        for entry in filter(self._may_be_chosen, found.entries):
            if (value := comparable_value(entry, best)) is not None:
                alike[sign * value if math.isfinite(value) else math.inf][entry.group].append(entry)
        carried_on = {one.key for one in found.groups if self._carries_on(one, best)}
        for _, series in sorted(alike.items()):
            yield from _newest_of(found, series, carried_on)

    def _carries_on(self, group: Group, metric: str) -> bool:
        values = (comparable_value(entry, metric) for entry in filter(self._may_be_chosen, group.entries))
        return is_carried_on(metric, [one for one in values if one is not None], self.wanted.mode)

    def _may_be_chosen(self, entry: Entry) -> bool:
        before = self.wanted.before
        is_before = before is None or entry.step is None or entry.step < before
        return is_before and not entry.holds_others and not self._lacks_step(entry)

    def _lacks_step(self, entry: Entry) -> bool:
        """Tell whether nobody knows if a checkpoint was saved before the step that is wanted."""
        return self.wanted.before is not None and entry.step is None and entry.is_sound

    def _fault(self, entry: Entry) -> Reason | None:
        if entry.fault is not None:
            return entry.fault
        if temporary_for(entry.name) is not None:
            return BEING_WRITTEN
        if entry.path in self.refused:
            return Reason(Code.BEING_WRITTEN, "being written: it changed while it was waited for")
        fault = written_inside(entry, self.now)
        if fault is None and not self.wanted.allow_unsafe:
            return _unsafe(entry)
        return fault

    def _unsettled_better(
        self,
        found: Survey,
        chosen: Entry | None,
        passed: Sequence[tuple[Entry, str]],
        without_hope: Sequence[tuple[Entry, str]],
    ) -> Iterator[Unsettled]:
        """Yield what a writer may still be at that would come before the one that was chosen."""
        told = set()
        no_value = [(one, one.fault) for one in found.entries if self.wanted.best and one.fault]
        for entry, why in (*passed, *without_hope, *no_value):
            is_waited_for = code_of(why) in WORTH_WAITING
            if is_waited_for and entry.path not in told and self._may_come(entry.step):
                told.add(entry.path)
                yield _unsettled_entry(entry, why)
        if chosen is not None and self._is_young(chosen):
            yield _unsettled_entry(chosen, "it was changed a moment ago", is_whole=True)
        for one in temporary_files(found, self.wanted.exclude):
            if one.path not in told and self._may_come(one.fields.step):
                directory, name = os.path.split(one.path)
                seen = one.contents.files
                yield Unsettled(
                    one.path,
                    "being written",
                    directory or os.curdir,
                    (name,),
                    seen,
                    modified_ns=one.modified_ns,
                )

    def _is_young(self, entry: Entry) -> bool:
        return self._age(entry.modified_ns) < GONE_SECONDS or entry.path in self.writing

    def _may_come(self, step: int | None) -> bool:
        return self.wanted.before is None or step is None or step < self.wanted.before

    def _is_recent(self, one: Unsettled) -> bool:
        return self._age(one.modified_ns) < (2 * MOMENTS if one.is_whole else GONE_SECONDS)

    def _age(self, modified_ns: int) -> float:
        return self.now - modified_ns / 1e9


def _unsafe(entry: Entry) -> Reason | None:
    """Return why nobody resumes from a checkpoint unasked; the user's own classes make none unsafe."""
    return fault(Code.UNSAFE, entry.danger) if entry.danger else None


def _newest_of(
    found: Survey, series: Mapping[str, Sequence[Entry]], carried_on: Collection[str]
) -> Iterator[Entry]:
    """Yield equally good checkpoints, the newest first; of a series that carries a metric on the oldest."""
    if len(series) == 1:
        for key, entries in series.items():
            yield from entries if key in carried_on else reversed(entries)
        return
    turns = {key: iter(one if key in carried_on else reversed(one)) for key, one in series.items()}
    paths = {entry.path for one in series.values() for entry in one}
    for entry in newest_first(found.groups, lambda one: one.path in paths):
        yield next(turns[entry.group])


def _unsettled_entry(entry: Entry, why: str, *, is_whole: bool = False) -> Unsettled:
    return Unsettled(
        entry.path,
        why,
        entry.directory,
        entry.unit.members,
        entry.contents.files,
        is_whole,
        entry.modified_ns,
    )
