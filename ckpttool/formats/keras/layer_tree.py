"""Layers in a configuration of Keras: wiring, groups in files, parts, and weights in order.

A layer has weights of its own, then those of its parts (the layers inside it), in the order in which it made
them; an ``.h5`` lists the trained ones before the others. ``.weights.h5`` numbers the own weights of each
layer; the group of a part is named after the attribute that holds it.

The kind of a layer is known if it is one of Keras's own and its weights are those of its class: not
quantized, not adapted. A wrapper has the kind of the layer inside it.

Source: Keras ``src/layers/layer.py``, ``src/legacy/saving/legacy_h5_format.py``,
``src/saving/saving_lib.py``.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from ckpttool.core.layers import LayerKind
from ckpttool.formats.keras.layers import LAYERS, UNKNOWN, BuildShape, Config, LayerType, Shape
from ckpttool.formats.keras.names import part_of_keras

Steps = tuple[str, ...]
"""Path of a layer or a variable: names of models and layers, or of groups in a file."""
WeightCount = Callable[[Steps, "Layer"], int]
"""Returns the number of own weights of the layer of a group; raises ``KerasRefusal``."""

LAYERS_GROUP, VARIABLES_GROUP = "layers", "vars"
_MODELS = frozenset({"Functional", "Sequential", "Model"})
_SOURCE_CLASSES = {"GroupQueryAttention": "GroupedQueryAttention"}
"""Names of classes in Keras's source, after which groups are named, by other names in a configuration."""
GROUP_WORDS = ("[a-z]+", "[a-z0-9]+")
"""Patterns of a word in the name of a class, of Keras 3 and Keras 2; see ``snake_case``."""
_PLAIN_POLICIES = ("DTypePolicy", "FloatDTypePolicy", "Policy")
_CHANGED_BY = (
    *("lora_rank", "lora_enabled", "quantization_config", "use_gate", "rms_scaling", "renorm", "stateful"),
)
"""Settings that change which weights a layer has, or how they are stored."""
_MAX_REPEATED = 1000
"""Maximum number of weights that a Bidirectional repeats backwards: nested ones double them at each level."""
_MAX_AXES = 10 * _MAX_REPEATED
"""Maximum number of axes of these weights, together."""
_OPTIONAL = {"scale": "gamma", "center": "beta"}
"""Optional weights of norms, by the settings that add them."""
_NORMS = ("batch norm", "norm")
CONV_CELL = "ConvLSTMCell"


class KerasRefusal(Exception):
    """A model can't be written as a Keras file; the message names the layer."""


class Part(NamedTuple):
    """A layer inside another one.

    Attributes:
        group: Path of its group below that of the other one.
        name: Its name in the lists of an ``.h5``.
        layer: None if the configuration does not describe it.
    """

    group: Steps
    name: str
    layer: Layer | None


class Weight(NamedTuple):
    """One weight of a layer.

    Attributes:
        path: Its dataset in a file with numbered variables.
        name: Its name in a list, below that of the layer.
        is_trained: Whether training changes it.
    """

    path: Steps
    name: Steps
    is_trained: bool


# Layers ---------------------------------------------------------------------------------------------


class Layer:
    """One layer or model of a configuration; the layers inside it are parsed at their first use.

    Attributes:
        name: Empty without one.
        cls: Name of its class: ``Dense``.
        config: Its settings.
        node: The object with its class, module, settings and inputs.
        path: Names of the models around it, without the outermost, and its own.
        groups: Names of its group in its model, in Keras 3 and in Keras 2: ``dense_1``.
    """

    def __init__(self, name: str, cls: str, config: Config, node: Config) -> None:
        self.name, self.cls, self.config, self.node = name, cls, config, node
        self.path: Steps = ()
        self.groups = ("", "")

    @property
    def type(self) -> LayerType:
        """Facts about its class."""
        return LAYERS.get(self.cls, UNKNOWN)

    @property
    def is_known(self) -> bool:
        """Whether its class is one of Keras's own."""
        module, registered = self.node.get("module"), self.node.get("registered_name")
        is_of_keras = module is None or (isinstance(module, str) and part_of_keras(module) is not None)
        return is_of_keras and registered in (None, self.cls)

    @property
    def is_model(self) -> bool:
        """Whether it is a model whose configuration lists its layers."""
        return self.is_known and self.cls in _MODELS and bool(self.layers)

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """The layers that its configuration lists."""
        nodes = self.config.get("layers")
        layers = [layer for node in (nodes if isinstance(nodes, list) else ()) if (layer := layer_of(node))]
        # Keras names the group of a layer after its class, and numbers the layers of a class in the order of
        # the model: ``dense``, ``dense_1``. Keras 2 and 3 divide some names into words differently, so each
        # spelling has its own count. A user's class is registered as ``package>Name``.
        used: tuple[Counter[str], Counter[str]] = Counter(), Counter()
        for layer in layers:
            layer.path = (*self.path, layer.name)
            cls = _SOURCE_CLASSES.get(layer.cls, layer.cls.rpartition(">")[2])
            layer.groups = (
                _numbered(snake_case(cls, GROUP_WORDS[0]), used[0]),
                _numbered(snake_case(cls, GROUP_WORDS[1]), used[1]),
            )
        return tuple(layers)

    @property
    def built_for(self) -> list[object] | None:
        """Input shape that it was built for, with the batch; None if it is not known."""
        built = self.node.get("build_config")
        shape = built.get("input_shape") if isinstance(built, Mapping) else None
        return shape if isinstance(shape, list) and shape else None

    def group_in(self, model: Steps, present: Container[Steps]) -> Steps:
        """Return the path of the layer's group in a file, below that of its model.

        Args:
            model: Group of the model; empty for the outermost.
            present: All groups of the file; if neither name is one of them, that of Keras 3 is taken.
        """
        groups = [(*model, LAYERS_GROUP, name) for name in self.groups]
        return next((group for group in groups if group in present), groups[0])

    def layers_with_groups(self, model: Steps, present: Container[Steps]) -> Iterator[tuple[Steps, Layer]]:
        """Yield the layers of a model, also of inner models, with their groups; see ``group_in``."""
        for layer in self.layers:
            group = layer.group_in(model, present)
            yield group, layer
            if layer.is_model:
                yield from layer.layers_with_groups(group, present)

    # Weights ----------------------------------------------------------------------------------------

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """The layers inside it, in the order in which it made them."""
        return () if self.type.is_weightless else tuple(_parts_of(self))

    @property
    def is_mirrored(self) -> bool:
        """Whether it has a copy of the layer inside it, for the backward direction."""
        return self.cls == "Bidirectional" and not self.config.get("backward_layer")

    def weight_shapes(self) -> list[Shape] | None:
        """Return the shapes of its weights after it was built, or None if they are not known."""
        if self.is_model:
            is_ambiguous = len({layer.name for layer in self.layers}) < len(self.layers)
            return None if is_ambiguous else self._shapes_of_parts()
        if not self.is_known or self._is_changed:
            return None
        if self.type.wraps:
            return self._shapes_of_parts()
        shape = self.built_for
        if shape is not None and not all(length is None or type(length) is int for length in shape):
            shape = None
        try:
            shapes = None if self.type.shapes is None else [*self.type.shapes(self.config, BuildShape(shape))]
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            return None  # the configuration lacks what decides, or has something else there
        lengths = [length for shape in shapes or () for length in shape or ()]
        is_possible = all(one is None or (type(one) is int and 0 <= one < 1 << 63) for one in lengths)
        return shapes if is_possible else None

    @property
    def _is_changed(self) -> bool:
        """Whether settings change its weights, or may add some."""
        # A quantized layer has a dtype policy such as ``int8_from_float32``, and more weights than its class.
        dtype = self.config.get("dtype")
        is_quantized = (isinstance(dtype, Mapping) and dtype.get("class_name") not in _PLAIN_POLICIES) or (
            isinstance(dtype, str) and "_from_" in dtype
        )
        # An activation may be a layer of its own, with weights.
        activations = (self.config.get(key) for key in ("activation", "recurrent_activation"))
        return (
            is_quantized
            or any(self.config.get(key) for key in _CHANGED_BY)
            or any(isinstance(one, Mapping) for one in activations)
        )

    def _shapes_of_parts(self) -> list[Shape] | None:
        shapes: list[Shape] = []
        last: Layer | None = None
        for part in self.parts:
            if part.layer is None:
                return None
            # The backward copy of a Bidirectional has the shapes of the layer before it. A configuration may
            # nest Bidirectionals, and each level doubles the weights: a few kilobytes would take all memory.
            if part.layer is last:
                axes = sum(len(shape or ()) for shape in shapes)
                known = [*shapes] if len(shapes) < _MAX_REPEATED and axes < _MAX_AXES else None
            else:
                known = [] if part.layer.type.is_weightless else part.layer.weight_shapes()
            if known is None:
                return None
            shapes += known
            last = part.layer
        return shapes

    def weights(self, group: Steps, count: WeightCount) -> list[Weight]:
        """Return its weights in the order of a listed file.

        Args:
            group: Its group in a file with numbered weights.
            count: Returns the number of own weights of a layer.

        Raises:
            KerasRefusal: Their order is not known.
        """
        # An ``.h5`` lists the trained weights of a layer, also of all its parts, before the others: the
        # moving averages of norms come last. A frozen layer has none that is trained, and the order of its
        # numbers. Sorting is stable.
        weights = list(self._numbered_weights(group, (), count))
        if len({weight.path for weight in weights}) < len(weights):
            raise KerasRefusal(f"layer {self.name!r} contains a layer twice")
        if not self.config.get("trainable", True):
            return weights
        return sorted(weights, key=lambda weight: not weight.is_trained)

    def _numbered_weights(
        self, group: Steps, name: Steps, count: WeightCount, *, is_inner: bool = False, is_twice: bool = False
    ) -> Iterator[Weight]:
        if any(part.layer is None for part in self.parts):
            raise KerasRefusal("a layer inside another is not described")
        if self.is_mirrored and is_twice:  # Keras can't build it, and each level would double the weights
            raise KerasRefusal(f"layer {self.name!r} is bidirectional inside another one")
        own = count(group, self)
        names = self.variable_names(own)
        if len(set(names)) < len(names):
            names = [f"{word}_{at}" for at, word in enumerate(names)]
        trained = own - self.type.untrained if self.config.get("trainable", True) else 0
        if own and is_inner and self.cls != CONV_CELL and not self.type.has_known_weights:
            raise KerasRefusal(f"unknown which weights of {self.name!r} ({self.cls}) are trained")
        for at in range(own):
            yield Weight((*group, VARIABLES_GROUP, str(at)), (*name, names[at]), at < trained)
        is_twice = is_twice or self.is_mirrored
        for part in self.parts:
            if part.layer is not None:
                places = (*group, *part.group), (*name, part.name)
                yield from part.layer._numbered_weights(*places, count, is_inner=True, is_twice=is_twice)

    def variable_names(self, count: int) -> list[str]:
        """Return names for ``count`` own weights, in the order in which Keras numbers them."""
        # A norm without ``scale`` has no gamma, and its beta is number 0. Weights without names in ``LAYERS``
        # are called variable_0, variable_1 …
        kind = LAYERS["LSTMCell"] if self.cls.endswith("Cell") else self.type
        known = kind.names
        if kind.layout in _NORMS:
            absent = {word for key, word in _OPTIONAL.items() if not self.config.get(key)}
            known = tuple(word for word in known if word not in absent)
        if kind.layout == "separable" or len(known) >= count:
            return list(known[:count])
        return [f"variable_{at}" for at in range(count)] if count > 1 else ["variable"] * count

    # Kind -------------------------------------------------------------------------------------------

    @property
    def kind(self) -> LayerKind | None:
        """Its kind or that of the layer inside it, without its place in a model; None if it is not known."""
        # The weights of a wrapper are those of the layer inside it. Stacked cells are several layers, and
        # have no common kind.
        inner = self
        while (key := inner.type.wraps) and key != "cells" and inner.is_known:
            wrapped = layer_of(inner.config.get(key))
            if wrapped is None:
                return None
            inner = wrapped
        if inner.is_model or inner.weight_shapes() is None:
            return None
        layout = inner.type.layout
        return LayerKind(
            inner.cls,
            missing=tuple(
                word for key, word in _OPTIONAL.items() if layout in _NORMS and inner.config.get(key) is False
            ),
            reset_after=layout != "gru" or bool(inner.config.get("reset_after")),
        )


def layer_of(node: object) -> Layer | None:
    """Return the layer of an object in a configuration, or None if it is none."""
    if not isinstance(node, Mapping):
        return None
    cls, config = node.get("class_name"), node.get("config")
    if not isinstance(cls, str):
        return None
    if cls == "Sequential" and isinstance(config, list):  # the first releases of Keras 2
        config = {"layers": config, "name": node.get("name")}
    if not isinstance(config, Mapping):
        return None
    name = config.get("name") or node.get("name")
    return Layer(name if isinstance(name, str) else "", cls, config, node)


def snake_case(name: str, words: str = GROUP_WORDS[0]) -> str:
    """Return the name of a class as Keras names groups: ``Conv2DTranspose`` is ``conv2d_transpose``."""
    # Keras 2 has digits in words: its ConvLSTM2D is ``conv_lst_m2d``, that of Keras 3 ``conv_lstm2d``.
    name = re.sub(rf"(.)([A-Z]{words})", r"\1_\2", re.sub(r"\W+", "", name))
    return re.sub("([a-z])([A-Z])", r"\1_\2", name).lower()


def paths_below(paths: Sequence[Steps], group: Steps) -> Iterator[Steps]:
    """Yield the paths that begin with a group; all paths are sorted."""
    for at in range(bisect_left(paths, group), len(paths)):
        if paths[at][: len(group)] != group:
            return
        yield paths[at]


def _numbered(name: str, used: Counter[str]) -> str:
    used[name] += 1
    return name if used[name] == 1 else f"{name}_{used[name] - 1}"


# Parts of layers -------------------------------------------------------------------------------------


def _parts_of(layer: Layer) -> Iterator[Part]:
    if layer.is_model:
        for inner in layer.layers:
            yield Part((LAYERS_GROUP, inner.groups[0]), inner.name, inner)
    elif cell := layer.type.cell:
        name = f"{snake_case(layer.cls)}_cell"
        yield Part(("cell",), name, _made_layer(layer, name, cell))
    elif layer.cls in ("MultiHeadAttention", "GroupQueryAttention", "GroupedQueryAttention"):
        yield from _attention_parts(layer)
    elif layer.cls == "Bidirectional":
        yield from _directions(layer)
    elif layer.cls == "StackedRNNCells":
        yield from _stacked_cells(layer.config)
    elif layer.type.wraps:
        yield _described_part((layer.type.wraps,), layer.config.get(layer.type.wraps))


def _described_part(group: Steps, node: object) -> Part:
    layer = layer_of(node)
    return Part(group, layer.name if layer else "", layer)


def _made_layer(layer: Layer, name: str, cls: str, **more: Any) -> Layer:
    """Return a layer inside another one, described by the configuration of that."""
    config = {**layer.config, "name": name, **more}
    return Layer(name, cls, config, {**layer.node, "class_name": cls, "registered_name": None})


def _attention_parts(layer: Layer) -> Iterator[Part]:
    mark = "" if layer.cls == "MultiHeadAttention" else "_"
    bias = "d" if layer.config.get("use_bias", True) else None
    names = {"query": "query", "key": "key", "value": "value", "output": "attention_output"}
    for word, name in names.items():
        yield Part((f"{mark}{word}_dense",), name, _made_layer(layer, name, "EinsumDense", bias_axes=bias))


def _stacked_cells(config: Config) -> Iterator[Part]:
    used: Counter[str] = Counter()
    cells = config.get("cells")
    for node in cells if isinstance(cells, list) else [None]:
        part = _described_part((), node)
        name = _numbered(snake_case(part.layer.cls), used) if part.layer else ""
        yield part._replace(group=("cells", name))


def _directions(layer: Layer) -> Iterator[Part]:
    forward = _described_part(("forward_layer",), layer.config.get("layer"))
    yield forward
    if layer.is_mirrored:
        yield Part(("backward_layer",), f"backward_{forward.name}", forward.layer)
    else:
        yield _described_part(("backward_layer",), layer.config["backward_layer"])
