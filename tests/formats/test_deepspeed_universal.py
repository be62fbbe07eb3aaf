"""DeepSpeed's universal checkpoints, as ``ds_to_universal`` leaves them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ckpttool import CheckpointError, convert, latest, merge, open_checkpoint, salvage, verify

SHAPES = {"fc.weight": (4, 4), "fc.bias": (4,), "norm.weight": (4,)}
STATES = ("fp32", "exp_avg", "exp_avg_sq")
TAG = "global_step10_universal"


def universal(
    root: Path, *, stage: int = 2, mp: int = 1, flat: bool = False, pointer: str | None = None
) -> Path:
    """Return a directory with the values that it holds by name: of ZeRO 3 they are flat."""
    directory, weights = root / TAG, {}
    for at, (name, shape) in enumerate(SHAPES.items()):
        (directory / "zero" / name).mkdir(parents=True)
        for number, state in enumerate(STATES):
            value = (
                torch.arange(float(torch.Size(shape).numel())).reshape(shape) + 10 * at + 100 * number
            ) / 3
            weights.setdefault(name, value.bfloat16())
            torch.save(value.flatten() if flat else {"param": value}, directory / f"zero/{name}/{state}.pt")
        torch.save(torch.tensor(10.0), directory / f"zero/{name}/step.pt")
    groups = {"zero_stage": stage, "base_optimizer_state": {"param_groups": [{"lr": 1e-4}]}}
    torch.save(
        {"optimizer_state_dict": groups, "ds_version": "0.16.0"}, directory / "zero/optimizer_state.pt"
    )
    for rank in range(mp):
        torch.save(
            {
                "module": weights,
                "param_shapes": [{name: torch.Size(shape) for name, shape in SHAPES.items()}],
                "buffer_names": [],
                "shared_params": {},
                "global_steps": 10,
                "dp_world_size": 2,
                "mp_world_size": mp,
                "ds_config": {"zero_optimization": {"stage": stage}},
                "ds_version": "0.16.0",
                "universal_checkpoint_info": {"universal_checkpoint_version": 0.2},
            },
            directory / f"mp_rank_{rank:02d}_model_states.pt",
        )
    if pointer is not None:
        (root / pointer).write_text(TAG, "utf-8")
    return directory


@pytest.mark.parametrize(
    ("stage", "mp", "pointer"),
    [(1, 1, None), (2, 1, "latest"), (3, 1, "latest_universal"), (1, 2, "latest_universal"), (3, 2, None)],
)
def test_it_is_valid_and_found(stage: int, mp: int, pointer: str | None, tmp_path: Path) -> None:
    directory = universal(tmp_path, stage=stage, mp=mp, flat=stage == 3, pointer=pointer)
    verdict = verify(directory)
    assert (verdict.is_valid, [one for one in verdict.findings if one.check == "structure"]) == (True, [])
    assert latest(tmp_path).path == str(directory)


def test_of_a_pipeline_no_layer_files_are_copied(tmp_path: Path) -> None:
    directory = universal(tmp_path)
    for path in directory.glob("mp_rank_*"):
        state = torch.load(path, weights_only=True)
        torch.save(state | {"module": None, "num_experts": [2]}, path)
    assert [one for one in verify(directory).findings if one.code == "part-missing"] == []
    merge([directory], tmp_path / "w.safetensors", only="weights")
    assert load_file(tmp_path / "w.safetensors").keys() == SHAPES.keys()


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("mp", [1, 2])
def test_a_merge_gives_the_weights_in_full_precision(flat: bool, mp: int, tmp_path: Path) -> None:
    directory = universal(tmp_path, flat=flat, mp=mp)
    merge([directory], tmp_path / "w.safetensors", only="weights")
    merge([directory], tmp_path / "all.pt")
    whole = torch.load(tmp_path / "all.pt", weights_only=True)
    weights = load_file(tmp_path / "w.safetensors")
    assert weights.keys() == SHAPES.keys()
    for name, shape in SHAPES.items():
        for state in STATES:
            stored = torch.load(directory / f"zero/{name}/{state}.pt")
            expected = (stored if flat else stored["param"]).reshape(shape)
            found = weights[name] if state == "fp32" else whole["optimizer"]["state"][name][state]
            assert found.dtype == torch.float32 and torch.equal(found, expected), (name, state)
        assert torch.equal(whole["module"][name], weights[name])
        assert whole["optimizer"]["state"][name]["step"] == 10
    assert whole["optimizer"]["param_groups"][0]["lr"] == 1e-4
    assert whole["global_steps"] == 10


def edit_model(directory: Path, module: dict[str, torch.Tensor] | None = None, **changes: object) -> None:
    """Change what the model states of all ranks say; None takes a key away."""
    for path in directory.glob("mp_rank_*"):
        state = torch.load(path, weights_only=True)
        state = {key: value for key, value in (state | changes).items() if value is not None}
        torch.save(state | {"module": state["module"] | (module or {})}, path)


def store(directory: Path, value: torch.Tensor, state: str = "fp32", **made: object) -> None:
    torch.save({"param": value, **made}, directory / f"zero/fc.weight/{state}.pt")


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def test_what_is_missing_or_damaged_is_an_error(tmp_path: Path) -> None:
    cases = [
        (lambda one: shutil.rmtree(one / "zero/fc.bias"), "part-missing", "zero/fc.bias/fp32.pt"),
        (lambda one: (one / "zero/fc.bias/fp32.pt").unlink(), "part-missing", "zero/fc.bias/fp32.pt"),
        (lambda one: cut_short(one / "zero/fc.weight/fp32.pt"), "part-damaged", "zero/fc.weight/fp32.pt"),
        (
            lambda one: cut_short(one / "zero/fc.weight/exp_avg.pt"),
            "part-damaged",
            "zero/fc.weight/exp_avg.pt",
        ),
        (lambda one: cut_short(one / "zero/optimizer_state.pt"), "part-damaged", "zero/optimizer_state.pt"),
        (
            lambda one: torch.save({"other": torch.ones(4)}, one / "zero/fc.bias/fp32.pt"),
            "part-damaged",
            "zero/fc.bias/fp32.pt",
        ),
        (
            lambda one: torch.save({"param": torch.ones(5)}, one / "zero/fc.bias/fp32.pt"),
            "part-damaged",
            "zero/fc.bias/fp32.pt",
        ),
    ]
    for at, (change, code, where) in enumerate(cases):
        folder = tmp_path / str(at)
        folder.mkdir()
        directory = universal(folder)
        change(directory)
        verdict = verify(directory)
        assert not verdict.is_valid, code
        assert (code, where) in [(one.code, one.where) for one in verdict.findings], code
        with pytest.raises(CheckpointError):
            merge([directory], folder / "w.safetensors")


def test_a_parameter_without_its_own_step_is_a_warning(tmp_path: Path) -> None:
    directory = universal(tmp_path)
    (directory / "zero/fc.bias/step.pt").unlink()
    found = [(one.code, one.where, one.severity) for one in verify(directory).findings]
    assert found == [("part-missing", "zero/fc.bias/step.pt", "warning")]


def remove_states(directory: Path, name: str) -> None:
    for path in directory.glob(f"zero/*/{name}.pt"):
        path.unlink()


def without_shapes(directory: Path) -> None:
    edit_model(directory, param_shapes=None)
    shutil.rmtree(directory / "zero/fc.bias")


def test_what_contradicts_the_model_states_is_an_error(tmp_path: Path) -> None:
    cases = [
        (without_shapes, 1, "part-missing", "zero/fc.bias/fp32.pt"),
        (lambda one: store(one, torch.ones(())), 1, "part-damaged", "zero/fc.weight/fp32.pt"),
        (lambda one: store(one, torch.ones(4, 4).long()), 1, "part-damaged", "zero/fc.weight/fp32.pt"),
        (lambda one: store(one, torch.ones(4, 4).half()), 1, "part-damaged", "zero/fc.weight/fp32.pt"),
        (lambda one: store(one, torch.ones(2, 4)), 1, "part-damaged", "zero/fc.weight/fp32.pt"),
        (lambda one: store(one, torch.ones(4, 3)), 2, "part-damaged", "zero/fc.weight/fp32.pt"),
        (
            lambda one: store(one, torch.ones(4, 3), "exp_avg"),
            1,
            "part-damaged",
            "zero/fc.weight/exp_avg.pt",
        ),
        (
            lambda one: torch.save({}, one / "zero/fc.bias/exp_avg.pt"),
            1,
            "part-damaged",
            "zero/fc.bias/exp_avg.pt",
        ),
        (
            lambda one: (one / "zero/fc.bias/exp_avg.pt").unlink(),
            1,
            "part-missing",
            "zero/fc.bias/exp_avg.pt",
        ),
        (lambda one: remove_states(one, "exp_avg_sq"), 1, "part-missing", "zero/fc.bias/exp_avg_sq.pt"),
        (
            lambda one: shutil.copytree(one / "zero/fc.bias", one / "zero/ghost"),
            1,
            "part-extra",
            "zero/ghost",
        ),
        (lambda one: (one / "mp_rank_00_model_states.pt").unlink(), 1, "part-missing", None),
        (lambda one: shutil.rmtree(one / "zero"), 1, "part-missing", "zero"),
        (
            lambda one: [shutil.rmtree(one / "zero" / name) for name in SHAPES],
            1,
            "part-missing",
            "zero/fc.bias/fp32.pt",
        ),
    ]
    for at, (change, mp, code, where) in enumerate(cases):
        folder = tmp_path / str(at)
        folder.mkdir()
        directory = universal(folder, mp=mp)
        change(directory)
        errors = [one for one in verify(directory).findings if one.severity == "error"]
        assert (code, where) in [(one.code, one.where) for one in errors], code
        assert not any("optim_states" in (one.where or "") for one in errors), code
        with pytest.raises(CheckpointError):
            merge([directory], folder / "w.pt")


def test_a_parameter_may_be_what_ranks_had_slices_of(tmp_path: Path) -> None:
    """As ``merge_tp_slices`` and ``_consolidate_zero3_autoep_expert_states`` of DeepSpeed join them."""
    cases = [
        (lambda one: store(one, torch.rand(8, 4), cat_dim=0), 2),
        (lambda one: store(one, torch.rand(4, 8), cat_dim=1), 2),
        (lambda one: store(one, torch.rand(3, 4), cat_dim=0, vocab_tensor=True), 1),
        (lambda one: store(one, torch.rand(7, 4), cat_dim=0, vocab_tensor=True), 2),
        (lambda one: store(one, torch.rand(2, 2, 4), sub_param_shape=[2, 2, 4]), 1),
        (lambda one: store(one, torch.rand(6, 4), cat_dim=0, is_expert_param=True, ep_num_experts=6), 1),
    ]
    for at, (change, mp) in enumerate(cases):
        folder = tmp_path / str(at)
        folder.mkdir()
        directory = universal(folder, mp=mp)
        for state in ("exp_avg", "exp_avg_sq"):
            (directory / f"zero/fc.weight/{state}.pt").write_bytes(b"")
        change(directory)
        for state in ("exp_avg", "exp_avg_sq"):
            shutil.copy(directory / "zero/fc.weight/fp32.pt", directory / f"zero/fc.weight/{state}.pt")
        assert verify(directory).findings == ()


def test_a_vocabulary_has_the_rows_that_the_model_states_tell(tmp_path: Path) -> None:
    directory = universal(tmp_path)
    edit_model(directory, universal_checkpoint_info={"original_vocab_size": 3})
    for state in STATES:
        store(directory, torch.rand(2, 4), state, cat_dim=0, vocab_tensor=True)
    assert [one.code for one in verify(directory).findings] == ["part-damaged"] * 3


def test_master_weights_may_be_in_half_precision_if_the_settings_say_so(tmp_path: Path) -> None:
    directory = universal(tmp_path)
    edit_model(directory, ds_config={"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}})
    store(directory, torch.ones(4, 4).cumsum(0).bfloat16())
    assert not [one for one in verify(directory).findings if one.check == "structure"]


def test_what_is_not_trained_needs_no_directory(tmp_path: Path) -> None:
    """Of ZeRO 1, only its absence from ``param_shapes`` says that a parameter is frozen."""
    directory = universal(tmp_path)
    frozen = torch.tensor([1.5, 2.5]).bfloat16()
    edit_model(directory, {"frozen.weight": frozen, "mean": torch.ones(2)}, buffer_names=["mean"])
    assert verify(directory).findings == ()
    merge([directory], tmp_path / "w.safetensors", only="weights")
    weights = load_file(tmp_path / "w.safetensors")
    assert weights.keys() == {*SHAPES, "frozen.weight", "mean"}
    assert torch.equal(weights["frozen.weight"], frozen)


def test_slices_of_what_is_frozen_are_not_taken_for_the_whole(tmp_path: Path) -> None:
    """ZeRO 3 leaves a placeholder, and each rank has a part elsewhere."""
    directory = universal(tmp_path, stage=3, flat=True)
    shapes = {"frozen.weight": torch.Size([2, 2])}
    edit_model(directory, {"frozen.weight": torch.empty(0)}, frozen_param_shapes=shapes)
    with pytest.raises(CheckpointError, match=r"frozen\.weight"):
        merge([directory], tmp_path / "w.safetensors")


def test_without_shapes_names_tell_what_is_lost(tmp_path: Path) -> None:
    directory = universal(tmp_path)
    edit_model(
        directory,
        {"frozen.weight": torch.ones(2), "mean": torch.ones(2), "head.weight": torch.ones(4)},
        param_shapes=None,
        buffer_names=["mean"],
        frozen_param_shapes={"frozen.weight": torch.Size([2])},
        shared_params={"head.weight": "norm.weight"},
    )
    found = [(one.code, one.severity) for one in verify(directory).findings]
    assert found == [("part-not-checked", "warning")]


@pytest.mark.parametrize("flat", [False, True])
def test_weights_are_those_in_full_precision(flat: bool, tmp_path: Path) -> None:
    directory = universal(tmp_path, flat=flat)
    convert(directory, tmp_path / "w.safetensors", only="weights")
    weights = load_file(tmp_path / "w.safetensors")
    assert weights.keys() == SHAPES.keys()
    for name, shape in SHAPES.items():
        stored = torch.load(directory / f"zero/{name}/fp32.pt")
        assert torch.equal(weights[name], (stored if flat else stored["param"]).reshape(shape))
    with open_checkpoint(directory) as checkpoint:
        assert checkpoint.parameters == 24


def test_a_lost_weight_is_lost_though_a_rounded_copy_is_left(tmp_path: Path) -> None:
    directory = universal(tmp_path)
    path = directory / "zero/fc.weight/fp32.pt"
    path.write_bytes(path.read_bytes()[:500])
    saved = salvage(directory, tmp_path / "w.pt")
    assert [one.name for one in saved.lost] == ["module.fc.weight"]
    assert saved.survival.weights == (2, 3)


@pytest.mark.parametrize("type", [torch.bfloat16, torch.float16, torch.float32])
def test_rounded_copies_of_other_values_are_a_warning(type: torch.dtype, tmp_path: Path) -> None:
    directory = universal(tmp_path)
    special = torch.tensor([1e-30, -0.0, 1e30, float("inf"), *torch.rand(12)]).reshape(4, 4)
    store(directory, special)
    edit_model(directory, {"fc.weight": special.to(type)})
    assert "copies-differ" not in [one.code for one in verify(directory).findings]
    edit_model(directory, {"fc.weight": special.flip(0).to(type)})
    assert ("copies-differ", "module.fc.weight", "warning") in [
        (one.code, one.where, one.severity) for one in verify(directory).findings
    ]
    assert verify(directory, only={"structure"}).findings == ()


def test_tied_weights_are_tied_in_full_precision(tmp_path: Path) -> None:
    directory = universal(tmp_path)
    for path in directory.glob("mp_rank_*"):
        state = torch.load(path, weights_only=True)
        state["module"]["head.weight"] = state["module"]["fc.weight"]
        torch.save(state, path)
    assert verify(directory).findings == ()
    merge([directory], tmp_path / "all.pt")
    module = torch.load(tmp_path / "all.pt", weights_only=True)["module"]
    assert module["head.weight"].data_ptr() == module["fc.weight"].data_ptr()
    assert torch.equal(module["head.weight"], torch.load(directory / "zero/fc.weight/fp32.pt")["param"])


def test_slices_of_what_has_no_directory_are_not_taken_for_the_whole(tmp_path: Path) -> None:
    directory = universal(tmp_path, mp=2)
    for rank in range(2):
        path = directory / f"mp_rank_{rank:02d}_model_states.pt"
        state = torch.load(path, weights_only=True)
        state["module"]["frozen.weight"] = torch.full((2, 4), float(rank))
        torch.save(state, path)
    with pytest.raises(CheckpointError, match=r"frozen\.weight"):
        merge([directory], tmp_path / "w.safetensors")
    with open_checkpoint(directory) as checkpoint:
        assert checkpoint.variant == "deepspeed-universal"
