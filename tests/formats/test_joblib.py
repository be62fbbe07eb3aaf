"""Files of joblib are read as what they are: expected values are what joblib dumped."""

from __future__ import annotations

import os
import pickle
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpttool import CheckpointError, open_checkpoint, verify
from ckpttool.core.errors import LimitExceeded
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
    monkeypatch.setattr("ckpttool.io.compressed._MIN_LIMIT", 1 << 20)
    joblib.dump(np.zeros(1 << 20), tmp_path / "zeros.joblib", compress=("xz", 3))
    with pytest.raises(LimitExceeded, match="expand to more than"):
        open_checkpoint(tmp_path / "zeros.joblib")


def test_skops_is_named(tmp_path: Path, run: Run) -> None:
    skops = pytest.importorskip("skops.io")
    skops.dump({"a": np.ones(3)}, tmp_path / "m.skops")
    answer = run("verify", tmp_path / "m.skops")
    assert (
        answer.status == 2 and "a skops file, which ckpttool does not read; use skops.io.load" in answer.err
    )
