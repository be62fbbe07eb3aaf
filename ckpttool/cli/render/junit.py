"""JUnit's XML, which every CI shows: a checkpoint is a suite, a check is a case.

Source: the schema of Jenkins' xunit plugin (junit-10.xsd), which pytest's files also follow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from ckpttool.cli.render.verdicts import (
    SEVERITIES,
    finding_sentence,
    findings_of,
    findings_without_check,
    is_open,
    is_undone,
)
from ckpttool.core.report import Finding, Severity
from ckpttool.core.text import counted, printable_cut
from ckpttool.ops.verdict import Check, Status, Verification

if TYPE_CHECKING:
    from xml.etree.ElementTree import Element

    from ckpttool.core.errors import CheckpointError

MAX_FINDINGS = 100
"""Limit on the findings in a case; a model of another kind has thousands."""
_COUNTS = ("tests", "failures", "errors")
"""Totals of all suites; the schema has no total of skipped cases."""
_NO_TIMES: Mapping[str, float] = MappingProxyType({})


def junit(
    verifications: Sequence[Verification],
    failures: Sequence[CheckpointError] = (),
    *,
    seconds: Mapping[str, float] = _NO_TIMES,
) -> str:
    """Return the report as XML.

    Args:
        verifications: Each becomes a suite.
        failures: Errors that prevented a verdict; each becomes a suite with an error.
        seconds: How long each checkpoint took, by path.
    """
    from xml.etree.ElementTree import Element, indent, tostring

    # Only suites have times: the checks of a checkpoint share its passes over the file, so that a case has
    # none of its own, and the schema demands the attribute. ``printable_cut`` escapes control characters,
    # which XML 1.0 can't represent at all.
    suites = [_suite(one.path, _cases(one), seconds.get(one.path, 0.0)) for one in verifications]
    for failure in failures:
        text = f"error {failure.code}: {printable_cut(str(failure))}"
        case = _case(failure.path, "open", "error", printable_cut(failure.reason), text)
        suites.append(_suite(failure.path, [case], 0.0))
    counts = {name: str(sum(int(suite.get(name, 0)) for suite in suites)) for name in _COUNTS}
    total = sum(seconds.get(one.path, 0.0) for one in verifications)
    root = Element("testsuites", {"name": "ckpttool verify", **counts, "time": f"{total:.3f}"})
    root.extend(suites)
    indent(root)
    return f'<?xml version="1.0" encoding="utf-8"?>\n{tostring(root, encoding="unicode")}\n'


def _suite(path: str, cases: Sequence[Element], seconds: float) -> Element:
    from xml.etree.ElementTree import Element

    counts = {
        total: str(sum(case.find(outcome) is not None for case in cases))
        for total, outcome in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped"))
    }
    times = {"time": f"{seconds:.3f}"}
    suite = Element("testsuite", {"name": printable_cut(path), "tests": str(len(cases)), **counts, **times})
    suite.extend(cases)
    return suite


def _case(path: str, name: str, outcome: str | None, message: str, text: str, aside: str = "") -> Element:
    """Return the element of a test case.

    Args:
        path: Path of the checkpoint.
        outcome: Name of the element with the reason: failure, error or skipped; None if the case passed.
        message: The reason in one line.
        text: Findings in the element of the outcome.
        aside: Findings in ``system-out``, which viewers show for passed cases, too.
    """
    from xml.etree.ElementTree import Element, SubElement

    case = Element("testcase", {"classname": printable_cut(path), "name": name, "time": "0.000"})
    if outcome is not None:
        SubElement(case, outcome, {"message": message}).text = text or None
    if aside:
        SubElement(case, "system-out").text = aside
    return case


def _cases(verification: Verification) -> list[Element]:
    """Return a case for each check, and one for findings without a check."""
    # JUnit distinguishes failures, of the thing under test, from errors, of the test: a check that was
    # requested and couldn't be run is an error, one that wasn't requested is skipped.
    cases, path = [], verification.path
    for check in verification.checks:
        findings = findings_of(check, verification.findings)
        if is_undone(check, verification.findings):
            message = f"not run: {printable_cut(check.detail)}"
            cases.append(_case(path, check.name, "error", message, _lines(findings)))
        else:
            cases.append(_case_of(path, check, findings))
    if others := findings_without_check(verification):
        is_failed = any(one.severity is Severity.ERROR and is_open(one) for one in others)
        status = Status.FAILED if is_failed else Status.PASSED
        cases.append(_case_of(path, Check("other", status, "findings without a check"), others))
    return cases


def _case_of(path: str, check: Check, findings: Sequence[Finding]) -> Element:
    detail, lines = printable_cut(check.detail), _lines(findings)
    if check.status is Status.FAILED:
        return _case(path, check.name, "failure", _first_sentence(findings) or detail, lines)
    if check.status is Status.PARTIAL:  # the schema has no such outcome: the case passes, with a text
        aside = "\n".join(filter(None, (f"partial: {detail}", lines)))
        return _case(path, check.name, None, "", "", aside)
    return _case(path, check.name, "skipped" if check.status is Status.SKIPPED else None, detail, "", lines)


def _first_sentence(findings: Sequence[Finding]) -> str:
    """Return the worst finding, since some viewers show only one, and the number of the others."""
    ranked = sorted(filter(is_open, findings), key=lambda one: SEVERITIES.index(one.severity))
    more = f" (and {len(ranked) - 1:,} more)" if len(ranked) > 1 else ""
    return f"{finding_sentence(ranked[0])}{more}" if ranked else ""


def _lines(findings: Sequence[Finding]) -> str:
    lines = [finding_sentence(finding) for finding in findings[:MAX_FINDINGS]]
    if len(findings) > MAX_FINDINGS:
        lines.append(f"… and {counted(len(findings) - MAX_FINDINGS, 'more finding')} (--json has them all)")
    return "\n".join(lines)
