"""The parts of a training's state besides weights, optimizer and step, by their keys and their layouts.

A key alone proves nothing: a configuration has an ``lr_scheduler`` and an ``rng_seed``, too. A part is there
if what lies under its key is laid out as frameworks save that part; settings never count.

Sources: PyTorch ``torch/optim/lr_scheduler.py`` and ``torch/amp/grad_scaler.py`` (``state_dict``); timm
``scheduler/scheduler.py``; DeepSpeed ``runtime/lr_schedules.py``, ``runtime/fp16/loss_scaler.py``; Megatron
``core/optimizer_param_scheduler.py``, ``core/optimizer/grad_scaler.py`` and ``training/checkpointing.py``
(``consumed_train_samples`` of its arguments); mmengine ``optim/scheduler/param_scheduler.py``; ignite
``handlers/param_scheduler.py``; apex ``amp/frontend.py``; Paddle ``amp/grad_scaler.py``; torchdata
``stateful_dataloader``; PyTorch ``torch/utils/data/distributed.py``.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from ckpttool.core.tensor import MOST_READ, OPTIMIZER, Path, Role, Tensor
from ckpttool.weights.converting.random_states import is_random_state, is_random_tensor

_DEEPEST, _MOST_KEYS, _MOST_ITEMS = 6, 20_000, 8
"""How far into the metadata keys are looked for, and how many of a list's items are looked into."""
_SETTINGS = re.compile(
    r"(^|_)(arg(ument)?s|namespace|cfg|conf|config(uration)?s?|h_?params|hyper_?param(eter)?s|settings|options)$",
    re.IGNORECASE,
)
"""Keys below which a training's settings lie."""
_SETTINGS_CLASS = re.compile(r"(Namespace|Arguments|Args|Config|Cfg|Settings|Options)$")
_CLASS = "<class>"
_POSITION = re.compile(
    r"_?((next|current|start|last|global|sample|sampler|shard|data)_)?"
    r"(i|idx|index|pos|position|offset|cursor|counter|step|epoch|iter|iteration|batch_idx)"
    r"|\w*(yielded|consumed|fetched|seen|completed|processed|since_\w+|_in_epoch)|consumed_\w+",
    re.IGNORECASE,
)
"""Keys of how far a loader has come; sizes, seeds and numbers of workers are none."""
_OPTIMIZER_KEY = re.compile(
    r"(\w{1,64}_)?(optim(izer)?s?|opt)(_?(states?|dict|\d{1,4})){0,4}(_[a-z])?", re.IGNORECASE
)
"""Keys of an optimizer that can't be a network's: no ``opt_net``."""
_POSITION_KEY = re.compile(r"(\w{1,64}_)?(step|epoch|iteration)s?", re.IGNORECASE)
_CONSUMED = re.compile(r"consumed_(train_)?samples")


class Key(NamedTuple):
    """A key somewhere in a checkpoint's metadata, and the value there.

    Attributes:
        keys: The keys that lead to it, an index for an item of a list.
        value: What lies there.
        is_setting: Whether it lies among settings.
    """

    keys: Path
    value: object
    is_setting: bool

    @property
    def name(self) -> str:
        """Return the last key, and "" for an item of a list."""
        return self.keys[-1] if self.keys and isinstance(self.keys[-1], str) else ""


def keys_in(metadata: Mapping[str, object]) -> Iterator[Key]:
    """Yield the metadata itself, and the keys in it, the outermost first."""
    waiting = deque([Key((), metadata, is_setting=False)])
    for _ in range(_MOST_KEYS):
        if not waiting:
            return
        key = waiting.popleft()
        yield key
        if len(key.keys) <= _DEEPEST:
            waiting += (
                Key((*key.keys, name), value, key.is_setting or _are_settings(name, value))
                for name, value in _items(key.value)
            )


def held_parts(keys: Iterable[Key], tensors: Iterable[Tensor]) -> set[str]:
    """Return the parts whose state is there; no value of a tensor is read."""
    states = [key for key in keys if not key.is_setting]
    held = {
        name
        for name, part in _PARTS.items()
        if any(part.names.search(key.name) and _holds(key.value, part.is_state) for key in states)
    }
    for tensor in tensors:
        if tensor.role is not Role.WEIGHTS and tensor.size:
            held.update(name for name, part in _PARTS.items() if name not in held and part.has(tensor))
    return held


def consumes_samples(keys: Iterable[Key]) -> bool:
    """Tell whether Megatron says how many samples it has taken, which it does among its arguments."""
    return any(_CONSUMED.fullmatch(key.name) and _is_count(key.value) and key.value for key in keys)


def part_of(name: str, role: Role | None = None) -> str | None:
    """Return the part of a training's state that a dotted name is of, None where it may be anything's.

    Args:
        name: Of a tensor or a value.
        role: Of a tensor: a format may know an optimizer's by other means than keys.
    """
    keys = [key[:MOST_READ] for key in re.split(r"[./]", name)]
    is_known = role is Role.OPTIMIZER and not any(map(OPTIMIZER.search, keys))
    if is_known or any(map(_OPTIMIZER_KEY.fullmatch, keys)):
        return "optimizer"
    if _POSITION_KEY.fullmatch(keys[-1]):
        return "step or epoch"
    return next((name for name, part in _PARTS.items() if any(map(part.names.search, keys))), None)


def _items(value: object) -> list[tuple[Any, object]]:
    if isinstance(value, Mapping):
        return list(value.items())
    return list(enumerate(value[:_MOST_ITEMS])) if isinstance(value, list) else []


def _are_settings(name: object, value: object) -> bool:
    if isinstance(name, str) and _SETTINGS.search(name):
        return True
    kind = value.get(_CLASS) if isinstance(value, Mapping) else None
    return isinstance(kind, str) and _SETTINGS_CLASS.search(kind) is not None


def _holds(value: object, is_state: Callable[[object], bool], deepest: int = _DEEPEST) -> bool:
    """Tell whether a value is a state, a dictionary that has one in it, or a list of nothing else."""
    if is_state(value):
        return True
    if not deepest or not value:
        return False
    if isinstance(value, Mapping):
        return any(
            _holds(one, is_state, deepest - 1) for name, one in value.items() if not _are_settings(name, one)
        )
    return isinstance(value, list) and all(_holds(one, is_state, deepest - 1) for one in value)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


# The layouts ------------------------------------------------------------------------------------------


class _Part(NamedTuple):
    """How a part is told.

    Attributes:
        names: Keys under which people and frameworks keep it.
        is_state: Whether a value is a state of it.
        is_state_tensor: Whether a tensor is one, or is in one.
    """

    names: re.Pattern[str]
    is_state: Callable[[object], bool]
    is_state_tensor: Callable[[Tensor], bool]

    def has(self, tensor: Tensor) -> bool:
        return self.is_state_tensor(tensor) and any(
            self.names.search(name) for name in (*map(str, tensor.path), tensor.key or "")
        )


_SCHEDULER_COUNTS = frozenset(
    {"last_epoch", "_step_count", "last_batch_iteration", "last_step", "event_index"}
)
_SCHEDULER_RATES = frozenset({"base_lrs", "_last_lr", "base_values"})
_MEGATRON_SCHEDULER = frozenset({"num_steps", "max_lr", "lr_decay_style"})
_SCALER_COUNTS = frozenset({"_growth_tracker", "growth_tracker", "unskipped", "cur_scale", "incr_count"})


def _is_scheduler_state(value: object) -> bool:
    """A count of -1, which is the default of an argument, is none."""
    if not isinstance(value, Mapping):
        return False
    has_rates = any(isinstance(value.get(key), list) for key in _SCHEDULER_RATES)
    return has_rates or _counts_one_of(value, _SCHEDULER_COUNTS) or value.keys() >= _MEGATRON_SCHEDULER


def _is_scaler_state(value: object) -> bool:
    return isinstance(value, Mapping) and _counts_one_of(value, _SCALER_COUNTS)


def _is_loader_state(value: object) -> bool:
    if isinstance(value, Mapping):
        return any(
            isinstance(key, str) and _POSITION.fullmatch(key) and _is_count(one) for key, one in value.items()
        )
    return is_random_state(value)


def _counts_one_of(value: Mapping[str, object], names: Collection[str]) -> bool:
    counts = (value.get(name) for name in names)
    return any(isinstance(one, int | float) and not isinstance(one, bool) and one >= 0 for one in counts)


def _is_loader_tensor(tensor: Tensor) -> bool:
    """Tell whether a tensor is a generator's state, an iterator of TensorFlow's, a position or an order."""
    if is_random_tensor(tensor) or tensor.dtype.kind == "string":
        return True
    last = str(tensor.path[-1])
    is_named = _POSITION.fullmatch(last) or (_LOADER.search(last) and "." not in last)
    return tensor.dtype.kind == "integer" and len(tensor.shape) <= 1 and bool(is_named)


_LOADER = re.compile(
    r"data_?(loader|iter|set_state)|sampler|^dl_state|combined_loader|train_iterator|ITERATOR_STATE",
    re.IGNORECASE,
)
_PARTS: Mapping[str, _Part] = {
    "scheduler": _Part(
        re.compile(r"sched", re.IGNORECASE),
        _is_scheduler_state,
        lambda tensor: tensor.path[-1] in _SCHEDULER_COUNTS,
    ),
    "RNG state": _Part(
        re.compile(r"(^|[-_./])rng|random_states?(_\d+)?$|seed_generator", re.IGNORECASE),
        is_random_state,
        is_random_tensor,
    ),
    "gradient scaler": _Part(
        re.compile(r"scaler|^(native_)?amp(_|$)|^MixedPrecision", re.IGNORECASE),
        _is_scaler_state,
        lambda tensor: tensor.path[-1] in _SCALER_COUNTS,
    ),
    "data loader state": _Part(_LOADER, _is_loader_state, _is_loader_tensor),
}
PARTS = tuple(_PARTS)
"""What the parts are called, in the order in which they are listed."""
