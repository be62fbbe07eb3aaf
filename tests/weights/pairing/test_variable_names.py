"""Layers that have a number in the path to them, and a name that their variables were given."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ckpttool import Checkpoint, open_checkpoint
from ckpttool.weights.pairing.pair_up import Pairing, PairingOptions, pair_up
from tests.support.checkpoints import checkpoint, numbers

FILES = Path(__file__).parents[3] / "fixtures" / "files"
PATHS = {
    ("model", "_functional", "_operations", "1", "_kernel"): numbers(4, 4),
    ("model", "_functional", "_operations", "1", "bias"): numbers(4),
    ("model", "_functional", "_operations", "4", "_kernel"): numbers(4, 4) + 1,
    ("model", "_functional", "_operations", "4", "bias"): numbers(4) + 1,
}
OWN = ["m/d1/kernel", "m/d1/bias", "m/d2/kernel", "m/d2/bias"]
TORCH = {
    "d1.weight": numbers(4, 4).T,
    "d1.bias": numbers(4),
    "d2.weight": numbers(4, 4).T + 1,
    "d2.bias": numbers(4) + 1,
}


def tensorflow(own: list[str]) -> Checkpoint:
    made = checkpoint(PATHS, "tensorflow")
    names = dict(zip((tensor.name for tensor in made.tensors), own, strict=True))
    return Checkpoint(
        path=made.path,
        format=made.format,
        variant=None,
        tensors=made.tensors,
        files=(),
        spans=made.spans,
        own_names=lambda: names,
    )


def pairs_of(found: Pairing) -> Mapping[str, tuple[str, str]]:
    pairs = [*found.pairs, *found.undecided]  # nothing says what stands before a kernel
    return {pair.a.sources[0].name: (pair.b.sources[0].name, pair.how) for pair in pairs}


def test_numbered_layers_pair_by_their_own_names() -> None:
    for ours in (TORCH, dict(reversed(TORCH.items()))):
        found = pair_up(checkpoint(ours), tensorflow(OWN))
        assert pairs_of(found) == {
            "d1.weight": ("model._functional._operations.1._kernel", "convention"),
            "d1.bias": ("model._functional._operations.1.bias", "convention"),
            "d2.weight": ("model._functional._operations.4._kernel", "convention"),
            "d2.bias": ("model._functional._operations.4.bias", "convention"),
        }
        assert found.notes[0] == "numbered layers taken by the names of their variables (4 tensors)"
        assert all(np.array_equal(pair.a.tensor.array(), pair.b.tensor.array()) for pair in found.pairs)


def test_names_count_more_than_content() -> None:
    swapped = dict(zip(TORCH, [*list(TORCH.values())[2:], *list(TORCH.values())[:2]], strict=True))
    found = pair_up(checkpoint(swapped), tensorflow(OWN))
    assert pairs_of(found)["d1.weight"] == ("model._functional._operations.1._kernel", "convention")


def test_a_name_that_two_layers_have_is_none() -> None:
    for own in (["dense/kernel", "dense/bias"] * 2, ["m/d1/kernel", "m/d3/bias", "m/d2/kernel", "m/d4/bias"]):
        found = pair_up(checkpoint(TORCH), tensorflow(own), PairingOptions(rename=False))
        assert found.pairs == ()


def test_a_checkpoint_of_tensorflow_says_what_its_variables_are_called() -> None:
    torch = {
        "out.weight": numbers(2, 3),
        "out.bias": numbers(2),
        "hidden.weight": numbers(3, 4),
        "hidden.bias": numbers(3),
    }
    with open_checkpoint(
        FILES / "tensorflow" / "keras3" / "ckpt-1"
    ) as one:  # fixtures/make.py names the layers
        found = pair_up(checkpoint(torch), one, PairingOptions(only="weights", rename=False))
        assert pairs_of(found) == {
            "out.weight": ("model._functional._operations.2._kernel", "convention"),
            "out.bias": ("model._functional._operations.2.bias", "convention"),
            "hidden.weight": ("model._functional._operations.1._kernel", "convention"),
            "hidden.bias": ("model._functional._operations.1.bias", "convention"),
        }
