"""PyTorch's element types, storage classes, shapes and layouts, as a pickle names them.

Also the names of a quantizer's parameters, and of the component tensors of a sparse tensor.

Source: PyTorch ``torch/_utils.py``, ``torch/storage.py``.
"""

from __future__ import annotations

from typing import Any

from ckpttool.containers.pickle.pickle_nodes import Call, Global
from ckpttool.core.dtypes import BY_STORAGE, BY_TORCH, DType
from ckpttool.formats.content.plain_data import describe

COMPONENTS = {
    "sparse_coo": ("indices", "values"),
    "sparse_csr": ("crow_indices", "col_indices", "values"),
    "sparse_bsr": ("crow_indices", "col_indices", "values"),
    "sparse_csc": ("ccol_indices", "row_indices", "values"),
    "sparse_bsc": ("ccol_indices", "row_indices", "values"),
}
"""The component tensors of a sparse tensor, by layout, in the order of ``_rebuild_sparse_tensor``."""


def sizes(node: Any) -> tuple[int, ...]:
    """Return a shape or strides, which may be a tuple or a ``torch.Size``."""
    if isinstance(node, Call) and node.is_of("torch", "Size"):
        node = node.args[0] if node.args else ()
    if not isinstance(node, list | tuple):
        raise TypeError(f"{describe(node)} is not a shape")
    return tuple(node)


def checked_sizes(node: Any) -> tuple[int, ...]:
    """Return a shape that no stored bytes confirm, such as that of a sparse tensor, after checking it."""
    shape = sizes(node)
    if not all(type(length) is int and length >= 0 for length in shape):
        raise ValueError(f"{describe(shape)} is not a shape")
    return shape


def torch_dtype(node: object) -> DType:
    """Return the type that a ``torch.<dtype>`` global names."""
    if isinstance(node, Global) and node.module == "torch" and node.name in BY_TORCH:
        return BY_TORCH[node.name]
    raise TypeError(f"{describe(node)} is not an element type")


def storage_dtype(node: object) -> DType | None:
    """Return the element type of a storage class; None for an untyped one."""
    if isinstance(node, Global) and node.name.endswith("Storage"):
        name = node.name.removesuffix("Storage")
        if name == "Untyped":
            return None
        if name in BY_STORAGE:
            return BY_STORAGE[name]
    raise TypeError(f"{describe(node)} is not a storage class")


def sparse_layout(node: object) -> str:
    """Return the name of a sparse layout, pickled as ``_get_layout("torch.sparse_coo")`` or by name."""
    name = node.args[0] if isinstance(node, Call) and node.args else describe(node)
    layout = str(name).removeprefix("torch.")
    if layout not in COMPONENTS:
        raise TypeError(f"{layout} is not a sparse layout")
    return layout


def quantizer_fields(scheme: object) -> tuple[str, ...]:
    """Return the names of a quantization scheme's parameters, in PyTorch's order."""
    if str(scheme).startswith("per_channel"):
        return ("scales", "zero_points", "axis")
    return ("scale", "zero_point")
