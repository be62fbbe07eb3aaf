"""From tensors to what is known of the training."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from ckpttool import Role, Tensor
from ckpttool.core.dtypes import BY_NAME
from ckpttool.core.readable import Buffer
from ckpttool.core.tensor import Extent, Path
from ckpttool.core.values import in_memory
from ckpttool.formats.content.assembly import infer_roles, name_tensors, training_of
from ckpttool.formats.content.plain_data import lazy_scalar
from ckpttool.formats.content.tree import TensorParts
from ckpttool.formats.torch.objects import Storage, TorchObjects


@pytest.mark.parametrize(
    ("dtype", "data", "number"),
    [
        ("float64", "9a9999999999b93f", 0.1),
        ("float32", "cdcccc3d", 0.1),
        ("float16", "662e", 0.0999755859375),
        ("bfloat16", "cd3d", 0.1),
        ("int64", "ffffffffffffffff", -1),
        ("uint8", "ff", 255),
    ],
)
def test_scalar_is_the_number_that_was_saved(dtype: str, data: str, number: float) -> None:
    """The bytes are PyTorch's for ``torch.tensor(0.1, dtype=…)``, and those of whole numbers."""
    tensor = Tensor(("x",), BY_NAME[dtype], (), values=in_memory(bytes.fromhex(data)))
    assert lazy_scalar(tensor)() == pytest.approx(number, rel=1e-7)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "int64", "bool"])
@pytest.mark.parametrize("values", [None, in_memory(b"")])
def test_scalar_that_the_file_does_not_hold_is_unknown(dtype: str, values: in_memory | None) -> None:
    step = Tensor(("step",), BY_NAME[dtype], (), Role.TRAINING, values)
    assert lazy_scalar(step)() is None
    assert training_of({}, (step,), "m.pth").step is None


def test_tensors_are_tied_only_within_one_file() -> None:
    """Each rank of a distributed checkpoint numbers its storages from 0."""

    def view(path: str) -> TensorParts:
        dtype = BY_NAME["float32"]
        storage = Storage("0", dtype, 16, Buffer(path, bytes(16)), 0, Extent(path, 0, 16))
        return TorchObjects(path, lambda id: storage).tensor_view(storage, dtype, 0, (4,), (1,))

    tensors = name_tensors([(("a",), view("0")), (("b",), view("1")), (("c",), view("0"))], {})
    assert [tensor.shares_with for tensor in tensors] == [None, None, "a"]


def role_by_path(
    shapes: dict[Path, tuple[int, ...]],
    rest: object = None,
    modules: Collection[Path] = (),
    optimizers: Collection[Path] = (),
) -> dict[str, str]:
    roles = infer_roles(list(shapes.items()), rest, modules, optimizers)
    return {".".join(map(str, path)): role.value for path, role in zip(shapes, roles, strict=True)}


def test_roles_beside_the_weights_of_a_plain_dictionary() -> None:
    shapes: dict[Path, tuple[int, ...]] = {
        ("fc.weight",): (2, 3),
        ("fc.num_batches_tracked",): (),
        ("steps",): (),
        ("pos.table",): (3,),
        ("step",): (),
        ("best_acc",): (),
        ("rng_state",): (9,),
        ("optimizer", "state", 0, "exp_avg"): (2, 3),
    }
    found = role_by_path(shapes, {"epoch": 3})
    assert [*found.values()] == [*["weights"] * 4, *["training"] * 3, "optimizer"]


def test_flattened_paths_of_a_whole_checkpoint_are_no_state_dict() -> None:
    shapes: dict[Path, tuple[int, ...]] = {("model.fc.weight",): (2,), ("dataloader.worker",): ()}
    assert [*role_by_path(shapes, {"epoch": 3}).values()] == ["weights", "other"]


def test_roles_in_the_state_dicts_of_modules_and_of_optimizers() -> None:
    shapes: dict[Path, tuple[int, ...]] = {
        (0, "step"): (),
        (0, "lr"): (2,),
        (1, "state", 0, "exp_avg.weight"): (2,),
        ("ema", "weight"): (2,),
        ("best", "weight"): (2,),
    }
    found = role_by_path(shapes, {"epoch": 3}, {(0,), ("ema",), ("best",)}, {(1,)})
    assert [*found.values()] == ["weights", "weights", "optimizer", "other", "weights"]
