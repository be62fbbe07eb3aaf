"""What a configuration calls the layers whose groups Keras names after their classes.

Source: Keras ``src/saving/saving_lib.py``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

from ckpttool.formats.keras.compare import LAYERS, Group, grouped
from ckpttool.formats.keras.layers import Layer, layer_of
from ckpttool.formats.keras.layout import Groups, called_in
from ckpttool.report import Finding, warning

_WRAPPED = "layer"
"""Where a wrapper has its layer, in its group and in its configuration."""


def called(config: object, paths: Iterable[Group]) -> dict[Group, str]:
    """Return what the layers of a model are called, by their groups, also of models inside it.

    Args:
        config: The whole model's.
        paths: Groups and datasets of its file.
    """
    model = layer_of(config)
    if model is None or not model.is_model:
        return {}
    return dict(_called(model, (), {path[:at] for path in paths for at in range(1, len(path) + 1)}))


def _called(model: Layer, place: Group, present: Collection[Group]) -> Iterator[tuple[Group, str]]:
    for layer, candidates in grouped(model):
        group = next(
            (one for name in candidates if (one := (*place, LAYERS, name)) in present),
            (*place, LAYERS, candidates[0]),
        )
        if layer.name:
            yield group, layer.name
        inside, inner = (*group, _WRAPPED), layer_of(layer.config.get(_WRAPPED))
        if layer.is_model:
            yield from _called(layer, group, present)
        elif layer.is_known and inner is not None and inside in present:
            if inner.name:
                yield inside, inner.name
            if inner.is_model:
                yield from _called(inner, inside, present)


def compare_called(told: Mapping[Group, str], groups: Groups) -> Iterator[Finding]:
    """Yield a warning for each layer that its group and the configuration call differently."""
    for group, name in told.items():
        own = called_in(groups, group)
        if own is not None and own != name:
            message = (
                f"its group says that it is layer {own!r:.100}, and the configuration says {name!r:.100}"
            )
            yield warning("layer-name", message, "/" + "/".join(group))
