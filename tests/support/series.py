"""Fixtures: directories of checkpoints, and faults of system calls."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.directories import Entry, make_entry
from tests.support.faults import Fault
from tests.support.runs import make_run


@pytest.fixture
def series(tmp_path: Path) -> Path:
    """Return a directory of ten epochs."""
    return make_run(tmp_path / "run", *range(1, 11))


@pytest.fixture
def short(tmp_path: Path) -> Path:
    """Return a directory of four epochs."""
    return make_run(tmp_path / "run", *range(7, 11))


@pytest.fixture
def trainer(files: Path, tmp_path: Path) -> Path:
    """Return a trainer's run of checkpoint-2 to checkpoint-10, of which checkpoint-4 is the best."""
    run = tmp_path / "trainer"
    for step in (2, 4, 6, 8, 10):
        place = run / f"checkpoint-{step}"
        ignored = shutil.ignore_patterns("*config.json", "scheduler.pt", "training_args.bin")
        shutil.copytree(files / "safetensors" / "trainer" / "checkpoint-4", place, ignore=ignored)
        state = json.loads((place / "trainer_state.json").read_text())
        state |= {"global_step": step, "best_model_checkpoint": "trainer/checkpoint-4"}
        (place / "trainer_state.json").write_text(json.dumps(state))
    return run


@pytest.fixture
def sharded(files: Path, tmp_path: Path) -> Path:
    """Return a directory of four sharded sets, of epochs 1 to 4."""
    source = files / "safetensors" / "sharded"
    run = tmp_path / "sharded"
    run.mkdir()
    told = json.loads((source / "model.safetensors.index.json").read_text())
    for epoch in range(1, 5):
        for shard in source.glob("model-*.safetensors"):
            shutil.copy2(shard, run / shard.name.replace("model", f"epoch_{epoch}"))
        named = {key: name.replace("model", f"epoch_{epoch}") for key, name in told["weight_map"].items()}
        index = run / f"epoch_{epoch}.safetensors.index.json"
        index.write_text(json.dumps(told | {"weight_map": named}))
    return run


@pytest.fixture
def entry() -> Callable[..., Entry]:
    """Return what makes an entry of a name, without a file."""

    return make_entry


@pytest.fixture
def fault() -> Iterator[Fault]:
    """Return what makes calls fail."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield Fault(monkeypatch)
