"""What a tensor serves, told from the keys under which it lies."""

from __future__ import annotations

import re

from ckpttool.checkpoint import Path, Role

OPTIMIZER = re.compile(r"optim|(^|_)opt(_|$)|^param_groups$", re.IGNORECASE)
"""Keys of an optimizer's state."""
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


def role_of(path: Path, shape: tuple[int, ...]) -> Role:
    """Return what a tensor serves, from its keys: the outermost that tells decides.

    A moving average of the weights is no second set of them.
    """
    for key in path:
        if not isinstance(key, str):
            continue
        if len(path) > 1 and AVERAGE.search(key):
            return Role.OTHER
        if OPTIMIZER.search(key):
            return Role.OPTIMIZER
        is_module_path = len(path) == 1 and "." in key
        if MACHINERY.search(key) and not is_module_path:
            return Role.TRAINING
        if WHOLE_WEIGHTS.search(key) and len(path) > 1 and not _WHOLE_STATE.search(key):
            return Role.WEIGHTS
        if _TRAINING.search(key) and not is_module_path:
            return Role.TRAINING
        if _WEIGHTS.search(key):
            return Role.WEIGHTS
    is_named = len(path) > 1 and all(isinstance(key, str) for key in path)
    return Role.WEIGHTS if shape and is_named else Role.OTHER
