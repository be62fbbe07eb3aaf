"""The examples of the contributors' guide are real: each diff applies, and what it adds passes its tests."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.thorough import sampled
from tests.test_docs import pattern

ROOT = Path(__file__).parents[1]
GUIDE = (ROOT / "docs" / "background" / "contributing.md").read_text("utf-8")
EXAMPLES = dict(
    re.findall(r"^## (Add [^\n]+)\n(?:(?!^## ).)*?^```diff\n(.*?)^```", GUIDE, re.DOTALL | re.MULTILINE)
)
PACKAGE = "Add a format in an hour"
"""The example that is a package of its own."""
LINES = 85
"""Limit on the lines of its module."""
BUILDS_ON = {"Add a format to ckpttool": PACKAGE}
"""Examples whose diff applies after another one."""
IN_PACKAGE = sampled([title for title in EXAMPLES if title != PACKAGE], 1)


def test_there_are_examples() -> None:
    assert len(EXAMPLES) == GUIDE.count("\n## Add ") == GUIDE.count("```diff") > 0


def test_each_name_in_where_is_is_in_its_module() -> None:
    rows = re.findall(r"^\| [^|]+\? \| `([^`]+)` \| `([^`]+)` \|$", GUIDE, re.MULTILINE)
    assert len(rows) == 12
    for module, name in rows:
        assert re.search(rf"^ *(def |class )?{name}\b", (ROOT / module).read_text("utf-8"), re.MULTILINE), (
            name
        )


def apply(title: str, into: Path) -> None:
    """Apply the diff of an example, and before it the one that it builds on."""
    if title in BUILDS_ON:
        apply(BUILDS_ON[title], into)
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(into.parent)}
    subprocess.run(
        ["git", "apply", "-"], input=EXAMPLES[title].encode(), cwd=into, env=environment, check=True
    )


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


@pytest.mark.parametrize("title", IN_PACKAGE)
def test_an_example_applies_and_passes_its_tests(title: str, copy: Path) -> None:
    apply(title, copy)
    added = re.findall(r"^(?:\+\+\+ b/|rename to )(tests/\S+\.py)$", EXAMPLES[title], re.MULTILINE)
    assert added
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:xdist",
            *dict.fromkeys(added),
        ],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(copy)},
        check=True,
    )


# A format in a package of its own -------------------------------------------------------------------


def session() -> list[tuple[str, str]]:
    """Return the commands of the guide for a format's package, each with its output."""
    (block,) = re.findall(rf"^## {PACKAGE}\n.*?^```text\n(.*?)^```", GUIDE, re.DOTALL | re.MULTILINE)
    parts = re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]
    return [(command, output) for command, _, output in (part.partition("\n") for part in parts)]


def program(command: str, installed: Path) -> list[str]:
    """Return a command of the guide for this environment, in which nothing is installed or downloaded."""
    name, *arguments = shlex.split(command)
    if name == "pip":
        alone = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
        places = [argument for argument in arguments[1:] if argument != "-e"]
        return [sys.executable, "-m", "pip", "install", *alone, "--target", str(installed), *places]
    if name == "pytest":
        return [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", *arguments]
    return [sys.executable, *(["-m", name] if name == "ckpttool" else []), *arguments]


def test_a_format_is_a_package_of_its_own(tmp_path: Path) -> None:
    apply(PACKAGE, tmp_path)
    module = tmp_path / "toy" / "ckpttool_toy.py"
    assert len(module.read_text("utf-8").splitlines()) <= LINES
    installed, here = tmp_path / "installed", tmp_path
    path = os.pathsep.join([str(ROOT), str(installed), *filter(None, [os.environ.get("PYTHONPATH")])])
    for command, expected in session():
        if command.startswith("cd "):
            here /= command.removeprefix("cd ")
            continue
        done = subprocess.run(
            program(command, installed),
            cwd=here,
            env={**os.environ, "PYTHONPATH": path, "NO_COLOR": "1"},
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        assert done.returncode == 0, (command, done.stdout)
        printed = "".join(f"{line.rstrip()}\n" for line in done.stdout.splitlines())
        shown = re.sub(r"(\d+ passed) in [\d.]+s", r"\1", printed)
        assert re.fullmatch(pattern(re.sub(r" in [\d.]+s", "", expected)), shown), (command, shown)
