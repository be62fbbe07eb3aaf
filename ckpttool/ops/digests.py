"""Checksums of whole files and single tensors, and checksums recorded by stores, caches and downloads.

Files are read once, in constant memory, on several threads. Recorded checksums are compared without reading.
The Hugging Face Hub's cache names a file after its SHA-256 (Git LFS) or git's digest of it; the ETags that
are recorded next to a download to a directory are the same. Git LFS names its objects after their SHA-256.

Source: huggingface_hub ``file_download.py`` and ``_local_folder.py``; git-lfs ``docs/spec.md``.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

from ckpttool.containers.jsontext import parse_json
from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.errors import CheckpointError, DamagedCheckpoint, from_os_error
from ckpttool.core.readable import aligned_buffer
from ckpttool.core.report import Finding, error
from ckpttool.core.tensor import Tensor
from ckpttool.storage import fs
from ckpttool.storage.checksums import (
    BLOCK_BYTES,
    CRCS,
    TITLES,
    FileSums,
    StoredChecksums,
    crc_digits,
    crc_functions,
)
from ckpttool.storage.work import Advance, in_order, no_advance

_SHA256 = re.compile(r"[0-9a-f]{64}")
_GIT_SHA1 = re.compile(r"[0-9a-f]{40}")
_REPOSITORY = re.compile(r"(models|datasets|spaces|kernels)--.+")
_DOWNLOADS = os.path.join(".cache", "huggingface", "download")
_MAX_BYTES = 4096


class ContentAddress(NamedTuple):
    """Digest of a file, from its name in a cache or the record of its download.

    Attributes:
        algorithm: ``sha256`` or ``git-sha1``.
        digits: Hexadecimal digits.
        origin: Its source, in words.
    """

    algorithm: str
    digits: str
    origin: str


def content_address(path: str) -> ContentAddress | None:
    """Return the digest of a file that a cache or a download recorded; None if there is none."""
    if fs.place_of(path).keeps_checksums:  # a store has its own
        return None
    *above, name = fs.realpath(path).split(os.sep)
    if above[-1:] == ["blobs"] and _REPOSITORY.fullmatch("".join(above[-2:-1])):
        return _address(name, "its name in the Hugging Face cache")
    if above[-4:] == ["lfs", "objects", name[:2], name[2:4]] and _SHA256.fullmatch(name):
        return ContentAddress("sha256", name, "its name in Git LFS")
    return _download_address(fs.abspath(path))


def _address(digits: str, origin: str) -> ContentAddress | None:
    if _SHA256.fullmatch(digits):
        return ContentAddress("sha256", digits, origin)
    return ContentAddress("git-sha1", digits, origin) if _GIT_SHA1.fullmatch(digits) else None


def _download_address(path: str) -> ContentAddress | None:
    """Return the hub's digest of a file that was downloaded to a directory, unless it changed since."""
    # The record is in ``.cache`` of the directory that was downloaded to, which may be any of the file's
    # parents, under the file's path relative to that.
    directory, name = os.path.split(path)
    while True:
        note = os.path.join(directory, _DOWNLOADS, f"{name}.metadata")
        if os.path.isfile(note):
            break
        if directory == os.path.dirname(directory):
            return None
        directory, last = os.path.split(directory)
        name = os.path.join(last, name)
    try:
        with open(note, encoding="utf-8") as file:
            _, etag, written = file.read(_MAX_BYTES).split()
        # As in huggingface_hub, a file that is over a second newer than the record has changed.
        is_current = os.stat(path).st_mtime - 1 <= float(written)
    except (OSError, ValueError):
        return None
    return _address(etag, "recorded when it was downloaded from the Hugging Face Hub") if is_current else None


REQUESTS_AT_ONCE = 16
_SHOWN_DIGITS = 16


def stored_checksums(paths: Iterable[str]) -> dict[str, StoredChecksums]:
    """Return the checksums that stores keep of objects, by their URLs; files on a disk are left out.

    Raises:
        CheckpointError: A store can't be asked.
    """
    wanted = [path for path in paths if fs.place_of(path).keeps_checksums]
    return dict(zip(wanted, in_order(_ask, wanted, min(REQUESTS_AT_ONCE, len(wanted) or 1)), strict=True))


def _ask(url: str, check: Callable[[], None]) -> StoredChecksums:
    from ckpttool.storage.remote import checksums_of

    check()
    try:
        return checksums_of(url)
    except OSError as error:
        raise from_os_error(error, url) from error


def compare_sums(
    known: FileSums, stored: StoredChecksums, whose: str = "the store's"
) -> tuple[str | None, str | None]:
    """Return the algorithm of a checksum that both have, or None; and a difference in words, or None."""
    common = None
    for checksum in stored.checksums:
        value = known.value_like(checksum)
        if value is None:
            continue
        if value != checksum.digits:
            kept = f"{whose} {TITLES[checksum.algorithm]} is {shown_digits(checksum.digits)}"
            return checksum.algorithm, f"{kept} instead of {shown_digits(value)}"
        common = common or checksum.algorithm
    return common, None


def shown_digits(digits: str) -> str:
    """Return digits for a sentence, cut after the first 16."""
    return digits if len(digits) <= _SHOWN_DIGITS else f"{digits[:_SHOWN_DIGITS]}…"


def why_unproven(reasons: Mapping[str, str]) -> str:
    """Return a sentence on files that could not be compared, from the reason of each by its name."""
    name, reason = next(iter(reasons.items()))
    more = f" (and {len(reasons) - 1:,} more)" if len(reasons) > 1 else ""
    return f"{name}{more} could not be compared: {reason}"


SCHEMA = "ckpttool.digests/1"
_CHUNK_BYTES = 1 << 18
"""Bytes that are read and summed at once; they fit in a processor's own cache."""
MAX_BYTES = 1 << 27
"""Limit on the bytes of a document of digests; half a million tensors need less."""

Digest = str | CheckpointError
"""SHA-256 in hexadecimal digits, or why the bytes can't be read."""


class RequestedSums(NamedTuple):
    """Checksums of a file to compute; CRCs are of each block of ``block_bytes``."""

    algorithms: Collection[str]
    block_bytes: int = BLOCK_BYTES


def sums_of_files(
    wanted: Mapping[str, RequestedSums], jobs: int, advance: Advance = no_advance
) -> dict[str, FileSums | CheckpointError]:
    """Return checksums of files by their paths, or why they can't be read; each is read by one thread.

    Args:
        wanted: Checksums to compute, by path.
        jobs: Number of threads.
        advance: Called with the bytes read, from any thread.
    """
    sums = in_order(partial(_sums_of, advance), wanted.items(), jobs)
    return dict(zip(wanted, sums, strict=True))


def sha256_of_files(paths: Iterable[str], jobs: int, advance: Advance = no_advance) -> dict[str, FileSums]:
    """Return sums with the SHA-256 of each file, by its path.

    Raises:
        CheckpointError: One can't be read.
    """
    sums: dict[str, FileSums] = {}
    for path, one in sums_of_files(dict.fromkeys(paths, RequestedSums(("sha256",))), jobs, advance).items():
        if isinstance(one, CheckpointError):
            raise one
        sums[path] = one
    return sums


def digest_of_list(digests: Mapping[str, str]) -> str:
    """Return the digest of one file, or that of the output of ``sha256sum`` for several.

    Args:
        digests: SHA-256 of each, by its name.
    """
    if len(digests) == 1:
        return next(iter(digests.values()))
    import hashlib

    lines = "".join(f"{digest}  {name}\n" for name, digest in sorted(digests.items()))
    return hashlib.sha256(lines.encode("utf-8", "surrogateescape")).hexdigest()


def _sums_of(
    advance: Advance, item: tuple[str, RequestedSums], check: Callable[[], None]
) -> FileSums | CheckpointError:
    path, wanted = item
    try:
        return sums_of_file(
            path, wanted.algorithms, block_bytes=wanted.block_bytes, check=check, advance=advance
        )
    except CheckpointError as failure:
        return failure


def sums_of_file(
    path: str,
    algorithms: Collection[str],
    *,
    block_bytes: int = BLOCK_BYTES,
    check: Callable[[], None] = lambda: None,
    advance: Advance = no_advance,
) -> FileSums:
    """Return checksums of a file, which is read once; CRC-64/NVME only if a package for it is installed.

    Args:
        path: A file, or an object in a store.
        algorithms: Checksums to compute, of those in ``TITLES``.
        block_bytes: Bytes of a block that gets a CRC.
        check: Called for each chunk; raises if the result isn't needed any more.
        advance: Called with the bytes read.
    """
    # A chunk is read once, and each algorithm takes it from the processor's cache. CRCs begin again at each
    # block, as stores keep them of the parts of an upload; digests run through the file.
    with fs.open_source(path) as source:
        digests = {name: _new_digest(name, source.size) for name in algorithms if name not in CRCS}
        functions = {name: function for name, function in crc_functions().items() if name in algorithms}
        blocks: dict[str, list[int]] = {name: [] for name in functions}
        buffer = aligned_buffer(min(_CHUNK_BYTES, source.size))
        for at, nbytes in _chunks(source.size, block_bytes):
            chunk = buffer[:nbytes]
            check()
            source.read_into(at, chunk)
            for digest in digests.values():
                digest.update(chunk)
            for name, function in functions.items():
                if at % block_bytes == 0:
                    blocks[name].append(0)
                blocks[name][-1] = function(chunk, blocks[name][-1])
            advance(nbytes)
        return FileSums(
            source.size,
            {name: digest.hexdigest() for name, digest in digests.items()},
            {name: tuple(crcs) for name, crcs in blocks.items()},
            block_bytes,
        )


def _chunks(size: int, block_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield offset and size of each read; none crosses the end of a block."""
    for block in range(0, size, block_bytes):
        end = min(block + block_bytes, size)
        for at in range(block, end, _CHUNK_BYTES):
            yield at, min(_CHUNK_BYTES, end - at)


def _new_digest(algorithm: str, size: int) -> Any:
    import hashlib

    if algorithm == "sha256":
        return hashlib.sha256()
    if algorithm == "md5":
        return hashlib.md5(usedforsecurity=False)
    digest = hashlib.sha1(usedforsecurity=False)
    if algorithm == "git-sha1":
        digest.update(f"blob {size}\0".encode())
    return digest


def digests_of_tensors(
    tensors: Iterable[Tensor], jobs: int, advance: Advance = no_advance
) -> dict[str, Digest | None]:
    """Return the digest of the elements of each tensor by its name, in C order and little-endian.

    None represents a tensor whose values the checkpoint does not hold.
    """
    wanted = {tensor.name: tensor for tensor in tensors}
    owners = {name: tensor.shares_with for name, tensor in wanted.items() if tensor.shares_with in wanted}
    read = [tensor for name, tensor in wanted.items() if name not in owners and tensor.values is not None]
    # Tied tensors have the digest of their owner, which is read once.
    digests = in_order(partial(_digest_of, advance), read, jobs)
    by_name = {tensor.name: digest for tensor, digest in zip(read, digests, strict=True)}
    return {name: by_name.get(owners.get(name) or name) for name in wanted}


def _digest_of(advance: Advance, tensor: Tensor, check: Callable[[], None]) -> Digest:
    import hashlib

    running = hashlib.sha256()
    try:
        for block in tensor.blocks():
            check()
            running.update(block)
            advance(block.nbytes)
    except CheckpointError as failure:
        return failure
    return running.hexdigest()


# The document next to a checkpoint --------------------------------------------------------------------


class Digests(NamedTuple):
    """Recorded digests of a checkpoint.

    Attributes:
        files: Sizes and CRCs of its files by name; without CRCs if an earlier ckpttool wrote the document.
        tensors: Type, shape and SHA-256 of its tensors by name; without SHA-256 if it had no values.
    """

    files: Mapping[str, FileSums]
    tensors: Mapping[str, tuple[str, tuple[int, ...], str | None]]


def dumps_digests(
    files: Mapping[str, FileSums], tensors: Iterable[Tensor], digests: Mapping[str, Digest | None]
) -> bytes:
    """Return the text of the document, with a line per file and a line per tensor."""
    # The text is assembled line by line, so that ``manifest.write_last_read`` can insert a line after the
    # first two, and ``last_read`` finds it without parsing the rest.
    sums, lines = [], []
    for name, one in files.items():
        crcs = {key: [crc_digits(crc, key) for crc in blocks] for key, blocks in one.blocks.items()}
        file_entry = {"bytes": one.nbytes, "block_bytes": one.block_bytes, **crcs}
        sums.append(f"  {json.dumps(name)}: {json.dumps(file_entry)}")
    for tensor in tensors:
        entry = {
            "path": list(tensor.path),
            "dtype": tensor.dtype.name,
            "shape": list(tensor.shape),
            "sha256": digests[tensor.name],
        }
        lines.append(f"  {json.dumps(tensor.name)}: {json.dumps(entry)}")
    text = f'{{\n "schema": "{SCHEMA}",\n "files": {{\n' + ",\n".join(sums) + '\n },\n "tensors": {\n'
    return (text + ",\n".join(lines) + "\n }\n}\n").encode()


def read_digests(path: str) -> Digests:
    """Parse a document of digests."""
    return _digests_in(path, _read_document(path))


def _read_document(path: str) -> Any:
    with fs.open_source(path) as source:
        if source.size > MAX_BYTES:
            raise DamagedCheckpoint(path, f"{source.size:,} bytes", expected=f"at most {MAX_BYTES:,}")
        document = parse_json(path, source.read(0, source.size), "manifest", surrogates=True)
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise DamagedCheckpoint(path, "not a document of tensor digests", expected=f"schema {SCHEMA}")
    return document


def _digests_in(path: str, document: Any) -> Digests:
    try:
        files = {name: _file_sums(entry) for name, entry in document["files"].items()}
        tensors = {}
        for name, entry in document["tensors"].items():
            sha256 = entry["sha256"]
            if not isinstance(sha256, str | None):
                raise TypeError("not a digest")
            shape = tuple(map(_integer, entry["shape"]))
            tensors[name] = str(entry["dtype"]), shape, sha256
    except (AttributeError, KeyError, TypeError, ValueError) as failure:
        raise DamagedCheckpoint(path, "an entry is malformed", expected=f"schema {SCHEMA}") from failure
    return Digests(files, tensors)


def _file_sums(entry: Mapping[str, Any]) -> FileSums:
    nbytes, block_bytes = _integer(entry["bytes"]), _integer(entry.get("block_bytes", BLOCK_BYTES))
    if nbytes < 0 or block_bytes <= 0:
        raise ValueError("a negative size")
    blocks = {name: tuple(int(one, 16) for one in entry[name]) for name in CRCS if name in entry}
    if any(len(crcs) != -(-nbytes // block_bytes) for crcs in blocks.values()):
        raise ValueError("wrong number of blocks")
    return FileSums(nbytes, blocks=blocks, block_bytes=block_bytes)


def _integer(value: object) -> int:
    if type(value) is not int:
        raise TypeError("not an integer")
    return value


def document_difference(path: str, text: bytes) -> str | None:
    """Return how an existing document differs from a new one, in words; empty if they are equal.

    None if it doesn't exist, or lacks only CRCs, as earlier versions of ckpttool wrote none: it is replaced.
    """
    if not fs.lexists(path):
        return None
    try:
        there = _read_document(path)
        _digests_in(path, there)
    except CheckpointError as failure:
        return f"can't be read: {failure.reason}"
    there.pop("verified", None)  # the line of ``manifest.write_last_read``
    new = json.loads(text)
    old_crcs, new_crcs = _take_crcs(there), _take_crcs(new)
    if there != new or any(old_crcs[key] != new_crcs[key] for key in old_crcs.keys() & new_crcs.keys()):
        return "differs"
    return None if new_crcs.keys() - old_crcs.keys() else ""


def _take_crcs(document: Any) -> dict[tuple[str, str], Any]:
    """Take the CRCs out of a document, and return them by the file's name and the algorithm."""
    taken: dict[tuple[str, str], Any] = {}
    for name, entry in document["files"].items():
        entry.pop("block_bytes", None)
        taken |= {(name, algorithm): entry.pop(algorithm) for algorithm in CRCS if algorithm in entry}
    return taken


def changed_tensors(
    checkpoint: Checkpoint, stated: Digests, jobs: int, advance: Advance = no_advance
) -> list[Finding]:
    """Return an error for each tensor that differs from its recorded digest."""
    held = (checkpoint[name] for name in stated.tensors if name in checkpoint)
    digests = digests_of_tensors(held, jobs, advance)
    findings = []
    for name, (dtype, shape, sha256) in stated.tensors.items():
        tensor, digest = checkpoint.get(name), digests.get(name)
        if tensor is None:
            difference = "it is no longer in the checkpoint"
        elif isinstance(digest, CheckpointError):
            difference = f"it can't be read: {digest.reason}"
        elif (tensor.dtype.name, tensor.shape) != (dtype, shape):
            found = f"{tensor.dtype.name}{list(tensor.shape)}"
            difference = f"it is {found} instead of {dtype}{list(shape)}"
        elif digest != sha256:
            difference = "its elements differ from the recorded ones"
        else:
            continue
        findings.append(error("manifest-mismatch", difference, name))
    added = (name for name in checkpoint if name not in stated.tensors)
    findings += [error("manifest-mismatch", "it is not in the manifest", name) for name in added]
    return findings
