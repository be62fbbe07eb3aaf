"""The CRC-32 of elements of any type, texts of any length and references among them."""

from __future__ import annotations

import time
import zlib
from typing import Any

from .frames import stay_alive, tell
from .library import READABLE, Library

SECONDS = 2.0
"""How long all sums of one request may take: the name of what a reference leads to is searched for."""
_ELEMENTS = 64  # of those whose length nobody knows, read at once


class Sum:
    """A CRC-32 of elements of a file, within limits.

    Attributes:
        crc: The checksum so far; ``nbytes`` were read for it.
    """

    def __init__(self, library: Library, handle: Any, limit: int, deadline: float) -> None:
        self.crc = self.nbytes = 0
        self._lib, self._h5 = library, library.h5
        self._handle = handle
        self._limit = limit
        self._deadline = deadline

    def add_dataset(self, dataset: Any) -> None:
        """Add all elements of a dataset."""
        kind, shape = dataset.get_type(), dataset.shape
        count = _product(shape)
        self._charge(count * kind.get_size())
        if not self._lib.is_variable(kind):
            buffer = self._lib.np.zeros(count * kind.get_size(), self._lib.np.uint8)
            if count:
                dataset.read(self._h5.h5s.ALL, self._h5.h5s.ALL, buffer, kind)
            self._add_bytes(buffer.tobytes())
            return
        space = dataset.get_space()
        for start, block in _blocks(shape):
            values = self._lib.np.empty(block, dataset.dtype)
            if block:
                space.select_hyperslab(start, block)
                dataset.read(self._h5.h5s.create_simple(block), space, values)
            else:
                dataset.read(self._h5.h5s.ALL, self._h5.h5s.ALL, values)
            self._add_value(values)
            stay_alive()

    def add_attribute(self, attribute: Any) -> None:
        """Add all elements of an attribute."""
        values = self._lib.np.empty(attribute.shape, attribute.dtype)
        self._charge(values.nbytes)
        attribute.read(values)
        self._add_value(values)

    def _charge(self, nbytes: int) -> None:
        self.nbytes += nbytes
        if self.nbytes > self._limit or time.monotonic() > self._deadline:
            raise ValueError("too much to be summed")

    def _add_bytes(self, data: bytes) -> None:
        self.crc = zlib.crc32(data, self.crc)

    def _add_value(self, value: Any) -> None:
        """Add a value: what kind of thing it is, how long, and what."""
        np = self._lib.np
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            data = value.tobytes()
            self._add_item(value.dtype.str, data)
        elif isinstance(value, np.ndarray | list | tuple):
            items = value.tolist() if isinstance(value, np.ndarray) else value
            items = items if isinstance(items, list | tuple) else [items]
            self._add_item("list", str(len(items)).encode())
            for item in items:
                self._add_value(item)
        elif isinstance(value, self._h5.h5r.Reference):
            self._add_item("reference", self._referent(value))
        elif isinstance(value, bytes | str):
            self._add_item(
                "text", value if isinstance(value, bytes) else value.encode("utf-8", "surrogateescape")
            )
        else:
            self._add_item(type(value).__name__, repr(value).encode())

    def _add_item(self, kind: str, data: bytes) -> None:
        self._charge(len(data))
        self._add_bytes(f"{kind}:{len(data)}:".encode())
        self._add_bytes(data)

    def _referent(self, reference: Any) -> bytes:
        """Return the name of what a reference leads to, and the region there."""
        if not reference:
            return b""
        h5r = self._h5.h5r
        name: bytes = h5r.get_name(reference, self._handle) or b"?"
        if isinstance(reference, h5r.RegionReference):
            space = h5r.get_region(reference, self._handle)
            return b"%s %s" % (name, space.encode())
        return name


def total(library: Library, request: dict[str, Any]) -> None:
    """Tell the CRC-32 of the elements of a dataset."""
    handle = library.file(request)
    dataset = library.h5.h5d.open(handle, request["dataset"].encode("latin-1"))
    creation = dataset.get_create_plist()
    if creation.get_external_count() or creation.get_layout() == library.h5.h5d.VIRTUAL:
        raise ValueError("the values lie elsewhere")
    for at in range(creation.get_nfilters()):
        if creation.get_filter(at)[0] not in READABLE:
            raise ValueError(f"filter {creation.get_filter(at)[0]} is not read")
    elements = Sum(library, handle, request["limit"], time.monotonic() + SECONDS)
    elements.add_dataset(dataset)
    tell(k="sum", crc32=elements.crc, nbytes=elements.nbytes)


def _product(shape: tuple[int, ...]) -> int:
    count = 1
    for length in shape:
        count *= length
    return count


def _blocks(shape: tuple[int, ...]) -> Any:
    """Yield start and shape of blocks of few elements, in C order."""
    if not shape:
        yield (), ()
        return
    if 0 in shape:
        return
    below = _product(shape[1:])
    step = max(1, _ELEMENTS // below)
    for start in range(0, shape[0], step):
        count = min(step, shape[0] - start)
        if below <= _ELEMENTS:
            yield (start, *(0 for _ in shape[1:])), (count, *shape[1:])
        else:
            for inner, block in _blocks(shape[1:]):
                yield (start, *inner), (1, *block)
