"""The lists in which exports of Keras hold all variables once more."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ckpttool import Checkpoint, Role
from ckpttool.weights.pairing.pair_up import pair_up
from tests.support.checkpoints import checkpoint, numbers, of_tensors, tensor
from tests.support.tensors import Array

ZEROS = np.zeros(3000, "<f4")
ALMOST = np.concatenate([ZEROS[:-2], [1, 0]]).astype("<f4")  # no sample has the element that differs
MODEL = {
    "m.a.kernel": numbers(40, 50),
    "m.a.bias": ZEROS,
    "m.b.kernel": numbers(40, 50) + 1,
    "m.b.bias": ALMOST,
}


def export(order: Sequence[int], **changed: Array) -> Checkpoint:
    """Return a model, and behind it a list of copies in some order."""
    model = MODEL | {name.replace("_", "."): array for name, array in changed.items()}
    copies = [list(MODEL.values())[at] for at in order]
    listed = [tensor(("_all_variables", str(at)), array, Role.OTHER) for at, array in enumerate(copies)]
    return of_tensors([*listed, *(tensor(name, array) for name, array in model.items())], "savedmodel")


def test_copies_pair_by_what_they_are_copies_of() -> None:
    found = pair_up(export([0, 1, 2, 3]), export([3, 2, 1, 0]))
    assert len(found.pairs) == 8
    for pair in found.pairs:
        assert np.array_equal(pair.a.tensor.array(), pair.b.tensor.array()), pair.a.name
    assert {pair.a.name: pair.b.name for pair in found.pairs if pair.a.name.startswith("_")} == {
        f"_all_variables.{at}": f"_all_variables.{3 - at}" for at in range(4)
    }


def test_copies_that_the_other_side_has_not_are_bookkeeping() -> None:
    weights = {name: array for name, array in MODEL.items() if name.endswith("bias")}
    for one in (checkpoint(weights), checkpoint(MODEL, "keras")):
        found = pair_up(export([1, 3]), one)
        assert [item.name for _, item in found.bookkeeping] == ["_all_variables.0", "_all_variables.1"]


def test_a_copy_of_what_is_not_compared_is_no_bookkeeping() -> None:
    other = np.concatenate([ZEROS[:-2], [2, 0]]).astype("<f4")
    one = export([0, 1, 2, 3], m_b_bias=other)
    found = pair_up(one, of_tensors([tensor(name, one[name].array()) for name in MODEL], "keras"))
    assert [item.name for item in found.removed] == ["_all_variables.3"]
    assert len(found.bookkeeping) == 3


def test_a_copy_in_another_format_is_no_bookkeeping() -> None:
    torch = of_tensors([*export([0]).tensors])
    found = pair_up(torch, of_tensors(list(torch.tensors[1:])))
    assert [item.name for item in found.removed] == ["_all_variables.0"] and found.bookkeeping == ()
