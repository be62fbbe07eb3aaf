"""How much work is done at once, and who is told how far it is."""

from __future__ import annotations

import os
from collections.abc import Callable

Advance = Callable[[int], None]
"""Called with the bytes done, from any thread."""


def default_jobs() -> int:
    """Return the number of processors that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1
