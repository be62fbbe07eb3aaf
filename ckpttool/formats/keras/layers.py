"""Layers as configurations of Keras have them, and ``LAYERS``: what is known of each class, a row each.

Nothing is told of a layer that is someone else's, that was quantized, adapted or built from data, or whose
configuration lacks what decides: its weights are listed, and not judged.

Source: Keras ``src/layers``; tf_keras ``src/layers``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import Any, NamedTuple

from ckpttool.formats.keras.names import part_of_keras

Shape = tuple[int | None, ...] | None
"""The shape of a weight; None for an axis of any length, and for any shape at all."""
Config = Mapping[str, Any]
MODELS = frozenset({"Functional", "Sequential", "Model"})
_PLAIN_POLICIES = frozenset({"DTypePolicy", "FloatDTypePolicy", "Policy"})
_CHANGED_BY = (
    "lora_rank",
    "lora_enabled",
    "quantization_config",
    "use_gate",
    "rms_scaling",
    "renorm",
    "stateful",
)
"""Settings that change which weights a layer has, or how they are stored."""
_UNKNOWN_SHAPE: Shape = (-1,)
"""Stands among the weights of what has an inner layer that nobody can tell of."""
_MANY = 1000
"""How many weights no recurrent layer has; nested ones would double them at each level."""
_MANY_AXES = 10 * _MANY
"""How many axes the weights of no recurrent layer have, together."""
Group = tuple[str, ...]
LAYERS_KEY = "layers"
_SOURCE_CLASSES = {"GroupQueryAttention": "GroupedQueryAttention"}
"""What Keras calls a class in its source, where a configuration calls it differently."""


class Layer(NamedTuple):
    """One layer of a model's configuration."""

    name: str
    kind: str
    config: Config
    node: Config

    @property
    def is_known(self) -> bool:
        """Return whether its class is one of Keras's own."""
        module, registered = self.node.get("module"), self.node.get("registered_name")
        is_of_keras = module is None or (isinstance(module, str) and part_of_keras(module) is not None)
        return is_of_keras and registered in (None, self.kind)

    @property
    def is_model(self) -> bool:
        """Return whether it is made of layers that its configuration lists."""
        return self.is_known and self.kind in MODELS and bool(layers_listed_by(self))


def layer_of(node: object) -> Layer | None:
    """Return the layer that a configuration describes."""
    if not isinstance(node, Mapping):
        return None
    kind, config = node.get("class_name"), node.get("config")
    if not isinstance(kind, str):
        return None
    if kind == "Sequential" and isinstance(config, list):  # the first releases of Keras 2
        config = {"layers": config, "name": node.get("name")}
    if not isinstance(config, Mapping):
        return None
    name = config.get("name") or node.get("name")
    return Layer(name if isinstance(name, str) else "", kind, config, node)


def layers_listed_by(model: Layer) -> list[Layer]:
    """Return the layers that a model is made of."""
    layers = model.config.get("layers")
    nodes = layers if isinstance(layers, list) else []
    return [layer for node in nodes if (layer := layer_of(node)) is not None]


def layers_with_groups(model: Layer) -> Iterator[tuple[Layer, tuple[str, str]]]:
    """Yield each layer with the names that Keras 3 and Keras 2 give to its group."""
    used: tuple[Counter[str], Counter[str]] = Counter(), Counter()
    for layer in layers_listed_by(model):
        names = []
        for counter, words in zip(used, ("[a-z]+", "[a-z0-9]+"), strict=True):
            name = snake_case(_SOURCE_CLASSES.get(layer.kind, layer.kind.rpartition(">")[2]), words)
            names.append(f"{name}_{counter[name]}" if counter[name] else name)
            counter[name] += 1
        yield layer, (names[0], names[1])


def snake_case(name: str, words: str) -> str:
    """Return what Keras names a group after a class; ``words`` is a pattern, in which Keras 2 has digits."""
    name = re.sub(rf"(.)([A-Z]{words})", r"\1_\2", re.sub(r"\W+", "", name))
    return re.sub("([a-z])([A-Z])", r"\1_\2", name).lower()


# The weights of a layer -----------------------------------------------------------------------------


def weights_of(layer: Layer) -> list[Shape] | None:
    """Return the shapes of the weights that a layer has once it is built, or None if nobody can tell."""
    if layer.is_model:
        return _weights_of_model(layer)
    config, rule = layer.config, type_of(layer.kind).shapes
    if rule is None or not layer.is_known or any(config.get(key) for key in _CHANGED_BY):
        return None
    dtype = config.get("dtype")
    if isinstance(dtype, Mapping) and dtype.get("class_name") not in _PLAIN_POLICIES:
        return None
    if isinstance(dtype, str) and "_from_" in dtype:  # quantized
        return None
    if any(isinstance(config.get(key), Mapping) for key in ("activation", "recurrent_activation")):
        return None  # a layer of its own, maybe, with weights
    built = layer.node.get("build_config")
    shape = built.get("input_shape") if isinstance(built, Mapping) else None
    if not isinstance(shape, list) or not all(length is None or type(length) is int for length in shape):
        shape = None
    try:
        shapes = list(rule(config, BuildShape(shape or None)))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        return None  # the configuration lacks what decides, or has something else there
    lengths = [length for shape in shapes for length in shape or ()]
    is_possible = all(one is None or (type(one) is int and 0 <= one < 1 << 63) for one in lengths)
    return shapes if is_possible else None


def _weights_of_model(model: Layer) -> list[Shape] | None:
    layers = layers_listed_by(model)
    if len({layer.name for layer in layers}) < len(layers):
        return None
    shapes: list[Shape] = []
    for layer in layers:
        of_layer = [] if type_of(layer.kind).is_weightless else weights_of(layer)
        if of_layer is None:
            return None
        shapes += of_layer
    return shapes


# Rules ----------------------------------------------------------------------------------------------


class BuildShape(NamedTuple):
    """The shape of what a layer was built for, where that is known; with the batch."""

    shape: list[int | None] | None

    def along(self, axis: int) -> int | None:
        """Return the length along an axis."""
        return None if self.shape is None else self.shape[axis]

    def channels(self, config: Config) -> int | None:
        """Return the number of channels of an image."""
        return self.along(-1 if config["data_format"] == "channels_last" else 1)


Rule = Callable[[Config, BuildShape], Iterator[Shape]]


def _times(length: int | None, factor: int) -> int | None:
    if type(factor) is not int:
        raise TypeError("no number")
    return None if length is None else length * factor


def _bias(config: Config, *shape: int | None) -> Iterator[Shape]:
    if config["use_bias"]:
        yield shape


def _dense(config: Config, given: BuildShape) -> Iterator[Shape]:
    yield given.along(-1), config["units"]
    yield from _bias(config, config["units"])


def _any_and(bias: str) -> Rule:
    """Return the rule of a kernel of any shape, and of a bias if the setting of that name says so."""

    def rule(config: Config, given: BuildShape) -> Iterator[Shape]:
        yield None
        if config[bias]:
            yield None

    return rule


def _embeddings(config: Config, given: BuildShape) -> Iterator[Shape]:
    yield config["input_dim"], config["output_dim"]


def _reversible_embeddings(config: Config, given: BuildShape) -> Iterator[Shape]:
    yield config["input_dim"], config["output_dim"]
    if not config["tie_weights"]:
        yield config["output_dim"], config["input_dim"]


def _convolution(config: Config, given: BuildShape) -> Iterator[Shape]:
    channels, filters = given.channels(config), config["filters"]
    yield *config["kernel_size"], None if channels is None else channels // config["groups"], filters
    yield from _bias(config, filters)


def _transposed_convolution(config: Config, given: BuildShape) -> Iterator[Shape]:
    yield *config["kernel_size"], config["filters"], given.channels(config)
    yield from _bias(config, config["filters"])


def _depthwise(config: Config, given: BuildShape) -> Iterator[Shape]:
    channels = given.channels(config)
    yield *config["kernel_size"], channels, config["depth_multiplier"]
    yield from _bias(config, _times(channels, config["depth_multiplier"]))


def _separable(config: Config, given: BuildShape) -> Iterator[Shape]:
    channels, size = given.channels(config), config["kernel_size"]
    yield *size, channels, config["depth_multiplier"]
    yield *(1 for _ in size), _times(channels, config["depth_multiplier"]), config["filters"]
    yield from _bias(config, config["filters"])


def _normalized_shape(config: Config, given: BuildShape) -> Shape:
    axis = config["axis"]
    axis = axis[0] if isinstance(axis, list) and len(axis) == 1 else axis
    return (given.along(axis),) if isinstance(axis, int) else None


def _scale_and_center(config: Config, given: BuildShape) -> Iterator[Shape]:
    shape = _normalized_shape(config, given)
    yield from (shape for key in ("scale", "center") if config[key])


def _batch_norm(config: Config, given: BuildShape) -> Iterator[Shape]:
    yield from _scale_and_center(config, given)
    yield from (_normalized_shape(config, given),) * 2  # moving mean and variance


def _recurrent(gates: int) -> Rule:
    def rule(config: Config, given: BuildShape) -> Iterator[Shape]:
        units = config["units"]
        yield given.along(-1), units * gates
        yield units, units * gates
        yield from _bias(config, *((2,) if config.get("reset_after") else ()), units * gates)

    return rule


def _recurrent_convolution(config: Config, given: BuildShape) -> Iterator[Shape]:
    filters, size = config["filters"], config["kernel_size"]
    yield *size, None, 4 * filters
    yield *size, filters, 4 * filters
    yield from _bias(config, 4 * filters)


def _attention(config: Config, given: BuildShape) -> Iterator[Shape]:
    heads, keys = config["num_heads"], config["key_dim"]
    values = config["value_dim"] or keys
    for shape in ((heads, keys), (heads, keys), (heads, values)):
        yield None, *shape
        yield from _bias(config, *shape)
    yield None
    if config["use_bias"]:
        yield None


def _grouped_attention(config: Config, given: BuildShape) -> Iterator[Shape]:
    for heads in ("num_query_heads", "num_key_value_heads", "num_key_value_heads"):
        yield None, config[heads], config["head_dim"]
        yield from _bias(config, config[heads], config["head_dim"])
    yield config["num_query_heads"], config["head_dim"], None
    if config["use_bias"]:
        yield (None,)


def _attention_scales(config: Config, given: BuildShape) -> Iterator[Shape]:
    if config["use_scale"]:
        yield None
    if config.get("score_mode") == "concat":
        yield None


def _inner_weights(node: object) -> Iterator[Shape]:
    layer = layer_of(node)
    shapes = None if layer is None else [] if type_of(layer.kind).is_weightless else weights_of(layer)
    yield from [_UNKNOWN_SHAPE] if shapes is None else shapes


def _wrapper_of(key: str) -> Rule:
    """Return the rule of what has the weights of a layer that its configuration holds."""
    return lambda config, given: _inner_weights(config[key])


def _both_directions(config: Config, given: BuildShape) -> Iterator[Shape]:
    forward = list(_inner_weights(config["layer"]))
    yield from forward
    if config.get("backward_layer"):
        yield from _inner_weights(config["backward_layer"])
    else:
        axes = sum(len(shape or ()) for shape in forward)
        yield from forward if len(forward) < _MANY and axes < _MANY_AXES else [_UNKNOWN_SHAPE]


def _cells(config: Config, given: BuildShape) -> Iterator[Shape]:
    for cell in config["cells"]:
        yield from _inner_weights(cell)


def _any_weight(config: Config, given: BuildShape) -> Iterator[Shape]:
    yield None


# What is known of each class of layer -----------------------------------------------------------------


class Flow(Enum):
    """What a layer does to the order in which features lie; ``orders`` follows it through a model."""

    SAME = "each element is where it was"
    NORM = "the same, with weights for each feature"
    SPATIAL = "works along all axes but the channels"
    CONVOLUTION = "makes channels of channels"
    GLOBAL_POOL = "leaves one value of each channel"
    RECURRENT = "makes features of each sequence"
    ATTENTION = "mixes what it takes"
    DENSE = "makes features along the last axis"
    EMBEDDING = "makes features of numbers"
    FLATTEN = "makes one axis of all"
    INPUT = "says what the model takes"
    REPEAT = "makes a sequence of one element"
    RESHAPE = "makes other axes"
    DISTRIBUTE = "does to each step what the layer inside does"


class LayerType(NamedTuple):
    """What is known of a class of layer.

    Attributes:
        flow: What it does to the order of features; None where nobody follows it.
        kind: How its weights correspond to PyTorch's: a key of ``RULES`` in ``weights/pairing/layouts.py``.
        shapes: Yields the shapes of the weights that it has once it is built; None where nobody can tell.
        is_weightless: Whether it never has weights, wherever it stands.
        names: What Keras 3 calls its weights, in the order in which it numbers them.
        untrained: How many of them, the last ones, are never trained.
        wraps: What its configuration calls the layer that it is wrapped around.
        cell: The class of the cell inside it, which has its weights.
        removed_settings: What Keras 3 lacks of its settings in Keras 2, with the values that it always has;
            None where it is not known to read it.
    """

    flow: Flow | None = None
    kind: str | None = None
    shapes: Rule | None = None
    is_weightless: bool = False
    names: tuple[str, ...] = ()
    untrained: int = 0
    wraps: str = ""
    cell: str = ""
    removed_settings: Mapping[str, object] | None = None


ANY = object()
"""Any value of a setting."""
_UNCHANGED: Mapping[str, object] = {}
_KERNEL, _NORM = ("kernel", "bias"), ("gamma", "beta")
_SEPARATE_KERNELS = ("depthwise_kernel", "pointwise_kernel", "bias")
_RECURRENT = ("kernel", "recurrent_kernel", "bias")
_NO_GROUPS = {"groups": 1}
_SEPARATE = {"groups": 1, "kernel_initializer": ANY, "kernel_regularizer": None, "kernel_constraint": None}
_NO_TIME = {"time_major": False, "implementation": ANY}
_GATES = (("LSTM", "lstm", 4), ("GRU", "gru", 3), ("SimpleRNN", "rnn", 1))

_PLAIN = LayerType(Flow.SAME, is_weightless=True, removed_settings=_UNCHANGED)
_SPATIAL = LayerType(Flow.SPATIAL, is_weightless=True, removed_settings=_UNCHANGED)
_AUGMENTATION = LayerType(Flow.SPATIAL)
_GLOBAL_POOL = LayerType(Flow.GLOBAL_POOL, is_weightless=True, removed_settings=_UNCHANGED)
_CONVOLUTION = LayerType(Flow.CONVOLUTION, "conv", _convolution, names=_KERNEL, removed_settings=_UNCHANGED)
_ATTENTION = LayerType(Flow.ATTENTION, shapes=_attention_scales)
_GROUPED = LayerType(Flow.ATTENTION, shapes=_grouped_attention)

LAYERS: Mapping[str, LayerType] = {
    **dict.fromkeys(
        ("Activation", "AlphaDropout", "Dropout", "ELU", "GaussianDropout", "GaussianNoise"), _PLAIN
    ),
    **dict.fromkeys(("LeakyReLU", "Masking", "ReLU", "Rescaling", "Softmax", "UnitNormalization"), _PLAIN),
    **dict.fromkeys(("Add", "Average", "Concatenate", "Maximum", "Minimum", "Multiply", "Subtract"), _PLAIN),
    **{
        f"SpatialDropout{n}D": _PLAIN._replace(removed_settings={"noise_shape": None, "trainable": ANY})
        for n in (1, 2, 3)
    },
    "Identity": LayerType(Flow.SAME, is_weightless=True),
    "ActivityRegularization": LayerType(Flow.SAME, removed_settings=_UNCHANGED),
    "Dot": LayerType(is_weightless=True, removed_settings=_UNCHANGED),
    "Permute": LayerType(is_weightless=True, removed_settings=_UNCHANGED),
    "Flatten": LayerType(Flow.FLATTEN, is_weightless=True, removed_settings=_UNCHANGED),
    "InputLayer": LayerType(
        Flow.INPUT, is_weightless=True, removed_settings={"sparse": False, "ragged": False}
    ),
    "RepeatVector": LayerType(Flow.REPEAT, is_weightless=True, removed_settings=_UNCHANGED),
    "Reshape": LayerType(Flow.RESHAPE, is_weightless=True, removed_settings=_UNCHANGED),
    # Over images
    **{
        f"{kind}{n}D": _SPATIAL
        for kind in ("MaxPooling", "AveragePooling", "ZeroPadding", "Cropping", "UpSampling")
        for n in (1, 2, 3)
    },
    **{f"Global{kind}Pooling{n}D": _GLOBAL_POOL for kind in ("Max", "Average") for n in (1, 2, 3)},
    **dict.fromkeys(("RandomCrop", "RandomFlip", "RandomRotation", "RandomZoom"), _AUGMENTATION),
    **dict.fromkeys(("CenterCrop", "Resizing"), _AUGMENTATION._replace(removed_settings=_UNCHANGED)),
    **{f"Conv{n}D": _CONVOLUTION for n in (1, 2, 3)},
    **{f"Convolution{n}D": LayerType(kind="conv") for n in (1, 2, 3)},
    **{
        f"Conv{n}DTranspose": _CONVOLUTION._replace(
            kind="transposed conv", shapes=_transposed_convolution, removed_settings=_NO_GROUPS
        )
        for n in (1, 2, 3)
    },
    **{
        f"DepthwiseConv{n}D": _CONVOLUTION._replace(
            kind="depthwise", shapes=_depthwise, removed_settings=_SEPARATE
        )
        for n in (1, 2)
    },
    **{
        f"SeparableConv{n}D": _CONVOLUTION._replace(
            kind="separable", shapes=_separable, names=_SEPARATE_KERNELS, removed_settings=_SEPARATE
        )
        for n in (1, 2)
    },
    **{f"LocallyConnected{n}D": LayerType(shapes=_any_and("use_bias")) for n in (1, 2)},
    # Features
    "Dense": LayerType(Flow.DENSE, "dense", _dense, names=_KERNEL, removed_settings=_UNCHANGED),
    "EinsumDense": LayerType(shapes=_any_and("bias_axes"), names=_KERNEL, removed_settings=_UNCHANGED),
    "Embedding": LayerType(
        Flow.EMBEDDING, "embedding", _embeddings, names=("embeddings",), removed_settings=_UNCHANGED
    ),
    "ReversibleEmbedding": LayerType(shapes=_reversible_embeddings),
    "BatchNormalization": LayerType(
        Flow.NORM,
        "batch norm",
        _batch_norm,
        names=(*_NORM, "moving_mean", "moving_variance"),
        untrained=2,
        removed_settings=_UNCHANGED,
    ),
    "SyncBatchNormalization": LayerType(Flow.NORM, "batch norm"),
    "LayerNormalization": LayerType(
        Flow.NORM, "norm", _scale_and_center, names=_NORM, removed_settings=_UNCHANGED
    ),
    "GroupNormalization": LayerType(
        Flow.NORM, "norm", _scale_and_center, names=_NORM, removed_settings=_UNCHANGED
    ),
    "RMSNormalization": LayerType(Flow.NORM, "rms norm", _any_weight, names=("scale",)),
    "Normalization": LayerType(Flow.NORM),
    "PReLU": LayerType(Flow.NORM, shapes=_any_weight, names=("alpha",), removed_settings=_UNCHANGED),
    "AdditiveAttention": _ATTENTION,
    "Attention": _ATTENTION,
    "MultiHeadAttention": LayerType(Flow.ATTENTION, shapes=_attention),
    "GroupQueryAttention": _GROUPED,
    "GroupedQueryAttention": _GROUPED,
    # Sequences
    **{
        name: LayerType(
            Flow.RECURRENT, kind, _recurrent(gates), cell=f"{name}Cell", removed_settings=_NO_TIME
        )
        for name, kind, gates in _GATES
    },
    **{
        f"{name}Cell": LayerType(None, kind, _recurrent(gates), names=_RECURRENT)
        for name, kind, gates in _GATES
    },
    **{f"ConvLSTM{n}D": LayerType(shapes=_recurrent_convolution, cell="ConvLSTMCell") for n in (1, 2, 3)},
    "RNN": LayerType(Flow.RECURRENT, shapes=_wrapper_of("cell"), wraps="cell"),
    "StackedRNNCells": LayerType(shapes=_cells),
    "Bidirectional": LayerType(
        Flow.RECURRENT, shapes=_both_directions, wraps="layer", removed_settings=_UNCHANGED
    ),
    "TimeDistributed": LayerType(
        Flow.DISTRIBUTE, shapes=_wrapper_of("layer"), wraps="layer", removed_settings=_UNCHANGED
    ),
}
"""By the name of the class; nothing is known of others."""

_UNKNOWN = LayerType()


def type_of(kind: str) -> LayerType:
    """Return what is known of a class of layer."""
    return LAYERS.get(kind, _UNKNOWN)
