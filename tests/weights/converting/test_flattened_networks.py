"""Networks in which something is flattened or reshaped: each predicts what its twin does, or is refused."""

from __future__ import annotations

from pathlib import Path

from tests.support.frameworks import python_with_frameworks

TWINS = """
import os, sys
import keras, numpy as np, torch

from ckpttool.core.errors import UsageError
from ckpttool.ops.conversion import ConvertOptions
from ckpttool.ops.convert import convert

os.chdir(sys.argv[1])
K, nn, chance = keras.layers, torch.nn, np.random.default_rng(9)
image, noise, steps = keras.Input((4, 4, 3)), keras.Input((2,)), keras.Input((9, 4))
GIVEN = {id(one): chance.normal(size=(2, *one.shape[1:])).astype("f4") for one in (image, noise, steps)}


def model(inputs, outputs):
    made = keras.Model(inputs, outputs)
    made.set_weights([chance.normal(size=one.shape) ** 2 * 0.1 + 0.1 for one in made.weights])
    return made


def refused(source, options, why):
    try:
        convert(source, "out.pth" if source.endswith(("h5", "keras")) else "out.npz", options)
    except UsageError as failure:
        assert why in str(failure), (why, failure)
        return
    raise AssertionError(f"{source}: {why!r} was not refused")


def require_refused(network, why):
    for ending in ("keras", "h5"):
        network.save(f"refused.{ending}")
        refused(f"refused.{ending}", ConvertOptions(layout="torch", only="weights", force=True), why)
    if any(len(one.shape) == 2 and max(one.shape) > 3 for one in network.weights):
        network.save_weights("refused.weights.h5")
        refused("refused.weights.h5", ConvertOptions(layout="torch", force=True), ALONE.get(why, UNWIRED))


def encoded(x):
    return K.Flatten()(K.Conv2D(4, 3, padding="same", name="conv")(x))


UNWIRED = "which isn't recorded"
ALONE = {"reset_after": "does not show whether reset_after is set"}
flat = encoded(image)
mean, variance = K.Dense(6, name="mean")(flat), K.Dense(6, name="variance")(flat)
heads = model(image, K.Add()([mean, variance]))
back = K.Reshape((4, 4, 5))(K.Dense(80, name="back")(K.Add()([mean, variance])))
joined = K.Concatenate()([K.Flatten()(image), noise])
turned = K.Permute((3, 1, 2))(K.Conv2D(4, 3, name="conv")(image))
REFUSED = {
    "a Reshape uses its output": [
        model(image, K.Conv2DTranspose(3, 2, name="up")(back)),
        model(noise, K.Conv2DTranspose(3, 2)(K.Reshape((4, 4, 5))(K.Dense(80, name="back")(noise)))),
    ],
    "it follows a Flatten": [
        model(image, K.Dense(5, name="fc")(K.BatchNormalization(name="bn")(K.Flatten()(image)))),
        model(image, K.Dense(5, name="fc")(K.LayerNormalization(name="ln")(encoded(image)))),
        model(
            [image, noise],
            K.Add()([K.Dense(5, name="one")(flat), K.Dense(5, name="two")(joined)]),
        ),
    ],
    "it follows a Permute": [
        model(image, K.Dense(5, name="fc")(K.Flatten()(turned))),
    ],
    "it follows a Lambda": [model(image, K.Dense(5, name="fc")(K.Lambda(lambda x: x)(flat)))],
    "reset_after": [
        model(steps, K.GRU(6, reset_after=False, use_bias=False, name="gru")(steps)),
    ],
}
for why, networks in REFUSED.items():
    for network in networks:
        require_refused(network, why)


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.mean, self.variance = nn.Linear(64, 6), nn.Linear(64, 6)

    def forward(self, x):
        x = self.conv(x.movedim(-1, 1)).flatten(1)
        return self.mean(x) + self.variance(x)


class Series(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.dense, self.fc = nn.Conv1d(4, 6, 3), nn.Linear(4, 4), nn.Linear(42, 2)

    def forward(self, x):
        return self.fc(self.conv(self.dense(x).movedim(-1, 1)).flatten(1))


class Squeezed(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4, 4)
        self.last = nn.Linear(64, 2)

    def forward(self, x):
        x = self.conv(x.movedim(-1, 1))
        return self.last((x * self.fc(x.mean((2, 3)))[:, :, None, None]).flatten(1))


x = K.Conv1D(6, 3, name="conv")(K.Dense(4, name="dense")(steps))
series = model(steps, K.Dense(2, name="fc")(K.Flatten()(K.Dropout(0.5)(x))))
x = K.Conv2D(4, 3, padding="same", name="conv")(image)
gate = K.Reshape((1, 1, 4))(K.Dense(4, name="fc")(K.GlobalAveragePooling2D()(x)))
squeezed = model(image, K.Dense(2, name="last")(K.Flatten()(K.Multiply()([x, gate]))))
NETWORKS = (heads, Heads(), image), (series, Series(), steps), (squeezed, Squeezed(), image)
for network, twin, given in NETWORKS:
    values = torch.from_numpy(GIVEN[id(given)])
    torch.save(twin.state_dict(), "twin.pth")
    with torch.no_grad():
        wanted, fresh = network(values, training=False), twin(values)
        for ending in ("keras", "h5"):
            network.save(f"net.{ending}")
            for options in ({"layout": "torch", "only": "weights"}, {"model": "twin.pth"}):
                convert(f"net.{ending}", "made.pth", ConvertOptions(**options, force=True))
                made = type(twin)()
                made.load_state_dict(torch.load("made.pth", weights_only=True))
                assert np.ptp(wanted) > 1e-3 and np.abs(made(values) - wanted).max() < 1e-4, (options, ending)
            convert("twin.pth", f"back.{ending}", ConvertOptions(model=f"net.{ending}", force=True))
            found = keras.models.load_model(f"back.{ending}", compile=False)(values, training=False)
            assert np.ptp(fresh) > 1e-4 and np.abs(found - fresh).max() < 1e-5, ending


class Swapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.second, self.first, self.third = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)


named = [K.Dense(units, name=name) for name, units in (("alpha", 6), ("beta", 6), ("last", 3))]
square = keras.Sequential([keras.Input((6,)), *named])
square.save("square.keras")
torch.save(Swapped().state_dict(), "swapped.pth")
pairs = "alpha → second, beta → first (--by-order"
refused("square.keras", ConvertOptions(model="swapped.pth", force=True), pairs)
made = convert("square.keras", "out.pth", ConvertOptions(model="swapped.pth", by_order=True, force=True))
assert any("by the order of their layers alone" in note for note in made.notes)
"""


def test_each_predicts_the_same_or_is_refused(tmp_path: Path) -> None:
    python_with_frameworks("-c", TWINS, tmp_path)
