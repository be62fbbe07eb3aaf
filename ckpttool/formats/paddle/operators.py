"""Operators of Paddle programs: the kind of layer of each parameter, and a summary of the computation.

``program`` and ``pir`` read operators from the two kinds of programs. Without a program the names that Paddle
generates are used: ``linear_0.w_0`` is a weight of a linear layer.

Two saves of one program have the same summary: the source lines and devices of operators are left out, and
intermediate variables, whose names Paddle generates, are numbered instead.

Source: PaddlePaddle/Paddle ``paddle/fluid/framework/framework.proto``, ``paddle/fluid/operators``,
``python/paddle/base/unique_name.py``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple
from zlib import crc32

from ckpttool.core.errors import CheckpointError
from ckpttool.core.layers import LayerKind
from ckpttool.core.readable import Readable
from ckpttool.core.tensor import Role, Tensor
from ckpttool.core.text import counted
from ckpttool.formats.content.plain_data import describe_content, describe_operators, digest

Kinds = Mapping[str, str]

LINEAR, EMBEDDING, TRANSPOSED = "linear", "embedding", "linear transposed"

_NORMALIZED = ("Scale", "Bias")
_PARAMETER_SLOTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "mul": (LINEAR, ("Y",)),
    "matmul": (LINEAR, ("Y",)),
    "matmul_v2": (LINEAR, ("Y",)),
    "fused_gemm_epilogue": (LINEAR, ("Y",)),
    "fc": (LINEAR, ("W",)),
    "lookup_table": (EMBEDDING, ("W",)),
    "lookup_table_v2": (EMBEDDING, ("W",)),
    "embedding": (EMBEDDING, ("W",)),
    "batch_norm": ("batch_norm", (*_NORMALIZED, "Mean", "Variance")),
    "sync_batch_norm": ("batch_norm", (*_NORMALIZED, "Mean", "Variance")),
    "rnn": ("rnn", ("WeightList",)),
    **{
        f"{kind}{ending}": (f"{kind}{ending}", ("Filter",))
        for kind in ("conv2d", "conv3d", "depthwise_conv2d")
        for ending in ("", "_transpose")
    },
    **{name: (name, _NORMALIZED) for name in ("layer_norm", "group_norm", "instance_norm")},
    **{name: (name, ("Weight", "Bias")) for name in ("lstm", "gru", "lstmp")},
}
"""Kind of layer, and the input slots that hold its parameters, by kind of operator."""

_INPUT_SLOTS: dict[str, tuple[str, ...]] = {
    "matmul": ("X", "Y"),
    "embedding": ("Ids", "W"),
    "batch_norm": ("X", "Mean", "Variance", "Scale", "Bias"),
    **{kind: ("X", "Scale", "Bias") for kind in ("layer_norm", "group_norm", "instance_norm")},
    **{
        f"{kind}{ending}": ("Input", "Filter")
        for kind in ("conv2d", "conv3d", "depthwise_conv2d")
        for ending in ("", "_transpose")
    },
}
"""Slots of an operator's inputs in order, for Paddle 3, whose operators have inputs without slots."""

_CELLS = {
    "LSTM": "lstm_cell",
    "GRU": "gru_cell",
    "RNN_TANH": "simple_rnn_cell",
    "RNN_RELU": "simple_rnn_cell",
}
_SAME = frozenset({"cast", "assign", "share_data"})
"""Operators whose output is their input, perhaps in another type."""

_MADE_UP_NAME = re.compile(r"(?:.*/)?(?P<kind>[a-z][a-z0-9_]*?)_[0-9]+\.[wb]_[0-9]+")
_MADE_UP_KINDS = {"fc": LINEAR}


INPUTS = frozenset({"feed", "data"})
"""Operators that return inputs of the program, under the names that its callers use."""
MALFORMED = (CheckpointError, KeyError, IndexError, TypeError, AttributeError)
"""Exceptions of readers of operators that are damaged."""

Slots = Sequence[tuple[str | None, tuple[str, ...]]]
"""Names of variables by slot; the slot is None in Paddle 3."""


class Operator(NamedTuple):
    """An operator.

    Attributes:
        kind: Its type, such as ``matmul_v2``.
        inputs: Names of input variables.
        outputs: Names of output variables.
        settings: The attributes that change the computation, as bytes that are equal for equal attributes.
        is_transposing: Whether it transposes its second operand, as ``matmul`` can.
        mode: Type of an RNN's cells; empty for other operators.
    """

    kind: str
    inputs: Slots
    outputs: Slots
    settings: bytes = b""
    is_transposing: bool = False
    mode: str = ""


# Layers -----------------------------------------------------------------------------------------------


def kinds_by_operator(operators: Iterable[Operator]) -> dict[str, str]:
    """Return the kind of layer by name of variable; the first operator that takes one decides."""
    kinds: dict[str, str] = {}
    origins: dict[str, str] = {}
    for operator in operators:
        # A layer may take a copy of its parameter, cast to another type: the copy counts as the parameter.
        taken = [name for _, names in operator.inputs for name in names]
        given = [name for _, names in operator.outputs for name in names]
        if operator.kind in _SAME and len(taken) == len(given) == 1:
            origins[given[0]] = origins.get(taken[0], taken[0])
        operation = operator.kind.removesuffix("_")  # in Paddle 3, that of an operator that works in place
        kind, slots = _PARAMETER_SLOTS.get(operation, ("", ()))
        if kind == LINEAR and operator.is_transposing:
            kind = TRANSPOSED
        elif kind == "rnn":
            kind = _CELLS.get(operator.mode, "")
        for slot, name in _by_slot(operation, operator.inputs):
            if kind and slot in slots:
                kinds.setdefault(origins.get(name, name), kind)
    return kinds


def _by_slot(operation: str, inputs: Slots) -> Iterator[tuple[str, str]]:
    """Yield slot and name of each input."""
    for slot, names in inputs:
        if slot is None and operation != "rnn":
            yield from zip(_INPUT_SLOTS.get(operation, ()), names, strict=False)
        else:  # the weights of an RNN are one list among its inputs
            yield from ((slot or "WeightList", name) for name in names)


def kind_by_name(name: str) -> str | None:
    """Return the kind of layer in a name that Paddle generated; None for any other name."""
    match = _MADE_UP_NAME.fullmatch(name)
    return None if match is None else _MADE_UP_KINDS.get(match["kind"], match["kind"])


def layers_of(
    tensors: Iterable[Tensor], kinds: Kinds, names: Mapping[str, str] | None = None
) -> dict[str, LayerKind]:
    """Return the layer kinds of weights by tensor name.

    Args:
        tensors: All tensors.
        kinds: Kinds from operators, by the parameters' names in the program.
        names: The parameters' names by tensor name, where the two differ.
    """
    layers: dict[str, LayerKind] = {}
    for tensor in tensors:
        parameter = (names or {}).get(tensor.name, tensor.name)
        kind = kinds.get(parameter) or kind_by_name(parameter)
        if kind is not None and tensor.role is Role.WEIGHTS:
            layers.setdefault(tensor.name, LayerKind(kind))
    return layers


# Computation ------------------------------------------------------------------------------------------


def describe_program(
    source: Readable,
    read_operators: Callable[[], Iterable[Operator]],
    saved: Iterable[str],
    types: Mapping[str, str],
) -> object:
    """Return a summary of a program; if its operators can't be read, the checksum of the file.

    Args:
        source: The program's file.
        read_operators: Returns its operators.
        saved: Names of the variables whose values are saved; other names are replaced by numbers.
        types: Types by name of variable, for programs whose operators don't have them.
    """
    try:
        operators = [*read_operators()]
    except MALFORMED:
        return describe_content(source.size, crc32(source.read(0, source.size)))
    inputs = (operator.outputs for operator in operators if operator.kind in INPUTS)
    named = {*saved, *(name for slots in inputs for _, names in slots for name in names)}
    numbers: dict[str, int] = {}

    def labels(slots: Slots) -> Iterator[str]:
        for slot, names in slots:
            if slot is not None:
                yield f"\0{slot}"  # no variable begins so
            for name in names:
                known = f"={name}" if name in named else f"%{numbers.setdefault(name, len(numbers))}"
                yield f"{known} {types.get(name, '')}"

    wiring = digest(
        json.dumps([operator.kind, *labels(operator.inputs), "->", *labels(operator.outputs)]).encode()
        for operator in operators
    )
    return {
        "operators": describe_operators((operator.kind, operator.settings) for operator in operators),
        "wiring": f"<{counted(len(operators), 'operator')}, CRC-32 {wiring:08x}>",
    }
