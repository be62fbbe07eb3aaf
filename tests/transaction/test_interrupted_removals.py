"""Stages as a kill can leave them: what recovery makes of each, and says of it."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckpttool import AccessDenied
from ckpttool.formats.tensorflow.state import CheckpointState, state_text
from ckpttool.storage import fs
from ckpttool.transaction import operations, unlinking
from ckpttool.transaction.journal import Group, Location
from ckpttool.transaction.open_roots import OpenRoots
from tests.support.changes import file_bytes, recover
from tests.support.faults import dies_at
from tests.support.transactions import (
    hidden_names,
    journal_of,
    kill_before,
    plant_journal,
    put_in_trash,
    removal_of,
    remove,
    stages_of,
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a directory of two checkpoints of one file, a set of two, and one that is a directory."""
    run = tmp_path / "run"
    (run / "ckpt" / "sub").mkdir(parents=True)
    for name in ("model_1.pt", "model_2.pt", "set.index", "set.data", "ckpt/a", "ckpt/sub/b"):
        (run / name).write_text(name)
    return run


def stage_of(run: Path, *removals: Group, done: list[int] | None = None) -> Path:
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
    told = f"not restored: another file now has this name; it is in {stage / '0'}: move or remove it by hand"
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
        "prune was killed while removing it, and the remaining files have changed or were copied; "
        f"they are in {stage / '0'}: remove them, or move them back"
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


# Others at work after the kill ----------------------------------------------------------------------


@pytest.mark.parametrize("change", ["written", "added"])
def test_a_whole_one_that_was_changed_in_the_stage_is_put_back(run: Path, change: str) -> None:
    stage = stage_of(run, removal_of(run, "ckpt"), done=[0])
    set_aside(run, stage, "ckpt")
    (stage / "0" / "ckpt" / {"written": "a", "added": "notes"}[change]).write_text("mine")
    assert outcome(run, stage) == ([], ["ckpt"], {})
    assert "mine" in {path.read_text() for path in (run / "ckpt").iterdir() if path.is_file()}
    assert (run / "ckpt" / "sub" / "b").read_text() == "ckpt/sub/b"


def test_a_set_that_was_saved_again_is_neither_mixed_nor_hidden(run: Path) -> None:
    stage = stage_of(run, removal_of(run, "set.index", "set.data"))
    set_aside(run, stage, "set.index", "set.data")
    assert hidden_names(run) == {"set.index", "set.data"}
    (run / "set.index").write_text("saved again")
    assert list(outcome(run, stage)[2]) == ["set.index"]
    assert not (run / "set.data").exists()
    assert sorted(os.listdir(stage / "0")) == ["set.data", "set.index"]
    assert "set.index" not in hidden_names(run)


def test_a_pointer_is_restored_once(managed: Path) -> None:
    parts = ("ckpt-1.index", "ckpt-1.data-00000-of-00001")
    before = (managed / "checkpoint").read_text()
    kill_before("commit", lambda: remove(managed, removal_of(managed, *parts, path="ckpt-1")))
    after = (managed / "checkpoint").read_text()
    assert after != before
    (managed / "ckpt-1.index").write_text("in the way")
    assert list(recover(managed).failed) == [str(managed / "ckpt-1")]
    (managed / "checkpoint").write_text(after)  # as a later prune writes it
    recover(managed)
    assert (managed / "checkpoint").read_text() == after


@pytest.mark.parametrize("reason", ["survivor", "unlink"])
def test_what_comes_back_after_all_is_named_again(managed: Path, reason: str) -> None:
    parts = ("ckpt-1.index", "ckpt-1.data-00000-of-00001")
    before = file_bytes(managed)
    removal = removal_of(managed, *parts, path="ckpt-1", survivors=["set.index"])
    with pytest.MonkeyPatch.context() as patch:
        if reason == "unlink":
            patch.setattr(unlinking, "_unlink_file", refuse)
            assert list(remove(managed, removal).failed) == ["ckpt-1"]
        else:
            kill_before("remove", lambda: remove(managed, removal))
            del before["set.index"]
            (managed / "set.index").unlink()
            assert not recover(managed).failed
    assert file_bytes(managed) == before


def refuse(*arguments: object, **where: object) -> int:
    raise PermissionError(errno.EPERM, "Operation not permitted")


def test_of_several_that_come_back_each_is_named_again(managed: Path) -> None:
    """One stands, and is named no more."""
    units = [[f"ckpt-{number}.{end}" for end in ("index", "data-00000-of-00001")] for number in (1, 2)]
    removals = [removal_of(managed, *unit, path=f"ckpt-{number}") for number, unit in enumerate(units, 1)]
    real = unlinking._unlink_file

    def unlink(name: str, *more: Any) -> int:
        return refuse() if name.startswith("ckpt-1") else real(name, *more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unlinking, "_unlink_file", unlink)
        done = remove(managed, *removals)
    assert (done.done, list(done.failed)) == (["ckpt-2"], ["ckpt-1"])
    named = re.findall(r'all_model_checkpoint_paths: "(.*)"', (managed / "checkpoint").read_text())
    assert named == ["ckpt-1"]


def test_done_that_can_not_be_withdrawn_is_left_to_recovery(
    managed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that fails once ``done`` is written, and when it is to be unlinked."""
    before, real = file_bytes(managed), operations.Stage._write_done

    def write_done(stage: operations.Stage, numbers: Any) -> None:
        real(stage, numbers)
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(operations.Stage, "_write_done", write_done)
        patch.setattr(os, "unlink", refuse)
        with pytest.raises(AccessDenied, match="input/output error; the next command recovers it"):
            remove(managed, removal_of(managed, "ckpt"))
    assert sorted(os.listdir(stages_of(managed)[0] / "0")) == ["ckpt"]
    assert [os.path.basename(path) for path in recover(managed).finished] == ["ckpt"]
    assert file_bytes(managed) == {path: data for path, data in before.items() if path[:5] != "ckpt/"}


def test_a_stage_that_can_not_be_removed_takes_nothing_from_what_was_done(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.unlink

    def unlink(name: str, **where: Any) -> None:
        if name == "journal.json":
            refuse()
        real(name, **where)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", unlink)
        done = remove(run, removal_of(run, "model_1.pt"))
    assert (len(done.done), done.freed) == (1, len("model_1.pt"))
    (stage,) = stages_of(run)
    assert done.failed == {str(stage): "operation not permitted; the next prune removes it"}
    assert recover(run).failed == {}
    assert not stages_of(run)


def test_what_was_removed_before_the_disk_failed_is_told(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = unlinking._unlink_file

    def unlink(name: str, *arguments: Any) -> int:
        if name == "model_2.pt":
            refuse()
        return real(name, *arguments)

    def back(*arguments: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(unlinking, "_unlink_file", unlink)
        patch.setattr(operations.Stage, "revert", back)
        done = remove(run, removal_of(run, "model_1.pt"), removal_of(run, "model_2.pt"))
    assert (done.done, done.freed) == ([str(run / "model_1.pt")], len("model_1.pt"))
    assert "recovers" in done.failed[str(run / "model_2.pt")]
    assert recover(run).put_back == [str(run / "model_2.pt")]
    assert (run / "model_2.pt").read_text() == "model_2.pt"


def test_a_file_system_that_was_mounted_anew(run: Path) -> None:
    """Its number is another one then."""
    removal = removal_of(run, "ckpt")
    files = tuple(replace(file, device=file.device + 1) for file in removal.contents.files)
    stage = stage_of(run, removal._replace(contents=replace(removal.contents, files=files)), done=[0])
    set_aside(run, stage, "ckpt")
    assert outcome(run, stage) == (["ckpt"], [], {})


@pytest.mark.parametrize("trash", [False, True])
def test_a_state_file_behind_a_link_stops_it(managed: Path, trash: bool) -> None:
    (managed / "checkpoint").rename(managed.parent / "there")
    (managed / "checkpoint").symlink_to(managed.parent / "there")
    before = file_bytes(managed)
    removal = removal_of(managed, "ckpt-1.index", "ckpt-1.data-00000-of-00001", path="ckpt-1")
    with pytest.raises(AccessDenied, match="is a symlink, and lists a checkpoint to be removed"):
        put_in_trash(managed, removal) if trash else remove(managed, removal)
    assert file_bytes(managed) == before
    assert (put_in_trash if trash else remove)(managed, removal_of(managed, "model_1.pt")).failed == {}


@pytest.mark.parametrize("trash", [False, True])
def test_a_state_file_that_can_not_be_read_stops_it(
    managed: Path, trash: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may name what goes."""
    before = file_bytes(managed)
    removal = removal_of(managed, "ckpt-1.index", "ckpt-1.data-00000-of-00001", path="ckpt-1")
    with monkeypatch.context() as patch:
        patch.setattr(fs, "open_regular", refuse)
        with pytest.raises(AccessDenied, match="operation not permitted"):
            put_in_trash(managed, removal) if trash else remove(managed, removal)
    assert file_bytes(managed) == before
    assert not stages_of(managed)


def test_a_pointer_that_was_not_rewritten_yet_is_left(managed: Path) -> None:
    state = managed / "checkpoint"
    state.write_text(state.read_text() + "# by hand\n")
    parts = ("ckpt-1.index", "ckpt-1.data-00000-of-00001")
    kill_before("write", lambda: remove(managed, removal_of(managed, *parts, path="ckpt-1")))
    recover(managed)
    assert state.read_text().endswith("# by hand\n")


def test_one_that_can_not_be_looked_at_stops_no_other(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    units = [["ckpt"], ["set.index", "set.data"]]
    stage = stage_of(run, *(removal_of(run, *unit) for unit in units), done=[0, 1])
    set_aside(run, stage, *(name for unit in units for name in unit))
    real = OpenRoots.require_unchanged

    def require_unchanged(roots: OpenRoots, number: int, locations: Mapping[str, Location]) -> None:
        if number == 0:
            refuse()
        real(roots, number, locations)

    monkeypatch.setattr(OpenRoots, "require_unchanged", require_unchanged)
    told = f"operation not permitted; it is in {stage / '0'}"
    assert outcome(run, stage) == (["set.index"], [], {"ckpt": told})


def test_a_commit_that_can_not_be_taken_back_is_told(managed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the other groups came to is told all the same."""
    real = unlinking._unlink_file

    def unlink(name: str, *more: Any) -> int:
        return refuse() if name.startswith("ckpt-1") else real(name, *more)

    with monkeypatch.context() as patch:
        patch.setattr(unlinking, "_unlink_file", unlink)
        patch.setattr(operations.Stage, "withdraw", refuse)
        parts = ("ckpt-1.index", "ckpt-1.data-00000-of-00001")
        done = remove(managed, removal_of(managed, *parts, path="ckpt-1"), removal_of(managed, "model_1.pt"))
    assert [os.path.basename(path) for path in done.done] == ["model_1.pt"]
    assert done.failed["ckpt-1"] == "operation not permitted; the next command recovers it"
    assert [os.path.basename(path) for path in recover(managed).finished] == ["ckpt-1"]


# Journals of version 0.1 ----------------------------------------------------------------------------


def old_stage(run: Path, *names: str) -> Path:
    """Return the stage of a removal that version 0.1 was killed in, with the members that it had moved."""
    removal = removal_of(run, "set.index", "set.data")
    files = [(one.path, one.device, one.inode, one.size, one.mtime_ns) for one in removal.contents.files]
    told = {"path": removal.path, "members": removal.members, "files": files}
    told |= {"directories": [], "survivors": []}
    journal = {"schema": "ckpttool.journal/1", "rewrites": [], "removals": [told]}
    stage = plant_journal(run, json.dumps(journal).encode())
    (stage / "0").mkdir()
    set_aside(run, stage, *names)
    return stage


def test_what_version_0_1_moved_in_part_is_put_back(run: Path) -> None:
    stage = old_stage(run, "set.index")
    assert outcome(run, stage) == ([], ["set.index"], {})


def test_what_version_0_1_moved_is_finished(run: Path) -> None:
    stage = old_stage(run, "set.index", "set.data")
    assert outcome(run, stage) == (["set.index"], [], {})


def test_a_part_that_can_not_be_looked_at_is_not_taken_for_gone(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, real = old_stage(run, "set.index"), os.stat
    before = file_bytes(run)

    def stat(path: str, *more: Any, **where: Any) -> os.stat_result:
        if path == "set.data":
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return real(path, *more, **where)

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", stat)
        with pytest.raises(AccessDenied, match="permission denied"):
            recover(run)
    assert file_bytes(run) == before
    assert outcome(run, stage) == ([], ["set.index"], {})
