"""What a TensorFlow checkpoint tells of its training: counters among its tensors, and its prefix."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from ckpttool.checkpoint import TrainingState
from ckpttool.formats.content.scalars import lazy_scalar
from ckpttool.tensor import Path, Role, Tensor
from ckpttool.training import Scalar, training_state

_NUMBERED = re.compile(r".*-(\d{1,18})")
_RATES = frozenset({"learning_rate", "_learning_rate", "lr"})


def training_of(tensors: tuple[Tensor, ...], name: str) -> TrainingState:
    """Return the training state: counters that the user saved, else the number that the prefix ends with.

    What counts saves is the last resort: it is the step only where each step was saved.
    """
    scalars: dict[Path, Scalar] = {}
    counter: Tensor | None = None
    for tensor in tensors:
        if tensor.size != 1 or tensor.values is None:
            continue
        if tensor.role is Role.OPTIMIZER and tensor.path[-1] in _RATES:
            scalars.setdefault(("learning_rate",), lazy_scalar(tensor))
        elif tensor.path == ("save_counter",):
            counter = tensor
        elif tensor.role in (Role.TRAINING, Role.OTHER) and len(tensor.path) == 1:
            scalars[tensor.path] = lazy_scalar(tensor)
    found = training_state({}, scalars, name)
    return found if found.step is not None else _counted(found, counter, name)


def _counted(found: TrainingState, counter: Tensor | None, name: str) -> TrainingState:
    match = _NUMBERED.fullmatch(name)
    origin: Mapping[str, str]
    if match is not None:
        return replace(found, step=int(match[1]), origin={**found.origin, "step": f"prefix {name}"})
    saves = lazy_scalar(counter)() if counter is not None else None
    if not isinstance(saves, int):
        return found
    origin = {**found.origin, "step": "tensor save_counter"}
    return replace(found, step=saves, origin=origin)
