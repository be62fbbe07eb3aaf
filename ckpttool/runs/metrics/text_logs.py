"""Logs of lines: CSV with a header, JSON with one object a line, or a list of them. All are read once."""

from __future__ import annotations

import codecs
import csv
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO

from ckpttool.containers.jsontext import Doubled, parse_json
from ckpttool.core.errors import CheckpointError, DamagedCheckpoint, LimitExceeded, Unsupported, from_os_error
from ckpttool.runs.metrics.log import EPOCHS, STEPS, Log, Number

MAX_LINE = 1 << 24
"""The longest line, in bytes."""

MAX_STATE = 100_000_000
"""The largest ``trainer_state.json``, or list, in bytes."""

_DELIMITERS = ",;\t"
_WITH_COMMA = re.compile(r"[-+]?[0-9]+,[0-9]+(?:e[-+]?[0-9]+)?", re.ASCII | re.IGNORECASE)
_EMPTY = frozenset({"", "na", "n/a", "none", "null"})
"""What stands in a cell that has no value; Keras writes ``NA``."""

_RAY_TRIAL, _RAY_CHECKPOINT = "trial_id", "checkpoint_dir_name"
_RAY_COUNTS = frozenset(
    {
        *("timestamp", "pid", "training_iteration", "time_this_iter_s", "time_total_s"),
        *("time_since_restore", "iterations_since_restore"),
    }
)
"""What Ray counts in each result, which is no metric."""

_LOST_END = "its last line has no end, as if it were still being written; it was not read"


def read_csv(file: BinaryIO, log: Log) -> None:
    """Read a CSV file with a header into a log.

    Source: Lightning ``CSVLogger``, Keras ``CSVLogger``.
    """
    lines = _text_lines(file, log)
    first = next((line for line in lines if line.strip()), None)
    if first is None:
        return
    delimiter = max(_DELIMITERS, key=first.count)
    header = _CsvHeader(log.path, _next_row(csv.reader([first], delimiter=delimiter), log) or [], 1)
    rows = csv.reader(lines, delimiter=delimiter, strict=True)
    while (row := _next_row(rows, log)) is not None:
        place = rows.line_num + 1
        if header.is_repeated(row):
            header = _CsvHeader(log.path, row, place)
        elif row:
            log.add(*header.read(row, place))
            if header.comma is not None and not log.warnings:
                log.warnings.append(f"{log.path}: {header.comma}: a number with a comma is not read")


def _next_row(rows: Any, log: Log) -> list[str] | None:
    """Return the next row, or None at the end."""
    try:
        row: list[str] | None = next(rows, None)
    except csv.Error as error:
        if "unexpected end" in str(error):
            log.warnings.append(f"{log.path}: {_LOST_END}")
            return None
        raise DamagedCheckpoint(log.path, f"no CSV: {error}", where=f"line {rows.line_num + 1:,}") from error
    return row


class _CsvHeader:
    """The names of columns, and which of them count."""

    def __init__(self, path: str, names: Sequence[str], line: int) -> None:
        self.path = path
        self.names = [name.strip() for name in names]
        doubled = next((name for name in self.names if name and self.names.count(name) > 1), None)
        if doubled is not None:
            raise DamagedCheckpoint(path, f"the column {doubled!r} stands twice", where=f"line {line:,}")
        lower = [name.lower() for name in self.names]
        self.step = next((lower.index(name) for name in STEPS if name in lower), None)
        self.epoch = next((lower.index(name) for name in EPOCHS if name in lower), None)
        self.comma: str | None = None
        if self.step is None and self.epoch is None:
            raise _no_count_error(path, "no column of its first line")

    def is_repeated(self, row: Sequence[str]) -> bool:
        """Tell whether a row is a header once more: a restarted run may write it, with other columns."""
        names = {cell.strip().lower() for cell in row}
        return not names.isdisjoint((*STEPS, *EPOCHS)) and not any(map(_is_number, row))

    def read(self, row: Sequence[str], line: int) -> tuple[Number | None, Number | None, dict[str, float]]:
        """Return a row's step, its epoch and its values."""
        if len(row) != len(self.names):
            found, expected = f"{len(row)} columns", f"{len(self.names)}, as in the header"
            raise DamagedCheckpoint(self.path, found, expected=expected, where=f"line {line:,}")
        step, epoch = self._count(self.step, row, line), self._count(self.epoch, row, line)
        values: dict[str, float] = {}
        for at, (name, cell) in enumerate(zip(self.names, row, strict=True)):
            if at not in (self.step, self.epoch) and _is_number(cell):
                values[name] = float(cell)
            elif self.comma is None and _WITH_COMMA.fullmatch(cell.strip()):
                self.comma = f"{name} is {cell.strip()!r:.40} in line {line:,}"
        return step, epoch, values

    def _count(self, column: int | None, row: Sequence[str], line: int) -> Number | None:
        text = "" if column is None else row[column].strip()
        if text.lower() in _EMPTY:
            return None
        if not _is_number(text):
            name = self.names[column or 0]
            raise DamagedCheckpoint(
                self.path, f"{name} is {text!r:.40}", expected="a number", where=f"line {line:,}"
            )
        return float(text)


def read_json_lines(file: BinaryIO, log: Log) -> None:
    """Read a file with one JSON object a line into a log."""
    has_any = False
    for line, data, is_whole in numbered_lines(file, log.path):
        if not data.strip():
            continue
        try:
            record = _json_object(log.path, data, line)
        except DamagedCheckpoint:
            if is_whole:
                raise
            log.warnings.append(f"{log.path}: {_LOST_END}")
            break
        has_any = True
        add_object(log, record)
    if has_any and log.steps.least is None and log.epochs.least is None and not log.by_checkpoint:
        raise _no_count_error(log.path, "no object in it")


def read_json_list(file: BinaryIO, log: Log) -> None:
    """Read a list of JSON objects into a log."""
    records = _json_document(file, log.path, "list")
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
        raise DamagedCheckpoint(log.path, "a JSON list of something else", expected="of objects")
    for record in records:
        add_object(log, record)
    if records and log.steps.least is None and log.epochs.least is None:
        raise _no_count_error(log.path, "no object in it")


def read_state(file: BinaryIO, log: Log) -> None:
    """Read the history in a Trainer's ``trainer_state.json`` into a log."""
    state = _json_document(file, log.path, "state")
    history = state.get("log_history") if isinstance(state, dict) else None
    if not isinstance(history, list):
        raise DamagedCheckpoint(log.path, "no list of what was logged", expected="log_history")
    for record in history:
        if isinstance(record, dict):
            add_object(log, record)


def _json_document(file: BinaryIO, path: str, what: str) -> Any:
    """Return what a file of JSON holds."""
    try:
        data = file.read(MAX_STATE + 1)
    except OSError as error:
        raise from_os_error(error, path) from error
    if len(data) > MAX_STATE:
        raise LimitExceeded(path, f"more than {MAX_STATE:,} bytes of JSON", expected="less")
    return parse_json(path, data.removeprefix(codecs.BOM_UTF8), what, constants=True, surrogates=True)


def add_object(log: Log, record: Mapping[str, Any]) -> None:
    """Take a JSON object into a log: its step, its epoch, and its numbers, those under ``metrics`` too.

    Ray says of which checkpoint a line of its ``result.json`` is.
    Source: ray-project/ray ``python/ray/tune/result.py`` (``AUTO_RESULT_KEYS``), ``train/constants.py``
    (``CHECKPOINT_DIR_NAME``).
    """
    values: dict[str, float] = {}
    inner = record.get("metrics")
    counts = {*STEPS, *EPOCHS, *(_RAY_COUNTS if _RAY_TRIAL in record else ())}
    for name, value in [*record.items(), *(inner.items() if isinstance(inner, dict) else ())]:
        if name not in counts and not name.startswith("_"):
            number = _json_number(value)
            if number is not None:
                values[name] = number
    if _RAY_TRIAL in record and isinstance(name := record.get(_RAY_CHECKPOINT), str):
        log.add_of_checkpoint(name, values)
    log.add(_first_number(record, STEPS), _first_number(record, EPOCHS), values)


def _json_object(path: str, data: bytes, line: int) -> dict[str, Any]:
    where = f"line {line:,}"
    try:
        record = parse_json(path, data, "line", constants=True, surrogates=True)
    except DamagedCheckpoint as failure:
        raise type(failure)(path, failure.found, expected=failure.expected, where=where) from failure
    if not isinstance(record, dict):
        raise DamagedCheckpoint(path, f"a {type(record).__name__}", expected="an object", where=where)
    if isinstance(record, Doubled):
        raise DamagedCheckpoint(path, f"{record.key!r:.60} stands twice", where=where)
    return record


def _first_number(record: Mapping[str, Any], names: Iterable[str]) -> Number | None:
    numbers = (_json_number(record.get(name)) for name in names)
    return next((number for number in numbers if number is not None), None)


def _json_number(value: object) -> float | None:
    if isinstance(value, str) and value in ("NaN", "Infinity", "-Infinity"):
        return float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def _is_number(text: str) -> bool:
    if "_" in text:  # Python reads 1_0 as 10
        return False
    try:
        float(text)
    except ValueError:
        return False
    return True


def _text_lines(file: BinaryIO, log: Log) -> Iterator[str]:
    """Yield lines as text. The last one counts where it has an end: a number in it may be cut short else."""
    for line, data, is_whole in numbered_lines(file, log.path):
        if not is_whole:
            log.warnings.append(f"{log.path}: {_LOST_END}")
            return
        try:
            text = data.decode("utf-8-sig" if line == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise DamagedCheckpoint(log.path, "it is not UTF-8", where=f"line {line:,}") from error
        if "\0" in text:
            raise DamagedCheckpoint(log.path, "a NUL in a text", where=f"line {line:,}")
        yield text


def numbered_lines(file: BinaryIO, path: str) -> Iterator[tuple[int, bytes, bool]]:
    """Yield lines with their numbers, and whether each has an end."""
    number = 0
    while True:
        number += 1
        try:
            data = file.readline(MAX_LINE + 1)
        except OSError as error:
            raise from_os_error(error, path) from error
        if not data:
            return
        if len(data) > MAX_LINE:
            found = f"a line of more than {MAX_LINE:,} bytes"
            raise LimitExceeded(path, found, expected="a shorter one", where=f"line {number:,}")
        yield number, data, data.endswith(b"\n")


def _no_count_error(path: str, what: str) -> CheckpointError:
    names = ", ".join(name for name in (*STEPS[:2], *EPOCHS[:1]))
    return Unsupported(path, f"{what} is a step or an epoch", expected=names)
