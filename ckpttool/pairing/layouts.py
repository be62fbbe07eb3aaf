"""One layout for the tensors of every framework: PyTorch's, where the type of a tensor's layer is known.

``RULES`` is the table. A rule says for each variable of a layer what PyTorch calls it, and by which pattern
the axes as stored become PyTorch's; a pattern has an inverse, which is the way back. What no rule knows stays
as it is stored.

Source: AlexanderLutsenko/nobuco ``node_converters/``, huggingface/transformers
``modeling_tf_pytorch_utils.py``, keras-team/keras ``layers/rnn/lstm.py`` and ``gru.py``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from ckpttool.checkpoint import Checkpoint
from ckpttool.pairing.arranged import Pattern, Unfit, arranged, lengths_of, pattern
from ckpttool.pairing.doubts import doubtful
from ckpttool.pairing.layers import ATTENTION, CELL, Layer, Steps, layers_of, steps_of
from ckpttool.tensor import Tensor

Back = Callable[[Tensor, int], Tensor]


@dataclass(frozen=True, slots=True)
class Item:
    """One tensor as it is compared.

    Attributes:
        name: What it is compared under: PyTorch's convention where a rule applies.
        tensor: Lazy; transposed, sliced or joined where a rule applies.
        sources: The stored tensors that it is made of: itself alone where it is as stored.
        rule: The layout rule that was used, in people's words, or None.
        row: Which row of the source it is, where each is an item of its own.
        doubt: Why its elements may be in another order than PyTorch's all the same, or None.
        back: What makes the source of a number out of such a tensor; None where it is held alike.
    """

    name: str
    tensor: Tensor
    sources: tuple[Tensor, ...]
    rule: str | None = None
    row: int | None = None
    doubt: str | None = None
    back: Back | None = field(default=None, compare=False, repr=False)

    def restored(self, given: Tensor, at: int = 0) -> Tensor:
        """Return source number ``at``, were ``given`` this item: the way back; of a row, a matrix of one row.

        Raises:
            Unfit: Its shape is not the item's.
        """
        if given.shape != self.tensor.shape:
            raise Unfit(f"shape {list(given.shape)}, not {list(self.tensor.shape)}")
        source = self.sources[at]
        made = given if self.back is None else self.back(given, at)
        return replace(made, path=source.path, role=source.role, key=source.key, shares_with=None)


@dataclass(frozen=True, slots=True)
class Turn:
    """What becomes of one variable.

    Attributes:
        leaf: What PyTorch calls it, below the layer.
        ways: The pattern for each number of axes; no entry keeps the layout.
        sizes: Lengths of named axes that no shape tells.
        row: Which row of the stored tensor is meant, where each is a tensor of its own.
    """

    leaf: str
    ways: Mapping[int, Pattern] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    row: int | None = None


@dataclass(frozen=True, slots=True)
class Rule:
    """The layout of one type of layer, in words and for each of its variables."""

    text: str
    turns: Mapping[str, tuple[Turn, ...]]


CONVOLUTIONS = {
    3: pattern("k i o -> o i k"),
    4: pattern("h w i o -> o i h w"),
    5: pattern("d h w i o -> o i d h w"),
}
_DEPTHWISE = {3: pattern("k c m -> (c m) 1 k"), 4: pattern("h w c m -> (c m) 1 h w")}
_MATRIX = {2: pattern("i o -> o i")}
_RESET_FIRST = (1, 0, 2)  # Keras has a GRU's gates in the order z, r, h; PyTorch in r, z, n
_GATES = {2: pattern("i (g u) -> (g u) i", _RESET_FIRST)}
_THREE = {"g": 3}
DENSE = "Dense kernel (I, O) = Linear weight (O, I)"
CONVOLUTION = "convolution kernel (k…, I, O) = weight (O, I, k…)"
FLATTENED = "Dense kernel after a flatten (H·W·C, O) = Linear weight (O, C·H·W)"

FLATTEN = pattern("(h w c) o -> o (c h w)")
_NORM = {"gamma": (Turn("weight"),), "beta": (Turn("bias"),)}
_STATISTICS = {"moving_mean": (Turn("running_mean"),), "moving_variance": (Turn("running_var"),)}


def _recurrent(name: str) -> Rule:
    return Rule(
        f"{name} kernel (I, g·u), recurrent_kernel (u, g·u) = weight_ih (g·u, I), weight_hh (g·u, u)",
        {
            "kernel": (Turn("weight_ih_l0", _MATRIX),),
            "recurrent_kernel": (Turn("weight_hh_l0", _MATRIX),),
            "bias": (Turn("bias_l0"),),
        },
    )


RULES: Mapping[str, Rule] = {
    "dense": Rule(DENSE, {"kernel": (Turn("weight", _MATRIX),)}),
    "flattened": Rule(FLATTENED, {"kernel": (Turn("weight", {2: FLATTEN}),)}),
    "conv": Rule(CONVOLUTION, {"kernel": (Turn("weight", CONVOLUTIONS),)}),
    "transposed conv": Rule(
        "transposed convolution kernel (k…, O, I) = weight (I, O, k…)",
        {"kernel": (Turn("weight", CONVOLUTIONS),)},
    ),
    "depthwise": Rule(
        "depthwise kernel (k…, C, m) = convolution weight (C·m, 1, k…)",
        {"depthwise_kernel": (Turn("weight", _DEPTHWISE),)},
    ),
    "separable": Rule(
        "separable convolution = a depthwise and a pointwise convolution",
        {
            "depthwise_kernel": (Turn("depthwise.weight", _DEPTHWISE),),
            "pointwise_kernel": (Turn("pointwise.weight", CONVOLUTIONS),),
            "bias": (Turn("pointwise.bias"),),
        },
    ),
    "batch norm": Rule(
        "gamma, beta, moving_mean, moving_variance = BatchNorm weight, bias, running_mean, running_var",
        _NORM | _STATISTICS,
    ),
    "norm": Rule("gamma, beta = norm weight, bias", _NORM),
    "rms norm": Rule("scale = RMSNorm weight", {"scale": (Turn("weight"),)}),
    "embedding": Rule("embeddings (V, E) = Embedding weight (V, E)", {"embeddings": (Turn("weight"),)}),
    "lstm": _recurrent("LSTM"),
    "rnn": _recurrent("SimpleRNN"),
    "gru": Rule(
        "GRU gates z, r, h = r, z, n; bias (2, 3u) = bias_ih, bias_hh",
        {
            "kernel": (Turn("weight_ih_l0", _GATES, _THREE),),
            "recurrent_kernel": (Turn("weight_hh_l0", _GATES, _THREE),),
            "bias": tuple(
                Turn(f"bias_{part}_l0", {2: pattern("row (g u) -> (g u)", _RESET_FIRST)}, _THREE, row)
                for row, part in enumerate(("ih", "hh"))
            ),
        },
    ),
    "attention": Rule(
        "MultiHeadAttention kernel (E, H, d) = weight (H·d, E)",
        {
            "kernel": (Turn("weight", {3: pattern("e h d -> (h d) e")}),),
            "bias": (Turn("bias", {2: pattern("h d -> (h d)")}),),
        },
    ),
    "attention output": Rule(
        "MultiHeadAttention output kernel (H, d, E) = out_proj weight (E, H·d)",
        {"kernel": (Turn("weight", {3: pattern("h d e -> e (h d)")}),)},
    ),
    "paddle linear": Rule(
        "Paddle Linear weight (I, O) = Linear weight (O, I)", {"weight": (Turn("weight", _MATRIX),)}
    ),
    "paddle batch norm": Rule(
        "_mean, _variance = BatchNorm running_mean, running_var",
        {"_mean": (Turn("running_mean"),), "_variance": (Turn("running_var"),)},
    ),
}

_DIRECTION = re.compile(r"(?P<forward>forward|backward)_.+")


def as_stored(checkpoint: Checkpoint) -> list[Item]:
    """Return the tensors as they are."""
    return [stored(tensor) for tensor in checkpoint.tensors]


def stored(tensor: Tensor) -> Item:
    """Return a tensor as it is."""
    return Item(tensor.name, tensor, (tensor,))


def in_torch_layout(checkpoint: Checkpoint) -> list[Item]:
    """Return the tensors in PyTorch's layout and by PyTorch's names, where rules say how.

    One tensor may give several items: a GRU's bias. The three parts of an attention's input, and the two
    biases of an LSTM, are put together by ``meeting.met``, where the other side has them in one.
    """
    turned = {id(tensor): items for layer in layers_of(checkpoint) for tensor, items in _layer_items(layer)}
    for doubt in doubtful(checkpoint):
        items = turned.get(id(doubt.tensor), [stored(doubt.tensor)])
        turned[id(doubt.tensor)] = [replace(item, doubt=doubt.why) for item in items]
    return [item for tensor in checkpoint.tensors for item in turned.get(id(tensor), [stored(tensor)])]


def under_torch_names(checkpoint: Checkpoint) -> list[Item]:
    """Return the tensors as they are stored, by PyTorch's names: enough where both sides hold them alike."""
    first = {id(item.sources[0]): item for item in reversed(in_torch_layout(checkpoint))}
    return [_as_named(tensor, first[id(tensor)]) for tensor in checkpoint.tensors]


def _as_named(tensor: Tensor, item: Item) -> Item:
    return Item(item.name, replace(tensor, path=item.tensor.path), (tensor,), item.rule)


def _layer_items(layer: Layer) -> Iterator[tuple[Tensor, list[Item]]]:
    rule = RULES.get(layer.kind or "")
    for name, tensor in layer.variables.items():
        if rule is not None and (turns := rule.turns.get(name)) is not None:
            items = [_turned(tensor, layer, rule, turn) for turn in turns]
            yield tensor, [item for item in items if item is not None] or [stored(tensor)]
        elif layer.kind is not None and steps_of(tensor.path) != (place := _place(layer, name)):
            yield tensor, [_named(tensor, place, None)]  # what is called alike in both: a numbered bias


def _turned(tensor: Tensor, layer: Layer, rule: Rule, turn: Turn) -> Item | None:
    """Return what a variable becomes, or None where its shape isn't the rule's."""
    path = _place(layer, turn.leaf)
    if not turn.ways:
        return _named(tensor, path, None if path == steps_of(tensor.path) else rule.text)
    way = turn.ways.get(len(tensor.shape))
    if way is None:
        return None
    sizes = {**turn.sizes, **layer.sizes}
    try:
        lengths = lengths_of(tensor.shape, way, sizes)
        made = arranged(tensor, way, path, sizes=sizes, row=turn.row)
    except Unfit:
        return None

    def back(given: Tensor, at: int) -> Tensor:
        return arranged(given, way.inverse(), tensor.path, sizes=lengths)

    return Item(".".join(path), made, (tensor,), rule.text, turn.row, back=back)


def _named(tensor: Tensor, path: Steps, rule: str | None) -> Item:
    made = replace(tensor, path=path)
    return Item(".".join(path), made, (tensor,), rule)


def _place(layer: Layer, leaf: str) -> Steps:
    """Return the path that PyTorch has, which knows no step for a cell or its direction."""
    place, last = layer.place, tuple(leaf.split("."))
    if layer.kind in ("lstm", "gru", "rnn"):
        if place and CELL.fullmatch(place[-1]):
            place = place[:-1]
        if len(place) > 1 and (found := _DIRECTION.fullmatch(place[-1])):
            place = place[:-1]
            last = (f"{last[0]}_reverse",) if found["forward"] == "backward" else last
    if layer.kind in ("attention", "attention output"):
        place = (*place[:-1], ATTENTION[place[-1].lstrip("_")])
    return (*place, *last)
