"""The document of ``prune``; docs/contract.md lists its keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ckpttool.series.members.entry import Entry
from ckpttool.series.pruning.explanation import Explanation
from ckpttool.series.pruning.planning import Planned
from ckpttool.series.pruning.prune import Pruned, strangers
from ckpttool.series.reasons import Problem
from ckpttool.series.retention.plan import GroupPlan, KeptEntry
from ckpttool.series.undoing.trash import Emptied


def prune_document(pruned: Pruned) -> dict[str, Any]:
    """Return the document of ``prune``."""
    return {
        "schema": "ckpttool.prune/1",
        "dry_run": pruned.dry_run,
        "declined": pruned.declined,
        "policy": pruned.plan.rules,
        "freed_bytes": pruned.freed_bytes,
        "trash": pruned.trash or None,
        "trashed_bytes": pruned.trashed_bytes,
        "excess_bytes": sum(one.nbytes for one in pruned.plan.excess),
        "groups": [_group(one) for one in pruned.plan.groups],
        "errors": [_problem(one) for one in pruned.problems],
        "settled": {"finished": list(pruned.finished), "put_back": list(pruned.put_back)},
    }


def explain_document(planned: Planned, explanation: Explanation) -> dict[str, Any]:
    """Return the document of ``prune --explain``: that of a dry run, with what was asked for."""
    pruned = Pruned(
        planned.plan,
        planned.plan.freed_bytes,
        dry_run=True,
        problems=planned.problems,
        warnings=planned.warnings,
    )
    explained = {
        "path": explanation.entry.path,
        "group": explanation.key,
        "stays": explanation.stays,
        "place": list(explanation.place),
        "reasons": list(explanation.reasons),
        "against": list(explanation.against),
    }
    return {**prune_document(pruned), "explained": explained}


def empty_document(emptied: Sequence[Emptied]) -> dict[str, Any]:
    """Return the document of ``prune --empty-trash``: no series was looked at."""
    return {
        "schema": "ckpttool.prune/1",
        "dry_run": any(one.dry_run for one in emptied),
        "policy": {},
        "freed_bytes": sum(one.freed_bytes for one in emptied),
        "groups": [],
        "errors": [_problem(problem) for one in emptied for problem in one.problems],
        "emptied": [path for one in emptied for path in one.removed],
    }


def _group(group: GroupPlan) -> dict[str, Any]:
    return {
        "key": group.key,
        "keep": [_kept(one) for one in group.keep],
        "remove": [_removal(entry, group) for entry in group.remove],
        "skipped": group.skipped,
        "policy": None if group.policy is None else group.policy.rules,
        "failed": group.failed,
        "excess": None if group.excess is None else str(group.excess),
        "excess_bytes": 0 if group.excess is None else group.excess.nbytes,
    }


def _kept(kept: KeptEntry) -> dict[str, Any]:
    return {
        "path": kept.entry.path,
        "reasons": list(kept.reasons),
        "safety": kept.entry.safety.value,
    }


def _removal(entry: Entry, group: GroupPlan) -> dict[str, Any]:
    return {
        "path": entry.path,
        "bytes": entry.contents.nbytes,
        "unfitting": group.unfitting.get(entry.path),
        "safety": entry.safety.value,
        "strangers": list(strangers(entry)),
    }


def _problem(problem: Problem) -> dict[str, Any]:
    return {"path": problem.path, "message": problem.message}
