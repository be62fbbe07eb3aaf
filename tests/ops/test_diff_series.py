"""Counters and weights in a difference, and a checkpoint against the weights that were exported from it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from ckpttool import diff
from ckpttool.cli.render.text_diff import summary_line
from ckpttool.ops.diff import DiffOptions
from ckpttool.ops.drift import drift

State = dict[str, torch.Tensor]


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


@pytest.mark.parametrize(
    "more",
    [
        lambda at: {},
        lambda at: {"step": torch.tensor(1000 * at)},
        lambda at: {"position_ids": torch.arange(64) * at},
        lambda at: {"mask": torch.arange(8) > at},
        lambda at: {"ids": torch.full((3, 3), at, dtype=torch.int8)},
        lambda at: {"index": torch.full((5,), at, dtype=torch.uint8)},
    ],
)
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
        ({"scaler": {"scale": 2.0}}, "optimizer state, RNG state and gradient scaler"),
        ({"ema": {"w": torch.ones(2, 2)}}, "optimizer state, RNG state and 1 other tensor"),
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


def test_a_difference_is_true_if_both_are_equal(tmp_path: Path) -> None:
    torch.save(with_counter(1), tmp_path / "a.pt")
    torch.save(with_counter(2), tmp_path / "b.pt")
    assert diff(tmp_path / "a.pt", tmp_path / "a.pt")
    assert not diff(tmp_path / "a.pt", tmp_path / "b.pt")
    paths = [str(tmp_path / name) for name in ("a.pt", "b.pt")]
    assert not drift(paths, DiffOptions())
