"""One prediction, from its inputs to the verdict, on models of no framework at all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpttool.predict.golden import Recording, write_recording
from ckpttool.predict.interface import Arrays, Loaded, LoadFailed
from ckpttool.predict.judging import predicted
from ckpttool.predict.request import InputSpec, Job, Request
from ckpttool.report import error

Run = Callable[[Arrays], Arrays]


class Model(Loaded):
    """A function with one input."""

    detail, versions = "a function", {}

    def __init__(self, run: Run) -> None:
        self._run = run

    def inputs(self) -> tuple[InputSpec, ...]:
        return (InputSpec("x", (2,)),)

    def run(self, inputs: Arrays) -> Arrays:
        return self._run(inputs)


def judged(run: Run, **wishes: Any) -> tuple[str, list[tuple[str, str]]]:
    """Return what is told of a model, and the findings: codes and messages."""
    job = Job(path="m", framework="none", loader="none", request=Request(**wishes))
    detail, findings = predicted(Model(run), job)
    return detail, [(one.code, one.message) for one in findings]


def double(inputs: Arrays) -> Arrays:
    return {"y": inputs["x"] * 2}


@pytest.fixture
def recording(tmp_path: Path) -> str:
    path = str(tmp_path / "g.npz")
    write_recording(path, Recording({"x": np.ones(3, np.float32)}, {"y": np.full(3, 2, np.float32)}, {}))
    return path


def test_outputs_without_any_value_are_none(tmp_path: Path) -> None:
    record = tmp_path / "new.npz"
    _, findings = judged(lambda _: {"a": np.ones((0, 3)), "b": np.ones(0)}, record=str(record))
    assert findings == [("no-output", "there is no value in what the model gives: a 0×3, b 0")]
    assert not record.exists()


def test_one_output_without_values_is_told() -> None:
    detail, findings = judged(lambda _: {"a": np.ones((0, 3)), "b": np.ones(1)})
    assert findings == []
    assert detail == "a 0×3, b 1 from made-up input, seed 0; no value in a"


def test_what_differs_from_run_to_run_is_not_recorded(tmp_path: Path) -> None:
    runs = iter(range(9))
    record = tmp_path / "new.npz"
    detail, findings = judged(lambda _: {"y": np.array([next(runs)])}, record=str(record))
    assert [code for code, _ in findings] == ["runs-differ", "recording-not-written"]
    assert findings[1][1] == "two runs on one input differ: no later run could be as recorded"
    assert "recorded in" not in detail
    assert not record.exists()


def test_a_recording_as_input_gives_its_inputs(recording: str) -> None:
    detail, findings = judged(double, input=recording)
    assert (detail, findings) == ("y 3 from the input recorded in g.npz", [])


def test_inputs_of_any_name_are_no_recording(tmp_path: Path) -> None:
    path = tmp_path / "in.npz"
    np.savez(path, x=np.ones(2))
    assert judged(double, input=str(path)) == ("y 2 from in.npz", [])


def test_a_recording_of_another_model(recording: str) -> None:
    def two_alone(inputs: Arrays) -> Arrays:
        return {"y": inputs["x"] @ np.ones((2, 2))}

    detail, findings = judged(two_alone, expect=recording)
    assert detail.startswith("the recorded input doesn't run on this model: ValueError: matmul: ")
    assert findings == [("recording-mismatch", detail)]


@pytest.mark.parametrize(("code", "told"), [("predict-failed", "recording-mismatch"), ("no-output",) * 2])
def test_what_a_framework_says_of_another_models_recording(code: str, told: str, recording: str) -> None:
    def fails(_: Arrays) -> Arrays:
        raise LoadFailed(error(code, "a reason"))

    _, findings = judged(fails, expect=recording)
    said = "the recorded input doesn't run on this model: " if told != code else ""
    assert findings == [(told, f"{said}a reason")]


def test_memory_that_runs_out_is_no_fault_of_a_recording(recording: str) -> None:
    def fails(_: Arrays) -> Arrays:
        raise MemoryError

    with pytest.raises(MemoryError):
        judged(fails, expect=recording)
