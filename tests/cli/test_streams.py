"""What becomes of an answer where stderr, or stdout, is closed or full."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import Run
from tests.support.runs import make_run
from tests.support.thorough import sampled

pytestmark = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no full device")

NO_SPACE = "ckpttool: error: can't write to stdout: no space left on device\n"


@pytest.fixture
def series(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a directory of four epochs of which the newest was cut short: there is something to say."""
    monkeypatch.chdir(tmp_path)
    newest = make_run(Path("run"), 7, 8, 9, 10) / "model_epoch_10.pth"
    newest.write_bytes(newest.read_bytes()[:900])
    return newest.parent


def shell(arguments: str, before: str = "") -> subprocess.CompletedProcess[str]:
    """Run a command in a shell of its own."""
    command = f"{before}{shlex.quote(sys.executable)} -m ckpttool {arguments}"
    return subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60, check=False)


def test_an_encoding_that_lacks_a_sign_gets_another(series: Path) -> None:
    for name in list(os.listdir(series)):
        if name != "model_epoch_10.pth":
            (series / name).rename(series / f"{'x' * 60}-模-{name}")
    for encoding in ("ascii", "cp437"):
        done = shell("list run", f"COLUMNS=60 FORCE_COLOR=1 NO_COLOR=1 PYTHONIOENCODING={encoding} ")
        assert done.returncode == 1
        assert "epochs 7-9" in done.stdout
        assert r"x-\u6a21-model_epoch_*.pth" in done.stdout
        assert "~x" in done.stdout


@pytest.mark.parametrize("stderr", sampled(["2>/dev/full", "2>&-"], 1))
def test_what_can_not_be_said_changes_no_answer(series: Path, stderr: str) -> None:
    done = shell(f"latest run {stderr}")
    assert (done.returncode, done.stdout, done.stderr) == (0, "run/model_epoch_9.pth\n", "")
    done = shell(f"latest run --json --wait 1 {stderr}")
    assert (done.returncode, json.loads(done.stdout)["path"]) == (0, "run/model_epoch_9.pth")
    for command in ("latest", "inspect"):
        done = shell(f"{command} none {stderr}")
        assert (done.returncode, done.stdout) == (2, "")


def test_a_reader_of_warnings_that_has_gone_changes_no_answer(series: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "ckpttool", "latest", "run"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=writing, timeout=60, check=False)
    os.close(writing)
    assert (done.returncode, done.stdout) == (0, b"run/model_epoch_9.pth\n")


@pytest.mark.parametrize(
    "command", sampled(["latest run", "latest run --json", "pin run/model_epoch_9.pth", "list run"], 1)
)
def test_an_answer_that_can_not_be_written_is_an_error(series: Path, command: str) -> None:
    done = shell(f"{command} >/dev/full")
    assert (done.returncode, done.stderr.endswith(NO_SPACE)) == (2, True)
    done = shell(f"{command} >&-")
    assert done.returncode == 2
    assert done.stderr.endswith("ckpttool: error: can't write to stdout: bad file descriptor\n")


@pytest.mark.thorough
def test_where_nothing_is_answered_stdout_may_be_closed(series: Path) -> None:
    assert shell("latest run -q >&-").returncode == 0
    assert shell("latest none --missing-ok -q >&-").returncode == 0


def test_nobody_who_reads_the_answer_is_not_that_there_is_none(series: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "ckpttool", "latest", "run"]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, timeout=60, check=False)
    os.close(writing)
    assert done.returncode == 2


@pytest.mark.thorough
def test_a_working_directory_that_has_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    for command in ("latest", "pin -l"):
        done = shell(command, f"mkdir {tmp_path}/x; cd {tmp_path}/x; rmdir {tmp_path}/x; ")
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == "ckpttool: error: the working directory no longer exists\n"


def test_a_failure_before_the_first_line_is_none_of_the_answers() -> None:
    code = "import sys; sys.modules['ckpttool.cli'] = None; from ckpttool.__main__ import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, "ModuleNotFoundError" in done.stderr) == (2, True)


def test_an_empty_argument_is_not_the_directory_here(run: Run, series: Path) -> None:
    message = "an argument is empty (an unset variable?)"
    commands = ("latest", "list", "pin", "unpin", "rename --template x", "undo", "prune --keep 1")
    for command in (*commands, "verify", "inspect"):
        assert run(*command.split(), "") == (2, "", f"ckpttool: error: {message}\n"), command
