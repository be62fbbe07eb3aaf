"""Where Accelerate names checkpoints itself: it can start after every single change of ours."""

from __future__ import annotations

import os
import pickle
import re
import shutil
from pathlib import Path

import pytest

from ckpttool import RenameRequest, pin, prune, rename, undo, unpin
from tests.support.changes import (
    empty_trash,
    journals_of,
    observed,
    overlook_accelerate,
    prune_to_trash,
    state_place,
)
from tests.support.mounts import list_mounts
from tests.support.transactions import kill_before

CHANGES = ("rename", "replace", "unlink", "rmdir", "mkdir", "link", "fsync", "write")
SAVED = [f"checkpoint_{number}" for number in range(3, 8)]


def accelerates_choice(checkpoints: Path) -> str:
    """Return what ``load_state()`` would load, by its own rule: a name without a number raises IndexError."""
    return max(os.listdir(checkpoints), key=lambda name: int(re.findall("[0-9]+", name)[0]))


@pytest.fixture
def checkpoints(files: Path, tmp_path: Path) -> Path:
    """Return what Accelerate saved in a project."""
    place = tmp_path / "project" / "checkpoints"
    for number, name in enumerate(SAVED):
        (place / name).mkdir(parents=True)
        weights = shutil.copy(
            files / "safetensors" / "metadata.safetensors", place / name / "model.safetensors"
        )
        os.utime(weights, (1_700_000_000 + 600 * number,) * 2)
        shutil.copy(files / "pytorch" / "bare_state_dict.pth", place / name / "optimizer.bin")
        (place / name / "random_states_0.pkl").write_bytes(pickle.dumps({"step": number}))
    return place


def names(directory: Path) -> list[str]:
    return sorted(os.listdir(directory))


def test_nothing_of_ours_lies_in_it_for_a_moment(
    run, checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    for name in CHANGES:
        real = getattr(os, name)
        monkeypatch.setattr(os, name, observed(real, lambda: seen.append(accelerates_choice(checkpoints))))
    pin([checkpoints / "checkpoint_4"])
    done = prune_to_trash(checkpoints)
    assert (done.problems, names(checkpoints)) == ((), ["checkpoint_4", "checkpoint_6", "checkpoint_7"])
    assert names(checkpoints.parent) == [".ckpttool-pins.toml", ".ckpttool-trash@checkpoints", "checkpoints"]
    assert len(undo(str(checkpoints)).restored) == 2
    assert run("pin", "--list", checkpoints.parent).out == f"{checkpoints / 'checkpoint_4'}\n"
    renamed = rename(RenameRequest(directory=str(checkpoints), template="n{number:03d}_{run}"))
    assert (renamed.renames, names(checkpoints)) == ((), SAVED)
    prune_to_trash(checkpoints)
    assert len(empty_trash(checkpoints).removed) == 2
    prune(checkpoints, keep_last=1)
    unpin([checkpoints / "checkpoint_4"])
    assert (names(checkpoints), names(checkpoints.parent)) == (
        ["checkpoint_4", "checkpoint_7"],
        ["checkpoints"],
    )
    monkeypatch.undo()
    assert set(seen) == {"checkpoint_7"}


def test_a_kill_at_any_point_leaves_what_accelerate_can_read(checkpoints: Path, fault) -> None:
    """Whatever call is the last (every fourth is tried), the next prune settles it."""
    whole = checkpoints.parent.rename(checkpoints.parent.with_name("whole"))
    for number in range(1, 1000, 4):
        shutil.copytree(whole, checkpoints.parent)
        fault.at(number, SystemExit())
        try:
            prune_to_trash(checkpoints)
        except SystemExit:
            pass
        else:
            fault.none()
            assert number > 20
            return
        fault.none()
        assert accelerates_choice(checkpoints) == SAVED[-1]
        prune_to_trash(checkpoints)
        assert journals_of(checkpoints) == []
        assert names(checkpoints) == SAVED[-2:]
        shutil.rmtree(checkpoints.parent)
    pytest.fail("no end")


@pytest.mark.parametrize("kind", ["trash", "rename"])
def test_what_lies_in_it_from_before_is_found(
    checkpoints: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as before:
        overlook_accelerate(before)
        pin([checkpoints / "checkpoint_4"])
        if kind == "trash":
            prune_to_trash(checkpoints)
        else:
            rename(RenameRequest(directory=str(checkpoints), template="n{number:03d}_{run}"))
    assert names(checkpoints)[:2] == [".ckpttool-pins.toml", ".ckpttool-trash"]
    done = undo(str(checkpoints))
    assert (done.problems, len(done.restored)) == ((), 2 if kind == "trash" else 5)
    prune_to_trash(checkpoints)
    assert not {"checkpoint_3", "checkpoint_5"} & set(names(checkpoints))
    undo(str(checkpoints))
    unpin([checkpoints / "checkpoint_4"])
    assert (names(checkpoints), names(checkpoints.parent)) == (SAVED, ["checkpoints"])
    assert undo(str(checkpoints)).identity is None


def test_a_trash_in_it_from_before_can_be_emptied(checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as before:
        overlook_accelerate(before)
        prune_to_trash(checkpoints)
    assert len(empty_trash(checkpoints).removed) == 3
    assert names(checkpoints) == SAVED[-2:]


def test_a_link_and_what_it_leads_to_have_one_home(checkpoints: Path) -> None:
    scratch = checkpoints.rename(checkpoints.parent / "scratch")
    checkpoints.symlink_to(scratch)
    assert state_place(checkpoints) == state_place(scratch) == (str(scratch.parent), "@scratch")


def test_nothing_lies_beside_a_mount_point(checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    list_mounts(monkeypatch, checkpoints.parent / "mountinfo")(checkpoints)
    assert state_place(checkpoints) == (str(checkpoints), "")
    assert (prune_to_trash(checkpoints).problems, len(undo(str(checkpoints)).restored)) == ((), 3)


def test_other_directories_keep_their_own(checkpoints: Path) -> None:
    assert state_place(checkpoints) == (str(checkpoints.parent), "@checkpoints")
    for name in SAVED[1:]:
        shutil.rmtree(checkpoints / name)
    (checkpoints / SAVED[0]).rename(checkpoints / "n003")
    assert state_place(checkpoints)[1]
    other = checkpoints.rename(checkpoints.parent / "states")
    assert state_place(other) == (str(other), "")
    plain = checkpoints.parent / "plain" / "checkpoints"
    (plain / "checkpoint_1").mkdir(parents=True)
    assert state_place(plain) == (str(plain), "")


def test_what_was_interrupted_below_is_recovered_by_a_relative_path(
    checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its journal lies beside, and leads to an absolute path."""
    monkeypatch.chdir(checkpoints.parents[1])
    before = names(checkpoints)
    kill_before("commit", lambda: prune("project", keep_last=3, depth="quick"))
    done = prune("project", keep_last=4, depth="quick")
    assert len(done.put_back) == 2
    assert names(checkpoints) == before[1:]
