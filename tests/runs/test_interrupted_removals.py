"""Stages as a kill can leave them: what recovery makes of each, and says of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.changes import file_bytes, recover
from tests.support.transactions import Removal, journal_of, plant_journal, removal_of


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a directory of two checkpoints of one file, a set of two, and one that is a directory."""
    run = tmp_path / "run"
    (run / "ckpt" / "sub").mkdir(parents=True)
    for name in ("model_1.pt", "model_2.pt", "set.index", "set.data", "ckpt/a", "ckpt/sub/b"):
        (run / name).write_text(name)
    return run


def stage_of(run: Path, *removals: Removal, places: int = 1) -> Path:
    """Return the stage of removals that were interrupted before anything was set aside."""
    stage = plant_journal(run, journal_of(run, *removals))
    for number in range(places):
        (stage / str(number)).mkdir()
    return stage


def set_aside(run: Path, stage: Path, *names: str, number: int = 0) -> None:
    for name in names:
        (run / name).rename(stage / str(number) / name)


def outcome(run: Path, stage: Path) -> tuple[list[str], list[str], dict[str, str]]:
    """Recover; return the names that are finished and put back, and what failed."""
    done = recover(run)
    assert stage.exists() is bool(done.failed)
    finished, put_back = (
        [os.path.relpath(path, run) for path in one] for one in (done.finished, done.put_back)
    )
    return finished, put_back, {os.path.relpath(path, run): why for path, why in done.failed.items()}


# Single files, which share a directory --------------------------------------------------------------


def test_one_that_is_not_in_the_stage_is_not_told_of(run: Path) -> None:
    """It wasn't put there yet, or has gone already; where it was, there may be another by now."""
    stage = stage_of(run, *(removal_of(run, f"model_{number}.pt") for number in (1, 2)))
    set_aside(run, stage, "model_2.pt")
    assert outcome(run, stage) == (["model_2.pt"], [], {})
    assert (run / "model_1.pt").exists()


def test_each_may_have_a_directory_of_its_own(run: Path) -> None:
    """As ckpttool 0.1.0 gave them."""
    stage = stage_of(run, *(removal_of(run, f"model_{number}.pt") for number in (1, 2)), places=2)
    set_aside(run, stage, "model_1.pt")
    set_aside(run, stage, "model_2.pt", number=1)
    assert outcome(run, stage) == (["model_1.pt", "model_2.pt"], [], {})


@pytest.mark.parametrize(("survivor", "is_finished"), [("model_2.pt", True), ("model_3.pt", False)])
def test_one_that_was_half_put_back(run: Path, survivor: str, is_finished: bool) -> None:
    """It has its name again, and another in the stage: a kill came before that was unlinked."""
    stage = stage_of(run, removal_of(run, "model_1.pt", survivors=[survivor]))
    os.link(run / "model_1.pt", stage / "0" / "model_1.pt")
    assert outcome(run, stage) == ((["model_1.pt"], [], {}) if is_finished else ([], ["model_1.pt"], {}))
    assert (run / "model_1.pt").exists() is not is_finished


def test_one_whose_place_is_taken_stays_in_the_stage(run: Path) -> None:
    stage = stage_of(run, removal_of(run, "model_1.pt", survivors=["model_3.pt"]))
    set_aside(run, stage, "model_1.pt")
    (run / "model_1.pt").write_text("another")
    told = f"its place is taken by another file; what is left of it is in {stage}"
    assert outcome(run, stage) == ([], [], {"model_1.pt": told})
    assert file_bytes(stage)["0/model_1.pt"] == b"model_1.pt"


# Several files --------------------------------------------------------------------------------------


def test_of_a_directory_a_part_may_have_gone(run: Path) -> None:
    stage = stage_of(run, removal_of(run, "ckpt"))
    set_aside(run, stage, "ckpt")
    (stage / "0" / "ckpt" / "sub" / "b").unlink()
    (stage / "0" / "ckpt" / "sub").rmdir()
    assert outcome(run, stage) == (["ckpt"], [], {})
    assert not (run / "ckpt").exists()


def test_an_empty_directory_goes_with_its_checkpoint(run: Path) -> None:
    (run / "extra").mkdir()
    stage = stage_of(run, removal_of(run, "set.index", "set.data", "extra"))
    set_aside(run, stage, "set.index", "set.data", "extra")
    assert outcome(run, stage) == (["set.index"], [], {})


def test_what_was_changed_in_the_stage_is_told_and_left(run: Path) -> None:
    stage = stage_of(run, removal_of(run, "set.index", "set.data"))
    set_aside(run, stage, "set.index", "set.data")
    (stage / "0" / "set.index").unlink()
    (stage / "0" / "set.data").write_text("another")
    told = f"it has changed while it was being removed; what is left of it is in {stage}"
    assert outcome(run, stage) == ([], [], {"set.index": told})
    assert file_bytes(stage)["0/set.data"] == b"another"


def with_a_ghost(run: Path) -> Removal:
    """Return the removal of a checkpoint of which a file is nowhere."""
    removal = removal_of(run, "set.data", "set.index")
    (run / "set.index").unlink()
    return removal


def test_a_file_that_is_nowhere_does_not_take_the_rest_with_it(run: Path) -> None:
    stage = stage_of(run, with_a_ghost(run))
    assert outcome(run, stage) == ([], ["set.data"], {})
    assert (run / "set.data").read_text() == "set.data"


def test_one_that_lost_a_part_in_the_stage_is_finished(run: Path) -> None:
    stage = stage_of(run, with_a_ghost(run))
    set_aside(run, stage, "set.data")
    assert outcome(run, stage) == (["set.data"], [], {})
    assert not (run / "set.data").exists()


def test_one_of_which_nothing_is_left_is_finished(run: Path) -> None:
    stage = stage_of(run, with_a_ghost(run))
    (run / "set.data").unlink()
    assert outcome(run, stage) == (["set.data"], [], {})
