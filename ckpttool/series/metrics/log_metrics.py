"""What logs say of checkpoints: matched by step, else by epoch, and never by a guess.

What a log says counts more than what a checkpoint says of itself: somebody named the log. A contradiction is
told.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import BinaryIO, Literal

from ckpttool.errors import NotFound, Unsupported, UsageError, from_os_error
from ckpttool.report import counted
from ckpttool.series.members.entry import Entry
from ckpttool.series.members.runs import read_number_pairs
from ckpttool.series.metrics.agreement import agree
from ckpttool.series.metrics.events import event_files, is_event_file, read_events
from ckpttool.series.metrics.log import Log, Number, Range
from ckpttool.series.metrics.text_logs import read_csv, read_json_lines, read_json_list, read_state
from ckpttool.wire.source import open_regular
from ckpttool.wire.tfrecord import is_record_head

TRAINER_STATE = "trainer_state.json"

_AS_COUNTED = re.compile(r"(?P<name>.+):(?P<count>step|epoch)(?P<shift>[-+][0-9]{1,9})?", re.DOTALL)
_KERAS = frozenset({"keras", "keras-h5", "hdf5", "tensorflow"})
"""What Keras's ModelCheckpoint writes: it counts epochs from 1, and Keras's loggers from 0."""

_BUFFER = 1 << 20
_FIRST_BYTES = 12


@dataclass(frozen=True, slots=True)
class LogArgument:
    """A log as it was named: ``metrics.csv``, or ``metrics.csv:epoch+1``.

    Attributes:
        text: All of it.
        name: The file or directory.
        count: What is matched; None where it is what there is.
        shift: How much greater the checkpoints' number is than the log's.
    """

    text: str
    name: str
    count: Literal["step", "epoch"] | None = None
    shift: int = 0

    @staticmethod
    def parse(text: str) -> LogArgument:
        """Return what a name says; a file that is called so is meant as it is."""
        match = None if os.path.lexists(text) else _AS_COUNTED.fullmatch(text)
        if match is None:
            return LogArgument(text, text)
        count: Literal["step", "epoch"] = "step" if match["count"] == "step" else "epoch"
        return LogArgument(text, match["name"], count, int(match["shift"] or 0))

    def places(self, entries: Sequence[Entry]) -> frozenset[Number]:
        """Return all steps and epochs of a log that could be those of checkpoints."""
        numbers = (
            number for one in entries for number in (one.step, one.logged_as, one.epoch, one.fields.number)
        )
        return frozenset(number - self.shift for number in numbers if number is not None)


def add_log_metrics(
    entries: Sequence[Entry], files: Sequence[str], root: str
) -> tuple[list[Entry], list[str]]:
    """Return checkpoints with what logs say of them, and what is doubtful about it.

    Args:
        entries: The checkpoints.
        files: The logs; of two that know a metric the later counts. A relative name that isn't there is
            looked for in each directory of checkpoints, in the one above it, and in the root.
        root: The directory that all was found in.

    Raises:
        UsageError: Nobody can tell which epochs of a log are which, and it has no other that is known.
        NotFound: A log is nowhere.
        CheckpointError: A log is damaged, or can't be read.
    """
    found, warnings = read_number_pairs(entries), list[str]()
    for given in map(LogArgument.parse, files) if found else ():
        undecided: str | None = None
        has_any = False
        for path, indexes in _locate_logs(given, found, root, warnings).items():
            meant = [found[index] for index in indexes]
            log = read_log(path, given.places(meant))
            values = list(_match(given, log, meant))
            doubts = [*log.warnings, *_doubts(given, log, meant, values)]
            warnings += doubts
            has_any = has_any or any(values)
            if not any(values) and _other_base(given, log, meant):
                undecided = undecided or doubts[-1]
            for index, measured in zip(indexes, values, strict=True):
                found[index] = replace(found[index], metrics={**found[index].metrics, **measured})
        if undecided is not None and not has_any:
            raise UsageError(undecided)
    return found, warnings


def read_log(path: str, places: frozenset[Number]) -> Log:
    """Return what a log has of some steps and epochs."""
    log = Log(_short_path(path), places)
    if not os.path.isdir(path):
        with _open_log(path) as file:
            _read_file(file, log)
        return log
    files = event_files(path)
    if not files:
        raise Unsupported(path, "a directory without event files", expected="events.out.tfevents…, or a file")
    for one, prefix in files:
        with _open_log(one) as file:
            read_events(file, one, log, prefix)
    return log


def _read_file(file: BinaryIO, log: Log) -> None:
    """Read a file by what it begins with, whatever it is called."""
    start = file.peek(_FIRST_BYTES) if hasattr(file, "peek") else b""
    name = os.path.basename(log.path)
    if is_event_file(name) or is_record_head(start[:_FIRST_BYTES]):
        read_events(file, log.path, log)
    elif name == TRAINER_STATE:
        read_state(file, log)
    elif start.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{"):
        read_json_lines(file, log)
    elif start.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
        read_json_list(file, log)
    else:
        read_csv(file, log)


def _open_log(path: str) -> BinaryIO:
    try:
        return open_regular(path, _BUFFER)
    except OSError as error:
        raise from_os_error(error, path) from error
    except ValueError as error:
        raise NotFound(path, f"no path: {error}") from error


# Where the logs lie --------------------------------------------------------------------------------


def _locate_logs(
    given: LogArgument, entries: Sequence[Entry], root: str, warnings: list[str]
) -> dict[str, list[int]]:
    """Return the logs that a name stands for, each with the checkpoints that it is for."""
    if os.path.isabs(given.name) or os.path.lexists(given.name):
        return {given.name: list(range(len(entries)))}
    places = {
        directory: _log_beside(directory, given.name, root)
        for directory in {one.directory for one in entries}
    }
    missing = sorted(directory for directory, path in places.items() if path is None)
    if len(missing) == len(places):
        found = "no such file or directory, neither here nor beside the checkpoints nor above them"
        raise NotFound(given.name, found)
    if missing:
        warnings.append(f"{given.name}: there is none beside the checkpoints in {_first_and_others(missing)}")
    logs: dict[str, list[int]] = {}
    for index, entry in enumerate(entries):
        if (path := places[entry.directory]) is not None:
            logs.setdefault(path, []).append(index)
    return logs


def _log_beside(directory: str, name: str, root: str) -> str | None:
    for place in (directory, os.path.join(directory, os.pardir), root):
        path = os.path.join(place, name)
        if os.path.lexists(path):
            return _short_path(path)
    return None


def _short_path(path: str) -> str:
    """Return a path without detours, where that is the same file."""
    short = os.path.normpath(path)
    try:
        return short if os.path.samefile(short, path) else path
    except (OSError, ValueError):
        return path


def _first_and_others(names: Sequence[str]) -> str:
    others = len(names) - 1
    more = "1 other directory" if others == 1 else f"{others:,} other directories"
    return f"{names[0]} and {more}" if others else names[0]


# What belongs to what ------------------------------------------------------------------------------


def _match(given: LogArgument, log: Log, entries: Sequence[Entry]) -> Iterator[Mapping[str, float]]:
    """Yield what a log says of each checkpoint.

    A log of Lightning's, which has epochs beside its steps, counts as Lightning's loggers do; one that fits
    none of its checkpoints that way is somebody's own.
    """
    is_odd = given.count is not None or _other_base(given, log, entries)
    as_logged = given.count is None and log.counts_both
    if as_logged and not any(one.logged_as in log.by_step for one in entries if one.logged_as is not None):
        as_logged = False
    for entry in entries:
        if given.count is not None:
            yield _match_as_given(given, log, entry)
            continue
        step = entry.logged_as if as_logged and entry.logged_as is not None else entry.step
        values: dict[str, float] = {}
        if step is not None:
            values |= log.by_step.get(step, {})
        elif entry.epoch is not None and not is_odd:
            values |= log.in_epoch.get(entry.epoch, {})
        if entry.epoch is not None and not is_odd:
            values |= log.by_epoch.get(entry.epoch, {})
        yield values


def _match_as_given(given: LogArgument, log: Log, entry: Entry) -> Mapping[str, float]:
    """Return what a log says of a checkpoint where it was told what to match, and by how much to shift it."""
    number = _matched_number(given, entry)
    if number is None:
        return {}
    number -= given.shift
    if given.count == "step" or log.epochs.least is None:
        return log.by_step.get(number, {})
    return {**log.in_epoch.get(number, {}), **log.by_epoch.get(number, {})}


def _matched_number(given: LogArgument, entry: Entry) -> Number | None:
    """Return the step or epoch that was asked for; the name's last number, if it has neither."""
    number = entry.step if given.count == "step" else entry.epoch
    return entry.fields.number if number is None and entry.fields.position.count(None) == 3 else number


def _other_base(given: LogArgument, log: Log, entries: Sequence[Entry]) -> bool:
    """Tell whether epochs of a log and of checkpoints seem to be counted from different numbers."""
    epochs = _epochs(entries)
    if given.count is not None or log.epochs.least is None or epochs.least is None:
        return False
    if log.epochs.most is None or epochs.most is None:
        return False
    is_keras = any(one.format in _KERAS and one.inside[0] is None for one in entries if one.epoch is not None)
    if log.epochs.least == 0 and epochs.least > 0:
        return is_keras or epochs.most > log.epochs.most
    return log.epochs.least == 1 and epochs.least == 0


def _epochs(entries: Sequence[Entry]) -> Range:
    found = Range()
    for entry in entries:
        if entry.epoch is not None:
            found.add(entry.epoch)
    return found


def _steps(entries: Sequence[Entry]) -> Range:
    found = Range()
    for entry in entries:
        if entry.step is not None:
            found.add(entry.step)
    return found


# What is doubtful ----------------------------------------------------------------------------------


def _doubts(
    given: LogArgument, log: Log, entries: Sequence[Entry], values: Sequence[Mapping[str, float]]
) -> Iterator[str]:
    if not any(values):
        yield _no_match(given, log, entries)
        return
    directories = {entry.directory for entry, found in zip(entries, values, strict=True) if found}
    if len(directories) > 1:
        yield f"{log.path}: one log for the checkpoints of {len(directories):,} directories"
    if (log.by_epoch or not log.counts_both) and _other_base(given, log, entries):
        has, have = log.epochs, _epochs(entries)
        yield f"{log.path}: it has epochs {has}, the checkpoints {have}; {_base_hint(given, log)}"
    yield from _contradictions(log, entries, values)


def _base_hint(given: LogArgument, log: Log) -> str:
    """Return what somebody can say where epochs of a log and of checkpoints begin differently."""
    hint = f"{given.name}:epoch{1 if log.epochs.least == 0 else -1:+d}"
    told = "it can't be told which epochs are the same"
    return f"{told} (say {hint}, or {given.name}:epoch where equal numbers are)"


def _no_match(given: LogArgument, log: Log, entries: Sequence[Entry]) -> str:
    if log.steps.least is None and log.epochs.least is None:
        return f"{log.path}: nothing is in it yet"
    has, have = _counts(log.steps, log.epochs), _counts(_steps(entries), _epochs(entries))
    if _other_base(given, log, entries):
        return f"{log.path}: it has {has}, the checkpoints {have}; {_base_hint(given, log)}"
    none = "it has no number at any of them" if log.has_bare else "none of them is in it"
    told = f"{log.path}: it has {has}, the checkpoints {have}; {none}"
    if log.epochs.least is None and _steps(entries).least is None and _epochs(entries).least is not None:
        return f"{told} (if its steps are epochs, say {given.name}:epoch)"
    return told


def _counts(steps: Range, epochs: Range) -> str:
    told = [f"{name}s {one}" for name, one in (("step", steps), ("epoch", epochs)) if one.least is not None]
    return " and ".join(told) or "neither steps nor epochs"


def _contradictions(
    log: Log, entries: Sequence[Entry], values: Sequence[Mapping[str, float]]
) -> Iterator[str]:
    """Yield for each metric how many checkpoints say something else of themselves than a log does."""
    others: Counter[str] = Counter()
    first: dict[str, str] = {}
    for entry, found in zip(entries, values, strict=True):
        for name, value in found.items():
            own = entry.metrics.get(name, entry.loss if name == "loss" else None)
            if own is not None and not agree(own, value):
                others[name] += 1
                first.setdefault(name, f"{entry.name} says {own:.6g}, the log {value:.6g}")
    for name, count in others.items():
        whose = f"{name} of {counted(count, 'checkpoint')}"
        yield f"{log.path}: {whose} is another in the log, which counts: {first[name]}"
