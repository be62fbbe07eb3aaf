"""What a tree tells of itself: its tensors with their roles, what lies beside them, and the training.

These are the answers of any format that holds the tree, whose reader takes apart what was made of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from ckpttool.checkpoint import TrainingState
from ckpttool.formats.content.assembly import name_tensors, training_of
from ckpttool.formats.content.flattening import Leaf, TensorParts, flatten
from ckpttool.formats.content.plain_data import describe
from ckpttool.formats.torch.objects import TorchObjects, with_attributes
from ckpttool.tensor import Path, Tensor
from ckpttool.wire.pickle_nodes import (
    FROM_TYPE,
    MASKED,
    NDARRAY,
    NOTHING,
    QUANTIZED,
    REQUIRES_GRAD,
    Call,
    Global,
    Opaque,
)


def metadata_of(tree: object, tensors: tuple[Tensor, ...], path: str) -> Mapping[str, object]:
    """Return what a tree holds beside tensors, as plain data.

    Args:
        tree: As ``Checkpoint.tree``.
        tensors: All that it is to hold, each in its place.
        path: The file, for errors.
    """
    flat = flatten(tree, _TreeObjects(path).leaf, path, _content_of_opaque)
    owners = {id(tensor.values): tensor.shares_with or tensor.name for tensor in reversed(tensors)}
    missing = {
        tensor.name: tensor.shares_with or tensor.name for tensor in tensors if tensor.values is not None
    }
    for tensor_path, parts in flat.tensors:
        name = ".".join(map(str, tensor_path or ("tensor",)))
        if missing.pop(name, None) != owners.get(id(parts.values)) and parts.values is not None:
            raise ValueError(f"the tree has another tensor in the place {name}")
    if missing:
        raise ValueError(f"the tree does not hold the tensor {next(iter(missing))}")
    return _as_mapping(flat.plain)


def read_out(tree: object, path: str) -> tuple[tuple[Tensor, ...], TrainingState]:
    """Return the tensors of a tree with their roles, and the training state that it tells."""
    flat = flatten(tree, _TreeObjects(path).leaf, path, _content_of_opaque)
    tensors = name_tensors(flat.tensors, flat.plain, flat.modules, flat.optimizers)
    return tensors, training_of(_as_mapping(flat.plain), tensors, "")


def _as_mapping(plain: object) -> Mapping[str, object]:
    return plain if isinstance(plain, dict) else {} if plain is None else {"": plain}


class _TreeObjects(TorchObjects):
    """Reads the nodes of a tree, in which tensors stand instead of what rebuilds them."""

    def __init__(self, path: str) -> None:
        super().__init__(path, _no_storage)

    def leaf(self, node: object) -> Leaf[TensorParts] | None:
        if isinstance(node, Tensor):
            parts = TensorParts(node.dtype, node.shape, node.values, node.extent, node.storage)
            return Leaf((((), parts),))
        if isinstance(node, Opaque):
            return Leaf(plain=f"<{node.what}>") if node.content is None else None
        if isinstance(node, complex):
            return Leaf(plain=describe(Call(Global("builtins", "complex"), (node.real, node.imag))))
        if isinstance(node, bytearray):
            return Leaf(plain=describe(Call(Global("builtins", "bytearray"), (bytes(node),))))
        if not isinstance(node, Call) or not node.args:
            is_none = isinstance(node, Call) and node.function == NOTHING
            return Leaf() if is_none else super().leaf(node)
        return self._leaf_of_wrapper(node) or super().leaf(node)

    def _leaf_of_wrapper(self, call: Call) -> Leaf[TensorParts] | None:
        """Return what wraps a tensor and has no arguments of PyTorch's or NumPy's, None elsewhere."""
        first, function = call.args[0], call.function
        if function == FROM_TYPE and len(call.args) == 3:
            if isinstance(first, Call) and first.function == FROM_TYPE:
                raise ValueError("a tensor of a class in a class")
            inner = self.leaf(first)
            return inner and with_attributes(inner, self._attributes(call.args[2]))
        if not isinstance(first, Tensor):
            return None
        if function == QUANTIZED:
            return self.quantized_leaf(self._tensors_at(first), call.args[1])
        if function == MASKED:
            return Leaf(
                (*self._tensors_at(first), *self._tensors_at(call.args[1])), {"fill_value": call.args[2]}
            )
        is_storage = str(function).endswith("Storage")
        return Leaf(self._tensors_at(first)) if function in (NDARRAY, REQUIRES_GRAD) or is_storage else None

    def _tensors_at(self, node: object) -> tuple[tuple[Path, TensorParts], ...]:
        leaf = self.leaf(node)
        return leaf.tensors if leaf else ()


def _no_storage(persistent_id: Any) -> NoReturn:
    raise TypeError("no storage")


def _content_of_opaque(node: object) -> object:
    return node.content if isinstance(node, Opaque) and node.content is not None else node
