"""Plug-ins: classes that this package's integrations and installed packages offer by entry-point group.

Modules below the integrations name none of them. Those of this package are listed in its root, in the form of
entry points: the metadata of an editable installation may be older than the source tree.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from ckpttool.core.errors import Unsupported

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


@cache
def entry_points_of(group: str) -> tuple[EntryPoint, ...]:
    """Return the entry points of a group: this package's first, then those of installed packages."""
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
        hint = None if entry.dist is None else f"{entry.dist.name} repaired, or uninstalled"
        raise Unsupported(entry.value, found, expected=hint) from error
    return made()


@cache
def _installed() -> Any:
    """Return the entry points of all groups, which are searched for once: that takes 10 ms or more."""
    from importlib.metadata import entry_points

    return entry_points()
