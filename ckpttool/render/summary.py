"""Markdown for a job's summary: a headline that counts, a table, and what was found in what failed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ckpttool.ops.verdict import Check, Status, Verification
from ckpttool.render.verdict_words import (
    VERDICTS,
    count_verdicts,
    is_open,
    is_undone,
    printable_cut,
    verdict_word,
)

if TYPE_CHECKING:
    from ckpttool.core.errors import CheckpointError

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
    budget = _ByteBudget(MAX_BYTES)
    unread = f"; {len(failures):,} not read" if failures else ""
    parts = [f"### ckpttool verify – {count_verdicts(verifications)}{unread}"]
    if failures:
        lines = (f"- {_code(one.path)}: {_text(one.reason)}" for one in failures)
        parts.append(budget.fit("not read", len(failures), lines))
    if ordered:
        names = list(dict.fromkeys(check.name for one in ordered for check in one.checks))
        header = f"| checkpoint | verdict | {' | '.join(names)} |\n| --- | --- |{' :-: |' * len(names)}\n"
        rows = (_row(names, one) for one in ordered)
        parts.append(header + budget.fit("checkpoints", len(ordered), rows))
    if bad := [one for one in ordered if _failed_checks(one)]:
        parts.append(budget.fit("checkpoints that failed", len(bad), map(_section, bad)))
    return "\n\n".join(parts) + "\n"


class _ByteBudget:
    """Bytes that are left; half of them at most go to one part, so that there are some for the next."""

    def __init__(self, nbytes: int) -> None:
        self._left = nbytes

    def fit(self, noun: str, count: int, texts: Iterable[str]) -> str:
        """Return as many of ``count`` texts as fit, and a line that counts the others."""
        end, kept = self._left - self._left // 2, []
        for text in texts:
            size = len(text.encode()) + 1
            if self._left - size < end:
                break
            self._left -= size
            kept.append(text)
        more = count - len(kept)
        return "\n".join(kept) + (f"\n\n… and {more:,} more {noun}" if more else "")


def _row(names: Sequence[str], verification: Verification) -> str:
    marks = {check.name: _mark(check, verification) for check in verification.checks}
    cells = [_code(verification.path), verdict_word(verification), *(marks.get(name, "") for name in names)]
    return f"| {' | '.join(cells)} |"


def _mark(check: Check, verification: Verification) -> str:
    is_bad = is_undone(check, verification.findings)
    return _MARKS[Status.FAILED if is_bad else check.status]


def _failed_checks(verification: Verification) -> list[Check]:
    return [check for check in verification.checks if _mark(check, verification) == _MARKS[Status.FAILED]]


def _section(verification: Verification) -> str:
    """Return a checkpoint's failed checks and open findings, folded below its name."""
    findings = [finding for finding in verification.findings if is_open(finding)]
    lines = [f"- ✗ {check.name}: {_text(check.detail)}" for check in _failed_checks(verification)]
    for finding in findings[:MAX_FINDINGS]:
        place = f" {_code(finding.where)}" if finding.where else ""
        lines.append(f"- {finding.severity.value} `{finding.code}`{place}: {_text(finding.message)}")
    if len(findings) > MAX_FINDINGS:
        lines.append(f"- … and {len(findings) - MAX_FINDINGS:,} more findings")
    title = f"<summary>{_code(verification.path)}: {verdict_word(verification)}</summary>"
    return "\n".join(["<details open>", title, "", *lines, "", "</details>"])


def _code(name: str) -> str:
    return f"<code>{_text(name)}</code>"


def _text(text: str) -> str:
    """Return a text in which Markdown and HTML find nothing to do."""
    return _UNFIT.sub(lambda found: f"&#{ord(found[0])};", printable_cut(text, _LONGEST))
