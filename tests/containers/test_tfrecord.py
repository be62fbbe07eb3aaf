"""TFRecord files: what is read of them, and what is said of those that are damaged or still written."""

from __future__ import annotations

import io
import struct
from pathlib import Path

import google_crc32c
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool import CheckpointError, DamagedCheckpoint, Truncated
from ckpttool.containers import tfrecord
from ckpttool.containers.tfrecord import is_record_head, records


def _sum(data: bytes) -> bytes:
    crc = google_crc32c.value(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def packed(*all_data: bytes) -> bytes:
    """Return records as TensorFlow's RecordWriter lays them out."""
    heads = [(struct.pack("<Q", len(data)), data) for data in all_data]
    return b"".join(head + _sum(head) + data + _sum(data) for head, data in heads)


def read(data: bytes) -> list[tuple[int, bytes | None]]:
    return list(records(io.BytesIO(data), "log"))


@given(st.lists(st.binary(max_size=40), max_size=5))
def test_reads_what_was_written(written: list[bytes]) -> None:
    assert [data for _, data in read(packed(*written))] == written


def test_reads_what_tensorboard_wrote(files: Path) -> None:
    path = files / "metrics" / "torch" / "events.out.tfevents.1.torch"
    whole = path.read_bytes()
    found = read(whole)
    assert packed(*(data for _, data in found if data is not None)) == whole
    assert is_record_head(whole[:12]) and not is_record_head(b"epoch,loss\n0") and not is_record_head(b"")


def test_tells_where_each_record_lies() -> None:
    assert read(packed(b"one", b"", b"three")) == [(0, b"one"), (19, b""), (35, b"three")]


@pytest.mark.parametrize("size", range(1, 38))
def test_one_that_is_still_written_is_read_up_to_there(size: int) -> None:
    whole = packed(b"one", b"two")
    found = []
    if size == 19:  # just one record
        assert read(whole[:size]) == [(0, b"one")]
        return
    with pytest.raises(Truncated) as failure:
        for _, content in records(io.BytesIO(whole[:size]), "log"):
            found.append(content)
    assert found == [b"one"] * (size > 19)
    assert failure.value.where == f"byte {0 if size < 19 else 19}"


@pytest.mark.parametrize("at", range(38))
def test_any_flipped_byte_is_told(at: int) -> None:
    whole = bytearray(packed(b"one", b"two"))
    whole[at] ^= 0x10
    with pytest.raises(DamagedCheckpoint) as failure:
        read(bytes(whole))
    assert failure.value.where == f"byte {at // 19 * 19}"


def test_large_records_are_checked_and_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tfrecord, "MAX_RECORD", 8)
    monkeypatch.setattr(tfrecord, "_BLOCK", 3)
    whole = packed(b"a larger one", b"small")
    assert read(whole) == [(0, None), (28, b"small")]
    with pytest.raises(DamagedCheckpoint):
        read(whole.replace(b"larger", b"longer"))


def test_length_that_lies_asks_for_no_memory() -> None:
    head = struct.pack("<Q", 1 << 62)
    with pytest.raises(Truncated):
        read(head + _sum(head) + b"x" * 100)


@given(st.binary(max_size=80))
def test_any_bytes_give_records_or_an_error(data: bytes) -> None:
    try:
        read(data)
    except CheckpointError as failure:
        assert failure.path == "log" and failure.where is not None
