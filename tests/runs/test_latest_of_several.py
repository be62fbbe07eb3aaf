"""``latest`` of several places: the newest of all, and the nearest of copies."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.commands import Run
from tests.support.memory import MemoryBucket
from tests.support.runs import flip_value, make_run


@pytest.fixture
def place(tmp_path: Path):
    return lambda name, *epochs: make_run(tmp_path / name, *epochs)


def test_newest_of_all(run: Run, place, bucket: MemoryBucket) -> None:
    a, b = place("a", 1, 3), place("b", 2)
    assert run("latest", a, b).out == f"{a}/model_epoch_3.pth\n"
    assert run("latest", b, a).out == f"{a}/model_epoch_3.pth\n"
    shutil.copy(a / "model_epoch_3.pth", b)
    assert run("latest", b, a).out == f"{b}/model_epoch_3.pth\n"
    bucket.upload(place("c", 3, 4), "run")
    assert run("latest", a, bucket.url("run")).out == f"{bucket.url('run')}/model_epoch_4.pth\n"
    assert run("latest", a, bucket.url("run"), "--before", "4").status in (0, 1)


def test_damaged_newest_gives_way_to_another_place(run: Run, place) -> None:
    a, b = place("a", 1, 4), place("b", 3)
    flip_value(a / "model_epoch_4.pth")
    answer = run("latest", a, b)
    assert answer.out == f"{b}/model_epoch_3.pth\n" and "model_epoch_4.pth: skipped" in answer.err
    assert run("latest", a, b, "--verify", "quick").out == f"{a}/model_epoch_4.pth\n"


def test_best_of_all(run: Run, place) -> None:
    a, b = place("a", 1, 2), place("b", 3)
    values = {
        path: run("inspect", "--field", "training.loss", path).out for path in (*a.iterdir(), *b.iterdir())
    }
    best = min(values, key=lambda path: float(values[path]))
    assert run("latest", a, b, "--best", "loss").out == f"{best}\n"


def test_places_that_are_not_there(run: Run, place, tmp_path: Path, bucket: MemoryBucket) -> None:
    a = place("a", 1)
    assert run("latest", tmp_path / "none", a).out == f"{a}/model_epoch_1.pth\n"
    assert run("latest", tmp_path / "none", tmp_path / "neither").status == 2
    assert run("latest", tmp_path / "none", tmp_path / "neither", "--missing-ok").status == 0
    answer = run("latest", a, "mem://no-such-bucket/run")
    assert answer.status == 2 and answer.out == ""
    (a / "model_epoch_1.pth").unlink()
    assert run("latest", a, place("b")).status == 1
