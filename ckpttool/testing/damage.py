"""Damage to copies of checkpoints, one place at a time, and its outcome."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ckpttool.core.errors import CheckpointError
from ckpttool.core.tensor import Tensor
from ckpttool.ops.verdict import Verification
from ckpttool.ops.verify import verify

DAMAGES = 120
"""Number of places to damage in a file, or in all files of a directory together: half of them at the edges of
scanned ranges and at the ends of the file, the others at random. The file's name and size are the seed, to
damage fixtures of one format at different places."""
EVERY_BYTE = 4
"""A file is damaged at every byte if it has at most this many bytes for each place."""
EDGE = 32
SECONDS = 20.0
"""Time limit for one damaged file; a bounded reader takes milliseconds."""

Outcome = Verification | CheckpointError


def copied(path: Path, into: Path) -> Path:
    """Return a copy of a fixture, with its name."""
    target = into / path.name
    if path.is_dir():
        shutil.copytree(path, target)
    else:
        shutil.copyfile(path, target)
    return target


def files_of(path: Path) -> list[Path]:
    """Return the files of a checkpoint: itself, or all in its directory."""
    return sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]


def places(file: Path, edges: set[int], damages: int = DAMAGES) -> list[int]:
    """Return the offsets to damage in a file: all of a small one, edges and others of a larger one."""
    # Readers fail at borders: half of the offsets are at the ends of scanned ranges and of the file. The seed
    # makes a failure reproducible.
    size = file.stat().st_size
    if size <= EVERY_BYTE * damages:
        return list(range(size))
    chance = random.Random(f"{file.name} {size}")
    ends = {*range(EDGE), *range(size - EDGE, size)}
    near = sorted(place for place in edges | ends if 0 <= place < size)
    chosen = chance.sample(near, min(len(near), damages // 2))
    return sorted({0, size - 1, *chosen, *chance.sample(range(size), damages // 2)})


@contextmanager
def flipped(file: Path, offset: int, bit: int) -> Iterator[None]:
    """Flip one bit of a file, and restore it."""
    with open(file, "r+b", buffering=0) as stream:
        stream.seek(offset)
        (byte,) = stream.read(1)
        stream.seek(offset)
        stream.write(bytes([byte ^ 1 << bit]))
        yield
        stream.seek(offset)
        stream.write(bytes([byte]))


@contextmanager
def overwritten(file: Path, offset: int, data: bytes) -> Iterator[None]:
    """Overwrite bytes of a file, and restore them."""
    with open(file, "r+b", buffering=0) as stream:
        stream.seek(offset)
        before = stream.read(len(data))
        stream.seek(offset)
        stream.write(data)
        yield
        stream.seek(offset)
        stream.write(before)


def nan_of(tensor: Tensor) -> bytes | None:
    """Return the stored bytes of a NaN of a tensor's dtype; None if it has none."""
    code = tensor.dtype.float_code
    if code is None or tensor.dtype.bits < 8:
        return None
    return code.last_nan.to_bytes(code.word_bytes, tensor.byteorder)


def outcome_of(path: Path | str, damage: str) -> Outcome:
    """Return the verdict on a damaged checkpoint, or the ``CheckpointError`` instead of one.

    Raises:
        AssertionError: Another exception was raised, or it took too long.
    """
    started = time.monotonic()
    try:
        outcome: Outcome = verify(path, jobs=1)
    except CheckpointError as error:
        outcome = error
    # A reader of hostile files must never end in another exception, so that callers can catch this one.
    except Exception as error:
        raise AssertionError(f"{damage}: {type(error).__name__}: {error}") from error
    seconds = time.monotonic() - started
    assert seconds < SECONDS, f"{damage}: {seconds:.0f} s"
    return outcome


def is_valid(outcome: Outcome) -> bool:
    """Return whether the outcome is a verdict without errors."""
    return isinstance(outcome, Verification) and outcome.is_valid
