"""Child processes: this program's Python again, without a shell.

What starts one is written here alone; how a child talks is its own. ``Child`` takes and gives pickled
objects: it runs nothing but our own Python. What reads HDF5 (``containers/hdf5_worker.py``) or runs a model
(``predict/run.py``) might be taken over by the file: it answers in bytes and JSON, which run nothing here.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from importlib import import_module; from ckpttool.storage.children import serve; "
    "serve(import_module(sys.argv[2]).answers())"
)


def child_places() -> list[str]:
    """Return the ``sys.path`` of a child: where this process imports from, and ckpttool itself.

    Whoever is in a directory that came with a checkpoint must not import from it.
    """
    here, root = "", os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    with suppress(OSError):  # it may have been removed
        here = os.getcwd()
    places = [place for place in sys.path if os.path.isabs(place) and (place != here or place == root)]
    return [*places, root]


def start_child(
    *program: str,
    arguments: tuple[str, ...] = (),
    environment: Mapping[str, str],
    runs_models: bool = False,
) -> subprocess.Popen[bytes]:
    """Start a child, with pipes to its stdin and from its stdout.

    Args:
        program: What Python is given besides ``-I``: options, and a script or ``-c`` with code.
        arguments: Of the program, after the first: where it imports from, as JSON.
        environment: Of the child.
        runs_models: Whether it runs other people's code: it leads a session of its own then, so that all can
            be ended that it starts, and what it prints to stderr comes through a pipe.

    Raises:
        OSError: It can't be started.
    """
    if not sys.executable:
        raise FileNotFoundError("Python is embedded, and doesn't know where it lies")
    return subprocess.Popen(
        [sys.executable, "-I", *program, json.dumps(child_places()), *arguments],
        bufsize=0 if runs_models else -1,  # a buffered pipe can't be closed while a thread waits for it
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE if runs_models else subprocess.DEVNULL,
        start_new_session=runs_models,
        env=environment,
    )


def close_pipes(process: subprocess.Popen[bytes]) -> None:
    """Close all pipes to a child that has ended, or is to."""
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()


class Lost(Exception):
    """The child died, or sent no valid answer."""


class Child:
    """A process that answers orders one after the other, until it is closed."""

    def __init__(self, module: str) -> None:
        """Start one.

        Args:
            module: Name of the module whose ``answers()`` returns the function that answers an order.

        Raises:
            Lost: It can't be started.
        """
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
        try:
            self._process = start_child("-S", "-c", _BOOT, arguments=(module,), environment=environment)
        except OSError as error:
            raise Lost from error

    def ask(self, order: object) -> Any:
        """Return the answer to an order.

        Raises:
            Lost: It was killed.
        """
        orders, answers = self._process.stdin, self._process.stdout
        if orders is None or answers is None:
            raise Lost
        try:
            pickle.dump(order, orders)
            orders.flush()
            return pickle.load(answers)  # noqa: S301 - from this program's own process
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            raise Lost from error

    def dismiss(self) -> None:
        """Let it end, which it does where nothing more can come; doing it twice is allowed."""
        with suppress(OSError, ValueError):  # ValueError: it was dismissed before
            self._process.communicate()


def serve(answer: Callable[[Any], object]) -> None:
    """Answer orders in a child until the parent closes the pipe."""
    orders, answers = sys.stdin.buffer, sys.stdout.buffer
    with suppress(BrokenPipeError, KeyboardInterrupt, EOFError):
        while True:
            pickle.dump(answer(pickle.load(orders)), answers)  # noqa: S301 - from this program's own process
            answers.flush()
