"""What a checkpoint says of its training, in the same words whatever keys it used.

Epoch, step, loss, learning rate and the rest are looked for under the names that people and libraries give
them; each answer says where it came from. The file's name is asked last.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ckpttool.checkpoint import TrainingState
from ckpttool.measured import Scalar as Scalar
from ckpttool.measured import lightning_scores, measured
from ckpttool.naming import parse_name
from ckpttool.roles import AVERAGE, MACHINERY, OPTIMIZER
from ckpttool.tensor import Path

_EPOCH = ("epoch", "current_epoch", "epoch_id", "epochs_done", "last_epoch")
_STEP = (
    "global_step",
    "step",
    "iteration",
    "iter",
    "global_steps",
    "num_updates",
    "current_step",
    "train_step",
    "step_id",
    "iterations",
    "n_iter",
    "it",
    "iter_num",
    "num_timesteps",
    "num_iterations",
    "total_steps_done",
)
_LOSS = ("loss", "train_loss", "training_loss", "last_loss", "epoch_loss", "losses")
_OTHER_LOSSES = ("val_loss", "valid_loss", "validation_loss", "eval_loss", "test_loss", "best_loss")
_RATE = ("learning_rate", "lr", "current_lr", "lr0")
_SEED = ("seed", "random_seed", "manual_seed")
_WHEN = ("saved_at", "created_at", "timestamp", "date", "datetime", "time", "date_saved")
_HYPER = ("hyper_parameters", "hparams", "hyperparameters", "args", "train_args", "config", "cfg", "opt")
_NESTED = (
    "training",
    "train_state",
    "trainer_state",
    "trainer",
    "extra_state",
    "train_iterator",
    "state",
    "app",
    "meta",
    "metadata",
    "info",
    "extra",
)


@dataclass(slots=True)
class _Gathered:
    """Answers as they are found; the first for each field stays."""

    answers: dict[str, Any] = field(default_factory=dict)
    origin: dict[str, str] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)

    def give(self, name: str, value: object, origin: str) -> None:
        if value is not None and name not in self.answers:
            self.answers[name] = value
            self.origin[name] = origin


def training_state(
    metadata: Mapping[str, Any], scalars: Mapping[Path, Scalar] | None = None, name: str = ""
) -> TrainingState:
    """Return the training state of a checkpoint.

    Args:
        metadata: The checkpoint's plain data.
        scalars: Readers of its scalar tensors, by path.
        name: The name of its file or directory.
    """
    found = _Gathered()
    scalars = scalars or {}
    for prefix, level in _levels(metadata, scalars):
        _from_keys(found, prefix, level, scalars)
    _from_lightning(found, metadata, scalars, name)
    _from_param_groups(found, metadata)
    _from_settings(found)
    _from_only_step(found, scalars)
    _from_name(found, name)
    _from_other_losses(found)
    return TrainingState(metrics=found.metrics, origin=found.origin, **found.answers)


def _levels(
    metadata: Mapping[str, Any], scalars: Mapping[Path, Scalar]
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the mappings in which training values are looked for, the outermost first.

    One that holds nothing but tensors has no plain data, and is empty.
    """
    places = {".".join(map(str, path)) for path in scalars}
    yield "", metadata
    for prefix, level in (("", metadata), *_nested("", metadata, places)):
        yield from _nested(prefix, level, places)


def _nested(
    prefix: str, level: Mapping[str, Any], places: Collection[str]
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for key in _NESTED:
        inner, below = level.get(key), f"{prefix}{key}."
        if isinstance(inner, Mapping):
            if "param_groups" not in inner:
                yield below, inner
        elif any(place.startswith(below) for place in places):
            yield below, {}


def _from_keys(
    found: _Gathered, prefix: str, level: Mapping[str, Any], scalars: Mapping[Path, Scalar]
) -> None:
    tensors = {
        ".".join(map(str, path)): read for path, read in scalars.items() if len(path) == prefix.count(".") + 1
    }

    def first(names: tuple[str, ...]) -> Iterator[tuple[str, object]]:
        for name in names:
            key = prefix + name
            if name in level:
                yield f"key {key}", level[name]
            elif key in tensors:
                yield f"tensor {key}", tensors[key]()

    for origin, value in first(_EPOCH):
        found.give("epoch", _counted(_number(value)), origin)
    for origin, value in first(_STEP):
        found.give("step", _counted(_integer(value)), origin)
    for origin, value in first(_LOSS):
        if isinstance(value, list) and value:
            value, origin = value[-1], f"{origin}[-1]"
        found.give("loss", _number(value), origin)
    for origin, value in first(_RATE):
        found.give("learning_rate", _number(value), origin)
    for origin, value in first(_SEED):
        found.give("seed", _integer(value), origin)
    for origin, value in first(_WHEN):
        found.give("saved_at", value if isinstance(value, str) else None, origin)
    _hyper_parameters(found, prefix, level)
    _metrics(found, prefix, level, scalars)


def _hyper_parameters(found: _Gathered, prefix: str, level: Mapping[str, Any]) -> None:
    for name in _HYPER:
        value = level.get(name)
        if isinstance(value, Mapping) and value:
            told = {key: item for key, item in value.items() if key != "<class>"}
            found.give("hyper_parameters", told, f"key {prefix}{name}")
            for seed in _SEED:
                found.give("seed", _integer(value.get(seed)), f"key {prefix}{name}.{seed}")


def _metrics(found: _Gathered, prefix: str, level: Mapping[str, Any], scalars: Mapping[Path, Scalar]) -> None:
    for name, value, origin in measured(prefix, level, scalars):
        number = _number(value)
        if number is None or name in _LOSS:
            continue
        found.metrics.setdefault(name, number)
        found.origin.setdefault(f"metrics.{name}", origin)
        if name.startswith("best"):
            found.give("best", number, origin)


def _from_lightning(
    found: _Gathered, metadata: Mapping[str, Any], scalars: Mapping[Path, Scalar], name: str
) -> None:
    """Take what Lightning's ModelCheckpoint callbacks remember."""
    callbacks, origin = metadata.get("callbacks"), "callback ModelCheckpoint"
    for key, state in callbacks.items() if isinstance(callbacks, Mapping) else ():
        best = scalars.get(("callbacks", key, "best_model_score"))
        if best is not None and isinstance(state, Mapping) and "best_model_path" in state:
            found.give("best", _number(best()), origin)
    place = found.answers.get("epoch"), found.answers.get("step")
    for monitor, score in lightning_scores(callbacks, scalars, name, *place):
        if (number := _number(score)) is not None:
            found.metrics.setdefault(monitor, number)
            found.origin.setdefault(f"metrics.{monitor}", origin)


def _from_param_groups(found: _Gathered, metadata: Mapping[str, Any]) -> None:
    """Take the learning rate of the first parameter group of the first optimizer."""
    for key, value in [("", metadata), *metadata.items()]:
        if key and not OPTIMIZER.search(str(key)):
            continue
        optimizers = value if isinstance(value, list) else [value]
        for index, optimizer in enumerate(optimizers):
            groups = optimizer.get("param_groups") if isinstance(optimizer, Mapping) else None
            if isinstance(groups, list) and groups and isinstance(groups[0], Mapping):
                place = f"{key}.{index}" if isinstance(value, list) else key
                found.give(
                    "learning_rate",
                    _number(groups[0].get("lr")),
                    f"key {f'{place}.param_groups[0].lr'.lstrip('.')}",
                )


def _from_only_step(found: _Gathered, scalars: Mapping[Path, Scalar]) -> None:
    """Take the step of wherever it lies, if a tensor is called that and no other is.

    A plain number at any depth would not do: settings have steps, too, and they are other ones.
    """
    for name in ("global_step", "step"):
        paths = [path for path in scalars if path and path[-1] == name and _is_of_run(path)]
        if len(paths) == 1:
            origin = f"tensor {'.'.join(map(str, paths[0]))}"
            found.give("step", _counted(_integer(scalars[paths[0]]())), origin)


def _is_of_run(path: Path) -> bool:
    """Tell whether a path leads through nothing that counts its own steps."""
    own = (OPTIMIZER, MACHINERY, AVERAGE)
    return all(isinstance(key, str) and not any(one.search(key) for one in own) for key in path)


def _from_settings(found: _Gathered) -> None:
    """Take the learning rate that the run began with, where no current one is known."""
    settings, origin = found.answers.get("hyper_parameters", {}), found.origin.get("hyper_parameters")
    for rate in _RATE:
        found.give("learning_rate", _number(settings.get(rate)), f"{origin}.{rate}")


def _from_other_losses(found: _Gathered) -> None:
    """Where the training loss is not recorded, take another one; the origin says which."""
    for metric in _OTHER_LOSSES:
        if metric in found.metrics:
            found.give("loss", found.metrics[metric], found.origin[f"metrics.{metric}"])


def is_told_by_name(state: TrainingState) -> bool:
    """Tell whether some of a training state is known from a file's name, which a copy needn't have."""
    return any(state.origin_of(name).kind == "name" for name in state.origin)


def _from_name(found: _Gathered, name: str) -> None:
    fields = parse_name(name)
    origin = f"name {name}"
    found.give("epoch", fields.epoch, origin)
    found.give("step", fields.step, origin)
    found.give("saved_at", fields.saved_at, origin)
    for metric, value in fields.metrics.items():
        if metric == "loss":
            found.give("loss", value, origin)
        elif metric not in found.metrics:
            found.metrics[metric] = value
            found.origin[f"metrics.{metric}"] = origin


def _number(value: object) -> float | int | None:
    """Return a number as it is, and None for what is none (a text that spells one counts)."""
    if isinstance(value, str):
        try:
            value = float(value) if not re.fullmatch(r"[-+]?\d{1,18}", value.strip()) else int(value)
        except ValueError:
            return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value


def _integer(value: object) -> int | None:
    number = _number(value)
    if isinstance(number, float):
        return int(number) if math.isfinite(number) and number.is_integer() else None
    return number


def _counted(number: float | int | None) -> float | int | None:
    """Return a count; some tools write -1 where they don't know."""
    return None if number is None or number < 0 else number


def is_training_scalar(key: str | int) -> bool:
    """Tell whether a key is one of those under which epoch, step, loss or learning rate are saved."""
    return key in (*_EPOCH, *_STEP, *_LOSS, *_RATE)
