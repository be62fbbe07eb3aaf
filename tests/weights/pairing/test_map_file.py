"""The map file: what it may say, what is wrong in it, and the pairs that it asks for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool import Checkpoint, CheckpointError, NotFound, UsageError
from ckpttool.weights.pairing.map_file import MAX_BYTES, TensorMap, TensorRule, parse_map, read_map
from ckpttool.weights.pairing.pair_up import Pairing, PairingOptions, pair_up
from tests.support.checkpoints import checkpoint, numbers, of_tensors, tensor
from tests.support.tensors import Array

DOCS = Path(__file__).parents[3] / "docs" / "reference" / "map.md"


@pytest.fixture
def at(tmp_path: Path) -> Path:
    return tmp_path / "map.toml"


def map_from(path: Path, text: str) -> TensorMap:
    path.write_text(text, encoding="utf-8")
    return read_map(str(path))


def paired_by_map(
    path: Path,
    text: str,
    a: Checkpoint | Mapping[str, Array],
    b: Checkpoint | Mapping[str, Array],
    **options: Any,
) -> Pairing:
    ours, theirs = (one if isinstance(one, Checkpoint) else checkpoint(one) for one in (a, b))
    return pair_up(ours, theirs, PairingOptions(mapping=map_from(path, text), **options))


def names(found: Pairing) -> dict[str, tuple[str, str]]:
    return {pair.a.sources[0].name: (pair.b.sources[0].name, pair.how) for pair in found.pairs}


def equal(found: Pairing) -> bool:
    return all(np.array_equal(pair.a.tensor.array(), pair.b.tensor.array()) for pair in found.pairs)


# What it says -----------------------------------------------------------------------------------------


def test_all_that_a_map_can_say(at: Path) -> None:
    found = map_from(
        at,
        """
        [names]
        "layers.*.kernel" = "blocks.*.weight"
        head = "classifier"

        [[tensor]]
        from = ["q.*", "k.*"]
        to = "in_proj.*"
        rule = "dense"
        join = 0

        [[tensor]]
        from = "fc"
        to = "fc1"
        rule = "flatten"
        shape = [2, 3, 4]

        [[tensor]]
        from = "x"
        to = ["y", "z"]
        rule = "permute"
        axes = [1, 0]
        split = 0
        """,
    )
    assert found.names == {"layers.*.kernel": "blocks.*.weight", "head": "classifier"}
    assert found.tensors == (
        TensorRule(place="tensor 1", sources=("q.*", "k.*"), targets=("in_proj.*",), rule="dense", join=0),
        TensorRule(place="tensor 2", sources=("fc",), targets=("fc1",), rule="flatten", shape=(2, 3, 4)),
        TensorRule(
            place="tensor 3", sources=("x",), targets=("y", "z"), rule="permute", axes=(1, 0), split=0
        ),
    )


ONE = '[[tensor]]\nfrom = "a"\nto = "b"\n'


def test_what_is_wrong_is_said_with_its_place(at: Path) -> None:
    cases = [
        ("", ": it maps nothing (expected [names], [[tensor]] and drop)"),
        ("[name]\n", ": unknown name (expected [names], [[tensor]] and drop)"),
        ("names = 3\n", "[names]: 3 (a table)"),
        (
            '[names]\nfc.weight = "a"\n',
            '[names.fc]: a table (a name with dots is written in quotes: "fc.weight")',
        ),
        ("[names]\na = 3\n", '[names."a"]: 3 (a name)'),
        ('[names]\n"a.*" = "b.*.*"\n', "[names.\"a.*\"]: 'b.*.*' has 2 stars (1, as 'a.*' has)"),
        (
            '[names]\n"a.*" = "b"\n',
            "[names.\"a.*\"]: 'b' has 0 stars (1, as 'a.*' has)",
        ),
        ("[tensor]\n", "[tensor]: not a list of tables (write [[tensor]])"),
        ("[[tensor]]\n", "[tensor 1]: from is missing (a name, or a list of names)"),
        (
            ONE + ONE + "form = 1\n",
            "[tensor 2]: unknown key form "
            "(expected one of from, to, rule, shape, axes, inverse, join, split, sizes)",
        ),
        ('[[tensor]]\nfrom = []\nto = "b"\n', "[tensor 1]: from is [] (a name, or a list of names)"),
        ('[[tensor]]\nfrom = ["a", "a"]\nto = "b"\njoin = 0\n', "[tensor 1]: from names one tensor twice"),
        (
            ONE + 'rule = "turn"\n',
            "[tensor 1]: rule is 'turn' (one of as-is, dense, conv, flatten, transpose, permute)",
        ),
        (ONE + 'rule = "flatten"\n', "[tensor 1]: shape is [] ([C, H, W] before the Flatten)"),
        (
            ONE + 'rule = "flatten"\nshape = [1, 2]\n',
            "[tensor 1]: shape is [1, 2] ([C, H, W] before the Flatten)",
        ),
        (ONE + "shape = [1, 2, 3]\n", '[tensor 1]: shape needs rule = "flatten"'),
        (ONE + 'rule = "permute"\n', "[tensor 1]: axes is [] (one axis each, as in [1, 0])"),
        (ONE + 'rule = "permute"\naxes = [1, 1]\n', "[tensor 1]: axes is [1, 1] (each of 0 to 1 once)"),
        (ONE + 'rule = "permute"\naxes = [-1, 0]\n', "[tensor 1]: axes is [-1, 0] (a list of whole numbers)"),
        (
            ONE + 'rule = "permute"\naxes = [true, false]\n',
            "[tensor 1]: axes is [True, False] (a list of whole numbers)",
        ),
        (
            '[[tensor]]\nfrom = ["a", "c"]\nto = "b"\n',
            "[tensor 1]: 2 to 1 (several become one with join = 0, one several by split = 0)",
        ),
        (
            ONE + "join = 0\n",
            "[tensor 1]: 1 to 1 (several become one with join = 0, one several by split = 0)",
        ),
        (ONE + "join = 1\n", "[tensor 1]: join is 1 (0: the first axis, after the rule)"),
        (
            '[[tensor]]\nfrom = ["a", "c"]\nto = ["b", "d"]\njoin = 0\nsplit = 0\n',
            "[tensor 1]: 2 to 2 (several to one, or one to several)",
        ),
        ('[[tensor]]\nfrom = "a"\nto = "b.*"\n', "[tensor 1]: 'b.*' has 1 star (0, as 'a' has)"),
    ]
    for text, wrong in cases:
        with pytest.raises(UsageError) as failure:
            map_from(at, text)
        assert str(failure.value) == f"{at}{wrong}", text


def test_what_is_no_map(at: Path) -> None:
    with pytest.raises(UsageError, match=r"is not valid TOML: .*line 1"):
        map_from(at, "[names\n")
    at.write_bytes(b'[names]\na = "\xff"\n')
    with pytest.raises(UsageError, match="is not valid TOML"):
        read_map(str(at))
    with pytest.raises(NotFound):
        read_map(str(at.with_name("none.toml")))
    with pytest.raises((UsageError, CheckpointError)):
        read_map(str(at.parent))
    at.write_bytes(b"#" * (MAX_BYTES + 1))
    with pytest.raises(UsageError, match="not a map"):
        read_map(str(at))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 3) | st.text("a*.", max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("ab.*", max_size=2), inner, max_size=2)
    ),
    max_leaves=6,
)
KEYS = st.sampled_from(["from", "to", "rule", "shape", "axes", "join", "split", "x"])
RULES = st.sampled_from(["dense", "conv", "flatten", "transpose", "permute", "as-is"])
TABLES = st.dictionaries(KEYS, VALUES | RULES, max_size=6)


@given(
    st.dictionaries(
        st.sampled_from(["names", "tensor", "x"]), VALUES | st.lists(TABLES, max_size=2), max_size=3
    )
)
def test_any_tables_are_a_map_or_a_usage_error(tables: dict[str, Any]) -> None:
    try:
        found = parse_map("m.toml", tables)
    except UsageError as failure:
        assert str(failure).startswith("m.toml")
    else:
        assert found.names or found.tensors


# Names ------------------------------------------------------------------------------------------------


def test_names_and_captured_stars(at: Path) -> None:
    ours = {f"enc.{at_}.{part}.w": numbers(2) + at_ for at_ in range(3) for part in ("q", "k")}
    theirs = {f"{part}.layers.{at_}": numbers(2) - at_ for at_ in range(3) for part in ("k", "q")}
    found = paired_by_map(
        at, '[names]\n"enc.*.k.w" = "k.layers.*"\n"enc.*.q.w" = "q.layers.*"\n', ours, theirs
    )
    assert names(found) == {
        f"enc.{at_}.{part}.w": (f"{part}.layers.{at_}", "map") for at_ in range(3) for part in ("q", "k")
    }
    assert (found.removed, found.added) == ((), ())


def test_a_map_counts_more_than_equal_names_and_content(at: Path) -> None:
    ours = {"a.weight": numbers(3), "b.weight": numbers(3) + 1}
    found = paired_by_map(at, '[names]\n"a.weight" = "b.weight"\n"b.weight" = "a.weight"\n', ours, ours)
    assert names(found) == {"a.weight": ("b.weight", "map"), "b.weight": ("a.weight", "map")}


def test_what_a_map_paired_is_said(at: Path) -> None:
    ours = {name: numbers(3) for name in "abcde"}
    theirs = {name.upper(): numbers(3) + 1 for name in "abcde"}
    text = "[names]\n" + "\n".join(f'{name} = "{name.upper()}"' for name in "abcde")
    found = paired_by_map(at, text, ours, theirs)
    assert found.notes == ("the map paired 5 tensors: a → A, b → B, c → C, and 2 more",)
    (note, *_) = paired_by_map(at, '[names]\na = "B"', {"a": numbers(3)}, {"B": numbers(3)}).notes
    assert note == "the map paired 1 tensor: a → B"


@pytest.mark.parametrize("flipped", [False, True])
@pytest.mark.parametrize("glob", ["0", "*"])
@pytest.mark.parametrize("kind", ["names", "tensor"])
def test_a_name_that_several_tensors_have_maps_nothing(at: Path, flipped: bool, glob: str, kind: str) -> None:
    twice = of_tensors([tensor(("0",), numbers(3)), tensor((0,), numbers(3) + 1), tensor("x", numbers(2))])
    once = checkpoint({"0": numbers(3), "x": numbers(2)})
    lines = {
        "names": f'[names]\n"{glob}" = "{glob}"',
        "tensor": f'[[tensor]]\nfrom = "{glob}"\nto = "{glob}"',
    }
    which = "second" if flipped else "first"
    with pytest.raises(UsageError, match=f"several tensors '0' on the {which} side"):
        paired_by_map(at, lines[kind], *((once, twice) if flipped else (twice, once)))
    assert len(paired_by_map(at, '[names]\nx = "x"', twice, once).pairs) == 2


def test_what_a_map_calls_by_a_name_that_is_not_there_is_removed(at: Path) -> None:
    ours = {"a.0": numbers(3), "a.1": numbers(4)}
    found = paired_by_map(at, '[names]\n"a.*" = "b.*"\n', ours, {"b.0": numbers(3), "c.1": numbers(4)})
    assert names(found) == {"a.0": ("b.0", "map")}
    assert [item.name for item in found.removed] == ["a.1"]
    assert [item.name for item in found.added] == ["c.1"]


def test_mapped_tensors_are_compared_in_one_layout(at: Path) -> None:
    kernel = numbers(3, 5)
    arrays = {"dense_7.kernel": kernel, "dense_7.bias": numbers(5)}
    keras = checkpoint(arrays, "keras", {"dense_7.kernel": "Dense"})
    torch = {"head.weight": kernel.T.copy(), "head.bias": numbers(5)}
    text = '[names]\n"dense_7.kernel" = "head.weight"\n"dense_7.bias" = "head.bias"\n'
    found = paired_by_map(at, text, keras, torch)
    assert equal(found) and [pair.how for pair in found.pairs] == ["map", "map"]
    assert found.pairs[0].a.rule is not None
    as_is = paired_by_map(at, text, keras, torch, layout="as-is")
    assert as_is.pairs[0].a.tensor.shape == (3, 5)
    unwired = paired_by_map(at, text, checkpoint(arrays, "keras"), torch)  # a name says nothing of a Flatten
    assert [pair.a.name for pair in unwired.undecided] == ["dense_7.weight"]
    rule = '[[tensor]]\nfrom = "dense_7.kernel"\nto = "head.weight"\nrule = "dense"\n'
    decided = paired_by_map(at, rule, checkpoint(arrays, "keras"), torch)
    assert equal(decided) and len(decided.pairs) == 2 and decided.undecided == ()


def test_a_rule_that_cannot_be_followed_is_an_error(at: Path) -> None:
    cases = [
        ('[names]\n"x.*" = "y.*"\n', "[names.\"x.*\"]: nothing on the first side matches 'x.*'"),
        (
            '[names]\n"a.w" = "z.w"\n',
            "[names.\"a.w\"]: the second side has no 'z.w', or an earlier line uses it",
        ),
        (
            '[names]\n"a.w" = "a.w"\n"b.w" = "a.w"\n',
            "[names.\"b.w\"]: 'b.w' and 'a.w' both become 'a.w'",
        ),
        ('[[tensor]]\nfrom = "x"\nto = "a.w"\n', "[tensor 1]: nothing on the first side matches 'x'"),
        ('[[tensor]]\nfrom = "a.w"\nto = "x"\n', "[tensor 1]: no 'x' on the second side"),
        (
            '[[tensor]]\nfrom = ["a.w", "x"]\nto = "b.w"\njoin = 0\n',
            "[tensor 1]: no 'x' on the first side",
        ),
        (
            '[[tensor]]\nfrom = "a.w"\nto = "b.w"\nrule = "conv"\n',
            "[tensor 1]: a.w: 2 axes, not 3, 4, 5 (rule conv)",
        ),
        (
            '[[tensor]]\nfrom = "a.w"\nto = "b.w"\nrule = "flatten"\nshape = [1, 1, 3]\n',
            "[tensor 1]: a.w: an axis of 2, not 3 (rule flatten)",
        ),
        (
            '[[tensor]]\nfrom = "a.w"\nto = ["a.w", "b.w"]\nsplit = 0\n',
            "[tensor 1]: a.w: shape [2, 3] for 2 + 2 rows (rule as-is)",
        ),
    ]
    for text, wrong in cases:
        both = {"a.w": numbers(2, 3), "b.w": numbers(2, 3)}
        with pytest.raises(UsageError) as failure:
            paired_by_map(at, text, both, both)
        assert str(failure.value) == f"{at}{wrong}", text


# Tensors ----------------------------------------------------------------------------------------------


def test_rules_for_single_tensors(at: Path) -> None:
    cases = [
        ('rule = "dense"', numbers(3, 5), numbers(3, 5).T),
        ('rule = "transpose"', numbers(2, 3, 4), numbers(2, 3, 4).T),
        ('rule = "permute"\naxes = [1, 2, 0]', numbers(2, 3, 4), numbers(2, 3, 4).transpose(1, 2, 0)),
        ('rule = "conv"', numbers(2, 3, 4, 5), numbers(2, 3, 4, 5).transpose(3, 2, 0, 1)),
        ("", numbers(2, 3), numbers(2, 3)),
        (
            'rule = "flatten"\nshape = [2, 3, 4]',
            numbers(24, 5),
            numbers(24, 5).reshape(3, 4, 2, 5).transpose(3, 2, 0, 1).reshape(5, 24),
        ),
    ]
    for rule, stored, expected in cases:
        text = f'[[tensor]]\nfrom = "own.*"\nto = "other.*"\n{rule}\n'
        keras = checkpoint({"own.w": stored}, "tensorflow")
        found = paired_by_map(at, text, keras, {"other.w": np.ascontiguousarray(expected)})
        assert names(found) == {"own.w": ("other.w", "map")} and equal(found), rule
        if rule and "transpose" not in rule and "permute" not in rule:  # these lead from Keras to PyTorch
            back = paired_by_map(
                at, text, {"own.w": np.ascontiguousarray(expected)}, checkpoint({"other.w": stored}, "keras")
            )
            assert equal(back) and back.pairs[0].a.tensor.shape == stored.shape, rule


def test_several_become_one_and_one_several(at: Path) -> None:
    parts = {
        f"{layer}.{part}.kernel": numbers(4, 3) + at_ for at_, part in enumerate("qkv") for layer in "ab"
    }
    whole = {
        f"{layer}.in_proj": np.concatenate([parts[f"{layer}.{part}.kernel"].T for part in "qkv"])
        for layer in "ab"
    }
    several = '["*.q.kernel", "*.k.kernel", "*.v.kernel"]'
    join = f'[[tensor]]\nfrom = {several}\nto = "*.in_proj"\nrule = "dense"\njoin = 0\n'
    found = paired_by_map(at, join, parts, whole)
    assert equal(found) and len(found.pairs) == 2 and (found.removed, found.added) == ((), ())
    assert [len(pair.a.sources) for pair in found.pairs] == [3, 3]
    assert {pair.a.rule for pair in found.pairs} == {"map: dense"}
    turned = {name: np.ascontiguousarray(array.T) for name, array in parts.items()}
    split = f'[[tensor]]\nfrom = "*.in_proj"\nto = {several}\nsplit = 0\n'
    back = paired_by_map(at, split, whole, turned)
    assert equal(back) and len(back.pairs) == 6 and (back.removed, back.added) == ((), ())
    assert [pair.a.tensor.shape for pair in back.pairs] == [(3, 4)] * 6


def test_the_first_table_that_means_a_tensor_decides(at: Path) -> None:
    ours = {"a.w": numbers(2, 3), "b.w": numbers(2, 3) + 1}
    theirs = {"a.w": numbers(2, 3), "b.w": (numbers(2, 3) + 1).T.copy()}
    first = '[[tensor]]\nfrom = "a.w"\nto = "a.w"\n'
    every = '[[tensor]]\nfrom = "*.w"\nto = "*.w"\nrule = "dense"\n'
    assert equal(paired_by_map(at, first + every, ours, theirs))
    with pytest.raises(UsageError, match=r"\[tensor 2\]: nothing more on the first side matches 'a.w'"):
        paired_by_map(at, first + first, ours, theirs)
    with pytest.raises(UsageError, match=r"\[tensor 2\]: an earlier table uses 'a.w'"):
        paired_by_map(at, first + '[[tensor]]\nfrom = ["b.w", "a.w"]\nto = "b.w"\njoin = 0\n', ours, theirs)


def test_the_other_tensors_are_paired_as_ever(at: Path) -> None:
    ours = {"a": numbers(3, 5), "b.weight": numbers(2), "c.weight": numbers(7)}
    theirs = {"z": numbers(3, 5).T.copy(), "module.b.weight": numbers(2), "d.weight": numbers(7)}
    found = paired_by_map(at, '[[tensor]]\nfrom = "a"\nto = "z"\nrule = "transpose"\n', ours, theirs)
    assert names(found) == {
        "a": ("z", "map"),
        "b.weight": ("module.b.weight", "convention"),
        "c.weight": ("d.weight", "content"),
    }


def test_the_maps_of_the_documentation_are_maps(at: Path) -> None:
    blocks = DOCS.read_text(encoding="utf-8").split("```toml\n")[1:]
    assert len(blocks) >= 4
    for block in blocks:
        map_from(at, block.partition("```")[0])
