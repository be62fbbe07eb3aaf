"""Directories of which some checkpoints keep their names, and renames that are disturbed: nothing is lost."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Collection
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from ckpttool import CheckpointError, RenameRequest, UsageError, open_checkpoint, rename, undo
from ckpttool.transaction.operations import Stage
from tests.support.changes import empty_trash, observed, recover
from tests.support.faults import Fault, hit_call
from tests.support.renamings import TEMPLATE, content, names, renamed
from tests.support.runs import make_run
from tests.support.transactions import kill_before

# What is left alone ---------------------------------------------------------------------------------


def test_what_is_damaged_keeps_its_name(short: Path) -> None:
    path = short / "model_epoch_9.pth"
    path.write_bytes(path.read_bytes()[:900])
    done = renamed(short)
    assert len(done.renames) == 3 and path.exists()
    assert [one.path for one in done.problems] == [str(path)]
    assert done.problems[0].message.startswith("left alone: incomplete: ")


def test_fluid_roots_keep_their_names(files: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(files / "fluid" / "root", tmp_path / "root"))
    before = content(tmp_path)
    done = renamed(root, "{run}-{number:03d}")
    assert (done.renames, content(tmp_path)) == ((), before)
    assert {one.message.partition(" finds")[0] for one in done.problems} == {"left alone: Paddle Fluid"}
    assert names(tmp_path) == ["root"]


def test_megatrons_iterations_keep_their_names(short: Path) -> None:
    (short / "latest_checkpointed_iteration.txt").write_text("10")
    for epoch in (9, 10):
        place = short / f"iter_{epoch:07d}"
        place.mkdir()
        (short / f"model_epoch_{epoch}.pth").rename(place / "model.pt")
    done = renamed(short, "{run}-x{step?}{epoch?}", recursive=False)
    assert sorted(os.path.basename(old) for old, _ in done.renames) == [
        "model_epoch_7.pth",
        "model_epoch_8.pth",
    ]
    assert (short / "iter_0000010").exists()


def test_names_that_a_library_looks_for_are_kept(short: Path) -> None:
    shutil.move(short / "model_epoch_9.pth", short / "pytorch_model.bin")
    (short / "config.json").write_text("{}")
    done = renamed(short)
    assert [(os.path.basename(one.path), one.message) for one in done.problems] == [
        (
            "pytorch_model.bin",
            "left alone: its library finds only this name; rename the directory instead",
        )
    ]


def test_what_is_being_written_keeps_its_name(short: Path) -> None:
    (short / "model_epoch_10.pth.tmp").write_bytes(b"x")
    done = renamed(short)
    assert [(os.path.basename(one.path), one.message) for one in done.problems] == [
        ("model_epoch_10.pth", "left alone: being written")
    ]


def test_one_refusal_is_enough(short: Path) -> None:
    shutil.copy(short / "model_epoch_9.pth", short / "other_epoch_9.pth")
    before = content(short)
    done = renamed(short, "e{epoch}")
    assert done.is_refused and content(short) == before
    assert len(done.problems) == 2
    done = renamed(short, "e{epoch}", exclude=["other*"])
    assert len(done.renames) == 4


def test_what_nobody_has_is_a_usage_error(short: Path) -> None:
    with pytest.raises(UsageError, match=r"no checkpoint has a field val_los \(choose from run, .*"):
        renamed(short, "{run}-{val_los}")


def test_a_checkpoint_itself_is_no_directory_of_some(trainer: Path) -> None:
    with pytest.raises(UsageError, match="is a checkpoint itself"):
        renamed(trainer / "checkpoint-4", "{run}-{step}")


def test_what_another_holds_a_link_to_keeps_its_name(trainer: Path) -> None:
    shared = trainer / "checkpoint-10" / "model.safetensors"
    shared.unlink()
    shared.symlink_to("../checkpoint-8/model.safetensors")
    done = renamed(trainer, "{run}-s{step:06d}")
    assert [(os.path.basename(one.path), one.message) for one in done.problems] == [
        ("checkpoint-8", "left alone: a part of checkpoint-10")
    ]
    shared = trainer / "checkpoint-s000010" / "model.safetensors"
    assert os.readlink(shared) == "../checkpoint-8/model.safetensors"
    assert shared.exists()


def test_a_list_of_digests_that_cannot_be_read_is_told(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps old names then, as where a server has lost the file that a directory still lists."""
    (short / "SHA256SUMS").write_text("")
    real = os.open

    def lost(path: str, *arguments: int, **where: int) -> int:
        if os.path.basename(path) == "SHA256SUMS":
            raise OSError(errno.ESTALE, "Stale file handle")
        return real(path, *arguments, **where)

    monkeypatch.setattr(os, "open", lost)
    warnings = renamed(short, dry_run=True).planned.warnings
    start = f"{short / 'SHA256SUMS'}: can't be updated, and may contain old names: "
    assert [one for one in warnings if one.startswith(start)]


# Odd names, orders, places --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a b", "ü\n", "x" * 243, "日本", "q'\"$;", "\udcff", "%s", "{x}", "*?x"])
def test_odd_names(short: Path, name: str) -> None:
    old = short / f"{name}_epoch_9.pth"
    try:
        (short / "model_epoch_9.pth").rename(old)
    except OSError as error:  # a file system that takes no such name
        pytest.fail(str(error))
    (short / "link").symlink_to(old.name)
    done = renamed(short)
    new = dict(done.renames)[str(old)]
    assert done.problems == ()
    assert os.path.basename(new) == f"{name}-e0009.pth"
    assert os.readlink(short / "link") == os.path.basename(new)
    undo(str(short))
    assert os.readlink(short / "link") == old.name


def test_chains_and_cycles_come_out_right(tmp_path: Path) -> None:
    for number, epoch in {1: 2, 2: 1, 3: 4, 4: 5, 5: 6, 7: 7}.items():
        make_run(tmp_path, epoch, name=f"model_{number}.pt")
    (tmp_path / "latest").write_text("model_1.pt")
    (tmp_path / "link").symlink_to("model_3.pt")
    before = content(tmp_path)
    done = renamed(tmp_path, "model_{epoch}")
    assert (len(done.renames), done.problems) == (5, ())
    assert names(tmp_path) == ["latest", "link", *(f"model_{epoch}.pt" for epoch in (1, 2, 4, 5, 6, 7))]
    for epoch in (1, 2, 4, 5, 6, 7):
        with open_checkpoint(tmp_path / f"model_{epoch}.pt") as checkpoint:
            assert checkpoint.training.epoch == epoch
    assert (tmp_path / "latest").read_text() == "model_2.pt"
    assert os.readlink(tmp_path / "link") == "model_4.pt"
    undo(str(tmp_path))
    assert content(tmp_path) == before


def test_pointers_of_other_directories_follow(files: Path, tmp_path: Path) -> None:
    for run in ("a", "b"):
        shutil.copytree(files / "series", tmp_path / "runs" / run)
    runs = tmp_path / "runs"
    (runs / "latest").write_text("b/model_epoch_10.pth\n")
    (runs / ".ckpttool-pins.toml").write_text('pinned = ["a/model_epoch_3.pth"]\n')
    (runs / "a" / "best.txt").write_text("../b/model_epoch_2.pth")
    (tmp_path / "link").symlink_to("runs/a/model_epoch_1.pth")
    done = renamed(runs, recursive=True)
    assert (len(done.renames), done.problems) == (20, ())
    assert (runs / "latest").read_text() == "b/model-e0010.pth\n"
    assert (runs / ".ckpttool-pins.toml").read_text() == 'pinned = ["a/model-e0003.pth"]\n'
    assert os.readlink(tmp_path / "link") == "runs/a/model-e0001.pth"


def test_nothing_changes_in_a_dry_run(short: Path) -> None:
    (short / "last.pth").symlink_to("model_epoch_10.pth")
    before = sorted((str(path), path.lstat().st_mtime_ns) for path in [short, *short.rglob("*")])
    done = rename(RenameRequest(directory=str(short), template=TEMPLATE), dry_run=True)
    assert (len(done.renames), done.planned.update_count) == (4, 1)
    assert sorted((str(path), path.lstat().st_mtime_ns) for path in [short, *short.rglob("*")]) == before


def test_who_declines_changes_nothing(short: Path) -> None:
    before = content(short)
    done = rename(RenameRequest(directory=str(short), template=TEMPLATE), confirm=lambda planned: False)
    assert done.declined and content(short) == before


# Faults ---------------------------------------------------------------------------------------------


def _sums(directory: Path) -> set[str]:
    return {hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.rglob("*.pth")}


class Killed(BaseException):
    """Ends a command without any of its handlers, as a kill would."""


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), Killed()], ids=["fault", "kill"])
@pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.thorough)])
def test_a_fault_at_any_call_loses_nothing(
    short: Path, fault: Fault, tmp_path: Path, error: BaseException, step: int
) -> None:
    number = int(isinstance(error, Killed))
    while True:
        number += step
        run = tmp_path / f"run{number}"
        run.mkdir()
        for epoch in (9, 10):
            os.link(short / f"model_epoch_{epoch}.pth", run / f"model_epoch_{epoch}.pth")
        (run / "last").symlink_to("model_epoch_10.pth")
        (run / "best.txt").write_text("model_epoch_9.pth\n")
        whole = _sums(run)
        fault.at(number, error)
        try:
            is_done = not renamed(run).problems
        except (CheckpointError, Killed):
            is_done = False
        fault.none()
        assert _sums(run) == whole, number
        recover(run)
        assert _sums(run) == whole, number
        stem = "model-e0010.pth" if (run / "model-e0010.pth").exists() else "model_epoch_10.pth"
        assert os.readlink(run / "last") == stem, number
        assert (run / "best.txt").read_text().strip() in names(run), number
        renamed(run)
        assert names(run) == ["best.txt", "last", "model-e0009.pth", "model-e0010.pth"], number
        if is_done and fault.made < number:
            break
    assert number > 15


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.thorough)])
def test_a_kill_between_two_waves_is_made_good(fault: Fault, tmp_path: Path, step: int) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for number, epoch in {1: 2, 2: 1}.items():
        make_run(source, epoch, name=f"model_{number}.pt")
    number = 0
    while True:
        number += step
        run = Path(shutil.copytree(source, tmp_path / f"run{number}"))
        (run / "latest").write_text("model_1.pt")
        fault.at(number, Killed())
        try:
            renamed(run, "model_{epoch}")
            is_done = fault.made < number
        except Killed:
            is_done = False
        fault.none()
        renamed(run, "model_{epoch}")
        assert names(run) == ["latest", "model_1.pt", "model_2.pt"], number
        assert (run / "latest").read_text() == "model_2.pt", number
        with open_checkpoint(run / "model_2.pt") as checkpoint:
            assert checkpoint.training.epoch == 2
        if is_done:
            break
    assert number > 30


def test_what_changed_since_stays(short: Path) -> None:
    path = short / "model_epoch_9.pth"

    def confirm(planned: object) -> bool:
        path.write_bytes(path.read_bytes() + b"x")
        return True

    done = rename(RenameRequest(directory=str(short), template=TEMPLATE), confirm=confirm)
    assert path.exists()
    assert any("changed since" in one.message for one in done.problems)


def test_a_pointer_that_a_trainer_writes_while_the_disk_syncs_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in count(1):
        run = make_run(tmp_path / str(number), 1, 2, 3, latest=2)
        with monkeypatch.context() as patch:
            save = partial((run / "latest").write_text, "model_epoch_3.pth")
            calls = hit_call(number, save, ("fsync",), patch.setattr)
            renamed(run)
        if calls() < number:
            break
        assert (run / "latest").read_text() in ("model_epoch_3.pth", "model-e0003.pth")


def test_a_set_that_is_saved_again_after_a_kill_keeps_its_index(sharded: Path) -> None:
    """The new index says just what the old one said."""
    first = {path.name: path.read_bytes() for path in sharded.glob("epoch_1*")}
    kill_before("finish", lambda: renamed(sharded, "{run}-e{epoch:04d}"))
    for name, data in first.items():
        (sharded / "saving").write_bytes(data)
        (sharded / "saving").rename(sharded / name)
    assert not recover(sharded).failed
    assert {path.name: path.read_bytes() for path in sharded.glob("epoch_1*")} == first
    assert not list(sharded.glob("epoch_2*"))


@pytest.mark.parametrize("step", ["commit", "finish"])
def test_a_set_that_is_saved_again_after_a_killed_undo_keeps_its_index(sharded: Path, step: str) -> None:
    """The one that the undo was to restore keeps the name that it had, with its index."""
    saved = {path.name: path.read_bytes() for path in sharded.glob("epoch_1*")}
    assert renamed(sharded, "kept-{epoch}").problems == ()
    other = {path.name: path.read_bytes() for path in sharded.glob("kept-1*")}
    kill_before(step, lambda: undo(str(sharded)))
    for name in saved:
        if not name.endswith(".json"):
            saved[name] = b"saved since: " + name.encode()
        (sharded / "saving").write_bytes(saved[name])
        (sharded / "saving").rename(sharded / name)
    failed = recover(sharded).failed
    assert {path.name: path.read_bytes() for path in sharded.glob("epoch_1*")} == saved
    assert {path.name: path.read_bytes() for path in sharded.glob("kept-1*")} == other
    assert bool(failed) == (step == "finish")
    assert all("was saved meanwhile" in why for why in failed.values())


def test_a_pointer_elsewhere_that_changed_keeps_all_names(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = tmp_path / "runs"
    shutil.copytree(files / "series", runs / "a")
    (runs / "latest").write_text("a/model_epoch_10.pth\n")
    before = sorted(os.listdir(runs / "a"))

    def meddle() -> None:
        if (runs / "a" / "model-e0010.pth").exists():  # where the stage of the pointer was made
            (runs / "latest").write_text("a/model_epoch_9.pth\n")

    monkeypatch.setattr(os, "mkdir", observed(os.mkdir, meddle))
    done = renamed(runs, recursive=True)
    assert (done.renames, len(done.failed)) == ((), 10)
    assert all("latest has changed since the plan was made" in why for why in done.failed.values())
    assert sorted(os.listdir(runs / "a")) == before
    assert (runs / "latest").read_text() == "a/model_epoch_9.pth\n"


@pytest.mark.parametrize(("step", "number"), [("commit", 2), ("finish", 1), ("finish", 2), ("close", 1)])
def test_directories_follow_the_first_whichever_is_recovered_first(
    files: Path, tmp_path: Path, step: str, number: int
) -> None:
    """The first is committed alone, recovered alone, and the record of its rename goes with its trash."""
    runs = tmp_path / "runs"
    for run in ("a", "b", "c"):
        shutil.copytree(files / "series", runs / run)
    kill_before(step, lambda: renamed(runs, recursive=True), number)
    first = next(run for run in runs.iterdir() if list(run.glob(".ckpttool-*/done.json")))
    assert recover(first).failed == {}
    empty_trash(first)
    for run in runs.iterdir():
        assert recover(run).failed == {}
        assert names(run) == [f"model-e{epoch:04d}.pth" for epoch in range(1, 11)], run


def test_who_looks_for_the_old_name_is_told(files: Path, tmp_path: Path) -> None:
    source = files / "pytorch" / "lightning" / "epoch=1-step=4.ckpt"
    models = tmp_path / "models"
    models.mkdir()
    shutil.copy(source, models)
    shutil.copy(source, models / "last.ckpt")
    shutil.copytree(files / "savedmodel" / "keras2", models / "1")
    done = renamed(models, "x-{name}")
    told = "\n".join(done.planned.warnings)
    assert "Lightning's best_model_path in it keeps the old name" in told
    assert "ckpt_path='last' will no longer find it" in told
    assert "TensorFlow Serving finds only versions whose names are numbers" in told
    assert done.problems == ()


@pytest.mark.parametrize("layout", ["directories", "files", "two directories"])
def test_all_are_renamed_or_none_whichever_fails(
    tmp_path: Path, trainer: Path, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    if layout == "directories":
        run, template = trainer, "step_{step}"
    else:
        run, template = tmp_path / "run", "kept-{epoch}"
        for epoch in range(1, 7):
            make_run(run / ("ab"[epoch % 2] if layout == "two directories" else ""), epoch)
    before = content(run)
    count = len(renamed(run, template, dry_run=True).renames)
    assert count > 4
    for number in range(1, count + 1):
        made = 0

        def refuse(real: Callable[..., None], *arguments: object, **where: object) -> None:
            nonlocal made
            made += "-" in str(arguments[1]) or "step_" in str(arguments[1])
            if made == number:  # noqa: B023 - called in this round alone
                made += 1
                raise PermissionError(errno.EACCES, "permission denied")
            real(*arguments, **where)

        with monkeypatch.context() as patch:
            patch.setattr(os, "link", partial(refuse, os.link))
            patch.setattr(os, "rename", partial(refuse, os.rename))
            done = renamed(run, template)
        assert (done.renames, len(done.failed)) == ((), count)
        assert "permission denied" in str(done.problems)
        assert content(run) == before
    assert len(renamed(run, template).renames) == count


@pytest.mark.parametrize("number", [2, 3])
def test_a_directory_that_can_not_be_committed_with_the_first_is_undone_with_it(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    runs = tmp_path / "runs"
    for run in ("a", "b"):
        shutil.copytree(files / "series", runs / run)
    (runs / "best").symlink_to("a/model_epoch_1.pth")
    before = {run: names(runs / run) for run in ("a", "b")}
    real, written = Stage._write_done, count(1)

    def write_done(stage: Stage, numbers: Collection[int]) -> None:
        if next(written) == number:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(stage, numbers)

    with monkeypatch.context() as patch:
        patch.setattr(Stage, "_write_done", write_done)
        assert renamed(runs, recursive=True).failed
    for place in (runs, runs / "a", runs / "b"):
        assert recover(place).failed == {}
    assert os.readlink(runs / "best") == "a/model-e0001.pth"
    assert undo(str(runs), recursive=True).problems == ()
    assert {run: names(runs / run) for run in ("a", "b")} == before
    assert os.readlink(runs / "best") == "a/model_epoch_1.pth"


def test_a_directory_that_can_not_be_looked_at_follows_the_first_later(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = tmp_path / "runs"
    for run in ("a", "b"):
        shutil.copytree(files / "series", runs / run)
    kill_before("commit", lambda: renamed(runs, recursive=True), 2)
    first, other = sorted(runs.iterdir(), key=lambda run: not list(run.glob(".ckpttool-*/done.json")))
    real = os.stat

    def refuse(path: Any, *arguments: Any, **options: Any) -> os.stat_result:
        if isinstance(path, str) and os.path.normpath(path) == str(other):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(path, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", refuse)
        with pytest.raises(CheckpointError, match="permission denied"):
            recover(first)
    for run in (first, other):
        assert recover(run).failed == {}
        assert names(run) == [f"model-e{epoch:04d}.pth" for epoch in range(1, 11)]


def test_a_journal_that_stays_takes_nothing_from_what_was_renamed(
    short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def close(*arguments: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(Stage, "close", close)
    done = renamed(short)
    assert (len(done.renames), done.failed) == (4, {})
    assert [one.path for one in done.problems] == [str(short)]
    assert "input/output error" in done.problems[0].message
