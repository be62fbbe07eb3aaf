"""``python keras2_oracle.py DIR``: write models of Keras 2, convert them, and let Keras 3 predict.

Prints the largest difference between the two predictions, by model.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import keras
import numpy as np
import tf_keras
from tf_keras import layers as old

from ckpttool import ConvertOptions, convert

RANDOM = np.random.default_rng(7)


def images():
    """Return layers with settings that Keras 3 has no more."""
    return tf_keras.Sequential(
        [
            old.InputLayer((8, 8, 3)),
            old.Conv2D(4, 3, activation="relu", kernel_regularizer="l2", kernel_initializer="he_normal"),
            old.SpatialDropout2D(0.3),
            old.DepthwiseConv2D(2),
            old.SeparableConv2D(4, 2, activation="swish"),
            old.BatchNormalization(),
            old.Conv2DTranspose(2, 2),
            old.MaxPooling2D(),
            old.LeakyReLU(0.2),
            old.Flatten(),
            old.Dense(3, activation="softmax"),
        ]
    )


def sequences():
    """Return layers whose cells hold their weights."""
    return tf_keras.Sequential(
        [
            old.InputLayer((6,)),
            old.Embedding(9, 4),
            old.LSTM(5, return_sequences=True),
            old.Bidirectional(old.GRU(3, return_sequences=True, reset_after=False)),
            old.TimeDistributed(old.Dense(4)),
            old.SimpleRNN(2),
        ]
    )


def nested():
    """Return a model in a model, part of which is not trained, and a layer that is called twice."""
    inner = tf_keras.Sequential(
        [old.InputLayer((4,)), old.Dense(3), old.BatchNormalization(), old.Dense(4)], name="inner"
    )
    first, second = tf_keras.Input((4,)), tf_keras.Input((4,))
    shared = old.Dense(4, name="shared")
    both = old.Concatenate()([shared(first), shared(inner(second)), old.Add()([first, second])])
    return tf_keras.Model([first, second], old.Dense(2)(both))


def difference(name: str, directory: Path) -> float:
    """Return how far apart Keras 2 and 3 are."""
    model = globals()[name]()
    model.set_weights([RANDOM.random(one.shape, np.float32) for one in model.get_weights()])
    model.compile("adam", "mse")
    given = [RANDOM.integers(0, 9, (2, *one.shape[1:])).astype(np.float32) for one in model.inputs]
    model.save(directory / f"{name}.h5")
    convert(directory / f"{name}.h5", directory / f"{name}.keras", ConvertOptions(only="weights"))
    made = keras.models.load_model(directory / f"{name}.keras")
    apart = np.array(made(given if len(given) > 1 else given[0])) - model.predict(given, verbose=0)
    return float(np.abs(apart).max())


if __name__ == "__main__":
    answers = {name: difference(name, Path(sys.argv[1])) for name in ("images", "sequences", "nested")}
    print("\n" + json.dumps(answers))
