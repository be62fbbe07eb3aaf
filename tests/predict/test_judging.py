"""One prediction, from its inputs to the verdict, on models of no framework at all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpttool.core.report import error
from ckpttool.predict.inputs import Recording, write_recording
from ckpttool.predict.interface import Arrays, Loaded, LoadFailed
from ckpttool.predict.prediction import predict
from ckpttool.predict.request import InputSpec, PredictionJob, PredictionRequest

Run = Callable[[Arrays], Arrays]


def loaded(run: Run, shape: tuple[int | None, ...]) -> Loaded:
    """Return a function with one input as a model."""
    return Loaded(detail="a function", versions={}, run=run, inputs=lambda: (InputSpec("x", shape),))


def judged(
    run: Run,
    shape: tuple[int | None, ...] = (2,),
    load: Callable[[], Run] | None = None,
    **options: Any,
) -> tuple[str, list[tuple[str, str]]]:
    """Return what is told of a model, and the findings: codes and messages."""
    job = PredictionJob(path="m", framework="none", loader="none", request=PredictionRequest(**options))
    detail, findings = predict(loaded(run, shape), job, lambda: loaded(load() if load else run, shape))
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
    assert findings == [("no-output", "the model returned no values: a 0×3, b 0")]
    assert not record.exists()


def test_one_output_without_values_is_told() -> None:
    detail, findings = judged(lambda _: {"a": np.ones((0, 3)), "b": np.ones(1)})
    assert findings == []
    assert detail == "a 0×3, b 1 from generated input, seed 0; no value in a"


def test_what_differs_from_run_to_run_is_not_recorded(tmp_path: Path) -> None:
    runs = iter(range(9))
    record = tmp_path / "new.npz"
    detail, findings = judged(lambda _: {"y": np.array([next(runs)])}, record=str(record))
    assert [code for code, _ in findings] == ["runs-differ", "recording-not-written"]
    assert findings[1][1] == "two runs on the same input differ, so no later run could match"
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


def test_made_up_sequences_have_several_steps() -> None:
    detail, _ = judged(double, (None, None, 2))
    assert detail == "y 3×16×2 from generated input (3×16×2), seed 0"
    assert judged(double, (None, None), batch_size=1)[0].startswith("y 1×16 from ")


def test_sizes_are_those_that_the_model_takes() -> None:
    def few(inputs: Arrays) -> Arrays:
        if inputs["x"].shape != (1, 3):
            raise ValueError("no more than one row of at most 4")
        return double(inputs)

    assert judged(few, (None, None))[0] == "y 1×3 from generated input (1×3), seed 0"


def test_what_fails_at_any_size_is_told_as_it_failed_first() -> None:
    def fails(inputs: Arrays) -> Arrays:
        raise LoadFailed(error("predict-failed", f"no {inputs['x'].shape}"))

    assert judged(fails, (None, None)) == ("no (3, 16)", [("predict-failed", "no (3, 16)")])


def summing() -> Run:
    """Return a model that keeps a sum of what it was given."""
    kept = [np.zeros(1)]

    def run(inputs: Arrays) -> Arrays:
        kept[0] = kept[0] + inputs["x"]
        return {"y": kept[0]}

    return run


def test_what_keeps_state_is_recorded_as_it_is_loaded(tmp_path: Path) -> None:
    record = tmp_path / "g.npz"
    detail, findings = judged(summing(), load=summing, record=str(record))
    assert [code for code, _ in findings] == ["keeps-state"]
    assert detail.endswith("; recorded in g.npz")
    detail, findings = judged(summing(), load=summing, expect=str(record))
    assert [code for code, _ in findings] == ["keeps-state"]
    assert detail.endswith("exactly as recorded")


def test_what_can_not_be_loaded_again_differs(tmp_path: Path) -> None:
    def gone() -> Run:
        raise OSError

    record = tmp_path / "g.npz"
    _, findings = judged(summing(), load=gone, record=str(record))
    assert [code for code, _ in findings] == ["runs-differ", "recording-not-written"]


def test_what_could_not_show_a_change_is_told_when_it_is_recorded(tmp_path: Path) -> None:
    def weak(inputs: Arrays) -> Arrays:
        return {"y": np.float32([0.1, 0.2])}

    record = tmp_path / "g.npz"
    detail, findings = judged(weak, record=str(record))
    told = "constant, other inputs give the same: it may not reveal a change of the weights"
    assert findings == [("recording-insensitive", told)]
    assert detail.endswith("; recorded in g.npz")
    assert judged(weak, expect=str(record))[1] == []
    assert judged(double, record=str(record))[1] == []


def test_a_model_that_takes_no_other_input_is_recorded(tmp_path: Path) -> None:
    def one_alone(inputs: Arrays) -> Arrays:
        if inputs["x"].tolist() != [2, 2, 2]:
            raise ValueError("not this one")
        return double(inputs)

    np.save(tmp_path / "in.npy", np.full(3, 2.0))
    record = tmp_path / "g.npz"
    assert judged(one_alone, input=str(tmp_path / "in.npy"), record=str(record))[1] == []
    assert record.exists()
