"""``ckpttool merge`` on real files: stdout, stderr and exit status together."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.support.commands import Run

OK, FAILED = 0, 2
NAMES = [f"model-{at:05d}-of-00002.safetensors" for at in (1, 2)]


@pytest.fixture
def work(tmp_path: Path, files: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current directory: two shards without an index, and a run of DeepSpeed's."""
    for at, name in enumerate(NAMES):
        weights = {f"layers.{at}.weight": np.full((50, 10), at, np.float32)}
        save_file(weights, tmp_path / name, metadata={"format": "pt"})
    shutil.copytree(files / "deepspeed" / "zero-3", tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_shards(work: Path, run: Run) -> None:
    answer = run("merge", *NAMES, "whole.safetensors")
    size = os.path.getsize("whole.safetensors")
    line = f"2 parts → whole.safetensors: 2 tensors, {size / 1000:.1f} kB, verified\n"
    assert answer == (OK, line, "")
    assert load_file("whole.safetensors")["layers.1.weight"].sum() == 500


def test_json(work: Path, run: Run) -> None:
    status, out, err = run("merge", "--json", *NAMES, "whole.safetensors")
    assert (status, err) == (OK, "")
    assert json.loads(out) == {
        "schema": "ckpttool.convert/1",
        "source": NAMES,
        "target": "whole.safetensors",
        "format": "safetensors",
        "tensors": 2,
        "bytes": os.path.getsize("whole.safetensors"),
        "verified": True,
        "dry_run": False,
        "dropped": [],
        "notes": [],
        "mismatches": [],
        "safety": [],
    }


def test_a_missing_part_is_named(work: Path, run: Run) -> None:
    answer = run("merge", NAMES[0], "whole.safetensors")
    assert answer == (FAILED, "", f"ckpttool: error: {NAMES[1]}: this shard is missing: 1 of 2 are given\n")
    assert not os.path.lexists("whole.safetensors")


def test_a_name_out_of_a_file_is_escaped(work: Path, run: Run) -> None:
    for name in NAMES:
        save_file({"a\x1b[2J": np.zeros(1, np.float32)}, name)
    status, out, err = run("merge", *NAMES, "whole.safetensors")
    assert (status, out) == (FAILED, "")
    assert "\x1b" not in err
    assert "is in model-00001-of-00002.safetensors as well" in err


def test_the_run_of_a_distributed_job(work: Path, run: Run) -> None:
    told = "  6 parameters in full precision, from 2 ranks of ZeRO 3\n"
    status, out, err = run("merge", "run", "whole.safetensors", "--only", "weights")
    assert (status, err) == (OK, "")
    assert told in out
    assert load_file("whole.safetensors")["0.weight"].dtype == np.float32


def test_into_shards(work: Path, run: Run) -> None:
    status, _, err = run("merge", *NAMES, "set", "--to", "safetensors", "--shard-size", "2kB", "-q")
    assert (status, err) == (OK, "")
    assert sorted(os.listdir("set")) == [*NAMES, "model.safetensors.index.json"]


def test_a_target_that_is_there(work: Path, run: Run) -> None:
    Path("whole.safetensors").write_bytes(b"mine")
    status, out, err = run("merge", *NAMES, "whole.safetensors")
    assert (status, out) == (FAILED, "")
    assert err == "ckpttool: error: whole.safetensors already exists (--force replaces it)\n"
    assert Path("whole.safetensors").read_bytes() == b"mine"


def test_a_dry_run(work: Path, run: Run) -> None:
    before = sorted(os.listdir())
    status, out, err = run("merge", "-n", *NAMES, "whole.safetensors")
    assert (status, err) == (OK, "")
    assert out == "2 parts → whole.safetensors: would write 2 tensors, 4.0 kB as safetensors\n"
    assert sorted(os.listdir()) == before


def test_usage(run: Run) -> None:
    status, out, err = run("merge", "one")
    assert (status, out) == (FAILED, "")
    assert err.startswith("ckpttool: error: Missing argument")
