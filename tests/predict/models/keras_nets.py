"""Models of Keras 3, of Keras 2 and of TensorFlow alone; each imports what it is made of."""

from __future__ import annotations

import tensorflow as tf


def dense(units: int = 4, last: str = "last"):
    """Return two layers of Keras 3."""
    import keras

    first = keras.layers.Dense(units, activation="tanh", name="first")
    return keras.Sequential([keras.Input((3,)), first, keras.layers.Dense(2, name=last)])


def shallow():
    """Return the first layer alone."""
    import keras

    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, activation="tanh", name="first")])


def deep():
    """Return one layer more."""
    import keras

    model = dense()
    model.add(keras.layers.Dense(2, name="more"))
    return model


def unbuilt():
    """Return layers that don't know their input."""
    import keras

    first = keras.layers.Dense(4, activation="tanh", name="first")
    return keras.Sequential([first, keras.layers.Dense(2, name="last")])


def two_heads():
    """Return a model of named inputs and outputs."""
    import keras

    a, b = keras.Input((2,), name="a"), keras.Input((3,), name="b")
    both = keras.layers.Concatenate()([a, b])
    one, two = keras.layers.Dense(2, name="one")(both), keras.layers.Dense(1, name="two")(both)
    return keras.Model({"left": a, "right": b}, {"one": one, "two": two})


def recurrent():
    """Return a layer over sequences of any length."""
    import keras

    return keras.Sequential([keras.Input((None, 3)), keras.layers.LSTM(4)])


def pooled():
    """Return layers over images of any size, which halve them three times."""
    import keras

    halves = [keras.layers.MaxPooling2D() for _ in range(3)]
    return keras.Sequential([keras.Input((None, None, 2)), *halves, keras.layers.GlobalAveragePooling2D()])


def old():
    """Return two layers of Keras 2."""
    import tf_keras

    first = tf_keras.layers.Dense(4, activation="tanh", input_shape=(3,), name="first")
    return tf_keras.Sequential([first, tf_keras.layers.Dense(2, name="last")])


def fails():
    """Raise an error."""
    raise RuntimeError("no such luck")


class Module(tf.Module):
    """One product."""

    def __init__(self, width: int = 2) -> None:
        super().__init__()
        self.w = tf.Variable(tf.zeros([3, width]), name="w")

    @tf.function(input_signature=[tf.TensorSpec([None, 3], tf.float32, name="x")])
    def __call__(self, x):
        """Return as many numbers for each row as it is wide."""
        return x @ self.w


class Biased(Module):
    """One product and a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.b = tf.Variable(tf.zeros([2]), name="b")


class Renamed(tf.Module):
    """One product, by another name."""

    def __init__(self) -> None:
        super().__init__()
        self.v = tf.Variable(tf.zeros([3, 2]), name="v")

    def __call__(self, x):
        """Return two numbers for each row."""
        return x @ self.v


def as_saved():
    """Return what was saved: a checkpoint that holds a module."""
    return tf.train.Checkpoint(net=Module())
