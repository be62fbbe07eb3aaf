"""Reader of tensor bundles: parses the index in full and checks it against the sizes of the shards.

Each byte of an index is covered by a block's checksum, or is padding that must be zero. Elements have one
checksum for each entry, which ``Checkpoint.spans`` returns for verification; opening reads only two strings,
the object graph and our sidecar.

Source: tensorflow/tensorflow ``core/util/tensor_bundle/tensor_bundle.cc``.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial

from ckpttool.containers.table import FOOTER_BYTES, Table
from ckpttool.core.checkpoint import Checkpoint, Producer, TrainingState
from ckpttool.core.errors import (
    DamagedCheckpoint,
    LimitExceeded,
    NotDownloaded,
    NotFound,
    Unsupported,
    require_at_most,
)
from ckpttool.core.readable import MAX_READ, reader_from, swap_width
from ckpttool.core.report import Finding, error, warning
from ckpttool.core.tensor import Extent, Path, Role, Span, Tensor
from ckpttool.core.text import counted
from ckpttool.core.training import Scalar, training_state
from ckpttool.core.values import Contiguous
from ckpttool.formats.content.plain_data import lazy_scalar
from ckpttool.formats.interface import group_names, natural, scan
from ckpttool.formats.opening import Opening, file_entry
from ckpttool.formats.sidecar import ENTRY, apply_sidecar
from ckpttool.formats.tensorflow.bundle import BundleEntry, BundleHeader, read_entry, read_header, slice_key
from ckpttool.formats.tensorflow.native import native_of
from ckpttool.formats.tensorflow.object_graph import (
    GRAPH_KEY,
    GraphVariable,
    own_names,
    path_of_key,
    read_graph,
    role_of_key,
)
from ckpttool.formats.tensorflow.prefix import (
    INDEX,
    MAX_NAMED,
    META,
    PART,
    TEMPORARY,
    parts_by_prefix,
    shard_name,
)
from ckpttool.formats.tensorflow.values import (
    TensorSlice,
    checksummed_bytes,
    decoded_strings,
    require_tiling,
    slice_box,
    sliced_values,
)
from ckpttool.storage import fs
from ckpttool.storage.checksums import crc32c
from ckpttool.storage.source import Source

_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
MAX_INDEX = 1 << 26
MAX_ENTRIES = 500_000
"""Limit on entries, of some hundred bytes of memory each; real models have thousands."""
Entries = Mapping[bytes, BundleEntry]
_ALL, _PUBLIC = "_all_variables", ("variables", "trainable_variables")
_NUMBERED = re.compile(r".*-(\d{1,18})")
_RATES = frozenset({"learning_rate", "_learning_rate", "lr"})


def open_prefix(prefix: str) -> Checkpoint:
    """Return the checkpoint of a prefix, its path without ``.index``; missing files become findings."""
    with Bundle(prefix) as bundle:
        directory, name = os.path.split(prefix)
        data_files = [
            part
            for part in group_names(directory or os.curdir, parts_by_prefix).get(name, ())
            if fs.isfile(os.path.join(directory, part))
        ]
        if not fs.lexists(bundle.path):
            bundle.fault("index-missing", "missing index", os.path.basename(bundle.path))
            entries = {}
        else:
            entries = bundle.read_index()
            bundle.open_shards()
        objects = entries.pop(GRAPH_KEY.encode(), None)
        graph = bundle.graph(objects)
        content = entries.get(ENTRY.encode())
        sidecar = None
        if content is not None and content.dtype.name == "string" and not (content.shape or content.slices):
            sidecar = bundle.text(entries.pop(ENTRY.encode()), ENTRY)
        # Keys that begin with NUL are entries of slices, which are reached through their variable.
        listed = [entry for entry in entries.values() if entry.key[:1] != b"\0"]
        unordered = [bundle.tensor(entry, graph, entries) for entry in listed]
        keys = {tensor.name: entry.key for tensor, entry in zip(unordered, listed, strict=True)}
        tensors = _with_copies_marked(unordered)
        if graph:
            tensors.sort(key=lambda tensor: [natural(str(step)) for step in tensor.path])
        bundle.findings += bundle.layout_findings()
        bundle.findings += _unfinished_saves(bundle, prefix, data_files)
        paths = [bundle.path, *(source.path for source in bundle.sources.values())]
        if not entries and not bundle.sources:
            paths += [os.path.join(directory, part) for part in data_files]
        paths.append(prefix + META)

        def native() -> Mapping[str, bytes]:
            if objects is None:
                return native_of(keys, None, checkpoint.tensors)
            source = bundle.sources.get(objects.shard)
            if source is None or GRAPH_KEY in bundle.unreadable:
                return {}
            return native_of(keys, bundle.read_string(source, objects), checkpoint.tensors)

        checkpoint = bundle.checkpoint(
            path=prefix,
            format="tensorflow",
            variant=None,
            tensors=tuple(tensors),
            files=tuple(file_entry(path) for path in dict.fromkeys(paths) if fs.isfile(path)),
            spans=bundle.spans,
            training=lambda: training_of(tensors, os.path.basename(prefix)),
            own_names=lambda: own_names(tensors, graph),
            native=native,
            producer=Producer("tensorflow"),
        )
        if sidecar is not None:
            checkpoint = apply_sidecar(checkpoint, sidecar, ENTRY)
        return checkpoint


def _with_copies_marked(tensors: list[Tensor]) -> list[Tensor]:
    """Return the tensors; copies in the private list of a Keras export have the role ``OTHER``."""
    if not any(tensor.path[0] in _PUBLIC for tensor in tensors):
        return tensors
    return [
        replace(tensor, role=Role.OTHER) if len(tensor.path) == 2 and tensor.path[0] == _ALL else tensor
        for tensor in tensors
    ]


def _unfinished_saves(bundle: Bundle, prefix: str, names: Iterable[str]) -> Iterator[Finding]:
    """Yield findings about traces of a save that was interrupted, or is still running."""
    # A saver writes ``part-<i>-of-<n>`` into a temporary directory; ``MergeV2Checkpoints`` makes one index of
    # the parts, and renames their data files. A part that still has its own name was never merged.
    if PART.fullmatch(os.path.basename(prefix)):
        bundle.complete = False
        yield error("save-unfinished", "a part that its writer has not merged", os.path.basename(prefix))
    own = {os.path.basename(shard_name(prefix, at, bundle.header.shards)) for at in bundle.sources}
    for name in names:
        if TEMPORARY.fullmatch(name):
            yield warning("save-unfinished", "a file that its writer has not renamed", name)
        elif ".data-" in name and name not in own and bundle.sources:
            yield warning("shard-extra", "a shard of another save; the index does not name it", name)


def open_stage(path: str) -> Checkpoint:
    """Return the stage of an unfinished save, as an incomplete checkpoint without tensors."""
    names = [entry.path for entry in scan(path).values() if entry.is_file(follow_symlinks=False)]
    message = "its writer has not moved its content to the final place"
    return Checkpoint(
        path=path,
        format="tensorflow",
        variant=None,
        tensors=(),
        files=tuple(file_entry(name) for name in names),
        spans=lambda: iter(()),
        producer=Producer("tensorflow"),
        findings=(error("save-unfinished", message),),
        complete=False,
    )


# The index and its shards ---------------------------------------------------------------------------


class Bundle(Opening):
    """Bundle that is being opened.

    Attributes:
        sources: Open shards by number; missing ones are left out.
        stored: Entries with elements in an open shard, each with its name for findings.
        unreadable: Names of strings that were read on opening and are damaged; spans leave them out.
    """

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self.prefix = prefix
        self.path = prefix + INDEX
        self.sources: dict[int, Source] = {}
        self.stored: list[tuple[BundleEntry, str]] = []
        self.unreadable: set[str] = set()
        self.header = BundleHeader(1, "little", 1, 0)

    def read_index(self) -> dict[bytes, BundleEntry]:
        """Return all entries by key, including those of slices."""
        with fs.open_source(self.path) as source:
            # A clone without Git LFS has a pointer, a text of some 130 bytes, in place of each large file.
            if source.size >= FOOTER_BYTES and source.read(0, len(_LFS_POINTER)) == _LFS_POINTER:
                raise NotDownloaded(
                    self.path, "a Git LFS pointer, not the file", expected="run 'git lfs pull'"
                )
            require_at_most(self.path, MAX_INDEX, source.size, "an index of {:,} bytes")
            entries = Table(source).entries()
            key, value = next(entries, (None, b""))
            if key != b"":
                found = "a table without a header"
                raise DamagedCheckpoint(self.path, found, where="header", code="bundle-header")
            self.header = read_header(self.path, value)
            by_key: dict[bytes, BundleEntry] = {}
            for key, value in entries:
                by_key[key] = read_entry(self.path, key, value)
                if len(by_key) > MAX_ENTRIES:
                    raise LimitExceeded(self.path, f"more than {MAX_ENTRIES:,} entries", where="index")
            return by_key

    def open_shards(self) -> None:
        """Open all shards that exist; add findings about missing ones."""
        # TensorFlow opens and lists a bundle whose shards are missing, and fails only when it reads a tensor
        # in one of them. Here all shards are opened at once, so that a lost one is found without reading
        # values.
        missing = []
        for shard in range(self.header.shards):
            path = shard_name(self.prefix, shard, self.header.shards)
            try:
                self.sources[shard] = self.opened.enter_context(fs.open_source(path))
            except NotFound:
                missing.append(os.path.basename(path))
        for name in missing[:MAX_NAMED]:
            self.fault("shard-missing", "no such file", name)
        if len(missing) > MAX_NAMED:
            self.fault("shard-missing", f"{len(missing):,} of {self.header.shards:,} shards", None)
        if self.header.min_consumer > 1:
            found = f"it needs a reader of version {self.header.min_consumer}; this is version 1"
            raise Unsupported(self.path, found, where="header")
        if self.header.producer > 1:
            message = f"written by version {self.header.producer} of the format; version 1 is known"
            self.findings.append(warning("bundle-version", message, "header"))

    def source_of(self, entry: BundleEntry, name: str) -> Source | None:
        """Return the shard of an entry; None if it is missing or too short, which adds a finding."""
        if entry.shard >= self.header.shards:
            found = f"shard {entry.shard} of {self.header.shards}"
            raise DamagedCheckpoint(self.path, found, where=name, code="bundle-entry")
        source = self.sources.get(entry.shard)
        if source is None:
            return None
        if entry.end > source.size:
            message = f"truncated: {source.size:,} of at least {entry.end:,} bytes"
            self.fault("truncated", message, f"{os.path.basename(source.path)}: {name}")
            return None
        self.stored.append((entry, name))
        return source

    def graph(self, entry: BundleEntry | None) -> dict[str, GraphVariable]:
        """Return the variables in the object graph, by key; if it is damaged, add a finding."""
        message = self.text(entry, GRAPH_KEY)
        if message is None:
            return {}
        try:
            return read_graph(self.path, message)
        except DamagedCheckpoint as failure:
            self._add_unreadable(GRAPH_KEY, failure.code, failure.reason)
            return {}

    def text(self, entry: BundleEntry | None, name: str) -> bytes | None:
        """Return a scalar string; None if there is no entry, or if it is damaged, which adds a finding."""
        source = None if entry is None else self.source_of(entry, name)
        if entry is None or source is None:
            return None
        try:
            return self.read_string(source, entry)
        except (DamagedCheckpoint, ValueError) as failure:
            code = getattr(failure, "code", "object-graph")
            reason = failure.reason if isinstance(failure, DamagedCheckpoint) else str(failure)
            self._add_unreadable(name, code, reason)
            return None

    def read_string(self, source: Source, entry: BundleEntry) -> bytes:
        """Return a scalar string.

        Raises:
            DamagedCheckpoint: The checksum doesn't match, or the bytes can't be read.
            ValueError: The bytes aren't those of one string.
        """
        data = source.read(entry.offset, entry.nbytes, entry.name)
        stream = checksummed_bytes(source, entry, self.header.byteorder, entry.name)
        summed = bytearray(min(stream.nbytes, MAX_READ))
        stream.read(0, memoryview(summed))
        checksum = crc32c(bytes(summed))
        if checksum != entry.crc32c:
            message = f"CRC-32C is {checksum:08x} instead of {entry.crc32c:08x}"
            raise DamagedCheckpoint(self.path, message, where=entry.name, code="checksum-mismatch")
        (text,) = decoded_strings(data, 1)
        return text

    def _add_unreadable(self, name: str, code: str, reason: str) -> None:
        self.findings.append(error(code, reason, name))
        self.unreadable.add(name)

    def tensor(
        self, entry: BundleEntry, graph: dict[str, GraphVariable], entries: dict[bytes, BundleEntry]
    ) -> Tensor:
        """Return the tensor of an entry; without values if its bytes aren't available."""
        path = path_of_key(entry.name, graph)
        role = role_of_key(entry.name, entry.dtype, entry.shape, graph)
        key = None if path == (entry.name,) else entry.name
        tensor = Tensor(path, entry.dtype, entry.shape, role, byteorder=self.header.byteorder, key=key)
        if entry.slices:
            return self._sliced_tensor(tensor, entry, entries)
        source = self.source_of(entry, tensor.name)
        if source is None:
            return tensor
        extent = Extent(source.path, entry.offset, entry.nbytes)
        swap = swap_width(entry.dtype.word_bytes, self.header.byteorder)
        values = Contiguous(source, entry.offset, entry.nbytes, swap)
        return replace(tensor, values=values, extent=extent, storage=extent)

    def _sliced_tensor(self, tensor: Tensor, entry: BundleEntry, entries: Entries) -> Tensor:
        # The entry of a partitioned variable has its type, its full shape and its slices. Each slice is an
        # entry of its own, under a key made of name and bounds, with bytes that may be in another shard.
        parts, sources = [], []
        for axes_of_part in entry.slices:
            part = entries.get(slice_key(entry.key, axes_of_part))
            if part is None:
                raise DamagedCheckpoint(
                    self.path, "a slice without an entry", where=tensor.name, code="slice-missing"
                )
            parts.append(TensorSlice(slice_box(axes_of_part, entry.shape), part))
            sources.append(self.source_of(part, f"{tensor.name}[{len(parts) - 1}]"))
        require_tiling(self.path, entry, parts)
        opened = tuple(source for source in sources if source is not None)
        if len(opened) < len(sources) or entry.dtype.kind == "string":
            return tensor
        swap = swap_width(entry.dtype.word_bytes, self.header.byteorder)
        return replace(tensor, values=sliced_values(entry, parts, opened, swap))

    def layout_findings(self) -> Iterator[Finding]:
        """Yield findings about overlapping entries, gaps and trailing bytes in the shards."""
        # TensorFlow packs entries densely, unless it is asked to align them: a gap is a warning, since no
        # tensor is wrong. Overlapping entries can't all be right. Empty tensors have an offset, but take no
        # bytes.
        by_shard: dict[int, list[tuple[BundleEntry, str]]] = defaultdict(list)
        for entry, where in self.stored:
            by_shard[entry.shard].append((entry, where))
        for shard, source in self.sources.items():
            ordered = sorted(by_shard[shard], key=lambda stored: (stored[0].offset, stored[0].end))
            name = os.path.basename(source.path)
            end = gaps = 0
            for entry, where in ordered:
                if entry.nbytes and entry.offset < end:
                    message = f"bytes {entry.offset:,}..{entry.end:,} overlap another tensor"
                    yield error("extents-overlap", message, where)
                gaps += max(0, entry.offset - end) if entry.nbytes else 0
                end = max(end, entry.end if entry.nbytes else end)
            if gaps:
                yield warning("bytes-unused", f"between tensors, unused: {counted(gaps, 'byte')}", name)
            if source.size > end:
                message = f"trailing bytes after the last tensor: {source.size - end:,}"
                yield warning("trailing-bytes", message, name)

    def spans(self) -> Iterator[Span]:
        """Yield the bytes of all entries with their checksums, in the order of the files."""
        # The checksum of strings covers more bytes than are stored (see ``values.py``), and finding these
        # means reading all lengths. A span whose lengths are damaged therefore fails when it is read.
        byteorder = self.header.byteorder
        for entry, name in sorted(self.stored, key=lambda stored: (stored[0].shard, stored[0].offset)):
            if name in self.unreadable:
                continue
            source = self.sources[entry.shard]
            extent = Extent(source.path, entry.offset, entry.nbytes)
            span = partial(Span, extent, name, crc32=entry.crc32c, algorithm="crc32c")
            if entry.dtype.kind != "string":
                yield span(reader_from(source, entry.offset), dtype=entry.dtype, byteorder=byteorder)
                continue
            try:
                stream = checksummed_bytes(source, entry, byteorder, name)
            except DamagedCheckpoint as failure:
                yield span(partial(_fail, failure), inflated=1)
            else:
                yield span(stream.read, inflated=stream.nbytes)


def _fail(failure: DamagedCheckpoint, offset: int, buffer: memoryview) -> None:
    raise failure


# Training -------------------------------------------------------------------------------------------


def training_of(tensors: Iterable[Tensor], name: str) -> TrainingState:
    """Return the training state, from saved counters and the prefix ``<name>-<step>``."""
    # ``save_counter`` is the last resort: it counts saves, and equals the step only if each step was saved.
    scalars: dict[Path, Scalar] = {}
    counter: Tensor | None = None
    for tensor in tensors:
        if tensor.size != 1 or tensor.values is None:
            continue
        if tensor.role is Role.OPTIMIZER and tensor.path[-1] in _RATES:
            scalars.setdefault(("learning_rate",), lazy_scalar(tensor))
        elif tensor.path == ("save_counter",):
            counter = tensor
        elif tensor.role in (Role.TRAINING, Role.OTHER) and len(tensor.path) == 1:
            scalars[tensor.path] = lazy_scalar(tensor)
    state = training_state({}, scalars, name)
    if state.step is not None:
        return state
    if (match := _NUMBERED.fullmatch(name)) is not None:
        return replace(state, step=int(match[1]), origin={**state.origin, "step": f"prefix {name}"})
    saves = lazy_scalar(counter)() if counter is not None else None
    if not isinstance(saves, int):
        return state
    return replace(state, step=saves, origin={**state.origin, "step": "tensor save_counter"})
