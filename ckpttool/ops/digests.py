"""Checksums of whole files and of single tensors, each read once, in constant memory, on several threads."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

from ckpttool.containers.jsontext import parse_json
from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.errors import CheckpointError, DamagedCheckpoint
from ckpttool.core.readable import aligned_buffer
from ckpttool.core.report import Finding, error
from ckpttool.core.tensor import Tensor
from ckpttool.storage import fs
from ckpttool.storage.checksums import BLOCK_BYTES, CRCS, FileSums
from ckpttool.storage.crc import crc_digits, crc_functions
from ckpttool.storage.work import Advance, in_order, no_advance

SCHEMA = "ckpttool.digests/1"
_CHUNK_BYTES = 1 << 18
"""What is read and summed at once: it has to stay in a processor's own cache."""
MAX_BYTES = 1 << 27
"""The most bytes of per-tensor digests that are read; half a million tensors have fewer."""

Digest = str | CheckpointError
"""SHA-256 in hexadecimal digits, or why the bytes can't be read."""


class Wanted(NamedTuple):
    """Which checksums of a file to compute; ``block_bytes`` is of how many bytes there is a CRC."""

    algorithms: Collection[str]
    block_bytes: int = BLOCK_BYTES


def sums_of_files(
    wanted: Mapping[str, Wanted], jobs: int, advance: Advance = no_advance
) -> dict[str, FileSums | CheckpointError]:
    """Return checksums of files by their paths, or why they can't be read; each is read by one thread.

    Args:
        wanted: Which, for each path.
        jobs: How many threads read.
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
    for path, one in sums_of_files(dict.fromkeys(paths, Wanted(("sha256",))), jobs, advance).items():
        if isinstance(one, CheckpointError):
            raise one
        sums[path] = one
    return sums


def digest_of_list(digests: Mapping[str, str]) -> str:
    """Return one digest of files: that of the only one, or that of what ``sha256sum`` prints of several.

    Args:
        digests: SHA-256 of each, by its name.
    """
    if len(digests) == 1:
        return next(iter(digests.values()))
    import hashlib

    lines = "".join(f"{digest}  {name}\n" for name, digest in sorted(digests.items()))
    return hashlib.sha256(lines.encode("utf-8", "surrogateescape")).hexdigest()


def _sums_of(
    advance: Advance, item: tuple[str, Wanted], check: Callable[[], None]
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
    """Return checksums of a file, which is read once; CRC-64/NVME only if a package is there that does it.

    Args:
        path: A file, or an object in a store.
        algorithms: Which, of those in ``TITLES``.
        block_bytes: Of how many bytes there is a CRC.
        check: Called now and then; it ends the work that nobody waits for.
        advance: Called with the bytes read.
    """
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
    """Yield where to read next and how much, so that nothing crosses the end of a block."""
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

    None stands for a tensor whose values the checkpoint does not hold.
    """
    wanted = {tensor.name: tensor for tensor in tensors}
    owners = {name: tensor.shares_with for name, tensor in wanted.items() if tensor.shares_with in wanted}
    read = [tensor for name, tensor in wanted.items() if name not in owners and tensor.values is not None]
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


# The document beside a checkpoint -------------------------------------------------------------------


class TensorDigest(NamedTuple):
    """What was written down of a tensor; ``sha256`` is None where the checkpoint held no values of it."""

    dtype: str
    shape: tuple[int, ...]
    sha256: str | None


class Digests(NamedTuple):
    """What was written down of a checkpoint: sizes and CRCs of its files by name, and its tensors by name.

    Files whose manifest is of an earlier ckpttool have no CRCs.
    """

    files: Mapping[str, FileSums]
    tensors: Mapping[str, TensorDigest]


def dumps_digests(
    files: Mapping[str, FileSums], tensors: Iterable[Tensor], digests: Mapping[str, Digest | None]
) -> bytes:
    """Return the text of the document, with a line a file and a line a tensor."""
    sums = [f"  {json.dumps(name)}: {json.dumps(_file_entry(one))}" for name, one in files.items()]
    lines = []
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


def _file_entry(sums: FileSums) -> dict[str, Any]:
    crcs = {name: [crc_digits(crc, name) for crc in blocks] for name, blocks in sums.blocks.items()}
    return {"bytes": sums.nbytes, "block_bytes": sums.block_bytes, **crcs}


def read_digests(path: str) -> Digests:
    """Return what a document says."""
    return _digests_in(path, _read_document(path))


def _read_document(path: str) -> Any:
    with fs.open_source(path) as source:
        if source.size > MAX_BYTES:
            raise DamagedCheckpoint(path, f"{source.size:,} bytes", expected=f"at most {MAX_BYTES:,}")
        document = parse_json(path, source.read(0, source.size), "manifest", surrogates=True)
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise DamagedCheckpoint(path, "no digests of tensors", expected=f"schema {SCHEMA}")
    return document


def _digests_in(path: str, document: Any) -> Digests:
    try:
        files = {name: _file_sums(entry) for name, entry in document["files"].items()}
        tensors = {}
        for name, entry in document["tensors"].items():
            sha256 = entry["sha256"]
            if not isinstance(sha256, str | None):
                raise TypeError("no digest")
            shape = tuple(map(_integer, entry["shape"]))
            tensors[name] = TensorDigest(str(entry["dtype"]), shape, sha256)
    except (AttributeError, KeyError, TypeError, ValueError) as failure:
        raise DamagedCheckpoint(path, "an entry is malformed", expected=f"schema {SCHEMA}") from failure
    return Digests(files, tensors)


def _file_sums(entry: Mapping[str, Any]) -> FileSums:
    nbytes, block_bytes = _integer(entry["bytes"]), _integer(entry.get("block_bytes", BLOCK_BYTES))
    if nbytes < 0 or block_bytes <= 0:
        raise ValueError("a size below zero")
    blocks = {name: tuple(int(one, 16) for one in entry[name]) for name in CRCS if name in entry}
    if any(len(crcs) != -(-nbytes // block_bytes) for crcs in blocks.values()):
        raise ValueError("another number of blocks than the file has")
    return FileSums(nbytes, blocks=blocks, block_bytes=block_bytes)


def _integer(value: object) -> int:
    if type(value) is not int:
        raise TypeError("no whole number")
    return value


def document_difference(path: str, text: bytes) -> str | None:
    """Return how a document that is there differs from one to be written; empty if it says as much.

    None stands for one that is not there, or says less: an earlier ckpttool wrote no CRCs.
    """
    if not fs.lexists(path):
        return None
    try:
        there = _read_document(path)
        _digests_in(path, there)
    except CheckpointError as failure:
        return f"can't be read: {failure.reason}"
    there.pop("verified", None)  # what ``last_read`` has added
    new = json.loads(text)
    old_crcs, new_crcs = _take_crcs(there), _take_crcs(new)
    if there != new or any(old_crcs[key] != new_crcs[key] for key in old_crcs.keys() & new_crcs.keys()):
        return "says something else"
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
    """Return an error for each tensor that is not what was written down."""
    held = (checkpoint[name] for name in stated.tensors if name in checkpoint)
    digests = digests_of_tensors(held, jobs, advance)
    findings = []
    for name, was in stated.tensors.items():
        tensor, digest = checkpoint.get(name), digests.get(name)
        if tensor is None:
            difference = "it is not in the checkpoint any more"
        elif isinstance(digest, CheckpointError):
            difference = f"it can't be read: {digest.reason}"
        elif (tensor.dtype.name, tensor.shape) != (was.dtype, was.shape):
            difference = (
                f"it is {tensor.dtype.name}{list(tensor.shape)} instead of {was.dtype}{list(was.shape)}"
            )
        elif digest != was.sha256:
            difference = "its elements are not those that were written down"
        else:
            continue
        findings.append(error("manifest-mismatch", difference, name))
    added = (name for name in checkpoint if name not in stated.tensors)
    findings += [error("manifest-mismatch", "the manifest knows no such tensor", name) for name in added]
    return findings
