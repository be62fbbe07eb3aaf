"""PyTorch's first serialization: a tar of four members, before 0.1.10.

Members mix pickles and raw little-endian numbers:

- ``sys_info``: a pickled dictionary.
- ``storages``: a count; for each storage a pickled ``(key, location, class)``, an int64 number of elements
  and its bytes; then a list of views ``(key, root key, offset, number of elements)``.
- ``tensors``: a count; for each tensor a pickled ``(key, storage key, class)``, an int32 number of axes, 4
  ignored bytes, then int64 shape, strides and offset.
- ``pickle``: the object, with the integer key of a tensor or storage as its persistent id.

Source: PyTorch ``torch/serialization.py`` (``legacy_load``); POSIX.1-1988 for the headers.
"""

from __future__ import annotations

import struct
from typing import Any, ClassVar, NamedTuple, NoReturn

from ckpttool.containers.pickle.pickle_nodes import Persistent
from ckpttool.containers.pickle.pickle_safety import attach_safety
from ckpttool.core.checkpoint import Checkpoint, FileEntry, Producer
from ckpttool.core.errors import DamagedCheckpoint, Truncated
from ckpttool.core.report import Finding, error, trailing_bytes
from ckpttool.core.tensor import Extent
from ckpttool.formats.content.assembly import checkpoint_of_tree, tree_builder
from ckpttool.formats.content.plain_data import describe
from ckpttool.formats.content.tree import Leaf, TensorParts, flatten
from ckpttool.formats.interface import Format, Probe
from ckpttool.formats.torch.legacy import (
    LegacyPickles,
    module_fields,
    note_embedded_sources,
    storage_spans,
    view_of,
)
from ckpttool.formats.torch.objects import MAX_AXES, Storage, TorchObjects, no_storage
from ckpttool.formats.torch.tree_nodes import torch_node
from ckpttool.formats.torch.types import storage_dtype
from ckpttool.formats.torch.zip import unused_storages
from ckpttool.storage.source import Source

MEMBERS = ("sys_info", "pickle", "tensors", "storages")

_BLOCK = 512
_RECORD = 20 * _BLOCK  # a tar is padded to whole records
_MAGIC = b"ustar"
_MAGIC_AT = 257
_FIELDS = struct.Struct("100s8s8s8s12s12s8sc100s5s")  # name, …, size, time, checksum, type, link, magic
_CHECKSUM = slice(148, 156)
_REGULAR = (b"0", b"\0")
_INT64 = struct.Struct("<q")


class PytorchTar(Format):
    """A file that ``torch.save`` wrote before 0.1.10."""

    name: ClassVar[str] = "pytorch"

    def matches(self, probe: Probe) -> bool:
        first = probe.head[:100].partition(b"\0")[0]
        return probe.head[_MAGIC_AT:].startswith(_MAGIC) and first in [name.encode() for name in MEMBERS]

    def open(self, probe: Probe) -> Checkpoint:
        members, findings = read_tar(probe.source)
        pickles = LegacyPickles(probe.source)
        with attach_safety(pickles.safety):
            contents = _TarContents(pickles, members, findings)
            root, leaf = contents.root(), _TarObjects(probe.path, contents).leaf
            flat = flatten(root, leaf, probe.path)
        return checkpoint_of_tree(
            probe=probe,
            format=self.name,
            variant="tar",
            flat=note_embedded_sources(flat, pickles.sources),
            files=(FileEntry(probe.path, probe.source.size),),
            spans=lambda: storage_spans(contents.stored, flat),
            producer=Producer("pytorch"),
            findings=(*findings, *unused_storages(contents.stored.values(), flat.tensors)),
            safety=tuple(pickles.safety),
            tree=tree_builder(root, leaf, probe.path, torch_node),
        )


# The tar ------------------------------------------------------------------------------------------


class TarMember(NamedTuple):
    """The range of a member's content in the tar, in bytes."""

    name: str
    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


def read_tar(source: Source) -> tuple[dict[str, TarMember], list[Finding]]:
    """Return the four members by name, and findings about padding and trailing bytes."""
    members: dict[str, TarMember] = {}
    findings: list[Finding] = []
    offset = 0
    while header := _block(source, offset).rstrip(b"\0"):
        member = _parse_header(source, header.ljust(_BLOCK, b"\0"), offset)
        if member.name in members or member.name not in MEMBERS:
            found = f"a second or unknown member {member.name!r}"
            raise DamagedCheckpoint(source.path, found, where=f"byte {offset:,}", code="tar-member")
        members[member.name] = member
        offset = -(-member.end // _BLOCK) * _BLOCK
        source.check(member.offset, offset - member.offset, member.name)
        if source.read(member.end, offset - member.end).strip(b"\0"):
            findings.append(error("tar-padding", "the padding after the member is not zero", member.name))
    if missing := [name for name in MEMBERS if name not in members]:
        raise DamagedCheckpoint(source.path, f"no member {missing[0]}", code="tar-member")
    _block(source, offset + _BLOCK)
    # From the end mark on, a tar is filled up with zeros to a whole record.
    end = min(-(-(offset + 2 * _BLOCK) // _RECORD) * _RECORD, source.size)
    if source.read(offset, end - offset).strip(b"\0"):
        findings.append(error("tar-padding", "the padding after the last member is not zero"))
    if source.size > end:
        trailing = source.size - end
        findings.append(trailing_bytes(trailing, "the end of the tar"))
    return members, findings


def _block(source: Source, offset: int) -> bytes:
    if offset + _BLOCK > source.size:
        raise Truncated(source.path, f"a tar that ends at byte {source.size:,}", expected="two empty blocks")
    return source.read(offset, _BLOCK)


def _parse_header(source: Source, header: bytes, offset: int) -> TarMember:
    """Return the member that a header describes."""
    where = f"byte {offset:,}"
    raw_name, _, _, _, size, _, checksum, kind, link, magic = _FIELDS.unpack_from(header)
    # The checksum of a header is the sum of its bytes, with the eight bytes of the checksum itself counted as
    # spaces (POSIX ``ustar``). The contents of members have no checksum.
    blanked = header[: _CHECKSUM.start] + b" " * 8 + header[_CHECKSUM.stop :]
    if magic != _MAGIC or _number(source, checksum, where) != sum(blanked):
        raise DamagedCheckpoint(source.path, "a wrong header checksum", where=where, code="tar-header")
    if kind not in _REGULAR or link.strip(b"\0"):
        found = f"a member of type {kind!r}"
        raise DamagedCheckpoint(source.path, found, expected="a file", where=where, code="tar-member")
    name = raw_name.partition(b"\0")[0].decode("ascii", "backslashreplace")
    return TarMember(name, offset + _BLOCK, _number(source, size, where))


def _number(source: Source, field: bytes, where: str) -> int:
    """Return a number of a header: octal digits, or base 256 after a byte 0x80 for large ones (GNU)."""
    if field[:1] == b"\x80":
        return int.from_bytes(field[1:], "big")
    digits = field.strip(b" \0")
    if not digits or digits.strip(b"01234567"):
        found = f"{field!r} instead of a number"
        raise DamagedCheckpoint(source.path, found, where=where, code="tar-header")
    return int(digits, 8)


# The members --------------------------------------------------------------------------------------


class _TarReader:
    """Reads the pickles and numbers of a member, one after another."""

    def __init__(self, pickles: LegacyPickles, member: TarMember) -> None:
        self.source, self._pickles, self._member = pickles.source, pickles, member
        self.offset = member.offset

    def pickle(self) -> object:
        pickle = self._pickles.read(self.offset, self._member.end, self._member.name)
        self.offset = pickle.end
        return pickle.root

    def fields(self, length: int) -> Any:
        """Return the fields of a pickled tuple or list of a known length."""
        fields = self.pickle()
        if not isinstance(fields, list | tuple) or len(fields) != length:
            self.fail(f"not {length} fields")
        return fields

    def count(self) -> int:
        count = self.pickle()
        if type(count) is not int or count < 0:
            self.fail("not a count")
        return count

    def integers(self, count: int) -> tuple[int, ...]:
        start = self.skip(count * _INT64.size)
        data = self.source.read(start, count * _INT64.size, self._member.name)
        return struct.unpack(f"<{count}q", data)

    def skip(self, nbytes: int) -> int:
        """Skip bytes, and return their offset."""
        start = self.offset
        if start + nbytes > self._member.end:
            found = f"bytes {start:,}..{start + nbytes:,} are past the end of the member"
            expected = f"{self._member.end:,}"
            raise Truncated(self.source.path, found, expected=expected, where=self._member.name)
        self.offset += nbytes
        return start

    def trailing_findings(self) -> list[Finding]:
        """Return an error if bytes of the member are left that nothing declares."""
        trailing = self._member.end - self.offset
        end = "the end of the member's content"
        return [trailing_bytes(trailing, end, self._member.name)] if trailing else []

    def fail(self, found: str) -> NoReturn:
        where = f"{self._member.name}, byte {self.offset:,}"
        raise DamagedCheckpoint(self.source.path, found, where=where, code="tensor-damaged")


class _TarContents:
    """The storages, tensors and object of the members; tensors and storages share one set of integer keys.

    Attributes:
        stored: The storages with bytes of their own, by key.
        storages: Those and the views of them.
    """

    def __init__(
        self, pickles: LegacyPickles, members: dict[str, TarMember], findings: list[Finding]
    ) -> None:
        self._pickles, self._members, self._findings = pickles, members, findings
        self.stored: dict[int, Storage] = {}
        self.storages: dict[int, Storage] = {}
        self.tensors: dict[int, TensorParts] = {}
        self._objects = TorchObjects(pickles.source.path, no_storage)
        info = self._reader("sys_info")
        if not isinstance(info.pickle(), dict):
            info.fail("not the system info")
        self._findings += info.trailing_findings()
        self._read_storages(self._reader("storages"))
        self._read_tensors(self._reader("tensors"))

    def root(self) -> object:
        """Return the object, with persistent ids in place of tensors."""
        reader = self._reader("pickle")
        root = reader.pickle()
        self._findings += reader.trailing_findings()
        return root

    def _reader(self, name: str) -> _TarReader:
        return _TarReader(self._pickles, self._members[name])

    def _read_storages(self, reader: _TarReader) -> None:
        for _ in range(reader.count()):
            key, _, kind = reader.fields(3)
            self._require_new(reader, key)
            try:
                dtype = storage_dtype(kind)
            except TypeError as failure:
                reader.fail(str(failure))
            (count,) = reader.integers(1)
            if count < 0:
                reader.fail(f"a storage of {count:,} elements")
            nbytes = count * (1 if dtype is None else dtype.itemsize)
            start = reader.skip(nbytes)
            extent = Extent(reader.source.path, start, nbytes)
            storage = Storage(str(key), dtype, nbytes, reader.source, start, extent)
            self.stored[key] = self.storages[key] = storage
        # Storages that are parts of others have no bytes of their own. They are listed after all storages, as
        # tuples of key, key of the other storage, offset and number of elements.
        views = reader.pickle()
        for view in views if isinstance(views, list | tuple) else [None]:
            if not isinstance(view, list | tuple) or len(view) != 4:
                reader.fail("not a view of a storage")
            key, root, offset, count = view
            self._require_new(reader, key)
            self.storages[key] = view_of(reader.source.path, self._storage_of(reader, root), offset, count)
        self._findings += reader.trailing_findings()

    def _read_tensors(self, reader: _TarReader) -> None:
        for _ in range(reader.count()):
            key, storage_key, _ = reader.fields(3)
            self._require_new(reader, key)
            storage = self._storage_of(reader, storage_key)
            # The number of axes takes four bytes, followed by four that PyTorch ignores; then come sizes,
            # strides and the offset in the storage, in elements, as int64.
            axes = int.from_bytes(reader.source.read(reader.skip(8), 4), "little", signed=True)
            if not 0 <= axes <= MAX_AXES or storage.dtype is None:
                reader.fail(f"a tensor of {axes:,} axes")
            shape, strides = reader.integers(axes), reader.integers(axes)
            (offset,) = reader.integers(1)
            self.tensors[key] = self._objects.tensor_view(storage, storage.dtype, offset, shape, strides)
        self._findings += reader.trailing_findings()

    def _storage_of(self, reader: _TarReader, key: object) -> Storage:
        if type(key) is not int or key not in self.storages:
            reader.fail(f"a reference to an unknown storage {describe(key)}")
        return self.storages[key]

    def _require_new(self, reader: _TarReader, key: object) -> None:
        if type(key) is not int or key in self.storages or key in self.tensors:
            reader.fail(f"an invalid or duplicate key {describe(key)}")


class _TarObjects(TorchObjects):
    """Reads the object, in which a persistent id is the key of a tensor or storage."""

    def __init__(self, path: str, contents: _TarContents) -> None:
        super().__init__(path, no_storage)
        self._contents = contents

    def storage_leaf(self, node: Persistent) -> Leaf[TensorParts] | None:
        if module_fields(node.id) is not None:
            return None
        key = int(node.id) if isinstance(node.id, str) and node.id[:20].isdecimal() else node.id
        if type(key) is int and key in self._contents.tensors:
            return Leaf((((), self._contents.tensors[key]),))
        storage = self._contents.storages.get(key) if type(key) is int else None
        if storage is None or storage.dtype is None:
            found = f"an unknown reference {describe(node.id)}"
            raise DamagedCheckpoint(self.path, found, where="pickle", code="tensor-damaged")
        shape = (storage.nbytes // storage.dtype.itemsize,)
        return Leaf((((), self.tensor_view(storage, storage.dtype, 0, shape, (1,))),))
