"""Savers of SavedModels: their ops are harmless where nothing else leads to them, whatever their names."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpttool import Safety, verify
from tests.formats import savedmodel_messages as pb
from tests.support.frameworks import python_with_frameworks

SAVE = "__inference__traced_save_12"
SAVER = pb.part(3, pb.part(1, "saver_filename:0") + pb.part(2, "call:0") + pb.part(3, "call_1"))


def referring(function: str) -> bytes:
    """Return a value of an attribute that names a function."""
    return bytes(pb.part(10, pb.part(1, function)))


def call(name: str, function: str, *inputs: str) -> bytes:
    node = pb.node(name, "StatefulPartitionedCall") + pb.taking(*inputs)
    return bytes(node + pb.attribute("f", referring(function)))


def signature(*tensors: bytes, name: str = "serve") -> bytes:
    """Return a signature that returns tensors, each given as the fields of a TensorInfo."""
    outputs = b"".join(pb.part(2, pb.part(1, "y") + pb.part(2, tensor)) for tensor in tensors)
    return bytes(pb.part(5, pb.part(1, name) + pb.part(2, outputs)))


SAVING = (
    call("call", SAVE, "saver_filename"),
    pb.node("saver_filename", "Placeholder"),
    call("call_1", "__inference__traced_restore_13", "saver_filename"),
)


def touching(op: str) -> bytes:
    """Return a node that opens the file that the first argument of its function names."""
    return bytes(pb.node("files", op) + pb.taking(*["prefix"] * (2 if op == "MergeV2Checkpoints" else 1)))


PREFIX = ("prefix",)
FUNCTIONS = (
    pb.function(SAVE, touching("SaveV2"), call("inner", "merge", *PREFIX), takes=PREFIX),
    pb.function("__inference__traced_restore_13", touching("RestoreV2"), takes=PREFIX),
    pb.function("merge", touching("MergeV2Checkpoints"), takes=PREFIX),
)


def safety(tmp_path: Path, *nodes: bytes, functions: tuple[bytes, ...] = (), more: bytes = b"") -> Safety:
    body = pb.graph(*SAVING, *nodes, functions=(*FUNCTIONS, *functions))
    found = verify(pb.written(tmp_path / "m", pb.model(pb.meta_graph(body, SAVER, more))))
    assert found.is_valid, found.findings
    return found.safety


# Functions ------------------------------------------------------------------------------------------


def test_functions_of_the_saver_alone_are_safe(tmp_path: Path) -> None:
    serving = pb.node("x", "Placeholder"), call("y", "serve", "x")
    functions = (pb.function("serve", pb.node("a", "Identity")),)
    told = signature(pb.part(1, "y:0"))
    assert safety(tmp_path, *serving, functions=functions, more=told) is Safety.SAFE


def _in_list(name: str) -> bytes:
    inner = pb.part(1, "Identity") + pb.part(2, pb.part(1, "f") + pb.part(2, referring(name)))
    return bytes(pb.part(1, pb.part(9, inner)))


def test_function_that_something_else_calls_is_unsafe(tmp_path: Path) -> None:
    cases = [
        call("evil", SAVE),
        call("evil", "merge"),
        call("save/evil", SAVE),
        pb.node("evil", SAVE),
        pb.node("evil", "MapDataset") + pb.attribute("f", referring(SAVE)),
        pb.node("evil", "StatelessIf") + pb.attribute("else_branch", referring("merge")),
        pb.node("evil", "Case") + pb.attribute("branches", pb.part(1, pb.part(9, pb.part(1, SAVE)))),
        pb.node("evil", "While") + pb.attribute("body", _in_list(SAVE)),
    ]
    for at, node in enumerate(cases):
        folder = tmp_path / str(at)
        folder.mkdir()
        assert safety(folder, node) is Safety.UNSAFE, node
        assert safety(folder, call("y", "f"), functions=(pb.function("f", node),)) is Safety.UNSAFE, node
        assert safety(folder, functions=(pb.function("f", node),)) is Safety.SAFE, node


def test_function_that_can_be_asked_for_is_unsafe(tmp_path: Path) -> None:
    cases = [
        signature(pb.part(1, "call:0")),
        signature(pb.part(1, "call:0"), name="__saved_model_init_op"),
        signature(pb.part(4, pb.part(2, "call_1:0"))),
        signature(pb.part(5, pb.part(2, pb.part(1, "call:0")))),
        pb.part(4, pb.part(1, "legacy_init_op") + pb.part(2, pb.part(1, pb.part(1, "call_1")))),
        pb.part(4, pb.part(1, "saved_model_main_op") + pb.part(2, pb.part(1, pb.part(1, "call")))),
        pb.part(7, pb.part(2, pb.part(1, SAVE))),
        pb.part(7, pb.part(1, pb.part(6, pb.part(1, SAVE)))),
        pb.part(7, pb.part(1, pb.part(8, pb.part(1, "merge")))),
        pb.part(2, pb.part(2, pb.part(2, pb.part(1, "f") + pb.part(2, SAVE)))),
        pb.part(2, pb.part(2, pb.part(3, pb.part(1, SAVE) + pb.part(2, "Identity")))),
        pb.part(3, pb.part(2, "saver_filename:0")),
    ]
    for at, more in enumerate(cases):
        folder = tmp_path / str(at)
        folder.mkdir()
        assert safety(folder, more=bytes(more)) is Safety.UNSAFE, more


def test_function_that_is_called_like_a_savers_is_no_saver(tmp_path: Path) -> None:
    name = "__inference__traced_save_99"
    function = pb.function(name, pb.node("s", "SaveV2"))
    assert safety(tmp_path, call("y", name), functions=(function,)) is Safety.UNSAFE


def test_function_that_is_called_like_another_is_no_saver(tmp_path: Path) -> None:
    for at, name in enumerate(["MatMul", "merge"]):
        folder = tmp_path / str(at)
        folder.mkdir()
        functions = (
            pb.function(name, pb.node("s", "SaveV2")),
            pb.function("between", call("c", name)),
        )
        saving = call("call", "between")
        body = pb.graph(saving, functions=(*functions, FUNCTIONS[2]))
        path = pb.written(folder / "m", pb.model(pb.meta_graph(body, SAVER)))
        assert verify(path).safety is Safety.UNSAFE, name


def test_functions_that_are_called_are_there(tmp_path: Path) -> None:
    cases = [("lost", True), ("merge", False), ("MatMul", False), ("", False)]
    for at, (name, is_broken) in enumerate(cases):
        folder = tmp_path / str(at)
        folder.mkdir()
        body = pb.graph(call("y", name), functions=FUNCTIONS)
        found = verify(pb.written(folder / "m", pb.model(pb.meta_graph(body))))
        told = [one.message for one in found.findings if one.code == "graph-broken"]
        assert told == ["it calls the unknown function 'lost'"] * is_broken, name
        assert found.is_valid is not is_broken, name


def test_restoring_that_writes_is_unsafe(tmp_path: Path) -> None:
    functions = (pb.function(SAVE, touching("SaveV2"), takes=PREFIX),)
    fed = pb.part(1, "saver_filename:0")
    for names, expected in [
        (pb.part(2, "call:0"), Safety.SAFE),
        (pb.part(3, "call"), Safety.UNSAFE),
        (pb.part(2, "call:0") + pb.part(3, "call"), Safety.UNSAFE),
    ]:
        body = pb.graph(*SAVING[:2], functions=functions)
        path = pb.written(tmp_path / "m", pb.model(pb.meta_graph(body, pb.part(3, fed + names))))
        assert verify(path).safety is expected


# Nodes of TensorFlow 1 ------------------------------------------------------------------------------

OLD_SAVER = pb.part(
    3, pb.part(1, "outer/s/Const:0") + pb.part(2, "outer/s/done:0") + pb.part(3, "outer/s/restore_all")
)
OLD_NODES = (
    pb.node("w", "VariableV2"),
    pb.node("outer/s/Const", "PlaceholderWithDefault"),
    pb.node("outer/s/SaveV2", "SaveV2") + pb.taking("outer/s/Const", "w"),
    pb.node("outer/s/done", "Identity") + pb.taking("^outer/s/SaveV2"),
    pb.node("outer/s/RestoreV2", "RestoreV2") + pb.taking("outer/s/Const"),
    pb.node("outer/s/Assign", "Assign") + pb.taking("w", "outer/s/RestoreV2:0"),
    pb.node("outer/s/restore_all", "NoOp") + pb.taking("^outer/s/Assign"),
)


def test_node_counts_where_nothing_else_depends_on_it(tmp_path: Path) -> None:
    cases = [
        (pb.node("y", "Relu") + pb.taking("w"), Safety.SAFE),
        (pb.node("y", "Relu") + pb.taking("outer/s/RestoreV2"), Safety.UNSAFE),
        (pb.node("y", "Relu") + pb.taking("w", "^outer/s/restore_all"), Safety.UNSAFE),
        (pb.node("y", "Relu") + pb.taking("^outer/s/done"), Safety.UNSAFE),
        (pb.node("y", "SaveV2"), Safety.UNSAFE),
        (pb.node("y", "Relu") + pb.taking("save/RestoreV2"), Safety.UNSAFE),
        (pb.node("save/y", "Relu") + pb.taking("save/RestoreV2"), Safety.SAFE),
    ]
    for at, (node, expected) in enumerate(cases):
        folder = tmp_path / str(at)
        folder.mkdir()
        older = pb.node("save/RestoreV2", "RestoreV2")
        body = pb.graph(*OLD_NODES, older, node)
        path = pb.written(folder / "m", pb.model(pb.meta_graph(body, OLD_SAVER)))
        assert verify(path).safety is expected, node


def _initialized_by(node: str) -> bytes:
    variable = pb.part(1, "w:0") + pb.part(2, node)
    return bytes(pb.part(4, pb.part(1, "variables") + pb.part(2, pb.part(2, pb.part(1, variable)))))


def test_variable_that_is_initialized_from_a_file_is_unknown(tmp_path: Path) -> None:
    cases = [
        (pb.node("init", "NoOp") + pb.taking("^assign"), b"", Safety.UNKNOWN),
        (pb.node("y", "Relu") + pb.taking("restored"), b"", Safety.UNSAFE),
        (pb.node("y", "Relu") + pb.taking("^assign"), b"", Safety.UNSAFE),
        (pb.node("init", "NoOp") + pb.taking("^assign"), signature(pb.part(1, "assign:0")), Safety.UNSAFE),
        (
            pb.node("init", "NoOp") + pb.taking("^assign"),
            pb.part(4, pb.part(1, "saved_model_main_op") + pb.part(2, pb.part(1, pb.part(1, "init")))),
            Safety.UNSAFE,
        ),
        (pb.node("init", "NoOp") + pb.taking("^assign"), pb.part(3, pb.part(3, "init")), Safety.UNSAFE),
    ]
    for at, (node, more, expected) in enumerate(cases):
        folder = tmp_path / str(at)
        folder.mkdir()
        nodes = (
            pb.node("restored", "RestoreV2"),
            pb.node("kept", "Identity") + pb.taking("restored"),
            pb.node("assign", "AssignVariableOp") + pb.taking("w", "kept"),
            pb.node("w", "VarHandleOp"),
            node,
        )
        for told, safety in ((_initialized_by("assign"), expected), (b"", Safety.UNSAFE)):
            body = pb.meta_graph(pb.graph(*nodes), told, bytes(more))
            assert verify(pb.written(folder / "m", pb.model(body))).safety is safety, node


def test_signature_that_leads_to_an_older_saver_is_unsafe(tmp_path: Path) -> None:
    nodes = pb.node("save/RestoreV2", "RestoreV2"), pb.node("save/y", "Relu") + pb.taking("save/RestoreV2")
    told = signature(pb.part(1, "save/y:0"))
    path = pb.written(tmp_path / "m", pb.model(pb.meta_graph(pb.graph(*nodes), told)))
    assert verify(path).safety is Safety.UNSAFE


@pytest.mark.parametrize(("asked", "expected"), [("x:0", Safety.SAFE), ("call:0", Safety.UNSAFE)])
def test_text_form_tells_the_saver_too(tmp_path: Path, asked: str, expected: Safety) -> None:
    text = f"""meta_graphs {{
      graph_def {{
        node {{ name: "x" op: "Placeholder" }}
        node {{ name: "call" op: "PartitionedCall" input: "p"
          attr {{ key: "f" value {{ func {{ name: "f" }} }} }} }}
        node {{ name: "p" op: "Placeholder" }}
        library {{ function {{ signature {{ name: "f" input_arg {{ name: "a" }} }}
          node_def {{ name: "s" op: "SaveV2" input: "a" }} }} }}
      }}
      saver_def {{ filename_tensor_name: "p:0" save_tensor_name: "call:0" restore_op_name: "" }}
      signature_def {{ key: "y" value {{ outputs {{ key: "y" value {{ name: "{asked}" }} }} }} }}
    }}"""
    directory = pb.written(tmp_path / "m", text.encode(), "saved_model.pbtxt")
    assert verify(directory).safety is expected


# What TensorFlow writes -----------------------------------------------------------------------------

MODELS = """
import sys
import tensorflow as tf
v1, raw = tf.compat.v1, tf.raw_ops
spec = tf.TensorSpec([None], tf.float32)
def write(x):
    raw.SaveV2(prefix="/x", tensor_names=["a"], shape_and_slices=[""], tensors=[x])
def read(x):
    raw.RestoreV2(prefix="/x", tensor_names=["a"], shape_and_slices=[""], dtypes=[tf.float32])
def save(name, run, called):
    def serve(x):
        run(x)
        return x + 1.0
    serve.__name__ = called
    inner = tf.function(serve, input_signature=[spec])
    def outer(x):
        return tf.cond(tf.size(x) > 0, lambda: inner(x), lambda: x)
    for kind, function in {"direct": inner, "cond": tf.function(outer, input_signature=[spec])}.items():
        model = tf.Module()
        model.weight = tf.Variable(1.0)
        model.table = tf.lookup.experimental.MutableHashTable(tf.string, tf.int64, -1)
        model.serve = function
        tf.saved_model.save(model, f"{sys.argv[1]}/{name}-{kind}", signatures=function)
save("safe-module", lambda x: tf.data.Dataset.range(3).map(lambda y: y + 1), "serve")
save("unsafe-save", write, "_traced_save")
save("unsafe-restore", read, "_traced_restore")
def old(name, scope, run=None, train=False):
    with v1.Graph().as_default(), v1.Session() as session:
        with v1.name_scope(scope):
            x = v1.placeholder(tf.float32, [None, 3])
            y = x @ v1.get_variable("w", [3, 2])
            saver = v1.train.Saver(sharded=True)
        if run == "restore":
            restored = session.graph.get_operation_by_name(saver.saver_def.restore_op_name)
            with v1.control_dependencies([restored]):
                y = tf.identity(y)
        main = None
        if run == "main":
            main = raw.SaveV2(
                prefix="/x", tensor_names=["a"], shape_and_slices=[""], tensors=[y], name="save/s")
        session.run(v1.global_variables_initializer())
        builder = v1.saved_model.Builder(f"{sys.argv[1]}/{name}")
        told = {"serving_default": v1.saved_model.predict_signature_def({"x": x}, {"y": y})}
        builder.add_meta_graph_and_variables(
            session, ["serve"], told, saver=saver if scope else None, main_op=main)
        if train:
            builder.add_meta_graph(["train"], told)
        builder.save()
old("safe-old", None)
old("safe-scope", "outer")
old("safe-two", None, train=True)
old("unsafe-main", None, "main")
old("unsafe-output", "outer", "restore")
"""


@pytest.mark.framework
def test_savers_that_tensorflow_writes_are_told_from_what_is_named_so(tmp_path: Path) -> None:
    python_with_frameworks("-c", MODELS, tmp_path)
    found = {one.name: verify(one) for one in tmp_path.iterdir()}
    assert len(found) == 11 and all(one.is_valid for one in found.values())
    judged = {name: one.safety.value for name, one in found.items()}
    assert all(name.startswith(f"{safety}-") for name, safety in judged.items()), judged
