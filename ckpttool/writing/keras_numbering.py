"""Where each tensor goes in a ``.weights.h5``: among the numbered variables of its layer.

Source: Keras ``src/saving/saving_lib.py``.
"""

from __future__ import annotations

from ckpttool.formats.keras.compare import grouped
from ckpttool.formats.keras.layers import RULES, Layer
from ckpttool.formats.keras.layout import TOP_LEVEL, names_in, top_of
from ckpttool.formats.keras.names import WITHOUT
from ckpttool.formats.keras.native import CONFIG, Stored, object_of, stored_of
from ckpttool.tensor import Tensor
from ckpttool.writing.content import Content
from ckpttool.writing.keras2_config import as_keras_3
from ckpttool.writing.keras_order import LAYERS, VARS, Slot, Unknown, made, require_known, slots_of, sublayers
from ckpttool.writing.keras_places import (
    HINT,
    KERAS_2_OPTIMIZER,
    OPTIMIZER,
    OPTIMIZER_LIST,
    Parts,
    Places,
    is_keras2,
    model_of,
)

_TOPS = (LAYERS, OPTIMIZER, VARS, "_layer_checkpoint_dependencies", "metrics")
_NOT_KERAS = "its name is not that of a Keras variable (layers/<name>/vars/<n>)"
_GROUPS = "variables are numbered layer by layer"


def is_variable(path: Parts) -> bool:
    """Tell whether a path is that of a numbered variable."""
    return path[-2:-1] == (VARS,) and path[0] in _TOPS and path[-1].isdecimal() and all(path)


def numbered(content: Content) -> Places:
    """Return where tensors go in a ``.weights.h5``."""
    places = Places()
    stored = stored_of(content.native)
    if stored is not None and not stored.lists:
        places.groups = {path: dict(attributes) for path, attributes in stored.groups.items()}
        places.paths = {
            one.name: stored.paths[one.name] for one in content.tensors if one.name in stored.paths
        }
    elif stored is not None:
        _Numbering(places, content, stored).run()
    for tensor in content.tensors:
        path = _variable_path(tensor)
        if tensor.name in places.paths:
            continue
        if path is not None:
            places.paths[tensor.name] = path
        elif not places.problems:
            places.problems.append(f"{tensor.name}: {_NOT_KERAS} {HINT}")
    places.require_own_paths()
    places.require_groups()
    return places


def _variable_path(tensor: Tensor) -> Parts | None:
    """Return the dataset that a tensor's own name means, None where it means none."""
    ways = (tuple(map(str, tensor.path)), tuple(tensor.name.split("/")), tuple(tensor.name.split(".")))
    return next((path for path in ways if is_variable(path)), None)


class _Numbering:
    """The way from lists to numbers."""

    def __init__(self, places: Places, content: Content, stored: Stored) -> None:
        self._places, self._stored = places, stored
        self._names = {path: name for name, path in stored.paths.items()}
        self._present = {tensor.name for tensor in content.tensors}
        self._model = model_of(content.native)
        self._content = content

    def run(self) -> None:
        top = top_of(self._stored.groups) or ()
        if self._model is None or not self._model.is_model:
            message = f"the layers are not known, only the order of their weights, and {_GROUPS} {HINT}"
            self._places.problems.append(message)
            return
        try:
            if is_keras2(self._content.native):
                self._require_read_by_keras_3()
            for layer, (name, _) in grouped(self._model):
                group = (LAYERS, name)
                self._groups(layer, group)
                self._add_layer(layer, group, self._weights((*top, *layer.name.split("/"))))
            if weights := self._weights((*top, TOP_LEVEL)):
                raise Unknown(f"{weights[0][1]}: a weight of no layer")
        except Unknown as failure:
            self._places.problems.append(str(failure))
            return
        self._places.groups.setdefault((VARS,), {"name": self._model.name})
        self._add_optimizer()

    def _require_read_by_keras_3(self) -> None:
        """Require that what Keras 2 wrote can be read by Keras 3.

        Raises:
            Unknown: It can't.
        """
        try:
            as_keras_3(object_of(self._content.native[CONFIG]))
        except Unknown as failure:
            raise Unknown(f"Keras 2 wrote it: {failure}") from failure
        if self._weights((OPTIMIZER_LIST,)):
            raise Unknown(KERAS_2_OPTIMIZER)

    def _weights(self, group: Parts) -> list[tuple[Parts, str]]:
        """Return the datasets that a group lists, with the names of their tensors."""
        names = names_in(self._stored.groups.get(group, {}), "weight_names") or ()
        paths = [(*group, *name.split("/")) for name in names]
        return [(path, self._names[path]) for path in paths if self._names.get(path) in self._present]

    def _groups(self, layer: Layer, group: Parts) -> None:
        own = (*group, VARS)
        self._places.groups[own] = {"name": layer.name}
        if layer.is_model:
            for part, (name, _) in grouped(layer):
                self._groups(part, (*group, LAYERS, name))

    def _add_layer(self, layer: Layer, group: Parts, weights: list[tuple[Parts, str]]) -> None:
        if not weights:
            return
        is_plain = layer.kind not in WITHOUT and not sublayers(layer)
        if is_plain:
            require_known(layer)
            _require_plain(layer, [path for path, _ in weights])
            slots = [Slot((*group, VARS, str(at)), (), True) for at in range(len(weights))]
        else:
            slots = slots_of(layer, group, made)
        if len(slots) != len(weights):
            raise Unknown(
                f"layer {layer.name!r} has {len(weights)} weights, and its config makes {len(slots)}"
            )
        for slot, (path, name) in zip(slots, weights, strict=True):
            if layer.is_model and slot.name[0] not in path:
                raise Unknown(f"{name}: layer {layer.name!r} has its weights in an order that is not known")
            self._places.paths[name] = slot.path
            if len(path) > 1 and slot.path[:-1] not in self._places.groups:
                self._places.groups[slot.path[:-1]] = {"name": path[-2]}

    def _add_optimizer(self) -> None:
        weights = self._weights((OPTIMIZER_LIST,))
        for at, (path, name) in enumerate(weights):
            self._places.paths[name] = (OPTIMIZER, VARS, str(at))
            if not at and len(path) > 2:
                self._places.groups[(OPTIMIZER, VARS)] = {"name": path[1]}


def _require_plain(layer: Layer, paths: list[Parts]) -> None:
    """Require that weights are a layer's own, as far as their names tell.

    Raises:
        Unknown: Some are named after a layer inside it.
    """
    for path in paths:
        behind = path[::-1][: path[::-1].index(layer.name)] if layer.name in path else path[-1:]
        if layer.kind not in RULES and len(behind) > 1:
            raise Unknown(f"layer {layer.name!r} ({layer.kind}) is made of layers in a way that is not known")
