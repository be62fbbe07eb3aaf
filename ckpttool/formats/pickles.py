"""Pickles: of PyTorch before its zip, of Paddle, and of Python or joblib without a framework.

PyTorch's begin with a magic number. Paddle's have its names in their first bytes or at the end. All others
are plain. As any of them is a pickle, the three formats are here and not in their frameworks' folders: what
isn't PyTorch's is a ``PlainPickle``, and ``PaddlePickle`` one with Paddle's names. The frameworks' readers
are ``torch/legacy.py`` and ``paddle/pickles.py``.

Source: PyTorch ``torch/serialization.py``; PaddlePaddle/Paddle ``python/paddle/framework/io.py``; CPython
``Lib/pickle.py``; joblib ``joblib/numpy_pickle.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

from ckpttool.containers.compressed import Decompressed, compression_of, first_bytes
from ckpttool.containers.pickle.pickle_detection import begins_with_protocol, has_torch_magic, is_pickle
from ckpttool.containers.pickle.pickle_nodes import Call, Payload, Persistent, nodes, references
from ckpttool.containers.pickle.pickle_safety import attach_safety, read_joblib
from ckpttool.core.checkpoint import Checkpoint, FileEntry, Producer
from ckpttool.core.errors import DamagedCheckpoint, LimitExceeded
from ckpttool.core.readable import Buffer, Readable, reader_from
from ckpttool.core.report import Finding, error, warning
from ckpttool.core.tensor import Extent, Span
from ckpttool.formats.arrays.objects import array_as_tensor
from ckpttool.formats.content.assembly import checkpoint_of_tree, tree_builder
from ckpttool.formats.content.plain_data import describe
from ckpttool.formats.content.tree import Flat, Leaf, TensorParts, flatten
from ckpttool.formats.interface import Format, Probe
from ckpttool.formats.torch.legacy import LegacyPickles, open_legacy, read_legacy
from ckpttool.formats.torch.objects import Storage, TorchObjects
from ckpttool.formats.torch.tree_nodes import torch_node

MAX_TAIL = 1 << 22
"""Number of bytes at a pickle's end that are searched for Paddle's own keys, which are written last."""

_JOBLIB = ".joblib"
_FIRST = 64
"""Number of decompressed bytes in which a pickle is recognised."""
_PADDLE_NAMES = re.compile(
    rb"StructuredToParameterName@@|UnpackBigParamInfor@@|LR_Scheduler|_(?:moment[12]?|velocity|beta1_pow_acc)_\d"
)
# Each tensor of an object that is no state dict is a call of tuple, or of eval from static graphs.
_PADDLE_CALLS = re.compile(rb"(?:builtins|__builtin__)(?:\n|\x94?\x8c.)(?:tuple|eval)", re.DOTALL)
_PADDLE_KEYS = (b"StructuredToParameterName@@", b"UnpackBigParamInfor@@", b"LR_Scheduler")


class PytorchLegacy(Format):
    """A file of ``torch.save`` before PyTorch 1.6, or of its option to write that format."""

    name: ClassVar[str] = "pytorch"

    def matches(self, probe: Probe) -> bool:
        return has_torch_magic(probe.head)

    def open(self, probe: Probe) -> Checkpoint:
        return open_legacy(probe, self.name)


class PlainPickle(Format):
    """A file that Python's ``pickle`` or joblib wrote, which may compress it."""

    name: ClassVar[str] = "pickle"
    suffixes = (".pkl", ".pickle")

    def matches(self, probe: Probe) -> bool:
        head = probe.head
        if not head or has_torch_magic(head):
            return False
        if (compression := compression_of(head)) is not None:
            begin = first_bytes(compression, probe.source, _FIRST)
            # Any data may be compressed: its first bytes must be those of a pickle, or, if it is damaged,
            # its name that of one.
            is_named = probe.name.lower().endswith((*self.suffixes, _JOBLIB))
            return (is_named or begins_with_protocol(begin)) and not has_torch_magic(begin)
        return is_pickle(probe.source, 0, probe.source.size)

    def open(self, probe: Probe) -> Checkpoint:
        return open_plain(probe, self.name)


class PaddlePickle(Format):
    """A file that ``paddle.save`` pickled."""

    name: ClassVar[str] = "paddle"
    suffixes = (".pdparams", ".pdopt")
    specialises = (PlainPickle,)

    def matches(self, probe: Probe) -> bool:
        if probe.is_directory or not PlainPickle().matches(probe):
            return False
        head = probe.head
        if b"numpy" not in head:
            return False
        if _PADDLE_CALLS.search(head) or _PADDLE_NAMES.search(head):
            return True
        length = min(MAX_TAIL, probe.source.size)
        tail = probe.source.read(probe.source.size - length, length)
        return any(name in tail for name in _PADDLE_KEYS)

    def open(self, probe: Probe) -> Checkpoint:
        from ckpttool.formats.paddle.pickles import open_saved_pickle

        return open_saved_pickle(probe, self.name)


MAX_INNER = 1 << 28
"""Maximum size in bytes of a storage that is in a pickle as text."""


def open_plain(probe: Probe, name: str) -> Checkpoint:
    """Return the checkpoint of a file, as of the format ``name``."""
    # A file may hold several pickles, one after the other; joblib has the bytes of arrays between them. The
    # tree of such a file is the list of their objects.
    compression = compression_of(probe.head)
    source: Readable = probe.source if compression is None else Decompressed(probe.source, compression)
    judgement = read_joblib(source)
    roots = [pickle.root for pickle in judgement.pickles]
    root = roots[0] if len(roots) == 1 else roots
    variant = None
    if compression is not None:
        variant = f"joblib {compression.name}"
    elif any(pickle.arrays for pickle in judgement.pickles):
        variant = "joblib"
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
        message = f"{judgement.trailing:,} bytes after the last pickle are not a pickle"
        findings.append(error("trailing-bytes", message))
    if isinstance(source, Decompressed) and source.trailing:
        message = f"{source.trailing:,} extra bytes after the compressed stream"
        findings.append(error("trailing-bytes", message))
    if count := sum(1 for _ in references(root)):  # a library's own saver wrote the pickle
        message = f"{count:,} references to data that is not in the file"
        findings.append(warning("outside-reference", message))
    return checkpoint_of_tree(
        probe=probe,
        format=name,
        variant=variant,
        flat=flat,
        files=(FileEntry(probe.path, probe.source.size),),
        spans=lambda: _spans(source, flat),
        producer=Producer(framework),
        findings=tuple(findings),
        safety=tuple(objects.safety),
        tree=tree_builder(root, objects.leaf, probe.path, framework_node),
    )


def _spans(source: Readable, flat: Flat[TensorParts]) -> Iterator[Span]:
    """Yield the contiguous values, in the order of the file; a pickle has no checksums."""
    spans: dict[Extent, Span] = {}
    for path, parts in flat.tensors:
        if parts.storage is not None and parts.storage not in spans:
            where = ".".join(map(str, path))
            read = reader_from(source, parts.storage.offset)
            spans[parts.storage] = Span(parts.storage, where, read, None, parts.dtype, parts.byteorder)
    yield from sorted(spans.values(), key=lambda span: span.extent.offset)


class _PickleObjects(TorchObjects):
    """Reads arrays, and tensors whose storages are in the pickle."""

    # Python's ``pickle`` of a tensor calls ``torch.storage._load_from_bytes`` with a whole file of PyTorch's
    # legacy format: the bytes are an argument in the pickle, read in place if they are long.

    def __init__(self, source: Readable, safety: tuple[Finding, ...]) -> None:
        super().__init__(source.path, self._outside)
        self._path = source.path
        self._inner: dict[int, Storage] = {}
        self.safety = dict.fromkeys(safety)

    def _outside(self, persistent_id: Any) -> Storage:
        found = "a tensor whose values are not in the file"
        raise DamagedCheckpoint(self._path, found, where=str(describe(persistent_id)), code="storage-missing")

    def storage_leaf(self, node: Persistent) -> Leaf[TensorParts] | None:
        return None

    def _storage(self, node: object) -> Storage:
        if not isinstance(node, Call) or not node.is_of("torch.storage", "_load_from_bytes"):
            return super()._storage(node)
        if id(node) not in self._inner:
            self._inner[id(node)] = self._read_inner(node.args[0])
        return self._inner[id(node)]

    def _read_inner(self, content: object) -> Storage:
        """Return the storage of a legacy file that is in the pickle as bytes."""
        source, start, end = self._inner_bytes(content)
        pickles = LegacyPickles(source)
        pickles.safety = self.safety
        root, storages, behind = read_legacy(pickles, start, end)
        if not isinstance(root, Persistent) or behind != end:
            raise TypeError("bytes that are not a storage")
        storage = storages(root.id)
        return replace(storage, key=f"{len(self._inner)}/{storage.key}")

    def _inner_bytes(self, content: object) -> tuple[Readable, int, int]:
        """Return a source, a start and an end offset of the bytes."""
        # Protocols before 3 have no bytes, and store them as text in UTF-8: a byte above 127 takes two in the
        # file, so that they can't be read in place.
        if isinstance(content, bytes):
            return Buffer(self._path, content), 0, len(content)
        if not isinstance(content, Payload) or content.kind == "text":
            raise TypeError("not bytes")
        if content.kind != "latin1":
            return content.source, content.offset, content.offset + content.nbytes
        if content.nbytes > MAX_INNER:
            raise LimitExceeded(self._path, f"a storage of {content.nbytes:,} bytes of text")
        data = content.read()
        return Buffer(self._path, data), 0, len(data)
