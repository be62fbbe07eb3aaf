"""Reasons and faults of checkpoints: codes for programs, words for people, which are never parsed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum
from itertools import chain


class Code(Enum):
    """Subject of a reason, as far as programs distinguish it."""

    DAMAGED = "damaged"
    INCOMPLETE = "incomplete"
    UNREADABLE = "unreadable"
    UNSAFE = "unsafe"
    BEING_WRITTEN = "being written"
    TOO_YOUNG = "too young"
    INEXACT = "inexact"
    NAMED_BEST = "named best"
    NAMED_IN = "named in"
    NEWEST = "newest"
    PART_OF = "a part of"
    REGISTERED = "registered"
    MATCHED_NOTHING = "matched nothing"
    FOR_GOOD = "for good"


class Reason(str):
    """A reason in words, with its code.

    It is a string, since results and documents have carried these words as strings from the start.
    """

    code: Code

    def __new__(cls, code: Code, text: str | None = None) -> Reason:
        """Return a reason; without a text, the words are those of its code."""
        reason = super().__new__(cls, code.value if text is None else text)
        reason.code = code
        return reason

    def __reduce__(self) -> tuple[type[Reason], tuple[Code, str]]:
        """Keep the code in a child process's answer, too."""
        return Reason, (self.code, str(self))


def fault(code: Code, detail: str = "") -> Reason:
    """Return the fault of a checkpoint: ``damaged: …``, ``incomplete: …``, ``unreadable: …``."""
    return Reason(code, f"{code.value}: {detail}" if detail else None)


def code_of(reason: str) -> Code | None:
    """Return the code of a reason; None for one in words alone, which no program asks about."""
    return reason.code if isinstance(reason, Reason) else None


def in_words(reason: str) -> str:
    """Return a reason as people read it: a text that names a checkpoint is more than its name."""
    return f"{Code.NAMED_IN.value} {reason}" if code_of(reason) is Code.NAMED_IN else reason


def true_of_all(warnings: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the warnings of several directories once; "matched nothing" only if it is true of all of them."""
    for warning in dict.fromkeys(chain.from_iterable(warnings)):
        if code_of(warning) is not Code.MATCHED_NOTHING or all(warning in of_one for of_one in warnings):
            yield warning
