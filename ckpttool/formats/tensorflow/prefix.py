"""Which files make one TensorFlow checkpoint: all that begin with its prefix."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

from ckpttool.containers.table import FOOTER_BYTES, MAGIC, begins_with_empty_key
from ckpttool.core.errors import CheckpointError
from ckpttool.formats.interface import scan
from ckpttool.formats.tensorflow.state import NAME, read_state
from ckpttool.storage import fs
from ckpttool.storage.source import Source

INDEX, META = ".index", ".meta"
DATA = re.compile(r"(?P<prefix>.+)\.data-(?P<shard>\d{5})-of-(?P<shards>\d{5})", re.DOTALL)
TEMPORARY = re.compile(r"(?P<prefix>.+?)(?:\.index|\.data-\d{5}-of-\d{5})?\.tempstate\d+", re.DOTALL)
STAGE = re.compile(r"(?P<prefix>.+)_temp(?:_[0-9a-f]+)?", re.DOTALL)
PART = re.compile(r"(?:.+\.)?part-\d{5}-of-\d{5}", re.DOTALL)
OLD_SHARD = re.compile(r"(?P<prefix>.+)-(?P<shard>\d{5}|\?{5})-of-(?P<shards>\d{5})", re.DOTALL)
"""A shard of a checkpoint of the first version; with question marks, all of them, as TensorFlow names it."""
_STEP = re.compile(r".+-\d+", re.DOTALL)
_HEAD, _START = 6, 16
_FOREIGN = (b"PK", b"\x80", b"\x89HDF", b"{", b"\x93NUM")
"""How files begin that are other checkpoints, whatever the state file calls them."""

MOST_NAMED = 20
"""Missing shards that are named one by one."""

Entries = Mapping[str, os.DirEntry[str]]


def shard_name(prefix: str, shard: int, shards: int) -> str:
    """Return the path of a shard."""
    return f"{prefix}.data-{shard:05d}-of-{shards:05d}"


def is_table(path: str) -> bool:
    """Return from its end whether a file is a table, and from its start whether it is one of TensorFlow's."""
    try:
        with fs.open_source(path) as source:
            return is_table_source(source)
    except CheckpointError:
        return False


def is_table_source(source: Source) -> bool:
    """Return whether an open file is a table whose first key is empty."""
    if source.size < FOOTER_BYTES:
        return False
    # Its start is at hand in any case; its end takes a request of its own if it lies in a store.
    if not begins_with_empty_key(source.read(0, _START)):
        return False
    return source.read(source.size - len(MAGIC), len(MAGIC)) == MAGIC


def parts_by_prefix(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the shards among names, and what a writer has not renamed, by their prefix."""
    parts = defaultdict(list)
    for name in names:
        if match := DATA.fullmatch(name) or TEMPORARY.fullmatch(name):
            parts[match["prefix"]].append(name)
    return dict(parts)


def bundles(directory: str, entries: Entries) -> dict[str, tuple[str, ...]]:
    """Return the names that belong to each prefix in a directory, the index first."""
    by_prefix: dict[str, list[str]] = defaultdict(list)
    tables = []
    for name, entry in entries.items():
        match = DATA.fullmatch(name) or TEMPORARY.fullmatch(name)
        if match is not None and entry.is_file():
            by_prefix[match["prefix"]].append(name)
        elif name.endswith(INDEX) and len(name) > len(INDEX) and entry.is_file():
            tables.append(name)
    listed = _names_in_state_file(directory, entries) if tables else frozenset()
    for name in tables:
        prefix = name.removesuffix(INDEX)
        is_known = prefix in by_prefix or prefix in listed
        if is_known or is_table(os.path.join(directory, name)):
            by_prefix[prefix].insert(0, name)
    for prefix, names in by_prefix.items():
        if prefix + META in entries:
            names.append(prefix + META)
    return {prefix: tuple(names) for prefix, names in by_prefix.items()}


def stages(entries: Entries) -> Iterator[str]:
    """Yield the directories that a writer fills before it moves what is in them."""
    for name, entry in entries.items():
        if STAGE.fullmatch(name) and entry.is_dir(follow_symlinks=False) and is_stage(entry.path):
            yield name


def is_stage(path: str) -> bool:
    """Return whether a directory is one that a writer fills."""
    if STAGE.fullmatch(os.path.basename(path.rstrip(os.sep))) is None:
        return False
    try:
        return any(name.startswith("part-") for name in fs.listdir(path))
    except OSError:
        return False


def old_name(name: str) -> str:
    """Return what TensorFlow calls the checkpoint of the first version that a file is, or is a shard of."""
    match = OLD_SHARD.fullmatch(name)
    return f"{match['prefix']}-?????-of-{match['shards']}" if match else name


def old_shards(directory: str, entries: Entries) -> dict[str, tuple[str, ...]]:
    """Return the shards of each checkpoint of the first version, by its name; a table is among them."""
    shards: dict[str, list[str]] = defaultdict(list)
    for name, entry in entries.items():
        if OLD_SHARD.fullmatch(name) and DATA.fullmatch(name) is None and entry.is_file():
            shards[old_name(name)].append(name)
    return {
        whole: tuple(names)
        for whole, names in shards.items()
        if PART.fullmatch(whole.replace("?", "0")) is None
        and any(is_table(os.path.join(directory, name)) for name in names)
    }


def old_meta(name: str, entries: Entries) -> tuple[str, ...]:
    """Return the name of the graph beside a checkpoint of the first version, if there is one."""
    match = OLD_SHARD.fullmatch(name)
    meta = f"{match['prefix'] if match else name}{META}"
    return (meta,) if meta in entries else ()


def old_tables(directory: str, entries: Entries) -> Iterator[tuple[str, ...]]:
    """Yield the names that belong to each checkpoint of the first version in one file, that file first.

    What the state file names, and what has a graph beside it, is one even where it was cut short.
    """
    listed = _names_in_state_file(directory, entries)
    for name, entry in entries.items():
        has_graph = name + META in entries
        if not (has_graph or name in listed) or not entry.is_file():
            continue
        if prefix_of(name) is not None or name + INDEX in entries or OLD_SHARD.fullmatch(name):
            continue
        if (has_graph and is_table(entry.path)) or is_remnant(entry.path, is_listed=name in listed):
            yield (name, *old_meta(name, entries))


def is_remnant(path: str, *, is_listed: bool = False) -> bool:
    """Return whether a file may be what is left of a table; only one that is listed may begin in any way."""
    try:
        with fs.open_regular(path) as file:
            head = file.read(_HEAD)
    except OSError:
        return is_listed
    if head[:2] in (b"", b"\0", b"\0\0"):
        return is_listed or _STEP.fullmatch(os.path.basename(path)) is not None
    return is_listed and not head.startswith(_FOREIGN)


def _names_in_state_file(directory: str, entries: Entries) -> frozenset[str]:
    """Return the names that the state file in a directory gives its checkpoints."""
    if NAME not in entries:
        return frozenset()
    try:
        state = read_state(os.path.join(directory, NAME))
    except (OSError, ValueError, CheckpointError):
        return frozenset()
    paths = (state.latest, *state.paths) if state else ()
    return frozenset(os.path.basename(path.replace("\\", "/").rstrip("/")) for path in paths)


def is_old(path: str) -> bool:
    """Return whether a file is a checkpoint of the first version by its neighbours, however damaged."""
    directory, name = os.path.split(path)
    if not any(map(fs.lexists, (path + META, os.path.join(directory, NAME)))):
        return False
    try:
        entries = scan(directory or os.curdir)
        return name in entries and any(names[0] == name for names in old_tables(directory, entries))
    except CheckpointError:
        return False


def prefix_of(path: str) -> str | None:
    """Return the prefix that a path stands for, if it is one or belongs to one; None elsewhere."""
    match = DATA.fullmatch(os.path.basename(path))
    if match is not None:
        return os.path.join(os.path.dirname(path), match["prefix"])
    if path.endswith(INDEX):
        return path.removesuffix(INDEX)
    return None
