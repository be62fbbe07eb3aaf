"""Formats: a path is shown to each of them, and the one that recognises it opens it.

To add a format, write one module in its framework's folder, and a row of ``TRAITS`` that names it. What
formats share is in ``content/``, which knows no framework: a pickle's tree is taken apart once into tensors
by path and plain data, and tensors get their roles and ties there. So a new pickle-based format brings only
the rules for its own nodes: a ``leaf``, which says which tensors a node is, and a ``FrameworkNode``, which
says what it becomes in ``Checkpoint.tree``.

- The table has the kinds of first bytes of a format (zip, pickle, JSON), and a record that its zips have. All
  formats that fit are asked, so that their order decides nothing, and the others are not imported. If two
  match, a declared specialisation wins; otherwise it is an error that names both, never a guess.
- ``open()`` checks all structure: every extent is inside its file, shape times type is the number of
  bytes, offsets and strides stay inside the storage. After it, reading a tensor can't go out of bounds.
- Whoever opens a file closes it, unless a checkpoint takes it over: ``open_with`` does that for a probe,
  ``Opening`` for further files; it gathers what is found in them, too.
- All readings of a file count for its safety. ``readings`` knows where other loaders look (first bytes,
  last bytes, doubling offsets), ``readings`` also judges files of a directory that its format has no use for.
- A directory is listed once, however many sets of files are in it.
- A tensor of which several files have parts is put together by ``content/boxes``: a reader names the box of
  each part in the whole, or lets the parts follow each other; overlaps and gaps are found there.
- A checkpoint is a mapping of tensors, so ``values()`` is the mapping's own; what isn't a tensor is
  ``metadata``.
"""

from __future__ import annotations

import os
import re
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple, cast

from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.errors import AmbiguousFormat, DamagedCheckpoint, NotACheckpoint, NotDownloaded
from ckpttool.formats.foreign import recognise_foreign
from ckpttool.formats.interface import Format, Probe, SetFormat
from ckpttool.formats.opening import open_with
from ckpttool.formats.pointer_kind import CheckpointList
from ckpttool.formats.traits import TRAITS, traits_of
from ckpttool.storage import fs


class _Reader(NamedTuple):
    """Class that opens a format, the kinds of content that it may have, and a record that its zips have."""

    place: str
    kinds: frozenset[str]
    record: re.Pattern[str] | None

    def may_match(self, probe: Probe) -> bool:
        return not self.kinds.isdisjoint(probe.kinds) and (
            self.record is None or probe.may_have_record(self.record)
        )


_READERS = tuple(
    _Reader(
        f"ckpttool.formats.{place}",
        frozenset(kinds.split()),
        re.compile(row.record, re.DOTALL) if row.record else None,
    )
    for row in TRAITS.values()
    for place, kinds in row.readers.items()
)

_LAST = "ckpttool.formats.step_directory:StepDirectory"
"""What a directory is that no format knows, and that is called as one save is: whatever is in it."""

ENTRY_POINTS = "ckpttool.formats"

PYTORCH_BIN = (
    "pytorch_model",
    "adapter_model",
    "diffusion_pytorch_model",
    "optimizer",
    "scheduler",
    "training_args",
    "model",
)
"""What a ``.bin`` is called that PyTorch wrote; all kinds of data have that suffix."""

_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_HTML = (b"<!doctype html", b"<html")
_COMPRESSED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"\xfd7zX": "xz", b"BZh": "bzip2"}


@cache
def formats() -> tuple[Format, ...]:
    """Return the formats of this package."""
    return tuple(_load(reader.place) for reader in _READERS)


@cache
def set_formats() -> tuple[SetFormat, ...]:
    """Return the formats of this package whose checkpoints are several entries of a directory."""
    return tuple(cast(SetFormat, _load(reader.place)) for reader in _READERS if "set" in reader.kinds)


@cache
def third_party_formats() -> tuple[Format, ...]:
    """Return the formats of other installed packages."""
    from ckpttool.core.plugins import entry_points_of, instance_of

    return tuple(map(instance_of, entry_points_of(ENTRY_POINTS)))


@cache
def _load(place: str) -> Format:
    format: Format = _class_at(place)()
    return format


def _class_at(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)


@cache
def checkpoint_lists() -> tuple[CheckpointList, ...]:
    """Return the kinds of files in which frameworks list the checkpoints of a directory."""
    places = (row.checkpoint_list for row in TRAITS.values() if row.checkpoint_list)
    return tuple(_class_at(f"ckpttool.formats.{place}")() for place in places)


def list_kind(name: str) -> CheckpointList | None:
    """Return the kind of checkpoint list that a file name belongs to, or None."""
    return next((kind for kind in checkpoint_lists() if kind.matches(name)), None)


def detect(probe: Probe) -> Format | None:
    """Return the format that recognises a path, or None.

    Raises:
        AmbiguousFormat: Several do, and none of them specialises the others.
    """
    candidates = matching_formats(probe)
    if len(candidates) > 1:
        names = " and ".join(sorted({type(format).__name__ for format in candidates}))
        raise AmbiguousFormat(probe.path, f"{names} both recognise it")
    return candidates[0] if candidates else None


def matching_formats(probe: Probe) -> list[Format]:
    """Return all formats that recognise a path, but for those that others of them specialise."""
    candidates = (_load(reader.place) for reader in _READERS if reader.may_match(probe))
    matching = [format for format in candidates if format.matches(probe)]
    if not matching:
        matching = [format for format in third_party_formats() if format.matches(probe)]
    if not matching and probe.is_directory:
        matching = [format for format in (_load(_LAST),) if format.matches(probe)]
    return [
        format
        for format in matching
        if not any(other is not format and isinstance(format, other.specialises) for other in matching)
    ]


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a checkpoint of any format; no value is read.

    Close what it returns, or use it as a context manager. A directory that holds one serial of Paddle Fluid,
    and nothing else, represents it.

    Raises:
        NotACheckpoint: No format recognises it.
        DamagedCheckpoint: Its structure is wrong.
        CheckpointError: It can't be read.
    """
    with fs.answers_below(os.path.dirname(os.fspath(path))):
        try:
            return open_with(path, recognise)
        except NotACheckpoint:
            from ckpttool.formats.paddle.fluid_serial import only_serial

            if (serial := only_serial(os.fspath(path))) is None:
                raise
            return open_with(serial, recognise)


def recognise(probe: Probe) -> Format:
    """Return the format that recognises a path.

    Raises:
        NotACheckpoint, DamagedCheckpoint: None does.
        AmbiguousFormat: Several do.
    """
    try:
        format = detect(probe)
    except AmbiguousFormat as failure:
        from ckpttool.formats.readings import bystander_findings, readings_of

        if probe.is_directory:
            failure.safety = bystander_findings(probe.path)
        else:
            failure.safety = tuple(readings_of(probe.path, matching_formats(probe)))
        raise
    if format is None:
        raise recognition_error(probe)
    return format


def recognition_error(probe: Probe) -> NotACheckpoint | DamagedCheckpoint:
    """Return the error that says best why no format recognises a path."""
    foreign = recognise_foreign(probe)
    if probe.is_directory:
        message = foreign.description if foreign else "no checkpoint in this directory"
        return NotACheckpoint(probe.path, message)
    if probe.head.startswith(_LFS_POINTER):
        return NotDownloaded(probe.path, "a Git LFS pointer, not the file", expected="run 'git lfs pull'")
    named_format = suffix_format(probe.name)
    if foreign and named_format is None:
        return NotACheckpoint(probe.path, foreign.description)
    content, hint = (foreign.description, None) if foreign else _describe(probe)
    if named_format is None:
        return NotACheckpoint(probe.path, f"not a checkpoint: {content}", expected=hint)
    title = traits_of(named_format.name).title or named_format.name
    article = "an" if title.startswith("HDF5") else "a"
    found = f"{content}; expected {article} {title} checkpoint"
    failure = DamagedCheckpoint(probe.path, found, expected=hint, code="unrecognised-content")
    from ckpttool.formats.readings import further_readings

    failure.safety = tuple(further_readings(probe, None, damaged=True))
    return failure


def suffix_format(name: str) -> Format | None:
    """Return the format that usually has such a name, or None."""
    lowered = name.lower()
    if lowered.endswith(".bin") and not lowered.startswith(PYTORCH_BIN):
        return None
    return next((format for format in formats() if lowered.endswith(format.suffixes)), None)


def _describe(probe: Probe) -> tuple[str, str | None]:
    """Return what the content looks like, and what to do about it, if that is known."""
    if probe.source.size == 0:
        return "the file is empty", None
    for magic, name in _COMPRESSED.items():
        if probe.head.startswith(magic):
            return f"it is compressed with {name}", "decompress it first"
    if probe.is_cut_zip:
        return "it is a ZIP archive that is cut off before it tells its format", None
    if probe.is_zip:
        return "it is a ZIP archive of something else", None
    if probe.head.lstrip()[:14].lower().startswith(_HTML):
        return "it is an HTML page", "download the file again; the server may want you to sign in"
    first_line = probe.head.split(b"\n")[0][:40].decode("utf-8", "replace").strip()
    if first_line.isprintable() and "\ufffd" not in first_line and b"\0" not in probe.head:
        return f"it looks like text that starts with {first_line!r}", None
    return f"its content is unknown, and starts with the bytes {probe.head[:8].hex(' ')}", None
