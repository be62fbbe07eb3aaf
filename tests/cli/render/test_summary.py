"""The summary of a job: whole ones, and what a Markdown parser makes of hostile names."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from html import unescape

from markdown_it import MarkdownIt

from ckpttool import AccessDenied, Safety, Status, Verification
from ckpttool.core.report import error
from tests.support.rendering import escaped, report_of

Verified = Callable[..., Verification]
summary = partial(report_of, "summary")
GITHUB_TAKES = 1 << 20
TAGS = {"h3", "ul", "li", "table", "thead", "tbody", "tr", "th", "td", "code", "details", "summary"}


def test_no_checkpoint() -> None:
    assert summary() == "### ckpttool verify – 0 checkpoints\n"


def test_all_is_well(verified: Verified) -> None:
    assert summary([verified("run/m.pth"), verified("run/n_1.pth", predict=Status.SKIPPED)]) == (
        """\
### ckpttool verify – 2 checkpoints: 2 valid

| checkpoint | verdict | structure | values | safety | predict |
| --- | --- | :-: | :-: | :-: | :-: |
| <code>run/m.pth</code> | valid | ✓ | ✓ | ✓ |  |
| <code>run/n_1.pth</code> | valid | ✓ | ✓ | ✓ | – |
"""
    )


def test_one_of_each_verdict(several: list[Verification]) -> None:
    assert summary(several, [AccessDenied("run/locked.pth", "permission denied")]) == (
        """\
### ckpttool verify – 5 checkpoints: 2 valid, 1 invalid, 1 unsafe, 1 not run; 1 not read

- <code>run/locked.pth</code>: permission denied

| checkpoint | verdict | structure | values | safety | load | predict |
| --- | --- | :-: | :-: | :-: | :-: | :-: |
| <code>run/nan.pth</code> | invalid | ✓ | ✗ | ✓ |  |  |
| <code>run/evil.pth</code> | unsafe | ✓ | ✓ | ✗ |  |  |
| <code>run/idle.pth</code> | not run | ✓ | ✓ | ✓ | – | ✗ |
| <code>run/good.pth</code> | valid | ✓ | ✓ | ✓ |  |  |
| <code>run/known.pth</code> | valid | ✓ | ✓ | ✓ |  |  |

<details open>
<summary><code>run/nan.pth</code>: invalid</summary>

- ✗ values: 8 tensors
- error `nan` <code>fc.weight</code>: 3 NaN in 20 values
- warning `infinity` <code>fc.bias</code>: 1 Inf in 2 values

</details>
<details open>
<summary><code>run/evil.pth</code>: unsafe</summary>

- ✗ safety: loading it runs nothing
- error `unsafe-import` <code>data.pkl</code>: it names os.system

</details>
<details open>
<summary><code>run/idle.pth</code>: not run</summary>

- ✗ predict: not asked for
- error `not-predicted`: no --model was given

</details>
"""
    )


def test_unknown_safety_is_not_plainly_valid(verified: Verified) -> None:
    headline, *_ = summary([verified("m.pth", safety_verdict=Safety.UNKNOWN)]).split("\n")
    assert headline == "### ckpttool verify – 1 checkpoint: 1 valid (1 of unknown safety)"


def test_many_findings_are_cut_and_counted(verified: Verified) -> None:
    found = [error("nan", "1 NaN", f"k{at}")._replace(check="values") for at in range(27)]
    lines = summary([verified("m.pth", *found, values=Status.FAILED)]).split("\n")
    assert lines[-5:] == [
        "- error `nan` <code>k19</code>: 1 NaN",
        "- … and 7 more findings",
        "",
        "</details>",
        "",
    ]


def test_hostile_names_are_nothing_but_text(verified: Verified, hostile: str) -> None:
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
