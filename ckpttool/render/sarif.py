"""SARIF 2.1.0, which code scanning shows: findings are results, their codes rules, checkpoints artifacts.

Source: docs.oasis-open.org/sarif/sarif/v2.1.0; what GitHub asks for beyond it: docs.github.com, "SARIF
support for code scanning".
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ckpttool.ops.verdict import Verification
from ckpttool.render.json import dumps
from ckpttool.render.verdict_words import (
    LONGEST,
    SEVERITIES,
    is_open,
    message_with_place,
    path_from_root,
    printable_cut,
    verdict_word,
)
from ckpttool.report import Finding

if TYPE_CHECKING:
    from ckpttool.errors import CheckpointError

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
MAX_RESULTS = 25_000
"""Results of a run that GitHub takes; it refuses a file with more."""
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
        failures: What could not be looked at; the run counts as failed then.
        root: The root of the sources: what lies below is named from there.
    """
    found = [(at, finding) for at, one in enumerate(verifications) for finding in one.findings]
    found.sort(key=lambda one: (not is_open(one[1]), SEVERITIES.index(one[1].severity)))
    kept, left = found[:MAX_RESULTS], max(len(found) - MAX_RESULTS, 0)
    rules = {code: at for at, code in enumerate(sorted({finding.code for _, finding in kept}))}
    artifacts = [_artifact(one, root) for one in verifications]
    run = {
        "tool": {"driver": _driver(kept, rules)},
        "invocations": [_invocation(failures, left, root)],
        "artifacts": artifacts,
        "results": _results(kept, rules, artifacts),
    }
    return dumps({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}) + "\n"


# The tool ----------------------------------------------------------------------------------------------


def _driver(found: Sequence[_Found], rules: Mapping[str, int]) -> dict[str, Any]:
    from importlib.metadata import metadata

    about = metadata("ckpttool")
    pages = dict(url.split(", ", 1) for url in about.get_all("Project-URL") or ())
    checks = {finding.code: finding.check for _, finding in found}
    driver: dict[str, Any] = {"name": "ckpttool", "version": about["Version"]}
    if home := pages.get("Homepage"):
        driver["informationUri"] = home
    driver["rules"] = [_rule(code, checks[code], pages.get("Findings")) for code in rules]
    return driver


def _rule(code: str, check: str | None, page: str | None) -> dict[str, Any]:
    told = {"text": f"docs/findings.md says what {code} means, and what to do."}
    title = {"text": code.replace("-", " ")}
    linked = f"[docs/findings.md](docs/findings.md#{code}) says what {code} means, and what to do."
    link = {**told, "markdown": linked}
    rule: dict[str, Any] = {"id": code, "shortDescription": title, "fullDescription": told, "help": link}
    if page:
        rule["helpUri"] = f"{page}#{code}"
    if check:
        rule["properties"] = {"tags": [check]}
    return rule


def _invocation(failures: Sequence[CheckpointError], left: int, root: str | None) -> dict[str, Any]:
    notifications = [_unread(failure, root) for failure in failures]
    if left:
        text = f"{left:,} more findings are left out, the least first (--json has them all)."
        notifications.append({"level": "warning", "message": {"text": text}})
    invocation: dict[str, Any] = {"executionSuccessful": not failures}
    if notifications:
        invocation["toolExecutionNotifications"] = notifications
    return invocation


def _unread(failure: CheckpointError, root: str | None) -> dict[str, Any]:
    return {
        "level": "error",
        "message": {"text": printable_cut(str(failure))},
        "descriptor": {"id": failure.code},
        "locations": [{"physicalLocation": {"artifactLocation": _location(failure.path, root)}}],
    }


# What was looked at, and what was found ----------------------------------------------------------------


def _artifact(verification: Verification, root: str | None) -> dict[str, Any]:
    return {
        "location": _location(verification.path, root),
        "roles": ["analysisTarget"],
        "properties": {
            "format": verification.format,
            "verdict": verdict_word(verification),
            "safety": verification.safety.value,
            "checks": {check.name: check.status.value for check in verification.checks},
        },
    }


def _results(
    found: Sequence[_Found], rules: Mapping[str, int], artifacts: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    results = []
    seen: Counter[tuple[int, str]] = Counter()
    for at, finding in found:
        digest = _digest(finding)
        seen[at, digest] += 1
        results.append(
            {
                "ruleId": finding.code,
                "ruleIndex": rules[finding.code],
                "level": finding.severity.value,
                "message": {"text": message_with_place(finding)},  # GitHub shows no logical location
                "locations": [_place(finding, {**artifacts[at]["location"], "index": at})],
                # The one name that GitHub knows; it would make one of the file's lines otherwise.
                "partialFingerprints": {"primaryLocationLineHash": f"{digest}:{seen[at, digest]}"},
                **_suppressed(finding),
            }
        )
    return results


def _place(finding: Finding, location: Mapping[str, Any]) -> dict[str, Any]:
    # A binary file has no lines, but GitHub takes no result without one.
    place: dict[str, Any] = {"physicalLocation": {"artifactLocation": location, "region": {"startLine": 1}}}
    if finding.where:
        place["logicalLocations"] = [{"fullyQualifiedName": printable_cut(finding.where)}]
    return place


def _suppressed(finding: Finding) -> dict[str, Any]:
    if finding.ignored is None:
        return {}
    return {"suppressions": [{"kind": "external", "justification": printable_cut(finding.ignored)}]}


def _digest(finding: Finding) -> str:
    """Return what stays the same from run to run: a message counts, and counts change."""
    from hashlib import sha256

    place = f"{finding.code}\0{finding.where or ''}"
    return sha256(place.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _location(path: str, root: str | None) -> dict[str, Any]:
    inside = path_from_root(path[:LONGEST], root)
    if inside is None:
        slashed = os.path.abspath(path[:LONGEST]).replace(os.sep, "/")
        return {"uri": f"file://{'' if slashed.startswith('/') else '/'}{_quoted(slashed, '/:')}"}
    uri = {"uri": _quoted(inside, "/")}
    return uri if root is None else {**uri, "uriBaseId": "%SRCROOT%"}


def _quoted(path: str, safe: str) -> str:
    from urllib.parse import quote

    try:
        name = os.fsencode(path)
    except UnicodeEncodeError:  # no file has such a name, but a message may
        name = path.encode("utf-8", "surrogatepass")
    return quote(name, safe=safe)
