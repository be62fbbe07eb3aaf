"""Logs and checkpoints: matched by step, else by epoch, and never by a guess."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from ckpttool import NotFound, UsageError, list_checkpoints
from tests.support.saves import Facts, save, warnings_in


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current directory, which is empty."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def metrics_in(directory: Path | str, *files: str) -> tuple[dict[str, dict[str, float]], list[str]]:
    """Return the metrics that checkpoints have with some logs, by their paths, and what is said of these."""
    listing = list_checkpoints(directory, metrics=files)
    rows = [row.document() for row in listing.checkpoints]
    told = [one for one in listing.warnings if "file times decide" not in one]
    return {os.path.relpath(row["path"], directory): row["metrics"] for row in rows}, told


def measured(
    saves: Sequence[str] | dict[str, Facts], *files: str
) -> tuple[list[dict[str, float]], list[str]]:
    """Return the metrics that checkpoints below ``run`` have with some logs, and what is said of these."""
    for old in Path("run").rglob("*.*pt"):
        old.unlink()
    for name in saves:
        save(Path("run", name), **(saves[name] if isinstance(saves, dict) else {}))
    found, warnings = metrics_in("run", *files)
    return [found[name] for name in saves], warnings


def log(path: str, text: str) -> str:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text)
    return path


# The frameworks' own --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["metrics.csv", "tb"])
def test_lightning_logs_what_follows_a_step_under_the_one_before(files: Path, name: str) -> None:
    run = files / "metrics" / "lightning"
    found, warnings = metrics_in(run, str(run / name))
    losses = {os.path.basename(path): metrics.get("val_loss") for path, metrics in found.items()}
    assert losses == {
        "epoch=1-val_loss=0.25.ckpt": 0.25,
        "epoch=3-val_loss=0.38.ckpt": 0.375,
        "last.ckpt": 0.375,
        "epoch=0-step=3.ckpt": None,
        "epoch=1-step=6.ckpt": None,
        "epoch=2-step=9.ckpt": None,
        "epoch=2-step=12.ckpt": 0.75,
        "epoch=3-step=15.ckpt": None,
    }
    assert warnings == [f"{run / name}: one log for the checkpoints of 2 directories"]


def test_log_of_ones_own_beside_lightning_counts_as_the_checkpoints_do(files: Path) -> None:
    path = log("own.csv", "epoch,step,f1\n1,8,0.5\n3,16,0.75\n")
    listing = list_checkpoints(files / "metrics" / "lightning" / "best", metrics=[path])
    rows = [row.document() for row in listing.checkpoints]
    assert {row["step"]: row["metrics"]["f1"] for row in rows} == {8: 0.5, 16: 0.75}


def test_trainer_logs_under_the_step_of_the_checkpoint(files: Path) -> None:
    run = files / "metrics" / "trainer"
    history = json.loads((run / "checkpoint-8" / "trainer_state.json").read_text())["log_history"]
    expected = [
        next((one["eval_loss"] for one in history if one["step"] == step and "eval_loss" in one), None)
        for step in (2, 4, 6, 8)
    ]
    entries = [f"checkpoint-{step}" for step in (2, 4, 6, 8)]
    for name, tag in (("checkpoint-8/trainer_state.json", "eval_loss"), ("", "eval/loss")):
        found, warnings = measured(entries, str(run / name))
        assert [one.get(tag) for one in found] == [one and pytest.approx(one) for one in expected]
        assert warnings == []


def test_keras_counts_epochs_from_0_in_logs_and_from_1_in_names(files: Path) -> None:
    run = files / "metrics" / "keras"
    path = run / "log.csv"
    with pytest.raises(UsageError) as refused:
        metrics_in(run, str(path))
    assert str(refused.value) == (
        f"{path}: it has epochs 0 to 3, the checkpoints steps 2 to 8 and epochs 1 to 4; "
        f"it is unclear which epochs are the same "
        f"(use {path}:epoch+1, or {path}:epoch if equal numbers are)"
    )
    found, warnings = metrics_in(run, f"{path}:epoch+1")
    assert len(found) == 4 and warnings == []
    events, _ = metrics_in(run, f"{run / 'tb'}:epoch+1")
    for name, metrics in found.items():
        assert metrics["val_loss"] == pytest.approx(metrics["value"], abs=1e-4)
        assert events[name]["validation/epoch_loss"] == pytest.approx(metrics["val_loss"])


# What belongs to what -------------------------------------------------------------------------------


def test_steps_come_before_epochs() -> None:
    path = log("m.csv", "epoch,step,loss\n1,10,0.5\n1,20,0.25\n2,30,0.1\n")
    entries = ["a-epoch=1-step=10.ckpt", "a-epoch=1-step=15.ckpt", "a-epoch=1.ckpt"]
    assert measured(entries, path) == ([{"loss": 0.5}, {}, {"loss": 0.25}], [])


def test_rows_without_a_step_are_matched_by_epoch() -> None:
    path = log(
        "m.jsonl", '{"epoch": 1, "acc": 0.5}\n{"step": 10, "loss": 0.25}\n{"epoch": 2.0, "acc": 0.75}\n'
    )
    entries = ["a-epoch=1-step=10.ckpt", "a-epoch=2-step=20.ckpt"]
    assert measured(entries, path) == ([{"acc": 0.5, "loss": 0.25}, {"acc": 0.75}], [])


def test_pairs_in_names_have_steps() -> None:
    path = log("m.csv", "step,loss\n100,0.5\n200,0.25\n")
    entries = ["checkpoint_1_100.pt", "checkpoint_2_200.pt"]
    assert measured(entries, path)[0] == [{"loss": 0.5}, {"loss": 0.25}]


@pytest.mark.parametrize(
    ("epochs", "numbers", "is_matched"),
    [
        (range(3), (0, 1, 2), True),
        (range(3), (1, 2), True),
        (range(3), (1, 2, 3), False),
        (range(1, 4), (1, 2, 3), True),
        (range(1, 4), (0, 1, 2), False),
        (range(11), (8, 9, 10), True),
        (range(10), (8, 9, 10), False),
    ],
)
def test_epochs_are_not_guessed(epochs: range, numbers: tuple[int, ...], is_matched: bool) -> None:
    path = log("m.csv", "epoch,loss\n" + "".join(f"{epoch},0.{epoch}\n" for epoch in epochs))
    entries = [f"m_epoch_{number}.pt" for number in numbers]
    if not is_matched:
        with pytest.raises(UsageError, match="which epochs are the same"):
            measured(entries, path)
    else:
        assert measured(entries, path) == ([{"loss": float(f"0.{number}")} for number in numbers], [])


def test_epochs_that_are_not_decided_are_told_beside_steps_that_are() -> None:
    """As in the logs of Keras for TensorBoard: one tag counts steps, another epochs."""
    path = log("m.csv", "step,epoch,by_step,by_epoch\n1,,0.5,\n,0,,0.9\n2,,0.4,\n,1,,0.8\n")
    entries: dict[str, Facts] = {f"m_epoch_{number}.pt": {"global_step": number} for number in (1, 2)}
    found, (warning,) = measured(entries, path)
    assert found == [{"by_step": 0.5}, {"by_step": 0.4}]
    assert warning == (
        "m.csv: it has epochs 0 to 1, the checkpoints 1 to 2; it is unclear which epochs are the same "
        "(use m.csv:epoch+1, or m.csv:epoch if equal numbers are)"
    )
    assert measured(entries, f"{path}:epoch+1")[0] == [{"by_epoch": 0.9}, {"by_epoch": 0.8}]


def test_one_of_many_runs_that_is_not_decided_is_a_warning() -> None:
    log("run/a/m.csv", "epoch,loss\n0,0.5\n1,0.25\n")
    log("run/b/m.csv", "epoch,loss\n1,0.5\n")
    entries = ["a/epoch_2.pt", "b/epoch_1.pt"]
    found, (warning,) = measured(entries, "m.csv")
    assert found == [{}, {"loss": 0.5}] and "run/a/m.csv: it has epochs 0 to 1" in warning


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("m.csv:epoch+1", [{"loss": 0.5}, {"loss": 0.25}]),
        ("m.csv:epoch", [{"loss": 0.25}, {}]),
        ("m.csv:epoch-1", [{}, {}]),
    ],
)
def test_what_is_matched_can_be_said(given: str, found: list[dict[str, float]]) -> None:
    log("m.csv", "epoch,loss\n0,0.5\n1,0.25\n")
    assert measured(["m_epoch_1.pt", "m_epoch_2.pt"], given)[0] == found


def test_steps_of_a_log_may_be_epochs() -> None:
    log("m.csv", "step,loss\n1,0.5\n2,0.25\n")
    entries = ["m_epoch_1.pt", "m_epoch_2.pt"]
    assert measured(entries, "m.csv") == (
        [{}, {}],
        [
            "m.csv: it has steps 1 to 2, the checkpoints epochs 1 to 2; none of these match "
            "(if its steps are epochs, use m.csv:epoch)"
        ],
    )
    assert measured(entries, "m.csv:epoch") == ([{"loss": 0.5}, {"loss": 0.25}], [])
    assert measured(["m_2.pt"], "m.csv:step") == ([{"loss": 0.25}], [])


def test_file_that_is_called_so_is_meant() -> None:
    path = log("m.csv:step+1", "step,loss\n10,0.5\n")
    assert measured(["step_10.pt"], path)[0] == [{"loss": 0.5}]


def test_nothing_matches() -> None:
    path = log("m.csv", "step,loss\n1,0.5\n99,0.25\n")
    told = "m.csv: it has steps 1 to 99, the checkpoints steps 100 to 200; none of these match"
    assert measured(["step_100.pt", "step_200.pt"], path) == ([{}, {}], [told])
    log("m.csv", "step,loss\n")
    assert measured(["step_100.pt"], path) == ([{}], ["m.csv: it is still empty"])
    log("m.csv", "step;loss\n100;3,00\n200;2,50\n")
    comma = "m.csv: loss is '3,00' in line 2: decimal commas are not supported"
    told = "m.csv: it has steps 100 to 200, the checkpoints steps 100 to 200; it has no values for them"
    assert measured(["step_100.pt", "step_200.pt"], path) == ([{}, {}], [comma, told])


# What counts ----------------------------------------------------------------------------------------


def test_log_counts_more_than_the_checkpoint_and_contradictions_are_told() -> None:
    path = log("m.csv", "step,val_loss,loss,acc\n10,0.35,0.5,0.934\n20,nan,0.5,0.9\n30,0.125,0.5,0.7\n")
    entries: dict[str, Facts] = {
        "step_10.pt": {"metrics": {"val_loss": 0.25, "acc": 0.93}, "loss": 0.5},
        "step_20.pt": {"metrics": {"val_loss": 0.5, "f1": 0.5}},
        "step_30.pt": {"metrics": {"val_loss": 0.12}},
    }
    found, warnings = measured(entries, path)
    assert [one["val_loss"] for one in found[::2]] == [0.35, 0.125] and math.isnan(found[1]["val_loss"])
    assert found[1]["f1"] == 0.5
    assert warnings == [
        "m.csv: val_loss of 2 checkpoints differs in the log, which counts: "
        "step_10.pt says 0.25, the log 0.35"
    ]


def test_of_two_logs_the_later_counts() -> None:
    one, two = log("1.csv", "step,a,b\n10,1,1\n"), log("2.csv", "step,a\n10,2\n")
    assert measured(["step_10.pt"], one, two)[0] == [{"a": 2.0, "b": 1.0}]


# Where they lie -------------------------------------------------------------------------------------


def test_name_is_looked_for_beside_each_series_and_above() -> None:
    log("run/a/m.csv", "step,loss\n10,0.5\n")
    log("run/b/m.csv", "step,loss\n10,0.25\n")
    Path("run/b/ckpt").mkdir()
    log("run/c/other.csv", "")
    entries = ["a/step_10.pt", "b/ckpt/step_10.pt", "c/step_10.pt"]
    assert measured(entries, "m.csv") == (
        [{"loss": 0.5}, {"loss": 0.25}, {}],
        ["m.csv: not found next to the checkpoints in run/c"],
    )
    log("run/m.csv", "step,loss\n10,0.75\n")
    found, warnings = measured(entries, "m.csv")
    assert (found[2], warnings) == ({"loss": 0.75}, [])
    log("m.csv", "step,loss\n10,0.1\n")
    found, warnings = measured(entries, "m.csv")
    assert found == [{"loss": 0.1}] * 3
    assert warnings == ["m.csv: one log for the checkpoints of 3 directories"]


def test_logs_that_are_missing_are_counted() -> None:
    log("run/a/m.csv", "step,loss\n10,0.5\n")
    entries = [f"{name}/step_10.pt" for name in "abcd"]
    told = "m.csv: not found next to the checkpoints in run/b and 2 other directories"
    assert measured(entries, "m.csv")[1] == [told]
    assert measured(entries[:3], "m.csv")[1] == [told.replace("2 other directories", "1 other directory")]


def test_log_that_is_nowhere() -> None:
    told = "m.csv: no such file or directory: not here, next to the checkpoints or above them"
    for given in ("m.csv", "m.csv:epoch+1"):
        with pytest.raises(NotFound) as failure:
            measured(["step_10.pt"], given)
        assert str(failure.value) == told
    with pytest.raises(NotFound):
        measured(["step_10.pt"], "/nowhere/m.csv")
    assert measured([], "m.csv") == ([], [])


# What a name says otherwise than the checkpoint itself --------------------------------------------------


@pytest.mark.parametrize(
    ("name", "inside", "is_another"),
    [
        ("e-val_loss=0.12.pt", 0.1249, False),
        ("e-val_loss=0.12.pt", 0.1151, False),
        ("e-val_loss=1.pt", 1.4, False),
        ("e-val_loss=91.2.pt", 0.91234, False),
        ("e-val_loss=nan.pt", math.nan, False),
        ("e-val_loss=inf.pt", math.inf, False),
        ("e-val_loss=1e-05.pt", 1.4e-5, False),
        ("e-other_loss=0.1.pt", 0.9, False),
        ("e-val_loss=0.1.pt", 0.9, True),
        ("e-val_loss=0.12.pt", 0.1, True),
        ("e-val_loss=1.00.pt", 1.4, True),
        ("e-val_loss=0.5.pt", math.nan, True),
        ("e-val_loss=nan.pt", 0.5, True),
    ],
)
def test_rounded_in_the_name_or_another_inside(
    here: Path, name: str, inside: float, is_another: bool
) -> None:
    save(here / name, metrics={"val_loss": inside})
    what = "val_loss of 1 checkpoint differs between content and name, and the content counts"
    assert warnings_in(here) == [f"{what}: {name} has {inside:.6g} inside"] * is_another


def test_several_are_told_once(here: Path) -> None:
    for number in (1, 2, 3):
        save(here / f"epoch_{number}_loss_0.{number}.pt", loss=0.01)
    (told,) = warnings_in(here)
    assert told.startswith("loss of 3 checkpoints differs between content and name")
    assert told.endswith("epoch_1_loss_0.1.pt has 0.01 inside")
