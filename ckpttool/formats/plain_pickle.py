"""Plain pickles of arrays and values, as scripts write them without a framework, or with joblib.

Source: CPython ``Lib/pickle.py``; joblib ``joblib/numpy_pickle.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ckpttool.containers.compressed import Compression, Decompressed, compression_of
from ckpttool.containers.pickle.pickle_nodes import Call, Payload, Persistent, nodes, references
from ckpttool.containers.pickle.pickle_safety import attach_safety, read_joblib
from ckpttool.core.checkpoint import Checkpoint, FileEntry, Producer
from ckpttool.core.errors import DamagedCheckpoint, LimitExceeded
from ckpttool.core.readable import Buffer, Readable, reader_from
from ckpttool.core.report import Finding, error, warning
from ckpttool.core.tensor import Extent, Span
from ckpttool.formats.arrays.objects import array_as_tensor
from ckpttool.formats.content.assembly import assemble, tree_of
from ckpttool.formats.content.flattening import Flat, Leaf, TensorParts, flatten
from ckpttool.formats.content.plain_data import describe
from ckpttool.formats.interface import Probe
from ckpttool.formats.torch.legacy import Pickles, read_legacy
from ckpttool.formats.torch.objects import Storage, TorchObjects
from ckpttool.formats.torch.tree_nodes import torch_node

MAX_INNER = 1 << 28
"""The most bytes of one storage that lies inside a pickle as text."""


def open_plain(probe: Probe, name: str) -> Checkpoint:
    """Return the checkpoint of a file; ``name`` is its format's."""
    compression = compression_of(probe.head)
    source: Readable = probe.source if compression is None else Decompressed(probe.source, compression)
    judgement = read_joblib(source)
    roots = [pickle.root for pickle in judgement.pickles]
    root = roots[0] if len(roots) == 1 else roots
    is_joblib = compression is not None or any(pickle.arrays for pickle in judgement.pickles)
    objects = _PickleObjects(source, judgement.safety)
    with attach_safety(objects.safety):
        flat = flatten(root, objects.leaf, probe.path)
    functions = {str(node.function) for node in nodes(root) if isinstance(node, Call)}
    framework = None
    if any(name.startswith("torch.") for name in functions):
        framework = "pytorch"
    elif any(name.startswith("numpy.") for name in functions):
        framework = "numpy"
    framework_node = torch_node if framework == "pytorch" else array_as_tensor
    findings = []
    if judgement.trailing:
        message = f"{judgement.trailing:,} bytes behind the last pickle are no pickle"
        findings.append(error("trailing-bytes", message))
    if isinstance(source, Decompressed) and source.trailing:
        message = f"{source.trailing:,} extra bytes after the compressed stream"
        findings.append(error("trailing-bytes", message))
    if count := sum(1 for _ in references(root)):  # a library's own saver wrote the pickle
        message = f"{count:,} references to what is not in the file"
        findings.append(warning("outside-reference", message))
    return assemble(
        probe=probe,
        format=name,
        variant=_variant(compression) if is_joblib else None,
        flat=flat,
        files=(FileEntry(probe.path, probe.source.size),),
        spans=lambda: _spans(source, flat),
        producer=Producer(framework),
        findings=tuple(findings),
        safety=tuple(objects.safety),
        tree=tree_of(root, objects.leaf, probe.path, framework_node),
    )


def _variant(compression: Compression | None) -> str:
    return "joblib" if compression is None else f"joblib {compression.name}"


def _spans(source: Readable, flat: Flat[TensorParts]) -> Iterator[Span]:
    """Yield the values that lie in one piece, in the order of the file; a pickle has no checksums."""
    spans: dict[Extent, Span] = {}
    for path, parts in flat.tensors:
        if parts.storage is not None and parts.storage not in spans:
            where = ".".join(map(str, path))
            read = reader_from(source, parts.storage.offset)
            spans[parts.storage] = Span(parts.storage, where, read, None, parts.dtype, parts.byteorder)
    yield from sorted(spans.values(), key=lambda span: span.extent.offset)


class _PickleObjects(TorchObjects):
    """Reads arrays, and tensors whose storages lie in the pickle as files of the old format."""

    def __init__(self, source: Readable, safety: tuple[Finding, ...]) -> None:
        super().__init__(source.path, self._outside)
        self._path = source.path
        self._inner: dict[int, Storage] = {}
        self.safety = dict.fromkeys(safety)

    def _outside(self, persistent_id: Any) -> Storage:
        found = "a tensor whose values are not in the file"
        raise DamagedCheckpoint(self._path, found, where=str(describe(persistent_id)), code="storage-missing")

    def bare(self, node: Persistent) -> Leaf[TensorParts] | None:
        return None

    def _storage(self, node: object) -> Storage:
        if not isinstance(node, Call) or not node.is_of("torch.storage", "_load_from_bytes"):
            return super()._storage(node)
        if id(node) not in self._inner:
            self._inner[id(node)] = self._read_inner(node.args[0])
        return self._inner[id(node)]

    def _read_inner(self, content: object) -> Storage:
        """Return the storage in a file that lies in the pickle as bytes."""
        source, start, end = self._inner_bytes(content)
        pickles = Pickles(source)
        pickles.safety = self.safety
        root, storages, behind = read_legacy(pickles, start, end)
        if not isinstance(root, Persistent) or behind != end:
            raise TypeError("bytes that hold no storage")
        storage = storages(root.id)
        return replace(storage, key=f"{len(self._inner)}/{storage.key}")

    def _inner_bytes(self, content: object) -> tuple[Readable, int, int]:
        """Return where the bytes can be read, and from which offset to which."""
        if isinstance(content, bytes):
            return Buffer(self._path, content), 0, len(content)
        if not isinstance(content, Payload) or content.kind == "text":
            raise TypeError("no bytes")
        if content.kind != "latin1":
            return content.source, content.offset, content.offset + content.nbytes
        if content.nbytes > MAX_INNER:
            raise LimitExceeded(self._path, f"a storage of {content.nbytes:,} bytes of text")
        data = content.read()
        return Buffer(self._path, data), 0, len(data)
