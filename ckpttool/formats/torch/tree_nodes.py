"""PyTorch's objects in a content tree (``content/tree.py``): made from pickles, and read again.

A tree has a ``Tensor`` in place of the call that rebuilds it. Of PyTorch's calls it keeps those that say more
than the tensor: that it requires gradients, is quantized, or is of a subclass.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ckpttool.containers.pickle.pickle_nodes import (
    FROM_TYPE,
    MASKED,
    NDARRAY,
    NOTHING,
    QUANTIZED,
    REQUIRES_GRAD,
    Call,
    Global,
    Opaque,
    Persistent,
)
from ckpttool.core.checkpoint import TrainingState
from ckpttool.core.tensor import Path, Tensor
from ckpttool.formats.arrays.objects import array_node
from ckpttool.formats.content.assembly import name_tensors, training_of
from ckpttool.formats.content.plain_data import describe
from ckpttool.formats.content.tree import Leaf, NodeParts, TensorParts, flatten
from ckpttool.formats.torch.objects import TorchObjects, is_module, no_storage, with_attributes

if TYPE_CHECKING:
    from ckpttool.formats.content.assembly import FrameworkNode, TreeBuilder

_UNTRACKED = Global("torch._utils", "_rebuild_tensor")
"""The oldest function, which has no ``requires_grad``."""
_VIEWS = (
    _UNTRACKED,
    Global("torch._utils", "_rebuild_tensor_v2"),
    Global("torch._utils", "_rebuild_tensor_v3"),
)


# Into a tree ----------------------------------------------------------------------------------------


def torch_node(builder: TreeBuilder, node: Call | Persistent, leaf: Leaf[Any]) -> object:
    """Return the tree's node for an object of PyTorch's or NumPy's (see ``FrameworkNode``)."""
    if isinstance(node, Persistent):
        return _storage(builder, node, leaf)
    if is_module(node):
        what = f"an object of {node.function} (its state dict is)"
        return builder.opaque(what, builder.content_of(leaf))
    if leaf.tensors[0][1].shard is not None:
        return builder.tensor(leaf)
    rule: FrameworkNode = _NODES.get(node.function, array_node)
    return rule(builder, node, leaf)


def _storage(builder: TreeBuilder, node: Persistent, leaf: Leaf[Any]) -> object:
    tensor = builder.tensor(leaf)
    kind = node.id[1] if isinstance(node.id, tuple) and len(node.id) > 1 else None
    if isinstance(tensor, Tensor) and isinstance(kind, Global) and kind.name.endswith("Storage"):
        return builder.remember(Call(kind, (tensor,)), [tensor])
    return tensor


def _view(builder: TreeBuilder, call: Call, leaf: Leaf[Any]) -> object:
    tensor = builder.tensor(leaf)
    if len(call.args) > 5 and call.args[5]:
        return builder.opaque("the hooks of a tensor", tensor)
    if call.function != _UNTRACKED and call.args[4] is True:
        return builder.remember(Call(REQUIRES_GRAD, (tensor,)), [tensor])
    return tensor


def _quantized_tensor(builder: TreeBuilder, call: Call, leaf: Leaf[Any]) -> NodeParts:
    tensor, grad = builder.tensor(leaf), call.args[5] is True

    def make(done: list[Any]) -> object:
        return builder.call_or_opaque(Call(QUANTIZED, (tensor, done[0], grad)), leaf)

    return NodeParts([call.args[4]], make)


def _of_type(builder: TreeBuilder, call: Call, leaf: Leaf[Any]) -> object:
    """Return a tensor of a subclass or with attributes as a call around the plain tensor."""
    function, kind, args, state = call.args[:4]
    # In the tree the call is ``FROM_TYPE(tensor, class, state)``: the inner call of the pickle is replaced by
    # the tensor that it rebuilds, or by a node around it.
    if function == FROM_TYPE:
        return builder.opaque_call(call, leaf, "a class in a class")

    def wrap(inner: object, kind_and_state: list[Any]) -> object:
        return builder.call_or_opaque(Call(FROM_TYPE, (inner, *kind_and_state)), leaf)

    if function in _VIEWS:
        view = _view(builder, Call(function, args), leaf)
        return NodeParts([kind, state], lambda done: wrap(view, done))
    if function == QUANTIZED:
        quantized = _quantized_tensor(builder, Call(function, args), leaf)
        return NodeParts(
            [kind, state, *quantized.parts], lambda done: wrap(quantized.make(done[2:]), done[:2])
        )

    def make(done: list[Any]) -> object:
        return wrap(builder.remember(Call(done[0], done[1]), done[:2]), done[2:])

    return NodeParts([function, args if isinstance(args, tuple) else (args,), kind, state], make)


_NODES: dict[object, FrameworkNode] = {
    **dict.fromkeys(_VIEWS, _view),
    QUANTIZED: _quantized_tensor,
    FROM_TYPE: _of_type,
}


# Out of a tree --------------------------------------------------------------------------------------


def metadata_of(tree: object, tensors: tuple[Tensor, ...], path: str) -> Mapping[str, object]:
    """Return everything in a tree but tensors, as plain data.

    Args:
        tree: As ``Checkpoint.tree``.
        tensors: All tensors that it must hold, each at its path.
        path: The file's path, for errors.

    Raises:
        ValueError: A tensor is missing or at another path.
    """
    flat = flatten(tree, _TreeTensors(path).leaf, path, _content_of_opaque)
    owners = {id(tensor.values): tensor.shares_with or tensor.name for tensor in reversed(tensors)}
    missing = {
        tensor.name: tensor.shares_with or tensor.name for tensor in tensors if tensor.values is not None
    }
    for tensor_path, parts in flat.tensors:
        name = ".".join(map(str, tensor_path or ("tensor",)))
        if missing.pop(name, None) != owners.get(id(parts.values)) and parts.values is not None:
            raise ValueError(f"the tree has a different tensor at {name}")
    if missing:
        raise ValueError(f"the tree lacks the tensor {next(iter(missing))}")
    return _as_mapping(flat.plain)


def read_out(tree: object, path: str) -> tuple[tuple[Tensor, ...], TrainingState]:
    """Return the tensors of a tree with their roles, and its training state."""
    flat = flatten(tree, _TreeTensors(path).leaf, path, _content_of_opaque)
    tensors = name_tensors(flat.tensors, flat.plain, flat.modules, flat.optimizers)
    return tensors, training_of(_as_mapping(flat.plain), tensors, "")


def _as_mapping(plain: object) -> Mapping[str, object]:
    return plain if isinstance(plain, dict) else {} if plain is None else {"": plain}


class _TreeTensors(TorchObjects):
    """Reads the nodes of a tree, in which tensors replace the calls that rebuild them."""

    def __init__(self, path: str) -> None:
        super().__init__(path, no_storage)

    def leaf(self, node: object) -> Leaf[TensorParts] | None:
        if isinstance(node, Tensor):
            parts = TensorParts(node.dtype, node.shape, node.values, node.extent, node.storage)
            return Leaf((((), parts),))
        if isinstance(node, Opaque):
            return Leaf(plain=f"<{node.reason}>") if node.content is None else None
        if isinstance(node, complex):
            return Leaf(plain=describe(Call(Global("builtins", "complex"), (node.real, node.imag))))
        if isinstance(node, bytearray):
            return Leaf(plain=describe(Call(Global("builtins", "bytearray"), (bytes(node),))))
        if not isinstance(node, Call) or not node.args:
            is_none = isinstance(node, Call) and node.function == NOTHING
            return Leaf() if is_none else super().leaf(node)
        return self._leaf_of_wrapper(node) or super().leaf(node)

    def _leaf_of_wrapper(self, call: Call) -> Leaf[TensorParts] | None:
        """Return the tensors in a call that only trees have, None for any other call."""
        first, function = call.args[0], call.function
        if function == FROM_TYPE and len(call.args) == 3:
            if isinstance(first, Call) and first.function == FROM_TYPE:
                raise ValueError("a tensor subclass in a tensor subclass")
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


def _content_of_opaque(node: object) -> object:
    return node.content if isinstance(node, Opaque) and node.content is not None else node
