"""One item of a distributed checkpoint: a whole file of ``torch.save`` that is inside another file."""

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
from ckpttool.formats.content.assembly import tree_of
from ckpttool.formats.content.tree import TensorParts, flatten
from ckpttool.formats.torch.objects import TorchObjects
from ckpttool.formats.torch.tree_nodes import torch_node
from ckpttool.formats.torch.zip import Records, StorageRecords, trailing_findings
from ckpttool.storage.source import Part, Source

_MAX_KNOWN, _MAX_KNOWN_BYTES = 512, 4096
_MAX_TEMPLATE = 1 << 16  # bytes around the values; torch writes 1,500
_PICKLE = 0x80
_CENTRAL_FIELDS = struct.Struct("<16xI8x3H8xI")  # checksum; lengths of name, extra, comment; local header
_CENTRAL_BYTES, _CHECKSUM_IN_CENTRAL, _CHECKSUM_IN_LOCAL = 46, 16, 14
_HAS_DESCRIPTOR, _CHECKSUM_IN_DESCRIPTOR = 0x0008, 4
_DIRECTORY_BEFORE_END = 6  # where the end record says, in 4 bytes, at which offset the directory begins


class Item(NamedTuple):
    """What an item holds; extents count from the start of the file that it is in."""

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
    """Gives what it holds as ``Checkpoint.tree``, from the tensors with their names."""

    def spans(self, file: str) -> Iterator[Span]:
        """Iterate over its records; ``file`` is the name for people of the file that it is in."""
        for span in self.records().spans(self.stored):
            extent = span.extent._replace(offset=self.base + span.extent.offset)
            yield span._replace(extent=extent, where=f"{self.fqn}: {file}: {span.where}")


class KnownPickles:
    """Interprets the pickles of items; chunks of one type and shape have the very same one."""

    def __init__(self) -> None:
        self._known: dict[bytes, PickleSequence] = {}

    def read(self, records: Records) -> PickleSequence:
        """Return what the main pickle of an item holds."""
        member = records.by_name.get("data.pkl")
        if member is None or member.size > _MAX_KNOWN_BYTES:
            return records.judged_pickle("data.pkl")
        data = records.archive.read(member)
        if data not in self._known:
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            self._known[data] = read_pickles(Buffer(records.path, data), 0, len(data), member.name)
        return self._known[data]


def open_item(source: Source, place: Extent, fqn: str, pickles: KnownPickles) -> Item:
    """Return what is at a place."""
    records = _records(source, place, fqn)
    judged = pickles.read(records)
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
        (*judged.safety, *records.judged_others("data.pkl")),
        tree_of(root, leaf, source.path, torch_node),
    )


def _records(source: Source, place: Extent, fqn: str) -> Records:
    return Records(Archive(Part(source, place.offset, place.nbytes, fqn)), source.path)


def _parts_in_file(parts: TensorParts, source: Source, base: int) -> TensorParts:
    """Return a tensor with its extents counted from the start of the file."""
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
    """Opens the items of a checkpoint: one of a kind is looked through, the others are compared with it.

    Chunks of one type and shape differ in their values and checksums alone, wherever torch wrote them.
    """

    def __init__(self) -> None:
        self._pickles = KnownPickles()
        self._templates: dict[Hashable, _ItemTemplate] = {}

    def open(self, source: Source, place: Extent, fqn: str, kind: Hashable) -> Item:
        """Return what is at a place; ``kind`` is what it should be."""
        template = self._templates.get((kind, place.nbytes))
        if template is not None and template.matches(source, place):
            return template.item_at(source, place, fqn)
        item = open_item(source, place, fqn, self._pickles)
        template = _make_template(source, place, item)
        if template is not None:
            self._templates[kind, place.nbytes] = template
        return item


class _ItemTemplate(NamedTuple):
    """What the bytes of all items of a kind have in common.

    Attributes:
        item: The one that was looked through.
        skipped: Where the values begin and end, which are not read; offsets below don't count them.
        constants: Bytes that are the same in all, and where.
        checksums: Of each record that is another in each: all the places of its one checksum.
        others: Where records begin that are no values, and must not be pickles.
    """

    item: Item
    skipped: tuple[int, int]
    constants: tuple[tuple[int, bytes], ...]
    checksums: tuple[tuple[int, ...], ...]
    others: tuple[int, ...]

    def matches(self, source: Source, place: Extent) -> bool:
        """Return whether what is at a place is the same item but for values and checksums."""
        data = _read_except(source, place, self.skipped)
        if not all(data.startswith(constant, offset) for offset, constant in self.constants):
            return False
        for first, *others in self.checksums:
            checksum = data[first : first + 4]
            # 0 is what a file without checksums has.
            if checksum == b"\0\0\0\0" or not all(data.startswith(checksum, offset) for offset in others):
                return False
        return not any(data[offset] == _PICKLE for offset in self.others)

    def item_at(self, source: Source, place: Extent, fqn: str) -> Item:
        """Return the item at a place that matches."""
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
    """Return the bytes of an item without those in a range."""
    start, end = skipped
    if place.nbytes <= _MAX_KNOWN_BYTES:
        data = source.read(place.offset, place.nbytes)
        return data[:start] + data[end:]
    return source.read(place.offset, start) + source.read(place.offset + end, place.nbytes - end)


def _make_template(source: Source, place: Extent, item: Item) -> _ItemTemplate | None:
    """Return what items that are like this one have in common, or None where it is not a plain tensor's."""
    if item.findings or item.safety or [path for path, _ in item.stored] != [()]:
        return None
    if not isinstance(item.stored[0][1].values, Contiguous):
        return None
    members = item.records().archive.members
    # What differs from item to item: the values, and the number that torch gives each save.
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
        tuple(_between(data, sorted(ranges))),
        tuple(checksums),
        tuple(index(member.payload) for member in others),
    )
    return template if template.matches(source, place) else None


def _central_checksums(data: bytes, index: Callable[[int], int]) -> dict[int, int]:
    """Return where the directory has each record's checksum, in the item, by the record's own offset."""
    (start,) = struct.unpack("<I", data[-_DIRECTORY_BEFORE_END:-2])
    gap = start - index(start)
    entry, checksums = index(start), {}
    while data.startswith(b"PK\x01\x02", entry):
        _, name, extra, comment, header = _CENTRAL_FIELDS.unpack_from(data, entry)
        checksums[header] = entry + gap + _CHECKSUM_IN_CENTRAL
        entry += _CENTRAL_BYTES + name + extra + comment
    return checksums


def _between(data: bytes, ranges: list[tuple[int, int]]) -> Iterator[tuple[int, bytes]]:
    """Yield the bytes between ranges, and where they begin."""
    start = 0
    for begin, end in (*ranges, (len(data), len(data))):
        if start < begin:
            yield start, data[start:begin]
        start = max(start, end)
