"""One network in every framework: equal where it is equal, and one changed element found, in each format."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

from ckpttool import Difference, DiffOptions, diff
from tests.support.commands import Run
from tests.support.thorough import sampled
from tests.support.twins import FIXTURES, unpacked

ALIKE = ["twin{}.safetensors", "twin{}.npz", "twin{}-dcp"]
"""What holds PyTorch's own layouts."""
OTHERWISE = [
    *("twin{}.keras", "twin{}.weights.h5", "twin{}-subclassed.weights.h5", "twin{}.h5", "twin{}-keras2.h5"),
    *("twin{}-tf", "twin{}-functional-tf", "twin{}-savedmodel", "twin{}-keras2-savedmodel"),
    *("twin{}-fluid", "twin{}-static.pdmodel", "twin{}.pdparams"),
]
"""What holds the kernels of dense layers transposed."""
KERAS_ARRAYS = "twin-keras{}.npz"
UNWIRED = [
    *("twin{}.weights.h5", "twin{}-subclassed.weights.h5", "twin{}-tf", "twin{}-functional-tf"),
    *("twin{}-savedmodel", KERAS_ARRAYS),
]
"""What does not say whether a Dense stands behind a Flatten."""
PADDLES = ("twin{}-fluid", "twin{}-static.pdmodel", "twin{}.pdparams")
MANY = [
    *("many{}.pth", "many{}.safetensors", "many{}.npz", "many{}-dcp", "many{}.pdparams", "many{}-fluid"),
    *("many{}.keras", "many{}.weights.h5", "many{}.h5", "many{}-tf", "many{}-savedmodel"),
]
DIRECTIONS = [False, True]


class Changed(NamedTuple):
    """The element that differs: in which tensor, where, and by how much."""

    name: str
    where: tuple[int, ...]
    before: float
    after: float


def change_of(key: str) -> Changed:
    told = json.loads((FIXTURES / "twins.expected.json").read_text())[key]
    return Changed(told["name"], tuple(told["where"]), told["before"], told["after"])


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpacked("others", tmp_path_factory.mktemp("others"))


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpacked("many", tmp_path_factory.mktemp("many"))


@pytest.fixture
def place(others: Path) -> Any:
    """Return what finds a twin, changed or not."""

    def found(name: str, *, changed: bool = False) -> Path:
        file = name.format("-changed" if changed else "")
        return FIXTURES / file if (FIXTURES / file).exists() else others / file

    return found


def both(a: Path, b: Path, *, turned: bool) -> Difference:
    return diff(b, a) if turned else diff(a, b)


def require_only(found: Difference, wanted: Changed, *, turned: bool) -> Any:
    """Require that one element of one tensor differs, and return what is told of it."""
    (change,) = found.changed
    assert (found.added, found.removed, found.broken) == ((), (), ())
    assert found.unchanged == found.compared - 1
    assert change.kind == "values"
    told = change.statistics
    assert told is not None
    size = abs(wanted.after - wanted.before)
    assert (told.count, told.max_abs, told.l2) == (1, size, size)
    assert (told.at_a, told.at_b) == (
        (wanted.after, wanted.before) if turned else (wanted.before, wanted.after)
    )
    return change


# One network ----------------------------------------------------------------------------------------


def is_like(name: str) -> bool:
    return name in (*ALIKE, *PADDLES)


@pytest.mark.parametrize("name", [*ALIKE, *OTHERWISE, KERAS_ARRAYS])
def test_the_same_weights_are_equal_in_every_format_and_one_changed_element_is_found(
    place: Any, name: str
) -> None:
    for turned in DIRECTIONS:
        found = both(place("twin{}.pth"), place(name), turned=turned)
        require_same(name, found)
        require_rules(name, found.rules)
        require_found_across(
            name, both(place("twin{}.pth"), place(name, changed=True), turned=turned), turned
        )
    require_found_within(diff(place(name), place(name, changed=True)))


def require_same(name: str, found: Difference) -> None:
    assert (found.changed, found.added, found.removed, found.values) == ((), (), (), ())
    # Keras has one bias where PyTorch has two.
    expected = 17 + (name in (ALIKE[0], ALIKE[2])) if is_like(name) else 16
    assert found.compared == found.unchanged == expected - len(found.undecided)
    assert found.equal is (name not in UNWIRED)
    assert [one.seen for one in found.undecided] == ["equal in the usual layout"] * (2 * (name in UNWIRED))


def require_rules(name: str, rules: Mapping[str, int]) -> None:
    """Require that the rules which made both sides comparable are named, and none where none is needed."""
    if name in ALIKE:
        assert rules == {}
    elif name != KERAS_ARRAYS:
        linear = [count for rule, count in rules.items() if "Linear" in rule]
        assert linear == [2] * (name not in UNWIRED), rules
        assert any("LSTM" in rule for rule in rules) is (name not in PADDLES), rules


def require_found_across(name: str, found: Difference, turned: bool) -> None:
    wanted = change_of("changed")
    if name in UNWIRED:
        assert (found.changed, found.added, found.removed) == ((), (), ())
        seen = {"equal in the usual layout", "1 of 360 elements differs in the usual layout"}
        assert {one.seen for one in found.undecided} == seen
        return
    change = require_only(found, wanted, turned=turned)
    assert wanted.name in (change.a.name, change.b.name)
    assert change.a.shape == change.b.shape == (10, 36)
    assert change.statistics is not None and change.statistics.where == wanted.where


def require_found_within(found: Difference) -> None:
    change = require_only(found, change_of("changed"), turned=False)
    assert change.a.name == change.b.name
    assert change.statistics is not None and sorted(change.statistics.where) == [7, 20]
    assert not found.equal


def test_one_changed_element_is_found_within_files_of_pytorch(place: Any) -> None:
    require_found_within(diff(place("twin{}.pth"), place("twin{}.pth", changed=True)))


@pytest.mark.parametrize(("a", "b"), sampled(zip(OTHERWISE, [*OTHERWISE[1:], OTHERWISE[0]], strict=True), 4))
def test_frameworks_are_compared_with_each_other(place: Any, a: str, b: str) -> None:
    found = diff(place(a), place(b))
    # Keras 2 and 3 configure a model otherwise, and export other graphs.
    assert (found.changed, found.added, found.removed) == ((), (), ())
    require_only(diff(place(a), place(b, changed=True)), change_of("changed"), turned=False)


def test_of_the_rules_of_one_pair_that_of_the_first_side_is_named_first(place: Any) -> None:
    for turned in DIRECTIONS:
        rules = both(place("twin{}.keras"), place("twin{}.pdparams"), turned=turned).rules
        linear = [(rule.partition(" ")[0], count) for rule, count in rules.items() if "Linear" in rule]
        expected = [("Dense", 2), ("Paddle", 2)]
        assert linear == (expected[::-1] if turned else expected)


def test_compared_as_stored_transposed_kernels_differ(place: Any) -> None:
    found = diff(place("twin{}.pth"), place("twin{}.pdparams"), DiffOptions(layout="as-is"))
    assert not found.equal and found.rules == {}
    kinds = {change.name: change.kind for change in found.changed}
    assert kinds["fc1.weight"] == "shape" and kinds["fc2.weight"] == "values"


# The rules of every layer ---------------------------------------------------------------------------


def test_every_kind_of_layer_has_its_rule(others: Path) -> None:
    for turned in DIRECTIONS:
        found = both(others / "zoo.safetensors", others / "zoo.keras", turned=turned)
        assert (found.changed, found.added, found.removed) == ((), (), ())
        assert found.equal


def test_where_nothing_tells_the_type_of_a_layer_no_rule_is_used_and_that_is_said(
    many: Path, tmp_path: Path
) -> None:
    loose = tmp_path / "loose"
    shutil.copytree(many / "many-fluid", loose, ignore=shutil.ignore_patterns("__model__"))
    found = diff(many / "many.pth", loose)
    assert len(found.undecided) == 4 * 43 and not found.equal
    assert found.undecided[0].text == (
        "layers.0.q.weight: 2 of 4 elements differ as stored, but it is unknown if one side is transposed"
    )
    assert (found.changed, found.added, found.removed, found.rules) == ((), (), (), {})


# 258 tensors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sampled(MANY, 5))
def test_one_of_258_tensors_is_found(many: Path, name: str) -> None:
    found = diff(many / name.format(""), many / name.format("-changed"))
    change = require_only(found, change_of("many"), turned=False)
    assert found.compared == 258 + name.endswith("-tf")  # and TensorFlow's counter of saves
    assert change.statistics is not None
    assert change.statistics.size == 4 and sorted(change.statistics.where) == [0, 1]
    assert change.a.name == change.b.name
    across = diff(many / "many.pth", many / name.format("-changed"))
    change = require_only(across, change_of("many"), turned=False)
    assert "layers.7.q.weight" in (change.a.name, change.b.name)
    assert across.compared == 258


# In words -------------------------------------------------------------------------------------------


def first_lines(run: Run, a: Path, b: Path, *options: str) -> tuple[int, str, list[str]]:
    """Return the status, the summary, and the other lines of a diff."""
    status, out, err = run("diff", *options, a, b)
    assert err == ""
    summary, *rest = filter(None, map(str.strip, out.splitlines()))
    return status, summary, rest


SAID = {
    "renamed": ("2 renamed (fc1.* → dense1.*), 18 tensors equal", "fc1.weight → dense1.weight: same content"),
    "head": ("2 added (head.*), 18 tensors equal", "+ head.weight  float32 2×10"),
    "shape": ("2 of 18 tensors changed in shape", "fc2.weight  shape 12×10, was 10×10"),
    "float64": (
        "1 of 18 tensors changed from float32 to float64, same values",
        "ln.bias  float64, was float32: same values",
    ),
}


def test_each_change_is_said_in_its_own_words(run: Run) -> None:
    for name, (summary, line) in SAID.items():
        told = first_lines(run, FIXTURES / "twin.pth", FIXTURES / f"twin-{name}.pth")
        assert told[:2] == (1, summary)
        assert line in told[2]


def test_a_prefix_that_a_wrapper_adds_is_no_difference_and_is_named(run: Run) -> None:
    for name, prefix in (("module", "module."), ("compiled", "_orig_mod.")):
        plain, wrapped = FIXTURES / "twin.pth", FIXTURES / f"twin-{name}.pth"
        for a, b, side in ((plain, wrapped, "B"), (wrapped, plain, "A")):
            status, summary, rest = first_lines(run, a, b)
            assert (status, summary.partition(",")[0]) == (0, "equal: 18 tensors")
            assert rest == [f"ignored the prefix '{prefix}' in {side} (18 tensors)"]


def test_a_type_with_fewer_bits_is_said_with_how_far_it_is_off(run: Run) -> None:
    a, b = FIXTURES / "twin.pth", FIXTURES / "twin-bfloat16.pth"
    status, summary, rest = first_lines(run, a, b)
    assert status == 1
    assert re.fullmatch(
        r"1 of 18 tensors changed from float32 to bfloat16, max \|Δ\| \S+ in fc2\.weight", summary
    )
    assert any("bfloat16, was float32" in line for line in rest)
    (change,) = diff(a, b).changed
    with np.load(FIXTURES / "twin.npz") as arrays:
        plain = arrays["fc2.weight"].astype("float64")
    halved = plain.astype(ml_dtypes.bfloat16).astype("float64")
    assert change.statistics is not None
    assert change.statistics.max_abs == np.abs(halved - plain).max()
    assert change.statistics.count == np.count_nonzero(halved != plain)


def test_a_step_of_training_says_epoch_and_loss_first(run: Run) -> None:
    status, summary, _ = first_lines(run, FIXTURES / "epoch_3.pth", FIXTURES / "epoch_4.pth")
    assert status == 1
    assert summary.startswith("16 of 16 tensors changed, max |Δ| ")
    assert "; epoch 3 → 4, loss 1.344 → 1.317" in summary


def test_one_of_258_is_said_as_people_say_it(run: Run, many: Path) -> None:
    wanted = "1 of 258 tensors changed, max |Δ| 1.0e-3 in layers.7.q.weight"
    status, summary, _ = first_lines(run, many / "many.pth", many / "many-changed.pth")
    assert (status, summary) == (1, wanted)


def test_two_frameworks_are_said_to_be_equal_by_which_rules(run: Run, place: Any) -> None:
    status, summary, rest = first_lines(run, place("twin{}.pth"), place("twin{}.keras"))
    assert (status, summary.partition(",")[0]) == (0, "equal in value: 16 tensors")
    assert "Dense kernel (I, O) = Linear weight (O, I): 2 tensors" in rest
    assert "LSTM bias = bias_ih + bias_hh: 1 tensor" in rest
