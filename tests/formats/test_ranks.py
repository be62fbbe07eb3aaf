"""Saves of which every rank wrote its own files: as one checkpoint, alone, with missing or foreign ranks."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import pytest

from ckpttool import Checkpoint, Role, Safety, UsageError, convert, inspect, merge, open_checkpoint, verify
from tests.support.commands import Run
from tests.support.opening import paths_in
from tests.support.rendering import text_of

RANKS = Path(__file__).parents[2] / "fixtures" / "files" / "ranks"
WHOLE = ["verl-2", "verl-4", "meshes-4", "old-fsdp-2", "old-fsdp-4", "numbered-2"]
MODEL = "model_world_size_2_rank_1.pt"


def copied(name: str, into: Path) -> Path:
    target = into / name
    shutil.copytree(RANKS / name, target)
    return target


def codes(opened: Checkpoint) -> dict[str, str | None]:
    return {finding.code: finding.where for finding in opened.findings}


def poisoned(path: Path, name: str) -> None:
    """Make the first value of a rank's tensor a NaN, and let the file's checksums say so."""
    import torch

    content = torch.load(path, weights_only=False)
    with torch.no_grad():
        content[name]._local_tensor.view(-1)[0] = float("nan")
    torch.save(content, path)


# One rank's file --------------------------------------------------------------------------------------


def test_a_ranks_file_has_its_part_and_says_where_it_lies() -> None:
    with open_checkpoint(RANKS / "meshes-4" / "model_world_size_4_rank_3.pt") as opened:
        shards = {tensor.name: (tensor.shape, tensor.shard) for tensor in opened.tensors}
    shape, shard = shards["0.weight"]
    assert shard is not None
    assert (shape, shard.shape, shard.ranges) == ((1, 5), (6, 5), (((5, 6),), ((0, 5),)))
    assert shard.placements == ("_StridedShard(0, 2)", "Shard(0)")
    assert (shard.mesh, shard.rank, shard.world) == ((2, 2), 3, 4)
    assert shards["few"][0] == (0,)


@pytest.mark.parametrize(
    "path", sorted(RANKS.glob("*/*.pt")), ids=lambda path: f"{path.parent.name}-{path.stem}"
)
def test_a_ranks_file_is_read_whole_and_raises_no_alarm(path: Path) -> None:
    verification = verify(path, jobs=1)
    # Distributed tensors are objects of classes, whose code runs on loading.
    has_tensors = not path.name.startswith("extra_state")
    assert verification.safety is (Safety.UNKNOWN if has_tensors else Safety.SAFE), verification.findings
    codes = {finding.code for finding in verification.findings}
    assert codes <= {"rank-alone", "dtensor-partial", "unknown-class"}
    assert {check.status.value for check in verification.checks if check.name == "values"} == {"passed"} or (
        path.parent.name == "partial-2"
    )


def test_a_sum_that_was_never_made_is_an_error() -> None:
    for path in (RANKS / "partial-2", RANKS / "partial-2" / MODEL):
        verification = verify(path, jobs=1)
        assert not verification.is_valid
        assert "dtensor-partial" in {finding.code for finding in verification.findings}


def test_a_ranks_file_alone_is_not_converted(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="only one rank's part"):
        convert(RANKS / "verl-2" / MODEL, tmp_path / "m.safetensors")


def test_inspect_shows_the_part_and_the_whole(run: Run) -> None:
    told = text_of(inspect(str(RANKS / "meshes-4" / "model_world_size_4_rank_0.pt")), width=120)
    assert "float32   7×5, Replicate(), Replicate()" in told
    assert "4×3 of 7×5, Shard(0), Shard(1)" in told
    assert "2×5 of 6×5, _StridedShard(0, 2), Shard(0)" in told
    (checkpoint,) = json.loads(run("inspect", "--json", RANKS / "verl-2" / MODEL).out)["checkpoints"]
    first = checkpoint["tensors"][0]
    assert first["shard"] == {
        "shape": [6, 5],
        "ranges": [[[3, 6]], [[0, 5]]],
        "placements": ["Shard(0)"],
        "mesh": [2],
        "rank": 1,
    }


# All of them ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WHOLE)
def test_nothing_is_found_in_what_the_ranks_wrote(name: str) -> None:
    verification = verify(RANKS / name, jobs=1)
    assert (verification.is_valid, verification.safety) == (True, Safety.UNKNOWN)
    assert {finding.code for finding in verification.findings} == {"unknown-class"}
    assert paths_in(RANKS / name) == [RANKS / name]


def test_a_copy_is_listed_once_and_what_each_rank_has_below_its_number() -> None:
    with open_checkpoint(RANKS / "old-fsdp-4") as opened:
        assert opened["rank_2.model.1.running_mean"].role is Role.OTHER
        assert "rank_1.optim.state.0.bias.step" not in opened
    with open_checkpoint(RANKS / "meshes-4") as opened:
        assert not [name for name in opened if name.startswith("rank_")]
        assert opened["copies"].extent is not None
        assert opened["tied"].shares_with == "rows_columns"


def test_saves_beside_each_other(run: Run) -> None:
    newest = RANKS / "beside-2" / "model_0000019"
    assert paths_in(RANKS / "beside-2") == [RANKS / "beside-2" / "model_0000009", newest]
    assert run("latest", RANKS / "beside-2") == (0, f"{newest}\n", "")
    with open_checkpoint(newest) as opened:
        assert (opened.variant, opened.training.step or opened.metadata["iteration"]) == ("ranks", 19)
        assert opened["model.0.weight"].shape == (6, 5)


@pytest.mark.framework
def test_merged_sets_are_what_pytorch_gathered(tmp_path: Path) -> None:
    import torch

    names = [*WHOLE, "beside-2/model_0000019", "trainer-2/checkpoint-2", "trainer-4/checkpoint-2"]
    for number, name in enumerate(names):
        truth = json.loads((RANKS / f"{name}.expected.json").read_text(encoding="utf-8"))
        target = tmp_path / f"{number}.pt"
        merge([RANKS / name], target)
        loaded = torch.load(target, weights_only=False)
        for told in truth["tensors"]:
            if str(told["path"][0]).startswith("rank_"):
                continue
            tensor = loaded
            is_flat = "trainer" in name
            for key in [".".join(map(str, told["path"]))] if is_flat else told["path"]:
                tensor = tensor[key]
            array = tensor if not isinstance(tensor, torch.Tensor) else _raw(tensor)
            assert _digest(array) == told["sha256"], (name, told["path"])
            assert list(tensor.shape) == told["shape"], (name, told["path"])


def _raw(tensor: object) -> object:
    import torch

    assert isinstance(tensor, torch.Tensor)
    return tensor.contiguous().view(-1).view(torch.uint8).numpy() if tensor.dim() else tensor.view(1).numpy()


def _digest(array: object) -> str:
    import hashlib

    return hashlib.sha256(array.tobytes()).hexdigest()  # type: ignore[attr-defined]


def test_what_ranks_have_otherwise_is_dropped_from_the_whole_and_told(tmp_path: Path) -> None:
    done = merge([RANKS / "verl-2"], tmp_path / "whole.pt")
    assert [one.path for one in done.dropped] == ["rank_1"]
    with open_checkpoint(tmp_path / "whole.pt") as opened:
        assert {tensor.path[0] for tensor in opened.tensors} == {"model", "optim", "extra_state"}


@pytest.mark.parametrize("target", ["whole.pt", "whole.safetensors", "dcp"])
def test_what_is_converted_is_equal(tmp_path: Path, target: str, run: Run) -> None:
    options = ["--to", "torch-dcp"] if target == "dcp" else []
    assert run("convert", "-q", RANKS / "verl-4", tmp_path / target, *options).status == 0
    assert run("diff", "-q", RANKS / "verl-4", tmp_path / target).status == 0
    assert run("diff", "-q", RANKS / "verl-4", RANKS / "meshes-4").status == 1


# What is wrong with them ------------------------------------------------------------------------------


@pytest.mark.framework
def test_a_nan_in_any_rank_is_found(tmp_path: Path) -> None:
    ranks = copied("verl-2", tmp_path)
    poisoned(ranks / MODEL, "0.weight")
    found = [one for one in verify(ranks, jobs=1).findings if one.code != "unknown-class"]
    assert [(one.code, one.where, one.message) for one in found] == [
        ("nan", "model.0.weight", "1 of 30 values are NaN")
    ]


@pytest.mark.framework
def test_a_nan_in_a_copy_is_found(tmp_path: Path) -> None:
    ranks = copied("meshes-4", tmp_path)
    poisoned(ranks / "model_world_size_4_rank_2.pt", "copies")
    found = {one.code: one.where for one in verify(ranks, jobs=1).findings}
    del found["unknown-class"]
    assert found == {"replica-differs": "model_world_size_4_rank_2.pt", "nan": "rank_2.copies"}


def test_a_missing_rank(tmp_path: Path, run: Run) -> None:
    ranks = copied("verl-2", tmp_path)
    (ranks / MODEL).unlink()
    with open_checkpoint(ranks) as opened:
        assert codes(opened) == {"part-missing": MODEL}
        assert not opened.complete
        weight = opened["model.0.weight"]
        assert (weight.shape, weight.values) == ((6, 5), None)
    assert not verify(ranks, jobs=1).is_valid
    assert run("merge", "-q", ranks, tmp_path / "whole.pt").status == 2


@pytest.mark.parametrize(
    ("name", "gone"),
    [
        ("numbered-2", "checkpoint_1.pt"),
        ("beside-2", "model_0000019.rank_0.pth"),
        ("trainer-2/checkpoint-2", "pytorch_model_fsdp_rank1.bin"),
        ("trainer-2/checkpoint-2", "optimizer_0_rank0.bin"),
    ],
)
def test_a_missing_rank_is_known_without_a_number_in_the_names(tmp_path: Path, name: str, gone: str) -> None:
    ranks = copied(name, tmp_path)
    (ranks / gone).unlink()
    path = ranks / "model_0000019" if name == "beside-2" else ranks
    with open_checkpoint(path) as opened:
        assert not opened.complete
        (finding,) = [one for one in opened.findings if one.code == "part-missing"]
        assert finding.where is not None
        assert finding.where.endswith(gone)
    if name != "beside-2":
        assert not verify(path, jobs=1).is_valid


def test_ranks_of_another_world(tmp_path: Path) -> None:
    ranks = copied("verl-2", tmp_path)
    foreign = "model_world_size_4_rank_0.pt"
    shutil.copy(RANKS / "verl-4" / foreign, ranks)
    with open_checkpoint(ranks) as opened:
        assert codes(opened) == {"part-extra": foreign}
    renamed = ranks / "model_world_size_2_rank_0.pt"
    (ranks / foreign).replace(renamed)
    with open_checkpoint(ranks) as opened:
        assert codes(opened)["part-stale"] == renamed.name
        assert not opened.complete


def test_a_ranks_file_under_anothers_name(tmp_path: Path) -> None:
    ranks = copied("verl-2", tmp_path)
    shutil.copy(ranks / MODEL, ranks / MODEL.replace("rank_1", "rank_0"))
    with open_checkpoint(ranks) as opened:
        stale = next(one for one in opened.findings if one.code == "part-stale")
        assert stale.message == "it holds the shards of rank 1: a file with the wrong name"


@pytest.mark.framework
def test_a_rank_of_another_save(tmp_path: Path) -> None:
    import torch

    ranks = copied("verl-2", tmp_path)
    path = ranks / "optim_world_size_2_rank_1.pt"
    content = torch.load(path, weights_only=False)
    for state in content["state"].values():
        state["step"] += 1
    torch.save(content, path)
    with open_checkpoint(ranks) as opened:
        (stale,) = [one for one in opened.findings if one.code == "part-stale"]
    assert (stale.where, stale.message[:53]) == (
        path.name,
        "its optimizer has made a different number of steps th",
    )
    path = copied("numbered-2", tmp_path) / "checkpoint_1.pt"
    content = torch.load(path, weights_only=False)
    torch.save({**content, "step": 39}, path)
    with open_checkpoint(path.parent) as opened:
        (stale,) = [one for one in opened.findings if one.code == "part-stale"]
    assert (stale.where, stale.message) == (path.name, "step 39, but checkpoint_0.pt says 40")


def test_a_damaged_rank(tmp_path: Path) -> None:
    ranks = copied("verl-2", tmp_path)
    (ranks / MODEL).write_bytes((ranks / MODEL).read_bytes()[:-9])
    with open_checkpoint(ranks) as opened:
        assert codes(opened) == {"part-damaged": MODEL}
    assert verify(ranks, jobs=1).safety is Safety.UNKNOWN


@pytest.mark.framework
def test_a_mesh_as_pytorch_wrote_it_before(tmp_path: Path) -> None:
    """Until 2.8 a mesh was an array of numbers, with the place in it and no rank: rewritten to that."""
    import torch

    ranks = copied("verl-2", tmp_path)
    for path in ranks.glob("model_*"):
        content = torch.load(path, weights_only=False)
        for tensor in content.values():
            mesh = tensor._spec.mesh
            place = list(mesh._coordinate_on_dim)
            mesh.__dict__ = {
                "device_type": "cpu",
                "mesh": torch.tensor([0, 1], dtype=torch.int32),
                "mesh_dim_names": None,
                "_flatten_mesh_list": (0, 1),
                "_coordinate_on_dim": place,
            }
        torch.save(content, path)
    with open_checkpoint(ranks) as opened, open_checkpoint(RANKS / "verl-2") as other:
        assert opened.findings == ()
        assert opened["model.0.weight"].tobytes() == other["model.0.weight"].tobytes()


@pytest.mark.framework
def test_dimensions_of_a_mesh_cut_in_the_order_that_is_said(tmp_path: Path) -> None:
    """PyTorch says the same in two ways: a strided cut, and plain cuts from right to left."""
    import torch
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor._dtensor_spec import ShardOrderEntry

    ranks = copied("meshes-4", tmp_path)
    for path in ranks.glob("*.pt"):
        content = torch.load(path, weights_only=False)
        spec = content["0.weight"]._spec
        spec.placements = (Shard(0), Shard(0))
        spec.shard_order = (ShardOrderEntry(tensor_dim=0, mesh_dims=(1, 0)),)
        spec.use_strided_shard_as_shard_order = False
        torch.save(content, path)
    with open_checkpoint(ranks) as opened, open_checkpoint(RANKS / "meshes-4") as other:
        assert opened.findings == ()
        assert opened["0.weight"].tobytes() == other["0.weight"].tobytes()


@pytest.mark.framework
def test_a_rank_that_has_all_of_what_others_have_parts_of(tmp_path: Path) -> None:
    import torch

    ranks = copied("meshes-4", tmp_path)
    path = ranks / "model_world_size_4_rank_0.pt"
    content = torch.load(path, weights_only=False)
    torch.save({**content, "rows_rows": torch.ones(3)}, path)
    with open_checkpoint(ranks) as opened:
        assert codes(opened)["part-stale"] == path.name
        assert opened["rank_0.rows_rows"].shape == (3,)
        assert opened["rows_rows"].values is None


@pytest.mark.framework
def test_slices_of_which_nothing_says_how_they_were_cut(tmp_path: Path, run: Run) -> None:
    import torch

    for rank in range(2):
        torch.save(
            {"w": torch.full((3, 2 + rank), float(rank))}, tmp_path / f"model_world_size_2_rank_{rank}.pt"
        )
    with open_checkpoint(tmp_path) as opened:
        assert codes(opened) == {"cut-not-said": "w"}
        assert list(opened) == ["rank_0.w", "rank_1.w"]
    assert run("merge", "-q", tmp_path, tmp_path / "whole.pt").status == 2


@pytest.mark.framework
def test_without_checksums_a_copy_is_neither_the_same_nor_another(tmp_path: Path) -> None:
    import torch

    ranks = copied("meshes-4", tmp_path)
    for path in ranks.glob("*.pt"):
        content = torch.load(path, weights_only=False)
        torch.save(content, path, _use_new_zipfile_serialization=False)
    with open_checkpoint(ranks) as opened, open_checkpoint(RANKS / "meshes-4") as other:
        assert opened.findings == ()
        assert "rank_3.copies" in opened
        for name in other:
            assert opened[name].tobytes() == other[name].tobytes(), name


def test_numbered_files_are_ranks_only_beside_what_says_so(tmp_path: Path) -> None:
    ranks = copied("numbered-2", tmp_path)
    (ranks / "metadata.pkl").write_bytes(pickle.dumps({"epochs": 3}))
    assert [path.name for path in paths_in(ranks)] == [
        "checkpoint_0.pt",
        "checkpoint_1.pt",
        "metadata.pkl",
    ]


# Directories of a run -------------------------------------------------------------------------------


def test_ranks_beside_another_checkpoint_do_not_hide_it(tmp_path: Path) -> None:
    ranks = copied("verl-2", tmp_path)
    shutil.copy(RANKS.parent / "pytorch" / "bare_state_dict.pth", ranks / "epoch_1.pth")
    found = [path.name for path in paths_in(ranks)]
    assert sorted(found) == [
        "epoch_1.pth",
        "extra_state_world_size_2_rank_0.pt",
        "extra_state_world_size_2_rank_1.pt",
        "model_world_size_2",
        "optim_world_size_2",
    ]
    with open_checkpoint(ranks / "model_world_size_2") as opened:
        assert (opened.findings, opened["0.weight"].shape) == ((), (6, 5))


def test_what_lies_beside_ranks_is_named(tmp_path: Path) -> None:
    ranks = copied("verl-2", tmp_path)
    shutil.copy(RANKS.parent / "pytorch" / "bare_state_dict.pth", ranks / "data_0.pt")
    with open_checkpoint(ranks) as opened:
        assert codes(opened) == {"not-part": "data_0.pt"}


def a_run(into: Path) -> Path:
    for step in (2, 4, 6):
        target = into / "run" / f"checkpoint-{step}"
        shutil.copytree(RANKS / "trainer-2" / "checkpoint-2", target)
        state = {"epoch": 1.0, "global_step": step, "max_steps": 8, "log_history": []}
        (target / "trainer_state.json").write_text(json.dumps(state), encoding="utf-8")
    return into / "run"


def test_latest_and_prune_take_a_trainers_directory(tmp_path: Path, run: Run) -> None:
    root = a_run(tmp_path)
    assert verify(root / "checkpoint-6", jobs=1).is_valid
    newest = run("latest", root)
    assert (newest.status, newest.out) == (0, f"{root}/checkpoint-6\n")
    (root / "checkpoint-6" / "pytorch_model_fsdp_rank1.bin").unlink()
    newest = run("latest", root)
    assert (newest.status, newest.out) == (0, f"{root}/checkpoint-4\n")
    # The incomplete one stays, and is told.
    assert run("prune", "-q", "--yes", "--keep-last", "1", root).status == 1
    assert sorted(path.name for path in root.iterdir() if not path.name.startswith(".")) == [
        "checkpoint-4",
        "checkpoint-6",
    ]


def test_prune_and_rename_take_all_files_of_a_save(tmp_path: Path, run: Run) -> None:
    ranks = copied("beside-2", tmp_path)
    (ranks / "model_0000019.expected.json").unlink()
    assert run("prune", "-q", "--yes", "--keep-last", "1", ranks).status == 0
    names = ["model_0000019.rank_0.pth", "model_0000019.rank_1.pth"]
    assert sorted(path.name for path in ranks.glob("*")) == names
    assert run("rename", "-q", "--yes", "--template", "run-s{step}", ranks).status == 0
    assert len(sorted(ranks.glob("run-s19*"))) == 2
    with open_checkpoint(ranks / "run-s19") as opened:
        assert opened.findings == ()


def test_a_set_of_optimizers_is_the_optimizers(tmp_path: Path) -> None:
    with open_checkpoint(RANKS / "trainer-4" / "checkpoint-2") as opened:
        assert (opened.format, opened.variant, opened.findings) == ("pytorch", "trainer", ())
        roles = {tensor.path[0]: tensor.role for tensor in opened.tensors}
    assert roles["0.weight"] is Role.WEIGHTS
    assert roles["optimizer_0"] is Role.OPTIMIZER
