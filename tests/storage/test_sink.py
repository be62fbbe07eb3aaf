"""Files that are written: whatever is put in whatever order stands there, with its checksum."""

from __future__ import annotations

import errno
import os
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckpttool import DamagedCheckpoint, Tensor, Truncated
from ckpttool.core.dtypes import BY_NAME
from ckpttool.core.values import Contiguous, in_memory
from ckpttool.storage import sink as under_test
from ckpttool.storage.sink import Sink
from ckpttool.storage.source import Part, Source
from ckpttool.storage.work import Calls, pool_of_calls

SMALL, LARGE = under_test._SMALL, under_test._SMALL + 1
BYTES = np.random.default_rng(5).integers(0, 256, 1 << 21, np.uint8).tobytes()
SUMS: dict[Any, Callable[[bytes], int]] = {"crc32": zlib.crc32, "crc32c": google_crc32c.value}


class Blocks:
    """Elements that come in pieces, as those of strided tensors do."""

    def __init__(self, data: bytes, step: int = 1 << 15) -> None:
        self._data, self._step = data, step

    def blocks(self, limit: int) -> Iterator[memoryview]:
        for start in range(0, len(self._data), self._step):
            yield memoryview(self._data)[start : start + self._step]

    def once(self) -> Blocks:
        return self


class Failing:
    """Elements that can't be read."""

    def blocks(self, limit: int) -> Iterator[memoryview]:
        raise Truncated("file", "truncated")

    def once(self) -> Failing:
        return self


def of(values: Any, nbytes: int, dtype: str = "uint8") -> Tensor:
    return Tensor(("w",), BY_NAME[dtype], (nbytes * 8 // BY_NAME[dtype].bits,), values=values)


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Source]:
    path = tmp_path / "source"
    path.write_bytes(BYTES)
    with Source(path) as opened:
        yield opened


@pytest.fixture
def sink(tmp_path: Path, crew: Calls) -> Iterator[Sink]:
    made = Sink(str(tmp_path / "target"), crew, lambda nbytes: None)
    yield made
    made.abandon()


def content(sink: Sink) -> bytes:
    sink.close()
    return Path(sink.path).read_bytes()


@pytest.mark.parametrize("nbytes", [0, 1, SMALL, LARGE, len(BYTES)])
@pytest.mark.parametrize("algorithm", [None, "crc32", "crc32c"])
def test_tensors_between_bytes(sink: Sink, source: Source, nbytes: int, algorithm: Any) -> None:
    written = []
    expected = b""
    for values in (Contiguous(source, 0, nbytes), Blocks(BYTES[:nbytes]), in_memory(BYTES[:nbytes])):
        sink.write(b"head")
        sink.write(bytes(-sink.offset % 64))
        expected += b"head" + bytes(-(len(expected) + 4) % 64)
        assert sink.offset == len(expected)
        written.append(sink.put(of(values, nbytes), algorithm))
        assert (written[-1].offset, written[-1].nbytes) == (len(expected), nbytes)
        expected += BYTES[:nbytes]
    for one in written:
        assert one.checksum == SUMS[algorithm or "crc32"](BYTES[:nbytes])
        assert one.elements_checksum == one.checksum
    assert [one.offset for one in sink.written] == [one.offset for one in written]
    assert content(sink) == expected


@pytest.mark.parametrize("nbytes", [0, 3, LARGE])
@pytest.mark.parametrize("algorithm", ["crc32", "crc32c"])
def test_a_checksum_goes_on_from_bytes_in_front(
    sink: Sink, source: Source, nbytes: int, algorithm: Any
) -> None:
    before = SUMS[algorithm](b"in front")
    one = sink.put(of(Contiguous(source, 7, nbytes), nbytes), algorithm, before)
    assert one.checksum == SUMS[algorithm](b"in front" + BYTES[7 : 7 + nbytes])


@pytest.mark.parametrize("count", [2, 40_000])
def test_what_lies_big_endian_is_turned(sink: Sink, source: Source, count: int) -> None:
    sink.put(of(Contiguous(source, 2, 4 * count, 4), 4 * count, "float32"))
    turned = np.frombuffer(BYTES, ">u4", count, 2).astype("<u4")
    assert content(sink) == turned.tobytes()


def test_what_was_written_is_changed_later(sink: Sink, source: Source) -> None:
    sink.write(b"........")
    sink.put(of(Contiguous(source, 0, LARGE), LARGE))
    sink.write(b"end")
    sink.patch(2, b"1234")
    sink.patch(8, b"over")
    sink.patch(sink.offset - 1, b"!")
    sink.write(b"more")
    assert content(sink) == b"..1234..over" + BYTES[4:LARGE] + b"en!more"


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_more_bytes_than_the_buffer_holds(sink: Sink, kind: Callable[[bytes], Any]) -> None:
    for part in (BYTES[:5], BYTES[5 : 3 << 19], BYTES[3 << 19 :]):
        sink.write(kind(part))
    assert content(sink) == BYTES


PARTS = st.lists(
    st.tuples(
        st.sampled_from(["write", "align", "kernel", "blocks", "patch"]),
        st.sampled_from([0, 1, 7, SMALL, LARGE, 3 * LARGE]),
    ),
    max_size=12,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(PARTS)
def test_any_order(tmp_path: Path, source: Source, parts: list[tuple[str, int]]) -> None:
    path = tmp_path / "target"
    with suppress(FileNotFoundError):
        path.unlink()
    crew = pool_of_calls(2)
    sink = Sink(str(path), crew, lambda nbytes: None)
    expected = bytearray()
    for number, (kind, nbytes) in enumerate(parts):
        data = BYTES[number * 11 : number * 11 + nbytes]
        if kind == "align":
            sink.write(bytes(-sink.offset % 16))
            expected += bytes(-len(expected) % 16)
        elif kind == "patch":
            at = len(expected) // 2
            data = data[: len(expected) - at]
            sink.patch(at, data)
            expected[at : at + len(data)] = data
        else:
            if kind == "write":
                sink.write(data)
            else:
                values = Contiguous(source, number * 11, nbytes) if kind == "kernel" else Blocks(data)
                sink.put(of(values, nbytes))
            expected += data
        assert sink.offset == len(expected)
    found = content(sink)
    crew.close()
    assert found == expected


# What the kernel can't or doesn't -----------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM])
@pytest.mark.parametrize("works", [0, 1])
def test_a_kernel_that_does_not_copy(
    sink: Sink, source: Source, number: int, works: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = os.copy_file_range, []

    def refusing(*arguments: Any) -> int:
        calls.append(arguments)
        if len(calls) <= works:
            return real(*arguments)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "copy_file_range", refusing)
    one = sink.put(of(Contiguous(source, 0, len(BYTES)), len(BYTES)), "crc32")
    assert content(sink) == BYTES
    assert one.checksum == zlib.crc32(BYTES)
    assert len(calls) == works + 1


@pytest.mark.parametrize("base", [0, 5, 4096])
@pytest.mark.parametrize("before", [0, 3, 8, 4096])
def test_the_kernel_copies_what_lies_at_the_same_place_of_a_block(
    sink: Sink, source: Source, base: int, before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = os.copy_file_range, []

    def copying(*arguments: Any) -> int:
        calls.append(arguments)
        return real(*arguments)

    monkeypatch.setattr(os, "copy_file_range", copying)
    whole = Part(source, base, len(BYTES) - base) if base else source
    sink.write(bytes(before))
    for offset in (3, 8):
        nbytes = len(BYTES) - base - offset
        calls.clear()
        place = sink.offset
        sink.put(of(Contiguous(whole, offset, nbytes), nbytes))
        sink.settle()
        assert bool(calls) == ((base + offset - place) % 4096 == 0)
    data = BYTES[base:]
    assert content(sink) == bytes(before) + data[3:] + data[8:]


def test_a_system_without_such_a_call(sink: Sink, source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "copy_file_range")
    sink.put(of(Contiguous(source, 0, len(BYTES)), len(BYTES)))
    assert content(sink) == BYTES


def test_a_kernel_that_copies_a_little_at_a_time(
    sink: Sink, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.copy_file_range
    monkeypatch.setattr(
        os, "copy_file_range", lambda a, b, count, *offsets: real(a, b, min(count, 9999), *offsets)
    )
    sink.put(of(Contiguous(source, 0, len(BYTES)), len(BYTES)))
    assert content(sink) == BYTES


def test_a_system_that_writes_a_little_at_a_time(sink: Sink, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda descriptor, data, at: real(descriptor, data[:9999], at))
    sink.write(BYTES)
    sink.put(of(Blocks(BYTES, 1 << 17), len(BYTES)))
    sink.patch(5, BYTES[: 1 << 16])
    assert content(sink) == BYTES[:5] + BYTES[: 1 << 16] + BYTES[5 + (1 << 16) :] + BYTES


# What goes wrong --------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [10, LARGE])
@pytest.mark.parametrize("found", [-1, 1])
def test_a_tensor_of_another_length_than_it_says(sink: Sink, nbytes: int, found: int) -> None:
    with pytest.raises(DamagedCheckpoint, match=f"{nbytes + found:,} bytes were read"):
        sink.put(of(Blocks(BYTES[: nbytes + found]), nbytes))
        sink.settle()


def test_a_source_that_was_cut_short_meanwhile(sink: Sink, source: Source) -> None:
    os.truncate(source.path, LARGE // 2)
    sink.put(of(Contiguous(source, 0, LARGE), LARGE))
    with pytest.raises(Truncated):
        sink.settle()


@pytest.mark.parametrize("ask", [Sink.settle, Sink.close, lambda sink: sink.written[0].checksum])
def test_what_fails_in_a_thread_is_raised_where_it_is_waited_for(
    sink: Sink, ask: Callable[[Sink], Any]
) -> None:
    sink.put(of(Failing(), LARGE))
    for _ in range(20):
        sink.put(of(Blocks(BYTES[:LARGE]), LARGE))
    for _ in range(2):
        with pytest.raises(Truncated):
            ask(sink)


def test_nothing_is_done_behind_a_failure(crew: Calls) -> None:
    done = []
    begun = threading.Event()

    def fail() -> None:
        begun.wait()
        raise OSError(errno.ENOSPC, "full")

    for _ in range(3):
        crew.add(fail)
    for number in range(50):
        crew.add(lambda number=number: done.append(number))  # type: ignore[misc]
    begun.set()
    with pytest.raises(OSError, match="full"):
        crew.settle()
    crew.close()
    assert done == []


def test_who_stops_does_not_wait_for_a_large_tensor(sink: Sink, crew: Calls) -> None:
    begun, count = threading.Event(), 1000
    seen: list[int] = []

    class Endless(Blocks):
        def blocks(self, limit: int) -> Iterator[memoryview]:
            for number in range(count):
                begun.set()
                while number == 1 and not crew.is_stopped:
                    pass
                seen.append(number)
                yield memoryview(BYTES)[:LARGE]

    sink.put(of(Endless(b""), count * LARGE))
    begun.wait()
    crew.close()
    assert len(seen) < count


def test_all_threads_work_at_once(crew: Calls) -> None:
    together = threading.Barrier(3)
    for _ in range(9):
        crew.add(lambda: together.wait(60) and None)  # type: ignore[func-returns-value]
    crew.settle()


def test_progress_is_all_bytes_of_tensors(tmp_path: Path, crew: Calls, source: Source) -> None:
    told: list[int] = []
    sink = Sink(str(tmp_path / "target"), crew, told.append)
    sink.write(b"head")
    for nbytes in (0, 10, LARGE, len(BYTES)):
        sink.put(of(Contiguous(source, 0, nbytes), nbytes))
    sink.close()
    assert sum(told) == 10 + LARGE + len(BYTES)


def test_nothing_is_written_over_or_through_a_link(tmp_path: Path, crew: Calls) -> None:
    (tmp_path / "there").write_bytes(b"untouched")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for name in ("there", "link"):
        with pytest.raises(FileExistsError):
            Sink(str(tmp_path / name), crew, lambda nbytes: None)
    assert (tmp_path / "there").read_bytes() == b"untouched"
    assert not (tmp_path / "elsewhere").exists()


def test_a_close_that_fails_is_told_once_and_no_other_file_is_closed(
    sink: Sink, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[int] = []

    def failing(descriptor: int) -> None:
        closed.append(descriptor)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    descriptor = sink._descriptor
    with monkeypatch.context() as patched:
        patched.setattr(os, "close", failing)
        with pytest.raises(OSError, match="Input/output error"):
            sink.close()
        sink.abandon()
        sink.close()
    os.close(descriptor)
    assert closed == [descriptor]


def test_what_is_closed_is_durable(sink: Sink, source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    real = os.fsync

    def watched(descriptor: int) -> None:
        sizes.append(os.fstat(descriptor).st_size)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    sink.write(b"head")
    sink.put(of(Contiguous(source, 0, LARGE), LARGE))
    sink.write(b"end")
    sink.close()
    sink.close()
    assert sizes == [4 + LARGE + 3]
