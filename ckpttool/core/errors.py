"""Every way in which ckpttool can fail, as one tree.

CheckpointError
├── NotFound              there is no such file, or it vanished meanwhile
├── AccessDenied          the operating system refuses to open or read it
├── NotACheckpoint        no format recognises what lies there
│   └── AmbiguousFormat   two formats claim it, and neither specialises the other
├── DamagedCheckpoint     a format recognises it, and its structure is wrong
│   ├── Truncated         it ends too early
│   ├── LimitExceeded     reading on would take unbounded time or memory
│   └── NotDownloaded     only a Git LFS pointer lies where the file should be
├── Unsupported           it is well formed, and beyond what ckpttool reads
├── OutOfMemory           reading it takes more memory than there is
└── MissingPackage        an optional package is needed
UsageError                what was asked contradicts itself

Each says in one line where it is, what was found there, and what was expected:
``m.safetensors[fc.weight]: bytes 96..160 lie outside the file (128 bytes)``. None shows credentials.
"""

from __future__ import annotations

import errno
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from ckpttool.core.secrets import without_signatures

if TYPE_CHECKING:
    from types import TracebackType

    from ckpttool.core.report import Finding


class UsageError(ValueError):
    """What was asked can't be done by anybody: options that contradict each other."""

    def __init__(self, text: str) -> None:
        super().__init__(without_signatures(text))


class CheckpointError(Exception):
    """A path could not be read as asked.

    Args:
        path: The file or directory, as the user knows it.
        found: What was found, in words.
        expected: What should have been there.
        where: The place inside: a member, a tensor, a byte offset.
        code: The finding's code, where the class's own says too little.
    """

    code: str = "error"

    def __init__(
        self,
        path: str | os.PathLike[str],
        found: str,
        *,
        expected: str | None = None,
        where: str | None = None,
        code: str | None = None,
    ) -> None:
        self.path = os.fspath(path)
        self.expected = expected
        self.where = where
        if code is not None:
            self.code = code
        self._found = found
        super().__init__(self.path)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path, self._found), self.__dict__

    @property
    def found(self) -> str:
        """Say what was found. Credentials are searched for here: most errors are caught and never shown."""
        return without_signatures(self._found)

    @property
    def reason(self) -> str:
        """Say what was found and expected, without the place."""
        return self.found if self.expected is None else f"{self.found} ({self.expected})"

    def __str__(self) -> str:
        place = "" if self.where is None else f"[{self.where}]"
        expected = "" if self.expected is None else f" ({self.expected})"
        return without_signatures(f"{self.path}{place}: {self._found}{expected}")


class NotFound(CheckpointError):
    """There is no such file or directory, or it vanished meanwhile."""

    code = "not-found"


class AccessDenied(CheckpointError):
    """The operating system refuses to open or read it."""

    code = "access-denied"


class NotACheckpoint(CheckpointError):
    """No format recognises what lies there."""

    code = "not-a-checkpoint"


class AmbiguousFormat(NotACheckpoint):
    """Two formats claim it, and neither is declared to specialise the other.

    ``safety`` holds what loading it by any of them could run.
    """

    code = "ambiguous-format"
    safety: tuple[Finding, ...] = ()


class DamagedCheckpoint(CheckpointError):
    """A format recognises it, and its structure is wrong.

    ``safety`` holds what loading it could run, as far as it was read before the damage.
    """

    code = "damaged"
    safety: tuple[Finding, ...] = ()


class Truncated(DamagedCheckpoint):
    """It ends before all that it announces has come."""

    code = "truncated"


class LimitExceeded(DamagedCheckpoint):
    """Reading on would take unbounded time or memory."""

    code = "limit-exceeded"


class NotDownloaded(DamagedCheckpoint):
    """Only a Git LFS pointer lies where the file should be."""

    code = "lfs-pointer"


class Unsupported(CheckpointError):
    """It is well formed, and beyond what ckpttool reads."""

    code = "unsupported"


class OutOfMemory(CheckpointError):
    """Reading it takes more memory than this process can get."""

    code = "out-of-memory"


class MissingPackage(CheckpointError):
    """An optional package is needed; the message holds the line that installs it."""

    code = "missing-package"


def from_os_error(error: OSError, path: str | os.PathLike[str]) -> CheckpointError:
    """Return the error of this tree that says what the operating system said."""
    if isinstance(error, FileNotFoundError):
        if os.path.islink(path):
            return NotFound(path, f"a link to {os.readlink(path)}, which does not exist")
        return NotFound(path, "no such file or directory")
    return AccessDenied(path, system_text(error))


def system_text(error: OSError) -> str:
    """Return what the operating system said, as a part of a sentence; what others say stays as it is."""
    text = error.strerror or str(error)
    return text.lower() if error.errno is not None and text == os.strerror(error.errno) else text


def _clear_frames(traceback: TracebackType | None) -> None:
    """As ``traceback.clear_frames`` does; to import that takes memory, of which there is none."""
    while traceback is not None:
        with suppress(RuntimeError):  # it is still running
            traceback.tb_frame.clear()
        traceback = traceback.tb_next


@contextmanager
def memory_checked(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn a lack of memory, also for a child process, into an ``OutOfMemory`` of the path being read.

    The frames in which it occurred are cleared, so that what they hold doesn't outlive the failure.
    """
    try:
        yield
    except (MemoryError, OSError) as failure:
        if isinstance(failure, OSError) and failure.errno != errno.ENOMEM:
            raise
        _clear_frames(failure.__traceback__)
        gc.collect()
        raise OutOfMemory(path, "reading it takes more memory than there is") from failure
