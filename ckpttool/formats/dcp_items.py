"""One item of a distributed checkpoint: a whole file of ``torch.save`` that lies inside another file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ckpttool.checkpoint import Extent, Path, Span
from ckpttool.formats.dcp_metadata import Place
from ckpttool.formats.torch_objects import TensorParts, TorchObjects
from ckpttool.formats.torch_records import Records, StorageRecords, trailing
from ckpttool.formats.trees import flatten
from ckpttool.report import Finding
from ckpttool.wire.judgement import Judged, keeping, read_pickles
from ckpttool.wire.source import Buffer, Part, Source
from ckpttool.wire.zipped import Archive

_MAX_KNOWN, _MAX_KNOWN_BYTES = 512, 4096


@dataclass(frozen=True, slots=True)
class Item:
    """What an item holds; extents count from the start of the file that it lies in."""

    fqn: str
    nbytes: int
    base: int
    records: Records
    tensors: tuple[tuple[Path, TensorParts], ...]
    stored: list[tuple[Path, TensorParts]]
    plain: object
    findings: tuple[Finding, ...]
    safety: tuple[Finding, ...]

    def spans(self, file: str) -> Iterator[Span]:
        """Iterate over its records; ``file`` is the name for people of the file that it lies in."""
        for span in self.records.spans(self.stored):
            extent = replace(span.extent, offset=self.base + span.extent.offset)
            yield replace(span, extent=extent, where=f"{self.fqn}: {file}: {span.where}")


class Pickles:
    """Interprets the pickles of items; chunks of one type and shape have the very same one."""

    def __init__(self) -> None:
        self._known: dict[bytes, Judged] = {}

    def read(self, records: Records) -> Judged:
        """Return what the main pickle of an item holds.

        Raises:
            DamagedCheckpoint: It is missing, or not a pickle.
        """
        member = records.by_name.get("data.pkl")
        if member is None or member.size > _MAX_KNOWN_BYTES:
            return records.judged_pickle("data.pkl")
        data = records.archive.read(member)
        if data not in self._known:
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            self._known[data] = read_pickles(Buffer(records.path, data), 0, len(data), member.name)
        return self._known[data]


def open_item(source: Source, place: Place, fqn: str, pickles: Pickles) -> Item:
    """Return what lies at a place.

    Raises:
        DamagedCheckpoint: It is no whole file of ``torch.save``.
        Unsupported: It is packed in a way that is not read.
    """
    part = Part(source, place.offset, place.nbytes, fqn)
    records = Records(Archive(part), source.path)
    judged = pickles.read(records)
    with keeping(judged.safety):
        resolve = StorageRecords(records, "data")
        flat = flatten(judged.pickles[0].root, TorchObjects(source.path, resolve).leaf, source.path)
        findings = (*records.findings(), *resolve.findings(), *trailing(judged))
    return Item(
        fqn,
        place.nbytes,
        place.offset,
        records,
        tuple((path, _moved(parts, place.offset)) for path, parts in flat.tensors),
        flat.tensors,
        flat.plain,
        findings,
        (*judged.safety, *records.judged_others("data.pkl")),
    )


def _moved(parts: TensorParts, base: int) -> TensorParts:
    """Return a tensor with its extents counted from the start of the file."""
    return replace(
        parts,
        extent=_shifted(parts.extent, base),
        storage=_shifted(parts.storage, base),
        identity=(base, parts.identity),
    )


def _shifted(extent: Extent | None, base: int) -> Extent | None:
    return None if extent is None else replace(extent, offset=base + extent.offset)
