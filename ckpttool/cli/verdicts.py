"""The run of ``verify``: its targets, their settings, and their verdicts."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpttool.cli.output import say_error, say_warning
from ckpttool.cli.progress import ProgressLines
from ckpttool.cli.verify_options import flag_of
from ckpttool.core.errors import CheckpointError, MissingPackage, NotFound, UsageError
from ckpttool.core.result import messages
from ckpttool.formats.interface import MANIFEST_SUFFIXES, Unit, natural_path
from ckpttool.ops.verdict import OPTIONAL, Verification, verify_document
from ckpttool.ops.verify import unreadable
from ckpttool.ops.verify_all import TaskResult, VerifyTask, require_any, size_of, verify_tasks
from ckpttool.storage import fs
from ckpttool.transaction.recovery import current_unit, unaffected_units

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from ckpttool.cli.verify_config import PredictionSettings
    from ckpttool.cli.verify_options import VerifyCommand
    from ckpttool.formats.discovery import Globs
    from ckpttool.ops.manifest_seal import SealResult
    from ckpttool.ops.workload import Part, Sample
    from ckpttool.storage.work import Progress


MISTAKES = frozenset(
    {
        "no-such-model",
        "input-mismatch",
        "input-missing",
        "input-rejected",
        "input-unfit",
        "input-unknown",
        "input-unreadable",
    }
)
"""Findings of a prediction about its inputs, such as an unknown class: errors, not verdicts on the file."""
SECONDS_A_DAY = 86_400
_TRIES = 3
"""Searches of a directory while checkpoints in it are renamed."""


@dataclass(slots=True)
class VerifyOutcome:
    """The outcome of a run, in the order of the paths.

    Attributes:
        verifications: The verdicts.
        failures: Unreadable paths, and missing packages.
        judged: Settings and verdict of each checkpoint, before findings are ignored.
        sealed: Results of writing manifests, by the checkpoints' paths.
        seconds: Duration of each verification, by path.
        unread: Files and directories that look like models and can't be read, with the reasons.
        strict: Whether warnings and unread models fail.
        warnings: Globs without a match in any of the directories, and other warnings.
        share: The part of all checkpoints that was verified; None for all.
        read_in_full: Number of checkpoints read in full, with a sample; else None.
    """

    verifications: list[Verification] = field(default_factory=list)
    failures: list[CheckpointError] = field(default_factory=list)
    judged: list[tuple[PredictionSettings, Verification]] = field(default_factory=list)
    sealed: dict[str, SealResult] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    unread: dict[str, str] = field(default_factory=dict)
    strict: bool = False
    warnings: tuple[str, ...] = ()
    share: Share | None = None
    read_in_full: int | None = None

    @property
    def passed(self) -> bool:
        """Whether every checkpoint passes; if strict, every model must be readable, too."""
        if self.failures or any(one.refused for one in self.sealed.values()):
            return False
        is_all_read = not (self.strict and self.unread)
        return is_all_read and all(one.passes(strict=self.strict) for one in self.verifications)

    def document(self) -> dict[str, Any]:
        """Return its document; that of a part has the position of each checkpoint among all."""
        document = verify_document(self.verifications, self.failures, passed=self.passed)
        for row in document["checkpoints"]:
            if (sealed := self.sealed.get(row["path"])) is not None:
                row["manifest"] = sealed.document()
        if self.unread:
            document["unread"] = messages(self.unread, severity="error" if self.strict else "warning")
        if self.read_in_full is not None:
            document["sampled"] = {"full": self.read_in_full, "of": len(self.verifications)}
        return document if self.share is None else self._with_positions(document, self.share)

    def _with_positions(self, document: dict[str, Any], share: Share) -> dict[str, Any]:
        # A path that the command line names twice has two positions, which its rows take in turn. Positions
        # that no row has taken are of checkpoints that were removed meanwhile. Checkpoints found by a second
        # search sort last; errors of directories, which all parts have, get -1.
        places = {path: iter(positions) for path, positions in share.positions.items()}
        for row, verification in zip(document["checkpoints"], self.verifications, strict=True):
            row["position"] = next(places.get(verification.path, iter(())), share.found)
            for finding, found in zip(row["findings"], verification.findings, strict=True):
                finding["check"] = found.check
        for row in document.get("errors", ()):
            row["position"] = next(places.get(row["path"], iter(())), -1)
        gone = sorted(position for left in places.values() for position in left)
        begin = {"schema": document.pop("schema"), "part": share.part.number, "of": share.part.of}
        whole = {"found": share.found, "gone": gone, "split": share.digest, "strict": self.strict}
        return {**begin, **whole, **document}


def verify_all_with(address: str | None, paths: Sequence[str], command: VerifyCommand) -> VerifyOutcome:
    """Return the verdicts on all checkpoints at some paths, of the executor at an address if there is one."""
    if address is None:
        return verify_all(paths, command)
    from ckpttool.integrations.dask import executor_at

    with executor_at(address) as executor:
        return verify_all(paths, command, executor)


def verify_all(
    paths: Sequence[str], command: VerifyCommand, executor: Executor | None = None
) -> VerifyOutcome:
    """Return the verdicts on all checkpoints at some paths; unreadable ones in a directory are invalid.

    Args:
        command: The options, with those of a configuration.
        executor: Verifies the checkpoints instead of this process.
    """
    outcome = VerifyOutcome(strict=command.strict)
    searched: list[Globs] = []
    lines = ProgressLines()
    targets = [target for path in paths for target in _find_targets(path, command, outcome, searched, lines)]
    unmatched = [globs.unmatched("--exclude") for globs in searched]
    first = unmatched[0] if unmatched else []
    outcome.warnings = tuple(warning for warning in first if all(warning in others for others in unmatched))
    _require_prediction(targets, command)
    known = {target.path for target in targets}
    if command.workload.part is not None:
        outcome.share, targets = _take_part(command.workload.part, targets, command)
    has_work = bool(targets)
    if command.workload.sample is not None:
        targets = _mark_sampled_out(targets, command.workload.sample)
        outcome.read_in_full = 0
    # A training goes on meanwhile: a checkpoint that is renamed between the search and its turn would be
    # missed under both names, so directories are searched again for paths that weren't there before.
    for _ in range(_TRIES):
        with lines.of_all(_work_of(target, command) for target in targets) as progress:
            was_removed = _verify_each(targets, command, executor, outcome, progress)
        if not was_removed:
            break
        again = (
            target
            for path in paths
            if fs.isdir(path)
            for target in _find_targets(path, command, outcome, [], lines)
        )
        targets = [target for target in again if target.path not in known]
        known.update(target.path for target in targets)
    if has_work and not (outcome.verifications or outcome.failures):
        _fail(
            NotFound(
                paths[0],
                "all checkpoints in it were removed or renamed in the meantime; nothing was verified",
            ),
            outcome,
        )
    return outcome


class Share(NamedTuple):
    """The part of all checkpoints that was verified.

    Attributes:
        found: Number of checkpoints in all parts.
        digest: Of all checkpoints and of the options; the same for all parts of a run.
        positions: Positions of its checkpoints among all, by path; one that is named twice has two.
    """

    part: Part
    found: int
    digest: str
    positions: Mapping[str, Sequence[int]]


def _take_part(
    part: Part, targets: Sequence[_VerifyTarget], command: VerifyCommand
) -> tuple[Share, list[_VerifyTarget]]:
    """Return the share of a part, and its targets."""
    # All parts compute the same split from the sizes. The digest of sizes and options proves it at the merge:
    # if a checkpoint was saved between two tasks, their splits differ, and the merge fails.
    from ckpttool.ops.workload import digest_of_work, split

    sizes: dict[str, int] = {}
    positions: dict[str, list[int]] = {}
    for one in targets:
        sizes[one.path] = 0 if isinstance(one.unit, CheckpointError) else size_of(one.unit)
    numbers = split(sizes, part.of)
    for position, one in enumerate(targets):
        if numbers[one.path] == part.number:
            positions.setdefault(one.path, []).append(position)
    others = (command.strict, command.workload.sample, command.write_manifest, command.against)
    asked = (*command.checks, *map(str, others))
    share = Share(part, len(targets), digest_of_work(sizes, asked), positions)
    return share, [one for one in targets if numbers[one.path] == part.number]


def _mark_sampled_out(targets: Sequence[_VerifyTarget], sample: Sample) -> list[_VerifyTarget]:
    """Return the targets, with those outside of the sample marked."""
    # Checkpoints with digests record in them when they were last read in full, and the least recent are
    # chosen; without a record, the day decides.
    from ckpttool.ops.manifest import last_read, record_of
    from ckpttool.ops.workload import choose

    candidates = []
    for one in targets:
        if not isinstance(one.unit, CheckpointError):
            record = record_of(one.unit)
            read_at = None if record is None else last_read(record)
            candidates.append((one.path, size_of(one.unit), read_at))
    chosen = choose(candidates, sample, int(time.time()) // SECONDS_A_DAY)
    return [one._replace(is_sampled_out=one.path not in chosen) for one in targets]


def _work_of(target: _VerifyTarget, command: VerifyCommand) -> int:
    """Return the number of bytes read of a checkpoint, by all passes together."""
    if isinstance(target.unit, CheckpointError) or target.is_sampled_out:
        return 0
    passes = 1
    if command.write_manifest:
        passes += 2  # of its files, and of its tensors
    if OPTIONAL in command.checks and not command.force:
        from ckpttool.ops.digests import content_address

        has_sidecar = any(name.endswith(MANIFEST_SUFFIXES) for name in target.unit.members)
        passes += has_sidecar or any(map(content_address, target.unit.files()))
    if "values" in command.checks:
        from ckpttool.ops.checks import weight_copies

        passes += 2 * sum(1 for _ in weight_copies(target.unit.files()))  # of both sides
    return passes * target.unit.nbytes


def _verify_each(
    targets: Sequence[_VerifyTarget],
    command: VerifyCommand,
    executor: Executor | None,
    outcome: VerifyOutcome,
    progress: Progress,
) -> bool:
    """Add the verdicts on some checkpoints; return whether one was removed or renamed meanwhile."""
    # An error is a verdict, invalid, for a file found in a directory. It is a failure for a path that the
    # user named, for a worker or network that broke, and for a framework that isn't installed: these say
    # nothing about the file.
    was_removed = False
    tasks = [_task_of(one, one.unit, command) for one in targets if not isinstance(one.unit, CheckpointError)]
    with closing(verify_tasks(tasks, executor, progress)) as results:
        for target in targets:
            unit = target.unit if isinstance(target.unit, Unit) else None
            result = (
                TaskResult(error=target.unit) if isinstance(target.unit, CheckpointError) else next(results)
            )
            error = result.error
            is_no_verdict = (
                result.is_lost or target.is_named or not fs.place_of(target.path).errors_concern_files
            )
            if result.verification is not None:
                _add_verdict(target, result.verification, result, command, outcome)
            elif error is not None and (
                is_no_verdict or (target.is_predicted and isinstance(error, MissingPackage))
            ):
                _fail(error, outcome)
            elif error is not None and (unit is None or current_unit(unit) is not None):
                outcome.verifications.append(unreadable(error))
            else:
                say_warning(f"{target.path}: removed or renamed in the meantime; not verified")
                was_removed = True
    return was_removed


def _task_of(target: _VerifyTarget, unit: Unit, command: VerifyCommand) -> VerifyTask:
    settings = target.settings
    return VerifyTask(
        unit=unit,
        only=command.checks,
        strict=command.strict,
        jobs=command.jobs,
        prediction=settings.request if settings else None,
        ignores=tuple(settings.ignores) if settings else (),
        is_named=target.is_named,
        is_sampled_out=target.is_sampled_out,
        seal=command.write_manifest,
        force=command.force,
        against=target.copy,
    )


class _VerifyTarget(NamedTuple):
    """A checkpoint to verify.

    Attributes:
        unit: The checkpoint, or the error of the search.
        settings: Settings of a configuration or for a prediction; None for the usual checks.
        is_named: Whether the command line names it, so that an error isn't a verdict.
        is_sampled_out: Whether the sample leaves it out, so that it isn't read in full.
        copy: Path of a copy to compare with.
    """

    unit: Unit | CheckpointError
    settings: PredictionSettings | None
    is_named: bool
    is_sampled_out: bool = False
    copy: str | None = None

    @property
    def path(self) -> str:
        return self.unit.path

    @property
    def is_predicted(self) -> bool:
        """Return whether a prediction is wanted, whose framework may not be installed."""
        return self.settings is not None and self.settings.request is not None


def _require_prediction(targets: Sequence[_VerifyTarget], command: VerifyCommand) -> None:
    """Raise an error if options of a prediction have no effect."""
    if command.prediction.get("record") and len(targets) > 1:
        raise UsageError(f"--record takes one checkpoint, not {len(targets):,}")
    is_asked = command.predict or any(one.settings and one.settings.request for one in targets)
    if command.prediction and targets and not is_asked:
        flag = flag_of(next(iter(command.prediction)))
        raise UsageError(f"{flag}: no rule asks for a prediction (--predict does)")


def _find_targets(
    path: str, command: VerifyCommand, outcome: VerifyOutcome, searched: list[Globs], progress: Progress
) -> Iterator[_VerifyTarget]:
    from ckpttool.formats.discovery import Globs, Walk, discover
    from ckpttool.transaction.paths import shown

    errors: list[CheckpointError] = []
    globs = Globs(command.exclude, path)
    unread: dict[str, str] = {}
    walk = Walk(
        exclude=globs, max_depth=command.max_depth, on_error=errors.append, on_unread=unread.__setitem__
    )
    try:
        found = []
        with progress(path, None) as advance:
            for unit in discover(path, walk):
                found.append(unit)
                advance(1)
        units = sorted(found, key=lambda unit: natural_path(unit.path))
        outcome.unread |= {one: unread[one] for one in sorted(unread, key=natural_path)}
        if [unit.path for unit in units] != [path]:
            searched.append(globs)
        require_any(path, units, errors)
        units = _drop_interrupted(path, units)
    except CheckpointError as error:
        _fail(error, outcome)
        return
    for unit in units:
        is_named = unit.path == path
        settings = _settings_of(unit.path, command)
        copy = _copy_of(unit.path, path, command.against)
        shown_unit = unit if is_named else unit._replace(path=shown(unit.path))
        yield _VerifyTarget(shown_unit, settings, is_named, copy=copy)
    for one in errors:
        yield _VerifyTarget(one, None, False)


def _copy_of(unit: str, path: str, copy: str | None) -> str | None:
    """Return the path of the copy of a checkpoint that was found at or below ``path``."""
    if copy is None or unit == path:
        return copy
    relative = os.path.relpath(fs.abspath(unit), fs.abspath(path)).replace(os.sep, "/")
    return f"{copy.rstrip('/')}/{relative}"


def _drop_interrupted(path: str, units: list[Unit]) -> list[Unit]:
    """Return the units at a path without those that an interrupted command left incomplete; warn of these."""
    from ckpttool.cli.paths import say_journals

    inside = unaffected_units((), [path] if fs.isdir(path) else ()).journals
    if [unit.path for unit in units] == [path]:  # one that the user named is verified anyway
        unaffected = unaffected_units(units)
        say_journals(inside if unaffected.whole else (*unaffected.journals, *inside))
        return units
    unaffected = unaffected_units(units, [path])
    say_journals(unaffected.journals)
    if units and not unaffected.whole:
        raise NotFound(path, "no complete checkpoint in it: a command was interrupted, or is still running")
    return list(unaffected.whole)


def _settings_of(path: str, command: VerifyCommand) -> PredictionSettings | None:
    """Return the settings of a checkpoint beyond the usual checks."""
    if command.settings is None and not command.predict:
        return None
    from ckpttool.cli.verify_config import PredictionSettings, settings_for
    from ckpttool.predict.request import PredictionRequest

    if command.settings is None:
        return PredictionSettings(PredictionRequest(**command.prediction), (), ())
    return settings_for(command.settings, path, predict=command.predict, given=command.prediction)


def _fail(error: CheckpointError, outcome: VerifyOutcome) -> None:
    say_error(error)
    outcome.failures.append(error)


def _add_verdict(
    target: _VerifyTarget,
    verification: Verification,
    result: TaskResult,
    command: VerifyCommand,
    outcome: VerifyOutcome,
) -> None:
    """Add the verdict on a checkpoint, with ignored findings marked."""
    if result.sealed is not None:
        outcome.sealed[target.path] = result.sealed
    for finding in verification.findings:
        if finding.code in MISTAKES and finding.ignored is None:
            path, place = verification.path, finding.where
            _fail(CheckpointError(path, finding.message, where=place, code=finding.code), outcome)
            return
    outcome.seconds[verification.path] = result.seconds
    if outcome.read_in_full is not None and not target.is_sampled_out:
        outcome.read_in_full += 1
    if target.settings is not None:
        outcome.judged.append((target.settings, verification))
        if target.settings.ignores:
            from ckpttool.ops.ignored_findings import apply_ignores, refusals

            for sentence in refusals(verification, target.settings.ignores):
                say_error(sentence)
            verification = apply_ignores(verification, target.settings.ignores, strict=command.strict)
    outcome.verifications.append(verification)
    if outcome.read_in_full is not None and not target.is_sampled_out and verification.is_valid:
        _record_read(target.unit, outcome)


def _record_read(unit: Unit | CheckpointError, outcome: VerifyOutcome) -> None:
    """Record in the digests that a valid checkpoint was read in full; an invalid one is read again."""
    from ckpttool.ops.manifest import record_of, write_last_read

    record = None if isinstance(unit, CheckpointError) else record_of(unit)
    if record is None:
        return
    moment = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    try:
        write_last_read(record, moment)
    except CheckpointError as error:
        outcome.warnings += (f"{error.path}: not recorded as verified: {error.reason}",)
