"""A distributed checkpoint without some of its entries: items keep their bytes, and metadata name the rest.

Data files that lose an item are written anew under names that no file has: until the new ``.metadata`` takes
the place of the old one, the directory is the old checkpoint, and from then on the new one.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from isal import isal_zlib

from ckpttool.core.errors import Unsupported
from ckpttool.core.readable import reader_from
from ckpttool.core.tensor import Extent, Path, Span
from ckpttool.formats.torch.dcp import METADATA
from ckpttool.formats.torch.dcp_metadata import ItemPlace, Metadata, metadata_fields
from ckpttool.formats.torch.dcp_writer import write_fields
from ckpttool.formats.writer import Rewritten, Target, Trim
from ckpttool.io import fs
from ckpttool.io.pickle_nodes import Call
from ckpttool.io.sink import Sink
from ckpttool.io.work import Advance

_BY_NAME = ("state_dict_metadata", "planner_data", "mcore_data")
"""Fields of the metadata that are dictionaries by the names of entries; the last one is Megatron's."""
_STORED = "storage_data"
_FIELDS = frozenset({*_BY_NAME, _STORED, "storage_meta", "version"})
"""Other fields are not written again: they may hold anything."""
_NUMBERED = re.compile(r"(__\d{1,9}_)(\d{1,9})\.distcp")
_BLOCK = 1 << 20
_GROWTH = 8
"""Limit on the size of new metadata, as a multiple of the old."""


class WithoutEntries(Trim):
    """Entries below some keys go."""

    def __init__(self, path: str, gone: Collection[Path]) -> None:
        if not fs.exists(os.path.join(path, METADATA)):
            raise Unsupported(path, "each rank wrote metadata of its own")
        self._path, self._metadata = path, Metadata()
        self._metadata.add(os.path.join(path, METADATA), METADATA)
        if self._metadata.transformed or self._metadata.safety:
            found = "items that were transformed" if self._metadata.transformed else "more than plain data"
            raise Unsupported(path, found, where=METADATA)
        unknown = metadata_fields(os.path.join(path, METADATA)).keys() - _FIELDS
        if unknown:
            raise Unsupported(
                path, f"a field that PyTorch doesn't write ({min(unknown):.60})", where=METADATA
            )
        files = {place.file for places in self._metadata.places.values() for place in places}
        if others := sorted(file for file in files if not file.endswith(".distcp")):
            raise Unsupported(path, f"items in {others[0]}, which is no .distcp file", where=METADATA)
        self.lost = frozenset(
            name
            for name, entry in self._metadata.entries.items()
            if any(entry.path[:count] in gone for count in range(1, len(entry.path) + 1))
        )

    def write(self, target: Target, advance: Advance) -> Rewritten:
        path, lost = self._path, self.lost
        kept: dict[str, set[ItemPlace]] = defaultdict(set)
        changed: set[str] = set()
        for (name, _), places in self._metadata.places.items():
            for place in places:
                if name in lost:
                    changed.add(place.file)
                else:
                    kept[place.file].add(place)
        files: dict[str, str] = {}
        moved: dict[ItemPlace, ItemPlace] = {}
        spans: list[Span] = []
        taken = set(os.listdir(path))
        for file in sorted(changed):
            if not kept[file]:
                continue
            files[file] = _free_name(file, taken)
            sink = target.create(files[file])
            with fs.open_source(os.path.join(path, file)) as source:
                for place in sorted(kept[file]):
                    moved[place] = ItemPlace(files[file], sink.offset, place.nbytes)
                    crc = _copy(source.read, place, sink, advance)
                    extent = Extent(sink.path, moved[place].offset, place.nbytes)
                    spans.append(Span(extent, files[file], _read_staged(extent), crc))
        fields = dict(metadata_fields(os.path.join(path, METADATA)))
        for name in _BY_NAME:
            if isinstance(fields.get(name), dict):
                fields[name] = {key: value for key, value in fields[name].items() if key not in lost}
        most = _GROWTH * (fs.getsize(os.path.join(path, METADATA)) + _BLOCK)
        fields[_STORED] = _stored_entries(fields[_STORED], lost, moved)
        try:
            write_fields(_bounded(target.create(METADATA), most), fields)
        except (TypeError, ValueError) as failure:
            raise Unsupported(path, str(failure), where=METADATA) from failure
        return Rewritten({**files, METADATA: METADATA}, frozenset({*changed, METADATA}), tuple(spans))


def _bounded(sink: Sink, most: int) -> Callable[[bytes], object]:
    """Return what writes to a file up to so many bytes: lists that share lists are written at length."""

    def write(data: bytes) -> None:
        if sink.offset + len(data) > most:
            raise ValueError(f"it would have more than {most:,} bytes, as it shares what is in it")
        sink.write(data)

    return write


def _free_name(file: str, taken: set[str]) -> str:
    """Return a name for a data file of the same rank that no file of the directory has."""
    numbered = _NUMBERED.fullmatch(file)
    stem, number = (numbered[1], int(numbered[2])) if numbered else ("__0_", 0)
    while (name := f"{stem}{number}.distcp") in taken:
        number += 1
    taken.add(name)
    return name


def _copy(read: Callable[[int, int], Any], place: ItemPlace, sink: Sink, advance: Advance) -> int:
    """Append an item to a file, and return the checksum of its bytes."""
    crc = 0
    for offset in range(0, place.nbytes, _BLOCK):
        block = read(place.offset + offset, min(_BLOCK, place.nbytes - offset))
        crc = isal_zlib.crc32(block, crc)
        sink.write(block)
        advance(len(block))
    return crc


def _read_staged(extent: Extent) -> Callable[[int, memoryview], None]:
    """Return what reads bytes of a file that is complete by then."""

    def read(offset: int, buffer: memoryview) -> None:
        with fs.open_source(extent.file) as source:
            reader_from(source, extent.offset)(offset, buffer)

    return read


def _stored_entries(
    stored: Mapping[Call, Call], lost: Collection[str], moved: Mapping[ItemPlace, ItemPlace]
) -> Iterator[tuple[Call, Call]]:
    """Yield the entries of ``storage_data`` that stay, with the places that their items have now."""
    for index, info in stored.items():
        if index.state["fqn"] in lost:
            continue
        fields = info.state
        place = ItemPlace(fields["relative_path"], fields["offset"], fields["length"])
        now = moved.get(place, place)
        state = {**fields, "relative_path": now.file, "offset": now.offset}
        yield index, Call(info.function, info.args, state=state, is_new=info.is_new)
