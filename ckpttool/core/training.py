"""The training state of a checkpoint, from its metadata and its name.

Epoch, step, loss, learning rate, metrics and the rest are searched under the usual keys of libraries and
users, and recorded with their origins. The file's name comes last. Metrics of other checkpoints are ignored;
if it is unclear whose a value is, it is left out.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

from ckpttool.core.checkpoint import TrainingState
from ckpttool.core.naming import parse_name
from ckpttool.core.tensor import AVERAGE, OPTIMIZER, TRAINING_OBJECTS, Path

Scalar = Callable[[], float | int | None]
"""Function that reads a scalar tensor."""

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
_METRIC = re.compile(
    r"loss|(^|_)acc(uracy)?($|_|\d)|accuracy|(^|_)f1|auc|bleu|rouge|(^|_)m?ap($|_)|(^|_)m?iou|psnr|ssim|perplexity|"
    r"ppl|(^|_)[wc]er$|score|metric|error|(^|_)r2$|mse|mae|dice|precision|recall|fid|fitness",
    re.IGNORECASE,
)
_SETTING = re.compile(
    r"(^|[-_/.])(weights?|scale|scaler|thresholds?|thresh|coeff?s?|lambda|alpha|beta|gamma|margin|patience|smoothing|"
    r"type|fn|func|name|mode|every|interval|freq|num|count|ratio|factor|steps?|epochs?|reduction)($|[-_/.])",
    re.IGNORECASE,
)
"""Words that make a metric's name that of a setting: ``loss_weight``, ``score_threshold``."""

_GROUPS = ("metrics", "metric", "results", "scores", "val_metrics", "train_metrics", "eval_metrics")
_SPLITS = ("val", "valid", "validation", "eval", "test", "dev", "train")
_HISTORIES = ("history", "val_history", "train_history")
_SERIES = re.compile(r"(loss|accuracie|acc|score|error|metric)e?s$|_history$", re.IGNORECASE)
"""Keys of lists to which each save appends its value."""

_COUNTS = frozenset({"epoch", "step", "global_step", "iteration", "iter"})


@dataclass(slots=True)
class _FoundValues:
    """Values found so far, with their origins; the first for each field is kept."""

    values: dict[str, Any] = field(default_factory=dict)
    origin: dict[str, str] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, value: object, origin: str) -> None:
        if value is not None and name not in self.values:
            self.values[name] = value
            self.origin[name] = origin

    def add_metric(self, name: str, value: float, origin: str) -> None:
        self.metrics.setdefault(name, value)
        self.origin.setdefault(f"metrics.{name}", origin)


def training_state(
    metadata: Mapping[str, Any], scalars: Mapping[Path, Scalar] | None = None, name: str = ""
) -> TrainingState:
    """Return the training state of a checkpoint.

    Args:
        metadata: The checkpoint's plain data.
        scalars: Readers of its scalar tensors, by path.
        name: The name of its file or directory.
    """
    # The first value found for a field is kept, so the sources are in the order of their reliability: keys of
    # the metadata from the outermost mapping inwards, Lightning's callbacks, the optimizer's groups,
    # settings, a tensor at any depth, and last the file's name.
    found = _FoundValues()
    scalars = scalars or {}
    for prefix, level in _levels(metadata, scalars):
        _add_from_keys(found, prefix, level, scalars)
    _add_from_lightning(found, metadata, scalars, name)
    _add_from_param_groups(found, metadata)
    # The initial learning rate, if no current one is known.
    settings, origin = found.values.get("hyper_parameters", {}), found.origin.get("hyper_parameters")
    for rate in _RATE:
        found.add("learning_rate", _number(settings.get(rate)), f"{origin}.{rate}")
    _add_from_only_step(found, scalars)
    _add_from_name(found, name)
    # If the training loss is not recorded, another one; the origin says which.
    for metric in _OTHER_LOSSES:
        if metric in found.metrics:
            found.add("loss", found.metrics[metric], found.origin[f"metrics.{metric}"])
    return TrainingState(metrics=found.metrics, origin=found.origin, **found.values)


def is_metric(key: object) -> bool:
    """Return whether a key is the name of a metric, and not of a setting."""
    return isinstance(key, str) and bool(_METRIC.search(key)) and not _SETTING.search(key)


def is_training_scalar(key: str | int) -> bool:
    """Return whether a key is a usual one for epoch, step, loss or learning rate."""
    return key in (*_EPOCH, *_STEP, *_LOSS, *_RATE)


def depends_only_on(state: TrainingState, tensors: Collection[str]) -> bool:
    """Return whether a training state comes from the metadata and these tensors alone, not from a name."""
    places = {f"tensor {name}" for name in tensors}
    origins = ((state.origin_of(name).kind, where) for name, where in state.origin.items())
    return not any(kind == "name" or (kind == "tensor" and where not in places) for kind, where in origins)


# Keys -----------------------------------------------------------------------------------------------


def _levels(
    metadata: Mapping[str, Any], scalars: Mapping[Path, Scalar]
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the mappings in which training values are searched, the outermost first.

    A mapping of tensors alone has no metadata, and is empty.
    """
    tensor_names = {".".join(map(str, path)) for path in scalars}
    yield "", metadata
    for prefix, level in (("", metadata), *_nested("", metadata, tensor_names)):
        yield from _nested(prefix, level, tensor_names)


def _nested(
    prefix: str, level: Mapping[str, Any], tensor_names: Collection[str]
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for key in _NESTED:
        inner, inner_prefix = level.get(key), f"{prefix}{key}."
        if isinstance(inner, Mapping):
            if "param_groups" not in inner:
                yield inner_prefix, inner
        elif any(name.startswith(inner_prefix) for name in tensor_names):
            yield inner_prefix, {}


def _add_from_keys(
    found: _FoundValues, prefix: str, level: Mapping[str, Any], scalars: Mapping[Path, Scalar]
) -> None:
    tensors = {
        ".".join(map(str, path)): read for path, read in scalars.items() if len(path) == prefix.count(".") + 1
    }

    def values(names: tuple[str, ...]) -> Iterator[tuple[str, object]]:
        for name in names:
            key = prefix + name
            if name in level:
                yield f"key {key}", level[name]
            elif key in tensors:
                yield f"tensor {key}", tensors[key]()

    for origin, value in values(_EPOCH):
        found.add("epoch", _count(_number(value)), origin)
    for origin, value in values(_STEP):
        found.add("step", _count(_integer(value)), origin)
    for origin, value in values(_LOSS):
        if isinstance(value, list) and value:
            value, origin = value[-1], f"{origin}[-1]"
        found.add("loss", _number(value), origin)
    for origin, value in values(_RATE):
        found.add("learning_rate", _number(value), origin)
    for origin, value in values(_SEED):
        found.add("seed", _integer(value), origin)
    for origin, value in values(_WHEN):
        found.add("saved_at", value if isinstance(value, str) else None, origin)
    _add_hyper_parameters(found, prefix, level)
    _add_metrics(found, prefix, level, scalars)


def _add_hyper_parameters(found: _FoundValues, prefix: str, level: Mapping[str, Any]) -> None:
    for name in _HYPER:
        settings = level.get(name)
        if isinstance(settings, Mapping) and settings:
            plain = {key: value for key, value in settings.items() if key != "<class>"}
            found.add("hyper_parameters", plain, f"key {prefix}{name}")
            for seed in _SEED:
                found.add("seed", _integer(settings.get(seed)), f"key {prefix}{name}.{seed}")


def _add_metrics(
    found: _FoundValues, prefix: str, level: Mapping[str, Any], scalars: Mapping[Path, Scalar]
) -> None:
    for metric, value, origin in chain(_metrics_in(prefix, level), _tensor_metrics_in(prefix, scalars)):
        number = _number(value)
        if number is not None and metric not in _LOSS:
            found.add_metric(metric, number, origin)
            if metric.startswith("best"):
                found.add("best", number, origin)


def _metrics_in(prefix: str, level: Mapping[str, Any]) -> Iterator[tuple[str, object, str]]:
    """Yield possible metrics of a mapping: name, value and origin.

    ``prefix`` has the keys that lead to the mapping, each followed by a dot.
    """
    # A metric is a number under a metric's name (``val_loss``), the last item of a list that each save
    # extends (``val_losses``, ``history.val_loss``), any number in a group (``metrics.x``), or a metric in
    # that of a split (``val.loss``).
    for key, value in level.items():
        if not isinstance(key, str):
            continue
        origin = f"key {prefix}{key}"
        if not isinstance(value, Mapping):
            if is_metric(key):
                is_series = isinstance(value, list) and value and _SERIES.search(key)
                yield (key, value[-1], f"{origin}[-1]") if is_series else (key, value, origin)
        elif key in _HISTORIES:
            for name, values in value.items():
                if isinstance(values, list) and values and name not in _COUNTS:
                    yield name, values[-1], f"{origin}.{name}[-1]"
        elif key in _GROUPS or key in _SPLITS:
            for name, number in _metrics_in_group(key, value):
                yield _metric_in_group(key, name), number, f"{origin}.{name}"


def _tensor_metrics_in(prefix: str, scalars: Mapping[Path, Scalar]) -> Iterator[tuple[str, object, str]]:
    """Yield the same for the scalar tensors in a mapping and one level deeper."""
    depth = prefix.count(".")
    for path, read in scalars.items():
        names = [name for name in path[depth:] if isinstance(name, str)]
        if len(names) < len(path) - depth or "".join(f"{key}." for key in path[:depth]) != prefix:
            continue
        if len(names) == 1 and is_metric(names[0]):
            yield names[0], read(), f"tensor {prefix}{names[0]}"
        elif len(names) == 2 and _is_in_group(*names):
            yield _metric_in_group(*names), read(), f"tensor {prefix}{'.'.join(names)}"


def _metrics_in_group(group: str, values: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    """Yield the values in a group of metrics, and those one level deeper, with both names."""
    for name, value in values.items():
        if isinstance(value, Mapping) and group in _GROUPS:
            yield from ((f"{name}_{inner}", number) for inner, number in value.items() if is_metric(inner))
        elif _is_in_group(group, name):
            yield name, value


def _is_in_group(group: object, name: object) -> bool:
    if not isinstance(name, str) or name in _COUNTS or name == "<class>":
        return False
    return group in _GROUPS or (group in _SPLITS and is_metric(name))


def _metric_in_group(group: str, name: str) -> str:
    """Return the usual name of a metric in a group: ``val_loss`` is the loss under ``val``."""
    return f"{group}_{name}" if group in _SPLITS and not name.startswith(group) else name


# Lightning's callbacks ------------------------------------------------------------------------------


def _add_from_lightning(
    found: _FoundValues, metadata: Mapping[str, Any], scalars: Mapping[Path, Scalar], name: str
) -> None:
    """Add values from the states of Lightning's ModelCheckpoint callbacks."""
    callbacks, origin = metadata.get("callbacks"), "callback ModelCheckpoint"
    states = {
        key: state
        for key, state in (callbacks.items() if isinstance(callbacks, Mapping) else ())
        if isinstance(state, Mapping) and "best_model_path" in state
    }
    for key in states:
        best = scalars.get(("callbacks", key, "best_model_score"))
        if best is not None:
            found.add("best", _number(best()), origin)
    position = found.values.get("epoch"), found.values.get("step")
    for monitor, score in _lightning_scores(states, scalars, name, *position):
        if (number := _number(score)) is not None:
            found.add_metric(monitor, number, origin)


def _lightning_scores(
    states: Mapping[str, Mapping[str, Any]],
    scalars: Mapping[Path, Scalar],
    name: str,
    epoch: float | None,
    step: int | None,
) -> Iterator[tuple[str, object]]:
    """Yield the monitored metrics that callbacks recorded for this very checkpoint.

    Source: lightning ``pytorch/callbacks/model_checkpoint.py`` (``_update_best_and_save``, ``state_dict``).
    """
    # A ``ModelCheckpoint`` records the score of each file that it keeps (``best_k_models``), and the last
    # score (``current_score``). A file is found by its name, else by epoch and step in it. The last score is
    # only used if nothing contradicts it: in files of another callback, and in ``last.ckpt``, it may be the
    # score of another file.
    for key, state in states.items():
        monitor = state.get("monitor")
        if not isinstance(monitor, str):
            continue
        scores = _scores_by_file(("callbacks", key, "best_k_models"), state, scalars)
        # An epoch alone may have several saves.
        matching = [path for path in scores if os.path.basename(path) == name] or [
            path
            for path in scores
            if (fields := parse_name(os.path.basename(path))).step is not None
            and fields.step == step
            and fields.epoch in (None, epoch)
        ]
        if matching:
            yield monitor, scores[matching[-1]]()
            continue
        last = state.get("last_model_path")
        is_last = name.startswith("last") or (isinstance(last, str) and os.path.basename(last) == name)
        if len(states) == 1 and not is_last and not _contradicts(scores, epoch, step):
            current = scalars.get(("callbacks", key, "current_score"))
            yield monitor, state.get("current_score") if current is None else current()


def _scores_by_file(
    prefix: Path, state: Mapping[str, Any], scalars: Mapping[Path, Scalar]
) -> dict[str, Scalar]:
    """Return the scores of the files that a callback keeps, in the order of saving."""
    plain = state.get("best_k_models")
    scores: dict[str, Scalar] = {}
    for path, score in plain.items() if isinstance(plain, Mapping) else ():
        if isinstance(path, str) and isinstance(score, int | float):
            scores[path] = partial(_number, score)
    return scores | {
        str(path[3]): read for path, read in scalars.items() if len(path) == 4 and path[:3] == prefix
    }


def _contradicts(scores: Mapping[str, Scalar], epoch: float | None, step: int | None) -> bool:
    """Return whether the name of the last kept file has another epoch or step."""
    if not scores:
        return False
    fields = parse_name(os.path.basename(list(scores)[-1]))
    return fields.epoch not in (None, epoch) or fields.step not in (None, step)


# Other places ---------------------------------------------------------------------------------------


def _add_from_param_groups(found: _FoundValues, metadata: Mapping[str, Any]) -> None:
    """Add the learning rate of the first parameter group of the first optimizer."""
    for key, value in [("", metadata), *metadata.items()]:
        if key and not OPTIMIZER.search(str(key)):
            continue
        optimizers = value if isinstance(value, list) else [value]
        for index, optimizer in enumerate(optimizers):
            groups = optimizer.get("param_groups") if isinstance(optimizer, Mapping) else None
            if isinstance(groups, list) and groups and isinstance(groups[0], Mapping):
                path = f"{key}.{index}" if isinstance(value, list) else key
                origin = f"key {f'{path}.param_groups[0].lr'.lstrip('.')}"
                found.add("learning_rate", _number(groups[0].get("lr")), origin)


def _add_from_only_step(found: _FoundValues, scalars: Mapping[Path, Scalar]) -> None:
    """Add the step from a tensor at any depth, if only one has that name.

    Plain numbers are not searched at any depth, since settings have steps with other meanings.
    """
    counters = (OPTIMIZER, TRAINING_OBJECTS, AVERAGE)  # they count their own steps
    for name in ("global_step", "step"):
        paths = [
            path
            for path in scalars
            if path
            and path[-1] == name
            and all(isinstance(key, str) and not any(keys.search(key) for keys in counters) for key in path)
        ]
        if len(paths) == 1:
            origin = f"tensor {'.'.join(map(str, paths[0]))}"
            found.add("step", _count(_integer(scalars[paths[0]]())), origin)


def _add_from_name(found: _FoundValues, name: str) -> None:
    fields = parse_name(name)
    origin = f"name {name}"
    found.add("epoch", fields.epoch, origin)
    found.add("step", fields.step, origin)
    found.add("saved_at", fields.saved_at, origin)
    for metric, value in fields.metrics.items():
        if metric == "loss":
            found.add("loss", value, origin)
        elif metric not in found.metrics:
            found.metrics[metric] = value
            found.origin[f"metrics.{metric}"] = origin


# Numbers --------------------------------------------------------------------------------------------


def _number(value: object) -> float | int | None:
    """Return a number, also one that is spelled as a text; None for other values."""
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


def _count(number: float | int | None) -> float | int | None:
    """Return a count; negative ones are None, since some tools write -1 for an unknown one."""
    return None if number is None or number < 0 else number
