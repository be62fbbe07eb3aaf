"""The checks on one open checkpoint. Each byte is read once, for its checksum and its values together.

A check passes only for what it looked at: what a format can't tell is skipped, and says so.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.errors import CheckpointError, LimitExceeded
from ckpttool.core.report import Finding, Severity, error, has_errors
from ckpttool.core.tensor import Path, Tensor
from ckpttool.core.text import counted
from ckpttool.core.values import storages_of
from ckpttool.ops.hollow_weights import Element, hollow_findings
from ckpttool.ops.manifest import UNLISTED, compare_manifests, has_statements, manifests_of
from ckpttool.ops.scan_findings import (
    checksum_findings,
    covered_by_checksums,
    loss_findings,
    place_of,
    special_findings,
    unread_findings,
    unread_values,
    why_no_checksums,
    why_no_values,
)
from ckpttool.ops.stored_sums import why_unproven
from ckpttool.ops.verdict import (
    CHECKS,
    COPY,
    COPY_UNPROVEN,
    NOT_ASKED_FOR,
    NOTHING_CHECKED,
    OPTIONAL,
    Check,
    Safety,
    Status,
    Verification,
    asks_for_manifest,
    fatal,
    safety_of,
)
from ckpttool.ops.weight_copies import weight_copy_findings
from ckpttool.storage.scan import Scanned, count_specials, scan
from ckpttool.storage.work import Advance

if TYPE_CHECKING:
    from ckpttool.ops.ignored_findings import Ignore
    from ckpttool.ops.prediction import Prediction
    from ckpttool.predict.run import StageResult


MIN_REREADS = 1 << 30
REREADS_A_BYTE = 64
"""How many bytes may be read to count the NaN in single tensors, besides each once: in any case, and for each
byte of the files."""


class Verifier:
    """Runs the checks on one open checkpoint and collects what they find."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        only: Collection[str],
        strict: bool,
        jobs: int,
        advance: Advance,
        against: str | None = None,
    ) -> None:
        self._checkpoint = checkpoint
        self._only = only
        self._strict = strict
        self._jobs = jobs
        self._advance = advance
        self._against = against
        self._findings: list[Finding] = []
        self._scanned: list[Scanned] = []
        self._manifests = manifests_of(checkpoint)
        self._rereads = 0
        self._elements: dict[Path, bytes | None] = {}
        """What tensors that were looked at one by one consist of, if it is one element again and again."""
        self._has_manifest = has_statements(checkpoint, self._manifests)
        self._reads_objects = bool({"checksum", "values"} & set(only))
        """Whether objects in a store may be read; what asks for neither is to cost little."""

    def run(self, prediction: Prediction | None, ignores: Sequence[Ignore]) -> Verification:
        """Run all checks that were asked for, a prediction last."""
        checks = self._own_checks()
        if prediction is not None:
            # Only a checkpoint that passed all before is loaded.
            from ckpttool.ops.ignored_findings import apply_ignores

            accepted = apply_ignores(self._verification(checks), ignores, strict=self._strict)
            has_failed = any(check.status is Status.FAILED for check in accepted.checks)
            answer = prediction.answer(has_failed=has_failed)
            if not has_failed:
                self._findings.extend(answer.owed())
            checks += tuple(self._stage_check(stage) for stage in (answer.load, answer.predict))
        if self._against is not None:
            checks += (self._copy(self._against),)
        return self._verification(checks)

    def _verification(self, checks: tuple[Check, ...]) -> Verification:
        checkpoint = self._checkpoint
        safety = safety_of(checkpoint.safety) if "safety" in self._only else Safety.UNKNOWN
        return Verification(
            checkpoint.path,
            checkpoint.format,
            checkpoint.variant,
            safety,
            checks,
            tuple(self._findings),
            checkpoint.nbytes,
        )

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
        compares = self._has_manifest or asks_for_manifest(self._only)
        checks = tuple(
            run() if name in self._only else Check(name, Status.SKIPPED, NOT_ASKED_FOR)
            for name, run in zip(CHECKS, runs, strict=True)
            if name != OPTIONAL or compares
        )
        wanted = [check for check in checks if check.name in self._only]
        if all(check.status is Status.SKIPPED for check in wanted):  # skipped is not passed
            why = "; ".join(f"{check.name} was skipped: {check.detail}" for check in wanted)
            self._findings.append(error(NOTHING_CHECKED, f"no check that was asked for could finish ({why})"))
        return checks

    def _stage_check(self, stage: StageResult) -> Check:
        if stage.is_skipped:
            return Check(stage.name, Status.SKIPPED, stage.detail)
        check = self._check(stage.name, stage.findings, stage.detail)
        return Check(check.name, check.status, stage.detail)

    def _check(
        self, name: str, findings: Iterable[Finding], detail: str, *, is_partial: bool = False
    ) -> Check:
        """Record findings and return the check that made them."""
        found = tuple(finding._replace(check=name) for finding in findings)
        self._findings.extend(found)
        unfailed = Check(name, Status.PARTIAL if is_partial else Status.PASSED, detail)
        failures = sum(finding.severity in fatal(strict=self._strict) for finding in found)
        if failures:
            return Check(
                name, Status.FAILED, f"{counted(failures, 'finding')} in {detail}", unfailed=unfailed
            )
        return unfailed

    def _structure(self) -> Check:
        files = counted(len(self._checkpoint.files), "file")
        return self._check(
            "structure", self._checkpoint.findings, f"{files}, {counted(len(self._checkpoint), 'tensor')}"
        )

    def _checksum(self) -> Check:
        findings = checksum_findings(self._scanned, self._checkpoint)
        if not findings and all(one.span.crc32 is None for one in self._scanned):
            return Check("checksum", Status.SKIPPED, why_no_checksums(self._checkpoint))
        is_partial = any(one.span.crc32 is None for one in self._scanned)
        return self._check("checksum", findings, covered_by_checksums(self._scanned), is_partial=is_partial)

    def _values(self) -> Check:
        tensors = [tensor for tensor in self._checkpoint.tensors if tensor.values is not None]
        unread = unread_values(self._checkpoint)
        findings = [finding for tensor in self._doubtful(tensors) for finding in self._specials(tensor)]
        findings += unread_findings(self._checkpoint)
        if not has_errors(self._checkpoint.findings):
            findings += hollow_findings(self._checkpoint, self._repeated_element())
        findings += loss_findings(self._checkpoint) if tensors else []
        findings += weight_copy_findings(self._checkpoint, self._jobs, self._advance)
        check = self._check("values", findings, unread or counted(len(tensors), "tensor"))
        if not tensors:
            unread = why_no_values(self._checkpoint)
        if check.status is Status.PASSED and unread is not None:
            return Check("values", Status.SKIPPED, unread)
        return check

    def _doubtful(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Return the tensors that the pass over the file has not shown to be finite."""
        clean = {
            place_of(s.span): s.span.dtype for s in self._scanned if not s.is_suspicious and s.failure is None
        }
        broken = {place_of(s.span) for s in self._scanned if s.failure is not None}
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
            nan, infinite, element = count_specials(tensor.values, tensor.dtype, self._reread)
        except CheckpointError as failure:
            return [error(failure.code, failure.reason, tensor.name)]
        self._elements[tensor.path] = element
        return special_findings(nan, infinite, tensor)

    def _repeated_element(self) -> Element:
        """Return what tells which element a tensor repeats, from the pass over the file."""
        known = {
            place_of(one.span): (one.span.dtype, one.element)
            for one in self._scanned
            if one.element is not None
        }

        def element_of(tensor: Tensor) -> bytes | None:
            if tensor.path in self._elements:
                return self._elements[tensor.path]
            found = {known.get((one.file, one.offset, one.nbytes)) for one in storages_of(tensor)}
            dtype, element = (found.pop() if len(found) == 1 else None) or (None, b"")
            if dtype is not tensor.dtype:
                return None
            return element if tensor.byteorder == "little" else element[::-1]

        return element_of

    def _reread(self, nbytes: int) -> None:
        """Count bytes that are read once more, because tensors in them may hold a NaN."""
        self._rereads += nbytes
        once = sum(one.span.nbytes for one in self._scanned)
        if self._rereads > max(MIN_REREADS, REREADS_A_BYTE * self._checkpoint.nbytes) + once:
            found = "views that overlap too often to look at the values of each"
            raise LimitExceeded(self._checkpoint.path, found)

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
        findings, compared, unproven = compare_manifests(
            self._checkpoint,
            self._manifests,
            self._jobs,
            self._advance,
            reads_objects=self._reads_objects,
        )
        is_partial = any(one.code == UNLISTED for one in findings)
        check = self._check("manifest", findings, compared, is_partial=is_partial)
        if check.status is not Status.FAILED and unproven:
            return Check("manifest", Status.SKIPPED, why_unproven(unproven))
        return check

    def _copy(self, copy: str) -> Check:
        """Compare it with a copy; a file that can't be compared is no copy that was proven."""
        from ckpttool.ops.copy_check import compare_with_copy, copy_findings

        compared = compare_with_copy(
            self._checkpoint, copy, self._jobs, self._advance, reads_objects=self._reads_objects
        )
        findings, proofs, unproven = copy_findings(compared)
        check = self._check(COPY, findings, proofs)
        if not unproven:
            return check
        reason = why_unproven(unproven)
        self._findings.append(error(COPY_UNPROVEN, reason)._replace(check=COPY))
        return check if check.status is Status.FAILED else Check(COPY, Status.SKIPPED, reason)
