"""Compares the files of a checkpoint with those of a copy, byte for byte, by the cheapest proof.

First the sizes are compared. Then checksums that a store keeps of an object are compared with those of the
other store, or with those that a manifest or a cache has for the other file. Only the remaining files are
read, to compute a checksum that is known of the other side. If none is known, the ETag of an object may be
the MD5 of its bytes.

Two equal manifests prove nothing, nor does a manifest of the copy next to a file that was read. A manifest in
a store counts only if the store's own checksum confirms it.
"""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.errors import CheckpointError, NotFound, from_os_error
from ckpttool.core.report import Finding, error
from ckpttool.core.text import counted
from ckpttool.ops.digests import RequestedSums, compare_sums, shown_digits, stored_checksums, sums_of_files
from ckpttool.ops.manifest import base_of, recorded_checksums
from ckpttool.storage import fs
from ckpttool.storage.checksums import (
    BLOCK_BYTES,
    CRCS,
    TITLES,
    Checksum,
    FileSums,
    StoredChecksums,
    content_tag_like,
    crc_functions,
)
from ckpttool.storage.work import Advance, no_advance

_COMPARED_BYTES = 1 << 25
"""Bytes of each file that are compared at a time."""
_STRONGEST_FIRST = ("sha256", "git-sha1", "sha1", "crc64nvme", "md5", "crc32c", "crc32")


@dataclass(frozen=True, slots=True)
class FileComparison:
    """Result of comparing a file with its copy; one of ``proof``, ``difference`` and ``unproven`` is set.

    Attributes:
        path: Path of the file.
        copy: Path of its copy, which may be missing.
        proof: Kind of proof that both are the same.
        difference: How they differ.
        unproven: Why they could not be compared.
        is_missing: Whether the copy is missing.
        error: Error that prevented the comparison.
    """

    path: str
    copy: str
    proof: str | None = None
    difference: str | None = None
    unproven: str | None = None
    is_missing: bool = False
    error: CheckpointError | None = None


def copy_findings(compared: Sequence[FileComparison]) -> tuple[list[Finding], str, dict[str, str]]:
    """Return an error for each different file, the proof for the others, and the unproven files."""
    findings = [
        error("copy-missing-file" if one.is_missing else "copy-mismatch", one.difference, one.copy)
        for one in compared
        if one.difference
    ]
    proofs = Counter(one.proof for one in compared if one.proof)
    found = "; ".join(f"{counted(count, 'file')} by {proof}" for proof, count in proofs.items())
    return (
        findings,
        found or counted(len(compared), "file"),
        {one.copy: one.unproven for one in compared if one.unproven},
    )


def compare_with_copy(
    checkpoint: Checkpoint,
    copy: str,
    jobs: int,
    advance: Advance = no_advance,
    *,
    reads_objects: bool = True,
) -> list[FileComparison]:
    """Compare each file of a checkpoint with that in a copy of it.

    Args:
        checkpoint: The checkpoint.
        copy: Path of the copy; for a file, also of its directory.
        jobs: Number of threads.
        advance: Called with the bytes read.
        reads_objects: Whether objects in a store may be read if no checksum proves their content.
    """
    place = _CopyPlace(checkpoint.path, copy)
    parts = [entry.path for entry in checkpoint.files]
    pairs = {part: place.of(part) for part in parts}
    for directory in dict.fromkeys(map(fs.dirname, [place.of(base_of(checkpoint)), *pairs.values()])):
        fs.place_of(directory).prefetch_listing(directory)
    stated = recorded_checksums(checkpoint.path, base_of(checkpoint), parts)
    stated |= recorded_checksums(place.path, place.of(base_of(checkpoint)), list(pairs.values()))
    return compare_files(pairs, stated, jobs, advance, reads_objects=reads_objects)


class _CopyPlace:
    """Maps the files of a checkpoint to those of its copy."""

    def __init__(self, path: str, copy: str) -> None:
        fs.place_of(copy).require_askable(copy)
        self._origin = fs.abspath(path)
        is_inside = fs.isdir(copy) and not fs.isdir(path)
        bare = copy.rstrip("/") or copy
        self.path = os.path.join(bare, os.path.basename(self._origin)) if is_inside else bare
        self._is_directory = fs.isdir(path)

    def of(self, part: str) -> str:
        """Return the path in the copy of a file in or next to the checkpoint."""
        # A file next to a checkpoint, such as a shard or a manifest, is next to its copy, too. Stores
        # separate names by slashes on all systems.
        part = fs.abspath(part)
        if part == self._origin:
            return self.path
        if self._is_directory and part.startswith(os.path.join(self._origin, "")):
            return os.path.join(
                self.path, part[len(self._origin) :].lstrip("/" + os.sep).replace(os.sep, "/")
            )
        relative = os.path.relpath(part, os.path.dirname(self._origin)).replace(os.sep, "/")
        return fs.normpath(os.path.join(os.path.dirname(self.path), relative))


def compare_files(
    pairs: Mapping[str, str],
    stated: Mapping[str, FileSums],
    jobs: int,
    advance: Advance = no_advance,
    *,
    reads_objects: bool = True,
) -> list[FileComparison]:
    """Compare files with their copies.

    Args:
        pairs: Path of the copy of each file.
        stated: Checksums that manifests and caches have of any of them, by path.
        jobs: Number of threads.
        advance: Called with the bytes read.
        reads_objects: Whether objects in a store may be read if no checksum proves their content.
    """
    # Proofs in the order of their cost: sizes; checksums known of both sides; reading one side to compute a
    # checksum of the other; ETags that are digests; reading both. Reads of all pairs are done together, in
    # threads.
    results = {path: _compare_sizes(path, copy) for path, copy in pairs.items()}
    undecided = {path: copy for path, copy in pairs.items() if results[path] is None}
    both = [*undecided, *undecided.values()]
    stored = stored_checksums(dict.fromkeys(both))
    to_read: dict[str, RequestedSums] = {}
    for path, copy in undecided.items():
        pair = _Pair(path, copy, stated, stored)
        result = pair.compare_unread()
        if result is None and not pair.plan_reading_one(to_read, reads_objects=reads_objects):
            for one in (path, copy):
                fs.place_of(one).ask_again(one)
            result = _compare_tags(path, copy, advance)
            result = result or pair.plan_reading_both(to_read, reads_objects=reads_objects)
        results[path] = result
    read = sums_of_files(to_read, jobs, advance=advance)
    for path, copy in undecided.items():
        if results[path] is None:
            results[path] = _Pair(path, copy, stated, stored).compare_read(read)
    return [one for one in results.values() if one is not None]


def is_same(path: str, copy: str, advance: Advance = no_advance) -> bool:
    """Return whether a file and its copy have the same bytes.

    Raises:
        CheckpointError: That can't be proven, as one can't be read.
    """
    # ETags first: a listing has them, whereas checksums take a request for each object.
    compared = _compare_sizes(path, copy) or _compare_tags(path, copy, advance)
    if compared is None and any(fs.place_of(one).keeps_checksums for one in (path, copy)):
        compared = compare_files({path: copy}, {}, 1, advance)[0]
    compared = compared or _compare_bytes(path, copy, advance)
    if compared.error is not None:
        raise compared.error
    if compared.unproven is not None:
        raise CheckpointError(copy, f"it can't be compared: {compared.unproven}")
    return compared.difference is None


def _compare_sizes(path: str, copy: str) -> FileComparison | None:
    try:
        size = _file_size(copy)
        was = _file_size(path)
    except CheckpointError as error:
        return FileComparison(path, copy, unproven=error.reason, error=error)
    if size is None:
        return FileComparison(path, copy, difference="no such file", is_missing=True)
    if was is None:
        gone = NotFound(path, "no such file")
        return FileComparison(path, copy, unproven=gone.reason, error=gone)
    if was != size:
        return FileComparison(path, copy, difference=f"it has {size:,} bytes instead of {was:,}")
    return None


def _file_size(path: str) -> int | None:
    """Return the size of a file in bytes; None if there is none."""
    try:
        status = fs.stat(path)
    except OSError as error:
        if fs.is_absence(error):
            return None
        raise from_os_error(error, path) from error
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def _compare_tags(path: str, copy: str, advance: Advance) -> FileComparison | None:
    """Compare by ETags that are digests of the bytes; None if that proves nothing. No object is read."""
    from ckpttool.storage.stores import part_size

    # S3's ETag is the MD5 of the bytes, or for an upload in parts that of the parts' MD5s. Between two
    # stores, equal ETags are enough; a file on a disk is read for an ETag like the other. Different ETags
    # prove nothing: the sizes of the parts may have been others.
    try:
        with fs.open_source(path) as source, fs.open_source(copy) as target:
            if source.content_tag and source.content_tag == target.content_tag:
                return FileComparison(path, copy, proof=f"{TITLES['md5']} (store, store)")
            for own, other, sides in ((source, target, "read, store"), (target, source, "store, read")):
                is_known = other.version and not own.version
                tag = content_tag_like(other.version, other.size, part_size(other.size)) if is_known else None
                if tag is None:
                    continue
                for block in own.in_blocks(fs.place_of(own.path).block_bytes):
                    tag.update(block)
                if tag.value == other.version.strip('"'):
                    advance(own.size)
                    return FileComparison(path, copy, proof=f"{TITLES['md5']} ({sides})")
    except CheckpointError as error:
        return FileComparison(path, copy, unproven=error.reason, error=error)
    return None


def _compare_bytes(path: str, copy: str, advance: Advance) -> FileComparison:
    try:
        with fs.open_source(path) as source, fs.open_source(copy) as target:
            if source.size != target.size:  # one of them was changed since
                return FileComparison(path, copy, difference="its size differs")
            others = target.in_blocks(_COMPARED_BYTES)
            for one, other in zip(source.in_blocks(_COMPARED_BYTES), others, strict=True):
                if one != other:
                    return FileComparison(path, copy, difference="its bytes differ")
                advance(len(one))
    except CheckpointError as error:
        return FileComparison(path, copy, unproven=error.reason, error=error)
    return FileComparison(path, copy, proof="byte comparison (read, read)")


class _Pair:
    """A file and its copy of the same size, and their known checksums."""

    def __init__(
        self, path: str, copy: str, stated: Mapping[str, FileSums], stored: Mapping[str, StoredChecksums]
    ) -> None:
        self._paths = path, copy
        self._stored = [stored.get(one, StoredChecksums()) for one in self._paths]
        self._stated = [
            _confirmed_sums(one, stated.get(one, FileSums(None)), kept)
            for one, kept in zip(self._paths, self._stored, strict=True)
        ]

    def compare_unread(self) -> FileComparison | None:
        """Compare the checksums of stores and statements; None if that proves nothing."""
        # Stores keep checksums of whole objects or of the parts of an upload. Those of parts are comparable
        # only if both objects were uploaded in the same parts.
        first, second = self._stored
        common = [
            (one, other)
            for one in sorted(first.checksums, key=_weakness)
            for other in second.checksums
            if (one.algorithm, one.parts) == (other.algorithm, other.parts)
        ]
        for one, other in common:  # any difference counts, even if a stronger checksum is equal
            if one.digits != other.digits:
                return self._different(f"its {TITLES[one.algorithm]} is {_instead(other.digits, one.digits)}")
        if common:
            return self._same(f"{TITLES[common[0][0].algorithm]} (store, store)")
        for known, kept, sides in (
            (self._stated[0], second, "manifest, store"),
            (self._stated[1], first, "store, manifest"),
        ):
            algorithm, difference = compare_sums(known, kept)
            if difference:
                return self._different(difference)
            if algorithm:
                return self._same(f"{TITLES[algorithm]} ({sides})")
        return None

    def _can_read(self, *, reads_objects: bool) -> list[bool]:
        return [reads_objects or fs.place_of(path).reads_are_free for path in self._paths]

    def plan_reading_one(self, to_read: dict[str, RequestedSums], *, reads_objects: bool) -> bool:
        """Add the file to read whose checksum is known on the other side; return False if there is none."""
        can_read = self._can_read(reads_objects=reads_objects)
        for side, other in ((0, 1), (1, 0)):
            computable = [one for one in self._stored[other].checksums if _can_compute(one)]
            if can_read[side] and computable:
                wanted = min(computable, key=_weakness)
                block_bytes = wanted.parts[0] if wanted.parts else BLOCK_BYTES
                to_read[self._paths[side]] = RequestedSums((wanted.algorithm,), block_bytes)
                return True
        if can_read[1] and (known := self._stated[0].digests):
            to_read[self._paths[1]] = RequestedSums(tuple(known))
            return True
        return False

    def plan_reading_both(
        self, to_read: dict[str, RequestedSums], *, reads_objects: bool
    ) -> FileComparison | None:
        """Add both files; return the reason if one can't be read."""
        if all(self._can_read(reads_objects=reads_objects)):
            to_read |= dict.fromkeys(self._paths, RequestedSums(("sha256",)))
            return None
        reason = next((one.reason for one in self._stored if one.reason), "no common checksum is known")
        return FileComparison(*self._paths, unproven=reason)

    def compare_read(self, read: Mapping[str, FileSums | CheckpointError]) -> FileComparison:
        """Compare the checksums that were read with the known ones of the other side."""
        found = [read.get(path) for path in self._paths]
        for one in found:
            if isinstance(one, CheckpointError):
                return FileComparison(*self._paths, unproven=one.reason, error=one)
        sums = [one for one in found if isinstance(one, FileSums)]
        if len(sums) == 2:
            mine, other = (one.digests["sha256"] for one in sums)
            if mine == other:
                return self._same("SHA-256 (read, read)")
            return self._different(f"its SHA-256 is {_instead(other, mine)}")
        side = 0 if found[0] is not None else 1
        algorithm, difference = compare_sums(sums[0], self._stored[1 - side])
        how = "store"
        if algorithm is None:
            digests = self._stated[1 - side].digests.items()
            stated = StoredChecksums(tuple(Checksum(name, digits) for name, digits in digests))
            (algorithm, difference), how = compare_sums(sums[0], stated, "the manifest's"), "manifest"
        if difference:
            return self._different(difference)
        if algorithm is None:
            return FileComparison(*self._paths, unproven="no common checksum is known")
        sides = f"read, {how}" if side == 0 else f"{how}, read"
        return self._same(f"{TITLES[algorithm]} ({sides})")

    def _same(self, proof: str) -> FileComparison:
        return FileComparison(*self._paths, proof=proof)

    def _different(self, difference: str) -> FileComparison:
        return FileComparison(*self._paths, difference=difference)


def _confirmed_sums(path: str, stated: FileSums, stored: StoredChecksums) -> FileSums:
    """Return the stated checksums of a file; of an object only those that agree with the store's."""
    # A manifest in a store may be of an earlier object of the name: times there are those of uploads, so
    # nothing else shows that it is stale.
    algorithm, difference = compare_sums(stated, stored)
    is_confirmed = algorithm is not None and difference is None
    return stated if is_confirmed or not fs.place_of(path).keeps_checksums else FileSums(None)


def _instead(digits: str, other: str) -> str:
    return f"{shown_digits(digits)} instead of {shown_digits(other)}"


def _weakness(checksum: Checksum) -> int:
    """Return a sort key that puts the strongest algorithm first."""
    return _STRONGEST_FIRST.index(checksum.algorithm)


def _can_compute(checksum: Checksum) -> bool:
    if checksum.algorithm not in CRCS:
        return not checksum.parts
    return checksum.algorithm in crc_functions() and len(set(checksum.parts[:-1])) <= 1
