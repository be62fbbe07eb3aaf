"""The checkpoints that ``verify`` is given, what is asked of each, and the verdicts."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ckpttool.cli.output import say_error, say_warning
from ckpttool.cli.predict_options import flag_of
from ckpttool.cli.progress import ProgressLines
from ckpttool.core.errors import CheckpointError, MissingPackage, NotFound, UsageError
from ckpttool.formats.interface import SIDECARS
from ckpttool.io import fs
from ckpttool.ops.verdict import OPTIONAL, Verification
from ckpttool.ops.verify import unreadable

if TYPE_CHECKING:
    from ckpttool.cli.verify_config import PredictionSettings, VerifyConfig
    from ckpttool.formats.globs import Globs
    from ckpttool.formats.interface import Unit
    from ckpttool.ops.manifest_seal import SealResult
    from ckpttool.runs.members.full_read import Progress


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
"""Findings of a prediction about what it was given: a class that isn't there, a shape that doesn't fit."""
_TRIES = 3
"""So often is verified what gets other parts meanwhile, as a renaming gives them one by one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOptions:
    """What was asked for.

    Attributes:
        checks: The names of the checks to run, without those of a prediction.
        predict: Whether a prediction was asked for on the command line.
        prediction_options: Attributes of a prediction's ``PredictionRequest`` that were given there.
        config: The configuration that applies.
        seal: Whether manifests are written.
        force: Whether they replace those that say something else.
    """

    checks: tuple[str, ...]
    strict: bool = False
    jobs: int | None = None
    exclude: Sequence[str] = ()
    max_depth: int | None = None
    predict: bool = False
    prediction_options: Mapping[str, Any] = field(default_factory=dict)
    config: VerifyConfig | None = None
    seal: bool = False
    force: bool = False


@dataclass(slots=True)
class VerifyOutcome:
    """What came of it, in the order of the paths.

    Attributes:
        verifications: The verdicts.
        failures: Paths that could not be looked at, and packages that are missing.
        judged: What the configuration asks of each checkpoint, with its verdict before anything was ignored.
        sealed: What became of the manifests, by the checkpoints' paths.
        seconds: How long each took, by its path.
        unknown: Files that were passed over in the directories, and may be checkpoints by their names.
        warnings: Globs that matched nothing in any of the directories, and what was passed over.
    """

    verifications: list[Verification] = field(default_factory=list)
    failures: list[CheckpointError] = field(default_factory=list)
    judged: list[tuple[PredictionSettings, Verification]] = field(default_factory=list)
    sealed: dict[str, SealResult] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    warnings: tuple[str, ...] = ()

    def passes(self, strict: bool) -> bool:
        """Tell whether all checkpoints pass, and no manifest was refused."""
        is_refused = any(one.refused for one in self.sealed.values())
        return not is_refused and all(one.passes(strict=strict) for one in self.verifications)


def verify_all(paths: Sequence[str], options: VerifyOptions) -> VerifyOutcome:
    """Return the verdicts on all checkpoints at some paths; what in a directory can't be read is invalid."""
    outcome = VerifyOutcome()
    searched: list[Globs] = []
    lines = ProgressLines()
    targets = [target for path in paths for target in _find_targets(path, options, outcome, searched, lines)]
    unmatched = [globs.unmatched("--exclude") for globs in searched]
    first = unmatched[0] if unmatched else []
    outcome.warnings = tuple(warning for warning in first if all(warning in others for others in unmatched))
    outcome.warnings += tuple(_unknown_file_warnings(outcome.unknown))
    _require_prediction(targets, options)
    known: set[str] = set()
    for _ in range(_TRIES):
        known.update(target.path for target in targets)
        with lines.of_all(_work_of(target, options) for target in targets) as progress:
            has_gone = _verify_each(targets, options, outcome, progress)
        if not has_gone:
            break
        again = (
            target
            for path in paths
            if fs.isdir(path)
            for target in _find_targets(path, options, outcome, [], lines)
        )
        targets = [target for target in again if target.path not in known]
    if known and not (outcome.verifications or outcome.failures):
        _fail(
            NotFound(
                paths[0], "everything in it was removed or renamed in the meantime; nothing was verified"
            ),
            outcome,
        )
    return outcome


def _unknown_file_warnings(unknown: Sequence[str]) -> Iterator[str]:
    """Yield what is to be said of files that are no checkpoints to read, a line for each kind of them."""
    from ckpttool.formats.discovery import foreign_at

    kinds: dict[str, list[str]] = {}
    for path in unknown:
        other = foreign_at(path)
        kinds.setdefault(other.description if other else "no format recognises the content", []).append(path)
    for why, paths in kinds.items():
        more = f", and {len(paths) - 1:,} more" if len(paths) > 1 else ""
        yield f"{paths[0]}{more}: not verified, safety unknown: {why}"


def _work_of(target: _VerifyTarget, options: VerifyOptions) -> int:
    """Return how many bytes are read of a checkpoint: once for each of the passes."""
    if isinstance(target.unit, CheckpointError):
        return 0
    passes = 1
    if options.seal:
        passes += 2  # of its files, and of its tensors
    if (
        OPTIONAL in options.checks
        and not options.force
        and any(name.endswith(SIDECARS) for name in target.unit.members)
    ):
        passes += 1
    return passes * target.unit.nbytes


def _verify_each(
    targets: Sequence[_VerifyTarget], options: VerifyOptions, outcome: VerifyOutcome, progress: Progress
) -> bool:
    """Add the verdicts on some checkpoints; tell whether one has gone, perhaps to another name."""
    has_gone = False
    for target in targets:
        try:
            has_gone |= not _verify(target, options, outcome, progress)
        except CheckpointError as error:
            # That a store doesn't answer says nothing of what it holds.
            is_no_verdict = target.is_named or fs.is_remote(target.path)
            if is_no_verdict or (target.is_predicted and isinstance(error, MissingPackage)):
                _fail(error, outcome)
            elif isinstance(target.unit, CheckpointError) or _unit_now(target.unit) is not None:
                outcome.verifications.append(unreadable(error))
            else:
                _say_missing(target.unit)
                has_gone = True
    return has_gone


def _unit_now(unit: Unit) -> Unit | None:
    """Return a checkpoint as it is on disk now; None if it was removed or renamed."""
    from ckpttool.transaction.pending_journals import current_unit

    return current_unit(unit)


def _say_missing(unit: Unit) -> None:
    say_warning(f"{unit.path}: removed or renamed in the meantime; not verified")


@dataclass(frozen=True, slots=True)
class _VerifyTarget:
    """A checkpoint, or the error that keeps it from being read; what is asked of it; whether it was named."""

    unit: Unit | CheckpointError
    settings: PredictionSettings | None
    is_named: bool

    @property
    def path(self) -> str:
        return self.unit.path

    @property
    def is_predicted(self) -> bool:
        """Tell whether a prediction is asked for, whose framework may not be installed."""
        return self.settings is not None and self.settings.request is not None


def _require_prediction(targets: Sequence[_VerifyTarget], options: VerifyOptions) -> None:
    """Require that somebody is there to make the prediction that options ask for."""
    if options.prediction_options.get("record") and len(targets) > 1:
        raise UsageError(f"--record takes one checkpoint, and there are {len(targets):,}")
    is_asked = options.predict or any(one.settings and one.settings.request for one in targets)
    if options.prediction_options and targets and not is_asked:
        flag = flag_of(next(iter(options.prediction_options)))
        raise UsageError(f"{flag}: no rule asks for a prediction (--predict does)")


def _find_targets(
    path: str, options: VerifyOptions, outcome: VerifyOutcome, searched: list[Globs], progress: Progress
) -> Iterator[_VerifyTarget]:
    from ckpttool.formats.discovery import Walk, discover
    from ckpttool.formats.globs import Globs
    from ckpttool.formats.interface import natural_path
    from ckpttool.transaction.paths import shown

    errors: list[CheckpointError] = []
    globs = Globs(options.exclude, path)
    unknown: list[str] = []
    walk = Walk(exclude=globs, max_depth=options.max_depth, on_error=errors.append, on_unknown=unknown.append)
    try:
        found = []
        with progress(path, None) as advance:
            for unit in discover(path, walk):
                found.append(unit)
                advance(1)
        units = sorted(found, key=lambda unit: natural_path(unit.path))
        if [unit.path for unit in units] != [path]:
            searched.append(globs)
        if not units:
            _require_any(path, errors)
        units = _drop_interrupted(path, units)
    except CheckpointError as error:
        _fail(error, outcome)
        return
    outcome.unknown += (one for one in unknown if one not in outcome.unknown)
    for unit in units:
        is_named = unit.path == path
        settings = _settings_of(unit.path, options)
        yield _VerifyTarget(unit if is_named else replace(unit, path=shown(unit.path)), settings, is_named)
    for one in errors:
        yield _VerifyTarget(one, None, False)


def _require_any(path: str, errors: Sequence[CheckpointError]) -> None:
    """Require that something was found in a directory, be it what can't be read."""
    from ckpttool.formats import recognition_error
    from ckpttool.formats.interface import Probe

    for error in errors:
        if fs.normpath(error.path) == fs.normpath(path):
            raise error
    if not errors:
        with Probe(path) as probe:
            raise recognition_error(probe)


def _drop_interrupted(path: str, units: list[Unit]) -> list[Unit]:
    """Return what was found at a path without what an interrupted command has half moved, and tell of it."""
    from ckpttool.cli.paths import say_journals
    from ckpttool.transaction.pending_journals import unaffected_units

    inside = unaffected_units((), [path] if fs.isdir(path) else ()).journals
    if [unit.path for unit in units] == [path]:  # the user asks for this one, whatever becomes of it
        unaffected = unaffected_units(units)
        say_journals(inside if unaffected.whole else (*unaffected.journals, *inside))
        return units
    unaffected = unaffected_units(units, [path])
    say_journals(unaffected.journals)
    if units and not unaffected.whole:
        raise NotFound(path, "no complete checkpoint in it: a command was interrupted, or is still running")
    return list(unaffected.whole)


def _settings_of(path: str, options: VerifyOptions) -> PredictionSettings | None:
    """Return what is asked of a checkpoint besides the usual checks."""
    if options.config is None and not options.predict:
        return None
    from ckpttool.cli.verify_config import PredictionSettings, settings_for
    from ckpttool.predict.request import PredictionRequest

    if options.config is None:
        return PredictionSettings(PredictionRequest(**options.prediction_options), (), ())
    return settings_for(options.config, path, predict=options.predict, given=options.prediction_options)


def _fail(error: CheckpointError, outcome: VerifyOutcome) -> None:
    say_error(str(error))
    outcome.failures.append(error)


def _verify(
    target: _VerifyTarget, options: VerifyOptions, outcome: VerifyOutcome, progress: Progress
) -> bool:
    """Add the verdict on a checkpoint; tell whether it was still there."""
    if isinstance(target.unit, CheckpointError):
        raise target.unit
    started = time.perf_counter()
    verification = (
        _verify_and_seal(target.unit, options, outcome, progress)
        if options.seal
        else _verify_at_rest(target, target.unit, options, progress)
    )
    if verification is None:
        _say_missing(target.unit)
        return False
    if (mistake := _mistake_in(verification)) is not None:
        _fail(mistake, outcome)
        return True
    outcome.seconds[verification.path] = time.perf_counter() - started
    if target.settings is not None:
        outcome.judged.append((target.settings, verification))
        if target.settings.ignores:
            from ckpttool.ops.ignored_findings import apply_ignores, refusals

            for sentence in refusals(verification, target.settings.ignores):
                say_error(sentence)
            verification = apply_ignores(verification, target.settings.ignores, strict=options.strict)
    outcome.verifications.append(verification)
    return True


def _mistake_in(verification: Verification) -> CheckpointError | None:
    """Return the error if a prediction failed by what the user gave to it: that says nothing of the file."""
    for finding in verification.findings:
        if finding.code in MISTAKES and finding.ignored is None:
            return CheckpointError(verification.path, finding.message, where=finding.where, code=finding.code)
    return None


def _verify_at_rest(
    target: _VerifyTarget, unit: Unit, options: VerifyOptions, progress: Progress
) -> Verification | None:
    """Return the verdict on what stands still; None if it was removed or renamed meanwhile."""
    from ckpttool.ops.verify import verify as verify_one

    settings = target.settings
    for _ in range(_TRIES):
        with progress(unit.path, unit.nbytes) as advance:
            verification = verify_one(
                unit,
                only=options.checks,
                strict=options.strict,
                jobs=options.jobs,
                advance=advance,
                prediction=settings.request if settings else None,
                ignores=settings.ignores if settings else (),
            )
        if verification.is_fine or target.is_named:
            return verification
        now = _unit_now(unit)
        if now is None:
            return None
        if now.members == unit.members:
            return verification
        unit = now
    return verification


def _verify_and_seal(
    unit: Unit, options: VerifyOptions, outcome: VerifyOutcome, progress: Progress
) -> Verification:
    from ckpttool.ops.manifest_seal import verify_and_seal

    with progress(unit.path, unit.nbytes) as advance:
        verification, sealed = verify_and_seal(
            unit, force=options.force, strict=options.strict, jobs=options.jobs, advance=advance
        )
    outcome.sealed[unit.path] = sealed
    return verification
