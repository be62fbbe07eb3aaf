"""Tables of keys and values: whole, in pieces, and damaged in every way that can be told."""

from __future__ import annotations

import random
import struct
from pathlib import Path
from types import ModuleType

import google_crc32c
import pytest

from ckpttool.errors import CheckpointError, DamagedCheckpoint, LimitExceeded, MissingPackage
from ckpttool.wire.crc import crc32c, masked, unmasked
from ckpttool.wire.scan import combined_crc32
from ckpttool.wire.source import Source
from ckpttool.wire.sstable import Table

WORDS = {f"key-{number:03}".encode(): bytes([number % 256]) * (number % 40) for number in range(60)}


def read(path: Path) -> dict[bytes, bytes]:
    with Source(path) as source:
        return {entry.key: bytes(entry.value) for entry in Table(source).entries()}


def written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def test_masks_are_undone() -> None:
    assert crc32c(b"123456789") == 0xE3069283  # RFC 3720, B.4
    assert masked(crc32c(b"")) == 0xA282EAD8
    assert all(unmasked(masked(crc)) == crc for crc in (0, 1, 0xFFFFFFFF, 0xE3069283))


def test_checksums_of_pieces_combine() -> None:
    data = random.Random(1).randbytes(5000)
    for cut in (0, 1, 17, 4096, 5000):
        first, second = google_crc32c.value(data[:cut]), google_crc32c.value(data[cut:])
        whole = combined_crc32(first, second, len(data) - cut, 0x82F63B78)
        assert whole == google_crc32c.value(data)


def test_keys_of_several_blocks(raw: ModuleType, tmp_path: Path) -> None:
    names = list(WORDS)
    halves = [{name: WORDS[name] for name in half} for half in (names[:25], names[25:])]
    path = written(tmp_path / "t", raw.table(*halves))
    assert read(path) == WORDS
    with Source(path) as source:
        table = Table(source)
        for name, value in WORDS.items():
            found = table.find(name)
            assert found is not None
            assert bytes(found[1]) == value
        assert table.find(b"key-0005") is None
        assert table.find(b"zzz") is None


def test_keys_that_share_a_start(raw: ModuleType, tmp_path: Path) -> None:
    entries = raw.entry(b"model/a", b"1") + bytes([6, 1, 1]) + b"b2" + bytes([3, 1, 0]) + b"x"
    assert read(written(tmp_path / "t", raw.table(raw.block(entries)))) == {
        b"model/a": b"1",
        b"model/b": b"2",
        b"modx": b"",
    }


def test_what_the_framework_wrote(files: Path) -> None:
    for path in sorted(files.glob("tensorflow/*/*.index")):
        assert b"" in read(path), path


def test_snappy(raw: ModuleType, tmp_path: Path) -> None:
    cramjam = pytest.importorskip("cramjam")
    block = raw.block(raw.entry(b"a", b"x" * 500))
    squeezed = bytes(cramjam.snappy.compress_raw(block))
    path = written(tmp_path / "t", _typed(raw, squeezed, 1))
    assert read(path) == {b"a": b"x" * 500}
    written(path, _typed(raw, b"\xff" * 9, 1))
    with pytest.raises(DamagedCheckpoint):
        read(path)
    written(path, _typed(raw, raw.varint(1 << 40) + b"bomb", 1))
    with pytest.raises(LimitExceeded):
        read(path)


def test_snappy_without_its_package(raw: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "cramjam", None)
    path = written(tmp_path / "t", _typed(raw, b"", 1))
    with pytest.raises(MissingPackage, match="pip install cramjam"):
        read(path)


def _typed(raw: ModuleType, contents: bytes, kind: int) -> bytes:
    """Return a table of one block of a kind; its index blocks are plain."""
    data = contents + raw.trailer(contents, kind)
    meta = raw.block(b"")
    index = raw.block(raw.entry(b"z", raw.varint(0) + raw.varint(len(contents))))
    places = raw.varint(len(data)) + raw.varint(len(meta))
    data += meta + raw.trailer(meta)
    places += raw.varint(len(data)) + raw.varint(len(index))
    data += index + raw.trailer(index)
    return bytes(data + places.ljust(40, b"\0") + raw.MAGIC)


def test_an_unknown_compression(raw: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(DamagedCheckpoint, match="compression type 7"):
        read(written(tmp_path / "t", _typed(raw, b"", 7)))


@pytest.mark.parametrize(
    ("entries", "restarts", "said"),
    [
        (b"\x05\x01\x00x", (0,), "doesn't fit"),
        (b"\x00\x01\x7fx", (0,), "doesn't fit"),
        (b"\x00\x01\x00b\x00\x01\x00a", (0,), "out of order"),
        (b"\x00\x01\x00b\x00\x01\x00b", (0,), "out of order"),
        (b"\x80\x00\x01\x00b", (0,), "longer than it has to be"),
        (b"\x00\x01\x00b", (1,), "restart"),
        (b"\x00\x01\x00b", (0, 9), "restart"),
        (b"\x00\x01\x00b", (0, 0), "restart"),
        (b"\x80", (0,), "varint"),
    ],
)
def test_a_block_that_contradicts_itself(
    raw: ModuleType, tmp_path: Path, entries: bytes, restarts: tuple[int, ...], said: str
) -> None:
    with pytest.raises(DamagedCheckpoint, match=said):
        read(written(tmp_path / "t", raw.table(raw.block(entries, restarts))))


def test_more_restarts_than_bytes(raw: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(DamagedCheckpoint, match="restart points"):
        read(written(tmp_path / "t", raw.table(struct.pack("<II", 0, 1 << 30))))


def test_every_bit_counts(raw: ModuleType, tmp_path: Path) -> None:
    """Each byte is covered by a checksum, has to be zero, or has one spelling only."""
    halves = [{b"": b"x", b"a": b"yy"}, {b"b": b"z" * 20}]
    data = raw.table(*halves)
    for at in range(len(data)):
        for bit in range(8):
            broken = bytearray(data)
            broken[at] ^= 1 << bit
            with pytest.raises(CheckpointError):
                read(written(tmp_path / "t", bytes(broken)))


def test_every_cut(raw: ModuleType, tmp_path: Path) -> None:
    data = raw.table(WORDS)
    for nbytes in range(len(data)):
        with pytest.raises(CheckpointError):
            read(written(tmp_path / "t", data[:nbytes]))


def test_what_lies_in_front_or_between(raw: ModuleType, tmp_path: Path) -> None:
    data = raw.table(WORDS)
    for broken in (b"garbage" + data, data + data, data + b"\0", data[:-48] + b"\0" + data[-48:]):
        with pytest.raises(DamagedCheckpoint):
            read(written(tmp_path / "t", broken))
