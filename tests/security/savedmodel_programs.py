"""Hostile and honest SavedModels, written and run with TensorFlow.

``python -m tests.security.savedmodel_programs OUT`` proves that attacks write a file outside of the model, or
return the content of one.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import tensorflow as tf
from tensorflow.core.protobuf import saved_model_pb2

from tests.security.truth import Attack, prove_all

v1, raw = tf.compat.v1, tf.raw_ops
TEXT, NUMBER, SCALAR = (
    tf.TensorSpec([], tf.string),
    tf.TensorSpec([], tf.int64),
    tf.TensorSpec([], tf.float32),
)
SECRET = "secret: 42"
OUT = Path(sys.argv[1]).resolve()


def saved(name: str, run: Callable[[str], Any]) -> Attack:
    """Save a function that is given a path outside; what is read exists."""
    directory = OUT / "beside" / name
    directory.mkdir(parents=True)
    (directory / "secret").write_text(f"{SECRET}\n")
    path = str(directory / ("made" if name.startswith("write") else "secret"))
    model = tf.Module()

    @tf.function(input_signature=[SCALAR])
    def serve(x: Any) -> Any:
        found = run(path)
        is_text = tf.is_tensor(found) and found.dtype == tf.string
        return {"y": x, "found": found if is_text else tf.constant("")}

    model.serve = serve
    tf.saved_model.save(model, str(OUT / "models" / name), signatures=serve)
    return served(name, directory)


def served(name: str, directory: Path) -> Attack:
    """Return a model that is loaded and asked, and the directory outside."""
    path = OUT / "models" / name
    return Attack(name, path, partial(tells, path), directory)


def tells(path: Path) -> bool:
    """Load a model, ask it, and return whether it told what is kept outside."""
    loaded = tf.saved_model.load(str(path))
    return SECRET in str(loaded.signatures["serving_default"](x=tf.constant(0.0)))


def proto_of(name: str) -> Any:
    model = saved_model_pb2.SavedModel()
    model.ParseFromString((OUT / "models" / name / "saved_model.pb").read_bytes())
    return model


def changed(name: str, honest: str, change: Callable[[Any, str], None]) -> Attack:
    """Write a copy of an honest model whose meta graph is changed."""
    directory = OUT / "beside" / name
    directory.mkdir(parents=True)
    (directory / "secret").write_text(f"{SECRET}\n")
    shutil.copytree(OUT / "models" / honest, OUT / "models" / name)
    model = proto_of(name)
    change(model.meta_graphs[0], str(directory / "secret"))
    (OUT / "models" / name / "saved_model.pb").write_bytes(model.SerializeToString())
    return served(name, directory)


# Ops and where they stand ---------------------------------------------------------------------------


def write(path: Any) -> None:
    raw.WriteFile(filename=path, contents="x")


def table(path: Any) -> Any:
    """Fill a table from a file, and return its first line."""
    handle = raw.HashTableV2(key_dtype=tf.int64, value_dtype=tf.string)
    fill = raw.InitializeTableFromTextFileV2(
        table_handle=handle, filename=path, key_index=-1, value_index=-2, vocab_size=-1, delimiter="\t"
    )
    with tf.control_dependencies([fill] if fill is not None else []):
        return raw.LookupTableFindV2(table_handle=handle, keys=tf.constant(0, tf.int64), default_value="")


def summary(path: str) -> None:
    writer = raw.SummaryWriter()
    raw.CreateSummaryFileWriter(writer=writer, logdir=path, max_queue=0, flush_millis=0, filename_suffix="x")
    raw.WriteScalarSummary(writer=writer, step=tf.constant(0, tf.int64), tag="a", value=tf.constant(1.0))
    raw.FlushSummaryWriter(writer=writer)


def first(dataset: Any) -> Any:
    return dataset.reduce(tf.constant(""), lambda _, line: line)


def count(dataset: Any) -> Any:
    dataset.reduce(tf.constant(0, tf.int64), lambda total, _: total + 1)


def looped(path: str) -> None:
    def body(at: Any) -> Any:
        write(path)
        return (at + 1,)

    tf.while_loop(lambda at: at < 2, body, (tf.constant(0),))


def looped_table(path: str) -> Any:
    state = tf.constant(0), tf.constant(path), tf.constant("")
    return tf.while_loop(
        lambda at, *_: at < 1, lambda at, name, _: (at + 1, name, tf.ensure_shape(table(name), [])), state
    )[2]


@tf.custom_gradient
def graded(x: Any, path: Any) -> Any:
    def grad(upstream: Any) -> Any:
        write(path)
        return upstream, None

    return tf.identity(x), grad


def with_gradient(path: str) -> None:
    x = tf.constant(1.0)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = graded(x, tf.constant(path))
    tape.gradient(y, x)


@tf.function(input_signature=[TEXT])
def filled(path: Any) -> Any:
    return table(path)


@tf.function(input_signature=[TEXT])
def between(path: Any) -> Any:
    return filled(tf.identity(path))


def csv(path: str) -> Any:
    data = tf.data.experimental.CsvDataset(path, [tf.constant("", tf.string)])
    return first(data.map(lambda cell: cell))


WRITING: dict[str, Callable[[str], Any]] = {
    "file": write,
    "print": lambda path: tf.print("x", output_stream=f"file://{path}"),
    "old_save": lambda path: raw.Save(filename=path, tensor_names=["a"], data=[tf.constant(1.0)]),
    "summary": summary,
    "cache": lambda path: count(tf.data.Dataset.range(2).cache(path)),
    "snapshot": lambda path: count(tf.data.Dataset.range(2).snapshot(path)),
    "records": lambda path: raw.DatasetToTFRecord(
        input_dataset=tf.data.Dataset.from_tensors("x")._variant_tensor, filename=path, compression_type=""
    ),
    "debug": lambda path: raw.DebugIdentityV2(
        input=tf.constant(1.0), tfdbg_context_id="a", debug_urls=[f"file://{path}"], tfdbg_run_id="r",
        tensor_debug_mode=2, op_name="o", circular_buffer_size=0,
    ),
    "cond": lambda path: tf.cond(tf.random.uniform([]) < 2, lambda: write(path), lambda: None),
    "case": lambda path: tf.switch_case(tf.constant(0) + 0, [lambda: (write(path), 0)[1], lambda: 0]),
    "while": looped,
    "map": lambda path: count(tf.data.Dataset.range(2).map(lambda x: (write(path), x)[1])),
    "interleave": lambda path: count(
        tf.data.Dataset.range(1).interleave(lambda x: tf.data.Dataset.range(2).cache(path))
    ),
    "map_fn": lambda path: tf.map_fn(lambda x: (write(path), x)[1], tf.constant([1.0])),
    "vectorized": lambda path: tf.vectorized_map(lambda x: (write(path), x)[1], tf.constant([1.0])),
    "gradient": with_gradient,
}  # fmt: skip
READING: dict[str, Callable[[str], Any]] = {
    "file": tf.io.read_file,
    "text": lambda path: first(tf.data.TextLineDataset(path)),
    "fixed": lambda path: first(tf.data.FixedLengthRecordDataset(path, len(SECRET) + 1)),
    "csv": csv,
    "matching": lambda path: tf.io.read_file(raw.MatchingFiles(pattern=f"{path[:-3]}*")[0]),
    "table": table,
    "table_identity": lambda path: table(tf.identity(tf.constant(path))),
    "table_joined": lambda path: table(tf.strings.join([path[:-3], path[-3:]])),
    "table_nested": between,
    "table_branch": lambda path: tf.cond(
        tf.random.uniform([]) < 2, lambda: filled(tf.constant(path)), lambda: tf.constant("")
    ),
    "table_selected": lambda path: table(
        raw.Select(condition=tf.constant(True), x=tf.constant(path), y=tf.constant(""))
    ),
    "table_loop": looped_table,
    "table_map": lambda path: first(tf.data.Dataset.from_tensors(path).map(filled)),
}


# Functions that no signature leads to ---------------------------------------------------------------


def called_by(name: str, call: Callable[[Any], Any], run: Callable[[Any, str], Any]) -> Attack:
    """Save a model whose signature computes; ``run`` is a function of its objects, which ``call`` calls."""
    directory, path = OUT / "beside" / name, OUT / "models" / name
    directory.mkdir(parents=True)
    made = str(directory / "made")
    model = tf.Module()
    model.serve = tf.function(lambda x: {"y": x + 1.0}, input_signature=[SCALAR])
    model.other = tf.function(lambda x: run(x, made), input_signature=[SCALAR])
    options = tf.saved_model.SaveOptions(experimental_custom_gradients=True)
    tf.saved_model.save(model, str(path), signatures=model.serve, options=options)

    def tells() -> bool:
        call(tf.saved_model.load(str(path)))
        return False

    return Attack(name, path, tells, directory)


def written(x: Any, path: str) -> Any:
    write(path)
    return x


def graded_call(loaded: Any) -> None:
    x = tf.constant(1.0)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = loaded.other(x)
    tape.gradient(y, x)


def exported_again(name: str, inner: str) -> Attack:
    """Save a model that contains another one, whose own saver and signatures stay as functions."""
    model, path = tf.Module(), OUT / "models" / name
    model.inner = tf.saved_model.load(str(OUT / "models" / inner))
    call = model.inner.signatures["serving_default"]
    model.serve = tf.function(lambda x: {"y": call(x=x)["y"]}, input_signature=[SCALAR])
    tf.saved_model.save(model, str(path), signatures=model.serve)
    return served(name, OUT)


def exported_as_old(name: str, inner: str) -> Attack:
    """Load a SavedModel into a graph of TensorFlow 1, without variables of its own, and save that."""
    path = OUT / "models" / name
    with v1.Graph().as_default(), v1.Session() as session:
        model = tf.saved_model.load(str(OUT / "models" / inner))
        x = v1.placeholder(tf.float32, [], "x")
        found = model.signatures["serving_default"](x)["found"]
        session.run([v1.global_variables_initializer(), v1.tables_initializer()])
        builder = v1.saved_model.Builder(str(path))
        told = {"serving_default": v1.saved_model.predict_signature_def({"x": x}, {"found": found})}
        builder.add_meta_graph_and_variables(
            session, ["serve"], told, main_op=v1.tables_initializer(),
            assets_collection=v1.get_collection(v1.GraphKeys.ASSET_FILEPATHS),
        )  # fmt: skip
        builder.save()
    return Attack(name, path, partial(old_tells, path, saves=False), OUT)


class LookingWithoutVariable(tf.Module):
    """A model that looks up the first word of its asset, and has no variable."""

    def __init__(self) -> None:
        self.table = honest_table()["table"]

    @tf.function(input_signature=[SCALAR])
    def serve(self, x: Any) -> Any:
        return {"found": self.table.lookup(tf.constant(0, tf.int64)), "y": x}


# Tables and savers of honest models, changed --------------------------------------------------------


def honest_table() -> dict[str, Any]:
    words = OUT / "words.txt"
    words.write_text("a\nb\n")
    index = tf.lookup.TextFileIndex
    read = tf.lookup.TextFileInitializer(str(words), tf.int64, index.LINE_NUMBER, tf.string, index.WHOLE_LINE)
    return {"table": tf.lookup.StaticHashTable(read, "?")}


class Looking(tf.Module):
    """A model that looks up the first word of its asset."""

    def __init__(self) -> None:
        self.table = honest_table()["table"]
        self.weight = tf.Variable([1.0])

    @tf.function(input_signature=[SCALAR])
    def serve(self, x: Any) -> Any:
        return {"found": self.table.lookup(tf.constant(0, tf.int64)), "y": self.weight * x}


def constant(graph: Any, name: str, text: str) -> None:
    node = graph.graph_def.node.add(name=name, op="Const")
    node.attr["dtype"].type = tf.string.as_datatype_enum
    node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(text))


def constant_object(graph: Any, path: str) -> None:
    constant(graph, "evil", path)
    for item in graph.object_graph_def.nodes:
        if item.HasField("asset"):
            item.constant.operation = "evil"


def other_asset(name: Callable[[str], str]) -> Callable[[Any, str], None]:
    def change(graph: Any, path: str) -> None:
        graph.asset_file_def[0].filename = name(path)

    return change


def in_function(graph: Any, path: str) -> None:
    """Put a constant into the function that fills the table."""
    for function in graph.graph_def.library.function:
        for node in [one for one in function.node_def if one.op.startswith("InitializeTable")]:
            made = function.node_def.add(name="evil", op="Const")
            made.attr["dtype"].type = tf.string.as_datatype_enum
            made.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(path))
            node.input[1] = "evil:output:0"


def bound_to_another(graph: Any, path: str) -> None:
    """Bind a constant to the function, besides the asset that is left where it was."""
    constant(graph, "evil", path)
    made = graph.object_graph_def.nodes.add()
    made.constant.operation = "evil"
    at = len(graph.object_graph_def.nodes) - 1
    root = graph.object_graph_def.nodes[0]
    root.children.add(node_id=at, local_name="evil")
    assets = {n for n, one in enumerate(graph.object_graph_def.nodes) if one.HasField("asset")}
    for function in graph.object_graph_def.concrete_functions.values():
        function.bound_inputs[:] = [at if one in assets else one for one in function.bound_inputs]


def linked_asset() -> Attack:
    name = "read_linked_asset"
    directory = OUT / "beside" / name
    directory.mkdir(parents=True)
    (directory / "secret").write_text(f"{SECRET}\n")
    shutil.copytree(OUT / "models" / "honest_table", OUT / "models" / name)
    asset = OUT / "models" / name / "assets" / "words.txt"
    asset.unlink()
    asset.symlink_to(directory / "secret")
    return served(name, directory)


# TensorFlow 1 ---------------------------------------------------------------------------------------


def old(name: str, change: Callable[[Any, str], None] | None, *, saves: bool = False) -> Attack:
    """Save a graph of one variable with TensorFlow 1, and change it; it is saved again, too, if asked to."""
    directory, model = OUT / "beside" / name, OUT / "models" / name
    directory.mkdir(parents=True)
    victim = str(directory / "secret")
    with v1.Graph().as_default(), v1.Session() as session:
        v1.get_variable("w", initializer=tf.constant(SECRET))
        session.run(v1.global_variables_initializer())
        v1.train.Saver().save(session, victim, write_meta_graph=False, write_state=False)
    with v1.Graph().as_default(), v1.Session() as session:
        w = v1.get_variable("w", initializer=tf.constant("own"))
        x = v1.placeholder(tf.float32, [], "x")
        table_asset = tf.constant(str(OUT / "words.txt"), name="asset")
        handle = raw.HashTableV2(key_dtype=tf.int64, value_dtype=tf.string, shared_name="t")
        fill = raw.InitializeTableFromTextFileV2(
            table_handle=handle, filename=table_asset, key_index=-1, value_index=-2, name="fill"
        )
        word = raw.LookupTableFindV2(
            table_handle=handle, keys=tf.constant(0, tf.int64), default_value=tf.constant("?")
        )
        outputs = {"y": tf.identity(x), "w": tf.identity(w), "found": tf.identity(word)}
        session.run(v1.global_variables_initializer())
        builder = v1.saved_model.Builder(str(model))
        told = {"serving_default": v1.saved_model.predict_signature_def({"x": x}, outputs)}
        builder.add_meta_graph_and_variables(
            session, ["serve"], told, saver=v1.train.Saver(sharded=True),
            main_op=tf.group(fill), assets_collection=[table_asset],
        )  # fmt: skip
        builder.save()
    if change is not None:
        proto = proto_of(name)
        change(proto.meta_graphs[0], victim)
        (model / "saved_model.pb").write_bytes(proto.SerializeToString())
    return Attack(name, model, partial(old_tells, model, saves=saves), directory)


def old_tells(path: Path, *, saves: bool) -> bool:
    """Load a model with TensorFlow 1, ask it, and return whether it told what is kept outside."""
    with v1.Graph().as_default(), v1.Session() as session:
        meta = v1.saved_model.load(session, ["serve"], str(path))
        outputs = meta.signature_def["serving_default"].outputs.values()
        told = str(session.run([one.name for one in outputs], {"x:0": 0.0}))
        if saves:
            saver = v1.train.Saver(saver_def=meta.saver_def)
            saver.save(session, str(OUT / "again"), write_meta_graph=False, write_state=False)
    return SECRET in told


def nodes_of(graph: Any, op: str) -> list[Any]:
    return [node for node in graph.graph_def.node if node.op == op]


def taking(op: str, at: int, through: str = "") -> Callable[[Any, str], None]:
    """Return a change after which nodes take a constant path, through another node if asked to."""

    def change(graph: Any, path: str) -> None:
        constant(graph, "evil", path if op.startswith("Restore") else path + "-made")
        taken = "evil"
        if through:
            node = graph.graph_def.node.add(name="through", op=through, input=["evil"])
            node.attr["dtype" if through == "PlaceholderWithDefault" else "T"].type = 7
            if through == "PlaceholderWithDefault":
                node.attr["shape"].shape.SetInParent()
            taken = "through"
        for node in nodes_of(graph, op):
            node.input[at] = taken

    return change


def joined(graph: Any, path: str) -> None:
    """Restore from what the prefix and a way out of the directory make together."""
    model = OUT / "models" / "read_joined"
    constant(graph, "way", "/../" + os.path.relpath(path, model / "variables"))
    (model / "variables" / "variables").mkdir()
    node = graph.graph_def.node.add(name="evil", op="StringJoin", input=["save/Const", "way"])
    node.attr["N"].i = 2
    for one in nodes_of(graph, "RestoreV2"):
        one.input[0] = "evil"


def other_fed(graph: Any, path: str) -> None:
    """Name another node as the one that the loader feeds."""
    taking("RestoreV2", 0)(graph, path)
    graph.saver_def.filename_tensor_name = "asset:0"


def table_constant(graph: Any, path: str) -> None:
    Path(path).write_text(f"{SECRET}\n")
    constant(graph, "evil", path)
    next(node for node in graph.graph_def.node if node.name == "fill").input[1] = "evil"


def asked_for(graph: Any, path: str) -> None:
    """Fill the table when the signature is asked, while no asset is fed."""
    Path(path).write_text(f"{SECRET}\n")
    node = next(node for node in graph.graph_def.node if node.name == "asset")
    node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(path))
    find = nodes_of(graph, "LookupTableFindV2")[0]
    find.input.append("^fill")
    graph.collection_def.pop("saved_model_main_op", None)
    graph.signature_def.pop("__saved_model_init_op", None)


def attacks() -> Iterator[Attack]:
    """Write the models; those whose names begin with ``honest`` are."""
    for name, run in WRITING.items():
        yield saved(f"write_{name}", run)
    for name, run in READING.items():
        yield saved(f"read_{name}", run)
    model, name = Looking(), "honest_table"
    tf.saved_model.save(model, str(OUT / "models" / name), signatures=model.serve)
    yield served(name, OUT)
    changes = {
        "object": constant_object,
        "bound": bound_to_another,
        "in_function": in_function,
        "asset_absolute": other_asset(lambda path: path),
        "asset_above": other_asset(lambda path: os.path.relpath(path, OUT / "models/read_x/assets")),
    }
    for name, change in changes.items():
        yield changed(f"read_{name}", "honest_table", change)
    yield linked_asset()
    yield called_by("write_object", lambda loaded: loaded.other(tf.constant(0.0)), written)
    yield called_by("write_object_gradient", graded_call, lambda x, path: graded(x, tf.constant(path)))
    bare = LookingWithoutVariable()
    tf.saved_model.save(bare, str(OUT / "models" / "honest_bare"), signatures=bare.serve)
    yield served("honest_bare", OUT)
    yield exported_again("honest_again", "honest_table")
    yield exported_again("honest_again_twice", "honest_again")
    yield exported_as_old("honest_as_old", "honest_bare")
    yield old("honest_old", None)
    yield exported_again("honest_again_of_old", "honest_old")
    yield old("honest_old_again", None, saves=True)
    restoring = {
        "restore": taking("RestoreV2", 0),
        "restore_identity": taking("RestoreV2", 0, "Identity"),
        "restore_default": taking("RestoreV2", 0, "PlaceholderWithDefault"),
        "joined": joined,
        "other_fed": other_fed,
        "old_table": table_constant,
        "asked_for": asked_for,
    }
    for name, change in restoring.items():
        yield old(f"read_{name}", change)
    for op, at in (("SaveV2", 0), ("MergeV2Checkpoints", 1)):
        yield old(f"write_{op}", taking(op, at), saves=True)


if __name__ == "__main__":
    prove_all(attacks())
