"""Merging what DeepSpeed's ranks wrote: against sums done by hand, and against cuts of known tensors."""

from __future__ import annotations

import math
import os
import pickle
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from ckpttool import CheckpointError, ConvertOptions, DamagedCheckpoint, merge, open_checkpoint
from tests.support.conversions import digests, left_out, true_digests, whole_of

ZERO = Path(__file__).parents[2] / "fixtures" / "files" / "deepspeed"
TAG = "global_step2"
STATES = "optimizer_state_dict"
State = dict[str, torch.Tensor]


class Inert:
    """What stands for a class of DeepSpeed's."""

    def __init__(self, *arguments: object) -> None:
        self.arguments = arguments


class Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return Inert if module.startswith("deepspeed") else super().find_class(module, name)


def loaded(path: Path) -> dict[str, Any]:
    """Return what a file holds, as torch reads it."""
    module = SimpleNamespace(Unpickler=Unpickler, load=pickle.load, __name__="inert")
    found: dict[str, Any] = torch.load(path, weights_only=False, pickle_module=module)
    return found


def ranks_of(tag: Path, model: int = 0) -> list[dict[str, Any]]:
    return [loaded(path)[STATES] for path in sorted(tag.glob(f"*_mp_rank_{model:02d}_optim_states.pt"))]


def cut(flat: torch.Tensor, shapes: dict[str, torch.Size]) -> State:
    """Return the parameters that lie one behind the other."""
    sizes = [shape.numel() for shape in shapes.values()]
    parts = flat[: sum(sizes)].split(sizes)
    return {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}


def interleaved(flats: Sequence[torch.Tensor], shapes: dict[str, torch.Size]) -> State:
    """Return the parameters of which each rank has an equal part, as stage 3 cuts them."""
    found, offset = {}, 0
    for name, shape in shapes.items():
        part = -(-shape.numel() // len(flats))
        whole = torch.cat([flat[offset : offset + part] for flat in flats])
        found[name] = whole[: shape.numel()].view(shape)
        offset += part
    return found


def merged(tag: Path, into: Path) -> dict[str, Any]:
    made = merge([tag], into / "whole.pth")
    assert (made.verified, made.dropped) == (True, ())
    found: dict[str, Any] = torch.load(into / "whole.pth", weights_only=True, mmap=True)
    return found


def assert_equal(found: dict[str, Any], expected: State) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found[name], tensor), name


# What DeepSpeed wrote ---------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [1, 2])
def test_stages_1_and_2(tmp_path: Path, stage: int) -> None:
    tag = ZERO / f"zero-{stage}" / TAG
    model, ranks = loaded(tag / "mp_rank_00_model_states.pt"), ranks_of(tag)
    (shapes,) = model["param_shapes"]
    found = merged(tag, tmp_path)
    flat = torch.cat([rank["single_partition_of_fp32_groups"][0] for rank in ranks])
    assert_equal(found["module"], {"seen": torch.tensor(3)} | cut(flat, shapes))
    for key in ("exp_avg", "exp_avg_sq"):
        moments = torch.cat([rank["base_optimizer_state"]["state"][0][key] for rank in ranks])
        own = {name: state[key] for name, state in found["optimizer"]["state"].items()}
        assert_equal(own, cut(moments, shapes))
    assert {float(state["step"]) for state in found["optimizer"]["state"].values()} == {2.0}


@pytest.mark.parametrize("stage", [1, 2])
def test_the_model_calculated_with_these_weights_rounded(tmp_path: Path, stage: int) -> None:
    tag = ZERO / f"zero-{stage}" / TAG
    rounded = loaded(tag / "mp_rank_00_model_states.pt")["module"]
    found = merged(tag, tmp_path)["module"]
    assert_equal({name: tensor.to(rounded[name].dtype) for name, tensor in found.items()}, dict(rounded))
    assert not torch.equal(found["0.weight"], rounded["0.weight"].float())


def test_stage_3(tmp_path: Path) -> None:
    tag = ZERO / "zero-3" / TAG
    ranks = ranks_of(tag)
    (shapes,) = loaded(tag / "zero_pp_rank_0_mp_rank_00_model_states.pt")["param_shapes"]
    found = merged(tag, tmp_path)
    weights = interleaved([torch.cat(rank["fp32_flat_groups"]) for rank in ranks], shapes)
    assert_equal(found["module"], {"seen": torch.tensor(3)} | weights)
    for key in ("exp_avg", "exp_avg_sq"):
        own = {name: state[key] for name, state in found["optimizer"]["state"].items()}
        assert_equal(own, interleaved([rank[STATES]["state"][0][key] for rank in ranks], shapes))


def test_stage_3_is_what_deepspeed_itself_makes_of_it() -> None:
    tag = ZERO / "zero-3" / TAG
    told = {name: one for name, one in true_digests(tag).items() if name.startswith("module.")}
    with whole_of(tag) as whole:
        found = {name: one for name, one in digests(whole).items() if name in told}
    assert found == told


def test_a_pipeline(tmp_path: Path) -> None:
    tag = ZERO / "pipeline" / TAG
    expected: State = {}
    rounded = {}
    for model in (0, 1):
        (shapes,) = loaded(tag / f"mp_rank_{model:02d}_model_states.pt")["param_shapes"]
        (rank,) = ranks_of(tag, model)
        expected |= cut(rank["single_partition_of_fp32_groups"][0], shapes)
    for path in tag.glob("layer_*"):
        layer = int(path.name[6:8])
        rounded |= {f"{layer}.{name}": tensor for name, tensor in loaded(path).items()}
    found = merged(tag, tmp_path)
    assert_equal(found["module"], expected)
    assert_equal({name: tensor.bfloat16() for name, tensor in expected.items()}, rounded)
    assert [group["params"] for group in found["optimizer"]["param_groups"]] == [list(expected)]


def test_experts(tmp_path: Path) -> None:
    tag = ZERO / "experts" / TAG
    rounded = dict(loaded(tag / "mp_rank_00_model_states.pt")["module"])
    for path in tag.glob("layer_*"):
        rounded |= loaded(path)
    found = merged(tag, tmp_path)["module"]
    assert {tensor.dtype for tensor in found.values()} == {torch.float32}
    assert_equal({name: tensor.bfloat16() for name, tensor in found.items()}, rounded)


def test_what_the_trainer_said_travels_too(tmp_path: Path) -> None:
    found = merged(ZERO / "zero-2" / TAG, tmp_path)
    assert (found["epoch"], found["global_steps"], found["global_samples"]) == (1, 2, 8)
    (group,) = found["optimizer"]["param_groups"]
    assert (group["lr"], group["betas"], group["params"]) == (
        0.015625,
        (0.9, 0.999),
        ["0.weight", "0.bias", "1.weight", "1.bias", "2.weight", "2.bias"],
    )
    assert found["optimizer"]["loss_scaler"] == {"cur_scale": 1.0, "dynamic": False}


def test_the_weights_alone_are_a_state_dict(tmp_path: Path) -> None:
    tag = ZERO / "zero-1" / TAG
    merge([tag], tmp_path / "model.safetensors", ConvertOptions(only="weights"))
    found = load_file(tmp_path / "model.safetensors")
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 3))
    model.register_buffer("seen", torch.tensor(0))
    model.load_state_dict(found)
    assert_equal(found, {name: tensor for name, tensor in merged(tag, tmp_path)["module"].items()})


def test_training_goes_on(tmp_path: Path) -> None:
    """The merged optimizer's state fits PyTorch's own optimizer, and one step later both have one result."""
    found = merged(ZERO / "zero-1" / TAG, tmp_path)
    names = found["optimizer"]["param_groups"][0]["params"]
    parameters = [torch.nn.Parameter(found["module"][name].clone()) for name in names]
    optimizer = torch.optim.Adam(parameters, lr=1.0)
    before = {
        name: {key: one.clone() for key, one in found["optimizer"]["state"][name].items()} for name in names
    }
    number = {name: at for at, name in enumerate(names)}
    state = {number[name]: own for name, own in found["optimizer"]["state"].items()}
    groups = [{**group, "params": [*number.values()]} for group in found["optimizer"]["param_groups"]]
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for name, parameter in zip(names, parameters, strict=True):
        own = before[name]
        mean, square = own["exp_avg"] * 0.9 + 0.1, own["exp_avg_sq"] * 0.999 + 0.001
        root = (square / (1 - 0.999**3)).sqrt() + 1e-8
        expected = found["module"][name] - 0.015625 * (mean / (1 - 0.9**3)) / root
        torch.testing.assert_close(parameter.data, expected)
        assert float(optimizer.state[parameter]["step"]) == 3.0


def test_without_zero_it_is_whole_as_it_is(tmp_path: Path) -> None:
    tag = ZERO / "zero-0" / TAG
    found, expected = merged(tag, tmp_path), loaded(tag / "mp_rank_00_model_states.pt")
    assert list(found) == list(expected)
    assert_equal(found["module"], expected["module"])
    assert found["optimizer"]["param_groups"] == expected["optimizer"]["param_groups"]


# Parts that are not there, or don't fit -----------------------------------------------------------------


def machines(stage: int, into: Path, groups: Sequence[Sequence[str]]) -> list[Path]:
    made = []
    for at, parts in enumerate(groups):
        target = into / f"node{at}" / TAG
        target.mkdir(parents=True)
        for path in sorted((ZERO / f"zero-{stage}" / TAG).iterdir()):
            if any(part in path.name for part in parts):
                shutil.copy(path, target)
        made.append(target)
    return made


GROUPS = {1: [["mp_rank_00_model", "rank_0_"], ["rank_1_"]], 3: [["rank_0_"], ["rank_1_"]]}


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("order", [1, -1])
def test_ranks_on_several_machines(tmp_path: Path, stage: int, order: int) -> None:
    with whole_of(ZERO / f"zero-{stage}" / TAG) as whole:
        expected = digests(whole)
    with whole_of(*machines(stage, tmp_path, GROUPS[stage])[::order]) as whole:
        assert digests(whole) == expected


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_missing(tmp_path: Path, stage: int, rank: int) -> None:
    tag = tmp_path / TAG
    shutil.copytree(ZERO / f"zero-{stage}" / TAG, tag)
    (path,) = tag.glob(f"*rank_{rank}_*optim_states.pt")
    path.unlink()
    with pytest.raises(DamagedCheckpoint, match=f"{path.name}]: no such file"), whole_of(tag):
        pass


def test_a_rank_twice(tmp_path: Path) -> None:
    groups = [["mp_rank_00_model", "rank_0_"], ["rank_0_", "rank_1_"]]
    with (
        pytest.raises(DamagedCheckpoint, match="is the same part"),
        whole_of(*machines(1, tmp_path, groups)),
    ):
        pass


def test_files_one_by_one(tmp_path: Path) -> None:
    paths = sorted((ZERO / "zero-2" / TAG).glob("*.pt"))
    with whole_of(*paths) as whole:
        assert whole["module.0.weight"].dtype.name == "float32"
    with pytest.raises(DamagedCheckpoint, match=paths[1].name), whole_of(paths[0], paths[2]):
        pass


def test_a_rank_of_another_save(tmp_path: Path) -> None:
    tag = written(tmp_path / TAG, [{"w": torch.ones(6, 3)}], 2, stage=2)
    written(tmp_path / "other", [{"w": torch.ones(6, 3)}], 2, stage=2, step=9)
    name = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    shutil.copy(tmp_path / "other" / name, tag / name)
    with pytest.raises(DamagedCheckpoint, match=f"{name}]: .*9"), whole_of(tag):
        pass


def test_partitions_that_do_not_make_the_parameters(tmp_path: Path) -> None:
    tag = written(tmp_path / TAG, [{"w": torch.ones(40, 3)}], 2, stage=2)
    path = tag / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    states = torch.load(path, weights_only=True)
    states[STATES]["single_partition_of_fp32_groups"] = [torch.zeros(11)]
    torch.save(states, path)
    with (
        pytest.raises(DamagedCheckpoint, match="71 elements in all, but its parameters 120"),
        whole_of(tag),
    ):
        pass


def test_tensor_parallel_ranks(tmp_path: Path) -> None:
    tag = written(tmp_path / TAG, [{"w": torch.ones(4, 3)}], 1, stage=2, models=2)
    with pytest.raises(DamagedCheckpoint, match=r"\[w\]: .*tensor-parallel"), whole_of(tag):
        pass


def test_parameters_that_two_stages_of_a_pipeline_share(tmp_path: Path) -> None:
    tag = written(tmp_path / TAG, [{"tied_modules.embed.weight": torch.randn(4, 3)}], 1, stage=1, models=2)
    with whole_of(tag) as whole:
        assert whole["module.tied_modules.embed.weight"].dtype.name == "float32"


def test_an_optimizer_that_does_not_name_its_stage(tmp_path: Path) -> None:
    weight = torch.randn(7, 3)
    tag = written(tmp_path / TAG, [{"w": weight}], 3, stage=1)
    for path in tag.glob("*optim_states.pt"):
        states = torch.load(path, weights_only=True)
        del states[STATES]["zero_stage"]
        torch.save(states, path)
    assert torch.equal(merged(tag, tmp_path)["module"]["w"], weight)


def test_states_of_groups_in_a_list(tmp_path: Path) -> None:
    weight = torch.randn(7, 3)
    tag = written(tmp_path / TAG, [{"w": weight}], 3, stage=2)
    for path in tag.glob("*optim_states.pt"):
        states = torch.load(path, weights_only=True)
        inner = states[STATES]["base_optimizer_state"]
        states[STATES]["base_optimizer_state"] = [inner["state"][0]]
        torch.save(states, path)
    found = merged(tag, tmp_path)["optimizer"]["state"]["w"]
    assert (found["step"], found["exp_avg"].shape) == (4, (7, 3))
    assert torch.equal(found["exp_avg"], weight * 2)


def test_what_only_another_rank_says_is_listed(tmp_path: Path) -> None:
    tag = written(tmp_path / TAG, [{"w": torch.ones(6, 3)}], 2, stage=3)
    path = tag / "zero_pp_rank_1_mp_rank_00_model_states.pt"
    model = torch.load(path, weights_only=True)
    torch.save({**model, "seed": 1, "random": torch.arange(3)}, path)
    torch.save({"replay": torch.zeros(4)}, tag / "mine.pt")
    stem = path.stem
    assert left_out(tag) == [f"{stem}.seed", f"{stem}.random", "mine"]


def test_a_state_that_is_not_kept_element_by_element(tmp_path: Path) -> None:
    tag = written(tmp_path / TAG, [{"w": torch.ones(6, 3)}], 2, stage=2)
    for path in tag.glob("*optim_states.pt"):
        states = torch.load(path, weights_only=True)
        states[STATES]["base_optimizer_state"]["state"][0]["rows"] = torch.zeros(3)
        torch.save(states, path)
    made = merge([tag], tmp_path / "whole.pth")
    assert [one.path for one in made.dropped] == ["optimizer.state.w.rows"]
    with pytest.raises(ValueError, match=r"rows can't be preserved"):
        merge([tag], tmp_path / "strict.pth", ConvertOptions(strict=True))
    made = merge([tag], tmp_path / "weights.pth", ConvertOptions(strict=True, only="weights"))
    assert made.dropped == ()
    assert sorted(os.listdir(tmp_path)) == [TAG, "weights.pth", "whole.pth"]


STRANGE = [
    ("param_slice_mappings", [{"w": {"numel": 18, "start": 99}}]),
    ("param_slice_mappings", {"w": 1}),
    ("param_slice_mappings", [None, 3]),
    ("partition_count", [0]),
    ("partition_count", "two"),
    ("single_partition_of_fp32_groups", {"x": torch.zeros(9)}),
    ("single_partition_of_fp32_groups", [torch.zeros(3, 3).T]),
    ("single_partition_of_fp32_groups", []),
    ("base_optimizer_state", 5),
    ("base_optimizer_state", {"state": {"x": {"exp_avg": torch.zeros(9)}}, "param_groups": [1, 2]}),
    ("base_optimizer_state", {"state": [], "param_groups": {}}),
    ("base_optimizer_state", [{"exp_avg": torch.zeros(10)}]),
]


@pytest.mark.parametrize(("key", "value"), STRANGE)
def test_states_that_deepspeed_does_not_write(tmp_path: Path, key: str, value: object) -> None:
    tag = written(tmp_path / TAG, [{"w": torch.ones(6, 3)}], 2, stage=2)
    for path in tag.glob("*optim_states.pt"):
        states = torch.load(path, weights_only=True)
        states[STATES][key] = value
        torch.save(states, path)
    try:
        made = merge([tag], tmp_path / "whole.pth")
    except CheckpointError as error:
        assert str(tag) in str(error)
    else:
        assert made.verified
        found = torch.load(tmp_path / "whole.pth", weights_only=True)["module"]["w"]
        assert torch.equal(found, torch.ones(6, 3))


def test_a_job_that_does_not_say_which_parameters_it_has(tmp_path: Path) -> None:
    tag = written(tmp_path / TAG, [{"w": torch.ones(6, 3)}], 2, stage=2)
    path = tag / "mp_rank_00_model_states.pt"
    torch.save({**torch.load(path, weights_only=True), "param_shapes": None}, path)
    with pytest.raises(DamagedCheckpoint, match="param_shapes"), whole_of(tag):
        pass


def test_tied_and_frozen_parameters(tmp_path: Path) -> None:
    groups = [{"embed.weight": torch.randn(5, 3), "out.bias": torch.randn(5)}]
    tag = written(tmp_path / TAG, groups, 2, stage=2)
    path = tag / "mp_rank_00_model_states.pt"
    model = torch.load(path, weights_only=True)
    model["module"]["out.weight"] = model["module"]["embed.weight"]
    model["module"]["frozen"] = torch.full((3,), 0.5, dtype=torch.bfloat16)
    model["shared_params"] = {"out.weight": "embed.weight"}
    torch.save(model, path)
    found = merged(tag, tmp_path)["module"]
    assert torch.equal(found["embed.weight"], groups[0]["embed.weight"])
    assert found["out.weight"].data_ptr() == found["embed.weight"].data_ptr()
    assert found["frozen"].dtype == torch.bfloat16


# Jobs of any size ---------------------------------------------------------------------------------------


def written(
    tag: Path,
    groups: list[State],
    world: int,
    *,
    stage: int,
    models: int = 1,
    step: int = 4,
    subgroups: int = 1,
) -> Path:
    """Write a tag whose parameters are known, cut as DeepSpeed cuts them."""
    tag.mkdir(parents=True, exist_ok=True)
    shapes = [{name: tensor.shape for name, tensor in group.items()} for group in groups]
    module = {name: tensor.bfloat16() for group in groups for name, tensor in group.items()}
    if stage == 3:
        module = {name: torch.zeros(0, dtype=torch.bfloat16) for name in module}
    told = {
        "module": module,
        "param_shapes": shapes,
        "global_steps": step,
        "dp_world_size": world,
        "mp_world_size": models,
        "ds_config": {"zero_optimization": {"stage": stage}},
    }
    for model in range(models):
        for rank in range(world if stage == 3 else 1):
            prefix = f"zero_pp_rank_{rank}_" if stage == 3 else ""
            torch.save(told, tag / f"{prefix}mp_rank_{model:02d}_model_states.pt")
        for rank in range(world):
            kept = [partitions(stage, groups, world, rank, subgroups, factor) for factor in (1, 2, 3)]
            states = {
                at: {"step": step, "exp_avg": mean, "exp_avg_sq": square}
                for at, (mean, square) in enumerate(zip(kept[1], kept[2], strict=True))
            }
            inner = {
                "state": states,
                "param_groups": [{"lr": 0.5, "params": [at]} for at in range(len(groups))],
            }
            names = (
                (STATES, "fp32_flat_groups")
                if stage == 3
                else (
                    "base_optimizer_state",
                    "single_partition_of_fp32_groups",
                )
            )
            own = {"zero_stage": stage, names[0]: inner, names[1]: kept[0]}
            own["partition_count"] = world if stage == 3 else [world] * len(groups)
            name = f"zero_pp_rank_{rank}_mp_rank_{model:02d}_optim_states.pt"
            torch.save({STATES: own, "ds_version": "0.0"}, tag / name)
    return tag


def partitions(
    stage: int, groups: list[State], world: int, rank: int, subgroups: int, factor: int
) -> list[torch.Tensor]:
    """Return what a rank keeps of each group; ``factor`` tells weights from the optimizer's."""
    if stage == 3:
        parts = []
        for tensor in (tensor for group in groups for tensor in group.values()):
            size = -(-tensor.numel() // world)
            padded = torch.cat([tensor.flatten() * factor, torch.zeros(size * world - tensor.numel())])
            parts.append(padded[rank * size : (rank + 1) * size])
        flat = torch.cat(parts)
        return [part.clone() for part in flat.tensor_split(subgroups)]
    kept = []
    for group in groups:
        flat = torch.cat([tensor.flatten() for tensor in group.values()]) * factor
        size = math.ceil(len(flat) / (2 * world)) * 2
        # The last rank's weights end with the last parameter; its optimizer pads.
        own = flat[rank * size : (rank + 1) * size]
        if factor > 1:
            own = torch.cat([own, torch.zeros(size - len(own))])
        kept.append(own.clone())
    return kept


SHAPES = st.lists(
    st.lists(st.lists(st.integers(1, 7), max_size=3), min_size=1, max_size=5), min_size=1, max_size=3
)


@settings(max_examples=25)
@given(SHAPES, st.integers(1, 5), st.sampled_from([1, 2, 3]), st.integers(1, 3))
def test_any_job(
    tmp_path_factory: pytest.TempPathFactory, shapes: list[list[list[int]]], world: int, stage: int, cuts: int
) -> None:
    counted = 0
    groups = []
    for at, group in enumerate(shapes):
        groups.append({})
        for number, shape in enumerate(group):
            size = math.prod(shape)
            groups[-1][f"g{at}.p{number}"] = torch.arange(counted, counted + size).float().view(shape)
            counted += size
    tag = written(tmp_path_factory.mktemp("job") / TAG, groups, world, stage=stage, subgroups=cuts)
    assert left_out(tag) == []
    with whole_of(tag) as whole:
        found = {tensor.name: tensor.array() for tensor in whole.tensors}
        tree: Any = whole.tree
    for name, tensor in (item for group in groups for item in group.items()):
        assert (found[f"module.{name}"] == tensor.numpy()).all()
        for key, factor in (("exp_avg", 2), ("exp_avg_sq", 3)):
            own = found[f"optimizer.state.{name}.{key}"]
            assert own.shape == tuple(tensor.shape)
            assert (own == tensor.numpy() * factor).all()
        assert tree["optimizer"]["state"][name]["step"] == 4
    assert len(found) == 3 * sum(map(len, groups))


def test_nothing_is_found_in_what_was_merged(tmp_path: Path) -> None:
    for stage in range(4):
        merge([ZERO / f"zero-{stage}" / TAG], tmp_path / f"{stage}.safetensors")
        with open_checkpoint(tmp_path / f"{stage}.safetensors") as opened:
            assert (opened.findings, opened.complete, opened.training.step) == ((), True, 2)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_flipped_bit_in_the_partition_of_a_rank(tmp_path: Path, stage: int) -> None:
    tag = tmp_path / "run" / TAG
    shutil.copytree(ZERO / f"zero-{stage}" / TAG, tag)
    with whole_of(tag) as whole:
        values = whole["module.2.weight"].tobytes()[-8:]
    (path,) = (path for path in tag.glob("*rank_1_*optim_states.pt"))
    data = bytearray(path.read_bytes())
    at = data.index(values)
    data[at] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedCheckpoint, match=path.stem):
        merge([tag], tmp_path / "whole.pth")
    assert os.listdir(tmp_path) == ["run"]
