"""Findings: problems and remarkable properties of checkpoints, with their severity."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, final

if TYPE_CHECKING:

    @final
    class Sentence:
        """Text to show. It is a ``str``; type checkers reject comparing it with one, or taking it apart.

        Programs decide by codes and facts. ``str(sentence)`` is the text for a renderer.
        """

        def __init__(self, text: str | Sentence) -> None: ...

else:
    Sentence = str


class Severity(str, enum.Enum):
    """How much a finding matters."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


class Finding(NamedTuple):
    """A problem or a remarkable property of a checkpoint.

    Attributes:
        code: Stable name; docs/reference/findings.md has its meaning and remedy.
        severity: An error fails the check that found it.
        message: One sentence to show, without the place.
        where: Member, tensor or byte offset; None for the whole.
        check: The check that made it; None outside of verification.
        ignored: Reason to ignore it, or None.
        tensors: Names of the tensors in the place, if that is a record of the file.
    """

    code: str
    severity: Severity
    message: Sentence
    where: str | None = None
    check: str | None = None
    ignored: str | None = None
    tensors: tuple[str, ...] = ()

    @property
    def placed_message(self) -> str:
        """The message, after the place."""
        return f"{self.where}: {self.message}" if self.where else str(self.message)

    def document(self) -> dict[str, Any]:
        """Return its JSON document."""
        document: dict[str, Any] = {
            "code": self.code,
            "severity": self.severity.value,
            "message": self.message,
            "where": self.where,
        }
        if self.tensors:
            document["tensors"] = [*self.tensors]
        if self.ignored is not None:
            document["ignored"] = self.ignored
        return document


@dataclass(frozen=True, slots=True)
class Problem:
    """Problem at a path for the user to look at; ``outcome`` is the consequence, such as ``not restored``."""

    path: str
    why: str
    outcome: str = ""

    @property
    def message(self) -> Sentence:
        """Sentence without the path."""
        return Sentence(f"{self.outcome}: {self.why}" if self.outcome else self.why)

    def document(self) -> dict[str, Any]:
        """Return its JSON document."""
        return {"path": self.path, "message": self.message}


def error(code: str, message: str | Sentence, where: str | None = None) -> Finding:
    """Return a finding that fails its check."""
    return Finding(code, Severity.ERROR, Sentence(message), where)


def warning(code: str, message: str | Sentence, where: str | None = None) -> Finding:
    """Return a finding that fails its check under --strict only."""
    return Finding(code, Severity.WARNING, Sentence(message), where)


def note(code: str, message: str | Sentence, where: str | None = None) -> Finding:
    """Return a finding that fails nothing."""
    return Finding(code, Severity.NOTE, Sentence(message), where)


_UNREADABLE = "it could not be read, so the code that loading it would run is unknown"


def not_scanned(where: str | None, reason: str = _UNREADABLE) -> Finding:
    """Return the warning of safety for a part whose code wasn't searched."""
    return warning("not-scanned", reason, where)


def trailing_bytes(count: int, end: str, where: str | None = None) -> Finding:
    """Return the error for bytes after the declared end of a file or member."""
    return error("trailing-bytes", f"{count:,} bytes follow {end}", where)


def has_errors(findings: Iterable[Finding]) -> bool:
    """Return whether any finding is an error."""
    return any(finding.severity is Severity.ERROR for finding in findings)


def is_safe(findings: Iterable[Finding]) -> bool:
    """Return whether no finding of safety is worse than a note: loading the checkpoint runs nothing."""
    return all(one.severity is Severity.NOTE for one in findings)
