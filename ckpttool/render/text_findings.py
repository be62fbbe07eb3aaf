"""What was found, a line each; what was found in many places alike is one line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ckpttool.render.escape import printable
from ckpttool.report import Finding, Severity

_MARKS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.NOTE: "note"}
_COLOURS = {"error": "red", "warning": "yellow", "note": "cyan"}
_MAX_ALIKE = 4
"""Findings of one code that are told one by one; of more, that many places are named."""


def finding_lines(findings: Iterable[Finding], colour: bool, limit: int | None = None) -> list[str]:
    """Return a line for each finding, or for many of one code; at most ``limit``, and a count of the rest."""
    groups = list(_alike(findings))
    lines = [_line(one, colour) for one in groups[:limit]]
    if left := sum(map(len, groups[len(lines) :])):
        lines.append(f"… and {left:,} more findings (--json has them all)")
    return lines


def _alike(findings: Iterable[Finding]) -> Iterator[Sequence[Finding]]:
    """Yield findings that are told in one line, in the order of their first ones."""
    groups: dict[tuple[Severity, str, str | None], list[Finding]] = {}
    told = list(findings)
    for one in told:
        if one.where:
            groups.setdefault(_kind(one), []).append(one)
    for one in told:
        many = groups.get(_kind(one), [])
        if not one.where or len(many) <= _MAX_ALIKE:
            yield [one]
        elif many[0] is one:
            yield many


def _kind(one: Finding) -> tuple[Severity, str, str | None]:
    return one.severity, one.code, one.ignored


def _line(alike: Sequence[Finding], colour: bool) -> str:
    first = alike[0]
    mark = _MARKS[first.severity]
    ignored = "" if first.ignored is None else f" (ignored: {printable(first.ignored)})"
    start = f"{styled(mark, _COLOURS[mark], colour and not ignored)} {first.code}"
    if len(alike) == 1:
        place = f" [{printable(first.where)}]" if first.where else ""
        return f"{start}{place}: {printable(first.message)}{ignored}"
    places = ", ".join(printable(one.where or "") for one in alike[:_MAX_ALIKE])
    which = "" if all(one.message == first.message for one in alike) else "the first: "
    return f"{start} in {len(alike):,} places [{places}, …]: {which}{printable(first.message)}{ignored}"


def styled(text: str, colour_name: str, colour: bool) -> str:
    """Return the text in a colour, where colour is wanted."""
    import typer

    return typer.style(text, fg=colour_name) if colour else text
