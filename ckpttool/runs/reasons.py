"""Reasons and faults of checkpoints: codes for programs, and words for people, which are never parsed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum
from itertools import chain


class Code(Enum):
    """Kind of a reason, for those that programs distinguish."""

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

    # Two reasons with the same words are equal whatever their codes are, and serve as keys of mappings.

    code: Code

    def __new__(cls, code: Code, text: str | None = None) -> Reason:
        """Return a reason; without a text, the words are those of its code."""
        reason = super().__new__(cls, code.value if text is None else text)
        reason.code = code
        return reason

    def __reduce__(self) -> tuple[type[Reason], tuple[Code, str]]:
        """Pickle the code, too, for results of child processes."""
        return Reason, (self.code, str(self))


def fault(code: Code, detail: str = "") -> Reason:
    """Return the fault of a checkpoint: ``damaged: …``, ``incomplete: …``, ``unreadable: …``."""
    return Reason(code, f"{code.value}: {detail}" if detail else None)


def code_of(reason: str) -> Code | None:
    """Return the code of a reason; None if it has none."""
    return reason.code if isinstance(reason, Reason) else None


def reason_text(reason: str) -> str:
    """Return the text of a reason; that of a note, which is its file's name, gets a prefix."""
    return f"{Code.NAMED_IN.value} {reason}" if code_of(reason) is Code.NAMED_IN else reason


def true_of_all(warnings: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the warnings of several directories once; "matched nothing" only if it is true of all of them."""
    for warning in dict.fromkeys(chain.from_iterable(warnings)):
        if code_of(warning) is not Code.MATCHED_NOTHING or all(warning in of_one for of_one in warnings):
            yield warning
