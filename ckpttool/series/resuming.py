"""Which checkpoint is to be resumed from: the newest that is intact, or the best."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ckpttool.errors import NotFound, UsageError
from ckpttool.report import counted
from ckpttool.series.choice import newest_first, tiers
from ckpttool.series.entry import Entry, shown
from ckpttool.series.planning import Depth, Problem, read_in_full
from ckpttool.series.pointers import temporary_for
from ckpttool.series.rules import is_carried_on
from ckpttool.series.survey import Survey, nothing_in, survey
from ckpttool.series.unfinished import GONE_SECONDS, markers, unfinished
from ckpttool.series.waiting import MOMENTS, SYSTEM, Clock, Tell, Unsettled, Watch

Mode = Literal["min", "max"]

_MAX_RIVALS = 3
"""More names than that nobody reads in one line."""

NO_STEP = "no step is known of it"


@dataclass(frozen=True, slots=True)
class Latest:
    """The newest intact checkpoint, or why there is none; ``passed_over`` were newer, or better.

    ``waited`` seconds went by while somebody wrote ``waited_for``.
    """

    entry: Entry | None
    reason: str | None = None
    passed_over: tuple[Problem, ...] = ()
    warnings: tuple[str, ...] = ()
    journals: tuple[str, ...] = ()
    waited: float = 0.0
    waited_for: tuple[str, ...] = ()

    @property
    def path(self) -> str | None:
        """Return the path of the checkpoint, or None where there is none."""
        return None if self.entry is None else self.entry.path


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Which checkpoint is wanted; ``latest`` says what each means."""

    recursive: bool
    exclude: Sequence[str]
    max_depth: int | None
    depth: Depth
    best: str | None
    mode: Mode | None
    metrics: Sequence[str]
    before: int | None
    jobs: int | None


def latest(
    directory: str | os.PathLike[str],
    *,
    recursive: bool = False,
    exclude: Sequence[str] = (),
    max_depth: int | None = None,
    depth: Depth = "quick",
    best: str | None = None,
    mode: Mode | None = None,
    metrics: Sequence[str] = (),
    before: int | None = None,
    wait: float = 0,
    tell: Tell = lambda text: None,
    clock: Clock = SYSTEM,
    jobs: int | None = None,
) -> Latest:
    """Return the newest intact checkpoint of a directory; with ``best`` that of the best metric.

    Args:
        directory: Where they lie; it may be missing, as before a run's first job.
        recursive: Whether to descend.
        exclude: Globs of what to pass over.
        max_depth: How many levels to descend at most.
        depth: Whether intact means the structure, or every byte.
        best: Name of a metric.
        mode: Which of its values are good.
        metrics: Logs that know more metrics.
        before: The step before which it has to be saved.
        wait: For how many seconds to wait for a writer that is at one that would come first.
        tell: Told what is waited for.
        clock: What the time is.
        jobs: Number of threads.

    Raises:
        UsageError: A metric without a mode, or a mode without a metric.
        CheckpointError: The directory can't be looked at.
    """
    if (best is None) != (mode is None):
        raise UsageError("--best METRIC and --mode min|max belong together")
    wanted = Wanted(
        recursive=recursive,
        exclude=exclude,
        max_depth=max_depth,
        depth=depth,
        best=best,
        mode=mode,
        metrics=metrics,
        before=before,
        jobs=jobs,
    )
    watch = Watch(wait, tell, clock)
    refused: frozenset[str] = frozenset()
    while True:
        search = _Search(directory, wanted, clock.time(), refused)
        try:
            found, unsettled = search.look()
        except NotFound as error:
            found, unsettled = Latest(None, f"{error.path}: {error.reason}"), []
        if wait and watch.wait(unsettled):
            continue
        changing = {one.path for one in watch.still_changing(unsettled)} - refused
        if changing:
            refused |= changing
            continue
        return replace(found, waited=watch.waited, waited_for=tuple(one.path for one in watch.waited_for))


@dataclass(frozen=True, slots=True)
class _Search:
    """One look at a directory: what is there at a time, and which of it is wanted."""

    directory: str | os.PathLike[str]
    wanted: Wanted
    now: float
    refused: frozenset[str]

    def look(self) -> tuple[Latest, list[Unsettled]]:
        """Return the answer, and what may become a better one.

        Raises:
            CheckpointError: The directory can't be looked at.
        """
        wanted = self.wanted
        found = survey(
            self.directory,
            recursive=wanted.recursive,
            exclude=wanted.exclude,
            max_depth=wanted.max_depth,
            metrics=wanted.metrics,
        )
        errors = [Problem(shown(error.path), error.reason) for error in found.errors]
        passed: list[tuple[Entry, str]] = []
        chosen = None
        for entry in self._candidates(found):
            fault = self._fault(entry)
            if fault is None:
                chosen = entry
                break
            passed.append((entry, fault))
        told = {entry.path for entry, _ in passed}
        hopeless = [(one, one.fault) for one in _hopeless(found) if one.path not in told and one.fault]
        unsettled = list(self._unsettled(found, chosen, passed, hopeless))
        passed += hopeless if chosen is not None else []
        problems = (*errors, *(Problem(entry.path, fault) for entry, fault in passed))
        if chosen is None:
            why = _why_none(found, wanted)
            return Latest(None, why, problems, found.remarks, found.journals), unsettled
        warnings = (*found.remarks, *_warnings(found, chosen, wanted.best), *_unmeasured(found, wanted.best))
        return Latest(chosen, None, problems, warnings, found.journals), unsettled

    def _candidates(self, found: Survey) -> Iterator[Entry]:
        """Yield checkpoints, the most wanted first; a run's own directory stands back behind those in it."""
        before, best = self.wanted.before, self.wanted.best
        ordered = [
            entry
            for entry in newest_first(found.groups)
            if not entry.holds_others and (before is None or entry.step is None or entry.step < before)
        ]
        if best is None:
            yield from ordered
            return
        sign = 1 if self.wanted.mode == "min" else -1
        if is_carried_on(best):
            ordered.reverse()
        measured = [(value, entry) for entry in ordered if (value := measure(entry, best)) is not None]
        finite = [pair for pair in measured if math.isfinite(pair[0])]
        yield from (entry for _, entry in sorted(finite, key=lambda pair: sign * pair[0]))
        yield from (entry for value, entry in measured if not math.isfinite(value))

    def _fault(self, entry: Entry) -> str | None:
        if entry.fault is not None:
            return entry.fault
        if self.wanted.before is not None and entry.step is None:
            return NO_STEP
        if temporary_for(entry.name) is not None:
            return "being written"
        if entry.path in self.refused:
            return "being written: it changed while it was waited for"
        fault = unfinished(entry, self.now)
        if fault is None and self.wanted.depth == "full":
            return read_in_full(entry, self.wanted.jobs)
        return fault

    def _unsettled(
        self,
        found: Survey,
        chosen: Entry | None,
        passed: Sequence[tuple[Entry, str]],
        hopeless: Sequence[tuple[Entry, str]],
    ) -> Iterator[Unsettled]:
        """Yield what a writer may still be at that would come before the one that was chosen."""
        told = set()
        unmeasured = [(one, one.fault) for one in found.entries if self.wanted.best and one.fault]
        for entry, fault in (*passed, *hopeless, *unmeasured):
            is_waited_for = fault.startswith(("incomplete", "damaged", "being written"))
            if is_waited_for and entry.path not in told and self._may_come(entry.step, entry.modified_ns):
                told.add(entry.path)
                yield _unsettled(entry, fault)
        if chosen is not None and self._age(chosen.modified_ns) < 2 * MOMENTS:
            yield _unsettled(chosen, "it was changed a moment ago", is_whole=True)
        for one in markers(found, self.wanted.exclude):
            if one.path not in told and self._may_come(one.fields.step, one.modified_ns):
                directory, name = os.path.split(one.path)
                seen = one.contents.files
                yield Unsettled(one.path, "being written", directory or os.curdir, (name,), seen)

    def _may_come(self, step: int | None, modified_ns: int) -> bool:
        is_wanted = self.wanted.before is None or step is None or step < self.wanted.before
        return is_wanted and self._age(modified_ns) < GONE_SECONDS

    def _age(self, modified_ns: int) -> float:
        return self.now - modified_ns / 1e9


def _unsettled(entry: Entry, why: str, *, is_whole: bool = False) -> Unsettled:
    return Unsettled(entry.path, why, entry.directory, entry.unit.members, entry.contents.files, is_whole)


def measure(entry: Entry, metric: str) -> float | None:
    """Return a metric's value where it is known and a number, infinite ones included."""
    value = entry.metrics.get(metric, entry.loss if metric == "loss" else None)
    return None if value is None or math.isnan(value) else value


def _hopeless(found: Survey) -> Iterator[Entry]:
    """Yield series of which nothing is sound, from the newest on: nobody can tell that they are older."""
    for one in found.groups:
        if not any(entry.is_sound for entry in one.entries):
            yield from reversed(one.entries)


def _warnings(found: Survey, chosen: Entry, best: str | None) -> tuple[str, ...]:
    """Return what is doubtful about a choice: the order of its series, and other series as good."""
    warnings = [warning for one in found.groups if one.key == chosen.group for warning in one.warnings]
    keys = {entry.path: entry.group for entry in found.entries if not entry.holds_others}
    rivals = [[one for one in tier if one.key in keys.values()] for tier in tiers(found.groups)]
    for tier in rivals:
        if best is None and len(tier) > 1 and any(one.key == chosen.group for one in tier):
            others = sorted({one.key for one in tier} - {chosen.group})
            told = ", ".join(others[:_MAX_RIVALS]) + (", …" if len(others) > _MAX_RIVALS else "")
            warnings.append(f"{len(tier)} series compete; {chosen.group} was chosen over {told}")
    return tuple(warnings)


def _unmeasured(found: Survey, best: str | None) -> Iterator[str]:
    sound = [entry for entry in found.entries if entry.is_sound and not entry.holds_others]
    count = sum(best is not None and measure(entry, best) is None for entry in sound)
    if count:
        yield f"{found.root}: {count:,} of {counted(len(sound), 'checkpoint')} without a metric {best!r}"


def _why_none(found: Survey, wanted: Wanted) -> str:
    count = len(found.entries)
    if not count:
        return f"{found.root}: {nothing_in(found.root, recursive=wanted.recursive)}"
    sound = [entry for entry in found.entries if entry.is_sound]
    if wanted.best is not None and sound and all(measure(one, wanted.best) is None for one in sound):
        return f"{found.root}: no checkpoint with a metric {wanted.best!r}{_known_metrics(sound)}"
    if wanted.before is not None and sound:
        return f"{found.root}: no intact checkpoint before step {wanted.before}"
    if count == 1:
        return f"{found.root}: its only checkpoint is not intact"
    return f"{found.root}: none of {count:,} checkpoints is intact"


def _known_metrics(entries: Sequence[Entry]) -> str:
    names = sorted({name for entry in entries for name in entry.metrics})
    names += ["loss"] if "loss" not in names and any(one.loss is not None for one in entries) else []
    return f" (there is {', '.join(names)})" if names else ""
