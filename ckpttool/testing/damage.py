"""Checkpoints that are damaged, one place at a time, and what comes of it."""

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
"""At how many places a file is damaged, or all files of a directory together: half of them where ranges that
are scanned begin and end, and at the file's ends. The others are drawn by the file's name and size, so that
fixtures of one format are damaged at different ones."""
EVERY_BYTE = 4
"""A file of up to so many bytes for each of its places is damaged at every byte."""
EDGE = 32
SECONDS = 20.0
"""The most that one damaged file may take; what is bounded takes milliseconds."""

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
    """Return a checkpoint's files: itself, or all in its directory."""
    return sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]


def places(file: Path, edges: set[int], damages: int = DAMAGES) -> list[int]:
    """Return the offsets at which a file is damaged: all of a small one; edges and others of a larger."""
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
    """Flip one bit of a file, and flip it back."""
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
    """Write bytes over those of a file, and put these back."""
    with open(file, "r+b", buffering=0) as stream:
        stream.seek(offset)
        before = stream.read(len(data))
        stream.seek(offset)
        stream.write(data)
        yield
        stream.seek(offset)
        stream.write(before)


def nan_of(tensor: Tensor) -> bytes | None:
    """Return the bytes of a NaN of a tensor's type as its file holds it; None where there is none."""
    code = tensor.dtype.float_code
    if code is None or tensor.dtype.bits < 8:
        return None
    return code.last_nan.to_bytes(code.word_bytes, tensor.byteorder)


def outcome_of(path: Path | str, damage: str) -> Outcome:
    """Return the verdict on a damaged checkpoint, or the error that says why there is none.

    Raises:
        AssertionError: Anything else came out of it, or it took too long.
    """
    started = time.monotonic()
    try:
        outcome: Outcome = verify(path, jobs=1)
    except CheckpointError as error:
        outcome = error
    except Exception as error:
        raise AssertionError(f"{damage}: {type(error).__name__}: {error}") from error
    seconds = time.monotonic() - started
    assert seconds < SECONDS, f"{damage}: {seconds:.0f} s"
    return outcome


def is_valid(outcome: Outcome) -> bool:
    """Tell whether a verdict is that nothing is wrong."""
    return isinstance(outcome, Verification) and outcome.is_valid
