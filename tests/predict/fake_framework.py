"""A framework without anything to import, whose models misbehave as real ones do."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ckpttool.predict.interface import Loaded
from ckpttool.predict.request import InputSpec, PredictionJob

HUGE = 1 << 24


class Hostile(Exception):
    """An error that can't be told."""

    def __str__(self) -> str:
        raise RuntimeError("no")


class Last(BaseException):
    """What ``except Exception`` doesn't catch."""


def _loaded(act: Callable[[], None]) -> Loaded:
    """Return a model that doubles, after an action."""

    def run(inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        act()
        return {"output": np.asarray(inputs["x"]) * 2}

    return Loaded(detail="Fake 1.0", versions={}, run=run, inputs=lambda: (InputSpec("x", (2, 3)),))


def _raises(failure: BaseException) -> Callable[[], None]:
    def act() -> None:
        raise failure

    return act


def _print() -> None:
    print("from Python", flush=True)
    libc = ctypes.CDLL(None)
    libc.puts(b"from C")
    libc.fflush(None)
    os.write(1, b'{"stage": "load"}\n\xff\xfe raw\n')
    sys.__stdout__.write("again\n")
    sys.__stdout__.flush()


def _flood() -> None:
    for _ in range(100 << 4):
        os.write(2, b"x" * (1 << 16))


def _flood_lines() -> None:
    os.write(2, b"\n" * (1 << 22))
    os.write(2, b"the last line\n")


def _allocate() -> None:
    held = []
    while True:
        held.append(np.ones(1 << 21))
        time.sleep(0.001)


def _allocate_in_a_child() -> None:
    script = "import time; held = b'x' * (1 << 28); time.sleep(60)"
    subprocess.run([sys.executable, "-I", "-S", "-c", script])


def _nonsense(line: bytes) -> Callable[[], None]:
    def act() -> None:
        for number in range(3, 32):  # the pipe of the answers is one of them
            try:
                is_pipe = os.readlink(f"/proc/self/fd/{number}").startswith("pipe:")
                os.write(number, line) if is_pipe else None
            except OSError:
                continue
        time.sleep(60)

    return act


def _leave_behind(how: str) -> Callable[[], None]:
    """Return what starts a process that would outlive this one, tells its number, and goes on or dies."""

    def act() -> None:
        path = os.environ["FAKE_PIDS"]
        pid = os.fork()
        if pid == 0:
            if "session" in how:
                os.setsid()
            if "twice" in how and os.fork():
                os._exit(0)
            with open(path, "a") as stream:
                stream.write(f"{os.getpid()}\n")
            time.sleep(60)
            os._exit(0)
        while not os.path.exists(path) or not os.path.getsize(path):
            time.sleep(0.005)
        if "dies" in how:
            os.kill(os.getpid(), signal.SIGKILL)
        if "leaves" in how:
            os._exit(3)
        if "hangs" in how:
            _hang_in_c() if "in c" in how else time.sleep(60)

    return act


def _tell_pid() -> None:
    with open(os.environ["FAKE_PIDS"], "w") as stream:
        stream.write(f"{os.getpid()}\n")
    time.sleep(60)


def _hang_in_c() -> None:
    ctypes.PyDLL(None).sleep(60)  # with the interpreter's lock


def _import_local() -> None:
    import colorsys

    import lying_here

    assert colorsys.rgb_to_hsv
    assert lying_here.VALUE == 1


def _close_all() -> None:
    os.closerange(3, 64)


def _close_stdin() -> None:
    sys.stdin.close()


def _read_stdin() -> None:
    assert sys.stdin.read() == ""


def _threads() -> None:
    threading.Thread(target=time.sleep, args=(60,)).start()


ACTS: Mapping[str, Callable[[], None]] = {
    "nothing": lambda: None,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "segfault": lambda: ctypes.string_at(0) and None,
    "hang": lambda: time.sleep(60),
    "hang-in-c": _hang_in_c,
    "allocate": _allocate,
    "allocate-in-a-child": _allocate_in_a_child,
    "memory-error": _raises(MemoryError()),
    "sys-exit": lambda: sys.exit(3),
    "os-exit": lambda: os._exit(0),
    "print": _print,
    "flood": _flood,
    "flood-lines": _flood_lines,
    "nonsense": _nonsense(b"what?\n"),
    "nonsense-list": _nonsense(b"[1]\n"),
    "nonsense-deep": _nonsense(b"[" * 200_000 + b"\n"),
    "nonsense-stage": _nonsense(b'{"stage": "verify", "detail": "", "findings": [], "is_skipped": false}\n'),
    "nonsense-finding": _nonsense(
        b'{"stage": "load", "detail": "", "findings": [["a", "fatal", "b", null]], "is_skipped": false}\n'
    ),
    "nonsense-endless": _nonsense(b"x" * (1 << 25)),
    "left-behind": _leave_behind("lives"),
    "left-behind-by-the-dead": _leave_behind("dies"),
    "left-in-a-session": _leave_behind("session"),
    "left-in-a-session-by-the-dead": _leave_behind("session dies"),
    "left-as-a-daemon": _leave_behind("session twice"),
    "left-as-a-daemon-by-the-dead": _leave_behind("session twice dies"),
    "left-by-one-who-leaves": _leave_behind("session leaves"),
    "leave-a-daemon-and-hang": _leave_behind("session twice hangs"),
    "leave-a-daemon-and-hang-in-c": _leave_behind("session twice hangs in c"),
    "tell-pid": _tell_pid,
    "import-local": _import_local,
    "close-all": _close_all,
    "close-stdin": _close_stdin,
    "read-stdin": _read_stdin,
    "threads": _threads,
    "raise": _raises(ValueError("two\nlines \x1b[31m\ud800")),
    "raise-huge": _raises(ValueError("x" * HUGE)),
    "raise-hostile": _raises(Hostile()),
    "raise-interrupt": _raises(KeyboardInterrupt()),
    "raise-generator-exit": _raises(GeneratorExit()),
    "raise-last": _raises(Last("gone")),
}


def _load(job: PredictionJob) -> Loaded:
    when, act = job.options["when"], ACTS[job.options["act"]]
    if when == "load":
        act()
    return _loaded(act if when == "predict" else ACTS["nothing"])


LOADERS: Mapping[str, Callable[[PredictionJob], Loaded]] = {"fake": _load}
