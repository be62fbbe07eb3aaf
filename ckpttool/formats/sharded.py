"""Checkpoints of several files with tensors, and the index that maps each tensor to its file.

Missing, unexpected, damaged and stale shards have findings of their own, and the others can still be read. No
name in an index is followed out of its directory. No tensor is split when a checkpoint is written in several
files.

Source: huggingface/transformers ``modeling_utils.py``; huggingface/huggingface_hub ``serialization/``
(``_base.py``, ``split_state_dict_into_shards_factory``).
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from ckpttool.containers.jsontext import DuplicateKeyObject, parse_json
from ckpttool.core.checkpoint import Checkpoint, Producer
from ckpttool.core.errors import (
    CheckpointError,
    DamagedCheckpoint,
    NotDownloaded,
    from_os_error,
    require_at_most,
)
from ckpttool.core.report import Finding, error, note, warning
from ckpttool.core.tensor import Tensor
from ckpttool.core.text import counted
from ckpttool.core.training import training_state
from ckpttool.formats.interface import HEAD_BYTES, Probe, SetFormat, Unit, group_names, natural
from ckpttool.formats.opening import OpenedParts, file_entry
from ckpttool.formats.sidecar import ENTRY, apply_sidecar
from ckpttool.storage import fs
from ckpttool.storage.work import in_order

if TYPE_CHECKING:
    from ckpttool.formats.writer import Target
    from ckpttool.storage.sink import Sink

SHARD = re.compile(r"(?P<stem>.+)-(?P<part>\d{1,9})-of-(?P<total>\d{1,9})\.(?P<suffix>safetensors|bin)")
INDEX = re.compile(r"(?P<stem>.+?)(\.(?P<suffix>safetensors|bin))?\.index(?P<variant>\.[\w-]+)?\.json")

KINDS = {"safetensors": "safetensors", "bin": "pytorch", "pt": "pytorch", "pth": "pytorch"}
"""Formats of shards by their suffixes."""
_MAPPED = re.compile(rb'\.(safetensors|bin|pt|pth)"\s*[,}]')
_DRIVE = re.compile(r"[A-Za-z]:")
MAX_INDEX = 100_000_000
MAX_SHARDS = 10_000
_MAX_SHOWN = 100  # characters of a value that is no name
_MAX_NAME = 255  # bytes, on every file system in use
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"

Entries = Mapping[str, os.DirEntry[str]]


class ShardIndex(NamedTuple):
    """The contents of an index, and the findings of reading it.

    Attributes:
        path: Path of the index; it need not exist.
        files: Names of the shards, relative to the directory of the index, without those that are refused.
        weight_map: The shard of each tensor; None without an index.
        metadata: The index's ``metadata``.
        findings: Duplicate keys, and names of shards that are refused.
    """

    path: str
    files: tuple[str, ...]
    weight_map: Mapping[str, str] | None
    metadata: Mapping[str, Any]
    findings: tuple[Finding, ...]


def read_weight_map(path: str) -> tuple[Mapping[str, Any], Mapping[str, Any], tuple[Finding, ...]]:
    """Return the weight map and metadata of an index file, unchecked, and findings for duplicate keys."""
    with fs.open_source(path) as source:
        require_at_most(path, MAX_INDEX, source.size, "an index of {:,} bytes")
        data = source.read(0, source.size)
    if data.startswith(_LFS_POINTER):
        raise NotDownloaded(path, "a Git LFS pointer, not the file", expected="run 'git lfs pull'")
    index = parse_json(path, data, "index", constants=True, surrogates=True)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    metadata = index.get("metadata") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not isinstance(metadata, dict | None):
        found = "an index without a weight_map from names to files"
        raise DamagedCheckpoint(path, found, code="index-malformed")
    doubled = (part for part in (index, weight_map, metadata) if isinstance(part, DuplicateKeyObject))
    name = os.path.basename(path)
    findings = tuple(error("duplicate-key", part.problem, name) for part in doubled)
    return weight_map, metadata or {}, findings


def read_index(path: str) -> ShardIndex:
    """Parse an index file."""
    weight_map, metadata, findings = read_weight_map(path)
    names = {name if isinstance(name, str) else repr(name)[:_MAX_SHOWN]: name for name in weight_map.values()}
    require_at_most(path, MAX_SHARDS, len(names), "{:,} shards")
    refused = {text: reason for text, name in names.items() if (reason := unsafe_path_reason(name))}
    outside = (error("shard-path", f"{reason}; not opened", text) for text, reason in refused.items())
    files = tuple(sorted(names.keys() - refused.keys()))
    return ShardIndex(path, files, weight_map, metadata, (*findings, *outside))


def unsafe_path_reason(name: object) -> str | None:
    """Return the reason why a file name in an index is never followed, or None."""
    # An index may come from anywhere, and name any file of the machine. The rules are those of all systems: a
    # backslash or a drive means nothing on Linux, but leads out of the directory on Windows.
    if not isinstance(name, str):
        return f"a value of type {type(name).__name__} instead of a name"
    if "\0" in name or "\\" in name or _DRIVE.match(name):
        return "a name with NUL, a backslash or a drive"
    parts = name.split("/")
    if any(part in ("", ".", "..") for part in parts):
        return "a path outside the directory of the index"
    try:
        longest = max(len(os.fsencode(part)) for part in parts)
    except UnicodeEncodeError:
        return "a name that is not valid text"
    return "a name that is too long" if longest > _MAX_NAME else None


def kind_of(name: str, head: bytes) -> str | None:
    """Return the format of the shards of an index, from its first bytes or else its name; or None."""
    # The first shard in the weight map has the suffix of all. An index of short names has one in its first
    # bytes; in others the name of the index has to do.
    if b"\0" in head or not head.lstrip().startswith(b"{"):
        return None
    shard = _MAPPED.search(head.partition(b'"weight_map"')[2])
    return KINDS[shard[1].decode()] if shard else _kind_by_name(name)


def _kind_by_name(name: str) -> str | None:
    match = INDEX.fullmatch(name)
    return KINDS.get(match["suffix"] or "") if match else None


def indexes(directory: str, entries: Entries) -> dict[str, str]:
    """Return the formats of the indexes in a directory by name; a damaged index counts by its name."""
    kinds = {}
    for name, entry in entries.items():
        if INDEX.fullmatch(name) and entry.is_file():
            head = b""
            with suppress(CheckpointError), fs.open_source(os.path.join(directory, name)) as source:
                head = source.read(0, min(HEAD_BYTES, source.size))
            if kind := kind_of(name, head) or _kind_by_name(name):
                kinds[name] = kind
    return kinds


def mapped_files(path: str) -> tuple[str, ...]:
    """Return the shards that an index names; none if it can't be read."""
    try:
        return read_index(path).files
    except CheckpointError:
        return ()


def deeper(mapped: Iterable[str]) -> tuple[str, ...]:
    """Return the shards in subdirectories of the index's directory."""
    return tuple(name.replace("/", os.sep) for name in mapped if "/" in name)


Schemes = Mapping[tuple[str, str], list[str]]
"""The names of shards by the stem and suffix that those of one set share."""


def schemes_of(names: Iterable[str]) -> dict[tuple[str, str], list[str]]:
    """Return the shards among the names in a directory, by stem and suffix."""
    schemes: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name in names:
        if scheme := _scheme(name):
            schemes[scheme].append(name)
    return dict(schemes)


def schemes_in_names(index_path: str, mapped: Iterable[str]) -> set[tuple[str, str]]:
    """Return the stems and suffixes of an index's shards: from the names in it, or else from its own name."""
    schemes = {scheme for name in mapped if (scheme := _scheme(name))}
    index = INDEX.fullmatch(os.path.basename(index_path))
    if not schemes and index:
        schemes = {(index["stem"] + (index["variant"] or ""), index["suffix"] or "")}
    return schemes


def members(index_path: str, mapped: Iterable[str], names: Collection[str], shards: Schemes) -> list[str]:
    """Return the shards in a directory that an index names, and those that are named like them.

    Args:
        index_path: Path of the index.
        mapped: Names of files in the index.
        names: All names in the directory.
        shards: The shards among these.
    """
    mapped = set(mapped)
    alike = (name for scheme in schemes_in_names(index_path, mapped) for name in shards.get(scheme, ()))
    return sorted({*alike, *(name for name in mapped if name in names)}, key=natural)


def _scheme(name: str) -> tuple[str, str] | None:
    """Return the stem and suffix that the shards of one set share; None for any other file."""
    match = SHARD.fullmatch(name)
    return (match["stem"], match["suffix"]) if match else None


_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".keras", ".msgpack", ".gguf", ".onnx")
_MOST_EXTRA = 100
"""Maximum number of extra shards with a finding for each: with many indexes in one directory, the number of
findings would grow with its square."""
_COMPANION = re.compile(r"(training_args|optimizer|scheduler|scaler|rng_state|random_states|sampler)[._]")


class Sharded(SetFormat):
    """Shards of one format; opened by their index, or by a directory with no other weights."""

    def matches(self, probe: Probe) -> bool:
        if probe.is_directory:
            return self._index_in(probe) is not None
        return kind_of(probe.name, probe.head) == self.name

    def open(self, probe: Probe) -> Checkpoint:
        name = self._index_in(probe) if probe.is_directory else None
        probe.close()
        index = read_index(os.path.join(probe.path, name) if name else probe.path)
        return open_set(self.name, probe, index, allows_losses=probe.allows_losses)

    def open_unit(self, unit: Unit, *, allows_losses: bool = False) -> Checkpoint | None:
        if fs.lexists(unit.path):
            return None
        finding = error("index-missing", "missing index", os.path.basename(unit.path))
        index = ShardIndex(unit.path, tuple(sorted(unit.parts)), None, {}, (finding,))
        return open_set(self.name, unit, index, allows_losses=allows_losses)

    def units(self, directory: str, entries: Entries) -> Iterator[Unit]:
        # A set is an index with its shards. Shards that the index doesn't name but that are named like its
        # others belong to it, too: they are left over from another save. Shards without an index are a set
        # by their names, so that they are found as one damaged checkpoint.
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
        # Shards that are named like those of several indexes belong to none of them, and are listed with the
        # first one alone: with each, the list would grow with the square of the directory.
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
        """Return the name of the index in a directory that has no other index and no other weights."""
        kinds = indexes(probe.path, probe.entries)
        if list(kinds.values()) != [self.name]:
            return None
        (name,) = kinds
        own = set(members(name, (), probe.entries, schemes_of(probe.entries)))
        # Shards may have any name and be in any subdirectory. The index, which may be large, is parsed only
        # if there are files that its own name doesn't explain.
        others = {other for other in _weights_in(probe.path, probe.entries) if other not in own}
        if others:
            others -= set(mapped_files(os.path.join(probe.path, name)))
        return None if others else name


def _weights_in(directory: str, entries: Entries) -> Iterator[str]:
    """Yield files in a directory and its subdirectories, as relative paths, that may hold weights."""
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


def open_set(format: str, opened: Probe | Unit, index: ShardIndex, *, allows_losses: bool) -> Checkpoint:
    """Return the checkpoint of all shards of an index that exist.

    Args:
        format: Format that the shards should have.
        opened: The index, or the directory, that the user opened.
        index: The content of the index.
        allows_losses: As in ``Probe``.
    """
    directory = os.path.dirname(index.path)
    with OpenedParts("shard", allows_losses=allows_losses) as shards:
        _add_shards(shards, index, format)
        is_directory = isinstance(opened, Probe) and opened.is_directory
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
        name = os.path.basename(fs.normpath(opened.path))
        checkpoint = shards.checkpoint(
            path=opened.path,
            format=format,
            variant="sharded",
            tensors=tensors,
            files=tuple(file_entry(path) for path in paths if fs.isfile(path)),
            spans=shards.spans,
            metadata=lambda: metadata,
            training=lambda: training_state(metadata, {}, name),
            producer=next((part.producer for part in shards.parts.values()), Producer()),
            names_all=shards.complete or index.weight_map is not None,
            missing=_missing_tensors(index, shards),
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
    # In the cache of the Hugging Face hub, a snapshot has links to a directory of blobs: shards may be next
    # to the index, or next to the target of a link to it.
    directories = os.path.dirname(index.path) or os.curdir, os.path.dirname(fs.realpath(index.path))
    bases = () if index.weight_map is None else tuple(map(fs.realpath, directories))
    for name in index.files:
        path = os.path.join(os.path.dirname(index.path), name)
        if not shards.is_in_place(name, path, bases):
            continue
        if (part := shards.add_file(name, path)) is not None:
            if part.format != format:
                shards.findings.append(error("shard-format", f"a {part.format} file, not {format}", name))
            if index.weight_map is not None:
                compare_with_index(shards, name, part.keys(), expected[name], "tensors")


def _missing_tensors(index: ShardIndex, shards: OpenedParts) -> dict[str, str]:
    """Return the tensors whose shard is missing, by name with the reason."""
    missing = {name: reason for part in shards.parts.values() for name, reason in part.missing.items()}
    reasons = {one.where: one.message for one in reversed(shards.findings) if one.code.startswith("shard-")}
    for tensor, name in (index.weight_map or {}).items():
        if isinstance(name, str) and tensor not in shards.parts.get(name, {}):
            missing.setdefault(tensor, f"{name}: {reasons.get(name, 'it was not opened')}")
    return missing


def _check_numbers(shards: OpenedParts, index: ShardIndex) -> None:
    """Add errors for the totals in names such as ``x-00001-of-00004``."""
    names = [match for name in index.files if (match := SHARD.fullmatch(name))]
    totals = {int(match["total"]) for match in names}
    if len(totals) > 1:
        sizes = " and ".join(map(str, sorted(totals)[:4]))
        shards.fault("shard-count", f"the shard names are from sets of {sizes}", None)
    elif len({match["stem"] for match in names}) == 1 and len(names) == len(index.files) != min(totals):
        if index.weight_map is None:
            shards.fault("shard-missing", f"{len(names):,} of {min(totals):,} shards found", None)
        else:
            message = (
                f"the index names {len(names):,} shards, but their names are from a set of {min(totals):,}"
            )
            shards.fault("shard-count", message, os.path.basename(index.path))


def compare_with_index(
    shards: OpenedParts, name: str, held: Set[str], expected: Set[str], items: str
) -> None:
    """Add errors for the items (``tensors``, ``groups``) of a shard that the index doesn't map to it."""
    if missing := sorted(expected - held):
        message = f"it lacks {len(missing):,} {items} that the index maps to it, like {missing[0]!r}"
        shards.fault("shard-stale", message, name)
    if foreign := sorted(held - expected):
        message = f"it holds {len(foreign):,} {items} that the index does not map to it, like {foreign[0]!r}"
        shards.findings.append(error("shard-stale", message, name))


def _judge_neighbours(index: ShardIndex, directory: str, is_directory: bool) -> Iterator[Finding]:
    """Yield findings for other files next to the shards; for more of them if the directory was opened."""
    if index.weight_map is not None:
        mapped = set(index.files)
        shards = group_names(directory, schemes_of)
        schemes = schemes_in_names("", mapped)
        alike = (name for scheme in schemes for name in shards.get(scheme, ()) if name not in mapped)
        extra = list(islice(alike, _MOST_EXTRA + 1))
        for name in sorted(extra[:_MOST_EXTRA], key=natural):
            yield warning("shard-extra", "named like a shard, but not in the index", name)
        if len(extra) > _MOST_EXTRA:
            more = f"more than {_MOST_EXTRA} files are named like a shard, but not in the index"
            yield warning("shard-extra", more, os.path.basename(index.path))
    if not is_directory:
        return
    try:
        names = fs.listdir(directory)
    except OSError as failure:
        raise from_os_error(failure, directory) from failure
    for name in sorted(names, key=natural):
        if _COMPANION.match(name) and name.endswith(_WEIGHTS):
            yield note("not-part", "next to the shards; not checked", name)


def _check_total(index: ShardIndex, tensors: tuple[Tensor, ...]) -> Iterator[Finding]:
    """Yield findings for a ``total_size`` of the index that is not that of the tensors."""
    # Writers count tied tensors once or each time. Tensors without elements and a total that is too large
    # are what a ZeRO-3 run saves if the parameters weren't gathered, so that is an error.
    total_size = index.metadata.get("total_size")
    total = sum(tensor.nbytes for tensor in tensors)
    untied = sum(tensor.nbytes for tensor in tensors if tensor.shares_with is None)
    if total_size is not None and total_size not in (total, untied):
        message = f"total_size is {total_size!r:.40}, but the tensors have {total:,} bytes"
        empty = sum(not tensor.size for tensor in tensors)
        if empty and isinstance(total_size, int) and total_size > total:
            message += f"; {counted(empty, 'tensor')} of them without elements"
            yield error("shard-total-size", message, os.path.basename(index.path))
        else:
            yield warning("shard-total-size", message, os.path.basename(index.path))


_MAX_OPEN = 16
"""Maximum number of files of a set that are open at once."""
_CLOSING = 8
"""Number of files that are synced at once: the file system's journal commits them together."""


def split_into_shards(
    tensors: Sequence[Tensor],
    limit: int,
    *,
    base: int = 0,
    overhead: Callable[[Tensor], int] = lambda _: 0,
) -> list[list[Tensor]]:
    """Return the tensors of each shard: in their order, as many as fit into a file of ``limit`` bytes.

    A larger tensor has a shard to itself, and a tensor that shares the bytes of another is in the other's
    shard, where its values take no room. There is at least one shard.

    Args:
        tensors: All tensors; each after the one whose bytes it shares.
        limit: Maximum size of a file in bytes.
        base: Size of a file without tensors in bytes.
        overhead: Maximum number of bytes that a tensor takes besides its values.
    """
    # The overhead of tied tensors is counted with the first of them, so that adding them later to its shard
    # never exceeds the limit.
    shards: list[list[Tensor]] = []
    current: list[Tensor] = []
    costs = Counter({tensor.name: tensor.nbytes for tensor in tensors if tensor.shares_with is None})
    for tensor in tensors:
        owner = tensor.shares_with
        costs[tensor.name if owner is None or owner not in costs else owner] += overhead(tensor)
    room = limit - base
    shard_of: dict[str, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.shares_with is not None and tensor.shares_with in shard_of:
            shard_of[tensor.shares_with].append(tensor)
            continue
        if costs[tensor.name] > limit - base:
            shards.append([tensor])
            shard_of[tensor.name] = shards[-1]
            continue
        if costs[tensor.name] > room:
            shards.append(current)
            current, room = [], limit - base
        current.append(tensor)
        shard_of[tensor.name] = current
        room -= costs[tensor.name]
    if current or not shards:
        shards.append(current)
    return shards


def shard_names(stem: str, suffix: str, total: int) -> list[str]:
    """Return the names of the files of a set: ``model-00001-of-00003.safetensors``.

    Args:
        stem: Name before the number: ``model``, ``pytorch_model``.
        suffix: Suffix with its dot.
        total: Number of files.
    """
    return [f"{stem}-{number:05}-of-{total:05}{suffix}" for number in range(1, total + 1)]


def shard_refusals(shards: Mapping[str, Sequence[Tensor]], metadata: Mapping[str, object]) -> Iterator[str]:
    """Yield the reasons why no reader would accept a set: too many files, or too long an index."""
    if len(shards) > MAX_SHARDS:
        yield f"there would be {len(shards):,} shards; at most {MAX_SHARDS:,} are read (--shard-size)"
    if (nbytes := len(shard_index(shards, metadata))) > MAX_INDEX:
        yield f"the index would have {nbytes:,} bytes; at most {MAX_INDEX:,} are read"


def shard_index(
    shards: Mapping[str, Iterable[Tensor]], metadata: Mapping[str, object] | None = None
) -> bytes:
    """Return the text of an index as Hugging Face writes it.

    Args:
        shards: The tensors of each file, by its name. Shared bytes count once.
        metadata: Its metadata besides ``total_size``.
    """
    by_file = {name: list(tensors) for name, tensors in shards.items()}
    owned = [tensor for tensors in by_file.values() for tensor in tensors if tensor.shares_with is None]
    weight_map = {tensor.name: name for name, tensors in by_file.items() for tensor in tensors}
    total = {"total_size": sum(tensor.nbytes for tensor in owned)}
    contents = {"metadata": {**(metadata or {}), **total}, "weight_map": weight_map}
    return (json.dumps(contents, indent=2, sort_keys=True) + "\n").encode()


class ShardFiles:
    """Files of a target that are written one after the other, with few open at once."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._open: list[Sink] = []

    def create(self, name: str) -> Sink:
        """Return a new file; files that were created before may be closed."""
        # Closing syncs a file to the disk. Several at once take little longer than one.
        if len(self._open) == _MAX_OPEN:
            in_order(lambda sink, _: sink.close(), self._open, _CLOSING)
            self._open.clear()
        self._open.append(self._target.create(name))
        return self._open[-1]
