"""Verdicts and findings in words: the text of ``verify``, and what all reports for CI share."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence

from ckpttool.cli.render.numbers import file_size
from ckpttool.cli.render.terminal import Style, printable, printable_cut, styled
from ckpttool.core.report import Finding, Severity, counted
from ckpttool.ops.verdict import PREDICTION, Check, Safety, Status, Verification

SEVERITIES = (Severity.ERROR, Severity.WARNING, Severity.NOTE)
"""The worst first: what CI shows is cut at the end."""
_MOST_FINDINGS = 40
"""More lines than that push out what matters; ``--json`` has all."""
_MOST_ALIKE = 4
"""So many findings of one code get a line each; more get one line that names so many places."""
_INFORMATIVE_CHECKS = ("checksum", "values", "manifest")
"""Checks whose detail stands in the line of the verdict when they pass."""
_MARKS = {
    "invalid": ("INVALID", Style.RED),
    "unsafe": ("UNSAFE", Style.RED),
    "not run": ("NOT RUN", Style.RED),
    "valid (safety unknown)": ("valid?", Style.YELLOW),
    "valid": ("valid", Style.GREEN),
}
"""How each verdict begins its line."""
VERDICTS = tuple(_MARKS)
"""The words of a verdict, the worst first."""
_COUNTED = {
    "valid": "valid",
    "invalid": "invalid",
    "not run": "not run",
    "unsafe": "unsafe",
    "valid (safety unknown)": "valid, safety unknown",
}
"""How a text counts verdicts, and in which order: what most are comes first."""
_SEVERITY_STYLES = {Severity.ERROR: Style.RED, Severity.WARNING: Style.YELLOW, Severity.NOTE: Style.CYAN}


def verify_text(verifications: list[Verification], *, verbose: bool = False, colour: bool = False) -> str:
    """Return a line a checkpoint, its findings below it, and a last line that counts."""
    lines: list[str] = []
    for verification in verifications:
        lines.append(_verdict_line(verification, colour))
        messages = {finding.message for finding in verification.findings}  # printed once, with their places
        lines += [
            f"    {check.name:<10} {check.status.value:<8} "
            f"{'' if check.detail in messages else printable(check.detail)}".rstrip()
            for check in verification.checks
            if verbose or not verification.is_fine or check.name in PREDICTION
        ]
        lines += [f"    {line}" for line in finding_lines(verification.findings, colour, _MOST_FINDINGS)]
    if len(verifications) > 1:
        lines.append(_verdict_counts(verifications))
    return "\n".join(lines)


def _verdict_line(verification: Verification, colour: bool) -> str:
    mark, style = _MARKS[verdict_word(verification)]
    kind = " ".join(filter(None, (verification.format, verification.variant))) or "unrecognised"
    done = ", ".join(
        f"{check.name} {check.detail}"
        for check in verification.checks
        if check.status is Status.PASSED and check.name in _INFORMATIVE_CHECKS
    )
    skipped = [check.name for check in verification.checks if check.status is Status.SKIPPED]
    not_checked = f"; not checked: {', '.join(skipped)}" if skipped else ""
    start = f"{styled(f'{mark:<8}', style, colour)} {printable(verification.path)}"
    details = f": {done}" if done else ""
    return f"{start}  {kind}, {file_size(verification.nbytes)}{details}{not_checked}"


def _verdict_counts(verifications: Sequence[Verification]) -> str:
    words = [verdict_word(verification) for verification in verifications]
    counts = (f"{words.count(word):,} {name}" for word, name in _COUNTED.items() if word in words)
    return f"{len(words):,} checkpoints: {', '.join(counts)}"


# Findings in lines ----------------------------------------------------------------------------------


def finding_lines(findings: Iterable[Finding], colour: bool, limit: int | None = None) -> list[str]:
    """Return a line for each finding, or for many of one code; at most ``limit``, and a count of the rest."""
    groups = list(_group_findings(findings))
    lines = [_finding_line(group, colour) for group in groups[:limit]]
    if left := sum(map(len, groups[len(lines) :])):
        lines.append(f"… and {left:,} more findings (--json has them all)")
    return lines


def _group_findings(findings: Iterable[Finding]) -> Iterator[Sequence[Finding]]:
    """Yield the findings of each line, in the order of their first ones."""
    groups: dict[tuple[Severity, str, str | None], list[Finding]] = {}
    everything = list(findings)
    for finding in everything:
        if finding.where:
            groups.setdefault((finding.severity, finding.code, finding.ignored), []).append(finding)
    for finding in everything:
        alike = groups.get((finding.severity, finding.code, finding.ignored), [])
        if not finding.where or len(alike) <= _MOST_ALIKE:
            yield [finding]
        elif alike[0] is finding:
            yield alike


def _finding_line(alike: Sequence[Finding], colour: bool) -> str:
    first = alike[0]
    ignored = "" if first.ignored is None else f" (ignored: {printable(first.ignored)})"
    style = _SEVERITY_STYLES[first.severity]
    start = f"{styled(first.severity.value, style, colour and not ignored)} {first.code}"
    if len(alike) == 1:
        place = f" [{printable(first.where)}]" if first.where else ""
        return f"{start}{place}: {printable(first.message)}{ignored}"
    places = ", ".join(printable(one.where or "") for one in alike[:_MOST_ALIKE])
    which = "" if all(one.message == first.message for one in alike) else "the first: "
    return f"{start} in {len(alike):,} places [{places}, …]: {which}{printable(first.message)}{ignored}"


# For CI ---------------------------------------------------------------------------------------------


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
