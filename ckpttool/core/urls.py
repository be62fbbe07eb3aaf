"""Paths that are URLs of stores: what they begin with, and how they are spelled."""

from __future__ import annotations

import os
import re

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
ODD = "?"
"""What a part of a URL begins with that stands for a name that can't be one, such as ``a#b``, quoted."""
HUB_KINDS = ("datasets", "spaces")
"""What the path of a repository begins with in the Hugging Face Hub, unless it is a model's."""


def is_url(path: str) -> bool:
    """Return whether a path is the URL of something in a store."""
    return "://" in path and _URL.match(path) is not None


def has_odd_name(path: str) -> bool:
    """Tell whether a part of a path stands for a name that can't be a part of a URL."""
    return is_url(path) and f"/{ODD}" in path


def store_root(url: str) -> str:
    """Return the URL of the bucket, host or repository that a URL is in."""
    scheme, _, rest = url.partition("://")
    parts = rest.split("/")
    count = 1 if scheme != "hf" else 3 if parts[0] in HUB_KINDS else 2
    return f"{scheme}://{'/'.join(parts[:count])}"


def plain_url(url: str) -> str:
    """Return a URL without ``.``, ``..`` and doubled slashes."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{os.path.normpath(rest)}"
