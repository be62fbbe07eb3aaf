"""The document of ``prune``; docs/contract.md lists its keys."""

from __future__ import annotations

from typing import Any

from ckpttool.series.planning import Problem
from ckpttool.series.pruning import Pruned
from ckpttool.series.retention import GroupPlan


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
