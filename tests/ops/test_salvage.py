"""What is salvaged of cut and flipped files: what is written is right, and nothing lost is left unsaid."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import zipfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from ckpttool import CheckpointError, convert, open_checkpoint, salvage, verify, verify_all
from ckpttool.cli.render.text_changes import salvage_text
from ckpttool.ops.salvage import Salvaged
from ckpttool.storage.scan import scan
from tests.support.commands import Run

FILES = Path(__file__).parents[2] / "fixtures" / "files"
EPOCH = FILES / "series" / "model_epoch_3.pth"
TWIN = FILES / "twins" / "twin.pth"


def digests(path: Path) -> dict[str, str]:
    with open_checkpoint(path) as checkpoint:
        return {one.name: hashlib.sha256(one.tobytes()).hexdigest() for one in checkpoint.tensors}


def tensors_of(value: Any, path: str = "") -> dict[str, torch.Tensor]:
    """Return the tensors of what ``torch.load`` gave, by dotted names."""
    if isinstance(value, torch.Tensor):
        return {path: value}
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found: dict[str, torch.Tensor] = {}
    for key, one in items:
        found |= tensors_of(one, f"{path}.{key}" if path else str(key))
    return found


def check(done: Salvaged, target: Path, truth: dict[str, torch.Tensor]) -> None:
    """Require that what was written is what the framework had, and that the rest is called lost."""
    written = tensors_of(torch.load(target))
    lost = {one.name for one in done.lost}
    assert written.keys() | lost == truth.keys()
    assert not written.keys() & lost
    assert len(written) == done.proven + done.unproven
    for name, tensor in written.items():
        assert torch.equal(tensor, truth[name]), name


@settings(deadline=None)
@given(data=st.data())
def test_a_cut_file_of_pytorch_s(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder, whole = tmp_path_factory.mktemp("cut"), EPOCH.read_bytes()
    cut, target = folder / "cut.pth", folder / "out.pth"
    cut.write_bytes(whole[: data.draw(st.integers(0, len(whole)))])
    before = cut.read_bytes()
    try:
        done = salvage(cut, target)
    except CheckpointError:
        assert not target.exists()
    else:
        check(done, target, tensors_of(torch.load(EPOCH)))
        assert done.unproven == 0
        assert verify(target).ok
    assert cut.read_bytes() == before


@settings(deadline=None)
@given(data=st.data())
def test_a_flipped_file_of_pytorch_s(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder, whole = tmp_path_factory.mktemp("flipped"), bytearray(EPOCH.read_bytes())
    whole[data.draw(st.integers(0, len(whole) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    flipped, target = folder / "flipped.pth", folder / "out.pth"
    flipped.write_bytes(whole)
    try:
        done = salvage(flipped, target)
    except CheckpointError:
        assert not target.exists()
    else:
        check(done, target, tensors_of(torch.load(EPOCH)))


@settings(deadline=None)
@given(data=st.data())
def test_a_cut_file_of_safetensors(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("cut")
    state = {f"layer.{number}": torch.randn(3, number + 1) for number in range(6)}
    save_file(state, folder / "whole.safetensors")
    whole = (folder / "whole.safetensors").read_bytes()
    cut, target = folder / "cut.safetensors", folder / "out.safetensors"
    cut.write_bytes(whole[: data.draw(st.integers(0, len(whole)))])
    try:
        done = salvage(cut, target)
    except CheckpointError:
        assert not target.exists()
        return
    written = load_file(target)
    assert written.keys() | {one.name for one in done.lost} == state.keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in written.items())
    assert (done.proven, done.unproven) == (0, len(written))  # no checksum says that they are right


@settings(deadline=None)
@given(data=st.data())
def test_a_damaged_tensorflow_checkpoint(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("tensorflow")
    for path in (FILES / "tensorflow" / "keras3").glob("*.*"):
        shutil.copy(path, folder / f"ckpt{''.join(path.suffixes)}")
    truth = digests(folder / "ckpt")
    shard = folder / "ckpt.data-00000-of-00001"
    content = bytearray(shard.read_bytes())
    if data.draw(st.booleans()):
        content[data.draw(st.integers(0, len(content) - 1))] ^= 1
    else:
        del content[data.draw(st.integers(0, len(content))) :]
    shard.write_bytes(content)
    try:
        done = salvage(folder / "ckpt", folder / "out.safetensors")
    except CheckpointError:
        assert not (folder / "out.safetensors").exists()
        return
    written = digests(folder / "out.safetensors")
    if any("_CHECKPOINTABLE_OBJECT_GRAPH" in f"{one.where} {one.message}" for one in done.damage):
        assert set(written.values()) <= set(truth.values())  # they are called what the index calls them
    else:
        assert written.keys() | {one.name for one in done.lost} == truth.keys()
        assert all(truth[name] == digest for name, digest in written.items())
    assert done.unproven == 0


@pytest.mark.parametrize("number", range(3))
def test_one_damaged_tensor_of_tensorflow_s(tmp_path: Path, number: int) -> None:
    for path in (FILES / "tensorflow" / "keras3").glob("*.*"):
        shutil.copy(path, tmp_path / f"ckpt{''.join(path.suffixes)}")
    with open_checkpoint(tmp_path / "ckpt") as checkpoint:
        tensor = [one for one in checkpoint.tensors if one.extent is not None][number]
    truth, shard = digests(tmp_path / "ckpt"), tmp_path / "ckpt.data-00000-of-00001"
    content = bytearray(shard.read_bytes())
    content[tensor.extent.offset] ^= 1
    shard.write_bytes(content)
    done = salvage(tmp_path / "ckpt", tmp_path / "out.safetensors")
    assert [one.name for one in done.lost] == [tensor.name]
    assert digests(tmp_path / "out.safetensors") == {
        name: digest for name, digest in truth.items() if name != tensor.name
    }


def test_bytes_behind_the_last_tensor(tmp_path: Path, run: Run) -> None:
    """Nothing is lost, but something is wrong, and it is said."""
    state = {"a": torch.ones(3)}
    save_file(state, tmp_path / "long.safetensors")
    with (tmp_path / "long.safetensors").open("ab") as file:
        file.write(b"more")
    answer = run("salvage", tmp_path / "long.safetensors", tmp_path / "out.safetensors")
    assert answer.status == 1
    assert "trailing-bytes" in answer.out
    assert torch.equal(load_file(tmp_path / "out.safetensors")["a"], state["a"])


def test_a_large_record_with_signatures_in_it(tmp_path: Path) -> None:
    """The bytes of a tensor may look like headers and descriptors of a zip."""
    bait = b"PK\x07\x08" + bytes(12) + b"PK\x03\x04" + b"PK\x07\x08"
    tensor = torch.frombuffer(bytearray(bait * 2_000), dtype=torch.uint8)
    torch.save({"a": tensor, "b": torch.ones(1000), "c": torch.zeros(1000)}, tmp_path / "whole.pt")
    whole = (tmp_path / "whole.pt").read_bytes()
    at = zipfile.ZipFile(tmp_path / "whole.pt").infolist()[-3].header_offset
    (tmp_path / "cut.pt").write_bytes(whole[: at - 200])
    done = salvage(tmp_path / "cut.pt", tmp_path / "out.pt")
    got = torch.load(tmp_path / "out.pt")
    assert torch.equal(got["a"], tensor)
    assert "a" not in {one.name for one in done.lost}


def test_a_missing_shard(tmp_path: Path) -> None:
    convert(TWIN, tmp_path / "shards", to="safetensors", shard_size=2000)
    truth = digests(tmp_path / "shards")
    gone = sorted((tmp_path / "shards").glob("*.safetensors"))[0]
    with open_checkpoint(gone) as checkpoint:
        names = {one.name for one in checkpoint.tensors}
    gone.unlink()
    done = salvage(tmp_path / "shards", tmp_path / "out.safetensors")
    written = digests(tmp_path / "out.safetensors")
    assert written == {name: digest for name, digest in truth.items() if name not in names}
    assert any(gone.name in f"{one.where} {one.message}" for one in done.damage)
    assert {one.name for one in done.lost} == names and done.names_all  # the index names them
    assert f"{len(written)} of {len(truth)} tensors" in done.summary


PARTS = {
    "safetensors/sharded": "model-00003-of-00004.safetensors",
    "keras/sharded": "model_00000.weights.h5",
    "pytorch/pytorch-sharded": "pytorch_model-00002-of-00002.bin",
    "safetensors/trainer/checkpoint-2": "optimizer.pt",
    "pytorch/trainer-bin/checkpoint-1": "pytorch_model.bin",
    "ranks/trainer-2/checkpoint-2": "pytorch_model_fsdp_rank0.bin",
    "ranks/numbered-2": "checkpoint_0.pt",
    "deepspeed/zero-1/global_step2": "mp_rank_00_model_states.pt",
    "torch-dcp/in-safetensors": "shard-00002-model-00001-of-00002.safetensors",
    "torch-dcp/fabric": "meta.pt",
}
"""A file of each kind of directory."""


@pytest.mark.parametrize("directory", PARTS)
def test_a_cut_part_of_a_directory(directory: str, tmp_path: Path) -> None:
    """Tensors of it are kept, as if it were alone."""
    kept = []
    for end in (-8, 0):
        place, target = tmp_path / str(end) / Path(directory).name, tmp_path / f"{end}.safetensors"
        shutil.copytree(FILES / directory, place)
        part = place / PARTS[directory]
        part.write_bytes(part.read_bytes()[:end])
        assert not verify(place).is_valid
        try:
            kept.append(salvage(place, target).kept)
        except CheckpointError:
            kept.append(0)
    assert kept[0] > kept[1]


INNER = {
    "checkpoint-2": ("deepspeed/zero-1/global_step2", "mp_rank_00_model_states.pt"),
    "step_1": ("safetensors/sharded", "model-00003-of-00004.safetensors"),
}
"""A directory in a trainer's, and in that of a step, with a file of it."""


@pytest.mark.parametrize("name", INNER)
def test_a_cut_part_of_a_directory_in_a_directory(name: str, tmp_path: Path) -> None:
    """A zip beside it lacks its head, so that no other command recognises it."""
    directory, (inner, part) = tmp_path / name, INNER[name]
    if name == "checkpoint-2":
        shutil.copytree(FILES / "safetensors" / "trainer" / name, directory)
    cut = shutil.copytree(FILES / inner, directory / Path(inner).name) / part
    cut.write_bytes(cut.read_bytes()[:-8])
    (directory / "extra.pt").write_bytes(TWIN.read_bytes()[40:])
    done = salvage(directory, tmp_path / "out.safetensors")
    saved = digests(tmp_path / "out.safetensors")
    assert {f"extra.{one}" for one in digests(TWIN)} <= saved.keys()
    assert len(done.lost) <= 1 and not any(one.code.endswith("-damaged") for one in done.damage)


def test_a_damaged_item_of_a_distributed_checkpoint(tmp_path: Path) -> None:
    source = shutil.copytree(FILES / "torch-dcp" / "one-rank", tmp_path / "one-rank")
    truth, items = digests(source), source / "__0_0.distcp"
    items.write_bytes(items.read_bytes().replace(b"archive/data/0", b"archive/data/4", 2))
    done = salvage(source, tmp_path / "out.safetensors")
    (lost,) = done.lost
    assert digests(tmp_path / "out.safetensors") == {k: v for k, v in truth.items() if k != lost.name}
    assert [one.code for one in done.damage] == ["item-damaged"]


@pytest.mark.parametrize("target", ["out.pth", "out.safetensors"])
@pytest.mark.parametrize("component", ["indices", "values"])
def test_a_sparse_tensor_without_a_component(component: str, target: str, tmp_path: Path) -> None:
    sparse, dense = torch.eye(3).to_sparse(), torch.arange(4.0)
    torch.save({"s": sparse, "w": dense}, tmp_path / "whole.pth")
    number = {"indices": 0, "values": 1}[component]
    with zipfile.ZipFile(tmp_path / "whole.pth") as whole, zipfile.ZipFile(tmp_path / "m.pth", "w") as cut:
        for name in whole.namelist():
            if not name.endswith(f"/data/{number}"):
                cut.writestr(name, whole.read(name))
    done = salvage(tmp_path / "m.pth", tmp_path / target)
    assert [one.name for one in done.lost] == [f"s.{component}"]
    assert digests(tmp_path / target) == {
        name: digest for name, digest in digests(tmp_path / "whole.pth").items() if name != f"s.{component}"
    }


@pytest.mark.parametrize(
    ("nbytes", "proposed"),
    [(100, None), (2000, "all 2 weights saved; lost 5 of 6 optimizer tensors")],
)
def test_verify_proposes_what_can_be_saved(
    nbytes: int, proposed: str | None, tmp_path: Path, run: Run
) -> None:
    (tmp_path / "cut.pth").write_bytes(EPOCH.read_bytes()[:nbytes])
    answer = run("verify", tmp_path / "cut.pth")
    line = f"    → ckpttool salvage {tmp_path / 'cut.pth'} DST: {proposed}"
    assert (line in answer.out.splitlines()) == (proposed is not None)
    assert ("salvage" in answer.out) == (proposed is not None)


def test_survival_is_in_the_documents(tmp_path: Path, run: Run) -> None:
    (tmp_path / "cut.pth").write_bytes(EPOCH.read_bytes()[:2000])
    expected = {
        "weights": {"saved": 2, "of": 2},
        "optimizer": {"saved": 1, "of": 6},
        "training": {"saved": 0, "of": 0},
        "other": {"saved": 0, "of": 0},
        "rng_state_lost": False,
        "names_all": True,
    }
    (row,) = json.loads(run("verify", "--json", tmp_path / "cut.pth").out)["checkpoints"]
    assert row["survival"] == expected
    assert salvage(tmp_path / "cut.pth", tmp_path / "out.pth").to_dict()["survival"] == expected
    assert verify_all(tmp_path / "cut.pth").to_dict()["checkpoints"][0]["survival"] == expected
    (row,) = json.loads(run("verify", "--json", tmp_path / "out.pth").out)["checkpoints"]
    assert "survival" not in row


@pytest.mark.parametrize("options", [("--quick",), ("--only", "structure,checksum")], ids=" ".join)
def test_verify_proposes_nothing_unless_all_is_read(
    options: tuple[str, ...], tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckpttool.ops.salvage.scan", None)
    (tmp_path / "cut.pth").write_bytes(EPOCH.read_bytes()[:2000])
    assert "salvage" not in run("verify", tmp_path / "cut.pth", *options).out


def test_verify_uses_the_jobs_and_tells_the_progress_of_what_can_be_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cut.pth").write_bytes(EPOCH.read_bytes()[:2000])
    asked: list[int] = []
    done: list[int] = []

    def scan_counted(*args: Any, **keywords: Any) -> Any:
        asked.append(keywords["jobs"])
        return scan(*args, **keywords)

    monkeypatch.setattr("ckpttool.ops.salvage.scan", scan_counted)
    verify_all(tmp_path / "cut.pth", jobs=3, progress=lambda what, total: nullcontext(done.append))
    assert asked == [3] and sum(done) > 0


def test_a_lost_random_state_has_its_name(tmp_path: Path) -> None:
    net = torch.nn.Linear(4, 2)
    torch.save({"model": net.state_dict(), "rng": torch.get_rng_state()}, tmp_path / "whole.pt")
    data = bytearray((tmp_path / "whole.pt").read_bytes())
    data[data.index(torch.get_rng_state().numpy().tobytes())] ^= 1
    (tmp_path / "bad.pt").write_bytes(data)
    done = salvage(tmp_path / "bad.pt", tmp_path / "out.pt")
    assert done.survival.weights == (2, 2) and done.survival.rng_state_lost
    assert "\n  all 2 weights saved; lost the RNG state\n" in salvage_text(done)


def test_arrays_of_numpy_s(tmp_path: Path) -> None:
    arrays = {f"a{number}": np.arange(500) + number for number in range(5)}
    np.savez(tmp_path / "whole.npz", **arrays)
    whole = (tmp_path / "whole.npz").read_bytes()
    (tmp_path / "cut.npz").write_bytes(whole[: len(whole) // 2])
    done = salvage(tmp_path / "cut.npz", tmp_path / "out.npz")
    with np.load(tmp_path / "out.npz") as got:
        assert 0 < len(got.files) < 5
        assert all(np.array_equal(got[name], arrays[name]) for name in got.files)
    assert done.proven == len(got.files)


@pytest.mark.parametrize(
    "name",
    ["keras/adam.h5", "keras/adam.weights.h5", "keras/adam.keras", "keras/keras2.h5", "hdf5/checksummed.h5"],
)
def test_a_cut_file_of_hdf5_s(name: str, tmp_path: Path) -> None:
    """Wherever it ends, what is kept is what the framework had, and more may be lost than has a name."""
    document = json.loads((FILES / f"{name}.expected.json").read_text())
    truth = {".".join(one["path"]): one["sha256"] for one in document["tensors"]}
    whole, cut = (FILES / name).read_bytes(), tmp_path / Path(name).name
    kept = set()
    for nbytes in range(0, len(whole), len(whole) // 12):
        cut.write_bytes(whole[:nbytes])
        target = tmp_path / f"{nbytes}.safetensors"
        try:
            done = salvage(cut, target)
        except CheckpointError:
            assert not target.exists()
            continue
        written = digests(target)
        assert written.items() <= truth.items()
        assert {one.name for one in done.lost} <= truth.keys() - written.keys()
        assert not done.names_all or len(written) == len(truth)
        kept.add(len(written))
    assert kept


def test_command_on_a_cut_file_of_keras_s(tmp_path: Path, run: Run) -> None:
    cut, target = tmp_path / "cut.keras", tmp_path / "out.weights.h5"
    cut.write_bytes((FILES / "keras" / "adam.keras").read_bytes()[:39_000])
    answer = run("salvage", cut, target)
    assert (answer.status, answer.err) == (1, "")
    assert answer.out.splitlines()[0].startswith("salvaged 11 tensors (284 B)")
    assert "  lost: possibly others with lost names" in answer.out
    assert "  error truncated [model.weights.h5]: " in answer.out and " bytes, expected 34,128" in answer.out
    assert run("verify", cut).status == 1


@pytest.mark.parametrize("name", ["config.json", "metadata.json"])
def test_weights_of_keras_s_without_what_describes_them(name: str, tmp_path: Path) -> None:
    whole = FILES / "keras" / "adam.keras"
    data = bytearray(whole.read_bytes())
    with zipfile.ZipFile(whole) as archive:
        data[archive.getinfo(name).header_offset + 60] ^= 1
    (tmp_path / "bad.keras").write_bytes(data)
    done = salvage(tmp_path / "bad.keras", tmp_path / "out.safetensors")
    assert set(digests(tmp_path / "out.safetensors").values()) <= set(digests(whole).values())
    assert (done.kept, done.lost) == (31, ()) and name in {one.where for one in done.damage}


def test_an_array_that_is_cut_has_its_name(tmp_path: Path) -> None:
    arrays = {"a": np.arange(50), "b": np.arange(900)}
    np.savez(tmp_path / "whole.npz", **arrays)
    (tmp_path / "cut.npz").write_bytes((tmp_path / "whole.npz").read_bytes()[:2000])
    done = salvage(tmp_path / "cut.npz", tmp_path / "out.npz")
    assert [one.name for one in done.lost] == ["b"] and not done.names_all


def test_what_ends_between_two_arrays_is_not_called_whole(tmp_path: Path, run: Run) -> None:
    np.savez(tmp_path / "whole.npz", a=np.arange(50), b=np.arange(900))
    data = (tmp_path / "whole.npz").read_bytes()
    (tmp_path / "cut.npz").write_bytes(data[: data.index(b"PK\x03\x04", 1)])
    answer = run("salvage", tmp_path / "cut.npz", tmp_path / "out.npz")
    assert answer.status == 1
    assert answer.out.splitlines()[0].startswith("salvaged 1 tensor (400 B)")
    assert answer.out.splitlines()[1:] == ["  lost: possibly others with lost names"]


def test_a_damaged_pickle_names_nothing(tmp_path: Path) -> None:
    whole = bytearray(EPOCH.read_bytes())
    whole[whole.index(b"optimizer_state_dict")] ^= 1  # in its pickle
    (tmp_path / "bad.pth").write_bytes(whole)
    with pytest.raises(CheckpointError, match="the list of tensors can't be trusted"):
        salvage(tmp_path / "bad.pth", tmp_path / "out.pth")
    assert os.listdir(tmp_path) == ["bad.pth"]


def test_epoch_and_settings_stay(tmp_path: Path) -> None:
    whole = bytearray(EPOCH.read_bytes())
    with zipfile.ZipFile(EPOCH) as archive:
        record = next(one for one in archive.infolist() if one.filename.endswith("data/0"))
        whole[whole.index(archive.read(record), record.header_offset)] ^= 1
    (tmp_path / "bad.pth").write_bytes(whole)
    salvage(tmp_path / "bad.pth", tmp_path / "out.pth")
    got = torch.load(tmp_path / "out.pth")
    assert got["epoch"] == 3 and got["optimizer_state_dict"]["param_groups"]
    assert list(got["model_state_dict"]) == ["fc.bias"]


@pytest.mark.parametrize("target", ["whole.ckpt", "whole.safetensors"])
@pytest.mark.parametrize(
    ("first_lost", "lost", "metrics"), [("data/2", 12, set()), ("data/8", 3, {"val_loss"})]
)
def test_lost_scores_of_lightning_s_are_no_obstacle(
    first_lost: str, lost: int, metrics: set[str], target: str, tmp_path: Path
) -> None:
    """Behind the weights lie scores, which tell a metric; then the optimizer."""
    data = (FILES / "runs/lightning/search/version_0/checkpoints/last.ckpt").read_bytes()
    (tmp_path / "cut.ckpt").write_bytes(data[: data.index(f"archive/{first_lost}".encode())])
    done = salvage(tmp_path / "cut.ckpt", tmp_path / target)
    assert len(done.lost) == lost
    with open_checkpoint(tmp_path / target) as checkpoint:
        names = {one.name for one in checkpoint.tensors}
        training = checkpoint.training
    assert names >= {"state_dict.layer.weight", "state_dict.layer.bias"}
    assert (training.epoch, training.step, set(training.metrics)) == (2, 6, metrics)
    assert verify(tmp_path / target).is_valid


@pytest.mark.parametrize(("nbytes", "name"), [(100, "cut.ckpt"), (2000, "cut.ckpt"), (2000, "cut")])
def test_what_is_cut_before_it_tells_its_format_is_refused(
    nbytes: int, name: str, tmp_path: Path, run: Run
) -> None:
    data = (FILES / "runs/lightning/search/version_0/checkpoints/last.ckpt").read_bytes()
    (tmp_path / name).write_bytes(data[:nbytes])
    answer = run("salvage", tmp_path / name, tmp_path / "saved.pth")
    assert answer.status == 2
    assert "it is a ZIP archive that is cut off before its format can be recognised" in answer.err
    assert not (tmp_path / "saved.pth").exists()


def test_command(tmp_path: Path, run: Run) -> None:
    whole = EPOCH.read_bytes()
    cut, target = tmp_path / "cut.pth", tmp_path / "out.pth"
    cut.write_bytes(whole[:2000])
    answer = run("salvage", cut, target)
    assert (answer.status, answer.err) == (1, "")
    lines = answer.out.splitlines()
    assert lines[0] == f"salvaged 3 of 8 tensors (92 B): {cut} → {target}, verified"
    assert lines[1] == "  all 2 weights saved; lost 5 of 6 optimizer tensors"
    assert lines[2] == "  lost: 5"
    assert lines[3].endswith(": its bytes are not in the file, which ends at byte 2,000")
    assert run("salvage", cut, target).status == 2  # it exists
    document = json.loads(run("salvage", "--json", "--force", cut, target).out)
    assert (document["proven"], document["unproven"], len(document["lost"])) == (3, 0, 5)
    assert document["schema"] == "ckpttool.salvage/1" and document["verified"]
    assert run("salvage", EPOCH, tmp_path / "whole.pth").status == 0
    assert run("salvage", cut, cut, "--force").status == 2
    assert cut.read_bytes() == whole[:2000]


def test_no_other_command_opens_what_is_cut(tmp_path: Path, run: Run) -> None:
    (tmp_path / "cut.pth").write_bytes(EPOCH.read_bytes()[:2000])
    salvage(tmp_path / "cut.pth", tmp_path / "out.pth")
    for command, *more in (("inspect",), ("verify",), ("convert", tmp_path / "x.pth", "-n")):
        assert run(command, tmp_path / "cut.pth", *more).status != 0


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(EPOCH, tmp_path / "whole.pth")

    def full(*arguments: object) -> int:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(CheckpointError):
        salvage(tmp_path / "whole.pth", tmp_path / "out.pth")
    assert os.listdir(tmp_path) == ["whole.pth"]


@pytest.mark.parametrize("damage", ["end", "directory", "first", "header"])
def test_records_of_a_zip_in_the_zip_are_never_taken_for_its_own(damage: str, tmp_path: Path) -> None:
    """A checkpoint holds the bytes of another, whose records have the same names and offsets."""
    inner, whole = io.BytesIO(), io.BytesIO()
    torch.save({"x": torch.zeros(2), "w": torch.full((2,), 7.0)}, inner)
    blob = torch.frombuffer(bytearray(inner.getvalue()), dtype=torch.uint8)
    tree = {"blob": blob, "w": torch.ones(2), "v": torch.full((2,), 2.0)}
    torch.save(tree, whole)
    data = bytearray(whole.getvalue())
    if damage == "end":
        del data[-700:]
    elif damage == "directory":
        del data[data.rindex(b"PK\x01\x02archive/data.pkl"[:4], 0, data.rindex(b"PK\x06\x06")) :]
    else:
        name = b"archive/data/0" if damage == "first" else b"archive/data.pkl"
        at = data.index(name) - 30
        data[at : at + 4] = bytes(4)
        if damage == "first":
            data[data.index(tree["w"].numpy().tobytes())] ^= 1
    (tmp_path / "m.pt").write_bytes(data)
    try:
        salvage(tmp_path / "m.pt", tmp_path / "out.pt")
    except CheckpointError:
        return
    for name, value in torch.load(tmp_path / "out.pt").items():
        assert torch.equal(value, tree[name]), name
