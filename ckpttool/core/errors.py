"""Tree of all errors.

CheckpointError
├── NotFound              no such file, or it was removed meanwhile
├── AccessDenied          the operating system refuses to open or read it
├── NotACheckpoint        no format recognises it
│   └── AmbiguousFormat   two formats claim it, and neither specialises the other
├── DamagedCheckpoint     a format recognises it, and its structure is wrong
│   ├── Truncated         it ends too early
│   ├── LimitExceeded     reading on would take unbounded time or memory
│   └── NotDownloaded     a Git LFS pointer is in place of the file
├── Unsupported           it is well formed, but not supported
├── OutOfMemory           not enough memory to read it
└── MissingPackage        an optional package is needed
UsageError                the request is invalid or contradicts itself

Each is one line with the place, the problem, and the expected state:
``m.safetensors[fc.weight]: bytes 96..160 lie outside the file (128 bytes)``. Credentials are removed.
"""

from __future__ import annotations

import errno
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from ckpttool.core.report import Finding, Sentence, error
from ckpttool.core.urls import without_signatures

if TYPE_CHECKING:
    from types import TracebackType


class UsageError(ValueError):
    """The request is invalid, such as options that contradict each other."""

    def __init__(self, text: str) -> None:
        super().__init__(without_signatures(text))


class CheckpointError(Exception):
    """A path could not be read as asked.

    Args:
        path: The file or directory, as the user named it.
        found: The problem, in words.
        expected: The expected state.
        where: The place inside: a member, a tensor, a byte offset.
        code: Code of the finding, if it isn't that of the class.
    """

    code: str = "error"

    def __init__(
        self,
        path: str | os.PathLike[str],
        found: str | Sentence,
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
        self._found = str(found)
        super().__init__(self.path)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"

    # Errors cross processes. By default, pickle calls the class with ``args``, which has the path alone.
    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path, self._found), self.__dict__

    @property
    def found(self) -> str:
        """The problem, without credentials."""
        # Removing them searches the environment; most errors are caught and never shown, so it is done here.
        return without_signatures(self._found)

    @property
    def reason(self) -> str:
        """The problem and the expected state, without the place."""
        return self.found if self.expected is None else f"{self.found} ({self.expected})"

    @property
    def placed_reason(self) -> str:
        """The reason, after the place inside."""
        return self.reason if self.where is None else f"{self.where}: {self.reason}"

    def __str__(self) -> str:
        place = "" if self.where is None else f"[{self.where}]"
        expected = "" if self.expected is None else f" ({self.expected})"
        return without_signatures(f"{self.path}{place}: {self._found}{expected}")


class NotFound(CheckpointError):
    """The file or directory doesn't exist, or was removed meanwhile."""

    code = "not-found"


class AccessDenied(CheckpointError):
    """The operating system refuses to open or read it."""

    code = "access-denied"


class NotACheckpoint(CheckpointError):
    """No format recognises it."""

    code = "not-a-checkpoint"


class AmbiguousFormat(NotACheckpoint):
    """Two formats claim it, and neither is declared to specialise the other.

    ``safety`` has findings on the code that loading it by any of them could run.
    """

    code = "ambiguous-format"
    safety: tuple[Finding, ...] = ()


class DamagedCheckpoint(CheckpointError):
    """A format recognises it, and its structure is wrong.

    ``safety`` has findings on the code that loading it could run, up to the damage.
    """

    code = "damaged"
    safety: tuple[Finding, ...] = ()


class Truncated(DamagedCheckpoint):
    """It ends too early."""

    code = "truncated"


class LimitExceeded(DamagedCheckpoint):
    """Reading on would take unbounded time or memory."""

    code = "limit-exceeded"


class NotDownloaded(DamagedCheckpoint):
    """A Git LFS pointer is in place of the file."""

    code = "lfs-pointer"


class Unsupported(CheckpointError):
    """It is well formed, but ckpttool doesn't support it."""

    code = "unsupported"


class OutOfMemory(CheckpointError):
    """Reading it takes more memory than this process can get."""

    code = "out-of-memory"


class MissingPackage(CheckpointError):
    """An optional package is needed; the message holds the line that installs it."""

    code = "missing-package"


def error_of(failure: CheckpointError, where: str | None = None) -> Finding:
    """Return the finding for a part that can't be read, at the place in the failure or another."""
    return error(failure.code, failure.reason, failure.where if where is None else where)


def require_at_most(
    path: str, most: int, count: int, found: str, where: str | None = None, code: str | None = None
) -> None:
    """Raise ``LimitExceeded`` if a count is above ``most``; it is inserted into ``found``."""
    if count > most:
        expected = f"at most {most:,}"
        raise LimitExceeded(path, found.format(count), expected=expected, where=where, code=code)


def from_os_error(error: OSError, path: str | os.PathLike[str]) -> CheckpointError:
    """Return the error of this tree for an error of the operating system."""
    if isinstance(error, FileNotFoundError):
        if os.path.islink(path):
            return NotFound(path, f"a link to {os.readlink(path)}, which does not exist")
        return NotFound(path, "no such file or directory")
    return AccessDenied(path, system_text(error))


def system_text(error: OSError) -> str:
    """Return the text of an error; that of the operating system in lower case, as a part of a sentence."""
    text = error.strerror or str(error)
    return text.lower() if error.errno is not None and text == os.strerror(error.errno) else text


def _clear_frames(traceback: TracebackType | None) -> None:
    """Clear frames as ``traceback.clear_frames`` does, whose import would take memory."""
    while traceback is not None:
        with suppress(RuntimeError):  # it is still running
            traceback.tb_frame.clear()
        traceback = traceback.tb_next


@contextmanager
def memory_checked(path: str | os.PathLike[str]) -> Iterator[None]:
    """Raise a lack of memory, also of a child process, as ``OutOfMemory`` for the path being read."""
    # The traceback keeps the frames alive, and with them the buffers that used up the memory. So they are
    # cleared, for the handler to have some.
    try:
        yield
    except (MemoryError, OSError) as failure:
        if isinstance(failure, OSError) and failure.errno != errno.ENOMEM:
            raise
        _clear_frames(failure.__traceback__)
        gc.collect()
        raise OutOfMemory(path, "not enough memory to read it") from failure
