"""Whether the files of a checkpoint are those that a manifest beside it lists.

Most formats carry no checksums, and none tells that a whole file is another. A manifest lies beside its
checkpoint, ``model.safetensors.sha256``; one ``SHA256SUMS`` for a whole directory counts too. Where digests
of the tensors lie beside it as well, ``model.safetensors.digests.json``, what changed is told by its name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.errors import CheckpointError
from ckpttool.core.report import Finding, counted, error, warning
from ckpttool.io import fs
from ckpttool.io.manifest import Manifest, read_manifest
from ckpttool.io.work import Advance, no_advance
from ckpttool.ops.digests import Digest, Digests, changed_tensors, digests_of_files, read_digests

SUFFIX = ".sha256"
DIGESTS_SUFFIX = ".digests.json"
SHARED = ("SHA256SUMS", "sha256sums.txt")
"""Names of manifests of a whole directory; what they say of other files is left alone."""

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
    paths = (base_of(checkpoint), *(entry.path for entry in checkpoint.files))
    found = {
        fs.abspath(path + SUFFIX): read_manifest(path + SUFFIX, of=path)
        for path in paths
        if fs.isfile(path + SUFFIX)
    }
    files = {fs.abspath(entry.path) for entry in checkpoint.files}
    for directory in dict.fromkeys(map(os.path.dirname, paths)):
        for path in (os.path.join(directory, name) for name in SHARED):
            if fs.isfile(path):
                shared = read_manifest(path).about(fs.abspath(checkpoint.path), files)
                if not files.isdisjoint(shared.digests):
                    found.setdefault(fs.abspath(path), shared)
    return list(found.values())


def has_digests(checkpoint: Checkpoint) -> bool:
    """Tell whether digests of the tensors lie beside a checkpoint."""
    return fs.isfile(base_of(checkpoint) + DIGESTS_SUFFIX)


def compare_manifests(
    checkpoint: Checkpoint, manifests: Sequence[Manifest], jobs: int, advance: Advance = no_advance
) -> tuple[list[Finding], str]:
    """Return how a checkpoint differs from what lies beside it, and what was compared, in words."""
    written, findings = None, [finding for manifest in manifests for finding in manifest.malformed]
    if has_digests(checkpoint):
        path = base_of(checkpoint) + DIGESTS_SUFFIX
        try:
            written = read_digests(path)
        except CheckpointError as failure:
            findings.append(error("manifest-malformed", failure.reason, os.path.basename(path)))
    stated = _stated_digests(manifests)
    own_files = {fs.abspath(entry.path) for entry in checkpoint.files}
    outside: list[str] = []
    missing: list[str] = []
    present: list[str] = []
    for path, one in stated.items():
        directory = os.path.join(fs.realpath(path[: len(path) - len(one.name)]), "")
        if path not in own_files and not fs.realpath(path).startswith(directory):
            outside.append(path)
        else:
            (present if fs.lexists(path) else missing).append(path)
    found = digests_of_files(present, jobs, advance=advance)
    changed = list(_changed_files(stated, found, written))
    leads_out = "a link that leads out of the manifest's directory; it was not opened"
    findings += [error("manifest-malformed", leads_out, stated[path].name) for path in outside]
    findings += [
        error("manifest-missing-file", "there is no such file", stated[path].name) for path in missing
    ]
    findings += changed
    if written is not None and (changed or not manifests):
        findings += changed_tensors(checkpoint, written, jobs, advance)
    if not manifests:
        return findings, counted(len(written.tensors), "tensor") if written else "digests that can't be read"
    # Manifests list neither themselves nor each other.
    listed = {fs.abspath(base_of(checkpoint)) + DIGESTS_SUFFIX}
    for manifest in manifests:
        listed |= {fs.abspath(manifest.path), *manifest.digests}
    for entry in checkpoint.files:
        if fs.abspath(entry.path) not in listed:
            findings.append(
                warning("manifest-unlisted-file", "no manifest lists it", os.path.basename(entry.path))
            )
    return findings, counted(len(found), "file")


class _StatedDigests(NamedTuple):
    """What manifests state of a file: its name in the first of them, and its digest; of several, all."""

    name: str
    digests: frozenset[str]


def _stated_digests(manifests: Iterable[Manifest]) -> dict[str, _StatedDigests]:
    stated: dict[str, _StatedDigests] = {}
    for manifest in manifests:
        directory = os.path.dirname(fs.abspath(manifest.path))
        for path, digests in manifest.digests.items():
            name, others = stated.get(path, (os.path.relpath(path, directory), frozenset[str]()))
            stated[path] = _StatedDigests(name, others | digests)
    return stated


def _changed_files(
    stated: Mapping[str, _StatedDigests], found: Mapping[str, Digest], written: Digests | None
) -> Iterator[Finding]:
    """Yield an error for each file whose digest is another."""
    for path, digest in found.items():
        name, digests = stated[path]
        if isinstance(digest, CheckpointError):
            yield error(digest.code, digest.reason, name)
        elif digests != {digest}:
            other = min(digests - {digest})
            was, nbytes = written.files.get(name) if written else None, fs.getsize(path)
            size = f"; it has {nbytes:,} bytes instead of {was:,}" if was not in (None, nbytes) else ""
            message = f"SHA-256 is {digest[:16]}… instead of {other[:16]}…{size}"
            yield error("manifest-mismatch", message, name)
