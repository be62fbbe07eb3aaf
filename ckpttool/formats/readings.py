"""Judges the code that other ways of loading a checkpoint's files could run.

Loaders look at different ends of a file: ``pickle`` at its first byte, ``zipfile`` at its last ones, HDF5 at
doubling offsets. A file that several loaders accept is judged as each of their formats; honest files are
accepted by one.

The format of a directory may be decided by one file, and must not hide what the others could run:
``optimizer.pt`` next to a set of shards, a pickle among the assets of a SavedModel. Every other file that
begins like a checkpoint, or has the name of one, is judged by its own formats. The records of a zip that
can't be opened are searched for by their local headers, since other readers may accept them.

Source: CPython ``Lib/{pickle,tarfile,zipfile}.py``; the HDF5 file format specification, superblock; PyTorch
``torch/serialization.py`` (``load``, ``_legacy_load``); PKWARE APPNOTE 6.3.
"""

from __future__ import annotations

import os
import re
import struct
import zlib
from collections.abc import Iterable, Iterator

from ckpttool.containers.npy import MAGIC as NPY_MAGIC
from ckpttool.containers.pickle.pickle_detection import has_torch_magic, is_pickle
from ckpttool.containers.zip_reader import LOCAL_MAGIC
from ckpttool.core.checkpoint import Checkpoint, add_safety, judged_files
from ckpttool.core.errors import (
    CheckpointError,
    DamagedCheckpoint,
    LimitExceeded,
    NotACheckpoint,
    NotFound,
    Unsupported,
)
from ckpttool.core.readable import Buffer, Readable
from ckpttool.core.report import Finding, Severity, error, has_errors, not_scanned, warning
from ckpttool.formats.interface import Format, Probe, SetFormat, scan
from ckpttool.storage import fs
from ckpttool.storage.source import Source

_PICKLED = frozenset({"PytorchLegacy", "PlainPickle", "PaddlePickle"})
"""Formats that read a file from its first byte as pickles, by the names of their classes."""
_UNDECLARED = frozenset({"trailing-bytes", "pickle-trailing", "tar-padding", "zip-gap"})
"""Codes of errors for bytes that the format doesn't declare, and that were not judged."""

_LOWEST_OPCODE = 0x28
_PUSHES = frozenset(b"(]})N\x88\x89\x8f")
_WITH_ARGUMENT = frozenset(b"BCFGIJKLMSTUVXc\x80\x82\x83\x84\x8a\x8b\x8c\x8d\x8e\x95\x96")
"""First bytes of a pickle: opcodes that need nothing on the stack, without and with an argument."""

_HDF5 = b"\x89HDF\r\n\x1a\n"
_FIRST_USER_BLOCK = 512
_HDF5_SUFFIXES = (".h5", ".hdf5", ".he5")
_ZIP_ENTRY, _ZIP64_LOCATOR = b"PK\x01\x02", b"PK\x06\x07"
_ZIP_END, _ZIP_END_BYTES, _MOST_COMMENT = b"PK\x05\x06", 22, 0xFFFF
_NO_PICKLES = (b"PK", _HDF5)
"""First bytes at which every unpickler gives up at once, although they are opcodes."""
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
"""Formats by suffix, as frameworks write them: Keras 2 saves HDF5 under any name."""


def add_readings(checkpoint: Checkpoint, probe: Probe, format: Format) -> None:
    """Add findings of other readings of a file to its checkpoint, and one for a misleading suffix."""
    findings = () if has_errors(checkpoint.safety) else checkpoint.findings
    add_safety(checkpoint, [fs.abspath(probe.path)], further_readings(probe, format, findings))
    suffix = os.path.splitext(probe.name)[1].lower()
    if checkpoint.format not in CONTENTS.get(suffix, (checkpoint.format,)):
        message = f"a {checkpoint.format} file, which no framework calls {suffix}"
        checkpoint.findings = (*checkpoint.findings, warning("suffix-mismatch", message))


def further_readings(
    probe: Probe, format: Format | None, findings: Iterable[Finding] = (), *, damaged: bool = False
) -> Iterator[Finding]:
    """Yield findings for code that loaders of other formats could run in a file.

    Args:
        probe: The file, open.
        format: The format that recognised it, if any.
        findings: The format's findings, if they may change the verdict.
        damaged: Whether it can't be opened, so that its format judged only a part of it, or nothing.
    """
    kind = type(format).__name__
    if probe.is_zip and damaged:
        yield from judge_records(probe.source)
    if kind not in _PICKLED and may_begin_pickle(probe.head):
        yield from _read_as_pickles(probe.source)
    if not probe.is_zip and (finding := _zip_at_end(probe.source)):
        yield finding
    if kind != "PytorchTar" and _begins_as_tar(probe.head):
        yield _several_formats("a tar", "the header at its start")
    if "hdf5" not in probe.kinds and _holds_hdf5(probe):
        yield _several_formats("an HDF5 file", "the superblock after a user block")
    for finding in findings:
        if finding.severity is Severity.ERROR and finding.code in _UNDECLARED:
            message = "undeclared bytes; what would read them is unknown"
            yield not_scanned(finding.where, message)


def readings_of(path: str, formats: Iterable[Format]) -> Iterator[Finding]:
    """Yield safety findings of a file by each of the formats that recognise it."""
    for format in formats:
        with Probe(path) as probe:
            try:
                with format.open(probe) as checkpoint:
                    yield from checkpoint.safety
                    findings = checkpoint.findings
            except (DamagedCheckpoint, NotACheckpoint, Unsupported) as failure:
                yield from getattr(failure, "safety", ())
                message = f"read as {format.name}, it is damaged: {failure.reason}"
                yield not_scanned(failure.where, message)
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
    """Return whether an unpickler would get beyond the first opcode."""
    # This is a weak test on purpose: a pickle without a PROTO opcode may begin with any opcode that needs
    # nothing on the stack. One without an argument must be followed by another opcode.
    if len(head) < 2 or head.startswith(_NO_PICKLES):
        return False
    return head[0] in _WITH_ARGUMENT or (head[0] in _PUSHES and head[1] >= _LOWEST_OPCODE)


def _read_as_pickles(source: Source) -> Iterator[Finding]:
    """Yield safety findings of unpickling from the first byte, also of bytes that are no whole pickle."""
    # An unpickler runs the opcodes before a break, so their errors count. Warnings about random bytes don't.
    from ckpttool.containers.pickle.pickle_safety import read_pickles

    where = "read as a pickle"
    try:
        yield from read_pickles(source, 0, source.size, where).safety
    except LimitExceeded as failure:
        yield from failure.safety
        yield not_scanned(where, failure.reason)
    except DamagedCheckpoint as failure:
        yield from (finding for finding in failure.safety if finding.severity is Severity.ERROR)


# Other containers ---------------------------------------------------------------------------------


def _zip_at_end(source: Source) -> Finding | None:
    """Return an error for a file that ends like a zip, or a warning for one that has such an end inside."""
    # The end record is 22 bytes and a comment of up to 64 KiB. All readers search for it backwards, and skip
    # the bytes after it. An honest pickle may contain a whole zip as bytes, so an end that is not exactly the
    # file's is a warning. One without a central directory in its place is no zip for any reader.
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
    """Return whether a file begins with a tar header whose checksum is right; ``tarfile`` checks no more."""
    # The checksum is the sum of the header's bytes, with its own field as eight spaces.
    block = head[:_TAR_BLOCK]
    field = block[_TAR_CHECKSUM]
    if len(block) < _TAR_BLOCK or _OCTAL.fullmatch(field) is None:
        return False
    total = sum(block) - sum(field) + 8 * ord(" ")
    return int(field.strip(b" \0"), 8) == total


def _holds_hdf5(probe: Probe) -> bool:
    """Return whether libhdf5 would open a file of this name, whose signature follows a user block."""
    # The library looks at 0, 512, 1024 … It is only used if the suffix asks for it.
    offset, source = _FIRST_USER_BLOCK, probe.source
    while probe.name.lower().endswith(_HDF5_SUFFIXES) and offset + len(_HDF5) <= source.size:
        if source.read(offset, len(_HDF5)) == _HDF5:
            return True
        offset *= 2
    return False


MAX_SEARCHED = 1 << 26
"""Maximum number of bytes of a file that are searched for records, and of those inflated in total."""
MAX_RECORDS = 10_000
"""Maximum number of records of a damaged zip that are judged."""
_LOCAL = struct.Struct("<4s5H3I2H")
_STORED, _DEFLATED = 0, 8
_CONFIG = "config.json"


def judge_records(source: Readable) -> Iterator[Finding]:
    """Yield safety findings of all records of a damaged zip."""
    # The directory of a damaged zip can't be trusted, so records are found by the signature of their local
    # headers. Values may contain it by chance: then bytes that are no record are judged, too.
    bytes_left = MAX_SEARCHED
    data = source.read(0, min(source.size, MAX_SEARCHED))
    start = data.find(LOCAL_MAGIC)
    for _ in range(MAX_RECORDS):
        if start < 0 or bytes_left <= 0:
            break
        following = data.find(LOCAL_MAGIC, start + 1)
        name, content = _record(data, start, following if following >= 0 else len(data), bytes_left)
        bytes_left -= len(content)
        yield from judge_record(name, content)
        start = following
    if start >= 0 or source.size > MAX_SEARCHED:
        yield not_scanned(None, "more records than are searched in a damaged zip")


def _record(data: bytes, start: int, end: int, limit: int) -> tuple[str, bytes]:
    """Return the name and the content of the record at an offset, up to the next one at ``end``."""
    # APPNOTE 4.3.7. A record that was written as a stream has the size 0 in its local header: then the
    # content is taken up to the next record.
    if len(data) < start + _LOCAL.size:
        return "", b""
    _, _, _, method, _, _, _, nbytes, _, name_length, extra_length = _LOCAL.unpack_from(data, start)
    start += _LOCAL.size
    name = data[start : start + name_length].decode("utf-8", "replace")
    start += name_length + extra_length
    if method == _DEFLATED:
        try:
            return name, zlib.decompressobj(-zlib.MAX_WBITS).decompress(data[start:end], limit)
        except zlib.error:
            return name, b""
    return name, data[start : start + nbytes if 0 < nbytes <= end - start else end]


def judge_record(name: str, content: bytes) -> Iterator[Finding]:
    """Yield safety findings of a record: a pickle, an array of objects, a configuration of Keras."""
    source = Buffer(name, content)
    try:
        if is_pickle(source, 0, source.size):
            from ckpttool.containers.pickle.pickle_safety import read_pickles

            yield from read_pickles(source, 0, source.size, name).safety
        elif content.startswith(NPY_MAGIC):
            from ckpttool.formats.arrays.files import safety_of_array

            yield from safety_of_array(source, name)
        elif name.rpartition("/")[2] == _CONFIG:
            from ckpttool.formats.keras.config import judge, read_config

            yield from judge(read_config(name, content), name, len(content))
    except CheckpointError as failure:
        yield from getattr(failure, "safety", ())  # other findings say that the zip is damaged


MAX_FILES = 20_000
"""Maximum number of files in a directory and its subdirectories that are looked at."""
MAX_JUDGED = 2_000
"""Maximum number of them that are judged: each may take as long as a checkpoint."""

_HEAD_BYTES = 512
_NEVER_ENTERED = frozenset({".git"})
_CONTAINERS = (b"PK\x03\x04", b"\x89HDF\r\n\x1a\n", b"\x93NUMPY")
_TAR_MAGIC, _TAR_MAGIC_AT = b"ustar", 257
_SUFFIXES = (
    *(suffix for suffix in CONTENTS if suffix != ".bin"),
    *(".pth.tar", ".pt2", ".ptl", ".jit", ".torchscript", ".joblib", ".dill"),
)
_PROGRAMS = frozenset({"saved_model.pb", "saved_model.pbtxt", "saved_model.cpb", "__model__"})
_PROGRAM_SUFFIX, _PIR = ".pdmodel", b'"base_code"'


def add_bystanders(checkpoint: Checkpoint, root: str) -> None:
    """Add safety findings of the other files in the directory ``root`` to its checkpoint."""
    own = frozenset(fs.abspath(file.path) for file in checkpoint.files)
    bystanders = _Bystanders(root, judged_files(checkpoint), own)
    findings = [*bystanders.findings()]
    add_safety(checkpoint, bystanders.judged, findings)


def bystander_findings(root: str) -> tuple[Finding, ...]:
    """Return safety findings of all files in a directory that can't be opened as a whole."""
    return tuple(_Bystanders(root, frozenset(), frozenset()).findings())


class _Bystanders:
    """The files in a directory, without those that were judged already.

    Attributes:
        judged: Absolute paths of the files that were judged.
    """

    def __init__(self, root: str, known: frozenset[str], own: frozenset[str]) -> None:
        self.judged: set[str] = set()
        self._root, self._known, self._own = root, known, own
        # A link may lead to a file in the directory, or to one next to the targets of the files that were
        # read: in the cache of the Hugging Face hub, a snapshot has links to a directory of blobs.
        read = known | {path for path in own if os.path.basename(path) in _PROGRAMS}
        blobs = {os.path.dirname(fs.realpath(path)) for path in read if fs.islink(path)}
        bases = (fs.realpath(root), *sorted(blobs))
        self._bases = tuple(path.rstrip(os.sep) + os.sep for path in bases)

    def findings(self) -> Iterator[Finding]:
        unread: list[CheckpointError] = []
        for count, entry in enumerate(_entries(self._root, unread)):
            where = os.path.relpath(entry.path, self._root)
            if count >= MAX_FILES or len(self.judged) >= MAX_JUDGED:
                yield not_scanned(where, f"too many files: only {count:,} were checked")
                return
            if fs.abspath(entry.path) in self._known:
                continue
            try:
                yield from (add_part_name(finding, where) for finding in self._judge(entry))
            except CheckpointError as closed:  # a link leads into a closed directory
                unread.append(closed)
        for failure in unread:
            yield not_scanned(os.path.relpath(failure.path, self._root), failure.reason)

    def _judge(self, entry: os.DirEntry[str]) -> Iterator[Finding]:
        path = fs.abspath(entry.path)
        if entry.is_symlink() and not fs.realpath(path).startswith(self._bases):
            if _has_checkpoint_name(entry.name) or entry.is_dir():
                yield not_scanned(None, "a link that points outside the checkpoint; not followed")
            return
        is_read = path in self._own and os.path.dirname(path) == fs.abspath(self._root)
        if entry.is_file() and _is_loadable(entry, is_read=is_read):
            self.judged.add(path)
            yield from _safety_of(entry)


def _entries(root: str, unread: list[CheckpointError]) -> Iterator[os.DirEntry[str]]:
    """Yield the entries of a directory and its subdirectories; record unreadable ones."""
    pending = [root]
    while pending:
        try:
            entries = scan(pending.pop()).values()
        except NotFound:  # it vanished meanwhile
            continue
        except CheckpointError as failure:
            unread.append(failure)
            continue
        for entry in entries:
            if not entry.is_dir(follow_symlinks=False):
                yield entry
            elif entry.name not in _NEVER_ENTERED:
                pending.append(entry.path)


def _has_checkpoint_name(name: str) -> bool:
    """Return whether a file has a name that only checkpoints have."""
    from ckpttool.formats import PYTORCH_BIN

    lowered = name.lower()
    return lowered.endswith(_SUFFIXES) or (lowered.endswith(".bin") and lowered.startswith(PYTORCH_BIN))


def _is_loadable(entry: os.DirEntry[str], *, is_read: bool) -> bool:
    """Return whether a framework may load a file by itself, by its name and first bytes.

    ``is_read`` means that the checkpoint's own format reads it: if it is a program, it was judged as one.
    """
    if _has_checkpoint_name(entry.name):
        return True
    if not is_read and (entry.name in _PROGRAMS or entry.name.endswith(_PROGRAM_SUFFIX)):
        return True
    try:
        with fs.open_source(entry.path) as source:
            head = source.read(0, min(_HEAD_BYTES, source.size))
        if head.startswith(_CONTAINERS) or head.startswith(_TAR_MAGIC, _TAR_MAGIC_AT):
            return True
        if not is_read and head[:1] == b"{" and _PIR in head:
            return True
        if not may_begin_pickle(head):
            return False
        with fs.open_source(entry.path) as source:
            return has_torch_magic(head) or is_pickle(source, 0, source.size)
    except CheckpointError as failure:
        return not isinstance(failure, NotFound)


def _safety_of(entry: os.DirEntry[str]) -> Iterator[Finding]:
    """Yield safety findings of a file by all formats that recognise it."""
    from ckpttool.formats import matching_formats

    try:
        with Probe(entry.path) as probe:
            formats = matching_formats(probe)
        yield from readings_of(entry.path, formats)
    except NotFound:  # it vanished meanwhile
        return
    except CheckpointError as failure:
        yield not_scanned(None, failure.reason)
        return
    if not formats and _has_checkpoint_name(entry.name):
        yield not_scanned(None, "no format recognises it, so what loading it would run is unknown")


def add_part_name(finding: Finding, name: str) -> Finding:
    """Return a finding with the name of its file in front of its place."""
    return finding._replace(where=name if finding.where is None else f"{name}: {finding.where}")
