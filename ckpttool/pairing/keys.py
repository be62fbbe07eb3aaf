"""What a tensor is called without conventions: what wraps a model, and frameworks' own words."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

from ckpttool.pairing.families import family_of
from ckpttool.pairing.layers import Steps, steps_of
from ckpttool.tensor import Path, Role, Tensor

INSIDE = {
    "_orig_mod",
    "_fsdp_wrapped_module",
    "_checkpoint_wrapped_module",
    "_forward_module",
    "_functional",
}
"""Steps that a wrapper adds wherever it is put; no module has such a name otherwise."""
_IN_FRONT = re.compile(
    r"_?(module|model|net|network)|(model_|module_|net_)?state(_dict)?|params|weights|variables|model_weights"
    r"|(sequential|functional|model)(_\d+)?"
)
"""Steps that stand in front of all that a model has."""
_OPTIMIZER = re.compile(r"(\w*_)?(optim|optimizer|opt)(izer)?s?(_states?|_state_dict|_weights)?")

LEAVES = {
    "kernel": "weight",
    "gamma": "weight",
    "embeddings": "weight",
    "w_0": "weight",
    "beta": "bias",
    "b_0": "bias",
    "moving_mean": "running_mean",
    "moving_variance": "running_var",
    "_mean": "running_mean",
    "_variance": "running_var",
    "_kernel": "weight",
    "_embeddings": "weight",
}
"""What PyTorch calls a variable, by what others do."""
_RECURRENT = re.compile(r"((?:weight|bias)(?:_ih|_hh)?)_l0((?:_reverse)?)")


class Key(NamedTuple):
    """What a tensor is called, and what was left out in front of it."""

    steps: Steps
    front: str


@lru_cache(maxsize=1 << 12)
def leaf_of(name: str) -> str:
    """Return what PyTorch calls the variable that a name ends with."""
    found = _RECURRENT.fullmatch(name)
    return found[1] + found[2] if found else LEAVES.get(name, name)


def spelled(tensor: Tensor) -> Steps:
    """Return a tensor's name in PyTorch's words, with all that stands in front of it."""
    return _spelled(tensor.path)


@lru_cache(maxsize=1 << 17)
def _spelled(path: Path) -> Steps:
    steps = steps_of(path)
    return (*steps[:-1], leaf_of(steps[-1])) if steps else steps


def bare(tensor: Tensor) -> Key:
    """Return a tensor's name in PyTorch's words, without what wraps the model or the optimizer."""
    return _bare(tensor.path, tensor.role is Role.OPTIMIZER)


@lru_cache(maxsize=1 << 17)
def _bare(path: Path, is_optimizer: bool) -> Key:
    steps = _spelled(path)
    wrapper = _OPTIMIZER if is_optimizer else _IN_FRONT
    inner = tuple(step for step in steps[:-1] if step not in INSIDE)
    at = 0
    while at < len(inner) and wrapper.fullmatch(inner[at]):
        at += 1
    front = [*inner[:at], *(step for step in steps[:-1] if step in INSIDE)]
    return Key((*inner[at:], *steps[-1:]), "".join(f"{step}." for step in front))


def is_bookkeeping(tensor: Tensor, format: str, *, across: bool) -> bool:
    """Tell whether only the framework that wrote a tensor needs it: by its name, and by what it can hold.

    Args:
        tensor: One that the other side hasn't got.
        format: Of the checkpoint that has it.
        across: Whether the other side is another framework's.
    """
    steps = steps_of(tensor.path)
    if not steps or tensor.size > _SEED_SIZE:
        return False
    family, is_whole = family_of(format), tensor.dtype.kind == "integer"
    if steps[-1] == "num_batches_tracked":
        return family == "torch" and is_whole and not tensor.shape
    if steps[-1] == "save_counter":
        return format in _SAVERS and is_whole and not tensor.shape
    if any(_SEED.fullmatch(step) for step in steps[:-1]):
        return steps[-1] in _SEEDED and is_whole and (family == "keras" or format in _CONTAINERS)
    if steps[:2] == ("keras_api", "metrics"):
        return format in _SAVERS and tensor.role is Role.OTHER and not tensor.shape
    is_count = tensor.role is Role.OPTIMIZER and tensor.size == 1 and _COUNT.search(steps[-1]) is not None
    return across and is_count


_SAVERS = ("tensorflow", "savedmodel")
_CONTAINERS = ("hdf5", "numpy")
"""Formats in which weights of Keras are kept, too."""
_SEED = re.compile(r"_?seed_generator(_\d+)?")
_SEEDED = {"seed_generator_state", "_state", "state", "0"}
"""What Keras calls the state of a layer's random numbers."""
_SEED_SIZE = 2
_COUNT = re.compile(r"^_?(iter|iterations?|step)$|beta_?[12]_pow")
