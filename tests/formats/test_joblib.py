"""Files of joblib are read as what they are: expected values are what joblib dumped."""

from __future__ import annotations

import gzip
import lzma
import os
import pickle
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpttool import CheckpointError, convert, open_checkpoint, verify
from ckpttool.containers.compressed import Decompressed, compression_of
from ckpttool.core.errors import LimitExceeded
from ckpttool.core.readable import Buffer
from tests.support.commands import Run

joblib = pytest.importorskip("joblib")
RND = np.random.default_rng(0)
ARRAYS: dict[str, np.ndarray[Any, Any]] = {
    "rows": np.arange(12.0).reshape(3, 4),
    "columns": np.asfortranarray(RND.normal(size=(5, 7))),
    "big": np.arange(5, dtype=">i4"),
    "empty": np.zeros((0, 3)),
    "scalar": np.array(5.0),
    "complex": np.arange(3) * 1j,
    "bool": np.array([True, False]),
    "large": RND.normal(size=(100, 50)).astype("f4"),
}
OTHERS = {"number": np.float32(3), "text": np.array(["ab", "c"]), "date": np.array(["2026-01-01"], "M8[D]")}
COMPRESSIONS = ["zlib", "gzip", "bz2", "xz", "lzma"]


def values_of(path: Path) -> dict[str, bytes]:
    with open_checkpoint(path) as checkpoint:
        return {one.name: one.tobytes() for one in checkpoint.tensors}


EXPECTED = {name: array.astype(array.dtype.newbyteorder("<")).tobytes() for name, array in ARRAYS.items()}


@pytest.mark.parametrize("options", [{"protocol": number} for number in range(2, 6)], ids=str)
def test_arrays_between_opcodes(options: dict[str, int], tmp_path: Path) -> None:
    joblib.dump({**ARRAYS, **OTHERS}, tmp_path / "a.joblib", **options)
    assert values_of(tmp_path / "a.joblib") == EXPECTED
    verdict = verify(tmp_path / "a.joblib")
    assert verdict.ok and verdict.variant == "joblib"


@pytest.mark.parametrize("method", COMPRESSIONS)
def test_compressed(method: str, tmp_path: Path) -> None:
    joblib.dump({**ARRAYS, **OTHERS}, tmp_path / "a.pkl", compress=(method, 3))
    assert values_of(tmp_path / "a.pkl") == EXPECTED
    verdict = verify(tmp_path / "a.pkl")
    assert verdict.ok and verdict.variant == f"joblib {method}"


def test_a_zfile_of_old(tmp_path: Path) -> None:
    data = pickle.dumps({"w": np.arange(6.0)}, 2)
    header = b"ZF" + hex(len(data)).ljust(len(hex(1 << 64))).encode()
    (tmp_path / "old.pkl").write_bytes(header + zlib.compress(data))
    assert values_of(tmp_path / "old.pkl") == {"w": np.arange(6.0).tobytes()}
    with pytest.warns(DeprecationWarning, match="less than 0.10"):
        assert joblib.load(tmp_path / "old.pkl")["w"].tolist() == [*range(6)]
    (tmp_path / "other.pkl").write_bytes(header.replace(b"0x1", b"0x2", 1) + zlib.compress(data))
    assert not verify(tmp_path / "other.pkl").is_valid


def test_objects_in_an_array_are_a_pickle_of_their_own(tmp_path: Path) -> None:
    joblib.dump({"o": np.array([1, "a", None], object), "after": np.arange(3.0)}, tmp_path / "a.joblib")
    assert values_of(tmp_path / "a.joblib") == {"after": np.arange(3.0).tobytes()}
    verdict = verify(tmp_path / "a.joblib")
    assert (verdict.is_valid, verdict.safety.value) == (True, "unknown")  # ``pickle.load`` mixes up the memos


class Runs:
    def __reduce__(self) -> Any:
        return os.system, ("true",)


@pytest.mark.parametrize("method", [None, *COMPRESSIONS])
@pytest.mark.parametrize(
    "content",
    [{"a": np.arange(3.0), "b": Runs()}, {"o": np.array([Runs()], object)}],
    ids=["behind", "within"],
)
def test_what_it_would_run_is_found(content: object, method: str | None, tmp_path: Path) -> None:
    joblib.dump(content, tmp_path / "a.joblib", compress=0 if method is None else (method, 3))
    verdict = verify(tmp_path / "a.joblib")
    assert (verdict.is_valid, verdict.safety.value) == (True, "unsafe")


class Subclass(np.ndarray):  # type: ignore[type-arg]
    pass


class Stranger:
    def __init__(self) -> None:
        self.coef_ = np.ones(3)


@pytest.mark.parametrize("content", [Stranger(), np.ones(2).view(Subclass)], ids=["object", "subclass"])
def test_objects_are_unknown(content: object, tmp_path: Path) -> None:
    joblib.dump([content], tmp_path / "a.joblib")
    verdict = verify(tmp_path / "a.joblib")
    assert (verdict.is_valid, verdict.safety.value) == (True, "unknown")


def test_arrays_without_padding_are_opcodes_for_pickle(tmp_path: Path) -> None:
    """Before joblib 1.2, elements followed at once: ``pickle.load`` takes them for a program."""
    program = np.frombuffer(b"cposix\nsystem\n(S'true'\ntR.".ljust(32, b"."), "u1")
    joblib.dump([program], tmp_path / "new.joblib", protocol=2)
    data = (tmp_path / "new.joblib").read_bytes()
    at = data.index(b"numpy_array_alignment_bytes") - 5
    end = data.index(program.tobytes())
    marker = data[at : data.index(b"K\x10", at) + 2]
    old = data[:at] + data[at + len(marker) : data.index(b"ub", at) + 2] + data[end:]
    (tmp_path / "old.joblib").write_bytes(old)
    assert values_of(tmp_path / "old.joblib") == {"0": program.tobytes()}
    assert verify(tmp_path / "old.joblib").safety.value == "unsafe"
    assert verify(tmp_path / "new.joblib").safety.value == "safe"


_WRAPPER = (
    b"\x80\x04cjoblib.numpy_pickle\nNumpyArrayWrapper\n)\x81}(X\x05\0\0\0shapeK\x10\x85X\x05\0\0\0orderX\x01\0\0\0C"
    b"X\x05\0\0\0dtypecnumpy\ndtype\nX\x02\0\0\0u1\x89\x88\x87R(K\x03X\x01\0\0\0|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\0tb"
    b"X\x1b\0\0\0numpy_array_alignment_bytesK%cub"
)


@pytest.mark.parametrize(
    ("alignment", "padding"), [(16, b"c"), (99, b"c"), (0, b"c"), (16, b"\x11"), (16, b"\0")]
)
def test_padding_that_pickle_takes_for_opcodes(alignment: int, padding: bytes, tmp_path: Path) -> None:
    """A GLOBAL in the place of the padding's length: ``joblib`` skips what ``pickle`` and ``torch`` run."""
    program = b"posix\nsystem\n(S'true'\ntR."
    data = _WRAPPER % alignment + padding + program.ljust(99, b".") + bytes(16) + b"."
    (tmp_path / "a.pkl").write_bytes(data)
    verdict = verify(tmp_path / "a.pkl")
    assert not verdict.is_valid
    assert (verdict.safety.value == "unsafe") == (padding == b"c")
    with zipfile.ZipFile(tmp_path / "a.pth", "w") as archive:
        archive.writestr("a/data.pkl", data)
        archive.writestr("a/version", "3\n")
    assert not verify(tmp_path / "a.pth").ok


def test_an_array_in_a_frame_is_unsafe(tmp_path: Path) -> None:
    """``joblib`` has read the whole frame, and goes on behind it: the bytes in it are opcodes."""
    wrapper = _WRAPPER.removeprefix(b"\x80\x04").replace(
        b"numpy_array_alignment_bytes", b"numpy_array_alignment_other"
    )
    frame = wrapper % 16 + bytes(16) + b"."
    data = b"\x80\x04\x95" + struct.pack("<Q", len(frame)) + frame + b"N.\xff".ljust(16, b".") + b"N."
    (tmp_path / "a.pkl").write_bytes(data)
    assert verify(tmp_path / "a.pkl").safety.value == "unsafe"


@pytest.mark.parametrize("method", [None, *COMPRESSIONS])
def test_every_cut_is_found(method: str | None, tmp_path: Path) -> None:
    joblib.dump(ARRAYS, tmp_path / "a.joblib", compress=0 if method is None else (method, 3))
    data = (tmp_path / "a.joblib").read_bytes()
    for nbytes in range(64, len(data), len(data) // 25):
        (tmp_path / "cut.joblib").write_bytes(data[:nbytes])
        assert not verify(tmp_path / "cut.joblib").is_valid, nbytes


@pytest.mark.parametrize("method", ["zlib", "gzip", "bz2", "xz"])  # lzma alone has no checksum
def test_every_flip_in_a_stream_is_found_or_harmless(method: str, tmp_path: Path) -> None:
    joblib.dump(ARRAYS, tmp_path / "a.joblib", compress=(method, 3))
    data = (tmp_path / "a.joblib").read_bytes()
    for at in range(12, len(data), len(data) // 40):
        flipped = bytearray(data)
        flipped[at] ^= 0x10
        (tmp_path / "flipped.joblib").write_bytes(flipped)
        try:
            assert values_of(tmp_path / "flipped.joblib") == EXPECTED
        except CheckpointError:
            assert not verify(tmp_path / "flipped.joblib").is_valid


def test_a_bomb_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpttool.containers.compressed._MIN_LIMIT", 1 << 20)
    joblib.dump(np.zeros(1 << 20), tmp_path / "zeros.joblib", compress=("xz", 3))
    with pytest.raises(LimitExceeded, match="expand to more than"):
        open_checkpoint(tmp_path / "zeros.joblib")


@pytest.mark.parametrize("method", ["xz", "lzma"])
def test_memory_of_a_decompressor_is_bounded(method: str, tmp_path: Path) -> None:
    """A dictionary of 1 GiB, which nobody needs who compressed 24 bytes."""
    joblib.dump(np.arange(3.0), tmp_path / "a.joblib", compress=(method, 3))
    data = bytearray((tmp_path / "a.joblib").read_bytes())
    if method == "xz":
        data[16] = 36  # 2 ** (36 / 2 + 12)
        data[20:24] = zlib.crc32(data[12:20]).to_bytes(4, "little")
    else:
        data[1:5] = (1 << 30).to_bytes(4, "little")
    (tmp_path / "a.joblib").write_bytes(data)
    with pytest.raises(LimitExceeded, match=f"{method} needs more than 128 MiB of memory"):
        open_checkpoint(tmp_path / "a.joblib")


@pytest.mark.parametrize("preset", [0, 6, 9])
def test_lzma_has_a_header_but_no_magic(preset: int) -> None:
    data = lzma.compress(b"some bytes", lzma.FORMAT_ALONE, preset=preset)
    compression = compression_of(data)
    assert compression is not None and compression.name == "lzma"
    sized = data[:5] + (10).to_bytes(8, "little") + data[13:]
    assert compression_of(sized) == compression
    others = (
        data[:13],
        data[:1] + (5000).to_bytes(4, "little") + data[5:],  # a dictionary that no encoder makes
        data[:5] + (1 << 50).to_bytes(8, "little") + data[13:],
        data[:13] + b"x" + data[14:],
    )
    assert [compression_of(one) for one in others] == [None] * 4


def test_threads_read_one_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each at another place; going back and forth between them would exceed the limit."""
    monkeypatch.setattr("ckpttool.containers.compressed._MIN_LIMIT", 1 << 20)
    monkeypatch.setattr("ckpttool.containers.compressed._MAX_RESTARTED_A_BYTE", 2)
    monkeypatch.setattr("ckpttool.containers.compressed._KEPT", 1 << 16)
    monkeypatch.setattr("ckpttool.containers.compressed._PIECE", 1 << 16)
    arrays = {f"layer{number}": RND.normal(size=300_000).astype("f4") for number in range(8)}
    joblib.dump(arrays, tmp_path / "a.joblib", compress=("zlib", 1))
    convert(tmp_path / "a.joblib", tmp_path / "a.npz", jobs=4)
    with np.load(tmp_path / "a.npz") as converted:
        assert all(np.array_equal(converted[name], array) for name, array in arrays.items())


def test_reads_anywhere_in_a_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpttool.containers.compressed._KEPT", 5000)
    monkeypatch.setattr("ckpttool.containers.compressed._PIECE", 777)
    content = RND.bytes(100_000)
    stream = Decompressed(Buffer("some.gz", gzip.compress(content)), compression_of(b"\x1f\x8b"))
    windows = [(at, min(3000, len(content) - at)) for at in range(0, len(content), 2000)]
    backwards = [(at, 1500) for at in range(90_000, 0, -9000)]
    for offset, nbytes in [*windows, *backwards, (0, len(content)), (len(content), 0)]:
        assert stream.read(offset, nbytes) == content[offset : offset + nbytes]


def test_limit_of_reading_out_of_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpttool.containers.compressed._MIN_LIMIT", 1 << 20)
    monkeypatch.setattr("ckpttool.containers.compressed._KEPT", 1 << 10)
    monkeypatch.setattr("ckpttool.containers.compressed._PIECE", 1 << 10)
    stream = Decompressed(Buffer("some.gz", gzip.compress(RND.bytes(100_000))), compression_of(b"\x1f\x8b"))
    message = (
        r"decompressed 6,\d{3},\d{3} bytes again from the start \(limit 6,400,000\); arrays are stored out"
    )
    with pytest.raises(LimitExceeded, match=message):
        for offset in (99_000, 0) * 100:
            stream.read(offset, 1)


@pytest.mark.parametrize("method", COMPRESSIONS)
def test_bytes_after_the_stream(method: str, tmp_path: Path) -> None:
    joblib.dump(ARRAYS, tmp_path / "a.joblib", compress=(method, 3))
    with (tmp_path / "a.joblib").open("ab") as file:
        file.write(b"abc")
    found = {one.code: one.message for one in verify(tmp_path / "a.joblib").findings}
    assert found["trailing-bytes"] == "3 extra bytes after the compressed stream"


def test_skops_is_named(tmp_path: Path, run: Run) -> None:
    skops = pytest.importorskip("skops.io")
    skops.dump({"a": np.ones(3)}, tmp_path / "m.skops")
    answer = run("verify", tmp_path / "m.skops")
    assert (
        answer.status == 2 and "a skops file, which ckpttool does not read; use skops.io.load" in answer.err
    )
