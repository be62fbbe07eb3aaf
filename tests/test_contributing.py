"""The examples of the contributors' guide are real: each diff applies, and what it adds passes its tests."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.thorough import sampled

ROOT = Path(__file__).parents[1]
GUIDE = (ROOT / "docs" / "background" / "contributing.md").read_text("utf-8")
EXAMPLES = dict(
    re.findall(r"^## (Add [^\n]+)\n(?:(?!^## ).)*?^```diff\n(.*?)^```", GUIDE, re.DOTALL | re.MULTILINE)
)


def test_there_are_examples() -> None:
    assert len(EXAMPLES) == GUIDE.count("\n## Add ") == GUIDE.count("```diff") > 0


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Return a copy of the project, with links to its fixtures."""
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("ckpttool", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "fixtures" / "files").mkdir(parents=True)
    for path in (ROOT / "fixtures" / "files").iterdir():
        (tmp_path / "fixtures" / "files" / path.name).symlink_to(path)
    return tmp_path


@pytest.mark.parametrize("title", sampled(EXAMPLES, 1))
def test_an_example_applies_and_passes_its_tests(title: str, copy: Path) -> None:
    diff = EXAMPLES[title]
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(copy.parent), "PYTHONPATH": str(copy)}
    subprocess.run(["git", "apply", "-"], input=diff.encode(), cwd=copy, env=environment, check=True)
    tests = re.findall(r"^\+\+\+ b/(tests/\S+\.py)$", diff, re.MULTILINE)
    assert tests
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *tests],
        cwd=copy,
        env=environment,
        check=True,
    )
