"""What is written as ``.npz`` is, byte for byte, what ``numpy.savez`` writes for the same arrays."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool import Role, Tensor, Truncated, open_checkpoint, verify
from ckpttool.core.dtypes import BY_NAME
from ckpttool.core.values import Contiguous, Strided, in_memory
from ckpttool.formats.arrays import npz_writer
from ckpttool.formats.arrays.npz_writer import NpzWriter
from ckpttool.formats.content.tree_json import encode_tree
from ckpttool.formats.sidecar import ENTRY
from ckpttool.formats.writer import Content, WriteOptions
from ckpttool.storage.source import Source
from tests.support.numpy_files import same_zips
from tests.support.writing import write as written

OPTIONS = WriteOptions()
Array = np.ndarray[Any, Any]


def tensor(name: str, array: Array, **more: Any) -> Tensor:
    more.setdefault("role", Role.WEIGHTS)
    values = in_memory(np.ascontiguousarray(array).tobytes())
    return Tensor((name,), BY_NAME[array.dtype.name], array.shape, values=values, **more)


def write(content: Content, target: Path) -> Path:
    return written(NpzWriter(), content, target)


def saved(path: Path, arrays: dict[str, Array]) -> bytes:
    """Return what NumPy writes."""
    np.savez(path, **arrays)  # type: ignore[arg-type]
    return path.read_bytes()


def require_same(target: Path, content: Content) -> None:
    with open_checkpoint(target) as opened:
        assert (opened.safety, opened.complete) == ((), True)
        assert {finding.code for finding in opened.findings} <= {"opaque-type"}
        assert [*opened] == [one.name for one in content.tensors]
        for one in content.tensors:
            found = opened[one.name]
            assert (found.path, found.role, found.dtype) == (one.path, one.role, one.dtype)
            assert (found.shape, found.shares_with) == (one.shape, one.shares_with)
            assert found.tobytes() == one.tobytes()
    assert verify(target).is_valid


NUMBERS = sorted(name for name in NpzWriter.dtypes if not name.startswith("bits"))


@same_zips
@pytest.mark.parametrize("name", NUMBERS)
def test_every_type_is_written_as_numpy_writes_it(tmp_path: Path, name: str) -> None:
    data = np.arange(96, dtype="u1") if name != "bool" else np.arange(96, dtype="u1") % 2
    whole = data.view(name)
    arrays = {
        "some": whole,
        "matrix": whole[: whole.size // 2 * 2].reshape(2, -1),
        "scalar": whole[0:1].reshape(()),
        "none": whole[:0].reshape(3, 0, 2),
        "axes": whole[:1].reshape((1,) * 32),
        "large": np.resize(whole, 70_000),
    }
    content = Content(tuple(tensor(key, array) for key, array in arrays.items()))
    target = write(content, tmp_path / "target.npz")
    assert target.read_bytes() == saved(tmp_path / "saved.npz", arrays)
    require_same(target, content)


@same_zips
@pytest.mark.parametrize(("name", "descr"), [("bits8", "V1"), ("bits16", "V2")])
def test_types_that_numpy_forgot_stay_forgotten(tmp_path: Path, name: str, descr: str) -> None:
    array = np.arange(16, dtype="u1").view(descr).reshape(2, -1)
    one = Tensor(("a",), BY_NAME[name], array.shape, Role.WEIGHTS, in_memory(array.tobytes()))
    target = write(Content((one,)), tmp_path / "target.npz")
    assert target.read_bytes() == saved(tmp_path / "saved.npz", {"a": array})
    require_same(target, Content((one,)))


@pytest.mark.parametrize("name", ["big_endian.npy", "fortran.npy", "every_type.npz"])
def test_what_lies_otherwise_is_put_in_order(files: Path, tmp_path: Path, name: str) -> None:
    with open_checkpoint(files / "numpy" / name) as opened:
        kept = tuple(one for one in opened.tensors if one.dtype.name in NpzWriter.dtypes)
        target = write(Content(kept), tmp_path / "target.npz")
    theirs, ours = loaded(files / "numpy" / name), loaded(target)
    assert set(ours) == {one.name for one in kept}
    for key in ours:
        little = theirs[key].dtype.newbyteorder("<")
        assert (ours[key].dtype, ours[key].shape) == (little, theirs[key].shape)
        assert ours[key].tobytes() == theirs[key].astype(little).tobytes()


def loaded(path: Path) -> dict[str, Array]:
    """Return what NumPy loads; an array alone under the name that we give it."""
    found = np.load(path, allow_pickle=False)
    if isinstance(found, np.ndarray):
        return {"tensor": found}
    with found:
        return dict(found)


def test_a_large_transposed_tensor_is_gathered(tmp_path: Path) -> None:
    array = np.arange(600 * 400, dtype="<i4").reshape(600, 400)
    (tmp_path / "raw").write_bytes(array.tobytes())
    with Source(tmp_path / "raw") as source:
        view = Strided(source, 0, 4, (400, 600), (1, 400))
        one = Tensor(("t",), BY_NAME["int32"], (400, 600), values=view)
        target = write(Content((one,)), tmp_path / "target.npz")
    assert np.array_equal(loaded(target)["t"], array.T)


AWKWARD = [
    "",
    "a/b",
    "../up",
    "/root",
    "é",
    "日本",
    "a b",
    "x.npy",
    "\n",
    "\x1b[31m",
    "con",
    "a" * 5000,
    "A",
    "\\",
]


@same_zips
def test_awkward_names_are_what_numpy_gives_them(tmp_path: Path) -> None:
    arrays = {name: np.array([at], "i4") for at, name in enumerate(AWKWARD)}
    target = write(
        Content(tuple(tensor(name, array) for name, array in arrays.items())), tmp_path / "target.npz"
    )
    assert target.read_bytes() == saved(tmp_path / "saved.npz", arrays)
    assert {name: array.tolist() for name, array in loaded(target).items()} == {
        name: [at] for at, name in enumerate(AWKWARD)
    }


@given(st.lists(st.text(max_size=6), unique=True, max_size=6))
def test_a_name_is_refused_or_comes_back(tmp_path_factory: pytest.TempPathFactory, names: list[str]) -> None:
    content = Content(tuple(tensor(name, np.array([at], "i4")) for at, name in enumerate(names)))
    refusals = [*NpzWriter().refusals(content, OPTIONS)]
    if refusals:
        assert any("\0" in name or name.endswith(".npy") or not _is_text(name) for name in names)
        return
    found = loaded(write(content, tmp_path_factory.mktemp("npz") / "a.npz"))
    found.pop(ENTRY, None)  # there where a name ("SEED") says another role than the tensor has
    assert {name: int(array[0]) for name, array in found.items()} == {
        name: at for at, name in enumerate(names)
    }


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def test_what_an_archive_has_no_place_for_is_carried(tmp_path: Path) -> None:
    first = Tensor(("a", 0, "b"), BY_NAME["float32"], (2,), Role.OPTIMIZER, in_memory(bytes(8)))
    second = Tensor(("c",), BY_NAME["float32"], (2,), Role.OTHER, first.values, shares_with="a.0.b")
    tree = {"a": [{"b": first}], "c": second, "epoch": 3}
    content = Content((first, second), tree, {}, {"x.y": b"\0\xff"})
    target = write(content, tmp_path / "target.npz")
    require_same(target, content)
    with open_checkpoint(target) as opened:
        assert opened.native == content.native
        assert encode_tree(opened.tree) == encode_tree(tree)
        assert opened.training.epoch == 3
    with np.load(target) as found:
        assert set(found) == {"a.0.b", ENTRY}
        assert json.loads(found[ENTRY])["schema"] == "ckpttool.content/1"


def test_an_archive_of_nothing_else_is_one(tmp_path: Path) -> None:
    target = write(Content((), None, {"epoch": 3}), tmp_path / "target.npz")
    with open_checkpoint(target) as opened:
        assert (opened.format, len(opened), opened.training.epoch) == ("numpy", 0, 3)


def test_a_damaged_entry_is_told_and_not_used(tmp_path: Path) -> None:
    target = write(Content((tensor("a", np.ones(1)),), None, {"epoch": 3}), tmp_path / "target.npz")
    data = target.read_bytes()
    at = data.index(b"epoch")
    target.write_bytes(data[:at] + b"E" + data[at + 1 :])
    with open_checkpoint(target) as opened:
        assert [(finding.code, finding.where) for finding in opened.findings] == [("content-entry", ENTRY)]
        assert (opened.metadata, [*opened]) == ({}, ["a"])
    assert not verify(target).is_valid


def refused(*names: str, shape: tuple[int, ...] = (1,)) -> list[str]:
    return [*NpzWriter().refusals(Content(tuple(tensor(name, np.ones(shape)) for name in names)), OPTIONS)]


def test_names_that_numpy_can_not_give_are_refused() -> None:
    assert refused("a\0b") == ["a\0b: NumPy cuts the name of an array at a NUL (use --map)"]
    assert refused("\ud800") == ["\ud800: its name is not valid text (use --map)"]
    assert refused("a" * 65_532) == [
        f"{'a' * 65_532}: a name of 65,536 bytes, and a zip has room for 65,535 (use --map)"
    ]
    assert refused("a" * 65_531) == []
    assert refused("x", "x.npy") == ["x.npy: NumPy returns another entry for this name (use --map)"]
    assert refused(ENTRY) == [f"{ENTRY}: NumPy returns another entry for this name (use --map)"]


def test_more_axes_or_arrays_than_can_be_read_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    deep = Tensor(("d",), BY_NAME["int8"], (1,) * 65, values=in_memory(b"x"))
    assert [*NpzWriter().refusals(Content((deep,)), OPTIONS)] == [
        "d: 65 axes, and a NumPy array has at most 64"
    ]
    monkeypatch.setattr(npz_writer, "MAX_MEMBERS", 2)
    assert refused("a", "b") == ["2 arrays are more than ckpttool reads back (at most 1)"]


def test_a_source_that_becomes_shorter_leaves_nothing(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(bytes(800_000))
    with Source(source) as held, pytest.raises(Truncated):
        values = Contiguous(held, 0, 800_000)
        os.truncate(source, 700_000)
        write(Content((Tensor(("a",), BY_NAME["float64"], (100_000,), values=values),)), tmp_path / "a.npz")
    assert os.listdir(tmp_path) == ["source"]
