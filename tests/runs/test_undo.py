"""Undo: old names and old pointers, exactly or with what came since; a file in the way loses nothing."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from ckpttool import AccessDenied, undo
from ckpttool.transaction import operations
from tests.support.changes import (
    begin_removal,
    empty_trash,
    file_bytes,
    held_by_another,
    prune_to_trash,
    recover,
)
from tests.support.state_files import read_state


@pytest.fixture
def managed(files: Path, tmp_path: Path) -> Path:
    """Return what a CheckpointManager has written: ten checkpoints, with timestamps."""
    return Path(shutil.copytree(files / "tensorflow" / "manager", tmp_path / "run"))


@pytest.mark.parametrize("kind", ["short", "trainer", "sharded", "managed"])
def test_all_is_as_it_was(kind: str, request: pytest.FixtureRequest) -> None:
    directory: Path = request.getfixturevalue(kind)
    before = file_bytes(directory)
    prune_to_trash(directory)
    planned = undo(str(directory), dry_run=True)
    done = undo(str(directory))
    assert (done.problems, done.warnings) == ((), ())
    assert (planned.restored, planned.pointers) == (done.restored, done.pointers)
    assert file_bytes(directory) == before
    assert undo(str(directory)).identity is None


def test_an_interrupted_removal_is_told_of(short: Path) -> None:
    prune_to_trash(short, 3)
    kept = sorted(path.name for path in short.iterdir() if path.suffix == ".pth")
    for command in (undo, empty_trash):
        prune_to_trash(short, 2)
        begin_removal(short, kept[-1])
        done = command(str(short))
        assert f"{short / kept[-1]}: interrupted prune: removal reverted" in done.warnings


def test_a_record_that_can_not_be_synced_takes_nothing_back_to_the_trash(
    short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, real = file_bytes(short), operations.drop_groups
    prune_to_trash(short, 2)

    def drop_groups(*arguments: Any) -> None:
        real(*arguments)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(operations, "drop_groups", drop_groups)
        with pytest.raises(AccessDenied, match="the next command completes it"):
            undo(str(short))
    assert recover(short).failed == {}
    assert file_bytes(short) == before


def test_the_last_one_is_taken_back_first(short: Path) -> None:
    before = file_bytes(short)
    first, second = prune_to_trash(short, 3).trash, prune_to_trash(short, 2).trash
    assert undo(str(short)).identity == second
    assert undo(str(short)).identity == first
    assert file_bytes(short) == before


def test_a_state_file_is_merged_with_what_came_since(managed: Path) -> None:
    prune_to_trash(managed, 3)
    for end in ("index", "data-00000-of-00001"):
        shutil.copy(managed / f"ckpt-10.{end}", managed / f"ckpt-11.{end}")
    text = (managed / "checkpoint").read_text().replace('path: "ckpt-10"', 'path: "ckpt-11"')
    lines = text.splitlines(keepends=True)
    lines.insert(4, 'all_model_checkpoint_paths: "ckpt-11"\n')
    lines.insert(-1, "all_model_checkpoint_timestamps: 99.5\n")
    (managed / "checkpoint").write_text("".join(lines))
    assert read_state(managed).timestamps
    done = undo(str(managed))
    assert done.problems == ()
    state = read_state(managed)
    assert state.paths == tuple(f"ckpt-{number}" for number in range(1, 12))
    assert (state.latest, len(state.timestamps), state.timestamps[-1]) == ("ckpt-11", 11, "99.5")
    assert list(map(float, state.timestamps[:-1])) == sorted(map(float, state.timestamps[:-1]))


def test_what_is_in_the_way_is_refused_by_name(short: Path, run) -> None:
    identity = prune_to_trash(short).trash
    (short / "model_epoch_7.pth").write_bytes(b"a new one")
    answer = run("undo", short)
    assert answer.status == 1
    assert f"{short / 'model_epoch_7.pth'}: not restored: model_epoch_7.pth already exists" in answer.err
    assert "restored 1 checkpoint" in answer.out
    assert (short / "model_epoch_7.pth").read_bytes() == b"a new one"
    (short / "model_epoch_7.pth").unlink()
    assert undo(str(short)).identity == identity  # once it is out of the way
    assert not (short / ".ckpttool-trash").exists()


def test_a_half_that_was_emptied_does_not_come_back(sharded: Path) -> None:
    identity = prune_to_trash(sharded, 3).trash
    next((sharded / ".ckpttool-trash" / identity / "0").glob("*-00001-*")).unlink()
    before = file_bytes(sharded)
    done = undo(str(sharded))
    assert "vanished" in done.problems[0].message
    assert (done.restored, file_bytes(sharded)) == ((), before)


def test_a_tree_is_taken_back_as_one_command(short: Path, tmp_path: Path) -> None:
    shutil.copytree(short, tmp_path / "other")
    before = file_bytes(tmp_path)
    prune_to_trash(tmp_path, recursive=True)
    assert len(undo(str(tmp_path), recursive=True).restored) == 4
    assert file_bytes(tmp_path) == before


def test_who_works_there_is_waited_for_by_nobody(short: Path) -> None:
    prune_to_trash(short)
    with (
        held_by_another(short),
        pytest.raises(AccessDenied, match="another ckpttool is changing this directory"),
    ):
        undo(str(short))


def test_a_renaming_is_taken_back_with_what_came_since(managed: Path, run) -> None:
    before = file_bytes(managed)
    assert run("rename", managed, "--template", "step-{step:05d}", "--yes").status == 0
    assert "step-00010.index" in os.listdir(managed)
    text = (managed / "checkpoint").read_text()
    (managed / "checkpoint").write_text(text + "# seen\n")
    answer = run("undo", managed, "--json")
    told = json.loads(answer.out)
    assert (answer.status, told["schema"], told["command"]) == (0, "ckpttool.undo/1", "rename")
    assert sorted(one["path"] for one in told["restored"]) == sorted(
        str(managed / f"ckpt-{number}") for number in range(1, 11)
    )
    assert file_bytes(managed) == before


def test_nothing_to_take_back(run, tmp_path: Path) -> None:
    answer = run("undo", tmp_path)
    assert (answer.status, answer.out, answer.err) == (0, "", f"{tmp_path}: nothing to undo\n")
