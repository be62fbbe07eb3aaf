"""Confirmation of changes, on a terminal or by an answer in stdin."""

from __future__ import annotations

import os
import select
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from ckpttool.cli.output import say, say_error

if TYPE_CHECKING:
    from collections.abc import Iterator

_PATIENCE = 2.0
"""Seconds to wait for an answer in a pipe, since a job's stdin may be open and silent."""
_LONGEST = 80
"""Limit on the bytes of an answer; the rest of stdin is for other programs."""


class Consent:
    """Asks for confirmation of each change.

    On a terminal, the user is asked. Elsewhere, the command itself is the consent, unless stdin has a line.

    Attributes:
        is_given: Whether no question is asked.
    """

    def __init__(self, *, is_given: bool) -> None:
        self.is_given = is_given
        self._has_answered = False

    @property
    def asks(self) -> bool:
        """Return whether questions are asked on a terminal."""
        return not self.is_given and sys.stdin is not None and sys.stdin.isatty()

    def agrees_to(self, question: str) -> bool:
        """Ask whether to make a change, whose plan was printed before; return whether it is confirmed."""
        if self.is_given:
            return True
        answer = _ask_terminal(question) if self.asks else _piped_answer()
        if answer is None:
            # A script that calls the command has decided already, as for ``rm``. But if stdin has answered an
            # earlier question, ``yes | head -1``, it is the one to decide, and its end means no.
            return not self._has_answered
        self._has_answered = True
        word = answer.strip().lower()
        if not self.asks and word not in ("y", "yes", "n", "no", ""):
            say_error(f"stdin: expected y or n, not {word!r:.40}; nothing was changed (--yes skips stdin)")
        return word in ("y", "yes")

    def answer_to(self, question: str) -> bool | None:
        """Ask whether to make a change; return None if there was no answer, which counts as consent."""
        agrees = self.agrees_to(question)
        return agrees if self.is_given or self._has_answered else None


def _ask_terminal(question: str) -> str:
    """Ask on a terminal; the end of the input means no."""
    with _terminal_of_question() as stream:
        print(f"{question} [y/N] ", end="", file=stream, flush=True)
    try:
        answer = sys.stdin.readline()
    except KeyboardInterrupt:
        say("")
        raise
    if not answer.endswith("\n"):  # the end of the input is no answer
        say("")
    return answer


@contextmanager
def _terminal_of_question() -> Iterator[TextIO]:
    """Open the stream for a question: stderr if it is a terminal, else the terminal of stdin."""
    if sys.stderr.isatty():
        yield sys.stderr
        return
    try:
        stream = open(os.ttyname(sys.stdin.fileno()), "w")  # noqa: SIM115 - only the opening may fail
    except (AttributeError, OSError):  # Windows has no ``ttyname``
        yield sys.stderr
        return
    with stream:
        yield stream


def _piped_answer() -> str | None:
    """Return the line in stdin, or None without one."""
    # Byte by byte and unbuffered, so that ``(ckpttool …; other) < answers`` leaves the rest to the other
    # program. An open pipe without an answer must not block a job, hence the time limit.
    try:
        descriptor = sys.stdin.fileno()
        line = b""
        while len(line) < _LONGEST and not line.endswith(b"\n") and _is_ready(descriptor):
            byte = os.read(descriptor, 1)
            if not byte:
                break
            line += byte
    except (AttributeError, OSError, ValueError):  # closed, or none that could hold an answer
        return None
    return line.decode(errors="replace") if line else None


def _is_ready(descriptor: int) -> bool:
    try:
        return bool(select.select([descriptor], [], [], _PATIENCE)[0])
    except OSError:  # on Windows, ``select`` takes only sockets
        return True
