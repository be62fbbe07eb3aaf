"""SavedModels: what they say of themselves, what is missing, what they would run, and hostile ones."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import shutil
import time
from pathlib import Path

import pytest

from ckpttool import (
    CheckpointError,
    DamagedCheckpoint,
    LimitExceeded,
    Role,
    Safety,
    Unsupported,
    open_checkpoint,
    verify,
)
from ckpttool.formats.savedmodel.ops import stateful_ops
from ckpttool.testing import read_truth
from tests.formats import savedmodel_messages as pb
from tests.support.frameworks import python_with_frameworks
from tests.support.limits import lower_limits
from tests.support.opening import checkpoint_at, paths_in
from tests.support.protobuf import varint


@pytest.fixture
def models(files: Path) -> Path:
    return files / "savedmodel"


@pytest.fixture
def copy(models: Path, tmp_path: Path) -> Path:
    """Return a copy of a module that may be damaged."""
    return Path(shutil.copytree(models / "module", tmp_path / "module"))


def codes(path: Path) -> set[str]:
    return {finding.code for finding in verify(path, jobs=1).findings}


# What it says ---------------------------------------------------------------------------------------


def test_signatures_are_the_frameworks(models: Path) -> None:
    with open_checkpoint(models / "module") as checkpoint:
        (graph,) = checkpoint.metadata["meta_graphs"]
        assert graph["signatures"] == read_truth(models / "module")["values"]["meta_graphs"][0]["signatures"]
        assert graph["signatures"]["serving_default"]["inputs"]["x"]["shape"] == [None, 4]
        assert (checkpoint.producer.framework, checkpoint.producer.version) == (
            "tensorflow",
            graph["tensorflow_version"],
        )


def test_every_file_belongs_to_it(models: Path) -> None:
    path = models / "asset"
    with open_checkpoint(path) as checkpoint:
        found = {Path(entry.path).relative_to(path).as_posix() for entry in checkpoint.files}
    assert found == {file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()}
    assert "assets/vocabulary.txt" in found


def test_variables_have_the_names_people_know(models: Path) -> None:
    with open_checkpoint(models / "keras_export") as checkpoint:
        weights = {tensor.name for tensor in checkpoint.tensors if tensor.role is Role.WEIGHTS}
        assert weights == {"net.hidden.kernel", "net.hidden.bias", "net.out.kernel", "net.out.bias"}
        assert checkpoint["net.out.bias"].key == "variables/3/.ATTRIBUTES/VARIABLE_VALUE"


def test_step_comes_from_the_variable(models: Path) -> None:
    with open_checkpoint(models / "module") as checkpoint:
        assert (checkpoint.training.step, checkpoint.parameters) == (7, 15)


def test_unknown_type_is_spelled_by_its_number(tmp_path: Path) -> None:
    names = {1: "float32", 101: "float32_ref", 99: "DT_99", 1 << 60: f"DT_{1 << 60}"}
    inputs = (pb.part(1, pb.part(1, name) + pb.part(2, pb.number(2, at))) for at, name in names.items())
    signature = pb.part(5, pb.part(1, "serve") + pb.part(2, b"".join(inputs)))
    with open_checkpoint(pb.written(tmp_path / "m", pb.model(pb.meta_graph(b"", signature)))) as checkpoint:
        told = checkpoint.metadata["meta_graphs"][0]["signatures"]["serve"]["inputs"]
    assert {name: one["dtype"] for name, one in told.items()} == {name: name for name in names.values()}


def test_constants_are_told_and_not_listed(tmp_path: Path) -> None:
    constant = pb.node("w", "Const") + pb.attribute("value", pb.part(8, bytes(8000)))
    path = pb.written(tmp_path / "frozen", pb.model(pb.meta_graph(pb.graph(constant))))
    with open_checkpoint(path) as checkpoint:
        assert not checkpoint.tensors and checkpoint.complete
        assert {finding.code for finding in checkpoint.findings} == {"constants-not-listed"}


def test_several_graphs_are_noted(tmp_path: Path) -> None:
    path = pb.written(tmp_path / "two", pb.model(pb.meta_graph(), pb.meta_graph()))
    assert codes(path) == {"meta-graphs"}
    assert verify(path).is_valid


def test_versions_side_by_side_are_units_of_their_own(models: Path, tmp_path: Path) -> None:
    for version in ("1", "2"):
        shutil.copytree(models / "plain", tmp_path / "served" / version)
    assert [path.name for path in paths_in(tmp_path / "served")] == ["1", "2"]


# What is missing ------------------------------------------------------------------------------------


def test_without_its_graph(copy: Path) -> None:
    (copy / "saved_model.pb").unlink()
    found = verify(copy, jobs=1)
    assert (found.format, found.is_valid) == ("savedmodel", False)
    assert [(one.code, one.where) for one in found.findings] == [("no-meta-graph", "saved_model.pb")]


def test_files_without_checksums_are_told(models: Path) -> None:
    (checksum,) = [check for check in verify(models / "module").checks if check.name == "checksum"]
    rest = [
        path for path in (models / "module").rglob("*") if path.is_file() and path.parent.name != "variables"
    ]
    assert (checksum.detail or "").endswith(f"; {len(rest)} files have none")
    assert checksum.status.value == "partial"


def test_without_its_variables(copy: Path) -> None:
    shutil.rmtree(copy / "variables")
    with open_checkpoint(copy) as checkpoint:
        assert not checkpoint.complete
    assert "variables-missing" in codes(copy)
    assert not verify(copy).is_valid


@pytest.mark.parametrize("name", ["variables.index", "variables.data-00000-of-00001"])
def test_with_half_of_its_variables(copy: Path, name: str) -> None:
    (copy / "variables" / name).unlink()
    with open_checkpoint(copy) as checkpoint:
        assert not checkpoint.complete
    assert not verify(copy).is_valid


def test_with_the_variables_of_another_model(copy: Path, models: Path) -> None:
    shutil.rmtree(copy / "variables")
    shutil.copytree(models / "keras_export" / "variables", copy / "variables")
    assert codes(copy) >= {"variable-missing", "variable-foreign", "fingerprint-mismatch"}


def test_with_something_else_for_variables(copy: Path, files: Path) -> None:
    shutil.copyfile(
        files / "pytorch" / "sd.pth"
        if (files / "pytorch" / "sd.pth").exists()
        else next((files / "pytorch").glob("*.pth")),
        copy / "variables" / "variables.index",
    )
    assert "variables-damaged" in codes(copy)


def test_without_an_asset(models: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(models / "asset", tmp_path / "asset"))
    (path / "assets" / "vocabulary.txt").unlink()
    with open_checkpoint(path) as checkpoint:
        assert not checkpoint.complete
    assert "asset-missing" in codes(path)


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "a\\b", "", "nul\0"])
def test_assets_that_lie_elsewhere_are_never_looked_at(tmp_path: Path, name: str) -> None:
    path = pb.written(tmp_path / "m", pb.model(pb.meta_graph(b"", pb.asset(name))))
    assert codes(path) == {"asset-path"}
    assert verify(path).safety is Safety.UNSAFE


def test_links_out_of_it_are_not_followed(copy: Path, models: Path, tmp_path: Path) -> None:
    index = copy / "variables" / "variables.index"
    index.unlink()
    index.symlink_to(models / "module" / "variables" / "variables.index")
    (copy / "fingerprint.pb").unlink()
    (copy / "fingerprint.pb").symlink_to(models / "module" / "fingerprint.pb")
    assert codes(copy) >= {"variables-damaged", "fingerprint-damaged"}
    assert verify(copy).safety is Safety.UNSAFE


def test_chunked_model_is_only_reported(tmp_path: Path) -> None:
    with pytest.raises(Unsupported):
        open_checkpoint(pb.written(tmp_path / "big", b"", "saved_model.cpb"))


# Its graph ------------------------------------------------------------------------------------------


def test_inputs_are_there(tmp_path: Path) -> None:
    cases = [
        (pb.node("b", "Relu") + pb.taking("a:activations:0", "x", "^a"), False),
        (pb.node("b", "Relu") + pb.taking("a:y:0"), True),
        (pb.node("b", "Relu") + pb.taking("lost:y:0"), True),
        (pb.node("b", "Relu") + pb.taking("^lost"), True),
        (pb.node("a2", "Mine") + pb.taking("x") + pb.part(7, b""), False),
        (pb.node("m", "Mine"), False),
    ]
    for at, (node, is_broken) in enumerate(cases):
        folder = tmp_path / str(at)
        folder.mkdir()
        signature = pb.part(1, pb.part(1, "f") + pb.part(2, pb.part(1, "x")))
        relu = pb.node("a", "Relu") + pb.taking("x")
        returned = pb.part(4, pb.part(1, "y") + pb.part(2, "a:activations:0"))
        function = pb.part(3, node) + pb.part(3, relu) + signature + returned
        path = pb.written(folder / "m", pb.model(pb.meta_graph(pb.graph(functions=(function,)))))
        assert ("graph-broken" in codes(path)) is is_broken, node


def test_signatures_name_what_is_there(tmp_path: Path) -> None:
    for at, (name, is_broken) in enumerate([("x:0", False), ("y:0", True), ("", False)]):
        folder = tmp_path / str(at)
        folder.mkdir()
        body = pb.graph(pb.node("x", "Placeholder"))
        told = pb.part(1, pb.part(1, "in") + pb.part(2, pb.part(1, name)))
        signature = pb.part(5, pb.part(1, "serve") + pb.part(2, told))
        path = pb.written(folder / "m", pb.model(pb.meta_graph(body, signature)))
        assert ("graph-broken" in codes(path)) is is_broken, name


def test_another_op_in_its_place_is_found(models: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(models / "keras_export", tmp_path / "m"))
    content = (path / "saved_model.pb").read_bytes()
    assert b"BiasAdd" in content
    (path / "saved_model.pb").write_bytes(content.replace(b"\x07BiasAdd", b"\x07Softmax"))
    assert "graph-broken" not in codes(models / "keras_export")
    assert "graph-broken" in codes(path)


# Safety ---------------------------------------------------------------------------------------------


CALLING = pb.node("y", "PartitionedCall") + pb.attribute("f", pb.part(10, pb.part(1, "f")))


def test_function_that_reads_a_file_is_unsafe(models: Path) -> None:
    found = verify(models / "unsafe")
    assert found.is_valid and found.safety is Safety.UNSAFE
    (finding,) = [finding for finding in found.findings if finding.code == "unsafe-op"]
    assert "ReadFile" in finding.message and "__inference_serve" in (finding.where or "")


@pytest.mark.parametrize(
    ("op", "code", "safety"),
    [
        ("PyFunc", "unsafe-op", Safety.UNSAFE),
        ("WriteFile", "unsafe-op", Safety.UNSAFE),
        ("TFRecordDatasetV2", "unsafe-op", Safety.UNSAFE),
        ("InitializeTableFromTextFileV2", "unsafe-op", Safety.UNSAFE),
        ("PrintV2", "unsafe-op", Safety.UNKNOWN),
        ("SaveV2", "unsafe-op", Safety.UNSAFE),
        ("MergeV2Checkpoints", "unsafe-op", Safety.UNSAFE),
        ("Abort", "unsafe-op", Safety.UNSAFE),
        ("RegisterDatasetV2", "unsafe-op", Safety.UNSAFE),
        ("CollectiveReduceV2", "unsafe-op", Safety.UNKNOWN),
        ("XlaCallModule", "unsafe-op", Safety.UNKNOWN),
        ("NobodyKnowsThis", "custom-ops", Safety.UNKNOWN),
        ("\x1b[31mEvil", "custom-ops", Safety.UNKNOWN),
    ],
)
@pytest.mark.parametrize("place", ["graph", "library", "library, its name last"])
def test_ops_are_judged_wherever_they_stand(
    tmp_path: Path, op: str, code: str, safety: Safety, place: str
) -> None:
    node = pb.node("evil", op)
    named = pb.part(1, pb.part(1, "f"))
    functions = {
        "graph": b"",
        "library": named + pb.part(3, node),
        "library, its name last": pb.part(3, node) + named,
    }
    body = pb.graph(node) if place == "graph" else pb.graph(CALLING, functions=(functions[place],))
    found = verify(pb.written(tmp_path / "m", pb.model(pb.meta_graph(body))))
    assert found.safety is safety
    assert code in {finding.code for finding in found.findings}


def test_calls_of_own_functions_are_safe(tmp_path: Path) -> None:
    body = pb.graph(
        pb.node("call", "my_function"), functions=(pb.function("my_function", pb.node("a", "Identity")),)
    )
    assert verify(pb.written(tmp_path / "m", pb.model(pb.meta_graph(body)))).safety is Safety.SAFE


TABLE_V2 = "InitializeTableFromTextFileV2"
CACHE = pb.node("c", "CacheDatasetV2") + pb.taking("data:handle:0", "name:output:0", "memory:handle:0")
SCANNED = ("graph", "function")


def written_with(tmp_path: Path, *functions: bytes, more: bytes = b"") -> Path:
    body = pb.graph(pb.node("x", "Placeholder"), functions=functions)
    return pb.written(tmp_path / "m", pb.model(pb.meta_graph(body, more)))


def judged(tmp_path: Path, place: str, *nodes: bytes) -> Safety:
    functions = (pb.function("f", *nodes),)
    body = pb.graph(*nodes) if place == "graph" else pb.graph(CALLING, functions=functions)
    return verify(pb.written(tmp_path / "m", pb.model(pb.meta_graph(body)))).safety


@pytest.mark.parametrize("place", SCANNED)
@pytest.mark.parametrize(
    ("constants", "safety"),
    [
        ([""], Safety.SAFE),
        (["/tmp/x"], Safety.UNSAFE),
        ([], Safety.UNSAFE),
        (["", "/tmp/x"], Safety.UNSAFE),
        (["/tmp/x", ""], Safety.UNSAFE),
    ],
)
def test_cache_is_harmless_in_memory_only(
    tmp_path: Path, place: str, constants: list[str], safety: Safety
) -> None:
    nodes = [pb.text_constant("name", value) for value in constants]
    assert judged(tmp_path, place, CACHE, *nodes) is safety
    assert judged(tmp_path, place, *nodes, CACHE) is safety


def test_constant_of_another_function_is_none_of_this(tmp_path: Path) -> None:
    functions = (pb.function("f", CACHE), pb.function("g", pb.text_constant("name", "")))
    body = pb.graph(pb.text_constant("name", ""), CALLING, functions=functions)
    assert verify(pb.written(tmp_path / "m", pb.model(pb.meta_graph(body)))).safety is Safety.UNSAFE


def test_ops_are_judged_by_their_attributes(tmp_path: Path) -> None:
    attributes = [
        ("PrintV2", "output_stream", "log(info)", Safety.UNKNOWN),
        ("PrintV2", "output_stream", "file:///tmp/x", Safety.UNSAFE),
        ("FixedUnigramCandidateSampler", "vocab_file", "", Safety.SAFE),
        ("FixedUnigramCandidateSampler", "vocab_file", "/etc/passwd", Safety.UNSAFE),
        ("DecodeProtoV2", "descriptor_source", "local://", Safety.SAFE),
        ("DecodeProtoV2", "descriptor_source", "bytes://\n", Safety.SAFE),
        ("EncodeProto", "descriptor_source", "local://x", Safety.UNSAFE),
        ("DecodeProtoV2", "descriptor_source", "/etc/passwd", Safety.UNSAFE),
    ]
    for place in SCANNED:
        for op, name, value, safety in attributes:
            node = pb.node("n", op)
            assert judged(tmp_path, place, node + pb.attribute(name, pb.part(2, value))) is safety
            if safety is not Safety.UNSAFE:
                assert judged(tmp_path, place, node) is safety
            twice = pb.attribute(name, pb.part(2, value)) + pb.attribute(name, pb.part(2, "/etc/passwd"))
            assert judged(tmp_path, place, node + twice) is Safety.UNSAFE
            assert (
                judged(tmp_path, place, node + pb.attribute(name, pb.part(9, "of the caller")))
                is Safety.UNSAFE
            )


# Functions that nothing calls ------------------------------------------------------------------------


def test_function_that_nothing_calls_is_a_note(tmp_path: Path) -> None:
    cases = ["PyFunc", "WriteFile", "CacheDatasetV2", "RestoreV2", "SaveV2", TABLE_V2]
    for at, op in enumerate(cases):
        folder = tmp_path / str(at)
        folder.mkdir()
        calling = pb.function("g", CALLING)
        found = verify(written_with(folder, calling, pb.function("f", pb.node("evil", op))))
        assert found.safety is Safety.SAFE, op
        (told,) = [one for one in found.findings if one.check == "safety"]
        assert (told.code, told.severity.value, told.where) == ("uncalled-op", "note", "function f: evil"), op
        assert op in told.message, op


def test_op_that_runs_while_shapes_are_inferred_needs_no_call(tmp_path: Path) -> None:
    cases = ["ReadFile", "MatchingFiles", "Abort", "DatasetFromGraph", TABLE_V2[:-2]]
    for at, op in enumerate(cases):
        folder = tmp_path / str(at)
        folder.mkdir()
        found = verify(written_with(folder, pb.function("f", pb.node("evil", op))))
        assert found.safety is Safety.UNSAFE, op


@pytest.mark.parametrize(
    "more",
    [
        pb.part(2, pb.part(1, CALLING)),
        pb.part(2, pb.part(1, pb.node("y", "f"))),
        pb.part(7, pb.part(2, pb.part(1, "f"))),
        pb.part(7, pb.part(1, pb.part(6, pb.part(1, "f")))),
        pb.part(7, pb.part(1, pb.part(8, pb.part(1, "f")))),
        pb.part(2, pb.part(2, pb.part(2, pb.part(1, "Relu") + pb.part(2, "f")))),
        pb.part(2, pb.part(2, pb.part(3, pb.part(1, "f") + pb.part(2, "Relu")))),
        pb.part(2, pb.part(2, pb.part(1, pb.function("f")))),
        pb.part(2, pb.part(2, pb.part(1, pb.function("g", CALLING))))
        + pb.part(7, pb.part(2, pb.part(1, "g"))),
    ],
    ids=["node", "op", "object", "function", "bare", "gradient", "registered", "twice", "through another"],
)
@pytest.mark.parametrize("op", ["WriteFile", "SaveV2"])
def test_function_that_anything_leads_to_is_unsafe(tmp_path: Path, more: bytes, op: str) -> None:
    path = written_with(tmp_path, pb.function("f", pb.node("evil", op)), more=more)
    assert verify(path).safety is Safety.UNSAFE


@pytest.mark.parametrize("name", ["MatMul", "f"])
def test_function_that_stands_in_for_another_is_unsafe(tmp_path: Path, name: str) -> None:
    exchanged = pb.part(5, pb.part(1, "api_implements") + pb.part(2, pb.part(2, "relu")))
    function = pb.function(name, pb.node("evil", "WriteFile")) + (exchanged if name == "f" else b"")
    assert verify(written_with(tmp_path, function)).safety is Safety.UNSAFE


STATEFUL = """
import json, sys

sys.path.insert(0, sys.argv[1])
from fixtures.make_tf_ops import registered

print(json.dumps([op.name for op in registered().op if op.is_stateful]))
"""


@pytest.mark.framework
def test_ops_of_functions_that_nothing_calls_are_stateful() -> None:
    told = python_with_frameworks("-c", STATEFUL, Path(__file__).parents[2])
    stateful = set(json.loads(told.splitlines()[-1]))
    assert stateful_ops() <= stateful
    assert {"ReadFile", "Abort"}.isdisjoint(stateful)


FILL = pb.node("fill", "InitializeTableFromTextFileV2")
ASSET = pb.part(6, pb.part(1, pb.part(1, "asset:0")) + pb.part(2, "words.txt"))


def filling(*nodes: bytes, name: str = "f", mark: bytes = b"", asset: bytes = ASSET) -> bytes:
    """Return a model whose graph has some nodes, and a function that fills a table from its argument."""
    function = pb.function(name, FILL + pb.taking("table", "file"), takes=("table", "file")) + mark
    constants = pb.node("asset", "Placeholder"), pb.text_constant("evil", "/etc/passwd")
    return pb.model(pb.meta_graph(pb.graph(*constants, *nodes, functions=(function,)), asset))


def calling(*inputs: str, op: str = "PartitionedCall", attribute: str = "f") -> bytes:
    function = pb.part(10, pb.part(1, "f"))
    return pb.node("call", op) + pb.taking(*inputs) + pb.attribute(attribute, function)


VARIABLE = (
    pb.node("handle", "VarHandleOp") + pb.attribute("shared_name", pb.part(2, "v")),
    pb.node("set", "AssignVariableOp") + pb.taking("handle", "asset"),
    pb.node("get", "ReadVariableOp") + pb.taking("handle", "^set"),
)
EXCHANGED = pb.part(5, pb.part(1, "api_implements") + pb.part(2, pb.part(2, "x")))


def test_names_of_files_are_followed_to_assets(tmp_path: Path) -> None:
    cases = [
        (filling(calling("evil", "asset")), Safety.SAFE),
        (filling(calling("asset", "evil")), Safety.UNSAFE),
        (filling(calling("asset", "asset:1")), Safety.UNSAFE),
        (filling(calling("evil", "evil", "asset", op="If", attribute="then_branch")), Safety.SAFE),
        (filling(calling("asset", "asset", "evil", op="If", attribute="then_branch")), Safety.UNSAFE),
        (filling(calling("evil", "asset", op="While", attribute="body")), Safety.UNSAFE),
        (filling(calling("evil", "asset", attribute="g")), Safety.UNSAFE),
        (filling(pb.node("call", "f") + pb.taking("evil", "asset")), Safety.SAFE),
        (filling(pb.node("call", "f") + pb.taking("asset", "evil")), Safety.UNSAFE),
        (filling(pb.node("call", "Relu") + pb.taking("asset", "evil"), name="Relu"), Safety.UNSAFE),
        (filling(mark=EXCHANGED), Safety.UNSAFE),
        (filling(calling("evil", "get"), *VARIABLE), Safety.SAFE),
        (filling(calling("evil", "get"), *VARIABLE[1:]), Safety.UNSAFE),
        (filling(calling("evil", "get", "handle"), *VARIABLE), Safety.UNSAFE),
        (
            filling(
                calling("evil", "get"),
                *VARIABLE,
                pb.node("again", "AssignVariableOp") + pb.taking("handle", "evil"),
            ),
            Safety.UNSAFE,
        ),
        (
            filling(
                calling("evil", "get"),
                *VARIABLE,
                pb.node("twin", "VarHandleOp") + pb.attribute("shared_name", pb.part(2, "v")),
            ),
            Safety.UNSAFE,
        ),
        (
            filling(
                calling("evil", "evil"),
                asset=pb.part(6, pb.part(1, pb.part(1, "evil:0") + pb.part(1, "asset:0")) + pb.part(2, "w")),
            ),
            Safety.UNSAFE,
        ),
    ]
    for at, (content, safety) in enumerate(cases):
        folder = tmp_path / str(at)
        folder.mkdir()
        assert verify(pb.written(folder / "m", content)).safety is safety, content


def test_names_that_pass_through_many_nodes_end(tmp_path: Path) -> None:
    names = ["asset", *(f"n{at}" for at in range(5000))]
    nodes = [pb.node(name, "Identity") + pb.taking(before) for before, name in itertools.pairwise(names)]
    for last, safety in (("n20", Safety.SAFE), ("n4999", Safety.UNSAFE)):
        content = filling(calling("evil", last), *nodes)
        assert verify(pb.written(tmp_path / last, content)).safety is safety


TABLES = """
import sys
import tensorflow as tf
open("words.txt", "w").write("a")
open("secret.txt", "w").write("secret")
class Model(tf.Module):
    def __init__(self):
        index = tf.lookup.TextFileIndex
        keys, values = (tf.string, index.WHOLE_LINE), (tf.int64, index.LINE_NUMBER)
        read = tf.lookup.TextFileInitializer("words.txt", *keys, *values)
        self.table = tf.lookup.StaticHashTable(read, -1)
    @tf.function(input_signature=[tf.TensorSpec([], tf.string)])
    def words(self, x):
        return self.table.lookup(x)
tf.saved_model.save(Model(), "honest")
class Reading(Model):
    @tf.function(input_signature=[])
    def read(self):
        table = tf.raw_ops.HashTableV2(key_dtype=tf.int64, value_dtype=tf.string)
        name = tf.strings.join(["secret", ".txt"])
        places = {"key_index": -1, "value_index": -2}
        tf.raw_ops.InitializeTableFromTextFileV2(table_handle=table, filename=name, **places)
        key = tf.constant(0, tf.int64)
        return tf.raw_ops.LookupTableFindV2(table_handle=table, keys=key, default_value="")
tf.saved_model.save(Reading(), "reading")
print(tf.saved_model.load("reading").read().numpy().decode())
old = tf.compat.v1
def saved(name, file):
    with old.Graph().as_default(), old.Session() as session:
        fill, asset = tf.raw_ops.InitializeTableFromTextFileV2, tf.constant("words.txt")
        old.add_to_collection(old.GraphKeys.ASSET_FILEPATHS, asset)
        table = tf.raw_ops.HashTableV2(key_dtype=tf.int64, value_dtype=tf.string)
        filled = fill(table_handle=table, filename=file or asset, key_index=-1, value_index=-2)
        builder = old.saved_model.Builder(name)
        builder.add_meta_graph_and_variables(session, ["serve"], assets_collection=[asset], main_op=filled)
        builder.save()
saved("old-honest", None)
saved("old-reading", "secret.txt")
"""


@pytest.mark.framework
def test_table_of_a_file_whose_name_is_computed(tmp_path: Path) -> None:
    assert python_with_frameworks("-c", TABLES, cwd=tmp_path).split() == ["secret"]
    for name in ("", "old-"):
        assert verify(tmp_path / f"{name}honest").safety is Safety.SAFE
        assert verify(tmp_path / f"{name}reading").safety is Safety.UNSAFE


def test_text_form_is_read_alike(tmp_path: Path) -> None:
    text = b'saved_model_schema_version: 1 meta_graphs { graph_def { node { name: "a" op: "Identity" } } }'
    with open_checkpoint(pb.written(tmp_path / "m", text, "saved_model.pbtxt")) as checkpoint:
        assert checkpoint.metadata["schema_version"] == 1
        assert checkpoint.metadata["meta_graphs"][0]["ops"] == {"Identity": 1}


def test_text_form_is_judged_alike(tmp_path: Path) -> None:
    for stream, safety in [("stderr", Safety.UNKNOWN), ("file:///tmp/x", Safety.UNSAFE)]:
        attribute = f'attr {{ key: "output_stream" value {{ s: "{stream}" }} }}'
        text = f'meta_graphs {{ graph_def {{ node {{ name: "p" op: "PrintV2" {attribute} }} }} }}'
        directory = pb.written(tmp_path / stream[:4], text.encode(), "saved_model.pbtxt")
        assert verify(directory).safety is safety


MODELS = """
import sys
import tensorflow as tf
def saved(name, run):
    class Model(tf.Module):
        @tf.function(input_signature=[tf.TensorSpec([None], tf.float32)])
        def f(self, x):
            run(x)
            return x
    tf.saved_model.save(Model(), f"{sys.argv[1]}/{name}")
def total(data):
    return data.reduce(tf.constant(0, tf.int64), lambda a, b: a + b)
numbers = tf.data.Dataset.range
saved("unsafe-cache", lambda x: total(numbers(3).cache("x")))
saved("unsafe-inner", lambda x: total(numbers(2).interleave(lambda y: numbers(3).cache("x"))))
saved("unsafe-print", lambda x: tf.print("x", output_stream="file://x"))
saved("unsafe-save", lambda x: tf.raw_ops.SaveV2(
    prefix="/x", tensor_names=["a"], shape_and_slices=[""], tensors=[x]))
saved("safe-cache", lambda x: total(numbers(3).cache()))
saved("safe-none", lambda x: x)
saved("unknown-print", lambda x: tf.print("x"))
"""


@pytest.mark.framework
def test_what_tensorflow_saves_is_judged(tmp_path: Path) -> None:
    python_with_frameworks("-c", MODELS, tmp_path)
    found = {one.name: verify(one).safety.value for one in tmp_path.iterdir()}
    assert found and all(name.startswith(f"{safety}-") for name, safety in found.items()), found


def test_unsafe_op_in_the_second_graph(tmp_path: Path) -> None:
    graphs = pb.meta_graph(), pb.meta_graph(pb.graph(pb.node("evil", "ReadFile")))
    assert verify(pb.written(tmp_path / "m", pb.model(*graphs))).safety is Safety.UNSAFE


LAYER = {"class_name": "Sequential", "config": {"layers": [{"class_name": "Lambda", "config": {}}]}}


def test_lambda_layers_are_unsafe(tmp_path: Path) -> None:
    cases = [LAYER, {"model_config": json.dumps(LAYER)}, {"class_name": "keras.layers>Lambda"}]
    for at, layer in enumerate(cases):
        folder = tmp_path / str(at)
        folder.mkdir()
        path = pb.written(folder / "m", pb.model(pb.meta_graph()))
        node = pb.number(2, 0) + pb.part(3, "root") + pb.part(5, json.dumps(layer))
        (path / "keras_metadata.pb").write_bytes(pb.part(1, node))
        found = verify(path)
        assert found.safety is Safety.UNSAFE, layer
        assert "keras-lambda" in {finding.code for finding in found.findings}, layer


def test_lambda_layers_of_older_keras_are_unsafe(tmp_path: Path) -> None:
    """Readers of Protocol Buffers merge a message that stands twice: its second part hides nothing."""
    for at, more in enumerate([b"", pb.part(4, b""), pb.part(4, pb.number(2, 1))]):
        folder = tmp_path / str(at)
        folder.mkdir()
        layer = pb.part(1, "_tf_keras_sequential") + pb.part(3, json.dumps(LAYER))
        objects = pb.part(7, pb.part(1, pb.part(4, layer) + more))
        found = verify(pb.written(folder / "m", pb.model(pb.meta_graph(b"", objects))))
        assert found.safety is Safety.UNSAFE, more
        assert "keras-lambda" in {finding.code for finding in found.findings}, more


def test_sizes_of_layers_are_held_against_the_savedmodel(tmp_path: Path) -> None:
    cases = [({"units": 8}, set()), ({"units": 1 << 40}, {"keras-work"}), ({"unroll": True}, {"keras-work"})]
    for at, (own, code) in enumerate(cases):
        folder = tmp_path / str(at)
        folder.mkdir()
        layer = {"class_name": "SimpleRNN", "config": {"name": "l", "units": 4, **own}}
        path = pb.written(folder / "m", pb.model(pb.meta_graph()))
        node = pb.number(2, 0) + pb.part(3, "root.layer-0") + pb.part(5, json.dumps(layer))
        (path / "keras_metadata.pb").write_bytes(pb.part(1, node))
        assert {finding.code for finding in verify(path).findings if finding.check == "safety"} == code, own


def test_keras_metadata_that_cant_be_read_is_not_clean(tmp_path: Path) -> None:
    for at, content in enumerate([b"\xff" * 9, pb.part(1, pb.part(5, "{no json"))]):
        folder = tmp_path / str(at)
        folder.mkdir()
        path = pb.written(folder / "m", pb.model(pb.meta_graph()))
        (path / "keras_metadata.pb").write_bytes(content)
        assert verify(path).safety is Safety.UNKNOWN, content


# Hostile --------------------------------------------------------------------------------------------


def test_what_is_no_message_is_damaged(tmp_path: Path) -> None:
    cases = [
        b"",
        b"\x08\x01",
        b"\x08\x01\x12",
        b"\x08\x01\x12\x7f",
        b"\x08\x01\x12\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
        b"\x0b" * 100,
        b"\x00\x00",
        b"\xff" * 100,
        b"hello",
    ]
    for at, content in enumerate(cases):
        folder = tmp_path / str(at)
        folder.mkdir()
        with pytest.raises(DamagedCheckpoint):
            open_checkpoint(pb.written(folder / "m", content))


def nested(depth: int) -> bytes:
    content = b""
    for _ in range(depth):
        content = pb.part(2, content)
    return content


@pytest.mark.parametrize("depth", [10, 1000])
def test_deep_nesting_ends(tmp_path: Path, depth: int) -> None:
    started = time.monotonic()
    outcome(pb.written(tmp_path / "m", pb.model(nested(depth))))
    assert time.monotonic() - started < 5


def outcome(path: Path) -> object:
    try:
        return verify(path, jobs=1)
    except CheckpointError as error:
        return error


def test_too_many_fields_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lower_limits(monkeypatch, fields_of_a_model=1000)
    with pytest.raises(LimitExceeded):
        open_checkpoint(pb.written(tmp_path / "m", pb.model(pb.meta_graph(b"\x0a\x00" * 2000))))


def test_too_many_kinds_of_ops_are_refused(tmp_path: Path) -> None:
    nodes = (pb.node("", f"op{at}") for at in range(20_100))
    with pytest.raises(LimitExceeded):
        open_checkpoint(pb.written(tmp_path / "m", pb.model(pb.meta_graph(pb.graph(*nodes)))))


def test_long_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(LimitExceeded):
        open_checkpoint(pb.written(tmp_path / "m", pb.model(pb.part(1, pb.part(4, "x" * 70_000)))))


def test_objects_that_refer_to_nothing(copy: Path, models: Path) -> None:
    child = pb.part(1, pb.number(1, 1 << 40) + pb.part(2, "kernel"))
    (copy / "saved_model.pb").write_bytes(pb.model(pb.meta_graph(b"", pb.part(7, pb.part(1, child)))))
    assert codes(copy) >= {"object-graph", "variable-foreign"}


def test_objects_in_a_circle_end(copy: Path) -> None:
    circle = pb.part(1, pb.number(1, 0) + pb.part(2, "self"))
    (copy / "saved_model.pb").write_bytes(pb.model(pb.meta_graph(b"", pb.part(7, pb.part(1, circle)))))
    assert "variable-foreign" in codes(copy)


def test_a_gigabyte_of_constants_is_stepped_over(tmp_path: Path) -> None:
    path, size = tmp_path / "big", 1 << 30
    head = varint(8 << 3 | 2) + varint(size)
    length = told = len(head) + size
    for before, number in (
        (pb.part(1, "value"), 2),
        (pb.node("w", "Const"), 5),
        (b"", 1),
        (b"", 2),
        (b"", 2),
    ):
        head = before + varint(number << 3 | 2) + varint(length) + head
        length = len(head) + size
    pb.written(path, pb.number(1, 1) + head)
    with open(path / "saved_model.pb", "r+b") as file:
        file.truncate(file.seek(0, 2) + size)
    started = time.monotonic()
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.metadata["constant_bytes"] == told
    assert time.monotonic() - started < 2


def test_the_model_itself_leads_to_its_directory(models: Path) -> None:
    with open_checkpoint(models / "module" / "saved_model.pb") as checkpoint:
        assert checkpoint.path == str(models / "module")
    unit = checkpoint_at(models / "module" / "saved_model.pb")
    assert unit is not None
    assert (unit.path, unit.members) == (str(models / "module"), ("module",))


class Payload:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("true",)


def test_a_pickle_in_place_of_its_variables_is_unsafe(copy: Path) -> None:
    (copy / "variables" / "variables.index").write_bytes(pickle.dumps(Payload()))
    found = verify(copy)
    assert found.safety is Safety.UNSAFE
    assert {"variables-damaged", "unsafe-import", "not-scanned"} <= {one.code for one in found.findings}
