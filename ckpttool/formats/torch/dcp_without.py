"""A distributed checkpoint without some of its entries: items keep their bytes, and metadata name the rest.

Data files that lose an item are written anew under names that no file has: until the new ``.metadata`` takes
the place of the old one, the directory is the old checkpoint, and from then on the new one.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any

from isal import isal_zlib

from ckpttool.containers.pickle.pickle_nodes import Call
from ckpttool.core.errors import Unsupported
from ckpttool.core.readable import reader_from
from ckpttool.core.tensor import Extent, Path, Span
from ckpttool.formats.torch.dcp import METADATA
from ckpttool.formats.torch.dcp_metadata import Metadata
from ckpttool.formats.torch.dcp_pickle import write_fields
from ckpttool.formats.writer import Rewritten, Target, Trim
from ckpttool.storage import fs
from ckpttool.storage.sink import Sink
from ckpttool.storage.work import Advance

_BY_NAME = ("state_dict_metadata", "planner_data", "mcore_data")
"""Fields of the metadata that are dictionaries by the names of entries; the last one is Megatron's."""
_STORED = "storage_data"
_FIELDS = frozenset({*_BY_NAME, _STORED, "storage_meta", "version"})
"""Other fields are not written again: they may hold anything."""
_NUMBERED = re.compile(r"(__\d{1,9}_)(\d{1,9})\.distcp")
_BLOCK = 1 << 20
_GROWTH = 8
"""Limit on the size of new metadata, as a multiple of the old."""


def without_entries(path: str, gone: Collection[Path]) -> Trim:
    """Return how a directory loses the entries below some keys, which are paths in the state dict.

    Raises:
        CheckpointError: It can't be read, or has what can't be written again.
    """
    place = os.path.join(path, METADATA)
    if not fs.exists(place):
        raise Unsupported(path, "each rank wrote metadata of its own")
    metadata = Metadata()
    fields = metadata.add(place, METADATA)
    if metadata.transformed or metadata.safety:
        found = "items that were transformed" if metadata.transformed else "more than plain data"
        raise Unsupported(path, found, where=METADATA)
    if unknown := fields.keys() - _FIELDS:
        raise Unsupported(path, f"a field that PyTorch doesn't write ({min(unknown):.60})", where=METADATA)
    files = {place.file for places in metadata.places.values() for place in places}
    if others := sorted(file for file in files if not file.endswith(".distcp")):
        raise Unsupported(path, f"items in {others[0]}, which is no .distcp file", where=METADATA)
    lost = frozenset(
        name
        for name, entry in metadata.entries.items()
        if any(entry.path[:count] in gone for count in range(1, len(entry.path) + 1))
    )
    return Trim(lost, partial(_write, path, metadata, fields, lost))


def _write(
    path: str,
    metadata: Metadata,
    fields: Mapping[str, Any],
    lost: Collection[str],
    target: Target,
    advance: Advance,
) -> Rewritten:
    kept: dict[str, set[Extent]] = defaultdict(set)
    changed: set[str] = set()
    for (name, _), places in metadata.places.items():
        for place in places:
            if name in lost:
                changed.add(place.file)
            else:
                kept[place.file].add(place)
    files: dict[str, str] = {}
    moved: dict[Extent, Extent] = {}
    spans: list[Span] = []
    taken = set(os.listdir(path))
    for file in sorted(changed & kept.keys()):
        files[file] = _free_name(file, taken)
        sink = target.create(files[file])
        with fs.open_source(os.path.join(path, file)) as source:
            for place in sorted(kept[file]):
                moved[place] = Extent(files[file], sink.offset, place.nbytes)
                crc = _copy(source.read, place, sink, advance)
                extent = Extent(sink.path, moved[place].offset, place.nbytes)
                spans.append(Span(extent, files[file], _read_staged(extent), crc))
    stay = {
        field: {key: value for key, value in fields[field].items() if key not in lost}
        for field in _BY_NAME
        if isinstance(fields.get(field), dict)
    }
    stored = _stored_entries(fields[_STORED], lost, moved)
    most = _GROWTH * (fs.getsize(os.path.join(path, METADATA)) + _BLOCK)
    try:
        write_fields(_bounded(target.create(METADATA), most), {**fields, **stay, _STORED: stored})
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


def _copy(read: Callable[[int, int], Any], place: Extent, sink: Sink, advance: Advance) -> int:
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
    stored: Mapping[Call, Call], lost: Collection[str], moved: Mapping[Extent, Extent]
) -> Iterator[tuple[Call, Call]]:
    """Yield the entries of ``storage_data`` that stay, with the places that their items have now."""
    for index, info in stored.items():
        if index.state["fqn"] in lost:
            continue
        fields = info.state
        place = Extent(fields["relative_path"], fields["offset"], fields["length"])
        now = moved.get(place, place)
        state = {**fields, "relative_path": now.file, "offset": now.offset}
        yield index, Call(info.function, info.args, state=state, is_new=info.is_new)
