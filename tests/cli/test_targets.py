"""What is written replaces nothing that somebody would want back."""

from __future__ import annotations

import io
import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.support.commands import Run, refusals, run_here
from tests.support.golden import Golden


@pytest.fixture
def model(files: Path, tmp_path: Path) -> Path:
    path = tmp_path / "m.pth"
    path.write_bytes((files / "pytorch" / "guide.pth").read_bytes())
    return path


REPORTS = ("--junit", "--sarif", "--summary")


def test_what_is_not_replaced(run: Run, model: Path, tmp_path: Path, golden: Golden) -> None:
    """Neither what is looked at, nor a file that is no such report or no recording."""
    other, recording = tmp_path / "other.pth", tmp_path / "golden.npz"
    other.write_bytes(model.read_bytes())
    recording.write_bytes(b"mine")
    os.mkfifo(tmp_path / "pipe")
    predict = f"verify {model} --predict --model models.py:Net --record"
    lines = [f"verify {model} {option} {target}" for option in REPORTS for target in (model, other)]
    lines += [f"verify {model} --junit {tmp_path}/x --sarif {tmp_path}/x"]
    lines += [f"{predict} {recording}", f"{predict} {recording} --force", f"{predict} {tmp_path}/pipe"]
    before = model.read_bytes()
    golden(refusals(run, *lines))
    assert (model.read_bytes(), other.read_bytes(), recording.read_bytes()) == (before, before, b"mine")


def test_a_report_replaces_that_of_an_earlier_run(run: Run, model: Path, tmp_path: Path) -> None:
    for option in REPORTS:
        report = tmp_path / f"report{option}"
        for _ in range(2):
            assert run("verify", model, option, report).status == 0
        assert report.stat().st_size


def test_a_report_follows_a_link(run, model: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "report.xml")
    assert run("verify", model, "--junit", tmp_path / "link").status == 0
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "report.xml").read_bytes().startswith(b"<?xml")


def test_a_report_goes_to_stdout_alone(files: Path, tmp_path: Path, run: Run) -> None:
    path = files / "pytorch" / "guide.pth"
    for option, begin in (("--junit", "<?xml"), ("--sarif", "{"), ("--summary", "#")):
        target = tmp_path / f"report{option}"
        written = run("verify", path, option, target)
        answer = run("verify", path, option, "-")
        assert (answer.status, answer.err) == (written.status, written.err)
        assert answer.out.startswith(begin) and len(answer.out) == len(target.read_text())
        assert not Path("-").exists()
        assert run("verify", path, option, "-", "--json").status == 2


@pytest.mark.parametrize(
    ("command", "option"), [("report", "--output"), ("verify", "--junit")], ids=["file", "stdout"]
)
def test_a_dash_is_stdout_for_some_options_and_its_bytes_are_utf_8(
    command: str, option: str, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(files / "pytorch" / "guide.pth", "modèle.pth")
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    monkeypatch.setattr(sys, "stdout", stdout)
    assert run_here(command, ".", option, "-") == 0
    stdout.flush()
    printed = stdout.buffer.getvalue()  # type: ignore[attr-defined]
    written = b"".join(path.read_bytes() for path in tmp_path.glob("-"))
    assert "modèle" in (written if command == "report" else printed).decode()
    assert not (printed if command == "report" else written)
