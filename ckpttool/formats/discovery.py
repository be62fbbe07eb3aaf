"""Finds the checkpoints in a directory tree; files that are kept or removed together are one checkpoint.

In each directory, sets of files are found first (shards with their index), then files and directories that
are checkpoints by themselves; other directories are searched.
"""

from __future__ import annotations

import os
import re
import stat
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase, translate
from typing import NamedTuple

from ckpttool.core.errors import AmbiguousFormat, CheckpointError, NotFound, memory_checked
from ckpttool.formats import detect, set_formats, suffix_format
from ckpttool.formats.foreign import SUFFIXES, Foreign, foreign_in_search, unread_reason
from ckpttool.formats.interface import MANIFEST_SUFFIXES, Probe, SetFormat, Unit, scan
from ckpttool.formats.opening import COPYING, EVERYTHING, interrupted_copy, read_note
from ckpttool.storage import fs

MATCHED_NOTHING = "matched nothing"
"""End of the warning about a glob; for several directories it is true only if it is true for each."""

_WILD = re.compile(r"[*?\[]")


class _Pattern(NamedTuple):
    """One interpretation of a glob.

    Attributes:
        pattern: Matches paths relative to the root.
        parts: The glob's parts between slashes.
        is_loose: Whether it matches names anywhere below the root, too.
    """

    pattern: re.Pattern[str]
    parts: tuple[str, ...]
    is_loose: bool

    def matches(self, relative: str, name: str) -> bool:
        return bool(self.pattern.match(relative) or (self.is_loose and self.pattern.match(name)))

    def may_match_in(self, relative: str) -> bool:
        """Return whether it could match a path in a directory."""
        count = relative.count("/") + 1
        return count < len(self.parts) and fnmatchcase(relative, "/".join(self.parts[:count]))


class Globs:
    """Globs of paths in a directory; they record whether they have matched.

    A slash at the end and ``./`` at the beginning mean nothing. A glob with a slash is relative to the
    directory; an absolute path into it, and one from the working directory, match as well.
    """

    def __init__(self, globs: Sequence[str], root: str) -> None:
        self._root = os.path.join(root, "")
        self._patterns = {glob: tuple(_patterns(glob, root)) for glob in globs}
        self._matched: set[str] = set()

    def matching(self, path: str) -> list[str]:
        """Return the globs that match a path in the directory, as they were given."""
        if not self._patterns:
            return []
        name = os.path.basename(path)
        is_below = path.startswith(self._root)
        relative = path[len(self._root) :] if is_below else os.path.relpath(path, self._root)
        matching = [
            glob
            for glob, patterns in self._patterns.items()
            if any(pattern.matches(relative, name) for pattern in patterns)
        ]
        self._matched.update(matching)
        return matching

    def excludes(self, path: str) -> bool:
        """Return whether a glob matches a path, so that its content is skipped."""
        if not self.matching(path):
            return False
        # Globs of paths in a skipped directory aren't tried any more: they count as matched, since a warning
        # that they matched nothing would be false.
        relative = path.removeprefix(self._root)
        for glob, patterns in self._patterns.items():
            if any(pattern.may_match_in(relative) for pattern in patterns):
                self._matched.add(glob)
        return True

    def unmatched(self, option: str) -> list[str]:
        """Return a warning for each glob that has matched nothing."""
        return [
            f"{option} {glob!r} {MATCHED_NOTHING}" for glob in self._patterns if glob not in self._matched
        ]


def last_name(glob: str) -> str:
    """Return the last part of a glob, without directories."""
    return os.path.basename(glob.rstrip("/"))


def _patterns(glob: str, root: str) -> Iterator[_Pattern]:
    """Yield the interpretations of a glob."""
    # A user may write ``a.pt``, ``sub/a.pt``, ``**/a.pt``, ``runs/sub/a.pt`` from the working directory
    # ``.``, or the absolute path, each of them with symlinks in its directories or in the root's. Those that
    # lead into the root are cut to the part below it.
    parts = [part for part in glob.split("/") if part not in ("", os.curdir)]
    if parts and not glob.startswith("/"):
        yield _pattern(parts, is_loose=True)
        if parts[0] == "**" and len(parts) > 1:
            yield _pattern(parts[1:], is_loose=True)
    if len(parts) < 2:
        return
    is_wild = glob.startswith("/")
    paths = [fs.abspath(glob)]
    if "\0" not in paths[0] and not _WILD.search(os.path.dirname(paths[0])):
        paths.append(os.path.join(fs.realpath(os.path.dirname(paths[0])), os.path.basename(paths[0])))
    roots = [fs.abspath(root)]
    if "\0" not in root:
        roots.append(fs.realpath(root))
    names_of_roots = {tuple(_split(path)) for path in roots}
    for path in dict.fromkeys(paths):
        names = _split(path)
        for root_names in names_of_roots:
            inner = names[len(root_names) :]
            if inner != parts and _leads_into(names, root_names, is_wild=is_wild):
                yield _pattern(inner, is_loose=False)


def _pattern(parts: Sequence[str], *, is_loose: bool) -> _Pattern:
    return _Pattern(re.compile(translate("/".join(parts))), tuple(parts), is_loose)


def _leads_into(names: Sequence[str], root: Sequence[str], *, is_wild: bool) -> bool:
    """Return whether a path is below the root."""
    return len(names) > len(root) and all(
        name == root_name or (is_wild and fnmatchcase(root_name, name))
        for name, root_name in zip(names, root, strict=False)
    )


def _split(path: str) -> list[str]:
    return [part for part in path.split("/") if part]


OWN_PREFIX = ".ckpttool"
"""Beginning of the names of ckpttool's own files in a directory: journal, lock, trash, pins."""

_NEVER_ENTERED = frozenset({".git"})
_INDEX = re.compile(r"(index|weights).*\.json$")
_LEVELS_ABOVE = 2
"""Number of directories above one in which an index may name files in it: ``shards/part_1.safetensors``."""


@dataclass(frozen=True, slots=True)
class Walk:
    """Options of a search.

    Attributes:
        recursive: Whether to descend into directories that are no checkpoints themselves.
        exclude: Globs of names, or of paths relative to the root, that are skipped; ``Globs`` if the caller
            reports which of them matched.
        max_depth: Maximum number of levels to descend; None for all.
        enters_root: Whether a set of files that is alone in the root is found as a set in it, with the path
            of its index; otherwise it is the root itself.
        allows_losses: As in ``Probe``.
        on_error: Called with the errors of paths that can't be looked at; the walk continues.
        on_vanished: Called with each path that was listed and then vanished.
        on_unread: Called with the path and the reason for each model that is not read: a file or a directory
            of another format, or a file that only has a name such as ``model.bin``.
    """

    recursive: bool = True
    exclude: Sequence[str] | Globs = ()
    max_depth: int | None = None
    enters_root: bool = False
    allows_losses: bool = False
    on_error: Callable[[CheckpointError], None] = lambda error: None
    on_vanished: Callable[[str], None] = lambda path: None
    on_unread: Callable[[str, str], None] = lambda path, why: None


def discover(root: str | os.PathLike[str], walk: Walk = Walk()) -> Iterator[Unit]:
    """Yield the checkpoint at a path or, if it is a directory of others, the checkpoints in it.

    Directory symlinks are never followed. A file symlink whose target is in the tree is a pointer, not
    a second checkpoint. A file that an index names, in its directory or above, is a part of that checkpoint;
    it is in ``Unit.shared`` if several indexes name it, or if it is in a directory below its index.

    Raises:
        CheckpointError: The root itself can't be looked at.
    """
    for candidate in candidates(root, walk):
        unit = unit_of_candidate(candidate, walk) if isinstance(candidate, str) else candidate
        if unit is not None:
            yield unit


def candidates(root: str | os.PathLike[str], walk: Walk = Walk()) -> Iterator[Unit | str]:
    """Yield the checkpoints that ``discover`` yields, but only the paths of all single files.

    ``unit_of_candidate`` returns the checkpoint of such a file, if it is one.
    """
    path = os.fspath(root)
    unit = unit_at(path)
    is_set_in_root = (
        walk.enters_root
        and unit is not None
        and isinstance(unit.format, SetFormat)
        and fs.isdir(unit.path)
        and bool(sets_in(unit.path, scan(unit.path)))
    )
    if unit is not None and not is_set_in_root:
        yield unit
    elif fs.isdir(path):
        globs = walk.exclude if isinstance(walk.exclude, Globs) else Globs(walk.exclude, path)
        yield from _in_tree(path, replace(walk, exclude=globs), frozenset(names_indexed_above(path)))


def units_inside(directory: str, walk: Walk = Walk()) -> Iterator[Unit]:
    """Yield the checkpoints in a directory, even if it is one itself."""
    globs = walk.exclude if isinstance(walk.exclude, Globs) else Globs(walk.exclude, directory)
    for candidate in _in_tree(directory, replace(walk, exclude=globs)):
        unit = unit_of_candidate(candidate, walk) if isinstance(candidate, str) else candidate
        if unit is not None:
            yield unit


def unit_at(path: str) -> Unit | None:
    """Return the checkpoint at a path itself, or None.

    A file with a checkpoint's suffix and other content counts as a damaged one.

    Raises:
        CheckpointError: It can't be looked at.
    """
    with Probe(path) as probe:
        return unit_of(probe)


def unit_of(probe: Probe) -> Unit | None:
    """Return the checkpoint at the path of a probe, or None; see ``unit_at``.

    A file that several formats recognise is one without a format.

    Raises:
        CheckpointError: It can't be looked at.
    """
    try:
        with memory_checked(probe.path):
            format = detect(probe)
    except AmbiguousFormat:
        if probe.is_directory:
            raise
        return _with_sidecars(Unit(probe.path, (probe.name,), None))
    if format is None and (probe.is_directory or suffix_format(probe.name) is None):
        return None
    unit = format.unit_of(probe) if isinstance(format, SetFormat) else Unit(probe.path, (probe.name,), format)
    return None if unit is None else _with_sidecars(unit)


class _Subdirectory(NamedTuple):
    """A directory to search.

    Attributes:
        path: Its path.
        depth: Number of levels below the root.
        parts: Paths of the files that indexes above it name.
        foreign: Format of the unread model that it is, or is a part of, so that this is reported once.
    """

    path: str
    depth: int
    parts: frozenset[str]
    foreign: Foreign | None = None


def _in_tree(root: str, walk: Walk, parts: frozenset[str] = frozenset()) -> Iterator[Unit | str]:
    """Yield the checkpoints in a tree in order, except files named by indexes above."""
    # A stack of generators instead of recursion: a tree may be deeper than Python's limit.
    stack = [_in_directory(_Subdirectory(root, 0, parts), root, walk)]
    while stack:
        found = next(stack[-1], None)
        if found is None:
            stack.pop()
        elif isinstance(found, _Subdirectory):
            stack.append(_in_directory(found, root, walk))
        else:
            yield found


def _in_directory(directory: _Subdirectory, root: str, walk: Walk) -> Iterator[Unit | str | _Subdirectory]:
    """Yield the checkpoints in a directory, and the subdirectories to descend into."""
    path, depth, parts, outer = directory
    try:
        listed = scan(path)
        copied = _names_being_copied(path, listed, walk) if COPYING in listed else frozenset()
        everything = {
            name: entry
            for name, entry in listed.items()
            if not name.startswith(OWN_PREFIX) and name not in _NEVER_ENTERED and name not in copied
        }
        sets = sets_in(path, everything)
    except CheckpointError as error:
        report(error, walk)
        return
    entries = {name: entry for name, entry in everything.items() if not is_excluded(entry.path, walk)}
    for unit in sets:
        excluded = tuple(name for name in unit.members if name not in entries)
        # Excluded shards of a set are never removed, so they become shared.
        if len(excluded) == len(unit.members) or is_excluded(unit.path, walk):
            continue
        members = tuple(name for name in unit.members if name not in excluded)
        yield _with_sidecars(unit._replace(members=members, shared=(*unit.shared, *excluded)))
    claimed = {name for unit in sets for name in (*unit.members, *unit.shared)}
    parts_below = parts | {os.path.join(path, name) for name in claimed if os.sep in name}
    is_descended_into = walk.recursive and (walk.max_depth is None or depth < walk.max_depth)
    for name, entry in entries.items():
        is_manifest = any(
            name.endswith(end) and name.removesuffix(end) in entries for end in MANIFEST_SUFFIXES
        )
        if name in claimed or entry.path in parts or is_manifest:
            continue
        if not entry.is_dir(follow_symlinks=False):
            if _is_candidate(entry, root):
                yield entry.path
            else:
                _report_named_by_link(entry, walk)
            continue
        try:
            with Probe(entry.path, allows_losses=walk.allows_losses) as probe:
                checkpoint = unit_of(probe)
                foreign = foreign_in_search(probe) if checkpoint is None else None
        except CheckpointError as error:
            report(error, walk)
            continue
        if checkpoint is not None:
            yield checkpoint
            continue
        if foreign is not None and foreign is not outer:
            walk.on_unread(entry.path, foreign.description)
        if is_descended_into:
            yield _Subdirectory(entry.path, depth + 1, parts_below, foreign or outer)


def _report_named_by_link(entry: os.DirEntry[str], walk: Walk) -> None:
    """Report a model that isn't read, if only a link has its suffix."""
    # In the cache of Hugging Face, the target of the link is a blob without a suffix, which isn't recognised.
    is_model = entry.is_symlink() and entry.name.lower().endswith(SUFFIXES)
    if not is_model or os.path.splitext(fs.realpath(entry.path))[1]:
        return
    with suppress(CheckpointError), Probe(entry.path) as probe:  # errors are those of what it leads to
        if (foreign := foreign_in_search(probe)) is not None:
            walk.on_unread(entry.path, foreign.description)


def _names_being_copied(
    directory: str, listed: Mapping[str, os.DirEntry[str]], walk: Walk
) -> Collection[str]:
    """Return the names in a directory that belong to incomplete copies; each copy is reported as an error."""
    names: set[str] = set()
    for name, members in read_note(os.path.join(directory, COPYING)).items():
        copied = set(listed) if EVERYTHING in members else {*members, name} & listed.keys()
        if copied - {COPYING}:
            path = directory if EVERYTHING in members else os.path.join(directory, name)
            walk.on_error(interrupted_copy(path))
        names |= copied
    return names


def report(error: CheckpointError, walk: Walk) -> None:
    """Report an error to the walk; a vanished file is none, since a training may be running."""
    if isinstance(error, NotFound) and not fs.lexists(error.path):
        walk.on_vanished(error.path)
    else:
        walk.on_error(error)


def _is_candidate(entry: os.DirEntry[str], root: str) -> bool:
    """Return whether an entry is a file to look at: no link into the tree, no device, no pipe."""
    if not entry.is_symlink():
        return entry.is_file(follow_symlinks=False)
    target, tree = fs.realpath(entry.path), fs.realpath(root)
    return fs.isfile(target) and os.path.commonpath([tree, target]) != tree


def _with_sidecars(unit: Unit) -> Unit:
    """Return a unit together with the manifests that are next to it."""
    directory, own_name = os.path.split(unit.path.rstrip(os.sep))
    sidecars = []
    for name in dict.fromkeys((own_name, *unit.members)):
        for ending in MANIFEST_SUFFIXES:
            if name + ending not in unit.members:
                with suppress(OSError):
                    if stat.S_ISREG(fs.lstat(os.path.join(directory, name + ending)).st_mode):
                        sidecars.append(name + ending)
    return unit._replace(members=(*unit.members, *sidecars)) if sidecars else unit


def sets_in(directory: str, entries: Mapping[str, os.DirEntry[str]]) -> list[Unit]:
    """Return the checkpoints of several entries in a directory; an entry that two of them name is shared."""
    # Two formats may find the same set: the first in the table wins. A symlink to an index of the directory
    # is no second set. An index that another set names is still that of its own set (``anchors``).
    units: dict[str, Unit] = {}
    for format in set_formats():
        taken = {name for unit in units.values() for name in unit.members}
        for unit in format.units(directory, entries):
            if unit.path not in units and not taken.issuperset(unit.members):
                units[unit.path] = unit
    for path in [path for path in units if fs.islink(path) and _leads_to_another(path, units)]:
        del units[path]
    count = Counter(name for unit in units.values() for name in unit.members)
    anchors = {os.path.basename(unit.path) for unit in units.values()}
    common = {name for name, times in count.items() if times > 1} - anchors
    if not common:
        return list(units.values())
    sets = []
    for unit in units.values():
        members = tuple(name for name in unit.members if name not in common)
        shared = tuple(name for name in unit.members if name in common)
        if members:
            sets.append(unit._replace(members=members, shared=(*unit.shared, *shared)) if shared else unit)
    return sets


def _leads_to_another(link: str, units: Collection[str]) -> bool:
    """Return whether a link leads to another set in its directory."""
    directory, name = os.path.split(link)
    target_directory, target = os.path.split(fs.realpath(link))
    is_beside = target != name and target_directory == fs.realpath(directory)
    return is_beside and os.path.join(directory, target) in units


def names_indexed_above(
    directory: str, on_error: Callable[[CheckpointError], object] | None = None
) -> dict[str, str]:
    """Return the paths in a directory that indexes in the directories above it name, with those indexes.

    ``on_error`` is called with errors there, but not with those of directories without read permission.
    """
    indexes: dict[str, str] = {}
    real = above = fs.realpath(directory)
    for _ in range(_LEVELS_ABOVE):
        previous, above = above, fs.dirname(above)
        if above == previous:
            break
        try:
            entries = {name: entry for name, entry in scan(above).items() if _INDEX.search(name)}
        except CheckpointError as error:
            if on_error is not None and not isinstance(error.__cause__, PermissionError):
                on_error(error)
            break
        if on_error is not None:
            for name in entries:
                _require_readable(os.path.join(above, name), on_error)
        for unit in sets_in(above, entries) if entries else ():
            for name in unit.shared:
                path = os.path.join(above, name)
                if path.startswith(real + os.sep):
                    indexes[os.path.join(directory, os.path.relpath(path, real))] = unit.path
    return indexes


def _require_readable(path: str, on_error: Callable[[CheckpointError], object]) -> None:
    try:
        with fs.open_source(path) as index:
            index.read(0, index.size)
    except CheckpointError as error:
        on_error(error)


def unit_of_candidate(path: str, walk: Walk) -> Unit | None:
    """Return the checkpoint at the path of a candidate, or None; errors are reported to the walk."""
    try:
        with Probe(path, allows_losses=walk.allows_losses) as probe:
            unit = unit_of(probe)
            reason = unread_reason(probe) if unit is None else None
    except CheckpointError as error:
        report(error, walk)
        return None
    if reason is not None:
        walk.on_unread(path, reason)
    return unit


def is_excluded(path: str, walk: Walk) -> bool:
    """Return whether a path in the tree is excluded."""
    return isinstance(walk.exclude, Globs) and walk.exclude.excludes(path)
