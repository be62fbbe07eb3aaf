"""Who names a checkpoint: the small files in which frameworks, and people, note which one matters.

``READERS`` is the table: each reads one kind of pointer that lies beside checkpoints. What the pointers lead
to is found in ``protection``.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import NamedTuple

from ckpttool.core.errors import AccessDenied, CheckpointError, from_os_error
from ckpttool.formats.tensorflow import state as tf_state
from ckpttool.io import fs
from ckpttool.io.source import NotRegular
from ckpttool.runs.members.order import Group
from ckpttool.runs.reasons import Code, code_of

TRAINER_BEST = "best_model_checkpoint"
"""What a Trainer says of its best; where that is gone, it goes on without it."""

BEST_INSIDE = "best_model_path"
"""What a checkpoint of Lightning's says of the best; it lies in a pickle."""

MAX_POINTER = 4096
"""Bytes: a text file that names one path is no longer."""

MAX_STATE = 1 << 26
"""Bytes of JSON that are read for a pointer; a trainer's whole history takes less."""

_TEMPORARY = re.compile(
    r"\.?(?P<name>.+?)\.(?:tmp|temp|part|partial|incomplete)(?:[-._][\w-]*)?", re.IGNORECASE
)
_TENSORFLOW = re.compile(r"(?P<name>.+)(?:\.tempstate[0-9]+|_temp(?:_[0-9a-f]{32})?)")
_STAGED = re.compile(r"tmp[-_](?P<name>.+)", re.IGNORECASE)


class Pointer(NamedTuple):
    """A place that names a checkpoint.

    Attributes:
        reason: Why what it names stays, in a word or two.
        holder: The file that names it.
        target: What it names, as it stands there; None where it can't be read.
        formats: The formats that it can mean, where only some write such a file.
    """

    reason: str
    holder: str
    target: str | None
    formats: frozenset[str] | None = None

    @property
    def directory(self) -> str:
        """Return the directory that relative names belong to."""
        return os.path.dirname(self.holder) or os.curdir


Names = Mapping[str, os.DirEntry[str]]
Reader = Callable[[str, Names], Iterator[Pointer]]
OnError = Callable[[CheckpointError], object]
"""Told of what can't be read, and so may name anything."""


def _latest(directory: str, names: Names) -> Iterator[Pointer]:
    """DeepSpeed's ``latest`` and ``latest_universal``, Detectron2's and MMEngine's ``last_checkpoint``."""
    for name in ("latest", "latest_universal", "last_checkpoint"):
        if name in names:
            path = os.path.join(directory, name)
            text = _text(path, MAX_POINTER)
            if text is not None and _is_line(text.strip()):
                yield Pointer(name, path, text.strip())


def _megatron(directory: str, names: Names) -> Iterator[Pointer]:
    """Megatron's tracker, which verl has taken over: the number of an iteration."""
    name = "latest_checkpointed_iteration.txt"
    if name in names:
        path = os.path.join(directory, name)
        text = (_text(path, MAX_POINTER) or "").strip()
        if text.isascii() and text.isdigit() and len(text) < 18:
            targets = (f"iter_{int(text):07d}", f"global_step_{int(text)}")
            yield Pointer(name, path, next((one for one in targets if one in names), targets[0]))


def _trainer_state(directory: str, names: Names) -> Iterator[Pointer]:
    """``best_model_checkpoint`` of the Hugging Face Trainer."""
    name = "trainer_state.json"
    if name not in names:
        return
    path = os.path.join(directory, name)
    try:
        state = json.loads(_text(path, MAX_STATE) or "")
        best = state.get(TRAINER_BEST)
    except (ValueError, AttributeError, RecursionError):
        yield Pointer(TRAINER_BEST, path, None)
        return
    if isinstance(best, str) and best:
        yield Pointer(TRAINER_BEST, path, best)


def _tensorflow(directory: str, names: Names) -> Iterator[Pointer]:
    """TensorFlow's ``checkpoint``: what it names as the latest; of all others it only keeps a list.

    One that names nothing, beside TensorFlow's files, was cut short or overwritten.
    """
    path = os.path.join(directory, tf_state.NAME)
    if tf_state.NAME not in names or fs.isdir(path):
        return
    try:
        state = tf_state.read_state(path)
    except ValueError:
        state = None
    except OSError as error:
        raise from_os_error(error, path) from error
    if state is None:
        yield Pointer("latest", path, None, frozenset({"tensorflow"}))
        return
    for target in tf_state.expand_shards(state.latest):
        yield Pointer("latest", path, target)


READERS: tuple[Reader, ...] = (_latest, _megatron, _trainer_state, _tensorflow)


def pointers_in(directory: str, names: Names, on_error: OnError) -> Iterator[Pointer]:
    """Yield what the files of frameworks in a directory name."""
    for read in READERS:
        try:
            yield from read(directory, names)
        except CheckpointError as error:
            on_error(error)


def _text(path: str, limit: int) -> str | None:
    """Return a small text file's content, or None where it is none."""
    data = read_small(path, limit)
    try:
        return None if data is None else data.decode()
    except UnicodeDecodeError:
        return None


def read_small(path: str, limit: int) -> bytes | None:
    """Return a small file's content, or None where it is too long, no regular file, or not there.

    Raises:
        CheckpointError: It can't be read: it may name anything.
    """
    try:
        with fs.open_regular(path) as file:
            data = file.read(limit + 1)
    except NotRegular:
        return None
    except OSError as error:
        if fs.is_absence(error):
            return None
        raise from_os_error(error, path) from error
    return data if len(data) <= limit else None


def is_one_name(path: str) -> bool:
    """Tell whether a small text file consists of one line, as one that names a checkpoint does."""
    return _is_line((_text(path, MAX_POINTER) or "").strip())


def _is_line(text: str) -> bool:
    return bool(text) and text.isprintable()


def raise_error(error: CheckpointError) -> None:
    """Raise an error: nothing goes on without what can't be read."""
    raise error


def pass_over(error: CheckpointError) -> None:
    """Go on without what can't be read, where nothing is lost by that."""


def names_in(directory: str, on_error: OnError = raise_error) -> Names:
    """Return what lies in a directory, by name; that one can't be listed doesn't say that it is empty."""
    try:
        return {entry.name: entry for entry in fs.entries(directory)}
    except OSError as error:
        if not fs.is_absence(error):
            on_error(from_os_error(error, directory))
        return {}


def from_newest(group: Group, faults: Collection[str], on_error: OnError) -> Iterator[Pointer]:
    """Yield what the newest of a series says of the best: the older ones speak of what may be gone.

    One that is damaged says nothing; one that can't be read may say anything.
    """
    for newest in reversed(group.entries):
        if newest.fault is not None and code_of(newest.fault) is Code.UNREADABLE:
            on_error(AccessDenied(newest.unit.path, newest.fault))
        if not newest.is_sound or newest.path in faults:
            continue
        try:
            is_directory = any(os.sep in file.path for file in newest.contents.files)
            names = names_in(newest.unit.path) if is_directory else {}
            for pointer in _trainer_state(newest.unit.path, names):
                yield Pointer(pointer.reason, newest.unit.path, pointer.target)
        except CheckpointError as error:
            on_error(error)
        for best in newest.best_paths:
            yield Pointer(BEST_INSIDE, newest.unit.path, best)
        return


def temporary_for(name: str) -> str | None:
    """Return the name that a writer's temporary file will have, or None where it is none."""
    match = _TEMPORARY.fullmatch(name) or _STAGED.fullmatch(name) or _TENSORFLOW.fullmatch(name)
    return match["name"] if match else None
