"""What a checkpoint says that it was measured at: its metrics, each with the key that it lies under.

A value that belongs to another checkpoint is none of its own; where it can't be told whose a value is, it is
left out.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ckpttool.naming import parse_name
from ckpttool.tensor import Path

Scalar = Callable[[], float | int | None]
"""Reads a scalar tensor, when somebody asks."""

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
"""What makes of a metric's name a setting: ``loss_weight``, ``score_threshold``."""

_GROUPS = ("metrics", "metric", "results", "scores", "val_metrics", "train_metrics", "eval_metrics")
_SPLITS = ("val", "valid", "validation", "eval", "test", "dev", "train")
_HISTORIES = ("history", "val_history", "train_history")
_SERIES = re.compile(r"(loss|accuracie|acc|score|error|metric)e?s$|_history$", re.IGNORECASE)
"""Keys of lists to which each save adds one: the last is this checkpoint's."""

_COUNTS = frozenset({"epoch", "step", "global_step", "iteration", "iter"})


def is_metric(key: object) -> bool:
    """Tell whether a key names a metric, and no setting of one."""
    return isinstance(key, str) and bool(_METRIC.search(key)) and not _SETTING.search(key)


def measured(
    prefix: str, level: Mapping[str, Any], scalars: Mapping[Path, Scalar]
) -> Iterator[tuple[str, object, str]]:
    """Yield what may be a metric in a mapping: its name, its value, and where it lies.

    Args:
        prefix: The keys that lead to the mapping, each with a dot behind.
        level: Its plain data.
        scalars: Readers of all scalar tensors, by path.
    """
    for key, value in level.items():
        if not isinstance(key, str):
            continue
        if not isinstance(value, Mapping):
            if is_metric(key):
                yield from _single(key, value, f"key {prefix}{key}")
            continue
        if key in _HISTORIES:
            yield from _lasts(value, f"key {prefix}{key}")
        elif key in _GROUPS or key in _SPLITS:
            for name, number in _in_group(key, value):
                yield _called(key, name), number, f"key {prefix}{key}.{name}"
    for path, read in _below(prefix, scalars):
        name = ".".join(path)
        if len(path) == 1 and is_metric(name):
            yield name, read(), f"tensor {prefix}{name}"
        elif len(path) == 2 and _is_of_group(*path):
            yield _called(*path), read(), f"tensor {prefix}{name}"


def _single(key: str, value: object, origin: str) -> Iterator[tuple[str, object, str]]:
    if isinstance(value, list) and value and _SERIES.search(key):
        yield key, value[-1], f"{origin}[-1]"
    else:
        yield key, value, origin


def _lasts(history: Mapping[str, Any], origin: str) -> Iterator[tuple[str, object, str]]:
    for name, values in history.items():
        if isinstance(values, list) and values and name not in _COUNTS:
            yield name, values[-1], f"{origin}.{name}[-1]"


def _in_group(key: str, group: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    """Yield the values in a group of metrics, and those one level deeper, which are called after both."""
    for name, value in group.items():
        if isinstance(value, Mapping) and key in _GROUPS:
            yield from ((f"{name}_{inner}", number) for inner, number in value.items() if is_metric(inner))
        elif _is_of_group(key, name):
            yield name, value


def _is_of_group(key: object, name: object) -> bool:
    if not isinstance(name, str) or name in _COUNTS or name == "<class>":
        return False
    return key in _GROUPS or (key in _SPLITS and is_metric(name))


def _called(key: str, name: str) -> str:
    """Return what people call a metric in a group: ``val_loss`` is the loss under ``val``."""
    return f"{key}_{name}" if key in _SPLITS and not name.startswith(key) else name


def _below(prefix: str, scalars: Mapping[Path, Scalar]) -> Iterator[tuple[tuple[str, ...], Scalar]]:
    """Yield the scalar tensors in a mapping and one level deeper, by their paths from there."""
    depth = prefix.count(".")
    for path, read in scalars.items():
        rest = path[depth:]
        is_there = "".join(f"{key}." for key in path[:depth]) == prefix
        if is_there and 0 < len(rest) < 3 and all(isinstance(key, str) for key in rest):
            yield tuple(map(str, rest)), read


def lightning_scores(
    callbacks: object, scalars: Mapping[Path, Scalar], name: str, epoch: float | None, step: int | None
) -> Iterator[tuple[str, object]]:
    """Yield the metrics that Lightning's callbacks know of this very checkpoint, by the names they monitor.

    A ``ModelCheckpoint`` remembers the score of each file that it keeps, and that of the one it kept last: in
    what another callback wrote, and in ``last.ckpt``, that may be another's.

    Args:
        callbacks: The mapping of their states.
        scalars: Readers of the checkpoint's scalar tensors, by path.
        name: The checkpoint's own file name.
        epoch: Where it was saved.
        step: Likewise.

    Source: lightning ``pytorch/callbacks/model_checkpoint.py`` (``_update_best_and_save``, ``state_dict``).
    """
    keepers = {key: state for key, state in _states(callbacks) if "best_model_path" in state}
    for key, state in keepers.items():
        monitor = state.get("monitor")
        if not isinstance(monitor, str):
            continue
        kept = _kept(("callbacks", key, "best_k_models"), state, scalars)
        own = [path for path in kept if os.path.basename(path) == name]
        own = own or [path for path in kept if _is_saved_at(path, epoch, step)]
        if own:
            yield monitor, kept[own[-1]]()
        elif len(keepers) == 1 and not _is_last(name, state) and not _contradict(kept, epoch, step):
            current = scalars.get(("callbacks", key, "current_score"))
            yield monitor, state.get("current_score") if current is None else current()


def _states(callbacks: object) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for key, state in callbacks.items() if isinstance(callbacks, Mapping) else ():
        if isinstance(state, Mapping):
            yield key, state


def _kept(place: Path, state: Mapping[str, Any], scalars: Mapping[Path, Scalar]) -> dict[str, Scalar]:
    """Return the scores of the files that a callback keeps, the one that it kept last in the end."""
    plain = state.get("best_k_models")
    found: dict[str, Scalar] = {}
    for path, score in plain.items() if isinstance(plain, Mapping) else ():
        if isinstance(path, str) and isinstance(score, int | float):
            found[path] = _constant(score)
    found |= {str(path[3]): read for path, read in scalars.items() if len(path) == 4 and path[:3] == place}
    return found


def _constant(score: float) -> Scalar:
    return lambda: score


def _is_saved_at(path: str, epoch: float | None, step: int | None) -> bool:
    """Tell whether a file's name has this step; an epoch alone may have several saves."""
    fields = parse_name(os.path.basename(path))
    return fields.step is not None and fields.step == step and fields.epoch in (None, epoch)


def _contradict(kept: Mapping[str, Scalar], epoch: float | None, step: int | None) -> bool:
    """Tell whether the file that was kept last says that it was saved elsewhere in the run."""
    for path in list(kept)[-1:]:
        fields = parse_name(os.path.basename(path))
        return fields.epoch not in (None, epoch) or fields.step not in (None, step)
    return False


def _is_last(name: str, state: Mapping[str, Any]) -> bool:
    last = state.get("last_model_path")
    return name.startswith("last") or (isinstance(last, str) and os.path.basename(last) == name)
