"""The journal: what is written is read again, and nothing else is believed."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool import DamagedCheckpoint
from ckpttool.storage import fs
from ckpttool.transaction import removal
from ckpttool.transaction.files import Contents, Fingerprint
from ckpttool.transaction.journal import (
    Group,
    Location,
    Move,
    OperationList,
    Rewrite,
    StoredFile,
)
from ckpttool.transaction.journal_documents import operations_document
from ckpttool.transaction.old_journals import list_of
from ckpttool.transaction.stages import DONE, JOURNAL
from ckpttool.transaction.stored_journals import read_journal
from tests.support.changes import journals_of, prune_to_trash
from tests.support.transactions import IDENTITY, kill_before, stages_of


def is_possible(name: str) -> bool:
    """Tell whether a file can be named so."""
    try:
        return os.fsencode(name) not in (b".", b"..")
    except UnicodeEncodeError:  # bytes that are no UTF-8 are surrogates, but not all surrogates are bytes
        return False


NAMES = st.text(st.characters(exclude_characters="/\0"), min_size=1).filter(is_possible)
COUNTS = st.integers(0, 2**64)


@st.composite
def removals(draw: st.DrawFn) -> Group:
    members = draw(st.lists(NAMES, min_size=1, max_size=3, unique=True))
    paths = [os.path.join(name, draw(NAMES)) if draw(st.booleans()) else name for name in members]
    files = tuple(Fingerprint(path, *(draw(COUNTS) for _ in range(4))) for path in paths)
    directories = tuple(draw(st.lists(st.sampled_from(members), unique=True)))
    survivors = tuple(draw(st.lists(NAMES, max_size=2)))
    return Group(draw(st.text()), tuple(members), Contents(files, directories), survivors)


@given(
    st.lists(removals(), max_size=3, unique_by=lambda one: one.members),
    st.lists(
        st.builds(Rewrite, NAMES, *[st.none() | st.text()] * 2, st.none() | NAMES, st.just(False))
        | st.builds(Rewrite, NAMES, st.text(), st.text(), st.none(), st.just(True)),
        max_size=2,
    ),
    st.sampled_from([None, [], [0]]),
)
def test_what_is_written_is_read_again(tmp_path_factory, told, rewrites, done) -> None:
    taken: set[str] = set()
    groups = [one for one in told if taken.isdisjoint(one.members) and not taken.update(one.members)]
    done = done if groups else None
    listed = removal.removal_operations(groups, rewrites)
    stage = tmp_path_factory.getbasetemp() / "stage"
    shutil.rmtree(stage, ignore_errors=True)
    stage.mkdir()
    (stage / JOURNAL).write_text(json.dumps(operations_document(listed)))
    if done is not None:
        (stage / DONE).write_text(json.dumps(done))
    expected = replace(listed, done=None if done is None else frozenset(done))
    assert read_journal(str(stage), str(stage)) == expected


BAD = {
    "not json": "{",
    "a list": "[]",
    "no keys": "{}",
    "another schema": '{"schema": "ckpttool.operations/2", "groups": [], "operations": []}',
    "deep": "[" * 100_000,
}


@pytest.mark.parametrize("text", BAD.values(), ids=BAD)
def test_what_can_not_be_understood(tmp_path: Path, text: str) -> None:
    (tmp_path / JOURNAL).write_text(text)
    with pytest.raises(DamagedCheckpoint, match="not a journal of ckpttool"):
        read_journal(str(tmp_path), str(tmp_path))


GROUP = {"path": "a", "files": [], "directories": [], "survivors": [], "new_name": None}
MOVE, OLD_NAMES = ["move", 0, "directory/a", "stage/0/a"], {"members": ["a"]}
JOURNAL_OF = {"schema": "ckpttool.operations/1", "kind": "remove", "identity": None, "leader": None}


def require_refused(stage: Path, document: object) -> None:
    (stage / JOURNAL).write_text(json.dumps(document))
    with pytest.raises(DamagedCheckpoint):
        read_journal(str(stage), str(stage))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("files", [["../a", 1, 2, 3, 4]]),
        ("files", [["a/../../b", 1, 2, 3, 4]]),
        ("files", [["b", 1, 2, 3, 4]]),
        ("files", [["/a", 1, 2, 3, 4]]),
        ("files", [["a", 1, 2, 3]]),
        ("files", [["a", 1, 2, 3, True]]),
        ("files", [["a", 1, 2, 3, 4, 5, 6]]),
        ("directories", ["a/.."]),
        ("directories", ["/"]),
        ("survivors", ["../a"]),
        ("path", None),
    ],
)
def test_paths_that_lead_out_are_refused(tmp_path: Path, key: str, value: object) -> None:
    group = GROUP | {key: value}
    require_refused(tmp_path, JOURNAL_OF | {"groups": [group], "operations": [MOVE]})
    old = {"schema": "ckpttool.journal/1", "rewrites": [], "removals": [OLD_NAMES | group]}
    require_refused(tmp_path, old)


@pytest.mark.parametrize("name", ["../other", "..", "", "/etc/passwd", "a\0b", 3])
def test_names_that_lead_out_are_refused(tmp_path: Path, name: object) -> None:
    stored = [f"stage/0/{name}", 1, 2, 3, 4]
    for operation in (
        ["move", 0, f"directory/{name}" if isinstance(name, str) else name, "stage/0/a"],
        ["move", 0, "directory/a", name],
        ["move", 0, "directory/a", f"directory/{name}"] if isinstance(name, str) else ["move", 0, name, name],
        ["move", 0, "directory/a", f"stage/0/{name}/a"],
        ["move", 0, "directory/a", f"trash/{name}"],
        ["put", 0, name, None, None],
        ["put", 0, "a", [f"directory/{name}", 1, 2, 3, 4] if name != 3 else [3], stored],
        ["write", name, None, "text", None],
        ["write", "a", None, "text", name],
        ["relink", name, "a", "b"],
    ):
        require_refused(tmp_path, JOURNAL_OF | {"groups": [GROUP], "operations": [MOVE, operation]})
    old = {"schema": "ckpttool.journal/1", "rewrites": [], "removals": [GROUP | {"members": [name]}]}
    require_refused(tmp_path, old)


@pytest.mark.parametrize(
    "operations",
    [
        [],
        [["move", 1, "directory/a", "stage/0/a"]],
        [["move", -1, "directory/a", "stage/0/a"]],
        [["move", 0, "elsewhere/a", "stage/0/a"]],
        [["move", 0, "a", "0/a"]],
        [MOVE, MOVE],
        [MOVE, ["move", 0, "directory/b", "stage/0/a"]],
        [MOVE, ["unlink", 0, "directory/a", "stage/0/a"]],
        [MOVE, ["put", 0, "b", None, ["stage/1/b", 1, 2, 3]]],
        [MOVE, ["put", 0, "b", None, None]],
        [MOVE, ["write", "a", 3, "c", None]],
        [MOVE, ["write", "a", "b", "c"]],
        [MOVE, ["relink", "a", "b", None]],
        [MOVE, None],
    ],
)
def test_no_other_operations_are_believed(tmp_path: Path, operations: object) -> None:
    document = JOURNAL_OF | {"groups": [GROUP], "operations": operations}
    require_refused(tmp_path, document)


@pytest.mark.parametrize("done", [{}, 1, [1], [-1], ["0"], [True], None])
def test_no_other_groups_are_believed(tmp_path: Path, done: object) -> None:
    (tmp_path / DONE).write_text(json.dumps(done))
    if done is None:
        (tmp_path / DONE).write_text("[")
    require_refused(tmp_path, JOURNAL_OF | {"groups": [GROUP], "operations": [MOVE]})


def test_a_command_that_ends_while_its_journal_is_read(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kill_before("commit", lambda: prune_to_trash(short))
    [stage] = stages_of(short)
    lstat = fs.lstat

    def removed(path: str) -> os.stat_result:
        if path == str(stage):
            shutil.rmtree(stage)
        return lstat(path)

    monkeypatch.setattr(fs, "lstat", removed)
    assert read_journal(str(stage), str(short)) is None


def test_only_our_own_directories_are_stages(tmp_path: Path) -> None:
    for name in (".ckpttool-0123abcd", ".ckpttool-trash", ".ckpttool-012", ".ckpttool-0123abcX"):
        (tmp_path / name).mkdir()
    (tmp_path / ".ckpttool-76543210").write_text("a file")
    assert stages_of(tmp_path) == [tmp_path / ".ckpttool-0123abcd"]
    assert journals_of(tmp_path) == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("kind", "delete"),
        ("kind", []),
        ("kind", "trash"),
        *(("identity", one) for one in ("../../x", 3, 0, "", [], False)),
        ("leader", 3),
    ],
)
def test_no_other_commands_are_believed(tmp_path: Path, key: str, value: object) -> None:
    require_refused(tmp_path, JOURNAL_OF | {"groups": [GROUP], "operations": [MOVE], key: value})


def test_all_operations_are_read_again(tmp_path: Path) -> None:
    here, aside = (Fingerprint("a/b", *range(at, at + 4)) for at in (1, 5))
    contents = Contents((replace(here, path="a/b"),), ())
    operations = (
        Move(0, Location("directory", "c"), Location("directory", "d")),
        Move(
            0,
            Location("directory", "x/b"),
            Location("directory", "a/b"),
            aside,
            StoredFile(Location("trash", "1/b"), here),
        ),
        Move(0, Location("directory", "x/c"), Location("directory", "new"), replace(aside, path="new")),
        Rewrite("checkpoint", "\udce9\n", None, "other"),
        Rewrite("best", "a", "b", is_link=True),
    )
    listed = OperationList("slim", (Group("run/a", ("c", "a/b"), contents),), operations, IDENTITY)
    (tmp_path / JOURNAL).write_text(json.dumps(operations_document(listed)))
    assert read_journal(str(tmp_path), str(tmp_path)) == listed


def test_what_undoes_a_replacement_is_read_again(tmp_path: Path) -> None:
    """Of the files that come back, the group lists all; of those that leave again, none."""
    replaced, gone, comes, new = (
        Fingerprint(path, *range(at, at + 4)) for at, path in enumerate(("a/b", "a/c", "a/b", "a/d"))
    )
    here = {name: Location("directory", f"a/{name}") for name in "bcd"}
    aside = {name: Location("trash", f"{at}/{name}") for at, name in enumerate("bc", 1)}
    operations = (
        Move(0, Location("directory", "x/d"), here["d"], new),
        Move(0, Location("directory", "x/b"), here["b"], comes, StoredFile(aside["b"], replaced)),
        Move(0, here["c"], aside["c"]),
    )
    group = Group("run/a", ("a/b", "a/c"), Contents((replaced, gone)))
    undoing = OperationList("slim", (group,), operations, IDENTITY).inverse()
    assert undoing.groups[0].members == ("1/b", "2/c")
    read = list_of(json.loads(json.dumps(operations_document(undoing))))
    assert read.operations == undoing.operations
    assert set(read.groups[0].members) == {"1/b", "2/c"}
    assert (read.groups[0].contents, read.original_root(0)) == (undoing.groups[0].contents, "trash")


# Moves of version 0.1 -----------------------------------------------------------------------------

OLD_MOVES: dict[str, Any] = {
    "schema": "ckpttool.moves/1",
    "kind": "trash",
    "identity": IDENTITY,
    "source": "directory",
    "target": "trash",
    "moves": [
        {
            "path": "run/a.pt",
            "members": [["a.pt", "0/a.pt"]],
            "directories": ["a.pt"],
            "files": [["a.pt/x", 1, 2, 3, 4]],
        }
    ],
    "rewrites": [{"name": "checkpoint", "before": "\udce9\n", "after": None}],
    "relinks": [{"name": "best", "before": "a", "after": "b"}],
}


def test_old_moves_are_operations() -> None:
    listed = list_of(OLD_MOVES)
    move = Move(0, Location("directory", "a.pt"), Location("trash", "0/a.pt"))
    assert listed.operations == (
        Rewrite("checkpoint", "\udce9\n", None),
        Rewrite("best", "a", "b", is_link=True),
        move,
    )
    assert listed.groups == (
        Group("run/a.pt", ("a.pt",), Contents((Fingerprint("a.pt/x", 1, 2, 3, 4),), ("a.pt",))),
    )


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (("schema",), "ckpttool.moves/2"),
        (("kind",), "delete"),
        (("identity",), "../../x"),
        (("source",), "/etc"),
        (("target",), ".."),
        (("moves", 0, "members"), [["../a", "0/a"]]),
        (("moves", 0, "members"), [["a", "../a"]]),
        (("moves", 0, "members"), [["a", "0/../a"]]),
        (("moves", 0, "members"), [["a", "0/b/c"]]),
        (("moves", 0, "members"), [["a", "x/a"]]),
        (("moves", 0, "members"), [["a/b", "0/a"]]),
        (("moves", 0, "members"), [["a.pt", "0/a.pt"], ["a.pt", "0/b"]]),
        (("moves", 0, "members"), [["a.pt", "0/a.pt"], ["b", "0/a.pt"]]),
        (("moves", 0, "members"), [["a.pt"]]),
        (("moves", 0, "path"), None),
        (("moves", 0, "files"), [["b", 1, 2, 3, 4]]),
        (("moves", 0, "files"), [["a.pt/../../x", 1, 2, 3, 4]]),
        (("moves", 0, "files"), [["a.pt", 1, 2, 3, True]]),
        (("moves", 0, "directories"), ["/"]),
        (("rewrites", 0, "name"), "../checkpoint"),
        (("rewrites", 0, "name"), "/checkpoint"),
        (("rewrites", 0, "before"), 3),
        (("relinks", 0, "name"), "a/../../b"),
        (("relinks", 0, "after"), None),
    ],
)
def test_no_other_moves_are_believed(where: tuple[str | int, ...], value: object) -> None:
    told = json.loads(json.dumps(OLD_MOVES))
    *above, last = where
    inner = told
    for key in above:
        inner = inner[key]
    inner[last] = value
    with pytest.raises((KeyError, TypeError, ValueError)):
        list_of(told)


def chained(*names: str) -> dict[str, Any]:
    """Return a renaming in waves, as version 0.1 wrote it: the last wave holds those before it."""
    waves = [
        {
            "schema": "ckpttool.moves/1",
            "kind": "rename",
            "identity": IDENTITY,
            "source": "directory",
            "target": "directory",
            "moves": [
                {"path": "a", "members": [[old, new]], "files": [[old, 1, 2, 3, 4]], "directories": []}
            ],
            "rewrites": [],
            "relinks": [],
        }
        for old, new in pairwise(names)
    ]
    before = waves[-2::-1]
    return waves[-1] | {"schema": "ckpttool.moves-in-a-row/1", "before": before, "has_more": True}


def test_old_waves_follow_each_other() -> None:
    listed = list_of(chained("a", "a~1", "b"))
    first, second, third = (Location("directory", name) for name in ("a", "a~1", "b"))
    assert listed.operations == (Move(0, first, second), Move(1, second, third))


@pytest.mark.parametrize("value", [None, [{}], [OLD_MOVES | {"identity": IDENTITY.replace("a", "b")}]])
def test_no_other_waves_are_believed(value: object) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        list_of(chained("a", "b", "c") | {"before": value})
