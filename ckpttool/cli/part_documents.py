"""The JSON documents of ``verify --part``: what they say besides, and how all of them make one again.

Nothing is taken for granted of the files: a part that is missing, twice there, or of another run is an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckpttool.cli.verdicts import VerifyOutcome
from ckpttool.core.errors import CheckpointError, DamagedCheckpoint, UsageError
from ckpttool.core.report import Finding, Severity, counted
from ckpttool.io import fs
from ckpttool.io.jsontext import parse_json
from ckpttool.ops.manifest_seal import SealResult
from ckpttool.ops.verdict import Check, Safety, Status, Verification
from ckpttool.ops.workload import Part

_EXPECTED = "a document of verify --part --json"
_MOST_NAMED = 10


def add_share(document: dict[str, Any], outcome: VerifyOutcome) -> dict[str, Any]:
    """Return the document of ``verify`` with what it says of a part, and of a sample."""
    if outcome.read_in_full is not None:
        document["sampled"] = {"full": outcome.read_in_full, "of": len(outcome.verifications)}
    share = outcome.share
    if share is None:
        return document
    places = {path: iter(positions) for path, positions in share.positions.items()}
    for row, verification in zip(document["checkpoints"], outcome.verifications, strict=True):
        row["position"] = next(places.get(verification.path, iter(())), share.found)
        for finding, found in zip(row["findings"], verification.findings, strict=True):
            finding["check"] = found.check
    for row in document.get("errors", ()):
        row["position"] = next(places.get(row["path"], iter(())), -1)
    begin = {"schema": document.pop("schema"), "part": share.part.number, "of": share.part.of}
    return {**begin, "found": share.found, "split": share.digest, **document}


def merge_parts(paths: Sequence[str]) -> VerifyOutcome:
    """Return what one run would have come to, from the documents of all parts.

    Raises:
        CheckpointError: A file can't be read, or is no such document.
        UsageError: A part is missing, or the parts don't belong together.
    """
    documents = [_read(path) for path in paths]
    _require_all(documents)
    rows = [row for one in documents for row in one.rows]
    rows.sort(key=lambda row: row.position)
    errors = {(row.position, row.error.path, row.error.reason): row.error for row in rows if row.error}
    outcome = VerifyOutcome(failures=list(errors.values()))
    for row in rows:
        if row.verification is not None:
            outcome.verifications.append(row.verification)
            if row.sealed is not None:
                outcome.sealed[row.verification.path] = row.sealed
    if any(one.read_in_full is not None for one in documents):
        outcome.read_in_full = sum(one.read_in_full or 0 for one in documents)
    return outcome


@dataclass(frozen=True, slots=True)
class _Row:
    """A verdict or an error, and its place among all that was found; -1 for what all parts have met."""

    position: int
    verification: Verification | None = None
    sealed: SealResult | None = None
    error: CheckpointError | None = None

    @property
    def path(self) -> str:
        """Return the path that it is about."""
        told = self.verification or self.error
        return told.path if told is not None else ""


@dataclass(frozen=True, slots=True)
class _PartDocument:
    """What the document of a part says; ``run`` tells which run it is of."""

    path: str
    part: Part
    run: tuple[int, str]
    rows: tuple[_Row, ...]
    read_in_full: int | None


def _read(path: str) -> _PartDocument:
    with fs.open_source(path) as source:
        if not source.size:
            raise DamagedCheckpoint(path, "an empty file: this part has not ended", expected=_EXPECTED)
        document = parse_json(path, source.read(0, source.size), "document", surrogates=True)
    if not isinstance(document, dict) or document.get("schema") != "ckpttool.verify/1":
        raise DamagedCheckpoint(path, "something else", expected=_EXPECTED)
    if "part" not in document:
        raise DamagedCheckpoint(path, "the document of a whole run", expected=_EXPECTED)
    try:
        part = Part.parse(f"{document['part']}/{document['of']}")
        rows = [_verdict_row(row) for row in document["checkpoints"]]
        rows += [_error_row(row) for row in document.get("errors", ())]
        sampled = document.get("sampled")
        full = None if sampled is None else int(sampled["full"])
        run = (int(document["found"]), str(document["split"]))
    except (AttributeError, KeyError, TypeError, ValueError) as failure:
        raise DamagedCheckpoint(path, "an entry is malformed", expected=_EXPECTED) from failure
    return _PartDocument(path, part, run, tuple(rows), full)


def _verdict_row(row: Mapping[str, Any]) -> _Row:
    verification = Verification(
        str(row["path"]),
        row["format"],
        row["variant"],
        Safety(row["safety"]),
        tuple(Check(one["name"], Status(one["status"]), one["detail"]) for one in row["checks"]),
        tuple(
            Finding(
                one["code"],
                Severity(one["severity"]),
                one["message"],
                one["where"],
                check=one["check"],
                ignored=one.get("ignored"),
                tensors=tuple(one.get("tensors", ())),
            )
            for one in row["findings"]
        ),
        int(row["bytes"]),
    )
    if (row["verdict"] == "valid") is not verification.is_valid:
        raise ValueError("a verdict that its checks don't give")
    sealed = None
    if (manifest := row.get("manifest")) is not None:
        files = tuple(manifest["files"])
        sealed = SealResult(files, manifest["refused"], bool(files) and not manifest["written"])
    return _Row(int(row["position"]), verification, sealed)


def _error_row(row: Mapping[str, Any]) -> _Row:
    return _Row(int(row["position"]), error=CheckpointError(str(row["path"]), str(row["message"])))


def _require_all(documents: Sequence[_PartDocument]) -> None:
    """Require that documents are those of all parts of one run, each once."""
    first = documents[0]
    numbers: dict[int, str] = {}
    owners: dict[str, str] = {}
    for one in documents:
        if one.part.of != first.part.of:
            raise UsageError(f"{one.path}: part {one.part}, but {first.path} is part {first.part}")
        if one.part.number in numbers:
            raise UsageError(f"{one.path}: part {one.part} again (it is also {numbers[one.part.number]})")
        numbers[one.part.number] = one.path
        if one.run != first.run:
            raise UsageError(
                f"{one.path}: not of the same run as {first.path}: other options, or checkpoints were added, "
                f"removed or changed in between ({one.run[0]:,} were found, and {first.run[0]:,})"
            )
        for path in {row.path for row in one.rows if row.position >= 0}:
            if path in owners:
                raise UsageError(f"{one.path}: {path} is in {owners[path]}, too")
            owners[path] = one.path
    if missing := [number for number in range(1, first.part.of + 1) if number not in numbers]:
        listed = ", ".join(map(str, missing[:_MOST_NAMED])) + (", …" if len(missing) > _MOST_NAMED else "")
        raise UsageError(f"{counted(len(missing), 'part')} of {first.part.of:,} missing: {listed}")
