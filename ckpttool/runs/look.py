"""Opening one checkpoint for a survey: its entry, the paths that it needs, and full reads."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from datetime import datetime
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple

from ckpttool.containers.zip_reader import by_directory
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
from ckpttool.formats.discovery import names_indexed_above, sets_in, unit_of
from ckpttool.formats.foreign import unread_reason
from ckpttool.formats.interface import MANIFEST_SUFFIXES, Format, Probe, Unit, scan
from ckpttool.formats.opening import open_probe, open_unit
from ckpttool.formats.step_directory import STEP_VARIANTS
from ckpttool.ops.verdict import OPTIONAL, Safety, safety_of
from ckpttool.runs.entry import Entry, Number, state_part
from ckpttool.runs.reasons import Code, Reason, fault
from ckpttool.runs.saves import fault_beside
from ckpttool.storage import fs
from ckpttool.storage.fs import Snapshot
from ckpttool.storage.work import Progress as Progress
from ckpttool.storage.work import answer_of, not_the_same, path_everywhere, submitted
from ckpttool.storage.work import no_progress as no_progress
from ckpttool.transaction.files import Contents, contents
from ckpttool.transaction.paths import shown

if TYPE_CHECKING:
    from concurrent.futures import Executor


_MOST_LINKS = 40
"""Limit on a chain of symlinks, as in Linux; a longer one is taken for a cycle."""


def needed_paths(
    unit: Unit, files: Contents, checkpoint: Checkpoint | None, *, all: bool = False
) -> tuple[str, ...]:
    """Return the paths that a checkpoint needs besides its own files.

    ``checkpoint`` is None if it can't be opened. With ``all``, its own files are included, as files of other
    checkpoints may be among them.
    """
    # These are files that an index names in other directories, and symlinks, whose targets must not be
    # removed with another checkpoint.
    directory = os.path.dirname(unit.path)
    own = {file.path: fs.normpath(os.path.join(directory, file.path)) for file in files.files}
    paths = set(own.values())
    read = () if checkpoint is None else (file.path for file in checkpoint.files)
    foreign = (path for path in read if all or fs.normpath(path) not in paths)
    links = (own[path] for path in sorted(files.symlinks))
    shared = (os.path.join(directory, name) for name in unit.shared)
    return tuple(dict.fromkeys((*shared, *foreign, *links)))


def resolved_links(path: str, snapshot: Snapshot) -> Iterator[str]:
    """Yield each symlink on the way of a path, and its target at last, all with resolved directories."""
    if not fs.place_of(path).has_links:
        yield fs.normpath(path)
        return
    # ``os.path.realpath`` gives only the target; here, each link on the way is needed, too, as removing one
    # breaks the path as well. Names still to be resolved are a stack: a link's target is pushed onto it.
    waiting = [part for part in reversed(fs.abspath(path).split(os.sep)) if part]
    reached, links = os.sep, 0
    while waiting:
        part = waiting.pop()
        if part in (os.curdir, os.pardir):
            reached = os.path.dirname(reached) if part == os.pardir else reached
            continue
        current = os.path.join(reached, part)
        try:
            target = snapshot.readlink(current)
        except ValueError:  # a NUL in it
            reached = current
            continue
        except OSError as error:
            # No symlink, missing, or in an unreadable directory, which has none of the surveyed checkpoints.
            if error.errno == errno.EINVAL or fs.is_absence(error) or snapshot.is_closed(current):
                reached = current
                continue
            raise from_os_error(error, current) from error
        yield current
        links += 1
        if links > _MOST_LINKS:
            return
        if os.path.isabs(target):
            reached = os.sep
        waiting += [part for part in reversed(target.split(os.sep)) if part]
    yield reached


def all_places(paths: Iterable[str], snapshot: Snapshot) -> set[str]:
    """Return the targets of paths and all symlinks on their way; each directory is resolved once."""
    places: set[str] = set()
    # Shards are usually in one directory, and resolving it takes a system call for each component.
    real: dict[str, str] = {}
    for path in paths:
        above, name = os.path.split(path)
        if above not in real:
            *links, real[above] = resolved_links(above or os.curdir, snapshot)
            places.update(links)
        place = os.path.join(real[above], name)
        places.update(resolved_links(place, snapshot) if snapshot.islink(place) else (place,))
    return places


def listed_by_indexes_above(
    root: str, snapshot: Snapshot, on_error: Callable[[CheckpointError], object]
) -> dict[str, str]:
    """Return the places below a directory that indexes above it list, with the index."""
    named = names_indexed_above(root, on_error)
    return {place: index for path, index in named.items() for place in resolved_links(path, snapshot)}


def listed_by_indexes_in(directory: str, real: str, removed: Collection[str]) -> dict[str, str]:
    """Return the places that indexes in a directory list now, with the index.

    Args:
        directory: The directory.
        real: Its real path.
        removed: Paths of checkpoints to be removed, whose indexes don't count.
    """
    names = {os.path.basename(path) for path in removed}
    try:
        sets = sets_in(directory, scan(directory))
    except CheckpointError:  # then nothing can be removed there, either
        return {}
    kept = (unit for unit in sets if os.path.basename(unit.path) not in names)
    return {os.path.join(real, name): unit.path for unit in kept for name in (*unit.members, *unit.shared)}


def needing_path(real: str, contents: Contents, needed: Mapping[str, str]) -> str | None:
    """Return the path that needs a file of a checkpoint, or None; ``real`` is its directory's real path."""
    for path in (*(file.path for file in contents.files), *contents.directories):
        if (user := needed.get(os.path.join(real, path))) is not None:
            return user
    return None


def look_at(unit: Unit, *, holds_others: bool = False) -> Entry | None:
    """Open a checkpoint and return its entry, with its fault, or None if it has vanished; read no value."""
    try:
        files = contents(os.path.dirname(unit.path) or os.curdir, unit.members)
    except OSError as error:
        failure = from_os_error(error, unit.path)
        return None if isinstance(failure, NotFound) else _unsound_entry(unit, Contents(), failure)
    return _entry_from(unit, files, lambda: _open(unit), holds_others=holds_others)


def look_at_path(path: str) -> tuple[Unit | None, Entry | None, str | None]:
    """Return unit and entry of a file, or the reason why a model is not read.

    The same as ``unit_at`` and ``look_at``, but the file is opened once.
    """
    directory, name = os.path.split(path)
    try:
        # Statuses are read before the file is opened: if it changes in between, later checks notice that.
        files = contents(directory or os.curdir, (name,))
    except OSError as error:
        raise from_os_error(error, path) from error
    with Probe(path) as probe:
        unit = unit_of(probe)
        if unit is None:
            return None, None, unread_reason(probe)
        # Some formats open a unit in another way than a path.
        opens_alone = unit.format is None or type(unit.format).open_unit is Format.open_unit
        if unit.path == path and unit.members == (name,) and opens_alone:
            return unit, _entry_from(unit, files, lambda: _open_from(probe, unit.format)), None
    return unit, look_at(unit), None


def _entry_from(
    unit: Unit, files: Contents, opened: Callable[[], Checkpoint], *, holds_others: bool = False
) -> Entry | None:
    # A survey gives no verdict, so zips in stores are opened by their directories alone. Failed requests
    # below the directory are raised at the end.
    try:
        above = os.path.dirname(unit.path)
        with (
            memory_checked(unit.path),
            by_directory(),
            fs.raising_failed_requests(above),
            opened() as checkpoint,
        ):
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
    # A checkpoint that ends early, or is still empty, may be being written. Other damage is not a matter of
    # time, and a file that can't be read may be readable later.
    is_empty = bool(files.files) and not files.nbytes
    if not isinstance(failure, DamagedCheckpoint | NotACheckpoint):
        kind = Code.UNREADABLE
    elif isinstance(failure, Truncated) or is_empty:
        kind = Code.INCOMPLETE
    else:
        kind = Code.DAMAGED
    fields = parse_name(os.path.basename(unit.path))
    danger = first_error(failure.safety) if isinstance(failure, DamagedCheckpoint) else None
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
        needed_paths=needed_paths(unit, files, None),
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
        danger=first_error(checkpoint.safety),
        is_complete=checkpoint.complete,
        fault=structural_fault,
        epoch=fields.epoch if inside[0] is None else inside[0],
        step=fields.step if inside[1] is None else inside[1],
        counts_inside=inside,
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
        content_summary=_content_summary(checkpoint),
        needed_paths=needed_paths(unit, files, checkpoint, all=holds_others),
        state=state_part(unit, files, checkpoint),
    )


def _structural_fault(checkpoint: Checkpoint) -> Reason | None:
    kind = Code.DAMAGED if checkpoint.complete else Code.INCOMPLETE
    if (error := first_error(checkpoint.findings)) is not None:
        return fault(kind, error)
    return None if checkpoint.complete else fault(kind, "a part of it is missing")


def _content_summary(checkpoint: Checkpoint) -> str:
    """Return a description that distinguishes checkpoints of one name."""
    weights = sum(tensor.role is Role.WEIGHTS for tensor in checkpoint.tensors)
    tensors = counted(weights or len(checkpoint.tensors), "tensor") + (" of weights" if weights else "")
    return f"{checkpoint.granularity.value}, {tensors}, {counted(checkpoint.parameters, 'parameter')}"


def _linked_bytes(unit: Unit, files: Contents) -> int | None:
    """Return the bytes of a checkpoint, targets of symlinks included; None if it has no symlinks."""
    if not files.symlinks:
        return None
    directory = os.path.dirname(unit.path)
    paths = [os.path.join(directory, file.path) for file in files.files]
    return sum(fs.getsize(path) for path in paths if fs.exists(path) and not path.endswith(MANIFEST_SUFFIXES))


def _counts_inside(training: TrainingState) -> tuple[Number | None, int | None]:
    """Return the recorded epoch and step; None if they are from the name, negative or not finite."""
    # Some programs record a negative count after the training's end; the one in the name is better then.
    epoch, step = training.epoch, training.step
    if training.origin_of("epoch").kind == "name" or epoch is None or not math.isfinite(epoch) or epoch < 0:
        epoch = None
    if training.origin_of("step").kind == "name" or step is None or step < 0:
        step = None
    return epoch, step


def _own_loss(training: TrainingState, fields: NameFields) -> float | None:
    """Return the training loss, unless it was taken from another metric or an earlier step."""
    origin = training.origin_of("loss")
    if origin.kind == "name":
        return fields.metrics.get("loss")
    # A loss with the origin of a metric is that metric, and one of an earlier step isn't of this checkpoint.
    words = training.origin.get("loss", "")
    is_other = any(words == training.origin.get(f"metrics.{metric}") for metric in training.metrics)
    return None if is_other or origin.is_earlier_step else training.loss


def _logged_as(checkpoint: Checkpoint) -> int | None:
    """Return the step by which Lightning's loggers recorded the values at a checkpoint; None if unknown.

    Source: lightning ``pytorch/loops/training_epoch_loop.py`` (``_batches_that_stepped``),
    ``pytorch/trainer/connectors/logger_connector/logger_connector.py`` (``log_metrics``).
    """
    # Loggers count batches from 0. A save at the end of an epoch follows the count of its last batch, a save
    # after a batch or a validation precedes it. If the optimizers have made as many steps as batches are
    # counted, this batch was counted, and was logged as one less; if one more, it wasn't yet.
    metadata = _own_metadata(checkpoint)
    batches: object = metadata
    for key in ("loops", "fit_loop", "epoch_loop.state_dict", "_batches_that_stepped"):
        batches = batches.get(key) if isinstance(batches, Mapping) else None
    steps, optimizers = metadata.get("global_step"), metadata.get("optimizer_states")
    if optimizers is None and not metadata.get("callbacks"):  # weights alone were saved
        return None
    if optimizers is None:
        optimizers = [None]  # slimmed; with several optimizers, the counts below don't match
    if not isinstance(batches, int) or not isinstance(optimizers, list) or not optimizers:
        return None
    if not isinstance(steps, int) or not steps or steps % len(optimizers):
        stepped = -1
    else:
        stepped = steps // len(optimizers)  # batches that made steps of all optimizers
    return {batches: batches - 1, batches + 1: batches}.get(stepped)


def first_error(findings: Iterable[Finding]) -> str | None:
    """Return the message of the first error, with its place."""
    first = next((one for one in findings if one.severity is Severity.ERROR), None)
    return None if first is None else first.placed_message


def signature(checkpoint: Checkpoint) -> str:
    """Return a hash of the names and shapes of its weights, which is equal for a series."""
    import hashlib

    # Other tensors, such as an optimizer's history, may grow from save to save, and count only without
    # weights. In a step's directory, names begin with the name of the file of weights, which is left out: a
    # single file has none.

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
    """Yield the best paths that Lightning's callbacks recorded."""
    callbacks = _own_metadata(checkpoint).get("callbacks")
    for state in callbacks.values() if isinstance(callbacks, Mapping) else ():
        best = state.get("best_model_path") if isinstance(state, Mapping) else None
        if isinstance(best, str) and best:
            yield best


def _own_metadata(checkpoint: Checkpoint) -> Mapping[str, object]:
    return {} if checkpoint.derives_metadata else checkpoint.metadata


def _seconds(when: str | None) -> float | None:
    """Return an ISO 8601 time in seconds since 1970, without a zone taken for local time; None if invalid."""
    if when is None:
        return None
    try:
        return datetime.fromisoformat(when.strip().replace("Z", "+00:00")).timestamp()
    except (ValueError, OverflowError, OSError):
        return None


FULL_CHECKS = ("structure", "checksum", "values")
"""Checks for intact checkpoints; the safety of loading isn't one of them."""

NOT_FINITE = ("nan", "infinity")
"""Codes of findings for values that aren't finite."""


class FullRead(NamedTuple):
    """Result of reading a checkpoint in full.

    Attributes:
        fault: Its fault; None if it is intact, and holds no NaN.
        is_finite: Whether its weights hold neither NaN nor infinities.
        damage: The fault, unless it is NaN outside the weights: in an optimizer's state, or a single value.
    """

    fault: Reason | None
    is_finite: bool
    damage: Reason | None = None


class FullReader:
    """Reads checkpoints in full, each once while its files are unchanged."""

    def __init__(self, jobs: int | None = None, progress: Progress = no_progress) -> None:
        self._jobs = jobs
        self._progress = progress
        self._reads: dict[str, tuple[Contents, FullRead]] = {}

    def read(self, entry: Entry) -> FullRead:
        """Return the result of reading a checkpoint in full."""
        if entry.parts:
            parts = [part for part in entry.parts if part.fault is None]  # other parts aren't needed
            return _read_of_save(entry, [(part, self.read(part)) for part in parts])
        read = self.recall(entry)
        if read is None:
            read = read_all(entry, self._jobs, self._progress)
            if read.fault is None or read.fault.code is not Code.UNREADABLE:  # it may be readable later
                self.remember(entry, read)
        return read

    def recall(self, entry: Entry) -> FullRead | None:
        """Return the cached result for a checkpoint whose files are unchanged; None if there is none."""
        if entry.parts:
            known = [(part, self.recall(part)) for part in entry.parts if part.fault is None]
            reads = [(part, read) for part, read in known if read is not None]
            return _read_of_save(entry, reads) if len(reads) == len(known) else None
        contents, read = self._reads.get(entry.path, (None, None))
        return read if contents == entry.contents else None

    def remember(self, entry: Entry, read: FullRead) -> None:
        """Store a result that was obtained elsewhere."""
        self._reads[entry.path] = entry.contents, read


def read_in_full(entry: Entry, jobs: int | None = None, progress: Progress = no_progress) -> Reason | None:
    """Return the fault that a full read of a checkpoint finds; None if it is intact."""
    return read_all(entry, jobs, progress).fault


def read_each_in_full(
    entries: Sequence[Entry],
    jobs: int | None = None,
    progress: Progress = no_progress,
    executor: Executor | None = None,
) -> Iterator[Reason | None]:
    """Yield the fault of each checkpoint after a full read, which an executor may do."""
    if executor is None:
        yield from (read_in_full(entry, jobs, progress) for entry in entries)
        return
    absolute = (replace(one, unit=one.unit._replace(path=path_everywhere(one.unit.path))) for one in entries)
    with closing(submitted(partial(_read_as_worker, jobs=jobs or 1), absolute, executor)) as futures:
        for entry, future in zip(entries, futures, strict=True):
            with progress(entry.name, entry.nbytes):
                answer = answer_of(future, entry.path)
            if isinstance(answer, CheckpointError):
                answer = fault(Code.UNREADABLE, answer.reason)
            yield answer


def _read_of_save(entry: Entry, reads: Sequence[tuple[Entry, FullRead]]) -> FullRead:
    """Return the result for a save from those for its parts."""
    damages = (
        read.damage if part.path == entry.path else fault_beside(part, read.damage, entry)
        for part, read in reads
        if read.damage is not None
    )
    return FullRead(
        next((read.fault for _, read in reads if read.fault is not None), None),
        all(read.is_finite for _, read in reads),
        next(damages, None),
    )


def _read_as_worker(entry: Entry, jobs: int) -> Reason | None:
    # A worker may see another file under the path: sizes show it.
    try:
        seen = contents(entry.directory, entry.unit.members)
    except OSError as failure:
        return fault(Code.UNREADABLE, from_os_error(failure, entry.unit.path).reason)
    if fs.place_of(entry.path).reads_are_free and not seen.has_sizes_of(entry.contents):
        return fault(Code.UNREADABLE, not_the_same(entry.path).reason)
    return read_in_full(entry, jobs)


def read_all(entry: Entry, jobs: int | None = None, progress: Progress = no_progress) -> FullRead:
    """Return the result of reading a checkpoint in full, without a cache."""
    from ckpttool.ops.verify import verify

    # A manifest counts, too, unless the checkpoint was written again since it was made.
    manifests = [file for file in entry.contents.files if file.path.endswith(MANIFEST_SUFFIXES)]
    is_current = any(file.mtime_ns >= entry.modified_ns for file in manifests)
    checks = (*FULL_CHECKS, OPTIONAL) if is_current else FULL_CHECKS
    try:
        with progress(entry.name, entry.nbytes) as advance:
            verdict = verify(entry.unit, only=checks, jobs=jobs, advance=advance)
        special = [finding for finding in verdict.findings if finding.code in NOT_FINITE]
        in_weights = findings_of_weights(entry, special)
    except CheckpointError as failure:
        unreadable = fault(Code.UNREADABLE, failure.reason)
        return FullRead(unreadable, is_finite=False, damage=unreadable)
    if verdict.is_valid:
        return FullRead(None, is_finite=not in_weights)
    errors = [finding for finding in verdict.findings if finding.severity is Severity.ERROR]
    # NaN outside the weights is a fault to report, but no damage: retention and resuming accept it.
    damaging = [finding for finding in errors if finding.code != "nan" or finding in in_weights]
    damage = _damage(damaging) if damaging or not errors else None
    return FullRead(_damage(errors), is_finite=not in_weights, damage=damage)


def _damage(errors: Sequence[Finding]) -> Reason:
    return fault(Code.DAMAGED, first_error(errors) or "")


def findings_of_weights(entry: Entry, findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings about weights of more than one element."""
    # Other content, such as an optimizer's state, may have NaN while the weights are fine; so may a single
    # value, such as a best metric in a buffer.
    findings = list(findings)
    if not findings or entry.unit.format is None:
        return []
    role = Role.WEIGHTS if entry.has_weights else Role.OTHER  # a file with an average alone
    with open_unit(entry.unit.format, entry.unit) as checkpoint:
        weights = [tensor for tensor in checkpoint.tensors if tensor.role is role and tensor.size > 1]
        names = {tensor.shares_with or tensor.name for tensor in weights}  # findings name the owner of a tie
    return [finding for finding in findings if finding.where in names]
