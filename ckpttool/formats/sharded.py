"""Sets of shards behind an index: what is written when one file would be too large.

The index, ``model.safetensors.index.json``, maps each tensor to the file that holds it. A shard that is
missing, one too many, of another save, or damaged is told apart, and all others stay readable.

Source: huggingface/transformers ``modeling_utils.py`` and huggingface/huggingface_hub ``serialization/``.
"""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import ClassVar

from ckpttool.core.checkpoint import Checkpoint, Producer
from ckpttool.core.errors import from_os_error
from ckpttool.core.report import Finding, error, note, warning
from ckpttool.core.tensor import Tensor
from ckpttool.core.text import counted
from ckpttool.core.training import training_state
from ckpttool.formats.interface import Probe, SetFormat, Unit, group_names, natural
from ckpttool.formats.parts import OpenedParts, file_entry, open_file
from ckpttool.formats.shard_index import (
    KINDS,
    SHARD,
    Entries,
    ShardIndex,
    deeper,
    indexes,
    kind_of,
    mapped_files,
    members,
    read_index,
    schemes_in_names,
    schemes_of,
)
from ckpttool.formats.sidecar import ENTRY, apply_sidecar
from ckpttool.storage import fs

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".keras", ".msgpack", ".gguf", ".onnx")
_MOST_EXTRA = 100
"""So many files beside a set are named one by one; what many indexes in one directory say of each other
would grow with its square."""
_COMPANION = re.compile(r"(training_args|optimizer|scheduler|scaler|rng_state|random_states|sampler)[._]")


class Sharded(SetFormat):
    """Shards of one format; opened by their index, or by a directory that holds just this set."""

    def matches(self, probe: Probe) -> bool:
        if probe.is_directory:
            return self._index_in(probe) is not None
        return kind_of(probe.name, probe.head) == self.name

    def open(self, probe: Probe) -> Checkpoint:
        name = self._index_in(probe) if probe.is_directory else None
        probe.close()
        index = read_index(os.path.join(probe.path, name) if name else probe.path)
        return open_set(self.name, probe, index)

    def open_unit(self, unit: Unit) -> Checkpoint | None:
        if fs.lexists(unit.path):
            return None
        finding = error("index-missing", "there is no index", os.path.basename(unit.path))
        index = ShardIndex(unit.path, tuple(sorted(unit.parts)), None, {}, (finding,))
        return open_set(self.name, unit, index)

    def units(self, directory: str, entries: Entries) -> Iterator[Unit]:
        seen: set[str] = set()
        shards = schemes_of(entries)
        mapped_by_index = {
            name: mapped_files(os.path.join(directory, name))
            for name, kind in indexes(directory, entries).items()
            if kind == self.name
        }
        claims = Counter(
            scheme for name, mapped in mapped_by_index.items() for scheme in schemes_in_names(name, mapped)
        )
        # What is named like the shards of several indexes is no one's: it is listed once, not with each.
        common = {
            scheme: shards.pop(scheme) for scheme, times in claims.items() if times > 1 and scheme in shards
        }
        for name, mapped in mapped_by_index.items():
            path = os.path.join(directory, name)
            own = members(path, mapped, entries, shards)
            alike = {shard for scheme in schemes_in_names(name, mapped) for shard in common.pop(scheme, ())}
            shared = sorted(alike - {*own}, key=natural)
            seen.update(own, shared)
            yield Unit(path, (name, *own), self, (*deeper(mapped), *shared))
        orphans = defaultdict(list)
        for name in entries.keys() - seen:
            match = SHARD.fullmatch(name)
            if match and KINDS[match["suffix"]] == self.name and int(match["total"]) > 1:
                orphans[match["stem"], match["suffix"]].append(name)
        for (stem, suffix), names in sorted(orphans.items()):
            yield Unit(os.path.join(directory, f"{stem}.{suffix}.index.json"), tuple(sorted(names)), self)

    def _index_in(self, probe: Probe) -> str | None:
        """Return the name of the index in a directory that holds it alone, and no other set of weights."""
        kinds = indexes(probe.path, probe.entries)
        if list(kinds.values()) != [self.name]:
            return None
        (name,) = kinds
        own = set(members(name, (), probe.entries, schemes_of(probe.entries)))
        others = {other for other in _weights_in(probe.path, probe.entries) if other not in own}
        if others:
            others -= set(mapped_files(os.path.join(probe.path, name)))
        return None if others else name


def _weights_in(directory: str, entries: Entries) -> Iterator[str]:
    """Yield what looks like weights in a directory and, as relative paths, in those inside."""
    for name, entry in entries.items():
        if entry.is_file() and name.lower().endswith(_WEIGHTS) and not _COMPANION.match(name):
            yield name
        elif entry.is_dir(follow_symlinks=False) and not name.startswith("."):
            for parent, _, names in fs.walk(entry.path):
                below = os.path.relpath(parent, directory).replace(os.sep, "/")
                yield from (f"{below}/{inner}" for inner in names if inner.lower().endswith(_WEIGHTS))


class ShardedSafetensors(Sharded):
    """A set of safetensors files."""

    name: ClassVar[str] = "safetensors"
    suffixes = (".safetensors.index.json",)


class ShardedPytorch(Sharded):
    """A set of files that ``torch.save`` wrote."""

    name: ClassVar[str] = "pytorch"
    suffixes = (".bin.index.json",)


def open_set(format: str, asked: Probe | Unit, index: ShardIndex) -> Checkpoint:
    """Return the checkpoint that the shards of an index make, as many of them as there are.

    ``format`` is what the shards should be, ``asked`` how the user named the set.
    """
    directory = os.path.dirname(index.path)
    with OpenedParts("shard") as shards:
        _add_shards(shards, index, format)
        is_directory = isinstance(asked, Probe) and asked.is_directory
        shards.findings += _judge_neighbours(index, directory or os.curdir, is_directory)
        # The tensors of each shard, without those that the index maps to another.
        weight_map = index.weight_map or {}
        tensors = tuple(
            tensor
            for name, part in shards.parts.items()
            for tensor in part.tensors
            if weight_map.get(tensor.name, name) == name
        )
        if shards.complete:
            shards.findings += _check_total(index, tensors)
        metadata = {key: value for part in shards.parts.values() for key, value in part.metadata.items()}
        metadata |= index.metadata
        entry = metadata.get(ENTRY)
        if isinstance(entry, str):
            del metadata[ENTRY]
        paths = [index.path, *(os.path.join(directory, name) for name in index.files)]
        name = os.path.basename(fs.normpath(asked.path))
        checkpoint = Checkpoint(
            path=asked.path,
            format=format,
            variant="sharded",
            tensors=tensors,
            files=tuple(file_entry(path) for path in paths if fs.isfile(path)),
            spans=shards.spans,
            metadata=lambda: metadata,
            training=lambda: training_state(metadata, {}, name),
            producer=next((part.producer for part in shards.parts.values()), Producer()),
            findings=tuple(shards.findings),
            safety=tuple(shards.safety),
            judged=frozenset(shards.judged),
            complete=shards.complete,
            names_all=shards.complete or index.weight_map is not None,
            missing=_missing_tensors(index, shards),
            close=shards.keep(),
        )
    where = f"{os.path.basename(index.path)}: {ENTRY}"
    return apply_sidecar(checkpoint, entry, where) if isinstance(entry, str) else checkpoint


def _add_shards(shards: OpenedParts, index: ShardIndex, format: str) -> None:
    """Open all shards, and compare them with the index."""
    shards.findings += index.findings
    shards.complete = not any(finding.code != "duplicate-key" for finding in index.findings)
    if shards.complete or index.weight_map is None:
        _check_numbers(shards, index)
    expected: dict[str, set[str]] = defaultdict(set)
    for tensor, name in (index.weight_map or {}).items():
        if isinstance(name, str):
            expected[name].add(tensor)
    for name in index.files:
        path = os.path.join(os.path.dirname(index.path), name)
        if not fs.exists(path):
            shards.fault("shard-missing", "there is no such file", name)
        elif index.weight_map is not None and not _is_inside(path, index.path):
            shards.fault("shard-path", "a link that leads out of the checkpoint; it was not opened", name)
        elif (part := shards.add(name, partial(open_file, path))) is not None:
            if part.format != format:
                shards.findings.append(error("shard-format", f"a {part.format} file, not {format}", name))
            if index.weight_map is not None:
                _compare(shards, name, part, expected[name])


def _missing_tensors(index: ShardIndex, shards: OpenedParts) -> dict[str, str]:
    """Return the tensors that the index maps to what is not here, by name with the reason."""
    missing = {name: why for part in shards.parts.values() for name, why in part.missing.items()}
    reasons = {one.where: one.message for one in reversed(shards.findings) if one.code.startswith("shard-")}
    for tensor, name in (index.weight_map or {}).items():
        if isinstance(name, str) and tensor not in shards.parts.get(name, {}):
            missing.setdefault(tensor, f"{name}: {reasons.get(name, 'it was not opened')}")
    return missing


def _check_numbers(shards: OpenedParts, index: ShardIndex) -> None:
    """Compare what the names ``x-00001-of-00004`` say of each other."""
    names = [match for name in index.files if (match := SHARD.fullmatch(name))]
    totals = {int(match["total"]) for match in names}
    if len(totals) > 1:
        sizes = " and ".join(map(str, sorted(totals)[:4]))
        shards.fault("shard-count", f"the names of the shards speak of sets of {sizes}", None)
    elif len({match["stem"] for match in names}) == 1 and len(names) == len(index.files) != min(totals):
        if index.weight_map is None:
            shards.fault("shard-missing", f"{len(names):,} of {min(totals):,} shards are here", None)
        else:
            message = f"the index names {len(names):,} shards, and their names speak of {min(totals):,}"
            shards.fault("shard-count", message, os.path.basename(index.path))


def _is_inside(path: str, index_path: str) -> bool:
    """Tell whether a file lies beside the index, or beside what the index is a link to.

    The second is how the cache of the Hugging Face hub looks: links from a snapshot to its blobs.
    """
    beside = fs.realpath(os.path.dirname(index_path) or os.curdir)
    bases = (beside, os.path.dirname(fs.realpath(index_path)))
    return any(fs.realpath(path).startswith(base.rstrip(os.sep) + os.sep) for base in bases)


def _compare(shards: OpenedParts, name: str, part: Checkpoint, expected: set[str]) -> None:
    """Compare the tensors that a shard holds with those that the index expects in it."""
    missing, foreign = sorted(expected - part.keys()), sorted(part.keys() - expected)
    if missing:
        message = f"it lacks {len(missing):,} tensors that the index maps to it, like {missing[0]!r}"
        shards.fault("shard-stale", message, name)
    if foreign:
        message = f"it holds {len(foreign):,} tensors that the index does not map to it, like {foreign[0]!r}"
        shards.findings.append(error("shard-stale", message, name))


def _judge_neighbours(index: ShardIndex, directory: str, is_directory: bool) -> Iterator[Finding]:
    """Yield what lies beside the shards and is none; more of it if the directory was asked for."""
    if index.weight_map is not None:
        mapped = set(index.files)
        shards = group_names(directory, schemes_of)
        schemes = schemes_in_names("", mapped)
        alike = (name for scheme in schemes for name in shards.get(scheme, ()) if name not in mapped)
        extra = list(islice(alike, _MOST_EXTRA + 1))
        for name in sorted(extra[:_MOST_EXTRA], key=natural):
            yield warning("shard-extra", "it is named like a shard, and the index does not name it", name)
        if len(extra) > _MOST_EXTRA:
            more = f"more than {_MOST_EXTRA} files are named like a shard, and the index does not name them"
            yield warning("shard-extra", more, os.path.basename(index.path))
    if not is_directory:
        return
    try:
        names = fs.listdir(directory)
    except OSError as failure:
        raise from_os_error(failure, directory) from failure
    for name in sorted(names, key=natural):
        if _COMPANION.match(name) and name.endswith(_WEIGHTS):
            yield note("not-part", "it lies beside the shards, and was not looked at", name)


def _check_total(index: ShardIndex, tensors: tuple[Tensor, ...]) -> Iterator[Finding]:
    """Compare the ``total_size`` of the index with the tensors; tied ones may count once or each time."""
    total_size = index.metadata.get("total_size")
    total = sum(tensor.nbytes for tensor in tensors)
    untied = sum(tensor.nbytes for tensor in tensors if tensor.shares_with is None)
    if total_size is not None and total_size not in (total, untied):
        message = f"total_size is {total_size!r:.40}, and the tensors have {total:,} bytes"
        empty = sum(not tensor.size for tensor in tensors)
        if empty and isinstance(total_size, int) and total_size > total:
            message += f"; {counted(empty, 'tensor')} of them without an element"
            yield error("shard-total-size", message, os.path.basename(index.path))
        else:
            yield warning("shard-total-size", message, os.path.basename(index.path))
