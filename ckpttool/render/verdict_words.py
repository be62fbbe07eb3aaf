"""What all reports for CI share: a verdict in a word, a finding in a line, a path from the root."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from ckpttool.core.report import Finding, Severity, counted
from ckpttool.ops.verdict import Check, Safety, Status, Verification
from ckpttool.render.terminal import printable

LONGEST = 4096
"""Characters of one name or sentence: the longest path that Linux opens. A file may hold longer names."""
SEVERITIES = (Severity.ERROR, Severity.WARNING, Severity.NOTE)
"""The worst first: what CI shows is cut at the end."""
VERDICTS = ("invalid", "unsafe", "not run", "valid (safety unknown)", "valid")
"""The words of a verdict, the worst first."""


def printable_cut(text: str, longest: int = LONGEST) -> str:
    """Return a text out of a file, spelled out where it isn't printable and cut where it is endless."""
    spelled = printable(text[:longest])
    return spelled if max(len(spelled), len(text)) <= longest else f"{spelled[: longest - 1]}…"


def finding_sentence(finding: Finding) -> str:
    """Return a finding in one line: what, where, and why it is ignored if it is."""
    reason = f" (ignored: {printable_cut(finding.ignored)})" if finding.ignored is not None else ""
    head = f"{finding.severity.value} {finding.code}{_place_words(finding)}"
    return f"{head}: {printable_cut(finding.message)}{reason}"


def message_with_place(finding: Finding) -> str:
    """Return a message with its place behind it, for what shows code and severity in its own way."""
    return f"{printable_cut(finding.message)}{_place_words(finding)}"


def _place_words(finding: Finding) -> str:
    return f" [{printable_cut(finding.where)}]" if finding.where else ""


def verdict_word(verification: Verification) -> str:
    """Return the word for a checkpoint; one that could not be run as asked is not called valid."""
    if not verification.is_valid:
        return "not run" if verification.is_owed else "invalid"
    if verification.safety is Safety.UNSAFE:
        return "unsafe"
    return "valid" if verification.safety is Safety.SAFE else "valid (safety unknown)"


def findings_of(check: Check, findings: Sequence[Finding]) -> list[Finding]:
    """Return what a check found."""
    return [finding for finding in findings if finding.check == check.name]


def findings_without_check(verification: Verification) -> list[Finding]:
    """Return the findings that belong to none of the checks."""
    names = {check.name for check in verification.checks}
    return [finding for finding in verification.findings if finding.check not in names]


def is_undone(check: Check, findings: Sequence[Finding]) -> bool:
    """Tell whether a check was skipped although it was asked for: then an error says so."""
    return check.status is Status.SKIPPED and any(
        is_open(finding) and finding.severity is Severity.ERROR for finding in findings_of(check, findings)
    )


def is_open(finding: Finding) -> bool:
    """Tell whether nobody has accepted a finding."""
    return finding.ignored is None


def count_verdicts(verifications: Sequence[Verification]) -> str:
    """Return how many there are, and of which verdict: ``3 checkpoints: 1 invalid, 2 valid``."""
    words = [verdict_word(verification) for verification in verifications]
    counts = ", ".join(f"{words.count(word):,} {word}" for word in VERDICTS if word in words)
    return f"{counted(len(words), 'checkpoint')}{': ' if counts else ''}{counts}"


def rank_findings(verifications: Sequence[Verification]) -> Iterator[tuple[Verification, Finding]]:
    """Yield the open findings: errors first, and of one severity the first of each checkpoint first.

    Where only ten are shown, ten checkpoints are named, not ten tensors of one.
    """
    for severity in SEVERITIES:
        rounds: list[tuple[int, Verification, Finding]] = []
        for verification in verifications:
            own = (one for one in verification.findings if one.severity is severity and is_open(one))
            rounds += [(at, verification, finding) for at, finding in enumerate(own)]
        rounds.sort(key=lambda one: one[0])
        yield from ((verification, finding) for _, verification, finding in rounds)


def path_from_root(path: str, root: str | None) -> str | None:
    """Return a path from the root of the sources, with slashes; None for one that doesn't lie below it.

    Without a root, a relative path is taken as it is.
    """
    if root is None:
        inside = None if os.path.isabs(path) else os.path.normpath(path)
    else:
        inside = _path_below(os.path.abspath(path), os.path.abspath(root))
    return inside if inside is None or os.sep == "/" else inside.replace(os.sep, "/")


def _path_below(path: str, root: str) -> str | None:
    if path == root:
        return "."
    above = root if root.endswith(os.sep) else root + os.sep
    return path[len(above) :] if path.startswith(above) else None
