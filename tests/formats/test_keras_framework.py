"""Files that Keras writes here and now: what it holds in memory is what is read, under the layers' names."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ckpttool import open_checkpoint
from ckpttool.checkpoint import Checkpoint, Role
from ckpttool.ops.diff import diff
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

UNNAMED = """
import json, os, sys
import numpy as np

api = __import__(sys.argv[1])
layers = api.layers
api.utils.set_random_seed(5)


def skipping():
    given = api.Input((6,))
    beside = layers.Dense(6)(given)
    found = layers.Dense(6)(layers.Dense(6, activation="relu")(given))
    return api.Model(given, layers.Dense(2)(layers.Add()([found, beside])))


def nested():
    given = api.Input((6,))
    inner, last = skipping(), layers.Dense(6)
    twice = layers.Dense(6)
    found = [inner(twice(layers.Dense(6)(given))), twice(given), last(given)]
    return api.Model(given, layers.Dense(1)(layers.Concatenate()(found)))


def wrapped(inner=None):
    given = api.Input((5, 6))
    beside = layers.TimeDistributed(layers.Dense(6))(given)
    found = layers.TimeDistributed(inner or layers.Dense(6))(given)
    return api.Model(given, layers.Concatenate()([layers.TimeDistributed(layers.Dense(6))(found), beside]))


def around():
    return wrapped(skipping())


def flat(layer, place):
    parts = getattr(layer, "layers", [layer.layer] if hasattr(layer, "layer") else [])
    own = [] if parts else [[place, one.numpy().tobytes().hex()] for one in layer.weights]
    return own + [one for part in parts for one in flat(part, [*place, part.name])]


makers = {"skip": skipping, "again": skipping, "nested": nested}
if sys.argv[1] == "keras":  # Keras 2 calls the weights of a wrapped layer by the wrapper alone
    makers |= {"wrapped": wrapped, "around": around}
truth = {}
for name, make in makers.items():
    model = make()
    noise = np.random.default_rng(0)
    model.set_weights([noise.normal(size=one.shape) for one in model.weights])
    files = [f"{name}.keras", f"{name}.h5"] + ([f"{name}.weights.h5"] if sys.argv[1] == "keras" else [])
    for file in files:
        (model.save_weights if "weights" in file else model.save)(os.path.join(sys.argv[2], file))
    truth[name] = {"files": files, "weights": flat(model, [])}
print(json.dumps(truth))
"""

NAMES = {"keras": ("m.keras", "m.h5", "m.weights.h5"), "tf_keras": ("m.h5", "m.keras", "weights.h5")}


def written(api: str, place: Path, script: str = WRITE) -> dict[str, Any]:
    """Let a framework write models, and return what it holds in memory."""
    quiet = {"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-W", "ignore", "-c", script, api, str(place), *NAMES[api]]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **quiet}, check=True, timeout=300
    )
    return json.loads(done.stdout.splitlines()[-1])


def held(checkpoint: Checkpoint) -> list[list[object]]:
    """Return what is read, as the framework tells it."""
    from hashlib import sha256

    return sorted(
        [
            str(one.path[0]),
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
        expected = sorted([layer, told] for layer, _, told in truth["layers"])
        with open_checkpoint(tmp_path / name) as checkpoint:
            assert held(checkpoint) == expected, name
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


@pytest.mark.framework
@pytest.mark.parametrize("api", ["keras", "tf_keras"])
def test_layers_that_nobody_named_are_called_as_keras_calls_them(api: str, tmp_path: Path) -> None:
    """They are numbered in the order in which they were made, their groups in that of the model."""
    for name, told in written(api, tmp_path, UNNAMED).items():
        expected = {(value, place[0], place[-1]) for place, value in told["weights"]}
        for file in told["files"]:
            with open_checkpoint(tmp_path / file) as checkpoint:
                found = {
                    (one.tobytes().hex(), str(one.path[0]), str(one.path[-2])) for one in checkpoint.tensors
                }
                assert found == expected, file
                assert not checkpoint.findings, file
        for one, other in itertools.combinations(told["files"], 2):
            found = diff(tmp_path / one, tmp_path / other)
            assert found.compared == found.unchanged == len(told["weights"]), (one, other)
            assert not (found.added or found.removed), (one, other)
            assert not found.renamed or name == "around", (one, other)  # .h5 has no step for the model inside
