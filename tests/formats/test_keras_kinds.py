"""What Keras's configurations and groups say of a layer's weights, in the words that layouts go by."""

from __future__ import annotations

from typing import Any

import pytest

from ckpttool import Role, Tensor
from ckpttool.core.dtypes import BY_NAME
from ckpttool.core.layers import DoubtReason, LayerKind, LayoutDoubt
from ckpttool.formats.keras.layer_tree import KerasRefusal, layer_of
from ckpttool.formats.keras.model import KerasModel, Kinds, kinds_of_groups, weight_names
from tests.support.checkpoints import class_or_facts

UNWIRED = LayerKind("Dense", doubt=DoubtReason(LayoutDoubt.UNWIRED))


def dense(name: str, units: int = 3, **more: Any) -> dict[str, Any]:
    return {
        "class_name": "Dense",
        "config": {"name": name, "units": units, "use_bias": True, **more.pop("config", {})},
        **more,
    }


def plain_layer(kind: str, name: str, **more: Any) -> dict[str, Any]:
    return {"class_name": kind, "config": {"name": name}, **more}


def chain(*nodes: dict[str, Any], name: str = "chain") -> dict[str, Any]:
    return {"class_name": "Sequential", "config": {"name": name, "layers": list(nodes)}}


def kinds_in_model(config: dict[str, Any]) -> dict[str, LayerKind | str]:
    """Return what is told of the layers of a model by its configuration, by their names."""
    model = KerasModel.of_config(config)
    assert model is not None
    kinds = {layer.name: model.kind_of(layer) for layer in model.layer.layers}
    return {name: class_or_facts(kind) for name, kind in kinds.items() if kind is not None}


def kinds_by_name(config: dict[str, Any], tensors: list[Tensor]) -> Kinds:
    """Return the kinds of weights that are listed by the names of layers."""
    model = KerasModel.of_config(config)
    assert model is not None
    return model.kinds_by_name(tensors)


def kinds_of(*nodes: dict[str, Any]) -> dict[str, LayerKind | str]:
    """Return the same of a chain of layers."""
    return kinds_in_model(chain(*nodes))


def flatten(*lengths: int | None, **config: Any) -> dict[str, Any]:
    node = plain_layer("Flatten", "flatten", build_config={"input_shape": [None, *lengths]})
    node["config"] |= config
    return node


def test_a_flatten_counts_where_it_comes_right_before() -> None:
    cases = [
        ([flatten(4, 3, 2)], LayerKind("Dense", flattened=(4, 3, 2))),
        ([flatten(4, 3, 2), plain_layer("Dropout", "d")], LayerKind("Dense", flattened=(4, 3, 2))),
        ([flatten(None, 3, 2)], LayerKind("Dense", flattened=())),
        ([plain_layer("Flatten", "f")], LayerKind("Dense", flattened=())),
        ([flatten(4, 3)], "Dense"),
        (
            [flatten(4, 3, 2, data_format="channels_first")],
            LayerKind("Dense", doubt=DoubtReason(LayoutDoubt.INPUT_ORDER, "a Flatten of channels first")),
        ),
        ([flatten(4, 3, 2), dense("between")], "Dense"),
        ([dense("between")], "Dense"),
        ([flatten(4, 3, 2), plain_layer("BatchNormalization", "b")], LayerKind("Dense", flattened=(4, 3, 2))),
        ([], "Dense"),
    ]
    for before, kind in cases:
        assert kinds_of(*before, dense("last"))["last"] == kind, before


NORM = {
    "class_name": "BatchNormalization",
    "config": {"name": "b", "axis": -1, "scale": True, "center": True},
}


def reshape(*lengths: int) -> dict[str, Any]:
    return {"class_name": "Reshape", "config": {"name": "reshape", "target_shape": [*lengths]}}


def conv(kind: str = "Conv2D", **config: Any) -> dict[str, Any]:
    return {"class_name": kind, "config": {"name": "image", "filters": 6, **config}}


def test_a_flatten_without_a_shape_has_the_channels_of_the_layer_before() -> None:
    cases = [
        ([conv()], LayerKind("Dense", flattened=(None, 6))),
        ([conv("Conv3D"), plain_layer("MaxPooling3D", "p")], LayerKind("Dense", flattened=(None, 6))),
        (
            [conv(), plain_layer("BatchNormalization", "b"), plain_layer("ReLU", "r")],
            LayerKind("Dense", flattened=(None, 6)),
        ),
        ([conv("Conv1D")], LayerKind("Dense", flattened=(None, 6))),
        ([conv("Conv1D"), plain_layer("MaxPooling1D", "p")], LayerKind("Dense", flattened=(None, 6))),
        ([conv(filters=None)], LayerKind("Dense", flattened=())),
    ]
    for before, kind in cases:
        assert kinds_of(*before, plain_layer("Flatten", "flatten"), dense("last"))["last"] == kind, before


def test_what_a_flatten_takes_is_not_guessed() -> None:
    cases = [
        ([conv(data_format="channels_first")], "a Conv2D of channels first"),
        (
            [
                conv(),
                {"class_name": "MaxPooling2D", "config": {"name": "p", "data_format": "channels_first"}},
            ],
            "a MaxPooling2D of",
        ),
        ([conv(), plain_layer("Permute", "p")], "a Permute"),
        ([{**conv(), "module": "own.layers"}], "a Conv2D"),
        ([conv(), reshape(4, 24)], "a Reshape"),
        ([conv(), dense("places", build_config={"input_shape": [None, 2, 2, 6]})], "a Flatten"),
    ]
    for before, what in cases:
        kind = kinds_of(*before, plain_layer("Flatten", "flatten"), dense("last"))["last"]
        assert isinstance(kind, LayerKind) and kind.doubt is not None
        assert kind.doubt.doubt is LayoutDoubt.INPUT_ORDER and kind.doubt.other.startswith(what), before


GIVES = DoubtReason(LayoutDoubt.OUTPUT_ORDER, "a Reshape")


def test_what_a_reshape_takes_is_not_guessed() -> None:
    image = kinds_of(dense("first"), NORM, reshape(4, 4, 5), conv())
    assert image == {
        "first": LayerKind("Dense", doubt=GIVES),
        "b": LayerKind("BatchNormalization", doubt=GIVES),
    }
    assert kinds_of(dense("first"), reshape(1, 1, 5), dense("last")) == {"first": "Dense", "last": "Dense"}
    assert kinds_of(dense("first"), reshape(7, 5), dense("last"))["first"] == LayerKind("Dense", doubt=GIVES)
    pooled = plain_layer("GlobalAveragePooling2D", "g")
    assert kinds_of(conv(), pooled, reshape(1, 1, 6), dense("last"))["last"] == "Dense"
    assert kinds_of(conv(), reshape(6), dense("last"))["last"] == "Dense"
    assert kinds_of(conv(), reshape(-1), dense("last"))["last"] == LayerKind("Dense", flattened=(None, 6))


def test_norms_behind_a_flatten_are_told_with_their_vectors() -> None:
    unlike = LayerKind("BatchNormalization", doubt=DoubtReason(LayoutDoubt.INPUT_ORDER, "a Flatten"))
    assert kinds_of(flatten(4, 3, 2), NORM)["b"] == unlike
    assert kinds_of(flatten(4, 3), NORM)["b"] == "BatchNormalization"
    found = kinds_by_name(chain(flatten(4, 3, 2), NORM), [tensor("b", "gamma", shape=(24,))])
    assert found == {"b.gamma": unlike}


def test_a_gru_with_its_reset_before_the_product_is_not_pytorchs() -> None:
    config = {"units": 3, "use_bias": False}
    for reset_after, kind in ((True, "GRU"), (False, LayerKind("GRU", reset_after=False))):
        node = plain_layer("GRU", "g")
        node["config"] |= config | {"reset_after": reset_after}
        assert kinds_of(node) == {"g": kind}


def functional(*nodes: dict[str, Any], ends: list[str], name: str = "m") -> dict[str, Any]:
    config = {"name": name, "layers": [*nodes], "output_layers": [[end, 0, 0] for end in ends]}
    return {"class_name": "Functional", "config": config}


def behind(node: dict[str, Any], *names: str) -> dict[str, Any]:
    return {**node, "inbound_nodes": [[[name, 0, 0, {}] for name in names]]}


def in_graph(*nodes: dict[str, Any], ends: list[str]) -> dict[str, LayerKind | str]:
    return kinds_in_model(functional(*nodes, ends=ends))


def test_both_heads_behind_a_flatten_are_found() -> None:
    heads = [behind(dense(name), "flatten") for name in ("mean", "variance")]
    drawn = behind(plain_layer("Sampling", "drawn", module="own.layers"), "mean", "variance")
    found = in_graph(
        behind(flatten(4, 3, 2), "image"),
        plain_layer("InputLayer", "image"),
        *heads,
        drawn,
        behind(dense("back"), "drawn"),
        ends=["back"],
    )
    taken = LayerKind("Dense", doubt=DoubtReason(LayoutDoubt.OUTPUT_ORDER, "a Sampling"))
    before = LayerKind("Dense", doubt=DoubtReason(LayoutDoubt.INPUT_ORDER, "a Sampling"))
    assert found == {"mean": taken, "variance": taken, "back": before}
    image = plain_layer("InputLayer", "image")
    plain_ends = in_graph(image, behind(flatten(4, 3, 2), "image"), *heads, ends=["mean", "variance"])
    assert plain_ends == dict.fromkeys(("mean", "variance"), LayerKind("Dense", flattened=(4, 3, 2)))


def test_what_is_joined_with_a_flattened_image_is_not_guessed() -> None:
    image, vector = (plain_layer("InputLayer", name) for name in ("image", "vector"))
    flat, other = behind(flatten(4, 3, 2), "image"), behind(dense("other"), "vector")
    for kind in ("Concatenate", "Add"):
        both = behind(plain_layer(kind, "both"), "flatten", "other")
        found = in_graph(image, vector, flat, other, both, behind(dense("last"), "both"), ends=["last"])
        assert found["last"] == LayerKind("Dense", doubt=DoubtReason(LayoutDoubt.INPUT_ORDER, "a Flatten"))
        assert found["other"] == LayerKind("Dense", doubt=DoubtReason(LayoutDoubt.JOINED, "a Flatten"))


def test_models_in_models_are_followed() -> None:
    inner = chain(dense("head"), name="inner")
    (found,) = [kinds_by_name(chain(flatten(4, 3, 2), inner), [tensor("inner", "head", "kernel")])]
    assert found == {"inner.head.kernel": LayerKind("Dense", flattened=(4, 3, 2))}
    encoder = functional(
        {"class_name": "InputLayer", "config": {"name": "i", "batch_shape": [None, 8, 8, 3]}},
        behind(conv(), "i"),
        behind(plain_layer("Flatten", "flatten"), "image"),
        ends=["flatten"],
        name="inner",
    )
    found = kinds_by_name(chain(encoder, dense("last")), [tensor("last", "kernel")])
    assert found == {"last.kernel": LayerKind("Dense", flattened=(None, 6))}


def test_a_flatten_is_found_by_the_connections_of_both_versions() -> None:
    history = {"class_name": "__keras_tensor__", "config": {"keras_history": ["flatten", 0, 0]}}
    inbound = {"three": [{"args": [history], "kwargs": {}}], "two": [[["flatten", 0, 0, {}]]]}
    other = [[["flatten", 0, 0, {}], ["strange", 0, 0, {}]]]
    image = plain_layer("InputLayer", "image")
    nodes = [image, behind(flatten(4, 3, 2), "image")]
    nodes += [dense(name, inbound_nodes=one) for name, one in inbound.items()]
    nodes += [dense("both", inbound_nodes=other), dense("none", inbound_nodes=[])]
    model = {"class_name": "Functional", "config": {"name": "m", "layers": nodes}}
    after = LayerKind("Dense", flattened=(4, 3, 2))
    unlike = LayerKind("Dense", doubt=DoubtReason(LayoutDoubt.INPUT_ORDER, "an unknown layer"))
    assert kinds_in_model(model) == {"three": after, "two": after, "both": unlike, "none": unlike}


def test_wrappers_are_looked_into_and_strangers_are_not() -> None:
    inner = {"name": "t", "layer": dense("inner")}
    assert kinds_of({"class_name": "TimeDistributed", "config": inner}) == {"t": "Dense"}
    assert kinds_of({**dense("mine"), "registered_name": "Own>Dense"}) == {}
    assert kinds_of({**dense("mine"), "module": "own.layers"}) == {}
    assert kinds_of(plain_layer("Dense", "without_units")) == {}
    assert kinds_of(dense("quantized", config={"dtype": {"class_name": "QuantizedDTypePolicy"}})) == {}
    assert kinds_of(dense("hostile", config={"dtype": {"class_name": []}})) == {}
    assert kinds_of(dense("adapted", config={"lora_rank": 4})) == {}


def tensor(*path: str, key: str | None = None, shape: tuple[int, ...] = (2, 2)) -> Tensor:
    return Tensor(path, BY_NAME["float32"], shape, Role.WEIGHTS, key=key)


def test_models_in_models_are_found_by_the_names_of_both() -> None:
    config = chain(chain(flatten(4, 3, 2), dense("head"), name="inner"), dense("head"))
    wanted = {"head.kernel": LayerKind("Dense"), "inner.head.kernel": LayerKind("Dense", flattened=(4, 3, 2))}
    found = [
        tensor("head", "kernel"),
        tensor("inner", "head", "kernel"),
        tensor("inner", "other", "kernel"),
        tensor("foreign", "kernel"),
    ]
    assert kinds_by_name(config, found) == wanted


def test_groups_are_counted_as_keras_counts_them() -> None:
    config = chain(dense("a"), chain(dense("b"), plain_layer("Dropout", "d")), dense("c"))
    groups = {
        "a": ("layers", "dense"),
        "b": ("layers", "sequential", "layers", "dense"),
        "c": ("layers", "dense_1"),
        "foreign": ("layers", "dense_2"),
    }
    found = [tensor(name, key="/" + "/".join((*group, "vars", "0"))) for name, group in groups.items()]
    model = KerasModel.of_config(config)
    assert model is not None
    assert model.kinds_by_group(groups.values(), found) == dict.fromkeys("abc", LayerKind("Dense"))
    without = kinds_of_groups(found)
    assert without == dict.fromkeys(groups, UNWIRED)


def test_a_group_is_believed_in_lists_of_layers_alone() -> None:
    keys = [
        "/dense/vars/0",
        "/layers/my_dense/vars/0",
        "/layers/time_distributed/layer/vars/0",
        "/layers/dense",
    ]
    assert kinds_of_groups([tensor(str(at), key=key) for at, key in enumerate(keys)]) == {
        "3": LayerKind("Dense", doubt=DoubtReason(LayoutDoubt.UNWIRED))
    }


def test_which_weights_a_norm_lacks() -> None:
    cases_scale = [
        (True, True, ()),
        (False, True, ("gamma",)),
        (True, False, ("beta",)),
        (False, False, ("gamma", "beta")),
    ]
    for scale, center, missing in cases_scale:
        for wrapped in [False, True]:
            for name in ["BatchNormalization", "LayerNormalization"]:
                node = {
                    "class_name": name,
                    "config": {"name": "n", "axis": -1, "scale": scale, "center": center},
                }
                around = {"class_name": "TimeDistributed", "config": {"name": "t", "layer": node}}
                wanted = class_or_facts(LayerKind(name, missing=missing))
                assert [*kinds_of(around if wrapped else node).values()] == [wanted], (
                    name,
                    wrapped,
                    scale,
                    center,
                )


def wrapped(kind: str, depth: int, **config: Any) -> dict[str, Any]:
    """Return an LSTM in wrappers around wrappers."""
    node: dict[str, Any] = {"class_name": "LSTM", "config": {"name": "lstm", "units": 3, "use_bias": True}}
    for at in range(depth):
        node = {"class_name": kind, "config": {"name": f"w{at}", "layer": node, **config}}
    return node


def test_nested_directions_are_not_counted_without_end() -> None:
    for depth, count in ((1, 6), (2, 12), (40, None)):
        layer = layer_of(wrapped("Bidirectional", depth))
        assert layer is not None
        shapes = layer.weight_shapes()
        assert (None if shapes is None else len(shapes)) == count
        model = layer_of(chain(wrapped("Bidirectional", depth)))
        assert model is not None and weight_names(model, {}) == {}
        if depth > 1:
            with pytest.raises(KerasRefusal, match="bidirectional inside another"):
                layer.weights(("layers", "w"), lambda group, layer: 0)
    deep = layer_of(wrapped("TimeDistributed", 40))
    assert deep is not None and deep.weight_shapes() == [(None, 12), (3, 12), (12,)]


def test_cells_that_are_no_list_have_no_order() -> None:
    for cells in (None, 5, "cells", {}):
        layer = layer_of({"class_name": "StackedRNNCells", "config": {"name": "s", "cells": cells}})
        assert layer is not None and layer.weight_shapes() is None
        with pytest.raises(KerasRefusal, match="not described"):
            layer.weights(("layers", "s"), lambda group, layer: 1)


def test_any_number_of_norms_may_follow_each_other() -> None:
    norms = [{**NORM, "config": {**NORM["config"], "name": f"b{at}"}} for at in range(30_000)]
    found = kinds_of(dense("first"), *norms, reshape(4, 4, 5))
    assert found.pop("first") == LayerKind("Dense", doubt=GIVES)
    assert set(found.values()) == {LayerKind("BatchNormalization", doubt=GIVES)} and len(found) == 30_000
