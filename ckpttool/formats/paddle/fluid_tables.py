"""The lookup tables of a Fluid checkpoint, of which each parameter server wrote its own rows to a file."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ckpttool.formats.paddle.fluid_parts import MARKER, TABLES, Parts
from ckpttool.report import error, note, warning
from ckpttool.tensor import Role
from ckpttool.wire.lodtensor import Stream, integers
from ckpttool.wire.source import Source

MAX_ROWS = 1 << 20
"""The most rows of all tables that are compared with each other."""

SHARD = re.compile(r"(?:(?P<table>.*)_)?(?P<index>[0-9]{1,9})", re.DOTALL)
"""What the file of one parameter server is called."""


class _Shard(NamedTuple):
    """What one parameter server wrote of a table."""

    name: str
    source: Source
    stream: Stream

    @property
    def rows(self) -> int:
        if self.stream.rows is not None:
            return self.stream.rows.total
        return self.stream.shape[0] if self.stream.shape else 1


def add_tables(parts: Parts, entries: Iterable[tuple[str, os.DirEntry[str]]]) -> None:
    """Read the shards of all lookup tables, by the names of their files.

    Raises:
        CheckpointError: The operating system refuses one.
    """
    names: dict[str, dict[int, str]] = defaultdict(dict)
    shards: dict[str, list[_Shard]] = defaultdict(list)
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
            shards[table].append(_Shard(name, *found))
            parts.add_rows((TABLES[0], name, "rows"), *found)
            parts.add((TABLES[0], name, "values"), Role.WEIGHTS, *found)
    for table, found_names in names.items():
        _check_shards(parts, table, found_names)
    for table, found_shards in shards.items():
        _check_rows(parts, found_shards)
        _check_shapes(parts, found_shards)
        parts.tables[table] = _summary(found_shards)


def _summary(shards: list[_Shard]) -> dict[str, object]:
    """Return what there is of a table: how many shards, and the rows of all of them."""
    height = max((one.stream.rows.height for one in shards if one.stream.rows), default=None)
    rows = sum(one.rows for one in shards)
    return {
        "shards": len(shards),
        "rows": rows,
        "height": height,
        "row_shape": list(shards[0].stream.shape[1:]),
    }


def _check_shards(parts: Parts, table: str, shards: Mapping[int, str]) -> None:
    lacking = [index for index in range(min(max(shards) + 1, len(shards) + 1)) if index not in shards]
    if lacking:
        message = (
            f"the shard of parameter server {lacking[0]:,} is missing, and that of {max(shards):,} is here"
        )
        parts.fault("table-shard-missing", message, table or None)


def _check_shapes(parts: Parts, shards: list[_Shard]) -> None:
    """Require that the rows of a table are alike in all of its shards."""
    first = shards[0]
    for other in shards[1:]:
        one, two = ((s.stream.dtype.name, list(s.stream.shape[1:])) for s in (other, first))
        if one != two:
            message = f"rows of {one[0]} {one[1]}, and those in {first.name} are {two[0]} {two[1]}"
            parts.findings.append(error("table-shard-mismatch", message, other.name))


def _check_rows(parts: Parts, shards: list[_Shard]) -> None:
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
