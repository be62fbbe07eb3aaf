"""Output longer than the screen goes through a pager, as with git: CKPTTOOL_PAGER, else PAGER, else less.

It is held until the command ends, so that warnings stand above it and a short one never starts a process.
"""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from ckpttool.cli.streams import CheckedStdout

_DEFAULTS = {"LESS": "FRX", "LV": "-c"}
"""What pagers are told, as git does it, where the user tells them nothing: above all, to let colours pass."""
_STYLES = re.compile(r"\x1b\[[0-9;]*m")


@contextmanager
def held_for_pager() -> Iterator[None]:
    """Hold what is written to stdout, a terminal, and show it at the end."""
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
    """Stands in for stdout: keeps texts until they are taken, and lets bytes pass."""

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
        """Return what is held, and hold it no longer."""
        text, self._held = self._held.getvalue(), io.StringIO()
        return text


def _is_long(text: str) -> bool:
    """Tell whether a text leaves no line of the screen for the next prompt."""
    import shutil

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
    except ValueError:  # a quotation mark without its partner
        return ()
    return () if words == ["cat"] else words


def _show_in_pager(text: str) -> bool:
    """Show a text in the pager until the user leaves it; tell whether there was one that started."""
    import signal
    import subprocess

    command = pager_command(os.environ)
    if not command:
        return False
    sys.stdout.flush()
    # Ctrl-C is the pager's as long as it is there. A handler of ours, unlike SIG_IGN, is not inherited by it.
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, encoding=sys.stdout.encoding, env={**_DEFAULTS, **os.environ}
        )
        with suppress(OSError), process:  # the user may leave it early
            CheckedStdout(process.stdin).write(text)
    except OSError:  # it can't be started
        return False
    finally:
        signal.signal(signal.SIGINT, before)
    return True
