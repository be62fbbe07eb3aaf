"""How a training resumes from a checkpoint: exactly, with weights and optimizer, or with weights only.

What was not found is missing, unless something in the checkpoint says that this training had none.

Sources: huggingface/transformers ``trainer.py`` (``_load_rng_state``, ``_inner_training_loop``: it skips the
batches before ``global_step``, whose order the seed gives); pytorch ``torch/optim/lr_scheduler.py``
(``LRScheduler.__init__`` puts ``initial_lr`` into the groups of its optimizer); lightning
``pytorch/trainer/connectors/checkpoint_connector.py`` (``dump_checkpoint``).
"""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.tensor import Path, Role, Tensor
from ckpttool.formats.traits import traits_of
from ckpttool.ops.training_parts import PARTS, Key, consumes_samples, held_parts, keys_in

if TYPE_CHECKING:
    from typing import TypeGuard

_OPTIMIZER, _STATE, _STEP = "optimizer", "state", "step"
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


def resume_verdict(checkpoint: Checkpoint) -> ResumeVerdict:
    """Return how a training resumes from an open checkpoint; no value of a tensor is read."""
    if not any(tensor.role is Role.WEIGHTS for tensor in checkpoint.tensors):
        return ResumeVerdict(ResumeLevel.NONE, missing=("weights",))
    keys = list(keys_in({} if checkpoint.derives_metadata else checkpoint.metadata))
    held = held_parts(keys, checkpoint.tensors)
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


def _lacking_optimizer(checkpoint: Checkpoint, keys: list[Key]) -> str | None:
    """Return what is missing of the state that the optimizers have at this point of the training.

    PyTorch's make the state of a parameter at their first step with a gradient for it; one without momentum
    has none. Nothing tells a parameter that never had a gradient from one whose state was lost, so a state of
    some parameters only is never whole.
    """
    tensors = [one for one in checkpoint.tensors if one.role is Role.OPTIMIZER and one.size]
    optimizers = [(key.keys, key.value) for key in keys if not key.is_setting and _is_optimizer(key.value)]
    if not tensors and not optimizers:
        return _OPTIMIZER
    expected, found = _count_parameters(optimizers, tensors)
    if found == expected or _is_before_first_step(checkpoint):
        return None
    return f"optimizer state for {expected - found:,} of {expected:,} parameters" if found else _OPTIMIZER


def _count_parameters(
    optimizers: list[tuple[Path, Mapping[str, Any]]], tensors: list[Tensor]
) -> tuple[int, int]:
    """Return of how many parameters optimizers keep state, and of how many it is there."""
    with_state: dict[Path, set[str]] = defaultdict(set)
    for tensor in tensors:
        for at, key in enumerate(tensor.path[:-1]):
            if key == _STATE:
                names = [] if tensor.path[-1] == _STEP else [str(tensor.path[at + 1])]
                with_state[tensor.path[:at]].update(names)
    # Megatron and others keep the state apart from the groups.
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
    """Return the parameters of whose state more than a step is plain data."""
    return {
        str(name)
        for name, state in states.items()
        if isinstance(state, Mapping)
        and any(map(_is_something, (state[key] for key in state if key != _STEP)))
    }


def _stateful_parameters(state: Mapping[str, Any]) -> Iterator[str]:
    """Yield the parameters for which an optimizer keeps state: "" for all of a group that doesn't list them.

    LBFGS keeps all of it with its first parameter.
    """
    for group in state[_PARAM_GROUPS]:
        if _keeps_state(group):
            parameters = group.get("params")
            names = [*map(str, parameters)] if isinstance(parameters, list) else [""]
            yield from names[:1] if "history_size" in group else names


def _is_something(value: object) -> bool:
    """Tell whether a value has anything but empty containers and None."""
    if isinstance(value, Mapping | list | tuple):
        return any(map(_is_something, value.values() if isinstance(value, Mapping) else value))
    return value is not None and value != ""


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


def _needed_parts(checkpoint: Checkpoint, keys: list[Key]) -> Iterator[str]:
    """Yield the parts that a training like this has, as far as the checkpoint tells."""
    if _may_have_scheduler(checkpoint, keys):
        yield "scheduler"
    yield "RNG state"
    if any(_is_half_precision(key) for key in keys):
        yield "gradient scaler"
    yield "data loader state"


def _may_have_scheduler(checkpoint: Checkpoint, keys: list[Key]) -> bool:
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


def _is_half_precision(key: Key) -> bool:
    """Tell whether a setting says that gradients were scaled, as float16 needs it."""
    if key.name == "fp16":
        return key.value is True
    return key.name == "precision" and str(key.value) in _HALF
