"""Plans of names: never two of one name, none that means something else, and in an order that works."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckpttool.runs.renaming.names import RenamePlan, fold_name, name_doubts, plan_names, unit_stem
from ckpttool.runs.renaming.rename import rename_operations
from ckpttool.runs.renaming.template import parse_template
from ckpttool.transaction.journal import Location, Move, Rewrite
from tests.support.directories import Entry

Make = Callable[..., Entry]


def planned(
    entries: Sequence[Entry],
    template: str,
    *,
    existing: Sequence[str] = (),
    left: dict[str, str] | None = None,
) -> RenamePlan:
    there = [*existing, *(name for entry in entries for name in entry.unit.members)]
    return plan_names(entries, parse_template(template), {"run": there}, left or {})


def named(plan: RenamePlan) -> dict[str, str]:
    return {one.entry.name: one.name for one in plan.renamings}


def refusals(plan: RenamePlan) -> dict[str, str]:
    return {os.path.basename(one.path): one.message for one in plan.refused}


def test_suffixes_and_members_stay(entry: Make) -> None:
    whole = [
        entry("model_epoch_3.pth"),
        entry("model_epoch_4.pth.tar"),
        entry("cp_epoch_5.weights.h5"),
        entry("ckpt-7", "ckpt-7.index", "ckpt-7.data-00000-of-00002", "ckpt-7.data-00001-of-00002",
                epoch=7),
        entry("old-8-?????-of-00002", "old-8-00000-of-00002", "old-8-00001-of-00002", epoch=8),
        entry("a.epoch_9.safetensors.index.json", "a.epoch_9.safetensors.index.json",
                "a.epoch_9-00001-of-00002.safetensors", "a.epoch_9-00002-of-00002.safetensors"),
        entry("m_epoch_2.safetensors.index.fp16.json", "m_epoch_2.safetensors.index.fp16.json",
                "m_epoch_2.fp16-00001-of-00002.safetensors"),
        entry("k_epoch_6.weights.json", "k_epoch_6.weights.json", "k_epoch_6_00000.weights.h5"),
        entry("p_epoch_1.pth", "p_epoch_1.pth", "p_epoch_1.pth.sha256",
                "p_epoch_1.pth.digests.json"),
    ]  # fmt: skip
    plan = planned(whole, "e{epoch:02d}")
    assert not plan.refused
    assert named(plan) == {
        "model_epoch_3.pth": "e03.pth",
        "model_epoch_4.pth.tar": "e04.pth.tar",
        "cp_epoch_5.weights.h5": "e05.weights.h5",
        "ckpt-7": "e07",
        "old-8-?????-of-00002": "e08-?????-of-00002",
        "a.epoch_9.safetensors.index.json": "e09.safetensors.index.json",
        "m_epoch_2.safetensors.index.fp16.json": "e02.safetensors.index.fp16.json",
        "k_epoch_6.weights.json": "e06.weights.json",
        "p_epoch_1.pth": "e01.pth",
    }
    members = {old: new for one in plan.renamings for old, new in one.members}
    assert members["ckpt-7.data-00001-of-00002"] == "e07.data-00001-of-00002"
    assert members["old-8-00001-of-00002"] == "e08-00001-of-00002"
    assert members["a.epoch_9-00002-of-00002.safetensors"] == "e09-00002-of-00002.safetensors"
    assert members["m_epoch_2.fp16-00001-of-00002.safetensors"] == "e02.fp16-00001-of-00002.safetensors"
    assert members["k_epoch_6_00000.weights.h5"] == "e06_00000.weights.h5"
    assert members["p_epoch_1.pth.digests.json"] == "e01.pth.digests.json"


def test_a_suffix_in_the_template_is_not_doubled(entry: Make) -> None:
    assert named(planned([entry("model_epoch_3.pth")], "{run}-e{epoch}.pth")) == {
        "model_epoch_3.pth": "model-e3.pth"
    }


def test_what_has_its_name_is_left(entry: Make) -> None:
    plan = planned([entry("m-e3.pth"), entry("m-e04.pth")], "{run}-e{epoch:02d}")
    assert named(plan) == {"m-e3.pth": "m-e03.pth"}
    assert [one.name for one in plan.same] == ["m-e04.pth"]
    assert plan.count == 2


def test_fields_from_inside_come_before_those_in_the_name(entry: Make) -> None:
    one = entry(
        "model_epoch_3.pth",
        epoch=7,
        step=100,
        counts_inside=(7, 100),
        loss=0.25,
        metrics={"acc": float("nan")},
    )
    assert named(planned([one], "{run}-e{epoch}-s{step}-{loss}-{acc?}")) == {
        "model_epoch_3.pth": "model-e7-s100-0.25.pth"
    }
    assert refusals(planned([one], "{run}-{acc}")) == {"model_epoch_3.pth": "no acc ({acc?} omits it)"}


def test_what_lacks_a_field_is_refused_by_name(entry: Make) -> None:
    plan = planned([entry("model_epoch_3.pth"), entry("final.pth")], "{run}-e{epoch}")
    assert refusals(plan) == {"final.pth": "no epoch ({epoch?} omits it)"}


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (".{run}-{epoch}", "hidden"),
        ("-{run}-{epoch}", "option"),
        ("~{epoch}", "home directory"),
        ("{epoch:>9}", "a space"),
        ("{run:_>252}-{epoch}", "bytes"),
        ("tmp-{run}-{epoch}", "being written"),
        ("{run}-{epoch:05d}-of-00007", "a shard"),
        ("{format?}", "no format"),
    ],
)
def test_names_that_would_mean_something_else(entry: Make, template: str, reason: str) -> None:
    one = entry("model_epoch_3.safetensors", format="x" if "format" in template else "safetensors")
    plan = planned([one], template)
    if reason == "no format":
        assert named(plan) == {"model_epoch_3.safetensors": "x.safetensors"}
    else:
        assert reason in refusals(plan)["model_epoch_3.safetensors"]


@pytest.mark.parametrize(
    ("name", "template", "reason"),
    [
        ("model_epoch_3", "checkpoint-{epoch}", "a save of the Hugging Face Trainer"),
        ("model_epoch_3", "checkpoint_{epoch}", "a Paddle Fluid save"),
        ("model_epoch_3", "latest{number?}", "which is reserved for pointers"),
        ("model_epoch_3", "checkpoint{number?}", "which is reserved for pointers"),
        ("model_epoch_3", "x{epoch}.sha256", "which is reserved for manifests"),
        ("model_epoch_3", "x{epoch}_temp", "being written"),
    ],
)
def test_reserved_names(entry: Make, name: str, template: str, reason: str) -> None:
    assert reason in refusals(planned([entry(name)], template))[name]


def test_every_member_fits_into_a_name(entry: Make) -> None:
    prefix = entry("c-7", "c-7.index", "c-7.data-00000-of-00001", epoch=7)
    assert "256 bytes" in refusals(planned([prefix], "{epoch:0236d}"))["c-7"]
    assert not planned([prefix], "{epoch:0235d}").refused
    long = entry("ü" * 120 + "_epoch_3.pth", epoch=3)
    assert "bytes (at most 255)" in refusals(planned([long], "{run}-{epoch:020d}"))[long.name]
    assert not planned([long], "{run}-e{epoch}").refused


def test_two_of_one_name_are_refused(entry: Make) -> None:
    plan = planned([entry("a_epoch_3.pth"), entry("b_epoch_3.pth"), entry("b_epoch_4.pth")], "e{epoch}")
    assert refusals(plan) == {
        name: "2 checkpoints would be named e3.pth: a_epoch_3.pth, b_epoch_3.pth"
        for name in ("a_epoch_3.pth", "b_epoch_3.pth")
    }


def test_what_stands_there_is_never_replaced(entry: Make) -> None:
    one = entry("a_epoch_3.pth")
    there = "which already exists"
    assert there in refusals(planned([one], "e{epoch}", existing=["e3.pth"]))[one.name]
    assert (
        "E3.PTH (which differs only in case)"
        in refusals(planned([one], "e{epoch}", existing=["E3.PTH"]))[one.name]
    )
    accents = entry("cafe\u0301_epoch_3.pth")
    plan = planned([accents], "caf\u00e9{epoch}", existing=["cafe\u03013.pth"])
    assert "only in case" in refusals(plan)[accents.name]
    assert (
        "would become a part of it"
        in refusals(planned([one], "e{epoch}", existing=["e3.pth.sha256"]))[one.name]
    )
    prefix = entry("c-7", "c-7.index", "c-7.data-00000-of-00001", epoch=7)
    stray = planned([prefix], "e{epoch}", existing=["e7.data-00001-of-00002"])
    assert "would become a part of it" in refusals(stray)["c-7"]
    kept = planned([one, entry("e3.pth")], "e{epoch}", left={"run/e3.pth": "damaged: x"})
    assert there in refusals(kept)[one.name]
    assert [one.message for one in kept.kept] == ["damaged: x"]


def test_names_that_differ_in_case_alone_are_refused(entry: Make) -> None:
    plan = planned([entry("Model_epoch_3.pth"), entry("model_epoch_3.pth")], "{run}-{epoch}")
    assert refusals(plan)["model_epoch_3.pth"] == (
        "2 checkpoints would be named Model-3.pth and model-3.pth (which differ only in case): "
        "Model_epoch_3.pth, model_epoch_3.pth"
    )
    many = planned([entry(f"{name}_epoch_3.pth") for name in "abcdef"], "e{epoch}")
    assert refusals(many)["f_epoch_3.pth"].endswith(
        ": a_epoch_3.pth, b_epoch_3.pth, c_epoch_3.pth and 3 more"
    )
    alone = planned([entry("Model_epoch_3.pth", epoch=3)], "model_epoch_{epoch}")
    assert named(alone) == {"Model_epoch_3.pth": "model_epoch_3.pth"}


NAMES = st.lists(
    st.from_regex(r"[abAB]{1,2}[-_](?:epoch_)?[0-9]{1,2}(?:\.pt|\.PT)?", fullmatch=True),
    min_size=1,
    max_size=8,
    unique=True,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    names=NAMES,
    inside=st.lists(st.integers(0, 12), min_size=8, max_size=8),
    existing=NAMES,
    template=st.sampled_from(
        ["{run}_epoch_{epoch}", "{run}-{epoch:02d}", "e{epoch}", "{run?}{epoch?}", "a_{epoch}"]
    ),
)
def test_never_two_of_one_name(
    entry: Make, names: list[str], inside: list[int], existing: list[str], template: str
) -> None:
    entries = [entry(name, epoch=epoch) for name, epoch in zip(names, inside, strict=False)]
    plan = planned(entries, template, existing=existing)
    wrong = {one.path for one in plan.refused}
    good = [one for one in plan.renamings if one.entry.path not in wrong]
    targets = [fold_name(new) for one in good for _, new in one.members]
    assert len(set(targets)) == len(targets)
    leaving = {old for one in plan.renamings for old, _ in one.members}
    assert set(targets).isdisjoint(fold_name(name) for name in {*names, *existing} - leaving)
    if not plan.refused:
        _follow(plan, {*names, *existing})


def _follow(plan: RenamePlan, there: set[str]) -> None:
    """Do the operations of a plan in a set of names, on a file system where case makes no difference."""
    listed = rename_operations(plan.renamings, [], [], "x")
    goal = (there - {old for one in plan.renamings for old, _ in one.members}) | {
        new for one in plan.renamings for _, new in one.members
    }
    found = {Location("directory", name) for name in there}
    linked: set[Location] = set()
    for one in listed.operations:
        assert isinstance(one, Move)
        assert one.source in found
        if one.target.root == "directory":
            linked.add(one.source)
        else:
            found.remove(one.source)
        assert one.target.path not in {
            location.path for location in found if location.root == one.target.root
        }
        if one.target.root == "directory":
            assert fold_name(one.target.path) not in {
                fold_name(location.path) for location in found if not location.is_private
            }
        found.add(one.target)
    assert found - linked == {Location("directory", name) for name in goal}


def test_chains_and_cycles_go_through_the_stage(entry: Make) -> None:
    chain = [entry("m_1.pt", epoch=2), entry("m_2.pt", epoch=3), entry("m_3.pt", epoch=4)]
    _follow(planned(chain, "m_{epoch}"), {"m_1.pt", "m_2.pt", "m_3.pt"})
    cycle = planned(
        [entry("m_1.pt", epoch=2), entry("m_2.pt", epoch=1), entry("m_5.pt", epoch=6)], "m_{epoch}"
    )
    _follow(cycle, {"m_1.pt", "m_2.pt", "m_5.pt"})
    moves = [
        one for one in rename_operations(cycle.renamings, [], [], "x").operations if isinstance(one, Move)
    ]
    assert [one.source.path for one in moves if one.is_rename] == ["m_5.pt"]
    assert {one.source.path for one in moves if one.target.root == "stage"} == {"m_1.pt", "m_2.pt"}


def test_an_index_that_takes_the_name_of_another_is_written_once() -> None:
    rewrites = [
        Rewrite("b", None, "to b", like="a"),
        Rewrite("a", "was a", None, like="b"),
        Rewrite("c", None, "to c", like="b"),
        Rewrite("b", "was b", None, like="c"),
        Rewrite("latest", "a", "b"),
    ]
    assert rename_operations([], rewrites, [], "x").pointers == (
        Rewrite("c", None, "to c", like="b"),
        Rewrite("b", "was b", "to b", like="b"),
        Rewrite("latest", "a", "b"),
        Rewrite("a", "was a", None, like="b"),
    )


def test_stems(entry: Make) -> None:
    assert unit_stem(entry("a.b.pth")) == "a.b"
    assert unit_stem(entry("n.pdmodel", "n.pdmodel", "n.pdiparams", format="paddle")) == "n"


def doubts_of(entries: Sequence[Entry], template: str) -> str:
    return "\n".join(name_doubts(planned(entries, template).renamings, parse_template(template)))


def test_doubts(entry: Make) -> None:
    good = [entry("model_epoch_3.pth", saved_at=0.0), entry("model_epoch_4.pth", saved_at=0.0)]
    assert doubts_of(good, "{run}-e{epoch:04d}") == ""
    assert "its epoch can't be read from this name" in doubts_of(good, "{run}.x{epoch}y")
    outside = [entry("model_epoch_3.pth", saved_at=0.0, counts_inside=(None, None))]
    assert "its epoch is recorded only in its old name" in doubts_of(outside, "{run}-{format}")
    assert "read as step 3" in doubts_of(good, "{run}-step{epoch}")
    assert "which is never pruned" in doubts_of(good, "{run}-best-e{epoch}")
    assert "the next rename by this template would name it" in doubts_of(good, "{name}-e{epoch}")
    assert "which orders it, isn't in" in doubts_of([entry("ckpt-5", saved_at=0.0)], "{run}-{format}")
    numbered = [entry("ckpt-5", saved_at=0.0), entry("ckpt-0", saved_at=0.0)]
    assert (
        "run/ckpt-5 -> ckpt-n5 (and 1 more): the number in its old name, which orders it, can't be read"
        in (doubts_of(numbered, "{run}-n{number}"))
    )
    again = doubts_of(good, "{name}-e{epoch}").splitlines()
    assert [line.partition(":")[0] for line in again if "the next rename" in line] == [
        "run/model_epoch_3.pth -> model_epoch_3-e3.pth (and 1 more)"
    ]
    assert doubts_of(
        [entry("m_epoch_3.pth", metrics={"acc": 0.5}, saved_at=0.0)], "{run}-e{epoch}-{acc}"
    ) == ("run/m_epoch_3.pth -> m-e3-0.5.pth: the new name doesn't label its number as acc (use acc={acc})")
    scored = [entry("m_epoch_3_val_loss_0.5.pth", metrics={"val_loss": 0.5}, saved_at=0.0)]
    assert "val_loss is in its old name" in doubts_of(scored, "{run}-e{epoch}")
    undated = [entry("model_epoch_3.pth", modified=86_400 * 10**9)]
    assert "its date is that of its file" in doubts_of(undated, "{run}-{date}-e{epoch}")
    parted = doubts_of([replace(one, group="g") for one in good], "{run}{epoch}x-e{epoch}")
    assert "g: the new names split this series into 2" in parted
