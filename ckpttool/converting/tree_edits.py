"""Trees of objects in whose dictionaries tensors get other keys, become several, or are taken out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ckpttool.errors import UsageError
from ckpttool.formats.content.tree import (
    NodeParts,
    fold,
    make_mapped,
    node_parts,
    replace_tensors,
    tensors_in,
    walk,
)
from ckpttool.report import counted
from ckpttool.tensor import Path, Tensor
from ckpttool.wire.pickle_nodes import Call, Mapped

_VERSIONS_KEY = "_metadata"
"""The attribute of a state dict that has, for each module, the version of its layout."""


class Edit(NamedTuple):
    """What stands in a tensor's place: a tensor, and its key there."""

    key: str | int
    tensor: Tensor


Edits = dict[int, list[Edit]]
"""What stands in the place of tensors, by their ``id``."""


def edit_tree(
    tree: object, edits: Mapping[int, list[Edit]], ends: Mapping[int, Tensor], old: Iterable[Tensor]
) -> tuple[object, list[str]]:
    """Return a tree with edits, and what there is to say of it.

    The versions of modules that a state dict carries get the modules' new names.

    Args:
        tree: The tree.
        edits: For the ``id`` of a tensor, what stands in its place.
        ends: For the ``id`` of a tensor that keeps its place, what it is now.
        old: All tensors of the tree as it was.
    """
    tensors = [*old]
    editing = _Editing(tree, edits, ends, tensors)
    made = fold(tree, editing.expand, _no_cycle)
    left = next((one for one in tensors if id(one) in edits and id(one) not in editing.done), None)
    if left is not None:
        raise UsageError(f"{left.name}: a map can't change what lies in no dictionary (use --only weights)")
    made = replace_tensors(made, ends)
    known = {id(edit.tensor) for found in edits.values() for edit in found} | set(map(id, ends.values()))
    lost = next((one for one in tensors_in(made) if id(one) not in known), None)
    if lost is not None:
        raise UsageError(f"{lost.name}: a map can't change what lies in several places (use --only weights)")
    return made, editing.versions.notes()


class _Editing:
    """A tree that is being edited; ``done`` has the ``id`` of what was."""

    def __init__(
        self,
        tree: object,
        edits: Mapping[int, list[Edit]],
        ends: Mapping[int, Tensor],
        tensors: list[Tensor],
    ) -> None:
        self._edits, self._ends = edits, ends
        self._tensors = {tensor.path: tensor for tensor in tensors}
        self._places = {id(node): path for path, node in walk(tree) if isinstance(node, dict)}
        self.done: set[int] = set()
        self.versions = ModuleVersions()

    def expand(self, node: object) -> object:
        """Return what a node becomes, or its parts where these come first."""
        if isinstance(node, Tensor):
            return node
        if isinstance(node, dict) and any(self._own(node, key, one) is not None for key, one in node.items()):
            return self._like(node)
        return node_parts(node) or node

    def _own(self, node: dict[Any, Any], key: Any, value: object) -> Tensor | None:
        """Return the tensor whose place an entry is; the object there may be one that others share."""
        held = _held_tensor(value)
        path: Path = (*self._places.get(id(node), ()), key)
        return None if held is None or type(key) is not str else self._tensors.get(path, held)

    def _like(self, node: dict[Any, Any]) -> NodeParts:
        names: dict[str, list[str]] = {}
        entries = self._entries(node, names)
        keys, values = [key for key, _ in entries], [value for _, value in entries]
        count = len(keys)
        if isinstance(node, Mapped):
            kind, state = node.kind, self.versions.moved(node.state, names)
            return NodeParts(
                [*values, state, node.factory],
                lambda made: make_mapped(kind, zip(keys, made[:count], strict=True), *made[count:]),
            )
        return NodeParts(values, lambda made: dict(zip(keys, made, strict=True)))

    def _entries(self, node: dict[Any, Any], names: dict[str, list[str]]) -> list[tuple[Any, Any]]:
        """Return the new entries of a dictionary, and put the new names of its tensors into ``names``."""
        entries: list[tuple[Any, Any]] = []
        for key, value in node.items():
            own, held = self._own(node, key, value), _held_tensor(value)
            if own is None or held is None:
                entries.append((key, value))
            elif id(own) in self._edits:
                self.done.add(id(own))
                names[key] = [str(one.key) for one in self._edits[id(own)]]
                entries += [
                    (one.key, replace_tensors(value, {id(held): one.tensor})) for one in self._edits[id(own)]
                ]
            else:
                names[key] = [key]
                entries.append((key, replace_tensors(value, {id(held): self._ends[id(own)]})))
        return entries


def _held_tensor(value: object) -> Tensor | None:
    """Return the tensor that a value is, or wraps."""
    if isinstance(value, Tensor):
        return value
    if not isinstance(value, Call):
        return None
    inside = list(tensors_in(value))
    return inside[0] if len(inside) == 1 else None


def _no_cycle(node: object) -> object:
    raise UsageError("a tree that holds itself can't be changed by a map (use --only weights)")


class ModuleVersions:
    """Counts what becomes of the names of modules; ``moved`` is called for each state dict."""

    def __init__(self) -> None:
        self._renamed = self._dropped = 0

    def moved(self, state: object, names: Mapping[str, list[str]]) -> object:
        """Return the attributes of a state dict with the new names of its modules.

        Args:
            state: The attributes as they are.
            names: What each tensor of the state dict is called now; nothing for what is gone.
        """
        known = state.get(_VERSIONS_KEY) if isinstance(state, dict) else None
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
        return _versions_like(state, {**state, _VERSIONS_KEY: _versions_like(known, entries)})

    def notes(self) -> list[str]:
        """Return what became of names, if they are others."""
        counts = {"renamed with the tensors": self._renamed, "left out": self._dropped}
        parts = [f"{count:,} {done}" for done, count in counts.items() if count]
        changed = counted(self._renamed + self._dropped, "module")
        return [f"versions of {changed} in {_VERSIONS_KEY}: {', '.join(parts)}"] if parts else []


def _new_names(known: Mapping[Any, object], names: Mapping[str, list[str]]) -> dict[Any, Any]:
    """Return the new name of each module; None where its tensors are gone, or are no one module's now."""
    below: dict[str, set[str | None]] = {}
    for old, given in names.items():
        steps = old.split(".")
        for depth in range(1, len(steps)):
            found = below.setdefault(".".join(steps[:depth]), set())
            found.update(_without_last(new, len(steps) - depth) for new in given)
    made: dict[Any, Any] = {}
    for old in known:
        if not isinstance(old, str) or not old:
            made[old] = old
        elif old in below:
            found = below[old]
            made[old] = next(iter(found)) if len(found) == 1 else None
        else:
            made[old] = _name_beside(old, made)
    return made


def _without_last(name: str, behind: int) -> str | None:
    """Return a name without its last steps, or None where nothing is left."""
    return ".".join(name.split(".")[:-behind]) or None


def _name_beside(name: str, made: Mapping[Any, Any]) -> str | None:
    """Return what a module without tensors is called now: as the module is that it lies in."""
    around, _, last = name.rpartition(".")
    front = made.get(around, around)
    return None if front is None else f"{front}.{last}" if front else last


def _versions_like(node: dict[Any, Any], entries: dict[Any, Any]) -> dict[Any, Any]:
    if isinstance(node, Mapped):
        return make_mapped(node.kind, entries.items(), node.state, node.factory)
    return entries
