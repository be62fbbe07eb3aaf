"""Plain pickles: what is recognised as one, and arrays in every spelling."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pytest

from ckpttool import CheckpointError, DamagedCheckpoint, LimitExceeded, open_checkpoint, verify
from ckpttool.testing import places
from tests.support.limits import lower_limits
from tests.support.opening import format_class_of
from tests.support.thorough import spread

PROTOCOLS = pytest.mark.parametrize("protocol", range(6))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "some.pkl"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x80",
        b"\x80\2",
        b"(",
        b"(the beginning of a text\n",
        b"c\n" * 1000,
        b"]" * 5000,
        b"{'a': 1}",
        b"[1, 2]",
        pickle.dumps(7, 0),
        pickle.dumps("text", 0),
        pickle.dumps({"a": 1}, 0) + b"more",
        b"\x80\2" + (1 << 16).to_bytes(6, "little") + b'{"a":1}',
        (0x280).to_bytes(8, "little") + b'{"__metadata__":{}}'.ljust(0x280),
    ],
)
def test_what_is_no_pickle(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    assert format_class_of(path) != "PlainPickle"


@pytest.mark.parametrize(
    "content", [{}, [], (), {"a": 1}, [1], (1, "b"), {1, 2}, np.float64(1), 7, "text", None]
)
@PROTOCOLS
def test_what_is_one(path: Path, content: object, protocol: int) -> None:
    """Without a header, which protocols 0 and 1 lack, a lone number or text is not enough."""
    path.write_bytes(pickle.dumps(content, protocol))
    is_alone = type(content) in (int, str, type(None))
    assert (format_class_of(path) == "PlainPickle") is (protocol >= 2 or not is_alone)


def test_several_pickles_become_a_list(path: Path) -> None:
    path.write_bytes(b"".join(pickle.dumps({"epoch": epoch, "w": np.arange(epoch)}) for epoch in (1, 2)))
    with open_checkpoint(path) as checkpoint:
        assert [tensor.path for tensor in checkpoint.tensors] == [(0, "w"), (1, "w")]
        assert checkpoint.findings == ()


@pytest.mark.parametrize("tail", [b"x", b"\0", b"\x80\4", pickle.dumps([1])[:-1]])
def test_bytes_behind_the_last_pickle(path: Path, tail: bytes) -> None:
    path.write_bytes(pickle.dumps({"a": 1}) + tail)
    with open_checkpoint(path) as checkpoint:
        assert [finding.code for finding in checkpoint.findings] == ["trailing-bytes"]


def test_what_a_broken_pickle_behind_the_first_would_run(path: Path) -> None:
    path.write_bytes(pickle.dumps({"a": 1}) + b"\x80\2cos\nsystem\nX\4\0\0\0true\x85R")
    with open_checkpoint(path) as checkpoint:
        assert {finding.code for finding in checkpoint.safety} == {"unsafe-import"}


ARRAYS = {
    "empty": np.zeros((0, 3), np.float32),
    "scalar": np.array(2.5),
    "big endian": np.arange(5, dtype=">f8"),
    "fortran": np.asfortranarray(np.arange(12, dtype=np.int16).reshape(3, 4)),
    "transposed": np.arange(24).reshape(2, 3, 4).transpose(2, 0, 1),
    "high bytes": np.arange(256, dtype=np.uint8),
    "complex": np.array([1 + 2j, -3j], np.complex64),
    "half": np.array([0.5, np.inf], np.float16),
    "bool": np.array([[True], [False]]),
    "large": np.arange(70_000, dtype=np.uint16).reshape(100, 700),
    "large fortran": np.asfortranarray(np.linspace(-1, 1, 20_000).reshape(100, 200)),
    "large big endian fortran": np.asfortranarray(np.arange(30_000, dtype=">i4").reshape(100, 300)),
    "not contiguous": np.arange(20.0)[::3],
}


@PROTOCOLS
@pytest.mark.parametrize("name", ARRAYS)
def test_arrays(path: Path, protocol: int, name: str) -> None:
    array = ARRAYS[name]
    path.write_bytes(pickle.dumps({"a": array}, protocol))
    with open_checkpoint(path) as checkpoint:
        tensor = checkpoint["a"]
        assert tensor.shape == array.shape
        expected = array.astype(array.dtype.newbyteorder("<")).tobytes()
        for limit in (16, 4096, 1 << 20):
            assert b"".join(bytes(block) for block in tensor.blocks(limit)) == expected
        assert checkpoint.findings == checkpoint.safety == ()


@PROTOCOLS
def test_arrays_that_hold_no_numbers_are_described(path: Path, protocol: int) -> None:
    odd = {
        "text": np.array(["ab", "c"]),
        "bytes": np.array([b"ab"]),
        "records": np.zeros(2, [("x", "f4"), ("y", "i2")]),
        "dates": np.array(["2020-01-01"], "M8[D]"),
        "long": np.zeros(2, np.longdouble),
    }
    path.write_bytes(pickle.dumps(odd, protocol))
    with open_checkpoint(path) as checkpoint:
        assert not checkpoint.tensors
        assert all("NumPy array" in str(checkpoint.metadata[name]) for name in odd)


@PROTOCOLS
def test_arrays_of_objects_are_walked(path: Path, protocol: int) -> None:
    held = np.empty(2, object)
    held[0], held[1] = np.arange(3.0), "word"
    path.write_bytes(pickle.dumps({"o": held}, protocol))
    with open_checkpoint(path) as checkpoint:
        assert checkpoint["o.0"].tobytes() == np.arange(3.0).tobytes()
        assert checkpoint.metadata["o"]["1"] == "word"


@PROTOCOLS
def test_masked_arrays_have_a_mask(path: Path, protocol: int) -> None:
    path.write_bytes(pickle.dumps({"m": np.ma.array([1.0, 2.0], mask=[0, 1])}, protocol))
    with open_checkpoint(path) as checkpoint:
        assert checkpoint["m"].tobytes() == np.array([1.0, 2.0]).tobytes()
        assert checkpoint["m.mask"].tobytes() == b"\0\1"


@PROTOCOLS
def test_states_of_generators_hold_arrays(path: Path, protocol: int) -> None:
    state = np.random.RandomState(3)
    path.write_bytes(pickle.dumps({"rng": state}, protocol))
    with open_checkpoint(path) as checkpoint:
        keys = state.get_state(legacy=False)["state"]["key"]
        assert checkpoint["rng.state.key"].tobytes() == keys.tobytes()


RECONSTRUCT = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\0tU\1btR"
ARRAY = (
    b"\x80\2"
    + RECONSTRUCT
    + b"(K\1(K\2tcnumpy\ndtype\n(U\2f4K\0K\1tR(K\3U\1<NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\0tb\x89%stb."
)


def test_arrays_of_python_2(path: Path) -> None:
    path.write_bytes(ARRAY % b"U\x08\0\0\x80\x3f\0\0\0\xc0")
    with open_checkpoint(path) as checkpoint:
        assert checkpoint["tensor"].tobytes() == np.array([1, -2], np.float32).tobytes()


@pytest.mark.parametrize(
    "data", [b"U\x07\0\0\0\0\0\0\0", b"U\x09" + bytes(9), b"N", b"K\1", b"X\2\0\0\0\xc4\x80", b"}"]
)
def test_arrays_whose_bytes_are_others(path: Path, data: bytes) -> None:
    path.write_bytes(ARRAY % data)
    with pytest.raises(DamagedCheckpoint) as caught:
        open_checkpoint(path)
    assert caught.value.code == "tensor-damaged"


@pytest.mark.parametrize("text", ["ÿ" * 79_999 + "Ā", "ÿ" * 79_999, "ÿ" * 80_001])
def test_long_arrays_as_text_that_are_others(path: Path, text: str) -> None:
    """What is too long to be decoded when the file is opened fails when it is read."""
    content = pickle.dumps({"a": np.full(80_000, 255, np.uint8)}, 2)
    spelled = text.encode()
    old = ("ÿ" * 80_000).encode()
    assert content.count(old) == 1
    head, _, tail = content.partition(old)
    path.write_bytes(head[:-4] + len(spelled).to_bytes(4, "little") + spelled + tail)
    with pytest.raises(DamagedCheckpoint), open_checkpoint(path) as checkpoint:
        checkpoint["a"].tobytes()


def test_references_to_what_is_not_in_the_file(path: Path) -> None:
    path.write_bytes(b"\x80\2}X\1\0\0\0aK\7Qs.")
    with open_checkpoint(path) as checkpoint:
        assert [finding.code for finding in checkpoint.findings] == ["outside-reference"]
        assert checkpoint.metadata == {"a": "<a reference to 7>"}


def test_the_object_of_a_zip_without_its_storages(path: Path, files: Path) -> None:
    from zipfile import ZipFile

    with ZipFile(files / "pytorch" / "guide.pth") as archive:
        path.write_bytes(archive.read("guide/data.pkl"))
    with pytest.raises(DamagedCheckpoint) as caught:
        open_checkpoint(path)
    assert caught.value.code == "storage-missing"


def test_shared_objects_that_multiply(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lower_limits(monkeypatch, repeats=1000)
    laughs: list[object] = []
    for _ in range(60):
        laughs = [laughs, laughs]
    path.write_bytes(pickle.dumps({"a": laughs}))
    with pytest.raises(LimitExceeded):
        open_checkpoint(path)


@pytest.mark.parametrize(
    "opcodes",
    [
        b"}X\1\0\0\0a" + b"ctorch._utils\n_rebuild_parameter\n" * 5000 + b"N" + b"\x85R" * 5000 + b"s",
        b"]" * 100_000 + b"a" * 99_999,
    ],
)
def test_nesting_is_bounded(path: Path, opcodes: bytes) -> None:
    path.write_bytes(b"\x80\2" + opcodes + b".")
    with pytest.raises(LimitExceeded):
        open_checkpoint(path)


@pytest.mark.parametrize("name", [f"protocol{protocol}.pkl" for protocol in range(6)])
def test_any_flipped_or_missing_byte_is_answered(files: Path, path: Path, name: str) -> None:
    whole = (files / "pickle" / name).read_bytes()
    for at in spread(sorted(places(files / "pickle" / name, set())), 40):
        flipped = bytearray(whole)
        flipped[at] ^= 1 << at % 8
        for content in (whole[:at], bytes(flipped)):
            path.write_bytes(content)
            try:
                with open_checkpoint(path) as checkpoint:
                    assert all(len(tensor.tobytes()) == tensor.nbytes for tensor in checkpoint.tensors)
                    json.dumps(checkpoint.metadata)
            except CheckpointError:
                pass


@pytest.mark.framework
@PROTOCOLS
def test_tensors_pickled_without_torch_save(path: Path, protocol: int) -> None:
    torch = pytest.importorskip("torch")
    saved = {"w": torch.randn(3, 4), "t": torch.randn(200, 200).t(), "b": torch.ones(2, dtype=torch.bfloat16)}
    path.write_bytes(pickle.dumps(saved, protocol))
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.producer.framework == "pytorch"
        for name, tensor in saved.items():
            raw = tensor.contiguous().view(torch.uint8).numpy().tobytes()
            assert checkpoint[name].tobytes() == raw


@pytest.mark.framework
def test_pickles_inside_tensors_are_judged(path: Path) -> None:
    """The storage of a tensor lies in the pickle as a file of its own, which loading would run as well."""
    torch = pytest.importorskip("torch")
    whole = pickle.dumps({"w": torch.ones(100)}, 4)  # so that the storage takes more than 255 bytes
    honest = pickle.dumps(1001, 2)
    assert whole.count(honest) == 1
    evil = b"\x80\2cos\nsystem\n."
    at = whole.index(honest)
    inner = whole.rindex(b"B", 0, at)  # the opcode of the bytes that the storage lies in
    length = int.from_bytes(whole[inner + 1 : inner + 5], "little") + len(evil) - len(honest)
    path.write_bytes(
        whole[:2]
        + whole[11 : inner + 1]
        + length.to_bytes(4, "little")
        + whole[inner + 5 : at]
        + evil
        + whole[at + len(honest) :]
    )
    with pytest.raises(DamagedCheckpoint) as caught:
        open_checkpoint(path)
    assert "loading it would import os.system" in {finding.message for finding in caught.value.safety}


class _DType:
    """A NumPy type that is pickled with another name, or another version of its state."""

    def __init__(self, name: str, version: int) -> None:
        self._name, self._version = name, version

    def __reduce__(self) -> tuple[object, ...]:
        return np.dtype, (self._name, False, True), (self._version, "<", None, None, None, -1, -1, 0)


class _Array:
    def __init__(self, dtype: _DType, version: int) -> None:
        self._dtype, self._version = dtype, version

    def __reduce__(self) -> tuple[object, ...]:
        function, arguments, _ = np.zeros(2, "<f8").__reduce__()
        return function, arguments, (self._version, (2,), self._dtype, False, bytes(16))


@pytest.mark.parametrize(
    ("name", "version", "of_array"),
    [("f8", version, 1) for version in (-1, 0, 3, 4, 5, 35)]
    + [(name, 3, 1) for name in ("f9", "b8", "v8", "i0", "c16")]
    + [("f8", 3, version) for version in (-1, 0, 2, 9)],
)
def test_arrays_that_numpy_refuses(name: str, version: int, of_array: int, tmp_path: Path) -> None:
    path = tmp_path / "a.pkl"
    path.write_bytes(pickle.dumps({"w": _Array(_DType(name, version), of_array)}))
    try:
        loaded = pickle.loads(path.read_bytes())["w"]
    except (TypeError, ValueError):
        assert not verify(path).is_valid
    else:
        with open_checkpoint(path) as opened:
            assert opened["w"].shape == loaded.shape
