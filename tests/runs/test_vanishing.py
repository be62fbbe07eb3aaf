"""What a trainer takes away while a directory is looked at is nothing to complain of."""

from __future__ import annotations

import os
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from itertools import count, cycle
from pathlib import Path
from typing import Any

import pytest

from ckpttool import AccessDenied, latest, list_checkpoints
from tests.support.clock import Clock
from tests.support.faults import hit_call
from tests.support.moments import before_call, before_verifying

START = 1_700_000_000
LOOKS = ("stat", "lstat", "scandir", "listdir")
"""Calls of ``os`` by which a directory is looked at."""


@pytest.fixture
def legacy(files: Path, short: Path) -> Path:
    """Return a directory with a checkpoint that is a directory, in which others may lie."""
    shutil.copytree(files / "fluid" / "root" / "checkpoint_3", short / "checkpoint_3")
    return short / "checkpoint_3"


@pytest.mark.parametrize(
    ("place", "found"), [("short", 4), ("legacy", 5)], ids=["in a directory", "in a checkpoint"]
)
@pytest.mark.parametrize("call", ["stat", "scandir"])
def test_a_directory_that_goes_before_it_is_looked_at(
    request: pytest.FixtureRequest,
    short: Path,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    found: int,
    call: str,
) -> None:
    temporary = request.getfixturevalue(place) / "ckpt-9_temp"
    temporary.mkdir()

    def remove() -> None:
        with suppress(FileNotFoundError):
            os.rmdir(temporary)

    before_call(monkeypatch, temporary, remove, [call])
    listing = list_checkpoints(short)
    assert not temporary.exists()
    assert (listing.problems, len(listing.checkpoints)) == ((), found)


def test_a_checkpoint_that_goes_while_it_is_looked_into(
    legacy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = []
    for number in count(1):
        run = Path(shutil.copytree(legacy.parent, tmp_path / str(number)))
        looks = count(1)

        def look(run: Path = run, looks: Iterator[int] = looks, number: int = number) -> None:
            if next(looks) == number:
                (run / legacy.name).rename(run.with_suffix(".gone"))

        with monkeypatch.context() as patch:
            before_call(patch, run / legacy.name, look, LOOKS)
            found = list_checkpoints(run)
        if next(looks) <= number:
            break
        assert found.problems == ()
        counts.append(len(found.checkpoints))
    assert {4} <= set(counts) <= {4, 5}  # 5 if it had been looked at by then


# An answer while checkpoints are renamed --------------------------------------------------------------


@pytest.fixture
def renamed_partly(short: Path) -> Path:
    """Return four epochs, of which the first two have the names already that the others get."""
    for path in sorted(short.iterdir()):
        epoch = int(path.stem.rpartition("_")[2])
        os.utime(path, (START + 60 * epoch,) * 2)
        if epoch <= 8:
            path.rename(short / f"run-e{epoch:04d}.pth")
    return short


@pytest.mark.parametrize("options", [{}, {"depth": "quick"}, {"best": "loss"}], ids=str)
def test_the_answer_is_the_newest_under_its_old_name_or_its_new_one(
    renamed_partly: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    Clock(monkeypatch, time.time())
    wanted = latest(renamed_partly, **options).path
    assert wanted is not None
    with monkeypatch.context() as patch:
        made = hit_call(-1, lambda: None, LOOKS, patch.setattr)
        latest(renamed_partly, **options)
        calls = made()
    answers = Counter[str]()
    numbers = range(len(options) + 1, calls + 1, 6)
    for number in numbers:
        run = shutil.copytree(renamed_partly, tmp_path / str(number) / "run", copy_function=os.link)
        with monkeypatch.context() as patch:
            hit_call(number, partial(rename_all, run, patch), LOOKS, patch.setattr)
            found = latest(run, **options)
        assert found.path is not None
        answers[Path(found.path).name] += 1
    epoch = int(Path(wanted).stem.rpartition("_")[2])
    assert set(answers) <= {f"model_epoch_{epoch}.pth", f"run-e{epoch:04d}.pth"}
    assert answers[f"run-e{epoch:04d}.pth"] > len(numbers) / 2


def rename_all(run: Path, patch: pytest.MonkeyPatch) -> None:
    """Rename as ``rename`` does, and don't have it disturbed."""
    patch.undo()
    for path in run.glob("model_epoch_*.pth"):
        path.rename(run / f"run-e{int(path.stem.rpartition('_')[2]):04d}.pth")


def test_a_directory_that_never_rests_has_no_answer(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, time.time())
    names = cycle(["model_epoch_10.pth", "model_epoch_11.pth"])
    at = next(names)

    def rename(unit: Any) -> None:
        nonlocal at
        if os.path.basename(unit.path) == at:
            before, at = at, next(names)
            (short / before).rename(short / at)

    before_verifying(monkeypatch, rename)
    with pytest.raises(AccessDenied, match="checkpoints are renamed or removed during every scan"):
        latest(short)
    assert clock.now > 1


def test_an_older_one_that_a_training_removes_is_no_reason_to_look_again(
    short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch, time.time())
    before_verifying(monkeypatch, lambda unit: (short / "model_epoch_7.pth").unlink(missing_ok=True))
    assert latest(short).path == str(short / "model_epoch_10.pth")
    assert (clock.now, (short / "model_epoch_7.pth").exists()) == (0, False)
