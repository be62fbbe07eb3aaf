"""Weights that hold nothing: none at all, of no element, or one value again and again.

These are warnings: a model may be saved before it is trained. What begins as one value in honest models is no
finding: biases and shifts of zero, scales and norms of one, masks, statistics, and all state of an optimizer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from ckpttool.checkpoint import Checkpoint
from ckpttool.dtypes import numpy_dtype
from ckpttool.report import Finding, counted, first_names, warning
from ckpttool.roles import role_below
from ckpttool.tensor import Role, Tensor

Element = Callable[[Tensor], bytes | None]
"""Returns the element that a whole tensor repeats, little-endian; None where it has others, or if unknown."""

_PLAIN = ("pytorch", "pickle", "hdf5", "numpy", "paddle")
"""Formats in which a file may hold other things than tensors; without any, it holds nothing."""
_STATE_DICT = re.compile(r"model|net|network|weights|(\w+_)?state_dict|model_state", re.IGNORECASE)
_ADAPTER = re.compile(r"(^|[._])(lora_B|lora_up|lora_embedding_A)([._]|$)")
"""What a LoRA adapter has in each layer that is zero until it is trained."""
_NEEDED = re.compile(r"(^|.*[._/])(weight|kernel|embeddings?|bias|w|b|gamma|beta)(_\d+)?")
_NORM = re.compile(r"norm|(^|[._/])(ln|bn|gn)(\d|[._/]|$)", re.IGNORECASE)
_MAY_REPEAT = re.compile(
    r"(?<![a-z])(absmax|alphas?|anchors?|avg|b|beta|bias(es)?|buffer|cache|cell|counts?|grid|hidden|mask(ed|s)?|mean|memory|"
    r"moving|noise|ones|queue|running|scal(e|es|ing)|shifts?|states?|stats?|std|var(iance)?|window|zeros?|zp)(?![a-z])"
)
"""Words in the last part of a name that say it is none of those that multiply what comes in."""
_HAVE_KERNELS = frozenset({"Dense", "Conv1D", "Conv2D", "Conv3D", "Embedding"})


def hollow_findings(checkpoint: Checkpoint, element_of: Element) -> Iterator[Finding]:
    """Yield a warning for each way in which the weights are there in name only.

    Args:
        checkpoint: One in whose structure nothing is wrong.
        element_of: Asked for tensors of floating-point numbers that have elements.
    """
    yield from _nothing_held(checkpoint)
    weights = [one for one in checkpoint.tensors if one.role is Role.WEIGHTS and one.dtype.float_code]
    needed = (one for one in weights if not (one.shard is not None and one.shard.is_empty))
    empty = [one.name for one in needed if not one.size and _NEEDED.fullmatch(one.name)]
    if empty:
        message = (
            f"{len(empty):,} of {counted(len(weights), 'weight')} have no element, as those of a model "
            "that is split over processes and was not gathered"
        )
        yield warning("weights-empty", message, first_names(empty))
    filled = [one for one in weights if one.size and one.values is not None and one.shares_with is None]
    repeated = {one.name: element for one in filled if (element := element_of(one)) is not None}
    zero = {name for name, element in repeated.items() if not any(element)}
    if len(zero) == len(filled) and any(map(_is_telling, filled)):
        yield warning("weights-zero", f"all {counted(len(filled), 'weight')} hold nothing but zeros")
        return
    starts = [one.name for one in filled if _ADAPTER.search(one.name)]
    if starts and zero.issuperset(starts):
        message = (
            f"a LoRA adapter that changes nothing yet: all {len(starts):,} of its second factors are zero"
        )
        yield warning("adapter-untrained", message, first_names(starts))
    yield from _constant_matrices(checkpoint, filled, repeated, set(starts))


def _nothing_held(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield what says that there are no tensors where a file of this kind, or a key, announces some."""
    told = checkpoint.metadata
    is_bare = checkpoint.format == "safetensors" or (checkpoint.format in _PLAIN and not told)
    if not checkpoint.tensors and is_bare:
        yield warning("no-tensors", "it holds no tensor")
    for key, value in told.items():
        if not isinstance(value, Mapping) or value or not _STATE_DICT.fullmatch(key):
            continue
        if role_below((key,)) is Role.WEIGHTS:
            yield warning("no-tensors", "a state dict that holds no tensor", key)


def _constant_matrices(
    checkpoint: Checkpoint, weights: Sequence[Tensor], repeated: Mapping[str, bytes], adapters: set[str]
) -> Iterator[Finding]:
    shapes = {one.name: one.shape for one in weights}
    for one in weights:
        if one.name not in repeated or one.name in adapters or not _is_matrix(one) or not _is_telling(one):
            continue
        if str(one.path[-1]).isdecimal() and not _is_kernel(one, checkpoint.layers):
            continue
        value = _number(one, repeated[one.name])
        if value != value or (value and _is_norm(one, shapes)):  # of NaN the check of values tells
            continue
        yield warning("weights-constant", f"all {one.size:,} values are {value:g}", one.name)


def _is_matrix(tensor: Tensor) -> bool:
    return sum(length > 1 for length in tensor.shape) > 1


def _is_telling(tensor: Tensor) -> bool:
    """Tell whether a weight that repeats one value can't do its work, as far as its name says."""
    last = str(tensor.path[-1]).rpartition(".")[2].rpartition("/")[2]
    return tensor.size > 1 and _MAY_REPEAT.search(last.lower()) is None


def _is_kernel(tensor: Tensor, layers: Mapping[str, str]) -> bool:
    """Tell of a weight that has a number for a name, as Keras's, whether it is the kernel of its layer."""
    is_first = tensor.path[-1] in (0, "0") and "activation" not in tensor.path  # a layer's own PReLU
    return is_first and layers.get(tensor.name, "").partition(" ")[0] in _HAVE_KERNELS


def _is_norm(tensor: Tensor, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Tell whether a tensor scales each element by itself: by its name, or since its bias has its shape."""
    bias = f"{tensor.name.rpartition('.')[0]}.bias"
    return _NORM.search(tensor.name) is not None or shapes.get(bias) == tensor.shape


def _number(tensor: Tensor, element: bytes) -> complex:
    import numpy as np

    data = np.frombuffer(element, numpy_dtype(tensor.dtype))
    return complex(data[0]) if tensor.dtype.kind == "complex" else float(data[0])
