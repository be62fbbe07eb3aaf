"""What is written as a distributed checkpoint is loaded by ``torch.distributed.checkpoint``."""

from __future__ import annotations

import os
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpttool import Role, Tensor, Truncated, open_checkpoint
from ckpttool.containers.pickle.pickler import dumps
from ckpttool.core.dtypes import BY_NAME, UINT8
from ckpttool.core.values import in_memory
from ckpttool.formats.sidecar import ENTRY
from ckpttool.formats.torch import dcp_writer
from ckpttool.formats.torch.dcp_writer import StoredItem, TorchDcpWriter, flat_state_dict, write_metadata
from ckpttool.formats.writer import Content, WriteOptions
from ckpttool.storage.sink import Sink
from ckpttool.transaction.staged_output import StagedOutput
from tests.support.contents import content_of
from tests.support.torch_files import of_every_type
from tests.support.writing import byte_tensor, require_same_tree
from tests.support.writing import write as written

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.framework,
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"),
]


def write(content: Content, target: Path) -> Path:
    return written(TorchDcpWriter(), content, target, WriteOptions(name=target.name))


def require_same(target: Path, content: Content) -> None:
    with open_checkpoint(target) as opened:
        assert opened.format == "torch-dcp"
    require_same_tree(target, content)


def rewritten(held: Any, directory: Path) -> Path:
    """Have PyTorch save an object as one file, and write what is in that as a distributed checkpoint."""
    torch.save(held, directory / "saved.pt")
    with open_checkpoint(directory / "saved.pt") as opened:
        content = content_of(opened)
        target = write(content, directory / "target")
        require_same(target, content)
    return target


def some_training() -> dict[str, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(300, 200), torch.nn.BatchNorm1d(200))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.rand(4, 300)).sum().backward()
    optimizer.step()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "epoch": 3,
        "list": [1, {"a": torch.ones(2)}, (4, 5), []],
        "texts": ["a", "b"],
        "none": None,
        "a.b": {"c": torch.zeros(1), "d\n": {}},
        "e": [],
    }


def loaded_whole(target: Path, directory: Path) -> Any:
    """Return what PyTorch's own tool makes of a distributed checkpoint."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(target, directory / "whole.pt")
    return torch.load(directory / "whole.pt", weights_only=False)


def saved_by_pytorch(held: Any, directory: Path) -> Path:
    import torch.distributed.checkpoint as dcp

    dcp.save(held, checkpoint_id=directory / "theirs", no_dist=True)
    return directory / "theirs"


def comparable(node: Any) -> Any:
    """Return an object with its tensors told by type, shape and bytes."""
    if isinstance(node, torch.Tensor):
        flat = node.detach().contiguous().reshape(-1)
        bits = bytes(flat.view(torch.uint8).numpy()) if len(flat) else b""
        return (str(node.dtype), tuple(node.shape), bits)
    if isinstance(node, dict):
        return {key: comparable(value) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return type(node)(comparable(value) for value in node)
    return node


def test_it_becomes_what_pytorchs_own_becomes(tmp_path: Path) -> None:
    """PyTorch drops an empty dictionary, which is kept here."""
    ours = comparable(loaded_whole(rewritten(some_training(), tmp_path), tmp_path))
    theirs = comparable(loaded_whole(saved_by_pytorch(some_training(), tmp_path), tmp_path))
    assert ours["a.b"].pop("d\n") == {}
    assert ours == theirs


def test_it_is_described_as_pytorch_describes_it(tmp_path: Path) -> None:
    held = some_training()
    del held["a.b"]["d\n"]
    target = rewritten(held, tmp_path)
    ours = pickle.loads((target / ".metadata").read_bytes())
    theirs = pickle.loads((saved_by_pytorch(held, tmp_path) / ".metadata").read_bytes())
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.planner_data == theirs.planner_data
    assert ours.storage_data.keys() == theirs.storage_data.keys()
    assert ours.version == theirs.version


def test_a_model_loads_it(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    saved = some_training()
    target = rewritten(saved, tmp_path)
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(300, 200), torch.nn.BatchNorm1d(200))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.rand(4, 300)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 0}
    dcp.load(state, checkpoint_id=target, no_dist=True)
    assert comparable(state) == comparable({key: saved[key] for key in state})


def test_ties_are_stored_once(tmp_path: Path) -> None:
    tied = torch.rand(500, 100)
    target = rewritten({"a": tied, "b": {"c": tied}, "view": tied[3:5]}, tmp_path)
    assert 200_000 < (target / "__0_0.distcp").stat().st_size < 210_000
    whole = loaded_whole(target, tmp_path)
    assert torch.equal(whole["a"], tied)
    assert torch.equal(whole["b"]["c"], tied)
    assert torch.equal(whole["view"], tied[3:5])


def test_every_type_comes_back(tmp_path: Path) -> None:
    held = of_every_type(TorchDcpWriter.dtypes)
    target = rewritten(held, tmp_path)
    found = pickle.loads((target / ".metadata").read_bytes())
    data = (target / "__0_0.distcp").read_bytes()
    for index, place in found.storage_data.items():
        (tmp_path / "item.pt").write_bytes(data[place.offset : place.offset + place.length])
        item = torch.load(tmp_path / "item.pt", weights_only=True)
        expected = held[index.fqn]
        assert (item.dtype, item.shape) == (expected.dtype, expected.shape), index.fqn
        assert bytes(item.untyped_storage()[:]) == bytes(expected.clone().untyped_storage()[:])
        assert found.state_dict_metadata[index.fqn].properties.dtype is expected.dtype


def test_what_a_state_dict_does_not_tell_is_carried(tmp_path: Path) -> None:
    held = OrderedDict(
        a=torch.nn.Parameter(torch.ones(2)), b=(torch.ones(1), {1: torch.zeros(2)}), c={2.5: {3}}
    )
    target = rewritten(held, tmp_path)
    assert sorted(os.listdir(target)) == [".metadata", "__0_0.distcp", ENTRY]
    found = pickle.loads((target / ".metadata").read_bytes())
    assert found.state_dict_metadata["a"].properties.requires_grad
    assert [*found.planner_data] == ["a", "b", "c.2.5"]


def test_without_a_tree_it_is_tensors_by_name_and_the_rest_is_carried(tmp_path: Path) -> None:
    first = Tensor(("a", 0, "b"), BY_NAME["float32"], (2,), Role.OPTIMIZER, in_memory(bytes(8)))
    second = Tensor(("c",), BY_NAME["float32"], (2,), Role.OTHER, first.values, shares_with="a.0.b")
    content = Content((first, second), None, {"epoch": 3}, {"x.y": b"\0\xff"}, "tensorflow")
    target = write(content, tmp_path / "target")
    require_same(target, content)
    with open_checkpoint(target) as opened:
        assert (opened.metadata, opened.native) == (content.metadata, content.native)
        assert opened.training.epoch == 3
    whole = loaded_whole(target, tmp_path)
    assert {name: one.tolist() for name, one in whole.items()} == {"a.0.b": [0, 0], "c": [0, 0]}


def test_a_root_that_is_no_dictionary_is_tensors_by_name(tmp_path: Path) -> None:
    target = rewritten([torch.ones(2), {"a": torch.zeros(3)}, 5], tmp_path)
    assert sorted(loaded_whole(target, tmp_path)) == ["0", "1.a"]


def test_none_and_nothing_else_comes_back(tmp_path: Path) -> None:
    target = rewritten(None, tmp_path)
    with open_checkpoint(target) as opened:
        assert pickle.loads(dumps(opened.tree, lambda one: "0")) is None


def test_arrays_that_are_one_object_are_stored_once(tmp_path: Path) -> None:
    array = np.arange(6.0)
    whole = loaded_whole(rewritten({"a": array, "b": array, "c": array + 0}, tmp_path), tmp_path)
    assert [whole[name].tolist() for name in "abc"] == [array.tolist()] * 3


def test_lists_that_hold_each_other_often_are_asked_once() -> None:
    numbers: list[Any] = [1]
    for _ in range(60):
        numbers = [numbers, numbers]
    dicts: dict[str, Any] = {"a": 1}
    for _ in range(40):
        dicts = {"l": dicts, "r": dicts}
    (item,) = flat_state_dict(Content((), {"x": numbers}))
    assert (item.fqn, item.node) == ("x", numbers)
    assert [*TorchDcpWriter().refusals(Content((), {"x": dicts}), WriteOptions())] == [
        "more entries than one checkpoint can list (at most 100,000)"
    ]


def test_deep_lists_are_no_recursion() -> None:
    one = byte_tensor("a", b"x")
    bare: list[Any] = [1]
    full: list[Any] = [one]
    for _ in range(5000):
        bare, full = [bare], [full]
    assert [len(item.path) for item in flat_state_dict(Content((one,), {"x": bare, "y": full}))] == [1, 5002]


def test_a_tensor_without_values_is_refused() -> None:
    bare = Tensor(("a",), UINT8, (1,))
    assert [*TorchDcpWriter().refusals(Content((bare,), {"a": [bare]}), WriteOptions())] == [
        "a.0: it has no values (it was saved from the meta device)"
    ]


AWKWARD = ["", ".", "a.b", "a/b", "..", "é", "\0", "\n", "\ud800", "a" * 65_536, "<state>"]


def test_awkward_names_come_back(tmp_path: Path) -> None:
    content = Content(tuple(byte_tensor(name, bytes([at])) for at, name in enumerate(AWKWARD)))
    target = write(content, tmp_path / "target")
    require_same(target, content)
    whole = loaded_whole(target, tmp_path)
    assert {name: one.tolist() for name, one in whole.items()} == {
        name: [at] for at, name in enumerate(AWKWARD)
    }


def test_more_names_than_a_byte_can_count_are_remembered_right(tmp_path: Path) -> None:
    """A reader keeps what it has to know again in numbered places, and sets pairs a thousand at once."""
    content = Content(tuple(byte_tensor(f"t{at}", bytes([at % 256])) for at in range(2_001)))
    target = write(content, tmp_path / "target")
    found = pickle.loads((target / ".metadata").read_bytes())
    assert [*found.planner_data] == [one.name for one in content.tensors]
    assert len(found.storage_data) == 2_001


def test_numbers_of_any_size_are_written(tmp_path: Path) -> None:
    """What lies beyond 4 GiB has an offset that no opcode of a fixed size holds."""
    numbers = [0, 255, 256, 65_535, 65_536, (1 << 31) - 1, 1 << 31, (1 << 32) + 5, 1 << 40, (1 << 63) - 1]
    stored = [
        StoredItem(
            f"t{at}", (f"t{at}",), Tensor(("t",), UINT8, (0, number)), False, "__0_0.distcp", number, 7
        )
        for at, number in enumerate(numbers)
    ]
    data = bytearray()
    write_metadata(data.extend, stored)
    found = pickle.loads(data)
    assert [place.offset for place in found.storage_data.values()] == numbers
    assert [one.size for one in found.state_dict_metadata.values()] == [(0, number) for number in numbers]


def test_names_that_several_entries_would_have_are_refused() -> None:
    one, other = byte_tensor("a.b", b"x"), Tensor(("a", "b"), UINT8, (1,), values=in_memory(b"y"))
    for tree in ({"a.b": one, "a": {"b": 5}}, {"a": {"b": other}, "a.b": []}):
        assert [*TorchDcpWriter().refusals(Content((one,), tree), WriteOptions())] == [
            "a.b: several entries of the state dict would have this name (use --map)"
        ]


def test_names_that_are_not_read_as_names_are_refused() -> None:
    long = "a" * 65_537
    assert [*TorchDcpWriter().refusals(Content((byte_tensor(long, b"x"),)), WriteOptions())] == [
        f"{long}: a name of 65,537 bytes; at most 65,536 are read (use --map)"
    ]


def test_too_many_entries_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dcp_writer, "_MAX_ENTRIES", 1)
    content = Content((byte_tensor("a", b"x"),), {"a": 1, "b": 2})
    assert [*TorchDcpWriter().refusals(content, WriteOptions())] == [
        "more entries than one checkpoint can list (at most 1)"
    ]


def test_the_metadata_is_written_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    created: list[str] = []
    create = StagedOutput.create

    def noted(self: StagedOutput, name: str = "") -> Sink:
        created.append(name)
        return create(self, name)

    monkeypatch.setattr(StagedOutput, "create", noted)
    write(Content((byte_tensor("a", b"x"),), None, {"epoch": 1}), tmp_path / "target")
    assert created == ["__0_0.distcp", ENTRY, ".metadata"]


def test_a_damaged_entry_is_told_and_not_used(tmp_path: Path) -> None:
    target = write(Content((byte_tensor("a", b"x"),), None, {"epoch": 3}), tmp_path / "target")
    entry = target / ENTRY
    entry.write_bytes(entry.read_bytes().replace(b'"schema"', b'"Schema"'))
    with open_checkpoint(target) as opened:
        assert [(finding.code, finding.where) for finding in opened.findings] == [("content-entry", ENTRY)]
        assert opened.training.epoch is None
        assert opened["a"].tobytes() == b"x"


def test_a_source_that_becomes_shorter_leaves_nothing(tmp_path: Path) -> None:
    torch.save(some_training(), tmp_path / "saved.pt")
    with open_checkpoint(tmp_path / "saved.pt") as opened, pytest.raises(Truncated):
        content = content_of(opened)
        os.truncate(tmp_path / "saved.pt", 100_000)
        write(content, tmp_path / "target")
    assert os.listdir(tmp_path) == ["saved.pt"]
