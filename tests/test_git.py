"""The recipes of docs/how-to/git.md, in a real repository."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

ROOT = Path(__file__).parent.parent
RECIPES = re.findall(
    r"^```sh\n(.*?)^```", (ROOT / "docs" / "how-to" / "git.md").read_text("utf-8"), re.DOTALL | re.MULTILINE
)

Git = Callable[..., "subprocess.CompletedProcess[str]"]

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


def save(path: Path, epoch: int, moved: float = 0.0) -> None:
    """Write a checkpoint of two tensors, of which an element moved."""
    weights = {
        "fc.weight": np.arange(20, dtype=np.float32).reshape(2, 10),
        "fc.bias": np.zeros(2, np.float32),
    }
    weights["fc.weight"][1, 3] += moved
    save_file(weights, path, {"epoch": str(epoch)})


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    path = tmp_path / "repository"
    path.mkdir()
    return path


@pytest.fixture
def git(repository: Path) -> Git:
    """Return what runs git where the recipes were followed and one checkpoint was committed."""
    unwanted = ("GIT_", "CKPTTOOL_", "COLUMNS", "NO_COLOR", "FORCE_COLOR")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(unwanted)}
    environment |= {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), environment["PATH"]]),
        "HOME": str(repository.parent),
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_AUTHOR_NAME": "A",
        "GIT_AUTHOR_EMAIL": "a@example.org",
        "GIT_COMMITTER_NAME": "A",
        "GIT_COMMITTER_EMAIL": "a@example.org",
    }

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, cwd=repository, env=environment, check=True, capture_output=True, text=True
        )

    def git(*arguments: str) -> subprocess.CompletedProcess[str]:
        return run("git", *arguments)

    git("init", "-q")
    for recipe in RECIPES:
        run("sh", "-ec", recipe)
    save(repository / "model.safetensors", 3)
    git("add", ".")
    git("commit", "-q", "-m", "first")
    return git


def test_difference_is_told(git: Git, repository: Path) -> None:
    save(repository / "model.safetensors", 4, moved=0.5)
    (repository / "notes.txt").write_text("text\n")
    done = git("diff")
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "model.safetensors: 1 of 2 tensors changed, max |Δ| 0.5 in fc.weight; epoch 3 → 4",
        "",
        "  tensor             differ  max |Δ|  at      values     mean |Δ|  relative   L2    cosine",
        "  fc.weight  1 of 20 (5.0%)      0.5  [1, 3]  13 → 13.5     0.025    0.0101  0.5  0.999953",
        "",
        "  epoch  3 → 4",
    ]


@pytest.mark.thorough
def test_several_files_are_told(git: Git, repository: Path) -> None:
    save(repository / "model.safetensors", 4)
    save(repository / "new.safetensors", 1)
    git("add", ".")
    told = git("diff", "--cached").stdout.splitlines()
    assert told[0] == "model.safetensors: 2 tensors equal; epoch 3 → 4"
    assert "new.safetensors: 2 added (fc.*); 1 value added" in told


@pytest.mark.thorough
def test_deleted_file_is_told(git: Git, repository: Path) -> None:
    (repository / "model.safetensors").unlink()
    assert git("diff").stdout.splitlines()[0] == "model.safetensors: 2 removed (fc.*); 1 value removed"


def test_damaged_file_stops_nothing(git: Git, repository: Path) -> None:
    save(repository / "z.safetensors", 1)
    git("add", ".")
    git("commit", "-q", "-m", "second")
    save(repository / "z.safetensors", 2)
    (repository / "model.safetensors").write_bytes(b"no checkpoint")
    done = git("diff")
    assert "z.safetensors: 2 tensors equal; epoch 1 → 2" in done.stdout
    assert "ckpttool: error: model.safetensors: " in done.stderr


def test_log_shows_the_numbers(git: Git, repository: Path) -> None:
    save(repository / "model.safetensors", 4, moved=10.0)
    git("commit", "-q", "-a", "-m", "second")
    told = [line.split() for line in git("log", "-p", "-1").stdout.splitlines()]
    assert ["-", "epoch", "3"] in told and ["+", "epoch", "4"] in told
    removed, added = ([line for line in told if line[:2] == [sign, "weight"]] for sign in "-+")
    assert (len(removed), len(added)) == (1, 1)
    assert removed != added


def test_conflict_is_told_side_by_side(git: Git, repository: Path) -> None:
    git("branch", "other")
    save(repository / "model.safetensors", 4, moved=0.5)
    git("commit", "-q", "-a", "-m", "ours")
    git("checkout", "-q", "other")
    save(repository / "model.safetensors", 5, moved=0.25)
    git("commit", "-q", "-a", "-m", "theirs")
    with pytest.raises(subprocess.CalledProcessError):
        git("merge", "-")
    assert "tensors changed" not in git("diff").stdout
    told = git("diff", "--theirs").stdout
    assert "model.safetensors: 1 of 2 tensors changed, max |Δ| 0.25 in fc.weight; epoch 4 → 5" in told


@pytest.mark.thorough
def test_change_of_mode_alone_is_equal(git: Git, repository: Path) -> None:
    (repository / "model.safetensors").chmod(0o755)
    assert git("diff").stdout == "model.safetensors: equal: 2 tensors, 88 B compared\n"
    assert "new mode 100755" in git("diff", "--no-ext-diff").stdout
