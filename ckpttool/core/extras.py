"""The command that installs an extra: from where ckpttool came, as it is on no package index."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Mapping
from importlib.metadata import Distribution, distribution
from typing import Any

_NAME = re.compile(r"[\w.-]+")


def install_command(extra: str) -> str:
    """Return the command that installs an extra of ckpttool into the environment that it is in."""
    package = distribution("ckpttool")
    source = _source(json.loads(package.read_text("direct_url.json") or "{}"), extra)
    return f"pip install {source or _packages(package, extra)}"


def _source(origin: Mapping[str, Any], extra: str) -> str | None:
    """Return what pip takes for an extra of what came from a path or an address, as PEP 610 has it."""
    url = origin.get("url", "")
    if url.startswith("file:"):
        from urllib.parse import urlsplit
        from urllib.request import url2pathname

        path = url2pathname(urlsplit(url).path)
        editable = "-e " if origin.get("dir_info", {}).get("editable") else ""
        return f"{editable}{shlex.quote(f'{path}[{extra}]')}" if os.path.exists(path) else None
    if vcs := origin.get("vcs_info", {}):
        revision = vcs.get("requested_revision") or vcs.get("commit_id")
        url = f"{vcs.get('vcs')}+{url}" + (f"@{revision}" if revision else "")
    if url and (directory := origin.get("subdirectory")):
        url += f"#subdirectory={directory}"
    return shlex.quote(f"ckpttool[{extra}] @ {url}") if url else None


def _packages(package: Distribution, extra: str) -> str:
    requirements = [line.partition(";") for line in package.requires or ()]
    names = (
        _NAME.match(name) for name, _, marker in requirements if re.search(rf"['\"]{extra}['\"]", marker)
    )
    return " ".join(dict.fromkeys(match[0] for match in names if match))
