"""Conversion of the tensors of every framework to PyTorch's names and layout, by type of layer.

``RULES`` is the table: for each variable of a layer, its name in PyTorch and the pattern that rearranges the
stored axes. Patterns can be inverted for the way back. Tensors without a rule keep their names and layouts.

Source: AlexanderLutsenko/nobuco ``node_converters/``, huggingface/transformers
``modeling_tf_pytorch_utils.py``, keras-team/keras ``layers/rnn/lstm.py`` and ``gru.py``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.layers import DoubtReason
from ckpttool.core.tensor import Path, Tensor
from ckpttool.weights.pairing.layers import (
    ATTENTION,
    CELL,
    Steps,
    WeightLayer,
    layers_of,
    layout_doubts,
    steps_of,
)
from ckpttool.weights.pairing.rearrangement import (
    LayoutMismatch,
    Pattern,
    add_tensors,
    concatenate,
    cut,
    lengths_of,
    parse_pattern,
    rearrange,
    zeros,
)

Back = Callable[[Tensor, int], Tensor]


@dataclass(frozen=True, slots=True)
class LayoutItem:
    """One tensor as it is compared.

    Attributes:
        name: Name for the comparison: PyTorch's if a rule applies.
        tensor: Lazy; transposed, sliced or joined if a rule applies.
        sources: The stored tensors that it is made of; only itself if it is as stored.
        rule: Text of the layout rule that was applied, or None.
        row: Index of the source's row that this item is, or None.
        doubt: Reason why its elements may still be in another order than PyTorch's, or None.
        back: Inverse conversion, (tensor, index of the source) -> source; None if layouts are equal.
    """

    name: str
    tensor: Tensor
    sources: tuple[Tensor, ...]
    rule: str | None = None
    row: int | None = None
    doubt: DoubtReason | None = None
    back: Back | None = field(default=None, compare=False, repr=False)

    def to_source(self, given: Tensor, at: int = 0) -> Tensor:
        """Return ``given``, which is in this item's layout, converted back to the layout of source ``at``.

        An item that is one row of its source gives a matrix of one row.

        Raises:
            LayoutMismatch: Its shape is not the item's.
        """
        if given.shape != self.tensor.shape:
            raise LayoutMismatch(f"shape {list(given.shape)}, not {list(self.tensor.shape)}")
        source = self.sources[at]
        made = given if self.back is None else self.back(given, at)
        return replace(made, path=source.path, role=source.role, key=source.key, shares_with=None)


@dataclass(frozen=True, slots=True)
class VariableLayout:
    """Conversion of one variable to a tensor of PyTorch.

    Attributes:
        leaf: Its name in PyTorch, relative to the layer.
        patterns: Pattern by number of axes; empty if the layouts are equal.
        sizes: Lengths of named axes that don't follow from the shape.
        row: Index of the row of the stored tensor that becomes this tensor, or None for all of it.
    """

    leaf: str
    patterns: Mapping[int, Pattern] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    row: int | None = None


@dataclass(frozen=True, slots=True)
class LayoutRule:
    """Layout of one type of layer.

    Attributes:
        text: The rule in words, for notes.
        variables: Conversions by variable of the other framework.
        modules: Classes of PyTorch whose weights the rule makes.
    """

    text: str
    variables: Mapping[str, tuple[VariableLayout, ...]]
    modules: tuple[str, ...] = ()


CONVOLUTIONS = {
    3: parse_pattern("k i o -> o i k"),
    4: parse_pattern("h w i o -> o i h w"),
    5: parse_pattern("d h w i o -> o i d h w"),
}
_DEPTHWISE = {3: parse_pattern("k c m -> (c m) 1 k"), 4: parse_pattern("h w c m -> (c m) 1 h w")}
_MATRIX = {2: parse_pattern("i o -> o i")}
# LSTM gates have the same order in both frameworks (i, f, g, o = i, f, c, o), so a transpose is enough. A
# GRU's gates are z, r, h in Keras and r, z, n in PyTorch: the axis ``g`` is permuted. Its bias (2, 3u) has a
# row for the input and one for the recurrent kernel, which PyTorch stores as two vectors.
_RESET_FIRST = (1, 0, 2)
_GATES = {2: parse_pattern("i (g u) -> (g u) i", _RESET_FIRST)}
_THREE = {"g": 3}
DENSE = "Dense kernel (I, O) = Linear weight (O, I)"
CONVOLUTION = "convolution kernel (k…, I, O) = weight (O, I, k…)"
FLATTENED = "Dense kernel after a flatten (H·W·C, O) = Linear weight (O, C·H·W)"

# Keras flattens channels last, PyTorch channels first: beyond the transpose, the inputs change order.
FLATTEN = parse_pattern("(h w c) o -> o (c h w)")
_NORM = {"gamma": (VariableLayout("weight"),), "beta": (VariableLayout("bias"),)}
_STATISTICS = {
    "moving_mean": (VariableLayout("running_mean"),),
    "moving_variance": (VariableLayout("running_var"),),
}


def _recurrent(name: str, module: str) -> LayoutRule:
    return LayoutRule(
        f"{name} kernel (I, g·u), recurrent_kernel (u, g·u) = weight_ih (g·u, I), weight_hh (g·u, u)",
        {
            "kernel": (VariableLayout("weight_ih_l0", _MATRIX),),
            "recurrent_kernel": (VariableLayout("weight_hh_l0", _MATRIX),),
            "bias": (VariableLayout("bias_l0"),),
        },
        (module,),
    )


RULES: Mapping[str, LayoutRule] = {
    "dense": LayoutRule(
        DENSE, {"kernel": (VariableLayout("weight", _MATRIX),)}, ("Linear", "NonDynamicallyQuantizableLinear")
    ),
    "flattened": LayoutRule(FLATTENED, {"kernel": (VariableLayout("weight", {2: FLATTEN}),)}),
    "conv": LayoutRule(
        CONVOLUTION, {"kernel": (VariableLayout("weight", CONVOLUTIONS),)}, ("Conv1d", "Conv2d", "Conv3d")
    ),
    "transposed conv": LayoutRule(
        "transposed convolution kernel (k…, O, I) = weight (I, O, k…)",
        {"kernel": (VariableLayout("weight", CONVOLUTIONS),)},
        ("ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d"),
    ),
    "depthwise": LayoutRule(
        "depthwise kernel (k…, C, m) = convolution weight (C·m, 1, k…)",
        {"depthwise_kernel": (VariableLayout("weight", _DEPTHWISE),)},
    ),
    "separable": LayoutRule(
        "separable convolution = a depthwise and a pointwise convolution",
        {
            "depthwise_kernel": (VariableLayout("depthwise.weight", _DEPTHWISE),),
            "pointwise_kernel": (VariableLayout("pointwise.weight", CONVOLUTIONS),),
            "bias": (VariableLayout("pointwise.bias"),),
        },
    ),
    "batch norm": LayoutRule(
        "gamma, beta, moving_mean, moving_variance = BatchNorm weight, bias, running_mean, running_var",
        _NORM | _STATISTICS,
        ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "SyncBatchNorm"),
    ),
    "norm": LayoutRule("gamma, beta = norm weight, bias", _NORM, ("LayerNorm", "GroupNorm")),
    "rms norm": LayoutRule("scale = RMSNorm weight", {"scale": (VariableLayout("weight"),)}),
    "embedding": LayoutRule(
        "embeddings (V, E) = Embedding weight (V, E)",
        {"embeddings": (VariableLayout("weight"),)},
        ("Embedding",),
    ),
    "lstm": _recurrent("LSTM", "LSTM"),
    "rnn": _recurrent("SimpleRNN", "RNN"),
    "gru": LayoutRule(
        "GRU gates z, r, h = r, z, n; bias (2, 3u) = bias_ih, bias_hh",
        {
            "kernel": (VariableLayout("weight_ih_l0", _GATES, _THREE),),
            "recurrent_kernel": (VariableLayout("weight_hh_l0", _GATES, _THREE),),
            "bias": tuple(
                VariableLayout(
                    f"bias_{part}_l0", {2: parse_pattern("row (g u) -> (g u)", _RESET_FIRST)}, _THREE, row
                )
                for row, part in enumerate(("ih", "hh"))
            ),
        },
        ("GRU",),
    ),
    "attention": LayoutRule(
        "MultiHeadAttention kernel (E, H, d) = weight (H·d, E)",
        {
            "kernel": (VariableLayout("weight", {3: parse_pattern("e h d -> (h d) e")}),),
            "bias": (VariableLayout("bias", {2: parse_pattern("h d -> (h d)")}),),
        },
    ),
    "attention output": LayoutRule(
        "MultiHeadAttention output kernel (H, d, E) = out_proj weight (E, H·d)",
        {"kernel": (VariableLayout("weight", {3: parse_pattern("h d e -> e (h d)")}),)},
    ),
    "paddle linear": LayoutRule(
        "Paddle Linear weight (I, O) = Linear weight (O, I)", {"weight": (VariableLayout("weight", _MATRIX),)}
    ),
    "paddle batch norm": LayoutRule(
        "_mean, _variance = BatchNorm running_mean, running_var",
        {"_mean": (VariableLayout("running_mean"),), "_variance": (VariableLayout("running_var"),)},
    ),
}

_DIRECTION = re.compile(r"(?P<forward>forward|backward)_.+")


def stored_item(tensor: Tensor) -> LayoutItem:
    """Return the item of a tensor as stored."""
    return LayoutItem(tensor.name, tensor, (tensor,))


def torch_layout_items(checkpoint: Checkpoint) -> list[LayoutItem]:
    """Return the tensors with PyTorch's layouts and names, if rules apply.

    A GRU's bias gives two items. Parameters that the other side has fused (an attention's input projections,
    an LSTM's biases) are fused by ``fuse_split_parameters``.
    """
    converted: dict[int, list[LayoutItem]] = {}
    for layer in layers_of(checkpoint):
        rule = RULES.get(layer.layout or "")
        for name, tensor in layer.variables.items():
            if rule is not None and (variables := rule.variables.get(name)) is not None:
                items = [_converted_item(tensor, layer, rule, layout) for layout in variables]
                converted[id(tensor)] = [one for one in items if one is not None] or [stored_item(tensor)]
            elif layer.layout is not None and steps_of(tensor.path) != (path := _torch_path(layer, name)):
                # No rule for this variable, since both frameworks name it alike; in the file it had a number.
                converted[id(tensor)] = [_named_item(tensor, path, None)]
    for tensor, reason in layout_doubts(checkpoint):
        doubtful = converted.get(id(tensor), [stored_item(tensor)])
        converted[id(tensor)] = [replace(item, doubt=reason) for item in doubtful]
    return [one for tensor in checkpoint.tensors for one in converted.get(id(tensor), [stored_item(tensor)])]


def torch_name_items(checkpoint: Checkpoint) -> list[LayoutItem]:
    """Return the tensors with PyTorch's names and the stored layouts."""
    first = {id(item.sources[0]): item for item in reversed(torch_layout_items(checkpoint))}
    named = ((tensor, first[id(tensor)]) for tensor in checkpoint.tensors)
    return [_named_item(tensor, item.tensor.path, item.rule, item.name) for tensor, item in named]


def _converted_item(
    tensor: Tensor, layer: WeightLayer, rule: LayoutRule, layout: VariableLayout
) -> LayoutItem | None:
    """Return the converted variable, or None if its shape doesn't fit the rule."""
    path = _torch_path(layer, layout.leaf)
    if not layout.patterns:
        return _named_item(tensor, path, None if path == steps_of(tensor.path) else rule.text)
    pattern = layout.patterns.get(len(tensor.shape))
    if pattern is None:
        return None
    sizes = {**layout.sizes, **layer.sizes}
    try:
        lengths = lengths_of(tensor.shape, pattern, sizes)
        converted_tensor = rearrange(tensor, pattern, path, sizes=sizes, row=layout.row)
    except LayoutMismatch:
        return None

    # The way back needs the length of each named axis, and the new shape may have several of them in one:
    # ``(h w c)``. So the lengths of the way here are kept.
    def back(given: Tensor, at: int) -> Tensor:
        return rearrange(given, pattern.inverse(), tensor.path, sizes=lengths)

    return LayoutItem(".".join(path), converted_tensor, (tensor,), rule.text, layout.row, back=back)


def _named_item(tensor: Tensor, path: Path, rule: str | None, name: str | None = None) -> LayoutItem:
    name = ".".join(map(str, path)) if name is None else name
    return LayoutItem(name, replace(tensor, path=path), (tensor,), rule)


def _torch_path(layer: WeightLayer, leaf: str) -> Steps:
    """Return the path in PyTorch, which has no level for a recurrent layer's cell or direction."""
    place, last = layer.place, tuple(leaf.split("."))
    if layer.layout in ("lstm", "gru", "rnn"):
        if place and CELL.fullmatch(place[-1]):
            place = place[:-1]
        if len(place) > 1 and (direction := _DIRECTION.fullmatch(place[-1])):
            place = place[:-1]
            last = (f"{last[0]}_reverse",) if direction["forward"] == "backward" else last
    if layer.layout in ("attention", "attention output"):
        place = (*place[:-1], ATTENTION[place[-1].lstrip("_")])
    return (*place, *last)


# Parameters that are one tensor in one framework and several in the other ---------------------------


SUMMED = "LSTM bias = bias_ih + bias_hh"
JOINED = "query, key and value = in_proj"

_PROJECTED = re.compile(r"(?P<place>(?:.+\.)?)(?P<part>[qkv])_proj\.(?P<leaf>weight|bias)")
_BIAS = re.compile(r"(?P<place>(?:.+\.)?)bias_(?P<part>ih|hh)(?P<layer>_l\d+(?:_reverse)?)")


def fuse_split_parameters(items: Iterable[LayoutItem], others: Iterable[LayoutItem]) -> list[LayoutItem]:
    """Return one side's items, with those fused that the other side has fused.

    An attention's query, key and value projections become ``in_proj``; an LSTM's two biases their sum.
    """
    fused, leaves = list(items), {item.name.rpartition(".")[2] for item in others}
    if {"in_proj_weight", "in_proj_bias"} & leaves:
        fused = fuse_attention_inputs(fused)
    if any(leaf.startswith("bias_l0") for leaf in leaves):
        fused = sum_lstm_biases(fused)
    return fused


def fuse_attention_inputs(items: list[LayoutItem], wanted: Collection[int] | None = None) -> list[LayoutItem]:
    """Return items with each triple of query, key and value fused into ``in_proj``, if the shapes fit.

    Args:
        items: All items of one side.
        wanted: ``id`` of the items that may be fused; None for all.
    """
    parts: dict[tuple[str, str], dict[str, LayoutItem]] = {}
    for item in items:
        match = _PROJECTED.fullmatch(item.name)
        if match and (wanted is None or id(item) in wanted):
            parts.setdefault((match["place"], match["leaf"]), {})[match["part"]] = item
    fused = {}
    for (place, leaf), members in parts.items():
        if members.keys() == {"q", "k", "v"}:
            path = steps_of((f"{place}in_proj_{leaf}",))
            fused.update(_fuse_members([members[part] for part in "qkv"], path, JOINED))
    return _replace_members(items, fused)


def sum_lstm_biases(items: list[LayoutItem]) -> list[LayoutItem]:
    """Return items with the two biases of each LSTM replaced by their sum."""
    parts: dict[tuple[str, str], dict[str, LayoutItem]] = {}
    recurrent = {item.name: item.tensor.shape for item in items if ".weight_hh" in f".{item.name}"}
    for item in items:
        if match := _BIAS.fullmatch(item.name):
            parts.setdefault((match["place"], match["layer"]), {})[match["part"]] = item
    fused = {}
    for (place, layer), members in parts.items():
        shape = recurrent.get(f"{place}weight_hh{layer}", ())
        is_gru = len(shape) == 2 and shape[0] == 3 * shape[1]  # keeps its two biases apart in Keras, too
        if members.keys() == {"ih", "hh"} and not is_gru:
            path = steps_of((f"{place}bias{layer}",))
            fused.update(_fuse_members([members["ih"], members["hh"]], path, SUMMED))
    return _replace_members(items, fused)


def _fuse_members(members: list[LayoutItem], path: Steps, rule: str) -> dict[int, LayoutItem | None]:
    """Return a replacement by ``id`` of member: the fused item for the first, None for the others."""
    tensors = [item.tensor for item in members]
    try:
        tensor = concatenate(tensors, path) if rule is JOINED else add_tensors(tensors[0], tensors[1], path)
    except LayoutMismatch:
        return {}
    # The way back: a part of in_proj is a slice of its rows, converted by the member's own rule; each member
    # may itself have several sources, so a number of a source is first mapped to (member, number in it).
    rows = [item.tensor.shape[0] for item in members] if rule is JOINED else []
    places = [(number, at) for number, item in enumerate(members) for at in range(len(item.sources))]

    def back(given: Tensor, at: int) -> Tensor:
        if rule is not JOINED:  # a sum is given back as (sum, zeros)
            return given if at == 0 else zeros(given, given.path)
        number, inner = places[at]
        member = members[number]
        return member.to_source(cut(given, sum(rows[:number]), rows[number], member.tensor.path), inner)

    whole = LayoutItem(
        ".".join(path),
        tensor,
        tuple(source for item in members for source in item.sources),
        rule if members[0].rule is None else f"{members[0].rule}; {rule}",
        doubt=next((item.doubt for item in members if item.doubt), None),
        back=back,
    )
    return {id(members[0]): whole} | {id(item): None for item in members[1:]}


def _replace_members(items: list[LayoutItem], fused: Mapping[int, LayoutItem | None]) -> list[LayoutItem]:
    replaced = (fused.get(id(item), item) for item in items)
    return [item for item in replaced if item is not None]
