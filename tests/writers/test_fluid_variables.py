"""What a source tells of variables and trainers is written where Paddle could read it, and else refused."""

from __future__ import annotations

import math
import struct
from dataclasses import replace

import numpy as np
import pytest

from ckpttool import TrainingState
from ckpttool.formats.paddle.fluid_writer import FluidWriter, _source_trainers, _trainers
from ckpttool.formats.paddle.parts import LEVELS
from ckpttool.formats.writer import Content, WriteOptions
from tests.support.writing import tensor

ONE = tensor("w", np.zeros((3, 2), np.float32))
BOUNDS = struct.pack("<5Q", 1, 24, 0, 1, 3)


def refusals(levels: bytes) -> list[str]:
    return [*FluidWriter().refusals(Content((ONE,), None, {}, {LEVELS + "w": levels}), WriteOptions())]


def test_sequences_as_paddle_has_them_are_taken() -> None:
    assert refusals(BOUNDS) == refusals(bytes(8)) == []


@pytest.mark.parametrize(
    "levels",
    [
        b"",
        b"junk",
        bytes(7),
        bytes(9),
        BOUNDS[:-1],
        BOUNDS + b"x",
        b"\xff" * 8,
        struct.pack("<QQ", 1, 1 << 60),
    ],
)
def test_sequences_that_are_none_are_refused(levels: bytes) -> None:
    assert refusals(levels) == ["w: Paddle can't read its sequence levels"]


@pytest.mark.parametrize(
    "count",
    [math.inf, -math.inf, math.nan, 1e300, 1 << 20_000, 0.5],
    ids=lambda one: f"{one:.3g}" if isinstance(one, float) else "long",
)
def test_counts_that_no_trainer_has_are_left_to_the_entry(count: float) -> None:
    content = Content((ONE,), training=TrainingState(epoch=count, step=count))  # type: ignore[arg-type]
    assert _trainers(content) == {}
    known = replace(content, training=TrainingState(epoch=2.0, step=7))
    assert _trainers(known) == {"0": {"epoch_id": 2, "step_id": 7}}


@pytest.mark.parametrize(
    "value", ["\ud800", 1 << 20_000, 1.5, "x" * (1 << 20), " x"], ids=lambda one: type(one).__name__
)
def test_arguments_that_are_no_files_are_left_to_the_entry(value: object) -> None:
    content = Content((ONE,), None, {"trainers": {"0": {"epoch_id": 1, "name": value}}})
    assert _source_trainers(content) is None
