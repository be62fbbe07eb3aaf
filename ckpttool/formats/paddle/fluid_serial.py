"""Trainers and lookup tables of a serial of Paddle Fluid, and its comparison with the run's other serials.

Each trainer keeps its progress in small text files, one for each argument. Each parameter server writes its
rows of a lookup table to a file. A serial doesn't record its own parts; as all serials of a run have the
same, files that the previous one has and this one lacks are reported as missing.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator

from ckpttool.containers.lodtensor import Stream, integers
from ckpttool.core.errors import CheckpointError
from ckpttool.core.report import error, note, warning
from ckpttool.core.tensor import Role
from ckpttool.core.text import counted
from ckpttool.formats.interface import scan
from ckpttool.formats.paddle.parts import (
    COUNTERS,
    MARKER,
    MODEL,
    TABLES,
    TRAINER,
    Entries,
    PaddleParts,
    files_by_variable,
)
from ckpttool.storage import fs
from ckpttool.storage.source import Source

_SHARD_MISSING = "table-shard-missing"
SERIAL = re.compile(r"checkpoint_([0-9]{1,18})")
MAX_ROWS = 1 << 20
"""Limit on the rows of a table that are checked for duplicates."""
SHARD = re.compile(r"(?:(?P<table>.*)_)?(?P<index>[0-9]{1,9})", re.DOTALL)
"""Name of a parameter server's file: ``<table>_<server>``; any name with a number at its end is taken."""
MAX_ARGUMENT = 1 << 12
"""Limit on the bytes of a trainer's argument: a number as text."""
_NUMBER = re.compile(r"\s*([-+]?[0-9]{1,18})\s*")

_Shard = tuple[str, Source, Stream]
"""Name and stream of the file of one parameter server."""


def only_serial(path: str) -> str | None:
    """Return the serial in a directory that has exactly one and nothing else, or None."""
    if not fs.isdir(path):
        return None
    entries = [entry for name, entry in _entries_in(path).items() if not name.startswith(".")]
    is_one = len(entries) == 1 and SERIAL.fullmatch(entries[0].name)
    return entries[0].path if is_one and entries[0].is_dir(follow_symlinks=False) else None


# Trainers -------------------------------------------------------------------------------------------


def add_trainer(parts: PaddleParts, number: str, entries: Entries, *, is_marked: bool) -> None:
    """Add the arguments of one trainer; ``is_marked`` says whether the serial's variables have the marker."""
    arguments: dict[str, object] = {}
    for name, entry in entries.items():
        if name == MARKER or name.startswith(".") or not parts.is_inside(entry):
            continue
        where = parts.name_of(entry.path)
        if not fs.isfile(entry.path):
            parts.findings.append(warning("not-part", "a directory among a trainer's arguments", where))
        else:
            source = parts.open_source(entry)
            if source.size > MAX_ARGUMENT:
                message = f"{source.size:,} bytes, too many for an argument of a trainer; not read"
                parts.findings.append(warning("trainer-argument", message, where))
                continue
            text = source.read(0, source.size).decode("utf-8", "backslashreplace")
            number_in_text = _NUMBER.fullmatch(text)
            arguments[name] = int(number_in_text[1]) if number_in_text else text.strip()
            if number_in_text is None and name in COUNTERS:
                found = repr(text[:40]) if text else "an empty file"
                parts.findings.append(error("trainer-argument", f"{found}, which is not a number", where))
    if not parts.add_marker(entries) and is_marked:
        parts.findings.append(note("trainer-no-marker", f"no trainer_{number}/{MARKER}", f"trainer_{number}"))
    parts.trainers[number] = arguments


def check_trainers(parts: PaddleParts) -> None:
    """Add a warning for each trainer that lacks a counter of another."""
    counters = {name for arguments in parts.trainers.values() for name in arguments} & set(COUNTERS)
    for number, arguments in parts.trainers.items():
        if missing := sorted(counters - arguments.keys()):
            message = f"no {' and no '.join(missing)}, which other trainers have"
            parts.findings.append(warning("trainer-argument", message, f"trainer_{number}"))


# Lookup tables --------------------------------------------------------------------------------------


def add_tables(parts: PaddleParts, entries: Iterable[tuple[str, os.DirEntry[str]]]) -> None:
    """Add the shards of all lookup tables, given the names and entries of their files."""
    names: dict[str, dict[int, str]] = defaultdict(dict)
    shards: dict[str, list[_Shard]] = defaultdict(list)
    for name, entry in entries:
        match = SHARD.fullmatch(name)
        if name == MARKER or match is None:
            if name != MARKER:
                where = parts.name_of(entry.path)
                parts.findings.append(warning("table-name", "not named like a lookup table", where))
            continue
        table, index = match["table"] or "", int(match["index"])
        if index in names[table]:
            message = f"two files of parameter server {index}"
            parts.fault("table-shard-twice", message, parts.name_of(entry.path))
        names[table][index] = name
        if (stream := parts.read_variable(entry)) is not None:
            shards[table].append((name, *stream))
            parts.add_rows((TABLES[0], name, "rows"), *stream)
            parts.add((TABLES[0], name, "values"), Role.WEIGHTS, *stream)
    # Servers are numbered from 0. The range is cut at the first number that must be missing, since the last
    # one is whatever a file's name says.
    for table, numbers in names.items():
        last = max(numbers)
        missing = [index for index in range(min(last + 1, len(numbers) + 1)) if index not in numbers]
        if missing:
            message = f"the shard of parameter server {missing[0]:,} is missing, but that of {last:,} exists"
            parts.fault(_SHARD_MISSING, message, table or None)
    for table, of_table in shards.items():
        _check_rows(parts, of_table)
        _check_row_types(parts, of_table)
        streams = [stream for _, _, stream in of_table]
        counts = (one.rows.total if one.rows else one.shape[0] if one.shape else 1 for one in streams)
        parts.tables[table] = {
            "shards": len(streams),
            "rows": sum(counts),
            "height": max((one.rows.height for one in streams if one.rows), default=None),
            "row_shape": list(streams[0].shape[1:]),
        }


def _check_row_types(parts: PaddleParts, shards: list[_Shard]) -> None:
    """Add an error for each shard whose rows have another type or shape than those of the first."""
    first_name, _, first = shards[0]
    want = first.dtype.name, list(first.shape[1:])
    for name, _, stream in shards[1:]:
        have = stream.dtype.name, list(stream.shape[1:])
        if have != want:
            message = f"rows of {have[0]} {have[1]}, but those in {first_name} are {want[0]} {want[1]}"
            parts.findings.append(error("table-shard-mismatch", message, name))


def _check_rows(parts: PaddleParts, shards: list[_Shard]) -> None:
    """Add an error for each shard with a row number that it or an earlier shard had already."""
    total = sum(stream.rows.total for _, _, stream in shards if stream.rows)
    if total > MAX_ROWS:
        message = f"{total:,} rows, which were not compared (more than {MAX_ROWS:,})"
        parts.findings.append(note("rows-not-compared", message, shards[0][0]))
        return
    # A row of a distributed table is on one parameter server. A row of two shards has two values, and neither
    # is known to be the right one.
    seen: set[int] = set()
    for name, source, stream in shards:
        if stream.rows is None:
            continue
        rows = integers(source, stream.rows.offset, stream.rows.total)
        if len(rows) > len(set(rows) - seen):
            parts.findings.append(
                error("rows-twice", "it repeats its own rows or rows of earlier shards", name)
            )
        seen.update(rows)


# Other serials of the run -----------------------------------------------------------------------------


def siblings_have_marker(path: str) -> bool:
    """Return whether another serial in the same directory has the marker."""
    own = fs.realpath(path)
    for name, entry in _entries_in(os.path.dirname(own)).items():
        is_other = SERIAL.fullmatch(name) and entry.is_dir(follow_symlinks=False) and entry.path != own
        if is_other and any(fs.isfile(os.path.join(entry.path, *at, MARKER)) for at in ((), (MODEL,))):
            return True
    return False


def check_against_neighbour(parts: PaddleParts, entries: Entries, *, is_marked: bool) -> None:
    """Add errors for variables, shards and trainers that the nearest serial of the same network has."""
    # Parameter servers write their shards after the marker, and each trainer writes on its own: a job that
    # was killed leaves some out, and nothing in the serial records it. Nor is there a list of files from
    # which one that was lost later could be known. If the names differ in both directions, the network was
    # changed.
    for name, neighbour in _neighbours(fs.realpath(parts.root)):
        names = _variable_names(neighbour) if (MODEL in neighbour) == (MODEL in entries) else set()
        if not names:
            continue
        present = _variable_names(entries)
        if present < names:
            missing = sorted(names - present)
            message = f"missing variable, which {name} has"
            if len(missing) > 1:
                message = f"missing variable, and {counted(len(missing) - 1, 'other')}, which {name} has"
            parts.fault("variable-missing", message, missing[0])
        if MODEL in neighbour:
            _compare_shards_and_trainers(parts, entries, name, neighbour, is_marked=is_marked)
        return


def _compare_shards_and_trainers(
    parts: PaddleParts, entries: Entries, name: str, neighbour: Entries, *, is_marked: bool
) -> None:
    is_noted = any(finding.code == _SHARD_MISSING for finding in parts.findings)
    if (shards := sorted(_table_shards(neighbour) - _table_shards(entries))) and not is_noted:
        parts.fault(_SHARD_MISSING, f"missing shard of a lookup table, which {name} has", shards[0])
    # A job may have been restarted with fewer trainers, which is a warning, but never with none.
    is_bare = not any(map(TRAINER.fullmatch, entries))
    for trainer in (key for key in neighbour if TRAINER.fullmatch(key) and key not in entries):
        message = f"missing trainer, which {name} has"
        if is_bare or not is_marked:
            parts.fault("trainer-missing", message, trainer)
        else:
            parts.findings.append(warning("trainer-missing", message, trainer))


def _neighbours(path: str) -> Iterator[tuple[str, Entries]]:
    """Yield name and entries of the other serials: earlier ones first, the nearest first among each."""
    above, name = os.path.split(path)
    match = SERIAL.fullmatch(name)
    if match is None:
        return
    # The serial right before is opened by its name: the directory need not be listed for it.
    number = int(match[1])
    if nearest := _entries_in(os.path.join(above, f"checkpoint_{number - 1}")):
        yield f"checkpoint_{number - 1}", nearest
    matches = filter(None, map(SERIAL.fullmatch, _entries_in(above)))
    distances = {match[0]: int(match[1]) - number for match in matches if int(match[1]) != number}
    for other in sorted(distances, key=lambda other: (distances[other] > 0, abs(distances[other]))):
        yield other, _entries_in(os.path.join(above, other))


def _variable_names(entries: Entries) -> set[str]:
    inner = _entries_in(entries[MODEL].path) if MODEL in entries else entries
    try:
        return {
            name
            for name, entry in files_by_variable(inner)
            if name != MARKER and not entry.name.startswith(".")
        }
    except CheckpointError:
        return set()


def _table_shards(entries: Entries) -> set[str]:
    tables = (_entries_in(entries[table].path) for table in TABLES if table in entries)
    return {name for inner in tables for name in inner if SHARD.fullmatch(name)}


def _entries_in(path: str) -> Entries:
    """Return the entries of a directory; none if it can't be read or is a link."""
    if fs.islink(path):
        return {}
    try:
        return scan(path)
    except CheckpointError:
        return {}
