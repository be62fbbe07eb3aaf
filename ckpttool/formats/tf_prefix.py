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
OLD_SHARD = re.compile(r"(?P<prefix>.+)-(?P<shard>\d{5}|\?{5})-of-(?P<shards>\d{5})", re.DOTALL)
"""A shard of a checkpoint of the first version; with question marks, all of them, as TensorFlow names it."""

MOST_NAMED = 20
"""Missing shards that are named one by one."""

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


def old_name(name: str) -> str:
    """Return what TensorFlow calls the checkpoint of the first version that a file is, or is a shard of."""
    match = OLD_SHARD.fullmatch(name)
    return f"{match['prefix']}-?????-of-{match['shards']}" if match else name


def old_shards(directory: str, entries: Entries) -> dict[str, tuple[str, ...]]:
    """Return the shards of each checkpoint of the first version, by its name; a table is among them."""
    found: dict[str, list[str]] = defaultdict(list)
    for name, entry in entries.items():
        if OLD_SHARD.fullmatch(name) and DATA.fullmatch(name) is None and entry.is_file():
            found[old_name(name)].append(name)
    return {
        whole: tuple(names)
        for whole, names in found.items()
        if PART.fullmatch(whole.replace("?", "0")) is None
        and any(is_table(os.path.join(directory, name)) for name in names)
    }


def old_meta(name: str, entries: Entries) -> tuple[str, ...]:
    """Return the name of the graph beside a checkpoint of the first version, if there is one."""
    match = OLD_SHARD.fullmatch(name)
    meta = f"{match['prefix'] if match else name}{META}"
    return (meta,) if meta in entries else ()


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
