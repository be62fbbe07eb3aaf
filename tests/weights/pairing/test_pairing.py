"""Pairing: by name, by convention, by content, by shape, and what is not paired."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool import Checkpoint, Role, Truncated, open_checkpoint
from ckpttool.core.layers import DoubtReason, LayerKind, LayoutDoubt
from ckpttool.core.tensor import Extent, Path, Values
from ckpttool.weights.pairing.map_file import TensorMap
from ckpttool.weights.pairing.pair_up import Pairing, PairingOptions, pair_up
from tests.support.checkpoints import Sequential, checkpoint, numbers, of_tensors, tensor
from tests.support.tensors import Array
from tests.support.twins import FIXTURES

Arrays = Mapping[Any, Array]


def paired(a: Checkpoint | Arrays, b: Checkpoint | Arrays, **options: Any) -> Pairing:
    ours, theirs = (one if isinstance(one, Checkpoint) else checkpoint(one) for one in (a, b))
    return pair_up(ours, theirs, PairingOptions(**options))


def names(found: Pairing) -> dict[str, tuple[str, str]]:
    """Return for each name of the first side the one of the second, and what told it."""
    return {pair.a.sources[0].name: (pair.b.sources[0].name, pair.how) for pair in found.pairs}


def require(found: Pairing, how: str, pairs: Mapping[str, str]) -> None:
    """Require these pairs, and that nothing else is left."""
    assert names(found) == {ours: (theirs, how) for ours, theirs in pairs.items()}
    assert (found.removed, found.added, found.bookkeeping) == ((), (), ())


def left(items: Iterable[Any]) -> list[str]:
    return [item.name for item in items]


MODEL = {
    "conv.weight": numbers(4, 2, 3, 3),
    "conv.bias": numbers(4),
    "head.weight": numbers(4, 4, start=90),
    "head.bias": numbers(4, start=50),
}


def under(prefix: str, model: Arrays = MODEL) -> dict[str, Array]:
    return {prefix + name: array for name, array in model.items()}


# Names ------------------------------------------------------------------------------------------------


def test_equal_names_are_one_tensor_whatever_they_hold() -> None:
    other = {name: -array[:1] for name, array in reversed(MODEL.items())}
    found = paired(MODEL, other)
    require(found, "name", {name: name for name in MODEL})
    assert [pair.a.name for pair in found.pairs] == list(MODEL)
    assert found.notes == ()


def test_what_only_one_side_has() -> None:
    found = paired({**MODEL, "old.weight": numbers(9)}, {**MODEL, "new.scale": numbers(8)})
    assert (left(found.removed), left(found.added)) == (["old.weight"], ["new.scale"])


def test_roles_pair_with_roles() -> None:
    arrays = {"fc.weight": numbers(4)}
    found = paired(checkpoint(arrays), checkpoint(arrays, fc="optimizer"))
    assert found.pairs == () and (left(found.removed), left(found.added)) == (["fc.weight"], ["fc.weight"])
    # Who serves nobody knows what, pairs with any by its name.
    require(paired(checkpoint(arrays), checkpoint(arrays, fc="other")), "name", {"fc.weight": "fc.weight"})


def test_two_tensors_of_one_name_pair_by_their_keys() -> None:
    twice = [tensor(("a", "b.c"), numbers(2)), tensor(("a.b", "c"), numbers(3))]
    for other in (twice, twice[::-1]):
        found = pair_up(of_tensors(twice), of_tensors(other))
        assert [pair.b.tensor.path for pair in found.pairs] == [("a", "b.c"), ("a.b", "c")]
    one = pair_up(of_tensors(twice), of_tensors(twice[1:]))
    assert [pair.a.tensor.path for pair in one.pairs] == [("a.b", "c")]
    assert [item.tensor.path for item in one.removed] == [("a", "b.c")]


def test_two_tensors_of_one_name_and_other_keys_pair_in_their_order() -> None:
    ours = [tensor(("a", "b.c"), numbers(2)), tensor(("a.b", "c"), numbers(3))]
    theirs = [tensor(("a.b.c",), numbers(2)), tensor(("a", "b", "c"), numbers(3))]
    found = pair_up(of_tensors(ours), of_tensors(theirs))
    assert [pair.b.tensor.shape for pair in found.pairs] == [(2,), (3,)]


def test_the_name_of_another_tensor_is_no_second_name() -> None:
    for roles in [(Role.WEIGHTS, Role.WEIGHTS), (Role.OTHER, Role.WEIGHTS)]:
        ours = [tensor(("0",), numbers(4), roles[0]), tensor((0,), numbers(4) + 1, roles[1])]
        found = pair_up(of_tensors(ours), of_tensors(ours[:1]))
        assert [item.tensor.path for item in found.removed] == [(0,)] and found.notes == (), roles
        mapped = PairingOptions(mapping=TensorMap("map.toml", {"x": "y"}))
        more = [tensor("x", numbers(9)), *ours], [tensor("y", numbers(9)), tensor("0", numbers(4))]
        found = pair_up(*map(of_tensors, more), mapped)
        assert [item.tensor.path for item in found.removed] == [(0,)], roles


def test_empty_checkpoints() -> None:
    assert paired({}, {}) == Pairing(())
    assert left(paired({}, MODEL).added) == list(MODEL)


# Conventions ------------------------------------------------------------------------------------------


def test_a_wrapper_in_front_is_left_out_and_said() -> None:
    prefixes = ["module.", "model.", "_orig_mod.", "_model.", "module._orig_mod.", "net."]
    for prefix in prefixes:
        for is_first in [False, True]:
            a, b = (under(prefix), MODEL) if is_first else (MODEL, under(prefix))
            found = paired(a, b)
            require(found, "convention", dict(zip(a, b, strict=True)))
            (note,) = found.notes
            assert re.fullmatch(
                rf"ignored the prefix '.+' in {'A' if is_first else 'B'} \(4 tensors\)", note
            ), prefix
            assert all(step in note for step in prefix.split(".")), prefix


def test_wrappers_of_both_sides_and_the_keys_of_state_dicts() -> None:
    inside = {("model_state_dict", name): array for name, array in MODEL.items()}
    found = paired(inside, {("state_dict", f"module.{name}"): array for name, array in MODEL.items()})
    assert {how for _, how in names(found).values()} == {"convention"}
    (note,) = found.notes
    assert note == "ignored the prefix 'model_state_dict.' in A and 'state_dict.module.' in B (4 tensors)"


def test_a_wrapper_inside_is_left_out() -> None:
    found = paired({"a.0.weight": numbers(3)}, {"a.0._orig_mod.weight": numbers(3, start=7)})
    require(found, "convention", {"a.0.weight": "a.0._orig_mod.weight"})
    assert found.notes == ("ignored the prefix '_orig_mod.' in B (1 tensor)",)


def test_more_prefixes_than_are_shown_are_counted() -> None:
    ours = {f"{at}.fc.weight": numbers(2) + at for at in range(6)}
    theirs = {f"{'model.' * (at + 1)}{at}.fc.weight": numbers(2) - at for at in range(6)}
    notes = paired(ours, theirs).notes
    assert notes[0] == "ignored the prefix 'model.' in B (1 tensor)"
    assert notes[3:] == ("ignored other prefixes (3 tensors)",)


def test_one_more_module_around_all_is_left_out() -> None:
    found = paired(MODEL, {name: array + 1 for name, array in under("backbone.").items()})
    require(found, "convention", dict(zip(MODEL, under("backbone."), strict=True)))
    assert found.notes == ("ignored the prefix 'backbone.' in B (4 tensors)",)


def test_as_few_modules_as_do_are_left_out() -> None:
    for flipped in [False, True]:
        inside = {"l.weight": numbers(2, 2), "l.bias": numbers(2)}
        sides = inside, {f"student.{name}": array + 1 for name, array in inside.items()}
        found = paired(*(sides[::-1] if flipped else sides))
        assert {how for _, how in names(found).values()} == {"convention"} and len(found.pairs) == 2, flipped
        assert found.notes == (f"ignored the prefix 'student.' in {'A' if flipped else 'B'} (2 tensors)",), (
            flipped
        )


def test_one_more_module_around_one_tensor_is_no_prefix() -> None:
    found = paired({"weight": numbers(3)}, {"fc.weight": numbers(3) + 1})
    require(found, "shape", {"weight": "fc.weight"})


def test_what_a_convention_cannot_tell_apart_it_does_not_pair() -> None:
    two = {"model.fc.weight": numbers(3), "module.fc.weight": numbers(3, start=5)}
    found = paired(two, {"net.fc.weight": numbers(3, start=9)}, rename=False)
    assert found.pairs == ()
    assert (left(found.removed), left(found.added)) == (list(two), ["net.fc.weight"])
    assert found.notes == (
        "model.fc.weight and module.fc.weight of A and net.fc.weight of B "
        "can't be distinguished by name, so none is paired by it",
    )


def test_an_exact_name_comes_before_a_convention() -> None:
    two = {"fc.weight": numbers(3), "module.fc.weight": numbers(3, start=5)}
    found = paired(two, {"fc.weight": numbers(3, start=5)})
    assert names(found) == {"fc.weight": ("fc.weight", "name")}
    assert left(found.removed) == ["module.fc.weight"]


def test_words_of_frameworks() -> None:
    ours = {"ln.gamma": numbers(3), "ln.beta": numbers(3)}
    found = paired(ours, {"ln.weight": numbers(3), "ln.bias": numbers(3)})
    require(found, "convention", {"ln.gamma": "ln.weight", "ln.beta": "ln.bias"})
    assert {pair.a.rule for pair in found.pairs} == {"gamma, beta = norm weight, bias"}


def test_optimizers_under_other_keys() -> None:
    state = {("state", at, "exp_avg"): numbers(3, start=at) for at in range(2)}
    a = checkpoint(
        {("optimizer_state_dict", *path): array for path, array in state.items()}, optimizer="optimizer"
    )
    b = checkpoint({("optim", *path): array + 1 for path, array in state.items()}, optim="optimizer")
    found = pair_up(a, b)
    assert {how for _, how in names(found).values()} == {"convention"}
    assert found.notes == ("ignored the prefix 'optimizer_state_dict.' in A and 'optim.' in B (2 tensors)",)


def test_keras_numbers_its_optimizer_in_the_order_of_its_names() -> None:
    held = [numbers(1).reshape(()), *(np.zeros(3, "<f4") for _ in range(11))]
    named = {("optimizer", "adam", f"x{at:02}"): array for at, array in enumerate(held)}
    numbered = {("optimizer", "vars", str(at)): array for at, array in enumerate(held)}
    a, b = (checkpoint(one, "keras", optimizer="optimizer") for one in (named, numbered))
    found = pair_up(a, b)
    assert names(found) == {
        f"optimizer.adam.x{at:02}": (f"optimizer.vars.{at}", "convention") for at in range(12)
    }
    assert found.notes == ("numbers of an optimizer's variables read as Keras's order (12 tensors)",)
    fewer = checkpoint(dict(list(named.items())[1:]), "keras", optimizer="optimizer")
    assert "convention" not in {pair.how for pair in pair_up(fewer, b).pairs}


def test_tensorflow_says_where_in_keras_s_order_an_optimizer_s_variable_is() -> None:
    held = [numbers(1).reshape(()), *(numbers(3) + at for at in range(1, 13))]
    kinds = [("_iterations",), *((("_momentums", "_velocities")[at % 2], str(at // 2)) for at in range(12))]
    keys = ["_iterations", *(f"_variables/{at}" for at in range(1, 13))]
    numbered = checkpoint(
        {("optimizer", "vars", str(at)): array - 7 for at, array in enumerate(held)},
        "keras",
        optimizer="optimizer",
    )
    slots = [
        tensor(("optimizer", *kind), array, Role.OPTIMIZER, key=f"optimizer/{key}/.ATTRIBUTES/VARIABLE_VALUE")
        for kind, key, array in zip(kinds, keys, held, strict=True)
    ]
    found = pair_up(of_tensors(sorted(slots, key=lambda one: one.name), "tensorflow"), numbered)
    assert {pair.how for pair in found.pairs} == {"convention"} and len(found.pairs) == 13
    for pair in found.pairs:
        assert np.array_equal(pair.a.tensor.array(), pair.b.tensor.array() + 7), pair.a.name
    assert found.notes == ("numbers of an optimizer's variables read as Keras's order (13 tensors)",)


def test_a_number_without_a_name_pairs_by_its_shape_alone() -> None:
    found = paired({"e.weight": numbers(7, 2)}, checkpoint({"e.vars.0": numbers(7, 2) + 1}, "keras"))
    require(found, "shape", {"e.weight": "e.vars.0"})


# Across families ----------------------------------------------------------------------------------------


def test_a_known_rule_counts_more_than_an_equal_name() -> None:
    square = numbers(4, 4)
    paddle = checkpoint({"fc.weight": square, "fc.bias": numbers(4)}, "paddle")
    found = paired({"fc.weight": square.T.copy(), "fc.bias": numbers(4)}, paddle)
    require(found, "name", {"fc.weight": "fc.weight", "fc.bias": "fc.bias"})
    (weight, _) = found.pairs
    assert np.array_equal(weight.a.tensor.array(), weight.b.tensor.array())
    assert weight.b.rule is not None and weight.a.rule is None
    as_is = paired({"fc.weight": square.T.copy(), "fc.bias": numbers(4)}, paddle, layout="as-is")
    assert all(pair.b.rule is None and pair.b.tensor in paddle.tensors for pair in as_is.pairs)


def test_within_a_family_tensors_are_compared_as_stored() -> None:
    one = checkpoint({"fc.kernel": numbers(2, 3), "fc.bias": numbers(3)}, "keras")
    numbered = checkpoint({"fc.0": numbers(2, 3), "fc.1": numbers(3)}, "keras")
    for other, how in ((one, "name"), (numbered, "convention")):
        found = paired(one, other)
        assert {pair.how for pair in found.pairs} == {how}
        assert all(
            pair.a.tensor.shape == pair.a.sources[0].shape and pair.a.rule is None for pair in found.pairs
        )


def test_what_is_flattened_does_not_count_within_a_family() -> None:
    cases = [
        None,
        "Dense",
        LayerKind("Dense", flattened=()),
        LayerKind("Dense", flattened=(2, 4, 3)),
        LayerKind("Dense", doubt=DoubtReason(LayoutDoubt.INPUT_ORDER, "a")),
    ]
    for known in cases:
        kernel = numbers(24, 5)
        one = checkpoint({"f.kernel": kernel}, "keras", {"f.kernel": LayerKind("Dense", flattened=(3, 4, 2))})
        other = checkpoint({"f.0": kernel}, "keras", {} if known is None else {"f.0": known})
        for found in (paired(one, other), paired(other, one)):
            (pair,) = found.pairs
            assert {item.tensor.shape for item in (pair.a, pair.b)} == {(24, 5)}, known
            assert np.array_equal(pair.a.tensor.array(), pair.b.tensor.array()), known


def test_keras_s_own_words_in_a_plain_container_are_compared_as_stored() -> None:
    kernel = numbers(24, 5)
    whole = checkpoint({"f.kernel": kernel}, "keras", {"f.kernel": LayerKind("Dense", flattened=(3, 4, 2))})
    found = paired(whole, {"model/f/kernel:0": kernel})
    (pair,) = found.pairs
    assert found.undecided == () and pair.a.tensor.shape == pair.b.tensor.shape == (24, 5)


def test_a_kernel_in_an_order_that_nothing_says_is_undecided() -> None:
    cases = [
        (None, "which isn't recorded"),
        (LayerKind("Dense", doubt=DoubtReason(LayoutDoubt.UNWIRED)), "which isn't recorded"),
        (LayerKind("Dense", flattened=()), "of unknown shape"),
        (
            LayerKind("Dense", doubt=DoubtReason(LayoutDoubt.OUTPUT_ORDER, "a Reshape")),
            "a Reshape uses its output",
        ),
    ]
    for kind, why in cases:
        kernel = numbers(24, 5)
        layers = {} if kind is None else {"f.kernel": kind}
        keras = checkpoint({"f.kernel": kernel, "f.bias": numbers(5)}, "keras", layers)
        torch = checkpoint({"f.weight": kernel.T.copy(), "f.bias": numbers(5)})
        for found in (paired(keras, torch), paired(torch, keras)):
            (pair,) = found.undecided
            assert pair.doubt is not None and why in pair.doubt.text, kind
            assert [pair.a.sources[0].name for pair in found.pairs] == ["f.bias"], kind
        other = paired(checkpoint({"f.weight": numbers(6, 24)}), keras, rename=False)
        assert [(pair.a.tensor.shape, pair.b.tensor.shape) for pair in other.pairs] == [((6, 24), (5, 24))], (
            kind
        )
        assert paired(keras, torch, layout="as-is").undecided == (), kind


def test_matrices_of_unknown_layers_are_named() -> None:
    found = paired({"q.weight": numbers(4, 3)}, checkpoint({"q.w_0": numbers(4, 3) + 1}, "paddle"))
    assert "compared as stored, since their layers' types are unknown: q.w_0" in found.notes
    known = checkpoint({"q.w_0": numbers(4, 4)}, "paddle", {"q.w_0": "embedding"})
    assert paired({"q.weight": numbers(4, 4) + 1}, known).notes == ("weight = w_0 (1 tensor)",)


def test_what_may_lie_transposed_is_not_decided() -> None:
    for shape in [(4, 4), (3, 2, 3), (3, 3, 3, 3), (2, 2, 2, 2, 2)]:
        for flipped in [False, True]:
            for name in ["q.weight", "other.weight"]:
                sides = checkpoint({name: numbers(*shape)}), checkpoint({"q.w_0": numbers(*shape)}, "paddle")
                found = paired(*(sides[::-1] if flipped else sides))
                (pair,) = found.undecided
                assert {pair.a.sources[0].name, pair.b.sources[0].name} == {name, "q.w_0"}, (shape, name)
                assert (found.pairs, found.removed, found.added) == ((), (), ()), (shape, name)
                as_is = paired(*sides, layout="as-is")
                assert len(as_is.pairs) == 1 and as_is.undecided == (), (shape, name)
                mapped = paired(*sides, mapping=TensorMap("map.toml", {name: "q.w_0"}))
                assert len(mapped.pairs) == 1 and mapped.undecided == (), (shape, name)


def test_what_has_another_shape_or_the_same_elements_transposed_is_compared() -> None:
    for shape in [(4,), (1, 1), (4, 3), (3, 3, 2, 2), (3, 2, 2, 3)]:
        found = paired({"q.weight": numbers(*shape)}, checkpoint({"q.w_0": numbers(*shape)}, "paddle"))
        assert len(found.pairs) == 1 and found.undecided == (), shape


def test_bookkeeping_without_a_twin() -> None:
    ours = {**MODEL, "bn.num_batches_tracked": numbers(1, dtype="<i8").reshape(())}
    found = paired(ours, MODEL)
    assert found.removed == () and [(side, item.name) for side, item in found.bookkeeping] == [
        ("a", "bn.num_batches_tracked")
    ]
    assert paired(ours, ours).bookkeeping == ()
    counted = {**MODEL, "optimizer._iterations": numbers(1).reshape(())}
    for family, books in (("torch", 0), ("keras", 1)):
        found = paired(MODEL, checkpoint(counted, family, optimizer="optimizer"))
        assert (len(found.bookkeeping), len(found.added)) == (books, 1 - books)


SCALAR = numbers(1, dtype="<i8").reshape(())
SEED = ("d", "seed_generator", "seed_generator_state")


@pytest.mark.parametrize(
    ("path", "array", "format"),
    [
        (("bn.num_batches_tracked",), SCALAR, "safetensors"),
        (("save_counter",), SCALAR, "tensorflow"),
        (("save_counter",), SCALAR, "savedmodel"),
        (SEED, numbers(2, dtype="<i8"), "savedmodel"),
        (SEED, numbers(2, dtype="<u4"), "keras"),
        (("d", "seed_generator_3", "0"), numbers(2, dtype="<u4"), "keras-h5"),
    ],
)
def test_bookkeeping_is_what_its_framework_writes(path: Path, array: Array, format: str) -> None:
    def others(array: Array, format: str) -> tuple[int, int]:
        own = of_tensors([tensor("w", numbers(3)), tensor(path, array, Role.OTHER)], format)
        found = paired({"w": numbers(3)}, own, rename=False)
        return len(found.bookkeeping), len(found.added)

    assert others(array, format) == (1, 0)
    assert others(array.astype("<f4"), format) == (0, 1)
    assert others(np.concatenate([array.reshape(-1)] * 9), format) == (0, 1)
    foreign = "keras" if format == "safetensors" else "pytorch"
    assert others(array, foreign) == (0, 1)


def test_a_tensor_that_is_only_called_like_bookkeeping_is_none() -> None:
    named = ["seed_generator_net.weight", "keras_api.w", "_all_variables.w", "num_batches_tracked"]
    for family in ("pytorch", "savedmodel"):
        found = paired(
            {"w": numbers(3)}, checkpoint({"w": numbers(3), **dict.fromkeys(named, numbers(4, 4))}, family)
        )
        assert found.bookkeeping == () and left(found.added) == named


# Renames ------------------------------------------------------------------------------------------------


def test_equal_content_is_a_rename() -> None:
    renamed = {name.replace("head", "classifier"): array for name, array in MODEL.items()}
    found = paired(MODEL, renamed)
    assert names(found)["head.weight"] == ("classifier.weight", "content")
    assert names(found)["head.bias"] == ("classifier.bias", "content")
    without = paired(MODEL, renamed, rename=False)
    assert left(without.removed) == ["head.weight", "head.bias"]
    assert left(without.added) == ["classifier.weight", "classifier.bias"]


def test_content_finds_its_twin_whatever_the_order() -> None:
    chance = np.random.default_rng(1)
    arrays = [chance.normal(size=(40, 30)).astype("<f4") for _ in range(9)]
    ours = {f"a{at}.weight": array for at, array in enumerate(arrays)}
    theirs = {f"z{8 - at}.weight": array for at, array in reversed(list(enumerate(arrays)))}
    require(paired(ours, theirs), "content", {f"a{at}.weight": f"z{8 - at}.weight" for at in range(9)})


def test_content_is_told_by_all_elements_where_samples_are_equal() -> None:
    ours = np.zeros((3, 5000), "<f4")
    ours[1, 77], ours[2, 4001] = 1, 2
    mixed = {"x.weight": ours[2], "y.weight": ours[0], "z.weight": ours[1]}
    found = paired({f"{name}.weight": row for name, row in zip("abc", ours, strict=True)}, mixed)
    require(found, "content", {"a.weight": "y.weight", "b.weight": "z.weight", "c.weight": "x.weight"})


def test_equal_zeros_pair_by_their_layer_and_then_in_order() -> None:
    zeros = np.zeros(4, "<f4")
    ours = {"a.weight": numbers(2, 2), "a.bias": zeros, "b.weight": numbers(2, 2) + 1, "b.bias": zeros}
    theirs = {"y.bias": zeros, "y.weight": numbers(2, 2) + 1, "x.bias": zeros, "x.weight": numbers(2, 2)}
    found = names(paired(ours, theirs))
    assert {name: other for name, (other, _) in found.items()} == {
        "a.weight": "x.weight",
        "a.bias": "x.bias",
        "b.weight": "y.weight",
        "b.bias": "y.bias",
    }
    in_order = names(paired({"a.bias": zeros, "b.bias": zeros}, {"x.bias": zeros, "y.bias": zeros}))
    assert in_order == {"a.bias": ("x.bias", "content"), "b.bias": ("y.bias", "content")}


def test_content_of_another_type_or_layout_does_not_pair_but_shape_does() -> None:
    found = paired({"a.weight": numbers(3, 2)}, {"b.weight": numbers(3, 2, dtype="<f8")})
    require(found, "shape", {"a.weight": "b.weight"})
    assert paired({"a.weight": numbers(3, 2)}, {"b.weight": numbers(2, 3)}).pairs == ()
    assert paired({"a.weight": numbers(3)}, {"b.bias": numbers(3) + 1}).pairs == ()


def test_content_is_found_through_a_layout() -> None:
    kernel = numbers(30, 70)
    for values in (lambda one: one, Sequential):
        one = tensor("dense_3.kernel", kernel)
        assert one.values is not None
        known = {"dense_3.kernel": "Dense"}
        keras = of_tensors([replace(one, values=values(one.values))], "keras", known)
        found = paired({"body.fc.weight": kernel.T.copy()}, keras)
        require(found, "content", {"body.fc.weight": "dense_3.kernel"})


def test_shape_and_position_pair_where_there_are_as_many() -> None:
    ours = {f"a.{at}.weight": numbers(2, 3) + at for at in range(12)}
    theirs = {f"b.{at}.weight": numbers(2, 3) - 1 - at for at in range(12)}
    require(paired(ours, theirs), "shape", {f"a.{at}.weight": f"b.{at}.weight" for at in range(12)})
    fewer = dict(list(theirs.items())[1:])
    assert paired(ours, fewer).pairs == ()


def test_numbers_count_where_a_file_is_in_the_order_of_the_alphabet() -> None:
    ours = {f"a.{at}.weight": numbers(2, 3) + at for at in range(12)}
    theirs = {f"b.{at}.weight": numbers(2, 3) - 1 - at for at in range(12)}
    sorted_ones = {name: theirs[name] for name in sorted(theirs)}
    require(paired(ours, sorted_ones), "shape", {f"a.{at}.weight": f"b.{at}.weight" for at in range(12)})


def test_what_cannot_be_read_tells_nothing_and_is_left_to_the_comparison() -> None:
    class Broken(Sequential):
        def blocks(self, limit: int) -> Iterator[memoryview]:
            raise Truncated("x", "the file ends")

        def once(self) -> Values:
            return self

    one = tensor("a.weight", numbers(3000))
    assert one.values is not None
    broken = of_tensors([replace(one, values=Broken(one.values))])
    require(paired(broken, {"b.weight": numbers(3000)}), "shape", {"a.weight": "b.weight"})


def test_a_reordered_optimizer_is_not_mixed_with_weights() -> None:
    ours = checkpoint({"fc.weight": numbers(3), "optimizer.m": numbers(3) + 1}, optimizer="optimizer")
    theirs = checkpoint({"linear.weight": numbers(3) + 1, "optimizer.n": numbers(3)}, optimizer="optimizer")
    assert names(pair_up(ours, theirs)) == {"fc.weight": ("linear.weight", "shape")}


# Ties, and what is asked for ----------------------------------------------------------------------------


def test_a_tie_that_one_side_dropped_is_not_removed() -> None:
    for kept in ["embed.weight", "head.weight"]:
        array = numbers(5, 2)
        tied = of_tensors(
            [tensor("embed.weight", array), tensor("head.weight", array, shares_with="embed.weight")]
        )
        dropped = ({"embed.weight", "head.weight"} - {kept}).pop()
        found = paired(tied, {kept: array})
        require(found, "name", {kept: kept})
        assert found.notes == (f"ignored second names in A: {dropped} is {kept}",), kept
        assert paired({kept: array}, tied).notes == (f"ignored second names in B: {dropped} is {kept}",), kept
        assert len(paired(tied, {"head.weight": array, "embed.weight": array}).pairs) == 2, kept


def test_a_tie_to_a_name_that_several_tensors_have_is_to_the_one_with_its_bytes() -> None:
    array, place = numbers(5, 2), [Extent("x", at, 40) for at in (0, 40)]
    tied = [
        tensor(("a.b",), array, storage=place[0]),
        tensor(("a", "b"), array + 1, storage=place[1]),
        tensor("c", array + 1, shares_with="a.b", storage=place[1]),
    ]
    found = pair_up(of_tensors(tied), of_tensors(tied[:2]))
    assert found.removed == () and found.notes == ("ignored second names in A: c is a.b",)
    only = pair_up(of_tensors(tied), of_tensors(tied[:1]), PairingOptions(rename=False))
    assert [item.tensor.path for item in only.removed] == [("a", "b"), ("c",)]
    apart = [tied[0], tied[1], replace(tied[2], storage=None)]
    assert left(pair_up(of_tensors(apart), of_tensors(tied[:2])).removed) == ["c"]


def test_a_second_name_that_holds_something_else_is_not_left_out() -> None:
    ours = {"l.weight_ih_l0": numbers(4, 2)}
    twice = {**ours, "l.0.cell.weight_ih": numbers(4, 2)}
    assert paired(ours, checkpoint(twice, "paddle"), rename=False).added == ()
    other = {**ours, "l.0.cell.weight_ih": numbers(4, 2) + 1}
    assert left(paired(ours, checkpoint(other, "paddle"), rename=False).added) == ["l.0.cell.weight_ih"]


def test_what_is_no_weight_is_left_out_and_said() -> None:
    state = {"w": numbers(3), **{f"optimizer.{at}": numbers(2) for at in range(2)}}
    more = {f"ema.{at}": numbers(5) for at in range(5)}
    own = checkpoint({**state, **more}, optimizer="optimizer", ema="other")
    found = paired(own, checkpoint(state, optimizer="optimizer"), only="weights")
    assert found.notes == (
        "skipped 2 optimizer tensors and 5 other tensors (ema.0, ema.1, ema.2 and 2 more) in A",
        "skipped 2 optimizer tensors in B",
    )
    assert paired({"w": numbers(3)}, {"w": numbers(3)}, only="weights").notes == ()


def test_weights_alone_under_the_names_of_a_model() -> None:
    with open_checkpoint(FIXTURES / "epoch_3.pth") as a, open_checkpoint(FIXTURES / "epoch_4.pth") as b:
        found = pair_up(a, b, PairingOptions(only="weights"))
        assert [pair.a.name for pair in found.pairs] == ["0.weight", "0.bias", "2.weight", "2.bias"]
        assert {pair.a.tensor.role for pair in found.pairs} == {Role.WEIGHTS}
    mixed = {("generator", "fc.weight"): numbers(2), ("critic", "fc.weight"): numbers(3)}
    found = paired(mixed, mixed, only="weights")
    assert [pair.a.name for pair in found.pairs] == ["generator.fc.weight", "critic.fc.weight"]


def test_what_is_ignored_is_left_out_on_both_sides_and_said() -> None:
    found = paired(MODEL, {**MODEL, "head.extra": numbers(2)}, ignore=("head.*",))
    assert [pair.a.name for pair in found.pairs] == ["conv.weight", "conv.bias"]
    assert (found.removed, found.added) == ((), ())
    assert found.notes == ("2 of 4 tensors of A ignored", "3 of 5 tensors of B ignored")


def test_globs_that_match_nothing_are_told() -> None:
    found = paired(MODEL, {**MODEL, "more": numbers(2)}, ignore=("head.*", "more", "haed.*", "epoch"))
    assert found.unmatched == ("haed.*", "epoch")
    inside = {("model", name): array for name, array in MODEL.items()}
    assert paired(inside, MODEL, only="weights", ignore=("head.*", "model.conv.*")).unmatched == ()


def test_digits_of_any_length_in_names() -> None:
    longest = "9" * 5000
    ours = {f"a.{number}.weight": numbers(2, 3) for number in ("10", "2", longest)}
    theirs = {f"b.{number}.weight": numbers(2, 3) + 1 for number in ("1", "3", "4" * 4999)}
    expected = {"a.10.weight": "b.3.weight", "a.2.weight": "b.1.weight"}
    found = names(paired(ours, theirs))
    assert {name: found[name][0] for name in expected} == expected
    assert found[f"a.{longest}.weight"] == (f"b.{'4' * 4999}.weight", "shape")


# Properties ---------------------------------------------------------------------------------------------

WORDS = ["", "/", ":0", "module", "model", "net", "_orig_mod", "fc", "0", "1"]
WORDS += ["weight", "bias", "kernel", "gamma"]
NAMES = st.lists(
    st.lists(st.sampled_from(WORDS), min_size=1, max_size=4).map(".".join), max_size=9, unique=True
)
SIZES = st.integers(1, 3)


@st.composite
def sides(draw: st.DrawFn) -> Checkpoint:
    arrays = {name: numbers(draw(SIZES), draw(SIZES), start=draw(SIZES)) for name in draw(NAMES)}
    return checkpoint(arrays, draw(st.sampled_from(["torch", "keras", "paddle"])))


@given(sides(), sides(), st.booleans(), st.sampled_from(["auto", "as-is"]))
def test_every_tensor_is_told_of_once(a: Checkpoint, b: Checkpoint, rename: bool, layout: Any) -> None:
    found = pair_up(a, b, PairingOptions(rename=rename, layout=layout))
    for side, checkpoint_, alone in (("a", a, found.removed), ("b", b, found.added)):
        items = [getattr(pair, side) for pair in found.pairs] + list(alone)
        items += [item for which, item in found.bookkeeping if which == side]
        items += [getattr(pair, side) for pair in found.undecided]
        told = [source.name for item in items for source in item.sources]
        assert sorted(told) == sorted(tensor_.name for tensor_ in checkpoint_.tensors)
    for pair in found.pairs:
        assert pair.a.tensor.role is pair.b.tensor.role
    if not rename:
        assert {pair.how for pair in found.pairs} <= {"name", "convention"}


@given(sides(), st.sampled_from(["auto", "as-is"]))
def test_a_checkpoint_is_paired_with_itself_as_stored(one: Checkpoint, layout: Any) -> None:
    found = pair_up(one, one, PairingOptions(layout=layout))
    assert [pair.a.tensor.name for pair in found.pairs] == [tensor_.name for tensor_ in one.tensors]
    assert all(pair.a.tensor is pair.b.tensor and pair.how == "name" for pair in found.pairs)


@given(sides(), sides())
def test_both_directions_pair_the_same(a: Checkpoint, b: Checkpoint) -> None:
    there, back = (pair_up(*both, PairingOptions(rename=False)) for both in ((a, b), (b, a)))
    assert {(pair.a.name, pair.b.name, pair.how) for pair in there.pairs} == {
        (pair.b.name, pair.a.name, pair.how) for pair in back.pairs
    }
