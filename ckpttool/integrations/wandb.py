"""Weights & Biases: its runs on this machine, artifacts that have an alias, and records of checkpoints.

A ``.wandb`` file has seven bytes of its own, then records as LevelDB's log has them: blocks of 32 KiB, in
which each piece of a record has a CRC-32, a length of two bytes, and a kind. A record is a protocol buffer.

Source: wandb/wandb ``core/internal/leveldb``, ``wandb/proto/wandb_internal.proto``.
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, BinaryIO
from urllib.parse import unquote, urlsplit

from ckpttool.containers.jsontext import parse_json
from ckpttool.containers.protobuf import FIXED64, Field, fields
from ckpttool.core.errors import DamagedCheckpoint, LimitExceeded, NotFound, from_os_error
from ckpttool.integrations.clients import client_errors_as_unsupported, client_module
from ckpttool.runs.logs import Log, add_object
from ckpttool.runs.run_directories import flatten
from ckpttool.runs.trackers import (
    LoggedCheckpoint,
    Record,
    TrackedModel,
    TrackedRun,
    Tracker,
    run_to_record_in,
)
from ckpttool.storage import fs

PREFIX = "wandb:"
DIRECTORY = "wandb"

_MAGIC = b":W&B\xe1\xbe\x00"
_BLOCK, _HEAD = 1 << 15, struct.Struct("<IHB")
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
_MAX_RECORD = 1 << 26
_RUN_DIRECTORY = re.compile(r"(?:offline-)?run-\d{8}_\d{6}-(?P<id>.+)")

_HISTORY, _CONFIG, _ARTIFACT, _RUN = 2, 5, 8, 17
"""Kinds of records, by their field in ``Record``."""

_SUFFIX, _LATEST = ".wandb", "latest"
_INCOMPLETE = "it ends within a record (perhaps still being written)"
_KEY = "ckpttool"
"""Key of the records of checkpoints in a run's configuration, and the project of runs that have none."""


class WandB(Tracker):
    """Weights & Biases as a tracker: ``wandb:DIR``.

    A checkpoint is recorded in the configuration of its run, by an offline run that continues it.
    """

    one_run = "wandb:DIR can be the directory of one"
    target = "wandb:DIR"
    is_directory = True

    def runs(self, name: str, places: Sequence[str]) -> list[TrackedRun]:
        return find_runs(name or os.curdir)

    def models(self, places: Sequence[str]) -> Iterator[TrackedModel]:
        for place in places:
            folder = os.path.join(place, DIRECTORY)
            if fs.exists(folder) and fs.isdir(folder):
                yield from models_in(folder)

    @contextmanager
    def recorder(self, name: str, places: Sequence[str]) -> Iterator[Record]:
        to = f"{PREFIX}{name}"
        try:
            runs = find_runs(name)
        except NotFound:
            runs = []
        # A continued run has a file per session, of which the first has most of its data.
        by_id: dict[str, TrackedRun] = {run.id: run for run in reversed(runs)}
        recorded: dict[str, dict[str, str]] = {}
        prefix = f"{_KEY}."
        for run in runs:
            own_keys = (name for name in run.parameters if name.startswith(prefix))
            texts = {name.removeprefix(prefix): str(run.parameters[name]) for name in own_keys}
            recorded.setdefault(run.id, {}).update(texts)
        new: dict[str, tuple[LoggedCheckpoint, dict[str, str]]] = {}

        def record(one: LoggedCheckpoint) -> bool:
            own = f"{_KEY}-{hashlib.sha256(os.fsencode(fs.realpath(one.run))).hexdigest()[:8]}"
            owner = by_id.get(own) or run_to_record_in(list(by_id.values()), one, to)
            identity = own if owner is None else owner.id
            text = one.text
            if recorded.get(identity, {}).get(one.name) == text:
                return False
            new.setdefault(identity, (one, {}))[1][one.name] = text
            return True

        yield record
        for identity, (one, texts) in new.items():
            _write_run(_directory_above(name), identity, by_id.get(identity), one.run_name, texts)


def _write_run(
    directory: str, identity: str, known: TrackedRun | None, name: str, texts: Mapping[str, str]
) -> None:
    # Offline by default: recording a checkpoint must not upload anything unless the user asks for it. An
    # offline run can't be resumed; its identifier makes it a continuation when it is synchronised.
    tracker = f"{PREFIX}{directory}"
    client = client_module("wandb", tracker)
    mode = os.environ.get("WANDB_MODE", "offline")
    fs.makedirs(directory)
    with client_errors_as_unsupported(tracker):
        run = client.init(
            mode=mode,
            dir=directory,
            id=identity,
            name=name if known is None else known.name,
            project=(known.project if known is not None else "") or _KEY,
            resume=None if mode == "offline" else "allow",
            settings=client.Settings(
                silent=True, disable_git=True, disable_code=True, console="off", x_disable_stats=True
            ),
        )
        run.config.update({_KEY: dict(texts)}, allow_val_change=True)
        run.finish()
        client.teardown()  # waits until everything is written


def _directory_above(directory: str) -> str:
    """Return the directory in which the client puts ``wandb``, for one that ``find_runs`` takes."""
    real = fs.realpath(directory)
    if _RUN_DIRECTORY.fullmatch(os.path.basename(real)):
        real = os.path.dirname(real)
    return os.path.dirname(real) if os.path.basename(real) == DIRECTORY else directory


# Runs and artifacts ---------------------------------------------------------------------------------


def find_runs(directory: str) -> list[TrackedRun]:
    """Return the runs in a directory: a run's own, ``wandb``, or the one above that.

    Raises:
        NotFound: There is none.
    """
    files = list(_run_files(directory)) or list(_run_files(os.path.join(directory, DIRECTORY)))
    if not files:
        expected = "a directory with offline-run-… or run-…"
        raise NotFound(f"{PREFIX}{directory}", f"no Weights & Biases run found ({expected})")
    return [_run(path) for path in files]


def models_in(directory: str) -> Iterator[TrackedModel]:
    """Yield the artifacts that have an alias now."""
    # An alias belongs to one version of an artifact, the one that was logged with it last.
    having: dict[tuple[str, str], tuple[list[TrackedModel], str]] = {}
    for path in _run_files(directory):
        with _open(path) as file:
            for number, data in _records(file, path, []):
                if number == _ARTIFACT:
                    name, aliases, models = _artifact(data, path)
                    having |= {(name, alias): (models, path) for alias in aliases}
    for models, _ in having.values():
        yield from models


def _run_files(directory: str) -> Iterator[str]:
    """Yield the ``.wandb`` files of runs, the oldest first."""
    folders = [directory]
    if not _RUN_DIRECTORY.fullmatch(os.path.basename(fs.realpath(directory))):
        names = sorted(_names(directory), key=lambda name: name.removeprefix("offline-"))
        folders = [os.path.join(directory, name) for name in names if _RUN_DIRECTORY.fullmatch(name)]
    for folder in folders:
        yield from (os.path.join(folder, one) for one in sorted(_names(folder)) if one.endswith(_SUFFIX))


def _names(directory: str) -> list[str]:
    try:
        return fs.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise from_os_error(error, directory) from error


def _open(path: str) -> BinaryIO:
    try:
        return fs.open_regular(path, _BLOCK)
    except OSError as error:
        raise from_os_error(error, path) from error


def _run(path: str) -> TrackedRun:
    """Return a run, with the configuration from its file."""
    folder = os.path.dirname(path)
    match = _RUN_DIRECTORY.fullmatch(os.path.basename(fs.realpath(folder)))
    identity = match["id"] if match else os.path.basename(folder)
    name, project, config = "", "", dict[str, Any]()
    with _open(path) as file:
        for number, data in _records(file, path, []):
            if number == _RUN:
                for field in fields(data, path):
                    if field.number == 8:
                        name = field.text or name
                    elif field.number == 3:
                        project = field.text
                    elif field.number == 4:
                        config |= _items(field.data, path)
            elif number == _CONFIG:
                config |= _items(data, path)
    config = {key: value for key, value in config.items() if not key.startswith("_")}
    label = f"{PREFIX}{name or identity}"
    return TrackedRun(
        label,
        identity,
        name or identity,
        folder,
        dict(flatten(config)),
        lambda log: _read_history(path, log),
        project,
    )


def _read_history(path: str, log: Log) -> None:
    with _open(path) as file:
        for number, data in _records(file, path, log.warnings):
            if number != _HISTORY:
                continue
            values: dict[str, Any] = {}
            for field in fields(data, path):
                if field.number == 1:
                    values |= _item(field, path)
                elif field.number == 2:
                    values["_step"] = next((one.signed for one in fields(field.data, path)), 0)
            add_object(log, dict(flatten(values)))


def _items(data: memoryview, path: str) -> dict[str, Any]:
    """Return the items of a record of configuration."""
    items: dict[str, Any] = {}
    for field in fields(data, path):
        if field.number == 1:
            items |= _item(field, path)
    return items


def _item(item: Field, path: str) -> dict[str, Any]:
    """Return the name and the value of an item: JSON, or one of the types that newer versions write."""
    names: list[str] = []
    name, value = "", None
    for field in fields(item.data, path):
        if field.number == 1:
            name = field.text
        elif field.number == 2:
            names.append(field.text)
        elif field.number in (8, 16):
            value = parse_json(path, bytes(field.data), "an item", constants=True, surrogates=True)
        elif field.number == 4:
            value = bool(field.integer)
        elif field.number == 5:
            value = field.signed
        elif field.number == 6 and field.kind == FIXED64:
            (value,) = struct.unpack("<d", struct.pack("<Q", field.integer))
        elif field.number == 7:
            value = field.text
    return {name or ".".join(names): value}


def _artifact(data: memoryview, path: str) -> tuple[str, list[str], list[TrackedModel]]:
    """Return an artifact's name, its aliases, and its files."""
    name, aliases, contents = "", list[str](), list[memoryview]()
    for field in fields(data, path):
        if field.number == 5:
            name = field.text
        elif field.number == 11:
            aliases.append(field.text)
        elif field.number == 12:
            contents += [one.data for one in fields(field.data, path) if one.number == 4]
    named = [alias for alias in aliases if alias != _LATEST] or aliases
    reason = f"{name}:{', '.join(named)} in Weights & Biases"
    return name, aliases, [_artifact_file(entry, path, reason) for entry in contents]


def _artifact_file(entry: memoryview, path: str, reason: str) -> TrackedModel:
    texts, size = dict[int, str](), 0
    for field in fields(entry, path):
        if field.number == 4:
            size = field.integer
        elif field.number in (1, 2, 3, 6):
            texts[field.number] = field.text
    reference = texts.get(3, "")
    place = unquote(urlsplit(reference).path) if reference.startswith("file:") else reference
    known = (os.path.basename(texts.get(1, "")), size, texts.get(2, ""))
    return TrackedModel(reason, path, place or texts.get(6, ""), file=None if reference else known)


# The file -------------------------------------------------------------------------------------------


def _records(file: BinaryIO, path: str, warnings: list[str]) -> Iterator[tuple[int, memoryview]]:
    """Yield records: the field of ``Record``, and its content. An end within a record is a warning."""
    # A record is one piece (full), or a first, middle ones and a last, as pieces don't cross blocks. A run
    # that is still going on may end in the middle of one.
    magic = file.read(len(_MAGIC))
    if magic != _MAGIC and _MAGIC.startswith(magic):  # a run has just begun
        warnings.append(f"{path}: {_INCOMPLETE}")
        return
    if magic != _MAGIC:
        raise DamagedCheckpoint(path, "invalid .wandb header", where="byte 0")
    parts: list[bytes] = []
    for kind, data, offset in _pieces(file, path, warnings):
        if kind in (_FULL, _FIRST):
            parts = []
        parts.append(data)
        if sum(map(len, parts)) > _MAX_RECORD:
            raise LimitExceeded(
                path,
                "record too large",
                expected=f"at most {_MAX_RECORD:,} bytes",
                where=f"byte {offset:,}",
            )
        if kind in (_FULL, _LAST):
            for field in fields(b"".join(parts), path, f"byte {offset:,}"):
                if field.number in (_HISTORY, _CONFIG, _ARTIFACT, _RUN):
                    yield field.number, field.data


def _pieces(file: BinaryIO, path: str, warnings: list[str]) -> Iterator[tuple[int, bytes, int]]:
    # Blocks are counted from the start of the file, magic number included. If a header doesn't fit into the
    # rest of a block, the rest is padding. The checksum covers the kind and the data.
    offset = len(_MAGIC)
    while True:
        left = _BLOCK - offset % _BLOCK
        if left < _HEAD.size:
            file.read(left)
            offset += left
        head = file.read(_HEAD.size)
        if not head:
            return
        checksum, nbytes, kind = _HEAD.unpack(head) if len(head) == _HEAD.size else (0, 1, _FULL)
        data = file.read(nbytes)
        if len(head) < _HEAD.size or len(data) < nbytes:
            warnings.append(f"{path}: {_INCOMPLETE}")
            return
        if (
            kind not in (_FULL, _FIRST, _MIDDLE, _LAST)
            or zlib.crc32(data, zlib.crc32(bytes([kind]))) != checksum
        ):
            raise DamagedCheckpoint(path, "a record doesn't match its checksum", where=f"byte {offset:,}")
        yield kind, data, offset
        offset += _HEAD.size + nbytes
