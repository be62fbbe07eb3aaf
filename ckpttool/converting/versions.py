"""The versions of modules that PyTorch's state dicts carry, under the names that a map gives the modules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpttool.formats.content.objects import mapped_of
from ckpttool.report import counted
from ckpttool.wire.pickled import Mapped

_KEY = "_metadata"
"""The attribute of a state dict that has, for each module, the version of its layout."""


class Versions:
    """Counts what becomes of the names of modules; ``moved`` is called for each state dict."""

    def __init__(self) -> None:
        self._renamed = self._dropped = 0

    def moved(self, state: object, names: Mapping[str, list[str]]) -> object:
        """Return the attributes of a state dict with the new names of its modules.

        Args:
            state: The attributes as they are.
            names: What each tensor of the state dict is called now; nothing for what is gone.
        """
        known = state.get(_KEY) if isinstance(state, dict) else None
        if not isinstance(state, dict) or not isinstance(known, dict):
            return state
        modules = _new_names(known, names)
        entries: dict[str, Any] = {}
        for old, version in known.items():
            new = modules[old]
            if new is None or new in entries:
                self._dropped += 1
                continue
            self._renamed += new != old
            entries[new] = version
        return _like(state, {**state, _KEY: _like(known, entries)})

    def notes(self) -> list[str]:
        """Return what became of names, if they are others."""
        counts = {"renamed with the tensors": self._renamed, "left out": self._dropped}
        parts = [f"{count:,} {done}" for done, count in counts.items() if count]
        changed = counted(self._renamed + self._dropped, "module")
        return [f"versions of {changed} in {_KEY}: {', '.join(parts)}"] if parts else []


def _new_names(known: Mapping[Any, object], names: Mapping[str, list[str]]) -> dict[Any, Any]:
    """Return the new name of each module; None where its tensors are gone, or are no one module's now."""
    below: dict[str, set[str | None]] = {}
    for old, given in names.items():
        steps = old.split(".")
        for depth in range(1, len(steps)):
            found = below.setdefault(".".join(steps[:depth]), set())
            found.update(_front(new, len(steps) - depth) for new in given)
    made: dict[Any, Any] = {}
    for old in known:
        if not isinstance(old, str) or not old:
            made[old] = old
        elif old in below:
            found = below[old]
            made[old] = next(iter(found)) if len(found) == 1 else None
        else:
            made[old] = _beside(old, made)
    return made


def _front(name: str, behind: int) -> str | None:
    """Return a name without its last steps, or None where nothing is left."""
    return ".".join(name.split(".")[:-behind]) or None


def _beside(name: str, made: Mapping[Any, Any]) -> str | None:
    """Return what a module without tensors is called now: as the module is that it lies in."""
    around, _, last = name.rpartition(".")
    front = made.get(around, around)
    return None if front is None else f"{front}.{last}" if front else last


def _like(node: dict[Any, Any], entries: dict[Any, Any]) -> dict[Any, Any]:
    if isinstance(node, Mapped):
        return mapped_of(node.kind, entries.items(), node.state, node.factory)
    return entries
