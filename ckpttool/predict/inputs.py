"""Inputs of a model, from a file or generated, and recordings of its outputs.

A recording is an ``.npz`` with arrays ``input/<name>`` and ``output/<name>``, and a JSON text ``ckpttool``
with the versions and the seed. Any ``.npz`` with ``output/<name>`` arrays can be compared with.
"""

from __future__ import annotations

import io
import json
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any
from zipfile import BadZipFile

import numpy as np

from ckpttool.core.report import error
from ckpttool.predict.interface import Arrays, LoadFailed
from ckpttool.predict.request import InputSpec
from ckpttool.storage.directories import write_atomically

_UNREADABLE = (ValueError, KeyError, EOFError, BadZipFile, zlib.error, NotImplementedError, RuntimeError)
"""Errors of NumPy and zipfile for a file that is no ``.npz`` or ``.npy``, or a damaged one."""
_WORDS = ("a", "checkpoint", "is", "only", "as", "good", "its", "prediction")
_ROWS, _LENGTHS = (3, 1), (16, 96, 3, 1)
"""Values to try for unknown sizes. A recurrent weight has no effect on a sequence of a single step; 16 and 96
can be halved often enough for images; some models accept only few steps, or one row.
"""
_INPUT, _OUTPUT, _ABOUT = "input/", "output/", "ckpttool"
SCHEMA = "ckpttool.recording/1"


def read_arrays(path: str, code: str) -> dict[str, np.ndarray[Any, Any]]:
    """Return the arrays of an ``.npz`` by name, or the one of an ``.npy`` as ``"0"``; nothing is unpickled.

    Raises:
        LoadFailed: It can't be read; the finding has ``code``.
    """
    try:
        with open(path, "rb") as file:
            content: Any = np.load(file, allow_pickle=False)
            arrays = {"0": content} if isinstance(content, np.ndarray) else _members(content)
    except OSError as failure:
        raise LoadFailed(error(code, f"it can't be read: {failure.strerror or failure}", path)) from failure
    except MemoryError as failure:
        raise LoadFailed(error(code, "its arrays don't fit into memory", path)) from failure
    except _UNREADABLE as failure:
        raise LoadFailed(error(code, _unreadable_reason(failure, path), path)) from failure
    if not arrays:
        raise LoadFailed(error(code, "it has no arrays", path))
    return arrays


def _unreadable_reason(failure: Exception, path: str) -> str:
    """Return the reason why NumPy can't read a file."""
    # For an array of objects, and for anything that is no array, NumPy advises ``allow_pickle=True``. That
    # would run code in the file, so its message is replaced.
    if "allow_pickle" not in str(failure):
        return f"it can't be read: {failure}"
    with open(path, "rb") as file:
        is_known = file.read(2).startswith((b"\x93N", b"PK", b"\x80"))
    return "it holds Python objects, which are not loaded" if is_known else "not an .npy or .npz file"


def _members(archive: Any) -> dict[str, np.ndarray[Any, Any]]:
    with archive:
        arrays = {name: archive[name] for name in archive.files}
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray):
            raise ValueError(f"{name!r} is not an array")
    return arrays


def sized_specs(specs: Sequence[InputSpec], batch_size: int | None) -> Iterator[tuple[InputSpec, ...]]:
    """Yield inputs with values for unknown sizes, to be tried in this order."""
    tried = set()
    for rows, length in product((batch_size,) if batch_size else _ROWS, _LENGTHS):
        sized = []
        for spec in specs:
            shape = [length if size is None else size for size in spec.shape]
            if shape and spec.shape[0] is None and not spec.is_sequence:
                shape[0] = rows
            sized.append(spec._replace(shape=tuple(shape)))
        if (candidate := tuple(sized)) not in tried:
            tried.add(candidate)
            yield candidate


def make_inputs(specs: Sequence[InputSpec], seed: int) -> dict[str, np.ndarray[Any, Any]]:
    """Return random values for inputs of known sizes; they depend only on the seed."""
    random = np.random.default_rng(seed)
    return {spec.name or str(at): _values(spec, random) for at, spec in enumerate(specs)}


def _values(spec: InputSpec, random: np.random.Generator) -> np.ndarray[Any, Any]:
    shape = tuple(size or 0 for size in spec.shape)
    if spec.dtype == "string":
        return np.array(random.choice(_WORDS, shape))
    if spec.dtype == "bool":
        return random.integers(0, 2, shape).astype(bool)
    is_whole = spec.dtype.startswith(("int", "uint"))
    # Bytes are pixels; the integers 0 and 1 are in every vocabulary.
    least, most = (0.0, 256.0) if spec.dtype == "uint8" else (0.0, 2.0) if is_whole else (-1.0, 1.0)
    low = least if spec.low is None else spec.low
    high = most if spec.high is None else spec.high
    if is_whole:
        return random.integers(int(low), int(high), shape, np.dtype(spec.dtype).type)
    values = random.uniform(low, high, shape)
    if spec.dtype.startswith("complex"):
        return (values + 1j * random.uniform(low, high, shape)).astype(spec.dtype)
    return values.astype(dtype_named(spec.dtype))


def dtype_named(name: str) -> np.dtype[Any]:
    """Return a dtype of NumPy, or ``bfloat16`` of ml_dtypes."""
    if name == "bfloat16":
        import ml_dtypes

        dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return dtype
    return np.dtype(name)


def other_values(inputs: Arrays, seed: int) -> dict[str, np.ndarray[Any, Any]]:
    """Return other inputs of the same shapes and dtypes, with random values in the same range."""
    # Values in the range of the given ones are valid for the model as well: indexes stay in its vocabulary.
    specs = [_spec_like(name, array) for name, array in inputs.items()]
    return {
        name: one.astype(inputs[name].dtype, copy=False) for name, one in make_inputs(specs, seed).items()
    }


def _spec_like(name: str, array: np.ndarray[Any, Any]) -> InputSpec:
    """Return the specification of an array; the range is the dtype's default if all values are equal."""
    if array.dtype.kind in "USO":
        return InputSpec(name, array.shape, "string")
    if array.dtype.kind == "b" or not array.size:
        return InputSpec(name, array.shape, array.dtype.name)
    if array.dtype.kind in "iu":  # a vocabulary has every index below its largest
        low, high = min(0, int(array.min())), int(array.max()) + 1
        return InputSpec(name, array.shape, array.dtype.name, low, high if high > low + 1 else low + 2)
    values = np.abs(array) if array.dtype.kind == "c" else array.astype(np.float64)
    least, most = float(values.min()), float(values.max())
    is_range = least < most and np.isfinite(most - least)
    return InputSpec(name, array.shape, array.dtype.name, *((least, most) if is_range else ()))


def name_inputs(given: Arrays, specs: Sequence[InputSpec], origin: str) -> dict[str, np.ndarray[Any, Any]]:
    """Return inputs by the names of the model, including those by position.

    Raises:
        LoadFailed: An input is missing, unknown or given twice.
    """
    names = [spec.name for spec in specs if spec.name is not None]
    if not names:
        return dict(given)
    renamed = {
        names[int(name)]
        if (name.isdecimal() and name not in names and int(name) < len(names))
        else name: array
        for name, array in given.items()
    }
    takes = f"the model takes {', '.join(names)}"
    if len(renamed) < len(given):
        raise LoadFailed(
            error("input-unknown", f"{origin} has the same input by name and by position ({takes})")
        )
    missing = [name for name in names if name not in renamed]
    if missing:
        raise LoadFailed(error("input-missing", f"no input {missing[0]!r} in {origin} ({takes})"))
    unknown = [name for name in renamed if name not in names]
    if unknown:
        raise LoadFailed(error("input-unknown", f"{origin} has an unknown input {unknown[0]!r} ({takes})"))
    return renamed


def positional(inputs: Arrays) -> tuple[list[Any], Mapping[str, Any]]:
    """Return the inputs by position, and the inputs by name."""
    places = sorted((name for name in inputs if name.isdecimal()), key=int)
    return [inputs[name] for name in places], {n: a for n, a in inputs.items() if not n.isdecimal()}


# Recordings -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Recording:
    """Inputs and their outputs; ``about`` has the checkpoint, the versions and the seed."""

    inputs: Arrays
    outputs: Arrays
    about: Mapping[str, Any]


def is_recording(arrays: Arrays) -> bool:
    """Return whether the arrays of a file are a recording with inputs, and not inputs alone."""
    are_ours = all(name == _ABOUT or name.startswith((_INPUT, _OUTPUT)) for name in arrays)
    kinds = {name.partition("/")[0] for name in arrays}
    return are_ours and {"input", "output"} <= kinds


def read_recording(path: str) -> Recording:
    arrays = read_arrays(path, "recording-unreadable")
    about = _read_about(arrays.pop(_ABOUT, None))
    # An .npz can't hold bfloat16: NumPy stores a dtype of ml_dtypes as raw bytes, of kind V. So such arrays
    # are stored as float32, without loss, and ``dtypes`` has the original dtype. Others write recordings,
    # too, so unknown names and dtypes are ignored.
    dtypes = about.get("dtypes")
    for name, dtype in dtypes.items() if isinstance(dtypes, dict) else ():
        if dtype == "bfloat16" and name in arrays and arrays[name].dtype.kind == "f":
            arrays[name] = arrays[name].astype(dtype_named(dtype))
    outputs = _arrays_below(_OUTPUT, arrays)
    if not outputs:
        raise LoadFailed(error("recording-unreadable", f"it has no {_OUTPUT}<name>", path))
    return Recording(_arrays_below(_INPUT, arrays), outputs, about)


def _read_about(text: np.ndarray[Any, Any] | None) -> Mapping[str, Any]:
    try:
        about = json.loads(str(text)) if text is not None and text.dtype.kind == "U" else {}
    except (ValueError, RecursionError):
        return {}
    return about if isinstance(about, dict) else {}


def _arrays_below(prefix: str, arrays: Arrays) -> dict[str, np.ndarray[Any, Any]]:
    return {name[len(prefix) :]: array for name, array in arrays.items() if name.startswith(prefix)}


def write_recording(path: str, recording: Recording) -> None:
    """Write a recording atomically.

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
    """Return an array for an ``.npz``: bfloat16 becomes float32 without loss, objects become text."""
    if array.dtype.kind == "O":
        return array.astype(str)
    return array.astype(np.float32) if array.dtype.kind == "V" else array
