"""Whether the files of a checkpoint are those that a manifest beside it lists.

Most formats carry no checksums, and none tells that a whole file is another. A manifest lies beside its
checkpoint, ``model.safetensors.sha256``; one ``SHA256SUMS`` for a whole directory counts too. Where digests
of the tensors lie beside it as well, ``model.safetensors.digests.json``, what changed is told by its name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ckpttool.containers.manifest import Manifest, read_manifest
from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.errors import CheckpointError
from ckpttool.core.report import Finding, error, warning
from ckpttool.core.text import counted
from ckpttool.ops.digests import Digests, Wanted, changed_tensors, read_digests, sums_of_files
from ckpttool.ops.stored_sums import compare_sums, shown_digits, stored_checksums
from ckpttool.storage import fs
from ckpttool.storage.checksums import TITLES, Checksum, FileSums
from ckpttool.storage.content_addresses import ContentAddress, content_address
from ckpttool.storage.work import Advance, no_advance

SUFFIX = ".sha256"
DIGESTS_SUFFIX = ".digests.json"
UNLISTED = "manifest-unlisted-file"
"""The finding of a file that no manifest speaks of: they cover the others only."""
SHARED = ("SHA256SUMS", "sha256sums.txt")
"""Names of manifests of a whole directory; what they say of other files is left alone."""

_CRC32C = Checksum("crc32c", "")
_FLUID_SERIAL = re.compile(r"checkpoint_\d+")


def base_of(checkpoint: Checkpoint) -> str:
    """Return the path that the names of a checkpoint's own manifest and digests begin with."""
    return base_at(checkpoint.path, checkpoint.format)


def base_at(path: str, format: str | None) -> str:
    """Return that path of a checkpoint that isn't open.

    They lie beside the checkpoint, with one exception: the loader of Paddle Fluid fails on any name beside
    its numbered directories that is none of them, so there they lie inside, hidden.
    """
    bare = path.rstrip(os.sep) or path
    if os.path.basename(bare) in ("", os.curdir, os.pardir):
        bare = fs.abspath(bare)
    name = os.path.basename(bare)
    is_serial = format == "fluid" and fs.isdir(bare) and _FLUID_SERIAL.fullmatch(name)
    return os.path.join(bare, f".{name}") if is_serial else bare


def manifests_of(checkpoint: Checkpoint) -> list[Manifest]:
    """Return the manifests that speak of a checkpoint: its own, those of its files, the directory's."""
    return _manifests_at(checkpoint.path, base_of(checkpoint), [entry.path for entry in checkpoint.files])


def _manifests_at(path: str, base: str, parts: Sequence[str]) -> list[Manifest]:
    paths = (base, *parts)
    found = {
        fs.abspath(one + SUFFIX): read_manifest(one + SUFFIX, of=one)
        for one in paths
        if _is_manifest(one + SUFFIX)
    }
    files = set(map(fs.abspath, parts))
    for directory in dict.fromkeys(map(os.path.dirname, paths)):
        for listing in (os.path.join(directory, name) for name in SHARED):
            if _is_manifest(listing):
                listed = read_manifest(listing)
                shared = listed.about(fs.abspath(path), files)
                is_unread = listed.malformed and not listed.digests  # it may speak of any
                if is_unread or not files.isdisjoint(shared.digests):
                    found.setdefault(fs.abspath(listing), shared)
    return list(found.values())


def _is_manifest(path: str) -> bool:
    return fs.exists(path) and fs.isfile(path)  # whether it is there is never a guess


def has_digests(checkpoint: Checkpoint) -> bool:
    """Tell whether digests of the tensors lie beside a checkpoint."""
    return fs.isfile(base_of(checkpoint) + DIGESTS_SUFFIX)


def has_statements(checkpoint: Checkpoint, manifests: Sequence[Manifest]) -> bool:
    """Tell whether anything says what the files of a checkpoint should be."""
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
    """Compare a checkpoint with the manifests and digests beside it, and with its names in a cache.

    Objects in a store are compared by the checksums that the store keeps. Only if it keeps none that help are
    they read, and that only if ``reads_objects``.

    Returns:
        The differences; the compared items, in words; and why others could not be compared, by file name.
    """
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
    found = sums_of_files({path: Wanted(stated[path].algorithms) for path in to_read}, jobs, advance=advance)
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


def stated_sums(path: str, base: str, parts: Sequence[str]) -> dict[str, FileSums]:
    """Return what manifests and caches say of the files of a checkpoint, by their paths.

    On this machine, a manifest that is older than a file says nothing of it: it was written of another one.

    Args:
        path: The checkpoint.
        base: What the names of its own manifest and digests begin with.
        parts: Its files.
    """
    manifests, written = _manifests_at(path, base, parts), _read_digests(base, [])
    documents = [manifest.path for manifest in manifests] + ([base + DIGESTS_SUFFIX] if written else [])
    oldest = min((fs.stat(document).st_mtime_ns for document in documents), default=0)
    stated = _statements(base, parts, manifests, written)
    found = {}
    for part in parts:
        one = stated.get(fs.abspath(part))
        if one is None or len(one.sums) != 1:  # manifests that contradict each other say nothing
            continue
        known = {one.address.algorithm: one.address.digits} if one.address else {}
        is_older = not fs.place_of(part).keeps_checksums and fs.stat(part).st_mtime_ns > oldest
        sums = FileSums(None) if is_older else one.sums[0]
        found[part] = replace(sums, digests={**known, **sums.digests})
    return found


def _read_digests(base: str, findings: list[Finding]) -> Digests | None:
    """Return what is written beside a checkpoint of its tensors, or add why it can't be read."""
    path = base + DIGESTS_SUFFIX
    if not fs.isfile(path):
        return None
    try:
        return read_digests(path)
    except CheckpointError as failure:
        findings.append(error("manifest-malformed", failure.reason, os.path.basename(path)))
        return None


@dataclass(slots=True)
class _Statement:
    """What is said of a file: its name in the first manifest, the SHA-256 in all, CRCs and its address."""

    name: str
    digests: set[str] = field(default_factory=set)
    crcs: FileSums = field(default_factory=lambda: FileSums(None))
    address: ContentAddress | None = None

    @property
    def algorithms(self) -> frozenset[str]:
        """Return which checksums have to be computed to compare the file."""
        wanted = {self.address.algorithm} if self.address else set()
        return frozenset(wanted | ({"sha256"} if self.digests else set()) or {"crc32c"})

    @property
    def sums(self) -> list[FileSums]:
        """Return what the file should be; where manifests contradict each other, it can't be all of it."""
        return [replace(self.crcs, digests={"sha256": one}) for one in self.digests] or [self.crcs]


def _statements(
    base: str, parts: Iterable[str], manifests: Iterable[Manifest], written: Digests | None
) -> dict[str, _Statement]:
    """Return what is said of files, by path."""
    stated: dict[str, _Statement] = {}
    for manifest in manifests:
        directory = os.path.dirname(fs.abspath(manifest.path))
        for path, digests in manifest.digests.items():
            name = os.path.relpath(path, directory)
            stated.setdefault(path, _Statement(name)).digests.update(digests)
    directory = os.path.dirname(fs.abspath(base))
    for name, sums in written.files.items() if written else ():
        path = fs.normpath(os.path.join(directory, name))
        if "crc32c" in sums.blocks and fs.place_of(path).keeps_checksums:  # else the tensors are compared
            stated.setdefault(path, _Statement(name))
        if path in stated:
            stated[path].crcs = sums
    for part in parts:
        if (address := content_address(part)) is not None:
            path = fs.abspath(part)
            stated.setdefault(path, _Statement(os.path.basename(path))).address = address
    return stated


def _present_files(
    checkpoint: Checkpoint, stated: Mapping[str, _Statement], findings: list[Finding]
) -> Iterator[str]:
    """Yield the files that can be compared, and add an error for each of the others."""
    own_files = {fs.abspath(entry.path) for entry in checkpoint.files}
    leads_out = "a link that leads out of the manifest's directory; it was not opened"
    outside, missing = [], []
    for path, one in stated.items():
        directory = os.path.join(fs.realpath(path[: len(path) - len(one.name)]), "")
        if path not in own_files and not fs.realpath(path).startswith(directory):
            outside.append(error("manifest-malformed", leads_out, one.name))
        elif not fs.lexists(path):
            missing.append(error("manifest-missing-file", "there is no such file", one.name))
        else:
            yield path
    findings += [*outside, *missing]


def _compare_stored(
    stated: Mapping[str, _Statement], urls: Sequence[str]
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
    stated: Mapping[str, _Statement], found: Mapping[str, FileSums | CheckpointError]
) -> Iterator[Finding]:
    """Yield an error for each file that isn't what is said of it."""
    for path, sums in found.items():
        one = stated[path]
        if isinstance(sums, CheckpointError):
            yield error(sums.code, sums.reason, one.name)
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
            instead = f"{shown_digits(address.digits)}, {address.origin}"
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
