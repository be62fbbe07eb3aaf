"""What lies in the directories of a Fluid checkpoint: variables, lookup tables, trainers."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field

from ckpttool.checkpoint import Extent, FileEntry, Path, Role, Span, Tensor
from ckpttool.dtypes import BY_NAME
from ckpttool.errors import CheckpointError, DamagedCheckpoint
from ckpttool.formats.interface import scan
from ckpttool.report import Finding, error, note, warning
from ckpttool.wire.lodtensor import Stream, integers, lod_fault, read_file, starts_like_stream
from ckpttool.wire.readable import Contiguous, reader_from
from ckpttool.wire.reopened import Reopened
from ckpttool.wire.source import Source

MARKER = "_SUCCESS"
TABLES = ("__lookup_table__", "__lockup_table__")
"""The directory of lookup tables, as the code spells it and as the guide does."""
TRAINER = re.compile(r"trainer_([0-9]{1,9})")
MAX_ARGUMENT = 1 << 12
"""The most bytes of a trainer's argument: a number as text."""
MAX_SLASHES = 16
"""The most slashes in the name of a variable."""
MAX_ROWS = 1 << 20
"""The most rows of all tables that are compared with each other."""

_SHARD = re.compile(r"(?:(?P<table>.*)_)?(?P<index>[0-9]{1,9})", re.DOTALL)
_NUMBER = re.compile(r"\s*([-+]?[0-9]{1,18})\s*")
COUNTERS = ("epoch_id", "step_id")
_ACCUMULATOR = re.compile(
    r"(?:(?P<parameter>.+)_)?(?:moment1?|moment2(?:_max)?|velocity|beta[12]_pow_acc|inf_norm|mean_square|"
    r"mean_grad|momentum(?:_acc)?|avg_squared_grad|avg_squared_update|squared|linear|fp32_master)_[0-9]+",
    re.DOTALL,
)
_RATE = re.compile(r"(?:learning_rate|LearningRateDecay\w*|@LR_DECAY_COUNTER@\w*)(?:_[0-9]+)?")

Entries = Mapping[str, "os.DirEntry[str]"]


def role_of(name: str) -> Role:
    """Return what a variable serves, from its name."""
    is_state = _ACCUMULATOR.fullmatch(name) or _RATE.fullmatch(name)
    return Role.OPTIMIZER if is_state else Role.WEIGHTS


@dataclass(slots=True)
class Parts:
    """What was read of a checkpoint so far; ``root`` is the directory that nothing may lead out of."""

    root: str
    tensors: list[Tensor] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    files: list[FileEntry] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    trainers: dict[str, dict[str, object]] = field(default_factory=dict)
    safety: list[Finding] = field(default_factory=list)
    complete: bool = True
    opened: ExitStack = field(default_factory=ExitStack)

    def fault(self, code: str, message: str, where: str | None = None) -> None:
        """Note an error because of which the checkpoint is not complete."""
        self.findings.append(error(code, message, where))
        self.complete = False

    def is_inside(self, entry: os.DirEntry[str]) -> bool:
        """Tell whether an entry lies in the checkpoint; note an error where a link leads out of it."""
        if not entry.is_symlink():
            return True
        root = os.path.realpath(self.root) + os.sep
        if os.path.realpath(entry.path).startswith(root):
            return True
        message = "a link that leads out of the checkpoint; it was not opened"
        self.fault("link-outside", message, self.name_of(entry.path))
        return False

    def name_of(self, path: str) -> str:
        """Return a path as findings name it: from the checkpoint's directory on."""
        return os.path.relpath(path, self.root).replace(os.sep, "/")

    def source(self, entry: os.DirEntry[str]) -> Reopened:
        """Return a file of the checkpoint, which is opened only while it is read."""
        source = Reopened(entry.path)
        self.opened.callback(source.close)
        self.files.append(FileEntry(entry.path, source.size))
        return source

    def read(self, entry: os.DirEntry[str]) -> tuple[Reopened, Stream] | None:
        """Return the one stream in a file; where it is damaged, note an error and return None.

        Raises:
            CheckpointError: The operating system refuses it.
        """
        if not self.is_inside(entry):
            return None
        name = self.name_of(entry.path)
        if not os.path.isfile(entry.path):
            self.fault("not-a-file", "a directory where a variable's file should be", name)
            return None
        source = self.source(entry)
        try:
            stream = read_file(source)
            fault = lod_fault(source, stream)
        except DamagedCheckpoint as failure:
            self.fault(failure.code, failure.reason, name)
            return None
        finally:
            source.rest()
        if fault is not None:
            self.findings.append(warning("lod-inconsistent", fault, name))
        return source, stream

    def add(self, path: Path, role: Role, source: Reopened, stream: Stream) -> None:
        """Take the values of a stream as a tensor."""
        extent = Extent(source.path, stream.offset, stream.nbytes)
        values = Contiguous(source, stream.offset, stream.nbytes)
        self.tensors.append(Tensor(path, stream.dtype, stream.shape, role, values, extent, extent))
        read = reader_from(source, stream.offset)
        self.spans.append(Span(extent, self.name_of(source.path), read, None, stream.dtype))

    def add_rows(self, path: Path, source: Reopened, stream: Stream) -> None:
        """Take the row numbers of a SelectedRows as a tensor; they are structure, and may have been read."""
        if stream.rows is None:
            return
        values = Contiguous(source, stream.rows.offset, 8 * stream.rows.total)
        dtype = BY_NAME["int64"]
        self.tensors.append(Tensor(path, dtype, (stream.rows.total,), Role.OTHER, values))

    def add_marker(self, entries: Entries) -> bool:
        """Take the marker of a whole save; tell whether it is there."""
        entry = entries.get(MARKER)
        if entry is None or not entry.is_file(follow_symlinks=False):
            return False
        self.source(entry).rest()
        return True


def add_variables(parts: Parts, entries: Entries, passed_over: Callable[[str], bool]) -> None:
    """Read every variable of a directory: one file each, named like it.

    Raises:
        CheckpointError: The operating system refuses one.
    """
    for name, entry in _named(entries):
        if name == MARKER or passed_over(name):
            continue
        if entry.name.startswith("."):
            where = parts.name_of(entry.path)
            parts.findings.append(note("not-part", "a hidden file; it was not looked at", where))
        elif (found := parts.read(entry)) is not None:
            source, stream = found
            if stream.rows is not None:
                parts.add_rows((name, "rows"), source, stream)
                parts.add((name, "values"), role_of(name), source, stream)
            else:
                parts.add((name,), role_of(name), source, stream)
    check_accumulators(parts)


def _named(entries: Entries) -> Iterator[tuple[str, os.DirEntry[str]]]:
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


def check_accumulators(parts: Parts) -> None:
    """Compare what an optimizer keeps of each parameter with the parameter."""
    shapes = {tensor.path[0]: tensor.shape for tensor in parts.tensors if len(tensor.path) == 1}
    for name, shape in shapes.items():
        match = _ACCUMULATOR.fullmatch(str(name))
        parameter = match["parameter"] if match else None
        if parameter in shapes and shape not in (shapes[parameter], (1,), ()):
            message = f"shape {list(shape)}, and {parameter} has {list(shapes[parameter])}"
            parts.findings.append(error("accumulator-shape", message, str(name)))


def add_tables(parts: Parts, entries: Entries) -> None:
    """Read the shards of all lookup tables in a directory.

    Raises:
        CheckpointError: The operating system refuses one.
    """
    shards: dict[str, dict[int, str]] = defaultdict(dict)
    rows: dict[str, list[tuple[str, Reopened, Stream]]] = defaultdict(list)
    for name, entry in entries.items():
        match = _SHARD.fullmatch(name)
        if name == MARKER or match is None:
            if name != MARKER:
                where = parts.name_of(entry.path)
                parts.findings.append(warning("table-name", "it is not named like a lookup table", where))
            continue
        table, index = match["table"] or "", int(match["index"])
        if index in shards[table]:
            parts.fault(
                "table-shard-twice", f"two files of parameter server {index}", parts.name_of(entry.path)
            )
        shards[table][index] = name
        if (found := parts.read(entry)) is not None:
            rows[table].append((name, *found))
            parts.add_rows((TABLES[0], name, "rows"), *found)
            parts.add((TABLES[0], name, "values"), Role.WEIGHTS, *found)
    for table, found_shards in shards.items():
        _check_shards(parts, table, found_shards)
    for found_rows in rows.values():
        _check_rows(parts, found_rows)


def _check_shards(parts: Parts, table: str, shards: Mapping[int, str]) -> None:
    lacking = [index for index in range(min(max(shards) + 1, len(shards) + 1)) if index not in shards]
    if lacking:
        message = f"the shard of parameter server {lacking[0]} is missing; {len(shards):,} are here"
        parts.fault("table-shard-missing", message, table or None)


def _check_rows(parts: Parts, shards: list[tuple[str, Reopened, Stream]]) -> None:
    """Require that no row lies in two shards of a table, nor twice in one."""
    total = sum(stream.rows.total for _, _, stream in shards if stream.rows)
    if total > MAX_ROWS:
        message = f"{total:,} rows, which were not compared (more than {MAX_ROWS:,})"
        parts.findings.append(note("rows-not-compared", message, shards[0][0]))
        return
    seen: set[int] = set()
    for name, source, stream in shards:
        if stream.rows is None:
            continue
        own = integers(source, stream.rows.offset, stream.rows.total)
        if len(own) > len(set(own) - seen):
            parts.findings.append(error("rows-twice", "it has rows that were there before", name))
        seen.update(own)


def add_trainer(parts: Parts, number: str, entries: Entries) -> None:
    """Read what a trainer kept of its progress: one small text file for each argument.

    Raises:
        CheckpointError: The operating system refuses one.
    """
    arguments: dict[str, object] = {}
    for name, entry in entries.items():
        where = parts.name_of(entry.path)
        if name == MARKER or name.startswith("."):
            continue
        if not parts.is_inside(entry):
            continue
        if not os.path.isfile(entry.path):
            parts.findings.append(warning("not-part", "a directory among a trainer's arguments", where))
            continue
        source = parts.source(entry)
        if source.size > MAX_ARGUMENT:
            message = f"{source.size:,} bytes, which is no argument of a trainer; it was not read"
            parts.findings.append(warning("trainer-argument", message, where))
            source.rest()
            continue
        text = source.read(0, source.size).decode("utf-8", "backslashreplace")
        source.rest()
        arguments[name] = _value(parts, name, text, where)
    if not parts.add_marker(entries):
        parts.findings.append(note("trainer-no-marker", f"no {MARKER}", f"trainer_{number}"))
    parts.trainers[number] = arguments


def _value(parts: Parts, name: str, text: str, where: str) -> object:
    match = _NUMBER.fullmatch(text)
    if match is not None:
        return int(match[1])
    if name in COUNTERS:
        parts.findings.append(error("trainer-argument", f"{text[:40]!r}, which is no number", where))
    return text.strip()


def in_order(spans: list[Span]) -> Iterator[Span]:
    """Iterate over spans file after file."""
    yield from sorted(spans, key=lambda span: (span.extent.file, span.extent.offset))


def is_stream_file(entry: os.DirEntry[str]) -> bool | None:
    """Tell whether a file begins like a stream; None for a link, or where it is too short to tell."""
    if entry.is_symlink():
        return None
    try:
        with Source(entry.path) as source:
            if source.read(0, min(4, source.size)).strip(b"\0"):
                return False
            return starts_like_stream(source) or None
    except CheckpointError:
        return False
