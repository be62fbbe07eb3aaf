"""The JSON documents of ``--part``, and their merge into the document of one run.

The files are untrusted: a part that is missing, duplicate, or of another run is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ckpttool.cli.verdicts import VerifyOutcome
from ckpttool.containers.jsontext import parse_json
from ckpttool.core.errors import CheckpointError, DamagedCheckpoint, UsageError
from ckpttool.core.result import messages, plain, record_of
from ckpttool.core.text import counted
from ckpttool.ops.manifest_seal import SealResult
from ckpttool.ops.verdict import VERIFY_SCHEMA, Verification
from ckpttool.ops.workload import Part, digest_of_work
from ckpttool.runs.listing import LIST_SCHEMA, Listing
from ckpttool.storage import fs

T = TypeVar("T")
_EXPECTED = "a document of --part --json"
_MOST_NAMED = 10


def list_part_document(listing: Listing, part: Part, depth: str) -> dict[str, Any]:
    """Return the document of ``list`` with the rows of a part; the series are those of all checkpoints."""
    document = listing.document()
    rows = []
    for position, (row, listed) in enumerate(zip(document["checkpoints"], listing.checkpoints, strict=True)):
        if listed.part == part.number:
            rows.append({**row, "position": position})
    sizes = {one.entry.path: one.entry.nbytes for one in listing.checkpoints}
    others = {one.entry.path for one in listing.checkpoints if one.part != part.number}
    problems = [one for one in listing.problems if one.path not in others]
    return {
        "schema": document.pop("schema"),
        "part": part.number,
        "of": part.of,
        "found": len(listing.checkpoints),
        "split": digest_of_work(sizes, (depth,)),
        **document,
        "checkpoints": rows,
        "problems": plain(problems),
    }


def read_parts(paths: Sequence[str]) -> list[PartDocument]:
    """Return the documents of all parts of one run.

    Raises:
        CheckpointError: A file can't be read, or isn't such a document.
        UsageError: A part is missing, or the parts are of different runs.
    """
    documents = [_read(path) for path in paths]
    _require_all(documents)
    return documents


def merge_verdicts(documents: Sequence[PartDocument]) -> VerifyOutcome:
    """Return the outcome of one run of ``verify`` from those of its parts."""
    # Each row has its position among all targets, so the merged rows have the order of a run without parts.
    # Positions must be complete and unique, counting targets that were removed meanwhile (``gone``): a part
    # that was killed, or run on another set of files, would otherwise pass for a success.
    owners: dict[str, str] = {}
    rows: list[_Row] = []
    removed: list[int] = []
    outcome = VerifyOutcome()
    for one in documents:
        own = one.parsed(_rows_of)
        removed += one.parsed(lambda body: [*map(int, body["gone"])])
        for path in {row.path for row in own if row.position >= 0}:
            if path in owners:
                raise UsageError(f"{one.path}: {path} is also in {owners[path]}")
            owners[path] = one.path
        rows += own
        outcome.unread |= one.parsed(_unread_of)
        outcome.strict = one.parsed(lambda body: bool(body["strict"]))
        sampled = one.parsed(lambda body: int(body["sampled"]["full"]) if "sampled" in body else None)
        if sampled is not None:
            outcome.read_in_full = (outcome.read_in_full or 0) + sampled
    found, _ = documents[0].run
    covered = [*removed, *(row.position for row in rows if 0 <= row.position < found)]
    if sorted(covered) != [*range(found)]:
        raise UsageError(f"the parts cover {len(covered):,} of {found:,} checkpoints")
    # Errors without a position, such as an unreadable directory, are in each part; they are merged into one.
    rows.sort(key=lambda row: row.position)
    errors = {(row.position, row.error.path, row.error.reason): row.error for row in rows if row.error}
    outcome.failures += errors.values()
    for row in rows:
        if row.verification is not None:
            outcome.verifications.append(row.verification)
            if row.sealed is not None:
                outcome.sealed[row.verification.path] = row.sealed
    return outcome


def _unread_of(body: Mapping[str, Any]) -> dict[str, str]:
    return {str(one["path"]): str(one["message"]) for one in body.get("unread", ())}


def merge_lists(
    documents: Sequence[PartDocument],
) -> tuple[dict[str, Any], list[tuple[str, str]], dict[str, str]]:
    """Return the result of one ``list`` in place of its parts.

    The newest valid checkpoint is determined here, since no part knows which ones the others found damaged.

    Returns:
        The document, path and message of each problem, and why models are not read, by path.
    """
    # All parts list all series, with the same counts, and each the rows of its own checkpoints. Only
    # ``newest`` may differ, which each part has determined without the verdicts of the others.
    rows: dict[int, dict[str, Any]] = {}
    problems: dict[tuple[str, str], None] = {}
    series: list[dict[str, Any]] = []
    for one in documents:
        own, listed, met = one.parsed(_list_of)
        if series and _without_newest(listed) != _without_newest(series):
            raise UsageError(f"{one.path}: its series differ from those of {documents[0].path}")
        series = listed
        problems.update(dict.fromkeys(met))
        for row in own:
            if (other := rows.setdefault(row.pop("position"), row)) is not row:
                raise UsageError(f"{one.path}: {row['path']} and {other['path']} have the same position")
    found, _ = documents[0].run
    if sorted(rows) != [*range(found)] or sum(one["count"] for one in series) != found:
        raise UsageError(f"the parts list {len(rows):,} of {found:,} checkpoints")
    ordered = [rows[position] for position in range(found)]
    begin = 0
    for one_series in series:
        own = ordered[begin : begin + one_series["count"]]
        sound = [row["path"] for row in own if row["fault"] is None]
        one_series["newest"] = sound[-1] if sound else None
        for row in own:
            row["newest"] = row["path"] == one_series["newest"]
        begin += one_series["count"]
    runs = documents[0].parsed(lambda body: [*body["runs"]])
    document: dict[str, Any] = {"schema": LIST_SCHEMA, "checkpoints": ordered, "series": series, "runs": runs}
    unread = {path: why for one in documents for path, why in one.parsed(_unread_of).items()}
    if unread:
        document["unread"] = messages(unread)
    return document, [*problems], unread


def _without_newest(series: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**one, "newest": None} for one in series]


def _list_of(
    body: Mapping[str, Any],
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[tuple[str, str]]]:
    rows = [{**row, "position": int(row["position"])} for row in body["checkpoints"]]
    if not all({"path", "fault"} <= row.keys() for row in rows):
        raise KeyError("a row without a path")
    series = [{**one, "count": int(one["count"])} for one in body["series"]]
    return rows, series, [(str(one["path"]), str(one["message"])) for one in body["problems"]]


def _rows_of(body: Mapping[str, Any]) -> list[_Row]:
    rows = [_verdict_row(row) for row in body["checkpoints"]]
    for row in body.get("errors", ()):
        error = CheckpointError(str(row["path"]), str(row["message"]))
        rows.append(_Row(int(row["position"]), error=error))
    return rows


@dataclass(frozen=True, slots=True)
class _Row:
    """A verdict or an error, and its position among all targets; -1 if all parts have it."""

    position: int
    verification: Verification | None = None
    sealed: SealResult | None = None
    error: CheckpointError | None = None

    @property
    def path(self) -> str:
        """Return the path that it is about."""
        source = self.error if self.verification is None else self.verification  # an invalid one is false
        return source.path if source is not None else ""


@dataclass(frozen=True, slots=True)
class PartDocument:
    """The document of a part; ``run`` identifies the run."""

    path: str
    schema: str
    part: Part
    run: tuple[int, str]
    body: dict[str, Any]

    def parsed(self, parse: Callable[[dict[str, Any]], T]) -> T:
        """Return the result of parsing its body.

        Raises:
            DamagedCheckpoint: Something in it is missing, or of another kind.
        """
        try:
            return parse(self.body)
        except (AttributeError, KeyError, TypeError, ValueError) as failure:
            raise DamagedCheckpoint(self.path, "an entry is malformed", expected=_EXPECTED) from failure


def _read(path: str) -> PartDocument:
    with fs.open_source(path) as source:
        if not source.size:
            raise DamagedCheckpoint(path, "an empty file: this part has not finished", expected=_EXPECTED)
        body = parse_json(path, source.read(0, source.size), "document", surrogates=True)
    if not isinstance(body, dict) or body.get("schema") not in (VERIFY_SCHEMA, LIST_SCHEMA):
        raise DamagedCheckpoint(path, "an unknown document", expected=_EXPECTED)
    if "part" not in body:
        raise DamagedCheckpoint(path, "the document of a whole run", expected=_EXPECTED)
    try:
        part = Part.parse(f"{body['part']}/{body['of']}")
        run = (int(body["found"]), str(body["split"]))
    except (KeyError, TypeError, ValueError) as failure:
        raise DamagedCheckpoint(path, "an entry is malformed", expected=_EXPECTED) from failure
    return PartDocument(path, str(body["schema"]), part, run, body)


def _verdict_row(row: Mapping[str, Any]) -> _Row:
    verification = record_of(Verification, row)
    if row["verdict"] != verification.verdict:
        raise ValueError("the verdict contradicts the checks")
    manifest = row.get("manifest")
    sealed = None if manifest is None else record_of(SealResult, manifest)
    return _Row(int(row["position"]), verification, sealed)


def _require_all(documents: Sequence[PartDocument]) -> None:
    """Require that documents are those of all parts of one run, each once."""
    first = documents[0]
    numbers: dict[int, str] = {}
    for one in documents:
        if one.part.of != first.part.of:
            raise UsageError(f"{one.path}: part {one.part}, but {first.path} is part {first.part}")
        if one.part.number in numbers:
            raise UsageError(f"{one.path}: duplicate part {one.part} (also in {numbers[one.part.number]})")
        numbers[one.part.number] = one.path
        if (one.schema, one.run) != (first.schema, first.run):
            raise UsageError(
                f"{one.path}: not from the same run as {first.path}: the options differ, or checkpoints were "
                f"added, removed or changed in between ({one.run[0]:,} and {first.run[0]:,} found)"
            )
    if missing := [number for number in range(1, first.part.of + 1) if number not in numbers]:
        listed = ", ".join(map(str, missing[:_MOST_NAMED])) + (", …" if len(missing) > _MOST_NAMED else "")
        raise UsageError(f"{counted(len(missing), 'part')} of {first.part.of:,} missing: {listed}")
