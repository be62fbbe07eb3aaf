"""Undo where something can't be taken back, lies elsewhere, or was copied; what is older stays reachable."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from ckpttool import undo
from tests.support.changes import empty_trash, prune_to_trash
from tests.support.renamings import content, renamed


@pytest.fixture
def tree(short: Path) -> Path:
    """Return a directory of four epochs, with a run of the same below, to which two pointers lead."""
    shutil.copytree(short, short / "a")
    (short / "cur.pth").symlink_to("a/model_epoch_8.pth")
    (short / "latest").write_text("a/model_epoch_8.pth\n")
    return short


def test_pointers_above_follow_and_come_back(tree: Path) -> None:
    before = content(tree)
    assert renamed(tree / "a").problems == ()
    assert os.readlink(tree / "cur.pth") == "a/model-e0008.pth"
    assert (tree / "latest").read_text() == "a/model-e0008.pth\n"
    planned = undo(str(tree / "a"), dry_run=True)
    done = undo(str(tree / "a"))
    assert (done.problems, done.warnings, len(done.restored)) == ((), (), 4)
    assert sorted(planned.pointers) == sorted(done.pointers) == [str(tree / "cur.pth"), str(tree / "latest")]
    assert content(tree) == before
    assert not list(tree.rglob(".ckpttool-*"))


def test_pointers_above_wait_for_all_that_they_name(tree: Path) -> None:
    shutil.copytree(tree / "a", tree / "b")
    before = content(tree)
    renamed(tree, recursive=True)
    done = undo(str(tree / "a"))
    assert (done.problems, len(done.restored)) == ((), 4)
    assert f"(undo {tree} restores all of it)" in done.warnings[0]
    assert undo(str(tree), recursive=True).problems == ()
    assert content(tree) == before


def test_pointers_alone_are_not_taken_back(tree: Path) -> None:
    aside = prune_to_trash(tree).trash
    renamed(tree / "a")
    done = undo(str(tree), recursive=False)
    assert (done.restored, done.pointers, len(done.problems)) == ((), (), 1)
    assert f"{tree / 'a'} (undo without --no-recursive restores both)" in done.problems[0].message
    assert os.readlink(tree / "cur.pth") == "a/model-e0008.pth"
    assert "the next undo reverts the command before" in done.warnings[0]
    assert undo(str(tree), recursive=False).identity == aside


def test_a_pointer_that_somebody_wrote_since_blocks_nothing(tree: Path, run) -> None:
    aside = prune_to_trash(tree).trash
    renamed(tree / "a")
    for path in (tree / "a").glob("*.pth"):
        path.unlink()
    shutil.rmtree(tree / "a" / ".ckpttool-trash")
    (tree / "cur.pth").unlink()
    (tree / "cur.pth").symlink_to("a/other.pth")
    (tree / "latest").write_text("a/other.pth\n")
    answer = run("undo", tree)
    assert answer.status == 1
    assert "nothing restored: cur.pth: it points elsewhere now; left unchanged (and 1 more)" in answer.out
    assert "cur.pth: it points elsewhere now; left unchanged" in answer.err
    assert "0 checkpoints" not in answer.out
    assert undo(str(tree), recursive=False).identity == aside
    assert undo(str(tree)).identity is None


def test_what_was_changed_in_the_trash_blocks_nothing(short: Path) -> None:
    first, second = prune_to_trash(short, 3).trash, prune_to_trash(short, 2).trash
    changed = short / ".ckpttool-trash" / second / "0" / "model_epoch_8.pth"
    changed.write_bytes(b"another")
    one = undo(str(short))
    assert (one.identity, one.restored) == (second, ())
    assert [problem.message for problem in one.problems] == [
        "not restored: it has changed since it was moved to the trash"
    ]
    other = undo(str(short))
    assert (other.identity, [back.path for back in other.restored]) == (
        first,
        [str(short / "model_epoch_7.pth")],
    )
    assert changed.read_bytes() == b"another"
    assert undo(str(short)).identity == second


@pytest.mark.parametrize("tool", ["cp", "renamed"])
def test_a_trash_elsewhere_is_taken_back(short: Path, tmp_path: Path, tool: str) -> None:
    before = content(short)
    prune_to_trash(short)
    other = tmp_path / "other"
    if tool == "cp":
        subprocess.run(["cp", "-a", short, other], check=True)
    else:
        short.rename(other)
    done = undo(str(other))
    assert done.problems == ()
    assert ["this directory is a copy" in one for one in done.warnings] == [True] * (tool == "cp")
    assert sorted(one.path for one in done.restored) == [str(other / f"model_epoch_{n}.pth") for n in (7, 8)]
    assert content(other) == before


def test_a_copied_trash_is_emptied(sharded: Path, tmp_path: Path) -> None:
    prune_to_trash(sharded)
    other = tmp_path / "other"
    subprocess.run(["cp", "-a", sharded, other], check=True)
    done = empty_trash(other)
    assert (done.problems, len(done.removed), done.left_bytes) == ([], 2, 0)
    assert done.freed_bytes > 0
    assert not (other / ".ckpttool-trash").exists()
    assert len(undo(str(sharded)).restored) == 2


@pytest.mark.parametrize("is_emptied", [False, True])
def test_a_trash_from_an_archive_that_holds_whole_seconds(
    short: Path, tmp_path: Path, is_emptied: bool
) -> None:
    for number, path in enumerate(sorted(short.glob("*.pth"))):
        os.utime(path, ns=(0, 10**18 + number * 10**9 + 123_456_789))
    before = content(short)
    prune_to_trash(short)
    other = tmp_path / "other"
    subprocess.run(["cp", "-a", short, other], check=True)
    for path in other.rglob("*.pth"):
        os.utime(path, ns=(0, path.stat().st_mtime_ns // 10**9 * 10**9))
    if is_emptied:
        assert len(empty_trash(other).removed) == 2
    else:
        assert len(undo(str(other)).restored) == 2
        assert content(other) == before


@pytest.mark.parametrize("kind", ["sharded", "trainer"])
def test_a_copied_renaming_is_taken_back(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """What names the best checkpoint in each of the trainer's is rewritten: its time is another one, too."""
    directory: Path = request.getfixturevalue(kind)
    before = content(directory)
    assert renamed(directory, "kept-{step}" if kind == "trainer" else "kept-{epoch}").problems == ()
    other = tmp_path / "other"
    subprocess.run(["cp", "-a", directory, other], check=True)
    assert undo(str(other)).problems == ()
    assert content(other) == before


def test_a_copy_with_other_times_is_left_and_its_bytes_told(short: Path, tmp_path: Path, run) -> None:
    prune_to_trash(short)
    other = tmp_path / "other"
    subprocess.run(["cp", "-r", short, other], check=True)
    done = empty_trash(other)
    assert (done.removed, len(done.problems), len(done.warnings)) == ([], 2, 1)
    assert "a copy without the original times" in done.warnings[0]
    assert "a copy without the original times" in undo(str(other), dry_run=True).warnings[0]
    assert done.left_bytes == sum(path.stat().st_size for path in other.rglob("0/*"))
    assert {problem.path for problem in done.problems} == {
        str(other / f"model_epoch_{number}.pth") for number in (7, 8)
    }
    answer = run("prune", other, "--empty-trash", "--yes")
    assert (answer.status, answer.out.startswith("nothing in the trash")) == (1, False)


def test_paths_are_those_of_who_asks(short: Path, run, monkeypatch: pytest.MonkeyPatch) -> None:
    prune_to_trash(short)
    monkeypatch.chdir(short)
    told = json.loads(run("undo", "--json").out)
    assert sorted(one["path"] for one in told["restored"]) == ["model_epoch_7.pth", "model_epoch_8.pth"]


def test_indexes_go_by_their_names_and_are_no_pointers(sharded: Path, run) -> None:
    (sharded / "latest").write_text("epoch_4.safetensors.index.json\n")
    done = renamed(sharded, "q-{epoch}")
    assert done.planned.update_count == 1
    answer = run("undo", sharded)
    assert "epoch_4.safetensors.index.json  was q-4.safetensors.index.json" in answer.out
    assert answer.out.count("rewritten") == 1


def test_what_lies_below_is_told(short: Path, tmp_path: Path, run) -> None:
    shutil.copytree(short, tmp_path / "other")
    prune_to_trash(tmp_path, recursive=True)
    answer = run("undo", tmp_path, "--no-recursive")
    assert (answer.status, answer.out) == (0, "")
    below = "2 subdirectories have changes to undo (omit --no-recursive)"
    assert answer.err == f"{tmp_path}: nothing to undo in it, but {below}\n"


def test_a_field_that_none_has_is_warned_of(short: Path) -> None:
    done = renamed(short, "{run}-e{epoch:04d}-{val_los?:.2f}")
    told = [one for one in done.planned.warnings if "val_los" in one]
    assert len(told) == 1
    assert "no checkpoint has a field val_los" in told[0]


def test_blame_falls_on_what_failed(short: Path, run, monkeypatch: pytest.MonkeyPatch) -> None:
    link = os.link

    def refuse(source: str, target: str, **told: object) -> None:
        if source == "model_epoch_8.pth":
            raise PermissionError(13, "Permission denied", source)
        link(source, target, **told)

    (short / "latest").write_text("model_epoch_7.pth\n")
    before = content(short)
    monkeypatch.setattr(os, "link", refuse)
    failed = renamed(short).failed
    assert failed[str(short / "model_epoch_8.pth")] == "permission denied: model_epoch_8.pth"
    assert failed[str(short / "model_epoch_7.pth")] == (
        "model_epoch_8.pth: permission denied: model_epoch_8.pth; all of them are moved, or none"
    )
    assert content(short) == before


def test_what_lies_far_below_is_not_looked_for(short: Path, tmp_path: Path) -> None:
    deep = tmp_path / "1" / "2" / "3" / "4"
    shutil.copytree(short, deep)
    prune_to_trash(deep)
    assert undo(str(tmp_path), recursive=False).below == 0
    assert undo(str(tmp_path / "1"), recursive=False).below == 1


def test_pointers_above_wait_for_the_rest(tree: Path) -> None:
    renamed(tree / "a")
    (tree / "a" / "model_epoch_8.pth").write_bytes(b"in the way")
    for is_dry in (True, False):
        done = undo(str(tree / "a"), dry_run=is_dry)
        assert (len(done.restored), len(done.problems), done.pointers) == (3, 1, ())
        assert "pointers here may still have the new names" in done.warnings[0]
    assert (tree / "latest").read_text() == "a/model-e0008.pth\n"
    (tree / "a" / "model_epoch_8.pth").unlink()
    assert undo(str(tree / "a")).problems == ()
    assert (tree / "latest").read_text() == "a/model_epoch_8.pth\n"


def test_the_directory_above_is_locked_once(tree: Path) -> None:
    (tree / "a" / "latest").write_text("model_epoch_8.pth\n")
    renamed(tree / "a")
    renamed(tree / "a", "n-{epoch}")
    (tree / "a" / "n-8.pth").write_bytes(b"another")
    for _ in range(2):
        done = undo(str(tree / "a"))
        assert (done.restored, bool(done.problems)) == ((), True)
    assert (tree / "latest").read_text() == "a/n-8.pth\n"


def test_what_points_there_from_above_goes_with_all_of_a_tree(tree: Path) -> None:
    shutil.copytree(tree / "a", tree / "b")
    (tree.parent / "best.txt").write_text(f"{tree.name}/b/model_epoch_9.pth\n")
    (tree.parent / "link").symlink_to(f"{tree.name}/a/model_epoch_8.pth")
    before = content(tree.parent)
    renamed(tree, recursive=True)
    assert "model-e0009" in (tree.parent / "best.txt").read_text()
    assert len(undo(str(tree), recursive=True, dry_run=True).pointers) == len(
        (done := undo(str(tree), recursive=True)).pointers
    )
    assert (done.problems, done.warnings) == ((), ())
    assert content(tree.parent) == before
