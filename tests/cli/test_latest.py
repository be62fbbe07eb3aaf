"""``ckpttool latest``: stdout, stderr and exit status together."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path

import pytest

from tests.support.commands import Run, refusals, transcript
from tests.support.golden import Golden
from tests.support.moments import names_read_in_full, refuse_opening
from tests.support.runs import flip_value


def test_the_newest(run, series: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("latest", series) == (0, "run/model_epoch_10.pth\n", "")
    assert run("latest", f"{series}/") == (0, "run/model_epoch_10.pth\n", "")
    monkeypatch.chdir(series)
    assert run("latest") == (0, "model_epoch_10.pth\n", "")


def test_json(run: Run, series: Path, golden: Golden) -> None:
    golden(transcript(run, (0, "latest run --json"), (0, "latest empty --missing-ok --json")))


def test_null(run, series: Path) -> None:
    os.rename(series / "model_epoch_10.pth", series / "new\nline_epoch_11.pth")
    status, out, err = run("latest", series, "-0")
    assert (status, out) == (0, "run/new\nline_epoch_11.pth\0")
    assert err == (
        "ckpttool: warning: found 2 series; using run/new\\nline_epoch_*.pth (also: run/model_epoch_*.pth)\n"
    )


def test_a_name_like_an_option_is_none(run, series: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.rename(series / "model_epoch_10.pth", series / "--force_epoch_10.pth")
    monkeypatch.chdir(series)
    assert run("latest", "-0")[:2] == (0, "./--force_epoch_10.pth\0")


def test_a_damaged_one_is_passed_over(run, series: Path) -> None:
    (series / "model_epoch_10.pth").write_bytes((series / "model_epoch_10.pth").read_bytes()[:900])
    status, out, err = run("latest", series)
    assert (status, out) == (0, "run/model_epoch_9.pth\n")
    assert err.startswith("ckpttool: warning: run/model_epoch_10.pth: skipped: incomplete: ")


@pytest.mark.parametrize(("content", "word"), [(b"", "incomplete"), (b"PK\3\4 and no more", "damaged")])
def test_what_is_damaged_and_newer_by_name_is_told(run, series: Path, content: bytes, word: str) -> None:
    for epoch in range(1, 11):
        os.rename(series / f"model_epoch_{epoch}.pth", series / f"ckpt_{epoch}.pth")
    (series / "ckpt_11.pth").write_bytes(content)
    os.utime(series / "ckpt_11.pth", (0, 0))
    status, out, err = run("latest", series, "--json")
    document = json.loads(out)
    assert (status, document["path"]) == (0, "run/ckpt_10.pth")
    assert [passed["path"] for passed in document["passed_over"]] == ["run/ckpt_11.pth"]
    assert err.startswith(f"ckpttool: warning: run/ckpt_11.pth: skipped: {word}: ")


def test_a_damaged_one_of_another_name_is_told(run, series: Path) -> None:
    (series / "final.pth").write_bytes(b"PK\3\4 and no more")
    status, out, err = run("latest", series)
    assert (status, out) == (0, "run/model_epoch_10.pth\n")
    assert err.startswith("ckpttool: warning: run/final.pth: skipped: damaged: ")


def test_one_that_may_not_be_read_is_told(run, series: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_opening(monkeypatch, "model_epoch_10.pth", PermissionError(13, "Permission denied"))
    status, out, err = run("latest", series)
    newest = series / "model_epoch_10.pth"
    assert (status, out) == (0, f"{series}/model_epoch_9.pth\n")
    assert err == f"ckpttool: warning: {newest}: skipped: permission denied\n"
    told = json.loads(run("latest", series, "--json").out)
    assert told["passed_over"] == [{"path": str(newest), "why": "permission denied"}]


def test_what_is_nothing_to_resume_from_is_never_the_answer(run, series: Path) -> None:
    (series / "history.pkl").write_bytes(pickle.dumps({"loss": [0.5, 0.25]}))
    answer = run("latest", series)
    assert answer == (0, "run/model_epoch_10.pth\n", "")


def test_quiet(run, series: Path, tmp_path: Path) -> None:
    (series / "model_epoch_10.pth").write_bytes(b"")
    assert run("latest", series, "-q") == (0, "", "")
    (tmp_path / "empty").mkdir()
    assert run("latest", "empty", "-q") == (1, "", "ckpttool: error: empty: no checkpoint\n")


def test_what_to_pass_over(run, series: Path) -> None:
    assert run("latest", series, "--exclude", "*_10.pth").out == "run/model_epoch_9.pth\n"
    assert run("latest", ".", "-r", "--max-depth", 0) == (1, "", "ckpttool: error: .: no checkpoint\n")


def test_the_answer_is_read_in_full_and_no_other(run, series: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = names_read_in_full(monkeypatch)
    flip_value(series / "model_epoch_10.pth")
    status, out, err = run("latest", series)
    assert (status, out) == (0, "run/model_epoch_9.pth\n")
    assert err.startswith("ckpttool: warning: run/model_epoch_10.pth: skipped: damaged: ")
    assert "CRC-32" in err and err.count("\n") == 1
    assert read == ["model_epoch_10.pth", "model_epoch_9.pth"]
    (passed,) = json.loads(run("latest", series, "--json").out)["passed_over"]
    assert passed["path"] == "run/model_epoch_10.pth"
    read.clear()
    assert run("latest", series, "--verify", "quick") == (0, "run/model_epoch_10.pth\n", "")
    assert read == []


def test_a_manifest_counts_that_was_made_after_the_file(run, files: Path, tmp_path: Path) -> None:
    path = tmp_path / "step_3.safetensors"
    shutil.copy(files / "safetensors" / "metadata.safetensors", path)
    assert run("verify", path, "--write-manifest").status == 0
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    written = path.stat()
    path.write_bytes(content)
    assert run("latest", tmp_path, "-q").status == 0  # it was saved again, and the manifest is about another
    os.utime(path, ns=(written.st_atime_ns, written.st_mtime_ns))
    status, out, err = run("latest", tmp_path)
    assert (status, out) == (1, "")
    assert "skipped: damaged: " in err and "SHA-256" in err


@pytest.mark.framework
def test_nan_in_weights_is_passed_over_and_in_an_optimizer_it_is_not(run, steps: Path) -> None:
    import torch

    nan = torch.full((2,), float("nan"))
    for step, weight in ((60, torch.ones(2)), (70, nan)):
        state = {"state": {0: {"exp_avg": nan}}}
        torch.save({"model": {"w": weight}, "optimizer": state, "step": step}, steps / f"step_{step}.pt")
    status, out, err = run("latest", steps)
    assert (status, out) == (0, "steps/step_60.pt\n")
    assert "step_70.pt: skipped: damaged: model.w: " in err


def test_what_is_being_written_is_passed_over(run, series: Path) -> None:
    shutil.copy(series / "model_epoch_10.pth", series / "model_epoch_11.pth.tmp")
    assert run("latest", series).out == "run/model_epoch_10.pth\n"


def test_the_best(run: Run, series: Path, golden: Golden) -> None:
    """The name of a metric says which values are good."""
    modes = ("--best loss --mode max", "--best loss --mode min", "--best loss")
    metrics = ("--best bleu --mode max", "--best lr")
    told = [(0, f"latest run {one}") for one in modes] + [(1, f"latest run {one}") for one in metrics]
    golden(transcript(run, *told, (1, "latest run --before 5")))


def _save(series: Path, number: int, **more: object) -> None:
    torch = pytest.importorskip("torch")
    torch.save({"model": {"weight": torch.zeros(2)}, **more}, series / f"step_{number}.pt")


@pytest.fixture
def steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a directory of steps 10 to 50; NaN, an infinite loss, two equal ones, and one without."""
    (tmp_path / "steps").mkdir()
    for step, loss in ((10, 0.25), (20, float("nan")), (30, float("-inf")), (40, 0.25)):
        _save(tmp_path / "steps", step, step=step, val_loss=loss)
    _save(tmp_path / "steps", 50, step=50)
    monkeypatch.chdir(tmp_path)
    return Path("steps")


@pytest.mark.framework
def test_before_a_step(run, steps: Path) -> None:
    for before, answer in ((60, 50), (50, 40), (31, 30), (30, 20)):
        assert run("latest", steps, "--before", before) == (0, f"steps/step_{answer}.pt\n", "")
    nothing = "steps: no intact checkpoint before step 10"
    assert run("latest", steps, "--before", 10) == (1, "", f"ckpttool: error: {nothing}\n")
    best = ["--best", "val_loss", "--mode", "min"]
    assert run("latest", steps, *best, "--before", 40).out == "steps/step_10.pt\n"
    document = json.loads(run("latest", steps, "--before", 41, "--json").out)
    assert (document["path"], document["step"]) == ("steps/step_40.pt", 40)


@pytest.mark.framework
def test_a_round_step(run, steps: Path) -> None:
    assert run("latest", steps, "--before", "5e1").out == "steps/step_40.pt\n"


def test_usage(run: Run, series: Path, golden: Golden) -> None:
    steps = (f"--before={step}" for step in ("-5", "1.5", "soon", "inf", ""))
    waits = (f"--wait={time}" for time in ("soon", "-1", "1.5", ""))
    logs = ("--metrics lost.csv --json", "--best accuracy --mode max --metrics lost.csv --json")
    golden(refusals(run, *(f"latest run {one}" for one in (*steps, *waits, *logs, "--mode min"))))
    for log in logs:
        assert run("latest", series / "none", "--missing-ok", *log.split()).status == 0


def test_a_name_that_a_shell_would_cut_is_told(run, series: Path) -> None:
    os.rename(series / "model_epoch_10.pth", series / "model_epoch_11.pth")
    (series / "model_epoch_11.pth").rename(series / "model_epoch_11\n")
    status, out, err = run("latest", series, "--exclude", "*.pth")
    assert (status, out) == (0, "run/model_epoch_11\n\n")
    assert "its name ends in a line break, which $(…) strips (use -0)" in err
    assert run("latest", series, "--exclude", "*.pth", "-0") == (0, "run/model_epoch_11\n\0", "")


@pytest.mark.framework
def test_the_best_of_equal_ones_is_the_newest_and_what_is_no_number_comes_last(run, steps: Path) -> None:
    best = ["--best", "val_loss", "--mode", "min"]
    counted = "ckpttool: warning: steps: 2 of 5 checkpoints without a metric 'val_loss'\n"
    assert run("latest", steps, *best) == (0, "steps/step_40.pt\n", counted)
    for step in (40, 10):
        (steps / f"step_{step}.pt").write_bytes(b"")
    answer = run("latest", steps, *best)
    assert (answer.status, answer.out) == (0, "steps/step_30.pt\n")


@pytest.mark.framework
def test_metrics_of_a_log(run, steps: Path) -> None:
    Path("log.csv").write_text("step,accuracy\n10,0.5\n20,0.875\n30,0.75\n")
    best = ["--best", "accuracy", "--mode", "max"]
    assert run("latest", steps, *best).status == 1
    assert run("latest", steps, *best, "--metrics", "log.csv").out == "steps/step_20.pt\n"


def test_json_tells_how_good_the_best_is(run, series: Path) -> None:
    document = json.loads(run("latest", series, "--best", "loss", "--mode", "max", "--json").out)
    assert (document["best"], round(document["value"], 4), document["epoch"]) == ("loss", 0.5638, 1)
    assert {"best", "value"}.isdisjoint(json.loads(run("latest", series, "--json").out))
    Path("empty").mkdir()
    answer = run("latest", "empty", "--best", "loss", "--mode", "max", "--json")
    assert json.loads(answer.out)["value"] is None


def test_it_descends_unless_it_is_told_not_to(run, series: Path) -> None:
    said = "no checkpoint directly in it, but 10 in subdirectories (omit --no-recursive)"
    assert run("latest", ".", "--no-recursive") == (1, "", f"ckpttool: error: .: {said}\n")
    assert run("latest", ".") == run("latest", ".", "-r") == (0, "run/model_epoch_10.pth\n", "")


def test_a_run_of_a_trainer(run, files: Path) -> None:
    trainer = files / "safetensors" / "trainer"
    assert run("latest", trainer) == (0, f"{trainer}/checkpoint-4\n", "")


def test_a_path_that_is_one(run, series: Path, files: Path) -> None:
    assert run("latest", series / "model_epoch_3.pth") == (0, "run/model_epoch_3.pth\n", "")
    one = files / "safetensors" / "trainer" / "checkpoint-2"
    assert run("latest", one) == (0, f"{one}\n", "")


def test_nothing_there(run: Run, tmp_path: Path, golden: Golden) -> None:
    commands = [(1, f"latest {tmp_path}"), (1, f"latest -q {tmp_path}")]
    missing = f"{tmp_path}/missing"
    for place in (str(tmp_path), missing):
        commands += [(0, f"latest {place} --missing-ok{quiet}") for quiet in ("", " -q")]
    golden(transcript(run, *commands, (2, f"latest {missing}"), (2, f"latest {missing} --json")))


def test_a_first_save_that_was_never_finished(run, series: Path) -> None:
    first, *others = sorted(series.iterdir())
    for path in others:
        path.unlink()
    first.write_bytes(first.read_bytes()[:900])
    status, out, err = run("latest", series, "--missing-ok")
    assert (status, out, err.splitlines()[-1]) == (0, "", "ckpttool: run: no checkpoint yet")
    assert run("latest", series).status == 1
    first.with_name("model_epoch_2.pth").write_bytes(b"PK\3\4" + bytes(40))
    assert run("latest", series, "--missing-ok").status == 1


def test_nothing_intact(run, series: Path) -> None:
    for path in series.iterdir():
        path.write_bytes(path.read_bytes()[:900])
    status, out, err = run("latest", series)
    assert (status, out) == (1, "")
    assert err.endswith("ckpttool: error: run: none of 10 checkpoints is intact\n")
    for path in sorted(series.iterdir())[1:]:
        path.unlink()
    assert run("latest", series).err.endswith("ckpttool: error: run: its only checkpoint is not intact\n")
