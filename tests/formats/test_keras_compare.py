"""A Keras configuration against its weights: what is missing, too much, or of another shape is named."""

from __future__ import annotations

import json
import os
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import h5py
import numpy as np
import pytest

from ckpttool import Safety, Severity, open_checkpoint, verify

CODES = {"weight-missing", "weight-extra", "weight-shape"}
Edit = Callable[[Any], None]


def weight_findings(path: Path) -> set[tuple[str, str | None]]:
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
    assert not weight_findings(files / "keras" / "adam.h5")
    path = edited(files, tmp_path, edit)
    assert found in weight_findings(path)
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
    assert weight_findings(path) == found


def test_layers_that_wrap_each_other_take_no_time(files: Path, tmp_path: Path) -> None:
    nested: dict[str, Any] = {"class_name": "SimpleRNN", "config": {"units": 1, "use_bias": True}}
    for _ in range(50):
        nested = {"class_name": "Bidirectional", "config": {"layer": nested}}

    def edit(layer: dict[str, Any]) -> None:
        layer.update(class_name="Bidirectional", config={"name": "head", "layer": nested})

    assert weight_findings(configured(files, tmp_path, edit)) == {("weight-extra", "/layers/dense")}


def test_a_kernel_of_many_axes_in_layers_that_wrap_each_other_takes_no_memory(
    files: Path, tmp_path: Path
) -> None:
    settings = {"kernel_size": [1] * 20_000, "filters": 1, "groups": 1, "use_bias": False}
    nested: dict[str, Any] = {
        "class_name": "Conv1D",
        "config": {**settings, "data_format": "channels_last"},
    }
    for _ in range(9):
        nested = {"class_name": "Bidirectional", "config": {"layer": nested}}

    def edit(layer: dict[str, Any]) -> None:
        layer.update(class_name="Bidirectional", config={"name": "head", "layer": nested})

    path = configured(files, tmp_path, edit)
    tracemalloc.start()
    try:
        assert weight_findings(path) == {("weight-extra", "/layers/dense")}
        assert tracemalloc.get_traced_memory()[1] < 50_000_000
    finally:
        tracemalloc.stop()


def test_a_class_of_somebody_else_is_not_judged(files: Path, tmp_path: Path) -> None:
    def edit(layer: dict[str, Any]) -> None:
        layer.update(module="mine", registered_name="mine>Dense")
        layer["config"]["units"] = 7

    assert not weight_findings(configured(files, tmp_path, edit))


def test_a_layer_of_another_class(files: Path, tmp_path: Path) -> None:
    path = configured(files, tmp_path, lambda layer: layer.update(class_name="Embedding"))
    assert weight_findings(path) == {("weight-extra", "/layers/dense")}


def test_weights_of_another_model(files: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.keras"
    with (
        ZipFile(files / "keras" / "adam.keras") as old,
        ZipFile(files / "keras" / "bfloat16.keras") as other,
        ZipFile(path, "w") as new,
    ):
        for name in old.namelist():
            new.writestr(name, (other if name.endswith(".h5") else old).read(name))
    assert "weight-missing" in {code for code, _ in weight_findings(path)}


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
