"""What a trainer takes away while a directory is looked at is nothing to complain of."""

from __future__ import annotations

import os
import shutil
import time
from collections import Counter
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from ckpttool import AccessDenied, latest
from ckpttool.runs.members import full_read
from ckpttool.runs.members.entry import Entry
from ckpttool.runs.members.full_read import FullRead, read_all
from ckpttool.runs.resuming import latest as resuming
from tests.support.directories import before_it_is_looked_at, before_it_is_looked_into, survey
from tests.support.faults import hit_call
from tests.support.moments import before_verifying

START = 1_700_000_000
LOOKS = ("stat", "lstat", "scandir", "listdir")
"""Calls of ``os`` by which a directory is looked at."""


class Rest:
    """A clock on which nobody waits."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def time(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return self.seconds

    def sleep(self, seconds: float, /) -> None:
        self.seconds += seconds


@pytest.fixture
def legacy(files: Path, short: Path) -> Path:
    """Return a directory with a checkpoint that is a directory, in which others may lie."""
    shutil.copytree(files / "fluid" / "root" / "checkpoint_3", short / "checkpoint_3")
    return short / "checkpoint_3"


@pytest.mark.parametrize(
    ("place", "count"), [("short", 4), ("legacy", 5)], ids=["in a directory", "in a checkpoint"]
)
def test_a_directory_that_goes_before_it_is_opened(
    request: pytest.FixtureRequest, short: Path, monkeypatch: pytest.MonkeyPatch, place: str, count: int
) -> None:
    temporary = request.getfixturevalue(place) / "ckpt-9_temp"
    temporary.mkdir()
    before_it_is_looked_at(monkeypatch, temporary, temporary.rmdir)
    found = survey(short)
    assert not temporary.exists()
    assert (found.errors, len(found.entries)) == ((), count)


def test_a_checkpoint_that_goes_before_it_is_looked_into(
    legacy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before_it_is_looked_into(monkeypatch, legacy, lambda: shutil.rmtree(legacy))
    found = survey(legacy.parent)
    assert not legacy.exists()
    assert (found.errors, len(found.entries)) == ((), 4)


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
    monkeypatch.setattr(resuming, "SYSTEM", Rest())
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
    rest = Rest()
    monkeypatch.setattr(resuming, "SYSTEM", rest)
    names = cycle(["model_epoch_10.pth", "model_epoch_11.pth"])
    at = next(names)

    def rename(entry: Entry) -> FullRead:
        nonlocal at
        if entry.name == at:
            before, at = at, next(names)
            (short / before).rename(short / at)
        return read_all(entry)

    monkeypatch.setattr(full_read, "read_all", lambda entry, *more: rename(entry))
    with pytest.raises(AccessDenied, match="checkpoints are renamed or removed as often as it is looked at"):
        latest(short)
    assert rest.seconds > 1


def test_an_older_one_that_a_training_removes_is_no_reason_to_look_again(
    short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rest = Rest()
    monkeypatch.setattr(resuming, "SYSTEM", rest)
    before_verifying(monkeypatch, lambda unit: (short / "model_epoch_7.pth").unlink(missing_ok=True))
    assert latest(short).path == str(short / "model_epoch_10.pth")
    assert (rest.seconds, (short / "model_epoch_7.pth").exists()) == (0, False)
