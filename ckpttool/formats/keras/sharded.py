"""Keras weights in several files: ``x.weights.json`` is the index of ``x_0000N.weights.h5``.

Every shard has the groups of all layers, and variables only in those that the index maps to it. Missing,
extra, stale and damaged shards have findings of their own, and the others can still be read.

Source: Keras ``src/saving/saving_lib.py``, ``ShardedH5IOStore``.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar, NamedTuple

from ckpttool.core.checkpoint import Checkpoint, Producer
from ckpttool.core.errors import CheckpointError, require_at_most
from ckpttool.core.report import Finding, error, warning
from ckpttool.core.tensor import Tensor
from ckpttool.formats.interface import Probe, SetFormat, Unit, group_names
from ckpttool.formats.opening import OpenedParts, file_entry
from ckpttool.formats.sharded import (
    MAX_SHARDS,
    compare_with_index,
    deeper,
    read_weight_map,
    unsafe_path_reason,
)
from ckpttool.storage import fs

INDEX = re.compile(r"(?P<stem>.+)\.weights\.json")
SHARD = re.compile(r"(?P<stem>.+)_(?P<part>\d{5})\.weights\.h5")

_MAPPED = re.compile(rb'"weight_map"|\.weights\.h5"')

Entries = Mapping[str, os.DirEntry[str]]


class KerasIndex(NamedTuple):
    """Content of an index.

    Attributes:
        path: Path of the index; it need not exist.
        groups: The shards of each group of variables: ``/layers/dense/vars``.
        files: Names of all shards that may be opened, sorted.
        total: ``total_size`` as the index has it; None without one.
        findings: Duplicate keys, and names of shards that are refused.
    """

    path: str
    groups: Mapping[str, tuple[str, ...]]
    files: tuple[str, ...]
    total: object
    findings: tuple[Finding, ...]


def read_index(path: str) -> KerasIndex:
    """Return the contents of an index file."""
    # Keras maps a group to a list of shards, as its variables may be in several; a single name is read, too.
    weight_map, metadata, doubled_keys = read_weight_map(path)
    findings = list(doubled_keys)
    groups: dict[str, tuple[str, ...]] = {}
    for group, names in weight_map.items():
        shards = []
        for name in names if isinstance(names, list) else [names]:
            why = unsafe_path_reason(name)
            if why is None:
                shards.append(name)
            else:
                findings.append(error("shard-path", f"{why}; not opened", f"{name!r:.100}"))
        groups[group] = tuple(shards)
    files = tuple(sorted({name for names in groups.values() for name in names}))
    require_at_most(path, MAX_SHARDS, len(files), "{:,} shards")
    return KerasIndex(path, groups, files, metadata.get("total_size"), tuple(dict.fromkeys(findings)))


class KerasSharded(SetFormat):
    """A set of ``.weights.h5`` files with an index."""

    name: ClassVar[str] = "keras-h5"
    suffixes = (".weights.json",)

    def matches(self, probe: Probe) -> bool:
        if probe.is_directory:
            return self._index_in(probe) is not None
        if b"\0" in probe.head or not probe.head.lstrip().startswith(b"{"):
            return False
        return INDEX.fullmatch(probe.name) is not None and _MAPPED.search(probe.head) is not None

    def open(self, probe: Probe) -> Checkpoint:
        name = self._index_in(probe) if probe.is_directory else None
        probe.close()
        index = read_index(os.path.join(probe.path, name) if name else probe.path)
        return open_set(probe.path, index, allows_losses=probe.allows_losses)

    def open_unit(self, unit: Unit, *, allows_losses: bool = False) -> Checkpoint | None:
        if fs.lexists(unit.path):
            return None
        missing = error("index-missing", "missing index", os.path.basename(unit.path))
        index = KerasIndex(unit.path, {}, tuple(sorted(unit.members)), None, (missing,))
        return open_set(unit.path, index, allows_losses=allows_losses)

    def units(self, directory: str, entries: Entries) -> Iterator[Unit]:
        # A set is an index with its shards: those that it maps, and those named like it. Shards without an
        # index are a set if several have one stem, so that they are found as one damaged checkpoint, and a
        # single ``x_00000.weights.h5`` is an ordinary file.
        stems = defaultdict(list)
        for name, entry in entries.items():
            if (match := SHARD.fullmatch(name)) and entry.is_file():
                stems[match["stem"]].append(name)
        named: set[str] = set()
        for name, entry in entries.items():
            if (match := INDEX.fullmatch(name)) and entry.is_file():
                mapped = _mapped_files(directory, name)
                shards = {*stems.get(match["stem"], ()), *(file for file in mapped if file in entries)}
                named.update(shards)
                path = os.path.join(directory, name)
                yield Unit(path, (name, *sorted(shards)), self, deeper(mapped))
        for stem, names in stems.items():
            unnamed = [name for name in names if name not in named]
            if len(unnamed) > 1:
                path = os.path.join(directory, f"{stem}.weights.json")
                yield Unit(path, tuple(sorted(unnamed)), self)

    def _index_in(self, probe: Probe) -> str | None:
        """Return the name of the index in a directory that has one set and no other weights."""
        names = [name for name, entry in probe.entries.items() if INDEX.fullmatch(name) and entry.is_file()]
        if len(names) != 1:
            return None
        (index,) = names
        match = INDEX.fullmatch(index)
        stem = match["stem"] if match else ""
        weights = [name for name in probe.entries if name.endswith((".h5", ".keras", ".index", ".json"))]
        others = {name for name in weights if name != index and _stem(name) != stem}
        others -= set(_mapped_files(probe.path, index))
        return None if others else index


def _stem(name: str) -> str | None:
    match = SHARD.fullmatch(name)
    return match["stem"] if match else None


def _mapped_files(directory: str, name: str) -> tuple[str, ...]:
    """Return the shards that an index maps; none if it can't be read."""
    try:
        return read_index(os.path.join(directory, name)).files
    except CheckpointError:
        return ()


def open_set(path: str, index: KerasIndex, *, allows_losses: bool) -> Checkpoint:
    """Return the checkpoint of the shards in an index; it is incomplete if some are missing or damaged."""
    # ``matches`` is called for every JSON file, so the modules that read Keras's are imported only here.
    from ckpttool.formats.keras.layout import training_of
    from ckpttool.formats.keras.native import merged_native

    directory = os.path.dirname(index.path)
    with OpenedParts("shard", allows_losses=allows_losses) as shards:
        shards.findings += index.findings
        shards.complete = not any(finding.code != "duplicate-key" for finding in index.findings)
        for name in index.files:
            _add_shard(shards, index, name, os.path.join(directory, name))
        shards.findings += _extra_shards(index, directory or os.curdir)
        tensors = tuple(
            tensor
            for name, part in shards.parts.items()
            for tensor in part.tensors
            if name in index.groups.get(_group(tensor), (name,))  # not those that the index maps to another
        )
        total = sum(tensor.nbytes for tensor in tensors)
        if shards.complete and isinstance(index.total, int | float) and index.total != total:
            message = f"total_size is {index.total!r:.40}, but the tensors have {total:,} bytes"
            shards.findings.append(warning("shard-total-size", message, os.path.basename(index.path)))
        metadata = {key: value for part in shards.parts.values() for key, value in part.metadata.items()}
        paths = [index.path, *(os.path.join(directory, name) for name in index.files)]
        name = os.path.basename(fs.normpath(path))
        return shards.checkpoint(
            path=path,
            format=KerasSharded.name,
            variant="sharded",
            tensors=tensors,
            files=tuple(file_entry(one) for one in paths if fs.isfile(one)),
            spans=shards.spans,
            metadata=lambda: metadata,
            training=lambda: training_of(metadata, tensors, name),
            layers=lambda: {key: kind for part in shards.parts.values() for key, kind in part.layers.items()},
            native=lambda: merged_native(part.native for part in shards.parts.values()),
            producer=next((part.producer for part in shards.parts.values()), Producer("keras")),
        )


def _group(tensor: Tensor) -> str:
    """Return the group of a tensor in the file."""
    from ckpttool.formats.keras.layout import stored_path

    return "".join(f"/{step}" for step in stored_path(tensor)[:-1])


def _add_shard(shards: OpenedParts, index: KerasIndex, name: str, path: str) -> None:
    """Open a shard, and compare its groups with those that the index maps to it."""
    directory = fs.realpath(os.path.dirname(index.path) or os.curdir)
    if not shards.is_in_place(name, path, [directory]):
        return
    part = shards.add_file(name, path)
    if part is None or not index.groups:
        return
    if part.format != KerasSharded.name:
        shards.findings.append(error("shard-format", f"a {part.format} file, not {KerasSharded.name}", name))
    # Each shard has the groups of all layers, but datasets only in those that the index maps to it. So groups
    # are taken from the tensors.
    held = {_group(tensor) for tensor in part.tensors}
    wanted = {group for group, names in index.groups.items() if name in names}
    compare_with_index(shards, name, held, wanted, "groups")


def _extra_shards(index: KerasIndex, directory: str) -> Iterator[Finding]:
    match = INDEX.fullmatch(os.path.basename(index.path))
    alike = group_names(directory, _shards_by_stem).get(match["stem"], ()) if index.groups and match else ()
    for name in alike:
        if name not in index.files:
            yield warning("shard-extra", "named like a shard, but not in the index", name)


def _shards_by_stem(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the shards among the names in a directory, by the stem of their set."""
    found = defaultdict(list)
    for name in names:
        if stem := _stem(name):
            found[stem].append(name)
    return dict(found)
