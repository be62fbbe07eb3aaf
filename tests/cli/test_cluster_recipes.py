"""The scripts of docs/how-to/cluster.md, run by a plain shell as Slurm and Kubernetes would run them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support.commands import Run

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "cluster.md"
COUNT = 10


@pytest.fixture
def place(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a working directory with ``runs``, one of which is damaged, and ``ckpttool`` on the PATH."""
    (tmp_path / "runs").mkdir()
    for number in range(COUNT):
        shutil.copy(files / "pytorch" / "guide.pth", tmp_path / "runs" / f"m_{number}.pth")
    with open(tmp_path / "runs" / "m_4.pth", "r+b") as file:
        file.truncate(1000)
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "ckpttool"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m ckpttool "$@"\n')
    program.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def block(heading: str, language: str, number: int = 0) -> str:
    """Return a block of code below a heading of the page."""
    section = re.split(r"^## ", PAGE.read_text("utf-8"), flags=re.MULTILINE)
    (text,) = (one for one in section if one.startswith(f"{heading}\n"))
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)[number]


def shell(script: str, **variables: object) -> subprocess.CompletedProcess[str]:
    environment = {name: str(value) for name, value in variables.items()}
    environment |= {
        "PATH": f"{os.getcwd()}/bin:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    return subprocess.run(
        ["sh", "-c", script], env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )


def test_a_slurm_array(run: Run, place: Path) -> None:
    script = block("A Slurm array", "sh")
    tasks = 3
    statuses = [
        shell(
            script, SLURM_ARRAY_TASK_ID=task, SLURM_ARRAY_TASK_COUNT=tasks, SLURM_CPUS_PER_TASK=1
        ).returncode
        for task in range(1, tasks + 1)
    ]
    assert sorted(statuses) == [0, 0, 1]
    merged = shell(block("A Slurm array", "sh", 1))
    assert (merged.stdout, merged.stderr, merged.returncode) == (run("verify", "runs").out, "", 1)


@pytest.mark.thorough
def test_a_kubernetes_job(run: Run, place: Path) -> None:
    job = yaml.safe_load(block("A Kubernetes job", "yaml"))["spec"]
    (container,) = job["template"]["spec"]["containers"]
    program, *arguments, script = container["command"]
    assert (program, arguments) == ("sh", ["-c"])
    for index in range(job["completions"]):
        assert shell(script, JOB_COMPLETION_INDEX=index).returncode == 0
    documents = sorted((place / "report").iterdir())
    merged = json.loads(run("verify", "--merge", *documents, "--json").out)
    assert merged == json.loads(run("verify", "runs", "--json").out)
