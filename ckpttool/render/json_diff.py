"""The documents of ``diff``; docs/contract.md lists their keys."""

from __future__ import annotations

from typing import Any

from ckpttool.ops.difference import ABSENT, Change, Described, Difference, Facts, ValueChange
from ckpttool.ops.drift import Drift, DriftStep, Point
from ckpttool.render.diff_tables import distances, relative_change

SCHEMA = "ckpttool.diff/1"

_STATISTICS = (
    *("max_abs", "max_rel", "l2", "cosine", "count", "size"),
    *("mean_abs", "relative", "non_finite", "norms", "where", "at"),
)
_ZEROS = ("max_abs", "max_rel", "l2", "count", "mean_abs", "relative", "non_finite")
"""Numbers that are 0 where the values are equal."""


def diff_document(difference: Difference) -> dict[str, Any]:
    """Return the document of ``diff`` for two checkpoints."""
    return {"schema": SCHEMA, **_body(difference)}


def _body(difference: Difference) -> dict[str, Any]:
    return {
        "equal": difference.equal,
        "a": difference.a.path,
        "b": difference.b.path,
        "compared": difference.compared,
        "compared_bytes": difference.compared_nbytes,
        "unchanged": difference.unchanged,
        "added": [one.name for one in difference.added],
        "removed": [one.name for one in difference.removed],
        "renamed": [list(names) for names in difference.renamed],
        "changed": [_changed(one) for one in difference.changed],
        "values": [_value(one) for one in difference.values],
        "reported": [_value(one) for one in difference.reported],
        "rules": dict(difference.rules),
        "notes": list(difference.notes),
        "broken": [{"name": one.name, "side": one.side.value, "why": one.why} for one in difference.broken],
        "not_compared": [*difference.not_compared, *(one.text for one in difference.undecided)],
        "tolerance": {
            "rtol": difference.tolerance.rtol,
            "atol": difference.tolerance.atol,
            "bitwise": difference.tolerance.bitwise,
        },
        "sides": {"a": _described(difference.a), "b": _described(difference.b)},
    }


def _changed(change: Change) -> dict[str, Any]:
    return {
        "name": change.name,
        "kind": change.kind,
        **_statistics(change),
        "how": change.how,
        "a": _facts(change.a),
        "b": _facts(change.b),
    }


def _statistics(change: Change) -> dict[str, Any]:
    """Return the numbers; those of equal values where only the type differs, null where shapes do."""
    found = change.statistics
    if found is None:
        zero = 0 if change.kind == "dtype" else None
        return dict.fromkeys(_STATISTICS) | dict.fromkeys(_ZEROS, zero)
    far = distances(change)
    return {
        "max_abs": far and far.max_abs,
        "max_rel": far and far.max_rel,
        "l2": far and far.l2,
        "cosine": far and far.cosine,
        "count": found.count,
        "size": found.size,
        "mean_abs": far and far.mean_abs,
        "relative": far and relative_change(far),
        "non_finite": found.non_finite,
        "norms": far and [far.norm_a, far.norm_b],
        "where": list(found.where),
        "at": [_element(found.at_a), _element(found.at_b)],
    }


def _element(value: object) -> object:
    """Return an element as JSON has it: a complex number as its two parts."""
    return [value.real, value.imag] if isinstance(value, complex) else value


def _facts(facts: Facts) -> dict[str, Any]:
    return {
        "name": facts.name,
        "role": facts.role.value,
        "dtype": facts.dtype.name,
        "shape": list(facts.shape),
        "bytes": facts.nbytes,
    }


def _value(change: ValueChange) -> dict[str, Any]:
    """Return a value on both sides: null, and the side under ``absent``, where a side hasn't got it."""
    sides = {"a": change.a, "b": change.b}
    told = {"path": change.path, **{name: None if side is ABSENT else side for name, side in sides.items()}}
    missing = [name for name, side in sides.items() if side is ABSENT]
    return {**told, "absent": missing[0]} if missing else told


def _described(side: Described) -> dict[str, Any]:
    return {
        "path": side.path,
        "format": side.format,
        "variant": side.variant,
        "producer": side.producer,
        "bytes": side.nbytes,
        "tensors": side.tensors,
        "parameters": side.parameters,
    }


def drift_document(drift: Drift) -> dict[str, Any]:
    """Return the document of ``diff`` for a series of checkpoints."""
    return {
        "schema": SCHEMA,
        "equal": drift.equal,
        "checkpoints": [_point(one) for one in drift.points],
        "steps": [_step(one) for one in drift.steps],
    }


def _point(point: Point) -> dict[str, Any]:
    return {
        "path": point.path,
        "epoch": point.epoch,
        "step": point.step,
        "loss": point.loss,
        "norm": point.norm,
    }


def _step(step: DriftStep) -> dict[str, Any]:
    return {
        "l2": step.l2,
        "relative": step.relative,
        "max_abs": step.max_abs,
        "largest": step.largest,
        "cosine": step.cosine,
        **_body(step.difference),
    }
