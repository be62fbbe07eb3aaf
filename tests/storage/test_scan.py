"""The pass over a file: checksums against zlib, values against NumPy and ml_dtypes."""

from __future__ import annotations

import zlib
from typing import Literal

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool import Truncated
from ckpttool.core.dtypes import BY_NAME, DType
from ckpttool.core.readable import Buffer, reader_from
from ckpttool.core.tensor import Extent, Span
from ckpttool.core.values import in_memory
from ckpttool.storage import scan as under_test
from ckpttool.storage.checksums import combined_crc32
from ckpttool.storage.scan import count_specials, scan
from tests.support.faults import ends_all_threads, interrupt_hand_out

NARROW = [dtype for dtype in BY_NAME.values() if dtype.float_code is not None and dtype.word_bytes <= 2]
WIDE = [dtype for dtype in BY_NAME.values() if dtype.float_code is not None and dtype.word_bytes > 2]
ORDERS: tuple[Literal["little", "big"], ...] = ("little", "big")


def span(
    data: bytes,
    dtype: DType | None = None,
    crc32: int | None = None,
    byteorder: Literal["little", "big"] = "little",
    offset: int = 0,
) -> Span:
    buffer = Buffer("x", data)
    return Span(Extent("x", offset, len(data)), "record", reader_from(buffer, 0), crc32, dtype, byteorder)


def real_type(dtype: DType) -> np.dtype:
    """Return NumPy's or ml_dtypes' type; of a complex type that they lack, the type of its halves."""
    if dtype.name == "complex32":
        return np.dtype("float16")
    name = dtype.numpy or dtype.name
    return np.dtype(getattr(ml_dtypes, name, None) or name)


def specials(words: np.ndarray, dtype: DType) -> tuple[np.ndarray, np.ndarray]:
    """Say which words are NaN, and which infinite, as NumPy and ml_dtypes see them."""
    kind = real_type(dtype)
    half = {"complex64": np.dtype("f4"), "complex128": np.dtype("f8")}.get(dtype.name, kind)
    with np.errstate(all="ignore"):
        numbers = words.view(half).astype("f8")
    return np.isnan(numbers), np.isinf(numbers)


# Checksums ------------------------------------------------------------------------------------------


@given(st.binary(max_size=200), st.binary(max_size=200))
def test_checksums_combine_as_zlib_computes_them(first: bytes, second: bytes) -> None:
    combined = combined_crc32(zlib.crc32(first), zlib.crc32(second), len(second))
    assert combined == zlib.crc32(first + second)


@pytest.mark.parametrize("nbytes", [0, 1, 255, 256, 1 << 16, (1 << 20) + 7])
def test_checksums_of_long_tails_combine(nbytes: int) -> None:
    first, second = b"head", bytes(nbytes)
    assert combined_crc32(zlib.crc32(first), zlib.crc32(second), nbytes) == zlib.crc32(first + second)


@given(st.lists(st.binary(max_size=500), max_size=6), st.integers(1, 4), st.integers(1, 8))
def test_pieces_and_threads_make_no_difference(records: list[bytes], jobs: int, words: int) -> None:
    spans = [span(data, crc32=zlib.crc32(data)) for data in records]
    done: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(under_test, "PIECE_BYTES", 16 * words)
        patch.setattr(under_test, "CHUNK_BYTES", 16)
        results = scan(spans, jobs=jobs, advance=done.append)
    assert [result.crc32 for result in results] == [zlib.crc32(data) for data in records]
    assert all(result.matches for result in results)
    assert sum(done) == sum(map(len, records))


@given(st.binary(min_size=1, max_size=300), st.data())
def test_any_flipped_bit_is_seen(data: bytes, draw: st.DataObject) -> None:
    at = draw.draw(st.integers(0, len(data) * 8 - 1))
    changed = bytearray(data)
    changed[at // 8] ^= 1 << at % 8
    (result,) = scan([span(bytes(changed), crc32=zlib.crc32(data))], jobs=1)
    assert not result.matches


def test_span_without_checksum_matches() -> None:
    (result,) = scan([span(b"abc")], jobs=1)
    assert result.matches


def test_empty_span_has_checksum_0() -> None:
    (result,) = scan([span(b"", BY_NAME["float32"], crc32=0)], jobs=3)
    assert (result.crc32, result.matches, result.is_suspicious) == (0, True, False)


def test_checksums_can_be_left_out() -> None:
    (result,) = scan([span(b"abc", crc32=1)], jobs=1, checksum=False)
    assert result.failure is None
    assert scan([], jobs=4) == []


def test_failed_read_is_kept_with_its_span() -> None:
    def fail(offset: int, buffer: memoryview) -> None:
        raise Truncated("x", "gone")

    broken = Span(Extent("x", 0, 100), "record", fail, 1)
    results = scan([broken, span(b"abc", crc32=zlib.crc32(b"abc"))], jobs=2)
    assert isinstance(results[0].failure, Truncated) and results[0].crc32 is None
    assert results[1].matches and results[1].failure is None


def test_any_other_error_reaches_the_caller() -> None:
    def fail(offset: int, buffer: memoryview) -> None:
        raise KeyboardInterrupt

    broken = [Span(Extent("x", 0, 100), "record", fail, 1) for _ in range(8)]
    with ends_all_threads():
        scan(broken, jobs=4)


def test_an_interrupt_between_two_tasks_ends_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt_hand_out(monkeypatch, under_test)
    with ends_all_threads():
        scan([span(b"abc")], jobs=2)


# Values ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_every_pattern_of_narrow_types_is_judged_as_the_real_type_does(dtype: DType) -> None:
    words = np.arange(1 << 8 * dtype.word_bytes, dtype=f"<u{dtype.word_bytes}")
    nan, infinite = specials(words, dtype)
    assert count_specials(in_memory(words.tobytes()), dtype)[:2] == (nan.sum(), infinite.sum())
    for word in words[nan | infinite]:
        assert count_specials(in_memory(word.tobytes()), dtype)[:2] != (0, 0)


@pytest.mark.parametrize("byteorder", ORDERS)
@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_every_pattern_of_narrow_types_is_suspected_rightly(
    dtype: DType, byteorder: Literal["little", "big"]
) -> None:
    words = np.arange(1 << 8 * dtype.word_bytes, dtype=f"<u{dtype.word_bytes}")
    nan, infinite = specials(words, dtype)
    stored = words.byteswap() if byteorder == "big" and dtype.word_bytes > 1 else words
    spans = [span(word.tobytes(), dtype, byteorder=byteorder) for word in stored]
    chosen = range(0, len(spans), max(1, len(spans) // 512))
    results = scan([spans[at] for at in chosen], jobs=1)
    assert [result.is_suspicious for result in results] == [(nan | infinite)[at] for at in chosen]
    (clean,) = scan([span(stored[~(nan | infinite)].tobytes(), dtype, byteorder=byteorder)], jobs=1)
    assert not clean.is_suspicious
    bad = [span(word.tobytes(), dtype, byteorder=byteorder) for word in stored[nan | infinite]]
    assert all(result.is_suspicious for result in scan(bad, jobs=1))


WORDS = st.one_of(
    st.integers(0, (1 << 64) - 1),
    st.sampled_from(
        [
            0x7F800000,
            0x7F800001,
            0xFF800000,
            0x7FFFFFFF,
            0x7F7FFFFF,
            0x80000000,
            0x7FF0 << 48,
            (0x7FF0 << 48) + 1,
            0xFFF0 << 48,
            (1 << 64) - 1,
            0x7FEF << 48,
        ]
    ),
)


@pytest.mark.parametrize("byteorder", ORDERS)
@pytest.mark.parametrize("dtype", WIDE, ids=str)
@given(drawn=st.lists(WORDS, min_size=1, max_size=20))
def test_wide_types_are_judged_as_numpy_does(
    dtype: DType, byteorder: Literal["little", "big"], drawn: list[int]
) -> None:
    width = dtype.word_bytes
    words = np.array([word & ((1 << 8 * width) - 1) for word in drawn], f"<u{width}")
    words = np.resize(words, len(words) + len(words) % 2)
    nan, infinite = specials(words, dtype)
    assert count_specials(in_memory(words.tobytes()), dtype)[:2] == (nan.sum(), infinite.sum())
    stored = words.byteswap() if byteorder == "big" else words
    (result,) = scan([span(stored.tobytes(), dtype, byteorder=byteorder)], jobs=1)
    assert result.is_suspicious == bool((nan | infinite).any())


def test_one_bad_value_in_many_is_seen_wherever_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(under_test, "PIECE_BYTES", 256)
    monkeypatch.setattr(under_test, "CHUNK_BYTES", 64)
    for at in range(0, 200, 7):
        values = np.ones(200, "<f4")
        values[at] = np.nan
        (result,) = scan([span(values.tobytes(), BY_NAME["float32"])], jobs=3)
        assert result.is_suspicious, at


def test_buffer_keeps_nothing_of_the_span_before() -> None:
    """A short clean span behind a long one with NaN is clean."""
    bad, clean = np.full(1000, np.nan, "<f4"), np.ones(3, "<f4")
    spans = [span(data.tobytes(), BY_NAME["float32"]) for data in (bad, clean)]
    assert [result.is_suspicious for result in scan(spans, jobs=1)] == [True, False]


@pytest.mark.parametrize("name", ["int64", "uint8", "bool", "qint8", "bits8"])
def test_what_is_no_float_is_never_suspicious(name: str) -> None:
    data = b"\xff" * 64
    (result,) = scan([span(data, BY_NAME[name])], jobs=1)
    assert not result.is_suspicious
    assert count_specials(in_memory(data), BY_NAME[name]) == (0, 0, None)


def test_values_can_be_left_out() -> None:
    data = np.full(4, np.nan, "<f4").tobytes()
    (result,) = scan([span(data, BY_NAME["float32"], crc32=zlib.crc32(data))], jobs=1, values=False)
    assert (result.is_suspicious, result.matches) == (False, True)
