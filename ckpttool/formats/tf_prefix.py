"""Which files make one TensorFlow checkpoint: all that begin with its prefix."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping

from ckpttool.errors import CheckpointError
from ckpttool.wire.source import Source
from ckpttool.wire.sstable import FOOTER_BYTES, MAGIC

INDEX, META = ".index", ".meta"
DATA = re.compile(r"(?P<prefix>.+)\.data-(?P<shard>\d{5})-of-(?P<shards>\d{5})", re.DOTALL)
TEMPORARY = re.compile(r"(?P<prefix>.+?)(?:\.index|\.data-\d{5}-of-\d{5})?\.tempstate\d+", re.DOTALL)
STAGE = re.compile(r"(?P<prefix>.+)_temp(?:_[0-9a-f]+)?", re.DOTALL)
PART = re.compile(r"(?:.+\.)?part-\d{5}-of-\d{5}", re.DOTALL)

Entries = Mapping[str, os.DirEntry[str]]


def shard_name(prefix: str, shard: int, shards: int) -> str:
    """Return the path of a shard."""
    return f"{prefix}.data-{shard:05d}-of-{shards:05d}"


def is_table(path: str) -> bool:
    """Tell from its end whether a file is a table, and from its start whether it is one of TensorFlow's."""
    try:
        with Source(path) as source:
            return is_table_source(source)
    except CheckpointError:
        return False


def is_table_source(source: Source) -> bool:
    """Tell whether an open file is a table whose first key is empty."""
    if source.size < FOOTER_BYTES:
        return False
    is_ended = source.read(source.size - len(MAGIC), len(MAGIC)) == MAGIC
    return is_ended and source.read(0, 2) == b"\0\0"


def bundles(directory: str, entries: Entries) -> dict[str, tuple[str, ...]]:
    """Return the names that belong to each prefix in a directory, the index first."""
    found: dict[str, list[str]] = defaultdict(list)
    tables = []
    for name, entry in entries.items():
        match = DATA.fullmatch(name) or TEMPORARY.fullmatch(name)
        if match is not None and entry.is_file():
            found[match["prefix"]].append(name)
        elif name.endswith(INDEX) and len(name) > len(INDEX) and entry.is_file():
            tables.append(name)
    for name in tables:
        prefix = name.removesuffix(INDEX)
        if prefix in found or is_table(os.path.join(directory, name)):
            found[prefix].insert(0, name)
    for prefix, names in found.items():
        if prefix + META in entries:
            names.append(prefix + META)
    return {prefix: tuple(names) for prefix, names in found.items()}


def stages(directory: str, entries: Entries) -> Iterator[str]:
    """Yield the directories that a writer fills before it moves what is in them."""
    for name, entry in entries.items():
        if STAGE.fullmatch(name) and entry.is_dir(follow_symlinks=False) and is_stage(entry.path):
            yield name


def is_stage(path: str) -> bool:
    """Tell whether a directory is one that a writer fills."""
    if STAGE.fullmatch(os.path.basename(path.rstrip(os.sep))) is None:
        return False
    try:
        return any(name.startswith("part-") for name in os.listdir(path))
    except OSError:
        return False


def old_tables(directory: str, entries: Entries) -> Iterator[tuple[str, str]]:
    """Yield checkpoints of the first version that have a graph beside them, and the name of that."""
    for name in entries:
        prefix = name.removesuffix(META)
        if prefix == name or prefix not in entries or not entries[prefix].is_file():
            continue
        if is_table(os.path.join(directory, prefix)):
            yield prefix, name


def prefix_of(path: str) -> str | None:
    """Return the prefix that a path stands for, if it is one or belongs to one; None elsewhere."""
    match = DATA.fullmatch(os.path.basename(path))
    if match is not None:
        return os.path.join(os.path.dirname(path), match["prefix"])
    if path.endswith(INDEX):
        return path.removesuffix(INDEX)
    return None
