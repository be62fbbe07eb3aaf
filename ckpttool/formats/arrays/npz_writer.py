"""NumPy's ``.npz``: a zip with one ``.npy`` for each tensor, as ``numpy.savez`` writes it.

Tied tensors are written once. Their other names, and everything else that NumPy has no place for, are in a
further entry, the sidecar.

Source: NumPy ``numpy/lib/_format_impl.py``, ``numpy/lib/_npyio_impl.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from ckpttool.containers.npy import MAGIC
from ckpttool.containers.npy import MAX_AXES as _READ_AXES
from ckpttool.containers.zip_reader import MAX_DIRECTORY, MAX_MEMBERS
from ckpttool.containers.zip_writer import MAX_NAME, NumpyZip
from ckpttool.core.tensor import Tensor
from ckpttool.formats.sidecar import ENTRY, sidecar_of
from ckpttool.formats.writer import Content, Target, WriteOptions, Writer

_DESCRIPTIONS = {
    "bool": "|b1",
    "uint8": "|u1",
    "int8": "|i1",
    "bits8": "|V1",
    "bits16": "|V2",
    **{f"{kind}{bits}": f"<{kind[0]}{bits // 8}" for kind in ("int", "uint") for bits in (16, 32, 64)},
    **{f"float{bits}": f"<f{bits // 8}" for bits in (16, 32, 64)},
    **{f"complex{bits}": f"<c{bits // 8}" for bits in (64, 128)},
}
"""``descr`` by type; bfloat16 and float8 have none."""
_SUFFIX = ".npy"
_VERSION = bytes([1, 0])
_ALIGNMENT = 64
_ROOM_TO_GROW = 21  # NumPy pads the first axis to this many digits, so that a file can grow in place
_MAX_AXES = min(64, _READ_AXES)  # NumPy's own limit is 64
_ENTRY_BYTES = 80  # upper bound on a record of the zip's directory without its name


class NpzWriter(Writer):
    """Several arrays in a zip: ``.npz``."""

    name: ClassVar[str] = "numpy"
    suffixes: ClassVar[tuple[str, ...]] = (".npz",)
    dtypes: ClassVar[frozenset[str]] = frozenset(_DESCRIPTIONS)

    def refusals(self, content: Content, options: WriteOptions) -> Iterator[str]:
        names = {tensor.name for tensor in content.owned}
        for tensor in content.owned:
            yield from _name_refusals(tensor.name, names)
            if len(tensor.shape) > _MAX_AXES:
                yield f"{tensor.name}: {len(tensor.shape)} axes, and a NumPy array has at most {_MAX_AXES}"
        nbytes = sum(_ENTRY_BYTES + 4 * len(name) for name in names)  # at most 4 bytes of UTF-8 a character
        if len(names) >= MAX_MEMBERS:
            yield f"{len(names):,} arrays are more than ckpttool reads back (at most {MAX_MEMBERS - 1:,})"
        elif nbytes > MAX_DIRECTORY:
            yield f"the names of {len(names):,} arrays are too long for one zip (use --map)"

    def write(self, content: Content, target: Target, options: WriteOptions) -> None:
        archive = NumpyZip(target.create())
        for tensor in content.owned:
            archive.put(tensor.name + _SUFFIX, tensor, _npy_header(tensor))
        sidecar = sidecar_of(content)
        if sidecar is not None:
            archive.add(ENTRY, sidecar)
        archive.finish()
        archive.seal()


def _name_refusals(name: str, names: set[str]) -> Iterator[str]:
    try:
        length = len(name.encode()) + len(_SUFFIX)
    except UnicodeEncodeError:
        yield f"{name}: its name is not valid text (use --map)"
        return
    if length > MAX_NAME:
        yield f"{name}: a name of {length:,} bytes, and a zip has room for {MAX_NAME:,} (use --map)"
    if "\0" in name:
        yield f"{name}: NumPy cuts the name of an array at a NUL (use --map)"
    if name == ENTRY or (name.endswith(_SUFFIX) and name.removesuffix(_SUFFIX) in names):
        yield f"{name}: NumPy returns another entry for this name (use --map)"


def _npy_header(tensor: Tensor) -> bytes:
    """Return the bytes before the elements of a ``.npy``, byte for byte as NumPy writes them."""
    # Magic number, version 1.0, the header's length as a uint16, and the header: a literal, padded with
    # spaces and closed by a newline, so that the elements begin at a multiple of 64 bytes.
    shape = tensor.shape
    text = f"{{'descr': {_DESCRIPTIONS[tensor.dtype.name]!r}, 'fortran_order': False, 'shape': {shape!r}, }}"
    text += " " * (_ROOM_TO_GROW - len(repr(shape[0])) if shape else 0)
    start = len(MAGIC) + len(_VERSION) + 2
    text += " " * (_ALIGNMENT - (start + len(text) + 1) % _ALIGNMENT) + "\n"
    return MAGIC + _VERSION + len(text).to_bytes(2, "little") + text.encode("ascii")
