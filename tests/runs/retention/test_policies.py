"""Policies, and how limits are written."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpttool import Policy, UsageError
from ckpttool.runs.modes import mode_of
from ckpttool.runs.retention.request import PathRule, Policies, max_removals
from ckpttool.runs.retention.rules import History, rank_by_metric
from ckpttool.runs.series import group
from tests.support.directories import make_entry

BEST = {"keep_best": 2, "metric": "val_loss", "mode": "min"}


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({}, "no rule says which checkpoints to keep (--keep N keeps the newest N)"),
        ({"incomplete": "remove"}, "no rule says which checkpoints to keep (--keep N keeps the newest N)"),
        ({"keep_last": 0}, "--keep 0 would keep nothing (at least 1)"),
        ({"keep_daily": -1}, "--keep-daily -1 would keep nothing (at least 1)"),
        ({"keep_within": 0}, "--keep-within 0 would keep nothing (at least 1)"),
        ({"max_size": 0}, "--max-size 0 would keep nothing (at least 1)"),
        ({"keep_names": ("",)}, "--keep-name needs a glob of names, such as 'best*'"),
        ({**BEST, "mode": "least"}, "--mode least (min or max)"),
        ({"keep_last": 1, "incomplete": "drop"}, "--incomplete drop (keep or remove)"),
        ({"keep_last": 2, "metric": "loss"}, "--metric needs --keep-best N or --keep-best-runs N"),
        ({"keep_last": 2, "mode": "min"}, "--mode needs --keep-best N and --metric NAME"),
    ],
)
def test_what_no_policy_can_be(told, said) -> None:
    with pytest.raises(UsageError) as refusal:
        Policy(**told)
    assert str(refusal.value) == said


def test_the_rules_that_were_given() -> None:
    assert Policy(keep_last=3).rules == {"keep_last": 3}
    assert Policy(**BEST, keep_names=("best*",)).rules == {**BEST, "keep_names": ("best*",)}
    assert Policy(max_size=10, incomplete="remove").rules == {"max_size": 10, "incomplete": "remove"}


@pytest.mark.parametrize(
    ("limit", "removed", "total", "allowed"),
    [
        *(("10", 10, 20, True), ("10", 11, 20, False), ("0", 1, 9, False), ("0", 0, 9, True)),
        *(("50%", 5, 10, True), ("50%", 6, 10, False), ("33.3%", 1, 3, False), ("33.4%", 1, 3, True)),
        *(("100%", 3, 3, True), ("0%", 1, 10**9, False)),
    ],
)
def test_how_much_may_go(limit: str, removed: int, total: int, allowed: bool) -> None:
    assert (removed <= max_removals(limit, total)) is allowed


@pytest.mark.parametrize("text", ["", "%", "101%", "-1", "ten", "1e3", "1.5"])
def test_what_is_no_limit(text: str) -> None:
    with pytest.raises(UsageError, match="invalid limit"):
        max_removals(text, 0)


# Policies by path -----------------------------------------------------------------------------------

LAST, TWO, ALL = Policy(keep_last=1), Policy(keep_last=2), Policy(keep_last=9)


def _policies(tmp_path: Path, *globs: str, default: Policy | None = LAST) -> Policies:
    rules = tuple(PathRule(glob, policy, glob) for glob, policy in zip(globs, (TWO, ALL), strict=False))
    return Policies(default, rules, str(tmp_path))


@pytest.mark.parametrize(
    ("globs", "policy"),
    [
        *(
            (("run/**",), TWO),
            (("**",), TWO),
            (("run/m_*.pt",), TWO),
            (("run",), LAST),
            (("other/**",), LAST),
        ),
        *((("run/**", "run/m_*"), ALL), (("run/m_*", "run/**"), ALL), (("run/**", "x/**"), TWO)),
        *((("run/m_epoch_1.pt",), LAST), (("run/m_epoch_*.pt",), TWO), (("../run/**",), LAST)),
    ],
)
def test_the_last_rule_that_matches_wins(entry, tmp_path, monkeypatch, globs, policy) -> None:
    monkeypatch.chdir(tmp_path)
    (one,) = group([entry("m_epoch_1.pt"), entry("m_epoch_2.pt")])
    assert _policies(tmp_path, *globs).of(one) == policy


def test_what_no_rule_is_for_has_no_policy(entry, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (one,) = group([entry("m_epoch_1.pt")])
    assert _policies(tmp_path, "other/**", default=None).of(one) is None
    assert Policies(LAST).of(one) == LAST


def test_rules_that_match_nothing_are_known(entry, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    groups = group([entry("m_epoch_1.pt")])
    assert [rule.glob for rule in _policies(tmp_path, "other/**", "run/**").unmatched(groups)] == ["other/**"]


def test_one_series_with_two_policies_is_refused(entry, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (one,) = group([entry("a_epoch_1.pt"), entry("b_epoch_2.pt")], "parent")
    with pytest.raises(UsageError) as refusal:
        _policies(tmp_path, "run/b_*").of(one)
    assert str(refusal.value) == (
        "run/* is one series with two policies: run/a_epoch_*.pt (no rule) and run/b_epoch_*.pt (run/b_*)"
    )
    assert _policies(tmp_path, "run/*").of(one) == TWO


@pytest.mark.parametrize(
    ("names", "mode"),
    [
        (
            "loss val_loss train/loss eval_loss top5_error word_error_rate WER ppl rmse_2 accLoss",
            "min",
        ),
        ("acc val_acc Accuracy top1_acc f1 eval/f1_macro mAP mAP50 bleu rougeL mean_iou R2_recall", "max"),
        ("fid50k BLEU_loss teacher_val_loss", "min"),
        ("BLEU-4 mAP_0.5 top-5-acc recall@10", "max"),
        ("lr learning_rate step value score neg_val_loss inverse_val_loss non_val_acc", None),
    ],
)
def test_the_name_of_a_metric_says_which_values_are_good(names: str, mode: str | None) -> None:
    assert {name: mode_of(name) for name in names.split()} == dict.fromkeys(names.split(), mode)


def test_a_ranking_by_a_metric_of_unknown_mode_is_an_error() -> None:
    policy = Policy(keep_best=1, metric="quality")
    entries = [make_entry(f"m_{value}.pth", metrics={"quality": float(value)}) for value in (1, 2)]
    with pytest.raises(UsageError, match="--metric quality: can't tell whether low or high values are good"):
        rank_by_metric(policy, History(entries))
