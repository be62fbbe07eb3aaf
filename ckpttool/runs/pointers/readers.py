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

from ckpttool.core.errors import from_os_error
from ckpttool.formats.tensorflow import state as tf_state
from ckpttool.io import fs
from ckpttool.runs.members.order import Group

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


def _latest(directory: str, names: Names) -> Iterator[Pointer]:
    """DeepSpeed's ``latest``, Detectron2's and MMEngine's ``last_checkpoint``: a text that is a name."""
    for name in ("latest", "last_checkpoint"):
        if name in names and names[name].is_file():
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
    if tf_state.NAME not in names or names[tf_state.NAME].is_dir():
        return
    path = os.path.join(directory, tf_state.NAME)
    try:
        state = tf_state.read_state(path)
    except (OSError, ValueError):
        state = None
    if state is None:
        yield Pointer("latest", path, None, frozenset({"tensorflow"}))
        return
    for target in tf_state.expand_shards(state.latest):
        yield Pointer("latest", path, target)


READERS: tuple[Reader, ...] = (_latest, _megatron, _trainer_state, _tensorflow)


def _text(path: str, limit: int) -> str | None:
    """Return a small text file's content, or None where it is none or can't be read."""
    try:
        if not fs.isfile(path) or fs.getsize(path) > limit:
            return None
        with fs.open_regular(path) as file:
            return file.read(limit).decode()
    except (OSError, UnicodeDecodeError):
        return None


def noted_name(file: os.DirEntry[str]) -> str | None:
    """Return the name that a small text file consists of, or None where it is something else."""
    try:
        if not file.is_file(follow_symlinks=False) or not 0 < file.stat().st_size <= MAX_POINTER:
            return None
    except OSError:  # it has just gone
        return None
    text = (_text(file.path, MAX_POINTER) or "").strip()
    return os.path.basename(text.rstrip("/")) if _is_line(text) else None


def _is_line(text: str) -> bool:
    return bool(text) and text.isprintable()


def names_in(directory: str) -> Names:
    """Return what lies in a directory, by name; nothing of one that may not be read."""
    try:
        return {entry.name: entry for entry in fs.entries(directory)}
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        if fs.is_remote(directory):  # a store that is out of order has not said that nothing points anywhere
            raise from_os_error(error, directory) from error
        return {}


def from_newest(group: Group, faults: Collection[str]) -> Iterator[Pointer]:
    """Yield what the newest of a series says of the best: the older ones speak of what may be gone."""
    sound = [entry for entry in group.entries if entry.is_sound and entry.path not in faults]
    if not sound:
        return
    newest = sound[-1]
    if fs.isdir(newest.unit.path):
        for pointer in _trainer_state(newest.unit.path, names_in(newest.unit.path)):
            yield Pointer(pointer.reason, newest.unit.path, pointer.target)
    for best in newest.best_paths:
        yield Pointer(BEST_INSIDE, newest.unit.path, best)


def temporary_for(name: str) -> str | None:
    """Return the name that a writer's temporary file will have, or None where it is none."""
    match = _TEMPORARY.fullmatch(name) or _STAGED.fullmatch(name) or _TENSORFLOW.fullmatch(name)
    return match["name"] if match else None
