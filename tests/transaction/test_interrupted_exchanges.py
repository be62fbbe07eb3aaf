"""Files of a checkpoint that others replace, under faults: a reader finds the old ones or the new."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from itertools import count, groupby
from pathlib import Path

import pytest

from ckpttool import CheckpointError, undo
from ckpttool.transaction.files import Contents, fingerprint
from ckpttool.transaction.journal import Group, Location, Move, OperationList, Root, StoredFile
from ckpttool.transaction.transaction import apply
from tests.support.changes import recover
from tests.support.faults import DiskStep, dies_at, disk_steps, is_hit_at
from tests.support.transactions import IDENTITY, kill_before, stages_of

OLD = {".metadata": b"of a", "a.distcp": b"weights, states", "common.pt": b"stays"}
NEW = {".metadata": b"of b", "b.distcp": b"weights", "common.pt": b"stays"}
FAULTS = ("EIO", "ENOSPC", "EACCES", "interrupt")


def planned(root: Path, identity: str | None = IDENTITY) -> OperationList:
    """Write a checkpoint, and files that wait to take the place of some of it; return what exchanges them."""
    directory, waiting = root / "run" / "iter_1", root / "run" / "waiting"
    for place, files in ((directory, OLD), (waiting, NEW)):
        place.mkdir(parents=True)
        for name, data in files.items():
            (place / name).write_bytes(data)

    def stored(location: Location, path: Path) -> StoredFile:
        return StoredFile(location, fingerprint(f"iter_1/{path.name}", os.lstat(path)))

    aside: Root = "stage" if identity is None else "trash"
    old = {
        name: stored(Location(aside, f"{at}/{name}"), directory / name)
        for at, name in enumerate((".metadata", "a.distcp"), 1)
    }
    new = {
        name: stored(Location("directory", f"waiting/{name}"), waiting / name)
        for name in (".metadata", "b.distcp")
    }
    operations = (
        *(
            Move(
                0, new[name].location, Location("directory", f"iter_1/{name}"), new[name].file, old.get(name)
            )
            for name in ("b.distcp", ".metadata")
        ),
        Move(0, Location("directory", "iter_1/a.distcp"), old["a.distcp"].location),
    )
    files = tuple(one.file for one in old.values())
    group = Group(str(directory), tuple(file.path for file in files), Contents(files))
    return OperationList("slim", (group,), operations, identity)


def whole_in(run: Path) -> Mapping[str, bytes]:
    """Return which of the two checkpoints a reader finds whole, which starts at the metadata."""
    found = {path.name: path.read_bytes() for path in (run / "iter_1").iterdir()}
    expected = OLD if found[".metadata"] == OLD[".metadata"] else NEW
    assert found.items() >= expected.items()
    return expected


def settled(run: Path, *, can_undo: bool) -> Mapping[str, bytes]:
    """Recover, and return which checkpoint is there alone; undo it."""
    failed = recover(run).failed
    assert not failed, failed
    assert not stages_of(run)
    whole = whole_in(run)
    assert {path.name for path in (run / "iter_1").iterdir()} == whole.keys()
    if whole is NEW and can_undo:
        assert undo(run).problems == ()
        assert {path.name: path.read_bytes() for path in (run / "iter_1").iterdir()} == OLD
    return whole


ACTIONS = {"slim": IDENTITY, "slim for good": None, "undo": IDENTITY}


def begun(root: Path, action: str) -> Callable[[], object]:
    """Write the files, and return what is interrupted."""
    listed, run = planned(root, ACTIONS[action]), root / "run"
    if action == "undo":
        assert apply(str(run), listed).done
        return partial(undo, run)
    return partial(apply, str(run), listed)


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("is_double", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_a_kill_at_any_call_and_at_any_of_its_recovery(tmp_path: Path, action: str, is_double: bool) -> None:
    seen = []
    for number in count(1):
        for again in count(0) if is_double else (0,):
            root = tmp_path / f"{number}-{again}"
            run = root / "run"
            was_hit = dies_at(number, begun(root, action))
            whole_in(run)
            was_hit_again = again > 0 and dies_at(again, partial(recover, run))
            whole_in(run)
            seen.append(settled(run, can_undo=action != "slim for good"))
            shutil.rmtree(root)
            if again and not was_hit_again:
                break
        if not was_hit:
            break
    assert OLD in seen and NEW in seen


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_at_any_call(tmp_path: Path, action: str, fault: str) -> None:
    error = KeyboardInterrupt() if fault == "interrupt" else OSError(getattr(errno, fault), fault)
    for number in count(1):
        root = tmp_path / str(number)
        run = root / "run"
        act = begun(root, action)
        try:
            was_hit = is_hit_at(number, act, error)
        except CheckpointError:
            was_hit = True
        whole_in(run)
        settled(run, can_undo=action != "slim for good")
        shutil.rmtree(root)
        if not was_hit:
            break


@pytest.mark.parametrize("fault", ["kill", "EIO"])
def test_an_undo_without_hard_links_loses_nothing(
    tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **options: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    for number in count(1):
        root = tmp_path / str(number)
        act = begun(root, "undo")
        with monkeypatch.context() as patch:
            patch.setattr(os, "link", refused)
            try:
                was_hit = (
                    dies_at(number, act)
                    if fault == "kill"
                    else is_hit_at(number, act, OSError(errno.EIO, os.strerror(errno.EIO)))
                )
            except CheckpointError:
                was_hit = True
        settled(root / "run", can_undo=True)
        if not was_hit:
            break


def test_many_files(tmp_path: Path) -> None:
    """More of them than directories are held open."""
    run = tmp_path / "run"
    (run / "big").mkdir(parents=True)
    (run / "waiting").mkdir()
    operations, files = [], []
    for number in range(150):
        old, new = run / "big" / f"{number}.bin", run / "waiting" / f"{number}.bin"
        old.write_bytes(b"old %d" % number)
        new.write_bytes(b"new %d" % number)
        kept, comes = (fingerprint(f"big/{number}.bin", os.lstat(path)) for path in (old, new))
        files.append(kept)
        aside = StoredFile(Location("trash", f"{number + 1}/{number}.bin"), kept)
        here = Location("directory", f"big/{number}.bin")
        operations.append(Move(0, Location("directory", f"waiting/{number}.bin"), here, comes, aside))
    group = Group(str(run / "big"), tuple(file.path for file in files), Contents(tuple(files)))
    listed = OperationList("slim", (group,), tuple(operations), IDENTITY)
    assert not apply(str(run), listed).failed
    assert (run / "big" / "149.bin").read_bytes() == b"new 149"
    assert undo(run).problems == ()
    assert [(run / "big" / f"{at}.bin").read_bytes() for at in range(150)] == [
        b"old %d" % at for at in range(150)
    ]


def test_an_old_file_is_on_the_disk_under_another_name_before_it_loses_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed, run = planned(tmp_path), tmp_path / "run"
    metadata = (run / "iter_1" / ".metadata").stat().st_ino
    new = (run / "waiting" / ".metadata").stat().st_ino
    trash = run / ".ckpttool-trash" / IDENTITY / "1"

    def word(step: DiskStep) -> str | None:
        if step.call == "fsync":
            return "sync" if trash.exists() and step.inode == trash.stat().st_ino else None
        return step.call if step.inode in (metadata, new) else None

    steps = disk_steps(monkeypatch)
    assert not apply(str(run), listed).failed
    words = [one for one, _ in groupby(filter(None, map(word, steps)))]
    assert words == ["link", "sync", "replace", "sync"]


@pytest.mark.parametrize("step", ["do", "commit"])
def test_in_a_copy_it_is_refused(tmp_path: Path, step: str) -> None:
    listed, run = planned(tmp_path), tmp_path / "run"
    kill_before(step, lambda: apply(str(run), listed), 3 if step == "do" else 1)
    shutil.copytree(run, tmp_path / "copy")
    (why,) = recover(tmp_path / "copy").failed.values()
    assert "the directory was copied while a command was running" in why
    whole_in(tmp_path / "copy")
    assert settled(run, can_undo=True) is OLD
