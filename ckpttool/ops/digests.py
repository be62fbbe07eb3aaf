"""SHA-256 of whole files and of single tensors: each is read once, in constant memory, on several threads."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.errors import CheckpointError, DamagedCheckpoint
from ckpttool.core.readable import aligned_buffer
from ckpttool.core.report import Finding, error
from ckpttool.core.tensor import Tensor
from ckpttool.io import fs
from ckpttool.io.jsontext import parse_json
from ckpttool.io.work import Advance, in_order, no_advance

if TYPE_CHECKING:
    from concurrent.futures import Executor

SCHEMA = "ckpttool.digests/1"
MAX_BYTES = 1 << 27
"""The most bytes of per-tensor digests that are read; half a million tensors have fewer."""

_BLOCK_BYTES = 1 << 20

T = TypeVar("T")
Digest = str | CheckpointError
"""SHA-256 in hexadecimal digits, or why the bytes can't be read."""


def digests_of_files(
    paths: Iterable[str], jobs: int, executor: Executor | None = None, advance: Advance = no_advance
) -> dict[str, Digest]:
    """Return the digest of each file by its path; every file is read by one thread.

    Instead of threads here, an executor may do it, wherever it has the files; then nobody is told the bytes.
    """

    wanted = list(dict.fromkeys(paths))
    digests = in_order(partial(_digest_of, _blocks_of_file, advance), wanted, jobs, executor)
    return dict(zip(wanted, digests, strict=True))


def _blocks_of_file(path: str) -> Iterator[memoryview]:
    with fs.open_source(path) as source:
        buffer = aligned_buffer(min(_BLOCK_BYTES, source.size))
        for start in range(0, source.size, _BLOCK_BYTES):
            block = buffer[: min(_BLOCK_BYTES, source.size - start)]
            source.read_into(start, block)
            yield block


def digests_of_tensors(
    tensors: Iterable[Tensor], jobs: int, advance: Advance = no_advance
) -> dict[str, Digest | None]:
    """Return the digest of the elements of each tensor by its name, in C order and little-endian.

    None stands for a tensor whose values the checkpoint does not hold.
    """
    wanted = {tensor.name: tensor for tensor in tensors}
    owners = {name: tensor.shares_with for name, tensor in wanted.items() if tensor.shares_with in wanted}
    read = [tensor for name, tensor in wanted.items() if name not in owners and tensor.values is not None]
    digests = in_order(partial(_digest_of, Tensor.blocks, advance), read, jobs)
    by_name = {tensor.name: digest for tensor, digest in zip(read, digests, strict=True)}
    return {name: by_name.get(owners.get(name) or name) for name in wanted}


def _digest_of(
    blocks: Callable[[T], Iterator[memoryview]], advance: Advance, item: T, check: Callable[[], None]
) -> Digest:
    import hashlib

    running = hashlib.sha256()
    try:
        for block in blocks(item):
            check()
            running.update(block)
            advance(block.nbytes)
    except CheckpointError as failure:
        return failure
    return running.hexdigest()


# The document beside a checkpoint -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TensorDigest:
    """What was written down of a tensor; ``sha256`` is None where the checkpoint held no values of it."""

    dtype: str
    shape: tuple[int, ...]
    sha256: str | None


@dataclass(frozen=True, slots=True)
class Digests:
    """What was written down of a checkpoint: sizes of files in bytes by name, and its tensors by name."""

    files: Mapping[str, int]
    tensors: Mapping[str, TensorDigest]


def dumps_digests(
    files: Mapping[str, int], tensors: Iterable[Tensor], digests: Mapping[str, Digest | None]
) -> bytes:
    """Return the text of the document, with a line a tensor."""
    sizes = {name: {"bytes": nbytes} for name, nbytes in files.items()}
    lines = []
    for tensor in tensors:
        entry = {
            "path": list(tensor.path),
            "dtype": tensor.dtype.name,
            "shape": list(tensor.shape),
            "sha256": digests[tensor.name],
        }
        lines.append(f"  {json.dumps(tensor.name)}: {json.dumps(entry)}")
    text = f'{{\n "schema": "{SCHEMA}",\n "files": {json.dumps(sizes)},\n "tensors": {{\n'
    return (text + ",\n".join(lines) + "\n }\n}\n").encode()


def read_digests(path: str) -> Digests:
    """Return what a document says."""
    with fs.open_source(path) as source:
        if source.size > MAX_BYTES:
            raise DamagedCheckpoint(path, f"{source.size:,} bytes", expected=f"at most {MAX_BYTES:,}")
        document = parse_json(path, source.read(0, source.size), "manifest", surrogates=True)
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise DamagedCheckpoint(path, "no digests of tensors", expected=f"schema {SCHEMA}")
    try:
        files = {name: _integer(entry["bytes"]) for name, entry in document["files"].items()}
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


def _integer(value: object) -> int:
    if type(value) is not int:
        raise TypeError("no whole number")
    return value


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
