"""Pins: what a path means, where its pin stands, and what becomes of the file."""

from __future__ import annotations

import json
import os
import shutil
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from ckpttool import (
    AccessDenied,
    CheckpointError,
    DamagedCheckpoint,
    NotACheckpoint,
    NotFound,
    Policy,
    Unsupported,
    pin,
    rename,
    unpin,
)
from tests.support.changes import held_by_another, pinned_in, wait_for_the_lock
from tests.support.retention import dry_run, removed_names
from tests.support.runs import KINDS

PINS = ".ckpttool-pins.toml"
KEEP_1 = Policy(keep_last=1)


def removed(directory: Path, *, recursive: bool = False) -> set[str]:
    """Return the names of what a prune would remove; nothing is left alone."""
    done = dry_run(directory, policy=KEEP_1, recursive=recursive)
    assert done.problems == ()
    return set(removed_names(done))


@pytest.fixture
def manager(files: Path, tmp_path: Path) -> Path:
    """Return a directory of TensorFlow's CheckpointManager: ckpt-1 to ckpt-10."""
    return Path(shutil.copytree(files / "tensorflow" / "manager", tmp_path / "tf"))


@pytest.fixture
def root(files: Path, tmp_path: Path) -> Path:
    """Return a Fluid root of five serials."""
    return Path(shutil.copytree(files / "fluid" / "root", tmp_path / "fluid"))


def test_a_pin_keeps_a_checkpoint_and_is_taken_back(series: Path) -> None:
    done = pin([series / "model_epoch_3.pth"])
    assert done.changed == (str(series / "model_epoch_3.pth"),)
    assert pinned_in(series) == ["model_epoch_3.pth"]
    assert "model_epoch_3.pth" not in removed(series)
    again = pin([series / "model_epoch_3.pth"])
    assert (again.changed, again.unchanged) == ((), done.changed)
    assert unpin([series / "model_epoch_3.pth"]).changed == done.changed
    assert not (series / PINS).exists()
    assert "model_epoch_3.pth" in removed(series)
    assert unpin([series / "model_epoch_3.pth"]).unchanged == done.changed


def test_what_else_stands_in_the_file_stays(series: Path) -> None:
    text = '# of the paper\nby = "ada"\npinned = [\n  "model_epoch_1.pth",  # figure 2\n]\n\n[later]\nx = 1\n'
    (series / PINS).write_text(text)
    (series / PINS).chmod(0o640)
    pin([series / "model_epoch_2.pth"])
    expected = text.replace("figure 2\n", 'figure 2\n  "model_epoch_2.pth",\n')
    assert (series / PINS).read_text() == expected
    assert (series / PINS).stat().st_mode & 0o777 == 0o640
    unpin([series / "model_epoch_2.pth"])
    assert (series / PINS).read_text() == text


@pytest.mark.parametrize(
    "spelling",
    [
        "ckpt-2",
        "ckpt-2.index",
        "ckpt-2.data-00000-of-00001",
        "../tf/ckpt-2",
        "link/ckpt-2",
        "link.index",
        "link",
    ],
)
def test_every_spelling_of_a_prefix(manager: Path, spelling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (manager / "link").symlink_to(manager) if "/" in spelling else (manager / "link.index").symlink_to(
        "ckpt-2.index"
    )
    monkeypatch.chdir(manager)
    pin([spelling])
    assert pinned_in(manager) == ["ckpt-2"]
    assert pin(["ckpt-2"]).changed == ()
    assert unpin([spelling]).changed != ()
    assert not (manager / PINS).exists()


def test_a_shard_a_directory_and_a_link_mean_the_whole(sharded: Path, trainer: Path) -> None:
    pin([sharded / "epoch_2-00001-of-00004.safetensors"])
    assert pinned_in(sharded) == ["epoch_2.safetensors.index.json"]
    assert "epoch_2.safetensors.index.json" not in removed(sharded)
    pin([trainer / "checkpoint-2" / "model.safetensors", f"{trainer}/checkpoint-6/"])
    assert pinned_in(trainer) == ["checkpoint-2", "checkpoint-6"]
    (trainer / "best").symlink_to("checkpoint-8")
    pin([trainer / "best"])
    assert pinned_in(trainer) == ["checkpoint-2", "checkpoint-6", "checkpoint-8"]
    assert removed(trainer) == set()


def test_a_file_in_a_directory_that_is_no_checkpoint_itself(series: Path, files: Path) -> None:
    saved = Path(shutil.copytree(files / "savedmodel" / "plain", series / "saved"))
    pin([saved / "variables" / "variables.index"])
    assert pinned_in(series) == ["saved"]


@pytest.mark.parametrize("name", ["trainer_state.json", "notes.txt"])
def test_any_file_in_a_trainers_directory_means_the_whole(trainer: Path, name: str) -> None:
    (trainer / "checkpoint-2" / "notes.txt").write_text("notes")
    pin([trainer / "checkpoint-2" / name])
    assert pinned_in(trainer) == ["checkpoint-2"]


def test_a_part_of_a_fluid_serial_means_the_whole(root: Path) -> None:
    pin([root / "checkpoint_3" / "__model__"])
    assert pinned_in(root.parent) == ["fluid/checkpoint_3"]


def test_a_list_of_checkpoints_is_none(manager: Path) -> None:
    with pytest.raises(NotACheckpoint) as error:
        pin([manager / "checkpoint"])
    assert error.value.reason == "only lists checkpoints (name one of them)"


def test_pins_of_a_fluid_root_lie_beside_it(run, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = set(os.listdir(root))
    other = Path(shutil.copytree(root, root.parent / "other"))
    pin([root / "checkpoint_1"])
    assert set(os.listdir(root)) == names
    assert pinned_in(root.parent) == ["fluid/checkpoint_1"]
    assert removed(root) == {"checkpoint_0", "checkpoint_2", "checkpoint_3"}
    assert "checkpoint_1" in removed(other)
    for place in (root, root.parent):
        assert run("pin", "--list", place).out == f"{root / 'checkpoint_1'}\n"
    monkeypatch.chdir(root)
    assert removed(Path()) == {"checkpoint_0", "checkpoint_2", "checkpoint_3"}
    pin(["checkpoint_2"])
    assert pinned_in(root.parent) == ["fluid/checkpoint_1", "fluid/checkpoint_2"]
    shutil.rmtree(root / "checkpoint_1")
    unpin(["checkpoint_1", "checkpoint_2"])
    assert sorted(os.listdir(root.parent)) == ["fluid", "other"]


def test_a_pin_in_one_fluid_root_that_leads_nowhere_stops_that_root_alone(root: Path) -> None:
    other = Path(shutil.copytree(root, root.parent / "other"))
    pin([root / "checkpoint_1"])
    shutil.rmtree(root / "checkpoint_1")
    done = dry_run(root.parent, policy=KEEP_1, recursive=True)
    (problem,) = done.problems
    assert problem.path == str(root / "checkpoint_*")
    assert (
        "pinned is fluid/checkpoint_1, which doesn't exist (ckpttool unpin removes the pin)"
        in problem.message
    )
    assert {one.directory for one in done.plan.removals} == {str(other)}


def test_the_pin_of_what_has_gone_is_taken_back(run, series: Path) -> None:
    pin([series / "model_epoch_3.pth"])
    (series / "model_epoch_3.pth").unlink()
    assert dry_run(series, policy=KEEP_1).problems != ()
    listed = json.loads(run("pin", "--list", "--json", series).out)
    assert listed["missing"] == listed["pinned"] == [str(series / "model_epoch_3.pth")]
    assert unpin([series / "model_epoch_3.pth"]).changed == (str(series / "model_epoch_3.pth"),)
    with pytest.raises(NotFound):
        unpin([series / "model_epoch_3.pth"])


def test_a_pin_means_its_place_and_not_its_name(series: Path) -> None:
    copy = Path(shutil.copytree(series, series.parent / "copy"))
    pin([series / "model_epoch_3.pth"])
    done = dry_run(series.parent, policy=KEEP_1, recursive=True)
    gone = {one.path for one in done.plan.removals}
    assert str(copy / "model_epoch_3.pth") in gone
    assert str(series / "model_epoch_3.pth") not in gone


@pytest.mark.parametrize(
    ("name", "kind"), [(".", NotACheckpoint), ("none.pth", NotFound), ("notes.txt", NotACheckpoint)]
)
def test_what_is_no_checkpoint_is_refused_and_nothing_is_pinned_in(
    series: Path, name: str, kind: type[CheckpointError]
) -> None:
    (series / "notes.txt").write_text("notes")
    with pytest.raises(kind):
        pin([series / "model_epoch_3.pth", series / name])
    assert not (series / PINS).exists()


@pytest.mark.parametrize("text", ["pinned = [", "pinned = 3", "pinned = [1]", b"\xff"])
def test_a_list_that_nobody_understands_is_not_touched(series: Path, text: str | bytes) -> None:
    (series / PINS).write_bytes(text if isinstance(text, bytes) else text.encode())
    before = (series / PINS).read_bytes()
    for change in (pin, unpin):
        with pytest.raises(DamagedCheckpoint, match="the pins can't be read"):
            change([series / "model_epoch_3.pth"])
    assert (series / PINS).read_bytes() == before
    done = dry_run(series, policy=KEEP_1)
    assert "pinned can't be read" in done.problems[0].message
    assert done.plan.removals == ()


def test_pins_that_may_not_be_read_protect_the_directory(series: Path) -> None:
    (series / PINS).symlink_to("nowhere")
    done = dry_run(series, policy=KEEP_1)
    assert "pinned can't be read" in done.problems[0].message
    assert done.plan.removals == ()


def test_a_name_that_is_no_unicode_is_refused(series: Path) -> None:
    strange = os.fsencode(series) + b"/model_\xff_epoch_3.pth"
    os.rename(series / "model_epoch_3.pth", strange)
    with pytest.raises(Unsupported, match="not valid Unicode"):
        pin([os.fsdecode(strange)])


def test_while_another_command_works_it_waits_for_a_while(
    series: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_for_the_lock(monkeypatch, -1)
    with held_by_another(series), pytest.raises(AccessDenied):
        pin([series / "model_epoch_3.pth"])
    wait_for_the_lock(monkeypatch, 60)
    with ExitStack() as other:
        other.enter_context(held_by_another(series))
        monkeypatch.setattr(time, "sleep", lambda seconds: other.close())
        pin([series / "model_epoch_3.pth"])
    assert pinned_in(series) == ["model_epoch_3.pth"]


def test_any_step_that_fails_leaves_the_old_list(series: Path, fault) -> None:
    pin([series / "model_epoch_1.pth"])
    before = (series / PINS).read_bytes()
    for number in range(1, 20):
        fault.at(number, OSError(28, "No space left on device"))
        try:
            pin([series / "model_epoch_2.pth"])
        except CheckpointError as error:
            assert "no space left on device" in str(error)
            assert (series / PINS).read_bytes() in (
                before,
                before.replace(b"]", b'  "model_epoch_2.pth",\n]'),
            )
        fault.none()
        if fault.made < number:
            break
        unpin([series / "model_epoch_2.pth"])
        assert (series / PINS).read_bytes() == before
    assert number > 3
    assert {path for path in os.listdir(series) if path.startswith(".ckpttool")} == {PINS}


@pytest.mark.parametrize(
    ("kind", "template", "text", "expected"),
    [
        (
            "PyTorch",
            "m{epoch}",
            '# mine\npinned = [\n  "model_epoch_1.pth",  # best\n  "./model_epoch_2.pth",\n  "other",\n]\n',
            '# mine\npinned = [\n  "m1.pth",  # best\n  "m2.pth",\n  "other",\n]\n',
        ),
        ("PyTorch", "m{epoch}", "x = 1\n", "x = 1\n"),
        ("TensorFlow", "run-{step}", 'pinned = ["ckpt-1.index"]\n', 'pinned = ["run-1.index"]\n'),
        ("TensorFlow", "run-{step}", 'pinned = ["ckpt-1"]\n', 'pinned = ["run-1"]\n'),
    ],
)
def test_pins_follow_a_rename(tmp_path: Path, kind: str, template: str, text: str, expected: str) -> None:
    KINDS[kind][0](tmp_path, (1, 2, 3))
    (tmp_path / PINS).write_text(text)
    assert rename(tmp_path, template=template).problems == ()
    assert (tmp_path / PINS).read_text() == expected


def test_pins_that_can_not_be_read_leave_all_names(series: Path) -> None:
    (series / PINS).write_text("pinned = [")
    before = sorted(os.listdir(series))
    done = rename(series, template="m{epoch}")
    assert done.problems and all("can't be updated: Invalid value" in one.message for one in done.problems)
    assert sorted(os.listdir(series)) == before
