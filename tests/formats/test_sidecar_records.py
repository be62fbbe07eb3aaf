"""The entry as a record of a zip, or as a file: it is read, or it is said why it was not."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from ckpttool import ConvertOptions, Severity, convert, open_checkpoint
from tests.support.limits import lower_limits
from tests.support.numpy_files import header, npy

ENTRY, SCHEMA = "ckpttool.content", "ckpttool.content/1"
DOCUMENT = f'{{"schema": "{SCHEMA}", "shared": [], "content": {{"metadata": {{"epoch": 3}}}}}}'


def archive(path: Path, method: int = zipfile.ZIP_STORED, document: str = DOCUMENT) -> Path:
    with zipfile.ZipFile(path, "w") as written:
        written.writestr("a.npy", npy(header("'|u1'", "(2,)"), b"ab"))
        written.writestr(ENTRY, document, method)
    return path


def require_warned(path: Path, why: str) -> None:
    with open_checkpoint(path) as opened:
        assert opened["a"].tobytes() == b"ab"
        assert (dict(opened.metadata), opened.complete) == ({}, True)
        found = [(one.code, one.severity, one.where) for one in opened.findings]
        assert found == [("content-entry", Severity.WARNING, ENTRY)]
        assert why in opened.findings[0].message


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_record_is_read_however_it_is_stored(tmp_path: Path, method: int) -> None:
    with open_checkpoint(archive(tmp_path / "a.npz", method)) as opened:
        assert (dict(opened.metadata), opened.findings) == ({"epoch": 3}, ())


def test_a_record_that_does_not_inflate_is_told(tmp_path: Path) -> None:
    path = archive(tmp_path / "a.npz", zipfile.ZIP_DEFLATED)
    data = bytearray(path.read_bytes())
    at = data.index(ENTRY.encode()) + len(ENTRY)
    data[at : at + 8] = b"\xff" * 8
    path.write_bytes(data)
    require_warned(path, "it was not used: ")


def test_a_record_with_another_checksum_is_told(tmp_path: Path) -> None:
    path = archive(tmp_path / "a.npz")
    path.write_bytes(path.read_bytes().replace(b'"epoch": 3', b'"epoch": 4'))
    require_warned(path, "it was not used: its checksum does not match")


def test_a_record_of_something_else_is_told(tmp_path: Path) -> None:
    require_warned(archive(tmp_path / "a.npz", document="[]"), SCHEMA)


def test_a_long_record_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lower_limits(monkeypatch, document=20)
    path = archive(tmp_path / "a.npz")
    require_warned(path, f"it was not used: {len(DOCUMENT)} bytes; at most 20 are read")


def test_a_long_file_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    convert(archive(tmp_path / "a.npz"), tmp_path / "a", ConvertOptions(to="torch-dcp"))
    with open_checkpoint(tmp_path / "a") as opened:
        assert dict(opened.metadata) == {"epoch": 3}
    lower_limits(monkeypatch, document=20)
    with open_checkpoint(tmp_path / "a") as opened:
        (finding,) = opened.findings
    assert finding.code == "content-entry"
    assert "bytes; at most 20 are read" in finding.message
