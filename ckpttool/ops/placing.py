"""Where a target may stand, and in which format."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from ckpttool.checkpoint import Checkpoint
from ckpttool.errors import AccessDenied, CheckpointError, NotFound, UsageError, from_os_error
from ckpttool.formats.discovery import unit_at
from ckpttool.formats.fluid_siblings import only_serial
from ckpttool.ops.conversion import ConvertWishes
from ckpttool.writing import SUFFIXES, WRITERS, format_of

_HDF5 = "keras-h5"


def format_for(target: str, wishes: ConvertWishes, *, has_architecture: bool) -> str:
    """Return the name of the format that a target gets.

    Args:
        target: Where it is to stand.
        wishes: What was asked for.
        has_architecture: Whether it is known which Keras model the weights are of.

    Raises:
        UsageError: Neither the wishes nor the name tell it.
    """
    if wishes.to is not None:
        if wishes.to not in WRITERS:
            raise UsageError(f"--to {wishes.to}: no such format (one of {', '.join(WRITERS)})")
        return wishes.to
    name = os.path.basename(target.rstrip(os.sep))
    found = format_of(name)
    if found is None:
        raise UsageError(
            f"{target}: its name doesn't say which format it is to have "
            f"(--to, or one of {' '.join(sorted(SUFFIXES))})"
        )
    if found == _HDF5 and not name.lower().endswith(".weights.h5") and not has_architecture:
        return "hdf5"
    return found


def check_place(target: str, sources: Sequence[Checkpoint], wishes: ConvertWishes) -> list[str] | None:
    """Require that a target may stand where it is to; return the names beside it that give way to it.

    Returns None where nothing stands there.

    Raises:
        UsageError: Something is in its place and may not go, or it is what is read, or lies inside that.
        CheckpointError: The place can't be looked at, or can't be written to.
    """
    parent = os.path.dirname(target.rstrip(os.sep)) or os.curdir
    _check_parent(parent)
    for source in sources:
        _check_apart(target, source)
    found = _standing(target)
    if not found:
        return None
    if not wishes.force:
        raise UsageError(f"{os.path.join(parent, found[0])} is there already (--force replaces it)")
    is_directory = os.path.isdir(target) and not os.path.islink(target)
    if is_directory and unit_at(target) is None and only_serial(target) is None:
        raise UsageError(f"{target} is a directory, and no checkpoint: it is not replaced")
    return found


def _check_parent(parent: str) -> None:
    try:
        os.listdir(parent)
    except OSError as error:
        raise from_os_error(error, parent) from error
    if not os.access(parent, os.W_OK | os.X_OK):
        raise AccessDenied(parent, "nothing can be written there")


def _check_apart(target: str, source: Checkpoint) -> None:
    place = os.path.realpath(target)
    files = {os.path.realpath(entry.path) for entry in source.files}
    whole = os.path.realpath(source.path)
    if place == whole or place in files or (os.path.lexists(target) and _is_same(target, files | {whole})):
        raise UsageError(f"{target} is what is read")
    if os.path.isdir(whole) and place.startswith(whole + os.sep):
        raise UsageError(f"{target} lies inside {source.path}, which is read")
    if any(one.startswith(place + os.sep) for one in files):
        raise UsageError(f"{target} holds what is read")


def _is_same(target: str, others: set[str]) -> bool:
    """Tell whether a path is one of others by another name: a hard link, or another spelling."""
    return any(
        os.path.exists(one) and os.path.exists(target) and os.path.samefile(one, target) for one in others
    )


def _standing(target: str) -> list[str]:
    """Return the names of what stands in the place of a target: itself, or the files behind the prefix."""
    directory, name = os.path.split(target.rstrip(os.sep))
    behind = re.compile(re.escape(name) + r"\.(index|data-\d{5}-of-\d{5}|meta)", re.DOTALL)
    try:
        entries = os.listdir(directory or os.curdir)
    except OSError as error:
        raise from_os_error(error, directory or os.curdir) from error
    return sorted(entry for entry in entries if entry == name or behind.fullmatch(entry))


def check_space(target: str, nbytes: int) -> None:
    """Require that a target of so many bytes finds room, where the system tells how much there is.

    Raises:
        AccessDenied: It doesn't.
    """
    parent = os.path.dirname(target) or os.curdir
    try:
        status = os.statvfs(parent)
    except (OSError, AttributeError):
        return
    free = status.f_bavail * status.f_frsize
    if nbytes > free:
        raise AccessDenied(target, f"no space left: {free:,} bytes are free", expected=f"{nbytes:,} or more")


def told(error: OSError, target: str) -> CheckpointError:
    """Return the error that says what the operating system said of the target."""
    failure = from_os_error(error, target)
    if isinstance(failure, NotFound):
        return AccessDenied(target, "its directory vanished while it was written")
    return failure
