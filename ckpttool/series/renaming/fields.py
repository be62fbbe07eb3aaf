"""What a template can say of a checkpoint: its fields by name, out of what is in it and in its name."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection
from datetime import datetime, timedelta, timezone

from ckpttool.naming import parse_name
from ckpttool.series.members.entry import Entry, Number
from ckpttool.series.renaming.template import Value

_SUFFIX = re.compile(
    r"\.(?:weights\.h5|(?:pth|pt|ckpt|bin|pkl|pickle|h5|hdf5|keras|npz|npy|safetensors)?\.?tar(?:\.gz)?|pt2|h5|hdf5|[a-z]{1,12})$",
    re.ASCII | re.IGNORECASE,
)
"""What tells a file's kind to people and programs; of several endings all that belong together."""

_DIRECTORY_SUFFIX = re.compile(
    r"\.(?:ckpt|pth|pt|dcp|distcp|bin|keras|tf|orbax|safetensors|model|savedmodel)$", re.ASCII | re.IGNORECASE
)
_SEPARATORS = "-_=.:, ([+@~"
_KEY = re.compile(
    r"(?:^|[-_=.:, (\[+@~])(?:(?:global|train|total|n)[-_]?)?"
    r"(?:epochs?|ep|e|steps?|s|iterations?|iters?|itr|it|updates?)$",
    re.ASCII | re.IGNORECASE,
)
_EPOCH_ZERO = datetime(1970, 1, 1)
_LONGEST = 100_000 * 366 * 86_400  # seconds; no calendar of Python's goes further


def stem_of(name: str, *, is_directory: bool) -> str:
    """Return a name without the suffix that says of what kind it is."""
    match = (_DIRECTORY_SUFFIX if is_directory else _SUFFIX).search(name)
    return name[: match.start()] if match and match.start() else name


def run_of(stem: str, directory: str) -> str:
    """Return what a name says of the run: the part before its first field, else the directory's name."""
    fields = parse_name(stem)
    run = stem
    if fields.blank != stem:
        run = _common(stem, fields.blank)
        while (shorter := _without_key(run, fields.metrics)) != run:
            run = shorter
    return run or os.path.basename(os.path.abspath(directory))


def _common(one: str, other: str) -> str:
    """Return what two texts begin with."""
    pairs = zip(one, other, strict=False)
    return one[: next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))]


def _without_key(run: str, metrics: Collection[str]) -> str:
    """Return what stands before a field, without separators, and without what names the field."""
    bare = run.rstrip(_SEPARATORS)
    named = next((name for name in metrics if bare.endswith(name)), None)
    return bare.removesuffix(named) if named else _KEY.sub("", bare)


def values_of(entry: Entry, stem: str) -> dict[str, Value]:
    """Return what is known of a checkpoint, by field; what it lacks isn't in it.

    Args:
        entry: The checkpoint.
        stem: Its name, without its suffix.
    """
    told: dict[str, Value | None] = {
        name: value
        for name, value in ({"loss": entry.loss} | dict(entry.metrics)).items()
        if value is not None and math.isfinite(value)
    }
    told |= {"run": run_of(stem, entry.directory), "name": stem, "format": entry.format}
    told |= {"epoch": _whole(entry.epoch), "step": entry.step, "number": entry.fields.number}
    told |= _moments(entry)
    return {name: value for name, value in told.items() if value is not None}


def _whole(value: Number | None) -> Number | None:
    """Return an epoch that was written as a decimal and is none as a whole number."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def is_dated_by_file(entry: Entry) -> bool:
    """Tell whether nothing but its files' times says when a checkpoint was saved."""
    return entry.saved_at is None


def _moments(entry: Entry) -> dict[str, Value | None]:
    """Return date and time in UTC: as it is recorded inside, else in the name, else of its newest file."""
    written = moment(entry.modified_ns / 10**9)
    if entry.saved_at is None:
        return {"date": written, "time": written}
    saved = moment(entry.saved_at)
    named = entry.fields.saved_at
    if (
        named is not None
        and "T" not in named
        and saved is not None
        and f"{saved:%Y-%m-%dT%X}" == f"{named}T00:00:00"
    ):
        # The name has a date alone; the file knows the time where it is of that day.
        is_same = written is not None and written.date() == saved.date()
        return {"date": saved, "time": written if is_same else None}
    return {"date": saved, "time": saved}


def moment(seconds: float) -> datetime | None:
    """Return a time in UTC; None for one beyond what calendars hold."""
    if not math.isfinite(seconds) or abs(seconds) > _LONGEST:
        return None
    try:
        return (_EPOCH_ZERO + timedelta(seconds=seconds)).replace(tzinfo=timezone.utc)
    except OverflowError:
        return None
