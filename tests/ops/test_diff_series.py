"""Counters and weights in a difference, and a checkpoint against the weights that were exported from it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from ckpttool import diff
from ckpttool.cli.render.text_diff import summary_line
from ckpttool.ops.difference import DiffOptions
from ckpttool.ops.drift import drift

State = dict[str, torch.Tensor]


@cache
def with_counter(steps: int) -> State:
    """Return the state of a net after some steps, in which the batch counter moves farthest."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
    optimizer = torch.optim.SGD(net.parameters(), 1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.randn(16, 4)).pow(2).mean().backward()
        optimizer.step()
    return net.state_dict()


def integers(at: int) -> State:
    return {
        "step": torch.tensor(1000 * at),
        "position_ids": torch.arange(64) * at,
        "mask": torch.arange(8) > at,
        "ids": torch.full((3, 3), at, dtype=torch.int8),
        "index": torch.full((5,), at, dtype=torch.uint8),
    }


@pytest.mark.parametrize("more", [lambda at: {}, integers])
def test_integers_stay_out_of_norms_and_order(more: Callable[[int], State], tmp_path: Path) -> None:
    states = [with_counter(30 * at) | more(at) for at in (1, 2)]
    paths = [str(tmp_path / f"m_{at}.pt") for at in (1, 2)]
    for path, state in zip(paths, states, strict=True):
        torch.save(state, path)
    floating = [name for name, value in states[0].items() if value.is_floating_point()]
    a, b = (torch.cat([one[name].double().flatten() for name in floating]).numpy() for one in states)
    found = drift(paths, DiffOptions())
    (step,) = found.steps
    assert [point.norm for point in found.points] == pytest.approx([np.linalg.norm(a), np.linalg.norm(b)])
    assert (step.l2, step.max_abs) == pytest.approx((np.linalg.norm(b - a), abs(b - a).max()))
    assert step.relative == pytest.approx(np.linalg.norm(b - a) / np.linalg.norm(a))
    assert step.cosine == pytest.approx(a @ b / np.linalg.norm(a) / np.linalg.norm(b))
    assert step.largest in floating
    assert f"in {step.largest}" in summary_line(step.difference)
    counter = next(one for one in step.difference.changed if one.name == "1.num_batches_tracked")
    assert counter.statistics is not None and (counter.statistics.at_a, counter.statistics.at_b) == (30, 60)


def full(state: State, **more: object) -> dict[str, Any]:
    net = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return {"model": state, "optimizer": optimizer.state_dict(), "rng_state": torch.get_rng_state(), **more}


@pytest.mark.parametrize(
    ("more", "lacks"),
    [
        ({}, "optimizer state and RNG state"),
        ({"epoch": 3}, "optimizer state, step or epoch and RNG state"),
        ({"scaler": {"scale": 2.0, "_growth_tracker": 0}}, "optimizer state, RNG state and gradient scaler"),
        ({"ema": {"w": torch.ones(2, 2)}}, "optimizer state, RNG state and 1 other tensor (ema.w)"),
    ],
)
def test_a_checkpoint_and_its_own_weights(more: dict[str, Any], lacks: str, tmp_path: Path) -> None:
    whole, weights, state = tmp_path / "m.pt", tmp_path / "m.safetensors", with_counter(1)
    torch.save(full(state, **more), whole)
    save_file(state, weights)
    assert summary_line(diff(whole, weights)) == f"same weights (9 of 9); B lacks {lacks}"
    assert summary_line(diff(weights, whole)) == f"same weights (9 of 9); A lacks {lacks}"


def test_other_weights_are_never_called_the_same(tmp_path: Path) -> None:
    whole, state = tmp_path / "m.pt", with_counter(1)
    torch.save(full(state), whole)
    save_file(
        {name: value for name, value in state.items() if name != "2.bias"}, tmp_path / "less.safetensors"
    )
    save_file(state | {"2.bias": state["2.bias"] + 1}, tmp_path / "other.safetensors")
    for name in ("less", "other"):
        assert "same weights" not in summary_line(diff(whole, tmp_path / f"{name}.safetensors"))


def quantized(scale: float) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, and in many files
        return torch._make_per_tensor_quantized_tensor(torch.ones(2, 2, dtype=torch.int8), scale, 0)


def sparse(columns: int) -> torch.Tensor:
    indices, values = torch.tensor([[0, 1], [1, 0]]), torch.tensor([1.0, 2.0])
    return torch.sparse_coo_tensor(indices, values, (3, columns), check_invariants=False)


@pytest.mark.parametrize(
    ("one", "other", "is_bare"),
    [
        ({"w": quantized(0.1)}, {"w": quantized(0.5)}, False),
        ({"w": sparse(3)}, {"w": sparse(9)}, False),
        ({"gain": 0.5}, {"gain": 0.7}, False),
        ({"gain": 0.5}, {"gain": 0.7}, True),
        ({"gain": np.float32(2)}, {"gain": np.float32(3)}, False),
        ({"gain": 0.5}, {}, False),
        ({"gain": 0.5}, {}, True),
        ({"tokens": [1.0, 2.0]}, {"tokens": [1.0, 3.0]}, True),
        ({"fc._extra_state": {"amax": 1.0}}, {"fc._extra_state": {"amax": 2.0}}, True),
    ],
)
def test_values_among_the_weights_are_part_of_them(
    one: dict[str, Any], other: dict[str, Any], is_bare: bool, tmp_path: Path
) -> None:
    whole, weights, state = tmp_path / "m.pt", tmp_path / "w.pt", with_counter(1)
    torch.save(full(state | one), whole)
    torch.save(state | other if is_bare else {"model": state | other}, weights)
    for pair in ((whole, weights), (weights, whole)):
        assert "same weights" not in summary_line(diff(*pair))
        assert not diff(*pair, only="weights").equal


def test_nothing_is_said_of_weights_that_were_ignored(tmp_path: Path) -> None:
    whole, weights, state = tmp_path / "m.pt", tmp_path / "w.pt", with_counter(1)
    torch.save(full(state), whole)
    torch.save(state | {"2.bias": state["2.bias"] + 1}, weights)
    assert "same weights" not in summary_line(diff(whole, weights, ignore=("*bias",)))


@pytest.mark.parametrize(
    ("more", "less", "lacks"),
    [
        ({"loss_fn": {"centers": torch.ones(2, 2)}}, (), "1 tensor (loss_fn.centers)"),
        (
            {"score_head": {"weight": torch.ones(2, 2), "bias": torch.ones(2)}},
            ("optimizer", "rng_state"),
            "optimizer state, RNG state and 2 other tensors (score_head.*)",
        ),
        (
            {"random_features": {"w": torch.ones(2)}, "opt_net": {"w": torch.ones(2)}},
            ("optimizer",),
            "optimizer state and 2 other tensors (random_features.w, opt_net.w)",
        ),
        ({"sampler_net": {"w": torch.ones(2)}}, (), "1 tensor (sampler_net.w)"),
        ({"args": {"width": 3}, "epoch": 3}, ("rng_state",), "step or epoch, RNG state and 1 value"),
    ],
)
def test_all_that_one_side_lacks_is_named(
    more: dict[str, Any], less: tuple[str, ...], lacks: str, tmp_path: Path
) -> None:
    whole, a, b = full(with_counter(1)), tmp_path / "a.pt", tmp_path / "b.pt"
    torch.save(whole | more, a)
    torch.save({key: one for key, one in whole.items() if key not in less}, b)
    assert summary_line(diff(a, b)) == f"same weights (9 of 9); B lacks {lacks}"


def test_a_version_beside_the_weights_is_none_of_them(tmp_path: Path) -> None:
    state = with_counter(1)
    torch.save(
        {**state, "torch_version": "2", "rng_state": torch.get_rng_state(), "m": {}}, tmp_path / "a.pt"
    )
    torch.save({**state, "torch_version": "1"}, tmp_path / "b.pt")
    found = diff(tmp_path / "a.pt", tmp_path / "b.pt")
    assert [one.path for one in found.reported if one.of_weights] == []


def test_half_of_an_optimizer_is_not_all_of_it(tmp_path: Path) -> None:
    whole = full(with_counter(1), scheduler={"last_epoch": 3})
    torch.save(whole, tmp_path / "a.pt")
    for state in whole["optimizer"]["state"].values():
        del state["exp_avg_sq"]
    del whole["scheduler"]
    torch.save(whole, tmp_path / "b.pt")
    assert summary_line(diff(tmp_path / "a.pt", tmp_path / "b.pt")) == (
        "same weights (9 of 9); B lacks scheduler and 2 optimizer tensors"
    )


def test_a_difference_is_true_if_both_are_equal(tmp_path: Path) -> None:
    torch.save(with_counter(1), tmp_path / "a.pt")
    torch.save(with_counter(2), tmp_path / "b.pt")
    assert diff(tmp_path / "a.pt", tmp_path / "a.pt")
    assert not diff(tmp_path / "a.pt", tmp_path / "b.pt")
    paths = [str(tmp_path / name) for name in ("a.pt", "b.pt")]
    assert not drift(paths, DiffOptions())
