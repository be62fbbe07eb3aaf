"""Models of Keras 3 that are saved, and loaded again from what ckpttool made of their files.

``python keras_oracle.py DIRECTORY`` saves each model in three kinds of files there, and tells in a line of
JSON what they predict and what their optimizers hold. Then it reads lines of JSON with lists of files, and
tells of each what came back.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ |= {"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}

import keras
import numpy as np
import tensorflow as tf
from keras import layers

tf.config.run_functions_eagerly(True)

ANSWER = "ANSWER"
SUFFIXES = (".keras", ".h5", ".weights.h5")


@keras.saving.register_keras_serializable("tests")
class Scale(layers.Layer):
    """A layer of somebody's own."""

    def build(self, shape: Any) -> None:
        self.factor = self.add_weight(shape=(shape[-1],), name="factor")
        self.shift = self.add_weight(shape=(shape[-1],), name="shift", trainable=False)

    def call(self, x: Any) -> Any:
        return x * self.factor + self.shift


@keras.saving.register_keras_serializable("tests")
class Subclassed(keras.Model):
    """A model whose layers no config lists."""

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self.blocks = [layers.Dense(3, name="zeta"), layers.Dense(3)]
        self.head = layers.Dense(1)

    def call(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def many() -> Any:
    """Return a model with most kinds of layers, one used twice, one frozen, and a model in a model."""
    encoder = keras.Sequential(
        [
            *(
                layers.InputLayer((8,)),
                layers.Dense(5, name="inner"),
                layers.BatchNormalization(name="scaled"),
            ),
            *(layers.Dense(5), layers.Dropout(0.1), layers.PReLU()),
        ],
        name="encoder",
    )
    words, image, row = keras.Input((6,)), keras.Input((8, 8, 1)), keras.Input((8,))
    embedded = layers.Embedding(11, 8, name="words")(words)
    attended = layers.MultiHeadAttention(2, 4, name="attention")(embedded, embedded)
    seen = layers.BatchNormalization(name="norm")(layers.Conv2D(3, 3, name="convolution")(image))
    twice, frozen = layers.Dense(4, name="shared"), layers.Dense(8, name="before")
    frozen.trainable = False
    cells = layers.RNN(layers.StackedRNNCells([layers.LSTMCell(3), layers.GRUCell(2), layers.LSTMCell(3)]))
    found = [
        *(
            layers.LSTM(7, name="memory")(attended),
            layers.Bidirectional(layers.GRU(3), name="both")(embedded),
        ),
        *(layers.GlobalAveragePooling2D()(seen), twice(row), twice(frozen(row)), encoder(row)),
        *(layers.Flatten()(layers.TimeDistributed(layers.Dense(2))(embedded)), cells(embedded)),
        layers.Flatten()(layers.LayerNormalization()(layers.SeparableConv2D(2, 3)(image))),
    ]
    return keras.Model([words, image, row], layers.Dense(1, name="head")(layers.Concatenate()(found)))


def small(dtype: str = "float32") -> Any:
    keras.config.set_dtype_policy(dtype)
    try:
        return keras.Sequential([layers.Input((16,)), layers.Dense(4), layers.Dense(1)])
    finally:
        keras.config.set_dtype_policy("float32")


def models() -> Iterator[tuple[str, Any, bool]]:
    """Yield models with their names, and whether they are trained for a while."""
    keras.utils.set_random_seed(3)
    yield "many", many(), True
    yield "custom", keras.Sequential([layers.Input((16,)), Scale(name="mine"), layers.Dense(1)]), True
    yield "subclassed", Subclassed(), True
    yield "mixed_float16", small("mixed_float16"), True
    yield "bfloat16", small("bfloat16"), True
    lookup = layers.StringLookup(name="lookup")
    lookup.adapt(["a", "b", "b"])
    text = keras.Input((1,), dtype="string")
    yield "vocabulary", keras.Model(text, layers.Embedding(4, 2)(lookup(text))), False
    quantized = small()
    quantized.quantize("int4")
    yield "int4", quantized, False


def inputs(name: str) -> Any:
    noise = np.random.default_rng(0)
    if name == "many":
        return [noise.integers(0, 11, (4, 6)), noise.normal(size=(4, 8, 8, 1)), noise.normal(size=(4, 8))]
    if name == "vocabulary":
        return tf.constant([["a"], ["b"], ["x"]])
    return noise.normal(size=(4, 16))


def predicted(model: Any, name: str) -> Any:
    return np.asarray(model.predict(inputs(name), verbose=0)).astype("float64").tolist()


def optimizer(model: Any) -> Any:
    found = getattr(model, "optimizer", None)
    return None if found is None else [np.asarray(one).astype("float64").tolist() for one in found.variables]


def save(place: Path) -> dict[str, dict[str, Any]]:
    told = {}
    for name, model, is_trained in models():
        if is_trained:
            model.compile(keras.optimizers.Adam(0.01), keras.losses.MeanSquaredError())
            model.fit(inputs(name), np.zeros((4, 1)), epochs=2, verbose=0)
        for suffix in SUFFIXES[:2]:
            model.save(place / f"{name}{suffix}")
        model.save_weights(place / f"{name}.weights.h5")
        told[name] = {"predicted": predicted(model, name), "optimizer": optimizer(model)}
    return told


def load(place: Path, file: str) -> dict[str, Any]:
    name = Path(file).name.partition(".")[0]
    try:
        if file.endswith(".weights.h5"):
            model = keras.models.load_model(place / f"{name}.keras")
            for one in model.variables:
                if one.dtype.startswith(("float", "bfloat")):
                    one.assign(np.zeros(one.shape))
            model.load_weights(file)
        else:
            model = keras.models.load_model(file)
        return {"predicted": predicted(model, name), "optimizer": optimizer(model)}
    except Exception as failure:  # noqa: BLE001 - what Keras says is what is told
        return {"failure": f"{type(failure).__name__}: {failure}"}


if __name__ == "__main__":
    directory = Path(sys.argv[1])
    print(ANSWER, json.dumps(save(directory)), flush=True)
    for line in sys.stdin:
        print(ANSWER, json.dumps({file: load(directory, file) for file in json.loads(line)}), flush=True)
