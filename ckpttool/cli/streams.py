"""stdout and stderr that may be closed, or full: what is said never changes what is answered.

A warning that can't be written is lost. An answer that can't be written is an error.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from ckpttool.core.errors import system_text
from ckpttool.core.urls import hidden_texts, without_secrets, without_signatures


class SafeStderr:
    """Stands in for stderr: writes without credentials as long as that goes, and is silent from then on."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self._hidden = hidden_texts()

    def write(self, text: str) -> int:
        """Write a text, or lose it."""
        if self._stream is not None:
            try:
                self._stream.write(without_signatures(text, self._hidden))
            except (OSError, ValueError):  # full, broken or closed
                self._give_up()
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write lines, or lose them."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Hand on what was written, or lose it."""
        if self._stream is not None:
            try:
                self._stream.flush()
            except (OSError, ValueError):
                self._give_up()

    def isatty(self) -> bool:
        """Tell whether somebody looks on."""
        return self._stream is not None and not self._stream.closed and self._stream.isatty()

    def _give_up(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            discard(stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream or _Nowhere(), name)


class _Nowhere(io.StringIO):
    """Takes what is written, and keeps nothing."""

    def write(self, text: str, /) -> int:
        return len(text)


class Unwritable(Exception):
    """The answer can't be written."""

    def __init__(self, error: OSError) -> None:
        super().__init__(f"stdout can't be written: {system_text(error)}")


_PLAIN = str.maketrans(
    {"…": "~", "–": "-", "→": ">", "×": "x", "Δ": "d", "±": "+", "·": ".", "⏎": " ", "✓": "+", "✗": "x"}
)
"""Signs of ours for an encoding that hasn't them: each takes as many columns, so that tables stay in line."""


class CheckedStdout:
    """Stands in for stdout, or its buffer: that it can't be written is told from all other errors."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._hidden = hidden_texts()

    @property
    def buffer(self) -> CheckedStdout:
        """Return what takes bytes."""
        return CheckedStdout(self._stream.buffer)

    def write(self, content: Any) -> Any:
        """Write what is answered, without the user's secrets.

        Characters that the encoding hasn't are replaced, or spelled out.
        """
        if isinstance(content, str):
            content = without_secrets(content, self._hidden)
        with _as_unwritable():
            try:
                return self._stream.write(content)
            except UnicodeEncodeError:
                encoding = self._stream.encoding
                plain = content.translate(_PLAIN).encode(encoding, "backslashreplace")
                return self._stream.write(plain.decode(encoding))

    def flush(self) -> None:
        """Hand on what is answered."""
        with _as_unwritable():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def _as_unwritable() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise Unwritable(error) from error


class _Closed(io.TextIOBase):
    """Stands in for a stdout that was closed before we began: nothing can be answered."""

    encoding = "utf-8"

    @property
    def buffer(self) -> _Closed:
        return self

    def writable(self) -> bool:
        return True

    def write(self, text: object, /) -> int:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))


@contextmanager
def streams(*, is_silent: bool = False) -> Iterator[None]:
    """Let stderr be one that never fails, and loses everything if asked, and stdout one that is there."""
    out, err = sys.stdout, sys.stderr
    said: Any = SafeStderr(None if is_silent else err)
    answered: Any = CheckedStdout(_Closed() if out is None else out)
    sys.stdout, sys.stderr = answered, said
    try:
        yield
    finally:
        said.flush()
        sys.stdout, sys.stderr = out, err


def discard(stream: TextIO) -> None:
    """Let what a stream still holds, and all that follows, go nowhere: Python writes it when it ends."""
    with suppress(OSError, ValueError):  # one of a test, or closed: nothing is written then
        descriptor = stream.fileno()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, descriptor)
        os.close(nowhere)
        stream.flush()


def fill_gaps() -> None:
    """Open the standard descriptors that are closed, so that no file gets their numbers, and what is said."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
