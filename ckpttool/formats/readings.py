"""What else a file could be read as than what its format reads, and what loading it like that could run.

Loaders look at different ends of a file: ``pickle`` at its first byte, ``zipfile`` at its last ones, HDF5 at
doubling offsets. One that several of them take is judged by all of them; honest files are taken by one.

Source: CPython ``Lib/{pickle,tarfile,zipfile}.py``; the HDF5 file format specification, superblock; PyTorch
``torch/serialization.py`` (``load``, ``_legacy_load``).
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterable, Iterator

from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.errors import DamagedCheckpoint, LimitExceeded, NotACheckpoint, Unsupported
from ckpttool.core.report import Finding, Severity, error, has_errors, warning
from ckpttool.formats.interface import Format, Probe, SetFormat
from ckpttool.storage import fs
from ckpttool.storage.source import Source

_PICKLED = frozenset({"PytorchLegacy", "PlainPickle", "PaddlePickle"})
"""The formats that read a file from its first byte as pickles, by the names of their classes."""
_UNDECLARED = frozenset({"trailing-bytes", "pickle-trailing", "tar-padding", "zip-gap"})
"""Errors which say that there are bytes that the format has no use for, and did not look at."""

_LOWEST_OPCODE = 0x28
_PUSHES = frozenset(b"(]})N\x88\x89\x8f")
_WITH_ARGUMENT = frozenset(b"BCFGIJKLMSTUVXc\x80\x82\x83\x84\x8a\x8b\x8c\x8d\x8e\x95\x96")
"""What a pickle may begin with: opcodes that find what they need on an empty stack."""

_HDF5 = b"\x89HDF\r\n\x1a\n"
_FIRST_USER_BLOCK = 512
_HDF5_SUFFIXES = (".h5", ".hdf5", ".he5")
_ZIP_ENTRY, _ZIP64_LOCATOR = b"PK\x01\x02", b"PK\x06\x07"
_ZIP_END, _ZIP_END_BYTES, _MOST_COMMENT = b"PK\x05\x06", 22, 0xFFFF
_NO_PICKLES = (b"PK", _HDF5)
"""First bytes at which every unpickler gives up at once, although opcodes stand there."""
_TAR_BLOCK, _TAR_CHECKSUM = 512, slice(148, 156)
_OCTAL = re.compile(rb" *[0-7]{1,7}[ \0]*")

_TORCH = frozenset({"pytorch", "torchscript", "torch-export"})
_HDF5_NAMES = frozenset({"hdf5", "keras-h5"})
CONTENTS = {
    ".pt": _TORCH,
    ".pth": _TORCH,
    ".bin": _TORCH,
    ".ckpt": _TORCH | _HDF5_NAMES | {"tensorflow"},
    ".pkl": _TORCH | {"pickle", "paddle"},
    ".pickle": _TORCH | {"pickle", "paddle"},
    ".pdparams": frozenset({"paddle", "pickle"}),
    ".pdopt": frozenset({"paddle", "pickle"}),
    ".safetensors": frozenset({"safetensors"}),
    ".npy": frozenset({"numpy"}),
    ".npz": frozenset({"numpy"}),
    ".h5": _HDF5_NAMES,
    ".hdf5": _HDF5_NAMES,
    ".he5": _HDF5_NAMES,
    ".keras": frozenset({"keras"}) | _HDF5_NAMES,
}
"""Formats that files of a suffix have, as frameworks write them: Keras 2 saves HDF5 under any name."""


def add_readings(checkpoint: Checkpoint, probe: Probe, format: Format) -> None:
    """Let a checkpoint in one file say what other readings of it could run, and whether its name lies."""
    checkpoint.judged |= {fs.abspath(probe.path)}
    findings = () if has_errors(checkpoint.safety) else checkpoint.findings
    further = tuple(further_readings(probe, format, findings))
    if further:
        checkpoint.safety = tuple(dict.fromkeys((*checkpoint.safety, *further)))
    suffix = os.path.splitext(probe.name)[1].lower()
    if checkpoint.format not in CONTENTS.get(suffix, (checkpoint.format,)):
        message = f"a {checkpoint.format} file, which no framework calls {suffix}"
        checkpoint.findings = (*checkpoint.findings, warning("suffix-mismatch", message))


def further_readings(
    probe: Probe, format: Format | None, findings: Iterable[Finding] = (), *, damaged: bool = False
) -> Iterator[Finding]:
    """Yield what reading a file in other ways than its format does could run.

    Args:
        probe: The file, open.
        format: What recognised it, if anything does.
        findings: What the format found wrong with it, if that may change the verdict.
        damaged: Whether it can't be opened, so that its format judged only a part of it, or nothing.
    """
    kind = type(format).__name__
    if probe.is_zip and damaged:
        from ckpttool.formats.zip_remains import judge_records

        yield from judge_records(probe.source)
    if kind not in _PICKLED and may_begin_pickle(probe.head):
        yield from _read_as_pickles(probe.source)
    if not probe.is_zip and (finding := _zip_at_end(probe.source)):
        yield finding
    if kind != "PytorchTar" and _begins_as_tar(probe.head):
        yield _several_formats("a tar", "the header at its begin")
    if "hdf5" not in probe.kinds and _holds_hdf5(probe):
        yield _several_formats("an HDF5 file", "the superblock behind a user block")
    for finding in findings:
        if finding.severity is Severity.ERROR and finding.code in _UNDECLARED:
            message = "bytes that nothing declares; what would read them is not known"
            yield warning("not-scanned", message, finding.where)


def readings_of(path: str, formats: Iterable[Format]) -> Iterator[Finding]:
    """Yield what could run of a file by itself, by each of the formats that recognise it."""
    for format in formats:
        with Probe(path) as probe:
            try:
                with format.open(probe) as checkpoint:
                    yield from checkpoint.safety
                    findings = checkpoint.findings
            except (DamagedCheckpoint, NotACheckpoint, Unsupported) as failure:
                yield from getattr(failure, "safety", ())
                message = f"read as {format.name}, it is damaged: {failure.reason}"
                yield warning("not-scanned", message, failure.where)
                findings, is_damaged = (), True
            else:
                is_damaged = False
        if not isinstance(format, SetFormat):
            with Probe(path) as probe:
                yield from further_readings(probe, format, findings, damaged=is_damaged)


def _several_formats(other: str, by: str) -> Finding:
    message = f"it can be read as {other} as well, by {by}: what is loaded depends on the loader"
    return error("several-formats", message)


# A pickle in front --------------------------------------------------------------------------------


def may_begin_pickle(head: bytes) -> bool:
    """Tell whether an unpickler would get beyond the first opcode."""
    if len(head) < 2 or head.startswith(_NO_PICKLES):
        return False
    return head[0] in _WITH_ARGUMENT or (head[0] in _PUSHES and head[1] >= _LOWEST_OPCODE)


def _read_as_pickles(source: Source) -> Iterator[Finding]:
    """Yield what unpickling from the first byte could run; of no pickle, what it would have done before."""
    from ckpttool.containers.pickle.pickle_safety import read_pickles

    where = "read as a pickle"
    try:
        yield from read_pickles(source, 0, source.size, where).safety
    except LimitExceeded as failure:
        yield from failure.safety
        yield warning("not-scanned", failure.reason, where)
    except DamagedCheckpoint as failure:
        yield from (finding for finding in failure.safety if finding.severity is Severity.ERROR)


# Other containers ---------------------------------------------------------------------------------


def _zip_at_end(source: Source) -> Finding | None:
    """Return an error for a file that ends as a zip does, a warning for one that holds such an end.

    All readers take the last end record that they find, and pass over what follows it; bytes in a pickle may
    be a whole zip, honestly.
    """
    length = min(source.size, _ZIP_END_BYTES + _MOST_COMMENT)
    tail = source.read(source.size - length, length)
    start = tail.rfind(_ZIP_END, 0, max(0, length - _ZIP_END_BYTES + len(_ZIP_END)))
    while start >= 0:
        nbytes, offset, comment = struct.unpack_from("<2IH", tail, start + 12)
        end = source.size - length + start
        begins = (end - nbytes, offset)  # counted backwards by Python, forwards by PyTorch
        is_zip64 = start >= 20 and tail[start - 20 : start - 16] == _ZIP64_LOCATOR
        has_directory = nbytes and any(
            0 <= begin <= end - 4 and source.read(begin, 4) == _ZIP_ENTRY for begin in begins
        )
        if is_zip64 or has_directory:
            is_last = end + _ZIP_END_BYTES + comment == source.size
            finding = _several_formats("a zip", "the directory at its end")
            return finding if is_last else finding._replace(severity=Severity.WARNING)
        start = tail.rfind(_ZIP_END, 0, start)
    return None


def _begins_as_tar(head: bytes) -> bool:
    """Tell whether a file begins with a tar's header: one whose checksum is right is all ``tarfile`` asks."""
    block = head[:_TAR_BLOCK]
    field = block[_TAR_CHECKSUM]
    if len(block) < _TAR_BLOCK or _OCTAL.fullmatch(field) is None:
        return False
    total = sum(block) - sum(field) + 8 * ord(" ")
    return int(field.strip(b" \0"), 8) == total


def _holds_hdf5(probe: Probe) -> bool:
    """Tell whether HDF5's library, which the name asks for, would find its signature behind a user block."""
    offset, source = _FIRST_USER_BLOCK, probe.source
    while probe.name.lower().endswith(_HDF5_SUFFIXES) and offset + len(_HDF5) <= source.size:
        if source.read(offset, len(_HDF5)) == _HDF5:
            return True
        offset *= 2
    return False
