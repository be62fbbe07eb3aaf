"""Moves and removals under faults: each checkpoint is whole in one place, or gone, and no other is lost."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from ckpttool import AccessDenied, DamagedCheckpoint
from ckpttool.transaction.journal import Location, Move, OperationList
from ckpttool.transaction.open_roots import OpenRoots
from ckpttool.transaction.operations import Stage
from tests.support.changes import recover
from tests.support.faults import DiskStep, disk_steps, hit_call, is_hit_at
from tests.support.transactions import (
    IDENTITY,
    kill_before,
    make_moves,
    move,
    put_in_trash,
    removal_of,
    renaming,
    stages_of,
)
from tests.transaction.interrupted_moves import Play, ours, tree

FAILURES = ("ENOSPC", "EACCES", "EBUSY", "interrupt")
STEP = 13
SETTLING = 8
"""At one call of so many each failure comes, and at one of so many what settles a kill is killed, too."""

CASES = [
    *((kind, "remove") for kind in ("one_file", "sharded", "directories")),
    *((kind, "trash") for kind in ("one_file", "prefixes", "directories", "serials")),
    *((kind, "undo-trash") for kind in ("one_file", "prefixes", "serials")),
    *((kind, "rename") for kind in ("prefixes", "sharded", "directories")),
    *((kind, "undo-rename") for kind in ("prefixes", "sharded", "directories")),
    ("exchanged", "exchange"),
    ("exchanged", "undo-exchange"),
]
MISHAPS = [("ENOSPC", None), ("EACCES", None), ("EBUSY", None), ("interrupt", None)]
MISHAPS += [("kill", again) for again in range(1, 24, 3)]
"""How else it is interrupted: a call fails, or what settles a kill is killed as well, at some call."""


@pytest.mark.parametrize(("number", "kind", "action"), [(at, *case) for at, case in enumerate(CASES)])
@pytest.mark.parametrize("step", [6, pytest.param(1, marks=pytest.mark.thorough)])
def test_whatever_interrupts_it_loses_nothing(
    number: int, kind: str, action: str, step: int, tmp_path: Path
) -> None:
    """Kinds to which the same is done are killed at every call together; thoroughly, each is."""
    play = Play(tmp_path, kind, action)
    assert play.calls > 15
    for at, call in enumerate(range(1 + number % step, play.calls + 1, step)):
        play.interrupt("kill", call)
        for how, again in MISHAPS if step == 1 else MISHAPS[at // 2 % len(MISHAPS) :][: at % 2]:
            play.interrupt(how, call, again)


def test_an_exchange_that_is_interrupted_is_settled_at_once(tmp_path: Path) -> None:
    play = Play(tmp_path, "exchanged", "exchange")
    directory = play.copy("interrupted")
    act = partial(play.act, directory, play.units)
    assert is_hit_at(play.calls // 2, act, KeyboardInterrupt())
    assert not ours(directory)
    assert tree(directory) in (play.before[0], play.after[0])


def test_what_ctrl_c_leaves_that_can_not_be_settled_is_left_to_recovery(
    run_of: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    def refused(*arguments: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Stage, "prepare", interrupted)
        patch.setattr(OpenRoots, "unlink", refused)
        make_moves(run_of, renaming(run_of, {"a.pt": "c.pt"}))
    assert {"a.pt", "c.pt"} <= texts(run_of).keys()
    assert len(stages_of(run_of)) == 1
    assert "reverted" in recover(run_of).moved[0]
    assert "c.pt" not in texts(run_of)


# One at a time --------------------------------------------------------------------------------------


@pytest.fixture
def run_of(tmp_path: Path) -> Path:
    """Return a directory of three files, one of which has a name of two lines."""
    for name in ("a.pt", "b.pt", "two\nlines.pt"):
        (tmp_path / name).write_text(name)
    return tmp_path


def texts(directory: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in directory.iterdir() if path.is_file()}


def test_names_of_any_kind(run_of: Path) -> None:
    odd = os.fsdecode(b"latin-\xe9.pt")
    done = make_moves(run_of, renaming(run_of, {"two\nlines.pt": odd, "a.pt": "c\nd.pt"}))
    assert (len(done.done), done.failed) == (2, {})
    assert texts(run_of) == {odd: "two\nlines.pt", "c\nd.pt": "a.pt", "b.pt": "b.pt"}


def test_nothing_is_replaced(run_of: Path) -> None:
    done = make_moves(run_of, renaming(run_of, {"a.pt": "b.pt"}))
    assert (done.done, done.failed) == ([], {str(run_of / "a.pt"): "b.pt already exists"})
    assert texts(run_of)["b.pt"] == "b.pt"


def test_what_comes_to_stand_there_meanwhile_stays(run_of: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.link

    def link(source: str, target: str, **where: Any) -> None:
        if target == "c.pt":
            (run_of / "c.pt").write_text("new")
        real(source, target, **where)

    planned = renaming(run_of, {"a.pt": "c.pt", "b.pt": "d.pt"})
    monkeypatch.setattr(os, "link", link)
    done = make_moves(run_of, planned)
    assert done.failed == {
        str(run_of / "a.pt"): "c.pt already exists",
        str(run_of / "b.pt"): "a.pt: c.pt already exists; all of them are moved, or none",
    }
    assert texts(run_of) == {"a.pt": "a.pt", "b.pt": "b.pt", "c.pt": "new", "two\nlines.pt": "two\nlines.pt"}


def test_a_file_that_comes_between_check_and_move_stays(
    run_of: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.link

    def link(source: str, target: str, **where: Any) -> None:
        if source == "a.pt":
            (run_of / "fresh").write_text("fresh")
            os.replace(run_of / "fresh", run_of / "a.pt")
        real(source, target, **where)

    planned = renaming(run_of, {"a.pt": "c.pt"})
    monkeypatch.setattr(os, "link", link)
    done = make_moves(run_of, planned)
    assert done.failed == {str(run_of / "a.pt"): "it has changed since the plan was made"}
    assert texts(run_of)["a.pt"] == "fresh"
    assert not (run_of / "c.pt").exists()


def test_with_pointers_all_go_or_none(run_of: Path) -> None:
    (run_of / "latest").write_text("b.pt")
    planned = renaming(run_of, {"a.pt": "c.pt", "b.pt": "d.pt"}, rewrites=[("latest", "b.pt", "d.pt")])
    (run_of / "c.pt").write_text("in the way")
    before = texts(run_of)
    done = make_moves(run_of, planned)
    assert (done.done, done.failed) == ([], {str(run_of / "a.pt"): "c.pt already exists"})
    assert texts(run_of) == before


def test_a_pointer_that_has_changed_keeps_all(run_of: Path) -> None:
    (run_of / "latest").write_text("a.pt")
    done = make_moves(run_of, renaming(run_of, {"b.pt": "d.pt"}, rewrites=[("latest", "b.pt", "d.pt")]))
    assert list(done.failed.values()) == ["latest has changed since the plan was made"]
    assert (run_of / "b.pt").exists()


def test_a_symlink_is_led_elsewhere_and_never_followed(run_of: Path) -> None:
    (run_of / "best").symlink_to("a.pt")
    planned = renaming(run_of, {"a.pt": "c.pt"}, relinks=[("best", "a.pt", "c.pt")])
    assert not make_moves(run_of, planned).failed
    assert os.readlink(run_of / "best") == "c.pt"
    assert (run_of / "best").read_text() == "a.pt"


def test_a_name_that_differs_in_case_alone(run_of: Path) -> None:
    assert not make_moves(run_of, renaming(run_of, {"a.pt": "A.pt"})).failed
    assert "A.pt" in os.listdir(run_of)
    assert "a.pt" not in os.listdir(run_of)


def test_where_there_are_no_hard_links(run_of: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **where: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    done = make_moves(run_of, renaming(run_of, {"a.pt": "c.pt", "b.pt": "two\nlines.pt"}))
    assert done.failed == {str(run_of / "b.pt"): "two\nlines.pt already exists"}
    assert texts(run_of) == {name: name for name in ("a.pt", "b.pt", "two\nlines.pt")}
    assert not make_moves(run_of, renaming(run_of, {"a.pt": "c.pt"})).failed
    assert texts(run_of) == {"c.pt": "a.pt", "b.pt": "b.pt", "two\nlines.pt": "two\nlines.pt"}


def test_another_file_system_is_told(run_of: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **where: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    planned = renaming(run_of, {"a.pt": "c.pt"})
    monkeypatch.setattr(os, "link", refuse)
    done = make_moves(run_of, planned)
    assert list(done.failed.values()) == ["its new location is on another file system"]
    assert (run_of / "a.pt").exists()


def test_a_directory_that_can_not_be_written(run_of: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **where: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    before, planned = texts(run_of), renaming(run_of, {"a.pt": "c.pt"})
    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(AccessDenied, match="read-only file system; nothing was moved"):
        make_moves(run_of, planned)
    assert texts(run_of) == before


@pytest.mark.parametrize("names", [{"a.pt": "c.pt"}, {}])
@pytest.mark.parametrize(
    ("pointer", "kind", "write"),
    [("latest", "rewrites", Path.write_text), ("best", "relinks", Path.symlink_to)],
)
def test_a_pointer_that_has_changed_is_seen_before_anything_is_begun(
    pointer: str,
    kind: str,
    write: Callable[[Path, str], object],
    names: dict[str, str],
    run_of: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write(run_of / pointer, "a.pt")
    planned = renaming(run_of, names, **{kind: [(pointer, "a.pt", "c.pt")]})
    (run_of / pointer).unlink()
    write(run_of / pointer, "b.pt")
    calls = hit_call(0, lambda: None, patch=monkeypatch.setattr)
    done = make_moves(run_of, planned)
    told = f"{pointer} has changed since the plan was made"
    assert (done.failed, calls()) == ({str(run_of / name): told for name in names or [""]}, 0)


FORWARD = ["link", "sync", "replace", "sync", "replace", "unlink"]
"""A pointer is replaced once the new names are on the disk, and the old ones go once that is committed."""
BACK = ["replace", "link", "sync", "replace", "sync", "unlink", "sync", "replace"]
"""The commit goes first, and the record last."""


@pytest.mark.parametrize(("fails", "expected"), [(False, FORWARD), (True, [*FORWARD, *BACK])])
def test_each_step_is_on_the_disk_before_the_next(
    fails: bool, expected: list[str], run_of: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A renaming of which one old name can't be unlinked is taken back, the last step first."""
    make_moves(run_of, renaming(run_of, {"two\nlines.pt": "e.pt"}))  # there is a record before
    (run_of / "latest").write_text("a.pt")
    inodes = {(run_of / name).stat().st_ino for name in ("a.pt", "b.pt")}
    real = OpenRoots.unlink

    def unlink(roots: OpenRoots, location: Location) -> None:
        if fails and location.path == "b.pt":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        real(roots, location)

    def word(step: DiskStep) -> str | None:
        if step.call == "fsync":
            return "sync" if step.inode == run_of.stat().st_ino else None
        return step.call if step.call == "replace" or step.inode in inodes else None

    planned = renaming(run_of, {"a.pt": "c.pt", "b.pt": "d.pt"}, rewrites=[("latest", "a.pt", "c.pt")])
    monkeypatch.setattr(OpenRoots, "unlink", unlink)
    steps = disk_steps(monkeypatch)
    assert bool(make_moves(run_of, planned).failed) is fails
    words = [one for one, _ in groupby(filter(None, map(word, steps)))]
    assert words[words.index("link") :] == expected


def test_other_names_of_a_file_stay(run_of: Path) -> None:
    os.link(run_of / "a.pt", run_of / "other.pt")
    assert not make_moves(run_of, renaming(run_of, {"a.pt": "c.pt"})).failed
    assert os.path.samefile(run_of / "c.pt", run_of / "other.pt")
    assert not (run_of / "a.pt").exists()


# What an interrupted one left -----------------------------------------------------------------------


def halfway(directory: Path, step: str, planned: OperationList) -> Path:
    """Kill a renaming before a step; return its stage."""
    kill_before(step, lambda: make_moves(directory, planned))
    (stage,) = stages_of(directory)
    return stage


def test_a_trainer_that_went_on_from_the_new_name_is_right(run_of: Path) -> None:
    (run_of / "latest").write_text("a.pt")
    planned = renaming(run_of, {"a.pt": "c.pt"}, rewrites=[("latest", "a.pt", "c.pt")])
    halfway(run_of, "finish", planned)
    (run_of / "latest").write_text("c.pt, then d.pt")
    settled = recover(run_of)
    assert (settled.failed, settled.moved[0].endswith("completed")) == ({}, True)
    assert (texts(run_of)["latest"], texts(run_of)["c.pt"]) == ("c.pt, then d.pt", "a.pt")


def test_a_trainer_that_went_on_from_the_old_name_is_right(run_of: Path) -> None:
    (run_of / "latest").write_text("a.pt")
    planned = renaming(run_of, {"a.pt": "c.pt"}, rewrites=[("latest", "a.pt", "c.pt")])
    halfway(run_of, "write", planned)
    (run_of / "latest").write_text("a.pt, then b.pt")
    settled = recover(run_of)
    assert "interrupted rename: reverted" in settled.moved[0]
    assert texts(run_of)["latest"] == "a.pt, then b.pt"
    assert "c.pt" not in texts(run_of)


def test_a_trainer_that_saved_under_the_old_name_keeps_it(run_of: Path) -> None:
    (run_of / "latest").write_text("a.pt")
    planned = renaming(run_of, {"a.pt": "c.pt"}, rewrites=[("latest", "a.pt", "c.pt")])
    halfway(run_of, "write", planned)
    (run_of / "saving").write_text("saved since")
    (run_of / "saving").rename(run_of / "a.pt")
    settled = recover(run_of)
    assert (settled.failed, settled.moved[0].endswith("completed")) == ({}, True)
    found = texts(run_of)
    assert (found["a.pt"], found["c.pt"], found["latest"]) == ("saved since", "a.pt", "c.pt")


def test_what_is_neither_here_nor_there_is_told_and_kept(run_of: Path) -> None:
    (run_of / "latest").write_text("a.pt")
    names = {"a.pt": "c.pt", "b.pt": "d.pt"}
    planned = renaming(run_of, names, rewrites=[("latest", "a.pt", "c.pt")])
    kill_before("do", lambda: make_moves(run_of, planned), 2)
    (stage,) = stages_of(run_of)
    for name in ("a.pt", "b.pt"):
        (run_of / name).unlink()
    (run_of / "a.pt").write_text("another")
    settled = recover(run_of)
    told = settled.failed[str(run_of / "a.pt")]
    assert "can't be completed or reverted: not restored: another file now has this name" in told
    assert (stage / "journal.json").exists()
    assert (texts(run_of)["a.pt"], texts(run_of)["c.pt"]) == ("another", "a.pt")


def test_a_journal_that_leads_out_is_refused(run_of: Path) -> None:
    stage = halfway(run_of, "commit", renaming(run_of, {"a.pt": "c.pt"}))
    told = json.loads((stage / "journal.json").read_text())
    told["operations"][0][3] = "directory/../c.pt"
    (stage / "journal.json").write_text(json.dumps(told))
    before = texts(run_of)
    with pytest.raises(DamagedCheckpoint, match="points outside the directory"):
        recover(run_of)
    assert texts(run_of) == before


def test_a_trash_that_is_a_symlink_is_not_followed(run_of: Path, tmp_path_factory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (run_of / ".ckpttool-trash").symlink_to(elsewhere)
    with pytest.raises(AccessDenied, match="is a symlink; left unchanged"):
        put_in_trash(run_of, removal_of(run_of, "a.pt"))
    assert not stages_of(run_of)
    assert (run_of / "a.pt").read_text() == "a.pt"
    assert not list(elsewhere.rglob("*"))


def test_a_trainer_that_writes_into_a_directory_while_its_exchange_is_undone(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for name in ("a", "b"):
        (run / name).mkdir(parents=True)
        (run / name / "weights").write_text(name)
    ends = [Location("directory", name) for name in ("a", "b")]
    asides = [Location("stage", f"{number}/{name}") for number, name in enumerate("ab")]
    groups = tuple(move(run, {old: new}).group for old, new in (("a", "b"), ("b", "a")))
    away = (Move(number, ends[number], asides[number]) for number in range(2))
    come = (Move(number, asides[number], ends[1 - number]) for number in range(2))
    exchange = OperationList("rename", groups, (*away, *come), IDENTITY)
    assert make_moves(run, exchange).failed == {}
    halfway(run, "commit", exchange.inverse())
    (run / "a" / "weights").write_text("trained on")
    assert recover(run).failed == {}
    found = {
        path.name: (path / "weights").read_text() for path in run.iterdir() if (path / "weights").exists()
    }
    assert found == {"a": "b", "b": "trained on"}
