"""State dicts in the hands of their module and optimizer, and what doesn't fit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch

from ckpttool.predict.interface import LoadFailed
from ckpttool.predict.matching import at_most, missing, other_shape, shape_text, unexpected
from ckpttool.report import Finding, counted, error, note, warning

_WRAPPERS = ("module.", "_orig_mod.")
"""What DataParallel and torch.compile put before the names of what they wrap."""
_MISFIT = "optimizer-mismatch"


def load_strictly(module: Any, state: object) -> tuple[Finding, ...]:
    """Load a state dict into a module and return what is remarkable.

    Raises:
        LoadFailed: It is none, or keys are missing, unexpected, or have other shapes.
    """
    if not isinstance(state, Mapping):
        raise LoadFailed(error("no-state-dict", f"a {type(state).__name__} lies there, no state dict"))
    own = module.state_dict()
    ties = _ties(state, own)
    state, notes = _renamed(
        {**state, **{key: state[other] for key, other in ties.items()}} if ties else state, own
    )
    notes += tuple(
        note("tied-key", f"it is tied to {other!r}, and stored there", k) for k, other in ties.items()
    )
    findings = [*_misfits(state, own), *_without_values(state)]
    if findings:
        raise LoadFailed(*at_most(findings))
    # A module that was built without values takes those of the checkpoint as they are; all others keep their
    # own type, and tensors that are tied stay so.
    is_meta = any(isinstance(one, torch.Tensor) and one.is_meta for one in own.values())
    module.load_state_dict(state, strict=True, assign=is_meta)
    return (*notes, *_other_types(state, own))


def _ties(state: Mapping[str, Any], own: Mapping[str, Any]) -> Mapping[str, str]:
    """Return which key of the model has its values under which other: safetensors stores one of each."""
    known = {_memory(value): key for key, value in own.items() if key in state}
    tied = {key: known.get(_memory(value)) for key, value in own.items() if key not in state}
    return {key: other for key, other in tied.items() if other is not None}


def _memory(value: object) -> object:
    """Return what tells one tensor's memory from any other's."""
    if not isinstance(value, torch.Tensor) or value.is_meta or not _is_shaped(value) or not value.numel():
        return object()
    return value.untyped_storage().data_ptr(), value.storage_offset(), value.shape, value.stride()


def _misfits(state: Mapping[str, Any], own: Mapping[str, Any]) -> Iterator[Finding]:
    for key in own:
        if key not in state:
            yield missing(key)
    for key, value in state.items():
        if key not in own:
            yield unexpected(key)
        elif _is_shaped(value) and _is_shaped(own[key]) and value.shape != own[key].shape:
            yield other_shape(key, value.shape, own[key].shape)
        elif isinstance(own[key], torch.Tensor) and not isinstance(value, torch.Tensor):
            yield error("shape-mismatch", f"a {type(value).__name__} in the checkpoint, no tensor", key)


def _is_shaped(value: object) -> bool:
    """Tell whether a value has a shape: lazy modules get theirs from the checkpoint."""
    return isinstance(value, torch.Tensor) and not torch.nn.parameter.is_lazy(value)


def _without_values(state: Mapping[str, Any]) -> Iterator[Finding]:
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and value.is_meta:
            yield error(
                "no-values", "the checkpoint has no values for it: it was saved from the meta device", key
            )


def _other_types(state: Mapping[str, Any], own: Mapping[str, Any]) -> Iterator[Finding]:
    pairs = [(own[key], value) for key, value in state.items() if isinstance(value, torch.Tensor)]
    other = [
        (mine, value) for mine, value in pairs if isinstance(mine, torch.Tensor) and mine.dtype != value.dtype
    ]
    if other:
        mine, value = other[0]
        told = f"{_name(value.dtype)} in the checkpoint, {_name(mine.dtype)} in the model"
        yield note(
            "dtype-differs",
            f"{counted(len(other), 'tensor')} {'was' if len(other) == 1 else 'were'} cast: {told}",
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _renamed(
    state: Mapping[str, Any], own: Mapping[str, Any]
) -> tuple[Mapping[str, Any], tuple[Finding, ...]]:
    """Return a state dict under the model's own names, where just a prefix stands between the two."""
    if not state or state.keys() == own.keys():
        return state, ()
    for prefix in _prefixes(state):
        bare = _stripped(state, prefix)
        if bare.keys() == own.keys() or (prefix in _WRAPPERS and not all(k.startswith(prefix) for k in own)):
            return bare, (note("wrapper-prefix", f"each key begins with {prefix!r}, which was left out"),)
    for prefix in _prefixes(own):
        if {f"{prefix}{key}" for key in state} == own.keys():
            told = f"each key of the model begins with {prefix!r}, which was put before the checkpoint's"
            return {f"{prefix}{key}": value for key, value in state.items()}, (note("wrapper-prefix", told),)
    return state, ()


def _prefixes(keys: Iterable[str]) -> Iterator[str]:
    """Yield the prefixes, up to a dot, that all keys have, the shortest first."""
    names = [str(key) for key in keys]
    at = 0
    while (
        names and (at := names[0].find(".", at) + 1) and all(name.startswith(names[0][:at]) for name in names)
    ):
        yield names[0][:at]


def _stripped(state: Mapping[str, Any], prefix: str) -> Any:
    """Return a state dict without a prefix; the versions of its modules, which lie beside, go with it."""
    bare: Any = type(state)() if isinstance(state, dict) else {}
    bare.update(state)
    if hasattr(state, "_metadata"):
        bare._metadata = dict(state._metadata)
    torch.nn.modules.utils.consume_prefix_in_state_dict_if_present(bare, prefix)
    return bare


# Optimizers -----------------------------------------------------------------------------------------


def trainer_groups(module: Any) -> list[dict[str, Any]]:
    """Return the parameters in the two groups of the Hugging Face Trainer: with weight decay, and without.

    Biases and what normalises have none.
    """
    norms = {f"{name}." for name, one in module.named_modules() if "norm" in type(one).__name__.lower()}
    groups: tuple[list[Any], list[Any]] = ([], [])
    for name, parameter in module.named_parameters():
        is_exempt = "bias" in name or any(name.startswith(norm) for norm in norms)
        if parameter.requires_grad:
            groups[is_exempt].append(parameter)
    return [{"params": group} for group in groups]


def load_optimizer(optimizer: Any, module: Any, state: object, key: str) -> tuple[Finding, ...]:
    """Load an optimizer's state and return what is remarkable.

    Raises:
        LoadFailed: It doesn't fit the optimizer, or the parameters.
    """
    if isinstance(state, (list, tuple)) and len(state) == 1:  # Lightning's optimizer_states
        state = state[0]
    if not isinstance(state, Mapping) or not {"state", "param_groups"} <= state.keys():
        raise LoadFailed(error(_MISFIT, "no state of an optimizer lies there", key))
    state = _by_number(state, module)
    fresh = set(chain.from_iterable(group.keys() for group in optimizer.param_groups))
    known = set(chain.from_iterable(group["params"] for group in state["param_groups"]))
    strangers = [one for one in state["state"] if one not in known]
    if strangers:
        told = f"state for {counted(len(strangers), 'parameter')} that no group of the checkpoint has"
        raise LoadFailed(error(_MISFIT, told, key))
    try:
        optimizer.load_state_dict(state)
    except (ValueError, KeyError, TypeError, RuntimeError) as failure:
        hint = " (a function of yours can make the groups)" if "group" in str(failure) else ""
        raise LoadFailed(error(_MISFIT, f"its state doesn't load: {failure}{hint}", key)) from failure
    lacking = sorted(fresh - set.intersection(*(set(group) for group in optimizer.param_groups)))
    if lacking:
        told = f"it was saved by another optimizer: {type(optimizer).__name__} needs {', '.join(lacking)}"
        raise LoadFailed(error(_MISFIT, told, key))
    findings = list(_other_slots(optimizer, module))
    if findings:
        raise LoadFailed(*at_most(findings))
    return tuple(_without_state(optimizer, key))


def _by_number(state: Mapping[str, Any], module: Any) -> Mapping[str, Any]:
    """Return an optimizer's state with parameters by number, or by name in the module's order.

    A distributed checkpoint turns numbers into text, or has names in their place.
    """
    groups = state["param_groups"]
    groups = [dict(one) for one in (groups.values() if isinstance(groups, Mapping) else groups)]
    names = [name for name, _ in module.named_parameters()]
    if len(groups) == 1 and sorted(map(str, groups[0]["params"])) == sorted(names):
        groups[0]["params"] = names
    if any(isinstance(one, int) for group in groups for one in group["params"]):
        merged: dict[Any, Any] = {}
        for key, slots in state["state"].items():
            merged.setdefault(int(key), {}).update(slots)
        return {**state, "state": merged, "param_groups": groups}
    return {**state, "param_groups": groups}


def _other_slots(optimizer: Any, module: Any) -> Iterator[Finding]:
    """Yield the slots that don't fit their parameter, or that other parameters don't have."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    usual = next((slots.keys() for slots in optimizer.state.values()), ())
    for parameter, slots in optimizer.state.items():
        name = names.get(parameter, "?")
        for slot in sorted(usual ^ slots.keys()):
            yield error(_MISFIT, f"not all parameters have {slot!r}", name)
        for slot, value in slots.items():
            if isinstance(value, torch.Tensor) and value.dim() and value.shape != parameter.shape:
                shapes = f"{slot} is {shape_text(value.shape)}, the parameter {shape_text(parameter.shape)}"
                yield error(_MISFIT, shapes, name)


def _without_state(optimizer: Any, key: str) -> Iterator[Finding]:
    parameters = [one for group in optimizer.param_groups for one in group["params"] if one.requires_grad]
    lacking = sum(one not in optimizer.state for one in parameters)
    if lacking == len(parameters):
        yield note(
            "optimizer-without-state",
            "it holds no state: it was saved before its first step, or needs none",
            key,
        )
    elif lacking:
        told = f"{lacking:,} of {counted(len(parameters), 'parameter')} have no state"
        yield warning("optimizer-state-missing", told, key)
