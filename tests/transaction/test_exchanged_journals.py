"""Journals, stages and trashes, exchanged for something else by the owner of the directory around them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ckpttool import AccessDenied, CheckpointError, pin, undo
from ckpttool.transaction.files import contents
from ckpttool.transaction.journal import Group, Location, Move, OperationList, Rewrite
from ckpttool.transaction.removal import move_to_trash, remove
from ckpttool.transaction.transaction import apply
from tests.exchanging import WAYS, Way, exchanges
from tests.support.changes import held_by_another
from tests.support.commands import run_here
from tests.support.faults import path_at

IDENTITY = "20260102T030405.000006Z-0123abcd"


def lay_out(place: Path) -> None:
    """Write two checkpoints, of a file and of a directory, one that stays, and a pointer."""
    (place / "model_epoch_1.pth").write_bytes(b"one")
    (place / "step_2").mkdir()
    (place / "step_2" / "weights").write_bytes(b"two")
    (place / "step_3").mkdir()
    (place / "step_3" / "weights").write_bytes(b"three")
    (place / "latest").write_text("step_2\n")


def removals(place: Path) -> tuple[Group, ...]:
    names = ("model_epoch_1.pth", "step_2")
    return tuple(Group(str(place / one), (one,), contents(str(place), [one])) for one in names)


def removed(place: Path) -> None:
    with held_by_another(place):
        remove(str(place), removals(place))


def trashed(place: Path) -> None:
    with held_by_another(place):
        move_to_trash(str(place), removals(place), IDENTITY)


def lay_out_trashed(place: Path) -> None:
    """Write the same, of which two lie in the trash."""
    lay_out(place)
    trashed(place)


def undone(place: Path) -> None:
    undo(str(place))


def renamed(place: Path) -> None:
    group = Group(str(place / "step_2"), ("step_2",), contents(str(place), ["step_2"]))
    move = Move(0, Location("directory", "step_2"), Location("directory", "step_02"))
    pointer = Rewrite("latest", "step_2\n", "step_02\n")
    with held_by_another(place):
        apply(str(place), OperationList("rename", (group,), (move, pointer), IDENTITY))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("work", [removed, trashed, undone, renamed])
@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.thorough)])
def test_nothing_outside_is_touched_and_nothing_is_lost_that_was_to_stay(
    work: Callable[[Path], None], way: Way, step: int, tmp_path: Path
) -> None:
    """The two ways come at different calls, so that together they come at more of them."""
    # A directory of this user's own that lies where the trash lay is the trash: it may gain, not lose.
    outcomes = set()
    before, first = lay_out_trashed if work is undone else lay_out, 1 + step // 2 * WAYS.index(way)
    for place, failure in exchanges(tmp_path, way, before, work, may_gain=True, first=first, step=step):
        assert failure is None or isinstance(failure, CheckpointError), repr(failure)
        assert (place / "step_3" / "weights").read_bytes() == b"three"
        if work is not removed:  # wherever the owner of the directory has put it
            texts = {path.read_bytes() for path in place.rglob("*") if path.is_file()}
            assert {b"one", b"two"} <= texts
        outcomes.add(failure is None)
    assert outcomes == {True, False}


def test_a_manifest_does_not_follow_what_stands_in_its_place(files: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(b"untouched")
    shutil.copy(min((files / "safetensors").glob("*.safetensors")), tmp_path / "model.safetensors")
    for ending in (".sha256", ".digests.json"):
        (tmp_path / f"model.safetensors{ending}").symlink_to(outside)
    assert run_here("verify", tmp_path / "model.safetensors", "--write-manifest", "--force") == 0
    for ending in (".sha256", ".digests.json"):
        assert (tmp_path / f"model.safetensors{ending}").read_bytes() != b"untouched"
    assert outside.read_bytes() == b"untouched"


def test_a_list_of_pins_behind_a_link_of_another_user_is_not_written(
    short: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link of this user's stays one, and what it leads to is written."""
    there, link = tmp_path / "there.toml", short / ".ckpttool-pins.toml"
    there.write_text('pinned = ["a"]\n')
    link.symlink_to(there)
    pin([short / "model_epoch_9.pth"])
    assert link.is_symlink()
    assert there.read_text() == 'pinned = ["a", "model_epoch_9.pth"]\n'
    real = os.lstat
    another = link.lstat().st_uid + 1

    def lstat(path: str, *, dir_fd: int | None = None) -> os.stat_result:
        found = real(path, dir_fd=dir_fd)
        is_link = path_at(path, dir_fd) == str(link)
        return os.stat_result([*found[:4], another, *found[5:]]) if is_link else found

    monkeypatch.setattr(os, "lstat", lstat)
    with pytest.raises(AccessDenied, match="a symlink that another user made"):
        pin([short / "model_epoch_10.pth"])
    assert there.read_text() == 'pinned = ["a", "model_epoch_9.pth"]\n'
