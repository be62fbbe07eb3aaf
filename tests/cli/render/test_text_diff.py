"""What people read of a difference: whole answers."""

from __future__ import annotations

import re
from typing import Any

import pytest

from ckpttool import Difference, Role
from tests.support.rendering import lines_of, text_of
from tests.support.results import (
    MISSING,
    NAN,
    change,
    change_of_strings,
    difference,
    facts,
    reshaped,
    retyped,
)

HOSTILE = "\x1b[2Ja\nb\u202e[red]c[/red]"


# The sentence ---------------------------------------------------------------------------------------


SMALL = [change("layers.7.q.weight"), change("layers.7.q.bias", max_abs=1e-6), change("head", max_abs=0.0005)]
EPOCH = ("epoch", 3, 4)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (
            difference(*SMALL, values=(EPOCH,)),
            "3 of 258 tensors changed, max |Δ| 1.0e-3 in layers.7.q.weight; epoch 3 → 4",
        ),
        (difference(), "equal: 258 tensors, 980 MB compared"),
        (difference(rules={"Dense kernel": 3}), "equal in value: 258 tensors, 980 MB compared"),
        (difference(compared=0), "equal: neither holds a tensor"),
        (difference(values=(EPOCH,)), "258 tensors equal; epoch 3 → 4"),
        (difference(added=("head.weight",)), "1 added (head.weight), 258 tensors equal"),
        (
            difference(removed=("head.a", "head.b"), added=("a", "b.c")),
            "2 removed (head.*), 2 added, 258 tensors equal",
        ),
        (
            difference(compared=0, removed=("a",), added=("b",)),
            "no tensor in common, 1 removed (a), 1 added (b)",
        ),
        (
            difference(renamed=(("fc.weight", "head.weight"), ("fc.bias", "head.bias"))),
            "2 renamed (fc.* → head.*), 258 tensors equal",
        ),
        (
            difference(renamed=(("fc.weight", "head.weight"),)),
            "1 renamed (fc.weight → head.weight), 258 tensors equal",
        ),
        (difference(renamed=(("a.b", "c.d"), ("e.f", "g.h"))), "2 renamed, 258 tensors equal"),
        (
            difference(renamed=(("fc.weight", "dense.kernel"),), rename_counts=False),
            "equal in value: 258 tensors, 980 MB compared",
        ),
        (difference(reshaped("a.b")), "1 of 258 tensors changed in shape"),
        (
            difference(*(retyped(str(at)) for at in range(258))),
            "258 of 258 tensors changed from float32 to bfloat16, same values",
        ),
        (
            difference(reshaped("a"), retyped("b"), retyped("c", max_abs=0.5), change("d")),
            "4 of 258 tensors changed (1 in shape, 1 from float32 to bfloat16, same values, "
            "1 from float32 to bfloat16), max |Δ| 0.5 in c",
        ),
        (
            difference(change("a", max_abs=NAN, non_finite=3)),
            "1 of 258 tensors changed, 3 values NaN or infinite",
        ),
        (
            difference(change("state.step", role=Role.OPTIMIZER, max_abs=2.0), change("w")),
            "2 of 258 tensors changed, max |Δ| 1.0e-3 in w",
        ),
        (
            difference(broken=(("w", "a", "cut short"),)),
            "1 tensor could not be compared, 258 tensors equal",
        ),
        (
            difference(tolerance={"rtol": 1e-3}),
            "equal within rtol 1e-3: 258 tensors, 980 MB compared",
        ),
        (
            difference(tolerance={"rtol": 0.05, "atol": 1e-6}, rules={"Dense kernel": 3}),
            "equal in value within rtol 0.05 and atol 1e-6: 258 tensors, 980 MB compared",
        ),
        (difference(tolerance={"bitwise": True}), "equal: 258 tensors, 980 MB compared"),
        (
            difference(tolerance={"atol": 0.5}, values=(EPOCH,)),
            "258 tensors equal within atol 0.5; epoch 3 → 4",
        ),
        (
            difference(not_compared=("the code: known only by its length",)),
            "no difference found, but 1 thing was not compared: the code: known only by its length",
        ),
        (
            difference(not_compared=tuple("abcdefg")),
            "no difference found, but 7 things were not compared: a, b, c and 4 more",
        ),
        (
            difference(change("w"), not_compared=("x", "y"), values=(EPOCH,)),
            "1 of 258 tensors changed, max |Δ| 1.0e-3 in w, 2 things not compared; epoch 3 → 4",
        ),
        (
            difference(change_of_strings("words"), change("w")),
            "2 of 258 tensors changed, max |Δ| 1.0e-3 in w",
        ),
        (difference(change_of_strings("words")), "1 of 258 tensors changed"),
        (
            difference(
                values=(
                    EPOCH,
                    ("loss", 0.5, 0.4),
                    ("config.name", "x" * 100, "y"),
                    ("config.width", 4, 5),
                    ("a", 1, 2),
                    ("gone", 1, MISSING),
                    ("new", MISSING, 1),
                )
            ),
            "258 tensors equal; epoch 3 → 4, loss 0.5 → 0.4, config.width 4 → 5, 2 more values changed, "
            "1 value removed, 1 value added",
        ),
    ],
)
def test_summary(found: Difference, said: str) -> None:
    assert lines_of(found)[0] == said


@pytest.mark.parametrize("found", [difference(broken=(("w", "b", "x"),)), difference(not_compared=("w",))])
def test_what_is_not_compared_is_never_called_equal(found: Difference) -> None:
    assert not found.equal
    assert not lines_of(found)[0].startswith("equal")
    assert "not" in lines_of(found)[0]


def test_what_is_not_compared_is_listed() -> None:
    found = difference(not_compared=("the code", *(f"w{at}" for at in range(50))))
    assert lines_of(found)[:4] == [
        "no difference found, but 51 things were not compared: the code, w0, w1 and 48 more",
        "",
        "? not compared: the code",
        "? not compared: w0",
    ]
    assert lines_of(found)[-1] == "  … and 11 more (--all shows them)"
    assert lines_of(found, all=True)[-1] == "? not compared: w49"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ([change("head.weight"), change("head.bias")], "only head.* changed"),
        ([change("head.weight")], None),
        ([change("a.b.w"), change("a.c.w"), change("d")], "only a.b.*, a.c.* and d changed"),
        ([change(f"layers.{at}.w") for at in range(9)], "changed in 9 modules, all in layers"),
        ([change(f"m{at}.w") for at in range(9)], "changed in 9 modules"),
        ([change(f"a.{at}.w") for at in range(9)] + [change("b.0.w")], "only a.* and b.* changed"),
        (
            [change("m.fc.w"), *(change(f"o.{at}.x", role=Role.OPTIMIZER) for at in range(9))],
            "only m.fc.* and 9 tensors of the optimizer state changed",
        ),
        ([change(f"o.{at}", role=Role.OPTIMIZER) for at in range(2)], "only o.* changed"),
    ],
)
def test_what_moved(changed: list[Any], said: str | None) -> None:
    assert lines_of(difference(*changed))[1] == (said or "")


def test_where_everything_moved_nothing_else_is_said() -> None:
    assert lines_of(difference(change("a.b"), change("a.c"), compared=2))[1] == ""


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("a.b.c", "a.b.d"), "2 removed (a.b.*), 258 tensors equal"),
        (("a.b", "a"), "2 removed, 258 tensors equal"),
        (("v", "w"), "2 removed, 258 tensors equal"),
    ],
)
def test_modules_of_what_is_gone(names: tuple[str, ...], said: str) -> None:
    assert lines_of(difference(removed=names))[0] == said


def test_what_is_in_no_module_stands_for_itself() -> None:
    assert lines_of(difference(change("w"), change("a.b")))[1] == "only w and a.* changed"


# The whole ------------------------------------------------------------------------------------------


def test_equal_is_one_line() -> None:
    assert text_of(difference()) == "equal: 258 tensors, 980 MB compared"


def test_everything() -> None:
    found = difference(
        change("layers.7.q.weight", l2=0.002),
        change("layers.7.q.bias", size=4, count=4, where=(0,), at_a=-1.0, at_b=-1.25, max_abs=0.25, l2=0.5),
        reshaped("layers.7.k.weight"),
        retyped("layers.7.v.weight"),
        removed=(facts("old.bias", (10,)),),
        added=("head.weight",),
        renamed=(("fc.weight", "out.weight"),),
        values=(EPOCH, ("learning_rate", 0.1, 0.05), ("note", MISSING, "hi")),
        reported=(
            ("format", "pytorch zip", "safetensors"),
            ("seed", 1, MISSING),
            ("bn.num_batches_tracked", MISSING, "int64 tensor"),
        ),
        rules={"Dense kernel (I, O) = Linear weight (O, I)": 3},
        notes=("module. was taken off the names of the second side",),
        broken=(("x.weight", "b", "it ends too early"),),
    )
    assert lines_of(found, width=130) == [
        "4 of 258 tensors changed (1 in shape, 1 from float32 to bfloat16, same values), "
        "max |Δ| 0.25 in layers.7.q.bias, 1 removed (old.bias), 1 added (head.weight), "
        "1 renamed (fc.weight → out.weight), 1 tensor could not be compared; "
        "epoch 3 → 4, learning_rate 0.1 → 0.05, 1 value added",
        "only layers.7.q.*, layers.7.k.* and layers.7.v.* changed",
        "",
        "  tensor             change                                         differ  max |Δ|  at      values"
        "         relative      L2",
        "  layers.7.k.weight  shape 10×2, was 2×10",
        "  layers.7.v.weight  bfloat16, was float32: same values",
        "  layers.7.q.bias                                            4 of 4 (100%)     0.25"
        "  [0]     -1 → -1.25         0.05     0.5",
        "  layers.7.q.weight                                      1 of 1,000 (0.1%)   1.0e-3"
        "  [3, 5]  0.125 → 0.126    2.0e-4  2.0e-3",
        "  hidden for lack of width: mean |Δ|, cosine",
        "",
        "- old.bias  float32 10",
        "+ head.weight  float32 10×2",
        "  fc.weight → out.weight: same content",
        "",
        "  epoch          3 → 4",
        "  learning_rate  0.1 → 0.05",
        "+ note  hi",
        "",
        "! x.weight of B: it ends too early",
        "  Dense kernel (I, O) = Linear weight (O, I): 3 tensors",
        "  module. was taken off the names of the second side",
        "  not counted: format pytorch zip → safetensors",
        "  not counted, only in A: seed 1",
        "  not counted, only in B: bn.num_batches_tracked int64 tensor",
    ]


def test_other_names_of_another_framework_are_remarked() -> None:
    names = tuple((f"a{at}", f"b{at}") for at in range(10))
    found = difference(renamed=names, rename_counts=False)
    told = ", ".join(f"a{at} = b{at}" for at in range(4))
    assert lines_of(found) == [
        "equal in value: 258 tensors, 980 MB compared",
        "",
        f"  matched under different names: {told}, and 6 more",
    ]
    assert "a9 = b9" in text_of(found, all=True)


def test_what_identifies_a_save_is_named_alone() -> None:
    found = difference(
        reported=(
            ("fingerprint.uuid", "1172" * 10, "3101" * 10),
            ("fingerprint.checkpoint_hash", "de64", "d0e4"),
            ("serial", 1, 2),
            ("fingerprint", MISSING, {"uuid": "1172" * 10}),
        )
    )
    assert lines_of(found)[2:] == [
        "  not counted: fingerprint, serial 1 → 2",
        "  not counted, only in B: fingerprint",
    ]


def test_strings_have_no_distance() -> None:
    text = text_of(difference(change_of_strings("a.words"), change_of_strings("a.names")), width=200)
    assert text.splitlines()[3:] == [
        "  tensor           differ  at   values",
        "  a.words  2 of 4 (50.0%)  [1]  'ab' → 'c'",
        "  a.names  2 of 4 (50.0%)  [1]  'ab' → 'c'",
    ]
    assert "nan" not in text.lower().replace("names", "")
    by_module = text_of(difference(change_of_strings("a.words"), change("b.w")), stat=True)
    assert by_module.splitlines()[-2:] == [
        "  a             1     2 of 4 (50.0%)",
        "  b             1  1 of 1,000 (0.1%)   1.0e-3    1.0e-4",
    ]


def test_what_has_no_length_has_no_angle() -> None:
    assert "nan" not in text_of(difference(change("w", cosine=NAN)), width=200)


def test_all_columns_where_there_is_room() -> None:
    assert lines_of(difference(change("w")), width=200)[-2:] == [
        "  tensor             differ  max |Δ|  at      values         mean |Δ|  relative      L2    cosine",
        "  w       1 of 1,000 (0.1%)   1.0e-3  [3, 5]  0.125 → 0.126    1.0e-6    1.0e-4  1.0e-3  1.000000",
    ]


@pytest.mark.parametrize("width", [40, 60, 80, 100, 120])
def test_tables_keep_to_the_width(width: int) -> None:
    found = difference(*(change(f"transformer.layers.{at}.attention.q_proj.weight") for at in range(3)))
    heading, *rows = lines_of(found, width=max(width, 72))[3:6]
    assert all(len(line) <= max(width, 72) for line in (heading, *rows))
    assert "relative" in heading and "max |Δ|" in heading


def test_table_is_cut_and_says_so() -> None:
    found = difference(*(change(f"w{at:02}", l2=at) for at in range(50)), compared=50)
    text = lines_of(found)
    assert len([line for line in text if re.match(r"  w\d\d ", line)]) == 40
    assert text[3].startswith("  w49 ")
    assert text[-1] == "  … and 10 more (--all shows them)"
    assert len([line for line in lines_of(found, all=True) if re.match(r"  w\d\d ", line)]) == 50


def test_lists_are_cut_and_say_so() -> None:
    found = difference(added=tuple(facts(f"w{at}") for at in range(50)))
    assert len(lines_of(found)) == 2 + 40 + 1
    assert len(lines_of(found, all=True)) == 2 + 50


def test_order_of_the_table() -> None:
    found = difference(
        change("near", l2=1.0),
        change("far", l2=2.0),
        change("from-zero", norm_a=0.0),
        change("nan", non_finite=1),
        change("moment", l2=9.0, role=Role.OPTIMIZER),
        retyped("type"),
        reshaped("shape"),
    )
    rows = [line.split()[0] for line in lines_of(found)[4:11]]
    assert rows == ["shape", "type", "from-zero", "nan", "far", "near", "moment"]


def test_by_module() -> None:
    found = difference(
        change("a.b.w", count=2, size=4, max_abs=0.5, l2=3.0, norm_a=6.0),
        change("a.b.v", count=1, size=6, max_abs=NAN, l2=4.0, norm_a=8.0),
        change("c", l2=1.0, norm_a=0.0),
        reshaped("d.w"),
    )
    assert lines_of(found, stat=True)[3:] == [
        "  module  changed             differ  max |Δ|  relative",
        "  a.b           2    3 of 10 (30.0%)      0.5       0.5",
        "  c             1  1 of 1,000 (0.1%)   1.0e-3       inf",
        "  d             1",
    ]


def test_modules_that_differ_in_numbers_are_one_where_there_are_many() -> None:
    found = difference(*(change(f"layers.{at}.{leaf}.w") for at in range(30) for leaf in "qk"))
    assert [line.split()[:2] for line in lines_of(found, stat=True)[4:]] == [
        ["layers.*.q", "30"],
        ["layers.*.k", "30"],
    ]
    assert len(lines_of(found, stat=True, all=True)) == 4 + 60


def test_names_alone() -> None:
    found = difference(
        change("w"),
        change("v", "module.v"),
        removed=("old",),
        added=("new\n",),
        renamed=(("fc", "head"),),
    )
    assert text_of(found, names_only=True) == "M\tw\nM\tv → module.v\nR\tfc\thead\nD\told\nA\tnew\\n"
    assert text_of(difference(renamed=(("fc", "head"),), rename_counts=False), names_only=True) == ""


def test_nothing_from_a_file_reaches_the_terminal_unescaped() -> None:
    found = difference(
        change(HOSTILE, at_a=HOSTILE, at_b=HOSTILE + "x"),
        reshaped(HOSTILE),
        removed=(HOSTILE,),
        added=(HOSTILE,),
        renamed=((HOSTILE, HOSTILE),),
        values=(
            (HOSTILE, HOSTILE, [HOSTILE]),
            (HOSTILE, MISSING, {HOSTILE: HOSTILE}),
        ),
        reported=((HOSTILE, HOSTILE, HOSTILE), (HOSTILE, HOSTILE, MISSING)),
        rules={HOSTILE: 1},
        notes=(HOSTILE,),
        broken=((HOSTILE, "a", HOSTILE),),
        not_compared=(HOSTILE,),
    )
    for colour in (False, True):
        for text in (
            text_of(found, colour=colour),
            text_of(found, stat=True),
            text_of(found, names_only=True),
        ):
            bare = re.sub(r"\x1b\[\d+m", "", text)
            assert all(character.isprintable() or character in "\n\t" for character in bare)


def test_colours_as_git_has_them() -> None:
    found = difference(removed=("a",), added=("b",))
    assert "\x1b[31m- a  float32 10×2\x1b[0m\n\x1b[32m+ b  float32 10×2\x1b[0m" in text_of(found, colour=True)
    assert "\x1b" not in text_of(found)
