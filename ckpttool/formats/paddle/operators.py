"""The kind of layer that each parameter belongs to, from the operator that takes it as an input.

Without a program the names that Paddle generates are used: ``linear_0.w_0`` is a weight of a linear layer.

Source: PaddlePaddle/Paddle ``paddle/fluid/framework/framework.proto``, ``paddle/fluid/operators``,
``python/paddle/base/unique_name.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from ckpttool.containers.protobuf import BYTES, VARINT, Field, fields
from ckpttool.core.layers import LayerKind
from ckpttool.core.readable import Readable
from ckpttool.core.tensor import Role, Tensor

Kinds = Mapping[str, str]

LINEAR, EMBEDDING, TRANSPOSED = "linear", "embedding", "linear transposed"

MAX_FIELDS = 8_000_000
"""Limit on protobuf fields read for operators; later operators are ignored."""

_NORMALIZED = ("Scale", "Bias")
_PARAMETER_SLOTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "mul": (LINEAR, ("Y",)),
    "matmul": (LINEAR, ("Y",)),
    "matmul_v2": (LINEAR, ("Y",)),
    "fused_gemm_epilogue": (LINEAR, ("Y",)),
    "fc": (LINEAR, ("W",)),
    "lookup_table": (EMBEDDING, ("W",)),
    "lookup_table_v2": (EMBEDDING, ("W",)),
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

_CELLS = {
    "LSTM": "lstm_cell",
    "GRU": "gru_cell",
    "RNN_TANH": "simple_rnn_cell",
    "RNN_RELU": "simple_rnn_cell",
}
_TRANSPOSING = frozenset({"trans_y", "transpose_Y", "transpose_y"})
_SAME = frozenset({"cast", "assign", "share_data"})
"""Operators whose output is their input, perhaps in another type."""

_MADE_UP_NAME = re.compile(r"(?:.*/)?(?P<kind>[a-z][a-z0-9_]*?)_[0-9]+\.[wb]_[0-9]+")
_MADE_UP_KINDS = {"fc": LINEAR}


class Operator(NamedTuple):
    """An operator.

    Attributes:
        takes: Names of input variables by slot.
        gives: Names of output variables.
        is_transposing: Whether it transposes its second operand, as ``matmul`` can.
        mode: Type of an RNN's cells; empty for other operators.
    """

    kind: str
    takes: Mapping[str, tuple[str, ...]]
    gives: tuple[str, ...]
    is_transposing: bool = False
    mode: str = ""


def kinds_by_operator(operators: Iterable[Operator]) -> dict[str, str]:
    """Return the kind of layer by name of variable; the first operator that takes one decides."""
    kinds: dict[str, str] = {}
    origins: dict[str, str] = {}
    for operator in operators:
        # A layer may take a copy of its parameter, cast to another type: the copy counts as the parameter.
        taken = [name for names in operator.takes.values() for name in names]
        if operator.kind in _SAME and len(taken) == len(operator.gives) == 1:
            origins[operator.gives[0]] = origins.get(taken[0], taken[0])
        kind, slots = _PARAMETER_SLOTS.get(operator.kind, ("", ()))
        if kind == LINEAR and operator.is_transposing:
            kind = TRANSPOSED
        elif kind == "rnn":
            kind = _CELLS.get(operator.mode, "")
        for name in (name for slot in slots if kind for name in operator.takes.get(slot, ())):
            kinds.setdefault(origins.get(name, name), kind)
    return kinds


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


# Programs -------------------------------------------------------------------------------------------


def operators_in(source: Readable) -> Iterator[Operator]:
    """Yield the operators of a program, block after block."""
    reader = _OperatorReader(source.path)
    for block in reader.messages_in(source.read(0, source.size), 1):
        for operator in reader.messages_in(block.data, 4):
            yield reader.operator(operator)


class _OperatorReader:
    """Reads the messages of one program, up to ``MAX_FIELDS`` fields."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._allowed = MAX_FIELDS

    def messages_in(self, message: bytes | memoryview, number: int) -> Iterator[Field]:
        """Return the messages and strings in the fields with a number."""
        return (field for field in self._fields(message) if (field.number, field.kind) == (number, BYTES))

    def _fields(self, message: bytes | memoryview) -> Iterator[Field]:
        for field in fields(message, self._path, "a program"):
            self._allowed -= 1
            if self._allowed < 0:
                return
            yield field

    def operator(self, message: Field) -> Operator:
        kind, mode, is_transposing = "", "", False
        takes: dict[str, tuple[str, ...]] = {}
        gives: list[str] = []
        for field in self._fields(message.data):
            if field.kind != BYTES:
                continue
            if field.number == 3:
                kind = field.text
            elif field.number == 1:
                slot, names = self._variables(field)
                takes[slot] = names
            elif field.number == 2:
                gives += self._variables(field)[1]
            elif field.number == 4:
                name, text, flag = "", "", False
                for inner in self._fields(field.data):
                    if (inner.number, inner.kind) == (1, BYTES):
                        name = inner.text
                    elif (inner.number, inner.kind) == (5, BYTES):
                        text = inner.text
                    elif (inner.number, inner.kind) == (10, VARINT):
                        flag = bool(inner.integer)
                mode = text if name == "mode" else mode
                is_transposing |= flag and name in _TRANSPOSING
        return Operator(kind, takes, tuple(gives), is_transposing, mode)

    def _variables(self, message: Field) -> tuple[str, tuple[str, ...]]:
        """Return the name of a slot, and those of its variables."""
        texts = [field for field in self._fields(message.data) if field.kind == BYTES]
        slot = next((field.text for field in texts if field.number == 1), "")
        return slot, tuple(field.text for field in texts if field.number == 2)
