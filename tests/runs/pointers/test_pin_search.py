"""Lists of pins: which speak of a directory, and what an entry that pins nothing comes to."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from ckpttool import DamagedCheckpoint, Policy, pin, unpin
from tests.support.retention import Pruned, dry_run, kept_reasons

PINS = ".ckpttool-pins.toml"
NAME = "model_epoch_3.pth"


@pytest.fixture
def runs(series: Path) -> Path:
    """Return a directory of two runs of ten epochs each, and a table of losses."""
    shutil.copytree(series, series.parent / "runs" / "exp1")
    shutil.copytree(series, series.parent / "runs" / "exp2")
    (series.parent / "runs" / "losses.csv").write_text("step,loss\n1,2\n")
    return series.parent / "runs"


def pruned(directory: Path, *, recursive: bool = False) -> Pruned:
    return dry_run(directory, policy=Policy(keep_last=1), recursive=recursive)


def kept(done: Pruned) -> list[str]:
    return [one.entry.path for group in done.plan.groups for one in group.keep if "pinned" in one.reasons]


def listed(directory: Path, *entries: str) -> None:
    (directory / PINS).write_text("pinned = [" + ", ".join(map(repr, entries)) + "]\n")


@pytest.mark.parametrize("is_absolute", [False, True])
def test_a_list_above_counts_however_a_directory_is_named(
    run, runs: Path, is_absolute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = runs / "exp2" / NAME
    listed(runs, str(path) if is_absolute else f"exp2/{NAME}")
    assert kept(pruned(runs, recursive=True)) == [str(path)]
    assert kept(pruned(runs / "exp2")) == [str(path)]
    assert kept(pruned(runs / "exp1")) == []
    assert run("pin", "--list", runs / "exp2").out == f"{path}\n"
    assert run("pin", "--list", runs / "exp1").out == ""
    monkeypatch.chdir(runs / "exp2")
    assert kept(pruned(Path())) == [NAME]
    assert pin([NAME]).changed == ()
    assert unpin([NAME]).changed == (NAME,)
    assert not (runs / PINS).exists()


def test_a_list_between_counts(runs: Path) -> None:
    listed(runs, f"exp2/{NAME}")
    assert kept(pruned(runs.parent, recursive=True)) == [str(runs / "exp2" / NAME)]


@pytest.mark.parametrize("entry", ["exp1", ".", "losses.csv", "", "..", "../run", "exp1/../.."])
def test_an_entry_that_pins_nothing_leaves_alone_what_it_may_mean(run, runs: Path, entry: str) -> None:
    listed(runs, entry)
    done = pruned(runs, recursive=True)
    assert any(f"pinned has {entry!r}, which " in one.message for one in done.problems)
    assert not any(one.directory == str(runs / "exp1") for one in done.plan.removals)
    listed_again = json.loads(run("pin", "--list", "--json", runs).out)
    assert ([one["name"] for one in listed_again["void"]], listed_again["pinned"]) == ([entry], [])


def test_of_a_directory_that_holds_a_run_that_run_alone_is_left_alone(runs: Path) -> None:
    listed(runs, "exp1")
    assert {one.directory for one in pruned(runs, recursive=True).plan.removals} == {str(runs / "exp2")}
    assert pruned(runs / "exp1").plan.removals == ()


@pytest.mark.parametrize(
    "text", [f'pin = ["{NAME}"]', f'Pinned = ["{NAME}"]', f'pinend = ["{NAME}"]', f'[x]\npinned = ["{NAME}"]']
)
def test_a_misspelt_list_is_not_taken_for_none(runs: Path, text: str) -> None:
    (runs / "exp1" / PINS).write_text(text)
    done = pruned(runs / "exp1")
    assert (len(done.problems), done.plan.removals) == (1, ())
    for change in (pin, unpin):
        with pytest.raises(DamagedCheckpoint, match="has no effect"):
            change([runs / "exp1" / NAME])
    assert (runs / "exp1" / PINS).read_text() == text


def test_a_pin_in_a_directory_that_was_moved_keeps_what_it_may_be_now(runs: Path) -> None:
    listed(runs, f"exp2/{NAME}")
    os.rename(runs / "exp2", runs / "moved")
    for done in (pruned(runs / "moved"), pruned(runs, recursive=True)):
        gone = {one.path for one in done.plan.removals}
        assert gone and str(runs / "moved" / NAME) not in gone
        assert f"pinned is exp2/{NAME}, which doesn't exist" in done.warnings[-1]


def test_a_pin_in_a_fluid_root_that_is_gone_keeps_its_namesakes_and_blocks_nothing(
    files: Path, tmp_path: Path
) -> None:
    root = Path(shutil.copytree(files / "fluid" / "root", tmp_path / "fluid"))
    other = Path(shutil.copytree(root, tmp_path / "other"))
    pin([root / "checkpoint_1"])
    before = {one.name for one in pruned(other).plan.removals}
    shutil.rmtree(root)
    for done in (pruned(other), pruned(tmp_path, recursive=True)):
        assert (done.problems, {one.name for one in done.plan.removals}) == ((), before - {"checkpoint_1"})
        assert kept_reasons(done)["checkpoint_1"] == ("perhaps pinned: fluid/checkpoint_1",)
        assert "pinned is fluid/checkpoint_1, which doesn't exist" in done.warnings[-1]
    unpin([root / "checkpoint_1"])
    assert {one.name for one in pruned(other).plan.removals} == before


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no such pipes")
def test_a_pipe_is_no_list_and_is_not_waited_for(run, runs: Path) -> None:
    os.mkfifo(runs / "exp1" / PINS)
    for change in (pin, unpin):
        with pytest.raises(DamagedCheckpoint, match="not a regular file"):
            change([runs / "exp1" / NAME])
    answer = run("pin", "--list", runs)
    assert (answer.status, answer.out) == (2, "") and "not a regular file" in answer.err
    assert pruned(runs / "exp1").plan.removals == ()


def test_what_can_not_be_read_is_told_and_the_rest_is_listed(run, runs: Path) -> None:
    (runs / "exp1" / PINS).write_text("pinned = [")
    pin([runs / "exp2" / NAME])
    status, out, err = run("pin", "--list", runs)
    assert (status, out) == (2, f"{runs / 'exp2' / NAME}\n")
    assert err.startswith(f"ckpttool: error: {runs / 'exp1' / PINS}: ") and err.count("\n") == 1
