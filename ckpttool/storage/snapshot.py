"""A snapshot of files and directories: each question has one answer during a command."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TypeVar, cast

from ckpttool.core.errors import CheckpointError
from ckpttool.storage import fs

T = TypeVar("T")

Names = Mapping[str, os.DirEntry[str]]
_KEPT_BYTES = 1 << 16
"""Larger contents, such as a trainer's history, are read again each time: a sweep has thousands of them."""


class Snapshot:
    """Files and directories as they were when they were first looked at.

    Errors are answers, too, and are raised again. Plans are made from snapshots; what carries a plan out
    looks at the files again.
    """

    def __init__(self) -> None:
        self._answers: dict[tuple[object, ...], object] = {}

    def _once(self, ask: Callable[[], T], *question: object) -> T:
        if question not in self._answers:
            try:
                self._answers[question] = ask()
            except (OSError, ValueError, CheckpointError) as error:
                self._answers[question] = error
        answer = self._answers[question]
        if isinstance(answer, Exception):
            raise answer.with_traceback(None)
        return cast(T, answer)

    def names(self, directory: str) -> Names:
        """Return the entries of a directory by name; raises ``OSError``."""
        return self._once(lambda: {entry.name: entry for entry in fs.entries(directory)}, "names", directory)

    def exists(self, path: str) -> bool:
        """Return whether a path exists, links followed; ``CheckpointError`` if that is unknown."""
        return self._once(lambda: fs.exists(path), "exists", path)

    def lexists(self, path: str) -> bool:
        """Return whether a path exists, be it a broken link; ``CheckpointError`` if that is unknown."""
        return self._once(lambda: fs.lexists(path), "lexists", path)

    def isdir(self, path: str) -> bool:
        """Return whether a path is a directory, or a link to one."""
        return self._once(lambda: fs.isdir(path), "isdir", path)

    def islink(self, path: str) -> bool:
        """Return whether a path is a symlink."""
        return self._once(lambda: fs.islink(path), "islink", path)

    def status(self, path: str) -> os.stat_result:
        """Return the status of a path; raises ``OSError``."""
        return self._once(lambda: fs.stat(path), "status", path)

    def is_closed(self, path: str) -> bool:
        """Return whether a path is in a directory that this user may not enter."""
        try:
            self._once(lambda: fs.lstat(path), "own status", path)
        except PermissionError:
            return True
        except OSError:
            return False
        return False

    def realpath(self, path: str) -> str:
        """Return a path without symlinks."""
        return self._once(lambda: fs.realpath(path), "realpath", path)

    def readlink(self, path: str) -> str:
        """Return the target of a symlink; raises ``OSError``."""
        return self._once(lambda: fs.readlink(path), "readlink", path)

    def read(self, path: str, limit: int) -> bytes:
        """Return the first bytes of a regular file, one more than ``limit`` if it is longer.

        Raises:
            NotRegular: It is a directory, a pipe or the like.
            OSError: It can't be read.
        """
        data = self._once(lambda: _read(path, limit), "read", path, limit)
        if len(data) > _KEPT_BYTES:
            del self._answers["read", path, limit]
        return data


def _read(path: str, limit: int) -> bytes:
    with fs.open_regular(path) as file:
        return file.read(limit + 1)
