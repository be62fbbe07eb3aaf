"""Files that appear whole or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from ckpttool.storage.directories import try_lock, write_atomically
from ckpttool.transaction.staged_output import clear_areas
from tests.support.faults import is_killed_at

needs_posix = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a POSIX system")


def test_a_new_file(tmp_path: Path) -> None:
    write_atomically(tmp_path / "new", b"text")
    assert (tmp_path / "new").read_bytes() == b"text"
    assert os.listdir(tmp_path) == ["new"]


def test_mode_and_owner_of_an_existing_file_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "old"
    path.write_bytes(b"old")
    path.chmod(0o640)
    write_atomically(path, b"new")
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"new", 0o640)
    given: list[tuple[int, int]] = []
    real = os.lstat

    def lstat(name: str, *, dir_fd: int | None = None) -> os.stat_result:
        found = list(real(name, dir_fd=dir_fd))
        found[4:6] = [12345, 54321]
        return os.stat_result(found)

    monkeypatch.setattr(os, "lstat", lstat)
    monkeypatch.setattr(os, "fchown", lambda descriptor, user, group: given.append((user, group)))
    write_atomically(path, b"newer")
    assert given == [(12345, 54321)]


def test_an_owner_that_can_not_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise PermissionError(errno.EPERM, "not permitted")

    path = tmp_path / "old"
    path.write_bytes(b"old")
    real = os.lstat

    def lstat(name: str, *, dir_fd: int | None = None) -> os.stat_result:
        found = real(name, dir_fd=dir_fd)
        return os.stat_result([*found[:4], 1, 1, *found[6:]])

    monkeypatch.setattr(os, "lstat", lstat)
    monkeypatch.setattr(os, "fchown", refuse)
    write_atomically(path, b"new")
    assert path.read_bytes() == b"new"


def test_a_symlink_is_replaced_not_followed(tmp_path: Path) -> None:
    (tmp_path / "target").write_bytes(b"precious")
    (tmp_path / "link").symlink_to("target")
    write_atomically(tmp_path / "link", b"new")
    assert (tmp_path / "target").read_bytes() == b"precious"
    assert not (tmp_path / "link").is_symlink()


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_failure_leaves_what_was_there(tmp_path: Path, fault, number: int) -> None:
    path = tmp_path / "old"
    path.write_bytes(b"old")
    fault.at(number, OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, b"new")
    fault.none()
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["old"]


# What a kill left -----------------------------------------------------------------------------------


def leftovers(directory: Path) -> list[Path]:
    return sorted(directory.glob(".ckpttool-*.tmp"))


@needs_posix
def test_the_next_write_of_a_file_takes_what_a_kill_left(tmp_path: Path) -> None:
    path, number, left = tmp_path / "note", 1, 0
    while is_killed_at(number, lambda: write_atomically(path, b"text")):
        left += len(leftovers(tmp_path))
        write_atomically(path, b"text")
        assert os.listdir(tmp_path) == ["note"]
        number += 1
    assert left


@needs_posix
def test_clearing_a_directory_takes_it_and_leaves_what_is_being_written(tmp_path: Path) -> None:
    killed = {number: tmp_path / str(number) for number in range(1, 6)}
    for number, directory in killed.items():
        directory.mkdir()
        is_killed_at(number, lambda directory=directory: write_atomically(directory / "note", b"text"))
    littered = [directory for directory in killed.values() if leftovers(directory)]
    assert littered
    (first,) = leftovers(littered[0])
    descriptor = os.open(first, os.O_RDWR)
    assert try_lock(descriptor)
    assert clear_areas(str(littered[0])) == ()
    write_atomically(littered[0] / "note", b"another")
    assert leftovers(littered[0]) == [first]
    os.close(descriptor)
    for directory in littered:
        assert clear_areas(str(directory)) == ()
        assert not leftovers(directory)


def test_what_is_no_file_of_ours_stays(tmp_path: Path) -> None:
    name = ".ckpttool-0123456789ab.tmp"
    (tmp_path / "kept").write_bytes(b"precious")
    for directory in ("link", "second name", "directory", "another name"):
        (tmp_path / directory).mkdir()
    (tmp_path / "link" / name).symlink_to(tmp_path / "kept")
    (tmp_path / "second name" / name).hardlink_to(tmp_path / "kept")
    (tmp_path / "directory" / name).mkdir()
    (tmp_path / "another name" / ".ckpttool-mine.tmp").touch()
    before = sorted(tmp_path.rglob("*"))
    for directory in tmp_path.iterdir():
        clear_areas(str(directory))
    assert sorted(tmp_path.rglob("*")) == before


def test_a_file_that_is_taken_away_before_it_is_locked_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, taken = os.fsync, []

    def fsync(descriptor: int) -> None:
        real(descriptor)
        if not taken:
            taken.extend(leftovers(tmp_path))
            taken[0].unlink()

    monkeypatch.setattr(os, "fsync", fsync)
    write_atomically(tmp_path / "note", b"text")
    assert (taken != [], os.listdir(tmp_path)) == (True, ["note"])
