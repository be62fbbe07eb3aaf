"""JUnit's XML, which every CI shows: a checkpoint is a suite, a check is a case.

Source: the schema of Jenkins' xunit plugin (junit-10.xsd), which pytest's own files follow too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from ckpttool.ops.verdict import Check, Status, Verification
from ckpttool.render.verdict_words import (
    finding_sentence,
    findings_of,
    findings_without_check,
    is_open,
    is_undone,
    printable_cut,
)
from ckpttool.report import Finding, Severity

if TYPE_CHECKING:
    from xml.etree.ElementTree import Element

    from ckpttool.errors import CheckpointError

MAX_FINDINGS = 100
"""Findings that a case names; a model of another kind differs in thousands."""
_NO_TIMES: Mapping[str, float] = MappingProxyType({})


class _Case(NamedTuple):
    """A case: ``outcome`` is the element that tells why it did not pass, or None."""

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
        failures: What could not be looked at; each becomes a suite with an error.
        seconds: How long each checkpoint took, by path.
    """
    from xml.etree.ElementTree import Element, indent, tostring

    suites = [_suite(one.path, _cases(one), seconds.get(one.path, 0.0)) for one in verifications]
    suites += [_suite(one.path, [_unread(one)], 0.0) for one in failures]
    counts = {name: str(sum(int(suite.get(name, 0)) for suite in suites)) for name in _COUNTS}
    total = sum(seconds.get(one.path, 0.0) for one in verifications)
    root = Element("testsuites", {"name": "ckpttool verify", **counts, "time": f"{total:.3f}"})
    root.extend(suites)
    indent(root)
    return f'<?xml version="1.0" encoding="utf-8"?>\n{tostring(root, encoding="unicode")}\n'


_COUNTS = ("tests", "failures", "errors")
"""The counts that stand on all suites together; the schema has no place there for those skipped."""


def _suite(path: str, cases: Sequence[_Case], seconds: float) -> Element:
    from xml.etree.ElementTree import Element

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
    suite.extend(_element(case, path) for case in cases)
    return suite


def _element(case: _Case, path: str) -> Element:
    from xml.etree.ElementTree import Element, SubElement

    element = Element("testcase", {"classname": printable_cut(path), "name": case.name, "time": "0.000"})
    if case.outcome is not None:
        SubElement(element, case.outcome, {"message": case.message}).text = case.text or None
    if case.aside:
        SubElement(element, "system-out").text = case.aside
    return element


def _cases(verification: Verification) -> list[_Case]:
    """Return a case for each check, and one for what belongs to none: an error is never left out."""
    cases = [_case(check, verification.findings) for check in verification.checks]
    if others := findings_without_check(verification):
        is_failed = any(one.severity is Severity.ERROR and is_open(one) for one in others)
        status = Status.FAILED if is_failed else Status.PASSED
        cases.append(_told(Check("other", status, "findings of no one check"), others))
    return cases


def _case(check: Check, findings: Sequence[Finding]) -> _Case:
    found = findings_of(check, findings)
    if is_undone(check, findings):
        return _Case(check.name, "error", f"not done: {printable_cut(check.detail)}", _lines(found), "")
    return _told(check, found)


def _told(check: Check, found: Sequence[Finding]) -> _Case:
    detail = printable_cut(check.detail)
    if check.status is Status.FAILED:
        return _Case(check.name, "failure", detail, _lines(found), "")
    outcome = "skipped" if check.status is Status.SKIPPED else None
    return _Case(check.name, outcome, detail, "", _lines(found))


def _lines(findings: Sequence[Finding]) -> str:
    lines = [finding_sentence(finding) for finding in findings[:MAX_FINDINGS]]
    if len(findings) > MAX_FINDINGS:
        lines.append(f"… and {len(findings) - MAX_FINDINGS:,} more findings (--json has them all)")
    return "\n".join(lines)


def _unread(failure: CheckpointError) -> _Case:
    reason = printable_cut(str(failure))
    return _Case("open", "error", printable_cut(failure.reason), f"error {failure.code}: {reason}", "")
