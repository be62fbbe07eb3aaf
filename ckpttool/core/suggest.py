"""What somebody meant by a word that there is not."""

from __future__ import annotations

from collections.abc import Iterable

_LEAST_LIKENESS = 0.7
"""Of 1, by difflib; ``Simple`` for ``SimpleModel`` has a little more."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return the question whether the closest known word was meant, or nothing if none is close."""
    close = closest(word, known)
    return f"did you mean {close}?" if close else ""


def closest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word that was most likely meant: one that ends in ``.word``, or is spelled alike."""
    from difflib import get_close_matches

    names = list(known)
    if ends := [name for name in names if name.endswith(f".{word}")]:
        return min(ends, key=lambda name: name.count("."))
    folded = {_fold(name): name for name in reversed(names)}
    close = get_close_matches(_fold(word), folded, 1, _LEAST_LIKENESS)
    return folded[close[0]] if close else None


def _fold(word: str) -> str:
    return word.lower().replace("_", "-")
