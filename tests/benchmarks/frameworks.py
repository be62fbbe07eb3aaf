"""The checkpoints of other frameworks, against the framework that wrote them.

Each is written by a process of its own: two frameworks in one may crash, and what one imports stays there.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.benchmarks import peers
from tests.benchmarks.claims import PYTHON, Claim, Group, MakeGroup, Scale, own_command, peer_command, size_of
from tests.benchmarks.measure import environment

_TENSORS = 256
# So many float32 rows of 1,024 in each of 256 tensors fill as many MiB.
_WRITE_TENSORFLOW = f"""
import sys, tensorflow as tf
tf.random.set_seed(20)
rows = int(sys.argv[2])
layers = [tf.Variable(tf.random.normal((rows, 1024))) for _ in range({_TENSORS})]
tf.train.Checkpoint(layers=layers).write(sys.argv[1])
"""
_WRITE_KERAS = f"""
import sys, keras
keras.utils.set_random_seed(20)
rows = keras.Input((int(sys.argv[2]),))
layers = [keras.layers.Dense(1024, use_bias=False)(rows) for _ in range({_TENSORS})]
keras.Model(rows, layers).save_weights(sys.argv[1])
"""
_WRITE_FLUID = f"""
import sys, paddle
paddle.enable_static()
paddle.seed(20)
for index in range({_TENSORS}):
    paddle.static.create_parameter([int(sys.argv[2]), 1024], "float32", name=f"fc_{{index}}.w_0")
executor = paddle.static.Executor(paddle.CPUPlace())
executor.run(paddle.static.default_startup_program())
program = paddle.static.default_main_program()
paddle.static.io.save_vars(executor, sys.argv[1], program, predicate=lambda variable: variable.persistable)
"""
_WRITE_DCP = f"""
import sys, torch
from torch.distributed import checkpoint
torch.manual_seed(20)
tensors = {{f"layers.{{index}}.weight": torch.randn(int(sys.argv[2]), 1024) for index in range({_TENSORS})}}
checkpoint.save(tensors, checkpoint_id=sys.argv[1], no_dist=True)
"""


@dataclass(frozen=True, slots=True)
class Listing:
    """A kind of checkpoint, and how its framework lists the tensors in it.

    Attributes:
        kind: In the reader's words.
        packages: What has to be installed.
        name: Of the file, directory or prefix that is written.
        write: Script that writes it.
        peer: Name of the framework's listing.
        list: Script that lists it.
        ratio: Most of our time, as a part of the framework's.
    """

    kind: str
    packages: tuple[str, ...]
    name: str
    write: str
    peer: str
    list: str
    ratio: float


TENSORFLOW = Listing(
    "a TensorFlow checkpoint",
    ("tensorflow",),
    "ckpt",
    _WRITE_TENSORFLOW,
    "tf.train.list_variables",
    peers.LIST_TENSORFLOW,
    ratio=0.034,
)
KERAS = Listing(
    "Keras weights",
    ("keras", "h5py", "tensorflow"),
    "model.weights.h5",
    _WRITE_KERAS,
    "keras, h5py, list",
    peers.LIST_KERAS,
    ratio=0.065,
)
FLUID = Listing(
    "a Fluid directory",
    ("paddle",),
    "fluid",
    _WRITE_FLUID,
    "paddle, load_program_state",
    peers.LIST_FLUID,
    ratio=0.09,
)
DCP = Listing(
    "a DCP directory",
    ("torch",),
    "dcp",
    _WRITE_DCP,
    "torch, read_metadata",
    peers.LIST_DCP,
    ratio=0.09,
)


def tensorflow_checkpoint(folder: Path, scale: Scale) -> Group:
    """Measure ``inspect`` and ``verify`` on a TensorFlow checkpoint."""
    listed = _listed(TENSORFLOW, folder, scale)
    job = f"verify {TENSORFLOW.kind} of {size_of(scale.mebibytes)}, {_TENSORS} tensors"
    claim = Claim(job, "verify", "tensorflow, isfinite", ratio=0.095, resident=150)
    if listed.skipped is not None:
        return Group((), (*listed.claims, claim), listed.skipped)
    path = folder / TENSORFLOW.name
    commands = (
        own_command("verify", "verify", path),
        peer_command("tensorflow, isfinite", peers.VERIFY_TENSORFLOW, path),
    )
    return Group((*listed.commands, *commands), (*listed.claims, claim))


def keras_weights(folder: Path, scale: Scale) -> Group:
    """Measure ``inspect`` on the weights that Keras 3 writes."""
    return _listed(KERAS, folder, scale)


def fluid_directory(folder: Path, scale: Scale) -> Group:
    """Measure ``inspect`` on a directory with a file a variable."""
    return _listed(FLUID, folder, scale)


def dcp_directory(folder: Path, scale: Scale) -> Group:
    """Measure ``inspect`` on a directory of torch.distributed.checkpoint."""
    return _listed(DCP, folder, scale)


GROUPS: tuple[MakeGroup, ...] = (tensorflow_checkpoint, keras_weights, fluid_directory, dcp_directory)


def _listed(listing: Listing, folder: Path, scale: Scale) -> Group:
    """Return ``inspect`` against the framework's own listing; skipped where that is not installed."""
    job = f"inspect {listing.kind} of {size_of(scale.mebibytes)}, {_TENSORS} tensors"
    claim = Claim(job, "inspect", listing.peer, ratio=listing.ratio, resident=150)
    skipped = lacking(listing)
    if skipped is not None:
        return Group((), (claim,), skipped)
    path = folder / listing.name
    write(listing, path, scale.mebibytes)
    commands = (
        own_command("inspect", "inspect", "--json", path),
        peer_command(listing.peer, listing.list, path),
    )
    return Group(commands, (claim,))


def lacking(listing: Listing) -> str | None:
    """Return why a listing can't be measured, or None."""
    absent = [package for package in listing.packages if importlib.util.find_spec(package) is None]
    return f"not installed: {', '.join(absent)}" if absent else None


def write(listing: Listing, path: Path, mebibytes: int) -> None:
    """Let the framework write it, and wait until it is on the disk."""
    quiet = {**environment(), "TF_CPP_MIN_LOG_LEVEL": "3", "GLOG_minloglevel": "3"}
    command = [PYTHON, "-c", listing.write, str(path), str(mebibytes)]
    subprocess.run(command, env=quiet, stdout=subprocess.DEVNULL, check=True)
    os.sync()
