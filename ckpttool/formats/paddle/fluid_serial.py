"""A serial of Paddle Fluid beside its variables: its trainers, its lookup tables, and the serials next to it.

Each trainer kept its progress in small text files, one for each argument. Each parameter server wrote its own
rows of a lookup table to a file. The serials of one run were written alike, so that one tells what another
lacks.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from ckpttool.errors import CheckpointError
from ckpttool.formats.interface import scan
from ckpttool.formats.paddle.fluid_parts import (
    COUNTERS,
    MARKER,
    MODEL,
    TABLES,
    TRAINER,
    Entries,
    FluidParts,
    files_by_variable,
)
from ckpttool.report import counted, error, note, warning
from ckpttool.tensor import Role
from ckpttool.wire.lodtensor import Stream, integers
from ckpttool.wire.source import Source

_SHARD_MISSING = "table-shard-missing"
SERIAL = re.compile(r"checkpoint_([0-9]{1,18})")
MAX_ROWS = 1 << 20
"""The most rows of all tables that are compared with each other."""
SHARD = re.compile(r"(?:(?P<table>.*)_)?(?P<index>[0-9]{1,9})", re.DOTALL)
"""What the file of one parameter server is called."""
MAX_ARGUMENT = 1 << 12
"""The most bytes of a trainer's argument: a number as text."""
_NUMBER = re.compile(r"\s*([-+]?[0-9]{1,18})\s*")


def only_serial(path: str) -> str | None:
    """Return the one serial in a directory that holds nothing else, None for any other directory."""
    if not os.path.isdir(path):
        return None
    entries = [entry for name, entry in _entries_or_nothing(path).items() if not name.startswith(".")]
    is_one = len(entries) == 1 and SERIAL.fullmatch(entries[0].name)
    return entries[0].path if is_one and entries[0].is_dir(follow_symlinks=False) else None


# Trainers -------------------------------------------------------------------------------------------


def add_trainer(parts: FluidParts, number: str, entries: Entries, *, is_marked: bool) -> None:
    """Read the arguments of one trainer; ``is_marked``: whether the variables have the marker."""
    arguments: dict[str, object] = {}
    for name, entry in entries.items():
        if name == MARKER or name.startswith(".") or not parts.is_inside(entry):
            continue
        where = parts.name_of(entry.path)
        if not os.path.isfile(entry.path):
            parts.findings.append(warning("not-part", "a directory among a trainer's arguments", where))
        elif (text := _argument_text(parts, entry, where)) is not None:
            arguments[name] = _argument_value(parts, name, text, where)
    if not parts.add_marker(entries) and is_marked:
        parts.findings.append(note("trainer-no-marker", f"no trainer_{number}/{MARKER}", f"trainer_{number}"))
    parts.trainers[number] = arguments


def _argument_text(parts: FluidParts, entry: os.DirEntry[str], where: str) -> str | None:
    source = parts.source(entry)
    if source.size <= MAX_ARGUMENT:
        return source.read(0, source.size).decode("utf-8", "backslashreplace")
    message = f"{source.size:,} bytes, which is no argument of a trainer; it was not read"
    parts.findings.append(warning("trainer-argument", message, where))
    return None


def _argument_value(parts: FluidParts, name: str, text: str, where: str) -> object:
    match = _NUMBER.fullmatch(text)
    if match is not None:
        return int(match[1])
    if name in COUNTERS:
        found = repr(text[:40]) if text else "an empty file"
        parts.findings.append(error("trainer-argument", f"{found}, which is no number", where))
    return text.strip()


def check_trainers(parts: FluidParts) -> None:
    """Require that each trainer tells what another one tells of its progress."""
    told = {name for arguments in parts.trainers.values() for name in arguments} & set(COUNTERS)
    for number, arguments in parts.trainers.items():
        if lacking := sorted(told - arguments.keys()):
            message = f"no {' and no '.join(lacking)}, which other trainers have"
            parts.findings.append(warning("trainer-argument", message, f"trainer_{number}"))


# Lookup tables --------------------------------------------------------------------------------------


def add_tables(parts: FluidParts, entries: Iterable[tuple[str, os.DirEntry[str]]]) -> None:
    """Read the shards of all lookup tables, by the names of their files."""
    names: dict[str, dict[int, str]] = defaultdict(dict)
    shards: dict[str, list[_TableShard]] = defaultdict(list)
    for name, entry in entries:
        match = SHARD.fullmatch(name)
        if name == MARKER or match is None:
            if name != MARKER:
                where = parts.name_of(entry.path)
                parts.findings.append(warning("table-name", "it is not named like a lookup table", where))
            continue
        table, index = match["table"] or "", int(match["index"])
        if index in names[table]:
            message = f"two files of parameter server {index}"
            parts.fault("table-shard-twice", message, parts.name_of(entry.path))
        names[table][index] = name
        if (found := parts.read(entry)) is not None:
            shards[table].append(_TableShard(name, *found))
            parts.add_rows((TABLES[0], name, "rows"), *found)
            parts.add((TABLES[0], name, "values"), Role.WEIGHTS, *found)
    for table, found_names in names.items():
        _check_shard_numbers(parts, table, found_names)
    for table, found_shards in shards.items():
        _check_rows(parts, found_shards)
        _check_shapes(parts, found_shards)
        parts.tables[table] = _table_summary(found_shards)


class _TableShard(NamedTuple):
    """What one parameter server wrote of a table."""

    name: str
    source: Source
    stream: Stream

    @property
    def rows(self) -> int:
        if self.stream.rows is not None:
            return self.stream.rows.total
        return self.stream.shape[0] if self.stream.shape else 1


def _table_summary(shards: list[_TableShard]) -> dict[str, object]:
    """Return how many shards of a table there are, and how many rows in all of them."""
    height = max((one.stream.rows.height for one in shards if one.stream.rows), default=None)
    rows = sum(one.rows for one in shards)
    return {
        "shards": len(shards),
        "rows": rows,
        "height": height,
        "row_shape": list(shards[0].stream.shape[1:]),
    }


def _check_shard_numbers(parts: FluidParts, table: str, shards: Mapping[int, str]) -> None:
    lacking = [index for index in range(min(max(shards) + 1, len(shards) + 1)) if index not in shards]
    if lacking:
        message = (
            f"the shard of parameter server {lacking[0]:,} is missing, and that of {max(shards):,} is here"
        )
        parts.fault("table-shard-missing", message, table or None)


def _check_shapes(parts: FluidParts, shards: list[_TableShard]) -> None:
    """Require that the rows of a table are alike in all of its shards."""
    first = shards[0]
    for other in shards[1:]:
        one, two = ((s.stream.dtype.name, list(s.stream.shape[1:])) for s in (other, first))
        if one != two:
            message = f"rows of {one[0]} {one[1]}, and those in {first.name} are {two[0]} {two[1]}"
            parts.findings.append(error("table-shard-mismatch", message, other.name))


def _check_rows(parts: FluidParts, shards: list[_TableShard]) -> None:
    """Require that no row lies in two shards of a table, nor twice in one."""
    total = sum(one.stream.rows.total for one in shards if one.stream.rows)
    if total > MAX_ROWS:
        message = f"{total:,} rows, which were not compared (more than {MAX_ROWS:,})"
        parts.findings.append(note("rows-not-compared", message, shards[0].name))
        return
    seen: set[int] = set()
    for name, source, stream in shards:
        if stream.rows is None:
            continue
        own = integers(source, stream.rows.offset, stream.rows.total)
        if len(own) > len(set(own) - seen):
            parts.findings.append(error("rows-twice", "it has rows that were there before", name))
        seen.update(own)


# The serials beside one -----------------------------------------------------------------------------


def siblings_have_marker(path: str) -> bool:
    """Return whether another serial beside one has the marker."""
    own = os.path.realpath(path)
    for name, entry in _entries_or_nothing(os.path.dirname(own)).items():
        is_other = SERIAL.fullmatch(name) and entry.is_dir(follow_symlinks=False) and entry.path != own
        if is_other and any(os.path.isfile(os.path.join(entry.path, *at, MARKER)) for at in ((), (MODEL,))):
            return True
    return False


def check_neighbour(parts: FluidParts, entries: Entries, *, is_marked: bool) -> None:
    """Compare what there is with the serial before, or behind.

    Parameter servers write their shards after the marker, and each trainer writes for itself: a job that
    was killed leaves some out, and nothing in the serial tells. Nor does anything tell of a file that was
    lost later.
    """
    for name, beside in _neighbours(os.path.realpath(parts.root)):
        if (MODEL in beside) == (MODEL in entries) and _variable_names(beside):
            _compare_variables(parts, entries, name, beside)
            if MODEL in beside:
                _compare_shards(parts, entries, name, beside)
                _compare_trainers(parts, entries, name, beside, is_marked=is_marked)
            return


def _neighbours(own: str) -> Iterator[tuple[str, Entries]]:
    """Yield the serials beside one, the nearest first and those before it first of all."""
    above, name = os.path.split(own)
    match = SERIAL.fullmatch(name)
    if match is None:
        return
    number = int(match[1])
    if nearest := _entries_or_nothing(os.path.join(above, f"checkpoint_{number - 1}")):
        yield f"checkpoint_{number - 1}", nearest
    found = (SERIAL.fullmatch(one) for one in _entries_or_nothing(above))
    others = {one[0]: int(one[1]) - number for one in found if one is not None and int(one[1]) != number}
    for one in sorted(others, key=lambda one: (others[one] > 0, abs(others[one]))):
        yield one, _entries_or_nothing(os.path.join(above, one))


def _compare_variables(parts: FluidParts, entries: Entries, name: str, beside: Entries) -> None:
    """Require all variables, unless there are others instead: then it is another network's."""
    own, others = _variable_names(entries), _variable_names(beside)
    if own < others:
        lacking = sorted(others - own)
        message = f"no such variable, and {name} has it"
        if len(lacking) > 1:
            message = f"no such variable, nor {counted(len(lacking) - 1, 'other')}, and {name} has them"
        parts.fault("variable-missing", message, lacking[0])


def _compare_shards(parts: FluidParts, entries: Entries, name: str, beside: Entries) -> None:
    is_told = any(finding.code == _SHARD_MISSING for finding in parts.findings)
    if (lacking := sorted(_table_shards(beside) - _table_shards(entries))) and not is_told:
        parts.fault(_SHARD_MISSING, f"no such shard of a lookup table, and {name} has it", lacking[0])


def _compare_trainers(
    parts: FluidParts, entries: Entries, name: str, beside: Entries, *, is_marked: bool
) -> None:
    """Tell of trainers that are missing: a job may have fewer of them now, but not none."""
    is_bare = not any(map(TRAINER.fullmatch, entries))
    for trainer in (key for key in beside if TRAINER.fullmatch(key) and key not in entries):
        message = f"no such trainer, and {name} has it"
        if is_bare or not is_marked:
            parts.fault("trainer-missing", message, trainer)
        else:
            parts.findings.append(warning("trainer-missing", message, trainer))


def _variable_names(entries: Entries) -> set[str]:
    """Return the names of all variables of a serial."""
    inner = _entries_or_nothing(entries[MODEL].path) if MODEL in entries else entries
    try:
        return {name for name, entry in files_by_variable(inner) if not _is_aside(name, entry)}
    except CheckpointError:
        return set()


def _is_aside(name: str, entry: os.DirEntry[str]) -> bool:
    return name == MARKER or entry.name.startswith(".")


def _table_shards(entries: Entries) -> set[str]:
    """Return the names of the shards of all lookup tables, under either spelling."""
    found = (_entries_or_nothing(entries[table].path) for table in TABLES if table in entries)
    return {name for inner in found for name in inner if SHARD.fullmatch(name)}


def _entries_or_nothing(path: str) -> Entries:
    """Return the entries of a directory, none if it can't be read or is a link."""
    if os.path.islink(path):
        return {}
    try:
        return scan(path)
    except CheckpointError:
        return {}
