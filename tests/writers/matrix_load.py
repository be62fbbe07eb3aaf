"""Loads checkpoints with a framework, and prints the SHA-256 of each tensor: one process a framework."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

Found = Iterator[tuple[str, Any]]
_ATTRIBUTE = "/.ATTRIBUTES/VARIABLE_VALUE"


def pytorch(path: str) -> Found:
    import torch

    for name, tensor in _leaves(torch.load(path, weights_only=True, mmap=True), ()):
        yield name, _bytes(tensor)


def pickled(path: str) -> Found:
    """Load what holds values of NumPy, which no file of ``torch.save`` loads with ``weights_only``."""
    import torch

    for name, tensor in _leaves(torch.load(path, weights_only=False, mmap=True), ()):
        yield name, _bytes(tensor)


def dcp(path: str) -> Found:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    with tempfile.TemporaryDirectory() as folder:
        dcp_to_torch_save(path, f"{folder}/whole.pth")
        yield from [*pickled(f"{folder}/whole.pth")]


def safetensors(path: str) -> Found:
    from safetensors import safe_open

    with safe_open(path, "pt") as opened:
        for name in opened.keys():  # noqa: SIM118 - it is no mapping
            yield name, _bytes(opened.get_tensor(name))


def shards(path: str) -> Found:
    index = json.loads(Path(path, "model.safetensors.index.json").read_text())
    for name in set(index["weight_map"].values()):
        yield from safetensors(os.path.join(path, name))


def numpy(path: str) -> Found:
    with np.load(path) as opened:
        for name in opened.files:
            if isinstance(opened[name], np.ndarray):
                yield name, opened[name].tobytes()


def hdf5(path: str) -> Found:
    import h5py

    found: list[tuple[str, bytes]] = []

    def visit(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset) and name != "ckpttool.content":
            found.append((name.replace("/", "."), np.asarray(item[()]).tobytes()))

    with h5py.File(path) as opened:
        opened.visititems(visit)
    return iter(found)


def tensorflow(path: str) -> Found:
    import tensorflow as tf

    reader = tf.train.load_checkpoint(path)
    for key in reader.get_variable_to_shape_map():
        if key.endswith(_ATTRIBUTE) or (not key.startswith("_CHECKPOINTABLE") and key != "ckpttool.content"):
            value = reader.get_tensor(key)
            data = value if isinstance(value, bytes) else np.asarray(value).tobytes()
            yield key.removesuffix(_ATTRIBUTE).replace("/", "."), data


def savedmodel(path: str) -> Found:
    import tensorflow as tf

    assert tf.saved_model.load(path) is not None
    return tensorflow(os.path.join(path, "variables", "variables"))


def fluid(path: str) -> Found:
    from paddle.base import core

    for file in sorted(Path(path, "checkpoint_0", "__model__").iterdir()):
        if file.name != "_SUCCESS":
            tensor = core.LoDTensor()
            core.load_lod_tensor(tensor, str(file))
            yield file.name, np.array(tensor).tobytes()
    for file in sorted(Path(path, "checkpoint_0").glob("__lookup_table__/*")):
        table = core.SelectedRows()
        core.load_selected_rows(table, str(file))
        yield f"{file.parent.name}.{file.name}.rows", np.array(table.rows(), "<i8").tobytes()
        yield f"{file.parent.name}.{file.name}.values", np.array(table.get_tensor()).tobytes()


def _leaves(node: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    import torch

    if isinstance(node, torch.Tensor):
        yield ".".join(path), node
    elif isinstance(node, dict):
        for key, child in node.items():
            yield from _leaves(child, (*path, str(key)))
    elif isinstance(node, list | tuple):
        for at, child in enumerate(node):
            yield from _leaves(child, (*path, str(at)))


def _bytes(tensor: Any) -> bytes:
    import torch

    data: bytes = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return data


LOADERS: dict[str, Callable[[str], Found]] = {
    "pytorch": pytorch,
    "pickle": pickled,
    "torch-dcp": dcp,
    "safetensors": safetensors,
    "shards": shards,
    "numpy": numpy,
    "hdf5": hdf5,
    "keras-h5": hdf5,
    "tensorflow": tensorflow,
    "savedmodel": savedmodel,
    "fluid": fluid,
}


def main() -> None:
    """Answer what stands on stdin: a list of [kind, path]."""
    answers = {}
    for kind, path in json.load(sys.stdin):
        answers[path] = {name: hashlib.sha256(data).hexdigest() for name, data in LOADERS[kind](path)}
    sys.stderr.flush()
    print("\n" + json.dumps(answers))


if __name__ == "__main__":
    main()
