"""The training state that travels with content, and what is none."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool import TrainingState
from ckpttool.formats.sidecar import check_training, merge_training, training_document

NUMBERS = st.none() | st.integers() | st.floats(allow_nan=False)
COUNTS = st.none() | st.integers(1 - 2**63, 2**63 - 1) | st.floats(-(2.0**62), 2.0**62)
STATES = st.builds(
    TrainingState,
    epoch=COUNTS,
    step=COUNTS,
    loss=NUMBERS,
    learning_rate=NUMBERS,
    metrics=st.dictionaries(st.text(), st.floats(allow_nan=False)),
    best=NUMBERS,
    saved_at=st.none() | st.text(),
    seed=st.none() | st.integers(),
)


@given(STATES)
def test_it_comes_back(state: TrainingState) -> None:
    document = json.loads(json.dumps(training_document(state)))
    check_training(document)
    assert merge_training(TrainingState(), document) == state


def test_what_was_carried_counts_more_than_what_is_found() -> None:
    found = TrainingState(
        epoch=1, step=2, hyper_parameters={"lr": 1}, origin={"epoch": "name", "step": "key step"}
    )
    document = training_document(TrainingState(epoch=7, origin={"epoch": "file epoch_id"}))
    both = merge_training(found, document)
    assert (both.epoch, both.step, both.hyper_parameters) == (7, 2, {"lr": 1})
    assert both.origin == {"epoch": "file epoch_id", "step": "key step"}


def test_nothing_is_carried_of_nothing() -> None:
    assert training_document(TrainingState(hyper_parameters={"lr": 1}, origin={"x": "y"})) == {}
    assert merge_training(TrainingState(epoch=1), {}) == TrainingState(epoch=1)


def test_what_counts_nothing_is_not_carried() -> None:
    state = TrainingState(epoch=math.inf, step=2**63, loss=math.nan, seed=2**64 - 1)
    document = training_document(state)
    check_training(document)
    assert sorted(document) == ["loss", "origin", "seed"]


@pytest.mark.parametrize(
    "document",
    [
        None,
        [],
        {"epoch": "3"},
        {"epoch": True},
        {"step": [1]},
        {"saved_at": 3},
        {"metrics": [0.5]},
        {"metrics": {"acc": "high"}},
        {"metrics": {3: 0.5}},
        {"origin": {"epoch": 3}},
        {"hyper_parameters": {}},
        {"other": 1},
        {"epoch": math.inf},
        {"epoch": math.nan},
        {"step": -math.inf},
        {"step": 2**63},
        {"epoch": 1 << 80_000},
        {"seed": 1 << 80_000},
        {"metrics": {"acc": 1 << 80_000}},
    ],
)
def test_what_is_no_training_state(document: object) -> None:
    with pytest.raises(ValueError, match="training state"):
        check_training(document)
