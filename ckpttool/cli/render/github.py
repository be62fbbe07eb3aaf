"""Output of ``verify`` for GitHub Actions: annotations, and the summary of a job.

Source: docs.github.com, "Workflow commands for GitHub Actions"; escaping as actions/toolkit does it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING

from ckpttool.cli.render.verdicts import (
    VERDICTS,
    count_verdicts,
    is_open,
    is_undone,
    message_with_place,
    path_from_root,
    rank_findings,
    verdict_word,
)
from ckpttool.core.report import Sentence, Severity
from ckpttool.core.text import counted, printable_cut
from ckpttool.ops.verdict import Check, Status, Verification

if TYPE_CHECKING:
    from ckpttool.core.errors import CheckpointError

# Annotations ----------------------------------------------------------------------------------------


MAX_SHOWN = 10
"""Annotations of one severity that GitHub shows for a step."""
_COMMANDS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.NOTE: "notice"}
# A workflow command ends with its line, and a property at a comma or colon: ``::error file=a,title=b::text``.
_DATA = str.maketrans({"%": "%25", "\r": "%0D", "\n": "%0A"})
_PROPERTY = {**_DATA, **str.maketrans({":": "%3A", ",": "%2C"})}


def workflow_commands(
    verifications: Sequence[Verification],
    failures: Sequence[CheckpointError] = (),
    *,
    root: str | None = None,
    strict: bool = False,
) -> str:
    """Return workflow commands, one per line: errors first, and last the counts, an error if the run failed.

    Args:
        verifications: Of their findings, as many become annotations as GitHub shows.
        failures: Errors that prevented a verdict.
        root: The root of the sources, which GitHub's paths start from.
        strict: Whether warnings fail.
    """
    has_failed = bool(failures) or not all(one.passes(strict=strict) for one in verifications)
    last = Severity.ERROR if has_failed else Severity.NOTE
    unread = ((Severity.ERROR, one.path, one.code, printable_cut(one.reason)) for one in failures)
    ranked = (
        (finding.severity, one.path, finding.code, message_with_place(finding))
        for one, finding in rank_findings(verifications)
    )
    shown: dict[Severity, list[str]] = {severity: [] for severity in _COMMANDS}
    more = 0
    for severity, path, title, message in chain(unread, ranked):
        # The counts at the end are an annotation, too, and must be among those that GitHub shows.
        room = MAX_SHOWN - (severity is last)
        if len(shown[severity]) < room:
            shown[severity].append(_command(severity, path, title, message, root))
        else:
            more += 1
    counts = [count_verdicts(verifications)]
    if failures:
        counts.append(f"{len(failures):,} not read")
    if more:
        counts.append(f"{counted(more, 'more finding')} in the log")
    lines = chain.from_iterable(shown.values())
    return "\n".join([*lines, f"::{_COMMANDS[last]} title=ckpttool verify::{'; '.join(counts)}"])


def _command(severity: Severity, path: str, title: str, message: str, root: str | None) -> str:
    file = printable_cut(path_from_root(path, root) or path).translate(_PROPERTY)
    text = f"{printable_cut(path)}: {message}".translate(_DATA)
    return f"::{_COMMANDS[severity]} file={file},title={title.translate(_PROPERTY)}::{text}"


# A job's summary, in Markdown -----------------------------------------------------------------------


MAX_BYTES = 1_000_000
"""Limit on a summary: GitHub refuses one of more than 1 MiB as a whole."""
MAX_FINDINGS = 20
_LONGEST = 300
_MARKS = {Status.PASSED: "✓", Status.PARTIAL: "partial", Status.FAILED: "✗", Status.SKIPPED: "–"}
# All but characters without a meaning in Markdown, HTML or GitHub's links; an underscore has none inside a
# word. A name in a checkpoint could otherwise add links, images or mentions to the page of a job.
_UNFIT = re.compile(r"[^\w \-./,=+()…]|(?<![^\W_])_|_(?![^\W_])|(?<=www)\.", re.IGNORECASE)


def summary(verifications: Sequence[Verification], failures: Sequence[CheckpointError] = ()) -> str:
    """Return the summary, the worst checkpoints first; rows beyond GitHub's limit are counted.

    Args:
        verifications: Each becomes a row of the table.
        failures: Errors that prevented a verdict.
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
    """The remaining bytes of a summary; each part takes at most half of them."""

    # So a long list of unreadable paths leaves room for the table, and the table for the failed checkpoints.
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
        lines.append(f"- … and {counted(len(findings) - MAX_FINDINGS, 'more finding')}")
    title = f"<summary>{_code(verification.path)}: {verdict_word(verification)}</summary>"
    return "\n".join(["<details open>", title, "", *lines, "", "</details>"])


def _code(name: str) -> str:
    return f"<code>{_text(name)}</code>"


def _text(text: str | Sentence) -> str:
    """Return a text with character references for all that has a meaning in Markdown or HTML."""
    return _UNFIT.sub(lambda found: f"&#{ord(found[0])};", printable_cut(text, _LONGEST))
