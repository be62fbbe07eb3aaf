"""``verify --predict`` against loading and running by hand, in one process of the framework's own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.benchmarks import peers
from tests.benchmarks.claims import PYTHON, Claim, Group, MakeGroup, Scale, own_command, peer_command, size_of
from tests.benchmarks.measure import environment

_RATIO = 1.15
_MEBIBYTES = 200
# Each layer is a float32 matrix of 1,024 by 1,024: 4 MiB.
_NET = """
import torch
class Net(torch.nn.Sequential):
    def __init__(self, layers: int) -> None:
        super().__init__(*(torch.nn.Linear(1024, 1024, bias=False) for _ in range(layers)))
"""
_WRITE_STATE = f"""
import os, sys, torch
{_NET}
torch.manual_seed(20)
torch.save(Net(int(sys.argv[2])).state_dict(), sys.argv[1])
"""
_WRITE_TORCHSCRIPT = f"""
import sys, torch
{_NET}
torch.manual_seed(20)
torch.jit.save(torch.jit.trace(Net(int(sys.argv[2])), torch.zeros(1, 1024)), sys.argv[1])
"""
_WRITE_SAVEDMODEL = """
import sys, tensorflow as tf
tf.random.set_seed(20)
class Net(tf.Module):
    def __init__(self):
        self.layers = [tf.Variable(tf.random.normal((1024, 1024)) / 32) for _ in range(int(sys.argv[2]))]
    @tf.function(input_signature=[tf.TensorSpec((None, 1024), tf.float32, name="x")])
    def __call__(self, x):
        for layer in self.layers:
            x = x @ layer
        return {"y": x}
net = Net()
tf.saved_model.save(net, sys.argv[1], signatures=net.__call__)
"""
_WRITE_KERAS = """
import sys, keras
keras.utils.set_random_seed(20)
layers = [keras.layers.Dense(1024, use_bias=False) for _ in range(int(sys.argv[2]))]
keras.Sequential([keras.Input((1024,)), *layers]).save(sys.argv[1])
"""
_WRITE_PADDLE = """
import sys, zlib, paddle
paddle.enable_static()
paddle.seed(20)
x = y = paddle.static.data("x", [-1, 1024], "float32")
for _ in range(int(sys.argv[2])):
    y = paddle.static.nn.fc(y, 1024, bias_attr=False)
executor = paddle.static.Executor(paddle.CPUPlace())
executor.run(paddle.static.default_startup_program())
paddle.static.save_inference_model(sys.argv[1].removesuffix(".pdmodel"), [x], [y], executor)
"""


@dataclass(frozen=True, slots=True)
class Model:
    """A kind of model, and how people load and run it.

    Attributes:
        kind: In the reader's words.
        package: What has to be installed.
        name: Of the file or directory that is written.
        write: Script that writes it, of so many layers.
        peer: Name of the script that runs it.
        run: Script that runs it.
        options: What ``verify --predict`` has to be told; NET is where the model's class lies.
    """

    kind: str
    package: str
    name: str
    write: str
    peer: str
    run: str
    options: tuple[str, ...] = ()


_SHAPE = ("--input-shape", "1,1024")
_STATE = Model(
    "a state dict",
    "torch",
    "model.pth",
    _WRITE_STATE,
    "torch by hand",
    peers.RUN_STATE,
    ("--model", "NET:Net", *_SHAPE),
)
_TORCHSCRIPT = Model(
    "TorchScript",
    "torch",
    "model.pt",
    _WRITE_TORCHSCRIPT,
    "torch.jit by hand",
    peers.RUN_TORCHSCRIPT,
    _SHAPE,
)
_SAVEDMODEL = Model(
    "a SavedModel", "tensorflow", "saved", _WRITE_SAVEDMODEL, "tensorflow by hand", peers.RUN_SAVEDMODEL
)
_KERAS = Model("a Keras model", "keras", "m.keras", _WRITE_KERAS, "keras by hand", peers.RUN_KERAS)
_PADDLE = Model("a Paddle model", "paddle", "m.pdmodel", _WRITE_PADDLE, "paddle by hand", peers.RUN_PADDLE)


def _prediction(model: Model, folder: Path, scale: Scale) -> Group:
    mebibytes = min(scale.mebibytes, _MEBIBYTES)
    job = f"verify --predict of {model.kind} of {size_of(mebibytes)}"
    claim = Claim(job, "verify --predict", model.peer, ratio=_RATIO)
    if importlib.util.find_spec(model.package) is None:
        return Group((), (claim,), f"not installed: {model.package}")
    path, net = folder / model.name, folder / "net.py"
    layers = str(mebibytes // 4)
    net.write_text(f"{_NET.replace('layers: int', f'layers: int = {layers}')}", encoding="utf-8")
    quiet = {**environment(), "TF_CPP_MIN_LOG_LEVEL": "3", "GLOG_minloglevel": "3"}
    command = [PYTHON, "-c", model.write, str(path), layers]
    subprocess.run(command, env=quiet, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
    os.sync()
    options = (one.replace("NET", str(net)) for one in model.options)
    commands = (
        own_command("verify --predict", "verify", "--quiet", path, "--predict", *options),
        peer_command(model.peer, model.run, path),
    )
    return Group(commands, (claim,))


def _named(model: Model) -> MakeGroup:
    """Return what makes a model's group, under the name that ``--only`` takes."""
    make = partial(_prediction, model)
    make.__name__ = f"predict_{model.name.partition('.')[2] or model.name}"  # type: ignore[attr-defined]
    return make


GROUPS: tuple[MakeGroup, ...] = tuple(map(_named, (_STATE, _TORCHSCRIPT, _SAVEDMODEL, _KERAS, _PADDLE)))
