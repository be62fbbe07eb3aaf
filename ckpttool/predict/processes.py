"""Processes and their descendants: what memory they use, their end, and the supervisor that sees to it.

The supervisor is a process between us and the one that loads: it stays small, and ends all that the other one
started. Linux alone has what it takes: whatever loses its parent becomes the supervisor's own, also what left
its session, and the supervisor is told when whoever started it is gone.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
_KEEPS_NUMBERS = hasattr(os, "waitid")
"""Whether a process can be seen to have ended before its number is free."""
_SUPERVISOR_PATIENCE, _LOOK = 2.0, 0.002
"""Seconds that a supervisor is given to end what it started, and between two looks."""
IS_SUPERVISED = sys.platform.startswith("linux")
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_BURIAL_PATIENCE = 3.0
"""Seconds for what was killed to be gone: what waits for a broken disk can't be waited for."""


# Seen from outside ----------------------------------------------------------------------------------


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
        # The supervisor ends all: it alone sees what comes to be meanwhile.
        until = time.monotonic() + _SUPERVISOR_PATIENCE
        process.send_signal(signal.SIGTERM)
        while not has_exited(process) and time.monotonic() < until:
            time.sleep(_LOOK)
    started = list(family(process.pid))[1:]
    if hasattr(os, "killpg"):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        for pid in started:  # those that left the session as well
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
    process.kill()


def resident(pid: int) -> int:
    """Return the bytes that a process and all that it started use; 0 where the system doesn't tell."""
    pages = 0
    for one in family(pid):
        with suppress(OSError, IndexError, ValueError):
            pages += int(Path(f"/proc/{one}/statm").read_text().split()[1])
    return pages * _PAGE


def family(pid: int) -> Iterator[int]:
    """Yield a process and its descendants, where the system tells."""
    yield pid
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError, ValueError):
            for child in map(int, children.read_text().split()):
                yield from family(child)


# The supervisor, a process between us and the one that loads ----------------------------------------


def supervise() -> None:
    """Go on in a process of its own; the one that called stays behind, and ends as that one does.

    To be called before anything starts a thread.
    """
    if not IS_SUPERVISED:
        return
    end_with_parent(signal.SIGTERM)
    control(_PR_SET_CHILD_SUBREAPER, 1)
    supervisor = os.getpid()
    if worker := os.fork():
        _wait_for_worker(worker)
    os.setsid()  # what it signals to its own group doesn't reach the supervisor
    end_with_parent(signal.SIGKILL)
    if os.getppid() != supervisor:
        os._exit(1)


def end_with_parent(number: int) -> None:
    """Ask the system for a signal when the parent ends."""
    control(_PR_SET_PDEATHSIG, number)


def control(option: int, value: int) -> None:
    """Set one of the properties that Linux has for a process."""
    import ctypes

    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _wait_for_worker(worker: int) -> NoReturn:
    signal.signal(signal.SIGTERM, lambda *_: _end_all(-signal.SIGTERM))
    nothing = os.open(os.devnull, os.O_RDWR)
    for pipe in range(3):  # they are the other one's: their end is its end
        os.dup2(nothing, pipe)
    while True:
        with suppress(ChildProcessError):
            pid, status = os.waitpid(-1, 0)
            if pid == worker:
                _end_all(os.waitstatus_to_exitcode(status))


def _end_all(code: int) -> NoReturn:
    """End all descendants, then this process: with a status, or by a signal where the code is negative."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    until = time.monotonic() + _BURIAL_PATIENCE
    while _end_descendants() and time.monotonic() < until:
        time.sleep(0.002)
    if code < 0:
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the dump of interest is the other one's
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code & 0xFF)


def _end_descendants() -> bool:
    """Kill what there is and bury what is dead; tell whether anything is left."""
    for pid in list(family(os.getpid()))[1:]:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True
