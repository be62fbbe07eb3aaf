"""Which type of Keras layer a set of variables is, told from their shapes and what they are called."""

from __future__ import annotations

from collections.abc import Mapping

from ckpttool.tensor import Tensor

Shape = tuple[int, ...]


def kind_of_shapes(shapes: list[Shape]) -> str | None:
    """Return the only type of layer whose variables, numbered, have these shapes."""
    if len(shapes) in (2, 3) and (found := recurrent_kind(shapes)) is not None:
        return found
    if len(shapes) == 4 and len(shapes[0]) == 1 and len(set(shapes)) == 1:
        return "batch norm"
    if len(shapes) != 2 or len(shapes[1]) != 1:
        return None
    kernel, bias = shapes
    if len(kernel) == 2:
        return "dense" if kernel[1:] == bias else None
    # Of rank 3, a part of an attention has such a set, too.
    return _convolution(kernel, bias) if len(kernel) in (4, 5) else None


def recurrent_kind(shapes: list[Shape]) -> str | None:
    """Return the type of a recurrent layer from its kernels, and its bias where it has one."""
    kernel, recurrent = shapes[:2]
    if len(kernel) != 2 or len(recurrent) != 2 or kernel[1] != recurrent[1] or not recurrent[0]:
        return None
    gates = recurrent[1] / recurrent[0]
    biases = {4: (recurrent[1],), 3: (2, recurrent[1]), 1: (recurrent[1],)}
    if gates not in biases or (len(shapes) == 3 and shapes[2] != biases[int(gates)]):
        return None
    return {4: "lstm", 3: "gru", 1: "rnn"}[int(gates)]


def _convolution(kernel: Shape, bias: Shape | None) -> str | None:
    """Tell a convolution by its bias; Keras 3 calls a depthwise one's kernel so as well."""
    *_, inner, outer = kernel
    if bias is None:
        return "conv" if outer != 1 or inner == 1 else None
    if len(kernel) > 4:
        return "conv" if bias == (outer,) else "transposed conv" if bias == (inner,) else None
    fits = {
        "conv": bias == (outer,),
        "transposed conv": bias == (inner,),
        "depthwise": bias == (inner * outer,),
    }
    if fits[
        "conv"
    ]:  # as a transposed one its elements lie alike; as a depthwise one, of a single channel, too
        return "conv"
    found = [kind for kind, is_so in fits.items() if is_so]
    return found[0] if len(found) == 1 else None


def kind_of_names(variables: Mapping[str, Tensor]) -> str | None:
    """Return the type of a layer from what its variables are called."""
    shapes = {name: tensor.shape for name, tensor in variables.items()}
    if {"kernel", "recurrent_kernel"} <= shapes.keys():
        known = [shapes[name] for name in ("kernel", "recurrent_kernel", "bias") if name in shapes]
        return recurrent_kind(known)
    if "pointwise_kernel" in shapes:
        return "separable"
    for name, kind in _TELLING.items():
        if name in shapes:
            return kind
    kernel, bias = shapes.get("kernel", ()), shapes.get("bias")
    if len(kernel) == 2:
        return "dense"
    if len(kernel) == 3:
        return "conv" if bias == kernel[-1:] else None
    return _convolution(kernel, bias) if len(kernel) in (4, 5) else None


_TELLING = {
    "depthwise_kernel": "depthwise",
    "embeddings": "embedding",
    "moving_mean": "batch norm",
    "moving_variance": "batch norm",
    "gamma": "norm",
    "beta": "norm",
}
