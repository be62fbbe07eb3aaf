"""A child process that reads HDF5 with libhdf5, so that a damaged file can't harm the parent.

Run by path, never imported: it needs the standard library and h5py alone. Requests come as lines of JSON on
standard input; each answer is frames on standard output: a byte for the kind, the length in 4 bytes, the
payload. Links are listed and never followed; external and virtual storage is described and never read.

Source: the HDF5 file format specification and the h5py low-level API.
"""

from __future__ import annotations

import io
import json
import os
import struct
import sys
from typing import Any

MAX_OBJECTS = 200_000
MAX_DEPTH = 64
MAX_ATTRIBUTE = 1 << 26  # bytes of one attribute; Keras splits its own at 64 KiB
MAX_ATTRIBUTES = 1 << 27  # bytes of all attributes of a file
MAX_TEXTS = 1000
MAX_CHUNKS = 1_000_000
MAX_CHUNK = 1 << 27
MAX_BLOCK = 1 << 23
EXTRA_MEMORY = 3 << 28  # 768 MiB beyond what Python and h5py take
FLETCHER32 = 3
READABLE = frozenset({1, 2, FLETCHER32, 4, 5, 6, 32000})  # what libhdf5 and h5py bring along

_FRAME = struct.Struct("<cI")


class Window(io.RawIOBase):
    """A range of a file, or bytes in memory, as h5py reads it."""

    def __init__(self, stream: Any, offset: int, size: int) -> None:
        super().__init__()
        self._stream, self._offset, self._size, self._at = stream, offset, size, 0

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        wanted = memoryview(buffer)[: max(0, min(len(buffer), self._size - self._at))]
        self._stream.seek(self._offset + self._at)
        count: int = self._stream.readinto(wanted)
        self._at += count
        return count

    def close(self) -> None:
        self._stream.close()
        super().close()


def send(kind: bytes, payload: bytes) -> None:
    """Write one frame."""
    out = sys.stdout.buffer
    out.write(_FRAME.pack(kind, len(payload)))
    out.write(payload)


def tell(**item: Any) -> None:
    """Write one frame of JSON, at once: the parent takes silence for a hang."""
    send(b"J", json.dumps(item).encode())
    sys.stdout.buffer.flush()


def text(raw: bytes) -> str:
    """Return any bytes as text of the same length, for the parent to decode."""
    return raw.decode("latin-1")


class Library:
    """What libhdf5 is asked."""

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

    def file(self, request: dict[str, Any]) -> Any:
        """Return the open file of a request; it stays open under its number."""
        number = request["number"]
        if number not in self._open:
            if request["inline"]:
                stream: Any = io.BytesIO(sys.stdin.buffer.read(request["size"]))
            else:
                stream = open(request["path"], "rb", buffering=0)  # noqa: SIM115 - closed with the window
            window = Window(stream, request["offset"], request["size"])
            self._open[number] = self.h5.File(window, "r"), window
        return self._open[number][0]

    def forget(self, number: int) -> None:
        """Close a file."""
        handle, window = self._open.pop(number, (None, None))
        if handle is not None:
            handle.close()
            window.close()

    def described(self, kind: Any) -> dict[str, Any]:
        """Return what the elements of a dataset or an attribute are."""
        h5t = self.h5.h5t
        told: dict[str, Any] = {"class": "other", "size": kind.get_size(), "order": "little"}
        if isinstance(kind, h5t.TypeEnumID):
            names = {kind.get_member_name(at): kind.get_member_value(at) for at in range(kind.get_nmembers())}
            told = self.described(kind.get_super())
            told["class"] = "bool" if told["size"] == 1 and names == {b"FALSE": 0, b"TRUE": 1} else "int"
        elif isinstance(kind, h5t.TypeIntegerID):
            plain = kind.get_precision() == 8 * told["size"] and kind.get_offset() == 0
            told["class"] = "int" if plain else "other"
            told["signed"] = kind.get_sign() != h5t.SGN_NONE
            told["order"] = "big" if kind.get_order() == h5t.ORDER_BE else "little"
        elif isinstance(kind, h5t.TypeFloatID):
            told.update({"class": "float", "fields": [*kind.get_fields(), kind.get_ebias()]})
            told["order"] = "big" if kind.get_order() == h5t.ORDER_BE else "little"
        elif isinstance(kind, h5t.TypeStringID):
            told["class"] = "string"
        elif isinstance(kind, h5t.TypeOpaqueID):
            told["class"] = "opaque"
        elif isinstance(kind, h5t.TypeCompoundID):
            told.update(self._compound(kind))
        told["what"] = type(kind).__name__.removeprefix("Type").removesuffix("ID").lower()
        return told

    def _compound(self, kind: Any) -> dict[str, Any]:
        names = [kind.get_member_name(at) for at in range(kind.get_nmembers())]
        if names == [b"r", b"i"]:
            parts = [self.described(kind.get_member_type(at)) for at in range(2)]
            offsets = [kind.get_member_offset(at) for at in range(2)]
            is_tight = offsets == [0, parts[0]["size"]] and kind.get_size() == 2 * parts[0]["size"]
            if parts[0] == parts[1] and is_tight and parts[0]["class"] == "float":
                return {**parts[0], "class": "complex", "size": kind.get_size()}
        return {"members": [text(name) for name in names[:20]]}


class Walk:
    """One pass over all hard links of a file, telling of each object."""

    def __init__(self, library: Library, root: Any) -> None:
        self._lib, self._h5 = library, library.h5
        self._seen: dict[tuple[int, int], str] = {}
        self._budget = MAX_ATTRIBUTES
        self._root = root

    def run(self) -> None:
        """Tell of every object, iteratively: nesting may be as deep as it likes."""
        pending = [("", self._root, 0)]
        info = self._h5.h5o.get_info(self._root)
        self._seen[(info.fileno, info.addr)] = ""
        tell(k="group", path="", attrs=self._attributes(self._root))
        while pending:
            path, group, depth = pending.pop()
            found = []
            for name in self._names(path, group):
                below = self._visit(path, group, name, depth)
                if below is not None:
                    found.append((*below, depth + 1))
            pending.extend(reversed(found))

    def _names(self, path: str, group: Any) -> list[bytes]:
        names: list[bytes] = []
        try:
            for name in group:
                names.append(name)
                if len(names) + len(self._seen) > MAX_OBJECTS:
                    tell(k="fault", code="hdf5-limit", path=path, message=f"over {MAX_OBJECTS:,} objects")
                    break
        except self._lib.errors as failure:
            tell(k="fault", code="hdf5-damaged", path=path, message=str(failure)[:300])
        return names

    def _visit(self, path: str, group: Any, name: bytes, depth: int) -> tuple[str, Any] | None:
        """Tell of one link; return the group it leads to, where it is a new one."""
        here = f"{path}/{text(name)}"
        try:
            link = group.links.get_info(name)
            if link.type != self._h5.h5l.TYPE_HARD:
                external = link.type == self._h5.h5l.TYPE_EXTERNAL
                soft = link.type == self._h5.h5l.TYPE_SOFT
                value: Any = group.links.get_val(name) if external or soft else b""
                target = ":".join(map(text, value)) if external else text(value)
                tell(k="link", path=here, kind="external" if external else "soft", target=target)
                return None
            info = self._h5.h5o.get_info(group, name)
            identity = (info.fileno, info.addr)
            if identity in self._seen:
                again = "dataset" if info.type == self._h5.h5o.TYPE_DATASET else "group"
                tell(k="again", path=here, first=self._seen[identity], kind=again)
                return None
            self._seen[identity] = here
            if depth > MAX_DEPTH:
                tell(k="fault", code="hdf5-limit", path=here, message=f"groups nested over {MAX_DEPTH} deep")
                return None
            return self._object(here, self._h5.h5o.open(group, name), info.type)
        except self._lib.errors as failure:
            tell(k="fault", code="hdf5-damaged", path=here, message=str(failure)[:300])
            return None

    def _object(self, path: str, found: Any, kind: int) -> tuple[str, Any] | None:
        if kind == self._h5.h5o.TYPE_GROUP:
            tell(k="group", path=path, attrs=self._attributes(found))
            return path, found
        if kind == self._h5.h5o.TYPE_DATASET:
            tell(k="dataset", path=path, attrs=self._attributes(found), **self._dataset(found))
        else:
            tell(k="type", path=path)
        return None

    def _dataset(self, found: Any) -> dict[str, Any]:
        creation, space, h5d = found.get_create_plist(), found.get_space(), self._h5.h5d
        shape = (
            space.get_simple_extent_dims() if space.get_simple_extent_type() != self._h5.h5s.NULL else None
        )
        told: dict[str, Any] = {"dtype": self._lib.described(found.get_type()), "shape": shape}
        if creation.get_external_count():
            name = creation.get_external(0)[0]
            return {**told, "layout": "external", "target": text(name)}
        layout = creation.get_layout()
        names = {h5d.COMPACT: "compact", h5d.CONTIGUOUS: "contiguous", h5d.CHUNKED: "chunked"}
        told["layout"] = names.get(layout, "virtual")
        if told["layout"] == "virtual":
            return told
        told["stored"] = found.get_storage_size()
        if told["dtype"]["class"] == "string" and self._is_short(found, told):
            values = self._lib.np.empty(shape, found.dtype)
            found.read(self._h5.h5s.ALL, self._h5.h5s.ALL, values)
            told["values"] = _plain(values.tolist())
        if layout == h5d.CONTIGUOUS:
            told["offset"] = found.get_offset()
        if layout == h5d.CHUNKED:
            told["chunk"] = creation.get_chunk()
            told["filters"] = [creation.get_filter(at)[0] for at in range(creation.get_nfilters())]
        return told

    def _is_short(self, found: Any, told: dict[str, Any]) -> bool:
        """Tell whether the texts in a dataset are few."""
        creation = found.get_create_plist()
        filters = {creation.get_filter(at)[0] for at in range(creation.get_nfilters())}
        count = 1
        for length in told["shape"] or (0,):
            count *= length
        small = count <= MAX_TEXTS and count * told["dtype"]["size"] <= 1 << 16 and filters <= READABLE
        return small and told["stored"] <= 1 << 16

    def _attributes(self, found: Any) -> dict[str, Any]:
        told: dict[str, Any] = {}
        try:
            count = self._h5.h5a.get_num_attrs(found)
            for at in range(count):
                attribute = self._h5.h5a.open(found, index=at)
                told[text(attribute.name)] = self._value(attribute)
        except self._lib.errors as failure:
            tell(k="fault", code="hdf5-attribute", path="", message=f"an attribute: {str(failure)[:300]}")
        return told

    def _value(self, attribute: Any) -> Any:
        kind = self._lib.described(attribute.get_type())
        shape = attribute.shape
        if kind["class"] == "other" or shape is None:
            return {"<attribute>": kind["what"] if shape is not None else "empty"}
        count = 1
        for length in shape:
            count *= length
        self._budget -= count * max(kind["size"], 16)
        if count * kind["size"] > MAX_ATTRIBUTE or self._budget < 0:
            raise ValueError(f"{count:,} elements in an attribute")
        values = self._lib.np.empty(shape, attribute.dtype)
        attribute.read(values)
        return _plain(values.tolist())


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return {"b": text(value)}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value if isinstance(value, bool | int | float | str) else str(value)


def block(library: Library, request: dict[str, Any]) -> None:
    """Send the elements of one block of a dataset, as they are stored, in C order."""
    h5 = library.h5
    access = h5.h5p.create(h5.h5p.DATASET_ACCESS)
    access.set_chunk_cache(521, 1 << 26, 1.0)
    dataset = h5.h5d.open(library.file(request).id, request["dataset"].encode("latin-1"), access)
    creation, kind = dataset.get_create_plist(), dataset.get_type()
    if creation.get_external_count() or creation.get_layout() == h5.h5d.VIRTUAL:
        raise ValueError("the values lie elsewhere")
    for at in range(creation.get_nfilters()):
        if creation.get_filter(at)[0] not in READABLE:
            raise ValueError(f"filter {creation.get_filter(at)[0]} is not read")
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
    """Tell where each stored chunk of a dataset lies."""
    dataset = library.h5.h5d.open(library.file(request).id, request["dataset"].encode("latin-1"))
    count = dataset.get_num_chunks()
    if count > MAX_CHUNKS:
        raise ValueError(f"{count:,} chunks")
    found: list[Any] = []
    dataset.chunk_iter(
        lambda one: found.append((one.chunk_offset, one.byte_offset, one.size, one.filter_mask))
    )
    tell(k="chunks", chunks=[one for one in found if one[1] is not None])


def limit_memory() -> None:
    """Let the process take so much more memory and no more, where the system can."""
    try:
        import resource

        with open("/proc/self/statm", encoding="ascii") as status:
            used = int(status.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (used + EXTRA_MEMORY, used + EXTRA_MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    except (ImportError, OSError, ValueError):
        return


def answer(library: Library, request: dict[str, Any]) -> None:
    """Answer one request, and end the answer."""
    try:
        if request["op"] == "forget":
            library.forget(request["number"])
        elif request["op"] == "walk":
            Walk(library, library.h5.h5g.open(library.file(request).id, b"/")).run()
        elif request["op"] == "chunks":
            chunks(library, request)
        else:
            block(library, request)
    except library.errors as failure:
        tell(k="failed", message=str(failure)[:300])
    send(b"E", b"")
    sys.stdout.buffer.flush()


def main() -> None:
    """Answer requests until there are no more."""
    sys.path[:] = json.loads(sys.argv[1])
    library = Library()
    limit_memory()
    for line in iter(sys.stdin.buffer.readline, b""):
        answer(library, json.loads(line))


if __name__ == "__main__":
    main()
