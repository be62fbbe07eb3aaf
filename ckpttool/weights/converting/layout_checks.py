"""Checks that the layouts of weights are known before they are converted; texts of refusals and notes."""

from __future__ import annotations

from collections.abc import Iterable

from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.layers import UNWIRED, DoubtReason
from ckpttool.core.tensor import Tensor
from ckpttool.core.text import first_names
from ckpttool.formats.traits import Family, traits_of
from ckpttool.formats.writer import Content
from ckpttool.weights.pairing.layers import has_keras_word
from ckpttool.weights.pairing.layouts import RULES, LayoutItem

_AS_TORCH = frozenset(
    {
        *(f"{kind}{n}d" for kind in ("conv", "depthwise_conv") for n in (1, 2, 3)),
        *(f"{kind}{n}d_transpose" for kind in ("conv", "depthwise_conv") for n in (1, 2, 3)),
        *("embedding", "lookup_table", "lookup_table_v2", "lstm_cell", "gru_cell", "simple_rnn_cell"),
    }
)
"""Paddle's names of layers whose weights have PyTorch's layout."""
_REMEDY = (
    'use --map with a [[tensor]]: rule = "dense", or "as-is" for vectors, if both have the same '
    'order, "flatten" after a Flatten of an image'
)


def is_layout_unknown(item: LayoutItem, checkpoint: Checkpoint) -> bool:
    """Return whether a tensor may not be in PyTorch's layout since the type of its layer is unknown."""
    if item.rule is not None or len(item.tensor.shape) < 2:
        return False
    source = item.sources[0]
    if traits_of(checkpoint.conventions).family is Family.TORCH:
        return has_keras_word(source)
    kind = checkpoint.layers.get(source.name)
    return kind is None or kind.cls not in _AS_TORCH


def refusal_text(doubts: Iterable[tuple[Tensor, DoubtReason]], other: str = "PyTorch") -> str:
    """Return the message that refuses weights whose element order is unknown."""
    by_reason: dict[DoubtReason, list[Tensor]] = {}
    for tensor, reason in doubts:
        by_reason.setdefault(reason, []).append(tensor)
    reasons = "; ".join(f"{name_list(tensors)}: {reason.text}" for reason, tensors in by_reason.items())
    if not any(reason.doubt.is_about_order for reason in by_reason):
        return f"{reasons}, but PyTorch's GRU sets it"
    hint = " (a whole Keras model, .keras or .h5, records it)" if UNWIRED in by_reason else ""
    return f"{reasons}, so the order of its elements may differ in {other}{hint}: {_REMEDY}"


def name_list(tensors: Iterable[Tensor]) -> str:
    return first_names([tensor.name for tensor in tensors])


def norm_notes(rules: Iterable[str]) -> list[str]:
    """Return a note on eps, which weights don't record, if the rules include a norm."""
    norms = {RULES[kind].text for kind in ("batch norm", "norm", "rms norm")}
    if norms.isdisjoint(rules):
        return []
    return ["a norm's eps is not a weight: the default is 1e-5 in PyTorch, 1e-3 in Keras"]


def loss_notes(content: Content, checkpoint: Checkpoint) -> list[str]:
    """Return notes on values and format-specific parts that are lost when weights get other names."""
    values = list(checkpoint.metadata) if content.tree is not None else []
    notes = [f"non-tensor values left out: {first_names(values)}"] if values else []
    if content.native:
        owners = sorted({name.partition(".")[0] for name in content.native})
        notes.append(f"left out, as names and layouts change: parts for {' and '.join(owners)} only")
    return notes
