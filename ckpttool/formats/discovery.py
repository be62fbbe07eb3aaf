"""Finds the logical checkpoints in a directory tree: what goes or stays together is one."""

from __future__ import annotations

import fnmatch
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ckpttool.errors import CheckpointError
from ckpttool.formats import detect, formats, suffix_format
from ckpttool.formats.interface import SIDECARS, Probe, SetFormat, Unit, scan

OWN_PREFIX = ".ckpttool"
"""What ckpttool itself leaves in a directory: journal, lock, trash, pins."""

_NEVER_ENTERED = frozenset({".git"})


@dataclass(frozen=True, slots=True)
class Walk:
    """Which part of a tree is looked at.

    Attributes:
        recursive: Whether to descend into directories that are no checkpoints themselves.
        exclude: Globs of names, or of paths relative to the root, that are passed over.
        max_depth: How many levels to descend at most; None for all.
        on_error: Told of what could not be looked at; the walk goes on.
    """

    recursive: bool = True
    exclude: Sequence[str] = ()
    max_depth: int | None = None
    on_error: Callable[[CheckpointError], None] = lambda error: None


def discover(root: str | os.PathLike[str], walk: Walk = Walk()) -> Iterator[Unit]:
    """Yield the checkpoints at a path: itself, where it is one; else those in the directory.

    Directory symlinks are never followed. A file symlink whose target lies in the tree is a pointer, not
    a second checkpoint.

    Raises:
        CheckpointError: The root itself can't be looked at.
    """
    path = os.fspath(root)
    unit = unit_at(path)
    if unit is not None:
        yield unit
    elif os.path.isdir(path):
        yield from _in_directory(path, path, walk, 0)


def unit_at(path: str) -> Unit | None:
    """Return the checkpoint that a path itself is, or None.

    A file with a checkpoint's suffix and other content is one too: a damaged one.

    Raises:
        CheckpointError: It can't be looked at.
    """
    with Probe(path) as probe:
        format = detect(probe)
        if format is None and (probe.is_directory or suffix_format(probe.name) is None):
            return None
        unit = format.unit_of(probe) if isinstance(format, SetFormat) else Unit(path, (probe.name,), format)
        return None if unit is None else _with_sidecars(unit)


def _in_directory(directory: str, root: str, walk: Walk, depth: int) -> Iterator[Unit]:
    try:
        entries = {
            name: entry for name, entry in scan(directory).items() if not _is_excluded(entry.path, root, walk)
        }
    except CheckpointError as error:
        walk.on_error(error)
        return
    claimed: set[str] = set()
    for format in (format for format in formats() if isinstance(format, SetFormat)):
        for unit in format.units(directory, entries):
            if claimed.isdisjoint(unit.members):
                whole = _with_sidecars(unit)
                claimed.update(whole.members)
                yield whole
    for name, entry in entries.items():
        if name in claimed or _is_sidecar(name, entries):
            continue
        if entry.is_dir(follow_symlinks=False):
            yield from _subdirectory(entry, root, walk, depth)
        elif _is_candidate(entry, root) and (found := _looked_at(entry.path, walk)):
            yield found


def _with_sidecars(unit: Unit) -> Unit:
    """Return a unit together with the manifests that lie beside it."""
    bare = unit.path.rstrip(os.sep)
    directory, own = os.path.dirname(bare), os.path.basename(bare)
    names = (name + ending for name in dict.fromkeys((own, *unit.members)) for ending in SIDECARS)
    found = [
        name for name in names if name not in unit.members and _is_own_file(os.path.join(directory, name))
    ]
    return replace(unit, members=(*unit.members, *found)) if found else unit


def _is_own_file(path: str) -> bool:
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except OSError:
        return False


def _is_sidecar(name: str, entries: Mapping[str, os.DirEntry[str]]) -> bool:
    """Tell whether a name belongs to another entry of the directory; it is no checkpoint of its own."""
    return any(name.endswith(ending) and name.removesuffix(ending) in entries for ending in SIDECARS)


def _subdirectory(entry: os.DirEntry[str], root: str, walk: Walk, depth: int) -> Iterator[Unit]:
    try:
        unit = unit_at(entry.path)
    except CheckpointError as error:
        walk.on_error(error)
        return
    if unit is not None:
        yield unit
    elif walk.recursive and (walk.max_depth is None or depth < walk.max_depth):
        yield from _in_directory(entry.path, root, walk, depth + 1)


def _looked_at(path: str, walk: Walk) -> Unit | None:
    try:
        return unit_at(path)
    except CheckpointError as error:
        walk.on_error(error)
        return None


def _is_excluded(path: str, root: str, walk: Walk) -> bool:
    name = os.path.basename(path)
    if name.startswith(OWN_PREFIX) or name in _NEVER_ENTERED:
        return True
    relative = os.path.relpath(path, root)
    return any(fnmatch.fnmatch(name, glob) or fnmatch.fnmatch(relative, glob) for glob in walk.exclude)


def _is_candidate(entry: os.DirEntry[str], root: str) -> bool:
    """Tell whether an entry is a file of its own: no link into the tree, no device, no pipe."""
    if not entry.is_symlink():
        return entry.is_file(follow_symlinks=False)
    target = os.path.realpath(entry.path)
    return os.path.isfile(target) and os.path.commonpath(
        [os.path.realpath(root), target]
    ) != os.path.realpath(root)
