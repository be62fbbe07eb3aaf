"""How a training resumes from a checkpoint: exactly, with weights and optimizer, or with weights only.

Each part of a training's state is a row: the keys under which people and frameworks keep it. What was not
found is missing, unless something in the checkpoint says that this training had none.

Sources: huggingface/transformers ``trainer.py`` (``_load_rng_state``, ``_inner_training_loop``: it skips the
batches before ``global_step``, whose order the seed gives); pytorch ``torch/optim/lr_scheduler.py``
(``LRScheduler.__init__`` puts ``initial_lr`` into the groups of its optimizer); lightning
``pytorch/trainer/connectors/checkpoint_connector.py`` (``dump_checkpoint``).
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.tensor import Role, Tensor
from ckpttool.formats.traits import traits_of

if TYPE_CHECKING:
    from typing import TypeGuard

_DEEPEST, _MOST_KEYS, _MOST_ITEMS = 6, 20_000, 8
"""How far into the metadata keys are looked for, and how many of a list's items are looked into."""
_PARAM_GROUPS, _SCHEDULED = "param_groups", "initial_lr"
_OF_STATEFUL = frozenset(
    {"betas", "beta1", "beta2", "beta", "alpha", "rho", "etas", "lr_decay", "history_size", "eps"}
)
"""Settings of optimizers that keep moments, squares or a history; SGD has none of them."""
_HALF = ("16", "16-mixed", "16-true", "fp16")


class ResumeLevel(str, enum.Enum):
    """How much of a training goes on as if it had not been interrupted."""

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
        level: How much of it goes on as it was.
        found: The parts of the training's state that were found.
        missing: Those that were not, though this training had them or may have.
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
        """Return what is missing, in words."""
        return ", ".join(f"no {part}" for part in self.missing)


class _Key(NamedTuple):
    """A key somewhere in a checkpoint, and the value there; of a tensor, the tensor."""

    name: str
    value: object

    @property
    def holds_something(self) -> bool:
        return _is_something(self.value)


def _is_something(value: object) -> bool:
    """Tell whether anything but empty containers, empty tensors and None is there."""
    pending = [value]
    while pending:
        one = pending.pop()
        if isinstance(one, Mapping):
            pending += one.values()
        elif isinstance(one, list | tuple):
            pending += one
        elif isinstance(one, Tensor):
            if one.size:
                return True
        elif one is not None and one != "":
            return True
    return False


_PARTS: Mapping[str, re.Pattern[str]] = {
    "scheduler": re.compile(r"sched", re.IGNORECASE),
    "RNG state": re.compile(r"(^|[-_./])rng|random_states?(_\d+)?$|seed_generator", re.IGNORECASE),
    "gradient scaler": re.compile(r"scaler|^(native_)?amp(_|$)|^MixedPrecision", re.IGNORECASE),
    "data loader state": re.compile(
        r"data_?(loader|iter|set_state)|sampler|^dl_state|combined_loader|consumed_(train_)?samples"
        r"|train_iterator|ITERATOR_STATE",
        re.IGNORECASE,
    ),
}
"""Parts of a training's state besides weights, optimizer and step, by the keys under which they are kept."""


def resume_verdict(checkpoint: Checkpoint) -> ResumeVerdict:
    """Return how a training resumes from an open checkpoint; no value of a tensor is read."""
    if not any(tensor.role is Role.WEIGHTS for tensor in checkpoint.tensors):
        return ResumeVerdict(ResumeLevel.NONE, missing=("weights",))
    keys = list(_keys(checkpoint))
    held = {part for part, names in _PARTS.items() if any(_is_kept(key, names) for key in keys)}
    if _has_optimizer(checkpoint, keys):
        held.add("optimizer")
    if _has_position(checkpoint):
        held.add("step or epoch")
    if _skips_batches(checkpoint.metadata):
        held.add("data loader state")
    needed = ("optimizer", "step or epoch", *_needed_parts(checkpoint, keys))
    found = ("weights", *(part for part in ("optimizer", "step or epoch", *_PARTS) if part in held))
    missing = tuple(part for part in needed if part not in held)
    if "optimizer" in missing:
        return ResumeVerdict(ResumeLevel.WEIGHTS, found, missing)
    return ResumeVerdict(ResumeLevel.WEIGHTS_AND_OPTIMIZER if missing else ResumeLevel.EXACT, found, missing)


def _keys(checkpoint: Checkpoint) -> Iterator[_Key]:
    """Yield the keys in the metadata, and those that lead to tensors, once each."""
    metadata = {} if checkpoint.derives_metadata else checkpoint.metadata
    waiting: list[tuple[int, object]] = [(0, metadata)]
    count = 0
    while waiting and count < _MOST_KEYS:
        depth, value = waiting.pop()
        items: list[tuple[str, object]] = []
        if isinstance(value, Mapping):
            items = [(str(key), one) for key, one in value.items()]
        elif isinstance(value, list):
            items = [("", one) for one in value[:_MOST_ITEMS]]
        for name, one in items:
            count += 1
            yield _Key(name, one)
            if depth < _DEEPEST:
                waiting.append((depth + 1, one))
    seen: set[str] = set()
    for tensor in checkpoint.tensors:
        for name in (*map(str, tensor.path), tensor.key or ""):
            if tensor.role is not Role.WEIGHTS and name not in seen and tensor.size:
                seen.add(name)
                yield _Key(name, tensor)


def _is_kept(key: _Key, names: re.Pattern[str]) -> bool:
    return names.search(key.name) is not None and key.holds_something and not isinstance(key.value, bool)


def _has_optimizer(checkpoint: Checkpoint, keys: list[_Key]) -> bool:
    """Tell whether optimizers are there with the state that they have at this point of the training.

    PyTorch's make their state at their first step. One without momentum has none.
    """
    has_tensors = any(tensor.role is Role.OPTIMIZER and tensor.size for tensor in checkpoint.tensors)
    metadata = {} if checkpoint.derives_metadata else checkpoint.metadata
    states = [one for one in (metadata, *(key.value for key in keys)) if _is_optimizer(one)]
    keeping = [state for state in states if any(map(_keeps_state, state[_PARAM_GROUPS]))]
    if not keeping or _is_before_first_step(checkpoint):
        return has_tensors or bool(states)
    # Of a state that consists of tensors, the metadata has no key.
    return all(_is_something(state["state"]) if "state" in state else has_tensors for state in keeping)


def _is_optimizer(value: object) -> TypeGuard[Mapping[str, Any]]:
    groups = value.get(_PARAM_GROUPS) if isinstance(value, Mapping) else None
    return isinstance(groups, list) and bool(groups) and all(isinstance(one, Mapping) for one in groups)


def _keeps_state(group: Mapping[str, Any]) -> bool:
    """Tell whether an optimizer with such a parameter group keeps state for each parameter."""
    return bool(group.get("momentum")) or not _OF_STATEFUL.isdisjoint(group)


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
    """Tell whether Hugging Face's Trainer skips the batches of before, in the order that the seed gives."""
    state, arguments = metadata.get("trainer_state"), metadata.get("training_args")
    if not isinstance(state, Mapping) or not isinstance(state.get("global_step"), int):
        return False
    return isinstance(arguments, Mapping) and arguments.get("ignore_data_skip") is False


def _needed_parts(checkpoint: Checkpoint, keys: list[_Key]) -> Iterator[str]:
    """Yield the parts that a training like this has, as far as the checkpoint tells."""
    if _may_have_scheduler(checkpoint, keys):
        yield "scheduler"
    yield "RNG state"
    if any(_is_half_precision(key) for key in keys):
        yield "gradient scaler"
    yield "data loader state"


def _may_have_scheduler(checkpoint: Checkpoint, keys: list[_Key]) -> bool:
    """Tell whether a scheduler was attached to the optimizer, or nobody knows.

    TensorFlow's and Keras's schedules are functions of the optimizer's own count.
    """
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


def _is_half_precision(key: _Key) -> bool:
    """Tell whether a setting says that gradients were scaled, as float16 needs it."""
    if key.name == "fp16":
        return key.value is True
    return key.name == "precision" and str(key.value) in _HALF
