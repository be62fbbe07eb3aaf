"""libhdf5 as the child has it: open files, and what elements are."""

from __future__ import annotations

import io
import os
import struct
import sys
from typing import Any

from .frames import flush, send, text

MAX_CHUNK = 1 << 27
FLETCHER32 = 3
READABLE = frozenset({1, 2, FLETCHER32, 4, 5, 6, 32000})  # what libhdf5 and h5py bring along


REPLACED = "another file has come to the place of the one that was looked at"


def is_meant(descriptor: int, request: dict[str, Any]) -> bool:
    """Tell whether an open file is the one that the parent sees at the path."""
    status = os.fstat(descriptor)
    identity: list[int] = request["file"]
    return [status.st_dev, status.st_ino] == identity


class FileRange(io.RawIOBase):
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
        view = memoryview(buffer)
        self._stream.seek(self._offset + self._at)
        inside = max(0, min(len(view), self._size - self._at))
        count: int = self._stream.readinto(view[:inside])
        # h5py doesn't tell libhdf5 of a short read. Behind the end libhdf5's own driver reads zeros, too.
        view[inside:] = bytes(len(view) - inside)
        # What was cut off is something that libhdf5 takes for nothing: of zeros, it reads some for ever.
        view[count:inside] = b"\xff" * (inside - count)
        self._at += inside
        return inside

    def close(self) -> None:
        self._stream.close()
        super().close()


class RelayedFile:
    """A file that the parent reads: it alone may speak with a store."""

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
        """Leave it to the parent."""


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
        self._read: tuple[tuple[int, str] | None, Any] = None, None

    def file(self, request: dict[str, Any]) -> Any:
        """Return the open file of a request; it stays open under its number."""
        number = request["number"]
        if number not in self._open:
            access = self.h5.h5p.create(self.h5.h5p.FILE_ACCESS)
            stream, name = self._stream(request), os.fsencode(request["path"])
            if stream is not None:
                access.set_fileobj_driver(self.h5.h5fd.fileobj_driver, stream)
                name = repr(stream).encode("ascii", "replace")
            handle = self.h5.h5f.open(name, self.h5.h5f.ACC_RDONLY, access)
            self._open[number] = handle, stream
            if stream is None and not is_meant(handle.get_vfd_handle(), request):
                self.forget(number)
                raise OSError(REPLACED)
        return self._open[number][0]

    def dataset(self, request: dict[str, Any]) -> Any:
        """Return the dataset that values are asked of; it stays open until another one is.

        What its chunks hold stays in memory with it: they are larger than what is asked for at once.
        """
        key = request["number"], request["dataset"]
        if self._read[0] != key:
            self._read = None, None
            access = self.h5.h5p.create(self.h5.h5p.DATASET_ACCESS)
            access.set_chunk_cache(521, MAX_CHUNK, 1.0)
            name = request["dataset"].encode("latin-1")
            self._read = key, self.h5.h5d.open(self.file(request), name, access)
        return self._read[1]

    def _stream(self, request: dict[str, Any]) -> FileRange | None:
        """Return what a file is read through; None where libhdf5 reads it itself, which is faster."""
        if request["inline"]:
            stream: Any = io.BytesIO(sys.stdin.buffer.read(request["size"]))
        elif request["relayed"]:
            stream = RelayedFile()
        elif request["offset"] == 0 and os.path.getsize(request["path"]) == request["size"]:
            return None
        else:
            stream = open(request["path"], "rb", buffering=0)  # noqa: SIM115 - closed with the range
            if not is_meant(stream.fileno(), request):
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
        """Return what the elements of a dataset or an attribute are."""
        h5t = self.h5.h5t
        description: dict[str, Any] = {"class": "other", "size": kind.get_size(), "order": "little"}
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
        """Tell whether what elements say lies elsewhere in the file: texts of any length, references."""
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
