"""Files of this machine, below the directories that a command holds open (see ``held``)."""

from __future__ import annotations

import errno
import os
import shutil
import time
from contextlib import AbstractContextManager, nullcontext, suppress
from stat import S_ISDIR
from typing import BinaryIO, ClassVar, cast

from ckpttool.core.errors import from_os_error
from ckpttool.storage import held
from ckpttool.storage.atomic import write_atomically
from ckpttool.storage.directories import OpenDirectory
from ckpttool.storage.place import Place, is_same_file
from ckpttool.storage.source import Source, regular_descriptor

_ABSENT = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG}


def is_absence(error: OSError) -> bool:
    """Return whether an error means that nothing exists at a path, rather than that there is no answer."""
    return error.errno in _ABSENT


class Disk(Place):
    """File systems of this machine."""

    reads_are_free: ClassVar[bool] = True
    errors_are_verdicts: ClassVar[bool] = True
    keeps_checksums: ClassVar[bool] = False
    opens_by_path: ClassVar[bool] = True
    can_rename: ClassVar[bool] = True
    has_owners: ClassVar[bool] = True
    has_links: ClassVar[bool] = True
    block_bytes: ClassVar[int] = 1 << 23

    def require_askable(self, path: str) -> None:
        """Accept every path."""

    def root(self, path: str) -> str:
        return ""

    def status(self, path: str, *, follows: bool = True) -> os.stat_result:
        return held.status(path, follows=follows)

    def mode(self, path: str, *, follows: bool = True) -> int | None:
        """Return the mode of a path.

        Raises:
            Exchanged: A directory on the way was replaced.
        """
        try:
            return held.status(path, follows=follows).st_mode
        except held.Exchanged:
            raise
        except (OSError, ValueError):
            return None

    def is_there(self, path: str, *, follows: bool = True) -> bool:
        try:
            held.status(path, follows=follows)
        except held.Exchanged:
            raise
        except ValueError:  # a NUL in it
            return False
        except OSError as error:
            if is_absence(error):
                return False
            raise from_os_error(error, path) from error
        return True

    def entries(self, path: str) -> list[os.DirEntry[str]]:
        known = held.entries(path)
        if known is not None:
            return cast("list[os.DirEntry[str]]", known)
        with os.scandir(path) as found:
            return list(found)

    def names(self, path: str) -> list[str]:
        return held.names(path)

    def dirname(self, path: str) -> str:
        return os.path.dirname(path)

    def normpath(self, path: str) -> str:
        return os.path.normpath(path)

    def abspath(self, path: str) -> str:
        return os.path.abspath(path)

    def realpath(self, path: str) -> str:
        return held.real_path(path)

    def relpath(self, path: str) -> str:
        return os.path.relpath(path)

    def open_source(self, path: str) -> Source:
        return Source(path)

    def open_regular(self, path: str, buffering: int = -1) -> BinaryIO:
        # Python's own opening would say of a directory that it is one.
        return open(regular_descriptor(path), "rb", buffering=buffering)

    def write(self, path: str, data: bytes, replaces: os.stat_result | None) -> None:
        self._require_unchanged(path, replaces)
        self.make_directories(os.path.dirname(path))
        write_atomically(path, data)

    def remove(self, path: str, seen: os.stat_result) -> None:
        self._require_unchanged(path, seen)
        above, name = os.path.split(path)
        with OpenDirectory(above) as directory:
            directory.unlink(name)

    def _require_unchanged(self, path: str, seen: os.stat_result | None) -> None:
        now = None
        with suppress(FileNotFoundError, NotADirectoryError):
            now = held.status(path)
        if not is_same_file(now, seen):
            raise OSError(errno.ESTALE, "it was changed meanwhile", path)

    def make_directories(self, path: str) -> None:
        above, name = os.path.split(path.rstrip(os.sep))
        if S_ISDIR(self.mode(path or os.curdir) or 0) or not name:
            return
        self.make_directories(above)
        with OpenDirectory(above) as directory:
            if not directory.has(name):
                directory.make(name).close()

    def free_bytes(self, path: str) -> int | None:
        return shutil.disk_usage(path).free

    def clock(self, path: str) -> float:
        return time.time()

    def is_changeable(self, path: str) -> bool:
        """Return True: whether a directory can be written shows when its lock is made."""
        return True

    def prefetch_listing(self, directory: str) -> None:
        """Do nothing: the system is asked each time."""

    def unfinished_uploads(self, directory: str) -> tuple[int, int | None] | None:
        return None

    def refresh(self, path: str) -> None:
        """Do nothing: the system is asked each time."""

    def ask_again(self, path: str) -> None:
        """Do nothing: the system is asked each time."""

    def answers_below(self, directory: str) -> AbstractContextManager[None]:
        return nullcontext()
