"""The child process that runs libhdf5 for this one: started once, replaced when it crashes or hangs."""

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
"""Seconds without an answer after which the child is taken to hang; an object takes microseconds."""

FETCH_SECONDS = 600.0
"""The same while bytes are fetched for it, which has limits of its own."""

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
    """The child died or ``hangs``; the text says how."""

    def __init__(self, how: str, *, hangs: bool = False) -> None:
        super().__init__(how)
        self.hangs = hangs


class Worker:
    """A child process; ``generation`` tells it from the one before."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.generation = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = os.getpid()

    def ask(
        self, path: str, request: dict[str, Any], inline: bytes = b"", source: Readable | None = None
    ) -> Iterator[tuple[bytes, bytes]]:
        """Yield the frames that answer a request; hold ``lock`` until the last.

        ``source`` is where the child has the bytes from that it asks for: those of a file in a store.
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
                    process.stdin.write(
                        held.ljust(nbytes, b"\xff")
                    )  # as the child does behind the end of a file
                    process.stdin.flush()
                    alarm.reset()
                else:
                    yield kind, payload
        except (EOFError, OSError) as failure:
            hangs = alarm.has_rung
            process.kill()
            code = process.wait()
            self._close()
            self._live_process(path)  # another one, for whoever asks next
            raise Crashed(
                f"silent for {SILENCE:.0f} s" if hangs else f"exit status {code}", hangs=hangs
            ) from failure
        except BaseException:  # the rest of the answer would be taken for the next one
            self.stop()
            raise
        finally:
            alarm.stop()

    def begin(self, path: str) -> None:
        """Start the child, and don't wait: what is done meanwhile costs nothing."""
        with self.lock:
            self._live_process(path)

    def ready(self, path: str) -> int:
        """Return the generation of a child that runs."""
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
    """Kills a process that says nothing in time, so that a read from it ends."""

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
