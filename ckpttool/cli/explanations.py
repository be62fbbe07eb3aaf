"""Meaning and remedy of each finding, from docs/reference/findings.md, which is installed next to this."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

PAGE = "findings.md"
_IN_REPOSITORY = Path("docs", "reference", PAGE)
_ROW = re.compile(r"^\| (?P<codes><a id=.*?) \| (?P<meaning>.*) \| (?P<remedy>.*) \|$")
_CODE = re.compile(r"`([a-z0-9-]+)`")
_LINK = re.compile(r"\[([^\]]+)\]\([^)]+\)")


class Explanation(NamedTuple):
    """Meaning and remedy of a code, in Markdown.

    Attributes:
        section: The heading of its group, such as ``Values``.
    """

    code: str
    section: str
    meaning: str
    remedy: str


@cache
def explanations() -> dict[str, Explanation]:
    """Return all explanations by their codes, in the order of the page."""
    # The page is the only source, so that documentation, ``explain`` and reports say the same. A build copies
    # it next to this module; in the repository, where the package runs from its sources, it is in docs/.
    here = Path(__file__)
    installed = here.with_name(PAGE)
    page = installed if installed.is_file() else here.parents[2] / _IN_REPOSITORY
    found: dict[str, Explanation] = {}
    section = ""
    for line in page.read_text("utf-8").splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ")
        elif match := _ROW.match(line):
            meaning, remedy = (_LINK.sub(r"\1", match[name]) for name in ("meaning", "remedy"))
            for code in _CODE.findall(match["codes"]):
                found[code] = Explanation(code, section, meaning, remedy)
    return found


def remedy_of(code: str) -> str | None:
    """Return the remedy of a finding without Markdown; None if no row has its code."""
    row = explanations().get(code)
    return None if row is None else plain(row.remedy)


def as_sentence(phrase: str) -> str:
    """Return a phrase with a capital and a full stop."""
    return f"{phrase[:1].upper()}{phrase[1:]}{'' if phrase.endswith(('.', '?')) else '.'}"


def plain(markdown: str) -> str:
    """Return a sentence without Markdown."""
    return markdown.replace("`", "").replace("\\|", "|").replace("**", "").replace("*", "")
