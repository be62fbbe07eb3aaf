"""Where in its training a checkpoint was saved, as the entry ``ckpttool.content`` carries it.

A format may know that from its own names of variables, from files or from its path, which a target lacks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ckpttool.checkpoint import TrainingState

_NUMBERS = ("epoch", "step", "loss", "learning_rate", "best", "seed")


def carried_training(state: TrainingState) -> dict[str, object]:
    """Return what is known of a training but its hyper-parameters, which the metadata have."""
    told = {name: getattr(state, name) for name in (*_NUMBERS, "saved_at")}
    known: dict[str, object] = {name: value for name, value in told.items() if value is not None}
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
        if name in _NUMBERS:
            is_right = type(value) in (int, float)
        elif name == "metrics":
            is_right = _maps_text(value, (int, float))
        else:
            is_right = (
                _maps_text(value, (str,)) if name == "origin" else name == "saved_at" and type(value) is str
            )
        if not is_right:
            raise ValueError(f"the training state has a strange {name!r:.40}")


def _maps_text(value: object, kinds: tuple[type, ...]) -> bool:
    return isinstance(value, Mapping) and all(
        type(key) is str and type(item) in kinds for key, item in value.items()
    )


def with_training(state: TrainingState, told: Mapping[str, Any]) -> TrainingState:
    """Return a training state in which all that was carried counts, and the rest is as it was."""
    if not told:
        return state
    return replace(state, **{**told, "origin": {**state.origin, **told.get("origin", {})}})
