"""A directory for each save is one checkpoint: whatever lies in it goes or stays with it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from ckpttool import Policy, RenameRequest, UsageError, latest, list_checkpoints, pin, prune, rename, undo
from tests.support.retention import Pruned, dry_run, kept_reasons, removed_names
from tests.support.saves import series_in

FORMS = (
    "step_{}",
    "global_step_{}",
    "global_step{}",
    "iter_{:07d}",
    "epoch_{}",
    "checkpoint_{}",
    "checkpoint-{}",
)
OTHER_FORMS = (
    "ckpt_{}",
    "step={}",
    "model_epoch_{}",
    "checkpoint_step_{}",
    "epoch=3-step={}",
    "step-{}",
    "Iteration{}",
    "step={}-val_loss=0.25",
    "evaluate=0.7-step={}",
    "epoch_{}_val_acc_0.7",
    "ep1-ba{}",
)
MEGATRON = ("mp_rank_00/model_optim_rng.pt", "mp_rank_01/model_optim_rng.pt")
PAIR = ("model.pt", "optim.pt")


def write(path: Path, value: float = 0, name: str = "w") -> None:
    """Write a file as safetensors does; a name ending in ``.json`` or ``.txt`` gets a text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix in (".json", ".txt"):
        path.write_text("{}")
        return
    save_file({name: np.full((2, 3), value, np.float32)}, path.with_suffix(".safetensors"))
    path.with_suffix(".safetensors").rename(path)


def _steps(run: Path) -> list[int]:
    return [row["step"] for row in list_checkpoints(run).document()["checkpoints"]]


def saved(run: Path, steps: Iterable[int], names: Iterable[str], form: str = "step_{}") -> Path:
    """Return a run with a directory for each save."""
    for step in steps:
        for name in names:
            write(run / form.format(step) / name, step)
    return run


def planned(directory: Path, keep: int = 1, **request: object) -> Pruned:
    return dry_run(directory, policy=Policy(keep_last=keep), **request)


FAMILIES = (
    *((form, PAIR) for form in FORMS + OTHER_FORMS),
    ("iter_{:07d}", MEGATRON),
    ("checkpoint_{:06d}", ("model.pt",)),
    ("global_step_{}", ("actor/model.pt", "critic/model.pt", "data.json")),
)


@pytest.mark.parametrize("number", range(len(FAMILIES)))
@pytest.mark.parametrize("of", [5, pytest.param(1, marks=pytest.mark.thorough)])
def test_each_is_one_of_one_series(tmp_path: Path, number: int, of: int) -> None:
    """Grouped in every way, of which each family is planned in some."""
    form, names = FAMILIES[number]
    run = saved(tmp_path / "run", (8, 9, 10), names, form)
    (found,) = series_in(run, recursive=False).values()
    assert found == [form.format(step) for step in (8, 9, 10)]
    ways = [(by, recursive) for by in (None, "parent", "prefix", "format", "none") for recursive in (0, 1)]
    for by, recursive in ways[number % of :: of]:
        gone = removed_names(planned(run, group_by=by, recursive=bool(recursive)))
        assert gone == sorted(form.format(step) for step in (8, 9))
    assert latest(run).entry.path == str(run / form.format(10))
    prune(run, keep_last=1)
    assert {path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file()} == {
        f"{form.format(10)}/{name}" for name in names
    }


def test_what_may_be_a_trials_directory_is_none(tmp_path: Path) -> None:
    forms = ("seed_{}", "trial_{}", "run{}", "{}", "{:07d}", "resnet_epoch_{}", "epochs{}", "lr_{}", "best")
    forms += ("iou0.5_epoch_{}", "acc4_epoch_{}", "epoch={}-lr=0.1", "epoch={}-foo=0.1")
    wrong = []
    for number, form in enumerate(forms):
        run = saved(tmp_path / str(number), (1, 2, 3), ("model.pt",), form)
        found = series_in(run, recursive=False)
        if found or removed_names(planned(run, recursive=True)):
            wrong.append((form, found))
    assert not wrong


LEROBOT = ("pretrained_model/model.safetensors", "training_state/optimizer_state.safetensors")


def test_lerobots_are_saves_by_what_lies_in_them(tmp_path: Path) -> None:
    places = saved(tmp_path / "run" / "checkpoints", (20_000, 100_000), LEROBOT, "{:06d}")
    for step in (20_000, 100_000):
        record = places / f"{step:06d}" / "training_state" / "training_step.json"
        record.write_text(json.dumps({"step": step}))
    assert [*series_in(tmp_path / "run").values()] == [["checkpoints/020000", "checkpoints/100000"]]
    assert _steps(tmp_path / "run") == [20_000, 100_000]
    assert latest(tmp_path / "run", recursive=True).entry.path == str(places / "100000")
    assert removed_names(planned(tmp_path / "run", recursive=True)) == ["020000"]


def test_a_record_of_its_step_that_is_damaged_makes_it_incomplete(tmp_path: Path) -> None:
    places = saved(tmp_path / "checkpoints", (20_000, 100_000), LEROBOT, "{:06d}")
    (places / "100000" / "training_state" / "training_step.json").write_text('{"step": 1000')
    newest = latest(places)
    assert newest.entry.path == str(places / "020000")
    assert any("the training step is not valid JSON" in one.message for one in newest.passed_over)


def test_trials_are_series_of_their_own(tmp_path: Path) -> None:
    """Numbered from 0 and written at once, as Ray Tune numbers them."""
    for trial in ("trial_1", "trial_2"):
        saved(tmp_path / trial, range(3), ("model.pt",), "checkpoint_{:06d}")
    for by in (None, "parent", "prefix", "format"):
        found = planned(tmp_path, recursive=True, group_by=by)
        assert len(found.plan.groups) == 2
        assert not found.problems
        assert removed_names(found) == [
            "checkpoint_000000",
            "checkpoint_000000",
            "checkpoint_000001",
            "checkpoint_000001",
        ]
    assert len(planned(tmp_path, recursive=True, group_by="none").plan.removals) == 5


# Runs that are called like saves --------------------------------------------------------------------


@pytest.mark.parametrize(
    "names",
    [
        ("epoch_1.pt", "epoch_2.pt"),
        ("checkpoint-100/model.safetensors", "checkpoint-200/model.safetensors"),
        ("deep/step_5/model.pt",),
    ],
)
def test_a_run_is_no_save(tmp_path: Path, names: tuple[str, ...]) -> None:
    saved(tmp_path, (1, 2), names, "iter_{}")
    found = [*series_in(tmp_path).values()]
    assert sorted(name for same in found for name in same) == sorted(
        f"iter_{number}/{name if name.startswith('epoch') else os.path.dirname(name)}"
        for number in (1, 2)
        for name in names
    )
    assert all(len({os.path.dirname(name) for name in same}) == 1 for same in found)


@pytest.mark.parametrize("names", [("epoch_7.pt",), ("model_70.pt", "model_80.pt"), ("model_7.pt",)])
def test_what_could_be_a_run_is_left_alone_whole(tmp_path: Path, names: tuple[str, ...]) -> None:
    saved(tmp_path, (1, 2), names, "iter_{}")
    for told in ({}, {"recursive": True}, {"recursive": True, "group_by": "none"}):
        found = planned(tmp_path, **told)
        assert removed_names(found) == []
        (problem,) = found.problems
        assert (
            f"left alone: {names[-1]} in iter_1 counts its own saves: could be different runs"
            in problem.message
        )
        assert "--series 'iter_*'" in problem.message
    assert removed_names(planned(tmp_path, series=["iter_*"])) == ["iter_1"]


def test_data_that_count_make_no_run_of_it(tmp_path: Path) -> None:
    run = saved(tmp_path, (100, 200), ("model.pt", "samples_step_1.npy", "samples_step_2.npy"))
    for told in ({"recursive": True}, {"recursive": True, "group_by": "none"}):
        found = planned(run, **told)
        assert removed_names(found) == []
        assert "samples_step_1.npy in step_100 counts its own saves" in found.problems[0].message


@pytest.mark.parametrize(
    "names",
    [
        ("model_step_{}.pt", "optim_step_{}.pt"),
        ("model_{}.pt", "ema_{}.pt"),
        ("model_0.pt", "model_1.pt", "model_2.pt"),
        ("model.safetensors", "model_1.safetensors", "optimizer_1.bin"),
        ("rank_8.pt", "rank_9.pt"),
        ("lora_rank_4.pt", "lora_rank_16.pt"),
        ("checkpoint_{}/model.pt",),
    ],
)
def test_what_belongs_to_the_save_counts_nothing(tmp_path: Path, names: tuple[str, ...]) -> None:
    for step in (5, 6):
        saved(tmp_path, (step,), [name.format(step) for name in names], "step_{}")
    assert removed_names(planned(tmp_path)) == ["step_5"]
    assert not planned(tmp_path).problems


# What protects it -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "target", ["step_1", "step_1/model.pt", "/old/place/run/step_1/deep/optim.pt", "./step_1/"]
)
def test_what_names_it_or_a_file_in_it_protects_all_of_it(tmp_path: Path, target: str) -> None:
    run = saved(tmp_path / "run", (1, 2, 3), ("model.pt", "deep/optim.pt"))
    (run / "best.json").write_text(f'{{"best": "{target}", "loss": 0.1}}')
    assert kept_reasons(planned(run)) == {"step_3": ("newest", "last 1"), "step_1": ("best.json",)}
    (run / "best.json").rename(run / "latest")
    (run / "latest").write_text(target)
    assert "latest" in kept_reasons(planned(run))["step_1"]


@pytest.mark.parametrize("target", ["step_1", "step_1/model.pt", "step_1/deep", "step_1/deep/optim.pt"])
def test_a_link_to_it_or_into_it_protects_all_of_it(tmp_path: Path, target: str) -> None:
    run = saved(tmp_path / "run", (1, 2, 3), ("model.pt", "deep/optim.pt"))
    (run / "best").symlink_to(target)
    assert kept_reasons(planned(run))["step_1"] == ("symlink best",)
    assert removed_names(planned(run, recursive=True)) == ["step_2"]


@pytest.mark.parametrize(
    "path", ["step_1", "step_1/model.pt", "step_1/deep/optim.pt", "step_1/deep/notes.txt"]
)
def test_a_pin_of_it_or_of_a_file_in_it_protects_all_of_it(tmp_path: Path, path: str) -> None:
    run = saved(tmp_path / "run", (1, 2, 3), ("model.pt", "deep/optim.pt", "deep/notes.txt"))
    pin([run / path])
    assert kept_reasons(planned(run))["step_1"] == ("pinned",)


@pytest.mark.parametrize("glob", ["step_1", "a.txt", "step_1/deep/a.txt"])
def test_a_glob_of_names_keeps_it_by_any_file_in_it(tmp_path: Path, glob: str) -> None:
    run = saved(tmp_path / "run", (1, 2, 3), ("model.pt", "deep/optim.pt"))
    write(run / "step_1" / "deep" / "a.txt")
    found = dry_run(run, policy=Policy(keep_last=1, keep_names=(glob,)))
    assert kept_reasons(found)["step_1"] == (f"name {glob}",)
    assert not any("matched nothing" in warning for warning in found.warnings)


@pytest.mark.parametrize("own", [".ckpttool-pins.toml", ".ckpttool-trash/1/model.pt"])
def test_pins_and_a_trash_in_it_keep_it(tmp_path: Path, own: str) -> None:
    """They are from when each file in it was taken for a checkpoint."""
    run = saved(tmp_path / "run", (1, 2, 3), PAIR)
    (run / "step_1" / own).parent.mkdir(parents=True, exist_ok=True)
    (run / "step_1" / own).write_text('pinned = ["model.pt"]')
    assert kept_reasons(planned(run))["step_1"] == (f"contains {own.partition('/')[0]}",)


@pytest.mark.parametrize("form", ["iter_{:07d}", "global_step_{}"])
def test_the_tracker_of_megatron_and_verl_protects_all_ranks(tmp_path: Path, form: str) -> None:
    run = saved(tmp_path / "run", (100, 200, 300), MEGATRON, form)
    (run / "latest_checkpointed_iteration.txt").write_text("200\n")
    assert kept_reasons(planned(run))[form.format(200)] == ("latest_checkpointed_iteration.txt",)
    assert removed_names(planned(run)) == [form.format(100)]
    done = rename(RenameRequest(directory=str(run), template="step_{step}"))
    assert not done.renames
    assert all("finds only" in one.message for one in done.planned.plan.kept)


def test_what_passes_a_part_of_it_over_keeps_all_of_it(tmp_path: Path) -> None:
    run = saved(tmp_path / "run", (1, 2, 3), PAIR)
    write(run / "step_1" / "a.txt")
    found = planned(run, exclude=["a.txt"])
    assert kept_reasons(found)["step_1"] == ("--exclude a.txt",)
    assert removed_names(found) == ["step_2"]
    assert not found.warnings
    assert latest(run, exclude=["optim.pt"]).entry.name == "step_3"


# A save that is not whole ---------------------------------------------------------------------------


def test_a_damaged_part_makes_all_of_it_damaged(tmp_path: Path) -> None:
    run = saved(tmp_path / "run", (1, 2, 3), MEGATRON, "iter_{}")
    os.truncate(run / "iter_3" / MEGATRON[1], 30)
    found = planned(run)
    assert removed_names(found) == ["iter_1"]
    assert [problem.path for problem in found.problems] == [str(run / "iter_3")]
    assert latest(run).entry.path == str(run / "iter_2")


def test_a_missing_rank_makes_it_incomplete(tmp_path: Path) -> None:
    run = saved(tmp_path / "run", (1, 2, 3), (*MEGATRON, "mp_rank_02/model_optim_rng.pt"), "iter_{}")
    shutil.rmtree(run / "iter_3" / "mp_rank_01")
    found = planned(run)
    assert removed_names(found) == ["iter_1"]
    assert "mp_rank_01/model_optim_rng.pt: no such file" in found.problems[0].message


# Its name -------------------------------------------------------------------------------------------


def _names(directory: Path) -> set[str]:
    return {path.relative_to(directory).as_posix() for path in directory.rglob("*.pt")}


def test_the_directory_gets_another_name_and_nothing_in_it(tmp_path: Path) -> None:
    run = saved(tmp_path / "run", (1, 2), MEGATRON)
    (run / "best.json").write_text('{"best": "step_1/mp_rank_00/model_optim_rng.pt"}')
    before = _names(run)
    template = "{run}-e0001-s{step:08d}"
    rename(RenameRequest(directory=str(run), template=template, recursive=True))
    assert _names(run) == {f"run-e0001-s{step:08d}/{name}" for step in (1, 2) for name in MEGATRON}
    assert (run / "best.json").read_text() == '{"best": "run-e0001-s00000001/mp_rank_00/model_optim_rng.pt"}'
    assert _steps(run) == [1, 2]
    undo(run)
    assert _names(run) == before


def test_a_name_by_which_it_would_be_no_save_is_refused(tmp_path: Path) -> None:
    run = saved(tmp_path / "run", (1, 2), PAIR)
    done = rename(RenameRequest(directory=str(run), template="exp1-{step}"))
    assert all("which isn't recognised as a single save" in one.message for one in done.planned.plan.refused)
    assert len(done.planned.plan.refused) == 2
    assert _names(run) == {f"step_{step}/{name}" for step in (1, 2) for name in PAIR}


# Whatever lies there --------------------------------------------------------------------------------

_FILES = (
    *(
        *MEGATRON,
        *PAIR,
        "ema.pt",
        "rank_0.pt",
        "rank_1.pt",
        "model_0.pt",
        "model_1.pt",
        "args.json",
        "log.txt",
    ),
    *("actor/model.pt", "critic/optim.pt", "model_{}.pt", "optim_step_{}.pt", "epoch_1.pt", "model_300.pt"),
)
_SAVES = st.lists(
    st.tuples(st.integers(0, 30), st.booleans()), min_size=1, max_size=4, unique_by=lambda save: save[0]
)
_TRIALS = st.lists(
    st.tuples(st.sampled_from(FORMS[:-1]), st.sets(st.sampled_from(_FILES), min_size=1, max_size=4), _SAVES),
    min_size=1,
    max_size=3,
)
_REQUESTS = st.fixed_dictionaries(
    {"recursive": st.just(True), "depth": st.sampled_from(["full", "quick"])},
    optional={
        "group_by": st.sampled_from(["parent", "prefix", "format", "none"]),
        "series": st.sampled_from([["model.pt"], ["*_*"], ["*.pt"], ["*/*/model.pt"], ["step_*", "epoch_*"]]),
        "exclude": st.sampled_from([["ema.pt"], ["rank_*"], ["*/checkpoint_*"]]),
    },
)
_POLICIES = st.fixed_dictionaries(
    {},
    optional={
        "keep_last": st.integers(1, 3),
        "keep_every_steps": st.integers(1, 20),
        "max_size": st.integers(1, 3000),
        "keep_names": st.sampled_from([("*1",), ("model.pt",)]),
        "incomplete": st.sampled_from(["keep", "remove"]),
    },
).filter(lambda told: bool(told.keys() - {"incomplete"}))


@settings(max_examples=settings.default.max_examples // 4)
@given(trials=_TRIALS, told=_REQUESTS, rules=_POLICIES)
def test_no_save_is_ever_split_and_the_newest_of_each_trial_stays(
    tmp_path_factory: pytest.TempPathFactory, trials, told, rules
) -> None:
    root = tmp_path_factory.mktemp("trials")
    for number, (form, names, saves) in enumerate(trials):
        for step, is_damaged in saves:
            place = root / f"trial_{number}" / form.format(step)
            for at, name in enumerate(sorted(names)):
                write(place / name.format(step), step, name="w" if at else "v")
            if is_damaged:
                victims = sorted(place.rglob("*.pt"))
                os.truncate(victims[step % len(victims)], 20) if victims else None
    before = {place: _everything(place) for place in root.glob("*/*")}
    whole = {place for place in before if all(path.stat().st_size != 20 for path in place.rglob("*.pt"))}
    try:
        prune(root, **rules, **told)
    except UsageError:  # nothing would be kept, or more would go than may
        assert {place: _everything(place) for place in root.glob("*/*")} == before
    for place, names in before.items():
        assert _everything(place) in (names, set())
    if told.get("group_by") != "none":
        for trial in root.glob("*"):
            own = [place for place in before if place.parent == trial]
            assert max(own, key=_step).exists()
            sound = [place for place in own if place in whole]
            assert not sound or max(sound, key=_step).exists()
    shutil.rmtree(root)


def _everything(place: Path) -> set[str]:
    return {path.relative_to(place).as_posix() for path in place.rglob("*") if path.is_file()}


def _step(place: Path) -> int:
    return int("".join(filter(str.isdigit, place.name)))


SUGGESTED = ("step_{step}", "epoch_{epoch:04d}-step_{step:08d}")


@pytest.mark.parametrize("template", SUGGESTED)
def test_the_templates_that_are_suggested_keep_a_series(tmp_path: Path, template: str) -> None:
    run = tmp_path / "run"
    for step in (50, 100, 150):
        write(run / f"epoch_{step // 50}-step_{step}" / "model.pt", step)
    done = rename(RenameRequest(directory=str(run), template=template))
    assert len(done.renames) == 3
    assert len(planned(run).plan.removals) == 2


@pytest.mark.parametrize("template", ["e{epoch:04d}-s{step:08d}", "{epoch}-{step}", "exp1-{step}"])
def test_a_template_that_ends_a_series_is_refused(tmp_path: Path, template: str) -> None:
    run = tmp_path / "run"
    for step in (50, 100, 150):
        write(run / f"epoch_{step // 50}-step_{step}" / "model.pt", step)
    done = rename(RenameRequest(directory=str(run), template=template))
    assert (done.is_refused, done.renames) == (True, ())
    assert all(one in done.problems[0].message for one in SUGGESTED)
    assert len(planned(run).plan.removals) == 2
