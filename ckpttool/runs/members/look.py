"""A look at a checkpoint: it is opened and closed again, and what it says of itself becomes its entry."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from itertools import takewhile

from ckpttool.containers.zip.zip_reader import by_directory
from ckpttool.core.checkpoint import Checkpoint, TrainingState
from ckpttool.core.errors import (
    CheckpointError,
    DamagedCheckpoint,
    NotACheckpoint,
    NotFound,
    Truncated,
    from_os_error,
    memory_checked,
)
from ckpttool.core.naming import NameFields, parse_name
from ckpttool.core.report import Finding, Severity
from ckpttool.core.tensor import Role
from ckpttool.core.text import counted
from ckpttool.formats import recognition_error
from ckpttool.formats.discovery import unit_of
from ckpttool.formats.foreign import unread_reason
from ckpttool.formats.interface import SIDECARS, Format, Probe, Unit
from ckpttool.formats.opening import open_probe, open_unit
from ckpttool.formats.step_directory import STEP_VARIANTS
from ckpttool.ops.verdict import Safety, safety_of
from ckpttool.runs.members.entry import Entry, Number
from ckpttool.runs.members.needs import needed_paths
from ckpttool.runs.members.state_part import state_part
from ckpttool.runs.reasons import Code, Reason, fault
from ckpttool.storage import fs
from ckpttool.transaction.files import Contents, contents
from ckpttool.transaction.paths import shown


def look_at(unit: Unit, *, holds_others: bool = False) -> Entry | None:
    """Return a checkpoint's entry, or None where it has vanished. What is wrong with it is in the entry.

    It is opened and closed again; no value is read.
    """
    try:
        files = contents(os.path.dirname(unit.path) or os.curdir, unit.members)
    except OSError as error:
        failure = from_os_error(error, unit.path)
        return None if isinstance(failure, NotFound) else _unsound_entry(unit, Contents(), failure)
    return _entry_from(unit, files, lambda: _open(unit), holds_others=holds_others)


def look_for(path: str) -> tuple[Unit | None, Entry | None, str | None]:
    """Return the checkpoint that a file is, and its entry, as ``unit_at`` and ``look_at`` do one by one.

    It is opened once for both. Of what looks like a model and is no checkpoint, the reason is returned.
    """
    directory, name = os.path.split(path)
    try:
        files = contents(directory or os.curdir, (name,))  # before it is opened, so that a change is noticed
    except OSError as error:
        raise from_os_error(error, path) from error
    with Probe(path) as probe:
        unit = unit_of(probe)
        if unit is None:
            return None, None, unread_reason(probe)
        # Not every format opens a unit as it opens a path.
        opens_alone = unit.format is None or type(unit.format).open_unit is Format.open_unit
        if unit.path == path and unit.members == (name,) and opens_alone:
            return unit, _entry_from(unit, files, lambda: _open_from(probe, unit.format)), None
    return unit, look_at(unit), None


def _entry_from(
    unit: Unit, files: Contents, opened: Callable[[], Checkpoint], *, holds_others: bool = False
) -> Entry | None:
    try:
        above = os.path.dirname(unit.path)
        with memory_checked(unit.path), by_directory(), fs.answers_below(above), opened() as checkpoint:
            return _sound_entry(unit, files, checkpoint, holds_others)
    except NotFound:
        return None
    except CheckpointError as failure:
        return _unsound_entry(unit, files, failure)


def _open(unit: Unit) -> Checkpoint:
    if unit.format is not None:
        return open_unit(unit.format, unit)
    with Probe(unit.path) as probe:
        return _open_from(probe, None)


def _open_from(probe: Probe, format: Format | None) -> Checkpoint:
    if format is None:
        raise recognition_error(probe)
    return open_probe(probe, lambda probe: format)


def _unsound_entry(unit: Unit, files: Contents, failure: CheckpointError) -> Entry:
    is_empty = bool(files.files) and not files.nbytes
    if not isinstance(failure, DamagedCheckpoint | NotACheckpoint):
        kind = Code.UNREADABLE
    elif isinstance(failure, Truncated) or is_empty:
        kind = Code.INCOMPLETE  # it lacks its end, and the rest may be right
    else:
        kind = Code.DAMAGED
    fields = parse_name(os.path.basename(unit.path))
    danger = _first_error(failure.safety) if isinstance(failure, DamagedCheckpoint) else None
    return Entry(
        path=shown(unit.path),
        unit=unit,
        format=unit.format.name if unit.format else None,
        contents=files,
        fields=fields,
        safety=Safety.UNSAFE if danger else Safety.UNKNOWN,
        danger=danger,
        is_complete=False,
        fault=fault(kind, failure.reason),
        epoch=fields.epoch,
        step=fields.step,
        saved_at=_seconds(fields.saved_at),
        needs=needed_paths(unit, files, None),
    )


def _sound_entry(unit: Unit, files: Contents, checkpoint: Checkpoint, holds_others: bool) -> Entry:
    training = checkpoint.training
    fields = parse_name(os.path.basename(unit.path))
    inside = _counts_inside(training)
    structural_fault = _structural_fault(checkpoint)
    return Entry(
        path=shown(unit.path),
        unit=unit,
        format=checkpoint.format,
        contents=files,
        fields=fields,
        safety=safety_of(checkpoint.safety),
        danger=_first_error(checkpoint.safety),
        is_complete=checkpoint.complete,
        fault=structural_fault,
        epoch=fields.epoch if inside[0] is None else inside[0],
        step=fields.step if inside[1] is None else inside[1],
        inside=inside,
        saved_at=_seconds(training.saved_at),
        loss=_own_loss(training, fields),
        metrics=training.metrics,
        hyper_parameters=training.hyper_parameters,
        logged_as=_logged_as(checkpoint),
        signature=signature(checkpoint) if structural_fault is None else None,
        granularity=checkpoint.granularity,
        has_weights=any(tensor.role is Role.WEIGHTS for tensor in checkpoint.tensors),
        best_paths=tuple(_best_paths(checkpoint)),
        holds_others=holds_others,
        linked_bytes=_linked_bytes(unit, files),
        holds=_holds(checkpoint),
        needs=needed_paths(unit, files, checkpoint, all=holds_others),
        state=state_part(unit, files, checkpoint),
    )


def _structural_fault(checkpoint: Checkpoint) -> Reason | None:
    kind = Code.DAMAGED if checkpoint.complete else Code.INCOMPLETE
    if (error := _first_error(checkpoint.findings)) is not None:
        return fault(kind, error)
    return None if checkpoint.complete else fault(kind, "a part of it is missing")


def _holds(checkpoint: Checkpoint) -> str:
    """Return in words what tells checkpoints of one name apart."""
    weights = sum(tensor.role is Role.WEIGHTS for tensor in checkpoint.tensors)
    tensors = counted(weights or len(checkpoint.tensors), "tensor") + (" of weights" if weights else "")
    return f"{checkpoint.granularity.value}, {tensors}, {counted(checkpoint.parameters, 'parameter')}"


def _linked_bytes(unit: Unit, files: Contents) -> int | None:
    """Return the bytes of a checkpoint of which parts are symlinks; None where none is."""
    if not files.symlinks:
        return None
    directory = os.path.dirname(unit.path)
    paths = [os.path.join(directory, file.path) for file in files.files]
    return sum(fs.getsize(path) for path in paths if fs.exists(path) and not path.endswith(SIDECARS))


def _counts_inside(training: TrainingState) -> tuple[Number | None, int | None]:
    """Return epoch and step, unless they were taken from the name or are no numbers.

    A negative one is what a framework writes for "not training any more": the name knows better.
    """
    epoch, step = training.epoch, training.step
    if training.origin_of("epoch").kind == "name" or epoch is None or not math.isfinite(epoch) or epoch < 0:
        epoch = None
    if training.origin_of("step").kind == "name" or step is None or step < 0:
        step = None
    return epoch, step


def _own_loss(training: TrainingState, fields: NameFields) -> float | None:
    """Return the training loss, unless another metric or an earlier step stands in for it."""
    origin = training.origin_of("loss")
    if origin.kind == "name":
        return fields.metrics.get("loss")
    words = training.origin.get("loss", "")
    is_other = any(words == training.origin.get(f"metrics.{metric}") for metric in training.metrics)
    return None if is_other or origin.is_earlier_step else training.loss


def _logged_as(checkpoint: Checkpoint) -> int | None:
    """Return the step that Lightning's loggers give to what is measured at a checkpoint.

    They count batches from 0. A save at the end of an epoch comes after its last batch was counted, one that
    follows a batch or a validation before that; how many steps the optimizers made says which.

    Source: lightning ``pytorch/loops/training_epoch_loop.py`` (``_batches_that_stepped``),
    ``pytorch/trainer/connectors/logger_connector/logger_connector.py`` (``log_metrics``).
    """
    metadata = _own_metadata(checkpoint)
    batches: object = metadata
    for key in ("loops", "fit_loop", "epoch_loop.state_dict", "_batches_that_stepped"):
        batches = batches.get(key) if isinstance(batches, Mapping) else None
    steps, optimizers = metadata.get("global_step"), metadata.get("optimizer_states")
    if optimizers is None and not metadata.get("callbacks"):  # weights alone were saved
        return None
    if optimizers is None:
        optimizers = [None]  # slimmed: of several, the counts below would not fit
    if not isinstance(batches, int) or not isinstance(optimizers, list) or not optimizers:
        return None
    if not isinstance(steps, int) or not steps or steps % len(optimizers):
        stepped = -1
    else:
        stepped = steps // len(optimizers)  # batches that made steps of all optimizers
    return {batches: batches - 1, batches + 1: batches}.get(stepped)


def _first_error(findings: Iterable[Finding]) -> str | None:
    """Return what the first error says, and where."""
    first = next((one for one in findings if one.severity is Severity.ERROR), None)
    if first is None:
        return None
    return f"{first.where}: {first.message}" if first.where else first.message


def signature(checkpoint: Checkpoint) -> str:
    """Return a hash of the names and shapes of its weights.

    Checkpoints of one series have the same; what else grows from save to save, such as an optimizer's
    history, doesn't count where there are weights. Nor does, in a step's directory, the file that they lie
    in: it has no name where it is the only one.
    """
    import hashlib

    weights = [tensor for tensor in checkpoint.tensors if tensor.role is Role.WEIGHTS]
    paths = [tensor.path for tensor in weights or checkpoint.tensors]
    if weights and checkpoint.variant in STEP_VARIANTS:
        columns = zip(*(path[:-1] for path in paths), strict=False)
        common = sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))
        paths = [path[common:] for path in paths]
    shapes = (tensor.shape for tensor in weights or checkpoint.tensors)
    text = "\n".join(sorted(f"{path!r}{shape!r}" for path, shape in zip(paths, shapes, strict=True)))
    return hashlib.blake2b(text.encode("utf-8", "backslashreplace"), digest_size=8).hexdigest()


def _best_paths(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield what Lightning's callbacks remember as the best; of ``best_k_models`` only that."""
    callbacks = _own_metadata(checkpoint).get("callbacks")
    for state in callbacks.values() if isinstance(callbacks, Mapping) else ():
        best = state.get("best_model_path") if isinstance(state, Mapping) else None
        if isinstance(best, str) and best:
            yield best


def _own_metadata(checkpoint: Checkpoint) -> Mapping[str, object]:
    return {} if checkpoint.derives_metadata else checkpoint.metadata


def _seconds(when: str | None) -> float | None:
    """Return a time in seconds since 1970; one without a zone is local time, as programs write it."""
    if when is None:
        return None
    try:
        return datetime.fromisoformat(when.strip().replace("Z", "+00:00")).timestamp()
    except (ValueError, OverflowError, OSError):
        return None
