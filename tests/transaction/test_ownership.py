"""Whom ckpttool believes: nothing that another user planted is done, and nothing outside changes."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckpttool import AccessDenied, CheckpointError, DamagedCheckpoint, undo
from ckpttool.transaction.journal import OperationList
from ckpttool.transaction.removal import removal_operations
from tests.support.changes import empty_trash, journals_of, other_owner_of, recover
from tests.support.faults import path_at
from tests.support.limits import lower_limits
from tests.support.transactions import (
    IDENTITY,
    hidden_names,
    journal_of,
    make_moves,
    move,
    moves,
    plant_journal,
    put_in_trash,
    removal_of,
    renaming,
)

STRANGER = 54321
LATER = IDENTITY.replace("2026", "2027")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    directory = tmp_path / "run"
    directory.mkdir()
    for number in (1, 2):
        (directory / f"model_{number}.pt").write_bytes(b"weights %d" % number)
    return directory


def seen(directory: Path) -> dict[str, bytes]:
    """Return all files below a directory, but for what is ours."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file() and ".ckpttool" not in str(path)
    }


def model_9(run: Path, **pointers: Any) -> OperationList:
    """Return moves that call a model the ninth."""
    return moves(move(run, {"model_1.pt": "model_9.pt"}, "model_1.pt"), **pointers)


# Symlinks -------------------------------------------------------------------------------------------

OUTSIDE: dict[str, dict[str, Any]] = {
    "a new file": {"rewrites": [("sub/authorized_keys", None, "planted\n")]},
    "a text": {"rewrites": [("sub/conf", "hello\n", "planted\n")]},
    "a file that goes": {"rewrites": [("sub/conf", "hello\n", None)]},
    "a symlink": {"relinks": [("sub/link", "conf", "elsewhere")]},
}


@pytest.fixture
def outside(run: Path) -> Path:
    place = run.parent / "outside"
    place.mkdir()
    (place / "conf").write_text("hello\n")
    (place / "link").symlink_to("conf")
    (run / "sub").symlink_to("../outside")
    return place


@pytest.mark.parametrize("pointer", OUTSIDE.values(), ids=OUTSIDE)
def test_no_pointer_is_written_behind_a_symlink(run: Path, outside: Path, pointer: dict[str, Any]) -> None:
    before = seen(outside), os.readlink(outside / "link")
    plant_journal(run, journal_of(run, model_9(run, **pointer)))
    (told_once,) = recover(run).moved
    assert "interrupted rename: reverted" in told_once
    assert (seen(outside), os.readlink(outside / "link")) == before
    assert (run / "model_1.pt").exists()
    assert not (run / "model_9.pt").exists()
    outcome = make_moves(run, model_9(run, **pointer))
    assert "is reached through a symlink" in outcome.failed["model_1.pt"]
    assert (seen(outside), os.readlink(outside / "link")) == before


def test_pointers_alone_are_told_of_their_directory(run: Path, outside: Path) -> None:
    plant_journal(run, journal_of(run, moves(**OUTSIDE["a new file"])))
    (told,) = recover(run).moved
    assert told.startswith(f"{run}: ")
    assert "interrupted rename: reverted" in told


def test_a_record_changes_nothing_behind_a_symlink(run: Path, outside: Path) -> None:
    before = seen(outside)
    told = model_9(run, rewrites=[("note", None, "model_9")])
    make_moves(run, told)
    (path,) = run.rglob("record.json")
    document = json.loads(path.read_text())
    operations = document["steps"][0]["undoing"]["operations"]
    operations += [
        ["write", "sub/conf", "hello\n", "planted\n", None],
        ["write", "sub/new", None, "planted\n", None],
    ]
    path.write_text(json.dumps(document))
    undo(str(run))
    assert seen(outside) == before


def test_a_new_pointer_never_gets_the_right_to_run_as_its_owner(run: Path) -> None:
    pointer = run / "latest"
    pointer.write_text("model_1.pt")
    pointer.chmod(0o4755)
    make_moves(
        run,
        model_9(run, rewrites=[("latest", "model_1.pt", "model_9.pt")]),
    )
    assert (pointer.read_text(), stat.S_IMODE(pointer.stat().st_mode)) == ("model_9.pt", 0o755)


# A trash elsewhere ----------------------------------------------------------------------------------


@pytest.fixture
def elsewhere(run: Path, tmp_path: Path) -> Path:
    """Return a directory whose trash the trash of the other is a link to."""
    other = tmp_path / "other"
    other.mkdir()
    (other / "model_1.pt").write_bytes(b"another's")
    put_in_trash(other, removal_of(other, "model_1.pt"))
    (run / ".ckpttool-trash").symlink_to("../other/.ckpttool-trash")
    return other


STEPS: dict[str, Callable[[Path], object]] = {
    "empty": empty_trash,
    "empty, dry": lambda run: empty_trash(run, dry_run=True),
    "undo": lambda run: undo(str(run)),
    "rename": lambda run: make_moves(run, model_9(run)),
    "trash": lambda run: put_in_trash(run, removal_of(run, "model_1.pt"), identity=LATER),
}


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_a_symlinked_trash_is_not_followed(
    run: Path, elsewhere: Path, step: Callable[[Path], object]
) -> None:
    def everything() -> dict[str, bytes]:
        return {str(path): path.read_bytes() for path in elsewhere.rglob("*") if path.is_file()}

    before = seen(run), everything()
    with pytest.raises(AccessDenied, match="is a symlink; left unchanged"):
        step(run)
    assert (seen(run), everything()) == before


@pytest.mark.parametrize("kind", ["rename", "trash"])
def test_recovery_does_not_follow_it_either(run: Path, elsewhere: Path, kind: str) -> None:
    aside = removal_operations([removal_of(run, "model_1.pt")], kind="trash", identity=IDENTITY)
    plant_journal(run, journal_of(run, aside if kind == "trash" else model_9(run)))
    before = sorted(elsewhere.rglob("*"))
    (failed,) = recover(run).failed.values()
    assert "is a symlink" in failed
    assert sorted(elsewhere.rglob("*")) == before
    assert (run / "model_1.pt").read_bytes() == b"weights 1"


# Other users ----------------------------------------------------------------------------------------


def belongs_to_a_stranger(monkeypatch: pytest.MonkeyPatch, *paths: Path) -> None:
    """Let some paths belong to another user; only root could give them away."""
    real = os.lstat

    def lstat(path: str, *, dir_fd: int | None = None) -> os.stat_result:
        found = real(path, dir_fd=dir_fd)
        if Path(path_at(path, dir_fd)) not in paths:
            return found
        return os.stat_result([*found[:4], STRANGER, *found[5:10]])

    monkeypatch.setattr(os, "lstat", lstat)


def test_a_journal_of_another_user_is_not_obeyed(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = seen(run)
    stage = plant_journal(run, journal_of(run, removal_of(run, "model_2.pt")))
    (stage / "0").mkdir()
    (stage / "0" / "model_2.pt").hardlink_to(run / "model_2.pt")
    belongs_to_a_stranger(monkeypatch, stage)
    with pytest.raises(AccessDenied, match=f"belongs to another user, uid {STRANGER}"):
        recover(run)
    assert hidden_names(run) == frozenset()
    assert seen(run) == before


def test_a_journal_of_another_user_is_told_to_wait(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = plant_journal(run, journal_of(run, removal_of(run, "model_2.pt")))
    path = str(stage / "journal.json")
    assert (journals_of(run), other_owner_of(path)) == ([path], None)
    belongs_to_a_stranger(monkeypatch, stage)
    assert (journals_of(run), other_owner_of(path)) == (
        [path],
        f"uid {STRANGER}",
    )
    real = os.lstat

    def lstat(name: str, *, dir_fd: int | None = None) -> os.stat_result:
        if path_at(name, dir_fd) == path:  # as in a directory that only its owner may look into
            raise PermissionError(13, "Permission denied", name)
        return real(name, dir_fd=dir_fd)

    monkeypatch.setattr(os, "lstat", lstat)
    assert journals_of(run) == [path]


def test_whose_trash_is_in_the_way_is_told(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trash = run / ".ckpttool-trash"
    trash.mkdir(mode=0o700)
    belongs_to_a_stranger(monkeypatch, trash)
    before = seen(run)
    removal = removal_of(run, "model_1.pt")
    for act in (
        lambda: make_moves(run, model_9(run)),
        lambda: put_in_trash(run, removal),
        lambda: undo(str(run)),
        lambda: empty_trash(run),
    ):
        with pytest.raises(
            AccessDenied, match=f"another user, uid {STRANGER}; .* its owner runs undo or prune --empty-trash"
        ):
            act()
    assert seen(run) == before


def test_moves_of_another_user_are_not_made(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = plant_journal(run, journal_of(run, renaming(run, {"model_1.pt": "gone.bin"})))
    belongs_to_a_stranger(monkeypatch, stage)
    with pytest.raises(AccessDenied, match="belongs to another user"):
        recover(run)
    assert sorted(seen(run)) == ["model_1.pt", "model_2.pt"]


def plant_renamed(run: Path) -> Path:
    """Leave a renaming that was killed after its commit; return its stage."""
    journal = journal_of(run, model_9(run))
    (run / "model_9.pt").hardlink_to(run / "model_1.pt")
    return plant_journal(run, journal, [0])


def test_what_belongs_to_the_directorys_owner_is_believed(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant_renamed(run)
    monkeypatch.setattr(os, "geteuid", lambda: STRANGER)
    assert "completed" in recover(run).moved[0]
    assert sorted(seen(run)) == ["model_2.pt", "model_9.pt"]


@pytest.mark.parametrize(
    ("around", "stage", "is_believed"),
    [
        (0o755, 0o700, True),
        (0o755, 0o755, True),
        (0o755, 0o770, False),
        (0o755, 0o702, False),
        (0o775, 0o775, True),  # a file system on which all modes are the same
        (0o777, 0o777, True),
        (0o1777, 0o777, False),
        (0o1777, 0o700, True),
    ],
)
def test_what_others_could_have_written(run: Path, around: int, stage: int, is_believed: bool) -> None:
    place = plant_renamed(run)
    run.chmod(around)
    place.chmod(stage)
    if is_believed:
        recover(run)
    else:
        with pytest.raises(AccessDenied, match="others may have written to it"):
            recover(run)
    assert (run / "model_1.pt").exists() is not is_believed


@pytest.mark.parametrize("step", [STEPS[name] for name in ("rename", "trash", "undo", "empty")])
def test_a_trash_of_another_user_stops_all_before_it_begins(
    run: Path, monkeypatch: pytest.MonkeyPatch, step: Callable[[Path], object]
) -> None:
    trash = run / ".ckpttool-trash"
    trash.mkdir(mode=0o700)
    before = sorted(run.rglob("*"))
    belongs_to_a_stranger(monkeypatch, trash)
    with pytest.raises(AccessDenied, match="belongs to another user"):
        step(run)
    assert sorted(run.rglob("*")) == before


def test_a_record_that_is_none_stops_a_renaming_before_it_begins(run: Path) -> None:
    record = run / ".ckpttool-trash" / IDENTITY / "record.json"
    record.parent.mkdir(parents=True)
    record.write_text("[]")
    with pytest.raises(DamagedCheckpoint, match="not a record of ckpttool"):
        make_moves(run, model_9(run))
    assert sorted(seen(run)) == ["model_1.pt", "model_2.pt"]


# What is no journal ---------------------------------------------------------------------------------


def a_fifo(path: Path) -> None:
    os.mkfifo(path)


def a_symlink(path: Path) -> None:
    path.symlink_to("/dev/zero")


def a_huge_file(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 29)


STRANGE = [
    (a_fifo, "not a regular file"),
    (a_symlink, "a symlink"),
    (a_huge_file, "bytes"),
    (Path.mkdir, "not a regular file"),
]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs a POSIX system")
@pytest.mark.parametrize(("make", "found"), STRANGE)
def test_what_is_no_plain_file_is_no_journal(run: Path, make: Callable[[Path], None], found: str) -> None:
    stage = run / ".ckpttool-0123abcd"
    stage.mkdir(mode=0o700)
    make(stage / "journal.json")
    with pytest.raises(CheckpointError, match=found):
        recover(run)
    assert hidden_names(run) == frozenset()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs a POSIX system")
@pytest.mark.parametrize(("make", "found"), [STRANGE[0], STRANGE[1], STRANGE[3]])
def test_what_is_no_plain_file_is_no_record(run: Path, make: Callable[[Path], None], found: str) -> None:
    place = run / ".ckpttool-trash" / IDENTITY
    place.mkdir(parents=True)
    make(place / "record.json")
    with pytest.raises(CheckpointError, match=found):
        undo(str(run))
    (problem,) = empty_trash(run, dry_run=True).problems
    assert found in problem.message


def test_a_journal_that_could_not_be_read_again_is_not_written(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lower_limits(monkeypatch, journal=100)
    with pytest.raises(AccessDenied, match="nothing was moved: try fewer at once"):
        make_moves(run, model_9(run))
    assert sorted(os.listdir(run)) == ["model_1.pt", "model_2.pt"]


def changed(run: Path, **values: object) -> bytes:
    told = json.loads(journal_of(run, model_9(run)))
    return json.dumps(told | values).encode()


GROUP = {"path": "x", "files": [], "directories": [], "survivors": [], "new_name": None}
MOVE = ["move", 0, "directory/model_1.pt", "directory/b"]
HOSTILE: dict[str, dict[str, object]] = {
    "no operations": {"operations": None},
    "half an operation": {"groups": [GROUP], "operations": [MOVE[:2]]},
    "an empty file": {"groups": [GROUP | {"files": [[]]}], "operations": [MOVE]},
    "no text": {"groups": [], "operations": [["write", "a", None, "\ud800", None]]},
    "no name": {"groups": [], "operations": [["write", "\ud800", None, "", None]]},
    "no link": {"groups": [], "operations": [["relink", "a", "b", "\udfff\ud800"]]},
    "no place": {"groups": [GROUP], "operations": [["move", 0, "elsewhere/a", "directory/b"]]},
    "a list for a place": {"groups": [GROUP], "operations": [["move", 0, [], "directory/b"]]},
    "no kind": {"kind": {}},
    "no identity": {"identity": "../.."},
}


@pytest.mark.parametrize("values", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_journal_is_told_in_plain_words(run: Path, values: dict[str, object]) -> None:
    plant_journal(run, changed(run, **values))
    with pytest.raises(DamagedCheckpoint, match="not a journal of ckpttool") as raised:
        recover(run)
    assert not {"NoneType", "codec", "subscriptable", "index out"} & set(str(raised.value).split())
    assert sorted(seen(run)) == ["model_1.pt", "model_2.pt"]


def test_a_removal_without_members(run: Path) -> None:
    told = json.loads(journal_of(run, removal_of(run, "model_2.pt")))
    told["groups"][0]["files"], told["operations"] = [], []
    plant_journal(run, json.dumps(told).encode())
    with pytest.raises(DamagedCheckpoint, match="not a journal of ckpttool"):
        recover(run)


# What a kill leaves in the trash --------------------------------------------------------------------


def test_a_half_written_record_goes_with_the_next_step(run: Path) -> None:
    make_moves(run, model_9(run))
    (place,) = (run / ".ckpttool-trash").iterdir()
    stray = place / ".ckpttool-0123456789ab.tmp"
    stray.write_text("half of a rec")
    other = place / "notes.tmp"
    other.write_text("the user's")
    undo(str(run))
    assert not stray.exists()
    assert other.exists()


@pytest.mark.parametrize("umask", [0o002, 0o022, 0o077])
@pytest.mark.parametrize("step", [STEPS["rename"], STEPS["trash"]], ids=["rename", "trash"])
def test_nobody_else_looks_into_a_trash(run: Path, step: Callable[[Path], object], umask: int) -> None:
    before = os.umask(umask)
    try:
        step(run)
    finally:
        os.umask(before)
    trash = run / ".ckpttool-trash"
    places = [trash, *(path for path in trash.rglob("*") if path.is_dir())]
    assert {stat.S_IMODE(path.stat().st_mode) for path in places} == {0o700}
