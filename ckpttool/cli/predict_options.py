"""The options of ``verify --predict``, as the command line gives them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpttool.core.options import PREDICTION_PANEL, option, options_of
from ckpttool.predict.request import PredictionRequest


def predict_option() -> Any:
    return option(
        "--predict",
        help="Load and run each checkpoint with its framework, in a process of its own.",
        panel=PREDICTION_PANEL,
        default=False,
    )


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
