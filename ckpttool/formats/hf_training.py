"""What a Trainer's directory says of its training: ``trainer_state.json``, arguments, and its name.

Source: huggingface/transformers ``trainer_callback.py`` (``TrainerState``), ``trainer.py`` (``log``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from ckpttool.checkpoint import TrainingState

STATE = "trainer_state.json"
ARGUMENTS = "training_args.bin"
NUMBERED = re.compile(r"checkpoint-(\d{1,18})")

_DURATION = re.compile(r"eval_(\w+_)?(runtime|model_preparation_time|\w+_per_second)")


def training_of(state: Mapping[str, Any], arguments: Mapping[str, Any], name: str) -> TrainingState:
    """Return the training state that Trainer recorded; of what it logs, the last value of each kind.

    Metrics are those of this very step: an evaluation before it was one of other weights.

    Args:
        state: The content of ``trainer_state.json``.
        arguments: The plain data of ``training_args.bin``.
        name: The name of the directory.
    """
    logged: dict[str, Any] = {}
    logged_here: dict[str, Any] = {}
    numbered = NUMBERED.fullmatch(name)
    named = int(numbered[1]) if numbered else None
    step = _integer(state.get("global_step"))
    for entry in _logged(state.get("log_history")):
        logged.update(entry)
        if _integer(entry.get("step")) == (named if step is None else step):
            logged_here.update(entry)
    is_loss_earlier = "loss" in logged and "loss" not in logged_here
    found: dict[str, tuple[Any, str]] = {
        "epoch": (_number(state.get("epoch")), f"{STATE} epoch"),
        "step": (step, f"{STATE} global_step"),
        "loss": (
            _number(logged.get("loss")),
            f"{STATE} log_history loss{' of an earlier step' * is_loss_earlier}",
        ),
        "learning_rate": (_number(logged.get("learning_rate")), f"{STATE} log_history learning_rate"),
        "best": (_number(state.get("best_metric")), f"{STATE} best_metric"),
        "seed": (_integer(arguments.get("seed")), f"{ARGUMENTS} seed"),
    }
    if step is None:
        found["step"] = (named, f"name {name}")
    hyper_parameters = {key: value for key, value in arguments.items() if key != "<class>"}
    if hyper_parameters:
        found["hyper_parameters"] = (hyper_parameters, ARGUMENTS)
    metrics = {
        key: number
        for key, value in logged_here.items()
        if _is_metric(key) and (number := _number(value)) is not None
    }
    origin = {field: where for field, (value, where) in found.items() if value is not None}
    origin |= {f"metrics.{key}": f"{STATE} log_history {key}" for key in metrics}
    return TrainingState(metrics=metrics, origin=origin, **{field: found[field][0] for field in found})


def _logged(history: object) -> Iterator[Mapping[str, Any]]:
    yield from (entry for entry in (history if isinstance(history, list) else ()) if isinstance(entry, dict))


def _is_metric(key: str) -> bool:
    return key.startswith("eval_") and _DURATION.fullmatch(key) is None


def _number(value: object) -> float | int | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _integer(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
