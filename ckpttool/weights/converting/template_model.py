"""Fills a template checkpoint (names, layouts, architecture) with the values of a source (``--model``)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.errors import UsageError
from ckpttool.core.tensor import Role, Tensor
from ckpttool.core.text import counted, first_names
from ckpttool.formats.traits import Family, traits_of
from ckpttool.formats.writer import Content
from ckpttool.weights.converting.content_view import view_of
from ckpttool.weights.converting.layout_checks import (
    is_layout_unknown,
    loss_notes,
    name_list,
    norm_notes,
    refusal_text,
)
from ckpttool.weights.converting.weight_selection import only_weights
from ckpttool.weights.pairing.layouts import LayoutItem
from ckpttool.weights.pairing.notes import display_name
from ckpttool.weights.pairing.pair_up import Pairing, PairingOptions, pair_up
from ckpttool.weights.pairing.pairs import Pair
from ckpttool.weights.pairing.rearrangement import LayoutMismatch, concatenate
from ckpttool.weights.pairing.renames import same_content
from ckpttool.weights.pairing.second_names import may_be_copy
from ckpttool.weights.pairing.variable_names import leaf_name

_PAIRS = 20
"""Maximum number of layer pairs in a note; the user has to check them."""
_Contents = frozenset[tuple[str, tuple[int, ...]]]
_NO_STATE = "an optimizer's state can't follow a model (use --only weights)"


def follow_template(
    content: Content, checkpoint: Checkpoint, model: Checkpoint, *, by_order: bool = False
) -> tuple[Content, list[str]]:
    """Return the tensors of a model with the values of a content, and notes.

    Args:
        content: Source of the values.
        checkpoint: Checkpoint that the content was taken from.
        model: Template of names, layouts, shapes and architecture; must stay open while the result is read.
        by_order: Whether identical layers may be paired by order only.
    """
    state = next((tensor for tensor in content.tensors if tensor.role is Role.OPTIMIZER), None)
    if state is not None:
        raise UsageError(f"{state.name}: {_NO_STATE}")
    weights = Content(
        tuple(one for one in model.tensors if one.role is not Role.OPTIMIZER), native=model.native
    )
    if not weights.tensors:
        raise UsageError(f"{model.path}: no weights to follow")
    if traits_of(model.conventions).family is Family.TORCH:  # under the names that a model expects
        weights, _ = only_weights(weights, model)
    ours, theirs = view_of(content, checkpoint), view_of(weights, model).checkpoint
    pairing = pair_up(ours.checkpoint, theirs, PairingOptions(content=False, mapping=ours.tensor_map))
    _require_all_paired(pairing, model)
    if pairing.ordered and not by_order:
        way = "--by-order accepts these pairs, --map sets others"
        pairs = _layer_pairs(pairing.ordered)
        raise UsageError(f"layers are alike and could only be paired by order: {pairs} ({way})")
    _require_known_layouts(pairing, ours.checkpoint, theirs)
    for pair in pairing.pairs:
        if pair.a.tensor.shape != pair.b.tensor.shape:
            raise UsageError(_other_shape(pair))

    filled = _TemplateTensors(pairing, theirs)
    template = [tensor for tensor in theirs.tensors if tensor.role is not Role.OPTIMIZER]
    tensors = [filled.tensor_for(tensor) for tensor in template]
    notes = [*_notes(pairing, content, checkpoint)]
    if filled.unfilled:
        notes.append(f"kept from the model: {first_names(filled.unfilled)}")
    if count := len(model.tensors) - len(template):
        notes.append(f"the model's optimizer left out ({counted(count, 'tensor')})")
    # ``Content`` has the owner of shared bytes before the tensors that share them.
    owners = [one for one in tensors if one.shares_with is None]
    changed = replace(
        content,
        tensors=(*owners, *(one for one in tensors if one.shares_with is not None)),
        tree=None,
        native={name: data for name, data in model.native.items() if "optimizer" not in name},
        source_format=model.format,
        mapped={},
        conventions=model.conventions,
        layers=theirs.layers,
    )
    return changed, notes


# Requirements -----------------------------------------------------------------------------------------


def _require_all_paired(pairing: Pairing, model: Checkpoint) -> None:
    """Require that all tensors are paired, and none of them ambiguously."""
    # A square matrix has the same shape transposed, so its shape can't show which layout it has. A tensor of
    # the source without a counterpart is an error if it is a weight or has axes; lone counters are left out.
    squares = [pair for pair in pairing.undecided if pair.doubt is None]
    if squares:
        names = name_list(pair.a.sources[0] for pair in squares)
        raise UsageError(f"{names}: square, of an unknown layer type, so it may be transposed (use --map)")
    lost = [item for item in pairing.removed if item.tensor.role is Role.WEIGHTS or item.tensor.shape]
    missing = [item for item in pairing.added if item.tensor.role is Role.WEIGHTS]
    if lost or missing:
        parts = [f"the model has no {name_list(item.sources[0] for item in lost)}"] if lost else []
        parts += [f"the source has no {name_list(item.sources[0] for item in missing)}"] if missing else []
        proposal = _map_proposal(lost, missing)
        raise UsageError(f"{model.path}: {' and '.join(parts)}, by name or by shape ({proposal})")


def _require_known_layouts(pairing: Pairing, ours: Checkpoint, theirs: Checkpoint) -> None:
    """Require that the layout of each tensor is known, if the two families have different layouts."""
    is_one_family = traits_of(ours.conventions).family == traits_of(theirs.conventions).family
    if not is_one_family or any(pair.a.rule for pair in pairing.pairs):
        free = [pair for pair in pairing.pairs if pair.how != "map"]
        sides = ((item, side) for pair in free for item, side in ((pair.a, ours), (pair.b, theirs)))
        unknown = [item.sources[0] for item, side in sides if is_layout_unknown(item, side)]
        if unknown:
            problem = "unknown layer type, so its layout may differ"
            raise UsageError(f"{name_list(unknown)}: {problem} (use --map with a [[tensor]])")
    items = (item for pair in pairing.undecided for item in (pair.a, pair.b))
    doubts = [(source, item.doubt) for item in items if item.doubt for source in item.sources]
    if doubts:
        raise UsageError(refusal_text(doubts))


def _map_proposal(lost: Sequence[LayoutItem], missing: Sequence[LayoutItem]) -> str:
    """Return a hint for tensors without a counterpart: lines of a map, if identical layers are left."""
    ours, theirs = (_layers_by_contents(side) for side in (lost, missing))
    alike = next((key for key in ours if key in theirs), None)
    if alike is None:
        return "--map can pair them"
    one, other = ours[alike], theirs[alike]
    counterparts = {leaf_name(item): item.sources[0].name for item in other[0]}
    lines = {
        item.sources[0].name: counterparts[leaf_name(item)]
        for item in one[0]
        if leaf_name(item) in counterparts
    }
    names = ", ".join(f'"{name}" = "{to}"' for name, to in lines.items())
    layers = " and ".join(first_names([_layer(layer[0]) for layer in side]) for side in (one, other))
    return f"{layers} are alike; if these are the same, use --map with [names] {names}"


def _layers_by_contents(items: Sequence[LayoutItem]) -> dict[_Contents, list[list[LayoutItem]]]:
    """Return lists of layers by the names and shapes of their variables."""
    layers: dict[str, list[LayoutItem]] = {}
    for item in items:
        layers.setdefault(_layer(item), []).append(item)
    by_contents: dict[_Contents, list[list[LayoutItem]]] = {}
    for layer in layers.values():
        key = frozenset((leaf_name(item), item.tensor.shape) for item in layer if item.tensor.shape)
        by_contents.setdefault(key, []).append(layer)
    return by_contents


def _other_shape(pair: Pair) -> str:
    ours, theirs = ("×".join(map(str, one.tensor.shape)) or "a scalar" for one in (pair.a, pair.b))
    turned = " in PyTorch's layout" if pair.a.rule or pair.b.rule else ""
    return f"{display_name(pair.a)}: {ours}, but {display_name(pair.b)} of the model is {theirs}{turned}"


# The tensors ------------------------------------------------------------------------------------------


class _TemplateTensors:
    """Makes the tensors of the template from the paired tensors of the source."""

    def __init__(self, pairing: Pairing, model: Checkpoint) -> None:
        self._model = model
        self._parts: dict[int, list[tuple[Pair, int]]] = {}
        for pair in pairing.pairs:
            for at, source in enumerate(pair.b.sources):
                self._parts.setdefault(id(source), []).append((pair, at))
        self._bookkeeping = {id(item.sources[0]) for side, item in pairing.bookkeeping if side == "b"}
        self._owners: dict[str, Tensor] = {}
        self._seconds = {id(tensor): name for tensor, name in pairing.second_names}
        self.unfilled: list[str] = []

    def tensor_for(self, tensor: Tensor) -> Tensor:
        """Return the replacement of a tensor of the template."""
        parts = self._parts.get(id(tensor))
        # Tied tensors of the template stay tied, whatever the source has: their values must be equal there.
        owner = self._owners.get(tensor.shares_with or "")
        if owner is not None:
            if parts is not None:
                self._require_tied(tensor, owner, parts)
            new = replace(owner, path=tensor.path, role=tensor.role, key=tensor.key, shares_with=owner.name)
        elif parts is not None:
            new = self._assemble(tensor, parts)
        elif id(tensor) in self._seconds:
            twin = self.tensor_for(self._model[self._seconds[id(tensor)]])
            new = replace(twin, path=tensor.path, role=tensor.role, key=tensor.key)
        else:
            new = self._own_tensor(tensor)
        if new.shares_with is None:
            self._owners[tensor.name] = new
        return new

    def _assemble(self, tensor: Tensor, parts: Sequence[tuple[Pair, int]]) -> Tensor:
        """Return a tensor of the template from its pairs: one for all of it, or one for each row."""
        # A GRU's bias of Keras is two vectors in PyTorch, each paired by itself: its rows are joined again.
        # If a pair's tensor is fused from several, ``at`` is the number of this one among them.
        parts = sorted(parts, key=lambda part: part[0].b.row or 0)
        pair = parts[0][0]
        try:
            rows = [one.b.to_source(one.a.tensor, at) for one, at in parts]
            whole = rows[0] if len(rows) == 1 else concatenate(rows, tensor.path)
        except LayoutMismatch as failure:
            raise UsageError(
                f"{display_name(pair.a)}: it doesn't fit {tensor.name} of the model: {failure}"
            ) from failure
        if whole.shape != tensor.shape:
            raise UsageError(_other_shape(pair))
        return replace(whole, path=tensor.path, role=tensor.role, key=tensor.key, shares_with=None)

    def _require_tied(self, tensor: Tensor, owner: Tensor, parts: Sequence[tuple[Pair, int]]) -> None:
        """Require that tied tensors of the template have equal values in the source."""
        new = self._assemble(tensor, parts)
        if new.values is not owner.values and not same_content(new, owner):
            problem = f"{parts[0][0].a.tensor.name} differs"
            raise UsageError(f"{tensor.name} and {owner.name} are one tensor in the model, but {problem}")

    def _own_tensor(self, tensor: Tensor) -> Tensor:
        """Return a tensor that the source lacks with the template's values; refuse weights and copies."""
        if tensor.role is Role.WEIGHTS and id(tensor) not in self._bookkeeping:
            raise UsageError(f"{self._model.path}[{tensor.name}]: no tensor of the source is known to match")
        if may_be_copy(tensor, self._model.conventions):
            problem = "a private copy of an unknown variable of the model"
            raise UsageError(
                f"{self._model.path}[{tensor.name}]: {problem} (use a checkpoint of its weights)"
            )
        self.unfilled.append(tensor.name)
        return replace(tensor, shares_with=None)


# Notes -----------------------------------------------------------------------------------------


def _notes(pairing: Pairing, content: Content, checkpoint: Checkpoint) -> Iterator[str]:
    counts: dict[str, int] = {}
    for pair in pairing.pairs:
        for rule in dict.fromkeys(one.rule for one in (pair.a, pair.b) if one.rule is not None):
            counts[rule] = counts.get(rule, 0) + 1
    yield from (f"{rule}: {counted(count, 'tensor')}" for rule, count in counts.items())
    yield from norm_notes(counts)
    ordered = {id(pair.a.sources[0]) for pair in pairing.ordered}
    alike = [one for one in pairing.pairs if one.how == "shape" and id(one.a.sources[0]) not in ordered]
    if alike:
        yield f"paired by the shapes of their layers: {_layer_pairs(alike)}"
    if pairing.ordered:
        yield f"paired by the order of their layers alone, which are alike: {_layer_pairs(pairing.ordered)}"
    extra = [item.name for side, item in pairing.bookkeeping if side == "a"]
    extra += [item.name for item in pairing.removed]
    if extra:
        yield f"left out, only in the source: {', '.join(extra)}"
    types = dict.fromkeys(
        (pair.a.tensor.dtype.name, pair.b.tensor.dtype.name)
        for pair in pairing.pairs
        if pair.a.tensor.dtype is not pair.b.tensor.dtype
    )
    if types:
        changes = ", ".join(f"{ours}, but {theirs} in the model" for ours, theirs in types)
        yield f"kept the source's types: {changes}"
    yield from loss_notes(content, checkpoint)


def _layer_pairs(pairs: Sequence[Pair]) -> str:
    """Return the pairs of layers as text."""
    layers = list(dict.fromkeys(f"{_layer(pair.a)} → {_layer(pair.b)}" for pair in pairs))
    more = f" and {len(layers) - _PAIRS:,} more" if len(layers) > _PAIRS else ""
    return ", ".join(layers[:_PAIRS]) + more


def _layer(item: LayoutItem) -> str:
    name = display_name(item)
    return name.rpartition(".")[0] or name
