"""Location and ownership of stages, locks, trash and pins: in a directory, or in its parent directory.

Paddle's loader splits the name of every entry of a Fluid root on ``_`` and fails on any other than
``checkpoint_<n>``. Accelerate, where it names checkpoints itself, sorts every entry of ``checkpoints/`` by
the number in its name, fails on one without, and may delete one with a small number. So the files of ckpttool
for such a directory are in its parent directory, and have its name in theirs.

Sources: PaddlePaddle/Paddle ``python/paddle/fluid/io.py`` of 2018, ``_get_dir_serial``;
huggingface/accelerate ``accelerator.py``, ``save_state`` and ``load_state``, and ``checkpointing.py``,
``save_accelerator_state``.

Only journals and records of this user, or of the directory's owner, are obeyed. Where several users can
write, another one could plant a journal to have files removed or renamed that he can't change himself.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, TypeVar

from ckpttool.core.errors import AccessDenied, CheckpointError, DamagedCheckpoint, from_os_error
from ckpttool.formats.interface import Probe
from ckpttool.formats.paddle.fluid import Fluid
from ckpttool.formats.paddle.fluid_serial import SERIAL
from ckpttool.formats.paddle.parts import MODEL, TABLES
from ckpttool.storage import fs
from ckpttool.storage.directories import OpenDirectory
from ckpttool.storage.source import NotRegular, regular_descriptor
from ckpttool.transaction.mounts import mount_points

ACCELERATES = "checkpoints"
"""Directory in a project that Accelerate saves to, if it names checkpoints itself."""
_RANDOM_STATES = re.compile(r"random_states_[0-9]+\.pkl")
"""Files of each process in an Accelerate checkpoint."""
OWNER = "@"
"""Separator between our part of a name and the name of the directory that it is for."""


TRASH = ".ckpttool-trash"
"""Directory with a directory for each command, named by its identity, with its record and files."""


class StateDir(NamedTuple):
    """A directory for stages, locks and trash, and the suffix of their names there."""

    path: str
    suffix: str = ""

    @property
    def trash(self) -> str:
        """Path of the trash."""
        return os.path.join(self.path, self.trash_name)

    @property
    def trash_name(self) -> str:
        """Name of the trash."""
        return TRASH + self.suffix

    def trash_place(self, identity: str) -> str:
        """Return the path of a command's directory in the trash."""
        return os.path.join(self.trash, identity)

    @property
    def directory(self) -> str:
        """Path of the directory that it is for, with its name at the time when the suffix was made."""
        return os.path.join(self.path, self.suffix.removeprefix(OWNER)) if self.suffix else self.path


def state_dir_of(directory: str) -> StateDir:
    """Return the location of new stages, locks and trash of a directory."""
    if not fs.place_of(directory).opens_by_path:  # no trainer scans a store
        return StateDir(directory)
    if _is_scanned_by_accelerate(directory):
        real = fs.realpath(directory)
        is_mount_point = os.path.ismount(real) or real in (mount_points(below=real) or ())
        # Files can't be renamed out of a mount, so a directory that is a mount point holds its own stages.
        return StateDir(directory) if is_mount_point else state_dir_beside(directory)
    if any(_is_serial(os.path.join(directory, name)) for name in _names_of_serials(directory)):
        return state_dir_beside(directory)
    return StateDir(directory)


def state_dirs(directory: str) -> tuple[StateDir, ...]:
    """Return the possible state directories of a directory: itself, and its parent."""
    beside = (state_dir_beside(directory),) if fs.place_of(directory).opens_by_path else ()
    return (StateDir(directory), *beside)


def state_dir_beside(directory: str) -> StateDir:
    """Return the state directory in the parent of a directory."""
    real = fs.realpath(directory)
    return StateDir(os.path.dirname(real), OWNER + os.path.basename(real))


def may_keep_state_beside(directory: str) -> bool:
    """Return whether the parent may be the state directory, judged by names alone."""
    return _is_named_as_accelerates(directory) or bool(_names_of_serials(directory))


def state_dir_of_stage(path: str) -> StateDir:
    """Return the state directory that holds a stage; its ``directory`` is the one that the stage is for."""
    parent, name = os.path.split(path)
    _, mark, owner = name.partition(OWNER)
    return StateDir(parent or os.curdir, mark + owner)


def enclosing_serial(directory: str) -> str | None:
    """Return the Fluid serial that a directory is a part of, which holds no checkpoints of its own."""
    parent, name = os.path.split(fs.abspath(directory))
    return parent if name in (MODEL, *TABLES) and _is_serial(parent) else None


def _is_scanned_by_accelerate(directory: str) -> bool:
    """Return whether Accelerate scans a directory: it wrote one of its entries, which may be renamed since.

    A directory of another name may be the target of a link with Accelerate's.
    """
    is_called_so = _is_named_as_accelerates(directory)
    try:
        found = fs.entries(directory)
    except OSError:  # unknown
        return False
    named = (entry for entry in found if is_called_so or SERIAL.fullmatch(entry.name))
    return any(map(_holds_random_states, named))


def _is_named_as_accelerates(directory: str) -> bool:
    return os.path.basename(fs.realpath(directory)) == ACCELERATES


def _holds_random_states(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir() and any(map(_RANDOM_STATES.fullmatch, fs.listdir(entry.path)))
    except OSError:  # it is missing or unreadable
        return False


def _names_of_serials(directory: str) -> list[str]:
    try:
        return sorted(filter(SERIAL.fullmatch, fs.listdir(directory)))
    except OSError:  # unknown
        return []


def _is_serial(path: str) -> bool:
    try:
        with Probe(path) as probe:
            return probe.is_directory and Fluid().matches(probe)
    except CheckpointError:
        return False


# Ownership ----------------------------------------------------------------------------------------

T = TypeVar("T")

MAX_BYTES = 1 << 28
"""Limit on the size of a journal; two million files take less."""

_OTHERS = stat.S_IWGRP | stat.S_IWOTH

LEFT_UNCHANGED = "left unchanged"


def require_own(path: str, directory: str, otherwise: str = LEFT_UNCHANGED) -> None:
    """Require that a directory of ours was made by this user, or by the owner of the directory it is for.

    Others may have write permission for it only as far as they have it for ``directory``. ``otherwise``
    completes the message about one that belongs to another user.
    """
    try:
        status, directory_status = fs.lstat(path), fs.stat(directory)
    except OSError as error:
        raise from_os_error(error, path) from error
    require_own_status(path, status, directory_status, otherwise)


def require_own_status(
    path: str, status: os.stat_result, directory_status: os.stat_result, otherwise: str = LEFT_UNCHANGED
) -> None:
    """Require the same as ``require_own``, by the statuses of the directory and of the one that it is for."""
    if not stat.S_ISDIR(status.st_mode):
        what = "a symlink" if stat.S_ISLNK(status.st_mode) else "not a directory"
        raise AccessDenied(path, f"is {what}; {LEFT_UNCHANGED}")
    _require_owner(path, status, directory_status, otherwise)
    # Users who may write in the directory can remove all files there anyway, so they gain nothing from a
    # stage that they may write in. In a sticky directory they can't remove those of others, so there a
    # stage must be closed to them.
    is_sticky = bool(directory_status.st_mode & stat.S_ISVTX)
    if status.st_mode & _OTHERS & (_OTHERS if is_sticky else ~directory_status.st_mode):
        raise AccessDenied(path, f"others may have written to it; {LEFT_UNCHANGED}")


@contextmanager
def open_own(directory: str, base: str, *names: str) -> Iterator[OpenDirectory]:
    """Open a directory of ours below another one, name by name, and require that it is ours."""
    # It is checked by its path before it is opened, and again by its descriptor: it may have
    # been replaced meanwhile.
    path = os.path.join(base, *names)
    require_own(path, directory)
    with ExitStack() as stack:
        place = stack.enter_context(OpenDirectory(base))
        for name in names:
            place = stack.enter_context(place.open(name))
        require_own_status(path, place.own_status(), fs.stat(directory))
        yield place


def read_own(
    directory: str, base: str, *names: str, kind: str, parse: Callable[[Any], T], most: int = MAX_BYTES
) -> T | None:
    """Return the parsed content of a JSON file that we wrote for a directory; None if it is missing.

    Args:
        directory: The directory.
        base: A directory above the file.
        names: Names of the directories from there on, and of the file.
        kind: Kind of file, for messages: "a journal".
        parse: Converts its plain data; raises ValueError, LookupError or TypeError.
        most: Limit on its size in bytes.
    """
    path = os.path.join(base, *names)
    try:
        if fs.place_of(path).has_owners:
            with open_own(directory, base, *names[:-1]) as place:
                text = own_bytes(place, names[-1], directory, kind, most)
        else:
            from ckpttool.transaction.store_directory import StoreDirectory

            found = StoreDirectory(base).read("/".join(names), most)
            if found is None:
                return None
            text = found[0]
    except FileNotFoundError:
        return None
    except OSError as error:
        raise from_os_error(error, path) from error
    return parse_own(path, text, kind, parse)


def parse_own(path: str, text: bytes, kind: str, parse: Callable[[Any], T]) -> T:
    """Return the parsed content of a JSON file of ours; see ``read_own``."""
    try:
        return parse(json.loads(text))
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        problem = f"not {kind} of ckpttool"
        problem += f": {error}" if type(error) is ValueError else ""
        raise DamagedCheckpoint(path, problem, expected="move it away to go on") from error


def own_bytes(place: OpenDirectory, name: str, directory: str, kind: str, most: int) -> bytes:
    """Return the bytes of a file of ours in an open directory; see ``read_own``."""
    path, status_before = place.join(name), place.status(name)
    if status_before is not None and stat.S_ISLNK(status_before.st_mode):
        raise DamagedCheckpoint(path, "a symlink", expected=kind)
    try:
        descriptor = regular_descriptor(place.at(name), follows=False, dir_fd=place.descriptor)
    except NotRegular as error:
        raise DamagedCheckpoint(path, "not a regular file", expected=kind) from error
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        _require_owner(path, status, fs.stat(directory))
        if status.st_size > most:
            raise DamagedCheckpoint(path, f"{status.st_size:,} bytes", expected=f"{kind} of at most {most:,}")
        return file.read(most)


def _require_owner(
    path: str, status: os.stat_result, directory_status: os.stat_result, otherwise: str = LEFT_UNCHANGED
) -> None:
    if (user := other_owner(status, directory_status)) is not None:
        raise AccessDenied(path, f"belongs to another user, {user}; {otherwise}")


def other_owner(status: os.stat_result, directory_status: os.stat_result) -> str | None:
    """Return the owner of a file, unless that is this user or the owner of its directory."""
    if not hasattr(os, "geteuid") or status.st_uid in (os.geteuid(), directory_status.st_uid):
        return None
    return user_name(status.st_uid)


def user_name(user: int) -> str:
    """Return the name of a user ID."""
    try:
        import pwd

        return pwd.getpwuid(user).pw_name
    except (ImportError, KeyError):  # Windows, or an unknown user
        return f"uid {user}"
