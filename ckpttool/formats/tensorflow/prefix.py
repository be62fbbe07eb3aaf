"""Names of the files that make up one TensorFlow checkpoint.

- A bundle: ``<prefix>.index``, ``<prefix>.data-00000-of-00002``; ``<prefix>.meta`` if TensorFlow 1 wrote it.
- A checkpoint of version 1: ``<name>``, or ``<name>-00000-of-00002`` for each device; ``<name>.meta``.
- While a bundle is saved: ``….tempstate123``, a file that isn't renamed yet, and the stage
  ``<prefix>_temp/part-00000-of-00002.…``, from which the writer moves the parts when all are written.
"""

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
V1_SHARD = re.compile(r"(?P<prefix>.+)-(?P<shard>\d{5}|\?{5})-of-(?P<shards>\d{5})", re.DOTALL)
"""Shard of a version 1 checkpoint; with ``?????``, TensorFlow's name for all shards together."""
_STEP = re.compile(r".+-\d+", re.DOTALL)
_HEAD, _START = 6, 16
_FOREIGN = (b"PK", b"\x80", b"\x89HDF", b"{", b"\x93NUM")
"""First bytes of other checkpoint formats; such a file is no remnant, even if the state file lists it."""

MAX_NAMED = 20
"""Number of missing shards that are reported one by one."""

Entries = Mapping[str, os.DirEntry[str]]


def shard_name(prefix: str, shard: int, shards: int) -> str:
    """Return the path of a bundle's shard."""
    return f"{prefix}.data-{shard:05d}-of-{shards:05d}"


def is_table(path: str) -> bool:
    """Return whether a file is a TensorFlow table; False if it can't be read."""
    try:
        with fs.open_source(path) as source:
            return is_table_source(source)
    except CheckpointError:
        return False


def is_table_source(source: Source) -> bool:
    """Return whether an open file is a table whose first key is empty, as TensorFlow's headers are."""
    if source.size < FOOTER_BYTES:
        return False
    # The start is in the buffer already; for a file in a store, the footer's magic costs another request.
    if not begins_with_empty_key(source.read(0, _START)):
        return False
    return source.read(source.size - len(MAGIC), len(MAGIC)) == MAGIC


def parts_by_prefix(names: Iterable[str]) -> dict[str, list[str]]:
    """Return shards and temporary files by their prefix."""
    parts = defaultdict(list)
    for name in names:
        if match := DATA.fullmatch(name) or TEMPORARY.fullmatch(name):
            parts[match["prefix"]].append(name)
    return dict(parts)


def bundles(directory: str, entries: Entries) -> dict[str, tuple[str, ...]]:
    """Return the names of the files of each bundle in a directory, by prefix; the index first."""
    # ``.index`` is a common suffix. A file of this name is an index if it has shards or is in the state file,
    # however damaged it is; else its bytes decide.
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
    """Yield the stages of unfinished saves in a directory."""
    for name, entry in entries.items():
        if STAGE.fullmatch(name) and entry.is_dir(follow_symlinks=False) and is_stage(entry.path):
            yield name


def is_stage(path: str) -> bool:
    """Return whether a directory is the stage of an unfinished save."""
    if STAGE.fullmatch(os.path.basename(path.rstrip(os.sep))) is None:
        return False
    try:
        return any(name.startswith("part-") for name in fs.listdir(path))
    except OSError:
        return False


def v1_name(name: str) -> str:
    """Return TensorFlow's name for a version 1 checkpoint, given that name, its only file or a shard."""
    match = V1_SHARD.fullmatch(name)
    return f"{match['prefix']}-?????-of-{match['shards']}" if match else name


def v1_shards(directory: str, entries: Entries) -> dict[str, tuple[str, ...]]:
    """Return the shards of each sharded version 1 checkpoint in a directory, by its ``?????`` name."""
    # Other formats name shards alike (``model-00000-of-00002``): at least one of them has to be a table.
    # Names like ``part-00000-of-00002`` are parts of a stage.
    shards: dict[str, list[str]] = defaultdict(list)
    for name, entry in entries.items():
        if V1_SHARD.fullmatch(name) and DATA.fullmatch(name) is None and entry.is_file():
            shards[v1_name(name)].append(name)
    return {
        whole: tuple(names)
        for whole, names in shards.items()
        if PART.fullmatch(whole.replace("?", "0")) is None
        and any(is_table(os.path.join(directory, name)) for name in names)
    }


def v1_meta(name: str, entries: Entries) -> tuple[str, ...]:
    """Return the name of the ``.meta`` file of a version 1 checkpoint, if it exists."""
    match = V1_SHARD.fullmatch(name)
    meta = f"{match['prefix'] if match else name}{META}"
    return (meta,) if meta in entries else ()


def v1_tables(directory: str, entries: Entries) -> Iterator[tuple[str, ...]]:
    """Yield the files of each single-file version 1 checkpoint in a directory, the table first.

    A file without suffix is hard to recognise, so it needs a ``.meta`` file or an entry in the state file.
    With one of them, a truncated or overwritten file counts as well.
    """
    listed = _names_in_state_file(directory, entries)
    for name, entry in entries.items():
        has_graph = name + META in entries
        if not (has_graph or name in listed) or not entry.is_file():
            continue
        if prefix_of(name) is not None or name + INDEX in entries or V1_SHARD.fullmatch(name):
            continue
        if (has_graph and is_table(entry.path)) or is_remnant(entry.path, is_listed=name in listed):
            yield (name, *v1_meta(name, entries))


def is_remnant(path: str, *, is_listed: bool = False) -> bool:
    """Return whether a file may be the remnant of a table."""
    # A table starts with its first entry, a key of 0 bytes (00 00). A file that is empty or starts so may
    # have been truncated. A listed file may have any other start, unless it is that of another format.
    try:
        with fs.open_regular(path) as file:
            head = file.read(_HEAD)
    except OSError:
        return is_listed
    if head[:2] in (b"", b"\0", b"\0\0"):
        return is_listed or _STEP.fullmatch(os.path.basename(path)) is not None
    return is_listed and not head.startswith(_FOREIGN)


def _names_in_state_file(directory: str, entries: Entries) -> frozenset[str]:
    """Return the base names of all checkpoints in a directory's state file."""
    if NAME not in entries:
        return frozenset()
    try:
        state = read_state(os.path.join(directory, NAME))
    except (OSError, ValueError, CheckpointError):
        return frozenset()
    # The paths may be absolute, of a directory that was moved since, or of Windows. Only checkpoints in this
    # directory matter here, so their names suffice.
    paths = (state.latest, *state.paths) if state else ()
    return frozenset(os.path.basename(path.replace("\\", "/").rstrip("/")) for path in paths)


def is_v1(path: str) -> bool:
    """Return whether a file is a version 1 checkpoint according to its ``.meta`` or the state file."""
    directory, name = os.path.split(path)
    if not any(map(fs.lexists, (path + META, os.path.join(directory, NAME)))):
        return False
    try:
        entries = scan(directory or os.curdir)
        return name in entries and any(names[0] == name for names in v1_tables(directory, entries))
    except CheckpointError:
        return False


def prefix_of(path: str) -> str | None:
    """Return the prefix of a bundle, given its index or one of its shards; None for other paths."""
    match = DATA.fullmatch(os.path.basename(path))
    if match is not None:
        return os.path.join(os.path.dirname(path), match["prefix"])
    if path.endswith(INDEX):
        return path.removesuffix(INDEX)
    return None
