"""Lists of checkpoints by series: the newest, the best, and the pointers to them."""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpttool.core.errors import UsageError
from ckpttool.core.options import Depth, Mode
from ckpttool.core.report import Problem
from ckpttool.core.result import CheckpointTable, document_of, messages, plain
from ckpttool.core.text import counted, file_size, utc_time
from ckpttool.formats.interface import MANIFEST_SUFFIXES, natural_path
from ckpttool.ops.workload import Part, split
from ckpttool.runs.entry import Entry
from ckpttool.runs.look import Progress, no_progress, read_each_in_full
from ckpttool.runs.modes import check_mode, resolve_mode
from ckpttool.runs.pointers.kinds import Pointers
from ckpttool.runs.pointers.pin_lists import NO_REMARK, Remark
from ckpttool.runs.pointers.pins import remarks_beside
from ckpttool.runs.pointers.search import PointerProtections
from ckpttool.runs.pruning.planning import PrunePlan, make_plan
from ckpttool.runs.reasons import Reason, true_of_all
from ckpttool.runs.retention.request import PruneRequest
from ckpttool.runs.retention.rules import is_carried_on
from ckpttool.runs.run_directories import Parameters, hyper_parameters
from ckpttool.runs.saves import fault_beside, parts_of, series_of_saves
from ckpttool.runs.scope import GroupBy, Scope
from ckpttool.runs.series import Group, order_entries
from ckpttool.runs.survey import Survey, survey_directory, upload_warnings
from ckpttool.storage import fs
from ckpttool.transaction.paths import shown

if TYPE_CHECKING:
    from concurrent.futures import Executor

LIST_SCHEMA = "ckpttool.list/1"
SortKey = Callable[[Entry], Any]
"""Sort key of a checkpoint, the least first; None if it is unknown."""


ORDERS: Mapping[str, SortKey] = {
    "epoch": lambda entry: entry.epoch,
    "step": lambda entry: entry.step,
    "age": lambda entry: -entry.modified_ns,
    "size": lambda entry: entry.nbytes,
    "name": lambda entry: natural_path(entry.path),
}
"""Orders besides those by a metric."""


class DirectoryPreview(NamedTuple):
    """Survey of a directory, with the protections by pointers and the plan of a policy."""

    survey: Survey
    protections: PointerProtections
    planned: PrunePlan | None = None
    refused: tuple[Problem, ...] = ()
    uploads: tuple[str, ...] = ()

    @property
    def problems(self) -> list[Problem]:
        """Return the errors of the survey, and refusals of the plan."""
        return [*(Problem(shown(error.path), error.reason) for error in self.survey.errors), *self.refused]

    @property
    def warnings(self) -> list[str]:
        """Return the warnings of the survey, pointers and plan."""
        planned = () if self.planned is None else self.planned.warnings
        return list(
            dict.fromkeys([*self.survey.warnings, *self.protections.warnings, *self.uploads, *planned])
        )


class ListedCheckpoint(NamedTuple):
    """A checkpoint in a list.

    Attributes:
        entry: The checkpoint; its fault includes those found by a full read.
        protected: Reasons that protect it.
        is_newest: Whether it is the newest sound one of its series.
        is_best: Whether it is the best sound one of its series by the requested metric; False in a series of
            one.
        is_read: Whether every byte of it was read.
        kept: Reasons of a policy to keep it; empty if it would be removed, None without a policy.
        remark: Remark of users.
        is_slimmed: Whether the policy would keep it without its training state.
        part: Number of the part of the work that reads it in full; None if the work isn't split.
    """

    entry: Entry
    protected: tuple[str, ...] = ()
    is_newest: bool = False
    is_best: bool = False
    is_read: bool = False
    kept: tuple[str, ...] | None = None
    remark: Remark = NO_REMARK
    is_slimmed: bool = False
    part: int | None = None

    @property
    def state(self) -> str:
        """Return its state in a word: ``readable`` was opened, ``intact`` was read in full.

        ``unsafe`` takes precedence over all other states.
        """
        if self.entry.danger is not None:
            return "unsafe"
        if self.entry.fault is not None:
            return self.entry.fault.code.value
        return "intact" if self.is_read else "readable"

    def document(self) -> dict[str, Any]:
        entry, names = self.entry, {"fault": "entry.fault", "newest": "is_newest", "best": "is_best"}
        document = {
            **document_of(entry, "path", "format", "group", "run"),
            "complete": entry.is_complete,
            **document_of(entry, "epoch", "step", "loss", "metrics", "bytes"),
            "modified": utc_time(entry.modified_ns),
            **document_of(self, "protected", "fault", "state", names=names),
            **document_of(entry, "safety", "danger"),
            **document_of(self, "newest", "best", names=names),
            **document_of(entry, "granularity", "files"),
            "kept": plain(self.kept),
            "slims": self.is_slimmed,
        }
        if entry.parts:
            document["parts"] = [part.path for part in entry.parts]
        if not self.remark.is_empty:
            document["about"] = self.remark.document()
        return document


class ListedSeries(NamedTuple):
    """One series, in the requested order."""

    key: str
    checkpoints: tuple[ListedCheckpoint, ...]

    @property
    def format(self) -> str | None:
        """Return the format that all checkpoints of known format have; None if they differ."""
        formats = {one.entry.format for one in self.checkpoints} - {None}
        return formats.pop() if len(formats) == 1 else None

    @property
    def nbytes(self) -> int:
        """Return the bytes of all; a file that has several names among them counts once."""
        return total_bytes(one.entry for one in self.checkpoints)

    @property
    def in_order(self) -> tuple[Entry, ...]:
        """Return its checkpoints from the oldest to the newest."""
        return order_entries([one.entry for one in self.checkpoints])[0]

    @property
    def epochs(self) -> tuple[float, float] | None:
        """Return the first and the last known epoch."""
        return _span(one.entry.epoch for one in self.checkpoints)

    @property
    def steps(self) -> tuple[float, float] | None:
        """Return the first and the last known step."""
        return _span(one.entry.step for one in self.checkpoints)

    @property
    def newest(self) -> ListedCheckpoint | None:
        """Return the newest sound one."""
        return next((one for one in self.checkpoints if one.is_newest), None)

    @property
    def best(self) -> ListedCheckpoint | None:
        """Return the best by the requested metric."""
        return next((one for one in self.checkpoints if one.is_best), None)

    def document(self) -> dict[str, Any]:
        names = {"newest": "newest.entry.path", "best": "best.entry.path"}
        return {
            **document_of(self, "key", "format"),
            "count": len(self.checkpoints),
            **document_of(self, *("bytes", "epochs", "steps", "newest", "best"), names=names),
        }


@dataclass(frozen=True, slots=True)
class ListedRun:
    """One run.

    Attributes:
        path: Its directory.
        checkpoints: Those of all its series.
        hyper_parameters: Hyper-parameters of the run by dotted names.
        best: The best by the requested metric.
    """

    path: str
    checkpoints: tuple[ListedCheckpoint, ...]
    hyper_parameters: Parameters = field(default_factory=dict)
    best: ListedCheckpoint | None = None

    @property
    def nbytes(self) -> int:
        """Return the bytes of all; a file that has several names among them counts once."""
        return total_bytes(one.entry for one in self.checkpoints)

    @property
    def modified_ns(self) -> int:
        """Return the time of its newest file in nanoseconds since 1970."""
        return max(one.entry.modified_ns for one in self.checkpoints)

    def document(self) -> dict[str, Any]:
        return {
            "path": self.path,
            "count": len(self.checkpoints),
            "bytes": self.nbytes,
            "series": [*dict.fromkeys(one.entry.group for one in self.checkpoints)],
            **document_of(self, "best", "hyper_parameters", names={"best": "best.entry.path"}),
        }


@dataclass(frozen=True, slots=True, repr=False)
class Listing(CheckpointTable[ListedCheckpoint]):
    """All checkpoints of a directory: a sequence of them, in the order of ``checkpoints``.

    ``len(listing)`` counts checkpoints, ``listing[0]`` is the first, and a listing without any is false.

    Attributes:
        checkpoints: All checkpoints: series by series, each from the oldest on, or in the requested order.
        series: The same by series.
        best: The requested metric.
        runs: The same by run.
        unread: Files and directories that look like models, with the reason why they aren't read.
    """

    checkpoints: tuple[ListedCheckpoint, ...]
    problems: tuple[Problem, ...] = ()
    warnings: tuple[str, ...] = ()
    journals: tuple[str, ...] = ()
    series: tuple[ListedSeries, ...] = ()
    best: str | None = None
    runs: tuple[ListedRun, ...] = ()
    unread: Mapping[str, str] = field(default_factory=dict)

    @property
    def summary(self) -> str:
        """Return it in a few words."""
        return f"{counted(len(self.checkpoints), 'checkpoint')} in {len(self.series):,} series"

    def _repr_html_(self) -> str:
        """Return a table of the checkpoints, for notebooks."""
        from ckpttool.core.notebook import html_table

        columns = ("checkpoint", "epoch", "step", "loss", "size", "state", "marks")
        return html_table(repr(self), columns, map(_html_row, self.checkpoints), len(self.checkpoints))

    def document(self) -> dict[str, Any]:
        rows = document_of(self, "checkpoints", "series", "runs")
        unread = {"unread": messages(self.unread)} if self.unread else {}
        return {"schema": LIST_SCHEMA, **rows, **unread}


def _html_row(row: ListedCheckpoint) -> tuple[object, ...]:
    entry = row.entry
    named = (("newest", row.is_newest), ("best", row.is_best), ("protected", row.protected))
    marks = ", ".join(mark for mark, applies in named if applies)
    return entry.path, entry.epoch, entry.step, entry.loss, file_size(entry.nbytes), row.state, marks


def list_checkpoints(
    directory: str | os.PathLike[str],
    *,
    recursive: bool = True,
    exclude: Sequence[str] = (),
    max_depth: int | None = None,
    series: Sequence[str] = (),
    group_by: GroupBy | None = None,
    metrics: Sequence[str] = (),
    sort: str | None = None,
    reverse: bool = False,
    best: str | None = None,
    mode: Mode | None = None,
    depth: Depth = "quick",
    retention: PruneRequest | None = None,
    jobs: int | None = None,
    progress: Progress | None = None,
    executor: Executor | None = None,
) -> Listing:
    """Return the checkpoints of a directory tree; nothing on disk is changed.

    Args:
        directory: Directory of the checkpoints.
        recursive: Whether to descend.
        exclude: Globs of paths to skip.
        max_depth: Limit on the levels to descend.
        series: Globs of names; the checkpoints that match one are a series.
        group_by: Criterion of a series; by default directory, format and name.
        metrics: Logs with metrics of the checkpoints.
        sort: ``epoch``, ``step``, ``age``, ``size``, ``name`` or a metric, the least first; checkpoints
            without it come last.
        reverse: Whether the order is reversed.
        best: Metric whose best checkpoint is marked in each series.
        mode: Whether low or high values of it are good; None decides by its name.
        depth: Whether only the structure is read, or every byte.
        retention: Request whose policy is previewed. Its series and subdirectories replace the arguments
            above.
        jobs: Number of threads.
        progress: Progress of reading; see ``prune``.
        executor: Reads the checkpoints instead of this process: that of Dask, of mpi4py or one of
            ``concurrent.futures``. Its workers need ckpttool, and the files under the same absolute paths.

    Raises:
        UsageError: No checkpoint has the metric, or a metric was given without a mode.
        CheckpointError: The directory, or a file of metrics, can't be read.
    """
    scope = retention or Scope(
        recursive=recursive,
        exclude=exclude,
        max_depth=max_depth,
        series=series,
        group_by=group_by,
        metrics=metrics,
    )
    progress = progress or no_progress
    preview = preview_directory(os.fspath(directory), scope, progress, executor)
    return listing_of(
        [preview],
        sort=sort,
        reverse=reverse,
        best=best,
        mode=mode,
        depth=depth,
        jobs=jobs,
        progress=progress,
        executor=executor,
    )


def preview_directory(
    directory: str, scope: Scope, progress: Progress = no_progress, executor: Executor | None = None
) -> DirectoryPreview:
    """Return the survey, protections and plan of a directory; nothing on disk is changed.

    Args:
        scope: Checkpoints to look at. A ``PruneRequest`` also previews its policy.
    """
    with progress(directory, None) as advance:
        survey = survey_directory(
            directory,
            scope,
            enters_root=isinstance(scope, PruneRequest),
            advance=advance,
            executor=executor,
        )
    protections = Pointers(
        survey.root, survey.groups, recursive=scope.recursive, exclude=scope.exclude, snapshot=survey.snapshot
    ).protections()
    if not isinstance(scope, PruneRequest):
        return DirectoryPreview(survey, protections, uploads=tuple(upload_warnings(survey.root)))
    try:
        return DirectoryPreview(survey, protections, make_plan(scope, progress, survey))
    except UsageError as error:
        # Unlike ``prune``, a preview shows the plan that ``--max-delete`` refuses, with the refusal.
        if scope.max_delete is None:
            raise
        planned = make_plan(replace(scope, max_delete=None), progress, survey)
        return DirectoryPreview(survey, protections, planned, (Problem(directory, str(error)),))


def listing_of(
    previews: Sequence[DirectoryPreview],
    *,
    sort: str | None = None,
    reverse: bool = False,
    best: str | None = None,
    mode: Mode | None = None,
    depth: Depth = "quick",
    jobs: int | None = None,
    progress: Progress = no_progress,
    executor: Executor | None = None,
    part: Part | None = None,
) -> Listing:
    """Return the list of some directories, each checkpoint once; see ``list_checkpoints``.

    ``part`` is the part of the checkpoints that is read in full, if the depth is full.
    """
    if mode is not None and best is None:
        raise UsageError("--mode needs --best METRIC")
    check_mode(mode)
    previews = [
        preview._replace(survey=preview.survey._replace(groups=series_of_saves(preview.survey.groups)))
        for preview in previews
    ]
    entries = [entry for preview in previews for entry in preview.survey.entries]
    key = sort_key(sort, entries)
    require_metric(best, entries)
    if best is not None:
        mode = resolve_mode(best, mode, "--best")
    # The work of full reads may be split between machines: each lists all checkpoints, and reads its part of
    # them, about equal numbers of bytes.
    parts = {} if part is None else split({entry.path: entry.nbytes for entry in entries}, part.of)
    own = {path for path, number in parts.items() if part and number == part.number}
    is_read = {entry.path: depth == "full" and (part is None or entry.path in own) for entry in entries}
    sound = {
        part.path: part
        for entry in entries
        if entry.fault is None and is_read[entry.path]
        for part in parts_of(entry)
    }
    faults = dict(zip(sound, read_each_in_full([*sound.values()], jobs, progress, executor), strict=True))
    listed, seen = list[ListedSeries](), set[str]()
    for preview in previews:
        # Reasons of the policy to keep each checkpoint; empty for one that it would remove.
        kept: dict[str, tuple[str, ...]] = {}
        slim: set[str] = set()
        if preview.planned is not None:
            plan = preview.planned.plan
            kept = {k.entry.path: k.reasons or ("left alone",) for group in plan.groups for k in group.keep}
            kept |= {entry.path: () for entry in plan.removals}
            slim = {part.path for entry in plan.slimmed for part in parts_of(entry)}
        for group in _unlisted(preview.survey, seen) if len(previews) > 1 else preview.survey.groups:
            read = [
                entry if (why := _fault_found(entry, faults)) is None else replace(entry, fault=why)
                for entry in group.entries
            ]
            rows = [
                row._replace(
                    is_read=is_read[row.entry.path],
                    part=parts.get(row.entry.path),
                    is_slimmed=row.entry.path in slim,
                )
                for row in _rows(read, preview, kept, best, mode)
            ]
            listed.append(ListedSeries(group.key, tuple(_sort_rows(rows, key, reverse=reverse))))
    # Series are in the order of their first checkpoints, whose key may be unknown.
    if key is not None:
        firsts = _sort_rows([series.checkpoints[0] for series in listed], key, reverse=reverse)
        ranks = {row.entry.path: rank for rank, row in enumerate(firsts)}
        listed.sort(key=lambda series: ranks[series.checkpoints[0].entry.path])
    rows = [row for series in listed for row in series.checkpoints]
    return Listing(
        tuple(rows if key is None else _sort_rows(rows, key, reverse=reverse)),
        tuple(_problems(previews, rows)),
        tuple(true_of_all([preview.warnings for preview in previews])),
        tuple(path for preview in previews for path in preview.survey.journals),
        tuple(listed),
        best,
        tuple(_runs(listed, best, mode)),
        {path: why for preview in previews for path, why in preview.survey.unread.items()},
    )


def _rows(
    entries: Sequence[Entry],
    preview: DirectoryPreview,
    kept: Mapping[str, tuple[str, ...]],
    best: str | None,
    mode: Mode | None,
) -> list[ListedCheckpoint]:
    newest = next((entry.path for entry in reversed(entries) if entry.is_sound), None)
    best_path = _best(entries, best, mode) if len(entries) > 1 else None
    remarks = {directory: remarks_beside(directory) for directory in {entry.directory for entry in entries}}
    return [
        ListedCheckpoint(
            entry,
            tuple(
                dict.fromkeys(
                    why for part in parts_of(entry) for why in preview.protections.reasons.get(part.path, ())
                )
            ),
            is_newest=entry.path == newest,
            is_best=entry.path == best_path,
            kept=kept.get(entry.path),
            remark=remarks[entry.directory].get(entry.name, NO_REMARK),
        )
        for entry in entries
    ]


def _fault_found(entry: Entry, faults: Mapping[str, Reason | None]) -> Reason | None:
    """Return the fault that a full read found in a save, or in a part of it."""
    for part in parts_of(entry):
        if (why := faults.get(part.path)) is not None:
            return why if part.path == entry.path else fault_beside(part, why, entry)
    return None


def _runs(series: Sequence[ListedSeries], best: str | None, mode: Mode | None) -> Iterator[ListedRun]:
    """Yield the runs of all series, the best by the requested metric first, then by their paths."""
    by_run: dict[str, list[ListedCheckpoint]] = defaultdict(list)
    for row in (row for one in series for row in one.checkpoints):
        by_run[row.entry.run].append(row)
    runs = []
    for path, rows in by_run.items():
        entries = sorted((row.entry for row in rows), key=lambda entry: entry.modified_ns)
        best_path = _best(entries, best, mode)
        best_row = next((row for row in rows if row.entry.path == best_path), None)
        runs.append(ListedRun(path, tuple(rows), hyper_parameters(path, entries), best_row))

    def rank(run: ListedRun) -> tuple[float, Any]:
        value = None if best is None or run.best is None else run.best.entry.metric(best)
        signed = math.inf if value is None else -value if mode == "max" else value
        return signed, natural_path(run.path)

    yield from sorted(runs, key=rank)


def differing_parameters(runs: Sequence[ListedRun]) -> list[str]:
    """Return the names of the hyper-parameters in which runs differ, in order.

    A parameter that contains the run's name, such as its output directory, is left out.
    """
    names = dict.fromkeys(name for run in runs for name in run.hyper_parameters)
    return [
        name
        for name in names
        if len({repr(run.hyper_parameters.get(name)) for run in runs}) > 1
        and not all(
            os.path.basename(run.path) in str(run.hyper_parameters.get(name))
            for run in runs
            if name in run.hyper_parameters
        )
    ]


def _best(entries: Sequence[Entry], metric: str | None, mode: Mode | None) -> str | None:
    """Return the path of the best sound checkpoint; of equals the newest, or the first that reached it."""
    if metric is None:
        return None
    sign = 1 if mode == "max" else -1
    measured = [
        (value, entry.path)
        for entry in entries
        if entry.is_sound and (value := entry.metric(metric)) is not None
    ]
    # Entries are the oldest first. Of equal values, the newest wins, unless the metric is carried on: then
    # the oldest has reached it.
    later = -1 if is_carried_on(metric, [value for value, _ in measured], mode) else 1
    ranked = [(sign * value, later * number, path) for number, (value, path) in enumerate(measured)]
    return max(ranked)[2] if ranked else None


def _unlisted(survey: Survey, seen: set[str]) -> Iterator[Group]:
    """Yield the series of a directory without checkpoints that an earlier directory listed."""
    # Directories may contain each other, or be links to one: real paths show which checkpoints are the same.
    real = {directory: fs.realpath(directory) for directory in {e.directory for e in survey.entries}}
    paths = {entry.path: os.path.join(real[entry.directory], entry.name) for entry in survey.entries}
    for group in survey.groups:
        entries = tuple(entry for entry in group.entries if paths[entry.path] not in seen)
        if entries:
            yield group._replace(entries=entries)
    seen.update(paths.values())


def _problems(previews: Sequence[DirectoryPreview], rows: Sequence[ListedCheckpoint]) -> Iterator[Problem]:
    """Yield problems of directories and rows; per path, those of the plan come only if there is no other."""
    problems = [problem for preview in previews for problem in preview.problems]
    parts = [part for row in rows for part in (row.entry, *row.entry.parts[1:])]
    problems += [Problem(part.path, part.fault) for part in parts if part.fault]
    problems += [Problem(row.entry.path, f"unsafe: {row.entry.danger}") for row in rows if row.entry.danger]
    yield from problems
    paths = {problem.path for problem in problems}
    for preview in previews:
        if preview.planned is not None:
            yield from (problem for problem in preview.planned.problems if problem.path not in paths)


def total_bytes(entries: Iterable[Entry]) -> int:
    """Return the bytes of checkpoints; a file that has several names among them counts once."""
    files: dict[tuple[int, int], int] = {}
    linked = 0
    for entry in entries:
        if entry.linked_bytes is None:
            for file in entry.contents.files:
                if not file.path.endswith(MANIFEST_SUFFIXES):
                    files[file.device, file.inode] = file.size
        else:
            linked += entry.linked_bytes
    return linked + sum(files.values())


def _span(values: Iterable[float | None]) -> tuple[float, float] | None:
    known = [value for value in values if value is not None]
    return (min(known), max(known)) if known else None


def _sort_rows(
    rows: Sequence[ListedCheckpoint], key: SortKey | None, *, reverse: bool
) -> list[ListedCheckpoint]:
    """Return rows sorted by a key, those without it last; without ``key``, in their order or reversed."""
    if key is None:
        return [*(reversed(rows) if reverse else rows)]
    known = [(value, row) for row in rows if (value := key(row.entry)) is not None]
    known.sort(key=lambda pair: pair[0], reverse=reverse)
    return [*(row for _, row in known), *(row for row in rows if key(row.entry) is None)]


def sort_key(sort: str | None, entries: Sequence[Entry]) -> SortKey | None:
    """Return the function that gives a checkpoint's sort key, or None for the order of the survey."""
    if sort is None or sort in ORDERS:
        return None if sort is None else ORDERS[sort]
    require_metric(sort, entries, f"can't sort by {sort!r}", f"{', '.join(ORDERS)}; ")
    return lambda entry: entry.metric(sort)


def require_metric(name: str | None, entries: Sequence[Entry], what: str = "", others: str = "") -> None:
    """Raise UsageError if no checkpoint has a metric, unless the directory is empty."""
    if name is None or not entries or any(entry.metric(name) is not None for entry in entries):
        return
    known = known_metrics(entries)
    there = f"metrics: {', '.join(known)}" if known else "no checkpoint has any metric"
    raise UsageError(f"{what or f'no checkpoint has a metric {name!r}'} ({others}{there})")


def known_metrics(entries: Iterable[Entry]) -> list[str]:
    """Return the names of all metrics of checkpoints, in order; the loss is the first."""
    names: dict[str, None] = {}
    has_loss = False
    for entry in entries:
        has_loss = has_loss or entry.loss is not None
        names |= dict.fromkeys(entry.metrics)
    return [*dict.fromkeys([*(["loss"] if has_loss else []), *names])]
