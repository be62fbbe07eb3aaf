"""Recordings: an ``.npz`` with inputs and outputs, and what made them, to compare with later.

``input/<name>`` and ``output/<name>`` are arrays; ``ckpttool`` is a text, JSON that says which versions and
which seed. Any ``.npz`` with ``output/<name>`` arrays can be compared with.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ckpttool.predict.inputs import dtype_named, read_arrays
from ckpttool.predict.interface import Arrays, LoadFailed
from ckpttool.report import error
from ckpttool.wire.atomic import write_atomically

_INPUT, _OUTPUT, _ABOUT = "input/", "output/", "ckpttool"
SCHEMA = "ckpttool.recording/1"


@dataclass(frozen=True, slots=True)
class Recording:
    """Inputs and the outputs that belong to them; ``about`` says what made them."""

    inputs: Arrays
    outputs: Arrays
    about: Mapping[str, Any]


def is_recording(arrays: Arrays) -> bool:
    """Tell whether the arrays of a file are a recording's, with inputs, and not inputs alone."""
    are_ours = all(name == _ABOUT or name.startswith((_INPUT, _OUTPUT)) for name in arrays)
    kinds = {name.partition("/")[0] for name in arrays}
    return are_ours and {"input", "output"} <= kinds


def read_recording(path: str) -> Recording:
    """Return a recording.

    Raises:
        LoadFailed: There is none that can be read.
    """
    arrays = read_arrays(path, "recording-unreadable")
    about = _read_about(arrays.pop(_ABOUT, None))
    for name, dtype in _extra_dtypes(about).items():
        if name in arrays and arrays[name].dtype.kind == "f":
            arrays[name] = arrays[name].astype(dtype_named(dtype))
    outputs = _arrays_below(_OUTPUT, arrays)
    if not outputs:
        raise LoadFailed(error("recording-unreadable", f"no {_OUTPUT}<name> is in it", path))
    return Recording(_arrays_below(_INPUT, arrays), outputs, about)


def _extra_dtypes(about: Mapping[str, Any]) -> Mapping[str, str]:
    """Return the types that an ``.npz`` can't hold, by the arrays that had them."""
    told = about.get("dtypes")
    return {name: one for name, one in told.items() if one == "bfloat16"} if isinstance(told, dict) else {}


def _read_about(text: np.ndarray[Any, Any] | None) -> Mapping[str, Any]:
    try:
        about = json.loads(str(text)) if text is not None and text.dtype.kind == "U" else {}
    except (ValueError, RecursionError):
        return {}
    return about if isinstance(about, dict) else {}


def _arrays_below(prefix: str, arrays: Arrays) -> dict[str, np.ndarray[Any, Any]]:
    return {name[len(prefix) :]: array for name, array in arrays.items() if name.startswith(prefix)}


def write_recording(path: str, recording: Recording) -> None:
    """Write a recording, whole or not at all.

    Raises:
        OSError: It can't be written.
    """
    arrays = {f"{_INPUT}{name}": array for name, array in recording.inputs.items()}
    arrays |= {f"{_OUTPUT}{name}": array for name, array in recording.outputs.items()}
    dtypes = {name: str(array.dtype) for name, array in arrays.items() if array.dtype.kind == "V"}
    about = {"schema": SCHEMA, **recording.about, **({"dtypes": dtypes} if dtypes else {})}
    members: dict[str, Any] = {name: _storable(array) for name, array in arrays.items()}
    members[_ABOUT] = np.array(json.dumps(about))
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **members)
    write_atomically(os.path.realpath(path), buffer.getvalue())  # a link stays one


def _storable(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return an array that an ``.npz`` can hold: bfloat16 becomes float32 without loss, objects text."""
    if array.dtype.kind == "O":
        return array.astype(str)
    return array.astype(np.float32) if array.dtype.kind == "V" else array
