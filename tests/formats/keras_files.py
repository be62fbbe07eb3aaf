"""Models that Keras 3 (``keras``) or Keras 2 (``tf_keras``) writes, and what it holds in memory.

``python keras_files.py API DIRECTORY`` writes them all, each part into a directory of its own, and tells of
each in the last line, as JSON. The layers of ``unnamed`` are called as Keras calls them, those of ``told`` by
name, and ``kinds`` has each kind of layer.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

os.environ |= {"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}

import numpy as np
import tensorflow as tf

api = import_module(sys.argv[1])
layers, dense = api.layers, api.layers.Dense
is_keras_3 = api.__name__ == "keras"
tf.config.run_functions_eagerly(True)


def saved(model: Any, place: Path, *names: str) -> None:
    for name in names:
        (model.save_weights if "weights" in name else model.save)(str(place / name))


# Layers that nobody named ---------------------------------------------------------------------------


def skipping() -> Any:
    given = api.Input((6,))
    beside = dense(6)(given)
    found = dense(6)(dense(6, activation="relu")(given))
    return api.Model(given, dense(2)(layers.Add()([found, beside])))


def nested() -> Any:
    given = api.Input((6,))
    inner, last = skipping(), dense(6)
    twice = dense(6)
    found = [inner(twice(dense(6)(given))), twice(given), last(given)]
    return api.Model(given, dense(1)(layers.Concatenate()(found)))


def wrapped(inner: Any = None) -> Any:
    given = api.Input((5, 6))
    beside = layers.TimeDistributed(dense(6))(given)
    found = layers.TimeDistributed(inner or dense(6))(given)
    return api.Model(given, layers.Concatenate()([layers.TimeDistributed(dense(6))(found), beside]))


def around() -> Any:
    return wrapped(skipping())


def flat(layer: Any, place: list[str]) -> list[Any]:
    parts = getattr(layer, "layers", [layer.layer] if hasattr(layer, "layer") else [])
    own = [] if parts else [[place, one.numpy().tobytes().hex()] for one in layer.weights]
    return own + [one for part in parts for one in flat(part, [*place, part.name])]


def unnamed(place: Path) -> dict[str, Any]:
    api.utils.set_random_seed(5)
    makers = {"skip": skipping, "again": skipping, "nested": nested}
    if is_keras_3:  # Keras 2 calls the weights of a wrapped layer by the wrapper alone
        makers |= {"wrapped": wrapped, "around": around}
    truth = {}
    for name, make in makers.items():
        model = make()
        noise = np.random.default_rng(0)
        model.set_weights([noise.normal(size=one.shape) for one in model.weights])
        files = [f"{name}.keras", f"{name}.h5"] + ([f"{name}.weights.h5"] if is_keras_3 else [])
        saved(model, place, *files)
        truth[name] = {"files": files, "weights": flat(model, [])}
    return truth


# Values and names -----------------------------------------------------------------------------------


def told(value: Any) -> list[Any]:
    array = np.asarray(value)
    return [str(array.dtype), list(array.shape), hashlib.sha256(array.tobytes()).hexdigest()]


def last(weight: Any) -> str:
    name: str = getattr(weight, "path", weight.name)
    return name.partition(":")[0].rpartition("/")[2]


def trained(place: Path) -> dict[str, Any]:
    api.utils.set_random_seed(3)
    encoder = api.Sequential(
        [layers.InputLayer((8,)), dense(5, name="inner"), layers.BatchNormalization(name="scaled")],
        name="encoder",
    )
    words, image, row = api.Input((6,)), api.Input((8, 8, 1)), api.Input((8,))
    embedded = layers.Embedding(11, 8, name="words")(words)
    attended = layers.MultiHeadAttention(2, 4, name="attention")(embedded, embedded)
    seen = layers.BatchNormalization(name="norm")(layers.Conv2D(3, 3, name="convolution")(image))
    twice = dense(4, name="shared")
    found = [
        layers.LSTM(7, name="memory")(attended),
        layers.Bidirectional(layers.GRU(3), name="both")(embedded),
        layers.GlobalAveragePooling2D()(seen),
        twice(row),
        twice(dense(8, name="before")(row)),
        encoder(row),
    ]
    model = api.Model([words, image, row], dense(1, name="head")(layers.Concatenate()(found)))
    model.compile(api.optimizers.Adam(0.001), "mse", metrics=["mae"])
    noise = np.random.default_rng(0)
    given = [noise.integers(0, 11, (4, 6)), noise.normal(size=(4, 8, 8, 1)), noise.normal(size=(4, 8))]
    model.fit(given, noise.normal(size=(4, 1)), epochs=2, verbose=0)
    files = ["m.keras", "m.h5", "m.weights.h5" if is_keras_3 else "weights.h5"]
    saved(model, place, *files)
    kept = model.optimizer.variables
    return {
        "files": files,
        "layers": [
            [layer.name, last(one), told(one.numpy())] for layer in model.layers for one in layer.weights
        ],
        "optimizer": [told(one.numpy()) for one in (kept() if callable(kept) else kept)],
        "parameters": model.count_params(),
    }


# All layers -----------------------------------------------------------------------------------------


def kinds(place: Path) -> None:
    one, words = api.Input((8, 4)), api.Input((6,), dtype="int32")
    image, cube, film = api.Input((8, 8, 4)), api.Input((6, 6, 6, 4)), api.Input((3, 8, 8, 4))
    no_bias: dict[str, Any] = {"use_bias": False}
    on = [
        (one, [dense(3), dense(3, **no_bias), dense(3, activation=layers.PReLU()), layers.PReLU()]),
        (one, [layers.EinsumDense("abc,cd->abd", (None, 3), **more) for more in ({}, {"bias_axes": "d"})]),
        (one, [kind(3, **more) for kind in _RECURRENT for more in ({}, no_bias)]),
        (one, [layers.GRU(3, reset_after=False), layers.RNN(layers.LSTMCell(3))]),
        (one, [layers.RNN([layers.GRUCell(3), layers.SimpleRNNCell(2)])]),
        (one, [layers.Bidirectional(layers.LSTM(3)), layers.Bidirectional(layers.RNN(layers.GRUCell(2)))]),
        (one, [layers.TimeDistributed(api.Sequential([dense(3), layers.Dropout(0.1), dense(2)]))]),
        (one, [layers.BatchNormalization(**more) for more in ({}, {"scale": False}, {"axis": 1})]),
        (one, [layers.LayerNormalization(**more) for more in ({}, {"center": False}, {"axis": [1, 2]})]),
        (one, [layers.GroupNormalization(2), layers.UnitNormalization(), layers.Normalization()]),
        (one, [layers.Conv1D(3, 2), layers.Conv1DTranspose(3, 2), layers.SeparableConv1D(3, 2)]),
        (one, [layers.DepthwiseConv1D(2, depth_multiplier=2)]),
        (image, [layers.Conv2D(4, 3, groups=2), layers.Conv2DTranspose(3, 2, **no_bias)]),
        (image, [layers.DepthwiseConv2D(3), layers.SeparableConv2D(3, 2, depth_multiplier=2)]),
        (image, [layers.ConvLSTM1D(3, 2)]),
        (cube, [layers.Conv3D(3, 2), layers.Conv3DTranspose(3, 2)]),
        (film, [layers.ConvLSTM2D(3, 2, **no_bias)]),
        (words, [layers.Embedding(7, 3)]),
    ]
    found = [layer(given) for given, several in on for layer in several]
    found += [*_attending(one), *_of_one_version(one, words), *_shared(one)]
    api.mixed_precision.set_global_policy("mixed_float16")
    found += [dense(3)(one)]
    model = api.Model([one, words, image, cube, film], found)
    model.compile("adam", "mse")
    if is_keras_3:
        model.optimizer.build(model.trainable_variables)
    model.layers[-1].trainable = False
    saved(model, place, "m.keras", "m.h5", "m.weights.h5")
    saved(api.Sequential([dense(3), dense(2)]), place, "unbuilt.keras")


_RECURRENT = layers.LSTM, layers.GRU, layers.SimpleRNN


def _attending(one: Any) -> list[Any]:
    pairs: tuple[dict[str, Any], ...] = {}, {"value_dim": 5, "output_shape": 7, "use_bias": False}
    found = [layers.MultiHeadAttention(2, 3, **more)(one, one) for more in pairs]
    return found + [
        made([one, one]) for made in (layers.Attention(use_scale=True), layers.AdditiveAttention())
    ]


def _of_one_version(one: Any, words: Any) -> list[Any]:
    if not is_keras_3:
        return [layers.LocallyConnected1D(3, 2)(one)]
    found = [layers.GroupQueryAttention(2, 4, 2)(one, one), layers.RMSNormalization()(one)]
    return [*found, layers.SpectralNormalization(dense(2))(one), layers.ReversibleEmbedding(7, 3)(words)]


def _shared(one: Any) -> list[Any]:
    shared = dense(4)
    inner = api.Model(one, shared(one), name="inner")
    found = [inner(shared(one)), shared(dense(4)(one))]
    return [*found, api.Sequential([dense(3), api.Sequential([dense(2)])])(one)]


if __name__ == "__main__":
    truth = {}
    for part in (unnamed, trained, kinds):  # the last leaves its policy behind
        directory = Path(sys.argv[2]) / part.__name__
        directory.mkdir()
        truth[part.__name__] = part(directory)
    print(json.dumps(truth))
