"""Raw Snappy against the library that everybody uses: the same bytes, and the same refusals."""

from __future__ import annotations

import random

import cramjam
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.containers.table import decompress, decompressed_size, first_bytes

REPETITIVE = st.lists(
    st.sampled_from([b"layer_", b"/kernel", b"\0\0", b"ab", b"x"]) | st.binary(max_size=40), max_size=60
).map(b"".join)


def expected(data: bytes) -> bytes | None:
    try:
        return bytes(cramjam.snappy.decompress_raw(data))
    except cramjam.DecompressionError:
        return None


def decompressed(data: bytes) -> bytes | None:
    try:
        return decompress(memoryview(data))
    except ValueError:
        return None


@given(REPETITIVE | st.binary(max_size=5000))
def test_what_was_compressed_comes_back(data: bytes) -> None:
    packed = bytes(cramjam.snappy.compress_raw(data))
    assert decompress(packed) == data
    assert decompressed_size(packed) == len(data)
    assert data.startswith(first_bytes(packed[:16]))


def test_long_literals_and_far_copies() -> None:
    noise = random.Random(1).randbytes(70_000)
    for data in (noise, noise * 2, noise[:300] + b"y" * 70_000 + noise[:300]):
        assert decompress(bytes(cramjam.snappy.compress_raw(data))) == data
    head = first_bytes(bytes(cramjam.snappy.compress_raw(noise))[:16])
    assert len(head) >= 8
    assert noise.startswith(head)


ELEMENTS = [
    (b"\x05\x10abcde", b"abcde"),
    (b"\x05\xf0\x04abcde", b"abcde"),  # the length of a literal in one byte of its own, and in four
    (b"\x05\xfc\x04\0\0\0abcde", b"abcde"),
    (b"\x08\x00a\x0d\x01", b"a" * 8),  # a copy that reaches into itself; offsets of one byte, two, four
    (b"\x08\x04ab\x16\x02\0", b"ab" * 4),
    (b"\x08\x04ab\x17\x02\0\0\0", b"ab" * 4),
    (b"\0", b""),
]


@pytest.mark.parametrize(("packed", "data"), ELEMENTS)
def test_each_kind_of_element(packed: bytes, data: bytes) -> None:
    assert decompress(packed) == expected(packed) == data


HOSTILE = {
    "nothing": b"",
    "a size without an end": b"\xff\xff",
    "fewer bytes than it says": b"\x06\x10abcde",
    "more bytes than it says": b"\x04\x10abcde",
    "a literal beyond the end": b"\x05\x10abc",
    "the length of a literal beyond the end": b"\x05\xfc\x04\0",
    "a copy of nothing": b"\x08\x0d\x01",
    "a copy from before the first byte": b"\x08\x00a\x0d\x02",
    "a copy from where it stands": b"\x08\x00a\x0d\x00",
    "a copy without its offset": b"\x05\x00a\x0e",
    "a copy beyond the size": b"\x03\x00a\xfe\x01\0",
}


@pytest.mark.parametrize("packed", HOSTILE.values(), ids=HOSTILE)
def test_damage_is_refused(packed: bytes) -> None:
    assert expected(packed) is None
    with pytest.raises(ValueError, match="byte"):
        decompress(packed)


@given(REPETITIVE, st.data())
def test_changed_bytes_are_read_as_the_library_reads_them(data: bytes, drawn: st.DataObject) -> None:
    packed = bytearray(cramjam.snappy.compress_raw(data))
    for _ in range(drawn.draw(st.integers(1, 3))):
        packed[drawn.draw(st.integers(0, len(packed) - 1))] = drawn.draw(st.integers(0, 255))
    try:
        size = decompressed_size(b"%b\0" % bytes(packed))
    except ValueError:  # the size itself is damaged
        size = 0
    if size < 1 << 20:  # the library makes room for what is said
        assert decompressed(bytes(packed)) == expected(bytes(packed))
