"""What the trainers of a Fluid checkpoint kept of their progress: one small text file for each argument."""

from __future__ import annotations

import os
import re

from ckpttool.formats.paddle.fluid_parts import COUNTERS, MARKER, Entries, Parts
from ckpttool.report import error, note, warning

MAX_ARGUMENT = 1 << 12
"""The most bytes of a trainer's argument: a number as text."""

_NUMBER = re.compile(r"\s*([-+]?[0-9]{1,18})\s*")


def add_trainer(parts: Parts, number: str, entries: Entries, *, is_marked: bool) -> None:
    """Read the arguments of one trainer; ``is_marked``: whether the variables have the marker.

    Raises:
        CheckpointError: The operating system refuses one.
    """
    arguments: dict[str, object] = {}
    for name, entry in entries.items():
        if name == MARKER or name.startswith(".") or not parts.is_inside(entry):
            continue
        where = parts.name_of(entry.path)
        if not os.path.isfile(entry.path):
            parts.findings.append(warning("not-part", "a directory among a trainer's arguments", where))
        elif (text := _text(parts, entry, where)) is not None:
            arguments[name] = _value(parts, name, text, where)
    if not parts.add_marker(entries) and is_marked:
        parts.findings.append(note("trainer-no-marker", f"no trainer_{number}/{MARKER}", f"trainer_{number}"))
    parts.trainers[number] = arguments


def _text(parts: Parts, entry: os.DirEntry[str], where: str) -> str | None:
    source = parts.source(entry)
    if source.size <= MAX_ARGUMENT:
        return source.read(0, source.size).decode("utf-8", "backslashreplace")
    message = f"{source.size:,} bytes, which is no argument of a trainer; it was not read"
    parts.findings.append(warning("trainer-argument", message, where))
    return None


def _value(parts: Parts, name: str, text: str, where: str) -> object:
    match = _NUMBER.fullmatch(text)
    if match is not None:
        return int(match[1])
    if name in COUNTERS:
        found = repr(text[:40]) if text else "an empty file"
        parts.findings.append(error("trainer-argument", f"{found}, which is no number", where))
    return text.strip()


def check_trainers(parts: Parts) -> None:
    """Require that each trainer tells what another one tells of its progress."""
    told = {name for arguments in parts.trainers.values() for name in arguments} & set(COUNTERS)
    for number, arguments in parts.trainers.items():
        if lacking := sorted(told - arguments.keys()):
            message = f"no {' and no '.join(lacking)}, which other trainers have"
            parts.findings.append(warning("trainer-argument", message, f"trainer_{number}"))
