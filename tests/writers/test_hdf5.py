"""Plain HDF5: what is written is what h5py reads, and what our reader finds again."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import h5py
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpttool import DamagedCheckpoint, Role, Tensor, open_checkpoint, verify
from ckpttool.core.dtypes import BY_NAME
from ckpttool.core.values import Computed, Contiguous, Strided, in_memory
from ckpttool.formats.hdf5.writer import Hdf5Writer
from ckpttool.formats.sidecar import ENTRY
from ckpttool.formats.writer import Content
from ckpttool.storage.source import Source
from ckpttool.transaction.staged_output import StagedOutput
from tests.support.writing import OPTIONS, content_of, require_same, tensor, write

VALUES = np.arange(24, dtype=np.float32).reshape(2, 3, 4)


def test_paths_are_groups(tmp_path: Path) -> None:
    content = Content((tensor("a.b.weight", VALUES), tensor("a.c", VALUES[0]), tensor("d", VALUES[0, 0])))
    target = write(Hdf5Writer(), content, tmp_path / "x.hdf5")
    with h5py.File(target) as file:
        assert file["a/b/weight"][()].tolist() == VALUES.tolist()
        assert file["a/c"][()].tolist() == VALUES[0].tolist()
        assert file["d"][()].tolist() == VALUES[0, 0].tolist()
    require_same(target, content)


def test_every_type_comes_back(tmp_path: Path) -> None:
    for name in sorted(Hdf5Writer.dtypes):
        kind = BY_NAME[name]
        raw = np.arange(96, dtype=np.uint8)
        raw = raw % 2 if name == "bool" else raw * 3
        shapes: dict[str, tuple[int, ...]] = {"some": (3, 2), "scalar": (), "none": (0,), "flat": (2, 0, 5)}
        made = [
            Tensor(("t", label), kind, shape, Role.WEIGHTS, in_memory(raw[: kind.nbytes(size)].tobytes()))
            for label, shape in shapes.items()
            for size in (int(np.prod(shape, dtype=int)),)
        ]
        content = Content(tuple(made))
        require_same(write(Hdf5Writer(), content, tmp_path / f"{name}.hdf5"), content)


def test_ties_are_links_whichever_name_comes_first(tmp_path: Path) -> None:
    first = tensor("z.weight", VALUES)
    others = [
        Tensor(
            (*name.split("."),), first.dtype, first.shape, first.role, first.values, shares_with=first.name
        )
        for name in ("a.weight", "zz")
    ]
    content = Content((first, *others))
    target = write(Hdf5Writer(), content, tmp_path / "x.hdf5")
    with h5py.File(target) as file:
        assert file["a/weight"] == file["z/weight"] == file["zz"]
    require_same(target, content)


def test_strided_and_large_tensors(tmp_path: Path) -> None:
    base = np.random.default_rng(2).normal(size=(400, 300)).astype(np.float32)
    (tmp_path / "raw").write_bytes(base.tobytes())
    with closing(Source(tmp_path / "raw")) as source:
        turned = Strided(source, 0, 4, (300, 400), (1, 300))
        whole = Contiguous(source, 0, base.nbytes)
        content = Content(
            (
                Tensor(("turned",), BY_NAME["float32"], (300, 400), Role.WEIGHTS, turned),
                Tensor(("whole",), BY_NAME["float32"], (400, 300), Role.WEIGHTS, whole),
            )
        )
        target = write(Hdf5Writer(), content, tmp_path / "x.hdf5")
    with h5py.File(target) as file:
        assert np.array_equal(file["turned"], base.T)
        assert np.array_equal(file["whole"], base)


def test_names_that_hdf5_cannot_hold_are_refused() -> None:
    cases = [
        (("a//b",), "a part of its path is empty"),
        (("a/./b",), "'.' means the group itself"),
        (("/a",), "a part of its path is empty"),
        (("taken/inner",), "which is a tensor, not a group"),
        (("a", "."), "'.' means the group itself"),
        (("a", ""), "a part of its path is empty"),
        (("a\0b",), "a NUL ends a name"),
        (("\ud800",), "not valid text"),
        (("x" * 60_001,), "60,001 bytes"),
        (("taken", "inner"), "which is a tensor, not a group"),
        ((ENTRY,), "reserved for non-tensor content"),
        ((f"{ENTRY}/x",), "reserved for non-tensor content"),
    ]
    for path, why in cases:
        one = Tensor(path, BY_NAME["uint8"], (), values=in_memory(b"x"))
        (found,) = Hdf5Writer().refusals(Content((tensor("taken", VALUES), one)), OPTIONS)
        assert found.startswith(f"{one.name}: ") and why in found


def test_too_many_axes_are_refused() -> None:
    one = tensor("deep", np.zeros((1,) * 33, np.uint8))
    assert [*Hdf5Writer().refusals(Content((one,)), OPTIONS)] == ["deep: 33 axes, and HDF5 has at most 32"]


def test_what_is_not_refused_can_be_written(tmp_path: Path) -> None:
    names = ["..", " ", "x" * 60_000, "ключ", "a\\b", "line\nbreak", "/".join(["a"])]
    content = Content(
        tuple(Tensor((one,), BY_NAME["uint8"], (), Role.WEIGHTS, in_memory(b"1")) for one in names)
    )
    require_same(write(Hdf5Writer(), content, tmp_path / "x.hdf5"), content)


def at(path: tuple[str | int, ...], value: bytes = b"1", **more: Any) -> Tensor:
    return Tensor(path, BY_NAME["uint8"], (), Role.WEIGHTS, in_memory(value), **more)


def test_slashes_stand_between_groups_and_the_entry_has_the_names(tmp_path: Path) -> None:
    first = at(("first/weight",), b"1")
    content = Content(
        (
            first,
            at(("params", "Dense_0/kernel"), b"2"),
            at(("first/tied",), b"1", shares_with=first.name),
            at(("plain",), b"3"),
        )
    )
    target = write(Hdf5Writer(), content, tmp_path / "x.hdf5")
    with h5py.File(target) as file:
        found = {name: int(file[name][()]) for name in ("first/weight", "params/Dense_0/kernel", "plain")}
        assert found == {"first/weight": ord("1"), "params/Dense_0/kernel": ord("2"), "plain": ord("3")}
        assert file["first/tied"] == file["first/weight"]
        assert sorted(file) == [ENTRY, "first", "params", "plain"]
    require_same(target, content)


def test_slashes_alone_are_reason_for_an_entry_and_without_it_they_are_dots(tmp_path: Path) -> None:
    target = write(Hdf5Writer(), Content((at(("first/weight",)),)), tmp_path / "x.hdf5")
    with h5py.File(target, "r+") as file:
        del file[ENTRY]
    with open_checkpoint(target) as opened:
        assert [one.path for one in opened.tensors] == [("first", "weight")]


@pytest.mark.parametrize("other", [("a", "b"), ("a.b",)])
def test_names_that_slashes_make_alike_are_refused(other: tuple[str, ...]) -> None:
    content = Content((at(("a/b",)), at(other)))
    place = "/".join(other)
    assert [*Hdf5Writer().refusals(content, OPTIONS)] == [f"a.b: same path as a/b, /{place} (use --map)"]


@given(
    st.lists(
        st.lists(st.text("ab/.", max_size=4), min_size=1, max_size=3).map(tuple),
        min_size=1,
        max_size=6,
        unique_by=".".join,
    )
)
def test_names_with_slashes_are_refused_or_come_back(
    tmp_path_factory: pytest.TempPathFactory, paths: list[tuple[str, ...]]
) -> None:
    content = Content(tuple(at(path, bytes([number])) for number, path in enumerate(paths)))
    if not [*Hdf5Writer().refusals(content, OPTIONS)]:
        target = write(Hdf5Writer(), content, tmp_path_factory.mktemp("any") / "x.hdf5")
        with open_checkpoint(target) as opened:
            assert {one.path: one.tobytes() for one in opened.tensors} == {
                path: bytes([number]) for number, path in enumerate(paths)
            }


@pytest.mark.parametrize(
    "document", [b'{"tensors": {"/": 5}}', b"/", b'["/"]', b'{"tensors": {"x/y": {"path": ["x/y", {}]}}}']
)
def test_a_strange_entry_renames_nothing(document: bytes, tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.hdf5", "w") as file:
        file["x/y"] = VALUES
        file.create_dataset(ENTRY, data=np.bytes_(document))
    with open_checkpoint(tmp_path / "x.hdf5") as opened:
        assert [one.code for one in opened.findings] == ["content-entry"]
        assert [one.path for one in opened.tensors] == [("x", "y")]


_part = st.text(st.characters(codec="utf-8"), max_size=6)


@settings(max_examples=25)
@given(
    st.lists(st.lists(_part, min_size=1, max_size=3).map(tuple), min_size=1, max_size=5, unique_by=".".join)
)
def test_any_names_are_refused_or_come_back(
    tmp_path_factory: pytest.TempPathFactory, paths: list[tuple[str, ...]]
) -> None:
    made = tuple(Tensor(path, BY_NAME["uint8"], (), Role.WEIGHTS, in_memory(b"1")) for path in paths)
    content = Content(made)
    if not [*Hdf5Writer().refusals(content, OPTIONS)]:
        target = write(Hdf5Writer(), content, tmp_path_factory.mktemp("any") / "x.hdf5")
        with open_checkpoint(target) as opened:
            assert {one.path for one in opened.tensors} == {*paths}
            assert opened.complete and not opened.findings


@pytest.mark.parametrize("source", ["pytorch/guide.pth", "pytorch/parameters.pth", "hdf5/mixed.h5"])
def test_all_that_is_no_tensor_comes_back(source: str, files: Path, tmp_path: Path) -> None:
    from ckpttool.formats.content.tree_json import encode_tree

    with open_checkpoint(files / source) as checkpoint:
        content = content_of(checkpoint)
        held = tuple(one for one in content.tensors if one.dtype.name in Hdf5Writer.dtypes)
        assert len(held) == len(content.tensors)
        target = write(Hdf5Writer(), content, tmp_path / "x.hdf5")
        with open_checkpoint(target) as opened:
            assert opened.format == "hdf5"
            assert dict(opened.metadata) == dict(checkpoint.metadata)
            assert encode_tree(opened.tree) == encode_tree(checkpoint.tree)
        assert verify(target).is_valid


def test_a_damaged_entry_leaves_the_tensors(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.hdf5", "w") as file:
        file["w"] = VALUES
        file.create_dataset(ENTRY, data=np.bytes_(b"{"))
    with open_checkpoint(tmp_path / "x.hdf5") as opened:
        assert [one.code for one in opened.findings] == ["content-entry"]
        assert opened["w"].tobytes() == VALUES.tobytes()


@pytest.mark.parametrize("entry", ["a longer text", 3.5])
def test_what_only_has_the_name_of_the_entry_is_no_entry(entry: Any, tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.hdf5", "w") as file:
        file["w"] = VALUES
        file[ENTRY] = entry  # a text of any length lies elsewhere in the file
    with open_checkpoint(tmp_path / "x.hdf5") as opened:
        assert opened.findings == ()
        assert opened["w"].shape == VALUES.shape


def test_a_source_that_ends_too_early_is_an_error(tmp_path: Path) -> None:

    one = Tensor(("a",), BY_NAME["float32"], (5,), values=Computed(lambda limit: iter([memoryview(b"x")])))
    with StagedOutput(tmp_path / "x.hdf5") as staged, pytest.raises(DamagedCheckpoint):
        Hdf5Writer().write(Content((one,)), staged, OPTIONS)
        staged.settle()
    assert not (tmp_path / "x.hdf5").exists()


def test_bfloat16_is_what_keras_reads(tmp_path: Path) -> None:
    array = np.array([[1, -0.0], [np.nan, 3e38]], ml_dtypes.bfloat16)
    target = write(Hdf5Writer(), Content((tensor("w", array),)), tmp_path / "x.hdf5")
    with h5py.File(target) as file:
        assert file["w"].attrs["dtype"] == "bfloat16"
        assert np.array(file["w"], ml_dtypes.bfloat16).tobytes() == array.tobytes()
