"""The child process that runs libhdf5 for this one: started once, replaced when it crashes or hangs.

The protocol is described in ``hdf5_child``. One request is answered at a time, under ``Worker.lock``.
"""

from __future__ import annotations

import atexit
import json
import os
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from ckpttool.core.errors import MissingPackage

if TYPE_CHECKING:
    import subprocess

    from ckpttool.core.readable import Readable

SILENCE = 8.0
"""Seconds without a frame after which the child counts as hanging; an object takes microseconds."""

FETCH_SECONDS = 600.0
"""The same while bytes are fetched from a store for the child; the store has its own time limits."""

_FRAME, _RANGE = struct.Struct("<cI"), struct.Struct("<QI")
_CHILD = Path(__file__).with_name("hdf5_child.py")
# No plug-in may be loaded, and no thread pool started.
_ENVIRONMENT = {
    "HDF5_PLUGIN_PATH": "",
    "HDF5_PLUGIN_PRELOAD": "::",
    "HDF5_USE_FILE_LOCKING": "FALSE",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
}


class Crashed(Exception):
    """The child died, or didn't answer (``hangs``); the message has the details."""

    def __init__(self, how: str, *, hangs: bool = False) -> None:
        super().__init__(how)
        self.hangs = hangs


class Worker:
    """The child process; ``generation`` is the number of children started so far."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.generation = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = os.getpid()

    def ask(
        self, path: str, request: dict[str, Any], inline: bytes = b"", source: Readable | None = None
    ) -> Iterator[tuple[bytes, bytes]]:
        """Send a request and yield the frames of the answer; the caller holds ``lock`` until the last.

        Args:
            path: The file, for errors.
            request: Sent as a line of JSON.
            inline: Content of the file, sent after the request.
            source: Source of the ranges that the child requests; for files in a store.

        Raises:
            Crashed: The child died or hangs. Another one is running already.
        """
        process = self._live_process(path)
        assert process.stdin is not None and process.stdout is not None  # both are pipes
        alarm = _Alarm(process)
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.write(inline)
            process.stdin.flush()
            while True:
                kind, payload = _read_frame(process.stdout)
                alarm.reset()
                if kind == b"E":
                    return
                if kind == b"R" and source is not None:
                    alarm.reset(FETCH_SECONDS)
                    at, nbytes = _RANGE.unpack(payload)
                    at = min(at, source.size)
                    held = source.read(at, min(nbytes, source.size - at))
                    # Missing bytes are 0xff, as the child has them for a truncated file.
                    process.stdin.write(held.ljust(nbytes, b"\xff"))
                    process.stdin.flush()
                    alarm.reset()
                else:
                    yield kind, payload
        except (EOFError, OSError) as failure:
            hangs = alarm.has_rung
            process.kill()
            code = process.wait()
            self._close()
            self._live_process(path)  # for the next request
            raise Crashed(
                f"silent for {SILENCE:.0f} s" if hangs else f"exit status {code}", hangs=hangs
            ) from failure
        except BaseException:  # else the rest of the answer would be read as that of the next request
            self.stop()
            raise
        finally:
            alarm.stop()

    def begin(self, path: str) -> None:
        """Start the child without waiting for it: importing h5py takes time that the caller can use."""
        with self.lock:
            self._live_process(path)

    def ready(self, path: str) -> int:
        """Start the child if none is running, and return its generation."""
        self._live_process(path)
        return self.generation

    def _live_process(self, path: str) -> subprocess.Popen[bytes]:
        if self._owner != os.getpid():  # a fork shares no child
            self._process, self._owner = None, os.getpid()
        if self._process is None or self._process.poll() is not None:
            self._close()
            self._process = _start(path)
            self.generation += 1
        return self._process

    def _close(self) -> None:
        if self._process is not None:
            from ckpttool.storage.children import close_pipes

            close_pipes(self._process)
        self._process = None

    def stop(self) -> None:
        """End the child."""
        if self._process is not None and self._owner == os.getpid():
            self._process.kill()
            self._process.wait()
            self._close()


class _Alarm:
    """Timer that kills a process unless it is reset in time."""

    # A read from a pipe has no time limit that works on all systems. A thread that kills the child ends the
    # read: it gets the end of the file.

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.has_rung = False
        self._process = process
        self._done = threading.Event()
        self._deadline = time.monotonic() + SILENCE
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def reset(self, seconds: float = SILENCE) -> None:
        self._deadline = time.monotonic() + seconds

    def stop(self) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(max(0.0, self._deadline - time.monotonic())):
            if time.monotonic() >= self._deadline:
                self.has_rung = True
                self._process.kill()
                return


def _read_frame(stream: IO[bytes]) -> tuple[bytes, bytes]:
    header = stream.read(_FRAME.size)
    if len(header) < _FRAME.size:
        raise EOFError
    kind, nbytes = _FRAME.unpack(header)
    payload = stream.read(nbytes)
    if len(payload) < nbytes:
        raise EOFError
    return kind, payload


def _start(path: str) -> subprocess.Popen[bytes]:
    from importlib.util import find_spec

    from ckpttool.storage.children import start_child

    if find_spec("h5py") is None:
        raise MissingPackage(path, "HDF5 needs h5py", expected="pip install 'h5py>=3.10,<3.15'")
    return start_child(str(_CHILD), environment={**os.environ, **_ENVIRONMENT})


WORKER = Worker()
"""The one child of this process."""

atexit.register(WORKER.stop)
