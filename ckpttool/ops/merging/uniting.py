"""Two trees of plain data as one: what both hold must be equal."""

from __future__ import annotations

import json

from ckpttool.formats.content.carried import encoded
from ckpttool.formats.content.likeness import are_alike
from ckpttool.formats.content.objects import mapped_of
from ckpttool.tensor import Tensor
from ckpttool.wire.pickled import Mapped

_MAX_DEPTH = 100
_SHOWN = 60


class Conflict(ValueError):
    """Two trees say different things in one place; ``where`` is the place."""

    def __init__(self, where: str, message: str) -> None:
        super().__init__(message)
        self.where = where


def united(one: object, two: object, path: tuple[str, ...] = ()) -> object:
    """Return a tree that holds all that two hold; dictionaries come together key by key.

    Raises:
        Conflict: Something else than a dictionary stands in the same place of both, and they are not equal.
    """
    if isinstance(one, dict) and isinstance(two, dict) and _are_alike(one, two) and len(path) < _MAX_DEPTH:
        pairs = {**one}
        for key, value in two.items():
            pairs[key] = united(one[key], value, (*path, str(key))) if key in one else value
        if isinstance(one, Mapped) and isinstance(two, Mapped):
            state = _either(one.state, two.state, (*path, "<state>"))
            return mapped_of(one.kind, pairs, state, one.factory)
        return pairs
    if not _are_equal(one, two):
        where = ".".join(path)
        raise Conflict(where, f"{_told(two)}, and {_told(one)} in a part before")
    return one


def _are_alike(one: dict[object, object], two: dict[object, object]) -> bool:
    """Tell whether two dictionaries are of one class."""
    if isinstance(one, Mapped) and isinstance(two, Mapped):
        return one.kind == two.kind and _are_equal(one.factory, two.factory)
    return type(one) is type(two)


def _either(one: object, two: object, path: tuple[str, ...]) -> object:
    """Return what is set on a dictionary, of two of which only one may have something."""
    if one is None or two is None:
        return two if one is None else one
    return united(one, two, path)


def _are_equal(one: object, two: object) -> bool:
    """Tell whether two trees are the same to the last bit: 0 is not -0.0, and 1 is not 1.0."""
    return one is two or are_alike(one, two) or (type(one) is type(two) and _spelled(one) == _spelled(two))


def _spelled(tree: object) -> str:
    return json.dumps(encoded(tree))


def _told(value: object) -> str:
    text = f"a {type(value).__name__}" if isinstance(value, dict | Tensor) else repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
