"""The journal: what is written is read again, and nothing else is believed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool import DamagedCheckpoint
from ckpttool.transaction.files import Contents, Fingerprint
from ckpttool.transaction.journal import Journal, PointerText, Removal, journal_bytes, read_journal, stages
from ckpttool.transaction.pending_journals import pending_journals


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
    journal = Journal(tuple(told), tuple(rewrites))
    path = tmp_path_factory.getbasetemp() / "journal.json"
    path.write_bytes(journal_bytes(journal))
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
    assert stages(str(tmp_path)) == [".ckpttool-0123abcd"]
    assert pending_journals(str(tmp_path)) == []
