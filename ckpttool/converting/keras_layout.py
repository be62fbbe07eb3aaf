"""PyTorch's weights in Keras's layout and by its names, where the file says of what class each module is."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from ckpttool.checkpoint import Checkpoint
from ckpttool.converting.known import refused
from ckpttool.errors import UsageError
from ckpttool.pairing.layers import UNWIRED, Doubt, may_be_image
from ckpttool.pairing.layouts import RULES, LayoutRule, Turn
from ckpttool.pairing.rearrangement import Pattern, Unfit, add_tensors, concatenate, cut, pattern, rearrange
from ckpttool.pairing.split_parameters import JOINED, SUMMED
from ckpttool.tensor import Tensor

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


class Module(NamedTuple):
    """A module of PyTorch: the kind of its layer, and what else is known of it."""

    kind: str | None
    class_name: str
    attributes: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class _Layer:
    """The tensors of one module."""

    prefix: str
    module: Module
    tensors: Mapping[str, Tensor]

    @property
    def place(self) -> tuple[str, ...]:
        return tuple(self.prefix.split(".")) if self.prefix else ()


def to_keras(checkpoint: Checkpoint, held: Collection[str]) -> Made:
    """Return what tensors of PyTorch become in Keras; what is not in it stays as it is.

    Args:
        checkpoint: Of PyTorch.
        held: Names of tensors that stay.

    Raises:
        UsageError: Nothing says how one of them is to lie.
    """
    modules = _modules(checkpoint.metadata)
    if not modules:
        told = "it does not say of what types its layers are"
        raise UsageError(f"{checkpoint.path}: {told}, and names alone don't tell it ({_MODEL})")
    layers = [*_layers(checkpoint, modules, held)]
    if not _is_plain_chain(modules):
        _require_small(layers)
    made: Made = {}
    for layer in layers:
        made.update(_made(layer))
    return made


def _modules(metadata: Mapping[str, object]) -> dict[str, Module]:
    """Return the modules by their names: those of a pickled module, or of a program of TorchScript."""
    held = [metadata, *(one for one in metadata.values() if isinstance(one, Mapping))]
    found: dict[str, Module] = {}
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


def _module(name: str, attributes: Mapping[str, object]) -> Module:
    match = _CLASS.fullmatch(name)
    return Module(_KINDS.get(match[1]) if match else None, name, attributes)


def _layers(checkpoint: Checkpoint, modules: Mapping[str, Module], held: Collection[str]) -> Iterator[_Layer]:
    groups: dict[str, dict[str, Tensor]] = {}
    for tensor in checkpoint.tensors:
        prefix, _, leaf = tensor.name.rpartition(".")
        if tensor.name not in held:
            groups.setdefault(prefix, {})[leaf] = tensor
    for prefix, group in groups.items():
        module = modules.get(prefix, Module(None, "", {}))
        is_inner = prefix.endswith(".out_proj") and modules.get(prefix[:-9], module).kind == "multi-head"
        if is_inner:
            around = modules[prefix[:-9]]
            module = Module("multi-head output", around.class_name, around.attributes)
        yield _Layer(prefix, module, group)


def _is_plain_chain(modules: Mapping[str, Module]) -> bool:
    """Tell whether all modules follow each other, and none of them flattens or reshapes anything."""
    names = [match[1] if (match := _CLASS.fullmatch(one.class_name)) else "" for one in modules.values()]
    around = {prefix.rpartition(".")[0] for prefix in modules if prefix}
    chains = {prefix for prefix, name in zip(modules, names, strict=True) if name == "Sequential"}
    plain = all(name in _IN_CHAINS for name in names)
    return plain and "" in modules and around <= chains


def _require_small(layers: list[_Layer]) -> None:
    """Require that no linear layer may stand behind a flatten or before a reshape.

    Raises:
        UsageError: One may.
    """
    linear = [one.tensors.get("weight") for one in layers if one.module.kind == "dense"]
    doubts = [
        Doubt(one, UNWIRED) for one in linear if one and len(one.shape) == 2 and may_be_image(*one.shape)
    ]
    if doubts:
        raise UsageError(refused(doubts, "Keras"))


def _made(layer: _Layer) -> Made:
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
            made[id(tensor)] = [_turned(layer, tensor, rule, *found)]
        elif leaf == "bias" and kind is not None:
            made[id(tensor)] = [(_named(layer, tensor, "bias"), None)]
        elif len(tensor.shape) > 1:
            raise UsageError(_no_rule(layer, tensor))
    return made


def _variable(rule: LayoutRule, leaf: str) -> tuple[str, Turn] | None:
    """Return what Keras calls a variable, and how it lies there."""
    return next(
        ((name, turn) for name, turns in rule.turns.items() for turn in turns if turn.leaf == leaf), None
    )


def _turned(
    layer: _Layer, tensor: Tensor, rule: LayoutRule, name: str, turn: Turn
) -> tuple[Tensor, str | None]:
    kind = layer.module.kind
    if kind == "transposed conv" and not _is_one_group(layer):
        raise UsageError(f"{tensor.name}: Keras has no transposed convolution in groups ({_MODEL})")
    ways = {len(way.result): way for way in turn.ways.values()}
    if not ways and kind != "embedding" and len(tensor.shape) > 1:
        raise UsageError(_no_rule(layer, tensor))
    if not ways:
        return _named(layer, tensor, name), rule.text
    if len(tensor.shape) not in ways:
        raise UsageError(_no_rule(layer, tensor))
    return _arranged(layer, tensor, ways[len(tensor.shape)].inverse(), name, turn.sizes), rule.text


def _is_one_group(layer: _Layer) -> bool:
    if "groups" in layer.module.attributes:
        return layer.module.attributes["groups"] == 1
    bias = layer.tensors.get("bias")
    return bias is not None and bias.shape == layer.tensors["weight"].shape[1:2]


def _no_rule(layer: _Layer, tensor: Tensor) -> str:
    of = layer.module.class_name.rpartition(".")[2]
    told = f"there is no rule for {of}" if of else "nothing says of what type of layer it is"
    return f"{tensor.name}: {told} ({_MODEL}; or --map with a [[tensor]] says how it lies)"


def _named(layer: _Layer, tensor: Tensor, *names: str) -> Tensor:
    return replace(tensor, path=(*layer.place, *names), key=None)


def _arranged(
    layer: _Layer, tensor: Tensor, way: Pattern, name: str, sizes: Mapping[str, int], *inner: str
) -> Tensor:
    try:
        return rearrange(tensor, way, (*layer.place, *inner, name), sizes=sizes)
    except Unfit as failure:
        raise UsageError(f"{tensor.name}: {failure} ({_MODEL})") from failure


# Layers of several tensors ------------------------------------------------------------------------------


def _recurrent(layer: _Layer, kind: str) -> Made:
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
            made[id(tensor)] = [(_arranged(layer, tensor, way, name, turn.sizes, "cell"), rule.text)]
    biases = [layer.tensors[leaf] for leaf in sorted(leaves & layer.tensors.keys()) if "bias" in leaf]
    if len(biases) == 2:
        hidden, own = biases
        path = (*layer.place, "cell", "bias")
        if kind == "gru":
            turn = rule.turns["bias"][0]
            way = next(iter(turn.ways.values())).inverse()
            rows = [_arranged(layer, one, way, "bias", turn.sizes, "cell") for one in (own, hidden)]
            made[id(own)] = [(concatenate(rows, path), rule.text)]
        else:
            made[id(own)] = [(add_tensors(own, hidden, path), SUMMED)]
        made[id(hidden)] = []
    return made


def _attention(layer: _Layer) -> Made:
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
            (_arranged(layer, one, way, name, sizes, part), f"{RULES['attention'].text}; {JOINED}")
            for part, one in zip(_PARTS, thirds, strict=True)
        ]
    return made


def _attention_output(layer: _Layer) -> Made:
    around = replace(layer, prefix=layer.prefix.rpartition(".")[0])
    sizes, made = {"h": _heads(layer)}, Made()
    for leaf, tensor in layer.tensors.items():
        if leaf == "weight":
            found = _arranged(around, tensor, _OUTPUT, "kernel", sizes, "output_dense")
            made[id(tensor)] = [(found, RULES["attention output"].text)]
        else:
            made[id(tensor)] = [(_named(around, tensor, "output_dense", leaf), None)]
    return made


def _heads(layer: _Layer) -> int:
    heads = layer.module.attributes.get("num_heads")
    if isinstance(heads, int) and heads > 0:
        return heads
    first = next(iter(layer.tensors.values()))
    raise UsageError(f"{first.name}: the file does not say how many heads this attention has ({_MODEL})")
