"""Distributed checkpoints of Megatron: what lies beside the shards is part of them."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from ckpttool import Role, convert, inspect, open_checkpoint, verify
from ckpttool.cli.render.text_inspect import inspect_text
from ckpttool.core.checkpoint import judged_files
from ckpttool.ops.conversion_plan import content_of
from ckpttool.weights.converting.training_state import without_training_state
from tests.formats.test_torch_dcp import FILES, rewritten

COMMON = FILES.parent / "pytorch" / "metrics_only.pth"
CONFIG = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
Change = Callable[[Path], object]


def marked(into: Path) -> Path:
    """Return a directory as Megatron's planner leaves it, without what it writes beside."""
    return rewritten(into, lambda state: state.update(mcore_data={}))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Return a whole one."""
    directory = marked(tmp_path)
    shutil.copy(COMMON, directory / "common.pt")
    (directory / "metadata.json").write_text(json.dumps(CONFIG), "utf-8")
    return directory


def codes(directory: Path) -> list[tuple[str, str | None]]:
    return [(one.code, one.where) for one in verify(directory).findings if one.check == "structure"]


def test_what_is_not_sharded_is_part_of_it(saved: Path) -> None:
    assert codes(saved) == []
    with open_checkpoint(saved) as checkpoint, open_checkpoint(COMMON) as common:
        assert {Path(one.path).name for one in checkpoint.files} >= {"common.pt", "metadata.json"}
        assert common.metadata
        own = common.metadata.keys() - {"epoch", "step"}  # which the fixture's shards hold, too
        assert {key: checkpoint.metadata[key] for key in own} == {key: common.metadata[key] for key in own}
        assert str(saved / "common.pt") in judged_files(checkpoint)


@pytest.mark.parametrize(
    ("change", "code", "where"),
    [
        (lambda one: (one / "common.pt").unlink(), "part-missing", "common.pt"),
        (lambda one: (one / "metadata.json").unlink(), "part-missing", "metadata.json"),
        (lambda one: (one / "common.pt").write_bytes(COMMON.read_bytes()[:-40]), "part-damaged", "common.pt"),
        (lambda one: (one / "common.pt").write_bytes(b""), "part-damaged", "common.pt"),
        (lambda one: (one / "metadata.json").write_text('{"sharded_ba'), "part-damaged", "metadata.json"),
        (lambda one: (one / "metadata.json").write_text(""), "part-damaged", "metadata.json"),
        (lambda one: (one / "metadata.json").write_text("{}"), "part-damaged", "metadata.json"),
        (lambda one: (one / "metadata.json").write_text("[1]"), "part-damaged", "metadata.json"),
    ],
)
def test_what_is_missing_or_cut_short_is_an_error(saved: Path, change: Change, code: str, where: str) -> None:
    change(saved)
    assert codes(saved) == [(code, where)]
    with open_checkpoint(saved) as checkpoint:
        assert not checkpoint.complete


def test_both_are_missed_where_only_the_metadata_tells_who_wrote_it(tmp_path: Path) -> None:
    found = codes(marked(tmp_path))
    assert found == [("part-missing", "metadata.json"), ("part-missing", "common.pt")]


def test_the_files_tell_where_the_metadata_does_not(tmp_path: Path) -> None:
    directory = rewritten(tmp_path, lambda state: None)
    (directory / "metadata.json").write_text(json.dumps(CONFIG), "utf-8")
    assert codes(directory) == [("part-missing", "common.pt")]
    (directory / "metadata.json").write_text(json.dumps(CONFIG | {"common_backend": "torch_dist"}), "utf-8")
    assert codes(directory) == []


def test_somebody_elses_files_are_no_parts(tmp_path: Path) -> None:
    directory = rewritten(tmp_path, lambda state: None)
    shutil.copy(COMMON, directory / "common.pt")
    (directory / "metadata.json").write_text('{"tags": [', "utf-8")
    assert codes(directory) == []


# Roles ------------------------------------------------------------------------------------------------

_WEIGHT, _EMBEDDING = "decoder.layers.self_attention.linear_qkv.weight", "embedding.word_embeddings.weight"


def distributed(directory: Path, *names: str, shapes: dict[str, tuple[int, ...]] | None = None) -> Path:
    state = {name: torch.ones((shapes or {}).get(name, (8, 4))) for name in names}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=directory, no_dist=True)
    torch.save({"iteration": 7, "optimizer": {"param_groups": [{"lr": 1e-4}]}}, directory / "common.pt")
    (directory / "metadata.json").write_text(json.dumps(CONFIG), "utf-8")
    return directory


@pytest.mark.parametrize(
    ("name", "role"),
    [
        (f"optimizer.state.exp_avg.{_WEIGHT}", Role.OPTIMIZER),
        (f"optimizer.state.fp32_param.{_WEIGHT}", Role.OPTIMIZER),
        ("optimizer.distributed.dp_group_idx_0.gbuf_idx_0.bucket_idx_0.exp_avg", Role.OPTIMIZER),
        (f"chained_0.optimizer.state.exp_avg.{_EMBEDDING}", Role.OPTIMIZER),
        (f"chained_12.optimizer.state.exp_avg_sq.{_EMBEDDING}", Role.OPTIMIZER),
        ("decoder.optimizer.weight", Role.WEIGHTS),
        ("chained_x.optimizer.weight", Role.WEIGHTS),
        ("unchained_0.optimizer.weight", Role.WEIGHTS),
        ("optimizer_head.weight", Role.WEIGHTS),
        ("learned_optimizer.weight", Role.WEIGHTS),
        ("optimizer.net.weight", Role.WEIGHTS),
        ("optimizer.weight", Role.WEIGHTS),
        ("optimizer.state.weight", Role.WEIGHTS),
        ("optimizer.distributed.weight", Role.WEIGHTS),
        ("chained_0.optimizer.encoder.weight", Role.WEIGHTS),
    ],
)
def test_a_key_is_that_of_an_optimizer_where_it_begins_so(name: str, role: Role, tmp_path: Path) -> None:
    directory = distributed(tmp_path / "iter_0000007", _WEIGHT, name)
    with open_checkpoint(directory) as checkpoint:
        assert {one.name: one.role for one in checkpoint.tensors} == {_WEIGHT: Role.WEIGHTS, name: role}
    convert(directory, tmp_path / "w.safetensors", only="weights")
    assert set(load_file(tmp_path / "w.safetensors")) == (
        {_WEIGHT, name} if role is Role.WEIGHTS else {_WEIGHT}
    )
    with open_checkpoint(directory) as checkpoint:
        kept = {one.name for one in without_training_state(content_of(checkpoint)).tensors}
    assert kept == ({_WEIGHT, name} if role is Role.WEIGHTS else {_WEIGHT})


def test_a_module_called_optimizer_is_of_the_model(tmp_path: Path) -> None:
    model = torch.nn.ModuleDict({"optimizer": torch.nn.LSTM(3, 2), "head": torch.nn.Linear(2, 1)})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(model.state_dict(), checkpoint_id=tmp_path / "model", no_dist=True)
    convert(tmp_path / "model", tmp_path / "w.safetensors", only="weights")
    assert set(load_file(tmp_path / "w.safetensors")) == set(model.state_dict())


def test_flattened_states_are_told(tmp_path: Path) -> None:
    states = [f"optimizer.state.exp_avg.{one}" for one in (_WEIGHT, _EMBEDDING, "conv.weight")]
    shapes = {states[0]: (1, 1, 32), states[2]: (1, 1, 3), "conv.weight": (1, 1, 3)}
    directory = distributed(tmp_path / "one", _WEIGHT, _EMBEDDING, "conv.weight", *states, shapes=shapes)
    lines = inspect_text(inspect(directory), all_tensors=True).splitlines()
    assert sum("1×1×32, flattened" in line for line in lines) == 1
    assert sum(", flattened" in line for line in lines) == 1
