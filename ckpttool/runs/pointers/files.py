"""Kinds of files that programs write, one class each: pointers of trainers, indexes, lists of digests."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Container, Mapping
from typing import Any

from ckpttool.formats import shard_index
from ckpttool.formats.interface import SIDECARS
from ckpttool.formats.keras import sharded as keras_sharded
from ckpttool.formats.pointer_kind import (
    MAX_POINTER,
    NO_CHANGES,
    Changes,
    FilePlace,
    Renamer,
    StalePaths,
    TextKind,
)
from ckpttool.ops.manifest import SHARED

TRAINER_BEST = "best_model_checkpoint"
"""Key of the best checkpoint in a Trainer's state; the Trainer doesn't need it to resume."""


# Files of frameworks --------------------------------------------------------------------------------


class LineFile(TextKind):
    """DeepSpeed's ``latest`` and ``latest_universal``, Detectron2's and MMEngine's ``last_checkpoint``."""

    what = "`latest`, `last_checkpoint`"
    files = ("latest", "latest_universal", "last_checkpoint")
    limit = MAX_POINTER
    protects = True
    is_certain = False
    stale_paths = StalePaths.PATH

    def names(self, text: str) -> tuple[str, ...]:
        line = text.strip()
        return (line,) if line and line.isprintable() else ()

    def reworded(self, text: str, new: Renamer, changes: Changes = NO_CHANGES) -> str:
        path = text.strip()
        renamed = new(path) if path else None
        return text if renamed is None else text.replace(path, renamed, 1)


class IterationTracker(TextKind):
    """Megatron's tracker, which verl has adopted: the number of an iteration."""

    what = "Megatron's tracker"
    files = ("latest_checkpointed_iteration.txt",)
    limit = MAX_POINTER
    protects = True
    is_certain = False
    _FORMS: tuple[Callable[[int], str], ...] = ("iter_{:07d}".format, "global_step_{}".format)

    def names(self, text: str) -> tuple[str, ...]:
        number = text.strip()
        is_number = number.isascii() and number.isdigit() and len(number) < 18
        return tuple(form(int(number)) for form in self._FORMS) if is_number else ()

    def targets(self, text: str, siblings: Container[str]) -> tuple[str, ...]:
        names = self.names(text)
        return tuple(name for name in names if name in siblings)[:1] or names[:1]

    def reworded(self, text: str, new: Renamer, changes: Changes = NO_CHANGES) -> str:
        if any(new(name) is not None for name in self.names(text)):
            raise ValueError("it can only hold the number of an iteration")
        return text


class TrainerState(TextKind):
    """``trainer_state.json`` of the Hugging Face Trainer, with the best checkpoint of the run."""

    what = "`trainer_state.json`"
    fallback = "the Trainer goes on without it"
    files = ("trainer_state.json",)
    places = FilePlace.BESIDE | FilePlace.INSIDE
    protects = True
    stale_paths = StalePaths.PATH
    _BEST = re.compile(rf'("{TRAINER_BEST}"\s*:\s*)("(?:[^"\\]|\\.)*")')

    def reason(self, name: str) -> str:
        return TRAINER_BEST

    def names(self, text: str) -> tuple[str, ...]:
        best = _load_object(text).get(TRAINER_BEST)
        return (best,) if isinstance(best, str) and best else ()

    def reworded(self, text: str, new: Renamer, changes: Changes = NO_CHANGES) -> str:
        if TRAINER_BEST not in text:
            return text
        found = self._BEST.findall(text)
        if len(found) == 1 and new(json.loads(found[0][1], strict=False)) is None:
            return text  # the whole history of a run takes long to parse
        document = _load_object(text)
        best = document.get(TRAINER_BEST)
        renamed = new(best) if isinstance(best, str) and best else None
        if renamed is None:
            return text
        edited = self._BEST.sub(lambda match: match[1] + json.dumps(renamed), text)
        return _verified_json(edited, {**document, TRAINER_BEST: renamed})


# Indexes and lists of digests -------------------------------------------------------------------------


class ShardIndex(TextKind):
    """The index of a sharded set, of safetensors, PyTorch or Keras: names of its shards."""

    places = FilePlace.MEMBER
    _STRING = re.compile(r'("(?:[^"\\]|\\.)*")(\s*:)?', re.DOTALL)

    def matches(self, name: str) -> bool:
        return any(index.fullmatch(name) for index in (shard_index.INDEX, keras_sharded.INDEX))

    def names(self, text: str) -> tuple[str, ...]:
        shards = _object_at(_load_object(text), "weight_map").values()
        each = (one for value in shards for one in (value if isinstance(value, list) else [value]))
        return tuple(dict.fromkeys(one for one in each if isinstance(one, str)))

    def reworded(self, text: str, new: Renamer, changes: Changes = NO_CHANGES) -> str:
        document = _load_object(text)
        renamed = {key: _renamed(value, new) for key, value in _object_at(document, "weight_map").items()}

        def rename_value(match: re.Match[str]) -> str:
            is_key = match[2] is not None
            name = None if is_key else new(json.loads(match[1], strict=False))
            return match[0] if name is None else json.dumps(name)

        return _verified_json(self._STRING.sub(rename_value, text), {**document, "weight_map": renamed})


def _renamed(value: object, new: Renamer) -> object:
    """Return the shard of a tensor with its new name; Keras has lists of them."""
    if isinstance(value, list):
        return [_renamed(shard, new) for shard in value]
    return (new(value) or value) if isinstance(value, str) else value


class DigestList(TextKind):
    """Lists of digests as ``sha256sum`` and its like write them, for a file or a whole directory.

    A digest that was wrong before stays, and so does one of another algorithm than SHA-256.
    """

    files = SHARED
    places = FilePlace.BESIDE | FilePlace.INSIDE | FilePlace.MEMBER
    has_digests = True
    NAMES = re.compile(
        r"(?:.*[._-])?(?:md5|sha(?:1|224|256|384|512)?|b2|check)?sums?(?:\.txt)?"
        r"|.*\.(?:md5|sha(?:1|224|256|384|512)|b2)",
        re.IGNORECASE | re.DOTALL,
    )
    """Names of such files, whichever program wrote them."""
    _PLAIN = re.compile(
        r"(?P<mark>\\?)(?P<digest>[0-9A-Fa-f]{32,128})(?P<gap> [ *])(?P<name>.+?)(?P<end>\r?)", re.DOTALL
    )
    _TAGGED = re.compile(
        r"(?P<mark>\\?)(?P<gap>(?:MD5|SHA-?[0-9]+|BLAKE2[a-z]*)(?:-[0-9]+)? ?\()(?P<name>.+)"
        r"(?P<equals>\) ?= ?)(?P<digest>[0-9A-Fa-f]{32,128})(?P<end>\r?)",
        re.DOTALL,
    )
    _ESCAPE = re.compile(r"\\([\\nr])")
    _UNESCAPED: Mapping[str, str] = {"\\": "\\", "n": "\n", "r": "\r"}

    def matches(self, name: str) -> bool:
        return self.NAMES.fullmatch(name) is not None

    def names(self, text: str) -> tuple[str, ...]:
        return tuple(self._name(match) for match in map(self._match, text.split("\n")) if match is not None)

    def reworded(self, text: str, new: Renamer, changes: Changes = NO_CHANGES) -> str:
        return "\n".join(self._line(line, new, changes) for line in text.split("\n"))

    def _match(self, line: str) -> re.Match[str] | None:
        return self._PLAIN.fullmatch(line) or self._TAGGED.fullmatch(line)

    def _name(self, match: re.Match[str]) -> str:
        name = match["name"]
        return self._ESCAPE.sub(lambda one: self._UNESCAPED[one[1]], name) if match["mark"] else name

    def _line(self, line: str, new: Renamer, changes: Changes) -> str:
        match = self._match(line)
        if match is None:
            return line
        name, digest = self._name(match), match["digest"]
        change = changes.get(os.path.normpath(name))
        if change is not None and digest.lower() == change.before:
            digest = change.after
        renamed = new(name)
        if renamed is None and digest == match["digest"]:
            return line
        name = renamed or name
        escaped = name.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
        mark = "\\" if escaped != name else ""
        if match.re is self._TAGGED:
            return f"{mark}{match['gap']}{escaped}{match['equals']}{digest}{match['end']}"
        return f"{mark}{digest}{match['gap']}{escaped}{match['end']}"


class TensorDigests(TextKind):
    """Sidecar with digests of tensors: names and sizes of the checkpoint's files."""

    places = FilePlace.MEMBER
    has_digests = True
    _FILES = re.compile(r'^ "files": (\{.*\}),$', re.MULTILINE)

    def matches(self, name: str) -> bool:
        return name.endswith(SIDECARS[1])

    def names(self, text: str) -> tuple[str, ...]:
        return tuple(_object_at(_load_object(text), "files"))

    def reworded(self, text: str, new: Renamer, changes: Changes = NO_CHANGES) -> str:
        document = _load_object(text)
        files = _object_at(document, "files")
        renamed: dict[str, object] = {}
        for name, entry in files.items():
            change = changes.get(os.path.normpath(name))
            if change is not None and isinstance(entry, dict):
                entry = {**entry, "bytes": change.nbytes}
            renamed[new(name) or name] = entry
        if renamed == files:
            return text
        line = f' "files": {json.dumps(renamed)},'
        return _verified_json(
            self._FILES.sub(lambda match: line, text, count=1), {**document, "files": renamed}
        )


def _load_object(text: str) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except RecursionError as failure:
        raise ValueError("it is nested too deeply") from failure
    if not isinstance(document, dict):
        raise ValueError("it is not a JSON object")
    return document


def _object_at(document: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = document.get(key)
    if not isinstance(value, dict):
        raise ValueError(f"it has no {key}")
    return value


def _verified_json(text: str, wanted: Mapping[str, Any]) -> str:
    """Return an edited text if it parses to a document, or else the document laid out anew."""
    try:
        is_right = json.dumps(json.loads(text)) == json.dumps(wanted)
    except ValueError:
        is_right = False
    return text if is_right else json.dumps(wanted, indent=2) + "\n"


LINE, TRAINER_STATE, DIGESTS = LineFile(), TrainerState(), DigestList()
