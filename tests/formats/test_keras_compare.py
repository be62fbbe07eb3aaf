"""A Keras configuration against its weights: what is missing, too much, or of another shape is named."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import h5py
import numpy as np
import pytest

from ckpttool import open_checkpoint
from ckpttool.ops.verdict import Safety
from ckpttool.ops.verify import verify
from ckpttool.report import Severity

CODES = {"weight-missing", "weight-extra", "weight-shape"}
Edit = Callable[[Any], None]


def told(path: Path) -> set[tuple[str, str | None]]:
    """Return the codes and places of what is wrong with the weights."""
    return {(one.code, one.where) for one in verify(path).findings if one.code in CODES}


def edited(files: Path, tmp_path: Path, edit: Edit) -> Path:
    """Return a copy of a whole model in HDF5, with something changed."""
    path = tmp_path / "m.h5"
    shutil.copy(files / "keras" / "adam.h5", path)
    with h5py.File(path, "r+") as file:
        edit(file)
    return path


def configured(files: Path, tmp_path: Path, edit: Callable[[dict[str, Any]], None]) -> Path:
    """Return a copy of a ``.keras`` file, with the head's configuration changed."""
    path = tmp_path / "m.keras"
    with ZipFile(files / "keras" / "adam.keras") as old, ZipFile(path, "w") as new:
        config = json.loads(old.read("config.json"))
        edit(config["config"]["layers"][-1])
        for name in old.namelist():
            new.writestr(name, json.dumps(config) if name == "config.json" else old.read(name))
    return path


def shorten(file: Any) -> None:
    head = file["model_weights/head"]
    head.attrs["weight_names"] = head.attrs["weight_names"][:1]


def widen(file: Any) -> None:
    file.attrs["model_config"] = file.attrs["model_config"].replace('"units": 1,', '"units": 5,')


def rename(file: Any) -> None:
    file.attrs["model_config"] = file.attrs["model_config"].replace('"name": "head"', '"name": "other"')


HEAD = "layer 'head'"


@pytest.mark.parametrize(
    ("edit", "found"),
    [
        (lambda file: file.pop("model_weights/head"), ("weight-missing", HEAD)),
        (shorten, ("weight-missing", HEAD)),
        (widen, ("weight-shape", HEAD)),
        (rename, ("weight-missing", "layer 'other'")),
        (rename, ("weight-extra", "head")),
        (
            lambda file: file["model_weights/head"].create_dataset("more", data=np.ones(3)),
            ("weight-extra", "/model_weights/head/more"),
        ),
    ],
)
def test_a_whole_model(files: Path, tmp_path: Path, edit: Edit, found: tuple[str, str]) -> None:
    assert not told(files / "keras" / "adam.h5")
    path = edited(files, tmp_path, edit)
    assert found in told(path)
    assert not verify(path).is_valid


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({"units": 3}, {("weight-shape", HEAD)}),
        ({"use_bias": False}, {("weight-extra", HEAD)}),
        ({"lora_rank": 3}, set()),
        ({"units": None, "use_bias": "text"}, set()),
        ({"units": 10**4299}, set()),
        ({"dtype": {"class_name": "QuantizedDTypePolicy", "config": {}}, "units": 3}, set()),
    ],
)
def test_the_configuration_of_a_layer(
    files: Path, tmp_path: Path, changed: dict[str, Any], found: set[tuple[str, str]]
) -> None:
    path = configured(files, tmp_path, lambda layer: layer["config"].update(changed))
    assert told(path) == found


def test_layers_that_wrap_each_other_take_no_time(files: Path, tmp_path: Path) -> None:
    nested: dict[str, Any] = {"class_name": "SimpleRNN", "config": {"units": 1, "use_bias": True}}
    for _ in range(50):
        nested = {"class_name": "Bidirectional", "config": {"layer": nested}}

    def edit(layer: dict[str, Any]) -> None:
        layer.update(class_name="Bidirectional", config={"name": "head", "layer": nested})

    assert told(configured(files, tmp_path, edit)) == {("weight-extra", "/layers/dense")}


def test_a_class_of_somebody_else_is_not_judged(files: Path, tmp_path: Path) -> None:
    def edit(layer: dict[str, Any]) -> None:
        layer.update(module="mine", registered_name="mine>Dense")
        layer["config"]["units"] = 7

    assert not told(configured(files, tmp_path, edit))


def test_a_layer_of_another_class(files: Path, tmp_path: Path) -> None:
    path = configured(files, tmp_path, lambda layer: layer.update(class_name="Embedding"))
    assert told(path) == {("weight-extra", "/layers/dense")}


def test_weights_of_another_model(files: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.keras"
    with (
        ZipFile(files / "keras" / "adam.keras") as old,
        ZipFile(files / "keras" / "bfloat16.keras") as other,
        ZipFile(path, "w") as new,
    ):
        for name in old.namelist():
            new.writestr(name, (other if name.endswith(".h5") else old).read(name))
    assert "weight-missing" in {code for code, _ in told(path)}


class _Runs:
    def __reduce__(self) -> tuple[object, ...]:
        return os.system, ("true",)


def test_a_pickle_in_arrays_beside_the_weights(files: Path, tmp_path: Path) -> None:
    arrays, path = tmp_path / "a.npz", tmp_path / "m.keras"
    np.savez(arrays, x=np.array([_Runs()], object), w=np.ones(3))
    shutil.copy(files / "keras" / "adam.keras", path)
    with ZipFile(path, "a") as archive:
        archive.write(arrays, "model.weights.npz")
    assert verify(path).safety is Safety.UNSAFE


def test_the_step_is_that_of_the_optimizer_inside(tmp_path: Path) -> None:
    """With mixed precision Keras counts steps in the inner optimizer, and lists the outer one first."""
    names = ["loss_scale_optimizer/iteration", "loss_scale_optimizer/learning_rate"]
    names += ["adam/iteration", "adam/learning_rate"]
    with h5py.File(tmp_path / "m.h5", "w") as file:
        file.create_group("model_weights").attrs["layer_names"] = np.array([], "S1")
        optimizer = file.create_group("optimizer_weights")
        optimizer.attrs["weight_names"] = [name.encode() for name in names]
        for name, value in zip(
            names, (np.int64(0), np.float32(0), np.int64(7), np.float32(0.5)), strict=True
        ):
            optimizer[name] = value
    with open_checkpoint(tmp_path / "m.h5") as checkpoint:
        assert (checkpoint.training.step, checkpoint.training.learning_rate) == (7, 0.5)
        assert checkpoint.training.origin["step"] == "tensor optimizer.adam.iteration"


# What Keras writes ----------------------------------------------------------------------------------

WRITE = """
import os, sys

api = __import__(sys.argv[1])
layers, folder = api.layers, sys.argv[2]
one, words = api.Input((8, 4)), api.Input((6,), dtype="int32")
image, cube, film = api.Input((8, 8, 4)), api.Input((6, 6, 6, 4)), api.Input((3, 8, 8, 4))
dense, flat = layers.Dense, {"use_bias": False}
on = [
    (one, [dense(3), dense(3, **flat), dense(3, activation=layers.PReLU()), layers.PReLU()]),
    (one, [layers.EinsumDense("abc,cd->abd", (None, 3), **more) for more in ({}, {"bias_axes": "d"})]),
    (one, [kind(3, **more) for kind in (layers.LSTM, layers.GRU, layers.SimpleRNN) for more in ({}, flat)]),
    (one, [layers.GRU(3, reset_after=False), layers.RNN(layers.LSTMCell(3))]),
    (one, [layers.RNN([layers.GRUCell(3), layers.SimpleRNNCell(2)])]),
    (one, [layers.Bidirectional(layers.LSTM(3)), layers.Bidirectional(layers.RNN(layers.GRUCell(2)))]),
    (one, [layers.TimeDistributed(api.Sequential([dense(3), layers.Dropout(0.1), dense(2)]))]),
    (one, [layers.BatchNormalization(**more) for more in ({}, {"scale": False}, {"axis": 1})]),
    (one, [layers.LayerNormalization(**more) for more in ({}, {"center": False}, {"axis": [1, 2]})]),
    (one, [layers.GroupNormalization(2), layers.UnitNormalization(), layers.Normalization()]),
    (one, [layers.Conv1D(3, 2), layers.Conv1DTranspose(3, 2), layers.SeparableConv1D(3, 2)]),
    (one, [layers.DepthwiseConv1D(2, depth_multiplier=2)]),
    (image, [layers.Conv2D(4, 3, groups=2), layers.Conv2DTranspose(3, 2, **flat), layers.DepthwiseConv2D(3)]),
    (image, [layers.SeparableConv2D(3, 2, depth_multiplier=2), layers.ConvLSTM1D(3, 2)]),
    (cube, [layers.Conv3D(3, 2), layers.Conv3DTranspose(3, 2)]),
    (film, [layers.ConvLSTM2D(3, 2, **flat)]),
    (words, [layers.Embedding(7, 3)]),
]
found = [layer(given) for given, several in on for layer in several]
pairs = {}, {"value_dim": 5, "output_shape": 7, "use_bias": False}
found += [layers.MultiHeadAttention(2, 3, **more)(one, one) for more in pairs]
found += [layer([one, one]) for layer in (layers.Attention(use_scale=True), layers.AdditiveAttention())]
if hasattr(layers, "GroupQueryAttention"):
    found += [layers.GroupQueryAttention(2, 4, 2)(one, one), layers.RMSNormalization()(one)]
    found += [layers.SpectralNormalization(dense(2))(one), layers.ReversibleEmbedding(7, 3)(words)]
else:
    found += [layers.LocallyConnected1D(3, 2)(one)]
shared = dense(4)
inner = api.Model(one, shared(one), name="inner")
found += [inner(shared(one)), shared(dense(4)(one))]
found += [api.Sequential([dense(3), api.Sequential([dense(2)])])(one)]
api.mixed_precision.set_global_policy("mixed_float16")
found += [dense(3)(one)]
model = api.Model([one, words, image, cube, film], found)
model.compile("adam", "mse")
if api.__name__ == "keras":
    model.optimizer.build(model.trainable_variables)
model.layers[-1].trainable = False
for name in ("m.keras", "m.h5", "m.weights.h5"):
    (model.save_weights if "weights" in name else model.save)(os.path.join(folder, name))
api.Sequential([dense(3), dense(2)]).save(os.path.join(folder, "unbuilt.keras"))
"""


@pytest.mark.framework
@pytest.mark.parametrize("api", ["keras", "tf_keras"])
def test_all_layers_have_the_weights_that_they_should(api: str, tmp_path: Path) -> None:
    quiet = {"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-W", "ignore", "-c", WRITE, api, str(tmp_path)]
    subprocess.run(command, env={**os.environ, **quiet}, check=True, timeout=300)
    with open_checkpoint(tmp_path / "m.h5") as checkpoint:
        assert "loss_scale" not in checkpoint.training.origin.get("step", "")
    for path in tmp_path.iterdir():
        verification = verify(path)
        assert not verification.findings, path.name
        assert verification.safety is Safety.SAFE


def test_a_layer_that_the_configuration_calls_otherwise(files: Path, tmp_path: Path) -> None:
    """Its own group has the last word."""
    path = configured(files, tmp_path, lambda layer: layer["config"].update(name="tail"))
    found = [(one.code, one.where, one.severity) for one in verify(path).findings]
    assert found == [("layer-name", "/layers/dense", Severity.WARNING)]
    with open_checkpoint(path) as checkpoint:
        assert checkpoint["head.0"].key == "/layers/dense/vars/0"


def test_a_configuration_names_groups_that_say_nothing(files: Path, tmp_path: Path) -> None:
    path = configured(files, tmp_path, lambda layer: layer["config"].update(name="tail"))
    with ZipFile(path) as old:
        held = {name: old.read(name) for name in old.namelist()}
    weights = tmp_path / "weights.h5"
    weights.write_bytes(held["model.weights.h5"])
    with h5py.File(weights, "r+") as file:
        for group in file["layers"].values():
            group["vars"].attrs.pop("name", None)
    held["model.weights.h5"] = weights.read_bytes()
    with ZipFile(path, "w") as new:
        for name, data in held.items():
            new.writestr(name, data)
    with open_checkpoint(path) as checkpoint:
        assert checkpoint["tail.0"].key == "/layers/dense/vars/0"
        assert not checkpoint.findings
