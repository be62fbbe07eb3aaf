"""The options of ``verify --predict``: what was given, and nothing else, becomes an attribute."""

from __future__ import annotations

import shlex
from dataclasses import fields
from pathlib import Path
from typing import Any

from ckpttool.cli.commands import command_named
from ckpttool.cli.verify_options import VerifyCommand, flag_of
from ckpttool.core.options import options_of
from ckpttool.predict.request import PredictionRequest
from tests.support.commands import Run, refusals
from tests.support.golden import Golden, refusal
from tests.support.predictions import request


def test_all_options_are_attributes_of_a_request() -> None:
    assert [*options_of(PredictionRequest)] == [one.name for one in fields(request())]


def given(arguments: str) -> dict[str, Any]:
    """Return what a command line gives of a prediction."""
    command = command_named("verify")
    taken: VerifyCommand = command.record_of(command.make_context("verify", shlex.split(arguments)))
    return dict(taken.prediction)


def test_nothing_given_is_no_option() -> None:
    assert given("m.pth") == {}


def test_zero_is_given() -> None:
    for name in ("rtol", "atol", "seed", "min_accuracy", "max_error"):
        assert given(f"{flag_of(name)} 0") == {name: 0}


def test_the_root_of_the_file_is_given() -> None:
    assert given("--state-key ''") == {"state_key": ""}


def test_texts_are_read() -> None:
    texts = """--model-args '{"depth": 18}' --input-shape ids=1,16:int64 --memory 8GB"""
    assert given(texts) == {
        "model_args": {"depth": 18},
        "input_shapes": request(shapes="ids=1,16:int64").input_shapes,
        "memory": 8_000_000_000,
    }


def test_what_can_not_be_read(golden: Golden) -> None:
    values = ("--optimizer-args []", "--input-shape 1x3", "--memory much")
    golden({value: refusal(given, value) for value in values})
    for text in ("{", "[" * 100_000):
        assert refusal(given, f"--model-args {text}").startswith("--model-args: invalid JSON: '")


def test_options_have_their_own_names() -> None:
    assert [flag_of(name) for name in ("input_shapes", "model_args", "seed")] == [
        "--input-shape",
        "--model-args",
        "--seed",
    ]


def test_an_option_without_a_prediction_is_refused(run: Run, files: Path, golden: Golden) -> None:
    guide = files / "pytorch" / "guide.pth"
    golden(refusals(run, f"verify {guide} --seed 0", f"verify {guide} --rtol 0"))
