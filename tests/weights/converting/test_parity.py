"""A network of Keras and its twin of PyTorch predict the same, whichever the weights came from."""

from __future__ import annotations

from pathlib import Path

from tests.support.frameworks import python_with_frameworks

TWINS = """
import os, sys
import keras, numpy as np, torch

from ckpttool.ops.conversion import ConvertOptions
from ckpttool.ops.convert import convert

os.chdir(sys.argv[1])
keras.utils.set_random_seed(3)
layers, nn, chance = keras.layers, torch.nn, np.random.default_rng(9)


def in_keras(has_names):
    name = lambda text: {"name": text} if has_names else {}
    image, series = keras.Input((12, 12, 3)), keras.Input((6, 5))
    x = layers.Conv2D(8, 3, **name("conv1"))(image)
    x = layers.BatchNormalization(epsilon=1e-5, **name("bn1"))(x)
    x = layers.MaxPooling2D()(layers.ReLU()(x))
    x = layers.Flatten()(layers.ReLU()(layers.Conv2D(8, 3, **name("conv2"))(x)))
    x = layers.Dense(16, **name("fc1"))(x)
    x = layers.Concatenate()([x, layers.LSTM(7, **name("lstm"))(series)])
    model = keras.Model([image, series], layers.Dense(4, **name("fc2"))(x))
    model.set_weights([chance.normal(size=one.shape) ** 2 * 0.03 + 0.001 for one in model.weights])
    return model


class InTorch(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.bn1, self.conv2 = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3)
        self.fc1, self.lstm, self.fc2 = nn.Linear(72, 16), nn.LSTM(5, 7, batch_first=True), nn.Linear(23, 4)

    def forward(self, image, series):
        x = torch.max_pool2d(torch.relu(self.bn1(self.conv1(image))), 2)
        x = self.fc1(torch.relu(self.conv2(x)).flatten(1))
        return self.fc2(torch.cat([x, self.lstm(series)[0][:, -1]], 1))


image, series = (chance.normal(size=shape).astype("f4") for shape in ((2, 12, 12, 3), (2, 6, 5)))


def of_keras(model):
    with torch.no_grad():
        return model([image, series], training=False).numpy()


def of_torch(path):
    module = InTorch().eval()
    module.load_state_dict(torch.load(path, weights_only=True))
    with torch.no_grad():
        return module(torch.from_numpy(np.moveaxis(image, -1, 1).copy()), torch.from_numpy(series)).numpy()


def require(found, wanted):
    assert np.ptp(wanted) > 1e-3 and np.abs(found - wanted).max() < 1e-5, (found, wanted)


for has_names in (True, False):
    model, module = in_keras(has_names), InTorch()
    module.bn1.running_var += 0.5
    torch.save({"epoch": 3, "model_state_dict": module.state_dict()}, "torch.pth")
    torch.save(module.state_dict(), "bare.pth")
    for ending in ("keras", "h5"):
        model.save(f"model.{ending}")
        convert(f"model.{ending}", "a.pth", ConvertOptions(model="torch.pth", force=True))
        require(of_torch("a.pth"), of_keras(model))
        options = ConvertOptions(model=f"model.{ending}", only="weights", force=True)
        convert("torch.pth", f"b.{ending}", options)
        require(of_keras(keras.models.load_model(f"b.{ending}")), of_torch("bare.pth"))
        if has_names:
            convert(f"model.{ending}", "c.pth", ConvertOptions(layout="torch", only="weights", force=True))
            require(of_torch("c.pth"), of_keras(model))
"""


def test_both_predict_the_same(tmp_path: Path) -> None:
    python_with_frameworks("-c", TWINS, tmp_path)
