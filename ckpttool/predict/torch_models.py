"""PyTorch's adapter: state dicts into the user's module, whole modules, TorchScript, exported programs.

Inputs and outputs are NumPy arrays by name. The name of one in a container has its keys: ``0.mask`` is
``mask`` in the first argument.

Only the child process imports this module.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor

from ckpttool.core.report import Finding, error
from ckpttool.core.text import counted
from ckpttool.predict.guard import build_from, resolve, wrong_kind
from ckpttool.predict.inputs import dtype_named, positional
from ckpttool.predict.interface import (
    Arrays,
    CannotTrain,
    Loaded,
    LoadFailed,
    Members,
    inference_only,
    leaves,
    members,
    shortened,
)
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
"""Beginning of an error whose cause is in the last lines."""
_RAISED = re.compile(r"^[\w.]*(?:Error|Exception)\b.*", re.MULTILINE)
_DEVICE_ATTRIBUTE = re.compile(r': Device = prim::GetAttr\[name="([^"]+)"\]')
_DEVICE = re.compile(r': Device = prim::Constant\[value="([^"]+)"\]')

Arguments: TypeAlias = tuple[Sequence[Any], Mapping[str, Any]]
"""Arguments of a call, by position and by keyword."""


def loaded_module(
    module: Any,
    detail: str,
    seed: int,
    *,
    optimizer: Any = None,
    template: Arguments | None = None,
    train: Callable[[Arrays], str] | None = None,
    findings: Sequence[Finding] = (),
) -> Loaded:
    """Return a module as a prediction runs it, in evaluation mode and without gradients.

    Args:
        module: The module, or another callable.
        detail: Description.
        seed: Seed of random numbers in the first run.
        optimizer: Optimizer of a training step; plain gradient descent by default.
        template: Example arguments of the checkpoint.
        train: Replaces the training step.
        findings: Remarks.
    """
    torch.manual_seed(seed)
    args, kwargs = template or ((), {})
    examples = leaves({**{str(at): one for at, one in enumerate(args)}, **kwargs}, members=_members)
    tensors = {name: one for name, one in examples if isinstance(one, torch.Tensor)}
    has_values = not any(isinstance(one, FakeTensor) for one in tensors.values())
    return Loaded(
        detail=f"PyTorch {torch.__version__}: {detail}",
        versions={"torch": torch.__version__},
        run=partial(_run, module, template),
        inputs=lambda: tuple(_spec(name, one) for name, one in tensors.items()),
        examples=partial(arrays_in, tensors if has_values else {}),
        train=train or partial(_train, module, template, optimizer),
        findings=findings,
    )


def _spec(name: str, tensor: torch.Tensor) -> InputSpec:
    """Return the specification of an example input; a symbolic size is unknown."""
    shape = tuple(size if isinstance(size, int) else None for size in tensor.shape)
    return InputSpec(name, shape, str(tensor.dtype).removeprefix("torch."))


def _run(module: Any, template: Arguments | None, inputs: Arrays) -> Arrays:
    args, kwargs = _arguments(module, template, inputs)
    try:
        with torch.no_grad():  # not inference_mode, which breaks models that differentiate inside
            output = module(*args, **kwargs)
    except (RuntimeError, torch.jit.Error) as failure:
        if device := next(filter(_is_absent_device, _devices(module)), None):
            problem = f"the program needs the device {device}, which PyTorch doesn't have here"
            raise LoadFailed(error("device-missing", problem)) from failure
        if _IN_TORCHSCRIPT not in str(failure):
            raise
        # The text has the traces that C++ adds, with the error itself after them.
        raised = _RAISED.findall(str(failure))
        words = shortened(raised[-1] if raised else str(failure).strip().splitlines()[-1])
        raise LoadFailed(error("predict-failed", words), words=words) from failure
    outputs = arrays_in(output)
    if not outputs:
        problem = f"the model returned {type(output).__name__} without a tensor"
        raise LoadFailed(error("no-output", problem))
    return outputs


def _devices(module: Any) -> Iterator[str]:
    """Yield the devices in a program: a traced one creates tensors on the device where it was traced."""
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


# Training -------------------------------------------------------------------------------------------


def _train(module: Any, template: Arguments | None, optimizer: Any, inputs: Arrays) -> str:
    """Make one training step; an error of PyTorch's means that the module can't be trained."""
    arguments = _arguments(module, template, inputs)
    try:
        return _train_one_step(module, optimizer, arguments)
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as failure:
        text = " ".join(str(failure).split())
        raise CannotTrain(f"{type(failure).__name__}: {text:.500}") from failure


def _train_one_step(module: Any, optimizer: Any, arguments: Arguments) -> str:
    """Make a step forward, backward and with the optimizer."""
    # The loss that the model was trained with is unknown. The mean square of all floating-point outputs has a
    # gradient for any model.
    trained = [one for one in module.parameters() if one.requires_grad]
    if not trained:
        raise CannotTrain("no parameter requires a gradient")
    optimizer = optimizer or torch.optim.SGD(trained, lr=1e-3)
    before = [one.detach().clone() for one in trained]
    module.train()
    args, kwargs = arguments
    output = module(*args, **kwargs)
    tensors = [one for _, one in leaves(output, members=_members) if isinstance(one, torch.Tensor)]
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
    if not moved and not is_moving:  # the end of a schedule
        return f"one step of {type(optimizer).__name__}, whose learning rate is 0"
    if not moved:
        raise LoadFailed(error("training-step-failed", "the training step changed no parameter"))
    return f"one step of {type(optimizer).__name__} changed {moved} of {counted(len(trained), 'parameter')}"


def _require_finite(tensors: list[torch.Tensor], message: str) -> None:
    for one in tensors:
        values = one.coalesce().values() if one.is_sparse else one
        if not bool(torch.isfinite(values).all()):
            raise LoadFailed(error("training-step-failed", message))


# Loaders --------------------------------------------------------------------------------------------


def _load_state(job: PredictionJob) -> Loaded:
    """Load a state dict into the user's module."""
    request = job.request
    module = build_from(request.model, **request.model_args)
    if not isinstance(module, torch.nn.Module):
        raise wrong_kind(request.model, module, "not an nn.Module")
    whole = content(job)
    state = state_dict(job, whole)
    notes = load_strictly(module, state)
    detail = f"{type(module).__name__}, {counted(len(state), 'key')}{_state_dict_hint(whole, job)}"
    return module_with_optimizer(job, module, whole, detail, notes)


def _state_dict_hint(whole: Any, job: PredictionJob) -> str:
    """Return the key of the state dict as text if the checkpoint has several, else an empty text."""
    place = job.options["state_path"]
    beside = at_path(whole, place[:-1]) if place else None
    values = beside.values() if isinstance(beside, Mapping) else ()
    dicts = (one for one in values if isinstance(one, Mapping))
    states = [one for one in dicts if any(isinstance(value, torch.Tensor) for value in one.values())]
    return f" of {'.'.join(map(str, place))!r}" if len(states) > 1 else ""


def module_with_optimizer(
    job: PredictionJob, module: Any, whole: Any, detail: str, notes: tuple[Finding, ...] = ()
) -> Loaded:
    """Return a module with the user's optimizer, if any, and its state from the checkpoint."""
    optimizer, more = _make_optimizer(job, module, whole)
    if optimizer is not None:
        detail += f"; {type(optimizer).__name__}, state of {counted(len(optimizer.state), 'parameter')}"
    findings = (*notes, *more)
    return loaded_module(module.eval(), detail, job.request.seed, optimizer=optimizer, findings=findings)


def _make_optimizer(job: PredictionJob, module: Any, whole: Any) -> tuple[Any, tuple[Finding, ...]]:
    """Return the user's optimizer with the checkpoint's state, and remarks; None if none was requested."""
    request = job.request
    if request.optimizer is None:
        return None, ()
    state = optimizer_state(job, whole)
    given = trainer_groups(module) if job.options["variant"] == "trainer" else module.parameters()
    optimizer = build_from(request.optimizer, given, **request.optimizer_args)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise wrong_kind(request.optimizer, optimizer, "not an optimizer")
    return optimizer, load_optimizer(optimizer, module, state, job.options["optimizer_key"])


def _load_module(job: PredictionJob) -> Loaded:
    """Load a whole module, which the user trusts."""
    if job.request.model is not None:
        # The pickle may name classes in ``__main__`` of the script that wrote it: the user's module has them.
        import __main__

        make = resolve(job.request.model)
        for name, value in vars(sys.modules[make.__module__]).items():
            if not hasattr(__main__, name):
                setattr(__main__, name, value)
    try:
        whole = load_trusted(job)
    except (AttributeError, ModuleNotFoundError) as failure:
        problem = f"{failure}: a whole-model pickle needs its classes (--model provides those of a script)"
        raise LoadFailed(error("load-failed", problem)) from failure
    module = at_path(whole, job.options["state_path"])
    if not isinstance(module, torch.nn.Module):
        raise LoadFailed(error("no-state-dict", f"a {type(module).__name__}, not an nn.Module"))
    return module_with_optimizer(job, module, whole, type(module).__name__)


def _load_torchscript(job: PredictionJob) -> Loaded:
    load: Any = torch.jit.load
    module = load(job.path, map_location="cpu").eval()
    bundled = module.get_all_bundled_inputs() if hasattr(module, "get_all_bundled_inputs") else ()
    template: Arguments | None = (bundled[0], {}) if bundled else None
    detail = f"TorchScript, {getattr(module, 'original_name', 'a module')}"
    return loaded_module(module, detail, job.request.seed, template=template)


def _load_export(job: PredictionJob) -> Loaded:
    """Load an exported program, whose graph is the one for evaluation."""
    program = torch.export.load(job.path)
    return loaded_module(
        program.module(),
        "exported program",
        job.request.seed,
        template=_example_arguments(program),
        train=inference_only("an exported program is for inference"),
    )


def _example_arguments(program: Any) -> Arguments:
    """Return the example arguments of an exported program, or the same with tensors without values."""
    # A program that was saved without example inputs still has their shapes and dtypes: in its graph, each
    # placeholder has a fake tensor, which has no values.
    if program.example_inputs is not None:
        args, kwargs = program.example_inputs
        return args, kwargs
    values = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
    flat = [values.get(name, name) for name in program.graph_signature.user_inputs]
    args, kwargs = torch.utils._pytree.tree_unflatten(flat, program.call_spec.in_spec)
    return args, kwargs


# Inputs and outputs ---------------------------------------------------------------------------------


def _arguments(module: Any, template: Arguments | None, inputs: Arrays) -> Arguments:
    """Return the arguments of a module for some inputs, in copies: a model may change them."""
    if template is not None:
        args, kwargs = template
        filled = [_fill_value(one, str(at), inputs) for at, one in enumerate(args)]
        return filled, {name: _fill_value(one, name, inputs) for name, one in kwargs.items()}
    tensors: Any = {name: _tensor_of(array, name) for name, array in inputs.items()}
    arguments = positional(tensors)
    _require_callable_with(getattr(module, "forward", module), arguments)
    return arguments


def _tensor_of(array: np.ndarray[Any, Any], name: str) -> torch.Tensor:
    """Return a copy of an array as a tensor."""
    if array.dtype == dtype_named("bfloat16"):
        return torch.from_numpy(array.astype(np.float32)).bfloat16()
    try:
        return torch.from_numpy(np.array(array, array.dtype.newbyteorder("="), order="C", copy=True))
    except TypeError as failure:
        dtype = "text" if array.dtype.kind in "US" else array.dtype.name
        raise LoadFailed(error("input-unfit", f"PyTorch has no tensors of {dtype}", name)) from failure


def _require_callable_with(forward: Callable[..., Any], arguments: Arguments) -> None:
    """Require that a function accepts some arguments, as far as its signature is known."""
    args, kwargs = arguments
    signature = _call_signature(forward)
    if signature is None:
        return
    takes = f"the model takes {', '.join(signature.parameters) or 'nothing'}"
    try:
        bound = signature.bind_partial(*args, **kwargs)
    except TypeError as failure:
        raise LoadFailed(error("input-unknown", f"{failure} ({takes})")) from failure
    for name, one in signature.parameters.items():
        is_needed = one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
        if is_needed and name not in bound.arguments:
            raise LoadFailed(error("input-missing", f"no input {name!r} is given ({takes})"))


def _call_signature(forward: Callable[..., Any]) -> inspect.Signature | None:
    """Return the signature of a function or a method of TorchScript; None if it is unknown."""
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


def _members(value: object) -> Members:
    """Return the items of a container with their keys, also of a named tuple or a dataclass."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return zip(value._fields, value, strict=True)
    if is_dataclass(value) and not isinstance(value, (type, Mapping)):
        return [(one.name, getattr(value, one.name)) for one in fields(value)]
    return members(value)


def _number(value: object) -> torch.Tensor | None:
    """Return a leaf as a tensor, or None if it holds no numbers."""
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, np.ndarray) and value.dtype.kind in "fciub":
        return torch.from_numpy(value)
    if isinstance(value, (int, float, complex)) and not isinstance(value, bool):
        return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
    return None


def arrays_in(output: object) -> Arrays:
    """Return the tensors and numbers in a model's output as arrays, by their keys."""
    numbers = ((name, _number(value)) for name, value in leaves(output, members=_members))
    return {name or "output": _tensor_array(one.detach().cpu()) for name, one in numbers if one is not None}


def _tensor_array(tensor: Any) -> Any:
    # NumPy has none of these types and layouts. bfloat16 keeps its bits, as a dtype of ml_dtypes; float8 and
    # the like become float32, without loss.
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.dtype is torch.bfloat16:
        return tensor.contiguous().view(torch.int16).numpy().view(dtype_named("bfloat16")).copy()
    if tensor.is_floating_point() and tensor.dtype not in (torch.float16, torch.float32, torch.float64):
        tensor = tensor.float()
    return tensor.resolve_conj().resolve_neg().numpy().copy()


def _fill_value(value: Any, name: str, inputs: Arrays) -> Any:
    """Return an argument like an example, with the tensors of the inputs."""
    if isinstance(value, torch.Tensor):
        return _tensor_of(inputs[name], name)
    if isinstance(value, Mapping):
        return type(value)((key, _fill_value(one, f"{name}.{key}", inputs)) for key, one in value.items())  # type: ignore[call-arg]  # as dicts are made
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        named = zip(value._fields, value, strict=True)
        return type(value)(*(_fill_value(one, f"{name}.{key}", inputs) for key, one in named))
    if isinstance(value, (list, tuple)):
        return type(value)(_fill_value(one, f"{name}.{at}", inputs) for at, one in enumerate(value))
    return value


LOADERS: Mapping[str, Callable[[PredictionJob], Loaded]] = {
    "state": _load_state,
    "module": _load_module,
    "torchscript": _load_torchscript,
    "export": _load_export,
}
