"""Models of Keras 2 for Keras 3: what it reads predicts the same, and what it would misread is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ckpttool import ConvertOptions, UsageError, convert, open_checkpoint
from ckpttool.formats.keras.config_writer import as_keras_3
from ckpttool.formats.keras.layer_tree import KerasRefusal
from tests.support.frameworks import python_with_frameworks


@pytest.mark.framework
def test_keras_3_predicts_what_keras_2_does(tmp_path: Path) -> None:
    script = Path(__file__).with_name("keras2_oracle.py")
    ran = python_with_frameworks(script, tmp_path, env={"CUDA_VISIBLE_DEVICES": ""})
    apart = json.loads(ran.splitlines()[-1])
    assert apart.keys() == {"images", "sequences", "nested"}
    assert max(apart.values()) < 1e-4


def test_the_optimizer_of_keras_2_stays_behind_only_if_asked(files: Path, tmp_path: Path) -> None:
    source = files / "keras" / "keras2.h5"
    with pytest.raises(UsageError, match=r"^Keras 2 wrote it, with its optimizer's state .*\(--only weights"):
        convert(source, tmp_path / "x.keras")
    assert convert(source, tmp_path / "x.keras", ConvertOptions(only="weights")).verified
    with open_checkpoint(tmp_path / "x.keras") as made:
        assert made.producer.version == "3.0.0"


def _model(kind: str, node: dict[str, Any] | None = None, **config: Any) -> dict[str, Any]:
    layer = {"class_name": kind, "config": {"name": "it", **config}, **(node or {})}
    return {"class_name": "Sequential", "config": {"name": "m", "layers": [layer]}}


def test_settings_that_keras_3_lacks_are_left_out() -> None:
    (layer,) = as_keras_3(_model("LSTM", time_major=False, units=3))["config"]["layers"]
    assert layer == {"class_name": "LSTM", "config": {"name": "it", "units": 3}}
    (layer,) = as_keras_3(_model("BatchNormalization", axis=[3]))["config"]["layers"]
    assert layer["config"]["axis"] == 3


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (_model("Lambda"), r"layer 'it' \(Lambda\) is not known to load in Keras 3"),
        (_model("Mine"), r"layer 'it' \(Mine\) is not known"),
        (_model("LSTM", time_major=True), "has time_major=True, which Keras 3 lacks"),
        (_model("Conv2DTranspose", groups=2), "has groups=2"),
        (_model("LSTM", recurrent_activation="hard_sigmoid"), "has recurrent_activation='hard_sigmoid'"),
        (_model("Dense", activation={"class_name": "function", "config": "mine"}), "has activation="),
        (_model("Dense", dtype={"class_name": "Policy", "config": {}}), "has dtype="),
        (_model("Dense", kernel_initializer={"class_name": "Custom>Own"}), "the kernel_initializer of layer"),
        (_model("TimeDistributed", layer=_model("Dense")), "wraps a model"),
        (_model("TimeDistributed", layer={"class_name": "Lambda", "config": {}}), r"\(Lambda\) is not known"),
        (
            _model("LSTM", {"inbound_nodes": [[["a", 0, 0, {"initial_state": ["b", 0, 0]}]]]}),
            "further arguments",
        ),
        (_model("Add", {"inbound_nodes": [{"x": 1}]}), "further arguments"),
        ({"class_name": "Sequential", "config": []}, "not listed as Keras 3 lists them"),
        ({"class_name": "Net", "config": {"layers": []}}, "not listed"),
        ({"class_name": "Sequential", "config": {"layers": [3]}}, "a layer is not described"),
    ],
)
def test_what_keras_3_would_misread_is_refused(model: dict[str, Any], why: str) -> None:
    with pytest.raises(KerasRefusal, match=why):
        as_keras_3(model)
