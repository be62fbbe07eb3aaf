"""SARIF 2.1.0, which code scanning shows: findings are results, their codes rules, checkpoints artifacts.

Sources: docs.oasis-open.org/sarif/sarif/v2.1.0; for GitHub's further requirements docs.github.com, "SARIF
support for code scanning".
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ckpttool.cli.explanations import as_sentence, explanations, plain
from ckpttool.cli.render.verdicts import (
    SEVERITIES,
    is_open,
    message_with_place,
    path_from_root,
    verdict_word,
)
from ckpttool.core.report import Finding, Severity
from ckpttool.core.result import dumps
from ckpttool.core.text import LONGEST, counted, printable_cut
from ckpttool.ops.verdict import Verification

if TYPE_CHECKING:
    from ckpttool.core.errors import CheckpointError

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
MAX_RESULTS = 25_000
"""Limit on the results of a run: GitHub refuses a file with more."""
_SCORES = {Severity.ERROR: "9.0", Severity.WARNING: "5.0"}
"""``security-severity`` of safety findings, from 0 to 10: GitHub shows 9.0 as critical, 5.0 as medium."""
_Found = tuple[int, Finding]
"""A finding, and the index of its checkpoint."""


def sarif(
    verifications: Sequence[Verification],
    failures: Sequence[CheckpointError] = (),
    *,
    root: str | None = None,
) -> str:
    """Return the log as JSON.

    Args:
        verifications: Each becomes an artifact; their findings become results, errors first.
        failures: Errors that prevented a verdict; the run counts as failed then.
        root: The root of the sources, to which paths are relative.
    """
    # If there are more than GitHub takes, the last are omitted: ignored findings, then the least severe. Only
    # the codes of the others become rules.
    findings = [(at, finding) for at, one in enumerate(verifications) for finding in one.findings]
    findings.sort(key=lambda one: (not is_open(one[1]), SEVERITIES.index(one[1].severity)))
    kept, left = findings[:MAX_RESULTS], max(len(findings) - MAX_RESULTS, 0)
    rules = {code: at for at, code in enumerate(sorted({finding.code for _, finding in kept}))}
    artifacts = [
        {
            "location": _location(one.path, root),
            "roles": ["analysisTarget"],
            "properties": {
                "format": one.format,
                "verdict": verdict_word(one),
                "safety": one.safety.value,
                "checks": {check.name: check.status.value for check in one.checks},
            },
        }
        for one in verifications
    ]
    run = {
        "tool": {"driver": _driver(kept, rules)},
        "invocations": [_invocation(failures, left, root)],
        "artifacts": artifacts,
        "results": _results(kept, rules, artifacts),
    }
    return dumps({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}) + "\n"


def _driver(findings: Sequence[_Found], rules: Mapping[str, int]) -> dict[str, Any]:
    """Return the tool, with a rule for each code."""
    from importlib.metadata import metadata

    about = metadata("ckpttool")
    pages = dict(url.split(", ", 1) for url in about.get_all("Project-URL") or ())
    first = {finding.code: finding for _, finding in reversed(findings)}
    driver: dict[str, Any] = {"name": "ckpttool", "version": about["Version"]}
    if home := pages.get("Homepage"):
        driver["informationUri"] = home
    driver["rules"] = []
    for code in rules:
        rule = _rule(first[code])
        if page := pages.get("Findings"):
            rule["helpUri"] = f"{page}#{code}"
        driver["rules"].append(rule)
    return driver


def _rule(finding: Finding) -> dict[str, Any]:
    """Return the rule of a code: meaning, remedy, severity, and a score if it is dangerous."""
    row = explanations().get(finding.code)
    words = finding.code.split("-")
    name = "".join(word.capitalize() for word in words)  # as the specification spells its examples
    rule: dict[str, Any] = {"id": finding.code, "name": name, "shortDescription": {"text": " ".join(words)}}
    if row is not None:
        meaning, remedy = as_sentence(row.meaning), as_sentence(row.remedy)
        help_text = f"{meaning}\n\n**What to do:** {remedy}"
        rule["fullDescription"] = {"text": plain(meaning)}
        rule["help"] = {"text": plain(help_text), "markdown": help_text}
    rule["defaultConfiguration"] = {"level": finding.severity.value}
    if finding.check:
        rule["properties"] = {"tags": [finding.check]}
        score = _SCORES.get(finding.severity) if finding.check == "safety" else None
        if score is not None:
            rule["properties"] = {"tags": [finding.check, "security"], "security-severity": score}
    return rule


def _invocation(failures: Sequence[CheckpointError], left: int, root: str | None) -> dict[str, Any]:
    """Return the invocation: it failed if a checkpoint could not be read."""
    notifications: list[dict[str, Any]] = [
        {
            "level": "error",
            "message": {"text": printable_cut(str(failure))},
            "descriptor": {"id": failure.code},
            "locations": [{"physicalLocation": {"artifactLocation": _location(failure.path, root)}}],
        }
        for failure in failures
    ]
    if left:
        text = f"{counted(left, 'more finding')} omitted, the least severe (--json has them all)."
        notifications.append({"level": "warning", "message": {"text": text}})
    invocation: dict[str, Any] = {"executionSuccessful": not failures}
    if notifications:
        invocation["toolExecutionNotifications"] = notifications
    return invocation


def _results(
    findings: Sequence[_Found], rules: Mapping[str, int], artifacts: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    from hashlib import sha256

    results = []
    seen: Counter[tuple[int, str]] = Counter()
    for at, finding in findings:
        # GitHub recognises a finding of an earlier run by its fingerprint, so that dismissed alerts stay so.
        # It is made of code and place: messages contain numbers, which change with the checkpoint. Several
        # findings of one code and place are numbered.
        place = f"{finding.code}\0{finding.where or ''}"
        digest = sha256(place.encode("utf-8", "surrogatepass")).hexdigest()[:16]
        seen[at, digest] += 1
        artifact = {**artifacts[at]["location"], "index": at}
        # A binary file has no lines, but GitHub refuses a result without one.
        location: dict[str, Any] = {
            "physicalLocation": {"artifactLocation": artifact, "region": {"startLine": 1}}
        }
        if finding.where:
            location["logicalLocations"] = [{"fullyQualifiedName": printable_cut(finding.where)}]
        result: dict[str, Any] = {
            "ruleId": finding.code,
            "ruleIndex": rules[finding.code],
            "level": finding.severity.value,
            "message": {"text": message_with_place(finding)},  # GitHub shows no logical location
            "locations": [location],
            # The only name that GitHub reads; without it, GitHub would compute one from the file's lines.
            "partialFingerprints": {"primaryLocationLineHash": f"{digest}:{seen[at, digest]}"},
        }
        if finding.ignored is not None:
            suppression = {"kind": "external", "justification": printable_cut(finding.ignored)}
            result["suppressions"] = [suppression]
        results.append(result)
    return results


def _location(path: str, root: str | None) -> dict[str, Any]:
    # GitHub shows results of files in the repository, whose URIs are relative to its root; other files have
    # absolute URIs.
    inside = path_from_root(path[:LONGEST], root)
    if inside is None:
        slashed = os.path.abspath(path[:LONGEST]).replace(os.sep, "/")
        return {"uri": f"file://{'' if slashed.startswith('/') else '/'}{_percent_encode(slashed, '/:')}"}
    uri = {"uri": _percent_encode(inside, "/")}
    return uri if root is None else {**uri, "uriBaseId": "%SRCROOT%"}


def _percent_encode(path: str, safe: str) -> str:
    from urllib.parse import quote

    try:
        name = os.fsencode(path)
    except UnicodeEncodeError:  # a surrogate that no file name has, but a message may
        name = path.encode("utf-8", "surrogatepass")
    return quote(name, safe=safe)
