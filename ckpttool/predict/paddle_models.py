"""Paddle's adapter: inference models of Fluid and Paddle, and state dicts into the user's layer.

``paddle.load`` unpickles, so our own reader reads state dicts and optimizers.

Only the child process imports this module.
"""

from __future__ import annotations

import os
import re
import zlib  # noqa: F401 - before paddle, or its own copy of zlib answers Python's calls and crashes
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import paddle

from ckpttool.core.report import Finding, error
from ckpttool.core.tensor import Tensor
from ckpttool.core.text import counted
from ckpttool.predict.guard import build_from, wrong_kind
from ckpttool.predict.inputs import positional
from ckpttool.predict.interface import (
    Arrays,
    CannotTrain,
    Loaded,
    LoadFailed,
    inference_only,
    leaves,
    misfit_findings,
    require_none,
    shape_text,
)
from ckpttool.predict.own_content import at_path, content_of, require_plain
from ckpttool.predict.request import InputSpec, PredictionJob

_JSON = ".json"
_BFLOAT16 = "uint16"
"""Paddle's name for the bits of bfloat16, which NumPy lacks."""
_OUTPUT_NAME = re.compile(r"save_infer_model/scale_(\d+)\.tmp_\d+")
"""Name of an output in a saved program; the last number counts saves of the process."""
_GLOBAL_NAMES = "StructuredToParameterName@@"
"""Key in a state dict for the global names of the parameters, which an optimizer's state has."""
_NOT_SLOTS = frozenset({"LR_Scheduler", "master_weights", "optimizer_type", _GLOBAL_NAMES})
"""Keys of an optimizer's state that belong to no parameter."""


# Inference models -----------------------------------------------------------------------------------


def _loaded_program(program: Any, scope: Any) -> Loaded:
    """Return a program, with its variables in a scope, as a prediction runs it."""
    executor = paddle.static.Executor(paddle.CPUPlace())
    block = program.global_block()
    feeds = {name: block.var(name) for name in program.desc.get_feed_target_names()}
    fetches = [block.var(name) for name in program.desc.get_fetch_target_names()]

    def examples() -> Arrays:
        if not fetches:
            raise LoadFailed(error("no-output", "the program has no outputs (no fetch)"))
        return {}

    def run(inputs: Arrays) -> Arrays:
        feed = {name: _feed(array, feeds[name]) for name, array in inputs.items()}
        outputs = executor.run(program, feed=feed, fetch_list=fetches, scope=scope, return_numpy=False)
        pairs = zip(fetches, outputs, strict=True)
        return {
            _OUTPUT_NAME.sub(r"output_\1", one.name): _array(tensor, _dtype(one)) for one, tensor in pairs
        }

    held = counted(sum(map(_has_stored_value, program.list_vars())), "variable")
    return Loaded(
        detail=f"Paddle {paddle.__version__}: inference program, {held}",
        versions={"paddle": paddle.__version__},
        run=run,
        examples=examples,
        inputs=lambda: tuple(
            InputSpec(name, _variable_shape(one), _dtype(one), is_sequence=bool(one.lod_level))
            for name, one in feeds.items()
        ),
        train=inference_only("an inference program has no backward part"),
    )


def _variable_shape(one: Any) -> tuple[int | None, ...]:
    return tuple(None if size < 0 else int(size) for size in one.shape)


def _dtype(variable: Any) -> str:
    name = str(paddle.base.data_feeder.convert_dtype(variable.dtype))
    return "bfloat16" if name == _BFLOAT16 else name


def _feed(array: np.ndarray[Any, Any], variable: Any) -> Any:
    """Return an array as an input of a program; the rows of a ragged one are one sequence."""
    # An input of ragged rows (``lod_level``) has lists of lengths, one a level. All rows of the array become
    # one sequence, the only one of each level. bfloat16 is fed as its bits, in uint16.
    dtype = _dtype(variable)
    plain = array.view(np.uint16) if array.dtype.kind == "V" else array
    fed = np.ascontiguousarray(plain if dtype == "bfloat16" else plain.astype(dtype, copy=False))
    if not variable.lod_level:
        return fed
    lengths = [[1]] * (variable.lod_level - 1) + [[len(fed)]]
    return paddle.base.create_lod_tensor(fed, lengths, paddle.CPUPlace())


def _array(tensor: Any, dtype: str) -> np.ndarray[Any, Any]:
    # bfloat16 is the upper half of float32, and NumPy gets its bits as uint16.
    array = np.array(tensor)
    return (array.astype(np.uint32) << 16).view(np.float32) if dtype == "bfloat16" else array


def _has_stored_value(variable: Any) -> bool:
    kinds = paddle.base.core.VarDesc.VarType
    not_stored = (kinds.FEED_MINIBATCH, kinds.FETCH_LIST, kinds.READER, kinds.RAW)
    return variable.persistable and variable.type not in not_stored


def _is_paddle_3() -> bool:
    return int(paddle.__version__.partition(".")[0]) >= 3


def _load_inference(job: PredictionJob) -> Loaded:
    """Load an inference model: the program, and its variables from one file or from one each."""
    program_path = job.options["program"]
    if program_path.endswith(_JSON):
        return _load_json_program(program_path)
    if _is_paddle_3():  # lets it run older programs, until this process ends
        paddle.pir_utils.OldIrGuard().__enter__()
    paddle.enable_static()
    paddle.set_device("cpu")
    scope = paddle.static.Scope()
    with open(program_path, "rb") as stream:
        program = paddle.static.deserialize_program(stream.read())
    with paddle.static.scope_guard(scope):
        # load_inference_model can't be used: 2.6 reads one file a variable as a combined one.
        stored = [one for one in program.list_vars() if _has_stored_value(one)]
        if stored:
            executor = paddle.static.Executor(paddle.CPUPlace())
            paddle.static.io.load_vars(
                executor, job.options["directory"], program, vars=stored, filename=job.options["combined"]
            )
    return _loaded_program(program, scope)


def _load_json_program(program_path: str) -> Loaded:
    """Load a program of Paddle 3, which only its own loader reads."""
    if not _is_paddle_3():
        message = f"a program in JSON needs PaddlePaddle 3; this is {paddle.__version__}"
        raise LoadFailed(error("framework-too-old", message, os.path.basename(program_path)))
    layer = paddle.jit.load(program_path.removesuffix(_JSON))
    layer.eval()
    held = counted(len(layer.state_dict()), "variable")
    return Loaded(
        detail=f"Paddle {paddle.__version__}: inference program, {held}",
        versions={"paddle": paddle.__version__},
        run=partial(_run_layer, layer),
        inputs=lambda: tuple(
            InputSpec(None, _variable_shape(one), str(one.dtype).rpartition(".")[2])
            for one in layer._input_spec()
        ),
    )


# The user's layer -----------------------------------------------------------------------------------


def _load_parameters(job: PredictionJob) -> Loaded:
    """Load a state dict into the user's layer."""
    paddle.set_device("cpu")
    request = job.request
    content = _read_content(job.options["file"])
    layer = build_from(request.model, **request.model_args)
    if not isinstance(layer, paddle.nn.Layer):
        raise wrong_kind(request.model, layer, "not an nn.Layer")
    place = tuple(job.options["state_path"])
    state = at_path(content, place)
    if not isinstance(state, Mapping):
        raise LoadFailed(error("no-state-dict", f"a {type(state).__name__}, not a state dict"))
    table = state.get(_GLOBAL_NAMES)
    state = {key: value for key, value in state.items() if key != _GLOBAL_NAMES}
    require_plain(state, ".".join(map(str, place)), may_trust=False)
    own = {key: value.shape for key, value in layer.state_dict().items()}
    require_none(misfit_findings({key: np.shape(value) for key, value in state.items()}, own))
    layer.set_state_dict(state)
    optimizer, more = _optimizer(job, layer, content, table)
    layer.eval()
    return Loaded(
        detail=f"Paddle {paddle.__version__}: {type(layer).__name__}, {counted(len(state), 'key')}{more}",
        versions={"paddle": paddle.__version__},
        run=partial(_run_layer, layer),
        train=partial(_train_one_step, layer, optimizer),
    )


def _run_layer(layer: Any, inputs: Arrays) -> Arrays:
    """Return the outputs of a layer, without gradients."""
    with paddle.no_grad():
        return {name: _layer_output(one) for name, one in _output_tensors(layer, inputs)}


def _layer_output(tensor: Any) -> np.ndarray[Any, Any]:
    plain = tensor.astype("float32") if tensor.dtype == paddle.bfloat16 else tensor
    return np.array(plain.numpy())


def _output_tensors(layer: Any, inputs: Arrays) -> Iterator[tuple[str, Any]]:
    """Call a layer, and yield the tensors in its output by their keys."""
    by_place, by_name = positional({name: _tensor(array) for name, array in inputs.items()})
    for name, one in leaves(layer(*by_place, **by_name)):
        if isinstance(one, paddle.Tensor):
            yield name or "output", one


def _tensor(array: np.ndarray[Any, Any]) -> Any:
    if array.dtype.kind == "V":
        return paddle.to_tensor(array.astype(np.float32)).astype("bfloat16")
    return paddle.to_tensor(array)


def _train_one_step(layer: Any, optimizer: Any, inputs: Arrays) -> str:
    """Make one training step; the loss is the mean square of all outputs with a gradient."""
    trained = [one for one in layer.parameters() if not one.stop_gradient]
    if not trained:
        raise CannotTrain("no parameter requires a gradient")
    optimizer = optimizer or paddle.optimizer.SGD(1e-3, parameters=trained)
    before = [one.numpy() for one in trained]
    layer.train()
    outputs = [one for _, one in _output_tensors(layer, inputs) if not one.stop_gradient]
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
        raise LoadFailed(error("training-step-failed", "the training step changed no parameter"))
    return f"one step of {type(optimizer).__name__} changed {moved} of {counted(len(trained), 'parameter')}"


def _are_finite(tensors: Iterable[Any]) -> bool:
    return all(bool(paddle.isfinite(one).all()) for one in tensors)


def _read_content(path: str) -> Any:
    """Return the content of a file of ``paddle.save``, with Paddle's tensors."""
    from ckpttool.formats.paddle.files import open_pickle

    with open_pickle(path) as checkpoint:
        return content_of(checkpoint, _read_tensor)


def _read_tensor(tensor: Tensor) -> Any:
    """Return a tensor of Paddle with the same bits; bfloat16 becomes uint16."""
    name = "uint16" if tensor.dtype.name == "bfloat16" else tensor.dtype.name
    try:
        elements = np.frombuffer(bytearray(tensor.tobytes()), name)
        return paddle.to_tensor(elements.reshape(tensor.shape))
    except (TypeError, ValueError) as failure:
        message = f"tensors of {tensor.dtype.name} can't be created"
        raise LoadFailed(error("unsupported", message, tensor.name)) from failure


def _optimizer(
    job: PredictionJob, layer: Any, content: Any, table: Mapping[str, str] | None
) -> tuple[Any, str]:
    """Return the user's optimizer with its state, and a summary; None if none was requested.

    A state dict in a dict has no ``table`` of names; its tensors have them.
    """
    request = job.request
    if request.optimizer is None:
        return None, ""
    state = _optimizer_state(job, content)
    own = {key: value.name for key, value in layer.state_dict().items()}
    if not table:
        from ckpttool.formats.paddle.pickles import generated_names

        place = tuple(job.options["state_path"])
        paths = generated_names(job.options["file"]).items()
        table = {str(path[-1]): name for path, name in paths if path[:-1] == place}
    # An optimizer's state has global names such as ``linear_0.w_0``. Paddle numbers layers as they are
    # created, so in this process the parameters may have other names. The table in the state dict leads from
    # the keys, which are the same, to the names when the state was saved.
    names = {table[key]: name for key, name in own.items() if key in table}
    renamed = {}
    for key, value in state.items():
        owner = _slot_owner(key, names)
        renamed[key if owner is None else names[owner] + key[len(owner) :]] = value
    require_none(_optimizer_findings(renamed, layer))
    optimizer = build_from(request.optimizer, parameters=layer.parameters(), **request.optimizer_args)
    optimizer.set_state_dict(renamed)
    slots = counted(len(renamed.keys() - _NOT_SLOTS), "slot")
    return optimizer, f"; {type(optimizer).__name__}, state of {slots}"


def _optimizer_state(job: PredictionJob, content: Any) -> Mapping[str, Any]:
    pdopt, key = job.options.get("optimizer_file"), job.options.get("optimizer_key")
    if pdopt is not None:
        state, place = _read_content(pdopt), os.path.basename(pdopt)
    elif key is not None and key in content:
        state, place = at_path(content, (key,)), key
    else:
        message = "no .pdopt next to it, and the checkpoint has no optimizer state, or several"
        raise LoadFailed(error("optimizer-mismatch", message))
    if not isinstance(state, Mapping):
        raise LoadFailed(error("optimizer-mismatch", "not an optimizer's state", place))
    plain: Mapping[str, Any] = require_plain(state, place, may_trust=False)
    return plain


def _slot_owner(key: str, names: Iterable[str]) -> str | None:
    """Return the parameter of a slot: ``linear_0.w_0`` for ``linear_0.w_0_moment1_0``; None without one."""
    # One name may begin with another, so the longest one that fits is the parameter's.
    return max((name for name in names if key.startswith(f"{name}_")), key=len, default=None)


def _optimizer_findings(state: Mapping[str, Any], layer: Any) -> Iterable[Finding]:
    shapes = {one.name: list(one.shape) for one in layer.parameters()}
    keys = {one.name: key for key, one in layer.state_dict().items()}
    owners = {_slot_owner(slot, shapes) for slot in state.keys() - _NOT_SLOTS}
    for name in (one.name for one in layer.parameters() if not one.stop_gradient):
        if owners and name not in owners:
            yield error("optimizer-mismatch", "the optimizer has no state for it", keys[name])
    for slot, value in state.items():
        if slot in _NOT_SLOTS:
            continue
        owner, shape = _slot_owner(slot, shapes), list(np.shape(value))
        if owner is None:
            yield error("optimizer-mismatch", "it belongs to no parameter of the model", slot)
        elif int(np.prod(shape)) > 1 and shape != shapes[owner]:
            message = f"{slot} is {shape_text(shape)}, the parameter {shape_text(shapes[owner])}"
            yield error("optimizer-mismatch", message, keys[owner])


LOADERS: Mapping[str, Callable[[PredictionJob], Loaded]] = {
    "inference": _load_inference,
    "parameters": _load_parameters,
}
