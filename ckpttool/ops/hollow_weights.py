"""Weights that hold nothing: none at all, of no element, or one value again and again.

These are warnings: a model may be saved before it is trained. What begins as one value in honest models is no
finding: biases and shifts of zero, scales and norms of one, masks, statistics, and all state of an optimizer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.dtypes import numpy_dtype
from ckpttool.core.report import Finding, warning
from ckpttool.core.tensor import Role, Tensor, role_below
from ckpttool.core.text import counted, first_names
from ckpttool.formats.traits import traits_of

Element = Callable[[Tensor], bytes | None]
"""Returns the element that a whole tensor repeats, little-endian; None where it has others, or if unknown."""

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
    traits = traits_of(checkpoint.format)
    is_bare = traits.holds_tensors_alone or (traits.is_container and not checkpoint.metadata)
    if not checkpoint.tensors and is_bare:
        yield warning("no-tensors", "it holds no tensor")
    for key, value in checkpoint.metadata.items():
        is_empty = isinstance(value, Mapping) and not value
        if is_empty and _STATE_DICT.fullmatch(key) and role_below((key,)) is Role.WEIGHTS:
            yield warning("no-tensors", "a state dict that holds no tensor", key)
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
    if len(zero) == len(filled) and any(map(_must_vary, filled)):
        yield warning("weights-zero", f"all {counted(len(filled), 'weight')} hold nothing but zeros")
        return
    starts = [one.name for one in filled if _ADAPTER.search(one.name)]
    if starts and zero.issuperset(starts):
        message = (
            f"a LoRA adapter that changes nothing yet: all {len(starts):,} of its second factors are zero"
        )
        yield warning("adapter-untrained", message, first_names(starts))
    yield from _constant_matrices(checkpoint, filled, repeated, set(starts))


def _constant_matrices(
    checkpoint: Checkpoint, weights: Sequence[Tensor], repeated: Mapping[str, bytes], adapters: set[str]
) -> Iterator[Finding]:
    """Yield a warning for each matrix that repeats one value, which no honest model begins with."""
    shapes = {one.name: one.shape for one in weights}
    for one in weights:
        is_matrix = sum(length > 1 for length in one.shape) > 1
        if one.name not in repeated or one.name in adapters or not is_matrix or not _must_vary(one):
            continue
        if str(one.path[-1]).isdecimal():  # Keras has numbers for names: is it the kernel of its layer?
            is_first = one.path[-1] in (0, "0") and "activation" not in one.path  # a layer's own PReLU
            kind = checkpoint.layers.get(one.name, "").partition(" ")[0]
            if not is_first or kind not in _HAVE_KERNELS:
                continue
        import numpy as np

        number = np.frombuffer(repeated[one.name], numpy_dtype(one.dtype))[0]
        value = complex(number) if one.dtype.kind == "complex" else float(number)
        # A norm scales each element by itself: by its name, or since its bias has its shape.
        bias = f"{one.name.rpartition('.')[0]}.bias"
        is_norm = _NORM.search(one.name) is not None or shapes.get(bias) == one.shape
        if value != value or (value and is_norm):  # of NaN the check of values tells
            continue
        yield warning("weights-constant", f"all {one.size:,} values are {value:g}", one.name)


def _must_vary(tensor: Tensor) -> bool:
    """Tell whether a weight that repeats one value can't do its work, as far as its name says."""
    last = str(tensor.path[-1]).rpartition(".")[2].rpartition("/")[2]
    return tensor.size > 1 and _MAY_REPEAT.search(last.lower()) is None
