"""NumPy's files: headers that are wrong in every way, objects, and what is no tensor."""

from __future__ import annotations

import io
import pickle
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpttool import (
    DamagedCheckpoint,
    LimitExceeded,
    NotACheckpoint,
    Safety,
    Truncated,
    open_checkpoint,
    verify,
)
from tests.support.numpy_files import header, npy

FILES = Path(__file__).parents[2] / "fixtures" / "files" / "numpy"


def opened_codes(path: Path) -> set[str]:
    with open_checkpoint(path) as opened:
        return {finding.code for finding in opened.findings}


def test_all_versions_of_the_header(tmp_path: Path) -> None:
    for version in [1, 2, 3]:
        path = tmp_path / "a.npy"
        path.write_bytes(npy(header("'<i2'", "(2L,)"), b"\1\0\2\0", version))
        with open_checkpoint(path) as opened:
            assert opened["tensor"].array().tolist() == [1, 2], version


def test_headers_that_are_none(tmp_path: Path) -> None:
    cases = [
        "",
        "{}",
        "[1]",
        header("'<f4'", "[2]"),
        header("'<f4'", "(-1,)"),
        header("'<f4'", "(True,)"),
        header("'<f4'", "(2,)", "0"),
        header("3", "(2,)"),
        header("'<f4'", "(" + "9" * 30 + ",)"),
        header("'<f4'", "(" * 100 + ")" * 100),
        header("'<f4'", "(2,)") + " + 1",
        header("'<f4'", "(2,)").replace("}", "'shape': (3,)}"),
        header("__import__('os')", "(2,)"),
        "dict(descr='<f4')",
        header("'<f4'", "(2 3)"),
        "{'descr': '<f4'",
        "'\\\\8'",
    ]
    for text in cases:
        path = tmp_path / "a.npy"
        path.write_bytes(npy(text))
        with pytest.raises(DamagedCheckpoint) as caught:
            open_checkpoint(path)
        assert caught.value.code == "npy-header", text


def test_types_that_are_none(tmp_path: Path) -> None:
    cases = ["'<q9z'", "'no'", "[('x',)]", "[3]", "('<f4', 'x')", "[('x', '<f4', (-1,))]"]
    for descr in cases:
        path = tmp_path / "a.npy"
        path.write_bytes(npy(header(descr, "(2,)"), bytes(100)))
        with pytest.raises(DamagedCheckpoint):
            open_checkpoint(path)


def test_a_shape_that_overflows(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    path.write_bytes(npy(header("'<f8'", "(9999999999, 9999999999)")))
    with pytest.raises(DamagedCheckpoint) as caught:
        open_checkpoint(path)
    assert caught.value.code == "shape-overflow"


def test_a_header_that_is_too_long(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    path.write_bytes(b"\x93NUMPY\x02\0" + (1 << 30).to_bytes(4, "little") + bytes(100))
    with pytest.raises(LimitExceeded):
        open_checkpoint(path)


def test_missing_and_trailing_bytes(tmp_path: Path) -> None:
    path, whole = tmp_path / "a.npy", npy(header("'<f4'", "(2,)"), bytes(8))
    path.write_bytes(whole[:-1])
    with pytest.raises(Truncated):
        open_checkpoint(path)
    path.write_bytes(whole + b"\0")
    assert opened_codes(path) == {"trailing-bytes"}
    assert not verify(path).is_valid
    path.write_bytes(whole + whole)
    assert verify(path).is_valid


class Evil:
    def __reduce__(self) -> tuple[object, ...]:
        return (eval, ("1",))


def test_objects_are_judged_and_never_loaded(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    path.write_bytes(npy(header("'|O'", "(1,)"), pickle.dumps([Evil()])))
    assert verify(path).safety is Safety.UNSAFE
    path.write_bytes(npy(header("[('x', '|O')]", "(1,)"), pickle.dumps([Evil()])))
    assert verify(path).safety is Safety.UNSAFE
    with zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(path, "x.npy")
    assert verify(tmp_path / "a.npz").safety is Safety.UNSAFE


def test_a_damaged_member_leaves_the_others_readable(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("bad.npy", b"\x93NUMPY\x01\0")
        archive.writestr("good.npy", npy(header("'<f4'", "(2,)"), bytes(8)))
    with open_checkpoint(path) as opened:
        assert list(opened) == ["good"]
        assert [(finding.code, finding.where) for finding in opened.findings] == [("truncated", "bad.npy")]
    assert verify(path).safety is Safety.UNKNOWN


def test_a_damaged_array_after_a_dangerous_one_repeats_no_finding(tmp_path: Path) -> None:
    evil = npy(header("'|O'", "(1,)"), pickle.dumps([Evil()]))
    path = tmp_path / "a.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("evil.npy", evil)
        archive.writestr("damaged.npy", npy(header("'|O'", "(1,)"), pickle.dumps([1, 2])[:-2]))
    with open_checkpoint(path) as opened:
        findings = [(finding.code, finding.where) for finding in opened.safety]
    assert findings == [("unsafe-call", "evil.npy"), ("not-scanned", "damaged.npy")]


def test_text_and_structures_are_described() -> None:
    with open_checkpoint(FILES / "packed.npz") as opened:
        assert list(opened) == ["layer/weight"]
        types = {name: (one["dtype"], one["shape"]) for name, one in opened.metadata.items()}  # type: ignore[index]
    assert types["words"] == ("<U2", [2])
    assert types["dates"] == ("<M8[D]", [1])
    assert types["fields"] == ("[('x', '<f4'), ('y', '<i2', (2,))]", [2])


def test_two_bytes_without_a_type_are_said_to_be_so() -> None:
    assert opened_codes(FILES / "bfloat16.npy") == {"opaque-type"}


def test_an_archive_without_arrays(tmp_path: Path) -> None:
    import numpy as np

    np.savez(tmp_path / "empty.npz")
    verification = verify(tmp_path / "empty.npz")
    assert (verification.format, verification.variant, verification.is_valid) == ("numpy", "npz", True)
    (tmp_path / "empty.npz").rename(tmp_path / "empty.zip")
    with pytest.raises(NotACheckpoint):
        verify(tmp_path / "empty.zip")


@pytest.mark.framework
def test_what_numpy_writes_now_is_what_we_read(tmp_path: Path) -> None:
    import numpy as np

    arrays = {
        "a": np.asfortranarray(np.random.default_rng(1).random((40, 30))),
        "b": np.arange(5, dtype=">u2"),
    }
    stream = io.BytesIO()
    np.savez_compressed(stream, **arrays)
    (tmp_path / "x.npz").write_bytes(stream.getvalue())
    with open_checkpoint(tmp_path / "x.npz") as opened:
        assert all((opened[name].array() == array).all() for name, array in arrays.items())


RECORD = np.dtype([("a", "<i4"), ("b", "<f8")])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (np.array(["ab", "c"]), np.array(["ab", "d"])),
        (np.array([b"ab"]), np.array([b"ac"])),
        (np.array(["2026-01-01"], "M8[D]"), np.array(["2026-01-02"], "M8[D]")),
        (np.array([1], "M8[D]"), np.array([1], "M8[s]")),
        (np.array([1], "m8[s]"), np.array([2], "m8[s]")),
        (np.array([(1, 2.0)], RECORD), np.array([(1, 3.0)], RECORD)),
        (np.array([(1, 2.0)], RECORD), np.array([(1, 2.0)], [("a", "<i4"), ("c", "<f8")])),
        (np.array([b"abc"], "V3"), np.array([b"abd"], "V3")),
        (np.array([1, "a"], object), np.array([2, "a"], object)),
        (np.array(["a", "b"]), np.array([["a", "b"]])),
        (np.array([["a", "b"], ["c", "d"]]), np.asfortranarray([["a", "b"], ["c", "d"]]).T),
        (np.array(["x" * 50_000] * 2), np.array(["x" * 50_000, "y" * 50_000])),
        (np.ma.array(["a", "b"], mask=[0, 1]), np.ma.array(["a", "b"], mask=[1, 0])),
        (np.ma.array([1, 2], fill_value=3), np.ma.array([1, 2], fill_value=4)),
    ],
)
@pytest.mark.parametrize("way", ["npy", "npz", "compressed", 2, 4, 5])
def test_arrays_that_are_no_tensors_are_told_apart(
    one: Any, other: Any, way: str | int, tmp_path: Path
) -> None:
    if isinstance(one, np.ma.MaskedArray) and isinstance(way, str):
        return  # NumPy's own files leave the mask out
    assert contents(one, way, tmp_path) == contents(one, way, tmp_path)
    assert contents(one, way, tmp_path) != contents(other, way, tmp_path)


def contents(value: Any, way: str | int, folder: Path) -> object:
    path = folder / ("some.npy" if way == "npy" else "some.npz" if isinstance(way, str) else "some.pkl")
    if way == "npy":
        np.save(path, value)
    elif isinstance(way, int):
        path.write_bytes(pickle.dumps({"value": value}, way))
    else:
        (np.savez if way == "npz" else np.savez_compressed)(path, value=value)
    with open_checkpoint(path) as opened:
        return dict(opened.metadata), [(one.path, one.shape, one.tobytes()) for one in opened.tensors]


def test_checksums_of_arrays_that_are_no_tensors(tmp_path: Path) -> None:
    value = np.array(["ab", "c"])
    np.save(tmp_path / "a.npy", value)
    crc = f"{zlib.crc32((tmp_path / 'a.npy').read_bytes()):08x}"
    description = {"<class>": "numpy.ndarray", "dtype": "<U2", "shape": [2], "CRC-32": crc}
    with open_checkpoint(tmp_path / "a.npy") as opened:
        assert opened.metadata == {"tensor": description}
    np.savez_compressed(tmp_path / "a.npz", value=value)
    with open_checkpoint(tmp_path / "a.npz") as opened:
        assert opened.metadata == {"value": description}
    value = np.array(["ab", "c"] * 9)
    (tmp_path / "a.pkl").write_bytes(pickle.dumps([value]))
    with open_checkpoint(tmp_path / "a.pkl") as opened:
        crc = f"{zlib.crc32(value.tobytes()):08x}"
        assert opened.metadata == {"": [f"<NumPy array of U2, shape [18]: 144 bytes, CRC-32 {crc}>"]}


def test_scalars_that_python_has_none_like_are_told_apart(tmp_path: Path) -> None:
    def plain_form(value: object) -> object:
        (tmp_path / "a.pkl").write_bytes(pickle.dumps({"v": value}))
        with open_checkpoint(tmp_path / "a.pkl") as opened:
            return dict(opened.metadata)

    assert plain_form(np.datetime64("2026-01-01")) == plain_form(np.datetime64("2026-01-01"))
    assert plain_form(np.datetime64("2026-01-01")) != plain_form(np.datetime64("2026-01-02"))
    assert plain_form(np.complex64(1 + 2j)) != plain_form(np.complex64(1 + 3j))
    assert plain_form(np.array((1, 2.0), RECORD)[()]) != plain_form(np.array((1, 3.0), RECORD)[()])
