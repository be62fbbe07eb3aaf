"""The options of ``verify --predict``, as the command line gives them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ckpttool.core.errors import UsageError
from ckpttool.core.options import PREDICTION_PANEL, option, options_of
from ckpttool.predict.request import PredictionRequest, parse_input


def predict_option() -> Any:
    return option(
        "--predict",
        help="Load and run each checkpoint with its framework, in a process of its own.",
        panel=PREDICTION_PANEL,
        default=False,
    )


def read_predict_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes of a ``PredictionRequest`` that the command line gave, in their order.

    Raises:
        UsageError: A value is none that its option can have.
    """
    return {
        name: _READ[name](given[name]) if name in _READ else given[name]
        for name in options_of(PredictionRequest)
        if name in given
    }


_IMPLYING = (
    "model",
    "optimizer",
    "input",
    "input_shapes",
    "signature",
    "record",
    "expect",
    "labels",
    "resume_step",
)
"""Attributes that nobody gives who wants no prediction."""


def implies_prediction(options: Mapping[str, Any]) -> bool:
    """Tell whether what was given asks for a prediction, though ``--predict`` was not."""
    return any(name in _IMPLYING for name in options)


def flag_of(name: str) -> str:
    """Return the option that gives an attribute of a ``PredictionRequest``."""
    return options_of(PredictionRequest)[name].flags[0]


def _object(text: str) -> dict[str, Any]:
    import json

    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as failure:
        raise UsageError(f"no JSON: {text!r:.80} ({failure})") from failure
    if not isinstance(value, dict):
        raise UsageError(f'{text!r:.80} is no JSON object (like {{"depth": 18}})')
    return value


def _shapes(texts: Sequence[str]) -> tuple[Any, ...]:
    return tuple(map(parse_input, texts))


def _bytes(text: str) -> int:
    from ckpttool.cli.config import WrongValue, parse_bytes

    try:
        return int(parse_bytes(text, "--memory"))
    except WrongValue as failure:
        raise UsageError(str(failure)) from failure


_READ: Mapping[str, Callable[[Any], Any]] = {
    "model_args": _object,
    "optimizer_args": _object,
    "input_shapes": _shapes,
    "memory": _bytes,
}
"""What reads those whose text is not the value yet."""
