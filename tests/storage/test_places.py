"""What every place of files promises: a disk, and an object store."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ckpttool.core.errors import CheckpointError
from ckpttool.formats.opening import read_note
from ckpttool.ops.file_copy import change_note
from ckpttool.storage import fs
from ckpttool.storage.place import Place
from tests.support.memory import MemoryBucket, memory_stores

STATE = {"run/a.pt": b"12345", "run/sub/b.pt": b"", "c.pt": b"1"}


class Filled:
    """A place with files in it, written by others than ckpttool."""

    def __init__(self, root: str, bucket: MemoryBucket | None) -> None:
        self.root, self._bucket = root, bucket
        for name, data in STATE.items():
            self.put(name, data)

    @property
    def place(self) -> Place:
        return fs.place_of(self.root)

    def path(self, name: str) -> str:
        return f"{self.root}/{name}"

    def put(self, name: str, data: bytes) -> None:
        if self._bucket is not None:
            self._bucket.put(name, data)
        else:
            Path(self.path(name)).parent.mkdir(parents=True, exist_ok=True)
            Path(self.path(name)).write_bytes(data)
        fs.refresh(self.root)

    def get(self, name: str) -> bytes | None:
        if self._bucket is not None:
            known = self._bucket.keys()
            return self._bucket.get(name) if name in known else None
        path = Path(self.path(name))
        return path.read_bytes() if path.exists() else None


@pytest.fixture(params=["disk", "store"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Filled]:
    if request.param == "disk":
        yield Filled(str(tmp_path), None)
    else:
        with memory_stores():
            bucket = MemoryBucket()
            yield Filled(bucket.url(), bucket)


def test_what_is_there(files: Filled) -> None:
    assert sorted(files.place.names(files.root)) == ["c.pt", "run"]
    entries = {one.name: one for one in files.place.entries(files.path("run"))}
    assert entries.keys() == {"a.pt", "sub"} and entries["sub"].is_dir() and entries["a.pt"].is_file()
    assert entries["a.pt"].path == files.path("run/a.pt")
    for name, data in STATE.items():
        assert fs.isfile(files.path(name)) and not fs.isdir(files.path(name)), name
        assert files.place.status(files.path(name)).st_size == len(data), name
        with files.place.open_regular(files.path(name)) as file:
            assert file.read() == data, name
        with files.place.open_source(files.path(name)) as source:
            assert source.read(0, source.size) == data, name
    assert fs.isdir(files.path("run/sub")) and not fs.isfile(files.path("run"))
    for absent in ("none", "run/none", "none/none"):
        assert not files.place.is_there(files.path(absent)), absent
        assert files.place.mode(files.path(absent)) is None, absent
        with pytest.raises(FileNotFoundError):
            files.place.status(files.path(absent))


def test_paths(files: Filled) -> None:
    assert files.place.normpath(files.path("run/./sub/../a.pt")) == files.path("run/a.pt")
    assert files.place.dirname(files.path("run/a.pt")) == files.path("run")
    real = os.path.realpath(files.root) if files.place.has_links else files.root
    assert files.place.realpath(files.path("run/../c.pt")) == f"{real}/c.pt"
    assert fs.isabs(files.path("a"))
    assert files.place.abspath(files.path("c.pt")) == files.path("c.pt")
    assert fs.commonpath([files.path("run/a.pt"), files.path("run/sub/b.pt")]) == files.path("run")
    assert fs.samefile(files.path("c.pt"), files.path("run/../c.pt"))
    above = files.root
    for _ in range(20):
        above = files.place.dirname(above)
    assert files.place.dirname(above) == above


def test_a_file_is_written_whole_over_nothing(files: Filled) -> None:
    files.place.write(files.path("new/x.json"), b"{}", None)
    assert files.get("new/x.json") == b"{}"
    assert fs.getsize(files.path("new/x.json")) == 2
    with pytest.raises(OSError) as refused:
        files.place.write(files.path("c.pt"), b"2", None)
    assert fs.is_change(refused.value) and files.get("c.pt") == b"1"


def test_a_file_is_replaced_and_removed_only_as_it_was_seen(files: Filled) -> None:
    seen = files.place.status(files.path("run/a.pt"))
    files.put("run/a.pt", b"of another program")
    for change in (
        lambda: files.place.write(files.path("run/a.pt"), b"ours", seen),
        lambda: files.place.remove(files.path("run/a.pt"), seen),
    ):
        with pytest.raises(OSError) as refused:
            change()
        assert fs.is_change(refused.value)
        assert files.get("run/a.pt") == b"of another program"
    files.place.write(files.path("run/a.pt"), b"ours", files.place.status(files.path("run/a.pt")))
    assert files.get("run/a.pt") == b"ours"
    files.place.remove(files.path("run/a.pt"), files.place.status(files.path("run/a.pt")))
    assert files.get("run/a.pt") is None and not files.place.is_there(files.path("run/a.pt"))


def test_what_has_gone_is_not_written_again(files: Filled) -> None:
    seen = files.place.status(files.path("c.pt"))
    files.place.remove(files.path("c.pt"), seen)
    with pytest.raises(OSError) as refused:
        files.place.write(files.path("c.pt"), b"2", seen)
    assert fs.is_change(refused.value) and files.get("c.pt") is None


def test_what_it_can_do(files: Filled) -> None:
    assert files.place.is_changeable(files.root)
    assert abs(files.place.clock(files.root) - time.time()) < 60
    assert files.place.unfinished_uploads(files.root) is None
    files.place.prefetch_listing(files.root)
    files.place.prefetch_listing(files.path("none"))
    free = files.place.free_bytes(files.root)
    if files.place.can_rename:
        disk = os.statvfs(files.root)
        assert free is not None and abs(free - disk.f_bavail * disk.f_frsize) < 1 << 30
        assert fs.root_of(files.root) == ""
    else:
        assert free is None
        assert fs.root_of(files.path("run/a.pt")) == files.root


def test_no_answer_is_not_absence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with memory_stores():
        bucket = MemoryBucket()
        bucket.put("a", b"1")
        bucket.refuse("status|listing", 503)
        for name in ("a", "none"):
            with pytest.raises(CheckpointError, match="503"):
                fs.lexists(bucket.url(name))

    def refused(path: str, **options: object) -> os.stat_result:
        raise OSError(errno.EIO, "input/output error", path)

    monkeypatch.setattr("ckpttool.storage.held.status", refused)
    with pytest.raises(CheckpointError):
        fs.lexists(str(tmp_path / "a"))


def test_notes_of_copies_to_a_store_that_go_on_at_once_lose_nothing() -> None:
    """On a disk, a moment between the look and the rename is not covered."""
    with memory_stores():
        note = MemoryBucket().url("run/.copying")

        def add(number: int) -> None:
            change_note(note, lambda noted: noted.update({f"{number}.pt": [str(number)]}))

        with ThreadPoolExecutor(4) as threads:
            list(threads.map(add, range(8)))
        assert read_note(note) == {f"{number}.pt": [str(number)] for number in range(8)}
