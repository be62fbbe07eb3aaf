"""Annotations: the workflow commands that GitHub Actions shows on a run and in a pull request.

Source: docs.github.com, "Workflow commands for GitHub Actions"; escaping as actions/toolkit does it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from ckpttool.ops.verdict import Verification
from ckpttool.render.verdict_words import (
    count_verdicts,
    message_with_place,
    path_from_root,
    printable_cut,
    rank_findings,
)
from ckpttool.report import Finding, Severity

if TYPE_CHECKING:
    from ckpttool.errors import CheckpointError

MAX_SHOWN = 10
"""Annotations of one severity that GitHub shows of a step."""
_COMMANDS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.NOTE: "notice"}
_DATA = str.maketrans({"%": "%25", "\r": "%0D", "\n": "%0A"})
_PROPERTY = {**_DATA, **str.maketrans({":": "%3A", ",": "%2C"})}


class _Annotation(NamedTuple):
    severity: Severity
    path: str
    title: str
    message: str


def workflow_commands(
    verifications: Sequence[Verification],
    failures: Sequence[CheckpointError] = (),
    *,
    root: str | None = None,
) -> str:
    """Return the commands, a line each: errors first, and at last a notice that counts.

    Args:
        verifications: Of the findings of one severity, those that GitHub shows become annotations.
        failures: What could not be looked at.
        root: The root of the sources, which GitHub's paths start from.
    """
    found = (_annotation(one, finding) for one, finding in rank_findings(verifications))
    kept: dict[Severity, list[_Annotation]] = {severity: [] for severity in _COMMANDS}
    left = 0
    for annotation in chain(map(_unread, failures), found):
        is_full = len(kept[annotation.severity]) == _room(annotation.severity)
        left += is_full
        if not is_full:
            kept[annotation.severity].append(annotation)
    lines = [_command(one, root) for one in chain.from_iterable(kept.values())]
    return "\n".join([*lines, _last(verifications, len(failures), left)])


def _room(severity: Severity) -> int:
    """Return how many fit; the line that counts is a notice too."""
    return MAX_SHOWN - (severity is Severity.NOTE)


def _annotation(verification: Verification, finding: Finding) -> _Annotation:
    return _Annotation(finding.severity, verification.path, finding.code, message_with_place(finding))


def _unread(failure: CheckpointError) -> _Annotation:
    return _Annotation(Severity.ERROR, failure.path, failure.code, printable_cut(failure.reason))


def _command(annotation: _Annotation, root: str | None) -> str:
    path = path_from_root(annotation.path, root) or annotation.path
    file, title = printable_cut(path).translate(_PROPERTY), annotation.title.translate(_PROPERTY)
    message = f"{printable_cut(annotation.path)}: {annotation.message}".translate(_DATA)
    return f"::{_COMMANDS[annotation.severity]} file={file},title={title}::{message}"


def _last(verifications: Sequence[Verification], unread: int, left: int) -> str:
    parts = [count_verdicts(verifications)]
    if unread:
        parts.append(f"{unread:,} not read")
    if left:
        parts.append(f"{left:,} more findings in the log")
    return f"::notice title=ckpttool verify::{'; '.join(parts)}"
