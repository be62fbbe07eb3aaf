"""The layouts and names of another framework, where it is known of what type each layer is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from ckpttool.checkpoint import Checkpoint
from ckpttool.converting.keras_layout import to_keras
from ckpttool.converting.known import about_norms, is_unknown, left_behind, listed, refused
from ckpttool.converting.ties import retied
from ckpttool.converting.viewing import View, viewed
from ckpttool.errors import UsageError
from ckpttool.pairing.families import family_of
from ckpttool.pairing.layers import ATTENTION, layout_doubts
from ckpttool.pairing.layouts import RULES, LayoutItem, torch_layout_items
from ckpttool.pairing.rearrangement import zeros
from ckpttool.pairing.split_parameters import SUMMED, fuse_attention_inputs
from ckpttool.report import counted
from ckpttool.tensor import Path, Role, Tensor
from ckpttool.writing.content import Content

_HOW = "--map with a [[tensor]] says how it lies, and --model takes the layout of another file"
_ONE_BIAS = ("bias_l0", "bias_l0_reverse")
_CLASSES = {RULES["dense"].text: "Dense", RULES["gru"].text: "GRU"}
"""The layers of which a kernel alone doesn't say in which order it is, by the rules that make them."""
_Ends = list[tuple[Tensor, Tensor, str | None]]
"""Each tensor as it was and as it is now, and the rule that made it so."""


def laid_out(content: Content, checkpoint: Checkpoint, layout: str) -> tuple[Content, list[str]]:
    """Return a content's weights in the layout and under the names of a framework, and which rules were used.

    Args:
        content: What is to be brought into the layout; it loses what its format alone needs.
        checkpoint: The source, of which the content is a part.
        layout: ``torch`` or ``keras``.

    Raises:
        UsageError: It holds an optimizer's state, or nothing says how a tensor lies.
    """
    _require_weights(content)
    view = viewed(content, checkpoint)
    ends = _to_torch(view) if layout == "torch" else _to_keras(view)
    _require_single(ends)
    tensors = retied((old, new) for old, new, _ in ends)
    rules = Counter(rule for _, _, rule in ends if rule is not None)
    notes = [f"{rule}: {counted(count, 'tensor')}" for rule, count in rules.items()] + about_norms(rules)
    if not any(old is not new for old, new, _ in ends):
        return content, [f"all tensors lie as --layout {layout} wants them"]
    made = replace(content, tensors=tensors, tree=None, native={}, conventions="pytorch", layers={})
    if layout == "keras":
        layers = {new.name: _CLASSES[rule] for _, new, rule in ends if rule in _CLASSES}
        made = replace(made, conventions="keras", layers=layers)
    return made, notes + left_behind(content, checkpoint)


def _require_weights(content: Content) -> None:
    state = next((tensor for tensor in content.tensors if tensor.role is Role.OPTIMIZER), None)
    if state is not None:
        told = "the state of an optimizer would not fit weights in another layout (use --only weights)"
        raise UsageError(f"{state.name}: {told}")


def _require_single(ends: _Ends) -> None:
    known: dict[str, str] = {}
    for old, new, _ in ends:
        if known.setdefault(new.name, old.name) != old.name:
            told = f"{known[new.name]!r} and {old.name!r} would both be called so (--map renames one)"
            raise UsageError(f"{new.name}: {told}")


# To PyTorch -------------------------------------------------------------------------------------------


def _to_torch(view: View) -> _Ends:
    """Return for each tensor of PyTorch the one that it is made of."""
    items = [*_biases(_joined_inputs(torch_layout_items(view.checkpoint)))]
    free = [item for item in items if not _is_held(view, item)]
    doubts = [
        one for one in layout_doubts(view.checkpoint) if view.tensors[id(one.tensor)].name not in view.held
    ]
    if doubts:
        raise UsageError(refused(doubts))
    unknown = [item.sources[0] for item in free if is_unknown(item, view.checkpoint)]
    if unknown:
        told = "nothing says of what type of layer it is, and its layout may be another"
        raise UsageError(f"{listed(unknown)}: {told} ({_HOW})")
    ends: _Ends = []
    for item in items:
        own, is_held = view.tensors[id(item.sources[0])], _is_held(view, item)
        ends.append((own, own, None) if is_held else (own, _named(view, item, own, items), item.rule))
    return ends


def _is_held(view: View, item: LayoutItem) -> bool:
    return view.tensors[id(item.sources[0])].name in view.held


def _named(view: View, item: LayoutItem, own: Tensor, items: Sequence[LayoutItem]) -> Tensor:
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


def _to_keras(view: View) -> _Ends:
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
