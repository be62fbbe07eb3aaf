"""Child processes that run the same Python interpreter, without a shell.

All child processes are started here; each kind has its own protocol. ``Child`` exchanges pickled objects,
because it runs only our own code. A child that reads HDF5 (``containers/hdf5_worker.py``) or runs a model
(``predict/run.py``) may be taken over by the file. It answers in bytes and JSON, which can't run code here.
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


def child_sys_path() -> list[str]:
    """Return a child's ``sys.path``: that of this process, with ckpttool, without the working directory."""
    # The working directory may have come with a checkpoint: modules in it must not be imported.
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
        program: Arguments of Python besides ``-I``: options, and a script or ``-c`` with code.
        arguments: Arguments of the program, after the first one, which is ``sys.path`` as JSON.
        environment: Environment of the child.
        runs_models: Whether it runs other people's code. Then it gets a session of its own, so that all its
            processes can be killed, and its stderr is a pipe.

    Raises:
        OSError: It can't be started.
    """
    if not sys.executable:
        raise FileNotFoundError("the Python executable is unknown (Python is embedded)")
    return subprocess.Popen(
        [sys.executable, "-I", *program, json.dumps(child_sys_path()), *arguments],
        bufsize=0 if runs_models else -1,  # a buffered pipe can't be closed while a thread waits for it
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE if runs_models else subprocess.DEVNULL,
        start_new_session=runs_models,
        env=environment,
    )


def close_pipes(process: subprocess.Popen[bytes]) -> None:
    """Close all pipes to a child that has ended, or is about to."""
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()


class ChildLost(Exception):
    """The child died, or sent no valid answer."""


class Child:
    """Process that answers orders one after the other, until it is dismissed."""

    def __init__(self, module: str) -> None:
        """Start the process.

        Args:
            module: Name of the module whose ``answers()`` returns the function that answers an order.

        Raises:
            ChildLost: It can't be started.
        """
        # NumPy's OpenBLAS would start a thread for each processor in every child.
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
        try:
            self._process = start_child("-S", "-c", _BOOT, arguments=(module,), environment=environment)
        except OSError as error:
            raise ChildLost from error

    def ask(self, order: object) -> Any:
        """Return the answer to an order.

        Raises:
            ChildLost: The process was killed.
        """
        orders, answers = self._process.stdin, self._process.stdout
        if orders is None or answers is None:
            raise ChildLost
        try:
            pickle.dump(order, orders)
            orders.flush()
            return pickle.load(answers)  # noqa: S301 - from this program's own process
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            raise ChildLost from error

    def dismiss(self) -> None:
        """Close the pipe for orders, at which the process ends, and wait for it; may be called twice."""
        with suppress(OSError, ValueError):  # ValueError: it was dismissed before
            self._process.communicate()


def serve(answer: Callable[[Any], object]) -> None:
    """Answer orders in a child until the parent closes the pipe."""
    orders, answers = sys.stdin.buffer, sys.stdout.buffer
    with suppress(BrokenPipeError, KeyboardInterrupt, EOFError):
        while True:
            pickle.dump(answer(pickle.load(orders)), answers)  # noqa: S301 - from this program's own process
            answers.flush()
