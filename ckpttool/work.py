"""How much work is done at once, who is told how far it is, and where a child process imports from."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress

Advance = Callable[[int], None]
"""Called with the bytes done, from any thread."""


def default_jobs() -> int:
    """Return the number of processors that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def child_places() -> list[str]:
    """Return the ``sys.path`` of a child process: where this one imports from, and ckpttool itself.

    Whoever stands in a directory that came with a checkpoint must not import from it.
    """
    here, root = "", os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    with suppress(OSError):  # it may have been removed
        here = os.getcwd()
    places = [place for place in sys.path if os.path.isabs(place) and (place != here or place == root)]
    return [*places, root]
