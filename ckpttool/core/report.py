"""Findings: what is wrong or remarkable, where, and how bad it is."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from ckpttool.core.documents import document_of


class Severity(str, enum.Enum):
    """How much a finding matters."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


class Finding(NamedTuple):
    """Something that a user should know about a checkpoint.

    Attributes:
        code: Stable name; docs/reference/findings.md says what it means and what to do.
        severity: An error fails the check that found it.
        message: One sentence, without the place.
        where: The member, tensor or byte offset, or None for the whole.
        check: The check that made it, or None outside of verification.
        ignored: Why it is of no matter, or None.
        tensors: Names of the tensors that the place holds, if the place is a record of the file.
    """

    code: str
    severity: Severity
    message: str
    where: str | None = None
    check: str | None = None
    ignored: str | None = None
    tensors: tuple[str, ...] = ()

    def document(self) -> dict[str, Any]:
        """Return it as documents have it."""
        return document_of(self, *("code", "severity", "message", "where"), optional=("tensors", "ignored"))


def error(code: str, message: str, where: str | None = None) -> Finding:
    """Return a finding that fails its check."""
    return Finding(code, Severity.ERROR, message, where)


def warning(code: str, message: str, where: str | None = None) -> Finding:
    """Return a finding that fails its check under --strict only."""
    return Finding(code, Severity.WARNING, message, where)


def note(code: str, message: str, where: str | None = None) -> Finding:
    """Return a finding that fails nothing."""
    return Finding(code, Severity.NOTE, message, where)


def has_errors(findings: Iterable[Finding]) -> bool:
    """Tell whether any finding is an error."""
    return any(finding.severity is Severity.ERROR for finding in findings)


def is_safe(findings: Iterable[Finding]) -> bool:
    """Tell whether findings of safety say that loading runs nothing."""
    return all(one.severity is Severity.NOTE for one in findings)


def counted(count: int, noun: str) -> str:
    """Return a number with its noun, in the plural where there isn't just one."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


SHOWN_NAMES = 3
"""How many names stand in a sentence; the others are counted."""
_LONGEST_NAME = 79
"""Letters of a name in a sentence; Lightning writes a callback's arguments into its key."""


def first_names(names: Sequence[str]) -> str:
    """Return the first names in a list, and how many more there are: ``a, b, c and 4 more``."""
    more = f" and {len(names) - SHOWN_NAMES:,} more" if len(names) > SHOWN_NAMES else ""
    return ", ".join(map(_without_middle, names[:SHOWN_NAMES])) + more


def _without_middle(name: str) -> str:
    half = _LONGEST_NAME // 2
    return name if len(name) <= _LONGEST_NAME else f"{name[:half]}…{name[-half:]}"
