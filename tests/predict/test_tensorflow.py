"""SavedModels and TensorFlow's checkpoints, loaded and run as the child does, against its own values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.frameworks import python_with_frameworks
from tests.support.predictions import job_of

NETS = f"{Path(__file__).parent / 'models' / 'keras_nets.py'}"
TAKEN = "in the checkpoint, but not used by the model"
GIVEN = "in the model, but not in the checkpoint"
ADAM = "keras.optimizers:Adam"
LEGACY = "tf_keras.optimizers.legacy:Adam"

pytestmark = pytest.mark.framework

KINDS: list[tuple[str, str, dict[str, Any]]] = [
    ("saved{}", "saved.npz", {}),
    ("module{}/ckpt-1", "module.npz", {"model": f"{NETS}:Module"}),
    ("module{}/ckpt-1", "module.npz", {"model": f"{NETS}:as_saved"}),
    ("variables{}/ckpt-1", "dense.npz", {"model": f"{NETS}:dense"}),
    ("oldvariables{}/ckpt", "old.npz", {"model": f"{NETS}:old"}),
]


@pytest.mark.parametrize(("name", "recording", "options"), KINDS)
def test_each_kind_predicts_as_recorded_and_no_worse_weights_do(
    predict_apart, name, recording, options
) -> None:
    told = predict_apart(name.format(""), expect=recording, **options)
    assert told.codes == []
    assert "as recorded" in told.predict.detail
    assert predict_apart(name.format("-off"), expect=recording, **options).predict.codes == [
        "outputs-changed"
    ]
    assert "output-not-finite" in predict_apart(name.format("-nan"), **options).predict.codes


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("version1", {"expect": "version1.npz"}),
        ("references", {"expect": "references.npz"}),
        ("names/model", {"model": f"{NETS}:Module", "expect": "module.npz"}),
        ("words", {"signature": "look_up", "expect": "words.npz"}),
        ("one", {"expect": "words.npz"}),
        ("root", {"model": f"{NETS}:dense", "expect": "dense.npz"}),
        ("exported", {}),
    ],
)
def test_other_ways_to_save(predict_apart, name, options) -> None:
    assert predict_apart(name, **options).codes == []


def test_inputs_are_made_up_as_the_signature_says(predict_apart) -> None:
    told = predict_apart("words", signature="add", batch_size=3)
    assert told.load.detail.endswith("signature add, 2 inputs, 1 output")
    assert told.predict.detail == "sum 3×2 from generated input (x 3, y 3×2), seed 0"


def test_reference_variables_are_what_they_were_saved_as(predict_apart) -> None:
    told = predict_apart("references-off", expect="references.npz")
    assert {(code, where) for code, _, _, where in told.predict.findings} == {
        ("outputs-changed", "w"),
        ("outputs-changed", "y"),
    }
    assert predict_apart("references", signature="other").codes == ["no-such-signature"]
    assert predict_apart("references", resume_step=True).codes == ["cannot-train"]


def test_a_graph_that_counts_is_run_from_its_start(predict_apart, tmp_path) -> None:
    assert predict_apart("counts", expect="counts.npz").codes == ["keeps-state"]
    assert predict_apart("counts", record=tmp_path / "g.npz").codes == ["keeps-state"]
    assert predict_apart("counts", expect=tmp_path / "g.npz").codes == ["keeps-state"]


@pytest.mark.parametrize(
    ("name", "options", "state", "step"),
    [
        (
            "variables/ckpt-1",
            {"model": f"{NETS}:dense", "optimizer": ADAM},
            "; Adam with its state",
            "of Adam changed 4",
        ),
        ("root", {"model": f"{NETS}:dense", "optimizer": ADAM}, "; Adam with its state", "of Adam changed 4"),
        (
            "oldvariables/ckpt",
            {"model": f"{NETS}:old", "optimizer": LEGACY},
            "; Adam with its state",
            "of Adam changed 4",
        ),
        ("module/ckpt-1", {"model": f"{NETS}:Module"}, "1 variable", "of SGD changed 1"),
    ],
)
def test_the_optimizer_is_restored_and_makes_a_step(predict_apart, name, options, state, step) -> None:
    told = predict_apart(name, resume_step=True, **options)
    assert told.codes == []
    assert told.load.detail.endswith(state)
    assert step in told.predict.detail


@pytest.mark.parametrize(
    ("name", "factory", "findings"),
    [
        ("module/ckpt-1", "Biased", [("missing-key", GIVEN, "b")]),
        ("module/ckpt-1", "Renamed", [("missing-key", GIVEN, "v"), ("not-consumed", TAKEN, "net.w")]),
        ("names/model", "Renamed", [("missing-key", GIVEN, "v"), ("not-consumed", TAKEN, "w")]),
        (
            "variables/ckpt-1",
            "shallow",
            [
                ("not-consumed", TAKEN, "net._functional._operations.2._kernel"),
                ("not-consumed", TAKEN, "net._functional._operations.2.bias"),
            ],
        ),
    ],
)
def test_other_models_are_told_by_name(predict_apart, name, factory, findings) -> None:
    told = predict_apart(name, model=f"{NETS}:{factory}")
    assert [(code, text, where) for code, _, text, where in told.load.findings] == findings


@pytest.mark.parametrize(("name", "where"), [("module/ckpt-1", "net.w"), ("names/model", "w")])
def test_other_shapes_are_told_by_name(predict_apart, name, where) -> None:
    told = predict_apart(name, model=f"{NETS}:Module", model_args={"width": 5})
    text = "3×2 in the checkpoint, 3×5 in the model"
    assert told.load.findings == [["shape-mismatch", "error", text, where]]


@pytest.mark.parametrize(
    ("name", "options", "code"),
    [
        ("words", {}, "no-such-signature"),
        ("saved", {"signature": "other"}, "no-such-signature"),
        ("saved", {"resume_step": True}, "cannot-train"),
        ("saved", {"shapes": "1,7"}, "input-rejected"),
        ("variables/ckpt-1", {"model": f"{NETS}:dense", "resume_step": True}, "cannot-train"),
        ("variables/ckpt-1", {"model": f"{NETS}:unbuilt"}, "model-not-built"),
        ("module/ckpt-1", {"model": f"{NETS}:Module", "optimizer": ADAM}, "optimizer-mismatch"),
        ("module/ckpt-1", {"model": f"{NETS}:fails"}, "no-such-model"),
        ("module/ckpt-1", {"model": f"{NETS}:Nobody"}, "no-such-model"),
        ("module/ckpt-1", {"model": "builtins:dict"}, "no-such-model"),
    ],
)
def test_what_does_not_go_is_one_short_finding(predict_apart, name, options, code) -> None:
    told = predict_apart(name, **options)
    assert told.codes == [code]
    text = [*told.load.findings, *told.predict.findings][0][2]
    assert len(text) < 400
    assert "\n" not in text


def test_another_optimizer_does_not_take_the_state(predict_apart) -> None:
    told = predict_apart("variables/ckpt-1", model=f"{NETS}:dense", optimizer="keras.optimizers:SGD")
    assert {code for code, *_ in told.load.findings} == {"not-consumed"}
    assert len(told.load.findings) == 8


OLD_TABLE = """
import sys
import tensorflow as tf

v1 = tf.compat.v1
v1.disable_eager_execution()
out, words = sys.argv[1:]
name = tf.constant(words)
v1.add_to_collection(v1.GraphKeys.ASSET_FILEPATHS, name)
table = tf.raw_ops.HashTableV2(key_dtype=tf.int64, value_dtype=tf.string, shared_name="t")
fill = tf.raw_ops.InitializeTableFromTextFileV2(
    table_handle=table, filename=name, key_index=-1, value_index=-2, vocab_size=-1, delimiter=",", offset=0
)
v1.add_to_collection(v1.GraphKeys.TABLE_INITIALIZERS, fill)
x = v1.placeholder(tf.int64, [None], "x")
found = tf.raw_ops.LookupTableFindV2(table_handle=table, keys=x, default_value=tf.constant("?"))
weight = v1.get_variable("w", initializer=tf.constant([1.0]), use_resource=False)
y = tf.cast(tf.strings.length(found), tf.float32) + weight
with v1.Session() as session:
    session.run(v1.global_variables_initializer())
    builder = v1.saved_model.Builder(out)
    signature = v1.saved_model.predict_signature_def({"x": x}, {"y": y})
    assets = v1.get_collection(v1.GraphKeys.ASSET_FILEPATHS)
    builder.add_meta_graph_and_variables(session, ["serve"], {"serving_default": signature}, assets)
    builder.save()
"""


def test_a_table_is_filled_from_the_models_own_asset(start, tmp_path: Path) -> None:
    """And not from the file that was copied there, whose path the graph holds."""
    words, model = tmp_path / "words.txt", tmp_path / "model"
    words.write_text("seven..\n")
    python_with_frameworks("-c", OLD_TABLE, model, words)
    words.write_text("changed since\n")
    np.savez(tmp_path / "expected.npz", **{"input/x": np.zeros(1, "int64"), "output/y": np.float32([8])})
    told = start("tensorflow").do(job_of(model, expect=tmp_path / "expected.npz"))
    assert told.codes == []
