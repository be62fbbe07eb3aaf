"""TensorFlow in a process of its own: it answers what it finds in checkpoints, and writes some.

It can't share a process with Paddle. Jobs come as lines of JSON, [name, arguments]; so do the answers.
"""

from __future__ import annotations

import json
import sys
from functools import reduce
from typing import Any

import numpy as np
import tensorflow as tf

Found = dict[str, tuple[str, list[int], str]]


class Node(tf.Module):
    """An object that holds others."""


def told(value: Any) -> tuple[str, list[int], Any]:
    """Return type, shape and bytes of what a reader or a variable gives."""
    array = value.numpy() if hasattr(value, "numpy") else value
    if isinstance(array, bytes):
        return "string", [], [array.hex()]
    array = np.asarray(array)
    if array.dtype == object:
        return "string", list(array.shape), [item.hex() for item in array.ravel()]
    return array.dtype.name, list(array.shape), array.tobytes().hex()


def listed(prefix: str) -> dict[str, Any]:
    """Return all that ``tf.train.load_checkpoint`` can read, by key."""
    reader = tf.train.load_checkpoint(prefix)
    types = reader.get_variable_to_dtype_map()
    skipped = ("_CHECKPOINTABLE_OBJECT_GRAPH", "ckpttool.content")
    return {
        key: told(reader.get_tensor(key))
        for key, dtype in types.items()
        if key not in skipped and dtype != tf.variant
    }


def graph(prefix: str) -> str:
    """Return the graph of objects."""
    return tf.train.load_checkpoint(prefix).get_tensor("_CHECKPOINTABLE_OBJECT_GRAPH").hex()


def restored(prefix: str, names: dict[str, tuple[str, list[int]]], ties: dict[str, str], how: str) -> Any:
    """Restore into modules along the names, nothing left over on either side; return the values."""
    made: dict[str, Any] = {}
    root = Node()
    for name in (*names, *ties):
        *above, last = name.split(".")
        at = root
        for step in above:
            if not hasattr(at, step):
                setattr(at, step, Node())
            at = getattr(at, step)
        if name in names:
            dtype, shape = names[name]
            zeros = tf.fill(shape, "") if dtype == "string" else tf.cast(tf.zeros(shape), dtype)
            made[name] = tf.Variable(zeros, name=None)
        else:
            made[name] = made[ties[name]]
        setattr(at, last, made[name])
    getattr(tf.train.Checkpoint(root), how)(prefix).assert_consumed()
    return {name: told(variable) for name, variable in made.items()}


def restored_containers(prefix: str) -> Any:
    """Restore into an object, a list and a dictionary, with nothing left over; return the values."""
    zeros = {name: tf.Variable([0.0, 0.0]) for name in ("fc.weight", "blocks.0", "blocks.1", "table.a b")}
    fc = Node()
    fc.weight = zeros["fc.weight"]
    checkpoint = tf.train.Checkpoint(
        fc=fc, blocks=[zeros["blocks.0"], zeros["blocks.1"]], table={"a b": zeros["table.a b"]}
    )
    checkpoint.restore(prefix).assert_consumed()
    return {name: told(variable) for name, variable in zeros.items()}


def loaded(directory: str, names: list[str]) -> Any:
    """Return the variables of a SavedModel by the names' paths, each with a number of its own."""
    root = tf.saved_model.load(directory)
    variables = {name: reduce(getattr, name.split("."), root) for name in names}
    return {name: (told(variable), id(variable)) for name, variable in variables.items()}


def attributes() -> list[str]:
    """Return the names of all attributes that an object of a SavedModel has by itself."""
    return dir(type("Loaded", (tf.__internal__.tracking.AutoTrackable,), {})())


def _training() -> tuple[tf.train.Checkpoint, dict[str, Any], Any]:
    iterator = iter(tf.data.Dataset.range(100))
    model = Node()
    model.layers = [tf.Variable([[1.0, 2.0]], name="kernel"), tf.Variable([3.0], name="bias")]
    model.odd = {"a/b.c": tf.Variable(b"text")}
    model.shared = model.layers[0]
    step = tf.Variable(0, dtype=tf.int64)
    variables = {"kernel": model.layers[0], "bias": model.layers[1], "text": model.odd["a/b.c"], "step": step}
    return tf.train.Checkpoint(model=model, step=step, data=iterator), variables, iterator


def training(directory: str) -> str:
    """Write what a run saves: lists and dictionaries of variables, a counter, and the state of its data."""
    checkpoint, variables, iterator = _training()
    variables["kernel"].assign([[5.0, 6.0]])
    variables["step"].assign(7)
    for _ in range(3):
        next(iterator)
    return checkpoint.save(f"{directory}/ckpt")


def continued(prefix: str) -> Any:
    """Return the values that such a run goes on with, and the next item of its data."""
    checkpoint, variables, iterator = _training()
    checkpoint.restore(prefix).assert_consumed()
    return (
        {name: told(one) for name, one in variables.items()},
        int(next(iterator)),
        int(checkpoint.save_counter),
    )


def optimized(prefix: str) -> None:
    """Write a model of Keras 2 with an optimizer, whose slots have keys of their own."""
    model = Node()
    model.weight = tf.Variable([[1.0, 2.0]])
    adam = tf.compat.v1.train.AdamOptimizer(0.25)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model.weight**2)
    adam.apply_gradients([(tape.gradient(loss, model.weight), model.weight)])
    tf.train.Checkpoint(model=model, adam=adam).write(prefix)


def weights_alone(prefix: str) -> Any:
    """Restore the model of ``optimized`` without its optimizer."""
    model = Node()
    model.weight = tf.Variable([[0.0, 0.0]])
    tf.train.Checkpoint(model=model).read(prefix).assert_consumed()
    return told(model.weight)


def strings(prefix: str) -> None:
    """Write tensors of strings: none, empty ones, and long ones."""
    long = [b"x" * 300, b"", bytes(range(256)), b"y" * 200_000]
    tf.raw_ops.SaveV2(
        prefix=prefix,
        tensor_names=["none", "one", "some"],
        shape_and_slices=[""] * 3,
        tensors=[tf.zeros([0, 2], tf.string), tf.constant(b"\0"), tf.constant(long, shape=[2, 2])],
    )


def main() -> None:
    for line in sys.stdin:
        name, arguments = json.loads(line)
        try:
            answer: Any = [globals()[name](*arguments), None]
        except Exception as failure:  # noqa: BLE001 - the tests are told
            answer = [None, f"{type(failure).__name__}: {failure}"]
        print("\nANSWER" + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
