"""Writes distributed checkpoints as a single rank of ``torch.distributed.checkpoint`` does.

Source: PyTorch ``torch/distributed/checkpoint/filesystem.py``, ``default_planner.py``, ``_traverse.py``,
``metadata.py``; CPython ``Lib/pickle.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import ClassVar

from ckpttool.containers.pickle.pickle_nodes import NDARRAY, REQUIRES_GRAD, Call
from ckpttool.containers.zip.zip_writer import TorchZip
from ckpttool.core.tensor import Path, Tensor
from ckpttool.formats.content.plain_data import describe
from ckpttool.formats.sidecar import ENTRY
from ckpttool.formats.sidecar_writer import sidecar_of
from ckpttool.formats.torch.dcp_pickle import StoredItem, write_metadata
from ckpttool.formats.torch.dcp_without import without_entries
from ckpttool.formats.torch.writer import ANONYMOUS, WHOLE, name_refusals, write_archive
from ckpttool.formats.writer import Content, Target, Trim, WriteOptions, Writer

_DATA_FILE, _METADATA_FILE = "__0_0.distcp", ".metadata"
_MOST_ENTRIES = 100_000
"""The most tensors and values: the metadata of more would be a longer pickle than any that is read."""


class TorchDcpWriter(Writer):
    """A directory that ``torch.distributed.checkpoint.load`` reads."""

    name: ClassVar[str] = "torch-dcp"
    dtypes: ClassVar[frozenset[str]] = WHOLE
    shape = "directory"

    def refusals(self, content: Content, options: WriteOptions) -> Iterator[str]:
        items = list(islice(flat_state_dict(content), _MOST_ENTRIES + 1))
        if len(items) > _MOST_ENTRIES:
            yield f"more entries than one checkpoint can list (at most {_MOST_ENTRIES:,})"
            return
        for item in items:
            if isinstance(item.node, Tensor) and item.node.values is None:
                yield f"{item.fqn}: it has no values (it was saved from the meta device)"
        names = Counter(item.fqn for item in items)
        for name, count in names.items():
            if count > 1:
                yield f"{name}: several entries of the state dict would have this name (use --map)"
        yield from name_refusals(names)

    def trim(self, path: str, gone: Collection[Path]) -> Trim:
        return without_entries(path, gone)

    def write(self, content: Content, target: Target, options: WriteOptions) -> None:
        items = list(flat_state_dict(content))
        stored = _write_items(items, target)
        sidecar = sidecar_of(content)
        if sidecar is not None:
            target.create(ENTRY).write(sidecar)
        write_metadata(target.create(_METADATA_FILE).write, stored)


def _write_items(items: list[StateDictEntry], target: Target) -> list[StoredItem]:
    """Write everything into one file, ties once; return where it lies."""
    sink = target.create(_DATA_FILE)
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
        stored.append(StoredItem(item.fqn, item.path, tensor, item.requires_grad, _DATA_FILE, *place))
    for archive in unsealed:
        archive.seal()
    return stored


def _owner_of(node: object) -> object:
    """Return a key that all have in common that are stored once; None for one that is stored alone."""
    if isinstance(node, Tensor):
        return node.shares_with or node.name
    if isinstance(node, Call) and node.function == NDARRAY:
        return NDARRAY, _owner_of(node.args[0])
    return None


# The state dict, flattened as PyTorch does it -------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StateDictEntry:
    """An entry of a flattened state dict: a tensor, or any other object."""

    path: Path
    node: object
    requires_grad: bool = False

    @property
    def fqn(self) -> str:
        """Return the name under which it is saved."""
        return ".".join(map(str, self.path))


def flat_state_dict(content: Content) -> Iterator[StateDictEntry]:
    """Yield the entries of a state dict: what is nested in dictionaries, and in lists that hold tensors.

    A tree that is no dictionary is no state dict; its tensors are taken by their names then.
    """
    if not isinstance(content.tree, dict):
        yield from (StateDictEntry((tensor.name,), tensor) for tensor in content.tensors)
        return
    pending: list[tuple[Path, object]] = [((), content.tree)]
    known: dict[int, bool] = {}
    while pending:
        path, node = pending.pop()
        parts: list[tuple[str | int, object]] = []
        if isinstance(node, dict):
            parts += [
                (key if isinstance(key, str) else str(describe(key)), part) for key, part in node.items()
            ]
        elif isinstance(node, list) and _has_entries(node, known):
            parts += enumerate(node)
        if parts or not path:
            pending += [((*path, key), part) for key, part in reversed(parts)]
            continue
        tensor = _tensor_in(node)
        yield StateDictEntry(path, node) if tensor is None else StateDictEntry(path, *tensor)


def _has_entries(items: list[object], known: dict[int, bool]) -> bool:
    """Return whether a list holds tensors or dictionaries, at any depth of lists.

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
    """Return the tensor that a node is, and whether it requires gradients; None if it is none."""
    if isinstance(node, Tensor):
        return node, False
    if not isinstance(node, Call) or not node.args or not isinstance(node.args[0], Tensor):
        return None
    if node.function == REQUIRES_GRAD:
        return node.args[0], True
    if node.is_of("torch._utils", "_rebuild_parameter") and len(node.args) > 1:
        return node.args[0], bool(node.args[1])
    return None
