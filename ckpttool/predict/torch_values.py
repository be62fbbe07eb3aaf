"""What goes into a PyTorch model and what comes out, as NumPy arrays by name.

A tensor inside a container has the keys that lead to it as its name: ``0.mask`` is ``mask`` in the first
argument.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from ckpttool.predict.inputs import dtype_named, positional
from ckpttool.predict.interface import Arrays, LoadFailed
from ckpttool.report import error


class Arguments(NamedTuple):
    """What a model is called with: by position, and by keyword."""

    by_place: tuple[Any, ...]
    by_name: Mapping[str, Any]


def arguments(inputs: Arrays) -> Arguments:
    """Return inputs as tensors of their own: a model may change what it is given.

    Raises:
        LoadFailed: PyTorch has no tensors of such values.
    """
    tensors: Any = {name: tensor_of(array, name) for name, array in inputs.items()}
    by_place, by_name = positional(tensors)
    return Arguments(tuple(by_place), by_name)


def tensor_of(array: np.ndarray[Any, Any], name: str) -> torch.Tensor:
    """Return a copy of an array as a tensor.

    Raises:
        LoadFailed: PyTorch has no tensors of such values.
    """
    if array.dtype == dtype_named("bfloat16"):
        return torch.from_numpy(array.astype(np.float32)).bfloat16()
    try:
        return torch.from_numpy(np.array(array, array.dtype.newbyteorder("="), order="C", copy=True))
    except TypeError as failure:
        told = f"there are no tensors of {'text' if array.dtype.kind in 'US' else array.dtype.name}"
        raise LoadFailed(error("input-unfit", told, name)) from failure


def require_callable_with(forward: Callable[..., Any], given: Arguments) -> None:
    """Require that a function takes some arguments, as far as its signature tells.

    Raises:
        LoadFailed: It needs more, or takes fewer.
    """
    signature = _signature(forward)
    if signature is None:
        return
    takes = f"the model takes {', '.join(signature.parameters) or 'nothing'}"
    try:
        bound = signature.bind_partial(*given.by_place, **given.by_name)
    except TypeError as failure:
        raise LoadFailed(error("input-unknown", f"{failure} ({takes})")) from failure
    for name, one in signature.parameters.items():
        is_needed = one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
        if is_needed and name not in bound.arguments:
            raise LoadFailed(error("input-missing", f"no input {name!r} is given ({takes})"))


def _signature(forward: Callable[..., Any]) -> inspect.Signature | None:
    """Return what a function takes, TorchScript's included; None where nobody knows."""
    if isinstance(forward, torch.ScriptMethod):
        empty, kind = inspect.Parameter.empty, inspect.Parameter.POSITIONAL_OR_KEYWORD
        given = [
            (one.name, None if one.has_default_value() else empty) for one in forward.schema.arguments[1:]
        ]
        return inspect.Signature([inspect.Parameter(name, kind, default=value) for name, value in given])
    try:
        return inspect.signature(forward)
    except (ValueError, TypeError):
        return None  # written in another language


# Containers -----------------------------------------------------------------------------------------


def leaves(value: object, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield what is no container, with the keys that lead to it."""
    members = _members(value)
    if members is None:
        yield name, value
    else:
        for key, inner in members:
            yield from leaves(inner, f"{name}.{key}" if name else str(key))


def _members(value: object) -> Iterable[tuple[object, object]] | None:
    """Return what lies in a container, with its keys; None for what is none."""
    if isinstance(value, Mapping):
        return value.items()
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return zip(value._fields, value, strict=True)
    if isinstance(value, (list, tuple)):
        return enumerate(value)
    if is_dataclass(value) and not isinstance(value, type):
        return [(one.name, getattr(value, one.name)) for one in fields(value)]
    return None


def _number(value: object) -> torch.Tensor | None:
    """Return a leaf as a tensor, or None where it holds no numbers."""
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, np.ndarray) and value.dtype.kind in "fciub":
        return torch.from_numpy(value)
    if isinstance(value, (int, float, complex)) and not isinstance(value, bool):
        return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
    return None


def arrays_in(output: object) -> Arrays:
    """Return what a model gave, as arrays."""
    found = ((name, _number(value)) for name, value in leaves(output))
    return {name or "output": _array(one.detach().cpu()) for name, one in found if one is not None}


def _array(tensor: Any) -> Any:
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.dtype is torch.bfloat16:
        return tensor.contiguous().view(torch.int16).numpy().view(dtype_named("bfloat16")).copy()
    if tensor.is_floating_point() and tensor.dtype not in (torch.float16, torch.float32, torch.float64):
        tensor = tensor.float()
    return tensor.resolve_conj().resolve_neg().numpy().copy()


def filled(template: Arguments, inputs: Arrays) -> Arguments:
    """Return arguments like those of a template, with other tensors in it."""
    by_place = tuple(_filled(one, str(at), inputs) for at, one in enumerate(template.by_place))
    return Arguments(by_place, {name: _filled(one, name, inputs) for name, one in template.by_name.items()})


def _filled(value: Any, name: str, inputs: Arrays) -> Any:
    if isinstance(value, torch.Tensor):
        return tensor_of(inputs[name], name)
    if isinstance(value, Mapping):
        return type(value)((key, _filled(one, f"{name}.{key}", inputs)) for key, one in value.items())  # type: ignore[call-arg]  # as dicts are made
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        named = zip(value._fields, value, strict=True)
        return type(value)(*(_filled(one, f"{name}.{key}", inputs) for key, one in named))
    if isinstance(value, (list, tuple)):
        return type(value)(_filled(one, f"{name}.{at}", inputs) for at, one in enumerate(value))
    return value


def tensors_of(template: Arguments) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in arguments, under the names that inputs have."""
    given = {**{str(at): one for at, one in enumerate(template.by_place)}, **template.by_name}
    yield from ((name, one) for name, one in leaves(given) if isinstance(one, torch.Tensor))
