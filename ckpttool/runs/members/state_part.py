"""What of a checkpoint only a training that goes on needs, told without reading a value."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.tensor import Tensor
from ckpttool.formats.interface import Unit
from ckpttool.runs.members.entry import StatePart
from ckpttool.transaction.files import Contents
from ckpttool.weights.converting.training_state import is_state_tensor


def state_part(unit: Unit, files: Contents, checkpoint: Checkpoint) -> StatePart:
    """Return the part of a checkpoint that holds the state of its training.

    Of a directory these are files; where no file holds it alone, only its size is known.
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
    is_file = len(files.files) == 1  # of a directory, the other tensors keep their types
    floats = [one for one in others if is_file and one.dtype.kind == "float" and one.shares_with is None]
    return StatePart(_nbytes(state), (), sum(one.nbytes - 2 * one.size for one in floats))


def _state_files(
    unit: Unit, files: Contents, directory: str, state: Sequence[Tensor], others: Sequence[Tensor]
) -> dict[str, int]:
    """Return the sizes of the files of a directory that hold all of the state, and nothing else.

    Their paths are relative to it.
    """
    base = os.path.basename(unit.path) + os.sep
    sizes = {one.path.removeprefix(base): one.size for one in files.files if one.path.startswith(base)}
    if not sizes or unit.format is None:
        return {}
    holders, shared = _names_of_files(state, directory), _names_of_files(others, directory)
    names = set(unit.format.state_files(sizes, holders - shared)) - shared
    return {name: size for name, size in sizes.items() if name in names} if holders <= names else {}


def _names_of_files(tensors: Sequence[Tensor], directory: str) -> set[str]:
    """Return the paths of the files that tensors lie in, relative to a directory."""
    places = (tensor.storage or tensor.extent for tensor in tensors)
    return {os.path.relpath(file, directory) for file in {place.file for place in places if place}}


def _nbytes(tensors: Sequence[Tensor]) -> int:
    """Return the bytes that tensors lie in; what several are views of counts once."""
    owned = [tensor for tensor in tensors if tensor.shares_with is None]
    stored = {tensor.storage: tensor.storage.nbytes for tensor in owned if tensor.storage is not None}
    return sum(stored.values()) + sum(tensor.nbytes for tensor in owned if tensor.storage is None)
