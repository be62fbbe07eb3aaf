"""Writes a serial of Paddle Fluid in a directory: a file for each variable, trainers, lookup tables, markers.

The layout is in ``fluid``. Content without a place in it, such as metadata of other formats, is written as
the sidecar ``ENTRY`` in the serial.

Source: PaddlePaddle/Paddle ``python/paddle/fluid/io.py`` of 2018, ``save_checkpoint``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import ClassVar, NamedTuple

from ckpttool.containers.lodtensor import (
    MAX_AXES,
    NO_LEVELS,
    NUMBERS,
    lod_bytes,
    lod_tensor_header,
    read_lod_tensor,
    rows_header,
    values_header,
)
from ckpttool.core.checkpoint import TrainingState
from ckpttool.core.errors import CheckpointError
from ckpttool.core.readable import Buffer
from ckpttool.core.tensor import Path, Tensor
from ckpttool.core.training import training_state
from ckpttool.formats.content.plain_data import lazy_scalar
from ckpttool.formats.paddle.fluid_serial import MAX_ARGUMENT, SHARD
from ckpttool.formats.paddle.parts import (
    COUNTERS,
    HEIGHTS,
    LEVELS,
    MARKER,
    MAX_SLASHES,
    MODEL,
    TABLES,
    TRAINER,
    heights_of,
    mismatched_accumulators,
)
from ckpttool.formats.sharded import ShardFiles
from ckpttool.formats.sidecar import ENTRY, sidecar_of
from ckpttool.formats.writer import Content, Target, WriteOptions, Writer, fold_name
from ckpttool.storage.sink import Sink

_NOT_LOADED = frozenset({"uint64", "float8_e4m3fn", "float8_e5m2"})
"""Types that have a ``VarType`` number but that Paddle 2.6 doesn't load."""
_SAID_BY_READER = frozenset({"serial", "trainers", "lookup_tables"})
"""Metadata that ``fluid`` derives from the files of a serial."""
_SERIAL_DIGITS = 18
_LIMIT = 1 << 63
"""Above any int64."""
_MAX_NAME = 255
"""Limit on the bytes of a file's name, on every file system in use."""
_SKIPPED = ("@GRAD", ".trainer_", ".block")
"""Parts of names of variables that Paddle neither saves nor loads."""
_DEEPEST = 6
"""Levels of containers searched for epoch and step, which are in the first three."""

Trainers = Mapping[str, Mapping[str, object]]
"""Arguments of each trainer by name, by the trainer's number."""


class FluidWriter(Writer):
    """A directory with one serial, from which the trainers of 2018 resume."""

    name: ClassVar[str] = "fluid"
    dtypes: ClassVar[frozenset[str]] = frozenset(NUMBERS) - _NOT_LOADED
    shape = "directory"

    def refusals(self, content: Content, options: WriteOptions) -> Iterator[str]:
        of_content = [*variables(content)]
        if not any(variable.directory == MODEL for variable in of_content):
            yield "it has no tensors; a Fluid checkpoint needs variables"
        yield from _file_refusals(of_content, slashes=_was_fluid(content))

    def write(self, content: Content, target: Target, options: WriteOptions) -> None:
        number = content.metadata.get("serial") if _was_fluid(content) else None
        is_number = type(number) is int and 0 <= number < 10**_SERIAL_DIGITS
        serial = f"checkpoint_{number if is_number else 0}"
        files = ShardFiles(target)
        for variable in variables(content):
            sink, values, rows = files.create(f"{serial}/{variable.place}"), variable.values, variable.rows
            if rows is None:
                sink.write(lod_tensor_header(values.dtype, values.shape, variable.levels))
            else:
                sink.write(rows_header(rows.size))
                sink.put(rows)
                sink.write(values_header(variable.height, values.dtype, values.shape))
            sink.put(values)
        for trainer, arguments in _trainers(content).items():
            for name, value in arguments.items():
                files.create(f"{serial}/trainer_{trainer}/{name}").write(str(value).encode())
            _write_marker(files.create(f"{serial}/trainer_{trainer}/{MARKER}"))
        if (sidecar := _sidecar(content)) is not None:
            files.create(f"{serial}/{ENTRY}").write(sidecar)
        # Paddle loads the largest serial whose ``__model__`` has the marker, so this one is written after all
        # other files: an interrupted write leaves a serial that Paddle ignores.
        _write_marker(files.create(f"{serial}/{MODEL}/{MARKER}"))


class FluidVariable(NamedTuple):
    """A variable to be written: a LoDTensor, or a SelectedRows if it has ``rows``.

    Attributes:
        directory: Name of its directory in the serial.
        name: Paddle's name of it, which is also its file's.
        values: Its elements.
        rows: Row numbers of a SelectedRows, int64.
        height: Rows of the full table of a SelectedRows.
        levels: LoD of a LoDTensor, in the bytes of its stream.
    """

    directory: str
    name: str
    values: Tensor
    rows: Tensor | None = None
    height: int = 0
    levels: bytes = NO_LEVELS

    @property
    def place(self) -> str:
        """Path of its file in the serial."""
        return f"{self.directory}/{self.name}"

    @property
    def placed_tensors(self) -> tuple[Tensor, ...]:
        """The tensors whose paths are implied by this file, so that no sidecar needs to have them."""
        if self.rows is not None:
            return self.values, self.rows
        return (self.values,) if self.directory == TABLES[0] else ()


def _write_marker(sink: Sink) -> None:
    sink.write(time.ctime().encode())  # as Paddle does; its loader only asks whether the file exists


def _was_fluid(content: Content) -> bool:
    """Return whether content was a Fluid checkpoint, perhaps before a conversion to its present format."""
    if content.source_format == FluidWriter.name:
        return True
    trainers = _source_trainers(content) or {}
    return any(name in arguments for arguments in trainers.values() for name in COUNTERS)


def _sidecar(content: Content) -> bytes | None:
    """Return the sidecar document, or None if the other files hold all of the content."""
    # Of a Fluid checkpoint, everything that the reader finds in the files again is left out. If nothing is
    # left that needs a sidecar, none is written; otherwise it has all of the content.
    rest = content
    if _was_fluid(content) and _source_trainers(content) is not None:
        placed = {tensor.path for variable in variables(content) for tensor in variable.placed_tensors}
        rest = replace(
            content,
            tensors=tuple(tensor for tensor in content.tensors if tensor.path not in placed),
            metadata={key: value for key, value in content.metadata.items() if key not in _SAID_BY_READER},
            native={
                key: value
                for key, value in content.native.items()
                if key != HEIGHTS and not key.startswith(LEVELS)
            },
            training=TrainingState(),
        )
    sidecar = sidecar_of(rest)
    return sidecar_of(content) if sidecar is not None and rest is not content else sidecar


# Variables ------------------------------------------------------------------------------------------


def variables(content: Content) -> Iterator[FluidVariable]:
    """Yield the variables of some content; ``<name>.rows`` and ``<name>.values`` are one SelectedRows."""
    # Such a pair is a SelectedRows only if its height is known, which the reader put into the native parts.
    # There may be fewer row numbers than rows of values: tables grow by doubling.
    heights = heights_of(content.native)
    by_path = {tensor.path: tensor for tensor in content.owned} if heights else {}
    sparse: dict[Path, tuple[Tensor, int]] = {}
    for path, values in by_path.items():
        rows, stem = by_path.get((*path[:-1], "rows")), path[:-1]
        height = heights.get(".".join(map(str, stem)))
        if path[-1:] != ("values",) or not stem or rows is None or height is None:
            continue
        is_of_rows = rows.dtype.name == "int64" and len(rows.shape) == 1
        if is_of_rows and values.shape and values.shape[0] >= rows.size:
            sparse[path] = rows, height
    paths_of_rows = {rows.path for rows, _ in sparse.values()}
    for tensor in content.owned:
        if tensor.path in paths_of_rows:
            continue
        if tensor.path in sparse:
            rows, height = sparse[tensor.path]
            yield FluidVariable(*_directory_and_name(tensor.path[:-1]), tensor, rows, height)
        elif tensor.path[:1] == (TABLES[0],) and tensor.path[2:] == ("values",):
            yield FluidVariable(*_directory_and_name(tensor.path[:-1]), tensor)
        else:
            levels = content.native.get(LEVELS + tensor.name, NO_LEVELS)
            yield FluidVariable(MODEL, tensor.name, tensor, levels=levels)


def _directory_and_name(stem: Path) -> tuple[str, str]:
    """Return directory and name of the variable of a tensor's path, for shards of lookup tables their own."""
    name = ".".join(map(str, stem[1:]))
    if stem[0] == TABLES[0] and SHARD.fullmatch(name):
        return TABLES[0], name
    return MODEL, ".".join(map(str, stem))


def _file_refusals(wanted: Iterable[FluidVariable], *, slashes: bool) -> Iterator[str]:
    """Yield a sentence for each reason why variables can't be written as files.

    Args:
        wanted: The variables.
        slashes: Whether names may have slashes, which make directories, as in Paddle.
    """
    files: dict[str, FluidVariable] = {}
    directories: dict[str, FluidVariable] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for variable in wanted:
        name = variable.values.name
        parts = variable.name.split("/") if slashes else [variable.name]
        if why := next(filter(None, map(_name_refusal, parts)), None) or _variable_refusal(variable):
            yield f"{name}: {why} (use --map)"
            continue
        if (other := files.setdefault(fold_name(variable.place), variable)) is not variable:
            yield f"{name}: some file systems don't distinguish its name from {other.name} (use --map)"
        for count in range(1, len(parts)):
            directories[fold_name(f"{variable.directory}/{'/'.join(parts[:count])}")] = variable
        if not _are_readable_levels(variable):
            yield f"{name}: Paddle can't read its sequence levels"
        if variable.directory == MODEL and variable.rows is None:
            shapes[variable.name] = variable.values.shape
    for place in files.keys() & directories.keys():
        yield f"{files[place].values.name}: a file, but a directory for {directories[place].name} (use --map)"
    for name, parameter in mismatched_accumulators(shapes):
        yield (
            f"{name}: by its name it belongs to {parameter}'s optimizer, but its shape "
            f"{list(shapes[name])} is not {list(shapes[parameter])} (use --map)"
        )


def _name_refusal(name: str) -> str | None:
    """Return the reason why a file can't have this name, or None."""
    try:
        nbytes = len(os.fsencode(name))
    except UnicodeEncodeError:
        return "a Fluid variable is a file, and its name is not valid text"
    for letter, shown in (("/", "'/'"), ("\0", "NUL")):
        if letter in name:
            return f"a Fluid variable is a file, and its name can't have {shown}"
    if not name:
        return "a Fluid variable is a file, and needs a name"
    if nbytes > _MAX_NAME:
        return f"a Fluid variable is a file, and its name has {nbytes:,} bytes (at most {_MAX_NAME})"
    return "a Fluid variable's name can't begin with a dot" if name.startswith(".") else None


def _variable_refusal(variable: FluidVariable) -> str | None:
    """Return the reason why Paddle or the reader would skip a variable, or None."""
    if variable.name == MARKER:
        return "Paddle has its marker under this name"
    if variable.name.count("/") > MAX_SLASHES:
        return f"its name has more than {MAX_SLASHES} slashes"
    if len(variable.values.shape) > MAX_AXES:
        return f"{len(variable.values.shape)} axes; at most {MAX_AXES} are read"
    skipped = next((part for part in _SKIPPED if part in variable.name), None)
    return f"Paddle neither saves nor loads a variable with {skipped!r} in its name" if skipped else None


def _are_readable_levels(variable: FluidVariable) -> bool:
    """Return whether the LoD of a variable, which a sidecar may have made up, is read back unchanged."""
    values, levels = variable.values, variable.levels
    if levels == NO_LEVELS or values.dtype.name not in NUMBERS:
        return True
    header = Buffer("", lod_tensor_header(values.dtype, values.shape, levels))
    try:
        stored = read_lod_tensor(header)
        return stored.offset == header.size and lod_bytes(header, stored) == levels
    except CheckpointError:
        return False


# Progress -------------------------------------------------------------------------------------------


def _trainers(content: Content) -> Trainers:
    """Return the trainers of a Fluid checkpoint; for other content, trainer 0 with its progress."""
    if _was_fluid(content) and (trainers := _source_trainers(content)) is not None:
        return trainers
    state = content.training
    if state == TrainingState():  # then progress may be in keys and scalar tensors
        known = _plain_values(content.tree, _DEEPEST) if content.tree is not None else content.metadata
        scalars = {tensor.path: lazy_scalar(tensor) for tensor in content.tensors if tensor.size == 1}
        state = training_state(known if isinstance(known, dict) else dict(content.metadata), scalars)
    # A counter's file has an integer, so a fraction of an epoch, an infinity or a NaN can't be written.
    counts = {
        name: int(value)
        for name, value in zip(COUNTERS, (state.epoch, state.step), strict=True)
        if value is not None and -_LIMIT < value < _LIMIT and value == int(value)
    }
    return {"0": counts} if counts else {}


def _source_trainers(content: Content) -> Trainers | None:
    """Return the trainers in the metadata, or None if their arguments can't be written as files."""
    trainers = content.metadata.get("trainers", {})
    if not isinstance(trainers, Mapping):
        return None
    for number, arguments in trainers.items():
        if not TRAINER.fullmatch(f"trainer_{number}") or not isinstance(arguments, Mapping):
            return None
        for name, value in arguments.items():
            if not isinstance(name, str) or _name_refusal(name) or name == MARKER:
                return None
            try:
                if isinstance(value, str):
                    is_writable = value == value.strip() and len(value.encode()) <= MAX_ARGUMENT
                else:
                    is_writable = type(value) is int and -_LIMIT < value < _LIMIT
            except UnicodeEncodeError:
                return None
            if not is_writable:
                return None
    return trainers


def _plain_values(node: object, depth: int) -> object:
    """Return a copy of a node's plain values and containers, with None for anything else."""
    if isinstance(node, str | int | float):
        return node
    if isinstance(node, dict) and depth:
        return {key: _plain_values(value, depth - 1) for key, value in node.items() if isinstance(key, str)}
    if isinstance(node, list | tuple) and depth:
        return [_plain_values(value, depth - 1) for value in node]
    return None
