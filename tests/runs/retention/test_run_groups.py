"""Runs: which directory is one, which of several are the best, and what told them apart."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ckpttool import Policy, UsageError, list_checkpoints, prune
from ckpttool.runs.retention.plan import Protections, RetentionPlan, plan
from ckpttool.runs.series import group
from tests.support.commands import run_redirected
from tests.support.directories import Entry, make_entry
from tests.support.retention import dry_run, removed_names
from tests.support.runs import flip_value
from tests.support.saves import save

FILES = Path(__file__).parents[3] / "fixtures" / "files"
SEARCH = FILES / "runs" / "lightning" / "search"
RAY = json.loads((FILES / "runs" / "ray.expected.json").read_text())
TRUTH = json.loads((FILES / "runs" / "lightning.expected.json").read_text())


@pytest.fixture
def search(tmp_path: Path) -> Path:
    return Path(shutil.copytree(SEARCH, tmp_path / "search"))


def verl_runs(root: Path, **losses: float) -> Path:
    """Make runs in the layout of verl: a directory for each save, the actor's ranks in it, a tracker file."""
    for name, loss in losses.items():
        for step in (10, 20):
            save = root / name / f"global_step_{step}"
            shutil.copytree(FILES / "ranks" / "verl-2", save / "actor")
            (save / "data.pt").write_bytes((FILES / "series" / "model_epoch_1.pth").read_bytes())
        (root / name / "latest_checkpointed_iteration.txt").write_text("20")
        rows = "".join(f'{{"step": {step}, "val_loss": {loss}}}\n' for step in (10, 20))
        (root / name / "metrics.jsonl").write_text(rows)
    return root


# Which directory is a run ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("directory", "searched", "expected"),
    [
        ("runs/exp1", "runs", "runs/exp1"),
        ("runs/exp1/checkpoints", "runs", "runs/exp1"),
        ("runs/exp1/step_100", "runs", "runs/exp1"),
        ("runs/exp1/checkpoint_000003", "runs", "runs/exp1"),
        ("runs/exp1/global_step_10/actor", "runs", "runs/exp1"),
        ("runs/mlruns/1/abc/artifacts/checkpoints", "runs", "runs/mlruns/1/abc"),
        ("runs/wandb/run-1/files/ckpt", "runs", "runs/wandb/run-1"),
        ("runs/trial_1", "runs", "runs/trial_1"),
        ("runs", "runs", "runs"),
        # None is looked for above what was searched.
        ("runs/exp1/checkpoints", "runs/exp1/checkpoints", "runs/exp1/checkpoints"),
        ("checkpoints/step_1", ".", "."),
    ],
)
def test_the_run_is_above_single_saves_and_the_folders_of_frameworks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, directory: str, searched: str, expected: str
) -> None:
    monkeypatch.chdir(tmp_path)
    save(Path(directory) / "m.pt")
    (run,) = list_checkpoints(searched).runs
    assert run.path == expected


_NAMES = st.sampled_from(["trial_1", "trial_2", "checkpoints", "lr=0.1", "step_3", "exp"])
_FILES = st.sampled_from(["epoch_1.pt", "epoch_2.pt", "last.pt", "best.pt", "ema_epoch_2.pt"])


@given(
    st.lists(st.tuples(st.lists(_NAMES, max_size=4), _FILES), min_size=1, max_size=12),
    st.sampled_from([None, "run", "prefix", "parent", "format"]),
)
def test_checkpoints_of_different_runs_share_no_series(
    tmp_path_factory: pytest.TempPathFactory, places: list[tuple[list[str], str]], by: str
) -> None:
    root = tmp_path_factory.mktemp("runs")
    for names, file in places:
        save(root.joinpath(*names, file), epoch=1)
    rows = list_checkpoints(root, group_by=by).document()["checkpoints"]
    assert len(rows) == len({row["path"] for row in rows}) > 0
    runs = {(row["group"], row["run"]) for row in rows}
    assert len({series for series, _ in runs}) == len(runs)


def test_a_run_is_one_series_but_for_averages(search: Path) -> None:
    shutil.copy(search / "version_0/checkpoints/last.ckpt", search / "version_0/checkpoints/ema.ckpt")
    listing = list_checkpoints(search, group_by="run")
    assert [(os.path.relpath(one.key, search), len(one.checkpoints)) for one in listing.series] == [
        ("version_0/*", 4),
        ("version_0/* (averages)", 1),
        ("version_1/*", 4),
    ]
    assert listing.warnings == ()  # last.ckpt has the epoch of another, and its bytes


# Hyper-parameters -----------------------------------------------------------------------------------


def test_hyper_parameters_are_those_that_the_framework_wrote(search: Path) -> None:
    listing = list_checkpoints(search)
    assert {os.path.basename(one.path): dict(one.hyper_parameters) for one in listing.runs} == {
        name: trial["hparams"] for name, trial in TRUTH.items()
    }


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("params.json", '{"lr": 0.1, "model": {"width": 4}}', {"lr": 0.1, "model.width": 4}),
        (".hydra/config.yaml", "db:\n  name: x\nlayers: [1, 2]\n", {"db.name": "x", "layers": [1, 2]}),
        ("files/config.yaml", "_wandb:\n  value: {}\nlr:\n  value: 0.1\n", {"lr": 0.1}),
        ("hparams.yaml", "a: !!python/object:os.system {cmd: x}\n", {"a.cmd": "x"}),
        ("hparams.yaml", "a: &a [*a]\n", {}),
        ("hparams.yaml", "a: [unclosed\n", {}),
        ("hparams.yaml", "- no mapping\n", {}),
        ("hparams.yaml", f"a: {'x' * 70_000}\n", {}),
        ("hparams.yaml", "\x00\xff", {}),
        ("params.json", '{"a": 1', {}),
    ],
)
def test_files_of_a_run_tell_them_or_nothing(
    tmp_path: Path, name: str, text: str, expected: dict[str, object]
) -> None:
    save(tmp_path / "m.pt")
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(text)
    assert _hyper_parameters(tmp_path) == expected


def _hyper_parameters(directory: Path) -> Mapping[str, object]:
    (run,) = list_checkpoints(directory).runs
    return run.hyper_parameters


def test_aliases_that_multiply_are_cut(tmp_path: Path) -> None:
    lines = ["a0: &a0 {x: 1, y: 2}"]
    lines += [f"a{n}: &a{n} {{x: *a{n - 1}, y: *a{n - 1}}}" for n in range(1, 60)]
    (tmp_path / "hparams.yaml").write_text("\n".join(lines))
    save(tmp_path / "m.pt")
    assert len(_hyper_parameters(tmp_path)) <= 1_000


def test_list_shows_what_differs_first(search: Path) -> None:
    told = run_redirected("list", "--grouped", "--best", "val_loss", "--mode", "min", search)
    lines = told.out.splitlines()
    assert lines[0] == f"2 runs in {search}"
    assert lines[1].split()[:5] == ["run", "lr", "best", "val_loss", "checkpoints"]
    assert [line.split()[:2] for line in lines[2:4]] == [["version_0", "0.1"], ["version_1", "0.01"]]
    assert lines[4] == "  same in all: tags=['a', 'b'], width=4"


# The best runs --------------------------------------------------------------------------------------


def test_all_of_the_other_runs_goes(search: Path) -> None:
    planned = dry_run(search, policy=Policy(keep_best_runs=1, metric="val_loss"))
    assert removed_names(planned) == sorted([*TRUTH["version_1"]["val_loss"], "last.ckpt"])
    assert {entry.run for entry in planned.plan.removals} == {str(search / "version_1")}


def test_other_rules_hold_within_the_best(search: Path) -> None:
    policy = Policy(keep_best_runs=1, keep_best=1, metric="val_loss")
    pruned = prune(str(search), policy=policy, group_by="run")
    left = sorted(path.name for path in search.rglob("*.ckpt"))
    assert left == [TRUTH["version_0"]["best"], "last.ckpt"]
    assert not pruned.problems


def test_a_pointer_of_verl_and_a_pin_protect_what_they_name(tmp_path: Path) -> None:
    root = verl_runs(tmp_path / "exps", good=0.1, bad=0.9)
    planned = dry_run(
        root, policy=Policy(keep_best_runs=1, keep_last=1, metric="val_loss"), metrics=["metrics.jsonl"]
    )
    assert [os.path.relpath(entry.path, root) for entry in planned.plan.removals] == [
        "bad/global_step_10",
        "good/global_step_10",
    ]


@pytest.fixture
def ray(tmp_path: Path) -> Path:
    return Path(shutil.copytree(FILES / "runs" / "ray" / "search", tmp_path / "ray"))


def test_a_search_by_ray(ray: Path) -> None:
    listing = list_checkpoints(ray, metrics=["result.json"], best="loss")
    best = {name: min(trial["loss"].values()) for name, trial in RAY.items()}
    ranked = sorted(best, key=best.__getitem__)
    assert [os.path.basename(one.path) for one in listing.runs] == ranked
    for one in listing.runs:
        assert dict(one.hyper_parameters) == RAY[os.path.basename(one.path)]["params"]
        for row in one.checkpoints:
            assert row.entry.metric("loss") == RAY[os.path.basename(one.path)]["loss"][row.entry.name]
            assert row.protected == ()
    assert set(listing.runs[0].checkpoints[0].entry.metrics) == {"loss"}
    pruned = prune(
        str(ray), policy=Policy(keep_best_runs=2, keep_best=1, metric="loss"), metrics=["result.json"]
    )
    assert not pruned.problems
    left = {path.relative_to(ray).parts[:2] for path in ray.rglob("model.pt")}
    expected = {(name, min(RAY[name]["loss"], key=RAY[name]["loss"].__getitem__)) for name in ranked[:2]}
    assert left == expected  # in each of which the best is the newest, too


def test_damage_of_the_best_run_is_found_before_another_goes(search: Path) -> None:
    for path in (search / "version_0").rglob("*.ckpt"):
        flip_value(path)
    pruned = prune(str(search), policy=Policy(keep_best_runs=1, metric="val_loss"))
    assert not pruned.plan.removals
    assert len(list(search.rglob("*.ckpt"))) == 8


def test_several_runs_in_one_series_are_refused(search: Path) -> None:
    with pytest.raises(UsageError, match="has checkpoints of 2 runs"):
        dry_run(search, policy=Policy(keep_best_runs=1, metric="val_loss"), group_by="none")


def test_a_metric_is_needed() -> None:
    with pytest.raises(UsageError, match="--keep-best-runs needs --metric NAME"):
        Policy(keep_best_runs=2)


@st.composite
def _runs(draw: st.DrawFn) -> list[Entry]:
    entries = []
    for name in draw(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=6, unique=True)):
        for epoch in range(draw(st.integers(1, 3))):
            value = draw(st.one_of(st.none(), st.floats(0, 1), st.just(float("nan"))))
            entry = make_entry(
                f"{name}/epoch_{epoch}.pth",
                counts_inside=(epoch, None),
                metrics={} if value is None else {"m": value},
            )
            entries.append(entry)
    return entries


def _planned(entries: Sequence[Entry], policy: Policy, **protections: object) -> RetentionPlan:
    try:
        return plan(group(entries, None, "run"), policy, Protections(**protections))
    except UsageError as refusal:
        assume("no checkpoint has a metric" not in str(refusal))
        raise


def _gone(made: RetentionPlan) -> set[str]:
    return {entry.path for entry in made.removals}


@given(_runs(), st.integers(1, 6), st.data())
def test_the_best_runs_stay_and_more_of_them_keep_more(
    entries: list[Entry], count: int, data: st.DataObject
) -> None:
    policy = Policy(keep_best_runs=count, metric="m", mode="min")
    gone = _gone(_planned(entries, policy))
    best: dict[str, float] = {}
    for entry in entries:
        value = entry.metrics.get("m")
        if value is not None and value == value:
            best[entry.directory] = min(value, best.get(entry.directory, value))
    gone_runs = {os.path.dirname(path) for path in gone}
    assert gone_runs <= best.keys()  # a run that nobody measured stays
    assert len(gone_runs) == max(0, len(best) - count)
    stays = [value for directory, value in best.items() if directory not in gone_runs]
    assert all(best[directory] >= max(stays) for directory in gone_runs)
    assert {entry.path for entry in entries if entry.directory in gone_runs} == gone
    assert _gone(_planned(entries, replace(policy, keep_best_runs=count + 1))) <= gone
    shuffled = data.draw(st.permutations(entries))
    assert _gone(_planned(shuffled, policy)) == gone


@given(_runs(), st.integers(1, 3), st.data())
def test_what_is_protected_stays_and_so_does_a_run_that_goes_on(
    entries: list[Entry], count: int, data: st.DataObject
) -> None:
    from ckpttool.runs.reasons import Code, Reason

    policy = Policy(keep_best_runs=count, metric="m", mode="min")
    chosen = data.draw(st.sampled_from(entries))
    gone = _gone(_planned(entries, policy))
    assert _gone(_planned(entries, policy, reasons={chosen.path: ["pinned"]})) == gone - {chosen.path}
    going_on = _gone(_planned(entries, policy, reasons={chosen.path: [Reason(Code.TOO_YOUNG)]}))
    assert going_on == {path for path in gone if os.path.dirname(path) != chosen.directory}
