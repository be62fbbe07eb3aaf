"""The rules of a configuration, as people write them.

``KEYS`` is the table: each key of ``[[verify.rule]]`` with the function that reads its value.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ckpttool.amounts import nbytes
from ckpttool.errors import UsageError
from ckpttool.ops.ignored_findings import Ignore
from ckpttool.predict.request import InputSpec, parse_input

_UNCLOSED = re.compile(r"\[(?!!?\]?[^\]]*\])")
_COMMAND_LINE_ONLY = {
    "trust": "code in a checkpoint is only trusted on the command line: --trust",
    "record": "recordings are only made on the command line: --record FILE",
}


class Wrong(ValueError):
    """A value is none that its key can have; the text names the key, the value and what is allowed."""

    def __init__(self, key: str, value: object, allowed: str) -> None:
        super().__init__(f"{key} is {_shown(value)} ({allowed})")


def _shown(value: object) -> str:
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else f"{text[:59]}…"


@dataclass(frozen=True, slots=True)
class Rule:
    """What is asked of the checkpoints that a glob names; what is None or absent, other rules say.

    Attributes:
        origin: Where it stands: the file and the place in it.
        glob: Of paths relative to the file.
        predict: Whether they are loaded and run.
        wishes: Attributes of a ``Request``.
        ignores: Findings that are expected.
    """

    origin: str
    glob: str
    predict: bool | None = None
    wishes: Mapping[str, Any] = field(default_factory=dict)
    ignores: tuple[Ignore, ...] | None = None


def read_rule(table: Mapping[str, Any], directory: str, origin: str) -> Rule:
    """Return a rule.

    Args:
        table: As TOML has it.
        directory: Absolute; what files are relative to.
        origin: Where it stands.

    Raises:
        Wrong: A value is none that its key can have.
        UsageError: A key is none, or is missing, or two contradict each other.
    """
    for key in table:
        if key in _COMMAND_LINE_ONLY:
            raise UsageError(_COMMAND_LINE_ONLY[key])
        if key not in ("path", "predict", "ignore", *KEYS):
            raise UsageError(f"unknown key {key} (there are path, predict, ignore, {', '.join(KEYS)})")
    if "path" not in table:
        raise UsageError("path is missing (a glob of checkpoints)")
    if "input" in table and "input-shape" in table:
        raise UsageError("input and input-shape contradict each other (give one of them)")
    read = {key: KEYS[key](table[key], key) for key in KEYS if key in table}
    predict = truth(table["predict"], "predict") if "predict" in table else None
    ignores = _ignores(table["ignore"], origin) if "ignore" in table else None
    wishes = {_ATTRIBUTES.get(key, key.replace("-", "_")): _placed(key, read[key], directory) for key in read}
    return Rule(origin, glob_below(table["path"]), predict, wishes, ignores)


def _placed(key: str, value: Any, directory: str) -> Any:
    """Return a value in which a file's path is absolute."""
    if key in ("model", "optimizer"):
        place, _, name = value.rpartition(":")
        return f"{os.path.join(directory, place)}:{name}" if place.endswith(".py") else value
    return os.path.normpath(os.path.join(directory, value)) if key in ("input", "expect", "labels") else value


def glob_below(value: object) -> str:
    """Return a glob of what lies below a configuration's directory."""
    text = one_text(value, "path").rstrip("/")
    parts = [part for part in text.split("/") if part != os.curdir]
    if os.path.isabs(text) or os.pardir in parts:
        raise Wrong("path", value, "a glob below the directory of this file")
    if not all(parts) or any("**" in part and part != "**" for part in parts):
        raise Wrong("path", value, "a glob like models/*.pth or **/*.pth, with ** as a whole name")
    if any(_UNCLOSED.search(part) for part in parts):
        raise Wrong("path", value, "each [ needs its ]")
    return "/".join(parts)


def truth(value: object, key: str) -> bool:
    """Return a truth value."""
    if not isinstance(value, bool):
        raise Wrong(key, value, "true or false")
    return value


def texts(value: object, key: str) -> tuple[str, ...]:
    """Return a list of texts."""
    if not isinstance(value, list) or not value or not all(one and isinstance(one, str) for one in value):
        raise Wrong(key, value, "a list of at least one text")
    return tuple(value)


def one_text(value: object, key: str) -> str:
    """Return a text."""
    if not isinstance(value, str) or not value or "\0" in value:
        raise Wrong(key, value, "a text")
    return value


def _key(value: object, key: str) -> str:
    return "" if value == "" else one_text(value, key)  # the root of the file has no key


def _reference(value: object, key: str) -> str:
    place, _, name = one_text(value, key).rpartition(":")
    if not place or not name:
        raise Wrong(key, value, "package.module:Name or file.py:Name")
    return str(value)


def _arguments(value: object, key: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or not _is_plain(value):
        raise Wrong(key, value, "a table of texts, numbers, truth values, lists and tables")
    return dict(value)


def _is_plain(value: object) -> bool:
    if isinstance(value, Mapping):
        return all(map(_is_plain, value.values()))
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return isinstance(value, (str, int, float))


def _shapes(value: object, key: str) -> tuple[InputSpec, ...]:
    return tuple(parse_input(text) for text in texts(value, key))


def whole_number(least: int) -> Callable[[object, str], int]:
    """Return what reads whole numbers that are not too small."""

    def read(value: object, key: str) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise Wrong(key, value, f"a whole number of {least} or more")
        return value

    return read


def _number(value: object, key: str) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < math.inf:
        raise Wrong(key, value, "a number of 0 or more")
    return float(value)


def _share(value: object, key: str) -> float:
    number = _number(value, key)
    if number > 1:
        raise Wrong(key, value, "a number from 0 to 1")
    return number


def _seconds(value: object, key: str) -> float:
    number = _number(value, key)
    if number == 0:
        raise Wrong(key, value, "a number of seconds above 0")
    return number


def parse_bytes(value: object, key: str) -> int:
    """Return a size in bytes: a whole number, or a text like ``512MB`` or ``8 GiB``.

    Raises:
        Wrong: It is neither.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    wrong = Wrong(key, value, "a size like 512MB, 8GB or 8GiB")
    if not isinstance(value, str) or not value.endswith("B"):
        raise wrong
    try:
        found = nbytes(value)
    except UsageError as failure:
        raise wrong from failure
    if not found:
        raise wrong
    return found


def _ignores(value: object, origin: str) -> tuple[Ignore, ...]:
    if not isinstance(value, list) or not all(isinstance(one, Mapping) for one in value):
        raise Wrong("ignore", value, 'a list like [{code = "infinity", reason = "attention masks"}]')
    return tuple(_ignore(one, f"{origin}: ignore {number}") for number, one in enumerate(value, 1))


def _ignore(table: Mapping[str, Any], origin: str) -> Ignore:
    unknown = sorted(table.keys() - {"code", "reason", "where"})
    if unknown:
        raise UsageError(f"unknown key ignore.{unknown[0]} (there are code, reason, where)")
    for key, needed in _NEEDED.items():
        if key not in table:
            raise UsageError(f"ignore.{key} is missing ({needed})")
        if not isinstance(table[key], str) or not table[key].strip():
            raise Wrong(f"ignore.{key}", table[key], needed)
    where = one_text(table["where"], "ignore.where") if "where" in table else None
    return Ignore(table["code"], table["reason"], where, origin)


_NEEDED = {"code": "a finding's code, as docs/findings.md lists them", "reason": "why it is of no matter"}
_ATTRIBUTES = {"input-shape": "input_shapes"}
"""Keys whose attribute of a ``Request`` has another name."""

KEYS: Mapping[str, Callable[[object, str], Any]] = {
    "model": _reference,
    "model-args": _arguments,
    "optimizer": _reference,
    "optimizer-args": _arguments,
    "state-key": _key,
    "input": one_text,
    "input-shape": _shapes,
    "signature": one_text,
    "batch-size": whole_number(1),
    "seed": whole_number(0),
    "expect": one_text,
    "rtol": _number,
    "atol": _number,
    "labels": one_text,
    "min-accuracy": _share,
    "max-error": _number,
    "resume-step": truth,
    "timeout": _seconds,
    "memory": parse_bytes,
}
