"""Files that appear whole or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from ckpttool.io.atomic import write_atomically


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
