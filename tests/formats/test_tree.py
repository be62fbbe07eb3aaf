"""The tree of a checkpoint: what PyTorch saved, and what it loads out of the tree."""

from __future__ import annotations

import argparse
import collections
import pickle
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckpttool import Checkpoint, Tensor, open_checkpoint
from ckpttool.containers.pickle.pickle_nodes import NDARRAY, REQUIRES_GRAD, Call, DictSubclass, Opaque
from ckpttool.formats.content.tree import opaque_nodes, replace_tensors, tensors_in, walk
from ckpttool.formats.sidecar import apply_sidecar, sidecar_of
from ckpttool.formats.writer import Content
from tests.support.checkpoints import numbers, of_tensors, tensor
from tests.support.torch_trees import SHARED, VALUES, differences, write_zip

pytestmark = pytest.mark.framework


class Stranger:
    """A class of the user's."""

    def __init__(self, **attributes: object) -> None:
        vars(self).update(attributes)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns of what it will do without one day
        yield


def through_tree(value: object, directory: Path, **options: Any) -> Any:
    """Return what PyTorch loads from the pickle of the tree of what it saved."""
    torch.save(value, directory / "a.pth", **options)
    with open_checkpoint(directory / "a.pth") as saved:
        write_zip(saved.tree, directory / "b.pth")
        with open_checkpoint(directory / "b.pth") as again:
            assert [(one.name, one.shares_with) for one in again.tensors] == [
                (one.name, one.shares_with) for one in saved.tensors
            ]
    return torch.load(directory / "b.pth", weights_only=False)


def through_entry(value: object, directory: Path) -> Any:
    """Return the same by way of a format that holds tensors by name, and the entry."""
    torch.save(value, directory / "a.pth")
    with open_checkpoint(directory / "a.pth") as saved:
        content = Content(tuple(one for one in saved.tensors if one.values is not None), saved.tree)
        bare = flat(content)
        carried = sidecar_of(content)
        found = bare if carried is None else apply_sidecar(bare, carried, "here")
        assert not found.findings
        assert [(one.name, one.path, one.role, one.shares_with) for one in found.tensors] == [
            (one.name, one.path, one.role, one.shares_with) for one in content.tensors
        ]
        assert list(opaque_nodes(found.tree)) == list(opaque_nodes(saved.tree))
        assert found.training == saved.training
        write_zip(found.tree, directory / "c.pth")
    return torch.load(directory / "c.pth", weights_only=False)


def flat(content: Content) -> Checkpoint:
    """Return what a format without ties and nesting holds of a content."""
    return of_tensors([replace(tensor, path=(tensor.name,)) for tensor in content.owned], "safetensors")


def test_an_equal_object_comes_out_of_the_tree_and_of_the_entry(tmp_path: Path) -> None:
    for name in VALUES:
        value = VALUES[name]
        torch.save(value, tmp_path / "expected.pth")
        expected = torch.load(tmp_path / "expected.pth", weights_only=False)
        assert differences(expected, through_tree(value, tmp_path)) == [], name
        assert differences(expected, through_entry(value, tmp_path)) == [], name


def test_older_and_newer_pickles_have_the_same_tree(tmp_path: Path) -> None:
    older = [{"_use_new_zipfile_serialization": False}, {"pickle_protocol": 5}]
    names = ["training", "bytes", "numbers", "mappings", "ties", "numpy", "quantized", "records"]
    for options in older:
        for name in names:
            value = VALUES[name]
            assert (
                differences(through_tree(value, tmp_path), through_tree(value, tmp_path, **options)) == []
            ), name


WEIGHTS_ONLY = [
    "training",
    "order and keys",
    "tuples",
    "bytes",
    "numbers",
    "floats",
    "torch values",
    "shared",
    "parameters",
    "gradients",
    "ties",
    "views",
    "small",
    "types",
    "sparse",
    "quantized",
    "nested",
    "no values",
    "attributes",
    "lazy bits",
    "texts",
]


def test_what_pytorch_trusts_loads_with_weights_only(tmp_path: Path) -> None:
    for name in WEIGHTS_ONLY:
        torch.save(VALUES[name], tmp_path / "expected.pth")
        expected = torch.load(tmp_path / "expected.pth", weights_only=False)
        through_tree(VALUES[name], tmp_path)
        assert differences(expected, torch.load(tmp_path / "b.pth", weights_only=True)) == [], name


def test_shared_objects_stay_shared(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    value = {"lists": VALUES["shared"], "ties": VALUES["ties"], "parameters": [parameter, parameter]}
    for made in (through_tree(value, tmp_path), through_entry(value, tmp_path)):
        first, second, third = made["lists"]
        assert first is second["again"] is third
        assert made["parameters"][0] is made["parameters"][1]
        ties = made["ties"]
        assert ties["a"] is ties["c"]
        ties["a"][0] = 7
        assert ties["c"][0] == 7


def test_a_view_of_the_same_elements_stays_tied(tmp_path: Path) -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = torch.nn.Linear(2, 2)
            self.b = torch.nn.Linear(2, 2)
            self.b.weight = self.a.weight

    for through in (through_tree, through_entry):
        made = through(Tied().state_dict(), tmp_path)
        assert made["a.weight"].data_ptr() == made["b.weight"].data_ptr()


def test_arrays_that_are_one_object_stay_one(tmp_path: Path) -> None:
    array, data = np.arange(6.0), bytearray(b"ab")
    value = {"a": array, "b": [array], "equal": array.copy(), "data": [data, data, bytearray(b"ab")]}
    torch.save(value, tmp_path / "a.pth")
    with open_checkpoint(tmp_path / "a.pth") as saved:
        ties = [(one.name, one.shares_with) for one in saved.tensors]
    assert ties == [("a", None), ("b.0", "a"), ("equal", None)]
    for made in (through_tree(value, tmp_path), through_entry(value, tmp_path)):
        assert made["a"] is made["b"][0] and made["a"] is not made["equal"]
        assert made["data"][0] is made["data"][1] and made["data"][0] is not made["data"][2]


def test_none_and_nothing_else_comes_through(tmp_path: Path) -> None:
    assert through_tree(None, tmp_path) is None
    assert through_entry(None, tmp_path) is None


def test_an_object_that_is_made_anew_stays_so_where_tensors_are_replaced(tmp_path: Path) -> None:
    torch.save(argparse.Namespace(t=torch.ones(2)), tmp_path / "a.pth", pickle_protocol=4)
    with open_checkpoint(tmp_path / "a.pth") as saved:
        (one,) = saved.tensors
        other = replace(one, path=("u",))
        made: Any = replace_tensors(saved.tree, {id(one): other})
        assert (made.is_new, made.state["t"]) == (saved.tree.is_new, other)  # type: ignore[attr-defined]
        assert made.is_new


def test_a_key_of_many_digits_is_told(tmp_path: Path) -> None:
    torch.save({1 << 80_000: Stranger(x=1)}, tmp_path / "a.pth")
    with open_checkpoint(tmp_path / "a.pth") as saved:
        ((path, _),) = opaque_nodes(saved.tree)
    assert path.startswith("<integer of 80,001 bits")


def test_a_tree_of_its_own_objects(tmp_path: Path) -> None:
    torch.save(
        {"x": torch.ones(2, requires_grad=True), "a": np.ones(2), "o": collections.OrderedDict()},
        tmp_path / "a",
    )
    with open_checkpoint(tmp_path / "a") as saved:
        tree: Any = saved.tree
        assert isinstance(tree["x"], Call) and tree["x"].function == REQUIRES_GRAD
        assert tree["x"].args == (saved["x"],)
        assert isinstance(tree["a"], Call) and tree["a"].function == NDARRAY
        assert isinstance(tree["o"], DictSubclass) and str(tree["o"].kind) == "collections.OrderedDict"
        assert list(tensors_in(tree)) == [saved["x"], saved["a"]]


# What can't be carried ------------------------------------------------------------------------------


def test_a_class_of_the_users_is_told_and_its_tensors_stay(tmp_path: Path) -> None:
    value = {"plain": Stranger(x=1), "full": Stranger(x=1, t=torch.ones(2)), "kept": 3}
    torch.save(value, tmp_path / "a.pth")
    with open_checkpoint(tmp_path / "a.pth") as saved:
        told = dict(opaque_nodes(saved.tree))
        assert sorted(told) == ["full", "plain"]
        assert all("Stranger, which is not known to be plain data" in why for why in told.values())
    for made in (through_tree(value, tmp_path), through_entry(value, tmp_path)):
        assert differences(made, {"full": {"x": 1, "t": torch.ones(2)}, "kept": 3}) == []


def test_a_module_is_its_state_dict(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    torch.save({"model": model, "epoch": 1}, tmp_path / "a.pth")
    with open_checkpoint(tmp_path / "a.pth") as saved:
        assert [path for path, _ in opaque_nodes(saved.tree)] == ["model"]
    made = through_tree({"model": model, "epoch": 1}, tmp_path)
    assert differences(made, {"model": dict(model.state_dict()), "epoch": 1}) == []


def test_a_record_only_loses_the_attribute_that_is_strange(tmp_path: Path) -> None:
    value = {"args": argparse.Namespace(lr=0.1, strange=Stranger())}
    torch.save(value, tmp_path / "a.pth")
    with open_checkpoint(tmp_path / "a.pth") as saved:
        assert [path for path, _ in opaque_nodes(saved.tree)] == ["args.strange"]
    assert through_tree(value, tmp_path)["args"] == argparse.Namespace(lr=0.1)


def test_an_object_with_a_strange_part_goes_as_a_whole(tmp_path: Path) -> None:
    torch.save({"queue": collections.deque([1, Stranger()]), "list": [1, Stranger()]}, tmp_path / "a.pth")
    with open_checkpoint(tmp_path / "a.pth") as saved:
        stranger = f"an object of {__name__}.Stranger, which is not known to be plain data"
        whole = f"an object of collections.deque, which holds {stranger}"
        assert list(opaque_nodes(saved.tree)) == [("queue", whole), ("list.1", stranger)]
    assert through_tree({"list": [1, Stranger()]}, tmp_path) == {"list": [1, None]}


def test_a_jagged_tensor_is_told_and_its_parts_stay(tmp_path: Path) -> None:
    jagged = torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)], layout=torch.jagged)
    torch.save({"jagged": jagged}, tmp_path / "a.pth")
    with open_checkpoint(tmp_path / "a.pth") as saved:
        assert [path for path, _ in opaque_nodes(saved.tree)] == ["jagged"]
    made = through_tree({"jagged": jagged}, tmp_path)["jagged"]
    assert torch.equal(made["values"], jagged.values())
    assert torch.equal(made["offsets"], jagged.offsets())


class Marked(torch.Tensor):
    """A subclass of the user's."""


def test_a_subclass_of_the_users_is_a_tensor_with_its_attributes(tmp_path: Path) -> None:
    marked = torch.ones(2).as_subclass(Marked)
    marked.scale = torch.zeros(3)
    torch.save({"x": marked}, tmp_path / "a.pth")
    with open_checkpoint(tmp_path / "a.pth") as saved:
        assert [path for path, _ in opaque_nodes(saved.tree)] == ["x"]
        assert list(saved) == ["x", "x.scale"]
    for made in (through_tree({"x": marked}, tmp_path), through_entry({"x": marked}, tmp_path)):
        assert type(made["x"]) is torch.Tensor
        assert made["x"].tolist() == [1, 1]
        assert torch.equal(made["x"].scale, torch.zeros(3))


def test_a_cycle_is_told(tmp_path: Path) -> None:
    value: dict[str, Any] = {"list": [1]}
    value["list"].append(value["list"])
    value["self"] = value
    torch.save(value, tmp_path / "a.pth")
    with open_checkpoint(tmp_path / "a.pth") as saved:
        assert list(opaque_nodes(saved.tree)) == [("list.1", "a cycle"), ("self", "a cycle")]
    assert through_tree(value, tmp_path) == {"list": [1, None]}


def test_a_strange_key_becomes_its_text(tmp_path: Path) -> None:
    value = {Stranger: torch.ones(2), "x": 1}
    torch.save(value, tmp_path / "a.pth")
    made = through_tree(value, tmp_path)
    (key, other) = made
    assert key.endswith("Stranger") and other == "x"
    assert torch.equal(made[key], torch.ones(2))


def test_nothing_recurses(tmp_path: Path) -> None:
    deep: Any = {"t": torch.ones(1)}
    for _ in range(120):
        deep = {"level": [(deep,)]}
    for made in (through_tree(deep, tmp_path), through_entry(deep, tmp_path)):
        assert differences(deep, made) == []


# What is done with trees -----------------------------------------------------------------------------


def test_other_tensors_are_put_into_a_tree(tmp_path: Path) -> None:
    torch.save(
        VALUES["training"] | {"q": VALUES["quantized"], "shared": VALUES["shared"]}, tmp_path / "a.pth"
    )
    with open_checkpoint(tmp_path / "a.pth") as saved:
        new = {id(one): replace(one, path=("new", one.name)) for one in saved.tensors}
        made = replace_tensors(saved.tree, new)
        assert {one.name for one in tensors_in(made)} == {f"new.{one.name}" for one in tensors_in(saved.tree)}
        assert {one.name for one in tensors_in(saved.tree)} <= set(saved)
        lists = [node for _, node in walk(made) if node == SHARED]
        assert len(lists) == 1


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.complex_numbers(allow_nan=False)
    | st.text()
    | st.text("\ud800$a", max_size=3)
    | st.binary()
    | st.builds(bytearray, st.binary(max_size=3)),
    lambda below: (
        st.lists(below, max_size=4)
        | st.lists(below, max_size=4).map(tuple)
        | st.dictionaries(
            st.text() | st.integers() | st.none() | st.tuples(st.integers(), st.text()), below, max_size=4
        )
        | st.sets(st.text() | st.integers() | st.binary(), max_size=4)
        | st.frozensets(st.integers(), max_size=3)
        | st.dictionaries(st.text(), below, max_size=3).map(collections.OrderedDict)
    ),
    max_leaves=25,
)


@given(PLAIN)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_plain_object_comes_through(tmp_path: Path, value: object) -> None:
    expected = pickle.loads(pickle.dumps(value))
    assert differences(expected, through_tree(value, tmp_path)) == []
    assert differences(expected, through_entry(value, tmp_path)) == []


def test_opaque_is_no_equal_of_another() -> None:
    assert Opaque("a") != Opaque("a")
    assert len({Opaque("a"), Opaque("a")}) == 2
    assert isinstance(next(tensors_in([tensor("a", numbers(2))])), Tensor)


def test_the_root_is_told_as_the_whole(tmp_path: Path) -> None:
    torch.save(Stranger(x=1, t=torch.ones(2)), tmp_path / "a.pth")
    with open_checkpoint(tmp_path / "a.pth") as saved:
        (told,) = opaque_nodes(saved.tree)
    assert told == ("the whole", f"an object of {__name__}.Stranger, which is not known to be plain data")


def test_what_holds_what_can_not_be_carried_is_told_with_that_alone(tmp_path: Path) -> None:
    inner = collections.deque([Stranger()])
    torch.save({"x": collections.deque([inner])}, tmp_path / "a.pth")
    with open_checkpoint(tmp_path / "a.pth") as saved:
        ((_, why),) = opaque_nodes(saved.tree)
    why_not = f"an object of {__name__}.Stranger, which is not known to be plain data"
    assert why == f"an object of collections.deque, which holds {why_not}"
