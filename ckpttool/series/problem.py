"""What a command could not do as it was told, and what somebody has to look at."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that the user must look at: where, and what."""

    path: str
    message: str
