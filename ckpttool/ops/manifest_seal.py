"""Writes the manifest of a checkpoint that was just verified: digests of its files, and of its tensors."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, TypeVar

from ckpttool.containers.manifest import Line, dumps_manifest, read_manifest
from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.errors import CheckpointError, Unsupported, from_os_error
from ckpttool.core.result import document_of
from ckpttool.formats.interface import Unit
from ckpttool.formats.opening import open_unit
from ckpttool.ops.digests import (
    RequestedSums,
    digests_of_tensors,
    document_difference,
    dumps_digests,
    sums_of_files,
)
from ckpttool.ops.manifest import DIGESTS_SUFFIX, SUFFIX, base_of
from ckpttool.ops.verdict import CHECKS, Verification
from ckpttool.ops.verify import verify
from ckpttool.storage import fs
from ckpttool.storage.checksums import CRCS
from ckpttool.storage.directories import write_atomically
from ckpttool.storage.work import Advance, default_jobs, no_advance

T = TypeVar("T")
FileStates = tuple[tuple[str, int, int, int], ...]


@dataclass(frozen=True, slots=True)
class SealResult:
    """The result of writing a manifest.

    Attributes:
        files: Paths of the manifest and of the digests of the tensors, if both exist now.
        refused: Why nothing was written; None if both files exist.
        written: Whether they were written; if not, the same ones existed before.
        failed: Whether it was refused because a file could not be read or written.
    """

    files: tuple[str, ...] = ()
    refused: str | None = None
    written: bool = False
    failed: bool = False

    def document(self) -> dict[str, Any]:
        return document_of(self, "written", "files", "refused")


def verify_and_seal(
    unit: Unit,
    *,
    force: bool = False,
    strict: bool = False,
    jobs: int | None = None,
    advance: Advance = no_advance,
) -> tuple[Verification, SealResult]:
    """Verify a checkpoint and, if it is valid, write its manifest.

    Args:
        unit: The checkpoint.
        force: Whether a manifest with other content is replaced; the checkpoint isn't compared with it then.
        strict: Whether warnings fail.
        jobs: Number of threads.
        advance: Called with the bytes read, from any thread: those verified, those of the files and those
            of the tensors.
    """
    # The manifest must be of the bytes that were verified, though they are read again for it: the files'
    # states before the verification are compared with those after the last read.
    before = _file_states(unit)
    checks = tuple(check for check in CHECKS if check != "manifest" or not force)
    verdict = verify(unit, only=checks, strict=strict, jobs=jobs, advance=advance)
    if not verdict.is_valid:
        return verdict, SealResult(refused="it is not valid")
    assert unit.format is not None  # a unit that no format recognises isn't valid
    try:
        with open_unit(unit.format, unit) as checkpoint:
            return verdict, _write_manifest(checkpoint, unit, before, force, jobs or default_jobs(), advance)
    except CheckpointError as failure:
        return verdict, SealResult(refused=str(failure), failed=True)


def _file_states(unit: Unit) -> FileStates:
    """Return the statuses of a unit's files, without manifests, to notice changes."""
    found = []
    parts = Unit(unit.path, unit.parts, unit.format)
    for path in parts.files():
        try:
            status = fs.stat(path)
        except OSError:  # a dangling link; the verification reports it if it matters
            found.append((path, 0, 0, 0))
        else:
            found.append((path, status.st_ino, status.st_size, status.st_mtime_ns))
    return tuple(found)


def _write_manifest(
    checkpoint: Checkpoint, unit: Unit, before: FileStates, force: bool, jobs: int, advance: Advance
) -> SealResult:
    manifest, digests = base_of(checkpoint) + SUFFIX, base_of(checkpoint) + DIGESTS_SUFFIX
    directory = fs.abspath(os.path.dirname(manifest))
    files = {}
    for entry in checkpoint.files:
        if entry.path in (manifest, digests):
            continue
        name = os.path.relpath(fs.abspath(entry.path), directory).replace(os.sep, "/")
        if name.split("/")[0] == os.pardir:
            raise Unsupported(entry.path, "a file outside the manifest's directory")
        files[name] = entry.path
    sums = sums_of_files(dict.fromkeys(files.values(), RequestedSums(("sha256", *CRCS))), jobs, advance)
    of_files = {name: _require_read(sums[path]) for name, path in files.items()}
    lines = [Line(name, one.digests["sha256"]) for name, one in of_files.items()]

    tensors = list(checkpoint.values())
    of_tensors = digests_of_tensors(tensors, jobs, advance)
    for digest in of_tensors.values():
        _require_read(digest)
    text = dumps_digests(of_files, tensors, of_tensors)
    # The manifest is written last: after a crash between the two, the digests alone are harmless, while a
    # manifest without them couldn't name changed tensors.
    documents = (
        (digests, text, document_difference(digests, text)),
        (manifest, dumps_manifest(lines), _listing_difference(manifest, lines)),
    )
    if _file_states(unit) != before:
        return SealResult(refused="it changed while it was read")
    for path, _, difference in documents if not force else ():
        if difference:
            name = os.path.basename(path)
            return SealResult(refused=f"{name} already exists and {difference}; --force replaces it")
    to_write = [(path, text) for path, text, difference in documents if difference != ""]
    for path, text in to_write:
        try:
            write_atomically(path, text)
        except OSError as error:
            raise from_os_error(error, path) from error
    return SealResult((manifest, digests), written=bool(to_write))


def _require_read(found: T | CheckpointError) -> T:
    if isinstance(found, CheckpointError):
        raise found
    return found


def _listing_difference(path: str, lines: list[Line]) -> str | None:
    """Return how an existing manifest differs from the new lines, spelling aside; None if there is none."""
    if not fs.lexists(path):
        return None
    there = read_manifest(path)
    if there.malformed:
        return f"can't be read: {there.malformed[0].message}"
    old = {line.name: line.digest for line in there.lines}
    new = {line.name: line.digest for line in lines}
    differing = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
    return f"differs for {differing[0]}" if differing else ""
