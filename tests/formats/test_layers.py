"""Which layer each weight belongs to: told by configurations, groups, operators and names; never guessed."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from ckpttool import CheckpointError, Role, open_checkpoint
from ckpttool.core.layers import DoubtReason, LayerKind, LayoutDoubt
from tests.support.checkpoints import class_or_facts
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


def layers(path: Path) -> dict[str, LayerKind | str]:
    with open_checkpoint(path) as checkpoint:
        return {name: class_or_facts(kind) for name, kind in checkpoint.layers.items()}


def weights(path: Path) -> list[str]:
    with open_checkpoint(path) as checkpoint:
        return [one.name for one in checkpoint.tensors if one.role is Role.WEIGHTS]


# Keras ----------------------------------------------------------------------------------------------


UNWIRED = LayerKind("Dense", doubt=DoubtReason(LayoutDoubt.UNWIRED))


@pytest.mark.parametrize(
    "name", ["twin.keras", "twin.weights.h5", "twin.h5", "twin-keras2.h5", "twin-keras2-savedmodel"]
)
def test_each_weight_of_keras_has_the_class_of_its_layer(twins: Path, name: str) -> None:
    wanted: dict[str, LayerKind | str] = {one: KERAS[one.partition(".")[0]] for one in weights(twins / name)}
    if name == "twin.weights.h5":  # which doesn't say what stands before a kernel
        wanted |= {"fc1.0": UNWIRED, "fc2.0": UNWIRED}
    assert layers(twins / name) == wanted


def test_every_kind_of_layer_is_told_and_what_a_flatten_gives_with_its_shape(twins: Path) -> None:
    wanted = {one: ZOO[one.partition(".")[0]] for one in weights(twins / "zoo.keras")}
    assert layers(twins / "zoo.keras") == {**wanted, "flat.0": LayerKind("Dense", flattened=(4, 3, 4))}


@pytest.mark.parametrize("name", ["twin-tf", "twin-functional-tf", "twin-savedmodel"])
def test_where_no_file_says_it_nothing_is_told(twins: Path, name: str) -> None:
    assert layers(twins / name) == {}


def test_groups_that_attributes_name_tell_nothing(twins: Path) -> None:
    kinds = layers(twins / "twin-subclassed.weights.h5")
    assert {name.partition(".")[0] for name in kinds} == {"ln", "lstm"}


def test_shards_tell_what_the_whole_would(files: Path) -> None:
    assert set(layers(files / "keras" / "sharded").values()) == {"BatchNormalization", "Dense", UNWIRED}


def test_the_optimizers_variables_have_no_layer(files: Path) -> None:
    for name in ("adam.keras", "adam.h5", "keras2.h5"):
        assert set(layers(files / "keras" / name)) == set(weights(files / "keras" / name))


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


def test_a_damaged_program_opens_or_not_and_tells_what_is_left(twins: Path, tmp_path: Path) -> None:
    whole = layers(twins / "twin-static.pdmodel")
    data = (twins / "twin-static.pdmodel").read_bytes()
    shutil.copy(twins / "twin-static.pdiparams", tmp_path / "m.pdiparams")
    chance = random.Random(6)
    for _ in range(100):
        damaged = bytearray(data)
        damaged[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        (tmp_path / "m.pdmodel").write_bytes(damaged)
        try:
            kinds = layers(tmp_path / "m.pdmodel")
        except CheckpointError:
            continue
        assert len(kinds.items() - whole.items()) <= 4


def test_a_format_without_layers_tells_none(files: Path) -> None:
    assert layers(files / "pytorch" / "guide.pth") == {}
