"""Checks the path of a target: its format, its parent, free space, and files that it may replace."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Sequence
from shlex import quote

from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.errors import AccessDenied, CheckpointError, NotFound, UsageError, from_os_error
from ckpttool.core.text import did_you_mean
from ckpttool.formats import open_checkpoint
from ckpttool.formats.discovery import unit_at
from ckpttool.formats.interface import MANIFEST_SUFFIXES, scan
from ckpttool.formats.paddle.fluid_serial import only_serial
from ckpttool.formats.paddle.parts import MARKER
from ckpttool.formats.traits import traits_of
from ckpttool.formats.writer import WRITABLE, format_of
from ckpttool.ops.conversion import ConvertOptions
from ckpttool.ops.manifest import SHARED, base_of
from ckpttool.storage import fs
from ckpttool.transaction.staged_output import clear_areas, is_leftover_name

_MARKS = frozenset({MARKER, *SHARED})
"""Names of files in a checkpoint's directory that describe its other files."""


def target_format(target: str, options: ConvertOptions, *, has_architecture: bool) -> str:
    """Return the name of the format that a target gets.

    Args:
        target: Path of the target.
        options: Options of the conversion.
        has_architecture: Whether the Keras model that the weights belong to is known.
    """
    if options.to is not None:
        if options.to not in WRITABLE:
            meant = did_you_mean(options.to, WRITABLE)
            hint = f"{meant} " if meant else ""
            raise UsageError(f"--to {options.to}: unknown format ({hint}choose from {', '.join(WRITABLE)})")
        return options.to
    name = os.path.basename(target.rstrip(os.sep))
    found = format_of(name, has_architecture=has_architecture)
    if found is None:
        suffix = os.path.splitext(name)[1]
        endings = sorted(ending for format in WRITABLE for ending in traits_of(format).suffixes)
        problem = f"can't write {suffix} files" if suffix else "the name has no suffix"
        raise UsageError(f"{target}: {problem}; use one of {' '.join(endings)}, or --to FORMAT")
    return found


def check_target(
    target: str,
    opened: Sequence[Checkpoint],
    options: ConvertOptions,
    *,
    is_prefix: bool = False,
    also: Sequence[str] = (),
) -> list[str] | None:
    """Require that a target may be written; return the names next to it that it replaces.

    Args:
        target: Path of the target.
        opened: The sources, open.
        options: Options of the conversion; ``force`` allows to replace an existing target.
        is_prefix: Whether the target is several files whose names begin with it.
        also: Paths of further sources.

    Returns None if nothing is replaced. The manifests of replaced files are replaced with them.
    """
    bare = target.rstrip(os.sep)
    parent, name = os.path.split(bare)
    if name in ("", os.curdir, os.pardir):
        raise UsageError(f"{target!r}: invalid name for a target")
    parent = parent or os.curdir
    existing_names = _writable_names(parent)
    if not options.dry_run and any(map(is_leftover_name, existing_names)):
        clear_areas(parent)
        existing_names = _writable_names(parent)
    # No source is overwritten: a target is neither one of the files that are read, nor in a directory that is
    # read, nor a directory that contains a source.
    for path in also:
        _check_outside(target, path)
    place = fs.realpath(target)
    for source in opened:
        files = {fs.realpath(entry.path) for entry in source.files}
        read = files | {fs.realpath(source.path)}
        # A hard link, or another spelling on a file system without case, is the same file by another name.
        is_link = fs.lexists(target) and any(
            fs.exists(one) and fs.exists(target) and fs.samefile(one, target) for one in read
        )
        if place in files or is_link:
            raise UsageError(f"{target} is the source itself")
        _check_outside(target, source.path)
        if any(one.startswith(place + os.sep) for one in files):
            raise UsageError(f"{target} contains the source")
    # Existing files of the target: itself, or those that begin with its prefix.
    of_prefix = re.compile(re.escape(name) + r"\.(index|data-\d{5}-of-\d{5}|meta)", re.DOTALL)
    existing = sorted(
        one for one in existing_names if one == name or (is_prefix and of_prefix.fullmatch(one))
    )
    if not existing:
        return None
    if not options.force:
        raise UsageError(
            f"{os.path.join(os.path.dirname(bare), existing[0])} already exists (--force replaces it)"
        )
    for one in existing:
        check_replaceable(os.path.join(parent, one))
    manifests = {
        one + ending for one in (name, *existing) for ending in MANIFEST_SUFFIXES
    } & existing_names - {*existing}
    return [*existing, *sorted(one for one in manifests if fs.isfile(os.path.join(parent, one)))]


def _writable_names(parent: str) -> frozenset[str]:
    """Return the names in a directory that can be written to."""
    try:
        names = fs.listdir(parent)
    except FileNotFoundError as error:
        raise NotFound(
            parent, "no such directory", expected=f"mkdir -p {quote(parent)} creates it"
        ) from error
    except OSError as error:
        raise from_os_error(error, parent) from error
    if not os.access(parent, os.W_OK | os.X_OK):
        raise AccessDenied(parent, "the directory isn't writable")
    return frozenset(names)


def _check_outside(target: str, source: str) -> None:
    """Require that a target is neither a source nor inside of one."""
    place, whole = fs.realpath(target), fs.realpath(source)
    if place == whole:
        raise UsageError(f"{target} is the source itself")
    if fs.isdir(whole) and place.startswith(whole + os.sep):
        raise UsageError(f"{target} is inside the source, {source}")


def check_space(target: str, nbytes: int) -> None:
    """Require free space for a target of ``nbytes`` bytes, if the free space is known."""
    parent = os.path.dirname(target) or os.curdir
    try:
        status = os.statvfs(parent)
    except (OSError, AttributeError):
        return
    free = status.f_bavail * status.f_frsize
    if nbytes > free:
        raise AccessDenied(target, f"no space left: {free:,} bytes are free", expected=f"{nbytes:,} or more")


def target_error(error: OSError, target: str) -> CheckpointError:
    """Return the error of a target for an error of the operating system."""
    failure = from_os_error(error, target)
    if isinstance(failure, NotFound):
        return AccessDenied(target, "its directory was removed while it was written")
    return failure


def check_replaceable(path: str) -> None:
    """Require that a path may be replaced: a file, a link, or a directory of one checkpoint alone."""
    try:
        mode = fs.lstat(path).st_mode
    except OSError as error:
        raise from_os_error(error, path) from error
    if stat.S_ISREG(mode) or stat.S_ISLNK(mode):
        return
    if not stat.S_ISDIR(mode):
        raise UsageError(f"{path} is neither a file nor a directory; it is not replaced")
    # A directory is replaced only if each file in it belongs to the one checkpoint that it is, or describes
    # it: --force must not remove a user's other files.
    whole = path if unit_at(path) is not None else only_serial(path)
    if whole is None:
        raise UsageError(f"{path} is a directory but not a checkpoint; it is not replaced")
    try:
        with open_checkpoint(whole) as standing:
            is_own = _ownership(standing)
    except CheckpointError as error:
        raise UsageError(f"{path}: not replaced, as it may hold files of yours ({error.reason})") from error
    pending = [path]
    while pending:
        for entry in scan(pending.pop()).values():
            if entry.is_dir(follow_symlinks=False):
                pending.append(entry.path)
            elif not is_own(entry.path):
                raise UsageError(
                    f"{entry.path} isn't part of the checkpoint in {path}, which is not replaced"
                )


def _ownership(checkpoint: Checkpoint) -> Callable[[str], bool]:
    """Return a test whether a file belongs to a checkpoint that is a directory."""
    traits = traits_of(checkpoint.format)
    if checkpoint.variant not in traits.known_directories:
        kind = f"{checkpoint.format} ({checkpoint.variant})" if checkpoint.variant else checkpoint.format
        raise UsageError(
            f"{checkpoint.path} is a directory of {kind}, which may hold other files; it is not replaced"
        )
    own = {fs.realpath(entry.path) for entry in checkpoint.files}
    own.add(fs.realpath(base_of(checkpoint)))

    def is_own(path: str) -> bool:
        about = next(
            (path.removesuffix(ending) for ending in MANIFEST_SUFFIXES if path.endswith(ending)), path
        )
        if os.path.basename(path) in _MARKS:
            return True
        inside = os.path.relpath(about, checkpoint.path)
        is_strange = traits.members is not None and traits.members.fullmatch(inside) is None
        return fs.realpath(about) in own and not is_strange

    return is_own
