"""What Paddle's layers load: a state dict, and beside it the optimizer's.

``paddle.load`` unpickles, so our own reader reads both.

Only the child process imports this module.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import paddle

from ckpttool.predict.inputs import positional
from ckpttool.predict.interface import Arrays, CannotTrain, Loaded, LoadFailed
from ckpttool.predict.matching import at_most, shape_text, unlike_model
from ckpttool.predict.models import made
from ckpttool.predict.own_content import at_path, content_of, require_plain
from ckpttool.predict.request import Job
from ckpttool.report import Finding, counted, error
from ckpttool.tensor import Tensor

_NAMES = "StructuredToParameterName@@"
"""Where ``paddle.save`` keeps the global name of each parameter, which an optimizer's state goes by."""
_BESIDE = frozenset({"LR_Scheduler", "master_weights", "optimizer_type", _NAMES})
"""Keys of an optimizer's state that belong to no parameter."""


class Layer(Loaded):
    """A layer, run in evaluation mode and without gradients."""

    def __init__(self, layer: Any, detail: str, optimizer: Any = None) -> None:
        self._layer = layer
        self._optimizer = optimizer
        self.versions = {"paddle": paddle.__version__}
        self.detail = f"Paddle {paddle.__version__}: {detail}"

    def run(self, inputs: Arrays) -> Arrays:
        return run_layer(self._layer, inputs)

    def train(self, inputs: Arrays) -> str:
        return _train_one_step(self._layer, self._optimizer, inputs)


def run_layer(layer: Any, inputs: Arrays) -> Arrays:
    """Return what a layer gives, without gradients."""
    by_place, by_name = _tensors(inputs)
    with paddle.no_grad():
        return {name: _array(one) for name, one in _flattened(layer(*by_place, **by_name))}


def _tensors(inputs: Arrays) -> tuple[list[Any], dict[str, Any]]:
    by_place, by_name = positional(inputs)
    return [_tensor(one) for one in by_place], {name: _tensor(one) for name, one in by_name.items()}


def _tensor(array: np.ndarray[Any, Any]) -> Any:
    if array.dtype.kind == "V":
        return paddle.to_tensor(array.astype(np.float32)).astype("bfloat16")
    return paddle.to_tensor(array)


def _array(tensor: Any) -> np.ndarray[Any, Any]:
    wide = tensor.astype("float32") if tensor.dtype == paddle.bfloat16 else tensor
    return np.array(wide.numpy())


def _flattened(output: object, name: str = "") -> Iterable[tuple[str, Any]]:
    """Yield the tensors in what a layer gave, under the keys that lead to them."""
    if isinstance(output, paddle.Tensor):
        yield name or "output", output
    elif isinstance(output, Mapping):
        for key, value in output.items():
            yield from _flattened(value, f"{name}.{key}" if name else str(key))
    elif isinstance(output, (list, tuple)):
        for at, value in enumerate(output):
            yield from _flattened(value, f"{name}.{at}" if name else str(at))


def _train_one_step(layer: Any, optimizer: Any, inputs: Arrays) -> str:
    """Make a step towards smaller outputs: the loss is the mean square of all that have a gradient.

    Raises:
        CannotTrain: No parameter or no output has a gradient.
        LoadFailed: A gradient or a parameter is not finite afterwards, or nothing moved.
    """
    trained = [one for one in layer.parameters() if not one.stop_gradient]
    if not trained:
        raise CannotTrain("no parameter wants a gradient")
    optimizer = optimizer or paddle.optimizer.SGD(1e-3, parameters=trained)
    before = [one.numpy() for one in trained]
    layer.train()
    by_place, by_name = _tensors(inputs)
    outputs = [one for _, one in _flattened(layer(*by_place, **by_name)) if not one.stop_gradient]
    if not outputs:
        raise CannotTrain("no output has a gradient")
    sum(one.astype("float32").square().mean() for one in outputs).backward()
    gradients = [one.grad for one in trained if one.grad is not None]
    if not _are_finite(gradients):
        raise LoadFailed(error("training-step-failed", "a gradient of the training step is not finite"))
    optimizer.step()
    if not _are_finite(trained):
        raise LoadFailed(error("training-step-failed", "a parameter is not finite after the training step"))
    moved = sum(not np.array_equal(old, new.numpy()) for old, new in zip(before, trained, strict=True))
    if not moved:
        raise LoadFailed(error("training-step-failed", "the training step moved no parameter"))
    return f"one step of {type(optimizer).__name__} moved {moved} of {counted(len(trained), 'parameter')}"


def _are_finite(tensors: Iterable[Any]) -> bool:
    return all(bool(paddle.isfinite(one).all()) for one in tensors)


# Loading --------------------------------------------------------------------------------------------


def parameters(job: Job) -> Loaded:
    """A state dict in a layer of the user's."""
    paddle.set_device("cpu")
    request = job.request
    content = _content(job.options["file"])
    layer = made(request.model or "", **request.model_args)
    if not isinstance(layer, paddle.nn.Layer):
        gave = f"{request.model} gave a {type(layer).__name__}, no nn.Layer"
        raise LoadFailed(error("no-such-model", gave))
    place = tuple(job.options["state_path"])
    state = at_path(content, place)
    if not isinstance(state, Mapping):
        raise LoadFailed(error("no-state-dict", f"a {type(state).__name__} lies there, no state dict"))
    table = state.get(_NAMES)
    state = {key: value for key, value in state.items() if key != _NAMES}
    require_plain(state, ".".join(map(str, place)), may_trust=False)
    _load_strictly(layer, state)
    optimizer, told = _optimizer(job, layer, content, table)
    layer.eval()
    return Layer(layer, f"{type(layer).__name__}, {counted(len(state), 'key')}{told}", optimizer)


def _content(path: str) -> Any:
    """Return what ``paddle.save`` wrote, with Paddle's tensors."""
    from ckpttool.formats.paddle.pickles import open_pickle

    with open_pickle(path) as checkpoint:
        return content_of(checkpoint, _read)


def _read(tensor: Tensor) -> Any:
    """Return one of our tensors as one of Paddle's, bit by bit: it knows bfloat16 by the bits of uint16.

    Raises:
        LoadFailed: It has no such type.
    """
    name = "uint16" if tensor.dtype.name == "bfloat16" else tensor.dtype.name
    try:
        elements = np.frombuffer(bytearray(tensor.tobytes()), name)
        return paddle.to_tensor(elements.reshape(tensor.shape))
    except (TypeError, ValueError) as failure:
        message = f"no tensor of {tensor.dtype.name} can be made"
        raise LoadFailed(error("unsupported", message, tensor.name)) from failure


def _load_strictly(layer: Any, state: Mapping[str, Any]) -> None:
    """Load a state dict.

    Raises:
        LoadFailed: Keys are missing, unexpected, or have other shapes.
    """
    own = {key: value.shape for key, value in layer.state_dict().items()}
    findings = unlike_model({key: np.shape(value) for key, value in state.items()}, own)
    if findings:
        raise LoadFailed(*at_most(findings))
    layer.set_state_dict(state)


def _optimizer(job: Job, layer: Any, content: Any, table: Mapping[str, str] | None) -> tuple[Any, str]:
    """Return the optimizer with its state, and what was loaded in words; None where none was asked for.

    A state dict in a dict has no ``table`` of names: its tensors have theirs themselves.

    Raises:
        LoadFailed: Its state is missing, or doesn't fit the parameters.
    """
    request = job.request
    if request.optimizer is None:
        return None, ""
    state = _optimizer_state(job, content)
    own = {key: value.name for key, value in layer.state_dict().items()}
    names = table or _names_in(job)
    renamed = _renamed(state, {names[key]: name for key, name in own.items() if key in names})
    findings = list(_unlike_parameters(renamed, layer))
    if findings:
        raise LoadFailed(*at_most(findings))
    optimizer = made(request.optimizer, parameters=layer.parameters(), **request.optimizer_args)
    optimizer.set_state_dict(renamed)
    slots = counted(len(renamed.keys() - _BESIDE), "slot")
    return optimizer, f"; {type(optimizer).__name__}, state of {slots}"


def _names_in(job: Job) -> Mapping[str, str]:
    from ckpttool.formats.paddle.pickles import names_in

    place = tuple(job.options["state_path"])
    return {str(path[-1]): name for path, name in names_in(job.options["file"]).items() if path[:-1] == place}


def _optimizer_state(job: Job, content: Any) -> Mapping[str, Any]:
    beside, key = job.options.get("optimizer_file"), job.options.get("optimizer_key")
    if beside is not None:
        state, place = _content(beside), os.path.basename(beside)
    elif key is not None and key in content:
        state, place = at_path(content, (key,)), key
    else:
        message = "no .pdopt lies beside it, and the checkpoint holds no optimizer state, or several"
        raise LoadFailed(error("optimizer-mismatch", message))
    if not isinstance(state, Mapping):
        raise LoadFailed(error("optimizer-mismatch", "no state of an optimizer lies there", place))
    found: Mapping[str, Any] = require_plain(state, place, may_trust=False)
    return found


def _renamed(state: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return a state with the names that the parameters have here: Paddle counts layers as they are made."""
    found = {}
    for key, value in state.items():
        owner = _owner(key, names)
        found[key if owner is None else names[owner] + key[len(owner) :]] = value
    return found


def _owner(key: str, names: Iterable[str]) -> str | None:
    """Return the parameter that a slot belongs to: ``linear_0.w_0`` for ``linear_0.w_0_moment1_0``."""
    return max((name for name in names if key.startswith(f"{name}_")), key=len, default=None)


def _unlike_parameters(state: Mapping[str, Any], layer: Any) -> Iterable[Finding]:
    shapes = {one.name: list(one.shape) for one in layer.parameters()}
    keys = {one.name: key for key, one in layer.state_dict().items()}
    owners = {_owner(slot, shapes) for slot in state.keys() - _BESIDE}
    for name in (one.name for one in layer.parameters() if not one.stop_gradient):
        if owners and name not in owners:
            yield error("optimizer-mismatch", "the optimizer has no state for it", keys[name])
    for slot, value in state.items():
        if slot in _BESIDE:
            continue
        owner, shape = _owner(slot, shapes), list(np.shape(value))
        if owner is None:
            yield error("optimizer-mismatch", "it belongs to no parameter of the model", slot)
        elif int(np.prod(shape)) > 1 and shape != shapes[owner]:
            message = f"{slot} is {shape_text(shape)}, the parameter {shape_text(shapes[owner])}"
            yield error("optimizer-mismatch", message, keys[owner])
