"""The options of ``verify --predict``: what was given, and nothing else, becomes an attribute."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from ckpttool import UsageError
from ckpttool.cli.predict_options import flag_of, read_predict_options
from ckpttool.core.options import options_of
from ckpttool.predict.request import PredictionRequest
from tests.support.predictions import request


def test_all_options_are_attributes_of_a_request() -> None:
    assert [*options_of(PredictionRequest)] == [one.name for one in fields(request())]


def test_nothing_given_is_no_option() -> None:
    assert read_predict_options({"paths": ["m.pth"]}) == {}


@pytest.mark.parametrize("name", ["rtol", "atol", "seed", "min_accuracy", "max_error"])
def test_zero_is_given(name: str) -> None:
    assert read_predict_options({name: 0}) == {name: 0}


def test_the_root_of_the_file_is_given() -> None:
    assert read_predict_options({"state_key": ""}) == {"state_key": ""}


def test_texts_are_read() -> None:
    given = {"model_args": '{"depth": 18}', "input_shapes": ["ids=1,16:int64"], "memory": "8GB"}
    assert read_predict_options(given) == {
        "model_args": {"depth": 18},
        "input_shapes": request(shapes="ids=1,16:int64").input_shapes,
        "memory": 8_000_000_000,
    }


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("model_args", "{", "no JSON: '{' (Expecting property name enclosed in double quotes: line 1"),
        ("model_args", "[" * 100_000, "no JSON: "),
        ("optimizer_args", "[]", "'[]' is no JSON object (like {\"depth\": 18})"),
        ("input_shapes", ["1x3"], "no input shape: '1x3'"),
        ("memory", "much", "--memory is 'much' (a size like 512MB, 8GB or 8GiB)"),
    ],
)
def test_what_can_not_be_read(name: str, value: object, told: str) -> None:
    with pytest.raises(UsageError) as refused:
        read_predict_options({name: value})
    assert str(refused.value).startswith(told)


def test_options_have_their_own_names() -> None:
    assert [flag_of(name) for name in ("input_shapes", "model_args", "seed")] == [
        "--input-shape",
        "--model-args",
        "--seed",
    ]


def test_an_option_without_a_prediction_is_refused(run, files: Path) -> None:
    guide = files / "pytorch" / "guide.pth"
    for option, value in (("--seed", "0"), ("--rtol", "0")):
        assert run("verify", guide, option, value) == (
            2,
            "",
            f"ckpttool: error: {option} goes with --predict\n",
        )
