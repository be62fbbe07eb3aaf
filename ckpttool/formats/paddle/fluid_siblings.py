"""What the serials beside one tell of it: they were written alike."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from ckpttool.errors import CheckpointError
from ckpttool.formats.interface import scan
from ckpttool.formats.paddle.fluid_parts import (
    MARKER,
    MODEL,
    TABLES,
    TRAINER,
    Entries,
    Parts,
    files_by_variable,
)
from ckpttool.formats.paddle.fluid_tables import SHARD
from ckpttool.report import counted, warning

_MISSING = "table-shard-missing"
SERIAL = re.compile(r"checkpoint_([0-9]{1,18})")


def only_serial(path: str) -> str | None:
    """Return the one serial in a directory that holds nothing else, None for any other directory."""
    if not os.path.isdir(path):
        return None
    entries = [entry for name, entry in _looked_at(path).items() if not name.startswith(".")]
    is_one = len(entries) == 1 and SERIAL.fullmatch(entries[0].name)
    return entries[0].path if is_one and entries[0].is_dir(follow_symlinks=False) else None


def siblings_have_marker(path: str) -> bool:
    """Tell whether another serial beside one has the marker."""
    own = os.path.realpath(path)
    for name, entry in _looked_at(os.path.dirname(own)).items():
        is_other = SERIAL.fullmatch(name) and entry.is_dir(follow_symlinks=False) and entry.path != own
        if is_other and any(os.path.isfile(os.path.join(entry.path, *at, MARKER)) for at in ((), (MODEL,))):
            return True
    return False


def check_neighbour(parts: Parts, entries: Entries, *, is_marked: bool) -> None:
    """Compare what there is with the serial before, or behind.

    Parameter servers write their shards after the marker, and each trainer writes for itself: a job that
    was killed leaves some out, and nothing in the serial tells. Nor does anything tell of a file that was
    lost later.
    """
    for name, beside in _neighbours(os.path.realpath(parts.root)):
        if (MODEL in beside) == (MODEL in entries) and _variables(beside):
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
    if nearest := _looked_at(os.path.join(above, f"checkpoint_{number - 1}")):
        yield f"checkpoint_{number - 1}", nearest
    found = (SERIAL.fullmatch(one) for one in _looked_at(above))
    others = {one[0]: int(one[1]) - number for one in found if one is not None and int(one[1]) != number}
    for one in sorted(others, key=lambda one: (others[one] > 0, abs(others[one]))):
        yield one, _looked_at(os.path.join(above, one))


def _compare_variables(parts: Parts, entries: Entries, name: str, beside: Entries) -> None:
    """Require all variables, unless there are others instead: then it is another network's."""
    own, others = _variables(entries), _variables(beside)
    if own < others:
        lacking = sorted(others - own)
        message = f"no such variable, and {name} has it"
        if len(lacking) > 1:
            message = f"no such variable, nor {counted(len(lacking) - 1, 'other')}, and {name} has them"
        parts.fault("variable-missing", message, lacking[0])


def _compare_shards(parts: Parts, entries: Entries, name: str, beside: Entries) -> None:
    is_told = any(finding.code == _MISSING for finding in parts.findings)
    if (lacking := sorted(_shards(beside) - _shards(entries))) and not is_told:
        parts.fault(_MISSING, f"no such shard of a lookup table, and {name} has it", lacking[0])


def _compare_trainers(parts: Parts, entries: Entries, name: str, beside: Entries, *, is_marked: bool) -> None:
    """Tell of trainers that are missing: a job may have fewer of them now, but not none."""
    is_bare = not any(map(TRAINER.fullmatch, entries))
    for trainer in (key for key in beside if TRAINER.fullmatch(key) and key not in entries):
        message = f"no such trainer, and {name} has it"
        if is_bare or not is_marked:
            parts.fault("trainer-missing", message, trainer)
        else:
            parts.findings.append(warning("trainer-missing", message, trainer))


def _variables(entries: Entries) -> set[str]:
    """Return the names of all variables of a serial."""
    inner = _looked_at(entries[MODEL].path) if MODEL in entries else entries
    try:
        return {name for name, entry in files_by_variable(inner) if not _is_aside(name, entry)}
    except CheckpointError:
        return set()


def _is_aside(name: str, entry: os.DirEntry[str]) -> bool:
    return name == MARKER or entry.name.startswith(".")


def _shards(entries: Entries) -> set[str]:
    """Return the names of the shards of all lookup tables, under either spelling."""
    found = (_looked_at(entries[table].path) for table in TABLES if table in entries)
    return {name for inner in found for name in inner if SHARD.fullmatch(name)}


def _looked_at(path: str) -> Entries:
    """Return what lies in a directory; what can't be looked at tells nothing."""
    if os.path.islink(path):
        return {}
    try:
        return scan(path)
    except CheckpointError:
        return {}
