"""Copies intact checkpoints to another directory, on a disk or in a store, and proves that they arrived.

Indexes and commit markers are copied last, so that an interrupted copy is an incomplete checkpoint. As its
parts may look like other checkpoints, a note in the directory lists them until the copy is complete. The next
copy continues: files that are equal at the destination, byte for byte, aren't sent again.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from glob import escape
from typing import TYPE_CHECKING, Any, ClassVar

from ckpttool.core.errors import (
    CheckpointError,
    DamagedCheckpoint,
    NotACheckpoint,
    NotFound,
    Unsupported,
    UsageError,
    from_os_error,
)
from ckpttool.core.options import (
    EXECUTION_PANEL,
    Depth,
    argument,
    attribute_names,
    group,
    jobs_option,
    option,
    require_known,
    shows_keywords,
)
from ckpttool.core.report import Problem
from ckpttool.core.result import Table, document_of
from ckpttool.core.text import counted
from ckpttool.formats import recognition_error
from ckpttool.formats.discovery import OWN_PREFIX, Walk, discover
from ckpttool.formats.interface import MANIFEST_SUFFIXES, Probe, Unit, natural_path
from ckpttool.formats.opening import COPYING, EVERYTHING, read_note
from ckpttool.formats.traits import is_commit_marker
from ckpttool.ops.copy_check import is_same
from ckpttool.ops.file_copy import (
    BadDestination,
    change_note,
    copy_file,
    is_unchanged,
    remove_file,
    status_of,
    target_status,
)
from ckpttool.runs.look import Progress, first_error, no_progress
from ckpttool.runs.pruning.prune import Confirm, Pruned, prune
from ckpttool.runs.retention.request import PruneRequest
from ckpttool.runs.retention.rules import CHOICES, ChoiceKeywords, Policy
from ckpttool.runs.scope import Scope, ScopeKeywords
from ckpttool.storage import fs
from ckpttool.storage.held import holds
from ckpttool.storage.work import Advance, in_order, no_advance
from ckpttool.transaction.paths import is_within, shown, without_trailing_slashes

if TYPE_CHECKING:
    from typing_extensions import Unpack


_SMALL_FILE = 1 << 24
"""Limit on the bytes of files that are sent to a store at the same time; larger ones are sent in parts."""
_CONCURRENT_UPLOADS = 8
_FOREIGN = "its name contains a backslash, which separates directories on other systems"
_MAX_NAMES_SHOWN = 3


class CopyStatus(str, enum.Enum):
    """Result for one checkpoint: ``present`` was there before, ``failed`` could not be copied."""

    COPIED = "copied"
    PRESENT = "present"
    DIFFERS = "differs"
    INVALID = "invalid"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class CheckpointCopy:
    """Result of copying one checkpoint; of a dry run, the expected one.

    Attributes:
        path: Path of the checkpoint.
        target: Path of its copy.
        status: Result.
        nbytes: Bytes of its files.
        sent_bytes: Bytes that were sent, or would be.
        why: Why it isn't copied.
    """

    path: str
    target: str
    status: CopyStatus
    nbytes: int = 0
    sent_bytes: int = 0
    why: str | None = None

    @property
    def is_there(self) -> bool:
        """Return whether the destination has it, byte for byte; for a dry run, whether it would."""
        return self.status in (CopyStatus.COPIED, CopyStatus.PRESENT)

    def document(self) -> dict[str, Any]:
        return document_of(self, names={"reason": "why"})


@dataclass(frozen=True, slots=True, repr=False)
class Copied(Table):
    """Result of ``copy``; of a dry run, the expected one.

    Attributes:
        destination: The directory of the copies.
        checkpoints: Result for each checkpoint.
        dry_run: Whether nothing was changed.
        problems: Errors in the sources.
        warnings: Leftovers that could not be removed.
        left_out: Paths of checkpoints that the policy doesn't keep, so that they aren't copied.
        pruned: Result of pruning the destination; None without a policy.
    """

    _ROWS: ClassVar[tuple[str | int, ...]] = ("checkpoints",)

    destination: str
    checkpoints: tuple[CheckpointCopy, ...]
    dry_run: bool = False
    problems: tuple[Problem, ...] = ()
    warnings: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    pruned: Pruned | None = None

    def document(self) -> dict[str, Any]:
        keys = ("destination", "dry_run", "complete", "checkpoints", "left_out", "pruned", "errors")
        return {"schema": "ckpttool.copy/1", **document_of(self, *keys, names={"complete": "is_complete"})}

    @property
    def is_complete(self) -> bool:
        """Return whether the destination has every checkpoint of the request."""
        return not self.problems and all(one.is_there for one in self.checkpoints)

    @property
    def summary(self) -> str:
        """Return the number of checkpoints at the destination."""
        there = sum(one.is_there for one in self.checkpoints)
        return f"{there:,} of {counted(len(self.checkpoints), 'checkpoint')} in {self.destination}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyRequest(Scope):
    """Options of ``copy``.

    Attributes:
        sources: Checkpoints, or directories of checkpoints.
        destination: The directory to put them in.
        policy: Policy of the destination; None keeps everything.
        force: Whether a different checkpoint of the same name is replaced.
        depth: How a checkpoint is verified before it is copied.
        jobs: Number of threads.
    """

    sources: tuple[str, ...] = argument(
        "SRC...", "Checkpoints, or directories of checkpoints; paths or URLs."
    )
    destination: str = argument("DST", "The directory to copy them to; a path or a URL.")
    policy: Policy | None = group(
        Policy,
        CHOICES,
        help={"older_than": "Remove only checkpoints saved more than TIME (30d) ago."},
        is_record=True,
        default=None,
    )
    force: bool = option(
        "--force",
        help="Replace a different checkpoint of the same name.",
        panel=EXECUTION_PANEL,
        default=False,
    )
    depth: Depth = option(
        "--verify",
        help="Before copying, verify only the structure, or every byte. [default: full]",
        panel=EXECUTION_PANEL,
        default="full",
    )
    jobs: int | None = jobs_option()

    def __post_init__(self) -> None:
        if self.policy is not None and (rule := self.policy.alteration) is not None:
            raise UsageError(f"{rule.flags[0]}: copies are whole (prune slims them)")


class CopyKeywords(ScopeKeywords, ChoiceKeywords, total=False):
    """The attributes of ``CopyRequest`` but the paths, and those of its policy, for type checkers."""

    policy: Policy | None
    force: bool
    depth: Depth
    jobs: int | None


@shows_keywords(CopyRequest, Policy)
@holds("sources", "destination")
def copy(
    sources: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    destination: str | os.PathLike[str],
    *,
    dry_run: bool = False,
    confirm: Confirm | None = None,
    progress: Progress | None = None,
    **keywords: Unpack[CopyKeywords],
) -> Copied:
    """Copy checkpoints to another directory, or to or from an object store; nothing is sent twice.

    A checkpoint keeps its name, and its path below a source that is a directory of several.

    Args:
        sources: Checkpoints, and directories of checkpoints.
        destination: The directory to put them in, or its URL.
        dry_run: Whether to change nothing.
        confirm: Called with the plan before a policy removes something at the destination.
        progress: Called with what is copied, and how many bytes are to be read; see ``prune``.
        keywords: Attributes of ``CopyRequest``, and of the ``Policy`` that the destination keeps:
            ``copy("runs", "s3://bucket/runs", keep_last=5)``.

    Raises:
        UsageError: The destination is in a source, or two checkpoints would have one path there.
        CheckpointError: A source can't be looked at.
    """
    request = _request(sources, destination, keywords)
    progress = progress or no_progress
    copied = carry_out(plan_copy(request), dry_run=dry_run, progress=progress)
    return keep_policy(copied, request, confirm=confirm, progress=progress)


def _request(sources: Any, destination: str | os.PathLike[str], keywords: Mapping[str, Any]) -> CopyRequest:
    require_known(keywords, CopyRequest, Policy)
    rules = {name: value for name, value in keywords.items() if name in attribute_names(Policy)}
    more = {name: value for name, value in keywords.items() if name not in rules}
    paths: list[str | os.PathLike[str]]
    paths = [sources] if isinstance(sources, str | os.PathLike) else [*sources]
    if rules:
        more["policy"] = (
            replace(more.get("policy") or Policy(), **rules) if "policy" in more else Policy(**rules)
        )
    return CopyRequest(
        sources=tuple(os.fspath(path) for path in paths), destination=os.fspath(destination), **more
    )


# Plan ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _File:
    """File of a checkpoint, with its target path."""

    path: str
    target: str

    @property
    def rank(self) -> tuple[bool, bool, str]:
        """Return the sort key of the order of copying: commit markers and indexes late, manifests last."""
        # A manifest that is older than its checkpoint is ignored, and a store's times are those of uploads.
        return (
            self.target.endswith(MANIFEST_SUFFIXES),
            is_commit_marker(os.path.basename(self.path)),
            self.path,
        )


@dataclass(frozen=True, slots=True)
class PlannedCopy:
    """Checkpoint to copy: its files, with their target paths."""

    unit: Unit
    target: str
    files: tuple[_File, ...]
    nbytes: int

    @property
    def work(self) -> int:
        """Return the number of bytes read to verify and to send it."""
        return 2 * self.nbytes

    @property
    def note(self) -> str | None:
        """Return the path of the note on its incomplete copy; None for a single file, which is atomic."""
        # The note on a directory is in it, so that the copy can't be opened under any path. Files of a set
        # are next to other checkpoints, and their names are in a note beside them.
        if fs.isdir(self.unit.path) and not fs.islink(self.unit.path):
            return os.path.join(self.target, COPYING)
        return os.path.join(os.path.dirname(self.target), COPYING) if len(self.members) > 1 else None

    @property
    def noted_names(self) -> list[str]:
        """Return the names for the note: everything in its directory, or the files of a set."""
        return [EVERYTHING] if os.path.dirname(self.note or "") == self.target else self.members

    @property
    def members(self) -> list[str]:
        above = os.path.dirname(self.target)
        return list(dict.fromkeys(os.path.relpath(file.target, above).split("/")[0] for file in self.files))


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """Checkpoints to copy, and errors found while searching for them."""

    request: CopyRequest
    copies: tuple[PlannedCopy, ...]
    problems: tuple[Problem, ...] = ()
    left_out: tuple[str, ...] = ()


def plan_copy(request: CopyRequest) -> CopyPlan:
    """Return the checkpoints to copy; only names and headers are read."""
    destination = without_trailing_slashes(request.destination)
    for path in (*request.sources, destination):
        fs.refresh(path)
    if request.policy is not None and not _is_prunable(destination):
        raise UsageError(f"{request.destination}: can't prune such a store (omit the rules)")
    errors: list[CheckpointError] = []
    units: list[tuple[str, Unit]] = []
    left_out: list[str] = []
    for source in dict.fromkeys(request.sources):
        found, skipped = _units_at(source, destination, request, errors)
        units += found
        left_out += skipped
    planned = [_planned(unit, root, destination) for root, unit in units]
    foreign = [one for one in planned if _has_foreign_path(one)]
    # A name ``..\evil.pt`` in a store would be a path outside the destination on Windows.
    errors += [Unsupported(one.unit.path, _FOREIGN) for one in foreign]
    copies = tuple(one for one in planned if one not in foreign)
    _require_distinct(copies)
    problems = tuple(Problem(shown(error.path), error.reason) for error in errors)
    return CopyPlan(request, copies, problems, tuple(left_out))


def _has_foreign_path(planned: PlannedCopy) -> bool:
    """Return whether a store's object would become a file with a backslash in its name."""
    source, target = fs.place_of(planned.unit.path), fs.place_of(planned.target)
    if source.opens_by_path or not target.opens_by_path:
        return False
    return any(
        "\\" in os.path.relpath(file.target, os.path.dirname(planned.target)) for file in planned.files
    )


def _is_prunable(directory: str) -> bool:
    try:
        return fs.place_of(directory).is_changeable(directory)
    except OSError as error:
        raise from_os_error(error, directory) from error


def _units_at(
    source: str, destination: str, request: CopyRequest, errors: list[CheckpointError]
) -> tuple[list[tuple[str, Unit]], list[str]]:
    """Return the checkpoints at a source, each with the base of its relative path; and paths left out."""
    path = without_trailing_slashes(source)
    if not fs.lexists(path) and status_of(os.path.dirname(path) or os.curdir) is None:
        raise NotFound(source, "no such file or directory")
    scope = Walk(request.recursive, request.exclude, request.max_depth, on_error=errors.append)
    units = sorted(discover(path, scope), key=lambda unit: natural_path(unit.path))
    if not units and not errors:
        if fs.isdir(path):
            raise NotACheckpoint(source, "no checkpoint in this directory")
        with Probe(path) as probe:
            raise recognition_error(probe)
    is_itself = [unit.path for unit in units] == [path]
    if is_itself and os.path.basename(path) in (
        "",
        os.curdir,
        os.pardir,
    ):  # it has a name, and is copied to it
        return _units_at(fs.abspath(path), destination, request, errors)
    root = os.path.dirname(path) if is_itself else path
    if not is_itself and is_within(fs.realpath(destination), fs.realpath(root)):
        raise UsageError(f"{destination} is inside {source}, which can't be copied into itself")
    skipped = _not_kept(path, request) if request.policy is not None and not is_itself else frozenset()
    left_out = [unit.path for unit in units if fs.normpath(unit.path) in skipped]
    return [(root, unit) for unit in units if unit.path not in left_out], left_out


def _not_kept(directory: str, request: CopyRequest) -> frozenset[str]:
    """Return the paths of checkpoints that aren't sent, as the policy would remove them right afterwards."""
    from ckpttool.runs.pruning.planning import make_plan

    planned = make_plan(_prune_request(directory, request, depth="quick"))
    return frozenset(fs.normpath(entry.unit.path) for entry in planned.plan.removals)


def _prune_request(directory: str, request: CopyRequest, depth: Depth) -> PruneRequest:
    scope = {name: getattr(request, name) for name in attribute_names(Scope)}
    return PruneRequest(directory=directory, policy=request.policy, depth=depth, jobs=request.jobs, **scope)


def _planned(unit: Unit, root: str, destination: str) -> PlannedCopy:
    """Return the files of a checkpoint in the order in which they are copied."""
    directory = os.path.dirname(unit.path.rstrip(os.sep))
    shared = Unit(unit.path, unit.shared, None) if unit.shared else None
    paths = dict.fromkeys([*unit.files(), *(shared.files() if shared else ())])

    def target_of(path: str) -> str:
        return os.path.join(destination, os.path.relpath(path, root or os.curdir))

    files = [
        _File(path, target_of(path))
        for path in paths
        if fs.lexists(path) and not _is_internal(os.path.relpath(path, directory or os.curdir))
    ]
    nbytes = sum(fs.getsize(file.path) for file in files if fs.exists(file.path))
    ordered = tuple(sorted(files, key=lambda file: file.rank))
    return PlannedCopy(unit._replace(path=shown(unit.path)), target_of(unit.path), ordered, nbytes)


def _is_internal(path: str) -> bool:
    """Return whether a path is one of ckpttool's own files, such as a note or a stage."""
    return any(name.startswith(OWN_PREFIX) for name in path.split("/"))


def _require_distinct(copies: Sequence[PlannedCopy]) -> None:
    sources: dict[str, str] = {}
    for planned in copies:
        for file in planned.files:
            other = sources.setdefault(file.target, file.path)
            if fs.normpath(other) != fs.normpath(file.path):
                raise UsageError(
                    f"{other} and {file.path} would both be {file.target} (copy them one by one)"
                )
            if fs.realpath(file.target) == fs.realpath(file.path):
                raise UsageError(f"{file.path} would be copied to itself")


# Copying --------------------------------------------------------------------------------------------


def carry_out(plan: CopyPlan, *, dry_run: bool = False, progress: Progress = no_progress) -> Copied:
    """Copy the checkpoints of a plan; an unwritable destination ends it, other failures are recorded."""
    done: list[CheckpointCopy] = []
    warnings: dict[str, None] = {}
    is_stopped = False
    for planned in plan.copies:
        if is_stopped:
            done.append(_outcome(planned, CopyStatus.FAILED, "not tried after the previous failure"))
            continue
        try:
            copying = _Copying(planned, plan.request, dry_run)
            with progress(planned.unit.path, planned.work) as advance:
                done.append(copying.run(advance))
            warnings.update(dict.fromkeys(copying.warnings))
        except (CheckpointError, UsageError) as failure:
            is_stopped = isinstance(failure, BadDestination)
            has_path = isinstance(failure, CheckpointError) and failure.path != planned.unit.path
            why = failure.reason if isinstance(failure, CheckpointError) and not has_path else str(failure)
            done.append(_outcome(planned, CopyStatus.FAILED, why))
    return Copied(
        plan.request.destination, tuple(done), dry_run, plan.problems, tuple(warnings), plan.left_out
    )


def keep_policy(
    copied: Copied,
    request: CopyRequest,
    *,
    confirm: Confirm | None = None,
    progress: Progress = no_progress,
) -> Copied:
    """Prune the destination by the request's policy, if all checkpoints have arrived."""
    has_all = copied.checkpoints and all(one.is_there for one in copied.checkpoints)
    if request.policy is None or copied.dry_run or not has_all:
        return copied
    destination = without_trailing_slashes(request.destination)
    # A policy may remove at the destination what it keeps in the source, where pins and pointers protect
    # more. The next copy would send it again, and so on; so checkpoints that were just copied are kept.
    preview = prune(_prune_request(destination, request, "quick"), dry_run=True)
    targets = {fs.normpath(one.target) for one in copied.checkpoints}
    removed = [entry.unit.path for entry in preview.plan.removals if fs.normpath(entry.unit.path) in targets]
    names = (escape(os.path.relpath(path, destination)) for path in removed)
    policy = replace(request.policy, keep_names=(*request.policy.keep_names, *names))
    prune_request = _prune_request(destination, replace(request, policy=policy), request.depth)
    return replace(copied, pruned=prune(prune_request, confirm=confirm, progress=progress))


def _outcome(
    planned: PlannedCopy, status: CopyStatus, why: str | None = None, sent_bytes: int = 0
) -> CheckpointCopy:
    return CheckpointCopy(planned.unit.path, planned.target, status, planned.nbytes, sent_bytes, why)


class _Invalid(Exception):
    """A checkpoint that isn't valid; the message says why."""


class _Copying:
    """Copying of one checkpoint."""

    def __init__(self, planned: PlannedCopy, request: CopyRequest, dry_run: bool) -> None:
        self._planned, self._request, self._dry_run = planned, request, dry_run
        self._seen = {file: _existing_status(file.path) for file in planned.files}
        self._there = {file: target_status(file.target) for file in planned.files}
        self.warnings: list[str] = []
        if not dry_run:
            self._clear_stages()

    def _clear_stages(self) -> None:
        """Remove leftovers of killed copies in the target directories, even if nothing is left to copy."""
        from ckpttool.transaction.staged_output import clear_areas

        targets = (*(file.target for file in self._planned.files), *self._notes())
        for directory in dict.fromkeys(map(os.path.dirname, targets)):
            self.warnings += clear_areas(directory or os.curdir)

    @property
    def _name(self) -> str:
        return os.path.basename(self._planned.target)

    def run(self, advance: Advance) -> CheckpointCopy:
        """Copy the missing files; return the result."""
        planned, others = self._planned, self._extra_paths()
        missing, differing = self._compare(advance)
        if others or (differing and not self._request.force):
            why = f"it also contains {_named(others)}" if others else _named_differences(planned, differing)
            return _outcome(planned, CopyStatus.DIFFERS, why)
        # A copy may be unfinished although all files are equal: it was interrupted before it was verified, or
        # before its note was removed. Then only these last steps are done.
        files = [*missing, *differing]
        if not files and not self._is_unfinished():
            return _outcome(planned, CopyStatus.PRESENT)
        try:
            self._verify(planned.unit, "quick" if self._verifies_arrived else self._request.depth, advance)
            if not self._dry_run:
                self._send(files, bool(differing), advance)
        except _Invalid as fault:
            return _outcome(planned, CopyStatus.INVALID, str(fault))
        nbytes = sum(self._seen[file].st_size for file in files)
        return _outcome(planned, CopyStatus.COPIED if files else CopyStatus.PRESENT, sent_bytes=nbytes)

    @property
    def _verifies_arrived(self) -> bool:
        """Return whether the copy is verified instead of the source, as reading a store twice takes long."""
        source, target = fs.place_of(self._planned.unit.path), fs.place_of(self._planned.target)
        return not source.reads_are_free and target.reads_are_free and self._request.depth == "full"

    def _is_unfinished(self) -> bool:
        """Return whether a note marks the copy as incomplete or unverified."""
        return any(
            target_status(note) is not None and self._name in read_note(note) for note in self._notes()
        )

    def _notes(self) -> list[str]:
        """Return the possible paths of notes: next to the copy, and in its directory."""
        note, beside = self._planned.note, os.path.join(os.path.dirname(self._planned.target), COPYING)
        return [] if note is None else list(dict.fromkeys((beside, note)))

    def _compare(self, advance: Advance) -> tuple[list[_File], list[_File]]:
        """Return the files that are missing or different at the destination; the rest is proven equal."""
        # Equal size and time prove nothing, as another save may have both: contents are compared, or the
        # digests that a store keeps.
        missing = [file for file, status in self._there.items() if status is None]
        differing = []
        for file, status in self._there.items():
            if status is not None and (
                status.st_size != self._seen[file].st_size or not is_same(file.path, file.target, advance)
            ):
                differing.append(file)
        return missing, differing

    def _extra_paths(self) -> list[str]:
        """Return the paths in the destination's directories that aren't files of the checkpoint."""
        # A reader of the directory would take them for parts of the copy, such as the shards of an older save
        # with more ranks. They are never removed, not even with ``force``: the copy is refused.
        own = {file.target for file in self._planned.files}
        above = os.path.dirname(self._planned.target)
        tops = {os.path.join(above, name) for name in self._planned.unit.members}
        found = [
            os.path.join(directory, name)
            for top in sorted(tops)
            if top not in own and fs.isdir(top)
            for directory, _, names in fs.walk(top)
            for name in names
        ]
        return [
            os.path.relpath(path, above)
            for path in found
            if path not in own and not _is_internal(os.path.relpath(path, above))
        ]

    def _verify(self, unit: Unit, depth: Depth, advance: Advance) -> None:
        from ckpttool.ops.verdict import CHECKS, QUICK_CHECKS
        from ckpttool.ops.verify import verify

        checks = CHECKS if depth == "full" else QUICK_CHECKS
        verdict = verify(unit, only=checks, jobs=self._request.jobs, advance=advance)
        if not verdict.is_valid:
            raise _Invalid(first_error(verdict.findings) or "not everything could be checked")

    # Sending ----------------------------------------------------------------------------------------

    def _send(self, files: Sequence[_File], replaces: bool, advance: Advance) -> None:
        """Send files in their order; if one changed meanwhile, the commit markers aren't sent."""
        # 1. A note marks the copy as incomplete. 2. If a different checkpoint is replaced, its markers are
        # removed, so that no mixture of both looks complete. 3. Data are sent, in any order. 4. All sources
        # must still be the files that were verified. 5. Markers and indexes are sent. 6. The note is removed.
        note = self._planned.note
        if note is not None:
            change_note(note, lambda copies: copies.update({self._name: self._planned.noted_names}))
        if replaces and len(self._planned.files) > 1:
            self._remove_markers()
        ordered = sorted(files, key=lambda file: file.rank)
        self._send_all([file for file in ordered if not self._is_sent_last(file)], advance)
        changed = next((file for file, seen in self._seen.items() if not is_unchanged(file.path, seen)), None)
        if changed is not None:
            raise DamagedCheckpoint(
                changed.path, "it changed while it was copied", expected="run the command again"
            )
        for file in filter(self._is_sent_last, ordered):
            self._send_one(advance, file)
        if note is not None and self._verifies_arrived:
            self._verify_arrived(files, advance)
        for one in self._notes():
            change_note(one, lambda copies: copies.pop(self._name, None))

    def _verify_arrived(self, files: Sequence[_File], advance: Advance) -> None:
        """Verify the copy while a note marks it as incomplete; remove it if it is damaged."""
        # A directory with a note in it can't be opened as a checkpoint. So for the verification the mark
        # moves to a note next to the copy, by which searches of the directory skip it.
        beside, *inside = self._notes()
        change_note(beside, lambda copies: copies.update({self._name: self._planned.members}))
        for one in inside:
            change_note(one, lambda copies: copies.pop(self._name, None))
        try:
            self._verify(self._planned.unit._replace(path=self._planned.target), "full", advance)
        except _Invalid:
            for file in files:
                remove_file(file.target, target_status(file.target))
            change_note(beside, lambda copies: copies.pop(self._name, None))
            raise

    def _verify_staged(self, path: str) -> None:
        """Verify a file that arrived, and doesn't have its name yet."""
        self._verify(self._planned.unit._replace(path=path), "full", no_advance)

    def _is_sent_last(self, file: _File) -> bool:
        return any(file.rank[:2]) or file.target == self._planned.target

    def _remove_markers(self) -> None:
        """Remove the commit markers of the old checkpoint."""
        for file, status in self._there.items():
            if status is not None and is_commit_marker(os.path.basename(file.path)):
                remove_file(file.target, status)
                self._there[file] = None

    def _send_all(self, files: Sequence[_File], advance: Advance) -> None:
        # For small files the latency of a request counts, so several are sent at once. Large ones are sent in
        # parts, one file after the other.
        takes_requests = not fs.place_of(self._planned.target).reads_are_free
        small = [file for file in files if takes_requests and self._seen[file].st_size <= _SMALL_FILE]
        send = partial(self._send_one, advance)
        in_order(lambda file, _: send(file), small, _CONCURRENT_UPLOADS)
        for file in files:
            if file not in small:
                send(file)

    def _send_one(self, advance: Advance, file: _File) -> None:
        there = self._there[file]
        check = self._verify_staged if self._verifies_arrived and self._planned.note is None else None
        self.warnings += copy_file(file.path, self._seen[file], file.target, there, advance, check)


def _existing_status(path: str) -> os.stat_result:
    status = status_of(path)
    if status is None:
        raise from_os_error(FileNotFoundError(), path)
    return status


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_NAMES_SHOWN:,} more" if len(names) > _MAX_NAMES_SHOWN else ""
    return f"{', '.join(names[:_MAX_NAMES_SHOWN])}{more}"


def _named_differences(planned: PlannedCopy, differing: Sequence[_File]) -> str:
    if len(planned.files) == 1:
        return "another file has its name"
    names = [os.path.relpath(file.target, os.path.dirname(planned.target)) for file in differing]
    return f"the content differs in {_named(names)}"
