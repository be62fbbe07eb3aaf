"""Frames to the parent."""

from __future__ import annotations

import json
import struct
import sys
import time
from typing import Any

FLUSH_SECONDS = 0.5
"""After how long what was told must be on its way: the parent takes silence for a hang."""

_FRAME = struct.Struct("<cI")


class _Clock:
    flushed = 0.0


def send(kind: bytes, payload: bytes) -> None:
    """Write one frame."""
    out = sys.stdout.buffer
    out.write(_FRAME.pack(kind, len(payload)))
    out.write(payload)


def tell(**item: Any) -> None:
    """Write one frame of JSON."""
    send(b"J", json.dumps(item).encode())
    if _is_late():
        flush()


def stay_alive() -> None:
    """Let the parent know that there will be an answer, where it has heard nothing for long."""
    if _is_late():
        tell(k="alive")


def _is_late() -> bool:
    return time.monotonic() - _Clock.flushed > FLUSH_SECONDS


def flush() -> None:
    """Let the parent have all that was written."""
    sys.stdout.buffer.flush()
    _Clock.flushed = time.monotonic()


def text(raw: bytes) -> str:
    """Return any bytes as text of the same length, for the parent to decode."""
    return raw.decode("latin-1")


def reason(failure: BaseException) -> str:
    """Return what went wrong, in a line; some errors have no text."""
    said = failure.args[0] if isinstance(failure, KeyError) and failure.args else failure  # it adds quotes
    return str(said)[:300] or type(failure).__name__
