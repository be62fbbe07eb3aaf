"""What Keras files can't say in their own way comes back by their entry."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import h5py
import pytest

from ckpttool import convert, open_checkpoint
from ckpttool.formats.sidecar import ENTRY, training_document


@pytest.mark.parametrize("source", ["adam.keras", "adam.h5"])
def test_weights_alone_keep_what_their_model_said(source: str, files: Path, tmp_path: Path) -> None:
    assert convert(files / "keras" / source, tmp_path / "x.weights.h5").verified
    with open_checkpoint(files / "keras" / source) as own, open_checkpoint(tmp_path / "x.weights.h5") as made:
        assert dict(made.metadata) == dict(own.metadata)
        assert {"keras_version", "model_config"} <= made.metadata.keys()
        assert made.native["keras.config"] == own.native["keras.config"]
        told = training_document(made.training)
        assert told["step"] and told["learning_rate"]
        assert {**told, "origin": None} == {**training_document(own.training), "origin": None}


@pytest.mark.parametrize(("source", "between"), [("adam.keras", "x.h5"), ("adam.h5", "x.keras")])
def test_the_other_kind_of_model_gives_the_same_file_back(
    source: str, between: str, files: Path, tmp_path: Path
) -> None:
    back = f"back.{source.partition('.')[2]}"
    assert convert(files / "keras" / source, tmp_path / between).verified
    assert convert(tmp_path / between, tmp_path / back).verified
    with open_checkpoint(files / "keras" / source) as own, open_checkpoint(tmp_path / back) as made:
        assert dict(made.metadata) == dict(own.metadata)
        kept = {"keras.config", "keras.metadata", "keras.training_config"} & own.native.keys()
        assert {key: made.native[key] for key in kept} == {key: own.native[key] for key in kept}
        assert training_document(made.training)["saved_at" if source == "adam.keras" else "step"]


@pytest.mark.parametrize("name", ["adam.h5", "adam.weights.h5"])
def test_a_file_of_the_same_kind_has_no_entry(name: str, files: Path, tmp_path: Path) -> None:
    assert convert(files / "keras" / name, tmp_path / f"x.{name.partition('.')[2]}").verified
    with h5py.File(tmp_path / f"x.{name.partition('.')[2]}") as file:
        assert ENTRY not in file


def test_a_strange_training_config_is_carried_and_not_written(files: Path, tmp_path: Path) -> None:
    from dataclasses import replace

    from tests.support.writing import content_of
    from tests.writers.test_keras import write

    with open_checkpoint(files / "keras" / "adam.h5") as opened:
        content = content_of(opened)
        strange = {**content.native, "keras.training_config": b'{"a": "\0"'}
        strange["keras.metadata"] = json.dumps({"keras_version": "3\0", "backend": "\ud800"}).encode()
        target, _ = write(replace(content, native=strange), tmp_path / "x.h5")
    with h5py.File(target) as file:
        assert "training_config" not in file.attrs
    with open_checkpoint(target) as opened:
        assert opened.native["keras.training_config"] == strange["keras.training_config"]
        assert opened.native["keras.metadata"] == strange["keras.metadata"]


@pytest.mark.parametrize(
    "path",
    ["keras/adam.keras", "keras/adam.h5", "keras/adam.weights.h5", "safetensors/unaligned.safetensors"],
)
def test_what_only_the_name_says_comes_along(path: str, files: Path, tmp_path: Path) -> None:
    """As ModelCheckpoint names a file, ``{any}.{epoch:02d}-{val_loss:.2f}``."""
    suffix = path.partition(".")[2]
    named, other = tmp_path / f"resnet50.05-0.87.{suffix}", tmp_path / f"x.{suffix}"
    shutil.copy(files / path, named)
    convert(named, other)
    with open_checkpoint(other) as checkpoint:
        assert (checkpoint.training.epoch, dict(checkpoint.training.metrics)) == (5, {"value": 0.87})
