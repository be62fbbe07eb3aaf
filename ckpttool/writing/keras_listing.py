"""Where each tensor goes in an ``.h5`` that lists layers and weights.

Source: Keras ``src/legacy/saving/legacy_h5_format.py``.
"""

from __future__ import annotations

from ckpttool.formats.keras.compare import grouped
from ckpttool.formats.keras.layers import Layer, weights_of
from ckpttool.formats.keras.layout import TOP_LEVEL, names_in
from ckpttool.formats.keras.names import WITHOUT
from ckpttool.formats.keras.native import Stored, stored_of
from ckpttool.writing.content import Content
from ckpttool.writing.keras_order import LAYERS, VARS, Unknown, require_known, slots_of, sublayers
from ckpttool.writing.keras_places import (
    HINT,
    KERAS_2,
    OPTIMIZER,
    OPTIMIZER_LIST,
    Parts,
    Places,
    in_chunks,
    is_keras2,
    model_of,
)

_MODEL = "model_weights"
_INNER = (OPTIMIZER, "inner_optimizer", VARS)
_COUNTED = ("iteration", "learning_rate")


def in_lists(content: Content) -> Places:
    """Return where tensors go in an ``.h5`` with lists of layers and weights."""
    places = Places()
    stored = stored_of(content.native)
    if stored is not None and stored.lists:
        present = {tensor.name for tensor in content.tensors}
        places.paths = {name: path for name, path in stored.paths.items() if name in present}
        _list_as_before(places, stored)
        places.require_own_paths()
    else:
        own = {one.name: tuple(map(str, one.path)) for one in content.tensors}
        known = stored.paths if stored is not None else {}
        paths = {name: known.get(name, path) for name, path in own.items()}
        _Listing(places, content, Stored(stored.groups if stored else {}, paths)).run()
    if not places.problems:
        absent = (one.name for one in content.tensors if one.name not in places.paths)
        places.problems += (f"{name}: .h5 has no place for it {HINT}" for name in list(absent)[:1])
    places.require_groups()
    return places


def _list_as_before(places: Places, stored: Stored) -> None:
    """Keep the lists as they were, without what is not there any more."""
    present = set(places.paths.values())
    for group, attributes in stored.groups.items():
        kept = dict(attributes)
        layers = names_in(attributes, "layer_names")
        if layers is not None:
            kept = {key: value for key, value in kept.items() if not key.startswith("layer_names")}
            kept |= in_chunks("layer_names", layers)
        names = names_in(attributes, "weight_names")
        if names is not None:
            kept = {key: value for key, value in kept.items() if not key.startswith("weight_names")}
            there = [name for name in names if (*group, *name.split("/")) in present]
            kept |= in_chunks("weight_names", there)
        places.groups[group] = kept


class _Listing:
    """The way from numbers to lists."""

    def __init__(self, places: Places, content: Content, stored: Stored) -> None:
        self._places, self._content = places, content
        self._groups = stored.groups
        self._names = {path: name for name, path in stored.paths.items()}
        self._left = set(self._names)
        self._is_built = any(path[0] == LAYERS for path in self._names)
        self._model = model_of(content.native)

    def run(self) -> None:
        model, problems = self._model, self._places.problems
        if model is None or not model.is_model:
            what = "its layers make themselves" if model is not None else "the architecture is not known"
            problems.append(
                f"an .h5 lists the weights of each layer in order, and {what} (.keras has no lists)"
            )
            return
        if is_keras2(self._content.native):
            problems.append(KERAS_2)
            return
        try:
            self._add_layers(model)
        except Unknown as failure:
            problems.append(
                f"{failure}: the order of its weights in an .h5 can't be told (.keras has no lists)"
            )
            return
        self._add_optimizer()
        if self._left:
            first = self._names[min(self._left)]
            problems.append(f"{first}: an .h5 lists the weights of layers, and this is none of them")

    def _add_layers(self, model: Layer) -> None:
        layers = list(grouped(model))
        self._places.groups[(_MODEL,)] = in_chunks("layer_names", [layer.name for layer, _ in layers])
        for layer, (name, _) in layers:
            slots = slots_of(layer, (LAYERS, name), self._count)
            group = (_MODEL, *layer.name.split("/"))
            names = _unique([(layer.name, *slot.name) for slot in slots])
            self._list(group, [slot.path for slot in slots], names)
        self._list((_MODEL, TOP_LEVEL), [], [])

    def _list(self, group: Parts, paths: list[Parts], names: list[Parts]) -> None:
        self._places.groups[group] = in_chunks("weight_names", ["/".join(name) for name in names])
        for path, name in zip(paths, names, strict=True):
            self._left.discard(path)
            self._places.paths[self._names[path]] = (*group, *"/".join(name).split("/"))

    def _count(self, group: Parts, layer: Layer) -> int:
        """Return how many variables are there, of a layer that stores them as Keras's own do."""
        below = [path for path in self._left if path[: len(group)] == group]
        own = [path for path in below if path[len(group) : -1] == (VARS,)]
        if not below:
            self._require_nothing(layer)
            return 0
        require_known(layer)
        if len(own) < len(below) and not sublayers(layer):
            raise Unknown(f"layer {layer.name!r} ({layer.kind}) is made of layers in a way that is not known")
        if {path[-1] for path in own} != {str(at) for at in range(len(own))}:
            raise Unknown(f"layer {layer.name!r} lacks a variable")
        return len(own)

    def _require_nothing(self, layer: Layer) -> None:
        """Require that a layer without variables has none, rather than those that lie elsewhere.

        Raises:
            Unknown: It should have some.
        """
        is_made = layer.kind in WITHOUT or layer.is_model or sublayers(layer)
        if self._is_built and not is_made and weights_of(layer):
            raise Unknown(f"layer {layer.name!r} ({layer.kind}) shares its weights with another place")

    def _add_optimizer(self) -> None:
        own = [path for path in self._left if path[:-1] == (OPTIMIZER, VARS)]
        own.sort(key=lambda path: int(path[-1]) if path[-1].isdecimal() else -1)
        if not own:
            return
        told = self._groups.get((OPTIMIZER, VARS), {}).get("name")
        name = told if isinstance(told, str) and told and "/" not in told else OPTIMIZER
        names: list[Parts] = [
            (name, _COUNTED[at] if at < len(_COUNTED) else f"variable_{at}") for at in range(len(own))
        ]
        self._list((OPTIMIZER_LIST,), own, names)
        self._add_wrapped(own)

    def _add_wrapped(self, own: list[Parts]) -> None:
        """Let what an optimizer stores for the one inside it stand for what that one stores again."""
        inner = [path for path in self._left if path[:-1] == _INNER]
        inner.sort(key=lambda path: int(path[-1]) if path[-1].isdecimal() else -1)
        if len(inner) <= len(own):
            for path, same in zip(inner, own[len(own) - len(inner) :], strict=True):
                self._left.discard(path)
                self._places.paths[self._names[path]] = self._places.paths[self._names[same]]


def _unique(names: list[Parts]) -> list[Parts]:
    if len(set(names)) == len(names):
        return names
    return [(*name[:-1], f"{name[-1]}_{at}") for at, name in enumerate(names)]
