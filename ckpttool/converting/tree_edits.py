"""Trees of objects in whose dictionaries tensors get other keys, become several, or are taken out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ckpttool.converting.versions import Versions
from ckpttool.errors import UsageError
from ckpttool.formats.content.folding import Parts, fold
from ckpttool.formats.content.objects import mapped_of, rebuilt, replaced, tensors_in, walk
from ckpttool.tensor import Path, Tensor
from ckpttool.wire.pickled import Call, Mapped


class Edit(NamedTuple):
    """What stands in a tensor's place: a tensor, and its key there."""

    key: str | int
    tensor: Tensor


Edits = dict[int, list[Edit]]
"""What stands in the place of tensors, by their ``id``."""


def edited(
    tree: object, edits: Mapping[int, list[Edit]], ends: Mapping[int, Tensor], old: Iterable[Tensor]
) -> tuple[object, list[str]]:
    """Return a tree with edits, and what there is to say of it.

    The versions of modules that a state dict carries get the modules' new names.

    Args:
        tree: The tree.
        edits: For the ``id`` of a tensor, what stands in its place.
        ends: For the ``id`` of a tensor that keeps its place, what it is now.
        old: All tensors of the tree as it was.

    Raises:
        UsageError: One of those that are edited doesn't lie in a dictionary under a name.
        LimitExceeded: The tree is nested too deep.
    """
    tensors = [*old]
    editing = _Editing(tree, edits, ends, tensors)
    made = fold(tree, editing.expand, _no_cycle)
    left = next((one for one in tensors if id(one) in edits and id(one) not in editing.done), None)
    if left is not None:
        raise UsageError(f"{left.name}: a map can't change what lies in no dictionary (use --only weights)")
    made = replaced(made, ends)
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
        self.versions = Versions()

    def expand(self, node: object) -> object:
        """Return what a node becomes, or its parts where these come first."""
        if isinstance(node, Tensor):
            return node
        if isinstance(node, dict) and any(self._own(node, key, one) is not None for key, one in node.items()):
            return self._like(node)
        return rebuilt(node) or node

    def _own(self, node: dict[Any, Any], key: Any, value: object) -> Tensor | None:
        """Return the tensor whose place an entry is; the object there may be one that others share."""
        held = _held(value)
        path: Path = (*self._places.get(id(node), ()), key)
        return None if held is None or type(key) is not str else self._tensors.get(path, held)

    def _like(self, node: dict[Any, Any]) -> Parts:
        names: dict[str, list[str]] = {}
        entries = self._entries(node, names)
        keys, values = [key for key, _ in entries], [value for _, value in entries]
        count = len(keys)
        if isinstance(node, Mapped):
            kind, state = node.kind, self.versions.moved(node.state, names)
            return Parts(
                [*values, state, node.factory],
                lambda made: mapped_of(kind, zip(keys, made[:count], strict=True), *made[count:]),
            )
        return Parts(values, lambda made: dict(zip(keys, made, strict=True)))

    def _entries(self, node: dict[Any, Any], names: dict[str, list[str]]) -> list[tuple[Any, Any]]:
        """Return the new entries of a dictionary, and put the new names of its tensors into ``names``."""
        entries: list[tuple[Any, Any]] = []
        for key, value in node.items():
            own, held = self._own(node, key, value), _held(value)
            if own is None or held is None:
                entries.append((key, value))
            elif id(own) in self._edits:
                self.done.add(id(own))
                names[key] = [str(one.key) for one in self._edits[id(own)]]
                entries += [
                    (one.key, replaced(value, {id(held): one.tensor})) for one in self._edits[id(own)]
                ]
            else:
                names[key] = [key]
                entries.append((key, replaced(value, {id(held): self._ends[id(own)]})))
        return entries


def _held(value: object) -> Tensor | None:
    """Return the tensor that a value is, or wraps."""
    if isinstance(value, Tensor):
        return value
    if not isinstance(value, Call):
        return None
    inside = list(tensors_in(value))
    return inside[0] if len(inside) == 1 else None


def _no_cycle(node: object) -> object:
    raise UsageError("a tree that holds itself can't be changed by a map (use --only weights)")
