"""Which layer each weight of a Paddle program belongs to: told by its operators and by its names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool import DamagedCheckpoint
from ckpttool.core.readable import Buffer
from ckpttool.formats.paddle.operators import Operator, kind_by_name, kinds_by_operator
from ckpttool.formats.paddle.pir import read_pir
from ckpttool.formats.paddle.program import read_operators
from ckpttool.storage.source import Source


def takes(kind: str, gives: str = "out", *, transposing: bool = False, **slots: str) -> Operator:
    inputs = [(slot, (name,)) for slot, name in slots.items()]
    return Operator(kind, inputs, [("Out", (gives,))], is_transposing=transposing)


def rnn(*weights: str, mode: str) -> Operator:
    return Operator("rnn", [("WeightList", weights)], [], mode=mode)


@pytest.mark.parametrize(
    ("operators", "kinds"),
    [
        ([takes("mul", X="x", Y="w")], {"w": "linear"}),
        ([takes("matmul_v2", X="w", Y="y")], {"y": "linear"}),
        ([takes("matmul_v2", X="x", Y="w", transposing=True)], {"w": "linear transposed"}),
        ([takes("cast", "half", X="w"), takes("mul", X="x", Y="half")], {"w": "linear"}),
        ([takes("relu", "act", X="w"), takes("mul", X="x", Y="act")], {"act": "linear"}),
        (
            [
                takes("lookup_table_v2", Ids="i", W="w"),
                takes("matmul_v2", X="x", Y="w", transposing=True),
            ],
            {"w": "embedding"},
        ),
        ([rnn("a", "b", mode="GRU")], {"a": "gru_cell", "b": "gru_cell"}),
        ([rnn("a", mode="NEW")], {}),
        ([takes("conv2d", Input="x", Filter="w")], {"w": "conv2d"}),
        ([takes("elementwise_add", X="x", Y="b")], {}),
        ([Operator("embedding", [(None, ("i", "w"))], [(None, ("o",))])], {"w": "embedding"}),
        ([Operator("relu_", [(None, ("x",))], [(None, ("o",))])], {}),
    ],
)
def test_an_operator_tells_what_it_takes(operators: list[Operator], kinds: Mapping[str, str]) -> None:
    assert kinds_by_operator(operators) == kinds


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("linear_0.w_0", "linear"),
        ("fc_12.b_0", "linear"),
        ("model/embedding_3.w_0", "embedding"),
        ("batch_norm2d_0.w_2", "batch_norm2d"),
        ("linear_0.w_0_moment1_0", None),
        ("head.w_0", None),
        ("linear.weight", None),
    ],
)
def test_only_names_that_paddle_makes_up_tell_something(name: str, kind: str | None) -> None:
    assert kind_by_name(name) == kind


@given(st.binary(max_size=200))
def test_any_bytes_are_operators_or_none(data: bytes) -> None:
    try:
        assert isinstance(kinds_by_operator(read_operators(Buffer("p", data))), dict)
    except DamagedCheckpoint as failure:
        assert failure.reason


def test_a_malformed_operator_of_paddle_3_tells_nothing(files: Path, tmp_path: Path) -> None:
    document = json.loads((files / "paddle" / "pir.json").read_text())
    operators = document["program"]["regions"][0]["blocks"][0]["ops"]
    del next(one for one in operators if one["#"] == "1.matmul")["A"]
    (tmp_path / "m.json").write_text(json.dumps(document))
    with Source(str(tmp_path / "m.json")) as source:
        program = read_pir(source)
        assert len(program.variables) == 8
        assert program.kinds() == {}
