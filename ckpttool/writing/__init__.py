"""Formats that can be written: one module and one line in the table for each.

``ops.convert`` opens a source, brings its content into the wished form, asks the writer what it can't hold,
lets it write into a staged target, opens that again and compares every tensor before it appears.
"""

from __future__ import annotations

from importlib import import_module

from ckpttool.writing.interface import Writer

WRITERS: dict[str, str] = {
    "pytorch": "pytorch:PyTorchWriter",
    "safetensors": "safetensors:SafetensorsWriter",
    "tensorflow": "tensorflow:TensorFlowWriter",
    "savedmodel": "savedmodel:SavedModelWriter",
    "keras": "keras:KerasWriter",
    "keras-h5": "keras:KerasH5Writer",
    "hdf5": "hdf5:Hdf5Writer",
    "numpy": "numpy_zip:NpzWriter",
    "fluid": "fluid:FluidWriter",
    "torch-dcp": "torch_dcp:TorchDcpWriter",
}
"""Where each writer's class lies in this package, by the name of its format; imported when it is chosen."""

SUFFIXES: dict[str, str] = {
    ".pt": "pytorch",
    ".pth": "pytorch",
    ".pth.tar": "pytorch",
    ".ckpt": "pytorch",
    ".bin": "pytorch",
    ".safetensors": "safetensors",
    ".index": "tensorflow",
    ".keras": "keras",
    ".weights.h5": "keras-h5",
    ".h5": "keras-h5",
    ".hdf5": "hdf5",
    ".npz": "numpy",
}
"""Which format the ending of a target's name means; the longest one counts."""


def format_of(name: str) -> str | None:
    """Return the format that a target's name means, or None."""
    endings = sorted((ending for ending in SUFFIXES if name.lower().endswith(ending)), key=len)
    return SUFFIXES[endings[-1]] if endings else None


def writer_of(name: str) -> Writer:
    """Return the writer of a format; ``name`` is a key of ``WRITERS``."""
    module, _, kind = WRITERS[name].partition(":")
    made: Writer = getattr(import_module(f"ckpttool.writing.{module}"), kind)()
    return made
