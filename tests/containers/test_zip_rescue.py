"""Work and memory of a search for records stay in proportion to the file; no record takes another's share."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest
import torch

from ckpttool import LimitExceeded, salvage
from ckpttool.containers import zip_rescue
from ckpttool.containers.zip_reader import ENTRY, LOCAL, Member
from ckpttool.containers.zip_rescue import rescue_records
from ckpttool.storage.source import Source


def local(name: bytes, crc: int, stored: int, size: int, method: int = 0) -> bytes:
    return LOCAL.pack(b"PK\x03\x04", 20, 0, method, 0, 0x21, crc, stored, size, len(name), 0) + name


def entry(name: bytes, crc: int, stored: int, size: int, method: int = 0) -> bytes:
    fields = (20, 20, 0, method, 0, 0x21, crc, stored, size, len(name), 0, 0, 0, 0, 0, 0)
    return ENTRY.pack(b"PK\x01\x02", *fields) + name


class Counted(Source):
    """A file that counts what is read of it."""

    nbytes = 0

    def read_into(self, offset: int, buffer: memoryview, where: str | None = None) -> None:
        type(self).nbytes += len(buffer)
        super().read_into(offset, buffer, where)


@pytest.mark.parametrize("lengths", [(4096, 0), (1, 60_000)], ids=["names", "extra fields"])
@pytest.mark.parametrize("kind", ["local headers", "entries"])
def test_headers_that_overlap(kind: str, lengths: tuple[int, int], tmp_path: Path) -> None:
    if kind == "entries":
        header = ENTRY.pack(b"PK\x01\x02", 20, 20, 0, 0, 0, 0x21, 7, 5, 5, *lengths, 0, 0, 0, 0, 0)
    else:
        header = LOCAL.pack(b"PK\x03\x04", 20, 0, 0, 0, 0x21, 7, 5, 5, *lengths)
    (tmp_path / "a.zip").write_bytes(header * 4000 + b"a" * 64_000)
    with pytest.raises(LimitExceeded, match="names and extra fields overlap"):
        rescue_records(Source(str(tmp_path / "a.zip")))


def test_entries_that_share_a_damaged_record(tmp_path: Path) -> None:
    content = bytes(1 << 20)
    head = local(b"a", 7, len(content), len(content)) + content
    (tmp_path / "a.zip").write_bytes(head + entry(b"a", 9, len(content), len(content)) * 400)
    Counted.nbytes = 0
    rescue = rescue_records(Counted(str(tmp_path / "a.zip")))
    assert rescue.lost["a"].why == f"CRC-32 is {zlib.crc32(content):08x} instead of 00000009"
    assert Counted.nbytes < 200 * len(content)


def test_entries_that_share_a_record_which_expands(tmp_path: Path) -> None:
    content = bytes(20 << 20)
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    packed = packer.compress(content) + packer.flush()
    stated = (zlib.crc32(content), len(packed), len(content), 8)
    entries = (entry(b"%04d" % number, *stated) for number in range(200))
    (tmp_path / "a.zip").write_bytes(local(b"a", *stated) + packed + b"".join(entries))
    rescue = rescue_records(Source(str(tmp_path / "a.zip")))
    assert 1 <= len(rescue.members) < 20
    assert any("not checked" in one.why for one in rescue.lost.values())


def test_a_large_damaged_record_leaves_trials_for_the_others(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tensors = {f"layer{number}": torch.randn(1_500_000) for number in range(3)}
    torch.save(tensors, tmp_path / "a.pth")
    data = bytearray((tmp_path / "a.pth").read_bytes())
    data[len(data) * 5 // 6] ^= 1
    (tmp_path / "a.pth").write_bytes(data[:-60])
    salvage(tmp_path / "a.pth", tmp_path / "saved.pth")
    saved = torch.load(tmp_path / "saved.pth")
    assert saved.keys() == {"layer0", "layer1"}
    assert all(torch.equal(saved[name], tensors[name]) for name in saved)


def test_records_that_lie_in_each_other(tmp_path: Path) -> None:
    (tmp_path / "a.zip").write_bytes(bytes(1000))
    search = zip_rescue._Search(Source(str(tmp_path / "a.zip")))
    for start, end in ((100, 500), (200, 300), (600, 700), (450, 550), (250, 260)):
        search._place(Member("", b"", 0, 0, 0, (0, 0), 0, end - start, end - start, start, start))
    taken = [at for at in range(0, 1000, 50) if search._is_in_record(at)]
    assert taken == [*range(100, 550, 50), 600, 650]
