"""``ckpttool merge`` on real files: stdout, stderr and exit status together."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.support.commands import Run, refusals
from tests.support.golden import Golden

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


def test_json(work: Path, run: Run, golden: Golden) -> None:
    status, out, err = run("merge", "--json", *NAMES, "whole.safetensors")
    assert (status, err) == (OK, "")
    document = json.loads(out)
    assert document["bytes"] == os.path.getsize("whole.safetensors")
    golden(json.dumps(document, indent=1))


def test_what_is_refused(work: Path, run: Run, golden: Golden) -> None:
    Path("there.safetensors").write_bytes(b"mine")
    targets = (f"{NAMES[0]} whole.safetensors", f"{' '.join(NAMES)} there.safetensors", "one")
    golden(refusals(run, *(f"merge {target}" for target in targets)))
    assert not os.path.lexists("whole.safetensors")
    assert Path("there.safetensors").read_bytes() == b"mine"


def test_a_name_out_of_a_file_is_escaped(work: Path, run: Run) -> None:
    for name in NAMES:
        save_file({"a\x1b[2J": np.zeros(1, np.float32)}, name)
    status, out, err = run("merge", *NAMES, "whole.safetensors")
    assert (status, out) == (FAILED, "")
    assert "\x1b" not in err
    assert "model-00001-of-00002.safetensors holds it" in err


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


def test_a_dry_run(work: Path, run: Run) -> None:
    before = sorted(os.listdir())
    status, out, err = run("merge", "-n", *NAMES, "whole.safetensors")
    assert (status, err) == (OK, "")
    assert out == "2 parts → whole.safetensors: would write 2 tensors, 4.0 kB as safetensors\n"
    assert sorted(os.listdir()) == before
