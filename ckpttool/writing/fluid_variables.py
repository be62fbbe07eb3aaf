"""The files of a Fluid checkpoint's variables: where each lies, and which names can't be files."""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ckpttool.errors import CheckpointError
from ckpttool.formats.paddle.fluid_native import LEVELS, heights_of
from ckpttool.formats.paddle.fluid_parts import MARKER, MAX_SLASHES, MODEL, TABLES, unlike_parameters
from ckpttool.formats.paddle.fluid_tables import SHARD
from ckpttool.tensor import Path, Tensor
from ckpttool.wire.lodtensor import MAX_AXES, lod_bytes, read_lod_tensor
from ckpttool.wire.lodtensor_writing import NO_LEVELS, NUMBERS, lod_tensor_header
from ckpttool.wire.source import Buffer
from ckpttool.writing.content import Content

_MAX_NAME = 255
"""The most bytes of a file's name, on every file system in use."""
_SKIPPED = ("@GRAD", ".trainer_", ".block")
"""What a variable has in its name that Paddle neither saves nor loads."""


class Variable(NamedTuple):
    """A variable on its way to its file.

    Attributes:
        directory: Which of the serial's it lies in.
        name: As Paddle calls it.
        values: Its elements.
        rows: The numbers of the rows that they are, of a SelectedRows.
        height: How many rows there are in all.
        levels: The sequences of a LoDTensor, as they are stored.
    """

    directory: str
    name: str
    values: Tensor
    rows: Tensor | None = None
    height: int = 0
    levels: bytes = NO_LEVELS

    @property
    def place(self) -> str:
        """Return the path of its file in the serial."""
        return f"{self.directory}/{self.name}"

    @property
    def apart(self) -> tuple[Tensor, ...]:
        """Return the tensors whose paths a reader tells from their place: of SelectedRows, and of tables."""
        if self.rows is not None:
            return self.values, self.rows
        return (self.values,) if self.directory == TABLES[0] else ()


def variables(content: Content) -> Iterator[Variable]:
    """Yield the variables that the tensors of some content become; rows and their values are one."""
    sparse = dict(_sparse(content))
    of_rows = {rows.path for rows, _ in sparse.values()}
    for tensor in content.owned:
        if tensor.path in of_rows:
            continue
        if tensor.path in sparse:
            rows, height = sparse[tensor.path]
            yield Variable(*_place(tensor.path[:-1]), tensor, rows, height)
        elif tensor.path[:1] == (TABLES[0],) and tensor.path[2:] == ("values",):
            yield Variable(*_place(tensor.path[:-1]), tensor)
        else:
            levels = content.native.get(LEVELS + tensor.name, NO_LEVELS)
            yield Variable(MODEL, tensor.name, tensor, levels=levels)


def _sparse(content: Content) -> Iterator[tuple[Path, tuple[Tensor, int]]]:
    """Yield the rows and the height of each SelectedRows in the content, by the path of its values."""
    heights = heights_of(content.native)
    by_path = {tensor.path: tensor for tensor in content.owned} if heights else {}
    for path, values in by_path.items():
        rows, stem = by_path.get((*path[:-1], "rows")), path[:-1]
        height = heights.get(".".join(map(str, stem)))
        if path[-1:] != ("values",) or not stem or rows is None or height is None:
            continue
        is_of_rows = rows.dtype.name == "int64" and len(rows.shape) == 1
        if is_of_rows and values.shape and values.shape[0] >= rows.size:
            yield path, (rows, height)


def _place(stem: Path) -> tuple[str, str]:
    """Return the directory and the name of what lies at a path; shards of lookup tables have their own."""
    name = ".".join(map(str, stem[1:]))
    if stem[0] == TABLES[0] and SHARD.fullmatch(name):
        return TABLES[0], name
    return MODEL, ".".join(map(str, stem))


def refusals(wanted: Iterable[Variable], *, slashes: bool) -> Iterator[str]:
    """Yield why variables can't be files, a sentence each.

    Args:
        wanted: The variables.
        slashes: Whether a name may have them: what stands before one is a directory then, as Paddle does it.
    """
    seen: dict[str, Variable] = {}
    directories: dict[str, Variable] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for one in wanted:
        parts = one.name.split("/") if slashes else [one.name]
        if why := next(filter(None, map(name_refusal, parts)), None) or _skipped(one):
            yield f"{one.values.name}: {why} (use --map)"
            continue
        place = _folded(one.place)
        if (other := seen.setdefault(place, one)) is not one:
            yield f"{one.values.name}: some file systems take its name for that of {other.name} (use --map)"
        for count in range(1, len(parts)):
            directories[_folded(f"{one.directory}/{'/'.join(parts[:count])}")] = one
        if not _are_levels(one):
            yield f"{one.values.name}: what is told of its sequences is nothing that Paddle reads"
        if one.directory == MODEL and one.rows is None:
            shapes[one.name] = one.values.shape
    for place in seen.keys() & directories.keys():
        yield f"{seen[place].values.name}: a file, and for {directories[place].name} a directory (use --map)"
    for name, parameter in unlike_parameters(shapes):
        yield (
            f"{name}: its name says that it belongs to {parameter}'s optimizer, and its shape "
            f"{list(shapes[name])} is not {list(shapes[parameter])} (use --map)"
        )


def _are_levels(variable: Variable) -> bool:
    """Tell whether the sequences of a variable are read again as they were told."""
    values, levels = variable.values, variable.levels
    if levels == NO_LEVELS or values.dtype.name not in NUMBERS:
        return True
    header = Buffer("", lod_tensor_header(values.dtype, values.shape, levels))
    try:
        found = read_lod_tensor(header)
        return found.offset == header.size and lod_bytes(header, found) == levels
    except CheckpointError:
        return False


def name_refusal(name: str) -> str | None:
    """Return why nothing can be a file of this name, or None."""
    try:
        nbytes = len(os.fsencode(name))
    except UnicodeEncodeError:
        return "a Fluid variable is a file, and its name is no valid text"
    for letter, told in (("/", "'/'"), ("\0", "NUL")):
        if letter in name:
            return f"a Fluid variable is a file, and its name can't have {told}"
    if not name:
        return "a Fluid variable is a file, and needs a name"
    if nbytes > _MAX_NAME:
        return f"a Fluid variable is a file, and its name has {nbytes:,} bytes (at most {_MAX_NAME})"
    return "a file of this name is hidden, and no variable" if name.startswith(".") else None


def _skipped(variable: Variable) -> str | None:
    """Return why Paddle, or a reader, would pass a variable over; None where none does."""
    if variable.name == MARKER:
        return "Paddle has its marker under this name"
    if variable.name.count("/") > MAX_SLASHES:
        return f"its name has more than {MAX_SLASHES} slashes"
    if len(variable.values.shape) > MAX_AXES:
        return f"{len(variable.values.shape)} axes, and at most {MAX_AXES} are read"
    found = next((part for part in _SKIPPED if part in variable.name), None)
    return f"Paddle neither saves nor loads a variable with {found!r} in its name" if found else None


def _folded(place: str) -> str:
    """Return what is equal of names that are one to a file system that ignores case."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", place).casefold())
