"""Metrics in TensorBoard's event files: the scalars, by their tags.

Source: tensorflow/tensorflow ``core/util/event.proto``, ``core/framework/summary.proto``, ``tensor.proto``.
"""

from __future__ import annotations

import struct
from typing import BinaryIO

from ckpttool.containers.protobuf import FIXED32, fields, varint
from ckpttool.containers.tfrecord import records
from ckpttool.core.errors import DamagedCheckpoint, LimitExceeded, Truncated
from ckpttool.formats.content.scalars import shortest
from ckpttool.formats.interface import scan
from ckpttool.runs.metrics.log import EPOCHS, Log

MAX_FILES, MAX_DEPTH = 1_000, 3
"""How many event files a directory may have, and how deep they may lie in it."""

_STEP, _SUMMARY = 2, 5
_TIME_KEY, _STEP_KEY, _SUMMARY_KEY = b"\x09", b"\x10", b"\x2a"
_MAX_VARINT_BYTES = 8
_VALUE = 1
_TAG, _SIMPLE, _TENSOR = 1, 2, 8
_FLOATS, _DOUBLES, _INTS, _INT64S, _BOOLS, _HALVES = 5, 6, 7, 10, 11, 13
_DTYPES = {1: "<f", 2: "<d", 3: "<i", 4: "<B", 5: "<h", 6: "<b", 9: "<q", 10: "<?", 19: "<e"}
"""TensorFlow's numbers of types, and how an element lies in ``tensor_content``."""

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
"""Lightning's tag for the epoch of a step, and what the tags begin with that Keras counts by epochs."""

_SIGN_BITS = 64


def is_event_file(name: str) -> bool:
    """Tell whether a file's name is that of an event file."""
    return "tfevents" in name


def event_files(directory: str) -> list[tuple[str, str]]:
    """Return the event files in a directory, the oldest name first, each with what its tags begin with.

    Those in directories inside are told apart, such as Keras's ``train`` and ``validation``.
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
            raise LimitExceeded(directory, f"it has more than {MAX_FILES:,} event files", expected="fewer")
    has_prefixes = len({prefix for _, prefix in files}) > 1
    return files if has_prefixes else [(path, "") for path, _ in files]


def read_events(file: BinaryIO, path: str, log: Log, prefix: str = "") -> None:
    """Read the scalars of an event file into a log.

    A tag that begins with ``epoch_`` is one of Keras's, which counts epochs there.
    """
    try:
        for record in records(file, path):
            if record.data is not None:
                _add_event(record.data, path, record.offset, log, prefix)
    except Truncated as failure:
        log.warnings.append(f"{path}: {failure.found} at {failure.where}, as if it were still being written")


def _add_event(data: bytes, path: str, offset: int, log: Log, prefix: str) -> None:
    step = _usual_step(data)
    if step is not None and step not in log.numbers and _EPOCH_TAG.encode() not in data:
        log.steps.add(step)
        return
    step, summaries, where = 0, [], f"byte {offset:,}"
    for field in fields(data, path, where):
        if field.number == _STEP:
            step = field.signed
        elif field.number == _SUMMARY:
            summaries.append(field.data)
    for summary in summaries:
        for field in fields(summary, path, where):
            if field.number == _VALUE:
                _add_value(field.data, path, where, step, log, prefix)


def _usual_step(data: bytes) -> int | None:
    """Return the step of an event as all writers lay it out: time, step, one summary. None for any other."""
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
    for field in fields(data, path, where):
        if field.number == _TAG:
            tag = field.text
        elif field.number == _SIMPLE and field.kind == FIXED32:
            value = shortest(struct.unpack("<f", struct.pack("<I", field.integer))[0])
        elif field.number == _TENSOR:
            value = _scalar(field.data, path, where)
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
    for field in fields(data, path, where):
        if field.number == 1:
            kind = field.integer
        elif field.number == 2 and len(field.data):  # a shape that has axes
            return None
        elif field.number == 4:
            content = field.data
        else:
            by_number.setdefault(field.number, []).append(bytes(field.data) or field.integer)
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
            raise DamagedCheckpoint(path, f"no scalar: {failure}", where=where) from failure
    if layout == "<e":
        return _unpack(layout, (number & 0xFFFF).to_bytes(2, "little"))
    return float(number - (1 << _SIGN_BITS) if number >> (_SIGN_BITS - 1) else number)


def _unpack(layout: str, data: bytes) -> float:
    (number,) = struct.unpack(layout, data)
    return shortest(number) if layout == "<f" else float(number)
