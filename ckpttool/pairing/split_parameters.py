"""Fuses parameters that one side holds in one tensor and the other in several."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping

from ckpttool.pairing.layers import Steps, steps_of
from ckpttool.pairing.layouts import Back, LayoutItem
from ckpttool.pairing.rearrangement import Unfit, add_tensors, concatenate, cut, zeros
from ckpttool.tensor import Tensor

SUMMED = "LSTM bias = bias_ih + bias_hh"
JOINED = "query, key and value = in_proj"


def fuse_split_parameters(items: Iterable[LayoutItem], others: Iterable[LayoutItem]) -> list[LayoutItem]:
    """Return one side's items, of which those are put together that the other side has in one.

    An attention's query, key and value become ``in_proj``; two biases of an LSTM become their sum.
    """
    met_items, leaves = list(items), {item.name.rpartition(".")[2] for item in others}
    if {"in_proj_weight", "in_proj_bias"} & leaves:
        met_items = fuse_attention_inputs(met_items)
    if any(leaf.startswith("bias_l0") for leaf in leaves):
        met_items = sum_lstm_biases(met_items)
    return met_items


_PROJECTED = re.compile(r"(?P<place>(?:.+\.)?)(?P<part>[qkv])_proj\.(?P<leaf>weight|bias)")
_BIAS = re.compile(r"(?P<place>(?:.+\.)?)bias_(?P<part>ih|hh)(?P<layer>_l\d+(?:_reverse)?)")


def fuse_attention_inputs(items: list[LayoutItem], wanted: Collection[int] | None = None) -> list[LayoutItem]:
    """Return items of which each query, key and value are one ``in_proj``, where their shapes allow it.

    Args:
        items: All of them.
        wanted: The ``id`` of those that are asked for; None: all.
    """
    parts: dict[tuple[str, str], dict[str, LayoutItem]] = {}
    for item in items:
        found = _PROJECTED.fullmatch(item.name)
        if found and (wanted is None or id(item) in wanted):
            parts.setdefault((found["place"], found["leaf"]), {})[found["part"]] = item
    whole = {}
    for (place, leaf), own in parts.items():
        if own.keys() == {"q", "k", "v"}:
            members = [own[part] for part in "qkv"]
            path = steps_of((f"{place}in_proj_{leaf}",))
            whole.update(_fused_members(members, path, JOINED))
    return _replace_members(items, whole)


def sum_lstm_biases(items: list[LayoutItem]) -> list[LayoutItem]:
    """Return items of which both biases of an LSTM are their sum."""
    parts: dict[tuple[str, str], dict[str, LayoutItem]] = {}
    recurrent = {item.name: item.tensor.shape for item in items if ".weight_hh" in f".{item.name}"}
    for item in items:
        if found := _BIAS.fullmatch(item.name):
            parts.setdefault((found["place"], found["layer"]), {})[found["part"]] = item
    whole = {}
    for (place, layer), own in parts.items():
        shape = recurrent.get(f"{place}weight_hh{layer}", ())
        has_two = len(shape) == 2 and shape[0] == 3 * shape[1]  # a GRU keeps them apart
        if own.keys() == {"ih", "hh"} and not has_two:
            path = steps_of((f"{place}bias{layer}",))
            whole.update(_fused_members([own["ih"], own["hh"]], path, SUMMED))
    return _replace_members(items, whole)


def _fused_members(members: list[LayoutItem], path: Steps, rule: str) -> dict[int, LayoutItem | None]:
    """Return what stands in the place of each member: the whole for the first, nothing for the others."""
    tensors = [item.tensor for item in members]
    try:
        made = concatenate(tensors, path) if rule is JOINED else add_tensors(tensors[0], tensors[1], path)
    except Unfit:
        return {}
    sources = tuple(source for item in members for source in item.sources)
    told = members[0].rule
    text = rule if told is None else f"{told}; {rule}"
    back = _cut_back(members) if rule is JOINED else _first_alone
    doubt = next((item.doubt for item in members if item.doubt), None)
    whole = LayoutItem(".".join(path), made, sources, text, doubt=doubt, back=back)
    return {id(members[0]): whole} | {id(item): None for item in members[1:]}


def _replace_members(items: list[LayoutItem], whole: Mapping[int, LayoutItem | None]) -> list[LayoutItem]:
    placed = (whole.get(id(item), item) for item in items)
    return [item for item in placed if item is not None]


def _cut_back(members: list[LayoutItem]) -> Back:
    """Return the way back of what was joined: each member's rows, in the member's own layout."""
    rows = [item.tensor.shape[0] for item in members]
    places = [(number, at) for number, item in enumerate(members) for at in range(len(item.sources))]

    def back(given: Tensor, at: int) -> Tensor:
        number, inner = places[at]
        member = members[number]
        return member.restored(cut(given, sum(rows[:number]), rows[number], member.tensor.path), inner)

    return back


def _first_alone(given: Tensor, at: int) -> Tensor:
    """Return the way back of a sum: all of it is the first one, and nothing the second."""
    return given if at == 0 else zeros(given, given.path)
