"""Reasons to keep checkpoints regardless of rules: pointers, their own state, doubts about their series.

Numbers in names also distinguish parts, seeds and users, none of which is older. A series in doubt is left
alone if the plan would remove something of it.

Two further facts need reading: whether a required copy exists elsewhere, and whether a run failed. A failed
run's newest checkpoint was never finished, or has NaN in its weights. If failed runs are removed, the newest
checkpoint of each that is intact and finite is searched by reading, and kept.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice, pairwise
from shlex import quote

from ckpttool.core.checkpoint import Granularity
from ckpttool.core.errors import CheckpointError, UsageError, from_os_error
from ckpttool.core.naming import is_named_best
from ckpttool.core.text import counted
from ckpttool.formats.discovery import OWN_PREFIX, Globs, discover, last_name
from ckpttool.formats.interface import Unit
from ckpttool.formats.paddle.fluid_serial import SERIAL
from ckpttool.formats.step_directory import StepDirectory, own_count_inside
from ckpttool.formats.traits import traits_of
from ckpttool.ops.copy_check import is_same
from ckpttool.ops.file_copy import is_unchanged, status_of
from ckpttool.runs.entry import Entry
from ckpttool.runs.look import Progress, findings_of_weights, no_progress, read_all
from ckpttool.runs.pointers.kinds import STALE_SECONDS
from ckpttool.runs.pointers.search import PointerProtections, temporary_for
from ckpttool.runs.reasons import Code, Reason, code_of
from ckpttool.runs.retention.plan import Protections
from ckpttool.runs.retention.request import Policies
from ckpttool.runs.retention.rules import Policy
from ckpttool.runs.run_directories import has_run_setting, may_have_settings
from ckpttool.runs.saves import parts_of, series_of_saves
from ckpttool.runs.scope import Scope
from ckpttool.runs.series import CONTRADICTION_SECONDS, Group, has_order, newest_candidates
from ckpttool.runs.survey import Survey
from ckpttool.storage import fs
from ckpttool.storage.directories import is_scratch_name
from ckpttool.storage.work import Advance
from ckpttool.transaction.files import Fingerprint
from ckpttool.transaction.journal_documents import is_name
from ckpttool.transaction.mounts import HOLDS_MOUNT, is_mounted, mount_points
from ckpttool.transaction.paths import is_within, without_trailing_slashes

METRICS_ALONE = "its names differ only in a metric"

PARTS = "numbered from 0 and written at once, with no epoch or step inside: could be parts of one checkpoint"

NOT_COUNTED = "nothing says that its numbers count saves: could be different models"

YEARS = "its numbers could be years: nothing inside says that they count saves"

CONTRADICTED = "the epochs or steps inside don't grow with its numbers: could be different models"

EQUALLY_LONG = "all have the same epoch and step inside: could be different models"

SETTINGS = "a number before the epoch or step could be a setting: could be different runs"

UNORDERED = "no number in its names or contents shows which is older"

WITNESS = "distinguishes its run from others"

NOTHING_TRAINED = "holds neither weights nor an optimizer"

_YEARS = range(1990, 2101)

_CHUNK = 1 << 20

_SAMPLES, _SAMPLE = 8, 64


def doubt_of(group: Group, declared: Collection[str] = ()) -> str | None:
    """Return why a series may not be one, or None if there is no doubt."""
    if (why := _runs_doubt(group.entries, declared)) is not None:
        return why
    parts: dict[tuple[str, str], list[Entry]] = defaultdict(list)
    for entry in group.entries:
        parts[entry.directory, entry.fields.blank].append(entry)
    doubts = (_doubt(entries, declared) for entries in parts.values())
    why = next((why for why in doubts if why is not None), None)
    return why if why is not None or len(parts) == 1 else _merged_doubt(group.entries, declared)


def doubts_of(groups: Sequence[Group], declared: Collection[str] = ()) -> dict[str, str]:
    """Return doubts about series of saves, by their keys; if one part of the saves is counted, all are."""
    doubts: dict[str, str] = {}
    for saves in groups:
        why = doubt_of(saves, declared)
        if why is not None and not (why == NOT_COUNTED and _has_counted_part(saves, declared)):
            doubts[saves.key] = why
    return doubts


def _has_counted_part(saves: Group, declared: Collection[str]) -> bool:
    """Return whether the names of other parts of the saves count them."""
    lines: dict[tuple[str, str], list[Entry]] = defaultdict(list)
    for part in (part for entry in saves.entries for part in entry.parts[1:]):
        lines[part.directory, part.fields.blank].append(part)
    return any(doubt_of(Group(saves.key, tuple(line)), declared) is None for line in lines.values())


def _runs_doubt(entries: Sequence[Entry], declared: Collection[str]) -> str | None:
    """Return why directories named like saves may be runs of their own."""
    for entry in entries if len(entries) > 1 else ():
        if entry.fields.blank in declared or not entry.is_step_directory:
            continue
        files = (os.path.relpath(file.path, entry.name) for file in entry.contents.files)
        if (name := own_count_inside(entry.name, files)) is not None:
            return f"{name} in {entry.name} counts its own saves: could be different runs"
    return None


def _merged_doubt(entries: Sequence[Entry], declared: Collection[str]) -> str | None:
    """Return the doubt about a series that the user merged from several names or directories."""
    sound = [entry for entry in entries if entry.is_sound]
    if len(sound) > 1 and not has_order(sound):
        return UNORDERED
    if all(entry.fields.blank in declared for entry in entries):
        return None
    # Saves of one run have different counts. Models of different names that were trained equally long don't.
    counts = {entry.counts_inside for entry in sound}
    are_equal = len(sound) > 1 and len(counts) == 1 and counts != {(None, None)}
    return EQUALLY_LONG if are_equal else None


def _doubt(entries: Sequence[Entry], declared: Collection[str]) -> str | None:
    # The numbers of ``model_1.pt`` … ``model_5.pt`` may count saves, or be folds, ranks, years, or models of
    # a comparison: pruning those would remove results. Numbers with a key (epoch, step, date), equal counts
    # inside, or a declaration by the user (``--series``) dispel the doubt. Without these, the files' times,
    # the values of the numbers and the counts inside are examined for signs of something else.
    sound = [entry for entry in entries if entry.is_sound]
    fields = entries[0].fields
    if len(entries) < 2 or not sound:
        return None
    if not any(value is not None for value in fields.position):
        return METRICS_ALONE if fields.blank != entries[0].name else None
    if fields.blank in declared:
        # A declared series needs another order than that of files' times.
        has_names = all(any(value is not None for value in entry.fields.position) for entry in entries)
        inside = zip(*(entry.counts_inside for entry in sound), strict=True)
        return None if has_names or any(None not in counts for counts in inside) else UNORDERED
    if may_have_settings(entries):
        return SETTINGS
    # Paddle Fluid's serials count its saves.
    are_serials = all(entry.format == "fluid" and SERIAL.fullmatch(entry.name) for entry in entries)
    if fields.number is None or is_counted(sound) or are_serials:
        return None
    if all(entry.is_step_directory for entry in entries):
        return CONTRADICTED if _contradicts(sound) else None
    if _could_be_parts(entries):
        return PARTS
    if all((entry.fields.number or 0) in _YEARS for entry in entries):
        return YEARS
    if not fields.is_ordinal:
        return NOT_COUNTED
    return CONTRADICTED if _contradicts(sound) else None


def is_counted(sound: Sequence[Entry]) -> bool:
    """Return whether epochs or steps inside grow with the numbers in the names."""
    ordered = sorted(sound, key=lambda entry: entry.fields.number or 0)
    for values in zip(*(entry.counts_inside for entry in ordered), strict=True):
        if None not in values and all(one < two for one, two in pairwise(values)):
            return True
    return False


def _contradicts(sound: Sequence[Entry]) -> bool:
    """Return whether epochs and steps inside contradict the order of the names."""
    # Different models that were trained equally long have the same counts. In a series, one count may repeat,
    # as epochs do if there are several saves per epoch, but another one grows and never falls.
    ordered = sorted(sound, key=lambda entry: entry.fields.number or 0)
    columns = zip(*(entry.counts_inside for entry in ordered), strict=True)
    known = [[count for count in column if count is not None] for column in columns]
    counts = [column for column in known if len(column) > 1]
    return bool(counts) and not any(
        column[0] < column[-1] and all(one <= two for one, two in pairwise(column)) for column in counts
    )


def _could_be_parts(entries: Sequence[Entry]) -> bool:
    """Return whether these may be files that the ranks of one job wrote for one save."""
    # Ranks count from 0 without a gap, and write at the same time. An epoch or step inside
    # shows that a file is a save of its own.
    if any(value is not None for entry in entries for value in entry.counts_inside):
        return False
    times = [entry.modified_ns for entry in entries]
    is_at_once = max(times) - min(times) <= CONTRADICTION_SECONDS * 10**9
    return is_at_once and sorted(entry.fields.number or 0 for entry in entries) == list(range(len(entries)))


def setting_witnesses(
    group: Group, declared: Collection[str] = (), faults: Collection[str] = ()
) -> list[Entry]:
    """Return the oldest and two newest intact checkpoints of a run that only a setting identifies."""
    # The setting (``acc2``) is known not to be a metric because each of its values has several checkpoints,
    # and two have the same epoch. Were all but one removed, the next survey would take the rest for saves of
    # one run. The oldest one is kept, as other runs have one of the same epoch.
    if any(entry.fields.blank in declared or not has_run_setting(entry) for entry in group.entries):
        return []
    intact = [entry for entry in group.entries if entry.is_sound and entry.path not in faults]
    return list({entry.path: entry for entry in (*intact[:1], *intact[-2:])}.values())


def untrained_entries(group: Group) -> list[Entry]:
    """Return checkpoints without trained content, unless their series counts epochs or steps."""
    sound = [entry for entry in group.entries if entry.is_sound]
    counts = {entry.counts_inside for entry in sound}
    if len(counts) > 1 and (None, None) not in counts:
        return []
    return [entry for entry in sound if entry.granularity is Granularity.LIGHTWEIGHT]


def copy_warnings(groups: Sequence[Group]) -> Iterator[str]:
    """Yield a warning for each series with two equal checkpoints: rules count both."""
    # Only checkpoints of equal names and sizes in different directories are compared: first by 8 samples of
    # 64 bytes, then by all bytes.
    for group in groups:
        if (pair := _first_copies(group)) is not None:
            first, second = pair
            yield f"{group.key}: {first.path} and {second.path} are identical; copies count twice"


def _first_copies(group: Group) -> tuple[Entry, Entry] | None:
    by_name: dict[tuple[str, int], list[Entry]] = defaultdict(list)
    for entry in group.entries:
        if entry.is_sound:
            by_name[entry.name, entry.nbytes].append(entry)
    for same_name in by_name.values():
        if len({entry.directory for entry in same_name}) < 2:
            continue
        by_samples: dict[bytes, list[Entry]] = defaultdict(list)
        for entry in same_name:
            if (samples := _samples(entry)) is not None:
                by_samples[samples].append(entry)
        for same in by_samples.values():
            for one, other in pairwise(same):
                if one.directory != other.directory and _are_equal(one, other):
                    return one, other
    return None


def _samples(entry: Entry) -> bytes | None:
    """Return a few bytes of a checkpoint's largest file."""
    file = max(entry.contents.files, key=lambda file: (file.size, file.path), default=None)
    if file is None:
        return None
    try:
        with fs.open_regular(os.path.join(entry.directory, file.path)) as stream:
            samples = []
            for part in range(_SAMPLES):
                stream.seek(file.size * part // _SAMPLES)
                samples.append(stream.read(_SAMPLE))
            return b"".join(samples)
    except OSError:
        return None


def _are_equal(one: Entry, other: Entry) -> bool:
    files, others = ({file.path: file for file in entry.contents.files} for entry in (one, other))
    if files.keys() != others.keys() or any(file.size != others[path].size for path, file in files.items()):
        return False
    return all(
        _same_bytes(os.path.join(one.directory, path), os.path.join(other.directory, path)) for path in files
    )


def _same_bytes(one: str, other: str) -> bool:
    """Return whether two files have equal content; an unreadable file equals no other."""
    try:
        with fs.open_regular(one) as first, fs.open_regular(other) as second:
            while (chunk := first.read(_CHUNK)) == second.read(_CHUNK):
                if not chunk:
                    return True
    except OSError:
        return False
    return False


def own_reasons(survey: Survey, scope: Scope, min_age: int) -> dict[str, list[str]]:
    """Return reasons to keep checkpoints for their own content and place, by path.

    ``min_age`` is in seconds: younger checkpoints are kept.
    """
    reasons: dict[str, list[str]] = {}
    youngest = (_file_clock(survey.root) - min_age) * 1e9 if min_age else 0.0
    points = mount_points(below=survey.root) or ()
    excluded = Globs(scope.exclude, survey.root)
    for entry in survey.entries:
        globs = (glob for place in entry.places for glob in excluded.matching(place))
        reasons[entry.path] = [
            *_entry_reasons(entry, points),
            *(f"--exclude {glob}" for glob in islice(globs, 1)),
            *([Reason(Code.TOO_YOUNG)] if min_age and entry.modified_ns > youngest else ()),
        ]
    return reasons


def foreign_reason(entry: Entry) -> str:
    """Return the reason to keep a checkpoint with files that aren't its own, unless the user agreed."""
    names = entry.foreign_files
    more = f" and {len(names) - 1:,} more" if len(names) > 1 else ""
    return f"contains {names[0]}{more}, not part of the checkpoint (--yes removes it)"


def _file_clock(root: str) -> float:
    """Return the time by the clock that the files' times come from, in seconds since 1970."""
    # In a store that is the store's clock, which may differ from this machine's.
    try:
        return fs.place_of(root).clock(root)
    except OSError as error:
        raise from_os_error(error, root) from error


def protections_of(
    groups: Sequence[Group],
    pointed: PointerProtections,
    own: Mapping[str, Sequence[str]],
    faults: Mapping[str, str],
    *,
    series: Sequence[str],
    policies: Policies,
) -> Protections:
    """Return the protections of the checkpoints of some series.

    Args:
        groups: The series.
        pointed: Protections by pointers.
        own: Reasons for their own content and place, by path.
        faults: Faults that a full read found, by path.
        series: Globs of series that the user declared.
        policies: Policies of the series.
    """
    reasons: dict[str, list[str]] = {}
    named_series = set(map(last_name, series))
    for group in groups:
        one_of_many = unprotected_bests(group, policies.of(group), faults)
        for entry in group.entries:
            pointers = [
                reason
                for reason in pointed.reasons.get(entry.path, ())
                if code_of(reason) is not Code.NAMED_BEST or entry.path not in one_of_many
            ]
            reasons[entry.path] = [*pointers, *own[entry.path]]
    saves = series_of_saves(groups)
    for group in saves:
        for entry in untrained_entries(group):
            reasons[entry.path].append(NOTHING_TRAINED)
        for entry in setting_witnesses(group, named_series, faults):
            reasons[entry.path].append(WITNESS)
    doubts = doubts_of(saves, named_series)
    for key, first in {group.key: group.entries[0] for group in saves}.items():
        if key in doubts and doubts[key] not in (METRICS_ALONE, UNORDERED):  # else the user can't know better
            doubts[key] += f" (if they are one series, use --series {quote(first.fields.blank)})"
    return Protections(reasons, pointed.skipped, faults, doubts, holders=pointed.holders)


def _entry_reasons(entry: Entry, mount_points: Collection[str]) -> Iterator[str]:
    """Yield reasons to keep a checkpoint for its own content and place."""
    if entry.holds_others:
        yield "holds other checkpoints"
    elif others := list(_other_checkpoints_in(entry)):
        first = os.path.relpath(others[0].path, entry.unit.path)
        yield f"holds {counted(len(others), 'other checkpoint')}: {first}{', …' if len(others) > 1 else ''}"
    if entry.is_step_directory:
        # Pins, or a trash, that a command left there when it took each file for a checkpoint.
        names = (name for file in entry.contents.files for name in file.path.split(os.sep))
        kept = (name for name in names if name.startswith(OWN_PREFIX) and not is_scratch_name(name))
        yield from islice((f"contains {name}" for name in kept), 1)
    if entry.is_link:
        yield "is a symlink"
    if not all(map(is_name, entry.unit.members)):
        yield "has parts in other directories"
    if entry.contents.crosses or is_mounted(entry.directory, entry.unit.members, mount_points):
        yield HOLDS_MOUNT


def _other_checkpoints_in(entry: Entry) -> Iterator[Unit]:
    """Yield checkpoints inside another one that aren't its parts, and would be removed with it."""
    format = entry.unit.format
    if format is None or not format.takes_in or isinstance(format, StepDirectory):  # all in it is its part
        return
    for path in entry.contents.directories:
        if path.count(os.sep) == 1:  # directly below
            try:
                below = list(discover(os.path.join(entry.directory, path)))
            except CheckpointError:  # the removal fails if the files have changed since the survey
                continue
            for unit in below:
                kind = unit.format
                if kind is not None and (kind.takes_in or not traits_of(kind.name).is_part_of_others):
                    yield unit


def unprotected_bests(group: Group, policy: Policy | None, faults: Collection[str]) -> frozenset[str]:
    """Return the paths of checkpoints that "best" in their names doesn't protect."""
    # Some trainers save a ``best_epoch=3-loss=0.2`` at each improvement, so that all of a series are named
    # best. The metric that the policy ranks by decides then. Without one, the least and the greatest of each
    # metric in the names are kept, as either may be the best; without metrics in the names, all are.
    intact = [entry for entry in group.entries if entry.is_sound and entry.path not in faults]
    if len(intact) < 2:
        return frozenset()
    for entry in intact:
        fields = entry.fields
        # A bare number may be that of a fold rather than of a save.
        is_save = fields.number is None and (fields.epoch is not None or fields.step is not None)
        if not is_save or not is_named_best(entry.name):
            return frozenset()
    if len({(entry.fields.epoch, entry.fields.step) for entry in intact}) < len(intact):
        return frozenset()
    ranked_by = None if policy is None else policy.metric
    if ranked_by is not None and all(entry.recorded_metric(ranked_by) is not None for entry in intact):
        return frozenset(entry.path for entry in intact)
    metrics = set.intersection(*(set(entry.fields.metrics) for entry in intact))
    extreme: set[str] = set()
    for metric in metrics:
        values = {entry.path: entry.fields.metrics[metric] for entry in intact}
        finite = [value for value in values.values() if math.isfinite(value)]
        ends = {min(finite), max(finite)} if finite else set()
        extreme |= {path for path, value in values.items() if value in ends or not math.isfinite(value)}
    return frozenset(entry.path for entry in intact if entry.path not in extreme) if metrics else frozenset()


class RequiredCopies:
    """Copies of the checkpoints of a directory at another location."""

    def __init__(self, root: str, location: str, progress: Progress) -> None:
        """Set the directory and the location of its copies.

        Raises:
            UsageError: The location is in the directory itself.
        """
        if is_within(fs.realpath(without_trailing_slashes(location)), fs.realpath(root)):
            raise UsageError(f"--require-copy {location}: inside {root}, not another place")
        self._root, self._location, self._progress = root, location, progress
        self._proven: dict[str, dict[str, os.stat_result]] = {}
        fs.refresh(location)

    def unproven(self, entries: Iterable[Entry]) -> dict[str, str]:
        """Return reasons to keep checkpoints whose copy isn't proven, by path.

        Raises:
            CheckpointError: The location can't be read.
        """
        reasons: dict[str, str] = {}
        for entry in entries:
            with self._progress(entry.name, entry.nbytes) as advance:
                proven = self._proven[entry.path] = {}
                for file in entry.contents.files:
                    path = os.path.join(entry.directory, file.path)
                    copy = os.path.join(
                        without_trailing_slashes(self._location), os.path.relpath(path, self._root)
                    )
                    status = status_of(copy)
                    if status is None or not _is_copy(path, file, copy, status, advance):
                        reasons[entry.path] = f"no proven copy in {self._location}"
                        break
                    proven[copy] = status
        return reasons

    def changed(self) -> dict[str, str]:
        """Return reasons to keep checkpoints whose copy has changed since it was proven, by path."""
        fs.refresh(self._location)
        reason = f"its copy in {self._location} has changed since the plan was made"
        return {
            path: reason
            for path, proven in self._proven.items()
            if not all(is_unchanged(copy, status) for copy, status in proven.items())
        }


def _is_copy(path: str, file: Fingerprint, copy: str, status: os.stat_result, advance: Advance) -> bool:
    # A hard link, or the directory itself under another mount, has the same bytes but is no copy. Its
    # inode shows it.
    own = status_of(path)
    if own is None or own.st_size != status.st_size:
        return False
    is_itself = (status.st_dev, status.st_ino) in ((own.st_dev, own.st_ino), (file.device, file.inode))
    return not is_itself and is_same(path, copy, advance)


def failures(
    groups: Sequence[Group],
    now: float,
    *,
    busy: Collection[str] = (),
    jobs: int | None = None,
    removes: bool = False,
    progress: Progress = no_progress,
) -> tuple[dict[str, str], dict[str, str], dict[str, str]]:
    """Find the series of saves that failed.

    ``busy`` has the paths of checkpoints that are being written. If failed series are to be removed
    (``removes``), they are read to find the newest intact and finite checkpoint.

    Returns:
        Why series failed, by key; the path of the newest intact and finite checkpoint, by its series' key;
        and the faults that reading found, by path.
    """
    reasons = failed_runs(groups, now, busy=busy, jobs=jobs)
    faults: dict[str, str] = {}
    finite: dict[str, str] = {}
    for group in groups if removes else ():
        if group.key in reasons and (path := _newest_finite(group, jobs, progress, faults)) is not None:
            finite[group.key] = path
    return reasons, finite, faults


def failed_runs(
    groups: Sequence[Group], now: float, *, busy: Collection[str] = (), jobs: int | None = None
) -> dict[str, str]:
    """Return why series failed, by their keys.

    If several checkpoints may be the newest, as after a restart, a series failed only if all of them did.
    """
    failures = {group.key: _series_failure(group, now, busy, jobs) for group in groups}
    return {key: reason for key, reason in failures.items() if reason is not None}


def _series_failure(group: Group, now: float, busy: Collection[str], jobs: int | None) -> str | None:
    # After a restart, the newest by order and the one written last differ. A run that goes on has written
    # a good one, so it failed only if each candidate is bad.
    first = None
    for entry in newest_candidates(group.entries):
        reason = _entry_failure(entry, now, busy, jobs)
        if reason is None:
            return None
        first = first or reason
    return first


def _entry_failure(newest: Entry, now: float, busy: Collection[str], jobs: int | None) -> str | None:
    if newest.fault is not None:
        # A save that was cut is a failure only once its writer has ended: no temporary file is left, and it
        # is old. Damage, or a part that is missing altogether, may have other causes than a failed run.
        parts = parts_of(newest)
        is_finished = not any(part.path in busy or temporary_for(part.name) for part in parts)
        is_stale = newest.modified_ns / 10**9 < now - STALE_SECONDS
        is_cut = not all(part.is_complete for part in parts)
        is_cut &= newest.is_incomplete and is_finished and is_stale
        return f"its newest, {newest.name}, is {newest.fault}" if is_cut else None
    for part in parts_of(newest):
        if part.has_weights and (nan := nan_in_weights(part, jobs)) is not None:
            return f"its newest, {part.name}, has NaN: {nan}"
    return None


def nan_in_weights(entry: Entry, jobs: int | None = None) -> str | None:
    """Return the place and number of NaN in the weights of a checkpoint, or None; all values are read."""
    # A checkpoint that can't be read is damaged, not diverged. Infinities don't count, as masks have them.
    from ckpttool.ops.verify import verify

    try:
        verdict = verify(entry.unit, only=("values",), jobs=jobs)
        findings = findings_of_weights(entry, (one for one in verdict.findings if one.code == "nan"))
    except CheckpointError:
        return None
    return findings[0].placed_message if findings else None


def _newest_finite(group: Group, jobs: int | None, progress: Progress, faults: dict[str, str]) -> str | None:
    """Return the path of the newest intact and finite checkpoint, else of the newest intact one."""
    # If all have infinities, they are there on purpose, as in attention masks.
    newest = None
    for entry in reversed(group.entries):
        if not entry.is_sound:
            continue
        reads = {part.path: read_all(part, jobs, progress) for part in parts_of(entry)}
        damages = {path: read.damage for path, read in reads.items() if read.damage is not None}
        if damages:
            faults |= damages
        elif all(read.is_finite for read in reads.values()):
            return entry.path
        else:
            newest = newest or entry.path
    return newest
