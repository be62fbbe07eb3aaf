"""What of a checkpoint only a training that goes on needs, told without reading a value."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.tensor import Tensor
from ckpttool.formats.hf_trainer import HfTrainer, is_resume_file
from ckpttool.formats.interface import Unit
from ckpttool.formats.step_directory import StepDirectory
from ckpttool.runs.members.entry import StatePart
from ckpttool.transaction.files import Contents
from ckpttool.weights.converting.training_state import is_state_tensor

_STATE_FILE = re.compile(
    r"(\w+_)?(optim|optimizer|opt|rng)(_?states?)?([-_.]\w*\d+)?\.(pt|pth|bin|pkl|safetensors)"
)
"""Files of optimizers and random states in a save's directory, also those of ranks."""


def state_part(unit: Unit, files: Contents, checkpoint: Checkpoint) -> StatePart:
    """Return the part of a checkpoint that holds the state of its training.

    Of a directory these are files; where no file holds it alone, only its size is known.
    """
    state = [tensor for tensor in checkpoint.tensors if is_state_tensor(tensor)]
    names = tuple(_state_files(unit, files, checkpoint))
    places = {os.path.join(checkpoint.path, name) for name in names}
    if not all(_file_of(one) in places for one in state if one.storage or one.extent):
        names = ()  # some lies in files with something else
    if not names and not state:
        return StatePart()
    sizes = {file.path: file.size for file in files.files}
    base = os.path.basename(unit.path)
    nbytes = sum(sizes[os.path.join(base, name)] for name in names) if names else _nbytes(state)
    others = (one for one in checkpoint.tensors if not is_state_tensor(one) and one.shares_with is None)
    floats = [one for one in others if one.dtype.kind == "float"]
    return StatePart(nbytes, names, 0 if names else sum(one.nbytes - 2 * one.size for one in floats))


def _state_files(unit: Unit, files: Contents, checkpoint: Checkpoint) -> Iterator[str]:
    """Yield the files of a directory that hold nothing but state, relative to it."""
    base = os.path.basename(unit.path)
    names = [os.path.relpath(file.path, base) for file in files.files if file.path.startswith(base + os.sep)]
    if isinstance(unit.format, HfTrainer):
        yield from filter(is_resume_file, names)
    elif isinstance(unit.format, StepDirectory):
        states = {_file_of(one) for one in checkpoint.tensors if is_state_tensor(one)}
        others = {_file_of(one) for one in checkpoint.tensors if not is_state_tensor(one)}
        for name in names:
            is_named = _STATE_FILE.fullmatch(os.path.basename(name)) is not None
            if is_named and os.path.join(checkpoint.path, name) in states - others:
                yield name


def _file_of(tensor: Tensor) -> str | None:
    place = tensor.storage or tensor.extent
    return None if place is None else place.file


def _nbytes(tensors: list[Tensor]) -> int:
    """Return the bytes that tensors lie in; what several are views of counts once."""
    owned = [tensor for tensor in tensors if tensor.shares_with is None]
    stored = {tensor.storage: tensor.storage.nbytes for tensor in owned if tensor.storage is not None}
    return sum(stored.values()) + sum(tensor.nbytes for tensor in owned if tensor.storage is None)
