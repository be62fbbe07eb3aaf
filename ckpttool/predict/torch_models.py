"""PyTorch's adapter: state dicts into the user's module, whole modules, TorchScript, exported programs.

Inputs and outputs are NumPy arrays by name; one inside a container is named by the keys that lead to it:
``0.mask`` is ``mask`` in the first argument.

Only the child process imports this module.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor

from ckpttool.core.report import Finding, error
from ckpttool.core.text import counted
from ckpttool.predict.guard import build_from, resolve, shown
from ckpttool.predict.inputs import dtype_named, positional
from ckpttool.predict.interface import Arrays, CannotTrain, Loaded, LoadFailed
from ckpttool.predict.own_content import at_path
from ckpttool.predict.request import InputSpec, PredictionJob
from ckpttool.predict.torch_state import (
    content,
    load_optimizer,
    load_strictly,
    load_trusted,
    optimizer_state,
    state_dict,
    trainer_groups,
)

_IN_TORCHSCRIPT = "failed in the TorchScript interpreter"
"""How a long story begins that says what happened only below the lines of code."""
_RAISED = re.compile(r"^[\w.]*(?:Error|Exception)\b.*", re.MULTILINE)
_DEVICE_ATTRIBUTE = re.compile(r': Device = prim::GetAttr\[name="([^"]+)"\]')
_DEVICE = re.compile(r': Device = prim::Constant\[value="([^"]+)"\]')


class TorchModel(Loaded):
    """A module, run in evaluation mode and without gradients.

    Args:
        module: What is called.
        detail: What it is, in words.
        seed: What a model that draws numbers begins from, at the first run.
        optimizer: What makes a training step, or None for plain gradient descent.
        template: Arguments of the kind that it takes, where the checkpoint has any.
    """

    def __init__(
        self, module: Any, detail: str, seed: int, *, optimizer: Any = None, template: Arguments | None = None
    ) -> None:
        self.detail = f"PyTorch {torch.__version__}: {detail}"
        self.versions: Mapping[str, str] = {"torch": torch.__version__}
        self._module = module
        self._optimizer = optimizer
        self._template = template
        torch.manual_seed(seed)

    def inputs(self) -> tuple[InputSpec, ...]:
        specs = []
        for name, one in tensors_of(self._template) if self._template else ():
            shape = tuple(size if isinstance(size, int) else None for size in one.shape)
            specs.append(InputSpec(name, shape, str(one.dtype).removeprefix("torch.")))
        return tuple(specs)

    def examples(self) -> Arrays:
        tensors = {} if self._template is None else dict(tensors_of(self._template))
        return {} if any(isinstance(one, FakeTensor) for one in tensors.values()) else arrays_in(tensors)

    def run(self, inputs: Arrays) -> Arrays:
        given = self._arguments(inputs)
        try:
            with torch.no_grad():  # not inference_mode: models that differentiate inside would break
                output = self._module(*given.by_place, **given.by_name)
        except (RuntimeError, torch.jit.Error) as failure:
            if device := next(filter(_is_absent_device, _devices(self._module)), None):
                problem = f"the program asks for the device {device}, which PyTorch doesn't have here"
                raise LoadFailed(error("device-missing", problem)) from failure
            if _IN_TORCHSCRIPT not in str(failure):
                raise
            raise LoadFailed(error("predict-failed", _script_error(str(failure)))) from failure
        outputs = arrays_in(output)
        if not outputs:
            problem = f"the model gives {type(output).__name__}, and no tensor in it"
            raise LoadFailed(error("no-output", problem))
        return outputs

    def train(self, inputs: Arrays) -> str:
        given = self._arguments(inputs)
        try:
            return train_one_step(self._module, self._optimizer, given)
        except (RuntimeError, ValueError, TypeError, NotImplementedError) as failure:
            text = " ".join(str(failure).split())
            raise CannotTrain(f"{type(failure).__name__}: {text:.500}") from failure

    def _arguments(self, inputs: Arrays) -> Arguments:
        if self._template is not None:
            return fill_template(self._template, inputs)
        given = arguments(inputs)
        require_callable_with(getattr(self._module, "forward", self._module), given)
        return given


def _devices(module: Any) -> Iterator[str]:
    """Yield the devices that a program names: what was traced on one makes its tensors there."""
    if isinstance(module, torch.jit.ScriptModule):
        text = str(module.inlined_graph)
        yield from _DEVICE.findall(text)
        attributes = dict.fromkeys(_DEVICE_ATTRIBUTE.findall(text))
        held = (getattr(one, name, None) for one in module.modules() for name in attributes)
        yield from (str(one) for one in held if isinstance(one, torch.device))
    elif isinstance(module, torch.fx.GraphModule):
        for node in module.graph.nodes:
            values = (*node.args, *node.kwargs.values())
            yield from (str(one) for one in values if isinstance(one, torch.device))


def _is_absent_device(device: str) -> bool:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError):  # which of them, depends on how PyTorch was built
        return True
    return False


def _script_error(text: str) -> str:
    """Return what was raised in a TorchScript, without the lists that C++ adds to it."""
    raised = _RAISED.findall(text)
    last = raised[-1] if raised else text.strip().splitlines()[-1]
    return last if len(last) <= 300 else f"{last[:299]}…"


# Training -------------------------------------------------------------------------------------------


def train_one_step(module: Any, optimizer: Any, given: Arguments) -> str:
    """Make a step forward, backward and with the optimizer; the child ends afterwards.

    The loss is the mean square of all floating outputs, which any model has a gradient of."""
    trained = [one for one in module.parameters() if one.requires_grad]
    if not trained:
        raise CannotTrain("no parameter wants a gradient")
    optimizer = optimizer or torch.optim.SGD(trained, lr=1e-3)
    before = [one.detach().clone() for one in trained]
    module.train()
    output = module(*given.by_place, **given.by_name)
    tensors = [one for _, one in leaves(output) if isinstance(one, torch.Tensor)]
    differentiable = [one for one in tensors if one.requires_grad and one.is_floating_point()]
    losses: list[Any] = [one.float().square().mean() for one in differentiable]
    if not losses:
        raise CannotTrain("no output has a gradient")
    optimizer.zero_grad()
    sum(losses).backward()
    _require_finite(
        [one.grad for one in trained if one.grad is not None], "a gradient of the training step is not finite"
    )
    optimizer.step()
    _require_finite(trained, "a parameter is not finite after the training step")
    moved = sum(not torch.equal(old, new) for old, new in zip(before, trained, strict=True))
    is_moving = any(float(group["lr"]) for group in optimizer.param_groups if "lr" in group)
    if not moved and not is_moving:  # where a schedule ends
        return f"one step of {type(optimizer).__name__}, whose learning rate is 0"
    if not moved:
        raise LoadFailed(error("training-step-failed", "the training step moved no parameter"))
    return f"one step of {type(optimizer).__name__} moved {moved} of {counted(len(trained), 'parameter')}"


def _require_finite(tensors: list[torch.Tensor], message: str) -> None:
    for one in tensors:
        values = one.coalesce().values() if one.is_sparse else one
        if not bool(torch.isfinite(values).all()):
            raise LoadFailed(error("training-step-failed", message))


# Loaders --------------------------------------------------------------------------------------------


def _load_state(job: PredictionJob) -> Loaded:
    """A state dict in a model of the user's."""
    request = job.request
    module = build_from(request.model or "", **request.model_args)
    if not isinstance(module, torch.nn.Module):
        raise LoadFailed(
            error("no-such-model", f"{shown(request.model)} gave a {type(module).__name__}, no nn.Module")
        )
    whole = content(job)
    state = state_dict(job, whole)
    notes = load_strictly(module, state)
    detail = f"{type(module).__name__}, {counted(len(state), 'key')}{_state_dict_hint(whole, job)}"
    return _model_with_optimizer(job, module, whole, detail, notes)


def _state_dict_hint(whole: Any, job: PredictionJob) -> str:
    """Return in words where a state dict lay, if another one lies beside it."""
    place = job.options["state_path"]
    beside = at_path(whole, place[:-1]) if place else None
    dicts = (
        [one for one in beside.values() if isinstance(one, Mapping)] if isinstance(beside, Mapping) else []
    )
    states = [one for one in dicts if any(isinstance(value, torch.Tensor) for value in one.values())]
    return f" of {'.'.join(map(str, place))!r}" if len(states) > 1 else ""


def _model_with_optimizer(
    job: PredictionJob, module: Any, whole: Any, detail: str, notes: tuple[Finding, ...] = ()
) -> TorchModel:
    """Return a module with the optimizer that was asked for, and its state."""
    optimizer, more = make_optimizer(job, module, whole)
    notes += more
    if optimizer is not None:
        detail += f"; {type(optimizer).__name__}, state of {counted(len(optimizer.state), 'parameter')}"
    loaded = TorchModel(module.eval(), detail, job.request.seed, optimizer=optimizer)
    loaded.findings = notes
    return loaded


def make_optimizer(job: PredictionJob, module: Any, whole: Any) -> tuple[Any, tuple[Finding, ...]]:
    """Return the user's optimizer with the checkpoint's state, if one was asked for, and notes on it."""
    request = job.request
    if request.optimizer is None:
        return None, ()
    state = optimizer_state(job, whole)
    given = trainer_groups(module) if job.options["variant"] == "trainer" else module.parameters()
    optimizer = build_from(request.optimizer, given, **request.optimizer_args)
    if not isinstance(optimizer, torch.optim.Optimizer):
        problem = f"{shown(request.optimizer)} gave a {type(optimizer).__name__}, no optimizer"
        raise LoadFailed(error("no-such-model", problem))
    return optimizer, load_optimizer(optimizer, module, state, job.options["optimizer_key"])


def _load_module(job: PredictionJob) -> Loaded:
    """A whole module, which the user trusts."""
    if job.request.model is not None:
        # The pickle may name classes in ``__main__`` that its script defined: the user's module has them.
        import __main__

        make = resolve(job.request.model)
        for name, value in vars(sys.modules[make.__module__]).items():
            if not hasattr(__main__, name):
                setattr(__main__, name, value)
    try:
        whole = load_trusted(job)
    except (AttributeError, ModuleNotFoundError) as failure:
        problem = f"{failure}: a whole-model pickle needs its classes (--model lends those of a script)"
        raise LoadFailed(error("load-failed", problem)) from failure
    module = at_path(whole, job.options["state_path"])
    if not isinstance(module, torch.nn.Module):
        raise LoadFailed(error("no-state-dict", f"a {type(module).__name__} lies there, no nn.Module"))
    return _model_with_optimizer(job, module, whole, type(module).__name__)


def _load_torchscript(job: PredictionJob) -> Loaded:
    load: Any = torch.jit.load
    module = load(job.path, map_location="cpu").eval()
    template = None
    if hasattr(module, "get_all_bundled_inputs") and (bundled := module.get_all_bundled_inputs()):
        template = Arguments(tuple(bundled[0]), {})
    detail = f"TorchScript, {getattr(module, 'original_name', 'a module')}"
    return TorchModel(module, detail, job.request.seed, template=template)


def _load_export(job: PredictionJob) -> Loaded:
    program = torch.export.load(job.path)
    template = _template(program)
    return EvaluationModel(program.module(), "exported program", job.request.seed, template=template)


class EvaluationModel(TorchModel):
    """A program whose graph is the one for evaluation."""

    def train(self, inputs: Arrays) -> str:
        raise CannotTrain("an exported program is for inference")


def _template(program: Any) -> Arguments:
    """Return arguments of the kind that a program takes: its own examples, or tensors without values."""
    if program.example_inputs is not None:
        by_place, by_name = program.example_inputs
        return Arguments(tuple(by_place), by_name)
    values = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
    flat = [values.get(name, name) for name in program.graph_signature.user_inputs]
    by_place, by_name = torch.utils._pytree.tree_unflatten(flat, program.call_spec.in_spec)
    return Arguments(tuple(by_place), by_name)


# Inputs and outputs ---------------------------------------------------------------------------------


class Arguments(NamedTuple):
    """What a model is called with: by position, and by keyword."""

    by_place: tuple[Any, ...]
    by_name: Mapping[str, Any]


def arguments(inputs: Arrays) -> Arguments:
    """Return inputs as tensors of their own: a model may change what it is given."""
    tensors: Any = {name: tensor_of(array, name) for name, array in inputs.items()}
    by_place, by_name = positional(tensors)
    return Arguments(tuple(by_place), by_name)


def tensor_of(array: np.ndarray[Any, Any], name: str) -> torch.Tensor:
    """Return a copy of an array as a tensor."""
    if array.dtype == dtype_named("bfloat16"):
        return torch.from_numpy(array.astype(np.float32)).bfloat16()
    try:
        return torch.from_numpy(np.array(array, array.dtype.newbyteorder("="), order="C", copy=True))
    except TypeError as failure:
        dtype = "text" if array.dtype.kind in "US" else array.dtype.name
        raise LoadFailed(error("input-unfit", f"there are no tensors of {dtype}", name)) from failure


def require_callable_with(forward: Callable[..., Any], given: Arguments) -> None:
    """Require that a function takes some arguments, as far as its signature tells."""
    signature = _call_signature(forward)
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


def _call_signature(forward: Callable[..., Any]) -> inspect.Signature | None:
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


def leaves(value: object, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield what is no container, with the keys that lead to it."""
    members = _container_members(value)
    if members is None:
        yield name, value
    else:
        for key, inner in members:
            yield from leaves(inner, f"{name}.{key}" if name else str(key))


def _container_members(value: object) -> Iterable[tuple[object, object]] | None:
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
    numbers = ((name, _number(value)) for name, value in leaves(output))
    return {name or "output": _tensor_array(one.detach().cpu()) for name, one in numbers if one is not None}


def _tensor_array(tensor: Any) -> Any:
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.dtype is torch.bfloat16:
        return tensor.contiguous().view(torch.int16).numpy().view(dtype_named("bfloat16")).copy()
    if tensor.is_floating_point() and tensor.dtype not in (torch.float16, torch.float32, torch.float64):
        tensor = tensor.float()
    return tensor.resolve_conj().resolve_neg().numpy().copy()


def fill_template(template: Arguments, inputs: Arrays) -> Arguments:
    """Return arguments like those of a template, with other tensors in it."""
    by_place = tuple(_fill_value(one, str(at), inputs) for at, one in enumerate(template.by_place))
    return Arguments(
        by_place, {name: _fill_value(one, name, inputs) for name, one in template.by_name.items()}
    )


def _fill_value(value: Any, name: str, inputs: Arrays) -> Any:
    if isinstance(value, torch.Tensor):
        return tensor_of(inputs[name], name)
    if isinstance(value, Mapping):
        return type(value)((key, _fill_value(one, f"{name}.{key}", inputs)) for key, one in value.items())  # type: ignore[call-arg]  # as dicts are made
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        named = zip(value._fields, value, strict=True)
        return type(value)(*(_fill_value(one, f"{name}.{key}", inputs) for key, one in named))
    if isinstance(value, (list, tuple)):
        return type(value)(_fill_value(one, f"{name}.{at}", inputs) for at, one in enumerate(value))
    return value


def tensors_of(template: Arguments) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in arguments, under the names that inputs have."""
    given = {**{str(at): one for at, one in enumerate(template.by_place)}, **template.by_name}
    yield from ((name, one) for name, one in leaves(given) if isinstance(one, torch.Tensor))


LOADERS: Mapping[str, Callable[[PredictionJob], Loaded]] = {
    "state": _load_state,
    "module": _load_module,
    "torchscript": _load_torchscript,
    "export": _load_export,
}
