"""Names that are exchanged or shifted: renamed, or taken back, all of them or none."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckpttool import undo
from ckpttool.runs.renaming.names import Renaming
from ckpttool.runs.renaming.rename import rename_operations
from ckpttool.transaction.files import contents
from ckpttool.transaction.journal import Location, Rewrite
from ckpttool.transaction.open_roots import OpenRoots
from ckpttool.transaction.operations import Stage, UnknownCommit
from ckpttool.transaction.transaction import apply
from tests.support.changes import recover
from tests.support.directories import make_entry
from tests.support.renamings import content, names, renamed
from tests.support.runs import make_run
from tests.support.transactions import IDENTITY, kill_before, stages_of

TEMPLATE = "model_{epoch}"


@pytest.fixture
def swapped(tmp_path: Path) -> Path:
    """Return a run of which two epochs have each other's names, and one has the next one's."""
    run = tmp_path / "runs" / "a"
    run.mkdir(parents=True)
    for number, epoch in {1: 2, 2: 1, 3: 4}.items():
        make_run(run, epoch, name=f"model_{number}.pt")
    (run / "latest").write_text("model_3.pt")
    (run.parent / "latest").write_text("a/model_1.pt\n")
    (run.parent / "best.pt").symlink_to("a/model_2.pt")
    return run


def in_the_way(run: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException) -> None:
    """Let one file fail to get its new name."""
    link = os.link

    def fail(source: str, target: str, **told: Any) -> None:
        if source == "model_2.pt" and target == "model_1.pt":
            raise failure
        link(source, target, **told)

    monkeypatch.setattr(os, "link", fail)


def test_where_one_fails_all_have_their_old_names(swapped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = content(swapped.parent)
    in_the_way(swapped, monkeypatch, OSError(28, "No space left on device"))
    done = renamed(swapped, TEMPLATE)
    monkeypatch.undo()
    assert (done.renames, len(done.failed), done.stale) == ((), 3, {})
    assert "no space left" in done.failed[str(swapped / "model_2.pt")]
    others = [done.failed[str(swapped / f"model_{number}.pt")] for number in (1, 3)]
    assert all("model_2.pt: " in one and "all of them" in one for one in others)
    assert content(swapped.parent) == before
    assert not stages_of(swapped)
    assert undo(str(swapped)).identity is None
    assert renamed(swapped, TEMPLATE).problems == ()
    assert (swapped.parent / "latest").read_text() == "a/model_2.pt\n"
    assert undo(str(swapped)).problems == ()
    assert content(swapped.parent) == before


def test_what_a_kill_left_in_the_stage_is_taken_back(swapped: Path) -> None:
    before = content(swapped.parent)
    kill_before("write", lambda: renamed(swapped, TEMPLATE))
    assert {"model_1.pt", "model_2.pt", "model_4.pt"} <= set(names(swapped))
    settled = recover(swapped)
    assert (settled.failed, len(settled.moved)) == ({}, 3)
    assert all("interrupted rename: reverted" in one for one in settled.moved)
    assert content(swapped.parent) == before


def test_what_names_them_above_is_taken_back_with_them(swapped: Path) -> None:
    before = content(swapped.parent)
    kill_before("commit", lambda: renamed(swapped, TEMPLATE))
    assert (swapped.parent / "latest").read_text() == "a/model_2.pt\n"
    assert not recover(swapped).failed
    assert not recover(swapped.parent).failed
    assert content(swapped.parent) == before


@pytest.mark.parametrize("step", ["commit", "close"])
@pytest.mark.parametrize("first", ["a", "."])
def test_what_is_committed_in_one_directory_is_committed_in_all(swapped: Path, step: str, first: str) -> None:
    kill_before(step, lambda: renamed(swapped, TEMPLATE), 2)
    for directory in (swapped.parent / first, swapped.parent, swapped):
        assert not recover(directory).failed
    assert (swapped.parent / "latest").read_text() == "a/model_2.pt\n"
    assert os.readlink(swapped.parent / "best.pt") == "a/model_1.pt"
    assert sorted(names(swapped)) == ["latest", "model_1.pt", "model_2.pt", "model_4.pt"]
    assert undo(str(swapped.parent)).problems == ()
    assert (swapped.parent / "latest").read_text() == "a/model_1.pt\n"


@pytest.mark.parametrize("number", range(1, 7))
def test_ctrl_c_while_they_are_committed_leaves_all_or_none(swapped: Path, number: int) -> None:
    before = content(swapped.parent)
    commits = 0
    write = Stage._write_done

    def interrupted(stage: Stage, numbers: list[int]) -> None:
        nonlocal commits
        commits += 1
        if commits == (number + 1) // 2 and number % 2:
            raise KeyboardInterrupt
        write(stage, numbers)
        if commits == number // 2 and not number % 2:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stage, "_write_done", interrupted)
        try:
            renamed(swapped, TEMPLATE)
        except KeyboardInterrupt:
            assert commits
    assert not stages_of(swapped) + stages_of(swapped.parent)
    latest = (swapped.parent / "latest").read_text()
    if number == 1:
        assert content(swapped.parent) == before
    else:
        assert latest == "a/model_2.pt\n"
        assert undo(str(swapped.parent)).problems == ()
    assert (swapped.parent / "latest").read_text() == "a/model_1.pt\n"


@pytest.mark.parametrize("number", range(1, 10))
def test_a_save_under_the_name_of_one_that_is_in_the_stage_stays(swapped: Path, number: int) -> None:
    """Whatever was done by then, both old files are there, in the directory or where the message says."""
    old = {path.name: path.read_bytes() for path in swapped.glob("*.pt")}
    try:
        kill_before("do", lambda: renamed(swapped, TEMPLATE), number)
    except pytest.fail.Exception:  # so many steps there aren't
        return
    (swapped / "saving").write_bytes(b"saved since")
    (swapped / "saving").rename(swapped / "model_2.pt")
    told = recover(swapped)
    found = [path.read_bytes() for path in swapped.rglob("*") if path.is_file()]
    assert (swapped / "model_2.pt").read_bytes() == b"saved since"
    for name in old.keys() - {"model_2.pt"}:
        assert old[name] in found, name
    if (swapped / "model_2.pt").exists() and stages_of(swapped):
        assert "another file now has this name" in str(told.failed)


def test_where_one_directory_can_not_be_finished_all_have_their_old_names(
    swapped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, unlink = content(swapped.parent), OpenRoots.unlink

    def refused(roots: OpenRoots, location: Location) -> None:
        if location.path == "model_3.pt":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        unlink(roots, location)

    monkeypatch.setattr(OpenRoots, "unlink", refused)
    done = renamed(swapped, TEMPLATE)
    monkeypatch.undo()
    assert (done.renames, len(done.failed), done.stale) == ((), 3, {})
    assert all("input/output error" in why for why in done.failed.values())
    assert content(swapped.parent) == before
    assert not stages_of(swapped) + stages_of(swapped.parent)


@pytest.mark.parametrize("is_written", [False, True])
@pytest.mark.parametrize("is_finished", [False, True])
def test_where_nobody_knows_what_the_first_directory_has_committed_recovery_decides(
    swapped: Path, monkeypatch: pytest.MonkeyPatch, is_written: bool, is_finished: bool
) -> None:
    """Its disk fails while it is committed, or while that is taken back."""
    before, commit = content(swapped.parent), Stage.commit

    def refused(stage: Stage, numbers: list[int]) -> None:
        if is_written:
            commit(stage, numbers)
        raise UnknownCommit(stage.path, "input/output error; the next command recovers it")

    def broken(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        if is_finished:
            patch.setattr(Stage, "finish", broken)
            patch.setattr(Stage, "withdraw", broken)
        else:
            patch.setattr(Stage, "commit", refused)
        done = renamed(swapped, TEMPLATE)
    assert (done.renames, len(done.failed)) == ((), 3)
    assert all("recovers" in why for why in done.failed.values())
    for directory in (swapped, swapped.parent):
        assert not recover(directory).failed
    if is_written or is_finished:
        assert (swapped.parent / "latest").read_text() == "a/model_2.pt\n"
        assert undo(str(swapped.parent)).problems == ()
    else:
        assert content(swapped.parent) == before


def test_an_undo_that_fails_leaves_the_new_names(swapped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert renamed(swapped, TEMPLATE).problems == ()
    before = content(swapped)
    (swapped / "model_3.pt").write_bytes(b"in the way")
    done = undo(str(swapped))
    assert (done.restored, done.pointers, len(done.problems)) == ((), (), 1)
    assert any("model_3.pt already exists" in one.message for one in done.problems)
    (swapped / "model_3.pt").unlink()
    assert content(swapped) == before
    assert undo(str(swapped)).problems == ()
    assert sorted(names(swapped)) == ["latest", "model_1.pt", "model_2.pt", "model_3.pt"]


def test_what_somebody_else_wrote_above_stays(swapped: Path) -> None:
    assert renamed(swapped, TEMPLATE).problems == ()
    (swapped.parent / "latest").write_text("a/other.pt\n")
    assert undo(str(swapped)).problems == ()
    assert (swapped.parent / "latest").read_text() == "a/other.pt\n"
    assert os.readlink(swapped.parent / "best.pt") == "a/model_2.pt"
    assert undo(str(swapped.parent)).restored == ()


def test_an_undo_above_that_is_interrupted_can_be_done_again(swapped: Path) -> None:
    before = content(swapped.parent)
    assert renamed(swapped, TEMPLATE).problems == ()
    after = content(swapped.parent)
    kill_before("commit", lambda: undo(str(swapped.parent), recursive=True))
    assert not recover(swapped.parent).failed
    assert content(swapped.parent) == after
    assert undo(str(swapped.parent), recursive=True).problems == ()
    assert content(swapped.parent) == before


def test_an_undo_names_what_was_and_is(sharded: Path) -> None:
    """Sets that have each other's names, as their epochs say."""
    for path in sorted(sharded.iterdir()):
        number = path.name[len("epoch_")]
        text = path.read_bytes()
        path.unlink()
        other = {"1": "2", "2": "1", "3": "3", "4": "4"}[number]
        index = text.replace(b'"epoch_%s-' % number.encode(), b'"set_%s-' % other.encode())
        name = f"set_{other}{path.name[len('epoch_1') :]}"
        (sharded / name).write_bytes(index if name.endswith(".json") else text)
    before = content(sharded)
    exchange(sharded, "set_1", "set_2", ".safetensors.index.json")
    done = undo(str(sharded))
    assert {(os.path.basename(one.path), os.path.basename(one.was)) for one in done.restored} == {
        ("set_1.safetensors.index.json", "set_2.safetensors.index.json"),
        ("set_2.safetensors.index.json", "set_1.safetensors.index.json"),
    }
    assert content(sharded) == before


def exchange(directory: Path, one: str, two: str, ending: str) -> None:
    """Give two sharded sets each other's names, as a rename does."""
    renamings, rewrites = [], []
    for old, new in ((one, two), (two, one)):
        text = (directory / (old + ending)).read_text()
        said = text.replace(f'"{old}-', f'"{new}-')
        rewrites += [
            Rewrite(new + ending, None, said, like=old + ending),
            Rewrite(old + ending, text, None, like=new + ending),
        ]
        files = sorted(path.name for path in directory.glob(f"{old}[-.]*"))
        entry = replace(make_entry(old + ending, *files), contents=contents(str(directory), files))
        members = tuple((name, new + name.removeprefix(old)) for name in files)
        renamings.append(Renaming(entry, new + ending, members))
    listed = rename_operations(renamings, rewrites, [], IDENTITY)
    assert not apply(str(directory), listed).failed
