"""Items of a distributed checkpoint: whole files of ``torch.save`` inside another file.

Large checkpoints have many items of the same few types and shapes, which PyTorch writes with the
same bytes except for values, checksums and a serialization id. So the first item of each type, shape and size
is parsed, and becomes a template; of the others only the bytes around the values are read and compared.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from ckpttool.containers.pickle.pickle_safety import PickleSequence, attach_safety, read_pickles
from ckpttool.containers.zip_reader import STORED, Archive
from ckpttool.core.readable import Buffer
from ckpttool.core.report import Finding
from ckpttool.core.tensor import Extent, Path, Span, Tensor
from ckpttool.core.values import Contiguous
from ckpttool.formats.content.assembly import tree_builder
from ckpttool.formats.content.tree import TensorParts, flatten
from ckpttool.formats.torch.objects import TorchObjects
from ckpttool.formats.torch.tree_nodes import torch_node
from ckpttool.formats.torch.zip import Records, StorageRecords, trailing_findings
from ckpttool.storage.source import Part, Source

_MAX_KNOWN, _MAX_KNOWN_BYTES = 512, 4096
_MAX_TEMPLATE = 1 << 16  # bytes around the values; PyTorch writes some 1,500
_PICKLE = 0x80  # the first byte of a pickle: the opcode PROTO
_CENTRAL_FIELDS = struct.Struct("<16xI8x3H8xI")  # checksum; lengths of name, extra, comment; local header
_CENTRAL_BYTES, _CHECKSUM_IN_CENTRAL, _CHECKSUM_IN_LOCAL = 46, 16, 14
_HAS_DESCRIPTOR, _CHECKSUM_IN_DESCRIPTOR = 0x0008, 4
_DIRECTORY_BEFORE_END = 6  # where the end record says, in 4 bytes, at which offset the directory begins


class Item(NamedTuple):
    """The content of an item.

    Attributes:
        nbytes: Length of the item in the file.
        base: Offset of the item in the file.
        records: Opens its archive.
        tensors: With extents counted from the start of the file.
        stored: The same tensors, with extents counted from the start of the item.
        plain: Everything but tensors, as plain data.
    """

    fqn: str
    nbytes: int
    base: int
    records: Callable[[], Records]
    tensors: tuple[tuple[Path, TensorParts], ...]
    stored: list[tuple[Path, TensorParts]]
    plain: object
    findings: tuple[Finding, ...]
    safety: tuple[Finding, ...]
    tree: Callable[[tuple[Tensor, ...]], object]
    """Returns the content as ``Checkpoint.tree``, given the checkpoint's tensors."""

    def spans(self, file: str) -> Iterator[Span]:
        """Yield the item's records; ``file`` is the file's name in messages."""
        for span in self.records().spans(self.stored):
            extent = span.extent._replace(offset=self.base + span.extent.offset)
            yield span._replace(extent=extent, where=f"{self.fqn}: {file}: {span.where}")


def _read_pickle(records: Records, known: dict[bytes, PickleSequence]) -> PickleSequence:
    """Return the interpreted ``data.pkl`` of an item; chunks of one type and shape have the same bytes."""
    member = records.by_name.get("data.pkl")
    if member is None or member.size > _MAX_KNOWN_BYTES:
        return records.read_pickle("data.pkl")
    data = records.archive.read(member)
    if data not in known:
        if len(known) >= _MAX_KNOWN:
            known.clear()
        known[data] = read_pickles(Buffer(records.path, data), 0, len(data), member.name)
    return known[data]


def open_item(
    source: Source, place: Extent, fqn: str, known: dict[bytes, PickleSequence] | None = None
) -> Item:
    """Return the item at a place of a file; ``known`` is a cache of pickles by their bytes."""
    records = _records(source, place, fqn)
    judged = _read_pickle(records, {} if known is None else known)
    with attach_safety(judged.safety):
        resolve = StorageRecords(records, "data")
        root, leaf = judged.pickles[0].root, TorchObjects(source.path, resolve).leaf
        flat = flatten(root, leaf, source.path)
        findings = (*records.findings(), *resolve.findings(flat.tensors), *trailing_findings(judged))
    return Item(
        fqn,
        place.nbytes,
        place.offset,
        lambda: records,
        tuple((path, _parts_in_file(parts, source, place.offset)) for path, parts in flat.tensors),
        flat.tensors,
        flat.plain,
        findings,
        (*judged.safety, *records.judge_others(("data.pkl",))),
        tree_builder(root, leaf, source.path, torch_node),
    )


def _records(source: Source, place: Extent, fqn: str) -> Records:
    return Records(Archive(Part(source, place.offset, place.nbytes, fqn)), source.path)


def _parts_in_file(parts: TensorParts, source: Source, base: int) -> TensorParts:
    """Return a tensor with its extents counted from the start of the file."""
    # Storages are numbered within an item, so each item has a storage 0. File and offset of the item
    # distinguish them; otherwise all tensors would seem to be tied.
    return replace(
        parts,
        extent=_extent_in_file(parts.extent, source, base),
        storage=_extent_in_file(parts.storage, source, base),
        identity=None if parts.identity is None else (source.path, base, parts.identity),
    )


def _extent_in_file(extent: Extent | None, source: Source, base: int) -> Extent | None:
    return None if extent is None else Extent(source.path, base + extent.offset, extent.nbytes)


# Items of one type and shape --------------------------------------------------------------------------


class Items:
    """Opens the items of a checkpoint, with a template for each kind and size."""

    def __init__(self) -> None:
        self._pickles: dict[bytes, PickleSequence] = {}
        self._templates: dict[Hashable, _ItemTemplate] = {}

    def open(self, source: Source, place: Extent, fqn: str, kind: Hashable) -> Item:
        """Return the item at a place; ``kind`` is its tensor's type and shape according to the metadata."""
        template = self._templates.get((kind, place.nbytes))
        if template is not None and template.matches(source, place):
            return template.item_at(source, place, fqn)
        item = open_item(source, place, fqn, self._pickles)
        template = _make_template(source, place, item)
        if template is not None:
            self._templates[kind, place.nbytes] = template
        return item


class _ItemTemplate(NamedTuple):
    """The bytes that all items of a kind share.

    Attributes:
        item: The item that was parsed.
        skipped: Range of the values, which aren't read; the offsets below are without it.
        constants: Offset and content of the bytes that are the same in all.
        checksums: For each record that varies, the offsets of its checksum: in the central directory, and
            in the local header or the data descriptor.
        others: Offsets of varying records besides the values, which must not be pickles.
    """

    item: Item
    skipped: tuple[int, int]
    constants: tuple[tuple[int, bytes], ...]
    checksums: tuple[tuple[int, ...], ...]
    others: tuple[int, ...]

    def matches(self, source: Source, place: Extent) -> bool:
        """Return whether the item at a place differs from the template in values and checksums only."""
        data = _read_except(source, place, self.skipped)
        if not all(data.startswith(constant, offset) for offset, constant in self.constants):
            return False
        for first, *others in self.checksums:
            checksum = data[first : first + 4]
            # Files without checksums have 0; their items are parsed one by one.
            if checksum == b"\0\0\0\0" or not all(data.startswith(checksum, offset) for offset in others):
                return False
        return not any(data[offset] == _PICKLE for offset in self.others)

    def item_at(self, source: Source, place: Extent, fqn: str) -> Item:
        """Return the item at a place that ``matches``."""
        ((path, parts),) = self.item.stored
        values = parts.values
        assert isinstance(values, Contiguous)  # or there would be no template
        values = values._replace(source=source, offset=place.offset + values.offset)
        tensor = replace(_parts_in_file(parts, source, place.offset), values=values)
        return Item(
            fqn,
            place.nbytes,
            place.offset,
            partial(_records, source, place, fqn),
            ((path, tensor),),
            self.item.stored,
            self.item.plain,
            (),
            (),
            lambda tensors: next((tensor for tensor in tensors if tensor.values is values), None),
        )


def _read_except(source: Source, place: Extent, skipped: tuple[int, int]) -> bytes:
    """Return the bytes of an item without those of a range, in one read if it is small."""
    start, end = skipped
    if place.nbytes <= _MAX_KNOWN_BYTES:
        data = source.read(place.offset, place.nbytes)
        return data[:start] + data[end:]
    return source.read(place.offset, start) + source.read(place.offset + end, place.nbytes - end)


def _make_template(source: Source, place: Extent, item: Item) -> _ItemTemplate | None:
    """Return a template from an item, or None unless it holds one contiguous tensor and nothing else."""
    if item.findings or item.safety or [path for path, _ in item.stored] != [()]:
        return None
    if not isinstance(item.stored[0][1].values, Contiguous):
        return None
    members = item.records().archive.members
    # Two records vary from item to item: the values, and the serialization id. All their checksums vary with
    # them, and everything else must be equal byte for byte.
    paths = {member.header: member.name.partition("/")[2] for member in members}
    varying = [
        member
        for member in members
        if member.size
        and (paths[member.header].startswith("data/") or paths[member.header] == ".data/serialization_id")
    ]
    values = [member for member in varying if "/data/" in member.name]
    if len(values) != 1 or any(member.method != STORED for member in members):
        return None
    skipped = values[0].payload, values[0].end
    gap = skipped[1] - skipped[0]
    if place.nbytes - gap > _MAX_TEMPLATE:
        return None
    data = _read_except(source, place, skipped)

    def index(offset: int) -> int:
        return offset if offset < skipped[1] else offset - gap

    central = _central_checksums(data, index)
    if not all(member.header in central for member in varying):
        return None
    checksums: list[tuple[int, ...]] = []
    for member in varying:
        has_descriptor = member.flags & _HAS_DESCRIPTOR
        second = (
            member.end + _CHECKSUM_IN_DESCRIPTOR if has_descriptor else member.header + _CHECKSUM_IN_LOCAL
        )
        checksums.append((index(central[member.header]), index(second)))
    others = [member for member in varying if member is not values[0]]
    ranges = [(start, start + 4) for starts in checksums for start in starts]
    ranges += [(index(member.payload), index(member.end)) for member in others]
    template = _ItemTemplate(
        item,
        skipped,
        tuple(_gaps(data, sorted(ranges))),
        tuple(checksums),
        tuple(index(member.payload) for member in others),
    )
    # An archive that isn't as assumed above (a comment at its end, checksums of 0) gives wrong offsets. Then
    # the template doesn't match the item that it is from, and the items are parsed one by one.
    return template if template.matches(source, place) else None


def _central_checksums(data: bytes, index: Callable[[int], int]) -> dict[int, int]:
    """Return the offset of each record's checksum in the central directory, by the record's own offset."""
    # PyTorch writes no comment after the end record, so the offset of the directory is in the four bytes
    # before the comment's length, the last two of the item. ``data`` lacks the values: offsets after them are
    # smaller by ``gap`` in it, but those that the archive states count from the item's start.
    (start,) = struct.unpack("<I", data[-_DIRECTORY_BEFORE_END:-2])
    gap = start - index(start)
    entry, checksums = index(start), {}
    while data.startswith(b"PK\x01\x02", entry):
        _, name, extra, comment, header = _CENTRAL_FIELDS.unpack_from(data, entry)
        checksums[header] = entry + gap + _CHECKSUM_IN_CENTRAL
        entry += _CENTRAL_BYTES + name + extra + comment
    return checksums


def _gaps(data: bytes, ranges: list[tuple[int, int]]) -> Iterator[tuple[int, bytes]]:
    """Yield offset and content of the bytes between ranges."""
    start = 0
    for begin, end in (*ranges, (len(data), len(data))):
        if start < begin:
            yield start, data[start:begin]
        start = max(start, end)
