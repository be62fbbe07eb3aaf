"""Keras's models, whole and in parts, loaded and run as the child does; the values are Keras's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ckpttool import verify
from tests.support import predictions

MODELS = Path(__file__).parent / "models"
NETS = f"{MODELS / 'keras_nets.py'}"
OWN = f"{MODELS / 'own_layers.py'}"
TAKEN = "in the checkpoint, but not used by the model"
GIVEN = "in the model, but not in the checkpoint"
FAILS = "keras_nets.py:fails can't be called"

pytestmark = pytest.mark.framework

KINDS: list[tuple[str, str, dict[str, Any]]] = [
    ("dense{}.keras", "dense.npz", {}),
    ("dense{}.h5", "dense.npz", {}),
    ("dense{}.weights.h5", "dense.npz", {"model": f"{NETS}:dense"}),
    ("old{}.h5", "old.npz", {}),
    ("oldweights{}.h5", "old.npz", {"model": f"{NETS}:old"}),
]


@pytest.mark.parametrize(("name", "recording", "options"), KINDS, ids=[kind[0] for kind in KINDS])
def test_each_kind_predicts_as_recorded_and_no_worse_weights_do(
    predict_apart, name, recording, options
) -> None:
    told = predict_apart(name.format(""), expect=recording, **options)
    assert [code for code in told.codes if code != "optimizer-mismatch"] == []
    assert "as recorded" in told.predict.detail
    assert predict_apart(name.format("-off"), expect=recording, **options).predict.codes == [
        "outputs-changed"
    ]
    assert "output-not-finite" in predict_apart(name.format("-nan"), **options).predict.codes


def test_inputs_and_outputs_have_the_names_of_the_model(predict_apart) -> None:
    told = predict_apart("heads.keras", expect="heads.npz", resume_step=True)
    assert told.codes == []
    assert told.predict.detail.startswith("one 4×2, two 4×1 from the recorded input; ")
    assert "one step of SGD changed 4 of 4 weights" in told.predict.detail


def test_the_first_unknown_dimension_is_the_batch(predict_apart) -> None:
    told = predict_apart("dense.keras", batch_size=5)
    assert told.predict.detail == "output 5×2 from generated input (5×3), seed 0"


@pytest.mark.parametrize("name", ["recurrent{}.keras", "sequences{}"])
def test_what_a_recurrent_kernel_does_shows_in_a_recording(predict_apart, tmp_path, name) -> None:
    record = tmp_path / "g.npz"
    told = predict_apart(name.format(""), record=record)
    assert told.codes == []
    assert "3×4 from generated input (3×16×3), seed 0" in told.predict.detail
    assert predict_apart(name.format(""), expect=record).codes == []
    assert predict_apart(name.format("-off"), expect=record).codes == ["outputs-changed"]


def test_images_of_any_size_are_large_enough(predict_apart) -> None:
    told = predict_apart("pooled.keras")
    assert told.codes == []
    assert told.predict.detail == "output 3×2 from generated input (3×16×16×2), seed 0"


@pytest.mark.parametrize("model", [OWN, f"{OWN}:DuplicateKeyObject"])
def test_classes_of_the_user_are_imported(predict_apart, model) -> None:
    told = predict_apart("doubled.keras", model=model, expect="doubled.npz")
    assert told.codes == []


def test_sharded_weights(predict_apart) -> None:
    assert predict_apart("dense.weights.json", model=f"{NETS}:dense", expect="dense.npz").codes == []
    told = predict_apart("dense.weights.json", model=f"{NETS}:shallow")
    assert told.load.findings == [["not-consumed", "error", TAKEN, name] for name in ("last.0", "last.1")]


@pytest.mark.parametrize(
    ("factory", "findings"),
    [
        ("shallow", [("not-consumed", TAKEN, "last.0"), ("not-consumed", TAKEN, "last.1")]),
        ("deep", [("missing-key", GIVEN, "more.0"), ("missing-key", GIVEN, "more.1")]),
        ("fails", [("no-such-model", f"{FAILS}: RuntimeError: no such luck", "keras_nets.py:75")]),
    ],
)
def test_other_models_are_told_by_name(predict_apart, factory, findings) -> None:
    told = predict_apart("dense.weights.h5", model=f"{NETS}:{factory}")
    assert [(code, text, where) for code, _, text, where in told.load.findings] == findings
    assert told.predict.is_skipped


def test_other_shapes_are_told_by_name(predict_apart) -> None:
    told = predict_apart("dense.weights.h5", model=f"{NETS}:dense", model_args={"units": 5})
    assert [(code, text, where) for code, _, text, where in told.load.findings] == [
        ("shape-mismatch", "3×4 in the checkpoint, 3×5 in the model", "first.0"),
        ("shape-mismatch", "4 in the checkpoint, 5 in the model", "first.1"),
        ("shape-mismatch", "4×2 in the checkpoint, 5×2 in the model", "last.0"),
    ]


def test_a_model_that_was_never_called_needs_a_shape(predict_apart) -> None:
    told = predict_apart("dense.weights.h5", model=f"{NETS}:unbuilt")
    assert told.load.codes == ["model-not-built"]
    assert predict_apart("dense.weights.h5", model=f"{NETS}:unbuilt", shapes="1,3").codes == []
    assert predict_apart("dense.weights.h5", model=f"{NETS}:unbuilt", expect="dense.npz").codes == []


@pytest.mark.parametrize(
    ("name", "options", "detail"),
    [
        ("dense.keras", {}, "one step of Adam changed 4 of 4 weights"),
        ("dense.keras", {"optimizer": "keras.optimizers:Adam"}, "one step of Adam changed 4 of 4 weights"),
        ("fresh.keras", {"optimizer": "keras.optimizers:SGD"}, "one step of SGD changed 4 of 4 weights"),
        ("old.h5", {}, "one step of Adam changed 4 of 4 weights"),
        (
            "dense.weights.h5",
            {"model": f"{NETS}:dense", "optimizer": "keras.optimizers:Adam"},
            "one step of Adam changed 4 of 4 weights",
        ),
    ],
)
def test_a_step_of_training(predict_apart, name, options, detail) -> None:
    told = predict_apart(name, resume_step=True, **options)
    assert told.codes == []
    assert detail in told.predict.detail


@pytest.mark.parametrize(
    ("name", "options", "code"),
    [
        ("fresh.keras", {"resume_step": True}, "cannot-train"),
        ("dense.keras", {"optimizer": "keras.optimizers:SGD"}, "optimizer-mismatch"),
        (
            "dense.weights.h5",
            {"model": f"{NETS}:dense", "optimizer": "keras.optimizers:SGD"},
            "optimizer-mismatch",
        ),
        (
            "oldweights.h5",
            {"model": f"{NETS}:old", "optimizer": "tf_keras.optimizers:Adam"},
            "optimizer-mismatch",
        ),
        ("unknown.keras", {}, "load-failed"),
        ("unknown.keras", {"model": f"{NETS}:dense"}, "load-failed"),
        ("heads.keras", {"shapes": "1,2"}, "input-missing"),
        ("dense.keras", {"shapes": "1,7"}, "input-rejected"),
        ("lambda.keras", {}, "load-failed"),
    ],
)
def test_what_does_not_go_is_one_short_finding(predict_apart, name, options, code) -> None:
    told = predict_apart(name, **options)
    assert told.codes == [code]
    text = [*told.load.findings, *told.predict.findings][0][2]
    assert len(text) < 400
    assert "\n" not in text


def test_code_in_a_model_is_never_loaded(keras_files) -> None:
    verdict = verify(keras_files / "lambda.keras", prediction=predictions.request())
    checks = {check.name: check.detail for check in verdict.checks}
    assert checks["load"] == "it isn't known to be safe: loading it could run code (--trust loads it anyway)"
