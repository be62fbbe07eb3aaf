"""PyTorch's serialization before the zip: five pickles, then the storages.

The pickles are ``PARTS``. After them each storage is a count of elements (int64) and its bytes, one after
another in the order of the last pickle, without alignment, checksums or a directory. So the object is
interpreted first: only its persistent ids give the element type of each storage.

Source: PyTorch ``torch/serialization.py`` (``_legacy_save``, ``_legacy_load``) and
``torch/csrc/generic/serialization.cpp``, which writes little-endian values on any machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NoReturn

from ckpttool.containers.pickle.interpreter import Interpreter
from ckpttool.containers.pickle.machine import PickleBudget
from ckpttool.containers.pickle.pickle_detection import TORCH_MAGIC
from ckpttool.containers.pickle.pickle_nodes import Global, Payload, Persistent, Pickle, references
from ckpttool.containers.pickle.pickle_safety import attach_safety, findings_of_pickle, run
from ckpttool.core.checkpoint import Checkpoint, FileEntry, Producer
from ckpttool.core.dtypes import DType
from ckpttool.core.errors import DamagedCheckpoint, Truncated
from ckpttool.core.readable import Readable, reader_from
from ckpttool.core.report import Finding, trailing_bytes
from ckpttool.core.tensor import Extent, Span
from ckpttool.formats.content.assembly import checkpoint_of_tree, tree_builder
from ckpttool.formats.content.plain_data import describe
from ckpttool.formats.content.tree import Flat, Leaf, TensorParts, flatten
from ckpttool.formats.interface import Probe
from ckpttool.formats.torch.objects import Storage, TorchObjects
from ckpttool.formats.torch.tree_nodes import torch_node
from ckpttool.formats.torch.zip import element_types, parse_persistent_id, unused_storages
from ckpttool.storage.source import Source

PROTOCOL = 1001
PARTS = ("magic number", "protocol version", "system info", "object", "storage keys")
"""The pickles, in the order of the file."""

_NUMEL_BYTES = 8


def open_legacy(probe: Probe, name: str) -> Checkpoint:
    """Return the checkpoint of a file; ``name`` is the format's name."""
    source = probe.source
    pickles = LegacyPickles(source)
    with attach_safety(pickles.safety):
        root, storages, end = read_legacy(pickles, 0, source.size)
        leaf = _LegacyObjects(probe.path, storages).leaf
        flat = flatten(root, leaf, probe.path)
    trailing = source.size - end
    findings = [trailing_bytes(trailing, "the last storage")]
    return checkpoint_of_tree(
        probe=probe,
        format=name,
        variant="legacy",
        flat=note_embedded_sources(flat, pickles.sources),
        files=(FileEntry(probe.path, source.size),),
        spans=lambda: storage_spans(storages.by_key, flat),
        producer=Producer("pytorch"),
        findings=(
            *(findings if trailing else ()),
            *unused_storages(storages.by_key.values(), flat.tensors),
        ),
        safety=tuple(pickles.safety),
        tree=tree_builder(root, leaf, probe.path, torch_node),
    )


# The pickles --------------------------------------------------------------------------------------


class ContainerInterpreter(Interpreter):
    """Interprets a pickle with classes as persistent ids, ``("module", class, file, source text)``.

    ``sources`` describes the source text of each class with an object in the pickle.
    """

    def __init__(
        self,
        source: Readable,
        offset: int,
        end: int,
        where: str | None = None,
        budget: PickleBudget | None = None,
    ) -> None:
        super().__init__(source, offset, end, where, budget)
        self.sources: dict[str, str] = {}

    def call(self, function: object, args: object, kwargs: object = None, *, is_new: bool = False) -> None:
        module = module_fields(function.id) if isinstance(function, Persistent) else None
        if module is not None:
            # Its name was judged when the persistent id was built.
            function, file, text = module
            if isinstance(text, str | Payload) and text:
                length = len(text) if isinstance(text, str) else text.nbytes
                self.sources[str(function)] = f"{describe(file)}, {length:,} characters"
        super().call(function, args, kwargs, is_new=is_new)


def module_fields(persistent_id: object) -> tuple[Global, object, object] | None:
    """Return class, file and source text of the persistent id of a class, or None for another id."""
    if not isinstance(persistent_id, tuple):
        return None
    fields = persistent_id[1:] if persistent_id[:1] == ("module",) else persistent_id
    if len(fields) != 3 or not isinstance(fields[0], Global):
        return None
    return fields[0], fields[1], fields[2]


class LegacyPickles:
    """Interprets several pickles of one file within one budget, and collects their safety findings."""

    def __init__(self, source: Readable) -> None:
        self.source = source
        self._budget: PickleBudget | None = None
        self.safety: dict[Finding, None] = {}
        self.sources: dict[str, str] = {}

    def read(self, offset: int, end: int, where: str) -> Pickle:
        """Interpret the pickle that starts at an offset, in bytes."""
        interpreter = ContainerInterpreter(self.source, offset, end, where, self._budget)
        self._budget = interpreter.budget
        try:
            pickle = run(interpreter)
        except DamagedCheckpoint as failure:
            self.safety |= dict.fromkeys(failure.safety)
            raise
        self.safety |= dict.fromkeys(findings_of_pickle(pickle, where))
        self.sources |= interpreter.sources
        return pickle


# The storages -------------------------------------------------------------------------------------


def read_legacy(pickles: LegacyPickles, start: int, end: int) -> tuple[object, LegacyStorages, int]:
    """Return the object and the storages between two offsets of a file, and the offset after them."""
    parts: list[Pickle] = []
    # No lengths are stored: each pickle begins after the STOP of the one before it. All five are interpreted,
    # and so judged, before any value is checked: a wrong magic number doesn't hide the others from a scan.
    for where in PARTS:
        parts.append(pickles.read(parts[-1].end if parts else start, end, where))
    magic, protocol, info, root, keys = (part.root for part in parts)
    path = pickles.source.path
    if magic != TORCH_MAGIC:
        found = "the magic number is not PyTorch's"
        raise DamagedCheckpoint(path, found, expected=f"{TORCH_MAGIC:#x}", where=PARTS[0])
    if protocol != PROTOCOL:
        raise DamagedCheckpoint(path, str(describe(protocol)), expected=str(PROTOCOL), where=PARTS[1])
    if not isinstance(info, dict):
        raise DamagedCheckpoint(path, "not a dictionary", where=PARTS[2])
    storages = LegacyStorages(pickles.source, _announced_storages(path, root))
    return root, storages, storages.locate(keys, parts[-1].end, end)


def _announced_storages(path: str, root: object) -> dict[str, tuple[DType | None, int]]:
    """Return element type and number of elements of every storage that an object refers to, by key."""
    announced: dict[str, tuple[DType | None, int]] = {}
    for reference in references(root):
        if module_fields(reference.id) is None:
            key, dtype, count = _parse_storage_id(path, reference.id)
            if announced.setdefault(key, (dtype, count)) != (dtype, count):
                found = "a storage with two types or sizes"
                raise DamagedCheckpoint(path, found, where=f"storage {key}", code="storage-size")
    return announced


def _parse_storage_id(path: str, persistent_id: Any) -> tuple[str, DType | None, int]:
    try:
        return parse_persistent_id(path, persistent_id)
    except DamagedCheckpoint as failure:
        failure.where = PARTS[3]
        raise


class LegacyStorages:
    """Finds the storage that a persistent id names, after ``locate`` has walked all storages.

    ``announced`` has element type and number of elements by key, from the persistent ids.
    """

    def __init__(self, source: Readable, announced: dict[str, tuple[DType | None, int]]) -> None:
        self._source = source
        self._announced = announced
        self._views: dict[str, tuple[str, int, int]] = {}
        self.by_key: dict[str, Storage] = {}

    def locate(self, keys: object, offset: int, end: int) -> int:
        """Walk the storages from an offset on, and return the offset after the last, in bytes."""
        # PyTorch takes the keys in this order, and the storages by it; a key that is missing, unused or
        # listed twice would shift or replace the bytes of others.
        if not isinstance(keys, list | tuple) or not all(isinstance(key, str) for key in keys):
            self._fail("not a list of strings", PARTS[4], "tensor-damaged")
        if len(set(keys)) != len(keys):
            self._fail("a duplicate key", PARTS[4], "storage-missing")
        if missing := self._announced.keys() - set(keys):
            self._fail("a tensor's storage is not listed", f"storage {min(missing)}", "storage-missing")
        if unused := set(keys) - self._announced.keys():
            self._fail("a storage that nothing refers to", f"storage {min(unused)}", "storage-unknown")
        for key in keys:
            offset = self._locate_one(key, offset, end)
        return offset

    def _locate_one(self, key: str, offset: int, end: int) -> int:
        where = f"storage {key}"
        dtype, count = self._announced[key]
        nbytes = count * (1 if dtype is None else dtype.itemsize)
        self._require(offset, _NUMEL_BYTES, end, where)
        # Each storage begins with its number of elements, which repeats that in the persistent id. There is
        # no padding and no checksum, and a storage's offset follows only from the sizes of those before it,
        # so one wrong number would shift the bytes of all that follow.
        stated = int.from_bytes(self._source.read(offset, _NUMEL_BYTES, where), "little", signed=True)
        if stated != count:
            self._fail(f"{stated:,} elements", where, "storage-size", f"{count:,}")
        start = offset + _NUMEL_BYTES
        self._require(start, nbytes, end, where)
        # A source that isn't the file itself (bytes in memory) has no extent in it.
        extent = Extent(self._source.path, start, nbytes) if isinstance(self._source, Source) else None
        self.by_key[key] = Storage(key, dtype, nbytes, self._source, start, extent)
        return start + nbytes

    def __call__(self, persistent_id: Any) -> Storage:
        """Return the storage, or a part of it if the persistent id has view metadata."""
        key, _, _ = _parse_storage_id(self._source.path, persistent_id)
        storage = self.by_key.get(key)
        if storage is None or len(persistent_id) != 6:
            self._fail("a persistent id that is not a storage", PARTS[3], "tensor-damaged")
        # ``(view key, offset, size)`` in elements if it is a part of the storage, else None.
        view = persistent_id[5]
        if view is None:
            return storage
        if not isinstance(view, tuple) or len(view) != 3 or not isinstance(view[0], str):
            self._fail("a view of a storage without key, offset and size", PARTS[3], "tensor-damaged")
        view_key, offset, count = view
        part = view_of(self._source.path, storage, offset, count)
        known = self._views.setdefault(view_key, (storage.key, offset, count))
        if view_key in self.by_key or known != (storage.key, offset, count):
            self._fail("one key for two storages", f"storage {view_key}", "tensor-damaged")
        return part

    def _require(self, offset: int, nbytes: int, end: int, where: str) -> None:
        if offset + nbytes > end:
            found = f"bytes {offset:,}..{offset + nbytes:,} are past the end"
            raise Truncated(self._source.path, found, expected=f"{end:,} bytes", where=where)

    def _fail(self, found: str, where: str, code: str, expected: str | None = None) -> NoReturn:
        raise DamagedCheckpoint(self._source.path, found, expected=expected, where=where, code=code)


def view_of(path: str, storage: Storage, offset: Any, count: Any) -> Storage:
    """Return a part of a storage as a storage; offset and count in elements."""
    width = 1 if storage.dtype is None else storage.dtype.itemsize
    if type(offset) is not int or type(count) is not int or not 0 <= offset <= offset + count:
        found = "a view of a storage without offset and size"
        raise DamagedCheckpoint(path, found, where=f"storage {storage.key}", code="tensor-damaged")
    if (offset + count) * width > storage.nbytes:
        found = f"a view of {count:,} elements from {offset:,} on, in {storage.nbytes // width:,}"
        raise DamagedCheckpoint(path, found, where=f"storage {storage.key}", code="tensor-bounds")
    start = storage.offset + offset * width
    return Storage(storage.key, storage.dtype, count * width, storage.source, start, storage.extent)


class _LegacyObjects(TorchObjects):
    """Reads an object that may contain classes as persistent ids."""

    def storage_leaf(self, node: Persistent) -> Leaf[TensorParts] | None:
        return None if module_fields(node.id) is not None else super().storage_leaf(node)


# Spans and embedded sources ------------------------------------------------------------------------


def storage_spans(storages: dict[Any, Storage], flat: Flat[TensorParts]) -> Iterator[Span]:
    """Yield every storage, in the order of the file; this format has no checksums."""
    types = element_types(flat.tensors)
    for storage in storages.values():
        if storage.extent is not None:
            dtype = types.get((storage.extent.offset, storage.nbytes), storage.dtype)
            read = reader_from(storage.source, storage.extent.offset)
            yield Span(storage.extent, f"storage {storage.key}", read, None, dtype)


def note_embedded_sources(flat: Flat[TensorParts], sources: dict[str, str]) -> Flat[TensorParts]:
    """Return the object with a description of the source texts in the file as plain data."""
    if not sources:
        return flat
    plain = flat.plain if isinstance(flat.plain, dict) else {} if flat.plain is None else {"": flat.plain}
    return replace(flat, plain={**plain, "embedded source": sources})
