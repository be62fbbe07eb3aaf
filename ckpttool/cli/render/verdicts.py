"""Verdicts and findings in words: the text of ``verify``, and functions that all CI reports share."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ckpttool.cli.render.terminal import Style, display_width, fit, hanging_lines, pad, shorten_names, styled
from ckpttool.core.report import Finding, Severity
from ckpttool.core.text import counted, file_size, first_names, printable, printable_cut
from ckpttool.ops.verdict import (
    COPY,
    NOT_REQUESTED,
    PREDICTION,
    SAMPLED_OUT,
    Check,
    Safety,
    Status,
    Survival,
    Verification,
    failing_severities,
)

SEVERITIES = (Severity.ERROR, Severity.WARNING, Severity.NOTE)
"""The worst first, since CI systems cut off the end."""
_MOST_FINDINGS = 40
"""Limit on lines, for readability; ``--json`` has all."""
_BRIEFED = ("values", "checksum", "manifest", "copy", "structure", "safety")
"""Checks with a brief result in a line, in their order."""
_SKIPPED = {"checksum": "no checksums", "manifest": ""}
_PARTIAL = {"checksum": "partial checksums"}
_MARK_WIDTH, _BRIEF_WIDTH, _SHORTEST_PATH = 11, 18, 16
"""Columns of the mark and its word, of the brief text, and the least columns of a path."""
_MOST_ALIKE = 4
"""Number of findings of one code up to which each has a line; more share one line."""


class Mark(NamedTuple):
    """Mark and word at the beginning of a verdict's line."""

    symbol: str
    word: str
    style: Style


MARKS = {
    "invalid": Mark("✗", "INVALID", Style.RED),
    "failed prediction": Mark("✗", "FAILED", Style.RED),
    "unlike its copy": Mark("✗", "DIFFERS", Style.RED),
    "unsafe": Mark("!", "UNSAFE", Style.RED),
    "not run": Mark("✗", "NOT RUN", Style.RED),
    SAMPLED_OUT: Mark("–", "sampled", Style.DIM),
    "valid (safety unknown)": Mark("?", "unknown", Style.YELLOW),
    "valid": Mark("✓", "valid", Style.GREEN),
}
VERDICTS = tuple(MARKS)
"""The words of a verdict, the worst first."""
_SEVERITY_STYLES = {Severity.ERROR: Style.RED, Severity.WARNING: Style.YELLOW, Severity.NOTE: Style.CYAN}


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyStyle:
    """How verdicts are shown.

    Attributes:
        width: Columns of the terminal; None for a pipe, where nothing is shortened or folded.
        verbose: Whether every check of every checkpoint is shown.
        problems_only: Whether passed checkpoints are hidden.
        strict: Whether warnings and unread models fail.
        part: Part of all checkpoints: ``1 of 8``.
        read_in_full: Number of checkpoints read in full, with a sample.
        unread: Number of files and directories that look like models and aren't read.
    """

    width: int | None = None
    colour: bool = False
    verbose: bool = False
    problems_only: bool = False
    strict: bool = False
    part: str | None = None
    read_in_full: int | None = None
    unread: int = 0


def verify_text(verifications: Sequence[Verification], style: VerifyStyle) -> str:
    """Return a line for each checkpoint, its findings below it, and the total."""
    shown = [one for one in verifications if not (style.problems_only and one.passes(strict=style.strict))]
    explained: set[str] = set()
    lines: list[str] = []
    for verification, line in zip(shown, _verdict_lines(shown, style), strict=True):
        lines.append(line)
        lines += _check_lines(verification, style)
        lines += finding_lines(verification.findings, style.colour, _MOST_FINDINGS, style.width, indent=4)
        lines += _remedy_lines(verification, style, explained)
    if not style.problems_only:
        lines += _summary_lines(verifications, style)
    return "\n".join(lines)


def _verdict_lines(verifications: Sequence[Verification], style: VerifyStyle) -> list[str]:
    """Return the lines of verdicts, in columns; a narrow terminal hides the format first."""
    # The brief text at the end has a fixed share of the width and is cut; without the format, names are
    # shortened by as much as is still missing. Lines have the mark and its word in front, in fixed columns.
    rows = [
        (printable(one.path), one.format or "unrecognised", file_size(one.nbytes), _in_brief(one))
        for one in verifications
    ]
    widths = [max((display_width(row[at]) for row in rows), default=0) for at in range(3)]
    has_format = True
    if style.width is not None:
        room = style.width - _MARK_WIDTH - sum(widths) - 4 - _BRIEF_WIDTH
        has_format = room >= 0
        room += 0 if has_format else widths[1] + 2
        names = shorten_names([row[0] for row in rows], max(_SHORTEST_PATH, widths[0] + min(room, 0)))
        rows = [(name, *row[1:]) for name, row in zip(names, rows, strict=True)]
        widths[0] = max(map(display_width, names), default=0)
    lines = []
    for one, (path, kind, size, brief) in zip(verifications, rows, strict=True):
        mark = MARKS[verdict_word(one)]
        start = f"{mark.symbol} {mark.word:<7}"
        cells = [
            pad(path, widths[0]),
            *([pad(kind, widths[1])] if has_format else []),
            f"{size:>{widths[2]}}",
        ]
        line = f"{'  '.join(cells)}  {brief}".rstrip()
        if style.width is not None:
            line = fit(line, style.width - _MARK_WIDTH)
        lines.append(f"{styled(start, mark.style, style.colour)}  {line}")
    return lines


def _in_brief(verification: Verification) -> str:
    """Return the checks that were run, or if some failed, these alone."""
    failed = [one.name for one in verification.checks if one.status is Status.FAILED]
    if failed or not verification.passes():
        return ", ".join(failed) or "not fully checked"
    if any(check.detail == NOT_REQUESTED for check in verification.checks):
        done = [
            check.name if check.status is Status.PASSED else _check_words(check)
            for check in verification.checks
            if check.status in (Status.PASSED, Status.PARTIAL)
        ]
        return f"only {' and '.join(filter(None, (', '.join(done[:-1]), *done[-1:])))}"
    if is_sampled_out(verification):
        return f"{SAMPLED_OUT}: only structure and safety"
    parts = ["safety unknown"] if verification.safety is not Safety.SAFE else []
    checks = {check.name: check for check in verification.checks}
    parts += [_check_words(checks[name]) for name in _BRIEFED if name in checks]
    return ", ".join(part for part in parts if part)


def _check_words(check: Check) -> str:
    """Return the brief result of a check that didn't fail; an empty text if there is nothing to mention."""
    if check.status is Status.SKIPPED:
        return _SKIPPED.get(check.name, f"{check.name} not checked")
    if check.status is Status.PARTIAL:
        return _PARTIAL.get(check.name, f"partial {check.name}")
    return {"values": check.detail, "manifest": "manifest ok", COPY: "copy ok"}.get(check.name, "")


def _check_lines(verification: Verification, style: VerifyStyle) -> list[str]:
    """Return each check with its detail, unless a finding says the same."""
    messages = {str(finding.message) for finding in verification.findings}
    return [
        f"    {check.name:<10} {check.status.value:<8} "
        f"{'' if check.detail in messages else printable(check.detail)}".rstrip()
        for check in verification.checks
        if style.verbose or check.name in PREDICTION
    ]


def _remedy_lines(verification: Verification, style: VerifyStyle, explained: set[str]) -> list[str]:
    """Return the remedies of failures: a line for each code that isn't in ``explained`` yet."""
    from ckpttool.cli.explanations import remedy_of

    fatal_ones = failing_severities(strict=style.strict)
    codes = [one.code for one in verification.findings if is_open(one) and one.severity in fatal_ones]
    new = [code for code in dict.fromkeys(codes) if code not in explained]
    explained.update(new)
    hints = [f"{remedy} (ckpttool explain {code})" for code in new if (remedy := remedy_of(code)) is not None]
    if verification.is_damaged and verification.survival is not None:
        saved = survival_text(verification.survival)
        hints.append(f"ckpttool salvage {printable(verification.path)} DST: {saved}")
    lines = [line for text in hints for line in hanging_lines("    → ", text, style.width, 6)]
    return [styled(line, Style.DIM, style.colour) for line in lines]


def survival_text(survival: Survival) -> str:
    """Return the number of saved weights and of other lost tensors, as a sentence."""
    weights, rest = survival.weights, (survival.optimizer, survival.training, survival.other)
    parts = []
    if weights.of and not weights.lost:
        parts = [f"{'all ' if survival.names_all else ''}{counted(weights.of, 'weight')} saved"]
    elif weights.of:
        least = "" if survival.names_all else "at least "
        parts = [f"{weights.saved:,} of {least}{counted(weights.of, 'weight')} saved"]
    elif survival.optimizer.saved or not any(one.lost for one in rest):
        parts = [f"{counted(sum(one.saved for one in rest), 'tensor')} saved"]
    kinds = ("optimizer tensor", "training value", "other tensor")
    lost = [
        f"{one.lost:,} of {counted(one.of, kind)}" for one, kind in zip(rest, kinds, strict=True) if one.lost
    ]
    lost += ["the RNG state"] if survival.rng_state_lost else []
    if lost:
        parts.append(f"lost {' and '.join(filter(None, (', '.join(lost[:-1]), lost[-1])))}")
    return "; ".join(parts)


def _summary_lines(verifications: Sequence[Verification], style: VerifyStyle) -> list[str]:
    """Return the counts of verdicts, and why warnings make the run fail."""
    is_some = style.part is not None or style.read_in_full is not None or style.unread
    lines = [count_verdicts(verifications)] if len(verifications) > 1 or is_some else []
    if style.part is not None:
        lines[0] = f"part {style.part}: {lines[0]}"
    if style.read_in_full is not None:
        lines[0] += f"; full: {style.read_in_full:,} of {len(verifications):,}"
    if style.unread:
        lines[0] += f", {style.unread:,} not read"
    if style.unread and style.strict:
        lines.append(f"failed (--strict): {counted(style.unread, 'model')} not read")
    unknown = [one for one in verifications if one.passes() and not one.passes(strict=style.strict)]
    if unknown:
        lines.append(f"failed (--strict): {counted(len(unknown), 'checkpoint')} of unknown safety")
    return lines


# Findings in lines ----------------------------------------------------------------------------------


def finding_lines(
    findings: Iterable[Finding],
    colour: bool,
    limit: int | None = None,
    width: int | None = None,
    indent: int = 0,
) -> list[str]:
    """Return a line for each finding, or for many of one code; at most ``limit``, and a count of the rest."""
    groups = list(_group_findings(findings))
    shown = groups[:limit]
    lines = [line for group in shown for line in _finding_lines(group, colour, width, indent)]
    if left := sum(map(len, groups[len(shown) :])):
        lines.append(f"{' ' * indent}… and {left:,} more findings (--json has them all)")
    return lines


def _group_findings(findings: Iterable[Finding]) -> Iterator[Sequence[Finding]]:
    """Yield the findings of each line, in the order of the first of each group."""
    # A damaged file may have thousands of findings of one code, such as a missing tensor each. They share a
    # line, unless they are few; findings without a place are never grouped.
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


def _finding_lines(alike: Sequence[Finding], colour: bool, width: int | None, indent: int) -> list[str]:
    first = alike[0]
    ignored = "" if first.ignored is None else f" (ignored: {printable(first.ignored)})"
    if len(alike) == 1:
        text = f"{first.code}{_place_words(first)}: {printable(first.message)}{ignored}"
    else:
        places = list(dict.fromkeys(printable(one.where or "") for one in alike))
        shown = ", ".join([*places[:_MOST_ALIKE], *(["…"] if len(places) > _MOST_ALIKE else [])])
        times = f"in {len(alike):,} places" if len(places) == len(alike) else f"{len(alike):,} times"
        which = "" if all(one.message == first.message for one in alike) else "the first: "
        text = f"{first.code} {times} [{shown}]: {which}{printable(first.message)}{ignored}"
    severity = first.severity.value
    first_line, *others = hanging_lines(f"{' ' * indent}{severity} ", text, width, indent + 2)
    style = _SEVERITY_STYLES[first.severity]
    return [first_line.replace(severity, styled(severity, style, colour and not ignored), 1), *others]


# For CI ---------------------------------------------------------------------------------------------


def finding_sentence(finding: Finding) -> str:
    """Return a finding in one line: message, place, and the reason if it is ignored."""
    reason = f" (ignored: {printable_cut(finding.ignored)})" if finding.ignored is not None else ""
    head = f"{finding.severity.value} {finding.code}{_place_words(finding)}"
    return f"{head}: {printable_cut(finding.message)}{reason}"


def message_with_place(finding: Finding) -> str:
    """Return a message followed by its place, for formats with fields for code and severity."""
    return f"{printable_cut(finding.message)}{_place_words(finding)}"


def _place_words(finding: Finding) -> str:
    """Return the place in brackets, with the tensors in it if it is a record of the file."""
    if not finding.where:
        return ""
    names = [printable_cut(name) for name in finding.tensors]
    held = f", tensor{'s' if len(names) > 1 else ''} {first_names(names)}" if names else ""
    return f" [{printable_cut(finding.where)}{held}]"


def verdict_word(verification: Verification) -> str:
    """Return the word for a checkpoint: ``valid``, ``unsafe``, ``not run``, ``sampled out`` and others."""
    # A failed prediction or a copy that differs says nothing against the file itself, if nothing else failed.
    if not verification.is_valid:
        failed = {check.name for check in verification.checks if check.status is Status.FAILED}
        if failed and failed <= {*PREDICTION}:
            return "failed prediction"
        if failed == {COPY}:
            return "unlike its copy"
        return "not run" if verification.is_inconclusive else "invalid"
    if verification.safety is Safety.UNSAFE:
        return "unsafe"
    if is_sampled_out(verification):
        return SAMPLED_OUT
    return "valid" if verification.safety is Safety.SAFE else "valid (safety unknown)"


def is_sampled_out(verification: Verification) -> bool:
    """Return whether it was left out of the sample, and not read in full."""
    return any(check.detail == SAMPLED_OUT for check in verification.checks)


def findings_of(check: Check, findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings of a check."""
    return [finding for finding in findings if finding.check == check.name]


def findings_without_check(verification: Verification) -> list[Finding]:
    """Return the findings that belong to none of the checks."""
    names = {check.name for check in verification.checks}
    return [finding for finding in verification.findings if finding.check not in names]


def is_undone(check: Check, findings: Sequence[Finding]) -> bool:
    """Return whether a requested check could not be run, as an error explains."""
    return check.status is Status.SKIPPED and any(
        is_open(finding) and finding.severity is Severity.ERROR for finding in findings_of(check, findings)
    )


def is_open(finding: Finding) -> bool:
    """Return whether a finding isn't ignored."""
    return finding.ignored is None


def count_verdicts(verifications: Sequence[Verification]) -> str:
    """Return the counts of verdicts: ``2 checkpoints: 1 valid, 1 unsafe``."""
    words = Counter(verdict_word(verification) for verification in verifications)
    unknown = words["valid (safety unknown)"]
    counts = []
    if valid := words["valid"] + unknown:
        counts.append(f"{valid:,} valid{f' ({unknown:,} of unknown safety)' if unknown else ''}")
    problems = [word for word in VERDICTS if words[word] and not word.startswith("valid")]
    counts += [f"{words[word]:,} {word}" for word in problems]
    return f"{counted(len(verifications), 'checkpoint')}{': ' if counts else ''}{', '.join(counts)}"


def rank_findings(verifications: Sequence[Verification]) -> Iterator[tuple[Verification, Finding]]:
    """Yield the open findings: errors first, and of one severity the first of each checkpoint first."""
    # GitHub shows ten annotations of one severity: they are to name ten checkpoints, not ten tensors of one.
    for severity in SEVERITIES:
        rounds: list[tuple[int, Verification, Finding]] = []
        for verification in verifications:
            own = (one for one in verification.findings if one.severity is severity and is_open(one))
            rounds += [(at, verification, finding) for at, finding in enumerate(own)]
        rounds.sort(key=lambda one: one[0])
        yield from ((verification, finding) for _, verification, finding in rounds)


def path_from_root(path: str, root: str | None) -> str | None:
    """Return a path relative to the root of the sources, with slashes; None if it is outside.

    Without a root, a relative path is taken as it is.
    """
    inside: str | None = None
    if root is None:
        inside = None if os.path.isabs(path) else os.path.normpath(path)
    else:
        path, root = os.path.abspath(path), os.path.abspath(root)
        above = root if root.endswith(os.sep) else root + os.sep
        if path == root:
            inside = "."
        elif path.startswith(above):
            inside = path.removeprefix(above)
    return inside if inside is None or os.sep == "/" else inside.replace(os.sep, "/")
