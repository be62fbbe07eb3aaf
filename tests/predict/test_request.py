"""What is asked for: how inputs are written, what goes together, and the way to the child and back."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool import UsageError
from ckpttool.predict.request import (
    DTYPES,
    InputSpec,
    PredictionJob,
    PredictionRequest,
    from_json,
    parse_input,
    to_json,
)

_SIZES = st.lists(st.integers(0, 10**17), max_size=6)
_NAMES = st.none() | st.text(st.characters(codec="ascii", exclude_characters="="), min_size=1).filter(
    lambda name: name == name.strip()
)


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("1,10", InputSpec(None, (1, 10))),
        ("ids=1,16:int64", InputSpec("ids", (1, 16), "int64")),
        ("ids=1,16:int64:0..100", InputSpec("ids", (1, 16), "int64", 0, 100)),
        ("3:-0.5..1.5", InputSpec(None, (3,), "float32", -0.5, 1.5)),
        ("scale=", InputSpec("scale", ())),
        (":bool", InputSpec(None, (), "bool")),
        ("0.mask=2:uint8:0..256", InputSpec("0.mask", (2,), "uint8", 0, 256)),
        ("1:int8:-128..128", InputSpec(None, (1,), "int8", -128, 128)),
        ("a:b=1,2:bfloat16", InputSpec("a:b", (1, 2), "bfloat16")),
        (" 1,3 ", InputSpec(None, (1, 3))),
    ],
)
def test_input(text: str, spec: InputSpec) -> None:
    assert parse_input(text) == spec


@pytest.mark.parametrize(
    "text",
    [
        "1,-1",
        "1,,2",
        "1x3",
        "1,3:float",
        "1,3:float32:1",
        "1:float32:1..1",
        "1:float32:2..1",
        "1:float32:1.2.3..4",
        "1:float32:...",
        "1:int64:0.5..2",
        "1:uint8:0..257",
        "1:uint16:-1..2",
        "1:int8:0..129",
        "1:bool:0..1",
        "1:string:0..1",
        "=1,2",
        "9" * 5000,
    ],
)
def test_no_input(text: str) -> None:
    with pytest.raises(UsageError):
        parse_input(text)


@given(_NAMES, _SIZES, st.sampled_from(sorted(DTYPES)))
def test_every_input_can_be_written(name: str | None, sizes: list[int], dtype: str) -> None:
    prefix = "" if name is None else f"{name}="
    text = f"{prefix}{','.join(map(str, sizes))}:{dtype}"
    assert parse_input(text) == InputSpec(name, tuple(sizes), dtype)


@given(st.text())
def test_any_text_is_an_input_or_an_error(text: str) -> None:
    try:
        spec = parse_input(text)
    except UsageError:
        return
    assert spec.dtype in DTYPES


@pytest.mark.parametrize(
    "options",
    [
        {"input": "a.npz", "input_shapes": (InputSpec(None, (1,)),)},
        {"input_shapes": (InputSpec("x", (1,)), InputSpec("x", (2,)))},
        {"labels": "l.npy", "input": "a.npz"},
        {"labels": "l.npy", "min_accuracy": 0.5},
        {"min_accuracy": 0.5},
        {"labels": "l.npy", "input": "a.npz", "min_accuracy": 1.5},
        {"labels": "l.npy", "input": "a.npz", "max_error": -1.0},
        {"rtol": -1.0},
        {"atol": float("nan")},
        {"seed": -1},
        {"batch_size": 0},
        {"timeout": 0.0},
        {"timeout": float("nan")},
    ],
)
def test_options_that_contradict_each_other(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="--"):
        PredictionRequest(**options)


def test_a_job_travels_as_json() -> None:
    request = PredictionRequest(
        model="m.py:M",
        model_args={"width": 3},
        input_shapes=(InputSpec("x", (1, 2), "int64", 0, 5), InputSpec(None, ())),
        rtol=0.5,
    )
    job = PredictionJob(
        path="p", framework="torch", loader="state", request=request, options={"files": ["p"]}
    )
    assert from_json(json.loads(json.dumps(to_json(job)))) == job
