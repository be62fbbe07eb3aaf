"""Parts that all of Paddle's directories and pairs of files share: variables in files, roles, native parts.

``PaddleParts`` collects what a reader finds; the functions before and after it give each variable its role,
add the variables of a directory or a combined file, compare them with the program, and keep the details that
tensors lack.

A variable is a file with one stream, a LoDTensor or SelectedRows, and the file's name is the variable's; a
slash in the name makes a directory. A combined file is a sequence of LoDTensors without names, sorted by the
names that the program has.

Source: PaddlePaddle/Paddle ``python/paddle/fluid/io.py``, ``save_vars``.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckpttool.containers.jsontext import parse_json
from ckpttool.containers.lodtensor import (
    Stream,
    lod_bytes,
    lod_fault,
    read_all,
    read_file,
    starts_like_stream,
)
from ckpttool.core.checkpoint import FileEntry
from ckpttool.core.dtypes import BY_NAME
from ckpttool.core.errors import CheckpointError, DamagedCheckpoint
from ckpttool.core.readable import reader_from
from ckpttool.core.report import error, note, warning
from ckpttool.core.tensor import Extent, Path, Role, Span, Tensor
from ckpttool.core.values import Contiguous
from ckpttool.formats.interface import scan
from ckpttool.formats.opening import Opening
from ckpttool.storage import fs
from ckpttool.storage.source import Source

if TYPE_CHECKING:
    from ckpttool.formats.paddle.program import Program

MODEL = "__model__"
MARKER = "_SUCCESS"
TABLES = ("__lookup_table__", "__lockup_table__")
"""Directory of lookup tables: as Paddle's code spells it, and "lockup" as its user guide did."""
TRAINER = re.compile(r"trainer_([0-9]{1,9})")
MAX_SLASHES = 16
"""Limit on slashes in the name of a variable."""

COUNTERS = ("epoch_id", "step_id")
"""Files of a trainer's progress: a number as text each."""

Entries = Mapping[str, "os.DirEntry[str]"]


# Roles ------------------------------------------------------------------------------------------------

# An optimizer names its accumulators ``<parameter>_<accumulator>_<number>``: ``fc_0.w_0_moment1_0``.
_ACCUMULATOR = re.compile(
    r"(?:(?P<parameter>.+)_)?(?:moment1?|moment2(?:_max)?|velocity|beta[12]_pow_acc|inf_norm|mean_square|"
    r"mean_grad|momentum(?:_acc)?|avg_squared_grad|avg_squared_update|squared|linear|fp32_master)_[0-9]+",
    re.DOTALL,
)
_RATE = re.compile(r"(?:learning_rate|LearningRateDecay\w*|@LR_DECAY_COUNTER@\w*)(?:_[0-9]+)?")


def role_of(name: str) -> Role:
    """Return OPTIMIZER for the name of an accumulator or learning rate, WEIGHTS for any other."""
    is_state = _ACCUMULATOR.fullmatch(name) or _RATE.fullmatch(name)
    return Role.OPTIMIZER if is_state else Role.WEIGHTS


# The parts --------------------------------------------------------------------------------------------


@dataclass(eq=False)
class PaddleParts(Opening):
    """Parts of a checkpoint, collected by its reader.

    ``add`` and the other methods and functions named ``add_…`` fill ``tensors``, ``spans``, ``heights`` and
    ``levels``; each file that ``open_source`` opens is added to ``files``.

    Attributes:
        root: The directory; links that lead out of it are not followed.
        other_entries: Further directories by name, if a checkpoint is spread over several places.
        trainers: Arguments of each trainer by its number.
        tables: Descriptions of lookup tables by name.
        heights: Rows of the full table by name of the SelectedRows, which may hold fewer.
        levels: File and stream of tensors with a LoD (bounds of sequences), by tensor name.
        sidecar: Content of the sidecar file, if there is one.
        program: The program whose variables these are, if there is one.
    """

    root: str
    other_entries: Mapping[str, tuple[os.DirEntry[str], ...]] = field(default_factory=dict)
    tensors: list[Tensor] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    files: list[FileEntry] = field(default_factory=list)
    trainers: dict[str, dict[str, object]] = field(default_factory=dict)
    tables: dict[str, dict[str, object]] = field(default_factory=dict)
    heights: dict[str, int] = field(default_factory=dict)
    levels: dict[str, tuple[Source, Stream]] = field(default_factory=dict)
    sidecar: bytes | None = None
    program: Program | None = None

    def is_inside(self, entry: os.DirEntry[str]) -> bool:
        """Return whether an entry is in the checkpoint; add an error for a link that leads out of it."""
        if not entry.is_symlink():
            return True
        # A hostile checkpoint may link to any file of the user, whose content would be shown or converted.
        root = fs.realpath(self.root) + os.sep
        if fs.realpath(entry.path).startswith(root):
            return True
        message = "a link that points outside the checkpoint; not opened"
        self.fault("link-outside", message, self.name_of(entry.path))
        return False

    def name_of(self, path: str) -> str:
        """Return a path for findings: relative to the checkpoint's directory, with slashes."""
        return os.path.relpath(path, self.root).replace(os.sep, "/")

    def table_shards(self, name: str, entry: os.DirEntry[str]) -> Iterator[tuple[str, os.DirEntry[str]]]:
        """Yield names and entries of a directory of lookup tables, in all places of the checkpoint."""
        for place in (entry, *self.other_entries.get(name, ())):
            yield from scan(place.path).items()

    def open_source(self, entry: os.DirEntry[str]) -> Source:
        """Open a file and add it to ``files``; it is closed with the checkpoint."""
        source = fs.open_source(entry.path)
        self.opened.callback(source.close)
        self.files.append(FileEntry(entry.path, source.size))
        return source

    def read_variable(self, entry: os.DirEntry[str]) -> tuple[Source, Stream] | None:
        """Return a file and its one stream; add an error and return None if it is damaged."""
        if not self.is_inside(entry):
            return None
        name = self.name_of(entry.path)
        if not fs.isfile(entry.path):
            self.fault("not-a-file", "a directory where a variable's file should be", name)
            return None
        source = self.open_source(entry)
        try:
            stream = read_file(source)
            fault = lod_fault(source, stream)
        except DamagedCheckpoint as failure:
            self.add_failure(failure, name)
            return None
        if fault is not None:
            self.findings.append(warning("lod-inconsistent", fault, name))
        return source, stream

    def add(self, path: Path, role: Role, source: Source, stream: Stream) -> None:
        """Add the elements of a stream as a tensor."""
        extent = Extent(source.path, stream.offset, stream.nbytes)
        values = Contiguous(source, stream.offset, stream.nbytes)
        self.tensors.append(Tensor(path, stream.dtype, stream.shape, role, values, extent, extent))
        if stream.lod and stream.rows is None:
            self.levels[self.tensors[-1].name] = source, stream
        read = reader_from(source, stream.offset)
        self.spans.append(Span(extent, self.name_of(source.path), read, None, stream.dtype))

    def add_rows(self, path: Path, source: Source, stream: Stream) -> None:
        """Add the row numbers of a SelectedRows as a tensor ``rows``, and note its height."""
        if stream.rows is None:
            return
        # The height is that of the full table. A table in memory grows by doubling, so the values may have
        # more rows than there are numbers; the numbers are those of the first rows.
        self.heights[".".join(map(str, path[:-1]))] = stream.rows.height
        values = Contiguous(source, stream.rows.offset, 8 * stream.rows.total)
        dtype = BY_NAME["int64"]
        self.tensors.append(Tensor(path, dtype, (stream.rows.total,), Role.OTHER, values))

    def add_marker(self, entries: Entries) -> bool:
        """Add the marker of a complete save, and return whether it exists."""
        entry = entries.get(MARKER)
        if entry is None or not entry.is_file(follow_symlinks=False):
            return False
        self.open_source(entry)
        return True


# Variables in files -----------------------------------------------------------------------------------


def add_variables(parts: PaddleParts, entries: Entries, is_skipped: Callable[[str], bool]) -> None:
    """Add every variable of a directory; files of a name for which ``is_skipped`` is true are ignored."""
    for name, entry in files_by_variable(entries):
        if name == MARKER or is_skipped(name):
            continue
        if entry.name.startswith("."):
            where = parts.name_of(entry.path)
            parts.findings.append(note("not-part", "a hidden file; not checked", where))
        elif (variable := parts.read_variable(entry)) is not None:
            source, stream = variable
            if stream.rows is not None:
                parts.add_rows((name, "rows"), source, stream)
                parts.add((name, "values"), role_of(name), source, stream)
            else:
                parts.add((name,), role_of(name), source, stream)
    check_accumulators(parts)


def add_combined(parts: PaddleParts, entry: os.DirEntry[str]) -> None:
    """Add the tensors of a combined file, with names from the program, or ``#0``, ``#1`` … without one."""
    source, where = parts.open_source(entry), parts.name_of(entry.path)
    streams: list[Stream] = []
    try:
        streams.extend(read_all(source))
    except DamagedCheckpoint as failure:
        # Tensors before the damage are kept.
        parts.fault(failure.code, failure.placed_reason, where)
    names = [variable.name for variable in parts.program.stored] if parts.program is not None else []
    if parts.program is not None and parts.complete and len(names) != len(streams):
        message = f"{len(streams):,} tensors, but the program has {len(names):,} variables"
        parts.fault("program-mismatch", message, where)
        names = []
    for number, stream in enumerate(streams):
        name = names[number] if number < len(names) else f"#{number}"
        if (fault := lod_fault(source, stream)) is not None:
            parts.findings.append(warning("lod-inconsistent", fault, name))
        parts.add((name,), role_of(name), source, stream)
    check_accumulators(parts)


def files_by_variable(entries: Entries) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yield name and file of each variable: the path from the directory, as a slash in a name is a directory.

    Directories more than ``MAX_SLASHES`` deep are yielded themselves.
    """
    pending = [("", 0, entries)]
    while pending:
        prefix, depth, level = pending.pop()
        for key, entry in level.items():
            if entry.is_dir(follow_symlinks=False) and depth < MAX_SLASHES:
                pending.append((f"{prefix}{key}/", depth + 1, scan(entry.path)))
            else:
                yield prefix + key, entry


def spans_in_order(spans: list[Span]) -> Iterator[Span]:
    """Yield spans by file and offset."""
    yield from sorted(spans, key=lambda span: (span.extent.file, span.extent.offset))


def is_stream_file(entry: os.DirEntry[str]) -> bool | None:
    """Return whether a file begins like a stream; None for a link, or if it is too short to decide."""
    if entry.is_symlink():
        return None
    # Both kinds of stream begin with their version, a 32-bit 0. Anything else in these bytes decides without
    # parsing.
    try:
        with fs.open_source(entry.path) as source:
            if source.read(0, min(4, source.size)).strip(b"\0"):
                return False
            return starts_like_stream(source) or None
    except CheckpointError:
        return False


# Checks -----------------------------------------------------------------------------------------------


def check_program(parts: PaddleParts, program: Program) -> None:
    """Add an error for each tensor that differs from the program's declaration, where -1 is any length."""
    for tensor in parts.tensors:
        declared = program.variables.get(str(tensor.path[0]))
        if declared is None or declared.shape is None or len(tensor.path) > 1:
            continue
        fits = len(declared.shape) == len(tensor.shape) and all(
            want in (-1, have) for want, have in zip(declared.shape, tensor.shape, strict=True)
        )
        if not fits or declared.dtype not in (None, tensor.dtype):
            have = f"{tensor.dtype.name} {list(tensor.shape)}"
            want = f"{declared.dtype.name if declared.dtype else '?'} {list(declared.shape)}"
            parts.fault("program-mismatch", f"{have}, but the program declares {want}", tensor.name)


def check_accumulators(parts: PaddleParts) -> None:
    """Add an error for each accumulator whose shape is not that of its parameter."""
    shapes = {str(tensor.path[0]): tensor.shape for tensor in parts.tensors if len(tensor.path) == 1}
    for name, parameter in mismatched_accumulators(shapes):
        message = f"shape {list(shapes[name])}, but {parameter} has {list(shapes[parameter])}"
        parts.findings.append(error("accumulator-shape", message, name))


def mismatched_accumulators(shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, str]]:
    """Yield accumulator and parameter where the shapes differ; an accumulator may also be one number."""
    for name, shape in shapes.items():
        match = _ACCUMULATOR.fullmatch(name)
        parameter: str = (match["parameter"] or "") if match else ""
        # ``beta1_pow_acc`` and the like are one number for a parameter of any shape.
        if parameter in shapes and shape not in (shapes[parameter], (1,), ()):
            yield name, parameter


# Native parts -----------------------------------------------------------------------------------------

HEIGHTS = "fluid.heights"
"""Native part with the heights of SelectedRows: JSON of the row count of the full table by name."""
LEVELS = "fluid.levels/"
"""Prefix of native parts with the LoD of a tensor, in the bytes of its stream; the tensor's name follows."""


def native_of(parts: PaddleParts) -> dict[str, bytes]:
    """Return the LoDs and heights of a checkpoint, which its tensors lack; see ``Checkpoint.native``."""
    native = {LEVELS + name: lod_bytes(source, stream) for name, (source, stream) in parts.levels.items()}
    if parts.heights:
        native[HEIGHTS] = json.dumps(parts.heights).encode()
    return native


def heights_of(native: Mapping[str, bytes]) -> dict[str, int]:
    """Return the heights in a checkpoint's native parts; those that are no row counts are ignored."""
    try:
        heights = parse_json("", native.get(HEIGHTS, b"{}"), HEIGHTS)
    except CheckpointError:
        return {}
    pairs = heights.items() if isinstance(heights, dict) else ()
    return {name: height for name, height in pairs if type(height) is int and 0 <= height < 1 << 63}
