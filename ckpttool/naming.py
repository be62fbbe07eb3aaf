"""Names and the fields in them: epoch, step, date, time, metrics."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class NameFields:
    """What a name says.

    Attributes:
        blank: The name with all recognised fields replaced by ``*``: what a series has in common.
    """

    blank: str
    epoch: int | None = None
    step: int | None = None
    saved_at: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


def parse_name(name: str) -> NameFields:
    """Return the fields of a checkpoint's file or directory name."""
    match = re.search(r"epoch[_=-]?(\d+)", name)
    return NameFields(name, int(match[1]) if match else None)
