"""Asks before something is changed: on a terminal, and of whoever has put an answer into stdin."""

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
"""Seconds that an answer has to come through a pipe: jobs may have one that nobody ever writes to."""
_LONGEST = 80
"""No answer is longer; the rest of what stands in stdin is somebody else's."""


class Consent:
    """Whether somebody agrees to each change that is proposed.

    A terminal is asked. Elsewhere the command was the agreement, unless an answer stands in stdin.

    Attributes:
        is_given: Whether nobody is asked.
    """

    def __init__(self, *, is_given: bool) -> None:
        self.is_given = is_given
        self._has_answered = False

    @property
    def asks(self) -> bool:
        """Tell whether somebody is there to be asked, and wants to be."""
        return not self.is_given and sys.stdin is not None and sys.stdin.isatty()

    def to(self, question: str) -> bool:
        """Return whether somebody agrees; who is asked has seen what is meant."""
        if self.is_given:
            return True
        answer = _ask_terminal(question) if self.asks else _piped_answer()
        if answer is None:  # nobody says anything: after an answer to the question before, that is none
            return not self._has_answered
        self._has_answered = True
        word = answer.strip().lower()
        if not self.asks and word not in ("y", "yes", "n", "no", ""):
            problem = f"stdin says {word!r:.40}, which is not an answer; nothing was changed"
            say_error(f"{problem} (y or n; --yes leaves stdin alone)")
        return word in ("y", "yes")

    def answer_to(self, question: str) -> bool | None:
        """Return whether somebody agrees, as ``to`` does; None if nobody has said anything."""
        agrees = self.to(question)
        return agrees if self.is_given or self._has_answered else None


def _ask_terminal(question: str) -> str:
    """Ask on a terminal; whoever ends the input says no."""
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
    """Open where a question is seen: stderr, or where that leads elsewhere, the terminal that is typed on."""
    if sys.stderr.isatty():
        yield sys.stderr
        return
    try:
        stream = open(os.ttyname(sys.stdin.fileno()), "w")  # noqa: SIM115 - only the opening may fail
    except (AttributeError, OSError):  # Windows has none
        yield sys.stderr
        return
    with stream:
        yield stream


def _piped_answer() -> str | None:
    """Return the line that stands in stdin; None where nothing does.

    It is read byte by byte: what follows it is for whoever reads next.
    """
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
    except OSError:  # Windows waits for nothing but sockets
        return True
