"""Globs on the command line and in a configuration: what they mean, and one that matches nothing is told."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("glob", ["b/", "runs/b", "./b", "{0}/runs/b"])
def test_what_to_exclude(run, runs: Path, glob: str) -> None:
    status, out, err = run(
        "prune", "runs", "-r", "--keep", "1", "--exclude", glob.format(runs), "-n", "--json"
    )
    assert (status, err, len(_gone(out))) == (0, "", 4)
    assert all(path.startswith("runs/a/") for path in _gone(out))


@pytest.mark.parametrize(
    ("glob", "kept"),
    [
        ("b/model_epoch_2.pth", ["b"]),
        ("runs/b/model_epoch_2.pth", ["b"]),
        ("{0}/runs/b/model_epoch_2.pth", ["b"]),
        ("./model_epoch_2.pth", ["a", "b"]),
        ("*/model_epoch_2.pth", ["a", "b"]),
    ],
)
def test_what_to_keep(run, runs: Path, glob: str, kept: list[str]) -> None:
    status, out, err = run(
        "prune", "runs", "-r", "--keep", "1", "--keep-name", glob.format(runs), "-n", "--json"
    )
    left = {"runs/a/model_epoch_2.pth", "runs/b/model_epoch_2.pth"} - set(_gone(out))
    assert (status, err, left) == (0, "", {f"runs/{name}/model_epoch_2.pth" for name in kept})


@pytest.mark.parametrize("flag", ["--exclude", "--keep-name", "--series"])
@pytest.mark.parametrize("extra", [[], ["--json"]])
def test_prune_says_what_matched_nothing(run, runs: Path, flag: str, extra: list[str]) -> None:
    status, _, err = run("prune", "runs", "-r", "--keep", "1", flag, "papr_*", "-n", *extra)
    assert (status, err) == (0, f"ckpttool: warning: {flag} 'papr_*' matched nothing\n")
    assert run("prune", "runs", "-r", "--keep", "1", flag, "papr_*", "-n", "-q") == (0, "", "")


@pytest.mark.parametrize(
    "arguments",
    [
        ["list", "runs"],
        ["latest", "runs/a"],
        ["rename", "runs/a", "--template", "e{epoch}", "-n"],
        ["verify", "runs"],
        ["verify", "runs/a", "runs/b"],
    ],
)
def test_others_say_it_too(run, runs: Path, arguments: list[str]) -> None:
    status, _, err = run(*arguments, "--exclude", "papr_*")
    assert (status, err) == (0, "ckpttool: warning: --exclude 'papr_*' matched nothing\n")
    assert run(*arguments, "--exclude", "*_1.pth")[2] == ""


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
