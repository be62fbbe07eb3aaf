"""Brings weights to the layout and names of PyTorch or Keras, if the type of each layer is known."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ckpttool.checkpoint import Checkpoint
from ckpttool.converting.content_view import ContentView, view_of
from ckpttool.converting.layout_checks import (
    is_layout_unknown,
    loss_notes,
    name_list,
    norm_notes,
    refusal_text,
)
from ckpttool.converting.ties import carry_ties
from ckpttool.errors import UsageError
from ckpttool.pairing.families import family_of
from ckpttool.pairing.layers import ATTENTION, UNWIRED, Doubt, layout_doubts, may_be_image
from ckpttool.pairing.layouts import RULES, LayoutItem, LayoutRule, Turn, torch_layout_items
from ckpttool.pairing.rearrangement import (
    Pattern,
    Unfit,
    add_tensors,
    concatenate,
    cut,
    pattern,
    rearrange,
    zeros,
)
from ckpttool.pairing.split_parameters import JOINED, SUMMED, fuse_attention_inputs
from ckpttool.report import counted
from ckpttool.tensor import Path, Role, Tensor
from ckpttool.writing.interface import Content

_HOW = "--map with a [[tensor]] says how it lies, and --model takes the layout of another file"
_ONE_BIAS = ("bias_l0", "bias_l0_reverse")
_CLASSES = {RULES["dense"].text: "Dense", RULES["gru"].text: "GRU"}
"""The layers of which a kernel alone doesn't say in which order it is, by the rules that make them."""
_Conversions = list[tuple[Tensor, Tensor, str | None]]
"""Each tensor as it was and as it is now, and the rule that made it so."""
Made = dict[int, list[tuple[Tensor, str | None]]]
"""For the ``id`` of each tensor, what it becomes with the rule; nothing for what another one has taken in."""
_MODEL = "--model FILE takes names and layouts from a file of Keras"
_CLASS = re.compile(r"(?:__torch__\.)?torch\.nn\.modules\.(?:\w+\.)*?(?:___torch_mangle_\d+\.)?(\w+)")
_KINDS = {
    "Linear": "dense",
    "NonDynamicallyQuantizableLinear": "dense",
    "Embedding": "embedding",
    "LayerNorm": "norm",
    "GroupNorm": "norm",
    "SyncBatchNorm": "batch norm",
    "LSTM": "lstm",
    "GRU": "gru",
    "RNN": "rnn",
    "MultiheadAttention": "multi-head",
    **{f"BatchNorm{n}d": "batch norm" for n in (1, 2, 3)},
    **{f"Conv{n}d": "conv" for n in (1, 2, 3)},
    **{f"ConvTranspose{n}d": "transposed conv" for n in (1, 2, 3)},
}
_IN_CHAINS = frozenset(
    (
        *(
            "Sequential",
            "Linear",
            "Embedding",
            "LayerNorm",
            "BatchNorm1d",
            "Dropout",
            "AlphaDropout",
            "Identity",
        ),
        *(
            "ReLU",
            "ReLU6",
            "LeakyReLU",
            "ELU",
            "SELU",
            "GELU",
            "SiLU",
            "Tanh",
            "Sigmoid",
            "Softplus",
            "Softmax",
        ),
    )
)
"""Modules behind which a tensor has its features along the last axis, as those before gave them."""
_ONCE_MORE = "_flat_weights"
"""The list in which a recurrent layer has its own weights once more."""
_RECURRENT = ("lstm", "gru", "rnn")
_INPUT = pattern("(h d) e -> e h d")
_INPUT_BIAS = pattern("(h d) -> h d")
_OUTPUT = pattern("e (h d) -> h d e")
_PARTS = ("query_dense", "key_dense", "value_dense")


def to_layout(content: Content, checkpoint: Checkpoint, layout: str) -> tuple[Content, list[str]]:
    """Return a content's weights in the layout and under the names of a framework, and which rules were used.

    Args:
        content: What is to be brought into the layout; it loses what its format alone needs.
        checkpoint: The source, of which the content is a part.
        layout: ``torch`` or ``keras``.
    """
    _require_weights(content)
    view = view_of(content, checkpoint)
    ends = _to_torch(view) if layout == "torch" else _to_keras(view)
    _require_single(ends)
    tensors = carry_ties((old, new) for old, new, _ in ends)
    rules = Counter(rule for _, _, rule in ends if rule is not None)
    notes = [f"{rule}: {counted(count, 'tensor')}" for rule, count in rules.items()] + norm_notes(rules)
    if not any(old is not new for old, new, _ in ends):
        return content, [f"all tensors lie as --layout {layout} wants them"]
    made = replace(content, tensors=tensors, tree=None, native={}, conventions="pytorch", layers={})
    if layout == "keras":
        layers = {new.name: _CLASSES[rule] for _, new, rule in ends if rule in _CLASSES}
        made = replace(made, conventions="keras", layers=layers)
    return made, notes + loss_notes(content, checkpoint)


def _require_weights(content: Content) -> None:
    state = next((tensor for tensor in content.tensors if tensor.role is Role.OPTIMIZER), None)
    if state is not None:
        told = "the state of an optimizer would not fit weights in another layout (use --only weights)"
        raise UsageError(f"{state.name}: {told}")


def _require_single(ends: _Conversions) -> None:
    known: dict[str, str] = {}
    for old, new, _ in ends:
        if known.setdefault(new.name, old.name) != old.name:
            told = f"{known[new.name]!r} and {old.name!r} would both be called so (--map renames one)"
            raise UsageError(f"{new.name}: {told}")


# To PyTorch -------------------------------------------------------------------------------------------


def _to_torch(view: ContentView) -> _Conversions:
    """Return for each tensor of PyTorch the one that it is made of."""
    items = [*_biases(_joined_inputs(torch_layout_items(view.checkpoint)))]
    free = [item for item in items if not _is_held(view, item)]
    doubts = [
        one for one in layout_doubts(view.checkpoint) if view.tensors[id(one.tensor)].name not in view.held
    ]
    if doubts:
        raise UsageError(refusal_text(doubts))
    unknown = [item.sources[0] for item in free if is_layout_unknown(item, view.checkpoint)]
    if unknown:
        told = "nothing says of what type of layer it is, and its layout may be another"
        raise UsageError(f"{name_list(unknown)}: {told} ({_HOW})")
    ends: _Conversions = []
    for item in items:
        own, is_held = view.tensors[id(item.sources[0])], _is_held(view, item)
        ends.append((own, own, None) if is_held else (own, _torch_named(view, item, own, items), item.rule))
    return ends


def _is_held(view: ContentView, item: LayoutItem) -> bool:
    return view.tensors[id(item.sources[0])].name in view.held


def _torch_named(view: ContentView, item: LayoutItem, own: Tensor, items: Sequence[LayoutItem]) -> Tensor:
    """Return what an item is, under the name that a map gave it, if one did."""
    given = view.named.get(item.sources[0].name)
    if given is None:
        is_same = item.tensor is item.sources[0] or item.tensor.name == own.name
        path = own.path if is_same else _path(item)
        return own if is_same and item.rule is None else replace(item.tensor, path=path, key=None)
    if len(item.sources) > 1 or sum(one.sources == item.sources for one in items) > 1:
        told = "it is not one tensor in both layouts, and gets names of its own (take the line out)"
        raise UsageError(f"{item.sources[0].name} → {given}: {told}")
    return replace(item.tensor, path=own.path, key=None)


def _path(item: LayoutItem) -> Path:
    """Return the path of a state dict: one name, with dots."""
    return (".".join(map(str, item.tensor.path)),)


def _joined_inputs(items: list[LayoutItem]) -> list[LayoutItem]:
    """Return items of which each attention has its input in one, as PyTorch has it where it is square."""
    inputs = [item for item in items if _is_input(item)]
    others = {item.tensor.path[:-2] for item in inputs if len({1, *item.tensor.shape}) > 2}
    return fuse_attention_inputs(items, {id(item) for item in inputs if item.tensor.path[:-2] not in others})


def _is_input(item: LayoutItem) -> bool:
    """Tell whether an item is of the query, key or value of Keras's attention."""
    steps = item.tensor.path
    is_part = any(str(step).lstrip("_") in ATTENTION for step in item.sources[0].path)
    return is_part and len(steps) > 1 and str(steps[-2]) in ("q_proj", "k_proj", "v_proj")


def _biases(items: Iterable[LayoutItem]) -> Iterator[LayoutItem]:
    """Yield items of which a recurrent layer's bias is two, as PyTorch has it: the sum, and zeros."""
    for item in items:
        leaf = str(item.tensor.path[-1]) if item.tensor.path else ""
        if leaf not in _ONE_BIAS:
            yield item
            continue
        for kind in ("ih", "hh"):
            path = (*item.tensor.path[:-1], leaf.replace("bias_", f"bias_{kind}_"))
            tensor = replace(item.tensor, path=path) if kind == "ih" else zeros(item.tensor, path)
            yield replace(item, name=".".join(map(str, path)), tensor=tensor, rule=SUMMED)


# To Keras ---------------------------------------------------------------------------------------------


def _to_keras(view: ContentView) -> _Conversions:
    """Return for each tensor of Keras the one that it is made of."""
    checkpoint = view.checkpoint
    if family_of(checkpoint.conventions) == "keras":
        return [(one, one, None) for one in view.tensors.values()]
    if view.named:
        own, given = next(iter(view.named.items()))
        told = "--layout keras gives names of its own, and a map that renames has no say in them"
        raise UsageError(f"{own} → {given}: {told} (use a [[tensor]], or --model)")
    made: Mapping[int, Sequence[tuple[Tensor, str | None]]] = to_keras(checkpoint, view.held)
    return [
        (tensor, new, rule)
        for tensor in checkpoint.tensors
        for new, rule in made.get(id(tensor), [(tensor, None)])
    ]


class TorchModule(NamedTuple):
    """A module of PyTorch: the kind of its layer, and what else is known of it."""

    kind: str | None
    class_name: str
    attributes: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class _TorchLayer:
    """The tensors of one module."""

    prefix: str
    module: TorchModule
    tensors: Mapping[str, Tensor]

    @property
    def place(self) -> tuple[str, ...]:
        return tuple(self.prefix.split(".")) if self.prefix else ()


def to_keras(checkpoint: Checkpoint, held: Collection[str]) -> Made:
    """Return what tensors of PyTorch become in Keras; what is not in it stays as it is.

    Args:
        checkpoint: Of PyTorch.
        held: Names of tensors that stay.
    """
    modules = _modules(checkpoint.metadata)
    if not modules:
        told = "it does not say of what types its layers are"
        raise UsageError(f"{checkpoint.path}: {told}, and names alone don't tell it ({_MODEL})")
    layers = [*_torch_layers(checkpoint, modules, held)]
    if not _is_plain_chain(modules):
        _require_small(layers)
    made: Made = {}
    for layer in layers:
        made.update(_keras_variables(layer))
    return made


def _modules(metadata: Mapping[str, object]) -> dict[str, TorchModule]:
    """Return the modules by their names: those of a pickled module, or of a program of TorchScript."""
    held = [metadata, *(one for one in metadata.values() if isinstance(one, Mapping))]
    found: dict[str, TorchModule] = {}
    for one in held:
        classes, attributes = one.get("modules"), one.get("attributes")
        if isinstance(classes, Mapping):
            known = attributes if isinstance(attributes, Mapping) else {}
            for prefix, name in classes.items():
                front = f"{prefix}." if prefix else ""
                own = {key[len(front) :]: value for key, value in known.items() if key.startswith(front)}
                found[str(prefix)] = _module(str(name), own)
    if not found and isinstance(program := metadata.get("attributes"), Mapping):
        pending: list[tuple[str, Mapping[str, object]]] = [("", program)]
        while pending:
            prefix, module = pending.pop()
            if isinstance(name := module.get("<class>"), str):
                found[prefix] = _module(name, module)
            front = f"{prefix}." if prefix else ""
            pending += [(f"{front}{key}", one) for key, one in module.items() if isinstance(one, Mapping)]
    return found


def _module(name: str, attributes: Mapping[str, object]) -> TorchModule:
    match = _CLASS.fullmatch(name)
    return TorchModule(_KINDS.get(match[1]) if match else None, name, attributes)


def _torch_layers(
    checkpoint: Checkpoint, modules: Mapping[str, TorchModule], held: Collection[str]
) -> Iterator[_TorchLayer]:
    groups: dict[str, dict[str, Tensor]] = {}
    for tensor in checkpoint.tensors:
        prefix, _, leaf = tensor.name.rpartition(".")
        if tensor.name not in held:
            groups.setdefault(prefix, {})[leaf] = tensor
    for prefix, group in groups.items():
        module = modules.get(prefix, TorchModule(None, "", {}))
        is_inner = prefix.endswith(".out_proj") and modules.get(prefix[:-9], module).kind == "multi-head"
        if is_inner:
            around = modules[prefix[:-9]]
            module = TorchModule("multi-head output", around.class_name, around.attributes)
        yield _TorchLayer(prefix, module, group)


def _is_plain_chain(modules: Mapping[str, TorchModule]) -> bool:
    """Tell whether all modules follow each other, and none of them flattens or reshapes anything."""
    names = [match[1] if (match := _CLASS.fullmatch(one.class_name)) else "" for one in modules.values()]
    around = {prefix.rpartition(".")[0] for prefix in modules if prefix}
    chains = {prefix for prefix, name in zip(modules, names, strict=True) if name == "Sequential"}
    plain = all(name in _IN_CHAINS for name in names)
    return plain and "" in modules and around <= chains


def _require_small(layers: list[_TorchLayer]) -> None:
    """Require that no linear layer may stand behind a flatten or before a reshape."""
    linear = [one.tensors.get("weight") for one in layers if one.module.kind == "dense"]
    doubts = [
        Doubt(one, UNWIRED) for one in linear if one and len(one.shape) == 2 and may_be_image(*one.shape)
    ]
    if doubts:
        raise UsageError(refusal_text(doubts, "Keras"))


def _keras_variables(layer: _TorchLayer) -> Made:
    """Return what the tensors of a module become."""
    kind = layer.module.kind
    if layer.place[-1:] == (_ONCE_MORE,) and all(one.shares_with for one in layer.tensors.values()):
        return {id(tensor): [] for tensor in layer.tensors.values()}
    if kind == "multi-head":
        return _attention(layer)
    if kind == "multi-head output":
        return _attention_output(layer)
    if kind in _RECURRENT:
        return _recurrent(layer, kind)
    rule = RULES.get(kind or "")
    made: Made = {}
    for leaf, tensor in layer.tensors.items():
        if leaf == "num_batches_tracked" and kind == "batch norm":
            made[id(tensor)] = []
        elif rule is not None and (found := _variable(rule, leaf)) is not None:
            made[id(tensor)] = [_keras_tensor(layer, tensor, rule, *found)]
        elif leaf == "bias" and kind is not None:
            made[id(tensor)] = [(_under_keras_name(layer, tensor, "bias"), None)]
        elif len(tensor.shape) > 1:
            raise UsageError(_no_rule(layer, tensor))
    return made


def _variable(rule: LayoutRule, leaf: str) -> tuple[str, Turn] | None:
    """Return what Keras calls a variable, and how it lies there."""
    return next(
        ((name, turn) for name, turns in rule.turns.items() for turn in turns if turn.leaf == leaf), None
    )


def _keras_tensor(
    layer: _TorchLayer, tensor: Tensor, rule: LayoutRule, name: str, turn: Turn
) -> tuple[Tensor, str | None]:
    kind = layer.module.kind
    if kind == "transposed conv" and not _is_one_group(layer):
        raise UsageError(f"{tensor.name}: Keras has no transposed convolution in groups ({_MODEL})")
    ways = {len(way.result): way for way in turn.ways.values()}
    if not ways and kind != "embedding" and len(tensor.shape) > 1:
        raise UsageError(_no_rule(layer, tensor))
    if not ways:
        return _under_keras_name(layer, tensor, name), rule.text
    if len(tensor.shape) not in ways:
        raise UsageError(_no_rule(layer, tensor))
    return _rearranged(layer, tensor, ways[len(tensor.shape)].inverse(), name, turn.sizes), rule.text


def _is_one_group(layer: _TorchLayer) -> bool:
    if "groups" in layer.module.attributes:
        return layer.module.attributes["groups"] == 1
    bias = layer.tensors.get("bias")
    return bias is not None and bias.shape == layer.tensors["weight"].shape[1:2]


def _no_rule(layer: _TorchLayer, tensor: Tensor) -> str:
    of = layer.module.class_name.rpartition(".")[2]
    told = f"there is no rule for {of}" if of else "nothing says of what type of layer it is"
    return f"{tensor.name}: {told} ({_MODEL}; or --map with a [[tensor]] says how it lies)"


def _under_keras_name(layer: _TorchLayer, tensor: Tensor, *names: str) -> Tensor:
    return replace(tensor, path=(*layer.place, *names), key=None)


def _rearranged(
    layer: _TorchLayer, tensor: Tensor, way: Pattern, name: str, sizes: Mapping[str, int], *inner: str
) -> Tensor:
    try:
        return rearrange(tensor, way, (*layer.place, *inner, name), sizes=sizes)
    except Unfit as failure:
        raise UsageError(f"{tensor.name}: {failure} ({_MODEL})") from failure


# Layers of several tensors ------------------------------------------------------------------------------


def _recurrent(layer: _TorchLayer, kind: str) -> Made:
    """Return what a recurrent layer becomes: Keras has one layer and one direction in each."""
    leaves = {"weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0"}
    if rest := [leaf for leaf in layer.tensors if leaf not in leaves]:
        told = "Keras has one layer for each layer and direction of it, with names of their own"
        raise UsageError(f"{layer.tensors[rest[0]].name}: {told} ({_MODEL})")
    rule, made = RULES[kind], Made()
    for leaf in ("weight_ih_l0", "weight_hh_l0"):
        if (tensor := layer.tensors.get(leaf)) is not None and (found := _variable(rule, leaf)) is not None:
            name, turn = found
            way = next(iter(turn.ways.values())).inverse()
            made[id(tensor)] = [(_rearranged(layer, tensor, way, name, turn.sizes, "cell"), rule.text)]
    biases = [layer.tensors[leaf] for leaf in sorted(leaves & layer.tensors.keys()) if "bias" in leaf]
    if len(biases) == 2:
        hidden, own = biases
        path = (*layer.place, "cell", "bias")
        if kind == "gru":
            turn = rule.turns["bias"][0]
            way = next(iter(turn.ways.values())).inverse()
            rows = [_rearranged(layer, one, way, "bias", turn.sizes, "cell") for one in (own, hidden)]
            made[id(own)] = [(concatenate(rows, path), rule.text)]
        else:
            made[id(own)] = [(add_tensors(own, hidden, path), SUMMED)]
        made[id(hidden)] = []
    return made


def _attention(layer: _TorchLayer) -> Made:
    """Return what the input of an attention becomes: a kernel for each of query, key and value."""
    sizes, made = {"h": _heads(layer)}, Made()
    ways = {"in_proj_weight": (_INPUT, "kernel"), "in_proj_bias": (_INPUT_BIAS, "bias")}
    for leaf, tensor in layer.tensors.items():
        if leaf not in ways or not tensor.shape or tensor.shape[0] % len(_PARTS):
            raise UsageError(_no_rule(layer, tensor))
        way, name = ways[leaf]
        rows = tensor.shape[0] // len(_PARTS)
        thirds = [cut(tensor, at * rows, rows, tensor.path) for at in range(len(_PARTS))]
        made[id(tensor)] = [
            (_rearranged(layer, one, way, name, sizes, part), f"{RULES['attention'].text}; {JOINED}")
            for part, one in zip(_PARTS, thirds, strict=True)
        ]
    return made


def _attention_output(layer: _TorchLayer) -> Made:
    around = replace(layer, prefix=layer.prefix.rpartition(".")[0])
    sizes, made = {"h": _heads(layer)}, Made()
    for leaf, tensor in layer.tensors.items():
        if leaf == "weight":
            found = _rearranged(around, tensor, _OUTPUT, "kernel", sizes, "output_dense")
            made[id(tensor)] = [(found, RULES["attention output"].text)]
        else:
            made[id(tensor)] = [(_under_keras_name(around, tensor, "output_dense", leaf), None)]
    return made


def _heads(layer: _TorchLayer) -> int:
    heads = layer.module.attributes.get("num_heads")
    if isinstance(heads, int) and heads > 0:
        return heads
    first = next(iter(layer.tensors.values()))
    raise UsageError(f"{first.name}: the file does not say how many heads this attention has ({_MODEL})")
