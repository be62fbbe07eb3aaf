"""The tree of a distributed checkpoint: what PyTorch itself makes of the directory."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from ckpttool import open_checkpoint
from ckpttool.formats.content.tree import opaque_nodes
from ckpttool.formats.torch.dcp import containers_of_paths
from tests.support.torch_trees import VALUES, differences, write_zip


@pytest.mark.framework
def test_pytorch_makes_the_same_of_it(tmp_path: Path) -> None:
    value: dict[str, Any] = {
        **VALUES["training"],
        "config": {"layers": [1, {"x": (1, 2)}], "size": torch.Size([3]), "dtype": torch.bfloat16},
        "empty": {"dict": {}, "list": [], "none": None},
        "list": [torch.ones(2), {"a": torch.zeros(1)}, 3],
        "bytes": b"\0\xff",
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(value, checkpoint_id=tmp_path / "a", no_dist=True)
        dcp_to_torch_save(tmp_path / "a", tmp_path / "expected.pth")
    with open_checkpoint(tmp_path / "a") as saved:
        assert list(opaque_nodes(saved.tree)) == []
        write_zip(saved.tree, tmp_path / "b.pth")
    expected = torch.load(tmp_path / "expected.pth", weights_only=False)
    assert differences(expected, torch.load(tmp_path / "b.pth", weights_only=False)) == []


def test_paths_make_dictionaries_and_lists() -> None:
    placed = [(("a", 1), "y"), (("a", 0), "x"), (("b", 1), "z"), (("c", "d", 0, "e"), 1), (("f",), {})]
    assert containers_of_paths(placed) == {"a": ["x", "y"], "b": {1: "z"}, "c": {"d": [{"e": 1}]}, "f": {}}


def test_a_path_through_the_end_of_another_makes_none() -> None:
    assert containers_of_paths([(("a",), 1), (("a", "b"), 2)]) is None
    assert containers_of_paths([(("a", "b"), 2), (("a",), 1)]) is None


def test_long_paths_do_not_recurse() -> None:
    assert containers_of_paths([(("a",) * 1500, 1)]) is not None
