"""What people say of checkpoints: notes, facts, and until when a pin holds; kept in the list of pins.

A list has a table for each: ``[about."model_epoch_3.pth"]`` with ``note``, ``until`` and other keys. It is a
part of the list, so that it goes where the list goes, and follows a renaming.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import date, datetime
from itertools import pairwise
from typing import Any

from ckpttool.containers.toml import as_toml, parse_toml, quote
from ckpttool.core.errors import UsageError
from ckpttool.core.result import document_of
from ckpttool.transaction.paths import shown

TABLE = "about"
NOTE, UNTIL = "note", "until"
_FACT = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}", re.ASCII)
_LONGEST = 10_000
_HEADING = re.compile(r"^[ \t]*\[.*\][ \t]*(?:#.*)?\r?$", re.MULTILINE)
"""A line that may begin a table."""


@dataclass(frozen=True, slots=True)
class Remark:
    """What people say of one checkpoint.

    Attributes:
        note: A sentence or two.
        until: The last day on which its pin holds, in local time; None: for good.
        facts: What else is told, by plain words such as ``data``.
        fault: What of it can't be understood.
    """

    note: str | None = None
    until: date | None = None
    facts: Mapping[str, str] = field(default_factory=dict)
    fault: str | None = None

    def document(self) -> dict[str, Any]:
        return document_of(self, "note", "until", "facts")

    @property
    def has_ended(self) -> bool:
        """Tell whether its pin protects no more; what can't be understood still does."""
        return self.until is not None and self.until < date.fromtimestamp(time.time())

    @property
    def is_empty(self) -> bool:
        """Tell whether it says nothing."""
        return self.note is None and self.until is None and not self.facts


NOTHING = Remark()


def remarks_in(text: str) -> dict[str, Remark]:
    """Return what a list says of checkpoints, by the names that it has for them.

    Raises:
        ValueError: It is no TOML.
    """
    tables = parse_toml(text).get(TABLE, {})
    if not isinstance(tables, Mapping):
        return {}
    return {name: _remark_of(table) for name, table in tables.items() if isinstance(table, Mapping)}


def _remark_of(table: Mapping[str, object]) -> Remark:
    note, day, faults = table.get(NOTE), table.get(UNTIL), list[str]()
    if note is not None and not isinstance(note, str):
        note = None
        faults.append(f"{NOTE} is no text")
    until = _day(day)
    if day is not None and until is None:
        faults.append(f"{UNTIL} is no date; it protects")
    facts = {
        key: str(one)
        for key, one in table.items()
        if key not in (NOTE, UNTIL) and isinstance(one, str | int | float | bool)
    }
    return Remark(note, until, facts, "; ".join(faults) or None)


def _day(value: object) -> date | None:
    if isinstance(value, datetime):
        return value.date()
    if isinstance(value, date):
        return value
    try:
        return date.fromisoformat(value) if isinstance(value, str) else None
    except ValueError:
        return None


def parse_until(text: str) -> date:
    """Return the day that ``2027-01-01`` or ``90d`` means.

    Raises:
        UsageError: It means none, or one that has gone.
    """
    from ckpttool.core.text import seconds

    today = date.fromtimestamp(time.time())
    try:
        until = date.fromisoformat(text)
    except ValueError:
        try:
            until = date.fromtimestamp(time.time() + seconds(text))
        except (UsageError, OverflowError, ValueError, OSError) as error:
            raise UsageError(f"--until {text}: no date (such as 2027-01-01 or 90d)") from error
    if until < today:
        raise UsageError(f"--until {text}: that day has gone")
    return until


def parse_facts(texts: Mapping[str, str]) -> dict[str, str | None]:
    """Return facts as they are kept: a key with an empty text is to go.

    Raises:
        UsageError: A key is no plain word, or a text is too long.
    """
    for key, text in texts.items():
        if _FACT.fullmatch(key) is None or key in (NOTE, UNTIL):
            raise UsageError(f"--set {key}: expected a plain word, such as data, license or seed")
        if len(text) > _LONGEST:
            raise UsageError(f"--set {key}: longer than {_LONGEST:,} characters")
    return {key: text or None for key, text in texts.items()}


def merged(remark: Remark, other: Remark, facts: Mapping[str, str | None]) -> Remark:
    """Return a remark with what another one has, and other facts; a fact of None goes."""
    together = {**remark.facts, **{key: text for key, text in facts.items() if text is not None}}
    kept = {key: text for key, text in together.items() if facts.get(key, text) is not None}
    return replace(
        remark,
        note=remark.note if other.note is None else other.note or None,
        until=other.until or remark.until,
        facts=kept,
    )


def with_remark(text: str, name: str, remark: Remark) -> str:
    """Return a list that says this of a checkpoint; all else stays as it is.

    Raises:
        ValueError: It can't be changed in its place.
    """
    tables = parse_toml(text)
    about = tables.pop(TABLE, {})
    if not isinstance(about, Mapping) or not _is_of_single_values(about.get(name, {})):
        raise ValueError(f"[{TABLE}] holds more than single values")
    others = {key: value for key, value in about.items() if key != name}
    newline = "\r\n" if "\r\n" in text else "\n"
    before, own, behind = _split_at_table(text, name)
    lines = [line.strip() for line in own.splitlines() if line.lstrip().startswith("#")]
    if not remark.is_empty or lines:
        lines = [f"[{TABLE}.{quote(name)}]", *lines]
        lines += [f"{NOTE} = {quote(remark.note)}"] if remark.note is not None else []
        lines += [f"{UNTIL} = {remark.until.isoformat()}"] if remark.until is not None else []
        lines += [f"{key} = {as_toml(value)}" for key, value in remark.facts.items()]
    parts = (before, behind, newline.join(lines))
    text = newline.join(part.rstrip("\r\n") + newline for part in parts if part.strip())
    # Text that was matched, not parsed, is not believed: TOML itself must say that just this is another.
    now = parse_toml(text)
    left = {key: value for key, value in now.pop(TABLE, {}).items() if key != name}
    is_said = remarks_in(text).get(name, NOTHING) == replace(remark, fault=None)
    if now != tables or left != others or not is_said:
        raise ValueError(f"[{TABLE}] is written in a way that can't be changed in its place")
    return text


def _is_of_single_values(table: object) -> bool:
    return isinstance(table, Mapping) and all(
        isinstance(one, str | int | float | bool | date) for one in table.values()
    )


def _split_at_table(text: str, name: str) -> tuple[str, str, str]:
    """Return what stands before the table about a checkpoint, that table, and what stands behind it."""
    starts = [match.start() for match in _HEADING.finditer(text)]
    for start, end in pairwise([*starts, len(text)]):
        try:
            about = parse_toml(text[start:].split("\n", 1)[0].strip()).get(TABLE, {})
        except ValueError:
            continue
        if about == {name: {}}:
            return text[:start], text[start:end], text[end:]
    return text, "", ""


def rename_remarks(text: str, renamed: Mapping[str, str]) -> str:
    """Return a list in which what has got another name is spoken of under that."""
    known = remarks_in(text)
    moving = {old: known[old] for old in renamed if old in known}
    for old in moving:
        text = with_remark(text, old, NOTHING)
    for old, remark in moving.items():
        text = with_remark(text, renamed[old], remark)
    return text


def fault_text(file: str, name: str, remark: Remark) -> str:
    """Return what to say of a remark that can't be understood."""
    return f"{shown(file)}: {TABLE} {name!r}: {remark.fault}"
