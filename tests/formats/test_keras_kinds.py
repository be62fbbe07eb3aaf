"""What a configuration says of a layer's weights, in the words that layouts go by."""

from __future__ import annotations

import pytest

from ckpttool.formats.keras.kinds import kind_of
from ckpttool.formats.keras.layers import layer_of


@pytest.mark.parametrize(
    ("scale", "center", "told"),
    [
        (True, True, ""),
        (False, True, " without gamma"),
        (True, False, " without beta"),
        (False, False, " without gamma and beta"),
    ],
)
@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("name", ["BatchNormalization", "LayerNormalization"])
def test_which_weights_a_norm_lacks(name: str, wrapped: bool, scale: bool, center: bool, told: str) -> None:
    node = {"class_name": name, "config": {"name": "n", "axis": -1, "scale": scale, "center": center}}
    around = {"class_name": "TimeDistributed", "config": {"name": "t", "layer": node}}
    layer = layer_of(around if wrapped else node)
    assert layer is not None
    kind = kind_of(layer)
    assert kind is not None
    assert kind.text == name + told
