"""The tree of a distributed checkpoint, which lies in it as paths and what is at their ends.

Source: PyTorch ``torch/distributed/checkpoint/_traverse.py``: a whole number is a place in a list.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ckpttool.checkpoint import Checkpoint
from ckpttool.formats.content.folding import Parts, fold
from ckpttool.formats.content.objects import replaced
from ckpttool.formats.torch.dcp_items import Item
from ckpttool.formats.torch.dcp_metadata import Entry, Key
from ckpttool.tensor import Path, Tensor


def tree_of_items(
    entries: Mapping[str, Entry],
    items: Mapping[Key, Item],
    extra: Checkpoint | None,
    tensors: tuple[Tensor, ...],
) -> object:
    """Return all that items hold, in the containers that paths make; None where these contradict.

    Args:
        entries: What the metadata tells, by name.
        items: What was opened.
        extra: A file beside them, whose keys go to the root.
        tensors: The tensors of the whole.
    """
    found = {tensor.path: tensor for tensor in reversed(tensors)}
    placed: list[tuple[Path, object]] = []
    for fqn, entry in entries.items():
        item = items.get((fqn, None))
        if entry.dtype is not None:
            placed.append((entry.path, found[entry.path]))
        elif item is not None:
            placed.append((entry.path, item.tree(tensors)))
    placed += _beside(extra, found) if extra is not None else ()
    return grown(placed) if placed else None


class _Level(dict[Any, Any]):
    """A container that paths lead through."""


def grown(placed: Iterable[tuple[Path, object]]) -> object:
    """Return the containers that paths make; None where one leads through the end of another."""
    root = _Level()
    for path, part in placed:
        level = root
        for key in path[:-1]:
            below = level.setdefault(key, _Level())
            if type(below) is not _Level:
                return None
            level = below
        if path[-1] in level:
            return None
        level[path[-1]] = part
    return fold(root, _container, lambda node: None)


def _container(node: object) -> object:
    if type(node) is not _Level:
        return node
    places = sorted(node) if all(type(key) is int for key in node) else []
    if places and places == list(range(len(places))):
        return Parts([node[place] for place in places], list)
    keys = list(node)
    return Parts(list(node.values()), lambda done: dict(zip(keys, done, strict=True)))


def _beside(part: Checkpoint, tensors: dict[Path, Tensor]) -> Iterable[tuple[Path, object]]:
    """Return what a file beside the checkpoint adds to its root, with the tensors of the whole."""
    own = {id(tensor): tensors[tensor.path] for tensor in part.tensors if tensor.path in tensors}
    tree = replaced(part.tree, own)
    return [((key,), value) for key, value in tree.items()] if isinstance(tree, dict) else []
