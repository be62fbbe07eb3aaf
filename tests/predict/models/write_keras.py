"""``python write_keras.py DIR``: write models of TensorFlow and Keras, with what these predict with them.

What ends in ``-off`` has one weight that is 1 % larger, and what ends in ``-nan`` one that is no number.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
sys.path.insert(0, str(Path(__file__).parent))

import keras
import keras_nets as nets
import numpy as np
import own_layers
import tensorflow as tf
import tf_keras

RANDOM = np.random.default_rng(5)
X, Y = RANDOM.random((4, 3), np.float32), RANDOM.random((4, 2), np.float32)
MODULE = RANDOM.random((3, 2), np.float32)
FACTORS = {"": 1.0, "-off": 1.01, "-nan": np.nan}


def record(name, inputs, outputs) -> None:
    """Write what a model gives, as a recording."""
    members = {f"input/{key}": value for key, value in inputs.items()}
    np.savez(name, **members, **{f"output/{key}": np.array(value) for key, value in outputs.items()})


def worse(values, factor):
    """Return values with the largest one multiplied."""
    values = np.array(values)
    values.flat[np.abs(values).argmax()] *= factor
    return values


def dense() -> None:
    """Write a model of Keras 3, whole and in parts."""
    keras.utils.set_random_seed(3)
    model = nets.dense()
    model.save("fresh.keras")
    model.compile("adam", "mse")
    model.fit(X, Y, verbose=0)
    record("dense.npz", {"0": X}, {"output": model(X)})
    right = [one.copy() for one in model.get_weights()]
    for suffix, factor in FACTORS.items():
        model.set_weights([worse(right[0], factor), *right[1:]])
        model.save(f"dense{suffix}.keras")
        model.save(f"dense{suffix}.h5")
        model.save_weights(f"dense{suffix}.weights.h5")
        model.export(f"exported{suffix}", verbose=False)
        tf.train.Checkpoint(net=model, opt=model.optimizer).save(f"variables{suffix}/ckpt")
    model.set_weights(right)
    model.save_weights("dense.weights.json", max_shard_size=3e-7)
    tf.train.Checkpoint(model).write("root")


@keras.saving.register_keras_serializable("tests")
class Unknown(own_layers.DuplicateKeyObject):
    """A class that no module has which a model could be loaded with."""


def unknown_lengths() -> None:
    """Write models of sequences and images of any length; ``-off`` has nothing that links two steps."""
    keras.utils.set_random_seed(3)
    model = nets.recurrent()
    kernel, recurrent, bias = model.get_weights()
    for suffix, factor in (("", 1), ("-off", 0)):
        model.set_weights([kernel, recurrent * factor, bias])
        model.save(f"recurrent{suffix}.keras")
        model.export(f"sequences{suffix}", verbose=False)
    nets.pooled().save("pooled.keras")


def others() -> None:
    """Write a model with two inputs and outputs, one of the user's class, and one that runs code."""
    model = nets.two_heads()
    model.compile("sgd", {"one": "mse", "two": "mae"})
    model.save("heads.keras")
    given = {"left": X[:, :2], "right": X}
    record("heads.npz", given, model(given))
    doubled = own_layers.DuplicateKeyObject()
    record("doubled.npz", {"0": X}, {"output": doubled(X)})
    doubled.save("doubled.keras")
    doubled.save_weights("doubled.weights.h5")
    unknown = Unknown()
    unknown(X)
    unknown.save("unknown.keras")
    keras.Sequential([keras.Input((3,)), keras.layers.Lambda(lambda x: x)]).save("lambda.keras")


def old() -> None:
    """Write a model of Keras 2, whole and in parts, with the optimizer of its time."""
    tf_keras.utils.set_random_seed(3)
    model = nets.old()
    model.compile(tf_keras.optimizers.legacy.Adam(), "mse")
    model.fit(X, Y, verbose=0)
    record("old.npz", {"0": X}, {"output": model(X)})
    right = [one.copy() for one in model.get_weights()]
    for suffix, factor in FACTORS.items():
        model.set_weights([worse(right[0], factor), *right[1:]])
        model.save(f"old{suffix}.h5")
        model.save_weights(f"oldweights{suffix}.h5")
        model.save_weights(f"oldvariables{suffix}/ckpt")


def modules() -> None:
    """Write a module's variables, and the module with its signatures."""
    module = nets.Module()
    for suffix, factor in FACTORS.items():
        module.w.assign(worse(MODULE, factor))
        tf.train.Checkpoint(net=module).save(f"module{suffix}/ckpt")
        tf.saved_model.save(module, f"saved{suffix}", signatures=module.__call__)
    record("module.npz", {"0": X}, {"output": X @ MODULE})
    record("saved.npz", {"x": X}, {"output_0": X @ MODULE})


class Words(tf.Module):
    """Tables from words to numbers and back, one of them in a file."""

    def __init__(self) -> None:
        super().__init__()
        Path("words.txt").write_text("a\nis\n")
        lines = tf.lookup.TextFileInitializer("words.txt", tf.string, -2, tf.int64, -1)
        self.numbers = tf.lookup.StaticHashTable(lines, -1)
        names = tf.lookup.KeyValueTensorInitializer(tf.constant([0, 1], tf.int64), ["A", "Is"])
        self.names = tf.lookup.StaticHashTable(names, "?")

    @tf.function(input_signature=[tf.TensorSpec([None], tf.string, name="words")])
    def look_up(self, words):
        """Return numbers and names."""
        numbers = self.numbers.lookup(words)
        return {"numbers": numbers, "names": self.names.lookup(numbers)}

    @tf.function(input_signature=[tf.TensorSpec(None, name="x"), tf.TensorSpec([None, 2], name="y")])
    def add(self, x, y):
        """Return a sum."""
        return {"sum": tf.reduce_sum(x) + y}


def words() -> None:
    """Write signatures that take and give texts, several inputs, and any rank."""
    module = Words()
    tf.saved_model.save(module, "words", signatures={"look_up": module.look_up, "add": module.add})
    tf.saved_model.save(module, "one", signatures={"look_up": module.look_up})
    names = np.array([b"A", b"Is", b"?"])
    record("words.npz", {"words": np.array(["a", "is", "so"])}, {"numbers": [0, 1, -1], "names": names})


def version1() -> None:
    """Write what TensorFlow 1 saved: a graph to serve, and variables by name."""
    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        x = v1.placeholder(tf.float32, [None, 3], name="x")
        w = v1.get_variable("w", initializer=MODULE)
        session.run(v1.global_variables_initializer())
        v1.saved_model.simple_save(session, "version1", {"x": x}, {"y": tf.matmul(x, w)})
        v1.train.Saver().save(session, "names/model")
    record("version1.npz", {"x": X}, {"y": X @ MODULE})


def references() -> None:
    """Write graphs with variables as TensorFlow 1 had them: one that gives its variable, one that counts."""
    v1 = tf.compat.v1
    for name, factor in (("references", 1.0), ("references-off", 1.01), ("counts", 1.0)):
        with tf.Graph().as_default(), v1.Session() as session:
            x = v1.placeholder(tf.float32, [None, 3], name="x")
            w = v1.get_variable("w", initializer=worse(MODULE, factor), use_resource=False)
            count = v1.get_variable("count", initializer=tf.constant(0.0), use_resource=False)
            session.run(v1.global_variables_initializer())
            y = tf.matmul(x, w)
            gives = {"y": y + v1.assign_add(count, 1.0)} if name == "counts" else {"y": y, "w": w}
            v1.saved_model.simple_save(session, name, {"x": x}, gives)
    record("references.npz", {"x": X}, {"y": X @ MODULE, "w": MODULE})
    record("counts.npz", {"x": X}, {"y": X @ MODULE + 1})


if __name__ == "__main__":
    os.chdir(sys.argv[1])
    for write in (dense, unknown_lengths, others, old, modules, words, version1, references):
        write()
