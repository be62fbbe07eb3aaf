"""Records of a ``.keras`` zip, and findings on code that loading them could run.

Source: Keras ``src/saving/saving_lib.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

from ckpttool.containers.hdf5 import Location
from ckpttool.containers.zip_reader import STORED, Archive, Member, duplicate_record, with_version_errors
from ckpttool.core.errors import CheckpointError, require_at_most
from ckpttool.core.layers import LayerKind
from ckpttool.core.readable import Buffer, reader_from
from ckpttool.core.report import error, not_scanned, warning
from ckpttool.core.tensor import Extent, Span, Tensor
from ckpttool.formats.arrays.files import safety_of
from ckpttool.formats.content.plain_data import describe_members, other_records
from ckpttool.formats.hdf5.tensors import OpenedHdf5, open_h5
from ckpttool.formats.interface import Probe
from ckpttool.formats.keras.compare import compare_grouped_weights, compare_layer_names
from ckpttool.formats.keras.config import (
    ASSETS,
    MAX_CONFIG,
    judge,
    judge_record,
    read_config,
    unknown_arguments,
)
from ckpttool.formats.keras.layout import tensors_with_names
from ckpttool.formats.keras.model import KerasModel, kinds_of_groups
from ckpttool.formats.opening import Opening
from ckpttool.formats.readings import add_part_name
from ckpttool.formats.sidecar import ENTRY
from ckpttool.storage.source import Part

CONFIG, METADATA, WEIGHTS, ARRAYS = "config.json", "metadata.json", "model.weights.h5", "model.weights.npz"

MIN_INLINE = 1 << 26
INLINE_A_BYTE = 16
"""Limits on compressed weights, which are inflated into memory: bytes that any file may take, and bytes per
byte of a larger file."""

_EXPECTED = frozenset({CONFIG, METADATA, WEIGHTS, ARRAYS, ENTRY})
_ARRAYS = ".npz"


def spans_of(archive: Archive, path: str) -> Iterator[Span]:
    """Yield the byte range of each record, with the CRC-32 of its whole content."""
    for member in archive.members:
        content, start = archive.content(member), archive.offset(member)
        extent = Extent(path, member.payload, member.stored)
        inflated = None if member.method == STORED else member.size
        yield Span(extent, member.name, reader_from(content, start), member.crc32, inflated=inflated)


class KerasArchive(Opening):
    """The records of a ``.keras``, read one by one; a damaged one doesn't hide the others."""

    def __init__(self, probe: Probe) -> None:
        super().__init__()
        self.archive = probe.archive
        self.metadata: dict[str, Any] = {}
        self.weights: OpenedHdf5 | None = None
        self._probe = probe
        self._by_name: dict[str, Member] = {}

    @property
    def version(self) -> str | None:
        """Return the version of Keras that wrote it."""
        version = self.metadata.get("keras_version")
        return version if isinstance(version, str) else None

    def read(self) -> tuple[Tensor, ...]:
        """Return the tensors, after reading or judging every record."""
        # Readers differ in which of two records with one name they take, so neither can be judged.
        for member in self.archive.members:
            if member.name in self._by_name:
                raise duplicate_record(self._probe.path, member.name)
            self._by_name[member.name] = member
        self.findings += with_version_errors(self.archive.findings)
        try:
            self.metadata.update(read_config(self._probe.path, self.text(METADATA), "metadata"))
        except CheckpointError as failure:
            self.add_failure(failure, METADATA)
        self._read_config()
        for member in self._by_name.values():
            self._judge_member(member)
        known = (CONFIG, METADATA, WEIGHTS, ENTRY)
        self.metadata |= other_records(
            describe_members(self.archive, lambda name: name in known), self.metadata
        )
        return self._read_weights()

    def native(self, tensors: tuple[Tensor, ...]) -> dict[str, bytes]:
        """Return ``Checkpoint.native``."""
        from ckpttool.formats.keras.native import ASSET, STORED, stored_native
        from ckpttool.formats.keras.native import CONFIG as KEPT_CONFIG
        from ckpttool.formats.keras.native import METADATA as KEPT_METADATA

        kept = {CONFIG: KEPT_CONFIG, METADATA: KEPT_METADATA}
        kept |= {name: ASSET + name for name in self._by_name if name.startswith(ASSETS)}
        found = {key: self.text(name) for name, key in kept.items() if self.has(name)}
        if self.weights is not None:
            found[STORED] = stored_native(self.weights.tree.groups, tensors)
        return found

    def layers(self, tensors: tuple[Tensor, ...]) -> Mapping[str, LayerKind]:
        """Return the kinds of weights."""
        if self._model is None:
            return kinds_of_groups(tensors)
        return self._model.kinds_by_group(() if self.weights is None else self.weights.tree.groups, tensors)

    @cached_property
    def _model(self) -> KerasModel | None:
        return KerasModel.of_config(self.metadata.get("model_config"))

    def has(self, name: str) -> bool:
        """Return whether it has a record of a name."""
        return name in self._by_name

    def text(self, name: str) -> bytes:
        """Return the content of a record, up to a limit."""
        member = self.archive.require(self._by_name.get(name), name)
        require_at_most(self._probe.path, MAX_CONFIG, member.size, "a record of {:,} bytes", name)
        return self.archive.content(member).read(self.archive.offset(member), member.size, name)

    def _read_config(self) -> None:
        try:
            config = read_config(self._probe.path, self.text(CONFIG))
        except CheckpointError as failure:
            self.add_failure(failure, CONFIG)
            self.safety.append(not_scanned(CONFIG))
            return
        self.metadata["model_config"] = config
        self.findings += unknown_arguments(config, CONFIG)
        self.safety += judge(config, CONFIG, self._probe.source.size)

    def _judge_member(self, member: Member) -> None:
        """Add findings for a name that leads out of the target directory, and for unexpected content."""
        # Keras unpacks the records below a directory by their names: ``..``, an absolute path and, on
        # Windows, a drive (``C:``) lead out of it.
        name = member.name
        parts = name.replace("\\", "/").split("/")
        if ".." in parts or parts[0] == "" or ":" in parts[0] or "\0" in name:
            self.safety.append(
                error("member-path", "its name points outside the directory where it is unpacked", name)
            )
        if (name in _EXPECTED and not name.endswith(_ARRAYS)) or name.endswith("/"):
            return
        try:
            if name.endswith(_ARRAYS):
                self._judge_arrays(member)
                return
            content, start = self.archive.content(member), self.archive.offset(member)
            self.safety += judge_record(name, content, start, start + member.size, name)
        except CheckpointError as failure:
            self.add_failure(failure, name)

    def _judge_arrays(self, member: Member) -> None:
        """Judge the pickles in NumPy arrays, which Keras loads if the file has no HDF5."""
        if member.method != STORED:
            message = "arrays in a compressed record, which were not checked"
            self.safety.append(not_scanned(member.name, message))
            return
        part = Part(self._probe.source, member.payload, member.size, member.name)
        try:
            self.safety += (add_part_name(finding, member.name) for finding in safety_of(Archive(part)))
        except CheckpointError as failure:
            self.safety.append(not_scanned(member.name))
            self.add_failure(failure, member.name)

    def _read_weights(self) -> tuple[Tensor, ...]:
        member = self._by_name.get(WEIGHTS)
        if member is None:
            if self.has(ARRAYS):
                message = "weights in NumPy arrays, which are not read"
                self.findings.append(warning("weights-not-read", message, ARRAYS))
            else:
                self.fault("part-missing", "no such record", WEIGHTS)
            return ()
        try:
            self.weights = self._open_weights(member)
        except CheckpointError as failure:
            self.add_failure(failure, WEIGHTS)
            return ()
        groups = self.weights.tree.groups
        paths = (*groups, *self.weights.tree.datasets)
        names = {} if self._model is None else self._model.layer_names(paths)
        tensors = tensors_with_names(self.weights, names)
        self.findings += (add_part_name(finding, WEIGHTS) for finding in self.weights.findings)
        self.safety += (add_part_name(finding, WEIGHTS) for finding in self.weights.safety)
        self.complete &= self.weights.complete
        # In a salvaged file the configuration would report each lost weight as missing, although the damage
        # is a finding already.
        if self.weights.complete and self._model is not None:
            self.findings += compare_grouped_weights(self._model, self.weights)
            self.findings += compare_layer_names(names, groups)
        return tensors

    def _open_weights(self, member: Member) -> OpenedHdf5:
        # Keras stores this record without compression, so HDF5 is read in place, from the record's offset.
        # It loads a deflated one as well: such a record is inflated into memory.
        path, source = self._probe.path, self._probe.source
        if member.method == STORED:
            location = Location(path, member.payload, member.size, where=WEIGHTS)
            return open_h5(location, source, member.payload, allows_losses=self._probe.allows_losses)
        limit = max(MIN_INLINE, INLINE_A_BYTE * source.size)
        require_at_most(path, limit, member.size, "a compressed record of {:,} bytes", WEIGHTS)
        buffer = bytearray(member.size)
        self.archive.content(member).read_into(0, memoryview(buffer), member.name)
        data = bytes(buffer)
        location = Location(path, 0, len(data), data, where=WEIGHTS)
        return open_h5(location, Buffer(path, data), 0, in_place=False)
