"""What a tensor serves, from the whole: what lies in one state dict belongs together."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from ckpttool.roles import WHOLE_WEIGHTS, is_beside_weights, role_below, role_of, role_of_module
from ckpttool.tensor import Path, Role
from ckpttool.training import is_training_scalar
from ckpttool.wire.pickled import Mapped

_OWN = ("weight", "bias")
"""What the tensors of a layer that is a model by itself are called."""

Guess = Callable[[Path, tuple[int, ...]], Role]


def is_of_module(node: dict[Any, Any]) -> bool:
    """Tell whether a dictionary is what ``Module.state_dict`` returns."""
    state = node.state if isinstance(node, Mapped) else None
    return isinstance(state, dict) and isinstance(state.get("_metadata"), dict)


def is_of_optimizer(node: dict[Any, Any]) -> bool:
    """Tell whether a dictionary is what ``Optimizer.state_dict`` returns."""
    return isinstance(node.get("param_groups"), list) and isinstance(node.get("state"), dict)


def guesser(
    shapes: Mapping[Path, tuple[int, ...]],
    rest: object,
    modules: Collection[Path] = (),
    optimizers: Collection[Path] = (),
) -> Guess:
    """Return what guesses a tensor's role from its path and shape, knowing the whole.

    Args:
        shapes: Of all tensors whose roles are to be guessed, by path.
        rest: What else lies in the checkpoint, as plain data.
        modules: As ``Flat.modules``: all tensors in these belong to the model, whatever they are called.
        optimizers: As ``Flat.optimizers``: no tensor below these is a weight.
    """
    if isinstance(rest, dict) and "param_groups" in rest:
        return lambda path, shape: Role.OPTIMIZER
    inside = {path[:-1] for path in shapes}
    whole = {keys: role_of_module(keys) for keys in modules if keys in inside}
    is_bare = not isinstance(rest, dict) or not rest
    if is_bare and () not in whole and all(len(path) <= 1 for path in shapes):
        return _role_in_state_dict
    layers = _layers(shapes)
    of_optimizers = {
        around for around in inside if any(around[:count] in optimizers for count in range(len(around) + 1))
    }

    def guess(path: Path, shape: tuple[int, ...]) -> Role:
        if path and path[:-1] in of_optimizers:
            return Role.OPTIMIZER
        around = path[:-1]
        if path and around in whole:
            return whole[around]
        own = layers.get(around)
        return role_of(path, shape) if own is None else _role_among(path, shape, own)

    return guess


def _role_in_state_dict(path: Path, shape: tuple[int, ...]) -> Role:
    return Role.TRAINING if path and shape == () and is_training_scalar(path[0]) else Role.WEIGHTS


def _layers(shapes: Mapping[Path, tuple[int, ...]]) -> dict[Path, set[str]]:
    """Return the places at which plain dictionaries hold the weights of modules, with the modules' names.

    Only where no key around them tells what they serve.
    """
    found: dict[Path, set[str]] = {}
    for path, shape in shapes.items():
        key = path[-1] if path else None
        if not isinstance(key, str) or ("." not in key and key not in _OWN):
            continue
        if role_of((key,), shape) is Role.WEIGHTS:
            found.setdefault(path[:-1], set()).add(key.partition(".")[0])
    return {keys: names for keys, names in found.items() if role_below(keys) is None}


def _role_among(path: Path, shape: tuple[int, ...], layers: Collection[str]) -> Role:
    """Return what a tensor serves that lies among the weights of modules."""
    key = path[-1]
    if not isinstance(key, str):
        return role_of(path, shape)
    told = role_of((key,), shape)
    if told in (Role.WEIGHTS, Role.OPTIMIZER):
        return told
    first, dot, _ = key.partition(".")
    if first in layers:
        return Role.WEIGHTS
    if any(WHOLE_WEIGHTS.search(name) for name in layers) or is_beside_weights(first):
        return role_of(path, shape)
    if not dot and shape == () and is_training_scalar(key):
        return Role.TRAINING
    return Role.WEIGHTS
