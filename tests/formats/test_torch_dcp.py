"""Distributed checkpoints: the real ones, and each way in which their parts can disagree."""

from __future__ import annotations

import copyreg
import io
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckpttool import AccessDenied, CheckpointError, DamagedCheckpoint, Safety, diff, open_checkpoint, verify
from tests.support.checkpoints import codes
from tests.support.commands import Run
from tests.support.faults import close_link
from tests.support.opening import paths_in
from tests.support.thorough import spread

FILES = Path(__file__).parents[2] / "fixtures" / "files" / "torch-dcp"
STEP = 11
"""Every so many bytes one is damaged; with 1 the answers were the same too."""
BIT_STEP = 23
"""Every so many bits of a metadata one is flipped; with 1 the answer was the same too."""
Change = Callable[[Any], None]


class Node:
    """What a pickle builds of any class: made again as it was."""

    def __new__(cls, *args: object) -> Node:
        self = object.__new__(cls)
        self.args, self.state, self.called = args, None, False
        return self

    def __init__(self, *args: object) -> None:
        self.called = True

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __reduce__(self) -> tuple[object, ...]:
        if self.called:
            return (type(self), self.args, self.state)
        return (copyreg.__newobj__, (type(self), *self.args), self.state)


class Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return type(name, (Node,), {"__module__": module})


class Pickler(pickle._Pickler):  # type: ignore[name-defined]
    def save_global(self, obj: Any, name: str | None = None) -> None:
        self.save(obj.__module__)
        self.save(obj.__qualname__)
        self.write(pickle.STACK_GLOBAL)
        self.memoize(obj)


def copied(name: str, into: Path) -> Path:
    target = into / name
    shutil.copytree(FILES / name, target)
    return target


def rewritten(into: Path, change: Change, name: str = "two-ranks") -> Path:
    """Return a copy of a fixture whose metadata is changed."""
    target = copied(name, into)
    path = target / ".metadata"
    root = Unpickler(io.BytesIO(path.read_bytes())).load()
    change(root.state)
    with open(path, "wb") as file:
        Pickler(file, 4).dump(root)
    return target


def place_of(state: Any, fqn: str, at: int = 0) -> dict[str, Any]:
    """Return the fields of the storage info of a chunk."""
    found = [info.state for index, info in state["storage_data"].items() if index.state["fqn"] == fqn]
    return found[at]


def test_nothing_changed_is_nothing_found(tmp_path: Path) -> None:
    with open_checkpoint(rewritten(tmp_path, lambda state: None)) as opened:
        assert (opened.findings, opened.safety, opened.complete) == ((), (), True)


def test_names_come_from_the_paths_and_lists_stay_lists() -> None:
    with open_checkpoint(FILES / "two-ranks") as opened:
        assert ("model", "layer.with.dots") in {tensor.path for tensor in opened.tensors}
        assert ("optimizer", "state", 0, "exp_avg") in {tensor.path for tensor in opened.tensors}
        assert opened.metadata["optimizer"] == {"param_groups": [{"lr": 0.125, "params": [0]}]}
        assert opened.training.origin["epoch"] == "key epoch"


def test_only_what_lies_in_one_piece_has_an_extent() -> None:
    with open_checkpoint(FILES / "two-ranks") as opened:
        assert opened["model.weight"].extent is None
        assert opened["model.bias"].extent is not None


def test_every_record_is_covered_and_says_where_it_is() -> None:
    with open_checkpoint(FILES / "two-ranks") as opened:
        spans = list(opened.spans())
    assert [span.where for span in spans if span.crc32 is None] == [".metadata"]
    assert "model.weight: __0_0.distcp: archive/data/0" in {span.where for span in spans}


def test_the_directory_is_one_checkpoint(tmp_path: Path) -> None:
    target = copied("two-ranks", tmp_path)
    assert paths_in(tmp_path) == [target]


def test_a_missing_file_leaves_the_others_readable(tmp_path: Path) -> None:
    target = copied("two-ranks", tmp_path)
    (target / "__0_0.distcp").unlink()
    with open_checkpoint(target) as opened:
        assert "part-missing" in codes(opened)
        assert not opened.complete
        assert opened["model.weight"].values is None
        assert opened["model.bias"].array().shape == (3,)
    verification = verify(target)
    assert not verification.is_valid
    assert verification.safety is Safety.UNKNOWN


def test_a_short_file_is_truncated(tmp_path: Path) -> None:
    target = copied("two-ranks", tmp_path)
    os.truncate(target / "__1_0.distcp", 5000)
    with open_checkpoint(target) as opened:
        assert "part-truncated" in codes(opened)
        assert {finding.code for finding in opened.safety} == {"not-scanned"}
        assert not opened.complete


def test_without_metadata_the_save_was_interrupted(tmp_path: Path) -> None:
    target = copied("two-ranks", tmp_path)
    (target / ".metadata").rename(target / ".metadata.tmp")
    with open_checkpoint(target) as opened:
        assert codes(opened) == {"part-missing", "part-temporary"}
        assert (opened.complete, len(opened)) == (False, 0)
        assert {one.code for one in opened.safety} == {"not-scanned"}


def test_no_file_is_followed_out_of_the_directory(tmp_path: Path) -> None:
    cases = ["../two-ranks/__0_0.distcp", "/etc/passwd", "a/b.distcp", "..", "a\\b", ""]
    for at, name in enumerate(cases):
        folder = tmp_path / str(at)
        folder.mkdir()

        def change(state: Any, name: str = name) -> None:
            place_of(state, "model.bias")["relative_path"] = name

        with open_checkpoint(rewritten(folder, change)) as opened:
            assert "part-path" in codes(opened), name
            assert not opened.complete, name


def test_a_link_out_of_the_directory_is_not_followed(tmp_path: Path) -> None:
    target = copied("two-ranks", tmp_path)
    (target / "__0_0.distcp").rename(tmp_path / "elsewhere")
    (target / "__0_0.distcp").symlink_to(tmp_path / "elsewhere")
    with open_checkpoint(target) as opened:
        assert "part-path" in codes(opened)


def test_a_link_to_itself_is_a_missing_part_and_hides_no_other(files: Path, tmp_path: Path, run: Run) -> None:
    target = copied("two-ranks", tmp_path)
    (target / "__0_0.distcp").unlink()
    (target / "__0_0.distcp").symlink_to("__0_0.distcp")
    with open_checkpoint(target) as opened:
        assert "part-missing" in codes(opened)
        assert not opened.complete
    shutil.copy(files / "pytorch" / "guide.pth", tmp_path / "a.pth")
    assert "a.pth" in run("list", tmp_path).out


def test_a_link_that_may_not_be_followed_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    close_link(tmp_path / "extra.bin", monkeypatch)
    with pytest.raises(AccessDenied, match=r"extra\.bin"):
        open_checkpoint(tmp_path)


def moved(**fields: object) -> Change:
    return lambda state: place_of(state, "model.bias").update(fields)


def same_place(state: Any) -> None:
    place_of(state, "model.bias").update(place_of(state, "model.layer.with.dots"))


def grown(state: Any) -> None:
    state["state_dict_metadata"]["model.bias"].state["size"].args = ((9,),)


def outside(state: Any) -> None:
    state["state_dict_metadata"]["model.weight"].state["chunks"][1].state["offsets"].args = ((5, 0),)


def without_chunks(state: Any) -> None:
    state["state_dict_metadata"]["model.weight"].state["chunks"].clear()


def doubled(state: Any) -> None:
    state["state_dict_metadata"]["model.weight"].state["chunks"][1].state["offsets"].args = ((1, 0),)


def unplaced(state: Any) -> None:
    stored = state["storage_data"]
    del stored[next(index for index in stored if index.state["fqn"] == "model.bias")]


def with_path(*path: object) -> Change:
    """Return a change of the path that is given to one name."""
    return lambda state: state["planner_data"].update({"model.bias": path})


def renamed(field: str) -> Change:
    """Return a change of the name of one tensor in one of the mappings."""

    def change(state: Any) -> None:
        state[field]["model.tias"] = state[field].pop("model.bias")

    return change


def undescribed(state: Any) -> None:
    del state["state_dict_metadata"]["model.bias"]


def of_an_earlier_save(state: Any) -> None:
    """Leave out a tensor altogether: its bytes in the file are those of another save."""
    unplaced(state)
    undescribed(state)
    del state["planner_data"]["model.bias"]


def with_properties(at: int, value: Callable[[Any], Any]) -> Change:
    """Return a change of one of the properties of a tensor."""

    def change(state: Any) -> None:
        properties = state["state_dict_metadata"]["model.bias"].state["properties"]
        values = list(properties.state)
        values[at] = value(values[at])
        properties.state = tuple(values)

    return change


def with_arguments(*arguments: object) -> Callable[[Any], Any]:
    def change(node: Any) -> Any:
        node.args = arguments
        return node

    return change


def of_class(name: str, *keys: object) -> Change:
    """Return a change of the class of a node, which is found by keys, through states."""

    def change(state: Any) -> None:
        for key in keys:
            state = state.state if hasattr(state, "state") else state
            state = state[key]
        state.__class__ = type(name, (Node,), {"__module__": type(state).__module__})

    return change


def test_contradictions(tmp_path: Path) -> None:
    cases = [
        (with_path("model", "tias"), "metadata-disagrees"),
        (with_path("model.bias", 0), "metadata-disagrees"),
        (with_path(), "metadata-disagrees"),
        (renamed("planner_data"), "metadata-disagrees"),
        (renamed("state_dict_metadata"), "metadata-disagrees"),
        (undescribed, "metadata-disagrees"),
        (of_an_earlier_save, "items-gap"),
        (moved(offset=1 << 40), "part-truncated"),
        (moved(length=1), "item-damaged"),
        (moved(offset=1), "items-overlap"),
        (same_place, "item-mismatch"),
        (grown, "chunks-wrong"),
        (outside, "chunks-wrong"),
        (without_chunks, "chunks-wrong"),
        (doubled, "chunks-wrong"),
        (unplaced, "part-missing"),
        (unplaced, "items-gap"),
    ]
    for at, (change, code) in enumerate(cases):
        folder = tmp_path / str(at)
        folder.mkdir()
        target = rewritten(folder, change)
        with open_checkpoint(target) as opened:
            assert code in codes(opened), code
        assert not verify(target).is_valid, code


def test_each_name_that_only_one_mapping_has_is_named_by_itself(tmp_path: Path) -> None:
    """Which of several belong together, nothing says."""

    def change(state: Any) -> None:
        paths = state["planner_data"]
        state["planner_data"] = {name[::-1]: (name[::-1],) for name in paths}

    with open_checkpoint(rewritten(tmp_path, change)) as opened:
        messages = [one.message for one in opened.findings if one.code == "metadata-disagrees"]
    assert messages.count(".metadata: no entry in planner_data") == len(messages) / 2
    said = ".metadata: planner_data names saib.ledom, which is not in state_dict_metadata"
    assert messages.count(said) == 1


def by_name(name: str) -> Change:
    """Return a change of a memory format to how Python 3.11.0 to 3.11.3 pickle it."""
    found = type("getattr", (Node,), {"__module__": "builtins"})
    return with_properties(3, lambda encoding: found(type(encoding), name))


def test_a_memory_format_by_name_is_the_same_checkpoint(tmp_path: Path) -> None:
    path = rewritten(tmp_path, by_name("TORCH_CONTIGUOUS_FORMAT"))
    verdict = verify(path)
    assert verdict.is_valid and verdict.safety is Safety.SAFE
    assert diff(path, FILES / "two-ranks").equal


def test_metadata_that_makes_no_sense(tmp_path: Path) -> None:
    cases = [
        moved(offset=-1),
        moved(offset="0"),
        moved(length=1 << 70),
        moved(relative_path=3),
        lambda state: state.pop("storage_data"),
        lambda state: state.update(state_dict_metadata=[1]),
        lambda state: state["state_dict_metadata"].update(x=3),
        lambda state: state.pop("planner_data"),
        with_properties(0, lambda dtype: "float32"),
        with_properties(1, with_arguments("torch.stride\u00e4")),
        with_properties(1, lambda layout: "torch.strided"),
        with_properties(2, lambda flag: None),
        with_properties(3, with_arguments(8)),
        with_properties(3, lambda encoding: 0),
        by_name("TORCH_OTHER_FORMAT"),
        of_class("TensorStorageMetedata", "state_dict_metadata", "model.bias"),
        of_class("TensorPropertier", "state_dict_metadata", "model.bias", "properties"),
        of_class("ChunkStorageMetadatq", "state_dict_metadata", "model.bias", "chunks", 0),
        lambda state: place_of(state, "model.bias").update({0: 1}),
    ]
    for at, change in enumerate(cases):
        folder = tmp_path / str(at)
        folder.mkdir()
        with pytest.raises(DamagedCheckpoint) as caught:
            open_checkpoint(rewritten(folder, change))
        assert caught.value.code == "metadata-malformed"


def test_what_was_compressed_is_listed_and_not_called_checked(tmp_path: Path) -> None:
    def change(state: Any) -> None:
        for info in state["storage_data"].values():
            info.state["transform_descriptors"] = ["stream.zstd"]

    target = rewritten(tmp_path, change)
    with open_checkpoint(target) as opened:
        assert codes(opened) == {"transformed"}
        assert opened["model.weight"].shape == (7, 5)
        assert all(tensor.values is None for tensor in opened.tensors)
    verification = verify(target)
    assert (verification.is_valid, verification.safety) == (False, Safety.UNKNOWN)
    (target / "__0_0.distcp").unlink()
    with open_checkpoint(target) as opened:
        assert codes(opened) == {"transformed", "part-missing"}


def test_a_file_that_the_metadata_does_not_name(tmp_path: Path) -> None:
    target = copied("two-ranks", tmp_path)
    shutil.copy(target / "__0_0.distcp", target / "__7_0.distcp")
    with open_checkpoint(target) as opened:
        assert codes(opened) == {"part-extra"}


def test_items_of_two_files_are_not_tied(tmp_path: Path) -> None:
    """They lie at the same place of each, and are alike but for their values."""

    def change(state: Any) -> None:
        described, stored = state["state_dict_metadata"], state["storage_data"]
        described["model.v"] = described["model.w"]
        index, info = next((i, info) for i, info in stored.items() if i.state["fqn"] == "model.w")
        made = [type(node).__new__(type(node), *node.args) for node in (index, info)]
        made[0].state = index.state | {"fqn": "model.v"}
        made[1].state = info.state | {"relative_path": "__1_0.distcp"}
        stored[made[0]] = made[1]

    target = rewritten(tmp_path, change, "fabric")
    shutil.copy(target / "__0_0.distcp", target / "__1_0.distcp")
    with open_checkpoint(target) as opened:
        assert opened.findings == ()
        assert {tensor.shares_with for tensor in opened.tensors} == {None}
        for name, file in (("w", "__0_0.distcp"), ("v", "__1_0.distcp")):
            extent = opened[f"model.{name}"].extent
            assert extent is not None
            assert extent.file == str(target / file)


def test_an_item_that_would_run_something(tmp_path: Path) -> None:
    """A value may be any object; its pickle is judged wherever it lies."""
    target = copied("fabric", tmp_path)
    stored = io.BytesIO()
    with zipfile.ZipFile(stored, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02cos\nsystem\nX\x02\0\0\0id\x85R.")
        archive.writestr("archive/version", b"3\n")
    data = stored.getvalue()
    (target / "__0_0.distcp").write_bytes(data)

    root = Unpickler(io.BytesIO((target / ".metadata").read_bytes())).load()
    place_of(root.state, "model.w").update(offset=0, length=len(data))
    with open(target / ".metadata", "wb") as file:
        Pickler(file, 4).dump(root)
    verification = verify(target)
    assert verification.safety is Safety.UNSAFE
    assert "item-mismatch" in {finding.code for finding in verification.findings}


def test_metadata_that_would_run_something(tmp_path: Path) -> None:
    target = copied("fabric", tmp_path)
    (target / ".metadata").write_bytes(
        b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\n0cos\nsystem\n."
    )
    assert verify(target).safety is Safety.UNSAFE


def test_what_is_not_sharded_is_read_without_tensors_too(tmp_path: Path) -> None:
    target = copied("fabric", tmp_path)
    shutil.copy(FILES.parent / "pytorch" / "metrics_only.pth", target / "meta.pt")
    with open_checkpoint(target) as opened, open_checkpoint(target / "meta.pt") as beside:
        assert len(beside) == 0
        assert opened.metadata == beside.metadata


def test_another_directory_with_a_dot_metadata_is_none_of_ours(tmp_path: Path) -> None:
    (tmp_path / ".metadata").mkdir()
    (tmp_path / "0_0.distcp").write_bytes(b"\x80\x04N.")
    with pytest.raises(CheckpointError, match="distributed checkpoint of Paddle"):
        open_checkpoint(tmp_path)


@pytest.mark.framework
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_torch_writes_now_is_what_we_read(tmp_path: Path) -> None:
    import torch
    import torch.distributed.checkpoint as dcp

    state = {"w": torch.randn(33, 17), "n": {"deep": [torch.arange(5), 3]}, "t": torch.randn(4, 6).t()}
    dcp.save(state, checkpoint_id=tmp_path / "saved", no_dist=True)
    with open_checkpoint(tmp_path / "saved") as opened:
        assert opened["w"].array().tobytes() == state["w"].numpy().tobytes()
        assert opened["t"].array().tobytes() == state["t"].numpy().tobytes()
        assert opened["n.deep.0"].array().tolist() == [0, 1, 2, 3, 4]
        assert opened.metadata == {"n": {"deep": {"1": 3}}}


@pytest.mark.framework
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("rows", [3, 700])
def test_items_that_are_compared_are_judged_like_those_that_are_looked_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    import torch
    import torch.distributed.checkpoint as dcp

    state = {name: torch.randn(rows, 2) for name in "abc"}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    path = tmp_path / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    nbytes = len(data) // 3
    values = range(len(data) - nbytes + 1100, len(data) - nbytes + rows * 8)

    def content() -> object:
        with open_checkpoint(tmp_path) as opened:
            spans = [(span.extent, span.where, span.crc32, span.dtype) for span in opened.spans()]
            return opened.tensors, opened.findings, opened.safety, opened.complete, spans

    with open_checkpoint(tmp_path) as opened:
        assert {name: opened[name].tobytes() for name in "abc"} == {
            name: tensor.numpy().tobytes() for name, tensor in state.items()
        }
    for at in spread(range(len(data) - nbytes, len(data), STEP), 80):
        if at in values:
            continue
        data[at] ^= 0x40
        path.write_bytes(data)
        compared = content()
        with monkeypatch.context() as patch:
            patch.setattr("ckpttool.formats.torch.dcp_items._ItemTemplate.matches", lambda *place: False)
            assert content() == compared, at
        data[at] ^= 0x40


# Every bit, against torch ----------------------------------------------------------------------------


def loaded(directory: Path) -> object:
    """Return what torch loads into a state dict of these names, and into an empty one; None if it refuses."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    named: dict[str, Any] = {"model": {"w": torch.zeros(2, 3), "b": torch.zeros(3)}, "step": 0}
    whole: dict[str, Any] = {}
    try:
        dcp.load(named, checkpoint_id=directory, no_dist=True)
        reader, planner = dcp.FileSystemReader(directory), _EmptyStateDictLoadPlanner()
        _load_state_dict(whole, storage_reader=reader, planner=planner, no_dist=True)
    except BaseException:  # noqa: BLE001 - torch's own derives from it; the pickle is broken
        return None
    return repr(named), repr(whole)


UNTOLD = frozenset({b"step"})
"""Names that ``.metadata`` gives once, for the entry and its path: another name is as good as this one."""


@pytest.mark.framework
@pytest.mark.filterwarnings("ignore")
def test_bits_of_the_metadata_that_change_what_torch_loads(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    import torch.distributed.checkpoint as dcp

    state = {"model": {"w": torch.arange(6.0).reshape(2, 3), "b": torch.ones(3)}, "step": 7}
    dcp.save(state, checkpoint_id=tmp_path / "step", no_dist=True)
    path = tmp_path / "step" / ".metadata"
    whole = path.read_bytes()
    truth = loaded(path.parent)
    assert truth is not None
    untold = {
        whole.index(b"\x8c" + bytes([len(name)]) + name) + at
        for name in UNTOLD
        for at in range(2 + len(name))
    }
    silent = []
    for bit in spread(range(0, 8 * len(whole), BIT_STEP), 120):
        offset = bit // 8
        data = bytearray(whole)
        data[offset] ^= 1 << bit % 8
        path.write_bytes(data)
        try:
            verification = verify(path.parent, jobs=1)
        except CheckpointError:
            continue
        is_found = not verification.is_valid or verification.findings
        if not is_found and offset not in untold and loaded(path.parent) != truth:
            silent.append((offset, bit % 8))
    assert silent == []
