"""Tables that are written: read again, and byte for byte what their description says."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.containers import table as sstable_writer
from ckpttool.containers.table import FOOTER_BYTES, MAGIC, Table, TableWriter
from ckpttool.storage.source import Source
from ckpttool.transaction.staged_output import StagedOutput
from tests.support.containers import entries_of_table, stage


def write(path: Path, entries: dict[bytes, bytes]) -> Path:
    def fill(staged: StagedOutput) -> None:
        table = TableWriter(staged.create())
        for key, value in entries.items():
            table.add(key, value)
        table.finish()

    return stage(path, fill)


def test_one_entry_byte_by_byte(raw: ModuleType, tmp_path: Path) -> None:
    """The index has the last key itself, where the table made by hand has one behind it."""
    written = write(tmp_path / "t", {b"key": b"value"}).read_bytes()
    block = raw.block(raw.entry(b"key", b"value"))
    meta = raw.block(b"")
    index = raw.block(raw.entry(b"key", raw.varint(0) + raw.varint(len(block))))
    places = [len(block) + 5, len(meta), len(block) + 5 + len(meta) + 5, len(index)]
    footer = b"".join(map(raw.varint, places)).ljust(FOOTER_BYTES - len(MAGIC), b"\0") + MAGIC
    assert written == b"".join(part + raw.trailer(part) for part in (block, meta, index)) + footer


def test_keys_tell_what_is_new(tmp_path: Path) -> None:
    entries = {f"a/long/common/prefix/{at:03}".encode(): b"" for at in range(40)}
    path = write(tmp_path / "t", entries)
    assert entries_of_table(path) == entries
    assert (
        path.read_bytes().count(b"a/long/common/prefix/") == 3 + 1
    )  # at each restart point, and in the index


def test_several_blocks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sstable_writer, "BLOCK_BYTES", 200)
    entries = {f"{at:05}".encode(): bytes(at % 50) for at in range(300)}
    path = write(tmp_path / "t", entries)
    with Source(path) as source:
        assert len(Table(source).blocks) > 20
    assert entries_of_table(path) == entries


def test_no_entries(tmp_path: Path) -> None:
    assert entries_of_table(write(tmp_path / "t", {})) == {}


@pytest.mark.parametrize("keys", [(b"b", b"a"), (b"a", b"a"), (b"", b"")])
def test_keys_out_of_order_are_refused(tmp_path: Path, keys: tuple[bytes, bytes]) -> None:
    with StagedOutput(tmp_path / "t") as staged:
        table = TableWriter(staged.create())
        table.add(keys[0], b"")
        with pytest.raises(ValueError, match="does not follow"):
            table.add(keys[1], b"")


@given(
    st.dictionaries(st.binary(max_size=12), st.binary(max_size=40), max_size=80),
    st.sampled_from([1, 64, 4096]),
)
def test_anything_comes_back(
    tmp_path_factory: pytest.TempPathFactory, entries: dict[bytes, bytes], block: int
) -> None:
    ordered = dict(sorted(entries.items()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sstable_writer, "BLOCK_BYTES", block)
        path = write(tmp_path_factory.mktemp("any") / "t", ordered)
    assert entries_of_table(path) == ordered
