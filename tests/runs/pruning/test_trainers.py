"""After us the owner still works: real trainers continue where prune has been, and clean up as ever."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.frameworks import python_with_frameworks

RUNS = Path(__file__).with_name("trainer_runs.py")


def run(kind: str, directory: Path) -> dict[str, Any]:
    """Run a trainer in a process of its own; return what it tells."""
    told: dict[str, Any] = json.loads(python_with_frameworks(RUNS, kind, directory).splitlines()[-1])
    return told


@pytest.mark.framework
def test_the_hugging_face_trainer_goes_on(tmp_path: Path) -> None:
    told = run("huggingface", tmp_path)
    assert told == {
        "left": ["checkpoint-10", "checkpoint-12"],
        "after": ["checkpoint-14", "checkpoint-16", "checkpoint-18"],  # save_total_limit is 3
        "step": 18,
        "resumes": "exactly",
        "equal": True,
    }


@pytest.mark.framework
def test_lightning_goes_on(tmp_path: Path) -> None:
    told = run("lightning", tmp_path)
    epochs = [name.split("-")[0] for name in told["left"]]
    assert epochs == ["epoch=4", "epoch=5", "last.ckpt"]
    assert told["equal"]
    assert told["best"] in told["after"]
    assert told["link"] in told["after"]
    assert told["named"] == ["last.ckpt", "net-e04.ckpt", "net-e05.ckpt"]
    assert set(told["named"]) <= set(
        told["after"]
    )  # it knows nothing of them any more, and leaves them alone
    assert len(told["after"]) == 6  # save_top_k is 4: what it has replaced goes, as far as it is there


@pytest.mark.framework
def test_accelerate_goes_on(tmp_path: Path) -> None:
    told = run("accelerate", tmp_path)
    assert told == {
        "left": ["checkpoint_2", "checkpoint_5", "checkpoint_6"],
        "loaded": [6, 7, 8, 9, 10],
        "after": ["checkpoint_10", "checkpoint_11", "checkpoint_9"],  # total_limit is 3
    }
