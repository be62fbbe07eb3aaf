"""Entry of a checkpoint: all that is known about it without reading a value."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ckpttool.core.checkpoint import Checkpoint, Granularity
from ckpttool.core.naming import NameFields
from ckpttool.core.tensor import Tensor
from ckpttool.formats.interface import MANIFEST_SUFFIXES, Unit
from ckpttool.formats.step_directory import StepDirectory
from ckpttool.ops.manifest import SHARED
from ckpttool.ops.verdict import Safety
from ckpttool.runs.reasons import Code, Reason
from ckpttool.transaction.files import Contents, contents
from ckpttool.weights.converting.training_state import is_state_tensor

_RESULTS = (
    *(
        ".csv",
        ".tsv",
        ".xlsx",
        ".parquet",
        ".ipynb",
        ".html",
        ".pdf",
        ".tex",
        ".png",
        ".jpg",
        ".jpeg",
        ".gif",
    ),
    *(".svg", ".mp4", ".wav"),
)
"""Suffixes of files that no checkpoint format uses."""
_ASSETS = f"assets{os.sep}"
"""Directory of a SavedModel's assets, which may have any names."""

Number = int | float

Position = tuple[float | str | None, ...]
"""The numbers in a checkpoint's name."""


class Save(NamedTuple):
    """Key of a save, which is the files of one step: the blanked name of its first part, and its numbers."""

    run: str
    position: Position


@dataclass(frozen=True, slots=True)
class StatePart:
    """Part of a checkpoint that is only needed to resume: optimizer, scheduler, random states.

    Attributes:
        nbytes: Its bytes; an estimate if it shares a file with other tensors.
        files: Paths of the files with nothing else, relative to the checkpoint's directory.
        cast_bytes: Bytes saved if the other floating tensors are converted to 16 bits.
    """

    nbytes: int = 0
    files: tuple[str, ...] = ()
    cast_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Entry:
    """A checkpoint that was found in a directory.

    Attributes:
        path: Path as the user would write it.
        unit: Unit of discovery; its members are kept or removed together.
        format: Name of the format; None if no format recognises it.
        contents: Statuses of its files when it was opened.
        fields: Fields of its name.
        safety: Whether loading it with its framework could run code.
        danger: The code that loading it would run; None if it isn't known to be unsafe.
        is_complete: Whether it can be opened, and no part is missing.
        fault: Its fault, with code ``DAMAGED``, ``INCOMPLETE`` or ``UNREADABLE``; None if it is sound.
        epoch, step: From inside the checkpoint, else from its name.
        counts_inside: Epoch and step recorded inside; None for one that isn't.
        saved_at: Recorded time of the save, in seconds since 1970.
        loss: Its training loss, if that is known to be of this checkpoint.
        metrics: Metrics from inside, its name, or a log.
        logged_as: Step in its trainer's logs; None if unknown.
        signature: Hash of the names and shapes of its tensors; None if it isn't sound.
        granularity: How much of a training run it holds; None if unknown.
        has_weights: Whether any of its tensors is a weight.
        best_paths: Paths of the run's best checkpoint, recorded inside.
        holds_others: Whether its directory contains other checkpoints.
        linked_bytes: Its bytes with targets of symlinks; None if no part is a symlink.
        content_summary: How much of a training run it holds, and its numbers of tensors and parameters.
        needed_paths: Paths that it needs besides its own files.
        series: Pattern of paths that the user declared one series, over directories.
        group: Key of the series it belongs to.
        run: Directory of the run that wrote it.
        hyper_parameters: Hyper-parameters of its run, from inside.
        state: Part of it that is only needed to resume.
        save: The save that it is a part of, if that has several parts.
        part: Its position among the parts of its save.
        parts: All parts of the save that it represents, itself first.
    """

    path: str
    unit: Unit = field(repr=False)
    format: str | None
    contents: Contents = field(repr=False)
    fields: NameFields = field(repr=False)
    safety: Safety = Safety.UNKNOWN
    danger: str | None = None
    is_complete: bool = True
    fault: Reason | None = None
    epoch: Number | None = None
    step: int | None = None
    counts_inside: tuple[Number | None, int | None] = (None, None)
    saved_at: float | None = None
    loss: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    logged_as: int | None = None
    signature: str | None = None
    granularity: Granularity | None = None
    has_weights: bool = False
    best_paths: tuple[str, ...] = ()
    holds_others: bool = False
    linked_bytes: int | None = None
    content_summary: str = ""
    needed_paths: tuple[str, ...] = field(default=(), repr=False)
    series: str | None = None
    group: str = ""
    run: str = ""
    hyper_parameters: Mapping[str, object] = field(default_factory=dict, repr=False)
    state: StatePart = StatePart()
    save: Save | None = None
    part: int = 0
    parts: tuple[Entry, ...] = field(default=(), repr=False)

    @property
    def is_sound(self) -> bool:
        """Return whether it opens, is complete, and has no fault in its structure."""
        return self.fault is None

    @property
    def holds_state(self) -> bool:
        """Return whether it holds weights, and at least 1 % of training state."""
        # Less isn't worth writing the checkpoint anew.
        return self.has_weights and self.state.nbytes * 100 >= max(self.nbytes, 1)

    @property
    def is_incomplete(self) -> bool:
        """Return whether a part is missing, as after an interrupted save."""
        return self.fault is not None and self.fault.code is Code.INCOMPLETE

    @property
    def directory(self) -> str:
        """Return the directory that contains it."""
        return os.path.dirname(self.unit.path) or os.curdir

    @property
    def name(self) -> str:
        """Return the last part of its path."""
        return os.path.basename(self.unit.path)

    @property
    def is_unchanged(self) -> bool:
        """Return whether its files have the same statuses as when it was opened."""
        try:
            return contents(self.directory, self.unit.members).is_same_as(self.contents)
        except OSError:  # it has vanished, or can't be read any more
            return False

    @property
    def is_step_directory(self) -> bool:
        """Return whether it is a directory of one save, so that any file in it means the whole."""
        return isinstance(self.unit.format, StepDirectory)

    @property
    def places(self) -> Iterator[str]:
        """Yield the paths that mean it: its own, its parts', and those in a directory for one save."""
        if self.parts:
            for part in self.parts:
                yield from part.places
            return
        yield self.path
        for file in self.contents.files if self.is_step_directory else ():
            yield os.path.join(self.path, os.path.relpath(file.path, self.name))

    @property
    def members_to_remove(self) -> tuple[str, ...]:
        """Names of its members in the order of removal: indexes first, shards last."""
        # Shards without an index are no checkpoint, so that an interrupted removal leaves none that looks
        # complete. A damaged index may list itself as a shard: each name is returned once.
        parts = self.unit.parts

        def place(name: str) -> tuple[bool, bool, bool, str]:
            return name not in parts, name != self.name, "index" not in name, name

        return tuple(sorted(set(self.unit.members), key=place))

    @property
    def is_link(self) -> bool:
        """Return whether a part of it is a symlink."""
        return not self.contents.symlinks.isdisjoint(self.unit.members)

    @property
    def foreign_files(self) -> tuple[str, ...]:
        """Return names in the checkpoint's directory that aren't its own files, but would be removed with it.

        A directory ends with a slash. In formats that allow any names, only files of results count, such as
        tables and pictures.
        """
        if self.unit.format is None:
            return ()
        written, names = self.unit.format.written, set()
        for path in (file.path.partition(os.sep)[2] for file in self.contents.files):
            first, slash, _ = path.partition(os.sep)
            name = first + slash
            if written is None:
                is_own = name == _ASSETS or not path.lower().endswith(_RESULTS)
            else:
                is_own = written.fullmatch(name) is not None
            if first and not (is_own or name.endswith(MANIFEST_SUFFIXES) or name in SHARED):
                names.add(name)
        return tuple(sorted(names))

    @property
    def nbytes(self) -> int:
        """Return the bytes of its own files, without manifests.

        Symlinks count with the bytes of their targets, although removing them frees none.
        """
        return self._saved.nbytes if self.linked_bytes is None else self.linked_bytes

    @property
    def files(self) -> int:
        """Return the number of its own files, without manifests."""
        return len(self._saved.files)

    @property
    def modified_ns(self) -> int:
        """Return the time of its newest file in nanoseconds since 1970, without manifests."""
        return self._saved.modified_ns

    @property
    def save_time(self) -> float:
        """Return the time of the save in seconds since 1970: as recorded, else of its newest file."""
        return self.modified_ns / 10**9 if self.saved_at is None else self.saved_at

    @property
    def _saved(self) -> Contents:
        if len(self.contents.files) == 1:
            return self.contents
        saved = tuple(file for file in self.contents.files if not file.path.endswith(MANIFEST_SUFFIXES))
        return Contents(saved or self.contents.files)

    def recorded_metric(self, name: str) -> float | None:
        """Return a metric's recorded value, which may be NaN; ``loss`` is a metric, too."""
        return self.metrics.get(name, self.loss if name == "loss" else None)

    def metric(self, name: str) -> float | None:
        """Return a metric's value; None if it is unknown or NaN. ``loss`` is a metric, too."""
        value = self.recorded_metric(name)
        return value if value is not None and math.isfinite(value) else None


def state_part(unit: Unit, files: Contents, checkpoint: Checkpoint) -> StatePart:
    """Return the part of a checkpoint with the state of its training.

    A directory may have files with nothing else; otherwise, only the size is known.
    """
    state: list[Tensor] = []
    others: list[Tensor] = []
    for tensor in checkpoint.tensors:
        (state if is_state_tensor(tensor) else others).append(tensor)
    sizes = _state_files(unit, files, checkpoint.path, state, others)
    if not sizes and not state:
        return StatePart()
    if sizes:
        return StatePart(sum(sizes.values()), tuple(sizes))
    # Only a single file is converted to 16 bits when it is slimmed; the other tensors of a directory keep
    # their types. A tensor that shares another's storage takes no bytes of its own.
    is_file = len(files.files) == 1
    floats = [one for one in others if is_file and one.dtype.kind == "float" and one.shares_with is None]
    return StatePart(_nbytes(state), (), sum(one.nbytes - 2 * one.size for one in floats))


def _state_files(
    unit: Unit, files: Contents, directory: str, state: Sequence[Tensor], others: Sequence[Tensor]
) -> dict[str, int]:
    """Return the sizes of a directory's files that have only training state, if these have all of it.

    Paths are relative to the directory.
    """
    # The format knows which files its framework needs only to resume, and is told which ones hold nothing but
    # state tensors. If some state is in a file that also holds weights, removing files isn't enough: the
    # checkpoint has to be written anew.
    base = os.path.basename(unit.path) + os.sep
    sizes = {one.path.removeprefix(base): one.size for one in files.files if one.path.startswith(base)}
    if not sizes or unit.format is None:
        return {}
    holders, shared = _names_of_files(state, directory), _names_of_files(others, directory)
    names = set(unit.format.state_files(sizes, holders - shared)) - shared
    return {name: size for name, size in sizes.items() if name in names} if holders <= names else {}


def _names_of_files(tensors: Sequence[Tensor], directory: str) -> set[str]:
    """Return the paths of the files that hold tensors, relative to a directory."""
    places = (tensor.storage or tensor.extent for tensor in tensors)
    return {os.path.relpath(file, directory) for file in {place.file for place in places if place}}


def _nbytes(tensors: Sequence[Tensor]) -> int:
    """Return the bytes of tensors; storage that several views share counts once."""
    owned = [tensor for tensor in tensors if tensor.shares_with is None]
    stored = {tensor.storage: tensor.storage.nbytes for tensor in owned if tensor.storage is not None}
    return sum(stored.values()) + sum(tensor.nbytes for tensor in owned if tensor.storage is None)
