"""How a Keras model is called and trained for a step, of version 2 or 3; it imports neither.

Only the child process imports this module.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ckpttool.predict.failures import told
from ckpttool.predict.golden import read_recording
from ckpttool.predict.guard import code_of_user
from ckpttool.predict.inputs import made_up, positional, read_arrays
from ckpttool.predict.interface import Arrays, CannotTrain, LoadFailed
from ckpttool.predict.request import InputSpec, Request
from ckpttool.report import counted, error

# Inputs ---------------------------------------------------------------------------------------------


def keras_inputs(model: Any) -> tuple[InputSpec, ...]:
    """Return what a model takes, where it knows."""
    leaves = list(_leaves(_input_structure(model)))
    if not leaves:
        return _built_on(model)
    if len(leaves) == 1 and not leaves[0][0]:
        return (_spec(None, leaves[0][1].shape, leaves[0][1].dtype),)
    return tuple(
        _spec(name if not name.isdecimal() else _tensor_name(one), one.shape, one.dtype)
        for name, one in leaves
    )


def _input_structure(model: Any) -> Any:
    """Return a model's symbolic inputs as it was made with them, or None; Keras raises instead."""
    for name in ("input", "inputs"):
        try:
            found = getattr(model, name, None)
        except (AttributeError, ValueError, RuntimeError):
            continue
        if found is not None:
            return found[0] if name == "inputs" and len(found) == 1 else found
    return None


def _leaves(structure: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the tensors of a structure with the keys that lead to them, joined by dots."""
    if isinstance(structure, Mapping):
        for key, one in structure.items():
            yield from _leaves(one, _under(name, key))
    elif isinstance(structure, (list, tuple)):
        for at, one in enumerate(structure):
            yield from _leaves(one, _under(name, at))
    elif structure is not None:
        yield name, structure


def _tensor_name(tensor: Any) -> str:
    return str(tensor.name).partition(":")[0]


def _spec(name: str | None, shape: Iterable[Any], dtype: Any) -> InputSpec:
    sizes = tuple(None if size is None else int(size) for size in shape)
    return InputSpec(name, sizes, str(getattr(dtype, "name", dtype)))


def _built_on(model: Any) -> tuple[InputSpec, ...]:
    """Return the shapes that a model of a class of the user's was built on, as it recorded them."""
    config: Mapping[str, Any] = (getattr(model, "get_build_config", None) or dict)() or {}
    dtype = getattr(model, "input_dtype", None) or "float32"
    shape = config.get("input_shape")
    if shape is not None and _is_shape(shape):
        return (_spec(None, shape, dtype),)
    shapes = config.get("shapes_dict") or {}
    if not shapes or not all(map(_is_shape, shapes.values())):
        return ()
    return tuple(_spec(key.removesuffix("_shape"), one, dtype) for key, one in shapes.items())


def _is_shape(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(size is None or isinstance(size, int) for size in value)


def inputs_to_build(request: Request) -> Arrays:
    """Return what a model can be called on before its weights are loaded: the user's input, or made up."""
    if request.input_shapes:
        return made_up(request.input_shapes, request.seed)
    if request.input:
        return read_arrays(request.input, "input-unreadable")
    return read_recording(request.expect).inputs if request.expect else {}


def build(model: Any, request: Request) -> None:
    """Run a model once that makes its weights only then, so that they can be loaded.

    Raises:
        LoadFailed: Nothing says what to run it on, or it can't.
    """
    if getattr(model, "built", True):
        return
    given = inputs_to_build(request)
    if not given:
        text = "the model makes its weights when it first runs: --input-shape 1,224,224,3 says on what"
        raise LoadFailed(error("model-not-built", text))
    with told("load-failed"), code_of_user():
        call(model, given)


def call(model: Any, inputs: Arrays, *, training: bool = False) -> Any:
    """Return what a Keras model gives."""
    args, named = arguments(model, inputs)
    return model(*args, **named, training=training)


def arguments(model: Any, inputs: Arrays) -> tuple[list[Any], dict[str, Any]]:
    """Return inputs as a model takes them: as a structure like that of its own inputs, or by its parameters.

    Raises:
        LoadFailed: There are more of them, or fewer, than the model takes.
    """
    given = {name: _text_tensor(array) for name, array in inputs.items()}
    structure = _input_structure(model)
    if structure is None:
        return _by_parameters(model, given)
    leaves = list(_leaves(structure))
    if len(leaves) != len(given):
        takes = f"the model takes {counted(len(leaves), 'input')}, not {len(given)}"
        raise LoadFailed(error("input-mismatch", takes))
    ordered = (
        list(given.values())
        if len(leaves) == 1
        else [_of_leaf(given, at, *leaf) for at, leaf in enumerate(leaves)]
    )
    return [_filled(structure, iter(ordered))], {}


def _of_leaf(given: Mapping[str, Any], at: int, name: str, tensor: Any) -> Any:
    for key in (name, _tensor_name(tensor), str(at)):
        if key in given:
            return given[key]
    raise LoadFailed(error("input-missing", f"no input {_tensor_name(tensor)!r} is given"))


def _filled(structure: Any, values: Iterator[Any]) -> Any:
    """Return a structure with other leaves."""
    if isinstance(structure, Mapping):
        return {key: _filled(one, values) for key, one in structure.items()}
    if isinstance(structure, (list, tuple)):
        return [_filled(one, values) for one in structure]
    return next(values)


def _by_parameters(model: Any, given: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return inputs for a model whose class defines ``call``: by its parameters where the names fit."""
    by_place, by_name = positional(given)
    parameters = inspect.signature(model.call).parameters
    takes = [name for name in parameters if name not in ("training", "mask")]
    if by_name and by_name.keys() <= set(takes):
        return by_place, dict(by_name)
    if by_name:
        return [dict(given) if len(given) > 1 else next(iter(given.values()))], {}
    return (by_place, {}) if len(by_place) <= 1 or len(takes) >= len(by_place) else ([by_place], {})


def _text_tensor(array: np.ndarray[Any, Any]) -> Any:
    """Return texts as TensorFlow's, which alone has them; what else there is, Keras takes as it is."""
    if array.dtype.kind not in "USO":
        return array
    import tensorflow as tf

    return tf.constant(array)


# Outputs --------------------------------------------------------------------------------------------


def plain_outputs(output: Any, name: str = "") -> dict[str, np.ndarray[Any, Any]]:
    """Return the tensors in what a model gave, under the keys that lead to them."""
    if output is None:
        return {}
    if isinstance(output, Mapping):
        return {k: v for key, one in output.items() for k, v in plain_outputs(one, _under(name, key)).items()}
    if hasattr(output, "row_splits"):  # ragged
        return plain_outputs({"values": output.values, "row_splits": output.row_splits}, name)
    if hasattr(output, "dense_shape"):  # sparse; a session gives it as a NamedTuple
        return plain_outputs({"indices": output.indices, "values": output.values}, name)
    if hasattr(output, "_fields"):  # a NamedTuple
        return plain_outputs(output._asdict(), name)
    if isinstance(output, (list, tuple)):
        return {
            k: v for at, one in enumerate(output) for k, v in plain_outputs(one, _under(name, at)).items()
        }
    return {name or "output": _plain(output)}


def _plain(output: Any) -> np.ndarray[Any, Any]:
    if hasattr(output, "detach"):
        output = output.detach().cpu()  # a tensor of Keras on PyTorch, with a gradient
    array = np.asarray(output.numpy() if hasattr(output, "numpy") else output)
    if array.dtype == object:
        return array.astype("S")
    return array.astype(np.float32) if array.dtype.name == "bfloat16" else array


def _under(name: str, key: object) -> str:
    return f"{name}.{key}" if name else str(key)


# Training -------------------------------------------------------------------------------------------


def compile_with(model: Any, optimizer: Any) -> None:
    """Give a model an optimizer with all its variables, and a loss where it has none."""
    model.compile(optimizer=optimizer, loss=getattr(model, "loss", None) or "mse")
    make = getattr(optimizer, "build", None) or getattr(
        optimizer, "_create_all_weights", None
    )  # Keras 2's old ones
    if make is not None:
        make(model.trainable_variables)


def trained_by_keras(model: Any, inputs: Arrays) -> str:
    """Make one step with the model's own optimizer and loss towards what it predicts already, a little off.

    Raises:
        CannotTrain: The model is not compiled.
        LoadFailed: The loss or a weight is not finite, or nothing moved.
    """
    if getattr(model, "optimizer", None) is None:
        raise CannotTrain(
            "the model was not compiled, so it has no optimizer: --optimizer keras.optimizers:Adam"
        )
    if not getattr(model, "loss", None) and not _trains_itself(model):
        raise CannotTrain("the model was compiled without a loss")
    with told("training-step-failed"):
        targets = _targets(call(model, inputs), model.loss)
        before = [_plain(one).copy() for one in model.trainable_weights]
        args, named = arguments(model, inputs)
        loss = model.train_on_batch(args[0] if args else named, targets)
    value = float(np.ravel(loss[0] if isinstance(loss, (list, tuple)) else loss)[0])
    after = [_plain(one) for one in model.trainable_weights]
    moved = moved_weights(before, after, f"the loss is {value:.4g}")
    return f"one step of {type(model.optimizer).__name__} moved {moved}, loss {value:.4g}"


def moved_weights(before: Sequence[Any], after: Sequence[Any], told_loss: str) -> str:
    """Return how many weights a step moved, in words.

    Raises:
        LoadFailed: None did, or one is not finite.
    """
    if "nan" in told_loss or "inf" in told_loss or not all(np.isfinite(one).all() for one in after):
        raise LoadFailed(
            error("training-step-failed", f"{told_loss}, or a weight is not finite, after a training step")
        )
    moved = sum(not np.array_equal(old, new) for old, new in zip(before, after, strict=True))
    if not moved:
        raise LoadFailed(error("training-step-failed", "the training step moved no weight"))
    return f"{moved} of {counted(len(after), 'weight')}"


def _trains_itself(model: Any) -> bool:
    """Tell whether a class of the user's has a training step, or losses, of its own."""
    own = (one for one in type(model).__mro__ if not one.__module__.startswith(("keras.", "tf_keras.")))
    return bool(getattr(model, "losses", None)) or any("train_step" in vars(one) for one in own)


def _targets(output: Any, loss: Any, name: object = "", at: int = 0) -> Any:
    """Return targets a little off an output, in its structure; numbers of classes where it wants those."""
    if isinstance(output, Mapping):
        return {key: _targets(one, loss, key, at) for at, (key, one) in enumerate(output.items())}
    if isinstance(output, (list, tuple)):
        return [_targets(one, loss, at, at) for at, one in enumerate(output)]
    if isinstance(loss, Mapping):
        loss = loss.get(name, next(iter(loss.values()), None))
    elif isinstance(loss, (list, tuple)):
        loss = loss[at] if at < len(loss) else None
    told_name = str(loss if isinstance(loss, str) else getattr(loss, "__name__", type(loss).__name__)).lower()
    values = _plain(output)
    return values.argmin(-1) if "sparse" in told_name else values * 0.9
