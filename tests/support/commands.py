"""Runs ckpttool's command line: in this process, with what it printed, or in a fresh interpreter."""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from typing import NamedTuple

TIMEOUT = 60
"""Seconds that a command may take in a process of its own."""


class Answer(NamedTuple):
    """What a command answered."""

    status: int
    out: str
    err: str


Run = Callable[..., Answer]
"""The ``run`` fixture: runs a command in this process, with its output captured by pytest."""


class Terminal(io.StringIO):
    """A stream, to be read or printed to, that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


def run_here(*arguments: object) -> int:
    """Run a command in this process and return its exit status."""
    from ckpttool.cli import run

    return run([str(argument) for argument in arguments])


def run_redirected(*arguments: object) -> Answer:
    """Run a command in this process where no ``capsys`` is at hand, as for fixtures of a session."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = run_here(*arguments)
    return Answer(status, out.getvalue(), err.getvalue())


def arguments_of(line: str) -> list[str]:
    """Return the arguments of a line as a shell takes them; the folder of temporary files may have spaces."""
    folder = tempfile.gettempdir()
    return [one.replace("\0", folder) for one in shlex.split(line.replace(folder, "\0"))]


def transcript(run: Run, *commands: tuple[int, str]) -> str:
    """Return command lines, each with what it printed and, behind ``!``, what it said on stderr.

    Args:
        run: What runs a command.
        commands: The exit status that each must have, and its arguments as a shell takes them.
    """
    told: list[str] = []
    for status, line in commands:
        answer = run(*arguments_of(line))
        assert answer.status == status, (line, answer)
        told += [f"$ ckpttool {line}", *_lines(answer.out), *(f"! {one}" for one in _lines(answer.err)), ""]
    return "\n".join(told)


def refusals(run: Run, *lines: str) -> str:
    """Return what is said of command lines that are wrong: one line each, and nothing is printed."""
    told = []
    for line in lines:
        status, out, err = run(*arguments_of(line))
        assert (status, out, err.count("\n"), err[-1:]) == (2, "", 1, "\n"), (line, status, out, err)
        told.append(f"$ ckpttool {line}\n! {err}")
    return "".join(told)


def _lines(text: str) -> list[str]:
    *lines, rest = text.split("\n")
    return [*lines, f"{rest}(no line break)"] if rest else lines


def python(*arguments: object, **options) -> subprocess.CompletedProcess[str]:
    """Run a fresh interpreter."""
    options = {"capture_output": True, "text": True, "timeout": TIMEOUT, "check": False} | options
    environment = {**os.environ, **options.pop("env", {})}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, env=environment, **options)


def ckpttool(*arguments: object, **options) -> subprocess.CompletedProcess[str]:
    """Run a command in a fresh interpreter."""
    return python("-m", "ckpttool", *arguments, **options)


def ckpttool_in_terminal(
    *arguments: object, size: tuple[int, int] = (80, 24), env: Mapping[str, str] | None = None, **options
) -> tuple[int, str]:
    """Run a command in a terminal of some columns and rows, and return its status and all that is shown."""
    import fcntl
    import pty
    import struct
    import termios

    hidden = ("CKPTTOOL_PAGER", "PAGER", "LESS", "NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES")
    inherited = {name: value for name, value in os.environ.items() if name not in hidden}
    columns, rows = size
    ours, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", "ckpttool", *map(str, arguments)],
        env={**inherited, "TERM": "xterm", **(env or {})},
        start_new_session=True,
        **{"stdin": terminal, "stdout": terminal, "stderr": terminal} | options,
    )
    os.close(terminal)
    shown = b""
    with contextlib.suppress(OSError):  # Linux says so that nobody has the terminal open any more
        while block := os.read(ours, 1 << 16):
            shown += block
    os.close(ours)
    return process.wait(TIMEOUT), shown.decode().replace("\r\n", "\n")
