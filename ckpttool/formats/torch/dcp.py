"""Distributed checkpoints of ``torch.distributed.checkpoint``: a directory with the chunks of each rank.

``.metadata``, which is written last, has the type, shape and chunks of each tensor, and the place of each
chunk: file, offset and length (``dcp_metadata.py``). A place in a ``__<rank>_<n>.distcp`` file holds an
*item*, a whole file of ``torch.save`` with checksums, of a chunk or of any other object (``dcp_items.py``).
Here the items are opened file by file, and the chunks assembled into tensors.

Lightning's Fabric (``meta.pt``) and Megatron (``common.pt`` and ``metadata.json``) write a file of
everything that isn't sharded, whose content joins the items'.

Source: PyTorch ``torch/distributed/checkpoint/filesystem.py``, ``default_planner.py``.
"""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

from ckpttool.containers.jsontext import parse_json
from ckpttool.core.checkpoint import Checkpoint, Producer
from ckpttool.core.dtypes import DType
from ckpttool.core.errors import CheckpointError, DamagedCheckpoint, Unsupported
from ckpttool.core.report import error, not_scanned, warning
from ckpttool.core.tensor import FLAT_OPTIMIZER, Extent, Path, Role, Span, Tensor
from ckpttool.core.text import counted
from ckpttool.formats.content.assembly import name_tensors, training_of
from ckpttool.formats.content.boxes import Box, Piece, assemble
from ckpttool.formats.content.tree import NodeParts, TensorParts, fold, replace_tensors
from ckpttool.formats.interface import Format, Probe
from ckpttool.formats.opening import OpenedParts, file_entry
from ckpttool.formats.readings import add_part_name
from ckpttool.formats.sharded import unsafe_path_reason
from ckpttool.formats.sidecar import ENTRY, apply_sidecar_file
from ckpttool.formats.torch.dcp_items import Item, Items
from ckpttool.formats.torch.dcp_metadata import (
    Key,
    Metadata,
    MetadataEntry,
    tree_of,
)
from ckpttool.storage import fs
from ckpttool.storage.source import Source

METADATA = ".metadata"
EXTRA = "meta.pt"
"""Lightning Fabric's file of everything that isn't sharded."""
_ITEM_FRAME = 1 << 11
"""Bytes of records before and after an item's values, in nearly all items."""
_RANK_METADATA = re.compile(r"__\d{1,9}\.metadata")
_DATA = re.compile(r"__\d{1,9}_\d{1,9}\.distcp")
_TEMPORARY = re.compile(r"(\.metadata|__.*)\.tmp")
_MODULE = b"torch.distributed.checkpoint.metadata"
Entries = Mapping[str, os.DirEntry[str]]
MEGATRON_COMMON, MEGATRON_CONFIG = "common.pt", "metadata.json"
_BACKEND = "sharded_backend"
_MAX_CONFIG = 1 << 16
_SEPARATE_BACKEND = "torch"
"""The only ``common_backend`` of Megatron's that writes ``common.pt``."""


class TorchDcp(Format):
    """A directory that ``torch.distributed.checkpoint.save`` wrote."""

    name: ClassVar[str] = "torch-dcp"
    written = re.compile(r"(__\d+)?\.metadata|metadata\.json|(common|meta)\.pt|.*\.distcp", re.DOTALL)

    def matches(self, probe: Probe) -> bool:
        if any(_DATA.fullmatch(name) for name in probe.entries):
            return True
        # If all data files are lost, ``.metadata`` is left, a name that others use, too: Paddle's distributed
        # checkpoints have ``<uid>.metadata`` and ``.distcp`` files. The name of PyTorch's module, which is
        # near the start of the pickle, decides; nothing is interpreted for it.
        for entry in _metadata_files(probe.entries).values():
            try:
                with fs.open_source(entry.path) as source:
                    if _MODULE in source.read(0, min(source.size, 4096)):
                        return True
            except CheckpointError:
                continue
        return False

    def open(self, probe: Probe) -> Checkpoint:
        with OpenedParts("part", allows_losses=probe.allows_losses) as parts:
            directory = _DcpDirectory(probe, parts)
            directory.read()
            tensors = name_tensors([*map(_with_flat_role, directory.tensors)], directory.values)
            metadata = tree_of(directory.values)
            checkpoint = parts.checkpoint(
                path=probe.path,
                format=self.name,
                variant=None,
                tensors=tensors,
                files=tuple(file_entry(path) for path in directory.files()),
                spans=lambda: directory.spans(parts),
                metadata=lambda: metadata,
                training=lambda: training_of(metadata, tensors, probe.name),
                tree=lambda: directory.tree(tensors),
                producer=Producer("pytorch"),
                judged=directory.scanned_paths(),
            )
            return apply_sidecar_file(checkpoint, directory.sources.get(ENTRY))


def _with_flat_role(item: tuple[Path, TensorParts]) -> tuple[Path, TensorParts]:
    """Return a tensor with the optimizer's role if its one key has the prefix of Megatron's optimizer."""
    path, parts = item
    if len(path) == 1 and FLAT_OPTIMIZER.match(str(path[0])):
        return path, replace(parts, role=Role.OPTIMIZER)
    return item


def _metadata_files(entries: Entries) -> dict[str, os.DirEntry[str]]:
    """Return ``.metadata``, or else the ``__<rank>.metadata`` of all ranks."""
    if METADATA in entries and entries[METADATA].is_file():
        return {METADATA: entries[METADATA]}
    return {
        name: entry for name, entry in entries.items() if _RANK_METADATA.fullmatch(name) and entry.is_file()
    }


class _DcpDirectory:
    """The files of a checkpoint, and the tensors and values from their items.

    Attributes:
        sources: The metadata files by name.
        tensors: By path; those of items that hold no single chunk as well.
        values: Everything but tensors, by path.
    """

    def __init__(self, probe: Probe, parts: OpenedParts) -> None:
        self._probe, self._parts = probe, parts
        self.sources: dict[str, Source] = {}
        self._files: dict[str, Source] = {}
        """The ``.distcp`` files by name."""
        self._items_at: dict[str, dict[int, Item]] = defaultdict(dict)
        """The items of each ``.distcp`` file by offset."""
        self._items: dict[Key, Item] = {}
        self._metadata, self._opener = Metadata(), Items()
        self.tensors: list[tuple[Path, TensorParts]] = []
        self.values: list[tuple[Path, object]] = []
        self._extra: Checkpoint | None = None

    def read(self) -> None:
        """Open metadata and items, and assemble tensors and values; problems become findings."""
        self._read_metadata()
        self._open_items()
        for fqn, entry in self._metadata.entries.items():
            if entry.dtype is None:
                self._add_value(fqn, entry)
            else:
                self._add_tensor(fqn, entry, entry.dtype)
        self._add_extra()
        self._note_unnamed_files()

    def tree(self, tensors: tuple[Tensor, ...]) -> object:
        """Return tensors and objects in nested containers, as the paths say; None if the paths contradict."""
        by_path = {tensor.path: tensor for tensor in reversed(tensors)}
        nodes: list[tuple[Path, object]] = []
        for fqn, entry in self._metadata.entries.items():
            item = self._items.get((fqn, None))
            if entry.dtype is not None:
                nodes.append((entry.path, by_path[entry.path]))
            elif item is not None:
                nodes.append((entry.path, item.tree(tensors)))
        extra = self._extra
        if extra is not None:
            # Its keys join the root. Its tensors are replaced by those of the whole checkpoint at the same
            # paths.
            leaves = {id(tensor): by_path[tensor.path] for tensor in extra.tensors if tensor.path in by_path}
            tree = replace_tensors(extra.tree, leaves)
            nodes += [((key,), value) for key, value in tree.items()] if isinstance(tree, dict) else ()
        return containers_of_paths(nodes) if nodes else None

    def files(self) -> Iterator[str]:
        """Yield the paths of all files of the checkpoint."""
        names = (ENTRY, EXTRA, MEGATRON_COMMON, MEGATRON_CONFIG) if self._is_megatron else (ENTRY, EXTRA)
        for name, entry in self._probe.entries.items():
            if entry.is_file() and (name in names or name.endswith((".distcp", ".metadata"))):
                yield entry.path

    def scanned_paths(self) -> frozenset[str]:
        """Return the paths of the files whose pickles were judged."""
        sources = (*self.sources.values(), *self._files.values())
        return frozenset((*self._parts.judged, *(fs.abspath(source.path) for source in sources)))

    def spans(self, parts: OpenedParts) -> Iterator[Span]:
        """Yield the metadata files, which have no checksum, and the records of all items, file by file."""
        for name, source in self.sources.items():
            yield Span(Extent(source.path, 0, source.size), name, source.read_into)
        for name in self._files:
            for _, item in sorted(self._items_at[name].items()):
                yield from item.spans(name)
        yield from parts.spans()

    def _read_metadata(self) -> None:
        metadata, parts = self._metadata, self._parts
        names = _metadata_files(self._probe.entries)
        if not names:
            message = "missing; the save was interrupted before its end"
            parts.fault("part-missing", message, METADATA)
            message = "without .metadata the content of the .distcp files is unknown"
            parts.safety.append(not_scanned(None, message))
        for name, entry in names.items():
            metadata.add(entry.path, name)
            self.sources[name] = self._parts.opened.enter_context(fs.open_source(entry.path))
        sidecar = self._probe.entries.get(ENTRY)
        if sidecar is not None and sidecar.is_file(follow_symlinks=False):
            self.sources[ENTRY] = self._parts.opened.enter_context(fs.open_source(sidecar.path))
        parts.findings += metadata.findings
        parts.safety += metadata.safety
        # Items that were compressed or encrypted when they were written are not read.
        for name, number in sorted(Counter(metadata.transformed.values()).items()):
            items = counted(number, "item")
            message = f"{items} written through {name}, which is not read: nothing in them was checked"
            parts.findings.append(error("transformed", message, METADATA))
            parts.safety.append(not_scanned(METADATA, f"items written through {name}"))

    # The items -------------------------------------------------------------------------------------

    def _open_items(self) -> None:
        """Open each item once, file after file, in the order of the file."""
        by_file: dict[str, list[tuple[Extent, Key]]] = defaultdict(list)
        for key, places in self._metadata.places.items():
            for place in places:
                by_file[place.file].append((place, key))
        for name in sorted(by_file):
            source = self._open_file(name)
            if source is None:
                continue
            items = sorted(by_file[name], key=lambda item: item[0])
            self._check_ranges(name, source.size, [place for place, _ in items])
            # Only the zip records around the values are read, which are at both ends of an item. Items follow
            # each other, so one range around each boundary has the end of one and the start of the next.
            boundaries = {at for place, _ in items for at in (place.offset, place.end)}
            source.prefetch((max(0, at - _ITEM_FRAME), at + _ITEM_FRAME) for at in boundaries)
            for place, key in items:
                # Items beyond the end of the file, and transformed ones, share one finding.
                if place.end <= source.size and key not in self._metadata.transformed:
                    self._open_item(source, place, key)

    def _open_file(self, name: str) -> Source | None:
        # The names come from a pickle. All data files are in the directory itself, so a name with a slash,
        # ``..`` or a link that leads elsewhere could only make a foreign file a part of the checkpoint.
        why = unsafe_path_reason(name) or ("a path into a directory" if "/" in name else None)
        entry = self._probe.entries.get(name)
        path = os.path.join(self._probe.path, name) if entry is None else entry.path
        if why:
            self._parts.fault("part-path", f"{why}; not opened", name)
        elif self._parts.is_in_place(name, path, (fs.realpath(os.path.dirname(path)),)):
            if fs.isfile(path):
                source = self._files[name] = self._parts.opened.enter_context(fs.open_source(path))
                return source
            self._parts.fault("part-damaged", "not a regular file", name)
        self._parts.safety.append(not_scanned(name, "it was not checked"))
        return None

    def _check_ranges(self, name: str, size: int, places: list[Extent]) -> None:
        """Add findings if items overlap, leave gaps, or exceed the file."""
        # PyTorch writes items one after another, so each byte of a data file is in one item. Anything else is
        # a sign of damage, or of bytes that nothing checks.
        expected, findings = 0, self._parts.findings
        for place in dict.fromkeys(places):
            if place.offset < expected:
                message = f"the item at byte {place.offset:,} overlaps the one before it"
                findings.append(error("items-overlap", message, name))
            elif place.offset > expected:
                message = f"{place.offset - expected:,} bytes before byte {place.offset:,} belong to no item"
                findings.append(error("items-gap", message, name))
            expected = max(expected, place.end)
        if expected < size:
            message = f"{size - expected:,} bytes after the last item belong to no item"
            findings.append(error("items-gap", message, name))
        elif expected > size:
            self._parts.fault("part-truncated", f"truncated: {size:,} of {expected:,} bytes", name)
            self._parts.safety.append(not_scanned(name, "the items after its end were not read"))

    def _open_item(self, source: Source, place: Extent, key: Key) -> None:
        fqn, items = key[0], self._items_at[place.file]
        where = f"{fqn}: {place.file}"
        entry = self._metadata.entries.get(fqn)
        # Chunks of tensors of one type and shape are compared with the first of them instead of parsed.
        kind = None if entry is None or entry.dtype is None else (entry.dtype.name, entry.shape)
        try:
            item = items.get(place.offset)
            if item is None or item.nbytes != place.nbytes:
                item = items[place.offset] = self._opener.open(source, place, fqn, kind)
                self._parts.findings += (add_part_name(finding, where) for finding in item.findings)
                self._parts.safety += (add_part_name(finding, where) for finding in item.safety)
            self._items.setdefault(key, item)
        except (DamagedCheckpoint, Unsupported) as failure:
            self._parts.fault("item-damaged", failure.placed_reason, where)
            self._parts.safety += (add_part_name(note, where) for note in getattr(failure, "safety", ()))
            self._parts.safety.append(not_scanned(where, "it could not be read"))

    # Tensors and values ---------------------------------------------------------------------------

    def _add_value(self, fqn: str, entry: MetadataEntry) -> None:
        item = self._find_item(fqn, None)
        if item is not None:
            self.tensors += ((entry.path + path, parts) for path, parts in item.tensors)
            if item.plain is not None or not item.tensors:
                self.values.append((entry.path, item.plain))

    def _add_tensor(self, fqn: str, entry: MetadataEntry, dtype: DType) -> None:
        """Add the tensor assembled from its chunks; it has no values if they don't tile it."""
        pieces = [Piece(chunk, self._chunk_tensor(fqn, entry, chunk)) for chunk in entry.chunks]
        whole, fault = assemble(self._probe.path, fqn, TensorParts(dtype, entry.shape), pieces)
        if fault is not None:
            self._parts.findings.append(fault)
            self._parts.complete = False
        self.tensors.append((entry.path, whole))

    def _chunk_tensor(self, fqn: str, entry: MetadataEntry, chunk: Box) -> TensorParts | None:
        """Return the tensor in a chunk's item; None if the item is lost or holds something else."""
        item = self._find_item(fqn, chunk.offsets)
        if item is None:
            return None
        # Type and shape are stated twice, in ``.metadata`` and in the item. If they differ, one of the two is
        # damaged or of another save, and the chunk counts as lost instead of being read in either form.
        if len(item.tensors) == 1 and item.tensors[0][0] == ():
            parts = item.tensors[0][1]
            if (parts.dtype, parts.shape) == (entry.dtype, chunk.lengths):
                return parts
            content = f"{parts.dtype} {list(parts.shape)}"
        else:
            content = f"{len(item.tensors)} tensors"
        message = f"its item holds {content}, but .metadata says {entry.dtype} {list(chunk.lengths)}"
        self._parts.findings.append(error("item-mismatch", message, fqn))
        return None

    def _find_item(self, fqn: str, offsets: tuple[int, ...] | None) -> Item | None:
        """Return the item of a chunk or value, if any; one without a place is a finding."""
        item = self._items.get((fqn, offsets))
        if item is None and (fqn, offsets) not in self._metadata.places:
            self._parts.fault("part-missing", ".metadata does not record its place", fqn)
        return item

    # Files besides the items ----------------------------------------------------------------------

    @cached_property
    def _is_megatron(self) -> bool:
        """Return whether Megatron wrote the directory, by ``.metadata`` or ``metadata.json``."""
        return self._metadata.is_megatron or _BACKEND.encode() in _megatron_config(self._probe.entries)

    def _add_extra(self) -> None:
        """Add the content of the file of everything that isn't sharded."""
        if self._is_megatron:
            self._check_megatron()
        name = MEGATRON_COMMON if self._is_megatron else EXTRA
        entry = self._probe.entries.get(name)
        if entry is None:
            return
        extra = self._extra = self._parts.add_file(name, entry.path)
        if extra is None:
            return
        for tensor in extra.tensors:
            parts = TensorParts(
                tensor.dtype, tensor.shape, tensor.values, tensor.extent, tensor.storage, tensor.byteorder
            )
            self.tensors.append((tensor.path, parts))
        self.values += (((key,), value) for key, value in extra.metadata.items())

    def _check_megatron(self) -> None:
        """Add findings about files that Megatron needs and that are lost or damaged."""
        entries, fault = self._probe.entries, self._parts.fault
        backend: object = _SEPARATE_BACKEND
        if MEGATRON_CONFIG not in entries:
            message = "missing, although Megatron writes it last: an interrupted save or an incomplete copy"
            fault("part-missing", message, MEGATRON_CONFIG)
        else:
            try:
                config = parse_json(entries[MEGATRON_CONFIG].path, _megatron_config(entries), "metadata")
            except DamagedCheckpoint as failure:
                fault("part-damaged", failure.reason, MEGATRON_CONFIG)
            else:
                if isinstance(config, dict) and isinstance(config.get(_BACKEND), str):
                    backend = config.get("common_backend", _SEPARATE_BACKEND)
                else:
                    fault("part-damaged", f"it names no {_BACKEND}", MEGATRON_CONFIG)
        if backend == _SEPARATE_BACKEND and MEGATRON_COMMON not in entries:
            message = "missing; it has everything unsharded: iteration, arguments, schedules"
            fault("part-missing", message, MEGATRON_COMMON)

    def _note_unnamed_files(self) -> None:
        """Add findings about data files that the metadata doesn't name, and temporary files."""
        files = {place.file for places in self._metadata.places.values() for place in places}
        for name in self._probe.entries:
            if name.endswith(".distcp") and name not in files and self._metadata.entries:
                self._parts.findings.append(warning("part-extra", ".metadata does not name it", name))
                self._parts.safety.append(not_scanned(name, "it was not checked"))
            elif _TEMPORARY.fullmatch(name):
                message = "left by an interrupted save"
                self._parts.findings.append(warning("part-temporary", message, name))


class _Level(dict[Any, Any]):
    """A container made from the keys of paths, as opposed to a dictionary that an item holds."""


def containers_of_paths(nodes: Iterable[tuple[Path, object]]) -> object:
    """Return nodes in nested containers by their paths; None if one path is a prefix of another."""
    root = _Level()
    for path, node in nodes:
        level = root
        for key in path[:-1]:
            inner = level.setdefault(key, _Level())
            if type(inner) is not _Level:
                return None
            level = inner
        if path[-1] in level:
            return None
        level[path[-1]] = node
    return fold(root, _list_or_dict, lambda node: None)


def _list_or_dict(node: object) -> object:
    """Return a level as a list if its keys are 0 to n, else as a dictionary."""
    if type(node) is not _Level:
        return node
    # A path in ``planner_data`` has a number for an index of a list. A list that lost elements has gaps in
    # its numbers, and becomes a dictionary, so that the other elements keep theirs.
    indices = sorted(node) if all(type(key) is int for key in node) else []
    if indices and indices == list(range(len(indices))):
        return NodeParts([node[index] for index in indices], list)
    keys = list(node)
    return NodeParts(list(node.values()), lambda values: dict(zip(keys, values, strict=True)))


def _megatron_config(entries: Mapping[str, os.DirEntry[str]]) -> bytes:
    entry = entries.get(MEGATRON_CONFIG)
    if entry is None or not entry.is_file():
        return b""
    with fs.open_source(entry.path) as source:
        return bytes(source.read(0, min(source.size, _MAX_CONFIG)))
