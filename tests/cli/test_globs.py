"""Globs on the command line and in a configuration: what they mean, and one that matches nothing is told."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.support.commands import Run
from tests.support.configs import write

pytestmark = pytest.mark.usefixtures("home")


@pytest.fixture
def runs(files: Path, tmp_path: Path) -> Path:
    """Return the working directory, with runs/a and runs/b of five epochs."""
    for name in ("a", "b"):
        for epoch in range(1, 6):
            path = tmp_path / "runs" / name / f"model_epoch_{epoch}.pth"
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(files / "series" / path.name, path)
    return tmp_path


def _gone(out: str) -> list[str]:
    return [entry["path"] for group in json.loads(out)["groups"] for entry in group["remove"]]


def test_what_to_exclude(run: Run, runs: Path) -> None:
    for glob in ("b/", "runs/b", "./b", f"{runs}/runs/b"):
        status, out, err = run("prune", "runs", "-r", "--keep", "1", "--exclude", glob, "-n", "--json")
        assert (status, err, len(_gone(out))) == (0, "", 4), glob
        assert all(path.startswith("runs/a/") for path in _gone(out))


def test_what_to_keep(run: Run, runs: Path) -> None:
    for glob, kept in (
        ("b/model_epoch_2.pth", ["b"]),
        ("runs/b/model_epoch_2.pth", ["b"]),
        (f"{runs}/runs/b/model_epoch_2.pth", ["b"]),
        ("./model_epoch_2.pth", ["a", "b"]),
        ("*/model_epoch_2.pth", ["a", "b"]),
    ):
        status, out, err = run("prune", "runs", "-r", "--keep", "1", "--keep-name", glob, "-n", "--json")
        left = {"runs/a/model_epoch_2.pth", "runs/b/model_epoch_2.pth"} - set(_gone(out))
        assert (status, err, left) == (0, "", {f"runs/{name}/model_epoch_2.pth" for name in kept}), glob


def test_what_matched_nothing_is_said(run: Run, runs: Path) -> None:
    prune = "prune runs -r --keep 1 -n"
    for flag in ("--exclude", "--keep-name", "--series"):
        for extra in ([], ["--json"]):
            status, _, err = run(*prune.split(), flag, "papr_*", *extra)
            assert (status, err) == (0, f"ckpttool: warning: {flag} 'papr_*' matched nothing\n")
        assert run(*prune.split(), flag, "papr_*", "-q") == (0, "", "")
    others = ("list runs", "latest runs/a", "rename runs/a --template e{epoch} -n", "verify runs")
    for command in (*others, "verify runs/a runs/b"):
        status, _, err = run(*command.split(), "--exclude", "papr_*")
        assert (status, err) == (0, "ckpttool: warning: --exclude 'papr_*' matched nothing\n"), command
        assert run(*command.split(), "--exclude", "*_1.pth")[2] == ""


def test_of_several_directories_all_have_to_lack_it(run, runs: Path) -> None:
    (runs / "runs" / "b" / "model_epoch_5.pth").rename(runs / "runs" / "b" / "model_epoch_6.pth")
    write(
        Path("ckpttool.toml"),
        """
        [retention]
        paths = ["runs/a", "runs/b"]
        keep-last = 1
        keep-name = ["*_5.pth", "*_7.pth"]
        exclude = ["*_6.pth", "*_8.pth"]
        series = ["*_4.pth", "*_9.pth"]
        """,
    )
    _, _, err = run("prune", "-n")
    assert err.splitlines() == [
        "ckpttool: warning: --exclude '*_8.pth' matched nothing",
        "ckpttool: warning: --series '*_9.pth' matched nothing",
        "ckpttool: warning: --keep-name '*_7.pth' matched nothing",
    ]
    assert run("verify", "runs/a", "runs/b", "--exclude", "*_6.pth")[2] == ""
    assert run("verify", "runs/a/model_epoch_1.pth", "--exclude", "*_9.pth")[2] == ""


def test_a_series_in_a_directory(run, runs: Path) -> None:
    status, out, err = run("prune", "runs", "-r", "--keep", "1", "--series", "b/*_[12].pth", "-n")
    assert (status, err) == (0, "")
    assert "runs/b/*_[12].pth\n  keep    model_epoch_2.pth" in out
    assert "would remove 7 of 10" in out
