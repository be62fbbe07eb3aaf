"""What a command could not do as it was told, and what somebody has to look at."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ckpttool.formats.globs import MATCHED_NOTHING


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that the user must look at: where, and what."""

    path: str
    message: str


def true_of_all(warnings: Sequence[Sequence[str]], origins: Sequence[str | None]) -> Iterator[str]:
    """Yield the warnings of several directories once; that nothing matches has to be true of all of them.

    Args:
        warnings: Those of each directory.
        origins: What a warning begins with that a rule matches nothing.
    """
    rules = tuple(origin for origin in origins if origin)
    for warning in dict.fromkeys(warning for one in warnings for warning in one):
        is_of_glob = warning.startswith(rules) or warning.endswith(MATCHED_NOTHING)
        if not is_of_glob or all(warning in one for one in warnings):
            yield warning
