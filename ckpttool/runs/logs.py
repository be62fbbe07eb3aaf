"""Readers of metric logs: CSV, JSON lines and lists, and TensorBoard's event files.

Source: tensorflow/tensorflow ``core/util/event.proto``, ``core/framework/summary.proto``, ``tensor.proto``.
"""

from __future__ import annotations

import codecs
import csv
import math
import re
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from ckpttool.containers.jsontext import DuplicateKeyObject, parse_json
from ckpttool.containers.protobuf import FIXED32, fields, varint
from ckpttool.containers.tfrecord import records
from ckpttool.core.errors import (
    CheckpointError,
    DamagedCheckpoint,
    LimitExceeded,
    Truncated,
    Unsupported,
    from_os_error,
)
from ckpttool.formats.content.plain_data import shortest_decimal
from ckpttool.formats.interface import scan

Number = int | float

MAX_NAMES = 10_000
"""Limit on the names of metrics of a log."""

MAX_VALUES = 5_000_000
"""Limit on values per log: metrics times checkpoints."""

STEPS = (
    "global_step",
    "step",
    "train/global_step",
    "trainer/global_step",
    "iteration",
    "iter",
    "num_updates",
    "_step",
)
"""Names of a column of steps; the first that exists is used."""

EPOCHS = ("epoch", "train/epoch", "trainer/epoch", "current_epoch")
"""Names of a column of epochs; the first that exists is used."""


@dataclass(slots=True)
class Range:
    """The least and the greatest of a log's steps or epochs; None if it has none."""

    least: Number | None = None
    most: Number | None = None

    @classmethod
    def of(cls, numbers: Iterable[Number | None]) -> Range:
        """Return the range of the known numbers."""
        known = [number for number in numbers if number is not None]
        return cls(min(known, default=None), max(known, default=None))

    def add(self, number: Number) -> None:
        """Extend the range to a number."""
        self.least = number if self.least is None else min(self.least, number)
        self.most = number if self.most is None else max(self.most, number)

    def __str__(self) -> str:
        return f"{self.least:g}" if self.least == self.most else f"{self.least:.10g} to {self.most:.10g}"


@dataclass(slots=True)
class Log:
    """Values of a log at some steps and epochs; of repeated values, which restarts append, the last counts.

    Attributes:
        path: The file or directory.
        numbers: Steps and epochs whose values are kept.
        by_step: Values by step.
        by_epoch: Values by epoch, in rows without a step.
        in_epoch: Last values by epoch, in rows with a step.
        by_checkpoint: Values by the name of a checkpoint's directory.
        steps: Range of its steps.
        epochs: Range of its epochs.
        counts_both: Whether it has rows with both a step and an epoch.
        warnings: Warnings about it.
        has_empty_rows: Whether it has a row at one of ``numbers`` without any metric.
    """

    path: str
    numbers: Collection[Number]
    by_step: dict[Number, dict[str, float]] = field(default_factory=dict)
    by_epoch: dict[Number, dict[str, float]] = field(default_factory=dict)
    in_epoch: dict[Number, dict[str, float]] = field(default_factory=dict)
    by_checkpoint: dict[str, dict[str, float]] = field(default_factory=dict)
    steps: Range = field(default_factory=Range)
    epochs: Range = field(default_factory=Range)
    counts_both: bool = False
    warnings: list[str] = field(default_factory=list)
    has_empty_rows: bool = False
    _names: dict[str, str] = field(default_factory=dict)
    _kept: int = 0

    def add(self, step: Number | None, epoch: Number | None, values: Mapping[str, float]) -> None:
        """Add values at a step, at an epoch, or at both."""
        self.counts_both = self.counts_both or (step is not None and epoch is not None)
        # An epoch in a row with a step is only an attribute of the row: a log per step has many rows with the
        # same epoch, of which the last counts. It serves only checkpoints without a step. Rows without a step
        # are a log per epoch, and serve all.
        by_epoch = self.by_epoch if step is None else self.in_epoch
        for number, known, kept in ((step, self.steps, self.by_step), (epoch, self.epochs, by_epoch)):
            if number is None or not math.isfinite(number):
                continue
            known.add(number)
            if number in self.numbers and values:
                self._keep(kept.setdefault(number, {}), values)
            elif number in self.numbers:
                self.has_empty_rows = True

    def add_of_checkpoint(self, name: str, values: Mapping[str, float]) -> None:
        """Add the values of a checkpoint, by the name of its directory."""
        self._keep(self.by_checkpoint.setdefault(name, {}), values)

    def _keep(self, kept: dict[str, float], values: Mapping[str, float]) -> None:
        for name, value in values.items():
            shared = self._names.setdefault(name, name)  # equal names share one string
            self._kept += shared not in kept
            kept[shared] = value
        if len(self._names) > MAX_NAMES:
            raise LimitExceeded(self.path, "too many metrics", expected=f"at most {MAX_NAMES:,}")
        if self._kept > MAX_VALUES:
            raise LimitExceeded(self.path, "too many metric values", expected=f"at most {MAX_VALUES:,}")


MAX_LINE = 1 << 24
"""Limit on the bytes of a line."""

MAX_STATE = 100_000_000
"""Limit on the bytes of a ``trainer_state.json``, or of a list."""

_DELIMITERS = ",;\t"
_WITH_COMMA = re.compile(r"[-+]?[0-9]+,[0-9]+(?:e[-+]?[0-9]+)?", re.ASCII | re.IGNORECASE)
_EMPTY = frozenset({"", "na", "n/a", "none", "null"})
"""Texts of an empty cell; Keras writes ``NA``."""

_RAY_TRIAL, _RAY_CHECKPOINT = "trial_id", "checkpoint_dir_name"
_RAY_COUNTS = frozenset(
    {
        *("timestamp", "pid", "training_iteration", "time_this_iter_s", "time_total_s"),
        *("time_since_restore", "iterations_since_restore"),
    }
)
"""Keys of Ray's results that aren't metrics."""

_INCOMPLETE_LINE = "skipped its last line, which is incomplete (perhaps still being written)"


def read_csv(file: BinaryIO, log: Log) -> None:
    """Read a CSV file with a header into a log.

    Source: Lightning ``CSVLogger``, Keras ``CSVLogger``.
    """
    # The delimiter is guessed from the header. A restarted run may write its header again, with other
    # columns.
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
                log.warnings.append(f"{log.path}: {header.comma}: decimal commas are not supported")


def _next_row(rows: Any, log: Log) -> list[str] | None:
    """Return the next row, or None at the end."""
    try:
        row: list[str] | None = next(rows, None)
    except csv.Error as error:
        if "unexpected end" in str(error):
            log.warnings.append(f"{log.path}: {_INCOMPLETE_LINE}")
            return None
        where = f"line {rows.line_num + 1:,}"
        raise DamagedCheckpoint(log.path, f"invalid CSV: {error}", where=where) from error
    return row


class _CsvHeader:
    """Names of columns, and the columns of steps and epochs."""

    def __init__(self, path: str, names: Sequence[str], line: int) -> None:
        self.path = path
        self.names = [name.strip() for name in names]
        doubled = next((name for name in self.names if name and self.names.count(name) > 1), None)
        if doubled is not None:
            raise DamagedCheckpoint(path, f"the column {doubled!r} appears twice", where=f"line {line:,}")
        lower = [name.lower() for name in self.names]
        self.step = next((lower.index(name) for name in STEPS if name in lower), None)
        self.epoch = next((lower.index(name) for name in EPOCHS if name in lower), None)
        self.comma: str | None = None
        if self.step is None and self.epoch is None:
            raise _no_count_error(path, "its first line has no column")

    def is_repeated(self, row: Sequence[str]) -> bool:
        """Return whether a row is another header: a restarted run may write one, with other columns."""
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
            log.warnings.append(f"{log.path}: {_INCOMPLETE_LINE}")
            break
        has_any = True
        add_object(log, record)
    if has_any and log.steps.least is None and log.epochs.least is None and not log.by_checkpoint:
        raise _no_count_error(log.path, "no object has a key")


def read_json_list(file: BinaryIO, log: Log) -> None:
    """Read a list of JSON objects into a log."""
    records = _json_document(file, log.path, "list")
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
        raise DamagedCheckpoint(log.path, "not a JSON list of objects")
    for record in records:
        add_object(log, record)
    if records and log.steps.least is None and log.epochs.least is None:
        raise _no_count_error(log.path, "no object has a key")


def read_state(file: BinaryIO, log: Log) -> None:
    """Read the history in a Trainer's ``trainer_state.json`` into a log."""
    state = _json_document(file, log.path, "state")
    history = state.get("log_history") if isinstance(state, dict) else None
    if not isinstance(history, list):
        raise DamagedCheckpoint(log.path, "no log_history", expected="a list of logged values")
    for record in history:
        if isinstance(record, dict):
            add_object(log, record)


def _json_document(file: BinaryIO, path: str, what: str) -> Any:
    """Return the parsed content of a JSON file."""
    try:
        data = file.read(MAX_STATE + 1)
    except OSError as error:
        raise from_os_error(error, path) from error
    if len(data) > MAX_STATE:
        raise LimitExceeded(path, "JSON too large", expected=f"at most {MAX_STATE:,} bytes")
    return parse_json(path, data.removeprefix(codecs.BOM_UTF8), what, constants=True, surrogates=True)


def add_object(log: Log, record: Mapping[str, Any]) -> None:
    """Add a JSON object to a log: its step, its epoch, and its numbers, those under ``metrics`` included.

    A line of Ray's ``result.json`` has the name of its checkpoint.
    Source: ray-project/ray ``python/ray/tune/result.py`` (``AUTO_RESULT_KEYS``), ``train/constants.py``
    (``CHECKPOINT_DIR_NAME``).
    """
    values: dict[str, float] = {}
    inner = record.get("metrics")
    counts = {*STEPS, *EPOCHS, *(_RAY_COUNTS if _RAY_TRIAL in record else ())}
    # Weights & Biases adds names with an underscore in front: ``_step``, ``_runtime``.
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
    if isinstance(record, DuplicateKeyObject):
        raise DamagedCheckpoint(path, f"{record.key!r:.60} appears twice", where=where)
    return record


def _first_number(record: Mapping[str, Any], names: Iterable[str]) -> Number | None:
    numbers = (_json_number(record.get(name)) for name in names)
    return next((number for number in numbers if number is not None), None)


def _json_number(value: object) -> float | None:
    # JSON has no such numbers: encoders that refuse the bare words write them as strings.
    if isinstance(value, str) and value in ("NaN", "Infinity", "-Infinity"):
        return float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def _is_number(text: str) -> bool:
    if "_" in text:  # float("1_0") is 10.0
        return False
    try:
        float(text)
    except ValueError:
        return False
    return True


def _text_lines(file: BinaryIO, log: Log) -> Iterator[str]:
    """Yield lines as text, without a last line that has no newline."""
    # While a log is written, its last line may be cut anywhere: ``0.12`` may become ``0.1234``.
    for line, data, is_whole in numbered_lines(file, log.path):
        if not is_whole:
            log.warnings.append(f"{log.path}: {_INCOMPLETE_LINE}")
            return
        try:
            text = data.decode("utf-8-sig" if line == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise DamagedCheckpoint(log.path, "it is not UTF-8", where=f"line {line:,}") from error
        if "\0" in text:
            raise DamagedCheckpoint(log.path, "a NUL character", where=f"line {line:,}")
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
            raise LimitExceeded(
                path, "line too long", expected=f"at most {MAX_LINE:,} bytes", where=f"line {number:,}"
            )
        yield number, data, data.endswith(b"\n")


def _no_count_error(path: str, what: str) -> CheckpointError:
    names = ", ".join(name for name in (*STEPS[:2], *EPOCHS[:1]))
    return Unsupported(path, f"{what} for steps or epochs", expected=f"such as {names}")


MAX_FILES, MAX_DEPTH = 1_000, 3
"""Limits on event files per directory, and on their depth in it."""

_STEP, _SUMMARY = 2, 5
_TIME_KEY, _STEP_KEY, _SUMMARY_KEY = b"\x09", b"\x10", b"\x2a"
_MAX_VARINT_BYTES = 8
_VALUE = 1
_TAG, _SIMPLE, _TENSOR = 1, 2, 8
_FLOATS, _DOUBLES, _INTS, _INT64S, _BOOLS, _HALVES = 5, 6, 7, 10, 11, 13
_DTYPES = {1: "<f", 2: "<d", 3: "<i", 4: "<B", 5: "<h", 6: "<b", 9: "<q", 10: "<?", 19: "<e"}
"""TensorFlow's numbers of types, with the layout of an element in ``tensor_content``."""

_FIELDS = {
    1: _FLOATS,
    2: _DOUBLES,
    3: _INTS,
    4: _INTS,
    5: _INTS,
    6: _INTS,
    9: _INT64S,
    10: _BOOLS,
    19: _HALVES,
}
_EPOCH_TAG, _PER_EPOCH = "epoch", "epoch_"
"""Lightning's tag for the epoch of a step, and the prefix of tags that Keras counts by epochs."""

_SIGN_BITS = 64


def is_event_file(name: str) -> bool:
    """Return whether a name is that of a TensorBoard event file."""
    return "tfevents" in name


def event_files(directory: str) -> list[tuple[str, str]]:
    """Return the event files in a directory, the oldest name first, each with the prefix of its tags.

    Those in subdirectories have a prefix, such as Keras's ``train`` and ``validation``.
    """
    files: list[tuple[str, str]] = []
    pending = [(directory, "", 0)]
    while pending:
        parent, prefix, depth = pending.pop(0)
        for entry in sorted(scan(parent).values(), key=lambda entry: entry.name):
            if entry.is_dir(follow_symlinks=False):
                if depth < MAX_DEPTH:
                    pending.append((entry.path, f"{prefix}{entry.name}/", depth + 1))
            elif is_event_file(entry.name):
                files.append((entry.path, prefix))
        if len(files) > MAX_FILES:
            raise LimitExceeded(directory, "too many event files", expected=f"at most {MAX_FILES:,}")
    # With one prefix for all, such as ``version_0/``, the tags are unique without it.
    has_prefixes = len({prefix for _, prefix in files}) > 1
    return files if has_prefixes else [(path, "") for path, _ in files]


def read_events(file: BinaryIO, path: str, log: Log, prefix: str = "") -> None:
    """Read the scalars of an event file into a log.

    The step of a tag that begins with ``epoch_`` is an epoch: Keras counts so.
    """
    try:
        for offset, data in records(file, path):
            if data is not None:
                _add_event(data, path, offset, log, prefix)
    except Truncated as failure:
        log.warnings.append(f"{path}: {failure.found} at {failure.where} (perhaps still being written)")


def _add_event(data: bytes, path: str, offset: int, log: Log, prefix: str) -> None:
    # A step without a checkpoint only extends the range of steps. Events with a tag of epochs are decoded
    # anyway, as their step may be an epoch.
    step = _usual_step(data)
    if step is not None and step not in log.numbers and _EPOCH_TAG.encode() not in data:
        log.steps.add(step)
        return
    step, summaries, where = 0, [], f"byte {offset:,}"
    for item in fields(data, path, where):
        if item.number == _STEP:
            step = item.signed
        elif item.number == _SUMMARY:
            summaries.append(item.data)
    for summary in summaries:
        for item in fields(summary, path, where):
            if item.number == _VALUE:
                _add_value(item.data, path, where, step, log, prefix)


def _usual_step(data: bytes) -> int | None:
    """Return the step of an event in the usual layout: time, step, one summary; None for another layout."""
    # A fast path: most events of a long log are at steps without a checkpoint, and needn't be decoded. Keys
    # of protobuf are ``number << 3 | type``: field 1 as a double, field 2 as a varint, field 5 as bytes.
    if data[:1] != _TIME_KEY or data[9:10] != _STEP_KEY:
        return None
    step, at, shift = 0, 10, 0
    for byte in data[at : at + _MAX_VARINT_BYTES]:
        step |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return step if data[at : at + 1] == _SUMMARY_KEY else None
    return None


def _add_value(data: memoryview, path: str, where: str, step: int, log: Log, prefix: str) -> None:
    tag, value = "", None
    for item in fields(data, path, where):
        if item.number == _TAG:
            tag = item.text
        elif item.number == _SIMPLE and item.kind == FIXED32:
            # A float32: its shortest decimal (0.1, not 0.10000000149) compares equal to that in a name.
            value = shortest_decimal(struct.unpack("<f", struct.pack("<I", item.integer))[0])
        elif item.number == _TENSOR:
            value = _scalar(item.data, path, where)
    if value is None or not tag or tag.startswith("_hparams_/"):
        return
    if tag in EPOCHS:
        log.counts_both = log.counts_both or tag == _EPOCH_TAG
        return
    name = prefix + tag
    if tag.startswith(_PER_EPOCH):
        log.add(None, step, {name: value})
    else:
        log.add(step, None, {name: value})


def _scalar(data: memoryview, path: str, where: str) -> float | None:
    """Return the number in a tensor without axes, None for any other tensor."""
    kind, content = 0, memoryview(b"")
    by_number: dict[int, list[bytes | int]] = {}
    for item in fields(data, path, where):
        if item.number == 1:
            kind = item.integer
        elif item.number == 2 and len(item.data):  # a shape that has axes
            return None
        elif item.number == 4:
            content = item.data
        else:
            by_number.setdefault(item.number, []).append(bytes(item.data) or item.integer)
    layout = _DTYPES.get(kind)
    if layout is None:
        return None
    if len(content):
        if len(content) != struct.calcsize(layout):
            raise DamagedCheckpoint(path, f"a scalar of {len(content)} bytes", where=where)
        return _unpack(layout, bytes(content))
    values = by_number.get(_FIELDS[kind])
    return 0.0 if not values else _last_value(layout, values[-1], path, where)


def _last_value(layout: str, value: bytes | int, path: str, where: str) -> float:
    """Return the last of the values in a field, which may be packed."""
    # Protobuf: a packed field is bytes with all values, an unpacked one has a key for each value; of repeated
    # scalars, the last counts. float16 is stored as its bit pattern in a varint (``half_val``), and negative
    # integers as 64-bit two's complement.
    if layout in ("<f", "<d"):
        size = struct.calcsize(layout)
        data = value if isinstance(value, bytes) else value.to_bytes(size, "little")
        if len(data) < size or len(data) % size:
            raise DamagedCheckpoint(path, f"a scalar of {len(data)} bytes", where=where)
        return _unpack(layout, data[-size:])
    number = 0
    if isinstance(value, int):
        number = value
    else:
        position = 0
        try:
            while position < len(value):
                number, position = varint(value, position)
        except ValueError as failure:
            raise DamagedCheckpoint(path, f"an invalid scalar: {failure}", where=where) from failure
    if layout == "<e":
        return _unpack(layout, (number & 0xFFFF).to_bytes(2, "little"))
    return float(number - (1 << _SIGN_BITS) if number >> (_SIGN_BITS - 1) else number)


def _unpack(layout: str, data: bytes) -> float:
    (number,) = struct.unpack(layout, data)
    return shortest_decimal(number) if layout == "<f" else float(number)
