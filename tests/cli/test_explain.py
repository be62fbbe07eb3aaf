"""``ckpttool explain``: what the page of findings says of a code."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.commands import Run, transcript
from tests.support.golden import Golden

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "findings.md"


def test_a_code_is_explained(run: Run, golden: Golden) -> None:
    golden(transcript(run, (0, "explain nan"), (2, "explain unsafe-imports")))


def test_every_code_of_the_page_is_listed(run: Run) -> None:
    codes = re.findall(r'<a id="([a-z0-9-]+)">', PAGE.read_text("utf-8"))
    listed = re.findall(r"^  ([a-z0-9-]+): ", run("explain").out, re.MULTILINE)
    assert len(codes) > 100
    assert listed == codes


def test_no_markdown_is_left(run: Run) -> None:
    for code in ("unsafe-op", "manifest-mismatch", "weights-empty"):
        assert not re.search(r"[`|]|\]\(", run("explain", code).out)
