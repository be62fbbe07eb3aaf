"""What a model is run on: files of arrays, hostile ones too, and values that are made up."""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.predict.inputs import (
    dtype_named,
    make_inputs,
    name_inputs,
    other_values,
    positional,
    read_arrays,
    sized_specs,
)
from ckpttool.predict.interface import LoadFailed
from ckpttool.predict.request import DTYPES, InputSpec


class _Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(_Bomb.target), "w")

    target = Path()


def _npy(array: np.ndarray[Any, Any]) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def _claiming(shape: tuple[int, ...]) -> bytes:
    """Return an ``.npy`` whose header claims more than follows."""
    header = f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape}}}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode()


def _zipped(path: Path, **members: bytes) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def test_arrays_come_by_name(tmp_path: Path) -> None:
    path = tmp_path / "in.npz"
    np.savez(path, x=np.ones(3), ids=np.arange(2))
    assert {name: array.tolist() for name, array in read_arrays(str(path), "code").items()} == {
        "x": [1, 1, 1],
        "ids": [0, 1],
    }


def test_one_array_is_the_first_input(tmp_path: Path) -> None:
    path = tmp_path / "in.npy"
    np.save(path, np.arange(3))
    assert [*read_arrays(str(path), "code")] == ["0"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no array at all",
        b"PK\x03\x04 no zip",
        b"PK\x05\x06" + bytes(18),
        _claiming((1 << 50,)),
        _claiming((1 << 62, 1 << 62)),
        _claiming((3,)),
        b"\x93NUMPY\x09\x00",
        b"\x93NUMPY\x01\x00\xff\xff",
    ],
    ids=["empty", "text", "no-zip", "no-member", "huge", "overflow", "short", "version", "header"],
)
def test_a_file_that_is_something_else(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "in.npz"
    path.write_bytes(content)
    with pytest.raises(LoadFailed) as caught:
        read_arrays(str(path), "input-unreadable")
    assert [(one.code, one.where) for one in caught.value.findings] == [("input-unreadable", str(path))]


@pytest.mark.parametrize(
    "content",
    [b"text", _claiming((1 << 50,)), _npy(np.ones(9))[:-8], b""],
    ids=["text", "huge", "short", "empty"],
)
def test_a_member_that_is_something_else(tmp_path: Path, content: bytes) -> None:
    path = _zipped(tmp_path / "in.npz", **{"x.npy": content, "y.npy": _npy(np.ones(2))})
    with pytest.raises(LoadFailed):
        read_arrays(str(path), "input-unreadable")


def test_a_truncated_archive(tmp_path: Path) -> None:
    whole = _zipped(tmp_path / "in.npz", **{"x.npy": _npy(np.arange(50.0))}).read_bytes()
    for size in range(0, len(whole), 7):
        path = tmp_path / "cut.npz"
        path.write_bytes(whole[:size])
        with pytest.raises(LoadFailed):
            read_arrays(str(path), "input-unreadable")


def test_a_flipped_byte_is_an_error_or_harmless(tmp_path: Path) -> None:
    whole = bytearray(_zipped(tmp_path / "in.npz", **{"x.npy": _npy(np.arange(5.0))}).read_bytes())
    path = tmp_path / "flipped.npz"
    for at in range(len(whole)):
        whole[at] ^= 0x55
        path.write_bytes(whole)
        whole[at] ^= 0x55
        try:
            found = read_arrays(str(path), "input-unreadable")
        except LoadFailed:
            continue
        assert all(array.tolist() == [0, 1, 2, 3, 4] for array in found.values())


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    _Bomb.target = tmp_path / "ran"
    objects = np.array([_Bomb()], object)
    np.savez(tmp_path / "in.npz", x=objects)
    np.save(tmp_path / "in.npy", objects)
    (tmp_path / "in.pkl").write_bytes(pickle.dumps(_Bomb()))
    for name in ("in.npz", "in.npy", "in.pkl"):
        with pytest.raises(LoadFailed, match=r"^it holds Python objects, which are not loaded$"):
            read_arrays(str(tmp_path / name), "input-unreadable")
    (tmp_path / "in.txt").write_text("no array")
    with pytest.raises(LoadFailed, match=r"^not an \.npy or \.npz file$"):
        read_arrays(str(tmp_path / "in.txt"), "input-unreadable")
    assert not _Bomb.target.exists()


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(LoadFailed, match="it can't be read: No such file or directory"):
        read_arrays(str(tmp_path / "none.npz"), "input-unreadable")


@given(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 5), max_size=3), st.integers(0, 99))
def test_made_up_values_are_the_same_for_the_same_seed(dtype: str, shape: list[int], seed: int) -> None:
    specs = (InputSpec("a", tuple(shape), dtype), InputSpec(None, (2,)))
    first, again = make_inputs(specs, seed), make_inputs(specs, seed)
    assert [*first] == ["a", "1"]
    for name, array in first.items():
        assert array.dtype == again[name].dtype
        assert array.tobytes() == again[name].tobytes()
    assert first["a"].shape == tuple(shape)
    if dtype != "string":
        assert first["a"].dtype == dtype_named(dtype)


@given(
    st.sampled_from(["int8", "int64", "uint8", "float32", "float64"]), st.integers(0, 50), st.integers(1, 50)
)
def test_made_up_values_lie_in_their_range(dtype: str, low: int, width: int) -> None:
    values = make_inputs([InputSpec("x", (64,), dtype, low, low + width)], 0)["x"]
    assert (values >= low).all() and (values <= low + width).all()
    if "int" in dtype:
        assert (values < low + width).all()


@pytest.mark.parametrize(
    ("dtype", "low", "high"), [("uint8", 0, 255), ("int64", 0, 1), ("float32", -1, 1), ("bool", 0, 1)]
)
def test_made_up_values_suit_their_type(dtype: str, low: int, high: int) -> None:
    values = make_inputs([InputSpec("x", (4096,), dtype)], 0)["x"]
    assert low <= values.min() < values.max() <= high


_X, _Y = InputSpec("x", (1,)), InputSpec("y", (1,))


def test_inputs_by_position_get_their_names() -> None:
    one, two = np.ones(1), np.zeros(1)
    assert name_inputs({"0": one, "1": two}, (_X, _Y), "in.npz") == {"x": one, "y": two}
    assert name_inputs({"y": one, "0": two}, (_X, _Y), "in.npz") == {"y": one, "x": two}
    assert name_inputs({"a": one}, (), "in.npz") == {"a": one}


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (["x"], "no input 'y' in in.npz (the model takes x, y)"),
        (["x", "y", "z"], "in.npz has an unknown input 'z' (the model takes x, y)"),
        (["x", "y", "7"], "in.npz has an unknown input '7' (the model takes x, y)"),
        (["0", "x", "y"], "in.npz has the same input by name and by position (the model takes x, y)"),
    ],
)
def test_inputs_that_do_not_fit(names: list[str], told: str) -> None:
    with pytest.raises(LoadFailed) as caught:
        name_inputs(dict.fromkeys(names, np.ones(1)), (_X, _Y), "in.npz")
    assert [one.message for one in caught.value.findings] == [told]


def test_places_are_numbers() -> None:
    by_place, by_name = positional({"10": np.ones(1), "x": np.ones(2), "9": np.ones(3)})
    assert [len(one) for one in by_place] == [3, 1]
    assert [*by_name] == ["x"]


def _sizes(*specs: InputSpec, batch_size: int | None = None) -> list[list[tuple[int | None, ...]]]:
    return [[one.shape for one in found] for found in sized_specs(specs, batch_size)]


def test_known_sizes_are_tried_alone() -> None:
    assert _sizes(InputSpec("x", (2, 3)), InputSpec("y", ())) == [[(2, 3), ()]]


def test_unknown_lengths_take_several_steps_first_and_one_last() -> None:
    found = _sizes(InputSpec("ids", (None, None)), InputSpec("x", (None, None, 8)))
    assert found[0] == [(3, 16), (3, 16, 8)]
    assert found[-1] == [(1, 1), (1, 1, 8)]
    assert all(len({shapes[0][1], shapes[1][1]}) == 1 for shapes in found)


def test_a_batch_that_was_asked_for_is_kept() -> None:
    assert {rows for ((rows, _),) in _sizes(InputSpec("x", (None, None)), batch_size=5)} == {5}
    assert _sizes(InputSpec("x", (None, 2)), batch_size=5) == [[(5, 2)]]


def test_rows_that_are_one_sequence_are_several() -> None:
    ragged = InputSpec("x", (None, 4), is_sequence=True)
    assert _sizes(ragged, batch_size=1)[0] == [(16, 4)]


@pytest.mark.parametrize(
    "array",
    [
        np.float32([[0.25, 0.5], [1, 2]]),
        np.array([[5, 7]]),
        np.zeros((2, 9), np.int32),
        np.full(9, -3, np.int8),
        np.full(9, 255, np.uint8),
        np.array([2**63 - 1, 0]),
        np.array([2**64 - 1, 0], np.uint64),
        np.ones((2, 9), bool),
        np.ones(9, ">f8"),
        np.ones(9, dtype_named("bfloat16")),
        np.array([np.inf, 1]),
        np.array([1 + 2j, 3j], np.complex64),
        np.array(["one", "two", "three"] * 3),
        np.array([b"one", b"two", b"three"]),
        np.ones((0, 3)),
    ],
    ids=lambda array: f"{array.dtype}{array.shape}",
)
def test_other_values_are_of_the_same_kind(array: np.ndarray[Any, Any]) -> None:
    other = other_values({"x": array}, 1)["x"]
    assert (other.dtype, other.shape) == (array.dtype, array.shape)
    assert not array.size or (other != array).any()
    if array.dtype.kind in "iu":
        assert min(0, array.min()) <= other.min() and other.max() <= max(1, array.max())
