"""What is written replaces nothing that somebody would want back."""

from __future__ import annotations

import io
import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.support.commands import Run, run_here


@pytest.fixture
def model(files: Path, tmp_path: Path) -> Path:
    path = tmp_path / "m.pth"
    path.write_bytes((files / "pytorch" / "guide.pth").read_bytes())
    return path


@pytest.mark.parametrize("option", ["--junit", "--sarif", "--summary"])
def test_no_report_replaces_what_is_looked_at(run, model: Path, option: str) -> None:
    before = model.read_bytes()
    status, out, err = run("verify", model, option, model)
    assert (status, out) == (2, "")
    assert err == f"ckpttool: error: {option} {model}: that file is an input\n"
    assert model.read_bytes() == before


@pytest.mark.parametrize("option", ["--junit", "--sarif", "--summary"])
def test_no_report_replaces_another_file(run, model: Path, tmp_path: Path, option: str) -> None:
    other = tmp_path / "other.pth"
    other.write_bytes(model.read_bytes())
    status, out, err = run("verify", model, option, other)
    assert (status, out) == (2, "")
    assert (
        err
        == f"ckpttool: error: {option} {other}: the existing file is not such a report and is not replaced\n"
    )
    assert other.read_bytes() == model.read_bytes()


@pytest.mark.parametrize("option", ["--junit", "--sarif", "--summary"])
def test_a_report_replaces_that_of_an_earlier_run(run, model: Path, tmp_path: Path, option: str) -> None:
    report = tmp_path / "report"
    for _ in range(2):
        assert run("verify", model, option, report).status == 0
    assert report.stat().st_size


def test_two_reports_in_one_file(run, model: Path, tmp_path: Path) -> None:
    status, out, err = run("verify", model, "--junit", tmp_path / "x", "--sarif", tmp_path / "x")
    assert (status, out, err) == (2, "", "ckpttool: error: --junit and --sarif name the same file\n")


PREDICTION = ("--predict", "--model", "models.py:Net")


def test_a_recording_replaces_nothing(run, model: Path, tmp_path: Path) -> None:
    golden = tmp_path / "golden.npz"
    golden.write_bytes(b"mine")
    status, _, err = run("verify", model, *PREDICTION, "--record", golden)
    assert (status, err) == (
        2,
        f"ckpttool: error: --record {golden}: it already exists; --force replaces a recording\n",
    )
    status, _, err = run("verify", model, *PREDICTION, "--record", golden, "--force")
    assert (status, err) == (
        2,
        f"ckpttool: error: --record {golden}: the existing file is not a recording and is not replaced\n",
    )
    assert golden.read_bytes() == b"mine"


def test_a_recording_is_no_pipe(run, model: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    status, _, err = run("verify", model, *PREDICTION, "--record", tmp_path / "pipe")
    assert (status, err) == (
        2,
        f"ckpttool: error: --record {tmp_path / 'pipe'}: it exists and is not a regular file\n",
    )


def test_a_report_follows_a_link(run, model: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "report.xml")
    assert run("verify", model, "--junit", tmp_path / "link").status == 0
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "report.xml").read_bytes().startswith(b"<?xml")


@pytest.mark.parametrize(
    ("option", "begin"), [("--junit", "<?xml"), ("--sarif", "{"), ("--summary", "#")], ids=lambda one: one[:6]
)
def test_a_report_goes_to_stdout_alone(
    option: str, begin: str, files: Path, tmp_path: Path, run: Run
) -> None:
    path = files / "pytorch" / "guide.pth"
    written = run("verify", path, option, tmp_path / "report")
    answer = run("verify", path, option, "-")
    assert (answer.status, answer.err) == (written.status, written.err)
    report = (tmp_path / "report").read_text()
    assert answer.out.startswith(begin) and len(answer.out) == len(report)
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
