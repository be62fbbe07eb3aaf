"""A checkpoint held against its model: what one side has and the other hasn't, or in another shape.

Only the child process imports this module.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ckpttool.report import Finding, counted, error

NAMED = 20
"""What is named one by one; a model of another kind differs in thousands."""


def missing(key: str) -> Finding:
    """Return the finding for what only the model has."""
    return error("missing-key", "the model has it, the checkpoint doesn't", key)


def unexpected(key: str) -> Finding:
    """Return the finding for what only the checkpoint has."""
    return error("unexpected-key", "the checkpoint has it, the model doesn't", key)


def not_consumed(key: str) -> Finding:
    """Return the finding for what the checkpoint has, where the framework just leaves it."""
    return error("not-consumed", "the checkpoint has it, nothing in the model takes it", key)


def other_shape(key: str, saved: Iterable[Any], own: Iterable[Any]) -> Finding:
    """Return the finding for what both have, in shapes that differ."""
    shapes = f"{shape_text(saved)} in the checkpoint, {shape_text(own)} in the model"
    return error("shape-mismatch", shapes, key)


def unlike_model(saved: Mapping[str, Sequence[int]], own: Mapping[str, Sequence[int]]) -> list[Finding]:
    """Return what keeps a state dict from a model; both are shapes by key."""
    findings = [missing(key) for key in own if key not in saved]
    findings += [unexpected(key) for key in saved if key not in own]
    shared = [key for key in saved if key in own and list(saved[key]) != list(own[key])]
    return findings + [other_shape(key, saved[key], own[key]) for key in shared]


def at_most(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Return findings about names, the first of them where they are many."""
    if len(findings) <= NAMED:
        return tuple(findings)
    more = counted(len(findings) - NAMED, "more name")
    return (*findings[:NAMED], error(findings[-1].code, f"… and {more} differ"))


def shape_text(shape: Iterable[Any]) -> str:
    """Return a shape as people write it."""
    return "×".join(map(str, shape)) or "scalar"
