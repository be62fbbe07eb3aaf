"""Reads of a file: inside it, or an error that says why not."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool import AccessDenied, CheckpointError, DamagedCheckpoint, LimitExceeded, NotFound, Truncated
from ckpttool.core.readable import MAX_READ, Buffer, Readable, reader_from, swap_bytes
from ckpttool.core.values import Contiguous, in_memory, stored_once
from ckpttool.storage import source as under_test
from ckpttool.storage.source import Source

CONTENT = bytes(range(256)) * 4


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "bytes"
    path.write_bytes(CONTENT)
    return path


@pytest.fixture(params=["file", "memory"])
def readable(request: pytest.FixtureRequest, path: Path):
    if request.param == "memory":
        yield Buffer("bytes", CONTENT)
        return
    with Source(path) as source:
        yield source


def test_reads_what_lies_there(readable: Readable) -> None:
    assert readable.size == len(CONTENT)
    assert readable.read(0, 4) == CONTENT[:4]
    assert readable.read(1000, 24) == CONTENT[1000:]
    assert readable.read(len(CONTENT), 0) == b""
    buffer = bytearray(5)
    reader_from(readable, 10)(3, memoryview(buffer))
    assert buffer == CONTENT[13:18]


@pytest.mark.parametrize(
    ("offset", "nbytes"), [(-1, 2), (0, -1), (1020, 5), (1025, 0), (1 << 64, 1), (0, 1 << 27)]
)
def test_refuses_what_lies_outside(readable: Readable, offset: int, nbytes: int) -> None:
    with pytest.raises(Truncated, match="lie outside the"):
        readable.read(offset, nbytes)
    with pytest.raises(Truncated):
        readable.check(offset, nbytes)


def test_an_empty_file_is_called_so(tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b"")
    with Source(tmp_path / "empty") as source, pytest.raises(Truncated) as caught:
        source.read(0, 4)
    assert caught.value.reason == "the file is empty"


def test_refuses_to_read_much_at_once(path: Path) -> None:
    os.truncate(path, MAX_READ + 1)
    with Source(path) as source, pytest.raises(LimitExceeded, match="at most"):
        source.read(0, MAX_READ + 1)


def test_file_that_shrank(path: Path) -> None:
    with Source(path) as source:
        os.truncate(path, 100)
        assert source.read(90, 10) == CONTENT[90:100]
        with pytest.raises(Truncated, match="the file ends at byte 100"):
            source.read(90, 20, "data/0")


def test_closing_twice_is_allowed_and_reading_then_is_not(path: Path) -> None:
    source = Source(path)
    source.close()
    source.close()
    with pytest.raises(CheckpointError):
        source.read(0, 1)


def test_forgotten_file_is_closed(path: Path) -> None:
    from ckpttool.testing import open_files

    before = open_files()
    Source(path)
    assert open_files() == before


def test_what_is_no_regular_file(tmp_path: Path) -> None:
    from ckpttool.testing import open_files

    before = open_files()
    with pytest.raises(AccessDenied):
        Source(tmp_path)
    with pytest.raises(NotFound):
        Source(tmp_path / "missing")
    for odd in ("a\0b", ""):
        with pytest.raises(CheckpointError):
            Source(odd)
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(AccessDenied, match="not a regular file"):
            Source(tmp_path / "pipe")
    assert open_files() == before


def test_short_reads_are_continued(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The operating system may give less than was asked for."""
    read_some = Source._read_some
    monkeypatch.setattr(
        Source, "_read_some", lambda self, file, at, buffer: read_some(self, file, at, buffer[:3])
    )
    with Source(path) as source:
        assert source.read(5, 100) == CONTENT[5:105]


def test_error_of_the_disk_is_an_error_of_ours(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Source, "_read_some", fail)
    with Source(path) as source, pytest.raises(AccessDenied, match="input/output error"):
        source.read(0, 1)


def test_threads_read_one_file(path: Path) -> None:
    wrong: list[int] = []
    with Source(path) as source:

        def read(offset: int) -> None:
            for at in range(offset, 1000, 4):
                if source.read(at, 8) != CONTENT[at : at + 8]:
                    wrong.append(at)

        threads = [threading.Thread(target=read, args=(offset,)) for offset in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


@given(
    st.integers(0, 100),
    st.integers(0, 100),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 16, 20, 64, 4096]),
)
def test_elements_in_blocks(offset: int, count: int, word: int, limit: int) -> None:
    nbytes = min(count * word, (len(CONTENT) - offset) // word * word)
    raw = CONTENT[offset : offset + nbytes]
    expected = b"".join(raw[at : at + word][::-1] for at in range(0, nbytes, word)) if word > 1 else raw
    for values in (Contiguous(Buffer("x", CONTENT), offset, nbytes, word), in_memory(raw, word)):
        blocks = [bytes(block) for block in values.blocks(limit)]
        assert b"".join(blocks) == expected
        assert all(len(block) <= max(16, limit) for block in blocks)
        assert stored_once(values) is values


@given(st.binary(max_size=160), st.sampled_from([1, 2, 4, 8]))
def test_swapping_twice_changes_nothing(data: bytes, word: int) -> None:
    data = data[: len(data) // word * word]
    once = bytes(swap_bytes(memoryview(data), word))
    assert bytes(swap_bytes(memoryview(once), word)) == data


def test_more_files_than_are_kept_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ckpttool.testing import open_files

    before = open_files()
    monkeypatch.setattr(under_test, "MAX_OPEN", 8)
    for number in range(30):
        (tmp_path / str(number)).write_bytes(bytes([number]) * 10)
    sources = [Source(tmp_path / str(number)) for number in range(30)]
    for source in [*sources, *reversed(sources)]:
        assert source.read(1, 9) == bytes([int(os.path.basename(source.path))]) * 9
        assert len(open_files() - before) <= 8
    for source in sources:
        source.close()
        with pytest.raises(AccessDenied, match="it was closed"):
            source.read(0, 1)
    assert open_files() == before


def test_file_that_was_replaced_before_it_is_opened_again(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(under_test, "MAX_OPEN", 1)
    (tmp_path / "new").write_bytes(CONTENT)
    with Source(path) as source, Source(tmp_path / "new") as other:
        os.replace(tmp_path / "new", path)
        with pytest.raises(DamagedCheckpoint, match="replaced while it was read"):
            source.read(0, 1)
        assert other.read(0, 4) == CONTENT[:4]
        path.unlink()
        with pytest.raises(NotFound):
            source.read(0, 1)


def test_threads_read_more_files_than_are_kept_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(under_test, "MAX_OPEN", 1)
    for number in range(6):
        (tmp_path / str(number)).write_bytes(bytes([number]) * 1000)
    sources = [Source(tmp_path / str(number)) for number in range(6)]
    wrong: list[int] = []
    done: list[int] = []

    def read(first: int) -> None:
        for at in range(3000):
            if sources[at % 6].read(at % 900, 8) != bytes([at % 6]) * 8:
                wrong.append(at)
        done.append(first)

    switching = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    threads = [threading.Thread(target=read, args=(first,)) for first in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(switching)
    assert (wrong, sorted(done)) == ([], list(range(8)))
    for source in sources:
        source.close()
