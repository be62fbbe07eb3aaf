"""Findings that a user accepts: they fail no check, and are reported with the reason.

Some can't be accepted: dangerous code; a requested check that was not done; and a checkpoint that could not
be opened or loaded, since its other checks were never done.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import MISSING, dataclass, replace
from fnmatch import fnmatchcase

from ckpttool.core.errors import UsageError
from ckpttool.core.options import Reach, option
from ckpttool.core.report import Finding, Severity
from ckpttool.core.text import counted
from ckpttool.ops.verdict import (
    INCONCLUSIVE,
    VALUES_NOT_READ,
    Check,
    Status,
    Verification,
    failing_severities,
)


def _not_blank(text: str) -> str:
    if not text.strip():
        raise UsageError("it is blank")
    return text


@dataclass(frozen=True, slots=True)
class Ignore:
    """Expected finding.

    Attributes:
        code: Code of the finding.
        reason: Why it doesn't matter; shown with the finding.
        where: Glob of the finding's place; None for any place.
        origin: File and key of this entry, for messages.
    """

    code: str = option(
        "code",
        help="The finding's code.",
        parse=_not_blank,
        expected="a finding's code, see findings.md",
        reach=Reach.HARMLESS,
        default=MISSING,
    )
    reason: str = option(
        "reason",
        help="Why it doesn't matter.",
        parse=_not_blank,
        expected="the reason to ignore it",
        reach=Reach.HARMLESS,
        default=MISSING,
    )
    where: str | None = option(
        "where", help="A glob of the place that the finding names.", reach=Reach.HARMLESS
    )
    origin: str = ""

    def matches(self, finding: Finding) -> bool:
        """Return whether a finding has the code and a matching place."""
        if finding.code != self.code:
            return False
        return self.where is None or (finding.where is not None and fnmatchcase(finding.where, self.where))


def apply_ignores(
    verification: Verification, ignores: Sequence[Ignore], *, strict: bool = False
) -> Verification:
    """Return a verdict in which matching findings have a reason, and don't fail their checks.

    The verdict on safety is unchanged: an accepted unknown class is still unknown.

    Args:
        verification: The verdict.
        ignores: Expected findings; the first that matches a finding gives the reason.
        strict: Whether warnings failed their check.
    """
    findings = []
    for finding in verification.findings:
        ignore = next((ignore for ignore in ignores if ignore.matches(finding)), None)
        if ignore is not None and _refusal(finding, verification) is None:
            finding = finding._replace(ignored=ignore.reason)
        findings.append(finding)
    if tuple(findings) == verification.findings:
        return verification
    failing = failing_severities(strict=strict)
    checks = tuple(
        _reassess(check, [finding for finding in findings if finding.check == check.name], failing)
        for check in verification.checks
    )
    return replace(verification, checks=checks, findings=tuple(findings))


def refusals(verification: Verification, ignores: Iterable[Ignore]) -> tuple[str, ...]:
    """Return a sentence for each matching finding that may not be ignored."""
    return tuple(
        f"{ignore.origin}: {finding.code} in {verification.path} can't be ignored: {reason}"
        for ignore in ignores
        for finding in verification.findings
        if ignore.matches(finding) and (reason := _refusal(finding, verification)) is not None
    )


def is_used(ignore: Ignore, verification: Verification) -> bool:
    """Return whether any finding matches, accepted or not."""
    return any(ignore.matches(finding) for finding in verification.findings)


def _refusal(finding: Finding, verification: Verification) -> str | None:
    """Return why a finding may not be ignored, or None."""
    if finding.check == "safety" and finding.severity is Severity.ERROR:
        return "loading the file would run code that is known to be dangerous"
    if finding.code in INCONCLUSIVE:
        return "a requested check was not done"
    if finding.check == "load" and finding.severity is Severity.ERROR:
        return "the model could not be loaded, so it was not run"
    if not verification.was_opened:
        return "the checkpoint could not be opened, so nothing else in it was checked"
    return None


def _reassess(check: Check, own: Sequence[Finding], failing: Sequence[Severity]) -> Check:
    """Return a failed check with its status without ignored findings."""
    # If all failing findings are ignored, the check becomes what it would be without them, but never passes
    # for a part that could not be searched or read.
    ignored = sum(finding.ignored is not None and finding.severity in failing for finding in own)
    if check.status is not Status.FAILED or not ignored:
        return check
    failures = sum(finding.ignored is None and finding.severity in failing for finding in own)
    if check.unfailed is None:
        detail = f"{check.detail}, {ignored:,} ignored"
        unfailed = Check(check.name, Status.PASSED, f"{counted(ignored, 'finding')} ignored")
    else:
        unfailed = replace(check.unfailed, detail=f"{check.unfailed.detail}, {ignored:,} ignored")
        detail = f"{counted(failures, 'finding')} in {unfailed.detail}"
    if failures:
        return replace(check, detail=detail)
    if check.name == "safety" and (parts := sum(finding.code == "not-scanned" for finding in own)):
        return Check(check.name, Status.SKIPPED, f"{counted(parts, 'part')} could not be searched")
    if any(finding.code == VALUES_NOT_READ for finding in own):
        return replace(unfailed, status=Status.SKIPPED)
    return unfailed
