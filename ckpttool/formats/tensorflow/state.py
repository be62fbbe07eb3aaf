"""Parser and writer of the state file ``checkpoint``: a run's checkpoints, and the latest of them.

The file is a CheckpointState message in Protocol Buffers' text format.

Source: tensorflow/tensorflow ``python/training/checkpoint_state.proto`` and ``checkpoint_management.py``;
Protocol Buffers documentation, "Text Format".
"""

from __future__ import annotations

import re
from typing import NamedTuple

from ckpttool.storage import fs

NAME = "checkpoint"

MAX_BYTES = 1 << 26

MAX_SHARDS = 1000

_KEY = "model_checkpoint_path"
_SHARDS = re.compile(r"-\?{5}-of-(\d{5})$")
_TOKEN = re.compile(
    r"""\s+|\#[^\n]*|(?P<name>[A-Za-z_]\w*)|(?P<punct>[:;,])|(?P<number>[-+]?[\d.][\w.+-]*)"""
    r"""|(?P<string>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')""",
)
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{1,2}|[0-7]{1,3}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", re.DOTALL)
_PLAIN = {"n": 10, "r": 13, "t": 9, "a": 7, "b": 8, "f": 12, "v": 11, "\\": 92, "'": 39, '"': 34, "?": 63}
_SHORT = {10: "\\n", 13: "\\r", 9: "\\t", 34: '\\"', 39: "\\'", 92: "\\\\"}


class CheckpointState(NamedTuple):
    """Contents of a state file.

    Attributes:
        latest: ``model_checkpoint_path``: a prefix, absolute or relative to the file's directory.
        paths: ``all_model_checkpoint_paths``, the oldest first.
        timestamps: Text of the timestamp of each path; empty if their numbers differ.
        preserved: Text of ``last_preserved_timestamp``; None if absent.
    """

    latest: str
    paths: tuple[str, ...] = ()
    timestamps: tuple[str, ...] = ()
    preserved: str | None = None


def read_state(path: str) -> CheckpointState | None:
    """Read a state file; return None if the path is another kind of file, or none.

    Raises:
        OSError, CheckpointError: It can't be read.
        ValueError: It has the key of a state file, but is malformed.
    """
    if not fs.isfile(path):
        return None
    with fs.open_regular(path) as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES and _KEY.encode() in data:
        raise ValueError(f"more than {MAX_BYTES:,} bytes")
    return state_in(data.decode("utf-8", "surrogateescape"))


def state_in(text: str) -> CheckpointState | None:
    """Parse a state file; return None if the text isn't one, or names no checkpoint.

    Raises:
        ValueError: It has the key of a state file, but is malformed.
    """
    return parse_state(text) if _KEY in text and "\0" not in text else None


def parse_state(text: str) -> CheckpointState | None:
    """Parse the text of a state file; return None if it names no checkpoint.

    Raises:
        ValueError: The text is malformed.
    """
    # TensorFlow reads the file with Protocol Buffers' parser, so this accepts all that it accepts for
    # strings, numbers and names: comments, separators, both quotes, adjacent strings, fields in any order.
    # Fields that aren't known are dropped; of a repeated ``model_checkpoint_path``, the last counts.
    values: dict[str, list[str]] = {}
    name, expected, at = "", "name", 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise ValueError(f"unexpected text at character {at:,}")
        at, kind, token = match.end(), match.lastgroup, match[0]
        if kind is None or (kind == "punct" and token in ";," and expected == "name"):
            continue
        if kind == "string" and expected == "name" and values.get(name):
            values[name][-1] += unescape(token[1:-1])  # neighbours are one string
        elif kind == expected == "name":
            name, expected = token, "colon"
        elif expected == "colon" and token == ":":
            expected = "value"
        elif expected == "value" and kind in ("string", "number", "name"):
            values.setdefault(name, []).append(unescape(token[1:-1]) if kind == "string" else token)
            expected = "name"
        else:
            raise ValueError(f"unexpected {token[:40]!r} at character {match.start():,}")
    latest, paths = values.get(_KEY), tuple(values.get("all_model_checkpoint_paths", ()))
    if not latest:
        return None
    times = tuple(values.get("all_model_checkpoint_timestamps", ()))
    if len(times) != len(paths):
        times = ()
    preserved = values.get("last_preserved_timestamp", [None])[-1]
    return CheckpointState(latest[-1], paths, times, preserved)


def state_text(state: CheckpointState) -> str:
    """Return the text of a state file, as TensorFlow writes it."""
    lines = [f'model_checkpoint_path: "{escape(state.latest)}"']
    lines += [f'all_model_checkpoint_paths: "{escape(path)}"' for path in state.paths]
    lines += [f"all_model_checkpoint_timestamps: {time}" for time in state.timestamps]
    if state.preserved is not None:
        lines.append(f"last_preserved_timestamp: {state.preserved}")
    return "\n".join(lines) + "\n"


def expand_shards(path: str) -> tuple[str, ...]:
    """Return the shards of a listed path ``<name>-?????-of-00002``, or the path itself if it has none."""
    match = _SHARDS.search(path)
    if match is None:
        return (path,)
    shards = range(min(int(match[1]), MAX_SHARDS))
    return tuple(path.replace("?????", f"{shard:05d}") for shard in shards) or (path,)


def unescape(text: str) -> str:
    """Return a string without its C escapes; bytes that aren't UTF-8 become surrogates, as in file names.

    Raises:
        ValueError: An escape is unknown.
    """
    parts, at = [], 0
    for match in _ESCAPE.finditer(text):
        parts.append(text[at : match.start()].encode("utf-8", "surrogateescape"))
        escape = match[1]
        if escape[0] in "uU" and len(escape) > 1:
            parts.append(chr(int(escape[1:], 16)).encode())
        elif escape[0] == "x" and len(escape) > 1:
            parts.append(bytes([int(escape[1:], 16)]))
        elif escape[0] in "01234567":
            parts.append(bytes([int(escape, 8) & 0xFF]))
        elif escape in _PLAIN:
            parts.append(bytes([_PLAIN[escape]]))
        else:
            raise ValueError(f"an escape \\{escape}")
        at = match.end()
    parts.append(text[at:].encode("utf-8", "surrogateescape"))
    return b"".join(parts).decode("utf-8", "surrogateescape")


def escape(text: str) -> str:
    """Return a string as ASCII with C escapes."""
    return "".join(
        _SHORT.get(byte) or (chr(byte) if 32 <= byte < 127 else f"\\{byte:03o}")
        for byte in text.encode("utf-8", "surrogateescape")
    )
