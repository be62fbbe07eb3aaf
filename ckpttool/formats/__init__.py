"""Formats: recognising a path by its content, and opening it with the format that recognises it.

``open_checkpoint`` makes a ``Probe``, which looks at a path once: its first bytes, or the names in a
directory. ``detect`` asks the formats for it, and ``opening`` opens it and judges what other loaders could
run in it. ``discovery`` finds checkpoints in a directory tree.

- ``TRAITS`` has a row for each format, with its readers, the kinds of content (zip, pickle, JSON) that each
  may have, and a record that its zips have. All readers that fit are asked, so their order decides nothing;
  the others are not imported. If two match, a declared specialisation wins; otherwise it is an error that
  names both, never a guess. Formats of other packages are asked if none matches.
- ``open()`` checks all structure: every extent is inside its file, shape times type is the number of
  bytes, offsets and strides stay inside the storage. After it, reading a tensor can't go out of bounds.
- The function that opens a file closes it, unless it passes it to a checkpoint: ``open_with`` does that for a
  probe, ``Opening`` for further files, whose findings it collects.
- All readings of a file count for its safety: ``readings`` judges a file at the places where other loaders
  look (first bytes, last bytes, doubling offsets), and the files of a directory that its format doesn't read.
- A directory is listed once, however many sets of files are in it.
- A tensor with parts in several files is assembled by ``content/boxes``: a reader gives the box of each part
  in the whole, or the order of the parts; overlaps and gaps are found there.
- A checkpoint is a mapping of tensors, so ``values()`` is the mapping's own; everything else is
  ``metadata``.

To add a format, write one module in its framework's folder, and name it in a row of ``TRAITS``. The code that
formats share is in ``content/``, which knows no framework: it turns the tree of a pickle into tensors by path
and plain data, with roles and ties. So a new pickle-based format needs only rules for its own nodes: a
``leaf``, which returns the tensors of a node, and a ``FrameworkNode``, which returns the node of
``Checkpoint.tree``.
"""

from __future__ import annotations

import os
import re
from functools import cache
from typing import NamedTuple, cast

from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.errors import AmbiguousFormat, DamagedCheckpoint, NotACheckpoint, NotDownloaded
from ckpttool.formats.foreign import recognise_foreign
from ckpttool.formats.interface import Format, Probe, SetFormat
from ckpttool.formats.opening import open_with
from ckpttool.formats.pointer_kind import CheckpointList
from ckpttool.formats.traits import TRAITS, class_at, traits_of
from ckpttool.storage import fs


class _Reader(NamedTuple):
    """A reader in ``TRAITS``.

    Attributes:
        class_path: ``module:Class``.
        kinds: The kinds of content that it may have; see ``Probe.kinds``.
        record: Name of a record that its zips have; None if there is none.
    """

    class_path: str
    kinds: frozenset[str]
    record: re.Pattern[str] | None

    def may_match(self, probe: Probe) -> bool:
        return not self.kinds.isdisjoint(probe.kinds) and (
            self.record is None or probe.may_have_record(self.record)
        )


_READERS = tuple(
    _Reader(
        class_path,
        frozenset(kinds.split()),
        re.compile(row.record, re.DOTALL) if row.record else None,
    )
    for row in TRAITS.values()
    for class_path, kinds in row.readers.items()
)

_FALLBACK = "step_directory:StepDirectory"
"""Format of a directory that no other recognises; it decides by the directory's name (``step_100``)."""

ENTRY_POINTS = "ckpttool.formats"
"""Group of the entry points of other packages' formats."""

PYTORCH_BIN = (
    "pytorch_model",
    "adapter_model",
    "diffusion_pytorch_model",
    "optimizer",
    "scheduler",
    "training_args",
    "model",
)
"""Beginnings of the names of PyTorch's ``.bin`` files; all kinds of data have that suffix."""

_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_HTML = (b"<!doctype html", b"<html")
_COMPRESSED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"\xfd7zX": "xz", b"BZh": "bzip2"}


@cache
def formats() -> tuple[Format, ...]:
    """Return the formats of this package."""
    return tuple(_load(reader.class_path) for reader in _READERS)


@cache
def set_formats() -> tuple[SetFormat, ...]:
    """Return the formats of this package whose checkpoints are several entries of a directory."""
    return tuple(cast(SetFormat, _load(reader.class_path)) for reader in _READERS if "set" in reader.kinds)


@cache
def third_party_formats() -> tuple[Format, ...]:
    """Return the formats of other installed packages."""
    from ckpttool.core.plugins import entry_points_of, instance_of

    return tuple(map(instance_of, entry_points_of(ENTRY_POINTS)))


@cache
def _load(class_path: str) -> Format:
    format: Format = class_at(class_path)()
    return format


@cache
def checkpoint_lists() -> tuple[CheckpointList, ...]:
    """Return the kinds of files in which frameworks list the checkpoints of a directory."""
    paths = (row.checkpoint_list for row in TRAITS.values() if row.checkpoint_list)
    return tuple(class_at(path)() for path in paths)


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
    """Return all formats that recognise a path, without those that others of them specialise."""
    # ``may_match`` reads the table alone, so that only readers of this kind of content are imported.
    candidates = (_load(reader.class_path) for reader in _READERS if reader.may_match(probe))
    matching = [format for format in candidates if format.matches(probe)]
    if not matching:
        matching = [format for format in third_party_formats() if format.matches(probe)]
    if not matching and probe.is_directory and (fallback := _load(_FALLBACK)).matches(probe):
        matching = [fallback]
    return [
        format
        for format in matching
        if not any(other is not format and isinstance(format, other.specialises) for other in matching)
    ]


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a checkpoint of any format; no value is read.

    Close the checkpoint, or use it as a context manager. A directory that holds nothing but one serial of
    Paddle Fluid is opened as this serial.

    Raises:
        NotACheckpoint: No format recognises it.
        DamagedCheckpoint: Its structure is wrong.
        CheckpointError: It can't be read.
    """
    return open_path(path)


def open_path(path: str | os.PathLike[str], *, allows_losses: bool = False) -> Checkpoint:
    """Open a checkpoint as ``open_checkpoint`` does; ``allows_losses`` is as in ``Probe``."""
    with fs.raising_failed_requests(os.path.dirname(os.fspath(path))):
        try:
            return open_with(path, recognise, allows_losses=allows_losses)
        except NotACheckpoint:
            from ckpttool.formats.paddle.fluid_serial import only_serial

            if (serial := only_serial(os.fspath(path))) is None:
                raise
            return open_with(serial, recognise, allows_losses=allows_losses)


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
    """Return the most specific error for a path that no format recognises."""
    # A file whose suffix means a format was probably one of it: it is damaged, and other loaders, which go by
    # the suffix, may still run it. Any other file is no checkpoint.
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
    """Return the format that the suffix of a file name means, or None."""
    lowered = name.lower()
    if lowered.endswith(".bin") and not lowered.startswith(PYTORCH_BIN):
        return None
    return next((format for format in formats() if lowered.endswith(format.suffixes)), None)


def _describe(probe: Probe) -> tuple[str, str | None]:
    """Return a description of unknown content, and a hint or None."""
    if probe.source.size == 0:
        return "the file is empty", None
    for magic, name in _COMPRESSED.items():
        if probe.head.startswith(magic):
            return f"it is compressed with {name}", "decompress it first"
    if probe.is_cut_zip:
        return "it is a ZIP archive that is cut off before its format can be recognised", None
    if probe.is_zip:
        return "it is a ZIP archive with other content", None
    if probe.head.lstrip()[:14].lower().startswith(_HTML):
        return "it is an HTML page", "download the file again; the server may want you to sign in"
    first_line = probe.head.split(b"\n")[0][:40].decode("utf-8", "replace").strip()
    if first_line.isprintable() and "\ufffd" not in first_line and b"\0" not in probe.head:
        return f"it looks like text that starts with {first_line!r}", None
    return f"its content is unknown, and starts with the bytes {probe.head[:8].hex(' ')}", None
