"""The service and the job of docs/how-to/watching.md: systemd reads the one, a shell runs the other."""

from __future__ import annotations

import configparser
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import TIMEOUT
from tests.support.thorough import sampled

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "how-to" / "watching.md"
SERIES = ROOT / "fixtures" / "files" / "series"


def blocks(language: str) -> list[str]:
    found = re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    assert found
    return found


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a project with a configuration, and ckpttool where pip installs it for a user."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    place = tmp_path / "project"
    (place / "runs").mkdir(parents=True)
    (place / "ckpttool.toml").write_text(blocks("toml")[0])
    program = f'exec {sys.executable} -m ckpttool "$@" --interval 1s'
    script(tmp_path / ".local" / "bin" / "ckpttool", program)
    subprocess.run([sys.executable, "-m", "ckpttool", "config", "--trust"], cwd=place, check=True)
    return place


def script(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_the_service(project: Path, tmp_path: Path) -> None:
    (text,) = blocks("ini")
    unit = tmp_path / "ckpttool-watch.service"
    unit.write_text(text)
    if shutil.which("systemd-analyze"):
        command = ["systemd-analyze", "verify", "--user", "--man=no", str(unit)]
        checked = subprocess.run(command, capture_output=True, text=True, check=False)
        assert unit.name not in checked.stderr, checked.stderr
    parser = configparser.ConfigParser(interpolation=None)
    parser.read_string(text)
    service = parser["Service"]
    shutil.copy(SERIES / "model_epoch_1.pth", project / "runs")
    with subprocess.Popen(
        [part.replace("%h", str(tmp_path)) for part in shlex.split(service["execstart"])],
        cwd=service["workingdirectory"].replace("%h", str(tmp_path)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        first = [process.stdout.readline().split("  ", 1)[1] for _ in range(2)]
        process.send_signal(signal.SIGTERM)  # as systemd does
        process.communicate(timeout=TIMEOUT)
    assert first == [
        "model_epoch_1.pth  valid, safe, 4.1 kB\n",
        "model_epoch_1.pth  copied to backup/model_epoch_1.pth\n",
    ]
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("status", "is_cut", "expected"), sampled([(0, False, 0), (3, False, 3), (0, True, 1)], 1)
)
def test_the_job(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, is_cut: bool, expected: int
) -> None:
    _, job, submission, _ = blocks("sh")
    stubs = tmp_path / "stubs"
    cut = "head -c 1000" if is_cut else "cat"
    saves = [f"{cut} {SERIES}/model_epoch_{epoch}.pth > runs/model_epoch_{epoch}.pth" for epoch in (1, 2)]
    script(stubs / "srun", "\n".join([*saves, f"exit {status}"]))
    script(stubs / "sbatch", 'for last; do :; done; echo 7; case $last in *.sh) ;; *) eval "$last" ;; esac')
    shutil.copy(tmp_path / ".local" / "bin" / "ckpttool", stubs)
    monkeypatch.setenv("PATH", str(stubs), prepend=":")
    done = subprocess.run(["bash", "-c", job], cwd=project, capture_output=True, text=True, check=False)
    assert done.returncode == expected, done.stderr
    copied = sorted(path.name for path in (project / "backup").glob("*.pth"))
    assert copied == ([] if is_cut else ["model_epoch_1.pth", "model_epoch_2.pth"])
    again = subprocess.run(["bash", "-c", submission], cwd=project, capture_output=True, check=False)
    assert again.returncode == int(is_cut)


def test_the_job_that_resumes_opens_a_path_that_stays(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    *_, job = blocks("sh")
    config = project / "ckpttool.toml"
    config.write_text('[naming]\ntemplate = "run-e{epoch:04d}"\n' + config.read_text())
    shutil.copy(SERIES / "model_epoch_2.pth", project / "runs")
    stubs = tmp_path / "stubs"
    script(stubs / "srun", 'echo "$@"; cat "$4" > resumed')
    script(stubs / "ckpttool", f'exec {sys.executable} -m ckpttool "$@"')
    monkeypatch.setenv("PATH", str(stubs), prepend=":")
    command = ["bash", "-c", f"{job}kill $!; wait"]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    assert "python train.py --resume runs/run-e0002.pth\n" in done.stdout, done.stderr
    assert (project / "resumed").read_bytes() == (SERIES / "model_epoch_2.pth").read_bytes()
