"""Programs of TensorFlow and Paddle: unsafe if they touch files in the framework, else safe."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ckpttool import Safety, verify

ROOT = Path(__file__).parents[2]
HONEST = "honest"
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}


def run(program: str, out: Path) -> dict[str, str]:
    """Write models and run each with its framework; return how that was noticed."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", f"tests.security.{program}", out],
        cwd=out,
        env={**os.environ, **QUIET, "PYTHONPATH": str(ROOT)},
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.framework
@pytest.mark.parametrize(("program", "attacks"), [("savedmodel_programs", 44), ("paddle_programs", 44)])
def test_what_touches_files_is_unsafe(tmp_path: Path, program: str, attacks: int) -> None:
    ends = run(program, tmp_path)
    hostile = {name: end for name, end in ends.items() if not name.startswith(HONEST)}
    assert {name: end for name, end in hostile.items() if end not in ("made", "told")} == {}
    assert len(hostile) == attacks
    models = tmp_path / "models"
    files = {one.name: one / "model.pdmodel" for one in models.iterdir()}
    found = {name: verify(path if path.exists() else models / name).safety for name, path in files.items()}
    assert {name for name in hostile if found[name] is not Safety.UNSAFE} == set()
    assert {name for name in found if name.startswith(HONEST) and found[name] is not Safety.SAFE} == set()
