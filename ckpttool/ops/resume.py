"""How a training resumes from a checkpoint: exactly, with weights and optimizer, or with weights only.

A part of the training's state that isn't found is missing, unless the checkpoint shows that this training had
none. A key alone proves nothing: a configuration has an ``lr_scheduler`` and an ``rng_seed``, too. A part is
found if the value of its key has the layout of that part in a framework; settings never count.

Sources: PyTorch ``torch/optim/lr_scheduler.py`` (``LRScheduler.__init__`` puts ``initial_lr`` into the groups
of its optimizer), ``torch/amp/grad_scaler.py``, ``torch/utils/data/distributed.py``; huggingface/transformers
``trainer.py`` (``_load_rng_state``, ``_inner_training_loop``: it skips the batches before ``global_step``,
whose order the seed gives); lightning ``pytorch/trainer/connectors/checkpoint_connector.py``
(``dump_checkpoint``); timm ``scheduler/scheduler.py``; DeepSpeed ``runtime/lr_schedules.py``,
``runtime/fp16/loss_scaler.py``; Megatron ``core/optimizer_param_scheduler.py``,
``core/optimizer/grad_scaler.py`` and ``training/checkpointing.py`` (``consumed_train_samples`` of its
arguments); mmengine ``optim/scheduler/param_scheduler.py``; ignite ``handlers/param_scheduler.py``; apex
``amp/frontend.py``; Paddle ``amp/grad_scaler.py``; torchdata ``stateful_dataloader``.
"""

from __future__ import annotations

import enum
import re
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.tensor import OPTIMIZER, SEARCHED_CHARACTERS, Path, Role, Tensor
from ckpttool.formats.traits import traits_of
from ckpttool.weights.converting.random_states import is_random_state, is_random_tensor

if TYPE_CHECKING:
    from typing import TypeGuard

_DEEPEST, _MOST_KEYS, _MOST_ITEMS = 6, 20_000, 8
"""Limits of the search for keys in metadata: depth, number of keys, and items of each list."""
_SETTINGS = re.compile(
    r"(^|_)(arg(ument)?s|namespace|cfg|conf|config(uration)?s?|h_?params|hyper_?param(eter)?s|settings|options)$",
    re.IGNORECASE,
)
"""Keys of a training's settings."""
_SETTINGS_CLASS = re.compile(r"(Namespace|Arguments|Args|Config|Cfg|Settings|Options)$")
_CLASS = "<class>"
_POSITION = re.compile(
    r"_?((next|current|start|last|global|sample|sampler|shard|data)_)?"
    r"(i|idx|index|pos|position|offset|cursor|counter|step|epoch|iter|iteration|batch_idx)"
    r"|\w*(yielded|consumed|fetched|seen|completed|processed|since_\w+|_in_epoch)|consumed_\w+",
    re.IGNORECASE,
)
"""Keys of a data loader's position; sizes, seeds and numbers of workers don't match."""
_OPTIMIZER_KEY = re.compile(
    r"(\w{1,64}_)?(optim(izer)?s?|opt)(_?(states?|dict|\d{1,4})){0,4}(_[a-z])?", re.IGNORECASE
)
"""Keys of an optimizer; a network's, such as ``opt_net``, doesn't match."""
_POSITION_KEY = re.compile(r"(\w{1,64}_)?(step|epoch|iteration)s?", re.IGNORECASE)
_CONSUMED = re.compile(r"consumed_(train_)?samples")


class MetadataKey(NamedTuple):
    """A key in a checkpoint's metadata, with its value.

    Attributes:
        path: Its path; an item of a list has its index.
        value: The value.
        is_setting: Whether it is below a key of settings.
    """

    path: Path
    value: object
    is_setting: bool

    @property
    def name(self) -> str:
        """Return the last key, and "" for an item of a list."""
        return self.path[-1] if self.path and isinstance(self.path[-1], str) else ""


def keys_in(metadata: Mapping[str, object]) -> Iterator[MetadataKey]:
    """Yield the metadata itself, and the keys in it, breadth first."""
    # Parts of the training's state are near the root, so that limits leave out the deepest keys. A settings
    # key marks all keys below it: an ``lr_scheduler`` in a configuration is a setting, not a state.
    waiting = deque([MetadataKey((), metadata, is_setting=False)])
    for _ in range(_MOST_KEYS):
        if not waiting:
            return
        key = waiting.popleft()
        yield key
        if len(key.path) <= _DEEPEST:
            waiting += (
                MetadataKey((*key.path, name), value, key.is_setting or _are_settings(name, value))
                for name, value in _items(key.value)
            )


def found_parts(keys: Iterable[MetadataKey], tensors: Iterable[Tensor]) -> set[str]:
    """Return the parts of the training's state that exist; no value of a tensor is read."""
    # A part is found by a key of the usual name whose value has the part's layout, or by a tensor of such a
    # name. Weights never count: a layer may have any name, such as ``scheduler``.
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


def consumes_samples(keys: Iterable[MetadataKey]) -> bool:
    """Return whether Megatron's arguments record the number of consumed samples."""
    return any(_CONSUMED.fullmatch(key.name) and _is_count(key.value) and key.value for key in keys)


def part_of(name: str, role: Role | None = None) -> str | None:
    """Return the part of a training's state that a dotted name belongs to; None if unknown.

    Args:
        name: Name of a tensor or a value.
        role: Role of the tensor, which a format may know by other means than names.
    """
    keys = [key[:SEARCHED_CHARACTERS] for key in re.split(r"[./]", name)]
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
    """Return whether a value is a state, a dictionary that contains one, or a list of states."""
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
    """Keys and layout by which a part of the training's state is recognised.

    Attributes:
        names: Keys that frameworks and training scripts use for it.
        is_state: Returns whether a value has the layout of its state.
        is_state_tensor: Returns whether a tensor is its state, or part of it.
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
    # A count of -1 is the default of the argument ``last_epoch``, so it is a setting.
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
    """Return whether a tensor is a generator's state, an iterator of TensorFlow's, a position or an order."""
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
"""Names of the parts, in the order of listings."""


_OPTIMIZER, _STATE, _STEP = "optimizer", "state", "step"
_PARAM_GROUPS, _SCHEDULED = "param_groups", "initial_lr"
_OF_STATEFUL = frozenset(
    {"betas", "beta1", "beta2", "beta", "alpha", "rho", "etas", "lr_decay", "history_size", "eps"}
)
"""Settings of optimizers that keep moments, squares or a history; SGD has none of them."""
_HALF = ("16", "16-mixed", "16-true", "fp16")


class ResumeLevel(str, enum.Enum):
    """How much of a training continues as if it had not been interrupted."""

    EXACT = "exact"
    WEIGHTS_AND_OPTIMIZER = "weights-and-optimizer"
    WEIGHTS = "weights-only"
    NONE = "none"  # it has no weights


_WORDS = {
    ResumeLevel.EXACT: "exactly",
    ResumeLevel.WEIGHTS_AND_OPTIMIZER: "with weights and optimizer",
    ResumeLevel.WEIGHTS: "with weights only",
    ResumeLevel.NONE: "not at all: no weights",
}


class ResumeVerdict(NamedTuple):
    """How a training resumes from a checkpoint.

    Attributes:
        level: How much of the training continues as it was.
        found: Parts of the training's state that were found.
        missing: Parts that weren't found, though this training had them or may have had.
    """

    level: ResumeLevel
    found: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()

    def __str__(self) -> str:
        words = _WORDS[self.level]
        if self.level is not ResumeLevel.WEIGHTS_AND_OPTIMIZER:
            return words
        return f"{words}; {self.shortcoming}"

    @property
    def shortcoming(self) -> str:
        """Return the missing parts in words."""
        return ", ".join(f"no {part}" for part in self.missing)


def resume_verdict(checkpoint: Checkpoint) -> ResumeVerdict:
    """Return how a training resumes from an open checkpoint; no value of a tensor is read."""
    if not any(tensor.role is Role.WEIGHTS for tensor in checkpoint.tensors):
        return ResumeVerdict(ResumeLevel.NONE, missing=("weights",))
    keys = list(keys_in({} if checkpoint.derives_metadata else checkpoint.metadata))
    held = found_parts(keys, checkpoint.tensors)
    lacking = _lacking_optimizer(checkpoint, keys)
    if lacking != _OPTIMIZER:
        held.add(_OPTIMIZER)
    if _has_position(checkpoint):
        held.add("step or epoch")
    if consumes_samples(keys) or _skips_batches(checkpoint.metadata):
        held.add("data loader state")
    needed = ("step or epoch", *_needed_parts(checkpoint, keys))
    found = ("weights", *(part for part in (_OPTIMIZER, "step or epoch", *PARTS) if part in held))
    missing = (*([lacking] if lacking else ()), *(part for part in needed if part not in held))
    if lacking == _OPTIMIZER:
        return ResumeVerdict(ResumeLevel.WEIGHTS, found, missing)
    return ResumeVerdict(ResumeLevel.WEIGHTS_AND_OPTIMIZER if missing else ResumeLevel.EXACT, found, missing)


def _lacking_optimizer(checkpoint: Checkpoint, keys: list[MetadataKey]) -> str | None:
    """Return the missing part of the optimizers' state at this point of the training, or None."""
    # PyTorch's optimizers create the state of a parameter at their first step with a gradient for it; SGD
    # without momentum has none. A parameter that never had a gradient looks like one whose state was lost, so
    # state for only some of the parameters counts as incomplete. Before the first step, none is expected.
    tensors = [one for one in checkpoint.tensors if one.role is Role.OPTIMIZER and one.size]
    optimizers = [(key.path, key.value) for key in keys if not key.is_setting and _is_optimizer(key.value)]
    if not tensors and not optimizers:
        return _OPTIMIZER
    expected, found = _count_parameters(optimizers, tensors)
    if found == expected or _is_before_first_step(checkpoint):
        return None
    return f"optimizer state for {expected - found:,} of {expected:,} parameters" if found else _OPTIMIZER


def _count_parameters(
    optimizers: list[tuple[Path, Mapping[str, Any]]], tensors: list[Tensor]
) -> tuple[int, int]:
    """Return the number of parameters that optimizers have state for, and of those whose state exists."""
    # ``{"state": {0: {"exp_avg": …}}, "param_groups": [{"params": [0, 1]}]}``: groups list the parameters,
    # and state has an entry for each that was updated, as tensors or plain data. A step alone doesn't count:
    # Adam without moments can't continue.
    with_state: dict[Path, set[str]] = defaultdict(set)
    for tensor in tensors:
        for at, key in enumerate(tensor.path[:-1]):
            if key == _STATE:
                names = [] if tensor.path[-1] == _STEP else [str(tensor.path[at + 1])]
                with_state[tensor.path[:at]].update(names)
    # Megatron and others save the state apart from the groups.
    is_elsewhere = any(
        with_state.keys().isdisjoint(one.path[:count] for count in range(len(one.path))) for one in tensors
    )
    expected = found = 0
    for path, state in optimizers:
        parameters = list(_stateful_parameters(state))
        plain = state.get(_STATE)
        present = with_state[path] | (_plain_states(plain) if isinstance(plain, Mapping) else set())
        expected += len(parameters)
        if _STATE not in state and not present and is_elsewhere:
            found += len(parameters)
        else:
            found += sum(name in present if name else bool(present) for name in parameters)
    return expected, found


def _plain_states(states: Mapping[Any, Any]) -> set[str]:
    """Return the parameters with state in plain data, besides the step."""
    return {
        str(name)
        for name, state in states.items()
        if isinstance(state, Mapping)
        and any(map(_is_something, (state[key] for key in state if key != _STEP)))
    }


def _stateful_parameters(state: Mapping[str, Any]) -> Iterator[str]:
    """Yield the parameters that an optimizer has state for; "" for all of a group that doesn't list them."""
    # LBFGS stores all of its state with the first parameter.
    for group in state[_PARAM_GROUPS]:
        if group.get("momentum") or not _OF_STATEFUL.isdisjoint(group):
            parameters = group.get("params")
            names = [*map(str, parameters)] if isinstance(parameters, list) else [""]
            yield from names[:1] if "history_size" in group else names


def _is_something(value: object) -> bool:
    """Return whether a value has anything but empty containers and None."""
    if isinstance(value, Mapping | list | tuple):
        return any(map(_is_something, value.values() if isinstance(value, Mapping) else value))
    return value is not None and value != ""


def _is_optimizer(value: object) -> TypeGuard[Mapping[str, Any]]:
    groups = value.get(_PARAM_GROUPS) if isinstance(value, Mapping) else None
    return isinstance(groups, list) and bool(groups) and all(isinstance(one, Mapping) for one in groups)


def _is_before_first_step(checkpoint: Checkpoint) -> bool:
    training = checkpoint.training
    counts = [one for one in (training.step, training.epoch) if one is not None]
    return bool(counts) and not any(counts)


def _has_position(checkpoint: Checkpoint) -> bool:
    training = checkpoint.training
    return any(
        getattr(training, name) is not None and training.origin_of(name).kind != "name"
        for name in ("step", "epoch")
    )


def _skips_batches(metadata: Mapping[str, Any]) -> bool:
    """Return whether Hugging Face's Trainer replays the data order by the seed, and skips trained batches."""
    state, arguments = metadata.get("trainer_state"), metadata.get("training_args")
    if not isinstance(state, Mapping) or not isinstance(state.get("global_step"), int):
        return False
    return isinstance(arguments, Mapping) and arguments.get("ignore_data_skip") is False


def _needed_parts(checkpoint: Checkpoint, keys: list[MetadataKey]) -> Iterator[str]:
    """Yield the parts that the training had, as far as the checkpoint shows, or may have had."""
    if _may_have_scheduler(checkpoint, keys):
        yield "scheduler"
    yield "RNG state"
    if any(_is_half_precision(key) for key in keys):
        yield "gradient scaler"
    yield "data loader state"


def _may_have_scheduler(checkpoint: Checkpoint, keys: list[MetadataKey]) -> bool:
    """Return whether a scheduler was attached to the optimizer, or that is unknown."""
    # PyTorch's schedulers put ``initial_lr`` into the optimizer's groups. TensorFlow's and Keras's schedules
    # are functions of the optimizer's own count, without state.
    traits = traits_of(checkpoint.format)
    if traits.has_object_graph or traits.holds_layers:
        return False
    groups = [
        group
        for key in keys
        if key.name == _PARAM_GROUPS and isinstance(key.value, list)
        for group in key.value
        if isinstance(group, Mapping)
    ]
    return not groups or any(_SCHEDULED in group for group in groups)


def _is_half_precision(key: MetadataKey) -> bool:
    """Return whether a setting selects float16, for which gradients are scaled."""
    if key.name == "fp16":
        return key.value is True
    return key.name == "precision" and str(key.value) in _HALF
