"""What people read of a difference: whole answers."""

from __future__ import annotations

import re

import pytest

from ckpttool import Role
from tests.support.golden import Golden
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
SMALL = [change("layers.7.q.weight"), change("layers.7.q.bias", max_abs=1e-6), change("head", max_abs=0.0005)]
EPOCH = ("epoch", 3, 4)
RENAMED = ("fc.weight", "head.weight")
MANY_VALUES = (
    *(EPOCH, ("loss", 0.5, 0.4), ("config.name", "x" * 100, "y"), ("config.width", 4, 5), ("a", 1, 2)),
    *(("gone", 1, MISSING), ("new", MISSING, 1)),
)
SUMMARIES = {
    "small changes": difference(*SMALL, values=(EPOCH,)),
    "equal": difference(),
    "equal by a rule": difference(rules={"Dense kernel": 3}),
    "no tensors": difference(compared=0),
    "values alone": difference(values=(EPOCH,)),
    "one added": difference(added=("head.weight",)),
    "removed and added": difference(removed=("head.a", "head.b"), added=("a", "b.c")),
    "removed of a module": difference(removed=("a.b.c", "a.b.d")),
    "removed of two depths": difference(removed=("a.b", "a")),
    "removed of no module": difference(removed=("v", "w")),
    "nothing in common": difference(compared=0, removed=("a",), added=("b",)),
    "two renamed": difference(renamed=(RENAMED, ("fc.bias", "head.bias"))),
    "one renamed": difference(renamed=(RENAMED,)),
    "renamed of several modules": difference(renamed=(("a.b", "c.d"), ("e.f", "g.h"))),
    "names do not count": difference(renamed=(("fc.weight", "dense.kernel"),), rename_counts=False),
    "shape": difference(reshaped("a.b")),
    "type": difference(*(retyped(str(at)) for at in range(258))),
    "all kinds": difference(reshaped("a"), retyped("b"), retyped("c", max_abs=0.5), change("d")),
    "not finite": difference(change("a", max_abs=NAN, non_finite=3)),
    "weights first": difference(
        change("state.step", role=Role.OPTIMIZER, max_abs=2.0), change("w"), change_of_strings("words")
    ),
    "broken": difference(broken=(("w", "a", "cut short"),)),
    "rtol": difference(tolerance={"rtol": 1e-3}),
    "rtol and atol": difference(tolerance={"rtol": 0.05, "atol": 1e-6}, rules={"Dense kernel": 3}),
    "bitwise": difference(tolerance={"bitwise": True}),
    "atol and values": difference(tolerance={"atol": 0.5}, values=(EPOCH,)),
    "one not compared": difference(not_compared=("the code: known only by its length",)),
    "many not compared": difference(not_compared=tuple("abcdefg")),
    "changed and not compared": difference(change("w"), not_compared=("x", "y"), values=(EPOCH,)),
    "strings": difference(change_of_strings("words")),
    "many values": difference(values=MANY_VALUES),
    "one module": difference(change("head.weight"), change("head.bias")),
    "one tensor": difference(change("head.weight")),
    "few modules": difference(change("a.b.w"), change("a.c.w"), change("d")),
    "in no module": difference(change("w"), change("a.b")),
    "many modules in one": difference(*(change(f"layers.{at}.w") for at in range(9))),
    "many modules": difference(*(change(f"m{at}.w") for at in range(9))),
    "modules in two": difference(*(change(f"a.{at}.w") for at in range(9)), change("b.0.w")),
    "a module and moments": difference(
        change("m.fc.w"), *(change(f"o.{at}.x", role=Role.OPTIMIZER) for at in range(9))
    ),
    "moments alone": difference(*(change(f"o.{at}", role=Role.OPTIMIZER) for at in range(2))),
    "all moved": difference(change("a.b"), change("a.c"), compared=2),
}


def test_summary(golden: Golden) -> None:
    golden({name: "\n".join(lines_of(found)[:2]).rstrip() for name, found in SUMMARIES.items()})
    assert text_of(difference()) == lines_of(difference())[0]  # equal is one line


def test_what_is_not_compared_is_never_called_equal(golden: Golden) -> None:
    for found in (difference(broken=(("w", "b", "x"),)), difference(not_compared=("w",))):
        assert not found.equal
        assert not lines_of(found)[0].startswith("equal")
        assert "not" in lines_of(found)[0]
    found = difference(not_compared=("the code", *(f"w{at}" for at in range(50))))
    golden(text_of(found))
    assert lines_of(found, all=True)[-1] == "? not compared: w49"


# The whole ------------------------------------------------------------------------------------------


EVERYTHING = difference(
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
UUIDS = (
    ("fingerprint.uuid", "1172" * 10, "3101" * 10),
    ("fingerprint.checkpoint_hash", "de64", "d0e4"),
    ("serial", 1, 2),
    ("fingerprint", MISSING, {"uuid": "1172" * 10}),
)


def test_whole_answers(golden: Golden) -> None:
    names = difference(renamed=tuple((f"a{at}", f"b{at}") for at in range(10)), rename_counts=False)
    strings = difference(change_of_strings("a.words"), change_of_strings("a.names"))
    golden(
        {
            "everything": text_of(EVERYTHING, width=130),
            "other names of another framework": text_of(names),
            "what identifies a save is named alone": text_of(difference(reported=UUIDS)),
            "strings have no distance": text_of(strings, width=200),
            "all columns": text_of(difference(change("w")), width=200),
            "colours as git has them": ascii(text_of(difference(removed=("a",), added=("b",)), colour=True)),
        }
    )
    assert "a9 = b9" in text_of(names, all=True)
    assert "nan" not in text_of(difference(change("w", cosine=NAN)), width=200)
    assert "\x1b" not in text_of(EVERYTHING)


@pytest.mark.parametrize("width", [40, 60, 80, 100, 120])
def test_tables_keep_to_the_width(width: int) -> None:
    found = difference(*(change(f"transformer.layers.{at}.attention.q_proj.weight") for at in range(3)))
    heading, *rows = lines_of(found, width=max(width, 72))[3:6]
    assert all(len(line) <= max(width, 72) for line in (heading, *rows))
    assert "relative" in heading and "max |Δ|" in heading


def test_tables_and_lists_are_cut_and_say_so(golden: Golden) -> None:
    found = difference(*(change(f"w{at:02}", l2=at) for at in range(50)), compared=50)
    text = lines_of(found)
    assert [line[2:5] for line in text if re.match(r"  w\d\d ", line)] == [
        f"w{at}" for at in range(49, 9, -1)
    ]
    assert len([line for line in lines_of(found, all=True) if re.match(r"  w\d\d ", line)]) == 50
    golden(text[-1])
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


def test_by_module_and_by_name(golden: Golden) -> None:
    found = difference(
        change("a.b.w", count=2, size=4, max_abs=0.5, l2=3.0, norm_a=6.0),
        change("a.b.v", count=1, size=6, max_abs=NAN, l2=4.0, norm_a=8.0),
        change("c", l2=1.0, norm_a=0.0),
        reshaped("d.w"),
    )
    many = difference(*(change(f"layers.{at}.{leaf}.w") for at in range(30) for leaf in "qk"))
    named = difference(
        change("w"),
        change("v", "module.v"),
        removed=("old",),
        added=("new\n",),
        renamed=(("fc", "head"),),
    )
    golden(
        {
            "modules": text_of(found, stat=True),
            "strings": text_of(difference(change_of_strings("a.words"), change("b.w")), stat=True),
            "numbered modules": text_of(many, stat=True),
            "names": text_of(named, names_only=True),
        }
    )
    assert len(lines_of(many, stat=True, all=True)) == 4 + 60
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
    for options in ({}, {"colour": True}, {"stat": True}, {"names_only": True}):
        bare = re.sub(r"\x1b\[\d+m", "", text_of(found, **options))
        assert all(character.isprintable() or character in "\n\t" for character in bare)
