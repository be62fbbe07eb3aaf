"""The layers that a checkpoint's tensors belong to, and of which type each is, where something says it.

What says it: the configuration, program or groups in the files (``Checkpoint.layers``), the names of a
layer's variables, and the set of their shapes where no other layer of the framework has it. Nothing else
does: a rank fits many layers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.layers import DoubtReason, LayerKind, LayoutDoubt
from ckpttool.core.tensor import Path, Role, Tensor
from ckpttool.formats.keras.layers import LAYERS, UNKNOWN
from ckpttool.formats.traits import Family, traits_of

Steps = tuple[str, ...]
Shape = tuple[int, ...]

_NUMBERED = re.compile(r"\d+")
_KERAS_VARIABLE = re.compile(
    r"_?(kernel|bias|recurrent_kernel|depthwise_kernel|pointwise_kernel|embeddings|gamma|beta"
    r"|moving_mean|moving_variance|scale)"
)
CELL = re.compile(r"(basic_)?(lstm_|gru_|rnn_|simple_rnn_)?cell(_\d+)?")
"""What the cell inside a recurrent layer is called."""
_PADDLE_VARIABLE = {"w_0": "weight", "b_0": "bias", "w_1": "_mean", "w_2": "_variance"}
_PADDLE_CELL = {"w_0": "weight_ih_l0", "w_1": "weight_hh_l0", "b_0": "bias_ih_l0", "b_1": "bias_hh_l0"}
_CELLS = {"lstm_cell", "gru_cell", "simple_rnn_cell"}
_LINEAR = {"linear", "fc", "mul", "matmul", "matmul_v2"}

ATTENTION = {
    "query": "q_proj",
    "key": "k_proj",
    "value": "v_proj",
    "attention_output": "out_proj",
    "query_dense": "q_proj",
    "key_dense": "k_proj",
    "value_dense": "v_proj",
    "output_dense": "out_proj",
}
"""What Keras calls the four layers inside a MultiHeadAttention, as attributes and as names."""
_ORDERS: Mapping[str | None, tuple[tuple[str, ...], ...]] = {
    "dense": (("kernel",), ("kernel", "bias")),
    "conv": (("kernel",), ("kernel", "bias")),
    "transposed conv": (("kernel",), ("kernel", "bias")),
    "depthwise": (("depthwise_kernel",), ("depthwise_kernel", "bias")),
    "separable": (
        ("depthwise_kernel", "pointwise_kernel"),
        ("depthwise_kernel", "pointwise_kernel", "bias"),
    ),
    "embedding": (("embeddings",),),
    "batch norm": (("moving_mean", "moving_variance"), ("gamma", "beta", "moving_mean", "moving_variance")),
    "norm": (("gamma", "beta"),),
    "rms norm": (("scale",),),
    **{
        kind: (("kernel", "recurrent_kernel"), ("kernel", "recurrent_kernel", "bias"))
        for kind in ("lstm", "gru", "rnn")
    },
}
"""In which order Keras numbers a layer's variables; which one a batch norm with three lacks must be told."""
_KIND_OF_VARIABLE = {
    "depthwise_kernel": "depthwise",
    "embeddings": "embedding",
    "moving_mean": "batch norm",
    "moving_variance": "batch norm",
    "gamma": "norm",
    "beta": "norm",
}
_LEAST_IMAGE = 4
"""Two places with two channels: the fewest elements that have two orders."""


@dataclass(frozen=True, slots=True)
class WeightLayer:
    """Tensors that lie together.

    Attributes:
        place: The steps of the path to them.
        kind: Which layouts they have: a key of ``layouts.RULES``; ``named`` where only what the variables are
            called is known, None where nothing is.
        variables: The tensors by what the framework calls them: ``kernel``, ``gamma``, ``_mean``.
        sizes: Lengths of axes that are known from the layer before.
    """

    place: Steps
    kind: str | None
    variables: Mapping[str, Tensor]
    sizes: Mapping[str, int] = field(default_factory=dict)


UNWIRED = DoubtReason(LayoutDoubt.UNWIRED)


class Doubt(NamedTuple):
    """A weight that may be in another order than PyTorch's, and why."""

    tensor: Tensor
    reason: DoubtReason


@lru_cache(maxsize=1 << 17)
def steps_of(path: Path) -> Steps:
    """Return the single names that a path is made of, however its format joined them."""
    words = ".".join(map(str, path)).replace("_._", ".").removesuffix(":0")
    return tuple(word for word in re.split(r"[./]", words) if word)


def layers_of(checkpoint: Checkpoint) -> list[WeightLayer]:
    """Return the layers that the weights lie in."""
    groups: dict[Steps, dict[str, Tensor]] = {}
    traits = traits_of(checkpoint.conventions)
    for tensor in checkpoint.tensors:
        steps = steps_of(tensor.path)
        if steps and tensor.role is not Role.OPTIMIZER:
            is_listed = traits.holds_layers and steps[-2:-1] == ("vars",)
            place = steps[:-2] if is_listed else steps[:-1]
            groups.setdefault(place, {}).setdefault(steps[-1], tensor)
    if traits.family is Family.PADDLE:
        return [_paddle_layer(checkpoint, place, group) for place, group in groups.items()]
    if traits.family is Family.TORCH and not any(map(_has_keras_word, groups.values())):
        return []
    siblings: dict[Steps, set[str]] = {}
    for place in groups:
        siblings.setdefault(place[:-1], set()).update(place[-1:])
    return [_keras_layer(checkpoint, place, group, siblings[place[:-1]]) for place, group in groups.items()]


def _has_keras_word(names: Iterable[str]) -> bool:
    return any(name != "bias" and _KERAS_VARIABLE.fullmatch(name) for name in names)


def has_keras_word(tensor: Tensor) -> bool:
    """Tell whether a variable has a name that PyTorch's layers don't give."""
    return _has_keras_word(steps_of(tensor.path)[-1:])


def layout_doubts(checkpoint: Checkpoint) -> list[Doubt]:
    """Return the weights whose elements may be in another order than PyTorch's, for all that is known.

    What stands behind a Flatten or before a Reshape is in another order. The configuration of a model says
    where they are. Files of weights alone don't, and of a Dense in them only what is too small for an image
    is certain.
    """
    if traits_of(checkpoint.conventions).family is Family.PADDLE:
        return []
    doubts = {}
    for layer in layers_of(checkpoint):
        for name, tensor in layer.variables.items():
            kind = checkpoint.layers.get(tensor.name)
            if kind is not None and kind.doubt not in (None, UNWIRED):
                doubts[id(tensor)] = Doubt(tensor, kind.doubt)
            elif kind is not None and not kind.reset_after:
                doubts[id(tensor)] = Doubt(tensor, DoubtReason(LayoutDoubt.RESET))
            elif name == "kernel" and kind is not None and kind.flattened == ():
                doubts[id(tensor)] = Doubt(tensor, DoubtReason(LayoutDoubt.FLATTENED_SHAPE))
            elif name == "kernel" and (kind is None or kind.doubt is not None):
                # No configuration said how the layers are connected.
                if layer.kind == "dense" and len(tensor.shape) == 2 and may_be_image(*tensor.shape):
                    doubts[id(tensor)] = Doubt(tensor, UNWIRED)
                elif layer.kind == "gru" and "bias" not in layer.variables:
                    doubts[id(tensor)] = Doubt(tensor, DoubtReason(LayoutDoubt.RESET_UNKNOWN))
    return [doubts[id(tensor)] for tensor in checkpoint.tensors if id(tensor) in doubts]


def may_be_image(*lengths: int) -> bool:
    """Tell whether features as many as one of these may be an image: places, each with channels."""
    return max(lengths) >= _LEAST_IMAGE


# Keras ----------------------------------------------------------------------------------------------


def _keras_layer(
    checkpoint: Checkpoint, place: Steps, group: dict[str, Tensor], siblings: set[str]
) -> WeightLayer:
    stated = _stated_kind(checkpoint, group)
    is_numbered = all(_NUMBERED.fullmatch(name) for name in group)
    beside = {name.lstrip("_") for name in siblings}
    part = ATTENTION.get(place[-1].lstrip("_")) if place else None
    is_attention = {"query", "key", "value"} <= beside or {
        "query_dense",
        "key_dense",
        "value_dense",
    } <= beside
    cls = None if stated is None else stated.cls
    if part is not None and is_attention and cls in (None, "EinsumDense", "MultiHeadAttention"):
        variables = _by_number(group, ("kernel", "bias")) if is_numbered else _by_variable_name(group)
        if "kernel" in variables and len(variables["kernel"].shape) == 3:  # Dense layers have such names, too
            return WeightLayer(place, "attention output" if part == "out_proj" else "attention", variables)
    if traits_of(checkpoint.conventions).holds_layers and is_numbered:
        shapes = [group[str(at)].shape for at in range(len(group)) if str(at) in group]
        kind = LAYERS.get(cls, UNKNOWN).layout if cls is not None else kind_of_shapes(shapes)
        missing = () if stated is None else stated.missing
        orders = [tuple(name for name in names if name not in missing) for names in _ORDERS.get(kind, ())]
        order = next((names for names in orders if len(names) == len(group)), None)
        if order is None or len(shapes) != len(group):
            return WeightLayer(place, None, group)
        return _checked_layer(place, kind, _by_number(group, order), stated)
    variables = _by_variable_name(group)
    kind = LAYERS.get(cls, UNKNOWN).layout if cls is not None else kind_of_names(variables)
    if kind == "dense" and any(CELL.fullmatch(step) for step in place):
        kind = None  # TensorFlow 1 has a cell's two kernels in one
    return _checked_layer(place, kind, variables, stated)


def _stated_kind(checkpoint: Checkpoint, group: Mapping[str, Tensor]) -> LayerKind | None:
    """Return the type that the files declare; that of a kernel has most facts."""
    stated = (checkpoint.layers.get(tensor.name) for tensor in group.values())
    return max((kind for kind in stated if kind is not None), key=lambda kind: kind.facts, default=None)


def _by_number(group: Mapping[str, Tensor], names: tuple[str, ...]) -> dict[str, Tensor]:
    return {name: group[str(at)] for at, name in enumerate(names) if str(at) in group}


def _by_variable_name(group: Mapping[str, Tensor]) -> dict[str, Tensor]:
    variables = {}
    for name, tensor in group.items():
        match = _KERAS_VARIABLE.fullmatch(name)
        variables[name if match is None or match[1] in group else match[1]] = tensor
    return variables


def _checked_layer(
    place: Steps, kind: str | None, variables: Mapping[str, Tensor], stated: LayerKind | None
) -> WeightLayer:
    """Return a layer; its type must fit its recurrent kernel, and what it flattens must be known."""
    if kind == "depthwise" and "kernel" in variables:
        variables = {"depthwise_kernel" if name == "kernel" else name: one for name, one in variables.items()}
    if kind in ("lstm", "gru", "rnn"):
        names = [name for name in ("kernel", "recurrent_kernel", "bias") if name in variables]
        if len(names) < 2 or recurrent_kind([variables[name].shape for name in names]) != kind:
            return WeightLayer(place, None, variables)
    flattened = None if stated is None else stated.flattened
    if flattened is None:
        return WeightLayer(place, kind, variables)
    # The inputs of a Dense after a Flatten are in another order than PyTorch flattens them.
    match flattened:
        case (None, int(channels)):
            # The channels are enough: the places of the image follow each other.
            shape = variables["kernel"].shape if "kernel" in variables else ()
            inputs = shape[0] if shape else 0
            if not channels or inputs % channels:
                return WeightLayer(place, "named", variables)
            sizes = {"h": inputs // channels, "w": 1, "c": channels}
        case (*axes, int(last)) if sum(length != 1 for length in flattened) > 1:
            sizes = {"h": math.prod(length or 0 for length in axes), "w": 1, "c": last}
        case _:  # of an unknown shape, ``layout_doubts`` has the kernel
            return WeightLayer(place, "dense", variables)
    return WeightLayer(place, "flattened", variables, sizes)


# Paddle ---------------------------------------------------------------------------------------------


def _paddle_layer(checkpoint: Checkpoint, place: Steps, group: dict[str, Tensor]) -> WeightLayer:
    stated = _stated_kind(checkpoint, group)
    cls = None if stated is None else stated.cls
    is_norm = {"w_0", "w_1", "w_2"} <= group.keys() and len(group["w_0"].shape) == 1
    if cls in _CELLS:
        names = _PADDLE_CELL
    else:
        names = _PADDLE_VARIABLE if is_norm or group.keys() <= {"w_0", "b_0"} else {}
    variables = {names.get(name, name): tensor for name, tensor in group.items()}
    if {"_mean", "_variance"} <= variables.keys():
        return WeightLayer(place, "paddle batch norm", variables)
    weight, bias = variables.get("weight"), variables.get("bias")
    is_linear = cls in _LINEAR
    if cls is None and weight is not None and bias is not None and len(variables) == 2:
        # Of Paddle's layers, only a linear one has a matrix and a bias as long as its last axis.
        is_linear = len(weight.shape) == 2 and bias.shape == weight.shape[1:]
    return WeightLayer(place, "paddle linear" if is_linear else "named", variables)


# What shapes and names say --------------------------------------------------------------------------


def kind_of_shapes(shapes: list[Shape]) -> str | None:
    """Return the only type of layer whose variables, numbered, have these shapes."""
    if len(shapes) in (2, 3) and (found := recurrent_kind(shapes)) is not None:
        return found
    if len(shapes) == 4 and len(shapes[0]) == 1 and len(set(shapes)) == 1:
        return "batch norm"
    if len(shapes) != 2 or len(shapes[1]) != 1:
        return None
    kernel, bias = shapes
    if len(kernel) == 2:
        return "dense" if kernel[1:] == bias else None
    # Of rank 3, a part of an attention has such a set, too.
    return _convolution(kernel, bias) if len(kernel) in (4, 5) else None


def recurrent_kind(shapes: list[Shape]) -> str | None:
    """Return the type of a recurrent layer from its kernels, and its bias where it has one."""
    kernel, recurrent = shapes[:2]
    if len(kernel) != 2 or len(recurrent) != 2 or kernel[1] != recurrent[1] or not recurrent[0]:
        return None
    gates = recurrent[1] / recurrent[0]
    biases = {4: (recurrent[1],), 3: (2, recurrent[1]), 1: (recurrent[1],)}
    if gates not in biases or (len(shapes) == 3 and shapes[2] != biases[int(gates)]):
        return None
    return {4: "lstm", 3: "gru", 1: "rnn"}[int(gates)]


def _convolution(kernel: Shape, bias: Shape | None) -> str | None:
    """Tell a convolution by its bias; Keras 3 calls a depthwise one's kernel so as well."""
    *_, inner, outer = kernel
    if bias is None:
        return "conv" if outer != 1 or inner == 1 else None
    if len(kernel) > 4:
        return "conv" if bias == (outer,) else "transposed conv" if bias == (inner,) else None
    fits = {
        "conv": bias == (outer,),
        "transposed conv": bias == (inner,),
        "depthwise": bias == (inner * outer,),
    }
    if fits["conv"]:
        # As a transposed one its elements lie alike; as a depthwise one, of a single channel, too.
        return "conv"
    kinds = [kind for kind, is_so in fits.items() if is_so]
    return kinds[0] if len(kinds) == 1 else None


def kind_of_names(variables: Mapping[str, Tensor]) -> str | None:
    """Return the type of a layer from what its variables are called."""
    shapes = {name: tensor.shape for name, tensor in variables.items()}
    if {"kernel", "recurrent_kernel"} <= shapes.keys():
        known = [shapes[name] for name in ("kernel", "recurrent_kernel", "bias") if name in shapes]
        return recurrent_kind(known)
    if "pointwise_kernel" in shapes:
        return "separable"
    for name, kind in _KIND_OF_VARIABLE.items():
        if name in shapes:
            return kind
    kernel, bias = shapes.get("kernel", ()), shapes.get("bias")
    if len(kernel) == 2:
        return "dense"
    if len(kernel) == 3:
        return "conv" if bias == kernel[-1:] else None
    return _convolution(kernel, bias) if len(kernel) in (4, 5) else None
