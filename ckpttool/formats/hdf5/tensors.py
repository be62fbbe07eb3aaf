"""HDF5 files as tensors, spans and findings; no link or reference out of the file is followed.

``walk`` lists groups, datasets, attributes and links in the child process that runs libhdf5. A contiguous
dataset is read in place, from its offset in the file; chunked and compact ones are read by the child.

The sidecar, ``ckpttool.content``, is a dataset of one text, which is read without libhdf5.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass, field, replace
from typing import Any

from ckpttool.containers.hdf5 import (
    FLETCHER32,
    MAX_CHUNK,
    SIGNATURE,
    USER_BLOCKS,
    Attributes,
    Chunk,
    Dataset,
    Kind,
    LibraryValues,
    Location,
    Tree,
    dataset_checksum,
    stated_end,
    stored_chunks,
    walk,
)
from ckpttool.containers.jsontext import parse_json
from ckpttool.core.dtypes import BY_NAME, DType
from ckpttool.core.errors import CheckpointError
from ckpttool.core.readable import Readable, reader_from, swap_width
from ckpttool.core.report import Finding, error, not_scanned, note, warning
from ckpttool.core.tensor import Extent, Path, Role, Span, Tensor, Values
from ckpttool.core.values import Contiguous
from ckpttool.formats.content.plain_data import MAX_SUMMED
from ckpttool.formats.sidecar import ENTRY, MAX_DOCUMENT

_BUILT_IN = frozenset({1, 2, FLETCHER32, 4, 5, 6, 32000})
"""Filters without a plug-in: deflate, shuffle, Fletcher-32, szip, n-bit, scale-offset, and h5py's LZF."""
_INFLATION = 1100
"""Bound on declared bytes per stored byte; deflate makes at most 1,032 bytes out of one."""
_UNSTORED = 1 << 26
"""Limit on a file's declared bytes that aren't stored but filled in when they are read."""
_MAX_SUMS, _SUM_SECONDS = 4096, 5.0
"""Limits on the datasets without numbers whose checksums are computed, and on the time for it."""
_READ = 0xD202EF8D
"""CRC-32 of one zero byte, which ``_verdict_reader`` gives for a chunk that libhdf5 found intact."""
_ANY_FLOAT = BY_NAME["float8_e5m2"]
# Layout of IEEE types in HDF5: sign position, exponent position and bits, mantissa position and bits, bias.
_FLOATS: dict[tuple[int, ...], str] = {
    (15, 10, 5, 0, 10, 15): "float16",
    (15, 7, 8, 0, 7, 127): "bfloat16",
    (31, 23, 8, 0, 23, 127): "float32",
    (63, 52, 11, 0, 52, 1023): "float64",
    (7, 2, 5, 0, 2, 15): "float8_e5m2",
}
_COMPLEX = {"float16": "complex32", "float32": "complex64", "float64": "complex128"}


@dataclass(slots=True)
class OpenedHdf5:
    """Content of an HDF5 file.

    Attributes:
        source: Source of its bytes; ``base`` is the offset of the HDF5 file in it.
        tree: Groups, datasets and links, as libhdf5 lists them.
        in_place: Whether offsets in ``source`` are offsets in a file on disk.
        tensors: By path in the file, without roles.
        described: Texts, or descriptions, of datasets that hold no numbers, by name.
        unsummed: Datasets whose descriptions still lack a checksum.
        unstored: Declared bytes so far that aren't stored.
        entry: Reads the sidecar ``ckpttool.content``, if there is one.
    """

    location: Location
    source: Readable
    base: int
    tree: Tree
    in_place: bool
    tensors: dict[tuple[str, ...], Tensor] = field(default_factory=dict)
    described: dict[str, object] = field(default_factory=dict)
    unsummed: list[Dataset] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    safety: list[Finding] = field(default_factory=list)
    unstored: int = 0
    entry: Callable[[], bytes] | None = None
    _chunks: dict[Path, tuple[Chunk, ...]] = field(default_factory=dict)

    @property
    def other_content(self) -> dict[str, object]:
        """``described``, with checksums within ``_MAX_SUMS``, ``MAX_SUMMED`` and ``_SUM_SECONDS``."""
        bytes_left, deadline = MAX_SUMMED, time.monotonic() + _SUM_SECONDS
        for dataset in self.unsummed[:_MAX_SUMS]:
            if time.monotonic() > deadline:
                break
            if (found := dataset_checksum(self.location, dataset, bytes_left)) is not None:
                crc32, nbytes = found
                bytes_left -= nbytes
                description: Any = self.described[dataset.name]
                self.described[dataset.name] = {**description, "CRC-32": f"{crc32:08x}"}
        self.unsummed.clear()
        return self.described

    @property
    def complete(self) -> bool:
        """Whether all of the file could be read."""
        return not self.tree.faults and not self.is_cut

    def spans(self) -> Iterator[Span]:
        """Yield the spans that ``verify`` reads, by offset: contiguous datasets, and chunks."""
        # Contiguous datasets have no checksums, and are scanned for NaN. A chunk may be compressed, and only
        # libhdf5 can verify its Fletcher-32: reading its span yields one zero byte if it is right, with the
        # checksum ``_READ``. Floats in chunks without one are left out: the search for NaN reads them anyway.
        # A file counts as checksummed only if all datasets have checksums. Of overlapping spans (an error of
        # its own) only the first is scanned.
        all_summed = all(
            FLETCHER32 in dataset.filters and not any(chunk.skips_filters for chunk in self.chunks(dataset))
            for dataset in self.tree.datasets.values()
            if dataset.nbytes
        )
        spans: list[Span] = []
        for tensor, dataset in self.stored_tensors():
            if tensor.extent is not None:
                read = reader_from(self.source, tensor.extent.offset)
                spans.append(Span(tensor.extent, dataset.name, read, None, tensor.dtype, tensor.byteorder))
            elif FLETCHER32 in dataset.filters or tensor.dtype.float_code is None:
                for chunk in self.chunks(dataset):
                    extent = Extent(self.location.path, self.base + chunk.offset, chunk.nbytes)
                    read = _verdict_reader(self.location, dataset, chunk.start)
                    crc32 = _READ if all_summed else None
                    spans.append(Span(extent, dataset.name, read, crc32, _ANY_FLOAT, inflated=1))
        end = 0
        for span in sorted(spans, key=lambda span: span.extent.offset):
            if span.extent.offset >= end:
                end = span.extent.end
                yield span

    def stored_tensors(self) -> Iterator[tuple[Tensor, Dataset]]:
        """Yield tensors with values in the file, and their datasets."""
        for path, tensor in self.tensors.items():
            dataset = self.tree.datasets.get(path)
            if dataset is not None and tensor.values is not None and self.in_place:
                yield tensor, dataset

    @property
    def is_cut(self) -> bool:
        """Whether bytes are missing at its end, which only ``allows_losses`` lets pass."""
        return self.base + self.location.size > self.source.size

    def holds(self, dataset: Dataset) -> bool:
        """Return whether all chunks of a dataset are in a file that may be cut off."""
        try:
            return not self.is_cut or all(
                self.base + chunk.offset + chunk.nbytes <= self.source.size for chunk in self.chunks(dataset)
            )
        except CheckpointError:  # the index of chunks is cut off
            return False

    def chunks(self, dataset: Dataset) -> tuple[Chunk, ...]:
        if dataset.path not in self._chunks:
            self._chunks[dataset.path] = stored_chunks(self.location, dataset)
        return self._chunks[dataset.path]

    def close(self) -> None:
        """Close the file in the child process."""
        self.location.close()

    def close_then(self, close: Callable[[], None]) -> Callable[[], None]:
        """Return a function that closes this file, and then calls another."""

        def close_both() -> None:
            self.close()
            close()

        return close_both


def _verdict_reader(
    location: Location, dataset: Dataset, start: tuple[int, ...]
) -> Callable[[int, memoryview], None]:
    """Return a reader that lets libhdf5 verify a chunk, discards the elements, and yields one zero byte."""

    def read(offset: int, buffer: memoryview) -> None:
        edges = zip(start, dataset.chunk or (), dataset.shape or (), strict=True)
        count = tuple(max(0, min(step, length - first)) for first, step, length in edges)
        LibraryValues(location, dataset).read_block(start, count, silent=True)
        buffer[:] = bytes(len(buffer))

    return read


def open_h5(
    location: Location, source: Readable, base: int, *, in_place: bool = True, allows_losses: bool = False
) -> OpenedHdf5:
    """Open an HDF5 file.

    Args:
        location: The file, for the child process.
        source: Source of its bytes.
        base: Offset of the HDF5 file in ``source``.
        in_place: Whether offsets in ``source`` are offsets in a file on disk.
        allows_losses: As in ``Probe``.
    """
    stated = _stated_size(source, base, location.size)
    if allows_losses and stated is not None:
        location.size = max(location.size, stated)  # libhdf5 refuses one that is shorter than it states
    tree = walk(location)
    opened = OpenedHdf5(location, source, base, tree, in_place)
    for path, dataset in tree.datasets.items():
        dtype = dtype_of(dataset.kind, dataset.attributes)
        if path == (ENTRY,) and _is_text(dataset):
            opened.entry = _text_reader(source, base, dataset)
        elif dtype is None or dataset.shape is None:
            _describe(opened, dataset)
        else:
            opened.tensors[path] = _tensor(opened, dataset, dtype)
    if opened.is_cut:
        message = f"{source.size - base:,} bytes, expected {location.size:,}"
        opened.findings.append(error("truncated", message))
    _judge_links(opened)
    opened.findings += tree.faults
    if tree.faults:
        message = "part of it was not read; links there may point anywhere"
        opened.safety.append(not_scanned(tree.faults[0].where, message))
    _judge_extents(opened)
    return opened


def _describe(opened: OpenedHdf5, dataset: Dataset) -> None:
    if dataset.values is not None:
        opened.described[dataset.name] = dataset.values
        return
    if _is_readable(opened, dataset) and dataset.shape is not None:
        opened.unsummed.append(dataset)
    shape = None if dataset.shape is None else list(dataset.shape)
    description: dict[str, object] = {"<dataset>": dataset.kind.what, "shape": shape}
    if dataset.kind.members:
        description["members"] = list(dataset.kind.members)
    opened.described[dataset.name] = description
    if dataset.kind.family == "other" and dataset.shape is not None:
        message = f"elements of type {dataset.kind.what} are described, but not read"
        opened.findings.append(note("hdf5-type", message, dataset.name))


def _tensor(opened: OpenedHdf5, dataset: Dataset, dtype: DType) -> Tensor:
    swap = swap_width(dtype.word_bytes, dataset.kind.order)
    values: Values | None = None
    extent = None
    if _is_readable(opened, dataset):
        # Contiguous elements are read from the file itself. Chunks, with their filters, are read by libhdf5
        # in a child process, which a damaged file may crash.
        if dataset.layout == "contiguous" and (dataset.offset is not None or not dataset.nbytes):
            offset = opened.base + (dataset.offset or 0)
            if not opened.is_cut:
                opened.source.check(offset, dataset.nbytes, dataset.name)
            values = Contiguous(opened.source, offset, dataset.nbytes, swap)
            extent = Extent(opened.location.path, offset, dataset.nbytes) if dataset.nbytes else None
        elif opened.holds(dataset):
            values = LibraryValues(opened.location, dataset, swap)
    extent = extent if opened.in_place else None
    order = dataset.kind.order if dtype.word_bytes > 1 else "little"
    return Tensor(dataset.path, dtype, dataset.shape or (), Role.OTHER, values, extent, extent, order)


def _is_readable(opened: OpenedHdf5, dataset: Dataset) -> bool:
    """Return whether the elements can be read from this file alone; if not, add a finding."""
    # External storage and virtual datasets read other files, any that the user can read. libhdf5 would load a
    # filter that it lacks as a shared library, and it reads whole chunks into memory.
    name, layout = dataset.name, dataset.layout
    if layout == "external":
        message = f"loading it would read the file {dataset.target!r:.100}"
        opened.safety.append(error("hdf5-external-storage", message, name))
        return False
    if layout == "virtual":
        opened.safety.append(error("hdf5-virtual", "loading it would read other datasets or files", name))
        return False
    foreign = sorted(set(dataset.filters) - _BUILT_IN)
    if foreign:
        message = f"filter {foreign[0]} needs a plug-in, which is never loaded"
        opened.findings.append(error("hdf5-filter", message, name))
        return False
    if dataset.chunk and math.prod(dataset.chunk) * dataset.kind.size > MAX_CHUNK:
        message = f"chunks of {math.prod(dataset.chunk) * dataset.kind.size:,} bytes, over {MAX_CHUNK:,}"
        opened.findings.append(error("hdf5-limit", message, name))
        return False
    return _matches_storage(opened, dataset)


def _matches_storage(opened: OpenedHdf5, dataset: Dataset) -> bool:
    """Return whether the stored bytes of a dataset suffice for its shape; if not, add a finding."""
    # A tiny file can declare a huge shape: of a chunked dataset only chunks that were written are stored, and
    # others are filled in when they are read. Compression explains a factor of ``_INFLATION``; bytes
    # beyond it count against ``_UNSTORED``, which limits all datasets of a file together.
    name, nbytes, stored = dataset.name, dataset.nbytes, dataset.stored
    is_allocated = dataset.layout != "contiguous" or dataset.offset is not None
    if dataset.layout != "chunked" and is_allocated and stored != nbytes and not dataset.kind.is_variable:
        message = f"{stored:,} bytes are stored, but its shape needs {nbytes:,}"
        opened.findings.append(error("hdf5-size", message, name))
        return False
    if not nbytes or (nbytes <= _INFLATION * stored and is_allocated):
        return True
    opened.unstored += nbytes
    if opened.unstored > _UNSTORED:
        message = f"{stored:,} bytes are stored for a shape of {nbytes:,} bytes"
        opened.findings.append(error("hdf5-shape-bomb", message, name))
        return False
    if not stored:
        message = "its values were never written; readers see a fill value"
        opened.findings.append(warning("values-not-written", message, name))
    return True


def _judge_links(opened: OpenedHdf5) -> None:
    """Add a finding for each link; a second hard link to a dataset becomes a tied tensor."""
    # Hard links are found by the address of the object, which ``walk`` has seen before under ``target``.
    for path, kind, target in opened.tree.links:
        name = "/" + "/".join(path)
        if kind == "external":
            opened.safety.append(error("hdf5-external-link", f"loading it would open {target!r:.100}", name))
        elif kind == "soft":
            message = f"a link to {target!r:.100}; it was not followed"
            opened.findings.append(warning("hdf5-soft-link", message, name))
        elif kind == "again-dataset":
            owner = opened.tensors.get(tuple(target.split("/")[1:]))
            if owner is not None:
                opened.tensors[path] = replace(owner, path=path, shares_with=owner.name)
        elif kind == "again-group":
            message = f"it is the same group as {target or '/'!r:.100}"
            is_cycle = f"{name}/".startswith(f"{target}/")
            if is_cycle:
                opened.findings.append(warning("hdf5-cycle", message, name))
            else:
                opened.findings.append(note("hdf5-shared-group", message, name))
        else:
            opened.findings.append(note("hdf5-type", "a named type", name))


def _judge_extents(opened: OpenedHdf5) -> None:
    """Add findings for bytes of two tensors, and for those after the end of file in the superblock."""
    extents = sorted(
        (tensor.extent.offset, tensor.extent.end, tensor.name)
        for tensor, _ in opened.stored_tensors()
        if tensor.extent
    )
    for (_, end, name), (offset, _, other) in itertools.pairwise(extents):
        if offset < end:
            message = f"its bytes overlap those of {name!r}"
            opened.findings.append(error("hdf5-overlap", message, other))
    size = opened.location.size
    stated = _stated_size(opened.source, opened.base, size)
    if stated is not None and size > stated:
        message = f"bytes after the stated end of the file: {size - stated:,}"
        opened.findings.append(warning("trailing-bytes", message))


def _stated_size(source: Readable, base: int, size: int) -> int | None:
    """Return the size in a file's superblock, None if it has no readable one."""
    for start in USER_BLOCKS:
        if start + 64 <= min(size, source.size - base) and source.read(base + start, 8) == SIGNATURE:
            return stated_end(source.read(base + start, 64))
    return None


def dtype_of(kind: Kind, attributes: Attributes) -> DType | None:
    """Return the type of a dataset's elements, or None if they are no numbers."""
    # h5py writes bool as an enumeration and complex numbers as a compound. Keras writes bfloat16 as opaque
    # with an attribute ``dtype``; without one, opaque elements of 1 or 2 bytes are of an unknown type.
    if kind.family == "bool":
        return BY_NAME["bool"]
    if kind.family == "int":
        return BY_NAME.get(f"{'' if kind.signed else 'u'}int{8 * kind.size}")
    if kind.family in ("float", "complex"):
        name = _FLOATS.get(kind.fields, "")
        if kind.family == "complex":
            name = _COMPLEX.get(name, "")
        dtype = BY_NAME.get(name)
        return dtype if dtype and dtype.itemsize == kind.size else None
    if kind.family == "opaque":
        stated = attributes.get("dtype")
        dtype = BY_NAME.get(stated) if isinstance(stated, str) else None
        return dtype if dtype and dtype.bits == 8 * kind.size else BY_NAME.get(f"bits{8 * kind.size}")
    return None


# The sidecar ------------------------------------------------------------------------------------------


def _is_text(dataset: Dataset) -> bool:
    """Return whether a dataset is a scalar string of fixed length, stored contiguously."""
    is_one = dataset.kind.family == "string" and not dataset.kind.is_variable and dataset.shape == ()
    in_place = dataset.layout == "contiguous" and dataset.offset is not None
    return is_one and in_place and dataset.stored == dataset.nbytes <= MAX_DOCUMENT


def _text_reader(source: Readable, base: int, dataset: Dataset) -> Callable[[], bytes]:
    """Return a function that reads the text; ``base`` is the offset of the HDF5 file in its source."""
    offset, nbytes, name = base + (dataset.offset or 0), dataset.nbytes, dataset.name

    def read() -> bytes:
        source.check(offset, nbytes, name)
        return source.read(offset, nbytes, name).rstrip(b"\0")

    return read


def hdf5_path(path: Path) -> tuple[str, ...]:
    """Return the groups and the dataset of a tensor's path; slashes in its parts make groups."""
    return tuple(name for part in path for name in str(part).split("/"))


def restore_slashes(tensors: tuple[Tensor, ...], document: bytes) -> tuple[Tensor, ...]:
    """Return tensors with the paths that the sidecar has for them, where parts of these have slashes."""
    # HDF5 separates groups by slashes, so a key with a slash became several groups when it was written. Only
    # the sidecar has the key as it was.
    paths = _paths_with_slashes(document, {tensor.path for tensor in tensors}) if b"/" in document else {}
    changed = {
        tensor.name: replace(tensor, path=paths[tensor.path], key="/" + "/".join(map(str, tensor.path)))
        for tensor in tensors
        if tensor.path in paths
    }
    names = {name: tensor.name for name, tensor in changed.items()}
    restored = []
    for old in tensors:
        tensor = changed.get(old.name, old)
        if owner := tensor.shares_with:
            tensor = replace(tensor, shares_with=names.get(owner, owner))
        restored.append(tensor)
    return tuple(restored)


def _paths_with_slashes(document: bytes, taken: Set[Path]) -> dict[Path, Path]:
    """Return the paths with slashes in a sidecar by their datasets' paths, except those in ``taken``."""
    try:
        parsed: Any = parse_json("", document, "entry")
    except CheckpointError:
        return {}
    entries = parsed.get("tensors") if isinstance(parsed, dict) else None
    paths: dict[Path, Path] = {}
    for entry in entries.values() if isinstance(entries, dict) else ():
        path = entry.get("path") if isinstance(entry, dict) else None
        if isinstance(path, list) and all(type(part) in (str, int) for part in path):
            parts = hdf5_path(tuple(path))
            if len(parts) != len(path) and tuple(path) not in taken:
                paths[parts] = tuple(path)
    return paths
