"""The summary of a job: whole ones, and what a Markdown parser makes of hostile names."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from html import unescape

from markdown_it import MarkdownIt

from ckpttool import AccessDenied, Safety, Status, Verification
from ckpttool.core.report import error
from tests.support.golden import Golden
from tests.support.rendering import escaped, report_of

Verified = Callable[..., Verification]
summary = partial(report_of, "summary")
GITHUB_TAKES = 1 << 20
TAGS = {"h3", "ul", "li", "table", "thead", "tbody", "tr", "th", "td", "code", "details", "summary"}


def test_whole_ones(golden: Golden, verified: Verified, several: list[Verification]) -> None:
    many = [error("nan", "1 NaN", f"k{at}")._replace(check="values") for at in range(27)]
    well = [verified("run/m.pth"), verified("run/n_1.pth", predict=Status.SKIPPED)]
    golden(
        {
            "no checkpoint": summary(),
            "all is well": summary(well),
            "one of each": summary(several, [AccessDenied("run/locked.pth", "permission denied")]),
            "unknown safety": summary([verified("m.pth", safety_verdict=Safety.UNKNOWN)]),
            "many findings": summary([verified("m.pth", *many, values=Status.FAILED)]),
        }
    )


def test_hostile_names_are_nothing_but_text(verified: Verified, hostile_names: list[str]) -> None:
    for hostile in hostile_names:
        _check_hostile(verified, hostile)


def _check_hostile(verified: Verified, hostile: str) -> None:
    found = error("nan", hostile, hostile)._replace(check="values")
    text = summary([verified(hostile, found, values=Status.FAILED)], [AccessDenied(hostile, hostile)])
    text.encode("utf-8")
    assert all(line.isprintable() for line in text.split("\n"))
    page = MarkdownIt("commonmark").enable("table").render(text)
    shown = re.findall(r"<code>(.*?)</code>", page)
    assert [unescape(one) for one in shown] == [
        escaped(hostile),  # the one not read
        escaped(hostile),  # its row
        escaped(hostile),  # the title of its details
        "nan",
        escaped(hostile),  # the place
    ]
    assert set(re.findall(r"<(\w+)", page)) <= TAGS
    assert page.count("<td") == 5
    assert not re.search(r"www\.|://|@\w", text)


def test_endless_names_are_cut(verified: Verified, endless: str) -> None:
    found = error("nan", endless, endless)._replace(check="values")
    text = summary([verified(endless, found, values=Status.FAILED)], [AccessDenied(endless, endless)])
    assert len(text) < 50_000


def test_what_github_would_refuse_is_cut_and_counted(verified: Verified) -> None:
    found = [error("nan", "1 NaN " * 40, f"key.{at}")._replace(check="values") for at in range(20)]
    many = [verified(f"run/ckpt-{at:05}.pth", *found, values=Status.FAILED) for at in range(10_000)]
    unread = [AccessDenied(f"gone/ckpt-{at:05}.pth", "permission denied") for at in range(10_000)]
    text = summary(many, unread)
    assert len(text.encode()) < GITHUB_TAKES
    left = {
        noun: int(count.replace(",", "")) for count, noun in re.findall(r"… and ([\d,]+) more (.*)", text)
    }
    assert left == {
        "not read": 10_000 - text.count("- <code>gone"),
        "checkpoints": 10_000 - text.count("| <code>run"),
        "checkpoints that failed": 10_000 - text.count("<details"),
    }
