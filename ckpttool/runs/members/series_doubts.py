"""Whether a series is one: numbers also tell parts, seeds and users apart, of which none is older.

What is in doubt is left alone, with a reason, if something of it would go. Copies in one count twice.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise

from ckpttool.core.checkpoint import Granularity
from ckpttool.formats.paddle.fluid_serial import SERIAL
from ckpttool.formats.step_directory import own_count_inside
from ckpttool.runs.members.entry import Entry
from ckpttool.runs.members.order import CONTRADICTION_SECONDS, Group, has_order
from ckpttool.runs.members.runs import has_run_setting, may_have_settings
from ckpttool.storage import fs

METRICS_ALONE = "a metric is all that tells its names apart"

PARTS = "numbered from 0 and written at once, with no epoch or step inside: could be parts of one checkpoint"

NOT_COUNTED = "nothing says that its numbers count saves: could be different models"

YEARS = "its numbers could be years: nothing inside says that they count saves"

CONTRADICTED = "the epochs or steps inside don't grow with its numbers: could be different models"

EQUALLY_LONG = "all were trained equally long: could be different models"

SETTINGS = "a number in front of the epoch or step could be a setting: could be different runs"

UNORDERED = "no number in its names, nor in it, tells which is older"

WITNESS = "tells its run from others"

NOTHING_TRAINED = "holds neither weights nor an optimizer"

_YEARS = range(1990, 2101)

_CHUNK = 1 << 20

_SAMPLES, _SAMPLE = 8, 64


def doubt_of(group: Group, declared: Collection[str] = ()) -> str | None:
    """Return why a series may be none, or None where it is one."""
    if (why := _runs_doubt(group.entries, declared)) is not None:
        return why
    parts: dict[tuple[str, str], list[Entry]] = defaultdict(list)
    for entry in group.entries:
        parts[entry.directory, entry.fields.blank].append(entry)
    doubts = (_doubt(entries, declared) for entries in parts.values())
    why = next((why for why in doubts if why is not None), None)
    return why if why is not None or len(parts) == 1 else _merged_doubt(group.entries, declared)


def _runs_doubt(entries: Sequence[Entry], declared: Collection[str]) -> str | None:
    """Return why directories that are called like saves may be runs of their own."""
    for entry in entries if len(entries) > 1 else ():
        if entry.fields.blank in declared or not entry.is_step_directory:
            continue
        files = (os.path.relpath(file.path, entry.name) for file in entry.contents.files)
        if (name := own_count_inside(entry.name, files)) is not None:
            return f"{name} in {entry.name} counts saves of its own: could be different runs"
    return None


def _merged_doubt(entries: Sequence[Entry], declared: Collection[str]) -> str | None:
    """Return why names, or directories, that somebody makes one series of may be none."""
    sound = [entry for entry in entries if entry.is_sound]
    if len(sound) > 1 and not has_order(sound):
        return UNORDERED
    if all(entry.fields.blank in declared for entry in entries):
        return None
    counts = {entry.inside for entry in sound}
    stands_still = len(sound) > 1 and len(counts) == 1 and counts != {(None, None)}
    return EQUALLY_LONG if stands_still else None


def _doubt(entries: Sequence[Entry], declared: Collection[str]) -> str | None:
    sound = [entry for entry in entries if entry.is_sound]
    fields = entries[0].fields
    if len(entries) < 2 or not sound:
        return None
    if not any(value is not None for value in fields.position):
        return METRICS_ALONE if fields.blank != entries[0].name else None
    if fields.blank in declared:
        # More than files' times has to order what somebody declares a series.
        has_names = all(any(value is not None for value in entry.fields.position) for entry in entries)
        inside = zip(*(entry.inside for entry in sound), strict=True)
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
    """Tell whether what is inside bears out the order of the names: epochs, or steps, that grow with them."""
    ordered = sorted(sound, key=lambda entry: entry.fields.number or 0)
    for values in zip(*(entry.inside for entry in ordered), strict=True):
        if None not in values and all(one < two for one, two in pairwise(values)):
            return True
    return False


def _contradicts(sound: Sequence[Entry]) -> bool:
    """Tell whether what is inside speaks against the order of the names.

    Models that were trained equally long have the same counts. In a series one count may stand still for a
    while, as epochs do between two saves of one; some count goes on, and none of those that do goes back.
    """
    ordered = sorted(sound, key=lambda entry: entry.fields.number or 0)
    columns = zip(*(entry.inside for entry in ordered), strict=True)
    known = [[count for count in column if count is not None] for column in columns]
    counts = [column for column in known if len(column) > 1]
    return bool(counts) and not any(
        column[0] < column[-1] and all(one <= two for one, two in pairwise(column)) for column in counts
    )


def _could_be_parts(entries: Sequence[Entry]) -> bool:
    """Tell whether these may be what the ranks of one job wrote at one time."""
    if any(value is not None for entry in entries for value in entry.inside):
        return False
    times = [entry.modified_ns for entry in entries]
    is_at_once = max(times) - min(times) <= CONTRADICTION_SECONDS * 10**9
    return is_at_once and sorted(entry.fields.number or 0 for entry in entries) == list(range(len(entries)))


def witnesses(group: Group, declared: Collection[str] = (), faults: Collection[str] = ()) -> list[Entry]:
    """Return the oldest and the two newest intact ones of a run that only a setting in its names tells.

    One alone would look like a save of another run, with the setting for a metric. The oldest tells the runs
    apart again: others have one of the same epoch.
    """
    if any(entry.fields.blank in declared or not has_run_setting(entry) for entry in group.entries):
        return []
    intact = [entry for entry in group.entries if entry.is_sound and entry.path not in faults]
    return list({entry.path: entry for entry in (*intact[:1], *intact[-2:])}.values())


def untrained_entries(group: Group) -> list[Entry]:
    """Return what holds nothing that was trained, unless it lies in a series that counts epochs or steps."""
    sound = [entry for entry in group.entries if entry.is_sound]
    counts = {entry.inside for entry in sound}
    if len(counts) > 1 and (None, None) not in counts:
        return []
    return [entry for entry in sound if entry.granularity is Granularity.LIGHTWEIGHT]


def copy_warnings(groups: Sequence[Group]) -> Iterator[str]:
    """Yield, for each series that has copies of one checkpoint, which two are the same: rules count both.

    Of what has one name and one size a few samples are read, and of two with the same samples as much as is
    alike.
    """
    for group in groups:
        if (pair := _first_copies(group)) is not None:
            first, second = pair
            yield f"{group.key}: {first.path} and {second.path} hold the same bytes; copies count twice"


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
    """Tell whether two files hold the same bytes; what can't be read is the same as nothing."""
    try:
        with fs.open_regular(one) as first, fs.open_regular(other) as second:
            while (chunk := first.read(_CHUNK)) == second.read(_CHUNK):
                if not chunk:
                    return True
    except OSError:
        return False
    return False
