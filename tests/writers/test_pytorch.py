"""What is written as PyTorch's own is loaded by PyTorch, however it loads, and laid out as it lays it out."""

from __future__ import annotations

import io
import json
import math
import os
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpttool import Role, Tensor, Truncated, Unsupported, open_checkpoint, verify
from ckpttool.containers.pickle.pickle_nodes import Call, Global
from ckpttool.core.dtypes import BY_NAME
from ckpttool.core.values import in_memory
from ckpttool.formats.content.tree import opaque_nodes
from ckpttool.formats.sidecar import ENTRY
from ckpttool.formats.torch import writer
from ckpttool.formats.torch.writer import PyTorchWriter
from ckpttool.formats.writer import Content, WriteOptions
from ckpttool.transaction.staged_output import StagedOutput
from tests.support.contents import content_of
from tests.support.torch_files import of_every_type
from tests.support.writing import byte_tensor, require_same_tree
from tests.support.writing import write as written

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.framework

BF16 = torch.bfloat16


def write(content: Content, target: Path, shard_size: int | None = None) -> Path:
    return written(PyTorchWriter(), content, target, WriteOptions(shard_size=shard_size, name=target.name))


def rewritten(source: Path, target: Path, shard_size: int | None = None) -> Path:
    """Write what a file holds, and require that our reader finds the same."""
    with open_checkpoint(source) as opened:
        content = content_of(opened)
        write(content, target, shard_size)
        require_same_tree(target, content)
    return target


def require_equal(one: Any, other: Any) -> None:
    """Require that two objects are the same, types, bits and attributes included."""
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape, one.requires_grad) == (other.dtype, other.shape, other.requires_grad)
        flat = [each.detach().contiguous().reshape(-1) for each in (one, other)]
        assert not len(flat[0]) or flat[0].view(torch.uint8).equal(flat[1].view(torch.uint8))
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            require_equal(one[key], other[key])
        require_equal(getattr(one, "_metadata", None), getattr(other, "_metadata", None))
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for pair in zip(one, other, strict=True):
            require_equal(*pair)
    else:
        assert one == other or (math.isnan(one) and math.isnan(other))


def some_training() -> dict[Any, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(300, 200), torch.nn.BatchNorm1d(200))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.rand(4, 300)).sum().backward()
    optimizer.step()
    tied = torch.rand(50, 3)
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "epoch": 3,
        "loss": 0.5,
        "nan": float("nan"),
        "large": 1 << 80,
        "é\n\0": ("text", b"\xff\0", None, True, {1, 2}, torch.Size([2, 3]), torch.float16),
        "tied": tied,
        "again": tied,
        "view": tied[5:7],
        "transposed": tied.T,
        "expanded": torch.ones(1).expand(70_000),
        "scalar": torch.tensor(3),
        "empty": torch.empty(0, 4),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        1: torch.ones(3),
    }


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "saved.pt"
    torch.save(some_training(), path)
    return path


@pytest.fixture(params=[False, True])
def computed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let PyTorch compute where storages lie, or else compare what it would compute."""
    from torch.utils.serialization import config

    monkeypatch.setenv("TORCH_SERIALIZATION_DEBUG", "1")
    with config.patch("load.calculate_storage_offsets", request.param):
        yield


@pytest.mark.usefixtures("computed")
@pytest.mark.parametrize("mmap", [False, True])
def test_pytorch_loads_it_however_it_loads(saved: Path, tmp_path: Path, mmap: bool) -> None:
    target = rewritten(saved, tmp_path / "target.pth")
    require_equal(torch.load(target, weights_only=True, mmap=mmap), some_training())


def test_ties_are_one_storage_and_views_keep_no_more_than_they_show(saved: Path, tmp_path: Path) -> None:
    loaded = torch.load(rewritten(saved, tmp_path / "target.pth"))
    assert loaded["tied"].data_ptr() == loaded["again"].data_ptr()
    assert loaded["view"].untyped_storage().nbytes() == 2 * 3 * 4
    assert loaded["transposed"].is_contiguous()


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_every_type_comes_back(tmp_path: Path) -> None:
    held = of_every_type(writer.WHOLE)
    torch.save(held, tmp_path / "saved.pt")
    loaded = torch.load(rewritten(tmp_path / "saved.pt", tmp_path / "target.pt"), mmap=True)
    assert loaded.keys() == held.keys()
    for key, one in held.items():
        assert (loaded[key].dtype, loaded[key].shape) == (one.dtype, one.shape), key
        assert bytes(loaded[key].untyped_storage()[:]) == bytes(one.clone().untyped_storage()[:])


def test_quantized_tensors_come_back_with_their_scales(files: Path, tmp_path: Path) -> None:
    target = rewritten(files / "pytorch" / "quantized.pth", tmp_path / "target.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch says once in a process that quantized tensors will go
        loaded, original = torch.load(target), torch.load(files / "pytorch" / "quantized.pth")
    for name, one in original.items():
        assert loaded[name].qscheme() == one.qscheme()
        assert torch.equal(loaded[name].dequantize(), one.dequantize())


def test_big_endian_values_are_turned(files: Path, tmp_path: Path) -> None:
    source = files / "pytorch" / "bigendian.pth"
    require_equal(torch.load(rewritten(source, tmp_path / "target.pt")), torch.load(source))


def test_it_is_laid_out_byte_for_byte_as_pytorch_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = {"a": torch.rand(300, 100), "b": torch.empty(0), "c": torch.ones(3).to(BF16), "d": torch.tensor(1)}
    monkeypatch.chdir(tmp_path)  # PyTorch names no root after a file whose path is not ASCII
    torch.save(held, "same.pt")
    expected = (tmp_path / "same.pt").read_bytes()
    with zipfile.ZipFile(io.BytesIO(expected)) as archive:
        pickle = archive.read("same/data.pkl")
        end = archive.getinfo("same/.data/serialization_id").header_offset

    def pickle_into(write: Callable[[bytes], object], tree: Any, storage_of: Callable[[Tensor], str]) -> None:
        assert [storage_of(one) for one in tree.values()] == ["0", "1", "2", "3"]
        write(pickle)

    monkeypatch.setattr(writer, "pickle_into", pickle_into)
    with open_checkpoint(tmp_path / "same.pt") as opened:
        (tmp_path / "there").mkdir()
        target = write(content_of(opened), tmp_path / "there" / "same.pt")
    assert target.read_bytes()[:end] == expected[:end]


@pytest.mark.parametrize("name", ["model.pth", "a.b.pt", "noending", ".pt", "é.pt", "a b\n.ckpt"])
def test_the_root_is_what_pytorch_calls_it(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch itself refuses a name that is nothing but an ending."""
    monkeypatch.chdir(tmp_path)
    if name != ".pt":
        torch.save({}, name)
        with zipfile.ZipFile(tmp_path / name) as archive:
            root = archive.namelist()[0].partition("/")[0]
        (tmp_path / name).unlink()
    else:
        root = "archive"
    with zipfile.ZipFile(write(Content((byte_tensor("a", b"x"),)), tmp_path / name)) as archive:
        assert {one.partition("/")[0] for one in archive.namelist()} == {root}
    assert torch.load(tmp_path / name)["a"].tolist() == [120]


def test_a_long_pickle_is_streamed(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = rewritten(saved, tmp_path / "target.pth").read_bytes()
    monkeypatch.setattr(writer, "_MAX_KEPT", 10)
    (tmp_path / "there").mkdir()
    assert rewritten(saved, tmp_path / "there" / "target.pth").read_bytes() == whole


def test_without_a_tree_it_is_tensors_by_name_and_the_rest_is_carried(tmp_path: Path) -> None:
    first = Tensor(("a", 0, "b"), BY_NAME["float32"], (2,), Role.OPTIMIZER, in_memory(bytes(8)))
    second = Tensor(("c",), BY_NAME["float32"], (2,), Role.OTHER, first.values, shares_with="a.0.b")
    content = Content(
        (first, second), None, {"epoch": 3, "nested": [1.5, None]}, {"x.y": b"\0\xff"}, "tensorflow"
    )
    target = write(content, tmp_path / "target.pt")
    require_same_tree(target, content)
    with open_checkpoint(target) as opened:
        assert (opened.metadata, opened.native) == (content.metadata, content.native)
        assert opened.training.epoch == 3
    loaded = torch.load(target, weights_only=True)
    assert {name: one.tolist() for name, one in loaded.items()} == {"a.0.b": [0, 0], "c": [0, 0]}
    assert loaded["a.0.b"].data_ptr() == loaded["c"].data_ptr()


@pytest.mark.parametrize("name", ["module.pth", "nested.pth"])
def test_what_is_left_of_an_object_is_carried_with_a_word_about_it(
    files: Path, tmp_path: Path, name: str
) -> None:
    target = rewritten(files / "pytorch" / name, tmp_path / "target.pt")
    with open_checkpoint(files / "pytorch" / name) as one, open_checkpoint(target) as other:
        assert [*opaque_nodes(one.tree)] == [*opaque_nodes(other.tree)] != []
    if name == "module.pth":
        with open_checkpoint(target) as opened:
            assert torch.load(target).keys() == opened.keys()


def test_a_damaged_entry_is_told_and_not_used(tmp_path: Path) -> None:
    target = write(Content((byte_tensor("a", b"x"),), None, {"epoch": 3}), tmp_path / "target.pt")
    data = target.read_bytes()
    at = data.index(b"epoch")
    target.write_bytes(data[:at] + b"E" + data[at + 1 :])
    with open_checkpoint(target) as opened:
        assert [(finding.code, finding.where) for finding in opened.findings] == [
            ("content-entry", f"target/{ENTRY}")
        ]
        assert opened.metadata == {}
        assert opened["a"].tobytes() == b"x"
    assert not verify(target).is_valid


# Shards -----------------------------------------------------------------------------------------------


def test_shards_are_what_hugging_face_loads(tmp_path: Path) -> None:
    from huggingface_hub import load_torch_model

    model = torch.nn.Sequential(OrderedDict((f"l{at}", torch.nn.Linear(20, 20)) for at in range(5)))
    model.l4.weight = model.l0.weight
    torch.save(model.state_dict(), tmp_path / "saved.pt")
    target = rewritten(tmp_path / "saved.pt", tmp_path / "target", 7000)
    names = [f"pytorch_model-0000{at}-of-00003.bin" for at in (1, 2, 3)]
    assert sorted(os.listdir(target)) == [*names, "pytorch_model.bin.index.json"]
    index = json.loads((target / "pytorch_model.bin.index.json").read_text())
    assert index["weight_map"]["l4.weight"] == index["weight_map"]["l0.weight"]
    assert index["metadata"]["total_size"] == 4 * (4 * 400 + 5 * 20)
    fresh = torch.nn.Sequential(OrderedDict((f"l{at}", torch.nn.Linear(20, 20)) for at in range(5)))
    found: Any = load_torch_model(fresh, target, safe=False)
    assert (found.missing_keys, found.unexpected_keys) == ([], [])
    for name, one in model.state_dict().items():
        require_equal(fresh.state_dict()[name], one)


def test_shards_carry_what_is_no_tensor(saved: Path, tmp_path: Path) -> None:
    target = rewritten(saved, tmp_path / "target", 100_000)
    with open_checkpoint(target) as opened:
        assert opened.training.epoch == 3
        assert isinstance(opened.tree, dict)
        assert opened.tree["large"] == 1 << 80


def test_more_shards_than_stay_open(tmp_path: Path) -> None:
    content = Content(tuple(byte_tensor(f"t{at}", bytes([at]) * 70_000) for at in range(80)))
    target = write(content, tmp_path / "target", 70_000)
    require_same_tree(target, content)
    assert len(os.listdir(target)) == 81


def test_nothing_is_no_shard(tmp_path: Path) -> None:
    target = write(Content((), None, {"epoch": 3}), tmp_path / "target", 7000)
    assert os.listdir(target) == ["pytorch_model.bin.index.json"]
    with open_checkpoint(target) as opened:
        assert (len(opened), opened.findings, opened.training.epoch) == (0, (), 3)


# What can't be written ----------------------------------------------------------------------------------


def refused(content: Content, shard_size: int | None = None) -> list[str]:
    return [*PyTorchWriter().refusals(content, WriteOptions(shard_size=shard_size))]


def test_quantized_tensors_without_scales_are_refused() -> None:
    alone = Tensor(("q",), BY_NAME["qint8"], (2,), values=in_memory(bytes(2)))
    told = ["q: qint8 is meaningless without its scales"]
    assert refused(Content((alone,))) == told
    assert refused(Content((alone,), {"q": alone}), 1000) == told


def test_names_that_are_not_read_as_names_are_refused(tmp_path: Path) -> None:
    long = "a" * 65_537
    told = [f"{long}: a name of 65,537 bytes; at most 65,536 are read (use --map)"]
    one = byte_tensor(long, b"x")
    assert refused(Content((one,))) == refused(Content((one,), {long: one})) == told
    content = Content((byte_tensor(long[1:], b"x"),))
    require_same_tree(write(content, tmp_path / "target.pt"), content)


AWKWARD = ["", ".", "a.b", "a/b", "..", "é", "\0", "\n", "\ud800", "<state>", "data.pkl", "日本"]


def test_awkward_names_come_back(tmp_path: Path) -> None:
    content = Content(tuple(byte_tensor(name, bytes([at])) for at, name in enumerate(AWKWARD)))
    target = write(content, tmp_path / "target.pt")
    require_same_tree(target, content)
    loaded = torch.load(target, weights_only=True, mmap=True)
    assert {name: one.tolist() for name, one in loaded.items()} == {
        name: [at] for at, name in enumerate(AWKWARD)
    }


def test_too_many_tensors_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "_MAX_TENSORS", 1)
    content = Content((byte_tensor("a", b"x"), byte_tensor("b", b"y")))
    assert refused(content) == ["2 tensors are more than one file can list (at most 1)"]
    assert refused(content, 1) == []
    assert refused(content, 10_000) == [
        "pytorch_model-00001-of-00001.bin: 2 tensors are more than one file can list (at most 1)"
    ]


def test_what_no_pickle_may_hold_is_refused(tmp_path: Path) -> None:
    tree = {"a": Call(Global("os", "system"), ("true",))}
    with StagedOutput(tmp_path / "target.pt") as staged, pytest.raises(Unsupported, match="os"):
        PyTorchWriter().write(Content((), tree), staged, WriteOptions())
    assert os.listdir(tmp_path) == []


def test_a_source_that_becomes_shorter_leaves_nothing(saved: Path, tmp_path: Path) -> None:
    target = tmp_path / "target.pth"
    with open_checkpoint(saved) as opened, pytest.raises(Truncated):
        content = content_of(opened)
        os.truncate(saved, 100_000)
        write(content, target)
    assert os.listdir(tmp_path) == ["saved.pt"]
