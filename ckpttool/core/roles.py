"""What a tensor serves, told from the keys under which it lies."""

from __future__ import annotations

import re

from ckpttool.core.tensor import Path, Role

OPTIMIZER = re.compile(r"optim|(^|_)opt(_|$)|^param_groups$", re.IGNORECASE)
"""Keys of an optimizer's state."""
FLAT_OPTIMIZER = re.compile(
    r"(chained_\d+\.)?optimizer\."
    r"(state\.[^.]+\.(?P<weight>.+)|param_(groups|state)|distributed\.dp_group_idx_\d)"
)
"""How the flat keys of optimizer states begin in a distributed checkpoint of Megatron's.

A model may have a module ``optimizer``, too: what follows makes it a state.

Source: NVIDIA/Megatron-LM ``megatron/core/optimizer/distrib_optimizer.py``, ``optimizer.py``
(``ChainedOptimizer.sharded_state_dict``).
"""
MACHINERY = re.compile(
    r"sched|scaler|^amp|rng|random|callback|^loops$|history|sampler|early_stop", re.IGNORECASE
)
"""Keys of what makes the training go, and is neither model nor optimizer."""
WHOLE_WEIGHTS = re.compile(
    r"(^|_)(model|net|network|weights|params|(model_)?state|state_dict)$", re.IGNORECASE
)
"""Keys under which all that a model has lies."""
_WHOLE_STATE = re.compile(r"^(train|trainer|training|extra)_state$", re.IGNORECASE)
_TRAINING = re.compile(
    r"loss|metric|epoch|(^|_)step|iter|(^|_)best|accuracy|(^|_)acc$|(^|_)lr$|learning_rate|seed|score",
    re.IGNORECASE,
)
_WEIGHTS = re.compile(
    r"model|state_dict|net|module|param|weight|encoder|decoder|generator|discriminator|backbone|"
    r"teacher|student|critic|actor|policy|head|bias|running_",
    re.IGNORECASE,
)
AVERAGE = re.compile(r"(^|_)(ema|swa|shadow|averaged)(_|$)", re.IGNORECASE)
"""Keys of a moving average of the weights."""


_MEASURED = re.compile(
    r"loss|metric|epoch|(^|_)best|accuracy|(^|_)acc$|(^|_)lr$|learning_rate|seed|score", re.IGNORECASE
)
_OF_LOSSES = re.compile(r"loss|metric", re.IGNORECASE)
MOST_READ = 512
"""Characters of a key that are searched for words: the search takes a microsecond for each."""


def role_of(path: Path, shape: tuple[int, ...]) -> Role:
    """Return what a tensor serves, from its keys: the outermost that tells decides.

    A moving average of the weights is no second set of them.
    """
    role = role_below(path) if len(path) > 1 else _role_at_top(path)
    if role is not None:
        return role
    is_named = len(path) > 1 and all(isinstance(key, str) for key in path)
    return Role.WEIGHTS if shape and is_named else Role.OTHER


def role_below(keys: Path) -> Role | None:
    """Return what all serves that lies below some keys, or None where none of them tells."""
    for key in keys:
        if not isinstance(key, str):
            continue
        key = key[:MOST_READ]
        if AVERAGE.search(key):
            return Role.OTHER
        if OPTIMIZER.search(key):
            return Role.OPTIMIZER
        if MACHINERY.search(key):
            return Role.TRAINING
        if WHOLE_WEIGHTS.search(key) and not _WHOLE_STATE.search(key):
            return Role.WEIGHTS
        if _TRAINING.search(key):
            return Role.TRAINING
        if _WEIGHTS.search(key):
            return Role.WEIGHTS
    return None


def role_of_module(keys: Path) -> Role:
    """Return what the state dict of a module serves, from the keys under which it lies."""
    for key in keys:
        if not isinstance(key, str):
            continue
        key = key[:MOST_READ]
        if AVERAGE.search(key):
            return Role.OTHER
        if OPTIMIZER.search(key):
            return Role.OPTIMIZER
        if MACHINERY.search(key) or _OF_LOSSES.search(key):
            return Role.TRAINING
        if WHOLE_WEIGHTS.search(key):
            break
    return Role.WEIGHTS


def is_beside_weights(key: str) -> bool:
    """Tell whether a key among those of a model's tensors is that of something else."""
    return any(keys.search(key) for keys in (OPTIMIZER, MACHINERY, _MEASURED, _WHOLE_STATE))


def _role_at_top(path: Path) -> Role | None:
    key = path[0] if path else None
    if not isinstance(key, str):
        return None
    key = key[:MOST_READ]
    if OPTIMIZER.search(key):
        return Role.OPTIMIZER
    if (MACHINERY.search(key) or _TRAINING.search(key)) and "." not in key:
        return Role.TRAINING
    return Role.WEIGHTS if _WEIGHTS.search(key) else None
