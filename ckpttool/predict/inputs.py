"""What a model is run on: the user's file, a recording's inputs, the checkpoint's own, or made-up values."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any
from zipfile import BadZipFile

import numpy as np

from ckpttool.predict.interface import Arrays, LoadFailed
from ckpttool.predict.request import InputSpec
from ckpttool.report import error

_UNREADABLE = (ValueError, KeyError, EOFError, BadZipFile, zlib.error, NotImplementedError, RuntimeError)
"""What NumPy and zipfile raise for a file that isn't what its name says."""
_WORDS = ("a", "checkpoint", "is", "only", "as", "good", "its", "prediction")
_ROWS, _LENGTHS = (3, 1), (16, 96, 3, 1)
"""What unknown sizes become, the first that a model takes: weights that work from one step to the next do
nothing on a single one; 16 and 96 can be halved often enough for images; some take few steps, or one row.
"""


def read_arrays(path: str, code: str) -> dict[str, np.ndarray[Any, Any]]:
    """Return the arrays of an ``.npz`` by name, or the one of an ``.npy`` as ``"0"``; nothing is unpickled.

    Raises:
        LoadFailed: It is neither, with ``code``.
    """
    try:
        with open(path, "rb") as file:
            found = np.load(file, allow_pickle=False)
            arrays = {"0": found} if isinstance(found, np.ndarray) else _members(found)
    except OSError as failure:
        raise LoadFailed(error(code, f"it can't be read: {failure.strerror or failure}", path)) from failure
    except MemoryError as failure:
        raise LoadFailed(error(code, "what it holds doesn't fit into memory", path)) from failure
    except _UNREADABLE as failure:
        raise LoadFailed(error(code, _unreadable(failure, path), path)) from failure
    if not arrays:
        raise LoadFailed(error(code, "there is no array in it", path))
    return arrays


def _unreadable(failure: Exception, path: str) -> str:
    """Return why NumPy can't read a file, without its advice to unpickle whatever it is."""
    if "allow_pickle" not in str(failure):
        return f"it can't be read: {failure}"
    with open(path, "rb") as file:
        is_known = file.read(2).startswith((b"\x93N", b"PK", b"\x80"))
    return "it holds Python objects, which are not loaded" if is_known else "it is no .npy or .npz file"


def _members(found: Any) -> dict[str, np.ndarray[Any, Any]]:
    """Return the arrays of an archive.

    Raises:
        ValueError: A member is no array.
    """
    with found:
        arrays = {name: found[name] for name in found.files}
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray):
            raise ValueError(f"{name!r} in it is no array")
    return arrays


def sized_specs(specs: Sequence[InputSpec], batch_size: int | None) -> Iterator[tuple[InputSpec, ...]]:
    """Yield inputs with sizes in the place of those that nothing says; the model may not take the first."""
    tried = set()
    for rows, length in product((batch_size,) if batch_size else _ROWS, _LENGTHS):
        found = tuple(_size_spec(spec, rows, length) for spec in specs)
        if found not in tried:
            tried.add(found)
            yield found


def _size_spec(spec: InputSpec, rows: int, length: int) -> InputSpec:
    first = length if spec.is_sequence else rows
    sizes = ((length if at else first) if size is None else size for at, size in enumerate(spec.shape))
    return spec._replace(shape=tuple(sizes))


def make_inputs(specs: Sequence[InputSpec], seed: int) -> dict[str, np.ndarray[Any, Any]]:
    """Return values for some inputs of known sizes: the same ones for the same seed."""
    random = np.random.default_rng(seed)
    return {spec.name or str(at): _values(spec, random) for at, spec in enumerate(specs)}


def _values(spec: InputSpec, random: np.random.Generator) -> np.ndarray[Any, Any]:
    shape = tuple(size or 0 for size in spec.shape)
    if spec.dtype == "string":
        return np.array(random.choice(_WORDS, shape))
    if spec.dtype == "bool":
        return random.integers(0, 2, shape).astype(bool)
    low, high = _range(spec)
    if spec.dtype.startswith(("int", "uint")):
        return random.integers(int(low), int(high), shape, np.dtype(spec.dtype).type)
    values = random.uniform(low, high, shape)
    if spec.dtype.startswith("complex"):
        return (values + 1j * random.uniform(low, high, shape)).astype(spec.dtype)
    return values.astype(dtype_named(spec.dtype))


def _range(spec: InputSpec) -> tuple[float, float]:
    """Return what made-up values lie in: whole numbers 0 and 1 are in every vocabulary, bytes are pixels."""
    if spec.dtype == "uint8":
        low, high = 0.0, 256.0
    elif spec.dtype.startswith(("int", "uint")):
        low, high = 0.0, 2.0
    else:
        low, high = -1.0, 1.0
    return (low if spec.low is None else spec.low, high if spec.high is None else spec.high)


def dtype_named(name: str) -> np.dtype[Any]:
    """Return a NumPy dtype, ml_dtypes' ones too."""
    if name == "bfloat16":
        import ml_dtypes

        found: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return found
    return np.dtype(name)


def other_values(inputs: Arrays, seed: int) -> dict[str, np.ndarray[Any, Any]]:
    """Return inputs like some others, of values that lie in the range of theirs."""
    specs = [_spec_like(name, array) for name, array in inputs.items()]
    return {
        name: one.astype(inputs[name].dtype, copy=False) for name, one in make_inputs(specs, seed).items()
    }


def _spec_like(name: str, array: np.ndarray[Any, Any]) -> InputSpec:
    """Return an input that could be an array; where all its values are one, whatever suits the dtype."""
    if array.dtype.kind in "USO":
        return InputSpec(name, array.shape, "string")
    if array.dtype.kind == "b" or not array.size:
        return InputSpec(name, array.shape, array.dtype.name)
    if array.dtype.kind in "iu":  # a vocabulary has all the numbers below one that it has
        low, high = min(0, int(array.min())), int(array.max()) + 1
        return InputSpec(name, array.shape, array.dtype.name, low, high if high > low + 1 else low + 2)
    values = np.abs(array) if array.dtype.kind == "c" else array.astype(np.float64)
    least, most = float(values.min()), float(values.max())
    is_range = least < most and np.isfinite(most - least)
    return InputSpec(name, array.shape, array.dtype.name, *((least, most) if is_range else ()))


def name_inputs(given: Arrays, specs: Sequence[InputSpec], origin: str) -> dict[str, np.ndarray[Any, Any]]:
    """Return inputs under the names that the model has for them, those by position included.

    Raises:
        LoadFailed: One is missing, or the model has none of that name.
    """
    names = [spec.name for spec in specs if spec.name is not None]
    if not names:
        return dict(given)
    renamed = {names[int(name)] if _is_place(name, names) else name: array for name, array in given.items()}
    takes = f"the model takes {', '.join(names)}"
    if len(renamed) < len(given):
        raise LoadFailed(error("input-unknown", f"{origin} has one input by name and by position ({takes})"))
    missing = [name for name in names if name not in renamed]
    if missing:
        raise LoadFailed(error("input-missing", f"no input {missing[0]!r} in {origin} ({takes})"))
    unknown = [name for name in renamed if name not in names]
    if unknown:
        raise LoadFailed(error("input-unknown", f"{origin} has {unknown[0]!r} ({takes})"))
    return renamed


def _is_place(name: str, names: Sequence[str]) -> bool:
    return name.isdecimal() and name not in names and int(name) < len(names)


def positional(inputs: Arrays) -> tuple[list[Any], Mapping[str, Any]]:
    """Return inputs by position, and those by name."""
    places = sorted((name for name in inputs if name.isdecimal()), key=int)
    return [inputs[name] for name in places], {n: a for n, a in inputs.items() if not n.isdecimal()}
