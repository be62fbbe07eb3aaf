"""HDF5 files that are drawn, filled by a sink, and read by h5py."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import h5py
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool import Tensor
from ckpttool.containers.hdf5_writer import WRITABLE_TYPES, Plan, _Memory, attribute_fault, build_structure
from ckpttool.core.dtypes import BY_NAME
from ckpttool.core.values import in_memory
from ckpttool.transaction.staged_output import StagedOutput
from tests.support.containers import stage
from tests.support.writing import tensor

NUMPY = sorted(name for name in WRITABLE_TYPES if hasattr(np, name))
OPAQUE = sorted(WRITABLE_TYPES - {*NUMPY, "complex32"})


def written(path: Path, plan: Plan) -> Path:
    return stage(path, lambda staged: build_structure(plan).stream(staged.create()))


def pattern(dtype: str, *shape: int) -> np.ndarray[Any, Any]:
    """Return elements with every byte, NaNs among them; of booleans, both."""
    count = int(np.prod(shape, dtype=int)) * np.dtype(dtype).itemsize
    raw = np.resize(np.arange(256, dtype=np.uint8), count)
    return (raw % 2 if dtype == "bool" else raw).view(dtype).reshape(shape)


@pytest.mark.parametrize("dtype", NUMPY)
def test_h5py_reads_each_type_of_numpy(dtype: str, tmp_path: Path) -> None:
    arrays = {
        ("scalar",): pattern(dtype),
        ("none",): pattern(dtype, 0),
        ("rows", "empty"): pattern(dtype, 3, 0, 2),
        ("rows", "some"): pattern(dtype, 2, 3, 4),
        ("large",): pattern(dtype, 70_001),
    }
    path = written(tmp_path / "x.h5", Plan(tensors={key: tensor("one", one) for key, one in arrays.items()}))
    with h5py.File(path) as file:
        for key, array in arrays.items():
            found = file["/".join(key)]
            assert (found.dtype, found.shape, found.chunks) == (array.dtype, array.shape, None)
            assert found[()].tobytes() == array.tobytes()


@pytest.mark.parametrize("dtype", OPAQUE)
def test_other_types_are_opaque_and_say_what_they_are(dtype: str, tmp_path: Path) -> None:
    kind = BY_NAME[dtype]
    array = pattern("uint8", 6, kind.itemsize)
    one = Tensor(("one",), kind, (2, 3), values=in_memory(array.tobytes()))
    with h5py.File(written(tmp_path / "x.h5", Plan(tensors={("one",): one}))) as file:
        found = file["one"]
        assert (found.dtype, found.shape) == (np.dtype(f"V{kind.itemsize}"), (2, 3))
        assert (found.attrs["dtype"], found[()].tobytes()) == (dtype, array.tobytes())


def test_bfloat16_lies_as_h5py_and_keras_write_it(tmp_path: Path) -> None:
    array = np.array([1, -2.5, 3], ml_dtypes.bfloat16)
    with h5py.File(tmp_path / "own.h5", "w") as file:
        file["one"] = array
    with (
        h5py.File(written(tmp_path / "x.h5", Plan(tensors={("one",): tensor("one", array)}))) as file,
        h5py.File(tmp_path / "own.h5") as own,
    ):
        assert file["one"].id.get_type().equal(own["one"].id.get_type())
        assert np.array(file["one"], ml_dtypes.bfloat16).tolist() == [1, -2.5, 3]


def test_half_complex_numbers_are_pairs(tmp_path: Path) -> None:
    halves = np.arange(8, dtype=np.float16)
    one = Tensor(("one",), BY_NAME["complex32"], (4,), values=in_memory(halves.tobytes()))
    with h5py.File(written(tmp_path / "x.h5", Plan(tensors={("one",): one}))) as file:
        assert file["one"]["r"].tolist() == halves[::2].tolist()
        assert file["one"]["i"].tolist() == halves[1::2].tolist()


def test_groups_attributes_links_and_texts(tmp_path: Path) -> None:
    attributes = {"name": "ä" * 70_000, "list": ["a", "bé"], "none": [], "count": 3, "rate": 0.5, "on": True}
    plan = Plan(
        groups={(): {"root": "r"}, ("a", "empty"): attributes},
        tensors={("a", "one"): tensor("one", np.arange(3))},
        links={("b", "same"): ("a", "one")},
        texts={("text",): b"x" * 200_000, ("nothing",): b""},
        attributes={("a", "one"): {"said": "yes"}},
    )
    with h5py.File(written(tmp_path / "x.h5", plan)) as file:
        found = file["a/empty"].attrs
        assert {key: found[key] for key in ("name", "count", "rate", "on")} == {
            key: attributes[key] for key in ("name", "count", "rate", "on")
        }
        assert [one.decode() for one in found["list"]] == ["a", "bé"]
        assert (found["none"].shape, file.attrs["root"]) == ((0,), "r")
        assert file["b/same"] == file["a/one"]
        assert file["a/one"].attrs["said"] == "yes"
        assert file["text"][()] == b"x" * 200_000
        assert file["nothing"][()] == b""


def test_it_may_begin_anywhere_and_tells_its_checksum(tmp_path: Path) -> None:
    tensors = {(f"t{at}",): tensor("one", np.full(20_000 * at, at)) for at in range(5)}
    with StagedOutput(tmp_path / "x") as staged:
        sink = staged.create()
        sink.write(b"before")
        drawing = build_structure(Plan(tensors=tensors))
        whole = drawing.stream_with_crc(sink)
        sink.write(b"behind")
        assert (whole.offset, whole.nbytes) == (6, drawing.size)
        checksum = whole.checksum
        staged.settle()
        staged.commit()
    content = (tmp_path / "x").read_bytes()
    assert (content[:6], content[-6:]) == (b"before", b"behind")
    assert checksum == zlib.crc32(content[6:-6])
    (tmp_path / "inside.h5").write_bytes(content[6:-6])
    with h5py.File(tmp_path / "inside.h5") as file:
        assert all((file[f"t{at}"][()] == at).all() and file[f"t{at}"].size == 20_000 * at for at in range(5))


def test_elements_take_no_memory_while_a_file_is_drawn() -> None:
    huge = Tensor(("huge",), BY_NAME["float32"], (1 << 40,), values=in_memory(b""))
    drawing = build_structure(Plan(tensors={("huge",): huge, ("small",): tensor("one", np.arange(3))}))
    pieces = [*drawing.pieces()]
    assert drawing.size > huge.nbytes
    assert sum(len(one) for one in pieces if isinstance(one, bytes)) < 1 << 20


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("write"), st.integers(0, 200_000), st.binary(max_size=300)),
            st.tuples(st.just("size"), st.integers(0, 200_000), st.just(b"")),
        ),
        max_size=12,
    ),
    st.integers(0, 200_000),
    st.integers(0, 200_000),
)
def test_memory_holds_what_a_file_would(steps: list[tuple[str, int, bytes]], start: int, count: int) -> None:
    memory, model = _Memory(), bytearray()
    for step, at, data in steps:
        if step == "write":
            memory.seek(at)
            memory.write(data)
            model.extend(bytes(max(0, at + len(data) - len(model))) if data else b"")
            model[at : at + len(data)] = data
        elif at >= len(model):
            memory.truncate(at)
            model.extend(bytes(at - len(model)))
    assert memory.size == len(model)
    buffer = bytearray(count)
    memory.seek(start)
    read = memory.readinto(buffer)
    assert bytes(buffer[:read]) == bytes(model[start : start + count])


_text = st.text(st.characters(exclude_categories=[]), max_size=5)
_number = st.integers(-(1 << 70), 1 << 70) | st.floats(allow_nan=False)


@given(
    st.dictionaries(
        _text,
        _text | _number | st.booleans() | st.lists(_text, max_size=4) | st.lists(_number, max_size=4),
        max_size=4,
    )
)
def test_attributes_without_a_fault_are_read_as_they_were(
    tmp_path_factory: pytest.TempPathFactory, attributes: dict[str, Any]
) -> None:
    held = {name: value for name, value in attributes.items() if attribute_fault(name, value) is None}
    path = written(tmp_path_factory.mktemp("any") / "x.h5", Plan(groups={("g",): held}))
    with h5py.File(path) as file:
        assert {*file["g"].attrs} == {*held}
        for name, value in held.items():
            found = file["g"].attrs[name]
            if isinstance(value, list) and value and isinstance(value[0], str):
                assert [one.decode() for one in found] == value
            elif isinstance(value, list):
                assert np.array_equal(np.asarray(value, found.dtype), found) and len(found) == len(value)
            else:
                assert found == value
