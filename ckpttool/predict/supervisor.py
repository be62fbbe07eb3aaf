"""The process between us and the one that loads: it stays small, and ends all that the other one started.

Linux alone has what it takes: whatever loses its parent becomes the supervisor's own, also what left its
session, and the supervisor is told when whoever started it is gone.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from typing import NoReturn

from ckpttool.predict.processes import family

IS_SUPERVISED = sys.platform.startswith("linux")
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_PATIENCE = 3.0
"""Seconds for what was killed to be gone: what waits for a broken disk can't be waited for."""


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
        _stay(worker)
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


def _stay(worker: int) -> NoReturn:
    signal.signal(signal.SIGTERM, lambda *_: _end_as(-signal.SIGTERM))
    nothing = os.open(os.devnull, os.O_RDWR)
    for pipe in range(3):  # they are the other one's: their end is its end
        os.dup2(nothing, pipe)
    while True:
        with suppress(ChildProcessError):
            pid, status = os.waitpid(-1, 0)
            if pid == worker:
                _end_as(os.waitstatus_to_exitcode(status))


def _end_as(code: int) -> NoReturn:
    """End all descendants, then this process: with a status, or by a signal where the code is negative."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    until = time.monotonic() + _PATIENCE
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
