"""The layers that a checkpoint's tensors belong to, and of which type each is, where something says it.

What says it: the configuration, program or groups in the files (``Checkpoint.layers``), the names of a
layer's variables, and the set of their shapes where no other layer of the framework has it. Nothing else
does: a rank fits many layers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from ckpttool.checkpoint import Checkpoint
from ckpttool.pairing.families import family_of
from ckpttool.pairing.shapes import kind_of_names, kind_of_shapes, recurrent_kind
from ckpttool.tensor import Path, Role, Tensor

Steps = tuple[str, ...]

_NUMBERING = ("keras", "keras-h5")
"""Formats in which variables have numbers instead of names."""
_NUMBERED = re.compile(r"\d+")
_KERAS_VARIABLE = re.compile(
    r"_?(kernel|bias|recurrent_kernel|depthwise_kernel|pointwise_kernel|embeddings|gamma|beta"
    r"|moving_mean|moving_variance|scale)"
)
_FLATTENED = re.compile(
    r"Dense after Flatten"
    r"(?: \((?:\*, (?P<channels>[0-9]{1,18})|(?P<shape>[0-9]{1,18}(?:, [0-9]{1,18})*),?)\))?"
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


@dataclass(frozen=True, slots=True)
class Layer:
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


@lru_cache(maxsize=1 << 17)
def steps_of(path: Path) -> Steps:
    """Return the single names that a path is made of, however its format joined them."""
    words = ".".join(map(str, path)).replace("_._", ".").removesuffix(":0")
    return tuple(word for word in re.split(r"[./]", words) if word)


def layers_of(checkpoint: Checkpoint) -> list[Layer]:
    """Return the layers that the weights lie in."""
    groups: dict[Steps, dict[str, Tensor]] = {}
    for tensor in checkpoint.tensors:
        steps = steps_of(tensor.path)
        if steps and tensor.role is not Role.OPTIMIZER:
            is_listed = checkpoint.conventions in _NUMBERING and steps[-2:-1] == ("vars",)
            place = steps[:-2] if is_listed else steps[:-1]
            groups.setdefault(place, {}).setdefault(steps[-1], tensor)
    if family_of(checkpoint.conventions) == "paddle":
        return [_paddle_layer(checkpoint, place, group) for place, group in groups.items()]
    if family_of(checkpoint.conventions) == "torch" and not any(map(_has_other_words, groups.values())):
        return []
    siblings: dict[Steps, set[str]] = {}
    for place in groups:
        siblings.setdefault(place[:-1], set()).update(place[-1:])
    return [_keras_layer(checkpoint, place, group, siblings[place[:-1]]) for place, group in groups.items()]


def _has_other_words(group: Mapping[str, Tensor]) -> bool:
    return any(name != "bias" and _KERAS_VARIABLE.fullmatch(name) for name in group)


def has_other_word(tensor: Tensor) -> bool:
    """Tell whether a variable has a name that PyTorch's layers don't give."""
    return _has_other_words(dict.fromkeys(steps_of(tensor.path)[-1:], tensor))


# Keras ----------------------------------------------------------------------------------------------


def _keras_layer(checkpoint: Checkpoint, place: Steps, group: dict[str, Tensor], beside: set[str]) -> Layer:
    told = _told(checkpoint, group)
    if place and _is_attention(place[-1], beside) and told in (None, "EinsumDense", "MultiHeadAttention"):
        variables = _numbered(group, ("kernel", "bias")) if _all_numbered(group) else _named(group)
        if "kernel" in variables and len(variables["kernel"].shape) == 3:  # Dense layers have such names, too
            is_output = ATTENTION[place[-1].lstrip("_")] == "out_proj"
            return Layer(place, "attention output" if is_output else "attention", variables)
    if checkpoint.conventions in _NUMBERING and _all_numbered(group):
        shapes = [group[str(at)].shape for at in range(len(group)) if str(at) in group]
        kind = _KINDS.get(told.partition(" ")[0]) if told is not None else kind_of_shapes(shapes)
        names = _order(kind, len(group), told or "") if len(shapes) == len(group) else None
        return (
            Layer(place, None, group)
            if names is None
            else _checked(place, kind, _numbered(group, names), told)
        )
    variables = _named(group)
    kind = _KINDS.get(told.partition(" ")[0]) if told is not None else kind_of_names(variables)
    if kind == "dense" and any(CELL.fullmatch(step) for step in place):
        kind = None  # TensorFlow 1 has a cell's two kernels in one
    return _checked(place, kind, variables, told)


def _told(checkpoint: Checkpoint, group: Mapping[str, Tensor]) -> str | None:
    """Return the type that the files say outright; of a kernel it says most."""
    said = (checkpoint.layers.get(tensor.name) for tensor in group.values())
    return max((kind for kind in said if kind is not None), key=len, default=None)


def _is_attention(name: str, beside: set[str]) -> bool:
    if name.lstrip("_") not in ATTENTION:
        return False
    inner = {one.lstrip("_") for one in beside}
    return {"query", "key", "value"} <= inner or {"query_dense", "key_dense", "value_dense"} <= inner


def _all_numbered(group: Mapping[str, Tensor]) -> bool:
    return all(_NUMBERED.fullmatch(name) for name in group)


def _numbered(group: Mapping[str, Tensor], names: tuple[str, ...]) -> dict[str, Tensor]:
    return {name: group[str(at)] for at, name in enumerate(names) if str(at) in group}


def _named(group: Mapping[str, Tensor]) -> dict[str, Tensor]:
    found = {}
    for name, tensor in group.items():
        match = _KERAS_VARIABLE.fullmatch(name)
        found[name if match is None or match[1] in group else match[1]] = tensor
    return found


_KINDS = {
    "Dense": "dense",
    "Embedding": "embedding",
    "BatchNormalization": "batch norm",
    "SyncBatchNormalization": "batch norm",
    "LayerNormalization": "norm",
    "GroupNormalization": "norm",
    "LSTM": "lstm",
    "LSTMCell": "lstm",
    "GRU": "gru",
    "GRUCell": "gru",
    "SimpleRNN": "rnn",
    "SimpleRNNCell": "rnn",
    "RMSNormalization": "rms norm",
    **{f"Conv{n}D": "conv" for n in (1, 2, 3)},
    **{f"Convolution{n}D": "conv" for n in (1, 2, 3)},
    **{f"Conv{n}DTranspose": "transposed conv" for n in (1, 2, 3)},
    **{f"DepthwiseConv{n}D": "depthwise" for n in (1, 2)},
    **{f"SeparableConv{n}D": "separable" for n in (1, 2)},
}

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

_WITHOUT = " without "


def _order(kind: str | None, count: int, told: str) -> tuple[str, ...] | None:
    lacking = told.partition(_WITHOUT)[2].split(" and ")
    orders = (tuple(name for name in names if name not in lacking) for names in _ORDERS.get(kind, ()))
    return next((names for names in orders if len(names) == count), None)


def _checked(place: Steps, kind: str | None, variables: Mapping[str, Tensor], told: str | None) -> Layer:
    """Return a layer; its type must fit its recurrent kernel, and what it flattens must be known."""
    if kind == "depthwise" and "kernel" in variables:
        variables = {"depthwise_kernel" if name == "kernel" else name: one for name, one in variables.items()}
    if kind in ("lstm", "gru", "rnn"):
        names = [name for name in ("kernel", "recurrent_kernel", "bias") if name in variables]
        if len(names) < 2 or recurrent_kind([variables[name].shape for name in names]) != kind:
            return Layer(place, None, variables)
    if told is not None and (behind := _FLATTENED.match(told)):
        if behind["channels"]:
            return _behind_channels(place, variables, int(behind["channels"]))
        return _flattened(place, variables, behind["shape"])
    return Layer(place, kind, variables)


def _flattened(place: Steps, variables: Mapping[str, Tensor], shape: str | None) -> Layer:
    """Return a Dense whose inputs were flattened, which puts them in another order than PyTorch does."""
    axes = tuple(map(int, shape.split(", "))) if shape else ()
    if sum(length != 1 for length in axes) <= 1:  # what is not told at all is in doubt, as ``doubtful`` says
        return Layer(place, "dense", variables)
    return Layer(place, "flattened", variables, {"h": math.prod(axes[:-1]), "w": 1, "c": axes[-1]})


def _behind_channels(place: Steps, variables: Mapping[str, Tensor], channels: int) -> Layer:
    """Return a Dense behind a flattened image of which the channels alone are known, which is enough."""
    inputs = variables["kernel"].shape[0] if "kernel" in variables and variables["kernel"].shape else 0
    if not channels or inputs % channels:
        return Layer(place, "named", variables)
    return Layer(place, "flattened", variables, {"h": inputs // channels, "w": 1, "c": channels})


# Paddle ---------------------------------------------------------------------------------------------


def _paddle_layer(checkpoint: Checkpoint, place: Steps, group: dict[str, Tensor]) -> Layer:
    told = _told(checkpoint, group)
    names = _PADDLE_CELL if told in _CELLS else _PADDLE_VARIABLE if _is_plain(group) else {}
    variables = {names.get(name, name): tensor for name, tensor in group.items()}
    if {"_mean", "_variance"} <= variables.keys():
        return Layer(place, "paddle batch norm", variables)
    weight, bias = variables.get("weight"), variables.get("bias")
    is_linear = told in _LINEAR
    if told is None and weight is not None and bias is not None and len(variables) == 2:
        # Of Paddle's layers, only a linear one has a matrix and a bias as long as its last axis.
        is_linear = len(weight.shape) == 2 and bias.shape == weight.shape[1:]
    return Layer(place, "paddle linear" if is_linear else "named", variables)


def _is_plain(group: Mapping[str, Tensor]) -> bool:
    """Tell whether a layer has one weight and one bias, or is a batch norm."""
    is_norm = {"w_0", "w_1", "w_2"} <= group.keys() and len(group["w_0"].shape) == 1
    return is_norm or not group.keys() - {"w_0", "b_0"}
