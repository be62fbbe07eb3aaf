"""Deflated records: whatever zlib makes of them, at any size, level and order of reading."""

from __future__ import annotations

import io
import random
import zlib
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool import DamagedCheckpoint, LimitExceeded, verify
from ckpttool.containers import compressed as wire_inflated
from ckpttool.containers.compressed import MAX_EXPANSION, Inflated, Inflation
from ckpttool.containers.zip_reader import Archive
from ckpttool.core.readable import Buffer
from tests.support.thorough import IS_THOROUGH

ROUND_SIZES = sorted({max(0, (1 << power) + more) for power in range(21) for more in range(-3, 4)})
KINDS = {
    "zeros": lambda size: bytes(size),
    "ramp": lambda size: np.arange(size // 4 + 1, dtype=np.float32).tobytes()[:size],
    "random": lambda size: random.Random(size).randbytes(size),
}


def deflated(content: bytes, level: int) -> bytes:
    packer = zlib.compressobj(level, zlib.DEFLATED, -zlib.MAX_WBITS)
    return packer.compress(content) + packer.flush()


def inflated(packed: bytes, size: int) -> Inflated:
    return Inflated(Inflation(Buffer("some.zip", packed)), 0, len(packed), size, "record")


def zipped(content: bytes, level: int) -> bytes:
    buffer = io.BytesIO()
    with ZipFile(buffer, "w", ZIP_DEFLATED, compresslevel=level) as archive:
        archive.writestr(ZipInfo("record"), content, ZIP_DEFLATED, level)
    return buffer.getvalue()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("step", [0, 4096, 1 << 16])
def test_round_sizes(kind: str, step: int) -> None:
    """A record is whole when its output is, not when its input is used up: zlib holds what had no room."""
    for number, size in enumerate(ROUND_SIZES if IS_THOROUGH else ROUND_SIZES[:-21]):
        content = KINDS[kind](size)
        record = inflated(deflated(content, number % 10), size)
        steps = range(0, size, step or size or 1)
        assert b"".join(record.read(at, min(step or size, size - at)) for at in steps) == content, size


@pytest.mark.parametrize("gap", [1, 2, 4096, (1 << 16) + 1])
def test_what_lies_before_an_offset_is_passed_over_to_the_byte(gap: int) -> None:
    content = KINDS["random"](1 << 18)
    record = inflated(deflated(content, 1), len(content))
    for at in (gap, 2 * gap + 9, 3 * gap + 18):
        assert record.read(at, 9) == content[at : at + 9]
        assert record.read(at + 8, 1) == content[at + 8 : at + 9]  # one byte back


@given(st.sampled_from(ROUND_SIZES[:-14]), st.integers(0, 9), st.sampled_from(sorted(KINDS)), st.data())
def test_reads_anywhere_are_zipfiles(size: int, level: int, kind: str, data: st.DataObject) -> None:
    written = zipped(KINDS[kind](size), level)
    archive = Archive(Buffer("some.zip", written))
    (member,) = archive.members
    record = archive.content(member)
    with ZipFile(io.BytesIO(written)) as expected, expected.open("record") as stream:
        for offset in data.draw(st.lists(st.integers(0, size), max_size=6)):
            nbytes = data.draw(st.integers(0, size - offset))
            stream.seek(offset)
            assert record.read(offset, nbytes) == stream.read(nbytes)
        assert archive.read(member) == expected.read("record")


@given(st.sampled_from(ROUND_SIZES[:100]), st.integers(0, 9), st.sampled_from(sorted(KINDS)), st.data())
def test_a_stream_that_is_cut_or_lies_about_its_size(
    size: int, level: int, kind: str, data: st.DataObject
) -> None:
    packed = deflated(KINDS[kind](size), level)
    lengths = [size - 1, size + 1] if size else [1]
    for stated in lengths:
        with pytest.raises(DamagedCheckpoint, match="inflates to"):
            inflated(packed, stated).read(0, stated)
    cut = data.draw(st.integers(0, len(packed) - 1))
    with pytest.raises(DamagedCheckpoint, match=r"its stream ends after|can't inflate|can't be inflated"):
        inflated(packed[:cut], size).read(0, size)
    with pytest.raises(DamagedCheckpoint, match="inflates to more"):
        inflated(packed + b"\0", size).read(0, size)


def test_arrays_that_numpy_compressed(tmp_path: Path) -> None:
    for power in range(7, 17):
        sizes = [(1 << power) + more for more in (-1, 0, 1)]
        arrays = {f"a{size}": np.full(size, 1.5, np.float32) for size in sizes}
        arrays |= {f"b{size}": np.arange(size, dtype=np.int64) for size in sizes}
        np.savez_compressed(tmp_path / f"{power}.npz", **arrays)
        report = verify(tmp_path / f"{power}.npz")
        assert report.is_valid and not report.findings, (power, report.findings)


def test_what_states_more_than_deflate_can_hold() -> None:
    packed = deflated(bytes(1 << 20), 9)
    with pytest.raises(DamagedCheckpoint, match="can't inflate to the stated size"):
        inflated(packed, MAX_EXPANSION * len(packed) + 1).read_into(0, memoryview(bytearray(1)))


def test_structure_has_a_budget_and_values_have_none(tmp_path: Path) -> None:
    """Zeros are honest, however many; structure that is a thousand times its file is not."""
    path = tmp_path / "zeros.npz"
    np.savez_compressed(path, zeros=np.zeros(70_000_000, np.float32))
    assert verify(path).is_valid  # 280 MB of 272 kB
    archive = Archive(Buffer("some.zip", path.read_bytes()))
    (member,) = archive.members
    with pytest.raises(LimitExceeded, match="besides tensor values"):
        archive.read(member)
    with pytest.raises(LimitExceeded, match="besides tensor values"):
        for _ in range(member.size >> 16):
            archive.content(member).read(0, 1 << 16)


def test_few_streams_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream takes 60 kB, and a zip has room for a record in 80 bytes."""
    monkeypatch.setattr(wire_inflated, "_MAX_STREAMS", 3)
    contents = [random.Random(at).randbytes(300) for at in range(40)]
    packed = [deflated(content, 6) for content in contents]
    inflation = Inflation(Buffer("some.zip", b"".join(packed)))
    starts = [sum(map(len, packed[:at])) for at in range(40)]
    records = [Inflated(inflation, at, len(one), 300, "") for at, one in zip(starts, packed, strict=True)]
    for part in (0, 100, 200):
        for record, content in zip(records, contents, strict=True):
            assert record.read(part, 100) == content[part : part + 100]
            assert sum(one.is_open for one in records) <= 3
