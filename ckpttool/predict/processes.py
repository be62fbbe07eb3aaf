"""A process and all that it started: what memory they use, and their end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
_KEEPS_NUMBERS = hasattr(os, "waitid")
"""Whether a process can be seen to have ended before its number is free."""

_PATIENCE, _LOOK = 2.0, 0.002
"""Seconds that a supervisor is given to end what it started, and between two looks."""


def has_exited(process: subprocess.Popen[bytes]) -> bool:
    """Tell whether a process has ended; its number stays taken where the system allows it."""
    if process.returncode is None and _KEEPS_NUMBERS:
        with suppress(ChildProcessError):
            return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    return process.poll() is not None


def end_family(process: subprocess.Popen[bytes]) -> None:
    """End a process that leads a session of its own, and all that it started."""
    if process.returncode is not None and _KEEPS_NUMBERS:
        return  # its number may be another's by now
    if sys.platform.startswith("linux"):
        _end_by_supervisor(process)
    started = list(family(process.pid))[1:]
    if hasattr(os, "killpg"):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        for pid in started:  # those that left the session as well
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
    process.kill()


def _end_by_supervisor(process: subprocess.Popen[bytes]) -> None:
    """Let the supervisor end all: it alone sees what comes to be meanwhile."""
    until = time.monotonic() + _PATIENCE
    process.send_signal(signal.SIGTERM)
    while not has_exited(process) and time.monotonic() < until:
        time.sleep(_LOOK)


def resident(pid: int) -> int:
    """Return the bytes that a process and all that it started use; 0 where the system doesn't tell."""
    return sum(map(_resident, family(pid)))


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    except (OSError, IndexError, ValueError):
        return 0


def family(pid: int) -> Iterator[int]:
    """Yield a process and its descendants, where the system tells."""
    yield pid
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError, ValueError):
            for child in map(int, children.read_text().split()):
                yield from family(child)
