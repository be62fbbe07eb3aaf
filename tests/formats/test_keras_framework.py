"""Files that Keras writes here and now: what it holds in memory is what is read, under the layers' names."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ckpttool import open_checkpoint
from ckpttool.checkpoint import Checkpoint, Role
from ckpttool.ops.verify import verify

WRITE = """
import hashlib, json, os, sys
import numpy as np

api = __import__(sys.argv[1])
layers = api.layers
api.utils.set_random_seed(3)
encoder = api.Sequential(
    [layers.InputLayer((8,)), layers.Dense(5, name="inner"), layers.BatchNormalization(name="scaled")],
    name="encoder",
)
words, image, row = api.Input((6,)), api.Input((8, 8, 1)), api.Input((8,))
embedded = layers.Embedding(11, 8, name="words")(words)
attended = layers.MultiHeadAttention(2, 4, name="attention")(embedded, embedded)
seen = layers.BatchNormalization(name="norm")(layers.Conv2D(3, 3, name="convolution")(image))
twice = layers.Dense(4, name="shared")
found = [
    layers.LSTM(7, name="memory")(attended),
    layers.Bidirectional(layers.GRU(3), name="both")(embedded),
    layers.GlobalAveragePooling2D()(seen),
    twice(row),
    twice(layers.Dense(8, name="before")(row)),
    encoder(row),
]
model = api.Model([words, image, row], layers.Dense(1, name="head")(layers.Concatenate()(found)))
model.compile(api.optimizers.Adam(0.001), "mse", metrics=["mae"])
noise = np.random.default_rng(0)
given = [noise.integers(0, 11, (4, 6)), noise.normal(size=(4, 8, 8, 1)), noise.normal(size=(4, 8))]
model.fit(given, noise.normal(size=(4, 1)), epochs=2, verbose=0)
for name in sys.argv[3:]:
    (model.save_weights if "weights" in name else model.save)(os.path.join(sys.argv[2], name))


def told(value):
    array = np.asarray(value)
    return [str(array.dtype), list(array.shape), hashlib.sha256(array.tobytes()).hexdigest()]


def last(weight):
    return getattr(weight, "path", weight.name).partition(":")[0].rpartition("/")[2]


kept = model.optimizer.variables
print(json.dumps({
    "layers": [[layer.name, last(one), told(one.numpy())] for layer in model.layers for one in layer.weights],
    "optimizer": [told(one.numpy()) for one in (kept() if callable(kept) else kept)],
    "parameters": model.count_params(),
}))
"""

NAMES = {"keras": ("m.keras", "m.h5", "m.weights.h5"), "tf_keras": ("m.h5", "m.keras", "weights.h5")}


def written(api: str, place: Path) -> dict[str, list[object]]:
    """Let a framework write its model, and return what it holds in memory."""
    quiet = {"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-W", "ignore", "-c", WRITE, api, str(place), *NAMES[api]]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **quiet}, check=True, timeout=300
    )
    return json.loads(done.stdout.splitlines()[-1])


def held(checkpoint: Checkpoint, *, named: bool) -> list[list[object]]:
    """Return what is read, as the framework tells it."""
    from hashlib import sha256

    return sorted(
        [
            str(one.path[0]) if named else "",
            [one.dtype.name, list(one.shape), sha256(one.tobytes()).hexdigest()],
        ]
        for one in checkpoint.tensors
        if one.role is Role.WEIGHTS
    )


@pytest.mark.framework
@pytest.mark.parametrize("api", ["keras", "tf_keras"])
def test_values_and_names_are_keras_own(api: str, tmp_path: Path) -> None:
    from hashlib import sha256

    truth = written(api, tmp_path)
    for name in NAMES[api]:
        named = (api, name) != ("tf_keras", "m.keras")  # which doesn't keep the names beside the variables
        expected = sorted([layer if named else "", told] for layer, _, told in truth["layers"])
        with open_checkpoint(tmp_path / name) as checkpoint:
            assert held(checkpoint, named=named) == expected, name
            optimizer = [one for one in checkpoint.tensors if one.role is Role.OPTIMIZER]
            digests = sorted(sha256(one.tobytes()).hexdigest() for one in optimizer)
            wanted = sorted(digest for _, _, digest in truth["optimizer"])
            assert digests == ([] if name == "weights.h5" else wanted), name
            assert (
                sum(one.size for one in checkpoint.tensors if one.role is Role.WEIGHTS) == truth["parameters"]
            )
            if name == "m.h5":
                last = sorted(str(one.path[-1]) for one in checkpoint.tensors if one.role is Role.WEIGHTS)
                assert last == sorted(weight for _, weight, _ in truth["layers"])
        assert verify(tmp_path / name).is_valid
