"""The files in the directories of a Fluid checkpoint, and the variables in them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from ckpttool.containers.jsontext import parse_json
from ckpttool.containers.lodtensor import Stream, lod_bytes, lod_fault, read_file, starts_like_stream
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

MODEL = "__model__"
MARKER = "_SUCCESS"
TABLES = ("__lookup_table__", "__lockup_table__")
"""The directory of lookup tables, as the code spells it and as the guide does."""
TRAINER = re.compile(r"trainer_([0-9]{1,9})")
MAX_SLASHES = 16
"""The most slashes in the name of a variable."""

COUNTERS = ("epoch_id", "step_id")
_ACCUMULATOR = re.compile(
    r"(?:(?P<parameter>.+)_)?(?:moment1?|moment2(?:_max)?|velocity|beta[12]_pow_acc|inf_norm|mean_square|"
    r"mean_grad|momentum(?:_acc)?|avg_squared_grad|avg_squared_update|squared|linear|fp32_master)_[0-9]+",
    re.DOTALL,
)
_RATE = re.compile(r"(?:learning_rate|LearningRateDecay\w*|@LR_DECAY_COUNTER@\w*)(?:_[0-9]+)?")

HEIGHTS = "fluid.heights"
"""How many rows there are in all, of which a SelectedRows holds some: JSON, by its name."""
LEVELS = "fluid.levels/"
"""In front of a tensor's name: its sequences, as they lie in the file."""

Entries = Mapping[str, "os.DirEntry[str]"]


def role_of(name: str) -> Role:
    """Return what a variable serves, from its name."""
    is_state = _ACCUMULATOR.fullmatch(name) or _RATE.fullmatch(name)
    return Role.OPTIMIZER if is_state else Role.WEIGHTS


@dataclass(eq=False)
class FluidParts(Opening):
    """What was read of a checkpoint so far.

    Attributes:
        root: The directory that nothing may lead out of.
        also: Directories of the same names in other places, if a checkpoint is spread over several.
        kinds: Returns the kinds of layers that the program's operators tell.
        program: Returns what the program computes.
        heights: How many rows there are in all, by the name of the SelectedRows that holds some of them.
        levels: The streams that have sequences, by the name of the tensor.
        sidecar: What no other file has a place for.
    """

    root: str
    also: Mapping[str, tuple[os.DirEntry[str], ...]] = field(default_factory=dict)
    tensors: list[Tensor] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    files: list[FileEntry] = field(default_factory=list)
    trainers: dict[str, dict[str, object]] = field(default_factory=dict)
    tables: dict[str, dict[str, object]] = field(default_factory=dict)
    heights: dict[str, int] = field(default_factory=dict)
    levels: dict[str, tuple[Source, Stream]] = field(default_factory=dict)
    sidecar: bytes | None = None
    kinds: Callable[[], Mapping[str, str]] = dict
    program: Callable[[], object] = lambda: None

    def is_inside(self, entry: os.DirEntry[str]) -> bool:
        """Return whether an entry lies in the checkpoint; note an error where a link leads out of it."""
        if not entry.is_symlink():
            return True
        root = fs.realpath(self.root) + os.sep
        if fs.realpath(entry.path).startswith(root):
            return True
        message = "a link that leads out of the checkpoint; it was not opened"
        self.fault("link-outside", message, self.name_of(entry.path))
        return False

    def name_of(self, path: str) -> str:
        """Return a path as findings name it: from the checkpoint's directory on."""
        return os.path.relpath(path, self.root).replace(os.sep, "/")

    def shards(self, name: str, entry: os.DirEntry[str]) -> Iterator[tuple[str, os.DirEntry[str]]]:
        """Yield what lies in a directory of shards, in all places where it lies."""
        for place in (entry, *self.also.get(name, ())):
            yield from scan(place.path).items()

    def source(self, entry: os.DirEntry[str]) -> Source:
        """Return a file of the checkpoint."""
        source = fs.open_source(entry.path)
        self.opened.callback(source.close)
        self.files.append(FileEntry(entry.path, source.size))
        return source

    def read(self, entry: os.DirEntry[str]) -> tuple[Source, Stream] | None:
        """Return the one stream in a file; where it is damaged, note an error and return None."""
        if not self.is_inside(entry):
            return None
        name = self.name_of(entry.path)
        if not fs.isfile(entry.path):
            self.fault("not-a-file", "a directory where a variable's file should be", name)
            return None
        source = self.source(entry)
        try:
            stream = read_file(source)
            fault = lod_fault(source, stream)
        except DamagedCheckpoint as failure:
            self.fault(failure.code, failure.reason, name)
            return None
        if fault is not None:
            self.findings.append(warning("lod-inconsistent", fault, name))
        return source, stream

    def add(self, path: Path, role: Role, source: Source, stream: Stream) -> None:
        """Take the values of a stream as a tensor."""
        extent = Extent(source.path, stream.offset, stream.nbytes)
        values = Contiguous(source, stream.offset, stream.nbytes)
        self.tensors.append(Tensor(path, stream.dtype, stream.shape, role, values, extent, extent))
        if stream.lod and stream.rows is None:
            self.levels[self.tensors[-1].name] = source, stream
        read = reader_from(source, stream.offset)
        self.spans.append(Span(extent, self.name_of(source.path), read, None, stream.dtype))

    def add_rows(self, path: Path, source: Source, stream: Stream) -> None:
        """Take the row numbers of a SelectedRows as a tensor; they are structure, and may have been read."""
        if stream.rows is None:
            return
        self.heights[".".join(map(str, path[:-1]))] = stream.rows.height
        values = Contiguous(source, stream.rows.offset, 8 * stream.rows.total)
        dtype = BY_NAME["int64"]
        self.tensors.append(Tensor(path, dtype, (stream.rows.total,), Role.OTHER, values))

    def add_marker(self, entries: Entries) -> bool:
        """Take the marker of a whole save; tell whether it is there."""
        entry = entries.get(MARKER)
        if entry is None or not entry.is_file(follow_symlinks=False):
            return False
        self.source(entry)
        return True


def add_variables(parts: FluidParts, entries: Entries, is_skipped: Callable[[str], bool]) -> None:
    """Read every variable of a directory: one file each, named like it."""
    for name, entry in files_by_variable(entries):
        if name == MARKER or is_skipped(name):
            continue
        if entry.name.startswith("."):
            where = parts.name_of(entry.path)
            parts.findings.append(note("not-part", "a hidden file; it was not looked at", where))
        elif (variable := parts.read(entry)) is not None:
            source, stream = variable
            if stream.rows is not None:
                parts.add_rows((name, "rows"), source, stream)
                parts.add((name, "values"), role_of(name), source, stream)
            else:
                parts.add((name,), role_of(name), source, stream)
    check_accumulators(parts)


def files_by_variable(entries: Entries) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yield files by the names of their variables; what stands before a slash in one is a directory.

    Directories that lie too deep are given as they are.
    """
    pending = [("", 0, entries)]
    while pending:
        prefix, depth, level = pending.pop()
        for key, entry in level.items():
            if entry.is_dir(follow_symlinks=False) and depth < MAX_SLASHES:
                pending.append((f"{prefix}{key}/", depth + 1, scan(entry.path)))
            else:
                yield prefix + key, entry


def check_accumulators(parts: FluidParts) -> None:
    """Compare what an optimizer keeps of each parameter with the parameter."""
    shapes = {str(tensor.path[0]): tensor.shape for tensor in parts.tensors if len(tensor.path) == 1}
    for name, parameter in mismatched_accumulators(shapes):
        message = f"shape {list(shapes[name])}, and {parameter} has {list(shapes[parameter])}"
        parts.findings.append(error("accumulator-shape", message, name))


def mismatched_accumulators(shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, str]]:
    """Yield what is named like an optimizer's state of a parameter and lacks its shape, and the parameter."""
    for name, shape in shapes.items():
        match = _ACCUMULATOR.fullmatch(name)
        parameter: str = (match["parameter"] or "") if match else ""
        if parameter in shapes and shape not in (shapes[parameter], (1,), ()):
            yield name, parameter


def spans_in_order(spans: list[Span]) -> Iterator[Span]:
    """Iterate over spans file after file."""
    yield from sorted(spans, key=lambda span: (span.extent.file, span.extent.offset))


def is_stream_file(entry: os.DirEntry[str]) -> bool | None:
    """Return whether a file begins like a stream; None for a link, or where it is too short to tell."""
    if entry.is_symlink():
        return None
    try:
        with fs.open_source(entry.path) as source:
            if source.read(0, min(4, source.size)).strip(b"\0"):
                return False
            return starts_like_stream(source) or None
    except CheckpointError:
        return False


# What the tensors don't tell ------------------------------------------------------------------------


def native_of(parts: FluidParts) -> dict[str, bytes]:
    """Return what a checkpoint's tensors don't tell, by name; see ``Checkpoint.native``."""
    native = {LEVELS + name: lod_bytes(source, stream) for name, (source, stream) in parts.levels.items()}
    if parts.heights:
        native[HEIGHTS] = json.dumps(parts.heights).encode()
    return native


def heights_of(native: Mapping[str, bytes]) -> dict[str, int]:
    """Return the heights that a checkpoint's native parts state; none where they are no such thing."""
    try:
        heights = parse_json("", native.get(HEIGHTS, b"{}"), HEIGHTS)
    except CheckpointError:
        return {}
    pairs = heights.items() if isinstance(heights, dict) else ()
    return {name: height for name, height in pairs if type(height) is int and 0 <= height < 1 << 63}
