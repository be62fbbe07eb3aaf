"""The JSON documents of all commands; docs/reference/json.md lists their keys.

Types and helpers of one command are imported when its document is made: the others would take their time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ckpttool.core.printable import is_printable
from ckpttool.core.tensor import Role
from ckpttool.ops.verdict import safety_of

if TYPE_CHECKING:
    from ckpttool.cli.config import ConfigDocument
    from ckpttool.cli.config_tables import ConfigEntry
    from ckpttool.core.checkpoint import TrainingState
    from ckpttool.core.errors import CheckpointError
    from ckpttool.core.report import Finding
    from ckpttool.core.result import Result
    from ckpttool.core.tensor import Tensor
    from ckpttool.formats.architecture import Architecture
    from ckpttool.ops.conversion import Converted
    from ckpttool.ops.difference import Change, Described, Difference, Facts, ValueChange
    from ckpttool.ops.drift import Drift
    from ckpttool.ops.inspect import Inspection, ValueStatistics
    from ckpttool.ops.manifest_seal import SealResult
    from ckpttool.ops.resume import ResumeVerdict
    from ckpttool.ops.salvage import Salvaged
    from ckpttool.ops.survival import Survival
    from ckpttool.ops.verdict import Verification
    from ckpttool.runs.cadence import Cadence
    from ckpttool.runs.card import Card
    from ckpttool.runs.copying import Copied
    from ckpttool.runs.listing import ListedCheckpoint, ListedRun, ListedSeries, Listing
    from ckpttool.runs.pointers.pin_lists import Pin
    from ckpttool.runs.pointers.remarks import Remark
    from ckpttool.runs.pruning.explanation import Explanation
    from ckpttool.runs.pruning.planning import PrunePlan
    from ckpttool.runs.pruning.prune import Pruned
    from ckpttool.runs.renaming.rename import RenameResult
    from ckpttool.runs.resuming.latest import Latest
    from ckpttool.runs.retention.plan import GroupPlan
    from ckpttool.runs.tracking import Logged
    from ckpttool.runs.undo import Undone
    from ckpttool.runs.watching import WatchEvent
    from ckpttool.transaction.paths import Problem
    from ckpttool.transaction.trash import EmptiedTrash


def dumps(document: Any) -> str:
    """Return a document as JSON text; NaN and infinities become strings.

    What a terminal would obey, and what UTF-8 can't hold, is spelled as JSON's own escapes.
    """
    try:
        text = json.dumps(document, ensure_ascii=False, allow_nan=False)
    except ValueError:
        text = json.dumps(finite(document), ensure_ascii=False, allow_nan=False)
    for character in set(text):
        if not is_printable(character):
            units = character.encode("utf-16-be", "surrogatepass").hex()
            escapes = "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))
            text = text.replace(character, escapes)
    return text


def document_of(result: Result) -> dict[str, Any]:
    """Return the document of a result of the library, with nothing in it that JSON lacks."""
    document: dict[str, Any] = json.loads(dumps(_MAKERS[type(result).__name__](result)))
    return document


def finite(value: Any) -> Any:
    """Return plain data with the floats that JSON lacks spelled as strings."""
    root = [value]
    pending: list[Any] = [root]
    while pending:
        holder = pending.pop()
        for key, item in list(holder.items() if isinstance(holder, dict) else enumerate(holder)):
            if isinstance(item, float) and not math.isfinite(item):
                holder[key] = "NaN" if item != item else "Infinity" if item > 0 else "-Infinity"
            elif isinstance(item, Mapping | list | tuple):
                holder[key] = dict(item) if isinstance(item, Mapping) else list(item)
                pending.append(holder[key])
    return root[0]


# What several documents hold ------------------------------------------------------------------------


def finding_document(one: Finding) -> dict[str, Any]:
    """Return a finding as the documents have it."""
    document: dict[str, Any] = {
        "code": one.code,
        "severity": one.severity.value,
        "message": one.message,
        "where": one.where,
    }
    if one.tensors:
        document["tensors"] = list(one.tensors)
    return document if one.ignored is None else {**document, "ignored": one.ignored}


def _problem(problem: Problem) -> dict[str, Any]:
    return {"path": problem.path, "message": problem.message}


def training_document(state: TrainingState) -> dict[str, Any]:
    """Return a training state as the documents have it."""
    return {
        "epoch": state.epoch,
        "step": state.step,
        "loss": state.loss,
        "learning_rate": state.learning_rate,
        "metrics": dict(state.metrics),
        "best": state.best,
        "saved_at": state.saved_at,
        "seed": state.seed,
        "hyper_parameters": dict(state.hyper_parameters),
        "origin": dict(state.origin),
    }


# inspect --------------------------------------------------------------------------------------------


def inspect_document(inspections: list[Inspection], remarks: Sequence[Remark | None] = ()) -> dict[str, Any]:
    """Return the document of ``inspect``; ``remarks`` are what people say of each."""
    rows = [_inspection(inspection) for inspection in inspections]
    for row, remark in zip(rows, remarks, strict=False):
        if remark is not None and not remark.is_empty:
            row["about"] = _remark(remark)
    return {"schema": "ckpttool.inspect/1", "checkpoints": rows}


def _inspection(inspection: Inspection) -> dict[str, Any]:
    checkpoint = inspection.checkpoint
    return {
        "path": checkpoint.path,
        "format": checkpoint.format,
        "variant": checkpoint.variant,
        "complete": checkpoint.complete,
        "granularity": checkpoint.granularity.value,
        "bytes": checkpoint.nbytes,
        "files": [{"path": entry.path, "bytes": entry.nbytes} for entry in checkpoint.files],
        "producer": {"framework": checkpoint.producer.framework, "version": checkpoint.producer.version},
        "training": training_document(checkpoint.training),
        "resume": _resume(inspection.resume),
        "parameters": checkpoint.parameters,
        "buffers": checkpoint.buffers,
        "packed": checkpoint.packed,
        "model": _architecture(inspection.architecture),
        "tensors": [_tensor(tensor, inspection.statistics) for tensor in inspection.tensors],
        "values": checkpoint.metadata,
        "findings": [finding_document(one) for one in inspection.findings],
        "safety": safety_of(checkpoint.safety).value,
    }


def card_document(card: Card) -> dict[str, Any]:
    """Return the document of ``card``."""
    checkpoint, found = card.inspection.checkpoint, card.verification
    return {
        "schema": "ckpttool.card/1",
        "name": card.name,
        "format": checkpoint.format,
        "variant": checkpoint.variant,
        "producer": {"framework": checkpoint.producer.framework, "version": checkpoint.producer.version},
        "library": card.library,
        "bytes": checkpoint.nbytes,
        "files": [{"path": one.name, "bytes": one.nbytes, "sha256": one.sha256} for one in card.files],
        "parameters": checkpoint.parameters,
        "buffers": checkpoint.buffers,
        "packed": checkpoint.packed,
        "model": _architecture(card.inspection.architecture),
        "training": training_document(checkpoint.training),
        "resume": _resume(card.inspection.resume),
        "about": _remark(card.remark),
        "verified": None
        if found is None
        else {
            "valid": found.is_valid,
            "safety": found.safety.value,
            "checks": {one.name: one.status.value for one in found.checks},
        },
    }


def _resume(verdict: ResumeVerdict) -> dict[str, Any]:
    return {"level": verdict.level.value, "found": [*verdict.found], "missing": [*verdict.missing]}


def _architecture(model: Architecture) -> dict[str, Any]:
    return {
        "class": model.model or None,
        "family": model.family or None,
        "layers": model.layers,
        "signatures": {one.name: {"inputs": one.inputs, "outputs": one.outputs} for one in model.signatures},
    }


def _tensor(tensor: Tensor, statistics: Mapping[str, ValueStatistics] | None) -> dict[str, Any]:
    extent = tensor.extent
    document: dict[str, Any] = {
        "name": tensor.name,
        "path": list(tensor.path),
        "role": tensor.role.value,
        "dtype": tensor.dtype.name,
        "shape": list(tensor.shape),
        "bytes": tensor.nbytes,
        "file": extent.file if extent else None,
        "offset": extent.offset if extent else None,
        "shares_with": tensor.shares_with,
    }
    if tensor.key is not None:
        document["key"] = tensor.key
    if tensor.shard is not None:
        document["shard"] = {
            "shape": list(tensor.shard.shape),
            "ranges": None
            if tensor.shard.ranges is None
            else [list(map(list, runs)) for runs in tensor.shard.ranges],
            "placements": list(tensor.shard.placements),
            "mesh": list(tensor.shard.mesh),
            "rank": tensor.shard.rank,
        }
    if statistics is not None and tensor.name in statistics:
        one = statistics[tensor.name]
        document["stats"] = {
            "min": one.minimum,
            "max": one.maximum,
            "mean": one.mean,
            "std": one.std,
            "zeros": one.zeros,
            "nan": one.nan,
            "inf": one.infinite,
        }
    return document


# verify ---------------------------------------------------------------------------------------------


def verify_document(
    verifications: Sequence[Verification],
    sealed: Mapping[str, SealResult] = MappingProxyType({}),
    failures: Sequence[CheckpointError] = (),
    *,
    passed: bool | None = None,
) -> dict[str, Any]:
    """Return the document of ``verify``.

    Args:
        verifications: The verdicts.
        sealed: What became of manifests, by path.
        failures: What could not be looked at.
        passed: Whether the exit status is 0, if that is known: an unsafe checkpoint does not pass.
    """
    is_valid = all(verification.is_valid for verification in verifications)
    return {
        "schema": "ckpttool.verify/1",
        "verdict": "valid" if is_valid else "invalid",
        **({} if passed is None else {"passed": passed}),
        "checkpoints": [_verification(one, sealed.get(one.path)) for one in verifications],
        **({"errors": [{"path": one.path, "message": one.reason} for one in failures]} if failures else {}),
    }


def unread_rows(unread: Mapping[str, str], **more: str) -> dict[str, list[dict[str, str]]]:
    """Return the ``unread`` entry of a document, empty if every model was read."""
    rows = [{"path": path, "message": why, **more} for path, why in unread.items()]
    return {"unread": rows} if rows else {}


def _verification(verification: Verification, sealed: SealResult | None) -> dict[str, Any]:
    document: dict[str, Any] = {
        "path": verification.path,
        "format": verification.format,
        "variant": verification.variant,
        "verdict": "valid" if verification.is_valid else "invalid",
        "safety": verification.safety.value,
        "bytes": verification.nbytes,
        "checks": [
            {"name": check.name, "status": check.status.value, "detail": check.detail}
            for check in verification.checks
        ],
        "findings": [finding_document(one) for one in verification.findings],
    }
    if verification.survival is not None:
        document["survival"] = survival_document(verification.survival)
    if sealed is not None:
        is_written = bool(sealed.files) and not sealed.was_there
        files = list(sealed.files)
        document["manifest"] = {"written": is_written, "files": files, "refused": sealed.refused}
    return document


# convert, merge -------------------------------------------------------------------------------------


def convert_document(converted: Converted) -> dict[str, Any]:
    """Return the document of ``convert``, ``merge`` and ``average``."""
    sources = converted.sources
    return {
        "schema": "ckpttool.convert/1",
        "source": sources[0] if len(sources) == 1 else [*sources],
        "target": converted.target,
        "format": converted.format,
        "tensors": converted.tensors,
        "bytes": converted.nbytes,
        "verified": converted.verified,
        "dry_run": converted.dry_run,
        "dropped": [{"path": one.path, "why": one.why} for one in converted.dropped],
        "notes": [*converted.notes],
        "mismatches": [*converted.mismatches],
        "safety": [finding_document(one) for one in converted.safety],
        **({"shares": [*converted.shares]} if converted.shares else {}),
    }


def salvage_document(done: Salvaged) -> dict[str, Any]:
    """Return the document of ``salvage``: that of the conversion, with what is lost."""
    return {
        **convert_document(done.converted),
        "schema": "ckpttool.salvage/1",
        "source": done.source,
        "proven": done.proven,
        "unproven": done.unproven,
        "names_all": done.names_all,
        "damage": [finding_document(one) for one in done.damage],
        "survival": survival_document(done.survival),
        "lost": [
            {"name": one.name, "why": one.why, "bytes": one.nbytes, "role": one.role.value}
            for one in done.lost
        ],
    }


def survival_document(survival: Survival) -> dict[str, Any]:
    """Return how much is saved of a damaged checkpoint, as the documents have it."""
    amounts = {role.value: getattr(survival, role.value)._asdict() for role in Role}
    return {**amounts, "rng_state_lost": survival.rng_state_lost, "names_all": survival.names_all}


def log_document(logged: Logged) -> dict[str, Any]:
    """Return the document of ``log``."""
    return {
        "schema": "ckpttool.log/1",
        "target": logged.target,
        "checkpoints": [
            {"path": one.path, "name": one.name, "recorded": one.is_new, **one.facts}
            for one in logged.checkpoints
        ],
        "errors": [{"path": path, "message": reason} for path, reason in logged.errors.items()],
    }


# diff -----------------------------------------------------------------------------------------------


_DIFF_SCHEMA = "ckpttool.diff/1"
_STATISTICS = (
    *("max_abs", "max_rel", "l2", "cosine", "count", "size"),
    *("mean_abs", "relative", "non_finite", "norms", "where", "at"),
)
_ZEROS = ("max_abs", "max_rel", "l2", "count", "mean_abs", "relative", "non_finite")
"""Numbers that are 0 where the values are equal."""


def diff_document(difference: Difference) -> dict[str, Any]:
    """Return the document of ``diff`` for two checkpoints."""
    return {"schema": _DIFF_SCHEMA, **_difference_body(difference)}


def _difference_body(difference: Difference) -> dict[str, Any]:
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
        "changed": [
            {
                "name": one.name,
                "kind": one.kind,
                **_change_statistics(one),
                "how": one.how,
                "a": _tensor_facts(one.a),
                "b": _tensor_facts(one.b),
            }
            for one in difference.changed
        ],
        "values": [_value_change(one) for one in difference.values],
        "reported": [_value_change(one) for one in difference.reported],
        "rules": dict(difference.rules),
        "notes": list(difference.notes),
        "broken": [{"name": one.name, "side": one.side.value, "why": one.why} for one in difference.broken],
        "not_compared": [*difference.not_compared, *(one.text for one in difference.undecided)],
        "tolerance": {
            "rtol": difference.tolerance.rtol,
            "atol": difference.tolerance.atol,
            "bitwise": difference.tolerance.bitwise,
        },
        "sides": {"a": _side_description(difference.a), "b": _side_description(difference.b)},
    }


def _change_statistics(change: Change) -> dict[str, Any]:
    """Return the numbers: those of equal values if only the type differs, null if shapes differ."""
    from ckpttool.ops.difference import distances
    from ckpttool.weights.comparing.statistics import relative_change

    statistics = change.statistics
    if statistics is None:
        zero = 0 if change.kind == "dtype" else None
        return dict.fromkeys(_STATISTICS) | dict.fromkeys(_ZEROS, zero)
    distance = distances(change)
    return {
        "max_abs": distance and distance.max_abs,
        "max_rel": distance and distance.max_rel,
        "l2": distance and distance.l2,
        "cosine": distance and distance.cosine,
        "count": statistics.count,
        "size": statistics.size,
        "mean_abs": distance and distance.mean_abs,
        "relative": distance and relative_change(distance),
        "non_finite": statistics.non_finite,
        "norms": distance and [distance.norm_a, distance.norm_b],
        "where": list(statistics.where),
        "at": [_json_element(statistics.at_a), _json_element(statistics.at_b)],
    }


def _json_element(value: object) -> object:
    """Return an element as JSON has it: a complex number as its two parts."""
    return [value.real, value.imag] if isinstance(value, complex) else value


def _tensor_facts(facts: Facts) -> dict[str, Any]:
    return {
        "name": facts.name,
        "role": facts.role.value,
        "dtype": facts.dtype.name,
        "shape": list(facts.shape),
        "bytes": facts.nbytes,
    }


def _value_change(change: ValueChange) -> dict[str, Any]:
    """Return a value on both sides; a side that lacks it is null, and named under ``absent``."""
    from ckpttool.ops.difference import ABSENT

    sides = {"a": change.a, "b": change.b}
    document = {
        "path": change.path,
        **{name: None if side is ABSENT else side for name, side in sides.items()},
    }
    missing = [name for name, side in sides.items() if side is ABSENT]
    return {**document, "absent": missing[0]} if missing else document


def _side_description(side: Described) -> dict[str, Any]:
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
        "schema": _DIFF_SCHEMA,
        "equal": drift.equal,
        "checkpoints": [
            {
                "path": one.path,
                "epoch": one.epoch,
                "step": one.step,
                "loss": one.loss,
                "norm": one.norm,
            }
            for one in drift.points
        ],
        "steps": [
            {
                "l2": one.l2,
                "relative": one.relative,
                "max_abs": one.max_abs,
                "largest": one.largest,
                "cosine": one.cosine,
                **_difference_body(one.difference),
            }
            for one in drift.steps
        ],
    }


# list, latest ---------------------------------------------------------------------------------------


def list_document(listing: Listing, cadences: Mapping[str, Cadence] = MappingProxyType({})) -> dict[str, Any]:
    """Return the document of ``list``; ``cadences`` say by key how often series are saved."""
    return {
        "schema": "ckpttool.list/1",
        "checkpoints": [_list_row(one) for one in listing.checkpoints],
        "series": [_list_series(one, cadences.get(one.key)) for one in listing.series],
        "runs": [_list_run(one) for one in listing.runs],
        **unread_rows(listing.unread),
    }


def _list_row(listed: ListedCheckpoint) -> dict[str, Any]:
    from ckpttool.core.numbers import utc_time

    entry = listed.entry
    about = {} if listed.remark.is_empty else {"about": _remark(listed.remark)}
    return {
        "path": entry.path,
        "format": entry.format,
        "group": entry.group,
        "run": entry.run,
        "complete": entry.is_complete,
        "epoch": entry.epoch,
        "step": entry.step,
        "loss": entry.loss,
        "metrics": dict(entry.metrics),
        "bytes": entry.nbytes,
        "modified": utc_time(entry.modified_ns),
        "protected": list(listed.protected),
        "fault": entry.fault,
        "state": listed.state,
        "safety": entry.safety.value,
        "danger": entry.danger,
        "newest": listed.is_newest,
        "best": listed.is_best,
        "granularity": entry.granularity.value if entry.granularity else None,
        "files": entry.files,
        "kept": None if listed.kept is None else list(listed.kept),
        "slims": listed.is_slimmed,
        **({"parts": [part.path for part in entry.parts]} if entry.parts else {}),
        **about,
    }


def _list_series(series: ListedSeries, cadence: Cadence | None) -> dict[str, Any]:
    newest, best = series.newest, series.best
    document: dict[str, Any] = {
        "key": series.key,
        "format": series.format,
        "count": len(series.checkpoints),
        "bytes": series.nbytes,
        "epochs": None if series.epochs is None else list(series.epochs),
        "steps": None if series.steps is None else list(series.steps),
        "newest": newest.entry.path if newest else None,
        "best": best.entry.path if best else None,
    }
    if cadence is not None:
        document["cadence"] = {
            "interval": cadence.interval,
            "steps": cadence.steps,
            "epochs": cadence.epochs,
            "pauses": cadence.pauses,
            "bytes": cadence.nbytes,
            "bytes_a_day": cadence.daily_bytes,
            "free_bytes": cadence.free_bytes,
            "seconds_until_full": cadence.seconds_until_full,
            "save_time": cadence.save_time,
            "share_of_time": cadence.share_of_time,
            "best_interval": cadence.best_interval,
            "best_steps": cadence.best_count(cadence.steps),
            "best_epochs": cadence.best_count(cadence.epochs),
        }
    return document


def _list_run(run: ListedRun) -> dict[str, Any]:
    return {
        "path": run.path,
        "count": len(run.checkpoints),
        "bytes": run.nbytes,
        "series": [*dict.fromkeys(one.entry.group for one in run.checkpoints)],
        "best": run.best.entry.path if run.best else None,
        "hyper_parameters": dict(run.hyper_parameters),
    }


def latest_document(latest: Latest) -> dict[str, Any]:
    document: dict[str, Any] = {
        "schema": "ckpttool.latest/1",
        "path": latest.entry.path if latest.entry else None,
        "epoch": latest.entry.epoch if latest.entry else None,
        "step": latest.entry.step if latest.entry else None,
        "safety": latest.entry.safety.value if latest.entry else None,
        "resume": _resume(latest.resume) if latest.resume else None,
        "passed_over": [{"path": one.path, "why": one.message} for one in latest.passed_over],
    }
    if latest.best is not None:
        document |= {"best": latest.best, "value": latest.value}
    if latest.waited_for:
        document |= {"waited": round(latest.waited, 3), "waited_for": [*latest.waited_for]}
    return document


# prune ----------------------------------------------------------------------------------------------


def prune_document(pruned: Pruned) -> dict[str, Any]:
    return {
        "schema": "ckpttool.prune/1",
        "dry_run": pruned.dry_run,
        "declined": pruned.declined,
        "policy": pruned.plan.rules,
        "freed_bytes": pruned.freed_bytes,
        "trash": pruned.trash or None,
        "trashed_bytes": pruned.trashed_bytes,
        "excess_bytes": sum(one.nbytes for one in pruned.plan.excess),
        "groups": [_prune_group(one) for one in pruned.plan.groups],
        "errors": [_problem(one) for one in pruned.problems],
        "settled": {"finished": list(pruned.finished), "put_back": list(pruned.put_back)},
    }


def _prune_group(group: GroupPlan) -> dict[str, Any]:
    from ckpttool.runs.pruning.protections import foreign_files

    return {
        "key": group.key,
        "keep": [
            {
                "path": one.entry.path,
                "reasons": list(one.reasons),
                "safety": one.entry.safety.value,
            }
            for one in group.keep
        ],
        "remove": [
            {
                "path": entry.path,
                "bytes": entry.contents.nbytes,
                "unfitting": group.unfitting.get(entry.path),
                "safety": entry.safety.value,
                "strangers": list(foreign_files(entry)),
            }
            for entry in group.remove
        ],
        "slim": [{"path": entry.path, "freed_bytes": group.slim_bytes(entry)} for entry in group.slim],
        "whole": [{"path": path, "reason": reason} for path, reason in group.whole.items()],
        "skipped": group.skipped,
        "policy": None if group.policy is None else group.policy.rules,
        "failed": group.failed,
        "run": None if group.rank is None else group.rank.reason,
        "excess": None if group.excess is None else str(group.excess),
        "excess_bytes": 0 if group.excess is None else group.excess.nbytes,
    }


def explain_document(planned: PrunePlan, explanation: Explanation) -> dict[str, Any]:
    """Return the document of ``prune --explain``: that of a dry run, with what was asked for."""
    from ckpttool.runs.pruning.prune import Pruned

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
        "slims": explanation.slims,
        "place": list(explanation.place),
        "reasons": list(explanation.reasons),
        "against": list(explanation.against),
    }
    return {**prune_document(pruned), "explained": explained}


def empty_document(emptied: Sequence[EmptiedTrash]) -> dict[str, Any]:
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


# rename, undo, pin ----------------------------------------------------------------------------------


def rename_document(renamed: RenameResult) -> dict[str, Any]:
    return {
        "schema": "ckpttool.rename/1",
        "dry_run": renamed.dry_run,
        "declined": renamed.declined,
        "renames": [{"from": old, "to": new} for old, new in renamed.renames],
        "errors": [_problem(one) for one in renamed.problems],
        "warnings": list(renamed.planned.warnings),
    }


def copy_document(copied: Copied) -> dict[str, Any]:
    pruned = copied.pruned
    return {
        "schema": "ckpttool.copy/1",
        "destination": copied.destination,
        "dry_run": copied.dry_run,
        "complete": copied.is_complete,
        "checkpoints": [
            {
                "path": one.path,
                "target": one.target,
                "status": one.status.value,
                "bytes": one.nbytes,
                "sent_bytes": one.sent_bytes,
                "reason": one.why,
            }
            for one in copied.checkpoints
        ],
        "left_out": list(copied.left_out),
        "pruned": None if pruned is None else prune_document(pruned),
        "errors": [_problem(one) for one in copied.problems],
    }


def watch_document(event: WatchEvent, moment: str) -> dict[str, Any]:
    """Return the document of one event, of which ``watch`` prints a line each."""
    return {
        "schema": "ckpttool.watch/1",
        "time": moment,
        "directory": event.directory,
        "path": event.path,
        "step": event.step,
        "status": event.status.value,
        "to": event.to,
        "bytes": event.nbytes,
        "safety": event.safety,
        "reason": event.reason,
    }


def undo_document(done: Undone) -> dict[str, Any]:
    return {
        "schema": "ckpttool.undo/1",
        "dry_run": done.dry_run,
        "id": done.identity,
        "command": None if done.kind is None else {"trash": "prune"}.get(done.kind, done.kind),
        "restored": [{"path": one.path, "was": one.was} for one in done.restored],
        "pointers": list(done.pointers),
        "errors": [_problem(one) for one in done.problems],
    }


def pin_document(
    pins: Sequence[Pin], changed: Sequence[str] = (), void: Sequence[tuple[Pin, str]] = ()
) -> dict[str, Any]:
    """Return the document: what is pinned, what of it isn't there, what was changed, what pins nothing."""
    from ckpttool.transaction.paths import shown

    document: dict[str, Any] = {
        "schema": "ckpttool.pin/1",
        "pinned": [pinned.path for pinned in pins],
        "missing": [pinned.path for pinned in pins if not pinned.is_there],
        "changed": [*changed],
    }
    about = {one.path: _remark(one.remark) for one in pins if not one.remark.is_empty}
    if about:
        document["about"] = about
    if void:
        document["void"] = [{"file": shown(one.file), "name": one.name, "why": why} for one, why in void]
    return document


def _remark(remark: Remark) -> dict[str, Any]:
    until = None if remark.until is None else remark.until.isoformat()
    return {"note": remark.note, "until": until, "facts": dict(remark.facts)}


# config ---------------------------------------------------------------------------------------------


def config_document(document: ConfigDocument | None, entries: Sequence[ConfigEntry]) -> dict[str, Any]:
    """Return the document: which configuration is in force, whether it is trusted, and its keys."""
    is_trusted = None if document is None else document.trust_doubt() is None
    values = [
        {
            "table": one.table,
            "rule": one.rule,
            "key": one.key,
            "value": one.value,
            "source": "file" if one.is_from_file else "default",
            "refused": one.needs_trust and not is_trusted,
        }
        for one in entries
    ]
    path = None if document is None else document.path
    return {"schema": "ckpttool.config/1", "path": path, "trusted": is_trusted, "values": values}


_MAKERS: Mapping[str, Callable[[Any], dict[str, Any]]] = {
    "Card": card_document,
    "Converted": convert_document,
    "Copied": copy_document,
    "Difference": diff_document,
    "Inspection": lambda one: inspect_document([one]),
    "Latest": latest_document,
    "Listing": list_document,
    "Pinning": lambda done: pin_document(done.pins, done.changed),
    "Pruned": prune_document,
    "RenameResult": rename_document,
    "Salvaged": salvage_document,
    "Logged": log_document,
    "Undone": undo_document,
    "Verification": lambda one: verify_document([one], passed=one.passes(strict=False)),
    "Verifications": lambda all_: verify_document(
        all_.checkpoints, failures=all_.errors, passed=all_.passes(strict=False)
    ),
}
"""Makes the document of each result, by the name of its class, which may not be imported yet."""
