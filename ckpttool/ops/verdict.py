"""The verdict on one checkpoint: its checks, their outcomes and findings, and how much of it can be saved."""

from __future__ import annotations

import enum
import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from warnings import warn

from ckpttool.core.errors import CheckpointError
from ckpttool.core.report import Finding, Severity, has_errors, is_safe
from ckpttool.core.result import Result, document_of
from ckpttool.core.tensor import Role
from ckpttool.core.text import counted

_RNG = re.compile(r"(^|[._])rng(_?states?)?([._]|$)|(^|[._])random_states?([._]|$)", re.IGNORECASE)
"""Names of the states of random generators."""


class Amount(NamedTuple):
    """Number of tensors that can be saved, of those known."""

    saved: int
    of: int

    @property
    def lost(self) -> int:
        """Return the number of lost tensors."""
        return self.of - self.saved


@dataclass(frozen=True, slots=True)
class Survival:
    """How much of a damaged checkpoint can be saved.

    Attributes:
        weights, optimizer, training, other: Amounts by the role of tensors.
        rng_state_lost: Whether a state of random generators is lost; no amount counts it then.
        names_all: Whether the names of all tensors are known; if not, more may be lost.
    """

    weights: Amount
    optimizer: Amount
    training: Amount
    other: Amount
    rng_state_lost: bool
    names_all: bool


def survival_of(kept: Iterable[Role], lost: Iterable[tuple[str, Role]], *, names_all: bool) -> Survival:
    """Return the survival of a checkpoint, from the roles of kept and the names and roles of lost tensors."""
    # Without its generators' states a training continues, but not exactly: that is said, and not counted.
    have, gone, rng_state_lost = Counter(kept), Counter[Role](), False
    for name, role in lost:
        if _RNG.search(name):
            rng_state_lost = True
        else:
            gone[role] += 1
    amounts = {role.value: Amount(have[role], have[role] + gone[role]) for role in Role}
    return Survival(**amounts, rng_state_lost=rng_state_lost, names_all=names_all)


VERIFY_SCHEMA = "ckpttool.verify/1"
CHECKS = ("structure", "checksum", "values", "safety", "manifest")
OPTIONAL = "manifest"
"""The check that is in the answer only if a manifest exists, or if it was requested by name."""
COPY = "copy"
"""The check of ``--against``."""
PREDICTION = ("load", "predict")
"""The checks of a prediction; both are in the answer, or none."""
QUICK_CHECKS = ("structure", "safety")
NOTHING_CHECKED = "nothing-checked"
NOT_PREDICTED = "not-predicted"
NOT_REQUESTED = "not requested"
"""Detail of a check that wasn't requested."""
SAMPLED_OUT = "sampled out"
"""Detail of a check that a sample left out for this checkpoint."""
VALUES_NOT_READ = "values-not-read"
"""Finding for values that could not be read; the check doesn't pass even if the user accepts the finding."""
COPY_UNPROVEN = "copy-unproven"
INCONCLUSIVE = (NOTHING_CHECKED, NOT_PREDICTED, COPY_UNPROVEN)
"""Findings for requested checks that could not be done."""
_SALVAGED_FROM = ("structure", "checksum")
"""Checks whose faults ``salvage`` may work around."""


class Status(str, enum.Enum):
    """Outcome of a check; skipped isn't passed, and partial is passed for the part that was checked."""

    PASSED = "passed"
    PARTIAL = "partial"
    FAILED = "failed"
    SKIPPED = "skipped"


class Safety(str, enum.Enum):
    """Code that loading a checkpoint with its own framework could run."""

    SAFE = "safe"
    UNSAFE = "unsafe"
    UNKNOWN = "unknown"


def safety_of(findings: Iterable[Finding]) -> Safety:
    """Return the verdict of safety findings; without any, loading runs nothing."""
    found = tuple(findings)
    if has_errors(found):
        return Safety.UNSAFE
    return Safety.SAFE if is_safe(found) else Safety.UNKNOWN


@dataclass(frozen=True, slots=True)
class Check:
    """One check.

    Attributes:
        name: Name of the check.
        status: Its outcome.
        detail: The checked items, the reason for skipping, or the number of failing findings.
        unfailed: The check without its failing findings, for users that accept these; None if it passed.
    """

    name: str
    status: Status
    detail: str
    unfailed: Check | None = field(default=None, compare=False, repr=False, kw_only=True)

    def document(self) -> dict[str, Any]:
        """Return it as documents have it."""
        return document_of(self, "name", "status", "detail")


@dataclass(frozen=True, slots=True, repr=False)
class Verification(Result):
    """The verdict on one checkpoint.

    Attributes:
        nbytes: Size of its files, in bytes.
        was_opened: Whether a reader could open it.
        survival: Amounts that ``salvage`` would save of a damaged checkpoint that was read in full.
    """

    path: str
    format: str | None
    variant: str | None
    safety: Safety
    checks: tuple[Check, ...]
    findings: tuple[Finding, ...]
    nbytes: int = 0
    was_opened: bool = True
    survival: Survival | None = None

    @property
    def summary(self) -> str:
        """Return path, verdict and safety, with the code of the finding if it is not ok."""
        code = "" if self.failure is None else f" ({self.failure.code})"
        return f"{self.path}: {self.verdict}, {self.safety.value}{code}"

    def document(self) -> dict[str, Any]:
        return verify_document([self], passed=self.passes())

    def row(self) -> dict[str, Any]:
        """Return the row of a document for this checkpoint."""
        keys = ("path", "format", "variant", "verdict", "safety", "bytes", "checks", "findings")
        return document_of(self, *keys, optional=("survival",))

    @property
    def verdict(self) -> str:
        """Return ``valid`` or ``invalid``."""
        return "valid" if self.is_valid else "invalid"

    # Validity and safety are two verdicts: an intact checkpoint may run code when loaded. ``passes`` is
    # the exit status (valid, not known to be unsafe), ``ok`` the stricter truth value of the library (known
    # safe).
    @property
    def is_valid(self) -> bool:
        """Return whether all requested checks were done and passed; safety has its own verdict."""
        return not self.is_inconclusive and all(
            check.status is not Status.FAILED for check in self.checks if check.name != "safety"
        )

    @property
    def is_inconclusive(self) -> bool:
        """Return whether a requested check could not be done."""
        return any(finding.code in INCONCLUSIVE and finding.ignored is None for finding in self.findings)

    @property
    def is_damaged(self) -> bool:
        """Return whether its structure or checksums have an error that the user hasn't accepted."""
        return any(
            one.check in _SALVAGED_FROM and one.severity is Severity.ERROR and one.ignored is None
            for one in self.findings
        )

    @property
    def is_fine(self) -> bool:
        """Return ``passes()``; this name is deprecated."""
        warn("Verification.is_fine is deprecated, use passes()", DeprecationWarning, stacklevel=2)
        return self.passes()

    @property
    def ok(self) -> bool:
        """Return whether it is valid, and loading it is known to run no code."""
        return self.is_valid and self.safety is Safety.SAFE

    @property
    def failure(self) -> Finding | None:
        """Return the first finding that keeps it from being ok, errors before warnings; None if it is ok."""
        failed = {check.name for check in self.checks if check.status is Status.FAILED} | {"safety"}
        # Notes fail nothing, unless they say that a requested check could not be done.
        failing = (
            one
            for one in self.findings
            if one.ignored is None
            and (one.code in INCONCLUSIVE or (one.check in failed and one.severity is not Severity.NOTE))
        )
        order = [*Severity]
        return None if self.ok else min(failing, key=lambda one: order.index(one.severity), default=None)

    def __bool__(self) -> bool:
        return self.ok

    def _repr_html_(self) -> str:
        """Return tables of its checks and findings, for notebooks."""
        from ckpttool.core.notebook import html_table

        checks = ((one.name, one.status.value, one.detail) for one in self.checks)
        shown = html_table(repr(self), ("check", "status", "detail"), checks, len(self.checks))
        if not self.findings:
            return shown
        found = ((one.code, one.severity.value, one.where, one.message) for one in self.findings)
        columns = ("finding", "severity", "place", "message")
        return shown + html_table(counted(len(self.findings), "finding"), columns, found, len(self.findings))

    def passes(self, *, strict: bool = False) -> bool:
        """Return whether it is valid and not known to be unsafe, and if warnings fail, known to be safe."""
        fails_safety = any(one.name == "safety" and one.status is Status.FAILED for one in self.checks)
        return self.is_valid and self.safety is not Safety.UNSAFE and not (strict and fails_safety)


def verify_document(
    verifications: Sequence[Verification], failures: Sequence[CheckpointError] = (), *, passed: bool
) -> dict[str, Any]:
    """Return the document of verdicts; ``passed``: whether the exit status is 0."""
    errors = [{"path": one.path, "message": one.reason} for one in failures]
    return {
        "schema": VERIFY_SCHEMA,
        "verdict": "valid" if all(one.is_valid for one in verifications) else "invalid",
        "passed": passed,
        "checkpoints": [one.row() for one in verifications],
        **({"errors": errors} if errors else {}),
    }


def failing_severities(*, strict: bool) -> tuple[Severity, ...]:
    """Return the severities of findings that fail the check."""
    return (Severity.ERROR, Severity.WARNING) if strict else (Severity.ERROR,)


def asks_for_manifest(only: Collection[str]) -> bool:
    """Return whether the check of the manifest is requested by name, not just as one of all checks."""
    return OPTIONAL in only and set(only) != set(CHECKS)
