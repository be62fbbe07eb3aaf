"""The trash: what a prune puts aside is whole there, in nobody's way, and goes only when it is emptied."""

from __future__ import annotations

import errno
import os
import shutil
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path

import pytest

from ckpttool import AccessDenied, Policy, PruneRequest, convert, list_checkpoints, prune, undo
from ckpttool.transaction import operations
from ckpttool.transaction.stages import JOURNAL
from tests.support.changes import empty_trash, file_bytes, prune_to_trash, recover
from tests.support.faults import dies_at, fill_disk
from tests.support.outcomes import stages
from tests.support.runs import KINDS
from tests.support.transactions import kill_before

TRASH = ".ckpttool-trash"


@pytest.mark.parametrize("kind", ["short", "trainer", "sharded"])
def test_what_goes_lies_whole_in_the_trash(kind: str, request: pytest.FixtureRequest) -> None:
    directory: Path = request.getfixturevalue(kind)
    before = file_bytes(directory)
    done = prune_to_trash(directory)
    assert (done.problems, done.freed_bytes, done.trashed_bytes > 0) == ((), 0, True)
    assert done.trash is not None
    aside = file_bytes(directory / TRASH / done.trash / "0")
    left = {path: data for path, data in file_bytes(directory).items() if not path.startswith(TRASH)}
    assert (aside | left, aside.keys() & left.keys()) == (before, set())
    assert len(list_checkpoints(directory).checkpoints) == len(done.plan.groups[0].keep)


def test_a_second_prune_has_a_place_of_its_own(short: Path) -> None:
    first, second = prune_to_trash(short, 3), prune_to_trash(short, 2)
    assert first.trash != second.trash
    assert sorted(os.listdir(short / TRASH)) == sorted([str(first.trash), str(second.trash)])


def test_nobody_looks_into_it(short: Path, run) -> None:
    prune_to_trash(short)
    assert len(list_checkpoints(short, recursive=True).checkpoints) == 2
    assert run("list", "-r", short).out.count("model_epoch") <= run("list", short).out.count("model_epoch")
    converted = convert(short / "model_epoch_10.pth", short / "model.safetensors")
    assert converted.warnings == ()  # a conversion clears what killed ones left, and leaves it
    assert len(undo(str(short)).restored) == 2


def test_a_fluid_roots_lies_beside_it(files: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(files / "fluid" / "root", tmp_path / "around" / "run"))
    before = file_bytes(root)
    done = prune_to_trash(root)
    assert sorted(os.listdir(root)) == ["checkpoint_3", "checkpoint_4"]
    assert sorted(os.listdir(root.parent)) == [f"{TRASH}@run", "run"]
    assert sorted(os.listdir(root.parent / f"{TRASH}@run" / str(done.trash) / "0")) == [
        "checkpoint_0",
        "checkpoint_1",
        "checkpoint_2",
    ]
    assert len(undo(str(root.parent), recursive=True).restored) == 3
    assert (file_bytes(root), os.listdir(root.parent)) == (before, ["run"])


def test_a_full_disk_is_told_in_a_line(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = file_bytes(short)
    fill_disk(monkeypatch)
    with pytest.raises(AccessDenied, match="no space left on device for the journal; nothing was moved"):
        prune_to_trash(short)
    assert file_bytes(short) == before


def test_one_that_has_changed_stays_and_the_others_go(files: Path, tmp_path: Path, monkeypatch) -> None:
    run = Path(shutil.copytree(files / "tensorflow" / "manager", tmp_path / "run"))

    def meanwhile(planned: object) -> bool:
        (run / "ckpt-1.index").write_bytes((run / "ckpt-1.index").read_bytes())
        (run / "ckpt-2.index").unlink()
        (run / "ckpt-2.data-00000-of-00001").unlink()
        return True

    request = PruneRequest(directory=str(run), policy=Policy(keep_last=7), depth="quick")
    done = prune(request, trash=True, confirm=meanwhile)
    [problem] = done.problems
    assert problem.message == "not moved to the trash: it has changed since the plan was made"
    assert (run / "ckpt-1.index").exists()
    text = (run / "checkpoint").read_text()
    assert '"ckpt-1"' in text
    assert '"ckpt-2"' not in text


def test_one_that_is_written_to_while_it_moves_stays(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through a descriptor that a trainer has open."""
    path, prepare = short / "model_epoch_7.pth", operations.Stage.prepare

    with path.open("r+b") as file:

        def write_and_prepare(stage: operations.Stage, numbers: list[int]) -> operations.Failures:
            file.write(b"saved meanwhile")
            file.flush()
            return prepare(stage, numbers)

        monkeypatch.setattr(operations.Stage, "prepare", write_and_prepare)
        done = prune_to_trash(short)
    [problem] = done.problems
    assert (problem.path, "it has changed" in problem.message) == (str(path), True)
    assert path.read_bytes().startswith(b"saved meanwhile")
    assert path.name not in os.listdir(short / TRASH / str(done.trash) / "0")


def test_what_is_saved_while_another_moves_stays(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer that opens the file by its name makes a new one: the old one lies in the trash by then."""
    path = short / "model_epoch_7.pth"
    old, commit = path.read_bytes(), operations.Stage.commit

    def save_and_commit(stage: operations.Stage, numbers: list[int]) -> None:
        path.write_bytes(b"saved meanwhile")
        commit(stage, numbers)

    monkeypatch.setattr(operations.Stage, "commit", save_and_commit)
    done = prune_to_trash(short)
    assert done.problems == ()
    assert path.read_bytes() == b"saved meanwhile"
    assert (short / TRASH / str(done.trash) / "0" / path.name).read_bytes() == old
    (problem,) = undo(short).problems
    assert "model_epoch_7.pth already exists" in problem.message
    assert path.read_bytes() == b"saved meanwhile"


def test_the_journal_of_what_can_be_neither_moved_nor_put_back_is_kept(
    sharded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file fails to follow the others into the trash, and another one takes the name of the first."""
    before = file_bytes(sharded)
    index, real = "epoch_1.safetensors.index.json", os.rename

    def rename(source: str, target: str, **where: int) -> None:
        if source == "epoch_1-00003-of-00004.safetensors":
            (sharded / index).write_bytes(b"saved meanwhile")
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(source, target, **where)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", rename)
        assert prune_to_trash(sharded).problems
    assert len(list(stages(sharded))) == 1
    (sharded / index).rename(sharded.parent / "saved")
    assert not recover(sharded).failed
    assert undo(sharded).problems == ()
    assert file_bytes(sharded) == before


def test_what_is_saved_after_a_kill_stays(short: Path) -> None:
    path = short / "model_epoch_7.pth"
    old = path.read_bytes()
    kill_before("commit", lambda: prune_to_trash(short))
    [journal] = short.glob(f".ckpttool-*/{JOURNAL}")
    device = f'"{path.name}", {short.stat().st_dev}'
    assert device in journal.read_text()
    journal.write_text(journal.read_text().replace(device, f"{device}1"))  # mounted anew since
    saved = (short / "model_epoch_10.pth").read_bytes()
    path.write_bytes(saved)
    assert prune(short, keep_last=9, min_age=0, depth="quick").problems == ()
    assert path.read_bytes() == saved
    assert [one.read_bytes() for one in short.glob(f"{TRASH}/*/0/{path.name}")] == [old]


@pytest.mark.parametrize("is_slimmed", [False, True])
@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_save_after_a_kill_keeps_its_name_and_blocks_nothing(
    tmp_path: Path, is_slimmed: bool, is_replaced: bool
) -> None:
    make, _ = KINDS["PyTorch"]
    policy = {"full": 1} if is_slimmed else {"keep_last": 1}
    for number in count(1, 7):
        run = tmp_path / str(number)
        make(run, numbers=range(1, 4))
        is_killed = dies_at(number, partial(prune, run, trash=True, min_age=0, depth="quick", **policy))
        oldest = run / "model_epoch_1.pth"
        if is_replaced:
            (run / "saving").write_bytes(b"saved after the kill")
            os.replace(run / "saving", oldest)
        else:
            oldest.write_bytes(b"saved after the kill")
        prune(run, keep_last=9, min_age=0, depth="quick")
        assert list(stages(run)) == []
        if not is_killed:
            break
        assert oldest.read_bytes() == b"saved after the kill"
        shutil.rmtree(run)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("PyTorch", "model_epoch_1.pth"),
        ("TensorFlow", "ckpt-1.index"),
        ("Trainer", "checkpoint-1/trainer_state.json"),
    ],
)
def test_a_save_over_what_a_killed_undo_restored_keeps_its_name(tmp_path: Path, kind: str, name: str) -> None:
    make, _ = KINDS[kind]
    for number in count(1):
        run = tmp_path / str(number)
        run.mkdir()
        make(run, range(1, 4))
        prune(run, trash=True, keep_last=1, min_age=0, depth="quick")
        is_killed = dies_at(number, partial(undo, str(run)))
        saved = run / name
        is_restored = saved.exists()
        if is_restored:
            saved.write_bytes(b"saved after the kill")
        prune(run, keep_last=9, min_age=0, depth="quick")
        assert list(stages(run)) == []
        assert not is_restored or saved.read_bytes() == b"saved after the kill"
        if not is_killed:
            break
        shutil.rmtree(run)


# Emptied --------------------------------------------------------------------------------------------


def test_emptied_is_what_records_list(trainer: Path) -> None:
    nbytes = prune_to_trash(trainer).trashed_bytes
    planned = empty_trash(trainer, dry_run=True)
    assert (len(planned.removed), planned.freed_bytes) == (2, nbytes)
    assert (trainer / TRASH).exists()
    done = empty_trash(trainer)
    assert (done.removed, done.freed_bytes, done.problems) == (planned.removed, nbytes, [])
    assert not (trainer / TRASH).exists()
    assert undo(str(trainer)).identity is None


def test_emptying_frees_nothing_that_has_another_name(short: Path) -> None:
    (short.parent / "other.pth").hardlink_to(short / "model_epoch_7.pth")
    nbytes = (short / "model_epoch_8.pth").stat().st_size
    prune_to_trash(short)
    assert [empty_trash(short, dry_run=is_dry).freed_bytes for is_dry in (True, False)] == [nbytes, nbytes]


def test_only_what_is_older(short: Path) -> None:
    done = prune_to_trash(short)
    assert empty_trash(short, older_than=3600).removed == []
    old = short / TRASH / str(done.trash)
    assert old.exists()
    assert len(empty_trash(short, older_than=0).removed) == 2


def test_what_no_record_lists_is_told_and_left(trainer: Path) -> None:
    done = prune_to_trash(trainer)
    place = trainer / TRASH / str(done.trash)
    notes = place / "0" / "checkpoint-2" / "notes.txt"
    notes.write_text("precious")
    (place / "mine.pt").write_text("precious")
    (trainer / TRASH / "other").mkdir()
    planned, emptied = empty_trash(trainer, dry_run=True), empty_trash(trainer)
    for found in (planned, emptied):
        assert {one.path for one in found.problems} == {str(notes), str(place / "mine.pt")}
    assert (notes.read_text(), (place / "mine.pt").read_text()) == ("precious", "precious")
    assert sorted(path.name for path in place.rglob("*") if path.is_file()) == ["mine.pt", "notes.txt"]
    assert len(empty_trash(trainer).problems) == 2


def test_what_has_changed_in_it_is_left_whole(sharded: Path) -> None:
    done = prune_to_trash(sharded, 3)
    place = sharded / TRASH / str(done.trash) / "0"
    changed = next(place.glob("*-00002-*"))
    changed.write_bytes(b"another")
    before = file_bytes(place)
    emptied = empty_trash(sharded)
    assert (emptied.removed, len(emptied.problems)) == ([], 1)
    assert "has changed since it was moved to the trash" in emptied.problems[0].message
    assert file_bytes(place) == before


def test_a_record_that_can_not_be_understood_keeps_all(short: Path) -> None:
    done = prune_to_trash(short)
    record = short / TRASH / str(done.trash) / "record.json"
    record.write_text(record.read_text().replace("0/model_epoch_7.pth", "0/../../model_epoch_10.pth"))
    before = file_bytes(short)
    emptied = empty_trash(short)
    assert "not a record of ckpttool" in emptied.problems[0].message
    assert file_bytes(short) == before


def test_a_kill_while_it_is_emptied(sharded: Path, tmp_path: Path, fault) -> None:
    """Whatever is left is no checkpoint that comes back by halves, and goes with the next emptying."""
    identity = prune_to_trash(sharded).trash
    kept = {path: data for path, data in file_bytes(sharded).items() if not path.startswith(TRASH)}
    for number in range(1, 40, 4):
        copy = tmp_path / str(number)
        os.rename(sharded, copy)
        shutil.copytree(copy, sharded, copy_function=os.link)
        fault.at(number, SystemExit())
        with suppress(SystemExit):
            empty_trash(sharded)
        fault.none()
        if number % 8 == 1 and (sharded / TRASH / str(identity) / "record.json").exists():
            undone = undo(str(sharded))
            problems = [one.message for one in undone.problems]
            assert all("vanished" in one or "changed" in one for one in problems)
            assert not list_checkpoints(sharded).problems
        else:
            assert not empty_trash(sharded).problems
            assert file_bytes(sharded) == kept
        shutil.rmtree(sharded)
        os.rename(copy, sharded)
