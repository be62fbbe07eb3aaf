"""How many parameters a model has: its weights by logical shape, apart from buffers.

A tensor may be stored as several: a sparse one as indices and values, a quantized one as integers and scales.
The metadata describes such a tensor at its own path, unless it is one of the quantized layers of
``packed_weights``.

Sources: PyTorch ``torch/_utils.py``, ``torch/nn/utils/spectral_norm.py``, ``parametrizations.py``.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ckpttool.core.packed_weights import PackedWeights
from ckpttool.core.tensor import Path, Role, Tensor

_BUFFER = re.compile(
    r"(running|moving)_(mean|var|variance)|num_batches_tracked|_mean|_variance|inv_freq|masked_bias|vector_u"
)
"""Names of floating buffers and of counters in the layers of PyTorch, Transformers, Keras and Paddle."""
_PARAMETRIZED_BUFFER = re.compile(r"(?:^|\.)parametrizations\.[^.]+\.[0-9]+\._[uv]$")
_REPARAMETRIZATION_BUFFER = re.compile(r"(.+)_(?:u|v|mask)$")
"""Buffers that spectral normalization and pruning add to a layer with ``weight_orig``."""
_NOT_TRAINED = ("integer", "boolean", "bits", "string")
"""Kinds of types of which PyTorch trains none."""


class Elements(NamedTuple):
    """Elements of a model's tensors by the type that stores them; tied tensors count once.

    Attributes:
        parameters: Elements of weights by their logical shapes.
        buffers: Elements that no optimizer changes.
        packed: Words that hold weights, where nothing says how many each holds.
    """

    parameters: Counter[str]
    buffers: Counter[str]
    packed: Counter[str]


class LogicalTensor(dict[str, object]):
    """What the metadata holds of a tensor that isn't stored as one plain array; its components lie below.

    A type of its own: a user's dictionary may have the same keys.

    Attributes:
        shape: Its logical shape; None if that is the one of its elements.
        value_components: The components that have the elements; empty if any or all may.
    """

    def __init__(
        self,
        plain: Mapping[str, object],
        *,
        shape: tuple[int, ...] | None = None,
        value_components: tuple[str, ...] = (),
    ) -> None:
        super().__init__(plain)
        self.shape = shape
        self.value_components = value_components


def logical_tensor_at(metadata: object, path: Path) -> tuple[Path, LogicalTensor] | None:
    """Return the tensor at a path, or the one of which the path is a component, with where it lies."""
    node = metadata
    for depth in range(len(path) + 1):
        if isinstance(node, LogicalTensor):
            return path[:depth], node
        if not isinstance(node, Mapping) or depth == len(path):
            return None
        node = node.get(str(path[depth]))
    return None


def count_elements(
    tensors: Sequence[Tensor], metadata: Mapping[str, object], config: Mapping[str, object]
) -> Elements:
    """Return how many parameters and buffers the weights among some tensors are.

    Args:
        tensors: All tensors of a checkpoint.
        metadata: Its metadata.
        config: What ``config.json`` beside it says.
    """
    weights = [*_untied_weights(tensors)]
    all_weights = [tensor for tensor in tensors if tensor.role is Role.WEIGHTS]
    packed_weights = PackedWeights(all_weights, metadata, config)
    names = {tensor.name for tensor in weights}
    found = Elements(Counter(), Counter(), Counter())
    counted: set[Path] = set()
    for tensor in weights:
        place, whole = logical_tensor_at(metadata, tensor.path) or ((), None)
        if whole is not None and (whole.shape is not None or whole.value_components):
            if (size := _size_in(whole, place, tensor, counted)) is not None:
                found.parameters[tensor.dtype.name] += size
        elif (contents := packed_weights.contents_of(tensor)) is not None:
            if contents.parameters is None:
                found.packed[contents.type] += tensor.size
            else:
                found.parameters[contents.type] += contents.parameters
        elif _is_buffer(tensor, names):
            found.buffers[tensor.dtype.name] += tensor.size
        else:
            found.parameters[tensor.dtype.name] += tensor.size
    return Elements(*(+counts for counts in found))


def _untied_weights(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield the first of the weights that share their values; its owner may be no weight."""
    others = {tensor.name for tensor in tensors if tensor.role is not Role.WEIGHTS}
    for tensor in tensors:
        if tensor.role is Role.WEIGHTS and (tensor.shares_with is None or tensor.shares_with in others):
            others.discard(tensor.shares_with or "")
            yield tensor


def _size_in(whole: LogicalTensor, place: Path, tensor: Tensor, counted: set[Path]) -> int | None:
    """Return how many elements a component holds of its tensor; None: it only says how they lie."""
    component = str(tensor.path[len(place)]) if len(tensor.path) > len(place) else ""
    if whole.value_components:
        if component not in whole.value_components:
            return None
        return tensor.size if whole.shape is None else math.prod(whole.shape)
    if place in counted:
        return None
    counted.add(place)
    return math.prod(whole.shape or ())


def _is_buffer(tensor: Tensor, names: set[str]) -> bool:
    """Tell whether a tensor is state of a layer that no optimizer changes."""
    if tensor.dtype.kind in _NOT_TRAINED:
        return True
    name = tensor.name
    layer, _, leaf = name.rpartition(".")
    if _BUFFER.fullmatch(leaf) or _PARAMETRIZED_BUFFER.search(name):
        return True
    if leaf == "scale" and f"{layer}.zero_point" in names:  # of the outputs of a quantized layer
        return True
    beside = _REPARAMETRIZATION_BUFFER.fullmatch(name)
    return beside is not None and f"{beside[1]}_orig" in names
