"""``ckpttool log``: what it prints, and the step of ``watch``; for what trackers get see test_trackers.py."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from tests.support.commands import Run, refusals, transcript
from tests.support.configs import trusted_config
from tests.support.golden import Golden
from tests.support.moments import before_call


@pytest.fixture
def runs(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    place = tmp_path / "runs"
    place.mkdir()
    for epoch in (1, 2):
        shutil.copy(files / "series" / f"model_epoch_{epoch}.pth", place)
    return place


def test_what_is_printed(run: Run, runs: Path, golden: Golden) -> None:
    (runs / "model_epoch_3.pth").write_bytes((runs / "model_epoch_1.pth").read_bytes()[:1000])
    golden(transcript(run, *[(1, "log runs --to tensorboard:tb")] * 2))
    assert len(list(Path("tb").iterdir())) == 1


def test_json_and_quiet(run: Run, runs: Path) -> None:
    answer = run("log", "runs/model_epoch_1.pth", "--to", "tensorboard:tb", "--json")
    document = json.loads(answer.out)
    (one,) = document["checkpoints"]
    assert (answer.status, document["schema"], document["errors"]) == (0, "ckpttool.log/1", [])
    assert (one["name"], one["recorded"], one["epoch"]) == ("model_epoch_1.pth", True, 1)
    assert one["bytes"] == (runs / "model_epoch_1.pth").stat().st_size
    assert run("log", "runs", "--to", "tensorboard:tb", "-q").out == ""


def test_what_cant_be_done(run: Run, runs: Path, golden: Golden) -> None:
    Path("empty").mkdir()
    before = (runs / "model_epoch_1.pth").read_bytes()
    lines = (
        "log runs",
        "log runs --to neptune:x",
        "log s3://bucket/runs --to tensorboard:tb",
        "log empty --to tensorboard:tb",
        "log gone --to tensorboard:tb",
        "log runs --to tensorboard:runs/model_epoch_1.pth",
    )
    golden(refusals(run, *lines))
    assert (runs / "model_epoch_1.pth").read_bytes() == before


def test_a_damaged_event_file_is_an_error(run: Run, runs: Path) -> None:
    run("log", "runs", "--to", "tensorboard:tb")
    (path,) = Path("tb").iterdir()
    data = bytearray(path.read_bytes())
    data[60] ^= 1
    path.write_bytes(data)
    answer = run("log", "runs", "--to", "tensorboard:tb")
    assert answer.status == 2 and f"{path}: " in answer.err.replace("[", ": ")
    assert path.read_bytes() == bytes(data)


@pytest.mark.usefixtures("home")
def test_a_step_of_watch(run: Run, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trusted_config('[watch]\npaths = ["runs"]\nlog-to = "tensorboard:tb"\n[retention]\nkeep-last = 1\n')
    first = run("watch", "--once", "--interval", "1s")
    assert first.err.splitlines() == [
        "watching runs once: verify, prune, log",
        "ended: 2 valid, 1 removed, 1 recorded",
    ]
    assert first.out.splitlines()[-1][8:] == "  model_epoch_2.pth  recorded in tensorboard:tb"
    assert "recorded" not in run("watch", "--once", "--interval", "1s").out


def test_one_save_is_named_as_all_are(run: Run, runs: Path) -> None:
    place = runs / "exp1" / "step_100"
    place.mkdir(parents=True)
    shutil.copy(runs / "model_epoch_1.pth", place / "model.pt")
    every = json.loads(run("log", "runs", "--to", "tensorboard:tb", "--json").out)["checkpoints"]
    (named,) = [one for one in every if one["path"].startswith("runs/exp1")]
    (one,) = json.loads(run("log", named["path"], "--to", "tensorboard:tb", "--json").out)["checkpoints"]
    assert named["name"].startswith("step_100")
    assert one == {**named, "recorded": False}


def test_what_changes_is_not_recorded(run: Run, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = runs / "model_epoch_1.pth"
    opened: list[int] = []
    with monkeypatch.context() as patch:
        before_call(patch, path, lambda: opened.append(path.stat().st_size))
        run("log", path, "--to", "tensorboard:another")
    last = 2 * len(opened)

    def cut() -> None:
        opened.append(path.stat().st_size)
        if len(opened) == last:
            os.truncate(path, opened[0] - 1)

    before_call(monkeypatch, path, cut)
    answer = run("log", path, "--to", "tensorboard:tb")
    assert (answer.status, "it changed while it was read (not recorded)" in answer.err) == (1, True)
    assert not Path("tb").exists()


def test_an_unsafe_checkpoint_is_recorded_as_such(run: Run, runs: Path, files: Path) -> None:
    verdicts = ((path, run("verify", path).out) for path in sorted((files / "hostile").glob("*.pt*")))
    unsafe = next(path for path, said in verdicts if "UNSAFE" in said)
    shutil.copy(unsafe, runs / "model_epoch_9.pth")
    answer = run("log", "runs/model_epoch_9.pth", "--to", "tensorboard:tb", "--json")
    (one,) = json.loads(answer.out)["checkpoints"]
    assert (answer.status, one["safety"]) == (1, "unsafe")


@pytest.mark.usefixtures("home")
def test_watch_says_recorded_of_what_is_written(run: Run, runs: Path) -> None:
    """The tracker is a file: nothing can be written there."""
    Path("tb").write_text("")
    trusted_config('[watch]\npaths = ["runs"]\nlog-to = "tensorboard:tb"\n')
    answer = run("watch", "--once", "--interval", "1s")
    assert answer.status == 1 and "recorded" not in answer.out and "tb: " in answer.err
