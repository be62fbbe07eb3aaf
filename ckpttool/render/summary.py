"""Markdown for a job's summary: a headline that counts, a table, and what was found in what failed."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from ckpttool.ops.verdict import Check, Status, Verification
from ckpttool.render.verdict_words import (
    VERDICTS,
    count_verdicts,
    is_open,
    is_undone,
    printable_cut,
    verdict_word,
)
from ckpttool.report import Finding

if TYPE_CHECKING:
    from ckpttool.errors import CheckpointError

_Item = TypeVar("_Item")
MAX_BYTES = 1_000_000
"""GitHub refuses a step's summary of more than 1 MiB as a whole."""
MAX_FINDINGS = 20
_LONGEST = 300
_MARKS = {Status.PASSED: "✓", Status.FAILED: "✗", Status.SKIPPED: "–"}
# What can't begin or end anything in Markdown, HTML or GitHub's links; an underscore only inside a word.
_UNFIT = re.compile(r"[^\w \-./,=+()…]|(?<![^\W_])_|_(?![^\W_])|(?<=www)\.", re.IGNORECASE)


def summary(verifications: Sequence[Verification], failures: Sequence[CheckpointError] = ()) -> str:
    """Return the summary, the worst checkpoints first; what GitHub would not take is counted instead.

    Args:
        verifications: Each becomes a row of the table.
        failures: What could not be looked at.
    """
    ordered = sorted(verifications, key=lambda one: VERDICTS.index(verdict_word(one)))
    budget = _Budget(MAX_BYTES)
    parts = [_headline(verifications, failures)]
    if failures:
        parts.append(budget.fit("not read", failures, _unread))
    if ordered:
        parts.append(_table(ordered, budget))
    if bad := [one for one in ordered if _failed(one)]:
        parts.append(budget.fit("checkpoints that failed", bad, _section))
    return "\n\n".join(parts) + "\n"


class _Budget:
    """Bytes that are left; half of them at most go to one part, so that there are some for the next."""

    def __init__(self, nbytes: int) -> None:
        self._left = nbytes

    def fit(self, noun: str, items: Sequence[_Item], drawn: Callable[[_Item], str]) -> str:
        """Return as many items, drawn, as fit, and a line that counts the others."""
        end, kept = self._left - self._left // 2, []
        for item in items:
            text = drawn(item)
            size = len(text.encode()) + 1
            if self._left - size < end:
                break
            self._left -= size
            kept.append(text)
        left = len(items) - len(kept)
        return "\n".join(kept) + (f"\n\n… and {left:,} more {noun}" if left else "")


def _headline(verifications: Sequence[Verification], failures: Sequence[CheckpointError]) -> str:
    unread = f"; {len(failures):,} not read" if failures else ""
    return f"### ckpttool verify – {count_verdicts(verifications)}{unread}"


def _table(ordered: Sequence[Verification], budget: _Budget) -> str:
    names = list(dict.fromkeys(check.name for one in ordered for check in one.checks))
    header = f"| checkpoint | verdict | {' | '.join(names)} |\n| --- | --- |{' :-: |' * len(names)}\n"
    return header + budget.fit("checkpoints", ordered, partial(_row, names))


def _row(names: Sequence[str], verification: Verification) -> str:
    marks = {check.name: _mark(check, verification) for check in verification.checks}
    cells = [_code(verification.path), verdict_word(verification), *(marks.get(name, "") for name in names)]
    return f"| {' | '.join(cells)} |"


def _mark(check: Check, verification: Verification) -> str:
    is_bad = is_undone(check, verification.findings)
    return _MARKS[Status.FAILED if is_bad else check.status]


def _failed(verification: Verification) -> list[Check]:
    return [check for check in verification.checks if _mark(check, verification) == _MARKS[Status.FAILED]]


def _section(verification: Verification) -> str:
    """Return a checkpoint's failed checks and open findings, folded below its name."""
    found = [finding for finding in verification.findings if is_open(finding)]
    lines = [f"- ✗ {check.name}: {_text(check.detail)}" for check in _failed(verification)]
    lines += [f"- {_told(finding)}" for finding in found[:MAX_FINDINGS]]
    if len(found) > MAX_FINDINGS:
        lines.append(f"- … and {len(found) - MAX_FINDINGS:,} more findings")
    title = f"<summary>{_code(verification.path)}: {verdict_word(verification)}</summary>"
    return "\n".join(["<details open>", title, "", *lines, "", "</details>"])


def _told(finding: Finding) -> str:
    place = f" {_code(finding.where)}" if finding.where else ""
    return f"{finding.severity.value} `{finding.code}`{place}: {_text(finding.message)}"


def _unread(failure: CheckpointError) -> str:
    return f"- {_code(failure.path)}: {_text(failure.reason)}"


def _code(name: str) -> str:
    return f"<code>{_text(name)}</code>"


def _text(text: str) -> str:
    """Return a text in which Markdown and HTML find nothing to do."""
    return _UNFIT.sub(lambda found: f"&#{ord(found[0])};", printable_cut(text, _LONGEST))
