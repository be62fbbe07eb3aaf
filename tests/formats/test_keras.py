"""Keras: code in configs, damaged members, shards, and series of its callbacks."""

from __future__ import annotations

import json
import marshal
import math
import random
import shutil
import tracemalloc
from base64 import b64encode
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZIP_STORED, ZipFile

import h5py
import pytest

from ckpttool import Role, Safety, Status, open_checkpoint, verify
from ckpttool.core.report import Severity
from ckpttool.formats.keras.config import judge
from tests.support.checkpoints import codes
from tests.support.commands import Run
from tests.support.opening import checkpoints_in
from tests.support.thorough import sampled

Config = dict[str, object]


def rezipped(source: Path, target: Path, method: int = ZIP_STORED, **replaced: bytes) -> Path:
    """Copy a zip with other members, which are named without their suffix."""
    with ZipFile(source) as old, ZipFile(target, "w", method) as new:
        for info in old.infolist():
            content = replaced.pop(info.filename.split(".")[0], None)
            new.writestr(info.filename, old.read(info) if content is None else content)
        for name, content in replaced.items():
            new.writestr(name, content)
    return target


# Safety ---------------------------------------------------------------------------------------------


def test_lambdas_are_found_at_depth(files: Path) -> None:
    for name in ["lambda.keras", "lambda.h5", "lambda_keras2.h5"]:
        verification = verify(files / "keras-unsafe" / name)
        assert verification.is_valid, name
        assert verification.safety is Safety.UNSAFE, name
        assert "keras-lambda" in codes(verification), name


def layer(name: str, module: object = "keras.layers", **more: object) -> Config:
    return {"module": module, "class_name": name, "config": {}, "registered_name": None} | more


LAMBDA = {"class_name": "__lambda__", "config": {"code": "4wEA", "defaults": None, "closure": None}}

CODE = b64encode(marshal.dumps(compile("1", "m", "eval"))).decode()


def wrapped(kind: str, **function: object) -> Config:
    """Return a recurrent layer whose cell is wrapped with a function, as Keras 2 stores it."""
    return layer("RNN", config={"cell": layer(kind, config={"cell": layer("SimpleRNNCell"), **function})})


CONFIGS: list[tuple[Config, str | None]] = [
    (layer("Dense"), None),
    (layer("Functional", "keras.src.models.functional"), None),
    ({"class_name": "Dense", "config": {"units": 3}}, None),
    (layer("Add", "keras.src.ops.numpy"), None),
    (layer("DTypePolicy", "keras"), None),
    (layer("function", "builtins", config="mine"), "unknown-class"),
    (layer("Lambda"), "keras-lambda"),
    (layer("Dense", config={"activation": LAMBDA}), "keras-lambda"),
    (layer("TimeDistributed", config={"layer": layer("Lambda")}), "keras-lambda"),
    (layer("Dense", build_config={"deep": [[{"x": layer("Lambda")}]]}), "keras-lambda"),
    (layer("Mine", "mine.layers", registered_name="mine>Mine"), "unknown-class"),
    (layer("Mine", None, registered_name="Mine"), "unknown-class"),
    ({"class_name": "Mine", "config": {}}, "unknown-class"),
    (layer("Dense", "keras.layers", registered_name="mine>Dense"), "unknown-class"),
    (layer("system", "os"), "keras-gadget"),
    (layer("eval", "builtins"), "keras-gadget"),
    (layer("Popen", "subprocess"), "keras-gadget"),
    (layer("get_file", "keras.utils"), "keras-gadget"),
    (layer("load_model", "keras.saving"), "keras-gadget"),
    (layer("enable_unsafe_deserialization", "keras.config"), "keras-gadget"),
    (layer("get_file", "keras.src.utils.file_utils"), "keras-gadget"),
    (layer("TorchModuleWrapper"), "keras-unsafe-layer"),
    (layer("TFSMLayer"), "keras-unsafe-layer"),
    (layer("StringLookup", config={"vocabulary": "/etc/passwd"}), "keras-reads-file"),
    (layer("StringLookup", config={"vocabulary": ["a", "b"]}), None),
    ({"class_name": ["Lambda"]}, "keras-class"),
    ({"class_name": "TFOpLambda", "config": {"function": "math.multiply"}}, None),
    ({"class_name": "TFOpLambda", "config": {"function": "io.write_file"}}, "keras-gadget"),
    ({"class_name": "Relu", "config": {}}, None),
    (layer("Map", "keras.src.ops.core"), "unknown-class"),
    ({"class_name": "Dense", "config": {"dtype": layer("Policy", "keras.mixed_precision")}}, None),
    (layer("function", "builtins", config="mean_squared_error"), None),
    (layer("function", "keras.losses", config="deserialize"), "keras-gadget"),
    (layer("function", "keras.ops", config="relu"), None),
    (layer("function", "keras.ops", config="map"), "keras-gadget"),
    (layer("function", "keras.models", config="clone_model"), "keras-gadget"),
    (layer("function", "builtins", config="relu", registered_name="exec"), "keras-gadget"),
    (layer("function", "builtins", config=["eval"]), "keras-class"),
    (layer("function", None, config="deserialize"), "keras-gadget"),
    (layer("function", "mine", config="loss"), "unknown-class"),
    (layer("function", "mine", config="Outer.loss"), "keras-gadget"),
    (layer("function", "mine", config="__loader__"), "keras-gadget"),
    (layer("Dense", registered_name="Dense"), None),
    (layer("Dense", registered_name="get"), "keras-gadget"),
    (layer("Dense", registered_name=["get"]), "keras-class"),
    (layer("Dense", module={"class_name": "__bytes__", "value": "os"}), "keras-class"),
    (layer("Dense.from_config"), "keras-gadget"),
    (layer("Custom>Adam", None), None),
    (layer("FeatureSpace", "keras.utils"), None),
    (layer("LayerScale", "keras.src.applications.convnext"), None),
    (layer("CustomScaleLayer", "keras.src.applications.inception_resnet_v2"), None),
    (layer("TFDConcat", "keras.src.layers.preprocessing.feature_space"), None),
    (layer("Dense", "keras.src.applications.convnext"), "keras-gadget"),
    (layer("AdamW", "keras.src.backend.torch.optimizers.torch_adamw"), None),
    (layer("Dense", "keras.src.backend.torch.optimizers.torch_adamw"), "keras-gadget"),
    (layer("torch", "keras.src.backend.torch.optimizers.torch_adamw"), "keras-gadget"),
    (layer("Sequence", "keras.utils"), "keras-gadget"),
    (layer("__tuple__", "builtins", items=[1]), None),
    (layer("__slice__", "mine"), "keras-gadget"),
    ({"class_name": "deserialize", "config": {}}, "keras-gadget"),
    ({"class_name": "add", "config": {}}, None),
    ({"class_name": "TFOpLambda", "config": {"function": "nn.gelu"}}, None),
    ({"class_name": "TFOpLambda", "config": {"function": "nn.raw_rnn"}}, "keras-gadget"),
    ({"class_name": "TFOpLambda", "config": {"function": "math.mine"}}, "keras-gadget"),
    (
        {"class_name": "ClassMethod", "config": {"cls_symbol": "RaggedTensor", "method_name": "from_tensor"}},
        None,
    ),
    (
        {"class_name": "ClassMethod", "config": {"cls_symbol": "Module", "method_name": "from_tensor"}},
        "keras-gadget",
    ),
    ({"class_name": "InstanceProperty", "config": {"attr_name": "flat_values"}}, None),
    ({"class_name": "InstanceMethod", "config": {"attr_name": "__class__"}}, "keras-gadget"),
    ({"class_name": "TensorFlowOpLayer", "config": {"node_def": {"op": "AddV2"}}}, None),
    ({"class_name": "TensorFlowOpLayer", "config": {"node_def": {"op": "WriteFile"}}}, "keras-gadget"),
    ({"class_name": "TensorFlowOpLayer", "config": {"node_def": {"op": "Mine"}}}, "unknown-class"),
    ({"class_name": "TensorFlowOpLayer", "config": {"node_def": "x"}}, "keras-gadget"),
    ({"class_name": "TypeSpec", "type_spec": "tf.TensorSpec", "serialized": []}, None),
    ({"class_name": "TypeSpec", "type_spec": "mine.Spec", "serialized": []}, "unknown-class"),
    (
        layer("__typespec__", "tensorflow.python.framework.tensor", spec_name="TensorSpec", config=[]),
        None,
    ),
    (
        layer("__typespec__", "tensorflow.python.framework.tensor", spec_name="Tensor", config=[]),
        "keras-gadget",
    ),
    (layer("__typespec__", "keras.utils", spec_name="get_file", config=[]), "keras-gadget"),
    (layer("__typespec__", "mine", spec_name="Spec", config=[]), "unknown-class"),
    (layer("DenseFeatures", config={"feature_columns": []}), None),
    (layer("Dense", config={"vocabulary_file": "/etc/passwd"}), "keras-reads-file"),
    (layer("Dense", config={"activation": "swish", "kernel_initializer": "he_normal"}), None),
    (layer("Dense", config={"activation": "mine"}), "unknown-class"),
    (layer("Dense", config={"kernel_regularizer": "deserialize"}), "keras-gadget"),
    (
        layer("Dense", compile_config={"optimizer": "rmsprop", "loss": {"a": "mse"}, "metrics": [["acc"]]}),
        None,
    ),
    (layer("Dense", compile_config={"metrics": {"a": ["get"]}}), "keras-gadget"),
    (layer("Dense", config={"note": json.dumps(layer("Lambda"))}), "keras-lambda"),
    (layer("Dense", config={"note": json.dumps({"a": json.dumps([layer("Lambda")])})}), "keras-lambda"),
    (layer("Dense", config={"note": ' {"\\u0063lass_name": "Lambda"}'}), "keras-lambda"),
    (layer("Dense", config={"note": "[UNK] {"}), None),
    (layer("Dense", config={"note": '{"a": 1, "a": 2}'}), "duplicate-key"),
    (layer("Dense", config={"note": "[" * 200 + "]" * 200}), "not-scanned"),
    *(
        (wrapped(kind, **{name: [code, None, None], f"{name}_type": "lambda"}), "keras-lambda")
        for kind, name in (("ResidualWrapper", "residual_fn"), ("DropoutWrapper", "dropout_fn"))
        for code in (CODE, f"!{CODE}", "\xe3")
    ),
    (wrapped("ResidualWrapper", residual_fn="mine", residual_fn_type="function"), "unknown-class"),
    (layer("Dense", config={"note": CODE, "note_type": "text"}), None),
]


@pytest.mark.parametrize(("config", "code"), CONFIGS, ids=lambda value: json.dumps(value)[:60])
def test_what_a_config_could_run(files: Path, tmp_path: Path, config: Config, code: str | None) -> None:
    model = layer("Sequential", "keras", config={"layers": [layer("InputLayer"), config]})
    text = json.dumps(model).encode()
    path = rezipped(files / "keras" / "bfloat16.keras", tmp_path / "m.keras", config=text)
    with open_checkpoint(path) as checkpoint:
        assert {finding.code for finding in checkpoint.safety} == (set() if code is None else {code})
        assert all("config.json.config.layers[1]" in (one.where or "") for one in checkpoint.safety)
        runs_code = {"keras-lambda", "keras-gadget", "keras-unsafe-layer"}
        assert {one.severity for one in checkpoint.safety if one.code in runs_code} <= {Severity.ERROR}


def test_a_deep_config_with_many_elements_keeps_no_text_for_each() -> None:
    deep: object = ["a"] * 200_000
    for _ in range(100):
        deep = {"k" * 40: deep}
    tracemalloc.start()
    assert judge({"class_name": "Dense", "config": deep}, "config", 1000) == ()
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_initializers_of_tensorflow_are_those_of_keras_2() -> None:
    initializer = {"class_name": "Constant", "config": {"value": 1.0}, "registered_name": None}
    initializer["module"] = "tensorflow.python.ops.init_ops_v2"
    assert judge({"class_name": "Dense", "config": {"kernel_initializer": initializer}}, "config", 1000) == ()
    initializer["class_name"] = "_compute_fans"
    (finding,) = judge({"class_name": "Dense", "config": {"kernel_initializer": initializer}}, "config", 1000)
    assert finding.code in ("keras-gadget", "unknown-class")


def test_sizes_are_held_against_the_file() -> None:
    config = {"class_name": "Dense", "config": {"units": 2 << 20}}
    assert [finding.code for finding in judge(config, "config", 1 << 20)] == ["keras-work"]
    assert judge(config, "config", 2 << 20) == ()
    (finding,) = judge({"class_name": "Dense", "config": {"units": math.inf}}, "config", 1)
    assert finding.where == "config.config"


def test_slow_patterns() -> None:
    for pattern, is_slow in [("dense", False), (".*dense.*", False), ("(a+)+$", True)]:
        for config in ({"exclude_layers": [pattern]}, {"policy_map": {pattern: "float32"}}):
            assert bool(judge({"class_name": "Muon", "config": config}, "config", 1000)) == is_slow, pattern


def test_a_config_that_is_no_config(files: Path, tmp_path: Path) -> None:
    for text in (b"[]", b"{", b'{"a": 1, "a": 2}', b"[" * 100_000):
        verification = verify(rezipped(files / "keras" / "adam.keras", tmp_path / "m.keras", config=text))
        assert not verification.is_valid
        assert verification.safety is Safety.UNKNOWN


def test_a_pickle_among_the_members(files: Path, tmp_path: Path) -> None:
    payload = b"\x80\x02cos\nsystem\n(X\x04\x00\x00\x00truetR."
    path = rezipped(files / "keras" / "adam.keras", tmp_path / "m.keras", **{"assets/x": payload})
    assert verify(path).safety is Safety.UNSAFE


def test_an_asset_that_is_none_of_kerass_is_not_clean(files: Path, tmp_path: Path) -> None:
    for name, safety in (("assets/x", Safety.UNKNOWN), ("assets/layers/a/vocabulary.txt", Safety.SAFE)):
        path = rezipped(files / "keras" / "adam.keras", tmp_path / "m.keras", **{name: b"word"})
        assert verify(path).safety is safety, name


@pytest.mark.parametrize(
    ("config", "safety"),
    [
        (b'{"class_name": "Lambda", "config": {}}', Safety.UNSAFE),
        (b"{", Safety.UNKNOWN),
        (b"{}", Safety.SAFE),
    ],
)
def test_the_configuration_beside_weights(files: Path, tmp_path: Path, config: bytes, safety: Safety) -> None:
    for name, expected in (("model.weights.h5", safety), ("other.weights.h5", Safety.SAFE)):
        shutil.copyfile(files / "keras" / "bfloat16.weights.h5", tmp_path / name)
        (tmp_path / "config.json").write_bytes(config)
        assert verify(tmp_path / name).safety is expected


def test_members_that_lead_out(files: Path, tmp_path: Path) -> None:
    for name in ("../x", "/x", "assets/../../x", "C:/x"):
        path = rezipped(files / "keras" / "adam.keras", tmp_path / "m.keras", **{name: b"x"})
        assert "member-path" in codes(verify(path)), name


# Damage ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", sampled(range(5), 1))
def test_flips_in_members_are_found_by_name(files: Path, tmp_path: Path, seed: int) -> None:
    copy = tmp_path / "copy.keras"
    data = bytearray((files / "keras" / "bfloat16.keras").read_bytes())
    copy.write_bytes(data)
    with open_checkpoint(copy) as checkpoint:
        spans = [(span.extent, span.where) for span in checkpoint.spans()]
    chance = random.Random(seed)
    with open(copy, "r+b", buffering=0) as file:
        for _ in range(200):
            extent, name = chance.choice(spans)
            at = chance.randrange(extent.offset, extent.end)
            file.seek(at)
            file.write(bytes([data[at] ^ 1 << chance.randrange(8)]))
            verification = verify(copy, jobs=1)
            file.seek(at)
            file.write(bytes([data[at]]))
            assert not verification.is_valid, at
            where = {one.where for one in verification.findings if one.code == "checksum-mismatch"}
            assert where == {name}, at


def test_a_deflated_archive_holds_the_same(files: Path, tmp_path: Path) -> None:
    stored = files / "keras" / "adam.keras"
    packed = rezipped(stored, tmp_path / "packed.keras", ZIP_DEFLATED)
    assert verify(packed).is_valid
    with open_checkpoint(stored) as one, open_checkpoint(packed) as other:
        assert {name: tensor.tobytes() for name, tensor in one.items()} == {
            name: tensor.tobytes() for name, tensor in other.items()
        }
        assert all(tensor.extent is None for tensor in other.tensors)
        assert all(tensor.extent is not None for tensor in one.tensors)
        assert one.training == other.training


def test_weights_that_are_no_hdf5(files: Path, tmp_path: Path) -> None:
    path = rezipped(files / "keras" / "adam.keras", tmp_path / "m.keras", model=b"no HDF5" * 100)
    verification = verify(path)
    assert not verification.is_valid
    assert verification.safety is Safety.SAFE
    assert {one.where for one in verification.findings} == {"model.weights.h5"}


# What it tells --------------------------------------------------------------------------------------


def test_roles_and_producer(files: Path) -> None:
    for name in ("adam.keras", "adam.h5", "keras2.h5"):
        with open_checkpoint(files / "keras" / name) as checkpoint:
            roles = {tensor.role for tensor in checkpoint.tensors}
            assert {Role.WEIGHTS, Role.OPTIMIZER} <= roles
            assert checkpoint.producer.framework == "keras"
            assert checkpoint.producer.version
            assert checkpoint.metadata["model_config"]


def test_the_raw_name_is_the_key(files: Path) -> None:
    with open_checkpoint(files / "keras" / "keras2.h5") as checkpoint:
        assert checkpoint["head.kernel"].key == "/model_weights/head/head/kernel:0"


def test_layers_have_the_names_that_their_groups_say(tmp_path: Path) -> None:
    groups = {
        "layers/dense": "shared",
        "layers/dense_1": "dense_7",
        "layers/sequential": "encoder",
        "layers/sequential/layers/dense": "inner",
        "layers/lstm": "lstm_3",
        "layers/lstm/cell": "lstm_cell",
        "layers/conv2d": "twice",
        "layers/conv2d_1": "twice",
        "layers/embedding": "x" * 300,
        "layers/bidirectional": "both",
        "layers/bidirectional/forward_layer": "forward_lstm",
        "layers/bidirectional/forward_layer/cell": "lstm_cell",
        "optimizer": "adam",
    }
    path = tmp_path / "m.weights.h5"
    with h5py.File(path, "w") as file:
        for group, name in groups.items():
            file.create_group(f"{group}/vars").attrs["name"] = name
            if group.rpartition("/")[2] != "sequential":
                file[f"{group}/vars/0"] = [1.0]
    with open_checkpoint(path) as checkpoint:
        keys = {tensor.name: tensor.key for tensor in checkpoint.tensors}
    assert keys == {
        "shared.0": "/layers/dense/vars/0",
        "dense_7.0": "/layers/dense_1/vars/0",
        "encoder.inner.0": "/layers/sequential/layers/dense/vars/0",
        "lstm_3.0": "/layers/lstm/vars/0",
        "lstm_3.cell.0": "/layers/lstm/cell/vars/0",
        "layers.conv2d.vars.0": None,
        "layers.conv2d_1.vars.0": None,
        "embedding.0": "/layers/embedding/vars/0",
        "both.0": "/layers/bidirectional/vars/0",
        "both.forward_lstm.0": "/layers/bidirectional/forward_layer/vars/0",
        "both.forward_lstm.cell.0": "/layers/bidirectional/forward_layer/cell/vars/0",
        "optimizer.vars.0": None,
    }


def test_checksum_is_skipped_with_words(files: Path) -> None:
    checks = {check.name: check for check in verify(files / "keras" / "adam.weights.h5").checks}
    assert checks["checksum"].status is Status.SKIPPED
    assert "no checksums" in checks["checksum"].detail


# Shards ---------------------------------------------------------------------------------------------


@pytest.fixture
def shards(files: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(files / "keras" / "sharded", tmp_path / "sharded"))


def test_a_set_is_one_checkpoint(shards: Path) -> None:
    for path in (shards, shards / "model.weights.json"):
        assert verify(path).is_valid
    (shards / "other.h5").write_bytes((shards / "model_00000.weights.h5").read_bytes())
    units = {Path(unit.path).name: unit.members for unit in checkpoints_in(shards)}
    assert units == {
        "model.weights.json": ("model.weights.json", "model_00000.weights.h5", "model_00001.weights.h5"),
        "other.h5": ("other.h5",),
    }


def test_a_missing_shard(shards: Path) -> None:
    (shards / "model_00001.weights.h5").unlink()
    verification = verify(shards / "model.weights.json")
    assert "shard-missing" in codes(verification)
    assert not verification.is_valid


def test_an_extra_shard(shards: Path) -> None:
    shutil.copyfile(shards / "model_00000.weights.h5", shards / "model_00002.weights.h5")
    assert "shard-extra" in codes(verify(shards / "model.weights.json"))


def test_swapped_shards(shards: Path) -> None:
    one, other = shards / "model_00000.weights.h5", shards / "model_00001.weights.h5"
    kept = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(kept)
    assert "shard-stale" in codes(verify(shards / "model.weights.json"))


def test_a_damaged_shard_hides_no_other(shards: Path) -> None:
    shard = shards / "model_00001.weights.h5"
    shard.write_bytes(shard.read_bytes()[:-1])
    assert "shard-damaged" in codes(verify(shards / "model.weights.json"))
    with open_checkpoint(shards / "model.weights.json") as checkpoint:
        assert checkpoint.tensors
        assert not checkpoint.complete


def test_an_index_that_leads_out(shards: Path) -> None:
    index = shards / "model.weights.json"
    told = json.loads(index.read_text())
    for name in ("../secret.weights.h5", "/etc/passwd", 7):
        told["weight_map"] = {"/layers/x/vars": [name]}
        index.write_text(json.dumps(told))
        assert "shard-path" in codes(verify(index))


# Series ---------------------------------------------------------------------------------------------


def test_a_series_of_the_callback(files: Path, tmp_path: Path, run: Run) -> None:
    losses = {1: 0.9, 2: 0.5, 3: 0.7, 10: 0.6}
    for epoch, loss in losses.items():
        shutil.copyfile(files / "keras" / "bfloat16.keras", tmp_path / f"model.{epoch:02d}-{loss:.2f}.keras")
    answer = run("list", "--json", tmp_path)
    listed = json.loads(answer.out)["checkpoints"]
    assert [Path(one["path"]).name for one in listed] == sorted(path.name for path in tmp_path.iterdir())
    assert len({one["group"] for one in listed}) == 1
    assert {one["format"] for one in listed} == {"keras"}
    assert [(one["epoch"], one["metrics"]) for one in listed] == [
        (epoch, {"value": loss}) for epoch, loss in losses.items()
    ]
    assert run("latest", tmp_path).out == f"{tmp_path / 'model.10-0.60.keras'}\n"
    assert run("latest", "--best", "value", "--mode", "min", tmp_path).out.endswith("model.02-0.50.keras\n")
    assert run("prune", "--keep", "2", tmp_path).status == 0
    assert sorted(path.name for path in tmp_path.glob("*.keras")) == [
        "model.03-0.70.keras",
        "model.10-0.60.keras",
    ]


@pytest.mark.parametrize(
    "template",
    [
        "model.{epoch:02d}-{loss:.2f}.keras",
        "weights.{epoch:d}-{loss:.3f}.h5",
        "weights-improvement-{epoch}_{loss:.1e}.hdf5",
        "{epoch:d}.ckpt",
        "model-epoch{epoch}-val_accuracy{loss:.2f}.keras",
        "cp-{epoch}.weights.h5",
    ],
)
def test_names_of_the_callback_order_by_epoch(files: Path, tmp_path: Path, run: Run, template: str) -> None:
    """As Keras formats its `filepath`; the files' times go the other way round, as after a copy."""
    source = files / "keras" / ("bfloat16.keras" if "keras" in template else "bfloat16.weights.h5")
    for epoch, loss in ((11, 0.1), (10, 0.2), (9, 0.3), (2, 0.4)):
        shutil.copyfile(source, tmp_path / template.format(epoch=epoch, loss=loss))
    listed = json.loads(run("list", "--json", tmp_path).out)["checkpoints"]
    assert [one["epoch"] for one in listed] == [2, 9, 10, 11]
    assert run("latest", tmp_path).out == f"{tmp_path / template.format(epoch=11, loss=0.1)}\n"
    assert run("prune", "--keep", "2", tmp_path).status == 0
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {template.format(epoch=epoch, loss=loss) for epoch, loss in ((11, 0.1), (10, 0.2))}


def test_a_series_of_weights(files: Path, tmp_path: Path, run: Run) -> None:
    for epoch in (1, 2, 3):
        shutil.copyfile(files / "keras" / "bfloat16.weights.h5", tmp_path / f"cp-{epoch:04d}.weights.h5")
    assert run("prune", "--keep", "1", tmp_path).status == 0
    assert [path.name for path in tmp_path.glob("*.h5")] == ["cp-0003.weights.h5"]


def test_assets_are_told_with_their_checksums(files: Path, tmp_path: Path) -> None:
    path = shutil.copy(files / "keras" / "adam.keras", tmp_path / "m.keras")
    with open_checkpoint(path) as checkpoint:
        assert "other records" not in checkpoint.metadata
    with ZipFile(path, "a") as archive:
        archive.writestr("assets/vocab.txt", b"abc")
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.metadata["other records"] == {"assets/vocab.txt": "<3 bytes, CRC-32 352441c2>"}
