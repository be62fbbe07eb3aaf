"""Converts weights to the layouts and names of PyTorch or Keras (``--layout``); layer types must be known."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.errors import UsageError
from ckpttool.core.layers import UNWIRED, LayerKind
from ckpttool.core.tensor import Role, Tensor
from ckpttool.core.text import counted
from ckpttool.formats.traits import Family, traits_of
from ckpttool.formats.writer import Content
from ckpttool.weights.converting.content_view import ContentView, view_of
from ckpttool.weights.converting.layout_checks import (
    is_layout_unknown,
    loss_notes,
    name_list,
    norm_notes,
    refusal_text,
)
from ckpttool.weights.converting.ties import carry_ties
from ckpttool.weights.pairing.layers import ATTENTION, layout_doubts, may_be_image
from ckpttool.weights.pairing.layouts import (
    JOINED,
    RULES,
    SUMMED,
    LayoutItem,
    LayoutRule,
    VariableLayout,
    fuse_attention_inputs,
    torch_layout_items,
)
from ckpttool.weights.pairing.rearrangement import (
    LayoutMismatch,
    Pattern,
    add_tensors,
    concatenate,
    cut,
    parse_pattern,
    rearrange,
    zeros,
)

_MAP_HINT = "use --map with a [[tensor]], or --model to take the layout of another file"
_ONE_BIAS = ("bias_l0", "bias_l0_reverse")
_CLASSES = {RULES["dense"].text: "Dense", RULES["gru"].text: "GRU"}
"""Classes of layers whose kernel's order needs a declared type, by the rule that makes them."""
_Conversions = list[tuple[Tensor, Tensor, str | None]]
"""(Old tensor, new tensor, text of the rule or None)."""
KerasTensors = dict[int, list[tuple[Tensor, str | None]]]
"""(New tensor, text of the rule or None) by ``id`` of a tensor; empty if it is merged into another one."""
_MODEL_HINT = "--model FILE takes names and layouts from a Keras file"
_CLASS = re.compile(r"(?:__torch__\.)?torch\.nn\.modules\.(?:\w+\.)*?(?:___torch_mangle_\d+\.)?(\w+)")
_KINDS = {module: kind for kind, rule in RULES.items() for module in rule.modules} | {
    "MultiheadAttention": "multi-head"
}
_ORDER_PRESERVING = frozenset(
    (
        *("Sequential", "Linear", "Embedding", "LayerNorm", "BatchNorm1d", "Dropout", "AlphaDropout"),
        *("Identity", "ReLU", "ReLU6", "LeakyReLU", "ELU", "SELU", "GELU", "SiLU", "Tanh", "Sigmoid"),
        *("Softplus", "Softmax"),
    )
)
"""Modules that keep features along the last axis in order, so that no flattened image can occur."""
_FLAT_WEIGHTS = "_flat_weights"
"""Attribute of PyTorch's recurrent layers that lists their weights a second time."""
_RECURRENT = ("lstm", "gru", "rnn")
_INPUT = parse_pattern("(h d) e -> e h d")
_INPUT_BIAS = parse_pattern("(h d) -> h d")
_OUTPUT = parse_pattern("e (h d) -> h d e")
_PARTS = ("query_dense", "key_dense", "value_dense")


def to_layout(content: Content, checkpoint: Checkpoint, layout: str) -> tuple[Content, list[str]]:
    """Return a content with the layouts and names of a framework, and notes on the rules applied.

    Args:
        content: Weights; format-specific parts and the tree are dropped.
        checkpoint: Checkpoint that the content was taken from.
        layout: ``torch`` or ``keras``.
    """
    state = next((tensor for tensor in content.tensors if tensor.role is Role.OPTIMIZER), None)
    if state is not None:
        problem = "an optimizer's state would not fit weights in another layout (use --only weights)"
        raise UsageError(f"{state.name}: {problem}")
    view = view_of(content, checkpoint)
    conversions = _to_torch(view) if layout == "torch" else _to_keras(view)
    known: dict[str, str] = {}
    for old, new, _ in conversions:
        if known.setdefault(new.name, old.name) != old.name:
            problem = f"{known[new.name]!r} and {old.name!r} would both get this name (--map renames one)"
            raise UsageError(f"{new.name}: {problem}")
    tensors = carry_ties((old, new) for old, new, _ in conversions)
    rules = Counter(rule for _, _, rule in conversions if rule is not None)
    notes = [f"{rule}: {counted(count, 'tensor')}" for rule, count in rules.items()] + norm_notes(rules)
    if not any(old is not new for old, new, _ in conversions):
        return content, [f"all tensors already have the layout {layout}"]
    changed = replace(content, tensors=tensors, tree=None, native={}, conventions="pytorch", layers={})
    if layout == "keras":
        layers = {new.name: LayerKind(_CLASSES[rule]) for _, new, rule in conversions if rule in _CLASSES}
        changed = replace(changed, conventions="keras", layers=layers)
    return changed, notes + loss_notes(content, checkpoint)


# To PyTorch -------------------------------------------------------------------------------------------


def _to_torch(view: ContentView) -> _Conversions:
    items = [*_split_biases(_fuse_square_inputs(torch_layout_items(view.checkpoint)))]

    def is_mapped(tensor: Tensor) -> bool:
        return view.tensors[id(tensor)].name in view.layouts_from_map

    doubts = [(tensor, reason) for tensor, reason in layout_doubts(view.checkpoint) if not is_mapped(tensor)]
    if doubts:
        raise UsageError(refusal_text(doubts))
    free = [item for item in items if not is_mapped(item.sources[0])]
    unknown = [item.sources[0] for item in free if is_layout_unknown(item, view.checkpoint)]
    if unknown:
        problem = "unknown layer type, so its layout may differ"
        raise UsageError(f"{name_list(unknown)}: {problem} ({_MAP_HINT})")
    conversions: _Conversions = []
    for item in items:
        tensor = view.tensors[id(item.sources[0])]
        if is_mapped(item.sources[0]):
            conversions.append((tensor, tensor, None))
        else:
            conversions.append((tensor, _torch_tensor(view, item, tensor, items), item.rule))
    return conversions


def _torch_tensor(view: ContentView, item: LayoutItem, tensor: Tensor, items: Sequence[LayoutItem]) -> Tensor:
    """Return the tensor of an item, under the name from the user's map if it has one."""
    given = view.names_from_map.get(item.sources[0].name)
    if given is not None:
        if len(item.sources) > 1 or sum(one.sources == item.sources for one in items) > 1:
            problem = "it is not one tensor in both layouts, so it can't be renamed (remove the line)"
            raise UsageError(f"{item.sources[0].name} → {given}: {problem}")
        return replace(item.tensor, path=tensor.path, key=None)
    if item.tensor is item.sources[0] or item.tensor.name == tensor.name:
        return tensor if item.rule is None else replace(item.tensor, path=tensor.path, key=None)
    name = ".".join(map(str, item.tensor.path))  # in a state dict a path is one name, with dots
    return replace(item.tensor, path=(name,), key=None)


def _fuse_square_inputs(items: list[LayoutItem]) -> list[LayoutItem]:
    """Return items with the input projections of square attentions fused."""
    # torch.nn.MultiheadAttention has one in_proj_weight (3E, E) if queries, keys and values have E features,
    # and three separate weights otherwise.
    inputs = []
    for item in items:
        steps = item.tensor.path
        is_part = any(str(step).lstrip("_") in ATTENTION for step in item.sources[0].path)
        if is_part and len(steps) > 1 and str(steps[-2]) in ("q_proj", "k_proj", "v_proj"):
            inputs.append(item)
    others = {item.tensor.path[:-2] for item in inputs if len({1, *item.tensor.shape}) > 2}
    return fuse_attention_inputs(items, {id(item) for item in inputs if item.tensor.path[:-2] not in others})


def _split_biases(items: Iterable[LayoutItem]) -> Iterator[LayoutItem]:
    """Yield items with a recurrent layer's single bias split as PyTorch's two: itself, and zeros."""
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
    checkpoint = view.checkpoint
    if traits_of(checkpoint.conventions).family is Family.KERAS:
        return [(one, one, None) for one in view.tensors.values()]
    if view.names_from_map:
        source, given = next(iter(view.names_from_map.items()))
        problem = "--layout keras sets the names, so a map can't rename"
        raise UsageError(f"{source} → {given}: {problem} (use a [[tensor]], or --model)")
    converted = to_keras(checkpoint, view.layouts_from_map)
    conversions: _Conversions = []
    for tensor in checkpoint.tensors:
        if id(tensor) not in converted:
            conversions.append((tensor, tensor, None))
        else:
            conversions += [(tensor, new, rule) for new, rule in converted[id(tensor)]]
    return conversions


class TorchModule(NamedTuple):
    """Module of PyTorch.

    Attributes:
        kind: Key of ``RULES``, ``multi-head`` or ``multi-head output``; None if unknown.
        class_name: Qualified name of its class.
        attributes: Its plain attributes, such as ``groups`` and ``num_heads``.
    """

    kind: str | None
    class_name: str
    attributes: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class _TorchLayer:
    """Module with its tensors by name."""

    prefix: str
    module: TorchModule
    tensors: Mapping[str, Tensor]

    @property
    def place(self) -> tuple[str, ...]:
        return tuple(self.prefix.split(".")) if self.prefix else ()


def to_keras(checkpoint: Checkpoint, layouts_from_map: Collection[str]) -> KerasTensors:
    """Return the conversions of tensors of PyTorch to Keras; tensors without an entry are unchanged.

    Args:
        checkpoint: Checkpoint of PyTorch.
        layouts_from_map: Names of tensors to leave unchanged.
    """
    modules = _modules(checkpoint.metadata)
    if not modules:
        problem = "it doesn't record the types of its layers"
        raise UsageError(f"{checkpoint.path}: {problem} ({_MODEL_HINT})")
    layers = [*_torch_layers(checkpoint, modules, layouts_from_map)]
    if not _is_plain_chain(modules):
        # A pickled module doesn't record its forward(): between any two modules, it may flatten or reshape.
        # Only in a plain Sequential, or for a kernel that is too small for an image, is the order certain.
        linear = [layer.tensors.get("weight") for layer in layers if layer.module.kind == "dense"]
        doubts = [
            (one, UNWIRED) for one in linear if one and len(one.shape) == 2 and may_be_image(*one.shape)
        ]
        if doubts:
            raise UsageError(refusal_text(doubts, "Keras"))
    converted: KerasTensors = {}
    for layer in layers:
        converted.update(_keras_variables(layer))
    return converted


def _modules(metadata: Mapping[str, object]) -> dict[str, TorchModule]:
    """Return the modules of a pickled module or a TorchScript program, by name."""
    modules: dict[str, TorchModule] = {}
    for holder in (metadata, *(one for one in metadata.values() if isinstance(one, Mapping))):
        classes, attributes = holder.get("modules"), holder.get("attributes")
        if isinstance(classes, Mapping):
            known = attributes if isinstance(attributes, Mapping) else {}
            for prefix, name in classes.items():
                front = f"{prefix}." if prefix else ""
                own = {key[len(front) :]: value for key, value in known.items() if key.startswith(front)}
                modules[str(prefix)] = _module(str(name), own)
    if not modules and isinstance(program := metadata.get("attributes"), Mapping):
        pending: list[tuple[str, Mapping[str, object]]] = [("", program)]
        while pending:
            prefix, module = pending.pop()
            if isinstance(name := module.get("<class>"), str):
                modules[prefix] = _module(name, module)
            front = f"{prefix}." if prefix else ""
            pending += [(f"{front}{key}", one) for key, one in module.items() if isinstance(one, Mapping)]
    return modules


def _module(name: str, attributes: Mapping[str, object]) -> TorchModule:
    match = _CLASS.fullmatch(name)
    return TorchModule(_KINDS.get(match[1]) if match else None, name, attributes)


def _torch_layers(
    checkpoint: Checkpoint, modules: Mapping[str, TorchModule], layouts_from_map: Collection[str]
) -> Iterator[_TorchLayer]:
    groups: dict[str, dict[str, Tensor]] = {}
    for tensor in checkpoint.tensors:
        prefix, _, leaf = tensor.name.rpartition(".")
        if tensor.name not in layouts_from_map:
            groups.setdefault(prefix, {})[leaf] = tensor
    for prefix, group in groups.items():
        module = modules.get(prefix, TorchModule(None, "", {}))
        parent = prefix.removesuffix(".out_proj")
        if parent != prefix and modules.get(parent, module).kind == "multi-head":
            module = modules[parent]._replace(kind="multi-head output")
        yield _TorchLayer(prefix, module, group)


def _is_plain_chain(modules: Mapping[str, TorchModule]) -> bool:
    """Return whether the modules are nested Sequentials of layers that neither flatten nor reshape."""
    names = [match[1] if (match := _CLASS.fullmatch(one.class_name)) else "" for one in modules.values()]
    parents = {prefix.rpartition(".")[0] for prefix in modules if prefix}
    chains = {prefix for prefix, name in zip(modules, names, strict=True) if name == "Sequential"}
    return all(name in _ORDER_PRESERVING for name in names) and "" in modules and parents <= chains


def _keras_variables(layer: _TorchLayer) -> KerasTensors:
    """Return the conversions of a module's tensors."""
    kind = layer.module.kind
    if layer.place[-1:] == (_FLAT_WEIGHTS,) and all(one.shares_with for one in layer.tensors.values()):
        return {id(tensor): [] for tensor in layer.tensors.values()}
    if kind == "multi-head":
        return _attention_inputs(layer)
    if kind == "multi-head output":
        return _attention_output(layer)
    if kind in _RECURRENT:
        return _recurrent(layer, kind)
    rule = RULES.get(kind or "")
    converted: KerasTensors = {}
    for leaf, tensor in layer.tensors.items():
        if leaf == "num_batches_tracked" and kind == "batch norm":
            converted[id(tensor)] = []
        elif rule is not None and (variable := _keras_variable(rule, leaf)) is not None:
            converted[id(tensor)] = [_keras_tensor(layer, tensor, rule, *variable)]
        elif leaf == "bias" and kind is not None:
            converted[id(tensor)] = [(_under_keras_name(layer, tensor, "bias"), None)]
        elif len(tensor.shape) > 1:
            raise UsageError(_no_rule(layer, tensor))
    return converted


def _keras_variable(rule: LayoutRule, leaf: str) -> tuple[str, VariableLayout] | None:
    """Return Keras's name for a variable of PyTorch, and the rule's conversion."""
    return next(
        (
            (name, layout)
            for name, variables in rule.variables.items()
            for layout in variables
            if layout.leaf == leaf
        ),
        None,
    )


def _keras_tensor(
    layer: _TorchLayer, tensor: Tensor, rule: LayoutRule, name: str, layout: VariableLayout
) -> tuple[Tensor, str | None]:
    # With groups, PyTorch's transposed convolution has (I, O/groups, k…), which Keras can't express. Files of
    # modules record ``groups``; otherwise a bias as long as the second axis shows that there is one group.
    kind, attributes = layer.module.kind, layer.module.attributes
    if kind == "transposed conv":
        bias = layer.tensors.get("bias")
        is_one_group = bias is not None and bias.shape == layer.tensors["weight"].shape[1:2]
        if not (attributes["groups"] == 1 if "groups" in attributes else is_one_group):
            raise UsageError(f"{tensor.name}: Keras has no grouped transposed convolution ({_MODEL_HINT})")
    patterns = {len(pattern.result): pattern for pattern in layout.patterns.values()}
    if not patterns and (kind == "embedding" or len(tensor.shape) <= 1):
        return _under_keras_name(layer, tensor, name), rule.text
    if len(tensor.shape) not in patterns:
        raise UsageError(_no_rule(layer, tensor))
    pattern = patterns[len(tensor.shape)].inverse()
    return _rearrange_variable(layer, tensor, pattern, name, layout.sizes), rule.text


def _no_rule(layer: _TorchLayer, tensor: Tensor) -> str:
    name = layer.module.class_name.rpartition(".")[2]
    problem = f"no rule for {name}" if name else "unknown layer type"
    return f"{tensor.name}: {problem} ({_MODEL_HINT}; or use --map with a [[tensor]])"


def _under_keras_name(layer: _TorchLayer, tensor: Tensor, *names: str) -> Tensor:
    return replace(tensor, path=(*layer.place, *names), key=None)


def _rearrange_variable(
    layer: _TorchLayer, tensor: Tensor, pattern: Pattern, name: str, sizes: Mapping[str, int], *inner: str
) -> Tensor:
    try:
        return rearrange(tensor, pattern, (*layer.place, *inner, name), sizes=sizes)
    except LayoutMismatch as failure:
        raise UsageError(f"{tensor.name}: {failure} ({_MODEL_HINT})") from failure


# Layers of several tensors ------------------------------------------------------------------------------


def _recurrent(layer: _TorchLayer, kind: str) -> KerasTensors:
    """Return the conversions of a recurrent layer's tensors."""
    # Keras has separate layers for stacked layers and directions, whose names aren't known here: refused.
    # An LSTM's two biases are added; a GRU's become the rows of one bias (2, 3u).
    leaves = {"weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0"}
    if rest := [leaf for leaf in layer.tensors if leaf not in leaves]:
        problem = "Keras has one layer for each layer and direction, with its own names"
        raise UsageError(f"{layer.tensors[rest[0]].name}: {problem} ({_MODEL_HINT})")
    rule, converted = RULES[kind], KerasTensors()
    for leaf in ("weight_ih_l0", "weight_hh_l0"):
        tensor, variable = layer.tensors.get(leaf), _keras_variable(rule, leaf)
        if tensor is not None and variable is not None:
            name, layout = variable
            pattern = next(iter(layout.patterns.values())).inverse()
            converted[id(tensor)] = [
                (_rearrange_variable(layer, tensor, pattern, name, layout.sizes, "cell"), rule.text)
            ]
    biases = [layer.tensors[leaf] for leaf in sorted(leaves & layer.tensors.keys()) if "bias" in leaf]
    if len(biases) == 2:
        of_hidden, of_input = biases
        path = (*layer.place, "cell", "bias")
        if kind == "gru":
            layout = rule.variables["bias"][0]
            pattern = next(iter(layout.patterns.values())).inverse()
            rows = [
                _rearrange_variable(layer, one, pattern, "bias", layout.sizes, "cell")
                for one in (of_input, of_hidden)
            ]
            converted[id(of_input)] = [(concatenate(rows, path), rule.text)]
        else:
            converted[id(of_input)] = [(add_tensors(of_input, of_hidden, path), SUMMED)]
        converted[id(of_hidden)] = []
    return converted


def _attention_inputs(layer: _TorchLayer) -> KerasTensors:
    """Return the conversions of an attention's in_proj: rows [0:E], [E:2E], [2E:3E] are query, key, value."""
    sizes, converted = {"h": _heads(layer)}, KerasTensors()
    patterns = {"in_proj_weight": (_INPUT, "kernel"), "in_proj_bias": (_INPUT_BIAS, "bias")}
    for leaf, tensor in layer.tensors.items():
        if leaf not in patterns or not tensor.shape or tensor.shape[0] % len(_PARTS):
            raise UsageError(_no_rule(layer, tensor))
        pattern, name = patterns[leaf]
        rows = tensor.shape[0] // len(_PARTS)
        thirds = [cut(tensor, at * rows, rows, tensor.path) for at in range(len(_PARTS))]
        converted[id(tensor)] = [
            (
                _rearrange_variable(layer, one, pattern, name, sizes, part),
                f"{RULES['attention'].text}; {JOINED}",
            )
            for part, one in zip(_PARTS, thirds, strict=True)
        ]
    return converted


def _attention_output(layer: _TorchLayer) -> KerasTensors:
    outer = replace(layer, prefix=layer.prefix.rpartition(".")[0])
    sizes, converted = {"h": _heads(layer)}, KerasTensors()
    for leaf, tensor in layer.tensors.items():
        if leaf == "weight":
            kernel = _rearrange_variable(outer, tensor, _OUTPUT, "kernel", sizes, "output_dense")
            converted[id(tensor)] = [(kernel, RULES["attention output"].text)]
        else:
            converted[id(tensor)] = [(_under_keras_name(outer, tensor, "output_dense", leaf), None)]
    return converted


def _heads(layer: _TorchLayer) -> int:
    heads = layer.module.attributes.get("num_heads")
    if isinstance(heads, int) and heads > 0:
        return heads
    first = next(iter(layer.tensors.values()))
    raise UsageError(f"{first.name}: the file does not say how many heads this attention has ({_MODEL_HINT})")
