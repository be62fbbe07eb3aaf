"""What small texts that name checkpoints say once these have other names. Pure: texts in, texts out.

All else in a text stays as it is written, as far as that is possible.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ckpttool.formats.tensorflow.state import parse_state, state_text

BEST = "best_model_checkpoint"

Renamer = Callable[[str], str | None]
"""Returns what a path that stands in a text is to be from now on, or None where it stays."""

_STRING = re.compile(r'("(?:[^"\\]|\\.)*")(\s*:)?', re.DOTALL)
_BEST = re.compile(rf'("{BEST}"\s*:\s*)("(?:[^"\\]|\\.)*")')
_FILES = re.compile(r'^ "files": (\{.*\}),$', re.MULTILINE)
_PLAIN = re.compile(
    r"(?P<mark>\\?)(?P<digest>[0-9A-Fa-f]{32,128})(?P<gap> [ *])(?P<name>.+?)(?P<end>\r?)", re.DOTALL
)
_TAGGED = re.compile(
    r"(?P<mark>\\?)(?P<gap>(?:MD5|SHA-?[0-9]+|BLAKE2[a-z]*)(?:-[0-9]+)? ?\()(?P<name>.+)(?P<equals>\) ?= ?)"
    r"(?P<digest>[0-9A-Fa-f]{32,128})(?P<end>\r?)",
    re.DOTALL,
)
_ESCAPE = re.compile(r"\\([\\nr])")
_UNESCAPED = {"\\": "\\", "n": "\n", "r": "\r"}


class FileChange(NamedTuple):
    """A file that says something else from now on: its digests, and its new size in bytes."""

    before: str
    after: str
    nbytes: int


def line_text(text: str, new: Renamer) -> str:
    """Return a text that is one path, with the white space around it."""
    path = text.strip()
    renamed = new(path) if path else None
    return text if renamed is None else text.replace(path, renamed, 1)


def state_file_text(text: str, new: Renamer) -> str:
    """Return TensorFlow's state file; paths and timestamps stay parallel."""
    state = parse_state(text)
    if state is None:
        raise ValueError("it names no checkpoint")
    paths = tuple(new(path) or path for path in state.paths)
    latest = new(state.latest) or state.latest
    if (latest, paths) == (state.latest, state.paths):
        return text
    return state_text(state._replace(latest=latest, paths=paths))


def best_text(text: str, new: Renamer) -> str:
    """Return a ``trainer_state.json`` with another ``best_model_checkpoint``."""
    if BEST not in text:
        return text
    found = _BEST.findall(text)
    if len(found) == 1 and new(json.loads(found[0][1], strict=False)) is None:
        return text  # the whole history of a run takes long to parse
    document = _load_object(text)
    best = document.get(BEST)
    renamed = new(best) if isinstance(best, str) and best else None
    if renamed is None:
        return text
    edited = _BEST.sub(lambda match: match[1] + json.dumps(renamed), text)
    return _verified_json(edited, {**document, BEST: renamed})


def index_text(text: str, names: Mapping[str, str]) -> str:
    """Return the index of a sharded set in which its shards have other names."""
    document = _load_object(text)
    weight_map = document.get("weight_map")
    if not isinstance(weight_map, dict):
        raise ValueError("it maps nothing")
    renamed = {key: _rename_shards(value, names) for key, value in weight_map.items()}

    def rename_value(match: re.Match[str]) -> str:
        is_key = match[2] is not None
        new = None if is_key else names.get(json.loads(match[1], strict=False))
        return match[0] if new is None else json.dumps(new)

    return _verified_json(_STRING.sub(rename_value, text), {**document, "weight_map": renamed})


def _rename_shards(value: object, names: Mapping[str, str]) -> object:
    """Return the shard of a tensor under its new name; Keras has a list of them."""
    if isinstance(value, list):
        return [_rename_shards(shard, names) for shard in value]
    return names.get(value, value) if isinstance(value, str) else value


def sums_text(text: str, new: Renamer, changed: Mapping[str, FileChange]) -> str:
    """Return a list of digests, as ``sha256sum`` writes it, in which files have other names and contents.

    ``changed`` has the files that say something else from now on by their old names. A digest that wasn't
    right before stays, and one that isn't of SHA-256.
    """
    return "\n".join(_sum_line(line, new, changed) for line in text.split("\n"))


def _sum_line(line: str, new: Renamer, changed: Mapping[str, FileChange]) -> str:
    match = _PLAIN.fullmatch(line) or _TAGGED.fullmatch(line)
    if match is None:
        return line
    name = match["name"]
    if match["mark"]:
        name = _ESCAPE.sub(lambda escape: _UNESCAPED[escape[1]], name)
    digest = match["digest"]
    change = changed.get(os.path.normpath(name))
    if change is not None and digest.lower() == change.before:
        digest = change.after
    renamed = new(name)
    if renamed is None and digest == match["digest"]:
        return line
    name = renamed or name
    escaped = name.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
    mark = "\\" if escaped != name else ""
    if match.re is _TAGGED:
        return f"{mark}{match['gap']}{escaped}{match['equals']}{digest}{match['end']}"
    return f"{mark}{digest}{match['gap']}{escaped}{match['end']}"


def digests_text(text: str, new: Renamer, changed: Mapping[str, FileChange]) -> str:
    """Return the digests of tensors in which the files that hold them have other names, and other sizes."""
    document = _load_object(text)
    files = document.get("files")
    if not isinstance(files, dict):
        raise ValueError("it lists no files")
    renamed: dict[str, object] = {}
    for name, entry in files.items():
        change = changed.get(os.path.normpath(name))
        if change is not None and isinstance(entry, dict):
            entry = {**entry, "bytes": change.nbytes}
        renamed[new(name) or name] = entry
    if renamed == files:
        return text
    line = f' "files": {json.dumps(renamed)},'
    return _verified_json(_FILES.sub(lambda match: line, text, count=1), {**document, "files": renamed})


def _load_object(text: str) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except RecursionError as failure:
        raise ValueError("it is nested too deeply") from failure
    if not isinstance(document, dict):
        raise ValueError("it is no JSON object")
    return document


def _verified_json(text: str, wanted: Mapping[str, Any]) -> str:
    """Return an edited text if it says what it is to say; else what does, in a layout of its own."""
    try:
        is_right = json.dumps(json.loads(text)) == json.dumps(wanted)
    except ValueError:
        is_right = False
    return text if is_right else json.dumps(wanted, indent=2) + "\n"
