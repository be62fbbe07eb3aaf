"""A checkpoint as a mapping of lazy tensors."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from ckpttool import Checkpoint, CheckpointError, Granularity, Role, Tensor, open_checkpoint, verify
from ckpttool.core.checkpoint import judged_files, own_names_of
from ckpttool.core.dtypes import BY_NAME
from tests.support.numpy_files import header, npy
from tests.support.tensors import tensor_of


@pytest.fixture
def guide(files: Path) -> Path:
    return files / "pytorch" / "guide.pth"


def tensor(*path: str | int, role: Role = Role.OTHER, **more) -> Tensor:
    return Tensor(path, BY_NAME["float32"], more.pop("shape", (2,)), role, **more)


def checkpoint(*tensors: Tensor) -> Checkpoint:
    return Checkpoint(
        path="m.pth", format="x", variant=None, tensors=tensors, files=(), spans=lambda: iter(())
    )


# Tensor ---------------------------------------------------------------------------------------------


def test_name_joins_the_path() -> None:
    assert tensor("state", 0, "exp_avg").name == "state.0.exp_avg"


@pytest.mark.parametrize(
    ("dtype", "shape", "size", "nbytes"),
    [
        ("float32", (), 1, 4),
        ("float32", (2, 10), 20, 80),
        ("float32", (3, 0), 0, 0),
        ("complex128", (2,), 2, 32),
        ("float4_e2m1fn", (3,), 3, 2),
        ("float6_e2m3fn", (4,), 4, 3),
        ("bool", (1 << 40, 1 << 20), 1 << 60, 1 << 60),
    ],
)
def test_size_and_bytes(dtype: str, shape: tuple[int, ...], size: int, nbytes: int) -> None:
    found = Tensor(("x",), BY_NAME[dtype], shape)
    assert (found.size, found.nbytes) == (size, nbytes)


def test_tensor_without_values() -> None:
    empty = tensor("meta")
    assert (list(empty.blocks()), empty.tobytes()) == ([], b"")
    with pytest.raises(TypeError, match="meta device"):
        empty.array()


def test_type_that_numpy_lacks() -> None:
    odd = tensor_of(np.arange(4), "float6_e2m3fn")
    with pytest.raises(TypeError, match="float6_e2m3fn"):
        odd.array()


def test_array_of_four_bit_elements_unpacks_them() -> None:
    array = tensor_of(np.array([1, 2, 7]), "float4_e2m1fn").array()
    assert array.shape == (3,)
    assert array.astype("f4").tolist() == [0.5, 1.0, 6.0]


def test_array_is_a_read_only_map_of_the_file(guide: Path) -> None:
    with open_checkpoint(guide) as found:
        array = found["model_state_dict.fc.weight"].array()
    assert isinstance(array.base, np.memmap) or isinstance(array, np.memmap)
    assert not array.flags.writeable
    truth = json.loads(guide.with_name("guide.pth.expected.json").read_text("utf-8"))["tensors"][0]
    assert array.ravel()[:4].tolist() == truth["first"]


def test_array_of_a_view_is_a_copy(files: Path) -> None:
    with open_checkpoint(files / "pytorch" / "views.pth") as found:
        transposed = found["transposed"]
        assert transposed.extent is None
        array = transposed.array()
        array[0, 0] = 42
        assert transposed.array()[0, 0] == 0


def test_array_of_other_byte_order_has_this_machines(files: Path) -> None:
    with open_checkpoint(files / "pytorch" / "bigendian.pth") as found:
        for one in found.values():
            if one.dtype.numpy is not None:
                assert one.array().dtype.isnative


# Checkpoint -----------------------------------------------------------------------------------------


def test_name_of_two_goes_to_the_first() -> None:
    first, second = tensor("a.b", shape=(1,)), tensor("a", "b", shape=(2,))
    found = checkpoint(first, second)
    assert (len(found), list(found), found["a.b"]) == (1, ["a.b"], first)
    assert found.tensors == (first, second)


def test_mapping_keeps_the_order_of_the_file(guide: Path) -> None:
    with open_checkpoint(guide) as found:
        assert list(found)[:2] == ["model_state_dict.fc.weight", "model_state_dict.fc.bias"]
        assert list(found.values()) == [found[name] for name in found]


def test_parameters_count_weights_and_ties_once() -> None:
    found = checkpoint(
        tensor("w", role=Role.WEIGHTS),
        tensor("t", role=Role.WEIGHTS, shares_with="w"),
        tensor("m", role=Role.OPTIMIZER),
    )
    assert found.parameters == 2


@pytest.mark.parametrize(
    ("roles", "granularity"),
    [
        ((Role.WEIGHTS, Role.OPTIMIZER), Granularity.FULL),
        ((Role.WEIGHTS,), Granularity.PARTIAL),
        ((Role.OPTIMIZER, Role.TRAINING), Granularity.PARTIAL),
        ((Role.TRAINING,), Granularity.LIGHTWEIGHT),
        ((), Granularity.LIGHTWEIGHT),
    ],
)
def test_granularity(roles: tuple[Role, ...], granularity: Granularity) -> None:
    assert checkpoint(*(tensor(role.value, role=role) for role in roles)).granularity is granularity


def test_facts_outlive_the_file(guide: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.pth"
    shutil.copy(guide, path)
    with open_checkpoint(path) as found:
        pass
    path.unlink()
    assert (found.training.epoch, found.metadata["epoch"], found.parameters) == (10, 10, 22)
    with pytest.raises(CheckpointError):
        found["model_state_dict.fc.weight"].tobytes()


def test_repr_says_what_it_is(guide: Path) -> None:
    with open_checkpoint(guide) as found:
        assert repr(found) == f"<pytorch checkpoint {str(guide)!r}: 8 tensors>"


@pytest.mark.parametrize("kind", [str, Path])
def test_path_of_any_kind(guide: Path, kind) -> None:
    with open_checkpoint(kind(guide)) as found:
        assert found.training.epoch == 10


def test_file_that_shrinks_is_an_error(guide: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.pth"
    shutil.copy(guide, path)
    with open_checkpoint(path) as found:
        os.truncate(path, 100)
        with pytest.raises(CheckpointError, match="the file ends"):
            found["model_state_dict.fc.weight"].tobytes()


def test_blocks_are_small_whatever_the_tensor(tmp_path: Path) -> None:
    path = tmp_path / "zeros.npy"
    head = npy(header("'|u1'", "(16777216,)"))
    path.write_bytes(head)
    os.truncate(path, len(head) + (1 << 24))
    with open_checkpoint(path) as found:
        (one,) = found.tensors
        assert {len(block) for block in one.blocks()} == {1 << 20}


def test_the_old_name_of_replace_is_deprecated(guide: Path) -> None:
    with open_checkpoint(guide) as found, pytest.warns(DeprecationWarning, match=r"use Checkpoint\.replace"):
        assert found.but(complete=False).complete is False


def test_another_checkpoint_of_the_same_files(guide: Path) -> None:
    with open_checkpoint(guide) as found:
        left = found.tensors[:2]
        other = found.replace(tensors=left, metadata=lambda: {"epoch": 4}, complete=False)
        assert (other.tensors, other.metadata, other.complete) == (left, {"epoch": 4}, False)
        same = found.replace()
        for part in ("path", "format", "variant", "tensors", "files", "metadata", "training", "layers"):
            assert getattr(same, part) == getattr(found, part)
        for part in ("native", "producer", "findings", "safety", "complete", "close", "spans"):
            assert getattr(same, part) == getattr(found, part)
        assert (own_names_of(same), judged_files(same)) == (own_names_of(found), judged_files(found))
        assert same.tree is found.tree
        assert found.metadata["epoch"] == 10


def test_old_names_still_work_with_a_warning(guide: Path) -> None:
    with open_checkpoint(guide) as found:
        with pytest.warns(DeprecationWarning, match=r"Checkpoint\.judged is deprecated: it is internal"):
            assert found.judged == {str(guide.absolute())}
        with pytest.warns(DeprecationWarning, match=r"Checkpoint\.own_names is deprecated"):
            assert found.own_names == {}
        with pytest.warns(DeprecationWarning, match=r"but is deprecated: use Checkpoint\.replace"):
            assert found.but(complete=False).complete is False
    with pytest.warns(DeprecationWarning, match=r"is_fine is deprecated, use passes\(\)"):
        assert verify(guide).is_fine
