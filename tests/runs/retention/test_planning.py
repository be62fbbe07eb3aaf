"""From a directory to a plan: groups that somebody chooses, policies by path, failed runs, reasons."""

from __future__ import annotations

import os
import shutil
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from ckpttool import Policy, PruneRequest, UsageError, open_checkpoint
from ckpttool.core.tensor import Extent
from ckpttool.testing import recorded_reads
from tests.support.directories import (
    Entry,
    faulty_entry,
    incomplete,
)
from tests.support.retention import (
    Pruned,
    dry_run,
    policies,
    removed_names,
    why,
    why_in,
)
from tests.support.runs import make_run
from tests.support.saves import START, Facts, left_alone, save, save_all, series_in

NO_RULE = "no rule in the configuration matches it"
FINITE = "newest intact and finite one of a failed run"
NOT_COUNTED = "nothing says that its numbers count saves: could be different models"
EQUALLY_LONG = "all have the same epoch and step inside: could be different models"
UNORDERED = "no number in its names or contents shows which is older"


def _planned(directory: Path, **request: Any) -> Pruned:
    return dry_run(directory, **{"depth": "quick", **request})


# Groups that somebody chooses -----------------------------------------------------------------------


A = {"": ["a/m_epoch_1.pt", "a/m_epoch_2.pt"], "warm": ["a/warm_epoch_3.pt"], "opt": ["a/opt_epoch_4.pt"]}
B = {"": ["b/m_epoch_4.pt", "b/m_epoch_6.pt"], "safetensors": ["b/m_epoch_5.safetensors"]}
WHOLE, PART = "partial, 1 tensor of weights, 6 parameters", "partial, 2 tensors, 0 parameters"
BY_NAME = {
    "a/m_epoch_*.pt": A[""],
    "a/opt_epoch_*.pt": A["opt"],
    "a/warm_epoch_*.pt": A["warm"],
    "b/m_epoch_*.pt": B[""],
    "b/m_epoch_*.safetensors": B["safetensors"],
}


@pytest.mark.parametrize(
    ("by", "expected"),
    [
        (None, BY_NAME),
        ("prefix", BY_NAME),
        (
            "parent",
            {
                f"a/* ({WHOLE})": [*A[""], *A["warm"]],
                f"a/* ({PART})": A["opt"],
                "b/*": [B[""][0], *B["safetensors"], B[""][1]],
            },
        ),
        (
            "format",
            {
                f"a/* (format pytorch) ({WHOLE})": [*A[""], *A["warm"]],
                f"a/* (format pytorch) ({PART})": A["opt"],
                "b/* (format pytorch)": B[""],
                "b/* (format safetensors)": B["safetensors"],
            },
        ),
        (
            "none",
            {
                f"all checkpoints ({WHOLE})": [*A[""], *A["warm"], B[""][0], *B["safetensors"], B[""][1]],
                f"all checkpoints ({PART})": A["opt"],
            },
        ),
    ],
)
def test_what_makes_a_series(tmp_path: Path, by: str | None, expected: dict[str, list[str]]) -> None:
    """The last of ``b`` is cut short, and goes with the only series of its name."""
    import torch

    save(tmp_path / A["opt"][0], weights=None, state=True)
    (tmp_path / "b").mkdir()
    for name in (*A[""], *A["warm"], *B[""]):
        torch.save({"w": torch.zeros(2, 3)}, tmp_path / name)
    os.truncate(tmp_path / B[""][1], 900)
    save_file({"w": np.zeros((2, 3), np.float32)}, tmp_path / B["safetensors"][0])
    assert series_in(tmp_path, group_by=by) == expected


def test_a_series_over_directories_is_planned_as_one(series: Path) -> None:
    other = series / "more"
    other.mkdir()
    for epoch in (1, 2, 3):
        shutil.move(series / f"model_epoch_{epoch}.pth", other)
    told = {"policy": Policy(keep_last=8), "recursive": True}
    assert removed_names(_planned(series, **told)) == []
    for by in ("parent", "prefix", "format"):
        assert removed_names(_planned(series, **{**told, "policy": Policy(keep_last=1)}, group_by=by)) == [
            *(f"model_epoch_{epoch}.pth" for epoch in range(1, 3)),
            *(f"model_epoch_{epoch}.pth" for epoch in range(4, 10)),
        ]
    planned = _planned(series, **told, group_by="none")
    assert removed_names(planned) == ["model_epoch_1.pth", "model_epoch_2.pth"]
    assert [one.key for one in planned.plan.groups] == ["all checkpoints"]


@pytest.mark.parametrize(
    ("saves", "by", "why"),
    [
        ({"alpha.pt": {}, "beta.pt": {}}, "parent", UNORDERED),
        ({"alpha.pt": {"epoch": 9, "step": 900}, "beta.pt": {"epoch": 9, "step": 900}}, "none", EQUALLY_LONG),
        ({"alpha.pt": {"epoch": 1}, "beta.pt": {"epoch": 2}}, "none", None),
        # A doubt about a part is one about all.
        ({"digit_3.pt": {}, "digit_4.pt": {}, "m_epoch_5.pt": {}}, "parent", NOT_COUNTED),
    ],
)
def test_what_nothing_orders_is_left_alone_though_somebody_makes_it_one_series(
    tmp_path: Path, saves: dict[str, Facts], by: str, why: str | None
) -> None:
    (told,) = left_alone(save_all(tmp_path, saves), group_by=by).values()
    assert (told is None) == (why is None) and (told or "").startswith(why or "")


# Policies by path, and a limit ----------------------------------------------------------------------


def test_each_series_has_the_policy_of_its_rule(series: Path) -> None:
    for epoch in (1, 2, 3):
        shutil.copy2(series / f"model_epoch_{epoch}.pth", series / f"final_epoch_{epoch}.pth")
    one = Policy(keep_last=1)
    by_path = policies(Policy(keep_last=9), ("final_*", one), ("x", one, "c:3"), directory=series)
    planned = _planned(series, policies=by_path)
    assert removed_names(planned) == ["final_epoch_1.pth", "final_epoch_2.pth", "model_epoch_1.pth"]
    assert "c:3: no series matches 'x'" in planned.warnings


def test_what_no_rule_is_for_is_left_alone_and_no_problem(series: Path) -> None:
    by_path = policies(None, ("other/**", Policy(keep_last=1)), directory=series)
    planned = _planned(series, policies=by_path)
    (one,) = planned.plan.groups
    assert (one.skipped, one.remove, planned.problems) == (NO_RULE, (), ())


def test_nothing_to_go_by_is_refused(series: Path) -> None:
    for told in ({}, {"policies": policies(None)}):
        with pytest.raises(UsageError, match="no rule says which checkpoints to keep"):
            PruneRequest(directory=str(series), **told)


@pytest.mark.parametrize(("limit", "allowed"), [("7", True), ("6", False), ("70%", True), ("69.9%", False)])
def test_a_limit_refuses_the_whole(series: Path, limit: str, allowed: bool) -> None:
    told = {"policy": Policy(keep_last=3), "max_delete": limit}
    if allowed:
        assert len(removed_names(_planned(series, **told))) == 7
        return
    with pytest.raises(UsageError) as refusal:
        _planned(series, **told)
    said = f"7 of 10 checkpoints would be removed, more than --max-delete {limit} allows; nothing was removed"
    assert str(refusal.value) == said


def test_what_always_stays_may_take_more_than_the_limit(series: Path) -> None:
    planned = _planned(series, policy=Policy(max_size=1))
    size = (series / "model_epoch_10.pth").stat().st_size
    assert len(removed_names(planned)) == 9
    (problem,) = planned.problems
    told = f"{_size(size)} kept, {_size(size - 1)} more than --max-size 1 byte"
    assert problem.message == told


def test_what_rules_keep_passes_the_limit_and_is_told_where_it_alone_does(series: Path) -> None:
    size = (series / "model_epoch_10.pth").stat().st_size
    for names, count in ((("*_1.pth",), 0), (("*_1.pth", "*_2.pth"), 1)):
        planned = _planned(series, policy=Policy(keep_names=names, max_size=2 * size + 99))
        assert len(removed_names(planned)) == 8 - len(names)
        (one,) = planned.plan.groups
        assert one.excess is not None
        assert len(planned.problems) == count


def test_what_was_saved_together_leaves_the_total_together(tmp_path: Path) -> None:
    for epoch in range(1, 6):
        for name, count in (("model", 4), ("optim", 400)):
            path = tmp_path / f"{name}_{epoch}.npz"
            np.savez(path, **{f"{name}.w": np.zeros(count)})
            when = 1_760_000_000 + epoch * 86_400 + (name == "optim")
            os.utime(path, (when, when))
    each = sum((tmp_path / f"{name}_1.npz").stat().st_size for name in ("model", "optim"))
    for over in (0, 10, each - 10):  # where there is room for one of them alone, too
        planned = _planned(tmp_path, policy=Policy(max_total_size=2 * each + over))
        kept = {f"{name}_{epoch}.npz" for name in ("model", "optim") for epoch in (4, 5)}
        assert {one.entry.name for group in planned.plan.groups for one in group.keep} == kept
        assert planned.problems == ()


def test_all_series_may_take_more_than_the_limit_of_all(series: Path) -> None:
    planned = _planned(series, policy=Policy(max_total_size=1))
    (problem,) = planned.problems
    assert problem.path.endswith(series.name)
    assert problem.message.endswith(" more than --max-total-size 1 byte")


def _size(number: int) -> str:
    return f"{number / 1000:.1f} kB" if number % 100 == 0 else f"{number:,} bytes"


def test_a_date_in_a_name_is_of_local_time(series: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    try:
        names = ["2026-05-04-0010", "2026-05-04-2350", "2026-05-05-0010"]
        for epoch, name in enumerate(names, 1):
            shutil.move(series / f"model_epoch_{epoch}.pth", series / f"net_{name}.pth")
        told = {"policy": Policy(keep_daily=2), "exclude": ["model_*"]}
        assert removed_names(_planned(series, **told)) == ["net_2026-05-04-0010.pth"]
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize("name", ["llama_acc{}_epoch_{}.pth", "llama_epoch_{1}_acc{0}.pth"])
@pytest.mark.parametrize("lengths", [(5, 5), (3, 7), (2, 8), (1, 9)])
def test_runs_that_a_setting_tells_apart_are_told_apart_again(series: Path, name: str, lengths) -> None:
    runs = [(value, epoch) for value, length in zip((2, 4), lengths, strict=True) for epoch in range(length)]
    for at, (value, epoch) in enumerate(runs, 1):
        (series / f"model_epoch_{at}.pth").rename(series / name.format(value, epoch))
    newest = {name.format(value, length - 1) for value, length in zip((2, 4), lengths, strict=True)}
    gone = []
    for _ in range(3):
        planned = _planned(series, policy=Policy(keep_last=1))
        gone.append(removed_names(planned))
        for one in planned.plan.removals:
            os.unlink(one.unit.path)
    assert newest.isdisjoint(gone[0])
    assert (len(gone[0]) > 3, gone[1:]) == (True, [[], []])


# Failed runs ----------------------------------------------------------------------------------------


@pytest.fixture
def diverged(tmp_path: Path) -> Path:
    """Return two runs that torch wrote: one ended in NaN, one didn't."""
    torch = pytest.importorskip("torch")
    for run, last in (("bad", float("nan")), ("good", 0.5)):
        (tmp_path / run).mkdir()
        for epoch, value in enumerate((0.25, 0.5, last), 1):
            state = {"fc.weight": torch.tensor([[1.0, value]]), "fc.bias": torch.tensor([0.0])}
            torch.save({"epoch": epoch, "model": state}, tmp_path / run / f"m_epoch_{epoch}.pt")
    return tmp_path


def test_a_run_that_ended_in_nan_is_told(diverged: Path) -> None:
    planned = _planned(diverged, policy=Policy(keep_last=2), recursive=True, failed="list")
    bad, good = planned.plan.groups
    assert bad.failed == "its newest, m_epoch_3.pt, has NaN: model.fc.weight: 1 of 2 values are NaN"
    assert (good.failed, removed_names(planned)) == (None, ["m_epoch_1.pt", "m_epoch_1.pt"])


def test_a_failed_run_goes_but_for_what_is_protected(diverged: Path) -> None:
    (diverged / "bad" / ".ckpttool-pins.toml").write_text('pinned = ["m_epoch_2.pt"]\n')
    planned = _planned(diverged, recursive=True, failed="remove", depth="full")
    bad, good = planned.plan.groups
    assert [one.name for one in bad.remove] == ["m_epoch_3.pt", "m_epoch_1.pt"]
    assert [kept.reasons for kept in bad.keep] == [(FINITE, "pinned")]
    assert (good.remove, good.skipped) == ((), NO_RULE)


@pytest.mark.parametrize("depth", ["quick", "full"])
def test_a_failed_run_keeps_its_newest_finite_one(diverged: Path, depth) -> None:
    told = {"recursive": True, "failed": "remove", "depth": depth}
    assert removed_names(_planned(diverged, **told)) == ["m_epoch_1.pt", "m_epoch_3.pt"]
    (diverged / "bad" / "m_epoch_2.pt").write_bytes(_flipped(diverged / "bad" / "m_epoch_2.pt"))
    planned = _planned(diverged, **told)
    assert removed_names(planned) == ["m_epoch_2.pt", "m_epoch_3.pt"]
    assert [kept.reasons for kept in planned.plan.groups[0].keep] == [(FINITE,)]
    assert why_in(diverged, diverged / "bad" / "m_epoch_1.pt", **told).reasons == (FINITE,)


def _flipped(path: Path) -> bytes:
    """Return what lies in a file that torch wrote, with another value of a weight."""
    raw = path.read_bytes()
    at = raw.index(struct.pack("<ff", 1.0, 0.5))
    return raw[:at] + struct.pack("<f", 7.0) + raw[at + 4 :]


def test_a_failed_run_that_was_never_finite_goes_whole(diverged: Path) -> None:
    for epoch in (1, 2):
        shutil.copy2(diverged / "bad" / "m_epoch_3.pt", diverged / "bad" / f"m_epoch_{epoch}.pt")
    bad, _ = _planned(diverged, recursive=True, failed="remove", depth="full").plan.groups
    assert (len(bad.remove), bad.keep) == (3, ())


def test_where_all_hold_infinities_the_newest_intact_one_counts(diverged: Path) -> None:
    import torch

    for epoch, last in ((1, 0.5), (2, 0.25), (3, float("nan"))):
        state = {"mask": torch.tensor([float("-inf"), 0.0]), "fc.weight": torch.tensor([[last, 0.5]])}
        torch.save({"epoch": epoch, "model": state}, diverged / "bad" / f"m_epoch_{epoch}.pt")
    assert removed_names(_planned(diverged, recursive=True, failed="remove")) == [
        "m_epoch_1.pt",
        "m_epoch_3.pt",
    ]
    state = {"mask": torch.tensor([1.0, 0.0]), "fc.weight": torch.tensor([[0.125, 0.5]])}
    torch.save({"epoch": 1, "model": state}, diverged / "bad" / "m_epoch_1.pt")
    assert removed_names(_planned(diverged, recursive=True, failed="remove")) == [
        "m_epoch_2.pt",
        "m_epoch_3.pt",
    ]


def test_a_rule_keeps_what_it_asks_for_of_a_failed_run_too(diverged: Path) -> None:
    told = {"recursive": True, "failed": "remove", "policy": Policy(keep_every_epochs=1)}
    bad, good = _planned(diverged, **told).plan.groups
    assert [(one.entry.name, one.reasons) for one in bad.keep] == [
        ("m_epoch_2.pt", (FINITE, "every epoch (2)")),
        ("m_epoch_1.pt", ("every epoch (1)",)),
    ]
    assert [one.name for one in bad.remove] == ["m_epoch_3.pt"]
    assert not good.remove


def _cut_short(run: Path) -> None:
    """Let a run be killed in its third save, long ago; each of its saves took some minutes."""
    for file in run.glob("*.pt"):
        if file.name == "m_epoch_3.pt":
            file.write_bytes(file.read_bytes()[:500])
        _date(file, int(file.stem[-1]) * 600)


def _date(file: Path, seconds: int) -> None:
    os.utime(file, (1_700_000_000 + seconds, 1_700_000_000 + seconds))


def test_a_run_that_was_restarted_goes_on(diverged: Path) -> None:
    import torch

    run = diverged / "good"
    _cut_short(run)
    _date(run / "m_epoch_1.pt", 86_400)
    planned = _planned(run, failed="remove")
    assert (removed_names(planned), planned.plan.groups[0].failed) == ([], None)
    assert any("was the run restarted?" in one for one in planned.warnings)
    state = torch.load(run / "m_epoch_1.pt", weights_only=True)
    state["model"]["fc.weight"] *= float("nan")
    torch.save(state, run / "m_epoch_1.pt")
    _date(run / "m_epoch_1.pt", 86_400)
    assert removed_names(_planned(run, failed="remove")) == ["m_epoch_1.pt", "m_epoch_3.pt"]


@pytest.mark.parametrize("kind", ["optimizer", "value"])
def test_nan_beside_the_weights_is_no_failure_and_counts(tmp_path: Path, kind: str) -> None:
    import torch

    nan = torch.full((4,), float("nan"))
    for epoch in (1, 2, 3):
        held = {"epoch": epoch, "model": {"fc.weight": torch.ones(2, 2)}}
        if kind == "optimizer":
            held["optimizer"] = {"state": {0: {"exp_avg": nan}}, "param_groups": [{"lr": 0.1}]}
        else:
            held["model"]["best_metric"] = nan[0].clone()
        torch.save(held, tmp_path / f"m_epoch_{epoch}.pt")
    assert removed_names(_planned(tmp_path, failed="remove")) == []
    for told in ({}, {"failed": "remove"}):
        planned = _planned(tmp_path, policy=Policy(keep_last=2), depth="full", **told)
        assert (removed_names(planned), planned.problems) == (["m_epoch_1.pt"], ())


def test_an_average_that_is_nan_does_not_count(tmp_path: Path) -> None:
    import torch

    for epoch, value in ((1, 1.0), (2, float("nan"))):
        torch.save(
            {"epoch": epoch, "ema": {"fc.weight": torch.full((2, 2), value)}},
            tmp_path / f"e_epoch_{epoch}.pt",
        )
    planned = _planned(tmp_path, policy=Policy(max_size=1), depth="full")
    assert "e_epoch_1.pt" not in removed_names(planned)


def test_a_job_that_was_killed_in_mid_save_keeps_what_it_had(diverged: Path) -> None:
    _cut_short(diverged / "good")
    planned = _planned(diverged / "good", failed="remove", policy=Policy(keep_last=1))
    (one,) = planned.plan.groups
    assert [(kept.entry.name, kept.reasons) for kept in one.keep] == [("m_epoch_2.pt", (FINITE, "last 1"))]


def test_what_belongs_with_the_newest_finite_one_stays_with_it(diverged: Path) -> None:
    import torch

    run = diverged / "good"
    for epoch in (1, 2, 3):
        moments = {"state": {0: {"exp_avg": torch.zeros(2)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
        torch.save(moments, run / f"optim_epoch_{epoch}.pt")
    _cut_short(run)
    planned = _planned(run, failed="remove")
    left = {kept.entry.name: kept.reasons for one in planned.plan.groups for kept in one.keep}
    assert left == {
        "m_epoch_2.pt": (FINITE,),
        "optim_epoch_2.pt": (FINITE,),
    }


# What was not read ----------------------------------------------------------------------------------


def test_what_was_not_read_is_not_called_the_newest_without_saying_so(diverged: Path) -> None:
    told = {"recursive": True, "policy": Policy(keep_last=9), "depth": "full"}
    bad, good = _planned(diverged, **told).plan.groups
    assert next(kept.reasons for kept in bad.keep) == ("newest (not verified: nothing is removed)", "last 9")
    bad, good = _planned(diverged, **{**told, "policy": Policy(keep_last=1)}).plan.groups
    assert [(kept.entry.name, kept.reasons) for kept in bad.keep] == [
        ("m_epoch_3.pt", ("damaged: model.fc.weight: 1 of 2 values are NaN",)),
        ("m_epoch_2.pt", ("newest", "last 1")),
    ]
    assert [kept.reasons for kept in good.keep] == [("newest", "last 1")]


# Copies ---------------------------------------------------------------------------------------------


def test_copies_that_count_twice_are_told(diverged: Path) -> None:
    told = {"policy": Policy(keep_last=9), "recursive": True, "group_by": "none"}
    shutil.copytree(diverged / "good", diverged / "mirror")
    warned = _planned(diverged, **told).warnings
    one, other = diverged / "bad" / "m_epoch_1.pt", diverged / "good" / "m_epoch_1.pt"
    assert f"all checkpoints: {one} and {other} are identical; copies count twice" in warned
    assert not any("copies" in one for one in _planned(diverged, **{**told, "group_by": None}).warnings)
    for run in ("good", "bad"):
        shutil.rmtree(diverged / run)
    assert not any("copies" in one for one in _planned(diverged, **told).warnings)


@pytest.mark.parametrize("how", ["byte", "name"])
def test_what_differs_in_a_byte_or_has_another_name_is_no_copy(tmp_path: Path, how: str) -> None:
    for path in (make_run(tmp_path / "one", 7, 8), make_run(tmp_path / "two", 7, 8)):
        for number in (7, 8):
            one = path / f"model_epoch_{number}.pth"
            raw = bytearray(one.read_bytes())
            if path.name == "two" and how == "byte":
                raw[raw.index(b"PK\x01\x02") + 14] ^= 1  # the time of an archive's member, which nobody reads
                one.write_bytes(raw)
            elif path.name == "two":
                one.rename(path / f"model_epoch_{number + 9}.pth")
    warned = _planned(tmp_path, policy=Policy(keep_last=9), recursive=True, group_by="none").warnings
    assert not any("copies" in one for one in warned)


def test_nobody_reads_values_who_does_not_ask(diverged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_checkpoint(diverged / "bad" / "m_epoch_3.pt") as newest:
        values = [tensor.extent for tensor in newest.tensors]
    for request in ({}, {"failed": "list"}):
        with recorded_reads(monkeypatch) as reads:
            _planned(diverged, policy=Policy(keep_last=2), recursive=True, **request)
        read = [Extent(one.file, one.offset, one.nbytes) for one in reads]
        assert [extent in read for extent in values] == [bool(request)] * 2


@pytest.mark.parametrize(
    ("how", "age", "is_busy", "is_failed"),
    [
        ("cut", 7200, False, True),
        ("cut", 60, False, False),
        ("cut", 7200, True, False),
        ("damaged", 7200, False, False),
    ],
)
def test_which_unfinished_runs_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, age: int, is_busy: bool, is_failed: bool
) -> None:
    monkeypatch.setattr(time, "time", lambda: START + age)
    save(tmp_path / "m_epoch_2.pt", modified=-60)
    newest = save(tmp_path / "m_epoch_3.pt", **{how: True})
    if is_busy:
        newest.with_suffix(".pt.tmp").write_bytes(b"")
    (group,) = _planned(tmp_path, failed="list").document()["groups"]
    why = "its newest, m_epoch_3.pt, is incomplete: "
    assert (group["failed"] or "").startswith(why) == (group["failed"] is not None) == is_failed


# Why ------------------------------------------------------------------------------------------------


def _explained(entries: Sequence[Entry], name: str, policy: Policy, **protections: Any):
    one = why(entries, name, policy, **protections)
    return one.is_kept, one.place, one.reasons, one.against


def test_every_rule_has_a_word(entry) -> None:
    start = 1_767_225_600  # 2026-01-01, a Thursday
    entries = [
        entry(
            f"m_epoch_{epoch}.pt",
            step=epoch * 150,
            saved_at=start + epoch * 7200.0,
            metrics={"loss": 1 / epoch},
        )
        for epoch in range(1, 13)
    ]
    policy = Policy(
        keep_last=2,
        keep_best=3,
        metric="loss",
        mode="min",
        keep_every_steps=500,
        keep_daily=1,
        keep_weekly=5,
        keep_within=3600,
        keep_names=("best*", "*_7.pt"),
    )
    assert _explained(entries, "m_epoch_6.pt", policy) == (
        False,
        ("7th newest of 12", "7th best of 12 by loss (0.166667)"),
        (),
        (
            "7th newest, not one of the last 2",
            "7th best by loss (0.166667), not one of the best 3",
            "m_epoch_4.pt is the first at or after step 500, not this (900)",
            *_day(start + 6 * 7200.0),
            "12h older than the newest, not within 1h",
            "its name doesn't match best* or *_7.pt",
        ),
    )
    stays, place, reasons, against = _explained(entries, "m_epoch_12.pt", policy)
    assert (stays, place) == (True, ("newest of 12", "best of 12 by loss (0.0833333)"))
    assert reasons[:3] == ("newest", "last 2", "best 3 by loss (0.0833333)")
    assert against == (
        "m_epoch_10.pt is the first at or after step 1,500, not this (1,800)",
        "its name doesn't match best* or *_7.pt",
    )


def _day(seconds: float) -> tuple[str, str]:
    """Return what the rules of days and weeks say of a time in the first days of 2026."""
    local = time.localtime(seconds)
    last = time.localtime(1_767_225_600 + 12 * 7200.0)
    day = time.strftime("%Y-%m-%d", local)
    other = f"daily: {day} is not one of the newest 1"
    same = f"daily: m_epoch_12.pt is the newest of {day}"
    week = "weekly: m_epoch_12.pt is the newest of 2026-W01"
    return (same if local.tm_yday == last.tm_yday else other), week


def test_why_something_does_not_fit(entry) -> None:
    entries = [entry(f"m_epoch_{epoch}.pt") for epoch in (1, 2, 3)]
    assert _explained(entries, "m_epoch_1.pt", Policy(max_size=200)) == (
        False,
        ("3rd newest of 3",),
        (),
        ("--max-size 200 bytes: the oldest are removed until the rest fits",),
    )
    entries = [entry(f"m_epoch_{epoch}.pt", saved_at=1_767_225_600.0 + epoch) for epoch in (1, 2, 3)]
    assert _explained(entries, "m_epoch_1.pt", Policy(keep_last=3, max_total_size=200)) == (
        True,
        ("3rd newest of 3",),
        ("last 3",),
        ("--max-total-size 200 bytes: the oldest of all series are removed until the rest fits",),
    )


def test_why_what_no_rule_keeps_stays(entry) -> None:
    entries = [entry(f"m_epoch_{epoch}.pt") for epoch in (1, 2, 3)]
    policy = Policy(keep_last=1)
    protections = {
        "reasons": {"run/m_epoch_1.pt": ["latest", "pinned"]},
        "holders": {("run/m_epoch_1.pt", "latest"): "run/latest"},
    }
    assert _explained(entries, "m_epoch_1.pt", policy, **protections) == (
        True,
        ("3rd newest of 3",),
        ("latest (run/latest)", "pinned"),
        ("3rd newest, not one of the last 1",),
    )
    told = _explained(entries, "m_epoch_1.pt", policy, doubts={"run/m_epoch_*.pt": "years"})
    assert (told[0], told[2]) == (True, ("its series is left alone: years",))


def test_what_is_faulty_is_not_counted(entry) -> None:
    entries = [faulty_entry("m_epoch_1.pt", incomplete("cut")), entry("m_epoch_2.pt")]
    assert _explained(entries, "m_epoch_1.pt", Policy(keep_last=1)) == (
        True,
        (),
        ("incomplete: cut",),
        ("rules ignore it: incomplete: cut",),
    )
    told = _explained(entries, "m_epoch_1.pt", Policy(keep_last=1, incomplete="remove"))
    assert told[0] is False
    assert told[3][1] == "--incomplete remove: an intact one is newer"


def test_a_path_may_be_written_in_any_way(series: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Policy(keep_last=1)
    monkeypatch.chdir(series)
    for path in ("model_epoch_3.pth", "./model_epoch_3.pth", series / "model_epoch_3.pth"):
        assert why_in(series, path, policy=policy).entry.name == "model_epoch_3.pth"
    with pytest.raises(UsageError, match="not one of the checkpoints found"):
        why_in(series, "model_epoch_30.pth", policy=policy)


# What looks like a series ---------------------------------------------------------------------------


def _called(series: Path, form: str) -> list[str]:
    names = [form.format(number, 100 * number) for number in range(1, 11)]
    for number, name in enumerate(names, 1):
        (series / f"model_epoch_{number}.pth").rename(series / name)
    return names


def test_what_looks_like_a_series_is_told_where_a_policy_would_thin_it_out(series: Path) -> None:
    """The numbers are none that names of checkpoints usually have: both could be a setting."""
    names = _called(series, "net{}_at_{}.pth")
    assert _planned(series, policy=Policy(keep_last=10)).problems == ()
    planned = _planned(series, policy=Policy(keep_last=3))
    assert removed_names(planned) == []
    told = "left alone: 10 checkpoints could be one series (--series 'net*_at_*.pth' makes them one)"
    assert [(one.path, one.message) for one in planned.problems] == [(f"{series}/net*_at_*.pth", told)]
    assert removed_names(_planned(series, policy=Policy(keep_last=3), series=["net*_at_*.pth"])) == sorted(
        names[:7]
    )


@pytest.mark.parametrize("form", ["fold{}_seed{}.pth", "resnet_lr_{}_bs_{}.pth"])
def test_what_tells_siblings_apart_is_no_series(series: Path, form: str) -> None:
    _called(series, form)
    assert _planned(series, policy=Policy(keep_last=3)).problems == ()
