"""Conversions as a whole: what stands there afterwards, and that nothing does where it can't."""

from __future__ import annotations

import json
import os
import stat
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict
from dataclasses import replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from ckpttool import (
    CheckpointError,
    ConvertOptions,
    Role,
    Tensor,
    TrainingState,
    UsageError,
    convert,
    open_checkpoint,
)
from ckpttool.core.dtypes import BY_NAME
from ckpttool.ops.conversion_plan import content_of
from tests.support.commands import Run
from tests.support.conversions import mismatches_of, spoil_target
from tests.support.faults import is_killed_at
from tests.support.opening import only_checkpoint
from tests.support.results import inspection
from tests.support.thorough import sampled

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


def below(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if not path.is_dir())


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


def test_a_flipped_byte_of_the_source_is_found_before_the_target_appears(
    source: Path, tmp_path: Path
) -> None:
    data = bytearray(source.read_bytes())
    data[len(data) // 2] ^= 1
    source.write_bytes(data)
    for target in ("out.safetensors", "out.pth", "out.npz", "out.hdf5"):
        with pytest.raises(CheckpointError, match="CRC-32 is"):
            convert(source, tmp_path / target)
        assert left(tmp_path) == ["in"], target


@pytest.mark.parametrize("start", sampled(range(4), 1))
def test_damaged_and_hostile_sources_leave_nothing(files: Path, tmp_path: Path, start: int) -> None:
    converted, names = [], sorted(HOSTILE)[start::4]
    for name in names:
        target = tmp_path / "out.safetensors"
        try:
            assert convert(files / "hostile" / name, target).verified, name
        except (CheckpointError, UsageError):
            assert left(tmp_path) == [], name
        else:
            assert left(tmp_path) == ["out.safetensors"], name
            target.unlink()
            converted.append(name)
    assert 0 < len(converted) < len(names)


def test_nothing_that_stands_there_is_replaced_without_force(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.safetensors"
    target.write_bytes(b"somebody's")
    with pytest.raises(UsageError, match="already exists"):
        convert(source, target)
    assert target.read_bytes() == b"somebody's"
    os.chmod(target, 0o640)
    convert(source, target, ConvertOptions(force=True))
    assert os.stat(target).st_mode & 0o777 == 0o640
    assert left(tmp_path) == ["in", "out.safetensors"]


def test_a_directory_that_is_no_checkpoint_is_never_replaced(source: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("years of work")
    with pytest.raises(UsageError, match="not a checkpoint"):
        convert(source, tmp_path / "out", ConvertOptions(to="torch-dcp", force=True))
    assert left(tmp_path / "out") == ["thesis.tex"]


DIRECTORIES = {
    "torch-dcp": ConvertOptions(to="torch-dcp"),
    "savedmodel": ConvertOptions(to="savedmodel"),
    "fluid": ConvertOptions(to="fluid"),
    "safetensors": ConvertOptions(to="safetensors", shard_size=100_000),
    "pytorch": ConvertOptions(to="pytorch", shard_size=100_000),
}


@pytest.mark.parametrize("options", DIRECTORIES.values(), ids=DIRECTORIES)
def test_a_directory_is_replaced_as_a_whole(source: Path, tmp_path: Path, options: ConvertOptions) -> None:
    convert(source, tmp_path / "out", options)
    before = below(tmp_path / "out")
    torch.save({"one": torch.ones(2)}, tmp_path / "one.pt")
    convert(tmp_path / "one.pt", tmp_path / "out", replace(options, force=True))
    assert left(tmp_path) == ["in", "one.pt", "out"]
    with open_checkpoint(only_checkpoint(tmp_path / "out").path) as opened:
        assert list(opened) == ["one"]
    convert(source, tmp_path / "out", replace(options, force=True))
    assert below(tmp_path / "out") == before


@pytest.mark.parametrize("options", DIRECTORIES.values(), ids=DIRECTORIES)
def test_what_is_no_part_of_a_checkpoint_is_never_removed(
    source: Path, tmp_path: Path, options: ConvertOptions
) -> None:
    convert(source, tmp_path / "out", options)
    for stranger in ("notes.txt", ".hidden", "other/big.pt"):
        place = tmp_path / "out" / stranger
        place.parent.mkdir(exist_ok=True)
        place.write_bytes(source.read_bytes())
        before = below(tmp_path)
        with pytest.raises(UsageError, match=f"{stranger.split('/')[-1]}|not replaced"):
            convert(source, tmp_path / "out", replace(options, force=True))
        assert below(tmp_path) == before, stranger
        place.unlink()


def test_a_link_that_leads_to_itself_is_no_part_either(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "out", ConvertOptions(to="torch-dcp"))
    (tmp_path / "out" / "loop").symlink_to("loop")
    with pytest.raises(UsageError, match="loop isn't part"):
        convert(source, tmp_path / "out", ConvertOptions(to="torch-dcp", force=True))
    assert (tmp_path / "out" / "loop").is_symlink()


def test_files_behind_a_name_are_in_the_way_of_a_prefix_alone(source: Path, tmp_path: Path) -> None:
    for name in ("run.meta", "run.index", "run.data-00000-of-00001"):
        (tmp_path / name).write_bytes(b"somebody's")
    assert convert(source, tmp_path / "run", ConvertOptions(to="pytorch")).verified
    assert convert(source, tmp_path / "run", ConvertOptions(to="pytorch", force=True)).verified
    assert (tmp_path / "run.meta").read_bytes() == b"somebody's"
    (tmp_path / "run").unlink()
    with pytest.raises(UsageError, match="already exists"):
        convert(source, tmp_path / "run", ConvertOptions(to="tensorflow"))
    convert(source, tmp_path / "run", ConvertOptions(to="tensorflow", force=True))
    assert left(tmp_path) == ["in", "run.data-00000-of-00001", "run.index"]


def test_what_is_no_file_is_never_replaced(source: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for target in (tmp_path / "pipe", Path("/dev/null")):
        with pytest.raises(UsageError, match="neither a file nor a directory"):
            convert(source, target, ConvertOptions(to="pytorch", force=True))
    assert stat.S_ISFIFO(os.lstat(tmp_path / "pipe").st_mode)


def test_manifests_go_with_what_they_were_about(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.safetensors"
    convert(source, target)
    for ending in (".sha256", ".digests.json"):
        Path(f"{target}{ending}").write_text("of the old one")
    (tmp_path / "SHA256SUMS").write_text("of others, too")
    converted = convert(source, target, ConvertOptions(force=True))
    assert left(tmp_path) == ["SHA256SUMS", "in", "out.safetensors"]
    assert converted.notes == tuple(
        f"out.safetensors{ending} describes the replaced checkpoint, and is removed with it"
        for ending in (".digests.json", ".sha256")
    )


def test_a_target_has_a_name(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for target in ("/", "", ".", "..", "in/..", "in/."):
        with pytest.raises(UsageError, match="invalid name for a target"):
            convert(source, target, ConvertOptions(to="pytorch", force=True))
        assert below(tmp_path) == ["in/model.pth"], target


def test_the_target_is_not_what_is_read(source: Path, tmp_path: Path) -> None:
    options = ConvertOptions(to="pytorch", force=True)
    before = source.read_bytes()
    os.link(source, tmp_path / "same.pth")
    (tmp_path / "link.pth").symlink_to(source)
    for target in (source, source.parent / "." / "model.pth", tmp_path / "same.pth", tmp_path / "link.pth"):
        with pytest.raises(UsageError, match="is the source itself"):
            convert(source, target, options)
    assert source.read_bytes() == before


def test_the_target_does_not_lie_inside_the_source(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "dcp", ConvertOptions(to="torch-dcp"))
    with pytest.raises(UsageError, match="is inside the source"):
        convert(tmp_path / "dcp", tmp_path / "dcp" / "out.pth")
    with pytest.raises(UsageError, match="contains the source"):
        convert(source, source.parent, ConvertOptions(to="torch-dcp", force=True))
    assert left(source.parent) == ["model.pth"]


def test_what_no_name_tells_is_asked_for(source: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the name has no suffix"):
        convert(source, tmp_path / "out")
    with pytest.raises(UsageError, match="unknown format"):
        convert(source, tmp_path / "out", ConvertOptions(to="onnx"))
    with pytest.raises(UsageError, match="--shard-size"):
        convert(source, tmp_path / "out.npz", ConvertOptions(shard_size=1000))


def test_a_dry_run_writes_nothing(source: Path, tmp_path: Path) -> None:
    converted = convert(source, tmp_path / "out.safetensors", ConvertOptions(dry_run=True))
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
    def rotten(written: Path) -> None:
        data = bytearray(written.read_bytes())
        data[-5] ^= 0x40
        written.write_bytes(data)

    spoil_target(monkeypatch, rotten)
    converted = convert(source, tmp_path / "out.safetensors")
    assert not converted.verified
    assert len(converted.mismatches) == 1 and "values differ" in converted.mismatches[0]
    assert left(tmp_path) == ["in"]


def test_a_source_that_is_written_to_meanwhile_is_told(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(source, tmp_path / "in" / "model.safetensors")
    weights = tmp_path / "in" / "model.safetensors"

    def late(written: Path) -> None:
        data = weights.read_bytes()
        weights.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        os.utime(weights, ns=(1, 1))

    spoil_target(monkeypatch, late)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: it changed while it was read"):
        convert(weights, tmp_path / "out.npz")
    assert left(tmp_path) == ["in"]


def test_a_missing_directory_is_said(source: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no such directory .mkdir -p"):
        convert(source, tmp_path / "nowhere" / "out.safetensors")


TWO_PATHS = [
    ({"a": {"b": torch.ones(2)}, "a.b": torch.zeros(3)}, {"a.b", "a.[b]"}),
    ({"a.b": torch.zeros(3), "a": {"b": torch.ones(2)}, "c": torch.ones(1)}, {"a.b", "a.[b]", "c"}),
    ({"a.b": torch.zeros(3), "a": {"b": torch.ones(2)}, "[a.b]": torch.ones(1)}, {"a.b", "a.[b]", "[a.b]"}),
    ({"a.b": torch.zeros(3), "a": {"b": torch.ones(2), "[b]": torch.ones(1)}}, {"a.b", "a.[b]", "a.[[b]]"}),
    ({"a": {"b": {"c": torch.ones(2)}}, "a.b": {"c": torch.zeros(3)}}, {"a.b.[c]", "[a.b].c"}),
    ({"a": {"": torch.ones(2)}, "a.": torch.zeros(3)}, {"a.[]", "a."}),
    ({1.5: torch.ones(2), "1.5": torch.zeros(3)}, {"[1.5]", "1.5"}),
    ({"a": {"b.c": torch.ones(2)}, "a.b": {"c": torch.zeros(3)}}, {"a.[b.c]", "[a.b].c"}),
    ({1: torch.ones(2), "1": torch.zeros(3)}, {"1", "[1]"}),
    ({"a": [torch.ones(2)], "a.0": torch.zeros(3)}, {"a.[0]", "a.0"}),
]


def test_two_paths_that_give_one_name_are_two_tensors(tmp_path: Path) -> None:
    for at, (tree, names) in enumerate(TWO_PATHS):
        source, whole, flat = (tmp_path / f"{at}{name}" for name in ("in.pth", "out.pth", "out.safetensors"))
        torch.save(tree, source)
        with open_checkpoint(source) as checkpoint:
            assert {tensor.name for tensor in checkpoint.tensors} == names
        convert(source, whole)
        assert str(torch.load(whole)) == str(tree)
        convert(source, flat)
        assert set(load_file(flat)) - {"__ckpttool__"} == names


def test_a_parameter_keeps_its_name_where_a_module_is_called_alike(tmp_path: Path) -> None:
    own, nested = {"enc.weight": torch.ones(2)}, {"enc": {"weight": torch.zeros(2)}}
    for name, model in {"first": {**own, **nested}, "last": {**nested, **own}}.items():
        torch.save({"model": model, "epoch": 3}, tmp_path / f"{name}.pth")
        for ending in (".out.pth", ".safetensors", ".npz"):
            target = tmp_path / f"{name}{ending}"
            done = convert(tmp_path / f"{name}.pth", target, ConvertOptions(only="weights"))
            assert done.notes[-1].endswith("no framework looks for these names: enc.[weight]"), target
            with open_checkpoint(target) as written:
                values = {name: value.tolist() for name, value in written.state_dict().items()}
            assert values == {"enc.weight": [1, 1], "enc.[weight]": [0, 0]}, target


def test_one_name_of_two_tensors_is_refused() -> None:
    tensor = Tensor(path=("a.b",), dtype=BY_NAME["float32"], shape=(1,), role=Role.WEIGHTS)
    checkpoint = inspection(tensor, replace(tensor, path=("a", "b"))).checkpoint
    with pytest.raises(UsageError, match=r"m\.pth: 1 duplicate tensor name: 'a\.b'$"):
        content_of(checkpoint)


def test_types_that_a_format_lacks_are_refused_by_name(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2, dtype=torch.bfloat16), "c": torch.ones(2)}, tmp_path / "b.pth")
    with pytest.raises(
        UsageError, match=r"numpy doesn't support bfloat16: w \(--dtype float32 converts them\)"
    ):
        convert(tmp_path / "b.pth", tmp_path / "out.npz")
    converted = convert(tmp_path / "b.pth", tmp_path / "out.npz", ConvertOptions(dtype="float32"))
    assert converted.verified


def test_what_a_kill_left_goes_with_the_next_conversion(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.safetensors"
    assert is_killed_at(1, lambda: convert(source, target), ("fsync",))
    assert len(left(tmp_path)) == 2
    convert(source, target)
    assert left(tmp_path) == ["in", "out.safetensors"]


# What is not carried, and what is told ----------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no process is killed so")
def test_a_pair_that_a_kill_left_by_half_is_cleared_by_the_same_command(source: Path, tmp_path: Path) -> None:
    place = tmp_path / "out"
    place.mkdir()
    options = ConvertOptions(to="tensorflow")
    assert is_killed_at(2, lambda: convert(source, place / "ckpt", options), ("link",))
    assert [name for name in os.listdir(place) if name.startswith("ckpt")] == ["ckpt.data-00000-of-00001"]
    with pytest.raises(UsageError, match="already exists"):
        convert(source, place / "ckpt", replace(options, dry_run=True))  # which changes nothing
    assert convert(source, place / "ckpt", options).verified
    assert sorted(os.listdir(place)) == ["ckpt.data-00000-of-00001", "ckpt.index"]


def test_an_entry_that_is_not_used_is_told(tmp_path: Path) -> None:
    metadata = {"ckpttool.content": '{"schema": "ckpttool.content/1", "content": "nonsense"}'}
    save_file({"w": np.ones(3, np.float32)}, tmp_path / "in.safetensors", metadata=metadata)
    converted = convert(tmp_path / "in.safetensors", tmp_path / "out.npz")
    assert [one.path for one in converted.dropped] == ["ckpttool.content"]
    assert "is not used" in converted.dropped[0].why
    with pytest.raises(UsageError, match=r"ckpttool\.content can't be preserved"):
        convert(tmp_path / "in.safetensors", tmp_path / "strict.npz", ConvertOptions(strict=True))


def test_programs_and_files_beside_them_are_told(files: Path, tmp_path: Path) -> None:
    expected: dict[str, list[str]] = {
        "savedmodel/asset": ["saved_model.pb", "assets/vocabulary.txt"],
        "savedmodel/tf1": ["saved_model.pb"],
        "torchscript/scripted.pt": ["code", "config.json", "labels.txt"],
        "torch-export/program.pt2": ["models", "data/sample_inputs/model.pt", "extra/notes.txt"],
        "paddle/adam.pdopt": [],
        "keras/adam.h5": [],
    }
    dropped = {}
    for at, name in enumerate(expected):
        converted = convert(files / name, tmp_path / f"{at}.safetensors")
        dropped[name] = [one.path for one in converted.dropped]
    assert dropped == expected


def test_a_saved_model_of_variables_alone_loses_nothing(files: Path, tmp_path: Path) -> None:
    for at, name in enumerate(("savedmodel/module", "numpy/packed.npz")):
        convert(files / name, tmp_path / str(at), ConvertOptions(to="savedmodel"))
        converted = convert(tmp_path / str(at), tmp_path / f"{at}.npz", ConvertOptions(strict=True))
        assert converted.dropped == ()


def test_views_that_are_cut_apart_are_told(tmp_path: Path) -> None:
    base = torch.arange(120.0).reshape(10, 12)
    apart = {"a": base[:5].clone(), "b": base[5:].clone(), "tied": base, "same": base}
    torch.save(apart, tmp_path / "apart.pt")
    assert convert(tmp_path / "apart.pt", tmp_path / "apart.safetensors").notes == ()
    halves = {"upper": base[:5], "lower": base[5:]}
    torch.save(halves, tmp_path / "halves.pt")
    assert convert(tmp_path / "halves.pt", tmp_path / "halves.safetensors").notes == ()
    views = {"w": base, "first": base[:3], "turned": base.t(), "own": torch.ones(2)}
    torch.save(views, tmp_path / "views.pt")
    converted = convert(tmp_path / "views.pt", tmp_path / "views.safetensors")
    assert converted.notes == ("3 tensors overlapped in storage; each is stored separately now",)


def test_what_loading_the_target_could_run_is_told(files: Path, tmp_path: Path) -> None:
    source = files / "keras-unsafe" / "lambda.keras"
    converted = convert(source, tmp_path / "out.keras")
    assert converted.verified and converted.safety
    assert {one.code for one in converted.safety} == {"keras-lambda"}
    with pytest.raises(UsageError, match=r"--strict"):
        convert(source, tmp_path / "strict.keras", ConvertOptions(strict=True))
    assert left(tmp_path) == ["out.keras"]


def test_no_tensor_has_the_name_of_the_entry(tmp_path: Path) -> None:
    torch.save({"ckpttool.content": torch.ones(2)}, tmp_path / "in.pt")
    for target in ("out.safetensors", "out.npz", "out.pth", "out.hdf5"):
        with pytest.raises(UsageError, match="this name is reserved"):
            convert(tmp_path / "in.pt", tmp_path / target)


def test_a_target_that_cannot_be_opened_is_removed_and_told(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(written: Path) -> None:
        os.truncate(written, 100)

    spoil_target(monkeypatch, cut)
    converted = convert(source, tmp_path / "out.safetensors")
    assert not converted.verified
    assert converted.mismatches[0].startswith("it can't be opened: ")
    assert ".new" not in converted.mismatches[0]
    assert left(tmp_path) == ["in"]


# What is compared -------------------------------------------------------------------------------------


@pytest.fixture
def tied(tmp_path: Path) -> Path:
    w, v = torch.ones(2, 2), torch.ones(2, 2)
    torch.save({"w": w, "v": v, "t": w, "epoch": 3}, tmp_path / "tied.pt")
    return tmp_path / "tied.pt"


def test_a_like_target_has_no_mismatch(tied: Path) -> None:
    assert mismatches_of(tied) == []


def changing(name: str, **changes: Any) -> object:
    def make(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(replace(one, **changes) if one.name == name else one for one in tensors)

    return make


def test_whom_a_tensor_is_tied_to_is_compared(tied: Path) -> None:
    assert "t is no longer tied to w" in mismatches_of(tied, tensors=changing("t", shares_with=None))
    assert "t is no longer tied to w" in mismatches_of(tied, tensors=changing("t", shares_with="v"))
    assert "v is tied to w, unlike in the source" in mismatches_of(
        tied, tensors=changing("v", shares_with="w")
    )


def test_role_and_path_are_compared(tied: Path) -> None:
    told = mismatches_of(tied, tensors=changing("w", role=Role.OPTIMIZER))
    assert any(one.startswith("w has the role optimizer instead of ") for one in told)


def test_what_is_said_beside_the_tensors_is_compared(tied: Path, files: Path) -> None:
    assert mismatches_of(tied, training=TrainingState(epoch=4)) == ["training state 'epoch' differs"]
    assert mismatches_of(tied, training=TrainingState()) == ["training state 'epoch' is missing"]
    assert "content other than tensors differs" in mismatches_of(tied, tree={"epoch": 4})
    metadata = files / "safetensors" / "metadata.safetensors"
    told = mismatches_of(metadata, metadata={})
    assert told and all(one.startswith("metadata ") and one.endswith(" is missing") for one in told)
    saved = files / "keras" / "adam.keras"
    assert "native part 'keras.config' is missing" in mismatches_of(saved, native={})


def test_what_a_format_says_in_its_own_way_is_no_mismatch(files: Path, tmp_path: Path) -> None:
    conversions = {
        "fluid/guide/checkpoint_0": ConvertOptions(to="fluid", only="weights"),
        "tensorflow/keras2/weights.05.ckpt": ConvertOptions(to="tensorflow", only="weights"),
        "savedmodel/module": ConvertOptions(to="tensorflow", only="weights"),
        "pytorch/minimal.pth": ConvertOptions(to="savedmodel", only="weights"),
        "safetensors/trainer/checkpoint-2": ConvertOptions(to="numpy"),
        "keras/adam.keras": ConvertOptions(to="keras-h5"),
        "keras/adam.h5": ConvertOptions(to="keras-h5"),
        "paddle/adam.pdopt": ConvertOptions(to="pytorch"),
        "paddle/evaluated.pd": ConvertOptions(to="torch-dcp"),
        "paddle/rows.selected": ConvertOptions(to="numpy"),
    }
    mismatches = {
        name: convert(files / name, tmp_path / str(at), options).mismatches
        for at, (name, options) in enumerate(conversions.items())
    }
    assert mismatches == dict.fromkeys(conversions, ())


def test_more_may_be_said(tied: Path) -> None:
    assert mismatches_of(tied, training=TrainingState(epoch=3, step=9), native={"keras.config": b"{}"}) == []


LOADS_ALONE = {
    "values": [1, 1 << 100, 1.5, 1j, b"x", bytearray(b"y"), {1, 2}, None, "ü"],
    "containers": [OrderedDict(a=1), Counter("aa"), (1, (2,)), {"a": {"b": [1]}}],
    "torch": [torch.Size([1]), torch.device("cpu"), torch.float16, torch.strided],
    "tensors": [torch.nn.Parameter(torch.ones(1)), torch.ones(1).to(torch.float8_e4m3fn)],
}
NEEDS_TRUST = {
    "args": (Namespace(lr=0.1), {"argparse.Namespace"}),
    "default": (defaultdict(list, a=[1]), {"builtins.list", "collections.defaultdict"}),
    "frozen": (frozenset({1}), {"builtins.frozenset"}),
    "path": (Path("a"), {"pathlib.PosixPath"}),
    "type": ([dict], {"builtins.dict"}),
}


def test_what_a_loader_has_to_be_told_is_said(tmp_path: Path, run: Run) -> None:
    source, target, strict = (tmp_path / name for name in ("a.pth", "b.pth", "c.pth"))

    def said_of(value: object) -> list[str]:
        torch.save({"w": torch.ones(2), "value": value}, source)
        for path in (target, strict):
            path.unlink(missing_ok=True)
        notes = json.loads(run("convert", source, target, "--json").out)["notes"]
        return [note for note in notes if "weights_only=False" in note]

    for name, value in LOADS_ALONE.items():
        assert said_of(value) == [], name
        torch.load(target, weights_only=True)
        assert run("convert", source, strict, "--strict").status == 0, name
    for name, (trusted, names) in NEEDS_TRUST.items():
        (note,) = said_of(trusted)
        assert set(note.rpartition(": ")[2].split(", ")) == names, name
        with pytest.raises(UnpicklingError):
            torch.load(target, weights_only=True)
        answer = run("convert", source, strict, "--strict")
        assert answer.status == 2, name
        assert note in answer.err
        assert not strict.exists(), name


def test_what_only_arrays_of_numpy_need_is_said_before_anything_is_written(tmp_path: Path, run: Run) -> None:
    torch.save({"w": torch.ones(2), "array": np.arange(3.0)}, tmp_path / "a.pth")
    answer = run("convert", tmp_path / "a.pth", tmp_path / "b.pth", "--dry-run")
    assert "weights_only=False" in answer.out
    assert "numpy" in answer.out
    assert run("convert", tmp_path / "a.pth", tmp_path / "b.safetensors", "--strict").status == 0
