"""Processes beside this one: what is Python work is done on one processor at a time by threads.

A child is this program again, started without a shell and without the user's site. It answers one order after
the other until there are no more, and is told all that it has to know with each.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ckpttool.work import child_places

_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from importlib import import_module; from ckpttool.children import serve; "
    "serve(import_module(sys.argv[2]).answers())"
)


class Lost(Exception):
    """A child is gone, or said what is no answer."""


class Child:
    """A process that answers orders."""

    def __init__(self, module: str) -> None:
        """Start one.

        Args:
            module: Name of the module whose ``answers()`` returns the function that answers an order.

        Raises:
            Lost: It can't be started.
        """
        if not sys.executable:  # Python is embedded, and doesn't know where it lies
            raise Lost
        command = [sys.executable, "-I", "-S", "-c", _BOOT, json.dumps(child_places()), module]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
            )
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
    """Answer orders in a child until there are no more."""
    orders, answers = sys.stdin.buffer, sys.stdout.buffer
    with suppress(BrokenPipeError, KeyboardInterrupt, EOFError):
        while True:
            pickle.dump(answer(pickle.load(orders)), answers)  # noqa: S301 - from this program's own process
            answers.flush()
