"""Logs of metrics: what is read of each kind, and what is said of those that are damaged or still written."""

from __future__ import annotations

import csv
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from ckpttool import CheckpointError, DamagedCheckpoint, LimitExceeded, Unsupported
from ckpttool.runs import logs
from ckpttool.runs.logs import Log
from ckpttool.runs.metrics import read_log
from tests.support.limits import lower_limits

ALL = frozenset(range(-5, 60))


def log_of(path: Path, text: str | bytes, *places: float) -> Log:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_log(str(path), frozenset(places) or ALL)


# Text -----------------------------------------------------------------------------------------------


def test_reads_what_lightning_wrote(files: Path) -> None:
    path = files / "metrics" / "lightning" / "metrics.csv"
    expected: dict[int, dict[str, float]] = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            values = {name: float(row[name]) for name in row if row[name] and name not in ("epoch", "step")}
            expected.setdefault(int(row["step"]), {}).update(values)
    log = read_log(str(path), ALL)
    assert log.by_step == expected and expected[7]["val_loss"] == 0.25
    assert (str(log.steps), str(log.epochs), log.counts_both, log.warnings) == ("1 to 15", "0 to 3", True, [])
    assert log.in_epoch[1]["val_loss"] == 0.25 and not log.by_epoch


def test_reads_what_keras_wrote(files: Path) -> None:
    path = files / "metrics" / "keras" / "log.csv"
    with path.open(newline="") as file:
        expected = {
            int(row.pop("epoch")): {name: float(value) for name, value in row.items()}
            for row in csv.DictReader(file)
        }
    log = read_log(str(path), ALL)
    assert (log.by_epoch, log.by_step, log.in_epoch) == (expected, {}, {})


def test_reads_the_history_of_a_trainer(files: Path) -> None:
    path = files / "metrics" / "trainer" / "checkpoint-8" / "trainer_state.json"
    evaluated = {
        entry["step"]: entry["eval_loss"]
        for entry in json.loads(path.read_text())["log_history"]
        if "eval_loss" in entry
    }
    log = read_log(str(path), ALL)
    assert {step: one["eval_loss"] for step, one in log.by_step.items() if "eval_loss" in one} == evaluated
    assert sorted(evaluated) == [4, 8]


@pytest.mark.parametrize(
    ("text", "by_step", "by_epoch"),
    [
        ("step,loss\n1,0.5\n2,0.25\n", {1: {"loss": 0.5}, 2: {"loss": 0.25}}, {}),
        ("\ufeffstep;loss\r\n1;0.5\r\n", {1: {"loss": 0.5}}, {}),
        ("Epoch\tval loss\n0\t1e-3\n", {}, {0: {"val loss": 0.001}}),
        ("step,loss,note\n1,0.5,fine\n1,,\n", {1: {"loss": 0.5}}, {}),
        ("step,loss\n1,0.5\n1,0.25\n", {1: {"loss": 0.25}}, {}),  # a restarted run appends
        ("step,loss\n1,0.5\nstep,loss,acc\n1,0.25,0.9\n", {1: {"loss": 0.25, "acc": 0.9}}, {}),
        ("step,loss\n1,NaN\n2,inf\n", {1: {"loss": math.nan}, 2: {"loss": math.inf}}, {}),
        ("epoch,loss,lr\n0,NA,1_000\n", {}, {}),
        ('step,loss,"a\nb"\n1,0.5,"x\ny"\n', None, None),
        ('step,loss,note\n1,0.5,"x\ny"\n', {1: {"loss": 0.5}}, {}),
        ("\n\nstep,loss\n\n1,0.5\n", {1: {"loss": 0.5}}, {}),
        ('{"step": 1, "loss": 0.5}\n\n{"step": 1, "acc": 1}', {1: {"loss": 0.5, "acc": 1.0}}, {}),
        ('{"_step": 1, "train/global_step": 3, "f1": 0.5, "_runtime": 9}\n', {3: {"f1": 0.5}}, {}),
        ('{"epoch": 1.0, "metrics": {"f1": 0.5}, "ok": true, "note": "x"}\n', {}, {1: {"f1": 0.5}}),
        ('{"step": 1, "loss": NaN}\n', {1: {"loss": math.nan}}, {}),
        ('{"step": 2, "loss": "Infinity"}\n', {2: {"loss": math.inf}}, {}),
        ('[{"step": 1, "f1": 0.5}, {"step": 2, "f1": NaN}]', {1: {"f1": 0.5}, 2: {"f1": math.nan}}, {}),
        ('\ufeff [\n {"epoch": 1,\n "loss": 0.5}\n]\n', {}, {1: {"loss": 0.5}}),
        ("[]", {}, {}),
    ],
)  # fmt: skip
def test_lines(tmp_path: Path, text: str, by_step: object, by_epoch: object) -> None:
    path = tmp_path / "log"
    if by_step is None:
        with pytest.raises(DamagedCheckpoint):
            log_of(path, text)
        return
    log = log_of(path, text)
    assert json.dumps(_by_float(log.by_step)) == json.dumps(_by_float(by_step))  # NaN equals nothing
    assert (log.by_epoch, log.warnings) == (by_epoch, [])


def _by_float(found: Any) -> dict[float, object]:
    return {float(number): values for number, values in found.items()}


@pytest.mark.parametrize(
    ("text", "loss"),
    [
        ("step,loss\n1,0.5\n2,0.2", 0.5),
        ("step,loss\n1,0.5\n2,", 0.5),
        ('step,loss,note\n1,0.5,x\n2,0.25,"half\n', 0.5),
        ('{"step": 1, "loss": 0.5}\n{"step": 2, "lo', 0.5),
    ],
)
def test_last_line_without_an_end_is_not_read(tmp_path: Path, text: str, loss: float) -> None:
    log = log_of(tmp_path / "log", text)
    assert log.by_step == {1: {"loss": loss}}
    assert log.warnings == [
        f"{tmp_path / 'log'}: skipped its last line, which is incomplete (perhaps still being written)"
    ]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("step,loss\n1,0.5\n2\n3,0.5\n", "[line 3]: 1 columns (2, as in the header)"),
        ("step,loss\nx,0.5\n", "[line 2]: step is 'x' (a number)"),
        ("step,loss,loss\n", "[line 1]: the column 'loss' appears twice"),
        (
            "a,b\n1,2\n",
            ": its first line has no column for steps or epochs (such as global_step, step, epoch)",
        ),
        (b"step,loss\n1,\xff\n", "[line 2]: it is not UTF-8"),
        (b"step,loss\n1,\0\0\n", "[line 2]: a NUL character"),
        ('{"step": 1}\n{"step": \n{"step": 2}\n', "[line 2]: the line is not valid JSON: Expecting value"),
        ('{"step": 1}\n[1]\n', "[line 2]: a list (an object)"),
        ('{"step": 1, "step": 2}\n', "[line 1]: 'step' appears twice"),
        ('[{"loss": 1}]', ": no object has a key for steps or epochs (such as global_step, step, epoch)"),
        ('[{"step": 1}, 2]', ": not a JSON list of objects"),
        ('[{"step": 1, "lo', ": the list is not valid JSON"),
        ('{"loss": 1}\n', ": no object has a key for steps or epochs (such as global_step, step, epoch)"),
    ],
)
def test_damage_is_told_with_its_place(tmp_path: Path, text: str | bytes, told: str) -> None:
    with pytest.raises(CheckpointError) as failure:
        log_of(tmp_path / "log", text)
    assert str(failure.value).startswith(f"{tmp_path / 'log'}{told}")


def test_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lower_limits(monkeypatch, names_in_a_log=3)
    with pytest.raises(LimitExceeded, match=r"too many metrics \(at most 3\)"):
        log_of(tmp_path / "log", "step,a,b,c,d\n1,1,1,1,1\n")
    lower_limits(monkeypatch, values_in_a_log=4)
    with pytest.raises(LimitExceeded, match=r"too many metric values \(at most 4\)"):
        log_of(tmp_path / "log", "step,a\n" + "".join(f"{step},1\n" for step in range(9)))
    lower_limits(monkeypatch, line_of_a_log=10)
    with pytest.raises(LimitExceeded, match="line 2"):
        log_of(tmp_path / "log", "step,loss\n1,0.123456789\n")
    lower_limits(monkeypatch, state_of_a_trainer=10)
    with pytest.raises(LimitExceeded, match="at most 10 bytes"):
        log_of(tmp_path / "trainer_state.json", '{"log_history": []}')


def test_only_what_is_asked_for_is_kept(tmp_path: Path) -> None:
    log = log_of(tmp_path / "log", "step,a\n" + "".join(f"{at},{at}\n" for at in range(1000)), 7, 5000)
    assert (log.by_step, str(log.steps)) == ({7: {"a": 7.0}}, "0 to 999")


# Events ---------------------------------------------------------------------------------------------


def test_reads_the_scalars_that_tensorboard_reads(files: Path) -> None:
    told = json.loads((files / "metrics" / "metrics.expected.json").read_text())
    assert len(told) == 6 and "as/float16" in told["tensorflow/events.out.tfevents.1.tensorflow.v2"]
    for name, tags in told.items():
        log = read_log(str(files / "metrics" / name), ALL)
        found: dict[str, dict[int, float]] = {}
        for kept in (log.by_step, log.by_epoch):
            for step, values in kept.items():
                for tag, value in values.items():
                    found.setdefault(tag, {})[int(step)] = value
        expected = {tag: one for tag, one in tags.items() if tag not in ("epoch", "train/epoch")}
        assert sorted(found) == sorted(expected), name
        for tag, one in expected.items():
            wanted = {int(step): float(value) for step, value in one.items() if int(step) in ALL}
            assert found[tag] == pytest.approx(wanted, rel=1e-6, nan_ok=True), (name, tag)


def test_events_elsewhere_are_passed_over_and_their_steps_known() -> None:
    log = Log("log", frozenset({8}))
    logs._add_event(SCALAR, "log", 0, log, "")
    assert (log.by_step, str(log.steps)) == ({}, "7")
    logs._add_event(SCALAR.replace(b"\x10\x07", b"\x10\x08"), "log", 0, log, "")
    assert (list(log.by_step), str(log.steps)) == ([8], "7 to 8")


def test_keras_counts_epochs_in_tags(files: Path) -> None:
    log = read_log(str(files / "metrics" / "keras" / "tb"), ALL)
    assert sorted(log.by_epoch[3]) == [
        "train/epoch_learning_rate",
        "train/epoch_loss",
        "validation/epoch_loss",
    ]
    assert list(log.by_step[8]) == ["validation/evaluation_loss_vs_iterations"]


def test_files_of_a_restarted_run_follow_one_another(files: Path, tmp_path: Path) -> None:
    run = tmp_path / "tb" / "only"
    run.mkdir(parents=True)
    shutil.copy(files / "metrics" / "torch" / "events.out.tfevents.1.torch", run)
    shutil.copy(
        files / "metrics" / "tensorflow" / "events.out.tfevents.1.tensorflow.v2",
        run / "events.out.tfevents.2",
    )
    (run / "other.txt").write_text("x")
    log = read_log(str(tmp_path / "tb"), ALL)
    assert log.by_step[20]["val/loss"] == pytest.approx(1 / 21)
    assert {"val/acc", "as/int64"} <= log.by_step[20].keys()


def test_events_that_are_still_written(files: Path, tmp_path: Path) -> None:
    whole = (files / "metrics" / "torch" / "events.out.tfevents.1.torch").read_bytes()
    path = tmp_path / "events.out.tfevents.1"
    log = log_of(path, whole[:-5])
    assert "val/loss" in log.by_step[40]
    assert len(log.warnings) == 1 and log.warnings[0].startswith(f"{path}: the file ends after ")
    assert log_of(path, b"").warnings == []
    assert log_of(path, b"\x05\0").warnings != []
    with pytest.raises(DamagedCheckpoint, match=r"\[byte 88\]"):
        log_of(path, whole[:100] + b"\xff" + whole[101:])


def test_directory_without_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unsupported, match="a directory without event files"):
        read_log(str(tmp_path), ALL)
    lower_limits(monkeypatch, event_files=2)
    for number in range(3):
        (tmp_path / f"events.out.tfevents.{number}").touch()
    with pytest.raises(LimitExceeded, match=r"too many event files \(at most 2\)"):
        read_log(str(tmp_path), ALL)


# Any bytes ------------------------------------------------------------------------------------------

CELLS = st.sampled_from(
    ("step", "epoch", "loss", "1", "2.5", "nan", "", "x", '"', "1e999", "-0", "_step", "٣")
)
ROWS = st.lists(st.lists(CELLS, max_size=4).map(",".join), max_size=6).map("\n".join)
LEAVES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3))
VALUES = st.one_of(LEAVES, st.just({"a": 1}), st.just(10**400))
KEYS = st.sampled_from(("step", "epoch", "loss", "metrics", "_step"))
OBJECTS = st.lists(st.dictionaries(KEYS, VALUES, max_size=4).map(json.dumps), max_size=4).map("\n".join)


@example(b"\r\x01", True)
@given(st.one_of(st.binary(max_size=60), ROWS.map(str.encode), OBJECTS.map(str.encode)), st.booleans())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_are_a_log_or_an_error(tmp_path: Path, data: bytes, has_end: bool) -> None:
    try:
        log = log_of(tmp_path / "log", data + b"\n" * has_end)
    except CheckpointError as failure:
        assert str(tmp_path) in str(failure)
    else:
        values = [
            one for kept in (log.by_step, log.by_epoch) for found in kept.values() for one in found.values()
        ]
        assert all(isinstance(value, float) for value in values)


@given(st.binary(max_size=60) | st.integers(0, 400), st.integers(0, 255))
def test_any_event_is_read_or_an_error(data: bytes | int, flip: int) -> None:
    log = Log("log", ALL)
    event = SCALAR if isinstance(data, int) else data
    if isinstance(data, int):
        event = bytearray(SCALAR)
        event[data % len(SCALAR)] ^= flip
    try:
        logs._add_event(bytes(event), "log", 0, log, "")
    except CheckpointError as failure:
        assert failure.where is not None


SCALAR = (
    b"\x09\0\0\0\0\0\0\xf0\x3f\x10\x07\x2a\x25\x0a\x23\x0a\x08val/lossB\x0a\x08\x01\x12\x00\"\x04\x8c.\xba="
    b"J\x0b\x0a\x09\x0a\x07scalars"
)  # fmt: skip
"""As TensorFlow writes it."""


def test_scalar_that_is_damaged_below() -> None:
    log = Log("log", ALL)
    logs._add_event(SCALAR, "log", 0, log, "a/")
    assert log.by_step == {7: {"a/val/loss": pytest.approx(1 / 11)}}
    with pytest.raises(DamagedCheckpoint, match="a scalar of 4 bytes"):
        logs._add_event(SCALAR.replace(b"\x08\x01\x12", b"\x08\x02\x12"), "log", 0, log, "")
