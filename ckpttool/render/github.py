"""Annotations: the workflow commands that GitHub Actions shows on a run and in a pull request.

Source: docs.github.com, "Workflow commands for GitHub Actions"; escaping as actions/toolkit does it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from ckpttool.core.report import Severity
from ckpttool.ops.verdict import Verification
from ckpttool.render.verdict_words import (
    count_verdicts,
    message_with_place,
    path_from_root,
    printable_cut,
    rank_findings,
)

if TYPE_CHECKING:
    from ckpttool.core.errors import CheckpointError

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
    unread = (_Annotation(Severity.ERROR, one.path, one.code, printable_cut(one.reason)) for one in failures)
    ranked = (
        _Annotation(finding.severity, one.path, finding.code, message_with_place(finding))
        for one, finding in rank_findings(verifications)
    )
    shown: dict[Severity, list[_Annotation]] = {severity: [] for severity in _COMMANDS}
    more = 0
    for annotation in chain(unread, ranked):
        # The line that counts is a notice, too, and GitHub is to show it.
        room = MAX_SHOWN - (annotation.severity is Severity.NOTE)
        if len(shown[annotation.severity]) < room:
            shown[annotation.severity].append(annotation)
        else:
            more += 1
    counts = [count_verdicts(verifications)]
    if failures:
        counts.append(f"{len(failures):,} not read")
    if more:
        counts.append(f"{more:,} more findings in the log")
    lines = [_command(one, root) for one in chain.from_iterable(shown.values())]
    return "\n".join([*lines, f"::notice title=ckpttool verify::{'; '.join(counts)}"])


def _command(annotation: _Annotation, root: str | None) -> str:
    path = path_from_root(annotation.path, root) or annotation.path
    file, title = printable_cut(path).translate(_PROPERTY), annotation.title.translate(_PROPERTY)
    message = f"{printable_cut(annotation.path)}: {annotation.message}".translate(_DATA)
    return f"::{_COMMANDS[annotation.severity]} file={file},title={title}::{message}"
