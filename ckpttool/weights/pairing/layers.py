"""Groups a checkpoint's tensors into layers, and finds the layout of each, if possible.

The layout is known from the configuration, program or groups in the files (``Checkpoint.layers``), from the
names of a layer's variables, or from the set of their shapes if only one type of layer has it. A rank alone
fits many layers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.layers import UNWIRED, DoubtReason, LayerKind, LayoutDoubt
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
"""Name of the cell inside a recurrent layer."""
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
"""The four layers inside a MultiHeadAttention: names in Keras, as attributes too, and in PyTorch."""
_VARIABLES = {one.layout: one.names for one in LAYERS.values() if one.layout and one.names}
"""Names of a layer's variables, in the order in which Keras numbers them."""
_MAY_LACK = ((), ("bias",), ("gamma", "beta"))
"""Sets of variables that a layer may lack. A batch norm with three variables needs ``LayerKind.missing``."""
_LAYOUT_OF_VARIABLE = {
    "depthwise_kernel": "depthwise",
    "embeddings": "embedding",
    "moving_mean": "batch norm",
    "moving_variance": "batch norm",
    "gamma": "norm",
    "beta": "norm",
}
_LEAST_IMAGE = 4
"""2 positions × 2 channels: the smallest image that has two element orders."""


@dataclass(frozen=True, slots=True)
class WeightLayer:
    """The tensors of one layer.

    Attributes:
        place: Path of the layer.
        layout: Key of ``layouts.RULES``; ``named`` if only the names of the variables are known, None if
            unknown.
        variables: The tensors by their names in the framework: ``kernel``, ``gamma``, ``_mean``.
        sizes: Lengths of the axes ``h``, ``w`` and ``c`` of a flattened image.
    """

    place: Steps
    layout: str | None
    variables: Mapping[str, Tensor]
    sizes: Mapping[str, int] = field(default_factory=dict)


@lru_cache(maxsize=1 << 17)
def steps_of(path: Path) -> Steps:
    """Return the single names of a path, whichever separators its format used."""
    words = ".".join(map(str, path)).replace("_._", ".").removesuffix(":0")
    return tuple(word for word in re.split(r"[./]", words) if word)


def layers_of(checkpoint: Checkpoint) -> list[WeightLayer]:
    """Return the layers of the weights."""
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
    """Return whether a variable has a name that only Keras's layers use."""
    return _has_keras_word(steps_of(tensor.path)[-1:])


def layout_doubts(checkpoint: Checkpoint) -> list[tuple[Tensor, DoubtReason]]:
    """Return the weights whose elements may be in another order than PyTorch's, with the reasons."""
    # Keras flattens an image as (h, w, c), PyTorch as (c, h, w). So the inputs of a Dense after a Flatten,
    # and the outputs of one before a Reshape, are permuted besides being transposed. The configuration of
    # the model shows these layers; files of weights alone don't, and then only a Dense kernel that is too
    # small for an image is certain.
    if traits_of(checkpoint.conventions).family is Family.PADDLE:
        return []
    reasons = {
        id(tensor): reason
        for layer in layers_of(checkpoint)
        for name, tensor in layer.variables.items()
        if (reason := _doubt(layer, name, checkpoint.layers.get(tensor.name))) is not None
    }
    return [(tensor, reasons[id(tensor)]) for tensor in checkpoint.tensors if id(tensor) in reasons]


def _doubt(layer: WeightLayer, name: str, kind: LayerKind | None) -> DoubtReason | None:
    """Return the reason why a variable may be in another order, or None."""
    if kind is not None and not kind.reset_after:  # PyTorch's GRU has only reset_after=True
        return DoubtReason(LayoutDoubt.RESET)
    if kind is not None and kind.doubt not in (None, UNWIRED):
        return kind.doubt
    if name != "kernel":
        return None
    if kind is not None and kind.flattened == ():
        return DoubtReason(LayoutDoubt.FLATTENED_SHAPE)
    if kind is None or kind.doubt is not None:  # no configuration said how the layers are connected
        shape = layer.variables[name].shape
        if layer.layout == "dense" and len(shape) == 2 and may_be_image(*shape):
            return UNWIRED
        if layer.layout == "gru" and "bias" not in layer.variables:
            return DoubtReason(LayoutDoubt.RESET_UNKNOWN)
    return None


def may_be_image(*lengths: int) -> bool:
    """Return whether one of these numbers of features may be that of a flattened image."""
    return max(lengths) >= _LEAST_IMAGE


# Keras ----------------------------------------------------------------------------------------------


def _keras_layer(
    checkpoint: Checkpoint, place: Steps, group: dict[str, Tensor], siblings: set[str]
) -> WeightLayer:
    stated = _stated_kind(checkpoint, group)
    cls = None if stated is None else stated.cls
    layout = None if cls is None else LAYERS.get(cls, UNKNOWN).layout
    is_numbered = all(_NUMBERED.fullmatch(name) for name in group)
    part = ATTENTION.get(place[-1].lstrip("_")) if place else None
    if (
        part is not None
        and _are_of_attention(siblings)
        and cls in (None, "EinsumDense", "MultiHeadAttention")
    ):
        variables = _by_number(group, ("kernel", "bias")) if is_numbered else _by_variable_name(group)
        if "kernel" in variables and len(variables["kernel"].shape) == 3:  # a Dense may have such a name, too
            return WeightLayer(place, "attention output" if part == "out_proj" else "attention", variables)
    if traits_of(checkpoint.conventions).holds_layers and is_numbered:
        shapes = [group[str(at)].shape for at in range(len(group)) if str(at) in group]
        layout = layout if cls is not None else layout_of_shapes(shapes)
        names = _numbered_names(layout, () if stated is None else stated.missing, len(group))
        if not names or len(shapes) != len(group):
            return WeightLayer(place, None, group)
        return _checked_layer(place, layout, _by_number(group, names), stated)
    variables = _by_variable_name(group)
    layout = layout if cls is not None else layout_of_names(variables)
    if layout == "dense" and any(CELL.fullmatch(step) for step in place):
        layout = None  # TensorFlow 1 fuses a cell's two kernels into one matrix
    return _checked_layer(place, layout, variables, stated)


def _are_of_attention(siblings: set[str]) -> bool:
    """Return whether sibling layers include query, key and value."""
    names = {name.lstrip("_") for name in siblings}
    return any({f"{part}{end}" for part in ("query", "key", "value")} <= names for end in ("", "_dense"))


def _stated_kind(checkpoint: Checkpoint, group: Mapping[str, Tensor]) -> LayerKind | None:
    """Return the layer type declared in the files, with the most facts of those of its variables."""

    def count_facts(kind: LayerKind) -> int:
        return sum(fact != default for fact, default in zip(kind, LayerKind(kind.cls), strict=True))

    stated = (checkpoint.layers.get(tensor.name) for tensor in group.values())
    return max((kind for kind in stated if kind is not None), key=count_facts, default=None)


def _numbered_names(layout: str | None, missing: Collection[str], count: int) -> tuple[str, ...]:
    """Return the names of ``count`` numbered variables of a layer; empty if no variant has that many."""
    for lacking in _MAY_LACK:
        names = (
            name for name in _VARIABLES.get(layout or "", ()) if name not in missing and name not in lacking
        )
        if len(found := tuple(names)) == count:
            return found
    return ()


def _by_number(group: Mapping[str, Tensor], names: tuple[str, ...]) -> dict[str, Tensor]:
    return {name: group[str(at)] for at, name in enumerate(names) if str(at) in group}


def _by_variable_name(group: Mapping[str, Tensor]) -> dict[str, Tensor]:
    variables = {}
    for name, tensor in group.items():
        match = _KERAS_VARIABLE.fullmatch(name)
        variables[name if match is None or match[1] in group else match[1]] = tensor
    return variables


def _checked_layer(
    place: Steps, layout: str | None, variables: Mapping[str, Tensor], stated: LayerKind | None
) -> WeightLayer:
    """Return a layer, without a layout if a recurrent kernel's shape contradicts it."""
    if layout == "depthwise":
        variables = {"depthwise_kernel" if name == "kernel" else name: one for name, one in variables.items()}
    if layout in ("lstm", "gru", "rnn"):
        names = [name for name in ("kernel", "recurrent_kernel", "bias") if name in variables]
        if len(names) < 2 or recurrent_layout([variables[name].shape for name in names]) != layout:
            return WeightLayer(place, None, variables)
    if stated is None or stated.flattened is None or layout != "dense":
        return WeightLayer(place, layout, variables)
    return _flattening_layer(place, variables, stated.flattened)


def _flattening_layer(
    place: Steps, variables: Mapping[str, Tensor], image: tuple[int | None, ...]
) -> WeightLayer:
    """Return a Dense after a Flatten of ``image`` (…, channels), with the sizes for its rule."""
    match image:
        case (None, int(channels)):
            # The number of channels is enough: h and w keep their order, so (h·w, 1, c) permutes alike.
            shape = variables["kernel"].shape if "kernel" in variables else ()
            inputs = shape[0] if shape else 0
            if not channels or inputs % channels:
                return WeightLayer(place, "named", variables)
            sizes = {"h": inputs // channels, "w": 1, "c": channels}
        case (*axes, int(last)) if sum(length != 1 for length in image) > 1:
            sizes = {"h": math.prod(length or 0 for length in axes), "w": 1, "c": last}
        case _:  # one axis: no permutation; unknown shape: ``layout_doubts`` lists the kernel
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
        # Of Paddle's layers, only Linear has a matrix with a bias as long as its last axis.
        is_linear = len(weight.shape) == 2 and bias.shape == weight.shape[1:]
    return WeightLayer(place, "paddle linear" if is_linear else "named", variables)


# Layouts by shapes and names ------------------------------------------------------------------------


def layout_of_shapes(shapes: list[Shape]) -> str | None:
    """Return the layout of the only layer type whose numbered variables have these shapes, or None."""
    if len(shapes) in (2, 3) and (found := recurrent_layout(shapes)) is not None:
        return found
    if len(shapes) == 4 and len(shapes[0]) == 1 and len(set(shapes)) == 1:
        return "batch norm"
    if len(shapes) != 2 or len(shapes[1]) != 1:
        return None
    kernel, bias = shapes
    if len(kernel) == 2:
        return "dense" if kernel[1:] == bias else None
    # A kernel of rank 3 may be a Conv1D's or a projection of an attention.
    return _convolution(kernel, bias) if len(kernel) in (4, 5) else None


def recurrent_layout(shapes: list[Shape]) -> str | None:
    """Return the layout of a recurrent layer from the shapes of its kernels and bias, or None."""
    # kernel (I, g·u), recurrent kernel (u, g·u): an LSTM has 4 gates, a GRU 3, a SimpleRNN 1. A GRU's bias is
    # (2, 3u), since with reset_after=True input and recurrent biases are kept apart.
    kernel, recurrent = shapes[:2]
    if len(kernel) != 2 or len(recurrent) != 2 or kernel[1] != recurrent[1] or not recurrent[0]:
        return None
    gates = recurrent[1] / recurrent[0]
    biases = {4: (recurrent[1],), 3: (2, recurrent[1]), 1: (recurrent[1],)}
    if gates not in biases or (len(shapes) == 3 and shapes[2] != biases[int(gates)]):
        return None
    return {4: "lstm", 3: "gru", 1: "rnn"}[int(gates)]


def _convolution(kernel: Shape, bias: Shape | None) -> str | None:
    """Return the layout of a convolution from its kernel (k…, inner, outer) and bias, or None."""
    # The bias has the number of outputs: the last axis of a convolution, the last but one of a transposed
    # convolution, and their product for a depthwise one (whose kernel Keras 3 also calls ``kernel``).
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
        # If others fit as well (square, or one channel), their rules give the same elements.
        return "conv"
    layouts = [layout for layout, is_so in fits.items() if is_so]
    return layouts[0] if len(layouts) == 1 else None


def layout_of_names(variables: Mapping[str, Tensor]) -> str | None:
    """Return the layout of a layer from the names and shapes of its variables, or None."""
    shapes = {name: tensor.shape for name, tensor in variables.items()}
    if {"kernel", "recurrent_kernel"} <= shapes.keys():
        known = [shapes[name] for name in ("kernel", "recurrent_kernel", "bias") if name in shapes]
        return recurrent_layout(known)
    if "pointwise_kernel" in shapes:
        return "separable"
    for name, layout in _LAYOUT_OF_VARIABLE.items():
        if name in shapes:
            return layout
    kernel, bias = shapes.get("kernel", ()), shapes.get("bias")
    if len(kernel) == 2:
        return "dense"
    if len(kernel) == 3:
        return "conv" if bias == kernel[-1:] else None
    return _convolution(kernel, bias) if len(kernel) in (4, 5) else None
