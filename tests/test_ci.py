"""What CI systems call: the action, the hook and the recipes are well formed, and do what the page says."""

from __future__ import annotations

import json
import os
import platform
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


def test_recipes_follow_their_schemas(tmp_path: Path) -> None:
    found = recipes()
    assert sorted(found) == sorted([*SCHEMAS, ".pre-commit-config.yaml"])
    for schema in sorted({*SCHEMAS.values()}):
        names = [name for name in SCHEMAS if SCHEMAS[name] == schema]
        paths = [tmp_path / f"{schema}-{number}.yml" for number, _ in enumerate(names)]
        for path, name in zip(paths, names, strict=True):
            path.write_text(found[name], "utf-8")
        check(tmp_path, "check_jsonschema", "--builtin-schema", schema, *paths)


def test_the_recipe_of_pre_commit_follows_its_schema(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(recipes()[".pre-commit-config.yaml"], "utf-8")
    check(tmp_path, "pre_commit", "validate-config", path)


@pytest.mark.skipif(shutil.which("sh") is None, reason="there is no shell")
def test_scripts_are_shell() -> None:
    assert blocks("sh")
    for script in blocks("sh"):
        done = subprocess.run(["sh", "-n"], input=script, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, ""), script


def test_every_input_of_the_action_stands_on_the_page() -> None:
    page = PAGE.read_text("utf-8")
    action = yaml.safe_load(ACTION.read_text("utf-8"))
    assert [name for name in [*action["inputs"], *action["outputs"]] if f"`{name}`" not in page] == []


# The action -----------------------------------------------------------------------------------------


STEPS: list[dict[str, Any]] = yaml.safe_load(ACTION.read_text("utf-8"))["runs"]["steps"]
_PINNED = re.compile(r"^ *(?:- )?uses: (?!OWNER/)(.*)$", re.MULTILINE)


def step(name: str) -> dict[str, Any]:
    (found,) = [step for step in STEPS if step["name"] == name]
    return found


def test_no_input_is_part_of_a_script() -> None:
    assert [step["name"] for step in STEPS if "${{" in step.get("run", "")] == []


def test_actions_of_others_are_pinned_with_one_digest_each() -> None:
    pins = set(_PINNED.findall(ACTION.read_text("utf-8")) + _PINNED.findall(PAGE.read_text("utf-8")))
    assert pins
    for pin in pins:
        assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", pin), pin
        repository = "/".join(pin.split("@")[0].split("/")[:2])
        assert len({other.split("@")[1] for other in pins if other.startswith(repository)}) == 1


def run_step(name: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a step as a runner does, with inputs that are empty where none are given."""
    inputs = {variable: "" for variable in step(name).get("env", {})}
    places = {
        "RUNNER_TEMP": str(folder),
        "GITHUB_OUTPUT": str(folder / "output"),
        "GITHUB_STEP_SUMMARY": str(folder / "summary"),
    }
    return subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step(name)["run"]],
        cwd=folder,
        env={**os.environ, **places, **inputs, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def outputs(folder: Path) -> dict[str, str]:
    return dict(line.split("=", 1) for line in (folder / "output").read_text().splitlines())


def program(folder: Path, status: int = 0, report: str = "") -> str:
    """Return a program that notes its arguments, writes a report and ends with a status."""
    path = folder / "fake ckpttool"
    lines = ["import json, sys", f"open({str(folder / 'arguments')!r}, 'w').write(json.dumps(sys.argv[1:]))"]
    if report:
        lines.append(f"open({report!r}, 'w').write('{{}}')")
    path.write_text("\n".join([f"#!{sys.executable}", *lines, f"sys.exit({status})\n"]))
    path.chmod(0o755)
    return str(path)


def arguments(folder: Path) -> list[str]:
    noted: list[str] = json.loads((folder / "arguments").read_text())
    return noted


def fake_python(folder: Path, prints: str, status: int = 0) -> str:
    """Return a PATH with a Python that notes its arguments and prints a line."""
    programs = folder / "bin"
    programs.mkdir()
    for name in ("python", "python3"):
        script = f'#!/bin/sh\necho "$@" >> "{folder}/asked"\necho "{prints}"\nexit {status}\n'
        (programs / name).write_text(script)
        (programs / name).chmod(0o755)
    return f"{programs}{os.pathsep}{os.environ['PATH']}"


@_NEEDS_BASH
@pytest.mark.parametrize(("status", "verdict"), [(0, "valid"), (1, "invalid"), (2, "error"), (130, "error")])
def test_the_step_ends_as_verify_does(tmp_path: Path, status: int, verdict: str) -> None:
    done = run_step("Verify", tmp_path, PROGRAM=program(tmp_path, status))
    assert (done.returncode, done.stdout, done.stderr) == (status, "", "")
    assert outputs(tmp_path) == {"verdict": verdict}
    assert arguments(tmp_path) == ["verify", "--github", "--"]


@_NEEDS_BASH
def test_inputs_are_arguments_and_nothing_else(tmp_path: Path) -> None:
    done = run_step(
        "Verify",
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
@pytest.mark.parametrize("status", [0, 1, 2])
def test_a_report_is_uploaded_whatever_the_verdict(tmp_path: Path, status: int) -> None:
    (tmp_path / "r.sarif").write_text("old")
    os.utime(tmp_path / "r.sarif", (0, 0))
    run_step("Verify", tmp_path, PROGRAM=program(tmp_path, status, "r.sarif"), SARIF="r.sarif")
    assert outputs(tmp_path)["sarif"] == "true"


@_NEEDS_BASH
@pytest.mark.parametrize("sarif", ["", "r.sarif", "none.sarif"])
def test_a_report_that_this_run_did_not_write_is_not_uploaded(tmp_path: Path, sarif: str) -> None:
    (tmp_path / "r.sarif").write_text("old")
    os.utime(tmp_path / "r.sarif", (0, 0))
    run_step("Verify", tmp_path, PROGRAM=program(tmp_path, 2), SARIF=sarif)
    assert outputs(tmp_path) == {"verdict": "error"}


def test_a_failed_upload_fails_the_job_only_if_it_was_demanded() -> None:
    upload = step("Upload SARIF")
    assert upload["continue-on-error"] == "${{ inputs.upload != 'true' }}"
    assert "steps.verify.outputs.sarif == 'true'" in upload["if"]
    assert "inputs.upload != 'false'" in upload["if"]
    assert "steps.upload.outcome == 'failure'" in step("Say why nothing was uploaded")["if"]


@_NEEDS_BASH
def test_a_failed_upload_is_explained(tmp_path: Path) -> None:
    done = run_step("Say why nothing was uploaded", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (
        "::notice title=ckpttool::The SARIF report was not uploaded. Code scanning must be enabled for the "
        "repository, and the job needs 'permissions: security-events: write'. With 'upload: false' it isn't "
        "tried.\n"
    )


@_NEEDS_BASH
@pytest.mark.parametrize(
    "wrong",
    [
        {"EXTRAS": "torch] @ file:///x"},
        {"EXTRAS": "$(touch hit)"},
        {"UPLOAD": "yes"},
        {"UPLOAD": "true", "SARIF": ""},
    ],
)
def test_a_wrong_input_installs_nothing(tmp_path: Path, wrong: dict[str, str]) -> None:
    done = run_step("Find Python", tmp_path, **{"UPLOAD": "auto"} | wrong)
    assert done.returncode == 2
    assert done.stdout.startswith("::error title=ckpttool::")
    assert [entry.name for entry in tmp_path.iterdir()] == []


@_NEEDS_BASH
def test_the_python_of_the_job_is_used(tmp_path: Path) -> None:
    path = fake_python(tmp_path, "usable")
    done = run_step("Find Python", tmp_path, UPLOAD="auto", PATH=path)
    assert (done.returncode, done.stderr) == (0, "")
    assert outputs(tmp_path) == {"python": str(tmp_path / "bin" / "python")}


@_NEEDS_BASH
def test_a_python_of_the_system_gets_an_environment(tmp_path: Path) -> None:
    path = fake_python(tmp_path, "managed")
    done = run_step("Find Python", tmp_path, UPLOAD="auto", PATH=path)
    assert (done.returncode, done.stderr) == (0, "")
    assert outputs(tmp_path) == {"python": str(tmp_path / "ckpttool" / "bin" / "python")}
    asked = (tmp_path / "asked").read_text().splitlines()[-1]
    assert asked == f"-m venv --system-site-packages {tmp_path / 'ckpttool'}"


@_NEEDS_BASH
@pytest.mark.parametrize("status", [0, 1])
def test_a_python_that_cannot_be_used_is_set_up(tmp_path: Path, status: int) -> None:
    path = fake_python(tmp_path, "", status)
    done = run_step("Find Python", tmp_path, UPLOAD="auto", PATH=path)
    assert (done.returncode, done.stderr) == (0, "")
    assert outputs(tmp_path) == {"python": ""}
    assert step("Set up Python")["if"] == "steps.find.outputs.python == ''"


@_NEEDS_BASH
def test_a_job_without_python_gets_one(tmp_path: Path) -> None:
    bash = shutil.which("bash")
    assert bash is not None
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "bash").symlink_to(bash)
    done = run_step("Find Python", tmp_path, UPLOAD="auto", PATH=str(tmp_path / "bin"))
    assert (done.returncode, done.stderr) == (0, "")
    assert outputs(tmp_path) == {"python": ""}


@_NEEDS_BASH
@pytest.mark.skipif(sys.platform == "win32", reason="bash writes paths in its own way there")
def test_this_python_can_be_used(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    script = f'#!/bin/sh\nexec "{sys.executable}" "$@"\n'
    (tmp_path / "bin" / "python").write_text(script)
    (tmp_path / "bin" / "python").chmod(0o755)
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    done = run_step("Find Python", tmp_path, UPLOAD="auto", PATH=path)
    assert (done.returncode, done.stderr) == (0, "")
    assert outputs(tmp_path)["python"].startswith(str(tmp_path))


@_NEEDS_BASH
def test_the_cache_is_that_of_pyproject_python_and_extras(tmp_path: Path) -> None:
    action = tmp_path / "action"
    action.mkdir()
    names = set()
    for content, extras in [("a", ""), ("b", ""), ("b", "torch,paddle")]:
        (action / "pyproject.toml").write_text(content)
        (tmp_path / "output").unlink(missing_ok=True)
        done = run_step(
            "Name the cache", tmp_path, GITHUB_ACTION_PATH=str(action), PYTHON=sys.executable, EXTRAS=extras
        )
        assert (done.returncode, done.stderr) == (0, "")
        name = outputs(tmp_path)["name"]
        assert platform.python_version() in name
        assert "," not in name  # actions/cache refuses such a key
        assert Path(outputs(tmp_path)["path"]).is_absolute()
        names.add(name)
    assert len(names) == 3


@_NEEDS_BASH
@pytest.mark.parametrize(("extras", "wanted"), [("", "/action"), ("torch,paddle", "/action[torch,paddle]")])
def test_what_is_installed(tmp_path: Path, extras: str, wanted: str) -> None:
    fake_python(tmp_path, "/scripts")
    python = str(tmp_path / "bin" / "python")
    done = run_step("Install ckpttool", tmp_path, GITHUB_ACTION_PATH="/action", PYTHON=python, EXTRAS=extras)
    assert (done.returncode, done.stderr) == (0, "")
    asked = (tmp_path / "asked").read_text().splitlines()[0]
    assert asked == f"-m pip install --quiet --disable-pip-version-check {wanted}"
    assert outputs(tmp_path) == {"program": "/scripts/ckpttool"}


# The hook -------------------------------------------------------------------------------------------


def hook() -> dict[str, Any]:
    (told,) = yaml.safe_load(HOOKS.read_text("utf-8"))
    return told  # type: ignore[no-any-return]  # a mapping, as its schema says


def test_the_hook_is_called_with_every_suffix_of_a_checkpoint() -> None:
    suffixes = known_suffixes() - {".bin", ".index"}
    names = [f"models/m{suffix}" for suffix in sorted(suffixes)]
    names += ["pytorch_model.bin", "a/adapter_model.BIN", "runs/ckpt-5.index", "sm/variables/variables.index"]
    assert [name for name in names if not re.search(hook()["files"], name)] == []


def test_the_hook_is_not_called_with_other_files() -> None:
    names = ("README.md", "a.pth.txt", "data.bin", "faiss.index", "pth", "x.json", "models.py")
    assert [name for name in names if re.search(hook()["files"], name)] == []


def test_the_hook_names_problems_only(tmp_path: Path, files: Path) -> None:
    (tmp_path / "good.pth").write_bytes((files / "pytorch" / "guide.pth").read_bytes())
    (tmp_path / "cut.pth").write_bytes((files / "pytorch" / "guide.pth").read_bytes()[:1500])
    program, *options = hook()["entry"].split()
    done = subprocess.run(
        [sys.executable, "-m", program, *options, "cut.pth", "good.pth"],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name != "GITHUB_ACTIONS"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout == (
        "✗ INVALID  cut.pth  pytorch  1.5 kB  structure\n"
        "    error truncated: 1,500 bytes of a zip that ends before its directory\n"
        "    → copy it again, or use an earlier checkpoint (ckpttool explain truncated)\n"
    )


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
