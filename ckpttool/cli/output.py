"""Output of commands: streams without credentials, messages, colour, the pager, and exit statuses."""

from __future__ import annotations

import errno
import io
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from itertools import islice
from typing import TYPE_CHECKING, Any, TextIO

from ckpttool.core.errors import NotFound, system_text
from ckpttool.core.text import closest, printable
from ckpttool.core.urls import hidden_texts, without_secrets, without_signatures

# As for grep and diff: 1 means that a problem or a difference was found, 2 that there is no answer. A shell
# reports a process that a signal ended as 128 and its number: SIGINT is 2, SIGTERM 15.
FOUND_SOMETHING, FAILED, INTERRUPTED, TERMINATED = 1, 2, 130, 143
"""Exit statuses: a problem was found, the command failed, Ctrl-C, and SIGTERM."""

if TYPE_CHECKING:
    from ckpttool.core.report import Problem, Sentence


COMPLETE_VARIABLE = "_CKPTTOOL_COMPLETE"
"""Environment variable by which a shell asks for completions."""
COLOURS = ("auto", "always", "never")
"""When output is coloured."""

_MAX_COMPARED = 10_000
"""Limit on the names of a directory that are compared with a missing one: a second's work."""

_chosen = "auto"


def choose_colour(choice: str | None) -> None:
    """Set the value of ``--color``, if it is given."""
    global _chosen
    _chosen = choice or _chosen


def say(text: str) -> None:
    """Write a line to stderr: warnings, notes, prompts."""
    print(text, file=sys.stderr)


def say_error(error: str | Exception) -> None:
    """Write an error as one line on stderr."""
    text = error if isinstance(error, str) else error_text(error)
    say(f"ckpttool: {_label('error:', '1;31')} {printable(text)}")


def error_text(error: Exception) -> str:
    """Return the text of an error; if a path doesn't exist and there is no other hint, with a similar one."""
    text = str(error)
    if not isinstance(error, NotFound) or text.endswith(")") or os.path.lexists(error.path):
        return text
    directory, name = os.path.split(error.path)
    try:
        with os.scandir(directory or os.curdir) as entries:
            names = [entry.name for entry in islice(entries, _MAX_COMPARED)]
    except OSError:
        return text
    # A common suffix makes short names similar (gone.pth, in.pth), so it is compared apart: a name is meant
    # if it has the same suffix and a similar stem, or the same stem and a similar suffix.
    stem, suffix = os.path.splitext(name)
    parts = [os.path.splitext(one) for one in sorted(names)]
    similar = closest(stem, [one for one, end in parts if end == suffix])
    meant = (
        closest(name, [one + end for one, end in parts if one == stem])
        if similar is None
        else similar + suffix
    )
    if meant is None:
        return text
    return f"{text} (did you mean {os.path.join(directory, meant)}?)"


def say_warning(text: str) -> None:
    """Write a warning as one line on stderr."""
    say(f"ckpttool: {_label('warning:', '1;33')} {printable(text)}")


def _label(word: str, style: str) -> str:
    return f"\x1b[{style}m{word}\x1b[0m" if has_colour(sys.stderr) else word


def has_colour(stream: TextIO) -> bool:
    """Return whether to write colour: by --color, NO_COLOR or FORCE_COLOR, and otherwise on terminals."""
    # An empty NO_COLOR counts as unset, as no-color.org says; and it wins over FORCE_COLOR.
    if _chosen != "auto":
        return _chosen == "always"
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or (stream.isatty() and os.environ.get("TERM") != "dumb")


def width(stream: TextIO) -> int:
    """Return the width for text: COLUMNS, else the terminal's, or 120 without either."""
    if not stream.isatty() and "COLUMNS" not in os.environ:
        return 120
    import shutil

    return shutil.get_terminal_size().columns


def terminal_width(stream: TextIO) -> int | None:
    """Return the columns of a terminal, or COLUMNS; None if lines aren't cut, as in a pipe."""
    return width(stream) if stream.isatty() or "COLUMNS" in os.environ else None


def paged() -> AbstractContextManager[None]:
    """Page the output of a context, if stdin and stdout are terminals."""
    if sys.stdin is None or not (sys.stdin.isatty() and sys.stdout.isatty()):
        return nullcontext()
    return _held_for_pager()


def print_json(document: Mapping[str, Any]) -> None:
    """Print a document as JSON."""
    from ckpttool.core.result import dumps

    print(dumps(document))


def grouped_messages(problems: Iterable[Problem]) -> Iterator[tuple[str, str]]:
    """Yield each message once, with the first of its paths and the number of the others."""
    alike: dict[Sentence, list[str]] = {}
    for problem in problems:
        alike.setdefault(problem.message, []).append(problem.path)
    for message, (first, *others) in alike.items():
        yield first, f"{message} (and {len(others):,} more)" if others else str(message)


# Streams --------------------------------------------------------------------------------------------


class SafeStderr:
    """Replacement for stderr that removes secrets, and stops writing after an error."""

    # Users, passwords and queries of URLs are removed, too; stdout keeps them, as a URL may be the answer.
    # The texts to hide are credentials in the environment, read once at the start. Errors of libraries and
    # URLs in tracebacks may contain them, so they are removed from all output, not where messages are made.
    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self._hidden = hidden_texts()

    def write(self, text: str) -> int:
        """Write a text; drop it after an error."""
        if self._stream is not None:
            try:
                self._stream.write(without_signatures(text, self._hidden))
            except (OSError, ValueError):  # full, broken or closed
                self._give_up()
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write lines; drop them after an error."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Flush the stream, or drop the output."""
        if self._stream is not None:
            try:
                self._stream.flush()
            except (OSError, ValueError):
                self._give_up()

    def isatty(self) -> bool:
        """Return whether the stream is a terminal."""
        return self._stream is not None and not self._stream.closed and self._stream.isatty()

    def _give_up(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            discard(stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream or _Nowhere(), name)


class _Nowhere(io.StringIO):
    """Stream that drops its input."""

    def write(self, text: str, /) -> int:
        return len(text)


class Unwritable(Exception):
    """The answer can't be written."""

    def __init__(self, error: OSError) -> None:
        super().__init__(f"can't write to stdout: {system_text(error)}")


_PLAIN = str.maketrans(
    {"…": "~", "–": "-", "→": ">", "×": "x", "Δ": "d", "±": "+", "·": ".", "⏎": " ", "✓": "+", "✗": "x"}
)
"""ASCII replacements of the same width for characters that an encoding lacks."""


class CheckedStdout:
    """Replacement for stdout or its buffer that removes secrets and raises write errors as ``Unwritable``."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._hidden = hidden_texts()

    @property
    def buffer(self) -> CheckedStdout:
        """Return the checked stream for bytes."""
        return CheckedStdout(self._stream.buffer)

    def write(self, content: Any) -> Any:
        """Write a text without secrets, or bytes.

        Characters that the encoding lacks are replaced by ASCII, or escaped.
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
        """Flush the stream."""
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
    """Replacement for a stdout that was closed at the start; writing fails."""

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
    """Replace stdout by a checked stream, and stderr by one that never fails (if silent: drops all)."""
    # Errors of the two streams differ. A lost message is no failure of the command. A lost answer is: a
    # script would take a cut list for a complete one, so each error of stdout ends the command with a status.
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
    """Redirect a stream to the null device, with the buffered output that Python writes at exit."""
    with suppress(OSError, ValueError):  # closed, or without a descriptor, as in tests: nothing is written
        descriptor = stream.fileno()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, descriptor)
        os.close(nowhere)
        stream.flush()


def open_closed_descriptors() -> None:
    """Open those of the descriptors 0, 1 and 2 that are closed, so that no other file gets their numbers."""
    # After ``ckpttool … >&-``, the first opened file would get descriptor 1, and output would be written to
    # it.
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


# Pager ----------------------------------------------------------------------------------------------


_DEFAULTS = {"LESS": "FRX", "LV": "-c"}
"""Defaults of pagers' variables, as in git: less and lv then pass colours through."""
_STYLES = re.compile(r"\x1b\[[0-9;]*m")


@contextmanager
def _held_for_pager() -> Iterator[None]:
    """Hold the output for a terminal, and show it at the end: in a pager if it is longer than the screen."""
    # Whether the output is longer than the screen is known only at its end, so it is held until then. stderr
    # isn't held: progress, warnings and errors appear at once, not above or below a pager's screen.
    stdout = sys.stdout
    held = _HeldStdout(stdout)
    sys.stdout = held
    try:
        yield
    finally:
        sys.stdout = stdout
        text = held.take()
        if not (_is_long(text) and _show_in_pager(text)):
            stdout.write(text)


class _HeldStdout(CheckedStdout):
    """Replacement for stdout that holds texts until they are taken; bytes are passed through."""

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self._held = io.StringIO()

    @property
    def buffer(self) -> CheckedStdout:
        super().write(self.take())
        super().flush()
        return super().buffer

    def write(self, content: str) -> int:
        return self._held.write(content)

    def flush(self) -> None:
        """Keep on holding."""

    def take(self) -> str:
        """Return the held text, and clear it."""
        text, self._held = self._held.getvalue(), io.StringIO()
        return text


def _is_long(text: str) -> bool:
    """Return whether a text leaves no line of the screen for the next prompt."""
    import shutil

    # A line wider than the terminal takes several rows; escape sequences of colours take no column.
    columns, rows = shutil.get_terminal_size()
    lines = _STYLES.sub("", text).splitlines()
    return sum(1 + max(0, len(line) - 1) // columns for line in lines) >= rows


def pager_command(environment: Mapping[str, str]) -> Sequence[str]:
    """Return the words that start the pager; empty if there is to be none."""
    import shlex

    if environment.get("TERM", "dumb") == "dumb":
        return ()
    try:
        words = shlex.split(environment.get("CKPTTOOL_PAGER", environment.get("PAGER", "less")))
    except ValueError:  # an unclosed quotation mark
        return ()
    return () if words == ["cat"] else words


def _show_in_pager(text: str) -> bool:
    """Show a text in the pager until the user quits it; return whether it was started."""
    import signal
    import subprocess

    command = pager_command(os.environ)
    if not command:
        return False
    sys.stdout.flush()
    # The terminal sends Ctrl-C to both processes. less stops a search with it and goes on, so ckpttool must
    # not end before. A handler that does nothing is reset in the child, whereas SIG_IGN would be inherited.
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, encoding=sys.stdout.encoding, env={**_DEFAULTS, **os.environ}
        )
        with suppress(OSError), process:  # the user may quit it before the end
            CheckedStdout(process.stdin).write(text)
    except OSError:  # it can't be started
        return False
    finally:
        signal.signal(signal.SIGINT, before)
    return True
