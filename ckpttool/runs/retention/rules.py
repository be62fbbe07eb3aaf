"""Rules of a policy: the intact checkpoints of a series that each rule keeps, and why.

``Policy`` is the table of rules, one per attribute. Rules are independent of each other: a checkpoint that
any rule keeps is kept.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime
from functools import cached_property, lru_cache, partial
from itertools import chain, pairwise
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict, get_args

from ckpttool.core.errors import UsageError
from ckpttool.core.options import RULE_PANEL, Mode, Option, Reach
from ckpttool.core.text import counted, duration, nbytes, within
from ckpttool.runs.modes import check_mode, mode_of, resolve_mode

if TYPE_CHECKING:
    from ckpttool.runs.entry import Entry


EARLIEST = 347_155_200
"""1981 in seconds since 1970. Clocks that were never set begin in 1970, times in zip files in 1980."""

_MIN_BURST = 3
"""Minimum number of files in a burst; two may be written at once, as by a signal next to a regular save."""
_COPY_SECONDS = 2
"""Limit on the gaps in a long burst; a training pruned by dates doesn't save at such a pace, a copy does."""


PERIODS: Mapping[str, tuple[Callable[[datetime], Hashable], str]] = {
    # The fold distinguishes the two hours of one name when summer time ends.
    "keep_hourly": (lambda when: (when.date(), when.hour, when.fold), "%Y-%m-%d %H:00"),
    "keep_daily": (datetime.date, "%Y-%m-%d"),
    "keep_weekly": (lambda when: tuple(when.isocalendar())[:2], "%G-W%V"),
    "keep_monthly": (lambda when: (when.year, when.month), "%Y-%m"),
    "keep_yearly": (lambda when: when.year, "%Y"),
}
"""Key that is equal for all moments of a period, and the period's format, by rule."""


def local_time(seconds: float) -> datetime | None:
    """Return a naive time in the local zone; None if it is outside of the calendar."""
    try:
        return datetime.fromtimestamp(seconds)
    except (ValueError, OverflowError, OSError):
        return None


def date_doubt(seconds: float, now: float | None) -> str | None:
    """Return why a time isn't credible, or None if it is."""
    if now is not None and seconds > now:
        return f"dated in the future ({_day(seconds)})"
    if seconds < EARLIEST:
        return f"dated {_day(seconds)}, by a clock that wasn't set"
    return None if local_time(seconds) is not None else f"dated {_day(seconds)}"


def date_doubts(entries: Sequence[Entry], now: float | None) -> dict[str, str]:
    """Return why checkpoints of a series have no credible date, by path."""
    reasons = {entry.path: date_doubt(entry.save_time, now) for entry in entries}
    doubts = {path: why for path, why in reasons.items() if why is not None}
    by_file = [entry for entry in entries if entry.saved_at is None and entry.path not in doubts]
    for burst in _bursts(by_file):
        span = (burst[-1].modified_ns - burst[0].modified_ns) // 10**9 + 1
        why = f"no date ({len(burst):,} files within {span:,} s, as if copied)"
        doubts.update((entry.path, why) for entry in burst)
    return doubts


def _bursts(entries: Sequence[Entry]) -> Iterator[list[Entry]]:
    """Yield groups of checkpoints whose files seem to be written by one copy, the oldest first."""
    # Either all are within a minute, with a longer gap to all others; or, in a longer row of small gaps, as a
    # large copy leaves it, they follow each other within two seconds.
    from ckpttool.runs.series import CONTRADICTION_SECONDS

    for near in _split_at_gaps(sorted(entries, key=lambda entry: entry.modified_ns), CONTRADICTION_SECONDS):
        is_at_once = near[-1].modified_ns - near[0].modified_ns <= CONTRADICTION_SECONDS * 10**9
        for burst in [near] if is_at_once else _split_at_gaps(near, _COPY_SECONDS):
            if len(burst) >= _MIN_BURST:
                yield burst


def _split_at_gaps(ordered: Sequence[Entry], seconds: int) -> Iterator[list[Entry]]:
    """Yield sequences of checkpoints without a gap of more than ``seconds``."""
    part = list(ordered[:1])
    for before, entry in pairwise(ordered):
        if entry.modified_ns - before.modified_ns > seconds * 10**9:
            yield part
            part = []
        part.append(entry)
    if part:
        yield part


def _day(seconds: float) -> str:
    when = local_time(seconds)
    return f"{seconds:.0f} s after 1970" if when is None else when.strftime("%Y-%m-%d")


_BEST_SO_FAR = re.compile(r"(?:^|[^a-z])(?:best|min|max|lowest|highest)(?![a-z])", re.IGNORECASE)
"""Words in the names of metrics that keep only the best value so far."""


Incomplete = Literal["keep", "remove"]
SlimType = Literal["bfloat16", "float16"]

KeptWithReasons: TypeAlias = "Iterator[tuple[Entry, str]]"
"""Checkpoints to keep, each with the reason in a few words."""


@dataclass(frozen=True)
class History:
    """View of a series that rules decide by.

    Attributes:
        intact: Its intact checkpoints, the newest first.
        now: Time in seconds since 1970; later dates aren't credible. None accepts every date.
        root: The directory that globs with a slash are relative to.
        others: Its other checkpoints: incomplete, damaged, or elsewhere.
    """

    intact: Sequence[Entry]
    now: float | None = None
    root: str = os.curdir
    others: Sequence[Entry] = ()

    @cached_property
    def written_last(self) -> Sequence[Entry]:
        """Intact checkpoints, the last written first, if files' times contradict their order; else none."""
        from ckpttool.runs.series import written_last

        return written_last(self.intact[::-1])

    @cached_property
    def _doubts(self) -> Mapping[str, str]:
        return date_doubts(self.intact, self.now)

    @cached_property
    def dated(self) -> Sequence[Entry]:
        """Intact checkpoints with a credible date, the newest first."""
        return [entry for entry in self.intact if entry.path not in self._doubts]

    @cached_property
    def by_time(self) -> Sequence[Entry]:
        """Intact checkpoints with a credible date, the last saved first; of equals the newer."""
        return sorted(self.dated, key=attrgetter("save_time"), reverse=True)

    @property
    def undated(self) -> KeptWithReasons:
        """Yield checkpoints without a credible date, with the doubt: they may be new."""
        doubts = ((entry, self._doubts.get(entry.path)) for entry in self.intact)
        return ((entry, doubt) for entry, doubt in doubts if doubt is not None)


def _keep_last(policy: Policy, history: History) -> KeptWithReasons:
    """Keep the newest, and as many of those that a restarted run wrote last."""
    # If a run was restarted from an older step, its newest saves have smaller counts than those of before. It
    # is unknown which ones the user wants, so the last N of both orders are kept.
    count = policy.keep_last or 0
    for entry in history.intact[:count]:
        yield entry, f"last {count}"
    for entry in history.written_last[:count]:
        yield entry, f"last {count} by time"


def _not_last(policy: Policy, history: History, entry: Entry) -> str:
    place = history.intact.index(entry) + 1
    return f"{ordinal(place, 'newest')}, not one of the last {policy.keep_last:,}"


def _keep_best(policy: Policy, history: History) -> KeptWithReasons:
    """Keep the best, and those without a value to compare."""
    # A missing or NaN value says nothing about how good a checkpoint is: a log may lack the step. It is kept,
    # and doesn't count towards N.
    metric, count = policy.metric or "", policy.keep_best
    for entry in rank_by_metric(policy, history)[:count]:
        yield entry, f"best {count} by {metric} ({entry.recorded_metric(metric):.6g})"
    for entry in history.intact:
        unmeasured = metric_lack(entry, metric)
        if unmeasured is not None:
            yield entry, unmeasured


def _not_best(policy: Policy, history: History, entry: Entry) -> str:
    place = rank_by_metric(policy, history).index(entry) + 1
    value = entry.recorded_metric(policy.metric or "")
    rank = f"{ordinal(place, 'best')} by {policy.metric} ({value:.6g})"
    return f"{rank}, not one of the best {policy.keep_best:,}"


def _keep_all_of_best_runs(policy: Policy, history: History) -> KeptWithReasons:
    """Keep everything in the best runs, unless another rule chooses within runs."""
    if policy.keeps_whole_runs:
        for entry in history.intact:
            yield entry, f"of the best {counted(policy.keep_best_runs or 0, 'run')}"


def rank_by_metric(policy: Policy, history: History) -> list[Entry]:
    """Return the checkpoints with a metric, the best first, infinite values last.

    Of equals the newer comes first, unless the metric is carried on.
    """
    # A trainer that saves ``best_loss`` so far repeats the value in all later checkpoints; the one that
    # reached it is the oldest of them, so then the older comes first.
    metric = policy.metric or ""
    mode = policy.resolved_mode
    sign = -1 if mode == "max" else 1
    measured = [
        (entry, value)
        for entry in history.intact
        if (value := entry.recorded_metric(metric)) is not None and not math.isnan(value)
    ]
    if is_carried_on(metric, [value for _, value in reversed(measured)], mode):
        measured.reverse()

    def rank(one: tuple[Entry, float]) -> tuple[bool, float]:
        _, value = one
        return math.isinf(value), sign * value if math.isfinite(value) else 0

    return [entry for entry, _ in sorted(measured, key=rank)]


def is_carried_on(metric: str, values: Iterable[float], mode: Mode | None) -> bool:
    """Return whether a metric is the best value so far, which later checkpoints repeat, as ``best_loss``.

    It is if its name begins with ``best``, or if it never gets worse, and repeats its last value or is
    named like one.
    """
    if metric.startswith("best"):
        return True
    # A loss may fall at each save, too, so that it never gets worse: only a repeated last value, which two
    # measurements hardly share, or the name shows that it is carried on.
    sign = -1 if mode == "max" else 1
    known = [sign * value if math.isfinite(value) else math.inf for value in values]
    if any(one < two for one, two in pairwise(known)):
        return False
    return known[-2:-1] == known[-1:] or _BEST_SO_FAR.search(metric) is not None


def metric_lack(entry: Entry, metric: str) -> str | None:
    """Return why a checkpoint can't be compared by a metric, or None if it can."""
    value = entry.recorded_metric(metric)
    if value is None:
        return f"no {metric}"
    return f"{metric} is NaN" if math.isnan(value) else None


def _keep_every(count: str, policy: Policy, history: History) -> KeptWithReasons:
    """Keep the first at or after each multiple of N steps, or epochs, and those without a count."""
    each = getattr(policy, f"keep_every_{count}s")
    value_of = attrgetter(count)
    stretch = count if each == 1 else f"{each:,} {count}s"
    for entry in first_of_multiples(each, value_of, history).values():
        yield entry, f"every {stretch} ({number(value_of(entry))})"
    for entry in history.intact:
        if value_of(entry) is None:
            yield entry, f"no {count}"


def _not_first(count: str, policy: Policy, history: History, entry: Entry) -> str:
    each = getattr(policy, f"keep_every_{count}s")
    place = attrgetter(count)
    stretch = int(place(entry) // each)
    first = first_of_multiples(each, place, history)[stretch]
    text = f"{first.name} is the first at or after {count} {number(stretch * each)}"
    return f"{text}, not this ({number(place(entry))})"


def first_of_multiples(
    each: int, value_of: Callable[[Entry], float | None], history: History
) -> dict[int, Entry]:
    """Return the first checkpoint at or after each multiple, by the multiple; of equals the newer."""
    # A run needn't save exactly at multiples, as after a restart. Sorting is stable, and the newest come
    # first, so of equal counts the newer one is kept.
    first: dict[int, Entry] = {}
    for entry in sorted(
        (one for one in history.intact if value_of(one) is not None), key=lambda one: value_of(one) or 0
    ):
        first.setdefault(int((value_of(entry) or 0) // each), entry)
    return first


def number(value: float) -> str:
    """Return an epoch or a step as text, with thousands separators."""
    return f"{int(value):,}" if value == int(value) else f"{value:,}"


def ordinal(place: int, superlative: str) -> str:
    """Return ``newest``, ``2nd newest``, ``11th newest``."""
    if place == 1:
        return superlative
    ending = "th" if place % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(place % 10, "th")
    return f"{place:,}{ending} {superlative}"


def _keep_periods(rule: str, policy: Policy, history: History) -> KeptWithReasons:
    """Keep the newest of each of the last N periods with checkpoints, and those without a date."""
    count = getattr(policy, rule)
    word = rule.removeprefix("keep_")
    for period, entry in list(newest_of_periods(rule, history))[:count]:
        yield entry, f"{word} {period}"
    yield from history.undated


def _not_newest(rule: str, policy: Policy, history: History, entry: Entry) -> str:
    word, count = rule.removeprefix("keep_"), getattr(policy, rule)
    _, format = PERIODS[rule]
    period = datetime.fromtimestamp(entry.save_time).strftime(format)
    periods = list(newest_of_periods(rule, history))
    if period not in {text for text, _ in periods[:count]}:
        return f"{word}: {period} is not one of the newest {count:,}"
    newest = next(entry for text, entry in periods if text == period)
    return f"{word}: {newest.name} is the newest of {period}"


def newest_of_periods(rule: str, history: History) -> Iterator[tuple[str, Entry]]:
    """Yield each period that has a checkpoint, as text, with its newest one; the newest period first."""
    # Periods without a checkpoint aren't counted, so that a pause of the training removes nothing.
    key, format = PERIODS[rule]
    seen: set[Hashable] = set()
    for entry in history.by_time:
        when = datetime.fromtimestamp(entry.save_time)
        if (period := key(when)) not in seen:
            seen.add(period)
            yield when.strftime(format), entry


def _keep_within(policy: Policy, history: History) -> KeptWithReasons:
    """Keep checkpoints at most a time span older than the newest dated one, and those without a date."""
    # Relative to the newest checkpoint, not to the clock: a finished training keeps its last days for ever.
    span = policy.keep_within or 0
    for entry in history.dated:
        if entry.save_time >= history.dated[0].save_time - span:
            yield entry, f"within {duration(span)}"
    yield from history.undated


def _not_within(policy: Policy, history: History, entry: Entry) -> str:
    span, since = policy.keep_within or 0, history.dated[0].save_time
    return f"{duration(int(since - entry.save_time))} older than the newest, not within {duration(span)}"


def _keep_younger(policy: Policy, history: History) -> KeptWithReasons:
    """Keep checkpoints younger than a time span, and those without a date; else the newest."""
    span = policy.older_than or 0
    young = [one for one in history.dated if history.now is None or one.save_time > history.now - span]
    for entry in young:
        yield entry, f"younger than {duration(span)}"
    undated = list(history.undated)
    yield from undated
    if not young and not undated:
        for entry in history.intact[:1]:
            yield entry, f"none is younger than {duration(span)}"


def _not_younger(policy: Policy, history: History, entry: Entry) -> str:
    age = int((history.now or 0) - entry.save_time)
    return f"{duration(age)} old, not younger than {duration(policy.older_than or 0)}"


def _keep_whole(policy: Policy, history: History) -> KeptWithReasons:
    """Keep the newest with training state; if no other rule chooses checkpoints, keep all."""
    whole = {entry.path for entry in newest_whole(policy, history)}
    for entry in history.intact:
        if entry.path in whole:
            yield entry, f"full {policy.full}"
        elif policy.rules.keys() <= _CHOOSE_NOTHING:
            yield entry, "no rule removes it"


def _not_whole(policy: Policy, history: History, entry: Entry) -> str:
    if not entry.holds_state:
        return "it has no training state"
    place = [one for one in history.intact if one.holds_state].index(entry) + 1
    return f"{ordinal(place, 'newest')} with training state, not one of the newest {policy.full:,}"


def newest_whole(policy: Policy, history: History) -> list[Entry]:
    """Return the newest with training state, and as many of those that a restarted run wrote last."""
    orders = (history.intact, history.written_last)
    return [one for order in orders for one in [e for e in order if e.holds_state][: policy.full or 0]]


def _keep_named(policy: Policy, history: History) -> KeptWithReasons:
    from ckpttool.formats.discovery import Globs

    globs = Globs(policy.keep_names, history.root)
    for entry in (*history.intact, *history.others):
        glob = next(chain.from_iterable(map(globs.matching, entry.places)), None)
        if glob is not None:
            yield entry, f"name {glob}"


def _not_named(policy: Policy, history: History, entry: Entry) -> str:
    return f"its name doesn't match {' or '.join(policy.keep_names)}"


# The table ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule(Option):
    """Rule of a policy, or a setting of one: its option, and its functions.

    Attributes:
        keep: Returns the checkpoints that it keeps, with reasons; None for settings.
        against: Returns why it doesn't keep a checkpoint.
        is_amount: Whether its value is a number of at least 1.
        needs: Count or date that it compares by; checkpoints without it are kept.
        alters: Whether it changes kept checkpoints, instead of choosing them.
    """

    keep: Callable[[Policy, History], KeptWithReasons] | None = None
    against: Callable[[Policy, History, Entry], str] | None = None
    is_amount: bool = False
    needs: Literal["step", "epoch", "date"] | None = None
    alters: bool = False


def _rule(*flags: str, default: Any = None, **more: Any) -> Any:
    row = Rule(flags=flags, panel=RULE_PANEL, reach=Reach.HARMLESS, **more)
    return field(default=default, metadata={"option": row})


_count = partial(_rule, metavar="N", is_amount=True)
_duration = partial(_rule, metavar="TIME", parse=within, is_amount=True, needs="date")
_size = partial(_rule, metavar="SIZE", parse=nbytes, is_amount=True)


def _stretch(flag: str, count: Literal["step", "epoch"], help: str, example: int) -> Any:
    keep, against = partial(_keep_every, count), partial(_not_first, count)
    return _count(flag, help=help, keep=keep, against=against, needs=count, example=example)


def _period(flag: str, help: str, example: int) -> Any:
    name = flag.removeprefix("--").replace("-", "_")
    keep, against = partial(_keep_periods, name), partial(_not_newest, name)
    return _count(flag, help=help, keep=keep, against=against, needs="date", example=example)


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Rules for the checkpoints of each series: a checkpoint that any rule keeps is kept.

    Each attribute defines an option of ``prune`` and ``list``, a key of ``[retention]``, and its functions.
    Durations are in seconds, sizes in bytes.
    """

    keep_last: int | None = _count(
        *("--keep", "--keep-last"),
        help="Keep the newest N intact checkpoints.",
        keep=_keep_last,
        against=_not_last,
        example=3,
    )
    keep_best: int | None = _count(
        "--keep-best", help="Keep the N best by --metric.", keep=_keep_best, against=_not_best, example=2
    )
    keep_best_runs: int | None = _count(
        "--keep-best-runs",
        help="Remove all runs but the N best by --metric; other rules apply within these.",
        keep=_keep_all_of_best_runs,
        example=5,
    )
    metric: str | None = _rule(
        "--metric",
        metavar="NAME",
        help="Compare by this metric for --keep-best and --keep-best-runs, such as val_loss.",
        example="val_loss",
        complete="metric",
    )
    mode: Mode | None = _rule(
        "--mode", help="Take the lowest or the highest value as the best. [default: by the name]"
    )
    keep_every_steps: int | None = _stretch(
        "--keep-every-steps",
        "step",
        "Keep the first checkpoint at or after each multiple of N steps.",
        10_000,
    )
    keep_every_epochs: int | None = _stretch(
        "--keep-every-epochs", "epoch", "Keep the first checkpoint at or after each multiple of N epochs.", 10
    )
    keep_hourly: int | None = _period(
        "--keep-hourly", "Keep the newest of each of the last N hours with checkpoints.", 24
    )
    keep_daily: int | None = _period(
        "--keep-daily", "Keep the newest of each of the last N days with checkpoints.", 7
    )
    keep_weekly: int | None = _period(
        "--keep-weekly", "Keep the newest of each of the last N weeks, which start on Monday.", 4
    )
    keep_monthly: int | None = _period("--keep-monthly", "Keep the newest of each of the last N months.", 12)
    keep_yearly: int | None = _period("--keep-yearly", "Keep the newest of each of the last N years.", 5)
    keep_within: int | None = _duration(
        "--keep-within",
        help="Keep checkpoints at most TIME (7d12h) older than the newest.",
        keep=_keep_within,
        against=_not_within,
        example="7d12h",
    )
    older_than: int | None = _duration(
        "--older-than",
        help="Remove only checkpoints saved more than TIME (30d) ago; with --empty-trash, those removed "
        "before then.",
        keep=_keep_younger,
        against=_not_younger,
        example="30d",
    )
    keep_names: tuple[str, ...] = _rule(
        "--keep-name",
        metavar="GLOB",
        help="Keep checkpoints with matching names.",
        keep=_keep_named,
        against=_not_named,
        example=["best*"],
        default=(),
    )
    max_size: int | None = _size(
        "--max-size", help="Keep the newest of each series, up to SIZE (200GB).", example="200GB"
    )
    max_total_size: int | None = _size(
        "--max-total-size",
        help="Keep the newest of all series together, up to SIZE.",
        needs="date",
        example="1.5TiB",
    )
    full: int | None = _count(
        "--full",
        help="Keep the newest N whole; remove optimizer and other training state from older ones.",
        keep=_keep_whole,
        against=_not_whole,
        alters=True,
        example=2,
    )
    dtype: SlimType | None = _rule(
        "--dtype", help="Convert the weights that --full slims to this type.", alters=True
    )
    incomplete: Incomplete = _rule(
        "--incomplete",
        help="Keep or remove incomplete older checkpoints. [default: keep]",
        default="keep",
    )

    def __post_init__(self) -> None:
        ranking = next(
            (name for name in ("keep_best", "keep_best_runs") if getattr(self, name) is not None), None
        )
        if ranking is not None and self.metric is None:
            raise UsageError(f"{RULES[ranking].flags[0]} needs --metric NAME, such as val_loss")
        if self.metric is not None and ranking is None:
            raise UsageError("--metric needs --keep-best N or --keep-best-runs N")
        if self.mode is not None and self.metric is None:
            raise UsageError("--mode needs --keep-best N and --metric NAME")
        check_mode(self.mode)
        # A mode that the name implies is stored, so that it is among ``rules``, which plans show.
        if self.metric is not None:
            object.__setattr__(self, "mode", self.mode or mode_of(self.metric))
        for name, rule in RULES.items():
            value = getattr(self, name) if rule.is_amount else None
            if value is not None and value < 1:
                raise UsageError(f"{rule.flags[0]} {value} would keep nothing (at least 1)")
        self._require_slimming()
        if not all(self.keep_names):
            raise UsageError("--keep-name needs a glob of names, such as 'best*'")
        if self.incomplete not in get_args(Incomplete):
            raise UsageError(f"--incomplete {self.incomplete} (keep or remove)")
        if not self.rules.keys() - {"incomplete"}:
            raise UsageError("no rule says which checkpoints to keep (--keep N keeps the newest N)")

    def _require_slimming(self) -> None:
        if self.dtype is not None and self.full is None:
            raise UsageError("--dtype needs --full N")
        if self.dtype not in (None, *get_args(SlimType)):
            raise UsageError(f"--dtype {self.dtype} ({' or '.join(get_args(SlimType))})")
        if self.full is not None and self.has_limit:
            raise UsageError(
                "--full can't be combined with a size limit (slim first, then prune to the limit)"
            )

    @property
    def resolved_mode(self) -> Mode:
        """Return the mode of the metric; raise UsageError if neither its name nor ``mode`` determines it."""
        return resolve_mode(self.metric or "", self.mode, "--metric")

    @property
    def rules(self) -> dict[str, Any]:
        """Return the given rules and their settings, by name."""
        return dict(_given_rules(self))

    @property
    def alteration(self) -> Rule | None:
        """Return the first given rule that changes kept checkpoints."""
        return next((RULES[name] for name in self.rules if RULES[name].alters), None)

    @property
    def keeps_whole_runs(self) -> bool:
        """Return whether it chooses runs, and nothing within them."""
        return self.rules.keys() <= {"keep_best_runs", "metric", "mode", *_CHOOSE_NOTHING}

    @property
    def has_limit(self) -> bool:
        """Return whether it has a limit of size."""
        return any(name in self.rules for name in LIMITS)


class ChoiceKeywords(TypedDict, total=False):
    """The attributes of ``Policy`` that only choose checkpoints, for type checkers."""

    keep_last: int | None
    keep_best: int | None
    keep_best_runs: int | None
    metric: str | None
    mode: Mode | None
    keep_every_steps: int | None
    keep_every_epochs: int | None
    keep_hourly: int | None
    keep_daily: int | None
    keep_weekly: int | None
    keep_monthly: int | None
    keep_yearly: int | None
    keep_within: int | None
    older_than: int | None
    keep_names: tuple[str, ...]
    max_size: int | None
    max_total_size: int | None
    incomplete: Incomplete


class PolicyKeywords(ChoiceKeywords, total=False):
    """The attributes of ``Policy``, for type checkers."""

    full: int | None
    dtype: SlimType | None


LIMITS = ("max_size", "max_total_size")
"""Rules that keep the newest checkpoints up to a size in bytes."""

RULES: Mapping[str, Rule] = {one.name: one.metadata["option"] for one in fields(Policy)}
"""Rules and settings by the attribute of ``Policy``."""

CHOICES = tuple(name for name, rule in RULES.items() if not rule.alters)
"""The rules that only choose checkpoints."""

_CHOOSE_NOTHING = frozenset({"incomplete", *(RULES.keys() - CHOICES)})
"""Rules that choose no intact checkpoints."""


@lru_cache
def _given_rules(policy: Policy) -> Mapping[str, Any]:
    rules = ((rule.name, getattr(policy, rule.name), rule.default) for rule in fields(policy))
    return {name: value for name, value, default in rules if value != default}
