"""TOML, by the standard library where it has it."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any


def parse_toml(text: str) -> dict[str, Any]:
    """Return a document's tables."""
    # The package has the same words as the standard library's module since Python 3.11.
    loads = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli").loads
    try:
        tables: dict[str, Any] = loads(text)
    except RecursionError as failure:
        raise ValueError("it is nested too deeply") from failure
    return tables
