"""Distributed checkpoints as a single rank of ``torch.distributed.checkpoint`` writes them.

Source: PyTorch ``torch/distributed/checkpoint/filesystem.py``, ``default_planner.py``, ``_traverse.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from ckpttool.checkpoint import Path, Tensor
from ckpttool.formats.carried import ENTRY
from ckpttool.formats.telling import plain
from ckpttool.wire.pickled import REQUIRES_GRAD, Call
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
        names = Counter(item.fqn for item in flattened(content))
        for name in (name for name, count in names.items() if count > 1):
            yield f"{name}: several entries of the state dict would have this name (use --map)"
        if len(names) > _MOST_ENTRIES:
            yield f"{len(names):,} entries are more than one checkpoint can list (at most {_MOST_ENTRIES:,})"
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
    places: dict[str, tuple[int, int]] = {}
    stored = []
    for item in items:
        tensor = item.node if isinstance(item.node, Tensor) else None
        owner = None if tensor is None else tensor.shares_with or tensor.name
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


# The state dict, flattened as PyTorch does it -------------------------------------------------------


def flattened(content: Content) -> Iterator[Item]:
    """Yield the entries of a state dict: what is nested in dictionaries, and in lists that hold tensors.

    A tree that is no dictionary is no state dict; its tensors are taken by their names then.
    """
    if not isinstance(content.tree, dict):
        yield from (Item((tensor.name,), tensor) for tensor in content.tensors)
        return
    pending: list[tuple[Path, object]] = [((), content.tree)]
    while pending:
        path, node = pending.pop()
        parts = _parts(node)
        if parts or not path:
            pending += [((*path, key), part) for key, part in reversed(parts)]
            continue
        found = _tensor_in(node)
        yield Item(path, node) if found is None else Item(path, *found)


def _parts(node: object) -> list[tuple[str | int, object]]:
    """Return the parts of a container that has entries of its own; none where it is one entry."""
    if isinstance(node, dict):
        return [(_text(key), part) for key, part in node.items()]
    return list(enumerate(node)) if isinstance(node, list) and _is_open(node) else []


def _text(key: object) -> str:
    return str(key if type(key) in (str, int) else plain(key))


def _is_open(items: list[object]) -> bool:
    """Tell whether a list holds tensors or dictionaries, at any depth of lists."""
    return any(
        isinstance(item, dict) or _tensor_in(item) or (isinstance(item, list) and _is_open(item))
        for item in items
    )


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
