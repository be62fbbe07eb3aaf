"""Child process that reads HDF5 with libhdf5, so that a damaged file can't harm the parent.

It is run by path and not imported by the parent: it needs only the standard library and h5py. A request is a
line of JSON on standard input, with the number of the file and one of these as ``op``; for a file in memory
(``inline``), its bytes follow the line::

    walk    all groups, datasets, attributes and links
    block   elements of a dataset from ``start``, ``count`` along each axis
    chunks  positions of a dataset's stored chunks
    sum     CRC-32 of a dataset
    forget  close the file

An answer is frames on standard output: a byte for the kind, the payload's length (uint32), the payload::

    J  JSON: an object of the walk, a result, a sign of life, or last an error (``k`` is its kind)
    D  elements of a block
    R  offset (uint64) and size (uint32) of bytes that the parent must send now: it alone reads from stores
    E  end of the answer

Links are listed and never followed; external and virtual storage is described and never read.

Source: the HDF5 file format specification and the h5py low-level API.
"""

from __future__ import annotations

import gc
import io
import json
import os
import struct
import sys
import time
import zlib
from typing import Any

# Frames to the parent --------------------------------------------------------------------------------


FLUSH_SECONDS = 0.5
"""Seconds after which frames are flushed: the parent takes 8 seconds without one for a hang."""

_FRAME = struct.Struct("<cI")


class _Clock:
    flushed = 0.0


def send(kind: bytes, payload: bytes) -> None:
    """Write one frame."""
    out = sys.stdout.buffer
    out.write(_FRAME.pack(kind, len(payload)))
    out.write(payload)


def send_json(**item: Any) -> None:
    """Write one frame of JSON."""
    send(b"J", json.dumps(item).encode())
    if _is_late():
        flush()


def stay_alive() -> None:
    """Send a sign of life if nothing was sent for a while."""
    if _is_late():
        send_json(k="alive")


def _is_late() -> bool:
    return time.monotonic() - _Clock.flushed > FLUSH_SECONDS


def flush() -> None:
    """Flush the frames to the parent."""
    sys.stdout.buffer.flush()
    _Clock.flushed = time.monotonic()


def text(raw: bytes) -> str:
    """Return any bytes as text of the same length, for the parent to decode."""
    return raw.decode("latin-1")


def reason(failure: BaseException) -> str:
    """Return the message of an error in one line; its class if it has none."""
    said = failure.args[0] if isinstance(failure, KeyError) and failure.args else failure  # it adds quotes
    return str(said)[:300] or type(failure).__name__


# Open files and elements -----------------------------------------------------------------------------


MAX_CHUNK = 1 << 27
FLETCHER32 = 3
# HDF5's numbers of the filters in libhdf5 and h5py: deflate, shuffle, Fletcher-32, szip, n-bit, scale-offset,
# LZF. Any other would be loaded as a plug-in, a library at a path that the environment sets.
READABLE = frozenset({1, 2, FLETCHER32, 4, 5, 6, 32000})


REPLACED = "the file was replaced after it was inspected"


def is_same_file(descriptor: int, request: dict[str, Any]) -> bool:
    """Return whether an open file has the device and inode that the parent found at the path."""
    status = os.fstat(descriptor)
    identity: list[int] = request["file"]
    return [status.st_dev, status.st_ino] == identity


class FileRange(io.RawIOBase):
    """Range of a file, or bytes in memory, as a file object for h5py."""

    def __init__(self, stream: Any, offset: int, size: int) -> None:
        super().__init__()
        self._stream, self._offset, self._size, self._at = stream, offset, size, 0

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)
        self._stream.seek(self._offset + self._at)
        inside = max(0, min(len(view), self._size - self._at))
        count: int = self._stream.readinto(view[:inside])
        # h5py doesn't report a short read to libhdf5, so the buffer is always filled: after the end with
        # zeros, as libhdf5's own driver does; and for missing bytes of a truncated file with 0xff, in which
        # libhdf5 finds no structure. Zeros there make it read some structures forever.
        view[inside:] = bytes(len(view) - inside)
        view[count:inside] = b"\xff" * (inside - count)
        self._at += inside
        return inside

    def close(self) -> None:
        self._stream.close()
        super().close()


class RelayedFile:
    """File that the parent reads, as only the parent connects to stores."""

    def __init__(self) -> None:
        self._at = 0

    def seek(self, offset: int) -> None:
        self._at = offset

    def readinto(self, buffer: Any) -> int:
        if not len(buffer):
            return 0
        send(b"R", struct.pack("<QI", self._at, len(buffer)))
        flush()
        data = sys.stdin.buffer.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        """Do nothing: the file is the parent's."""


class Library:
    """libhdf5 with its open files, and the dataset whose values were read last."""

    def __init__(self) -> None:
        import h5py
        import numpy

        self.h5, self.np = h5py, numpy
        self.errors = (
            OSError,
            RuntimeError,
            KeyError,
            ValueError,
            TypeError,
            MemoryError,
            OverflowError,
            NotImplementedError,
            AttributeError,
            IndexError,
            SystemError,
        )
        self._open: dict[int, Any] = {}
        self._read: tuple[tuple[int, str] | None, Any] = None, None

    def file(self, request: dict[str, Any]) -> Any:
        """Return the open file of a request, opening it if it is the first one for its number."""
        number = request["number"]
        if number not in self._open:
            access = self.h5.h5p.create(self.h5.h5p.FILE_ACCESS)
            stream, name = self._stream(request), os.fsencode(request["path"])
            if stream is not None:
                access.set_fileobj_driver(self.h5.h5fd.fileobj_driver, stream)
                name = repr(stream).encode("ascii", "replace")
            handle = self.h5.h5f.open(name, self.h5.h5f.ACC_RDONLY, access)
            self._open[number] = handle, stream
            if stream is None and not is_same_file(handle.get_vfd_handle(), request):
                self.forget(number)
                raise OSError(REPLACED)
        return self._open[number][0]

    def dataset(self, request: dict[str, Any]) -> Any:
        """Return the dataset of a request for values; it remains open until another one is requested."""
        # The cache of its chunks is kept with it: a chunk may be larger than the blocks in requests, and
        # would be inflated again for each of them.
        key = request["number"], request["dataset"]
        if self._read[0] != key:
            self._read = None, None
            access = self.h5.h5p.create(self.h5.h5p.DATASET_ACCESS)
            access.set_chunk_cache(521, MAX_CHUNK, 1.0)
            name = request["dataset"].encode("latin-1")
            self._read = key, self.h5.h5d.open(self.file(request), name, access)
        return self._read[1]

    def _stream(self, request: dict[str, Any]) -> FileRange | None:
        """Return the file object to read from; None if libhdf5 can open the path itself, which is faster."""
        if request["inline"]:
            stream: Any = io.BytesIO(sys.stdin.buffer.read(request["size"]))
        elif request["relayed"]:
            stream = RelayedFile()
        elif request["offset"] == 0 and os.path.getsize(request["path"]) == request["size"]:
            return None
        else:
            stream = open(request["path"], "rb", buffering=0)  # noqa: SIM115 - closed with the range
            if not is_same_file(stream.fileno(), request):
                stream.close()
                raise OSError(REPLACED)
        return FileRange(stream, request["offset"], request["size"])

    def forget(self, number: int) -> None:
        """Close a file."""
        self._read = None, None
        handle, stream = self._open.pop(number, (None, None))
        if handle is not None:
            handle.close()
        if stream is not None:
            stream.close()

    def describe_type(self, kind: Any) -> dict[str, Any]:
        """Return the type of elements as JSON; see ``Kind`` in the parent."""
        h5t = self.h5.h5t
        description: dict[str, Any] = {"class": "other", "size": kind.get_size(), "order": "little"}
        # HDF5 has no booleans and no complex numbers: h5py writes the former as an enumeration of FALSE and
        # TRUE, the latter as a compound of "r" and "i". Integers with unused bits are "other", as their bytes
        # aren't their values; for floats the parent compares the bit fields with the types that it knows.
        if isinstance(kind, h5t.TypeEnumID):
            names = {kind.get_member_name(at): kind.get_member_value(at) for at in range(kind.get_nmembers())}
            description = self.describe_type(kind.get_super())
            description["class"] = (
                "bool" if description["size"] == 1 and names == {b"FALSE": 0, b"TRUE": 1} else "int"
            )
        elif isinstance(kind, h5t.TypeIntegerID):
            plain = kind.get_precision() == 8 * description["size"] and kind.get_offset() == 0
            description["class"] = "int" if plain else "other"
            description["signed"] = kind.get_sign() != h5t.SGN_NONE
            description["order"] = "big" if kind.get_order() == h5t.ORDER_BE else "little"
        elif isinstance(kind, h5t.TypeFloatID):
            description.update({"class": "float", "fields": [*kind.get_fields(), kind.get_ebias()]})
            description["order"] = "big" if kind.get_order() == h5t.ORDER_BE else "little"
        elif isinstance(kind, h5t.TypeStringID):
            description["class"] = "string"
        elif isinstance(kind, h5t.TypeOpaqueID):
            description["class"] = "opaque"
        elif isinstance(kind, h5t.TypeCompoundID):
            description.update(self._describe_compound(kind))
        if description["class"] in ("string", "other"):
            description["variable"] = self.is_variable(kind)
        description["what"] = type(kind).__name__.removeprefix("Type").removesuffix("ID").lower()
        return description

    def is_variable(self, kind: Any) -> bool:
        """Return whether values are elsewhere in the file: texts of variable length, references."""
        h5t = self.h5.h5t
        if isinstance(kind, h5t.TypeVlenID | h5t.TypeReferenceID):
            return True
        if isinstance(kind, h5t.TypeStringID):
            return bool(kind.is_variable_str())
        if isinstance(kind, h5t.TypeCompoundID):
            return any(self.is_variable(kind.get_member_type(at)) for at in range(kind.get_nmembers()))
        return isinstance(kind, h5t.TypeArrayID) and self.is_variable(kind.get_super())

    def _describe_compound(self, kind: Any) -> dict[str, Any]:
        names = [kind.get_member_name(at) for at in range(kind.get_nmembers())]
        if names == [b"r", b"i"]:
            parts = [self.describe_type(kind.get_member_type(at)) for at in range(2)]
            offsets = [kind.get_member_offset(at) for at in range(2)]
            is_tight = offsets == [0, parts[0]["size"]] and kind.get_size() == 2 * parts[0]["size"]
            if parts[0] == parts[1] and is_tight and parts[0]["class"] == "float":
                return {**parts[0], "class": "complex", "size": kind.get_size()}
        return {"members": [text(name) for name in names[:20]]}


# Checksums of elements of any type -------------------------------------------------------------------


SECONDS = 2.0
"""Time limit in seconds on a sum: finding the name of a reference's target takes a search."""
_ELEMENTS = 64  # elements of variable length that are read at once


class Sum:
    """CRC-32 of elements of any type, with limits on bytes and time.

    Attributes:
        crc: The checksum so far.
        nbytes: Bytes read for it.
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
            raise ValueError("too large to checksum")

    def _add_bytes(self, data: bytes) -> None:
        self.crc = zlib.crc32(data, self.crc)

    def _add_value(self, value: Any) -> None:
        """Add a value of variable size."""
        # Each value has its kind and length before it, so that other values never give the same bytes:
        # ("ab", "c") and ("a", "bc") differ.
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
        """Return the name of a reference's target, and the region of a region reference."""
        if not reference:
            return b""
        h5r = self._h5.h5r
        name: bytes = h5r.get_name(reference, self._handle) or b"?"
        if isinstance(reference, h5r.RegionReference):
            space = h5r.get_region(reference, self._handle)
            return b"%s %s" % (name, space.encode())
        return name


def send_checksum(library: Library, request: dict[str, Any]) -> None:
    """Send the CRC-32 of the elements of a dataset."""
    handle = library.file(request)
    dataset = library.h5.h5d.open(handle, request["dataset"].encode("latin-1"))
    creation = dataset.get_create_plist()
    if creation.get_external_count() or creation.get_layout() == library.h5.h5d.VIRTUAL:
        raise ValueError("the values are stored elsewhere")
    for at in range(creation.get_nfilters()):
        if creation.get_filter(at)[0] not in READABLE:
            raise ValueError(f"filter {creation.get_filter(at)[0]} is not supported")
    elements = Sum(library, handle, request["limit"], time.monotonic() + SECONDS)
    elements.add_dataset(dataset)
    send_json(k="sum", crc32=elements.crc, nbytes=elements.nbytes)


def _product(shape: tuple[int, ...]) -> int:
    count = 1
    for length in shape:
        count *= length
    return count


def _blocks(shape: tuple[int, ...]) -> Any:
    """Yield start and shape of blocks of at most ``_ELEMENTS`` elements, in C order."""
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


# One pass over groups, datasets, attributes and links ------------------------------------------------


MAX_OBJECTS = 200_000
MAX_DEPTH = 64
MAX_ATTRIBUTE = 1 << 26  # bytes of one attribute; Keras splits its own at 64 KiB
MAX_ATTRIBUTES = 1 << 27  # bytes of all attributes of a file
MAX_ELEMENTS = 1 << 16  # of one attribute; more are described
ATTRIBUTE_COST = 256  # bytes that any attribute counts for
MAX_PATHS = 1 << 26  # characters of all paths; deep groups with long names would multiply
MAX_TEXTS = 1000
SUM_SECONDS = 1.0  # for all attributes of which only a checksum is sent

Link = tuple[bytes, int, int]
Below = tuple[str, Any]


class TreeWalk:
    """Walk along the hard links of a file that sends each object once."""

    # Objects are known by their addresses. Hard links may form cycles and diamonds: an object that was seen
    # is sent as another link to its first path, and not entered again. Attributes and paths have budgets for
    # the whole file, as each of many small ones costs more than its bytes.

    def __init__(self, library: Library, root: Any) -> None:
        self._lib, self._h5 = library, library.h5
        self._seen: dict[int, tuple[str, bool]] = {}
        self._budget = MAX_ATTRIBUTES
        self._paths = MAX_PATHS
        self._root = root
        self._deadline = time.monotonic() + SUM_SECONDS

    def run(self) -> None:
        """Send every object; iteratively, so that deep nesting can't overflow the stack."""
        pending = [("", self._root, 0)]
        self._seen[self._h5.h5o.get_info(self._root).addr] = "", False
        send_json(k="group", path="", attrs=self._attributes("", self._root))
        while pending:
            path, group, depth = pending.pop()
            found = []
            for link in self._links(path, group):
                self._paths -= len(path) + len(link[0]) + 1
                if self._paths < 0:
                    send_json(
                        k="fault",
                        code="hdf5-limit",
                        path="",
                        message=f"paths of more than {MAX_PATHS:,} characters",
                    )
                    return
                below = self._visit(path, group, link, depth)
                if below is not None:
                    found.append((*below, depth + 1))
            pending.extend(reversed(found))

    def _links(self, path: str, group: Any) -> list[Link]:
        """Return name, kind and address of each link in a group; only hard links have an address."""
        links: list[Link] = []

        def add(name: bytes, info: Any) -> bool | None:
            links.append((name, info.type, info.u))
            return True if self._are_too_many(links) else None

        try:
            group.links.iterate(add, info=True)
            if self._are_too_many(links):
                send_json(
                    k="fault", code="hdf5-limit", path=path, message=f"more than {MAX_OBJECTS:,} objects"
                )
        except self._lib.errors as failure:
            send_json(k="fault", code="hdf5-damaged", path=path, message=reason(failure))
        return links

    def _are_too_many(self, links: list[Link]) -> bool:
        return len(links) + len(self._seen) > MAX_OBJECTS

    def _visit(self, path: str, group: Any, link: Link, depth: int) -> Below | None:
        """Send one link; return its target if that is a group not seen before."""
        name, kind, address = link
        here = f"{path}/{text(name)}"
        try:
            if kind != self._h5.h5l.TYPE_HARD:
                self._send_link(here, group, name, kind)
                return None
            if address in self._seen:
                first, is_dataset = self._seen[address]
                send_json(k="again", path=here, first=first, kind="dataset" if is_dataset else "group")
                return None
            self._seen[address] = here, False
            if depth > MAX_DEPTH:
                send_json(
                    k="fault",
                    code="hdf5-limit",
                    path=here,
                    message=f"groups nested more than {MAX_DEPTH} deep",
                )
                return None
            opened = self._h5.h5o.open(group, name)
            self._seen[address] = here, isinstance(opened, self._h5.h5d.DatasetID)
            return self._send_object(here, opened)
        except self._lib.errors as failure:
            send_json(k="fault", code="hdf5-damaged", path=here, message=reason(failure))
            return None

    def _send_link(self, path: str, group: Any, name: bytes, kind: int) -> None:
        """Send a soft, external or user-defined link."""
        external, soft = kind == self._h5.h5l.TYPE_EXTERNAL, kind == self._h5.h5l.TYPE_SOFT
        value: Any = group.links.get_val(name) if external or soft else b""
        target = ":".join(map(text, value)) if external else text(value)
        send_json(k="link", path=path, kind="external" if external else "soft", target=target)

    def _send_object(self, path: str, opened: Any) -> Below | None:
        if isinstance(opened, self._h5.h5g.GroupID):
            send_json(k="group", path=path, attrs=self._attributes(path, opened))
            return path, opened
        if isinstance(opened, self._h5.h5d.DatasetID):
            send_json(k="dataset", path=path, attrs=self._attributes(path, opened), **self._dataset(opened))
        else:
            send_json(k="type", path=path)
        return None

    def _dataset(self, dataset: Any) -> dict[str, Any]:
        creation, space, h5d = dataset.get_create_plist(), dataset.get_space(), self._h5.h5d
        shape = (
            space.get_simple_extent_dims() if space.get_simple_extent_type() != self._h5.h5s.NULL else None
        )
        item: dict[str, Any] = {"dtype": self._lib.describe_type(dataset.get_type()), "shape": shape}
        if creation.get_external_count():
            name = creation.get_external(0)[0]
            return {**item, "layout": "external", "target": text(name)}
        layout = creation.get_layout()
        names = {h5d.COMPACT: "compact", h5d.CONTIGUOUS: "contiguous", h5d.CHUNKED: "chunked"}
        item["layout"] = names.get(layout, "virtual")
        if item["layout"] == "virtual":
            return item
        item["stored"] = dataset.get_storage_size()
        if item["dtype"]["class"] == "string" and self._has_few_texts(dataset, item):
            values = self._lib.np.empty(shape, dataset.dtype)
            dataset.read(self._h5.h5s.ALL, self._h5.h5s.ALL, values)
            item["values"] = _plain(values.tolist())
        if layout == h5d.CONTIGUOUS:
            item["offset"] = dataset.get_offset()
        if layout == h5d.CHUNKED:
            item["chunk"] = creation.get_chunk()
            item["filters"] = [creation.get_filter(at)[0] for at in range(creation.get_nfilters())]
        return item

    def _has_few_texts(self, dataset: Any, item: dict[str, Any]) -> bool:
        """Return whether a dataset of strings is small enough to be sent with the walk."""
        creation = dataset.get_create_plist()
        filters = {creation.get_filter(at)[0] for at in range(creation.get_nfilters())}
        count = 1
        for length in item["shape"] or (0,):
            count *= length
        small = count <= MAX_TEXTS and count * item["dtype"]["size"] <= 1 << 16 and filters <= READABLE
        return small and item["stored"] <= 1 << 16

    def _attributes(self, path: str, opened: Any) -> dict[str, Any]:
        values: dict[str, Any] = {}
        try:
            names: list[bytes] = []
            self._h5.h5a.iterate(opened, names.append)  # opening n by index takes time in proportion to n²
            for name in names:
                values[text(name)] = self._attribute_value(self._h5.h5a.open(opened, name))
                stay_alive()
        except self._lib.errors as failure:
            send_json(k="fault", code="hdf5-attribute", path=path, message=f"an attribute: {reason(failure)}")
        return values

    def _attribute_value(self, attribute: Any) -> Any:
        kind = self._lib.describe_type(attribute.get_type())
        shape = attribute.shape
        self._budget -= ATTRIBUTE_COST
        if shape is None:
            return {"<attribute>": "empty"}
        if kind["class"] == "other":
            return {"<attribute>": kind["what"], **self._checksum(attribute)}
        count = 1
        for length in shape:
            count *= length
        if count > MAX_ELEMENTS:
            return {"<attribute>": kind["what"], "elements": count, **self._checksum(attribute)}
        self._budget -= count * max(kind["size"], 16)
        if count * kind["size"] > MAX_ATTRIBUTE or self._budget < 0:
            raise ValueError(f"{count:,} elements in an attribute")
        values = self._lib.np.empty(shape, attribute.dtype)
        attribute.read(values)
        return _plain(values.tolist())

    def _checksum(self, attribute: Any) -> dict[str, str]:
        """Return the checksum of an attribute as JSON; empty if limits or errors prevent it."""
        elements = Sum(self._lib, self._root, min(self._budget, MAX_ATTRIBUTE), self._deadline)
        try:
            elements.add_attribute(attribute)
        except self._lib.errors:
            return {}
        self._budget -= attribute.get_storage_size()
        return {"CRC-32": f"{elements.crc:08x}"}


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return {"b": text(value)}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value if isinstance(value, bool | int | float | str) else str(value)


# Requests --------------------------------------------------------------------------------------------


MAX_CHUNKS = 1_000_000
EXTRA_MEMORY = 7 << 26
"""448 MiB on top of Python and h5py: for a chunk, the inflated chunk, and a block."""


def block(library: Library, request: dict[str, Any]) -> None:
    """Send the elements of one block of a dataset in the stored byte order, in C order."""
    h5 = library.h5
    dataset = library.dataset(request)
    creation, kind = dataset.get_create_plist(), dataset.get_type()
    if creation.get_external_count() or creation.get_layout() == h5.h5d.VIRTUAL:
        raise ValueError("the values are stored elsewhere")
    for at in range(creation.get_nfilters()):
        if creation.get_filter(at)[0] not in READABLE:
            raise ValueError(f"filter {creation.get_filter(at)[0]} is not supported")
    start, count = tuple(request["start"]), tuple(request["count"])
    nbytes = kind.get_size()
    for length in count:
        nbytes *= length
    if nbytes > 2 * MAX_CHUNK or (isinstance(kind, h5.h5t.TypeStringID) and kind.is_variable_str()):
        raise ValueError(f"a block of {nbytes:,} bytes")
    buffer = library.np.zeros(nbytes, library.np.uint8)
    if nbytes:
        space = dataset.get_space()
        if count:
            space.select_hyperslab(start, count)
            dataset.read(h5.h5s.create_simple(count), space, buffer, kind)
        else:
            dataset.read(h5.h5s.create(h5.h5s.SCALAR), space, buffer, kind)
    send(b"D", b"" if request["silent"] else buffer.tobytes())


def chunks(library: Library, request: dict[str, Any]) -> None:
    """Send the positions of the stored chunks of a dataset."""
    dataset = library.h5.h5d.open(library.file(request), request["dataset"].encode("latin-1"))
    count = dataset.get_num_chunks()
    if count > MAX_CHUNKS:
        raise ValueError(f"{count:,} chunks")
    rows: list[Any] = []
    dataset.chunk_iter(
        lambda chunk: rows.append((chunk.chunk_offset, chunk.byte_offset, chunk.size, chunk.filter_mask))
    )
    send_json(k="chunks", chunks=[row for row in rows if row[1] is not None])


def limit_memory() -> None:
    """Limit the memory of the process to ``EXTRA_MEMORY`` more than now, on systems that can."""
    # Relative to the memory after the imports. An allocation beyond the limit makes libhdf5 or NumPy fail
    # with an error, which the parent reports as ``LimitExceeded``.
    try:
        import resource

        with open("/proc/self/statm", encoding="ascii") as status:
            used = int(status.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (used + EXTRA_MEMORY, used + EXTRA_MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    except (ImportError, OSError, ValueError):
        return


def answer(library: Library, request: dict[str, Any]) -> None:
    """Answer one request, up to the final frame."""
    try:
        if request["op"] == "forget":
            library.forget(request["number"])
        elif request["op"] == "walk":
            TreeWalk(library, library.h5.h5g.open(library.file(request), b"/")).run()
        elif request["op"] == "chunks":
            chunks(library, request)
        elif request["op"] == "sum":
            send_checksum(library, request)
        else:
            block(library, request)
    except library.errors as failure:
        send_json(k="failed", message=reason(failure))
    send(b"E", b"")
    flush()


def main() -> None:
    """Answer requests until standard input ends."""
    sys.path[:] = json.loads(sys.argv[1])
    gc.disable()  # objects of imports remain: collecting meanwhile costs a tenth of the start
    library = Library()
    gc.freeze()
    gc.enable()
    limit_memory()
    for line in iter(sys.stdin.buffer.readline, b""):
        answer(library, json.loads(line))


if __name__ == "__main__":
    main()
