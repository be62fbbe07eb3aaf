"""Paddle's and Fluid's models, loaded and run as the child does; the expected values are Paddle's own."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from ckpttool import open_checkpoint
from tests.support.predictions import Stage, Start, done_in_a_child, job_of, refusal_of

HERE = Path(__file__).parent
WRITER = HERE / "write_paddle.py"
NET = f"{WRITER}:Net"
PADDLE = f"Paddle {version('paddlepaddle')}" if find_spec("paddle") else "Paddle"
ADAM = "paddle.optimizer:Adam"

Ask = Callable[..., tuple[str, str]]

pytestmark = [
    pytest.mark.framework,
    pytest.mark.skipif(find_spec("paddle") is None, reason="paddle is not installed"),
]


@pytest.fixture
def models(paddle_files: Path) -> Path:
    return paddle_files


@pytest.fixture
def ask(start: Start) -> Ask:
    """Return what loads and runs a model, and tells of both: what was done, or the findings."""

    def words(path: Path, **options: Any) -> tuple[str, str]:
        told = start("paddle").do(_job(path, **options))
        return _words(told.load), _words(told.predict)

    return words


def _job(path: Path, **options: Any) -> Any:
    with open_checkpoint(path) as checkpoint:
        assert not checkpoint.findings
    return job_of(path, **options)


def _words(stage: Stage) -> str:
    return "; ".join(f"{code} {where}: {text}" for code, _, text, where in stage.findings) or stage.detail


@pytest.mark.parametrize(
    ("name", "recording"),
    [
        ("separate", "two"),
        ("combined", "two"),
        ("named", "two"),
        ("two.pdmodel", "two"),
        ("two.pdiparams", "two"),
        ("jit.pdmodel", "jit"),
    ],
)
def test_inference_models_predict_what_paddle_does(ask: Ask, models: Path, name: str, recording: str) -> None:
    load, predict = ask(models / name, expect=str(models / f"{recording}.npz"))

    assert load == f"{PADDLE}: inference program, {4 if recording == 'jit' else 5} variables"
    assert "from the recorded input; " in predict
    assert "as recorded" in predict


@pytest.mark.parametrize("name", ["separate_off", "combined_off", "named_off", "two_off.pdmodel"])
def test_a_weight_off_by_a_percent_is_seen(ask: Ask, models: Path, name: str) -> None:
    load, predict = ask(models / name, expect=str(models / "two.npz"))

    assert load.startswith(f"{PADDLE}: inference program")
    assert predict.startswith("outputs-changed output_0: ")


def test_inputs_are_made_up_from_the_feeds(ask: Ask, models: Path) -> None:
    predictions = [
        ask(models / name, batch_size=3)[1] for name in ("two.pdmodel", "bare.pdmodel", "ragged.pdmodel")
    ]

    assert predictions == [
        "output_0 3×2, output_1 3×2 from generated input (x 3×4, ids 3×2), seed 0",
        "output_0 3×4 from generated input (3×4), seed 0",
        "output_0 1×4 from generated input (16×4), seed 0",  # the rows are one sequence, which is summed
    ]


def test_what_is_wrong_with_a_prediction_is_said(ask: Ask, models: Path) -> None:
    wide = ask(models / "two.pdmodel", shapes="x=2,5 ids=2,2:int64")[1]
    unknown = ask(models / "two.pdmodel", shapes="x=2,4 words=2,2:int64")[1]
    strange = ask(models / "two.pdmodel", shapes="x=2,4 ids=2,2:int64:10..20")[1]

    assert wide.startswith("input-rejected None: the model rejects the input 2×5 float32, 2×2 int64: ")
    assert "should have dimensions = 2, shape = (-1, 4), but received fed shape [2, 5]" in wide
    assert unknown == (
        "input-missing None: no input 'ids' in generated input, seed 0 (the model takes x, ids)"
    )
    assert "expected >= 0 and < 10" in strange


def test_outputs_must_be_finite(ask: Ask, models: Path) -> None:
    assert "output-not-finite output_0: " in ask(models / "infinite.pdmodel")[1]


@pytest.mark.parametrize("name", ["inference-separate", "inference-combined"])
def test_a_program_without_outputs_can_not_be_run(ask: Ask, files: Path, name: str) -> None:
    load, predict = ask(files / "fluid" / name)

    assert load == f"{PADDLE}: inference program, 4 variables"
    assert predict == "no-output None: the program has no outputs (no fetch)"


def test_a_step_of_training_needs_a_layer(ask: Ask, models: Path) -> None:
    _, predict = ask(models / "jit.pdmodel", resume_step=True)

    assert predict == "cannot-train None: no training step: an inference program has no backward part"


def test_programs_of_paddle_3_need_it(ask: Ask, files: Path) -> None:
    load, predict = ask(files / "paddle" / "pir.json")

    message = f"a program in JSON needs PaddlePaddle 3; this is {PADDLE.partition(' ')[2]}"
    assert load == f"framework-too-old pir.json: {message}"
    assert predict == "it was not loaded"


def test_parameters_predict_in_a_layer(ask: Ask, models: Path) -> None:
    options = {"model": NET, "expect": str(models / "net.npz")}
    load, predict = ask(models / "net.pdparams", **options)
    nested_load, nested = ask(models / "nested.pdparams", **options)
    _, off = ask(models / "net_off.pdparams", **options)

    assert load == nested_load == f"{PADDLE}: Net, 4 keys"
    assert "as recorded" in predict
    assert "as recorded" in nested
    assert off.startswith("outputs-changed output: ")


@pytest.mark.parametrize("name", ["net", "nested"])
def test_training_goes_on_with_the_optimizers_state(ask: Ask, models: Path, name: str) -> None:
    options = {"model": NET, "optimizer": ADAM, "resume_step": True, "shapes": "2,4"}
    load, predict = ask(models / f"{name}.pdparams", **options)

    assert load == f"{PADDLE}: Net, 4 keys; Adam, state of 16 slots"
    assert predict.endswith("; one step of Adam changed 4 of 4 parameters")


def test_an_optimizers_state_must_be_there(ask: Ask, models: Path) -> None:
    load, _ = ask(models / "alone.pdparams", model=NET, optimizer=ADAM)

    message = "no .pdopt next to it, and the checkpoint has no optimizer state, or several"
    assert load == f"optimizer-mismatch None: {message}"


def test_keys_and_shapes_must_fit(ask: Ask, models: Path, files: Path) -> None:
    wider, _ = ask(models / "net.pdparams", model=NET, model_args={"hidden": 5})
    another, predict = ask(files / "paddle" / "protocol4.pdparams", model=NET)

    assert wider == (
        "shape-mismatch first.weight: 4×3 in the checkpoint, 4×5 in the model; "
        "shape-mismatch first.bias: 3 in the checkpoint, 5 in the model; "
        "shape-mismatch last.weight: 3×2 in the checkpoint, 5×2 in the model"
    )
    assert "missing-key first.weight: in the model, but not in the checkpoint" in another
    assert "unexpected-key 0.weight: in the checkpoint, but not in the model" in another
    assert predict == "it was not loaded"


def test_a_state_of_another_optimizer_is_told(ask: Ask, models: Path, tmp_path: Path) -> None:
    for name in ("net.pdparams", "net.pdopt"):
        shutil.copy(models / name, tmp_path)
    shutil.copy(models / "nested.pdparams", tmp_path / "net.pdopt")

    load, _ = ask(tmp_path / "net.pdparams", model=NET, optimizer=ADAM)

    assert "optimizer-mismatch model: it belongs to no parameter of the model" in load


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"cos\nsystem\n(S'true'\ntR.", "loading net.pdopt could run code: --trust allows it"),
        (b"\x80\x02}q\x00(X\x01", "net.pdopt can't be read: truncated: the pickle ends early"),
    ],
)
def test_an_optimizers_file_is_checked_before_it_is_loaded(
    models: Path, tmp_path: Path, content: bytes, why: str
) -> None:
    shutil.copy(models / "net.pdparams", tmp_path)
    (tmp_path / "net.pdopt").write_bytes(content)

    assert refusal_of(tmp_path / "net.pdparams", model=NET, optimizer=ADAM) == why


def test_the_child_does_so_as_well(models: Path) -> None:
    job = _job(models / "separate", expect=str(models / "two.npz"), record=str(models / "again.npz"))
    answer = done_in_a_child(job)

    assert answer.load.detail == f"{PADDLE}: inference program, 5 variables"
    assert answer.predict.findings == ()
    assert answer.predict.detail.endswith("; recorded in again.npz")
    assert not [line for line in answer.output if "New Executor" in line]


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("paddle/nameless.pdiparams", "it has tensors, but no program"),
        ("paddle/fp32.lodtensor", "it has tensors, but no program"),
        (
            "paddle/static.pdmodel",
            "a training program doesn't declare its outputs: save it with save_inference_model",
        ),
        (
            "paddle/protocol4.pdparams",
            "a state dict doesn't contain its model; name the class with --model file.py:Name",
        ),
        (
            "fluid/variables",
            "it has variables, but no program; only a saved inference model can be run",
        ),
    ],
)
def test_what_can_not_be_run_is_said(files: Path, path: str, why: str) -> None:
    assert refusal_of(files / path) == why
