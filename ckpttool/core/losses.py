"""Whether readers open what is damaged as far as it goes: ``salvage`` alone allows that.

What is lost is told by its place: a tensor whose bytes would lie beyond the end of its file has none.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_are_allowed: ContextVar[bool] = ContextVar("losses_allowed", default=False)


def are_losses_allowed() -> bool:
    """Tell whether a checkpoint may be opened of which some tensors are lost."""
    return _are_allowed.get()


@contextmanager
def losses_allowed() -> Iterator[None]:
    """Have readers open what is cut off, or lacks records, without what is lost."""
    token = _are_allowed.set(True)
    try:
        yield
    finally:
        _are_allowed.reset(token)
