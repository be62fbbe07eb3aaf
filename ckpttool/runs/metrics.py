"""Metrics of checkpoints: values from logs, and contradictions between records.

Logs are matched by step, else by epoch, and never by guessing. Their values take precedence over those in the
checkpoint, as the user named the log; a contradiction is a warning.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import BinaryIO, Literal

from ckpttool.containers.tfrecord import is_record_head
from ckpttool.core.errors import NotFound, Unsupported, UsageError, from_os_error
from ckpttool.core.text import counted
from ckpttool.formats.traits import traits_of
from ckpttool.runs.entry import Entry
from ckpttool.runs.logs import (
    Log,
    Number,
    Range,
    event_files,
    is_event_file,
    read_csv,
    read_events,
    read_json_lines,
    read_json_list,
    read_state,
)
from ckpttool.runs.run_directories import read_number_pairs
from ckpttool.runs.trackers import TrackedRun, metrics_tracker, tracked_runs
from ckpttool.storage import fs

_PERCENT = 100


def disagreements(entries: Sequence[Entry]) -> Iterator[str]:
    """Yield a warning for each metric that differs between the inside and the name of checkpoints."""
    counts: Counter[str] = Counter()
    first: dict[str, str] = {}
    for entry in entries:
        for name, named in entry.fields.metrics.items():
            # A name has fewer digits than the content, so equal means equal after rounding. It may also be a
            # percentage of a fraction that is recorded: ``acc_93`` for 0.934.
            inside = entry.recorded_metric(name)
            unit = _last_decimal(named, entry.name)
            if inside is None or any(_rounds_to(named, one, unit) for one in (inside, inside * _PERCENT)):
                continue
            counts[name] += 1
            first.setdefault(name, f"{entry.path} has {inside:.6g} inside")
    for name, count in counts.items():
        whose = f"{name} of {counted(count, 'checkpoint')}"
        yield f"{whose} differs between content and name, and the content counts: {first[name]}"


def _last_decimal(named: float, name: str) -> float:
    """Return the value of the last decimal in a name; a whole number may have none, as ``acc_93``."""
    if not math.isfinite(named) or not named.is_integer():
        return 10.0 ** -decimals(named)
    written = re.search(rf"(?<![0-9]){abs(int(named))}\.([0-9]+)", name)
    return 1.0 if written is None else 10.0 ** -len(written[1])


def _rounds_to(named: float, inside: float, unit: float) -> bool:
    """Return whether a number rounds to another one."""
    if not math.isfinite(named) or not math.isfinite(inside):
        return agree(named, inside)
    return abs(named - inside) <= max(0.501 * unit, 1e-6 * abs(named))


def agree(one: float, other: float) -> bool:
    """Return whether two numbers are equal within the decimals of the one with fewer."""
    if not math.isfinite(one) or not math.isfinite(other):
        return one == other or (math.isnan(one) and math.isnan(other))
    unit = max(10.0 ** -decimals(one), 10.0 ** -decimals(other))
    return abs(one - other) <= max(0.501 * unit, 1e-6 * abs(one))  # rounded, or between float32 and float64


def decimals(number: float) -> int:
    """Return the number of decimals of a number."""
    mantissa, _, exponent = repr(float(number)).partition("e")
    return len(mantissa.partition(".")[2]) - int(exponent or 0)


TRAINER_STATE = "trainer_state.json"

_AS_COUNTED = re.compile(r"(?P<name>.+):(?P<count>step|epoch)(?P<shift>[-+][0-9]{1,9})?", re.DOTALL)

_BUFFER = 1 << 20
_FIRST_BYTES = 12


@dataclass(frozen=True, slots=True)
class LogArgument:
    """A log as it was named: ``metrics.csv``, or ``metrics.csv:epoch+1``.

    Attributes:
        text: All of it.
        name: The file or directory.
        count: Count to match; None matches the ones that exist.
        shift: How much greater the checkpoints' number is than the log's.
    """

    text: str
    name: str
    count: Literal["step", "epoch"] | None = None
    shift: int = 0

    @staticmethod
    def parse(text: str) -> LogArgument:
        """Return the log that a text names; an existing file of that name takes precedence over a suffix."""
        match = None if fs.lexists(text) else _AS_COUNTED.fullmatch(text)
        if match is None:
            return LogArgument(text, text)
        count: Literal["step", "epoch"] = "step" if match["count"] == "step" else "epoch"
        return LogArgument(text, match["name"], count, int(match["shift"] or 0))

    def numbers(self, entries: Sequence[Entry]) -> frozenset[Number]:
        """Return all steps and epochs of a log that could be those of checkpoints."""
        numbers = (
            number
            for entry in entries
            for number in (entry.step, entry.logged_as, entry.epoch, entry.fields.number)
        )
        return frozenset(number - self.shift for number in numbers if number is not None)


def add_log_metrics(
    entries: Sequence[Entry], files: Sequence[str], root: str
) -> tuple[list[Entry], list[str]]:
    """Return checkpoints with the values of logs, and warnings about them.

    Args:
        entries: The checkpoints.
        files: The logs, or trackers' names; if two have the same metric, the later counts. A relative name
            that doesn't exist is searched in each directory of checkpoints, in its parent, and in the root.
        root: The directory of the survey.

    Raises:
        UsageError: The first epoch of a log is unclear, and no other values match.
        NotFound: A log doesn't exist in any of these.
        CheckpointError: A log is damaged, or can't be read.
    """
    measured, warnings = read_number_pairs(entries), list[str]()
    for named_log in map(LogArgument.parse, files) if measured else ():
        undecided: str | None = None
        has_any = False
        for read, indexes, parameters in _logs(named_log, measured, root, warnings):
            covered = [measured[index] for index in indexes]
            log = read(named_log.numbers(covered))
            values = list(_match(named_log, log, covered))
            doubts = [*log.warnings, *_doubts(named_log, log, covered, values)]
            warnings += doubts
            has_any = has_any or any(values)
            if not any(values) and _epochs_start_differently(named_log, log, covered):
                undecided = undecided or doubts[-1]
            for index, new in zip(indexes, values, strict=True):
                entry = measured[index]
                measured[index] = replace(
                    entry,
                    metrics={**entry.metrics, **new},
                    hyper_parameters={**entry.hyper_parameters, **parameters},
                )
        if undecided is not None and not has_any:
            raise UsageError(undecided)
    return measured, warnings


def _logs(
    named_log: LogArgument, entries: Sequence[Entry], root: str, warnings: list[str]
) -> Iterator[tuple[Callable[[frozenset[Number]], Log], list[int], Mapping[str, object]]]:
    """Yield for each log of a name its reader, its checkpoints, and the parameters of their run."""
    if (tracker := metrics_tracker(named_log.name)) is None:
        for path, indexes in _locate_logs(named_log, entries, root, warnings).items():
            yield partial(read_log, path), indexes, {}
        return
    for run, indexes in tracked_runs(tracker, named_log.name, entries, root, warnings):
        yield partial(_read_run, run), indexes, run.parameters


def _read_run(run: TrackedRun, numbers: frozenset[Number]) -> Log:
    log = Log(run.label, numbers)
    run.read(log)
    return log


def read_log(path: str, numbers: frozenset[Number]) -> Log:
    """Return a log's values at some steps and epochs."""
    log = Log(_short_path(path), numbers)
    if not fs.isdir(path):
        with _open_log(path) as file:
            _read_file(file, log)
        return log
    files = event_files(path)
    if not files:
        raise Unsupported(path, "a directory without event files", expected="events.out.tfevents…, or a file")
    for event_file, prefix in files:
        with _open_log(event_file) as file:
            read_events(file, event_file, log, prefix)
    return log


def _read_file(file: BinaryIO, log: Log) -> None:
    """Read a log file; its first bytes determine the format."""
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
        return fs.open_regular(path, _BUFFER)
    except OSError as error:
        raise from_os_error(error, path) from error
    except ValueError as error:
        raise NotFound(path, f"invalid path: {error}") from error


# Places of logs -----------------------------------------------------------------------------------


def _locate_logs(
    named_log: LogArgument, entries: Sequence[Entry], root: str, warnings: list[str]
) -> dict[str, list[int]]:
    """Return the logs of a name, each with the checkpoints that it is for."""
    if os.path.isabs(named_log.name) or fs.lexists(named_log.name):
        return {named_log.name: list(range(len(entries)))}
    directories = {entry.directory for entry in entries}
    paths = {directory: _nearest_log(directory, named_log.name, root) for directory in directories}
    missing = sorted(directory for directory, path in paths.items() if path is None)
    if len(missing) == len(paths):
        problem = "no such file or directory: not here, next to the checkpoints or above them"
        raise NotFound(named_log.name, problem)
    if missing:
        others = len(missing) - 1
        more = " and 1 other directory" if others == 1 else f" and {others:,} other directories"
        names = f"{missing[0]}{more if others else ''}"
        warnings.append(f"{named_log.name}: not found next to the checkpoints in {names}")
    logs: dict[str, list[int]] = {}
    for index, entry in enumerate(entries):
        if (path := paths[entry.directory]) is not None:
            logs.setdefault(path, []).append(index)
    return logs


def _nearest_log(directory: str, name: str, root: str) -> str | None:
    for parent in (directory, os.path.join(directory, os.pardir), root):
        path = os.path.join(parent, name)
        if fs.lexists(path):
            return _short_path(path)
    return None


def _short_path(path: str) -> str:
    """Return a path without ``..``, if that is the same file."""
    short = fs.normpath(path)
    try:
        return short if fs.samefile(short, path) else path
    except (OSError, ValueError):
        return path


# Matching -----------------------------------------------------------------------------------------


def _match(named_log: LogArgument, log: Log, entries: Sequence[Entry]) -> Iterator[Mapping[str, float]]:
    """Yield a log's values for each checkpoint."""
    # A log with both epochs and steps is probably Lightning's, whose loggers count steps differently from its
    # checkpoints (``Entry.logged_as``). If no checkpoint matches so, another program wrote the log. If the
    # epochs of log and checkpoints seem to begin at different numbers, none is matched by epoch: the values
    # would be those of a neighbour.
    is_odd = named_log.count is not None or _epochs_start_differently(named_log, log, entries)
    as_logged = named_log.count is None and log.counts_both
    if as_logged and not any(one.logged_as in log.by_step for one in entries if one.logged_as is not None):
        as_logged = False
    for entry in entries:
        if named_log.count is not None:
            yield _match_as_given(named_log, log, entry)
            continue
        if log.by_checkpoint:
            names = (entry.name, os.path.basename(entry.directory))
            yield next((log.by_checkpoint[name] for name in names if name in log.by_checkpoint), {})
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


def _match_as_given(named_log: LogArgument, log: Log, entry: Entry) -> Mapping[str, float]:
    """Return a log's values for a checkpoint, if the user named the count to match and its shift."""
    number = entry.step if named_log.count == "step" else entry.epoch
    if number is None and entry.fields.position.count(None) == 3:
        number = entry.fields.number  # its name has neither, but a number
    if number is None:
        return {}
    number -= named_log.shift
    if named_log.count == "step" or log.epochs.least is None:
        return log.by_step.get(number, {})
    return {**log.in_epoch.get(number, {}), **log.by_epoch.get(number, {})}


def _epochs_start_differently(named_log: LogArgument, log: Log, entries: Sequence[Entry]) -> bool:
    """Return whether epochs of a log and of checkpoints seem to start at different numbers (0 and 1)."""
    epochs = Range.of(entry.epoch for entry in entries)
    if named_log.count is not None or log.epochs.least is None or epochs.least is None:
        return False
    if log.epochs.most is None or epochs.most is None:
        return False
    is_keras = any(
        traits_of(one.format or "").counts_epochs_from_one and one.counts_inside[0] is None
        for one in entries
        if one.epoch is not None
    )
    # A log from 0 with checkpoints from 1 on may also be one of a run whose first checkpoint wasn't kept.
    # Only Keras, whose names count from one, or a checkpoint beyond the end of the log shows that they
    # differ.
    if log.epochs.least == 0 and epochs.least > 0:
        return is_keras or epochs.most > log.epochs.most
    return log.epochs.least == 1 and epochs.least == 0


# Warnings -----------------------------------------------------------------------------------------


def _doubts(
    named_log: LogArgument, log: Log, entries: Sequence[Entry], values: Sequence[Mapping[str, float]]
) -> Iterator[str]:
    if not any(values):
        yield _no_match(named_log, log, entries)
        return
    directories = {entry.directory for entry, measured in zip(entries, values, strict=True) if measured}
    if len(directories) > 1:
        yield f"{log.path}: one log for the checkpoints of {len(directories):,} directories"
    if (log.by_epoch or not log.counts_both) and _epochs_start_differently(named_log, log, entries):
        has, have = log.epochs, Range.of(entry.epoch for entry in entries)
        yield f"{log.path}: it has epochs {has}, the checkpoints {have}; {_base_hint(named_log, log)}"
    yield from _contradictions(log, entries, values)


def _base_hint(named_log: LogArgument, log: Log) -> str:
    """Return advice on naming the shift of epochs."""
    hint = f"{named_log.name}:epoch{1 if log.epochs.least == 0 else -1:+d}"
    problem = "it is unclear which epochs are the same"
    return f"{problem} (use {hint}, or {named_log.name}:epoch if equal numbers are)"


def _no_match(named_log: LogArgument, log: Log, entries: Sequence[Entry]) -> str:
    if log.steps.least is None and log.epochs.least is None:
        return f"{log.path}: it is still empty"
    steps, epochs = Range.of(entry.step for entry in entries), Range.of(entry.epoch for entry in entries)
    both = f"{log.path}: it has {_counts(log.steps, log.epochs)}, the checkpoints {_counts(steps, epochs)}"
    if _epochs_start_differently(named_log, log, entries):
        return f"{both}; {_base_hint(named_log, log)}"
    none = "it has no values for them" if log.has_empty_rows else "none of these match"
    if log.epochs.least is None and steps.least is None and epochs.least is not None:
        return f"{both}; {none} (if its steps are epochs, use {named_log.name}:epoch)"
    return f"{both}; {none}"


def _counts(steps: Range, epochs: Range) -> str:
    known = [
        f"{name}s {numbers}"
        for name, numbers in (("step", steps), ("epoch", epochs))
        if numbers.least is not None
    ]
    return " and ".join(known) or "neither steps nor epochs"


def _contradictions(
    log: Log, entries: Sequence[Entry], values: Sequence[Mapping[str, float]]
) -> Iterator[str]:
    """Yield a warning for each metric that differs between checkpoints and a log."""
    counts: Counter[str] = Counter()
    first: dict[str, str] = {}
    for entry, measured in zip(entries, values, strict=True):
        for name, value in measured.items():
            recorded = entry.recorded_metric(name)
            if recorded is not None and not agree(recorded, value):
                counts[name] += 1
                first.setdefault(name, f"{entry.name} says {recorded:.6g}, the log {value:.6g}")
    for name, count in counts.items():
        whose = f"{name} of {counted(count, 'checkpoint')}"
        yield f"{log.path}: {whose} differs in the log, which counts: {first[name]}"
