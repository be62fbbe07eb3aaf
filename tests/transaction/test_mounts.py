"""What is mounted among a checkpoint's files: it is never touched, and the checkpoint stays with it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool import RenameRequest, prune, rename, undo
from ckpttool.transaction.files import opened
from ckpttool.transaction.mounts import HOLDS_MOUNT, is_mounted, mount_points
from tests.support.changes import empty_trash, file_bytes
from tests.support.mounts import list_mounts, list_no_mounts, mount_of, mount_once_open
from tests.support.retention import kept_reasons
from tests.support.transactions import before_unlinking

OLDEST = "checkpoint-2"

Mount = Callable[[Path], None]


@pytest.fixture
def mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mount:
    """Return what makes the system say that something is mounted at a path."""
    return list_mounts(monkeypatch, tmp_path / "mountinfo.log")


@pytest.fixture
def run(trainer: Path) -> Path:
    """Return a run whose oldest checkpoint has a directory of its own inside, and a file in it."""
    sub = trainer / OLDEST / "sub dir"
    sub.mkdir()
    (sub / "notes").write_text("precious")
    return trainer


def _prune(directory: Path, **told: object):
    """Remove what is old, though files of the user's lie in it."""
    return prune(directory, keep_last=2, depth="quick", **{"confirm": lambda planned: True, **told})


@pytest.mark.parametrize(
    ("place", "trash"), [("sub dir", False), ("sub dir", True), ("config.json", False), (".", True)]
)
def test_it_is_a_reason_to_stay(run: Path, mount: Mount, place: str, trash: bool) -> None:
    before = file_bytes(run / OLDEST)
    mount(run / OLDEST / place)
    for result in (_prune(run, dry_run=True), _prune(run, trash=trash)):
        assert HOLDS_MOUNT in kept_reasons(result)[OLDEST]
        assert OLDEST not in [entry.name for entry in result.plan.removals]
    assert file_bytes(run / OLDEST) == before
    assert not (run / "checkpoint-6").exists()


def test_beside_it_is_no_reason(run: Path, mount: Mount) -> None:
    mount(run / f"{OLDEST}0")
    mount(run)
    assert OLDEST not in kept_reasons(_prune(run))
    assert not (run / OLDEST).exists()


@pytest.mark.parametrize("trash", [False, True])
def test_one_that_comes_after_the_plan(run: Path, mount: Mount, trash: bool) -> None:
    before = file_bytes(run / OLDEST)

    def confirm(planned: object) -> bool:
        mount(run / OLDEST / "sub dir")
        return True

    result = _prune(run, confirm=confirm, trash=trash)
    told = f"not {'moved to the trash' if trash else 'removed'}: {HOLDS_MOUNT}"
    assert kept_reasons(result)[OLDEST] == (told,)
    assert [problem.message for problem in result.problems] == [told]
    assert file_bytes(run / OLDEST) == before


def test_one_that_comes_before_it_is_unlinked(
    run: Path, mount: Mount, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = file_bytes(run / OLDEST)
    before_unlinking(monkeypatch, lambda stage: mount(stage / "0" / OLDEST / "sub dir"))
    result = _prune(run)
    assert kept_reasons(result)[OLDEST] == (f"not removed: {HOLDS_MOUNT}",)
    assert file_bytes(run / OLDEST) == before
    assert not list(run.glob(".ckpttool-*"))


def test_one_that_comes_while_it_is_unlinked(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's own number of the mount, of the directory that is open, has the last word."""
    mount_once_open(monkeypatch, "sub dir")
    result = _prune(run)
    [problem] = result.problems
    [left] = run.glob(f".ckpttool-*/*/{OLDEST}")
    assert problem.message == f"partly removed: {HOLDS_MOUNT}; the rest is in {left.parent}"
    assert (left / "sub dir" / "notes").read_text() == "precious"
    assert OLDEST not in kept_reasons(result)
    assert result.freed_bytes > 0


@pytest.mark.skipif(not os.path.exists("/proc/self/mountinfo"), reason="needs Linux's list of mounts")
def test_the_number_of_a_mount_is_that_in_the_systems_list(tmp_path: Path) -> None:
    with open("/proc/self/mountinfo") as lines:
        numbers = {words[4]: int(words[0]) for words in map(str.split, lines)}
    for place in (tmp_path, Path("/proc")):
        around = next(str(path) for path in (place, *place.parents) if str(path) in numbers)
        with opened(str(place)) as descriptor:
            assert mount_of(descriptor) == (place.stat().st_dev, numbers[around])


def test_another_device_is_one_without_a_list_of_mounts(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = file_bytes(run / OLDEST)
    list_no_mounts(monkeypatch, run / OLDEST / "sub dir")
    assert mount_points() is None
    result = _prune(run)
    assert HOLDS_MOUNT in kept_reasons(result)[OLDEST]
    assert file_bytes(run / OLDEST) == before


def test_a_renaming_leaves_it(run: Path, mount: Mount) -> None:
    mount(run / OLDEST / "sub dir")
    done = rename(RenameRequest(directory=str(run), template="step-{step:03d}"))
    told = {Path(path).name: why for path, why in done.failed.items()}
    assert told.pop(OLDEST) == HOLDS_MOUNT
    assert set(told.values()) == {f"{OLDEST}: {HOLDS_MOUNT}; all of them are renamed, or none"}
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
