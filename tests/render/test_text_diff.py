"""What people read of a difference: whole answers."""

from __future__ import annotations

import re
from typing import Any

import pytest

from ckpttool import Difference
from ckpttool.comparing.compare import Side
from ckpttool.comparing.statistics import Statistics, Tolerance
from ckpttool.dtypes import BY_NAME
from ckpttool.ops.difference import ABSENT, Broken, Change, Described, Facts, ValueChange
from ckpttool.render.diff_summary import changed_modules, common_module, moved_line, summary_line, two_values
from ckpttool.render.numbers import amount, share
from ckpttool.render.text_diff import diff_text, name_only_text
from ckpttool.tensor import Role

F32, BF16 = BY_NAME["float32"], BY_NAME["bfloat16"]
NAN, INF = float("nan"), float("inf")
HOSTILE = "\x1b[2Ja\nb\u202e[red]c[/red]"


def facts(name: str, shape: tuple[int, ...] = (10, 2), dtype: Any = F32, role: Role = Role.WEIGHTS) -> Facts:
    return Facts(name, role, dtype, shape, 80)


def statistics(**more: Any) -> Statistics:
    """Return those of one element out of 1,000 that moved from 0.125 to 0.126."""
    told: dict[str, Any] = {
        "size": 1000,
        "count": 1,
        "max_abs": 0.001,
        "mean_abs": 0.000001,
        "max_rel": 0.008,
        "l2": 0.001,
        "cosine": 0.9999999,
        "norm_a": 10.0,
        "norm_b": 10.0,
        "where": (3, 5),
        "at_a": 0.125,
        "at_b": 0.126,
    }
    return Statistics(**told | more)


def change(name: str, other: str | None = None, role: Role = Role.WEIGHTS, **more: Any) -> Change:
    return Change(
        a=facts(name, role=role),
        b=facts(other or name, role=role),
        kind="values",
        statistics=statistics(**more),
    )


def strings(name: str) -> Change:
    """Return a change of two strings of four: they have no distance."""
    nothing = dict.fromkeys(("max_abs", "mean_abs", "max_rel", "l2", "cosine", "norm_a", "norm_b"), NAN)
    return change(name, **nothing, size=4, count=2, where=(1,), at_a="ab", at_b="c")


def reshaped(name: str) -> Change:
    return Change(a=facts(name, (2, 10)), b=facts(name, (10, 2)), kind="shape")


def retyped(name: str, **more: Any) -> Change:
    found = statistics(**more) if more else None
    return Change(a=facts(name), b=facts(name, dtype=BF16), kind="dtype", statistics=found)


def difference(*changed: Change, compared: int = 258, **more: Any) -> Difference:
    side = Described("a.pth", "pytorch", "zip", "pytorch", 1_000_000_000, compared, 1000)
    told = {"a": side, "b": side, "compared": compared, "unchanged": compared - len(changed)} | more
    told = {"compared_nbytes": 980_000_000} | told
    return Difference(changed=changed, **told)


# The sentence ---------------------------------------------------------------------------------------


SMALL = [change("layers.7.q.weight"), change("layers.7.q.bias", max_abs=1e-6), change("head", max_abs=0.0005)]
EPOCH = ValueChange("epoch", 3, 4)


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
        (difference(added=(facts("head.weight"),)), "1 added (head.weight), 258 tensors equal"),
        (
            difference(removed=(facts("head.a"), facts("head.b")), added=(facts("a"), facts("b.c"))),
            "2 removed (head.*), 2 added, 258 tensors equal",
        ),
        (
            difference(compared=0, removed=(facts("a"),), added=(facts("b"),)),
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
            difference(broken=(Broken("w", Side.A, "cut short"),)),
            "1 tensor could not be compared, 258 tensors equal",
        ),
        (
            difference(tolerance=Tolerance(rtol=1e-3)),
            "equal within rtol 1e-3: 258 tensors, 980 MB compared",
        ),
        (
            difference(tolerance=Tolerance(rtol=0.05, atol=1e-6), rules={"Dense kernel": 3}),
            "equal in value within rtol 0.05 and atol 1e-6: 258 tensors, 980 MB compared",
        ),
        (difference(tolerance=Tolerance(bitwise=True)), "equal: 258 tensors, 980 MB compared"),
        (
            difference(tolerance=Tolerance(atol=0.5), values=(EPOCH,)),
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
            difference(strings("words"), change("w")),
            "2 of 258 tensors changed, max |Δ| 1.0e-3 in w",
        ),
        (difference(strings("words")), "1 of 258 tensors changed"),
        (
            difference(
                values=(
                    EPOCH,
                    ValueChange("loss", 0.5, 0.4),
                    ValueChange("config.name", "x" * 100, "y"),
                    ValueChange("config.width", 4, 5),
                    ValueChange("a", 1, 2),
                    ValueChange("gone", 1, ABSENT),
                    ValueChange("new", ABSENT, 1),
                )
            ),
            "258 tensors equal; epoch 3 → 4, loss 0.5 → 0.4, config.width 4 → 5, 2 more values changed, "
            "1 value removed, 1 value added",
        ),
    ],
)
def test_summary(found: Difference, said: str) -> None:
    assert summary_line(found) == said


@pytest.mark.parametrize(
    "found", [difference(broken=(Broken("w", Side.B, "x"),)), difference(not_compared=("w",))]
)
def test_what_is_not_compared_is_never_called_equal(found: Difference) -> None:
    assert not found.equal
    assert not summary_line(found).startswith("equal")
    assert "not" in summary_line(found)


def test_what_is_not_compared_is_listed() -> None:
    found = difference(not_compared=("the code", *(f"w{at}" for at in range(50))))
    assert lines(diff_text(found))[:4] == [
        "no difference found, but 51 things were not compared: the code, w0, w1 and 48 more",
        "",
        "? not compared: the code",
        "? not compared: w0",
    ]
    assert lines(diff_text(found))[-1] == "  … and 11 more (--all shows them)"
    assert lines(diff_text(found, all=True))[-1] == "? not compared: w49"


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
def test_what_moved(changed: list[Change], said: str | None) -> None:
    assert moved_line(difference(*changed)) == said


def test_where_everything_moved_nothing_else_is_said() -> None:
    assert moved_line(difference(change("a.b"), change("a.c"), compared=2)) is None


def test_modules() -> None:
    assert common_module(["a.b.c", "a.b.d"]) == "a.b"
    assert common_module(["a.b", "a"]) == common_module(["w"]) == ""
    assert changed_modules(["w", "a.b"]) == ["w", "a.*"]


# The whole ------------------------------------------------------------------------------------------


def lines(text: str) -> list[str]:
    return text.splitlines()


def test_equal_is_one_line() -> None:
    assert diff_text(difference()) == "equal: 258 tensors, 980 MB compared"


def test_everything() -> None:
    found = difference(
        change("layers.7.q.weight", l2=0.002),
        change("layers.7.q.bias", size=4, count=4, where=(0,), at_a=-1.0, at_b=-1.25, max_abs=0.25, l2=0.5),
        reshaped("layers.7.k.weight"),
        retyped("layers.7.v.weight"),
        removed=(facts("old.bias", (10,)),),
        added=(facts("head.weight"),),
        renamed=(("fc.weight", "out.weight"),),
        values=(EPOCH, ValueChange("learning_rate", 0.1, 0.05), ValueChange("note", ABSENT, "hi")),
        reported=(
            ValueChange("format", "pytorch zip", "safetensors"),
            ValueChange("seed", 1, ABSENT),
            ValueChange("bn.num_batches_tracked", ABSENT, "int64 tensor"),
        ),
        rules={"Dense kernel (I, O) = Linear weight (O, I)": 3},
        notes=("module. was taken off the names of the second side",),
        broken=(Broken("x.weight", Side.B, "it ends too early"),),
    )
    assert lines(diff_text(found, width=130)) == [
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
        "  too narrow for: mean |Δ|, cosine",
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
    assert lines(diff_text(found)) == [
        "equal in value: 258 tensors, 980 MB compared",
        "",
        f"  called otherwise in B: {told}, and 6 more",
    ]
    assert "a9 = b9" in diff_text(found, all=True)


def test_what_identifies_a_save_is_named_alone() -> None:
    found = difference(
        reported=(
            ValueChange("fingerprint.uuid", "1172" * 10, "3101" * 10),
            ValueChange("fingerprint.checkpoint_hash", "de64", "d0e4"),
            ValueChange("serial", 1, 2),
            ValueChange("fingerprint", ABSENT, {"uuid": "1172" * 10}),
        )
    )
    assert lines(diff_text(found))[2:] == [
        "  not counted: fingerprint, serial 1 → 2",
        "  not counted, only in B: fingerprint",
    ]


def test_strings_have_no_distance() -> None:
    text = diff_text(difference(strings("a.words"), strings("a.names")), width=200)
    assert lines(text)[3:] == [
        "  tensor           differ  at   values",
        "  a.words  2 of 4 (50.0%)  [1]  'ab' → 'c'",
        "  a.names  2 of 4 (50.0%)  [1]  'ab' → 'c'",
    ]
    assert "nan" not in text.lower().replace("names", "")
    by_module = diff_text(difference(strings("a.words"), change("b.w")), stat=True)
    assert lines(by_module)[-2:] == [
        "  a             1     2 of 4 (50.0%)",
        "  b             1  1 of 1,000 (0.1%)   1.0e-3    1.0e-4",
    ]


def test_what_has_no_length_has_no_angle() -> None:
    assert "nan" not in diff_text(difference(change("w", cosine=NAN)), width=200)


def test_all_columns_where_there_is_room() -> None:
    assert lines(diff_text(difference(change("w")), width=200))[-2:] == [
        "  tensor             differ  max |Δ|  at      values         mean |Δ|  relative      L2    cosine",
        "  w       1 of 1,000 (0.1%)   1.0e-3  [3, 5]  0.125 → 0.126    1.0e-6    1.0e-4  1.0e-3  1.000000",
    ]


@pytest.mark.parametrize("width", [40, 60, 80, 100, 120])
def test_tables_keep_to_the_width(width: int) -> None:
    found = difference(*(change(f"transformer.layers.{at}.attention.q_proj.weight") for at in range(3)))
    heading, *rows = lines(diff_text(found, width=max(width, 72)))[3:6]
    assert all(len(line) <= max(width, 72) for line in (heading, *rows))
    assert "relative" in heading and "max |Δ|" in heading


def test_table_is_cut_and_says_so() -> None:
    found = difference(*(change(f"w{at:02}", l2=at) for at in range(50)), compared=50)
    text = lines(diff_text(found))
    assert len([line for line in text if re.match(r"  w\d\d ", line)]) == 40
    assert text[3].startswith("  w49 ")
    assert text[-1] == "  … and 10 more (--all shows them)"
    assert len([line for line in lines(diff_text(found, all=True)) if re.match(r"  w\d\d ", line)]) == 50


def test_lists_are_cut_and_say_so() -> None:
    found = difference(added=tuple(facts(f"w{at}") for at in range(50)))
    assert len(lines(diff_text(found))) == 2 + 40 + 1
    assert len(lines(diff_text(found, all=True))) == 2 + 50


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
    rows = [line.split()[0] for line in lines(diff_text(found))[4:11]]
    assert rows == ["shape", "type", "from-zero", "nan", "far", "near", "moment"]


def test_by_module() -> None:
    found = difference(
        change("a.b.w", count=2, size=4, max_abs=0.5, l2=3.0, norm_a=6.0),
        change("a.b.v", count=1, size=6, max_abs=NAN, l2=4.0, norm_a=8.0),
        change("c", l2=1.0, norm_a=0.0),
        reshaped("d.w"),
    )
    assert lines(diff_text(found, stat=True))[3:] == [
        "  module  changed             differ  max |Δ|  relative",
        "  a.b           2    3 of 10 (30.0%)      0.5       0.5",
        "  c             1  1 of 1,000 (0.1%)   1.0e-3       inf",
        "  d             1",
    ]


def test_modules_that_differ_in_numbers_are_one_where_there_are_many() -> None:
    found = difference(*(change(f"layers.{at}.{leaf}.w") for at in range(30) for leaf in "qk"))
    assert [line.split()[:2] for line in lines(diff_text(found, stat=True))[4:]] == [
        ["layers.*.q", "30"],
        ["layers.*.k", "30"],
    ]
    assert len(lines(diff_text(found, stat=True, all=True))) == 4 + 60


def test_names_alone() -> None:
    found = difference(
        change("w"),
        change("v", "module.v"),
        removed=(facts("old"),),
        added=(facts("new\n"),),
        renamed=(("fc", "head"),),
    )
    assert name_only_text(found) == "M\tw\nM\tv → module.v\nR\tfc\thead\nD\told\nA\tnew\\n"
    assert name_only_text(difference(renamed=(("fc", "head"),), rename_counts=False)) == ""


def test_nothing_from_a_file_reaches_the_terminal_unescaped() -> None:
    found = difference(
        change(HOSTILE, at_a=HOSTILE, at_b=HOSTILE + "x"),
        reshaped(HOSTILE),
        removed=(facts(HOSTILE),),
        added=(facts(HOSTILE),),
        renamed=((HOSTILE, HOSTILE),),
        values=(
            ValueChange(HOSTILE, HOSTILE, [HOSTILE]),
            ValueChange(HOSTILE, ABSENT, {HOSTILE: HOSTILE}),
        ),
        reported=(ValueChange(HOSTILE, HOSTILE, HOSTILE), ValueChange(HOSTILE, HOSTILE, ABSENT)),
        rules={HOSTILE: 1},
        notes=(HOSTILE,),
        broken=(Broken(HOSTILE, Side.A, HOSTILE),),
        not_compared=(HOSTILE,),
    )
    for colour in (False, True):
        for text in (diff_text(found, colour=colour), diff_text(found, stat=True), name_only_text(found)):
            bare = re.sub(r"\x1b\[\d+m", "", text)
            assert all(character.isprintable() or character in "\n\t" for character in bare)


def test_colours_as_git_has_them() -> None:
    found = difference(removed=(facts("a"),), added=(facts("b"),))
    assert "\x1b[31m- a  float32 10×2\x1b[0m\n\x1b[32m+ b  float32 10×2\x1b[0m" in diff_text(
        found, colour=True
    )
    assert "\x1b" not in diff_text(found)


# Amounts --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (0, "0"),
        (1, "1"),
        (0.001, "1.0e-3"),
        (0.00999, "1.0e-2"),
        (0.01, "0.01"),
        (0.12345, "0.123"),
        (123.4, "123"),
        (999.9, "1,000"),
        (1234.5, "1,234"),
        (12345.0, "1.2e4"),
        (-1e300, "-1.0e300"),
        (NAN, "NaN"),
        (INF, "inf"),
        (-INF, "-inf"),
    ],
)
def test_amount(value: float, said: str) -> None:
    assert amount(value) == said


@pytest.mark.parametrize(
    ("part", "whole", "said"),
    [
        (0, 5, "0%"),
        (5, 5, "100%"),
        (1, 3, "33.3%"),
        (1, 10_000, "<0.1%"),
        (9_999, 10_000, "99.9%"),
        (0, 0, "0%"),
    ],
)
def test_share(part: int, whole: int, said: str) -> None:
    assert share(part, whole) == said


@pytest.mark.parametrize(
    ("a", "b", "said"),
    [
        (0.125, 0.126, "0.125 → 0.126"),
        (1.0, 1.0 + 2**-52, "1 → 1.0000000000000002"),
        (0.0, -0.0, "0 → -0"),
        (NAN, 1.0, "NaN → 1"),
        (NAN, -INF, "NaN → -inf"),
        (3, 4, "3 → 4"),
        (2**63, 2**63 + 1, "9,223,372,036,854,775,808 → 9,223,372,036,854,775,809"),
        (1 + 2j, 1 + 3j, "1+2j → 1+3j"),
        ("a", "b", "'a' → 'b'"),
        (True, False, "True → False"),
    ],
)
def test_two_values(a: object, b: object, said: str) -> None:
    assert two_values(a, b) == said
