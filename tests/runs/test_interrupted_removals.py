"""Stages as a kill can leave them: what recovery makes of each, and says of it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from ckpttool.formats.tensorflow.state import CheckpointState, state_text
from tests.support.changes import file_bytes, recover
from tests.support.faults import dies_at
from tests.support.transactions import Removal, journal_of, plant_journal, removal_of, remove, stages_of


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a directory of two checkpoints of one file, a set of two, and one that is a directory."""
    run = tmp_path / "run"
    (run / "ckpt" / "sub").mkdir(parents=True)
    for name in ("model_1.pt", "model_2.pt", "set.index", "set.data", "ckpt/a", "ckpt/sub/b"):
        (run / name).write_text(name)
    return run


def stage_of(run: Path, *removals: Removal, done: list[int] | None = None) -> Path:
    """Return the stage of removals that were interrupted before anything was set aside, or after ``done``."""
    stage = plant_journal(run, journal_of(run, *removals), done)
    (stage / "0").mkdir()
    return stage


def set_aside(run: Path, stage: Path, *names: str) -> None:
    for name in names:
        (run / name).rename(stage / "0" / name)


def outcome(run: Path, stage: Path) -> tuple[list[str], list[str], dict[str, str]]:
    """Recover; return the names that are finished and put back, and what failed."""
    done = recover(run)
    assert stage.exists() is bool(done.failed)
    finished, put_back = (
        [os.path.relpath(path, run) for path in one] for one in (done.finished, done.put_back)
    )
    return finished, put_back, {os.path.relpath(path, run): why for path, why in done.failed.items()}


# Before the point of no return ----------------------------------------------------------------------


def test_all_that_was_set_aside_is_put_back(run: Path) -> None:
    before = file_bytes(run)
    stage = stage_of(
        run, removal_of(run, "model_1.pt"), removal_of(run, "set.index", "set.data"), removal_of(run, "ckpt")
    )
    set_aside(run, stage, "model_1.pt", "set.index", "ckpt")
    assert outcome(run, stage) == ([], ["model_1.pt", "set.index", "ckpt"], {})
    assert file_bytes(run) == before


def test_one_that_was_half_put_back(run: Path) -> None:
    """It has its name again, and another in the stage: a kill came before that was unlinked."""
    stage = stage_of(run, removal_of(run, "model_1.pt"))
    os.link(run / "model_1.pt", stage / "0" / "model_1.pt")
    assert outcome(run, stage) == ([], ["model_1.pt"], {})
    assert (run / "model_1.pt").stat().st_nlink == 1


def test_one_whose_place_is_taken_stays_in_the_stage(run: Path) -> None:
    stage = stage_of(run, removal_of(run, "model_1.pt"), removal_of(run, "set.index", "set.data"))
    set_aside(run, stage, "model_1.pt", "set.index", "set.data")
    (run / "model_1.pt").write_text("another")
    told = f"not put back: its place is taken by another file; it is in {stage / '0'}"
    assert outcome(run, stage) == ([], ["set.index"], {"model_1.pt": told})
    assert file_bytes(stage)["0/model_1.pt"] == b"model_1.pt"


def test_what_was_changed_in_the_stage_is_put_back_as_it_is(run: Path) -> None:
    """Another file may have come between the look and the call: nothing else has its bytes."""
    stage = stage_of(run, removal_of(run, "model_1.pt"))
    set_aside(run, stage, "model_1.pt")
    (stage / "0" / "model_1.pt").write_text("another")
    assert outcome(run, stage) == ([], ["model_1.pt"], {})
    assert (run / "model_1.pt").read_text() == "another"


# After it -------------------------------------------------------------------------------------------


def test_only_the_groups_that_stand_are_finished(run: Path) -> None:
    stage = stage_of(run, *(removal_of(run, f"model_{number}.pt") for number in (1, 2)), done=[1])
    set_aside(run, stage, "model_1.pt", "model_2.pt")
    assert outcome(run, stage) == (["model_2.pt"], ["model_1.pt"], {})
    assert (run / "model_1.pt").exists() and not (run / "model_2.pt").exists()


def test_one_that_is_not_in_the_stage_is_not_told_of(run: Path) -> None:
    """It has gone already; where it was, there may be another by now."""
    stage = stage_of(run, removal_of(run, "model_1.pt"), done=[0])
    assert outcome(run, stage) == ([], [], {})
    assert (run / "model_1.pt").exists()


@pytest.mark.parametrize(("survivor", "is_finished"), [("model_2.pt", True), ("model_3.pt", False)])
def test_one_that_is_whole_is_kept_if_its_survivor_has_gone(
    run: Path, survivor: str, is_finished: bool
) -> None:
    stage = stage_of(run, removal_of(run, "ckpt", survivors=[survivor]), done=[0])
    set_aside(run, stage, "ckpt")
    assert outcome(run, stage) == ((["ckpt"], [], {}) if is_finished else ([], ["ckpt"], {}))
    assert (run / "ckpt").exists() is not is_finished


def test_of_a_directory_a_part_may_have_gone(run: Path) -> None:
    stage = stage_of(run, removal_of(run, "ckpt", survivors=["gone"]), done=[0])
    set_aside(run, stage, "ckpt")
    shutil.rmtree(stage / "0" / "ckpt" / "sub")
    assert outcome(run, stage) == (["ckpt"], [], {})
    assert not (run / "ckpt").exists()


def test_an_empty_directory_goes_with_its_checkpoint(run: Path) -> None:
    (run / "extra").mkdir()
    stage = stage_of(run, removal_of(run, "set.index", "set.data", "extra"), done=[0])
    set_aside(run, stage, "set.index", "set.data", "extra")
    assert outcome(run, stage) == (["set.index"], [], {})


def test_what_was_changed_in_the_stage_is_told_and_left(run: Path) -> None:
    stage = stage_of(run, removal_of(run, "set.index", "set.data"), done=[0])
    set_aside(run, stage, "set.index", "set.data")
    (stage / "0" / "set.index").unlink()
    (stage / "0" / "set.data").write_text("another")
    told = (
        "a prune was killed while it removed it, and what is left was changed or copied since: "
        f"it is in {stage / '0'}; remove it, or move it where it belongs"
    )
    assert outcome(run, stage) == ([], [], {"set.index": told})
    assert file_bytes(stage)["0/set.data"] == b"another"


# At every call --------------------------------------------------------------------------------------


@pytest.fixture
def managed(run: Path) -> Path:
    """Return the directory with TensorFlow's state file, which names what goes."""
    names = ("ckpt-1", "ckpt-2")
    for name in names:
        for end in ("index", "data-00000-of-00001"):
            (run / f"{name}.{end}").write_text(name + end)
    (run / "checkpoint").write_text(state_text(CheckpointState(names[1], names)))
    return run


def test_killed_at_every_call_and_again_while_it_is_recovered(managed: Path, tmp_path: Path) -> None:
    """All lies where it lay, or all is gone and the state file doesn't name it any more."""

    parts = [f"ckpt-1.{end}" for end in ("index", "data-00000-of-00001")]

    def work(run: Path) -> None:
        set_of_files = removal_of(run, *parts, path="ckpt-1")
        remove(run, set_of_files, removal_of(run, "model_1.pt"), removal_of(run, "ckpt"))

    before = file_bytes(managed)
    gone = {"model_1.pt", "ckpt", *parts}
    after = {name: data for name, data in before.items() if name.split("/")[0] not in gone}
    after["checkpoint"] = state_text(CheckpointState("ckpt-2", ("ckpt-2",))).encode()
    seen, number = set(), 0
    while True:
        number += 1
        run = Path(shutil.copytree(managed, tmp_path / f"{number}"))
        if not dies_at(number, lambda run=run: work(run)):
            assert file_bytes(run) == after
            break
        again = 0
        while True:  # a hard link of a file is the file: its inode is that in the journal
            again += 1
            copy = Path(shutil.copytree(run, tmp_path / f"{number} {again}", copy_function=os.link))
            is_killed = dies_at(again, lambda copy=copy: recover(copy))
            assert recover(copy).failed == {}
            assert not stages_of(copy)
            now = file_bytes(copy)
            assert now in (before, after), (number, again)
            seen.add(now == after)
            shutil.rmtree(copy)
            if not is_killed:
                break
        shutil.rmtree(run)
    assert number > 25
    assert seen == {True, False}
