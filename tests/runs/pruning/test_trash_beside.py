"""A trash that lies beside its directory, under its name: whose it is once directories have other names."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from ckpttool import undo
from tests.support.changes import empty_trash, file_bytes, prune_to_trash

TRASH = ".ckpttool-trash"


@pytest.fixture
def root(files: Path, tmp_path: Path) -> Path:
    """Return a Fluid root of five serials."""
    return Path(shutil.copytree(files / "fluid" / "root", tmp_path / "around" / "run"))


def test_a_root_that_got_another_name_has_its_trash(root: Path) -> None:
    before = file_bytes(root)
    prune_to_trash(root)
    old = root.rename(root.with_name("old"))
    shutil.copytree(old, root, copy_function=shutil.copy2)
    kept = file_bytes(root)
    for done in (undo(str(root)), empty_trash(root)):
        (problem,) = done.problems
        assert "belongs to a directory that was named" in problem.message
        assert f"and is {old} now" in problem.message
    assert (file_bytes(root), undo(str(root)).restored) == (kept, ())
    planned = undo(str(old), dry_run=True)
    assert os.listdir(root.parent / f"{TRASH}@run")
    done = undo(str(old))
    assert [one.path for one in planned.restored] == [one.path for one in done.restored]
    assert [path.name for path in sorted(old.iterdir())] == [f"checkpoint_{number}" for number in range(5)]
    assert f"{TRASH}@run" in done.warnings[0]
    assert (file_bytes(old), file_bytes(root)) == (before, kept)
    assert sorted(os.listdir(root.parent)) == ["old", "run"]


def test_a_trash_whose_root_is_gone_is_nobody_elses(root: Path) -> None:
    prune_to_trash(root)
    other = Path(shutil.copytree(root, root.parent / "other", copy_function=shutil.copy2))
    shutil.rmtree(root)
    other.rename(root)
    kept = file_bytes(root.parent)
    (problem,) = undo(str(root)).problems
    assert "move the files you need" in problem.message
    assert not empty_trash(root).removed
    assert file_bytes(root.parent) == kept


def test_a_root_that_got_another_name_empties_its_trash(root: Path) -> None:
    prune_to_trash(root)
    old = root.rename(root.with_name("old"))
    assert len(empty_trash(old, dry_run=True).removed) == 3
    assert [one.path for one in undo(str(root.parent), recursive=True, dry_run=True).restored] == [
        str(old / f"checkpoint_{number}") for number in range(3)
    ]
    assert len(empty_trash(old).removed) == 3
    assert os.listdir(root.parent) == ["old"]


def test_records_of_older_versions_are_of_who_has_the_name(root: Path) -> None:
    prune_to_trash(root)
    (path,) = root.parent.glob(f"{TRASH}@run/*/record.json")
    told = json.loads(path.read_text())
    assert told.pop("root") == root.stat().st_ino
    path.write_text(json.dumps(told))
    assert len(undo(str(root)).restored) == 3


@pytest.mark.parametrize("tool", ["cp", "renamed"])
def test_a_roots_trash_that_went_with_the_directory_around(root: Path, tool: str) -> None:
    before = file_bytes(root)
    prune_to_trash(root)
    around = root.parent.with_name("moved")
    if tool == "cp":
        subprocess.run(["cp", "-a", root.parent, around], check=True)
    else:
        root.parent.rename(around)
    done = undo(str(around / "run"))
    assert (done.problems, len(done.restored)) == ((), 3)
    assert file_bytes(around / "run") == before
