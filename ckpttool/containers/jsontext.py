"""Strict JSON parser for indexes and headers: in bounded memory, and with duplicate keys marked."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from ckpttool.core.errors import DamagedCheckpoint, LimitExceeded, require_at_most

MAX_VALUES = 4_000_000
"""Limit on JSON values in one text; a safetensors header of 100 MB has as many."""

MAX_DEPTH = 127
"""Limit on the depth of JSON; serde_json, which safetensors uses, has the same limit."""

_LENGTH_DIGITS = len(str((1 << 64) - 1))
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class DuplicateKeyObject(dict[str, Any]):
    """A JSON object with a duplicate key, ``key``, which has the last value."""

    key: str

    @property
    def problem(self) -> str:
        """The sentence for findings and errors."""
        return f"duplicate key {self.key!r}"

    def error(self, path: str, where: str | None = None) -> DamagedCheckpoint:
        """Return the error for a file in which duplicate keys aren't allowed."""
        return DamagedCheckpoint(path, self.problem, where=where, code="duplicate-key")


_CONTAINERS = frozenset({dict, list, DuplicateKeyObject})


def parse_json(
    path: str, data: bytes, what: str, *, constants: bool = False, surrogates: bool = False
) -> Any:
    """Return the value of a JSON text in UTF-8; an object with a duplicate key is a ``DuplicateKeyObject``.

    Args:
        path: The file, for errors.
        data: The text.
        what: Noun of the text, for errors and their codes: ``header``, ``index``.
        constants: Whether NaN and Infinity, which Python writes, are accepted.
        surrogates: Whether lone surrogates are accepted, which Python uses for bytes that aren't UTF-8.
    """
    try:
        text = data.decode()
    except UnicodeDecodeError as failure:
        found = f"the {what} is not UTF-8 at byte {failure.start:,}"
        raise DamagedCheckpoint(path, found, code=f"{what}-not-utf8") from failure
    # An upper bound on the number of values, before any is made: n of them in a container take a bracket and
    # n - 1 commas.
    values = sum(map(text.count, "[{,"))
    require_at_most(path, MAX_VALUES, values, f"the {what} holds {{:,}} JSON values")
    constant = float if constants else _refuse_constant
    deep = LimitExceeded(
        path, f"the {what} is nested more than {MAX_DEPTH} levels deep", code=f"{what}-too-deep"
    )
    try:
        tree = json.loads(
            text, object_pairs_hook=_build_object, parse_int=_parse_integer, parse_constant=constant
        )
        if _is_deeper(tree, MAX_DEPTH):
            raise deep
        # JSON can escape half of a character, which Python accepts and no UTF-8 encoder does: to encode the
        # value again shows whether one of its texts has a lone one.
        if not surrogates and _SURROGATE.search(text):
            json.dumps(tree, ensure_ascii=False).encode()
    except RecursionError as failure:
        raise deep from failure
    except UnicodeEncodeError as failure:
        half = f"\\u{ord(failure.object[failure.start]):04x}"
        found = f"the {what} is not valid JSON: lone surrogate {half}"
        raise DamagedCheckpoint(path, found, code=f"{what}-not-json") from failure
    except ValueError as failure:
        found = f"the {what} is not valid JSON: {failure}"
        raise DamagedCheckpoint(path, found, code=f"{what}-not-json") from failure
    return tree


def _build_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) == len(pairs):
        return members
    doubled, seen = DuplicateKeyObject(members), set[str]()
    doubled.key = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
    return doubled


def _parse_integer(digits: str) -> int | float:
    """Return an integer, or a float for more digits than 64 bits have and for ``-0``."""
    return float(digits) if len(digits) > _LENGTH_DIGITS or digits == "-0" else int(digits)


def _refuse_constant(name: str) -> float:
    raise ValueError(f"the constant {name}")


def _is_deeper(tree: Any, limit: int) -> bool:
    """Return whether containers are nested more than ``limit`` deep."""
    level = [tree] if type(tree) in _CONTAINERS else []
    for _ in range(limit):
        if not level:
            return False
        level = [
            child
            for node in level
            for child in (node.values() if isinstance(node, dict) else node)
            if type(child) in _CONTAINERS
        ]
    return bool(level)


def objects(tree: object) -> Iterator[dict[str, Any]]:
    """Yield every object in a JSON value, at any depth."""
    pending = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, list):
            pending += node
        elif isinstance(node, dict):
            pending += node.values()
            yield node
