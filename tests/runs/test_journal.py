"""The journal: what is written is read again, and nothing else is believed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool import DamagedCheckpoint
from ckpttool.transaction.files import Contents, Fingerprint
from ckpttool.transaction.journal import (
    JOURNAL,
    Chain,
    Move,
    Moves,
    PointerText,
    Relink,
    Removal,
    Removals,
    Rewrite,
    moves_document,
    moves_of,
    read_journal,
    removals_document,
)
from ckpttool.transaction.state_dir import StateDir
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


@given(st.lists(removals(), max_size=3), st.lists(st.builds(PointerText, NAMES, st.text()), max_size=2))
def test_what_is_written_is_read_again(tmp_path_factory, told, rewrites) -> None:
    journal = Removals(tuple(told), tuple(rewrites))
    path = tmp_path_factory.getbasetemp() / "journal.json"
    path.write_text(json.dumps(removals_document(journal)))
    assert read_journal(str(path), str(path.parent)) == journal


BAD = {
    "not json": "{",
    "a list": "[]",
    "no keys": "{}",
    "another schema": '{"schema": "ckpttool.journal/2", "removals": [], "rewrites": []}',
    "deep": "[" * 100_000,
}


@pytest.mark.parametrize("text", BAD.values(), ids=BAD)
def test_what_can_not_be_understood(tmp_path: Path, text: str) -> None:
    path = tmp_path / "journal.json"
    path.write_text(text)
    with pytest.raises(DamagedCheckpoint, match="a journal that isn't one of ours"):
        read_journal(str(path), str(path.parent))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("members", ["../other"]),
        ("members", [".."]),
        ("members", [""]),
        ("members", ["/etc/passwd"]),
        ("members", ["a\0b"]),
        ("members", [3]),
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
    removal = {"path": "a", "members": ["a"], "files": [], "directories": [], "survivors": []}
    document = {"schema": "ckpttool.journal/1", "rewrites": [], "removals": [removal | {key: value}]}
    path = tmp_path / "journal.json"
    path.write_text(json.dumps(document))
    with pytest.raises(DamagedCheckpoint):
        read_journal(str(path), str(path.parent))


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
    assert read_journal(str(stage / JOURNAL), str(tmp_path)) == moves


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
