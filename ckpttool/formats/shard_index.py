"""The index beside the shards of a large model: which file holds which tensor, and which files are its own.

No name in an index is followed out of its directory.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sized
from contextlib import suppress
from typing import Any, NamedTuple

from ckpttool.containers.jsontext import Doubled, parse_json
from ckpttool.core.errors import CheckpointError, DamagedCheckpoint, LimitExceeded, NotDownloaded
from ckpttool.core.report import Finding, error
from ckpttool.formats.interface import HEAD_BYTES, natural
from ckpttool.storage import fs

SHARD = re.compile(r"(?P<stem>.+)-(?P<part>\d{1,9})-of-(?P<total>\d{1,9})\.(?P<suffix>safetensors|bin)")
INDEX = re.compile(r"(?P<stem>.+?)(\.(?P<suffix>safetensors|bin))?\.index(?P<variant>\.[\w-]+)?\.json")

KINDS = {"safetensors": "safetensors", "bin": "pytorch", "pt": "pytorch", "pth": "pytorch"}
_MAPPED = re.compile(rb'\.(safetensors|bin|pt|pth)"\s*[,}]')
_DRIVE = re.compile(r"[A-Za-z]:")
MAX_INDEX = 100_000_000
MAX_SHARDS = 10_000
_MAX_SHOWN = 100  # characters of a value that is no name
_MAX_NAME = 255  # bytes, on every file system in use
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"

Entries = Mapping[str, os.DirEntry[str]]


class ShardIndex(NamedTuple):
    """What is known of a set of shards.

    Attributes:
        path: Where the index lies, or should.
        files: Names of the shards, below the directory of the index, without those that are refused.
        weight_map: The shard of each tensor; None where there is no index.
        metadata: What else the index says.
        findings: What is wrong with it.
    """

    path: str
    files: tuple[str, ...]
    weight_map: Mapping[str, str] | None
    metadata: Mapping[str, Any]
    findings: tuple[Finding, ...]


def read_weight_map(path: str) -> tuple[Mapping[str, Any], Mapping[str, Any], tuple[Finding, ...]]:
    """Return the weight map and metadata of an index file, unchecked, and findings about doubled keys."""
    with fs.open_source(path) as source:
        if source.size > MAX_INDEX:
            raise LimitExceeded(path, f"an index of {source.size:,} bytes", expected=f"at most {MAX_INDEX:,}")
        data = source.read(0, source.size)
    if data.startswith(_LFS_POINTER):
        raise NotDownloaded(path, "a Git LFS pointer, not the file", expected="run 'git lfs pull'")
    index = parse_json(path, data, "index", constants=True, surrogates=True)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    metadata = index.get("metadata") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not isinstance(metadata, dict | None):
        found = "an index without a weight_map from names to files"
        raise DamagedCheckpoint(path, found, code="index-malformed")
    doubled = (part for part in (index, weight_map, metadata) if isinstance(part, Doubled))
    name = os.path.basename(path)
    findings = tuple(error("duplicate-key", f"{part.key!r} stands twice", name) for part in doubled)
    return weight_map, metadata or {}, findings


def require_few(path: str, shards: Sized) -> None:
    """Require that an index names no more shards than any honest one."""
    if len(shards) > MAX_SHARDS:
        raise LimitExceeded(path, f"{len(shards):,} shards", expected=f"at most {MAX_SHARDS:,}")


def read_index(path: str) -> ShardIndex:
    """Return what an index file says."""
    weight_map, metadata, findings = read_weight_map(path)
    names = {name if isinstance(name, str) else repr(name)[:_MAX_SHOWN]: name for name in weight_map.values()}
    require_few(path, names)
    refused = {text: reason for text, name in names.items() if (reason := refusal(name))}
    outside = (error("shard-path", f"{reason}; it was not opened", text) for text, reason in refused.items())
    files = tuple(sorted(names.keys() - refused.keys()))
    return ShardIndex(path, files, weight_map, metadata, (*findings, *outside))


def refusal(name: object) -> str | None:
    """Return why a file name that stands in a file is never followed, or None."""
    if not isinstance(name, str):
        return f"no name but a value of type {type(name).__name__}"
    if "\0" in name or "\\" in name or _DRIVE.match(name):
        return "a name with NUL, a backslash or a drive"
    parts = name.split("/")
    if any(part in ("", ".", "..") for part in parts):
        return "a path that does not lie below the directory of the index"
    try:
        longest = max(len(os.fsencode(part)) for part in parts)
    except UnicodeEncodeError:
        return "a name that no file can have"
    return "a name that is too long" if longest > _MAX_NAME else None


def kind_of(name: str, head: bytes) -> str | None:
    """Return the format of the shards behind an index, from its first bytes or else its name; or None."""
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
    """Return the shards that an index names; none where it can't be read."""
    try:
        return read_index(path).files
    except CheckpointError:
        return ()


def deeper(mapped: Iterable[str]) -> tuple[str, ...]:
    """Return the shards that lie in directories below that of the index."""
    return tuple(name.replace("/", os.sep) for name in mapped if "/" in name)


Schemes = Mapping[tuple[str, str], list[str]]
"""The names of shards, by what those of one set have in common: stem and suffix."""


def schemes_of(names: Iterable[str]) -> dict[tuple[str, str], list[str]]:
    """Return the shards among the names in a directory."""
    schemes: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name in names:
        if scheme := _scheme(name):
            schemes[scheme].append(name)
    return dict(schemes)


def schemes_in_names(index_path: str, mapped: Iterable[str]) -> set[tuple[str, str]]:
    """Return the schemes that an index's shards have: of what it names, or else of its own name."""
    schemes = {scheme for name in mapped if (scheme := _scheme(name))}
    index = INDEX.fullmatch(os.path.basename(index_path))
    if not schemes and index:
        schemes = {(index["stem"] + (index["variant"] or ""), index["suffix"] or "")}
    return schemes


def members(index_path: str, mapped: Iterable[str], names: Collection[str], shards: Schemes) -> list[str]:
    """Return the shards in a directory that an index names, and those that are named like them.

    ``mapped`` is what the index names; ``names`` lie in the directory, ``shards`` are the shards among these.
    """
    mapped = set(mapped)
    alike = (name for scheme in schemes_in_names(index_path, mapped) for name in shards.get(scheme, ()))
    return sorted({*alike, *(name for name in mapped if name in names)}, key=natural)


def _scheme(name: str) -> tuple[str, str] | None:
    """Return what the shards of one set have in common, stem and suffix; None for any other file."""
    match = SHARD.fullmatch(name)
    return (match["stem"], match["suffix"]) if match else None
