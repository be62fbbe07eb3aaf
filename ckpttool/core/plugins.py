"""Optional parts: plug-ins by entry-point group, and the command that installs an extra.

Plug-ins are classes of this package's integrations or of installed packages. The integrations are listed in
the package's root, since the metadata of an editable installation may be older than its source.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from ckpttool.core.errors import Unsupported

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


@cache
def entry_points_of(group: str) -> tuple[EntryPoint, ...]:
    """Return the entry points of a group: those of this package, then those of installed packages."""
    from importlib.metadata import EntryPoint

    import ckpttool

    own = (EntryPoint(name, place, group) for name, place in ckpttool._INTEGRATIONS.get(group, {}).items())
    return (*own, *_installed().select(group=group))


def instance_of(entry: EntryPoint) -> Any:
    """Return an instance of the class of an entry point.

    Raises:
        Unsupported: The class can't be imported.
    """
    try:
        made = entry.load()
    except (ImportError, AttributeError) as error:
        found = f"the plug-in {entry.name} can't be imported: {error}"
        hint = None if entry.dist is None else f"reinstall or uninstall {entry.dist.name}"
        raise Unsupported(entry.value, found, expected=hint) from error
    return made()


@cache
def _installed() -> Any:
    """Return the entry points of installed packages."""
    # The search reads the metadata of every installed package, which takes 10 ms or more.
    from importlib.metadata import entry_points

    return entry_points()


# Extras ---------------------------------------------------------------------------------------------


_NAME = re.compile(r"[\w.-]+")


def install_command(extra: str) -> str:
    """Return the command that installs an extra from the origin of ckpttool, which is on no package index."""
    from importlib.metadata import distribution

    package = distribution("ckpttool")
    source = _source(json.loads(package.read_text("direct_url.json") or "{}"), extra)
    if source is not None:
        return f"pip install {source}"
    requirements = [line.partition(";") for line in package.requires or ()]
    names = (
        _NAME.match(name) for name, _, marker in requirements if re.search(rf"['\"]{extra}['\"]", marker)
    )
    return f"pip install {' '.join(dict.fromkeys(match[0] for match in names if match))}"


def _source(origin: Mapping[str, Any], extra: str) -> str | None:
    """Return pip's argument for an extra of a package from a path or a URL; None without one."""
    import shlex

    # pip records the origin of a package that is from no index in ``direct_url.json`` (PEP 610): a directory,
    # perhaps editable; a version-control system with its URL and revision; or the URL of an archive.

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
