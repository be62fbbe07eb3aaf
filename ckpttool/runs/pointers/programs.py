"""Kinds of pointers to checkpoints that programs write, one class each.

They are in state files, indexes, lists of digests, checkpoints and trackers, or are symlinks. The target of a
pointer isn't removed, and a rename rewrites the pointer.
"""

from __future__ import annotations

import base64
import json
import os
import re
from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from ckpttool.core.errors import AccessDenied, CheckpointError, NotFound, from_os_error
from ckpttool.core.naming import is_named_best
from ckpttool.formats import sharded
from ckpttool.formats.interface import MANIFEST_SUFFIXES, SetFormat
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
from ckpttool.ops.digests import sums_of_file
from ckpttool.ops.manifest import SHARED
from ckpttool.runs.entry import Entry
from ckpttool.runs.look import all_places, listed_by_indexes_above, resolved_links
from ckpttool.runs.pointers.search import (
    CheckpointIndex,
    OnError,
    Pointer,
    PointerProtections,
    Search,
    SearchedKind,
    exists,
    follow_pointer,
    ignore_error,
    is_internal,
    names_in,
    pointers_of,
    reporting,
)
from ckpttool.runs.reasons import Code, Reason, code_of
from ckpttool.runs.series import Group
from ckpttool.runs.trackers import TrackedModel, tracked_models
from ckpttool.storage import fs
from ckpttool.storage.fs import Snapshot
from ckpttool.transaction.paths import shown

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
    """Megatron's and verl's tracker file: the number of an iteration."""

    what = "Megatron's tracker"
    files = ("latest_checkpointed_iteration.txt",)
    limit = MAX_POINTER
    protects = True
    is_certain = False
    # Megatron's directory first. Both write the bare number, so the siblings decide which name is meant.
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
            raise ValueError("it can hold only the number of an iteration")
        return text


class TrainerState(TextKind):
    """``trainer_state.json`` of the Hugging Face Trainer, with the best checkpoint of the run."""

    what = "`trainer_state.json`"
    fallback = "the Trainer resumes without it"
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
        # The file has the log of the whole run. It is parsed only if its best checkpoint is renamed, or if
        # the pattern matches several times, as in a text that quotes the key.
        if TRAINER_BEST not in text:
            return text
        found = self._BEST.findall(text)
        if len(found) == 1 and new(json.loads(found[0][1], strict=False)) is None:
            return text
        document = _load_object(text)
        best = document.get(TRAINER_BEST)
        renamed = new(best) if isinstance(best, str) and best else None
        if renamed is None:
            return text
        edited = self._BEST.sub(lambda match: match[1] + json.dumps(renamed), text)
        return _verified_json(edited, {**document, TRAINER_BEST: renamed})


# Indexes and lists of digests -------------------------------------------------------------------------


class ShardIndex(TextKind):
    """Index of a sharded set of safetensors, PyTorch or Keras, with the names of its shards."""

    places = FilePlace.MEMBER
    _STRING = re.compile(r'("(?:[^"\\]|\\.)*")(\s*:)?', re.DOTALL)

    def matches(self, name: str) -> bool:
        return any(index.fullmatch(name) for index in (sharded.INDEX, keras_sharded.INDEX))

    def names(self, text: str) -> tuple[str, ...]:
        shards = _object_at(_load_object(text), "weight_map").values()
        each = (one for value in shards for one in (value if isinstance(value, list) else [value]))
        return tuple(dict.fromkeys(one for one in each if isinstance(one, str)))

    # Texts are edited in place, so that their layout is preserved, and the result is compared with the wanted
    # document. A string replaced elsewhere by accident makes a difference: the document is written anew then.
    def reworded(self, text: str, new: Renamer, changes: Changes = NO_CHANGES) -> str:
        document = _load_object(text)
        renamed = {key: _renamed(value, new) for key, value in _object_at(document, "weight_map").items()}

        def rename_value(match: re.Match[str]) -> str:
            is_key = match[2] is not None
            name = None if is_key else new(json.loads(match[1], strict=False))
            return match[0] if name is None else json.dumps(name)

        return _verified_json(self._STRING.sub(rename_value, text), {**document, "weight_map": renamed})


def _renamed(value: object, new: Renamer) -> object:
    """Return the new name of a tensor's shard, or of its shards, which Keras lists."""
    if isinstance(value, list):
        return [_renamed(shard, new) for shard in value]
    return (new(value) or value) if isinstance(value, str) else value


class DigestList(TextKind):
    """Lists of digests as ``sha256sum`` and similar programs write them, for a file or a whole directory.

    Only a digest that was right is updated; others, and those of other algorithms than SHA-256, are kept.
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
    # coreutils and BSD: ``<digest>  <name>`` (``*`` before the name for binary mode), or ``SHA256 (<name>) =
    # <digest>``. A backslash before the line marks a name in which ``\\``, newline and return are escaped.
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
        # A digest that was wrong before is kept: it shows that the file had been damaged.
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
    """Sidecar with digests of tensors, which has names and sizes of the checkpoint's files."""

    places = FilePlace.MEMBER
    has_digests = True
    _FILES = re.compile(r'^ "files": (\{.*\}),$', re.MULTILINE)

    def matches(self, name: str) -> bool:
        return name.endswith(MANIFEST_SUFFIXES[1])

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
    """Return an edited text if it parses to the wanted document, else the document as new text."""
    try:
        is_right = json.dumps(json.loads(text)) == json.dumps(wanted)
    except ValueError:
        is_right = False
    return text if is_right else json.dumps(wanted, indent=2) + "\n"


LINE, TRAINER_STATE, DIGESTS = LineFile(), TrainerState(), DigestList()


NAMED_BEST = Reason(Code.NAMED_BEST)


class BestInside(SearchedKind):
    """Best checkpoint recorded in the newest of a series: in a trainer's state, or in Lightning's pickle.

    Only the newest counts: the best of an older one may be removed since. A damaged one is skipped; one that
    can't be read may name any checkpoint.
    """

    what = "`best_model_checkpoint` and Lightning's `best_model_path`"
    where = "the newest checkpoint of a series"
    hint = "create a symlink of that name to the best checkpoint"
    depends_on_faults = True

    def find(self, search: Search, found: PointerProtections) -> None:
        # The newest checkpoint of a series is the one from which a run resumes, and its state names the best
        # one so far. If it is damaged, a run would resume from the one before it, so that one's state counts.
        # If it can't be read (permissions, a disk's error), its state may name any checkpoint of the series.
        for error in search.errors:
            if isinstance(error, AccessDenied):
                search.error_handler(found, partial(search.series.below, os.path.dirname(error.path)))(error)
        for group in search.groups:
            candidates = [group] if len(group.entries) > 1 else []
            unread = search.error_handler(found, partial(list, candidates))
            newest = self._newest(group, search, unread)
            for pointer in () if newest is None else self._pointers(newest, search.snapshot, unread):
                with reporting(unread):
                    follow_pointer(found, pointer, search.index, candidates)

    @staticmethod
    def _newest(group: Group, search: Search, on_error: OnError) -> Entry | None:
        for newest in reversed(group.entries):
            if newest.fault is not None and code_of(newest.fault) is Code.UNREADABLE:
                on_error(AccessDenied(newest.unit.path, newest.fault))
            if newest.is_sound and newest.path not in search.faults:
                return newest
        return None

    def _pointers(self, newest: Entry, snapshot: Snapshot, on_error: OnError) -> list[Pointer]:
        path = newest.unit.path
        pointers: list[Pointer] = []
        try:
            is_directory = any(os.sep in file.path for file in newest.contents.files)
            names = names_in(path, snapshot) if is_directory else {}
            pointers += (
                one._replace(holder=path) for one in pointers_of(TRAINER_STATE, path, names, snapshot)
            )
        except CheckpointError as error:
            on_error(error)
        return pointers + [Pointer(self, "best_model_path", path, best) for best in newest.best_paths]


class NamedBest(SearchedKind):
    """Name of a checkpoint that marks it as the best."""

    what = "names such as `best.pth`"
    where = "checkpoints"

    def find(self, search: Search, found: PointerProtections) -> None:
        for entry in search.entries:
            if is_named_best(entry.name):
                found.protect(entry, NAMED_BEST)


class NeededFiles(SearchedKind):
    """Files of a checkpoint that another one needs: those in its index, and targets of symlinks in it.

    A checkpoint with parts in other directories is protected, too: they couldn't be removed with it.
    """

    what = "indexes, and symlinks in checkpoints"
    where = "DIR, two directories above, all below"

    def find(self, search: Search, found: PointerProtections) -> None:
        # Parts in a directory below an index (``shards/model-1.bin``) are not removed with it. That is right
        # if several checkpoints share them; those of a single one would be left behind, so it is protected.
        index, entries, unread = search.index, search.entries, search.error_handler(found)
        deeper: dict[str, list[Entry]] = defaultdict(list)
        for entry in entries:
            with reporting(unread):
                for place in all_places(entry.needed_paths, search.snapshot):
                    other = index.enclosing(place)
                    if other is not None and other is not entry:
                        found.protect(other, _part_of(entry.name))
            for name in entry.unit.shared:
                if os.sep in name:
                    deeper[search.snapshot.realpath(os.path.join(entry.directory, name))].append(entry)
        for sharers in deeper.values():
            if len(sharers) == 1:
                found.protect(sharers[0], "has parts in other directories")
        with reporting(unread):
            for place, holder in listed_by_indexes_above(search.root, search.snapshot, unread).items():
                other = index.enclosing(place)
                if other is not None:
                    found.protect(other, _part_of(os.path.basename(holder)), holder)
        for entry in entries:
            # Without the index of a set of shards, each shard looks like a checkpoint of its own.
            is_index = isinstance(entry.unit.format, SetFormat) and entry.name.endswith(".json")
            if is_index and entry.fault is not None and code_of(entry.fault) is Code.UNREADABLE:
                error = AccessDenied(entry.unit.path, entry.fault)
                search.error_handler(found, partial(search.series.below, entry.directory))(error)


def _part_of(name: str) -> Reason:
    return Reason(Code.PART_OF, f"{Code.PART_OF.value} {name}")


class RegisteredModels(SearchedKind):
    """Models registered in trackers; asking is slow, so only ``prune`` and ``rename`` do."""

    what = "models registered in MLflow or Weights & Biases"
    where = "DIR, all directories above"

    def find(self, search: Search, found: PointerProtections) -> None:
        if not search.asks_trackers:
            return
        try:
            models = list(tracked_models(search.root))
        except CheckpointError as failure:
            for group in search.groups:
                found.leave_alone(group.key, f"can't list the registered models: {failure}")
            return
        if not models:
            return
        entries = search.entries
        real = {entry.path: search.snapshot.realpath(entry.unit.path) for entry in entries}
        for model in models:
            # A model that is found by its content may have another name in the tracker.
            reason = model.reason if model.file is not None else Reason(Code.REGISTERED, model.reason)
            for entry in _entries_of(model, entries, real, search.index):
                found.protect(entry, reason, model.holder)


def _entries_of(
    model: TrackedModel, entries: Sequence[Entry], real: dict[str, str], index: CheckpointIndex
) -> Iterator[Entry]:
    """Yield the checkpoints of a registered model: at its path, around it, in it, or of the same content."""
    if model.place:
        place = index.snapshot.realpath(model.place)
        if (around := index.enclosing(place)) is not None:
            yield around
        below = os.path.join(place, "")
        yield from (entry for entry in entries if real[entry.path].startswith(below))
    # The store may have been moved since: paths are then compared from the identity on, which they contain.
    if model.identity and model.identity in model.place:
        tail = _tail(model.place, model.identity)
        yield from (
            entry for entry in entries if _contains_other(_tail(real[entry.path], model.identity), tail)
        )
    if model.file is not None:
        yield from _of_same_content(model.file, entries)


def _tail(path: str, identity: str) -> str:
    """Return the part of a path after a name; empty if the path doesn't contain it."""
    _, mark, tail = path.partition(f"/{identity}")
    return f"{tail}/" if mark else ""


def _contains_other(one: str, other: str) -> bool:
    """Return whether one of two paths is within the other; both end with a slash, or are empty."""
    return bool(one and other) and (one.startswith(other) or other.startswith(one))


def _of_same_content(file: tuple[str, int, str], entries: Sequence[Entry]) -> Iterator[Entry]:
    """Yield the checkpoints with a file of this content."""
    # Hashing takes as long as reading a checkpoint, so a file that alone has the name and the size is taken
    # to be the model. If several have both, or none has the name, their digests decide; if none is equal, all
    # files of the name are protected.
    name, nbytes, digest = file
    same = [
        (entry, os.path.join(entry.directory, one.path))
        for entry in entries
        for one in entry.contents.files
        if one.size == nbytes
    ]
    named = [one for one in same if os.path.basename(one[1]) == name]
    if len(named) != 1:
        named = [one for one in named or same if _md5(one[1]) == digest] or named
    yield from (entry for entry, _ in named)


def _md5(path: str) -> str:
    """Return a file's MD5 in base64, as Weights & Biases records it; empty if the file is missing."""
    try:
        digest = sums_of_file(path, ("md5",)).digests["md5"]
    except NotFound:  # removed since the survey
        return ""
    return base64.b64encode(bytes.fromhex(digest)).decode()


class Symlink(TextKind, SearchedKind):
    """Symlink; its text is the target."""

    what = "symlinks"
    where = "DIR, the directory above, all below"
    places = FilePlace.NOWHERE

    def names(self, text: str) -> tuple[str, ...]:
        return (text,)

    def reworded(self, text: str, new: Renamer, changes: Changes = NO_CHANGES) -> str:
        return new(text) or text

    def find(self, search: Search, found: PointerProtections) -> None:
        if not fs.place_of(search.root).has_links:
            return
        unread = search.error_handler(found)
        near = names_in(search.above, search.snapshot, unread).values()
        beside = [entry.path for entry in near if entry.is_symlink()]
        for link in [*beside, *_links_below(search.root, search.snapshot, unread)]:
            with reporting(unread):
                _follow(link, search, found)


SYMLINK = Symlink()


def _follow(link: str, search: Search, found: PointerProtections) -> None:
    try:
        target = search.snapshot.readlink(link)
    except OSError as error:
        raise from_os_error(error, link) from error
    _, *places = resolved_links(link, search.snapshot)
    entries = [entry for place in places if (entry := search.index.enclosing(place)) is not None]
    for entry in entries:
        if not _is_part_of(link, entry, search.snapshot):
            found.protect(entry, f"symlink {os.path.basename(link)}", link)
    if not entries and not exists(link, search.snapshot):
        _follow_dangling(link, target, search, found)


def _follow_dangling(link: str, target: str, search: Search, found: PointerProtections) -> None:
    """Protect the checkpoint with the name of a dangling symlink's target, or leave alone its possible
    series.
    """
    directory, name = os.path.dirname(link), os.path.basename(target)
    namesake = search.index.by_name.get((directory, name))
    if namesake is not None:
        found.protect(namesake, f"symlink {os.path.basename(link)}", link)
        return
    for group in search.series.by_name(directory, name):
        found.leave_alone(group.key, f"{shown(link)}: symlink to {target}, which doesn't exist")


def _is_part_of(link: str, entry: Entry, snapshot: Snapshot) -> bool:
    """Return whether a symlink is itself a part of the checkpoint that it leads to."""
    directory = snapshot.realpath(os.path.dirname(link))
    members = [snapshot.realpath(os.path.join(entry.directory, name)) for name in entry.unit.members]
    return any(directory == path or directory.startswith(path + os.sep) for path in members)


def links_near(root: str, snapshot: Snapshot) -> dict[str, str]:
    """Return the targets of symlinks in a tree and in the directory above, by path."""
    above = os.path.dirname(snapshot.realpath(root))
    beside = (entry.path for entry in names_in(above, snapshot, ignore_error).values() if entry.is_symlink())
    links = {}
    for path in (*beside, *_links_below(root, snapshot, ignore_error)):
        try:
            links[path] = snapshot.readlink(path)
        except OSError:  # removed since it was listed
            continue
    return links


def _links_below(directory: str, snapshot: Snapshot, on_error: OnError) -> Iterator[str]:
    """Yield the symlinks in a tree; none is followed."""
    pending = [directory]
    while pending:
        below = []
        for name, entry in sorted(names_in(pending.pop(), snapshot, on_error).items()):
            if entry.is_symlink():
                yield entry.path
            elif entry.is_dir(follow_symlinks=False) and not is_internal(name):
                below.append(entry.path)
        pending += reversed(below)
