"""Writer of HDF5 files: libhdf5 makes the structure in memory, and the elements are streamed into it.

libhdf5 writes groups, attributes and headers into memory, and allocates every dataset in one piece without
filling it. These bytes and the elements are then streamed in the order of their offsets: into a file, or into
a record of a zip.

Source: the HDF5 file format specification; h5py for its booleans and complex numbers.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from isal import isal_zlib

from ckpttool.core.dtypes import BY_NAME, DType
from ckpttool.core.tensor import Tensor
from ckpttool.storage.sink import Sink, WrittenTensor

Parts = tuple[str, ...]
Attribute = None | bool | int | float | str | Sequence[Any]

DTYPE = "dtype"
"""Attribute with the type of opaque elements; Keras 3 writes it for bfloat16."""

MAX_AXES = 32
MAX_ATTRIBUTE = 64_512
"""Limit in bytes on an attribute's values: an object's header has at most 64 KiB; Keras's limit, too."""
MAX_NAME = 60_000
"""Limit in bytes on a link's name; the heap of names has at most 64 KiB."""

MAX_ATTRIBUTES = 1 << 12
"""Limit on the attributes of a group."""

_PAGE = 1 << 16
_META_BLOCK = 1 << 16

_NATIVE = frozenset(
    (
        *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
        *("float16", "float32", "float64", "complex32", "complex64", "complex128"),
    )
)
_OPAQUE = frozenset(dtype.name for dtype in BY_NAME.values() if dtype.bits in (8, 16, 32)) - _NATIVE
WRITABLE_TYPES = _NATIVE | _OPAQUE
"""Names of the element types that can be written and recognised again."""


@dataclass(slots=True)
class Plan:
    """Content of a file to write.

    Attributes:
        groups: Attributes of groups by path; groups that only contain others may be missing.
        tensors: Datasets by path.
        links: Paths of datasets by further paths for them (hard links).
        texts: Datasets of one text of fixed length each, by path.
        attributes: Attributes of datasets by path.
    """

    groups: dict[Parts, Mapping[str, Attribute]] = field(default_factory=dict)
    tensors: dict[Parts, Tensor] = field(default_factory=dict)
    links: dict[Parts, Parts] = field(default_factory=dict)
    texts: dict[Parts, bytes] = field(default_factory=dict)
    attributes: dict[Parts, Mapping[str, Attribute]] = field(default_factory=dict)


def attribute_fault(name: str, value: object) -> str | None:
    """Return the reason why an attribute can't be written and read again unchanged, or None."""
    values = value if isinstance(value, list | tuple) else [value]
    texts = [value for value in values if isinstance(value, str)]
    if not name or not all(map(_is_text, (name, *texts))):
        return "it is empty, contains a NUL, or isn't valid text"
    # A list of integers is written with one type, int64 or uint64: so each must fit in 64 bits, and negative
    # ones can't be together with those from 2^63 on.
    integers = [value for value in values if isinstance(value, int)]
    if any(not -1 << 63 <= integer < 1 << 64 for integer in integers):
        return "a number of more than 64 bits"
    if min(integers, default=0) < 0 and max(integers, default=0) >= 1 << 63:
        return "no 64-bit type holds both the lowest and the highest number"
    if texts and len(texts) < len(values):
        return "strings and numbers in one list"
    width = max((len(text.encode()) for text in texts), default=8)
    nbytes = len(name.encode()) + (len(values) * max(1, width) if isinstance(value, list | tuple) else 0)
    return f"{nbytes:,} bytes, and at most {MAX_ATTRIBUTE:,} fit" if nbytes > MAX_ATTRIBUTE else None


def _is_text(text: str) -> bool:
    try:
        return b"\0" not in text.encode()
    except UnicodeEncodeError:
        return False


class _Memory(io.RawIOBase):
    """Sparse file in memory: only pages that were written exist."""

    # libhdf5 allocates the elements of all tensors in this file, which may be larger than the memory, but
    # never writes to them.

    def __init__(self) -> None:
        super().__init__()
        self.size = 0
        self._at = 0
        self._pages: dict[int, bytearray] = {}

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self.size)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def truncate(self, size: int | None = None) -> int:
        self.size = self._at if size is None else size
        return self.size

    def write(self, data: Any) -> int:
        view, at = memoryview(data).cast("B"), self._at
        while view:
            page, start = divmod(at, _PAGE)
            piece = view[: _PAGE - start]
            self._pages.setdefault(page, bytearray(_PAGE))[start : start + len(piece)] = piece
            at, view = at + len(piece), view[len(piece) :]
        written, self._at = at - self._at, at
        self.size = max(self.size, at if written else 0)
        return written

    def readinto(self, buffer: Any) -> int:
        data = self.between(self._at, min(self.size, self._at + len(buffer)))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def between(self, start: int, end: int) -> bytes:
        """Return the bytes of a range, zeros where nothing was written."""
        found = bytearray()
        while start < end:
            page, at = divmod(start, _PAGE)
            count = min(_PAGE - at, end - start)
            held = self._pages.get(page)
            found += bytes(count) if held is None else held[at : at + count]
            start += count
        return bytes(found)


class FileStructure:
    """Structure of a file, with the offsets of its elements.

    Attributes:
        size: Size of the whole file in bytes.
    """

    def __init__(self, memory: _Memory, elements: list[tuple[int, Tensor]]) -> None:
        self._memory = memory
        self._elements = elements
        self.size = memory.size

    def pieces(self) -> Iterator[bytes | Tensor]:
        """Yield the file as consecutive pieces: bytes of the structure, and tensors."""
        at = 0
        for offset, tensor in self._elements:
            if offset > at:
                yield self._memory.between(at, offset)
            yield tensor
            at = offset + tensor.nbytes
        if self.size > at:
            yield self._memory.between(at, self.size)

    def stream(self, sink: Sink) -> None:
        """Append the file to a sink."""
        for piece in self.pieces():
            if isinstance(piece, Tensor):
                sink.put(piece)
            else:
                sink.write(piece)

    def stream_with_crc(self, sink: Sink) -> WrittenTensor:
        """Append the file to a sink; return its range with its CRC-32."""
        parts: list[tuple[int, int] | WrittenTensor] = []
        offset = sink.offset
        for piece in self.pieces():
            if isinstance(piece, Tensor):
                parts.append(sink.put(piece, "crc32"))
            else:
                parts.append((isal_zlib.crc32(piece), len(piece)))
                sink.write(piece)
        return _WrittenPieces(offset, self.size, parts)


class _WrittenPieces(WrittenTensor):
    """Range of consecutive pieces: tensors that are being copied, or checksum and size of bytes."""

    __slots__ = ("_nbytes", "_parts")

    def __init__(self, offset: int, nbytes: int, parts: Sequence[tuple[int, int] | WrittenTensor]) -> None:
        self.offset, self._nbytes = offset, nbytes
        self._parts = parts

    @property
    def nbytes(self) -> int:
        return self._nbytes

    @property
    def checksum(self) -> int:
        # CRC-32 of the whole from those of its parts and their sizes; nothing is read again.
        total = 0
        for part in self._parts:
            crc, nbytes = (part.checksum, part.nbytes) if isinstance(part, WrittenTensor) else part
            total = isal_zlib.crc32_combine(total, crc, nbytes)
        return total


def build_structure(plan: Plan) -> FileStructure:
    """Return the structure of a file with the planned content."""
    import h5py

    # Contiguous layout, early allocation and no fill values: so each dataset has an offset at once, and its
    # elements aren't written. Without times of objects, equal content makes equal files.
    memory = _Memory()
    access = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
    access.set_fileobj_driver(h5py.h5fd.fileobj_driver, memory)
    access.set_fclose_degree(h5py.h5f.CLOSE_STRONG)
    access.set_meta_block_size(_META_BLOCK)
    handle = h5py.h5f.create(repr(memory).encode("ascii", "replace"), h5py.h5f.ACC_TRUNC, fapl=access)
    with h5py.File(handle) as file:
        elements = _FileBuilder(h5py, file).add(plan)
        file.flush()
    return FileStructure(memory, sorted(elements, key=lambda element: element[0]))


class _FileBuilder:
    """Builder of a file that is open in libhdf5."""

    def __init__(self, h5py: Any, file: Any) -> None:
        self._h5 = h5py
        self._file = file
        self._root = file.id
        self._kinds: dict[str, Any] = {}
        self._links = h5py.h5p.create(h5py.h5p.LINK_CREATE)
        self._links.set_create_intermediate_group(True)
        self._creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        self._creation.set_layout(h5py.h5d.CONTIGUOUS)
        self._creation.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        self._creation.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        self._creation.set_obj_track_times(False)

    def add(self, plan: Plan) -> list[tuple[int, Tensor]]:
        """Create the planned content; return the offset of each tensor's first byte, with the tensor."""
        for path, attributes in plan.groups.items():
            group = self._file.require_group(_raw(path)) if path else self._file
            self._set_attributes(group, attributes)
        elements = []
        for path, tensor in plan.tensors.items():
            dataset = self._create_dataset(path, tensor)
            if tensor.nbytes:
                elements.append((int(dataset.get_offset()), tensor))
            if path in plan.attributes:
                self._set_attributes(self._h5.Dataset(dataset), plan.attributes[path])
        for path, stored in plan.links.items():
            self._root.links.create_hard(_raw(path), self._root, _raw(stored), lcpl=self._links)
        for path, text in plan.texts.items():
            self._create_text(path, text)
        return elements

    def _create_dataset(self, path: Parts, tensor: Tensor) -> Any:
        space = self._h5.h5s.create_simple(tensor.shape) if tensor.shape else self._scalar()
        kind = self._kinds.get(tensor.dtype.name)
        if kind is None:
            kind = self._kinds[tensor.dtype.name] = self._element_type(tensor.dtype)
        dataset = self._h5.h5d.create(
            self._root, _raw(path), kind, space, dcpl=self._creation, lcpl=self._links
        )
        if tensor.dtype.name in _OPAQUE:
            self._h5.Dataset(dataset).attrs[DTYPE] = tensor.dtype.name
        return dataset

    def _scalar(self) -> Any:
        return self._h5.h5s.create(self._h5.h5s.SCALAR)

    def _element_type(self, dtype: DType) -> Any:
        """Return the HDF5 type of elements, in little-endian order."""
        import numpy as np

        h5t = self._h5.h5t
        if dtype.name in _OPAQUE:
            return h5t.create(h5t.OPAQUE, dtype.itemsize)
        if dtype.name == "complex32":
            half = h5t.py_create(np.dtype("<f2"))
            kind = h5t.create(h5t.COMPOUND, 4)
            kind.insert(b"r", 0, half)
            kind.insert(b"i", 2, half)
            return kind
        return h5t.py_create(np.dtype(dtype.numpy).newbyteorder("<"), logical=True)

    def _create_text(self, path: Parts, text: bytes) -> None:
        import numpy as np

        h5t = self._h5.h5t
        kind = h5t.C_S1.copy()
        kind.set_size(max(1, len(text)))
        kind.set_strpad(h5t.STR_NULLPAD)
        kind.set_cset(h5t.CSET_UTF8)
        creation = self._h5.h5p.create(self._h5.h5p.DATASET_CREATE)
        creation.set_obj_track_times(False)
        dataset = self._h5.h5d.create(
            self._root, _raw(path), kind, self._scalar(), dcpl=creation, lcpl=self._links
        )
        every = self._h5.h5s.ALL
        dataset.write(every, every, np.array(text, f"S{max(1, len(text))}"), kind)

    def _set_attributes(self, item: Any, attributes: Mapping[str, Attribute]) -> None:
        import numpy as np

        for name, value in attributes.items():
            stored: Any = self._h5.Empty("f4") if value is None else value
            if isinstance(value, list | tuple) and value and all(isinstance(text, str) for text in value):
                stored = np.array([text.encode("utf-8", "surrogateescape") for text in value])
            item.attrs[name] = stored


def _raw(path: Parts) -> bytes:
    return "/".join(path).encode("utf-8")
