"""Which layer each weight belongs to: told by configurations, groups, operators and names; never guessed."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool import CheckpointError, DamagedCheckpoint, Tensor, open_checkpoint
from ckpttool.dtypes import BY_NAME
from ckpttool.formats.keras.kinds import kinds_by_group, kinds_by_name, kinds_in
from ckpttool.formats.keras.layers import layer_of
from ckpttool.formats.paddle.operators import Operator, kind_by_name, kinds_by_operator, operators_in
from ckpttool.formats.paddle.pir import read_pir
from ckpttool.formats.paddle.program import read_program
from ckpttool.tensor import Role
from ckpttool.wire.source import Buffer, Source
from tests.support.twins import unpacked

KERAS = {
    "conv1": "Conv2D",
    "bn1": "BatchNormalization",
    "fc1": "Dense",
    "ln": "LayerNormalization",
    "fc2": "Dense",
    "emb": "Embedding",
    "lstm": "LSTM",
}
ZOO = {
    "conv1d": "Conv1D",
    "conv3d": "Conv3D",
    "grouped": "Conv2D",
    "deconv": "Conv2DTranspose",
    "depthwise": "DepthwiseConv2D",
    "gn": "GroupNormalization",
    "gru": "GRU",
    "attn": "MultiHeadAttention",
    "flat": "Dense",
}
STATIC = {
    "conv1": "conv2d",
    "bn1": "batch_norm",
    "fc1": "linear",
    "ln": "layer_norm",
    "fc2": "linear",
    "emb": "embedding",
    "lstm": "lstm_cell",
}


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpacked("others", tmp_path_factory.mktemp("twins"))


def layers(path: Path) -> dict[str, str]:
    with open_checkpoint(path) as checkpoint:
        return dict(checkpoint.layers)


def weights(path: Path) -> list[str]:
    with open_checkpoint(path) as checkpoint:
        return [one.name for one in checkpoint.tensors if one.role is Role.WEIGHTS]


# Keras ----------------------------------------------------------------------------------------------


UNWIRED = "Dense of unknown wiring"


@pytest.mark.parametrize(
    "name", ["twin.keras", "twin.weights.h5", "twin.h5", "twin-keras2.h5", "twin-keras2-savedmodel"]
)
def test_each_weight_of_keras_has_the_class_of_its_layer(twins: Path, name: str) -> None:
    wanted = {one: KERAS[one.partition(".")[0]] for one in weights(twins / name)}
    if name == "twin.weights.h5":  # which doesn't say what stands before a kernel
        wanted |= {"fc1.0": UNWIRED, "fc2.0": UNWIRED}
    assert layers(twins / name) == wanted


def test_every_kind_of_layer_is_told_and_what_a_flatten_gives_with_its_shape(twins: Path) -> None:
    wanted = {one: ZOO[one.partition(".")[0]] for one in weights(twins / "zoo.keras")}
    assert layers(twins / "zoo.keras") == {**wanted, "flat.0": "Dense after Flatten (4, 3, 4)"}


@pytest.mark.parametrize("name", ["twin-tf", "twin-functional-tf", "twin-savedmodel"])
def test_where_no_file_says_it_nothing_is_told(twins: Path, name: str) -> None:
    assert layers(twins / name) == {}


def test_groups_that_attributes_name_tell_nothing(twins: Path) -> None:
    kinds_of = layers(twins / "twin-subclassed.weights.h5")
    assert {name.partition(".")[0] for name in kinds_of} == {"ln", "lstm"}


def test_shards_tell_what_the_whole_would(files: Path) -> None:
    assert set(layers(files / "keras" / "sharded").values()) == {"BatchNormalization", "Dense", UNWIRED}


def test_the_optimizers_variables_have_no_layer(files: Path) -> None:
    for name in ("adam.keras", "adam.h5", "keras2.h5"):
        assert set(layers(files / "keras" / name)) == set(weights(files / "keras" / name))


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


def kinds_of(*nodes: dict[str, Any]) -> dict[str, str]:
    model = layer_of(chain(*nodes))
    assert model is not None
    return {name: kind.text for name, kind in kinds_in(model).items()}


def flatten(*lengths: int | None, **config: Any) -> dict[str, Any]:
    node = plain_layer("Flatten", "flatten", build_config={"input_shape": [None, *lengths]})
    node["config"] |= config
    return node


@pytest.mark.parametrize(
    ("before", "kind"),
    [
        ([flatten(4, 3, 2)], "Dense after Flatten (4, 3, 2)"),
        ([flatten(4, 3, 2), plain_layer("Dropout", "d")], "Dense after Flatten (4, 3, 2)"),
        ([flatten(None, 3, 2)], "Dense after Flatten"),
        ([plain_layer("Flatten", "f")], "Dense after Flatten"),
        ([flatten(4, 3)], "Dense"),
        (
            [flatten(4, 3, 2, data_format="channels_first")],
            "Dense unlike PyTorch's: a Flatten of channels first stands before it",
        ),
        ([flatten(4, 3, 2), dense("between")], "Dense"),
        ([dense("between")], "Dense"),
        ([flatten(4, 3, 2), plain_layer("BatchNormalization", "b")], "Dense after Flatten (4, 3, 2)"),
        ([], "Dense"),
    ],
)
def test_a_flatten_counts_where_it_comes_right_before(before: list[dict[str, Any]], kind: str) -> None:
    assert kinds_of(*before, dense("last"))["last"] == kind


NORM = {
    "class_name": "BatchNormalization",
    "config": {"name": "b", "axis": -1, "scale": True, "center": True},
}


def reshape(*lengths: int) -> dict[str, Any]:
    return {"class_name": "Reshape", "config": {"name": "reshape", "target_shape": [*lengths]}}


def conv(kind: str = "Conv2D", **config: Any) -> dict[str, Any]:
    return {"class_name": kind, "config": {"name": "image", "filters": 6, **config}}


@pytest.mark.parametrize(
    ("before", "kind"),
    [
        ([conv()], "Dense after Flatten (*, 6)"),
        ([conv("Conv3D"), plain_layer("MaxPooling3D", "p")], "Dense after Flatten (*, 6)"),
        (
            [conv(), plain_layer("BatchNormalization", "b"), plain_layer("ReLU", "r")],
            "Dense after Flatten (*, 6)",
        ),
        ([conv("Conv1D")], "Dense after Flatten (*, 6)"),
        ([conv("Conv1D"), plain_layer("MaxPooling1D", "p")], "Dense after Flatten (*, 6)"),
        ([conv(filters=None)], "Dense after Flatten"),
    ],
)
def test_a_flatten_without_a_shape_has_the_channels_of_the_layer_before(
    before: list[dict[str, Any]], kind: str
) -> None:
    assert kinds_of(*before, plain_layer("Flatten", "flatten"), dense("last"))["last"] == kind


@pytest.mark.parametrize(
    ("before", "what"),
    [
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
    ],
)
def test_what_a_flatten_takes_is_not_guessed(before: list[dict[str, Any]], what: str) -> None:
    kind = kinds_of(*before, plain_layer("Flatten", "flatten"), dense("last"))["last"]
    assert kind.startswith(f"Dense unlike PyTorch's: {what}") and kind.endswith(" stands before it")


GIVES = "unlike PyTorch's: a Reshape takes what it gives"


def test_what_a_reshape_takes_is_not_guessed() -> None:
    image = kinds_of(dense("first"), NORM, reshape(4, 4, 5), conv())
    assert image == {"first": f"Dense {GIVES}", "b": f"BatchNormalization {GIVES}"}
    assert kinds_of(dense("first"), reshape(1, 1, 5), dense("last")) == {"first": "Dense", "last": "Dense"}
    assert kinds_of(dense("first"), reshape(7, 5), dense("last"))["first"] == f"Dense {GIVES}"
    pooled = plain_layer("GlobalAveragePooling2D", "g")
    assert kinds_of(conv(), pooled, reshape(1, 1, 6), dense("last"))["last"] == "Dense"
    assert kinds_of(conv(), reshape(6), dense("last"))["last"] == "Dense"
    assert kinds_of(conv(), reshape(-1), dense("last"))["last"] == "Dense after Flatten (*, 6)"


def test_norms_behind_a_flatten_are_told_with_their_vectors() -> None:
    unlike = "BatchNormalization unlike PyTorch's: a Flatten stands before it"
    assert kinds_of(flatten(4, 3, 2), NORM)["b"] == unlike
    assert kinds_of(flatten(4, 3), NORM)["b"] == "BatchNormalization"
    found = kinds_by_name(chain(flatten(4, 3, 2), NORM), [tensor("b", "gamma", shape=(24,))])
    assert found == {"b.gamma": unlike}


def test_a_gru_with_its_reset_before_the_product_is_not_pytorchs() -> None:
    config = {"units": 3, "use_bias": False}
    for reset_after, kind in ((True, "GRU"), (False, "GRU unlike PyTorch's: reset_after is not set")):
        node = plain_layer("GRU", "g")
        node["config"] |= config | {"reset_after": reset_after}
        assert kinds_of(node) == {"g": kind}


def functional(*nodes: dict[str, Any], ends: list[str], name: str = "m") -> dict[str, Any]:
    config = {"name": name, "layers": [*nodes], "output_layers": [[end, 0, 0] for end in ends]}
    return {"class_name": "Functional", "config": config}


def behind(node: dict[str, Any], *names: str) -> dict[str, Any]:
    return {**node, "inbound_nodes": [[[name, 0, 0, {}] for name in names]]}


def in_graph(*nodes: dict[str, Any], ends: list[str]) -> dict[str, str]:
    model = layer_of(functional(*nodes, ends=ends))
    assert model is not None
    return {name: kind.text for name, kind in kinds_in(model).items()}


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
    taken = "Dense unlike PyTorch's: a Sampling takes what it gives"
    before = "Dense unlike PyTorch's: a Sampling stands before it"
    assert found == {"mean": taken, "variance": taken, "back": before}
    image = plain_layer("InputLayer", "image")
    plain_ends = in_graph(image, behind(flatten(4, 3, 2), "image"), *heads, ends=["mean", "variance"])
    assert plain_ends == dict.fromkeys(("mean", "variance"), "Dense after Flatten (4, 3, 2)")


def test_what_is_joined_with_a_flattened_image_is_not_guessed() -> None:
    image, vector = (plain_layer("InputLayer", name) for name in ("image", "vector"))
    flat, other = behind(flatten(4, 3, 2), "image"), behind(dense("other"), "vector")
    for kind in ("Concatenate", "Add"):
        both = behind(plain_layer(kind, "both"), "flatten", "other")
        found = in_graph(image, vector, flat, other, both, behind(dense("last"), "both"), ends=["last"])
        assert found["last"] == "Dense unlike PyTorch's: a Flatten stands before it"
        assert found["other"] == "Dense unlike PyTorch's: it is joined with what a Flatten gives"


def test_models_in_models_are_followed() -> None:
    inner = chain(dense("head"), name="inner")
    (found,) = [kinds_by_name(chain(flatten(4, 3, 2), inner), [tensor("inner", "head", "kernel")])]
    assert found == {"inner.head.kernel": "Dense after Flatten (4, 3, 2)"}
    encoder = functional(
        {"class_name": "InputLayer", "config": {"name": "i", "batch_shape": [None, 8, 8, 3]}},
        behind(conv(), "i"),
        behind(plain_layer("Flatten", "flatten"), "image"),
        ends=["flatten"],
        name="inner",
    )
    found = kinds_by_name(chain(encoder, dense("last")), [tensor("last", "kernel")])
    assert found == {"last.kernel": "Dense after Flatten (*, 6)"}


def test_a_flatten_is_found_by_the_connections_of_both_versions() -> None:
    history = {"class_name": "__keras_tensor__", "config": {"keras_history": ["flatten", 0, 0]}}
    inbound = {"three": [{"args": [history], "kwargs": {}}], "two": [[["flatten", 0, 0, {}]]]}
    other = [[["flatten", 0, 0, {}], ["strange", 0, 0, {}]]]
    image = plain_layer("InputLayer", "image")
    nodes = [image, behind(flatten(4, 3, 2), "image")]
    nodes += [dense(name, inbound_nodes=one) for name, one in inbound.items()]
    nodes += [dense("both", inbound_nodes=other), dense("none", inbound_nodes=[])]
    model = layer_of({"class_name": "Functional", "config": {"name": "m", "layers": nodes}})
    assert model is not None
    after = "Dense after Flatten (4, 3, 2)"
    unlike = "Dense unlike PyTorch's: what is not told stands before it"
    kinds = {name: kind.text for name, kind in kinds_in(model).items()}
    assert kinds == {"three": after, "two": after, "both": unlike, "none": unlike}


def test_wrappers_are_looked_into_and_strangers_are_not() -> None:
    inner = {"name": "t", "layer": dense("inner")}
    assert kinds_of({"class_name": "TimeDistributed", "config": inner}) == {"t": "Dense"}
    assert kinds_of({**dense("mine"), "registered_name": "Own>Dense"}) == {}
    assert kinds_of({**dense("mine"), "module": "own.layers"}) == {}
    assert kinds_of(plain_layer("Dense", "without_units")) == {}
    assert kinds_of(dense("quantized", config={"dtype": {"class_name": "QuantizedDTypePolicy"}})) == {}
    assert kinds_of(dense("adapted", config={"lora_rank": 4})) == {}


def tensor(*path: str, key: str | None = None, shape: tuple[int, ...] = (2, 2)) -> Tensor:
    return Tensor(path, BY_NAME["float32"], shape, Role.WEIGHTS, key=key)


def test_models_in_models_are_found_by_the_names_of_both() -> None:
    config = chain(chain(flatten(4, 3, 2), dense("head"), name="inner"), dense("head"))
    wanted = {"head.kernel": "Dense", "inner.head.kernel": "Dense after Flatten (4, 3, 2)"}
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
    assert kinds_by_group(config, groups.values(), found) == dict.fromkeys("abc", "Dense")
    without = kinds_by_group(None, groups.values(), found)
    assert without == dict.fromkeys(groups, UNWIRED)


def test_a_group_is_believed_in_lists_of_layers_alone() -> None:
    keys = [
        "/dense/vars/0",
        "/layers/my_dense/vars/0",
        "/layers/time_distributed/layer/vars/0",
        "/layers/dense",
    ]
    assert kinds_by_group(None, (), [tensor(str(at), key=key) for at, key in enumerate(keys)]) == {
        "3": "Dense of unknown wiring"
    }


def test_a_damaged_description_of_keras_tells_nothing_or_the_truth(twins: Path, tmp_path: Path) -> None:
    whole = twins / "twin-keras2-savedmodel"
    right, data = layers(whole), (whole / "keras_metadata.pb").read_bytes()
    place = tmp_path / "m"
    shutil.copytree(whole, place)
    chance = random.Random(5)
    for _ in range(40):
        damaged = bytearray(data)
        damaged[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        (place / "keras_metadata.pb").write_bytes(damaged)
        found = layers(place)
        assert set(found) <= set(right)
        assert len(found.items() - right.items()) <= 4, "one byte is in the description of one layer"


# Paddle ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["twin-fluid", "twin-static.pdmodel"])
def test_operators_tell_the_layers_of_a_program(twins: Path, name: str) -> None:
    # What adds a bias to the output of a layer knows nothing of that layer.
    biases = {"conv1.b_0", "fc1.b_0", "fc2.b_0"}
    wanted = {one: STATIC[one.partition(".")[0]] for one in weights(twins / name) if one not in biases}
    assert layers(twins / name) == wanted


def test_the_names_that_paddle_makes_up_tell_the_layers_of_a_state_dict(twins: Path) -> None:
    found = layers(twins / "twin.pdparams")
    assert set(found) == set(weights(twins / "twin.pdparams"))
    kinds = {**STATIC, "bn1": "batch_norm2d"}
    assert found == {name: kinds[name.partition(".")[0]] for name in found}


def test_names_at_any_level_of_a_dict_are_taken(files: Path) -> None:
    assert layers(files / "paddle" / "nested.pdparams") == {}, "paddle.save drops the names there"
    assert layers(files / "paddle" / "adam.pdopt") == {}
    assert layers(files / "fluid" / "variables") == dict.fromkeys(
        ["fc_0.w_0", "fc_0.b_0", "fc_1.w_0", "fc_1.b_0"], "linear"
    )


def test_programs_of_paddle_3_tell_the_same(files: Path) -> None:
    found = layers(files / "paddle" / "pir.json")
    assert {name: kind for name, kind in found.items() if "w_" in name} == {
        "linear_0.w_0": "linear",
        "linear_1.w_0": "linear",
        **{f"batch_norm1d_0.w_{at}": "batch_norm" for at in range(3)},
    }


def takes(kind: str, gives: str = "out", **slots: str) -> Operator:
    return Operator(kind, {slot: (name,) for slot, name in slots.items()}, (gives,))


@pytest.mark.parametrize(
    ("operators", "kinds"),
    [
        ([takes("mul", X="x", Y="w")], {"w": "linear"}),
        ([takes("matmul_v2", X="w", Y="y")], {"y": "linear"}),
        ([Operator("matmul_v2", {"X": ("x",), "Y": ("w",)}, ("o",), True)], {"w": "linear transposed"}),
        ([takes("cast", "half", X="w"), takes("mul", X="x", Y="half")], {"w": "linear"}),
        ([takes("relu", "act", X="w"), takes("mul", X="x", Y="act")], {"act": "linear"}),
        (
            [
                takes("lookup_table_v2", Ids="i", W="w"),
                Operator("matmul_v2", {"X": ("x",), "Y": ("w",)}, ("o",), True),
            ],
            {"w": "embedding"},
        ),
        ([Operator("rnn", {"WeightList": ("a", "b")}, (), mode="GRU")], {"a": "gru_cell", "b": "gru_cell"}),
        ([Operator("rnn", {"WeightList": ("a",)}, (), mode="NEW")], {}),
        ([takes("conv2d", Input="x", Filter="w")], {"w": "conv2d"}),
        ([takes("elementwise_add", X="x", Y="b")], {}),
    ],
)
def test_an_operator_tells_what_it_takes(operators: list[Operator], kinds: Mapping[str, str]) -> None:
    assert kinds_by_operator(operators) == kinds


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("linear_0.w_0", "linear"),
        ("fc_12.b_0", "linear"),
        ("model/embedding_3.w_0", "embedding"),
        ("batch_norm2d_0.w_2", "batch_norm2d"),
        ("linear_0.w_0_moment1_0", None),
        ("head.w_0", None),
        ("linear.weight", None),
    ],
)
def test_only_names_that_paddle_makes_up_tell_something(name: str, kind: str | None) -> None:
    assert kind_by_name(name) == kind


@given(st.binary(max_size=200))
def test_any_bytes_are_operators_or_none(data: bytes) -> None:
    try:
        assert isinstance(kinds_by_operator(operators_in(Buffer("p", data))), dict)
    except DamagedCheckpoint as failure:
        assert failure.reason


def test_a_damaged_program_opens_or_not_and_tells_what_is_left(twins: Path) -> None:
    data = (twins / "twin-static.pdmodel").read_bytes()
    whole = read_program(Buffer("p", data)).kinds()
    chance = random.Random(6)
    for _ in range(100):
        damaged = bytearray(data)
        damaged[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        try:
            program = read_program(Buffer("p", bytes(damaged)))
        except CheckpointError:
            continue
        assert len(program.kinds().items() - whole.items()) <= 4


def test_a_malformed_operator_of_paddle_3_tells_nothing(files: Path, tmp_path: Path) -> None:
    kinds_of = json.loads((files / "paddle" / "pir.json").read_text())
    operators = kinds_of["program"]["regions"][0]["blocks"][0]["ops"]
    del next(one for one in operators if one["#"] == "1.matmul")["A"]
    (tmp_path / "m.json").write_text(json.dumps(kinds_of))
    with Source(str(tmp_path / "m.json")) as source:
        program = read_pir(source)
        assert len(program.variables) == 8
        assert program.kinds() == {}


def test_a_format_without_layers_tells_none(files: Path) -> None:
    assert layers(files / "pytorch" / "guide.pth") == {}
