"""Infinities with which Lightning's callbacks begin are no finding; all others are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ckpttool import verify

INF = torch.tensor(torch.inf)


def lightning(**state: Any) -> dict[str, Any]:
    key = "ModelCheckpoint{'monitor': 'loss', 'mode': 'min'}"
    return {
        "state_dict": {"layer.weight": torch.eye(3)},
        "pytorch-lightning_version": "2.6.0",
        "callbacks": {key: {"best_model_score": torch.tensor(0.5), **state}},
    }


@pytest.mark.parametrize(
    ("content", "codes"),
    [
        (lightning(kth_value=INF), []),
        (lightning(kth_value=-INF), []),
        (lightning(kth_value=INF.half()), []),
        (lightning(kth_value=torch.tensor(0.25)), []),
        (lightning(kth_value=torch.tensor(torch.nan)), ["nan"]),
        (lightning(kth_value=INF.repeat(2)), ["infinity"]),
        (lightning(current_score=INF), ["infinity"]),
        ({"kth_value": INF}, ["infinity"]),
        ({"state_dict": {"kth_value": INF}}, ["infinity"]),
    ],
)
def test_start_values(content: dict[str, Any], codes: list[str], tmp_path: Path) -> None:
    torch.save(content, tmp_path / "a.ckpt")
    found = [one.code for one in verify(tmp_path / "a.ckpt").findings]
    assert [code for code in found if code in ("infinity", "nan")] == codes
