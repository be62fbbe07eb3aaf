"""Distributed checkpoints as a single rank of ``torch.distributed.checkpoint`` writes them.

Source: PyTorch ``torch/distributed/checkpoint/filesystem.py``, ``default_planner.py``, ``_traverse.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import ClassVar

from ckpttool.formats.content.carried import ENTRY
from ckpttool.formats.content.telling import plain
from ckpttool.tensor import Path, Tensor
from ckpttool.wire.pickled import NDARRAY, REQUIRES_GRAD, Call
from ckpttool.wire.staged import Shape, Staged
from ckpttool.wire.zip_writing import TorchZip
from ckpttool.writing.content import Content
from ckpttool.writing.dcp_metadata import Stored, write_metadata
from ckpttool.writing.document import document
from ckpttool.writing.interface import WriteOptions, Writer
from ckpttool.writing.torch_archive import ANONYMOUS, WHOLE, name_refusals, write_archive

_DATA, _METADATA = "__0_0.distcp", ".metadata"
_MOST_ENTRIES = 100_000
"""The most tensors and values: the metadata of more would be a longer pickle than any that is read."""


@dataclass(frozen=True, slots=True)
class Item:
    """One entry of a flattened state dict: a tensor, or any other object."""

    path: Path
    node: object
    requires_grad: bool = False

    @property
    def fqn(self) -> str:
        """Return the name under which it is saved."""
        return ".".join(map(str, self.path))


class TorchDcp(Writer):
    """A directory that ``torch.distributed.checkpoint.load`` reads."""

    name: ClassVar[str] = "torch-dcp"
    dtypes: ClassVar[frozenset[str]] = WHOLE
    shape: ClassVar[Shape] = "directory"

    def refusals(self, content: Content, options: WriteOptions) -> Iterator[str]:
        found = list(islice(flattened(content), _MOST_ENTRIES + 1))
        if len(found) > _MOST_ENTRIES:
            yield f"more entries than one checkpoint can list (at most {_MOST_ENTRIES:,})"
            return
        for bare in (item for item in found if isinstance(item.node, Tensor) and item.node.values is None):
            yield f"{bare.fqn}: it has no values (it was saved from the meta device)"
        names = Counter(item.fqn for item in found)
        for name in (name for name, count in names.items() if count > 1):
            yield f"{name}: several entries of the state dict would have this name (use --map)"
        yield from name_refusals(names)

    def write(self, content: Content, target: Staged, options: WriteOptions) -> None:
        items = list(flattened(content))
        stored = _write_items(items, target)
        entry = document(content)
        if entry is not None:
            target.create(ENTRY).write(entry)
        write_metadata(target.create(_METADATA).write, stored)


def _write_items(items: list[Item], target: Staged) -> list[Stored]:
    """Write everything into one file, ties once; return where it lies."""
    sink = target.create(_DATA)
    unsealed: list[TorchZip] = []
    places: dict[object, tuple[int, int]] = {}
    stored = []
    for item in items:
        tensor = item.node if isinstance(item.node, Tensor) else None
        owner = _owner_of(item.node)
        place = places.get(owner) if owner is not None else None
        if place is None:
            start = sink.offset
            archive = write_archive(sink, ANONYMOUS, item.node)
            if not archive.is_sealed:
                unsealed.append(archive)
            place = start, sink.offset - start
            if owner is not None:
                places[owner] = place
        stored.append(Stored(item.fqn, item.path, tensor, item.requires_grad, _DATA, *place))
    for archive in unsealed:
        archive.seal()
    return stored


def _owner_of(node: object) -> object:
    """Return what all have in common that are stored once; None where that is one alone."""
    if isinstance(node, Tensor):
        return node.shares_with or node.name
    if isinstance(node, Call) and node.function == NDARRAY:
        return NDARRAY, _owner_of(node.args[0])
    return None


# The state dict, flattened as PyTorch does it -------------------------------------------------------


def flattened(content: Content) -> Iterator[Item]:
    """Yield the entries of a state dict: what is nested in dictionaries, and in lists that hold tensors.

    A tree that is no dictionary is no state dict; its tensors are taken by their names then.
    """
    if not isinstance(content.tree, dict):
        yield from (Item((tensor.name,), tensor) for tensor in content.tensors)
        return
    pending: list[tuple[Path, object]] = [((), content.tree)]
    known: dict[int, bool] = {}
    while pending:
        path, node = pending.pop()
        parts = _parts(node, known)
        if parts or not path:
            pending += [((*path, key), part) for key, part in reversed(parts)]
            continue
        found = _tensor_in(node)
        yield Item(path, node) if found is None else Item(path, *found)


def _parts(node: object, known: dict[int, bool]) -> list[tuple[str | int, object]]:
    """Return the parts of a container that has entries of its own; none where it is one entry."""
    if isinstance(node, dict):
        return [(_text(key), part) for key, part in node.items()]
    return list(enumerate(node)) if isinstance(node, list) and _is_open(node, known) else []


def _text(key: object) -> str:
    return key if isinstance(key, str) else str(plain(key))


def _is_open(items: list[object], known: dict[int, bool]) -> bool:
    """Tell whether a list holds tensors or dictionaries, at any depth of lists.

    Args:
        items: The list, which nothing in it holds.
        known: The answers of lists that were asked before, by ``id``; new ones are added.
    """
    stack = [items]
    while stack:
        below = stack[-1]
        inner = [item for item in below if isinstance(item, list)]
        unknown = [item for item in inner if id(item) not in known]
        if unknown:
            stack += unknown
            continue
        stack.pop()
        known[id(below)] = any(known[id(item)] for item in inner) or any(
            isinstance(item, dict) or _tensor_in(item) for item in below
        )
    return known[id(items)]


def _tensor_in(node: object) -> tuple[Tensor, bool] | None:
    """Return the tensor that a node is, and whether it requires gradients; None where it is none."""
    if isinstance(node, Tensor):
        return node, False
    if not isinstance(node, Call) or not node.args or not isinstance(node.args[0], Tensor):
        return None
    if node.function == REQUIRES_GRAD:
        return node.args[0], True
    if node.is_of("torch._utils", "_rebuild_parameter") and len(node.args) > 1:
        return node.args[0], bool(node.args[1])
    return None
