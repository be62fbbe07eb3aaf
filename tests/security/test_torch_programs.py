"""TorchScript archives and exported programs: attacks that work in PyTorch, and honest models."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ckpttool import Safety, verify
from ckpttool.formats.torch.torch_operators import OPERATORS
from tests.security.operator_sweep import KEPT

ROOT = Path(__file__).parents[2]


def run(module: str, *arguments: str, cwd: Path) -> str:
    """Return what a module of these tests prints in a process of its own."""
    command = [sys.executable, "-W", "ignore", "-m", f"tests.security.{module}", *arguments]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(cwd)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=cwd, check=True)
    return done.stdout


@pytest.mark.framework
def test_no_program_that_does_harm_is_safe(tmp_path: Path) -> None:
    found: list[list[str]] = json.loads(
        run("torch_programs", str(tmp_path), "3", cwd=tmp_path).splitlines()[-1]
    )
    harmful = {name: tmp_path / file for name, file, what in found if not what.startswith("nothing")}
    assert len(harmful) >= 130
    verdicts = {name: verify(path).safety for name, path in harmful.items()}
    assert {name for name, safety in verdicts.items() if safety is Safety.SAFE} == set()
    files = {name for name, _, what in found if what == "file"}
    assert {name for name in files if verdicts[name] is not Safety.UNSAFE} == set()


@pytest.mark.framework
def test_honest_programs_are_safe(tmp_path: Path) -> None:
    assert int(run("honest_programs", str(tmp_path / "honest"), cwd=tmp_path).splitlines()[-1]) >= 100
    verdicts = {path: verify(path) for path in sorted((tmp_path / "honest").iterdir())}
    unchecked = {
        path: verdicts.pop(path)
        for path in list(verdicts)
        if path.suffix == ".ptl" or path.name.startswith("static-int8-")
    }
    assert {path: one.findings for path, one in verdicts.items() if one.safety is not Safety.SAFE} == {}
    codes = {(one.safety, finding.code) for one in unchecked.values() for finding in one.findings}
    assert codes == {(Safety.UNKNOWN, "unchecked-ops")}


def test_the_list_of_unchecked_operators() -> None:
    assert OPERATORS.unchecked <= OPERATORS.registered
    assert OPERATORS.unchecked.isdisjoint(KEPT)


@pytest.mark.framework
@pytest.mark.skipif(
    platform.machine() != "x86_64" or not shutil.which("cc"), reason="guards need cc and x86-64"
)
@pytest.mark.parametrize("name", ["aten::_cdist_backward", "aten::_cummax_helper", "aten::as_strided_"])
def test_the_sweep_finds_what_the_list_holds(name: str, tmp_path: Path) -> None:
    assert f"{name}\t" in run("operator_sweep", "--dry", name, cwd=tmp_path)
    assert name in OPERATORS.unchecked
