"""The files in a checkpoint's directory that its format has no use for: somebody may load them as well.

``optimizer.pt`` beside a set of shards, a pickle among a SavedModel's assets: the name of one file decides
which format a directory has, and must not hide what the others could run. Every file that begins like what a
framework loads, or is called like it, is judged by its own formats.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from ckpttool.containers.pickle.pickle_detection import has_torch_magic, is_pickle
from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.errors import CheckpointError, NotFound
from ckpttool.core.report import Finding, warning
from ckpttool.formats.interface import Probe, scan
from ckpttool.formats.readings import CONTENTS, may_begin_pickle, readings_of
from ckpttool.storage import fs

MAX_FILES = 20_000
"""The most files of a directory that are looked at, those in its directories included."""
MAX_JUDGED = 2_000
"""The most of them that are judged: each may cost what a checkpoint costs."""

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
    """Let a checkpoint say what loading the other files in its directory, ``root``, could run."""
    own = frozenset(fs.abspath(file.path) for file in checkpoint.files)
    bystanders = _Bystanders(root, checkpoint.judged, own)
    findings = tuple(bystanders.findings())
    checkpoint.judged |= bystanders.judged
    if findings:
        checkpoint.safety = tuple(dict.fromkeys((*checkpoint.safety, *findings)))


def bystander_findings(root: str) -> tuple[Finding, ...]:
    """Return what loading any file in a directory by itself could run: it can't be opened as a whole."""
    return tuple(_Bystanders(root, frozenset(), frozenset()).findings())


class _Bystanders:
    """The files in a directory, without those that were judged already.

    Attributes:
        judged: Absolute paths of the files that were judged.
    """

    def __init__(self, root: str, known: frozenset[str], own: frozenset[str]) -> None:
        self.judged: set[str] = set()
        self._root, self._known, self._own = root, known, own
        # Files may lie in the directory, or beside what the files that were read are links to. The second is
        # how the cache of the Hugging Face hub looks: links from a snapshot to its blobs.
        read = known | {path for path in own if os.path.basename(path) in _PROGRAMS}
        blobs = {os.path.dirname(fs.realpath(path)) for path in read if fs.islink(path)}
        bases = (fs.realpath(root), *sorted(blobs))
        self._bases = tuple(path.rstrip(os.sep) + os.sep for path in bases)

    def findings(self) -> Iterator[Finding]:
        unread: list[CheckpointError] = []
        for count, entry in enumerate(_entries(self._root, unread)):
            where = os.path.relpath(entry.path, self._root)
            if count >= MAX_FILES or len(self.judged) >= MAX_JUDGED:
                yield warning("not-scanned", f"more files than are looked at: {count:,} were", where)
                return
            if fs.abspath(entry.path) in self._known:
                continue
            try:
                yield from (add_part_name(finding, where) for finding in self._judge(entry))
            except CheckpointError as closed:  # a link leads into a closed directory
                unread.append(closed)
        for failure in unread:
            yield warning("not-scanned", failure.reason, os.path.relpath(failure.path, self._root))

    def _judge(self, entry: os.DirEntry[str]) -> Iterator[Finding]:
        path = fs.abspath(entry.path)
        if entry.is_symlink() and not fs.realpath(path).startswith(self._bases):
            if _has_checkpoint_name(entry.name) or entry.is_dir():
                yield warning("not-scanned", "a link that leads out of the checkpoint; it was not followed")
            return
        is_read = path in self._own and os.path.dirname(path) == fs.abspath(self._root)
        if entry.is_file() and _is_loadable(entry, is_read=is_read):
            self.judged.add(path)
            yield from _safety_of(entry)


def _entries(root: str, unread: list[CheckpointError]) -> Iterator[os.DirEntry[str]]:
    """Yield what lies in a directory and in those inside; note those that can't be read."""
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
    """Tell whether a file has a name that only checkpoints have."""
    from ckpttool.formats import PYTORCH_BIN

    lowered = name.lower()
    return lowered.endswith(_SUFFIXES) or (lowered.endswith(".bin") and lowered.startswith(PYTORCH_BIN))


def _is_loadable(entry: os.DirEntry[str], *, is_read: bool) -> bool:
    """Tell from its name and its first bytes whether a framework may load a file by itself.

    ``is_read`` where the checkpoint's own format reads it: if it is a program, it was judged as one.
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
    """Yield what loading a file by itself could run, by all formats that recognise it."""
    from ckpttool.formats import matching_formats

    try:
        with Probe(entry.path) as probe:
            formats = matching_formats(probe)
        yield from readings_of(entry.path, formats)
    except NotFound:  # it vanished meanwhile
        return
    except CheckpointError as failure:
        yield warning("not-scanned", failure.reason)
        return
    if not formats and _has_checkpoint_name(entry.name):
        yield warning("not-scanned", "no format recognises it, so what loading it would run is not known")


def add_part_name(finding: Finding, name: str) -> Finding:
    """Return a finding that says in which file it is."""
    return finding._replace(where=name if finding.where is None else f"{name}: {finding.where}")
