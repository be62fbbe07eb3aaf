"""``LAYERS``: facts about each class of Keras's layers, a row each.

A rule yields the shapes of a layer's weights from its settings, and raises if they lack one that decides.

Source: Keras ``src/layers``; tf_keras ``src/layers``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import Any, NamedTuple

Shape = tuple[int | None, ...] | None
"""Shape of a weight; None is an axis of any length, or any shape at all."""
Config = Mapping[str, Any]

# Rules ----------------------------------------------------------------------------------------------
#
# The weights are yielded in the order in which a layer makes them. Keras's kernels have the input features
# before the output features, as the last two axes: (in, out), and (*size, in, out) of a convolution.


class BuildShape(NamedTuple):
    """Input shape that a layer was built for, with the batch; None if it is not known."""

    shape: list[Any] | None

    def along(self, axis: int) -> int | None:
        """Return the length along an axis."""
        return None if self.shape is None else self.shape[axis]

    def channels(self, config: Config) -> int | None:
        """Return the number of channels of an image."""
        return self.along(-1 if config["data_format"] == "channels_last" else 1)


Rule = Callable[[Config, BuildShape], Iterator[Shape]]


def _times(length: int | None, factor: int) -> int | None:
    if type(factor) is not int:
        raise TypeError("not a number")
    return None if length is None else length * factor


def _bias(config: Config, *shape: int | None) -> Iterator[Shape]:
    if config["use_bias"]:
        yield shape


def _dense(config: Config, inputs: BuildShape) -> Iterator[Shape]:
    yield inputs.along(-1), config["units"]
    yield from _bias(config, config["units"])


def _any_and(bias: str) -> Rule:
    """Return the rule of a kernel of any shape, and of a bias if a setting is true."""

    def rule(config: Config, inputs: BuildShape) -> Iterator[Shape]:
        yield None
        if config[bias]:
            yield None

    return rule


def _embeddings(config: Config, inputs: BuildShape) -> Iterator[Shape]:
    yield config["input_dim"], config["output_dim"]


def _reversible_embeddings(config: Config, inputs: BuildShape) -> Iterator[Shape]:
    yield config["input_dim"], config["output_dim"]
    if not config["tie_weights"]:
        yield config["output_dim"], config["input_dim"]


def _convolution(config: Config, inputs: BuildShape) -> Iterator[Shape]:
    channels, filters = inputs.channels(config), config["filters"]
    yield *config["kernel_size"], None if channels is None else channels // config["groups"], filters
    yield from _bias(config, filters)


def _transposed_convolution(config: Config, inputs: BuildShape) -> Iterator[Shape]:
    # The gradient of a convolution: the output features come before the input features.
    yield *config["kernel_size"], config["filters"], inputs.channels(config)
    yield from _bias(config, config["filters"])


def _depthwise(config: Config, inputs: BuildShape) -> Iterator[Shape]:
    channels = inputs.channels(config)
    yield *config["kernel_size"], channels, config["depth_multiplier"]
    yield from _bias(config, _times(channels, config["depth_multiplier"]))


def _separable(config: Config, inputs: BuildShape) -> Iterator[Shape]:
    channels, size = inputs.channels(config), config["kernel_size"]
    yield *size, channels, config["depth_multiplier"]
    yield *(1 for _ in size), _times(channels, config["depth_multiplier"]), config["filters"]
    yield from _bias(config, config["filters"])


def _normalized_shape(config: Config, inputs: BuildShape) -> Shape:
    axis = config["axis"]
    axis = axis[0] if isinstance(axis, list) and len(axis) == 1 else axis
    return (inputs.along(axis),) if isinstance(axis, int) else None


def _scale_and_center(config: Config, inputs: BuildShape) -> Iterator[Shape]:
    shape = _normalized_shape(config, inputs)
    yield from (shape for key in ("scale", "center") if config[key])


def _batch_norm(config: Config, inputs: BuildShape) -> Iterator[Shape]:
    yield from _scale_and_center(config, inputs)
    yield from (_normalized_shape(config, inputs),) * 2  # moving mean and variance


def _recurrent(gates: int) -> Rule:
    # The gates are side by side in the last axis. A GRU with ``reset_after`` has one bias for the inputs and
    # one for the state, stacked: (2, 3 * units).
    def rule(config: Config, inputs: BuildShape) -> Iterator[Shape]:
        units = config["units"]
        yield inputs.along(-1), units * gates
        yield units, units * gates
        yield from _bias(config, *((2,) if config.get("reset_after") else ()), units * gates)

    return rule


def _recurrent_convolution(config: Config, inputs: BuildShape) -> Iterator[Shape]:
    # A ConvLSTM has the four gates of an LSTM side by side in the filters. The channels of its input aren't
    # in its configuration.
    filters, size = config["filters"], config["kernel_size"]
    yield *size, None, 4 * filters
    yield *size, filters, 4 * filters
    yield from _bias(config, 4 * filters)


def _attention(config: Config, inputs: BuildShape) -> Iterator[Shape]:
    # Kernels of query, key and value are (features, heads, size), their biases (heads, size). The number of
    # features is that of the inputs, which the configuration lacks; the output's weights may have any shape
    # for the same reason.
    heads, keys = config["num_heads"], config["key_dim"]
    values = config["value_dim"] or keys
    for shape in ((heads, keys), (heads, keys), (heads, values)):
        yield None, *shape
        yield from _bias(config, *shape)
    yield None
    if config["use_bias"]:
        yield None


def _grouped_attention(config: Config, inputs: BuildShape) -> Iterator[Shape]:
    for heads in ("num_query_heads", "num_key_value_heads", "num_key_value_heads"):
        yield None, config[heads], config["head_dim"]
        yield from _bias(config, config[heads], config["head_dim"])
    yield config["num_query_heads"], config["head_dim"], None
    if config["use_bias"]:
        yield (None,)


def _attention_scales(config: Config, inputs: BuildShape) -> Iterator[Shape]:
    if config["use_scale"]:
        yield None
    if config.get("score_mode") == "concat":
        yield None


def _any_weight(config: Config, inputs: BuildShape) -> Iterator[Shape]:
    yield None


# Table of the layer classes ---------------------------------------------------------------------------


class Flow(Enum):
    """Effect of a layer on the order of features; ``orders`` follows it through a model."""

    SAME = "keeps each element in its place"
    NORM = "the same, with weights for each feature"
    SPATIAL = "works along all axes but the channels"
    CONVOLUTION = "turns channels into other channels"
    GLOBAL_POOL = "reduces each channel to one value"
    RECURRENT = "turns each sequence into features"
    ATTENTION = "mixes the elements of sequences"
    DENSE = "turns features along the last axis into others"
    EMBEDDING = "turns numbers into features"
    FLATTEN = "joins all axes to one"
    INPUT = "gives the shape of the model's input"
    REPEAT = "makes a sequence of one element"
    RESHAPE = "makes other axes"
    DISTRIBUTE = "applies the layer inside to each step"


class LayerType(NamedTuple):
    """Facts about a class of layers.

    Attributes:
        flow: Effect on the order of features; None if it is not followed.
        layout: Layout of its weights: a key of ``RULES`` in ``weights/pairing/layouts.py``.
        shapes: Yields the shapes of its weights after it was built; None if they are not known.
        is_weightless: Whether it never has weights.
        names: Names of its weights in Keras 3, in the order of their numbers.
        untrained: Number of weights at the end that are never trained.
        wraps: Setting with the layer or the cells inside it; it has no weights besides theirs.
        cell: Class of the cell that has its weights: ``LSTMCell``.
        removed_settings: Settings of Keras 2 that Keras 3 lacks, with the values that it implies; None if it
            isn't known whether Keras 3 reads this layer of Keras 2.
    """

    flow: Flow | None = None
    layout: str | None = None
    shapes: Rule | None = None
    is_weightless: bool = False
    names: tuple[str, ...] = ()
    untrained: int = 0
    wraps: str = ""
    cell: str = ""
    removed_settings: Mapping[str, object] | None = None

    @property
    def has_known_weights(self) -> bool:
        """Whether the weights of an unchanged layer follow from its configuration."""
        return self.shapes is not None or bool(self.wraps)


ANY = object()
"""Any value of a removed setting."""
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
    **{f"Convolution{n}D": LayerType(layout="conv") for n in (1, 2, 3)},
    **{
        f"Conv{n}DTranspose": _CONVOLUTION._replace(
            layout="transposed conv", shapes=_transposed_convolution, removed_settings=_NO_GROUPS
        )
        for n in (1, 2, 3)
    },
    **{
        f"DepthwiseConv{n}D": _CONVOLUTION._replace(
            layout="depthwise", shapes=_depthwise, removed_settings=_SEPARATE
        )
        for n in (1, 2)
    },
    **{
        f"SeparableConv{n}D": _CONVOLUTION._replace(
            layout="separable", shapes=_separable, names=_SEPARATE_KERNELS, removed_settings=_SEPARATE
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
            Flow.RECURRENT, layout, _recurrent(gates), cell=f"{name}Cell", removed_settings=_NO_TIME
        )
        for name, layout, gates in _GATES
    },
    **{
        f"{name}Cell": LayerType(None, layout, _recurrent(gates), names=_RECURRENT)
        for name, layout, gates in _GATES
    },
    **{f"ConvLSTM{n}D": LayerType(shapes=_recurrent_convolution, cell="ConvLSTMCell") for n in (1, 2, 3)},
    "RNN": LayerType(Flow.RECURRENT, wraps="cell"),
    "StackedRNNCells": LayerType(wraps="cells"),
    "Bidirectional": LayerType(Flow.RECURRENT, wraps="layer", removed_settings=_UNCHANGED),
    "TimeDistributed": LayerType(Flow.DISTRIBUTE, wraps="layer", removed_settings=_UNCHANGED),
}
"""Facts by the name of the class."""

UNKNOWN = LayerType()
"""Facts about any other class."""
