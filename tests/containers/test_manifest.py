"""The text of manifests: what sha256sum writes is understood, and what is written sha256sum checks."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.containers.manifest import MAX_NAME, Line, dumps_manifest, parse_manifest
from tests.support.manifests import sha256sum_accepts, sums

ZERO = "0" * 64


@given(st.lists(st.text(st.characters(exclude_characters="/\0", codec="utf-8"), min_size=1, max_size=20)))
def test_written_names_are_read_back(names: list[str]) -> None:
    lines = tuple(Line(name, ZERO) for name in names if name not in (".", ".."))
    read = parse_manifest("m.sha256", dumps_manifest(lines))
    assert read.lines == lines


@given(st.binary(max_size=300))
def test_any_text_is_read_or_malformed(data: bytes) -> None:
    read = parse_manifest("m.sha256", data)
    assert read.lines or read.malformed


@pytest.mark.parametrize("name", ["plain", "back\\slash", "new\nline", "return\r", " space ", "*star", "\\n"])
def test_sha256sum_reads_what_is_written_and_the_other_way_round(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"content")
    digest = hashlib.sha256(b"content").hexdigest()
    (tmp_path / "list").write_bytes(dumps_manifest([Line(name, digest)]))
    assert sha256sum_accepts(tmp_path / "list")
    for options in ((), ("--binary",), ("--tag",)):
        read = parse_manifest("list", sums(tmp_path, "--", name, options=options))
        assert (read.lines, read.malformed) == ((Line(name, digest),), ())


@pytest.mark.parametrize(
    "text",
    [
        f"{ZERO}  ../m.pth",
        f"{ZERO}  /etc/passwd",
        f"{ZERO}  a/../m.pth",
        f"{ZERO}  a//b",
        f"{ZERO}  .",
        f"{ZERO}  {'x' * (MAX_NAME + 1)}",
        f"\\{ZERO}  bad\\escape",
        f"{ZERO[1:]}  short",
        f"{ZERO} one-space",
        f"MD5 (m.pth) = {ZERO[:32]}",
        "<html>",
        "",
    ],
)
def test_malformed_lines(text: str) -> None:
    (finding,) = parse_manifest("m.pth.sha256", text.encode()).malformed
    assert (finding.code, finding.where) == ("manifest-malformed", "m.pth.sha256:1")


def test_lines_that_say_nothing_are_passed_over() -> None:
    text = f"# comment\r\n\r\n{ZERO.replace('0', 'A')}  ./m.pth\r\n"
    read = parse_manifest("m.pth.sha256", text.encode())
    assert (read.lines, read.malformed) == ((Line("m.pth", "a" * 64),), ())


def test_a_lone_digest_speaks_of_the_file_beside_it() -> None:
    assert parse_manifest("run/m.sha256", ZERO.encode(), lone_digest_file="run/m").lines == (Line("m", ZERO),)
    assert parse_manifest("SHA256SUMS", ZERO.encode()).malformed
