"""Compares the files of a checkpoint with manifests and caches, and keeps the time of its last full read.

Most formats have no checksums, and none shows that a whole file was replaced. A manifest is next to its
checkpoint, ``model.safetensors.sha256``; a ``SHA256SUMS`` for a whole directory counts too. With digests of
the tensors next to it, ``model.safetensors.digests.json``, changed tensors are named. The first lines of that
document have the time of the last full read, which is read and replaced without the other lines. Caches name
files by their digests (Hugging Face, Git LFS).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ckpttool.containers.manifest import Manifest, read_manifest
from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.errors import CheckpointError, error_of, from_os_error
from ckpttool.core.report import Finding, error, warning
from ckpttool.core.text import counted
from ckpttool.formats.interface import Unit
from ckpttool.ops.digests import (
    ContentAddress,
    Digests,
    RequestedSums,
    changed_tensors,
    compare_sums,
    content_address,
    read_digests,
    shown_digits,
    stored_checksums,
    sums_of_files,
)
from ckpttool.storage import fs
from ckpttool.storage.checksums import TITLES, Checksum, FileSums
from ckpttool.storage.directories import write_atomically
from ckpttool.storage.work import Advance, no_advance

SUFFIX = ".sha256"
DIGESTS_SUFFIX = ".digests.json"
UNLISTED = "manifest-unlisted-file"
"""Finding for a file that no manifest lists."""
SHARED = ("SHA256SUMS", "sha256sums.txt")
"""Names of manifests of a whole directory; lines about other files than the checkpoint's are ignored."""

_CRC32C = Checksum("crc32c", "")  # only the algorithm counts
_FLUID_SERIAL = re.compile(r"checkpoint_\d+")


def base_of(checkpoint: Checkpoint) -> str:
    """Return the prefix of the paths of a checkpoint's own manifest and digests."""
    return base_at(checkpoint.path, checkpoint.format)


def base_at(path: str, format: str | None) -> str:
    """Return the prefix of the paths of the manifest and digests of a checkpoint that isn't open."""
    # They are next to the checkpoint, except for Paddle Fluid: its loader fails on any other name next to its
    # numbered directories, so there they are hidden files inside.
    bare = path.rstrip(os.sep) or path
    if os.path.basename(bare) in ("", os.curdir, os.pardir):
        bare = fs.abspath(bare)
    name = os.path.basename(bare)
    is_serial = format == "fluid" and fs.isdir(bare) and _FLUID_SERIAL.fullmatch(name)
    return os.path.join(bare, f".{name}") if is_serial else bare


def manifests_of(checkpoint: Checkpoint) -> list[Manifest]:
    """Return the manifests that list files of a checkpoint: its own, those of its files, the directory's."""
    return _manifests_at(checkpoint.path, base_of(checkpoint), [entry.path for entry in checkpoint.files])


def _manifests_at(path: str, base: str, parts: Sequence[str]) -> list[Manifest]:
    paths = (base, *parts)
    found = {
        fs.abspath(one + SUFFIX): read_manifest(one + SUFFIX, lone_digest_file=one)
        for one in paths
        if _is_manifest(one + SUFFIX)
    }
    # A list of a whole directory counts if it has a file of the checkpoint. If none of its lines can be
    # parsed, it may have had one, and is reported as malformed.
    files = set(map(fs.abspath, parts))
    for directory in dict.fromkeys(map(os.path.dirname, paths)):
        for listing in (os.path.join(directory, name) for name in SHARED):
            if _is_manifest(listing):
                listed = read_manifest(listing)
                shared = listed.about(fs.abspath(path), files)
                is_unread = listed.malformed and not listed.digests  # it may list any file
                if is_unread or not files.isdisjoint(shared.digests):
                    found.setdefault(fs.abspath(listing), shared)
    return list(found.values())


def _is_manifest(path: str) -> bool:
    return fs.exists(path) and fs.isfile(path)  # ``exists`` raises if that can't be known


def has_digests(checkpoint: Checkpoint) -> bool:
    """Return whether digests of the tensors are next to a checkpoint."""
    return fs.isfile(base_of(checkpoint) + DIGESTS_SUFFIX)


def has_statements(checkpoint: Checkpoint, manifests: Sequence[Manifest]) -> bool:
    """Return whether a manifest, digests or a name in a cache states checksums of a checkpoint's files."""
    if manifests or has_digests(checkpoint):
        return True
    return any(content_address(entry.path) is not None for entry in checkpoint.files)


def compare_manifests(
    checkpoint: Checkpoint,
    manifests: Sequence[Manifest],
    jobs: int,
    advance: Advance = no_advance,
    *,
    reads_objects: bool = True,
) -> tuple[Sequence[Finding], str, Mapping[str, str]]:
    """Compare a checkpoint with the manifests and digests next to it, and with its names in a cache.

    Objects in a store are compared by the checksums that the store keeps. Only if it keeps none that help are
    they read, and that only if ``reads_objects``.

    Returns:
        The differences; the compared items, in words; and why others could not be compared, by file name.
    """
    # The cheapest comparison first: checksums that a store keeps need no reading. Only files that these don't
    # decide are read, each once for all its algorithms. Tensors are compared if a file differs, to name the
    # changed ones, or if only their digests exist.
    findings = [finding for manifest in manifests for finding in manifest.malformed]
    base, parts = base_of(checkpoint), [entry.path for entry in checkpoint.files]
    written = _read_digests(base, findings)
    stated = _statements(base, parts, manifests, written)
    present = list(_present_files(checkpoint, stated, findings))
    in_store = [path for path in present if fs.place_of(path).keeps_checksums]
    differing, unproven = _compare_stored(stated, in_store)
    unread = {} if reads_objects else unproven
    by_store = [path for path in in_store if path not in unproven]
    to_read = [path for path in present if path not in by_store and path not in unread]
    found = sums_of_files(
        {path: RequestedSums(stated[path].algorithms) for path in to_read}, jobs, advance=advance
    )
    changed = [*differing, *_changed_files(stated, found)]
    findings += changed
    may_read = reads_objects or fs.place_of(checkpoint.path).reads_are_free
    if written is not None and may_read and (changed or not stated):
        findings += changed_tensors(checkpoint, written, jobs, advance)
    if not stated:
        what = counted(len(written.tensors), "tensor") if written else "digests that can't be read"
        return findings, what, {}
    findings += _unlisted_files(checkpoint, manifests) if manifests else ()
    compared = counted(len(present) - len(unread), "file")
    if by_store:
        compared += (
            f", {'' if len(by_store) == len(present) else f'{len(by_store):,} '}by the store's checksums"
        )
    return findings, compared, {stated[path].name: why for path, why in unread.items()}


def recorded_checksums(path: str, base: str, parts: Sequence[str]) -> dict[str, FileSums]:
    """Return the checksums of a checkpoint's files in manifests and caches, by path.

    On this machine, a manifest that is older than a file is ignored: it was written for an earlier version.

    Args:
        path: The checkpoint.
        base: Prefix of the paths of its own manifest and digests.
        parts: Its files.
    """
    # Only a file of which all manifests state the same is of use: contradictory ones prove nothing. Checksums
    # by content address hold even if the manifest is older than the file.
    manifests, written = _manifests_at(path, base, parts), _read_digests(base, [])
    documents = [manifest.path for manifest in manifests] + ([base + DIGESTS_SUFFIX] if written else [])
    oldest = min((fs.stat(document).st_mtime_ns for document in documents), default=0)
    stated = _statements(base, parts, manifests, written)
    found = {}
    for part in parts:
        one = stated.get(fs.abspath(part))
        if one is None or len(one.sums) != 1:  # manifests contradict each other
            continue
        known = {one.address.algorithm: one.address.digits} if one.address else {}
        is_older = not fs.place_of(part).keeps_checksums and fs.stat(part).st_mtime_ns > oldest
        sums = FileSums(None) if is_older else one.sums[0]
        found[part] = replace(sums, digests={**known, **sums.digests})
    return found


def _read_digests(base: str, findings: list[Finding]) -> Digests | None:
    """Return the tensor digests next to a checkpoint, or add a finding if they can't be read."""
    path = base + DIGESTS_SUFFIX
    if not fs.isfile(path):
        return None
    try:
        return read_digests(path)
    except CheckpointError as failure:
        findings.append(error("manifest-malformed", failure.reason, os.path.basename(path)))
        return None


@dataclass(slots=True)
class _Stated:
    """Statements about a file: its name in the first manifest, all SHA-256, CRCs, and its content address."""

    name: str
    digests: set[str] = field(default_factory=set)
    crcs: FileSums = field(default_factory=lambda: FileSums(None))
    address: ContentAddress | None = None

    @property
    def algorithms(self) -> frozenset[str]:
        """Return the algorithms of the checksums by which the file is compared."""
        wanted = {self.address.algorithm} if self.address else set()
        return frozenset(wanted | ({"sha256"} if self.digests else set()) or {"crc32c"})

    @property
    def sums(self) -> list[FileSums]:
        """Return all stated checksums; manifests may contradict each other."""
        return [replace(self.crcs, digests={"sha256": one}) for one in self.digests] or [self.crcs]


def _statements(
    base: str, parts: Iterable[str], manifests: Iterable[Manifest], written: Digests | None
) -> dict[str, _Stated]:
    """Return the statements about files, by path."""
    stated: dict[str, _Stated] = {}
    for manifest in manifests:
        directory = os.path.dirname(fs.abspath(manifest.path))
        for path, digests in manifest.digests.items():
            name = os.path.relpath(path, directory)
            stated.setdefault(path, _Stated(name)).digests.update(digests)
    directory = os.path.dirname(fs.abspath(base))
    for name, sums in written.files.items() if written else ():
        path = fs.normpath(os.path.join(directory, name))
        if "crc32c" in sums.blocks and fs.place_of(path).keeps_checksums:  # else the tensors are compared
            stated.setdefault(path, _Stated(name))
        if path in stated:
            stated[path].crcs = sums
    for part in parts:
        if (address := content_address(part)) is not None:
            path = fs.abspath(part)
            stated.setdefault(path, _Stated(os.path.basename(path))).address = address
    return stated


def _present_files(
    checkpoint: Checkpoint, stated: Mapping[str, _Stated], findings: list[Finding]
) -> Iterator[str]:
    """Yield the files that can be compared, and add an error for each of the others."""
    # A manifest from a download may list ``../../secret`` or a symlink: no file outside of its directory is
    # opened, except the checkpoint's own, which the user named.
    own_files = {fs.abspath(entry.path) for entry in checkpoint.files}
    leads_out = "a link that points outside the manifest's directory; not opened"
    outside, missing = [], []
    for path, one in stated.items():
        directory = os.path.join(fs.realpath(path[: len(path) - len(one.name)]), "")
        if path not in own_files and not fs.realpath(path).startswith(directory):
            outside.append(error("manifest-malformed", leads_out, one.name))
        elif not fs.lexists(path):
            missing.append(error("manifest-missing-file", "no such file", one.name))
        else:
            yield path
    findings += [*outside, *missing]


def _compare_stored(
    stated: Mapping[str, _Stated], urls: Sequence[str]
) -> tuple[list[Finding], dict[str, str]]:
    """Return which objects differ by their stores' checksums, and why others can't be compared, by URL."""
    findings, unproven = [], {}
    for url, stored in stored_checksums(urls).items():
        one = stated[url]
        compared = [compare_sums(sums, stored) for sums in one.sums]
        differences = [difference for _, difference in compared if difference]
        if one.crcs.nbytes not in (None, nbytes := fs.getsize(url)):
            differences.insert(0, f"it has {nbytes:,} bytes instead of {one.crcs.nbytes:,}")
        if differences:
            findings.append(error("manifest-mismatch", differences[0], one.name))
        elif not all(algorithm for algorithm, _ in compared):
            unproven[url] = stored.reason or "the manifest has none of the checksums that the store keeps"
    return findings, unproven


def _changed_files(
    stated: Mapping[str, _Stated], found: Mapping[str, FileSums | CheckpointError]
) -> Iterator[Finding]:
    """Yield an error for each file that contradicts its statements."""
    for path, sums in found.items():
        one = stated[path]
        if isinstance(sums, CheckpointError):
            yield error_of(sums, one.name)
            continue
        was, size = one.crcs.nbytes, ""
        if was not in (None, sums.nbytes):
            size = f"; it has {sums.nbytes:,} bytes instead of {was:,}"
        sha256, crc32c = sums.digests.get("sha256", ""), sums.value_like(_CRC32C)
        if one.digests and one.digests != {sha256}:
            other = min(one.digests - {sha256})
            message = f"SHA-256 is {shown_digits(sha256)} instead of {shown_digits(other)}{size}"
            yield error("manifest-mismatch", message, one.name)
        elif not (one.digests or one.address) and crc32c != (crc := one.crcs.value_like(_CRC32C)):
            yield error("manifest-mismatch", f"CRC-32C is {crc32c} instead of {crc}{size}", one.name)
        address = one.address
        if address is not None and (digest := sums.digests[address.algorithm]) != address.digits:
            instead = f"{shown_digits(address.digits)} ({address.origin})"
            message = f"{TITLES[address.algorithm]} is {shown_digits(digest)} instead of {instead}"
            yield error("content-mismatch", message, one.name)


def _unlisted_files(checkpoint: Checkpoint, manifests: Sequence[Manifest]) -> Iterator[Finding]:
    # Manifests list neither themselves nor each other.
    listed = {fs.abspath(base_of(checkpoint)) + DIGESTS_SUFFIX}
    for manifest in manifests:
        listed |= {fs.abspath(manifest.path), *manifest.digests}
    for entry in checkpoint.files:
        if fs.abspath(entry.path) not in listed:
            yield warning(UNLISTED, "no manifest lists it", os.path.basename(entry.path))


# A document of digests begins with its schema, and may have a line with the time of the last full read:
#     {
#      "schema": "ckpttool.digests/1",
#      "verified": {"at": "2026-01-02T03:04:05Z", "depth": "full"},
# The line is read and replaced without parsing the rest, which has a line for each tensor.
_HEAD_BYTES = 512
_HEAD = re.compile(
    rb'(\{\n "schema": "ckpttool\.digests/\d+",\n)( "verified": \{"at": "([0-9TZ:-]{1,32})"[^\n]*\n)?'
)


def record_of(unit: Unit) -> str | None:
    """Return the path of the digests next to a checkpoint on this machine; None if it has none."""
    if not fs.place_of(unit.path).opens_by_path:  # the document is replaced on disk
        return None
    record = base_at(unit.path, unit.format.name if unit.format else None) + DIGESTS_SUFFIX
    return record if fs.isfile(record) else None


def last_read(record: str) -> str | None:
    """Return when a checkpoint was last read in full: ``2026-01-02T03:04:05Z``, or an empty text for never.

    None if the document can't be read, or isn't as ``--write-manifest`` writes it.
    """
    try:
        with fs.open_source(record) as source:
            match = _HEAD.match(source.read(0, min(_HEAD_BYTES, source.size)))
    except CheckpointError:
        return None
    return None if match is None else (match[3] or b"").decode()


def write_last_read(record: str, moment: str) -> None:
    """Record in the digests that a checkpoint was read in full at a moment, and is valid.

    Raises:
        CheckpointError: The document can't be read or replaced.
    """
    with fs.open_source(record) as source:
        text = source.read(0, source.size)
    line = f' "verified": {{"at": "{moment}", "depth": "full"}},\n'.encode()
    try:
        write_atomically(record, _HEAD.sub(lambda match: match[1] + line, text, count=1))
    except OSError as error:
        raise from_os_error(error, record) from error
