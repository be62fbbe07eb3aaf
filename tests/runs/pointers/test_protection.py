"""Who points at what: nothing that somebody would miss goes."""

from __future__ import annotations

import json
import os
import shutil
import time
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from ckpttool import Policy, PruneRequest, list_checkpoints, prune
from ckpttool.runs import trackers
from ckpttool.runs.pointers.kinds import Pointers
from ckpttool.runs.pointers.search import PointerProtections
from ckpttool.runs.survey import survey_directory
from tests.support.retention import dry_run, kept_reasons
from tests.support.runs import make_run
from tests.support.saves import protected_in, skipped_in


def _kept(directory: Path, keep: int) -> set[str]:
    made = prune(directory, keep_last=keep, depth="quick", dry_run=True)
    return {kept.entry.name for one in made.plan.groups for kept in one.keep}


@pytest.fixture
def series(tmp_path: Path) -> Path:
    """Return a directory of six epochs."""
    return make_run(tmp_path / "run", 1, 2, 3, 4, 5, 10)


# Symlinks -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("link", ["best.pth", "sub/best.pth", "../best.pth"])
def test_a_symlink_in_the_tree_or_beside_it(series: Path, link: str) -> None:
    place = series / link
    place.parent.mkdir(exist_ok=True)
    place.symlink_to(series / "model_epoch_3.pth")
    assert protected_in(series) == {"model_epoch_3.pth": ["symlink best.pth"]}
    assert "model_epoch_3.pth" in _kept(series, 2)


def test_a_relative_symlink_through_another(series: Path) -> None:
    (series / "a.pth").symlink_to("b.pth")
    (series / "b.pth").symlink_to("model_epoch_2.pth")
    assert protected_in(series) == {"model_epoch_2.pth": ["symlink a.pth", "symlink b.pth"]}


def test_a_symlink_to_or_into_a_directory(trainer: Path) -> None:
    (trainer / "latest").symlink_to("checkpoint-2")
    (trainer / "weights").symlink_to("checkpoint-6/model.safetensors")
    reasons = protected_in(trainer)
    assert reasons["checkpoint-2"] == ["symlink latest"]
    assert reasons["checkpoint-6"] == ["symlink weights"]


def test_a_symlink_inside_a_checkpoint_to_itself_protects_nothing(trainer: Path) -> None:
    (trainer / "checkpoint-2" / "again").symlink_to("model.safetensors")
    (trainer / "checkpoint-6" / "self").symlink_to(".")
    assert set(protected_in(trainer)) == {"checkpoint-4"}


def test_symlinks_in_a_circle_harm_nobody(series: Path) -> None:
    (series / "a").symlink_to("b")
    (series / "b").symlink_to("a")
    (series / "loop").symlink_to(".")
    assert protected_in(series) == {}
    assert len(_kept(series, 2)) == 2


def test_a_dangling_symlink_of_a_run_that_was_moved(series: Path) -> None:
    (series / "best.pth").symlink_to("/gone/away/model_epoch_4.pth")
    assert protected_in(series) == {"model_epoch_4.pth": ["symlink best.pth"]}


def test_a_dangling_symlink_that_may_have_meant_the_series(series: Path) -> None:
    (series / "best.pth").symlink_to("model_epoch_11.pth")
    (why,) = skipped_in(series).values()
    assert why.endswith("best.pth: symlink to model_epoch_11.pth, which doesn't exist")
    assert len(_kept(series, 2)) == 6


def test_a_dangling_symlink_that_can_not_have(series: Path) -> None:
    (series / "debug.log").symlink_to("/tmp/wandb/debug.log.gone")
    assert skipped_in(series) == {}


def test_a_checkpoint_that_is_a_symlink_stays(series: Path, tmp_path: Path) -> None:
    os.rename(series / "model_epoch_1.pth", tmp_path / "blob")
    (series / "model_epoch_1.pth").symlink_to(tmp_path / "blob")
    made = prune(series, keep_last=2, depth="quick", dry_run=True)
    (reasons,) = [kept.reasons for kept in made.plan.groups[0].keep if kept.entry.name == "model_epoch_1.pth"]
    assert reasons[-1] == "is a symlink"


# Files that name one --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["latest", "last_checkpoint"])
@pytest.mark.parametrize("text", ["model_epoch_3.pth", "model_epoch_3.pth\n", "/moved/model_epoch_3.pth"])
def test_a_text_that_names_one(series: Path, name: str, text: str) -> None:
    (series / name).write_text(text)
    assert protected_in(series) == {"model_epoch_3.pth": [name]}


@pytest.mark.parametrize("name", ["iter_{:07d}", "global_step_{}"])
def test_the_number_that_megatron_and_verl_write(name: str, files: Path, tmp_path: Path) -> None:
    for number in (1, 2, 3):
        shutil.copytree(files / "torch-dcp" / "two-ranks", tmp_path / name.format(number))
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    tracker.write_text("2\n")
    assert protected_in(tmp_path) == {name.format(2): [tracker.name]}


def test_the_newest_that_is_damaged_does_not_say_which_is_the_best(trainer: Path) -> None:
    newest = trainer / "checkpoint-10"
    state = json.loads((newest / "trainer_state.json").read_text())
    (newest / "trainer_state.json").write_text(json.dumps(state | {"best_model_checkpoint": "checkpoint-2"}))
    assert protected_in(trainer) == {"checkpoint-2": ["best_model_checkpoint"]}
    weights = newest / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert protected_in(trainer) == {"checkpoint-4": ["best_model_checkpoint"]}


@pytest.mark.parametrize("name", ["best.txt", "latest.txt", "best_checkpoint", "whatever"])
def test_a_small_text_that_is_nothing_but_a_name(series: Path, name: str) -> None:
    (series / name).write_text("model_epoch_3.pth\n")
    assert protected_in(series) == {"model_epoch_3.pth": [name]}
    (series / name).write_text("model_epoch_12.pth")
    assert (protected_in(series), skipped_in(series)) == ({}, {})
    (series / name).write_text("the best is\nmodel_epoch_3.pth")
    assert protected_in(series) == {"model_epoch_3.pth": [name]}
    (series / name).write_text("the best is not my_model_epoch_3.pth, nor model_epoch_3.pth2")
    assert protected_in(series) == {}


def test_a_link_to_what_is_gone_means_the_run_of_its_setting(series: Path) -> None:
    for at, path in enumerate(sorted(series.iterdir())):
        path.rename(series / f"llama_acc{2 + 2 * (at % 2)}_epoch_{at // 2}.pth")
    (series / "current").symlink_to("llama_acc4_epoch_9.pth")
    (key,) = skipped_in(series)
    assert key.endswith("llama_acc4_epoch_*.pth")


def test_what_is_named_best(series: Path) -> None:
    os.rename(series / "model_epoch_3.pth", series / "model_best_epoch_3.pth")
    os.rename(series / "model_epoch_5.pth", series / "model_best_epoch_5.pth")
    assert protected_in(series) == {f"model_best_epoch_{epoch}.pth": ["named best"] for epoch in (3, 5)}
    assert {f"model_best_epoch_{epoch}.pth" for epoch in (3, 5)} < _kept(series, 1)


@pytest.mark.parametrize("name", ["latest", "latest_universal", "last_checkpoint"])
def test_a_text_that_names_what_is_gone(series: Path, name: str) -> None:
    (series / name).write_text("model_epoch_12.pth")
    (why,) = skipped_in(series).values()
    assert f"{name} is model_epoch_12.pth, which doesn't exist" in why


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"two\nlines", b"x" * 5000])
def test_a_file_called_latest_that_is_no_pointer(series: Path, content: bytes) -> None:
    (series / "latest").write_bytes(content)
    assert (protected_in(series), skipped_in(series)) == ({}, {})


def test_a_text_that_names_what_is_no_checkpoint(series: Path) -> None:
    (series / "global_step5").mkdir()
    (series / "latest").write_text("global_step5")
    assert (protected_in(series), skipped_in(series)) == ({}, {})


def test_a_trainer_s_best(trainer: Path) -> None:
    assert protected_in(trainer) == {"checkpoint-4": ["best_model_checkpoint"]}
    assert _kept(trainer, 2) == {"checkpoint-4", "checkpoint-8", "checkpoint-10"}


def test_the_newest_trainer_state_alone_speaks(trainer: Path) -> None:
    state = json.loads((trainer / "checkpoint-10" / "trainer_state.json").read_text())
    state["best_model_checkpoint"] = "/elsewhere/trainer/checkpoint-6"
    (trainer / "checkpoint-10" / "trainer_state.json").write_text(json.dumps(state))
    assert protected_in(trainer) == {"checkpoint-6": ["best_model_checkpoint"]}


def test_the_run_s_own_trainer_state(trainer: Path) -> None:
    (trainer / "trainer_state.json").write_text(json.dumps({"best_model_checkpoint": "x/checkpoint-2"}))
    assert set(protected_in(trainer)) == {"checkpoint-2", "checkpoint-4"}


def test_a_trainer_state_that_can_not_be_read(trainer: Path) -> None:
    (trainer / "trainer_state.json").write_text('{"best_model')
    (why,) = skipped_in(trainer).values()
    assert why.endswith("trainer_state.json: best_model_checkpoint can't be read")


def test_lightning_s_best(tmp_path: Path, files: Path) -> None:
    content = (files / "pytorch" / "lightning" / "epoch=1-step=4.ckpt").read_bytes()
    for step in (2, 4, 6):
        (tmp_path / f"epoch=1-step={step}.ckpt").write_bytes(content)
    assert protected_in(tmp_path) == {"epoch=1-step=4.ckpt": ["best_model_path"]}


def test_a_best_that_is_gone_leaves_the_series_alone(tmp_path: Path, files: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    content = (files / "pytorch" / "lightning" / "epoch=1-step=4.ckpt").read_bytes()
    for step in (2, 6):
        (run / f"epoch=1-step={step}.ckpt").write_bytes(content)
    (why,) = skipped_in(run).values()
    assert "best_model_path is lightning/epoch=1-step=4.ckpt, which doesn't exist" in why
    (tmp_path / "lightning").mkdir()
    (tmp_path / "lightning" / "epoch=1-step=4.ckpt").write_bytes(content)
    assert skipped_in(run) == {}


def test_pins(series: Path) -> None:
    (series / ".ckpttool-pins.toml").write_text('pinned = ["model_epoch_2.pth"]\n')
    assert protected_in(series) == {"model_epoch_2.pth": ["pinned"]}
    (series / ".ckpttool-pins.toml").write_text("pinned = [")
    assert len(skipped_in(series)) == 1


# Writers, nested runs, age --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["model_epoch_3.pth.tmp", "model_epoch_3.part", ".model_epoch_3.pth.tmp-81"])
def test_a_writer_s_temporary_file(series: Path, name: str) -> None:
    (series / name).write_bytes(b"half")
    assert protected_in(series) == {"model_epoch_3.pth": ["being written"]}


def test_an_old_temporary_file_says_how_old_it_is(series: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = series / "model_epoch_3.pth.tmp"
    path.write_bytes(b"half")
    os.utime(path, (1_700_000_000, 1_700_000_000))
    monkeypatch.setattr(time, "time", lambda: 1_700_000_000 + 7 * 86_400.0)
    told = "being written (model_epoch_3.pth.tmp, 7 d old)"
    assert protected_in(series) == {"model_epoch_3.pth": [told]}
    monkeypatch.setattr(time, "time", lambda: 1_700_000_000 + 2 * 3_600.0)
    assert protected_in(series)["model_epoch_3.pth"][0].endswith(", 2 h old)")


def test_a_run_that_is_a_checkpoint_too_stays(trainer: Path, files: Path) -> None:
    for number in (1, 2, 3):
        run = trainer.parent / "runs" / f"trial_{number}"
        run.mkdir(parents=True)
        for file in (files / "safetensors" / "sharded").iterdir():
            (run / file.name).write_bytes(file.read_bytes())
        (run / "checkpoint-2").mkdir()
        for file in (trainer / "checkpoint-2").iterdir():
            (run / "checkpoint-2" / file.name).write_bytes(file.read_bytes())
    made = prune(trainer.parent / "runs", keep_last=1, dry_run=True)
    assert made.plan.removals == ()


def test_min_age(series: Path) -> None:
    os.utime(series / "model_epoch_2.pth", ns=(0, 2**62))
    for epoch in (1, 3, 4, 5, 10):
        os.utime(series / f"model_epoch_{epoch}.pth", ns=(0, epoch))
    request = PruneRequest(directory=str(series), policy=Policy(keep_last=1), min_age=60, depth="quick")
    (one,) = prune(request, dry_run=True).plan.groups
    assert [kept.reasons for kept in one.keep] == [
        ("newest", "last 1"),
        ("written last", "last 1 by time", "too young"),
    ]


# Runs that were moved, and pointers to what is gone ------------------------------------------------


def _best_of(run: Path, target: str | None) -> None:
    """Let the newest checkpoint of a trainer's run name another one as the best."""
    state = run / "checkpoint-10" / "trainer_state.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"best_model_checkpoint": target}))


def test_the_best_of_one_run_is_not_that_of_another(trainer: Path, tmp_path: Path) -> None:
    shutil.copytree(trainer, tmp_path / "other")
    _best_of(tmp_path / "other", None)
    shutil.rmtree(trainer / "checkpoint-4")
    _best_of(trainer, "/old/home/out/checkpoint-4")
    assert protected_in(tmp_path, recursive=True) == {}
    (why,) = skipped_in(tmp_path, recursive=True).values()
    assert why.endswith("best_model_checkpoint is /old/home/out/checkpoint-4, which doesn't exist")
    made = prune(trainer, keep_last=1, depth="quick", dry_run=True)
    assert made.plan.removals == () and len(made.problems) == 1


@pytest.mark.parametrize("parent", ["out", "trainer"])
def test_what_lies_elsewhere_has_to_be_more_like_the_path(trainer: Path, tmp_path: Path, parent: str) -> None:
    """Where runs lie in ``a/out`` and ``b/out``, the name of the run says more than that of its directory."""
    moved = tmp_path / "a" / parent
    shutil.copytree(trainer, moved)
    shutil.copytree(trainer, tmp_path / "b" / parent)
    shutil.rmtree(moved / "checkpoint-4")
    for target, is_found in (("/old/b/%s/checkpoint-4", True), ("/old/c/%s/checkpoint-4", False)):
        _best_of(moved, target % parent)
        assert (skipped_in(tmp_path / "a", recursive=True) == {}) == is_found
        _best_of(tmp_path / "b" / parent, None)
        assert (f"b/{parent}/checkpoint-4" in protected_in(tmp_path, recursive=True)) == is_found


@pytest.mark.parametrize("target", ["{0}/checkpoint-4", "trainer/checkpoint-4", "./trainer/checkpoint-4/"])
def test_a_best_that_the_trainer_itself_removed(trainer: Path, target: str) -> None:
    """Some versions of Trainer name a best one that they never saved, or removed: no run was moved."""
    shutil.rmtree(trainer / "checkpoint-4")
    _best_of(trainer, target.format(trainer))
    made = prune(trainer, keep_last=1, depth="quick", dry_run=True)
    assert len(made.plan.removals) == 3 and made.problems == ()
    (warning,) = made.warnings
    assert warning.endswith("which doesn't exist any more; the Trainer resumes without it")


def test_a_single_checkpoint_loses_nothing_by_a_best_that_is_gone(trainer: Path, tmp_path: Path) -> None:
    os.rename(trainer / "checkpoint-10", tmp_path / "final")
    shutil.rmtree(trainer)
    state = tmp_path / "final" / "trainer_state.json"
    state.write_text(json.dumps({"best_model_checkpoint": "/old/out/checkpoint-4"}))
    assert skipped_in(tmp_path) == {}


def test_a_model_that_holds_its_own_run_s_checkpoints(trainer: Path, tmp_path: Path) -> None:
    for name in ("model.safetensors", "trainer_state.json"):
        shutil.copy2(trainer / "checkpoint-10" / name, trainer)
    os.rename(trainer, tmp_path / "moved")
    for recursive in (False, True):
        assert skipped_in(tmp_path, recursive=recursive) == {}
        best = protected_in(tmp_path, recursive=recursive).get("moved/checkpoint-4")
        assert best == (["best_model_checkpoint"] if recursive else None)


@pytest.mark.parametrize("glob", ["checkpoint-4", "model/checkpoint-4/", "{0}/model/checkpoint-4"])
def test_what_is_excluded_inside_a_checkpoint(trainer: Path, files: Path, tmp_path: Path, glob: str) -> None:
    model = tmp_path / "all" / "model"
    shutil.copytree(files / "savedmodel" / "plain", model)
    os.rename(trainer / "checkpoint-4", model / "checkpoint-4")
    excluded = [glob.format(model.parent)]
    listing = list_checkpoints(model.parent, exclude=excluded)
    assert ([row.entry.path for row in listing.checkpoints], listing.warnings) == ([str(model)], ())
    planned = dry_run(model.parent, policy=Policy(keep_last=1), recursive=True, exclude=excluded)
    assert "holds other checkpoints" in kept_reasons(planned)["model"]


# Trackers -------------------------------------------------------------------------------------------


def test_a_tracker_that_cannot_be_imported_keeps_all(series: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = EntryPoint("toy", "no_such_module:Toy", trackers.ENTRY_POINTS)
    monkeypatch.setattr(trackers, "entry_points_of", lambda group: (broken,))
    plan = prune(series, keep_last=1, depth="quick", dry_run=True).plan
    assert not plan.removals
    reason = "no_such_module:Toy: the plug-in toy can't be imported: No module named 'no_such_module'"
    assert [str(group.skipped) for group in plan.groups] == [f"can't list the registered models: {reason}"]


# Snapshots ------------------------------------------------------------------------------------------


def test_protections_are_a_function_of_the_survey(series: Path) -> None:
    """Once pointers were looked up, nothing on the disk changes what they protect."""
    (series / "best.pth").symlink_to("model_epoch_1.pth")
    (series / "notes").mkdir()
    (series / "notes" / "best.txt").write_text("../model_epoch_2.pth")
    (series / ".ckpttool-pins.toml").write_text('pinned = ["model_epoch_3.pth"]')
    (series / "latest").write_text("model_epoch_4.pth")
    (series / "gone").symlink_to("model_epoch_7.pth")
    survey = survey_directory(series)

    def protections() -> PointerProtections:
        return Pointers(survey.root, survey.groups, snapshot=survey.snapshot).protections()

    before = protections()
    reasons = {os.path.basename(path): why for path, why in before.reasons.items()}
    assert reasons == {
        "model_epoch_1.pth": ["symlink best.pth"],
        "model_epoch_2.pth": ["best.txt"],
        "model_epoch_3.pth": ["pinned"],
        "model_epoch_4.pth": ["latest"],
    }
    assert len(before.skipped) == 1
    shutil.rmtree(series)
    assert protections() == before
    series.mkdir()
    (series / "latest").write_text("model_epoch_5.pth")
    assert protections() == before
    assert not Pointers(survey.root, survey.groups).protections().reasons.keys() & before.reasons.keys()
