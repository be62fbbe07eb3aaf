"""Paddle Fluid's directories: one serial in a directory of its own, each variable a file.

Source: PaddlePaddle/Paddle ``python/paddle/fluid/io.py`` of 2018, ``save_checkpoint``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import ClassVar

from ckpttool.checkpoint import TrainingState
from ckpttool.formats.content.carried import ENTRY
from ckpttool.formats.paddle.fluid_native import HEIGHTS, LEVELS
from ckpttool.formats.paddle.fluid_parts import COUNTERS, MARKER, MODEL, TRAINER
from ckpttool.formats.paddle.fluid_trainers import MAX_ARGUMENT
from ckpttool.wire.lodtensor_writing import NUMBERS, lod_tensor_header, rows_header, values_header
from ckpttool.wire.sink import Sink
from ckpttool.wire.staged import Staged
from ckpttool.writing.content import Content
from ckpttool.writing.document import document
from ckpttool.writing.fluid_variables import Variable, name_refusal, refusals, variables
from ckpttool.writing.interface import WriteOptions, Writer
from ckpttool.writing.progress import progress
from ckpttool.writing.shards import Files

_NOT_LOADED = frozenset({"uint64", "float8_e4m3fn", "float8_e5m2"})
"""Types that have a number, and that Paddle 2.6 does not load."""
_OWN = frozenset({"serial", "trainers", "lookup_tables"})
"""What the reader says of a serial by itself."""
_SERIAL_DIGITS = 18
_MOST = 1 << 63
"""Above any count."""

Trainers = Mapping[str, Mapping[str, object]]


class Fluid(Writer):
    """A directory of serials, as the trainers of 2018 resume from it."""

    name: ClassVar[str] = "fluid"
    dtypes: ClassVar[frozenset[str]] = frozenset(NUMBERS) - _NOT_LOADED
    shape = "directory"

    def refusals(self, content: Content, options: WriteOptions) -> Iterator[str]:
        found = [*variables(content)]
        if not any(one.directory == MODEL for one in found):
            yield "there is no tensor in it, and a Fluid checkpoint has variables"
        yield from refusals(found, slashes=_was_fluid(content))

    def write(self, content: Content, target: Staged, options: WriteOptions) -> None:
        serial = f"checkpoint_{_serial(content)}"
        files = Files(target)
        for variable in variables(content):
            _write_variable(files.create(f"{serial}/{variable.place}"), variable)
        for number, arguments in _trainers(content).items():
            for name, value in arguments.items():
                files.create(f"{serial}/trainer_{number}/{name}").write(str(value).encode())
            _write_marker(files.create(f"{serial}/trainer_{number}/{MARKER}"))
        if (entry := _entry(content)) is not None:
            files.create(f"{serial}/{ENTRY}").write(entry)
        _write_marker(files.create(f"{serial}/{MODEL}/{MARKER}"))


def _write_variable(sink: Sink, variable: Variable) -> None:
    values, rows = variable.values, variable.rows
    if rows is None:
        sink.write(lod_tensor_header(values.dtype, values.shape, variable.levels))
    else:
        sink.write(rows_header(rows.size))
        sink.put(rows)
        sink.write(values_header(variable.height, values.dtype, values.shape))
    sink.put(values)


def _write_marker(sink: Sink) -> None:
    """Write what says that a save is whole: the time of it, as Paddle does."""
    sink.write(time.ctime().encode())


def _was_fluid(content: Content) -> bool:
    """Tell whether content was a Fluid checkpoint once, whatever format it was read from."""
    if content.source_format == Fluid.name:
        return True
    told = _told_trainers(content) or {}
    return any(name in arguments for arguments in told.values() for name in COUNTERS)


def _serial(content: Content) -> int:
    told = content.metadata.get("serial") if _was_fluid(content) else None
    return told if type(told) is int and 0 <= told < 10**_SERIAL_DIGITS else 0


def _trainers(content: Content) -> Trainers:
    """Return what each trainer of a Fluid checkpoint kept; of others, what is known of their progress."""
    if _was_fluid(content) and (told := _told_trainers(content)) is not None:
        return told
    state = progress(content)
    counted = zip(COUNTERS, map(_whole, (state.epoch, state.step)), strict=True)
    known = {name: value for name, value in counted if value is not None}
    return {"0": known} if known else {}


def _whole(value: float | None) -> int | None:
    """Return a count as the integer that a trainer's file has, None where it is no such number."""
    is_whole = value is not None and -_MOST < value < _MOST and value == int(value)
    return int(value) if is_whole and value is not None else None


def _told_trainers(content: Content) -> Trainers | None:
    """Return the trainers of a Fluid checkpoint, None where their arguments can't be written as files."""
    told = content.metadata.get("trainers", {})
    if not isinstance(told, Mapping):
        return None
    for number, arguments in told.items():
        if not TRAINER.fullmatch(f"trainer_{number}") or not isinstance(arguments, Mapping):
            return None
        if any(not _is_argument(name, value) for name, value in arguments.items()):
            return None
    return told


def _is_argument(name: object, value: object) -> bool:
    is_name = isinstance(name, str) and not name_refusal(name) and name != MARKER
    if isinstance(value, str):
        return is_name and value == value.strip() and _length(value) <= MAX_ARGUMENT
    return is_name and type(value) is int and -_MOST < value < _MOST


def _length(text: str) -> float:
    """Return how many bytes a text has; no number is as large where it is no valid one."""
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        return math.inf


def _entry(content: Content) -> bytes | None:
    """Return the entry, where the files don't tell all of the content by themselves."""
    rest = content
    if _was_fluid(content) and _told_trainers(content) is not None:
        metadata = {key: value for key, value in content.metadata.items() if key not in _OWN}
        native = {
            key: value
            for key, value in content.native.items()
            if key != HEIGHTS and not key.startswith(LEVELS)
        }
        held = {one.path for variable in variables(content) for one in variable.apart}
        left = tuple(tensor for tensor in content.tensors if tensor.path not in held)
        rest = replace(content, tensors=left, metadata=metadata, native=native, training=TrainingState())
    entry = document(rest)
    return document(content) if entry is not None and rest is not content else entry
