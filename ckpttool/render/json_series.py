"""The documents of ``list``, ``latest`` and ``prune``; docs/contract.md lists their keys."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

from ckpttool.series.listing import Latest, Listed, Listing
from ckpttool.series.planning import Problem
from ckpttool.series.pruning import Pruned
from ckpttool.series.retention import GroupPlan


def list_document(listing: Listing) -> dict[str, Any]:
    """Return the document of ``list``."""
    return {"schema": "ckpttool.list/1", "checkpoints": [_listed(one) for one in listing.checkpoints]}


def _listed(listed: Listed) -> dict[str, Any]:
    entry = listed.entry
    return {
        "path": entry.path,
        "format": entry.format,
        "group": entry.group,
        "complete": entry.is_complete,
        "epoch": entry.epoch,
        "step": entry.step,
        "loss": entry.loss,
        "metrics": dict(entry.metrics),
        "bytes": entry.nbytes,
        "modified": _moment(entry.modified_ns),
        "protected": list(listed.protected),
        "fault": entry.fault,
    }


def _moment(nanoseconds: int) -> str | None:
    """Return a time as ISO 8601 in UTC, to the second; None for one beyond what calendars hold."""
    try:
        when = datetime.fromtimestamp(nanoseconds // 10**9, timezone.utc)
    except (ValueError, OverflowError, OSError):
        return None
    return f"{when:%Y-%m-%dT%H:%M:%SZ}"


def latest_document(found: Latest) -> dict[str, Any]:
    """Return the document of ``latest``."""
    return {
        "schema": "ckpttool.latest/1",
        "path": found.entry.path if found.entry else None,
        "epoch": found.entry.epoch if found.entry else None,
        "step": found.entry.step if found.entry else None,
        "passed_over": [{"path": one.path, "why": one.message} for one in found.passed_over],
    }


def prune_document(pruned: Pruned) -> dict[str, Any]:
    """Return the document of ``prune``."""
    return {
        "schema": "ckpttool.prune/1",
        "dry_run": pruned.dry_run,
        "policy": pruned.plan.policy.rules,
        "freed_bytes": pruned.freed_bytes,
        "groups": [_group(one) for one in pruned.plan.groups],
        "errors": [_problem(one) for one in pruned.problems],
        "settled": {"finished": list(pruned.finished), "put_back": list(pruned.put_back)},
    }


def _group(group: GroupPlan) -> dict[str, Any]:
    return {
        "key": group.key,
        "keep": [{"path": kept.entry.path, "reasons": list(kept.reasons)} for kept in group.keep],
        "remove": [{"path": entry.path, "bytes": entry.contents.nbytes} for entry in group.remove],
        "skipped": group.skipped,
    }


def _problem(problem: Problem) -> dict[str, Any]:
    return {"path": problem.path, "message": problem.message}
