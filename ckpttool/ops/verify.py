"""Is it intact, sane and safe? Each byte is read once, for its checksum and its values together.

A check passes only for what it looked at: what a format can't tell is skipped, and says so.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

from ckpttool.checkpoint import Checkpoint, Span, Tensor
from ckpttool.errors import CheckpointError, DamagedCheckpoint, Truncated, Unsupported
from ckpttool.formats import recognised, suffix_format
from ckpttool.formats.chunks import storages_of
from ckpttool.formats.interface import Format, Probe, Unit
from ckpttool.ops.manifest import SUFFIX, compare, has_digests, manifests_of
from ckpttool.ops.scanned import (
    checksum_findings,
    covered_by_checksums,
    loss_findings,
    special_findings,
    without_checksums,
    without_values,
)
from ckpttool.ops.verdict import (
    CHECKS,
    NOTHING_CHECKED,
    PREDICTION,
    Check,
    Safety,
    Status,
    Verification,
    fatal,
)
from ckpttool.report import Finding, Severity, counted, error, has_errors
from ckpttool.wire.scan import Scanned, count_specials, scan
from ckpttool.work import Advance, default_jobs

if TYPE_CHECKING:
    from ckpttool.ops.ignoring import Ignore
    from ckpttool.ops.predicted import Prediction
    from ckpttool.predict.request import Request
    from ckpttool.predict.run import Stage

_OPTIONAL = "manifest"
"""The check that stands in the answer only where there is something to compare with, or it was asked for."""


def verify(
    path: str | os.PathLike[str] | Unit,
    *,
    only: Collection[str] = CHECKS,
    strict: bool = False,
    jobs: int | None = None,
    advance: Advance = lambda nbytes: None,
    prediction: Request | None = None,
    ignores: Sequence[Ignore] = (),
) -> Verification:
    """Return the verdict on one checkpoint. A damaged one is invalid, not an error.

    Args:
        path: A file, directory or index; or a unit that discovery found.
        only: The checks to run.
        strict: Whether warnings fail their check.
        jobs: Number of threads; by default the processors that this process may use.
        advance: Called with the bytes read, from any thread.
        prediction: How to load it with its framework and run it, in a process of its own.
        ignores: What keeps it from no prediction; ``apply_ignores`` marks it in the verdict.

    Raises:
        NotACheckpoint: Nothing is recognised there.
        MissingPackage: A prediction needs a framework that is not installed.
        CheckpointError: It can't be read at all.
    """
    unit, name = (path, path.path) if isinstance(path, Unit) else (None, os.fspath(path))
    format = unit.format if unit else None
    try:
        format = format or _format_of(name)
        with format.open_unit(unit or Unit(name, (), format)) as checkpoint:
            verifier = _Verifier(checkpoint, only, strict, jobs or default_jobs(), advance)
            return verifier.run(prediction, ignores)
    except (DamagedCheckpoint, Unsupported) as failure:
        hint = format or suffix_format(os.path.basename(name))
        unit = unit or Unit(name, (os.path.basename(name.rstrip(os.sep)),), hint)
        nbytes = replace(unit, members=unit.parts).nbytes
        found = _beyond_opening(name, hint, failure, only, predicts=prediction is not None)
        return replace(found, nbytes=nbytes)


def _format_of(path: str) -> Format:
    with Probe(path) as probe:
        return recognised(probe)


def _beyond_opening(
    path: str, format: Format | None, failure: CheckpointError, only: Collection[str], *, predicts: bool
) -> Verification:
    """Return the verdict on what can't be opened; what was seen before the damage still counts."""
    seen = getattr(failure, "safety", ())
    where = failure.where
    if failure.path != path:
        where = ": ".join(filter(None, (os.path.basename(failure.path), failure.where)))
    broken = replace(error(failure.code, failure.reason, where), check="structure")
    findings = (broken, *(replace(finding, check="safety") for finding in seen))
    reason = "it is cut short" if isinstance(failure, Truncated) else "the structure is damaged"
    checks = [
        Check(name, Status.SKIPPED, reason if name in only else "not asked for")
        for name in CHECKS
        if name != _OPTIONAL or _asks_for_manifest(only) or os.path.isfile(path + SUFFIX)
    ]
    checks[0] = Check("structure", Status.FAILED, failure.reason)
    checks += [Check(name, Status.SKIPPED, reason) for name in PREDICTION if predicts]
    safety = Safety.UNSAFE if has_errors(seen) else Safety.UNKNOWN
    if safety is Safety.UNSAFE and "safety" in only:
        checks[CHECKS.index("safety")] = Check("safety", Status.FAILED, counted(len(seen), "finding"))
    return Verification(
        path, format.name if format else None, None, safety, tuple(checks), findings, was_opened=False
    )


def unreadable(failure: CheckpointError) -> Verification:
    """Return the verdict on what lies in a directory and can't be read: it is not fine."""
    checks = [Check(name, Status.SKIPPED, "it can't be read") for name in CHECKS if name != _OPTIONAL]
    checks[0] = Check("structure", Status.FAILED, failure.reason)
    finding = replace(error(failure.code, failure.reason, failure.where), check="structure")
    return Verification(failure.path, None, None, Safety.UNKNOWN, tuple(checks), (finding,), was_opened=False)


class _Verifier:
    """Runs the checks on one open checkpoint and collects what they find."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        only: Collection[str],
        strict: bool,
        jobs: int,
        advance: Advance,
    ) -> None:
        self._checkpoint = checkpoint
        self._only = only
        self._strict = strict
        self._jobs = jobs
        self._advance = advance
        self._findings: list[Finding] = []
        self._scanned: list[Scanned] = []
        self._manifests = manifests_of(checkpoint)
        self._has_manifest = bool(self._manifests) or has_digests(checkpoint)

    def run(self, request: Request | None, ignores: Sequence[Ignore]) -> Verification:
        """Return the verdict."""
        with self._started(request) as prediction:
            checks = self._own_checks()
            if prediction is not None:
                checks += self._predicted(prediction, self._verification(checks), ignores)
        return self._verification(checks)

    def _verification(self, checks: tuple[Check, ...]) -> Verification:
        found = self._checkpoint
        return Verification(
            found.path,
            found.format,
            found.variant,
            self._verdict(),
            checks,
            tuple(self._findings),
            found.nbytes,
        )

    def _started(self, request: Request | None) -> AbstractContextManager[Prediction | None]:
        """Return the prediction that was asked for, with its child on the way."""
        if request is None:
            return nullcontext()
        from ckpttool.ops.predicted import Prediction

        return Prediction(self._checkpoint, request)

    def _own_checks(self) -> tuple[Check, ...]:
        if {"checksum", "values"} & set(self._only):
            self._scanned = scan(
                self._checkpoint.spans(),
                jobs=self._jobs,
                checksum="checksum" in self._only,
                values="values" in self._only,
                advance=self._advance,
            )
        runs = (self._structure, self._checksum, self._values, self._safety, self._manifest)
        compares = self._has_manifest or _asks_for_manifest(self._only)
        checks = tuple(
            run() if name in self._only else Check(name, Status.SKIPPED, "not asked for")
            for name, run in zip(CHECKS, runs, strict=True)
            if name != _OPTIONAL or compares
        )
        self._findings.extend(_nothing_checked(checks, self._only))
        return checks

    def _predicted(
        self, prediction: Prediction, before: Verification, ignores: Sequence[Ignore]
    ) -> tuple[Check, ...]:
        """Return the checks of a prediction, which only a checkpoint earns that passed all before."""
        from ckpttool.ops.ignoring import apply_ignores

        accepted = apply_ignores(before, ignores, strict=self._strict)
        has_failed = any(check.status is Status.FAILED for check in accepted.checks)
        answer = prediction.answer(has_failed=has_failed)
        if not has_failed:
            self._findings.extend(answer.owed())
        return tuple(self._staged(stage) for stage in (answer.load, answer.predict))

    def _staged(self, stage: Stage) -> Check:
        if stage.is_skipped:
            return Check(stage.name, Status.SKIPPED, stage.detail)
        check = self._check(stage.name, stage.findings, stage.detail)
        return replace(check, detail=stage.detail)

    def _verdict(self) -> Safety:
        severities = {finding.severity for finding in self._checkpoint.safety}
        if "safety" not in self._only:
            return Safety.UNKNOWN
        if Severity.ERROR in severities:
            return Safety.UNSAFE
        return Safety.UNKNOWN if Severity.WARNING in severities else Safety.SAFE

    def _check(self, name: str, findings: Iterable[Finding], detail: str) -> Check:
        """Record findings and return the check that made them."""
        found = tuple(replace(finding, check=name) for finding in findings)
        self._findings.extend(found)
        failures = sum(finding.severity in fatal(strict=self._strict) for finding in found)
        if failures:
            return Check(name, Status.FAILED, f"{counted(failures, 'finding')} in {detail}")
        return Check(name, Status.PASSED, detail)

    def _structure(self) -> Check:
        files = counted(len(self._checkpoint.files), "file")
        return self._check(
            "structure", self._checkpoint.findings, f"{files}, {counted(len(self._checkpoint), 'tensor')}"
        )

    def _checksum(self) -> Check:
        findings = checksum_findings(self._scanned)
        if not findings and all(one.span.crc32 is None for one in self._scanned):
            return Check("checksum", Status.SKIPPED, without_checksums(self._checkpoint))
        return self._check("checksum", findings, covered_by_checksums(self._scanned))

    def _values(self) -> Check:
        tensors = [tensor for tensor in self._checkpoint.tensors if tensor.values is not None]
        if not tensors:
            return Check("values", Status.SKIPPED, without_values(self._checkpoint))
        findings = [finding for tensor in self._doubtful(tensors) for finding in self._specials(tensor)]
        findings += loss_findings(self._checkpoint)
        return self._check("values", findings, counted(len(tensors), "tensor"))

    def _doubtful(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Return the tensors that the pass over the file has not shown to be finite."""
        clean = {
            _place(s.span): s.span.dtype for s in self._scanned if not s.is_suspicious and s.failure is None
        }
        broken = {_place(s.span) for s in self._scanned if s.failure is not None}
        doubtful = []
        for tensor in tensors:
            places = [(one.file, one.offset, one.nbytes) for one in storages_of(tensor)]
            if tensor.dtype.float_code is None or tensor.shares_with is not None:
                continue
            if not broken.isdisjoint(places):
                continue
            if not places or any(clean.get(place) is not tensor.dtype for place in places):
                doubtful.append(tensor)
        return doubtful

    def _specials(self, tensor: Tensor) -> list[Finding]:
        assert tensor.values is not None  # selected by the caller
        try:
            specials = count_specials(tensor.values, tensor.dtype)
        except CheckpointError as failure:
            return [error(failure.code, failure.reason, tensor.name)]
        return special_findings(specials, tensor)

    def _safety(self) -> Check:
        if not self._checkpoint.safety:
            return Check("safety", Status.PASSED, "loading it runs nothing")
        check = self._check("safety", self._checkpoint.safety, "what loading it could run")
        if check.status is not Status.PASSED:
            return check
        if unsearched := sum(finding.code == "not-scanned" for finding in self._checkpoint.safety):
            return Check("safety", Status.SKIPPED, f"{counted(unsearched, 'part')} could not be searched")
        doubts = sum(finding.severity is Severity.WARNING for finding in self._checkpoint.safety)
        if not doubts:
            return Check("safety", Status.PASSED, "loading it runs nothing")
        return Check("safety", Status.PASSED, f"nothing known to be unsafe; {counted(doubts, 'warning')}")

    def _manifest(self) -> Check:
        if not self._has_manifest:
            return Check("manifest", Status.SKIPPED, "there is none beside it")
        findings, compared = compare(self._checkpoint, self._manifests, self._jobs)
        return self._check("manifest", findings, compared)


def _nothing_checked(checks: Sequence[Check], only: Collection[str]) -> Iterator[Finding]:
    """Yield an error where none of the checks that were asked for could run: skipped is not passed."""
    wanted = [check for check in checks if check.name in only]
    if all(check.status is Status.SKIPPED for check in wanted):
        why = "; ".join(f"{check.name} was skipped: {check.detail}" for check in wanted)
        yield error(NOTHING_CHECKED, f"no check that was asked for could run ({why})")


def _asks_for_manifest(only: Collection[str]) -> bool:
    return _OPTIONAL in only and set(only) != set(CHECKS)


def _place(span: Span) -> tuple[str, int, int]:
    return span.extent.file, span.extent.offset, span.extent.nbytes
