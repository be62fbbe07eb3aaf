"""What is mounted among a checkpoint's files: it is never touched, and the checkpoint stays with it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool import Policy, RenameRequest, Request, prune, rename, undo
from ckpttool.series.pruning.prune import Pruned
from ckpttool.transaction import files, mounts, removal, stage
from ckpttool.transaction.files import contents
from ckpttool.transaction.mounts import HOLDS_MOUNT, is_mounted, mount_points
from tests.support.changes import empty_trash, file_bytes

OLDEST = "checkpoint-2"

Mount = Callable[[Path], None]


@pytest.fixture
def mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mount:
    """Return what makes the system say that something is mounted at a path."""
    told = tmp_path / "mountinfo"
    told.write_text("22 1 254:0 / / rw - ext4 /dev/vda rw\n")
    monkeypatch.setattr(mounts, "_MOUNTS", str(told))

    def add(path: Path) -> None:
        escaped = os.path.realpath(path).replace("\\", "\\134").replace(" ", "\\040")
        with told.open("a") as file:
            file.write(f"63 22 254:0 /elsewhere {escaped} rw,relatime - ext4 /dev/vda rw\n")

    return add


@pytest.fixture
def run(trainer: Path) -> Path:
    """Return a run whose oldest checkpoint has a directory of its own inside, and a file in it."""
    sub = trainer / OLDEST / "sub dir"
    sub.mkdir()
    (sub / "notes").write_text("precious")
    return trainer


def _prune(directory: Path, **told: object) -> Pruned:
    return prune(Request(directory=str(directory), policy=Policy(keep_last=2), depth="quick"), **told)


def _reasons(result: Pruned) -> dict[str, tuple[str, ...]]:
    return {kept.entry.name: kept.reasons for one in result.plan.groups for kept in one.keep}


@pytest.mark.parametrize("place", ["sub dir", "config.json", "."])
@pytest.mark.parametrize("trash", [False, True])
def test_it_is_a_reason_to_stay(run: Path, mount: Mount, place: str, trash: bool) -> None:
    before = file_bytes(run / OLDEST)
    mount(run / OLDEST / place)
    for result in (_prune(run, dry_run=True), _prune(run, trash=trash)):
        assert HOLDS_MOUNT in _reasons(result)[OLDEST]
        assert OLDEST not in [entry.name for entry in result.plan.removals]
    assert file_bytes(run / OLDEST) == before
    assert not (run / "checkpoint-6").exists()


def test_beside_it_is_no_reason(run: Path, mount: Mount) -> None:
    mount(run / f"{OLDEST}0")
    mount(run)
    assert OLDEST not in _reasons(_prune(run))
    assert not (run / OLDEST).exists()


@pytest.mark.parametrize("trash", [False, True])
def test_one_that_comes_after_the_plan(run: Path, mount: Mount, trash: bool) -> None:
    before = file_bytes(run / OLDEST)

    def confirm(planned: object) -> bool:
        mount(run / OLDEST / "sub dir")
        return True

    result = _prune(run, confirm=confirm, trash=trash)
    told = f"not {'moved to the trash' if trash else 'removed'}: {HOLDS_MOUNT}"
    assert _reasons(result)[OLDEST] == (told,)
    assert [problem.message for problem in result.problems] == [told]
    assert file_bytes(run / OLDEST) == before


def test_one_that_comes_before_it_is_unlinked(
    run: Path, mount: Mount, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, real = file_bytes(run / OLDEST), removal._unlink_all

    def mounted_first(at: stage.RemovalStage, *told: object) -> None:
        [place] = Path(at.path).glob(f"*/{OLDEST}")
        mount(place / "sub dir")
        real(at, *told)

    monkeypatch.setattr(removal, "_unlink_all", mounted_first)
    result = _prune(run)
    assert _reasons(result)[OLDEST] == (f"not removed: {HOLDS_MOUNT}",)
    assert file_bytes(run / OLDEST) == before
    assert not list(run.glob(".ckpttool-*"))


def test_one_that_comes_while_it_is_unlinked(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's own number of the mount, of the directory that is open, has the last word."""
    real = mounts._mount

    def other(descriptor: int) -> tuple[int, int | None]:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        return (0, 99) if path.endswith("sub dir") else real(descriptor)

    monkeypatch.setattr(mounts, "_mount", other)
    result = _prune(run)
    [problem] = result.problems
    [left] = run.glob(f".ckpttool-*/*/{OLDEST}")
    assert problem.message == f"partly removed: {HOLDS_MOUNT}; the rest lies in {left.parent}"
    assert (left / "sub dir" / "notes").read_text() == "precious"
    assert OLDEST not in _reasons(result)
    assert result.freed_bytes > 0


def test_another_device_is_one_without_a_list_of_mounts(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mounts, "_MOUNTS", str(run / "no such list"))
    assert mount_points() is None
    before, real = file_bytes(run / OLDEST), files._walk

    def walk(directory: str | int, members: object, *levels: int) -> object:
        for path, status in real(directory, members, *levels):
            if path.endswith("sub dir"):
                status = os.stat_result([*status[:2], status.st_dev + 1, *status[3:]])
            yield path, status

    monkeypatch.setattr(files, "_walk", walk)
    assert contents(str(run), [OLDEST]).crosses
    result = _prune(run)
    assert HOLDS_MOUNT in _reasons(result)[OLDEST]
    assert file_bytes(run / OLDEST) == before


def test_a_renaming_leaves_it(run: Path, mount: Mount) -> None:
    mount(run / OLDEST / "sub dir")
    done = rename(RenameRequest(directory=str(run), template="step-{step:03d}"))
    assert {Path(path).name: why for path, why in done.failed.items()} == {OLDEST: HOLDS_MOUNT}
    assert (run / OLDEST / "sub dir" / "notes").exists()
    assert not (run / "step-002").exists()


def test_the_trash_is_neither_emptied_nor_taken_back_with_it(run: Path, mount: Mount) -> None:
    _prune(run, trash=True)
    [place] = run.glob(f".ckpttool-trash/*/0/{OLDEST}")
    before = file_bytes(place)
    mount(place / "sub dir")
    for problems in (undo(str(run)).problems, empty_trash(run).problems):
        assert [OLDEST in one.path and HOLDS_MOUNT in one.message for one in problems] == [True]
    assert file_bytes(place) == before
    shutil.rmtree(place)  # for what it holds is left to whoever mounted it


@given(st.text(st.characters(codec="utf-8", exclude_characters="\0/"), min_size=1), st.booleans())
def test_every_name_is_read_back(name: str, is_inside: bool) -> None:
    if name in (".", ".."):
        return
    points = [os.path.join("/run", name, "sub")] if is_inside else [f"/run/{name}x", "/run", "/"]
    assert is_mounted("/run", [name], points) is is_inside
