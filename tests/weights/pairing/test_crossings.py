"""Pairs that content makes across families, where names or the order say something else."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from ckpttool.weights.pairing.pair_up import Pairing, PairingOptions, pair_up
from tests.support.checkpoints import checkpoint, numbers
from tests.support.tensors import Array

CHANCE = np.random.default_rng(5)
QUERY, KEY, VALUE, OUT = (CHANCE.normal(size=(4, 4)).astype("<f4") for _ in range(4))


def paired(ours: Mapping[str, Array], theirs: Mapping[str, Array]) -> Pairing:
    layers = {name: "Dense" for name, array in theirs.items() if array.ndim == 2}
    return pair_up(checkpoint(ours), checkpoint(theirs, "keras", layers), PairingOptions())


def pairs_of(found: Pairing) -> dict[str, tuple[str, str]]:
    return {pair.a.sources[0].name: (pair.b.sources[0].name, pair.how) for pair in found.pairs}


# An attention's parts ---------------------------------------------------------------------------------

KERAS = {
    "mha.key_dense.kernel": KEY.T.reshape(4, 2, 2),
    "mha.output_dense.kernel": OUT.T.reshape(2, 2, 4),
    "mha.query_dense.kernel": QUERY.T.reshape(4, 2, 2),
    "mha.value_dense.kernel": VALUE.T.reshape(4, 2, 2),
}


@pytest.mark.parametrize(
    "words",
    ["q_proj k_proj v_proj out_proj", "wq wk wv wo", "query key value output", "to_q to_k to_v to_out"],
)
def test_parts_of_an_attention_pair_with_the_same_parts(words: str) -> None:
    query, key, value, out = (f"a.{word}.weight" for word in words.split())
    right = {query: QUERY, key: KEY, value: VALUE, out: OUT}
    places = ["query_dense", "key_dense", "value_dense", "output_dense"]
    expected = dict(zip(right, (f"mha.{place}.kernel" for place in places), strict=True))
    found = paired(right, KERAS)
    assert pairs_of(found) == {ours: (theirs, "content") for ours, theirs in expected.items()}
    assert found.crossed == ()
    swapped = paired({**right, query: KEY, key: QUERY}, KERAS)
    assert {ours: theirs for ours, (theirs, _) in pairs_of(swapped).items()} == expected
    first = swapped.pairs[0]
    assert first.how == "shape" and not np.array_equal(first.a.tensor.array(), first.b.tensor.array())


def test_layers_that_both_sides_call_alike_are_not_mixed() -> None:
    ours = {f"b.{word}_proj.weight": array for word, array in zip(("gate", "up"), (QUERY, KEY), strict=True)}
    theirs = {
        f"ffn_7.{word}_proj.kernel": array.T for word, array in zip(("gate", "up"), (KEY, QUERY), strict=True)
    }
    found = pairs_of(paired(ours, theirs))
    assert found == {
        f"b.{word}_proj.weight": (f"ffn_7.{word}_proj.kernel", "shape") for word in ("gate", "up")
    }


def test_words_that_one_side_alone_has_say_nothing() -> None:
    found = paired({"b.up.weight": QUERY, "b.down.weight": KEY}, {"x.kernel": QUERY.T, "y.kernel": KEY.T})
    assert pairs_of(found) == {
        "b.up.weight": ("x.kernel", "content"),
        "b.down.weight": ("y.kernel", "content"),
    }
    assert found.crossed == ()


# The order ----------------------------------------------------------------------------------------------


def test_equal_content_in_another_order_is_told() -> None:
    ours = {"fc1.weight": QUERY, "fc2.weight": KEY, "fc3.weight": VALUE}
    theirs = {"dense.kernel": KEY.T, "dense_1.kernel": QUERY.T, "dense_2.kernel": VALUE.T}
    found = paired(ours, theirs)
    assert {how for _, how in pairs_of(found).values()} == {"content"}
    assert found.crossed == (("fc1.weight", "dense_1.kernel"), ("fc2.weight", "dense.kernel"))
    assert found.notes == (
        "equal content in a different order: fc1.weight = dense_1.kernel, fc2.weight = dense.kernel",
    )


def test_numbers_are_the_order_of_a_file_that_has_the_alphabet_s() -> None:
    arrays = [CHANCE.normal(size=(3, 2)).astype("<f4") for _ in range(12)]
    ours = {f"layers.{at}.weight": array for at, array in enumerate(arrays)}
    theirs = {f"dense_{at}.kernel": array.T for at, array in enumerate(arrays)}
    found = paired(ours, {name: theirs[name] for name in sorted(theirs)})
    assert len(found.pairs) == 12 and found.crossed == ()


def test_what_holds_the_same_crosses_nothing() -> None:
    zeros = np.zeros(4, "<f4")
    ours = {f"layers.{at}.bias": zeros for at in range(12)}
    theirs = {name: zeros for name in sorted(f"dense_{at}.bias" for at in range(12))}
    found = paired(ours, theirs)
    assert len(found.pairs) == 12 and found.crossed == ()


def test_other_shapes_may_stand_elsewhere() -> None:
    ours = {"stem.weight": numbers(3, 2), "head.weight": numbers(2, 5)}
    found = paired(ours, {"a.kernel": numbers(2, 5).T, "b.kernel": numbers(3, 2).T})
    assert len(found.pairs) == 2 and found.crossed == ()


def test_within_a_family_every_rename_counts_and_none_is_crossed() -> None:
    ours, theirs = {"fc1.weight": QUERY, "fc2.weight": KEY}, {"a1.weight": KEY, "a2.weight": QUERY}
    found = pair_up(checkpoint(ours), checkpoint(theirs))
    assert {how for _, how in pairs_of(found).values()} == {"content"} and found.crossed == ()
