"""Logs and checkpoints: matched by step, else by epoch, and never by a guess."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ckpttool import NotFound, UsageError
from ckpttool.runs.members.entry import Entry
from ckpttool.runs.metrics.log_metrics import add_log_metrics
from tests.support.directories import survey

Make = Callable[..., Entry]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current directory, which is empty."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def measured(entries: list[Entry], *files: str) -> tuple[list[dict[str, float]], list[str]]:
    found, warnings = add_log_metrics(entries, files, "run")
    return [dict(one.metrics) for one in found], warnings


def log(path: str, text: str) -> str:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text)
    return path


# The frameworks' own --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["metrics.csv", "tb"])
def test_lightning_logs_what_follows_a_step_under_the_one_before(files: Path, name: str) -> None:
    run = files / "metrics" / "lightning"
    found = survey(run, recursive=True, metrics=[str(run / name)])
    losses = {entry.name: entry.metrics.get("val_loss") for entry in found.entries}
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
    assert found.remarks == (f"{run / name}: one log for the checkpoints of 2 directories",)


def test_log_of_ones_own_beside_lightning_counts_as_the_checkpoints_do(files: Path) -> None:
    path = log("own.csv", "epoch,step,f1\n1,8,0.5\n3,16,0.75\n")
    found = survey(files / "metrics" / "lightning" / "best", recursive=True, metrics=[path])
    assert {entry.step: entry.metrics["f1"] for entry in found.entries} == {8: 0.5, 16: 0.75}


def test_trainer_logs_under_the_step_of_the_checkpoint(files: Path, entry: Make) -> None:
    run = files / "metrics" / "trainer"
    history = json.loads((run / "checkpoint-8" / "trainer_state.json").read_text())["log_history"]
    expected = [
        next((one["eval_loss"] for one in history if one["step"] == step and "eval_loss" in one), None)
        for step in (2, 4, 6, 8)
    ]
    entries = [entry(f"checkpoint-{step}") for step in (2, 4, 6, 8)]
    for name, tag in (("checkpoint-8/trainer_state.json", "eval_loss"), ("", "eval/loss")):
        found, warnings = measured(entries, str(run / name))
        assert [one.get(tag) for one in found] == [one and pytest.approx(one) for one in expected]
        assert warnings == []


def test_keras_counts_epochs_from_0_in_logs_and_from_1_in_names(files: Path) -> None:
    run = files / "metrics" / "keras"
    path = run / "log.csv"
    with pytest.raises(UsageError) as refused:
        survey(run, recursive=True, metrics=[str(path)])
    assert str(refused.value) == (
        f"{path}: it has epochs 0 to 3, the checkpoints steps 2 to 8 and epochs 1 to 4; "
        f"it can't be told which epochs are the same "
        f"(say {path}:epoch+1, or {path}:epoch where equal numbers are)"
    )
    found = survey(run, recursive=True, metrics=[f"{path}:epoch+1"])
    assert len(found.entries) == 4 and found.remarks == ()
    for one in found.entries:
        assert one.metrics["val_loss"] == pytest.approx(one.metrics["value"], abs=1e-4)
    events = survey(run, recursive=True, metrics=[f"{run / 'tb'}:epoch+1"])
    for one, other in zip(found.entries, events.entries, strict=True):
        assert other.metrics["validation/epoch_loss"] == pytest.approx(one.metrics["val_loss"])


# What belongs to what -------------------------------------------------------------------------------


def test_steps_come_before_epochs(entry: Make) -> None:
    path = log("m.csv", "epoch,step,loss\n1,10,0.5\n1,20,0.25\n2,30,0.1\n")
    entries = [entry("a-epoch=1-step=10.ckpt"), entry("a-epoch=1-step=15.ckpt"), entry("a-epoch=1.ckpt")]
    assert measured(entries, path) == ([{"loss": 0.5}, {}, {"loss": 0.25}], [])


def test_rows_without_a_step_are_matched_by_epoch(entry: Make) -> None:
    path = log(
        "m.jsonl", '{"epoch": 1, "acc": 0.5}\n{"step": 10, "loss": 0.25}\n{"epoch": 2.0, "acc": 0.75}\n'
    )
    entries = [entry("a-epoch=1-step=10.ckpt"), entry("a-epoch=2-step=20.ckpt")]
    assert measured(entries, path) == ([{"acc": 0.5, "loss": 0.25}, {"acc": 0.75}], [])


def test_pairs_in_names_have_steps(entry: Make) -> None:
    path = log("m.csv", "step,loss\n100,0.5\n200,0.25\n")
    entries = [entry("checkpoint_1_100.pt"), entry("checkpoint_2_200.pt")]
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
def test_epochs_are_not_guessed(
    entry: Make, epochs: range, numbers: tuple[int, ...], is_matched: bool
) -> None:
    path = log("m.csv", "epoch,loss\n" + "".join(f"{epoch},0.{epoch}\n" for epoch in epochs))
    entries = [entry(f"m_epoch_{number}.pt") for number in numbers]
    if not is_matched:
        with pytest.raises(UsageError, match="which epochs are the same"):
            measured(entries, path)
    else:
        assert measured(entries, path) == ([{"loss": float(f"0.{number}")} for number in numbers], [])


def test_epochs_that_are_not_decided_are_told_beside_steps_that_are(entry: Make) -> None:
    """As in the logs of Keras for TensorBoard: one tag counts steps, another epochs."""
    path = log("m.csv", "step,epoch,by_step,by_epoch\n1,,0.5,\n,0,,0.9\n2,,0.4,\n,1,,0.8\n")
    entries = [replace(entry(f"m_epoch_{number}.pt"), step=number) for number in (1, 2)]
    found, (warning,) = measured(entries, path)
    assert found == [{"by_step": 0.5}, {"by_step": 0.4}]
    assert warning == (
        "m.csv: it has epochs 0 to 1, the checkpoints 1 to 2; it can't be told which epochs are the same "
        "(say m.csv:epoch+1, or m.csv:epoch where equal numbers are)"
    )
    assert measured(entries, f"{path}:epoch+1")[0] == [{"by_epoch": 0.9}, {"by_epoch": 0.8}]


def test_one_of_many_runs_that_is_not_decided_is_a_warning(entry: Make) -> None:
    log("run/a/m.csv", "epoch,loss\n0,0.5\n1,0.25\n")
    log("run/b/m.csv", "epoch,loss\n1,0.5\n")
    entries = [moved(entry, f"run/{name}", "epoch_2.pt" if name == "a" else "epoch_1.pt") for name in "ab"]
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
def test_what_is_matched_can_be_said(entry: Make, given: str, found: list[dict[str, float]]) -> None:
    log("m.csv", "epoch,loss\n0,0.5\n1,0.25\n")
    assert measured([entry("m_epoch_1.pt"), entry("m_epoch_2.pt")], given)[0] == found


def test_steps_of_a_log_may_be_epochs(entry: Make) -> None:
    log("m.csv", "step,loss\n1,0.5\n2,0.25\n")
    entries = [entry("m_epoch_1.pt"), entry("m_epoch_2.pt")]
    assert measured(entries, "m.csv") == (
        [{}, {}],
        [
            "m.csv: it has steps 1 to 2, the checkpoints epochs 1 to 2; none of them is in it "
            "(if its steps are epochs, say m.csv:epoch)"
        ],
    )
    assert measured(entries, "m.csv:epoch") == ([{"loss": 0.5}, {"loss": 0.25}], [])
    assert measured([entry("m_2.pt")], "m.csv:step") == ([{"loss": 0.25}], [])


def test_file_that_is_called_so_is_meant(entry: Make) -> None:
    path = log("m.csv:step+1", "step,loss\n10,0.5\n")
    assert measured([entry("step_10.pt")], path)[0] == [{"loss": 0.5}]


def test_nothing_matches(entry: Make) -> None:
    path = log("m.csv", "step,loss\n1,0.5\n99,0.25\n")
    told = "m.csv: it has steps 1 to 99, the checkpoints steps 100 to 200; none of them is in it"
    assert measured([entry("step_100.pt"), entry("step_200.pt")], path) == ([{}, {}], [told])
    log("m.csv", "step,loss\n")
    assert measured([entry("step_100.pt")], path) == ([{}], ["m.csv: nothing is in it yet"])
    log("m.csv", "step;loss\n100;3,00\n200;2,50\n")
    comma = "m.csv: loss is '3,00' in line 2: a number with a comma is not read"
    told = "m.csv: it has steps 100 to 200, the checkpoints steps 100 to 200; it has no number at any of them"
    assert measured([entry("step_100.pt"), entry("step_200.pt")], path) == ([{}, {}], [comma, told])


# What counts ----------------------------------------------------------------------------------------


def test_log_counts_more_than_the_checkpoint_and_contradictions_are_told(entry: Make) -> None:
    path = log("m.csv", "step,val_loss,loss,acc\n10,0.35,0.5,0.934\n20,nan,0.5,0.9\n30,0.125,0.5,0.7\n")
    entries = [
        entry("step_10.pt", metrics={"val_loss": 0.25, "acc": 0.93}, loss=0.5),
        entry("step_20.pt", metrics={"val_loss": 0.5, "f1": 0.5}),
        entry("step_30.pt", metrics={"val_loss": 0.12}),
    ]
    found, warnings = measured(entries, path)
    assert [one["val_loss"] for one in found[::2]] == [0.35, 0.125] and math.isnan(found[1]["val_loss"])
    assert found[1]["f1"] == 0.5
    assert warnings == [
        "m.csv: val_loss of 2 checkpoints is another in the log, which counts: "
        "step_10.pt says 0.25, the log 0.35"
    ]


def test_of_two_logs_the_later_counts(entry: Make) -> None:
    one, two = log("1.csv", "step,a,b\n10,1,1\n"), log("2.csv", "step,a\n10,2\n")
    assert measured([entry("step_10.pt")], one, two)[0] == [{"a": 2.0, "b": 1.0}]


# Where they lie -------------------------------------------------------------------------------------


def test_name_is_looked_for_beside_each_series_and_above(entry: Make) -> None:
    log("run/a/m.csv", "step,loss\n10,0.5\n")
    log("run/b/m.csv", "step,loss\n10,0.25\n")
    Path("run/b/ckpt").mkdir()
    log("run/c/other.csv", "")
    entries = [moved(entry, "run/a"), moved(entry, "run/b/ckpt"), moved(entry, "run/c")]
    assert measured(entries, "m.csv") == (
        [{"loss": 0.5}, {"loss": 0.25}, {}],
        ["m.csv: there is none beside the checkpoints in run/c"],
    )
    log("run/m.csv", "step,loss\n10,0.75\n")
    found, warnings = measured(entries, "m.csv")
    assert (found[2], warnings) == ({"loss": 0.75}, [])
    log("m.csv", "step,loss\n10,0.1\n")
    found, warnings = measured(entries, "m.csv")
    assert found == [{"loss": 0.1}] * 3
    assert warnings == ["m.csv: one log for the checkpoints of 3 directories"]


def test_logs_that_are_missing_are_counted(entry: Make) -> None:
    log("run/a/m.csv", "step,loss\n10,0.5\n")
    entries = [moved(entry, f"run/{name}") for name in "abcd"]
    told = "m.csv: there is none beside the checkpoints in run/b and 2 other directories"
    assert measured(entries, "m.csv")[1] == [told]
    assert measured(entries[:3], "m.csv")[1] == [told.replace("2 other directories", "1 other directory")]


def test_log_that_is_nowhere(entry: Make) -> None:
    told = "m.csv: no such file or directory, neither here nor beside the checkpoints nor above them"
    for given in ("m.csv", "m.csv:epoch+1"):
        with pytest.raises(NotFound) as failure:
            measured([entry("step_10.pt")], given)
        assert str(failure.value) == told
    with pytest.raises(NotFound):
        measured([entry("step_10.pt")], "/nowhere/m.csv")
    assert measured([], "m.csv") == ([], [])


def moved(entry: Make, directory: str, name: str = "step_10.pt") -> Entry:
    found = entry(name)
    return replace(found, unit=found.unit._replace(path=f"{directory}/{name}"))


def test_survey_takes_logs(series: Path) -> None:
    log(
        str(series.parent / "m.csv"), "epoch,f1\n" + "".join(f"{epoch},0.{epoch}\n" for epoch in range(1, 11))
    )
    shutil.rmtree(series / "none", ignore_errors=True)
    found = survey(series, recursive=True, metrics=["m.csv"])
    assert [entry.metric("f1") for entry in found.entries][:3] == [0.1, 0.2, 0.3]
    assert found.warnings == ()
