"""What CI systems call: the action, the hook and the recipes are well formed, and do what the page says."""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.opening import known_suffixes

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "how-to" / "ci.md"
ACTION = ROOT / "action.yml"
HOOKS = ROOT / ".pre-commit-hooks.yaml"
SCHEMAS = {
    ".github/workflows/models.yml": "vendor.github-workflows",
    ".github/workflows/predictions.yml": "vendor.github-workflows",
    ".gitlab-ci.yml": "vendor.gitlab-ci",
}
_NEEDS_BASH = pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")


def blocks(language: str, page: Path = PAGE) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text("utf-8"), re.DOTALL | re.MULTILINE)


def check(folder: Path, *command: object) -> None:
    """Require that a validator has nothing to say; what it keeps, it keeps in a folder of the test's."""
    done = subprocess.run(
        [sys.executable, "-m", *map(str, command)],
        env={**os.environ, "PRE_COMMIT_HOME": str(folder / "kept")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def recipes() -> dict[str, str]:
    """Return the YAML on the page by the file's name, which its first line tells."""
    return {block.partition("\n")[0].removeprefix("# "): block for block in blocks("yaml")}


# Well formed ----------------------------------------------------------------------------------------


def test_the_action_follows_its_schema(tmp_path: Path) -> None:
    check(tmp_path, "check_jsonschema", "--builtin-schema", "vendor.github-actions", ACTION)


def test_the_hooks_follow_their_schema(tmp_path: Path) -> None:
    check(tmp_path, "pre_commit", "validate-manifest", HOOKS)


@pytest.mark.parametrize("name", sorted(SCHEMAS))
def test_a_recipe_follows_its_schema(name: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yml"
    path.write_text(recipes()[name], "utf-8")
    check(tmp_path, "check_jsonschema", "--builtin-schema", SCHEMAS[name], path)


def test_the_recipe_of_pre_commit_follows_its_schema(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(recipes()[".pre-commit-config.yaml"], "utf-8")
    check(tmp_path, "pre_commit", "validate-config", path)


def test_every_recipe_is_checked() -> None:
    assert sorted(recipes()) == sorted([*SCHEMAS, ".pre-commit-config.yaml"])


@pytest.mark.skipif(shutil.which("sh") is None, reason="there is no shell")
@pytest.mark.parametrize("script", blocks("sh"), ids=lambda script: str(len(script)))
def test_a_script_is_shell(script: str) -> None:
    done = subprocess.run(["sh", "-n"], input=script, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_every_input_of_the_action_stands_on_the_page() -> None:
    page = PAGE.read_text("utf-8")
    action = yaml.safe_load(ACTION.read_text("utf-8"))
    assert [name for name in [*action["inputs"], *action["outputs"]] if f"`{name}`" not in page] == []


# The action -----------------------------------------------------------------------------------------


def step(number: int) -> dict[str, Any]:
    steps: list[dict[str, Any]] = yaml.safe_load(ACTION.read_text("utf-8"))["runs"]["steps"]
    return steps[number]


@pytest.mark.parametrize("number", [0, 1])
def test_no_input_is_part_of_a_script(number: int) -> None:
    assert "${{" not in step(number)["run"]


def run_step(number: int, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a step as a runner does, with inputs that are empty where none are given."""
    inputs = {name: "" for name in step(number)["env"]}
    places = {
        "RUNNER_TEMP": str(folder),
        "GITHUB_OUTPUT": str(folder / "output"),
        "GITHUB_STEP_SUMMARY": str(folder / "summary"),
    }
    return subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step(number)["run"]],
        cwd=folder,
        env={**os.environ, **places, **inputs, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def program(folder: Path, status: int = 0) -> str:
    """Return a program that notes its arguments and ends with a status."""
    path = folder / "fake ckpttool"
    path.write_text(
        f"#!{sys.executable}\nimport json, sys\n"
        f"open({str(folder / 'arguments')!r}, 'w').write(json.dumps(sys.argv[1:]))\nsys.exit({status})\n"
    )
    path.chmod(0o755)
    return str(path)


def arguments(folder: Path) -> list[str]:
    told: list[str] = json.loads((folder / "arguments").read_text())
    return told


@_NEEDS_BASH
@pytest.mark.parametrize(("status", "verdict"), [(0, "valid"), (1, "invalid"), (2, "error"), (130, "error")])
def test_the_step_ends_as_verify_does(tmp_path: Path, status: int, verdict: str) -> None:
    done = run_step(1, tmp_path, PROGRAM=program(tmp_path, status))
    assert (done.returncode, done.stdout, done.stderr) == (status, "", "")
    assert (tmp_path / "output").read_text() == f"verdict={verdict}\n"
    assert arguments(tmp_path) == ["verify", "--github", "--"]


@_NEEDS_BASH
def test_inputs_are_arguments_and_nothing_else(tmp_path: Path) -> None:
    done = run_step(
        1,
        tmp_path,
        PROGRAM=program(tmp_path),
        PATHS="models/a b.pth\r\n$(touch hit)\n\n--trust\n'; touch hit; '\n*\n`touch hit`\n",
        CONFIG="c d.toml",
        ARGS="--max-depth=2\n--exclude=*.tmp\n",
        JUNIT="r.xml",
        SARIF="r.sarif",
        SUMMARY="true",
    )
    assert (done.returncode, done.stderr) == (0, "")
    before, after = " ".join(arguments(tmp_path)).split(" -- ")
    assert before == (
        "verify --github --config c d.toml --junit r.xml --sarif r.sarif "
        f"--summary {tmp_path / 'summary'} --max-depth=2 --exclude=*.tmp"
    )
    assert after == "models/a b.pth $(touch hit) --trust '; touch hit; ' * `touch hit`"
    assert not (tmp_path / "hit").exists()


@_NEEDS_BASH
@pytest.mark.parametrize(
    "wrong", [{"VERSION": "1.0 --index-url=x"}, {"EXTRAS": "torch] @ file:///x"}, {"VERSION": "$(touch hit)"}]
)
def test_a_wrong_version_or_extra_installs_nothing(tmp_path: Path, wrong: dict[str, str]) -> None:
    done = run_step(0, tmp_path, GITHUB_ACTION_PATH=str(ROOT), **wrong)
    assert done.returncode == 2
    assert done.stdout.startswith("::error title=ckpttool::")
    assert [entry.name for entry in tmp_path.iterdir()] == []


@_NEEDS_BASH
@pytest.mark.parametrize(
    ("inputs", "wanted"),
    [
        ({}, "/action"),
        ({"EXTRAS": "torch,paddle"}, "/action[torch,paddle]"),
        ({"VERSION": "1.2.3", "EXTRAS": "torch"}, "ckpttool[torch]==1.2.3"),
    ],
)
def test_what_is_installed(tmp_path: Path, inputs: dict[str, str], wanted: str) -> None:
    places = tmp_path / "bin"
    places.mkdir()
    python = places / "python"
    python.write_text(
        '#!/bin/sh\ncase "$*" in\n*pip*) echo "$@" > asked ;;\n'
        "*EXTERNALLY*) exit 1 ;;\n*) echo /scripts ;;\nesac\n"
    )
    python.chmod(0o755)
    path = f"{places}{os.pathsep}{os.environ['PATH']}"
    done = run_step(0, tmp_path, GITHUB_ACTION_PATH="/action", PATH=path, **inputs)
    assert (done.returncode, done.stderr) == (0, "")
    asked = (tmp_path / "asked").read_text().strip()
    assert asked == f"-m pip install --quiet --disable-pip-version-check {wanted}"
    assert (tmp_path / "output").read_text() == "program=/scripts/ckpttool\n"


# The hook -------------------------------------------------------------------------------------------


def hook() -> dict[str, Any]:
    (told,) = yaml.safe_load(HOOKS.read_text("utf-8"))
    return told  # type: ignore[no-any-return]  # a mapping, as its schema says


def test_the_hook_is_called_with_every_suffix_of_a_checkpoint() -> None:
    suffixes = known_suffixes() - {".bin", ".index"}
    names = [f"models/m{suffix}" for suffix in sorted(suffixes)]
    names += ["pytorch_model.bin", "a/adapter_model.BIN", "runs/ckpt-5.index", "sm/variables/variables.index"]
    assert [name for name in names if not re.search(hook()["files"], name)] == []


@pytest.mark.parametrize(
    "name", ["README.md", "a.pth.txt", "data.bin", "faiss.index", "pth", "x.json", "models.py"]
)
def test_the_hook_is_not_called_with_other_files(name: str) -> None:
    assert re.search(hook()["files"], name) is None


# The page -------------------------------------------------------------------------------------------


def test_the_page_shows_what_is_printed(tmp_path: Path, files: Path) -> None:
    models = tmp_path / "models"
    models.mkdir()
    intact = (files / "pytorch" / "guide.pth").read_bytes()
    (models / "classifier.pth").write_bytes(intact)
    damaged = bytearray(intact)
    damaged[damaged.index(b"data/0") + 128] ^= 0x10
    (models / "detector.pth").write_bytes(damaged)
    (models / "encoder.safetensors").write_bytes(masked())
    (config,) = blocks("toml")
    name = tmp_path / config.partition("\n")[0].removeprefix("# ")
    name.write_text(config, "utf-8")
    name.chmod(0o644)
    (shown,) = blocks("text")
    command, _, expected = shown.removeprefix("$ ckpttool ").partition("\n")
    done = subprocess.run(
        [sys.executable, "-m", "ckpttool", *command.split()],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (1, expected, "")


def masked() -> bytes:
    header = {"encoder.mask": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + struct.pack("<4f", 0, 0, float("-inf"), float("-inf"))
