"""Edits the tensors in the dictionaries of an object tree: rename, replace by several, remove."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ckpttool.containers.pickle.pickle_nodes import Call, DictSubclass
from ckpttool.core.errors import UsageError
from ckpttool.core.tensor import Path, Tensor
from ckpttool.core.text import counted
from ckpttool.formats.content.tree import fold, node_parts, replace_tensors, tensors_in, walk

_VERSIONS_KEY = "_metadata"
"""Attribute of PyTorch's state dicts with the version of each module."""


def edit_tree(
    tree: object, edits: Mapping[int, list[Tensor]], kept: Mapping[int, Tensor], old: Iterable[Tensor]
) -> tuple[object, list[str]]:
    """Return an edited tree, and notes.

    Module versions in state dicts (``_metadata``) follow the new names.

    Args:
        tree: The tree.
        edits: Replacements by ``id`` of a tensor, each stored under the last key of its path.
        kept: New object by ``id`` of each tensor that keeps its key.
        old: All tensors of ``tree``.
    """

    def refuse_cycle(node: object) -> object:
        raise UsageError("a map can't change a tree that contains itself (use --only weights)")

    tensors = [*old]
    editor = _TreeEditor(tree, edits, kept, tensors)
    edited = fold(tree, editor.expand, refuse_cycle)
    missed = next((one for one in tensors if id(one) in edits and id(one) not in editor.done), None)
    if missed is not None:
        raise UsageError(
            f"{missed.name}: a map can't change a tensor outside dictionaries (use --only weights)"
        )
    edited = replace_tensors(edited, kept)
    known = {id(tensor) for new in (*edits.values(), kept.values()) for tensor in new}
    stale = next((one for one in tensors_in(edited) if id(one) not in known), None)
    if stale is not None:
        raise UsageError(f"{stale.name}: a map can't change a tensor in several places (use --only weights)")
    return edited, editor.versions.notes()


class _TreeEditor:
    """Node transformation for ``fold``; ``done`` has the ``id`` of the edited tensors."""

    def __init__(
        self,
        tree: object,
        edits: Mapping[int, list[Tensor]],
        kept: Mapping[int, Tensor],
        tensors: list[Tensor],
    ) -> None:
        self._edits, self._kept = edits, kept
        self._tensors = {tensor.path: tensor for tensor in tensors}
        self._paths = {id(node): path for path, node in walk(tree) if isinstance(node, dict)}
        self.done: set[int] = set()
        self.versions = ModuleVersions()

    def expand(self, node: object) -> object:
        """Return the replacement of a node, or its parts if these are to be folded first."""
        if isinstance(node, Tensor):
            return node
        if not isinstance(node, dict) or all(self._tensor_at(node, *entry) is None for entry in node.items()):
            return node_parts(node) or node
        names: dict[str, list[str]] = {}
        entries = self._entries(node, names)
        if isinstance(node, DictSubclass):
            state = self.versions.rename(node.state, names)
            return node_parts(DictSubclass(node.kind, entries, state, node.factory))
        return node_parts(dict(entries))

    def _entries(self, node: dict[Any, Any], names: dict[str, list[str]]) -> list[tuple[Any, Any]]:
        """Return the new entries of a dictionary; add its tensors' new names to ``names``."""
        entries: list[tuple[Any, Any]] = []
        for key, value in node.items():
            tensor, held = self._tensor_at(node, key, value), _held_tensor(value)
            if tensor is None or held is None:
                entries.append((key, value))
            elif id(tensor) in self._edits:
                edits = self._edits[id(tensor)]
                self.done.add(id(tensor))
                names[key] = [str(new.path[-1]) for new in edits]
                entries += [(new.path[-1], replace_tensors(value, {id(held): new})) for new in edits]
            else:
                names[key] = [key]
                entries.append((key, replace_tensors(value, {id(held): self._kept[id(tensor)]})))
        return entries

    def _tensor_at(self, node: dict[Any, Any], key: Any, value: object) -> Tensor | None:
        """Return the tensor of an entry by its path, since one object may be in several places."""
        # Tied tensors may be one object at several keys, which a map can rename one by one. So the key of the
        # edit is the tensor of the entry's path, not the object found there.
        held = _held_tensor(value)
        path: Path = (*self._paths.get(id(node), ()), key)
        return None if held is None or type(key) is not str else self._tensors.get(path, held)


def _held_tensor(value: object) -> Tensor | None:
    """Return the tensor that a value is or wraps (a ``Parameter``), or None."""
    if isinstance(value, Tensor):
        return value
    if not isinstance(value, Call):
        return None
    inside = list(tensors_in(value))
    return inside[0] if len(inside) == 1 else None


class ModuleVersions:
    """Renames modules in the versions of state dicts, and counts the changes."""

    def __init__(self) -> None:
        self._renamed = self._dropped = 0

    def rename(self, state: object, names: Mapping[str, list[str]]) -> object:
        """Return the attributes of a state dict with its modules renamed.

        Args:
            state: Attributes of the state dict.
            names: New names by old name of each tensor; empty for a removed one.
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
        """Return a note on renamed and removed versions, if any."""
        counts = {"renamed with the tensors": self._renamed, "left out": self._dropped}
        parts = [f"{count:,} {done}" for done, count in counts.items() if count]
        changed = counted(self._renamed + self._dropped, "module")
        return [f"versions of {changed} in {_VERSIONS_KEY}: {', '.join(parts)}"] if parts else []


def _new_names(known: Mapping[Any, object], names: Mapping[str, list[str]]) -> dict[Any, Any]:
    """Return the new name of each module; None if its tensors are removed or in several modules."""
    below: dict[str, set[str | None]] = {}
    for old, given in names.items():
        steps = old.split(".")
        for depth in range(1, len(steps)):
            modules = below.setdefault(".".join(steps[:depth]), set())
            # a.b.weight renamed to c.d.weight moves module a.b to c.d and a to c: as many steps are cut off
            # the new name as the old name has below the module.
            modules.update(".".join(new.split(".")[: depth - len(steps)]) or None for new in given)
    # ``_metadata`` has an entry for each module, also for those without tensors, and its parents come before
    # them, as ``state_dict`` visits a module before its children.
    renamed: dict[Any, Any] = {}
    for old in known:
        if not isinstance(old, str) or not old:
            renamed[old] = old
        elif old in below:
            modules = below[old]
            renamed[old] = next(iter(modules)) if len(modules) == 1 else None
        else:  # a module without tensors (an activation) follows its parent
            parent, _, last = old.rpartition(".")
            front = renamed.get(parent, parent)
            renamed[old] = None if front is None else f"{front}.{last}" if front else last
    return renamed


def _versions_like(node: dict[Any, Any], entries: dict[Any, Any]) -> dict[Any, Any]:
    if isinstance(node, DictSubclass):
        return DictSubclass(node.kind, entries.items(), node.state, node.factory)
    return entries
