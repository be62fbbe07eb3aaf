"""Places of tensors in a Keras file to be written: numbered variables, or entries of lists.

``.weights.h5`` and ``.keras`` number the variables of each layer; whole models in ``.h5`` list layers and
weights. Tensors that come from a file of the same kind get the places that they had. Between the two kinds,
the configuration gives the order of a layer's weights; if it doesn't, the file is refused.

Source: Keras ``src/saving/saving_lib.py``, ``src/legacy/saving/legacy_h5_format.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from ckpttool.containers.hdf5_writer import MAX_ATTRIBUTE, MAX_ATTRIBUTES, attribute_fault
from ckpttool.core.tensor import Path, Tensor
from ckpttool.formats.hdf5.writer import name_refusals
from ckpttool.formats.keras.config_writer import as_keras_3, is_keras2, model_of
from ckpttool.formats.keras.layer_tree import (
    CONV_CELL,
    LAYERS_GROUP,
    VARIABLES_GROUP,
    KerasRefusal,
    Layer,
    Steps,
    Weight,
    paths_below,
)
from ckpttool.formats.keras.layout import (
    TOP_GROUPS,
    TOP_LEVEL,
    name_tensors,
    names_in,
    stored_path,
    top_of,
)
from ckpttool.formats.keras.model import KerasModel
from ckpttool.formats.keras.names import CLASSES
from ckpttool.formats.keras.native import CONFIG, Stored, object_of, stored_of
from ckpttool.formats.sidecar import ENTRY
from ckpttool.formats.writer import Content

Attributes = dict[str, Any]
_OPTIMIZER_GROUP, _OPTIMIZER_LIST = "optimizer", "optimizer_weights"
_HINT = "(--model FILE gives the names of another checkpoint, --map renames)"
_KERAS_2 = "Keras 2 wrote it, with its variables in another order (load and save it in Keras 3)"
_KERAS_2_OPTIMIZER = (
    "Keras 2 wrote it, with its optimizer's state in another order (--only weights leaves it out)"
)
_NOT_KERAS = "its name is not that of a Keras variable (layers/<name>/vars/<n>)"
_MODEL_WEIGHTS = "model_weights"
_OPTIMIZER = (_OPTIMIZER_GROUP, VARIABLES_GROUP)
_INNER_OPTIMIZER = (_OPTIMIZER_GROUP, "inner_optimizer", VARIABLES_GROUP)
"""Groups of the variables of an optimizer, and of the one inside a LossScaleOptimizer."""
_OPTIMIZER_NAMES = ("iteration", "learning_rate")
"""Names of an optimizer's first variables; the others have no names of their own."""
_STATEFUL = frozenset({"TextVectorization", "StringLookup", "IntegerLookup", "Hashing", "FeatureSpace"})
"""Layers with other state besides their weights."""


@dataclass(slots=True)
class Places:
    """Groups and datasets of a file to be written.

    Attributes:
        groups: The attributes of each group.
        paths: The datasets, by the names of their tensors.
        problems: Reasons why the file can't be written, a sentence each.
        config: Configuration of the model, if the file has one.
    """

    groups: dict[Steps, Attributes] = field(default_factory=dict)
    paths: dict[str, Steps] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    config: object = None

    def reader_paths(self, tensors: Iterable[Tensor]) -> dict[str, Path]:
        """Return the paths that the reader of the file will give to tensors, by their names now."""
        # The reader's own functions name the tensors as if they had been read, so that the two can't differ.
        stored = {
            self.paths[tensor.name]: replace(tensor, path=self.paths[tensor.name], shares_with=None)
            for tensor in tensors
            if tensor.name in self.paths
        }
        model = KerasModel.of_config(self.config)
        layer_names = {} if model is None else model.layer_names((*self.groups, *stored))
        named = name_tensors(self.groups, stored, layer_names)[0]
        reader_paths = {stored_path(tensor): tensor.path for tensor in named}
        return {name: reader_paths[path] for name, path in self.paths.items()}

    def note_shared_paths(self) -> None:
        """Add a problem for each tensor whose place is that of another."""
        taken: dict[Steps, str] = {}
        for name, path in self.paths.items():
            if path in taken:
                self.problems.append(f"{name}: same place as {taken[path]!r}, /{'/'.join(path)}")
            taken[path] = name

    def note_faulty_group(self) -> None:
        """Add a problem for the first group that can't be written."""
        # The groups may be from ``keras.stored`` in a sidecar, and then have any names and attributes.
        datasets = {*self.paths.values(), (ENTRY,)}
        for path, attributes in self.groups.items():
            fault = next(_group_faults(path, attributes, datasets), None)
            if fault is not None:
                self.problems.append(f"the group /{'/'.join(path)}: {fault} (--only weights leaves it out)")
                return


def _group_faults(path: Steps, attributes: Attributes, datasets: set[Steps]) -> Iterator[str]:
    if path:
        yield from name_refusals(path)
    if any(path[:at] in datasets for at in range(1, len(path) + 1)):
        yield "a dataset has this path"
    if len(attributes) > MAX_ATTRIBUTES:
        yield f"{len(attributes):,} attributes, and at most {MAX_ATTRIBUTES:,} are written"
    for name, value in attributes.items():
        if fault := attribute_fault(name, value):
            yield f"its attribute {name[:100]!r}: {fault}"


def chunked_attribute(key: str, names: list[str]) -> Attributes:
    """Return the attributes that hold a list of names: several if one would be too long."""
    # The names become an array of fixed-length strings, so the longest decides how many fit in an attribute.
    width = max((len(name.encode("utf-8", "surrogateescape")) for name in names), default=1)
    count = max(1, MAX_ATTRIBUTE // max(1, width))
    if len(names) <= count:
        return {key: names}
    starts = range(0, len(names), count)
    return {f"{key}{at}": names[start : start + count] for at, start in enumerate(starts)}


# Numbered variables, as .weights.h5 has them --------------------------------------------------------


def numbered_places(content: Content) -> Places:
    """Return the places of tensors in a ``.weights.h5``."""
    places = Places()
    stored = stored_of(content.native)
    if stored is not None and not stored.lists:
        places.groups = {path: dict(attributes) for path, attributes in stored.groups.items()}
        places.paths = {
            tensor.name: stored.paths[tensor.name]
            for tensor in content.tensors
            if tensor.name in stored.paths
        }
    elif stored is not None:
        _NumberedPlaces(places, content, stored).run()
    for tensor in content.tensors:
        if tensor.name in places.paths:
            continue
        # A tensor from another format is placed if its name is that of a variable, perhaps by ``--map``.
        name = tensor.name
        readings = (tuple(map(str, tensor.path)), tuple(name.split("/")), tuple(name.split(".")))
        if (path := next(filter(is_variable, readings), None)) is not None:
            places.paths[tensor.name] = path
        elif not places.problems:
            places.problems.append(f"{tensor.name}: {_NOT_KERAS} {_HINT}")
    places.note_shared_paths()
    places.note_faulty_group()
    return places


def is_variable(path: Steps) -> bool:
    """Return whether a path is that of a numbered variable."""
    return path[-2:-1] == (VARIABLES_GROUP,) and path[0] in TOP_GROUPS and path[-1].isdecimal() and all(path)


class _NumberedPlaces:
    """Numbers the weights of a file that listed them."""

    def __init__(self, places: Places, content: Content, stored: Stored) -> None:
        self._places, self._stored, self._native = places, stored, content.native
        self._names = {path: name for name, path in stored.paths.items()}
        self._present = {tensor.name for tensor in content.tensors}

    def run(self) -> None:
        model = model_of(self._native)
        if model is None or not model.is_model:
            self._places.problems.append(
                "the layers are unknown (only the order of their weights is known), "
                f"but variables are numbered layer by layer {_HINT}"
            )
            return
        top = top_of(self._stored.groups) or ()
        try:
            self._require_order_of_keras_3()
            for layer in model.layers:
                group = (LAYERS_GROUP, layer.groups[0])
                inside = layer.layers_with_groups(group, ()) if layer.is_model else ()
                for path, one in [(group, layer), *inside]:
                    own = (*path, VARIABLES_GROUP)
                    self._places.groups[own] = {"name": one.name}
                self._add_layer(layer, self._weights((*top, *layer.name.split("/"))))
            if weights := self._weights((*top, TOP_LEVEL)):
                raise KerasRefusal(f"{weights[0][1]}: a weight of no layer")
        except KerasRefusal as failure:
            self._places.problems.append(str(failure))
            return
        self._places.groups.setdefault((VARIABLES_GROUP,), {"name": model.name})
        self._add_optimizer()

    def _require_order_of_keras_3(self) -> None:
        # Keras 2 lists some weights in another order. A model that can be translated has the same.
        if not is_keras2(self._native):
            return
        try:
            as_keras_3(object_of(self._native[CONFIG]))
        except KerasRefusal as failure:
            raise KerasRefusal(f"Keras 2 wrote it: {failure}") from failure
        if self._weights((_OPTIMIZER_LIST,)):
            raise KerasRefusal(_KERAS_2_OPTIMIZER)

    def _weights(self, group: Steps) -> list[tuple[Steps, str]]:
        """Return the datasets that a group lists, with the names of their tensors."""
        names = names_in(self._stored.groups.get(group, {}), "weight_names") or ()
        paths = [(*group, *name.split("/")) for name in names]
        return [(path, self._names[path]) for path in paths if self._names.get(path) in self._present]

    def _add_layer(self, layer: Layer, listed: list[tuple[Steps, str]]) -> None:
        # A list has the trained weights first, numbers have those of each part of the layer together. Parts
        # are known for models and Keras's wrappers; any other layer must be one without parts, whose list
        # and numbers are in one order.
        if not listed:
            return
        group = (LAYERS_GROUP, layer.groups[0])
        if layer.type.is_weightless or layer.parts:
            weights = layer.weights(group, _own_weight_count)
        else:
            _require_own_layer(layer)
            for path, _ in listed if not layer.type.has_known_weights else ():
                # A weight that is named after a layer inside shows that there is one.
                below = path[::-1][: path[::-1].index(layer.name)] if layer.name in path else path[-1:]
                if len(below) > 1:
                    raise KerasRefusal(_unknown_parts(layer))
            weights = [Weight((*group, VARIABLES_GROUP, str(at)), (), True) for at in range(len(listed))]
        if len(weights) != len(listed):
            raise KerasRefusal(
                f"layer {layer.name!r} has {len(listed)} weights, but its config makes {len(weights)}"
            )
        for weight, (path, name) in zip(weights, listed, strict=True):
            if layer.is_model and weight.name[0] not in path:
                raise KerasRefusal(f"{name}: layer {layer.name!r} has its weights in an unknown order")
            self._places.paths[name] = weight.path
            if len(path) > 1:
                self._places.groups.setdefault(weight.path[:-1], {"name": path[-2]})

    def _add_optimizer(self) -> None:
        for at, (path, name) in enumerate(self._weights((_OPTIMIZER_LIST,))):
            self._places.paths[name] = (*_OPTIMIZER, str(at))
            if not at and len(path) > 2:
                self._places.groups[_OPTIMIZER] = {"name": path[1]}


def _own_weight_count(group: Steps, layer: Layer) -> int:
    """Return the number of own weights that a layer makes, by its config; a ``WeightCount``."""
    if layer.type.is_weightless or layer.parts:
        return 0
    if layer.cls == CONV_CELL:
        return 3 if layer.config.get("use_bias", True) else 2
    _require_own_layer(layer)
    shapes = layer.weight_shapes()
    if shapes is None:
        raise KerasRefusal(f"unknown number of weights of layer {layer.name!r} ({layer.cls})")
    return len(shapes)


def _require_own_layer(layer: Layer) -> None:
    """Raise ``KerasRefusal`` if a layer may store other weights than Keras's layers of its class do."""
    if not layer.is_known or layer.cls not in CLASSES:
        raise KerasRefusal(f"layer {layer.name!r} ({layer.cls}) is not one of Keras's own")
    if layer.cls in _STATEFUL or (layer.type.has_known_weights and layer.weight_shapes() is None):
        raise KerasRefusal(
            f"layer {layer.name!r} ({layer.cls}) was quantized, adapted or stores its own state"
        )


def _unknown_parts(layer: Layer) -> str:
    return f"layer {layer.name!r} ({layer.cls}) is composed of layers in an unknown way"


# Listed weights, as .h5 has them --------------------------------------------------------------------


def listed_places(content: Content) -> Places:
    """Return the places of tensors in an ``.h5`` with lists of layers and weights."""
    places = Places()
    stored = stored_of(content.native)
    if stored is not None and stored.lists:
        present = {tensor.name for tensor in content.tensors}
        places.paths = {name: path for name, path in stored.paths.items() if name in present}
        _restore_lists(places, stored)
        places.note_shared_paths()
    else:
        known = stored.paths if stored is not None else {}
        paths = {
            tensor.name: known.get(tensor.name, tuple(map(str, tensor.path))) for tensor in content.tensors
        }
        _ListedPlaces(places, content, Stored(stored.groups if stored else {}, paths)).run()
    if not places.problems:
        absent = [tensor.name for tensor in content.tensors if tensor.name not in places.paths]
        places.problems += (f"{name}: an .h5 can't hold it {_HINT}" for name in absent[:1])
    places.note_faulty_group()
    return places


def _restore_lists(places: Places, stored: Stored) -> None:
    """Set the lists of the source, without the tensors that aren't written."""
    present = set(places.paths.values())
    for group, attributes in stored.groups.items():
        kept = dict(attributes)
        layers = names_in(attributes, "layer_names")
        if layers is not None:
            # A long list is split over several attributes, by the length of its longest name. All of them are
            # dropped and the list is split again, as it may be shorter now.
            kept = {key: value for key, value in kept.items() if not key.startswith("layer_names")}
            kept |= chunked_attribute("layer_names", layers)
        names = names_in(attributes, "weight_names")
        if names is not None:
            kept = {key: value for key, value in kept.items() if not key.startswith("weight_names")}
            names = [name for name in names if (*group, *name.split("/")) in present]
            kept |= chunked_attribute("weight_names", names)
        places.groups[group] = kept


class _ListedPlaces:
    """Lists the variables of a file that numbered them."""

    def __init__(self, places: Places, content: Content, stored: Stored) -> None:
        self._places, self._native, self._groups = places, content.native, stored.groups
        self._names = {path: name for name, path in stored.paths.items()}
        self._paths, self._unlisted = sorted(self._names), set(self._names)
        self._is_built = any(path[0] == LAYERS_GROUP for path in self._names)

    def run(self) -> None:
        model, problems = model_of(self._native), self._places.problems
        if model is None or not model.is_model:
            what = (
                "the model's class creates its layers" if model is not None else "the architecture is unknown"
            )
            problems.append(
                f"an .h5 lists the weights of each layer in order, but {what} (.keras has no lists)"
            )
            return
        if is_keras2(self._native):
            problems.append(_KERAS_2)
            return
        names = [layer.name for layer in model.layers]
        self._places.groups[(_MODEL_WEIGHTS,)] = chunked_attribute("layer_names", names)
        try:
            for layer in model.layers:
                self._list_layer(layer, layer.weights((LAYERS_GROUP, layer.groups[0]), self._count))
        except KerasRefusal as failure:
            problems.append(f"{failure}: the order of its weights in an .h5 is unknown (.keras has no lists)")
            return
        self._list((_MODEL_WEIGHTS, TOP_LEVEL), [], [])
        self._add_optimizer()
        if self._unlisted:
            first = self._names[min(self._unlisted)]
            problems.append(f"{first}: an .h5 lists the weights of layers only")

    def _list_layer(self, layer: Layer, weights: list[Weight]) -> None:
        names = [(layer.name, *weight.name) for weight in weights]
        if len(set(names)) < len(names):
            names = [(*name[:-1], f"{name[-1]}_{at}") for at, name in enumerate(names)]
        self._list((_MODEL_WEIGHTS, *layer.name.split("/")), [weight.path for weight in weights], names)

    def _list(self, group: Steps, paths: list[Steps], names: list[Steps]) -> None:
        self._places.groups[group] = chunked_attribute("weight_names", ["/".join(name) for name in names])
        for path, name in zip(paths, names, strict=True):
            self._unlisted.discard(path)
            self._places.paths[self._names[path]] = (*group, *"/".join(name).split("/"))

    def _count(self, group: Steps, layer: Layer) -> int:
        """Return the number of own variables of a layer in the file; a ``WeightCount``."""
        # Without any, the layer may be one that shares its weights, which are below its first use. Variables
        # below the group but not in ``vars`` are those of parts, and these must be known.
        below = [path for path in paths_below(self._paths, group) if path in self._unlisted]
        own = [path for path in below if path[len(group) : -1] == (VARIABLES_GROUP,)]
        if not below:
            is_made = layer.type.is_weightless or layer.parts
            if self._is_built and not is_made and layer.weight_shapes():
                raise KerasRefusal(
                    f"layer {layer.name!r} ({layer.cls}) shares its weights with another place in the model"
                )
            return 0
        _require_own_layer(layer)
        if len(own) < len(below) and not layer.parts:
            raise KerasRefusal(_unknown_parts(layer))
        if {path[-1] for path in own} != {str(at) for at in range(len(own))}:
            raise KerasRefusal(f"layer {layer.name!r} lacks a variable")
        return len(own)

    def _add_optimizer(self) -> None:
        own = self._numbered(_OPTIMIZER)
        if not own:
            return
        stored = self._groups.get(_OPTIMIZER, {}).get("name")
        name = stored if isinstance(stored, str) and stored and "/" not in stored else _OPTIMIZER_GROUP
        names: list[Steps] = [
            (name, _OPTIMIZER_NAMES[at] if at < len(_OPTIMIZER_NAMES) else f"variable_{at}")
            for at in range(len(own))
        ]
        self._list((_OPTIMIZER_LIST,), own, names)
        # A LossScaleOptimizer stores the variables of the inner optimizer after its own, and the inner one
        # stores them again: both have one place in the list.
        inner = self._numbered(_INNER_OPTIMIZER)
        if len(inner) <= len(own):
            for path, same in zip(inner, own[len(own) - len(inner) :], strict=True):
                self._unlisted.discard(path)
                self._places.paths[self._names[path]] = self._places.paths[self._names[same]]

    def _numbered(self, group: Steps) -> list[Steps]:
        """Return the variables of a group that are not listed yet, by number."""
        paths = [path for path in self._unlisted if path[:-1] == group]
        return sorted(paths, key=lambda path: int(path[-1]) if path[-1].isdecimal() else -1)
