"""TensorBoard: records of checkpoints as texts in event files. ``runs/logs.py`` reads metrics.

Source: tensorflow/tensorflow ``core/util/event.proto``, ``core/framework/summary.proto``, ``tensor.proto``.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from ckpttool.containers.protobuf import bytes_field, fields, number_field, text_field
from ckpttool.containers.tfrecord import encoded_record, records
from ckpttool.core.errors import from_os_error
from ckpttool.runs.trackers import LoggedCheckpoint, Record, Tracker
from ckpttool.storage import fs
from ckpttool.storage.directories import write_atomically

_STEP, _FILE_VERSION, _SUMMARY = 2, 3, 5
_TIME_KEY = b"\x09"
_VALUE, _TAG, _TENSOR, _METADATA = 1, 1, 8, 9
_STRING, _TENSOR_DATA = 7, 2
"""TensorFlow's number of the type, and TensorBoard's of data that it doesn't convert."""

_VERSION = "brain.Event:2"
_PREFIX, _SUFFIX = "events.out.tfevents.", ".ckpttool"

Summary = tuple[int, bytes]
"""A step, and a summary as a protocol buffer."""


class TensorBoard(Tracker):
    """TensorBoard as a tracker: ``tensorboard:DIR``. To read metrics, its event files need no prefix.

    A checkpoint is recorded as a text at its step; all texts of a context are one event file.
    """

    target = "tensorboard:DIR"
    is_directory = True

    @contextmanager
    def recorder(self, name: str, places: Sequence[str]) -> Iterator[Record]:
        # Each recording is a new event file, as other writers may have theirs open. Summaries that are in an
        # earlier one aren't written again.
        known = {summary for path in _own_files(name) for summary in _summaries_in(path)}
        new: list[Summary] = []

        def record(one: LoggedCheckpoint) -> bool:
            step = int(one.facts.get("step") or one.facts.get("epoch") or 0)
            summary = step, _text_summary(f"ckpttool/{one.run_name}/{one.name}", _markdown(one))
            if summary in known:
                return False
            known.add(summary)
            new.append(summary)
            return True

        yield record
        if new:
            now = time.time()
            try:
                fs.makedirs(name)
                # TensorBoard reads event files in the order of the seconds in their names.
                file_name = f"{_PREFIX}{int(now)}.{os.urandom(4).hex()}{_SUFFIX}"
                write_atomically(os.path.join(name, file_name), _event_file(now, new))
            except OSError as error:
                raise from_os_error(error, name) from error


def _markdown(one: LoggedCheckpoint) -> str:
    """Return the facts as a table, which TensorBoard's text view draws."""
    facts = {**one.facts, **one.facts.get("metrics", {})}
    facts.pop("metrics", None)
    rows = [f"| {name} | {value} |" for name, value in facts.items()]
    return "\n".join(["| | |", "| --- | --- |", *rows])


# Event files ----------------------------------------------------------------------------------------


def _own_files(directory: str) -> list[str]:
    """Return the event files in a directory that ckpttool wrote."""
    try:
        names = sorted(fs.listdir(directory))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise from_os_error(error, directory) from error
    return [
        os.path.join(directory, name) for name in names if name.startswith(_PREFIX) and name.endswith(_SUFFIX)
    ]


def _summaries_in(path: str) -> Iterator[Summary]:
    """Yield the summaries of an event file, as ``_text_summary`` makes them."""
    try:
        with fs.open_regular(path) as file:
            for offset, data in records(file, path):
                step, summary = 0, b""
                for field in fields(data or b"", path, f"byte {offset:,}"):
                    if field.number == _STEP:
                        step = field.signed
                    elif field.number == _SUMMARY:
                        summary = bytes(field.data)
                yield step, summary
    except OSError as error:
        raise from_os_error(error, path) from error


def _text_summary(tag: str, text: str) -> bytes:
    """Return the summary of a text in Markdown."""
    # As TensorBoard's own writer of texts: a tensor of one string with the shape [1], and metadata that name
    # the plugin which shows it.
    plugin = bytes_field(1, text_field(1, "text"))
    metadata = plugin + number_field(4, _TENSOR_DATA)
    shape = bytes_field(2, number_field(1, 1))
    tensor = (
        number_field(1, _STRING) + bytes_field(2, shape) + bytes_field(8, text.encode("utf-8", "replace"))
    )
    named = text_field(_TAG, tag.encode("utf-8", "replace").decode())
    return bytes_field(_VALUE, named + bytes_field(_TENSOR, tensor) + bytes_field(_METADATA, metadata))


def _event_file(now: float, summaries: Iterable[Summary]) -> bytes:
    """Return an event file with summaries at their steps."""
    when = _TIME_KEY + struct.pack("<d", now)
    events = [when + text_field(_FILE_VERSION, _VERSION)]
    events += [
        when + number_field(_STEP, step) + bytes_field(_SUMMARY, summary) for step, summary in summaries
    ]
    return b"".join(map(encoded_record, events))
