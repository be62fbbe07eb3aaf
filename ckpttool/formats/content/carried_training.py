"""Where in its training a checkpoint was saved, as the entry ``ckpttool.content`` carries it.

A format may know that from its own names of variables, from files or from its path, which a target lacks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeGuard

from ckpttool.checkpoint import TrainingState

_COUNTS = ("epoch", "step")
_NUMBERS = (*_COUNTS, "loss", "learning_rate", "best", "seed")
_MOST = 1 << 63
"""Above any count of epochs or steps; NaN and the infinities are none."""
_MOST_BITS = 1024
"""The longest integer that may stand for a float; a seed may be longer than 64 bits."""


def carried_training(state: TrainingState) -> dict[str, object]:
    """Return what is known of a training but its hyper-parameters, which the metadata have."""
    told = {name: getattr(state, name) for name in (*_NUMBERS, "saved_at")}
    known: dict[str, object] = {name: value for name, value in told.items() if _is_right(name, value)}
    if state.metrics:
        known["metrics"] = dict(state.metrics)
    if known:
        known["origin"] = dict(state.origin)
    return known


def check_training(told: object) -> None:
    """Require what ``carried_training`` returns.

    Raises:
        ValueError: It is anything else.
    """
    if not isinstance(told, dict):
        raise ValueError("the training state is no dictionary")
    for name, value in told.items():
        if not _is_right(name, value):
            raise ValueError(f"the training state has a strange {name!r:.40}")


def _is_right(name: object, value: object) -> bool:
    """Tell whether a field of a training state can have a value; a loss that is NaN is one."""
    if name in _NUMBERS:
        return _is_number(value) and (name not in _COUNTS or -_MOST < value < _MOST)
    if name == "metrics":
        return _maps_text(value, _is_number)
    if name == "origin":
        return _maps_text(value, lambda item: type(item) is str)
    return name == "saved_at" and type(value) is str


def _is_number(value: object) -> TypeGuard[float]:
    return type(value) is float or (type(value) is int and value.bit_length() <= _MOST_BITS)


def _maps_text(value: object, is_right: Callable[[object], bool]) -> bool:
    return isinstance(value, Mapping) and all(
        type(key) is str and is_right(item) for key, item in value.items()
    )


def with_training(state: TrainingState, told: Mapping[str, Any]) -> TrainingState:
    """Return a training state in which all that was carried counts, and the rest is as it was."""
    if not told:
        return state
    return replace(state, **{**told, "origin": {**state.origin, **told.get("origin", {})}})
