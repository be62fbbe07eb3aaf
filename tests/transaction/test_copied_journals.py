"""A directory that was copied with what a kill had left in it: settled or refused, and nothing is lost."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.support.changes import recover
from tests.support.transactions import (
    hidden_names,
    kill_before,
    make_moves,
    move,
    moves,
    removal_of,
    remove,
    stages_of,
)

ENDS = ("index", "data-00000-of-00002", "data-00001-of-00002")
OLD = {f"ckpt-{number}.{end}" for number in (1, 2) for end in ENDS}
NEW = {name.replace("ckpt-", "step-") for name in OLD}
TOOLS = ("cp -a", "rsync -a", "cp -r")


def members(number: int) -> list[str]:
    return [f"ckpt-{number}.{end}" for end in ENDS]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    run = tmp_path / "run"
    run.mkdir()
    for number, name in enumerate(sorted(OLD)):
        (run / name).write_text(name)
        os.utime(run / name, (number, number))  # else a copy in the same moment would have the same time
    return run


def rename(run: Path) -> None:
    renamed = [{name: name.replace("ckpt", "step") for name in members(number)} for number in (1, 2)]
    moved = (move(run, names, path=f"elsewhere/ckpt-{at}") for at, names in enumerate(renamed, 1))
    make_moves(run, moves(*moved))


def copied(run: Path, tool: str) -> Path:
    """Copy a directory as a tool does that keeps times and hard links, times alone, or nothing."""
    names: dict[int, Path] = {}
    other = run.with_name("copy")
    for path in (run, *sorted(run.rglob("*"))):
        there, inode = other / path.relative_to(run), path.stat().st_ino
        if path.is_dir():
            there.mkdir(mode=path.stat().st_mode & 0o777)
        elif inode in names and tool == "cp -a":
            there.hardlink_to(names[inode])
        else:
            names[inode] = Path(
                shutil.copyfile(path, there) if tool == "cp -r" else shutil.copy2(path, there)
            )
    return other


def there(run: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in run.iterdir() if path.is_file()}


def is_whole(run: Path, number: int) -> bool:
    """Tell whether all of a checkpoint lies under its old names, or under its new ones."""
    texts, old = there(run), members(number)
    new = [name.replace("ckpt", "step") for name in old]
    return any(
        all(texts.get(name) == text for name, text in zip(one, old, strict=True)) for one in (old, new)
    )


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize(("step", "count"), [("do", 6), ("commit", 1), ("unlink", 4), ("close", 1)])
def test_a_renaming_in_a_copy(run: Path, tool: str, step: str, count: int) -> None:
    kill_before(step, lambda: rename(run), count)
    other = copied(run, tool)
    before, (left,) = there(other), stages_of(other)
    done = recover(other)
    assert there(other) == before
    assert is_whole(other, 1) and is_whole(other, 2)
    assert list(done.failed) == [str(other / "ckpt-1"), str(other / "ckpt-2")]
    for why in done.failed.values():
        assert "the directory was copied while a command was running" in why
        assert why.endswith(f"; keep the files you need, and remove {left}")
    shutil.rmtree(left)  # as the message says
    assert not recover(other).failed
    recover(run)
    assert set(there(run)) == (OLD if step in ("do", "commit") else NEW)


def test_what_is_half_copied_is_hidden(run: Path) -> None:
    kill_before("commit", lambda: rename(run))
    other = copied(run, "cp -a")
    assert hidden_names(other) & set(there(other)) == hidden_names(run) & set(there(run)) != frozenset()


def prune(run: Path) -> None:
    remove(run, removal_of(run, *members(1), path="elsewhere/ckpt-1", survivors=["ckpt-2.index"]))


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("step", ["commit", "remove"])
def test_a_prune_in_a_copy_is_taken_back(run: Path, tool: str, step: str) -> None:
    kill_before(step, lambda: prune(run))
    other = copied(run, tool)
    done = recover(other)
    assert ([os.path.relpath(path, other) for path in done.put_back], done.failed) == (["ckpt-1"], {})
    assert set(there(other)) == OLD
    assert not stages_of(other)


@pytest.mark.parametrize("tool", TOOLS)
def test_a_prune_that_had_begun_to_unlink_is_told_in_a_copy(run: Path, tool: str) -> None:
    kill_before("remove", lambda: prune(run), 3)
    other = copied(run, tool)
    ((path, why),) = recover(other).failed.items()
    assert path == str(other / "ckpt-1")
    (stage,) = stages_of(other)
    assert f"the remaining files have changed or were copied; they are in {stage / '0'}" in why
    assert len(list(stage.glob("0/*"))) == 1
    assert is_whole(other, 2)
    shutil.rmtree(stage / "0")  # as the message says
    assert not recover(other).failed
    assert not stages_of(other)
    assert not recover(run).failed
    assert set(there(run)) == OLD - set(members(1))
