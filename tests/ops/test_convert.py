"""Conversions as a whole: what stands there afterwards, and that nothing does where it can't."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from ckpttool.errors import CheckpointError, UsageError
from ckpttool.ops.conversion import ConvertWishes
from ckpttool.ops.convert import convert

HOSTILE = json.loads((Path(__file__).parents[2] / "fixtures/files/hostile/hostile.expected.json").read_text())


@pytest.fixture
def source(tmp_path: Path) -> Path:
    torch.manual_seed(3)
    path = tmp_path / "in" / "model.pth"
    path.parent.mkdir()
    torch.save({"epoch": 7, "model": {"fc.weight": torch.randn(300, 200), "fc.bias": torch.randn(300)}}, path)
    return path


def left(directory: Path) -> list[str]:
    return sorted(os.listdir(directory))


def test_training_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    def trained(start: Path | None, steps: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(1)
        net = torch.nn.Linear(10, 2)
        optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
        if start is not None:
            loaded = torch.load(start, weights_only=True)
            net.load_state_dict(loaded["model_state_dict"])
            optimizer.load_state_dict(loaded["optimizer_state_dict"])
        data = torch.randn(64, 10, generator=torch.Generator().manual_seed(2))
        for batch in data[: 8 * steps].split(8):
            optimizer.zero_grad()
            net(batch).square().mean().backward()
            optimizer.step()
        if start is None:
            state = {"epoch": 10, "model_state_dict": net.state_dict(), "loss": 0.02}
            torch.save({**state, "optimizer_state_dict": optimizer.state_dict()}, tmp_path / "a.pth")
        return net.state_dict()

    trained(None, 2)
    convert(tmp_path / "a.pth", tmp_path / "a.safetensors")
    convert(tmp_path / "a.safetensors", tmp_path / "b.pth")
    expected, found = trained(tmp_path / "a.pth", 5), trained(tmp_path / "b.pth", 5)
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    a, b = (torch.load(tmp_path / name, weights_only=True) for name in ("a.pth", "b.pth"))
    assert list(a) == list(b)
    assert a["optimizer_state_dict"]["param_groups"] == b["optimizer_state_dict"]["param_groups"]
    assert list(a["optimizer_state_dict"]["state"]) == [0, 1]
    assert type(a["model_state_dict"]) is type(b["model_state_dict"])


@pytest.mark.parametrize("target", ["out.safetensors", "out.pth", "out.npz", "out.hdf5"])
def test_a_flipped_byte_of_the_source_is_found_before_the_target_appears(
    source: Path, tmp_path: Path, target: str
) -> None:
    data = bytearray(source.read_bytes())
    data[len(data) // 2] ^= 1
    source.write_bytes(data)
    before = left(tmp_path)
    with pytest.raises(CheckpointError, match="CRC-32 is"):
        convert(source, tmp_path / target)
    assert left(tmp_path) == before


@pytest.mark.parametrize("name", sorted(HOSTILE))
def test_damaged_and_hostile_sources_leave_nothing(files: Path, tmp_path: Path, name: str) -> None:
    path = files / "hostile" / name
    target = tmp_path / "out.safetensors"
    try:
        converted = convert(path, target)
    except (CheckpointError, UsageError):
        assert left(tmp_path) == []
    else:
        assert converted.verified
        assert left(tmp_path) == ["out.safetensors"]


def test_nothing_that_stands_there_is_replaced_without_force(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.safetensors"
    target.write_bytes(b"somebody's")
    with pytest.raises(UsageError, match="is there already"):
        convert(source, target)
    assert target.read_bytes() == b"somebody's"
    os.chmod(target, 0o640)
    convert(source, target, ConvertWishes(force=True))
    assert os.stat(target).st_mode & 0o777 == 0o640
    assert left(tmp_path) == ["in", "out.safetensors"]


def test_a_directory_that_is_no_checkpoint_is_never_replaced(source: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("years of work")
    with pytest.raises(UsageError, match="no checkpoint"):
        convert(source, tmp_path / "out", ConvertWishes(to="torch-dcp", force=True))
    assert left(tmp_path / "out") == ["thesis.tex"]


def test_a_directory_is_replaced_as_a_whole(source: Path, tmp_path: Path) -> None:
    wishes = ConvertWishes(to="torch-dcp")
    convert(source, tmp_path / "out", wishes)
    (tmp_path / "out" / "stale").write_text("")
    convert(source, tmp_path / "out", ConvertWishes(to="torch-dcp", force=True))
    assert "stale" not in left(tmp_path / "out")
    assert left(tmp_path) == ["in", "out"]


def test_the_target_is_not_what_is_read(source: Path, tmp_path: Path) -> None:
    wishes = ConvertWishes(to="pytorch", force=True)
    before = source.read_bytes()
    os.link(source, tmp_path / "same.pth")
    (tmp_path / "link.pth").symlink_to(source)
    for target in (source, source.parent / "." / "model.pth", tmp_path / "same.pth", tmp_path / "link.pth"):
        with pytest.raises(UsageError, match="is what is read"):
            convert(source, target, wishes)
    assert source.read_bytes() == before


def test_the_target_does_not_lie_inside_the_source(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "dcp", ConvertWishes(to="torch-dcp"))
    with pytest.raises(UsageError, match="lies inside"):
        convert(tmp_path / "dcp", tmp_path / "dcp" / "out.pth")
    with pytest.raises(UsageError, match="holds what is read"):
        convert(source, source.parent, ConvertWishes(to="torch-dcp", force=True))
    assert left(source.parent) == ["model.pth"]


def test_what_no_name_tells_is_asked_for(source: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="doesn't say which format"):
        convert(source, tmp_path / "out")
    with pytest.raises(UsageError, match="no such format"):
        convert(source, tmp_path / "out", ConvertWishes(to="onnx"))
    with pytest.raises(UsageError, match="--shard-size"):
        convert(source, tmp_path / "out.npz", ConvertWishes(shard_size=1000))


def test_a_dry_run_writes_nothing(source: Path, tmp_path: Path) -> None:
    converted = convert(source, tmp_path / "out.safetensors", ConvertWishes(dry_run=True))
    assert (converted.tensors, converted.nbytes, converted.verified) == (2, 4 * 60_300, False)
    assert left(tmp_path) == ["in"]


def test_a_full_disk_leaves_nothing(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite = os.pwrite

    def full(descriptor: int, data: memoryview, offset: int) -> int:
        if offset + len(data) > 4096:
            raise OSError(28, "No space left on device")
        return pwrite(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", full)
    monkeypatch.delattr(os, "copy_file_range", raising=False)
    with pytest.raises(CheckpointError, match=r"out\.safetensors: no space left on device"):
        convert(source, tmp_path / "out.safetensors")
    assert left(tmp_path) == ["in"]


def test_what_does_not_fit_is_said_before_anything_is_written(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = os.statvfs_result((4096, 4096, 100, 10, 10, 100, 100, 100, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: small)
    with pytest.raises(CheckpointError, match="40,960 bytes are free"):
        convert(source, tmp_path / "out.safetensors")
    assert left(tmp_path) == ["in"]


def test_a_target_that_differs_is_removed(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ckpttool.wire.staged import Staged

    settle = Staged.settle

    def rotten(self: Staged) -> None:
        settle(self)
        data = bytearray(Path(self.path).read_bytes())
        data[-5] ^= 0x40
        Path(self.path).write_bytes(data)

    monkeypatch.setattr(Staged, "settle", rotten)
    converted = convert(source, tmp_path / "out.safetensors")
    assert not converted.verified
    assert len(converted.mismatches) == 1 and "values are others" in converted.mismatches[0]
    assert left(tmp_path) == ["in"]


def test_a_missing_directory_is_said(source: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file or directory"):
        convert(source, tmp_path / "nowhere" / "out.safetensors")


def test_two_tensors_of_one_name_are_refused(tmp_path: Path) -> None:
    torch.save({"a": {"b": torch.ones(2)}, "a.b": torch.zeros(2)}, tmp_path / "twice.pth")
    with pytest.raises(UsageError, match=r"two tensors', like 'a\.b'"):
        convert(tmp_path / "twice.pth", tmp_path / "out.safetensors")


def test_types_that_a_format_lacks_are_refused_by_name(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2, dtype=torch.bfloat16), "c": torch.ones(2)}, tmp_path / "b.pth")
    with pytest.raises(UsageError, match=r"numpy has no bfloat16: w \(--dtype float32 converts them\)"):
        convert(tmp_path / "b.pth", tmp_path / "out.npz")
    converted = convert(tmp_path / "b.pth", tmp_path / "out.npz", ConvertWishes(dtype="float32"))
    assert converted.verified


def test_a_copy_needs_no_kernel_that_copies(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*arguments: object) -> int:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "copy_file_range", refused, raising=False)
    assert convert(source, tmp_path / "out.safetensors").verified


def test_what_a_kill_left_goes_with_the_next_conversion(source: Path, tmp_path: Path) -> None:
    stale = tmp_path / ".ckpttool-0123456789ab.new"
    (stale / "content").mkdir(parents=True)
    (stale / "content" / "out.safetensors").write_bytes(b"half of it")
    convert(source, tmp_path / "out.safetensors")
    assert left(tmp_path) == ["in", "out.safetensors"]
    shutil.rmtree(tmp_path / "in")
