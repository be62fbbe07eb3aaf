"""JUnit's XML, which every CI shows: a checkpoint is a suite, a check is a case.

Source: the schema of Jenkins' xunit plugin (junit-10.xsd), which pytest's files also follow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

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


class _Case(NamedTuple):
    """A test case.

    Attributes:
        outcome: Name of the element with the reason: failure, error or skipped; None if the case passed.
        message: The reason in one line.
        text: Findings in the element of the outcome.
        aside: Findings in ``system-out``, which viewers show for passed cases, too.
    """

    name: str
    outcome: str | None
    message: str
    text: str
    aside: str


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
        case = _Case("open", "error", printable_cut(failure.reason), text, "")
        suites.append(_suite(failure.path, [case], 0.0))
    counts = {name: str(sum(int(suite.get(name, 0)) for suite in suites)) for name in _COUNTS}
    total = sum(seconds.get(one.path, 0.0) for one in verifications)
    root = Element("testsuites", {"name": "ckpttool verify", **counts, "time": f"{total:.3f}"})
    root.extend(suites)
    indent(root)
    return f'<?xml version="1.0" encoding="utf-8"?>\n{tostring(root, encoding="unicode")}\n'


def _suite(path: str, cases: Sequence[_Case], seconds: float) -> Element:
    from xml.etree.ElementTree import Element, SubElement

    outcomes = [case.outcome for case in cases]
    suite = Element(
        "testsuite",
        {
            "name": printable_cut(path),
            "tests": str(len(cases)),
            "failures": str(outcomes.count("failure")),
            "errors": str(outcomes.count("error")),
            "skipped": str(outcomes.count("skipped")),
            "time": f"{seconds:.3f}",
        },
    )
    for case in cases:
        attributes = {"classname": printable_cut(path), "name": case.name, "time": "0.000"}
        element = SubElement(suite, "testcase", attributes)
        if case.outcome is not None:
            SubElement(element, case.outcome, {"message": case.message}).text = case.text or None
        if case.aside:
            SubElement(element, "system-out").text = case.aside
    return suite


def _cases(verification: Verification) -> list[_Case]:
    """Return a case for each check, and one for findings without a check."""
    # JUnit distinguishes failures, of the thing under test, from errors, of the test: a check that was
    # requested and couldn't be run is an error, one that wasn't requested is skipped.
    cases = []
    for check in verification.checks:
        findings = findings_of(check, verification.findings)
        if is_undone(check, verification.findings):
            message = f"not run: {printable_cut(check.detail)}"
            cases.append(_Case(check.name, "error", message, _lines(findings), ""))
        else:
            cases.append(_case(check, findings))
    if others := findings_without_check(verification):
        is_failed = any(one.severity is Severity.ERROR and is_open(one) for one in others)
        status = Status.FAILED if is_failed else Status.PASSED
        cases.append(_case(Check("other", status, "findings without a check"), others))
    return cases


def _case(check: Check, findings: Sequence[Finding]) -> _Case:
    detail = printable_cut(check.detail)
    if check.status is Status.FAILED:
        return _Case(check.name, "failure", _first_sentence(findings) or detail, _lines(findings), "")
    outcome = "skipped" if check.status is Status.SKIPPED else None
    if check.status is Status.PARTIAL:  # the schema has no such outcome: the case passes, with a text
        return _Case(
            check.name, None, "", "", "\n".join(filter(None, (f"partial: {detail}", _lines(findings))))
        )
    return _Case(check.name, outcome, detail, "", _lines(findings))


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
