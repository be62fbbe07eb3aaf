"""The journal: what is written is read again, and nothing else is believed."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool import DamagedCheckpoint
from ckpttool.transaction import operations
from ckpttool.transaction.files import Contents, Fingerprint
from ckpttool.transaction.journal import (
    DONE,
    JOURNAL,
    Chain,
    Move,
    Moves,
    Relink,
    Removal,
    Rewrite,
    moves_document,
    moves_of,
    operations_document,
)
from ckpttool.transaction.state_dir import StateDir
from ckpttool.transaction.stored_journals import read_journal
from tests.support.changes import journals_of
from tests.support.transactions import IDENTITY, stages_of


def is_possible(name: str) -> bool:
    """Tell whether a file can be named so."""
    try:
        return os.fsencode(name) not in (b".", b"..")
    except UnicodeEncodeError:  # bytes that are no UTF-8 are surrogates, but not all surrogates are bytes
        return False


NAMES = st.text(st.characters(exclude_characters="/\0"), min_size=1).filter(is_possible)
COUNTS = st.integers(0, 2**64)


@st.composite
def removals(draw: st.DrawFn) -> Removal:
    members = draw(st.lists(NAMES, min_size=1, max_size=3, unique=True))
    paths = [os.path.join(name, draw(NAMES)) if draw(st.booleans()) else name for name in members]
    files = tuple(Fingerprint(path, *(draw(COUNTS) for _ in range(4))) for path in paths)
    directories = tuple(draw(st.lists(st.sampled_from(members), unique=True)))
    survivors = tuple(draw(st.lists(NAMES, max_size=2)))
    return Removal(draw(st.text()), tuple(members), Contents(files, directories), survivors)


@given(
    st.lists(removals(), max_size=3, unique_by=lambda one: one.members),
    st.lists(st.builds(Rewrite, NAMES, st.none() | st.text(), st.none() | st.text()), max_size=2),
    st.sampled_from([None, [], [0]]),
)
def test_what_is_written_is_read_again(tmp_path_factory, told, rewrites, done) -> None:
    taken: set[str] = set()
    groups = [one for one in told if taken.isdisjoint(one.members) and not taken.update(one.members)]
    done = done if groups else None
    listed = operations.removal_operations(groups, rewrites)
    stage = tmp_path_factory.getbasetemp() / "stage"
    shutil.rmtree(stage, ignore_errors=True)
    stage.mkdir()
    (stage / JOURNAL).write_text(json.dumps(operations_document(listed)))
    if done is not None:
        (stage / DONE).write_text(json.dumps(done))
    expected = listed._replace(done=None if done is None else frozenset(done))
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
    with pytest.raises(DamagedCheckpoint, match="a journal that isn't one of ours"):
        read_journal(str(tmp_path), str(tmp_path))


GROUP = {"path": "a", "files": [], "directories": [], "survivors": []}
MOVE, OLD_NAMES = ["move", 0, "a", "0/a"], {"members": ["a"]}


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
    require_refused(tmp_path, {"schema": "ckpttool.operations/1", "groups": [group], "operations": [MOVE]})
    old = {"schema": "ckpttool.journal/1", "rewrites": [], "removals": [OLD_NAMES | group]}
    require_refused(tmp_path, old)


@pytest.mark.parametrize("name", ["../other", "..", "", "/etc/passwd", "a\0b", 3])
def test_names_that_lead_out_are_refused(tmp_path: Path, name: object) -> None:
    for operation in (["move", 0, name, "0/a"], ["move", 0, "a", name], ["move", 0, "a", f"0/{name}/a"]):
        document = {"schema": "ckpttool.operations/1", "groups": [GROUP], "operations": [operation]}
        require_refused(tmp_path, document)
    old = {"schema": "ckpttool.journal/1", "rewrites": [], "removals": [GROUP | {"members": [name]}]}
    require_refused(tmp_path, old)


@pytest.mark.parametrize(
    "operations",
    [
        [],
        [["move", 1, "a", "0/a"]],
        [["move", -1, "a", "0/a"]],
        [MOVE, MOVE],
        [MOVE, ["move", 0, "b", "0/a"]],
        [MOVE, ["move", 0, "b", "1/b"]],
        [["move", 0, "a", "0/b"]],
        [MOVE, ["unlink", 0, "a", "0/a"]],
        [MOVE, ["write", "../a", "b", "c"]],
        [MOVE, ["write", "a", 3, "c"]],
        [MOVE, ["write", "a", "c"]],
        [MOVE, None],
    ],
)
def test_no_other_operations_are_believed(tmp_path: Path, operations: object) -> None:
    document = {"schema": "ckpttool.operations/1", "groups": [GROUP], "operations": operations}
    require_refused(tmp_path, document)


@pytest.mark.parametrize("done", [{}, 1, [1], [-1], ["0"], [True], None])
def test_no_other_groups_are_believed(tmp_path: Path, done: object) -> None:
    (tmp_path / DONE).write_text(json.dumps(done))
    if done is None:
        (tmp_path / DONE).write_text("[")
    require_refused(tmp_path, {"schema": "ckpttool.operations/1", "groups": [GROUP], "operations": [MOVE]})


def test_only_our_own_directories_are_stages(tmp_path: Path) -> None:
    for name in (".ckpttool-0123abcd", ".ckpttool-trash", ".ckpttool-012", ".ckpttool-0123abcX"):
        (tmp_path / name).mkdir()
    (tmp_path / ".ckpttool-76543210").write_text("a file")
    assert stages_of(tmp_path) == [tmp_path / ".ckpttool-0123abcd"]
    assert journals_of(tmp_path) == []


# Moves --------------------------------------------------------------------------------------------


def trashed(directory: str, name: str = "a.pt", inner: str = "a.pt/x") -> Moves:
    held = Contents((Fingerprint(inner, 1, 2, 3, 4),), (name,))
    return Moves(
        kind="trash",
        identity=IDENTITY,
        moves=(Move("run/a.pt", ((name, f"0/{name}"),), held),),
        rewrites=(Rewrite("checkpoint", "\udce9\n", None),),
        relinks=(Relink("best", "a", "b"),),
        source=directory,
        target=os.path.join(directory, ".ckpttool-trash", IDENTITY),
    )


def test_moves_that_are_written_are_read_again(tmp_path: Path) -> None:
    stage = tmp_path / ".ckpttool-0123abcd"
    stage.mkdir()
    moves = trashed(str(tmp_path))
    (stage / JOURNAL).write_text(json.dumps(moves_document(moves, str(tmp_path))))
    assert read_journal(str(stage), str(tmp_path)) == moves


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
def test_no_other_moves_are_believed(tmp_path: Path, where: tuple[str | int, ...], value: object) -> None:
    told = json.loads(json.dumps(moves_document(trashed(str(tmp_path)), str(tmp_path))))
    assert moves_of(told, str(tmp_path), StateDir(str(tmp_path)))
    *above, last = where
    inner = told
    for key in above:
        inner = inner[key]
    inner[last] = value
    with pytest.raises((KeyError, TypeError, ValueError)):
        moves_of(told, str(tmp_path), StateDir(str(tmp_path)))


def chained(directory: str) -> Moves:
    known: dict[str, Any] = {"kind": "rename", "identity": IDENTITY, "source": directory, "target": directory}
    one = Moves(moves=(), **known)
    return Moves(moves=(), chain=Chain((one, one), has_more=True), **known)


def test_moves_of_a_chain_that_are_written_are_read_again(tmp_path: Path) -> None:
    place = str(tmp_path)
    told = json.loads(json.dumps(moves_document(chained(place), place)))
    assert moves_of(told, place, StateDir(place)) == chained(place)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("before", None),
        ("before", [{}]),
        ("has_more", 1),
        ("has_more", None),
        ("identity", IDENTITY.replace("a", "b")),
    ],
)
def test_no_other_chain_is_believed(tmp_path: Path, key: str, value: object) -> None:
    place = str(tmp_path)
    told = json.loads(json.dumps(moves_document(chained(place), place)))
    told[key] = value
    with pytest.raises((KeyError, TypeError, ValueError)):
        moves_of(told, place, StateDir(place))
    nested = json.loads(json.dumps(moves_document(chained(place), place)))
    nested["before"] = [moves_document(chained(place), place)]
    with pytest.raises(ValueError, match="another journal"):
        moves_of(nested, place, StateDir(place))
