"""Fuses parameters that one side holds in one tensor and the other in several."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping

from ckpttool.core.tensor import Tensor
from ckpttool.weights.pairing.layers import Steps, steps_of
from ckpttool.weights.pairing.layouts import LayoutItem
from ckpttool.weights.pairing.rearrangement import Unfit, add_tensors, concatenate, cut, zeros

SUMMED = "LSTM bias = bias_ih + bias_hh"
JOINED = "query, key and value = in_proj"

_PROJECTED = re.compile(r"(?P<place>(?:.+\.)?)(?P<part>[qkv])_proj\.(?P<leaf>weight|bias)")
_BIAS = re.compile(r"(?P<place>(?:.+\.)?)bias_(?P<part>ih|hh)(?P<layer>_l\d+(?:_reverse)?)")


def fuse_split_parameters(items: Iterable[LayoutItem], others: Iterable[LayoutItem]) -> list[LayoutItem]:
    """Return one side's items, of which those are put together that the other side has in one.

    An attention's query, key and value become ``in_proj``; two biases of an LSTM become their sum.
    """
    fused, leaves = list(items), {item.name.rpartition(".")[2] for item in others}
    if {"in_proj_weight", "in_proj_bias"} & leaves:
        fused = fuse_attention_inputs(fused)
    if any(leaf.startswith("bias_l0") for leaf in leaves):
        fused = sum_lstm_biases(fused)
    return fused


def fuse_attention_inputs(items: list[LayoutItem], wanted: Collection[int] | None = None) -> list[LayoutItem]:
    """Return items of which each query, key and value are one ``in_proj``, where their shapes allow it.

    Args:
        items: All of them.
        wanted: The ``id`` of those that are asked for; None: all.
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
    """Return items of which both biases of an LSTM are their sum."""
    parts: dict[tuple[str, str], dict[str, LayoutItem]] = {}
    recurrent = {item.name: item.tensor.shape for item in items if ".weight_hh" in f".{item.name}"}
    for item in items:
        if match := _BIAS.fullmatch(item.name):
            parts.setdefault((match["place"], match["layer"]), {})[match["part"]] = item
    fused = {}
    for (place, layer), members in parts.items():
        shape = recurrent.get(f"{place}weight_hh{layer}", ())
        is_gru = len(shape) == 2 and shape[0] == 3 * shape[1]  # which keeps its biases apart
        if members.keys() == {"ih", "hh"} and not is_gru:
            path = steps_of((f"{place}bias{layer}",))
            fused.update(_fuse_members([members["ih"], members["hh"]], path, SUMMED))
    return _replace_members(items, fused)


def _fuse_members(members: list[LayoutItem], path: Steps, rule: str) -> dict[int, LayoutItem | None]:
    """Return what stands in the place of each member: the whole for the first, nothing for the others."""
    tensors = [item.tensor for item in members]
    try:
        tensor = concatenate(tensors, path) if rule is JOINED else add_tensors(tensors[0], tensors[1], path)
    except Unfit:
        return {}
    rows = [item.tensor.shape[0] for item in members] if rule is JOINED else []
    places = [(number, at) for number, item in enumerate(members) for at in range(len(item.sources))]

    def back(given: Tensor, at: int) -> Tensor:
        if rule is not JOINED:  # all of a sum is the first one, and nothing the second
            return given if at == 0 else zeros(given, given.path)
        number, inner = places[at]
        member = members[number]  # its rows, in its own layout
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
